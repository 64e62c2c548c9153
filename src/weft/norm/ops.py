"""Fused batch norm in TensorFlow's three versions, and its gradient ops, on the functions of `derivatives`.

The versions differ in the dtypes and layouts they take, and V3 hands one more array from the forward op to its
gradient. Per-channel arrays are float32, beside float64 data float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .. import kernels
from ..core.arrays import Array, asarray, common_library, dtype_in, dtype_of, library_of, namespace
from ..core.check import number
from ..core.op import gradient, op
from ..errors import ArgumentTypeError, InvalidArgumentError, NotFoundError
from ..kernels.direct import fused_batch_norm as fused_norm
from ..kernels.direct import fused_batch_norm_grad as fused_norm_grad
from . import derivatives
from .derivatives import Mode, copied


class FusedBatchNorm(NamedTuple):
    """The outputs of FusedBatchNorm and FusedBatchNormV2."""

    y: Array
    batch_mean: Array  # in training, the running mean after this batch
    batch_variance: Array  # in training, the running variance after this batch, with Bessel's correction
    reserve_space_1: Array  # the mean that was used
    reserve_space_2: Array  # the variance that was used, without the correction


class FusedBatchNormV3(NamedTuple):
    """The outputs of FusedBatchNormV3."""

    y: Array
    batch_mean: Array
    batch_variance: Array
    reserve_space_1: Array
    reserve_space_2: Array
    reserve_space_3: Array  # a scalar 0


class FusedBatchNormGrad(NamedTuple):
    """The outputs of FusedBatchNormGrad and FusedBatchNormGradV2."""

    x_backprop: Array
    scale_backprop: Array
    offset_backprop: Array
    reserve_space_3: Array  # empty
    reserve_space_4: Array  # empty


class FusedBatchNormGradV3(NamedTuple):
    """The outputs of FusedBatchNormGradV3."""

    x_backprop: Array
    scale_backprop: Array
    offset_backprop: Array
    reserve_space_4: Array  # empty
    reserve_space_5: Array  # empty


class _Version(NamedTuple):
    types: tuple[str, ...]
    formats: dict[str, int]  # the channels' axis of each data_format


_HALVES = ("float16", "bfloat16", "float32", "float64")
_V1 = _Version(("float32", "float64"), {"NHWC": -1, "NCHW": 1})
_V2 = _Version(_HALVES, _V1.formats)
_V3 = _Version(_HALVES, {"NHWC": -1, "NCHW": 1, "NDHWC": -1, "NCDHW": 1})


@op("FusedBatchNorm")
def fused_batch_norm(
    x: Array, scale: Array, offset: Array, mean: Array, variance: Array,
    epsilon: float = 1e-4, exponential_avg_factor: float = 1.0, data_format: str = "NHWC", is_training: bool = True,
    name: str | None = None,
) -> FusedBatchNorm:  # fmt: skip
    """`x` normalized channel by channel, with its own statistics in training, else with `mean` and `variance`.

    In training `mean` and `variance` are running averages, of which `1 - exponential_avg_factor` is kept; where that is
    nothing they are ignored and may be empty.
    """
    inputs = x, scale, offset, mean, variance
    return FusedBatchNorm(*_forward(_V1, inputs, epsilon, exponential_avg_factor, data_format, is_training)[:5])


@gradient(fused_batch_norm)
def fused_batch_norm_gradient(
    g: FusedBatchNorm, x: Array, scale: Array, mean: Array, variance: Array,
    reserve_space_1: Array, reserve_space_2: Array, epsilon: float, data_format: str, is_training: bool,
) -> dict[str, Array]:  # fmt: skip
    """As in TensorFlow, only `y` is differentiated, and nothing flows to `mean` and `variance`."""
    used = (mean, variance) if is_training is False else (reserve_space_1, reserve_space_2)
    return _by_input(fused_batch_norm_grad(g.y, x, scale, *used, epsilon, data_format, is_training))


@op("FusedBatchNormV2")
def fused_batch_norm_v2(
    x: Array, scale: Array, offset: Array, mean: Array, variance: Array,
    epsilon: float = 1e-4, exponential_avg_factor: float = 1.0, data_format: str = "NHWC", is_training: bool = True,
    name: str | None = None,
) -> FusedBatchNorm:  # fmt: skip
    """FusedBatchNorm that also takes half precision; its statistics are float32."""
    inputs = x, scale, offset, mean, variance
    return FusedBatchNorm(*_forward(_V2, inputs, epsilon, exponential_avg_factor, data_format, is_training)[:5])


@gradient(fused_batch_norm_v2)
def fused_batch_norm_v2_gradient(
    g: FusedBatchNorm, x: Array, scale: Array, mean: Array, variance: Array,
    reserve_space_1: Array, reserve_space_2: Array, epsilon: float, data_format: str, is_training: bool,
) -> dict[str, Array]:  # fmt: skip
    """As that of FusedBatchNorm."""
    used = (mean, variance) if is_training is False else (reserve_space_1, reserve_space_2)
    return _by_input(fused_batch_norm_grad_v2(g.y, x, scale, *used, epsilon, data_format, is_training))


@op("FusedBatchNormV3")
def fused_batch_norm_v3(
    x: Array, scale: Array, offset: Array, mean: Array, variance: Array,
    epsilon: float = 1e-4, exponential_avg_factor: float = 1.0, data_format: str = "NHWC", is_training: bool = True,
    name: str | None = None,
) -> FusedBatchNormV3:  # fmt: skip
    """FusedBatchNormV2 that also takes volumes."""
    inputs = x, scale, offset, mean, variance
    found = _forward(_V3, inputs, epsilon, exponential_avg_factor, data_format, is_training)
    return tuple.__new__(FusedBatchNormV3, found)  # the class itself takes as long as a third of a small kernel


@gradient(fused_batch_norm_v3)
def fused_batch_norm_v3_gradient(
    g: FusedBatchNormV3, x: Array, scale: Array, mean: Array, variance: Array,
    reserve_space_1: Array, reserve_space_2: Array, reserve_space_3: Array,
    epsilon: float, data_format: str, is_training: bool,
) -> dict[str, Array]:  # fmt: skip
    """As that of FusedBatchNorm."""
    used = (mean, variance) if is_training is False else (reserve_space_1, reserve_space_2)
    return _by_input(fused_batch_norm_grad_v3(g.y, x, scale, *used, reserve_space_3, epsilon, data_format, is_training))


@op("FusedBatchNormGrad")
def fused_batch_norm_grad(
    y_backprop: Array, x: Array, scale: Array, reserve_space_1: Array, reserve_space_2: Array,
    epsilon: float = 1e-4, data_format: str = "NHWC", is_training: bool = True, name: str | None = None,
) -> FusedBatchNormGrad:  # fmt: skip
    """The gradients of FusedBatchNorm for x, scale and offset, given the mean and variance that it used."""
    inputs = y_backprop, x, scale, reserve_space_1, reserve_space_2
    return FusedBatchNormGrad(*_backward(_V1, inputs, epsilon, data_format, is_training))


@gradient(fused_batch_norm_grad)
def fused_batch_norm_grad_gradient(
    g: FusedBatchNormGrad, y_backprop: Array, x: Array, scale: Array, reserve_space_1: Array, reserve_space_2: Array,
    epsilon: float, data_format: str, is_training: bool,
) -> dict[str, Array]:  # fmt: skip
    """As in TensorFlow, in training the statistics are those of `x`, whatever the reserves hold."""
    inputs = y_backprop, x, scale, reserve_space_1, reserve_space_2
    return _second_order(_V1, inputs, g, epsilon, data_format, is_training)


@op("FusedBatchNormGradV2")
def fused_batch_norm_grad_v2(
    y_backprop: Array, x: Array, scale: Array, reserve_space_1: Array, reserve_space_2: Array,
    epsilon: float = 1e-4, data_format: str = "NHWC", is_training: bool = True, name: str | None = None,
) -> FusedBatchNormGrad:  # fmt: skip
    """FusedBatchNormGrad that also takes half precision; its per-channel arrays are float32."""
    inputs = y_backprop, x, scale, reserve_space_1, reserve_space_2
    return FusedBatchNormGrad(*_backward(_V2, inputs, epsilon, data_format, is_training))


@gradient(fused_batch_norm_grad_v2)
def fused_batch_norm_grad_v2_gradient(
    g: FusedBatchNormGrad, y_backprop: Array, x: Array, scale: Array, reserve_space_1: Array, reserve_space_2: Array,
    epsilon: float, data_format: str, is_training: bool,
) -> dict[str, Array]:  # fmt: skip
    """As that of FusedBatchNormGrad."""
    inputs = y_backprop, x, scale, reserve_space_1, reserve_space_2
    return _second_order(_V2, inputs, g, epsilon, data_format, is_training)


@op("FusedBatchNormGradV3")
def fused_batch_norm_grad_v3(
    y_backprop: Array, x: Array, scale: Array, reserve_space_1: Array, reserve_space_2: Array, reserve_space_3: Array,
    epsilon: float = 1e-4, data_format: str = "NHWC", is_training: bool = True, name: str | None = None,
) -> FusedBatchNormGradV3:  # fmt: skip
    """FusedBatchNormGradV2 that also takes volumes; `reserve_space_3` is not used."""
    inputs = y_backprop, x, scale, reserve_space_1, reserve_space_2
    return tuple.__new__(FusedBatchNormGradV3, _backward(_V3, inputs, epsilon, data_format, is_training))


@gradient(fused_batch_norm_grad_v3)
def fused_batch_norm_grad_v3_gradient(
    g: FusedBatchNormGradV3, y_backprop: Array, x: Array, scale: Array, reserve_space_1: Array, reserve_space_2: Array,
    epsilon: float, data_format: str, is_training: bool,
) -> dict[str, Array]:  # fmt: skip
    """As that of FusedBatchNormGrad."""
    inputs = y_backprop, x, scale, reserve_space_1, reserve_space_2
    return _second_order(_V3, inputs, g, epsilon, data_format, is_training)


def _forward(
    version: _Version, inputs: tuple[Any, ...], epsilon: Any, factor: Any, data_format: Any, is_training: Any
) -> tuple[Array, ...]:
    """The six outputs of V3, of which the other versions have the first five."""
    x, scale, offset, mean, variance = inputs
    found = fused_norm(version, x, scale, offset, mean, variance, epsilon, factor, data_format, is_training)
    if found is not None:
        return found
    x, scale, offset, mean, variance = inputs = tuple(_take(version, _INPUTS, inputs, 1))
    is_training = _flag(is_training)
    epsilon = _number("epsilon", epsilon, 1e-4, dtype_of(x) == "float64")
    factor = _number("exponential_avg_factor", factor, 1.0, dtype_of(x) == "float64")
    is_blended = not is_training or factor != 1
    axis = _channel_axis(version, data_format, x, "x")
    _check_vectors(x.shape[axis], _INPUTS[1:], inputs[1:], 4 if is_blended else 2)
    if 0 in x.shape:
        return *_empty_outputs(x, scale), _zeros(scale, ())
    if not is_training:
        kernel = kernels.best("batch_norm_inference", x)
        y, copies = kernel(x, scale, offset, mean, variance, epsilon, axis, None), [mean, variance] * 2
        return y, *map(copied, copies), _zeros(mean, ())
    count = math.prod(x.shape) // x.shape[axis]
    weights = 1 - factor, factor, factor * count / max(count - 1, 1)
    run = kernels.best("batch_norm_running", x)
    y, *used, new_mean, new_variance, zero = run(
        x, scale, offset, epsilon, axis, (mean, variance) if is_blended else None, weights
    )
    return y, new_mean, new_variance, *used, zero


_INPUTS = ("x", "scale", "offset", "mean", "variance")


def _empty_outputs(x: Array, scale: Array) -> tuple[Array, Array, Array, Array, Array]:
    """What comes out when `x` has no elements: the running averages are not passed on, as in TensorFlow."""
    xp = namespace(library_of(x) or "numpy")
    unknown = xp.full_like(scale, math.nan), xp.full_like(scale, math.nan)
    return xp.zeros_like(x), *unknown, xp.zeros_like(scale), xp.zeros_like(scale)


def _backward(
    version: _Version, inputs: tuple[Any, ...], epsilon: Any, data_format: Any, is_training: Any
) -> tuple[Array, ...]:
    """The five outputs of every version of the gradient op."""
    g, x, scale, mean, variance = inputs
    found = fused_norm_grad(version, g, x, scale, mean, variance, epsilon, data_format, is_training)
    if found is not None:
        return found
    (g, x, scale, mean, variance), epsilon, axis, is_training = _gradient_arguments(
        version, inputs, epsilon, data_format, is_training
    )
    empty = _zeros(scale, (0,)), _zeros(scale, (0,))
    if 0 in x.shape:
        xp = namespace(library_of(x) or "numpy")
        return xp.zeros_like(x), xp.zeros_like(scale), xp.zeros_like(scale), *empty
    return *derivatives.backward(g, x, scale, mean, variance, None, Mode(epsilon, axis, is_training)), *empty


def _second_order(
    version: _Version, inputs: tuple[Any, ...], cotangent: Any, epsilon: Any, data_format: Any, is_training: Any
) -> dict[str, Array]:
    u, a, b, *_ = cotangent
    arrays, epsilon, axis, is_training = _gradient_arguments(version, inputs, epsilon, data_format, is_training)
    second = derivatives.batch_norm_grad_grad(*arrays, None, u, a, b, Mode(epsilon, axis, is_training))
    return {"y_backprop": second.second_g, "x": second.second_x, "scale": second.second_scale}


def _gradient_arguments(
    version: _Version, inputs: tuple[Any, ...], epsilon: Any, data_format: Any, is_training: Any
) -> tuple[list[Array], float, int, bool]:
    """The checked arrays, epsilon, the channels' axis and `is_training` of a gradient op."""
    arrays = _take(version, _INPUTS_BACK, inputs, 2)
    g, x = arrays[:2]
    epsilon = _number("epsilon", epsilon, 1e-4, dtype_of(x) == "float64")
    is_training = _flag(is_training)
    axis, same = _channel_axis(version, data_format, g, "y_backprop"), x.shape == g.shape
    if not same:
        axis = _channel_axis(version, data_format, x, "x")
    _check_vectors(x.shape[axis], _INPUTS_BACK[2:], arrays[2:], 3 if same else 0)
    if not same:
        raise InvalidArgumentError(
            f"x and y_backprop must have the same shape, got {list(x.shape)} and {list(g.shape)}"
        )
    return arrays, epsilon, axis, is_training


