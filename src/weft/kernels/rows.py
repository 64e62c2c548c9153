"""Batch norm's loops over channels-last data, in Numba.

The data is seen as rows of `stride` lanes, of which the first `width` are there. A call sees some ranges of rows, the
pairs `first : last` of `spans`. Sums run in the computing dtype over a block of rows, and from block to block in
float64, lane by lane. Arrays come as pointers; per-lane arrays are long enough to be read in whole vectors.

Memory is read and written in order, a row after the other, as the hardware's prefetching expects it: columns of lanes
over some rows, whose sums or coefficients would stay in registers, take up to three times as long where the data is
not in a core's own cache. To load and store sums and coefficients less often, several rows are taken at once, each
from another part of the block.
"""

from __future__ import annotations

from .simd import (
    advance,
    at_least_zero,
    every,
    finite_or,
    jit,
    load,
    load_part,
    narrow,
    root,
    store,
    store_part,
    store_past,
    total,
    wide,
)

BLOCK = 128
COARSE = 4096.0


@jit
def clear(sums, width):
    for i in range(0, width, 16):
        store(sums, i, every(0.0, sums))


@jit
def _add(sums, i, value):
    store(sums, i, load(sums, i) + wide(value))


@jit
def _add_up(width, s1, s2, sums, others):
    """Add a block's two sums to those of the blocks before it."""
    for i in range(0, width, 16):
        _add(sums, i, load(s1, i))
        _add(others, i, load(s2, i))


@jit
def read(x, at, left, rest):
    """16 lanes of `x`, of which only `left` are there; `rest` for the others."""
    if left >= 16:
        return load(x, at)
    return load_part(x, at, left, rest)


@jit
def write(y, at, left, value):
    if left >= 16:
        store(y, at, value)
    else:
        store_part(y, at, value, left)


@jit
def put(y, at, left, value, past):
    """As `write`, past the caches where `past` is not 0."""
    if left >= 16:
        store_past(y, at, value, past)
    else:
        store_part(y, at, value, left)


@jit
def _groups(rows, stride, size):
    """How to take `size` rows at once: how often, how far the first rows are apart, and how far those of a group.

    Short rows are taken as they come, long ones from `size` parts of the block. The parts have an odd number of rows:
    a multiple of 4 KB apart, they would be in each other's way in the first cache.
    """
    count = rows // size
    if stride <= 64:
        return count, size * stride, stride
    if count > 16 and count % 2 == 0:
        count -= 1
    return count, stride, count * stride


# ---- mean and sum of squares


