"""BatchNormWithGlobalNormalization and its Grad: deprecated in TensorFlow; here with the shape checks that TensorFlow lacks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array, common_library, dtype_of, library_of
from ..core.check import flag, number
from ..core.op import gradient, op
from ..errors import InvalidArgumentError
from ..kernels.channels import Channels
from .ops import converted, rounded

_TYPES = ("float16", "bfloat16", "float32", "float64")


class BatchNormWithGlobalNormalizationGrad(NamedTuple):
    """The outputs of BatchNormWithGlobalNormalizationGrad."""

    dx: Array
    dm: Array
    dv: Array
    db: Array
    dg: Array


@op("BatchNormWithGlobalNormalization", output="result")
@np.errstate(all="ignore")
def batch_norm_with_global_normalization(
    t: Array, m: Array, v: Array, beta: Array, gamma: Array,
    variance_epsilon: float, scale_after_normalization: bool, name: str | None = None,
) -> Array:  # fmt: skip
    """Normalize `t`, channels last, by the mean `m` and the variance `v`; multiply by `gamma` if asked for, and add `beta`."""
    t, m, v, beta, gamma = _arrays({"t": t, "m": m, "v": v, "beta": beta, "gamma": gamma})
    epsilon, scales = _attributes(variance_epsilon, scale_after_normalization)
    _check(t, {"m": m, "v": v, "beta": beta, "gamma": gamma})
    channels = Channels(t, 3, None)
    s = _factor(channels, v, gamma, epsilon, scales)
    return channels.rounded((channels.values(t) - channels.spread(m)) * s + channels.spread(beta))


@gradient(batch_norm_with_global_normalization)
def batch_norm_with_global_normalization_gradient(
    g: Array, t: Array, m: Array, v: Array, gamma: Array, variance_epsilon: float, scale_after_normalization: bool
) -> dict[str, Array]:
    """All five inputs have a gradient, the statistics included."""
    back = batch_norm_with_global_normalization_grad(t, m, v, gamma, g, variance_epsilon, scale_after_normalization)
    return {"t": back.dx, "m": back.dm, "v": back.dv, "beta": back.db, "gamma": back.dg}


@op("BatchNormWithGlobalNormalizationGrad")
@np.errstate(all="ignore")
def batch_norm_with_global_normalization_grad(
    t: Array, m: Array, v: Array, gamma: Array, backprop: Array,
    variance_epsilon: float, scale_after_normalization: bool, name: str | None = None,
) -> BatchNormWithGlobalNormalizationGrad:  # fmt: skip
    """The gradients of BatchNormWithGlobalNormalization; `dg` is zero if gamma is not used."""
    t, m, v, gamma, backprop = _arrays({"t": t, "m": m, "v": v, "gamma": gamma, "backprop": backprop})
    epsilon, scales = _attributes(variance_epsilon, scale_after_normalization)
    _check(t, {"m": m, "v": v, "gamma": gamma}, backprop)
    channels = Channels(t, 3, None)
    d, centred = channels.values(backprop), channels.values(t) - channels.spread(m)
    s = _inverse(channels, v, epsilon)
    factor = _factor(channels, v, gamma, epsilon, scales)
    total, inner = channels.total(d), channels.total(d * centred)
    dg = inner * s if scales else channels.xp.zeros_like(inner)
    vectors = -total * factor, -0.5 * inner * s * s * factor, total, dg
    return BatchNormWithGlobalNormalizationGrad(channels.rounded(d * factor), *map(_vector_in(channels), vectors))


@gradient(batch_norm_with_global_normalization_grad)
def batch_norm_with_global_normalization_grad_gradient(
    u: BatchNormWithGlobalNormalizationGrad, t: Array, m: Array, v: Array, gamma: Array, backprop: Array,
    variance_epsilon: float, scale_after_normalization: bool,
) -> dict[str, Array]:  # fmt: skip
    """The second order, which TensorFlow does not have, in arithmetic that the frameworks differentiate further."""
    t, m, v, gamma, backprop = _arrays({"t": t, "m": m, "v": v, "gamma": gamma, "backprop": backprop})
    epsilon, scales = _attributes(variance_epsilon, scale_after_normalization)
    channels = Channels(t, 3, None)
    d, centred = channels.values(backprop), channels.values(t) - channels.spread(m)
    s = _inverse(channels, v, epsilon)
    ux = channels.values(u.dx)
    um, uv, ub, ug = (channels.spread(value) for value in (u.dm, u.dv, u.db, u.dg))
    gamma = channels.spread(gamma) if scales else 1.0
    ug = ug if scales else channels.xp.zeros_like(ug)
    total, inner = channels.total(d), channels.total(d * centred)
    direct = channels.total(ux * d) - um * total  # what multiplies s gamma in the whole
    by_centred = -0.5 * uv * s**3 * gamma + ug * s
    by_v = gamma * (-0.5 * s**3 * direct + 0.75 * s**5 * uv * inner) - 0.5 * s**3 * ug * inner
    by_gamma = s * direct - 0.5 * s**3 * uv * inner
    vector = _vector_in(channels)
    return {
        "t": channels.rounded(by_centred * d),
        "m": vector(-by_centred * total),
        "v": vector(by_v),
        "gamma": vector(by_gamma if scales else channels.xp.zeros_like(by_gamma)),
        "backprop": channels.rounded((ux - um) * s * gamma + by_centred * centred + ub),
    }


def _inverse(channels: Channels, v: Array, epsilon: float) -> Array:
    """1 / sqrt(v + epsilon): a power of -0.5 would be 0 for minus infinity."""
    return 1 / channels.xp.sqrt(channels.spread(v) + epsilon)


def _factor(channels: Channels, v: Array, gamma: Array, epsilon: float, scale: bool) -> Array:
    s = _inverse(channels, v, epsilon)
    return s * channels.spread(gamma) if scale else s


def _vector_in(channels: Channels) -> Any:
    """How a per-channel result is given: in the dtype of the data."""
    return lambda x: channels.rounded(channels.xp.reshape(x, (-1,)))


def _attributes(epsilon: Any, scales: Any) -> tuple[float, bool]:
    """The attributes as TensorFlow stores them: epsilon in float32."""
    return rounded(number("variance_epsilon", epsilon)), flag("scale_after_normalization", scales)


def _arrays(values: dict[str, Any]) -> list[Array]:
    """The inputs as arrays of one library; Python's numbers get the dtype of the first array, or float32."""
    library = common_library(values.values())
    dtype = next((dtype_of(x) for x in values.values() if library_of(x) is not None), "float32")
    if dtype not in _TYPES:
        raise InvalidArgumentError(f"t must be one of {', '.join(_TYPES)}, got {dtype}")
    return [x if library_of(x) is not None else converted(name, x, library, dtype) for name, x in values.items()]


def _check(t: Array, vectors: dict[str, Array], backprop: Array | None = None) -> None:
    if dtype_of(t) not in _TYPES:
        raise InvalidArgumentError(f"t must be one of {', '.join(_TYPES)}, got {dtype_of(t)}")
    if t.ndim != 4:
        raise InvalidArgumentError(f"t must have rank 4, got the shape {list(t.shape)}")
    others = vectors if backprop is None else {**vectors, "backprop": backprop}
    for name, value in others.items():
        if dtype_of(value) != dtype_of(t):
            raise InvalidArgumentError(f"{name} must be {dtype_of(t)} like t, got {dtype_of(value)}")
    for name, vector in vectors.items():
        if tuple(vector.shape) != (t.shape[3],):
            raise InvalidArgumentError(
                f"{name} must have one element for each of the {t.shape[3]} channels of t, got {list(vector.shape)}"
            )
    if backprop is not None and tuple(backprop.shape) != tuple(t.shape):
        raise InvalidArgumentError(f"backprop must have the shape of t, {list(t.shape)}, got {list(backprop.shape)}")
