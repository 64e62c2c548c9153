"""RaggedBincount, RaggedCountSparseOutput and RaggedCross."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array, Host, dtype_attribute, dtype_of, host, index_like, library_of
from ..core.check import INT64, flag, integer, text
from ..core.memory import own
from ..core.op import op
from ..errors import InvalidArgumentError
from ..kernels.splits import (
    Splits,
    as_splits,
    check_splits,
    output_splits,
    row_ids,
    splits_from_lengths,
    uniform_splits,
)
from .farmhash import fingerprint64
from .inputs import beside, check_room, holdable, index_dtype


@op("RaggedBincount")
def ragged_bincount(
    splits: Host, values: Host, size: Host, weights: Array, binary_output: bool = False, name: str | None = None
) -> Array:
    """Count each number below `size` in each row, or sum its weights, or mark whether it occurs (`binary_output`)."""
    binary = flag("binary_output", False if binary_output is None else binary_output)
    bounds, numbers, scale = _bounds(splits).reshape(-1), _numbers(values), _weights(weights)
    bins = _bins(size, numbers.dtype)
    numbers, scale = own(numbers).reshape(-1), own(scale).reshape(-1)
    check_splits("splits", bounds, numbers.size)
    if scale.size not in (0, numbers.size):
        raise InvalidArgumentError(f"weights must be empty or one for each of {numbers.size} values, got {scale.size}")
    _check_not_negative(numbers)
    rows = len(bounds) - 1
    check_room((rows, bins), scale.itemsize)
    counts = _counts(row_ids(bounds), numbers, scale, rows, bins, binary)
    return beside(counts, weights)


def _bounds(splits: Any) -> Splits:
    """Convert splits to a host array; those of a library must be int64, which JAX may not have."""
    found = as_splits("splits", splits)
    if found.dtype != np.int64 and library_of(splits) not in (None, "jax"):
        raise InvalidArgumentError(f"splits must be int64, got {found.dtype}")
    return found


def _numbers(values: Any) -> np.ndarray:
    """Convert the numbers to count to a host array; Python integers become int32, as in TensorFlow."""
    found = host(values) if library_of(values) is not None else _from_python("values", values, np.int32)
    if found.dtype not in (np.int32, np.int64):
        raise InvalidArgumentError(f"values must be int32 or int64, got {found.dtype}")
    return found


def _weights(weights: Any) -> np.ndarray:
    """Convert weights to a host array; Python numbers become int32 or float32, as in TensorFlow."""
    found = host(weights) if library_of(weights) is not None else _from_python("weights", weights, np.float32)
    if str(found.dtype) not in ("int32", "int64", "float32", "float64"):
        raise InvalidArgumentError(f"weights must be int32, int64, float32 or float64, got {found.dtype}")
    return found


def _from_python(name: str, x: Any, empty_dtype: Any) -> np.ndarray:
    """Convert lists of numbers as TensorFlow does: int32 if they fit, else int64, or float32; `empty_dtype` for an empty list."""
    try:
        found = np.asarray(x)
    except ValueError:
        raise InvalidArgumentError(f"{name} must have a regular shape") from None
    if not found.size:
        return found.astype(empty_dtype)
    if found.dtype == np.int64 and found.min() >= -(2**31) and found.max() < 2**31:
        return found.astype(np.int32)
    return found.astype(np.float32) if found.dtype == np.float64 else found


def _check_not_negative(numbers: np.ndarray) -> None:
    if numbers.size and numbers.min() < 0:
        raise InvalidArgumentError(f"values must not be negative, got {numbers.min()}")


def _bins(size: Any, dtype: np.dtype) -> int:
    found = host(size) if library_of(size) is not None else np.asarray(size)
    if found.dtype.kind != "i" or (library_of(size) is not None and found.dtype != dtype):
        raise InvalidArgumentError(f"size must be of the dtype of values, got {found.dtype}")
    if found.ndim:
        raise InvalidArgumentError(f"size must be a scalar, got shape {list(found.shape)}")
    if found < 0:
        raise InvalidArgumentError(f"size must not be negative, got {found}")
    return int(found)


def _counts(ids: np.ndarray, numbers: np.ndarray, scale: np.ndarray, rows: int, bins: int, binary: bool) -> np.ndarray:
    out = np.zeros((rows, bins), scale.dtype)
    kept = np.flatnonzero((numbers < bins) & (numbers >= 0))
    where = (ids[kept], numbers[kept])
    if binary:
        out[where] = 1
    else:
        np.add.at(out, where, scale[kept] if scale.size else out.dtype.type(1))
    return out


class SparseCounts(NamedTuple):
    """The outputs of RaggedCountSparseOutput."""

    output_indices: Array
    output_values: Array
    output_dense_shape: Array


@op("RaggedCountSparseOutput")
def ragged_count_sparse_output(
    splits: Host,
    values: Host,
    weights: Array,
    binary_output: bool,
    minlength: int = -1,
    maxlength: int = -1,
    name: str | None = None,
) -> SparseCounts:
    """Count each number in each row, or sum its weights, or mark whether it occurs (`binary_output`), as sparse coordinates.

    Numbers from `maxlength` on are left out, unless it is -1. The dense shape has `maxlength` columns, or else one more than the
    largest number, and at least `minlength`.
    """
    least, most = _length("minlength", minlength), _length("maxlength", maxlength)
    binary = flag("binary_output", binary_output)
    bounds, numbers, scale = _bounds(splits).reshape(-1), _numbers(values), _weights(weights)
    if scale.size and scale.shape != numbers.shape:
        raise InvalidArgumentError(
            f"weights must be empty or have the shape of values, {list(numbers.shape)}, got {list(scale.shape)}"
        )
    check_room((numbers.size, 2), 8)  # before the copy: an array with stride 0 can be larger than memory
    numbers, scale = own(numbers).reshape(-1), own(scale).reshape(-1)
    if len(bounds) < 2:
        raise InvalidArgumentError(f"splits must have at least 2 entries, got {len(bounds)}")
    check_splits("splits", bounds, numbers.size)
    _check_not_negative(numbers)
    ids = row_ids(bounds)
    if most >= 0:
        kept = np.flatnonzero(numbers < most)
        ids, numbers, scale = ids[kept], numbers[kept], scale[kept] if scale.size else scale
    columns = most if most >= 0 else max(int(numbers.max(initial=0)) + 1, least)
    if columns > INT64[1]:
        raise InvalidArgumentError(f"values must be less than {INT64[1]}, got {numbers.max()}")
    found, counts = _sparse_counts(ids, numbers, scale, binary)
    library = library_of(weights) or library_of(values) or "numpy"
    shape = np.asarray([len(bounds) - 1, columns], np.int64)
    return SparseCounts(index_like(found, library), beside(counts, weights), index_like(shape, library))


def _length(name: str, value: Any) -> int:
    found = -1 if value is None else integer(name, value, INT64)
    if found < -1:
        raise InvalidArgumentError(f"{name} must be at least -1, got {found}")
    return found


def _sparse_counts(
    ids: np.ndarray, numbers: np.ndarray, scale: np.ndarray, binary: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of a row and a number that occurs in it, sorted, and its count."""
    order = np.lexsort((numbers, ids))
    pairs = np.stack([ids[order], numbers[order]], axis=1).astype(np.int64, copy=False)
    is_new = np.ones(len(pairs), bool)
    is_new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    found = pairs[is_new]
    if binary:
        return found, np.ones(len(found), scale.dtype)
    counts = np.zeros(len(found), scale.dtype)
    # In the order of the values, as in TensorFlow: a sum of floats depends on it.
    place = np.empty(len(pairs), np.int64)
    place[order] = np.cumsum(is_new) - 1
    np.add.at(counts, place, scale if scale.size else counts.dtype.type(1))
    return found, counts


