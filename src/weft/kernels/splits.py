"""Row splits: host vectors with the bounds of the rows of a flat buffer.

`[0, 2, 2, 5]` divides five values into three rows, of two, no and three values. Nested splits are a list, outermost first: each
vector divides the rows of the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..core.arrays import Array, host, index_like, library_of, memory
from ..core.inputs import is_own, items, take_host
from ..core.memory import own
from ..errors import InvalidArgumentError, ResourceExhaustedError

Splits = np.ndarray
_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


def as_splits(name: str, x: Any) -> Splits:
    """Convert `x` to a host array of int32 or int64 that no caller can change; Python integers become int32, as in TensorFlow."""
    x = take_host(name, x)
    if library_of(x) is None:
        try:
            x = np.asarray(x)
            if x.dtype.kind == "i" or not x.size:
                x = x.astype(np.int32 if not x.size or abs(x).max() < 2**31 else np.int64)
        except (ValueError, OverflowError, TypeError):
            raise InvalidArgumentError(f"{name} must hold integers in a regular shape") from None
    if is_own(x):
        raise InvalidArgumentError(f"{name} must be int32 or int64, got {x.dtype}")
    found = host(x)
    _kind(name, found)
    if found.nbytes > memory():
        raise ResourceExhaustedError(f"{name} must fit in memory, got {found.dtype} of the shape {list(found.shape)}")
    found = own(found)
    kind = _kind(name, found)  # another thread may have changed the dtype before the copy
    return found if found.dtype.isnative else own(found.astype(kind))


def _kind(name: str, x: np.ndarray) -> np.dtype:
    """Check the dtype of `x`; return it in the byte order of this machine."""
    kind = x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")
    if kind not in _DTYPES:
        raise InvalidArgumentError(f"{name} must be int32 or int64, got {x.dtype}")
    return kind


def as_nested_splits(name: str, given: Iterable[Any]) -> tuple[Splits, ...]:
    """Convert a list of split vectors to host arrays of one dtype; an array is read along its first axis."""
    nested = tuple(as_splits(f"{name}[{i}]", x) for i, x in enumerate(items(name, given)))
    if len({s.dtype for s in nested}) > 1:
        raise InvalidArgumentError(f"{name} must have one dtype, got {[str(s.dtype) for s in nested]}")
    return nested


def check_splits(name: str, splits: Splits, total: int) -> None:
    """Check a split vector over `total` rows."""
    check_sorted(name, splits)
    if splits[-1] != total:
        raise InvalidArgumentError(f"{name} must end with {total}, the number of rows it partitions, got {splits[-1]}")


def check_sorted(name: str, splits: Splits) -> None:
    """Check that a vector starts at 0 and never decreases."""
    if splits.ndim != 1:
        raise InvalidArgumentError(f"{name} must have rank 1, got shape {list(splits.shape)}")
    if not splits.size:
        raise InvalidArgumentError(f"{name} must have at least one entry, got none")
    if splits[0] != 0:
        raise InvalidArgumentError(f"{name} must start with 0, got {splits[0]}")
    if decreases(splits):
        raise InvalidArgumentError(f"{name} must never decrease")


def decreases(splits: Splits) -> bool:
    """Whether an entry is smaller than the one before it."""
    return bool((splits[1:] < splits[:-1]).any())


def check_nested_splits(name: str, nested: Sequence[Splits], shape: Sequence[int]) -> None:
    """Check that nested splits partition values of `shape`, the innermost first."""
    if nested and not shape:
        raise InvalidArgumentError(f"values partitioned by {name} must have rank 1 or more, got a scalar")
    total = shape[0] if shape else 0
    for level in reversed(range(len(nested))):
        check_splits(f"{name}[{level}]", nested[level], total)
        total = len(nested[level]) - 1


def compose_splits(nested: Sequence[Splits]) -> Splits:
    """The bounds of the outermost rows among the values."""
    composed = nested[0]
    for inner in nested[1:]:
        composed = inner[composed]
    return composed


def splits_from_lengths(lengths: Any, dtype: Any = np.int64) -> Splits:
    """The split vector of rows of these lengths."""
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return cast_splits("row splits", splits, dtype)


def cast_splits(name: str, splits: Splits, dtype: Any) -> Splits:
    """Convert `splits` to another integer dtype; refused if they do not fit."""
    if splits.dtype == dtype:
        return splits
    if splits.size and splits[-1] > np.iinfo(dtype).max:
        raise InvalidArgumentError(f"{name} must fit in {np.dtype(dtype)}, got {splits[-1]}")
    return splits.astype(dtype)


def uniform_splits(rows: int, length: int, dtype: Any = np.int64) -> Splits:
    """The split vector of `rows` rows of one length."""
    return cast_splits("row splits", np.arange(rows + 1, dtype=np.int64) * length, dtype)


def row_ids(splits: Splits) -> np.ndarray:
    """The row number of every value."""
    return np.repeat(np.arange(len(splits) - 1), np.diff(splits))


def positions(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`starts[i], starts[i] + 1, ...`, `lengths[i]` of them, for one `i` after the other."""
    ends = np.cumsum(lengths)
    shift = np.repeat(starts - ends + lengths, lengths)
    shift += np.arange(len(shift))
    return shift


def cut_splits(nested: Sequence[Splits], start: int, stop: int) -> tuple[tuple[Splits, ...], int, int]:
    """The splits of rows `start` to `stop`, each starting at 0, and the bounds of their values."""
    pieces = []
    for splits in nested:
        piece = splits[start : stop + 1]
        start, stop = int(piece[0]), int(piece[-1])
        pieces.append(piece - piece[0] if start else piece)
    return tuple(pieces), start, stop


def join_splits(pieces: Sequence[Sequence[Splits]], dtype: Any) -> tuple[Splits, ...]:
    """The nested splits of several ragged values of one rank joined along the first axis."""
    joined = []
    for level in zip(*pieces, strict=True):
        lengths = np.concatenate([np.diff(s) for s in level]) if level else ()
        joined.append(splits_from_lengths(lengths, dtype))
    return tuple(joined)


def output_splits(splits: Splits, library: str) -> Array:
    """Convert splits for the caller: a CPU tensor if the values are torch tensors, else a read-only NumPy array.

    Writable splits were made for this caller. Others are shared: the caller gets a copy.
    """
    if library != "torch":
        return read_only(splits) if splits.flags.writeable else own(splits)
    return index_like(splits if splits.flags.writeable else splits.copy(), library)


def read_only(x: Array) -> Array:
    """Return a read-only view of a NumPy array, which shares memory with others; return other arrays unchanged."""
    if type(x) is np.ndarray and x.flags.writeable:
        x = x.view()
        x.flags.writeable = False
    return x
