"""What a batched function takes and gives back: arrays in any nesting, one example or rows, and nobody else's memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import weakref
from typing import NamedTuple

import numpy as np
import pytest
from support.batched_calls import FULL, Model, call_all, rows
from support.callers import together, until
from support.libraries import back, need, to

import weft
from weft.core import small


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


class TestResults:
    def test_a_lone_call_runs_at_once(self):
        model = Model()
        policy = weft.batched(model)
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

    def test_dicts_named_tuples_and_dataclasses(self):
        def f(tree):
            return Pair(tree["p"].left + 1, (tree["o"].image, tree["o"].name, None))

        policy = weft.batched(f, max_batch_size=3, **FULL)
        trees = [{"p": Pair(rows(i), rows(0)), "o": Observation(rows(i * 5), "a")} for i in range(3)]
        for i, got in enumerate(call_all(policy, [((tree,), {}) for tree in trees])):
            assert type(got) is Pair
            assert got.left.tolist() == [[i + 1]]
            assert got.right[0].tolist() == [[i * 5]]
            assert got.right[1:] == ("a", None)

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
        "x",
        [np.array([None]), np.zeros((1, small.LARGE)), np.float64(1), [1]],
        ids=["objects", "large", "number", "list"],
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

    @pytest.mark.parametrize("dropped", [(), (0,), (0, 1)], ids=["none", "one", "all"])
    @pytest.mark.parametrize("waits", [True, False])
    def test_inputs_are_freed_after_the_backward(self, waits, dropped):
        torch = pytest.importorskip("torch")
        policy = weft.batched(
            lambda x: x * 2, max_batch_size=2, wait_backward=waits, on_missing_gradient="zero", **FULL
        )
        refs = []

        def go(i):
            x = torch.ones(1, requires_grad=True)
            refs.append(weakref.ref(x))
            y = policy(x)
            if i not in dropped:
                y.sum().backward()

        for caller in together([lambda i=i: go(i) for i in range(2)]):
            caller.answer()
        policy.join()
        until(lambda: [ref() for ref in refs] == [None] * 2)

    def test_those_of_a_failed_call_go_with_its_error(self):
        refs = []

        def f(x):
            refs.append(weakref.ref(x))
            raise ValueError("no")

        policy = weft.batched(f)
        with pytest.raises(ValueError, match="no"):
            policy(rows(1))
        assert refs[0]() is None

    def test_those_of_calls_that_failed_alone(self):
        refs = []

        def f(x):
            if (x < 0).any():
                raise ValueError("negative")
            return x

        policy = weft.batched(f, max_batch_size=4, **FULL)

        def ask(value):
            x = rows(value)
            refs.append(weakref.ref(x))
            with contextlib.suppress(ValueError):
                policy(x)

        for caller in together([lambda v=v: ask(v) for v in (1, -1, 2, -2)]):
            caller.answer()
        until(lambda: [ref() for ref in refs] == [None] * 4)

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


def test_a_result_without_leaves():
    policy = weft.batched(lambda x: {}, max_batch_size=2, **FULL)
    assert [c.answer() for c in together([lambda i=i: policy(rows(i)) for i in (1, 2)])] == [{}, {}]


def test_it_looks_like_its_function():
    def policy(x):
        """Twice."""
        return x * 2

    policy.record = "an attribute of the function"
    made = weft.batched(policy)
    assert (made.__name__, made.__doc__, made.__wrapped__) == ("policy", "Twice.", policy)
    assert callable(made.record)
    assert "64 to a batch" in repr(made)
