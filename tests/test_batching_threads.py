"""Many threads on one queue: everyone gets exactly its own, whatever becomes of the others."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings

import numpy as np
import pytest
from callers import Caller, run_script, start, start_on, together, until

import weft
from weft import raw_ops
from weft.batching.bell import Bell
from weft.batching.pending import Pending, wake_all
from weft.errors import DeadlineExceededError, UnavailableError

NO_ROWS = np.empty((0, 3), np.int64)
POLICIES = [
    "low_priority_padding_with_max_batch_size",
    "low_priority_padding_with_next_allowed_batch_size",
    "priority_isolation",
    "priority_merge",
]
LONG = 60_000_000  # microseconds: these batches are closed by their size


@pytest.fixture
def scope():
    """The test's scope, on the real clock."""
    with weft.scope() as scope:
        yield scope


def batch(x, size=8, **attributes):
    given = {"num_batch_threads": 1, "batch_timeout_micros": LONG, "grad_timeout_micros": 0} | attributes
    return raw_ops.Batch([x], max_batch_size=size, **given)


def function(f, x, size=8, Tout=("float64",), captured=(), **attributes):
    given = {"num_batch_threads": 1, "batch_timeout_micros": LONG} | attributes
    return raw_ops.BatchFunction([x], list(captured), f, max_batch_size=size, Tout=Tout, **given)[0]


def unbatch(data, got, **attributes):
    return raw_ops.Unbatch(data, got.batch_index, got.id, **{"timeout_micros": LONG} | attributes)


def rows(*values):
    return np.array(values, float).reshape(-1, 1)


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


# --- those who fail, and those who die ---


class TestFailures:
    def test_every_caller_has_its_own_exception(self, scope):
        class Mine(Exception):
            def __init__(self, text, more):
                super().__init__(text)
                self.more = more

        raised = []

        def f(x):
            raised.append(Mine("no", more=[1]))
            raise raised[0]

        callers = together([lambda: function(f, rows(1.0), 8)] * 8)
        found = [caller.error for caller in callers]
        assert [type(error) for error in found] == [Mine] * 8
        assert len({id(error) for error in [*found, *raised]}) == 9
        for error in found:
            assert error.__cause__ is raised[0]
            assert (str(error), error.more) == ("no", [1])
            assert error.__traceback__ is not None
        assert len({id(error.__traceback__) for error in found}) == 8

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    @pytest.mark.parametrize("leader", [True, False])
    def test_a_runner_that_is_ended_hands_its_batch_on(self, scope, kind, leader):
        """Whoever runs the batch is ended from inside f; the others are served without it."""
        seen = []

        def f(x):
            seen.append(sorted(x.ravel().tolist()))
            if len(seen) == 1:
                raise kind
            return x * 2

        attributes = {"batch_timeout_micros": 50_000} if leader else {}
        callers = together([lambda i=i: function(f, rows(i), 99 if leader else 6, **attributes) for i in range(6)])
        ended = [i for i, caller in enumerate(callers) if isinstance(caller.error, kind)]
        assert len(ended) == 1
        for i, caller in enumerate(callers):
            if i not in ended:
                assert caller.answer().ravel().tolist() == [2 * i]
        assert all(ended[0] not in batch for batch in seen[1:])
        assert scope.sweep() == 0
        assert function(np.negative, rows(3), 1, shared_name="after").tolist() == [[-3.0]]

    def test_all_callers_ended_one_after_the_other(self, scope):
        def f(x):
            raise SystemExit

        callers = together([lambda: function(f, rows(1), 5)] * 5)
        assert [type(caller.error) for caller in callers] == [SystemExit] * 5
        assert scope.sweep() == 0
        (queue,) = scope.resources.values()
        assert queue.scheduler.running == 0

    def test_an_ended_runner_lets_the_next_batch_go(self, scope):
        began, go = threading.Event(), threading.Event()

        def f(x):
            if x[0, 0] == 0:
                began.set()
                go.wait(20)
                raise SystemExit
            return x

        first = start(function, f, rows(0), 1)
        assert began.wait(20)
        second = start(function, f, rows(1), 1)
        until(lambda: scope.stored() == 1)
        go.set()
        assert second.answer().tolist() == [[1.0]]
        assert isinstance(first.end().error, SystemExit)

    def test_slices_of_an_ended_caller(self, scope):
        """Its other slices are taken back; those it shared batches with are served."""
        seen = []

        def f(x):
            seen.append(x.ravel().tolist())
            if 1.0 in x:
                raise SystemExit
            return x

        split = {"enable_large_batch_splitting": True, "allowed_batch_sizes": [2]}
        first = start(function, f, rows(5), 8, **split)
        until(lambda: scope.stored() == 1)
        big = start(function, f, rows(1, 2, 3, 4, 6), 8, **split)
        assert isinstance(big.end().error, SystemExit)
        assert first.answer().tolist() == [[5.0]]
        assert scope.sweep() == 0

    def test_interrupt_of_a_waiting_main_thread(self):
        """Ctrl-C while the main thread leads a batch: it leaves, the others go on without it."""
        out = run_script("""
            import signal, threading, numpy as np, weft
            from weft import raw_ops

            seen, answers = [], []
            def f(x):
                seen.append(sorted(x.ravel().tolist()))
                return x

            def call(i):
                (y,) = raw_ops.BatchFunction([np.array([[float(i)]])], [], f, 1, 3, 20_000_000, ["float64"])
                answers.append(y.item())

            def others():
                while weft.sweep() < 1:
                    pass
                more = [threading.Thread(target=call, args=(i,)) for i in (1, 2, 3)]
                more[0].start()
                while weft.sweep() < 2:
                    pass
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                while weft.sweep() > 1:
                    pass
                more[1].start()
                more[2].start()
                for thread in more:
                    thread.join()

            partner = threading.Thread(target=others)
            partner.start()
            try:
                call(0)
            except KeyboardInterrupt:
                print("interrupted")
            partner.join()
            print(seen, sorted(answers), weft.sweep())
        """)
        assert out.split("\n")[:2] == ["interrupted", "[[1.0, 2.0, 3.0]] [1.0, 2.0, 3.0] 0"]


