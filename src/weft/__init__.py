"""Many things drawn into one tensor, and the gradient brought back out."""

from . import errors, kernels, raw_ops
from ._op import vjp
from ._ragged import RaggedTensor
from ._variant import VariantArray

__all__ = ["RaggedTensor", "VariantArray", "errors", "kernels", "raw_ops", "vjp"]
