"""Many small arrays in one tensor: dynamic batching, ragged tensors, TensorArray and batch norm, with gradients."""

from typing import Any

from . import errors, kernels, raw_ops
from .batching.batcher import Batcher
from .batching.compiled import is_compiled
from .batching.deadline import gradient_deadline
from .batching.decorator import batched
from .batching.function_op import priority
from .batching.lengths import Pad
from .batching.processing import BatchRan
from .batching.signatures import PerRow, Shared
from .batching.statistics import Receipt, Statistics
from .core.clock import SimulatedClock
from .core.scope import Observer, Scope, observe, scope, sweep
from .core.vjp import vjp
from .kernels import set_num_threads
from .norm.function import batch_norm
from .ragged.tensor import RaggedTensor
from .ragged.variant import VariantArray
from .tensor_array.array import TensorArray
from .tensor_array.grad_ops import gradient_source

__all__ = [
    "BatchRan",
    "Batcher",
    "Observer",
    "Pad",
    "PerRow",
    "RaggedTensor",
    "Receipt",
    "Scope",
    "Shared",
    "SimulatedClock",
    "Statistics",
    "TensorArray",
    "VariantArray",
    "aio",
    "batch_norm",
    "batched",
    "errors",
    "gradient_deadline",
    "gradient_source",
    "is_compiled",
    "kernels",
    "observe",
    "priority",
    "raw_ops",
    "scope",
    "set_num_threads",
    "sweep",
    "vjp",
]


def __getattr__(name: str) -> Any:
    if name in ("aio", "serve", "torch"):  # they import asyncio, msgspec and torch
        from importlib import import_module

        return import_module(f"weft.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("weft")
    if name == "Client":
        from .serve.client import Client

        return Client
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
