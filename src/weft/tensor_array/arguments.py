"""Conversion of the arguments of array ops: handles, int32 scalars, vectors, flows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arrays import Array, dtype_of, host, library_of, namespace
from ..core.inputs import DEEPEST, shown, take
from ..core.memory import own
from ..errors import InvalidArgumentError, OpError
from .elements import Elements
from .values import check_room

_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)


def elements_of(handle: Any) -> Elements:
    """Return the array of a handle, or of a list or array of one handle."""
    if type(handle) is Elements:
        return handle
    held = handle
    for _ in range(DEEPEST):  # a list, or an array of objects, of one handle
        if type(held) is Elements:
            return held
        if not (isinstance(held, (list, tuple)) and len(held) == 1) and not (
            type(held) is np.ndarray and held.size == 1
        ):
            break
        held = held.reshape(-1)[0] if type(held) is np.ndarray else held[0]
    raise InvalidArgumentError(f"handle must be one handle of a TensorArray, got {shown(handle)}")


def int32_scalar(x: Array, name: str) -> int:
    """The value of an int32 scalar; a Python int is one."""
    # The two usual types first: benchmark rows "writes and stack" and "reads" need it.
    if type(x) is np.ndarray and x.dtype is _INT32 and not x.ndim:
        return x.item()
    if type(x) is int and -(2**31) <= x < 2**31:
        return x
    found = _integers(x, "int32", name)
    if found.ndim:
        raise InvalidArgumentError(f"{name} must be a scalar, got the shape {list(found.shape)}")
    return int(found)


def integer_vector(x: Array, dtype: str, name: str) -> np.ndarray:
    """An int32 or int64 vector as a host int64 array that no caller can change; a Python list of ints is one."""
    found = _integers(x, dtype, name)
    if found.ndim != 1:
        raise InvalidArgumentError(f"{name} must be a vector, got the shape {list(found.shape)}")
    check_room(found.shape, "int64")
    return own(found.astype(np.int64, copy=False))


def _integers(x: Array, dtype: str, name: str) -> np.ndarray:
    if library_of(x) is None:
        x = _from_python(x, dtype, name)
    # JAX by default has converted int64 to int32 before.
    if (found := dtype_of(x)) != dtype and not (library_of(x) == "jax" and found == "int32"):
        raise InvalidArgumentError(f"{name} must be of dtype {dtype}, got {found}")
    return host(x)


def _from_python(x: Any, dtype: str, name: str) -> np.ndarray:
    """Convert Python ints that fit, or an empty list, to an array of `dtype`; anything else as NumPy does."""
    try:
        found = np.asarray(take(name, x))
    except (ValueError, TypeError) as error:
        if isinstance(error, OpError):
            raise
        raise InvalidArgumentError(f"{name} must be integers in lists of equal lengths, got {shown(x)}") from None
    if not found.size and found.dtype.kind in "iuf":
        return found.astype(dtype)
    limits = np.iinfo(dtype)
    fits = found.dtype.kind == "i" and limits.min <= found.min() and found.max() <= limits.max
    return found.astype(dtype) if fits else found


def flow(x: Array) -> Array:
    """Check a flow: float32 of any shape, whose value is ignored; a Python number is accepted."""
    if type(x) is np.ndarray and x.dtype is _FLOAT32:
        return x
    if type(x) in (int, float):
        return np.zeros((), _FLOAT32)
    if library_of(x) is None or dtype_of(x) != "float32":
        found = type(x).__name__ if library_of(x) is None else dtype_of(x)
        raise InvalidArgumentError(f"flow_in must be of dtype float32, got {found}")
    return x


def zero_flow(like: object) -> Array:
    """Return a new flow of the library of `like`."""
    library = library_of(like)
    if library in (None, "numpy", "autograd"):
        return np.zeros((), _FLOAT32)
    xp = namespace(str(library))
    return xp.zeros((), dtype=xp.float32)
