"""The rules of batching with `max_waste`: calls of like length go together, so that little of a batch is padding.

All waiting calls of a key are in its open batch, in order of arrival. When a batch may run, it is chosen from them: the oldest call
is in it, so that no call waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any

from .queue import Batch, Limits, Queue, Task
from .scheduler import Scheduler

#: How many lengths are tried as the longest of a batch.
_TRIED = 16


class Filling:
    """Adds up the rows and lengths of tasks: `waste` is the part of their batch that would be padding, if lengths are rounded."""

    __slots__ = ("_longest", "_rows", "_sums", "cost")

    def __init__(self, tasks: Sequence[Any]) -> None:
        self.cost = 0  # what `max_batch_size` counts
        self._rows = 0
        self._sums = [0] * len(tasks[0].owner.lengths)  # for each padded argument
        self._longest = list(self._sums)
        for task in tasks:
            self.add(task)

    def add(self, task: Any) -> None:
        """Add a task."""
        owner = task.owner
        rows = owner.count if task is owner else task.rows
        self.cost += task.rows
        self._rows += rows
        for i, length in enumerate(owner.lengths):
            self._sums[i] += rows * length
            if length > self._longest[i]:
                self._longest[i] = length

    @property
    def waste(self) -> float:
        """The largest waste of a padded argument, from 0 to 1."""
        most = 0.0
        for total, longest in zip(self._sums, self._longest, strict=True):
            if total < self._rows * longest:
                most = max(most, 1 - total / (self._rows * longest))
        return most


def choose(tasks: list[Any], target: int, max_waste: float) -> list[Any]:
    """Return the tasks of the next batch, in order of arrival: the first of `tasks`, and others.

    The batch has at most `target` rows and `max_waste`. Of such batches one with many rows is chosen, and then one with little
    waste: for each of some lengths as the longest, tasks are added from the longest to the shortest.
    """
    whole = Filling(tasks)
    if whole.cost <= target and whole.waste <= max_waste:
        return tasks
    oldest = tasks[0]
    equal = [task for task in tasks[1:] if task.owner.lengths == oldest.owner.lengths]
    unequal = [task for task in tasks[1:] if task.owner.lengths != oldest.owner.lengths]
    others = sorted(equal + unequal, key=_length, reverse=True)  # among equals, the older ones come first
    most, least_waste = oldest.rows, 0.0
    found: list[Any] = []
    for start in _starts(others, _length(oldest)):
        filling, picked = Filling([oldest]), list[Any]()
        for task in others[start:]:
            if filling.cost + task.rows > target:
                continue
            filling.add(task)
            picked.append(task)
            if filling.cost >= most:
                waste = filling.waste
                if waste <= max_waste and (filling.cost > most or waste < least_waste):
                    most, least_waste, found = filling.cost, waste, list(picked)
                if filling.cost >= target:
                    break
    chosen = {oldest, *found}
    return [task for task in tasks if task in chosen]


def _length(task: Any) -> int:
    return sum(task.owner.lengths)


def _starts(others: list[Any], least: int) -> list[int]:
    """Return where a new length begins among `others`, as far as it is above `least`, and where the rest begins; some if many."""
    lengths = [inf, *map(_length, others)]
    starts = [
        i for i, (before, own) in enumerate(pairwise(lengths)) if own < before and (own > least or before > least)
    ]
    return starts if len(starts) <= _TRIED else [*starts[:: len(starts) // _TRIED + 1], starts[-1]]


class WasteScheduler(Scheduler):
    """A scheduler whose batches have at most `max_waste`. The owners of its tasks have `lengths`, one for each padded argument."""

    def __init__(self, max_waste: float, limits: Limits) -> None:
        Scheduler.__init__(self, limits)
        self._max_waste = max_waste

    def _joins_taken(self, queue: Queue, task: Any) -> bool:
        batch = queue.joinable
        if batch is None or Filling([*batch.tasks, task]).waste > self._max_waste:
            return False
        return Scheduler._joins_taken(self, queue, task)

    def _put_whole(self, queue: Queue, task: Any, now: float) -> None:
        self._append(queue, task, now)

    def _put_split(self, queue: Queue, task: Any, now: float) -> None:
        if task.rows <= self.target:
            self._append(queue, task, now)
            return
        for start in range(0, task.rows, self.target):
            self._append(queue, task.owner.piece(start, min(self.target, task.rows - start)), now)

    def _rows_that_run(self, queue: Queue, task: Any) -> float:
        if task.low or not queue.open.tasks:
            return Scheduler._rows_that_run(self, queue, task)
        if self.running >= self.limits.threads:
            return 0
        last = Task(task.owner, 0, min(task.rows, self.target)) if task.rows > self.target else task
        rows = sum([each.rows for each in choose([*queue.open.tasks, last], self.target, self._max_waste)])
        return 0 if rows < self.enough else rows

    def _ready(self, queue: Queue, now: float) -> Batch | None:
        batch = queue.open
        if not batch.tasks:
            return Scheduler._ready(self, queue, now)
        is_due = now >= batch.due
        if batch.rows < self.enough and not is_due:
            return None
        chosen = choose(batch.tasks, self.target, self._max_waste)
        rows = sum([task.rows for task in chosen])
        if rows < self.enough and not is_due:
            return None
        reason = "full" if rows >= self.target else "enough" if rows >= self.enough else "timeout"
        self._close_open(queue, reason, False)
        self._leave(queue, batch, chosen)
        if queue.low and self._low is not None:
            self._fill_with_low(queue, batch, self._low)
        return batch

    def _leave(self, queue: Queue, batch: Batch, chosen: list[Any]) -> None:
        """Leave the tasks of a batch that were not chosen in the queue."""
        if len(chosen) == len(batch.tasks):
            return
        taken = set(chosen)
        rest = [task for task in batch.tasks if task not in taken]
        batch.keep(chosen)
        self._append_again(queue, rest)
        if batch.due == -inf:  # all batches were made due
            queue.open.due = -inf
        self.moved.append(rest[0])

    def _append_again(self, queue: Queue, tasks: list[Any]) -> None:
        """Append tasks that were in the queue before."""
        self.waiting -= len(tasks)  # `_append` adds them
        self.waiting_rows -= sum([task.rows for task in tasks])
        for task in tasks:
            self._append(queue, task, task.owner.arrived)

    def _move_low(self, queue: Queue, batch: Batch, target: int, split: bool) -> None:
        """Move the low-priority tasks that fit into `batch`, by their rows and their lengths."""
        left: deque[tuple[float, Any]] = deque()
        for since, task in queue.low:
            has_room = not batch.tasks or batch.rows + task.rows <= target
            if has_room and Filling([*batch.tasks, task]).waste <= self._max_waste:
                batch.add(task)
                queue.low_rows -= task.rows
            else:
                left.append((since, task))
        queue.low = left
        if left:
            self.moved.append(left[0][1])

    def rebuild(self, waiting: list[tuple[Any, Any, float]], running: int) -> None:
        """As `Scheduler.rebuild`; all tasks of a key are in its open batch."""
        Scheduler.rebuild(self, waiting, running)
        for queue in self.queues.values():
            if queue.closed:
                tasks = [task for batch in (*queue.closed, queue.open) for task in batch.tasks]
                queue.closed.clear()
                queue.open = Batch()
                self._append_again(queue, tasks)
