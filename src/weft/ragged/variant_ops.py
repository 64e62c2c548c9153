"""RaggedTensorToVariant, RaggedTensorFromVariant, RaggedTensorToVariantGradient and their gradients.

No framework records these ops: the arrays inside a variant keep their own graph, and only cutting and joining rows adds nodes.
The gradients below are for `weft.vjp`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import (
    Array,
    Host,
    Variant,
    common_library,
    dtype_attribute,
    dtype_in,
    dtype_name,
    dtype_of,
    host,
    library_of,
    namespace,
    reshaped,
)
from ..core.check import flag, whole
from ..core.inputs import shown
from ..core.op import gradient, op
from ..errors import InvalidArgumentError
from ..kernels.splits import (
    Splits,
    as_nested_splits,
    as_splits,
    cast_splits,
    check_nested_splits,
    check_sorted,
    compose_splits,
    join_splits,
    output_splits,
    splits_from_lengths,
    uniform_splits,
)
from .inputs import empty_text, holdable, index_dtype
from .parts import Columns, RaggedValue, Rows, zeros
from .rows import join_rows, split_rows, stack_rows
from .variant import VariantArray


@op("RaggedTensorToVariant", output="encoded_ragged")
def ragged_tensor_to_variant(
    rt_nested_splits: list[Host], rt_dense_values: Array, batched_input: bool, name: str | None = None
) -> Variant:
    """Encode a ragged tensor as one variant or, if `batched_input`, as a vector of its rows, which stay in one buffer."""
    flag("batched_input", batched_input)
    splits = as_nested_splits("rt_nested_splits", rt_nested_splits)
    values = holdable("rt_dense_values", rt_dense_values)
    check_nested_splits("rt_nested_splits", splits, values.shape)
    if not batched_input:
        return VariantArray.scalar(splits, values)
    if not values.shape:
        raise InvalidArgumentError("rt_dense_values must have rank 1 or more when batched_input, got a scalar")
    return VariantArray.of_columns(splits, values)


@gradient(ragged_tensor_to_variant)
def _to_variant_pull(
    g: Variant | None, rt_nested_splits: list[Array], rt_dense_values: Array, batched_input: bool
) -> dict[str, Array]:
    """Compose the splits down to value positions, so that a missing nested row is as long as its values."""
    values = holdable("rt_dense_values", rt_dense_values)
    if g is None or g.library is None:
        return {"rt_dense_values": zeros(values)}
    nested = as_nested_splits("rt_nested_splits", rt_nested_splits)
    outer = compose_splits(nested) if batched_input and nested else np.asarray(0)
    return {"rt_dense_values": _flat_values(g, outer, tuple(values.shape), dtype_of(values))}


class Decoded(NamedTuple):
    """The outputs of RaggedTensorFromVariant."""

    output_nested_splits: list[Array]
    output_dense_values: Array


@op("RaggedTensorFromVariant")
def ragged_tensor_from_variant(
    encoded_ragged: Variant,
    input_ragged_rank: int,
    output_ragged_rank: int,
    Tvalues: Any,
    Tsplits: Any = "int64",
    name: str | None = None,
) -> Decoded:
    """Decode the ragged tensor whose rows are the variants; the dimensions of the variant array become uniform levels."""
    variant = _as_variant("encoded_ragged", encoded_ragged)
    dtype, index = dtype_attribute(Tvalues, "Tvalues"), index_dtype(Tsplits)
    rank = _element_rank(variant.ndim, input_ragged_rank, output_ragged_rank)
    if not variant.size:
        return _decode_nothing(variant, rank, output_ragged_rank, dtype, index)
    if not variant.shape:
        return _decode_one(variant.item(), rank, output_ragged_rank, dtype, index)
    columns = variant.columns
    if columns is None:
        columns = _as_columns(variant.rows(), rank, output_ragged_rank, dtype, index)
    else:
        inner = RaggedValue(columns.splits[1:], columns.values)
        _check_element("the elements", inner, rank, 1, dtype, index)
    return _decode_columns(variant.shape, columns, output_ragged_rank, index)


@gradient(ragged_tensor_from_variant)
def _from_variant_pull(
    g: Decoded, encoded_ragged: Variant, output_nested_splits: list[Array], output_ragged_rank: int
) -> dict[str, Variant]:
    """Encode the gradient: the elements are the rows of the innermost level of the variant array's own dimensions."""
    if g.output_dense_values is None:
        return {}
    shape = encoded_ragged.shape
    nested = as_nested_splits("output_nested_splits", output_nested_splits)
    if not shape:
        return {"encoded_ragged": VariantArray.scalar(nested, g.output_dense_values)}
    rows = VariantArray.of_columns(nested[len(shape) - 1 :], g.output_dense_values)
    return {"encoded_ragged": rows.reshape(shape)}


