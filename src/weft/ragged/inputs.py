"""What the ragged ops share: the values that they take, the dtypes of splits, and the room for results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.arrays import (
    NUMERIC_DTYPES,
    Array,
    device_of,
    dtype_attribute,
    dtype_of,
    is_concrete,
    library_of,
    memory,
    namespace,
)
from ..core.inputs import is_own, take
from ..errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError

#: The dtypes a variant can hold.
HOLDABLE = frozenset([*NUMERIC_DTYPES, "string"])
_TEXT = {str, bytes, np.str_, np.bytes_}


def is_text(x: np.ndarray) -> bool:
    """True if all elements of an object array are text."""
    return set(map(type, x.reshape(-1).tolist())) <= _TEXT


def empty_text(values: Array) -> str | bytes:
    """The empty text that fills gaps between `values`: bytes if they are bytes."""
    return b"" if values.size and isinstance(values.flat[0], bytes) else ""


def holdable(name: str, x: Any) -> Array:
    """Convert `x` to an array that a variant can hold; text becomes an object array."""
    x = take(name, x)
    if library_of(x) in (None, "numpy") and not is_own(x):
        x = np.asarray(x)
        if x.dtype.kind in "SUT":
            x = x.astype(object)
        elif x.dtype.kind == "O" and not is_text(x):
            raise InvalidArgumentError(f"{name} that are objects must be text")
    if dtype_of(x) not in HOLDABLE:
        raise NotFoundError(f"{name} must be numbers, bools or text, got {x.dtype}")
    return x


def beside(values: np.ndarray, like: Array) -> Array:
    """Host values as an array of the library of `like`, on its device."""
    library = library_of(like) or "numpy"
    if library in ("numpy", "autograd"):
        return values
    where = {} if library == "jax" and not is_concrete(like) else {"device": device_of(like)}
    return namespace(library).asarray(values, **where)


def index_dtype(given: Any) -> np.dtype:
    """The NumPy dtype of splits named `given`."""
    name = dtype_attribute(given, "Tsplits")
    if name not in ("int32", "int64"):
        raise InvalidArgumentError(f"Tsplits must be int32 or int64, got {name}")
    return np.dtype(name)


def check_room(shape: Sequence[int], itemsize: int) -> None:
    """Refuse a result that is larger than the memory of the machine, before allocating it."""
    if math.prod(shape) * itemsize > memory():
        raise ResourceExhaustedError(f"a result of shape {list(shape)} does not fit in memory")
