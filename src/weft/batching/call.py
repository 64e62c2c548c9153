"""A call that waits in the queue of a dispatcher: its rows or slices, and how it is answered."""

from __future__ import annotations

from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..core.ticket import Ticket
from ..errors import DeadlineExceededError
from .queue import Batch, Queue, Task

if TYPE_CHECKING:
    from .dispatcher import Dispatcher
    from .scheduler import Scheduler

#: How much later than the caller that watches a batch the other callers check it, in seconds.
OTHERS_DELAY = 0.1

_start = attrgetter("start")


class QueuedCall(Ticket):
    """A ticket with rows. It is its own task, or is split into slices and answered when all of them are."""

    def __init__(self, dispatcher: Dispatcher, rows: int, payload: Any) -> None:
        self._init_call(dispatcher, rows, payload)

    def _init_call(self, dispatcher: Dispatcher, rows: int, payload: Any) -> None:
        self._init_ticket(dispatcher.clock, None)
        self.dispatcher = dispatcher
        self.rows = rows
        self.payload = payload
        self.arrived = 0.0
        self.batch: Batch | None = None
        self.queue: Queue | None = None
        self.start = 0
        self.low = False  # whether it has low priority
        self.has_departed = False  # whether its caller was interrupted or gave up
        self.loop: Any = None  # the event loop of the caller, if it may run batches
        self.is_alone = False  # whether that loop makes no other call in its present turn
        self.is_task = False  # whether the caller is known to be a task of an event loop
        self.deadline = inf  # when the caller gives up
        self.slices: list[Task] | None = None
        self.answers: dict[int, Any] | None = None  # the answer of each slice by its first row

    @property
    def owner(self) -> QueuedCall:
        """The call whose rows these are, as of a `Task`."""
        return self

    def piece(self, start: int, rows: int) -> Task:
        """Make a slice of this call a task of its own, in place of the task that began at the same row."""
        piece = Task(self, start, rows)
        if self.answers is None:
            self.answers = {}
        # In one assignment: a slice that is answered meanwhile must not find itself the last.
        self.slices = [*(task for task in self.slices or () if task.start != start), piece]
        return piece

    def tasks(self) -> list[Any]:
        """Return the tasks of this call: itself, or its slices; rows that no slice has become a slice."""
        if self.slices is None:
            return [self]
        start = 0
        for task in sorted(self.slices, key=_start):
            if task.start > start:
                self.piece(start, task.start - start)
            start = task.start + task.rows
        if start < self.rows:
            self.piece(start, self.rows - start)
        return sorted(self.slices, key=_start)

    def is_answered(self, task: Any) -> bool:
        """Whether one of this call's tasks needs no answer any more."""
        return self.done or self.has_departed or (self.answers is not None and task.start in self.answers)

    def answer(self, task: Any, value: Any) -> bool:
        """Take the answer of one of this call's tasks, a value or an exception; return whether it ended the call."""
        if self.slices is not None:
            answers = self.answers
            if answers is None:  # the call has ended
                return False
            answers[task.start] = value
            if len(answers) < len(self.slices):
                return False
            value = _whole(answers)
        has_ended = self.reject(value) if isinstance(value, BaseException) else self.resolve(value)
        self.answers = None
        return has_ended

    def on_alarm(self) -> None:
        if self.clock.now() < self.deadline:
            self.dispatcher.recheck(self)
        elif self.reject(self.late()):  # else a result has come just now
            self.abandon()

    def late(self) -> DeadlineExceededError:
        """Return the error for a caller whose deadline is past."""
        return DeadlineExceededError(
            f"the call was not answered within its deadline of {self.deadline - self.arrived:g} s"
        )

    def set_alarm(self, scheduler: Scheduler, now: float) -> None:
        """Set the alarm by the due times of the batches that this call is in."""
        batch = self.batch
        if self.slices is None and batch is not None and batch.is_taken:  # its end wakes the caller
            self.alarm = self.deadline
            return
        when = inf
        tasks: list[Any] = self.slices or [self]
        for task in tasks:
            due, is_watched_here = scheduler.due(task)
            when = min(when, due if is_watched_here else due + OTHERS_DELAY)
        # Past its due time a batch waits only for another to end, and that end wakes its callers.
        self.alarm = min(when if when > now else inf, self.deadline)

    def needs_timer(self, loop: Any) -> bool:
        if self.deadline < inf:
            return True
        # The first caller watches the due time of its batch. The others need a timer only if the first caller's loop may stop
        # while theirs runs.
        batch = self.batch
        first = [] if batch is None else batch.tasks[:1]  # another thread may end the batch meanwhile
        if not first or self.slices is not None or first[0] is self:
            return True
        other = first[0].owner.waiter
        return other is None or (other.loop is not None and other.loop is not loop)

    def forget(self) -> list[Any]:
        return self.dispatcher.forget(self)


def _whole(answers: dict[int, Any]) -> Any:
    """Return the answers of all slices in order, or the first of them that is an exception."""
    values = [answers[start] for start in sorted(answers)]
    return next((value for value in values if isinstance(value, BaseException)), values)
