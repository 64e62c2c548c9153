"""All kernels in array-API code: the definition that the other implementations are tested against.

Infinities and NaN that come of the numbers are results: no kernel warns of them, as none in C++ does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.arrays import Array, first_row, index_like, library_of, lowest_of, namespace, on_host
from .channels import Channels
from .splits import positions, row_ids, splits_from_lengths


def concat_rows(arrays: Sequence[Array], rows: int) -> Array:
    """A new array: `arrays` one below the other, then their first row repeated up to `rows` rows."""
    xp = namespace(library_of(arrays[0]) or "numpy")
    missing = rows - sum(x.shape[0] for x in arrays)
    if len(arrays) == 1 and missing <= 0:  # JAX would return a single array itself, to a function that may donate it
        return xp.asarray(arrays[0], copy=True)
    padding = [xp.broadcast_to(first_row(arrays), (missing, *arrays[0].shape[1:]))] if missing > 0 else []
    return xp.concat([*arrays, *padding], axis=0)


def cut_rows(x: Array, bounds: Sequence[tuple[int, int]]) -> list[Array]:
    """A copy of the rows `start` to `stop` of `x` for each pair of `bounds`."""
    library = library_of(x) or "numpy"
    xp = namespace(library)
    if (
        library == "jax"
    ):  # immutable: a slice is a new array, but that of all rows is `x` itself, which its maker may donate
        return [xp.asarray(x[start:stop], copy=(stop - start == len(x)) or None) for start, stop in bounds]
    return [xp.asarray(x[start:stop], copy=True) for start, stop in bounds]


def split_rows(values: Array, splits: np.ndarray) -> list[Array]:
    """The rows of `values` between consecutive `splits`, as views if the library has views."""
    library = library_of(values)
    if library == "torch":
        return list(values.split(np.diff(splits).tolist()))
    if library == "jax" and on_host(values):
        # JAX compiles a slice for every length; cutting in host memory compiles nothing.
        xp = namespace("jax")
        return [xp.asarray(row) for row in split_rows(np.asarray(values), splits)]
    bounds = splits.tolist()
    return [values[start:stop] for start, stop in pairwise(bounds)]


def join_rows(rows: Sequence[Array]) -> Array:
    """A new array: `rows`, of which there is at least one, one below the other."""
    xp = namespace(library_of(rows[0]) or "numpy")
    if library_of(rows[0]) == "jax" and all(map(on_host, rows)):
        return xp.asarray(np.concatenate([np.asarray(row) for row in rows]))
    return xp.concat(list(rows), axis=0)


def unstack_rows(values: Array) -> list[Array]:
    """`values[0], values[1], ...`."""
    if library_of(values) == "torch":
        return list(values.unbind())
    rows = split_rows(values, np.arange(values.shape[0] + 1))
    return [row.reshape(values.shape[1:]) for row in rows]


def stack_rows(rows: Sequence[Array]) -> Array:
    """`rows`, of which there is at least one and all of one shape, along a new first axis."""
    joined = join_rows([row.reshape((1, *row.shape)) for row in rows])
    return joined.reshape((len(rows), *rows[0].shape))


def place_rows(
    values: Array, default: Array, starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray, rows: int
) -> Array:
    """`rows` rows, row `targets[i] + k` being `values[starts[i] + k]` for `k < lengths[i]`, all others `default`."""
    library = library_of(values) or "numpy"
    xp = namespace(library)
    source, target = positions(starts, lengths), positions(targets, lengths)
    if library == "jax":
        out = xp.broadcast_to(default, (rows, *values.shape[1:])).astype(values.dtype)
        return out.at[target].set(values[source])
    out = xp.empty((rows, *values.shape[1:]), dtype=values.dtype, **_where(values))
    if library == "torch":
        source, target = (index_like(i, library).to(values.device) for i in (source, target))
        if library_of(default) == "torch":
            default = default.detach()  # torch.asarray warns for tensors that require a gradient
        _bits(out)[...] = _bits(xp.asarray(default, dtype=values.dtype))
        _bits(out)[target] = _bits(values)[source]
        return out
    out[...] = default
    out[target] = values[source]
    return out


@np.errstate(all="ignore")
def add_rows(values: Array, starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray, rows: int) -> Array:
    """`rows` rows of zeros, with `values[starts[i] + k]` added to row `targets[i] + k` for `k < lengths[i]`."""
    library = library_of(values) or "numpy"
    xp = namespace(library)
    source, target = positions(starts, lengths), positions(targets, lengths)
    bits = _bits(values) if library == "torch" else values
    out = xp.zeros((rows, *values.shape[1:]), dtype=bits.dtype, **_where(values))
    if library == "jax":
        return out.at[target].add(values[source])
    if library == "torch":
        source, target = (index_like(i, library).to(values.device) for i in (source, target))
        return out.index_add(0, target, bits[source]).view(values.dtype)
    np.add.at(out, target, values[source])
    return out


def all_below(index: np.ndarray, count: int) -> bool:
    """Whether every entry of `index` is in [0, count)."""
    return not index.size or (index.min() >= 0 and index.max() < count)


def longest_row(splits: np.ndarray) -> int:
    """The length of the longest row; -1 if splits decrease."""
    lengths = np.diff(splits)
    return -1 if (lengths < 0).any() else int(lengths.max(initial=0))


def row_bounds(splits: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The starts of the rows `index`, and the splits of these rows joined."""
    starts = splits[index].astype(np.int64)
    return starts, splits_from_lengths(splits[index + 1] - starts)


