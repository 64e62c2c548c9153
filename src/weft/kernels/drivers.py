"""Batch norm's drivers, in Numba: what each thread does until all tasks of a call are done.

The work is cut into tasks by shape alone: units (some channels of channels-first data, all of channels-last) times
chunks (ranges of rows). A task first reduces its part to per-channel sums. The last thread to finish its sums combines
them, in order, and all threads take tasks again for the results, last first: what was read last is still in a cache.
Threads take tasks by atomic counters, each out of its own share first, inside one call without the GIL, and a call ends
when all tasks have ended. What is summed with what does not depend on how many threads there are, so neither do the
results.

Channels-first data could be cut into channels that fit a core's second cache, and memory be read once. But their planes
lie apart, and two sweeps in order are faster, by a tenth to a half. Within the last cache it is lines that come into the
first one that take the time, 2 cycles each wherever they come from: three for each line of x forward (x, x, y), five
backward, where a copy has two.

`data` is the tuple of what is read: (x,) of the forward pass, (g, x) of its gradient, (g, x, u) of the gradient's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import literal_unroll
from numba.extending import overload

from . import planes, rows
from .disk_cache import cached_jit
from .rows import read, write
from .simd import advance, every, jit, load, narrow, pointer_to, pointers_to, root, settle, wide
from .team import add, entry_of, give_way, see, share

driver: Any = cached_jit(nogil=True, error_model="numpy")

#: How many sums a channel has, how many coefficients, and how many scratch arrays, by the number of arrays read.
SUMS = (0, 2, 2, 7)
COEFFICIENTS = (0, 3, 5, 9)
_SMALL = (0, 3, 2, 10)

# Counters, each on a cache line of its own: threads at work, sums done, sums combined, and for each thread's share of
# the tasks the sums taken, then the results taken.
_THREADS, _SUMMED, _COMBINED, _TAKEN = range(0, 32, 8)


# ---- what a task is. A plan is the pointers to four vectors of integers. The first: 0 channels, 1 elements per plane
# (1: channels last), 2 lanes of a row, 3 channels of a unit, 4 and 5 the chunk that has the rows left over when rows
# are taken together and its lanes, 6 and 7 parts of a plane and their size, 8 units, 9 chunks, 10 elements of a
# channel, 11 and 12 the length of scratch arrays: per lane (channels first: 16 for each channel of a unit) and per
# channel, 13 whether results are written past the caches, 14 the length of a row of coefficients. The others: the rows
# of all chunks as pairs, where those of each begin, each chunk's elements of a channel.


@jit
def _rows_of(plan, chunk):
    """A chunk of channels-last data: its ranges of rows, how many lanes a row has and how many of them are there."""
    numbers, _, groups, _ = plan
    width = numbers[5] if chunk == numbers[4] else numbers[2]
    return groups[chunk], groups[chunk + 1], numbers[2], width


@jit
def _planes_of(plan, chunk):
    """A chunk of channels-first data: its ranges of rows, and which part of a plane."""
    numbers, _, groups, _ = plan
    group, part = chunk // numbers[6], chunk % numbers[6]
    stop = min(numbers[1], (part + 1) * numbers[7])
    return groups[group], groups[group + 1], part * numbers[7], stop


@jit
def _channels_of(plan, unit):
    numbers = plan[0]
    return unit * numbers[3], min(numbers[0], (unit + 1) * numbers[3])


@jit
def _fold(values, sums, width, channels):
    """Add lanes up by channel."""
    for i in range(min(width, channels)):
        sums[i] = values[i]
    for i in range(channels, width, channels):
        for c in range(channels):
            sums[c] += values[i + c]


@jit
def _fold_products(n, a, b, products, sum_a, sum_b, sums, width, channels):
    """Add centred sums of products up by channel: those within lanes, and those between the lanes of one channel."""
    _fold(products, sums, width, channels)
    if width > channels:
        share = 1 / (n * (width // channels))
        for i in range(0, width, channels):
            for c in range(channels):
                sums[c] += n * (a[i + c] / n - sum_a[c] * share) * (b[i + c] / n - sum_b[c] * share)


@jit
def _spread(c, row, i, left, plan, pitch, value):
    """Give channels' coefficients, in float64, to all their lanes."""
    numbers = plan[0]
    for lane in range(i, numbers[2], numbers[0]):
        write(c, row * pitch + lane, left, narrow(value, c))


@jit
def _vector(values, i, left):
    """Per-channel values as float64."""
    return wide(read(values, i, left, every(0.0, values)))


