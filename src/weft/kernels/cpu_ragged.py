"""Row kernels in Numba: rows moved, added and reduced at the speed of memory.

Moving does not look at numbers: a row is a run of words of 1, 2, 4 or 8 bytes, so one compiled loop serves every
dtype of a width. Loops are single-threaded and let go of the interpreter lock; a large call is cut into parts of
whole rows that run side by side. Splits and positions come checked.

Short rows are bound by branches that nobody can predict, one for each row's length. So the loops over them take a
fixed number of values and choose between what they read and what they need: four times as fast at five values a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .._arrays import _NUMBERS, Array, dtype_in, dtype_of, library_of, lowest_of, namespace
from . import pool
from .buffers import empty

_ALL = frozenset(_NUMBERS)
_ADDED = _ALL - {"bool", "float16", "bfloat16"}
_COMPARED = _ADDED - {"complex64", "complex128"}
DTYPES = {
    "all_below": frozenset(["int32", "int64"]),
    "longest_row": frozenset(["int32", "int64"]),
    "row_bounds": frozenset(["int32", "int64"]),
    "take_rows": _ALL,
    "pad_rows": _ALL,
    "place_rows": _ALL,
    "add_rows": _ADDED,
    "row_sum": _ADDED,
    "row_max": _COMPARED,
    "row_softmax": frozenset(["float32", "float64"]),
    "range_rows": frozenset(["int32", "int64", "float32", "float64"]),
}
_AHEAD = 16  # rows between asking for one and copying it
_NARROW = 64  # words up to which a row is padded without asking how long it is
_LANES = 8  # values that are summed or compared at once
_SHARE = 4 << 20  # bytes from which a part is worth a thread: waking one takes as long as copying a megabyte
_CACHED = 1 << 18  # bytes that stay in a core's cache between the passes of a softmax
_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
# NumPy's rules of division: Python's would ask each time whether the divisor is 0.
_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


def all_below(index: np.ndarray, count: int) -> bool:
    """Whether every entry of `index` is in [0, count)."""
    return bool(_all_below(np.ascontiguousarray(index).reshape(-1), count))


def longest_row(splits: np.ndarray) -> int:
    """The length of the longest row; -1 where splits decrease."""
    return int(_longest(np.ascontiguousarray(splits)))


def row_bounds(splits: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the rows named by `index` begin, and the splits of them one after the other."""
    starts, bounds = empty((len(index),), np.int64), empty((len(index) + 1,), np.int64)
    bounds[0] = 0
    cuts = _in_parts(partial(_bounds, splits, index, starts, bounds), len(index), 2 * starts.nbytes)
    for first, last in pairwise(cuts[1:]):  # each part counted from 0
        bounds[first + 1 : last + 1] += bounds[first]
    return starts, bounds


def take_rows(values: Array, starts: np.ndarray, bounds: np.ndarray) -> Array:
    """The rows that begin at `starts`, one after the other; `bounds` are their splits in the result."""
    x = _host(values)
    out = empty((int(bounds[-1]), *x.shape[1:]), x.dtype)
    if out.size:
        words, width = _words(x)
        starts, bounds = _int64(starts), _int64(bounds)
        _in_parts(partial(_take, words, starts, bounds, width, _words(out)[0]), len(starts), out.nbytes, bounds)
    return _like(out, values)


def pad_rows(values: Array, default: Any, splits: np.ndarray, rows: int, columns: int) -> Array:
    """`rows` rows of `columns` values: those of `splits`, cut or followed by `default`."""
    x = _host(values)
    pattern = _pattern(x, default)
    if len(pattern) != 1:
        count = min(len(splits) - 1, rows)
        starts, lengths = splits[:count], np.minimum(np.diff(splits[: count + 1]), columns)
        return place_rows(values, default, starts, lengths, np.arange(count) * columns, rows * columns)
    out = empty((rows * columns, *x.shape[1:]), x.dtype)
    if out.size:
        words, width = _words(x)
        job = partial(_pad, words, _int64(splits), width, columns * width, pattern[0], _words(out)[0])
        _in_parts(job, rows, out.nbytes)
    return _like(out, values)