class Crossed(NamedTuple):
    """The outputs of RaggedCross."""

    output_values: Array
    output_row_splits: Array


class _Feature(NamedTuple):
    """One input of a cross: int64 numbers or text, and the splits of its rows."""

    values: np.ndarray
    splits: Splits


@op("RaggedCross")
def ragged_cross(
    ragged_values: list[Host],
    ragged_row_splits: list[Host],
    sparse_indices: list[Host],
    sparse_values: list[Host],
    sparse_shape: list[Host],
    dense_inputs: list[Host],
    input_order: str,
    hashed_output: bool,
    num_buckets: int,
    hash_key: int,
    out_values_type: Any,
    out_row_splits_type: Any,
    name: str | None = None,
) -> Crossed:
    """All combinations of one item from each input, row by row, the last input varying fastest; text or fingerprints.

    As in TensorFlow, `out_values_type` decides between text and numbers, not `hashed_output`.
    """
    index, wanted = index_dtype(out_row_splits_type), dtype_attribute(out_values_type, "out_values_type")
    if wanted not in ("int64", "string"):
        raise InvalidArgumentError(f"out_values_type must be int64 or string, got {wanted}")
    buckets, key = integer("num_buckets", num_buckets, INT64), integer("hash_key", hash_key, INT64)
    if buckets < 0:
        raise InvalidArgumentError(f"num_buckets must not be negative, got {buckets}")
    if len(ragged_values) != len(ragged_row_splits):
        raise InvalidArgumentError("ragged_values and ragged_row_splits must be equally long")
    if not len(sparse_indices) == len(sparse_values) == len(sparse_shape):
        raise InvalidArgumentError("sparse_indices, sparse_values and sparse_shape must be equally long")
    ragged = [_ragged(v, s, index) for v, s in zip(ragged_values, ragged_row_splits, strict=True)]
    dense = [_dense(x) for x in dense_inputs]
    sparse = [_sparse(*x) for x in zip(sparse_indices, sparse_values, sparse_shape, strict=True)]
    features = _ordered(text("input_order", input_order), {"R": ragged, "S": sparse, "D": dense})
    if len({len(f.splits) for f in [*ragged, *dense, *sparse]}) > 1:
        raise InvalidArgumentError(f"inputs must have one batch size, got {[len(f.splits) - 1 for f in features]}")
    crossed = _crossed(features, wanted, buckets, key, index)
    given = [*ragged_values, *sparse_values, *dense_inputs]
    library = "torch" if any(library_of(x) == "torch" for x in given) else "numpy"
    # PyTorch has no text: it stays a NumPy array.
    values = crossed.output_values if wanted == "string" else index_like(crossed.output_values, library)
    return Crossed(values, output_splits(crossed.output_row_splits, library))