@jit
def _sampled_shift(x, at, rows, stride, width, shift, to):
    """About the mean of some rows, from the distances of 16 of them to the first: exact where a channel is constant.

    It is rounded to some thousandth of the standard deviation. Finer digits would be lost in most differences from it,
    always in the same way.
    """
    step = max(1, rows // 16)
    share, coarse = every(1.0 / -(-rows // step), shift), every(COARSE, shift)
    for i in range(0, width, 16):
        k = read(x, at + i, width - i, every(0.0, shift))
        a = b = every(0.0, shift)
        for r in range(step, rows, step):
            d = read(x, at + i + r * stride, width - i, k) - k
            a, b = a + d, b + d * d
        spread = coarse * root(b * share)
        store(shift, to + i, finite_or((k + a * share + spread) - spread, k))


@jit
def _moments_four(x, at, step, i, left, shift, s1, s2):
    k, at = load(shift, i), at + i
    d0, d1 = read(x, at, left, k) - k, read(x, at + step, left, k) - k
    d2, d3 = read(x, at + 2 * step, left, k) - k, read(x, at + 3 * step, left, k) - k
    store(s1, i, load(s1, i) + ((d0 + d1) + (d2 + d3)))
    store(s2, i, load(s2, i) + ((d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)))


@jit
def _moments_one(x, at, i, left, shift, s1, s2):
    k = load(shift, i)
    d = read(x, at + i, left, k) - k
    store(s1, i, load(s1, i) + d)
    store(s2, i, load(s2, i) + d * d)


@jit
def _moments_block(x, at, rows, stride, width, shift, s1, s2):
    clear(s1, width)
    clear(s2, width)
    whole = width // 16 * 16
    groups, hop, step = _groups(rows, stride, 4)
    for r in range(groups):
        here = at + r * hop
        for i in range(0, whole, 16):
            _moments_four(x, here, step, i, 16, shift, s1, s2)
        if whole < width:
            _moments_four(x, here, step, whole, width - whole, shift, s1, s2)
    for r in range(4 * groups, rows):
        for i in range(0, width, 16):
            _moments_one(x, at + r * stride, i, width - i, shift, s1, s2)


@jit
def _sum_moments(x, offset, spans, first, last, stride, width, shift, s1, s2, sums, squares):
    """The sums of `width` lanes' distances from their shifts, and of their squares."""
    clear(sums, width)
    clear(squares, width)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], BLOCK):
            rows = min(BLOCK, spans[2 * s + 1] - row)
            _moments_block(x, offset + row * stride, rows, stride, width, shift, s1, s2)
            _add_up(width, s1, s2, sums, squares)


@jit
def moments(x, spans, first, last, stride, width, shift, s1, s2, sums, squares):
    """Each lane's sum, and its sum of squared distances from its mean; returns the number of rows."""
    n = 0.0
    for s in range(first, last):
        n += spans[2 * s + 1] - spans[2 * s]
    _sampled_shift(x, spans[2 * first] * stride, spans[2 * first + 1] - spans[2 * first], stride, width, shift, 0)
    _sum_moments(x, 0, spans, first, last, stride, width, shift, s1, s2, sums, squares)
    count, share, four = every(n, sums), every(1 / n, sums), every(4.0, sums)
    for i in range(0, width, 16):
        a, b, k = load(sums, i), load(squares, i), load(shift, i)
        between = a * a * share
        if not total(at_least_zero(between - four * (b - between))) <= 0:
            # A shift was more than two standard deviations away from the mean: once more, from there.
            k = finite_or(narrow(wide(k) + a * share, shift), every(0.0, shift))
            store(shift, i, k)
            _sum_moments(
                x, i, spans, first, last, stride, min(16, width - i),
                advance(shift, i), s1, s2, advance(sums, i), advance(squares, i),
            )  # fmt: skip
            a, b = load(sums, i), load(squares, i)
        store(sums, i, count * wide(k) + a)
        store(squares, i, at_least_zero(b - a * a * share))
    return n


# ---- sums of g and of g (x - mean)


@jit
def _products_four(g, x, at, step, i, left, mean, s1, s2):
    k, zeros, at = load(mean, i), every(0.0, mean), at + i
    g0, g1 = read(g, at, left, zeros), read(g, at + step, left, zeros)
    g2, g3 = read(g, at + 2 * step, left, zeros), read(g, at + 3 * step, left, zeros)
    d0, d1 = read(x, at, left, k) - k, read(x, at + step, left, k) - k
    d2, d3 = read(x, at + 2 * step, left, k) - k, read(x, at + 3 * step, left, k) - k
    store(s1, i, load(s1, i) + ((g0 + g1) + (g2 + g3)))
    store(s2, i, load(s2, i) + ((g0 * d0 + g1 * d1) + (g2 * d2 + g3 * d3)))


@jit
def _products_one(g, x, at, i, left, mean, s1, s2):
    k = load(mean, i)
    v = read(g, at + i, left, every(0.0, mean))
    store(s1, i, load(s1, i) + v)
    store(s2, i, load(s2, i) + v * (read(x, at + i, left, k) - k))


@jit
def _products_64(g, x, at, rows, mean, s1, s2):
    """The sums of rows of 64 lanes, which stay in registers. Two arrays of short rows, taken four at once, are no
    longer read in order."""
    k0, k1, k2, k3 = load(mean, 0), load(mean, 16), load(mean, 32), load(mean, 48)
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = every(0.0, mean)
    for i in range(at, at + 64 * rows, 64):
        g0, g1, g2, g3 = load(g, i), load(g, i + 16), load(g, i + 32), load(g, i + 48)
        a0, a1, a2, a3 = a0 + g0, a1 + g1, a2 + g2, a3 + g3
        b0, b1 = b0 + g0 * (load(x, i) - k0), b1 + g1 * (load(x, i + 16) - k1)
        b2, b3 = b2 + g2 * (load(x, i + 32) - k2), b3 + g3 * (load(x, i + 48) - k3)
    store(s1, 0, a0)
    store(s1, 16, a1)
    store(s1, 32, a2)
    store(s1, 48, a3)
    store(s2, 0, b0)
    store(s2, 16, b1)
    store(s2, 32, b2)
    store(s2, 48, b3)


@jit
def _products_block(g, x, at, rows, stride, width, mean, s1, s2):
    if stride == 64 and width == 64:
        _products_64(g, x, at, rows, mean, s1, s2)
        return
    clear(s1, width)
    clear(s2, width)
    whole = width // 16 * 16
    groups, hop, step = _groups(rows, stride, 4)
    for r in range(groups):
        here = at + r * hop
        for i in range(0, whole, 16):
            _products_four(g, x, here, step, i, 16, mean, s1, s2)
        if whole < width:
            _products_four(g, x, here, step, whole, width - whole, mean, s1, s2)
    for r in range(4 * groups, rows):
        for i in range(0, width, 16):
            _products_one(g, x, at + r * stride, i, width - i, mean, s1, s2)


@jit
def products(g, x, spans, first, last, stride, width, mean, s1, s2, sum_g, sum_gx):
    """Each lane's sums of g and of g (x - mean)."""
    clear(sum_g, width)
    clear(sum_gx, width)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], BLOCK):
            rows = min(BLOCK, spans[2 * s + 1] - row)
            _products_block(g, x, row * stride, rows, stride, width, mean, s1, s2)
            _add_up(width, s1, s2, sum_g, sum_gx)