def take_rows(values: Array, starts: np.ndarray, bounds: np.ndarray) -> Array:
    """The rows that begin at `starts`, joined; `bounds` are their splits in the result."""
    library = library_of(values) or "numpy"
    source = index_like(positions(starts, np.diff(bounds)), library)
    if library == "torch":
        return _bits(values)[source.to(values.device)].view(values.dtype)
    return values[source]


def pad_rows(values: Array, default: Array, splits: np.ndarray, rows: int, columns: int) -> Array:
    """`rows` rows of `columns` values: the rows of `splits`, cut, or padded with `default`."""
    count = min(len(splits) - 1, rows)
    starts, lengths = splits[:count], np.minimum(np.diff(splits[: count + 1]), columns)
    return place_rows(values, default, starts, lengths, np.arange(count) * columns, rows * columns)


@np.errstate(all="ignore")
def row_sum(values: Array, splits: np.ndarray) -> Array:
    """The sum of every row; zero for an empty row."""
    library = library_of(values) or "numpy"
    if library == "numpy":
        return _reduceat(np.add, values, splits, 0)
    ids, rows = index_like(row_ids(splits), library), len(splits) - 1
    bits = _bits(values) if library == "torch" else values
    out = namespace(library).zeros((rows, *values.shape[1:]), dtype=bits.dtype, **_where(values))
    if library == "jax":
        return out.at[ids].add(values)
    return out.index_add(0, ids.to(values.device), bits).view(values.dtype)


@np.errstate(all="ignore")
def row_max(values: Array, splits: np.ndarray) -> Array:
    """The largest value of every row; the smallest value of the dtype for an empty row."""
    library = library_of(values) or "numpy"
    xp = namespace(library)
    lowest = lowest_of(values)
    if library == "numpy":
        return _reduceat(np.maximum, values, splits, lowest)
    ids, rows = index_like(row_ids(splits), library), len(splits) - 1
    bits = _bits(values) if library == "torch" else values
    if bits.dtype != values.dtype:  # unsigned: with the top bit flipped they are in order
        lowest = xp.iinfo(bits.dtype).min
        bits = bits ^ lowest
    out = xp.full((rows, *values.shape[1:]), lowest, dtype=bits.dtype, **_where(values))
    if library == "jax":
        return out.at[ids].max(values)
    ids = ids.to(values.device).reshape(-1, *[1] * (values.ndim - 1)).expand(values.shape)
    out = out.scatter_reduce(0, ids, bits, "amax")
    return out if bits.dtype == values.dtype else (out ^ lowest).view(values.dtype)


def repeat_rows(x: Array, splits: np.ndarray) -> Array:
    """Row `i` of `x` once for every value of row `i`."""
    library = library_of(x) or "numpy"
    lengths = np.diff(splits)
    if library == "jax":
        return x[row_ids(splits)]
    if library == "torch":
        counts = index_like(lengths, library).to(x.device)
        return _bits(x).repeat_interleave(counts, dim=0, output_size=int(splits[-1])).view(x.dtype)
    return np.repeat(x, lengths, axis=0)


@np.errstate(all="ignore")
def row_softmax(values: Array, splits: np.ndarray) -> Array:
    """exp(value) over the sum of exp within its row, entry by entry of the inner dimensions."""
    xp = namespace(library_of(values) or "numpy")
    e = xp.exp(values - repeat_rows(row_max(values, splits), splits))
    return e / repeat_rows(row_sum(e, splits), splits)


@np.errstate(all="ignore")
def range_rows(starts: np.ndarray, steps: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Rows that begin at `starts` and go on by repeated addition of `steps`, rounded each time."""
    out = np.repeat(steps, np.diff(splits))
    filled = np.flatnonzero(np.diff(splits))
    out[splits[filled]] = starts[filled]
    for start, stop in zip(splits[filled], splits[filled + 1], strict=True):
        np.add.accumulate(out[start:stop], out=out[start:stop])
    return out


def _reduceat(ufunc: np.ufunc, values: np.ndarray, splits: np.ndarray, empty: float) -> np.ndarray:
    out = np.full((len(splits) - 1, *values.shape[1:]), empty, dtype=values.dtype)
    filled = np.flatnonzero(np.diff(splits))
    if filled.size:  # from one non-empty row's start to the next are its own values only
        out[filled] = ufunc.reduceat(values, splits[filled], axis=0, dtype=values.dtype)
    return out


def _bits(x: Array) -> Array:
    """A tensor that torch can index, add and view: of unsigned integers, which it can only with 8 bits, a signed view."""
    name = str(x.dtype).removeprefix("torch.")
    if name.startswith("uint"):
        return x.view(getattr(namespace("torch"), name[1:]))
    return x.resolve_neg().resolve_conj()


def _where(x: Array) -> dict[str, Any]:
    return {"device": x.device} if library_of(x) == "torch" else {}


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
def batch_norm_running(
    x: Array, scale: Array, offset: Array, epsilon: float, axis: int, old: tuple[Array, Array] | None,
    weights: tuple[float, float, float],
) -> tuple[Array, Array, Array, Array, Array, Array]:  # fmt: skip
    """`batch_norm`, then the running mean and variance after it, and a zero.

    With `weights` (keep, share, corrected) they are keep * old + share * mean and keep * old + corrected * variance; without `old`
    nothing is kept.
    """
    y, mean, variance = batch_norm(x, scale, offset, epsilon, axis, None)
    keep, share, corrected = weights
    after = share * mean, corrected * variance
    if old is not None:
        after = keep * old[0] + after[0], keep * old[1] + after[1]
    xp = namespace(library_of(x) or "numpy")
    return y, mean, variance, *after, xp.zeros((), dtype=mean.dtype, **_where(mean))


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
