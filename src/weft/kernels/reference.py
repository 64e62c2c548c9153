"""Every kernel in array-API code: the definition the others are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._arrays import Array, library_of, namespace
from .._channels import Channels


def concat_rows(arrays: Sequence[Array], rows: int) -> Array:
    """A new array: `arrays` one below the other, then the first row of the first repeated up to `rows` rows."""
    first = arrays[0]
    xp = namespace(library_of(first) or "numpy")
    missing = rows - sum(x.shape[0] for x in arrays)
    padding = [xp.broadcast_to(first[:1], (missing, *first.shape[1:]))] if missing > 0 else []
    return xp.concat([*arrays, *padding], axis=0)


def cut_rows(x: Array, bounds: Sequence[tuple[int, int]]) -> list[Array]:
    """A new array for each `(start, stop)` of `bounds`: those rows of `x`."""
    library = library_of(x) or "numpy"
    if library == "jax":  # immutable: a slice is a new array already
        return [x[start:stop] for start, stop in bounds]
    xp = namespace(library)
    return [xp.asarray(x[start:stop], copy=True) for start, stop in bounds]


# Batch norm. `axis` is the channels' axis; `mask` says which rows (entries of axis 0) count, None for all of them:
# rows that do not count enter no sum, and are zeros in every result. r is 1 / sqrt(variance + epsilon).


@np.errstate(all="ignore")
def batch_norm(
    x: Array, scale: Array, offset: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """`x` normalized by its own statistics, then the mean and the biased variance of each channel."""
    channels = Channels(x, axis, mask)
    centred, mean = channels.centred(channels.values(x))
    # Rounded first, as the gradient will find it: a variance past the dtype's range makes y the offset, as in
    # TensorFlow.
    variance = channels.vector(channels.mean(centred * centred))
    factor = channels.spread(scale) / channels.xp.sqrt(channels.spread(variance) + epsilon)
    y = channels.rounded(centred * factor + channels.spread(offset))
    return y, channels.vector(mean), variance


@np.errstate(all="ignore")
def batch_norm_inference(
    x: Array, scale: Array, offset: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> Array:
    """`x` normalized by given statistics."""
    channels = Channels(x, axis, mask)
    factor = channels.spread(scale) / channels.xp.sqrt(channels.spread(variance) + epsilon)
    return channels.rounded((channels.values(x) - channels.spread(mean)) * factor + channels.spread(offset))


@np.errstate(all="ignore")
def batch_norm_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """The gradients of `batch_norm` for x, scale and offset; the statistics are taken as given."""
    channels = Channels(x, axis, mask)
    g, centred = channels.values(g), channels.only(channels.values(x) - channels.spread(mean))
    r = 1 / channels.xp.sqrt(channels.spread(variance) + epsilon)
    offset_grad, inner = channels.total(g), channels.total(g * centred)
    mean_g, mean_inner = offset_grad / channels.count, inner / channels.count
    x_grad = channels.spread(scale) * r * (g - mean_g - centred * (r * r * mean_inner))
    return channels.rounded(x_grad), channels.vector(r * inner), channels.vector(offset_grad)


@np.errstate(all="ignore")
def batch_norm_inference_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """The gradients of `batch_norm_inference` for x, scale and offset."""
    channels = Channels(x, axis, mask)
    g, centred = channels.values(g), channels.only(channels.values(x) - channels.spread(mean))
    r = 1 / channels.xp.sqrt(channels.spread(variance) + epsilon)
    x_grad = g * (channels.spread(scale) * r)
    return (
        channels.rounded(x_grad),
        channels.vector(r * channels.total(g * centred)),
        channels.vector(channels.total(g)),
    )


@np.errstate(all="ignore")
def batch_norm_grad_grad(
    g: Array, x: Array, scale: Array, u: Array, a: Array, b: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """The gradients, for g, x and scale, of `batch_norm_grad` with cotangents `u`, `a` and `b` and the statistics of
    `x`."""
    channels = Channels(x, axis, mask)
    scale, a, b = channels.spread(scale), channels.spread(a), channels.spread(b)
    (g, _), (x, _), (u, _) = (channels.centred(channels.values(z)) for z in (g, x, u))
    r = 1 / channels.xp.sqrt(channels.mean(x * x) + epsilon)
    gx, ux, ug = channels.mean(g * x), channels.mean(u * x), channels.mean(u * g)
    by_gx = a * r - scale * r**3 * ux
    g_grad = scale * r * u + by_gx * x + b
    by_variance = -(r**3) * (scale * (ug - 3 * r * r * gx * ux) + a * gx)
    x_grad = by_variance * x + by_gx * g - (scale * r**3 * gx) * u
    scale_grad = channels.count * r * (ug - r * r * gx * ux)
    return channels.rounded(g_grad), channels.rounded(x_grad), channels.vector(scale_grad)


@np.errstate(all="ignore")
def batch_norm_inference_grad_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, u: Array, a: Array, b: Array,
    epsilon: float, axis: int, mask: Array | None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The gradients, for g, x and scale, of `batch_norm_inference_grad` with cotangents `u`, `a` and `b`."""
    channels = Channels(x, axis, mask)
    g, x, u = (channels.values(z) for z in (g, x, u))
    r = 1 / channels.xp.sqrt(channels.spread(variance) + epsilon)
    ar = channels.spread(a) * r
    g_grad = channels.spread(scale) * r * u + ar * (x - channels.spread(mean)) + channels.spread(b)
    return channels.rounded(g_grad), channels.rounded(ar * g), channels.vector(r * channels.total(u * g))
