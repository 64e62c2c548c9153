"""Row kernels in Numba: rows moved, added and reduced at the speed of memory.

Moving does not look at numbers: a row is a run of words of 1, 2, 4 or 8 bytes, so one compiled loop serves every
dtype of a width. All loops are single-threaded and let go of the interpreter lock. Splits and positions come
checked.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .._arrays import _NUMBERS, Array, dtype_of, library_of, lowest_of, namespace
from .buffers import empty

DTYPES = frozenset(_NUMBERS)
_ADDED = DTYPES - {"bool", "float16", "bfloat16"}
_COMPARED = _ADDED - {"complex64", "complex128"}
_TAKES = {
    "place_rows": DTYPES,
    "row_bounds": frozenset(["int32", "int64"]),
    "add_rows": _ADDED,
    "row_sum": _ADDED,
    "row_max": _COMPARED,
    "row_softmax": frozenset(["float32", "float64"]),
    "range_rows": frozenset(["int32", "int64", "float32", "float64"]),
}
_LONG = 512  # words from which the C library's copy is the fastest
_AHEAD = 16  # rows between asking for one and copying it
_jit = numba.njit(nogil=True, cache=True, boundscheck=False)


def accepts(name: str, x: Array) -> bool:
    """Whether the kernel knows this dtype, and rows have anything in them."""
    return dtype_of(x) in _TAKES[name] and 0 not in x.shape[1:]


def place_rows(
    values: Array, default: Any, starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray, rows: int
) -> Array:
    """`rows` rows, row `targets[i] + k` being `values[starts[i] + k]` for `k < lengths[i]`, all others `default`."""
    x = _host(values)
    words, width = _words(x)
    out = empty((rows, *x.shape[1:]), x.dtype)
    target, _ = _words(out)
    fill = np.empty((1, *x.shape[1:]), x.dtype)
    fill[...] = _host(default) if library_of(default) else default
    pattern, _ = _words(fill)
    if pattern.size and (pattern == pattern[0]).all():
        pattern = pattern[:1]
    index = (_int64(starts), _int64(lengths), _int64(targets))
    if not _place_in_order(words, pattern, *index, width, target):
        out[...] = fill
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


def row_bounds(splits: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the rows named by `index` begin, how long they are, and the splits of them one after the other."""
    starts, lengths = np.empty(len(index), np.int64), np.empty(len(index), np.int64)
    bounds = np.empty(len(index) + 1, np.int64)
    _bounds(splits, index, starts, lengths, bounds)
    return starts, lengths, bounds


def row_sum(values: Array, splits: np.ndarray) -> Array:
    """The sum of every row, zero for an empty one; floats are summed in float64."""
    x = _host(values)
    out = np.empty((len(splits) - 1, *x.shape[1:]), x.dtype)
    _sum(x.reshape(-1), _int64(splits), math.prod(x.shape[1:]), _wide(x.dtype).type(0), out.reshape(-1))
    return _like(out, values)


def row_max(values: Array, splits: np.ndarray) -> Array:
    """The largest value of every row; for an empty one the smallest there is of the dtype."""
    x = _host(values)
    out = np.full((len(splits) - 1, *x.shape[1:]), lowest_of(x), x.dtype)
    _max(x.reshape(-1), _int64(splits), math.prod(x.shape[1:]), out.reshape(-1))
    return _like(out, values)


def row_softmax(values: Array, splits: np.ndarray) -> Array:
    """exp(value) over the sum of exp within its row, entry by entry of the inner dimensions."""
    x = _host(values)
    flat, bounds, width = x.reshape(-1), _int64(splits), math.prod(x.shape[1:])
    top = np.full((len(splits) - 1) * width, -np.inf, x.dtype)
    _max(flat, bounds, width, top)
    out = empty(x.shape, x.dtype)
    _subtract(flat, top, bounds, width, out.reshape(-1))
    np.exp(out, out=out)  # NumPy's exp is vectorised, the compiler's is not
    total = np.empty_like(top)
    _sum(out.reshape(-1), bounds, width, np.float64(0), total)
    _divide(out.reshape(-1), total, bounds, width)
    return _like(out, values)


