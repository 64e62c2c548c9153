"""The figures of a batcher: counts and times of its batches, in all or over the last seconds, and a receipt for one call."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, NamedTuple

from ..core import check
from ..core.clock import Clock
from ..core.inputs import shown
from ..core.lock import lock
from ..errors import InvalidArgumentError
from .queue import Batch

#: The longest window of `statistics(last=...)` in seconds.
LONGEST_WINDOW = 300
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

    def to_dict(self) -> dict[str, Any]:
        """Return the count, total, mean and longest time and three quantiles, as plain JSON."""
        quantiles = {name: self.quantile(q) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
        return {"count": self.count, "total": self.total, "mean": self.mean, "longest": self.longest, **quantiles}


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
        # Times in a row are often alike: benchmark row "no-op, 1 thread".
        if not self._above < seconds <= self._upto:
            self._at = at = bisect_left(_EDGES, seconds)
            self._above = _EDGES[at - 1] if at else -inf
            self._upto = _EDGES[at] if at < len(_EDGES) else inf
        self.buckets[self._at] += 1

    def merge(self, other: _TimeCounter) -> None:
        """Add the times of another counter."""
        self.count += other.count
        self.total += other.total
        self.longest = max(self.longest, other.longest)
        self.buckets = [a + b for a, b in zip(self.buckets, other.buckets, strict=True)]

    def snapshot(self) -> Times:
        return Times(self.count, self.total, self.longest, tuple(self.buckets))


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of the figures of a batcher since it was made or reset, or over the last seconds.

    - `seconds`: the time that the figures cover
    - `calls`: the calls that ran, with a result or an error; `rows` and `batches`: their rows and batches
    - `sizes`: the number of batches by their number of rows; `padding`: the rows of padding, which count nowhere else
    - `reasons`: the number of batches by the reason they were closed, see `weft.Receipt`
    - `waits`: the times from a call to the start of its batch; `runs`: the times of the function
    - `failed`: the calls that got an error of the function; `rejected`: those refused before they joined a batch; `late`: those
      whose deadline passed
    - `backwards`: the backwards of batches
    - `waiting` and `running`: the calls that wait and the batches that run now
    """

    seconds: float
    calls: int
    rows: int
    batches: int
    sizes: dict[int, int]
    padding: int
    reasons: dict[str, int]
    waits: Times
    runs: Times
    failed: int
    rejected: int
    late: int
    backwards: int
    waiting: int
    running: int

    @property
    def mean_size(self) -> float:
        """The mean number of rows of a batch."""
        return self.rows / self.batches if self.batches else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON; the sizes of batches are strings there, as all keys."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        sizes = {str(size): count for size, count in self.sizes.items()}
        own |= {"sizes": sizes, "mean_size": self.mean_size, "reasons": dict(self.reasons)}
        return own | {"waits": self.waits.to_dict(), "runs": self.runs.to_dict()}


class Receipt(NamedTuple):
    """The figures of one call. Times are in seconds.

    - `queue_time`: the time from the call to the start of its batch; `run_time`: that of the function
    - `batch`: the number of the batch; `size`: its rows; `padding`: its further rows of padding
    - `position`: where the call's rows begin in the batch
    - `reason`: why the batch was closed: it was "full", the next call did not fit ("overflow"), it had "enough" rows
      (`min_batch_size`) when a worker was free, `max_wait` had passed ("timeout"), or it was recorded so ("replay")
    """

    queue_time: float
    batch: int
    size: int
    position: int
    padding: int
    run_time: float
    reason: str


class _Tally:
    """The figures of some time from `second` on."""

    def __init__(self, second: int) -> None:
        self.second = second
        self.sizes: dict[int, int] = {}
        self.reasons: dict[str, int] = {}
        self.counts: Counter[str] = Counter()  # of failed, rejected and late calls, and of backwards
        self.waits = _TimeCounter()
        self.runs = _TimeCounter()
        self.padding = 0

    def merge(self, other: _Tally) -> None:
        """Add the figures of another tally."""
        _add(self.sizes, other.sizes)
        _add(self.reasons, other.reasons)
        _add(self.counts, other.counts)
        self.waits.merge(other.waits)
        self.runs.merge(other.runs)
        self.padding += other.padding


def _add(counts: dict[Any, int], others: dict[Any, int]) -> None:
    for key, count in others.items():
        counts[key] = counts.get(key, 0) + count


class Counters:
    """Collects the statistics: one tally for each of the last seconds with calls, and one for the time before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        with lock:
            self._began = self._clock.now()
            self._before = _Tally(0)
            self._seconds: deque[_Tally] = deque()
            self._tally = _Tally(-1)

    def _now(self, now: float) -> _Tally:
        """Return the tally of the time `now`; runs under the lock."""
        tally = self._tally
        if now < tally.second + 1:
            return tally
        self._tally = tally = _Tally(int(now))
        self._seconds.append(tally)
        while self._seconds[0].second < tally.second - LONGEST_WINDOW:
            self._before.merge(self._seconds.popleft())
        return tally

    def batch_ran(self, batch: Batch, arrivals: list[float], ended: float) -> None:
        """Count a batch that ran; `arrivals` are the arrival times of the calls whose first row is in it."""
        with lock:
            tally = self._now(ended)
            tally.sizes[batch.count] = tally.sizes.get(batch.count, 0) + 1
            tally.reasons[batch.reason] = tally.reasons.get(batch.reason, 0) + 1
            tally.padding += batch.padding or 0
            if batch.rest is None:
                tally.runs.add(ended - batch.started)
            for arrived in arrivals:
                tally.waits.add(batch.started - arrived)

    def stream_ran(self, seconds: float) -> None:
        """Count the run of a batch that `batch_ran` has counted at its first chunk."""
        with lock:
            self._now(self._clock.now()).runs.add(seconds)

    def count(self, figure: Literal["failed", "rejected", "late", "backwards"]) -> None:
        """Count one more call that failed, was rejected or was late, or one more backward; see `Statistics`."""
        with lock:
            self._now(self._clock.now()).counts[figure] += 1

    def snapshot(self, waiting: int, running: int, last: float | None = None) -> Statistics:
        """Return the statistics of the last `last` seconds, of all time if it is None."""
        if last is not None:
            last = _window(last)
        whole = _Tally(0)
        with lock:
            now = self._clock.now()
            seconds = now - self._began if last is None else min(last, now - self._began)
            tallies = [tally for tally in self._seconds if last is None or tally.second >= int(now - last)]
            for tally in tallies[-1:]:  # the others do not change any more: they are added without the lock
                whole.merge(tally)
            if last is None:
                whole.merge(self._before)
        for tally in tallies[:-1]:
            whole.merge(tally)
        return Statistics(
            seconds=seconds,
            calls=whole.waits.count,
            rows=sum(size * count for size, count in whole.sizes.items()),
            batches=sum(whole.sizes.values()),
            sizes=dict(sorted(whole.sizes.items())),
            padding=whole.padding,
            reasons=whole.reasons,
            waits=whole.waits.snapshot(),
            runs=whole.runs.snapshot(),
            failed=whole.counts["failed"],
            rejected=whole.counts["rejected"],
            late=whole.counts["late"],
            backwards=whole.counts["backwards"],
            waiting=waiting,
            running=running,
        )


def _window(last: Any) -> float:
    found = check.plain(last)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found <= LONGEST_WINDOW:
        raise InvalidArgumentError(
            f"last must be a positive number of seconds up to {LONGEST_WINDOW}, got {shown(found)}"
        )
    return found
