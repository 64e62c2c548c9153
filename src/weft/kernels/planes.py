"""Batch norm's loops over channels-first data, in Numba.

The data is seen as rows of `channels` planes of `depth` contiguous elements. A call sees the elements `start : stop`
of the planes of the channels `begin : end` in some ranges of rows, the pairs `first : last` of `spans`. It takes them
in the order of memory: the planes of one row lie side by side. Each channel's sums run in the computing dtype over a
block of about `BLOCK` elements, and from block to block in float64. Arrays come as pointers.
"""

from __future__ import annotations

import math

from .rows import COARSE, put, read, write
from .simd import advance, every, first_of, jit, load, load_part, rounded, store, total

BLOCK = 4096


@jit
def _block_rows(start, stop):
    """How many rows a block has: several of short planes, and of long ones a part of one."""
    return max(1, BLOCK // (stop - start))


@jit
def _sampled_shift(x, at, width, count, like):
    """About the mean of a stretch, from the distances of `count` vectors of its elements to the first: exact where a
    channel is constant, and rounded as in rows.py."""
    first = first_of(read(x, at, width, every(0.0, like)))
    if width < 16:
        return first
    k, a, b, n = every(first, like), every(0.0, like), every(0.0, like), 0
    for i in range(0, width - 15, max(16, width // count)):
        d = load(x, at + i) - k
        a, b = a + d, b + d * d
        n += 16
    coarse = rounded(COARSE * math.sqrt(total(b) / n), like)
    shift = rounded(first + total(a) / n + coarse, like) - coarse
    return shift if math.isfinite(shift) else first


# ---- mean and sum of squares


@jit
def _add_moments(x, at, width, shift, like, s1, s2):
    """Add the distances of a plane's elements from the shift, and their squares, to 16 sums of each."""
    k, stop = every(shift, like), at + width
    a0, b0 = load(s1, 0), load(s2, 0)
    a1 = a2 = a3 = b1 = b2 = b3 = every(0.0, like)
    while at + 64 <= stop:
        d0, d1, d2, d3 = load(x, at) - k, load(x, at + 16) - k, load(x, at + 32) - k, load(x, at + 48) - k
        a0, a1, a2, a3 = a0 + d0, a1 + d1, a2 + d2, a3 + d3
        b0, b1, b2, b3 = b0 + d0 * d0, b1 + d1 * d1, b2 + d2 * d2, b3 + d3 * d3
        at += 64
    while at + 16 <= stop:
        d = load(x, at) - k
        a1, a2, a3, b1, b2, b3 = a2, a3, a1 + d, b2, b3, b1 + d * d
        at += 16
    if at < stop:
        d = load_part(x, at, stop - at, k) - k
        a1, b1 = a1 + d, b1 + d * d
    store(s1, 0, (a0 + a1) + (a2 + a3))
    store(s2, 0, (b0 + b1) + (b2 + b3))


@jit
def _moments_block(x, at, rows, stride, tile, depth, width, like, shifts, s1, s2, sums, squares):
    for i in range(0, 16 * tile, 16):
        store(s1, i, every(0.0, like))
        store(s2, i, every(0.0, like))
    for r in range(rows):
        for i in range(tile):
            here = at + r * stride + i * depth
            _add_moments(x, here, width, float(shifts[i]), like, advance(s1, 16 * i), advance(s2, 16 * i))
    for i in range(tile):
        sums[i] += total(load(s1, 16 * i))
        squares[i] += total(load(s2, 16 * i))


@jit
def _sum_moments(x, spans, first, last, channels, depth, begin, end, start, stop, like, shifts, s1, s2, sums, squares):
    """The sums of each channel's distances from its shift, and of their squares; returns the number of elements."""
    n, stride, tile = 0, channels * depth, end - begin
    for i in range(tile):
        sums[i] = squares[i] = 0.0
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], _block_rows(start, stop)):
            rows = min(_block_rows(start, stop), spans[2 * s + 1] - row)
            for part in range(start, stop, BLOCK):
                at, width = row * stride + begin * depth + part, min(BLOCK, stop - part)
                _moments_block(x, at, rows, stride, tile, depth, width, like, shifts, s1, s2, sums, squares)
                n += rows * width
    return float(n)


@jit
def moments(x, spans, first, last, channels, depth, begin, end, start, stop, like, shifts, s1, s2, sums, squares):
    """Each channel's sum, and its sum of squared distances from the mean."""
    row = spans[2 * first] * channels
    for i in range(end - begin):
        shifts[i] = _sampled_shift(x, (row + begin + i) * depth + start, stop - start, 4, like)
    n = _sum_moments(
        x, spans, first, last, channels, depth, begin, end, start, stop, like, shifts, s1, s2, sums, squares
    )
    for i in range(end - begin):
        a, b = sums[i], squares[i]
        if not a * a / n <= 4 * (b - a * a / n):
            # The shift was more than two standard deviations away from the mean: once more, from there.
            mean = shifts[i] + a / n
            shifts[i] = mean if math.isfinite(mean) else 0.0
            _sum_moments(
                x, spans, first, last, channels, depth, begin + i, begin + i + 1, start, stop, like,
                advance(shifts, i), s1, s2, advance(sums, i), advance(squares, i),
            )  # fmt: skip
            a, b = sums[i], squares[i]
        sums[i] = n * shifts[i] + a
        squares[i] = b - a * a / n if not b < a * a / n else 0.0


# ---- sums of g and of g (x - mean)


@jit
def _add_products(g, x, at, width, mean, like, s1, s2):
    k, stop = every(mean, like), at + width
    a0, b0 = load(s1, 0), load(s2, 0)
    a1 = a2 = a3 = b1 = b2 = b3 = every(0.0, like)
    while at + 64 <= stop:
        g0, g1, g2, g3 = load(g, at), load(g, at + 16), load(g, at + 32), load(g, at + 48)
        a0, a1, a2, a3 = a0 + g0, a1 + g1, a2 + g2, a3 + g3
        b0, b1 = b0 + g0 * (load(x, at) - k), b1 + g1 * (load(x, at + 16) - k)
        b2, b3 = b2 + g2 * (load(x, at + 32) - k), b3 + g3 * (load(x, at + 48) - k)
        at += 64
    while at + 16 <= stop:
        v = load(g, at)
        a1, a2, a3, b1, b2, b3 = a2, a3, a1 + v, b2, b3, b1 + v * (load(x, at) - k)
        at += 16
    if at < stop:
        v = load_part(g, at, stop - at, every(0.0, like))
        a1, b1 = a1 + v, b1 + v * (load_part(x, at, stop - at, k) - k)
    store(s1, 0, (a0 + a1) + (a2 + a3))
    store(s2, 0, (b0 + b1) + (b2 + b3))


@jit
def _products_block(g, x, at, rows, stride, tile, depth, width, mean, s1, s2, sum_g, sum_gx):
    for i in range(0, 16 * tile, 16):
        store(s1, i, every(0.0, mean))
        store(s2, i, every(0.0, mean))
    for r in range(rows):
        for i in range(tile):
            here = at + r * stride + i * depth
            _add_products(g, x, here, width, float(mean[i]), mean, advance(s1, 16 * i), advance(s2, 16 * i))
    for i in range(tile):
        sum_g[i] += total(load(s1, 16 * i))
        sum_gx[i] += total(load(s2, 16 * i))


@jit
def products(g, x, spans, first, last, channels, depth, begin, end, start, stop, mean, s1, s2, sum_g, sum_gx):
    """Each channel's sums of g and of g (x - mean)."""
    stride, tile = channels * depth, end - begin
    for i in range(tile):
        sum_g[i] = sum_gx[i] = 0.0
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], _block_rows(start, stop)):
            rows = min(_block_rows(start, stop), spans[2 * s + 1] - row)
            for part in range(start, stop, BLOCK):
                at, width = row * stride + begin * depth + part, min(BLOCK, stop - part)
                _products_block(g, x, at, rows, stride, tile, depth, width, mean, s1, s2, sum_g, sum_gx)


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
    """One channel's number of elements, the sums of x, g and u, and the sums of centred products xx, gx, ux and ug, in
    `out`."""
    for i in range(8):
        out[i] = 0.0
    many, block = max(1, BLOCK // 4 // (stop - start)), BLOCK // 4
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], many):
            rows = min(many, spans[2 * s + 1] - row)
            for part in range(start, stop, block):
                at, width = (row * channels + channel) * depth + part, min(block, stop - part)
                if out[0] == 0:
                    shifts[0] = _sampled_shift(x, at, width, 16, like)
                    shifts[1] = _sampled_shift(g, at, width, 16, like)
                    shifts[2] = _sampled_shift(u, at, width, 16, like)
                _block_covariances(g, x, u, at, rows, channels * depth, width, shifts, sums, like)
                _merge_covariances(out, float(rows * width), shifts, sums, like)


