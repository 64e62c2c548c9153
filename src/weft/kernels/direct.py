"""What `weft._native` knows of plain arrays by looking at their memory; without it, no array counts as plain."""

from __future__ import annotations

from ..core.arrays import Array

try:
    from .._native import blend, elements
except ImportError:

    def elements(x: Array, axis: int, vectors: tuple[Array, ...]) -> int:
        """The elements of a channel of `x`, if `x` and one vector per channel are plain arrays that the kernels take; else 0."""
        return 0

    def blend(running: tuple[Array, ...], used: tuple[Array, ...], keep: float, share: float, corrected: float) -> bool:
        """Add a batch's mean and variance to running ones in place, and count the batch; False if they do not fit."""
        return False


__all__ = ["blend", "elements"]
