"""RaggedTensorToTensor, RaggedTensorToSparse, RaggedFillEmptyRows and RaggedFillEmptyRowsGrad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import kernels
from ..core.arrays import Array, Host, dtype_of, host, index_like, library_of, namespace, reshaped
from ..core.check import text
from ..core.inputs import items, shown
from ..core.memory import own
from ..core.op import gradient, op
from ..errors import ArgumentTypeError, InvalidArgumentError, NotFoundError
from ..kernels.splits import (
    Splits,
    as_nested_splits,
    as_splits,
    check_nested_splits,
    check_sorted,
    decreases,
    positions,
    row_ids,
    splits_from_lengths,
)
from .inputs import beside, check_room, holdable
from .rows import add_rows, pad_rows, padding_sum, place_rows
from .variant import VariantArray

_PARTITIONS = ("FIRST_DIM_SIZE", "VALUE_ROWIDS", "ROW_SPLITS")


class Moves(NamedTuple):
    """Where rows of values go: `lengths[i]` values from `starts[i]` go to row `targets[i]` of the flat result."""

    starts: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray


@op("RaggedTensorToTensor", recorded=False, output="result")
def ragged_tensor_to_tensor(
    shape: Host,
    values: Array,
    default_value: Array,
    row_partition_tensors: list[Host],
    row_partition_types: Sequence[str],
    name: str | None = None,
) -> Array:
    """Convert a ragged tensor to a dense one: rows are cut, or padded with `default_value`, to `shape`; -1 is the longest row."""
    values = holdable("values", values)
    default = _default(default_value, values)
    rows, levels = _levels(row_partition_tensors, row_partition_types)
    outer = _outer_shape(shape, values, rows, levels)
    if 0 in outer or 0 in values.shape[1:]:  # as in TensorFlow, an empty result needs no more checks
        default = None
    elif any(d not in (1, n) for d, n in zip(default.shape[::-1], values.shape[:0:-1], strict=False)):
        raise InvalidArgumentError(f"default_value must broadcast to one value, got shape {list(default.shape)}")
    check_room([*outer, *values.shape[1:]], values.dtype.itemsize)
    if len(levels) == 1 and levels[0].owners is None and 0 not in outer:  # benchmark rows "to_padded" need this
        _check_level(levels[0], rows)
        _check_count(levels[0], values)
        flat = pad_rows(values, default, levels[0].bounds, *outer)
    else:
        flat = place_rows(values, default, *_moves(rows, levels, outer, values), math.prod(outer))
    return reshaped(flat, (*outer, *values.shape[1:]))


@gradient(ragged_tensor_to_tensor)
def _to_tensor_pull(
    g: Array,
    shape: Array,
    values: Array,
    default_value: Array,
    row_partition_tensors: list[Array],
    row_partition_types: Sequence[str],
) -> dict[str, Array]:
    """A dense gradient: zeros for values that were cut off; for `default_value` the sum over the padding."""
    if g is None:
        return {}
    values = holdable("values", values)
    rows, levels = _levels(row_partition_tensors, row_partition_types)
    outer = _outer_shape(shape, values, rows, levels)
    starts, lengths, targets = _moves(rows, levels, outer, values)
    flat = reshaped(g, (math.prod(outer), *values.shape[1:]))
    back = {"values": add_rows(flat, targets, lengths, starts, int(values.shape[0]))}
    if library_of(default_value) is not None:
        back["default_value"] = padding_sum(flat, lengths, targets, tuple(default_value.shape))
    return back


def _default(given: Any, values: Array) -> Array:
    """Convert `default_value` to an array of the library of `values`, and check its dtype and shape."""
    library = library_of(values) or "numpy"
    default = given
    if library_of(given) is None:
        default = _default_from_python(given, values, library)
    elif dtype_of(given) != dtype_of(values):
        raise InvalidArgumentError(f"default_value must be {dtype_of(values)}, as values are, got {dtype_of(given)}")
    if default.ndim >= values.ndim:
        raise InvalidArgumentError(
            f"default_value must have a lower rank than values, got {default.ndim} and {values.ndim}"
        )
    # TensorFlow compares dimensions from the left here, and broadcasts them from the right.
    if any(d not in (1, n) for d, n in zip(default.shape, values.shape[1:], strict=False)):
        raise InvalidArgumentError(
            f"default_value must begin like one value, {list(values.shape[1:])}, or with 1, got shape {list(default.shape)}"
        )
    return default


def _default_from_python(given: Any, values: Array, library: str) -> Array:
    try:
        if dtype_of(values) == "string":
            return holdable("default_value", np.asarray(given, object))
        if given is None:  # NumPy would convert it to NaN
            raise TypeError
        return namespace(library).asarray(given, dtype=values.dtype)
    except (ValueError, TypeError, OverflowError):
        raise InvalidArgumentError(
            f"default_value must be {dtype_of(values)}, as values are, got {shown(given)}"
        ) from None


class Level(NamedTuple):
    """One row partition: the bounds of its rows; for row ids, also the row that each run belongs to (`owners`)."""

    bounds: np.ndarray
    longest: int
    ascends: bool
    owners: np.ndarray | None


def _levels(tensors: Sequence[Any], types: Sequence[str]) -> tuple[int, list[Level]]:
    """Return the number of rows and the partitions; check their types, number, order and ranks."""
    if not isinstance(types, (list, tuple)):
        raise ArgumentTypeError(f"row_partition_types must be a list of texts, got {shown(types)}")
    types = [text("row_partition_types", t) for t in items("row_partition_types", types)]
    if unknown := [t for t in types if t not in _PARTITIONS]:
        raise InvalidArgumentError(f"row_partition_types must be of {_PARTITIONS}, got {unknown[0]!r}")
    if types[:1] != ["ROW_SPLITS"] and types[:2] != ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]:
        raise InvalidArgumentError(
            f"row_partition_types must begin with ROW_SPLITS, or FIRST_DIM_SIZE and VALUE_ROWIDS, got {types}"
        )
    arrays = as_nested_splits("row_partition_tensors", tensors)
    if len(arrays) < len(types):
        raise InvalidArgumentError(f"row_partition_tensors must be {len(types)}, one for each type, got {len(arrays)}")
    for i, (kind, x) in enumerate(zip(types, arrays, strict=False)):
        if x.ndim != (kind != "FIRST_DIM_SIZE") or (kind == "ROW_SPLITS" and not x.size):
            wanted = "a scalar" if kind == "FIRST_DIM_SIZE" else "a vector that is not empty"
            raise InvalidArgumentError(
                f"row_partition_tensors[{i}], {kind}, must be {wanted}, got shape {list(x.shape)}"
            )
    if types[0] == "ROW_SPLITS":
        return len(arrays[0]) - 1, [_level(*pair) for pair in zip(types, arrays, strict=False)]
    if "FIRST_DIM_SIZE" in types[1:] or arrays[0] < 0:
        raise InvalidArgumentError("FIRST_DIM_SIZE must come once, first, and not be negative")
    return int(arrays[0]), [_level(*pair) for pair in zip(types[1:], arrays[1:], strict=False)]


def _level(kind: str, partition: np.ndarray) -> Level:
    if kind == "ROW_SPLITS":
        longest = kernels.best("longest_row", partition)(partition)
        if longest >= 0:
            return Level(partition, longest, True, None)
        return Level(partition, max(int(np.diff(partition).max()), 0), False, None)
    changes = np.flatnonzero(partition[1:] != partition[:-1]) + 1
    bounds = np.concatenate([[0], changes, [len(partition)]]) if len(partition) else np.zeros(1, np.int64)
    return Level(bounds, int(np.diff(bounds).max(initial=0)), True, partition[bounds[:-1]].astype(np.int64))


def _outer_shape(shape: Any, values: Array, rows: int, levels: list[Level]) -> tuple[int, ...]:
    """The dimensions of the result before the values' inner ones."""
    natural = [rows, *(level.longest for level in levels)]
    given = as_splits("shape", shape)
    if not given.ndim and given == -1:
        return tuple(natural)
    rank = len(levels) + values.ndim
    if given.shape != (rank,):
        raise InvalidArgumentError(f"shape must have {rank} entries, or be the scalar -1, got {given.tolist()}")
    wanted, inner = given.tolist(), list(values.shape[1:])
    if min(wanted) < -1:
        raise InvalidArgumentError(f"shape must not go below -1, got {wanted}")
    if any(d not in (-1, n) for d, n in zip(wanted[len(levels) + 1 :], inner, strict=True)):
        raise InvalidArgumentError(f"shape must end with {inner}, as values do, got {wanted}")
    return tuple(n if d == -1 else d for d, n in zip(wanted, natural, strict=False))


