"""The arguments `batch_index` and `id` of Unbatch and UnbatchGrad: checks, and conversion to Python numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import check
from ..core.arrays import host, library_of
from ..errors import ArgumentTypeError, InternalError, InvalidArgumentError
from .rendezvous import Row

INT64 = np.dtype(np.int64)


def host_index(batch_index: Any) -> np.ndarray:
    """Return the index as a host array of int64."""
    index, is_array = host(batch_index), library_of(batch_index) is not None
    if not is_array and (index.dtype.kind == "i" or (index.dtype.kind == "f" and not index.size)):
        return index.astype(np.int64)
    if index.dtype != INT64:
        error = InvalidArgumentError if is_array else ArgumentTypeError
        raise error(f"batch_index must be int64, got {index.dtype}")
    return index


def rows_of(index: np.ndarray, available: int) -> list[Row]:
    """Return the index as numbers; each piece must lie within the data, and all together may not have more rows than it."""
    if len(index) > available:
        raise InvalidArgumentError(
            f"batch_index must not have more rows than batched_tensor, got {len(index)} and {available}"
        )
    rows = index.tolist() if index.ndim == 2 else index.reshape(-1, 3).tolist()
    total = 0
    for id, start, length in rows:  # Python's integers do not overflow
        if start < 0 or length < 0 or start + length > available:
            raise InvalidArgumentError(
                f"each row (id, start, length) of batch_index must lie within the {available} rows of batched_tensor, "
                f"got ({id}, {start}, {length})"
            )
        total += length
    if total > available:
        raise InvalidArgumentError(f"the lengths in batch_index must add up to at most {available} rows, got {total}")
    return rows  # type: ignore[return-value]


def id_of(id: Any) -> int:
    """Return the id as a number."""
    if type(id) is int:
        return check.integer("id", id, check.INT64)
    if type(id) is not np.ndarray:
        given = library_of(id)
        id = host(id)
        if given is None:
            if id.dtype.kind not in "ib":
                raise ArgumentTypeError(f"id must be an integer, got {id.dtype}")
            id = id.astype(np.int64)
    if id.shape != ():
        raise InvalidArgumentError(f"Input id should be scalar; got shape {list(id.shape)}")
    if id.dtype != INT64:
        raise InvalidArgumentError(f"id must be int64, got {id.dtype}")
    return int(id)


def owned_rows(batch_index: Any) -> list[Row]:
    """Return the index of the call that has the batch as numbers; every id must stand in it once."""
    index = host_index(batch_index)
    if not index.shape or not index.size or index.size != 3 * index.shape[0]:
        raise InvalidArgumentError(
            f"the call that has the batch must have a batch_index of the shape [n, 3] with n > 0, got {list(index.shape)}"
        )
    rows = index.reshape(-1, 3).tolist()
    seen: set[int] = set()
    for id, _, _ in rows:
        if id in seen:
            raise InternalError(f"every id may stand once in batch_index, got {id} twice")
        seen.add(id)
    return rows  # type: ignore[return-value]