@jit
def _column(sums, plan, count, which, i):
    """The sum over the chunks of 16 channels' sums number `which` of `count`."""
    numbers = plan[0]
    pad, found = numbers[12], every(0.0, sums)
    for k in range(numbers[9]):
        found = found + load(sums, (count * k + which) * pad + i)
    return found


@jit
def _scatter(sums, plan, count, which, a, mean_a, b, mean_b, i):
    """The sum over the chunks of centred products: those within chunks, and those between their means."""
    numbers, _, _, counts = plan
    pad, found = numbers[12], every(0.0, sums)
    for k in range(numbers[9]):
        n, at = every(float(counts[k]), sums), count * k * pad + i
        da, db = load(sums, at + a * pad) / n - mean_a, load(sums, at + b * pad) / n - mean_b
        found = found + (load(sums, at + which * pad) + n * da * db)
    return found


# ---- results of the forward pass and of its gradient


def _results_of_one(data, results, plan, unit, chunk, pitch, c):
    numbers, spans, _, _ = plan
    if numbers[1] == 1:
        first, last, stride, width = _rows_of(plan, chunk)
        rows.results(data, results[0], spans, first, last, stride, width, pitch, c, numbers[13])
    else:
        # Not the unit's channels, whose planes lie apart, but as many planes that lie side by side.
        first, last, start, stop = _planes_of(plan, chunk)
        planes.results(
            data, results[0], spans, first, last, numbers[0], numbers[1], unit, numbers[8], start, stop,
            pitch, c, numbers[13],
        )  # fmt: skip


# ---- forward


def _forward_sums(data, plan, unit, chunk, small, big, c, sums):
    numbers, spans, _, _ = plan
    channels, depth, pitch, pad = numbers[0], numbers[1], numbers[11], numbers[12]
    shifts = small
    s1 = rows.apart(data, advance(small, pitch))
    s2 = rows.apart(data, advance(s1, pitch))
    if depth == 1:
        first, last, stride, width = _rows_of(plan, chunk)
        sum_x, square = big, advance(big, pitch)
        n = rows.moments(data, spans, first, last, stride, width, shifts, s1, s2, sum_x, square)
        _fold(sum_x, sums, width, channels)
        _fold_products(n, sum_x, sum_x, square, sums, sums, advance(sums, pad), width, channels)
    else:
        first, last, start, stop = _planes_of(plan, chunk)
        begin, end = _channels_of(plan, unit)
        sum_x, square = advance(sums, begin), advance(sums, pad + begin)
        planes.moments(
            data, spans, first, last, channels, depth, begin, end, start, stop, shifts, s1, s2, sum_x, square
        )


def _finish_forward(data, plan, vectors, made, epsilon, pitch, sums, c):
    scale, offset = vectors
    mean, variance = made
    n = every(float(plan[0][10]), sums)
    for i in range(0, plan[0][0], 16):
        left = plan[0][0] - i
        m = _column(sums, plan, 2, 0, i) / n
        v = narrow(_scatter(sums, plan, 2, 1, 0, m, 0, m, i) / n, variance)
        write(mean, i, left, narrow(m, mean))
        write(variance, i, left, v)
        factor = _vector(scale, i, left) / root(wide(v) + every(epsilon, sums))
        _spread(c, 0, i, left, plan, pitch, m)
        _spread(c, 1, i, left, plan, pitch, factor)
        # What the mean lost when it was rounded is put back here.
        lost = m - wide(narrow(m, mean))
        _spread(c, 2, i, left, plan, pitch, _vector(offset, i, left) - lost * factor)


# ---- backward


def _backward_sums(data, plan, unit, chunk, small, big, c, sums):
    """The sums of g and of g (x - c0)."""
    numbers, spans, _, _ = plan
    channels, depth, pitch, pad = numbers[0], numbers[1], numbers[11], numbers[12]
    s1 = rows.apart(data, small)
    s2 = rows.apart(data, advance(s1, pitch))
    if depth == 1:
        first, last, stride, width = _rows_of(plan, chunk)
        sum_g, sum_gx = big, advance(big, pitch)
        rows.add_up(data, 0, spans, first, last, stride, width, c, s1, s2, sum_g, sum_gx)
        _fold(sum_g, sums, width, channels)
        _fold(sum_gx, advance(sums, pad), width, channels)
    else:
        first, last, start, stop = _planes_of(plan, chunk)
        begin, end = _channels_of(plan, unit)
        mean, sum_g, sum_gx = advance(c, begin), advance(sums, begin), advance(sums, pad + begin)
        planes.add_up(data, spans, first, last, channels, depth, begin, end, start, stop, mean, s1, s2, sum_g, sum_gx)


