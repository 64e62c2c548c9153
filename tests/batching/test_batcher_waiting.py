"""How long a batched call waits, and for what: the bounds are exact, on a clock that the test moves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.batched_calls import Model, Slow, rows
from support.callers import start_on

import weft
from weft.batching.processing import SECONDS_PER_ANSWERED_CALLER
from weft.core.wakeup import Wakeup
from weft.errors import CancelledError, DeadlineExceededError, InvalidArgumentError, UnavailableError


def asleep(policy, x):
    """A call whose thread sleeps, and does not wake up before the test has it `wait`."""
    call = policy._submit(policy._request((x,), {}, policy._plain))
    call.end_inside()  # as if another thread held it
    call.waiter = Wakeup()
    return call


class TestFilling:
    @pytest.mark.parametrize("options", [{}, {"min_batch_size": 1}, {"max_wait": 10.0, "min_batch_size": 1}])
    def test_an_idle_batcher_runs_a_lone_call_at_once(self, clock, options):
        model = Slow(clock)
        caller = start_on(clock, weft.batched(model, **options), rows(1))
        assert model.times == [0]
        clock.advance(1)
        assert caller.answer().item() == 2

    def test_calls_that_come_while_it_is_busy_share_the_next_batch(self, clock):
        model = Slow(clock)
        policy = weft.batched(model, max_batch_size=3)
        callers = [start_on(clock, policy, rows(i)) for i in range(6)]
        clock.run_out()
        assert [c.answer().item() for c in callers] == [0, 2, 4, 6, 8, 10]
        assert (model.sizes, model.times) == ([1, 3, 2], [0, 1, 2])

    @pytest.mark.parametrize("go", [True, False])
    def test_those_who_were_answered_go_first(self, clock, go):
        """Until their threads have left, the next batch goes on filling: but not for long."""
        model = Slow(clock)
        policy = weft.batched(model, max_batch_size=2)
        start_on(clock, policy, rows(0))
        slow = [asleep(policy, rows(i)) for i in (1, 2)]
        clock.advance(1)
        waiting = start_on(clock, policy, rows(3))
        clock.advance(1)
        assert (slow[0].done, slow[1].done, model.times) == (True, True, [0, 1])
        if go:
            assert [call.wait().item() for call in slow] == [2, 4]
            clock.settle()
        late = start_on(clock, policy, rows(4))
        clock.run_out()
        assert (waiting.answer().item(), late.answer().item()) == (6, 8)
        assert model.times == ([0, 1, 2, 3] if go else [0, 1, 2 + 2 * SECONDS_PER_ANSWERED_CALLER])

    def test_it_keeps_filling_until_the_run_starts(self, clock):
        model = Slow(clock)
        policy = weft.batched(model)
        callers = [start_on(clock, policy, rows(0))]
        for i in range(1, 5):
            clock.advance(0.2)
            callers.append(start_on(clock, policy, rows(i)))
        clock.run_out()
        assert [c.answer().item() for c in callers] == [0, 2, 4, 6, 8]
        assert (model.sizes, model.times) == ([1, 4], [0, 1])

    @pytest.mark.parametrize("options", [{"min_batch_size": 3}, {"max_batch_size": 3}])
    def test_fuller_batches(self, clock, options):
        model = Slow(clock)
        policy = weft.batched(model, max_wait=5.0, **options)
        callers = [start_on(clock, policy, rows(0))]
        clock.advance(2)
        callers += [start_on(clock, policy, rows(i)) for i in (1, 2)]
        assert model.times == [2]
        late = start_on(clock, policy, rows(3))
        clock.run_out()
        assert [c.answer().item() for c in (*callers, late)] == [0, 2, 4, 6]
        assert (model.sizes, model.times) == ([3, 1], [2, 7])  # the last was alone for max_wait, from its arrival

    def test_max_wait_is_exact(self, clock):
        model = Slow(clock, 0)
        policy = weft.batched(model, max_wait=0.25)
        first = start_on(clock, policy, rows(1))
        clock.advance(0.1)
        second = start_on(clock, policy, rows(2))
        clock.advance(0.1499999)
        assert model.times == []
        clock.advance(0.0000002)
        assert model.times == [0.25]
        assert [first.answer().item(), second.answer().item()] == [2, 4]

    def test_max_wait_counts_from_the_first_that_is_still_there(self, clock):
        model = Slow(clock, 0)
        policy = weft.batched(model, max_wait=1.0)
        first = start_on(clock, lambda: policy.call(rows(1), deadline=0.5))
        clock.advance(0.4)
        second = start_on(clock, policy, rows(2))
        clock.run_out()
        assert isinstance(first.error, DeadlineExceededError)
        assert second.answer().item() == 4
        assert model.times[0] <= 1.4
        assert model.sizes == [1]

    def test_several_at_once(self, clock):
        model = Slow(clock)
        policy = weft.batched(model, parallel=3, max_batch_size=1)
        callers = [start_on(clock, policy, rows(i)) for i in range(7)]
        clock.run_out()
        assert [c.answer().item() for c in callers] == [0, 2, 4, 6, 8, 10, 12]
        assert model.times == [0, 0, 0, 1, 1, 1, 2]
        assert policy.statistics().running == 0


class TestCost:
    def test_batches_are_bounded_by_it(self, clock):
        model = Slow(clock)
        policy = weft.batched(model, max_batch_size=10, cost=lambda x: int(x.sum()))
        callers = [start_on(clock, policy, rows(cost)) for cost in (1, 4, 4, 4, 6, 10)]
        clock.run_out()
        assert [c.answer().item() for c in callers] == [2, 8, 8, 8, 12, 20]
        assert [b.sum() for b in model.batches] == [1, 8, 10, 10]

    def test_a_call_over_the_budget_is_refused(self, clock):
        policy = weft.batched(lambda x: x, max_batch_size=10, cost=lambda x: 11)
        with pytest.raises(InvalidArgumentError, match="at most max_batch_size = 10 rows, got 11"):
            policy(rows(1))

    @pytest.mark.parametrize("cost", [0.25, 1e-9])
    def test_a_call_that_costs_less_than_one_runs_too(self, clock, cost):
        assert weft.batched(lambda x: x * 2, cost=lambda x: cost)(rows(1)).item() == 2

    def test_max_queue_counts_in_it(self, clock):
        policy = weft.batched(Slow(clock), max_queue=5, max_batch_size=10, cost=lambda x: int(x.sum()))
        callers = [start_on(clock, policy, rows(x)) for x in (1, 3, 2)]
        refused = start_on(clock, policy, rows(1))
        assert isinstance(refused.error, UnavailableError)
        clock.run_out()
        assert [c.answer().item() for c in callers] == [2, 6, 4]


class TestDeadlines:
    def test_a_result_that_comes_as_the_deadline_passes(self, clock):
        policy = weft.batched(lambda x: x * 2)
        request = policy._request((rows(1),), {}, policy._context(deadline=0.5))
        policy._answer(request)
        clock.advance(1.0)
        request.on_alarm()  # of a caller that has not seen yet that it is answered
        assert request.outcome().item() == 2

    def test_queue_time_counts(self, clock):
        model = Slow(clock, 2.0)
        policy = weft.batched(model)
        running = start_on(clock, lambda: policy.call(rows(1), deadline=0.5))
        late = start_on(clock, lambda: policy.call(rows(2), deadline=0.5))
        patient = start_on(clock, lambda: policy.call(rows(3), deadline=10))
        clock.advance(0.4999)
        assert late.is_alive()
        clock.advance(0.0002)
        with pytest.raises(DeadlineExceededError, match=r"within its deadline of 0.5 s"):
            late.answer()
        assert running.is_alive()  # it runs the batch: it returns when that ends
        clock.run_out()
        assert running.answer().item() == 2
        assert patient.answer().item() == 6
        assert model.sizes == [1, 1]
        assert policy.statistics().late == 1

    def test_of_the_batcher(self, clock):
        policy = weft.batched(Slow(clock, 2.0), deadline=1.0)
        start_on(clock, policy, rows(1))
        late = start_on(clock, policy, rows(2))
        clock.advance(1)
        with pytest.raises(DeadlineExceededError):
            late.answer()
        clock.run_out()

    def test_one_that_passes_while_its_batch_runs_costs_nobody_anything(self, clock):
        policy = weft.batched(Slow(clock, 2.0))
        first = start_on(clock, policy, rows(0))
        late = start_on(clock, lambda: policy.call(rows(1), deadline=3.0))
        other = start_on(clock, policy, rows(2))
        clock.advance(3.0)  # their batch began at 2, and ends at 4
        assert isinstance(late.end().error, DeadlineExceededError)
        clock.run_out()
        assert (first.answer().item(), other.answer().item()) == (0, 4)
        assert policy.statistics().late == 1

    def test_in_the_queue_of_another_key(self, clock):
        policy = weft.batched(Slow(clock, 2.0))
        start_on(clock, policy, rows(0))
        late = start_on(clock, lambda: policy.call(np.ones((1, 2)), deadline=1.0))
        clock.advance(1.0)
        assert isinstance(late.end().error, DeadlineExceededError)
        clock.run_out()

    def test_in_a_task(self):
        async def main():
            slow = asyncio.create_task(asyncio.to_thread(policy, rows(0)))
            while not model.inside:
                await asyncio.sleep(0)
            with pytest.raises(DeadlineExceededError):
                await policy.aio.call(rows(1), deadline=0.01)
            model.gate.set()
            await slow

        with weft.scope():
            model = Model()
            model.gate.clear()
            policy = weft.batched(model)
            asyncio.run(main())
        assert model.sizes == [1]


class TestMaxQueue:
    def test_over_all_keys(self, clock):
        policy = weft.batched(Slow(clock), max_queue=3, max_batch_size=8)
        callers = [start_on(clock, policy, rows(0))]
        callers += [start_on(clock, policy, rows(1)), start_on(clock, policy, np.ones((2, 5)))]
        before = policy.statistics()
        refused = start_on(clock, policy, rows(2))
        with pytest.raises(UnavailableError, match="3 wait, 1 came, and at most 3 may wait"):
            refused.answer()
        after = policy.statistics()
        assert (after.waiting, after.running) == (before.waiting, before.running)
        assert after.rejected == 1
        clock.run_out()
        assert [c.answer().shape for c in callers] == [(1, 1), (1, 1), (2, 5)]

    def test_none_may_wait(self, clock):
        policy = weft.batched(Slow(clock), max_queue=0)
        first = start_on(clock, policy, rows(1))
        assert isinstance(start_on(clock, policy, rows(2)).error, UnavailableError)
        clock.run_out()
        assert first.answer().item() == 2
        again = start_on(clock, policy, rows(3))
        clock.run_out()
        assert again.answer().item() == 6

    def test_the_rest_of_a_split_call_counts(self, clock):
        policy = weft.batched(Slow(clock), max_queue=4, max_batch_size=2, split=True)
        caller = start_on(clock, policy, np.ones((7, 1)))  # more than may wait, and nobody else does
        assert policy._dispatcher.scheduler.waiting_rows == 5
        assert isinstance(start_on(clock, policy, rows(1)).error, UnavailableError)
        clock.run_out()
        assert caller.answer().sum() == 14

    def test_room_is_made_by_those_who_leave(self, clock):
        policy = weft.batched(Slow(clock, 5.0), max_queue=1)
        start_on(clock, policy, rows(0))
        start_on(clock, lambda: policy.call(rows(1), deadline=1.0))
        assert isinstance(start_on(clock, policy, rows(2)).error, UnavailableError)
        clock.advance(1)
        kept = start_on(clock, policy, rows(3))
        clock.run_out()
        assert kept.answer().item() == 6


class TestPriorities:
    def test_low_ones_go_when_there_is_room(self, clock):
        model = Slow(clock)
        policy = weft.batched(model, max_batch_size=2)
        start_on(clock, policy, rows(0))
        low = [start_on(clock, lambda i=i: policy.call(rows(i), priority="low")) for i in (1, 2, 3)]
        high = [start_on(clock, policy, rows(i)) for i in (10, 20, 30)]
        clock.run_out()
        assert [c.answer().item() for c in (*low, *high)] == [2, 4, 6, 20, 40, 60]
        assert [b.ravel().tolist() for b in model.batches] == [[0], [10, 20], [30, 1], [2, 3]]

    def test_alone_they_go_at_once(self, clock):
        caller = start_on(clock, lambda: weft.batched(Slow(clock, 0)).call(rows(1), priority="low"))
        assert caller.answer().item() == 2

    def test_alone_they_wait_no_longer_than_others(self, clock):
        model = Slow(clock, 0)
        policy = weft.batched(model, max_wait=0.5)
        caller = start_on(clock, lambda: policy.call(rows(1), priority="low"))
        clock.advance(0.5)
        assert caller.answer().item() == 2
        assert model.times == [0.5]

    def test_by_the_block(self, clock):
        model = Slow(clock)
        policy = weft.batched(model, max_batch_size=1)

        def low():
            with weft.priority("low"):
                return policy(rows(1))

        start_on(clock, policy, rows(0))
        callers = [start_on(clock, low), start_on(clock, policy, rows(2))]
        clock.run_out()
        assert [c.answer().item() for c in callers] == [2, 4]
        assert [b.item() for b in model.batches] == [0, 2, 1]

    def test_large_ones_are_split(self, clock):
        model = Slow(clock)
        policy = weft.batched(model, max_batch_size=4, split=True)
        caller = start_on(clock, lambda: policy.call(np.arange(10.0), priority="low"))
        clock.run_out()
        assert caller.answer().tolist() == list(np.arange(0, 20, 2))
        assert model.sizes == [4, 4, 2]

    def test_a_deadline_ends_the_wait_for_room(self, clock):
        policy = weft.batched(Slow(clock), max_batch_size=1)
        start_on(clock, policy, rows(0))
        low = start_on(clock, lambda: policy.call(rows(1), priority="low", deadline=2.5))
        for i in range(4):
            start_on(clock, policy, rows(i))
        clock.advance(2.5)
        assert isinstance(low.end().error, DeadlineExceededError)
        clock.run_out()


def test_a_closed_batcher_waits_for_nothing(clock):
    model = Slow(clock)
    policy = weft.batched(model, max_wait=100.0)
    callers = [start_on(clock, policy, rows(i)) for i in range(3)]
    closing = start_on(clock, policy.close)
    clock.advance(1)
    closing.answer()
    assert [c.answer().item() for c in callers] == [0, 2, 4]
    assert model.times == [0]
    with pytest.raises(CancelledError):
        policy(rows(1))


def test_an_answer_that_comes_after_the_deadline_is_not_given():
    clock = weft.SimulatedClock()

    def slow(x):
        clock._now += 5.0  # nobody is woken by it: the run itself must see that it is late
        return x

    with weft.scope(clock):
        policy = weft.batched(slow, max_batch_size=2, max_wait=20.0)
        hurried = start_on(clock, lambda: policy.call(rows(1), deadline=1.0))
        patient = start_on(clock, lambda: policy(rows(2)))
        with pytest.raises(DeadlineExceededError, match="deadline of 1 s"):
            hurried.answer()
        assert patient.answer().item() == 2
        assert policy.statistics().late == 1
