"""Callers that fail, are interrupted or call from inside a function: nobody else pays for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.callers import run_script, start, together, until
from support.raw_calls import batch, function, rows, unbatch


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

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
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

            seen, answers, signals = [], [], []
            def f(x):
                seen.append(sorted(x.ravel().tolist()))
                return x

            def interrupt(*_):
                signals.append(1)
                if len(signals) == 1:
                    raise KeyboardInterrupt

            signal.signal(signal.SIGINT, interrupt)

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
                while weft.sweep() > 1:  # a signal just before the main thread falls asleep would not wake it
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
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
