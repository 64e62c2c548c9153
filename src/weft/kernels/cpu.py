"""Batch norm on the CPU, in Numba: the plan, the drivers that follow it on one or many threads, and the kernels' faces.

The work is cut into tasks by shape alone: units (a tile of lanes in channels-last data, one channel in channels-first) times chunks
(ranges of rows). A task first reduces its part to per-channel sums. Where a unit is one chunk, small enough to stay in a core's
cache, the task goes on to the results at once, and memory is read once; else the last thread to finish its sums combines them, in
order, and all threads take tasks again for the results, last first. Threads take tasks by an atomic counter, inside one call
without the GIL. What is summed with what does not depend on how many there are, so neither do the results.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from .._arrays import Array, dtype_of, library_of
from . import planes, pool, reference, rows
from .rows import jit
from .simd import give_way, pointer_to, see, take

DTYPES = frozenset(["float16", "bfloat16", "float32", "float64"])

#: A call on less than this many bytes stays on the caller's thread.
SMALL = 1 << 18
#: What a unit may take of a core's cache for its results to follow its sums at once.
CACHE = 3 << 18
#: What a chunk takes, where a unit is larger than that.
CHUNK = 1 << 19
MOST_CHUNKS = 64
#: JAX arrays from here on: below, crossing the border costs more than is won.
JAX_BYTES = 1 << 20

_log = logging.getLogger(__name__)


# ---- what a task is. A plan is a vector of integers: 0 channels, 1 elements per plane (1: channels last), 2 lanes of a row, 3 lanes of a
# unit, 4 and 5 the row left over when rows are taken together and its lanes, 6 and 7 parts of a plane and their size, 8 units,
# 9 the length of scratch arrays.


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
    stride, tile = plan[2], plan[3]
    lane = unit * tile
    width = min(tile, stride - lane)
    if spans[groups[chunk], 0] == plan[4]:  # the rows left over when rows are taken together
        width = plan[5]
    return lane, width


@jit
def _stretch(plan, chunk):
    """Which of the row groups, and which part of a plane, a chunk of channels-first data is."""
    depth, parts, piece = plan[1], plan[6], plan[7]
    part = chunk % parts
    return chunk // parts, part * piece, min(depth, (part + 1) * piece)


@jit
def _fold(values, sums, column, lane, width, channels):
    """Add lanes up by channel."""
    if width <= channels:
        for i in range(width):
            sums[column, lane + i] = values[i]
    else:
        sums[column, :] = 0.0
        for i in range(0, width, channels):
            for c in range(channels):
                sums[column, c] += values[i + c]


@jit
def _fold_products(n, width, channels, lane, total_a, total_b, products, sums, at, column_a, column_b):
    """Add centred sums of products up by channel: within lanes, and between the lanes of one channel."""
    if width <= channels:
        for i in range(width):
            sums[at, lane + i] = products[i]
        return
    lanes = width // channels
    for c in range(channels):
        mean_a = sums[column_a, c] / (n * lanes)
        mean_b = sums[column_b, c] / (n * lanes)
        value = 0.0
        for i in range(0, width, channels):
            da, db = total_a[i + c] / n - mean_a, total_b[i + c] / n - mean_b
            value += products[i + c] + n * da * db
        sums[at, c] = value


@jit
def _spread(coefficients, row, channel, channels, value):
    """Give a channel's coefficient to all its lanes."""
    for i in range(channel, coefficients.shape[1], channels):
        coefficients[row, i] = value


# ---- forward


@jit
def _finish_forward(sums, first, last, channels, scale, offset, epsilon, mean, variance, coefficients):
    for c in range(first, last):
        n = sum_x = square = 0.0
        for k in range(sums.shape[0]):
            n += sums[k, 0, c]
            sum_x += sums[k, 1, c]
        m = sum_x / n
        for k in range(sums.shape[0]):
            d = sums[k, 1, c] / sums[k, 0, c] - m
            square += sums[k, 2, c] + sums[k, 0, c] * d * d
        mean[c] = m
        variance[c] = square / n
        factor = np.float64(scale[c]) / math.sqrt(np.float64(variance[c]) + epsilon)
        _spread(coefficients, 0, c, channels, mean[c])
        _spread(coefficients, 1, c, channels, factor)
        # What the mean lost when it was rounded is put back here.
        _spread(coefficients, 2, c, channels, offset[c] - (m - np.float64(mean[c])) * factor)


