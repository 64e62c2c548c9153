"""What a call with a few small rows needs of NumPy, where the price of asking NumPy counts; compiled, at a third of it.

`_small.pyx` holds the same functions in terms of NumPy's C interface. What is large, or not a plain array, is left to the
other kernels: `stack`, `cut` and `pieces` answer None then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from .arrays import tensor_memory

#: In bytes: above, what is saved here no longer counts.
LARGE = 1 << 13

#: In bytes: what is smaller needs no look at how much of it is memory.
MUCH = 1 << 28

_INT64 = np.dtype(np.int64)
_PLAIN = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))  # in the machine's byte order
_PYTHON = frozenset([int, float])
_LAST_NUMBER = np.dtype(np.clongdouble).num  # of NumPy's types by number, those that hold numbers come first


def are_plain(values: tuple[Any, ...], first: int, end: int) -> bool:
    """Whether the values from `first` to `end` are there and need no closer look: arrays of numbers as NumPy has them, lists of
    such, Python's numbers."""
    if len(values) < end:
        return False
    for x in values[first:end]:
        kind = type(x)
        if kind is np.ndarray:
            if x.dtype not in _PLAIN or x.nbytes >= MUCH:
                return False
        elif kind is list or kind is tuple:
            for y in x:
                if type(y) is not np.ndarray or y.dtype not in _PLAIN or y.nbytes >= MUCH:
                    return False
        elif kind not in _PYTHON:
            return False
    return True


def no_rows(x: np.ndarray) -> np.ndarray:
    """No rows, of the trailing dimensions and type of `x`, and no hold on its memory."""
    return x[:0].copy()


def alike(x: object, like: np.ndarray) -> bool:
    """Whether `x` is an array of the very dtype of `like`, and of its trailing dimensions."""
    return type(x) is np.ndarray and x.dtype is like.dtype and x.ndim == like.ndim and x.shape[1:] == like.shape[1:]


def scalar(value: int) -> np.ndarray:
    """An integer as an array of int64."""
    return np.array(value, _INT64)


def no_index() -> np.ndarray:
    """No rows of three, in int64."""
    return np.empty((0, 3), _INT64)


def index(numbers: list[int]) -> np.ndarray:
    """Integers as rows of three, in int64."""
    return np.array(numbers, _INT64).reshape(-1, 3)


def stack(inputs: Sequence[Sequence[np.ndarray]]) -> np.ndarray | None:
    """Alike arrays, each alone in its list, one below the other."""
    return None


def cut(x: np.ndarray, bounds: Sequence[tuple[int, int]]) -> list[np.ndarray] | None:
    """A new array for each `(start, stop)` of `bounds`: those rows of `x`."""
    return None


class Pieces(Sequence[np.ndarray]):
    """The rows of an array between each two of `edges`: each piece is cut out when it is asked for, anew each time.

    So it is made where it is wanted: an array made by one thread and let go of by another takes the memory it lies in from
    one core to the other and back.
    """

    def __init__(self, x: np.ndarray, edges: list[int]) -> None:
        self._x, self._edges = x.copy(), edges  # whoever made `x` may write to it again

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, i: Any) -> Any:
        return self._x[self._edges[i] : self._edges[i + 1]].copy()


def pieces(x: Any, edges: list[int]) -> Sequence[np.ndarray] | None:
    """The rows of an array between each two of `edges`, as new arrays."""
    if type(x) is np.ndarray and x.ndim and x.dtype.num <= _LAST_NUMBER and x.nbytes <= LARGE:
        return Pieces(x, edges)
    return None


def blend(old: Any, new: Any, keep: float, part: float) -> bool:
    """Make `old` `keep * old + part * new`, in float64: vectors of torch, float32 or float64, each in one piece of host
    memory. False, with nothing changed, where they are not of one length and dtype."""
    values, added = tensor_memory(old.detach()), tensor_memory(new.detach())
    if values.shape != added.shape or values.dtype != added.dtype:
        return False
    values[...] = keep * values.astype(np.float64) + part * added.astype(np.float64)
    return True


with suppress(ImportError):
    from ._small import (  # type: ignore[import-not-found,no-redef]
        alike,  # noqa: F401
        are_plain,  # noqa: F401
        blend,  # noqa: F401
        cut,  # noqa: F401
        index,  # noqa: F401
        no_index,  # noqa: F401
        no_rows,  # noqa: F401
        pieces,  # noqa: F401
        scalar,  # noqa: F401
        stack,  # noqa: F401
    )
