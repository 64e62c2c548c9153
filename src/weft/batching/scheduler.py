"""The rules of batching: a state machine without threads and without a clock.

`put` places a task in a queue, `take` returns the next batch that is ready, if one more may run, and `release` says that it has
been processed. Every method is given the time. The rules are those of TensorFlow's SharedBatchScheduler, and of its
AdaptiveSharedBatchScheduler where `Limits.adaptive` is set.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable
from itertools import accumulate
from math import inf
from typing import Any

from ..errors import InvalidArgumentError, QueueFullError
from .queue import Batch, Limits, LowPriority, Pace, Queue

#: Queues that stay empty this long are dropped, and all empty ones once there are more than so many.
IDLE_QUEUE_SECONDS = 60.0
IDLE_QUEUES = 64


class Scheduler:
    """Decides which tasks share a batch, and when a batch is processed."""

    def __init__(self, limits: Limits) -> None:
        self._apply(limits)
        self.queues: dict[Hashable, Queue] = {}
        self.running = 0
        self.waiting = 0  # tasks that are in a queue
        self.waiting_rows = 0  # and their rows
        #: Tasks whose batch has a new due time: their callers must set their alarms again.
        self.moved: list[Any] = []
        self._order: list[Queue] = []
        self._next = 0
        self._pace = Pace() if limits.adaptive else None

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

    def set_limits(self, limits: Limits) -> None:
        """Apply other limits from now on. The waiting tasks form new batches; one above the limits has a batch of its own."""
        self._apply(limits)
        waiting = [(queue.key, task, task.owner.arrived) for queue in self._order for task in queue.tasks()]
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
            return None
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
        """Refuse a task if more rows than `max_waiting` would wait; rows that are processed at once do not wait."""
        if self.waiting_rows + task.rows - self._rows_that_run(queue, task) > self.limits.max_waiting:
            raise QueueFullError(
                f"the queue is full: {self.waiting_rows} wait, {task.rows} came, and at most {self.limits.max_waiting:g} may wait"
            )

    def _rows_that_run(self, queue: Queue, task: Any) -> float:
        """Return how many rows of a queue would be processed at once if `task` came."""
        if task.low and queue.open.tasks:
            return 0
        if self.limits.split and not task.low:
            full, rest = divmod(queue.open.rows + task.rows, self.target)
            sizes = [self.target] * full + [rest] * (rest > 0)
        else:
            sizes = []
            ahead = [other.rows for _, other in queue.low] if task.low else [queue.open.rows]
            for rows in (*ahead, *_pieces(task.rows, self.target)):
                if sizes and sizes[-1] + rows <= self.target:
                    sizes[-1] += rows
                else:
                    sizes.append(rows)
        if sizes[-1] < self.enough:
            sizes.pop()
        return sum(sizes[: max(self.limits.threads - self.running, 0)])

    def _put_whole(self, queue: Queue, task: Any, now: float) -> None:
        if queue.open.rows + task.rows > self._most:
            if len(queue.closed) + 1 >= self.limits.max_enqueued:
                self._refuse_full(queue, task)
            self._close_open(queue, "overflow")
        self._append(queue, task, now)

    def _put_split(self, queue: Queue, task: Any, now: float) -> None:
        target = self.target
        gap = target - queue.open.rows
        if task.rows > (self.limits.max_enqueued - len(queue.closed) - 1) * target + gap:
            self._refuse_full(queue, task)
        if task.rows <= gap:
            self._append(queue, task, now)
            return
        start = 0
        while start < task.rows:
            size = min(gap or target, task.rows - start)
            if queue.open.rows + size > target:
                self._close_open(queue, "full")
            self._append(queue, task.owner.piece(start, size), now)
            start += size
            gap = target - queue.open.rows

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
        parts = [task]
        if task.rows > low.target:
            sizes = _pieces(task.rows, low.target)
            parts = [task.owner.piece(i * low.target, rows) for i, rows in enumerate(sizes)]
        for part in parts:
            self._append_low(queue, part, now)

    def _append_low(self, queue: Queue, task: Any, now: float) -> None:
        task.queue, task.batch = queue, None
        queue.low.append((now, task))
        queue.low_rows += task.rows
        self.waiting += 1
        self.waiting_rows += task.rows

    def _refuse_full(self, queue: Queue, task: Any) -> None:
        raise QueueFullError(
            f"the queue is full: at most max_enqueued_batches = {self.limits.max_enqueued:g} batches may wait, there are "
            f"{len(queue.closed) + 1} and {task.rows} more rows do not fit"
        )

    def remove(self, task: Any) -> bool:
        """Remove a waiting task; return False if it does not wait."""
        queue: Any = task.queue
        batch = task.batch
        if queue is None:
            return False
        if batch is not None and batch.is_taken:
            batch.has_departed = True
            return False
        if queue not in self._order:  # the queues were rebuilt without it
            return False
        task.queue = None
        self.waiting -= 1
        self.waiting_rows -= task.rows
        if batch is None:
            queue.low = deque(entry for entry in queue.low if entry[1] is not task)
            queue.low_rows -= task.rows
            if queue.low:
                self.moved.append(queue.low[0][1])
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
                self.moved.append(queue.low[0][1])
        else:
            queue.closed.remove(batch)
        return True

    def due(self, task: Any) -> tuple[float, bool]:
        """Return when the batch of a waiting task stops waiting for more, and whether this task is the one that watches it."""
        queue, batch = task.queue, task.batch
        if queue is None or (batch is not None and (batch.is_taken or batch is not queue.open)):
            return inf, False
        low = self.limits.low
        if low is not None and low.policy == "priority_merge" and queue.low:
            when = self._merged_due(queue, low)
            first = queue.open.tasks[0] if queue.open.tasks else queue.low[0][1]
            return when, task is first
        if batch is None:
            assert low is not None
            return queue.low[0][0] + low.timeout, task is queue.low[0][1]
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

    def ready(self, now: float) -> list[Any]:
        """Return the tasks of the batch that `take` would return, in the usual case; change nothing."""
        if self._pace is not None or self._low is not None or self.running >= self._threads:
            return []
        order = self._order
        for i in range(len(order)):
            queue = order[(self._next + i) % len(order)]
            if queue.closed:
                return queue.closed[0].tasks
            if queue.open.tasks and (queue.open.rows >= self.enough or now >= queue.open.due):
                return queue.open.tasks
        return []

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
        order = self._order
        for _ in range(len(order)):
            queue = order[self._next % len(order)]
            self._next = (self._next + 1) % len(order)
            batch = self._ready(queue, now)
            if batch is not None:
                return batch
        return None

    def _take_oldest(self, now: float) -> Batch | None:
        """Adaptive: return the oldest ready batch; beyond the adaptive limit only a full one, up to `threads`."""
        assert self._pace is not None
        for queue in sorted(self._order, key=lambda q: q.closed[0].opened if q.closed else q.open.opened):
            is_full = bool(queue.closed) or queue.open.rows >= self.target
            if self.running < (self.limits.threads if is_full else self._pace.in_flight):
                batch = self._ready(queue, now)
                if batch is not None:
                    return batch
        return None

    def _ready(self, queue: Queue, now: float) -> Batch | None:
        low = self._low
        if queue.closed:
            batch = queue.closed.popleft()
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
            queue.closed.append(batch)
        return batch

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
        reason = (
            "full" if queue.low_rows >= low.target else "enough" if queue.low_rows >= self.limits.enough else "timeout"
        )
        if reason == "timeout" and now < queue.low[0][0] + low.timeout:
            return None
        batch = Batch()
        batch.opened, batch.reason, batch.allowed = queue.low[0][0], reason, low.allowed
        self._move_low(queue, batch, low.target, split=False)
        return batch

    def _ready_merged(self, queue: Queue, low: LowPriority, now: float) -> Batch | None:
        is_full = queue.open.rows + queue.low_rows >= self.target
        if queue.is_empty or (not is_full and now < self._merged_due(queue, low)):
            return None
        alone = not queue.open.tasks
        batch = self._close_open(queue, "full" if is_full else "timeout", wait=False)
        if alone:
            batch.opened, batch.allowed = queue.low[0][0], low.allowed
        elif self.limits.batch_down and not is_full:
            self._trim(queue, batch, now)
        self._move_low(queue, batch, self.target, self.limits.split)
        return batch

    def _merged_due(self, queue: Queue, low: LowPriority) -> float:
        """Return the due time: it counts from the oldest task, with the low-priority timeout only if no other task waits."""
        oldest = min(queue.open.opened, queue.low[0][0] if queue.low else inf)
        return oldest + (self.limits.timeout if queue.open.tasks else low.timeout)

    def _fill_with_low(self, queue: Queue, batch: Batch, low: LowPriority) -> None:
        if low.policy == "low_priority_padding_with_max_batch_size":
            self._move_low(queue, batch, self.target, split=False)
        elif low.policy == "low_priority_padding_with_next_allowed_batch_size":
            self._move_low(queue, batch, batch.padded, split=False)
        elif low.policy == "priority_merge":
            self._move_low(queue, batch, self.target, self.limits.split)

    def _move_low(self, queue: Queue, batch: Batch, target: int, split: bool) -> None:
        """Move low-priority tasks from the front of their list into `batch` while they fit."""
        while queue.low and batch.rows < target:
            since, task = queue.low[0]
            gap = target - batch.rows
            if task.rows > gap and not split:
                if batch.tasks:
                    break
                gap = task.rows  # it was above new limits: alone
            queue.low.popleft()
            queue.low_rows -= min(task.rows, gap)
            if task.rows > gap:
                rest = task.owner.piece(task.start + gap, task.rows - gap)
                head = task.owner.piece(task.start, gap)
                head.queue = rest.queue = queue
                task.queue = None  # its slices wait in its place
                queue.low.appendleft((since, rest))
                self.waiting += 1
                task = head
            batch.add(task)
        if queue.low:
            self.moved.append(queue.low[0][1])

    # --- the queues themselves ---

    def flush(self) -> None:
        """Make every batch due."""
        for queue in self.queues.values():
            queue.open.due = -inf
            queue.low = deque((-inf, task) for _, task in queue.low)

    def drain(self) -> list[Any]:
        """Remove and return every waiting task."""
        tasks = [task for queue in self.queues.values() for task in queue.tasks()]
        self.queues.clear()
        self._order.clear()
        self._next = self.waiting = self.waiting_rows = 0
        for task in tasks:
            task.queue = None
        return tasks

    def rebuild(self, waiting: list[tuple[Hashable, Any, float]], running: int) -> None:
        """Rebuild the queues from the waiting tasks, given in order as (key, task, arrival); `running` batches run now."""
        for batch in [batch for queue in self._order for batch in (*queue.closed, queue.open)]:
            batch.keep([])  # a slice of a call may refer to it longer than the other calls live
        self.queues.clear()
        self._order.clear()
        self._next, self.waiting, self.waiting_rows, self.running = 0, 0, 0, running
        for key, task, arrived in waiting:
            queue = self.queues.get(key)
            if queue is None:
                queue = Queue(key)
                self._add_queue(queue)
            queue.last_used = arrived
            if task.owner.low and self._low is not None:
                self._append_low(queue, task, arrived)
            else:
                if queue.open.tasks and queue.open.rows + task.rows > self.target:
                    self._close_open(queue, "overflow")
                self._append(queue, task, arrived)
                if queue.open.rows > self.target:
                    self._close_open(queue, "full")
        self.moved = [task for _, task, _ in waiting]

    def _add_queue(self, queue: Queue) -> None:
        if len(self.queues) >= IDLE_QUEUES:
            self._drop(q for q in list(self.queues.values()) if q.is_empty)
        self.queues[queue.key] = queue
        self._order.append(queue)

    def missing(self) -> list[str]:
        """Return the calls that the next batch waits for, as far as they are known."""
        return []

    def drop_idle(self, now: float) -> float:
        """Drop the queues that have been empty for a minute; return when the next one may be dropped."""
        self._drop(q for q in list(self.queues.values()) if q.is_empty and now - q.last_used >= IDLE_QUEUE_SECONDS)
        return max(now, min((q.last_used for q in self.queues.values()), default=inf)) + IDLE_QUEUE_SECONDS

    def _drop(self, queues: Any) -> None:
        for queue in queues:
            at = self._order.index(queue)
            del self._order[at], self.queues[queue.key]
            self._next -= at < self._next


def _pieces(rows: Any, most: int) -> list[Any]:
    """Split `rows` into pieces of at most `most`."""
    return [rows] if rows <= most else [min(most, rows - at) for at in range(0, rows, most)]
