"""TensorFlow's own scenarios of the scheduler (shared_batch_scheduler_test.cc, batch_kernels_test.cc), and more of them."""

from __future__ import annotations

from math import inf

import pytest
from support.queue_contract import ISOLATION, MERGE, PAD_TO_MAX, PAD_TO_NEXT, POLICIES, Call

from weft.batching.queue import Limits, LowPriority, Pace
from weft.batching.queue_table import IDLE_QUEUE_SECONDS, IDLE_QUEUES
from weft.batching.scheduler import Scheduler
from weft.errors import InvalidArgumentError, UnavailableError


class Bench:
    """A scheduler under a hand-written scenario: calls are named by their order of arrival."""

    def __init__(self, threads=1, most=10, timeout=1.0, **more):
        self.scheduler = Scheduler(Limits(threads, most, timeout, **more))
        self.now = 0.0
        self.count = 0

    def put(self, *sizes, queue="q", low=False):
        for rows in sizes:
            self.scheduler.put(queue, Call(self.count, rows, low), self.now)
            self.count += 1
        return self

    def takes(self, at=None, hold=False):
        """The sizes in each batch that is handed out now."""
        self.now = self.now if at is None else at
        found = []
        while (batch := self.scheduler.take(self.now)) is not None:
            found.append([t.rows for t in batch.tasks])
            self.last = batch
            if hold:
                break
            self.scheduler.release(batch, self.now)
        return found


def low(most=10, timeout=5.0, enqueued=10, allowed=(), policy=PAD_TO_MAX):
    return LowPriority(most, timeout, enqueued, tuple(allowed), policy)


