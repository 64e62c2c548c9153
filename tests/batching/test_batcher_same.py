"""Nobody's call runs with another caller's value: calls share a batch if what they pass is the same, not if it is equal."""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import numpy as np
import pytest
from support.batched_calls import Model, rows, waiting_together
from support.callers import start_on
from support.libraries import need

import weft
from weft.errors import InvalidArgumentError

NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
ELSEWHERE = NOON.astimezone(timezone(timedelta(hours=13)))


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


def meeting(*calls, function=lambda x, *args, **kwargs: x, **options):
    """The callers of calls that could share a batch, each a tuple of arguments or a dict, and the rows of each run.

    The first argument is an array, or else one is put before the arguments.
    """
    model, sizes = Model(lambda x: x), []

    def f(x, *args, **kwargs):
        if x.dtype == np.int8:
            return model(x)
        sizes.append(len(x))
        return function(x, *args, **kwargs)

    def call(given):
        args, named = ((), given) if isinstance(given, dict) else (given, {})
        array = () if args and hasattr(args[0], "dtype") and hasattr(args[0], "shape") and args[0].shape else (rows(1),)
        return lambda: policy(*array, *args, **named)

    with weft.batched(f, max_batch_size=8, **options) as policy:
        callers = waiting_together(policy, model, *map(call, calls), first=np.zeros((1, 1), np.int8))
    return callers, sizes


@dataclasses.dataclass
class Setting:
    scale: float


class Plain:
    """Equal to all others of its class."""

    def __eq__(self, other):
        return type(other) is Plain

    def __hash__(self):
        return 0


class Named(str):
    """A name of a parameter that is no plain str."""

    def __eq__(self, other):
        return str.__eq__(self, other)

    __hash__ = str.__hash__


PAIRS = [
    (0.0, -0.0),
    (1, True),
    (NOON, ELSEWHERE),
    (Decimal("1.0"), Decimal("1.00")),
    (frozenset({1}), frozenset({True})),
    ({True: 0}, {1: 0}),
    ({True: []}, {1: []}),
    ({0.0: 0}, {-0.0: 0}),
    ({(1,): 0}, {(True,): 0}),
    ({"a": 0, "b": 0}, {"b": 0, "a": 0}),
    ([{"a": {1: 2}}], [{"a": {1.0: 2}}]),
    (collections.OrderedDict({1: 0}), collections.OrderedDict({True: 0})),
    (collections.defaultdict(list, a=0), collections.defaultdict(set, a=0)),
    (collections.deque([1], 3), collections.deque([1], 4)),
    (Setting(0.0), Setting(-0.0)),
    ((Setting(1),), (Setting(True),)),
    (np.float64(0), np.float64(-0.0)),
    (np.datetime64(1, "s"), np.datetime64(1000, "ms")),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=[f"{i}-{type(one).__name__}" for i, (one, _) in enumerate(PAIRS)])
class TestEqualValues:
    def test_as_an_argument(self, one, other):
        got = []
        callers, sizes = meeting((one,), (other,), function=lambda x, value: got.append(repr(value)) or x)
        assert [caller.error for caller in callers] == [None, None]
        assert sizes == [1, 1]
        assert got == [repr(one), repr(other)]

    def test_as_a_named_argument(self, one, other):
        assert meeting({"a": one}, {"a": other})[1] == [1, 1]

    def test_as_the_users_key(self, one, other):
        values = iter([None, Key(one), Key(other), Key(one)])
        assert meeting((), (), (), key=lambda x: next(values))[1] == [2, 1]

    def test_as_a_shared_argument(self, one, other):
        callers, sizes = meeting({"w": one}, {"w": other}, {"w": one}, shared=("w",))
        assert sizes == [2]
        assert isinstance(callers[1].error, InvalidArgumentError)
        assert callers[0].error is callers[2].error is None


