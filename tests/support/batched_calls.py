"""A function on batches that tests can watch and hold, and callers that share a batch of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import weft
from support.callers import PATIENCE, Caller, start, together, until

FULL = {"max_wait": PATIENCE}  # batches that are closed by their size


class Model:
    """Twice its input. It keeps what it was given, and while `gate` is shut whoever runs it waits inside."""

    def __init__(self, f: Callable[[Any], Any] = lambda x: x * 2) -> None:
        self.f = f
        self.batches: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.inside = 0
        self.most = 0  # that were inside at once
        self._mutex = threading.Lock()

    def __call__(self, x: Any) -> Any:
        with self._mutex:
            self.batches.append(np.array(x) if isinstance(x, np.ndarray) else x)
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            assert self.gate.wait(PATIENCE)
            return self.f(x)
        finally:
            with self._mutex:
                self.inside -= 1

    @property
    def sizes(self) -> list[int]:
        """The rows of each batch it was given."""
        return [len(x) for x in self.batches]


def rows(*values: float) -> np.ndarray:
    """One column."""
    return np.array(values, float).reshape(-1, 1)


def held(policy: weft.Batcher, model: Model, x: Any = None) -> Caller:
    """A caller that runs a batch of its own and is kept inside the model."""
    model.gate.clear()
    caller = start(policy, rows(-1) if x is None else x)
    until(lambda: model.inside)
    return caller


def waiting(policy: weft.Batcher, count: int) -> None:
    """Wait until so many calls wait in the queue."""
    until(lambda: policy.statistics().waiting == count)


def share_batch(policy: weft.Batcher, inputs: list[Any], work: Callable[[Any, int], Any]) -> list[Any]:
    """What `work(result, i)` gives in each caller's thread; they share one batch, in no order."""
    callers = together([lambda x=x, i=i: work(policy(x), i) for i, x in enumerate(inputs)])
    return [caller.answer() for caller in callers]


def call_all(policy, calls):
    """The results of calls that share a batch: each a tuple of arguments and a dict of named ones."""
    callers = together([lambda a=a, k=k: policy(*a, **k) for a, k in calls])
    return [caller.answer() for caller in callers]


class Slow(Model):
    """A model that takes its time on a simulated clock, and keeps when it was called."""

    def __init__(self, clock, seconds=1.0, f=lambda x: x * 2):
        super().__init__(f)
        self.clock, self.seconds = clock, seconds
        self.times = []

    def __call__(self, x):
        self.times.append(self.clock.now())
        self.clock.sleep(self.seconds)
        return super().__call__(x)


def waiting_together(policy: weft.Batcher, model: Model, *calls: Callable[[], Any], first: Any = None) -> list[Caller]:
    """The callers of calls that all wait while the batch of another call runs, in this order, once they have their answers."""
    lone = held(policy, model, first)
    callers = []
    for call in calls:
        callers.append(start(call))
        waiting(policy, len(callers))
    model.gate.set()
    lone.answer()
    return [caller.end() for caller in callers]
