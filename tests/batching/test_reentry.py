"""Foreign code in the middle of ours: finalizers, closing coroutines and signal handlers that call weft, and exceptions anywhere.

The garbage collector and signals run foreign code in any thread, at almost any line: also while the thread holds the lock. Programs
that do this in a storm run in processes of their own: a hang is a failure there, not the end of the tests.
"""

from __future__ import annotations

import asyncio
import itertools
import linecache
import random
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from support.callers import run_script, start, until
from support.libraries import for_each

import weft
from weft import raw_ops
from weft.core.clock import MonotonicClock
from weft.core.lock import departed, lock, remove_departed
from weft.core.ticket import Ticket, innermost_calls
from weft.errors import CancelledError, FailedPreconditionError


def double(x):
    return x * 2


def function(x, **more):
    return raw_ops.BatchFunction([x], [], double, 1, 8, 0, [np.float64], shared_name="reentry", **more)[0]


class TestInsideTheLock:
    """What a finalizer gets that runs while its thread holds the lock."""

    def test_a_batcher_runs_the_call_alone(self):
        policy = weft.batched(double, max_batch_size=8)
        with lock:
            assert policy(np.ones(2)).tolist() == [2, 2]
        assert policy(np.ones(1)).tolist() == [2]

    def test_a_batch_function_runs_the_call_alone(self):
        with weft.scope(), lock:
            assert function(np.ones(2)).tolist() == [2, 2]

    def test_batch_gives_the_call_a_batch_of_its_own(self):
        with weft.scope(), lock:
            batch = raw_ops.Batch([np.ones((2, 3))], 1, 8, 10**9, 0)
        assert batch.batched_tensors[0].shape == (2, 3)
        assert batch.batch_index[:, 1:].tolist() == [[0, 2]]

    @pytest.mark.parametrize(
        "call",
        [
            lambda: raw_ops.Unbatch(np.ones((0, 1)), np.zeros((0, 3), np.int64), np.int64(7), 10**6),
            lambda: raw_ops.UnbatchGrad(
                np.ones((1, 1)), np.array([[7, 0, 1]]), np.ones((1, 1)), np.array(7)
            ),
            lambda: weft.batched(double, max_batch_size=8, max_wait=1.0)(np.ones(1)),
        ],
    )  # fmt: skip
    def test_what_would_wait_for_others_is_refused(self, call):
        with weft.scope(), lock, pytest.raises(FailedPreconditionError, match="finalizer or a signal handler"):
            call()

    def test_a_full_batch_need_not_wait(self):
        with lock:
            assert weft.batched(double, max_batch_size=2, max_wait=1.0)(np.ones(2)).tolist() == [2, 2]

    def test_a_backward_is_refused(self):
        torch = pytest.importorskip("torch")
        policy = weft.batched(torch.nn.Linear(1, 1), max_batch_size=2, max_wait=60.0)
        other = start(lambda: policy(torch.ones(1, 1)).sum().backward())
        y = policy(torch.ones(1, 1))
        with lock, pytest.raises(FailedPreconditionError, match="finalizer or a signal handler"):
            y.sum().backward()
        del y
        with pytest.raises(FailedPreconditionError):
            other.answer()

    def test_a_large_result(self):
        values = weft.RaggedTensor.from_row_splits(np.ones(1 << 18), np.arange(0, (1 << 18) + 1, 4))
        with lock:
            assert values.sum().sum() == 1 << 18

    def test_closing_is_refused(self):
        policy = weft.batched(double)
        with lock, pytest.raises(FailedPreconditionError, match="inside one of its own calls"):
            policy.close()
        policy.close()

    def test_a_task_that_is_given_up_leaves_when_the_lock_is_free(self):
        """A coroutine is closed by the collector, in a thread that holds the lock."""
        policy = weft.batched(double, max_batch_size=8, max_wait=60.0)
        loop = asyncio.new_event_loop()
        task = loop.create_task(policy.aio(np.ones(1)))
        loop.run_until_complete(asyncio.sleep(0))
        task._log_destroy_pending = False
        assert policy.statistics().waiting == 1
        loop.close()
        with lock:
            task.get_coro().close()
            assert policy.statistics().waiting == 1
            assert departed
        remove_departed()
        assert policy.statistics().waiting == 0
        assert not departed

    def test_sweeping_is_put_off(self):
        with weft.scope(weft.SimulatedClock()) as scope:
            function(np.ones(1))
            scope.clock.advance(600)
            with lock:
                scope.sweep()
            assert scope.next_expiry == scope.clock.now() + 1


