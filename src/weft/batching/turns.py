"""Which queues of a scheduler may have a batch ready, in the order of their turns, and when to look at the others."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from .queue import Queue

_numbers = count()


class Turns:
    """A list of queues that may have a batch ready, and a heap of the times at which others may have one.

    A queue that is listed once more goes to the end of the list. Of the times in the heap only a queue's `watched` counts, so that
    a queue can be watched for an earlier time, or not at all, without a search for its entry.
    """

    def __init__(self) -> None:
        self.first: Queue | None = None  # of the list; each queue knows the one `after` it
        self._last: Queue | None = None
        self._times: list[tuple[float, int, Queue]] = []
        self._most = 64  # with so many entries, those that do not count are dropped

    def enlist(self, queue: Queue) -> None:
        """Add a queue to the list, if it is not in it."""
        if queue.is_listed:
            return
        queue.is_listed = True
        last = self._last
        if last is None:
            self.first = queue
        else:
            last.after = queue
        self._last = queue

    def unlist_first(self) -> None:
        """Remove the first queue of the list."""
        queue = self.first
        assert queue is not None
        self.first, queue.after = queue.after, None
        if self.first is None:
            self._last = None
        queue.is_listed = False

    def watch(self, queue: Queue, when: float) -> None:
        """Note when a queue that is not listed may have a batch ready."""
        if when >= queue.watched:
            return
        queue.watched = when
        heappush(self._times, (when, next(_numbers), queue))
        if len(self._times) > self._most:
            self._times = [entry for entry in self._times if entry[2].watched == entry[0]]
            heapify(self._times)
            self._most = max(64, 2 * len(self._times))

    def next_due(self, now: float) -> Queue | None:
        """Remove and return a queue whose time has come, None if there is none."""
        while self._times and self._times[0][0] <= now:
            when, _, queue = heappop(self._times)
            if queue.watched == when:
                queue.watched = inf
                return queue
        return None

    def clear(self) -> None:
        """Forget all queues."""
        self.first = self._last = None
        self._times.clear()