class TestNested:
    """Calls from inside f."""

    @pytest.mark.parametrize("slots", [1, 2])
    def test_on_the_same_queue(self, scope, slots):
        def f(x):
            if x.max() > 0:
                return function(f, x - 1, 4, num_batch_threads=slots, batch_timeout_micros=1000) + 1
            return x

        callers = [
            start(function, f, rows(i % 3), 4, num_batch_threads=slots, batch_timeout_micros=1000) for i in range(8)
        ]
        for i, caller in enumerate(callers):
            assert caller.answer().tolist() == [[i % 3]]
        assert scope.sweep() == 0

    def test_on_another_queue(self, scope):
        def outer(x):
            return function(np.negative, x, 1, shared_name="inner")

        assert start(function, outer, rows(3), 1, shared_name="outer").answer().tolist() == [[-3.0]]

    def test_batch_inside_a_function(self, scope):
        def f(x):
            b = batch(x, len(x), shared_name="inner")
            return unbatch(b.batched_tensors[0] + 1, b, shared_name="inner")

        callers = together([lambda i=i: function(f, rows(i), 4) for i in range(4)])
        assert [caller.answer().item() for caller in callers] == [1, 2, 3, 4]


# --- observers, warnings, priorities, sweeps, scopes ---


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
        assert all(os.path.basename(w.filename) == os.path.basename(__file__) for w in caught)

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


LOW = {
    "low_priority_max_batch_size": 8,
    "low_priority_batch_timeout_micros": 9000,
    "low_priority_max_enqueued_batches": 4,
}


