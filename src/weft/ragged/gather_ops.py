"""RaggedGather and RaggedRange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import kernels
from ..core.arrays import Array, Host, common_library, dtype_of, host, library_of
from ..core.check import INT64, integer
from ..core.memory import own
from ..core.op import gradient, op
from ..errors import InvalidArgumentError, NotFoundError, OpError
from ..kernels.splits import (
    Splits,
    as_nested_splits,
    as_splits,
    cast_splits,
    output_splits,
    positions,
    splits_from_lengths,
    uniform_splits,
)
from .inputs import beside, check_room, holdable, index_dtype
from .rows import add_rows, take_rows


class Gathered(NamedTuple):
    """The outputs of RaggedGather."""

    output_nested_splits: list[Array]
    output_dense_values: Array


@op("RaggedGather", recorded=False)
def ragged_gather(
    params_nested_splits: list[Host],
    params_dense_values: Array,
    indices: Host,
    OUTPUT_RAGGED_RANK: int,
    name: str | None = None,
) -> Gathered:
    """The rows `indices` of a ragged tensor, in the shape of `indices`; a scalar index gives the row itself.

    Splits may start above 0 and end early, as in TensorFlow: values outside are not gathered.
    """
    values = holdable("params_dense_values", params_dense_values)
    nested = as_nested_splits("params_nested_splits", params_nested_splits)
    index = as_splits("indices", indices)
    _check_gather(nested, values, index, integer("OUTPUT_RAGGED_RANK", OUTPUT_RAGGED_RANK, INT64))
    splits, starts, bounds = _gathered_rows(nested, index)
    check_room((int(bounds[-1]), *values.shape[1:]), values.dtype.itemsize)
    taken = take_rows(values, starts, bounds)
    library = library_of(values) or "numpy"
    return Gathered([output_splits(s, library) for s in splits], taken)


@gradient(ragged_gather)
def _gather_pull(
    g: Gathered, params_nested_splits: list[Array], params_dense_values: Array, indices: Array
) -> dict[str, Array]:
    """A dense gradient: the gradient of each gathered row is added to its source row."""
    if g.output_dense_values is None:
        return {}
    nested = as_nested_splits("params_nested_splits", params_nested_splits)
    _, starts, bounds = _gathered_rows(nested, as_splits("indices", indices))
    rows = int(holdable("params_dense_values", params_dense_values).shape[0])
    return {"params_dense_values": add_rows(g.output_dense_values, bounds[:-1], np.diff(bounds), starts, rows)}


def _check_gather(nested: Sequence[Splits], values: Array, index: np.ndarray, output_rank: int) -> None:
    if not nested:
        raise InvalidArgumentError("params_nested_splits must have at least one split vector, got none")
    if not nested[0].ndim:
        raise InvalidArgumentError("params_nested_splits[0] must not be a scalar")
    rows = nested[0].shape[0] - 1  # of a matrix TensorFlow counts the rows, and reads the numbers flat
    if not kernels.best("all_below", index)(index, rows):
        at = np.argwhere((index < 0) | (index >= max(rows, 0)))[0].tolist()
        raise InvalidArgumentError(f"indices{at} must be in [0, {max(rows, 0)}), got {index[tuple(at)]}")
    if not values.ndim:
        raise InvalidArgumentError("params_dense_values must have rank 1 or more, got a scalar")
    targets = [*(s.size - 1 for s in nested[1:]), values.shape[0]]
    for level, (splits, target) in enumerate(zip(nested, targets, strict=True)):
        _check_loose(f"params_nested_splits[{level}]", splits.reshape(-1), target)
    if output_rank != len(nested) + index.ndim - 1:
        raise InvalidArgumentError(
            f"OUTPUT_RAGGED_RANK must be {len(nested) + index.ndim - 1}, the ragged rank of params "
            f"plus the rank of indices minus 1, got {output_rank}"
        )


def _check_loose(name: str, splits: Splits, target: int) -> None:
    if not splits.size:
        raise InvalidArgumentError(f"{name} must have at least one entry, got none")
    if splits[0] < 0:
        raise InvalidArgumentError(f"{name} must not start below 0, got {splits[0]}")
    if splits[-1] > target:
        raise InvalidArgumentError(
            f"{name} must not end past {target}, the number of rows it partitions, got {splits[-1]}"
        )
    if kernels.best("longest_row", splits)(splits) < 0:
        raise InvalidArgumentError(f"{name} must never decrease")


def _gathered_rows(nested: Sequence[Splits], index: np.ndarray) -> tuple[list[Splits], np.ndarray, np.ndarray]:
    """The result's splits, the first value of each gathered row, and the splits of the gathered values."""
    dtype, shape = nested[0].dtype, index.shape
    splits = [uniform_splits(math.prod(shape[: k + 1]), shape[k + 1], dtype) for k in range(len(shape) - 1)]
    rows = index.reshape(-1).astype(np.int64, copy=False)
    outer = np.ascontiguousarray(nested[0].reshape(-1))
    starts, bounds = kernels.best("row_bounds", outer)(outer, rows)
    if shape:  # a scalar index removes the outermost level
        splits.append(cast_splits("row splits", bounds, dtype))
    for vector in nested[1:]:
        flat, lengths = vector.reshape(-1), np.diff(bounds)
        splits.append(splits_from_lengths(np.diff(flat)[positions(starts, lengths)], dtype))
        stops = flat[starts + lengths].astype(np.int64)
        starts = flat[starts].astype(np.int64)
        bounds = splits_from_lengths(stops - starts)
    return splits, starts, bounds