def _moves(rows: int, levels: list[Level], outer: tuple[int, ...], values: Array) -> Moves:
    """Where every row of the innermost level goes; rows and columns outside the result have length 0."""
    if 0 in outer:
        return Moves(*np.zeros((3, 0), np.int64))
    # The position of each parent row in the flat result, -1 for none. None: row i is at i.
    places: np.ndarray | None = None
    parents = rows
    for level, size in zip(levels, outer[1:], strict=True):
        _check_level(level, parents)
        owners = np.arange(len(level.bounds) - 1) if level.owners is None else level.owners
        if places is None:
            outside = owners >= outer[0]
        else:
            owners = places[owners]
            outside = owners < 0
        kept = np.minimum(np.diff(level.bounds), size)
        kept[outside] = 0
        starts, targets, parents = level.bounds[:-1], owners * size, int(level.bounds[-1])
        if level is not levels[-1]:
            check_room((parents,), 8)  # splits may claim more rows than the next level has
            places = np.full(parents, -1, np.int64)
            places[positions(starts, kept)] = positions(targets, kept)
    _check_count(levels[-1], values)
    return Moves(starts, kept, targets)


def _check_count(innermost: Level, values: Array) -> None:
    if innermost.bounds[-1] > values.shape[0]:
        raise InvalidArgumentError(
            f"row_partition_tensors must not count more than the {values.shape[0]} values, got {innermost.bounds[-1]}"
        )