def place_rows(
    values: Array, default: Any, starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray, rows: int
) -> Array:
    """`rows` rows, row `targets[i] + k` being `values[starts[i] + k]` for `k < lengths[i]`, all others `default`."""
    x = _host(values)
    out = empty((rows, *x.shape[1:]), x.dtype)
    if out.size:
        words, width = _words(x)
        target, pattern = _words(out)[0], _pattern(x, default)
        index = (_int64(starts), _int64(lengths), _int64(targets))
        if not _place_in_order(words, pattern, *index, width, target):
            _fill(target, 0, len(target), pattern)
            _place(words, *index, width, target)
    return _like(out, values)


def add_rows(values: Array, starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray, rows: int) -> Array:
    """`rows` rows of zeros, with `values[starts[i] + k]` added to row `targets[i] + k` for `k < lengths[i]`."""
    x = _host(values)
    out = empty((rows, *x.shape[1:]), x.dtype)
    out.fill(0)
    width = math.prod(x.shape[1:])
    _add(x.reshape(-1), _int64(starts), _int64(lengths), _int64(targets), width, out.reshape(-1))
    return _like(out, values)


def row_sum(values: Array, splits: np.ndarray) -> Array:
    """The sum of every row, zero for an empty one; floats are summed in float64."""
    x = _host(values)
    out = empty((len(splits) - 1, *x.shape[1:]), x.dtype)
    if out.size:
        zero, bounds = _wide(x.dtype).type(0), _int64(splits)
        job = partial(_sum, x.reshape(-1), bounds, math.prod(x.shape[1:]), zero, out.reshape(-1))
        _in_parts(job, len(out), x.nbytes, bounds)
    return _like(out, values)


def row_max(values: Array, splits: np.ndarray) -> Array:
    """The largest value of every row; for an empty one the smallest there is of the dtype."""
    x = _host(values)
    out = empty((len(splits) - 1, *x.shape[1:]), x.dtype)
    if out.size:
        lowest, bounds = x.dtype.type(lowest_of(x)), _int64(splits)
        job = partial(_max, x.reshape(-1), bounds, math.prod(x.shape[1:]), lowest, out.reshape(-1))
        _in_parts(job, len(out), x.nbytes, bounds)
    return _like(out, values)


def row_softmax(values: Array, splits: np.ndarray) -> Array:
    """exp(value) over the sum of exp within its row, entry by entry of the inner dimensions."""
    x = _host(values)
    out = empty(x.shape, x.dtype)
    if out.size:
        bounds, width = _int64(splits), math.prod(x.shape[1:])
        job = partial(_softmax, x.reshape(-1), bounds, width, out.reshape(-1))
        _in_parts(job, len(bounds) - 1, 4 * x.nbytes, bounds)
    return _like(out, values)


