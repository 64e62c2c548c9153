"""Batch norm for any rank, channel axis and row mask, differentiable at any order. The public ops are built on it.

The ops here are internal. Their gradients form a chain: `batch_norm` -> `batch_norm_grad` -> `batch_norm_grad_grad`
-> array arithmetic, which each framework differentiates further. In training all orders differentiate one scalar, which
per channel is a function of moments only. With u, a, b the cotangents of the gradients for x, scale and
offset,

    <u, x_grad> + a scale_grad + b offset_grad = M phi,  phi = scale r (ug - r^2 gx ux) + a r gx + b mean(g),

where M is the number of elements, gx, ux, ug and xx are covariances, and r = 1 / sqrt(xx + epsilon). Its derivatives
are the second order (`reference.batch_norm_grad_grad`), their derivatives in a direction the third (`_third_order`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from .. import kernels
from ..core.arrays import Array, common_library, get_library_of
from ..core.op import gradient, op
from ..kernels.channels import Channels


@dataclass(frozen=True, slots=True)
class Mode:
    """How a batch is normalized: with its own statistics in training, else with given ones."""

    epsilon: float
    axis: int  # of the channels
    is_training: bool


class Normalized(NamedTuple):
    """`x` normalized, and the statistics used; the variance is the biased one."""

    y: Array
    used_mean: Array
    used_variance: Array


class Gradients(NamedTuple):
    """The gradients of `Normalized.y`."""

    x_grad: Array
    scale_grad: Array
    offset_grad: Array


class SecondGradients(NamedTuple):
    """The gradients of `Gradients`."""

    second_g: Array
    second_x: Array
    second_scale: Array


@op("_BatchNorm", internal=True)
def batch_norm(
    x: Array, scale: Array, offset: Array, mean: Array | None, variance: Array | None, mask: Array | None, mode: Mode
) -> Normalized:
    """Normalize `x` by channel: in training with its own statistics, else with `mean` and `variance`."""
    return Normalized(*forward(x, scale, offset, mean, variance, mask, mode))


def forward(
    x: Array, scale: Array, offset: Array, mean: Array | None, variance: Array | None, mask: Array | None, mode: Mode
) -> tuple[Array, Array, Array]:
    """The same as a tuple, without autodiff."""
    if mode.is_training:
        return kernels.best("batch_norm", x)(x, scale, offset, mode.epsilon, mode.axis, mask)
    kernel = kernels.best("batch_norm_inference", x)
    y = kernel(x, scale, offset, mean, variance, mode.epsilon, mode.axis, mask)
    return y, copied(mean), copied(variance)


@gradient(batch_norm, through=["y"])
def batch_norm_gradient(
    g: Normalized, x: Array, scale: Array, used_mean: Array, used_variance: Array, mask: Array | None, mode: Mode
) -> dict[str, Array]:
    """The gradient of `y`; the returned statistics have no gradient."""
    back = batch_norm_grad(g.y, x, scale, used_mean, used_variance, mask, mode)
    return {"x": back.x_grad, "scale": back.scale_grad, "offset": back.offset_grad}


@op("_BatchNormGrad", internal=True)
def batch_norm_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, mask: Array | None, mode: Mode
) -> Gradients:
    """The gradients of `batch_norm` for x, scale and offset, with the given statistics."""
    return Gradients(*backward(g, x, scale, mean, variance, mask, mode))


def backward(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, mask: Array | None, mode: Mode
) -> tuple[Array, Array, Array]:
    """The same as a tuple, without autodiff."""
    kernel = kernels.best("batch_norm_grad" if mode.is_training else "batch_norm_inference_grad", x)
    return kernel(g, x, scale, mean, variance, mode.epsilon, mode.axis, mask)


@gradient(batch_norm_grad)
def batch_norm_grad_gradient(
    cotangent: Gradients, g: Array, x: Array, scale: Array, mean: Array, variance: Array, mask: Array | None, mode: Mode
) -> dict[str, Array]:
    """In training the statistics are recomputed from `x`, as in TensorFlow."""
    second = batch_norm_grad_grad(g, x, scale, mean, variance, mask, *cotangent, mode)
    return {"g": second.second_g, "x": second.second_x, "scale": second.second_scale}


@op("_BatchNormGradGrad", internal=True)
def batch_norm_grad_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, mask: Array | None, u: Array, a: Array, b: Array,
    mode: Mode,
) -> SecondGradients:  # fmt: skip
    """The gradients of `batch_norm_grad` for g, x and scale, with `u`, `a` and `b` the cotangents of its results."""
    if mode.is_training:
        kernel = kernels.best("batch_norm_grad_grad", x)
        return SecondGradients(*kernel(g, x, scale, u, a, b, mode.epsilon, mode.axis, mask))
    kernel = kernels.best("batch_norm_inference_grad_grad", x)
    return SecondGradients(*kernel(g, x, scale, mean, variance, u, a, b, mode.epsilon, mode.axis, mask))


@gradient(batch_norm_grad_grad)
def batch_norm_grad_grad_gradient(
    cotangent: SecondGradients, g: Array, x: Array, scale: Array, mean: Array, variance: Array, mask: Array | None,
    u: Array, a: Array, b: Array, mode: Mode,
) -> dict[str, Array]:  # fmt: skip
    """The third order, in arithmetic that the frameworks can differentiate; `d...` are the cotangents: the direction."""
    channels = Channels(x, mode.axis, mask, common_library([g, x, scale, u, a, b, *cotangent]))
    big = {"g": g, "x": x, "u": u, "dg": cotangent.second_g, "dx": cotangent.second_x}
    small = {"scale": scale, "a": a, "b": b, "dscale": cotangent.second_scale}
    given = SimpleNamespace(
        **{k: channels.values(v) for k, v in big.items()}, **{k: channels.spread(v) for k, v in small.items()}
    )
    with np.errstate(all="ignore"):
        if mode.is_training:
            back = _third_order(channels, given, mode.epsilon)
        else:
            centred = channels.only(given.x - channels.spread(mean))
            back = _third_order_inference(channels, given, centred, (channels.spread(variance) + mode.epsilon) ** -0.5)
    return {k: channels.rounded(v) if k in "gxu" else channels.vector(v) for k, v in back.items()}


def _third_order(channels: Channels, given: SimpleNamespace, epsilon: float) -> dict[str, Array]:
    """The gradients of the second order.

    `by_p` is the derivative of phi (the module's docstring) by the moment p, `along` is phi's derivative along the
    direction.
    """
    mean, scale, a, dscale = channels.mean, given.scale, given.a, given.dscale
    dg_mean = mean(given.dg)
    g, x, u, dg, dx = (channels.only(z - mean(z)) for z in (given.g, given.x, given.u, given.dg, given.dx))
    xx, gx, ux, ug = mean(x * x), mean(g * x), mean(u * x), mean(u * g)
    r = (xx + epsilon) ** -0.5
    r3, r5, r7 = r**3, r**5, r**7
    by_xx = -0.5 * r3 * (scale * ug + a * gx) + 1.5 * r5 * scale * gx * ux
    by_gx, by_ux, by_ug = a * r - scale * r3 * ux, -scale * r3 * gx, scale * r
    d_xx, d_gx, d_ux, d_ug = 2 * mean(x * dx), mean(dg * x) + mean(g * dx), mean(u * dx), mean(u * dg)
    by_xx_gx, by_xx_ux = 1.5 * r5 * scale * ux - 0.5 * r3 * a, 1.5 * r5 * scale * gx
    by_xx_xx = 0.75 * r5 * (scale * ug + a * gx) - 3.75 * r7 * scale * gx * ux
    by_xx_scale = 1.5 * r5 * gx * ux - 0.5 * r3 * ug
    along_xx = (
        by_xx_xx * d_xx + by_xx_gx * d_gx + by_xx_ux * d_ux - 0.5 * r3 * scale * d_ug + by_xx_scale * dscale
    )  # fmt: skip
    along_gx = by_xx_gx * d_xx - scale * r3 * d_ux - r3 * ux * dscale
    along_ux = by_xx_ux * d_xx - scale * r3 * d_gx - r3 * gx * dscale
    along_ug = r * dscale - 0.5 * r3 * scale * d_xx
    along_scale = by_xx_scale * d_xx - r3 * (ux * d_gx + gx * d_ux) + r * d_ug
    return {
        "g": along_gx * x + along_ug * u + by_gx * dx,
        "x": 2 * along_xx * x + along_gx * g + along_ux * u + 2 * by_xx * dx + by_gx * dg,
        "u": along_ux * x + along_ug * g + by_ux * dx + by_ug * dg,
        "scale": channels.count * along_scale,
        "a": channels.count * (r * d_gx - 0.5 * r3 * gx * d_xx),
        "b": channels.count * dg_mean,
    }


def _third_order_inference(channels: Channels, given: SimpleNamespace, centred: Array, r: Array) -> dict[str, Array]:
    total, g, u, dg, dx = channels.total, given.g, given.u, given.dg, given.dx
    return {
        "g": r * (given.a * dx + given.dscale * u),
        "x": given.a * r * dg,
        "u": r * (given.scale * dg + given.dscale * g),
        "scale": r * total(dg * u),
        "a": r * (total(dg * centred) + total(dx * g)),
        "b": total(dg),
    }


def copied(x: Array) -> Array:
    """A copy of `x`, unless it is immutable."""
    if type(x) is np.ndarray:
        return x.copy()
    return get_library_of(x).copy(x)