class TestPriority:
    class Seen(list):
        """The batches a function saw."""

        def run(self, x):
            self.append(x.ravel().tolist())
            return -x

        __hash__ = object.__hash__

    @staticmethod
    def call(level, x, seen, **attributes):
        with weft.priority(level):
            return function(seen.run, x, 8, batch_timeout_micros=1000, **LOW | attributes)

    def play(self, clock, order, **attributes):
        seen = self.Seen()
        callers = [start_on(clock, self.call, level, rows(i), seen, **attributes) for i, level in enumerate(order)]
        clock.run_out()
        for i, caller in enumerate(callers):
            assert caller.answer().ravel().tolist() == [-i]
        return list(seen)

    def test_low_ones_fill_a_batch_of_high_ones(self, clock):
        assert self.play(clock, ["low", "high", "low", "high"]) == [[1, 3, 0, 2]]
        assert clock.now() == pytest.approx(0.001)

    def test_low_ones_alone_wait_for_their_own_timeout(self, clock):
        assert self.play(clock, ["low", "low"]) == [[0, 1]]
        assert clock.now() == pytest.approx(0.009)

    def test_isolation(self, clock):
        seen = self.play(clock, ["low", "high", "low", "high"], mixed_priority_policy="priority_isolation")
        assert seen == [[1, 3], [0, 2]]
        assert clock.now() == pytest.approx(0.009)

    def test_merge(self, clock):
        seen = self.play(clock, ["low", "high", "low"], mixed_priority_policy="priority_merge")
        assert seen == [[1, 0, 2]]
        assert clock.now() == pytest.approx(0.001)

    def test_merge_cuts_a_low_call(self, clock):
        """A low-priority call cut twice gets all its rows, in order."""
        attributes = {"mixed_priority_policy": "priority_merge", "enable_large_batch_splitting": True,
                      "allowed_batch_sizes": [3], "num_batch_threads": 2} | LOW  # fmt: skip

        def call(level, x):
            with weft.priority(level):
                return function(np.negative, x, 8, batch_timeout_micros=1000, **attributes)

        low = start_on(clock, call, "low", rows(1, 2))
        more = start_on(clock, call, "low", rows(*range(10, 18)))
        high = start_on(clock, call, "high", rows(9))
        clock.run_out()
        assert low.answer().ravel().tolist() == [-1, -2]
        assert more.answer().ravel().tolist() == [-i for i in range(10, 18)]
        assert high.answer().item() == -9
        assert weft.sweep() == 0

    def test_without_low_limits_all_are_alike(self, clock):
        seen = self.play(clock, ["low", "high"], low_priority_max_batch_size=0)
        assert seen == [[0, 1]]

    def test_the_innermost_counts_and_threads_have_their_own(self, clock):
        seen = self.Seen()
        with weft.priority("low"):
            caller = start_on(clock, self.call, "high", rows(1), seen)
            plain = start_on(clock, lambda: self.call("high", rows(2), seen))
        clock.run_out()
        caller.answer(), plain.answer()
        assert clock.now() == pytest.approx(0.001)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_many_threads(self, scope, policy):
        def call(i, policy):
            rng = np.random.default_rng(i)
            for _ in range(15):
                x = rng.random((int(rng.integers(1, 5)), 1))
                with weft.priority("low" if i % 2 else "high"):
                    y = function(
                        np.negative, x, 8, batch_timeout_micros=300, num_batch_threads=2, max_enqueued_batches=999,
                        low_priority_max_batch_size=6, low_priority_batch_timeout_micros=600,
                        low_priority_max_enqueued_batches=999, mixed_priority_policy=policy,
                        enable_large_batch_splitting=True, shared_name=policy,
                    )  # fmt: skip
                np.testing.assert_array_equal(y, -x)

        for caller in together([lambda i=i: call(i, policy) for i in range(12)]):
            caller.answer()
        assert scope.sweep() == 0


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
        outside = weft._resources.current_scope
        with pytest.raises(KeyError), weft.scope():
            raise KeyError
        assert weft._resources.current_scope is outside

    def test_observers_belong_to_it(self, clock):
        notes = Notes()
        with weft.observe(notes), weft.scope(clock):
            batch(rows(1), 1)
        assert notes.ran == []


# --- processes ---

