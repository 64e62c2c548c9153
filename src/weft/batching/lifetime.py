"""How a batcher is closed: for good by `close`, and between the blocks that it is entered in.

Blocks may be nested, and several threads and tasks may be in blocks of one batcher: the end of the last block closes it, and the
next block opens it again. So a server whose lifespan is a block can be started again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from ..core.lock import lock
from ..core.ticket import Ticket
from ..errors import CancelledError, DeadlineExceededError, FailedPreconditionError
from .dispatcher import Dispatcher
from .options import flag, positive
from .submit import Submitter

if TYPE_CHECKING:
    from .async_function import AsyncFunction


class Lifetime(Submitter):
    """The part of a `Batcher` that closes it."""

    _runner: Any
    _async_function: AsyncFunction | None

    def _begin_life(self) -> None:
        self._closed = self._is_ended = False  # ended is closed for good
        self._blocks = 0  # how many it is in
        self._leaving: list[Ticket] = []  # of the ends of blocks that wait until nothing runs

    def close(self, *, drain: bool = True, timeout: float = 60.0) -> None:
        """Refuse new calls, run those that wait, or with `drain=False` cancel them, and return when nothing runs.

        If a batch still runs after `timeout` seconds, raise DeadlineExceededError; the batcher is closed all the same.
        """
        self._wait_closed(self._begin_close(True, drain, timeout))

    async def aclose(self, *, drain: bool = True, timeout: float = 60.0) -> None:
        """As `close`, for tasks of an event loop."""
        await self._await_closed(self._begin_close(True, drain, timeout))

    def __enter__(self) -> Self:
        """Begin a block; the end of the last one closes the batcher until the next begins."""
        with lock:
            if self._is_ended:
                raise CancelledError(f"the batcher {self.name} is closed for good, by close(): make another one")
            self._blocks += 1
            leaving, self._leaving = self._leaving, []
            if self._closed:
                self._closed = False
                self._dispatcher.refuse(None)
        for idle in leaving:  # the end of the last block need not wait for the calls of this one
            idle.resolve(None)
            idle.wake()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait_closed(self._leave_block())

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await self._await_closed(self._leave_block())

    def _leave_block(self) -> Ticket:
        with lock:
            self._blocks -= 1
        return self._begin_close(False)

    def _begin_close(self, for_good: bool, drain: bool = True, timeout: float = 60.0) -> Ticket:
        """Close the queue, for good or if the batcher is in no block; return a ticket that ends when nothing runs."""
        flag("drain", drain)
        idle = _IdleTicket(self._dispatcher, positive("timeout", timeout))
        why = CancelledError(f"the batcher {self.name} was closed")
        is_recursive = self._dispatcher.is_recursive
        with lock:  # a block that another thread enters now begins before or after this
            if self._blocks and not for_good:
                idle.resolve(None)
                return idle
            if is_recursive:
                raise FailedPreconditionError(
                    f"the batcher {self.name} cannot be closed from inside one of its own calls"
                )
            self._closed, self._is_ended = True, self._is_ended or for_good
            self._leaving = [] if for_good else [*self._leaving, idle]
            self._dispatcher.refuse(why)
        if not drain:
            self._runner.cancel(why)
        self._dispatcher.empty(drain, why)
        self._outstanding.end_overdue()
        self._dispatcher.when_idle(idle)
        return idle

    def _wait_closed(self, idle: Ticket) -> None:
        idle.wait()
        self._end_function().wait()

    async def _await_closed(self, idle: Ticket) -> None:
        from .tasks import TaskWaiter

        await TaskWaiter(idle)
        idle.outcome()
        await TaskWaiter(self._end_function())

    def _end_function(self) -> Ticket:
        """End the loop of an async function, unless the batcher was opened again; return a ticket for its end."""
        with lock:
            if self._async_function is not None and self._closed:
                return self._async_function.end()
        ended = Ticket(self._scope.clock)
        ended.resolve(None)
        return ended


class _IdleTicket(Ticket):
    """Waits until a dispatcher is idle."""

    def __init__(self, dispatcher: Dispatcher, seconds: float) -> None:
        super().__init__(dispatcher.clock)
        self.alarm = dispatcher.clock.now() + seconds
        self._seconds = seconds

    def on_alarm(self) -> None:
        if self.clock.now() >= self.alarm:
            self.reject(DeadlineExceededError(f"a batch still runs after {self._seconds:g} s"))