def _crossed(features: list[_Feature], wanted: str, buckets: int, key: int, index: np.dtype) -> Crossed:
    rows = len(features[0].splits) - 1 if features else 0
    lengths = [np.diff(f.splits) for f in features]
    sizes = [float(x) for x in np.prod([n.astype(float) for n in lengths], axis=0)] if features else []
    check_room((int(sum(sizes)),), 8)
    counts = np.prod(lengths, axis=0, dtype=np.int64) if features else np.zeros(rows, np.int64)
    splits = splits_from_lengths(counts, index)
    ids = row_ids(splits)
    turn = np.arange(len(ids)) - splits[:-1][ids]
    picks = []
    for feature, length in zip(reversed(features), reversed(lengths), strict=True):
        picks.append(feature.splits[:-1][ids] + turn % length[ids])
        turn = turn // length[ids]
    picks.reverse()
    cross = _fingerprints if wanted == "int64" else _texts
    return Crossed(cross(features, picks, len(ids), key, buckets), splits)


def _texts(features: list[_Feature], picks: list[np.ndarray], count: int, key: int, buckets: int) -> np.ndarray:
    out = np.empty(count, object)
    raw = _is_bytes(features)
    columns = [[_text(v, raw) for v in f.values] for f in features]
    parts = zip(*([c[i] for i in p] for c, p in zip(columns, picks, strict=True)), strict=True)
    out[:] = [(b"_X_" if raw else "_X_").join(part) for part in parts]
    return out


def _is_bytes(features: list[_Feature]) -> bool:
    """True if the crossed text is bytes, as TensorFlow's is: if any text given is, or none is given."""
    kinds = {type(v) for f in features if f.values.dtype.hasobject for v in f.values}
    return not kinds or any(issubclass(kind, bytes) for kind in kinds)


