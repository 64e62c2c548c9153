"""What is told of batches, by observers and warnings, and what is kept of them: sweeps and scopes."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest
from support.callers import start_on, together
from support.raw_calls import NO_ROWS, batch, function, rows

import weft
from weft import raw_ops
from weft.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError


class Notes:
    """An observer that writes down what it is told."""

    def __init__(self):
        self.ran, self.refused = [], []

    def batch_ran(self, event):
        self.ran.append(event)

    def call_refused(self, op, name, error):
        self.refused.append((op, name, error))


class TestObservers:
    def test_what_they_are_told(self, clock):
        notes = Notes()
        with weft.observe(notes) as same:
            assert same is notes
            first = start_on(
                clock, batch, rows(1), 8, batch_timeout_micros=3000, allowed_batch_sizes=[4, 8], shared_name="n"
            )
            clock.advance(0.001)
            start_on(
                clock, batch, rows(1, 2), 8, batch_timeout_micros=3000, allowed_batch_sizes=[4, 8], shared_name="n"
            )
            clock.run_out()
            first.answer()
        (event,) = notes.ran
        assert event[:4] == ("Batch", "n", (1, 2), 1)
        assert event.waits == pytest.approx((0.003, 0.002))
        assert (event.reason, event.seconds, event.error) == ("timeout", 0.0, None)
        assert isinstance(event, weft.BatchRan)

    @pytest.mark.parametrize(("sizes", "reason"), [((2, 2), "full"), ((3, 3), "overflow")])
    def test_reasons(self, clock, sizes, reason):
        notes = Notes()
        with weft.observe(notes):
            for size in sizes:
                start_on(clock, function, np.negative, np.ones((size, 1)), 4)
            assert [event.reason for event in notes.ran] == [reason]
            assert notes.ran[0].op == "BatchFunction"
            clock.run_out()

    def test_a_function_that_fails(self, clock):
        notes = Notes()
        error = ValueError("no")

        def f(x):
            clock.sleep(2.0)
            raise error

        with weft.observe(notes):
            caller = start_on(clock, function, f, rows(1), 1)
            clock.run_out()
        assert isinstance(caller.end().error, ValueError)
        assert (notes.ran[0].error, notes.ran[0].seconds) == (error, 2.0)

    def test_refusals(self, clock):
        notes = Notes()
        attributes = {"batch_timeout_micros": 1000, "max_enqueued_batches": 1, "shared_name": "n"}
        with weft.observe(notes):
            start_on(clock, batch, rows(1), 1 + 1, **attributes)
            with pytest.raises(UnavailableError) as caught:
                batch(rows(1, 2), 2, **attributes)
            clock.run_out()
        assert notes.refused == [("Batch", "n", caught.value)]

    def test_one_that_raises_is_logged_and_hurts_nobody(self, scope, caplog):
        class Rude(Notes):
            def batch_ran(self, event):
                raise RuntimeError("rude")

            call_refused = batch_ran

        notes = Notes()
        with caplog.at_level(logging.ERROR, "weft"), weft.observe(Rude()), weft.observe(notes):
            callers = together([lambda i=i: function(np.negative, rows(i), 4) for i in range(4)])
        assert sorted(caller.answer().item() for caller in callers) == [-3, -2, -1, 0]
        assert len(notes.ran) == 1
        assert "an observer failed" in caplog.text

    def test_one_that_ends_its_thread_blocks_nobody(self, scope):
        class Last(Notes):
            def batch_ran(self, event):
                raise SystemExit

        with weft.observe(Last()):
            callers = together([lambda i=i: function(np.negative, rows(i), 4) for i in range(4)])
        assert sum(caller.error is None for caller in callers) >= 3
        (queue,) = scope.resources.values()
        assert queue.scheduler.running == 0

    def test_the_block_ends_it(self, clock):
        notes, inner = Notes(), Notes()
        with weft.observe(notes):
            with weft.observe(inner):
                batch(rows(1), 1)
            batch(rows(1), 1)
        batch(rows(1), 1)
        assert (len(notes.ran), len(inner.ran)) == (2, 1)

    def test_the_same_one_twice(self, clock):
        notes = Notes()
        with weft.observe(notes):
            with weft.observe(notes):
                pass
            batch(rows(1), 1)
        assert len(notes.ran) == 1

    def test_it_sees_every_row_once(self, scope):
        notes = Notes()
        with weft.observe(notes):
            together([lambda i=i: function(np.negative, np.ones((1 + i % 3, 1)), 5, batch_timeout_micros=1000,
                                           max_enqueued_batches=99) for i in range(30)])  # fmt: skip
        assert sum(sum(event.rows) for event in notes.ran) == sum(1 + i % 3 for i in range(30))
        assert all(sum(event.rows) <= 5 for event in notes.ran)


class TestWarnings:
    def test_once_per_resource(self, clock):
        batch(rows(1), 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name in ("", "", "other", "other"):
                batch(rows(1), 1, shared_name=name)
                batch(rows(1), 1, shared_name=name, num_batch_threads=2)
        assert len(caught) == 2
        assert all(issubclass(w.category, UserWarning) and "is ignored" in str(w.message) for w in caught)
        assert all(w.filename == batch.__code__.co_filename for w in caught)

    def test_of_unbatch_and_functions(self, clock):
        raw_ops.Unbatch(rows(1), [[1, 0, 1]], 1, 5)
        with pytest.warns(UserWarning, match="is ignored"):
            raw_ops.Unbatch(rows(1), [[1, 0, 1]], 1, 6)
        raw_ops.Unbatch(rows(1), [[1, 0, 1]], 1, 7)
        start_on(clock, function, np.negative, rows(1), 1).answer()
        with pytest.warns(UserWarning, match="is ignored"):
            start_on(clock, function, np.negative, rows(1), 1, batch_padding_policy="BATCH_DOWN").answer()

    def test_as_an_error_it_leaves_nothing(self, clock):
        batch(rows(1), 1)
        with pytest.raises(UserWarning):
            batch(rows(1), 1, num_batch_threads=2)
        assert weft.sweep() == 0
        batch(rows(1), 1, num_batch_threads=2)


class TestSweep:
    def test_counts(self, clock):
        callers = [start_on(clock, batch, rows(1), 8, batch_timeout_micros=1000) for _ in range(3)]
        assert weft.sweep() == 3
        waiter = start_on(clock, raw_ops.Unbatch, rows(1), NO_ROWS, 5, 2000)
        raw_ops.Unbatch(rows(1, 2, 3), [[6, 0, 1], [7, 1, 1], [8, 2, 1]], 6, 2000)
        assert weft.sweep() == 6
        raw_ops.UnbatchGrad(rows(1)[:0], NO_ROWS, rows(1), 5)
        assert weft.sweep() == 7
        clock.advance(0.003)
        assert weft.sweep() == 1
        clock.advance(60)
        assert weft.sweep() == 0
        for caller in [*callers, waiter]:
            caller.end()

    def test_it_tells_those_who_are_late(self, clock):
        """A sweep by one call ends the wait of another."""
        waiter = start_on(clock, raw_ops.Unbatch, rows(1), NO_ROWS, 5, 2000)
        clock.advance(0.002)
        weft.sweep()
        assert isinstance(waiter.end().error, DeadlineExceededError)

    def test_idle_queues_are_dropped_by_the_next_call(self, clock):
        with weft.scope(clock) as scope:
            start_on(clock, function, np.negative, rows(1), 1).answer()
            (queue,) = scope.resources.values()
            assert len(queue.scheduler.queues) == 1
            clock.advance(61)
            raw_ops.Unbatch(rows(1), [[1, 0, 1]], 1, 5)
            assert len(queue.scheduler.queues) == 0

    def test_a_function_per_call_does_not_grow_the_table(self, clock):
        with weft.scope(clock) as scope:
            for i in range(300):
                start_on(clock, function, lambda x, i=i: x + i, rows(1), 1).answer()
            (queue,) = scope.resources.values()
            assert len(queue.scheduler.queues) <= 64

    def test_pieces_without_an_owner_never_pile_up(self, clock):
        with weft.scope(clock) as scope:
            for i in range(100):
                raw_ops.Unbatch(rows(1, 2), [[2 * i, 0, 1], [2 * i + 1, 1, 1]], 2 * i, 1000)
                raw_ops.UnbatchGrad(rows(1)[:0], NO_ROWS, rows(1), i)
                clock.advance(0.5)
                assert scope.stored() <= 2 + 121


class TestScopes:
    def test_nothing_meets_what_is_outside(self, clock):
        outer = start_on(clock, batch, rows(1), 8, batch_timeout_micros=5000)
        with weft.scope(clock):
            inner = start_on(clock, batch, rows(2), 2, batch_timeout_micros=1000)
            assert weft.sweep() == 1
            clock.run_out()
        assert inner.answer().batched_tensors[0].tolist() == [[2.0]]
        assert outer.answer().batched_tensors[0].tolist() == [[1.0]]

    def test_a_wait_ends_in_the_scope_it_began_in(self, clock):
        with weft.scope(clock) as inner:
            waiter = start_on(clock, raw_ops.Unbatch, rows(1), NO_ROWS, 5, 2000)
        assert (weft.sweep(), inner.stored()) == (0, 1)
        clock.run_out()
        assert isinstance(waiter.end().error, DeadlineExceededError)
        assert inner.stored() == 0

    def test_an_exception_ends_it(self, clock):
        outside = weft.core.scope.current_scope
        with pytest.raises(KeyError), weft.scope():
            raise KeyError
        assert weft.core.scope.current_scope is outside

    def test_observers_belong_to_it(self, clock):
        notes = Notes()
        with weft.observe(notes), weft.scope(clock):
            batch(rows(1), 1)
        assert notes.ran == []


def test_what_is_no_observer_and_no_clock():
    with pytest.raises(InvalidArgumentError, match="must have a method batch_ran"), weft.observe(object()):
        pass
    with pytest.raises(InvalidArgumentError, match="a clock must be"), weft.scope(3):
        pass
