"""What stands in brackets behind a ragged tensor: rows and parts of rows, as a method of `RaggedTensor`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arrays import host, library_of
from ..core.inputs import shown, take
from ..errors import InvalidArgumentError, OpError
from ..kernels.splits import cut_splits, splits_from_lengths
from .rows import take_rows


def getitem(self: Any, key: Any) -> Any:
    """`rt[i]`: a row; `rt[a:b]`, `rt[indices]`, `rt[mask]`: chosen rows; `rt[:, a:b]`, `rt[:, j]`: of every row."""
    if isinstance(key, tuple):
        first, *rest = key
        chosen = self[first]
        if not rest:
            return chosen
        if _is_one(first):  # one axis less: what follows is for the row
            return _part(chosen, tuple(rest) if len(rest) > 1 else rest[0])
        return _within(chosen, rest)
    if isinstance(key, slice):
        start, stop, step = _indices(key, len(self))
        if step == 1:
            splits, a, b = cut_splits(self._splits, start, max(start, stop))
            return type(self)(self._fitting()[a:b], splits)
        return self.gather(np.arange(start, stop, step))
    index = _row_numbers(key, len(self))
    if index.ndim:
        return self.gather(index)
    splits, a, b = cut_splits(self._splits, int(index), int(index) + 1)
    values = self._fitting()[a:b]
    return type(self)(values, splits[1:]) if splits[1:] else values


def _part(row: Any, key: Any) -> Any:
    """What a key chooses of one row."""
    try:
        return row[key]
    except OpError:
        raise
    except Exception as error:  # what the array's library raises for a key, or the key's own code
        raise InvalidArgumentError(
            f"a row of the shape {list(row.shape)} must have what is chosen of it: {error}"
        ) from None


def _is_one(key: Any) -> bool:
    """Whether a key names one row."""
    return not isinstance(key, slice) and _numbers(key).ndim == 0


def _indices(key: slice, rows: int) -> tuple[int, int, int]:
    try:
        return key.indices(rows)
    except Exception as error:  # bounds that are no integers, a step of 0, or an object whose own code raises
        raise InvalidArgumentError(f"a slice of rows must have integer bounds: {error}") from None


def _numbers(key: Any) -> np.ndarray:
    """A key that is no slice as an array on the host."""
    found = take("a key", key)
    return host(found) if library_of(found) else np.asarray(found)


def _row_numbers(key: Any, rows: int) -> np.ndarray:
    """The numbers of the rows that integers, which may count from the end, or a mask choose."""
    index = _numbers(key)
    if index.dtype == bool:
        if index.shape != (rows,):
            raise InvalidArgumentError(f"a mask must have {rows} entries, got shape {list(index.shape)}")
        return np.flatnonzero(index.copy())
    if index.dtype.kind not in ("iu" if index.size else "iuf"):  # an empty list is one of floats
        raise InvalidArgumentError(f"rows are chosen by integers, a slice or a mask, got {shown(key)}")
    index = index.astype(np.int64)
    if not index.ndim and not -rows <= index < rows:
        raise InvalidArgumentError(f"row {index} is out of range for {rows} rows")
    return np.where(index < 0, index + rows, index)


def _within(self: Any, rest: list[Any]) -> Any:
    """The same part of every row, or the value at the same place in each."""
    part = rest[0]
    if len(rest) > 1 or len(self._splits) > 1 or (isinstance(part, slice) and part.step not in (None, 1)):
        raise InvalidArgumentError("parts of rows are cut in steps of 1, from one ragged level")
    lengths = np.diff(self._splits[0])
    if not isinstance(part, slice):
        at = _place(part, lengths)
        return take_rows(self.flat_values, self._splits[0][:-1] + at, np.arange(len(lengths) + 1))
    if not all(at is None or isinstance(at, (int, np.integer)) for at in (part.start, part.stop)):
        raise InvalidArgumentError("parts of rows must have integer bounds")
    if not all(at is None or -(2**62) < at < 2**62 for at in (part.start, part.stop)):
        raise InvalidArgumentError("the bounds of parts of rows must fit 62 bits")
    start, stop = ((default if at is None else at) for at, default in ((part.start, 0), (part.stop, lengths)))
    start, stop = (np.clip(np.where(at < 0, at + lengths, at), 0, lengths) for at in map(np.asarray, (start, stop)))
    splits = splits_from_lengths(np.maximum(stop - start, 0), self._splits[0].dtype)
    return type(self)(take_rows(self.flat_values, self._splits[0][:-1] + start, splits), [splits])


def _place(key: Any, lengths: np.ndarray) -> np.ndarray:
    """Where `key` is in every row, all of which must be long enough."""
    at = _numbers(key)
    if at.ndim or at.dtype.kind not in "iu":
        raise InvalidArgumentError(f"within rows there are places and slices, got {shown(key)}")
    places = np.where(at < 0, at + lengths, at)
    short = np.flatnonzero((places < 0) | (places >= lengths))
    if short.size:
        raise InvalidArgumentError(
            f"place {at} is out of range for row {short[0]}, which has {lengths[short[0]]} values"
        )
    return places
