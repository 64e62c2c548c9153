"""Operations on elements of a TensorArray, by their backend.

The backend of an element is its library: "numpy" (autograd's boxes included, the traced form of NumPy arrays), "torch", "jax",
or "opaque" for values of no library (variants, handles), which are stored and returned unchanged. Elements keep their autodiff
graph: nothing here detaches them, or writes to a tensor that a graph may need.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.arrays import (
    NUMERIC_DTYPES,
    Array,
    asarray,
    dtype_of,
    get_library,
    is_concrete,
    library_of,
    memory,
    namespace,
)
from ..core.inputs import is_own, shown
from ..core.memory import hold
from ..core.shapes import Shape, show
from ..errors import InvalidArgumentError, ResourceExhaustedError

#: The dtypes whose values can be added. These and bool have a zero.
ADDABLE = frozenset(NUMERIC_DTYPES) - {"bool"}


def numpy_dtype(name: str) -> np.dtype | None:
    """The NumPy dtype called `name`; None if NumPy has no such numbers."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            return None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name) if name in ADDABLE or name == "bool" else None


def backend_of(value: object) -> str:
    library = library_of(value)
    return "numpy" if library == "autograd" else library or "opaque"


def as_array(value: Any, dtype: str, backend: str | None) -> Any:
    """Convert a Python value (a number, text, nested lists) to an array of `dtype` and `backend`; return an array unchanged."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _text(value) if dtype == "string" else np.asarray(value)
    if library_of(value) is not None or is_own(value):
        return value
    if dtype == "string":
        return _text(np.asarray(value, dtype=object))
    found = np.asarray(value)
    wanted = numpy_dtype(dtype)
    if wanted is None or wanted.kind not in _TAKES.get(found.dtype.kind, ""):
        return found
    with np.errstate(all="ignore"):
        cast = found.astype(wanted)
    if wanted.kind in "iu" and not (cast == found).all():
        raise InvalidArgumentError(f"value must be representable in {dtype}, got {shown(value)}")
    return cast if backend in (None, "numpy", "opaque") else asarray(cast, str(backend))


# The NumPy kinds of dtype that Python numbers of a kind can be converted to.
_TAKES = {"b": "b", "i": "iufcV", "u": "iufcV", "f": "fcV", "c": "c"}


def _text(value: Any) -> np.ndarray:
    """Convert text of any NumPy dtype to an array of objects."""
    found = np.asarray(value)
    if found.dtype.kind not in "SUTO":
        return found
    objects = found.astype(object)
    if not all(isinstance(x, (str, bytes)) for x in objects.flat):
        raise InvalidArgumentError("an array of objects must hold text only")
    return objects


def own_copy(value: Array, backend: str) -> Array:
    """Copy `value` to memory that no caller writes to; immutable values are returned as they are."""
    if backend == "torch":
        return value.clone()
    if type(value) is np.ndarray:
        held = hold(value)
        copy = value.astype(value.dtype.newbyteorder("="))
        del held
        return copy
    return value


def output(value: Array, backend: str, last: bool) -> Array:
    """Return a stored element to a caller: itself if this is its `last` use and it owns its memory, else a copy."""
    if backend == "torch":
        return value if last and not get_library(backend).is_view(value) else value.clone()
    if type(value) is np.ndarray:
        return value if last and value.base is None else value.copy()
    return value


def added(stored: Array, value: Array, backend: str) -> Array:
    """`stored + value`, in the memory of `stored` unless a graph may need it."""
    if backend == "numpy" and type(stored) is np.ndarray and type(value) is np.ndarray:
        return np.add(stored, value, out=stored)
    if backend == "torch" and dtype_of(stored) in ("uint16", "uint32", "uint64"):  # torch adds only signed ones
        signed = getattr(sys.modules["torch"], dtype_of(stored)[1:])
        return (stored.view(signed) + value.view(signed)).view(stored.dtype)
    if backend == "torch" and not _is_graphed(stored) and not _is_graphed(value):
        return stored.add_(value)
    return stored + value


def _is_graphed(value: Array) -> bool:
    return get_library("torch").has_graph(value)


def zeros(shape: Shape, dtype: str, backend: str, device: Any) -> Array:
    """Zeros of `dtype`; refused if they do not fit in memory."""
    check_room(shape, dtype)
    if backend == "torch":
        torch = sys.modules["torch"]
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
    if backend == "jax":
        return sys.modules["jax"].numpy.zeros(shape, dtype)
    return np.zeros(shape, numpy_dtype(dtype))


def check_room(shape: Shape, dtype: str) -> None:
    """Raise if an array of this shape does not fit in memory."""
    if len(shape) > 64:
        raise InvalidArgumentError(f"an array can have at most 64 dimensions, got {len(shape)}")
    found = numpy_dtype(dtype)
    size = math.prod(shape) * (8 if found is None else found.itemsize)
    if size > memory():
        raise ResourceExhaustedError(f"there is no room for {dtype}{show(shape)}: {size} bytes")


def join(how: str, values: Sequence[Array], backend: str) -> Array:
    """A new array with the elements as its rows ("stack"), or one below the other ("concatenate")."""
    if backend == "opaque":
        method = getattr(type(values[0]), "stack" if how == "stack" else "concat", None)  # of VariantArray
        if method is None:
            raise InvalidArgumentError(f"elements of dtype {dtype_of(values[0])} cannot be joined")
        return method(values)
    if backend == "jax" and _on_host(values):
        return sys.modules["jax"].numpy.asarray(getattr(np, how)([np.asarray(v) for v in values]))
    return getattr(_namespace(values, backend), how)(values)


def _namespace(values: Sequence[Array], backend: str) -> Any:
    if backend == "torch":
        return sys.modules["torch"]
    if backend == "jax":
        return sys.modules["jax"].numpy
    return namespace("autograd") if any(library_of(v) == "autograd" for v in values) else np


def unstack(value: Array, backend: str) -> Iterator[Array]:
    """The rows of `value`, as copies, cut in one node of its graph."""
    if backend == "torch":
        return iter(value.clone().unbind(0))
    if backend == "jax":
        return iter(_cut(value, [1] * value.shape[0], squeeze=True))
    return (own_copy(value[i, ...] if type(value) is np.ndarray else value[i], backend) for i in range(value.shape[0]))


def split(value: Array, lengths: Sequence[int], backend: str) -> Iterator[Array]:
    """Pieces of `lengths` rows, as copies, cut in one node of the graph."""
    if backend == "torch":
        return iter(value.clone().split(lengths))
    if backend == "jax":
        return iter(_cut(value, lengths, squeeze=False))
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64)).tolist()
    return (own_copy(value[end - n : end], backend) for n, end in zip(lengths, ends, strict=True))


def _cut(value: Array, lengths: Sequence[int], squeeze: bool) -> Sequence[Array]:
    jax = sys.modules["jax"]
    if _on_host([value]):
        ends = np.cumsum(np.asarray(lengths, dtype=np.int64)).tolist()
        held = np.asarray(value)
        return jax.device_put([held[e - 1] if squeeze else held[e - n : e] for n, e in zip(lengths, ends, strict=True)])
    if not lengths:
        return []
    parts = jax.lax.split(value, tuple(lengths))
    return [p[0] for p in parts] if squeeze else parts


def _on_host(values: Sequence[Array]) -> bool:
    """Whether JAX arrays can be read as NumPy arrays without a copy: concrete, and in the memory of the CPU."""
    return all(is_concrete(v) and len(v.devices()) == 1 and next(iter(v.devices())).platform == "cpu" for v in values)
