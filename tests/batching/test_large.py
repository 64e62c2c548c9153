"""Calls with very many parts, and very many calls and keys that wait: no step under the lock takes longer for them."""

from __future__ import annotations

import gc
import random
import threading
import time
from math import inf

import numpy as np
import pytest
from support.batched_calls import Slow, rows
from support.callers import PATIENCE, start_on
from support.queue_contract import MERGE, PAD_TO_MAX, Call

import weft
from weft.batching.queue import Limits, LowPriority
from weft.batching.rendezvous import PieceTable
from weft.batching.scheduler import Scheduler
from weft.batching.waste import WasteScheduler
from weft.errors import DeadlineExceededError

MANY = 10**9  # rows: a step for each would never end


class Sized(Call):
    """A call of the rules with `max_waste`."""

    lengths, arrived = (8,), 0.0

    @property
    def count(self):
        return self.rows


def limits(size=4, threads=1, split=True, ages_after=inf, policy=PAD_TO_MAX, timeout=0.0):
    low = LowPriority(size, timeout, inf, (), policy, split, ages_after)
    most = 1 << 60 if split else size
    return Limits(threads, most, timeout, allowed=(size,) if split else (), split=split, low=low, enough=min(size, 2))


RULES = [Scheduler, lambda limits: WasteScheduler(0.25, limits)]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("rules", RULES)
class TestOneCallWithManyParts:
    def test_it_waits_as_a_few_tasks(self, rules, low):
        scheduler, call = rules(limits()), Sized(0, MANY + 3, low)
        scheduler.put("a", Sized(1, 1), 0.0)
        scheduler.put("a", call, 0.0)
        assert len(call.tasks()) <= 3
        assert sum(task.rows for task in call.tasks()) == MANY + 3
        assert scheduler.waiting_rows == MANY + 4

    def test_its_parts_are_cut_when_their_batch_is_formed(self, rules, low):
        scheduler, call, start = rules(limits()), Sized(0, MANY, low), 0
        scheduler.put("a", call, 0.0)
        for _ in range(100):
            batch = scheduler.take(0.0)
            (task,) = batch.tasks
            assert (task.owner, task.start, task.rows, batch.rows) == (call, start, 4, 4)
            start += 4
            scheduler.release(batch, 0.0)
        assert scheduler.waiting_rows == MANY - start

    def test_it_leaves_at_once(self, rules, low):
        scheduler, call = rules(limits()), Sized(0, MANY, low)
        scheduler.put("a", call, 0.0)
        batch = scheduler.take(0.0)
        assert [scheduler.remove(task) for task in call.tasks() if task not in batch.tasks].count(False) == 0
        assert (scheduler.waiting, scheduler.waiting_rows, scheduler.take(inf)) == (0, 0, None)

    def test_other_limits_apply_to_what_waits(self, rules, low):
        scheduler, call = rules(limits(threads=9)), Sized(0, MANY, low)
        scheduler.put("a", call, 0.0)
        scheduler.take(0.0)
        scheduler.set_limits(limits(size=7, threads=9))
        assert [scheduler.take(0.0).rows for _ in range(8)] == [7] * 8

    def test_a_close_makes_all_of_it_due(self, rules, low):
        scheduler, call = rules(limits(timeout=5.0)), Sized(0, MANY, low)
        scheduler.put("a", call, 0.0)
        scheduler.flush()
        assert scheduler.take(0.0).rows == 4
        assert 1 <= len(scheduler.drain()) <= 3
        assert scheduler.take(inf) is None


def test_merged_low_priority_is_cut_too():
    scheduler, call = Scheduler(limits(policy=MERGE)), Sized(0, MANY, True)
    scheduler.put("a", call, 0.0)
    scheduler.put("a", Sized(1, 3), 0.0)
    assert [task.rows for task in scheduler.take(0.0).tasks] == [3, 1]
    assert scheduler.waiting_rows == MANY - 1


