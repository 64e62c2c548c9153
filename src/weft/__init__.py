"""Many things drawn into one tensor, and the gradient brought back out."""

from . import errors, kernels, raw_ops
from ._normalize import batch_norm
from ._op import vjp

__all__ = ["batch_norm", "errors", "kernels", "raw_ops", "vjp"]
