"""Which replica a call goes to: the one where it will be answered first, by all that its client knows; without threads and clock.

The expected time of an answer has three parts:

- **the queue**: each answer of a replica carries how many rows wait there, whether batches run, and how long batches take there
  (`batch_time`), as measured by the replica itself, with the calls of all clients. From these and from what it has sent since, a
  client knows when the open batch begins and how many rows are in it; both move on with time, so that an old answer does not
  count for ever;
- **the way**: by how much answers came later than that, as the least of the last eight calls, each sent after the one before it
  was answered. So it is the network and other constant costs. A pause of this process makes all its calls late at once, and
  counts as one;
- **being late**: a replica that owes an answer and gives none is expected to take as long again. A call that its caller gave up
  counts until the next answer.

A replica of which nothing is known gets one call at a time, beside others. One that is expected to be slow gets no calls, and
one that would have recovered would not be noticed: so, rarely, a call goes there as a probe. What probes cost, in time beyond
that of the best replica, is at most `PROBE_SHARE` of the time of all calls.

Where batches wait to be filled (`fills`), and the last ones were far from full, all clients fill the replicas in the same order
instead, leaving out those that are slow, so that few batches are open.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Sequence
from math import inf
from typing import NamedTuple

from .frames import Load

#: A replica that has not answered yet counts as full: else all new clients would begin with the first one.
UNKNOWN = 1 << 60
#: The expected time of a replica of which nothing is known, with one call under way to it.
UNKNOWN_SECONDS = 1e9
#: The share of its speed at which a queue is taken to become shorter after the last answer: calls of other clients come, too.
DRAIN = 0.1
#: Replicas that take up to so many times as long as the fastest are its peers. Of these the freer of two picked at random is taken:
#: of all, every client would take the one that was free last.
ALIKE = 1.2
#: Of so many calls the one that came least late tells how long the way is.
SURPLUSES = 8
#: Up to so many replicas are compared for each call; of more, so many at random.
COMPARED = 8
#: The share of the time of all calls that probes of slow replicas may cost.
PROBE_SHARE = 0.02
#: Up to so many replicas are filled one after the other where batches wait to be filled; with more, clients know too little.
FILLED_IN_ORDER = 16
#: The share of `max_batch_size` from which a batch is full enough: replicas need not be filled in order then, and many clients that
#: fill the same one would make its queue long.
FULL = 0.5
#: How many times as long as the fastest replica's a batch may take where replicas are filled in order.
SLOW = 1.5


class Trip(NamedTuple):
    """A call under way."""

    sent: float
    seconds: float | None  # that it was expected to take without the way; None if that was not known
    ends: float  # when an answer was expected
    paid: float | None  # of a probe: how long it may take for what was paid for it


class Candidate:
    """What a client knows of a replica. Times are those of `time.monotonic`; threads may see each other's changes half made."""

    __slots__ = (
        "_is_busy", "_open", "_router", "_sampled", "_since", "_stuck", "_surplus", "_wait", "_way", "base", "filled",
        "heard", "is_known", "openings", "paid", "per_row", "sent", "under_way", "waiting",
    )  # fmt: skip

    def __init__(self, router: Router) -> None:
        self._router = router
        self.is_known = False  # whether it has told how long its batches take
        self.base = self.per_row = 0.0  # seconds of a batch, and of a row in it
        self.filled = UNKNOWN
        self.waiting = self.sent = 0  # rows at the last answer, and since then
        self.heard = 0.0  # when the last answer came
        # Of the batch that begins next: in how many seconds, when that was so, and its rows.
        self._wait, self._since, self._open = 0.0, 0.0, 0
        self._is_busy = False  # whether batches ran at the last answer
        self.under_way: dict[Hashable, Trip] = {}
        self.openings: dict[Hashable, None] = {}  # who is connecting
        self.paid: float | None = None  # the next call is a probe, which may take so long for what was paid for it
        self._way = 0.0
        self._surplus = deque([0.0] * SURPLUSES, SURPLUSES)
        self._sampled = self._stuck = 0.0

    def batch_seconds(self, rows: float) -> float:
        """Return how long a batch takes."""
        return self.base + self.per_row * rows

    def report(self, load: Load, now: float) -> None:
        """Take the figures of an answer."""
        self.base, self.per_row, self.filled = load.base, load.per_row, load.filled
        self.is_known = load.base > 0.0 or load.per_row > 0.0
        self.waiting = self._open = load.waiting
        self.sent = 0
        self.heard, self._stuck = now, 0.0
        self._is_busy = load.running >= self._router.parallel
        self._wait = self.batch_seconds(load.filled) / self._router.parallel if self._is_busy else 0.0
        self._since = now

    def expected(self, rows: int, now: float) -> float:
        """Return in how many seconds a call that is sent now would be answered."""
        if self.openings or not self.is_known:
            busy = len(self.openings) + len(self.under_way)
            return UNKNOWN_SECONDS * (1 + 2 * busy + (not self.heard))
        wait, together = self._place(rows, now)
        return self._seconds(wait, together) + self._way + self._late(now)

    def _seconds(self, wait: float, together: int) -> float:
        """Return how long a call takes whose batch begins in so many seconds, and has so many rows now."""
        if wait and together < self.filled <= self._router.most:  # others will join it, too
            together = self.filled
        return wait + self.base + self.per_row * together

    def seconds_alone(self, rows: int, now: float) -> float:
        """Return in how many seconds a batch would be answered if there was no queue before it."""
        return self.base + self.per_row * rows + self._way + self._late(now)

    def rows_before(self) -> int:
        """Return the rows before the next call, where a replica that is busy counts as one batch more than a free one."""
        waiting = self.waiting + self.sent
        return waiting if waiting or self._is_busy else -1

    def _place(self, rows: int, now: float) -> tuple[float, int]:
        """Return in how many seconds the batch of a call that is sent now begins, and how many rows are in it then."""
        router = self._router
        together, wait = self._open + (rows or 1), self._wait - DRAIN * (now - self._since)
        if wait <= 0.0:
            if self._open:  # the batch that was open runs
                wait += self.batch_seconds(self._open) / router.parallel
                together = rows or 1
            if wait < 0.0:
                wait = 0.0
        if together > router.most:
            full, together = divmod(together - 1, router.most)
            wait, together = wait + full * self.batch_seconds(router.most) / router.parallel, together + 1
        return wait, together

    def _late(self, now: float) -> float:
        """Return for how long this replica has owed an answer and has given none."""
        if not self.under_way:
            return self._stuck
        try:
            oldest = next(iter(self.under_way.values()), None)
        except RuntimeError:  # another thread's call has just begun or ended
            oldest = None
        return self._stuck if oldest is None else max(self._stuck, now - max(oldest.ends, self.heard))

    def begin(self, call: Hashable, rows: int, now: float) -> None:
        """Note a call that is sent."""
        self._wait, self._open = wait, together = self._place(rows, now)
        self._since = now
        self.sent += rows
        seconds = self._seconds(wait, together)
        paid, self.paid = self.paid, None
        self.under_way[call] = Trip(now, seconds if self.is_known else None, now + seconds + self._way, paid)

    def end(self, call: Hashable, now: float) -> None:
        """Note that a call is answered."""
        trip = self.under_way.pop(call, None)
        if trip is None:
            return
        self._router.settle(trip, now)
        if trip.seconds is not None and trip.sent >= self._sampled:
            self._sampled = now
            self._surplus.append(now - trip.sent - trip.seconds)
            self._way = max(0.0, min(self._surplus))

    def give_up(self, call: Hashable, now: float) -> None:
        """Note that nobody waits for a call's answer any more: it failed, or its caller left."""
        trip = self.under_way.pop(call, None)
        if trip is not None:
            self._router.settle(trip, now)
            self._stuck = max(self._stuck, now - max(trip.ends, self.heard))