def seconds(work, count):
    """How long `work(count)` takes, at best."""
    best = inf
    gc.disable()  # a collection looks at all objects of all tests
    try:
        for _ in range(3):
            started = time.thread_time()  # whatever else the machine does
            work(count)
            best = min(best, time.thread_time() - started)
    finally:
        gc.enable()
    return best


def assert_linear(work):
    """Ten times the work takes about ten times the time; a step for each of the others would take a hundred times as long."""
    few, many = seconds(work, 1500), seconds(work, 15000)
    assert many < 40 * few + 0.05, (few, many)


@pytest.mark.parametrize("rules", RULES)
class TestManyWaiting:
    def test_calls_leave_in_any_order(self, rules):
        def leave(count):
            for low in (False, True):
                scheduler, calls = rules(limits(split=False, timeout=9.0)), [Sized(i, 3, low) for i in range(count)]
                for call in calls:
                    scheduler.put("a", call, 0.0)
                random.Random(0).shuffle(calls)
                assert all(scheduler.remove(call) for call in calls)
                assert (scheduler.waiting, scheduler.take(inf)) == (0, None)

        assert_linear(leave)

    def test_keys_that_wait(self, rules):
        def wait(count):
            scheduler = rules(limits(timeout=9.0))
            for i in range(count):
                scheduler.put(i, Sized(i, 1), 0.0)
                assert scheduler.take(1.0) is None
            for _ in range(count):
                scheduler.release(scheduler.take(9.0), 9.0)
            assert scheduler.take(inf) is None

        assert_linear(wait)

    def test_a_new_key_for_each_call(self, rules):
        def come_and_go(count):
            scheduler = rules(limits(timeout=9.0))
            for i in range(count):
                call = Sized(i, 1)
                scheduler.put(i, call, 0.0)
                assert scheduler.remove(call)
                assert len(scheduler.queues) <= 64

        assert_linear(come_and_go)

    def test_a_backlog_of_one_key(self, rules):
        def run(count):
            scheduler = rules(limits(split=False))
            for i in range(count):
                scheduler.put("a", Sized(i, 3, low=i % 2 == 0), 0.0)
            taken = 0
            while (batch := scheduler.take(0.0)) is not None:
                taken += len(batch.tasks)
                scheduler.release(batch, 0.0)
            assert taken == count

        assert_linear(run)


class CountingTable(PieceTable):
    sweeps = 0

    def sweep(self, now):
        self.sweeps += 1
        return super().sweep(now)


def test_sweeps_of_many_entries_are_rare(scope, clock):
    """Thousands of pieces whose deadlines follow each other by a microsecond, while calls come."""
    scope.keep(("a", "numpy", None, "", ""), table := CountingTable(1.0))
    piece, count = np.ones(1), 5000
    for i in range(count):
        table.deliver(scope, -1 - i, piece.dtype, [i], [piece], clock.now() + i * 1e-6)
    assert table.stored() == count
    clock.advance(1.0)
    while table.stored():
        clock.advance(1e-5)
        scope.arrive()
    assert table.sweeps <= 5


class TestWithThreads:
    def test_others_go_on_beside_a_call_with_many_parts(self):
        policy, other = weft.batched(lambda x: x * 2, max_batch_size=4, split=True), weft.batched(lambda x: x + 1)
        ends, calls = threading.Event(), 0

        def work():
            nonlocal calls
            while not ends.is_set():
                assert other.call(np.ones(1), deadline=PATIENCE).item() == 2
                calls += 1

        beside = threading.Thread(target=work)
        beside.start()
        x = np.arange(40_000.0)
        np.testing.assert_array_equal(policy(x), 2 * x)
        ends.set()
        beside.join()
        assert calls > 100

    @pytest.mark.parametrize("priority", ["high", "low"])
    def test_its_deadline_holds(self, priority):
        policy = weft.batched(lambda x: x * 2, max_batch_size=1, split=True)
        started = time.perf_counter()
        with pytest.raises(DeadlineExceededError):
            policy.call(np.ones(1_000_000), deadline=0.05, priority=priority)
        assert time.perf_counter() - started < 2
        assert policy(np.ones(3)).tolist() == [2, 2, 2]
        assert policy.statistics().waiting == 0

    def test_a_close_refuses_what_is_left_of_it(self, clock):
        policy = weft.batched(Slow(clock), max_batch_size=1, split=True)
        big = start_on(clock, policy, np.ones(1_000_000))
        started = time.perf_counter()
        policy.update(max_batch_size=2)
        closing = start_on(clock, lambda: policy.close(drain=False))
        clock.run_out()
        closing.answer()
        assert isinstance(big.error, weft.errors.CancelledError)
        assert time.perf_counter() - started < 2


