"""Batch norm of plain tensors: one call of a kernel, and one node for the gradient.

The general path checks every input one by one. Inside a model, where Python's data is no longer in the caches, these checks take
longer than the kernel (benchmarks/gradients.py, the steps of a CNN). The functions here return None for arguments that they do
not support or that must be refused; the general path then takes the call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.torch_internals import buffers_of, direct_apply, is_transformed, parameters_of
from ..kernels.direct import infer, train
from . import derivatives
from .derivatives import Mode
from .function import CONVENTIONS, check_mask, share_of

_is_grad_enabled, _increment_version = torch.is_grad_enabled, torch.autograd.graph.increment_version


class BatchNormNode(torch.autograd.Function):
    """The node of a batch norm in training. The kernel has run before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, offset: Tensor, call: Call) -> Tensor:
        (y, mean, variance), call.results = call.results, ()
        ctx.save_for_backward(x, scale, mean, variance, call.mask)
        ctx.set_materialize_grads(False)
        ctx.mode = call.mode
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        if g is None:
            return None, None, None, None
        x, scale, mean, variance, mask = ctx.saved_tensors
        is_plain = not (_is_grad_enabled() or is_transformed())
        grad = derivatives.backward if is_plain else derivatives.batch_norm_grad
        return *grad(g, x, scale, mean, variance, mask, ctx.mode), None


# What `Function.apply` does in Python is for the functions of `torch.func`.
_recorded: Any = direct_apply(BatchNormNode)


class Call:
    """A call in training: how it was made, and what came out."""

    def __init__(self, mode: Mode, mask: Any, results: tuple[Any, ...]) -> None:
        self.mode = mode
        self.mask = mask
        self.results = results  # y, mean, variance


def normalize(x: Any, vectors: tuple[Any, ...], mask: Any, training: bool, how: tuple[float, int, float, Any]) -> Any:
    """What `weft.batch_norm` gives as a tuple; `how` is epsilon, the axis, the share of the new and the convention."""
    if type(x) is not Tensor or torch.compiler.is_compiling() or is_transformed():
        return None
    epsilon, axis, share, rules = how
    is_recorded = _needs_gradient(x, vectors)
    if not training:
        y = None if is_recorded else infer(x, *vectors, mask, epsilon, axis)
        return None if y is None else (y, *vectors[2:])
    if vectors[0] is None or vectors[1] is None:
        return None
    found = train(x, *vectors, None, mask, epsilon, axis, share, rules.has_bessel, rules.least)
    if found is None:
        return None
    y = found[0]
    if is_recorded:
        y = _recorded(x, *vectors[:2], Call(_training(epsilon, axis), mask, found[:3]))
    return y, *(found[3:5] if vectors[2] is not None else vectors[2:])


def forward(module: Any, x: Any, mask: Any) -> Tensor | None:
    """What a module gives for `x`, with its running statistics changed."""
    own = module.__dict__
    parameters, buffers = parameters_of(module), buffers_of(module)
    vectors = parameters.get("weight"), parameters.get("bias"), buffers.get("running_mean"), buffers.get("running_var")
    epsilon = own["eps"]
    if type(x) is not Tensor or not (type(epsilon) is float and epsilon >= 0) or is_transformed():
        return None
    if vectors[0] is None or vectors[1] is None or vectors[2] is None or vectors[3] is None:
        return None
    axis = own["axis"] + x.ndim if own["axis"] < 0 else own["axis"]
    if not 0 <= axis < x.ndim:
        return None
    if mask is not None:
        if x.is_nested or x.layout is not torch.strided:
            return None
        mask = check_mask(x, axis, "torch", mask)
    is_recorded = _needs_gradient(x, vectors)
    if own["training"]:
        return _in_training(module, own, x, vectors, mask, axis, is_recorded)
    return None if is_recorded else infer(x, *vectors, mask, epsilon, axis)


def _needs_gradient(x: Tensor, vectors: tuple[Any, ...]) -> bool:
    if not _is_grad_enabled():
        return False
    scale, offset = vectors[:2]  # tensors, or what the caller gave in their place
    return bool(x.requires_grad or getattr(scale, "requires_grad", False) or getattr(offset, "requires_grad", False))


def _in_training(
    module: Any, own: dict[str, Any], x: Tensor, vectors: tuple[Any, ...], mask: Any, axis: int, is_recorded: bool
) -> Tensor | None:
    batches = buffers_of(module).get("num_batches_tracked")
    convention = own["convention"]
    if convention not in CONVENTIONS or not (
        own["track_running_stats"] and _may_change(vectors[2], vectors[3], batches)
    ):
        return None
    rules, epsilon, share = CONVENTIONS[convention], own["eps"], own["momentum"]
    if own["cumulative"] or not rules.is_share_of_new or type(share) is not float:
        share = share_of(module._momentum(), convention)
    found = train(x, *vectors, batches, mask, epsilon, axis, share, rules.has_bessel, rules.least)
    if found is None:
        return None
    _increment_version((*vectors[2:], batches))
    return _recorded(x, *vectors[:2], Call(_training(epsilon, axis), mask, found)) if is_recorded else found[0]


@lru_cache(maxsize=64)
def _training(epsilon: float, axis: int) -> Mode:
    return Mode(epsilon, axis, True)


def _may_change(mean: Any, variance: Any, batches: Any) -> bool:
    """Whether the running mean and variance, and the number of batches, may be changed in place."""
    return (
        type(batches) is Tensor and batches.dtype is torch.int64 and batches.device == mean.device and batches.numel() == 1
        and not (mean.requires_grad or variance.requires_grad)
        and not (mean.is_inference() or variance.is_inference() or batches.is_inference())
    )  # fmt: skip
