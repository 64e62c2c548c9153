"""Checks of attributes. Errors say what is required and what was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isfinite
from operator import index
from typing import Any

import numpy as np

from ..errors import ArgumentOverflowError, ArgumentTypeError, InvalidArgumentError
from .arrays import host, library_of
from .inputs import items, shown, take
from .interrupts import as_exception

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)


def integer(name: str, value: Any, bounds: tuple[int, int] = INT32) -> int:
    """An integer attribute within `bounds`; floats are truncated, scalar arrays are read."""
    if type(value) is not int:
        value = _to_int(name, value)
    if not bounds[0] <= value <= bounds[1]:
        if not INT64[0] <= value <= INT64[1]:
            raise ArgumentOverflowError(f"{name} must fit 64 bits, got {shown(value)}")
        raise InvalidArgumentError(f"{name} must lie in {bounds[0]} .. {bounds[1]}, got {value}")
    return value


def _to_int(name: str, value: Any) -> int:
    value = _scalar(name, value)
    if isinstance(value, (int, np.integer, np.bool_)) and not isinstance(value, np.timedelta64):
        return int(value)
    if isinstance(value, (float, np.floating)):
        if not isfinite(value):
            raise InvalidArgumentError(f"{name} must be an integer, got {value}")
        return int(value)
    raise ArgumentTypeError(f"{name} must be an integer, got {shown(value)}")


def _scalar(name: str, value: Any, wanted: str = "an integer") -> Any:
    """The number in a scalar array; anything else unchanged."""
    if library_of(value) is None or isinstance(value, np.generic):
        return value
    taken = take(name, value)
    if taken.shape != ():
        raise ArgumentTypeError(f"{name} must be {wanted}, got {shown(value)}")
    return host(taken)[()]


def whole(name: str, value: Any) -> int:
    """An integer, also as a scalar array; floats and bools are refused."""
    value = _scalar(name, value)
    if isinstance(value, (bool, np.bool_, np.timedelta64)) or not isinstance(value, (int, np.integer)):
        raise ArgumentTypeError(f"{name} must be an integer, got {shown(value)}")
    return integer(name, int(value), INT64)


def count(name: str, value: Any, most: int | None = None) -> int:
    """A number of things, from 1 on, up to `most` if it is given: anything that Python takes as an index, but no bool."""
    try:
        found = 0 if isinstance(value, bool) else plain(index(value))
    except BaseException as error:  # it is no integer, or its own code raises
        as_exception(error)
        found = 0
    if found < 1 or (most is not None and found > most):
        bounds = "of at least 1" if most is None else f"from 1 to {most:,}"
        raise InvalidArgumentError(f"{name} must be an integer {bounds}, got {shown(plain(value))}")
    return found


def integers(name: str, values: Any, bounds: tuple[int, int] = INT32) -> tuple[int, ...]:
    """An attribute that is a list of integers; None is an empty list."""
    if values is None:
        return ()
    if not isinstance(values, (list, tuple)):
        raise ArgumentTypeError(f"{name} must be a list of integers, got {shown(values)}")
    return tuple(integer(name, value, bounds) for value in items(name, values))


def number(name: str, value: Any) -> float:
    """A real number, also as a scalar array."""
    if type(value) is float:
        return value
    value = _scalar(name, value, "a number")
    if isinstance(value, np.timedelta64) or not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        raise ArgumentTypeError(f"{name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentOverflowError(f"{name} must fit in a float, got {shown(value)}") from None


def plain(value: Any) -> Any:
    """A scalar of NumPy, or of a class derived from int, float or str, as a value of Python; anything else unchanged."""
    if isinstance(value, np.generic):
        return value.item()
    for kind, convert in _PLAIN:
        if type(value) is kind:
            return value
        if isinstance(value, kind):
            return convert(value)  # whatever its own methods do
    return value


_PLAIN: Sequence[tuple[type, Callable[[Any], Any]]] = (
    (bool, bool), (int, int.__int__), (float, float.__float__), (str, str.__str__),
)  # fmt: skip


def flag(name: str, value: Any) -> bool:
    """A bool of Python or NumPy."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name} must be a bool, got {shown(value)}")
    return bool(value)


def text(name: str, value: Any, required: bool = False) -> str:
    """A text attribute as str or bytes in UTF-8; None is empty text, unless text is `required`."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if value is None and not required:
        return ""
    raise ArgumentTypeError(f"{name} must be text, got {shown(value)}")


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """A text attribute with one of several values."""
    given = text(name, value)
    if given not in choices:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
    return given


def increasing(name: str, sizes: Sequence[int]) -> None:
    """Refuse sizes that are not strictly increasing."""
    if any(a >= b for a, b in pairwise(sizes)):
        raise InvalidArgumentError(f"{name} must be strictly increasing, got {list(sizes)}")
