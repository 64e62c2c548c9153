"""The rules of batching with `max_waste`, without threads and without a clock, and batchers that use them."""

from __future__ import annotations

from functools import partial
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.batched_calls import FULL, Model, held, waiting
from support.callers import start, start_on, together
from support.queue_contract import PAD_TO_MAX, Call

import weft
from weft.batching.queue import Limits, LowPriority
from weft.batching.waste import WasteScheduler, choose
from weft.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError


class Sized(Call):
    """A call with lengths; each row costs `cost`."""

    def __init__(self, name, rows, lengths, low=False, cost=1):
        super().__init__(name, rows * cost or 1, low)
        self.count, self.lengths, self.arrived = rows, lengths, 0.0


def waste_of(tasks):
    """The definition: 1 - sum of lengths / (rows x longest), the largest over the arguments."""
    rows = [task.owner.count if task is task.owner else task.rows for task in tasks]
    wastes = [0.0]
    for i in range(len(tasks[0].owner.lengths)):
        own = [task.owner.lengths[i] for task in tasks]
        area = sum(rows) * max(own)
        wastes.append(1 - sum(n * length for n, length in zip(rows, own, strict=True)) / area if area else 0.0)
    return max(wastes)


CALLS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12)


class TestChoice:
    @given(CALLS, st.integers(4, 16), st.floats(0, 1), st.booleans())
    def test_what_is_chosen(self, calls, target, max_waste, has_two):
        tasks = [Sized(i, rows, (a, b) if has_two else (a,)) for i, (rows, a, b) in enumerate(calls)]
        chosen = choose(tasks, target, max_waste)
        assert chosen[0] is tasks[0]
        assert [task.name for task in chosen] == sorted({task.name for task in chosen})
        assert sum(task.rows for task in chosen) <= target
        assert waste_of(chosen) <= max_waste + 1e-12
        alike = [t for t in tasks if t.lengths == tasks[0].lengths]
        assert sum(task.rows for task in chosen) >= min(sum(t.rows for t in alike), target - 4)

    def test_like_lengths_go_together(self):
        tasks = [Sized(i, 1, (length,)) for i, length in enumerate([16, 256, 16, 240, 32, 16])]
        assert [t.lengths[0] for t in choose(tasks, 4, 0.25)] == [16, 16, 16]
        assert [t.lengths[0] for t in choose(tasks[1:], 4, 0.25)] == [256, 240]
        assert [t.lengths[0] for t in choose(tasks, 6, 1)] == [16, 256, 16, 240, 32, 16]

    def test_a_short_call_may_ride_with_many_long_ones(self):
        """One row of 16 among many of 256 is little waste."""
        tasks = [Sized(i, 1, (length,)) for i, length in enumerate([16, *[256] * 20])]
        assert len(choose(tasks, 16, 0.1)) == 16

    def test_of_full_batches_the_one_with_the_least_waste(self):
        tasks = [Sized(i, 1, (length,)) for i, length in enumerate([16, 64, 48, 32, 16, 16, 16])]
        assert [t.lengths[0] for t in choose(tasks, 4, 0.9)] == [16, 16, 16, 16]

    def test_many_lengths(self):
        tasks = [Sized(i, 1, (length,)) for i, length in enumerate([100, *range(1, 500)])]
        chosen = choose(tasks, 64, 0.25)
        assert len(chosen) == 64
        assert waste_of(chosen) <= 0.25

    def test_no_lengths(self):
        tasks = [Sized(i, 2, ()) for i in range(4)]
        assert [t.name for t in choose(tasks, 6, 0.0)] == [0, 1, 2]


MAX_WASTE = 0.3


