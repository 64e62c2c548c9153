"""Batched calls from tasks of an event loop: the function runs in a thread, the loop only keeps the clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from ..core.lock import departed, remove_departed
from .backward import PullBack
from .submit import refuse_copy
from .tasks import done, running_loop


class AsyncCalls:
    """The calls of a batcher, awaitable."""

    def __init__(self, batcher: Any, *first: Any) -> None:
        self._batcher, self._first = batcher, first

    def bound(self, instance: object) -> AsyncCalls:
        """The same with `instance` as the first argument."""
        return AsyncCalls(self._batcher, instance)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self._batcher.name)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batcher, spot = self._batcher, running_loop()
        request = batcher._take(self._first + args if self._first else args, kwargs)
        try:
            batcher._enter(request, None, None, None, spot.thread)  # by position: compiled, a plain call
            await done(request, spot.loop)
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
        batcher, spot = self._batcher, running_loop()
        request = batcher._take((*self._first, *args), kwargs)
        try:
            batcher._enter(request, deadline, priority, caller, spot.thread)
            await done(request, spot.loop)
        except BaseException:
            departed.append(request)
            request.end_inside()
            remove_departed()
            raise
        result = request.outcome()
        return (result, request.receipt()) if receipt else result

    async def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[[Any], Awaitable[Any]]]:
        """As `Batcher.vjp`; the pull-back is awaited too."""
        batcher = self._batcher
        request = batcher._take_vjp((*self._first, *args), kwargs)
        try:
            batcher._enter(request)
            await done(request)
        except BaseException:
            departed.append(request)
            request.end_inside()
            remove_departed()
            raise
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