@pytest.mark.parametrize("split", [False, True])
class TestBothModes:
    def test_two_queues_keep_their_order(self, split):
        bench = Bench(split=split)
        bench.put(1, queue="a").put(2, queue="b").put(3, queue="a").put(4, queue="b").put(5, queue="c")
        assert bench.takes() == []
        assert bench.takes(at=1.0) == [[1, 3], [2, 4], [5]]

    def test_timeout_of_the_first_task(self, split):
        bench = Bench(split=split, timeout=10.0).put(1)
        assert bench.takes(at=9.0) == []
        bench.put(1)
        assert bench.takes(at=10.0) == [[1, 1]]

    def test_zero_timeout_runs_without_the_clock_moving(self, split):
        assert Bench(split=split, timeout=0.0).put(1).takes() == [[1]]

    def test_full_batch_at_once(self, split):
        bench = Bench(split=split).put(4, 6)
        assert bench.takes() == [[4, 6]]
        assert bench.takes(at=100.0) == [], "no empty batch is run"

    def test_unit_tasks_fill_every_batch_that_may_wait(self, split):
        bench = Bench(most=2, max_enqueued=3, split=split, timeout=0.0)
        bench.put(2).takes(hold=True)
        bench.put(*[1] * 6)
        with pytest.raises(UnavailableError):
            bench.put(1)
        bench.scheduler.release(bench.last, 0.0)
        assert bench.takes() == [[1, 1]] * 3

    def test_a_full_queue_does_not_block_another(self, split):
        bench = Bench(most=1, max_enqueued=1, split=split, timeout=0.0).put(1, queue="a")
        bench.takes(hold=True)
        bench.put(1, queue="a")
        with pytest.raises(UnavailableError):
            bench.put(1, queue="a")
        bench.put(1, queue="b")

    def test_a_backlog_does_not_starve_another_queue(self, split):
        bench = Bench(most=1, split=split).put(1, queue="a").put(1, queue="b")
        bench.put(1, 1, 1, queue="a")
        order = []
        while (batch := bench.scheduler.take(0.0)) is not None:
            order.append(batch.tasks[0].queue.key)
            bench.scheduler.release(batch, 0.0)
        assert order == ["a", "b", "a", "a", "a"]

    def test_while_all_slots_are_busy_the_open_batch_grows(self, split):
        bench = Bench(most=4, timeout=1.0, split=split).put(4)
        bench.takes(hold=True)
        bench.put(1)
        assert bench.takes(at=50.0) == []
        bench.put(1)
        bench.scheduler.release(bench.last, 50.0)
        assert bench.takes() == [[1, 1]]

    def test_batch_down_leaves_its_share_of_the_time(self, split):
        bench = Bench(most=8, timeout=3.0, allowed=(1, 2, 4, 8), batch_down=True, split=split).put(1, 1, 1)
        assert bench.takes(at=3.0) == [[1, 1]]
        assert bench.takes(at=4.9) == []
        assert bench.takes(at=5.0) == [[1]]

    @pytest.mark.parametrize(("down", "batches", "padded"), [(False, [[1] * 5], 8), (True, [[1] * 4], 4)])
    def test_five_of_allowed_four_and_eight(self, split, down, batches, padded):
        bench = Bench(most=8, allowed=(4, 8), batch_down=down, split=split).put(*[1] * 5)
        assert bench.takes(at=1.0) == batches
        assert bench.last.padded == padded
        if down:
            assert bench.takes(at=1.8) == [[1]]
            assert bench.last.padded == 4

    def test_batch_down_inside_a_task_pads_up(self, split):
        bench = Bench(most=8, allowed=(4, 8), batch_down=True, split=split).put(3, 3)
        assert bench.takes(at=1.0) == [[3, 3]]
        assert bench.last.padded == 8

    @pytest.mark.parametrize("policy", POLICIES)
    def test_low_task_that_is_too_large(self, split, policy):
        with pytest.raises(UnavailableError):
            Bench(low=low(most=3, policy=policy), split=split).put(4, low=True)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_low_queue_that_is_full(self, split, policy):
        bench = Bench(low=low(most=3, enqueued=2, policy=policy), most=20, split=split).put(3, 3, low=True)
        with pytest.raises(UnavailableError):
            bench.put(1, low=True)
        assert bench.scheduler.waiting == 2

    def test_without_limits_of_their_own_low_tasks_are_like_others(self, split):
        assert Bench(split=split).put(1, 2).put(3, low=True).takes(at=1.0) == [[1, 2, 3]]

    @pytest.mark.parametrize("policy", [PAD_TO_MAX, PAD_TO_NEXT, ISOLATION])
    def test_low_alone_when_full_or_timed_out(self, split, policy):
        bench = Bench(low=low(most=4, timeout=5.0, policy=policy), split=split).put(2, low=True)
        assert bench.takes(at=4.9) == []
        assert bench.takes(at=5.0) == [[2]]
        assert bench.put(2, 2, low=True).takes() == [[2, 2]]

    def test_low_alone_pads_to_the_low_sizes(self, split):
        bench = Bench(most=8, allowed=(8,), low=low(most=8, allowed=(4, 8), timeout=1.0), split=split)
        assert bench.put(1, 1, low=True).takes(at=1.0) == [[1, 1]]
        assert bench.last.padded == 4

    def test_low_waits_while_high_does(self, split):
        bench = Bench(low=low(timeout=0.5, policy=ISOLATION), split=split).put(1).put(2, low=True)
        assert bench.takes(at=0.9) == []
        assert bench.takes(at=1.0) == [[1], [2]]

    def test_high_is_padded_with_low_up_to_the_maximum(self, split):
        bench = Bench(low=low(), split=split).put(1, 3).put(3, 3, 3, low=True)
        assert bench.takes(at=1.0) == [[1, 3, 3, 3]]
        assert bench.scheduler.queues["q"].low_rows == 3

    def test_high_is_padded_with_what_low_there_is(self, split):
        assert Bench(low=low(), split=split).put(1, 3).put(2, low=True).takes(at=1.0) == [[1, 3, 2]]

    def test_high_is_padded_to_the_next_allowed_size(self, split):
        bench = Bench(allowed=(2, 8, 10), low=low(policy=PAD_TO_NEXT), split=split).put(1, 3).put(2, 2, 2, low=True)
        assert bench.takes(at=1.0) == [[1, 3, 2, 2]]

    def test_without_allowed_sizes_there_is_no_next(self, split):
        assert Bench(low=low(policy=PAD_TO_NEXT), split=split).put(1, 3).put(2, low=True).takes(at=1.0) == [[1, 3]]

    def test_isolation_makes_two_batches(self, split):
        bench = Bench(most=4, low=low(most=4, policy=ISOLATION), split=split).put(1, 3).put(2, 2, low=True)
        assert bench.takes() == [[1, 3], [2, 2]]

    def test_merge_low_alone(self, split):
        bench = Bench(low=low(timeout=5.0, policy=MERGE), split=split).put(2, low=True)
        assert bench.takes(at=4.9) == []
        assert bench.takes(at=5.0) == [[2]]
        assert bench.put(5, 5, low=True).takes() == [[5, 5]]

    def test_merge_mixed_at_the_timeout_of_the_oldest_high_first(self, split):
        bench = Bench(low=low(timeout=5.0, policy=MERGE), split=split).put(2, low=True)
        bench.now = 0.5
        bench.put(3)
        assert bench.takes(at=0.9) == []
        assert bench.takes(at=1.0) == [[3, 2]]

    def test_merge_mixed_and_full(self, split):
        assert Bench(low=low(policy=MERGE), split=split).put(4, low=True).put(6).takes() == [[6, 4]]

    def test_merge_overflow_is_cut_or_kept(self, split):
        bench = Bench(low=low(policy=MERGE), split=split).put(6).put(7, low=True)
        assert bench.takes() == ([[6, 4]] if split else [[6]])
        assert bench.takes(at=5.0) == ([[3]] if split else [[7]])

    def test_merge_high_that_leaves_gives_no_time_to_low(self, split):
        """A high task that is gone neither hurries nor delays the low ones."""
        bench = Bench(low=low(timeout=5.0, policy=MERGE), split=split)
        gone = Call("gone", 1)
        bench.scheduler.put("q", gone, 0.0)
        bench.now = 0.5
        bench.put(2, low=True)
        assert bench.scheduler.remove(gone)
        assert bench.takes(at=5.4) == []
        assert bench.takes(at=5.5) == [[2]]


