"""The exact representation of a value in a batch key: calls share a batch only if what is not in their arrays is the same.

`==` does not tell that: 1 equals True, 0.0 equals -0.0, and a time in one zone equals that in another. A representation is made of
plain values and of the types that they stand for. Two values have equal representations if a function could not tell one from the
other; only `Other` asks for the `__eq__` of a caller's class, and lets no exception of it reach another caller.
"""

from __future__ import annotations

import datetime
import functools
import io
import pickle
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from struct import Struct
from types import BuiltinFunctionType, EllipsisType, MethodType, NoneType, NotImplementedType
from typing import Any, TypeAlias

import numpy as np

from ..core.interrupts import as_exception


class Same:
    """Stands for one object; others are other ones, even if they are equal. It also is the object of a batched method."""

    __slots__ = ("object",)

    def __init__(self, x: Any) -> None:
        self.object = x

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and other.object is self.object

    def __hash__(self) -> int:
        return id(self.object)


#: Types whose values are the same if they are equal.
AS_IS = frozenset(
    [int, bool, str, bytes, NoneType, EllipsisType, NotImplementedType, datetime.date, datetime.timedelta, Same]
)

_bits_of_float = Struct("<d").pack
_bits_of_complex = Struct("<dd").pack

#: Represents a part of a value.
Inside: TypeAlias = Callable[[Any], Hashable]


class Unsure:
    """Notes a class whose objects were equal, and nobody knew whether they were the same."""

    def __init__(self) -> None:
        self.found: type | None = None

    def add(self, kind: type) -> None:
        """Note a class."""
        self.found = kind


class Other:
    """Stands for an object of a type that is not known here: the same as another one if both are equal and so are their pickles.

    If they have no pickles `unsure` notes it, and they are not the same; without `unsure` equality is enough.
    """

    __slots__ = ("_hash", "_object", "_pickle", "_unsure")

    def __init__(self, x: object, unsure: Unsure | None, takes_mutable: bool) -> None:
        self._object, self._unsure = x, unsure
        try:
            self._hash = hash(x)  # asked once, here, where an exception spoils its own call alone
        except TypeError:
            if not takes_mutable:
                raise
            self._hash = hash(type(x))
        self._pickle: bytes | None = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if type(other) is not Other:
            return False
        mine, theirs = self._object, other._object
        if mine is theirs:
            return True
        if type(mine) is not type(theirs) or not _are_equal(mine, theirs):
            return False
        pickles = self._pickled(), other._pickled()
        if b"" not in pickles:
            return pickles[0] == pickles[1]
        if self._unsure is None:
            return True
        self._unsure.add(type(mine))
        return False

    def _pickled(self) -> bytes:
        """Return the pickle of the object, empty if it has none."""
        if self._pickle is None:
            self._pickle = _pickled(self._object)
        return self._pickle


def _are_equal(a: object, b: object) -> bool:
    """Return whether two objects say that they are equal; if they raise an exception, they are not."""
    try:
        return bool(a == b)
    except BaseException as error:
        as_exception(error)
        return False


def _pickled(x: object) -> bytes:
    """Return the pickle of an object, empty if it has none. It does not tell which of its parts are one object."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
    pickler.fast = True
    try:
        pickler.dump(x)
    except BaseException as error:
        as_exception(error)
        return b""
    return written.getvalue()


def represent(x: Any, unsure: Unsure | None, takes_mutable: bool = False) -> tuple[type, Hashable]:
    """Return the exact representation of a value; refuse one that can change, by TypeError, unless `takes_mutable`."""
    kind = type(x)
    if kind in AS_IS:
        return kind, x
    how = _PLAIN.get(kind)
    if how is not None:
        return kind, how(x)
    if not takes_mutable and kind.__hash__ is None and kind is not slice:
        raise TypeError(f"unhashable type: {kind.__name__!r}")
    of_parts = _COMPOUND.get(kind)
    if of_parts is None:
        return kind, _of_class(x, kind, unsure, takes_mutable)
    return kind, of_parts(x, functools.partial(represent, unsure=unsure, takes_mutable=takes_mutable))


def _of_class(x: Any, kind: Any, unsure: Unsure | None, takes_mutable: bool) -> Hashable:
    """Return the representation of an object by what its class says."""
    # An object that can be hashed vouches for its fields.
    inside = functools.partial(represent, unsure=unsure, takes_mutable=True)
    if kind.__eq__ is object.__eq__ or issubclass(kind, (type, Enum)):
        return Same(x)
    if issubclass(kind, tuple) and hasattr(kind, "_fields") and not hasattr(x, "__dict__"):
        return _of_each(tuple.__iter__(x), inside)
    if is_dataclass(kind):
        names = [field.name for field in fields(kind)]
        if getattr(x, "__dict__", {}).keys() <= set(names):  # else there is more to it than its fields
            return _of_each([getattr(x, name) for name in names], inside)
    if issubclass(kind, np.generic) and kind is x.dtype.type and kind is not np.void:
        # Numbers of 80 bits have bytes that mean nothing.
        return x.dtype.str, repr(x) if isinstance(x, (np.longdouble, np.clongdouble)) else x.tobytes()
    return Other(x, unsure, takes_mutable)


def _of_each(parts: Iterable[Any], inside: Inside) -> Hashable:
    return tuple([inside(each) for each in parts])


def _of_float(x: float) -> Hashable:
    return x if x and x == x else _bits_of_float(x)  # zero has a sign, and a NaN does not equal itself


def _of_time(x: Any, inside: Inside) -> Hashable:
    return _of_each(x.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[1], inside)  # the digits with `fold`, and the zone


def _of_range(x: Any, inside: Inside) -> Hashable:
    return _of_each((x.start, x.stop, x.step), inside)


#: How values of known types are represented.
_PLAIN: dict[type, Callable[[Any], Hashable]] = {
    float: _of_float,
    complex: lambda x: _bits_of_complex(x.real, x.imag),
    Decimal: Decimal.as_tuple,
    datetime.timezone: lambda x: x.__getinitargs__(),
    **dict.fromkeys((PosixPath, PurePosixPath, WindowsPath, PureWindowsPath), str),
}
#: And how values with parts are; `inside` represents a part.
_COMPOUND: dict[type, Callable[[Any, Inside], Hashable]] = {
    tuple: _of_each,
    frozenset: lambda x, inside: frozenset([inside(each) for each in x]),
    datetime.datetime: _of_time,
    datetime.time: _of_time,
    Fraction: lambda x, inside: _of_each((x.numerator, x.denominator), inside),
    range: _of_range,
    slice: _of_range,
    MethodType: lambda x, inside: (Same(x.__self__), inside(x.__func__)),
    BuiltinFunctionType: lambda x, inside: (Same(x.__self__), x.__qualname__),
    # Those that can change:
    np.ndarray: lambda x, inside: (x.shape, inside(x.dtype), inside(x.tolist()) if x.dtype.hasobject else x.tobytes()),
    list: _of_each,
    dict: lambda x, inside: _of_each(x.items(), inside),
    set: lambda x, inside: frozenset([inside(each) for each in x]),
    bytearray: lambda x, inside: bytes(x),
}