# ---- results, last row first: it was read last and is still in a cache. `c` points to the coefficients of the channel
# `begin`, the others are `pitch` apart


@jit
def _spread(c, at):
    return every(float(c[at]), c)


@jit
def _affine_plane(x, y, at, end, c, pitch, past):
    m, f, t = _spread(c, 0), _spread(c, pitch), _spread(c, 2 * pitch)
    while at + 16 <= end:
        put(y, at, 16, (load(x, at) - m) * f + t, past)
        at += 16
    if at < end:
        put(y, at, end - at, (load_part(x, at, end - at, m) - m) * f + t, past)


@jit
def affine(x, y, spans, first, last, channels, depth, begin, end, start, stop, pitch, c, past):
    """y = (x - c0) c1 + c2."""
    for s in range(first, last):
        for row in range(spans[2 * s + 1] - 1, spans[2 * s] - 1, -1):
            for i in range(begin, end):
                plane = (row * channels + i) * depth
                _affine_plane(x, y, plane + start, plane + stop, advance(c, i - begin), pitch, past)


@jit
def _combine_plane(g, x, y, at, end, c, pitch, past):
    m, a, b, d = _spread(c, 0), _spread(c, pitch), _spread(c, 2 * pitch), _spread(c, 3 * pitch)
    k = _spread(c, 4 * pitch)
    while at + 16 <= end:
        put(y, at, 16, a * (load(g, at) - k) + (b * (load(x, at) - m) + d), past)
        at += 16
    if at < end:
        left = end - at
        put(y, at, left, a * (load_part(g, at, left, k) - k) + (b * (load_part(x, at, left, m) - m) + d), past)


@jit
def combine(g, x, y, spans, first, last, channels, depth, begin, end, start, stop, pitch, c, past):
    """y = c1 (g - c4) + c2 (x - c0) + c3."""
    for s in range(first, last):
        for row in range(spans[2 * s + 1] - 1, spans[2 * s] - 1, -1):
            for i in range(begin, end):
                plane = (row * channels + i) * depth
                _combine_plane(g, x, y, plane + start, plane + stop, advance(c, i - begin), pitch, past)


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
