"""Batch norm's loops over channels-last data, in Numba.

The data is seen as rows of `stride` lanes, of which the first `width` are there. A call sees some ranges of rows, the
pairs `first : last` of `spans`. Sums run in the computing dtype over a block of rows, in registers, and from block to
block in float64, lane by lane. Arrays come as pointers; per-lane arrays are long enough to be read in whole vectors.
"""

from __future__ import annotations

from .simd import at_least_zero, every, finite_or, jit, load, load_part, narrow, store, store_part, store_past, wide

BLOCK = 128


@jit
def clear(sums, width):
    for i in range(0, width, 16):
        store(sums, i, every(0.0, sums))


@jit
def _add(sums, i, value):
    store(sums, i, load(sums, i) + wide(value))


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


# ---- mean and sum of squares


@jit
def _first_shift(x, at, rows, stride, width, shift, to):
    """About the mean of a block, from the distances of 16 of its rows to the first: exact where a channel is
    constant."""
    step = max(1, rows // 16)
    share = every(1.0 / (rows // step), shift)
    for i in range(0, width, 16):
        k = read(x, at + i, width - i, every(0.0, shift))
        a = every(0.0, shift)
        for r in range(step, rows, step):
            a = a + (read(x, at + i + r * stride, width - i, k) - k)
        store(shift, to + i, finite_or(k + a * share, k))


@jit
def _moments_four(x, at, rows, stride, i, shift, s1, s2):
    k0, k1, k2, k3 = load(shift, i), load(shift, i + 16), load(shift, i + 32), load(shift, i + 48)
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = every(0.0, shift)
    at += i
    for _ in range(rows):
        d0, d1, d2, d3 = load(x, at) - k0, load(x, at + 16) - k1, load(x, at + 32) - k2, load(x, at + 48) - k3
        a0, a1, a2, a3 = a0 + d0, a1 + d1, a2 + d2, a3 + d3
        b0, b1, b2, b3 = b0 + d0 * d0, b1 + d1 * d1, b2 + d2 * d2, b3 + d3 * d3
        at += stride
    store(s1, i, a0)
    store(s1, i + 16, a1)
    store(s1, i + 32, a2)
    store(s1, i + 48, a3)
    store(s2, i, b0)
    store(s2, i + 16, b1)
    store(s2, i + 32, b2)
    store(s2, i + 48, b3)


@jit
def _moments_one(x, at, rows, stride, i, left, shift, s1, s2):
    k = load(shift, i)
    a = b = every(0.0, shift)
    for r in range(rows):
        d = read(x, at + i + r * stride, left, k) - k
        a = a + d
        b = b + d * d
    store(s1, i, a)
    store(s2, i, b)


@jit
def _moments_block(x, at, rows, stride, width, shift, s1, s2):
    i = 0
    while i + 64 <= width:
        _moments_four(x, at, rows, stride, i, shift, s1, s2)
        i += 64
    while i < width:
        _moments_one(x, at, rows, stride, i, width - i, shift, s1, s2)
        i += 16


@jit
def _merge_moments(n, rows, width, shift, s1, s2, total, square):
    """Add a block's moments to those of the `n` rows before it, and move the shift to the mean of both.

    The shift is the mean of all that came before, so what is lost in s2 - s1^2 / rows is small against the sum of
    squares so far.
    """
    b, share = every(float(rows), total), every(1.0 / rows, total)
    before = every(1.0 / n if n else 0.0, total)
    weight, now = every(n * rows / (n + rows), total), every(1.0 / (n + rows), total)
    for i in range(0, width, 16):
        k = load(shift, i)
        a = wide(load(s1, i))
        inner = at_least_zero(wide(load(s2, i)) - a * a * share)
        old = load(total, i)
        delta = wide(k) + a * share - old * before
        sums = old + (b * wide(k) + a)
        store(square, i, load(square, i) + (inner + delta * delta * weight))
        store(total, i, sums)
        store(shift, i, finite_or(narrow(sums * now, shift), k))


@jit
def moments(x, spans, first, last, stride, width, shift, s1, s2, total, square):
    """Each lane's sum, and its sum of squared distances from its mean; returns the number of rows."""
    n = 0.0
    clear(total, width)
    clear(square, width)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], BLOCK):
            rows = min(BLOCK, spans[2 * s + 1] - row)
            at = row * stride
            if n == 0:
                _first_shift(x, at, rows, stride, width, shift, 0)
            _moments_block(x, at, rows, stride, width, shift, s1, s2)
            _merge_moments(n, rows, width, shift, s1, s2, total, square)
            n += rows
    return n


# ---- sums of g and of g (x - mean)


@jit
def _products_four(g, x, at, rows, stride, i, mean, sum_g, sum_gx):
    k0, k1, k2, k3 = load(mean, i), load(mean, i + 16), load(mean, i + 32), load(mean, i + 48)
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = every(0.0, mean)
    at += i
    for _ in range(rows):
        g0, g1, g2, g3 = load(g, at), load(g, at + 16), load(g, at + 32), load(g, at + 48)
        a0, a1, a2, a3 = a0 + g0, a1 + g1, a2 + g2, a3 + g3
        b0, b1 = b0 + g0 * (load(x, at) - k0), b1 + g1 * (load(x, at + 16) - k1)
        b2, b3 = b2 + g2 * (load(x, at + 32) - k2), b3 + g3 * (load(x, at + 48) - k3)
        at += stride
    _add(sum_g, i, a0)
    _add(sum_g, i + 16, a1)
    _add(sum_g, i + 32, a2)
    _add(sum_g, i + 48, a3)
    _add(sum_gx, i, b0)
    _add(sum_gx, i + 16, b1)
    _add(sum_gx, i + 32, b2)
    _add(sum_gx, i + 48, b3)


@jit
def _products_one(g, x, at, rows, stride, i, left, mean, sum_g, sum_gx):
    k = load(mean, i)
    a = b = every(0.0, mean)
    for r in range(rows):
        here = at + i + r * stride
        v = read(g, here, left, every(0.0, mean))
        a = a + v
        b = b + v * (read(x, here, left, k) - k)
    _add(sum_g, i, a)
    _add(sum_gx, i, b)


@jit
def products(g, x, spans, first, last, stride, width, mean, sum_g, sum_gx):
    """Each lane's sums of g and of g (x - mean)."""
    clear(sum_g, width)
    clear(sum_gx, width)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], BLOCK):
            rows = min(BLOCK, spans[2 * s + 1] - row)
            at, i = row * stride, 0
            while i + 64 <= width:
                _products_four(g, x, at, rows, stride, i, mean, sum_g, sum_gx)
                i += 64
            while i < width:
                _products_one(g, x, at, rows, stride, i, width - i, mean, sum_g, sum_gx)
                i += 16


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
    """As `_merge_moments`, for three means and four covariances."""
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
                _first_shift(x, at, rows, stride, width, shift, 0)
                _first_shift(g, at, rows, stride, width, shift, pitch)
                _first_shift(u, at, rows, stride, width, shift, 2 * pitch)
            for i in range(0, width, 16):
                _covariances_one(g, x, u, at, rows, stride, i, width - i, pitch, shift, sums)
            _merge_covariances(n, rows, width, pitch, shift, sums, totals)
            n += rows
    return n


