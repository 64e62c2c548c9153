"""Processes that fork, end or are interrupted with callers waiting."""

from __future__ import annotations

import time

import pytest
from support.callers import run_script

WAITING = """
    import os, sys, threading, time, numpy as np, weft
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
        end = time.monotonic() + seconds
        for call in CALLS:
            threading.Thread(target=quietly, args=(call,), daemon=daemon).start()
        while weft.sweep() < len(CALLS) and time.monotonic() < end:  # on a busy machine the first may have ended
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