class TestGradients:
    @pytest.mark.parametrize("ragged", [False, True])
    def test_the_gradient_of_all_parts_is_one_node(self, ragged):
        torch = pytest.importorskip("torch")
        weight = torch.tensor(2.0, requires_grad=True)
        options = {"ragged": ["x"]} if ragged else {}
        policy = weft.batched(lambda x: x * weight, max_batch_size=4, split=True, **options)
        x = torch.arange(22.0, requires_grad=True)
        given = weft.RaggedTensor.from_row_splits(x, [0, 3, 3, 7, 8, 12, 13, 20, 20, 20, 21, 22]) if ragged else x
        y = policy(given)
        values = y.flat_values if ragged else y
        (values * torch.arange(22.0)).sum().backward()
        assert x.grad.tolist() == [2.0 * i for i in range(22)]
        assert weight.grad.item() == sum(i * i for i in range(22))
        assert nodes(values.grad_fn)["SplitWithSizesBackward0"] == 1
        assert nodes(values.grad_fn)["SliceBackward0"] == 0


def nodes(last):
    """How often each kind of node is in the graph."""
    from collections import Counter

    seen, left = set(), [last]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [each for each, _ in node.next_functions]
    return Counter(node.name() for node in seen)


class TestAgeing:
    """Calls of low priority are not passed for ever."""

    @pytest.mark.parametrize("rules", RULES)
    @pytest.mark.parametrize("split", [False, True])
    def test_under_a_steady_load_one_is_passed_until_it_has_waited_for_long(self, rules, split):
        scheduler, low = rules(limits(split=split, ages_after=5.0)), Sized("low", 2, True)
        scheduler.put("a", low, 0.0)
        scheduler.put("a", Sized(-1, 3), 0.0)
        served = None
        for second in range(20):
            scheduler.put("a", Sized(second, 3), float(second))
            batch = scheduler.take(float(second))
            scheduler.release(batch, float(second))
            if any(task.owner is low for task in batch.tasks):
                served = second
                break
        assert served is not None
        assert 0 < served <= 7

    def test_batch_function_keeps_its_rule(self):
        scheduler, low = Scheduler(limits(split=False)), Sized("low", 2, True)
        scheduler.put("a", low, 0.0)
        for second in range(100):
            scheduler.put("a", Sized(second, 3), float(second))
            batch = scheduler.take(float(second))
            scheduler.release(batch, float(second))
            assert all(task.owner is not low for task in batch.tasks)

    @pytest.mark.parametrize("max_wait", [0.0, 3.0])
    def test_with_a_batcher(self, clock, max_wait):
        order = []

        def f(x):
            order.append(x[0, 0])
            return x

        policy = weft.batched(Slow(clock, 0.5, f), max_batch_size=1, max_wait=max_wait)
        first = start_on(clock, policy, rows(0))
        low = start_on(clock, lambda: policy.call(rows(-1), priority="low"))
        others = [start_on(clock, policy, rows(i)) for i in range(1, 11)]
        later = []
        for i in range(11, 31):
            clock.advance(0.5)
            later.append(start_on(clock, policy, rows(i)))
        clock.run_out()
        for caller in (first, low, *others, *later):
            caller.answer()
        waited = order.index(-1) * 0.5
        assert max(1.0, max_wait) <= waited < 11
