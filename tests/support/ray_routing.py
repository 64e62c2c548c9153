"""Callers, clients and replicas in simulated time: each caller sends its next call when it has its answer.

The replicas are the batcher's own state machine, with the time that a batch takes; the clients route with `weft.ray.routing`.
"""

from __future__ import annotations

import heapq
import random
from itertools import count

from weft.batching.queue import Limits, Task
from weft.batching.scheduler import Scheduler
from weft.ray.batch_time import BatchTime
from weft.ray.frames import Load
from weft.ray.routing import Candidate, Router

CONNECT_SECONDS = 0.001


class Replica:
    """A queue whose batches take `seconds(rows, now)`, a network away."""

    def __init__(self, seconds, limits, trip):
        self.seconds, self.trip, self.limits = seconds, trip, limits
        self.scheduler = Scheduler(limits)
        self.times = BatchTime()
        self.filled = self.batches = 0

    def load(self):
        scheduler = self.scheduler
        return Load(0, int(scheduler.waiting_rows), scheduler.running, self.filled, self.times.base, self.times.per_row)


class Client:
    """A process: its router, and what it knows of the replicas."""

    def __init__(self, replicas, options, fills, seed):
        self.router = Router(**options, fills=fills, seed=seed)
        self.candidates = [Candidate(self.router) for _ in replicas]


class World:
    """Runs callers against replicas. `replicas` are functions of rows and time that return the seconds of a batch."""

    def __init__(
        self, replicas, *, callers=16, clients=1, trip=0.0001, rows=1, most=64, parallel=1, max_wait=0.0, seed=0,
        overhead=0.0,
    ):  # fmt: skip
        self.random = random.Random(seed)
        enough = most if max_wait else 1
        limits = Limits(parallel, most, max_wait, enough=enough)
        trips = trip if isinstance(trip, list) else [trip] * len(replicas)
        self.replicas = [Replica(each, limits, trips[i]) for i, each in enumerate(replicas)]
        options = {"max_batch_size": most, "parallel": parallel}
        self.clients = [Client(self.replicas, options, max_wait > 0, seed + i) for i in range(clients)]
        self.rows, self.callers, self.overhead, self.max_wait = rows, callers, overhead, max_wait
        self.answered = []  # when, after how long, by which replica
        self._heap, self._numbers = [], count()

    def run(self, seconds):
        """Run for so long; return the world."""
        for caller in range(self.callers):
            self._at(self.random.random() * 1e-3, self._call, self.clients[caller % len(self.clients)])
        while self._heap and self._heap[0][0] < seconds:
            now, _, what, given = heapq.heappop(self._heap)
            what(now, *given)
        return self

    def rate(self, begin=0.0, end=float("inf")):
        """Calls per second that were answered between two times."""
        end = min(end, self.answered[-1][0])
        return sum(begin <= when < end for when, _, _ in self.answered) / (end - begin)

    def share(self, replica):
        """The share of the calls that a replica has answered."""
        return sum(where == replica for _, _, where in self.answered) / len(self.answered)

    def _at(self, when, what, *given):
        heapq.heappush(self._heap, (when, next(self._numbers), what, given))

    def _call(self, now, client, may_connect=True):
        rows = self.rows(self.random) if callable(self.rows) else self.rows
        place = client.router.choose(client.candidates, rows, now, float("inf"), may_connect)
        candidate = client.candidates[place]
        if not candidate.heard:
            if not candidate.openings:
                candidate.openings[self] = None
                self._at(now + CONNECT_SECONDS, self._connect, client, place)
            self._at(now + CONNECT_SECONDS + 1e-9, self._call, client, False)
            return
        call = object()
        candidate.begin(call, rows, now)
        self._at(now + self.replicas[place].trip + self.overhead, self._arrive, place, (client, call, now), rows)

    def _connect(self, now, client, place):
        candidate = client.candidates[place]
        candidate.openings.clear()
        candidate.report(self.replicas[place].load(), now)

    def _arrive(self, now, place, owner, rows):
        replica = self.replicas[place]
        replica.scheduler.put("rows", Task(owner, 0, rows), now)
        self._start(now, place)
        if self.max_wait:
            self._at(now + self.max_wait, self._start, place)

    def _start(self, now, place):
        replica = self.replicas[place]
        batch = replica.scheduler.take(now)
        if batch is not None:
            seconds = replica.seconds(batch.rows, now)
            replica.filled = batch.rows
            replica.batches += 1
            self._at(now + seconds, self._end, place, batch, seconds)

    def _end(self, now, place, batch, seconds):
        replica = self.replicas[place]
        replica.scheduler.release(batch, now)
        replica.times.add(batch.rows, seconds, now)
        self._start(now, place)
        load = replica.load()
        for task in batch.tasks:
            self._at(now + replica.trip, self._answer, place, task.owner, load)

    def _answer(self, now, place, owner, load):
        client, call, sent = owner
        candidate = client.candidates[place]
        candidate.end(call, now)
        candidate.report(load, now)
        self.answered.append((now, now - sent, place))
        self._call(now, client)
