"""Names that nobody uses are dropped, and no call is lost with them: see weft.core.named."""

from __future__ import annotations

import gc
import threading
import warnings

import numpy as np
import pytest
from support.callers import PATIENCE, start, start_on
from support.libraries import need, to
from support.raw_calls import LONG, NO_ROWS, batch, function, rows

import weft
from weft import raw_ops
from weft.batching import dispatcher as dispatcher
from weft.batching import queue_table, rendezvous
from weft.core import named
from weft.core import scope as _resources
from weft.core.arrays import dtype_of

MINUTE = 60.0
PAIR = np.array([[1, 0, 1], [2, 1, 1]])


def double(x):
    return x * 2


def full_batch(name, library="numpy"):
    assert batch(to(library, rows(1)), 1, shared_name=name).batch_index.shape == (1, 3)


def queued_batch(name, library="numpy"):
    given = {"num_batch_threads": 1, "batch_timeout_micros": 0, "grad_timeout_micros": 0}
    assert raw_ops.Batch([to(library, rows(1))], max_batch_size=2, shared_name=name, **given).batch_index.shape == (
        1,
        3,
    )


def batch_without_rows(name, library="numpy"):
    assert batch(to(library, rows()), shared_name=name).batch_index.shape == (0, 3)


def one_function(name, library="numpy"):
    x = to(library, rows(1))
    assert function(double, x, 1, [dtype_of(x)], shared_name=name).tolist() == [[2]]


def one_unbatch(name, library="numpy"):
    assert raw_ops.Unbatch(to(library, rows(1)), [[1, 0, 1]], 1, 1000, shared_name=name).tolist() == [[1]]


def piece_left(name, library="numpy"):
    assert raw_ops.Unbatch(to(library, rows(1, 2)), PAIR, 1, 1000, shared_name=name).tolist() == [[1]]


def one_gradient(name, library="numpy"):
    x = to(library, rows(1))
    assert raw_ops.UnbatchGrad(x, [[1, 0, 1]], x, 1, shared_name=name).tolist() == [[1]]


def gradient_left(name, library="numpy"):
    assert len(raw_ops.UnbatchGrad(to(library, rows()), NO_ROWS, to(library, rows(1)), 2, shared_name=name)) == 0


USES = [
    full_batch, queued_batch, batch_without_rows, one_function, one_unbatch, piece_left, one_gradient, gradient_left,
]  # fmt: skip
all_uses = pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)


def drop(resource, clock):
    resource.sweep(clock.now())
    _resources.current()._drop_idle(resource.key, resource, clock.now())
    assert resource.is_dropped


def resources():
    return _resources.current().resources


def in_memory():
    """How many queues and tables there are since the test began, in a scope or not."""
    kinds = (dispatcher.Dispatcher, rendezvous.PieceTable, rendezvous.GradientTable)
    return sum(isinstance(x, kinds) for x in gc.get_objects())


class TestDropped:
    def test_ten_thousand_names_used_once(self, clock, little_garbage):
        scope = _resources.current()
        for i in range(10_000):
            USES[i % len(USES)](str(i))
        assert len(scope.resources) == in_memory() == 10_000
        clock.advance(2 * MINUTE)
        assert weft.sweep() == 0
        assert (scope.resources, scope._warned) == ({}, set())
        gc.collect()
        assert in_memory() == 0

    @all_uses
    def test_any_call_drops_what_nobody_uses(self, clock, use, library):
        use("a", library)
        clock.advance(2 * MINUTE)
        full_batch("b")
        assert [key[-1] for key in resources()] == ["b"]

    @all_uses
    def test_a_name_can_be_used_again(self, clock, use, library):
        for _ in range(3):
            use("a", library)
            clock.advance(2 * MINUTE)
            assert weft.sweep() == 0
            assert not resources()

    def test_warnings_come_again(self, clock):
        for _ in range(2):
            full_batch("a")
            with pytest.warns(UserWarning, match="is ignored"):
                batch(rows(1), 1, shared_name="a", max_enqueued_batches=3)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                batch(rows(1), 1, shared_name="a", max_enqueued_batches=3)
            clock.advance(2 * MINUTE)
            weft.sweep()

    def test_a_sweep_a_minute_is_enough(self, clock):
        """Names come and go all the time: what is swept is not looked at for each of them."""
        scope, times = _resources.current(), []
        for i in range(600):
            full_batch(str(i))
            if scope.next_expiry not in times:
                times.append(scope.next_expiry)
            clock.advance(1.0)
        assert len(times) <= 11
        assert len(resources()) <= 121


