"""The kernels of batch norm on CUDA, in Triton, for any tensors: `cuda_call` launches them, `cuda_kernels` has their code."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidArgumentError
from .cuda_call import Call, call_of, differentiate, infer, new_pair, normalize, train
from .cuda_kernels import backward, forward, inference

DTYPES = ("float32", "float16", "bfloat16")


def accepts(x: Any) -> bool:
    """True if the kernels can process `x`: some elements, and offsets that fit 32 bits within a tile."""
    return bool(x.ndim >= 2 and 0 < x.numel() < 1 << 31)


def batch_norm(x: Any, scale: Any, offset: Any, epsilon: float, axis: int, mask: Any) -> tuple[Any, Any, Any]:
    """See `reference.batch_norm`."""
    call, x = _fitting(forward, x, axis, mask, UPDATE=0)
    device, used = x.device, new_pair(scale)
    scale, offset = _vector("scale", scale, device), _vector("offset", offset, device)
    rows = _rows_that_count(mask, device)
    return normalize(call, x, (scale, offset, *used, rows, *_NOTHING), (0.0, 0.0, 0.0, epsilon)), *used


_NOTHING = (None,) * 6


def batch_norm_running(
    x: Any, scale: Any, offset: Any, epsilon: float, axis: int, old: tuple[Any, Any] | None,
    weights: tuple[float, float, float],
) -> tuple[Any, ...]:  # fmt: skip
    """`batch_norm`, and new running statistics in the same launch; and a zero.

    With `weights` (keep, share, corrected) they are keep * old + share * mean and keep * old + corrected * variance. Without `old`
    nothing is kept.
    """
    call, x = _fitting(forward, x, axis, None, UPDATE=1 if old is None else 2)
    device = x.device
    scale, offset = _vector("scale", scale, device), _vector("offset", offset, device)
    if old is not None:
        old = _vector("mean", old[0], device), _vector("variance", old[1], device)
    return train(call, x, scale, offset, epsilon, old, weights)


def batch_norm_inference(
    x: Any, scale: Any, offset: Any, mean: Any, variance: Any, epsilon: float, axis: int, mask: Any
) -> Any:
    """See `reference.batch_norm_inference`."""
    call, x = _fitting(inference, x, axis, mask, COPIES=False)
    device = x.device
    scale, offset = _vector("scale", scale, device), _vector("offset", offset, device)
    mean, variance = _vector("mean", mean, device), _vector("variance", variance, device)
    return infer(call, x, scale, offset, mean, variance, epsilon, _rows_that_count(mask, device))


def batch_norm_grad(
    g: Any, x: Any, scale: Any, mean: Any, variance: Any, epsilon: float, axis: int, mask: Any
) -> tuple[Any, Any, Any]:
    """See `reference.batch_norm_grad`."""
    return _gradients(g, x, scale, mean, variance, epsilon, axis, mask, True)


def batch_norm_inference_grad(
    g: Any, x: Any, scale: Any, mean: Any, variance: Any, epsilon: float, axis: int, mask: Any
) -> tuple[Any, Any, Any]:
    """See `reference.batch_norm_inference_grad`."""
    return _gradients(g, x, scale, mean, variance, epsilon, axis, mask, False)


def _gradients(
    g: Any, x: Any, scale: Any, mean: Any, variance: Any, epsilon: float, axis: int, mask: Any, is_training: bool
) -> tuple[Any, Any, Any]:
    call, x = _fitting(backward, x, axis, mask, TRAINING=is_training)
    device = x.device
    if g.stride() != x.stride() or g.dtype != x.dtype or g.device != device:
        g = torch.empty_like(x).copy_(g)
    g = g.resolve_neg()
    vectors = _vector("scale", scale, device), _vector("mean", mean, device), _vector("variance", variance, device)
    return differentiate(call, g, x, *vectors, epsilon, _rows_that_count(mask, device))[:3]


# --- arguments as the kernels take them ---


def _fitting(kernel: Any, x: Any, axis: int, mask: Any, **options: Any) -> tuple[Call, Any]:
    """How to call a kernel for `x`, and `x` in a memory layout that it takes."""
    x = x.resolve_neg()
    call = call_of(kernel, x, axis, mask, **options)
    if call.layout == "other":
        x = x.contiguous() if axis == 1 else x.movedim(axis, -1).contiguous().movedim(-1, axis)
        call = call_of(kernel, x, axis, mask, **options)
    return call, x


def _vector(name: str, v: Any, device: Any) -> Any:
    """A vector as the kernels take it: float32, dense, on the device."""
    v = v.resolve_neg()
    if v.dtype is torch.float32 and v.device == device and v.is_contiguous():
        return v
    if v.device != device:
        raise InvalidArgumentError(f"{name} must be on the device of x, {device}, got one on {v.device}")
    return v.to(torch.float32).contiguous()


def _rows_that_count(mask: Any, device: Any) -> Any:
    return mask if mask is None else mask.to(device=device, dtype=torch.bool).contiguous()
