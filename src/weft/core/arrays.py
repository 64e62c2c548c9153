"""The library, device and dtype of an array, and the operations on arrays that do not depend on their library.

Only NumPy is imported here: an array of another library can only exist if that library is in `sys.modules`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Annotated, Any, TypeAlias

import numpy as np

from ..errors import ArgumentTypeError, InvalidArgumentError, OpError
from . import adapters
from .libraries.base import Library
from .memory import tensor_memory as tensor_memory

#: An array of any library. To the type checker it is Any; `op` tells inputs from attributes by the annotation.
Array: TypeAlias = Annotated[Any, "array"]

#: An array whose values are read on the host: indices, ids, splits, sizes. It stays a NumPy array beside arrays of JAX, which would
#: cut int64 to int32, and may be a NumPy array beside tensors of torch.
Host: TypeAlias = Annotated[Any, "host"]

#: An array that is passed on unchanged, as the same object.
Passthrough: TypeAlias = Annotated[Any, "passthrough"]

#: An array of variants. An op that takes or returns one is never recorded: the arrays inside have their own graph.
Variant: TypeAlias = Annotated[Any, "variant"]

#: The handle of a resource. An op that takes one is never recorded: the arrays in the resource have their own graph.
Handle: TypeAlias = Annotated[Any, "handle"]

# type -> library name, None for types that are no arrays.
_LIBRARY: dict[type, str | None] = {np.ndarray: "numpy"}

# library name -> its object.
_OBJECTS: dict[str, Library] = {}


def library_of(x: object) -> str | None:
    """`"numpy"`, `"torch"`, `"jax"` or `"autograd"`; None if `x` is not an array (numbers, lists, text)."""
    kind = type(x)
    try:
        return _LIBRARY[kind]
    except KeyError:
        found = _LIBRARY[kind] = _find_library(x)
        return found


def _find_library(x: object) -> str | None:
    if isinstance(x, (np.ndarray, np.generic)):
        return "numpy"
    for library, paths in _ARRAY_TYPES.items():
        if library in sys.modules and isinstance(x, tuple(filter(None, map(_loaded, paths)))):
            return library
    return None


_ARRAY_TYPES = {
    "torch": ["torch.Tensor"],
    "jax": ["jax.Array", "jax.core.Tracer"],
    "autograd": ["autograd.tracer.Box"],
}


def _loaded(path: str) -> Any:
    """The class at a dotted path; None if its module is not imported, or not yet completely."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def get_library(library: str) -> Library:
    """The library of this name."""
    try:
        return _OBJECTS[library]
    except KeyError:
        found: Library = adapters.of(library, f"{__package__}.libraries").LIBRARY
        _OBJECTS[library] = found
        return found


def get_library_of(x: object) -> Library:
    """The library of an array; NumPy for any other object."""
    return get_library(library_of(x) or "numpy")


def common_library(arrays: Iterable[object]) -> str:
    """The library of all `arrays`; values that are no arrays adapt to the others, and are NumPy's among themselves."""
    found = {library for x in arrays if (library := library_of(x)) is not None}
    if len(found) == 2 and "numpy" in found and "torch" not in found:  # autograd and JAX accept NumPy arrays
        found.discard("numpy")
    if len(found) > 1:
        raise InvalidArgumentError(f"arrays of one call must come from one library, got {sorted(found)}")
    return found.pop() if found else "numpy"


def namespace(library: str) -> Any:
    """The array-API namespace of a library, from array-api-compat if the library's own differs from the standard."""
    return get_library(library).namespace


def device_of(x: Array) -> Any:
    """The device of `x`, hashable; arrays on equal devices can share a batch."""
    return get_library_of(x).device(x)


def is_concrete(x: Array) -> bool:
    """True if the values of `x` are known now: not a tracer of `jax.jit`, nor a fake or meta tensor of torch."""
    return get_library_of(x).is_concrete(x)


def on_host(x: Array) -> bool:
    """True if NumPy can read the memory of `x`."""
    return get_library_of(x).is_on_host(x)


def asarray(x: object, library: str = "numpy", dtype: Any = None) -> Array:
    """`x` as an array of `library`, unchanged if it is one; subclasses of NumPy's array become plain arrays."""
    return get_library(library).asarray(x, dtype)


def host(x: Array) -> np.ndarray:
    """The values of `x` as a NumPy array, without a copy if they are in host memory."""
    return get_library_of(x).host(x)


def index_like(values: np.ndarray, library: str) -> Array:
    """Host integers as they are passed beside arrays of `library`: a CPU tensor for torch, else a NumPy array."""
    return get_library(library).index(values)


@lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """TensorFlow's name of a dtype given as text or as a dtype of NumPy, torch or JAX: `"float32"`, `"bfloat16"`, `"string"`."""
    text = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype)
    text = text.removeprefix("torch.")
    if text in _NAMES:
        return _NAMES[text]
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"a dtype must be one of {', '.join(_NAMES)}, got {text[:64]!r}") from None
    if found.kind in "SUTO":
        return "string"
    return _NAMES.get(found.name, found.name)


def dtype_attribute(given: Any, name: str = "dtype") -> str:
    """TensorFlow's name of the dtype that a caller passed as the attribute `name`."""
    try:
        if _denotes_dtype(given):
            return dtype_name(given)
    except OpError:
        raise
    except Exception:  # the object is not hashable, or its own code raises
        pass
    kind = given if isinstance(given, type) else type(given)
    raise ArgumentTypeError(f"{name} must be a dtype, got {kind.__name__}")


def _denotes_dtype(given: Any) -> bool:
    """False for arrays, and for None and most classes, which NumPy reads as float64 and object."""
    if not isinstance(given, type):
        return given is not None and library_of(given) is None
    is_scalar = issubclass(given, np.generic) or isinstance(getattr(given, "dtype", None), np.dtype)  # `jnp.float32`
    return is_scalar or given in (bool, int, float, complex, str, bytes, object)


#: TensorFlow's names of the dtypes of numbers.
NUMERIC_DTYPES = [
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
_NAMES = {name: name for name in [*NUMERIC_DTYPES, "string", "variant", "resource"]} | {
    "half": "float16", "float": "float32", "double": "float64", "str": "string", "object": "string",
}  # fmt: skip


def dtype_of(x: Array) -> str:
    """TensorFlow's name of the dtype of `x`."""
    return dtype_name(x.dtype)


def dtype_in(library: str, name: str) -> Any:
    """The dtype of a library for a TensorFlow name; strings are objects."""
    return get_library(library).dtype(name)


@cache
def memory() -> int:
    """The bytes of memory of this machine; 1 TiB if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return 1 << 40


def reshaped(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` in another shape; `x` itself if it has that shape."""
    return x if tuple(x.shape) == shape else get_library_of(x).namespace.reshape(x, shape)


def lowest_of(x: Array) -> float | int | bool:
    """The lowest value of the dtype of `x`."""
    name = dtype_of(x)
    if name == "bool":
        return False
    return float("-inf") if "float" in name else int(np.iinfo(name).min)


def first_row(arrays: Sequence[Array]) -> Array:
    """The first row of the first array that has rows."""
    for x in arrays:
        if x.shape[0]:
            return x[:1]
    raise InvalidArgumentError("a batch that is padded must have at least one row, got none")
