"""The figures of a batcher: counts and times over all its batches, and a receipt for one call."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ..core.lock import lock
from .queue import Batch

#: The upper ends of the buckets of times in seconds: eight per factor of two, from a microsecond to about an hour.
_EDGES = [1e-6 * 2 ** (k / 8) for k in range(8 * 32)]


@dataclass(frozen=True, slots=True)
class Times:
    """A distribution of times in seconds; quantiles are right to 10 %."""

    count: int
    total: float
    longest: float
    _buckets: tuple[int, ...] = field(repr=False)

    @property
    def mean(self) -> float:
        """The mean, 0 without times."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """Return the time that the fraction `q` of all times did not exceed."""
        left = q * self.count
        for at, count in enumerate(self._buckets):
            left -= count
            if left <= 0 and count:
                return min(_EDGES[at], self.longest) if at < len(_EDGES) else self.longest
        return self.longest


class _TimeCounter:
    """Collects times."""

    def __init__(self) -> None:
        self.count = 0
        self.total = self.longest = 0.0
        self.buckets = [0] * (len(_EDGES) + 1)
        self._at, self._above, self._upto = 0, -inf, _EDGES[0]  # the bucket of the last time

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        if seconds > self.longest:
            self.longest = seconds
        # The calls of a batch often waited similarly: benchmark row "no-op, 64 tasks".
        if not self._above < seconds <= self._upto:
            self._at = at = bisect_left(_EDGES, seconds)
            self._above = _EDGES[at - 1] if at else -inf
            self._upto = _EDGES[at] if at < len(_EDGES) else inf
        self.buckets[self._at] += 1

    def snapshot(self) -> Times:
        return Times(self.count, self.total, self.longest, tuple(self.buckets))


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of the figures of a batcher since it was made."""

    calls: int  # that ran, with a result or an error
    rows: int
    batches: int
    sizes: dict[int, int]  # number of rows -> number of batches
    padding: int  # padding rows
    reasons: dict[str, int]  # why batches were closed -> number of batches
    waits: Times  # from a call to the start of its batch
    runs: Times  # of the function
    failed: int  # calls that got an error of the function
    rejected: int  # calls refused before they joined a batch
    late: int  # calls whose deadline passed
    backwards: int
    waiting: int  # calls that wait now
    running: int  # batches that run now

    @property
    def mean_size(self) -> float:
        """The mean number of rows of a batch."""
        return self.rows / self.batches if self.batches else 0.0


class Receipt(NamedTuple):
    """The figures of one call. Times are in seconds."""

    queue_time: float
    batch: int
    size: int  # rows of the batch
    position: int  # of the call's first row
    padding: int
    run_time: float
    reason: str  # why the batch was closed: full, overflow, enough, timeout


class Counters:
    """Collects the statistics."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._reasons: dict[str, int] = {}
        self._waits = _TimeCounter()
        self._runs = _TimeCounter()
        self._padding = self._failed = self._rejected = self._late = self._backwards = 0

    def batch_ran(self, batch: Batch, arrivals: list[float], ended: float) -> None:
        """Count a batch that ran; `arrivals` are the arrival times of the calls whose first row is in it."""
        with lock:
            self._sizes[batch.count] = self._sizes.get(batch.count, 0) + 1
            self._reasons[batch.reason] = self._reasons.get(batch.reason, 0) + 1
            self._padding += batch.padding or 0
            self._runs.add(ended - batch.started)
            for arrived in arrivals:
                self._waits.add(batch.started - arrived)

    def call_failed(self) -> None:
        """Count a call that got an error."""
        with lock:
            self._failed += 1

    def call_rejected(self) -> None:
        """Count a refused call."""
        with lock:
            self._rejected += 1

    def call_late(self) -> None:
        """Count a call whose deadline passed."""
        with lock:
            self._late += 1

    def went_back(self) -> None:
        """Count a batch's backward."""
        with lock:
            self._backwards += 1

    def snapshot(self, waiting: int, running: int) -> Statistics:
        """Return the statistics now."""
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