def range_rows(starts: np.ndarray, steps: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """For every row its start, then the sum so far plus its step, rounded each time."""
    out = np.empty(int(splits[-1]), starts.dtype)
    _range(np.ascontiguousarray(starts), np.ascontiguousarray(steps), _int64(splits), out)
    return out


# ---- in and out


def _host(x: Array) -> np.ndarray:
    """The values of `x` in host memory, contiguous; what NumPy has no dtype for as integers of its width."""
    if library_of(x) == "torch":
        x = x.detach()
        if dtype_of(x) == "bfloat16":
            x = x.view(_torch().int16)
        x = x.numpy()
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
    """A contiguous array as a flat run of unsigned words, and how many of them one row has."""
    size = x.dtype.itemsize * math.prod(x.shape[1:])
    width = next(w for w in (8, 4, 2, 1) if size % w == 0) if size else 1
    return x.reshape(-1).view(f"u{width}"), size // width


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
def _copy(out, o, src, s, n):  # type: ignore[no-untyped-def]
    """`n` words, and up to 7 beyond them where there is room: whole blocks need no guess at how short a row is.

    What is written beyond is written again, because rows come in the order of their targets.
    """
    end = (n + 7) & ~7
    if n > _LONG or o + end > len(out) or s + end > len(src):
        _memcpy(out, o, src, s, n)
    else:
        for k in range(0, n, 8):
            _memcpy(out, o + k, src, s + k, 8)


@_jit
def _place_in_order(src, pattern, starts, lengths, targets, width, out):  # type: ignore[no-untyped-def]
    """Rows and padding in one pass over the result; False where the targets do not ascend."""
    done = 0
    count = len(starts)
    for i in range(count):
        if i + _AHEAD < count:
            _prefetch(src, starts[i + _AHEAD] * width)
        n = lengths[i] * width
        if n == 0:
            continue
        at = targets[i] * width
        if at < done:
            return False
        _fill(out, done, at, pattern)
        _copy(out, at, src, starts[i] * width, n)
        done = at + n
    _fill(out, done, len(out), pattern)
    return True


@_jit
def _fill(out, start, stop, pattern):  # type: ignore[no-untyped-def]
    width = len(pattern)
    if width > 1:
        for row in range(start, stop, width):
            for k in range(width):
                _set(out, row + k, pattern[k])
        return
    word = pattern[0]
    if stop - start > _LONG or start + ((stop - start + 7) & ~7) > len(out):
        for k in range(start, stop):
            _set(out, k, word)
    else:
        for block in range(start, stop, 8):
            for k in range(8):
                _set(out, block + k, word)


@_jit
def _place(src, starts, lengths, targets, width, out):  # type: ignore[no-untyped-def]
    for i in range(len(starts)):
        _memcpy(out, targets[i] * width, src, starts[i] * width, lengths[i] * width)


@_jit
def _bounds(splits, index, starts, lengths, bounds):  # type: ignore[no-untyped-def]
    total = 0
    bounds[0] = 0
    for i in range(len(index)):
        if i + _AHEAD < len(index):
            _prefetch(splits, index[i + _AHEAD])
        start = splits[index[i]]
        length = splits[index[i] + 1] - start
        total += length
        starts[i], lengths[i], bounds[i + 1] = start, length, total


@_jit
def _add(src, starts, lengths, targets, width, out):  # type: ignore[no-untyped-def]
    for i in range(len(starts)):
        if i + _AHEAD < len(starts):
            _prefetch(out, targets[i + _AHEAD] * width)
        s, o = starts[i] * width, targets[i] * width
        for k in range(lengths[i] * width):
            _set(out, o + k, _get(out, o + k) + _get(src, s + k))


@_jit
def _sum(src, splits, width, zero, out):  # type: ignore[no-untyped-def]
    total = np.zeros(width, np.asarray(zero).dtype)
    for i in range(len(splits) - 1):
        if width == 1:
            # Four sums at once: one would wait for each addition to finish before the next.
            a, b, c, d = zero, zero, zero, zero
            start, stop = splits[i], splits[i + 1]
            whole = start + (stop - start) // 4 * 4
            for k in range(start, whole, 4):
                a += _get(src, k)
                b += _get(src, k + 1)
                c += _get(src, k + 2)
                d += _get(src, k + 3)
            for k in range(whole, stop):
                a += _get(src, k)
            out[i] = (a + b) + (c + d)
        else:
            total[:] = zero
            for row in range(splits[i] * width, splits[i + 1] * width, width):
                for k in range(width):
                    _set(total, k, _get(total, k) + _get(src, row + k))
            for k in range(width):
                out[i * width + k] = total[k]


@_jit
def _max(src, splits, width, out):  # type: ignore[no-untyped-def]
    """The first value is not compared, so that `out` may hold anything for rows that are not empty; a NaN wins."""
    for i in range(len(splits) - 1):
        start, stop = splits[i] * width, splits[i + 1] * width
        if start == stop:
            continue
        if width == 1:
            top, wrong = _get(src, start), _get(src, start) != _get(src, start)
            for k in range(start + 1, stop):
                top = max(top, _get(src, k))
                wrong |= _get(src, k) != _get(src, k)
            out[i] = _get(src, start) * np.nan if wrong else top
        else:
            o = i * width
            for k in range(width):
                _set(out, o + k, _get(src, start + k))
            for row in range(start + width, stop, width):
                for k in range(width):
                    x, top = _get(src, row + k), _get(out, o + k)
                    _set(out, o + k, top if top >= x or top != top else x)


@_jit
def _subtract(src, top, splits, width, out):  # type: ignore[no-untyped-def]
    for i in range(len(splits) - 1):
        for row in range(splits[i] * width, splits[i + 1] * width, width):
            for k in range(width):
                _set(out, row + k, _get(src, row + k) - _get(top, i * width + k))


@_jit
def _divide(out, total, splits, width):  # type: ignore[no-untyped-def]
    for i in range(len(splits) - 1):
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