def _check_level(level: Level, parents: int) -> None:
    if level.owners is None:
        if not level.ascends or level.bounds[0]:
            check_sorted("row splits", level.bounds)
        if len(level.bounds) - 1 > parents:
            raise InvalidArgumentError(f"row splits must have at most {parents} rows, got {len(level.bounds) - 1}")
    elif level.owners.size and (level.owners[0] < 0 or level.owners[-1] >= parents or decreases(level.owners)):
        raise InvalidArgumentError(f"row ids must be in [0, {parents}) and never decrease")


class Sparse(NamedTuple):
    """The outputs of RaggedTensorToSparse."""

    sparse_indices: Array
    sparse_values: Array
    sparse_dense_shape: Array


@op("RaggedTensorToSparse", recorded=False)
def ragged_tensor_to_sparse(rt_nested_splits: list[Host], rt_dense_values: Array, name: str | None = None) -> Sparse:
    """Convert a ragged tensor to sparse coordinates: one for every scalar value, in row-major order."""
    values = _sparse_input(rt_dense_values)
    nested = as_nested_splits("rt_nested_splits", rt_nested_splits)
    if not nested:
        raise InvalidArgumentError("rt_nested_splits must have at least one split vector, got none")
    check_nested_splits("rt_nested_splits", nested, values.shape)
    inner = tuple(values.shape[1:])
    count = math.prod(values.shape)
    check_room((count, len(nested) + values.ndim), 8)
    longest = [max(np.diff(s).max(initial=0), 0) for s in nested]
    dense_shape = np.asarray([len(nested[0]) - 1, *longest, *inner], np.int64)
    library = library_of(values) or "numpy"
    return Sparse(
        index_like(_coordinates(nested, inner), library),
        values.reshape((count,)) if isinstance(values, VariantArray) else reshaped(values, (count,)),
        index_like(dense_shape, library),
    )


@gradient(ragged_tensor_to_sparse)
def _to_sparse_pull(g: Sparse, rt_dense_values: Array) -> dict[str, Array]:
    if g.sparse_values is None:
        return {}
    return {"rt_dense_values": reshaped(g.sparse_values, tuple(_sparse_input(rt_dense_values).shape))}


def _sparse_input(values: Any) -> Any:
    return values if isinstance(values, VariantArray) else holdable("rt_dense_values", values)


def _coordinates(nested: Sequence[Splits], inner: tuple[int, ...]) -> np.ndarray:
    """For every scalar value its row, its position in each level, and its inner indices."""
    rows = np.arange(len(nested[0]) - 1)
    columns = [rows]
    for splits in nested:
        ids = row_ids(splits)
        places = np.arange(len(ids)) - splits[:-1][ids] if len(ids) else ids
        columns = [c[ids] for c in columns] + [places]
    size = math.prod(inner)
    outer = np.stack(columns, axis=1).astype(np.int64, copy=False)
    if not inner:
        return outer
    inside = np.indices(inner).reshape(len(inner), size).T
    return np.concatenate([np.repeat(outer, size, axis=0), np.tile(inside, (len(outer), 1))], axis=1)


class Filled(NamedTuple):
    """The outputs of RaggedFillEmptyRows."""

    output_value_rowids: Array
    output_values: Array
    empty_row_indicator: Array
    reverse_index_map: Array


