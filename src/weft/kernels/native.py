"""Batch norm on the CPU by the C++ kernels of `weft._native`.

They take arrays of NumPy, torch and JAX in host memory as they lie there, and return arrays of the same library. They
answer None if no element counts.
"""

from __future__ import annotations

from .. import _native
from ..core.arrays import Array
from . import pool, reference

DTYPES = frozenset(["float16", "bfloat16", "float32", "float64"])

#: JAX arrays from here on: below, copying the result into JAX costs more than the kernel saves.
JAX_BYTES = 1 << 20

pool.follow(_native.set_num_threads)


def batch_norm(
    x: Array, scale: Array, offset: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    found = _native.batch_norm(x, scale, offset, epsilon, axis, mask)
    return reference.batch_norm(x, scale, offset, epsilon, axis, mask) if found is None else found


def batch_norm_inference(
    x: Array, scale: Array, offset: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> Array:
    """See the reference."""
    found = _native.batch_norm_inference(x, scale, offset, mean, variance, epsilon, axis, mask)
    return (
        reference.batch_norm_inference(x, scale, offset, mean, variance, epsilon, axis, mask)
        if found is None
        else found
    )


def batch_norm_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    found = _native.batch_norm_grad(g, x, scale, mean, variance, epsilon, axis, mask)
    return reference.batch_norm_grad(g, x, scale, mean, variance, epsilon, axis, mask) if found is None else found


def batch_norm_inference_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    found = _native.batch_norm_inference_grad(g, x, scale, mean, variance, epsilon, axis, mask)
    return (
        reference.batch_norm_inference_grad(g, x, scale, mean, variance, epsilon, axis, mask)
        if found is None
        else found
    )


def batch_norm_grad_grad(
    g: Array, x: Array, scale: Array, u: Array, a: Array, b: Array, epsilon: float, axis: int, mask: Array | None
) -> tuple[Array, Array, Array]:
    """See the reference."""
    found = _native.batch_norm_grad_grad(g, x, scale, u, a, b, epsilon, axis, mask)
    return reference.batch_norm_grad_grad(g, x, scale, u, a, b, epsilon, axis, mask) if found is None else found


def batch_norm_inference_grad_grad(
    g: Array, x: Array, scale: Array, mean: Array, variance: Array, u: Array, a: Array, b: Array,
    epsilon: float, axis: int, mask: Array | None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """See the reference."""
    arguments = g, x, scale, mean, variance, u, a, b, epsilon, axis, mask
    found = _native.batch_norm_inference_grad_grad(*arguments)
    return reference.batch_norm_inference_grad_grad(*arguments) if found is None else found
