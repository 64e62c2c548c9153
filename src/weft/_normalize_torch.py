"""The short way of `weft.torch.BatchNorm`: plain tensors in host memory, of which all rows count, and one node for their gradient.

Between the convolutions of a model, what Python touches is no longer in the caches: each step of the way that takes every
input costs several times there what it costs in a loop, and all together more than the kernel. What this way cannot take,
whatever must be refused among it, is left to the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import kernels
from ._normalize import CONVENTIONS, shares
from .kernels import direct
from .ops import normalize

_is_grad_enabled, _increment_version = torch.is_grad_enabled, torch.autograd.graph.increment_version
_are_transforms_active, _modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state


class BatchNormNode(torch.autograd.Function):
    """The node of a batch norm in training, `y` being its one output: the statistics go to `used`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, offset: Tensor, epsilon: float, axis: int, used: list[Any]) -> Tensor:
        y, mean, variance = kernels.best("batch_norm", x)(x, scale, offset, epsilon, axis, None)
        used += mean, variance
        ctx.save_for_backward(x, scale, mean, variance)
        ctx.set_materialize_grads(False)
        ctx.attributes = epsilon, axis
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        if g is None:
            return (None,) * 6
        is_last = not (_is_grad_enabled() or _are_transforms_active())
        back = normalize.backward if is_last else normalize.batch_norm_grad
        x, scale, mean, variance = ctx.saved_tensors
        return *back(g, x, scale, mean, variance, None, *ctx.attributes, True), None, None, None


# What `Function.apply` does in Python is for the functions of `torch.func`.
_recorded: Any = super(torch.autograd.Function, BatchNormNode).apply


def forward(module: Any, x: Any) -> Tensor | None:
    """What a module gives for `x`, with its running statistics changed; None where it must go the other way."""
    scale, offset = module._parameters.get("weight"), module._parameters.get("bias")
    buffers = module._buffers
    mean, variance, batches = (buffers.get(name) for name in ("running_mean", "running_var", "num_batches_tracked"))
    if type(x) is not Tensor or _are_transforms_active() or _modes() or _tracing_state() is not None:
        return None
    axis = module.axis % max(x.ndim, 1)
    count = direct.elements(x, axis, (scale, offset, mean, variance))
    if not count or axis != module.axis and axis != module.axis + x.ndim:
        return None
    is_recorded = _is_grad_enabled() and (x.requires_grad or scale.requires_grad or offset.requires_grad)
    if not module.training:
        kernel = kernels.best("batch_norm_inference", x)
        return None if is_recorded else kernel(x, scale, offset, mean, variance, float(module.eps), axis, None)
    if count < 2 or module.convention not in CONVENTIONS or not (_is_free(mean) and _is_free(variance) and _is_count(batches)):
        return None
    used: list[Any] = []
    if is_recorded:
        y = _recorded(x, scale, offset, float(module.eps), axis, used)
    else:
        y, *used = kernels.best("batch_norm", x)(x, scale, offset, float(module.eps), axis, None)
    share, corrected = shares(count, module._momentum(), module.convention)
    direct.blend(mean, variance, batches, *used, 1 - share, share, corrected)
    _increment_version((mean, variance, batches))
    return y


def _is_free(v: Tensor) -> bool:
    """Whether a tensor may be changed in place."""
    return not v.requires_grad and not v.is_inference()


def _is_count(v: Any) -> bool:
    return type(v) is Tensor and v.is_cpu and v.dtype is torch.int64 and v.numel() == 1 and not v.is_inference()
