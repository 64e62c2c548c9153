"""Event loops that stop, executors that are full, functions that end their task, and interpreters that end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.aio_calls import Held, attributes_of, batch, begin, function, in_thread, rows, run, same, unbatch
from support.callers import PATIENCE, run_script, start, until

from weft import raw_ops

pytestmark = pytest.mark.usefixtures("scope")


# --- loops that stop ---


class Stopped:
    """A loop with a task waiting in it, that nobody runs any more."""

    def __init__(self, coroutine, loop=None):
        self.loop = loop or asyncio.new_event_loop()
        self.task = self.loop.create_task(coroutine)
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    def finish(self):
        """Run it again, and see what the task gets."""
        try:
            return self.loop.run_until_complete(asyncio.wait_for(self.task, PATIENCE))
        finally:
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


def test_a_stopped_leader_does_not_block_threads(scope):
    stopped = Stopped(function(same, rows(1), 5, batch_timeout_micros=20_000))
    thread = in_thread(same, rows(2), 5, batch_timeout_micros=20_000)
    assert thread.answer(5)[0].tolist() == [[2.0]]
    assert stopped.finish()[0].tolist() == [[1.0]]
    assert scope.sweep() == 0


def test_a_stopped_leader_does_not_block_another_loop(scope):
    stopped = Stopped(function(same, rows(1), 5, batch_timeout_micros=20_000))
    assert run(function(same, rows(2), 5, batch_timeout_micros=20_000))[0].tolist() == [[2.0]]
    assert stopped.finish()[0].tolist() == [[1.0]]


def test_a_stopped_task_that_is_last_does_not_block_threads(scope):
    """The batch becomes ready while the only slot is busy: it must not be given to a task that never looks."""
    f = Held()
    blocker = in_thread(f, rows(0), 2, batch_timeout_micros=0)
    f.wait()
    thread = in_thread(f, rows(1), 2, batch_timeout_micros=0)
    until(lambda: scope.stored() == 1)
    stopped = Stopped(function(f, rows(2), 2, batch_timeout_micros=0))
    f.go.set()
    blocker.answer()
    assert thread.answer(5)[0].tolist() == [[1.0]]
    assert in_thread(f, rows(3), 2, batch_timeout_micros=0).answer(5)[0].tolist() == [[3.0]]
    assert stopped.finish()[0].tolist() == [[2.0]]
    assert scope.sweep() == 0


def test_a_stopped_loop_with_a_run_in_hand_does_not_block_the_queue(scope):
    """All callers of a batch are tasks of a loop that stopped: later callers are served all the same."""
    f = Held()
    blocker = in_thread(f, rows(0), 1)
    f.wait()
    stopped = Stopped(function(f, rows(2), 1))
    f.go.set()
    blocker.answer()
    later = in_thread(f, rows(3), 1)
    try:
        assert later.answer(5)[0].tolist() == [[3.0]]
    finally:
        assert stopped.finish()[0].tolist() == [[2.0]]


@pytest.mark.usefixtures("little_garbage")
def test_a_closed_loop_is_forgotten(scope):
    """A loop closed with a task still waiting, not cancelled: those who come after are served."""
    loop = asyncio.new_event_loop()
    stopped = Stopped(function(same, rows(1), 3, batch_timeout_micros=20_000), loop)
    loop.close()
    thread = in_thread(same, rows(2), 3, batch_timeout_micros=20_000)
    assert thread.answer(5)[0].tolist() == [[2.0]]
    stopped.task._log_destroy_pending = False
    del stopped
    gc.collect()
    assert scope.sweep() == 0


# --- executors, interrupts, exits ---


def test_callers_that_fill_the_loops_executor(scope):
    """Threads of the loop's own executor all wait for the batch that a task is to run."""
    workers = 3

    async def main():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(workers))
        attributes = [attributes_of(np.negative, rows(i), workers + 1) for i in range(workers)]
        tasks = await begin(*(asyncio.to_thread(raw_ops.BatchFunction, **a) for a in attributes))
        while scope.stored() < workers:
            await asyncio.sleep(0)
        (y,) = await function(np.negative, rows(9), workers + 1)
        return y.item(), [answer[0].item() for answer in await asyncio.gather(*tasks)]

    assert run(main()) == (-9.0, [-0.0, -1.0, -2.0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_function_that_ends_its_task(scope, kind):
    """Raised inside f, run for a task: the task gets it, a thread of the same batch is served without the task's rows."""
    seen = []

    def f(x):
        seen.append(x.ravel().tolist())
        if 2.0 in x:
            raise kind
        return x

    thread = in_thread(f, rows(1), 2)
    until(lambda: scope.stored() == 1)
    caller = start(lambda: asyncio.run(function(f, rows(2), 2)))
    assert thread.answer()[0].tolist() == [[1.0]]
    assert isinstance(caller.end().error, kind)
    assert seen[-1] == [1.0]
    (queue,) = scope.resources.values()
    assert (scope.sweep(), queue.scheduler.running) == (0, 0)


def test_a_function_that_ends_its_task_lets_the_next_batch_go(scope):
    f = Held(SystemExit)
    first = start(lambda: asyncio.run(function(f, rows(0), 1)))
    f.wait()
    second = in_thread(f, rows(1), 1)
    until(lambda: scope.stored() == 1)
    f.go.set()
    assert second.answer(5)[0].tolist() == [[1.0]]
    assert isinstance(first.end().error, SystemExit)


def test_calls_from_inside_a_function(scope):
    def inner(x):
        return raw_ops.BatchFunction(**attributes_of(outer, x - 1, 2, batch_timeout_micros=1000))[0] + 1

    def outer(x):
        return inner(x) if x.max() > 0 else x

    async def main():
        return await asyncio.gather(*(function(outer, rows(i), 2, batch_timeout_micros=1000) for i in (0, 1, 2)))

    assert [answer[0].item() for answer in run(main())] == [0.0, 1.0, 2.0]


def test_a_coroutine_that_is_never_awaited_does_nothing(scope):
    call = batch(rows(1))
    call.close()
    assert scope.resources == {}


def test_exit_with_tasks_waiting():
    """A program that ends with tasks waiting, in the main thread's loop and in others."""
    out = run_script("""
        import asyncio, threading, numpy as np, weft
        from weft import aio

        X = np.ones((1, 2))

        async def wait():
            await asyncio.gather(
                aio.Batch([X], 1, 9, 10**9, 0),
                aio.BatchFunction([X], [], np.negative, 1, 9, 10**9, ["float64"]),
                aio.Unbatch(X, np.empty((0, 3), np.int64), 5, 10**9),
            )

        threading.Thread(target=lambda: asyncio.run(wait()), daemon=True).start()
        while weft.sweep() < 3:
            pass

        async def main():
            try:
                await asyncio.wait_for(aio.Unbatch(X, np.empty((0, 3), np.int64), 6, 10**9), 0.05)
            except TimeoutError:
                print("ends")

        asyncio.run(main())
    """)
    assert out.split() == ["ends"]


@pytest.mark.usefixtures("little_garbage")
def test_nothing_is_kept_of_tasks_that_are_over(scope):
    """No future, task or array outlives its call."""

    class Kept(np.ndarray):
        pass

    gone = []

    async def call(i):
        x = rows(i).view(Kept)
        gone.append(weakref.ref(x))
        b = await batch(x, 4)
        y = await unbatch(b.batched_tensors[0], b)
        await function(same, y, 4)

    async def main():
        await asyncio.gather(*(call(i) for i in range(4)))

    run(main())
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    assert scope.sweep() == 0
