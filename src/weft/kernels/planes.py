"""Batch norm's loops over channels-first data, in Numba.

The data is seen as rows of `channels` planes of `depth` contiguous elements. A call sees the elements `start : stop`
of one channel's plane in some ranges of rows, the pairs `first : last` of `spans`. Sums run in the computing dtype
over about `BLOCK` elements, in 64 lanes, and from there on in float64. Arrays come as pointers; `lanes` is scratch of
128, sums are left in `out`.
"""

from __future__ import annotations

import math

from .rows import _read, _write, clear, jit
from .simd import every, load, load_part, rounded, store, total

BLOCK = 4096


@jit
def _number(x, at, like):
    """One element as float64."""
    return total(load_part(x, at, 1, every(0.0, like)))


@jit
def _sum(sums, at):
    """What 64 lanes hold together."""
    return (total(load(sums, at)) + total(load(sums, at + 16))) + (
        total(load(sums, at + 32)) + total(load(sums, at + 48))
    )


@jit
def _first_shift(x, at, count, lanes):
    """The mean of a stretch, from its distances to its first element: exact where a channel is constant."""
    first = _number(x, at, lanes)
    k = every(first, lanes)
    a = every(0.0, lanes)
    n = min(count, BLOCK)
    for i in range(0, n, 16):
        a = a + (_read(x, at + i, n - i, k) - k)
    mean = first + total(a) / n
    return rounded(mean, lanes) if math.isfinite(mean) else first


# ---- mean and sum of squares


@jit
def _add_moments(x, at, count, shift, lanes):
    """Add the distances of a stretch from the shift to 64 lanes, and their squares to the 64 after them."""
    k = every(shift, lanes)
    a0, a1, a2, a3 = load(lanes, 0), load(lanes, 16), load(lanes, 32), load(lanes, 48)
    b0, b1, b2, b3 = load(lanes, 64), load(lanes, 80), load(lanes, 96), load(lanes, 112)
    i = at
    stop = at + count
    while i + 64 <= stop:
        d0, d1, d2, d3 = load(x, i) - k, load(x, i + 16) - k, load(x, i + 32) - k, load(x, i + 48) - k
        a0, a1, a2, a3 = a0 + d0, a1 + d1, a2 + d2, a3 + d3
        b0, b1, b2, b3 = b0 + d0 * d0, b1 + d1 * d1, b2 + d2 * d2, b3 + d3 * d3
        i += 64
    while i + 16 <= stop:
        d = load(x, i) - k
        a0, a1, b0, b1 = a1, a0 + d, b1, b0 + d * d
        i += 16
    if i < stop:
        d = load_part(x, i, stop - i, k) - k
        a2, b2 = a2 + d, b2 + d * d
    store(lanes, 0, a0)
    store(lanes, 16, a1)
    store(lanes, 32, a2)
    store(lanes, 48, a3)
    store(lanes, 64, b0)
    store(lanes, 80, b1)
    store(lanes, 96, b2)
    store(lanes, 112, b3)


@jit
def _merge_moments(out, count, shift, lanes):
    """Add a block's moments to `out`, empty the lanes, and return the mean so far: the next shift."""
    a = _sum(lanes, 0)
    inner = _sum(lanes, 64) - a * a / count
    if inner < 0:
        inner = 0.0
    n, old = out[0], out[1]
    delta = (shift + a / count) - old / n if n > 0 else 0.0
    out[0] = n + count
    out[1] = old + (shift * count + a)
    out[2] += inner + delta * delta * (n * count / (n + count))
    clear(lanes, 128)
    mean = out[1] / out[0]
    return rounded(mean, lanes) if math.isfinite(mean) else shift


@jit
def moments(x, spans, first, last, channels, depth, channel, start, stop, lanes, out):
    """The number of elements, their sum, and their sum of squared distances from the mean, in `out`."""
    out[0] = out[1] = out[2] = 0.0
    clear(lanes, 128)
    shift = _first_shift(x, (spans[2 * first] * channels + channel) * depth + start, stop - start, lanes)
    count = 0
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1]):
            plane = (row * channels + channel) * depth
            at = start
            while at < stop:
                n = min(BLOCK, stop - at)
                if count + n > BLOCK:
                    shift = _merge_moments(out, count, shift, lanes)
                    count = 0
                _add_moments(x, plane + at, n, shift, lanes)
                count += n
                at += n
    _merge_moments(out, count, shift, lanes)


