"""The differences of docs/differences.md, as `differential_arguments.py` recognises them."""

from __future__ import annotations

from typing import Any

import numpy as np

Arguments = dict[str, Any]

#: Ops where TensorFlow goes on with wrong arguments, with words of weft's message.
REFUSED = {
    "BatchNormWithGlobalNormalization": ["must have one element for each"],
    "BatchNormWithGlobalNormalizationGrad": ["must have one element for each", "must have the shape of t"],
    "RaggedTensorToVariantGradient": ["dense_values_shape", "Tvalues"],
    "RaggedTensorToTensor": [
        "more than the",
        "must begin with",
        "must be a vector",
        "FIRST_DIM_SIZE",
        "must be of",
        "decrease",
    ],
    "RaggedTensorToSparse": ["must have rank 1", "decrease"],
    "RaggedBincount": ["decrease", "must have rank 1", "weights must be empty or"],
    "RaggedCountSparseOutput": ["decrease"],
    "RaggedCross": ["a sparse input must be a matrix"],
    "Batch": ["max_batch_size must be positive"],
    "BatchFunction": ["max_batch_size must be positive"],
    "Unbatch": ["must lie within"],
    "UnbatchGrad": ["rows its row of batch_index says", "original_input must"],
    "RaggedGather": ["OUTPUT_RAGGED_RANK must be", "must not end past"],
}


def comparable(name: str, arguments: Arguments, found: list[Any]) -> list[Any]:
    """The results that TensorFlow defines: it leaves the reserves of an inference and of empty data uninitialised."""
    is_forward = name.startswith("FusedBatchNorm") and "Grad" not in name
    if is_forward and (not arguments["is_training"] or not arguments["x"].size):
        return [*found[:3], *found[5:]]
    return found[:-2] if name == "Batch" else found  # ids are any numbers


def excuse(name: str, arguments: Arguments, ours: Any, theirs: Any) -> str | None:
    """Why two outcomes differ on purpose; None if they must not."""
    refused, failed = isinstance(ours, Exception), isinstance(theirs, Exception)
    if refused and any(words in str(ours) for words in ("must come from one library", "must be an array of jax")):
        return "texts are arrays of NumPy, and may not be beside others"
    if refused and "the values of this argument are needed now" in str(ours):
        return "the values of traced arrays are unknown"
    if name == "BatchFunction" and "were passed" in str(theirs):
        return "BatchFunction: f may take any number of arguments"
    if refused and failed:
        is_rank = name == "RaggedGather" and "OUTPUT_RAGGED_RANK must be" in str(ours)
        return "RaggedGather: a wrong rank is an InternalError of TensorFlow" if is_rank else None
    if refused:
        words = next((words for words in REFUSED.get(name, []) if words in str(ours)), None)
        return words and f"{name}: weft alone refuses ({words})"
    if failed:
        return accepted(name, arguments, theirs)
    if name.startswith("FusedBatchNormGrad") and arguments["x"].ndim == 5 and not arguments["x"].size:
        return "the gradient of an empty volume keeps its five axes"
    if any(map(has_denormals, arguments.values())):
        return "TensorFlow takes denormal numbers for zeros"
    if name.startswith("FusedBatchNormGrad") and (arguments["reserve_space_2"] + arguments["epsilon"] == 0).any():
        return "scale_backprop of no variance and no epsilon"
    if name.startswith("BatchNormWithGlobal") and arguments["t"].dtype == np.float16 and same_finite(ours, theirs):
        return "TensorFlow adds float16 numbers in float16"
    if name == "Batch" and not len(ours[0]):
        return "a call of Batch without rows keeps its shape"
    if name == "RaggedTensorToVariantGradient" and theirs[0].size == ours[0].size:
        return "the result has dense_values_shape"
    if name == "RaggedTensorFromVariant" and not theirs[-1].size and theirs[-1].ndim < ours[-1].ndim:
        return "an empty variant vector keeps the inner shape"
    return None


def accepted(name: str, arguments: Arguments, theirs: Exception) -> str | None:
    """Why weft answers where TensorFlow refuses."""
    is_grad = name.startswith("FusedBatchNormGrad")
    if is_grad and not arguments["is_training"] and arguments["data_format"][1:2] == "C":
        return "gradient ops accept channels-first data in inference"
    if "BatchNorm" in name and type(theirs).__name__ == "NotFoundError" and arguments["x"].dtype == np.float64:
        return "float64 data is accepted"
    if name == "FusedBatchNormGradV3" and "input #5" in str(theirs):
        return "reserve_space_3 is not read"
    if name == "RaggedRange" and has_denormals(arguments["deltas"]):
        return "TensorFlow takes denormal numbers for zeros"
    return None


def same_finite(ours: Any, theirs: Any) -> bool:
    return all(np.array_equal(np.isfinite(a), np.isfinite(b)) for a, b in zip(ours, theirs, strict=True))


def has_denormals(value: Any) -> bool:
    if isinstance(value, list) or value is None:
        return any(map(has_denormals, value or []))
    x = np.asarray(value)
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
        return False
    size = np.abs(x.astype(np.float64))
    return bool(((size > 0) & (size < np.finfo(np.float32).tiny)).any())
