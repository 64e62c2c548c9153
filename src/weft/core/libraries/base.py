"""The interface of an array library; the methods here are right for NumPy."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ...errors import InvalidArgumentError


class lazy:
    """As `functools.cached_property`, without the lock that it has in Python 3.11: a forked child could find it held for ever."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute = compute

    def __get__(self, instance: Any, owner: Any) -> Any:
        found = instance.__dict__[self._compute.__name__] = self._compute(instance)
        return found


class Library:
    """An array library: its name, its array-API namespace, and operations on its arrays."""

    name: str
    #: True if NumPy arrays beside arrays of this library are converted to it.
    converts_numpy = False

    @lazy
    def namespace(self) -> Any:
        """The array-API namespace of the library."""
        raise NotImplementedError

    def device(self, x: Any) -> Hashable:
        """The device of `x`; arrays on equal devices can share a batch."""
        return "cpu"

    def is_concrete(self, x: Any) -> bool:
        """True if the values of `x` are known now."""
        return True

    def is_on_host(self, x: Any) -> bool:
        """True if NumPy can read the memory of `x`."""
        return True

    def asarray(self, x: Any, dtype: Any = None) -> Any:
        """`x` as an array of this library; an array of it is returned unchanged unless `dtype` is given."""
        return self.namespace.asarray(x, dtype=dtype)

    def host(self, x: Any) -> np.ndarray:
        """The values of `x` as a NumPy array, without a copy if they are in host memory."""
        try:
            return np.asarray(x)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidArgumentError(f"this argument must be readable as an array: {error}") from None

    def index(self, values: np.ndarray) -> Any:
        """Host integers as they are passed beside arrays of this library. JAX would cut int64 to int32, so NumPy is the default."""
        return values

    def dtype(self, name: str) -> Any:
        """The dtype of the library for a TensorFlow name; strings are objects."""
        if name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(object if name == "string" else name)

    def cast(self, x: Any, dtype: Any) -> Any:
        """`x` converted to a dtype of the library."""
        return x.astype(dtype)

    def copy(self, x: Any) -> Any:
        """`x` in memory of its own; immutable arrays are returned unchanged."""
        return x.copy()

    def is_view(self, x: Any) -> bool:
        """True if `x` may share its memory with another array."""
        return getattr(x, "base", None) is not None

    def has_graph(self, x: Any) -> bool:
        """True if a gradient of `x` is recorded."""
        return False

    def detach(self, x: Any) -> Any:
        """`x` without its gradient graph."""
        return x