# ---- results, in columns of lanes whose coefficients stay in registers. Memory is written in order, as nearly as
# that allows: columns of many rows took half as long again at 512 lanes.


@jit
def _block(width):
    """How many rows a column has."""
    return BLOCK if width <= 64 else 4


@jit
def _affine_four(x, y, at, rows, stride, i, pitch, c, past):
    m0, m1, m2, m3 = load(c, i), load(c, i + 16), load(c, i + 32), load(c, i + 48)
    j = pitch + i
    f0, f1, f2, f3 = load(c, j), load(c, j + 16), load(c, j + 32), load(c, j + 48)
    j += pitch
    t0, t1, t2, t3 = load(c, j), load(c, j + 16), load(c, j + 32), load(c, j + 48)
    at += i
    for _ in range(rows):
        y0, y1 = (load(x, at) - m0) * f0 + t0, (load(x, at + 16) - m1) * f1 + t1
        y2, y3 = (load(x, at + 32) - m2) * f2 + t2, (load(x, at + 48) - m3) * f3 + t3
        store_past(y, at, y0, past)
        store_past(y, at + 16, y1, past)
        store_past(y, at + 32, y2, past)
        store_past(y, at + 48, y3, past)
        at += stride


@jit
def _affine_one(x, y, at, rows, stride, i, left, pitch, c):
    m, f, t = load(c, i), load(c, pitch + i), load(c, 2 * pitch + i)
    for r in range(rows):
        here = at + i + r * stride
        write(y, here, left, (read(x, here, left, m) - m) * f + t)


