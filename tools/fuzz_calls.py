"""The valid calls that `fuzz_arguments.py` starts from: every op, and the classes and functions people use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import weft
from weft import RaggedTensor, TensorArray, VariantArray, raw_ops

Arguments = dict[str, Any]
EVERY = ("numpy", "torch", "jax")


class Call(NamedTuple):
    """A call with named arguments."""

    call: Callable[[Arguments], Any]
    arguments: Callable[[str], Arguments]  # good ones, in a library
    libraries: tuple[str, ...] = EVERY


CALLS: dict[str, Call] = {}


def to(library: str, x: Any) -> Any:
    """`x` as an array of `library`."""
    if library == "torch":
        import torch

        return torch.from_numpy(np.array(x))
    if library == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    return np.asarray(x)


def floats(library: str, *shape: int) -> Any:
    return to(library, np.linspace(0.5, 2, int(np.prod(shape)), dtype=np.float32).reshape(shape))


def op(name: str, arguments: Callable[[str], Arguments]) -> None:
    """The call of an op, and its pull-back where it has one, with the cotangents as arguments."""
    made = getattr(raw_ops, name)
    CALLS[name] = Call(lambda given: made(**given), arguments)
    if made.gradient is not None:
        CALLS[f"vjp {name}"] = Call(
            lambda given: _pull(made, given), lambda library: arguments(library) | {"cotangent": None}
        )


def _pull(made: Any, given: Arguments) -> Any:
    given = dict(given)
    cotangent = given.pop("cotangent")
    _, pull_back = weft.vjp(made, **given)
    return pull_back(cotangent) if cotangent is not None else pull_back()


# ---- batching

BATCHING = {"num_batch_threads": 1, "max_batch_size": 8, "batch_timeout_micros": 0}
NAMED = {"container": "", "shared_name": "", "name": None}
op("Batch", lambda lib: {"in_tensors": [floats(lib, 2, 3)], **BATCHING, "grad_timeout_micros": 0, "max_enqueued_batches": 10,
                         "allowed_batch_sizes": [8], "batching_queue": "", **NAMED})  # fmt: skip
op("BatchFunction", lambda lib: {
    "in_tensors": [floats(lib, 2, 3)], "captured_tensors": [floats(lib, 2)], "f": lambda x, *_: x, **BATCHING, "Tout": ["float32"],
    "max_enqueued_batches": 10, "allowed_batch_sizes": [8], "batching_queue": "", **NAMED, "low_priority_max_batch_size": 0,
    "low_priority_batch_timeout_micros": 0, "low_priority_allowed_batch_sizes": [], "low_priority_max_enqueued_batches": 0,
    "mixed_priority_policy": "priority_isolation", "batch_padding_policy": "PAD_UP", "enable_large_batch_splitting": False,
})  # fmt: skip
INDEX = {"batch_index": np.array([[7, 0, 2]]), "id": np.array(7)}
op("Unbatch", lambda lib: {"batched_tensor": floats(lib, 2, 3), **INDEX, "timeout_micros": 1000, **NAMED})
op("UnbatchGrad", lambda lib: {"original_input": floats(lib, 2, 3), **INDEX, "grad": floats(lib, 2, 3), **NAMED})

# ---- batch norm

for version in ("", "V2", "V3"):
    op(f"FusedBatchNorm{version}", lambda lib: {
        "x": floats(lib, 2, 2, 2, 4), **{name: floats(lib, 4) for name in ("scale", "offset", "mean", "variance")},
        "epsilon": 1e-3, "exponential_avg_factor": 1.0, "data_format": "NHWC", "is_training": True,
    })  # fmt: skip
    spaces = ("reserve_space_1", "reserve_space_2") + (("reserve_space_3",) if version == "V3" else ())
    op(f"FusedBatchNormGrad{version}", lambda lib, spaces=spaces: {
        "y_backprop": floats(lib, 2, 2, 2, 4), "x": floats(lib, 2, 2, 2, 4), "scale": floats(lib, 4),
        **{name: floats(lib, 4) for name in spaces}, "epsilon": 1e-3, "data_format": "NHWC", "is_training": True,
    })  # fmt: skip
GLOBAL = {"variance_epsilon": 1e-3, "scale_after_normalization": True}
op("BatchNormWithGlobalNormalization", lambda lib: {
    "t": floats(lib, 2, 2, 2, 4), **{name: floats(lib, 4) for name in ("m", "v", "beta", "gamma")}, **GLOBAL,
})  # fmt: skip
op("BatchNormWithGlobalNormalizationGrad", lambda lib: {
    "t": floats(lib, 2, 2, 2, 4), **{name: floats(lib, 4) for name in ("m", "v", "gamma")}, "backprop": floats(lib, 2, 2, 2, 4),
    **GLOBAL,
})  # fmt: skip

# ---- ragged


def splits() -> np.ndarray:
    return np.array([0, 2, 2, 3])


op(
    "RaggedTensorToVariant",
    lambda lib: {"rt_nested_splits": [splits()], "rt_dense_values": floats(lib, 3), "batched_input": True},
)
op("RaggedTensorFromVariant", lambda lib: {
    "encoded_ragged": VariantArray([floats(lib, 2), floats(lib, 1)]), "input_ragged_rank": 0, "output_ragged_rank": 1,
    "Tvalues": "float32", "Tsplits": "int64",
})  # fmt: skip
op("RaggedTensorToVariantGradient", lambda lib: {
    "encoded_ragged_grad": VariantArray([floats(lib, 2), None, floats(lib, 1)]), "row_splits": splits(),
    "dense_values_shape": np.array([3], np.int32), "Tvalues": "float32",
})  # fmt: skip
op("RaggedGather", lambda lib: {
    "params_nested_splits": [splits()], "params_dense_values": floats(lib, 3), "indices": np.array([0, 2]), "OUTPUT_RAGGED_RANK": 1,
})  # fmt: skip
op(
    "RaggedRange",
    lambda lib: {"starts": floats(lib, 2), "limits": floats(lib, 2) + 2, "deltas": floats(lib, 2), "Tsplits": "int64"},
)
op("RaggedTensorToTensor", lambda lib: {
    "shape": np.array([-1, -1]), "values": floats(lib, 3), "default_value": floats(lib), "row_partition_tensors": [splits()],
    "row_partition_types": ["ROW_SPLITS"],
})  # fmt: skip
op("RaggedTensorToSparse", lambda lib: {"rt_nested_splits": [splits()], "rt_dense_values": floats(lib, 3)})
op("RaggedFillEmptyRows", lambda lib: {
    "value_rowids": np.array([0, 2]), "values": floats(lib, 2), "nrows": np.array(4), "default_value": floats(lib),
})  # fmt: skip
op("RaggedFillEmptyRowsGrad", lambda lib: {"reverse_index_map": np.array([0, 2]), "grad_values": floats(lib, 3)})
op("RaggedBincount", lambda lib: {
    "splits": splits(), "values": np.array([0, 1, 1]), "size": np.array(2), "weights": floats(lib, 3), "binary_output": False,
})  # fmt: skip
op("RaggedCountSparseOutput", lambda lib: {
    "splits": splits(), "values": np.array([0, 1, 1]), "weights": floats(lib, 3), "binary_output": False, "minlength": -1,
    "maxlength": -1,
})  # fmt: skip
op("RaggedCross", lambda lib: {
    "ragged_values": [np.array(["a", "b", "c"], object)], "ragged_row_splits": [splits()], "sparse_indices": [np.array([[0, 0]])],
    "sparse_values": [np.array([4])], "sparse_shape": [np.array([3, 1])], "dense_inputs": [np.array([[1], [2], [3]])],
    "input_order": "RSD", "hashed_output": True, "num_buckets": 10, "hash_key": 1, "out_values_type": "int64",
    "out_row_splits_type": "int64",
})  # fmt: skip

# ---- TensorArray


def filled(lib: str) -> Any:
    handle, flow = raw_ops.TensorArrayV3(3, "float32", clear_after_read=False)
    raw_ops.TensorArrayWriteV3(handle, 0, floats(lib, 2), flow)
    return handle


op("TensorArrayV3", lambda lib: {
    "size": 3, "dtype": "float32", "element_shape": [2], "dynamic_size": False, "clear_after_read": True,
    "identical_element_shapes": True, "tensor_array_name": "a", "name": None,
})  # fmt: skip
FLOW = {"flow_in": np.float32(0)}
op("TensorArrayWriteV3", lambda lib: {"handle": filled(lib), "index": 1, "value": floats(lib, 2), **FLOW})
op("TensorArrayReadV3", lambda lib: {"handle": filled(lib), "index": 0, **FLOW, "dtype": "float32"})
op(
    "TensorArrayGatherV3",
    lambda lib: {"handle": filled(lib), "indices": [0], **FLOW, "dtype": "float32", "element_shape": [2]},
)
op("TensorArrayScatterV3", lambda lib: {"handle": filled(lib), "indices": [1, 2], "value": floats(lib, 2, 2), **FLOW})
op("TensorArrayConcatV3", lambda lib: {
    "handle": TensorArray("float32", 1).write(0, floats(lib, 2))._array, **FLOW, "dtype": "float32", "element_shape_except0": [],
})  # fmt: skip
op("TensorArraySplitV3", lambda lib: {"handle": raw_ops.TensorArrayV3(2, "float32").handle, "value": floats(lib, 3),
                                      "lengths": np.array([1, 2]), **FLOW})  # fmt: skip
op("TensorArraySizeV3", lambda lib: {"handle": filled(lib), **FLOW})
op("TensorArrayCloseV3", lambda lib: {"handle": filled(lib)})
op("TensorArrayGradV3", lambda lib: {"handle": filled(lib), **FLOW, "source": "a"})
op("TensorArrayGradWithShape", lambda lib: {"handle": filled(lib), **FLOW, "shape_to_prepend": [2], "source": "a"})


# ---- classes and functions


def function(name: str, arguments: Callable[[str], Arguments], libraries: tuple[str, ...] = EVERY) -> Any:
    """Make a function of the arguments a call."""

    def define(call: Callable[..., Any]) -> Any:
        CALLS[name] = Call(lambda given: call(**given), arguments, libraries)
        return call

    return define


function("batch_norm", lambda lib: {
    "x": floats(lib, 4, 3), **{name: floats(lib, 3) for name in ("scale", "offset", "running_mean", "running_variance")},
    "training": True, "momentum": 0.1, "epsilon": 1e-3, "axis": 1, "mask": 3, "convention": "torch",
})(weft.batch_norm)  # fmt: skip

function("RaggedTensor", lambda lib: {"flat_values": floats(lib, 3), "nested_row_splits": [splits()]})(RaggedTensor)
function("from_row_splits", lambda lib: {"values": floats(lib, 3), "row_splits": splits()})(
    RaggedTensor.from_row_splits
)
function("from_row_lengths", lambda lib: {"values": floats(lib, 3), "row_lengths": [2, 1]})(
    RaggedTensor.from_row_lengths
)
function("from_row_ids", lambda lib: {"values": floats(lib, 3), "row_ids": [0, 0, 2], "nrows": 3})(
    RaggedTensor.from_row_ids
)
function("from_rows", lambda lib: {"rows": [floats(lib, 3), floats(lib, 2)], "ragged_rank": None})(
    RaggedTensor.from_rows
)
function("from_padded", lambda lib: {"padded": floats(lib, 2, 3), "lengths": [1, 2]})(RaggedTensor.from_padded)
function("from_padded mask", lambda lib: {
    "padded": floats(lib, 2, 3), "mask": np.array([[True, False, False], [True, True, False]]),
})(RaggedTensor.from_padded)  # fmt: skip
function("from_variant", lambda lib: {"variant": VariantArray([floats(lib, 2)]), "ragged_rank": 1})(
    RaggedTensor.from_variant
)
function("from_cu_seqlens", lambda lib: {"values": floats(lib, 3), "cu_seqlens": splits()})(
    RaggedTensor.from_cu_seqlens
)
function("from_nested_tensor", lambda lib: {"nested": floats(lib, 3)}, ("torch",))(RaggedTensor.from_nested_tensor)


def ragged(lib: str) -> RaggedTensor:
    return RaggedTensor.from_row_splits(floats(lib, 3, 2), splits())


function("ragged concat", lambda lib: {"tensors": [ragged(lib), ragged(lib)], "axis": 0})(RaggedTensor.concat)
function("ragged stack", lambda lib: {"tensors": [ragged(lib), ragged(lib)]})(RaggedTensor.stack)
function("ragged gather", lambda lib: {"self": ragged(lib), "indices": [0, 2]})(
    lambda self, indices: RaggedTensor.gather(_ragged(self), indices)
)
function("ragged getitem", lambda lib: {"self": ragged(lib), "key": 0})(lambda self, key: _ragged(self)[key])
function("ragged slice", lambda lib: {"self": ragged(lib), "a": 0, "b": 2, "c": 1})(
    lambda self, a, b, c: _ragged(self)[a:b:c]
)
function("ragged within", lambda lib: {"self": ragged(lib), "a": 0, "b": 2})(lambda self, a, b: _ragged(self)[:, a:b])
function("ragged place", lambda lib: {"self": ragged(lib), "a": [0, 2], "b": 0})(lambda self, a, b: _ragged(self)[a, b])
function("ragged add", lambda lib: {"self": ragged(lib), "other": floats(lib, 2)})(
    lambda self, other: _ragged(self) + other
)
function("ragged pow", lambda lib: {"self": ragged(lib), "other": 2})(lambda self, other: _ragged(self).__rpow__(other))
function("ragged with_values", lambda lib: {"self": ragged(lib), "values": floats(lib, 3)})(
    lambda self, values: _ragged(self).with_values(values)
)
function("ragged spread", lambda lib: {"self": ragged(lib), "values": floats(lib, 3)})(
    lambda self, values: _ragged(self).spread(values)
)
function("ragged to_padded", lambda lib: {"self": ragged(lib), "length": 2, "value": 0.0})(
    lambda self, length, value: _ragged(self).to_padded(length, value)
)
function("ragged map_rows", lambda lib: {"self": ragged(lib), "row": floats(lib, 2)})(
    lambda self, row: _ragged(self).map_rows(lambda _: row)
)
function("ragged reductions", lambda lib: {"values": floats(lib, 3)})(lambda values: _reduced(values))


def _ragged(x: Any) -> RaggedTensor:
    """`x`, or where it was replaced, a ragged tensor of it."""
    return x if isinstance(x, RaggedTensor) else RaggedTensor.from_row_splits(x, splits())


def _reduced(values: Any) -> Any:
    rt = RaggedTensor.from_row_splits(values, splits())
    for name in ("sum", "mean", "max", "softmax", "to_list", "row_lengths", "__neg__", "__repr__"):
        try:
            getattr(rt, name)()
        except weft.errors.OpError:
            continue
    return list(rt)


function("TensorArray", lambda lib: {
    "dtype": "float32", "size": 3, "element_shape": [2], "dynamic_size": False, "clear_after_read": False, "infer_shape": True,
    "checked": False, "name": "a",
})(TensorArray)  # fmt: skip


def method(name: str, arguments: Callable[[str], Arguments], fresh: bool = False) -> None:
    """The call of a method of a TensorArray, a new one or one with an element."""

    def call(given: Arguments, made: TensorArray) -> Any:
        return getattr(made, name)(**given)

    def written(library: str) -> TensorArray:
        return TensorArray() if fresh else TensorArray("float32", 3, element_shape=[2]).write(0, floats(library, 2))

    label = f"TensorArray.{name}" + (" of a new one" if fresh else "")
    for library in EVERY:
        CALLS[f"{label} of {library}"] = Call(
            lambda given, library=library: call(given, written(library)), arguments, (library,)
        )  # fmt: skip


for new in (False, True):
    method("write", lambda lib: {"index": 1, "value": floats(lib, 2)}, new)
    method("append", lambda lib: {"value": floats(lib, 2)}, new)
    method("scatter", lambda lib: {"indices": [1, 2], "value": floats(lib, 2, 2)}, new)
method("unstack", lambda lib: {"value": floats(lib, 2, 2)}, fresh=True)
method("split", lambda lib: {"value": floats(lib, 6, 2), "lengths": [2, 2, 2]}, fresh=True)
method("read", lambda lib: {"index": 0})
method("gather", lambda lib: {"indices": [0]})
method("gradient", lambda lib: {"source": "a", "prepend": [2]})

function("VariantArray", lambda lib: {"elements": [floats(lib, 2), None], "shape": [2]})(VariantArray)
function("variant gather", lambda lib: {"self": VariantArray([floats(lib, 2), None]), "indices": [0], "axis": 0})(
    lambda self, indices, axis: _variant(self).gather(indices, axis)
)
function("variant getitem", lambda lib: {"self": VariantArray([floats(lib, 2), None]), "key": 0})(
    lambda self, key: _variant(self)[key]
)


def _variant(x: Any) -> VariantArray:
    return x if isinstance(x, VariantArray) else VariantArray([x])


function("vjp", lambda lib: {"op": raw_ops.RaggedTensorToSparse, "splits": [splits()], "values": floats(lib, 3)})(
    lambda op, splits, values: weft.vjp(op, splits, values)
)


def module(**given: Any) -> Any:
    from weft.torch import BatchNorm

    return BatchNorm(**given)


function("torch.BatchNorm", lambda lib: {
    "num_features": 3, "eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True, "axis": 1, "convention": "torch",
    "cumulative": False, "device": None, "dtype": None,
}, ("torch",))(module)  # fmt: skip
function("torch.BatchNorm()", lambda lib: {"x": floats(lib, 4, 3), "mask": None}, ("torch",))(
    lambda x, mask: module(num_features=3)(x, mask=mask)
)


def batched(x: Any, y: Any, result: Any) -> Any:
    """A batched call; what the function gives may be replaced too."""
    with weft.batched(lambda x, y: x if result is None else result, max_batch_size=4, deadline=2.0) as f:
        return f(x, y)


function("batched", lambda lib: {"x": floats(lib, 2, 3), "y": 1, "result": None})(batched)
