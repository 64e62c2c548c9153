"""Which arrays are plain, by what `weft._native` sees of their memory, or as tensors of an NVIDIA device."""

from __future__ import annotations

import sys
from typing import Any

from ..core.arrays import Array
from .choice import FORCED, is_installed

try:
    from .._native import blend, elements
except ImportError:

    def elements(x: Array, axis: int, vectors: tuple[Array, ...]) -> int:
        """The elements of a channel of `x`, if `x` and one vector per channel are plain arrays that the kernels take; else 0."""
        return 0

    def blend(running: tuple[Array, ...], used: tuple[Array, ...], keep: float, share: float, corrected: float) -> bool:
        """Add a batch's mean and variance to running ones in place, and count the batch; False if they do not fit."""
        return False


def elements_on_cuda(x: Any, axis: int, vectors: tuple[Any, ...]) -> int:
    """As `elements`, for tensors on an NVIDIA device that the Triton kernels take as they are."""
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


__all__ = ["blend", "elements", "elements_on_cuda"]