def _finish_backward(data, plan, vectors, made, epsilon, pitch, sums, c):
    scale, variance, _ = vectors
    scale_grad, offset_grad = made
    n = every(float(plan[0][10]), sums)
    for i in range(0, plan[0][0], 16):
        left = plan[0][0] - i
        sum_g, sum_gx = _column(sums, plan, 2, 0, i), _column(sums, plan, 2, 1, i)
        r = every(1.0, sums) / root(_vector(variance, i, left) + every(epsilon, sums))
        write(scale_grad, i, left, narrow(r * sum_gx, scale_grad))
        write(offset_grad, i, left, narrow(sum_g, offset_grad))
        a = _vector(scale, i, left) * r
        _spread(c, 1, i, left, plan, pitch, a)
        _spread(c, 2, i, left, plan, pitch, every(-1.0, sums) * a * r * r * (sum_gx / n))
        _spread(c, 3, i, left, plan, pitch, every(0.0, sums))
        _spread(c, 4, i, left, plan, pitch, sum_g / n)


# ---- second order


def _second_sums(data, plan, unit, chunk, small, big, c, sums):
    g, x, u = data
    numbers, spans, _, _ = plan
    channels, depth, pitch, pad = numbers[0], numbers[1], numbers[11], numbers[12]
    if depth > 1:
        first, last, start, stop = _planes_of(plan, chunk)
        begin, end = _channels_of(plan, unit)
        shifts, block = advance(big, 8), advance(big, 16)
        for channel in range(begin, end):
            planes.covariances(
                g, x, u, spans, first, last, channels, depth, channel, start, stop, c, shifts, block, big
            )
            for i in range(7):
                sums[i * pad + channel] = big[1 + i]
        return
    first, last, stride, width = _rows_of(plan, chunk)
    n = rows.covariances(g, x, u, spans, first, last, stride, width, pitch, small, advance(small, 3 * pitch), big)
    for i in range(3):
        _fold(advance(big, i * pitch), advance(sums, i * pad), width, channels)
    for i in range(4):
        a, b = (i, 0) if i < 3 else (2, 1)  # xx, gx, ux, ug out of x, g, u
        _fold_products(
            n, advance(big, a * pitch), advance(big, b * pitch), advance(big, (3 + i) * pitch),
            advance(sums, a * pad), advance(sums, b * pad), advance(sums, (3 + i) * pad), width, channels,
        )  # fmt: skip


def _finish_second(data, plan, vectors, made, epsilon, pitch, sums, c):
    """Combine the chunks' means and covariances; the formulas are those of the reference."""
    scale, a_, b_ = vectors
    (scale_grad,) = made
    n = every(float(plan[0][10]), sums)
    for i in range(0, plan[0][0], 16):
        left = plan[0][0] - i
        x, g, u = _column(sums, plan, 7, 0, i) / n, _column(sums, plan, 7, 1, i) / n, _column(sums, plan, 7, 2, i) / n
        xx, gx = _scatter(sums, plan, 7, 3, 0, x, 0, x, i) / n, _scatter(sums, plan, 7, 4, 1, g, 0, x, i) / n
        ux, ug = _scatter(sums, plan, 7, 5, 2, u, 0, x, i) / n, _scatter(sums, plan, 7, 6, 2, u, 1, g, i) / n
        r, none = every(1.0, sums) / root(xx + every(epsilon, sums)), every(0.0, sums)
        s, r3, a = _vector(scale, i, left), r * r * r, _vector(a_, i, left)
        write(scale_grad, i, left, narrow(n * r * (ug - r * r * gx * ux), scale_grad))
        by_gx, by_ux = a * r - s * r3 * ux, none - s * r3 * gx
        by_x = none - r3 * (s * (ug - every(3.0, sums) * r * r * gx * ux) + a * gx)
        lost = x - wide(narrow(x, c))  # when the mean was rounded
        _spread(c, 0, i, left, plan, pitch, x)
        _spread(c, 1, i, left, plan, pitch, s * r)
        _spread(c, 2, i, left, plan, pitch, by_gx)
        _spread(c, 3, i, left, plan, pitch, _vector(b_, i, left) - by_gx * lost)
        _spread(c, 4, i, left, plan, pitch, by_x)
        _spread(c, 5, i, left, plan, pitch, by_ux)
        _spread(c, 6, i, left, plan, pitch, none - by_x * lost)
        _spread(c, 7, i, left, plan, pitch, g)
        _spread(c, 8, i, left, plan, pitch, u)


