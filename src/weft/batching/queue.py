"""What a scheduler works with: its limits, tasks, batches, and a queue of batches."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class LowPriority:
    """The limits of low-priority tasks, and how they mix with the others."""

    max_batch_size: int
    timeout: float
    max_enqueued: float
    allowed: tuple[int, ...]
    policy: str
    split: bool = False  # whether a task with more rows than a batch is split, and not refused
    ages_after: float = inf  # a task that has waited so long counts as one of high priority

    @property
    def target(self) -> int:
        """The most rows of a batch of low-priority tasks alone."""
        return self.allowed[-1] if self.allowed else self.max_batch_size


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a scheduler. Sizes are in rows, times in seconds; `threads` batches are processed at once."""

    threads: int
    max_batch_size: int
    timeout: float
    max_enqueued: float = inf
    allowed: tuple[int, ...] = ()
    split: bool = False
    batch_down: bool = False
    adaptive: bool = False
    low: LowPriority | None = None
    enough: float = inf  # a batch with so many rows is processed as soon as one more may run
    max_waiting: float = inf  # rows that may wait in all queues together

    @property
    def target(self) -> int:
        """The most rows of one batch."""
        return self.allowed[-1] if self.allowed and self.split else self.max_batch_size


class Task:
    """A call, or with splitting a part of one: `rows` rows of `owner`, from `start`.

    A call with the rows of many batches waits as a few tasks, whatever its size: when a batch is formed, `cut` makes two tasks of
    one, and tells the owner by `replace(task, head, rest)`.
    """

    __slots__ = ("batch", "low", "owner", "queue", "rows", "start")

    def __init__(self, owner: Any, start: int, rows: int) -> None:
        self.owner = owner
        self.start = start
        self.rows = rows
        self.low = False
        self.batch: Batch | None = None
        self.queue: Queue | None = None


def cut(task: Any, rows: Any) -> tuple[Task, Task]:
    """Make two tasks of one: its first `rows` rows, and the others."""
    owner = task.owner
    head, rest = Task(owner, task.start, rows), Task(owner, task.start + rows, task.rows - rows)
    head.queue = rest.queue = task.queue
    owner.replace(task, head, rest)
    task.queue = None
    return head, rest


class Batch:
    """Tasks that are processed together, in order of arrival."""

    def __init__(self) -> None:
        self.tasks: list[Any] = []
        self.rows = 0
        self.opened = inf  # the first task's arrival
        self.due = inf  # when the batch stops waiting for more
        self.reason = ""  # why it was closed: full, overflow, enough, timeout
        self.is_taken = False
        self.has_departed = False  # whether a caller departed after it was taken
        self.number = 0  # in order of processing; set by a batcher
        self.started = 0.0  # when its processing began; set by a batcher
        self.count = 0  # its rows, where `rows` is their cost
        self.error: Exception | None = None  # raised while it was processed
        self.padding: int | None = None  # rows of padding, where `padded` does not say it
        self.allowed: tuple[int, ...] = ()
        self.rest: Any = None  # of a stream: the `streams.Rest` that follows when its calls are answered

    def add(self, task: Any) -> None:
        """Append a task."""
        self.tasks.append(task)
        self.rows += task.rows
        task.batch = self

    def keep(self, tasks: list[Any]) -> None:
        """Remove all tasks but these."""
        self.tasks = tasks
        self.rows = sum(task.rows for task in tasks)

    @property
    def padded(self) -> int:
        """The number of rows after padding to the next allowed size."""
        at = bisect_left(self.allowed, self.rows)
        return self.allowed[at] if at < len(self.allowed) else self.rows


class Queue:
    """Closed batches in order, the open one, and low-priority tasks with their arrival times.

    In the tables any batch or task can be removed at the same cost, however many wait.
    """

    __slots__ = (
        "after", "batches", "closed", "is_listed", "joinable", "key", "last_used", "low", "low_rows", "open", "watched",
    )  # fmt: skip

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.closed: OrderedDict[Batch, None] = OrderedDict()
        self.batches = 0  # closed batches; one whose only task has the rows of several counts as so many
        self.open = Batch()
        self.joinable: Batch | None = None  # a batch that was taken and has not begun: tasks may still join it
        self.low: OrderedDict[Any, float] = OrderedDict()
        self.low_rows = 0
        self.last_used = 0.0
        # Of `turns.Turns`: whether this queue is in the list, the queue after it there, and when this one is looked at.
        self.is_listed = False
        self.after: Queue | None = None
        self.watched = inf

    def tasks(self) -> list[Any]:
        """Return all waiting tasks."""
        return [*(task for batch in (*self.closed, self.open) for task in batch.tasks), *self.low]

    @property
    def is_empty(self) -> bool:
        """Whether no task waits here."""
        return not (self.open.tasks or self.closed or self.low)

    def pop_low(self, most: Any) -> Any:
        """Remove the first low-priority task, or its first rows if it has more than `most`; return what was removed."""
        task, since = next(iter(self.low.items()))
        del self.low[task]
        if task.rows > most:
            task, rest = cut(task, most)
            self.low[rest] = since
            self.low.move_to_end(rest, last=False)
        self.low_rows -= task.rows
        return task

    @property
    def low_since(self) -> float:
        """When the first low-priority task came."""
        return next(iter(self.low.values()))

    @property
    def low_first(self) -> Any:
        """The first low-priority task."""
        return next(iter(self.low))


class Pace:
    """How many batches an adaptive scheduler runs at once: hill climbing on the mean latency of ten batches."""

    __slots__ = ("_last", "_latencies", "_step", "limit")

    FEWEST, FIRST, MOST, AVERAGE_OVER = 1.0, 2.0, 64.0, 10

    def __init__(self) -> None:
        self.limit = self.FIRST
        self._step = 0.5
        self._last = inf
        self._latencies: list[float] = []

    @property
    def in_flight(self) -> int:
        """The batches that may run at once unless they are full."""
        return round(self.limit)

    def add(self, latency: float) -> None:
        """Note the latency of a batch; after every tenth, move the limit, in the other direction if the mean got worse."""
        self._latencies.append(latency)
        if len(self._latencies) < self.AVERAGE_OVER:
            return
        mean = sum(self._latencies) / len(self._latencies)
        self._latencies.clear()
        if mean > self._last:
            self._step = -self._step
        self._last = mean
        self.limit = min(self.MOST, max(self.FEWEST, self.limit + self._step))
