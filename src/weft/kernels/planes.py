"""Batch norm's loops over channels-first data, in Numba.

The data is seen as rows of `channels` planes of `depth` contiguous elements. A call sees the elements `start : stop`
of the planes of the channels `begin : end`, or of a part of all planes, in some ranges of rows, the pairs `first :
last` of `spans`. It takes them in the order of memory: the planes of one row lie side by side. Each channel's sums run
in the computing dtype over a block of about `BLOCK` elements, and from block to block in float64. Arrays come as
pointers.
"""

from __future__ import annotations

import math

from numba.extending import overload

from .rows import COARSE, OPTIONS, put, read, terms, value, write
from .simd import advance, every, first_of, jit, load, rounded, store, total

BLOCK = 4096


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


# ---- sums


@jit
def _add_terms(data, at, width, shift, like, s1, s2):
    """Add the terms of a plane's elements to 16 sums of each."""
    k, stop = every(shift, like), at + width
    a = b = every(0.0, like)
    while at + 64 <= stop:
        c0, d = terms(data, at, 16, k, every(0.0, like))
        c1, d = terms(data, at + 16, 16, k, d)
        c2, d = terms(data, at + 32, 16, k, d)
        c3, d = terms(data, at + 48, 16, k, d)
        a, b = a + ((c0 + c1) + (c2 + c3)), b + d
        at += 64
    while at < stop:
        c, b = terms(data, at, stop - at, k, b)
        a = a + c
        at += 16
    store(s1, 0, load(s1, 0) + a)
    store(s2, 0, load(s2, 0) + b)


@jit
def _sum_block(data, at, rows, stride, tile, depth, width, shifts, s1, s2, sums, others):
    for i in range(0, 16 * tile, 16):
        store(s1, i, every(0.0, shifts))
        store(s2, i, every(0.0, shifts))
    for r in range(rows):
        for i in range(tile):
            here = at + r * stride + i * depth
            _add_terms(data, here, width, float(shifts[i]), shifts, advance(s1, 16 * i), advance(s2, 16 * i))
    for i in range(tile):
        sums[i] += total(load(s1, 16 * i))
        others[i] += total(load(s2, 16 * i))


@jit
def add_up(data, spans, first, last, channels, depth, begin, end, start, stop, shifts, s1, s2, sums, others):
    """Each channel's sums of both terms; returns the number of elements."""
    n, stride, tile = 0, channels * depth, end - begin
    many = max(1, BLOCK // (stop - start))  # rows of short planes; of a long one, a part
    for i in range(tile):
        sums[i] = others[i] = 0.0
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], many):
            rows = min(many, spans[2 * s + 1] - row)
            for part in range(start, stop, BLOCK):
                at, width = row * stride + begin * depth + part, min(BLOCK, stop - part)
                _sum_block(data, at, rows, stride, tile, depth, width, shifts, s1, s2, sums, others)
                n += rows * width
    return float(n)


@jit
def moments(data, spans, first, last, channels, depth, begin, end, start, stop, shifts, s1, s2, sums, squares):
    """Each channel's sum, and its sum of squared distances from the mean."""
    row = spans[2 * first] * channels
    for i in range(end - begin):
        shifts[i] = _sampled_shift(data[0], (row + begin + i) * depth + start, stop - start, 4, shifts)
    n = add_up(data, spans, first, last, channels, depth, begin, end, start, stop, shifts, s1, s2, sums, squares)
    for i in range(end - begin):
        a, b = sums[i], squares[i]
        if not a * a / n <= 4 * (b - a * a / n):
            # The shift was more than two standard deviations away from the mean: once more, from there.
            mean = shifts[i] + a / n
            shifts[i] = mean if math.isfinite(mean) else 0.0
            add_up(
                data, spans, first, last, channels, depth, begin + i, begin + i + 1, start, stop,
                advance(shifts, i), s1, s2, advance(sums, i), advance(squares, i),
            )  # fmt: skip
            a, b = sums[i], squares[i]
        sums[i] = n * shifts[i] + a
        squares[i] = b - a * a / n if not b < a * a / n else 0.0


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


# ---- results. `c` points to the channels' first coefficients, the others are `pitch` apart


@jit
def _spread(c, at):
    return every(float(c[at]), c)


def _spread_three(data, c, pitch):
    return _spread(c, 0), _spread(c, pitch), _spread(c, 2 * pitch)


def _spread_five(data, c, pitch):
    return _spread(c, 0), _spread(c, pitch), _spread(c, 2 * pitch), _spread(c, 3 * pitch), _spread(c, 4 * pitch)


def _coefficients(data, c, pitch):
    """As many coefficients as `value` takes."""
    raise NotImplementedError


@overload(_coefficients, jit_options=OPTIONS)
def _choose_coefficients(data, c, pitch):
    return (None, _spread_three, _spread_five)[len(data)]


@jit
def results(data, y, spans, first, last, channels, depth, part, parts, start, stop, pitch, c, past):
    """Each element's `value`, in one of some parts of the planes of all channels, which lie side by side."""
    whole = start + (stop - start) // 16 * 16
    for s in range(first, last):
        low, planes = spans[2 * s] * channels, (spans[2 * s + 1] - spans[2 * s]) * channels
        begin, end = planes * part // parts, planes * (part + 1) // parts
        channel = begin % channels
        for plane in range((low + begin) * depth, (low + end) * depth, depth):
            some = _coefficients(data, advance(c, channel), pitch)
            for at in range(plane + start, plane + whole, 16):
                put(y, at, 16, value(data, at, 16, some), past)
            if whole < stop:
                put(y, plane + whole, stop - whole, value(data, plane + whole, stop - whole, some), past)
            channel = channel + 1 if channel + 1 < channels else 0


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