def _second_results(data, results, plan, unit, chunk, pitch, c):
    (g, x, u), (yg, yx) = data, results
    numbers, spans, _, _ = plan
    channels, depth = numbers[0], numbers[1]
    if depth == 1:
        first, last, stride, width = _rows_of(plan, chunk)
        rows.combine_second(g, x, u, yg, yx, spans, first, last, stride, width, pitch, c)
    else:
        first, last, start, stop = _planes_of(plan, chunk)
        begin, end = _channels_of(plan, unit)
        for i in range(begin, end):
            planes.combine_second(
                g, x, u, yg, yx, spans, first, last, channels, depth, i, start, stop, pitch, advance(c, i)
            )


# ---- inference


@jit
def _given(data, plan, vectors, epsilon, pitch, c):
    """The coefficients of the forward pass, of given statistics."""
    scale, offset, mean, variance = vectors
    channels, like = plan[0][0], np.empty(1)
    for i in range(0, channels, 16):
        left = channels - i
        spread = _vector(variance, i, left) + every(epsilon, pointer_to(like))
        _spread(c, 0, i, left, plan, pitch, _vector(mean, i, left))
        _spread(c, 1, i, left, plan, pitch, _vector(scale, i, left) / root(spread))
        _spread(c, 2, i, left, plan, pitch, _vector(offset, i, left))


# ---- what all orders share; which of the above is meant follows from how many arrays are read. These three are names for
# Numba's `overload`, which puts one of the above in their place when it compiles; as Python they are never called.


def _sums(data, plan, unit, chunk, small, big, c, sums):
    raise NotImplementedError


def _finish(data, plan, vectors, made, epsilon, pitch, sums, c):
    raise NotImplementedError


def _results(data, results, plan, unit, chunk, pitch, c):
    raise NotImplementedError


_OPTIONS = {"error_model": "numpy"}


@overload(_sums, jit_options=_OPTIONS)
def _choose_sums(data, plan, unit, chunk, small, big, c, sums):
    return (None, _forward_sums, _backward_sums, _second_sums)[len(data)]


@overload(_finish, jit_options=_OPTIONS)
def _choose_finish(data, plan, vectors, made, epsilon, pitch, sums, c):
    return (None, _finish_forward, _finish_backward, _finish_second)[len(data)]


@overload(_results, jit_options=_OPTIONS)
def _choose_results(data, results, plan, unit, chunk, pitch, c):
    return (None, _results_of_one, _results_of_one, _second_results)[len(data)]


@jit
def _next(counters, threads, mine, tasks, is_last_sweep):
    """A task nobody has taken, -1 if there is none left: out of the thread's own share, then out of others'.

    A share is a run of tasks. Threads far apart do not fetch ahead into each other's results, and what a thread has
    read lately for its sums, it finds in its own cache for the results, which are taken last first.
    """
    for i in range(threads):
        share = (mine + i) % threads
        first, last = share * tasks // threads, (share + 1) * tasks // threads
        taken = add(counters, _TAKEN + 8 * share + (8 * threads if is_last_sweep else 0), 1)
        if taken < last - first:
            return last - 1 - taken if is_last_sweep else first + taken
    return -1


@jit
def _all_tasks(data, results, vectors, made, epsilon, plan, counters, threads, sums, coefficients):
    numbers, c, pitch = plan[0], pointer_to(coefficients), coefficients.shape[1]
    tasks = numbers[8] * numbers[9]
    small, big = _scratch(data, numbers[11], coefficients)
    mine = add(counters, _THREADS, 1)
    t = _next(counters, threads, mine, tasks, False)
    while t >= 0:
        _sums_of_task(data, plan, t, pointer_to(small), pointer_to(big), c, sums)
        if add(counters, _SUMMED, 1) == tasks - 1:
            _finish(data, plan, vectors, made, epsilon, pitch, sums, c)
            add(counters, _COMBINED, 1)
        t = _next(counters, threads, mine, tasks, False)
    _hold(small, big)
    while see(counters, _COMBINED) == 0:  # not for long: threads that run are at it
        give_way()
    _results_of(data, results, plan, counters, threads, mine, coefficients)


