"""Arrays that change while their call waits, and observers that come while a batch runs."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support.callers import PATIENCE, run_script, start, until
from support.libraries import need

import weft
from weft import raw_ops
from weft.errors import InvalidArgumentError


def double(x):
    return x * 2


def resize(x, rows):
    """Change the number of rows of an array in its place."""
    if isinstance(x, np.ndarray):
        x.resize((rows, *x.shape[1:]), refcheck=False)
    else:
        x.resize_(rows, *x.shape[1:])


def array(library, *values):
    x = np.array(values, np.float64).reshape(-1, 1).copy()
    if library == "numpy":
        return x
    import torch

    return torch.from_numpy(x).clone()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("sizes", [(), (8, 16)], ids=["plain", "padded"])
@pytest.mark.parametrize("rows", [1, 3, 0])
class TestResized:
    """Only the call fails whose array was resized: the others get their own rows."""

    def test_in_a_batcher(self, library, sizes, rows):
        need(library)
        policy = weft.batched(double, max_batch_size=16, max_wait=60.0, allowed_batch_sizes=sizes, on_error="share")
        first, guilty, last = array(library, 1, 2), array(library, 3, 4), array(library, 5, 6)
        callers = [start(policy, x) for x in (first, guilty, last)]
        until(lambda: policy.statistics().waiting == 3)
        resize(guilty, rows)
        callers.append(start(policy, array(library, *range(10))))
        assert [callers[i].answer().ravel().tolist() for i in (0, 2)] == [[2, 4], [10, 12]]
        assert callers[3].answer().ravel().tolist() == [2 * i for i in range(10)]
        with pytest.raises(InvalidArgumentError, match="must keep their shape until it is answered"):
            callers[1].answer()

    @pytest.mark.parametrize("op", ["Batch", "BatchFunction"])
    def test_in_an_op(self, library, sizes, rows, op):
        need(library)
        with weft.scope() as scope:
            more = {"allowed_batch_sizes": sizes, "shared_name": "a"}

            def call(x):
                if op == "Batch":
                    return raw_ops.Batch([x], 1, 16, 10**9, 0, **more)
                return raw_ops.BatchFunction([x], [], double, 1, 16, 10**9, ["float64"], **more)[0]

            xs = [array(library, 1, 2), array(library, 3, 4), array(library, 5, 6)]
            callers = []
            for x in xs:
                callers.append(start(call, x))
                until(lambda: scope.stored() == len(callers))
            resize(xs[1], rows)
            callers.append(start(call, array(library, *range(10))))
            if library == "torch":  # the op has a tensor of its own, over the same memory, that keeps its shape
                assert [caller.end().error for caller in callers] == [None] * 4
                return
            with pytest.raises(InvalidArgumentError, match="must keep their shape until it is answered"):
                callers[1].answer()
            answers = [callers[i].answer() for i in (0, 2, 3)]
            if op == "BatchFunction":
                assert [y.ravel().tolist() for y in answers] == [[2, 4], [10, 12], [2 * i for i in range(10)]]
            else:
                (batch,) = [answer for answer in answers if len(answer.batch_index)]
                assert batch.batch_index[:, 1:].tolist() == [[0, 2], [2, 2], [4, 10]]
                assert batch.batched_tensors[0].ravel().tolist()[:14] == [1, 2, 5, 6, *range(10)]


class Seen:
    def __init__(self):
        self.events = []

    def batch_ran(self, event):
        self.events.append(event)

    def call_refused(self, *event):
        self.events.append(event)


@pytest.mark.parametrize("kind", ["batched", "function"])
def test_an_observer_that_comes_while_a_batch_runs_is_not_told_of_it(kind):
    """When it began is not known: it is told of the next one, with true times."""
    began, go = threading.Event(), threading.Event()

    def slow(x):
        began.set()
        assert go.wait(PATIENCE)
        return x

    with weft.scope():
        policy = weft.batched(slow)

        def call():
            x = np.ones((1, 1))
            return policy(x) if kind == "batched" else raw_ops.BatchFunction([x], [], slow, 1, 1, 0, ["float64"])

        first = start(call)
        assert began.wait(PATIENCE)
        with weft.observe(Seen()) as seen:
            go.set()
            first.answer()
            assert seen.events == []
            call()
            (event,) = seen.events
            assert 0 <= event.waits[0] < PATIENCE
            assert 0 <= event.seconds < PATIENCE


class TestExit:
    """The interpreter ends while daemon threads call."""

    @pytest.mark.parametrize("kind", ["batched", "function", "unbatch"])
    def test_it_takes_no_longer_than_a_moment(self, kind):
        script = """
        import sys, threading, time
        import numpy as np, weft
        from weft import raw_ops
        policy = weft.batched(lambda x: (time.sleep(0.01), x)[1], max_batch_size=4)
        def call(kind):
            x = np.ones((1, 1))
            if kind == "batched":
                policy(x)
            elif kind == "function":
                raw_ops.BatchFunction([x], [], lambda y: y, 1, 4, 1000, ["float64"], 10**6)
            else:
                raw_ops.Unbatch(x[:0], np.zeros((0, 3), np.int64), np.array(threading.get_ident()), 10**9)
        def work():
            while True:
                try:
                    call(sys.argv[1])
                except weft.errors.CancelledError as error:
                    assert "ending" in str(error)
                    if sys.argv[1] == "batched":
                        return  # the others call again and again
        for _ in range(16):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.2)
        print(time.monotonic())
        """
        ending = float(run_script(script, kind))
        assert time.monotonic() - ending < 8

    def test_the_main_thread_can_call_to_the_end(self):
        script = """
        import atexit
        atexit.register(lambda: print(policy(np.ones(1)).item()))  # runs after weft's own, which is registered later
        import numpy as np, weft
        policy = weft.batched(lambda x: x * 2)
        """
        assert run_script(script) == "2.0\n"
