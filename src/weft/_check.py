"""Checks of arguments, in TensorFlow's terms: what must hold, what came."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ._arrays import library_of
from .errors import InvalidArgumentError

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)


def integer(name: str, value: Any, bounds: tuple[int, int] = INT32) -> int:
    """An integer attribute: numbers are cut to int, scalar integer arrays are read, and it must lie within `bounds`."""
    if type(value) is not int:
        value = _to_int(name, value)
    if not bounds[0] <= value <= bounds[1]:
        if not INT64[0] <= value <= INT64[1]:
            raise OverflowError(f"{name} must fit 64 bits, got {value}")
        raise InvalidArgumentError(f"{name} must lie in {bounds[0]} .. {bounds[1]}, got {value}")
    return value


def _to_int(name: str, value: Any) -> int:
    if isinstance(value, (int, float, np.integer, np.floating)):
        return int(value)
    if library_of(value) is not None and value.shape == () and not str(value.dtype).startswith(("<U", "|S", "object")):
        return int(value)
    raise TypeError(f"{name} must be an integer, got {value!r}")


def integers(name: str, values: Any, bounds: tuple[int, int] = INT32) -> tuple[int, ...]:
    """A list of integers as an attribute; None is empty."""
    if values is None:
        return ()
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} must be a list of integers, got {values!r}")
    return tuple(integer(name, value, bounds) for value in values)


def text(name: str, value: Any) -> str:
    """A text attribute, given as str or bytes; None is empty."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    if value is None:
        return ""
    raise TypeError(f"{name} must be text, got {value!r}")


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """A text attribute that has only certain values."""
    given = text(name, value)
    if given not in choices:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(choices)}, got {given!r}")
    return given


def increasing(name: str, sizes: Sequence[int]) -> None:
    """`sizes` grow from one to the next."""
    if any(a >= b for a, b in pairwise(sizes)):
        raise InvalidArgumentError(f"{name} must be strictly increasing, got {list(sizes)}")