@jit
def _all_sums(data, plan, counters, threads, sums, coefficients):
    numbers, mine = plan[0], add(counters, _THREADS, 1)
    small, big = _scratch(data, numbers[11], coefficients)
    t = _next(counters, threads, mine, numbers[8] * numbers[9], False)
    while t >= 0:
        _sums_of_task(data, plan, t, pointer_to(small), pointer_to(big), pointer_to(coefficients), sums)
        t = _next(counters, threads, mine, numbers[8] * numbers[9], False)
    _hold(small, big)


@jit
def _all_results(data, results, plan, counters, threads, coefficients):
    _results_of(data, results, plan, counters, threads, add(counters, _THREADS, 1), coefficients)


@jit
def _results_of(data, results, plan, counters, threads, mine, coefficients):
    numbers = plan[0]
    units, tasks = numbers[8], numbers[8] * numbers[9]
    t = _next(counters, threads, mine, tasks, True)
    while t >= 0:
        _results(data, results, plan, t % units, t // units, coefficients.shape[1], pointer_to(coefficients))
        t = _next(counters, threads, mine, tasks, True)
    settle()


@jit
def _scratch(data, pitch, coefficients):
    """A thread's own room for sums, in the computing dtype and in float64."""
    order, room = len(data), 2 * rows.APART // coefficients.itemsize
    return np.empty(_SMALL[order] * pitch + room, coefficients.dtype), np.empty(max(SUMS[order], 2) * pitch)


@jit
def _counters(threads):
    """Fresh counters for a call on so many threads."""
    return np.zeros(_TAKEN + 16 * threads, np.int64)


@jit
def _hold(*arrays):
    """Use scratch arrays once more: Numba frees an array after its last use, and does not count pointers into it."""
    for array in literal_unroll(arrays):
        array.flat[0] = 0


@jit
def _sums_of_task(data, plan, t, small, big, c, sums):
    numbers = plan[0]
    unit, chunk = t % numbers[8], t // numbers[8]
    _sums(data, plan, unit, chunk, small, big, c, advance(sums, chunk * SUMS[len(data)] * numbers[12]))


# ---- what is called from Python

_enter_tasks, _enter_sums, _enter_results = entry_of(_all_tasks), entry_of(_all_sums), entry_of(_all_results)


@driver
def whole(data, results, vectors, made, epsilon, plan, board, helpers):
    """The per-channel results in `made`, then the results."""
    # Arrays made here cost a tenth of those that Python makes and hands over.
    numbers, order = plan[0], len(data)
    counters, sums = _counters(helpers + 1), np.empty(numbers[9] * SUMS[order] * numbers[12])
    c = np.empty((COEFFICIENTS[order], numbers[14]), vectors[0].dtype)
    if len(data) == 2:  # the statistics are given
        mean = pointer_to(vectors[-1])
        for i in range(0, numbers[0], 16):
            left = numbers[0] - i
            _spread(pointer_to(c), 0, i, left, pointers_to(plan), c.shape[1], _vector(mean, i, left))
    arguments = (
        pointers_to(data), pointers_to(results), pointers_to(vectors), pointers_to(made), epsilon, pointers_to(plan),
        pointer_to(counters), helpers + 1, pointer_to(sums), c,
    )  # fmt: skip
    share(board, helpers, _enter_tasks(arguments), arguments)
    _hold(counters, sums, c)


@driver
def inference(data, results, vectors, epsilon, plan, board, helpers):
    """The results of the forward pass with given statistics."""
    counters, c = _counters(helpers + 1), np.empty((COEFFICIENTS[1], plan[0][14]), vectors[0].dtype)
    _given(data, pointers_to(plan), pointers_to(vectors), epsilon, c.shape[1], pointer_to(c))
    arguments = pointers_to(data), pointers_to(results), pointers_to(plan), pointer_to(counters), helpers + 1, c
    share(board, helpers, _enter_results(arguments), arguments)
    _hold(counters, c)


@driver
def only_sums(data, plan, board, helpers, sums, c):
    counters = _counters(helpers + 1)
    arguments = pointers_to(data), pointers_to(plan), pointer_to(counters), helpers + 1, pointer_to(sums), c
    share(board, helpers, _enter_sums(arguments), arguments)
    _hold(counters)


@driver
def only_results(data, results, plan, board, helpers, c):
    counters = _counters(helpers + 1)
    arguments = pointers_to(data), pointers_to(results), pointers_to(plan), pointer_to(counters), helpers + 1, c
    share(board, helpers, _enter_results(arguments), arguments)
    _hold(counters)
