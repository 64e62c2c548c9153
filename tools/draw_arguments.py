"""Random calls of single ops for `differential_arguments.py`: valid ones, of which an argument or two are then replaced.

Arguments that are no arrays or attributes (variants, handles of TensorArrays, functions) are objects that build themselves in
weft and in TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Arguments = dict[str, Any]
Rng = np.random.Generator

FLOATS = ["float32", "float64", "float16", "bfloat16"]
INTEGERS = ["int32", "int64", "int8", "int16", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [*FLOATS, *INTEGERS, "bool", "complex64", "complex128", "string"]
FORMATS = ["NHWC", "NCHW", "NDHWC", "NCDHW"]
SPECIAL = [np.nan, np.inf, -np.inf, -0.0, 1e-40, -1e-40, 6e-8, 300.0]


class Built:
    """An argument that each library builds for itself."""

    def __init__(self, build: Callable[[Any, Any], Any], about: str) -> None:
        self.build, self.about = build, about

    def __repr__(self) -> str:
        return self.about


def dtype_of(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else object if name == "string" else np.dtype(name)


def pick(rng: Rng, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def values(rng: Rng, shape: Any, dtype: str) -> np.ndarray:
    """Values of a dtype; some floats are special."""
    shape = tuple(shape)
    if dtype == "string":
        out = np.empty(shape, object)
        out[...] = np.reshape(np.array([b"s%d" % i for i in range(out.size)], object), shape)
        return out
    if dtype == "bool":
        return rng.random(shape) > 0.5
    found = np.asarray(rng.standard_normal(shape) * 3)
    if dtype in INTEGERS:
        return np.abs(np.rint(found)).astype(dtype) if dtype[0] == "u" else np.rint(found).astype(dtype)
    if found.size and rng.random() < 0.2:
        found.reshape(-1)[rng.integers(found.size, size=2)] = [pick(rng, SPECIAL), pick(rng, SPECIAL)]
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.startswith("complex"):
            found = found + 1j * np.flip(found)
        return found.astype(dtype_of(dtype))


# ---- valid calls


def splits(rng: Rng, rank: int, index: str = "int64", rows: int | None = None) -> tuple[list[np.ndarray], int]:
    """Nested splits, and how many values they partition."""
    count, nested = int(rng.integers(0, 4)) if rows is None else rows, []
    for _ in range(rank):
        nested.append(np.concatenate([[0], np.cumsum(rng.integers(0, 4, count))]).astype(index))
        count = int(nested[-1][-1])
    return nested, count


def index_type(rng: Rng) -> str:
    return pick(rng, ["int64", "int64", "int32"])


def inner(rng: Rng) -> list[int]:
    return pick(rng, [[], [], [2], [0], [2, 3], [1]])


def batch_norm(version: int) -> Callable[[Rng], Arguments]:
    def draw(rng: Rng) -> Arguments:
        rank = 5 if version == 3 and rng.random() < 0.4 else 4
        shape = [int(n) for n in rng.choice([0, 1, 2, 3, 6], rank, p=[0.02, 0.2, 0.3, 0.28, 0.2])]
        data_format = pick(rng, FORMATS[2:] if rank == 5 else FORMATS[:2])
        dtype = "float32" if version == 1 else pick(rng, ["float32", "float32", "float16", "bfloat16"])
        channels = shape[1 if data_format[1] == "C" else -1]
        training = bool(rng.random() < 0.5)
        factor = float(pick(rng, [1.0, 1.0, 0.5, 0.0, 2.0, -1.0]))
        empty = training and factor == 1 and rng.random() < 0.5
        vectors = {name: values(rng, [channels], "float32") for name in ("scale", "offset")}
        vectors |= {name: values(rng, [0 if empty else channels], "float32") for name in ("mean", "variance")}
        if not training and rng.random() < 0.9:
            vectors["variance"] = np.abs(vectors["variance"])
        return {
            "x": values(rng, shape, dtype), **vectors, "epsilon": float(pick(rng, [1e-4, 1e-3, 0.0, 1.0])),
            "exponential_avg_factor": factor, "data_format": data_format, "is_training": training,
        }  # fmt: skip

    return draw


def batch_norm_grad(version: int) -> Callable[[Rng], Arguments]:
    def draw(rng: Rng) -> Arguments:
        given = batch_norm(version)(rng)
        x, scale = given["x"], given["scale"]
        reserves = {f"reserve_space_{i}": values(rng, scale.shape, "float32") for i in (1, 2)}
        reserves["reserve_space_2"] = np.abs(reserves["reserve_space_2"])
        if version == 3:
            reserves["reserve_space_3"] = values(rng, pick(rng, [[], [0], scale.shape]), "float32")
        attributes = {name: given[name] for name in ("epsilon", "data_format", "is_training")}
        gradient = values(rng, x.shape, "float32").astype(x.dtype)
        return {"y_backprop": gradient, "x": x, "scale": scale, **reserves, **attributes}

    return draw


def global_norm(rng: Rng, backward: bool = False) -> Arguments:
    shape, dtype = [int(n) for n in rng.integers(1, 4, 4)], pick(rng, ["float32", "float64", "float16"])
    names = ["m", "v", "gamma"] if backward else ["m", "v", "beta", "gamma"]
    vectors = {name: values(rng, shape[3:], dtype) for name in names}
    vectors["v"] = np.abs(vectors["v"])
    given = {"t": values(rng, shape, dtype), **vectors}
    if backward:
        given["backprop"] = values(rng, shape, dtype)
    return given | {"variance_epsilon": float(pick(rng, [1e-3, 0.1])), "scale_after_normalization": rng.random() < 0.5}


def to_variant(rng: Rng) -> Arguments:
    rank, index = int(rng.integers(0, 4)), index_type(rng)
    nested, count = splits(rng, rank, index)
    shape = [count if rank else int(rng.integers(0, 4)), *inner(rng)]
    batched = bool(rng.random() < 0.7) if rank else False
    return {
        "rt_nested_splits": nested,
        "rt_dense_values": values(rng, shape, pick(rng, DTYPES)),
        "batched_input": batched,
    }


def encoded(given: Arguments, change: Callable[[Any, Any], Any] = lambda _, x: x) -> Built:
    """A variant that RaggedTensorToVariant makes."""

    def build(library: Any, convert: Any) -> Any:
        return change(library, library.raw_ops.RaggedTensorToVariant(**{k: convert(v) for k, v in given.items()}))

    return Built(build, f"variant of {given}")


def from_variant(rng: Rng) -> Arguments:
    given = to_variant(rng)
    rank, array = len(given["rt_nested_splits"]), given["rt_dense_values"]
    batched = given["batched_input"]
    index = given["rt_nested_splits"][0].dtype.name if rank else "int64"
    return {
        "encoded_ragged": encoded(given), "input_ragged_rank": pick(rng, [-1, rank - batched]),
        "output_ragged_rank": rank, "Tvalues": "string" if array.dtype == object else array.dtype.name, "Tsplits": index,
    }  # fmt: skip


def variant_gradient(rng: Rng) -> Arguments:
    nested, count = splits(rng, 1, rows=int(rng.integers(1, 4)))
    array = values(rng, [count, *pick(rng, [[], [2], [2, 3]])], pick(rng, DTYPES[:-1]))
    given = {"rt_nested_splits": nested, "rt_dense_values": array, "batched_input": True}
    return {
        "encoded_ragged_grad": encoded(given), "row_splits": nested[0],
        "dense_values_shape": np.array(array.shape, np.int32), "Tvalues": array.dtype.name,
    }  # fmt: skip


def gather(rng: Rng) -> Arguments:
    nested, count = splits(rng, int(rng.integers(1, 4)), index_type(rng), int(rng.integers(1, 4)))
    indices = rng.integers(0, len(nested[0]) - 1, pick(rng, [[], [2], [0], [2, 2], [3, 0]])).astype(index_type(rng))
    return {
        "params_nested_splits": nested, "params_dense_values": values(rng, [count, *inner(rng)], pick(rng, DTYPES)),
        "indices": indices, "OUTPUT_RAGGED_RANK": len(nested) + indices.ndim - 1,
    }  # fmt: skip


def ranges(rng: Rng) -> Arguments:
    dtype, rows = pick(rng, ["int32", "int64", "float32", "float64", "bfloat16"]), int(rng.integers(0, 4))
    sizes = [pick(rng, [[], [rows]]) for _ in range(3)]
    found = [values(rng, size, dtype) for size in sizes]
    found[2] = np.where(found[2] == 0, 1, found[2]).astype(found[2].dtype)
    return {**dict(zip(("starts", "limits", "deltas"), found, strict=True)), "Tsplits": index_type(rng)}


def to_tensor(rng: Rng) -> Arguments:
    rank, index = int(rng.integers(1, 4)), index_type(rng)
    nested, count = splits(rng, rank, index)
    array = values(rng, [count, *inner(rng)], pick(rng, DTYPES))
    if rng.random() < 0.5:
        tensors, kinds = nested, ["ROW_SPLITS"] * rank
    else:
        tensors = [np.array(len(nested[0]) - 1, index)]
        tensors += [np.repeat(np.arange(len(s) - 1), np.diff(s)).astype(index) for s in nested]
        kinds = ["FIRST_DIM_SIZE"] + ["VALUE_ROWIDS"] * rank
    cut = [*rng.integers(0, 4, rank + 1), *array.shape[1:]]
    shape = np.array(pick(rng, [-1, [-1] * (rank + array.ndim), cut]))
    default = values(rng, pick(rng, [[], array.shape[1:]]), "string" if array.dtype == object else array.dtype.name)
    return {
        "shape": shape.astype(pick(rng, ["int32", "int64"])), "values": array, "default_value": default,
        "row_partition_tensors": tensors, "row_partition_types": kinds,
    }  # fmt: skip


def to_sparse(rng: Rng) -> Arguments:
    nested, count = splits(rng, int(rng.integers(1, 4)), index_type(rng))
    return {"rt_nested_splits": nested, "rt_dense_values": values(rng, [count, *inner(rng)], pick(rng, DTYPES))}


def fill(rng: Rng) -> Arguments:
    rows, dtype = int(rng.integers(1, 6)), pick(rng, DTYPES)
    ids = rng.integers(0, rows, rng.integers(0, 6))
    return {
        "value_rowids": np.sort(ids) if rng.random() < 0.5 else ids, "values": values(rng, [len(ids)], dtype),
        "nrows": np.array(rows), "default_value": values(rng, [], dtype),
    }  # fmt: skip


def fill_grad(rng: Rng) -> Arguments:
    count = int(rng.integers(1, 6))
    where = rng.permutation(count)[: rng.integers(0, count + 1)]
    return {"reverse_index_map": where, "grad_values": values(rng, [count], pick(rng, DTYPES))}


def bincount(rng: Rng) -> Arguments:
    (bounds,), count = splits(rng, 1)
    index, dtype = index_type(rng), pick(rng, ["int32", "int64", "float32", "float64"])
    return {
        "splits": bounds, "values": rng.integers(0, 6, count).astype(index), "size": np.array(rng.integers(0, 7), index),
        "weights": values(rng, [pick(rng, [0, count])], dtype), "binary_output": bool(rng.random() < 0.3),
    }  # fmt: skip


def count_sparse(rng: Rng) -> Arguments:
    (bounds,), count = splits(rng, 1, rows=int(rng.integers(1, 4)))
    dtype = pick(rng, ["int32", "int64", "float32", "float64"])
    return {
        "splits": bounds, "values": rng.integers(0, 6, count).astype(index_type(rng)),
        "weights": values(rng, [pick(rng, [0, count])], dtype), "binary_output": bool(rng.random() < 0.3),
        "minlength": int(rng.integers(-1, 5)), "maxlength": int(rng.integers(-1, 8)),
    }  # fmt: skip


def cross(rng: Rng) -> Arguments:
    rows, index = int(rng.integers(0, 4)), index_type(rng)
    order = "".join(rng.choice(list("RSD"), rng.integers(0, 4)))
    names = ["ragged_values", "ragged_row_splits", "sparse_indices", "sparse_values", "sparse_shape", "dense_inputs"]
    given: Arguments = {k: [] for k in names}
    for letter in order:
        (bounds,), count = splits(rng, 1, index, rows)
        if letter == "D":
            given["dense_inputs"].append(values(rng, [rows, int(rng.integers(0, 3))], pick(rng, ["int64", "string"])))
            continue
        items = values(rng, [count], pick(rng, ["int64", "string"]))
        if letter == "R":
            given["ragged_values"].append(items)
            given["ragged_row_splits"].append(bounds)
        else:
            ids = np.repeat(np.arange(rows), np.diff(bounds))
            given["sparse_indices"].append(np.stack([ids, np.arange(count)], 1).astype(np.int64))
            given["sparse_values"].append(items)
            given["sparse_shape"].append(np.array([rows, 9]))
    hashed = bool(rng.random() < 0.5)
    return given | {
        "input_order": order, "hashed_output": hashed, "num_buckets": int(pick(rng, [0, 1, 7, 2**40])),
        "hash_key": int(rng.integers(-(2**40), 2**40)), "out_values_type": "int64" if hashed else "string",
        "out_row_splits_type": index,
    }  # fmt: skip


# ---- arrays of tensors


def array_attributes(rng: Rng, dtype: str) -> Arguments:
    return {
        "size": np.array(3, np.int32), "dtype": dtype, "element_shape": pick(rng, [None, (None, 2), (2, 2)]),
        "dynamic_size": bool(rng.random() < 0.3), "clear_after_read": bool(rng.random() < 0.5),
        "identical_element_shapes": bool(rng.random() < 0.5), "tensor_array_name": pick(rng, ["", "a"]),
    }  # fmt: skip


def handle(rng: Rng, dtype: str, written: int) -> Built:
    """A TensorArray of which some elements, [2, 2], are written."""
    attributes, elements = array_attributes(rng, dtype), [values(rng, [2, 2], dtype) for _ in range(written)]

    def build(library: Any, convert: Any) -> Any:
        made = library.raw_ops.TensorArrayV3(**{k: convert(v) for k, v in attributes.items()})
        for i, element in enumerate(elements):
            library.raw_ops.TensorArrayWriteV3(
                handle=made[0], index=convert(np.int32(i)), value=convert(element), flow_in=made[1]
            )
        return made[0]

    return Built(build, f"array {attributes} with {written} elements")


def array_call(written: int, more: Callable[[Rng, str], Arguments]) -> Callable[[Rng], Arguments]:
    def draw(rng: Rng) -> Arguments:
        dtype = pick(rng, DTYPES)
        return {"handle": handle(rng, dtype, written), **more(rng, dtype), "flow_in": np.float32(0)}

    return draw


ARRAYS: dict[str, Callable[[Rng], Arguments]] = {
    "TensorArrayV3": lambda rng: array_attributes(rng, pick(rng, DTYPES)),
    "TensorArrayWriteV3": array_call(1, lambda rng, dtype: {
        "index": np.int32(rng.integers(1, 3)), "value": values(rng, [2, 2], dtype)}),
    "TensorArrayReadV3": array_call(3, lambda rng, dtype: {"index": np.int32(rng.integers(3)), "dtype": dtype}),
    "TensorArrayGatherV3": array_call(3, lambda rng, dtype: {
        "indices": rng.permutation(3)[: rng.integers(4)].astype(np.int32), "dtype": dtype,
        "element_shape": pick(rng, [None, (2, 2), (None, 2)])}),
    "TensorArrayScatterV3": array_call(0, lambda rng, dtype: {
        "indices": np.array([2, 0], np.int32), "value": values(rng, [2, 2, 2], dtype)}),
    "TensorArrayConcatV3": array_call(3, lambda rng, dtype: {
        "dtype": dtype, "element_shape_except0": pick(rng, [None, (2,)])}),
    "TensorArraySplitV3": array_call(0, lambda rng, dtype: {
        "value": values(rng, [6, 2], dtype), "lengths": np.array([2, 2, 2])}),
    "TensorArraySizeV3": array_call(1, lambda rng, dtype: {}),
    "TensorArrayGradV3": array_call(1, lambda rng, dtype: {"source": "g"}),
    "TensorArrayGradWithShape": array_call(1, lambda rng, dtype: {
        "source": "g", "shape_to_prepend": np.array([2], np.int32)}),
}  # fmt: skip


# ---- batching: single calls, which wait for nobody


def batch(rng: Rng) -> Arguments:
    rows = int(rng.integers(1, 4))
    most = rows + int(rng.integers(2))
    return {
        "in_tensors": [values(rng, [rows, *inner(rng)], pick(rng, DTYPES)) for _ in range(pick(rng, [1, 1, 2]))],
        "num_batch_threads": 1, "max_batch_size": most, "batch_timeout_micros": 1000, "max_enqueued_batches": 10,
        "allowed_batch_sizes": pick(rng, [[], [most], [most, most + 2]][: 2 if rng.random() < 0.8 else 3]),
        "shared_name": str(rng.integers(2**40)), "batching_queue": pick(rng, ["", "q"]),
    }  # fmt: skip


def batch_function(rng: Rng) -> Arguments:
    given = batch(rng)
    types = ["string" if x.dtype == object else x.dtype.name for x in given["in_tensors"]]

    def build(library: Any, convert: Any) -> Any:
        if library.__name__ == "weft":
            return lambda *x: list(x)
        function = library.function(lambda *x: tuple(map(library.identity, x)))
        return function.get_concrete_function(*(library.TensorSpec(None, t) for t in types))

    more = {"enable_large_batch_splitting": False, "batch_padding_policy": "PAD_UP"}
    return given | more | {"captured_tensors": [], "f": Built(build, "identity"), "Tout": types}


def unbatch(rng: Rng) -> Arguments:
    data = values(rng, [pick(rng, [2, 3]), *inner(rng)], pick(rng, DTYPES))
    index = {"batch_index": np.array([[7, 0, 2]]), "id": np.array(7)}
    return {"batched_tensor": data, **index, "timeout_micros": 1000, "shared_name": str(rng.integers(2**40))}


def unbatch_grad(rng: Rng) -> Arguments:
    shape, dtype = [2, *inner(rng)], pick(rng, DTYPES)
    given = {"original_input": values(rng, shape, dtype), "grad": values(rng, shape, dtype)}
    return given | {"batch_index": np.array([[7, 0, 2]]), "id": np.array(7), "shared_name": str(rng.integers(2**40))}


BATCHING: dict[str, Callable[[Rng], Arguments]] = {
    "Batch": lambda rng: batch(rng) | {"grad_timeout_micros": 0}, "BatchFunction": batch_function,
    "Unbatch": unbatch, "UnbatchGrad": unbatch_grad,
}  # fmt: skip

CALLS: dict[str, Callable[[Rng], Arguments]] = {
    "FusedBatchNorm": batch_norm(1), "FusedBatchNormV2": batch_norm(2), "FusedBatchNormV3": batch_norm(3),
    "FusedBatchNormGrad": batch_norm_grad(1), "FusedBatchNormGradV2": batch_norm_grad(2),
    "FusedBatchNormGradV3": batch_norm_grad(3), "BatchNormWithGlobalNormalization": global_norm,
    "BatchNormWithGlobalNormalizationGrad": lambda rng: global_norm(rng, True), "RaggedTensorToVariant": to_variant,
    "RaggedTensorFromVariant": from_variant, "RaggedTensorToVariantGradient": variant_gradient, "RaggedGather": gather,
    "RaggedRange": ranges, "RaggedTensorToTensor": to_tensor, "RaggedTensorToSparse": to_sparse,
    "RaggedFillEmptyRows": fill, "RaggedFillEmptyRowsGrad": fill_grad, "RaggedBincount": bincount,
    "RaggedCountSparseOutput": count_sparse, "RaggedCross": cross, **ARRAYS, **BATCHING,
}  # fmt: skip


# ---- replaced arguments

NUMBERS = [-2, -1, 0, 1, 2, 3, 7]
TEXTS = [*FORMATS, "", "nhwc", "RS", "ROW_SPLITS", "VALUE_ROWIDS", "FIRST_DIM_SIZE", "ROW_LIMITS", "g"]
SHAPES = [None, (), (2,), (None,), (None, 2), (2, 2), (3, 2), (0, 2), (None, None, None)]


def replaced(rng: Rng, value: Any) -> Any:
    """Another argument for this one, of the same kind."""
    if isinstance(value, np.ndarray | np.generic):
        return other_array(rng, np.asarray(value))
    if isinstance(value, list):
        return other_list(rng, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return pick(rng, NUMBERS)
    if isinstance(value, float):
        return pick(rng, [0.0, -1e-3, 1e-45, 1e-30, 1.0, 1e30, float("inf"), float("nan")])
    if isinstance(value, str):
        return pick(rng, DTYPES) if value in DTYPES else pick(rng, TEXTS)
    if value is None or isinstance(value, tuple):
        return pick(rng, SHAPES)
    return value


def other_list(rng: Rng, value: list[Any]) -> list[Any]:
    value = list(value)
    kind = int(rng.integers(5))
    if kind == 0 or not value:
        return [*value, value[-1] if value else np.zeros(1, np.int64)]
    at = int(rng.integers(len(value)))
    if kind == 1:
        return value[:at] + value[at + 1 :]
    value[at] = replaced(rng, value[at])
    return value


def other_array(rng: Rng, x: np.ndarray) -> np.ndarray:
    """Another dtype, shape, length or value."""
    kind = pick(rng, ["dtype", "shape", "longer", "shorter", "value", "value", "reversed", "empty"])
    if kind == "dtype":
        dtype = pick(rng, DTYPES)
        if dtype == "string" or x.dtype == object:
            return values(rng, x.shape, dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(dtype_of(dtype))
    if kind == "shape":
        shapes = [(1, *x.shape), (*x.shape, 1), x.shape[1:], (x.size,), (), x.shape[::-1]]
        return np.resize(x, pick(rng, shapes)) if x.size else np.zeros(pick(rng, shapes), x.dtype)
    if kind == "empty":
        return x.reshape(-1)[:0].reshape(0, *x.shape[1:])
    if x.ndim and kind in ("longer", "shorter") and len(x):
        return np.concatenate([x, x[-1:]]) if kind == "longer" else x[:-1]
    if x.ndim and kind == "reversed":
        return x[::-1]
    return other_value(rng, x)


def other_value(rng: Rng, x: np.ndarray) -> np.ndarray:
    x = np.array(x)
    if not x.size or x.dtype == object:
        return x
    at = int(rng.integers(x.size))
    if x.dtype.kind in "iu":
        low, high = np.iinfo(x.dtype).min, np.iinfo(x.dtype).max
        there = int(x.flat[at])
        x.flat[at] = int(np.clip(pick(rng, [there + 1, there - 1, *NUMBERS]), low, high))
    elif x.dtype != bool:
        with np.errstate(over="ignore", invalid="ignore"):
            x.flat[at] = pick(rng, SPECIAL)
    return x


def strided(rng: Rng, x: np.ndarray) -> np.ndarray:
    """The same values in memory of other strides, or none of the caller's to write."""
    kind = int(rng.integers(4))
    if not isinstance(x, np.ndarray) or not x.ndim or kind == 0:
        return x
    if kind == 1:
        return np.flip(np.flip(x).copy())
    if kind == 2:
        return np.repeat(x, 2, axis=-1)[..., ::2]
    return np.asfortranarray(x)


def draw(rng: Rng, name: str) -> Arguments:
    """The arguments of a call; in two of three one or two are replaced, or left out."""
    arguments = CALLS[name](rng)
    for _ in range(pick(rng, [0, 1, 2]) if rng.random() < 0.5 else 1):
        key = pick(rng, sorted(arguments))
        arguments[key] = replaced(rng, arguments[key])
    return arguments
