"""Memory for large results, taken up again when the last array on it is gone.

Memory fresh from the system is cleared page by page as it is first touched, which can cost more than the kernel
that writes it. The C library keeps freed blocks of up to 32 MiB itself; larger ones go back to the system, unless
they are kept here. What is kept is bounded, and nothing is ever lent twice at once. Whoever asks must write every
byte.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import numpy as np

LARGE = 1 << 20  # bytes from which a buffer is worth keeping
KEPT = 256 << 20  # bytes of idle memory at most

_idle: list[np.ndarray] = []
_lock = threading.Lock()


class _Lent(np.ndarray):
    """The view every array on a buffer has for its base: when it goes, the buffer comes back."""


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array nobody else holds, its content arbitrary."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or dtype.hasobject:
        return np.empty(shape, dtype)
    memory = _take(size)
    lent = memory.view(_Lent)
    weakref.finalize(lent, _give, memory).atexit = False
    return np.ndarray(shape, dtype, lent)


def _take(size: int) -> np.ndarray:
    """The smallest idle buffer that is neither too small nor much too large, or a new one."""
    with _lock:
        fitting = [i for i, memory in enumerate(_idle) if size <= memory.nbytes <= size + size // 2]
        if fitting:
            return _idle.pop(min(fitting, key=lambda i: _idle[i].nbytes))
    return np.empty(size, np.uint8)


def _give(memory: np.ndarray) -> None:
    """Keep a buffer for the next one who asks, and let the oldest go where it becomes too much."""
    # Without waiting: a collection may run this inside `_take`, on the thread that holds the lock.
    if memory.nbytes <= KEPT and _lock.acquire(blocking=False):
        _idle.append(memory)
        while sum(m.nbytes for m in _idle) > KEPT:
            _idle.pop(0)
        _lock.release()
