"""A pool of memory for large results: a buffer returns to it when the last array on it is deleted.

Fresh memory is cleared page by page when it is first touched, which can take longer than the kernel that writes it. The pool is
bounded, and the system may reclaim most of it when memory is short. The content of a buffer is arbitrary.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import OrderedDict
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

from .choice import is_installed

SHARED = 8 << 20  # bytes from which several threads copy
LARGE = 1 << 17  # bytes from which a result uses the pool
HOT = 256 << 20  # bytes of idle memory from which the system may reclaim the rest
KEPT = 1 << 30  # bytes of idle memory at most

# Idle buffers by size, the size used last at the end. It is changed in atomic steps without a lock: a buffer may return in the
# middle of any line here, when an array is deleted.
_idle: OrderedDict[int, list[mmap.mmap]] = OrderedDict()


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return a new array with arbitrary content."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or dtype.hasobject:
        return np.empty(shape, dtype)
    memory = take(size)
    # Every view has this array as its base. When it is deleted, no array on the memory is left.
    base = np.frombuffer(memory, dtype, size // dtype.itemsize)
    loan = _Loan(base, _end)
    loan.memory = memory
    _loans[id(loan)] = loan
    return base.reshape(shape)


def copy(out: np.ndarray, rows: np.ndarray) -> None:
    """Copy `rows` to `out`, on several threads if they are large."""
    if out.nbytes < SHARED or not is_installed("native") or not import_module("weft._native").copy(out, rows):
        out[...] = rows


class _Loan(weakref.ref):
    """A weak reference to an array, with its memory: cheaper than `weakref.finalize`."""

    __slots__ = ("memory",)
    memory: mmap.mmap


_loans: dict[int, _Loan] = {}


def _end(loan: Any) -> None:
    del _loans[id(loan)]
    give(loan.memory)


def take(size: int) -> mmap.mmap:
    """Return an idle or new buffer of at least `size` bytes; sizes are rounded up by at most an eighth, so that they recur."""
    step = 1 << max(12, size.bit_length() - 4)
    size = -(-size // step) * step
    fitting = _idle.get(size)
    if fitting:
        with suppress(IndexError):  # another thread took it
            return fitting.pop()
    try:
        return _new(size)
    except (OSError, OverflowError):
        raise MemoryError(f"there is no room for {size} bytes") from None


def _new(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not shared with forked children
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def give(memory: mmap.mmap) -> None:
    """Return a buffer to the pool, and free others if the pool becomes too large."""
    size = len(memory)
    held = idle_bytes() + size
    if held > HOT and hasattr(mmap, "MADV_FREE"):
        memory.madvise(mmap.MADV_FREE)  # its pages stay until the system needs them
    if size > KEPT:
        return
    _idle.setdefault(size, []).append(memory)
    with suppress(KeyError):
        _idle.move_to_end(size)
    while held > KEPT:
        held -= _free_one()


def idle_bytes() -> int:
    """The bytes of idle memory."""
    return sum(size * len(buffers) for size, buffers in list(_idle.items()))


def _free_one() -> int:
    """Free a buffer of the least recently used size; return its bytes."""
    for size, buffers in list(_idle.items()):
        with suppress(IndexError):
            buffers.pop()
            return size
    return KEPT  # the pool is empty
