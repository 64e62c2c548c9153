"""Memory for large results, taken up again when the last array on it is gone.

Memory fresh from the system is cleared page by page as it is first touched, which can cost more than the kernel
that writes it, and many times more on a virtual machine whose host has to find the page first. What is kept is
bounded, the system may have most of it back when it is short of memory, and nothing is ever lent twice at once.
Whoever asks must write every byte.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import numpy as np

LARGE = 1 << 17  # bytes from which a buffer is worth keeping
HOT = 256 << 20  # bytes of idle memory that are kept as they are; the system may have what is beyond
KEPT = 1 << 30  # bytes of idle memory at most

# By size, the size last used at the end. It is changed in single steps, without a lock: a buffer may come back in the middle of any
# line here, when an array is deleted.
_idle: OrderedDict[int, list[mmap.mmap]] = OrderedDict()


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array nobody else holds, its content arbitrary."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or dtype.hasobject:
        return np.empty(shape, dtype)
    memory = take(size)
    # NumPy makes the array that lies directly on foreign memory the base of every view: when it goes, all have gone.
    base = np.frombuffer(memory, dtype, size // dtype.itemsize)
    loan = _Loan(base, _end)
    loan.memory = memory
    _loans[id(loan)] = loan
    return base.reshape(shape)


class _Loan(weakref.ref):
    """Knows when an array goes, and on which memory it lay: `weakref.finalize` at a third of the price."""

    __slots__ = ("memory",)
    memory: mmap.mmap


_loans: dict[int, _Loan] = {}


def _end(loan: Any) -> None:
    del _loans[id(loan)]
    give(loan.memory)


def take(size: int) -> mmap.mmap:
    """An idle buffer of at least `size` bytes, or a new one; sizes are rounded up by an eighth at most, so that they recur."""
    step = 1 << max(12, size.bit_length() - 4)
    size = -(-size // step) * step
    fitting = _idle.get(size)
    if fitting:
        with suppress(IndexError):  # another thread was faster
            return fitting.pop()
    try:
        return _new(size)
    except (OSError, OverflowError):
        raise MemoryError(f"there is no room for {size} bytes") from None


def _new(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which has no fork either
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked child must not write to ours
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def give(memory: mmap.mmap) -> None:
    """Keep a buffer for the next one who asks, and let others go where it becomes too much."""
    size = len(memory)
    held = idle_bytes() + size
    if held > HOT and hasattr(mmap, "MADV_FREE"):
        memory.madvise(mmap.MADV_FREE)  # its pages stay, and cost nothing to touch, until the system needs them
    if size > KEPT:
        return
    _idle.setdefault(size, []).append(memory)
    with suppress(KeyError):
        _idle.move_to_end(size)
    while held > KEPT:
        held -= _let_go()


def idle_bytes() -> int:
    """How much memory is kept."""
    return sum(size * len(buffers) for size, buffers in list(_idle.items()))


def _let_go() -> int:
    """Give up a buffer of the size that was not used for the longest time; how many bytes it had."""
    for size, buffers in list(_idle.items()):
        with suppress(IndexError):
            buffers.pop()
            return size
    return KEPT  # there is none
