"""Many things drawn into one tensor, and the gradient brought back out."""

from . import errors, kernels, raw_ops
from ._op import vjp
from ._tensor_array import TensorArray
from .ops.tensor_array_grad import gradient_source

__all__ = ["TensorArray", "errors", "gradient_source", "kernels", "raw_ops", "vjp"]
