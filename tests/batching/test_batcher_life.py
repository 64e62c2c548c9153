"""The end of callers, of batchers and of the interpreter: nobody else is harmed, and nothing hangs."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading

import numpy as np
import pytest
from support.batched_calls import FULL, Model, held, rows, waiting
from support.callers import run_script, start, together, until

import weft
from weft.batching.workers import IDLE_SECONDS, WorkerPool
from weft.core.clock import MonotonicClock
from weft.core.lock import lock
from weft.errors import CancelledError, DeadlineExceededError, FailedPreconditionError, InvalidArgumentError


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


def interrupt(caller, kind=KeyboardInterrupt):
    """Have `kind` raised in a caller's thread, as soon as it runs Python."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(caller.ident), ctypes.py_object(kind)) == 1


class TestInterrupted:
    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
    def test_whoever_runs_its_own_batch(self, kind):
        def f(x):
            if x.flat[0] < 0:
                raise kind
            return x * 2

        policy = weft.batched(f)
        with pytest.raises(kind):
            policy(rows(-1))
        assert policy(rows(1)).item() == 2
        assert policy.statistics().running == 0

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
    def test_a_function_that_ends_its_thread_is_told_to_all(self, kind):
        calls = []

        def f(x):
            calls.append(len(x))
            if len(x) > 1:
                raise kind
            return x * 2

        policy = weft.batched(f, max_batch_size=4, **FULL)
        callers = together([lambda i=i: policy(rows(i)) for i in range(4)])
        kinds = {type(caller.error) for caller in callers}
        assert kinds <= {CancelledError, kind}
        assert all(caller.error is not None for caller in callers)
        assert weft.batched(f)(rows(1)).item() == 2

    def test_one_that_waits_leaves(self):
        model = Model()
        policy = weft.batched(model)
        first = held(policy, model)
        gone, kept = start(policy, rows(1)), start(policy, rows(2))
        waiting(policy, 2)
        interrupt(gone)
        until(lambda: not gone.is_alive() or model.gate.set())
        assert kept.answer().item() == 4
        first.answer()
        assert gone.end().error is None or isinstance(gone.error, KeyboardInterrupt)

    @pytest.mark.parametrize("how", ["__call__", "vjp"])
    def test_between_the_queue_and_the_wait(self, monkeypatch, how):
        """An interrupt may come right after a call has entered: a batch that was given to it must not be lost."""
        policy = weft.batched(lambda x: x * 2, vjp=lambda x: (x * 2, lambda g: g * 2))
        submit = policy._submit

        def interrupted(*args, **kwargs):
            submit(*args, **kwargs)
            raise KeyboardInterrupt

        monkeypatch.setattr(policy, "_submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(policy, how)(rows(1))
        monkeypatch.undo()
        assert start(policy, rows(2)).answer().item() == 4
        assert policy.statistics().running == 0


class TestCancelled:
    def test_before_the_batch_runs(self):
        async def main():
            tasks = [asyncio.create_task(policy.aio(rows(i))) for i in range(3)]
            while policy.statistics().waiting < 3:
                await asyncio.sleep(0)
            tasks[1].cancel()
            tasks += [asyncio.create_task(policy.aio(rows(i))) for i in (3, 4)]
            return await asyncio.gather(*tasks, return_exceptions=True)

        model = Model()
        policy = weft.batched(model, max_batch_size=4, **FULL)
        got = asyncio.run(main())
        assert isinstance(got[1], asyncio.CancelledError)
        assert [got[i].item() for i in (0, 2, 3, 4)] == [0, 4, 6, 8]
        assert model.sizes == [4]

    def test_while_it_runs(self):
        async def main():
            tasks = [asyncio.create_task(policy.aio(rows(i))) for i in range(2)]
            while not model.inside:
                await asyncio.sleep(0)
            tasks[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            model.gate.set()
            return await tasks[1]

        model = Model()
        model.gate.clear()
        policy = weft.batched(model, max_batch_size=2, **FULL)
        assert asyncio.run(main()).item() == 2

    def test_all_of_a_batch(self):
        async def main():
            tasks = [asyncio.create_task(policy.aio(rows(i))) for i in range(2)]
            while policy.statistics().waiting < 2:
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        model = Model()
        policy = weft.batched(model, max_batch_size=3, **FULL)
        asyncio.run(main())
        assert policy.statistics().waiting == 0
        assert model.sizes == []
        together([lambda i=i: policy(rows(i)) for i in range(3)])
        assert model.sizes == [3]

    def test_loops_that_stop_with_calls_waiting(self):
        async def main():
            task = asyncio.create_task(policy.aio(rows(0)))
            while policy.statistics().waiting < 1:
                await asyncio.sleep(0)
            return task.done()

        policy = weft.batched(Model(), max_batch_size=2, **FULL)
        assert not asyncio.run(main())
        callers = together([lambda i=i: policy(rows(i)) for i in (1, 2)])
        assert [c.answer().item() for c in callers] == [2, 4]


class TestClose:
    def test_drains(self):
        model = Model()
        policy = weft.batched(model)
        first = held(policy, model)
        callers = [start(policy, rows(i)) for i in range(3)]
        waiting(policy, 3)
        closing = start(policy.close)
        until(lambda: policy._closed)
        model.gate.set()
        closing.answer()
        first.answer()
        assert sorted(c.answer().item() for c in callers) == [0, 2, 4]

    def test_rejects(self):
        model = Model()
        policy = weft.batched(model)
        first = held(policy, model)
        callers = [start(policy, rows(i)) for i in range(3)]
        waiting(policy, 3)
        closing = start(policy.close, drain=False)
        for caller in callers:
            with pytest.raises(CancelledError, match="was closed"):
                caller.answer()
        assert len({id(c.error) for c in callers}) == 3
        assert closing.is_alive()
        model.gate.set()
        closing.answer()
        first.answer()
        assert model.sizes == [1]

    def test_waits_no_longer_than_it_is_told(self):
        model = Model()
        policy = weft.batched(model)
        first = held(policy, model)
        with pytest.raises(DeadlineExceededError, match=r"still runs after 0.01 s"):
            policy.close(timeout=0.01)
        model.gate.set()
        first.answer()
        policy.close()

    def test_a_wrong_timeout_closes_nothing(self):
        policy = weft.batched(lambda x: x)
        with pytest.raises(InvalidArgumentError):
            policy.close(timeout=0)
        assert policy(rows(1)).item() == 1

    def test_twice_and_as_a_block(self):
        with weft.batched(lambda x: x * 2) as policy:
            assert policy(rows(1)).item() == 2
        policy.close()
        with pytest.raises(CancelledError):
            policy(rows(1))

    def test_by_its_own_function_is_refused(self):
        def f(x):
            policy.close()
            return x

        policy = weft.batched(f)
        with pytest.raises(FailedPreconditionError, match="cannot be closed from inside one of its own calls"):
            policy(rows(1))

    def test_with_tasks_waiting_in_the_very_loop(self):
        async def main():
            tasks = [asyncio.create_task(policy.aio(rows(i))) for i in range(3)]
            while policy.statistics().waiting < 3:
                await asyncio.sleep(0)
            policy.close(drain=drain)
            return await asyncio.gather(*tasks, return_exceptions=True)

        for drain in (True, False):
            policy = weft.batched(lambda x: x * 2, **FULL)
            got = asyncio.run(main())
            if drain:
                assert [y.item() for y in got] == [0, 2, 4]
            else:
                assert [type(y) for y in got] == [CancelledError] * 3

    def test_racing_with_callers(self):
        for drain in (True, False) * 10:
            policy = weft.batched(lambda x: x * 2)

            def call(policy=policy):
                answers = 0
                while True:
                    try:
                        assert policy(rows(1)).item() == 2
                        answers += 1
                    except CancelledError:
                        return answers

            callers = [start(call) for _ in range(4)]
            policy.close(drain=drain)
            for caller in callers:
                assert caller.answer() >= 0
            assert (policy.statistics().waiting, policy.statistics().running) == (0, 0)

    def test_a_split_call_that_is_refused_leaves_its_runs_to_others(self):
        model = Model()
        policy = weft.batched(model, max_batch_size=2, split=True)
        first = held(policy, model)
        big, small = start(policy, np.ones((5, 1))), start(policy, rows(1))
        waiting(policy, 4)
        closing = start(policy.close, drain=False)
        assert isinstance(big.end().error, CancelledError)
        assert isinstance(small.end().error, CancelledError)
        model.gate.set()
        first.answer()
        closing.answer()


class TestInside:
    """A batched function that calls itself."""

    def test_is_run_by_itself(self):
        def f(x):
            return x if len(x) == 1 else np.concatenate([policy(x[:1]), policy(x[1:])]) + 1

        policy = weft.batched(f, max_batch_size=4)
        assert start(policy, rows(0, 0, 0)).answer().ravel().tolist() == [1, 2, 2]

    def test_with_others_waiting(self):
        def f(x):
            if x.flat[0] == 0:
                return policy(x + 1)
            return x * 10

        policy = weft.batched(f, max_batch_size=3, **FULL)
        callers = together([lambda: policy(rows(0))] * 3)
        assert [c.answer().item() for c in callers] == [10] * 3

    def test_in_a_task_of_a_loop_of_its_own(self):
        def f(x):
            return asyncio.run(policy.aio(x - 1)) if x.flat[0] > 0 else x

        policy = weft.batched(f)
        assert start(policy, rows(1)).answer().item() == 0

    def test_two_functions_that_call_each_other(self):
        even = weft.batched(lambda x: x if x.flat[0] <= 0 else odd(x - 1))
        odd = weft.batched(lambda x: even(x - 1))
        assert start(even, rows(4)).answer().item() == 0

    def test_while_it_is_being_closed(self):
        def f(x):
            model(x)
            return policy(x - 1) if x.flat[0] > 0 else x

        model = Model()
        policy = weft.batched(f)
        caller = held(policy, model, rows(2))
        closing = start(policy.close)
        until(lambda: policy._closed)
        model.gate.set()
        assert caller.answer().item() == 0
        closing.answer()


class TestProcesses:
    def test_fork_with_callers_waiting(self):
        model = Model()
        policy = weft.batched(model)
        first = held(policy, model)
        other = start(policy, rows(1))
        waiting(policy, 1)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                model.gate.set()
                ok = policy(rows(3)).item() == 6 and policy.statistics().calls == 1
                ok = ok and asyncio.run(policy.aio(rows(4))).item() == 8
                os.write(writing, b"1" if ok else b"0")
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(reading, 1) == b"1"
        os.close(reading)
        os.close(writing)
        model.gate.set()
        first.answer()
        assert other.answer().item() == 2

    def test_fork_inside_the_function(self):
        def f(x):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = 0 if np.array_equal(doubled(x), x * 2) else 2
                finally:
                    os._exit(code)
            return x + os.waitpid(child, 0)[1]

        doubled = weft.batched(lambda x: x * 2)
        assert weft.batched(f)(rows(1)).item() == 1

    def test_the_interpreter_ends_with_callers_waiting(self):
        script = """
        import threading, numpy as np, weft
        entered = threading.Event()
        def f(x):
            entered.set()
            threading.Event().wait(0.2)
            return x * 2
        policy = weft.batched(f)
        def call():
            print(policy(np.ones(1)).item(), flush=True)
        threads = [threading.Thread(target=call) for _ in range(4)]
        daemons = [threading.Thread(target=policy, args=(np.ones(2),), daemon=True) for _ in range(2)]
        for thread in threads + daemons:
            thread.start()
        entered.wait()
        """
        assert run_script(script).count("2.0") == 4

    def test_a_thread_at_work_when_the_interpreter_ends_waits_for_no_more(self):
        pool, ending = WorkerPool(1, MonotonicClock(), "test"), []

        class Last:
            def run(self):
                ending.extend(pool.close())

        with lock:
            woken = pool.give(Last())
        for each in woken:
            each.wake()
        until(lambda: ending)
        ending[0].join(IDLE_SECONDS / 2)
        assert not ending[0].is_alive()

    def test_without_threads_left_the_caller_does_the_work(self, monkeypatch):
        def start_new_thread(*_):
            raise RuntimeError("can't start new thread")

        policy = weft.batched(lambda x: x * 2, max_batch_size=2)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_new_thread)
            assert [policy(np.full(1, i)).tolist() for i in range(20)] == [[2 * i] for i in range(20)]
            assert asyncio.run(policy.aio(np.ones(1))).tolist() == [2]
        assert policy(np.ones(1)).tolist() == [2]
        policy.close(timeout=5)

    def test_a_thread_that_is_lost_at_its_birth_is_replaced(self, monkeypatch):
        """As an asynchronous exception can do it: `Thread.start` waits for a sign that never comes."""
        bootstrap, lost = threading.Thread._bootstrap, []

        def _bootstrap(self):
            if lost:
                bootstrap(self)
            else:
                lost.append(self)

        policy = weft.batched(lambda x: x * 2, max_batch_size=2)
        monkeypatch.setattr(threading.Thread, "_bootstrap", _bootstrap)
        assert asyncio.run(policy.aio(np.ones(1))).tolist() == [2]
        assert lost

    def test_the_interpreter_ends_while_a_function_never_does(self):
        script = """
        import threading, numpy as np, weft
        entered = threading.Event()
        def f(x):
            entered.set()
            threading.Event().wait()
        policy = weft.batched(f)
        threading.Thread(target=policy, args=(np.ones(2),), daemon=True).start()
        entered.wait()
        print("end")
        """
        assert run_script(script) == "end\n"

    def test_the_end_of_daemon_threads_is_not_reported(self):
        script = """
        import threading, time, numpy as np, weft
        threading.excepthook = lambda args: print(args.exc_type.__name__, flush=True)
        entered = threading.Event()
        policy = weft.batched(lambda x: (entered.set(), threading.Event().wait()))
        def call():
            policy(np.ones(1))
        def translate():
            try:
                call()
            except weft.errors.CancelledError:
                raise ValueError
        threading.Thread(target=call, daemon=True).start()
        entered.wait()
        for each in (call, translate):
            threading.Thread(target=each, daemon=True).start()
        while policy.statistics().waiting < 2:
            time.sleep(0.001)
        """
        assert run_script(script) == "ValueError\n"

    def test_calls_in_an_atexit_handler(self):
        script = """
        import asyncio, atexit, numpy as np
        def late():
            print(policy(np.ones(1)).item())
        atexit.register(late)
        import weft
        policy = weft.batched(lambda x: x * 2)
        policy(np.ones(1))
        """
        assert run_script(script) == "2.0\n"


def test_threads_cannot_be_started(monkeypatch):
    """Where there is no thread to be had, callers do the work."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    model = Model()
    policy = weft.batched(model)
    first = held(policy, model)
    callers = [start(policy, rows(i)) for i in range(3)]
    waiting(policy, 3)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    model.gate.set()
    first.answer()
    assert [c.answer().item() for c in callers] == [0, 2, 4]
    assert model.sizes == [1, 3]


class TestAsyncClose:
    def test_async_with(self):
        async def main():
            async with weft.batched(Model(), max_batch_size=2, **FULL) as policy:
                calls = [asyncio.ensure_future(policy.aio(rows(i))) for i in range(3)]
                await asyncio.sleep(0)
            # At the end of the block the last call has run although its batch is not full.
            assert [(await call).item() for call in calls] == [0, 2, 4]
            with pytest.raises(CancelledError, match="is closed"):
                await policy.aio(rows(1))

        asyncio.run(main())

    def test_the_loop_goes_on_meanwhile(self):
        model = Model()
        policy = weft.batched(model)
        first = held(policy, model)

        async def main():
            closing = asyncio.ensure_future(policy.aclose())
            await asyncio.sleep(0)
            assert not closing.done()
            model.gate.set()
            await closing

        asyncio.run(main())
        assert first.answer().item() == -2

    def test_its_timeout(self):
        model = Model()
        policy = weft.batched(model)
        first = held(policy, model)
        with pytest.raises(DeadlineExceededError, match=r"a batch still runs after 0\.01 s"):
            asyncio.run(policy.aclose(timeout=0.01))
        model.gate.set()
        assert first.answer().item() == -2

    def test_without_draining(self):
        async def main():
            policy = weft.batched(Model(), **FULL)
            call = asyncio.ensure_future(policy.aio(rows(1)))
            await asyncio.sleep(0)
            await policy.aclose(drain=False)
            with pytest.raises(CancelledError, match="was closed"):
                await call

        asyncio.run(main())
