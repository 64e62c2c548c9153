"""Batch norm of plain tensors: one call of a kernel, and one node for the gradient.

The general path checks every input one by one. Inside a model, where Python's data is no longer in the caches, these checks take
longer than the kernel (benchmarks/gradients.py, the steps of a CNN). The functions here return None for arguments that they do
not support or that must be refused; the general path then takes the call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..core.torch_internals import (
    buffers_of,
    direct_apply,
    is_batch_of_gradients,
    is_transformed,
    one_by_one,
    parameters_of,
)
from ..kernels.direct import differentiate, infer, keep, train
from . import derivatives
from .derivatives import Mode
from .function import CONVENTIONS, check_mask, share_of

_is_grad_enabled, _increment_version = torch.is_grad_enabled, torch.autograd.graph.increment_version


class BatchNormNode(torch.autograd.Function):
    """The node of a batch norm in training. The kernel has run before.

    `results` are y, the mean and the variance; nobody else sees the last two, which can be arrays of NumPy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, offset: Tensor, results: tuple[Any, ...], how: Any) -> Tensor:
        y, mean, variance = results
        mask, epsilon, axis = how
        ctx.save_for_backward(x, scale) if mask is None else ctx.save_for_backward(x, scale, mask)
        ctx.set_materialize_grads(False)
        ctx.given = mean, variance, epsilon, axis
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        if g is None:
            return None, None, None, None, None
        if is_batch_of_gradients(g):
            return one_by_one(lambda grads: BatchNormNode.backward(ctx, *grads), [g])
        x, scale, *masks = ctx.saved_tensors
        mask = masks[0] if masks else None
        mean, variance, epsilon, axis = ctx.given
        if not (_is_grad_enabled() or is_transformed()):
            grads = differentiate(g, x, scale, mean, variance, mask, epsilon, axis)
            if grads is not None:
                return *grads, None, None
        mean, variance = torch.as_tensor(mean), torch.as_tensor(variance)
        grads = derivatives.batch_norm_grad(g, x, scale, mean, variance, mask, Mode(epsilon, axis, True))
        return *grads, None, None


# What `Function.apply` does in Python is for the functions of `torch.func`.
_recorded: Any = direct_apply(BatchNormNode)


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
        y = _recorded(x, *vectors[:2], found[:3], (mask, epsilon, axis))
    return y, *(found[3:5] if vectors[2] is not None else vectors[2:])


def _needs_gradient(x: Tensor, vectors: tuple[Any, ...]) -> bool:
    if not _is_grad_enabled():
        return False
    scale, offset = vectors[:2]  # tensors, or what the caller gave in their place
    return bool(x.requires_grad or getattr(scale, "requires_grad", False) or getattr(offset, "requires_grad", False))


def forward(module: Any, x: Any, mask: Any) -> Tensor | None:
    """What a module gives for `x`, with its running statistics changed."""
    if type(x) is not Tensor or is_transformed():
        return None
    own, parameters, buffers = module.__dict__, parameters_of(module), buffers_of(module)
    scale, offset = parameters.get("weight"), parameters.get("bias")
    mean, variance = buffers.get("running_mean"), buffers.get("running_var")
    epsilon, axis = own["eps"], own["axis"]
    if scale is None or offset is None or mean is None or variance is None:
        return None
    if not (type(epsilon) is float and 0 <= epsilon < math.inf):
        return None
    if axis < 0:
        axis += x.ndim
    if mask is not None:
        if not 0 <= axis < x.ndim or x.is_nested or x.layout is not torch.strided:
            return None
        mask = check_mask(x, axis, "torch", mask)
    is_recorded = _is_grad_enabled() and (x.requires_grad or scale.requires_grad or offset.requires_grad)
    if not own["training"]:
        return None if is_recorded else infer(x, scale, offset, mean, variance, mask, epsilon, axis)

    batches, rules, share = buffers.get("num_batches_tracked"), CONVENTIONS.get(own["convention"]), own["momentum"]
    if batches is None or rules is None or not own["track_running_stats"]:
        return None
    if own["cumulative"] or not rules.is_share_of_new or type(share) is not float or not 0 <= share <= 1:
        share = share_of(module._momentum(), own["convention"])
    found = train(x, scale, offset, mean, variance, batches, mask, epsilon, axis, share, rules.has_bessel, rules.least)
    if found is None:
        return None
    y = _recorded(x, scale, offset, found[:3], (mask, epsilon, axis)) if is_recorded else found[0]
    if len(found) > 3:  # last: a node cannot always be made
        keep(mean, variance, batches, found[3:])
    _increment_version((mean, variance, batches))
    return y