@op("RaggedFillEmptyRows", recorded=False)
def ragged_fill_empty_rows(
    value_rowids: Host, values: Array, nrows: Host, default_value: Array, name: str | None = None
) -> Filled:
    """The values in the order of their rows, with one `default_value` in every empty row."""
    ids, count = _int64("value_rowids", value_rowids), _int64("nrows", nrows)
    values = holdable("values", values)
    _check_fill(ids, values, count, default_value)
    default = _default(default_value, values)
    library, rows = library_of(values) or "numpy", int(count)
    check_room((rows,), 64)  # for temporary arrays
    lengths = np.bincount(ids, minlength=rows)
    empty = lengths == 0
    bounds = splits_from_lengths(np.maximum(lengths, 1))
    order = np.argsort(ids, kind="stable")
    places = np.empty(len(ids), np.int64)
    places[order] = bounds[ids[order]] + np.arange(len(ids)) - (np.cumsum(lengths) - lengths)[ids[order]]
    ones = np.ones(len(ids), np.int64)
    filled = place_rows(values, default, np.arange(len(ids)), ones, places, int(bounds[-1]))
    # In TensorFlow the row ids have the shape [0, 1] if there are no rows.
    out_ids = row_ids(bounds) if rows else np.zeros((0, 1), np.int64)
    return Filled(*(index_like(x, library) if x is not filled else x for x in (out_ids, filled, empty, places)))


@gradient(ragged_fill_empty_rows)
def _fill_pull(g: Filled, reverse_index_map: Array) -> dict[str, Array]:
    if g.output_values is None:
        return {}
    where = host(reverse_index_map).astype(np.int64)  # JAX converts it to int32
    back = ragged_fill_empty_rows_grad(where, g.output_values)
    return {"values": back.d_values, "default_value": back.d_default_value}


def _int64(name: str, x: Any) -> np.ndarray:
    found = host(x) if library_of(x) is not None else np.asarray(x)
    # JAX converts int64 to int32, and Python integers have no width.
    loose = library_of(x) in (None, "jax") and found.dtype.kind in ("i" if found.size else "if")
    if found.dtype != np.int64 and not loose:
        raise InvalidArgumentError(f"{name} must be int64, got {found.dtype}")
    check_room(found.shape, 8)
    return own(found.astype(np.int64, copy=False))


def _check_fill(ids: np.ndarray, values: Array, nrows: np.ndarray, default: Any) -> None:
    if nrows.ndim:
        raise InvalidArgumentError(f"nrows must be a scalar, got shape {list(nrows.shape)}")
    if ids.ndim != 1 or values.ndim != 1 or len(ids) != values.shape[0]:
        raise InvalidArgumentError(
            "value_rowids and values must be vectors of one length, "
            f"got shapes {list(ids.shape)} and {list(values.shape)}"
        )
    if np.ndim(default) if library_of(default) is None else default.ndim:
        raise InvalidArgumentError("default_value must be a scalar")
    if nrows < 0:
        raise InvalidArgumentError(f"nrows must not be negative, got {nrows}")
    if ids.size and not (ids.min() >= 0 and ids.max() < nrows):
        raise InvalidArgumentError(f"value_rowids must be in [0, {nrows}), got {ids.min()} to {ids.max()}")


class FilledGrad(NamedTuple):
    """The outputs of RaggedFillEmptyRowsGrad."""

    d_values: Array
    d_default_value: Array


@op("RaggedFillEmptyRowsGrad", recorded=False)
def ragged_fill_empty_rows_grad(reverse_index_map: Host, grad_values: Array, name: str | None = None) -> FilledGrad:
    """The gradient of RaggedFillEmptyRows: the values that the map points to, and the sum of all others."""
    grads = holdable("grad_values", grad_values)
    if dtype_of(grads) in ("string", "bool"):
        raise NotFoundError(f"grad_values must be numbers, got {dtype_of(grads)}")
    where = _int64("reverse_index_map", reverse_index_map)
    if where.ndim != 1 or grads.ndim != 1:
        raise InvalidArgumentError(
            f"reverse_index_map and grad_values must be vectors, got shapes {list(where.shape)} and {list(grads.shape)}"
        )
    if where.size and not (where.min() >= 0 and where.max() < grads.shape[0]):
        raise InvalidArgumentError(
            f"reverse_index_map must be in [0, {grads.shape[0]}), got {where.min()} to {where.max()}"
        )
    ones = np.ones(len(where), np.int64)
    return FilledGrad(
        place_rows(grads, None, where, ones, np.arange(len(where)), len(where)), padding_sum(grads, ones, where, ())
    )


@gradient(ragged_fill_empty_rows_grad)
def _fill_grad_pull(g: FilledGrad, reverse_index_map: Array, grad_values: Array) -> dict[str, Array]:
    if g.d_values is None:
        return {}
    where = host(reverse_index_map).astype(np.int64)
    rows = int(holdable("grad_values", grad_values).shape[0])
    ones = np.ones(len(where), np.int64)
    direct = add_rows(g.d_values, np.arange(len(where)), ones, where, rows)
    unused = np.ones(rows, bool)
    unused[where] = False
    xp = namespace(library_of(g.d_values) or "numpy")
    return {"grad_values": xp.where(beside(unused, direct), direct + g.d_default_value, direct)}
