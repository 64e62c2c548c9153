"""Row kernels in Numba: rows moved, added and reduced at the speed of memory.

Moving does not look at numbers: a row is a run of words of 1, 2, 4 or 8 bytes, so one compiled loop serves every
dtype of a width. Loops are single-threaded and let go of the interpreter lock; a large call is cut into parts of
whole rows that run side by side.

A loop reads every split, start, length and target once, checks it against the arrays it has, and then uses what it read: it
answers False instead of reading or writing outside them, whatever it was given and whatever changes meanwhile.

Short rows are bound by branches that nobody can predict, one for each row's length. So the loops over them take a
fixed number of values and choose between what they read and what they need: four times as fast at five values a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..core.arrays import NUMERIC_DTYPES, Array, dtype_in, dtype_of, library_of, lowest_of, namespace, tensor_memory
from ..core.memory import hold
from ..errors import InvalidArgumentError
from . import pool
from .buffers import empty
from .disk_cache import cached_jit

_ALL = frozenset(NUMERIC_DTYPES)
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
_OUT_OF_ORDER = 2  # what `_place_in_order` answers where targets do not ascend
_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
# NumPy's rules of division: Python's would ask each time whether the divisor is 0.
_jit = cached_jit(nogil=True, boundscheck=False, error_model="numpy")


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
    job = partial(_bounds, splits, np.ascontiguousarray(index), starts, bounds)
    cuts = _in_parts(job, len(starts), 2 * starts.nbytes)
    for first, last in pairwise(cuts[1:]):  # each part counted from 0
        bounds[first + 1 : last + 1] += bounds[first]
    return starts, bounds


def take_rows(values: Array, starts: np.ndarray, bounds: np.ndarray) -> Array:
    """The rows that begin at `starts`, one after the other; `bounds` are their splits in the result."""
    x, held = _host(values)
    starts, bounds = _int64(starts), _split_vector(bounds)
    out = empty((int(bounds[-1]), *x.shape[1:]), x.dtype)
    if len(bounds) != len(starts) + 1:
        raise _misfit()
    if out.size:
        words, width = _words(x)
        job = partial(_take, words, len(x), starts, bounds, width, _words(out)[0], len(out))
        _in_parts(job, len(starts), out.nbytes, bounds)
    del held
    return _like(out, values)


def pad_rows(values: Array, default: Any, splits: np.ndarray, rows: int, columns: int) -> Array:
    """`rows` rows of `columns` values: those of `splits`, cut or followed by `default`."""
    x, held = _host(values)
    pattern = _pattern(x, default)
    if len(pattern) != 1:
        count = min(len(splits) - 1, rows)
        starts, lengths = splits[:count], np.minimum(np.diff(splits[: count + 1]), columns)
        return place_rows(values, default, starts, lengths, np.arange(count) * columns, rows * columns)
    out = empty((rows * columns, *x.shape[1:]), x.dtype)
    if out.size:
        words, width = _words(x)
        job = partial(_pad, words, len(x), _split_vector(splits), width, columns * width, pattern[0], _words(out)[0])
        _in_parts(job, rows, out.nbytes)
    del held
    return _like(out, values)


def place_rows(
    values: Array, default: Any, starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray, rows: int
) -> Array:
    """`rows` rows, row `targets[i] + k` being `values[starts[i] + k]` for `k < lengths[i]`, all others `default`."""
    x, held = _host(values)
    out = empty((rows, *x.shape[1:]), x.dtype)
    if out.size:
        words, width = _words(x)
        target, pattern = _words(out)[0], _pattern(x, default)
        index = _blocks(starts, lengths, targets)
        done = _place_in_order(words, len(x), pattern, *index, width, target, rows)
        if done == _OUT_OF_ORDER:
            _fill(target, 0, len(target), pattern)
            done = _place(words, len(x), *index, width, target, rows)
        _check(done)
    del held
    return _like(out, values)


def add_rows(values: Array, starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray, rows: int) -> Array:
    """`rows` rows of zeros, with `values[starts[i] + k]` added to row `targets[i] + k` for `k < lengths[i]`."""
    x, held = _host(values)
    out = empty((rows, *x.shape[1:]), x.dtype)
    out.fill(0)
    width = math.prod(x.shape[1:])
    _check(_add(x.reshape(-1), len(x), *_blocks(starts, lengths, targets), width, out.reshape(-1), rows))
    del held
    return _like(out, values)


def row_sum(values: Array, splits: np.ndarray) -> Array:
    """The sum of every row, zero for an empty one; floats are summed in float64."""
    x, held = _host(values)
    bounds = _split_vector(splits)
    out = empty((len(bounds) - 1, *x.shape[1:]), x.dtype)
    if out.size:
        zero, width = _wide(x.dtype).type(0), math.prod(x.shape[1:])
        job = partial(_sum, x.reshape(-1), len(x), bounds, width, zero, out.reshape(-1))
        _in_parts(job, len(out), x.nbytes, bounds)
    del held
    return _like(out, values)


def row_max(values: Array, splits: np.ndarray) -> Array:
    """The largest value of every row; for an empty one the smallest there is of the dtype."""
    x, held = _host(values)
    bounds = _split_vector(splits)
    out = empty((len(bounds) - 1, *x.shape[1:]), x.dtype)
    if out.size:
        lowest, width = x.dtype.type(lowest_of(x)), math.prod(x.shape[1:])
        job = partial(_max, x.reshape(-1), len(x), bounds, width, lowest, out.reshape(-1))
        _in_parts(job, len(out), x.nbytes, bounds)
    del held
    return _like(out, values)


def row_softmax(values: Array, splits: np.ndarray) -> Array:
    """exp(value) over the sum of exp within its row, entry by entry of the inner dimensions."""
    x, held = _host(values)
    bounds = _split_vector(splits)
    if bounds[-1] != len(x):  # what no row covers would not be written
        raise _misfit()
    out = empty(x.shape, x.dtype)
    if out.size:
        job = partial(_softmax, x.reshape(-1), len(x), bounds, math.prod(x.shape[1:]), out.reshape(-1))
        _in_parts(job, len(bounds) - 1, 4 * x.nbytes, bounds)
    del held
    return _like(out, values)


def _softmax(x: np.ndarray, count: int, splits: np.ndarray, width: int, out: np.ndarray, first: int, last: int) -> bool:
    """Rows `first` to `last`, some at a time, so that they are still in the cache when they are looked at again."""
    step = max(1, _CACHED // x.itemsize // width)
    while first < last:
        stop = int(np.searchsorted(splits[first + 1 : last], splits[first] + step, "right")) + first + 1
        part = splits[first : stop + 1]
        top, total = np.empty((2, (stop - first) * width), x.dtype)
        if not _max(x, count, part, width, x.dtype.type(-np.inf), top, 0, stop - first):
            return False
        _subtract(x, count, top, part, width, out)
        here = out[max(part[0], 0) * width : max(part[-1], 0) * width]
        np.exp(here, out=here)  # NumPy's exp is vectorised, the compiler's is not
        _sum(out, count, part, width, np.float64(0), total, 0, stop - first)
        if not _divide(out, count, total, part, width):
            return False
        first = stop
    return True


def range_rows(starts: np.ndarray, steps: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """For every row its start, then the sum so far plus its step, rounded each time."""
    bounds = _split_vector(splits)
    out = np.empty(bounds[-1], starts.dtype)
    first, step = (np.array(x, order="C") for x in (starts, steps))
    if not len(first) == len(step) == len(bounds) - 1:
        raise _misfit()
    _check(_range(first, step, bounds, out))
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


def _in_parts(job: Callable[[int, int], bool], rows: int, size: int, bounds: np.ndarray | None = None) -> Sequence[int]:
    """Run `job(first, last)` over all rows, each of which must say yes, and say where they were cut.

    They are run at once, or in parts side by side where `size` bytes are worth it: parts of equally many rows, or of
    equally many values as `bounds` counts them.
    """
    parts = min(pool.size(), size // _SHARE, rows)
    if parts < 2:
        _check(job(0, rows))
        return (0, rows)
    if bounds is None:
        cuts = [rows * i // parts for i in range(parts + 1)]
    else:
        wanted = [int(bounds[-1]) * i // parts for i in range(1, parts)]
        cuts = [0, *np.searchsorted(bounds, wanted).clip(0, rows).tolist(), rows]
    pool.run([partial(_run, job, first, last) for first, last in pairwise(cuts)])
    return cuts


def _run(job: Callable[[int, int], bool], first: int, last: int) -> None:
    _check(job(first, last))


def _check(done: bool | int) -> None:
    if not done:
        raise _misfit()


def _misfit() -> InvalidArgumentError:
    return InvalidArgumentError(
        "rows must begin and end within the values, and none before it begins: splits, indices and values do not fit "
        "together, or were changed during the call"
    )


# ---- in and out


def _host(x: Array) -> tuple[np.ndarray, Any]:
    """The values of `x` in host memory, contiguous, and what holds them there; what NumPy has no dtype for as integers of
    its width.

    The array is nobody else's, so that its shape stays that of the memory.
    """
    held: Any = None
    if library_of(x) == "torch":
        x = x.detach()
        x = held = tensor_memory(x.view(_torch().int16) if dtype_of(x) == "bfloat16" else x)
    elif isinstance(x, np.ndarray):
        held, x = hold(x), x.view(np.ndarray)
    return np.ascontiguousarray(x), held


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


def _blocks(starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
    """Blocks of rows as the loops take them; one length for each start and each target."""
    found = _int64(starts), _int64(lengths), _int64(targets)
    if not len(found[0]) == len(found[1]) == len(found[2]):
        raise _misfit()
    return found


def _split_vector(splits: np.ndarray) -> np.ndarray:
    """Splits as the loops take them: at least one, and the last one not negative."""
    found = _int64(splits)
    if found.ndim != 1 or not len(found) or found[-1] < 0:
        raise _misfit()
    return found


def _words(x: np.ndarray) -> tuple[np.ndarray, int]:
    """A contiguous array as a flat run of unsigned words, and how many of them one row has, which is not empty."""
    size = math.prod(x.shape[1:]) * x.itemsize
    word = _WORDS[min(size & -size, 8)]
    return x.reshape(-1).view(word), size // word.itemsize


def _pattern(x: np.ndarray, default: Any) -> np.ndarray:
    """One row of `default` as words, cut to the first where all are the same."""
    fill = np.empty((1, *x.shape[1:]), x.dtype)
    fill[...] = _host(default)[0] if library_of(default) else default
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
def _is_inside(start, count, limit):  # type: ignore[no-untyped-def]
    """Whether the `count` entries from `start` on are among the first `limit`."""
    return (start >= 0) & (count >= 0) & (start <= limit - count)


@_jit
def _bounds(splits, index, starts, bounds, first, last):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(first, last):
        if i + _AHEAD < last:
            _prefetch(splits, index[i + _AHEAD])
        row = index[i]
        if not _is_inside(row, 1, len(splits) - 1):
            return False
        start = splits[row]
        total += splits[row + 1] - start
        starts[i], bounds[i + 1] = start, total
    return True


@_jit
def _take(src, count, starts, bounds, width, out, rows, first, last):  # type: ignore[no-untyped-def]
    """Rows `first` to `last` of the result, which has `rows`; `src` has `count`."""
    at = bounds[first]
    if at < 0:
        return False
    for i in range(first, last):
        if i + _AHEAD < last:
            start = starts[i + _AHEAD] * width
            _prefetch(src, start)
            _prefetch(src, start + (bounds[i + _AHEAD + 1] - bounds[i + _AHEAD]) * width)
        start, stop = starts[i], bounds[i + 1]
        n = stop - at
        if (n < 0) | (stop > rows) | (start < 0) | (start > count - n):
            return False
        _memcpy(out, at * width, src, start * width, n * width)
        at = stop
    return True


@_jit
def _pad(src, count, splits, width, row, word, out, first, last):  # type: ignore[no-untyped-def]
    """Rows `first` to `last` of the result, `row` words each, what is missing filled with `word`."""
    start = splits[min(first, len(splits) - 1)]
    if start < 0:
        return False
    for i in range(first, last):
        o = i * row
        s, n = len(src), 0
        if i < len(splits) - 1:
            stop = splits[i + 1]
            if (stop < start) | (stop > count):
                return False
            s, n = start * width, min((stop - start) * width, row)
            start = stop
        if row <= _NARROW and s + row <= len(src):
            for k in range(row):
                x = _get(src, s + k)
                _set(out, o + k, x if k < n else word)
        else:
            for k in range(n):
                _set(out, o + k, _get(src, s + k))
            for k in range(n, row):
                _set(out, o + k, word)
    return True


@_jit
def _place_in_order(src, count, pattern, starts, lengths, targets, width, out, rows):  # type: ignore[no-untyped-def]
    """Rows and padding in one pass over the result; `_OUT_OF_ORDER` where the targets do not ascend."""
    done = 0
    for i in range(len(starts)):
        start, at, length = starts[i], targets[i], lengths[i]
        if length == 0:
            continue
        if not (_is_inside(start, length, count) and _is_inside(at, length, rows)):
            return 0
        at, n = at * width, length * width
        if at < done:
            return _OUT_OF_ORDER
        if i + _AHEAD < len(starts):
            _prefetch(src, starts[i + _AHEAD] * width)
        _fill(out, done, at, pattern)
        _memcpy(out, at, src, start * width, n)
        done = at + n
    _fill(out, done, len(out), pattern)
    return 1


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
def _place(src, count, starts, lengths, targets, width, out, rows):  # type: ignore[no-untyped-def]
    for i in range(len(starts)):
        start, at, length = starts[i], targets[i], lengths[i]
        if not (length == 0 or (_is_inside(start, length, count) and _is_inside(at, length, rows))):
            return 0
        _memcpy(out, at * width, src, start * width, length * width)
    return 1


@_jit
def _add(src, count, starts, lengths, targets, width, out, rows):  # type: ignore[no-untyped-def]
    for i in range(len(starts)):
        if i + _AHEAD < len(starts):
            _prefetch(out, targets[i + _AHEAD] * width)
        start, at, length = starts[i], targets[i], lengths[i]
        if not (length == 0 or (_is_inside(start, length, count) and _is_inside(at, length, rows))):
            return False
        s, o = start * width, at * width
        for k in range(length * width):
            _set(out, o + k, _get(out, o + k) + _get(src, s + k))
    return True


@_jit
def _sum(src, count, splits, width, zero, out, first, last):  # type: ignore[no-untyped-def]
    """The sums of rows `first` to `last`."""
    if width == 1:
        return _sum_numbers(src, count, splits, zero, out, first, last)
    if width < _LANES:
        return _sum_narrow(src, count, splits, width, zero, out, first, last)
    total = np.zeros(width, np.asarray(zero).dtype)
    start = splits[first]
    if start < 0:
        return False
    for i in range(first, last):
        stop = splits[i + 1]
        if (stop < start) | (stop > count):
            return False
        total[:] = zero
        for row in range(start * width, stop * width, width):
            for k in range(width):
                _set(total, k, _get(total, k) + _get(src, row + k))
        for k in range(width):
            out[i * width + k] = total[k]
        start = stop
    return True


@_jit
def _sum_numbers(src, count, splits, zero, out, first, last):  # type: ignore[no-untyped-def]
    lanes = np.zeros(_LANES, np.asarray(zero).dtype)
    start = splits[first]
    if start < 0:
        return False
    for i in range(first, last):
        stop = splits[i + 1]
        if (stop < start) | (stop > count):
            return False
        k, left = start, stop - start
        start = stop
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
    return True


@_jit
def _sum_narrow(src, count, splits, width, zero, out, first, last):  # type: ignore[no-untyped-def]
    """Four columns at a time: four sums stay in registers."""
    end = splits[first]
    if end < 0:
        return False
    for i in range(first, last):
        start, end = end, splits[i + 1]
        if (end < start) | (end > count):
            return False
        start, stop = start * width, end * width
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
    return True


@_jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    """The larger of two numbers; NaN where one is. Of several ways to say so, this one is vectorised."""
    larger = b if b > a else a
    return larger if b == b else b


@_jit
def _max(src, count, splits, width, lowest, out, first, last):  # type: ignore[no-untyped-def]
    """The largest of rows `first` to `last`; a NaN wins."""
    if width == 1:
        return _max_numbers(src, count, splits, lowest, out, first, last)
    if width < _LANES:
        return _max_narrow(src, count, splits, width, lowest, out, first, last)
    top = np.full(width, lowest)
    start = splits[first]
    if start < 0:
        return False
    for i in range(first, last):
        stop = splits[i + 1]
        if (stop < start) | (stop > count):
            return False
        top[:] = lowest
        for row in range(start * width, stop * width, width):
            for k in range(width):
                _set(top, k, _larger(_get(top, k), _get(src, row + k)))
        for k in range(width):
            out[i * width + k] = top[k]
        start = stop
    return True


@_jit
def _max_numbers(src, count, splits, lowest, out, first, last):  # type: ignore[no-untyped-def]
    lanes = np.full(_LANES, lowest)
    start = splits[first]
    if start < 0:
        return False
    for i in range(first, last):
        stop = splits[i + 1]
        if (stop < start) | (stop > count):
            return False
        k, left = start, stop - start
        start = stop
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
    return True


@_jit
def _max_narrow(src, count, splits, width, lowest, out, first, last):  # type: ignore[no-untyped-def]
    """Four columns at a time, as in `_sum_narrow`."""
    end = splits[first]
    if end < 0:
        return False
    for i in range(first, last):
        start, end = end, splits[i + 1]
        if (end < start) | (end > count):
            return False
        start, stop = start * width, end * width
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
    return True


@_jit
def _subtract(src, count, top, splits, width, out):  # type: ignore[no-untyped-def]
    stop = splits[0]
    if stop < 0:
        return False
    for i in range(len(splits) - 1):
        start, stop = stop, splits[i + 1]
        if (stop < start) | (stop > count):
            return False
        if width == 1:
            x = top[i]
            for k in range(start, stop):
                _set(out, k, _get(src, k) - x)
        else:
            for row in range(start * width, stop * width, width):
                for k in range(width):
                    _set(out, row + k, _get(src, row + k) - _get(top, i * width + k))
    return True


@_jit
def _divide(out, count, total, splits, width):  # type: ignore[no-untyped-def]
    stop = splits[0]
    if stop < 0:
        return False
    for i in range(len(splits) - 1):
        start, stop = stop, splits[i + 1]
        if (stop < start) | (stop > count):
            return False
        if width == 1:
            x = total[i]
            for k in range(start, stop):
                _set(out, k, _get(out, k) / x)
        else:
            for row in range(start * width, stop * width, width):
                for k in range(width):
                    _set(out, row + k, _get(out, row + k) / _get(total, i * width + k))
    return True


@_jit
def _range(starts, steps, splits, out):  # type: ignore[no-untyped-def]
    stop = splits[0]
    if stop < 0:
        return False
    for i in range(len(splits) - 1):
        value, step = starts[i], steps[i]
        start, stop = stop, splits[i + 1]
        if (stop < start) | (stop > len(out)):
            return False
        for k in range(start, stop):
            out[k] = value
            value += step
    return True
