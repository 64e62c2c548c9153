"""For users of PyTorch: batch norm as a module, and models with it in place of torch's own."""

from .norm.torch import BatchNorm, convert

__all__ = ["BatchNorm", "convert"]
