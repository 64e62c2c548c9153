"""Which replica a call goes to: the better of two that are picked at random, by what their last answers said of their queues."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .frames import Load


class Candidate:
    """What a client knows of a replica's queue: the last answer's figures, and the rows it has sent since."""

    __slots__ = ("running", "sent", "waiting")

    def __init__(self) -> None:
        self.waiting = self.running = self.sent = 0

    def report(self, load: Load) -> None:
        """Take the figures of an answer."""
        self.waiting, self.running, self.sent = load.waiting, load.running, 0


class Router:
    """Chooses replicas. `fills` is True if a batch waits for more rows although nothing runs."""

    def __init__(self, max_batch_size: int, parallel: int = 1, fills: bool = False, seed: int | None = None) -> None:
        self._most, self._parallel, self._fills = max_batch_size, parallel, fills
        self._random = random.Random(seed).random

    def choose(self, candidates: Sequence[Candidate], rows: int) -> int:
        """Return the place of the replica for a call with so many rows, and count them as sent."""
        count = len(candidates)
        best = 0
        if count > 1:
            draw = self._random
            best = int(draw() * count)
            other = (best + 1 + int(draw() * (count - 1))) % count
            if self._rank(candidates[other], rows) < self._rank(candidates[best], rows):
                best = other
        candidates[best].sent += rows
        return best

    def _rank(self, candidate: Candidate, rows: int) -> tuple[int, int]:
        """Return how many batches run before the call's own would, then how empty its batch is: the fullest is joined."""
        waiting = candidate.waiting + candidate.sent
        ahead, rest = divmod(waiting, self._most)
        if rest + rows > self._most:
            ahead, rest = ahead + 1, 0
        # An idle replica that need not fill its batch runs the call at once.
        is_free = not self._fills and not waiting and candidate.running < self._parallel
        return (ahead if is_free or self._fills else ahead + 1, -rest)
