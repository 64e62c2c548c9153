"""Real threads and tasks under load: none is lost, none gets another's rows, memory stays flat."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from support.callers import start, together

import weft
from weft.errors import DeadlineExceededError, UnavailableError


class Bad(ValueError):
    """A call that the function does not take."""


def model(x, scale):
    """`scale` times the rows, but no negative ones."""
    bad = x[x[:, 0] < 0]
    if len(bad):
        raise Bad(f"row {bad[0, 0]:g}")
    return x * scale


class Load:
    """Callers with mixed sizes, keys, priorities, deadlines and failures, each checking its own answers."""

    def __init__(self, policy, seed=0):
        self.policy, self.seed = policy, seed
        self.outcomes = Counter()
        self.mutex = threading.Lock()

    def draw(self, dice, number):
        bad = dice.random() < 0.03
        x = np.full((dice.randint(1, 4), 3), -number if bad else number, float)
        x[:, 1] = np.arange(len(x))
        options = {
            "priority": "low" if dice.random() < 0.2 else "high",
            "deadline": 0.0005 if dice.random() < 0.05 else 30.0,
        }
        return bad, x, dice.choice([2, 3]), options

    def check(self, bad, x, scale, y):
        assert not bad
        np.testing.assert_array_equal(y, x * scale)
        return "answered"

    def fail(self, bad, x, error):
        if isinstance(error, Bad) and not bad:
            # The search for the guilty is bounded: two of them in a batch may leave others in doubt.
            assert str(error).startswith("row -")
            return "in doubt"
        if isinstance(error, Bad):
            assert str(error) == f"row {x[0, 0]:g}" or str(error).startswith("row -")
            return "bad"
        assert isinstance(error, (DeadlineExceededError, UnavailableError)), repr(error)
        return type(error).__name__

    def thread(self, me, goes_on):
        dice, mine = random.Random(f"{self.seed}/{me}"), Counter()
        number = 0
        while goes_on(number):
            number += 1
            bad, x, scale, options = self.draw(dice, 1000 * number + me + 1)
            try:
                mine[self.check(bad, x, scale, self.policy.call(x, scale, **options))] += 1
            except (Bad, DeadlineExceededError, UnavailableError) as error:
                mine[self.fail(bad, x, error)] += 1
        with self.mutex:
            self.outcomes += mine

    async def task(self, me, goes_on):
        dice = random.Random(f"{self.seed}/{me}")
        number = 0
        while goes_on(number):
            number += 1
            bad, x, scale, options = self.draw(dice, 1000 * number + me + 1)
            call = asyncio.create_task(self.policy.aio.call(x, scale, **options))
            if dice.random() < 0.05:
                await asyncio.sleep(0)
                call.cancel()
            try:
                self.outcomes[self.check(bad, x, scale, await call)] += 1
            except asyncio.CancelledError:
                self.outcomes["cancelled"] += 1
            except (Bad, DeadlineExceededError, UnavailableError) as error:
                self.outcomes[self.fail(bad, x, error)] += 1


@pytest.mark.parametrize("options", [{}, {"parallel": 3, "max_queue": 40}, {"max_batch_size": 3, "split": True}])
def test_threads_and_tasks(options):
    with weft.scope():
        policy = weft.batched(model, **{"max_batch_size": 16, **options})
        threads, loops, calls = Load(policy), Load(policy), 60

        async def many():
            await asyncio.gather(*(loops.task(100 + i, lambda n: n < calls) for i in range(8)))

        callers = [start(threads.thread, i, lambda n: n < calls) for i in range(12)]
        callers.append(start(asyncio.run, many()))
        for caller in callers:
            caller.answer(60)
        assert sum(threads.outcomes.values()) == 12 * calls
        assert sum(loops.outcomes.values()) == 8 * calls
        both = threads.outcomes + loops.outcomes
        assert both["answered"] > 10 * calls
        assert both["in doubt"] < 3 * both["bad"]
        seen = policy.statistics()
        assert (seen.waiting, seen.running) == (0, 0)
        assert max(seen.sizes) <= policy._dispatcher.limits.target


def test_gradients_under_load():
    torch = pytest.importorskip("torch")
    with weft.scope():
        w = torch.zeros(3, dtype=torch.double, requires_grad=True)
        policy = weft.batched(lambda x: x + w, max_batch_size=8)

        def work(i):
            for turn in range(20):
                x = torch.full((i % 3 + 1, 3), float(turn), dtype=torch.double)
                (policy(x) * (i + 1)).sum().backward()

        for caller in together([lambda i=i: work(i) for i in range(12)]):
            caller.answer()
        assert w.grad.tolist() == [20 * sum((i % 3 + 1) * (i + 1) for i in range(12))] * 3
        assert not policy._outstanding.backwards


@pytest.mark.slow
def test_a_minute_of_open_load():
    """Calls come by the clock, whether the last ones are answered or not; no call is lost, and memory stays flat."""
    seconds, senders = 60.0, 8

    def slow(x, scale):
        time.sleep(0.002)
        return model(x, scale)

    with weft.scope():
        policy = weft.batched(slow, max_batch_size=32, max_queue=400)
        load, end = Load(policy), time.monotonic() + seconds
        callers = [start(load.thread, i, lambda _: time.monotonic() < end) for i in range(senders)]
        sizes = []
        tracemalloc.start()
        for _ in range(4):
            time.sleep(seconds / 4 - 1)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        for caller in callers:
            caller.answer(60)
        seen = policy.statistics()
        assert seen.late == load.outcomes["DeadlineExceededError"]
        assert seen.failed == load.outcomes["bad"] + load.outcomes["in doubt"]
        assert load.outcomes["answered"] + seen.failed <= seen.calls <= sum(load.outcomes.values())
        assert load.outcomes["answered"] > 1000
        assert max(sizes[1:]) < sizes[0] + 2_000_000