# ---- means and covariances of x, g and u


@jit
def _covariances_one(g, x, u, at, rows, stride, i, left, pitch, shift, sums):
    """Seven sums of one vector of lanes of a block: x, g, u, xx, gx, ux, ug, all measured from the shifts."""
    kx, kg, ku = load(shift, i), load(shift, pitch + i), load(shift, 2 * pitch + i)
    sx = sg = su = sxx = sgx = sux = sug = every(0.0, shift)
    for r in range(rows):
        here = at + i + r * stride
        dx = read(x, here, left, kx) - kx
        dg = read(g, here, left, kg) - kg
        du = read(u, here, left, ku) - ku
        sx, sg, su = sx + dx, sg + dg, su + du
        sxx, sgx, sux, sug = sxx + dx * dx, sgx + dg * dx, sux + du * dx, sug + du * dg
    store(sums, i, sx)
    store(sums, pitch + i, sg)
    store(sums, 2 * pitch + i, su)
    store(sums, 3 * pitch + i, sxx)
    store(sums, 4 * pitch + i, sgx)
    store(sums, 5 * pitch + i, sux)
    store(sums, 6 * pitch + i, sug)


@jit
def _merge_covariances(n, rows, width, pitch, shift, sums, totals):
    """Add a block's sums to those of the `n` rows before it, and move the shifts to the means of both.

    The shifts are the means of all that came before, so what is lost in xx - x^2 / rows is small against the sum so
    far.
    """
    b, share = every(float(rows), totals), every(1.0 / rows, totals)
    before = every(1.0 / n if n else 0.0, totals)
    weight, now = every(n * rows / (n + rows), totals), every(1.0 / (n + rows), totals)
    for i in range(0, width, 16):
        x, g, u = wide(load(sums, i)), wide(load(sums, pitch + i)), wide(load(sums, 2 * pitch + i))
        kx, kg, ku = load(shift, i), load(shift, pitch + i), load(shift, 2 * pitch + i)
        tx, tg, tu = load(totals, i), load(totals, pitch + i), load(totals, 2 * pitch + i)
        dx = wide(kx) + x * share - tx * before
        dg = wide(kg) + g * share - tg * before
        du = wide(ku) + u * share - tu * before
        xx = at_least_zero(wide(load(sums, 3 * pitch + i)) - x * x * share)
        _add(totals, 3 * pitch + i, xx + dx * dx * weight)
        _add(totals, 4 * pitch + i, wide(load(sums, 4 * pitch + i)) - g * x * share + dg * dx * weight)
        _add(totals, 5 * pitch + i, wide(load(sums, 5 * pitch + i)) - u * x * share + du * dx * weight)
        _add(totals, 6 * pitch + i, wide(load(sums, 6 * pitch + i)) - u * g * share + du * dg * weight)
        tx, tg, tu = tx + (b * wide(kx) + x), tg + (b * wide(kg) + g), tu + (b * wide(ku) + u)
        store(totals, i, tx)
        store(totals, pitch + i, tg)
        store(totals, 2 * pitch + i, tu)
        store(shift, i, finite_or(narrow(tx * now, shift), kx))
        store(shift, pitch + i, finite_or(narrow(tg * now, shift), kg))
        store(shift, 2 * pitch + i, finite_or(narrow(tu * now, shift), ku))


@jit
def covariances(g, x, u, spans, first, last, stride, width, pitch, shift, sums, totals):
    """Each lane's sums of x, g and u and its sums of centred products xx, gx, ux and ug, `pitch` apart; returns the
    rows."""
    n = 0.0
    clear(totals, 7 * pitch)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], BLOCK):
            rows = min(BLOCK, spans[2 * s + 1] - row)
            at = row * stride
            if n == 0:
                _sampled_shift(x, at, rows, stride, width, shift, 0)
                _sampled_shift(g, at, rows, stride, width, shift, pitch)
                _sampled_shift(u, at, rows, stride, width, shift, 2 * pitch)
            for i in range(0, width, 16):
                _covariances_one(g, x, u, at, rows, stride, i, width - i, pitch, shift, sums)
            _merge_covariances(n, rows, width, pitch, shift, sums, totals)
            n += rows
    return n