class TestInsideACall:
    """A finalizer or a signal handler in a thread that waits: others may count on that thread."""

    def test_a_batcher_runs_the_call_alone(self):
        policy = weft.batched(double, max_batch_size=2, max_wait=9.0)
        with holding(policy._dispatcher):
            assert policy(np.ones(1)).item() == 2
        assert threading.get_ident() not in innermost_calls

    def test_a_batch_function_runs_the_call_alone(self):
        with weft.scope() as scope:
            function(np.ones(1))
            (dispatcher,) = scope.resources.values()
            with holding(dispatcher):
                assert function(np.ones(1)).item() == 2
        assert threading.get_ident() not in innermost_calls

    def test_another_batcher_is_not_concerned(self):
        """A function that calls another batcher shares that one's batches."""
        policy = weft.batched(double, max_batch_size=2, max_wait=9.0)
        with holding(weft.batched(double)._dispatcher):
            other = start(policy, np.ones(1))
            assert policy(np.ones(1)).item() == other.answer().item() == 2
        assert policy.statistics().sizes == {2: 1}


@contextmanager
def holding(dispatcher):
    """This thread waits for a call of `dispatcher`, as far as the dispatcher can tell."""
    outer = Ticket(MonotonicClock())
    outer.dispatcher = dispatcher
    outer.begin_inside()
    try:
        yield
    finally:
        outer.end_inside()


STORM = """
import asyncio, ctypes, gc, os, random, signal, sys, threading, time, weakref
import numpy as np, weft
from weft import raw_ops

kind, enough, seconds = sys.argv[1], float(sys.argv[2]), 3.0
least, least_inside = 100, int(sys.argv[3])
end = time.monotonic() + seconds
last = end + 60  # on a busy machine
policy = weft.batched(lambda x: x * 2, max_batch_size=8, deadline=10.0)
double = lambda x: x * 2

def function(x):
    return raw_ops.BatchFunction([x], [], double, 1, 8, 100, [np.float64], 10**6, shared_name="f")[0]

def chain(x):
    batch = raw_ops.Batch([x], 1, 8, 100, 0, shared_name="b")
    try:
        return 2 * raw_ops.Unbatch(batch.batched_tensors[0], batch.batch_index, batch.id, 10**6, shared_name="u")
    except (weft.errors.FailedPreconditionError, weft.errors.DeadlineExceededError):
        return 2 * x  # refused inside the lock, or whoever had the batch was interrupted

values, splits = np.ones(1 << 16), np.arange(0, (1 << 16) + 1, 4)
def large(x):
    assert weft.RaggedTensor.from_row_splits(values, splits).sum().shape == (1 << 14,)
    return 2 * x

shared = weft.TensorArray("float64", size=1, clear_after_read=False)._array
shared.write(0, np.ones(1))
def array(x):  # on a TensorArray that all threads read, and one of this call's own
    assert shared.read(0).item() == 1
    return weft.TensorArray().append(x).append(x).stack().sum(0)

calls = {"batched": policy, "function": function, "batch": chain, "large": large, "array": array}
served, wrong, inside = [0], [], [0]

def goes_on():  # until there were enough calls, or for some seconds in which there were the least
    now = time.monotonic()
    if now < end:
        return min(served[0] / 10, inside[0]) < enough
    return now < last and (served[0] < least or inside[0] < least_inside)

def ask(call, number):
    y = call(np.full(1, float(number)))
    if y.item() != 2 * number:
        wrong.append((number, y.item()))

def callers(call, count=3, each=lambda: None, ends=()):
    def work(number):
        while goes_on():
            try:
                ask(call, number)
                served[0] += 1
                each()
            except ends:
                inside[0] += 1
            except BaseException as error:
                wrong.append(repr(error))
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(1, count + 1)]
    for thread in threads:
        thread.start()
    return threads

def finish(threads):
    for thread in threads:
        thread.join(max(0, last - time.monotonic()) + 20)
        if thread.is_alive():
            import faulthandler
            faulthandler.dump_traceback()
            os._exit(3)
    assert not wrong, (len(wrong), wrong[:5])
    assert served[0] >= least, served
    assert inside[0] >= least_inside, inside
    assert not weft.core.lock.departed
"""


@pytest.fixture(params=["30", pytest.param("inf", marks=pytest.mark.slow)])
def storm(request):
    """Run a program until it made 30 calls from inside others and 10 times as many beside, or for 3 s.

    That it ends, gives right answers and made at least some calls is asserted in it.
    """

    def run(script: str, kind: str, *arguments: str, least: int = 20) -> None:
        run_script(STORM + "\n" + script, kind, request.param, str(least), *arguments, patience=120)

    return run


