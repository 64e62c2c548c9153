"""What a batcher tells of itself: statistics, receipts, observers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.batched_calls import FULL, Model, rows
from support.callers import Caller, start_on, together

import weft
from weft.batching.call import QueuedCall
from weft.batching.queue import Batch
from weft.batching.request import Request
from weft.batching.statistics import Counters
from weft.errors import DeadlineExceededError, InvalidArgumentError, QueueFullError


class Seen:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.batches, self.refused = [], []

    def batch_ran(self, event):
        self.batches.append(event)

    def call_refused(self, op, name, error):
        self.refused.append((op, name, type(error)))


def slow(clock, seconds=1.0, f=lambda x: x * 2):
    def model(x):
        clock.sleep(seconds)
        return f(x)

    return model


class TestStatistics:
    def test_a_run(self, clock):
        policy = weft.batched(slow(clock), max_batch_size=4, allowed_batch_sizes=[2, 4], max_queue=4)
        callers = [start_on(clock, policy, rows(*range(n))) for n in (1, 1, 2)]
        late = start_on(clock, lambda: policy.call(rows(1), deadline=0.5))
        assert isinstance(start_on(clock, policy, rows(1)).error, QueueFullError)
        now = policy.statistics()
        assert (now.waiting, now.running, now.batches) == (3, 1, 0)
        clock.run_out()
        [caller.answer() for caller in callers]
        assert isinstance(late.error, DeadlineExceededError)
        seen = policy.statistics()
        assert (seen.calls, seen.rows, seen.batches, seen.sizes) == (3, 4, 2, {1: 1, 3: 1})
        assert (seen.padding, seen.reasons) == (2, {"enough": 2})
        assert (seen.rejected, seen.late, seen.failed, seen.backwards) == (1, 1, 0, 0)
        assert (seen.waiting, seen.running, seen.mean_size) == (0, 0, 2)
        assert (seen.waits.count, seen.waits.total, seen.waits.longest) == (3, 2, 1)
        assert (seen.runs.count, seen.runs.mean) == (2, 1)
        assert now.batches == 0  # a snapshot

    def test_it_is_frozen(self, clock):
        seen = weft.batched(lambda x: x).statistics()
        with pytest.raises(dataclasses.FrozenInstanceError):
            seen.calls = 3
        assert (seen.mean_size, seen.waits.mean, seen.waits.quantile(0.5)) == (0, 0, 0)

    def test_split_calls_count_once(self, clock):
        policy = weft.batched(slow(clock), max_batch_size=2, split=True)
        caller = start_on(clock, policy, np.ones((5, 1)))
        clock.run_out()
        caller.answer()
        seen = policy.statistics()
        assert (seen.calls, seen.batches, seen.rows) == (1, 3, 5)

    def test_failed_batches_have_their_size(self, clock):
        def f(x):
            if (x < 0).any():
                raise ValueError("negative")
            return x

        policy = weft.batched(f, max_batch_size=4, max_wait=1.0)
        callers = [start_on(clock, policy, rows(v)) for v in (1, 2, -3, 4)]
        clock.run_out()
        assert [type(c.error) for c in callers] == [type(None), type(None), ValueError, type(None)]
        seen = policy.statistics()
        assert (seen.sizes, seen.calls, seen.failed, seen.batches) == ({4: 1}, 4, 1, 1)

    def test_rows_where_cost_is_something_else(self, clock):
        policy = weft.batched(lambda x: x, cost=lambda x: 10, max_batch_size=20)
        policy(rows(1, 2, 3))
        assert policy.statistics().sizes == {3: 1}

    def test_a_window_and_a_reset(self, clock):
        policy = weft.batched(lambda x: x, max_batch_size=4)
        for seconds, count in ((0, 1), (30, 2), (100, 3), (400, 4)):
            clock.advance(seconds - clock.now())
            policy(np.ones(count))
        assert policy.statistics().sizes == {1: 1, 2: 1, 3: 1, 4: 1}
        assert policy.statistics(last=60).sizes == {4: 1}
        assert policy.statistics(last=300.0).sizes == {3: 1, 4: 1}
        assert (policy.statistics().seconds, policy.statistics(last=60).seconds) == (400, 60)
        assert policy.statistics(last=60).waits.count == 1
        policy.reset_statistics()
        seen = policy.statistics()
        assert (seen.calls, seen.sizes, seen.seconds, seen.waits.quantile(0.5)) == (0, {}, 0, 0)
        clock.advance(10)
        policy(np.ones(1))
        assert [policy.statistics(last).sizes for last in (None, 5, 60)] == [{1: 1}] * 3
        assert policy.statistics(last=60).seconds == 10

    def test_a_window_counts_everything_that_happens(self, clock):
        policy = weft.batched(slow(clock, 2.0, lambda x: 1 / 0), max_queue=0)
        caller = start_on(clock, policy, rows(1))
        start_on(clock, policy, rows(1))
        clock.run_out()
        assert isinstance(caller.error, ZeroDivisionError)
        assert [(policy.statistics(s).failed, policy.statistics(s).rejected) for s in (None, 1, 60)] == [
            (1, 1), (1, 0), (1, 1),
        ]  # fmt: skip

    @pytest.mark.parametrize("last", [0, -1, 301, float("nan"), "60", True])
    def test_windows_that_are_refused(self, last):
        with pytest.raises(InvalidArgumentError, match="last must be a positive number of seconds up to 300"):
            weft.batched(lambda x: x).statistics(last)

    def test_no_more_is_kept_than_the_longest_window(self, clock):
        policy = weft.batched(lambda x: x)
        for _ in range(1000):
            clock.advance(1.0)
            policy(rows(1))
        assert len(policy._counters._seconds) <= 301
        assert policy.statistics().calls == 1000
        assert policy.statistics(last=300).calls == 301

    def test_plain_json(self, clock):
        policy = weft.batched(slow(clock), max_batch_size=4, name="policy")
        clock.start(caller := Caller(policy, rows(1, 2)))
        clock.run_out()
        caller.answer()
        seen = policy.statistics(last=60).to_dict()
        assert json.loads(json.dumps(seen, allow_nan=False)) == seen
        times = {"count": 1, "total": 1, "mean": 1, "longest": 1, "p50": 1, "p90": 1, "p99": 1}
        assert (seen["runs"], seen["sizes"], seen["mean_size"], seen["reasons"]) == (times, {"2": 1}, 2, {"enough": 1})
        assert {field.name for field in dataclasses.fields(weft.Statistics)} | {"mean_size"} == set(seen)

    @pytest.mark.parametrize("q", [0.0, 0.5, 0.9, 0.99, 1.0])
    def test_quantiles_are_right_to_a_tenth(self, q):
        counters, times = Counters(weft.SimulatedClock()), np.random.default_rng(0).lognormal(-6, 2, 10_000)
        for seconds in times:
            batch = Batch()
            batch.started = 0.0
            counters.batch_ran(batch, [], float(seconds))
        runs = counters.snapshot(0, 0).runs
        right = np.quantile(times, q, method="inverted_cdf")
        assert right <= runs.quantile(q) * (1 + 1e-9)
        assert runs.quantile(q) <= right * 1.1
        assert runs.longest == times.max()

    def test_times_beyond_the_buckets(self):
        counters = Counters(weft.SimulatedClock())
        for seconds in (0.0, 1e-9, 1e6):
            batch = Batch()
            counters.batch_ran(batch, [], seconds)
        runs = counters.snapshot(0, 0).runs
        assert (runs.count, runs.longest, runs.quantile(1.0)) == (3, 1e6, 1e6)
        assert runs.quantile(0.0) <= 1e-6


class TestReceipts:
    def test_what_became_of_a_call(self, clock):
        policy = weft.batched(slow(clock, 2.0), max_batch_size=8, allowed_batch_sizes=[4, 8])
        callers = [start_on(clock, lambda n=n: policy.call(rows(*range(n)), receipt=True)) for n in (1,)]
        clock.advance(0.5)
        callers += [start_on(clock, lambda n=n: policy.call(rows(*range(n)), receipt=True)) for n in (2, 3)]
        clock.run_out()
        first, second, third = (caller.answer()[1] for caller in callers)
        assert first == weft.Receipt(0.0, 0, 1, 0, 3, 2.0, "enough")
        assert second == weft.Receipt(1.5, 1, 5, 0, 3, 2.0, "enough")
        assert third == weft.Receipt(1.5, 1, 5, 2, 3, 2.0, "enough")
        assert callers[2].answer()[0].tolist() == [[0], [2], [4]]

    @pytest.mark.parametrize(
        ("options", "counts", "reasons"),
        [
            ({"max_wait": 1.0}, [1], ["timeout"]),
            ({"max_wait": 1.0}, [2, 2], ["full", "full"]),
            ({"max_wait": 1.0}, [3, 3], ["overflow", "timeout"]),
            ({"max_wait": 1.0, "min_batch_size": 2}, [1, 1], ["enough", "enough"]),
        ],
    )
    def test_why_it_was_closed(self, clock, options, counts, reasons):
        policy = weft.batched(lambda x: x, max_batch_size=4, **options)
        callers = [start_on(clock, lambda n=n: policy.call(np.ones(n), receipt=True)) for n in counts]
        clock.run_out()
        assert [caller.answer()[1].reason for caller in callers] == reasons

    def test_of_a_call_in_a_batch_that_failed(self, clock):
        def f(x):
            if (x < 0).any():
                raise ValueError("negative")
            return x

        policy = weft.batched(f, max_batch_size=4, max_wait=1.0)
        callers = [start_on(clock, lambda v=v: policy.call(rows(v), receipt=True)) for v in (-1, 2, 3, 4)]
        clock.run_out()
        receipts = [caller.answer()[1] for caller in callers[1:]]
        assert [(r.size, r.position, r.batch) for r in receipts] == [(1, 0, 0), (2, 0, 0), (2, 1, 0)]

    def test_of_a_split_call(self, clock):
        policy = weft.batched(slow(clock), max_batch_size=2, split=True)
        caller = start_on(clock, lambda: policy.call(np.ones(5), receipt=True))
        clock.run_out()
        y, receipt = caller.answer()
        assert (y.shape, receipt.batch, receipt.size) == ((5,), 0, 2)


class TestObservers:
    def test_are_told_of_batches_and_refusals(self, clock):
        policy = weft.batched(slow(clock), max_batch_size=4, allowed_batch_sizes=[4], max_queue=2, name="policy")
        with weft.observe(Seen()) as seen:
            callers = [start_on(clock, policy, rows(1)), start_on(clock, policy, rows(1, 2))]
            start_on(clock, policy, rows(3))
            clock.run_out()
            [caller.answer() for caller in callers]
        assert seen.refused == [("batched", "policy", QueueFullError)]
        one, two = seen.batches
        assert (one.op, one.name, one.rows, one.padding) == ("batched", "policy", (1,), 3)
        assert one.batcher is policy
        assert (two.rows, two.padding, two.waits, two.seconds, two.error) == ((2,), 2, (1.0,), 1.0, None)

    def test_of_no_padding_where_there_is_none(self, clock):
        policy = weft.batched(lambda x: x, max_batch_size=8, split=True)
        with weft.observe(Seen()) as seen:
            policy(rows(1))
        assert seen.batches[0].padding == 0

    def test_of_errors(self, clock):
        def f(x):
            raise ValueError("no")

        with weft.observe(Seen()) as seen, pytest.raises(ValueError, match="no"):
            weft.batched(f)(rows(1))
        assert isinstance(seen.batches[0].error, ValueError)

    def test_one_that_fails_harms_nobody(self, clock, caplog):
        class Broken:
            def batch_ran(self, event):
                raise ZeroDivisionError

            def call_refused(self, op, name, error):
                raise ZeroDivisionError

        policy = weft.batched(slow(clock), max_queue=0)
        with weft.observe(Broken()), caplog.at_level(logging.ERROR, "weft"):
            first = start_on(clock, policy, rows(1))
            assert isinstance(start_on(clock, policy, rows(2)).error, QueueFullError)
            clock.run_out()
            assert first.answer().item() == 2
        assert len(caplog.records) == 2


def test_everything_at_once():
    """Counts of 32 threads agree with what they saw."""
    with weft.scope():
        model = Model()
        policy = weft.batched(model, max_batch_size=8)
        callers = together([lambda i=i: [policy(rows(*range(i % 3 + 1))) for _ in range(10)] for i in range(32)])
        [caller.answer() for caller in callers]
        seen = policy.statistics()
        assert seen.calls == seen.waits.count == 320
        assert seen.rows == sum(model.sizes) == sum((i % 3 + 1) * 10 for i in range(32))
        assert seen.batches == len(model.sizes) == sum(seen.reasons.values())
        assert max(seen.sizes) <= 8
        assert model.most == 1


def test_full_batches_are_said_to_be_full():
    with weft.scope():
        policy = weft.batched(lambda x: x, max_batch_size=2, **FULL)
        together([lambda: policy(rows(1))] * 4)
        assert policy.statistics().reasons == {"full": 2}


def test_times_fall_in_the_bucket_that_ends_at_or_above_them():
    edges = [1e-6 * 2 ** (k / 8) for k in range(8 * 32)]
    for seconds in ([*edges, 0.0, 1e9] + [0.9 * edge for edge in edges] + [3e-4] * 3, [1e9, 0.0, edges[5], edges[4]]):
        counters = Counters(weft.SimulatedClock())
        batch = Batch()
        counters.batch_ran(batch, [batch.started - wait for wait in seconds], 0.0)
        expected = [0] * (len(edges) + 1)
        for wait in seconds:
            expected[sum(edge < wait for edge in edges)] += 1
        assert list(counters.snapshot(0, 0).waits._buckets) == expected


def test_a_call_is_late_when_its_caller_is_told():
    """Several may find it late, its own thread and whoever ran its batch, and an answer may still come first."""
    with weft.scope():
        policy = weft.batched(Model(), max_batch_size=4)
        request = policy._submit(policy._request((rows(1),), {}, policy._plain))
        for caller in together([request.late] * 8):
            assert isinstance(caller.answer(), DeadlineExceededError)
        request.wait()
        assert policy.statistics().late == 0


def broken(x):
    raise ValueError("bad")


@pytest.mark.skipif(weft.is_compiled, reason="methods of compiled classes cannot be replaced")
@pytest.mark.parametrize("count", [1, 6])
def test_a_failure_is_counted_before_its_call_ends(count, monkeypatch):
    """The caller goes on when its call ends, and takes the error."""
    policy, seen = weft.batched(broken, max_batch_size=4, on_error="share", split=True), []

    def reject(self, error):
        seen.append(policy.statistics().failed)
        return QueuedCall.reject(self, error)

    monkeypatch.setattr(Request, "reject", reject)
    with pytest.raises(ValueError, match="bad"):
        policy(np.zeros((count, 1)))
    assert seen == [1]


def test_failures_of_many_callers_are_counted():
    policy = weft.batched(broken, max_batch_size=4, max_wait=0.001, on_error="share", split=True)
    failed = itertools.count(1)

    def call(_):
        for count in (1, 6, 2, 9):  # whole and split
            with pytest.raises(ValueError, match="bad"):
                policy(np.zeros((count, 1)))
            number = next(failed)
            assert policy.statistics().failed >= number

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(64)))
    assert policy.statistics().failed == 256