_INPUTS_BACK = ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2")


def _by_input(back: Any) -> dict[str, Array]:
    """The outputs of a gradient op by the inputs of its forward op."""
    return {"x": back.x_backprop, "scale": back.scale_backprop, "offset": back.offset_backprop}


def _take(version: _Version, names: tuple[str, ...], values: tuple[Any, ...], big: int) -> list[Array]:
    """The inputs as arrays of one library; the first `big` share the data's dtype, the others that of the
    statistics."""
    library = common_library(values)
    data = next((dtype_of(v) for v in values[:big] if library_of(v)), "float32")
    if data not in version.types:
        raise InvalidArgumentError(f"{names[0]} must be one of {', '.join(version.types)}, got {data}")
    statistics = "float64" if data == "float64" else "float32"
    arrays = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        wanted = data if i < big else statistics
        if library_of(value) is None:
            value = converted(name, value, library, wanted)
        elif dtype_of(value) != wanted:
            raise _wrong_dtype(version, name, dtype_of(value), wanted, names)
        arrays.append(value)
    return arrays


def converted(name: str, value: Any, library: str, dtype: str) -> Array:
    """Python's numbers as an array of `dtype`."""
    try:
        return asarray(np.asarray(value, dtype=dtype_in("numpy", dtype)), library)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"{name} must be an array of {dtype}: {error}") from None


