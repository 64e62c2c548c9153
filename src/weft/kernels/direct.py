"""Whole calls of batch norm on plain arrays, by what `weft._native` sees of their memory; and which tensors on CUDA are plain.

A function of `weft._native` returns None, and changes nothing, if its arguments are not plain or must be refused.
"""

from __future__ import annotations

import sys
from typing import Any

from .choice import FORCED, is_installed

try:
    from .._native import fused_batch_norm, fused_batch_norm_grad, infer, train
    from . import native as native  # sets the number of threads
except ModuleNotFoundError:

    def _nothing(*_: Any) -> Any:
        return None

    fused_batch_norm = fused_batch_norm_grad = infer = train = _nothing


def elements_on_cuda(x: Any, axis: int, vectors: tuple[Any, ...]) -> int:
    """The elements of a channel of `x`, if `x` and one vector per channel are tensors on an NVIDIA device that the Triton kernels
    take as they are; else 0."""
    torch = sys.modules.get("torch")
    if torch is None or type(x) not in (torch.Tensor, torch.nn.Parameter) or not x.is_cuda:
        return 0
    if FORCED.get() is not None or x.dtype not in _dtypes(torch) or not is_installed("cuda") or x.is_inference():
        return 0
    device, channels, size = x.device, x.shape[axis], x.numel()
    for v in vectors:
        if (
            type(v) not in (torch.Tensor, torch.nn.Parameter) or v.dtype is not torch.float32 or v.device != device
            or v.shape != (channels,)
        ):  # fmt: skip
            return 0
    return size // channels if 0 < size < 1 << 31 else 0


def _dtypes(torch: Any) -> tuple[Any, ...]:
    return torch.float32, torch.float16, torch.bfloat16


__all__ = ["elements_on_cuda", "fused_batch_norm", "fused_batch_norm_grad", "infer", "train"]