@op("RaggedTensorToVariantGradient", output="dense_values_grad")
def ragged_tensor_to_variant_gradient(
    encoded_ragged_grad: Variant,
    row_splits: Host,
    dense_values_shape: Host,
    Tvalues: Any,
    name: str | None = None,
) -> Array:
    """The gradient of the values that RaggedTensorToVariant encoded: the values of all variants, one after the other.

    Filler counts as zeros: as many as its row of `row_splits` is long, or one row if `row_splits` is a scalar. The result always
    has `dense_values_shape`.
    """
    variant = _as_variant("encoded_ragged_grad", encoded_ragged_grad)
    shape = _dense_shape(dense_values_shape)
    splits = as_splits("row_splits", row_splits)
    if splits.ndim:
        check_sorted("row_splits", splits)
    return _flat_values(variant, splits, shape, dtype_attribute(Tvalues, "Tvalues"))


@gradient(ragged_tensor_to_variant_gradient)
def _to_variant_gradient_pull(
    g: Array, encoded_ragged_grad: Variant, row_splits: Array, dense_values_shape: Array
) -> dict[str, Variant]:
    """Every element gets the block that its values were copied to; filler stays filler."""
    variant = encoded_ragged_grad
    xp = namespace(library_of(g) or "numpy")
    if variant.columns is not None:
        splits, values = variant.columns
        back = VariantArray.of_columns(splits, xp.reshape(g, tuple(values.shape)))
        return {"encoded_ragged_grad": back.reshape(variant.shape)}
    rows = variant.rows()
    sizes = _sizes(rows.values, as_splits("row_splits", row_splits), _dense_shape(dense_values_shape))
    if not sizes:
        return {"encoded_ragged_grad": variant}
    blocks = split_rows(xp.reshape(g, (-1,)), splits_from_lengths(sizes))
    pieces = [None if v is None else xp.reshape(b, tuple(v.shape)) for v, b in zip(rows.values, blocks, strict=True)]
    return {"encoded_ragged_grad": VariantArray.of_rows(variant.shape, Rows(pieces, rows.splits))}


# ---- decoding


def _element_rank(ndim: int, input_rank: int, output_rank: int) -> int:
    """The ragged rank every element must have."""
    for given, what, least in ((input_rank, "input_ragged_rank", -1), (output_rank, "output_ragged_rank", 0)):
        if whole(what, given) < least:
            raise InvalidArgumentError(f"{what} must be {least} or more, got {given}")
    rank = int(input_rank)
    if rank == -1:
        rank = output_rank - ndim if output_rank else 0
        if rank < 0:
            raise InvalidArgumentError(
                f"output_ragged_rank must be at least the rank of encoded_ragged, got {output_rank} and {ndim}"
            )
    if not (output_rank == rank == 0) and output_rank != rank + ndim:
        raise InvalidArgumentError(
            "output_ragged_rank must be input_ragged_rank + the rank of encoded_ragged, "
            f"got {output_rank}, {rank} and {ndim}"
        )
    return rank


def _check_element(what: str, e: RaggedValue | None, rank: int, least: int, dtype: str, index: np.dtype) -> None:
    if e is None:
        raise InvalidArgumentError(f"{what} must hold a ragged value, got filler")
    if len(e.splits) != rank:
        raise InvalidArgumentError(f"{what} must have ragged rank {rank}, got {len(e.splits)}")
    if dtype_of(e.values) != dtype:
        raise InvalidArgumentError(f"{what} must hold {dtype}, as Tvalues says, got {dtype_of(e.values)}")
    if e.values.ndim < least:
        raise InvalidArgumentError(f"{what} must hold values of rank {least} or more, got a scalar")
    for splits in e.splits:
        if splits.dtype != index:
            raise InvalidArgumentError(f"{what} must have {index} splits, as Tsplits says, got {splits.dtype}")


def _decode_one(element: RaggedValue | None, rank: int, output_rank: int, dtype: str, index: np.dtype) -> Decoded:
    _check_element("encoded_ragged", element, rank, min(output_rank, 1), dtype, index)
    assert element is not None
    check_nested_splits("the splits", element.splits, element.values.shape)
    return _decoded(element.splits, element.values)


