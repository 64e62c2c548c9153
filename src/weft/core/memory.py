"""Memory that stays as it is while a kernel uses it.

Another thread can write to an array during a call, resize it, or change its shape. So a kernel takes lengths from the very
view whose memory it reads, `hold` keeps that memory in its place, and what says where to read or write (splits, indices,
lengths) is an `own` copy.

NumPy does not resize an array that has a weak reference, not even with `refcheck=False`. torch does not resize a storage
that a NumPy array was made of. What neither library can prevent is in docs/differences.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import numpy as np


def hold(x: np.ndarray) -> Any:
    """An object that keeps the memory of `x` in its place for as long as the object lives."""
    base = x.base
    while isinstance(base, np.ndarray):
        x, base = base, base.base
    return ref(x)


def views(arrays: Iterable[np.ndarray]) -> tuple[list[np.ndarray], list[Any]]:
    """Views of `arrays` that nobody else has, so that their shapes stay, and what holds their memory."""
    given = list(arrays)
    held = [hold(x) for x in given]
    return [x.view(np.ndarray) for x in given], held


def own(x: np.ndarray) -> np.ndarray:
    """The numbers of `x` in an array that nobody else has, over memory that nobody can write to.

    The memory is that of a `bytes` object: NumPy refuses to make an array over one writable. An array that is all of such
    an object is not copied.
    """
    held = hold(x)
    source = x.view(np.ndarray)
    data: Any = x.base
    if type(data) is not bytes or len(data) != source.nbytes or not source.flags.c_contiguous:
        data = (source if source.flags.c_contiguous else source.copy()).tobytes()
    del held
    return np.ndarray(source.shape, source.dtype, data)