def _wrong_dtype(version: _Version, name: str, got: str, wanted: str, names: tuple[str, ...]) -> Exception:
    # In TensorFlow the scale of the forward op decides the dtype of the statistics, and with it the kernel.
    if version is _V3 and names is _INPUTS and name == "scale" and got == "bfloat16":
        return NotFoundError("there is no kernel for statistics of bfloat16, float32 is needed")
    return InvalidArgumentError(f"{name} must be {wanted} here, got {got}")


def _channel_axis(version: _Version, data_format: Any, x: Array, name: str) -> int:
    """Where the channels are, counted from the front."""
    data_format = "NHWC" if data_format is None else data_format
    if not isinstance(data_format, (str, bytes)):
        raise ArgumentTypeError(f"data_format must be text, got {type(data_format).__name__}")
    text = data_format if isinstance(data_format, str) else data_format.decode(errors="replace")
    if text not in version.formats:
        raise InvalidArgumentError(f"data_format must be one of {', '.join(version.formats)}, got {text!r}")
    if x.ndim not in (4, 5):
        raise InvalidArgumentError(f"{name} must have rank 4 or 5, got the shape {list(x.shape)}")
    if 0 in x.shape and math.prod(n for n in x.shape if n) >= 2**63:
        raise InvalidArgumentError(f"the sizes of {name} must have a product below 2^63, got {list(x.shape)}")
    return version.formats[text] % x.ndim


