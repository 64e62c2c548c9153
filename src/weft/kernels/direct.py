"""Whole calls of batch norm on plain arrays, by what `weft._native` sees of their memory.

A function of `weft._native` returns None, and changes nothing, if its arguments are not plain or must be refused.
"""

from __future__ import annotations

from typing import Any

try:
    from .._native import differentiate, fused_batch_norm, fused_batch_norm_grad, infer, keep, train
    from . import native as native  # sets the number of threads
except ModuleNotFoundError:

    def _nothing(*_: Any) -> Any:
        return None

    differentiate = fused_batch_norm = fused_batch_norm_grad = infer = keep = train = _nothing


__all__ = ["differentiate", "fused_batch_norm", "fused_batch_norm_grad", "infer", "keep", "train"]
