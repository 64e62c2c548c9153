"""Many things drawn into one tensor, and the gradient brought back out."""

from . import errors, kernels, raw_ops
from ._op import vjp

__all__ = ["errors", "kernels", "raw_ops", "vjp"]