# ---- sums of g and of g (x - mean)


@jit
def _add_products(g, x, at, count, mean, lanes):
    k = every(mean, lanes)
    a0, a1, a2, a3 = load(lanes, 0), load(lanes, 16), load(lanes, 32), load(lanes, 48)
    b0, b1, b2, b3 = load(lanes, 64), load(lanes, 80), load(lanes, 96), load(lanes, 112)
    i = at
    stop = at + count
    while i + 64 <= stop:
        g0, g1, g2, g3 = load(g, i), load(g, i + 16), load(g, i + 32), load(g, i + 48)
        a0, a1, a2, a3 = a0 + g0, a1 + g1, a2 + g2, a3 + g3
        b0, b1 = b0 + g0 * (load(x, i) - k), b1 + g1 * (load(x, i + 16) - k)
        b2, b3 = b2 + g2 * (load(x, i + 32) - k), b3 + g3 * (load(x, i + 48) - k)
        i += 64
    while i + 16 <= stop:
        v = load(g, i)
        a0, a1, b0, b1 = a1, a0 + v, b1, b0 + v * (load(x, i) - k)
        i += 16
    if i < stop:
        v = load_part(g, i, stop - i, every(0.0, lanes))
        a2, b2 = a2 + v, b2 + v * (load_part(x, i, stop - i, k) - k)
    store(lanes, 0, a0)
    store(lanes, 16, a1)
    store(lanes, 32, a2)
    store(lanes, 48, a3)
    store(lanes, 64, b0)
    store(lanes, 80, b1)
    store(lanes, 96, b2)
    store(lanes, 112, b3)


@jit
def products(g, x, spans, first, last, channels, depth, channel, start, stop, mean, lanes, out):
    """The sums of g and of g (x - mean), in `out`."""
    out[0] = out[1] = 0.0
    clear(lanes, 128)
    count = 0
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1]):
            plane = (row * channels + channel) * depth
            at = start
            while at < stop:
                n = min(BLOCK, stop - at)
                if count + n > BLOCK:
                    out[0] += _sum(lanes, 0)
                    out[1] += _sum(lanes, 64)
                    clear(lanes, 128)
                    count = 0
                _add_products(g, x, plane + at, n, mean, lanes)
                count += n
                at += n
    out[0] += _sum(lanes, 0)
    out[1] += _sum(lanes, 64)


# ---- means and covariances of x, g and u


@jit
def _add_covariances(g, x, u, at, count, kx, kg, ku, lanes):
    """Add to 7 times 16 lanes: x, g, u, xx, gx, ux, ug, all measured from the shifts."""
    mx, mg, mu = every(kx, lanes), every(kg, lanes), every(ku, lanes)
    sx, sg, su, sxx = load(lanes, 0), load(lanes, 16), load(lanes, 32), load(lanes, 48)
    sgx, sux, sug = load(lanes, 64), load(lanes, 80), load(lanes, 96)
    for i in range(0, count, 16):
        left = count - i
        dx = _read(x, at + i, left, mx) - mx
        dg = _read(g, at + i, left, mg) - mg
        du = _read(u, at + i, left, mu) - mu
        sx, sg, su = sx + dx, sg + dg, su + du
        sxx, sgx, sux, sug = sxx + dx * dx, sgx + dg * dx, sux + du * dx, sug + du * dg
    store(lanes, 0, sx)
    store(lanes, 16, sg)
    store(lanes, 32, su)
    store(lanes, 48, sxx)
    store(lanes, 64, sgx)
    store(lanes, 80, sux)
    store(lanes, 96, sug)


@jit
def _merge_covariances(out, count, shifts, lanes):
    """Add a block's sums to `out`, empty the lanes, and move the three shifts to the means so far."""
    n = out[0]
    x, g, u = total(load(lanes, 0)), total(load(lanes, 16)), total(load(lanes, 32))
    before = 1 / n if n > 0 else 0.0
    weight = n * count / (n + count)
    dx = shifts[0] + x / count - out[1] * before
    dg = shifts[1] + g / count - out[2] * before
    du = shifts[2] + u / count - out[3] * before
    xx = total(load(lanes, 48)) - x * x / count
    out[4] += (0.0 if xx < 0 else xx) + dx * dx * weight
    out[5] += total(load(lanes, 64)) - g * x / count + dg * dx * weight
    out[6] += total(load(lanes, 80)) - u * x / count + du * dx * weight
    out[7] += total(load(lanes, 96)) - u * g / count + du * dg * weight
    out[0] = n + count
    out[1] += shifts[0] * count + x
    out[2] += shifts[1] * count + g
    out[3] += shifts[2] * count + u
    for i in range(3):
        mean = out[1 + i] / out[0]
        if math.isfinite(mean):
            shifts[i] = rounded(mean, lanes)
    clear(lanes, 128)


