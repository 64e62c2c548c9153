"""PyTorch: one `autograd.Function` records every op.

torch takes a derivative from a Function's `backward`, and sees only tensors among `apply`'s top-level arguments, so the
inputs travel flat. Inside `forward` gradients are off and tensors are plain. A cotangent nobody asked for arrives as zeros
(torch's default, kept); the one of an integer output arrives as integer zeros and is handed on as None. What is saved goes
through `save_for_backward`, which is what makes double backward and hooks see it; whatever is not a tensor is kept beside it.
Traps: `setup_context` costs 18 us a call, so `is_recording` keeps calls without gradients away; a backward that waits for
other threads blocks all of a CUDA device's backwards, which share one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._arrays import Array


class Node(torch.autograd.Function):
    """The node of every op."""

    @staticmethod
    def forward(call: Any, *inputs: Array) -> tuple[Array, ...]:
        return call.run(inputs)

    @staticmethod
    def setup_context(ctx: Any, arguments: tuple[Any, ...], outputs: tuple[Array, ...]) -> None:
        call, *inputs = arguments
        kept = call.keep(inputs, outputs)
        ctx.call = call
        ctx.others = [None if isinstance(k, torch.Tensor) else k for k in kept]
        ctx.holds_tensors = any(isinstance(k, torch.Tensor) for k in kept)
        ctx.save_for_backward(*(k if isinstance(k, torch.Tensor) else None for k in kept))
        ctx.mark_non_differentiable(*(t for t in outputs if not _has_gradient(t)))

    @staticmethod
    def backward(ctx: Any, *grads: Array) -> tuple[Array | None, ...]:
        # A node that holds no tensor has nothing to free: asking for its saved tensors would forbid a second backward.
        tensors = ctx.saved_tensors if ctx.holds_tensors else [None] * len(ctx.others)
        kept = [other if saved is None else saved for saved, other in zip(tensors, ctx.others, strict=True)]
        cotangents = [g if g is not None and _has_gradient(g) else None for g in grads]
        return None, *ctx.call.pull_back(cotangents, kept)


def is_recording(x: Array) -> bool:
    """Whether torch would record an operation on `x` now."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return bool(x.requires_grad and torch.is_grad_enabled())


def apply(call: Any, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The flat outputs of `call`, with a node behind them."""
    return Node.apply(call, *inputs)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