def _text(value: Any, raw: bool) -> Any:
    text = value if isinstance(value, (str, bytes)) else str(int(value))
    return text.encode() if raw and isinstance(text, str) else text


def _fingerprints(features: list[_Feature], picks: list[np.ndarray], count: int, key: int, buckets: int) -> np.ndarray:
    found = np.full(count, key & 0xFFFFFFFFFFFFFFFF, np.uint64)
    for feature, pick in zip(features, picks, strict=True):
        found = _cat(found, _hashes(feature.values)[pick])
    return (found % np.uint64(buckets or 2**63 - 1)).astype(np.int64)


def _hashes(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.int64:
        return values.view(np.uint64)
    return np.asarray([fingerprint64(_text(v, True)) for v in values], np.uint64)


def _cat(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """TensorFlow's FingerprintCat64: combine two fingerprints, modulo 2**64."""
    k, shift = np.uint64(0xC6A4A7935BD1E995), np.uint64(47)
    mixed = b * k
    r = (a ^ k ^ ((mixed ^ (mixed >> shift)) * k)) * k
    r = (r ^ (r >> shift)) * k
    return r ^ (r >> shift)


def _items(name: str, x: Any) -> np.ndarray:
    found = holdable(name, x)
    if dtype_of(found) not in ("int64", "string"):
        raise InvalidArgumentError(f"{name} must be int64 or string, got {dtype_of(found)}")
    array = host(found)
    return array.copy() if array.dtype.hasobject else own(array)


def _ragged(values: Any, splits: Any, index: np.dtype) -> _Feature:
    items, bounds = _items("ragged_values", values), as_splits("ragged_row_splits", splits)
    if items.ndim != 1:
        raise InvalidArgumentError(f"ragged_values must be vectors, got shape {list(items.shape)}")
    if bounds.dtype != index:
        raise InvalidArgumentError(
            f"ragged_row_splits must be {index}, as out_row_splits_type says, got {bounds.dtype}"
        )
    check_splits("ragged_row_splits", bounds, len(items))
    return _Feature(items, bounds)


def _dense(x: Any) -> _Feature:
    items = _items("dense_inputs", x)
    if items.ndim != 2:
        raise InvalidArgumentError(f"dense_inputs must be matrices, got shape {list(items.shape)}")
    return _Feature(items.reshape(-1), uniform_splits(*items.shape))


def _sparse(indices: Any, values: Any, shape: Any) -> _Feature:
    where, items, size = host(indices), _items("sparse_values", values), host(shape)
    if where.dtype == size.dtype == np.int64:
        where, size = own(where), own(size)
    if where.dtype != np.int64 or size.dtype != np.int64:
        raise InvalidArgumentError(f"sparse_indices and sparse_shape must be int64, got {where.dtype} and {size.dtype}")
    if where.ndim != 2 or where.shape[1] != 2 or items.ndim != 1 or size.shape != (2,) or len(where) != len(items):
        raise InvalidArgumentError(
            "a sparse input must be a matrix: indices [n, 2], values [n] and shape [2], got "
            f"{list(where.shape)}, {list(items.shape)} and {list(size.shape)}"
        )
    batch = int(size[0])
    if batch < 0:
        raise InvalidArgumentError(f"sparse_shape must not be negative, got {size.tolist()}")
    check_room((batch + 1,), 8)
    # As in TensorFlow: an item belongs to the largest row number of its own and all earlier items.
    latest = np.maximum.accumulate(where[:, 0]) if len(where) else where[:, 0]
    return _Feature(items, np.concatenate([[0], np.searchsorted(latest, np.arange(batch), side="right")]))


def _ordered(order: str, inputs: dict[str, list[_Feature]]) -> list[_Feature]:
    if len(order) != sum(map(len, inputs.values())):
        raise InvalidArgumentError(f"input_order must have one letter for each input, got {order!r}")
    left: dict[str, Sequence[_Feature]] = dict(inputs)
    features = []
    for letter in order:
        if not left.get(letter):
            raise InvalidArgumentError(f"input_order must name the given inputs with R, S and D, got {order!r}")
        features.append(left[letter][0])
        left[letter] = left[letter][1:]
    return features