@jit
def covariances(g, x, u, spans, first, last, channels, depth, channel, start, stop, lanes, shifts, out):
    """The number of elements, the sums of x, g and u, and the sums of centred products xx, gx, ux and ug, in `out`."""
    for i in range(8):
        out[i] = 0.0
    clear(lanes, 128)
    at = (spans[2 * first] * channels + channel) * depth + start
    shifts[0] = _first_shift(x, at, stop - start, lanes)
    shifts[1] = _first_shift(g, at, stop - start, lanes)
    shifts[2] = _first_shift(u, at, stop - start, lanes)
    count = 0
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1]):
            plane = (row * channels + channel) * depth
            at = start
            while at < stop:
                n = min(BLOCK // 4, stop - at)
                if count + n > BLOCK // 4:
                    _merge_covariances(out, count, shifts, lanes)
                    count = 0
                _add_covariances(g, x, u, plane + at, n, shifts[0], shifts[1], shifts[2], lanes)
                count += n
                at += n
    _merge_covariances(out, count, shifts, lanes)


# ---- results; `c` points to the channel's first coefficient, the others are `pitch` apart


@jit
def _spread(c, at):
    return every(float(c[at]), c)


@jit
def affine(x, y, spans, first, last, channels, depth, channel, start, stop, pitch, c):
    """y = (x - c0) c1 + c2."""
    m, f, t = _spread(c, 0), _spread(c, pitch), _spread(c, 2 * pitch)
    for s in range(last - 1, first - 1, -1):
        for row in range(spans[2 * s + 1] - 1, spans[2 * s] - 1, -1):
            plane = (row * channels + channel) * depth
            at, end = plane + start, plane + stop
            while at + 16 <= end:
                store(y, at, (load(x, at) - m) * f + t)
                at += 16
            if at < end:
                _write(y, at, end - at, (_read(x, at, end - at, m) - m) * f + t)


@jit
def combine(g, x, y, spans, first, last, channels, depth, channel, start, stop, pitch, c):
    """y = c1 (g - c4) + c2 (x - c0) + c3."""
    m, a, b, d = _spread(c, 0), _spread(c, pitch), _spread(c, 2 * pitch), _spread(c, 3 * pitch)
    k = _spread(c, 4 * pitch)
    for s in range(last - 1, first - 1, -1):
        for row in range(spans[2 * s + 1] - 1, spans[2 * s] - 1, -1):
            plane = (row * channels + channel) * depth
            at, end = plane + start, plane + stop
            while at + 16 <= end:
                store(y, at, a * (load(g, at) - k) + (b * (load(x, at) - m) + d))
                at += 16
            if at < end:
                left = end - at
                _write(y, at, left, a * (_read(g, at, left, k) - k) + (b * (_read(x, at, left, m) - m) + d))


@jit
def combine_second(g, x, u, yg, yx, spans, first, last, channels, depth, channel, start, stop, pitch, c):
    """yg = c1 (u - c8) + c2 (x - c0) + c3 and yx = c4 (x - c0) + c2 (g - c7) + c5 (u - c8) + c6."""
    m, a, b, d = _spread(c, 0), _spread(c, pitch), _spread(c, 2 * pitch), _spread(c, 3 * pitch)
    e, f, h = _spread(c, 4 * pitch), _spread(c, 5 * pitch), _spread(c, 6 * pitch)
    mg, mu = _spread(c, 7 * pitch), _spread(c, 8 * pitch)
    for s in range(last - 1, first - 1, -1):
        for row in range(spans[2 * s + 1] - 1, spans[2 * s] - 1, -1):
            plane = (row * channels + channel) * depth
            for at in range(plane + start, plane + stop, 16):
                left = plane + stop - at
                vx, vg, vu = _read(x, at, left, m) - m, _read(g, at, left, mg) - mg, _read(u, at, left, mu) - mu
                _write(yg, at, left, a * vu + (b * vx + d))
                _write(yx, at, left, e * vx + (b * vg + (f * vu + h)))