@jit
def _forward_sums(x, plan, spans, groups, unit, chunk, small, wide, sums):
    channels, depth = plan[0], plan[1]
    if depth == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        n = rows.moments(
            pointer_to(x), spans, groups[chunk], groups[chunk + 1], plan[2], lane, width,
            pointer_to(small[0]), pointer_to(small[1]), pointer_to(small[2]), pointer_to(wide[0]), pointer_to(wide[1]),
        )  # fmt: skip
        sums[chunk, 0, lane : lane + min(width, channels)] = n * max(width // channels, 1)
        _fold(wide[0], sums[chunk], 1, lane, width, channels)
        _fold_products(n, width, channels, lane, wide[0], wide[0], wide[1], sums[chunk], 2, 1, 1)
    else:
        group, start, stop = _stretch(plan, chunk)
        planes.moments(
            pointer_to(x), spans, groups[group], groups[group + 1], channels, depth, unit, start, stop,
            pointer_to(small[0]), wide[0],
        )  # fmt: skip
        for i in range(3):
            sums[chunk, i, unit] = wide[0, i]


@jit
def _affine(x, y, plan, spans, groups, unit, chunk, c):
    if plan[1] == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        rows.affine(
            pointer_to(x), pointer_to(y), spans, groups[chunk], groups[chunk + 1], plan[2], lane, width,
            c.shape[1], pointer_to(c[0, lane:]),
        )  # fmt: skip
    else:
        group, start, stop = _stretch(plan, chunk)
        planes.affine(
            pointer_to(x), pointer_to(y), spans, groups[group], groups[group + 1], plan[0], plan[1], unit, start, stop,
            np.float64(c[0, unit]), np.float64(c[1, unit]), np.float64(c[2, unit]), pointer_to(c[0]),
        )  # fmt: skip


@jit
def _channels_of(plan, unit):
    """The channels of a unit."""
    if plan[1] > 1:
        return unit, unit + 1
    if plan[2] > plan[0]:
        return 0, plan[0]
    return unit * plan[3], min(plan[2], (unit + 1) * plan[3])


@jit
def _forward(x, y, scale, offset, mean, variance, epsilon, plan, spans, groups, control, sums, c):
    small = np.empty((3, plan[9]), c.dtype)
    wide = np.empty((2, plan[9]), np.float64)
    units, chunks, channels = plan[8], sums.shape[0], plan[0]
    t = _next_task(control, 0, units * chunks)
    while t >= 0:
        unit, chunk = t % units, t // units
        _forward_sums(x, plan, spans, groups, unit, chunk, small, wide, sums)
        if chunks == 1:
            first, last = _channels_of(plan, unit)
            _finish_forward(sums, first, last, channels, scale, offset, epsilon, mean, variance, c)
            _affine(x, y, plan, spans, groups, unit, chunk, c)
        elif _is_last(control, units * chunks):
            _finish_forward(sums, 0, channels, channels, scale, offset, epsilon, mean, variance, c)
            take(control, 16)
        t = _next_task(control, 0, units * chunks)
    if chunks > 1:
        _await(control)
        t = _next_task(control, 24, units * chunks)
        while t >= 0:
            back = units * chunks - 1 - t
            _affine(x, y, plan, spans, groups, back % units, back // units, c)
            t = _next_task(control, 24, units * chunks)


@jit
def _only_affine(x, y, plan, spans, groups, control, chunks, c):
    units = plan[8]
    t = _next_task(control, 0, units * chunks)
    while t >= 0:
        _affine(x, y, plan, spans, groups, t % units, t // units, c)
        t = _next_task(control, 0, units * chunks)


# ---- backward


@jit
def _finish_backward(sums, count, first, last, channels, scale, variance, epsilon, scale_grad, offset_grad, c):
    for i in range(first, last):
        sum_g = sum_gx = 0.0
        for k in range(sums.shape[0]):
            sum_g += sums[k, 0, i]
            sum_gx += sums[k, 1, i]
        r = 1 / math.sqrt(np.float64(variance[i]) + epsilon)
        scale_grad[i] = r * sum_gx
        offset_grad[i] = sum_g
        a = scale[i] * r
        _spread(c, 1, i, channels, a)
        _spread(c, 2, i, channels, -a * r * r * (sum_gx / count))
        _spread(c, 3, i, channels, -a * (sum_g / count))


@jit
def _backward_sums(g, x, plan, spans, groups, unit, chunk, small, wide, c, sums):
    channels, depth = plan[0], plan[1]
    if depth == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        rows.products(
            pointer_to(g), pointer_to(x), spans, groups[chunk], groups[chunk + 1], plan[2], lane, width,
            pointer_to(c[0, lane:]), pointer_to(wide[0]), pointer_to(wide[1]),
        )  # fmt: skip
        _fold(wide[0], sums[chunk], 0, lane, width, channels)
        _fold(wide[1], sums[chunk], 1, lane, width, channels)
    else:
        group, start, stop = _stretch(plan, chunk)
        planes.products(
            pointer_to(g), pointer_to(x), spans, groups[group], groups[group + 1], channels, depth, unit, start, stop,
            np.float64(c[0, unit]), pointer_to(small[0]), wide[0],
        )  # fmt: skip
        sums[chunk, 0, unit] = wide[0, 0]
        sums[chunk, 1, unit] = wide[0, 1]


@jit
def _combine(g, x, y, plan, spans, groups, unit, chunk, c):
    if plan[1] == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        rows.combine(
            pointer_to(g), pointer_to(x), pointer_to(y), spans, groups[chunk], groups[chunk + 1], plan[2], lane, width,
            c.shape[1], pointer_to(c[0, lane:]),
        )  # fmt: skip
    else:
        group, start, stop = _stretch(plan, chunk)
        planes.combine(
            pointer_to(g), pointer_to(x), pointer_to(y), spans, groups[group], groups[group + 1], plan[0], plan[1],
            unit, start, stop, np.float64(c[0, unit]), np.float64(c[1, unit]), np.float64(c[2, unit]),
            np.float64(c[3, unit]), pointer_to(c[0]),
        )  # fmt: skip


@jit
def _backward(g, x, y, scale, variance, epsilon, count, scale_grad, offset_grad, plan, spans, groups, control, sums, c):
    small = np.empty((1, 128), c.dtype)
    wide = np.empty((2, plan[9]), np.float64)
    units, chunks, channels = plan[8], sums.shape[0], plan[0]
    t = _next_task(control, 0, units * chunks)
    while t >= 0:
        unit, chunk = t % units, t // units
        _backward_sums(g, x, plan, spans, groups, unit, chunk, small, wide, c, sums)
        if chunks == 1:
            first, last = _channels_of(plan, unit)
            _finish_backward(sums, count, first, last, channels, scale, variance, epsilon, scale_grad, offset_grad, c)
            _combine(g, x, y, plan, spans, groups, unit, chunk, c)
        elif _is_last(control, units * chunks):
            _finish_backward(sums, count, 0, channels, channels, scale, variance, epsilon, scale_grad, offset_grad, c)
            take(control, 16)
        t = _next_task(control, 0, units * chunks)
    if chunks > 1:
        _await(control)
        t = _next_task(control, 24, units * chunks)
        while t >= 0:
            back = units * chunks - 1 - t
            _combine(g, x, y, plan, spans, groups, back % units, back // units, c)
            t = _next_task(control, 24, units * chunks)


@jit
def _only_products(g, x, plan, spans, groups, control, sums, c):
    small = np.empty((1, 128), c.dtype)
    wide = np.empty((2, plan[9]), np.float64)
    units, chunks = plan[8], sums.shape[0]
    t = _next_task(control, 0, units * chunks)
    while t >= 0:
        _backward_sums(g, x, plan, spans, groups, t % units, t // units, small, wide, c, sums)
        t = _next_task(control, 0, units * chunks)


@jit
def _only_combine(g, x, y, plan, spans, groups, control, chunks, c):
    units = plan[8]
    t = _next_task(control, 0, units * chunks)
    while t >= 0:
        _combine(g, x, y, plan, spans, groups, t % units, t // units, c)
        t = _next_task(control, 0, units * chunks)


# ---- second order


@jit
def _finish_second(sums, first, last, channels, scale, a, b, epsilon, scale_grad, c):
    """Combine the chunks' means and covariances; the formulas are those of the reference."""
    for i in range(first, last):
        n = x = g = u = xx = gx = ux = ug = 0.0
        for k in range(sums.shape[0]):
            n += sums[k, 0, i]
            x += sums[k, 1, i]
            g += sums[k, 2, i]
            u += sums[k, 3, i]
        x, g, u = x / n, g / n, u / n
        for k in range(sums.shape[0]):
            m = sums[k, 0, i]
            dx, dg, du = sums[k, 1, i] / m - x, sums[k, 2, i] / m - g, sums[k, 3, i] / m - u
            xx += sums[k, 4, i] + m * dx * dx
            gx += sums[k, 5, i] + m * dg * dx
            ux += sums[k, 6, i] + m * du * dx
            ug += sums[k, 7, i] + m * du * dg
        xx, gx, ux, ug = xx / n, gx / n, ux / n, ug / n
        r = 1 / math.sqrt(xx + epsilon)
        s, r3 = np.float64(scale[i]), r * r * r
        scale_grad[i] = n * r * (ug - r * r * gx * ux)
        by_u, by_gx, by_ux = s * r, a[i] * r - s * r3 * ux, -s * r3 * gx
        by_x = -r3 * (s * (ug - 3 * r * r * gx * ux) + a[i] * gx)
        rounded_x = c.dtype.type(x)
        left = x - np.float64(rounded_x)
        _spread(c, 0, i, channels, rounded_x)
        _spread(c, 1, i, channels, by_u)
        _spread(c, 2, i, channels, by_gx)
        _spread(c, 3, i, channels, b[i] - by_u * u - by_gx * left)
        _spread(c, 4, i, channels, by_x)
        _spread(c, 5, i, channels, by_ux)
        _spread(c, 6, i, channels, -by_gx * g - by_ux * u - by_x * left)


@jit
def _second_sums(g, x, u, plan, spans, groups, unit, chunk, small, wide, sums):
    channels, depth = plan[0], plan[1]
    if depth == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        n = rows.covariances(
            pointer_to(g), pointer_to(x), pointer_to(u), spans, groups[chunk], groups[chunk + 1], plan[2], lane, width,
            small.shape[1], pointer_to(small[0]), pointer_to(small[3]), pointer_to(wide[0]),
        )  # fmt: skip
        sums[chunk, 0, lane : lane + min(width, channels)] = n * max(width // channels, 1)
        for i in range(3):
            _fold(wide[i], sums[chunk], 1 + i, lane, width, channels)
        _fold_products(n, width, channels, lane, wide[0], wide[0], wide[3], sums[chunk], 4, 1, 1)
        _fold_products(n, width, channels, lane, wide[1], wide[0], wide[4], sums[chunk], 5, 2, 1)
        _fold_products(n, width, channels, lane, wide[2], wide[0], wide[5], sums[chunk], 6, 3, 1)
        _fold_products(n, width, channels, lane, wide[2], wide[1], wide[6], sums[chunk], 7, 3, 2)
    else:
        group, start, stop = _stretch(plan, chunk)
        planes.covariances(
            pointer_to(g), pointer_to(x), pointer_to(u), spans, groups[group], groups[group + 1], channels, depth, unit,
            start, stop, pointer_to(small[0]), wide[1], wide[0],
        )  # fmt: skip
        for i in range(8):
            sums[chunk, i, unit] = wide[0, i]


@jit
def _combine_second(g, x, u, yg, yx, plan, spans, groups, unit, chunk, c):
    if plan[1] == 1:
        lane, width = _lanes_of(plan, unit, chunk, spans, groups)
        rows.combine_second(
            pointer_to(g), pointer_to(x), pointer_to(u), pointer_to(yg), pointer_to(yx),
            spans, groups[chunk], groups[chunk + 1], plan[2], lane, width, c.shape[1], pointer_to(c[0, lane:]),
        )  # fmt: skip
    else:
        group, start, stop = _stretch(plan, chunk)
        planes.combine_second(
            pointer_to(g), pointer_to(x), pointer_to(u), pointer_to(yg), pointer_to(yx),
            spans, groups[group], groups[group + 1], plan[0], plan[1], unit, start, stop,
            c[:, unit].astype(np.float64), pointer_to(c[0]),
        )  # fmt: skip


@jit
def _second(g, x, u, yg, yx, scale, a, b, epsilon, scale_grad, plan, spans, groups, control, sums, c):
    small = np.empty((10, plan[9]), c.dtype)
    wide = np.empty((7, plan[9]), np.float64)
    units, chunks, channels = plan[8], sums.shape[0], plan[0]
    t = _next_task(control, 0, units * chunks)
    while t >= 0:
        unit, chunk = t % units, t // units
        _second_sums(g, x, u, plan, spans, groups, unit, chunk, small, wide, sums)
        if chunks == 1:
            first, last = _channels_of(plan, unit)
            _finish_second(sums, first, last, channels, scale, a, b, epsilon, scale_grad, c)
            _combine_second(g, x, u, yg, yx, plan, spans, groups, unit, chunk, c)
        elif _is_last(control, units * chunks):
            _finish_second(sums, 0, channels, channels, scale, a, b, epsilon, scale_grad, c)
            take(control, 16)
        t = _next_task(control, 0, units * chunks)
    if chunks > 1:
        _await(control)
        t = _next_task(control, 24, units * chunks)
        while t >= 0:
            back = units * chunks - 1 - t
            _combine_second(g, x, u, yg, yx, plan, spans, groups, back % units, back // units, c)
            t = _next_task(control, 24, units * chunks)


# ---- the plan


class Plan(NamedTuple):
    """How a call is cut into tasks. `spans[groups[k]:groups[k + 1]]` are the rows of chunk k."""

    numbers: np.ndarray
    spans: np.ndarray
    groups: np.ndarray
    chunks: int
    lanes: int


@lru_cache(maxsize=256)
def _plan(outer: int, channels: int, depth: int, element: int, runs: tuple[tuple[int, int], ...] | None) -> Plan:
    """The plan for `outer` rows of `channels` times `depth` elements, of which each takes `element` bytes in all inputs together.

    `runs` are the ranges of rows that count, None for all of them.
    """
    if depth == 1:
        return _plan_rows(outer, channels, element, runs)
    counted = outer if runs is None else sum(stop - start for start, stop in runs)
    size = counted * depth * element
    chunks = 1 if size <= CACHE else min(MOST_CHUNKS, -(-size // CHUNK))
    parts = -(-chunks // counted)
    piece = -(-depth // (parts * 64)) * 64
    parts = -(-depth // piece)
    spans, groups = _cut(runs or ((0, outer),), -(-chunks // parts))
    numbers = [channels, depth, channels, 64, -1, 0, parts, piece, channels, 128]
    return Plan(np.array(numbers), spans, groups, (len(groups) - 1) * parts, channels)


def _plan_rows(outer: int, channels: int, element: int, runs: tuple[tuple[int, int], ...] | None) -> Plan:
    together = 64 // math.gcd(channels, 64) if channels < 64 and runs is None else 1
    together = together if outer >= 2 * together else 1
    counted = outer if runs is None else sum(stop - start for start, stop in runs)
    size = counted * channels * element
    lanes, rows_, left = channels * together, outer // together, outer % together
    tile = CACHE // (counted * element) // 64 * 64
    if size <= SMALL or (together == 1 and 64 <= tile < lanes):
        tile, chunks = min(max(tile, 64), lanes) if size > SMALL else lanes, 1
    else:
        tile, chunks = lanes, min(MOST_CHUNKS, -(-size // CHUNK))
    spans, groups = _cut(runs or ((0, rows_),), chunks)
    if left:
        spans = np.append(spans, [[rows_, rows_ + 1]], axis=0)
        groups = np.append(groups, [len(spans)])
    padded = (tile + 79) // 16 * 16
    numbers = [channels, 1, lanes, tile, rows_ if left else -1, left * channels, 1, 1, -(-lanes // tile), padded]
    return Plan(np.array(numbers), spans, groups, len(groups) - 1, lanes)


def _cut(runs: Sequence[tuple[int, int]], chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of rows cut into chunks of about as many rows each: the ranges, and where each chunk's begin."""
    total = sum(stop - start for start, stop in runs)
    chunks = max(1, min(chunks, total))
    spans: list[tuple[int, int]] = []
    groups, seen = [0], 0
    for start, stop in runs:
        while start < stop:
            end = min(stop, start + total * len(groups) // chunks - seen)
            spans.append((start, end))
            seen += end - start
            start = end
            if seen == total * len(groups) // chunks:
                groups.append(len(spans))
    return np.array(spans, np.int64).reshape(-1, 2), np.array(groups)


def _runs(mask: np.ndarray, factor: int) -> tuple[tuple[int, int], ...]:
    """The ranges of rows for which `mask` holds, each of its rows being `factor` rows."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return tuple((int(a) * factor, int(b) * factor) for a, b in edges.reshape(-1, 2))


# ---- arrays in and out


_BITS = {"float16": np.dtype(np.int16), "bfloat16": np.dtype(np.uint16)}


class _Layout:
    """An array's elements in the order of memory, and what is needed to bring others into it and results out of it."""

    def __init__(self, x: Array, axis: int, mask: Array | None, inputs: int) -> None:
        self.library = library_of(x) or "numpy"
        self.dtype = dtype_of(x)
        self.axis = axis
        array = self._numpy(x)
        self.shape = array.shape
        # A torch tensor in channels_last format has its channels last in memory, whatever its shape says.
        self.is_moved = not array.flags.c_contiguous and np.moveaxis(array, axis, -1).flags.c_contiguous
        self.x = self._flat(array)
        self.channels = self.shape[axis]
        self.depth = 1 if self.is_moved else math.prod(self.shape[axis + 1 :])
        self.outer = self.x.size // (self.channels * self.depth)
        self.mask = None if mask is None else np.asarray(_plain(mask))
        runs = None if self.mask is None else _runs(self.mask, self.outer // self.shape[0])
        self.count = self.outer * self.depth if runs is None else sum(b - a for a, b in runs) * self.depth
        self.bytes = self.x.nbytes * inputs
        if self.count:
            self.plan = _plan(self.outer, self.channels, self.depth, self.x.itemsize * inputs, runs)
        self.vector_dtype = np.float64 if self.dtype == "float64" else np.float32

    def _numpy(self, x: Array) -> np.ndarray:
        array = _plain(x)
        bits = _BITS.get(self.dtype)
        if bits is not None:
            array = array.view(bits)
        elif not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return array

    def _flat(self, array: np.ndarray) -> np.ndarray:
        if self.is_moved:
            array = np.moveaxis(array, self.axis, -1)
        flat = np.ascontiguousarray(array).reshape(-1)
        return flat if flat.flags.behaved else _writable(flat)

    def like(self, x: Array) -> np.ndarray:
        """The elements of another array in the same order."""
        return self._flat(self._numpy(x))

    def empty(self) -> np.ndarray:
        """Memory for a result, on a cache line's boundary; zeros where some rows do not count."""
        make = np.empty if self.mask is None else np.zeros
        if self.x.nbytes < SMALL:
            return make(self.x.size, self.x.dtype)
        memory = make(self.x.nbytes + 64, np.uint8)
        start = -memory.__array_interface__["data"][0] % 64
        return memory[start : start + self.x.nbytes].view(self.x.dtype)

    def result(self, flat: np.ndarray) -> Array:
        """A result in the shape, dtype and library of the input."""
        if self.is_moved:
            moved = (*self.shape[: self.axis], *self.shape[self.axis + 1 :], self.channels)
            array = np.moveaxis(flat.reshape(moved), -1, self.axis)
        else:
            array = flat.reshape(self.shape)
        return _restored(array, self.dtype, self.library)

    def vector(self, v: Array) -> np.ndarray:
        """A copy of a per-channel vector."""
        return np.array(_plain(v), self.vector_dtype)

    def vectors(self, count: int) -> list[np.ndarray]:
        return [np.empty(self.channels, self.vector_dtype) for _ in range(count)]

    def coefficients(self, count: int, *rows_: np.ndarray) -> np.ndarray:
        """Room for `count` coefficients per lane, the first of them given per channel."""
        lanes = (self.plan.lanes + 79) // 16 * 16
        c = np.empty((count, lanes), self.vector_dtype)
        for i, row in enumerate(rows_):
            c[i] = np.resize(row, lanes)
        return c

    def sums(self, count: int) -> np.ndarray:
        return np.empty((self.plan.chunks, count, self.channels))

    def give(self, vector: np.ndarray) -> Array:
        """A per-channel result in the library of the input."""
        return _restored(vector.astype(self.vector_dtype, copy=False), "float32", self.library)

    @np.errstate(all="ignore")
    def inverse_deviation(self, variance: Array, epsilon: float) -> np.ndarray:
        return 1 / np.sqrt(np.array(_plain(variance), np.float64) + epsilon)

    def products(self, g: np.ndarray, x: np.ndarray, mean: Array) -> np.ndarray:
        """The sums of g and of g (x - mean) of each channel, in float64."""
        sums = self.sums(2)
        self.run(_only_products, g, x, *self.tasks, sums, self.coefficients(1, self.vector(mean)))
        return sums.sum(axis=0)

    def run(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Run a driver on as many threads as its size is worth."""
        tasks = int(self.plan.numbers[8]) * self.plan.chunks
        threads = min(pool.size(), tasks, max(1, self.bytes // SMALL))
        call = partial(kernel, *arguments) if len(kernel.overloads) else partial(_compiled, kernel, *arguments)
        if threads == 1:
            call()
        else:
            pool.run([call] * threads)

    @property
    def tasks(self) -> tuple[np.ndarray, ...]:
        """The plan as the drivers take it, with fresh counters, each on a cache line of its own."""
        return self.plan.numbers, self.plan.spans, self.plan.groups, np.zeros(32, np.int64)


def _plain(x: Array) -> np.ndarray:
    """An array's memory as NumPy, bfloat16 tensors of torch as bits."""
    if library_of(x) == "torch":
        x = x.detach()
        return x.view(sys.modules["torch"].int16).numpy() if dtype_of(x) == "bfloat16" else x.numpy()
    return np.asarray(x)


def _restored(array: np.ndarray, dtype: str, library: str) -> Array:
    if library == "torch":
        torch = sys.modules["torch"]
        if dtype in _BITS:
            return torch.from_numpy(array.view(np.int16)).view(getattr(torch, dtype))
        return torch.from_numpy(array)
    if dtype == "float16":
        array = array.view(np.float16)
    elif dtype == "bfloat16":
        import ml_dtypes

        array = array.view(ml_dtypes.bfloat16)
    return sys.modules["jax"].numpy.asarray(array) if library == "jax" else array


class _Writable:
    """Read-only memory under another flag, so that Numba does not compile everything twice; the kernels only read it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.__array_interface__["data"][0], False)}


def _writable(array: np.ndarray) -> np.ndarray:
    return np.asarray(_Writable(array)) if array.flags.aligned else array.copy()


def _compiled(kernel: Callable[..., None], *arguments: Any) -> None:
    """A driver's first call in this process: it is compiled, or found in the cache on disk."""
    started = time.perf_counter()
    kernel(*arguments)
    seconds = time.perf_counter() - started
    if seconds > 1:
        _log.warning("compiled %s in %.1f s, kept on disk; weft.warmup() does it ahead", kernel.__name__, seconds)


# ---- the kernels


def accepts(name: str, x: Array) -> bool:
    """Whether a kernel takes `x`: all there is but small JAX arrays."""
    return library_of(x) != "jax" or x.nbytes >= JAX_BYTES


def batch_norm(
    x: Array, scale: Array, offset: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    layout = _Layout(x, axis, mask, 1)
    if not layout.count:
        return reference.batch_norm(x, scale, offset, epsilon, axis, mask)
    y = layout.empty()
    mean, variance = layout.vectors(2)
    vectors = layout.vector(scale), layout.vector(offset), mean, variance
    layout.run(_forward, layout.x, y, *vectors, epsilon, *layout.tasks, layout.sums(3), layout.coefficients(3))
    return layout.result(y), layout.give(mean), layout.give(variance)


def batch_norm_inference(
    x: Array, scale: Array, offset: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> Array:
    """See the reference."""
    layout = _Layout(x, axis, mask, 1)
    if not layout.count:
        return reference.batch_norm_inference(x, scale, offset, mean, variance, epsilon, axis, mask)
    y = layout.empty()
    factor = layout.vector(scale) * layout.inverse_deviation(variance, epsilon)
    c = layout.coefficients(3, layout.vector(mean), factor, layout.vector(offset))
    layout.run(_only_affine, layout.x, y, *layout.tasks, layout.plan.chunks, c)
    return layout.result(y)


def batch_norm_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    layout = _Layout(x, axis, mask, 2)
    if not layout.count:
        return reference.batch_norm_grad(g, x, scale, mean, variance, epsilon, axis, mask)
    y = layout.empty()
    scale_grad, offset_grad = layout.vectors(2)
    vectors = layout.vector(scale), layout.vector(variance)
    sums, c = layout.sums(2), layout.coefficients(4, layout.vector(mean))
    back = float(layout.count), scale_grad, offset_grad
    layout.run(_backward, layout.like(g), layout.x, y, *vectors, epsilon, *back, *layout.tasks, sums, c)
    return layout.result(y), layout.give(scale_grad), layout.give(offset_grad)


def batch_norm_inference_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    layout = _Layout(x, axis, mask, 2)
    if not layout.count:
        return reference.batch_norm_inference_grad(g, x, scale, mean, variance, epsilon, axis, mask)
    flat, y, r = layout.like(g), layout.empty(), layout.inverse_deviation(variance, epsilon)
    sum_g, sum_gx = layout.products(flat, layout.x, mean)
    zeros = np.zeros(1, layout.vector_dtype)
    c = layout.coefficients(3, zeros, layout.vector(scale) * r, zeros)
    layout.run(_only_affine, flat, y, *layout.tasks, layout.plan.chunks, c)
    return layout.result(y), layout.give(sum_gx * r), layout.give(sum_g)


def batch_norm_grad_grad(
    g: Array, x: Array, scale: Array, u: Array, a: Array, b: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    layout = _Layout(x, axis, mask, 3)
    if not layout.count:
        return reference.batch_norm_grad_grad(g, x, scale, u, a, b, epsilon, axis, mask)
    yg, yx = layout.empty(), layout.empty()
    (scale_grad,) = layout.vectors(1)
    vectors = layout.vector(scale), layout.vector(a), layout.vector(b)
    data = layout.like(g), layout.x, layout.like(u), yg, yx
    sums, c = layout.sums(8), layout.coefficients(7)
    layout.run(_second, *data, *vectors, epsilon, scale_grad, *layout.tasks, sums, c)
    return layout.result(yg), layout.result(yx), layout.give(scale_grad)


def batch_norm_inference_grad_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, u: Array, a: Array, b: Array,
    epsilon: float, axis: int, mask: Array | None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """See the reference."""
    layout = _Layout(x, axis, mask, 3)
    if not layout.count:
        kernel = reference.batch_norm_inference_grad_grad
        return kernel(g, x, scale, mean, variance, u, a, b, epsilon, axis, mask)
    flat_g, flat_u, r = layout.like(g), layout.like(u), layout.inverse_deviation(variance, epsilon)
    yg, yx, zeros = layout.empty(), layout.empty(), np.zeros(1, layout.vector_dtype)
    _, sum_ug = layout.products(flat_u, flat_g, zeros)
    factor, ar = layout.vector(scale) * r, layout.vector(a) * r
    by_u = layout.coefficients(4, layout.vector(mean), factor, ar, layout.vector(b))
    layout.run(_only_combine, flat_u, layout.x, yg, *layout.tasks, layout.plan.chunks, by_u)
    by_g = layout.coefficients(3, zeros, ar, zeros)
    layout.run(_only_affine, flat_g, yx, *layout.tasks, layout.plan.chunks, by_g)
    return layout.result(yg), layout.result(yx), layout.give(sum_ug * r)
