"""Batch norm's drivers, in Numba: what each thread does until all tasks of a call are done.

The work is cut into tasks by shape alone: units (a tile of lanes in channels-last data, some channels in
channels-first) times chunks (ranges of rows). A task first reduces its part to per-channel sums. Where a unit is one
chunk, small enough to stay in a core's cache, the task goes on to the results at once, and memory is read once; else
the last thread to finish its sums combines them, in order, and all threads take tasks again for the results, last
first. Threads take tasks by an atomic counter, inside one call without the GIL. What is summed with what does not
depend on how many threads there are, so neither do the results.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from . import planes, rows
from .rows import jit
from .simd import advance, give_way, pointer_to, see, take

driver: Any = njit(nogil=True, cache=True, error_model="numpy")


# ---- what a task is. A plan is a vector of integers: 0 channels, 1 elements per plane (1: channels last), 2 lanes of
# a row, 3 lanes (or channels) of a unit, 4 and 5 the row left over when rows are taken together and its lanes, 6 and
# 7 parts of a plane and their size, 8 units, 9 the length of scratch arrays.


@jit
def _hold(small, wide):
    """Use scratch arrays once more: Numba frees an array after its last use, and does not count pointers into it."""
    small[0, 0] = 0
    wide[0, 0] = 0


@jit
def _next_task(control, counter, tasks):
    t = take(control, counter)
    return t if t < tasks else -1


@jit
def _is_last(control, tasks):
    return take(control, 8) == tasks - 1


@jit
def _await(control):
    """Wait until the sums are combined. They are being computed by threads that run: the wait is short."""
    while see(control, 16) == 0:
        give_way()


@jit
def _lanes_of(plan, unit, chunk, spans, groups):
    """The first lane and the number of lanes of a task on channels-last data."""
    lane = unit * plan[3]
    width = min(plan[3], plan[2] - lane)
    if spans[2 * groups[chunk]] == plan[4]:  # the rows left over when rows are taken together
        width = plan[5]
    return lane, width


@jit
def _stretch(plan, chunk):
    """Which of the row groups, and which part of a plane, a chunk of channels-first data is."""
    part = chunk % plan[6]
    return chunk // plan[6], part * plan[7], min(plan[1], (part + 1) * plan[7])


@jit
def _channels_of(plan, unit):
    """The channels of a unit."""
    if plan[2] > plan[0]:
        return 0, plan[0]
    return unit * plan[3], min(plan[0], (unit + 1) * plan[3])


@jit
def _fold(values, sums, lane, width, channels):
    """Add lanes up by channel."""
    for i in range(min(width, channels)):
        sums[lane + i] = values[i]
    for i in range(channels, width, channels):
        for c in range(channels):
            sums[c] += values[i + c]


@jit
def _fold_products(n, a, b, products, sum_a, sum_b, sums, lane, width, channels):
    """Add centred sums of products up by channel: those within lanes, and those between the lanes of one channel."""
    _fold(products, sums, lane, width, channels)
    if width > channels:
        share = 1 / (n * (width // channels))
        for i in range(0, width, channels):
            for c in range(channels):
                sums[c] += n * (a[i + c] / n - sum_a[c] * share) * (b[i + c] / n - sum_b[c] * share)


@jit
def _spread(c, pitch, row, channel, channels, value):
    """Give a channel's coefficient to all its lanes."""
    for i in range(channel, pitch, channels):
        c[row * pitch + i] = value


# ---- forward


@jit
def _finish_forward(sums, chunks, first, last, channels, scale, offset, epsilon, mean, variance, pitch, c):
    for i in range(first, last):
        n = sum_x = square = 0.0
        for k in range(0, 3 * chunks, 3):
            n += sums[k * channels + i]
            sum_x += sums[(k + 1) * channels + i]
        m = sum_x / n
        for k in range(0, 3 * chunks, 3):
            d = sums[(k + 1) * channels + i] / sums[k * channels + i] - m
            square += sums[(k + 2) * channels + i] + sums[k * channels + i] * d * d
        mean[i] = m
        variance[i] = square / n
        factor = float(scale[i]) / math.sqrt(float(variance[i]) + epsilon)
        _spread(c, pitch, 0, i, channels, mean[i])
        _spread(c, pitch, 1, i, channels, factor)
        # What the mean lost when it was rounded is put back here.
        _spread(c, pitch, 2, i, channels, float(offset[i]) - (m - float(mean[i])) * factor)


