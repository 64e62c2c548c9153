"""Batch norm on the CPU: how a call is planned, how arrays get to the drivers and back, and the kernels themselves."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numba import typeof

from ..core.arrays import Array, dtype_in, dtype_of, library_of, tensor_memory
from ..core.memory import hold
from ..errors import InvalidArgumentError
from . import buffers, direct, drivers, pool, reference, team

DTYPES = frozenset(["float16", "bfloat16", "float32", "float64"])

#: A call on less than this many bytes stays on the caller's thread.
SMALL = 1 << 18
#: How many elements of a channel a chunk of channels-first data has at least: to sum them up in float64 takes as long as
#: to read some hundred.
ELEMENTS = 3 << 10
#: And of how many channels at most.
CHANNELS = 1 << 8
#: What a chunk takes, where a unit is larger than that.
CHUNK = 1 << 19
MOST_CHUNKS = 64
#: From here on the inputs alone fill the caches: results are written past them, which leaves the inputs there for their
#: second sweep, and saves reading what is written over. A gradient of twice 26 MB took 2.0 ms so instead of 2.7.
PAST = 3 << 23
#: JAX arrays from here on: below, crossing the border costs more than is won.
JAX_BYTES = 1 << 20

_log = logging.getLogger(__name__)


# ---- the plan


class Plan(NamedTuple):
    """How a call is cut into tasks: what the drivers are told, and what its caller must know."""

    vectors: tuple[np.ndarray, ...]
    tasks: int
    chunks: int
    lanes: int
    pitch: int
    pad: int


def _plan(
    outer: int, channels: int, depth: int, element: int, once: bool, past: bool, runs: tuple[tuple[int, int], ...]
) -> Plan:
    """The plan for `outer` rows of `channels` times `depth` elements, of which each takes `element` bytes in all
    inputs together.

    The data is swept `once` or twice, and results may be written `past` the caches. `runs` are the ranges of rows that
    count.
    """
    counted = sum(stop - start for start, stop in runs)
    wanted = _chunks(counted * channels * depth * element)
    if depth == 1:
        return _plan_rows(outer, channels, past, runs, wanted)
    tile, parts = min(channels, CHANNELS), 1
    if wanted > counted:
        # Some channels of one row lie in one piece, which parts of their planes do not.
        tile = min(tile, max(1, channels * counted // wanted))
        parts = -(-wanted // (counted * channels))
    if not once:
        chunks = max(1, min(wanted, counted * depth // ELEMENTS))
        tile, wanted = min(tile, max(1, channels * chunks // wanted)), chunks
    piece = -(-depth // (parts * 64)) * 64
    parts = -(-depth // piece)
    spans, groups = _cut(runs, -(-wanted // parts))
    lengths = [min(depth, (i + 1) * piece) - i * piece for i in range(parts)]
    counts = [n * length for n in _rows_in(spans, groups) for length in lengths]
    units, pitch, pad = -(-channels // tile), _whole(channels), _whole(channels)
    numbers = [
        channels, depth, channels, tile, -1, 0, parts, piece, units, len(counts), counted * depth, 16 * tile, pad,
        past and depth % 16 == 0, pitch,
    ]  # fmt: skip
    return Plan(_vectors(numbers, spans, groups, counts), units * len(counts), len(counts), channels, pitch, pad)


def _plan_rows(outer: int, channels: int, past: bool, runs: tuple[tuple[int, int], ...], wanted: int) -> Plan:
    counted = sum(stop - start for start, stop in runs)
    # Few channels: some rows are taken together as one, so that its lanes fill whole vectors.
    together = 64 // math.gcd(channels, 64) if channels < 64 and counted == outer else 1
    together = together if outer >= 2 * together else 1
    lanes, left = channels * together, outer % together
    spans, groups = _cut(((0, outer // together),) if together > 1 else runs, wanted)
    counts = [n * together for n in _rows_in(spans, groups)]
    if left:
        spans = np.append(spans, [[outer // together, outer // together + 1]], axis=0)
        groups = np.append(groups, [len(spans)])
        counts.append(left)
    chunks, pitch, pad = len(counts), _whole(lanes), _whole(channels)
    numbers = [
        channels, 1, lanes, channels, chunks - 1 if left else -1, left * channels, 1, 1, 1, chunks, counted, pitch, pad,
        past and lanes % 16 == 0, pitch,
    ]  # fmt: skip
    return Plan(_vectors(numbers, spans, groups, counts), chunks, chunks, lanes, pitch, pad)


def _chunks(size: int) -> int:
    """How many chunks `size` bytes are worth: a power of 2, so that 2, 4 or 8 threads get the same number each."""
    return 1 if size <= SMALL else min(MOST_CHUNKS, 1 << (size // CHUNK).bit_length())


def _whole(count: int) -> int:
    """A length for arrays of `count` entries that may be read in whole vectors, up to four from any entry on."""
    return (count + 79) // 16 * 16


def _rows_in(spans: np.ndarray, groups: np.ndarray) -> list[int]:
    """The number of rows of each chunk."""
    return [int(np.diff(spans[a:b]).sum()) for a, b in pairwise(groups)]


def _vectors(numbers: list[int], spans: np.ndarray, groups: np.ndarray, counts: list[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(v, np.int64).reshape(-1) for v in (numbers, spans, groups, counts))


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


def _runs(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The ranges of rows for which `mask` holds."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))


# ---- arrays in and out


_BITS = {"float16": np.dtype(np.int16), "bfloat16": np.dtype(np.uint16)}


class _Form(NamedTuple):
    """What the shape of a call decides."""

    channels: int
    counted: int  # elements of a channel
    threads: int  # at most
    plan: Plan


_NOTHING = Plan((), 0, 0, 0, 0, 0)


@lru_cache(maxsize=256)
def _form(
    shape: tuple[int, ...],
    axis: int,
    is_moved: bool,
    element: int,
    once: bool,
    runs: tuple[tuple[int, int], ...] | None,
) -> _Form:
    """`runs` are the ranges of rows that count, None for all of them; see `_plan` for the rest."""
    channels, size = shape[axis], math.prod(shape)
    depth = 1 if is_moved else math.prod(shape[axis + 1 :])
    outer = size // max(1, channels * depth)
    if runs is not None:
        factor = outer // max(1, shape[0])
        runs = tuple((a * factor, b * factor) for a, b in runs)
    rows_ = outer if runs is None else sum(b - a for a, b in runs)
    if not size or not rows_:
        return _Form(channels, 0, 1, _NOTHING)
    past = runs is None and size * element >= PAST  # an array of zeros lies anywhere, fresh memory on a page's boundary
    plan = _plan(outer, channels, depth, element, once, past, runs or ((0, outer),))
    return _Form(channels, rows_ * depth, max(1, min(plan.tasks, size * element // SMALL)), plan)


class _Layout:
    """An array's elements in the order of memory, and what is needed to bring others into it and results out of it."""

    def __init__(self, x: Array, axis: int, mask: Array | None, inputs: int, once: bool = False) -> None:
        self.library = "numpy" if type(x) is np.ndarray else library_of(x) or "numpy"
        self.dtype = dtype_of(x)
        self.vector_dtype = _WIDE if self.dtype == "float64" else _NARROW
        self.axis = axis
        self.held: list[Any] = []  # what holds the memory of NumPy's arrays in its place
        array = self._numpy(x)
        self.shape = array.shape
        if not 0 <= axis < len(self.shape):
            raise InvalidArgumentError(f"x of batch norm must have an axis {axis}, got the shape {list(self.shape)}")
        # A torch tensor in channels_last format has its channels last in memory, whatever its shape says.
        self.is_moved = not array.flags.c_contiguous and array.transpose(_last(array.ndim, axis)).flags.c_contiguous
        self.x = self._flat(array)
        self.mask = None if mask is None else np.array(_plain(mask), bool)
        if self.mask is not None and self.mask.shape != self.shape[:1]:
            raise _misfit("the mask", self.shape[:1], self.mask.shape)
        runs = None if self.mask is None else _runs(self.mask)
        form = _form(self.shape, axis, self.is_moved, array.itemsize * inputs, once, runs)
        self.channels, self.count, self.threads, self.plan = form

    def _memory(self, x: Array) -> np.ndarray:
        """An array's memory, held in its place, as a NumPy array that nobody else has: its shape stays."""
        if type(x) is not np.ndarray:
            return _plain(x)
        self.held.append(hold(x))
        return x.view()

    def _numpy(self, x: Array) -> np.ndarray:
        array = self._memory(x)
        if self.dtype in _BITS:
            return array.view(_BITS[self.dtype])
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    def _flat(self, array: np.ndarray) -> np.ndarray:
        flat = (array.transpose(_last(array.ndim, self.axis)) if self.is_moved else array).ravel()
        return flat if flat.flags.behaved else _writable(flat)

    def like(self, x: Array) -> np.ndarray:
        """The elements of another array of the same shape in the same order."""
        array = self._numpy(x)
        if array.shape != self.shape:
            raise _misfit("a gradient", self.shape, array.shape)
        if array.dtype != self.x.dtype:
            raise InvalidArgumentError(f"a gradient of batch norm must be {self.dtype}, as x is, got {dtype_of(x)}")
        return self._flat(array)

    def empty(self) -> np.ndarray:
        """Memory for a result; zeros where some rows do not count."""
        if self.mask is not None:
            return np.zeros(self.x.shape, self.x.dtype)
        make = np.empty if self.x.nbytes < buffers.LARGE else buffers.empty
        return make(self.x.shape, self.x.dtype)

    def result(self, flat: np.ndarray) -> Array:
        """A result in the shape, dtype and library of the input."""
        if self.library == "numpy" and not self.is_moved and self.dtype not in _BITS:
            return flat.reshape(self.shape)
        if self.is_moved:
            moved = (*self.shape[: self.axis], *self.shape[self.axis + 1 :], self.channels)
            array = flat.reshape(moved).transpose(_from_last(len(moved), self.axis))
        else:
            array = flat.reshape(self.shape)
        return _restored(array, self.dtype, self.library)

    def vector(self, v: Array) -> np.ndarray:
        """A per-channel vector as the drivers take it; they do not write to it."""
        array = self._memory(v)
        if array.shape != (self.channels,):
            raise _misfit("a vector", (self.channels,), array.shape)
        is_ready = array.dtype is self.vector_dtype and array.flags.carray
        return array if is_ready else np.array(array, self.vector_dtype)

    def new_vector(self) -> np.ndarray:
        """Room for a per-channel result."""
        return np.empty(self.channels, self.vector_dtype)

    def give(self, vector: np.ndarray) -> Array:
        """A per-channel result in the library of the input."""
        if vector.dtype != self.vector_dtype:
            vector = vector.astype(self.vector_dtype)
        return vector if self.library == "numpy" else _restored(vector, "float32", self.library)

    @np.errstate(all="ignore")
    def inverse_deviation(self, variance: Array, epsilon: float) -> np.ndarray:
        return 1 / np.sqrt(np.array(self.vector(variance), np.float64) + epsilon)

    def whole(self, data: Any, results: Any, vectors: Any, made: Any, epsilon: float) -> None:
        """Sweep `data` twice, for the per-channel results in `made` and for the `results`."""
        self.run(drivers.whole, data, results, vectors, made, epsilon, *self.tasks)

    def products(self, g: np.ndarray, x: np.ndarray, mean: Array) -> np.ndarray:
        """The sums of g and of g (x - mean) of each channel, in float64."""
        sums = np.empty((self.plan.chunks, 2, self.plan.pad))
        self.run(drivers.only_sums, (g, x), *self.tasks, sums, self.coefficients(self.vector(mean)))
        return sums[:, :, : self.channels].sum(axis=0)

    def combined(self, data: Any, *coefficients: np.ndarray) -> Array:
        """The result of one sweep of `data` with given coefficients."""
        y = self.empty()
        c = self.coefficients(*coefficients)
        self.run(drivers.only_results, data, (y,), *self.tasks, c)
        return self.result(y)

    def coefficients(self, *rows_: np.ndarray) -> np.ndarray:
        """Coefficients per lane, given per channel."""
        c = np.empty((len(rows_), self.plan.pitch), self.vector_dtype)
        for i, row in enumerate(rows_):
            c[i, : self.plan.lanes].reshape(-1, self.channels)[:] = row
        return c

    def run(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Run a driver."""
        if (kernel, self.dtype, len(arguments[0])) not in _MET:
            _compile(kernel, self.dtype, arguments)
        kernel(*arguments)

    @property
    def tasks(self) -> tuple[Any, ...]:
        """The plan as the drivers take it, and as many threads as the size is worth."""
        return self.plan.vectors, *workers(self.threads, self.library == "torch")


def workers(threads: int, is_torchs: bool) -> tuple[np.ndarray, int]:
    """The board on which a kernel finds helpers, and how many it may have, where the work is worth so many threads."""
    if threads == 1:
        return team.board(0), 0
    helpers = min(pool.size(), threads) - 1
    if is_torchs and (board := team.torchs_board()) is not None:
        return board, min(helpers, sys.modules["torch"].get_num_threads() - 1)
    return team.board(helpers), helpers


_NARROW, _WIDE = np.dtype(np.float32), np.dtype(np.float64)


# `numpy.moveaxis` takes 3 us, which a call on 1 MB feels.


@lru_cache
def _last(ndim: int, axis: int) -> tuple[int, ...]:
    """The order of axes with `axis` moved to the end."""
    return (*range(axis), *range(axis + 1, ndim), axis)


@lru_cache
def _from_last(ndim: int, axis: int) -> tuple[int, ...]:
    """The order of axes with the last one moved to `axis`."""
    return (*range(axis), ndim - 1, *range(axis, ndim - 1))


def _plain(x: Array) -> np.ndarray:
    """An array's memory as NumPy, bfloat16 tensors of torch as bits."""
    if type(x) is np.ndarray:
        return x
    if library_of(x) == "torch":
        x = x.detach()
        return tensor_memory(x.view(sys.modules["torch"].int16) if dtype_of(x) == "bfloat16" else x)
    return np.asarray(x)


def _misfit(what: str, shape: tuple[int, ...], got: tuple[int, ...]) -> InvalidArgumentError:
    return InvalidArgumentError(f"{what} of batch norm must have the shape {list(shape)}, got {list(got)}")


def _restored(array: np.ndarray, dtype: str, library: str) -> Array:
    if library == "torch":
        torch = sys.modules["torch"]
        if dtype in _BITS:
            return torch.from_numpy(array.view(np.int16)).view(getattr(torch, dtype))
        return torch.from_numpy(array)
    if dtype in _BITS:
        array = array.view(dtype_in("numpy", dtype))
    return sys.modules["jax"].numpy.asarray(array) if library == "jax" else array


class _Writable:
    """Read-only memory under another flag, so that Numba does not compile everything twice; the kernels only read
    it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.__array_interface__["data"][0], False)}


def _writable(array: np.ndarray) -> np.ndarray:
    return np.asarray(_Writable(array)) if array.flags.aligned else array.copy()


# Drivers that were compiled, or found in the cache on disk, for a dtype and an order in this process.
_MET: set[tuple[Any, str, int]] = set()


def _compile(kernel: Any, dtype: str, arguments: Sequence[Any]) -> None:
    """Compile a driver for these arguments, and say so if it took long."""
    with _told(kernel.__name__, dtype):
        kernel.compile(tuple(map(typeof, arguments)))
    _MET.add((kernel, dtype, len(arguments[0])))


@lru_cache
def entry_of(name: str, dtype: str) -> Any:
    """The C function called `name` in `entries`, for a dtype."""
    from . import entries

    with _told(name, dtype):
        found = entries.compiled(name, dtype)
    _MET.add((drivers.inference if name == "inference" else drivers.whole, dtype, 2 if name == "backward" else 1))
    return found


@contextmanager
def _told(name: str, dtype: str) -> Iterator[None]:
    """Say that something was compiled if that took long."""
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    if seconds > 1:
        _log.warning("compiled %s for %s in %.1f s; weft.kernels.warmup() does it ahead", name, dtype, seconds)


# ---- the kernels


def batch_norm(
    x: Array, scale: Array, offset: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    if mask is None and (found := direct.forward(x, scale, offset, epsilon, axis)) is not None:
        return found
    layout = _Layout(x, axis, mask, 1)
    if not layout.count:
        return reference.batch_norm(x, scale, offset, epsilon, axis, mask)
    y = layout.empty()
    mean, variance = layout.new_vector(), layout.new_vector()
    vectors = layout.vector(scale), layout.vector(offset)
    layout.whole((layout.x,), (y,), vectors, (mean, variance), epsilon)
    return layout.result(y), layout.give(mean), layout.give(variance)


def batch_norm_inference(
    x: Array, scale: Array, offset: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> Array:
    """See the reference."""
    if mask is None and (found := direct.inference(x, scale, offset, mean, variance, epsilon, axis)) is not None:
        return found
    layout = _Layout(x, axis, mask, 1, once=True)
    if not layout.count:
        return reference.batch_norm_inference(x, scale, offset, mean, variance, epsilon, axis, mask)
    y = layout.empty()
    vectors = layout.vector(scale), layout.vector(offset), layout.vector(mean), layout.vector(variance)
    layout.run(drivers.inference, (layout.x,), (y,), vectors, epsilon, *layout.tasks)
    return layout.result(y)


def batch_norm_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    if mask is None and (found := direct.backward(g, x, scale, mean, variance, epsilon, axis)) is not None:
        return found
    layout = _Layout(x, axis, mask, 2)
    if not layout.count:
        return reference.batch_norm_grad(g, x, scale, mean, variance, epsilon, axis, mask)
    y = layout.empty()
    scale_grad, offset_grad = layout.new_vector(), layout.new_vector()
    vectors = layout.vector(scale), layout.vector(variance), layout.vector(mean)
    layout.whole((layout.like(g), layout.x), (y,), vectors, (scale_grad, offset_grad), epsilon)
    return layout.result(y), layout.give(scale_grad), layout.give(offset_grad)


def batch_norm_inference_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    layout = _Layout(x, axis, mask, 2, once=True)
    if not layout.count:
        return reference.batch_norm_inference_grad(g, x, scale, mean, variance, epsilon, axis, mask)
    flat, r = layout.like(g), layout.inverse_deviation(variance, epsilon)
    sum_g, sum_gx = layout.products(flat, layout.x, mean)
    zeros = np.zeros(1, layout.vector_dtype)
    x_grad = layout.combined((flat,), zeros, layout.vector(scale) * r, zeros)
    return x_grad, layout.give(sum_gx * r), layout.give(sum_g)


def batch_norm_grad_grad(
    g: Array, x: Array, scale: Array, u: Array, a: Array, b: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    layout = _Layout(x, axis, mask, 3)
    if not layout.count:
        return reference.batch_norm_grad_grad(g, x, scale, u, a, b, epsilon, axis, mask)
    results = layout.empty(), layout.empty()
    scale_grad = layout.new_vector()
    vectors = layout.vector(scale), layout.vector(a), layout.vector(b)
    layout.whole((layout.like(g), layout.x, layout.like(u)), results, vectors, (scale_grad,), epsilon)
    return layout.result(results[0]), layout.result(results[1]), layout.give(scale_grad)


def batch_norm_inference_grad_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, u: Array, a: Array, b: Array,
    epsilon: float, axis: int, mask: Array | None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """See the reference."""
    layout = _Layout(x, axis, mask, 3, once=True)
    if not layout.count:
        kernel = reference.batch_norm_inference_grad_grad
        return kernel(g, x, scale, mean, variance, u, a, b, epsilon, axis, mask)
    flat_g, flat_u, r = layout.like(g), layout.like(u), layout.inverse_deviation(variance, epsilon)
    zeros = np.zeros(layout.channels, layout.vector_dtype)
    _, sum_ug = layout.products(flat_u, flat_g, zeros)
    factor, ar = layout.vector(scale) * r, layout.vector(a) * r
    by_u = layout.combined((flat_u, layout.x), layout.vector(mean), factor, ar, layout.vector(b), zeros)
    return by_u, layout.combined((flat_g,), zeros, ar, zeros), layout.give(sum_ug * r)


def warm_up(dtypes: Sequence[str]) -> None:
    """Compile every driver for some dtypes, or find it in the cache on disk."""
    for dtype in dtypes:
        x = np.zeros((2, 2), _BITS.get(dtype, dtype)).view(dtype_in("numpy", dtype))
        v = np.ones(2, np.float64 if dtype == "float64" else np.float32)
        batch_norm(x, v, v, 1.0, 1, None)
        batch_norm_inference(x, v, v, v, v, 1.0, 1, None)
        batch_norm_grad(x, x, v, v, v, 1.0, 1, None)
        batch_norm_grad_grad(x, x, v, x, v, v, 1.0, 1, None)
        batch_norm_inference_grad_grad(x, x, v, v, v, x, v, v, 1.0, 1, None)
