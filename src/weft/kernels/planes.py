"""Batch norm's loops over channels-first data, in Numba.

The data is seen as rows of `channels` planes of `depth` contiguous elements. A call sees the elements `start : stop`
of one channel's plane in some ranges of rows, the pairs `first : last` of `spans`. Sums run in the computing dtype
over about `BLOCK` elements, in registers, and from there on in float64, in `out`. Arrays come as pointers.
"""

from __future__ import annotations

import math

from .rows import read, write
from .simd import every, jit, load, load_part, rounded, store_past, total, wide

BLOCK = 4096


@jit
def _number(x, at, like):
    """One element as float64."""
    return total(load_part(x, at, 1, every(0.0, like)))


@jit
def _sum(a, b, c, d):
    """What four vectors hold together, in float64."""
    return total((wide(a) + wide(b)) + (wide(c) + wide(d)))


@jit
def _first_shift(x, at, count, like):
    """About the mean of a stretch, from the distances of 256 of its elements to the first: exact where a channel is
    constant."""
    first = _number(x, at, like)
    k = every(first, like)
    a = every(0.0, like)
    n = min(count, BLOCK)
    step = max(16, n // 256 * 16)
    for i in range(0, n, step):
        a = a + (read(x, at + i, n - i, k) - k)
    mean = first + total(a) / min(n, 256)
    return rounded(mean, like) if math.isfinite(mean) else first


@jit
def _next_block(spans, s, row, at, start, stop, block):
    """What to sum next, from element `at` of row `row` of range `s` on: how many rows, and how many elements of each.

    That is the whole stretch of several rows, or a part of a long one.
    """
    if stop - start > block:
        return 1, min(block, stop - at)
    return min(block // (stop - start), spans[2 * s + 1] - row), stop - start


@jit
def _after(spans, s, last, row, at, rows, width, start, stop):
    """Where the block after this one begins."""
    at += width
    if at < stop:
        return s, row, at
    row += rows
    if row == spans[2 * s + 1]:
        s += 1
        row = spans[2 * s] if s < last else 0
    return s, row, start


# ---- mean and sum of squares


@jit
def _block_moments(x, at, rows, stride, width, shift, like):
    """The sums of a block's distances from the shift and of their squares."""
    k = every(shift, like)
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = every(0.0, like)
    for r in range(rows):
        i, stop = at + r * stride, at + r * stride + width
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
    return _sum(a0, a1, a2, a3), _sum(b0, b1, b2, b3)


@jit
def moments(x, spans, first, last, channels, depth, channel, start, stop, like, out):
    """The number of elements, their sum, and their sum of squared distances from the mean, in `out`."""
    out[0] = out[1] = out[2] = 0.0
    s, row, at = first, spans[2 * first], start
    shift = _first_shift(x, (row * channels + channel) * depth + at, stop - at, like)
    while s < last:
        rows, width = _next_block(spans, s, row, at, start, stop, BLOCK)
        where = (row * channels + channel) * depth + at
        a, b = _block_moments(x, where, rows, channels * depth, width, shift, like)
        shift = _merge_moments(out, float(rows * width), a, b, shift, like)
        s, row, at = _after(spans, s, last, row, at, rows, width, start, stop)


@jit
def _merge_moments(out, count, a, b, shift, like):
    """Add a block's moments to `out`, and return the mean so far: the next shift."""
    inner = b - a * a / count
    if inner < 0:
        inner = 0.0
    n, old = out[0], out[1]
    delta = (shift + a / count) - old / n if n > 0 else 0.0
    out[0] = n + count
    out[1] = old + (shift * count + a)
    out[2] += inner + delta * delta * (n * count / (n + count))
    mean = out[1] / out[0]
    return rounded(mean, like) if math.isfinite(mean) else shift


# ---- sums of g and of g (x - mean)


@jit
def _block_products(g, x, at, rows, stride, width, mean, like):
    k = every(mean, like)
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = every(0.0, like)
    for r in range(rows):
        i, stop = at + r * stride, at + r * stride + width
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
            v = load_part(g, i, stop - i, every(0.0, like))
            a2, b2 = a2 + v, b2 + v * (load_part(x, i, stop - i, k) - k)
    return _sum(a0, a1, a2, a3), _sum(b0, b1, b2, b3)


@jit
def products(g, x, spans, first, last, channels, depth, channel, start, stop, mean, like, out):
    """The sums of g and of g (x - mean), in `out`."""
    out[0] = out[1] = 0.0
    s, row, at = first, spans[2 * first], start
    while s < last:
        rows, width = _next_block(spans, s, row, at, start, stop, BLOCK)
        where = (row * channels + channel) * depth + at
        a, b = _block_products(g, x, where, rows, channels * depth, width, mean, like)
        out[0] += a
        out[1] += b
        s, row, at = _after(spans, s, last, row, at, rows, width, start, stop)


# ---- means and covariances of x, g and u


@jit
def _block_covariances(g, x, u, at, rows, stride, width, shifts, sums, like):
    """Seven sums of a block: x, g, u, xx, gx, ux, ug, all measured from the shifts."""
    mx, mg, mu = every(shifts[0], like), every(shifts[1], like), every(shifts[2], like)
    sx = sg = su = sxx = sgx = sux = sug = every(0.0, like)
    for r in range(rows):
        for i in range(0, width, 16):
            here, left = at + r * stride + i, width - i
            dx = read(x, here, left, mx) - mx
            dg = read(g, here, left, mg) - mg
            du = read(u, here, left, mu) - mu
            sx, sg, su = sx + dx, sg + dg, su + du
            sxx, sgx, sux, sug = sxx + dx * dx, sgx + dg * dx, sux + du * dx, sug + du * dg
    sums[0], sums[1], sums[2], sums[3] = total(sx), total(sg), total(su), total(sxx)
    sums[4], sums[5], sums[6] = total(sgx), total(sux), total(sug)


@jit
def _merge_covariances(out, count, shifts, sums, like):
    """Add a block's sums to `out`, and move the three shifts to the means so far."""
    n = out[0]
    x, g, u = sums[0], sums[1], sums[2]
    before = 1 / n if n > 0 else 0.0
    weight = n * count / (n + count)
    dx = shifts[0] + x / count - out[1] * before
    dg = shifts[1] + g / count - out[2] * before
    du = shifts[2] + u / count - out[3] * before
    xx = sums[3] - x * x / count
    out[4] += (0.0 if xx < 0 else xx) + dx * dx * weight
    out[5] += sums[4] - g * x / count + dg * dx * weight
    out[6] += sums[5] - u * x / count + du * dx * weight
    out[7] += sums[6] - u * g / count + du * dg * weight
    out[0] = n + count
    for i in range(3):
        out[1 + i] += shifts[i] * count + sums[i]
        mean = out[1 + i] / out[0]
        if math.isfinite(mean):
            shifts[i] = rounded(mean, like)


@jit
def covariances(g, x, u, spans, first, last, channels, depth, channel, start, stop, like, shifts, sums, out):
    """The number of elements, the sums of x, g and u, and the sums of centred products xx, gx, ux and ug, in `out`."""
    for i in range(8):
        out[i] = 0.0
    s, row, at = first, spans[2 * first], start
    where = (row * channels + channel) * depth + at
    shifts[0] = _first_shift(x, where, stop - at, like)
    shifts[1] = _first_shift(g, where, stop - at, like)
    shifts[2] = _first_shift(u, where, stop - at, like)
    while s < last:
        rows, width = _next_block(spans, s, row, at, start, stop, BLOCK // 4)
        where = (row * channels + channel) * depth + at
        _block_covariances(g, x, u, where, rows, channels * depth, width, shifts, sums, like)
        _merge_covariances(out, float(rows * width), shifts, sums, like)
        s, row, at = _after(spans, s, last, row, at, rows, width, start, stop)


# ---- results; `c` points to the channel's first coefficient, the others are `pitch` apart


@jit
def _spread(c, at):
    return every(float(c[at]), c)


@jit
def affine(x, y, spans, first, last, channels, depth, channel, start, stop, pitch, c, past):
    """y = (x - c0) c1 + c2."""
    m, f, t = _spread(c, 0), _spread(c, pitch), _spread(c, 2 * pitch)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1]):
            plane = (row * channels + channel) * depth
            at, end = plane + start, plane + stop
            while at + 64 <= end:
                y0, y1 = (load(x, at) - m) * f + t, (load(x, at + 16) - m) * f + t
                y2, y3 = (load(x, at + 32) - m) * f + t, (load(x, at + 48) - m) * f + t
                store_past(y, at, y0, past)
                store_past(y, at + 16, y1, past)
                store_past(y, at + 32, y2, past)
                store_past(y, at + 48, y3, past)
                at += 64
            while at < end:
                write(y, at, end - at, (read(x, at, end - at, m) - m) * f + t)
                at += 16


@jit
def combine(g, x, y, spans, first, last, channels, depth, channel, start, stop, pitch, c, past):
    """y = c1 (g - c4) + c2 (x - c0) + c3."""
    m, a, b, d = _spread(c, 0), _spread(c, pitch), _spread(c, 2 * pitch), _spread(c, 3 * pitch)
    k = _spread(c, 4 * pitch)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1]):
            plane = (row * channels + channel) * depth
            at, end = plane + start, plane + stop
            while at + 64 <= end:
                y0 = a * (load(g, at) - k) + (b * (load(x, at) - m) + d)
                y1 = a * (load(g, at + 16) - k) + (b * (load(x, at + 16) - m) + d)
                y2 = a * (load(g, at + 32) - k) + (b * (load(x, at + 32) - m) + d)
                y3 = a * (load(g, at + 48) - k) + (b * (load(x, at + 48) - m) + d)
                store_past(y, at, y0, past)
                store_past(y, at + 16, y1, past)
                store_past(y, at + 32, y2, past)
                store_past(y, at + 48, y3, past)
                at += 64
            while at < end:
                left = end - at
                write(y, at, left, a * (read(g, at, left, k) - k) + (b * (read(x, at, left, m) - m) + d))
                at += 16


@jit
def combine_second(g, x, u, yg, yx, spans, first, last, channels, depth, channel, start, stop, pitch, c):
    """yg = c1 (u - c8) + c2 (x - c0) + c3 and yx = c4 (x - c0) + c2 (g - c7) + c5 (u - c8) + c6."""
    m, a, b, d = _spread(c, 0), _spread(c, pitch), _spread(c, 2 * pitch), _spread(c, 3 * pitch)
    e, f, h = _spread(c, 4 * pitch), _spread(c, 5 * pitch), _spread(c, 6 * pitch)
    mg, mu = _spread(c, 7 * pitch), _spread(c, 8 * pitch)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1]):
            plane = (row * channels + channel) * depth
            for at in range(plane + start, plane + stop, 16):
                left = plane + stop - at
                vx, vg, vu = read(x, at, left, m) - m, read(g, at, left, mg) - mg, read(u, at, left, mu) - mu
                write(yg, at, left, a * vu + (b * vx + d))
                write(yx, at, left, e * vx + (b * vg + (f * vu + h)))