@jit
def affine(x, y, spans, first, last, stride, width, pitch, c, past):
    """y = (x - c0) c1 + c2, with the rows of coefficients `pitch` apart."""
    block = _block(width)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], block):
            rows = min(block, spans[2 * s + 1] - row)
            at, i = row * stride, 0
            while i + 64 <= width:
                _affine_four(x, y, at, rows, stride, i, pitch, c, past)
                i += 64
            while i < width:
                _affine_one(x, y, at, rows, stride, i, width - i, pitch, c)
                i += 16


@jit
def _combine_four(g, x, y, at, rows, stride, i, pitch, c, past):
    m0, m1, m2, m3 = load(c, i), load(c, i + 16), load(c, i + 32), load(c, i + 48)
    j = pitch + i
    a0, a1, a2, a3 = load(c, j), load(c, j + 16), load(c, j + 32), load(c, j + 48)
    j += pitch
    b0, b1, b2, b3 = load(c, j), load(c, j + 16), load(c, j + 32), load(c, j + 48)
    j += pitch
    d0, d1, d2, d3 = load(c, j), load(c, j + 16), load(c, j + 32), load(c, j + 48)
    j += pitch
    k0, k1, k2, k3 = load(c, j), load(c, j + 16), load(c, j + 32), load(c, j + 48)
    at += i
    for _ in range(rows):
        y0 = a0 * (load(g, at) - k0) + (b0 * (load(x, at) - m0) + d0)
        y1 = a1 * (load(g, at + 16) - k1) + (b1 * (load(x, at + 16) - m1) + d1)
        y2 = a2 * (load(g, at + 32) - k2) + (b2 * (load(x, at + 32) - m2) + d2)
        y3 = a3 * (load(g, at + 48) - k3) + (b3 * (load(x, at + 48) - m3) + d3)
        store_past(y, at, y0, past)
        store_past(y, at + 16, y1, past)
        store_past(y, at + 32, y2, past)
        store_past(y, at + 48, y3, past)
        at += stride


@jit
def _combine_one(g, x, y, at, rows, stride, i, left, pitch, c):
    m, a, b, d = load(c, i), load(c, pitch + i), load(c, 2 * pitch + i), load(c, 3 * pitch + i)
    k = load(c, 4 * pitch + i)
    for r in range(rows):
        here = at + i + r * stride
        write(y, here, left, a * (read(g, here, left, k) - k) + (b * (read(x, here, left, m) - m) + d))


@jit
def combine(g, x, y, spans, first, last, stride, width, pitch, c, past):
    """y = c1 (g - c4) + c2 (x - c0) + c3."""
    block = _block(width)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], block):
            rows = min(block, spans[2 * s + 1] - row)
            at, i = row * stride, 0
            while i + 64 <= width:
                _combine_four(g, x, y, at, rows, stride, i, pitch, c, past)
                i += 64
            while i < width:
                _combine_one(g, x, y, at, rows, stride, i, width - i, pitch, c)
                i += 16


@jit
def _combine_second_one(g, x, u, yg, yx, at, rows, stride, i, left, pitch, c):
    m, a, b, d = load(c, i), load(c, pitch + i), load(c, 2 * pitch + i), load(c, 3 * pitch + i)
    e, f, h = load(c, 4 * pitch + i), load(c, 5 * pitch + i), load(c, 6 * pitch + i)
    mg, mu = load(c, 7 * pitch + i), load(c, 8 * pitch + i)
    for r in range(rows):
        here = at + i + r * stride
        vx, vg, vu = read(x, here, left, m) - m, read(g, here, left, mg) - mg, read(u, here, left, mu) - mu
        write(yg, here, left, a * vu + (b * vx + d))
        write(yx, here, left, e * vx + (b * vg + (f * vu + h)))


@jit
def combine_second(g, x, u, yg, yx, spans, first, last, stride, width, pitch, c):
    """yg = c1 (u - c8) + c2 (x - c0) + c3 and yx = c4 (x - c0) + c2 (g - c7) + c5 (u - c8) + c6."""
    block = _block(width)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], block):
            rows = min(block, spans[2 * s + 1] - row)
            for i in range(0, width, 16):
                _combine_second_one(g, x, u, yg, yx, row * stride, rows, stride, i, width - i, pitch, c)