class TestWithoutSplitting:
    def test_sizes(self):
        bench = Bench().put(3, 5, 3, 1, 6)
        assert bench.takes() == [[3, 5], [3, 1, 6]]

    def test_overflow_closes_the_one_before_and_starts_a_clock(self):
        bench = Bench(most=4, timeout=10.0).put(2)
        bench.now = 4.0
        bench.put(3)
        assert bench.takes() == [[2]]
        assert bench.takes(at=13.9) == []
        assert bench.takes(at=14.0) == [[3]]

    def test_a_small_task_never_fills_a_gap_left_behind(self):
        bench = Bench(most=4).put(3, 2, 1)
        assert bench.takes() == [[3]]
        assert bench.takes(at=1.0) == [[2, 1]]

    def test_what_fits_the_open_batch_is_taken_however_full_the_queue(self):
        bench = Bench(most=4, max_enqueued=1).put(3)
        with pytest.raises(UnavailableError):
            bench.put(2)
        assert bench.put(1).takes() == [[3, 1]]

    def test_a_refused_task_does_not_close_the_open_batch(self):
        bench = Bench(most=4, max_enqueued=1).put(3)
        with pytest.raises(UnavailableError):
            bench.put(2)
        assert bench.takes() == []

    def test_too_large(self):
        with pytest.raises(InvalidArgumentError):
            Bench(most=4).put(5)

    def test_a_refused_task_makes_no_queue(self):
        bench = Bench(most=4)
        with pytest.raises(InvalidArgumentError):
            bench.put(5, queue="new")
        assert bench.scheduler.queues == {}


class TestWithSplitting:
    def test_sizes(self):
        assert Bench(split=True).put(3, 5, 3, 1, 6, 1).takes() == [[3, 5, 2]]
        assert Bench(split=True, timeout=0.0).put(3, 5, 3, 1, 6, 1).takes() == [[3, 5, 2], [1, 1, 6, 1]]

    def test_a_task_is_cut_to_top_up_the_open_batch(self):
        bench = Bench(most=4, split=True).put(3, 3)
        assert bench.takes() == [[3, 1]]
        assert bench.takes(at=1.0) == [[2]]

    def test_middle_pieces_have_the_largest_allowed_size(self):
        bench = Bench(most=9, allowed=(1, 2), split=True).put(1, 8)
        assert bench.takes() == [[1, 1], [2], [2], [2]]
        assert bench.takes(at=1.0) == [[1]]

    def test_capacity_is_strict(self):
        bench = Bench(most=20, allowed=(2,), max_enqueued=3, split=True)
        with pytest.raises(UnavailableError):
            bench.put(7)
        bench.put(6)
        with pytest.raises(UnavailableError):
            bench.put(1)
        assert bench.takes() == [[2], [2], [2]]


