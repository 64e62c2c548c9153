"""Reductions over all but an array's channels, in arithmetic that every framework differentiates."""

from __future__ import annotations

import math
from typing import Any

from ..core.arrays import Array, dtype_of, library_of, namespace


class Channels:
    """How an array is reduced over everything but its channels, and how per-channel values are spread over it again.

    `mask` says which rows (entries of axis 0) count, None for all: the others enter no sum and are zeros in every
    result. Half precision is computed in float32. Sums run in float64 where the library has it; JAX, which as a rule
    has not, sums one axis at a time, which keeps its running sums short. `library` is that of `x` unless said otherwise:
    beside arrays that autograd traces, one that it does not is NumPy.
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
        """The elements of `x` that count and zeros for the others, ready for arithmetic."""
        return self.only(cast(x, self.narrow))

    def only(self, x: Array) -> Array:
        """`x` with zeros in the rows that do not count, whatever was there."""
        return x if self.rows is None else self.xp.where(self.rows, x, self.xp.zeros_like(x))

    def spread(self, vector: Array) -> Array:
        """One value per channel, in the shape that broadcasts over the array."""
        return self.xp.reshape(cast(vector, self.wide), self.shape)

    def total(self, x: Array) -> Array:
        """The sum of each channel, spread."""
        if self.wide != self.narrow:
            return self.xp.sum(cast(x, self.wide), axis=self.axes, keepdims=True)
        for axis in reversed(self.axes):
            x = self.xp.sum(x, axis=axis, keepdims=True)
        return x

    def mean(self, x: Array) -> Array:
        """The mean of each channel, spread; not a number for a channel without elements."""
        return self.total(x) / self.count

    def centred(self, x: Array) -> tuple[Array, Array]:
        """`x` without its channels' means, and the means; a second pass takes out what rounding left in the first."""
        first = self.mean(x)
        x = self.only(x - first)
        rest = self.mean(x)
        rest = self.xp.where(self.xp.isfinite(rest), rest, self.xp.zeros_like(rest))  # an infinite mean stays infinite
        return self.only(x - rest), first + rest

    def rounded(self, x: Array) -> Array:
        """A result of the array's shape, in the array's dtype."""
        return cast(self.only(x), self.dtype)

    def vector(self, x: Array) -> Array:
        """One value per channel in a vector: float32, or float64 beside float64."""
        return cast(self.xp.reshape(x, (-1,)), self.narrow)


def cast(x: Array, dtype: Any) -> Array:
    """`x` in another dtype, by the method that its framework can differentiate."""
    if x.dtype == dtype:
        return x
    return x.to(dtype) if library_of(x) == "torch" else x.astype(dtype)
