"""Kernels that NumPy alone runs at memory speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._arrays import _NUMBERS

DTYPES = frozenset([*_NUMBERS, "string"])


def concat_rows(arrays: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """A new array: `arrays` one below the other, then the first row of the first repeated up to `rows` rows."""
    missing = rows - sum(map(len, arrays)) if rows else 0
    if missing <= 0:
        return arrays[0].copy() if len(arrays) == 1 else np.concatenate(arrays)
    first = arrays[0]
    return np.concatenate([*arrays, np.broadcast_to(first[:1], (missing, *first.shape[1:]))])


def cut_rows(x: np.ndarray, bounds: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """A new array for each `(start, stop)` of `bounds`: those rows of `x`."""
    return [x[start:stop].copy() for start, stop in bounds]
