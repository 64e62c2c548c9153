"""A simulation of many replicas on the batcher's own state machine: where does the design break first?

Calls arrive at random at clients, which choose replicas by `weft.ray.routing`; each replica is a `Scheduler` with the time that a
batch takes, `base + per_row * rows`. Reports reach a client when an answer does, one network trip after the batch has ended. Only
time is simulated. `python -m benchmarks.scale_out_simulation`
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass, field
from itertools import count

from weft.batching.queue import Limits, Task
from weft.batching.scheduler import Scheduler
from weft.ray.frames import Load
from weft.ray.routing import Candidate, Router


@dataclass
class Setting:
    """What is simulated. Times are in seconds."""

    replicas: int = 1000
    rate: float = 1_000_000.0  # calls per second
    clients: int = 500  # processes, each with its own view of the queues
    base: float = 0.0005  # of a batch
    per_row: float = 0.0005 / 64
    trip: float = 0.00002  # of a frame, one way
    max_batch_size: int = 64
    seconds: float = 0.2
    policy: str = "weft"
    max_wait: float = 0.0
    seed: int = 0


@dataclass
class Outcome:
    """What came out."""

    waits: list[float] = field(default_factory=list)  # from sending a call to its answer
    sizes: list[int] = field(default_factory=list)
    busy: float = 0.0  # of the replicas' time, in all
    most_waiting: int = 0

    def quantile(self, q: float) -> float:
        """Return a quantile of the waits."""
        ordered = sorted(self.waits)
        return ordered[int(q * (len(ordered) - 1))]


class Simulation:
    """Runs a setting: a heap of events in order of time."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.outcome = setting, Outcome()
        self._random = random.Random(setting.seed)
        fills = setting.max_wait > 0
        enough = setting.max_batch_size if fills else 1
        limits = Limits(1, setting.max_batch_size, setting.max_wait if fills else 0.0, enough=enough)
        self._schedulers = [Scheduler(limits) for _ in range(setting.replicas)]
        routers = range(setting.clients)
        self._routers = [Router(setting.max_batch_size, 1, fills, setting.seed + i) for i in routers]
        self._views: list[list[Candidate]] = [[] for _ in range(setting.clients)]
        self._heap: list[tuple[float, int, str, object]] = []
        self._numbers = count()
        self._turn = count()

    def run(self) -> Outcome:
        """Return the outcome."""
        now = 0.0
        self._at(self._random.expovariate(self.setting.rate), "call", None)
        while self._heap:
            now, _, kind, what = heapq.heappop(self._heap)
            getattr(self, f"_{kind}")(now, what)
        return self.outcome

    def _at(self, when: float, kind: str, what: object) -> None:
        heapq.heappush(self._heap, (when, next(self._numbers), kind, what))

    def _call(self, now: float, _: object) -> None:
        """A client sends a call; the next one comes soon."""
        setting = self.setting
        client = int(self._random.random() * setting.clients)
        replica = self._choose(client, now)
        owner = client, now
        if setting.policy == "weft":
            self._view(client)[replica].begin(owner, 1, now)
        self._at(now + setting.trip, "arrive", (replica, owner))
        following = now + self._random.expovariate(setting.rate)
        if following < setting.seconds:
            self._at(following, "call", None)

    def _choose(self, client: int, now: float) -> int:
        setting, draw = self.setting, self._random.random
        if setting.policy == "round robin":
            return next(self._turn) % setting.replicas
        if setting.policy == "random":
            return int(draw() * setting.replicas)
        view = self._view(client)
        if setting.policy == "shorter of two":
            a, b = view[int(draw() * len(view))], view[int(draw() * len(view))]
            chosen = min((a, b), key=lambda each: each.waiting + each.sent)
            chosen.sent += 1
            return view.index(chosen)
        return self._routers[client].choose(view, 1, now)

    def _view(self, client: int) -> list[Candidate]:
        """Return what a client knows of the replicas."""
        if not self._views[client]:
            self._views[client] = [Candidate(self._routers[client]) for _ in self._schedulers]
            for candidate in self._views[client]:
                candidate.report(Load(base=self.setting.base, per_row=self.setting.per_row), 0.0)
        return self._views[client]

    def _arrive(self, now: float, what: tuple[int, tuple[int, float]]) -> None:
        replica, owner = what
        self._schedulers[replica].put("rows", Task(owner, 0, 1), now)
        self._start(replica, now)
        if self.setting.max_wait:
            self._at(now + self.setting.max_wait, "start_late", replica)

    def _start_late(self, now: float, replica: int) -> None:
        self._start(replica, now)

    def _start(self, replica: int, now: float) -> None:
        scheduler = self._schedulers[replica]
        batch = scheduler.take(now)
        if batch is not None:
            time = self.setting.base + self.setting.per_row * batch.rows
            self.outcome.busy += time
            self.outcome.sizes.append(batch.rows)
            self._at(now + time, "end", (replica, batch))

    def _end(self, now: float, what: tuple[int, object]) -> None:
        replica, batch = what
        scheduler = self._schedulers[replica]
        scheduler.release(batch, now)
        self._start(replica, now)
        self.outcome.most_waiting = max(self.outcome.most_waiting, scheduler.waiting_rows)
        filled, setting = batch.rows, self.setting
        load = Load(0, scheduler.waiting_rows, scheduler.running, filled, setting.base, setting.per_row)
        for task in batch.tasks:
            client, sent = task.owner
            answered = now + self.setting.trip
            self.outcome.waits.append(answered - sent)
            candidate = self._view(client)[replica]
            candidate.end(task.owner, answered)
            candidate.report(load, answered)


def report(setting: Setting) -> None:
    """Run a setting and print a line."""
    outcome = Simulation(setting).run()
    calls = len(outcome.waits)
    print(
        f"{setting.policy:<15} {setting.replicas:>5} replicas {setting.rate:>10.0f} calls/s  wait {setting.max_wait * 1e3:g} ms"
        f"   p50 {outcome.quantile(0.5) * 1e3:7.2f} ms  p99 {outcome.quantile(0.99) * 1e3:7.2f} ms"
        f"   mean batch {sum(outcome.sizes) / len(outcome.sizes):5.1f}"
        f"   busy {outcome.busy / setting.replicas / setting.seconds * 100:4.0f} %   longest queue {outcome.most_waiting}"
        f"   ({calls} calls)"
    )


def main() -> None:
    """Print the comparison of policies, and the load at which the replicas are full."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=1_000_000.0)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--base", type=float, default=0.0003, help="seconds of a batch without rows")
    parser.add_argument("--per-row", type=float, default=0.0001, help="seconds of a row")
    options = parser.parse_args()
    common = {
        "replicas": options.replicas, "seconds": options.seconds, "clients": options.clients, "base": options.base,
        "per_row": options.per_row,
    }  # fmt: skip
    for wait in (0.0, 0.01):
        for policy in ("round robin", "random", "shorter of two", "weft"):
            report(Setting(rate=options.rate, policy=policy, max_wait=wait, **common))
    most = options.replicas * 64 / (options.base + 64 * options.per_row)
    print(f"the replicas can answer {most:.0f} calls/s with full batches")
    for share in (0.25, 0.5, 0.8, 0.95, 1.05):
        few = common | {"replicas": 50, "clients": 100}
        report(Setting(rate=share * most * 50 / options.replicas, **few))
    for clients in (50, 500, 5000):
        few = common | {"replicas": 50, "clients": clients}
        report(Setting(rate=0.8 * most * 50 / options.replicas, **few))


if __name__ == "__main__":
    main()
