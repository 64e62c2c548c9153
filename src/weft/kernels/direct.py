"""Batch norm on arrays that the drivers can take as they lie in memory, without a description of them in Python.

These functions answer None where an array is anything but plain (see `is_plain`), and always in pure Python: the caller
then goes the way that takes every array. `_direct.pyx` has the others; what it saves is most of a call on 64 KB, and half of
a layer's call between the convolutions of a model, where what Python touches is no longer in the caches.
"""

from __future__ import annotations

from contextlib import suppress

from .._arrays import Array


def is_plain(x: Array, axis: int, vectors: tuple[Array, ...]) -> bool:
    """Whether `x` is an array of NumPy or torch in host memory, of floating point, and in one piece with its channels last
    in memory or where its shape has them; and whether `vectors` are so, too, with one number per channel."""
    return False


def forward(x: Array, scale: Array, offset: Array, epsilon: float, axis: int) -> tuple[Array, Array, Array] | None:
    """See `cpu.batch_norm`."""
    return None


def inference(
    x: Array, scale: Array, offset: Array, mean: Array, variance: Array, epsilon: float, axis: int
) -> Array | None:
    """See `cpu.batch_norm_inference`."""
    return None


def backward(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, epsilon: float, axis: int
) -> tuple[Array, Array, Array] | None:
    """See `cpu.batch_norm_grad`."""
    return None


with suppress(ImportError):
    from ._direct import backward, forward, inference, is_plain  # type: ignore[import-not-found,no-redef] # noqa: F401