@pytest.mark.parametrize("kind", ["batched", "function"])
def test_event_loops_that_are_closed_with_calls_in_flight(storm, kind):
    script = """
def loops():
    asyncio.log.logger.disabled = True  # which says of each task that it was destroyed
    while goes_on():
        loop = asyncio.new_event_loop()
        if kind == "batched":
            task = loop.create_task(policy.aio(np.ones(1)))
        else:
            task = loop.create_task(
                weft.aio.BatchFunction([np.ones(1)], [], double, 1, 8, 100, [np.float64], 10**6, shared_name="f")
            )
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        del task, loop
        inside[0] += 1
closing = threading.Thread(target=loops)
closing.start()
finish([*callers(calls[kind], 2), closing])
"""
    storm(script, kind)


@for_each("kind", ["batched", "function", "batch", "large", "array"], slow=["function", "array"])
@for_each("how", ["__del__", "weakref"], slow=["weakref"])
def test_finalizers_that_call_with_a_collector_that_always_runs(storm, kind, how):
    script = """
large(np.ones(1))  # so that its kernels are compiled
end = time.monotonic() + seconds
gc.set_threshold(1, 1, 1)
kept = {}
class Finalized:
    def __init__(self):
        self.me = self
        if sys.argv[4] == "weakref":
            key = id(self)
            kept[key] = weakref.ref(self, lambda _: (kept.pop(key), self_made()))
    if sys.argv[4] == "__del__":
        def __del__(self):
            self_made()
def self_made():
    inside[0] += 1
    try:
        ask(calls[kind], 7)
    except weft.errors.FailedPreconditionError:
        pass
    except BaseException as error:
        wrong.append(repr(error))
def each():  # a thread that the collector runs in has all finalizers to itself: not too many of the slow ones
    if kind != "large" or served[0] % 50 == 0:
        Finalized()
least = 20
finish(callers(policy if kind == "large" else calls[kind], 3, each))
"""
    storm(script, kind, how, least=3)


@pytest.mark.parametrize("kind", ["batched", "function"])
def test_signal_handlers_that_call(storm, kind):
    script = """
def handler(*_):
    inside[0] += 1
    ask(calls[kind], 9)
    signal.setitimer(signal.ITIMER_REAL, 0.002)  # only now: on a busy machine a handler can take longer
signal.signal(signal.SIGALRM, handler)
threads = callers(calls[kind], 2)
signal.setitimer(signal.ITIMER_REAL, 0.002)
while goes_on():
    ask(calls[kind], 5)
signal.setitimer(signal.ITIMER_REAL, 0)
finish(threads)
"""
    storm(script, kind)


@for_each("kind", ["batched", "function", "batch"], slow=["batch"])
@for_each("base", ["Exception", "BaseException"], slow=["BaseException"])
def test_signal_handlers_that_raise(storm, kind, base):
    """Only the call fails that is interrupted, and nobody waits for it."""
    script = """
class Alarm({"Exception": Exception, "BaseException": BaseException}[sys.argv[4]]):
    pass
is_armed = False
def handler(*_):
    if is_armed:
        raise Alarm
signal.signal(signal.SIGALRM, handler)
threads = callers(calls[kind], 3)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
def call():
    global is_armed
    try:
        is_armed = True
        ask(calls[kind], 5)
        is_armed = False
    except Alarm:
        is_armed = False
        inside[0] += 1
while goes_on():
    try:
        call()
    except Alarm:
        is_armed = False
is_armed = False
signal.setitimer(signal.ITIMER_REAL, 0)
began = time.monotonic()
ask(calls[kind], 6)
assert time.monotonic() - began < 5
finish(threads)
"""
    storm(script, kind, base)


@for_each(("kind", "whom"), [("function", "callers"), ("batched", "workers"), ("batched", "callers")])
def test_asynchronous_exceptions(storm, kind, whom):
    """Raised in callers, and in a batcher's own threads, which are replaced; callers of BatchFunction run the batches."""
    script = """
class Hit(BaseException):
    pass
least = 50
raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
threads = callers(calls[kind], 3, ends=(Hit, weft.errors.CancelledError, weft.errors.UnknownError))
dice = random.Random(1)
while goes_on() and (time.monotonic() < end - 0.5 or inside[0] < least_inside):
    time.sleep(0.001)
    if sys.argv[4] == "callers":
        hit = [threads[dice.randrange(2)]]
    else:
        hit = [thread for thread in threading.enumerate() if thread.name.startswith("weft ") and thread.is_alive()]
    for thread in [thread for thread in hit if thread.is_alive()]:  # the number of one that ended may be another's
        raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(Hit))
        inside[0] += 1
finish(threads)
"""
    script = script.replace("threads = callers(", "threads = surviving(")
    script = (
        """
def surviving(call, count, ends):
    \"\"\"Callers that go on wherever they are hit.\"\"\"
    def work(number):
        while goes_on():
            try:
                while goes_on():
                    ask(call, number)
                    served[0] += 1
            except ends:
                pass
            except BaseException as error:
                wrong.append(repr(error))
    def outer(number):
        while goes_on():
            try:
                work(number)
            except ends:
                pass
    threads = [threading.Thread(target=outer, args=(i,), daemon=True) for i in range(1, count + 1)]
    for thread in threads:
        thread.start()
    return threads
"""
        + script
    )
    storm(script, kind, whom)