class Rules(RuleBasedStateMachine):
    """Any order of arrivals, departures, runs and changes of the limits, in simulated time."""

    @initialize(
        threads=st.integers(1, 2),
        size=st.integers(4, 8),
        timeout=st.sampled_from([inf, 2.0]),
        enough=st.sampled_from([0, 3]),
        split=st.booleans(),
        most=st.sampled_from([inf, 12]),
    )
    def begin(self, threads, size, timeout, enough, split, most):
        self.limits = self.make(threads, size, timeout, 0 if timeout == inf else enough, split, most)
        self.scheduler = WasteScheduler(MAX_WASTE, self.limits)
        self.now, self.count = 0.0, 0
        self.calls, self.taken, self.running = [], set(), []  # those that wait, tasks, batches

    @staticmethod
    def make(threads, target, timeout, enough, split, most):
        low = LowPriority(target, timeout, inf, (), PAD_TO_MAX, split)
        size = 1 << 60 if split else target
        return Limits(
            threads,
            size,
            timeout,
            allowed=(target,) if split else (),
            split=split,
            low=low,
            enough=enough,
            max_waiting=most,
        )

    @rule(
        key=st.sampled_from("ab"),
        rows=st.integers(0, 10),
        length=st.sampled_from([0, 4, 5, 8, 16, 64]),
        low=st.booleans(),
    )
    def put(self, key, rows, length, low):
        call = Sized(self.count, rows, (length,), low and length == 5)
        call.arrived = self.now
        self.count += 1
        before = self.scheduler.waiting_rows
        try:
            joined = self.scheduler.put(key, call, self.now)
        except InvalidArgumentError:
            assert not self.limits.split
            assert call.rows > self.limits.target
            return
        except UnavailableError:
            assert before + call.rows > self.limits.max_waiting
            return
        call.key = key
        if joined is not None and joined.is_taken:
            assert waste_of(joined.tasks) <= MAX_WASTE + 1e-12
            return
        self.calls.append(call)

    @property
    def waiting(self):
        """The tasks that wait, in order of arrival."""
        return [task for call in self.calls for task in call.tasks() if task not in self.taken]

    @rule()
    def take(self):
        batch = self.scheduler.take(self.now)
        if batch is None:
            return
        self.check_batch(batch)
        self.taken.update(batch.tasks)
        self.running.append(batch)
        self.scheduler.let_join(batch)

    def check_batch(self, batch):
        assert len(self.running) < self.limits.threads
        assert batch.tasks
        (key,) = {task.owner.key for task in batch.tasks}
        own = [task for task in self.waiting if task.owner.key == key]
        assert all(task in own for task in batch.tasks)
        assert len(batch.tasks) == len(set(batch.tasks))
        high = [task for task in own if not task.owner.low] or own
        assert high[0] in batch.tasks, "the oldest call of a key is in its next batch"
        rows = sum(task.rows for task in batch.tasks)
        assert batch.rows == rows
        assert rows <= self.limits.target or len(batch.tasks) == 1
        assert waste_of(batch.tasks) <= MAX_WASTE + 1e-12
        is_due = self.now >= high[0].owner.arrived + self.limits.timeout
        assert rows >= self.scheduler.enough or is_due

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1))
    def end(self, which):
        batch = self.running.pop(which % len(self.running))
        self.scheduler.end_joining(batch)
        self.scheduler.release(batch, self.now)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def pass_time(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 100))
    def leave(self, which):
        owner = self.waiting[which % len(self.waiting)].owner
        for task in [task for task in self.waiting if task.owner is owner]:
            assert self.scheduler.remove(task)
        self.calls.remove(owner)

    @rule(size=st.integers(4, 8), threads=st.integers(1, 2))
    def update(self, size, threads):
        old = self.limits
        self.limits = self.make(threads, size, old.timeout, old.enough, old.split, old.max_waiting)
        self.scheduler.set_limits(self.limits)

    @rule()
    def interrupt(self):
        """The queues are rebuilt after an exception in the middle of a change."""
        self.scheduler.rebuild([(t.owner.key, t, t.owner.arrived) for t in self.waiting], len(self.running))

    @invariant()
    def counts_are_right(self):
        if hasattr(self, "scheduler"):
            assert self.scheduler.waiting == len(self.waiting)
            assert self.scheduler.waiting_rows == sum(task.rows for task in self.waiting)
            assert self.scheduler.running == len(self.running)

    @invariant()
    def somebody_watches(self):
        """The oldest task of each queue knows when its batch is due, at the latest."""
        if hasattr(self, "scheduler"):
            for key in {task.owner.key for task in self.waiting}:
                own = [task for task in self.waiting if task.owner.key == key]
                oldest = next((task for task in own if not task.owner.low), own[0])
                due, is_watch = self.scheduler.due(oldest)
                assert is_watch
                assert due <= oldest.owner.arrived + self.limits.timeout

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.running:
            self.end(0)
        self.scheduler.flush()
        while self.waiting:
            batch = self.scheduler.take(self.now)
            assert batch is not None, "a call is left alone"
            assert batch.tasks
            assert self.taken.isdisjoint(batch.tasks)
            self.taken.update(batch.tasks)
            self.scheduler.release(batch, self.now)
        assert self.scheduler.take(inf) is None


