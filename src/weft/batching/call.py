"""A call that waits in the queue of a dispatcher: its rows or slices, and how it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from ..core.ticket import Ticket
from ..errors import DeadlineExceededError
from .queue import Batch, Queue, Task

if TYPE_CHECKING:
    from .dispatcher import Dispatcher
    from .scheduler import Scheduler

#: How much later than the caller that watches a batch the other callers check it, in seconds.
OTHERS_DELAY = 0.1


class QueuedCall(Ticket):
    """A ticket with rows. It is its own task, or is split into parts and answered when all of them are."""

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
        self.stays_here = False  # whether no other thread can be in the context of the caller's
        self.deadline = inf  # when the caller gives up
        #: Of a split call, by first row: the tasks that have all rows without an answer, maybe some that were just answered. Each
        #: change makes another dict, so that every thread sees all rows at any time. None if the call is its own task.
        self.parts: dict[int, Task] | None = None
        self.answers: dict[int, tuple[Task, Any]] | None = (
            None  # of a split call, by first row: tasks with their answers
        )
        self.spans: Sequence[Task] = ()  # of a split call that has its result: its tasks, in order

    @property
    def owner(self) -> QueuedCall:
        """The call whose rows these are, as of a `Task`."""
        return self

    def replace(self, task: Any, *tasks: Task) -> None:
        """Note that a task of this call was cut into others."""
        answers = self.answers
        if answers is None:
            answers = self.answers = {}
        kept = {} if self.parts is None else {start: part for start, part in self.parts.items() if start not in answers}
        kept.update({part.start: part for part in tasks})
        self.parts = kept

    def tasks(self) -> list[Any]:
        """Return the tasks that have all rows without an answer: the call itself, or its parts."""
        return [self] if self.parts is None else list(self.parts.values())

    def is_answered(self, task: Any) -> bool:
        """Whether one of this call's tasks needs no answer any more."""
        return self.done or self.has_departed or (self.answers is not None and task.start in self.answers)

    def is_waiting(self) -> bool:
        """Return whether no batch has any of this call's rows yet."""
        is_begun = self.done or self.answers
        return not is_begun and all(task.batch is None or not task.batch.is_taken for task in self.tasks())

    def answer(self, task: Any, value: Any) -> bool:
        """Take the answer of one of this call's tasks, a value or an exception; return whether it ended the call."""
        errors: Any = ()
        if self.parts is not None:
            value = self._answers_with(task, value)
            if value is None:
                return False
            errors = [each for each in value if isinstance(each, BaseException)]
        elif isinstance(value, BaseException):
            errors = (value,)
        if errors and not self.done:
            self.note_errors(errors)
        has_ended = self.reject(errors[0]) if errors else self.resolve(value)
        self.answers = None
        return has_ended

    def note_errors(self, errors: Sequence[BaseException]) -> None:
        """Do nothing; called before the call fails with the first of these errors."""

    def _answers_with(self, task: Any, value: Any) -> list[Any] | None:
        """Take the answer of a part; return those of all parts in order, None if some are missing or the call has ended."""
        answers, parts = self.answers, self.parts
        if answers is None or parts is None:
            return None
        answers[task.start] = task, value
        if len(answers) < len(parts):
            return None
        for start, part in parts.items():
            found = answers.get(start)
            if found is None or found[0] is not part:  # else it was cut, and its first rows have an answer
                return None
        ordered = [answers[start] for start in sorted(answers)]
        self.spans = [each for each, _ in ordered]
        return [each for _, each in ordered]

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
        if self.parts is None and batch is not None and batch.is_taken:  # its end wakes the caller
            self.alarm = self.deadline
            return
        when = inf
        for task in self.tasks():
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
        if not first or self.parts is not None or first[0] is self:
            return True
        other = first[0].owner.waiter
        return other is None or (other.loop is not None and other.loop is not loop)

    def forget(self) -> list[Any]:
        return self.dispatcher.forget(self)
