"""The short way of `weft.torch.BatchNorm`: plain tensors, of which all rows count, and one node for their gradient.

Between the convolutions of a model, what Python touches is no longer in the caches: each step of the way that takes every
input costs several times there what it costs in a loop, and all together more than the kernel. What this way cannot take,
whatever must be refused among it, is left to the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.torch_internals import buffers_of, direct_apply, is_transformed, parameters_of
from ..kernels import best
from ..kernels.direct import blend, elements, elements_on_cuda
from . import derivatives
from .derivatives import Mode
from .function import CONVENTIONS, changed, shares

_is_grad_enabled, _increment_version = torch.is_grad_enabled, torch.autograd.graph.increment_version


class BatchNormNode(torch.autograd.Function):
    """The node of a batch norm in training. Its one output is `y`; the statistics go to the call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, offset: Tensor, call: Call) -> Tensor:
        y = call.run(x, scale, offset)
        ctx.save_for_backward(x, scale, *call.used)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        if g is None:
            return None, None, None, None
        call, (x, scale, mean, variance) = ctx.call, ctx.saved_tensors
        is_plain = not (_is_grad_enabled() or is_transformed())
        grad = derivatives.backward if is_plain else derivatives.batch_norm_grad
        return *grad(g, x, scale, mean, variance, None, Mode(call.epsilon, call.axis, True)), None


# What `Function.apply` does in Python is for the functions of `torch.func`.
_recorded: Any = direct_apply(BatchNormNode)


class Call:
    """A call in training: how, and with which statistics it was made."""

    def __init__(self, epsilon: float, axis: int) -> None:
        self.epsilon = epsilon
        self.axis = axis
        self.used: tuple[Any, ...] = ()

    def run(self, x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """`x` normalized."""
        y, *used = best("batch_norm", x)(x, scale, offset, self.epsilon, self.axis, None)
        self.used = tuple(used)
        return y


class RunningCall(Call):
    """A call on CUDA, which changes the running statistics in the same launch."""

    def __init__(
        self, epsilon: float, axis: int, running: tuple[Any, Any], weights: tuple[float, float, float]
    ) -> None:
        Call.__init__(self, epsilon, axis)
        self.running, self.weights = running, weights

    def run(self, x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        kernel = best("batch_norm_running", x)
        y, *used = kernel(x, scale, offset, self.epsilon, self.axis, self.running, self.running, self.weights)
        self.used = tuple(used[:2])
        return y


def forward(module: Any, x: Any) -> Tensor | None:
    """What a module gives for `x`, with its running statistics changed; None where it must go the other way."""
    own = module.__dict__
    parameters, buffers = parameters_of(module), buffers_of(module)
    scale, offset = parameters.get("weight"), parameters.get("bias")
    mean, variance = buffers.get("running_mean"), buffers.get("running_var")
    if type(x) is not Tensor or type(own["eps"]) is not float or is_transformed():
        return None
    axis = own["axis"] + x.ndim if own["axis"] < 0 else own["axis"]
    vectors = scale, offset, mean, variance
    count = elements(x, axis, vectors) or elements_on_cuda(x, axis, vectors)
    if count == 0:
        return None
    is_recorded = _is_grad_enabled() and (x.requires_grad or scale.requires_grad or offset.requires_grad)
    if own["training"]:
        return _in_training(module, own, x, scale, offset, axis, count, is_recorded)
    if is_recorded:
        return None
    return best("batch_norm_inference", x)(x, scale, offset, mean, variance, own["eps"], axis, None)


def _in_training(
    module: Any, own: dict[str, Any], x: Tensor, scale: Tensor, offset: Tensor, axis: int, count: int, is_recorded: bool
) -> Tensor | None:
    buffers = buffers_of(module)
    running = buffers.get("running_mean"), buffers.get("running_var"), buffers.get("num_batches_tracked")
    if count < 2 or own["convention"] not in CONVENTIONS or not (own["track_running_stats"] and _may_change(running)):
        return None
    momentum = module._momentum() if own["cumulative"] else own["momentum"]
    share, corrected = shares(count, momentum, own["convention"])
    if x.is_cuda:
        if not (running[0].is_contiguous() and running[1].is_contiguous()):
            return None
        on_cuda = RunningCall(own["eps"], axis, running[:2], (1 - share, share, corrected))
        y = _recorded(x, scale, offset, on_cuda) if is_recorded else on_cuda.run(x, scale, offset)
        _increment_version(running[:2])
        running[2].add_(1)
        return y
    call = Call(own["eps"], axis)
    y = _recorded(x, scale, offset, call) if is_recorded else call.run(x, scale, offset)
    if not blend(running, call.used, 1 - share, share, corrected):  # hooks ran since they were checked
        raise changed()
    _increment_version(running)
    return y


def _may_change(running: tuple[Any, ...]) -> bool:
    """Whether the running mean and variance, which are vectors, and the number of batches may be changed in place."""
    mean, variance, batches = running
    return (
        type(batches) is Tensor and batches.dtype is torch.int64 and batches.device == mean.device and batches.numel() == 1
        and not (mean.requires_grad or variance.requires_grad)
        and not (mean.is_inference() or variance.is_inference() or batches.is_inference())
    )  # fmt: skip