WAITING = """
    import os, sys, threading, numpy as np, weft
    from weft import raw_ops

    NO_ROWS = np.empty((0, 3), np.int64)
    X = np.ones((1, 2))
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3600.0
    micros = int(min(seconds * 1e6, 2e9))
    weft.gradient_deadline(seconds)
    same = lambda x: x
    CALLS = [
        lambda: raw_ops.Batch([X], 1, 9, micros, 0),
        lambda: raw_ops.BatchFunction([X], [], same, 1, 9, micros, ["float64"]),
        lambda: raw_ops.Unbatch(X, NO_ROWS, 5, micros),
        lambda: raw_ops.UnbatchGrad(X, [[1, 0, 1], [2, 1, 1]], X, 1),
    ]

    def quietly(call):
        try:
            call()
        except TimeoutError:
            pass

    def start(daemon):
        for call in CALLS:
            threading.Thread(target=quietly, args=(call,), daemon=daemon).start()
        while weft.sweep() < len(CALLS):
            pass
"""


class TestProcesses:
    def test_fork_with_callers_waiting(self):
        out = run_script(
            WAITING
            + """
    start(daemon=True)
    child = os.fork()
    if child == 0:
        assert weft.sweep() == 0, "the parent's callers are not here"
        assert raw_ops.Batch([X], 1, 1, 0, 0).batched_tensors[0].shape == (1, 2)
        answers = []
        calls = [lambda: answers.append(raw_ops.BatchFunction([X], [], same, 1, 2, 10**7, ["float64"]))] * 2
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert [a[0].shape for a in answers] == [(1, 2)] * 2
        assert raw_ops.Unbatch(X, [[5, 0, 1]], 5, 0).shape == (1, 2)
        assert raw_ops.UnbatchGrad(X, [[1, 0, 1]], X, 1).shape == (1, 2)
        print("child", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert weft.sweep() == 4, "and still there in the parent"
    assert raw_ops.Unbatch(X, [[6, 0, 1]], 6, micros).shape == (1, 2)
    print("parent", flush=True)
    os._exit(0)
    """
        )
        assert out.split() == ["child", "parent"]

    def test_fork_inside_a_scope(self):
        out = run_script(
            WAITING
            + """
    start(daemon=True)
    with weft.scope():
        child = os.fork()
    if child == 0:
        assert weft.sweep() == 0
        assert raw_ops.Batch([X], 1, 1, 0, 0).batched_tensors[0].shape == (1, 2)
        print("child", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print("parent", flush=True)
    os._exit(0)
    """
        )
        assert out.split() == ["child", "parent"]

    def test_fork_while_others_are_at_it(self):
        """Forks at any moment: the child never finds a lock that nobody will release."""
        out = run_script("""
            import os, threading, numpy as np, weft
            from weft import raw_ops

            # What a first call imports is imported: Python itself cannot fork safely while another thread imports.
            x = np.ones((1, 1 << 15))
            raw_ops.Unbatch(raw_ops.Batch([x], 1, 1, 0, 0, shared_name="first").batched_tensors[0], [[1, 0, 1]], 1, 10**6)

            stop = threading.Event()
            def work(i):
                x = np.full((1, 1 << 15), float(i))
                while not stop.is_set():
                    b = raw_ops.Batch([x], 1, 4, 100, 0)
                    try:
                        raw_ops.Unbatch(b.batched_tensors[0], b.batch_index, b.id, 10**6)
                    except TimeoutError:
                        pass
                    raw_ops.BatchFunction([x], [], np.negative, 2, 3, 100, ["float64"], max_enqueued_batches=999)

            threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(6)]
            for thread in threads:
                thread.start()
            for _ in range(30):
                child = os.fork()
                if child == 0:
                    x = np.ones((1, 1 << 15))
                    b = raw_ops.Batch([x], 1, 4, 100, 0)
                    y = raw_ops.Unbatch(b.batched_tensors[0], b.batch_index, b.id, 10**6)
                    z = raw_ops.BatchFunction([x], [], np.negative, 2, 3, 100, ["float64"])
                    os._exit(0 if y.sum() == -z[0].sum() == 1 << 15 else 1)
                assert os.waitpid(child, 0)[1] == 0
            stop.set()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
            print("well")
        """)
        assert out.split() == ["well"]

    def test_fork_shares_no_result_memory(self):
        """Neither what a result holds nor what lies idle is common to parent and child."""
        out = run_script("""
            import os, numpy as np, weft
            from weft import raw_ops

            def large(value):
                return raw_ops.Batch([np.full((2, 1 << 16), value)], 1, 2, 0, 0).batched_tensors[0]

            kept, idle = large(1.0), large(2.0)
            del idle
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                kept[:] = 7.0
                mine = large(3.0)
                os.read(read, 1)
                os._exit(0 if mine.min() == mine.max() == 3.0 else 1)
            mine = large(4.0)
            os.write(write, b"x")
            assert os.waitpid(child, 0)[1] == 0, "the parent wrote into the child's result"
            print(kept.max(), mine.min(), mine.max())
        """)
        assert out.split() == ["1.0", "4.0", "4.0"]

    @pytest.mark.parametrize("daemon", [True, False])
    def test_exit_with_callers_waiting(self, daemon):
        """Daemon callers are left behind at once, others have their deadlines."""
        started = time.monotonic()
        out = run_script(WAITING + f"    start(daemon={daemon})\n    print('ends')", "3600" if daemon else "0.3")
        assert out.split() == ["ends"]
        assert time.monotonic() - started < 30

    def test_exit_while_daemons_run_functions(self):
        out = run_script("""
            import threading, time, numpy as np, weft
            from weft import raw_ops

            started = threading.Barrier(9)
            def work():
                x = np.ones((1, 4))
                started.wait()
                while True:
                    raw_ops.BatchFunction([x], [], np.negative, 2, 3, 100, ["float64"], max_enqueued_batches=999)

            for _ in range(8):
                threading.Thread(target=work, daemon=True).start()
            started.wait()
            for _ in range(100):
                raw_ops.BatchFunction([np.ones((1, 4))], [], np.negative, 2, 3, 100, ["float64"], max_enqueued_batches=999)
            print("ends")
        """)
        assert out.split() == ["ends"]