#: How lines begin at which the interpreter itself never raises: it has not called anything since the line before.
SINGLE_STEPS = ("with lock", "except", "departed.append", "run.is_begun = False")
FILES = (
    "batch_run.py",
    "batching/call.py",
    "dispatcher.py",
    "processing.py",
    "batching/queue.py",
    "scheduler.py",
    "ticket.py",
    "workers.py",
    "lock.py",
    "batcher.py",
    "submit.py",
    "function_op.py",
)


class Interrupt(BaseException):
    pass


class Bomb:
    """Interrupts the calling thread after so many steps in `FILES`, and again after so many more.

    A trace function that raises is removed, and so is a profile function: the first sets the second before it raises.
    """

    def __init__(self, *steps):
        self.steps = list(steps)

    def trace(self, frame, event, argument):
        file, line = frame.f_code.co_filename, frame.f_lineno
        if file.endswith(FILES) and not linecache.getline(file, line).strip().startswith(SINGLE_STEPS):
            self.step(sys.setprofile, self.profile)
        return self.trace

    def profile(self, frame, event, argument):
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(FILES):
            self.step(sys.settrace, self.trace)

    def step(self, set_next, function):
        if self.steps:
            self.steps[0] -= 1
            if self.steps[0] == 0:
                del self.steps[0]
                if self.steps:
                    set_next(function)
                raise Interrupt


@pytest.mark.parametrize("kind", ["batched", "function"])
@for_each("times", [1, 2, 3], slow=[3])
@pytest.mark.skipif(weft.is_compiled, reason="compiled modules cannot be interrupted line by line")
def test_an_interruption_at_every_line(kind, times, monkeypatch):
    """Only the interrupted call fails, nobody waits for it, and it leaves nothing behind; also if it is interrupted again."""
    monkeypatch.setattr("weft.batching.workers.IDLE_SECONDS", 600.0)  # nobody is found by a worker that ends
    dice = random.Random(times)
    policy = weft.batched(double, max_batch_size=4)
    call = policy if kind == "batched" else function
    call(np.ones(1))
    trace, hit = sys.gettrace(), 0
    for steps in range(1, 600):
        other = start(call, np.full(1, 4.0)) if steps % 2 else None
        try:
            sys.settrace(Bomb(steps, *(dice.randrange(1, 40) for _ in range(times - 1))).trace)
            try:
                call(np.ones(1))
            finally:
                sys.settrace(trace)
                sys.setprofile(None)
        except Interrupt:
            hit += 1
        assert start(call, np.full(1, 3.0)).answer().item() == 6
        assert other is None or other.answer().item() == 8
    assert hit > 100
    assert not departed
    assert threading.get_ident() not in innermost_calls
    if kind == "batched":
        until(lambda: policy.statistics().running == 0)
        assert policy.statistics().waiting == 0
        assert not policy._dispatcher._calls
        policy.close()


@for_each("steps", [range(40, 80, 5), range(1, 150)], slow=[range(1, 150)])
@pytest.mark.skipif(weft.is_compiled, reason="compiled modules cannot be interrupted line by line")
def test_two_interruptions_of_a_worker(steps, monkeypatch):
    """Each caller gets its answer, or an error that says that the thread of its batch was ended."""
    ended = 0
    monkeypatch.setattr("weft.core.ticket.HEARTBEAT", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def trace(*event):
        return bomb.trace(*event) if threading.current_thread().name.startswith("weft ") else None

    for first, second in itertools.product(steps, [1, 2, 3, 5, 8, 13, 21]):
        bomb = Bomb(first, second)
        policy = weft.batched(double, max_batch_size=2, max_wait=60.0)
        threading.settrace(trace)
        try:
            for i, caller in enumerate([start(policy, np.full(1, i)) for i in range(2)]):
                try:
                    assert caller.answer().item() == 2 * i
                except CancelledError:
                    ended += 1
            until(lambda policy=policy: not policy._dispatcher._runs)
        finally:
            threading.settrace(None)
            bomb.steps.clear()
        assert policy.statistics().running == policy.statistics().waiting == 0
        policy.close()
    assert ended > 50
    assert not departed
