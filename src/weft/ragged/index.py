"""Indexing of RaggedTensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arrays import host, library_of
from ..core.inputs import shown, take
from ..errors import InvalidArgumentError, OpError, OutOfRangeError
from ..kernels.splits import cut_splits, splits_from_lengths
from .rows import take_rows


def getitem(self: Any, key: Any) -> Any:
    """`rt[i]`: one row; `rt[a:b]`, `rt[indices]`, `rt[mask]`: several rows; `rt[:, a:b]`, `rt[:, j]`: a part of every row."""
    if isinstance(key, tuple):
        first, *rest = key or (slice(None),)
        chosen = self[first]
        if not rest:
            return chosen
        if _is_one(first):  # the rest of the key indexes the row
            return _part(chosen, tuple(rest) if len(rest) > 1 else rest[0])
        return _within(chosen, rest)
    if isinstance(key, slice):
        start, stop, step = _indices(key, len(self))
        if step == 1:
            splits, a, b = cut_splits(self._splits, start, max(start, stop))
            return type(self)(self._checked_values()[a:b], splits)
        return self.gather(np.arange(start, stop, step))
    index = _row_numbers(key, len(self))
    if index.ndim:
        return self.gather(index)
    splits, a, b = cut_splits(self._splits, int(index), int(index) + 1)
    values = self._checked_values()[a:b]
    return type(self)(values, splits[1:]) if splits[1:] else values


def _part(row: Any, key: Any) -> Any:
    """Index one row."""
    try:
        return row[key]
    except OpError:
        raise
    except Exception as error:  # raised by the array's library, or by the key's own code
        raise InvalidArgumentError(f"invalid index for a row of shape {list(row.shape)}: {error}") from None


def _is_one(key: Any) -> bool:
    """Whether a key selects one row."""
    return not isinstance(key, slice) and _numbers(key).ndim == 0


def _indices(key: slice, rows: int) -> tuple[int, int, int]:
    try:
        return key.indices(rows)
    except Exception as error:  # non-integer bounds, a step of 0, or an object whose own code raises
        raise InvalidArgumentError(f"a slice of rows must have integer bounds: {error}") from None


def _numbers(key: Any) -> np.ndarray:
    """Convert a key that is not a slice to a host array."""
    found = take("a key", key)
    return host(found) if library_of(found) else np.asarray(found)


def _row_numbers(key: Any, rows: int) -> np.ndarray:
    """Return the row numbers that integers (negative ones count from the end) or a mask select."""
    index = _numbers(key)
    if index.dtype == bool:
        if index.shape != (rows,):
            raise InvalidArgumentError(f"a mask must have {rows} entries, got shape {list(index.shape)}")
        return np.flatnonzero(index.copy())
    if index.dtype.kind not in ("iu" if index.size else "iuf"):  # NumPy makes an empty list a float array
        raise InvalidArgumentError(f"rows must be selected by integers, a slice or a mask, got {shown(key)}")
    if index.dtype == np.uint64 and (index >= 2**63).any():
        raise InvalidArgumentError(f"rows must be selected by numbers below {rows}, got {shown(key)}")
    index = index.astype(np.int64)
    if not index.ndim and not -rows <= index < rows:
        raise OutOfRangeError(f"row {index} is out of range for {rows} rows")
    return np.where(index < 0, index + rows, index)


def _within(self: Any, rest: list[Any]) -> Any:
    """Take the same slice, or the same position, of every row."""
    part = rest[0]
    if len(rest) > 1 or len(self._splits) > 1 or (isinstance(part, slice) and part.step not in (None, 1)):
        raise InvalidArgumentError("slices within rows must have a step of 1 and one ragged level")
    lengths = np.diff(self._splits[0])
    if not isinstance(part, slice):
        at = _positions(part, lengths)
        return take_rows(self.flat_values, self._splits[0][:-1] + at, np.arange(len(lengths) + 1))
    if not all(at is None or isinstance(at, (int, np.integer)) for at in (part.start, part.stop)):
        raise InvalidArgumentError("slices within rows must have integer bounds")
    if not all(at is None or -(2**62) < at < 2**62 for at in (part.start, part.stop)):
        raise InvalidArgumentError("the bounds of slices within rows must fit 62 bits")
    start, stop = ((default if at is None else at) for at, default in ((part.start, 0), (part.stop, lengths)))
    start, stop = (np.clip(np.where(at < 0, at + lengths, at), 0, lengths) for at in map(np.asarray, (start, stop)))
    splits = splits_from_lengths(np.maximum(stop - start, 0), self._splits[0].dtype)
    return type(self)(take_rows(self.flat_values, self._splits[0][:-1] + start, splits), [splits])


def _positions(key: Any, lengths: np.ndarray) -> np.ndarray:
    """Return the position `key` within every row; all rows must be long enough."""
    at = _numbers(key)
    if at.ndim or at.dtype.kind not in "iu":
        raise InvalidArgumentError(f"rows must be indexed by integers or slices, got {shown(key)}")
    positions = np.where(at < 0, at + lengths, at)
    short = np.flatnonzero((positions < 0) | (positions >= lengths))
    if short.size:
        raise OutOfRangeError(f"position {at} is out of range for row {short[0]}, which has {lengths[short[0]]} values")
    return positions
