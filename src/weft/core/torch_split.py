"""How a backward on an accelerator waits for other callers without blocking the accelerator.

PyTorch runs all backwards of an accelerator in one thread, which must not wait. So a node that waits is split in two. The node next
to the loss, `_HandOver`, gets the gradients in the accelerator's thread. It stores them and returns an empty tensor in host memory,
the gradient of a token. The node behind the token therefore runs in the thread that called `backward()`, and may wait there.

While it waits, no other node of its backward may run in that thread, or callers of two batches could wait for each other. So the
node never starts another backward that several callers wait for: a thread within a backward takes up any node that is ready.

Gradients are stored with an event of their stream. Import this module only where torch is in use: it imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from typing import Any, NamedTuple

import torch

from ..errors import FailedPreconditionError
from .arrays import Array
from .torch_backward import check_thread, device_threads
from .torch_internals import current_backward, direct_apply, stream_handle

_is_capturing = torch.cuda.is_current_stream_capturing

#: Tests set this to split nodes of host tensors, too.
splits_on_host = False


# --- streams ---


def current_stream(device: Any) -> Any:
    """The stream on which this thread works on a device; None for the host, and for devices without streams."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    if device.type == "cpu":
        return None
    find = getattr(torch.get_device_module(device), "current_stream", None)
    return None if find is None else find(device)


def is_current(stream: Any) -> bool:
    """True if this thread works on a stream."""
    if isinstance(stream, torch.cuda.Stream):  # by its handle: a `torch.cuda.Stream` takes 20 times as long to make
        return stream_handle(stream.device_index) == stream.cuda_stream
    return bool(stream == current_stream(stream.device))


def device_of(arrays: Iterable[Any]) -> Any:
    """The first device among tensors that is not the host; None if all are in host memory."""
    for x in arrays:
        if isinstance(x, torch.Tensor) and not x.is_cpu:
            return x.device
    return None


@contextmanager
def use_stream(stream: Any) -> Iterator[None]:
    """Work on a stream in a block; None changes nothing."""
    if stream is None or is_current(stream):
        yield
    else:
        with torch.get_device_module(stream.device).stream(stream):
            yield


class StreamPoint(NamedTuple):
    """A point in the work of a stream: an event, or, without one, all that the stream has to do by the time of the wait."""

    stream: Any
    event: Any = None

    def is_here(self) -> bool:
        """True if this thread works on the stream of this point, and need not wait for it."""
        return is_current(self.stream)

    def wait(self, tensors: Iterable[Any] = (), waiting: Any = None) -> None:
        """Make `waiting`, or the current stream, wait for this point, after which it may use these tensors."""
        stream = self.stream
        if is_current(stream) if waiting is None else waiting == stream:
            return
        here = current_stream(stream.device) if waiting is None else waiting
        if self.event is None:
            here.wait_stream(stream)
        else:
            here.wait_event(self.event)
        for x in tensors:  # their memory is not used again before that
            if isinstance(x, torch.Tensor) and x.device == stream.device:
                x.record_stream(here)


def point_now(device: Any) -> StreamPoint | None:
    """The point that the current stream of a device has reached; None for the host, and for devices without streams.

    The default stream gets no event: an event for each caller costs more than a wait that may be longer than it must be.
    """
    if device.type == "cuda" and stream_handle(device.index) == 0:
        return _default_point(device)
    stream = current_stream(device)
    if stream is None:
        return None
    point = _default_point(device)
    return point if stream == point.stream else StreamPoint(stream, stream.record_event())


@cache
def _default_point(device: Any) -> StreamPoint:
    return StreamPoint(torch.get_device_module(device).default_stream(device))


def leave_stream(x: Array) -> None:
    """Complete what this thread computes of `x` on a stream of its own: a thread on any stream takes it next.

    The ops hand over tensors so, with no event beside them; work on the default stream is waited for by `enter_stream`.
    """
    if not x.is_cuda or stream_handle(x.device.index) == 0:
        return
    refuse_capture(x.device)
    torch.cuda.current_stream(x.device).synchronize()


def enter_stream(tensors: Iterable[Any]) -> None:
    """Make the stream of this thread wait for tensors of other threads, which have left their streams."""
    for x in tensors:
        if isinstance(x, torch.Tensor) and x.is_cuda:
            _default_point(x.device).wait([x])


def refuse_capture(device: Any) -> None:
    """Raise if this thread captures a CUDA graph: a replay could not wait for other callers."""
    if device.type == "cuda" and _is_capturing():
        raise FailedPreconditionError(
            "a call that shares a batch with other callers cannot be captured in a CUDA graph: capture inside the batched function"
        )


# --- the thread of a device ---


class _Probe(torch.autograd.Function):
    """A node that notes the thread of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Array) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Array) -> Any:
        device_threads.add(get_ident())
        return None


_known_devices: set[Any] = set()


def refuse_device_thread(device: Any) -> None:
    """Raise in the thread that runs the backwards of a device."""
    if device not in _known_devices:
        with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
            _Probe.apply(torch.zeros((), device=device, requires_grad=True)).backward()
        _known_devices.add(device)
    check_thread()


# --- the two nodes ---


def splits(arrays: Iterable[Any]) -> bool:
    """True if a node with these outputs must be split."""
    return splits_on_host or device_of(arrays) is not None


class Handed(NamedTuple):
    """The gradients that a backward has brought, and when they are computed."""

    gradients: tuple[Array | None, ...]
    when: StreamPoint | None

    def wait(self) -> tuple[Array | None, ...]:
        """Return the gradients, for the current stream."""
        if self.when is not None:
            self.when.wait(self.gradients)
        return self.gradients

    def copied(self) -> Handed:
        """Return copies, made on the current stream: a caller that does not wait for the batch may write to its own gradients."""
        copies = tuple(x if x is None else x.clone() for x in self.wait())
        return Handed(copies, None if self.when is None else point_now(self.when.stream.device))


class HandOver:
    """What the two nodes share: the gradients on their way from the first to the second, by the number of the backward."""

    __slots__ = ("_stored",)

    def __init__(self) -> None:
        self._stored: dict[int, Handed] = {}

    def store(self, gradients: tuple[Array | None, ...]) -> None:
        device = device_of(gradients)
        self._stored[current_backward()] = Handed(gradients, None if device is None else point_now(device))

    def take(self) -> Handed:
        return self._stored.pop(current_backward())


#: The gradient of every token.
_NOTHING = torch.zeros(1)


def new_tokens(count: int) -> list[Array]:
    """Tokens, the outputs of nodes that wait. One call makes all tokens of a batch, because it releases the interpreter's lock."""
    return list(torch.unsafe_split(torch.zeros(count), 1)) if count > 1 else [torch.zeros(1)]


class _HandOver(torch.autograd.Function):
    """The node of the outputs: it hands their gradients over to the node of the token. Those in `constant` have no gradient."""

    @staticmethod
    def forward(ctx: Any, shared: HandOver, outputs: Sequence[Array], constant: Sequence[Array], token: Array) -> Any:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        if constant:
            ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Array | None) -> Any:
        ctx.shared.store(gradients)
        return None, None, None, _NOTHING


#: `with_hand_over(shared, outputs, constant, token)` returns the outputs with this node.
with_hand_over = direct_apply(_HandOver)