TestRules = Rules.TestCase


@pytest.fixture
def scope():
    with weft.scope():
        yield


PAD = {"tokens": weft.Pad(multiple_of=4)}


class TestBatchers:
    def test_batches_have_like_lengths(self, scope):
        gated = Model(lambda tokens: tokens)
        policy = weft.batched(lambda tokens: gated(tokens), pad=PAD, cut=True, max_waste=0.25, max_batch_size=8)
        first = held(policy, gated, np.ones((1, 1)))
        lengths = [3, 64, 4, 60, 2, 61, 1]
        callers = []
        for i, length in enumerate(lengths):
            callers.append(start(policy, np.ones((1, length))))
            waiting(policy, i + 1)
        gated.gate.set()
        first.answer()
        assert [c.answer().shape for c in callers] == [(1, length) for length in lengths]
        assert [x.shape for x in gated.batches[1:]] == [(4, 4), (3, 64)]

    @pytest.mark.parametrize("cost", [None, lambda tokens: tokens.size + 1])
    def test_everybody_is_answered(self, scope, cost):
        policy = weft.batched(
            lambda tokens: tokens * 2, pad=PAD, cut=True, max_waste=0.2, max_batch_size=200, cost=cost, parallel=2
        )

        def play(seed):
            chance = np.random.default_rng(seed)
            for _ in range(40):
                x = np.full((chance.integers(0, 3), chance.integers(0, 60)), float(seed))
                y = policy.call(x, priority=chance.choice(["high", "low"]))
                assert y.tolist() == (2 * x).tolist()

        [caller.answer() for caller in together([partial(play, i) for i in range(8)])]
        assert policy.statistics().waiting == 0

    def test_split_calls(self, scope):
        policy = weft.batched(lambda tokens: tokens * 2, pad=PAD, cut=True, max_waste=0.2, max_batch_size=4, split=True)
        inputs = [np.full((rows, 10 * rows), float(rows)) for rows in (1, 3, 4, 5, 9)]
        answers = [caller.answer() for caller in together([lambda x=x: policy(x) for x in inputs])]
        assert [y.tolist() for y in answers] == [(2 * x).tolist() for x in inputs]

    def test_the_oldest_is_in_the_next_batch_whatever_comes(self, scope):
        gated = Model(lambda tokens: tokens)
        policy = weft.batched(lambda tokens: gated(tokens), pad=PAD, cut=True, max_waste=0.1, max_batch_size=4)
        first = held(policy, gated, np.ones((1, 1)))
        odd = start(policy, np.ones((1, 500)))
        waiting(policy, 1)
        many = [start(policy, np.ones((1, 8))) for _ in range(12)]
        waiting(policy, 13)
        gated.gate.set()
        [caller.answer() for caller in (first, odd, *many)]
        assert [x.shape for x in gated.batches] == [(1, 4), (1, 500), (4, 8), (4, 8), (4, 8)]

    def test_time(self):
        """`max_wait` counts from the oldest call; a batch of others does not end its wait."""
        clock = weft.SimulatedClock()
        with weft.scope(clock):
            sizes = []
            policy = weft.batched(
                lambda tokens: sizes.append((clock.now(), tokens.shape)) or tokens,
                pad=PAD, cut=True, max_waste=0.1, max_batch_size=4, min_batch_size=2, max_wait=3.0, deadline=10.0,
            )  # fmt: skip
            first = start_on(clock, policy, np.ones((1, 100)))
            clock.advance(1)
            others = [start_on(clock, policy, np.ones((1, 8))) for _ in range(2)]
            assert sizes == [], "the oldest call is in the next batch, and it has no company"
            clock.advance(2)
            assert sizes == [(3, (1, 100)), (3, (2, 8))]
            [caller.answer() for caller in (first, *others)]
            late = start_on(clock, lambda: policy.call(np.ones((1, 8)), deadline=0.5))
            clock.advance(0.6)
            with pytest.raises(DeadlineExceededError):
                late.answer()
            assert len(sizes) == 2

    def test_max_queue_counts_what_waits(self):
        clock = weft.SimulatedClock()
        with weft.scope(clock):
            policy = weft.batched(
                lambda tokens: tokens, pad=PAD, cut=True, max_waste=0.1, max_batch_size=8, min_batch_size=4,
                max_wait=9.0, max_queue=3,
            )  # fmt: skip
            callers = [start_on(clock, policy, np.ones((1, length))) for length in (8, 100, 8)]
            with pytest.raises(UnavailableError):
                start_on(clock, policy, np.ones((1, 100))).answer()
            clock.advance(10)
            assert [c.answer().shape[1] for c in callers] == [8, 100, 8]

    def test_close_runs_all_that_wait(self):
        clock = weft.SimulatedClock()
        with weft.scope(clock):
            policy = weft.batched(
                lambda tokens: tokens, pad=PAD, cut=True, max_waste=0.1, max_batch_size=8, max_wait=60.0
            )
            callers = [start_on(clock, policy, np.ones((1, length))) for length in (8, 100, 8, 200)]
            start_on(clock, policy.close).answer()
            assert [c.answer().shape[1] for c in callers] == [8, 100, 8, 200]

    def test_update_and_replay(self, scope, tmp_path):
        policy = weft.batched(lambda tokens: tokens, pad=PAD, cut=True, max_waste=0.1, max_batch_size=4, **FULL)
        policy.update(max_batch_size=2)

        def play():
            calls = [
                lambda n=n, i=i: policy.call(np.ones((1, n)), caller=str(i)) for i, n in enumerate((8, 100, 8, 100))
            ]
            return [caller.answer().shape for caller in together(calls)]

        with policy.record(tmp_path / "recording"):
            first = play()
        with policy.replay(tmp_path / "recording"):
            assert play() == first
        assert play() == [(1, 8), (1, 100), (1, 8), (1, 100)]
        assert set(policy.statistics().sizes) == {2}

    def test_gradients(self, scope):
        torch = pytest.importorskip("torch")
        policy = weft.batched(lambda tokens: tokens**2, pad=PAD, cut=True, max_waste=0.1, max_batch_size=4, parallel=2)

        def back(length):
            x = torch.full((1, length), float(length), requires_grad=True)
            policy(x).sum().backward()
            return x.grad.tolist()

        lengths = [3, 50, 4, 51, 2, 49]
        answers = [caller.answer() for caller in together([partial(back, n) for n in lengths])]
        assert answers == [[[2.0 * n] * n] for n in lengths]

    @pytest.mark.parametrize(
        "options", [{"max_waste": 0.5}, {"max_waste": -0.1, "pad": PAD}, {"max_waste": "a", "pad": PAD}]
    )
    def test_refused(self, options):
        with pytest.raises(InvalidArgumentError, match="max_waste"):
            weft.batched(lambda tokens: tokens, **options)
