"""The replica's part of a step: what it does between the keeper's request to prepare and the new weights."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..batching.tasks import TaskWaiter
from ..errors import CancelledError, DeadlineExceededError, FailedPreconditionError
from .frames import Frame
from .server import Connection

if TYPE_CHECKING:
    from .replica import Kept, Replica

#: So long a replica waits for the batches that run when a step begins.
QUIET_SECONDS = 60.0
#: A step that the keeper neither commits nor takes back so many seconds after its own patience has ended is taken back.
STEP_SECONDS = 120.0


class Step:
    """A step under way. Gradients for batches that held none when it began wait for its end."""

    def __init__(self, replica: Replica, connection: Connection, seconds: float) -> None:
        self.connection = connection
        self.held: list[tuple[Connection, Frame]] = []
        self._replica = replica
        self._backwards = set(replica.batcher._outstanding.backwards)  # that hold a gradient
        self._is_closed = False  # whether this step has closed the gate
        self._is_over = False
        self._is_quiet = asyncio.Event()  # set when no batch runs, and at the end
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds + STEP_SECONDS, self.end, None)

    def waits_for(self, kept: Kept) -> bool:
        """Return True if this result's gradient is taken during the step: the step may wait for it."""
        if self._is_closed:
            return False
        if kept.pull_back is not None:
            return True
        from ..batching.torch_graph import tickets_of

        return any(ticket.backward in self._backwards for ticket in tickets_of(kept.outputs))

    async def prepare(self) -> tuple[Any, list[Any]]:
        """Wait for the batches that hold a gradient, stop the model, and return gradients and buffers."""
        replica = self._replica
        try:
            for backward in self._backwards:
                with suppress(Exception):  # its callers have the error
                    await TaskWaiter(backward.watch())
            if not self._is_over:
                self._is_closed = True
                replica.gate.close(self._on_quiet)
                await self._wait_until_quiet()
            if self._is_over:
                raise CancelledError("the step was taken back")
            if replica.weights is None:
                return [replica.rows, replica.held_rows, 0], []
            gradients = replica.weights.gradients()
            return [replica.rows, replica.held_rows, len(gradients)], [*gradients, *replica.weights.buffers_now()]
        except BaseException:
            self.end(None)
            raise

    def _on_quiet(self) -> None:
        """Called when the last batch has left the gate, in any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._is_quiet.set)

    async def _wait_until_quiet(self) -> None:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                await self._is_quiet.wait()
        except TimeoutError:
            raise DeadlineExceededError(f"a batch still runs after {QUIET_SECONDS:g} s") from None

    def commit(self, version: int, state: list[Any]) -> None:
        if self._is_over or not self._is_closed:
            raise FailedPreconditionError("no step is under way: it took too long and was taken back")
        self._replica.weights.load(state)
        self.end(version)

    def end(self, version: int | None) -> None:
        """Let the model run again, with the weights of `version` if it is not None."""
        if self._is_over:
            return
        self._is_over = True
        self._is_quiet.set()
        self._timer.cancel()
        replica = self._replica
        replica.step = None
        if version is not None:
            replica.version = version
            replica.hold(0)
            replica.rows = 0
            for connection in replica.server.connections:
                connection.kept.clear()
        if self._is_closed:
            replica.gate.open()
        for connection, frame in self.held:
            replica.handle(connection, frame)