class TestKept:
    @all_uses
    def test_for_a_minute(self, clock, use):
        use("a")
        clock.advance(MINUTE - 1)
        weft.sweep()
        assert [key[-1] for key in resources()] == ["a"]

    @pytest.mark.parametrize("use", [full_batch, queued_batch, one_function, one_unbatch, one_gradient])
    def test_as_long_as_it_is_used(self, clock, use):
        use("a")
        (kept,) = resources().values()
        for _ in range(20):
            clock.advance(MINUTE / 2)
            weft.sweep()
            use("a")
        assert list(resources().values()) == [kept]

    def test_while_a_call_waits_for_others(self, clock):
        first = start_on(clock, batch, rows(1), 2, shared_name="a", batch_timeout_micros=10 * LONG)
        clock.advance(5 * MINUTE)
        weft.sweep()
        second = start_on(clock, batch, rows(2), 2, shared_name="a", batch_timeout_micros=10 * LONG)
        clock.run_out()
        assert [len(caller.answer().batch_index) for caller in (first, second)] == [0, 2]

    def test_while_a_batch_runs_and_a_minute_from_then(self, clock):
        gate = threading.Event()

        def slow(x):
            gate.wait(PATIENCE)
            return x

        caller = start(function, slow, rows(1), 1, shared_name="a")
        while not resources() or not next(iter(resources().values())).scheduler.running:
            pass
        clock.advance(5 * MINUTE)
        weft.sweep()
        assert len(resources()) == 1
        gate.set()
        assert caller.answer().tolist() == [[1]]
        clock.advance(MINUTE - 1)
        weft.sweep()
        assert len(resources()) == 1
        clock.advance(2.0)
        weft.sweep()
        assert not resources()

    def test_while_a_caller_waits_for_its_piece(self, clock):
        minutes = 10 * LONG
        caller = start_on(clock, raw_ops.Unbatch, rows(), NO_ROWS, 2, minutes, shared_name="a")
        clock.advance(5 * MINUTE)
        weft.sweep()
        raw_ops.Unbatch(rows(1, 2), PAIR, 1, minutes, shared_name="a")
        clock.run_out()
        assert caller.answer().tolist() == [[2]]

    def test_while_a_piece_waits_for_its_caller(self, clock):
        minutes = 10 * LONG
        raw_ops.Unbatch(rows(1, 2), PAIR, 1, minutes, shared_name="a")
        clock.advance(5 * MINUTE)
        weft.sweep()
        assert raw_ops.Unbatch(rows(), NO_ROWS, 2, minutes, shared_name="a").tolist() == [[2]]

    def test_while_an_owner_waits_for_gradients(self, clock):
        with weft.gradient_deadline(10 * MINUTE):
            owner = start_on(clock, raw_ops.UnbatchGrad, rows(1, 2), PAIR, rows(5), 1, shared_name="a")
            clock.advance(5 * MINUTE)
            weft.sweep()
            raw_ops.UnbatchGrad(rows(), NO_ROWS, rows(6), 2, shared_name="a")
        clock.run_out()
        assert owner.answer().tolist() == [[5], [6]]

    def test_the_queue_of_a_batcher(self, clock):
        policy = weft.batched(double)
        for _ in range(3):
            assert policy(rows(1)).item() == 2
            clock.advance(10 * MINUTE)
            assert weft.sweep() == 0
            assert len(resources()) == 1
        del policy
        gc.collect()
        assert not resources()


