"""What a batched function takes and gives back: arrays in any nesting, one example or rows, and who shares a batch with whom."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import sys
import weakref
from typing import NamedTuple

import numpy as np
import pytest
from batched_calls import FULL, Model, held, rows, waiting
from callers import start, together
from conftest import back, need, to

import weft
from weft.errors import CancelledError, FailedPreconditionError, InvalidArgumentError
from weft.kernels import small


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


@dataclasses.dataclass
class Observation:
    image: np.ndarray
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: np.ndarray
    twice: np.ndarray = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", self.x * 2)


class Pair(NamedTuple):
    left: np.ndarray
    right: np.ndarray


def call_all(policy, calls):
    """The results of calls that share a batch: each a tuple of arguments and a dict of named ones."""
    callers = together([lambda a=a, k=k: policy(*a, **k) for a, k in calls])
    return [caller.answer() for caller in callers]


# --- what goes in and comes out ---


class TestResults:
    def test_a_lone_call_runs_at_once(self):
        model = Model()
        policy = weft.batched(model, max_wait=60.0)
        assert policy(rows(1, 2)).tolist() == [[2], [4]]
        assert model.sizes == [2]

    def test_everyone_gets_its_rows_in_every_library(self, library):
        policy = weft.batched(lambda x: x * 2, max_batch_size=6, **FULL)
        given = [np.arange(n * 2.0).reshape(n, 2) + 10 * n for n in (1, 2, 3)]
        got = call_all(policy, [((to(library, x),), {}) for x in given])
        for x, y in zip(given, got, strict=True):
            assert type(y).__module__.split(".")[0] in (library, "jaxlib")
            np.testing.assert_array_equal(back(y), x * 2)
        assert policy.statistics().sizes == {6: 1}

    def test_several_arguments_by_place_and_by_name(self):
        policy = weft.batched(lambda a, b, *, c: (a + b, {"c": c}), max_batch_size=4, **FULL)
        calls = [((rows(i, i), rows(10, 10)), {"c": rows(100 * i, 7)}) for i in (1, 2)]
        for i, (total, named) in enumerate(call_all(policy, calls), 1):
            assert total.ravel().tolist() == [10 + i, 10 + i]
            assert named["c"].ravel().tolist() == [100 * i, 7]

    def test_dicts_lists_named_tuples_and_dataclasses(self):
        def f(tree):
            return Pair(tree["p"].left + 1, [tree["o"].image, tree["o"].name, None])

        policy = weft.batched(f, max_batch_size=3, **FULL)
        trees = [{"p": Pair(rows(i), rows(0)), "o": Observation(rows(i * 5), "a")} for i in range(3)]
        for i, got in enumerate(call_all(policy, [((tree,), {}) for tree in trees])):
            assert type(got) is Pair
            assert got.left.tolist() == [[i + 1]]
            assert got.right[0].tolist() == [[i * 5]]
            assert got.right[1:] == ["a", None]

    def test_a_frozen_dataclass_with_slots(self):
        policy = weft.batched(lambda o: Frozen(o.x + o.twice), max_batch_size=2, **FULL)
        got = call_all(policy, [((Frozen(rows(i)),), {}) for i in (1, 2)])
        assert [g.x.item() for g in got] == [3, 6]
        assert [g.twice.item() for g in got] == [6, 12]

    def test_one_example_without_a_dimension_of_rows(self, library):
        policy = weft.batched(lambda x: {"sum": x.sum(1), "x": x}, rows=False, max_batch_size=3, **FULL)
        got = call_all(policy, [((to(library, np.full(4, float(i))),), {}) for i in range(3)])
        for i, result in enumerate(got):
            assert back(result["sum"]).shape == ()
            assert float(result["sum"]) == 4 * i
            np.testing.assert_array_equal(back(result["x"]), np.full(4, i))

    def test_numbers_are_examples_too(self):
        policy = weft.batched(lambda x, y: x + y, rows=False, max_batch_size=2, **FULL)
        assert sorted(call_all(policy, [((1.5, np.float64(2)), {}), ((2.5, np.float64(3)), {})])) == [3.5, 5.5]
        assert weft.batched(lambda x: x * 2, rows=False)(3) == 6

    @pytest.mark.parametrize("kind", ["bool", "int8", "uint16", "float16", "float32", "complex64", ">f4", "S3", "U4"])
    def test_dtypes(self, kind):
        x = np.array(["1", "0", "1"]).astype(kind) if kind in ("S3", "U4") else np.array([1, 0, 1]).astype(kind)
        y = weft.batched(lambda x: x)(x)
        assert y.tolist() == x.tolist()
        assert y.dtype == (object if kind in ("S3", "U4") else x.dtype.newbyteorder("="))

    @pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
    def test_bfloat16(self, library):
        need(library)
        need("ml_dtypes")
        import ml_dtypes

        x = np.array([[1.5], [2.5]], ml_dtypes.bfloat16)
        policy = weft.batched(lambda x: x, max_batch_size=4, **FULL)
        got = call_all(policy, [((to(library, x),), {}), ((to(library, x),), {})])
        assert [back(y).astype(float).ravel().tolist() for y in got] == [[1.5, 2.5]] * 2

    def test_arrays_that_are_not_contiguous(self, library):
        x = to(library, np.arange(24.0).reshape(6, 4))
        policy = weft.batched(lambda a, b: (a, b), max_batch_size=6, **FULL)
        got = call_all(policy, [((x[::2, ::2], x[:3].T[:3]), {}), ((x[1::2, 1::2], x[3:].T[:3]), {})])
        np.testing.assert_array_equal(back(got[0][0]), back(x)[::2, ::2])
        np.testing.assert_array_equal(back(got[1][0]), back(x)[1::2, 1::2])
        np.testing.assert_array_equal(back(got[1][1]), back(x)[3:].T[:3])

    def test_no_rows(self, library):
        x = to(library, np.empty((0, 2)))
        assert back(weft.batched(lambda x: x * 2)(x)).shape == (0, 2)
        padded = weft.batched(lambda x: x * 2, max_batch_size=4, allowed_batch_sizes=[4])
        assert back(padded(x)).shape == (0, 2)
        policy = weft.batched(lambda x: x * 2, max_batch_size=3, **FULL)
        empty, full = call_all(policy, [((x,), {}), ((to(library, np.ones((2, 2))),), {})])
        assert back(empty).shape == (0, 2)
        np.testing.assert_array_equal(back(full), np.full((2, 2), 2.0))

    def test_what_is_no_array_comes_back_to_everyone(self):
        policy = weft.batched(lambda x: (x, "v1", 3, None), max_batch_size=2, **FULL)
        got = call_all(policy, [((rows(i),), {}) for i in (1, 2)])
        assert [g[1:] for g in got] == [("v1", 3, None)] * 2
        assert weft.batched(lambda x: None)(rows(1)) is None

    def test_variants(self):
        from weft import raw_ops

        ragged = weft.RaggedTensor.from_row_lengths(np.arange(3.0), [2, 1])
        variant = raw_ops.RaggedTensorToVariant(ragged.nested_row_splits, ragged.flat_values, True)
        got = call_all(weft.batched(lambda v: v, max_batch_size=4, **FULL), [((variant,), {})] * 2)
        for v in got:
            back = raw_ops.RaggedTensorFromVariant(v, 0, 1, "float64", Tsplits="int64")
            assert back.output_dense_values.tolist() == [0, 1, 2]


class TestNothingIsShared:
    """The function works on a copy, and every caller has its own."""

    @pytest.mark.parametrize("callers", [1, 2])
    def test_what_the_function_does_to_its_input_stays_there(self, callers):
        def f(x):
            x += 1
            return x

        inputs = [rows(i) for i in range(callers)]
        got = call_all(weft.batched(f, max_batch_size=callers, **FULL), [((x,), {}) for x in inputs])
        assert [x.item() for x in inputs] == list(range(callers))
        assert [y.item() for y in got] == [i + 1 for i in range(callers)]

    def test_a_function_that_returns_what_it_keeps(self):
        kept = np.zeros((2, 1))
        y = weft.batched(lambda x: kept)(rows(1, 2))
        y += 5
        assert kept.tolist() == [[0], [0]]

    def test_a_function_that_writes_where_it_wrote_before(self):
        """A task takes its rows after the next batch has run: they are still those of its own."""
        buffer = np.empty((1, 1))

        def f(x):
            buffer[:] = x
            return buffer

        async def main():
            task = asyncio.create_task(policy.aio(rows(1)))
            await asyncio.sleep(0)  # it is in the queue
            later = policy(rows(2))  # and its loop stands still until the next batch has run
            return await task, later

        policy = weft.batched(f, max_batch_size=1)
        first, second = asyncio.run(main())
        assert (first.item(), second.item()) == (1, 2)

    def test_each_piece_is_new(self):
        pieces = small.pieces(np.arange(6.0).reshape(3, 2), [0, 1, 1, 3])
        assert [piece.tolist() for piece in pieces] == [[[0, 1]], [], [[2, 3], [4, 5]]]
        assert not np.shares_memory(pieces[0], pieces[0])

    @pytest.mark.parametrize(
        "x", [np.array([None]), np.zeros((1, 1 << 13)), np.float64(1), [1]], ids=["objects", "large", "number", "list"]
    )
    def test_what_is_cut_by_others(self, x):
        assert small.pieces(x, [0, 1]) is None

    def test_the_same_array_twice(self):
        a, b = weft.batched(lambda x: (x, x))(rows(1))
        a += 1
        assert b.item() == 1

    def test_views_of_the_input(self):
        x = np.arange(6.0).reshape(3, 2)
        y = weft.batched(lambda x: x[:, ::-1])(x)
        y[:] = 0
        assert x.tolist() == [[0, 1], [2, 3], [4, 5]]


class TestMemory:
    """What a call leaves behind, without the garbage collector's help."""

    @pytest.fixture(autouse=True)
    def without_collection(self, little_garbage):
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize("options", [{}, {"split": True, "max_batch_size": 2}, {"rows": False}])
    def test_inputs_and_results_are_freed(self, options):
        refs = []

        def f(x):
            y = x * 2
            refs.extend([weakref.ref(x), weakref.ref(y)])
            return y

        policy = weft.batched(f, **options)
        x = rows(1, 2, 3, 4, 5)
        y = policy(x)
        refs += [weakref.ref(x), weakref.ref(y)]
        del x, y
        assert [ref() is None for ref in refs] == [True] * len(refs)

    def test_those_of_a_failed_call_go_with_its_error(self):
        refs = []

        def f(x):
            refs.append(weakref.ref(x))
            raise ValueError("no")

        policy = weft.batched(f)
        with pytest.raises(ValueError, match="no"):
            policy(rows(1))
        assert refs[0]() is None

    def test_a_batcher_that_nobody_has_is_freed(self):
        policy = weft.batched(lambda x: x)
        policy(rows(1))
        ref = weakref.ref(policy)
        del policy
        assert ref() is None

    def test_also_one_whose_function_knows_it(self):
        class Actor:
            def __init__(self):
                self.policy = weft.batched(self.act)

            def act(self, x):
                return x

        actor = Actor()
        actor.policy(rows(1))
        ref = weakref.ref(actor)
        del actor
        gc.collect()
        assert ref() is None