def _check_vectors(channels: int, names: Sequence[str], vectors: Sequence[Array], needed: int) -> None:
    """Refuse what is not a vector, and of the first `needed` what has not one value per channel."""
    for name, vector in zip(names, vectors, strict=True):
        if vector.ndim != 1:
            raise InvalidArgumentError(f"{name} must have rank 1, got the shape {list(vector.shape)}")
    for name, vector in zip(names[:needed], vectors, strict=False):
        if vector.shape != (channels,):
            raise InvalidArgumentError(
                f"{name} must have one element for each of the {channels} channels of x, got {vector.shape[0]}"
            )


def _number(name: str, value: Any, default: float, is_wide: bool) -> float:
    """An attribute as TensorFlow stores it, in float32; beside float64 data in full."""
    if value is None:
        value = default
    found = number(name, value)
    return found if is_wide else rounded(found)


@lru_cache(maxsize=64)
def rounded(value: float) -> float:
    """A number as float32 holds it."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _flag(value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ArgumentTypeError(f"is_training must be True or False, got {type(value).__name__}")
    return value is not False


def _zeros(like: Array, shape: tuple[int, ...]) -> Array:
    if library_of(like) == "numpy":
        return np.zeros(shape, like.dtype)
    if shape == (0,) and library_of(like) == "torch":
        return like.new_empty(shape)
    return like.new_zeros(shape) if library_of(like) == "torch" else namespace("jax").zeros(shape, dtype=like.dtype)
