"""What a scheduler works with: its limits, tasks, batches, and a queue of batches."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
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
    """A call, or with splitting a slice of one: `rows` rows of `owner`, from `start`.

    An owner that may be split makes its slices by `piece(start, rows)`.
    """

    __slots__ = ("batch", "low", "owner", "queue", "rows", "start")

    def __init__(self, owner: Any, start: int, rows: int) -> None:
        self.owner = owner
        self.start = start
        self.rows = rows
        self.low = False
        self.batch: Batch | None = None
        self.queue: Queue | None = None


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
    """Closed batches in order, the open one, and low-priority tasks with their arrival times."""

    __slots__ = ("closed", "joinable", "key", "last_used", "low", "low_rows", "open")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.closed: deque[Batch] = deque()
        self.open = Batch()
        self.joinable: Batch | None = None  # a batch that was taken and has not begun: tasks may still join it
        self.low: deque[tuple[float, Any]] = deque()
        self.low_rows = 0
        self.last_used = 0.0

    def tasks(self) -> list[Any]:
        """Return all waiting tasks."""
        batches = [task for batch in (*self.closed, self.open) for task in batch.tasks]
        return batches + [task for _, task in self.low]

    @property
    def is_empty(self) -> bool:
        """Whether no task waits here."""
        return not (self.open.tasks or self.closed or self.low)


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
