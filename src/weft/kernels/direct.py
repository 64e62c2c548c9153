"""Batch norm on arrays that the drivers can take as they lie in memory, without a description of them in Python.

These functions answer None where an array is anything but plain (see `elements`), where `use` has chosen the kernels, and
always in pure Python: the caller then goes the way that takes every array. `_direct.pyx` has the others; what they save is
half of a call on 64 KB, and half of a layer's call between the convolutions of a model, where what Python touches is no
longer in the caches.
"""

from __future__ import annotations

from contextlib import suppress

from ..core.arrays import Array


def elements(x: Array, axis: int, vectors: tuple[Array, ...]) -> int:
    """How many elements a channel of `x` has, if `x` is an array of NumPy or torch in host memory, of floating point, and in
    one piece with its channels last in memory or where its shape has them, and `vectors` are so, too, of one number per
    channel each, in the dtype of statistics; else 0."""
    return 0


def blend(
    running: tuple[Array, Array, Array], used: tuple[Array, Array], keep: float, share: float, corrected: float
) -> bool:
    """Change a running mean and variance in place: `keep` of them stays, and `share` of the mean and `corrected` of the
    variance that were used is added, in float64; and count the batch. False, with nothing changed, where they are not
    vectors of one length and dtype, or the count is not one int64."""
    raise NotImplementedError


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


def fused(
    x: Array, scale: Array, offset: Array, mean: Array, variance: Array, epsilon: float, axis: int, is_training: bool
) -> tuple[Array, Array, Array, Array, Array] | None:
    """What the ops that are called fused give for arrays of NumPy, with nothing of the old averages kept."""
    return None


with suppress(ImportError):
    from ._direct import (  # type: ignore[import-not-found,no-redef]
        backward,  # noqa: F401
        blend,  # noqa: F401
        elements,  # noqa: F401
        forward,  # noqa: F401
        fused,  # noqa: F401
        inference,  # noqa: F401
    )