@jit
def _forward_sums(x, plan, spans, groups, unit, chunk, small, wide, all_sums):
    channels, pitch = plan[0], plan[9]
    sums = advance(all_sums, 3 * chunk * channels)
    if plan[1] == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        total, square = wide, advance(wide, pitch)
        n = rows.moments(
            x, spans, groups[chunk], groups[chunk + 1], plan[2], lane, width,
            small, advance(small, pitch), advance(small, 2 * pitch), total, square,
        )  # fmt: skip
        for i in range(min(width, channels)):
            sums[lane + i] = n * max(width // channels, 1)
        sum_x = advance(sums, channels)
        _fold(total, sum_x, lane, width, channels)
        _fold_products(n, total, total, square, sum_x, sum_x, advance(sum_x, channels), lane, width, channels)
    else:
        group, start, stop = _stretch(plan, chunk)
        first, last = groups[group], groups[group + 1]
        begin, end = _channels_of(plan, unit)
        for channel in range(begin, end):
            planes.moments(x, spans, first, last, channels, plan[1], channel, start, stop, small, wide)
            for i in range(3):
                sums[i * channels + channel] = wide[i]


@jit
def _affine(x, y, plan, spans, groups, unit, chunk, pitch, c):
    if plan[1] == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        first, last = groups[chunk], groups[chunk + 1]
        rows.affine(x, y, spans, first, last, plan[2], lane, width, pitch, advance(c, lane))
    else:
        group, start, stop = _stretch(plan, chunk)
        first, last = groups[group], groups[group + 1]
        begin, end = _channels_of(plan, unit)
        for i in range(end - 1, begin - 1, -1):
            planes.affine(x, y, spans, first, last, plan[0], plan[1], i, start, stop, pitch, advance(c, i))


@driver
def forward(x, y, scale, offset, mean, variance, epsilon, plan, spans, groups, control, sums, c):
    small, wide = np.empty((3, plan[9]), c.dtype), np.empty((2, plan[9]), np.float64)
    units, chunks, channels, pitch = plan[8], sums.shape[0], plan[0], c.shape[1]
    _forward_tasks(
        pointer_to(x), pointer_to(y), pointer_to(scale), pointer_to(offset), pointer_to(mean), pointer_to(variance),
        epsilon, pointer_to(plan), pointer_to(spans), pointer_to(groups), pointer_to(control), pointer_to(sums),
        pointer_to(small), pointer_to(wide), units, chunks, channels, pitch, pointer_to(c),
    )  # fmt: skip
    _hold(small, wide)


@jit
def _forward_tasks(
    x, y, scale, offset, mean, variance, epsilon, plan, spans, groups, control, sums, small, wide,
    units, chunks, channels, pitch, c,
):  # fmt: skip
    t = _next_task(control, 0, units * chunks)
    while t >= 0:
        unit, chunk = t % units, t // units
        _forward_sums(x, plan, spans, groups, unit, chunk, small, wide, sums)
        is_last = chunks == 1 or _is_last(control, units * chunks)
        if is_last:
            first, last = _channels_of(plan, unit) if chunks == 1 else (0, channels)
            _finish_forward(sums, chunks, first, last, channels, scale, offset, epsilon, mean, variance, pitch, c)
        if chunks == 1:
            _affine(x, y, plan, spans, groups, unit, 0, pitch, c)
        elif is_last:
            take(control, 16)
        t = _next_task(control, 0, units * chunks)
    if chunks > 1:
        _await(control)
        t = _next_task(control, 24, units * chunks)
        while t >= 0:
            back = units * chunks - 1 - t
            _affine(x, y, plan, spans, groups, back % units, back // units, pitch, c)
            t = _next_task(control, 24, units * chunks)


@driver
def only_affine(x, y, plan, spans, groups, control, chunks, c):
    tasks, units = plan[8] * chunks, plan[8]
    px, py, pc, counters = pointer_to(x), pointer_to(y), pointer_to(c), pointer_to(control)
    numbers, pairs, starts, pitch = pointer_to(plan), pointer_to(spans), pointer_to(groups), c.shape[1]
    t = _next_task(counters, 0, tasks)
    while t >= 0:
        _affine(px, py, numbers, pairs, starts, t % units, t // units, pitch, pc)
        t = _next_task(counters, 0, tasks)


# ---- backward


@jit
def _finish_backward(
    sums, chunks, first, last, channels, scale, variance, epsilon, count, scale_grad, offset_grad, pitch, c
):  # fmt: skip
    for i in range(first, last):
        sum_g = sum_gx = 0.0
        for k in range(0, 2 * chunks, 2):
            sum_g += sums[k * channels + i]
            sum_gx += sums[(k + 1) * channels + i]
        r = 1 / math.sqrt(float(variance[i]) + epsilon)
        scale_grad[i] = r * sum_gx
        offset_grad[i] = sum_g
        a = float(scale[i]) * r
        _spread(c, pitch, 1, i, channels, a)
        _spread(c, pitch, 2, i, channels, -a * r * r * (sum_gx / count))
        _spread(c, pitch, 3, i, channels, 0.0)
        _spread(c, pitch, 4, i, channels, sum_g / count)


@jit
def _backward_sums(g, x, plan, spans, groups, unit, chunk, small, wide, c, all_sums):
    channels = plan[0]
    sums = advance(all_sums, 2 * chunk * channels)
    if plan[1] == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        first, last = groups[chunk], groups[chunk + 1]
        sum_g, sum_gx = wide, advance(wide, plan[9])
        rows.products(g, x, spans, first, last, plan[2], lane, width, advance(c, lane), sum_g, sum_gx)
        _fold(sum_g, sums, lane, width, channels)
        _fold(sum_gx, advance(sums, channels), lane, width, channels)
    else:
        group, start, stop = _stretch(plan, chunk)
        first, last = groups[group], groups[group + 1]
        begin, end = _channels_of(plan, unit)
        for i in range(begin, end):
            planes.products(g, x, spans, first, last, channels, plan[1], i, start, stop, float(c[i]), small, wide)
            sums[i] = wide[0]
            sums[channels + i] = wide[1]


@jit
def _combine(g, x, y, plan, spans, groups, unit, chunk, pitch, c):
    if plan[1] == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        first, last = groups[chunk], groups[chunk + 1]
        rows.combine(g, x, y, spans, first, last, plan[2], lane, width, pitch, advance(c, lane))
    else:
        group, start, stop = _stretch(plan, chunk)
        first, last = groups[group], groups[group + 1]
        begin, end = _channels_of(plan, unit)
        for i in range(end - 1, begin - 1, -1):
            planes.combine(g, x, y, spans, first, last, plan[0], plan[1], i, start, stop, pitch, advance(c, i))


@driver
def backward(g, x, y, scale, variance, epsilon, count, scale_grad, offset_grad, plan, spans, groups, control, sums, c):
    small, wide = np.empty((1, 128), c.dtype), np.empty((2, plan[9]), np.float64)
    units, chunks, channels, pitch = plan[8], sums.shape[0], plan[0], c.shape[1]
    _backward_tasks(
        pointer_to(g), pointer_to(x), pointer_to(y), pointer_to(scale), pointer_to(variance), epsilon, count,
        pointer_to(scale_grad), pointer_to(offset_grad), pointer_to(plan), pointer_to(spans), pointer_to(groups),
        pointer_to(control), pointer_to(sums), pointer_to(small), pointer_to(wide),
        units, chunks, channels, pitch, pointer_to(c),
    )  # fmt: skip
    _hold(small, wide)


@jit
def _backward_tasks(
    g, x, y, scale, variance, epsilon, count, scale_grad, offset_grad, plan, spans, groups, control, sums, small, wide,
    units, chunks, channels, pitch, c,
):  # fmt: skip
    t = _next_task(control, 0, units * chunks)
    while t >= 0:
        unit, chunk = t % units, t // units
        _backward_sums(g, x, plan, spans, groups, unit, chunk, small, wide, c, sums)
        is_last = chunks == 1 or _is_last(control, units * chunks)
        if is_last:
            first, last = _channels_of(plan, unit) if chunks == 1 else (0, channels)
            _finish_backward(
                sums, chunks, first, last, channels, scale, variance, epsilon, count, scale_grad, offset_grad, pitch, c
            )
        if chunks == 1:
            _combine(g, x, y, plan, spans, groups, unit, 0, pitch, c)
        elif is_last:
            take(control, 16)
        t = _next_task(control, 0, units * chunks)
    if chunks > 1:
        _await(control)
        t = _next_task(control, 24, units * chunks)
        while t >= 0:
            back = units * chunks - 1 - t
            _combine(g, x, y, plan, spans, groups, back % units, back // units, pitch, c)
            t = _next_task(control, 24, units * chunks)


@driver
def only_products(g, x, plan, spans, groups, control, sums, c):
    small, wide = np.empty((1, 128), c.dtype), np.empty((2, plan[9]), np.float64)
    tasks, units, counters = plan[8] * sums.shape[0], plan[8], pointer_to(control)
    pg, px, pc, all_sums = pointer_to(g), pointer_to(x), pointer_to(c), pointer_to(sums)
    numbers, pairs, starts = pointer_to(plan), pointer_to(spans), pointer_to(groups)
    lanes, sums_of_lanes = pointer_to(small), pointer_to(wide)
    t = _next_task(counters, 0, tasks)
    while t >= 0:
        unit, chunk = t % units, t // units
        _backward_sums(pg, px, numbers, pairs, starts, unit, chunk, lanes, sums_of_lanes, pc, all_sums)
        t = _next_task(counters, 0, tasks)
    _hold(small, wide)


@driver
def only_combine(g, x, y, plan, spans, groups, control, chunks, c):
    tasks, units, counters = plan[8] * chunks, plan[8], pointer_to(control)
    pg, px, py, pc, pitch = pointer_to(g), pointer_to(x), pointer_to(y), pointer_to(c), c.shape[1]
    numbers, pairs, starts = pointer_to(plan), pointer_to(spans), pointer_to(groups)
    t = _next_task(counters, 0, tasks)
    while t >= 0:
        _combine(pg, px, py, numbers, pairs, starts, t % units, t // units, pitch, pc)
        t = _next_task(counters, 0, tasks)


# ---- second order


@jit
def _finish_second(sums, chunks, first, last, channels, scale, a, b, epsilon, scale_grad, pitch, c):
    """Combine the chunks' means and covariances; the formulas are those of the reference."""
    row = channels
    for i in range(first, last):
        n = x = g = u = xx = gx = ux = ug = 0.0
        for k in range(chunks):
            at = 8 * k * channels + i
            n, x = n + sums[at], x + sums[at + row]
            g, u = g + sums[at + 2 * row], u + sums[at + 3 * row]
        x, g, u = x / n, g / n, u / n
        for k in range(chunks):
            at = 8 * k * channels + i
            m = sums[at]
            dx, dg, du = sums[at + row] / m - x, sums[at + 2 * row] / m - g, sums[at + 3 * row] / m - u
            xx += sums[at + 4 * row] + m * dx * dx
            gx += sums[at + 5 * row] + m * dg * dx
            ux += sums[at + 6 * row] + m * du * dx
            ug += sums[at + 7 * row] + m * du * dg
        xx, gx, ux, ug = xx / n, gx / n, ux / n, ug / n
        r = 1 / math.sqrt(xx + epsilon)
        s, r3, ai = float(scale[i]), r * r * r, float(a[i])
        scale_grad[i] = n * r * (ug - r * r * gx * ux)
        by_u, by_gx, by_ux = s * r, ai * r - s * r3 * ux, -s * r3 * gx
        by_x = -r3 * (s * (ug - 3 * r * r * gx * ux) + ai * gx)
        _spread(c, pitch, 0, i, channels, x)
        left = x - float(c[i])  # what the mean lost when it was rounded
        _spread(c, pitch, 1, i, channels, by_u)
        _spread(c, pitch, 2, i, channels, by_gx)
        _spread(c, pitch, 3, i, channels, float(b[i]) - by_gx * left)
        _spread(c, pitch, 4, i, channels, by_x)
        _spread(c, pitch, 5, i, channels, by_ux)
        _spread(c, pitch, 6, i, channels, -by_x * left)
        _spread(c, pitch, 7, i, channels, g)
        _spread(c, pitch, 8, i, channels, u)


@jit
def _second_sums(g, x, u, plan, spans, groups, unit, chunk, small, wide, all_sums):
    channels, pitch = plan[0], plan[9]
    sums = advance(all_sums, 8 * chunk * channels)
    if plan[1] > 1:
        group, start, stop = _stretch(plan, chunk)
        first, last, shifts = groups[group], groups[group + 1], advance(wide, 8)
        begin, end = _channels_of(plan, unit)
        for channel in range(begin, end):
            planes.covariances(
                g, x, u, spans, first, last, channels, plan[1], channel, start, stop, small, shifts, wide
            )
            for i in range(8):
                sums[i * channels + channel] = wide[i]
        return
    lane, width = _lanes_of(plan, unit, chunk, spans, groups)
    first, last, block = groups[chunk], groups[chunk + 1], advance(small, 3 * pitch)
    n = rows.covariances(g, x, u, spans, first, last, plan[2], lane, width, pitch, small, block, wide)
    for i in range(min(width, channels)):
        sums[lane + i] = n * max(width // channels, 1)
    for i in range(3):
        _fold(advance(wide, i * pitch), advance(sums, (1 + i) * channels), lane, width, channels)
    for i in range(4):
        a, b = (i, 0) if i < 3 else (2, 1)  # xx, gx, ux, ug out of x, g, u
        _fold_products(
            n, advance(wide, a * pitch), advance(wide, b * pitch), advance(wide, (3 + i) * pitch),
            advance(sums, (1 + a) * channels), advance(sums, (1 + b) * channels), advance(sums, (4 + i) * channels),
            lane, width, channels,
        )  # fmt: skip


@jit
def _combine_second(g, x, u, yg, yx, plan, spans, groups, unit, chunk, pitch, c):
    if plan[1] == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        first, last = groups[chunk], groups[chunk + 1]
        rows.combine_second(g, x, u, yg, yx, spans, first, last, plan[2], lane, width, pitch, advance(c, lane))
    else:
        group, start, stop = _stretch(plan, chunk)
        first, last = groups[group], groups[group + 1]
        begin, end = _channels_of(plan, unit)
        for i in range(end - 1, begin - 1, -1):
            planes.combine_second(
                g, x, u, yg, yx, spans, first, last, plan[0], plan[1], i, start, stop, pitch, advance(c, i)
            )


@driver
def second(g, x, u, yg, yx, scale, a, b, epsilon, scale_grad, plan, spans, groups, control, sums, c):
    small, wide = np.empty((10, plan[9]), c.dtype), np.empty((7, plan[9]), np.float64)
    units, chunks, channels, pitch = plan[8], sums.shape[0], plan[0], c.shape[1]
    _second_tasks(
        pointer_to(g), pointer_to(x), pointer_to(u), pointer_to(yg), pointer_to(yx), pointer_to(scale),
        pointer_to(a), pointer_to(b), epsilon, pointer_to(scale_grad), pointer_to(plan), pointer_to(spans),
        pointer_to(groups), pointer_to(control), pointer_to(sums), pointer_to(small), pointer_to(wide),
        units, chunks, channels, pitch, pointer_to(c),
    )  # fmt: skip
    _hold(small, wide)


@jit
def _second_tasks(
    g, x, u, yg, yx, scale, a, b, epsilon, scale_grad, plan, spans, groups, control, sums, small, wide,
    units, chunks, channels, pitch, c,
):  # fmt: skip
    t = _next_task(control, 0, units * chunks)
    while t >= 0:
        unit, chunk = t % units, t // units
        _second_sums(g, x, u, plan, spans, groups, unit, chunk, small, wide, sums)
        is_last = chunks == 1 or _is_last(control, units * chunks)
        if is_last:
            first, last = _channels_of(plan, unit) if chunks == 1 else (0, channels)
            _finish_second(sums, chunks, first, last, channels, scale, a, b, epsilon, scale_grad, pitch, c)
        if chunks == 1:
            _combine_second(g, x, u, yg, yx, plan, spans, groups, unit, 0, pitch, c)
        elif is_last:
            take(control, 16)
        t = _next_task(control, 0, units * chunks)
    if chunks > 1:
        _await(control)
        t = _next_task(control, 24, units * chunks)
        while t >= 0:
            back = units * chunks - 1 - t
            _combine_second(g, x, u, yg, yx, plan, spans, groups, back % units, back // units, pitch, c)
            t = _next_task(control, 24, units * chunks)