# ---- results


@jit
def _affine_two(x, y, at, step, i, left, pitch, c, past):
    m, f, t, at = load(c, i), load(c, pitch + i), load(c, 2 * pitch + i), at + i
    put(y, at, left, (read(x, at, left, m) - m) * f + t, past)
    at += step
    put(y, at, left, (read(x, at, left, m) - m) * f + t, past)


@jit
def _affine_one(x, y, at, i, left, pitch, c, past):
    m, f, t, at = load(c, i), load(c, pitch + i), load(c, 2 * pitch + i), at + i
    put(y, at, left, (read(x, at, left, m) - m) * f + t, past)


@jit
def affine(x, y, spans, first, last, stride, width, pitch, c, past):
    """y = (x - c0) c1 + c2, with the rows of coefficients `pitch` apart."""
    whole = width // 16 * 16
    for s in range(first, last):
        at, rows = spans[2 * s] * stride, spans[2 * s + 1] - spans[2 * s]
        groups, hop, step = _groups(rows, stride, 2)
        for r in range(groups):
            here = at + r * hop
            for i in range(0, whole, 16):
                _affine_two(x, y, here, step, i, 16, pitch, c, past)
            if whole < width:
                _affine_two(x, y, here, step, whole, width - whole, pitch, c, past)
        for r in range(2 * groups, rows):
            for i in range(0, width, 16):
                _affine_one(x, y, at + r * stride, i, width - i, pitch, c, past)


@jit
def _combine_two(g, x, y, at, step, i, left, pitch, c, past):
    m, a, b, d = load(c, i), load(c, pitch + i), load(c, 2 * pitch + i), load(c, 3 * pitch + i)
    k, at = load(c, 4 * pitch + i), at + i
    put(y, at, left, a * (read(g, at, left, k) - k) + (b * (read(x, at, left, m) - m) + d), past)
    at += step
    put(y, at, left, a * (read(g, at, left, k) - k) + (b * (read(x, at, left, m) - m) + d), past)


@jit
def _combine_one(g, x, y, at, i, left, pitch, c, past):
    m, a, b, d = load(c, i), load(c, pitch + i), load(c, 2 * pitch + i), load(c, 3 * pitch + i)
    k, at = load(c, 4 * pitch + i), at + i
    put(y, at, left, a * (read(g, at, left, k) - k) + (b * (read(x, at, left, m) - m) + d), past)


@jit
def combine(g, x, y, spans, first, last, stride, width, pitch, c, past):
    """y = c1 (g - c4) + c2 (x - c0) + c3."""
    whole = width // 16 * 16
    for s in range(first, last):
        at, rows = spans[2 * s] * stride, spans[2 * s + 1] - spans[2 * s]
        groups, hop, step = _groups(rows, stride, 2)
        for r in range(groups):
            here = at + r * hop
            for i in range(0, whole, 16):
                _combine_two(g, x, y, here, step, i, 16, pitch, c, past)
            if whole < width:
                _combine_two(g, x, y, here, step, whole, width - whole, pitch, c, past)
        for r in range(2 * groups, rows):
            for i in range(0, width, 16):
                _combine_one(g, x, y, at + r * stride, i, width - i, pitch, c, past)


@jit
def _combine_second_one(g, x, u, yg, yx, at, i, left, pitch, c):
    m, a, b, d = load(c, i), load(c, pitch + i), load(c, 2 * pitch + i), load(c, 3 * pitch + i)
    e, f, h = load(c, 4 * pitch + i), load(c, 5 * pitch + i), load(c, 6 * pitch + i)
    mg, mu, at = load(c, 7 * pitch + i), load(c, 8 * pitch + i), at + i
    vx, vg, vu = read(x, at, left, m) - m, read(g, at, left, mg) - mg, read(u, at, left, mu) - mu
    write(yg, at, left, a * vu + (b * vx + d))
    write(yx, at, left, e * vx + (b * vg + (f * vu + h)))


@jit
def combine_second(g, x, u, yg, yx, spans, first, last, stride, width, pitch, c):
    """yg = c1 (u - c8) + c2 (x - c0) + c3 and yx = c4 (x - c0) + c2 (g - c7) + c5 (u - c8) + c6."""
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1]):
            for i in range(0, width, 16):
                _combine_second_one(g, x, u, yg, yx, row * stride, i, width - i, pitch, c)