# --- all at once ---


class Soak:
    """Threads and event loops that do everything at once, and keep count."""

    def __init__(self, seconds, threads):
        self.end = time.monotonic() + seconds
        self.threads = threads
        self.served = self.failed = 0
        self.mutex = threading.Lock()

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
        while time.monotonic() < self.end:
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
            while time.monotonic() < self.end:
                await asyncio.gather(*(self.task(rng) for _ in range(10)))

        asyncio.run(main())

    def run(self):
        with warnings.catch_warnings(), weft.gradient_deadline(0.5), weft.scope() as scope:
            workers = [Caller(self.work, i) for i in range(self.threads)]
            workers += [Caller(self.loop, 10_000 + i) for i in range(max(1, self.threads // 50))]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.answer(self.end - time.monotonic() + 30)
            until(lambda: scope.sweep() == 0, 5)
            for resource in scope.resources.values():
                if hasattr(resource, "scheduler"):
                    until(lambda resource=resource: resource.scheduler.running == 0, 5)
                    assert resource.scheduler.waiting == 0


def memory():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_all_at_once():
    soak = Soak(seconds=1, threads=24)
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


def test_threads_are_woken_one_by_the_other():
    """Each wakes the next as it leaves; one that has left before its turn is passed over."""
    calls = [Pending() for _ in range(4)]
    for call in calls:
        call._begin(weft.SimulatedClock())
        call.waiter = Bell()
        call.done = True
    *wave, last = calls
    wave[1].wait()
    wake_all(wave, last.waiter)
    assert [call.waiter.locked() for call in calls] == [False, True, True, True]
    wave[0].wait()
    assert [call.waiter.locked() for call in calls] == [False, True, False, True]
    wave[2].wait()
    assert not last.waiter.locked()
