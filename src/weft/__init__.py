"""Many things drawn into one tensor, and the gradient brought back out."""

from . import errors, kernels, raw_ops
from ._backward import backward_in_caller
from ._batcher import Batcher, batched
from ._normalize import batch_norm
from ._op import vjp
from ._ragged import RaggedTensor
from ._resources import Observer, Scope, observe, scope, sweep
from ._statistics import Receipt, Statistics
from ._tensor_array import TensorArray
from ._variant import VariantArray
from .batching.clock import SimulatedClock
from .batching.deadline import gradient_deadline
from .batching.desk import BatchRan
from .batching.form import is_compiled
from .ops.batch_function import priority
from .ops.tensor_array_grad import gradient_source

__all__ = [
    "BatchRan",
    "Batcher",
    "Observer",
    "RaggedTensor",
    "Receipt",
    "Scope",
    "SimulatedClock",
    "Statistics",
    "TensorArray",
    "VariantArray",
    "aio",
    "backward_in_caller",
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
    "sweep",
    "vjp",
]


def __getattr__(name: str) -> object:
    if name in ("aio", "torch"):  # asyncio is imported with the one, torch with the other
        from importlib import import_module

        return import_module(f"weft.{name}")
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