def _decode_nothing(variant: VariantArray, rank: int, output_rank: int, dtype: str, index: np.dtype) -> Decoded:
    """Decode an array without elements: the shortest split vectors, and the inner shape if the columns have it."""
    levels = _uniform_levels(variant.shape, index)[:output_rank]
    levels += [np.zeros(1, index)] * (output_rank - len(levels))
    columns = variant.columns
    if columns is None or max(len(columns.splits) - 1, 0) != rank or dtype_of(columns.values) != dtype:
        return _decoded(levels, np.zeros((0,), dtype_in("numpy", dtype)))
    inner = columns.values.shape[1 if columns.splits else 2 :] if output_rank else ()
    return _decoded(levels, reshaped(columns.values, (0, *inner)))


def _as_columns(rows: Rows, rank: int, output_rank: int, dtype: str, index: np.dtype) -> Columns:
    """Join the elements in one buffer: stacked for output rank 0, else one below the other with one more split vector."""
    values = rows.values
    # Many elements without splits and of one type and dtype are checked at once, in a fraction of the time.
    if rows.splits is None and rank == 0 and len({(type(v), getattr(v, "dtype", None)) for v in values}) == 1:
        _check_element("the elements", None if values[0] is None else RaggedValue((), values[0]), 0, 0, dtype, index)
    else:
        for i, (splits, v) in enumerate(zip(rows.all_splits(), values, strict=True)):
            element = None if v is None else RaggedValue(splits, v)
            _check_element(f"element {i}", element, rank, min(output_rank, 1), dtype, index)
            check_nested_splits(f"the splits of element {i}", splits, v.shape)  # type: ignore[union-attr]
    common_library(values)
    shapes = {tuple(v.shape) for v in values}  # type: ignore[union-attr]
    if output_rank == 0:
        if len(shapes) > 1:
            raise InvalidArgumentError(
                f"elements to stack must have one shape, got {[list(s) for s in sorted(shapes)[:4]]}"
            )
        return Columns((), stack_rows(values))
    if not all(shapes) or len({s[1:] for s in shapes}) > 1 or len({len(s) for s in shapes}) > 1:
        raise InvalidArgumentError(
            "elements must have rank 1 or more and agree beyond the first axis, "
            f"got {[list(s) for s in list(shapes)[:4]]}"
        )
    bounds = splits_from_lengths([v.shape[0] for v in values])  # type: ignore[union-attr]
    joined = join_rows(values, bounds)
    if rank == 0:
        return Columns((cast_splits("the splits", bounds, index),), joined)
    outer = splits_from_lengths([len(s[0]) - 1 for s in rows.all_splits()], index)
    return Columns((outer, *join_splits(rows.all_splits(), index)), joined)


def _decode_columns(shape: tuple[int, ...], columns: Columns, output_rank: int, index: np.dtype) -> Decoded:
    splits, values = columns
    check_nested_splits("the splits", splits, values.shape)
    if output_rank == 0:
        return _decoded((), _stacked(splits[0], values) if splits else values)
    if not splits:
        if values.ndim < 2:
            raise InvalidArgumentError("the elements must hold values of rank 1 or more, got scalars")
        splits = (uniform_splits(values.shape[0], values.shape[1], index),)
        values = reshaped(values, (values.shape[0] * values.shape[1], *values.shape[2:]))
    fitted = [cast_splits("the splits", s, index) for s in splits]
    return _decoded([*_uniform_levels(shape, index), *fitted], values)


def _stacked(splits: Splits, values: Array) -> Array:
    """Stack rows of one length along a new axis, without copying."""
    lengths = np.diff(splits)
    if (lengths != lengths[0]).any():
        raise InvalidArgumentError(f"elements to stack must have one shape, got lengths {lengths.tolist()[:8]}")
    return reshaped(values, (len(lengths), int(lengths[0]), *values.shape[1:]))


def _uniform_levels(shape: tuple[int, ...], index: np.dtype) -> list[Splits]:
    """One split vector for each dimension of the variant array but the last."""
    return [uniform_splits(math.prod(shape[: k + 1]), shape[k + 1], index) for k in range(len(shape) - 1)]


def _decoded(splits: Sequence[Splits], values: Array) -> Decoded:
    library = library_of(values) or "numpy"
    return Decoded([output_splits(s, library) for s in splits], values)


# ---- the gradient


