"""Many threads on one queue: everyone gets exactly its own, whatever becomes of the others."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.callers import start, start_on, together
from support.raw_calls import LONG, NO_ROWS, batch, function, rows, unbatch

import weft
from weft import raw_ops
from weft.core.ticket import Ticket, wake_all
from weft.core.wakeup import Wakeup
from weft.errors import DeadlineExceededError

# --- together ---


class TestTogether:
    @pytest.mark.parametrize("threads", [2, 8, 64])
    def test_batch_and_unbatch(self, scope, threads):
        def call(i):
            got = []
            for turn in range(20):
                b = batch(rows(i, 1000 * turn), 2 * threads)
                got.append(unbatch(b.batched_tensors[0] + 1, b).ravel().tolist())
            return got

        callers = together([lambda i=i: call(i) for i in range(threads)])
        for i, caller in enumerate(callers):
            assert caller.answer() == [[i + 1, 1000 * turn + 1] for turn in range(20)]
        assert scope.sweep() == 0

    @pytest.mark.parametrize("slots", [1, 4, 0])
    def test_functions(self, scope, slots):
        """Sizes that never fill a batch exactly; the timeout closes what is left."""
        sizes = []

        def f(x):
            sizes.append(len(x))
            return x * 2

        def call(i):
            rng = np.random.default_rng(i)
            for _ in range(30):
                x = rng.random((int(rng.integers(1, 6)), 2))
                y = function(f, x, 16, num_batch_threads=slots, batch_timeout_micros=500, max_enqueued_batches=1000)
                np.testing.assert_array_equal(y, x * 2)

        for caller in together([lambda i=i: call(i) for i in range(32)]):
            caller.answer()
        assert max(sizes) <= 16
        assert scope.sweep() == 0

    def test_functions_that_are_split(self, scope):
        def call(i):
            rng = np.random.default_rng(i)
            for _ in range(20):
                x = rng.random((int(rng.integers(1, 20)), 2))
                y = function(
                    np.negative, x, 20, allowed_batch_sizes=[2, 4, 8], batch_timeout_micros=500, num_batch_threads=3,
                    max_enqueued_batches=1000, enable_large_batch_splitting=True,
                )  # fmt: skip
                np.testing.assert_array_equal(y, -x)

        for caller in together([lambda i=i: call(i) for i in range(24)]):
            caller.answer()
        assert scope.sweep() == 0

    def test_large_rows(self, scope):
        """Memory that is used again, and copies that do not give up the GIL."""

        def call(i):
            for turn in range(5):
                b = batch(np.full((1, 1 << 14), 10.0 * i + turn), 8)
                y = unbatch(b.batched_tensors[0], b)
                assert y.min() == y.max() == 10.0 * i + turn

        for caller in together([lambda i=i: call(i) for i in range(8)]):
            caller.answer()

    def test_slots_bound_the_batches_processed_at_once(self, scope):
        running, most = [], []
        release = threading.Event()

        def f(x):
            running.append(1)
            most.append(len(running))
            if len(most) == 3:
                release.set()
            release.wait(20)
            running.pop()
            return x

        callers = [start(function, f, rows(i), 1, num_batch_threads=3, max_enqueued_batches=99) for i in range(12)]
        assert [caller.answer().item() for caller in callers] == list(range(12))
        assert max(most) == 3

    def test_no_thread_is_started(self, scope):
        seen = []

        def f(x):
            seen.append(threading.current_thread())
            return x

        callers = [start(function, f, rows(i), 4, num_batch_threads=4) for i in range(8)]
        for caller in callers:
            caller.answer()
        assert set(seen) <= set(callers)

    def test_ids_are_distinct_in_all_threads(self, scope):
        def call():
            return [int(batch(rows(1.0), 1).id) for _ in range(500)]

        ids = [id for caller in together([call] * 8) for id in caller.answer()]
        assert len(set(ids)) == 4000
        assert 1500 < sum(id < 0 for id in ids) < 2500


# --- gradients ---


class TestGradients:
    def test_three_callers_one_batch(self, clock):
        """The owner of the batch receives the gradients in the order of its index, the others no rows."""
        batched = np.arange(6.0).reshape(6, 1)
        index = np.array([[30, 0, 1], [10, 1, 2], [20, 3, 3]])
        owner = start_on(clock, raw_ops.UnbatchGrad, batched, index, rows(6, 6, 6), 20)
        assert raw_ops.UnbatchGrad(batched[:0], NO_ROWS, rows(4, 5), 10).shape == (0, 1)
        assert owner.is_alive()
        assert raw_ops.UnbatchGrad(batched[:0], NO_ROWS, rows(3), 30).shape == (0, 1)
        assert owner.answer().ravel().tolist() == [3, 4, 5, 6, 6, 6]
        assert weft.sweep() == 0

    def test_chain_by_hand(self, scope):
        """Batch -> f -> Unbatch -> loss -> UnbatchGrad -> f's backward -> Unbatch, against the batch made by hand."""
        rng = np.random.default_rng(1)
        w, xs, targets = rng.random((3, 2)), rng.random((16, 2, 3)), rng.random((16, 2, 2))
        weights: list[np.ndarray] = []

        def call(x, target):
            b = batch(x, 32)
            (together_x,) = b.batched_tensors
            y = unbatch(np.tanh(together_x @ w), b, shared_name="y")
            dy = 2 * (y - target)
            dy_batch = raw_ops.UnbatchGrad(together_x, b.batch_index, dy, b.id)
            dz = dy_batch * (1 - np.tanh(together_x @ w) ** 2)  # no rows for all but one
            if len(dz):
                weights.append(together_x.T @ dz)
            return y, unbatch(dz @ w.T, b, shared_name="dx")

        callers = together([lambda i=i: call(xs[i], targets[i]) for i in range(16)])
        x, target = xs.reshape(32, 3), targets.reshape(32, 2)
        y = np.tanh(x @ w)
        dz = 2 * (y - target) * (1 - y**2)
        for i, caller in enumerate(callers):
            got_y, got_dx = caller.answer()
            np.testing.assert_allclose(got_y, y[2 * i : 2 * i + 2])
            np.testing.assert_allclose(got_dx, (dz @ w.T)[2 * i : 2 * i + 2])
        (dw,) = weights
        np.testing.assert_allclose(dw, x.T @ dz)
        assert scope.sweep() == 0

    @pytest.mark.parametrize("allowed", [(), (5, 8)])
    def test_chain_by_the_gradient_table(self, clock, allowed):
        """`weft.vjp` of Batch and Unbatch: gradients find their callers; none flows through padding."""

        def call(x):
            b, batch_back = weft.vjp(
                raw_ops.Batch, [x, 2 * x], 1, 8, 1000, 0, allowed_batch_sizes=list(allowed), shared_name="v"
            )
            y, y_back = weft.vjp(
                raw_ops.Unbatch, b.batched_tensors[0] ** 2, b.batch_index, b.id, timeout_micros=LONG, shared_name="u"
            )
            dsquare = y_back(np.ones_like(y))["batched_tensor"]
            assert dsquare.shape == b.batched_tensors[0].shape
            dx = batch_back([dsquare * 2 * b.batched_tensors[0], np.zeros_like(b.batched_tensors[1])])["in_tensors"]
            return y, dx

        callers = [start_on(clock, call, x) for x in (rows(1, 2), rows(3))]
        clock.run_out()
        for caller, x in zip(callers, (rows(1, 2), rows(3)), strict=True):
            y, (da, db) = caller.answer()
            np.testing.assert_allclose(y, x**2)
            np.testing.assert_allclose(da, 2 * x)
            np.testing.assert_allclose(db, 0 * x)
        assert weft.sweep() == 0

    def test_missing_cotangents_are_zeros(self, clock):
        caller = start_on(clock, weft.vjp, raw_ops.Batch, [rows(1.0), np.array([[True]])], 1, 1, 0, 0)
        b, pull_back = caller.answer()
        assert b.batched_tensors[1].dtype == bool
        assert pull_back()["in_tensors"][0].tolist() == [[0.0]]
        assert pull_back()["in_tensors"][1] is None

    def test_second_order(self, clock):
        """UnbatchGrad has a gradient too: every caller's rows."""
        index = np.array([[1, 2, 1], [2, 0, 2]])

        def call(id, grad, original, index):
            joined, pull_back = weft.vjp(raw_ops.UnbatchGrad, original, index, grad, id)
            return joined, pull_back(10 * joined)["grad"]

        sender = start_on(clock, call, 1, rows(1), rows(1)[:0], NO_ROWS)
        owner = start_on(clock, call, 2, rows(2, 3), rows(0, 0, 0), index)
        assert owner.answer()[0].ravel().tolist() == [1, 2, 3]
        assert owner.answer()[1].ravel().tolist() == [20, 30]
        assert sender.answer()[1].ravel().tolist() == [10]

    def test_pieces_that_overlap_or_leave_gaps(self, clock):
        _, pull_back = weft.vjp(raw_ops.Unbatch, np.zeros((5, 1)), [[1, 1, 2], [2, 2, 2]], 1, LONG)
        sender = start_on(
            clock, raw_ops.UnbatchGrad, rows(1)[:0], NO_ROWS, rows(5, 7), 2, "", "unbatch_gradient_Unbatch"
        )
        sender.answer()
        assert pull_back(rows(1, 2))["batched_tensor"].ravel().tolist() == [0, 1, 7, 7, 0]
        clock.advance(61)
        assert weft.sweep() == 0

    def test_deadline(self, clock):
        owner = start_on(clock, raw_ops.UnbatchGrad, rows(1), [[1, 0, 1], [2, 1, 1]], rows(1), 1)
        with weft.gradient_deadline(5):
            hasty = start_on(clock, raw_ops.UnbatchGrad, rows(1), [[3, 0, 1], [4, 1, 1]], rows(1), 3)
            clock.run_out()
        assert isinstance(hasty.end().error, DeadlineExceededError)
        assert isinstance(owner.end().error, DeadlineExceededError)
        assert clock.now() == 60.0

    def test_gradient_deadline_as_a_setting(self, clock):
        try:
            weft.gradient_deadline(2)
            owner = start_on(clock, raw_ops.UnbatchGrad, rows(1), [[1, 0, 1], [2, 1, 1]], rows(1), 1)
            clock.run_out()
            assert isinstance(owner.end().error, DeadlineExceededError)
            assert clock.now() == 2.0
        finally:
            weft.gradient_deadline(60)

    def test_batch_gradient_has_a_deadline(self, clock):
        """A caller whose batch's owner never sends the gradient back."""
        callers = [start_on(clock, weft.vjp, raw_ops.Batch, [rows(i)], 1, 2, LONG, 3_000_000) for i in range(2)]
        other, pull_back = callers[0].answer()
        assert len(other.batched_tensors[0]) == 0
        began = clock.now()
        caller = start_on(clock, pull_back, [rows()])
        clock.run_out()
        assert isinstance(caller.end().error, DeadlineExceededError)
        assert clock.now() - began == 3.0
        assert weft.sweep() == 0


def test_threads_are_woken_one_by_the_other():
    """Each wakes the next as it leaves; one that has left before its turn is passed over."""
    calls = [Ticket(weft.SimulatedClock()) for _ in range(4)]
    for call in calls:
        call.waiter = Wakeup()
        call.done = True
    *wave, last = calls
    wave[1].wait()
    wake_all(wave, last.waiter)
    assert [call.waiter.locked() for call in calls] == [False, True, True, True]
    wave[0].wait()
    assert [call.waiter.locked() for call in calls] == [False, True, False, True]
    wave[2].wait()
    assert not last.waiter.locked()