class Ranges(NamedTuple):
    """The outputs of RaggedRange."""

    rt_nested_splits: Array
    rt_dense_values: Array


@op("RaggedRange", recorded=False)
def ragged_range(
    starts: Array, limits: Array, deltas: Array, Tsplits: Any = "int64", name: str | None = None
) -> Ranges:
    """One row for each start, limit and step; scalars are used for every row. Floats are computed by repeated addition."""
    index = index_dtype(Tsplits)
    library = common_library([starts, limits, deltas])
    first, limit, step = _range_inputs(starts, limits, deltas)
    rows = max([x.shape[0] for x in (first, limit, step) if x.ndim], default=1)
    first, limit, step = (np.broadcast_to(x, (rows,)) for x in (first, limit, step))
    lengths = _range_lengths(first, limit, step, np.iinfo(index).max)
    splits = splits_from_lengths(lengths, index)
    check_room((int(splits[-1]),), first.dtype.itemsize)
    values = kernels.best("range_rows", first)(first, step, splits)
    like = next((x for x in (starts, limits, deltas) if library_of(x) == library), values)
    return Ranges(output_splits(splits, library), beside(values, like))


@gradient(ragged_range)
def _range_pull(g: Ranges) -> dict[str, Array]:
    """No gradient: the number of values is a step function of the inputs."""
    return {}


def _range_inputs(*given: Any) -> list[np.ndarray]:
    """Convert the inputs to host arrays of one dtype; Python numbers take the dtype of the arrays."""
    arrays = [x for x in given if library_of(x) is not None]
    names = [dtype_of(x) for x in arrays]
    if not arrays:
        loose = [np.asarray(x) for x in given]
        names = ["int32" if all(x.dtype.kind in "iub" for x in loose) else "float32"]
    dtype = names[0]
    if dtype == "bfloat16":  # before the others are looked at, as in TensorFlow
        raise NotFoundError("RaggedRange has no kernel for bfloat16")
    if len(set(names)) > 1:
        raise InvalidArgumentError(f"starts, limits and deltas must have one dtype, got {sorted(set(names))}")
    if dtype not in ("int32", "int64", "float32", "float64"):
        raise InvalidArgumentError(f"starts must be int32, int64, float32 or float64, got {dtype}")
    try:
        # Copies, so that the count and the values are computed from the same numbers.
        found = [own(host(x) if library_of(x) else np.asarray(x, dtype)) for x in given]
    except OpError:
        raise
    except (ValueError, OverflowError, TypeError):
        raise InvalidArgumentError(f"starts, limits and deltas must be regular and fit in {dtype}") from None
    for name, x in zip(("starts", "limits", "deltas"), found, strict=True):
        if x.ndim > 1:
            raise InvalidArgumentError(f"{name} must be a scalar or a vector, got shape {list(x.shape)}")
    if len({x.shape for x in found if x.ndim}) > 1:
        raise InvalidArgumentError(f"vectors must have equal lengths, got {[list(x.shape) for x in found]}")
    return found


def _range_lengths(first: np.ndarray, limit: np.ndarray, step: np.ndarray, most: int) -> np.ndarray:
    """The number of values of each row; refused if a step is 0, or a count or the total is above `most`."""
    if (step == 0).any():
        raise InvalidArgumentError(f"deltas must not be 0, got 0 in row {int(np.argmax(step == 0))}")
    backward = np.where(step > 0, limit < first, limit > first)
    if first.dtype.kind == "i":
        # Two int64 can be 2**64 - 1 apart: wrapping to unsigned gives the distance without overflow.
        start, end, by = (x.astype(np.int64).view(np.uint64) for x in (first, limit, step))
        distance = np.where(step > 0, end - start, start - end)
        by = np.where(step > 0, by, -by)
        counts = np.where(backward, np.uint64(0), distance // by + (distance % by != 0))
        fits = (counts <= most).all()
    else:
        with np.errstate(all="ignore"):
            counts = np.where(backward, 0, np.ceil(np.abs((limit - first) / step))).astype(np.float64)
        fits = (counts < most + 1).all()
    if not fits:
        raise InvalidArgumentError(f"a row must have at most {most} values, the limit of Tsplits")
    exact = counts.astype(np.int64)
    if (int((exact >> 32).sum()) << 32) + int((exact & 0xFFFFFFFF).sum()) > most:
        raise InvalidArgumentError(f"all rows together must have at most {most} values, the limit of Tsplits")
    return exact
