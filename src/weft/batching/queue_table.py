"""The queues of a scheduler: found by their keys, dropped when they stay empty, and which of them have a batch ready."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from math import inf
from typing import Any

from .queue import Limits, LowPriority, Queue
from .turns import Turns

#: Queues that stay empty this long are dropped, and all empty ones now and then once there are so many queues.
IDLE_QUEUE_SECONDS = 60.0
IDLE_QUEUES = 64


class QueueTable:
    """Queues by their keys, how many tasks and rows wait in them, and when they have a batch."""

    def __init__(self, limits: Limits) -> None:
        self._apply(limits)
        self.queues: dict[Hashable, Queue] = {}
        self.waiting = 0  # tasks that are in a queue
        self.waiting_rows = 0  # and their rows
        self.running = 0  # batches that were taken and not released
        #: Tasks whose batch has a new due time: their callers must set their alarms again.
        self.moved: list[Any] = []
        self._turns = Turns()
        self._most_queues = IDLE_QUEUES  # with so many, the empty ones are dropped before another comes

    def _apply(self, limits: Limits) -> None:
        self.limits = limits
        self.target = limits.target
        self._most = limits.max_batch_size
        self._most_waiting = limits.max_waiting
        self._threads = limits.threads
        self.enough = min(limits.target, limits.enough)
        self._is_plain = not limits.split
        self._low = limits.low
        self._timeout = limits.timeout
        self._is_merging = limits.low is not None and limits.low.policy == "priority_merge"

    def _add_queue(self, queue: Queue) -> None:
        if len(self.queues) >= self._most_queues:
            self._drop([q for q in self.queues.values() if q.is_empty])
            self._most_queues = max(IDLE_QUEUES, 2 * len(self.queues))
        self.queues[queue.key] = queue

    def drain(self) -> list[Any]:
        """Remove and return every waiting task."""
        tasks = [task for queue in self.queues.values() for task in queue.tasks()]
        self._clear()
        for task in tasks:
            task.queue = None
        return tasks

    def _clear(self) -> None:
        self.queues.clear()
        self._turns.clear()
        self.waiting = self.waiting_rows = 0

    def drop_idle(self, now: float) -> float:
        """Drop the queues that have been empty for a minute; return when the next one may be dropped."""
        self._drop([q for q in self.queues.values() if q.is_empty and now - q.last_used >= IDLE_QUEUE_SECONDS])
        return max(now, min((q.last_used for q in self.queues.values()), default=inf)) + IDLE_QUEUE_SECONDS

    def _drop(self, queues: list[Queue]) -> None:
        for queue in queues:
            queue.watched = inf  # its entry is out of date
            del self.queues[queue.key]

    # --- which queues have a batch ready ---

    def _watch(self, queue: Queue) -> None:
        """List a queue that has a batch ready, or note when it will have one."""
        if self._is_ready(queue):
            self._turns.enlist(queue)
        else:
            self._turns.watch(queue, self._due_of(queue))

    def _is_ready(self, queue: Queue) -> bool:
        """Whether a queue has enough rows for a batch, whatever the time."""
        if queue.closed or (queue.open.tasks and queue.open.rows >= self.enough):
            return True
        low = self._low
        if low is None or not queue.low:
            return False
        if self._is_merging:
            return bool(queue.open.rows + queue.low_rows >= self.target)
        return not queue.open.tasks and bool(queue.low_rows >= min(low.target, self.limits.enough))

    def _due_of(self, queue: Queue) -> float:
        """Return when the tasks of a queue stop waiting for more."""
        low = self._low
        if low is not None and queue.low:
            if self._is_merging:
                return self._merged_due(queue, low)
            if not queue.open.tasks:
                return queue.low_since + low.timeout
        return queue.open.due

    def _list_due(self, now: float) -> None:
        """List the queues whose time has come."""
        while (queue := self._turns.next_due(now)) is not None:
            if not queue.is_empty:
                if self._due_of(queue) <= now:
                    self._turns.enlist(queue)
                else:
                    self._watch(queue)

    def _merged_due(self, queue: Queue, low: LowPriority) -> float:
        """Return the due time: it counts from the oldest task, with the low-priority timeout only if no other task waits."""
        oldest = min(queue.open.opened, queue.low_since if queue.low else inf)
        return oldest + (self.limits.timeout if queue.open.tasks else low.timeout)

    def ready(self, now: float) -> list[Any]:
        """Return the tasks of the batch that `take` would return, in the usual case."""
        if self.limits.adaptive or self._low is not None or self.running >= self._threads:
            return []
        self._list_due(now)
        turns = self._turns
        while turns.first is not None:
            queue = turns.first
            if queue.closed:
                return next(iter(queue.closed)).tasks
            if queue.open.tasks and (queue.open.rows >= self.enough or now >= queue.open.due):
                return queue.open.tasks
            turns.unlist_first()
        return []


def rows_at_once(queue: Queue, task: Any, limits: Limits, enough: Any, slots: int) -> Any:
    """Return how many rows of a queue would be processed at once if `task` came, with `slots` for batches."""
    if task.low and queue.open.tasks:
        return 0
    slots, target = max(slots, 0), limits.target
    before = queue.low_rows if task.low else queue.open.rows
    if limits.split:
        full, rest = divmod(before + task.rows, target)
        if full >= slots:
            return slots * target
        return full * target + (rest if rest >= enough else 0)
    batches, rows, last = 0, 0, 0
    for each in chain((other.rows for other in queue.low) if task.low else (before,), (task.rows,)):
        if last and last + each > target:
            batches, rows, last = batches + 1, rows + last, 0
        if batches == slots:
            return rows
        last += each
    return rows + last if last >= enough else rows
