"""What an array does with its elements, by the library they come from.

Elements keep their own graph: nothing here detaches them, and nothing writes to a tensor that a graph may need.
autograd's boxes stand beside NumPy arrays, of which they are the traced form. What belongs to no library (variants,
handles) is opaque: it is kept and handed out as it is.
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

#: The dtypes that can be added; all of these and bool have a zero.
ADDABLE = frozenset(NUMERIC_DTYPES) - {"bool"}


def numpy_dtype(name: str) -> np.dtype | None:
    """The NumPy dtype called `name`; None for what NumPy does not hold as numbers."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            return None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name) if name in ADDABLE or name == "bool" else None


def kin_of(value: object) -> str:
    """The library whose elements `value` can stand beside: `"numpy"` for autograd too, `"opaque"` for what has none."""
    library = library_of(value)
    return "numpy" if library == "autograd" else library or "opaque"


def plain(value: Any, dtype: str, kin: str | None) -> Any:
    """A Python value (a number, text, nested lists) as an array of `dtype` and `kin`; an array as it is."""
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
    return cast if kin in (None, "numpy", "opaque") else asarray(cast, str(kin))


# The kinds of dtype that Python numbers of a kind can become.
_TAKES = {"b": "b", "i": "iufcV", "u": "iufcV", "f": "fcV", "c": "c"}


def _text(value: Any) -> np.ndarray:
    """Text of any NumPy dtype as an array of objects."""
    found = np.asarray(value)
    if found.dtype.kind not in "SUTO":
        return found
    objects = found.astype(object)
    if not all(isinstance(x, (str, bytes)) for x in objects.flat):
        raise InvalidArgumentError("an array of objects must hold text only")
    return objects


def own(value: Array, kin: str) -> Array:
    """`value` in memory that nobody else writes to."""
    if kin == "torch":
        return value.clone()
    if type(value) is np.ndarray:
        held = hold(value)
        copy = value.astype(value.dtype.newbyteorder("="))
        del held
        return copy
    return value


def handed_out(value: Array, kin: str, last: bool) -> Array:
    """A stored element for a caller: itself if this is its `last` use and it owns its memory, else a copy."""
    if kin == "torch":
        return value if last and not get_library(kin).is_view(value) else value.clone()
    if type(value) is np.ndarray:
        return value if last and value.base is None else value.copy()
    return value


def added(stored: Array, value: Array, kin: str) -> Array:
    """`stored + value`, in the memory of `stored` unless a graph may need it."""
    if kin == "numpy" and type(stored) is np.ndarray and type(value) is np.ndarray:
        return np.add(stored, value, out=stored)
    if kin == "torch" and not _is_graphed(stored) and not _is_graphed(value):
        return stored.add_(value)
    return stored + value


def _is_graphed(value: Array) -> bool:
    return get_library("torch").has_graph(value)


def zeros(shape: Shape, dtype: str, kin: str, device: Any) -> Array:
    """Zeros of `dtype`, where there is room for them."""
    check_room(shape, dtype)
    if kin == "torch":
        torch = sys.modules["torch"]
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
    if kin == "jax":
        return sys.modules["jax"].numpy.zeros(shape, dtype)
    return np.zeros(shape, numpy_dtype(dtype))


def check_room(shape: Shape, dtype: str) -> None:
    """Raise unless an array of this shape could be in memory."""
    if len(shape) > 64:
        raise InvalidArgumentError(f"an array can have at most 64 dimensions, got {len(shape)}")
    found = numpy_dtype(dtype)
    size = math.prod(shape) * (8 if found is None else found.itemsize)
    if size > memory():
        raise ResourceExhaustedError(f"there is no room for {dtype}{show(shape)}: {size} bytes")


def stack(values: Sequence[Array], kin: str) -> Array:
    """A new array with the elements as its rows."""
    if kin == "jax" and _on_host(values):
        return _jax().asarray(np.stack([np.asarray(v) for v in values]))
    if kin == "opaque":
        return _opaque(values, "stack")
    return _namespace(values, kin).stack(values)


def concat(values: Sequence[Array], kin: str) -> Array:
    """A new array with the elements one below the other."""
    if kin == "jax" and _on_host(values):
        return _jax().asarray(np.concatenate([np.asarray(v) for v in values]))
    if kin == "opaque":
        return _opaque(values, "concat")
    return _namespace(values, kin).concatenate(values)


def rows_of(value: Array, kin: str) -> Iterator[Array]:
    """The rows of `value`, behind one node of its graph, none of them in memory that the caller may write to."""
    if kin == "torch":
        return iter(value.clone().unbind(0))
    if kin == "jax":
        return iter(_cut(value, [1] * value.shape[0], squeeze=True))
    return (own(value[i, ...] if type(value) is np.ndarray else value[i], kin) for i in range(value.shape[0]))


def pieces_of(value: Array, lengths: Sequence[int], kin: str) -> Iterator[Array]:
    """Pieces of `lengths` rows, in the same way."""
    if kin == "torch":
        return iter(value.clone().split(lengths))
    if kin == "jax":
        return iter(_cut(value, lengths, squeeze=False))
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64)).tolist()
    return (own(value[end - n : end], kin) for n, end in zip(lengths, ends, strict=True))


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
    """Whether JAX arrays can be read as NumPy ones at no cost: all known now, in the memory of the CPU."""
    return all(is_concrete(v) and len(v.devices()) == 1 and next(iter(v.devices())).platform == "cpu" for v in values)


def _jax() -> Any:
    return sys.modules["jax"].numpy


def _namespace(values: Sequence[Array], kin: str) -> Any:
    if kin == "torch":
        return sys.modules["torch"]
    if kin == "jax":
        return _jax()
    return namespace("autograd") if any(library_of(v) == "autograd" for v in values) else np


def _opaque(values: Sequence[Any], how: str) -> Any:
    join = getattr(type(values[0]), how, None)
    if join is None:
        raise InvalidArgumentError(f"elements of dtype {dtype_of(values[0])} cannot be put together")
    return join(values)
