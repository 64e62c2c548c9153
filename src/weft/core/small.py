"""Operations on a few small NumPy rows, where the overhead of NumPy's Python interface matters (benchmarks/batching.py).

`weft._native` has the same functions over NumPy's C interface, three times as fast; they replace these where it is installed.
`stack`, `cut` and `pieces` return None for large arrays and for anything but plain arrays: the other kernels handle those.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

#: In bytes: for larger arrays these functions save nothing.
LARGE = 1 << 17

#: In bytes: smaller arrays need no check of their size in memory.
MUCH = 1 << 28

_INT64 = np.dtype(np.int64)
_PLAIN = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))  # in native byte order
_PYTHON = frozenset([int, float])
_LISTS = frozenset([list, tuple])
_LAST_NUMBER = np.dtype(np.clongdouble).num  # NumPy's type numbers of numeric dtypes come first


def are_plain(values: tuple[Any, ...], named: dict[str, Any], inputs: tuple[tuple[int, str, bool], ...]) -> bool:
    """True if all `inputs` are given, by place or by name, need no check, and are not recorded by a framework.

    Such are native NumPy arrays of numbers, and Python numbers; in `weft._native` also dense tensors of torch, if no input is a
    NumPy array. An input is a place, a name, and whether it is a list or tuple of such arrays.
    """
    for place, name, is_list in inputs:
        x = values[place] if place < len(values) else named.get(name)
        if is_list:
            if type(x) not in _LISTS or not all(map(_is_simple, x)):  # type: ignore[arg-type]
                return False
        elif not (_is_simple(x) or type(x) in _PYTHON):
            return False
    return True


def _is_simple(x: Any) -> bool:
    return type(x) is np.ndarray and x.dtype in _PLAIN and x.nbytes < MUCH


def no_rows(x: np.ndarray) -> np.ndarray:
    """An empty array with the trailing dimensions and dtype of `x`, not a view of it."""
    return x[:0].copy()


def rows_alike(x: object, like: Any, grad: bool) -> int:
    """The number of rows of `x` if it has the dtype, the trailing dimensions and the device of `like`; else -1.

    Both are NumPy arrays; in `weft._native` also dense tensors of torch, outside `torch.func` and forward mode. With `grad` both
    need a gradient, or neither does.
    """
    if type(x) is not np.ndarray or type(like) is not np.ndarray:
        return -1
    is_like = x.dtype is like.dtype and 0 < x.ndim == like.ndim and x.shape[1:] == like.shape[1:]
    return x.shape[0] if is_like else -1


def scalar(value: int) -> np.ndarray:
    """An integer as a scalar array of int64."""
    return np.array(value, _INT64)


def no_index() -> np.ndarray:
    """An empty int64 array of shape (0, 3)."""
    return np.empty((0, 3), _INT64)


def index(numbers: list[int]) -> np.ndarray:
    """Integers as an int64 array with three columns."""
    return np.array(numbers, _INT64).reshape(-1, 3)


def stack(inputs: Sequence[Sequence[np.ndarray]]) -> np.ndarray | None:
    """Concatenate similar arrays, each the only item of its list; only in `weft._native`."""
    return None


def cut(x: np.ndarray, bounds: Sequence[tuple[int, int]]) -> list[np.ndarray] | None:
    """A new array with the rows of `x` for each `(start, stop)` of `bounds`; only in `weft._native`."""
    return None


class Pieces(Sequence[np.ndarray]):
    """The rows of an array between consecutive `edges`; each piece is copied when it is read.

    The thread that uses a piece so allocates it: memory allocated by one thread and freed by another moves between cores.
    """

    def __init__(self, x: np.ndarray, edges: list[int]) -> None:
        self._x, self._edges = x.copy(), edges  # the caller may write to `x`

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self._x[self._edges[i] : self._edges[i + 1]].copy()


def pieces(x: Any, edges: list[int]) -> Sequence[np.ndarray] | None:
    """The rows of a small array between consecutive `edges`, as new arrays."""
    is_small = type(x) is np.ndarray and x.ndim > 0 and x.dtype.num <= _LAST_NUMBER and x.nbytes <= LARGE
    if is_small and edges and all(a <= b for a, b in pairwise([0, *edges, len(x)])):
        return Pieces(x, edges)
    return None


with suppress(ModuleNotFoundError):
    from .._native import (  # type: ignore[no-redef]
        are_plain,  # noqa: F401
        cut,  # noqa: F401
        index,  # noqa: F401
        no_index,  # noqa: F401
        no_rows,  # noqa: F401
        pieces,  # noqa: F401
        rows_alike,  # noqa: F401
        scalar,  # noqa: F401
        stack,  # noqa: F401
    )
