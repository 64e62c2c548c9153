"""What counts as the same value in a batch key."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import pickle
import struct
import typing
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import PurePosixPath, PureWindowsPath
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.batching.exact import Same, Unsure, represent


class Kind(Enum):
    A = 1
    B = 2


class Number(IntEnum):
    ONE = 1


class Pair(typing.NamedTuple):
    a: object
    b: object


@dataclasses.dataclass(frozen=True)
class Point:
    x: object
    y: object = dataclasses.field(default=0, compare=False)


class Money:
    """Equal by value, and tells which digits it was made of."""

    def __init__(self, amount):
        self.amount = amount

    def __eq__(self, other):
        return self.amount == other.amount

    def __hash__(self):
        return hash(self.amount)


class Float(float):
    """No plain float: it may have attributes."""


class Zone(tzinfo):
    def __init__(self, hours):
        self.hours = hours

    def utcoffset(self, when):
        return timedelta(hours=self.hours)

    def __eq__(self, other):
        return isinstance(other, Zone)

    def __hash__(self):
        return 0


def nan(payload):
    return struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | payload))[0]


PARIS, UTC = ZoneInfo("Europe/Paris"), UTC
NOON = datetime(2024, 10, 27, 12, tzinfo=UTC)
OTHERS = [
    (0.0, -0.0),
    (nan(0), nan(1)),
    (1, True),
    (1, 1.0),
    (1, np.int64(1)),
    (1, Number.ONE),
    (1.0, Float(1)),
    ("a", np.str_("a")),
    (complex(0, 0.0), complex(0, -0.0)),
    (complex(0.0, 1), complex(-0.0, 1)),
    (Decimal("1.0"), Decimal("1.00")),
    (Decimal("0"), Decimal("-0")),
    (Fraction(1), 1),
    (NOON, NOON.astimezone(PARIS)),
    (NOON, NOON.astimezone(timezone(timedelta(0), "Z"))),
    (datetime(2024, 10, 27, 2, 30, tzinfo=PARIS), datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=PARIS)),
    (datetime(2024, 1, 1, tzinfo=Zone(1)), datetime(2024, 1, 1, tzinfo=Zone(2))),
    (datetime(2024, 1, 1), date(2024, 1, 1)),
    (time(12, tzinfo=UTC), time(13, tzinfo=timezone(timedelta(hours=1)))),
    (range(0), range(1, 1)),
    (range(0, 3, 2), range(0, 4, 2)),
    (slice(1), slice(True)),
    ((0.0,), (-0.0,)),
    (frozenset({1}), frozenset({True})),
    (frozenset({(0.0,)}), frozenset({(-0.0,)})),
    (Kind.A, Kind.B),
    (Pair(0.0, 1), Pair(-0.0, 1)),
    (Pair(0, 1), (0, 1)),
    (Point(0.0), Point(-0.0)),
    (Point(1, 1), Point(1, 2)),
    (Money(Decimal("1.0")), Money(Decimal("1.00"))),
    (np.float32(0), np.float32(-0.0)),
    (np.float64(1), np.float32(1)),
    (np.longdouble(0), np.longdouble(-0.0)),
    (np.longlong(1), np.int64(1)),
    (np.datetime64(1, "s"), np.datetime64(1000, "ms")),
    (np.datetime64("NaT", "s"), np.datetime64("NaT", "ms")),
    (np.dtype("<i4"), np.dtype(">i4")),
    (np.dtype("i4"), np.dtype("i4", metadata={"unit": "m"})),
    (np.dtype([("a", "i4")]), np.dtype([(("title", "a"), "i4")])),
    (int | str, str | int),
    (typing.Literal[1], typing.Literal[True]),
    (PurePosixPath("a"), PureWindowsPath("a")),
    (PureWindowsPath("a"), PureWindowsPath("A")),
    (uuid.UUID(int=1), uuid.UUID(int=1, is_safe=uuid.SafeUUID.safe)),
    (int, bool),
    (math.sin, math.cos),
]
ALIKE = [
    lambda: 1,
    lambda: float("nan"),
    lambda: -0.0,
    lambda: "a" + str(len("bb")),
    lambda: Decimal("1.00"),
    lambda: Decimal("sNaN12"),
    lambda: complex(-0.0, float("nan")),
    lambda: Fraction(2, 4),
    lambda: datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=PARIS),
    lambda: datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1), "one")),
    lambda: datetime(2024, 1, 1, tzinfo=Zone(2)),
    lambda: (1, (2.5, frozenset({"a", (1,)}))),
    lambda: range(0, 3, 2),
    lambda: slice(1, None),
    lambda: Kind.A,
    lambda: Pair(0.5, None),
    lambda: Point(Point(-0.0), (1,)),
    lambda: Point(1, [2, {"a": np.arange(3)}]),
    lambda: Money(Decimal("1.00")),
    lambda: Float(1),
    lambda: np.float32(-0.0),
    lambda: np.longdouble(1) / 3,
    lambda: np.datetime64("NaT", "ms"),
    lambda: np.dtype([(("title", "a"), "i4")]),
    lambda: PurePosixPath("a/b"),
    lambda: list[int],
    lambda: uuid.UUID(int=1),
    lambda: collections.OrderedDict,
    lambda: "x".upper.__class__,
]


@pytest.mark.parametrize(
    ("one", "other"), OTHERS, ids=[f"{i}-{type(one).__name__}" for i, (one, _) in enumerate(OTHERS)]
)
def test_told_apart(one, other):
    for wrap in (lambda x: x, lambda x: (x,), lambda x: Pair(0, x), lambda x: Point(x)):
        assert represent(wrap(one), Unsure()) != represent(wrap(other), Unsure())


@pytest.mark.parametrize("make", ALIKE, ids=[f"{i}-{type(make()).__name__}" for i, make in enumerate(ALIKE)])
def test_the_same(make):
    one, other = represent(make(), Unsure()), represent(make(), Unsure())
    assert one == other
    assert hash(one) == hash(other)


def is_hashable(x):
    try:
        hash(x)
    except TypeError:  # a signalling NaN
        return False
    return True


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.complex_numbers() | st.text(max_size=2)
    | st.decimals() | st.fractions() | st.timedeltas() | st.times() | st.sampled_from([0.0, -0.0, 1.0, True, 1, Decimal("1.0")]),
    lambda inside: st.tuples(inside, inside) | st.frozensets(inside.filter(is_hashable), max_size=2),
    max_leaves=4,
)  # fmt: skip


def bits(x):
    """A value as text that nothing else has."""
    if isinstance(x, frozenset):
        return f"frozenset({sorted(map(bits, x))})"
    if isinstance(x, tuple):
        return f"({', '.join(map(bits, x))})"
    if isinstance(x, float):
        return struct.pack("<d", x).hex()
    return f"complex({bits(x.real)}, {bits(x.imag)})" if isinstance(x, complex) else repr(x)


@given(PLAIN, PLAIN)
def test_two_plain_values_are_the_same_if_all_their_bits_are(one, other):
    assert (represent(one, Unsure()) == represent(other, Unsure())) == (bits(one) == bits(other))
    assert represent(one, Unsure()) == represent(pickle.loads(pickle.dumps(one)), Unsure())


@pytest.mark.parametrize("x", [[1], {1: 2}, {1}, bytearray(b"a"), np.ones(1), (1, [2])], ids=repr)
def test_what_can_change(x):
    with pytest.raises(TypeError, match="unhashable"):
        represent(x, Unsure())
    assert represent(x, Unsure(), takes_mutable=True) == represent(x, Unsure(), takes_mutable=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [([1], [True]), ({1: 0.0}, {1: -0.0}), ({1: 0}, {True: 0}), ({1: 0, 2: 0}, {2: 0, 1: 0}), ({0.0}, {-0.0}),
     (np.zeros(1), -np.zeros(1)), (np.zeros(1), np.zeros((1, 1))), (np.array([1], object), np.array([True], object))],
)  # fmt: skip
def test_what_can_change_is_told_apart(one, other):
    assert represent(one, Unsure(), takes_mutable=True) != represent(other, Unsure(), takes_mutable=True)


def test_methods_are_those_of_their_object():
    one, other = [1], [1]
    assert represent(one.append, None) == represent(one.append, None)
    assert represent(one.append, None) != represent(other.append, None)
    assert represent(one.append, None) != represent(one.extend, None)
    money = Money(1)
    assert represent(money.__eq__, None) == represent(money.__eq__, None)
    assert represent(money.__eq__, None) != represent(Money(1).__eq__, None)


def test_objects_without_an_equality_of_their_own_are_themselves():
    one = functools.partial(int)
    assert represent(one, None) == represent(one, None) == (functools.partial, Same(one))
    assert represent(one, None) != represent(functools.partial(int), None)


def test_a_dataclass_with_more_than_its_fields():
    one, other = Point(1), Point(1)
    object.__setattr__(one, "secret", 1)
    object.__setattr__(other, "secret", 2)
    assert represent(one, Unsure()) != represent(other, Unsure())


def local():
    class Local(Money):
        """Cannot be pickled."""

    return Local


def test_objects_that_are_equal_and_have_no_pickle():
    kind = local()
    one, unsure = kind(1), Unsure()
    assert represent(one, unsure) == represent(one, unsure)
    assert represent(one, unsure) != represent(kind(2), unsure)
    assert unsure.found is None
    assert represent(one, unsure) != represent(kind(1), unsure)
    assert unsure.found is kind
    assert represent(one, None) == represent(kind(1), None)


def test_an_equality_that_raises_makes_others():
    class Rude:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            raise RuntimeError("rude")

    assert represent(Rude(), None) != represent(Rude(), None)


def test_a_pickle_does_not_tell_which_parts_are_one_object():
    text = "".join(["a", "b"])
    one, other = Money((text, text)), Money(("".join(["a", "b"]), text))
    assert represent(one, Unsure()) == represent(other, Unsure())
