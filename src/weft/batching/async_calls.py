"""Batched calls from tasks of an event loop. The function runs in a worker thread, or with `on_loop` in the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

from ..core.lock import departed, remove_departed
from .submit import Submitter, refuse_copy
from .tasks import CallbackWaiter, TaskWaiter, running_loop
from .vjp import PullBack


class AsyncCalls:
    """The calls of a batcher, awaitable; `first` is the object of a batched method."""

    def __init__(self, batcher: Submitter, *first: Any) -> None:
        self._batcher, self._first = batcher, first

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self._batcher.name)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batcher = self._batcher
        request = batcher._request(self._first + args if self._first else args, kwargs, batcher._plain_task)
        try:  # as `_answer`, without another coroutine: benchmark row "no-op, 64 tasks"
            if batcher._on_loop:
                request.loop = running_loop().loop
            batcher._submit(request)
            await TaskWaiter(request)
        except BaseException:
            departed.append(request)
            request.end_inside()
            remove_departed()
            raise
        return request.outcome()

    async def call(
        self, *args: Any, deadline: float | None = None, priority: str | None = None, caller: str | None = None,
        receipt: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As `Batcher.call`."""
        context = self._batcher._context(deadline, priority, caller, True, receipt=receipt)
        request = self._batcher._request(self._first + args, kwargs, context)
        result = await self._answer(request)
        return (result, request.receipt()) if receipt else result

    def start(
        self, loop: Any, callback: Callable[[Any], object], args: tuple[Any, ...], kwargs: dict[str, Any],
        deadline: float | None = None, priority: str | None = None, is_alone: bool = False,
    ) -> CallbackWaiter:  # fmt: skip
        """Make a call in the running loop `loop`; `callback(request)` runs there when it is done, and takes the `outcome`.

        `close` of what this returns gives the call up. With `on_loop` the batch of a call that `is_alone`, the only one of this
        turn of the loop, runs here at once if the batcher is idle; what ends its thread then comes from here.
        """
        batcher = self._batcher
        is_plain = deadline is None and priority is None
        context = batcher._plain_task if is_plain else batcher._context(deadline, priority, None, True)
        request = batcher._request(self._first + args if self._first else args, kwargs, context)
        try:
            if batcher._on_loop:
                request.loop, request.is_alone = loop, is_alone
            batcher._submit(request)
            waiter = CallbackWaiter(request, loop, partial(callback, request))
            waiter.wake()
        except BaseException:
            departed.append(request)
            request.end_inside()
            remove_departed()
            raise
        return waiter

    def stream(
        self, *args: Any, deadline: float | None = None, priority: str | None = None, caller: str | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As `Batcher.stream`: an asynchronous iterator."""
        from .streams import AsyncStream, open_stream

        return open_stream(AsyncStream, self._batcher, self._first + args, kwargs, deadline, priority, caller)

    async def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[[Any], Awaitable[Any]]]:
        """As `Batcher.vjp`; the pull-back is awaited too."""
        request = self._batcher._request(self._first + args, kwargs, self._batcher._plain_task, True)
        result = await self._answer(request)
        return result, AsyncPullBack(PullBack(request))

    async def _answer(self, request: Any) -> Any:
        """Submit a request, wait, and return its result."""
        try:
            if self._batcher._on_loop:
                request.loop = running_loop().loop
            self._batcher._submit(request)
            await TaskWaiter(request)
        except BaseException:
            departed.append(request)
            request.end_inside()
            remove_departed()
            raise
        return request.outcome()

    async def join(self) -> None:
        """As `Batcher.join`."""
        outstanding = self._batcher._outstanding
        for watch in outstanding.watches():
            await TaskWaiter(watch)
        outstanding.raise_failed()


class AsyncPullBack:
    """As `PullBack`, awaited. It is no function inside `vjp`: compiled, that would refer to itself, and outlive its caller."""

    def __init__(self, whole: PullBack) -> None:
        self._whole = whole

    async def __call__(self, gradient: Any) -> Any:
        deposits = self._whole.split(gradient)
        parts = []
        try:
            for ticket, gradients in deposits:
                ticket.deposit(gradients, elsewhere=True)
            for ticket, _ in deposits:
                await TaskWaiter(ticket)
                parts.append(ticket.outcome()[0])
        except BaseException as error:
            deposits[0][0].note_failure(error)
            raise
        return self._whole.concat(parts)
