"""What a batcher tells of itself: counts and times over all its batches, and a receipt for one call."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ..core.lock import lock
from .queue import Batch

#: The upper ends of the buckets of times in seconds: eight to a factor of two, from a microsecond to about an hour.
_EDGES = [1e-6 * 2 ** (k / 8) for k in range(8 * 32)]


@dataclass(frozen=True, slots=True)
class Times:
    """How long something took, in seconds, over all that was seen; quantiles are right to a tenth."""

    count: int
    total: float
    longest: float
    _buckets: tuple[int, ...] = field(repr=False)

    @property
    def mean(self) -> float:
        """The mean, or 0 where nothing was seen."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """The time that a part `q` of all did not exceed."""
        left = q * self.count
        for at, count in enumerate(self._buckets):
            left -= count
            if left <= 0 and count:
                return min(_EDGES[at], self.longest) if at < len(_EDGES) else self.longest
        return self.longest


class _Clocked:
    """Times as they are collected."""

    def __init__(self) -> None:
        self.count = 0
        self.total = self.longest = 0.0
        self.buckets = [0] * (len(_EDGES) + 1)
        self._at, self._above, self._upto = 0, -inf, _EDGES[0]  # the bucket of the last one: the next is often in it

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        if seconds > self.longest:
            self.longest = seconds
        if not self._above < seconds <= self._upto:
            self._move(seconds)
        self.buckets[self._at] += 1

    def _move(self, seconds: float) -> None:
        """Find the bucket of a time; most often it is the next to that of the last, since calls come one after the other."""
        at = self._at
        if at and self._above >= seconds > (_EDGES[at - 2] if at > 1 else -inf):
            at -= 1
        else:
            at = bisect_left(_EDGES, seconds)
        self._at = at
        self._above = _EDGES[at - 1] if at else -inf
        self._upto = _EDGES[at] if at < len(_EDGES) else inf

    def snapshot(self) -> Times:
        return Times(self.count, self.total, self.longest, tuple(self.buckets))


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of what a batcher has done since it was made."""

    calls: int  # that ran, well or with an error
    rows: int
    batches: int
    sizes: dict[int, int]  # how many batches had so many rows
    padding: int  # rows that were nobody's
    reasons: dict[str, int]  # why batches were closed
    waits: Times  # from a call to the start of its batch
    runs: Times  # of the function
    failed: int  # calls that were answered with an error of the function
    rejected: int  # calls that were refused before they joined a batch
    late: int  # calls whose deadline passed
    backwards: int
    waiting: int  # calls that wait now
    running: int  # batches that run now

    @property
    def mean_size(self) -> float:
        """Rows to a batch."""
        return self.rows / self.batches if self.batches else 0.0


class Receipt(NamedTuple):
    """What became of one call. Times are in seconds."""

    queue_time: float
    batch: int
    size: int  # rows of the batch
    position: int  # of the call's first row
    padding: int
    run_time: float
    reason: str  # why the batch was closed: full, overflow, enough, timeout


class Counters:
    """The statistics as they are collected."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._reasons: dict[str, int] = {}
        self._waits = _Clocked()
        self._runs = _Clocked()
        self._padding = self._failed = self._rejected = self._late = self._backwards = 0

    def batch_ran(self, batch: Batch, arrivals: list[float], ended: float) -> None:
        """A batch was processed: `arrivals` are those of the calls that began in it."""
        with lock:
            self._sizes[batch.count] = self._sizes.get(batch.count, 0) + 1
            self._reasons[batch.reason] = self._reasons.get(batch.reason, 0) + 1
            self._padding += batch.padding or 0
            self._runs.add(ended - batch.started)
            for arrived in arrivals:
                self._waits.add(batch.started - arrived)

    def call_failed(self) -> None:
        """A call was answered with an error."""
        with lock:
            self._failed += 1

    def call_rejected(self) -> None:
        """A call was refused."""
        with lock:
            self._rejected += 1

    def call_late(self) -> None:
        """A caller was told that its deadline passed."""
        with lock:
            self._late += 1

    def went_back(self) -> None:
        """A batch's backward ran."""
        with lock:
            self._backwards += 1

    def snapshot(self, waiting: int, running: int) -> Statistics:
        """All of it now."""
        with lock:
            return Statistics(
                calls=self._waits.count,
                rows=sum(size * count for size, count in self._sizes.items()),
                batches=sum(self._sizes.values()),
                sizes=dict(sorted(self._sizes.items())),
                padding=self._padding,
                reasons=dict(self._reasons),
                waits=self._waits.snapshot(),
                runs=self._runs.snapshot(),
                failed=self._failed,
                rejected=self._rejected,
                late=self._late,
                backwards=self._backwards,
                waiting=waiting,
                running=running,
            )
