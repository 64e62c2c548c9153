"""Which replica a call goes to, by what the replicas' last answers said of their queues."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .frames import Load

#: A replica that has not answered yet counts as full: else all new clients would begin with the first one.
UNKNOWN = 1 << 60


class Candidate:
    """What a client knows of a replica's queue: the last answer's figures, and the rows it has sent since."""

    __slots__ = ("filled", "running", "sent", "waiting")

    def __init__(self) -> None:
        self.waiting = self.running = self.sent = 0
        self.filled = UNKNOWN

    def report(self, load: Load) -> None:
        """Take the figures of an answer."""
        self.waiting, self.running, self.filled, self.sent = load.waiting, load.running, load.filled, 0


#: Up to so many replicas are filled one after the other where batches wait to be filled; with more, clients know too little.
FILLED_IN_ORDER = 16
#: The share of `max_batch_size` from which a batch is full enough: replicas need not be filled in order then, and many clients that
#: fill the same one would make its queue long.
FULL = 0.5


class Router:
    """Chooses replicas. `fills` is True if a batch waits for more rows although nothing runs.

    Then, as long as batches are not full, all clients fill the replicas in the same order, so that few batches are open. Else the
    better of two replicas picked at random is taken: the one with fewer rows before the call.
    """

    def __init__(self, max_batch_size: int, parallel: int = 1, fills: bool = False, seed: int | None = None) -> None:
        self._fills = fills
        self.change(max_batch_size, parallel)
        self._random = random.Random(seed).random

    def change(self, max_batch_size: int, parallel: int) -> None:
        """Take new values of a batcher's options."""
        self._most, self._parallel = max_batch_size, parallel
        self._full = FULL * max_batch_size

    def choose(self, candidates: Sequence[Candidate], rows: int) -> int:
        """Return the place of the replica for a call with so many rows, and count them as sent."""
        in_order = self._fills and len(candidates) <= FILLED_IN_ORDER
        best = self._first_with_room(candidates, rows) if in_order else None
        if best is None:
            best = self._better_of_two(candidates)
        candidates[best].sent += rows
        return best

    def _first_with_room(self, candidates: Sequence[Candidate], rows: int) -> int | None:
        """Return the first replica whose open batch has room; None if the last batch of any replica was full enough."""
        found = None
        for i, each in enumerate(candidates):
            if each.filled > self._full:
                return None
            if found is None and each.waiting + each.sent + rows <= self._most:
                found = i
        return found

    def _better_of_two(self, candidates: Sequence[Candidate]) -> int:
        count = len(candidates)
        if count == 1:
            return 0
        first = int(self._random() * count)
        other = (first + 1 + int(self._random() * (count - 1))) % count
        return other if self._before(candidates[other]) < self._before(candidates[first]) else first

    def _before(self, candidate: Candidate) -> int:
        """Return the rows before the next call, where a replica that is busy counts as one batch more than a free one."""
        waiting = candidate.waiting + candidate.sent
        return waiting if waiting or candidate.running >= self._parallel else -1
