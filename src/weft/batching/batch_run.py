"""The processing of one batch, as a job for one of its callers or for a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.lock import departed, remove_departed
from ..core.ticket import Ticket
from .call import QueuedCall
from .queue import Batch

if TYPE_CHECKING:
    from .dispatcher import Dispatcher


class Run:
    """The run of a batch, from the moment the batch is taken from its queue."""

    __slots__ = ("batch", "dispatcher", "done", "is_assigned", "is_begun", "is_on_loop", "problem", "runner")

    def __init__(self, dispatcher: Dispatcher, batch: Batch) -> None:
        self.dispatcher = dispatcher
        self.batch = batch
        self.is_assigned = False  # whether a caller or a worker has it to do
        self.is_begun = False  # whether a thread processes it
        self.is_on_loop = False  # whether an event loop runs it
        self.runner: QueuedCall | None = None  # the caller that it is assigned to
        self.done: list[Ticket] | None = None  # the tickets to wake, once the scheduler knows that the run has ended
        self.problem: BaseException | None = None  # what ended the thread that ran it

    def is_short(self) -> bool:
        """Whether it may run inside an event loop."""
        return self.dispatcher.is_short(self.batch)

    def run(self) -> None:
        """Process the batch, unless the worker that had it was ended in the middle: then the callers get an error."""
        if self.problem is None and self.done is None:
            self.dispatcher.run(self)
        else:
            self.abort(self.problem)

    def abort(self, problem: BaseException | None) -> None:
        """Report that `problem` has ended the worker thread that ran it: the callers get an error."""
        self.problem = problem
        if self.batch.rest is not None:
            self.batch.rest.abort()
        departed.append(self)
        remove_departed()

    def forget(self) -> list[Any]:
        """See `weft.core.lock`."""
        return self.dispatcher.abort(self)