@pytest.mark.parametrize(
    "value",
    [1, -0.0, math.nan, "a", NOON, Decimal("1.00"), frozenset({True}), {True: 0}, {"a": [1, {"b": 2.0}]}, Setting(0.5),
     collections.OrderedDict(a=1, b=2), np.float32(1), Plain(), slice(1)],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_the_same_values_share_a_batch(value):
    import copy

    assert meeting((value,), (copy.deepcopy(value),))[1] == [2]


def test_names_of_another_class_are_plain_names():
    seen = []
    callers, sizes = meeting(
        {Named("a"): 1}, {"a": 1}, function=lambda x, **named: seen.append([*map(type, named)]) or x
    )
    assert [caller.error for caller in callers] == [None, None]
    assert (sizes, seen) == ([2], [[str]])


def test_items_are_each_callers_own():
    seen = []
    callers, sizes = meeting(
        {"text": [0.0]},
        {"text": [-0.0]},
        {"text": [True]},
        items=("text",),
        function=lambda x, text: seen.append(text) or x,
    )
    assert sizes == [3]
    assert repr(seen) == "[[0.0, -0.0, True]]"
    assert not any(caller.error for caller in callers)


class TestObjects:
    """Objects of classes of the user's own."""

    def test_equal_with_equal_pickles(self):
        assert meeting((Plain(),), (Plain(),))[1] == [2]

    def test_equal_with_other_pickles(self):
        one, other = Plain(), Plain()
        other.more = 1
        seen = []
        _, sizes = meeting((one,), (other,), function=lambda x, value: seen.append(value) or x)
        assert (sizes, seen) == ([1, 1], [one, other])
        assert seen[1] is other

    def test_equal_without_pickles_share_only_as_one_object(self):
        plain = Plain()
        plain.call = lambda: 0  # no function of no name has a pickle
        other = Plain()
        other.call = plain.call
        with pytest.warns(UserWarning, match="option key") as told:
            callers, sizes = meeting((plain,), (other,), (plain,), (other,), (Plain(),))
        assert len(told) == 1
        assert "of the batcher" in str(told[0].message)
        assert sizes == [2, 2, 1]
        assert not any(caller.error for caller in callers)

    def test_with_the_option_key_equality_is_enough(self):
        one, other = Plain(), Plain()
        one.call = other.call = lambda: 0
        assert meeting((one,), (other,), key=lambda x, *_: 0)[1] == [2]

    def test_objects_of_other_identity_are_not_warned_of(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert meeting((object(),), (object(),))[1] == [1, 1]

    @pytest.mark.parametrize("where", [lambda x: (x,), lambda x: ({x: 0},), lambda x: ([frozenset({x})],)])
    def test_an_equality_that_raises_hurts_nobody(self, where):
        class Rude:
            def __hash__(self):
                return hash("a")

            def __eq__(self, other):
                raise RuntimeError("rude")

        callers, sizes = meeting(where(Rude()), where(Rude()), where("a"), where("a"))
        assert [caller.error for caller in callers] == [None] * 4
        assert sizes == [1, 1, 2]

    def test_a_hash_that_raises_hurts_its_own_call(self):
        class Rude:
            def __hash__(self):
                raise RuntimeError("rude")

            def __eq__(self, other):
                return True

        with weft.batched(lambda x, value: x) as policy:
            with pytest.raises(RuntimeError, match="rude"):
                policy(rows(1), Rude())
            assert policy(rows(1), 1).item() == 1

    def test_what_can_change_is_refused(self):
        with (
            weft.batched(lambda x, value: x) as policy,
            pytest.raises(InvalidArgumentError, match="a bytearray as leaf 1"),
        ):
            policy(rows(1), bytearray(1))

    def test_values_that_contain_themselves(self):
        endless = ()
        for _ in range(100_000):
            endless = (endless,)
        policy = weft.batched(lambda x: x, key=lambda x: endless)
        with pytest.raises(InvalidArgumentError, match="key must return a hashable value"):
            policy(rows(1))
        while endless:  # a chain so long is not freed at once
            endless = endless[0]


class TestArrays:
    """Arrays whose rows would mean something else in one array."""

    def test_text_and_bytes(self):
        seen = []
        _, sizes = meeting(
            (np.array([["a"]]),),
            (np.array([[b"a"]]),),
            (np.array([["long"]]),),
            function=lambda x: seen.append(x.tolist()) or x,
        )
        assert sizes == [2, 1]
        assert seen == [[["a"], ["long"]], [[b"a"]]]

    def test_dtypes_of_one_size(self):
        seen = []
        meeting((np.ones((1, 1), "q"),), (np.ones((1, 1), "l"),), function=lambda x: seen.append(x.dtype.char) or x)
        assert seen == ["q", "l"]

    def test_dtypes_with_metadata(self):
        seen = []
        noted = np.ones((1, 1), np.dtype("f8", metadata={"of": "another"}))
        meeting((noted,), (rows(1),), function=lambda x: seen.append((len(x), x.dtype.metadata)) or x)
        assert seen == [(2, None)]

    def test_weak_types_of_jax(self):
        need("jax")
        import jax.numpy as jnp

        seen = []
        weak = jnp.asarray(1.0)[None]
        meeting((weak,), (jnp.ones(1),), function=lambda x: seen.append((x * jnp.ones(1, "bfloat16")).dtype.name) or x)
        assert seen == ["bfloat16", "float32"]

    @pytest.mark.filterwarnings("ignore:.*quantize")
    def test_quantized_tensors(self):
        need("torch")
        import torch

        def quantized(x, scale):
            return torch.quantize_per_tensor(torch.tensor([[x]]), scale, 0, torch.quint8)

        callers, sizes = meeting(
            (quantized(100.0, 1.0),), (quantized(2.0, 0.5),), (quantized(50.0, 1.0),), function=lambda x: x.dequantize()
        )
        assert [caller.answer().item() for caller in callers] == [100.0, 2.0, 50.0]
        assert sizes == [2, 1]
        each = torch.quantize_per_channel(torch.ones(2, 1), torch.ones(2), torch.zeros(2), 0, torch.quint8)
        with weft.batched(lambda x: x) as policy, pytest.raises(InvalidArgumentError, match="one scale"):
            policy(each)

    def test_subclasses_of_tensors(self):
        need("torch")
        import torch

        class Tagged(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                made = super().__torch_function__(function, types, args, kwargs or {})
                if isinstance(made, Tagged):
                    made.tag = "of another caller"
                return made

        seen = []
        tagged = torch.ones(1, 2).as_subclass(Tagged)
        _, sizes = meeting((tagged,), (torch.ones(1, 2),), function=lambda x: seen.append(type(x)) or x)
        assert sizes == [2]
        assert seen == [torch.Tensor]
        leaf = torch.ones(1, 2).as_subclass(Tagged).requires_grad_()
        with weft.batched(lambda x: x * 3) as policy:
            policy(leaf).sum().backward()
        assert leaf.grad.tolist() == [[3, 3]]


class TestShared:
    """Shared arguments are the same, bit by bit."""

    @pytest.mark.parametrize(
        ("one", "other", "are_same"),
        [
            (np.zeros(1), -np.zeros(1), False),
            (np.array([math.nan]), np.array([math.nan]), True),
            (np.array([1 + 0j]), np.array([complex(1, -0.0)]), False),
            (np.zeros(1), np.zeros((1, 1)), False),
            (np.array(["a", b"a"], object), np.array(["a", b"a"], object), True),
            (np.array([1], object), np.array([True], object), False),
            (np.zeros(1), np.zeros(1, np.dtype("f8", metadata={"a": 1})), False),
            (np.zeros(1, [("a", "i4")]), np.zeros(1, [(("t", "a"), "i4")]), False),
            (np.zeros(0), np.zeros(0), True),
            ({1, 2}, {2, 1}, True),
            ({0.0}, {-0.0}, False),
        ],
        ids=lambda x: type(x).__name__,
    )
    def test_of_numpy(self, one, other, are_same):
        callers, _ = meeting({"w": one}, {"w": other}, shared=("w",))
        assert (callers[1].error is None) == are_same

    @pytest.mark.parametrize("library", ["torch", "jax"])
    def test_of_other_libraries(self, library):
        need(library)
        xp = __import__("jax.numpy").numpy if library == "jax" else __import__("torch")
        for one, other, are_same in [(0.0, -0.0, False), (math.nan, math.nan, True), (1j, 1j, True), (1, 1, True)]:
            callers, _ = meeting({"w": xp.asarray([one])}, {"w": xp.asarray([other])}, shared=("w",))
            assert (callers[1].error is None) == are_same

    def test_tensors_that_get_a_gradient(self):
        need("torch")
        import torch

        one, other = (torch.ones(1, requires_grad=True) for _ in range(2))
        callers, _ = meeting({"w": one}, {"w": one}, {"w": other}, shared=("w",))
        assert [caller.error is None for caller in callers] == [True, True, False]


class TestBatchFunction:
    """Which functions are the same."""

    @pytest.mark.parametrize(
        ("make", "sizes"),
        [
            (lambda seen: [Scale(0.0, seen), Scale(-0.0, seen), Scale(0.0, seen)], [2, 1]),
            (lambda seen: [Scale(1, seen).method, Scale(1, seen).method], [1, 1]),
            (lambda seen: [Scale(1, seen).method] * 2, [2]),
            (lambda seen: [getattr(Counted(seen), name) for name in ("run", "run")], [1, 1]),
            (lambda seen: 2 * [lambda x: seen.append(len(x)) or x], [2]),
        ],
    )
    def test_which_share_a_batch(self, make, sizes):
        seen, clock = [], weft.SimulatedClock()
        functions = make(seen)
        with weft.scope(clock):
            callers = [start_on(clock, function, f=f) for f in functions]
            clock.run_out()
            for caller in callers:
                caller.answer()
        assert seen == sizes

    def test_methods_of_one_object(self):
        counted, clock = Counted([]), weft.SimulatedClock()
        with weft.scope(clock):
            callers = [start_on(clock, function, f=counted.run) for _ in range(2)]
            clock.run_out()
            for caller in callers:
                caller.answer()
        assert counted.seen == [2]


def function(f):
    return weft.raw_ops.BatchFunction(
        in_tensors=[np.ones((1, 1))], captured_tensors=[], f=f, num_batch_threads=1, max_batch_size=8,
        batch_timeout_micros=1000, Tout=["float64"],
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Key:
    value: object


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: float
    seen: list = dataclasses.field(repr=False, compare=False)

    def __call__(self, x):
        self.seen.append(len(x))
        return x * self.factor

    method = __call__


class Counted:
    def __init__(self, seen):
        self.seen = seen

    def run(self, x):
        self.seen.append(len(x))
        return x
