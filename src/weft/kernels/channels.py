"""Reductions over all axes but the channels, in arithmetic that every framework can differentiate."""

from __future__ import annotations

import math
from typing import Any

from ..core.arrays import Array, dtype_of, library_of, namespace


class Channels:
    """Reduce an array over all axes but its channels, and broadcast per-channel values over it.

    `mask` marks the rows (entries of axis 0) that count, None is all: other rows enter no sum and are zeros in every result.
    Half precision is computed in float32. Sums are in float64 if the library has it; JAX by default has not, and sums one axis
    at a time to keep rounding errors small. `library` overrides that of `x`: a NumPy array among arrays that autograd traces
    needs autograd's functions.
    """

    def __init__(self, x: Array, axis: int, mask: Array | None, library: str | None = None) -> None:
        library = library or library_of(x) or "numpy"
        self.xp = namespace(library)
        self.axes = tuple(i for i in range(x.ndim) if i != axis)
        self.shape = tuple(n if i == axis else 1 for i, n in enumerate(x.shape))
        self.dtype = x.dtype
        self.narrow = self.xp.float64 if dtype_of(x) == "float64" else self.xp.float32
        self.wide = self.narrow if library == "jax" else self.xp.float64
        self.rows = None if mask is None else self.xp.reshape(mask, (-1, *[1] * (x.ndim - 1)))
        self.count: Any = math.prod(x.shape[i] for i in self.axes)
        if mask is not None:
            self.count = self.xp.sum(cast(mask, self.wide)) * (self.count // max(x.shape[0], 1))

    def values(self, x: Array) -> Array:
        """`x` in the dtype of the arithmetic, with zeros in the rows that do not count."""
        return self.only(cast(x, self.narrow))

    def only(self, x: Array) -> Array:
        """`x` with zeros in the rows that do not count."""
        return x if self.rows is None else self.xp.where(self.rows, x, self.xp.zeros_like(x))

    def spread(self, vector: Array) -> Array:
        """Reshape one value per channel so that it broadcasts over the array."""
        return self.xp.reshape(cast(vector, self.wide), self.shape)

    def total(self, x: Array) -> Array:
        """The sum of each channel, in a shape that broadcasts over the array."""
        if self.wide != self.narrow:
            return self.xp.sum(cast(x, self.wide), axis=self.axes, keepdims=True)
        for axis in reversed(self.axes):
            x = self.xp.sum(x, axis=axis, keepdims=True)
        return x

    def mean(self, x: Array) -> Array:
        """The mean of each channel, in a shape that broadcasts; NaN for a channel without elements."""
        return self.total(x) / self.count

    def centred(self, x: Array) -> tuple[Array, Array]:
        """`x` minus the mean of its channel, and the means; a second pass removes the rounding error of the first."""
        first = self.mean(x)
        x = self.only(x - first)
        rest = self.mean(x)
        rest = self.xp.where(self.xp.isfinite(rest), rest, self.xp.zeros_like(rest))  # an infinite mean stays infinite
        return self.only(x - rest), first + rest

    def rounded(self, x: Array) -> Array:
        """Convert a result of the array's shape to its dtype."""
        return cast(self.only(x), self.dtype)

    def vector(self, x: Array) -> Array:
        """Convert one value per channel to a vector: float64 for float64 arrays, else float32."""
        return cast(self.xp.reshape(x, (-1,)), self.narrow)


def cast(x: Array, dtype: Any) -> Array:
    """Convert `x` to another dtype, differentiably."""
    if x.dtype == dtype:
        return x
    return x.to(dtype) if library_of(x) == "torch" else x.astype(dtype)
