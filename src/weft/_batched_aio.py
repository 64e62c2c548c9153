"""Batched calls from tasks of an event loop: the function runs in a thread, the loop only keeps the clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ._batched_back import PullBack
from .batching.aio import done, here


class AsyncCalls:
    """The calls of a batcher, awaitable."""

    def __init__(self, batcher: Any, *first: Any) -> None:
        self._batcher, self._first = batcher, first

    def bound(self, instance: object) -> AsyncCalls:
        """The same with `instance` as the first argument."""
        return AsyncCalls(self._batcher, instance)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        spot = here()
        request = self._batcher._ask(self._first + args if self._first else args, kwargs, spot.thread)
        await done(request, spot.loop)
        return request.outcome()

    async def call(
        self, *args: Any, deadline: float | None = None, priority: str | None = None, caller: str | None = None,
        receipt: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As `Batcher.call`."""
        batcher = self._batcher
        request, spot = batcher._take((*self._first, *args), kwargs), here()
        batcher._enter(request, deadline, priority, caller, spot.thread)
        await done(request, spot.loop)
        result = request.outcome()
        return (result, request.receipt()) if receipt else result

    async def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[[Any], Awaitable[Any]]]:
        """As `Batcher.vjp`; the pull-back is awaited too."""
        batcher = self._batcher
        request = batcher._enter(batcher._take_vjp((*self._first, *args), kwargs))
        await done(request)
        result = request.outcome()
        whole = PullBack(batcher._backward, request)

        async def pull_back(gradient: Any) -> Any:
            shares = whole.shares(gradient)
            parts = []
            try:
                for share, given in shares:
                    share.deposit(given, elsewhere=True)
                for share, _ in shares:
                    await done(share)
                    parts.append(share.outcome()[0])
            except BaseException as error:
                shares[0][0].note_failure(error)
                raise
            return whole.joined(parts)

        return result, pull_back

    async def join(self) -> None:
        """As `Batcher.join`."""
        outstanding = self._batcher._outstanding
        for watch in outstanding.watches():
            await done(watch)
        outstanding.raise_failed()
