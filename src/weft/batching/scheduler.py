"""The rules of batching: a state machine without threads and without a clock.

`put` places a task in a queue, `take` returns the next batch that is ready, if one more may run, and `release` says that it has
been processed. Every method is given the time. The rules are those of TensorFlow's SharedBatchScheduler, and of its
AdaptiveSharedBatchScheduler where `Limits.adaptive` is set.

All of this runs under the lock, so no step takes longer the more tasks, queues or rows wait. A task with the rows of many batches
is cut when a batch is formed. Queues with a batch ready are listed; the others are found by the time at which they will have one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable
from itertools import accumulate
from math import inf
from typing import Any

from ..errors import InvalidArgumentError, QueueFullError
from .queue import Batch, Limits, LowPriority, Pace, Queue, cut
from .queue_table import QueueTable, rows_at_once


class Scheduler(QueueTable):
    """Decides which tasks share a batch, and when a batch is processed."""

    def __init__(self, limits: Limits) -> None:
        QueueTable.__init__(self, limits)
        self._pace = Pace() if limits.adaptive else None

    def set_limits(self, limits: Limits) -> None:
        """Apply other limits from now on. The waiting tasks form new batches; one above the limits has a batch of its own."""
        self._apply(limits)
        waiting = [(queue.key, task, task.owner.arrived) for queue in self.queues.values() for task in queue.tasks()]
        self.rebuild(waiting, self.running)

    # --- arrival and departure ---

    def put(self, key: Hashable, task: Any, now: float) -> Batch | None:
        """Place `task` in the queue called `key`, or refuse it and change nothing.

        Return the batch that the task has joined if that batch goes on waiting, so that `take` need not be asked.
        """
        rows = task.rows
        if rows > self._most:
            raise InvalidArgumentError(
                f"a call may have at most max_batch_size = {self._most} rows, got {rows}; split=True of "
                "weft.batched splits larger calls"
            )
        found = self.queues.get(key)
        queue = found if found is not None else Queue(key)
        if queue.joinable is not None and self._joins_taken(queue, task):
            return queue.joinable
        if self.waiting_rows + rows > self._most_waiting:
            self._check_room(queue, task)
        if task.low and self._low is not None:
            self._put_low(queue, task, now)
        elif not self._is_plain:
            self._put_split(queue, task, now)
        else:
            self._put_whole(queue, task, now)
        queue.last_used = now
        if found is None:
            self._add_queue(queue)
        self._watch(queue)
        return queue.open if self._goes_on_waiting(queue, now) else None

    def _joins_taken(self, queue: Queue, task: Any) -> bool:
        """Add `task` to the batch that was taken and has not begun, if no other task waits and it fits; return whether it did."""
        batch = queue.joinable
        if task.low or queue.open.tasks or queue.closed or queue.low:
            return False
        if batch is None or batch.rows + task.rows > self.target:
            return False
        batch.add(task)
        task.queue = queue
        return True

    def _goes_on_waiting(self, queue: Queue, now: float) -> bool:
        """Whether the open batch had tasks before the last one came, and is not ready."""
        batch = queue.open
        if len(batch.tasks) < 2 or queue.closed or queue.low:
            return False
        enough = self.enough if self.running < self._threads else self.target
        return bool(batch.rows < enough and now < batch.due)

    def _check_room(self, queue: Queue, task: Any) -> None:
        """Refuse a task if more rows than `max_waiting` would wait, and others wait already; rows that run at once do not wait."""
        waiting, at_once, most = self.waiting_rows, self._rows_that_run(queue, task), self.limits.max_waiting
        if waiting + task.rows - at_once > most and (waiting or not (at_once or most)):
            raise QueueFullError(f"the queue is full: {waiting} wait, {task.rows} came, and at most {most:g} may wait")

    def _rows_that_run(self, queue: Queue, task: Any) -> float:
        return rows_at_once(queue, task, self.limits, self.enough, self.limits.threads - self.running)

    def _put_whole(self, queue: Queue, task: Any, now: float) -> None:
        if queue.open.rows + task.rows > self._most:
            if queue.batches + 1 >= self.limits.max_enqueued:
                self._refuse_full(queue, task)
            self._close_open(queue, "overflow")
        self._append(queue, task, now)

    def _put_split(self, queue: Queue, task: Any, now: float) -> None:
        target = self.target
        gap = target - queue.open.rows
        if task.rows > (self.limits.max_enqueued - queue.batches - 1) * target + gap:
            self._refuse_full(queue, task)
        if task.rows > gap:  # fill the open batch, then those that this task fills alone
            if gap:
                head, task = cut(task, gap)
                self._append(queue, head, now)
            self._close_open(queue, "full")
            if task.rows > target:
                head, task = cut(task, (task.rows - 1) // target * target)
                self._append(queue, head, now)
                self._close_open(queue, "full")
        self._append(queue, task, now)

    def _append(self, queue: Queue, task: Any, now: float) -> None:
        batch = queue.open
        if not batch.tasks:
            batch.opened = now
            batch.due = now + self._timeout
        task.queue = queue
        task.batch = batch
        batch.tasks.append(task)
        batch.rows += task.rows
        self.waiting += 1
        self.waiting_rows += task.rows

    def _put_low(self, queue: Queue, task: Any, now: float) -> None:
        low = self.limits.low
        assert low is not None
        if task.rows > low.target and not low.split:
            raise QueueFullError(f"a low-priority call may have at most {low.target} rows, got {task.rows}")
        if queue.low_rows + task.rows > low.target * low.max_enqueued:
            raise QueueFullError(
                f"low-priority calls may wait with {low.target * low.max_enqueued:g} rows in all: {queue.low_rows} "
                f"wait, {task.rows} came"
            )
        self._append_low(queue, task, now)

    def _append_low(self, queue: Queue, task: Any, now: float) -> None:
        task.queue, task.batch = queue, None
        queue.low[task] = now
        queue.low_rows += task.rows
        self.waiting += 1
        self.waiting_rows += task.rows

    def _refuse_full(self, queue: Queue, task: Any) -> None:
        raise QueueFullError(
            f"the queue is full: at most max_enqueued_batches = {self.limits.max_enqueued:g} batches may wait, there are "
            f"{queue.batches + 1} and {task.rows} more rows do not fit"
        )

    def remove(self, task: Any) -> bool:
        """Remove a waiting task; return False if it does not wait."""
        queue: Queue | None = task.queue
        batch: Batch | None = task.batch
        if queue is None:
            return False
        if batch is not None and batch.is_taken:
            batch.has_departed = True
            return False
        if self.queues.get(queue.key) is not queue:  # the queues were rebuilt without it
            return False
        task.queue = None
        self.waiting -= 1
        self.waiting_rows -= task.rows
        if batch is None:
            del queue.low[task]
            queue.low_rows -= task.rows
            if queue.low:
                self.moved.append(queue.low_first)
            return True
        was_first = batch.tasks[0] is task
        batch.tasks.remove(task)
        batch.rows -= task.rows
        if batch.tasks:
            if was_first:
                self.moved.append(batch.tasks[0])
        elif batch is queue.open:
            queue.open = Batch()
            if queue.low:
                self.moved.append(queue.low_first)
        else:
            queue.batches -= self._batches_of(task.rows)
            del queue.closed[batch]
        return True

    def due(self, task: Any) -> tuple[float, bool]:
        """Return when the batch of a waiting task stops waiting for more, and whether this task is the one that watches it."""
        queue: Queue | None = task.queue
        batch: Batch | None = task.batch
        if queue is None or (batch is not None and (batch.is_taken or batch is not queue.open)):
            return inf, False
        low = self.limits.low
        if low is not None and low.policy == "priority_merge" and queue.low:
            when = self._merged_due(queue, low)
            first = queue.open.tasks[0] if queue.open.tasks else queue.low_first
            return when, task is first
        if batch is None:
            assert low is not None
            return queue.low_since + low.timeout, task is queue.low_first
        return batch.due, task is batch.tasks[0]

    # --- what runs ---

    def take(self, now: float) -> Batch | None:
        """Return the next batch to process, if one is ready and one more may run; queues take turns."""
        if not self.waiting:
            return None
        if self._pace is not None:
            batch = self._take_oldest(now)
        elif self.running >= self._threads:
            return None
        else:
            batch = self._take_in_turn(now)
        if batch is not None:
            batch.is_taken = True
            self.running += 1
            self.waiting -= len(batch.tasks)
            self.waiting_rows -= batch.rows
        return batch

    def let_join(self, batch: Batch) -> None:
        """Let more tasks join a batch that was taken, until `end_joining`."""
        queue = batch.tasks[0].queue
        if queue.joinable is None:
            queue.joinable = batch

    def end_joining(self, batch: Batch) -> None:
        """Say that a batch that was taken begins now."""
        queue = batch.tasks[0].queue
        if queue.joinable is batch:
            queue.joinable = None

    def release(self, batch: Batch, now: float) -> None:
        """Say that a batch that was taken has been processed."""
        self.running -= 1
        if self._pace is not None:
            self._pace.add(now - batch.opened)

    def _take_in_turn(self, now: float) -> Batch | None:
        self._list_due(now)
        turns = self._turns
        while turns.first is not None:
            queue = turns.first
            batch = self._ready(queue, now)
            turns.unlist_first()  # only now: if this is interrupted, the queue is still listed
            if batch is not None:
                self._watch(queue)
                return batch
            turns.watch(queue, self._due_of(queue))  # the next task lists it again
        return None

    def _take_oldest(self, now: float) -> Batch | None:
        """Adaptive: return the oldest ready batch; beyond the adaptive limit only a full one, up to `threads`."""
        assert self._pace is not None
        self._list_due(now)
        listed = []
        while self._turns.first is not None:
            listed.append(self._turns.first)
            self._turns.unlist_first()
        batch = None
        for queue in sorted(listed, key=_opened):
            is_full = bool(queue.closed) or queue.open.rows >= self.target
            if batch is None and self.running < (self.limits.threads if is_full else self._pace.in_flight):
                batch = self._ready(queue, now)
            self._watch(queue)
        return batch

    # --- a batch ---

    def _ready(self, queue: Queue, now: float) -> Batch | None:
        low = self._low
        if low is not None and queue.low and now - queue.low_since >= low.ages_after:
            self._raise_aged(queue, low, now)
        if queue.closed:
            batch = self._next_closed(queue)
        elif low is not None and self._is_merging:
            return self._ready_merged(queue, low, now)
        elif queue.open.rows >= self.target:
            batch = self._close_open(queue, "full", wait=False)
        elif queue.open.tasks and queue.open.rows >= self.enough:
            batch = self._close_open(queue, "enough", wait=False)
        elif queue.open.tasks and now >= queue.open.due:
            batch = self._close_open(queue, "timeout", wait=False)
            if self.limits.batch_down:
                self._trim(queue, batch, now)
        elif low is not None:
            return self._ready_low(queue, low, now)
        else:
            return None
        if queue.low and low is not None:
            self._fill_with_low(queue, batch, low)
        return batch

    def _close_open(self, queue: Queue, reason: str, wait: bool = True) -> Batch:
        batch = queue.open
        batch.reason = reason
        batch.allowed = self.limits.allowed
        queue.open = Batch()
        if wait:
            queue.closed[batch] = None
            queue.batches += self._batches_of(batch.rows)
        return batch

    def _batches_of(self, rows: Any) -> Any:
        """Return how many batches a task with so many rows fills."""
        return -(-rows // self.target) if rows > self.target and self.limits.split else 1

    def _next_closed(self, queue: Queue) -> Batch:
        """Return the first closed batch; of one with the rows of several, a batch of the first rows."""
        batch: Batch = next(iter(queue.closed))
        queue.batches -= 1
        if batch.rows <= self.target or not self.limits.split:
            del queue.closed[batch]
            return batch
        (task,) = batch.tasks
        head, rest = cut(task, self.target)
        first = Batch()
        first.opened, first.due, first.reason, first.allowed = batch.opened, batch.due, batch.reason, batch.allowed
        first.add(head)
        batch.keep([])
        batch.add(rest)
        self.waiting += 1  # the head and the rest, in place of the task
        return first

    def _trim(self, queue: Queue, batch: Batch, now: float) -> None:
        """BATCH_DOWN: leave the rows above the largest allowed size for the next batch, if a task begins there."""
        at = bisect_right(batch.allowed, batch.rows)
        down = batch.allowed[at - 1] if at else 0
        if down <= 0 or down == batch.rows:
            return
        sizes = list(accumulate(task.rows for task in batch.tasks))
        if down not in sizes:
            return
        count = sizes.index(down) + 1
        rest, batch.tasks = batch.tasks[count:], batch.tasks[:count]
        self.waiting -= len(rest)  # `_append` adds them again
        self.waiting_rows -= batch.rows - down
        # The rest waits only its share of the time, as in TensorFlow.
        opened = batch.opened + (now - batch.opened) * down / batch.rows
        batch.rows = down
        for task in rest:
            self._append(queue, task, opened)
        self.moved.append(rest[0])

    # --- low priority ---

    def _ready_low(self, queue: Queue, low: LowPriority, now: float) -> Batch | None:
        if not queue.low or queue.open.tasks:
            return None
        since = queue.low_since
        reason = (
            "full" if queue.low_rows >= low.target else "enough" if queue.low_rows >= self.limits.enough else "timeout"
        )
        if reason == "timeout" and now < since + low.timeout:
            return None
        batch = Batch()
        batch.opened, batch.reason, batch.allowed = since, reason, low.allowed
        self._move_low(queue, batch, low.target, low.split)
        return batch

    def _ready_merged(self, queue: Queue, low: LowPriority, now: float) -> Batch | None:
        is_full = queue.open.rows + queue.low_rows >= self.target
        if queue.is_empty or (not is_full and now < self._merged_due(queue, low)):
            return None
        alone = not queue.open.tasks
        batch = self._close_open(queue, "full" if is_full else "timeout", wait=False)
        if alone:
            batch.opened, batch.allowed = queue.low_since, low.allowed
        elif self.limits.batch_down and not is_full:
            self._trim(queue, batch, now)
        self._move_low(queue, batch, self.target, self.limits.split)
        return batch

    def _fill_with_low(self, queue: Queue, batch: Batch, low: LowPriority) -> None:
        if low.policy == "low_priority_padding_with_max_batch_size":
            self._move_low(queue, batch, self.target, low.split)
        elif low.policy == "low_priority_padding_with_next_allowed_batch_size":
            self._move_low(queue, batch, batch.padded, low.split)
        elif low.policy == "priority_merge":
            self._move_low(queue, batch, self.target, self.limits.split)

    def _move_low(self, queue: Queue, batch: Batch, target: int, split: bool) -> None:
        """Move low-priority tasks from the front of their list into `batch` while they fit."""
        while queue.low and batch.rows < target:
            task, gap = queue.low_first, target - batch.rows
            if task.rows > gap and not split and batch.tasks:
                break  # alone, it may be above new limits
            batch.add(self._first_low(queue, gap if split else task.rows))
        if queue.low:
            self.moved.append(queue.low_first)

    def _first_low(self, queue: Queue, most: Any) -> Any:
        """Remove the first low-priority task, or its first rows if it has more than `most`; return what was removed."""
        before = len(queue.low)
        task = queue.pop_low(most)
        self.waiting += len(queue.low) - before + 1  # the rest of a task that was cut
        return task

    def _raise_aged(self, queue: Queue, low: LowPriority, now: float) -> None:
        """Put low-priority tasks that have waited for long behind those of high priority: these would pass them for ever."""
        while queue.low and now - queue.low_since >= low.ages_after:
            since = queue.low_since
            task = self._first_low(queue, inf)
            self.waiting -= 1  # it is appended again
            self.waiting_rows -= task.rows
            self._put_again(queue, task, since)

    # --- the queues themselves ---

    def flush(self) -> None:
        """Make every batch due."""
        for queue in self.queues.values():
            queue.open.due = -inf
            queue.low = OrderedDict.fromkeys(queue.low, -inf)
            self._watch(queue)

    def rebuild(self, waiting: list[tuple[Hashable, Any, float]], running: int) -> None:
        """Rebuild the queues from the waiting tasks, given in order as (key, task, arrival); `running` batches run now."""
        for batch in [batch for queue in self.queues.values() for batch in (*queue.closed, queue.open)]:
            batch.keep([])  # a part of a call may refer to it longer than the other calls live
        self._clear()
        self.running = running
        for key, task, arrived in waiting:
            queue = self.queues.get(key)
            if queue is None:
                queue = Queue(key)
                self._add_queue(queue)
            queue.last_used = arrived
            if task.owner.low and self._low is not None:
                self._append_low(queue, task, arrived)
            else:
                self._put_again(queue, task, arrived)
        for queue in self.queues.values():
            self._watch(queue)
        self.moved = [task for _, task, _ in waiting]

    def _put_again(self, queue: Queue, task: Any, arrived: float) -> None:
        """Place a task that has waited before, without a check of limits: above them it has batches of its own."""
        if queue.open.tasks and queue.open.rows + task.rows > self.target:
            self._close_open(queue, "overflow")
        self._append(queue, task, arrived)
        if queue.open.rows > self.target:
            self._close_open(queue, "full")

    def missing(self) -> list[str]:
        """Return the calls that the next batch waits for, as far as they are known."""
        return []


def _opened(queue: Queue) -> float:
    """Return when the next batch of a queue was opened."""
    return next(iter(queue.closed)).opened if queue.closed else queue.open.opened