# --- keys ---


class TestKeys:
    """Callers that cannot share a batch never meet, and never make each other fail."""

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (((rows(1),), {}), ((np.ones((1, 2)),), {})),
            (((rows(1),), {}), ((rows(1).astype("float32"),), {})),
            (((rows(1), "a"), {}), ((rows(1), "b"), {})),
            (((rows(1), 1), {}), ((rows(1), True), {})),
            (((rows(1), 1), {}), ((rows(1), 1.0), {})),
            (((rows(1),), {}), ((), {"x": rows(1)})),
            ((([rows(1)],), {}), (((rows(1),),), {})),
            ((({"a": rows(1)},), {}), (({"b": rows(1)},), {})),
        ],
        ids=["shape", "dtype", "value", "bool", "float", "name", "nesting", "keys"],
    )
    def test_apart(self, one, other):
        seen = []

        def f(*args, **kwargs):
            seen.append((args, kwargs))
            return rows(0)

        policy = weft.batched(f, max_batch_size=1)
        call_all(policy, [one, other])
        assert len(policy._desk.scheduler.queues) == 2
        assert policy.statistics().sizes == {1: 2}
        assert {repr(s) for s in seen} == {repr(one), repr(other)}

    def test_libraries_apart(self):
        need("torch")
        need("jax")
        policy = weft.batched(lambda x: x, max_batch_size=1)
        call_all(policy, [((to(library, rows(1)),), {}) for library in ("numpy", "torch", "jax")])
        assert policy.statistics().sizes == {1: 3}

    def test_alike_together(self):
        policy = weft.batched(lambda x, mode: x, max_batch_size=3, **FULL)
        call_all(policy, [((rows(i), "a"), {}) for i in range(3)])
        assert policy.statistics().sizes == {3: 1}

    def test_the_users_key(self):
        model = Model()
        policy = weft.batched(model, key=lambda x: x.flat[0] > 0, max_batch_size=2, **FULL)
        call_all(policy, [((rows(x),), {}) for x in (1, -1, 2, -2)])
        assert sorted(sorted(np.sign(b).ravel().tolist()) for b in model.batches) == [[-1, -1], [1, 1]]

    def test_one_key_fills_while_another_waits(self):
        model = Model()
        policy = weft.batched(model, max_batch_size=2, **FULL)
        lone = start(policy, np.ones((1, 3)))
        waiting(policy, 1)
        call_all(policy, [((rows(1),), {}), ((rows(2),), {})])
        assert lone.is_alive()
        policy.close()
        assert lone.answer().tolist() == [[2, 2, 2]]

    def test_queues_of_keys_that_no_longer_come_are_dropped(self):
        clock = weft.SimulatedClock()
        with weft.scope(clock) as scope:
            policy = weft.batched(lambda x, key: x)
            for i in range(1000):
                policy(rows(1), i)
            assert len(policy._desk.scheduler.queues) <= 64
            clock.advance(61)
            scope.sweep()
            assert len(policy._desk.scheduler.queues) == 0
            assert len(policy._arguments._forms) == 0

    @pytest.mark.usefixtures("little_garbage")
    def test_what_was_part_of_a_key_is_freed_with_its_queue(self):
        class Setting:
            pass

        clock = weft.SimulatedClock()
        with weft.scope(clock) as scope:
            policy = weft.batched(lambda x, setting: x)
            setting = Setting()
            ref = weakref.ref(setting)
            policy(rows(1), setting)
            del setting
            clock.advance(61)
            scope.sweep()
            gc.collect()
            assert ref() is None

    def test_grad_mode_and_autocast(self):
        need("torch")
        import torch

        policy = weft.batched(lambda x: x @ torch.ones(2, 2), max_batch_size=1)
        x = torch.ones(1, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert policy(x).dtype == torch.bfloat16
        assert policy(x).dtype == torch.float32
        with torch.no_grad():
            policy(x)
        with torch.inference_mode():
            assert policy(x).is_inference()
        assert len(policy._desk.scheduler.queues) == 4

    def test_a_batch_runs_as_its_callers_would_from_a_thread_of_nobodys(self):
        need("torch")
        import asyncio

        import torch

        def f(x):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return x

        async def main():
            with torch.no_grad(), torch.autocast("cpu"):
                return await policy.aio(torch.ones(1, 2))

        seen = []
        policy = weft.batched(f)
        asyncio.run(main())
        assert seen == [(False, True)]


def test_threads_that_are_the_first_of_their_kind_at_once_meet():
    """The form that is their key is made once, though both find none."""
    others, asked = [], []

    class Key:
        def __hash__(self):
            asked.append(self)
            if len(asked) == 2:  # looked for twice: a form is being made
                others.append(start(policy, rows(1)))
                others[0].join(0.2)  # time to make a second one
            return 0

        def __eq__(self, other):
            return isinstance(other, Key)

    policy = weft.batched(lambda x: x, max_batch_size=2, key=lambda x: Key(), **FULL)
    assert policy(rows(2)).item() == 2
    assert others[0].answer().item() == 1
    assert policy.statistics().batches == 1


class TestShared:
    def test_the_same_by_identity_or_by_value(self):
        policy = weft.batched(lambda w, x: x @ w, shared=("w",), max_batch_size=3, **FULL)
        w = np.eye(2)
        got = call_all(policy, [((w if i else w.copy(), np.full((1, 2), float(i))), {}) for i in range(3)])
        assert [y.tolist() for y in got] == [[[i, i]] for i in range(3)]
        assert policy.statistics().sizes == {3: 1}

    def test_by_name(self):
        policy = weft.batched(lambda x, *, w: x @ w["w"], shared=("w",))
        assert policy(np.ones((1, 2)), w={"w": np.eye(2)}).tolist() == [[1, 1]]

    @pytest.mark.parametrize(
        ("one", "other", "named"),
        [
            ({"a": rows(1), "b": rows(1)}, {"a": rows(1), "b": rows(2)}, "leaf 1 of the shared argument 'w'"),
            ({"a": rows(1)}, {"b": rows(1)}, "structure"),
            ({"a": rows(1)}, {"a": rows(1).astype("float32")}, "leaf 0"),
            ({"a": 1}, {"a": True}, "leaf 0"),
        ],
    )
    def test_others_are_refused_by_leaf(self, one, other, named):
        model = Model()
        policy = weft.batched(lambda x, w: model(x), shared=("w",), max_batch_size=8)
        first = held(lambda x: policy(x, one), model)
        policy.statistics()
        callers = [start(policy, rows(1), one)]
        waiting(policy, 1)
        callers.append(start(policy, rows(2), other))
        waiting(policy, 2)
        model.gate.set()
        first.answer()
        assert callers[0].answer().tolist() == [[2]]
        with pytest.raises(InvalidArgumentError, match=named):
            callers[1].answer()


class TestMethods:
    def test_the_instance_is_part_of_the_key(self):
        class Net:
            def __init__(self, w):
                self.w = w

            @weft.batched(max_batch_size=2, **FULL)
            def forward(self, x):
                return x * self.w

        nets = Net(2), Net(3)
        callers = together([lambda n=n, i=i: n.forward(rows(i)) for n in nets for i in (1, 2)])
        assert [c.answer().item() for c in callers] == [2, 4, 3, 6]
        assert Net.forward.statistics().sizes == {2: 2}
        assert nets[0].forward.call(rows(1, 2), receipt=True)[1].size == 2

    def test_of_a_dataclass(self):
        @dataclasses.dataclass
        class Net:
            w: np.ndarray

            @weft.batched(max_batch_size=2, key=lambda self, x: self.w.sum() > 0, **FULL)
            def forward(self, x):
                return x @ self.w

        net = Net(np.eye(3))  # neither hashable nor taken apart
        callers = together([lambda i=i: net.forward(np.full((1, 3), float(i))) for i in (1, 2)])
        assert [c.answer().tolist() for c in callers] == [[[1, 1, 1]], [[2, 2, 2]]]

    def test_in_a_task(self):
        import asyncio

        class Net:
            @weft.batched
            def forward(self, x):
                return x * 2

        assert asyncio.run(Net().forward.aio(rows(1))).item() == 2


def test_a_result_without_leaves():
    policy = weft.batched(lambda x: {}, max_batch_size=2, **FULL)
    assert [c.answer() for c in together([lambda i=i: policy(rows(i)) for i in (1, 2)])] == [{}, {}]


# --- what is refused ---


class TestRefused:
    @pytest.mark.parametrize(
        ("args", "kwargs", "said"),
        [
            ((), {}, "at least one array"),
            (("text",), {}, "at least one array"),
            ((np.float64(1),), {}, "at least one array"),
            ((np.array(1.0),), {}, "got a scalar"),
            ((rows(1), rows(1, 2)), {}, r"same number of rows, got \[\[1, 1\], \[2, 1\]\]"),
            ((rows(1), {1, 2}), {}, "hashable, got a set"),
            ((np.array([object()]),), {}, "cannot be batched"),
            ((np.zeros(1, [("a", int)]),), {}, "cannot be batched"),
            ((np.ones((9, 1)),), {}, "at most max_batch_size = 8 rows, got 9"),
        ],
    )
    def test_before_it_joins(self, args, kwargs, said):
        model = Model()
        policy = weft.batched(lambda *args, **kwargs: model(args[0]), max_batch_size=8)
        with pytest.raises(InvalidArgumentError, match=said):
            policy(*args, **kwargs)
        seen = policy.statistics()
        assert (seen.rejected, seen.calls, seen.waiting, model.sizes) == (1, 0, 0, [])
        assert len(policy._desk.scheduler.queues) == 0

    def test_tensors_that_are_not_dense(self):
        need("torch")
        import torch

        policy = weft.batched(lambda x: x * 2)
        with pytest.raises(InvalidArgumentError, match="must be dense"):
            policy(torch.eye(2).to_sparse())

    @pytest.mark.parametrize("options", [{"deadline": 0}, {"deadline": "1"}, {"deadline": np.inf}, {"priority": "mid"}])
    def test_options_of_a_call(self, options):
        policy = weft.batched(lambda x: x)
        with pytest.raises(InvalidArgumentError):
            policy.call(rows(1), **options)
        assert policy.statistics().rejected == 1

    @pytest.mark.parametrize("value", [0, -1, np.nan, np.inf, "much", None])
    def test_costs(self, value):
        with pytest.raises(InvalidArgumentError, match="cost must give a positive number"):
            weft.batched(lambda x: x, cost=lambda x: value)(rows(1))

    def test_keys_that_are_no_keys(self):
        with pytest.raises(InvalidArgumentError, match="key must give something hashable"):
            weft.batched(lambda x: x, key=lambda x: [])(rows(1))

    def test_what_a_key_function_raises_is_its_callers(self):
        policy = weft.batched(lambda x: x, key=lambda x: 1 / x.item())
        with pytest.raises(ZeroDivisionError):
            policy(rows(0))
        assert policy(rows(1)).item() == 1

    @pytest.mark.parametrize("function", [lambda x, mask: x, lambda x, rows: x])
    @pytest.mark.parametrize("by_place", [True, False])
    def test_what_the_batcher_tells_is_not_given(self, function, by_place):
        policy = weft.batched(function)
        named = "mask" if "mask" in function.__code__.co_varnames else "rows"
        with pytest.raises(InvalidArgumentError, match="is told to the function by the batcher"):
            policy(rows(1), rows(1)) if by_place else policy(rows(1), **{named: rows(1)})

    @pytest.mark.parametrize(
        "options",
        [
            {"max_batch_size": 0},
            {"max_batch_size": 1.5},
            {"max_batch_size": True},
            {"max_wait": -1},
            {"max_wait": np.nan},
            {"max_wait": np.inf},
            {"min_batch_size": 0},
            {"min_batch_size": 9, "max_batch_size": 8, "max_wait": 1},
            {"min_batch_size": 2},
            {"fill": "full"},
            {"fill": "never"},
            {"max_queue": -1},
            {"max_queue": "many"},
            {"deadline": 0},
            {"parallel": 0},
            {"parallel": 1.5},
            {"on_error": "ignore"},
            {"on_missing_gradient": "skip"},
            {"gradient_deadline": 0},
            {"allowed_batch_sizes": [4, 2]},
            {"allowed_batch_sizes": [0, 64]},
            {"allowed_batch_sizes": [1.5, 64]},
            {"allowed_batch_sizes": [2, 4], "max_batch_size": 8},
            {"split": True, "cost": len},
            {"shared": ("nothing",)},
        ],
        ids=repr,
    )
    def test_options(self, options):
        with pytest.raises(InvalidArgumentError):
            weft.batched(lambda x: x, **options)

    def test_functions_that_do_not_return_their_result(self):
        async def coroutine(x):
            return x

        def generator(x):
            yield x

        for f in (coroutine, generator, 3):
            with pytest.raises(InvalidArgumentError, match="a batcher is made of a function"):
                weft.batched(f)

    @pytest.mark.parametrize(
        ("f", "said"),
        [
            (lambda x: x[:-1], "must have the 2 rows of its batch, got 1 rows in leaf 0"),
            (lambda x: (x, np.array(1.0)), "got a scalar in leaf 1"),
            (lambda x: x.mean(), "got a scalar in leaf 0"),
        ],
    )
    def test_results_without_the_rows_of_the_batch(self, f, said):
        policy = weft.batched(f)
        with pytest.raises(FailedPreconditionError, match=said):
            policy(rows(1, 2))
        assert policy.statistics().failed == 1

    def test_without_optree(self, monkeypatch):
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name == "optree":
                    raise ImportError(name)

        monkeypatch.delitem(sys.modules, "optree", raising=False)
        monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
        assert weft.batched(lambda x, y: (x, y))(rows(1), rows(2))[1].item() == 2
        assert weft.batched(lambda x, k, name=None: x * k)(rows(1), k=3, name="a").item() == 3

        class Owner:
            @weft.batched
            def add(self, x):
                return x + 1

        assert Owner().add(rows(1)).item() == 2
        for f, args in [(lambda x: x, ({"a": rows(1)},)), (lambda x: {"a": x}, (rows(1),))]:
            with pytest.raises(ImportError, match=r"pip install 'weft\[batched\]'"):
                weft.batched(f)(*args)

    def test_names_meet_in_any_order(self):
        policy = weft.batched(lambda x, y, k: x * y * k, max_batch_size=2, **FULL)
        callers = together([lambda: policy(x=rows(2), y=rows(3), k=2), lambda: policy(k=2, y=rows(5), x=rows(7))])
        assert [caller.answer().item() for caller in callers] == [12, 70]
        assert policy.statistics().sizes == {2: 1}

    def test_closed(self):
        policy = weft.batched(lambda x: x)
        policy.close()
        with pytest.raises(CancelledError, match="is closed"):
            policy(rows(1))


def test_it_looks_like_its_function():
    def policy(x):
        """Twice."""
        return x * 2

    policy.record = "an attribute of the function"
    made = weft.batched(policy)
    assert (made.__name__, made.__doc__, made.__wrapped__) == ("policy", "Twice.", policy)
    assert callable(made.record)
    assert "64 to a batch" in repr(made)