class TestOnTheWay:
    """Calls that looked a name up before it was dropped and come to it only afterwards."""

    @all_uses
    def test_it_looks_again(self, clock, use, library):
        use("a", library)
        clock.advance(2 * MINUTE)
        ((key, old),) = resources().items()
        drop(old, clock)
        assert not resources()
        resources()[key], _resources.current().next_expiry = old, float("inf")  # as if it was looked up before
        use("a", library)
        assert resources()[key] is old
        assert not old.is_dropped or use in (full_batch, one_unbatch, batch_without_rows)  # which concern nobody else

    @pytest.mark.parametrize("library", ["numpy", "torch"])
    def test_two_meet_in_the_new_one(self, clock, library):
        """One has found the old queue, the other makes a new one: both wait in the new one."""
        need(library)
        given = {"num_batch_threads": 1, "batch_timeout_micros": LONG, "grad_timeout_micros": 0, "shared_name": "a"}
        late = raw_ops.Batch.begin(([to(library, rows(1))],), {"max_batch_size": 2, **given})
        (old,) = resources().values()
        clock.advance(2 * MINUTE)
        drop(old, clock)
        early = start_on(clock, batch, to(library, rows(2)), 2, shared_name="a")
        assert late.wait().batch_index[:, 1:].tolist() == [[0, 1], [1, 1]]
        assert early.answer().batch_index.shape == (0, 3)
        assert list(resources().values()) == [late.dispatcher] != [old]

    def test_a_piece_and_its_caller_meet_in_the_new_one(self, clock):
        late = raw_ops.Unbatch.begin((rows(), NO_ROWS, 2, LONG), {"shared_name": "a"})
        (old,) = resources().values()
        clock.advance(2 * MINUTE)
        drop(old, clock)
        late.now = clock.now()
        raw_ops.Unbatch(rows(1, 2), PAIR, 1, LONG, shared_name="a")
        assert late.wait().tolist() == [[2]]
        assert list(resources().values()) != [old]

    def test_a_generator_of_tensors_is_read_once(self, clock):
        queued_batch("a")
        clock.advance(2 * MINUTE)
        (old,) = resources().values()
        drop(old, clock)
        given = {"num_batch_threads": 1, "batch_timeout_micros": 0, "grad_timeout_micros": 0, "shared_name": "a"}
        made = raw_ops.Batch((x for x in [rows(1), rows(5)]), max_batch_size=2, **given)
        assert [x.tolist() for x in made.batched_tensors] == [[[1]], [[5]]]

    @pytest.mark.parametrize("rounds", [300, pytest.param(5000, marks=pytest.mark.slow)])
    def test_companions_are_never_split(self, monkeypatch, rounds):
        """Everything that is empty is dropped at once, again and again, while pairs of calls meet."""
        monkeypatch.setattr(named, "IDLE_SECONDS", 0.0)
        monkeypatch.setattr(queue_table, "IDLE_QUEUE_SECONDS", 0.0)
        stop, dropped = threading.Event(), set()

        def sweep(scope):
            while not stop.is_set():
                before = list(scope.resources.values())
                scope.sweep()
                dropped.update(id(x) for x in before if x not in list(scope.resources.values()))

        def pair(body):
            wrong = []

            def run(i):
                for _ in range(rounds):
                    barrier.wait(PATIENCE)
                    got = body(i)
                    if not got:
                        wrong.append(got)

            barrier = threading.Barrier(2)
            return [start(run, i) for i in range(2)], wrong

        def batches(i):
            made = batch(rows(i), 2, shared_name="a")
            return len(made.batch_index) in (0, 2)

        def functions(i):
            return function(double, rows(i), 2, shared_name="a").tolist() == [[2 * i]]

        def pieces(i):
            if i:
                return raw_ops.Unbatch(rows(), NO_ROWS, 2, LONG, shared_name="a").tolist() == [[2]]
            return raw_ops.Unbatch(rows(1, 2), PAIR, 1, LONG, shared_name="a").tolist() == [[1]]

        def gradients(i):
            if i:
                return len(raw_ops.UnbatchGrad(rows(), NO_ROWS, rows(6), 2, shared_name="a")) == 0
            return raw_ops.UnbatchGrad(rows(1, 2), PAIR, rows(5), 1, shared_name="a").tolist() == [[5], [6]]

        with weft.scope() as scope:
            sweeper = start(sweep, scope)
            pairs = [pair(body) for body in (batches, functions, pieces, gradients)]
            try:
                for callers, _ in pairs:
                    for caller in callers:
                        caller.answer(3 * PATIENCE)
            finally:
                stop.set()
            sweeper.answer()
            assert [wrong for _, wrong in pairs] == [[]] * 4
            assert dropped
