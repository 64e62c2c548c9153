"""Streams: how callers of a function that yields iterate over their own rows of each chunk; `stream_run` is the worker's end."""

from __future__ import annotations

import sys
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..core.arrays import library_of
from ..errors import FailedPreconditionError, InvalidArgumentError
from .arguments import Arguments
from .modes import torch_mode
from .request import CallContext, Request
from .statistics import Receipt
from .stream_run import END, Feed
from .submit import Submitter
from .tasks import TaskWaiter

R = TypeVar("R", covariant=True)


class _Caller(Generic[R]):
    """What the streams of threads and of tasks have in common."""

    def __init__(self, batcher: Submitter, request: Request) -> None:
        self._feed = request.feed = Feed(request.clock)
        self._batcher, self._request = batcher, request
        self._is_begun = False
        self._turn = allocate_lock()

    def receipt(self) -> Receipt:
        """Return the `weft.Receipt` of the batch; its run time is that to the last chunk so far."""
        if self._request.value is None:
            raise FailedPreconditionError("a stream has a receipt once it has a chunk")
        return self._request.receipt()

    def waits(self) -> bool:
        """Return whether no batch has the call yet."""
        return self._request.is_waiting()

    def _begin(self) -> Request:
        """Return the request of the call, whose time counts from now on."""
        request = self._request
        self._is_begun = True
        request.arrived = request.clock.now()
        request.deadline = request.arrived + request.context.seconds
        return request

    def _take_turn(self) -> None:
        if not self._turn.acquire(False):
            raise FailedPreconditionError("one thread or task at a time takes chunks from a stream")

    def _chunk(self) -> Any:
        """Return the caller's rows of the next chunk, which is there."""
        chunk = self._feed.take()
        if chunk is END:
            return END
        self._request.value = chunk
        return self._request.result()

    def __del__(self) -> None:
        if hasattr(self, "_feed"):
            self._feed.leave()


class Stream(_Caller[R]):
    """The chunks of one call with the caller's own rows, in order. `close`, or letting it go, leaves the stream early."""

    def __iter__(self) -> Stream[R]:
        return self

    def __next__(self) -> R:
        self._take_turn()
        try:
            chunk = self._next()
        except BaseException:
            self._feed.leave()
            raise
        finally:
            self._turn.release()
        if chunk is END:
            self._feed.end()
            raise StopIteration
        return chunk

    def _next(self) -> Any:
        if not self._is_begun:
            return self._batcher._answer(self._begin())
        while (waiting := self._feed.wait()) is not None:
            waiting.wait()
        return self._chunk()

    def close(self) -> None:
        """Leave the stream: the other callers of the batch go on."""
        self._is_begun = True
        self._feed.leave()

    def __enter__(self) -> Stream[R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Caller[R]):
    """As `Stream`, for a task of an event loop."""

    def __aiter__(self) -> AsyncStream[R]:
        return self

    async def __anext__(self) -> R:
        self._take_turn()
        try:
            chunk = await self._next()
        except BaseException:
            self._feed.leave()
            raise
        finally:
            self._turn.release()
        if chunk is END:
            self._feed.end()
            raise StopAsyncIteration
        return chunk

    async def _next(self) -> Any:
        if not self._is_begun:
            from .async_calls import AsyncCalls

            return await AsyncCalls(self._batcher)._answer(self._begin())
        while (waiting := self._feed.wait()) is not None:
            await TaskWaiter(waiting)
            waiting.outcome()
        return self._chunk()

    async def aclose(self) -> None:
        """Leave the stream: the other callers of the batch go on."""
        self._is_begun = True
        self._feed.leave()

    async def __aenter__(self) -> AsyncStream[R]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class StreamContext(CallContext):
    """The context of a call that streams."""


class StreamArguments(Arguments):
    """The arguments of a function that yields: only calls that stream are accepted."""

    def request(self, context: CallContext, args: tuple[Any, ...], kwargs: dict[str, Any], is_vjp: bool) -> Request:
        if type(context) is not StreamContext:
            raise FailedPreconditionError(
                "the function of this batcher yields its result in chunks: iterate over stream(...), or aio.stream(...) in a task"
            )
        return Arguments.request(self, context, args, kwargs, is_vjp)


def open_stream(
    kind: Callable[[Any, Request], Any],
    batcher: Submitter,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    deadline: float | None,
    priority: str | None,
    caller: str | None,
) -> Any:
    """Return a `Stream` or `AsyncStream` of a call."""
    if not isinstance(batcher._arguments, StreamArguments):
        raise FailedPreconditionError(
            f"the function of the batcher {batcher.name} returns its result at once: call it; stream is for functions that yield"
        )
    context = batcher._context(deadline, priority, caller, kind is AsyncStream, StreamContext)
    return kind(batcher, _request(batcher, args, kwargs, context))


def _request(batcher: Submitter, args: tuple[Any, ...], kwargs: dict[str, Any], context: CallContext) -> Request:
    """Return the request of a call that streams. It records no gradients: calls with and without share their batches."""
    mode = torch_mode()
    if mode is None or not mode.grad:
        request = batcher._request(args, kwargs, context)
    else:
        with sys.modules["torch"].no_grad():
            request = batcher._request(args, kwargs, context)
        if any(library_of(x) == "torch" and x.requires_grad for x in request.arrays):
            _refuse(batcher, "a stream has no gradients: pass tensors that need none, or stream under torch.no_grad()")
    if request.is_traced:
        _refuse(batcher, "a stream has no gradients and cannot be traced: stream outside the transformations of JAX")
    return request


def _refuse(batcher: Submitter, text: str) -> None:
    error = InvalidArgumentError(text)
    batcher._refuse(error)
    raise error