class Router:
    """Chooses replicas. `fills` is True if a batch waits for more rows although nothing runs."""

    def __init__(self, max_batch_size: int, parallel: int = 1, fills: bool = False, seed: int | None = None) -> None:
        self._fills = fills
        self.change(max_batch_size, parallel)
        self._random = random.Random(seed).random
        self._last = 0  # the place that was best for the last call
        self._budget = 0.0  # seconds that probes may cost; below 0 if they were dearer than expected
        # The share of its cost that is saved before the next probe: random, as clients may begin together.
        self._saved = 1.0

    def change(self, max_batch_size: int, parallel: int) -> None:
        """Take new values of a batcher's options."""
        self.most, self.parallel = max_batch_size, parallel
        self._full = FULL * max_batch_size

    def settle(self, trip: Trip, now: float) -> None:
        """Note how long a call took: a part of it may be spent on probes. A probe that took less than was paid for gives back."""
        seconds = now - trip.sent
        self._budget += PROBE_SHARE * seconds if trip.paid is None else trip.paid - seconds

    def choose(
        self, candidates: Sequence[Candidate], rows: int, now: float, until: float = inf, may_connect: bool = True
    ) -> int:
        """Return the place of the replica for a call with so many rows, which wants its answer at the time `until`.

        Without `may_connect` a replica without a connection is chosen only if there is no other.
        """
        count = len(candidates)
        if count == 1:
            return 0
        in_order = self._fills and count <= FILLED_IN_ORDER
        times = self._times(candidates, rows, now, in_order)
        best = min(times, key=times.__getitem__)
        if not candidates[best].is_known:  # none of them is
            return best
        slow = 0.0  # a replica whose batches take so long may be probed
        if in_order:
            slow = SLOW * min(each.batch_seconds(self._full) for each in candidates if each.is_known)
            first = self._first_with_room(candidates, rows, slow)
            best, slow = (best, 0.0) if first is None else (first, slow)
        self._last = best
        if not may_connect:
            times = {place: seconds for place, seconds in times.items() if candidates[place].heard}
        probed = self._to_probe(candidates, times, best, until - now, slow)
        if probed is None:
            return best
        if candidates[probed].is_known:
            candidates[probed].paid = times[probed]
        return probed

    def _times(self, candidates: Sequence[Candidate], rows: int, now: float, in_order: bool) -> dict[int, float]:
        """Return the expected times of the replicas that are compared, by their places, beginning anywhere."""
        count = len(candidates)
        first = int(self._random() * count)
        if in_order or count <= COMPARED:
            places = [*range(first, count), *range(first)]
        else:
            last = min(self._last, count - 1)
            places = [first, last, *(int(self._random() * count) for _ in range(COMPARED - 2))]
        if not in_order:
            places = self._without_peers(candidates, places, rows, now)
        return {place: candidates[place].expected(rows, now) for place in places}

    def _without_peers(self, candidates: Sequence[Candidate], places: list[int], rows: int, now: float) -> list[int]:
        """Of the replicas that are as fast as the fastest, leave only the freer of two picked at random."""
        known = [place for place in places if candidates[place].is_known]
        rows = max([rows, *(candidates[place].filled for place in known)])
        alone = {place: candidates[place].seconds_alone(rows, now) for place in known}
        limit = ALIKE * min(alone.values(), default=0.0)
        peers = [place for place, seconds in alone.items() if seconds <= limit]
        left = dict.fromkeys(places)
        while len(peers) > 2:
            del left[peers.pop(int(self._random() * len(peers)))]
        if len(peers) == 2:
            first, second = (candidates[place].rows_before() for place in peers)
            if first != second:  # else their expected times decide
                del left[peers[first < second]]
        return list(left)

    def _to_probe(
        self, candidates: Sequence[Candidate], times: dict[int, float], best: int, left: float, slow: float
    ) -> int | None:
        """Return the place of a replica that it is time to try: an unknown one, else a slow one not heard of for longest."""
        found = unknown = None
        for place, seconds in times.items():
            each = candidates[place]
            if not each.is_known:
                if each.under_way or each.openings:
                    return None  # one look at a time
                unknown = place
            elif place == best or each.under_way or seconds * 2 > left or each.batch_seconds(self._full) < slow:
                continue
            elif found is None or each.heard < candidates[found].heard:
                found = place
        if unknown is not None:
            return unknown
        if found is None:
            return None
        cost = max(0.0, times[found] - times[best])
        if self._budget < cost * self._saved:
            return None
        # No more is kept: it would be spent on many probes of a replica that gets slow.
        self._budget = min(self._budget, 2 * cost) - cost
        self._saved = 0.5 + self._random()
        return found

    def _first_with_room(self, candidates: Sequence[Candidate], rows: int, slow: float) -> int | None:
        """Return the first replica whose open batch has room, leaving out slow ones; None if any last batch was full enough."""
        found = None
        for i, each in enumerate(candidates):
            if each.filled > self._full:
                return None
            is_fast = each.is_known and each.batch_seconds(self._full) <= slow
            if found is None and is_fast and each.waiting + each.sent + rows <= self.most:
                found = i
        return found