class TestAdaptive:
    def test_full_batches_pass_the_limit(self):
        bench = Bench(threads=128, most=2, timeout=0.0, split=True, adaptive=True)
        bench.put(*[1, 1] * 10, queue="a")
        assert [bench.scheduler.take(0.0) is not None for _ in range(11)] == [True] * 10 + [False]

    def test_partial_batches_keep_to_it(self):
        bench = Bench(threads=128, most=9, timeout=0.0, split=True, adaptive=True)
        for queue in "abc":
            bench.put(1, queue=queue)
        held = [bench.scheduler.take(0.0) for _ in range(3)]
        assert [batch is not None for batch in held] == [True, True, False]
        bench.scheduler.release(held[0], 0.0)
        assert bench.scheduler.take(0.0) is not None

    def test_oldest_first(self):
        bench = Bench(threads=1, most=4, timeout=1.0, split=True, adaptive=True).put(1, queue="a")
        bench.now = 0.5
        bench.put(4, queue="b").put(3, queue="a")
        assert bench.takes() == [[1, 3], [4]]

    def test_the_pace_stays_within_its_bounds(self):
        pace = Pace()
        for i in range(2000):
            pace.add(1.0 / (i + 1))
            assert 1 <= pace.in_flight <= 64
        for i in range(4000):
            pace.add(float(i % 7))
            assert 1 <= pace.in_flight <= 64


class TestQueues:
    def test_idle_ones_are_forgotten_after_a_minute(self):
        bench = Bench(timeout=0.0).put(1, queue="a").put(1, queue="b")
        bench.takes()
        bench.scheduler.drop_idle(IDLE_QUEUE_SECONDS - 1)
        assert set(bench.scheduler.queues) == {"a", "b"}
        bench.now = IDLE_QUEUE_SECONDS
        bench.put(1, queue="b")
        bench.scheduler.drop_idle(IDLE_QUEUE_SECONDS)
        assert set(bench.scheduler.queues) == {"b"}
        assert bench.takes() == [[1]]

    def test_a_new_name_for_every_call_does_not_grow_the_table(self):
        bench = Bench(timeout=0.0)
        for i in range(10 * IDLE_QUEUES):
            assert bench.put(1, queue=i).takes() == [[1]]
            assert len(bench.scheduler.queues) <= IDLE_QUEUES

    def test_those_in_use_are_never_dropped(self):
        bench = Bench(timeout=9.0)
        for i in range(3 * IDLE_QUEUES):
            bench.put(1, queue=i)
        assert bench.takes(at=9.0) == [[1]] * 3 * IDLE_QUEUES

    def test_removal(self):
        bench = Bench(most=4)
        calls = [Call(i, 2) for i in range(5)]
        for call in calls:
            bench.scheduler.put("q", call, 0.0)
        assert [bench.scheduler.remove(calls[i]) for i in (0, 1, 4)] == [True, True, True]
        assert bench.takes() == [[2, 2]], "the batch that became empty is not handed out"
        assert bench.scheduler.remove(calls[2]) is False
        assert bench.scheduler.waiting == 0

    def test_removal_of_the_first_hands_its_watch_to_the_next(self):
        bench = Bench()
        calls = [Call(i, 1) for i in range(2)]
        for call in calls:
            bench.scheduler.put("q", call, 0.0)
        assert [bench.scheduler.due(call) for call in calls] == [(1.0, True), (1.0, False)]
        bench.scheduler.remove(calls[0])
        assert bench.scheduler.moved == [calls[1]]
        assert bench.scheduler.due(calls[1]) == (1.0, True)


def test_merge_of_a_call_that_was_cut_leaves_nothing_to_watch_for_the_whole():
    low = LowPriority(2, 4.0, 1, (), MERGE)
    scheduler = Scheduler(Limits(1, 2, 0.0, 1, (), split=True, low=low))
    cut = Call(0, 2, True)
    scheduler.put("q", cut, 0.0)
    scheduler.put("q", Call(1, 1, False), 0.0)
    batch = scheduler.take(0.0)
    rest = scheduler.queues["q"].low_first
    assert [task.rows for task in batch.tasks] == [1, 1]
    assert scheduler.remove(rest)
    assert scheduler.due(cut) == (inf, False)
