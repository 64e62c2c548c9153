"""Memory for large results, taken up again when the last array on it is gone.

Memory fresh from the system is cleared page by page as it is first touched, which can cost more than the kernel
that writes it. The C library keeps freed blocks of up to 32 MiB itself; larger ones go back to the system, unless
they are kept here. What is kept is bounded, and nothing is ever lent twice at once. Whoever asks must write every
byte.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from typing import Any

import numpy as np

LARGE = 1 << 20  # bytes from which a buffer is worth keeping
KEPT = 256 << 20  # bytes of idle memory at most

_idle: list[mmap.mmap] = []
_lock = threading.Lock()


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array nobody else holds, its content arbitrary."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or dtype.hasobject:
        return np.empty(shape, dtype)
    memory = _take(size)
    # NumPy makes the array that lies directly on foreign memory the base of every view: when it goes, all have gone.
    base = np.frombuffer(memory, np.uint8)
    weakref.finalize(base, _give, memory).atexit = False
    return base[:size].view(dtype).reshape(shape)


def _take(size: int) -> mmap.mmap:
    """The smallest idle buffer that is neither too small nor much too large, or a new one."""
    with _lock:
        fitting = [i for i, memory in enumerate(_idle) if size <= len(memory) <= size + size // 2]
        if fitting:
            return _idle.pop(min(fitting, key=lambda i: len(_idle[i])))
    # Private: by default Python shares such memory with forked children, who would then write into each other's results.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give(memory: mmap.mmap) -> None:
    """Keep a buffer for the next one who asks, and let the oldest go where it becomes too much."""
    # Without waiting: a collection may run this inside `_take`, on the thread that holds the lock.
    if len(memory) <= KEPT and _lock.acquire(blocking=False):
        _idle.append(memory)
        while sum(map(len, _idle)) > KEPT:
            _idle.pop(0)
        _lock.release()