def _softmax(x: np.ndarray, splits: np.ndarray, width: int, out: np.ndarray, first: int, last: int) -> None:
    """Rows `first` to `last`, some at a time, so that they are still in the cache when they are looked at again."""
    step = max(1, _CACHED // x.itemsize // width)
    while first < last:
        stop = int(np.searchsorted(splits[first + 1 : last], splits[first] + step, "right")) + first + 1
        top, total = np.empty((2, (stop - first) * width), x.dtype)
        _max(x, splits[first : stop + 1], width, x.dtype.type(-np.inf), top, 0, stop - first)
        _subtract(x, top, splits[first : stop + 1], width, out)
        part = out[splits[first] * width : splits[stop] * width]
        np.exp(part, out=part)  # NumPy's exp is vectorised, the compiler's is not
        _sum(out, splits[first : stop + 1], width, np.float64(0), total, 0, stop - first)
        _divide(out, total, splits[first : stop + 1], width)
        first = stop


def range_rows(starts: np.ndarray, steps: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """For every row its start, then the sum so far plus its step, rounded each time."""
    out = np.empty(int(splits[-1]), starts.dtype)
    _range(np.ascontiguousarray(starts), np.ascontiguousarray(steps), _int64(splits), out)
    return out


def warm_up(dtypes: Sequence[str]) -> None:
    """Compile every loop for some dtypes, or find it in the cache on disk."""
    rows = np.array([0, 1])
    splits = np.array([0, 1, 2])
    for index in (rows, rows.astype(np.int32)):
        all_below(index, 2)
        longest_row(index)
        row_bounds(splits, index)
    for dtype in dtypes:
        x = np.zeros(2, dtype_in("numpy", dtype))
        take_rows(x, rows, splits)
        pad_rows(x, 0, splits, 2, 2)
        place_rows(x, 0, rows, rows, rows, 2)
        for kernel in (row_sum, row_max, row_softmax):
            if dtype in DTYPES[kernel.__name__]:
                kernel(x, splits)
        if dtype in DTYPES["add_rows"]:
            add_rows(x, rows, rows, rows, 2)
        if dtype in DTYPES["range_rows"]:
            range_rows(x, x, splits)


def _in_parts(
    job: Callable[[int, int], object], rows: int, size: int, bounds: np.ndarray | None = None
) -> Sequence[int]:
    """Run `job(first, last)` over all rows, and say where they were cut.

    They are run at once, or in parts side by side where `size` bytes are worth it: parts of equally many rows, or of
    equally many values as `bounds` counts them.
    """
    parts = min(pool.size(), size // _SHARE, rows)
    if parts < 2:
        job(0, rows)
        return (0, rows)
    if bounds is None:
        cuts = [rows * i // parts for i in range(parts + 1)]
    else:
        wanted = [int(bounds[-1]) * i // parts for i in range(1, parts)]
        cuts = [0, *np.searchsorted(bounds, wanted).clip(0, rows).tolist(), rows]
    pool.run([partial(job, first, last) for first, last in pairwise(cuts)])
    return cuts


# ---- in and out


def _host(x: Array) -> np.ndarray:
    """The values of `x` in host memory, contiguous; what NumPy has no dtype for as integers of its width."""
    if library_of(x) == "torch":
        x = x.detach()
        if dtype_of(x) == "bfloat16":
            x = x.view(_torch().int16)
        x = x.numpy(force=True)  # which resolves what is conjugated or negated when read
    return np.ascontiguousarray(x)


def _like(out: np.ndarray, x: Array) -> Array:
    """`out` in the library and dtype of `x`."""
    library = library_of(x)
    if library == "torch":
        return _torch().from_numpy(out).view(x.dtype)
    return out if library == "numpy" else namespace("jax").asarray(out)


def _torch() -> Any:
    import torch

    return torch


def _int64(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.int64)


def _words(x: np.ndarray) -> tuple[np.ndarray, int]:
    """A contiguous array as a flat run of unsigned words, and how many of them one row has, which is not empty."""
    size = math.prod(x.shape[1:]) * x.itemsize
    word = _WORDS[min(size & -size, 8)]
    return x.reshape(-1).view(word), size // word.itemsize


def _pattern(x: np.ndarray, default: Any) -> np.ndarray:
    """One row of `default` as words, cut to the first where all are the same."""
    fill = np.empty((1, *x.shape[1:]), x.dtype)
    fill[...] = _host(default) if library_of(default) else default
    pattern = _words(fill)[0] if fill.size else fill
    return pattern[:1] if len(pattern) > 1 and (pattern == pattern[0]).all() else pattern


def _wide(dtype: np.dtype) -> np.dtype:
    """What to sum in: twice the width for single precision, the same otherwise."""
    return {np.dtype("float32"): np.dtype("float64"), np.dtype("complex64"): np.dtype("complex128")}.get(dtype, dtype)


# ---- loops


@intrinsic
def _memcpy(typing, out, at, src, start, count):  # type: ignore[no-untyped-def]
    """`out[at : at + count] = src[start : start + count]`, by the C library's copy."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        out_type, _, src_type, _, _ = signature.args
        out, at, src, start, count = arguments
        to = builder.gep(context.make_array(out_type)(context, builder, out).data, [at])
        source = builder.gep(context.make_array(src_type)(context, builder, src).data, [start])
        size = context.get_abi_sizeof(context.get_data_type(out_type.dtype))
        cgutils.raw_memcpy(builder, to, source, count, size)
        return context.get_dummy_value()

    return types.void(out, types.intp, src, types.intp, types.intp), generate


@intrinsic
def _prefetch(typing, src, start):  # type: ignore[no-untyped-def]
    """Ask for `src[start]` before it is needed: rows gathered from all over miss the cache otherwise."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.gep(
            context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]]
        )
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte] + [word] * 3)
        )
        builder.call(function, [builder.bitcast(pointer, byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(src, types.intp), generate


@intrinsic
def _get(typing, src, at):  # type: ignore[no-untyped-def]
    """`src[at]`, without asking whether `at` is negative: the question keeps loops from being vectorised."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return context.unpack_value(builder, signature.return_type, builder.gep(data, [arguments[1]]))

    return src.dtype(src, types.intp), generate


@intrinsic
def _set(typing, out, at, value):  # type: ignore[no-untyped-def]
    """`out[at] = value`, without asking whether `at` is negative."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = signature.args[0]
        data = context.make_array(kind)(context, builder, arguments[0]).data
        context.pack_value(builder, kind.dtype, arguments[2], builder.gep(data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(out, types.intp, out.dtype), generate


@_jit
def _all_below(index, count):  # type: ignore[no-untyped-def]
    outside = False
    for i in range(len(index)):
        outside |= (index[i] < 0) | (index[i] >= count)
    return not outside


@_jit
def _longest(splits):  # type: ignore[no-untyped-def]
    longest, decreases = 0, False
    for i in range(len(splits) - 1):
        length = splits[i + 1] - splits[i]
        longest = max(longest, length)
        decreases |= length < 0
    return -1 if decreases else longest


@_jit
def _bounds(splits, index, starts, bounds, first, last):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(first, last):
        if i + _AHEAD < last:
            _prefetch(splits, index[i + _AHEAD])
        start = splits[index[i]]
        total += splits[index[i] + 1] - start
        starts[i], bounds[i + 1] = start, total


@_jit
def _take(src, starts, bounds, width, out, first, last):  # type: ignore[no-untyped-def]
    """Rows `first` to `last` of the result."""
    for i in range(first, last):
        if i + _AHEAD < last:
            start = starts[i + _AHEAD] * width
            _prefetch(src, start)
            _prefetch(src, start + (bounds[i + _AHEAD + 1] - bounds[i + _AHEAD]) * width)
        _memcpy(out, bounds[i] * width, src, starts[i] * width, (bounds[i + 1] - bounds[i]) * width)


@_jit
def _pad(src, splits, width, row, word, out, first, last):  # type: ignore[no-untyped-def]
    """Rows `first` to `last` of the result, `row` words each, what is missing filled with `word`."""
    for i in range(first, last):
        o = i * row
        s, n = len(src), 0
        if i < len(splits) - 1:
            s = splits[i] * width
            n = min(splits[i + 1] * width - s, row)
        if row <= _NARROW and s + row <= len(src):
            for k in range(row):
                x = _get(src, s + k)
                _set(out, o + k, x if k < n else word)
        else:
            for k in range(n):
                _set(out, o + k, _get(src, s + k))
            for k in range(n, row):
                _set(out, o + k, word)


@_jit
def _place_in_order(src, pattern, starts, lengths, targets, width, out):  # type: ignore[no-untyped-def]
    """Rows and padding in one pass over the result; False where the targets do not ascend."""
    done = 0
    for i in range(len(starts)):
        n = lengths[i] * width
        if n == 0:
            continue
        at = targets[i] * width
        if at < done:
            return False
        if i + _AHEAD < len(starts):
            _prefetch(src, starts[i + _AHEAD] * width)
        _fill(out, done, at, pattern)
        _memcpy(out, at, src, starts[i] * width, n)
        done = at + n
    _fill(out, done, len(out), pattern)
    return True


@_jit
def _fill(out, start, stop, pattern):  # type: ignore[no-untyped-def]
    width = len(pattern)
    if width == 1:
        word = pattern[0]
        for k in range(start, stop):
            _set(out, k, word)
        return
    for row in range(start, stop, width):
        for k in range(width):
            _set(out, row + k, pattern[k])


@_jit
def _place(src, starts, lengths, targets, width, out):  # type: ignore[no-untyped-def]
    for i in range(len(starts)):
        _memcpy(out, targets[i] * width, src, starts[i] * width, lengths[i] * width)


@_jit
def _add(src, starts, lengths, targets, width, out):  # type: ignore[no-untyped-def]
    for i in range(len(starts)):
        if i + _AHEAD < len(starts):
            _prefetch(out, targets[i + _AHEAD] * width)
        s, o = starts[i] * width, targets[i] * width
        for k in range(lengths[i] * width):
            _set(out, o + k, _get(out, o + k) + _get(src, s + k))


@_jit
def _sum(src, splits, width, zero, out, first, last):  # type: ignore[no-untyped-def]
    """The sums of rows `first` to `last`."""
    if width == 1:
        _sum_numbers(src, splits, zero, out, first, last)
    elif width < _LANES:
        _sum_narrow(src, splits, width, zero, out, first, last)
    else:
        total = np.zeros(width, np.asarray(zero).dtype)
        for i in range(first, last):
            total[:] = zero
            for row in range(splits[i] * width, splits[i + 1] * width, width):
                for k in range(width):
                    _set(total, k, _get(total, k) + _get(src, row + k))
            for k in range(width):
                out[i * width + k] = total[k]


@_jit
def _sum_numbers(src, splits, zero, out, first, last):  # type: ignore[no-untyped-def]
    lanes = np.zeros(_LANES, np.asarray(zero).dtype)
    for i in range(first, last):
        k, left = splits[i], splits[i + 1] - splits[i]
        total = zero
        while left > 0:
            if k + _LANES <= len(src):
                for j in range(_LANES):
                    x = zero + _get(src, k + j)
                    _set(lanes, j, x if j < left else zero)
            else:  # in the same order, so that a sum does not depend on where its row lies
                for j in range(_LANES):
                    _set(lanes, j, zero + _get(src, k + j) if j < left else zero)
            low = (_get(lanes, 0) + _get(lanes, 4)) + (_get(lanes, 1) + _get(lanes, 5))
            total += low + ((_get(lanes, 2) + _get(lanes, 6)) + (_get(lanes, 3) + _get(lanes, 7)))
            left -= _LANES
            k += _LANES
        out[i] = total


@_jit
def _sum_narrow(src, splits, width, zero, out, first, last):  # type: ignore[no-untyped-def]
    """Four columns at a time: four sums stay in registers."""
    for i in range(first, last):
        start, stop = splits[i] * width, splits[i + 1] * width
        for column in range(0, width - 3, 4):
            a, b, c, d = zero, zero, zero, zero
            for k in range(start + column, stop, width):
                a += _get(src, k)
                b += _get(src, k + 1)
                c += _get(src, k + 2)
                d += _get(src, k + 3)
            o = i * width + column
            out[o], out[o + 1], out[o + 2], out[o + 3] = a, b, c, d
        for column in range(width - width % 4, width):
            a = zero
            for k in range(start + column, stop, width):
                a += _get(src, k)
            out[i * width + column] = a


@_jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    """The larger of two numbers; NaN where one is. Of several ways to say so, this one is vectorised."""
    larger = b if b > a else a
    return larger if b == b else b


@_jit
def _max(src, splits, width, lowest, out, first, last):  # type: ignore[no-untyped-def]
    """The largest of rows `first` to `last`; a NaN wins."""
    if width == 1:
        _max_numbers(src, splits, lowest, out, first, last)
    elif width < _LANES:
        _max_narrow(src, splits, width, lowest, out, first, last)
    else:
        top = np.full(width, lowest)
        for i in range(first, last):
            top[:] = lowest
            for row in range(splits[i] * width, splits[i + 1] * width, width):
                for k in range(width):
                    _set(top, k, _larger(_get(top, k), _get(src, row + k)))
            for k in range(width):
                out[i * width + k] = top[k]


@_jit
def _max_numbers(src, splits, lowest, out, first, last):  # type: ignore[no-untyped-def]
    lanes = np.full(_LANES, lowest)
    for i in range(first, last):
        k, left = splits[i], splits[i + 1] - splits[i]
        top = lowest
        while left > 0 and k + _LANES <= len(src):
            for j in range(_LANES):
                x = _get(src, k + j)
                _set(lanes, j, x if j < left else lowest)
            for half in (4, 2, 1):
                for j in range(half):
                    _set(lanes, j, _larger(_get(lanes, j), _get(lanes, j + half)))
            top = _larger(top, _get(lanes, 0))
            left -= _LANES
            k += _LANES
        for j in range(left):
            top = _larger(top, _get(src, k + j))
        out[i] = top


@_jit
def _max_narrow(src, splits, width, lowest, out, first, last):  # type: ignore[no-untyped-def]
    """Four columns at a time, as in `_sum_narrow`."""
    for i in range(first, last):
        start, stop = splits[i] * width, splits[i + 1] * width
        for column in range(0, width - 3, 4):
            a, b, c, d = lowest, lowest, lowest, lowest
            for k in range(start + column, stop, width):
                a = _larger(a, _get(src, k))
                b = _larger(b, _get(src, k + 1))
                c = _larger(c, _get(src, k + 2))
                d = _larger(d, _get(src, k + 3))
            o = i * width + column
            out[o], out[o + 1], out[o + 2], out[o + 3] = a, b, c, d
        for column in range(width - width % 4, width):
            a = lowest
            for k in range(start + column, stop, width):
                a = _larger(a, _get(src, k))
            out[i * width + column] = a


@_jit
def _subtract(src, top, splits, width, out):  # type: ignore[no-untyped-def]
    for i in range(len(splits) - 1):
        if width == 1:
            x = top[i]
            for k in range(splits[i], splits[i + 1]):
                _set(out, k, _get(src, k) - x)
        else:
            for row in range(splits[i] * width, splits[i + 1] * width, width):
                for k in range(width):
                    _set(out, row + k, _get(src, row + k) - _get(top, i * width + k))


@_jit
def _divide(out, total, splits, width):  # type: ignore[no-untyped-def]
    for i in range(len(splits) - 1):
        if width == 1:
            x = total[i]
            for k in range(splits[i], splits[i + 1]):
                _set(out, k, _get(out, k) / x)
        else:
            for row in range(splits[i] * width, splits[i + 1] * width, width):
                for k in range(width):
                    _set(out, row + k, _get(out, row + k) / _get(total, i * width + k))


@_jit
def _range(starts, steps, splits, out):  # type: ignore[no-untyped-def]
    for i in range(len(splits) - 1):
        value, step = starts[i], steps[i]
        for k in range(splits[i], splits[i + 1]):
            out[k] = value
            value += step
