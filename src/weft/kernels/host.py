"""Kernels that NumPy alone runs at memory speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..core.arrays import NUMERIC_DTYPES, first_row
from ..core.memory import hold, views
from .buffers import LARGE, empty

DTYPES = frozenset([*NUMERIC_DTYPES, "string"])

#: Copies of these sizes in bytes keep the GIL: see `_copy`.
KEEPS_GIL = range(1 << 13, 1 << 20)


def concat_rows(arrays: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """A new array: `arrays` one below the other, then their first row repeated up to `rows` rows."""
    arrays, held = views(arrays)
    first = arrays[0]
    missing = rows - sum(map(len, arrays)) if rows else 0
    if missing > 0:
        arrays = [*arrays, np.broadcast_to(first_row(arrays), (missing, *first.shape[1:]))]
    elif len(arrays) == 1 and first.nbytes < LARGE:
        return first.copy()
    if first.nbytes * len(arrays) < LARGE:  # an estimate is enough
        return np.concatenate(arrays)
    out = empty((sum(map(len, arrays)), *first.shape[1:]), first.dtype)
    np.concatenate(arrays, out=out)
    del held
    return out


def cut_rows(x: np.ndarray, bounds: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """A new array for each `(start, stop)` of `bounds`: those rows of `x`."""
    held, x = hold(x), x.view(np.ndarray)
    if x.nbytes < KEEPS_GIL.start:
        return [x[start:stop].copy() for start, stop in bounds]
    pieces = [_copy(x[start:stop]) for start, stop in bounds]
    del held
    return pieces


def split_rows(values: np.ndarray, splits: np.ndarray) -> list[np.ndarray]:
    """The rows of `values` between one entry of `splits` and the next, as views."""
    bounds = splits.tolist()
    return [values[start:stop] for start, stop in pairwise(bounds)]


def join_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """A new array: `rows` one below the other."""
    return np.concatenate(rows)


def unstack_rows(values: np.ndarray) -> list[np.ndarray]:
    """`values[0], values[1], ...`, as views."""
    return [values[i, ...] for i in range(len(values))]


def stack_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """A new array: `rows` along a new first axis."""
    return np.stack(rows)


def _copy(x: np.ndarray) -> np.ndarray:
    """A copy of one caller's rows, made without releasing the GIL.

    NumPy releases the GIL for more than 500 elements. Waiting callers would then run in between, and the two thread switches cost
    more than the copy. Benchmark row "Batch+Unbatch, 32 threads, rows of 256 KiB" needs this.
    """
    out = empty(x.shape, x.dtype)
    if x.nbytes in KEEPS_GIL and x.flags.c_contiguous and not x.dtype.hasobject:
        out.reshape(-1).view(np.uint8).data[:] = x.reshape(-1).view(np.uint8).data
    else:
        out[...] = x
    return out
