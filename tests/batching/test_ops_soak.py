"""All ops of the batching family at once, for a while: everyone gets its own, and nothing is left."""

from __future__ import annotations

import os
import threading
import time
import warnings

import numpy as np
import pytest
from support.callers import Caller, until
from support.raw_calls import batch, function, unbatch

import weft
from weft import raw_ops
from weft.errors import DeadlineExceededError, UnavailableError


class Soak:
    """Threads and event loops that do everything at once, and keep count."""

    def __init__(self, seconds, threads, least=0):
        self.end = time.monotonic() + seconds
        self.threads, self.least = threads, least
        self.served = self.failed = 0
        self.mutex = threading.Lock()

    def goes_on(self):
        """Whether the time is not over; on a busy machine it goes on until enough was served."""
        late = time.monotonic() - self.end
        return late < 0 or (self.served <= self.least and late < 30)

    def count(self, served):
        with self.mutex:
            self.served += served
            self.failed += not served

    @staticmethod
    def f(x):
        if (x < 0).any():
            raise ZeroDivisionError("a poisoned row")
        return x * 2 + 1

    def rows(self, rng):
        x = rng.random((int(rng.integers(1, 7)), 3))
        return -x if rng.random() < 0.01 else x

    def split(self, rng):
        return bool(rng.random() < 0.5)

    def function(self, rng):
        x, split = self.rows(rng), self.split(rng)
        with weft.priority("low" if rng.random() < 0.3 else "high"):
            y = function(
                self.f, x, 32, num_batch_threads=3, batch_timeout_micros=500, max_enqueued_batches=20,
                allowed_batch_sizes=[4, 8, 32], enable_large_batch_splitting=split, shared_name=f"split {split}",
                low_priority_max_batch_size=16, low_priority_batch_timeout_micros=900,
                low_priority_max_enqueued_batches=9, mixed_priority_policy="priority_merge",
            )  # fmt: skip
        np.testing.assert_array_equal(y, x * 2 + 1)

    def chain(self, rng):
        """Batch, Unbatch, UnbatchGrad, Unbatch; now and then a caller that goes no further."""
        x = self.rows(rng)
        b = batch(x, 24, batch_timeout_micros=500, allowed_batch_sizes=[4, 24], num_batch_threads=2)
        if rng.random() < 0.02:
            return
        y = unbatch(b.batched_tensors[0] * 3, b, timeout_micros=300_000, shared_name="y")
        np.testing.assert_array_equal(y, x * 3)
        if rng.random() < 0.02:
            return
        joined = raw_ops.UnbatchGrad(b.batched_tensors[0], b.batch_index, y + 1, b.id)
        dx = unbatch(joined, b, timeout_micros=600_000, shared_name="dx")
        np.testing.assert_array_equal(dx, x * 3 + 1)

    def work(self, seed):
        rng = np.random.default_rng(seed)
        while self.goes_on():
            try:
                (self.function if rng.random() < 0.6 else self.chain)(rng)
                self.count(True)
            except (ZeroDivisionError, UnavailableError, DeadlineExceededError):
                self.count(False)

    async def task(self, rng):
        import asyncio

        x = self.rows(rng)
        call = weft.aio.BatchFunction(
            [x], [], self.f, num_batch_threads=3, max_batch_size=32, batch_timeout_micros=500, Tout=["float64"],
            max_enqueued_batches=20, allowed_batch_sizes=[4, 8, 32], shared_name="split False",
            low_priority_max_batch_size=16, low_priority_batch_timeout_micros=900,
            low_priority_max_enqueued_batches=9, mixed_priority_policy="priority_merge",
        )  # fmt: skip
        try:
            (y,) = await asyncio.wait_for(call, rng.random() * 0.02)
            np.testing.assert_array_equal(y, x * 2 + 1)
            self.count(True)
        except (ZeroDivisionError, UnavailableError, TimeoutError):
            self.count(False)

    def loop(self, seed):
        import asyncio

        async def main():
            rng = np.random.default_rng(seed)
            while self.goes_on():
                await asyncio.gather(*(self.task(rng) for _ in range(10)))

        asyncio.run(main())

    def run(self):
        with warnings.catch_warnings(), weft.gradient_deadline(0.5), weft.scope() as scope:
            workers = [Caller(self.work, i) for i in range(self.threads)]
            workers += [Caller(self.loop, 10_000 + i) for i in range(max(1, self.threads // 50))]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.answer(self.end - time.monotonic() + 60)
            until(lambda: scope.sweep() == 0)
            for resource in scope.resources.values():
                if hasattr(resource, "scheduler"):
                    until(lambda resource=resource: resource.scheduler.running == 0)
                    assert resource.scheduler.waiting == 0


def memory():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_all_at_once():
    soak = Soak(seconds=1, threads=24, least=50)
    soak.run()
    assert soak.served > 50


@pytest.mark.slow
def test_soak():
    """200 threads for a minute: every survivor its own rows, nothing stored, no memory kept."""
    Soak(seconds=5, threads=200).run()
    before = memory()
    soak = Soak(seconds=55, threads=200)
    soak.run()
    assert soak.served > 5000
    assert soak.served > soak.failed
    assert memory() - before < 64 << 20
