"""PyTorch at the caller: the node through which a remote result's gradient is sent to its replica.

A backward sends the gradients of all remote results that it reaches, and waits for the replicas at its end; where a result's inputs
need a gradient it waits there. A caller that must not wait, a task of an event loop or with `wait_backward=False`, goes on: the
inputs of such a result are no inputs of its node, and get their gradient when it comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..core import torch_internals
from ..errors import FailedPreconditionError, InvalidArgumentError
from .invocation import Invocation
from .requests import Pending


def check(arrays: Sequence[Any]) -> None:
    """Refuse calls under transforms of PyTorch."""
    if torch_internals.are_transforms_active():
        raise InvalidArgumentError(
            "a remote call does not work under torch.func (vmap, grad, jvp) or in forward mode: use them inside the deployed model"
        )


def attach(invocation: Invocation, outputs: list[Any], inputs: Sequence[Any], is_deferred: bool) -> list[Any]:
    """Return the recorded tensors of a result with a node that sends their gradient."""
    deferred = list(inputs) if is_deferred else None
    with torch.enable_grad():
        return list(_RemoteRows.apply(invocation, deferred, outputs, _ALWAYS, *(() if is_deferred else inputs)))


#: Needs a gradient, so that there is a node even if no input does; nothing is ever added to it.
_ALWAYS = torch.empty(0, requires_grad=True)
_ACCUMULATES = torch.autograd.graph.get_gradient_edge(_ALWAYS).node


class _RemoteRows(torch.autograd.Function):
    """The rows of a remote result; the node sends their gradient and returns that of the caller's inputs."""

    @staticmethod
    def forward(
        ctx: Any, invocation: Invocation, deferred: list[Any] | None, outputs: list[Any], _: Any, *inputs: Any
    ) -> Any:
        ctx.invocation, ctx.deferred = invocation, deferred
        ctx.count = len(inputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        none = (None,) * (4 + ctx.count)
        number = torch_internals.current_backward()
        end = _ends.get(number)
        if end is not None and end.error is not None:
            return none
        try:
            return none[:4] + tuple(_hand_in(ctx, gradients, number, end))
        except Exception as error:
            if number == -1:
                raise
            # If the node raised at once, PyTorch would free the rest of the graph after the thread's last line of Python.
            (end or _End(number)).error = error
            return none


def _hand_in(ctx: Any, gradients: Sequence[Any], number: int, end: _End | None) -> Sequence[Any]:
    if torch.is_grad_enabled():
        raise FailedPreconditionError(
            "a batch goes back once and is not differentiated twice: call backward() without create_graph=True"
        )
    invocation: Invocation = ctx.invocation
    if ctx.deferred is not None:
        client = invocation.client
        pending = invocation.send(gradients, partial(_add_gradients, invocation, ctx.deferred))
        client.outstanding[pending] = None
        if pending.done:  # before it was noted
            client.outstanding.pop(pending, None)
        return ()
    pending = invocation.send(gradients)
    if number == -1 or any(ctx.needs_input_grad[4:]):
        invocation.wait(pending)
        found = iter(invocation.answer(pending))
        return [next(found) for _ in range(ctx.count)]
    (end or _End(number)).waiting.append((invocation, pending))
    return (None,) * ctx.count


def _add_gradients(invocation: Invocation, inputs: list[Any], pending: Pending) -> None:
    """Add the gradients of a call's inputs, which have come."""
    client = invocation.client
    try:
        found = invocation.answer(pending)
        pairs = [(x, g) for x, g in zip(inputs, found, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
    except Exception as error:
        client.failed.append(error)
    finally:
        client.outstanding.pop(pending, None)


class _End:
    """What the end of a backward pass waits for."""

    def __init__(self, number: int) -> None:
        self.waiting: list[tuple[Invocation, Pending]] = []
        self.error: Exception | None = None
        self._number = number
        _ends[number] = self
        torch_internals.at_end_of_backward(self)

    def __call__(self) -> None:
        _ends.pop(self._number, None)
        waiting, error = self.waiting, self.error
        self.waiting, self.error = [], None
        for invocation, pending in waiting:
            try:
                invocation.wait(pending)
            except Exception as problem:
                error = error or problem
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame


#: By the number of the backward pass that runs. If it fails early, PyTorch frees its callback, and with it the entry.
_ends: weakref.WeakValueDictionary[int, _End] = weakref.WeakValueDictionary()
