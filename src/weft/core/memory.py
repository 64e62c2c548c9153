"""Memory that stays valid while a kernel uses it.

During a call, another thread can write to an array, resize it, or change its shape. So a kernel takes lengths from the view whose
memory it reads, `hold` prevents a resize, and a kernel uses `own` copies of splits, indices and lengths.

NumPy does not resize an array that has a weak reference, not even with `refcheck=False`. torch does not resize a storage
that a NumPy array was made from. docs/differences.md lists what neither library can prevent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import numpy as np

from ..errors import InvalidArgumentError


def hold(x: np.ndarray) -> Any:
    """An object that prevents a resize of the memory of `x` as long as the object lives."""
    base = x.base
    while isinstance(base, np.ndarray):
        x, base = base, base.base
    return ref(x)


def views(arrays: Iterable[np.ndarray]) -> tuple[list[np.ndarray], list[Any]]:
    """New views of `arrays`, whose shapes nobody else can change, and the objects that hold their memory."""
    given = list(arrays)
    held = [hold(x) for x in given]
    return [x.view(np.ndarray) for x in given], held


def own(x: np.ndarray) -> np.ndarray:
    """A copy of `x` over memory that nobody can write to.

    The memory belongs to a `bytes` object: NumPy refuses to make an array over one writable. An array over a whole `bytes`
    object is not copied.
    """
    held = hold(x)
    source = x.view(np.ndarray)
    data: Any = x.base
    if type(data) is not bytes or len(data) != source.nbytes or not source.flags.c_contiguous:
        data = (source if source.flags.c_contiguous else source.copy()).tobytes()
    del held
    return np.ndarray(source.shape, source.dtype, data)


def tensor_memory(x: Any) -> np.ndarray:
    """A detached CPU tensor of torch as a NumPy array over the same memory.

    torch does not resize a storage that a NumPy array was made from. A storage that was resized before is refused unless it has
    room for all elements of the tensor.
    """
    try:
        found: np.ndarray = x.numpy()
    except RuntimeError:  # a lazy negative or conjugate view
        return x.numpy(force=True)
    if found.size and x.untyped_storage().nbytes() < _end_of(x) * found.itemsize:
        raise InvalidArgumentError(
            f"a tensor's storage must have room for its elements, got the shape {list(x.shape)} in a storage of "
            f"{x.untyped_storage().nbytes()} bytes: it was resized"
        )
    return found


def _end_of(x: Any) -> int:
    """The offset behind the last element of a non-empty tensor, in elements from the start of its storage."""
    if x.is_contiguous():
        return int(x.storage_offset() + x.numel())
    spans = [(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return int(x.storage_offset() + sum(spans) + 1)
