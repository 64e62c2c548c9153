"""Batch norm's loops over channels-last data, in Numba.

The data is seen as rows of `stride` lanes, of which the first `width` are there. A call sees some ranges of rows, the
pairs `first : last` of `spans`. Sums run in the computing dtype over a block of rows, and from block to block in
float64, lane by lane. Arrays come as pointers; per-lane arrays are long enough to be read in whole vectors.

Memory is read and written in order, as the hardware's prefetching expects it: columns of lanes over some rows, whose
sums or coefficients would stay in registers, take up to three times as long where the data is not in a core's own
cache. They do stay there where a row has 64 lanes. To load and store those of longer rows less often, several rows are
taken at once, each from another part of the block: side by side, two arrays' rows take twice as long.
"""

from __future__ import annotations

from numba.extending import overload

from .simd import (
    address_of,
    advance,
    at_least_zero,
    every,
    finite_or,
    fused,
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

#: Rows of a block: four times an odd number, see `_share`.
BLOCK = 124
COARSE = 4096.0
#: How much room `apart` may pass over, in bytes.
APART = 1 << 10


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


@jit
def put(y, at, left, value, past):
    """As `write`, past the caches where `past` is not 0."""
    if left >= 16:
        store_past(y, at, value, past)
    else:
        store_part(y, at, value, left)


@jit
def apart(data, room):
    """The first place in some room that suits sums of `data`, on a boundary of 64 bytes, at most `APART` further on.

    A load waits for an earlier store to an address with the same last 12 bits. Where sums lie a little further on than
    rows do, modulo the length of rows, most loads would: that took 3 times as long.
    """
    first, here = address_of(data[0]), address_of(room)
    last = address_of(data[len(data) - 1])
    place = first - 128
    if (place - last) % APART < 384:
        place = last - 128
    return advance(room, (place // 64 * 64 - here) % APART // (address_of(advance(room, 1)) - here))


@jit
def _share(rows, parts):
    """How many rows each of some parts of a block has; a few are left over. An odd number: parts that are a multiple of
    4 KB apart would be in each other's way in the first cache."""
    count = rows // parts
    return count - 1 if count > 16 and count % 2 == 0 else count


# ---- what is summed, and what comes out, of 16 lanes of the arrays `data`: (x,) forward, (g, x) backward. These are names
# for Numba's `overload`, which puts one of the functions below them in their place when it compiles.


def terms(data, at, left, k, b):
    """x - k, and its square added to b; or g, and g (x - k) added to b. 0 for lanes that are not there."""
    raise NotImplementedError


def value(data, at, left, c):
    """(x - c0) c1 + c2, or c1 (g - c4) + c2 (x - c0) + c3."""
    raise NotImplementedError


def coefficients(data, c, pitch, i):
    """As many coefficients as `value` takes, each `pitch` after the one before."""
    raise NotImplementedError


def _terms_of_x(data, at, left, k, b):
    d = read(data[0], at, left, k) - k
    return d, fused(d, d, b)


def _terms_of_gx(data, at, left, k, b):
    g = read(data[0], at, left, k - k)
    return g, fused(g, read(data[1], at, left, k) - k, b)


def _value_of_x(data, at, left, c):
    return fused(read(data[0], at, left, c[0]) - c[0], c[1], c[2])


def _value_of_gx(data, at, left, c):
    g, x = read(data[0], at, left, c[4]), read(data[1], at, left, c[0])
    return fused(c[1], g - c[4], fused(c[2], x - c[0], c[3]))


def _three(data, c, pitch, i):
    return load(c, i), load(c, pitch + i), load(c, 2 * pitch + i)


def _five(data, c, pitch, i):
    return load(c, i), load(c, pitch + i), load(c, 2 * pitch + i), load(c, 3 * pitch + i), load(c, 4 * pitch + i)


OPTIONS = {"error_model": "numpy"}


@overload(terms, jit_options=OPTIONS)
def _choose_terms(data, at, left, k, b):
    return (None, _terms_of_x, _terms_of_gx)[len(data)]


@overload(value, jit_options=OPTIONS)
def _choose_value(data, at, left, c):
    return (None, _value_of_x, _value_of_gx)[len(data)]


@overload(coefficients, jit_options=OPTIONS)
def _choose_coefficients(data, c, pitch, i):
    return (None, _three, _five)[len(data)]


# ---- sums


@jit
def _sum_four(data, at, step, i, left, shift, s1, s2):
    k, at = load(shift, i), at + i
    a0, b = terms(data, at, left, k, every(0.0, shift))
    a1, b = terms(data, at + step, left, k, b)
    a2, b = terms(data, at + 2 * step, left, k, b)
    a3, b = terms(data, at + 3 * step, left, k, b)
    store(s1, i, load(s1, i) + ((a0 + a1) + (a2 + a3)))
    store(s2, i, load(s2, i) + b)


@jit
def _sum_one(data, at, i, left, shift, s1, s2):
    a, b = terms(data, at + i, left, load(shift, i), load(s2, i))
    store(s1, i, load(s1, i) + a)
    store(s2, i, b)


@jit
def _sum_64(data, at, rows, shift, s1, s2):
    """The sums of rows of 64 lanes, which stay in registers."""
    k0, k1, k2, k3 = load(shift, 0), load(shift, 16), load(shift, 32), load(shift, 48)
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = every(0.0, shift)
    for i in range(at, at + 64 * rows, 64):
        c0, b0 = terms(data, i, 16, k0, b0)
        c1, b1 = terms(data, i + 16, 16, k1, b1)
        c2, b2 = terms(data, i + 32, 16, k2, b2)
        c3, b3 = terms(data, i + 48, 16, k3, b3)
        a0, a1, a2, a3 = a0 + c0, a1 + c1, a2 + c2, a3 + c3
    store(s1, 0, a0)
    store(s1, 16, a1)
    store(s1, 32, a2)
    store(s1, 48, a3)
    store(s2, 0, b0)
    store(s2, 16, b1)
    store(s2, 32, b2)
    store(s2, 48, b3)


@jit
def _sum_block(data, at, rows, stride, width, shift, s1, s2):
    if stride == 64 and width == 64:
        _sum_64(data, at, rows, shift, s1, s2)
        return
    clear(s1, width)
    clear(s2, width)
    whole, count = width // 16 * 16, _share(rows, 4)
    for r in range(count):
        here, step = at + r * stride, count * stride
        for i in range(0, whole, 16):
            _sum_four(data, here, step, i, 16, shift, s1, s2)
        if whole < width:
            _sum_four(data, here, step, whole, width - whole, shift, s1, s2)
    for r in range(4 * count, rows):
        for i in range(0, width, 16):
            _sum_one(data, at + r * stride, i, width - i, shift, s1, s2)


@jit
def add_up(data, offset, spans, first, last, stride, width, shift, s1, s2, sums, others):
    """The sums of both terms, of `width` lanes from `offset` on."""
    clear(sums, width)
    clear(others, width)
    for s in range(first, last):
        for row in range(spans[2 * s], spans[2 * s + 1], BLOCK):
            rows = min(BLOCK, spans[2 * s + 1] - row)
            _sum_block(data, offset + row * stride, rows, stride, width, shift, s1, s2)
            for i in range(0, width, 16):
                _add(sums, i, load(s1, i))
                _add(others, i, load(s2, i))


@jit
def _sampled_shift(x, at, rows, stride, width, shift, s1, s2):
    """About the mean of some rows, from the distances of 16 of them to the first: exact where a channel is constant.

    It is rounded to some thousandth of the standard deviation. Finer digits would be lost in most differences from it,
    always in the same way.
    """
    step = max(1, rows // 16)
    count = -(-rows // step)
    for i in range(0, width, 16):
        store(shift, i, read(x, at + i, width - i, every(0.0, shift)))
    _sum_block((x,), at, count, step * stride, width, shift, s1, s2)
    share, coarse = every(1.0 / count, shift), every(COARSE, shift)
    for i in range(0, width, 16):
        k, spread = load(shift, i), coarse * root(load(s2, i) * share)
        store(shift, i, finite_or((k + load(s1, i) * share + spread) - spread, k))


@jit
def moments(data, spans, first, last, stride, width, shift, s1, s2, sums, squares):
    """Each lane's sum, and its sum of squared distances from its mean; returns the number of rows."""
    n = 0.0
    for s in range(first, last):
        n += spans[2 * s + 1] - spans[2 * s]
    rows = spans[2 * first + 1] - spans[2 * first]
    _sampled_shift(data[0], spans[2 * first] * stride, rows, stride, width, shift, s1, s2)
    add_up(data, 0, spans, first, last, stride, width, shift, s1, s2, sums, squares)
    count, share, four = every(n, sums), every(1 / n, sums), every(4.0, sums)
    for i in range(0, width, 16):
        a, b, k = load(sums, i), load(squares, i), load(shift, i)
        between = a * a * share
        if not total(at_least_zero(between - four * (b - between))) <= 0:
            # A shift was more than two standard deviations away from the mean: once more, from there.
            k = finite_or(narrow(wide(k) + a * share, shift), every(0.0, shift))
            store(shift, i, k)
            add_up(
                data, i, spans, first, last, stride, min(16, width - i),
                advance(shift, i), s1, s2, advance(sums, i), advance(squares, i),
            )  # fmt: skip
            a, b = load(sums, i), load(squares, i)
        store(sums, i, count * wide(k) + a)
        store(squares, i, at_least_zero(b - a * a * share))
    return n


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
                s1, s2 = sums, advance(sums, pitch)
                _sampled_shift(x, at, rows, stride, width, shift, s1, s2)
                _sampled_shift(g, at, rows, stride, width, advance(shift, pitch), s1, s2)
                _sampled_shift(u, at, rows, stride, width, advance(shift, 2 * pitch), s1, s2)
            for i in range(0, width, 16):
                _covariances_one(g, x, u, at, rows, stride, i, width - i, pitch, shift, sums)
            _merge_covariances(n, rows, width, pitch, shift, sums, totals)
            n += rows
    return n


# ---- results


@jit
def _put_two(data, y, at, step, i, left, pitch, c, past):
    some, at = coefficients(data, c, pitch, i), at + i
    put(y, at, left, value(data, at, left, some), past)
    put(y, at + step, left, value(data, at + step, left, some), past)


@jit
def _put_64(data, y, at, rows, pitch, c, past):
    """The results of rows of 64 lanes, whose coefficients stay in registers."""
    c0, c1 = coefficients(data, c, pitch, 0), coefficients(data, c, pitch, 16)
    c2, c3 = coefficients(data, c, pitch, 32), coefficients(data, c, pitch, 48)
    for i in range(at, at + 64 * rows, 64):
        put(y, i, 16, value(data, i, 16, c0), past)
        put(y, i + 16, 16, value(data, i + 16, 16, c1), past)
        put(y, i + 32, 16, value(data, i + 32, 16, c2), past)
        put(y, i + 48, 16, value(data, i + 48, 16, c3), past)


@jit
def _put_four(data, y, at, step, i, pitch, c, past):
    c0, c1, at = coefficients(data, c, pitch, i), coefficients(data, c, pitch, i + 16), at + i
    put(y, at, 16, value(data, at, 16, c0), past)
    put(y, at + 16, 16, value(data, at + 16, 16, c1), past)
    put(y, at + step, 16, value(data, at + step, 16, c0), past)
    put(y, at + step + 16, 16, value(data, at + step + 16, 16, c1), past)


@jit
def _put_rows(data, y, at, rows, stride, width, pitch, c, past):
    whole, count = width // 32 * 32, _share(rows, 2)
    for r in range(count):
        here, step = at + r * stride, count * stride
        for i in range(0, whole, 32):
            _put_four(data, y, here, step, i, pitch, c, past)
        for i in range(whole, width, 16):
            _put_two(data, y, here, step, i, width - i, pitch, c, past)
    for here in range(at + 2 * count * stride, at + rows * stride, stride):
        for i in range(0, width, 16):
            some, left = coefficients(data, c, pitch, i), width - i
            put(y, here + i, left, value(data, here + i, left, some), past)


@jit
def results(data, y, spans, first, last, stride, width, pitch, c, past):
    """Each element's `value`."""
    for s in range(first, last):
        at, rows = spans[2 * s] * stride, spans[2 * s + 1] - spans[2 * s]
        if stride == 64 and width == 64:
            _put_64(data, y, at, rows, pitch, c, past)
        else:
            _put_rows(data, y, at, rows, stride, width, pitch, c, past)


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
