"""The rules of batching with `max_waste`: calls of like length go together, so that little of a batch is padding.

The waiting calls of a key lie in pages, in order of arrival: the last page is the queue's open batch, the others its closed ones.
When a batch may run, it is chosen from the first page: the oldest call is in it, so that no call waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from math import inf
from typing import Any

from .queue import Batch, Limits, Queue, Task, cut
from .scheduler import Scheduler

#: How many lengths are tried as the longest of a batch.
_TRIED = 16
#: How many tasks are looked at for a batch, in rows of the largest one.
_BATCHES_LOOKED_AT = 4


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
        return _most_waste(self._rows, self._sums, self._longest)

    def waste_with(self, task: Any) -> float:
        """Return what `waste` would be with one more task."""
        owner = task.owner
        rows = owner.count if task is owner else task.rows
        sums = [total + rows * length for total, length in zip(self._sums, owner.lengths, strict=True)]
        return _most_waste(self._rows + rows, sums, list(map(max, self._longest, owner.lengths)))


def _most_waste(rows: int, sums: list[int], longest: list[int]) -> float:
    most = 0.0
    for i, total in enumerate(sums):
        if total < rows * longest[i]:
            most = max(most, 1 - total / (rows * longest[i]))
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
    if oldest.rows >= target:
        return [oldest]
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
        if batch is None or Filling(batch.tasks).waste_with(task) > self._max_waste:
            return False
        return Scheduler._joins_taken(self, queue, task)

    def _put_whole(self, queue: Queue, task: Any, now: float) -> None:
        self._put_again(queue, task, now)

    def _put_split(self, queue: Queue, task: Any, now: float) -> None:
        if task.rows > self.target:  # the rows that fill batches alone, and the rest
            head, task = cut(task, (task.rows - 1) // self.target * self.target)
            self._put_again(queue, head, now)
        self._put_again(queue, task, now)

    def _put_again(self, queue: Queue, task: Any, arrived: float) -> None:
        if len(queue.open.tasks) >= _BATCHES_LOOKED_AT * self.target:
            self._close_open(queue, "")
        self._append(queue, task, arrived)

    def _rows_that_run(self, queue: Queue, task: Any) -> float:
        page = _first_page(queue)
        if task.low or not page.tasks:
            return Scheduler._rows_that_run(self, queue, task)
        if self.running >= self.limits.threads:
            return 0
        last = Task(task.owner, 0, min(task.rows, self.target)) if task.rows > self.target else task
        rows = sum([each.rows for each in choose([*page.tasks, last], self.target, self._max_waste)])
        return 0 if rows < self.enough else min(rows, self.target)

    def due(self, task: Any) -> tuple[float, bool]:
        """As `Scheduler.due`; the tasks of every page have a due time."""
        batch = task.batch
        if task.queue is None or batch is None or batch.is_taken:
            return Scheduler.due(self, task)
        return batch.due, task is batch.tasks[0]

    def _due_of(self, queue: Queue) -> float:
        page = _first_page(queue)
        return page.due if page.tasks else Scheduler._due_of(self, queue)

    def _ready(self, queue: Queue, now: float) -> Batch | None:
        low = self._low
        if low is not None and queue.low and now - queue.low_since >= low.ages_after:
            self._raise_aged(queue, low, now)
        page = _first_page(queue)
        if not page.tasks:
            return Scheduler._ready(self, queue, now)
        is_due = now >= page.due
        if page.rows < self.enough and not is_due:
            return None
        chosen = choose(page.tasks, self.target, self._max_waste)
        rows = sum([task.rows for task in chosen])
        if rows < self.enough and not is_due:
            return None
        batch = self._leave(queue, page, chosen)
        batch.reason = "full" if rows >= self.target else "enough" if rows >= self.enough else "timeout"
        batch.allowed = self.limits.allowed
        if queue.low and low is not None:
            self._fill_with_low(queue, batch, low)
        return batch

    def _leave(self, queue: Queue, page: Batch, chosen: list[Any]) -> Batch:
        """Return a batch of the chosen tasks of the first page, and leave the others in the queue."""
        if page is queue.open:
            queue.open = Batch()
        else:
            del queue.closed[page]
        taken = set(chosen)
        rest = [task for task in page.tasks if task not in taken]
        if self.limits.split and chosen[0].rows > self.target:
            head, tail = cut(chosen[0], self.target)
            chosen, rest = [head], [tail, *rest]
            self.waiting += 1
        batch = Batch()
        batch.opened, batch.due = page.opened, page.due
        for task in chosen:
            batch.add(task)
        if rest:
            self._put_back(queue, rest, page.due)
        page.keep([])
        return batch

    def _put_back(self, queue: Queue, rest: list[Any], due: float) -> None:
        """Put tasks in front of the next page, or, if they are many, in a page of their own."""
        page = _first_page(queue)
        if page.tasks and len(rest) > _BATCHES_LOOKED_AT * self.target // 2:
            page = Batch()
            queue.closed[page] = None
            queue.closed.move_to_end(page, last=False)
        page.tasks[:0] = rest
        page.rows += sum([task.rows for task in rest])
        for task in rest:
            task.batch = page
        page.opened = rest[0].owner.arrived
        page.due = page.opened + self.limits.timeout if due > -inf else due  # -inf: all batches were made due
        self.moved.append(rest[0])

    def _move_low(self, queue: Queue, batch: Batch, target: int, split: bool) -> None:
        """Move the low-priority tasks that fit into `batch`, by their rows and their lengths, of as many as a page has."""
        if not batch.tasks:
            batch.add(self._first_low(queue, target if split else inf))
        filling = Filling(batch.tasks)
        for task in list(islice(queue.low, _BATCHES_LOOKED_AT * self.target)):
            if filling.cost + task.rows <= target and filling.waste_with(task) <= self._max_waste:
                del queue.low[task]
                queue.low_rows -= task.rows
                batch.add(task)
                filling.add(task)
        if queue.low:
            self.moved.append(queue.low_first)

    def _batches_of(self, rows: Any) -> Any:
        return 0  # pages are no batches, and their number has no limit


def _first_page(queue: Queue) -> Batch:
    return next(iter(queue.closed)) if queue.closed else queue.open