def _flat_values(variant: VariantArray, splits: Splits, shape: tuple[int, ...], dtype: str) -> Array:
    """The values of all variants, one after the other, reshaped to `shape`, which they must fill exactly."""
    columns = variant.columns
    if columns is not None:
        _check_dtypes(Rows([columns.values], None), dtype)
        _check_fills(math.prod(columns.values.shape), shape)
        return reshaped(columns.values, shape)
    rows = variant.rows()
    values: list[Any] = rows.values
    _check_dtypes(rows, dtype)
    if rows.dtype is None and any(v is None for v in values):
        _check_fills(sum(_sizes(values, splits, shape)), shape)
        values = _with_zeros(values, splits, shape, dtype)
    if not values:
        _check_fills(0, shape)
        return np.zeros(shape, dtype_in("numpy", dtype))
    joined = values[0] if len(values) == 1 else _joined(values, rows.dtype is not None)
    _check_fills(math.prod(joined.shape), shape)
    return reshaped(joined, shape)


def _joined(values: list[Array], is_numpy: bool) -> Array:
    if is_numpy or set(map(type, values)) == {np.ndarray}:
        try:
            return np.concatenate(values)
        except ValueError:  # ranks or inner shapes differ
            return np.concatenate([v.reshape(-1) for v in values])
    library = common_library(values)
    if len({tuple(v.shape[1:]) for v in values}) > 1 or not all(v.ndim for v in values):
        xp = namespace(library)
        values = [xp.reshape(v, (-1,)) for v in values]
    return join_rows(values, splits_from_lengths([v.shape[0] for v in values]))


def _sizes(values: list[Array | None], splits: Splits, shape: tuple[int, ...]) -> list[int]:
    """The number of values of each element, filler included."""
    held = [None if v is None else math.prod(v.shape) for v in values]
    if all(size is not None for size in held):
        return held  # type: ignore[return-value]
    if not shape:
        raise InvalidArgumentError(
            "dense_values_shape must have rank 1 or more where an element is missing, got a scalar"
        )
    if splits.ndim and len(splits) <= len(values):
        raise InvalidArgumentError(
            f"row_splits must have more than {len(values)} entries where an element is missing, got {len(splits)}"
        )
    lengths = np.diff(splits).tolist() if splits.ndim else [1] * len(values)
    inner = math.prod(shape[1:])
    return [lengths[i] * inner if size is None else size for i, size in enumerate(held)]


def _with_zeros(values: list[Array | None], splits: Splits, shape: tuple[int, ...], dtype: str) -> list[Array]:
    """`values` with one block of zeros for every run of filler."""
    like = next((v for v in values if v is not None), None)
    bounds = splits.tolist() if splits.ndim else range(len(values) + 1)
    pieces: list[Array] = []
    at = 0
    for missing, run in itertools.groupby(values, lambda v: v is None):
        group = list(run)
        length = bounds[at + len(group)] - bounds[at] if missing else 0
        pieces.extend([_zeros_like(like, (length, *shape[1:]), dtype)] if missing else group)
        at += len(group)
    return pieces


def _zeros_like(like: Array | None, shape: tuple[int, ...], dtype: str) -> Array:
    library = library_of(like) or "numpy"
    if dtype == "string":
        return np.full(shape, b"" if like is None else empty_text(like), object)  # TensorFlow's text is bytes
    where = {"device": like.device} if library == "torch" and like is not None else {}
    return namespace(library).zeros(shape, dtype=dtype_in(library, dtype), **where)


def _check_dtypes(rows: Rows, dtype: str) -> None:
    for found in [rows.dtype] if rows.dtype is not None else {v.dtype for v in rows.values if v is not None}:
        if dtype_name(found) != dtype:
            raise InvalidArgumentError(f"every element must hold {dtype}, as Tvalues says, got {dtype_name(found)}")


def _check_fills(count: int, shape: tuple[int, ...]) -> None:
    if count != math.prod(shape):
        raise InvalidArgumentError(
            f"the elements must fill dense_values_shape {list(shape)} exactly, got {count} values"
        )


def _dense_shape(given: Any) -> tuple[int, ...]:
    if library_of(given) is None:
        try:
            given = np.asarray(given, np.int32)
        except (OverflowError, ValueError, TypeError):
            raise InvalidArgumentError(f"dense_values_shape must be a vector of int32, got {shown(given)}") from None
    found = host(given)
    if found.dtype != np.int32 or found.ndim != 1:
        raise InvalidArgumentError(
            f"dense_values_shape must be a vector of int32, got {found.dtype} of shape {list(found.shape)}"
        )
    shape = tuple(found.tolist())
    if any(d < 0 for d in shape) or math.prod(shape) > np.iinfo(np.int64).max:
        raise InvalidArgumentError(f"dense_values_shape must not be negative nor overflow int64, got {list(shape)}")
    return shape


def _as_variant(name: str, x: Any) -> VariantArray:
    if not isinstance(x, VariantArray):
        raise InvalidArgumentError(f"{name} must be a variant array, got {type(x).__name__}")
    return x
