"""The awaitable forms: tasks, loops and threads on the same queues, cancelled, stopped and interrupted."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from callers import PATIENCE, run_script, start, until
from conftest import need, to

import weft
from weft import aio, raw_ops
from weft.errors import AlreadyExistsError, DeadlineExceededError, FailedPreconditionError, InvalidArgumentError

NO_ROWS = np.empty((0, 3), np.int64)
LONG = 60_000_000  # microseconds: these batches are closed by their size


@pytest.fixture(autouse=True)
def scope():
    """The test's scope, on the real clock."""
    with weft.scope() as scope:
        yield scope


def run(main):
    """What a coroutine returns; it may not take for ever."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


def same(x):
    return x


def batch(x, size=8, **attributes):
    given = {"num_batch_threads": 1, "batch_timeout_micros": LONG, "grad_timeout_micros": 0} | attributes
    return aio.Batch([x], max_batch_size=size, **given)


def attributes_of(f, x, size=8, **attributes):
    given = {"num_batch_threads": 1, "batch_timeout_micros": LONG, "Tout": ["float64"], "max_enqueued_batches": 99}
    return {"in_tensors": [x], "captured_tensors": [], "f": f, "max_batch_size": size} | given | attributes


def function(f, x, size=8, **attributes):
    return aio.BatchFunction(**attributes_of(f, x, size, **attributes))


def in_thread(f, x, size=8, **attributes):
    return start(raw_ops.BatchFunction, **attributes_of(f, x, size, **attributes))


def unbatch(data, got, **attributes):
    return aio.Unbatch(data, got.batch_index, got.id, **{"timeout_micros": LONG} | attributes)


def rows(*values):
    return np.array(values, float).reshape(-1, 1)


async def begin(*coroutines):
    """Tasks that have got as far as they can: each is in its queue."""
    tasks = []
    for coroutine in coroutines:
        tasks.append(asyncio.ensure_future(coroutine))
        await asyncio.sleep(0)
    return tasks


# --- together ---


def test_batch_and_unbatch(scope):
    async def call(i):
        for turn in range(5):
            b = await batch(rows(i, turn), 200)
            y = await unbatch(b.batched_tensors[0] + 1, b)
            assert y.ravel().tolist() == [i + 1, turn + 1]

    async def main():
        await asyncio.gather(*(call(i) for i in range(100)))

    run(main())
    assert scope.sweep() == 0


@pytest.mark.parametrize(
    "attributes",
    [
        {"num_batch_threads": 2},
        {"enable_large_batch_splitting": True, "allowed_batch_sizes": [1, 5]},
        {"num_batch_threads": 0},
    ],
    ids=["plain", "split", "adaptive"],
)
def test_functions(scope, attributes):
    async def call(i):
        rng = np.random.default_rng(i)
        for _ in range(5):
            x = rng.random((int(rng.integers(1, 9)), 2))
            (y,) = await function(np.negative, x, 16, batch_timeout_micros=500, **attributes)
            np.testing.assert_array_equal(y, -x)

    async def main():
        await asyncio.gather(*(call(i) for i in range(60)))

    run(main())
    assert scope.sweep() == 0


def test_tasks_threads_and_several_loops_share_batches(scope):
    sizes = []

    def f(x):
        sizes.append(len(x))
        return x * 2

    def thread(i):
        for turn in range(10):
            (y,) = raw_ops.BatchFunction(**attributes_of(f, rows(i, turn), 24, batch_timeout_micros=2000))
            assert y.ravel().tolist() == [2 * i, 2 * turn]

    async def task(i):
        for turn in range(10):
            (y,) = await function(f, rows(i, turn), 24, batch_timeout_micros=2000)
            assert y.ravel().tolist() == [2 * i, 2 * turn]

    async def tasks(first):
        await asyncio.gather(*(task(first + i) for i in range(10)))

    callers = [start(thread, i) for i in range(6)] + [
        start(lambda i=i: asyncio.run(tasks(100 * i))) for i in range(1, 4)
    ]
    for caller in callers:
        caller.answer()
    assert sum(sizes) == 2 * 10 * 36
    assert max(sizes) <= 24
    assert scope.sweep() == 0


def test_gradients(scope):
    """The whole chain from tasks, against the batch made by hand."""
    xs = np.random.default_rng(0).random((10, 2, 3))

    async def call(x):
        b = await batch(x, 20)
        (both,) = b.batched_tensors
        y = await unbatch(both**2, b, shared_name="y")
        dy = await aio.UnbatchGrad(both, b.batch_index, np.cos(y), b.id)
        return await unbatch(dy * 2 * both, b, shared_name="dx")

    async def main():
        return await asyncio.gather(*(call(x) for x in xs))

    np.testing.assert_allclose(np.array(run(main())), np.cos(xs**2) * 2 * xs)
    assert scope.sweep() == 0


def test_signatures():
    for name in aio.__all__:
        call, op = getattr(aio, name), getattr(raw_ops, name)
        assert inspect.iscoroutinefunction(call)
        assert (call.__name__, call.__doc__) == (name, op.__doc__)
        assert inspect.signature(call) == op.signature


def test_other_libraries(library, scope):
    async def main():
        xs = [to(library, np.full((1, 2), i, np.float32)) for i in range(3)]
        got = await asyncio.gather(*(batch(x, 3) for x in xs))
        pieces = await asyncio.gather(*(unbatch(g.batched_tensors[0], g) for g in got))
        assert [type(p) for p in pieces] == [type(x) for x in xs]
        assert [float(p[0, 0]) for p in pieces] == [0.0, 1.0, 2.0]

    run(main())
    assert scope.sweep() == 0


def test_large_batches_are_put_together_outside_the_loop(scope):
    """And come back whole."""

    async def main():
        xs = [np.full((1, 1 << 17), float(i)) for i in range(6)]
        got = await asyncio.gather(*(batch(x, 6) for x in xs))
        pieces = await asyncio.gather(*(unbatch(g.batched_tensors[0], g) for g in got))
        assert [(p.min(), p.max()) for p in pieces] == [(i, i) for i in range(6)]

    run(main())
    assert scope.sweep() == 0


def test_the_loop_goes_on_while_f_runs(scope):
    go = threading.Event()

    def f(x):
        assert go.wait(PATIENCE)
        return x

    async def main():
        (task,) = await begin(function(f, rows(1), 1))
        go.set()  # this line runs because the loop does
        return await task

    assert run(main())[0].tolist() == [[1.0]]


def test_the_context_goes_with_f(scope):
    here = contextvars.ContextVar("here", default="nowhere")

    async def main():
        here.set("here")
        return await function(lambda x: np.array([[here.get()]]), rows(1), 1, Tout=["string"])

    assert run(main())[0].tolist() == [["here"]]


def test_priority_of_a_task(scope):
    seen = []

    def f(x):
        seen.append(x.ravel().tolist())
        return x

    low = {
        "low_priority_max_batch_size": 4,
        "low_priority_max_enqueued_batches": 9,
        "low_priority_batch_timeout_micros": LONG,
    }

    async def call(level, x):
        with weft.priority(level):
            return await function(f, x, 4, **low)

    async def main():
        tasks = await begin(
            call("low", rows(1)), call("high", rows(2)), call("low", rows(3)), call("high", rows(4, 5, 6))
        )
        await asyncio.gather(*tasks[1:2], tasks[3])
        rest = await begin(call("low", rows(7, 8)))
        await asyncio.gather(tasks[0], tasks[2], *rest)

    run(main())
    assert seen == [[2, 4, 5, 6], [1, 3, 7, 8]]


# --- errors and deadlines ---


def test_errors_have_notes_and_leave_nothing(scope):
    async def main():
        for call in (
            batch(np.float64(1)),
            function(3, rows(1)),
            aio.Unbatch(rows(1), [[1, 0, 2]], 1, 0),
            aio.UnbatchGrad(rows(1), NO_ROWS, rows(1), 1),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                await call
            assert caught.value.__notes__[0].startswith("in weft.raw_ops.")
        with pytest.raises(TypeError):
            await aio.Batch([rows(1)])

    run(main())
    assert scope.resources == {}


def test_what_f_raises_is_each_tasks_own(scope):
    raised = KeyError("missing")

    def f(x):
        raise raised

    async def main():
        return await asyncio.gather(*(function(f, rows(i), 5) for i in range(5)), return_exceptions=True)

    found = run(main())
    assert [type(error) for error in found] == [KeyError] * 5
    assert len({id(error) for error in [raised, *found]}) == 6
    assert all(error.__cause__ is raised for error in found)


def test_stop_iteration_reaches_the_task(scope):
    """Python does not let it pass through a coroutine: the task sees RuntimeError, caused by it."""

    def f(x):
        raise StopIteration

    with pytest.raises((StopIteration, RuntimeError)):
        run(function(f, rows(1), 1))
    assert scope.sweep() == 0


def test_deadlines(scope):
    async def main():
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await aio.Unbatch(rows(1), NO_ROWS, 5, 20_000)
        with weft.gradient_deadline(0.02), pytest.raises(DeadlineExceededError):
            await aio.UnbatchGrad(rows(1), [[1, 0, 1], [2, 1, 1]], rows(1), 1)
        assert 0.04 <= time.monotonic() - began < 5
        (waiter,) = await begin(aio.Unbatch(rows(1), NO_ROWS, 5, LONG, shared_name="long"))
        with pytest.raises(AlreadyExistsError):
            await aio.Unbatch(rows(1), NO_ROWS, 5, LONG, shared_name="long")
        await aio.Unbatch(rows(1, 2), [[5, 0, 1], [6, 1, 1]], 6, LONG, shared_name="long")
        assert (await waiter).tolist() == [[1.0]]

    run(main())
    assert scope.sweep() == 0


def test_deadlines_in_several_scopes_of_one_loop():
    """A sweep of one scope's deadlines does not stand for another's."""

    async def wait(micros):
        with pytest.raises(DeadlineExceededError):
            await aio.Unbatch(rows(1), NO_ROWS, 5, micros)

    async def main():
        tasks = []
        for micros in (40_000, 80_000, 20_000):
            with weft.scope():
                tasks += await begin(wait(micros))
        await asyncio.gather(*tasks)

    run(main())


def test_a_later_deadline_is_kept_after_an_earlier_one(scope):
    async def wait(id, micros, name):
        with pytest.raises(DeadlineExceededError):
            await aio.Unbatch(rows(1), NO_ROWS, id, micros, shared_name=name)

    async def main():
        await asyncio.gather(*(wait(i, 1000 * (1 + (7 * i) % 40), f"n{i}") for i in range(40)))

    run(main())
    assert scope.sweep() == 0


def test_recorded_arrays_are_refused(scope):
    need("torch")
    import torch

    async def main():
        x = torch.ones(1, 1, requires_grad=True)
        with pytest.raises(FailedPreconditionError):
            await aio.Batch([x], 1, 1, 0, 0)
        with torch.no_grad():
            assert (await aio.Batch([x], 1, 1, 0, 0)).batched_tensors[0].tolist() == [[1.0]]

    run(main())


# --- those who leave ---


@pytest.mark.parametrize("gone", [[0], [1], [0, 1], [2], [0, 2], [0, 1, 2]], ids=str)
def test_cancelled_while_waiting(scope, gone):
    """The leader, another, the last, all: those who stay are served as if the others had never come."""
    seen = []
    stay = [i for i in range(3) if i not in gone]

    def f(x):
        seen.append(x.ravel().tolist())
        return x

    async def main():
        tasks = await begin(*(function(f, rows(i), 5) for i in range(3)))
        for i in gone:
            tasks[i].cancel()
        await asyncio.gather(*(tasks[i] for i in gone), return_exceptions=True)
        await function(f, rows(*[9] * (5 - len(stay))), 5)
        for i, answer in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
            if i in gone:
                assert isinstance(answer, asyncio.CancelledError)
            else:
                assert answer[0].tolist() == [[i]]

    run(main())
    assert seen == [stay + [9] * (5 - len(stay))]
    assert scope.sweep() == 0


def test_the_message_of_a_cancellation_arrives(scope):
    async def main():
        (task,) = await begin(batch(rows(1), 4))
        task.cancel("no longer wanted")
        with pytest.raises(asyncio.CancelledError, match="no longer wanted"):
            await task

    run(main())
    assert scope.sweep() == 0


def test_cancelled_with_the_answer_on_its_way(scope):
    """The batch is done, and the loop has not come to tell: the cancellation counts."""

    async def main():
        first, second, last = await begin(*(batch(rows(i), 3) for i in range(2)), asyncio.sleep(0))
        await last
        third = asyncio.ensure_future(batch(rows(2), 3))
        asyncio.get_running_loop().call_soon(second.cancel)  # runs right after the third has closed the batch
        assert len((await third).batched_tensors[0]) == 3
        assert len((await first).batched_tensors[0]) == 0
        with pytest.raises(asyncio.CancelledError):
            await second

    run(main())
    assert scope.sweep() == 0


def test_cancelled_twice(scope):
    """A task that does not heed the first cancellation waits anew."""

    async def stubborn():
        try:
            await batch(rows(1), 2)
        except asyncio.CancelledError:
            return await batch(rows(2), 2)

    async def main():
        (task,) = await begin(stubborn())
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        last = await batch(rows(3), 2)
        assert last.batched_tensors[0].ravel().tolist() == [2, 3]
        assert len((await task).batched_tensors[0]) == 0

    run(main())
    assert scope.sweep() == 0


def test_a_task_that_ends_the_program_leaves_the_others_of_its_batch(scope):
    """They go on when the loop runs again."""

    async def leave(x):
        await batch(x, 3)
        raise SystemExit

    loop = asyncio.new_event_loop()
    ends = loop.create_task(leave(rows(0)))
    others = [loop.create_task(batch(rows(i), 3)) for i in (1, 2)]
    with pytest.raises(SystemExit):
        loop.run_until_complete(asyncio.gather(*others))
    answers = loop.run_until_complete(asyncio.wait_for(asyncio.gather(*others), PATIENCE))
    loop.close()
    assert [len(answer.batched_tensors[0]) for answer in answers] == [0, 3]
    assert isinstance(ends.exception(), SystemExit)


def test_the_tasks_of_a_batch_go_on_by_one_call_of_their_loop(scope):
    async def main():
        loop = asyncio.get_running_loop()
        tasks = await begin(*(batch(rows(i), 9) for i in range(8)))
        calls, call_soon = [], loop.call_soon
        loop.call_soon = lambda *given, **named: calls.append(given) or call_soon(*given, **named)
        await batch(rows(8), 9)
        loop.call_soon = call_soon
        assert len(calls) == 1
        return await asyncio.gather(*tasks)

    assert [len(answer.batched_tensors[0]) for answer in run(main())] == [0] * 8


def test_cancelled_rows_make_room(scope):
    async def main():
        first, second = await begin(batch(rows(1), 4), batch(rows(2, 3), 4))
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        last = await batch(rows(4, 5, 6), 4)
        assert last.batched_tensors[0].ravel().tolist() == [1, 4, 5, 6]
        assert len((await first).batched_tensors[0]) == 0

    run(main())
    assert scope.sweep() == 0


def test_cancelled_while_f_runs(scope):
    """Its batch is under way: the others get their rows, and the slot is free afterwards."""
    began, go = threading.Event(), threading.Event()

    def f(x):
        began.set()
        assert go.wait(PATIENCE)
        return x

    async def main():
        tasks = await begin(*(function(f, rows(i), 3) for i in range(3)))
        await asyncio.to_thread(began.wait, PATIENCE)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        go.set()
        assert (await tasks[0])[0].tolist() == [[0.0]]
        assert (await function(f, rows(7), 1, shared_name="next"))[0].tolist() == [[7.0]]

    run(main())
    (queue, _) = scope.resources.values()
    assert (scope.sweep(), queue.scheduler.running) == (0, 0)


def test_cancelled_with_a_run_in_hand(scope):
    """A task is given a batch to run and cancelled before it looks: another caller runs it."""
    began, go = threading.Event(), threading.Event()

    def f(x):
        if x[0, 0] == 0:
            began.set()
            assert go.wait(PATIENCE)
        return x

    async def main():
        blocker = in_thread(f, rows(0), 2, batch_timeout_micros=0)
        assert began.wait(PATIENCE)
        tasks = await begin(
            function(f, rows(1), 2, batch_timeout_micros=0), function(f, rows(2), 2, batch_timeout_micros=0)
        )
        go.set()
        blocker.answer()  # holds up the loop: by now the batch is one of the tasks' to run
        tasks[1].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert answers[0][0].tolist() == [[1.0]]
        assert isinstance(answers[1], asyncio.CancelledError)

    run(main())
    (queue,) = scope.resources.values()
    assert (scope.sweep(), queue.scheduler.running) == (0, 0)


def test_cancelled_in_unbatch(scope):
    """Its id is free again; what comes for it later waits for the next."""

    async def main():
        (waiter,) = await begin(aio.Unbatch(rows(1), NO_ROWS, 5, LONG))
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert weft.sweep() == 0
        (waiter,) = await begin(aio.Unbatch(rows(1), NO_ROWS, 5, LONG))
        await aio.Unbatch(rows(1, 2), [[5, 0, 1], [6, 1, 1]], 6, LONG)
        assert (await waiter).tolist() == [[1.0]]

    run(main())
    assert scope.sweep() == 0


def test_cancelled_in_unbatch_grad(scope):
    async def main():
        owner = aio.UnbatchGrad(rows(1), [[1, 0, 1], [2, 1, 1]], rows(1), 1)
        (task,) = await begin(owner)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert weft.sweep() == 0
        (task,) = await begin(aio.UnbatchGrad(rows(1), [[1, 0, 1], [2, 1, 1]], rows(1), 1))
        await aio.UnbatchGrad(rows(1)[:0], NO_ROWS, rows(2), 2)
        assert (await task).tolist() == [[1.0], [2.0]]

    run(main())
    assert scope.sweep() == 0


def test_a_leader_cancelled_hands_its_watch_to_a_thread(scope):
    """Task leads, thread second: the task goes, and the thread's batch is still closed in time."""
    half_a_second = {"batch_timeout_micros": 500_000}

    async def main():
        (task,) = await begin(function(same, rows(1), 5, **half_a_second))
        thread = in_thread(same, rows(2), 5, **half_a_second)
        until(lambda: scope.stored() == 2)
        task.cancel()
        return (await asyncio.to_thread(thread.answer))[0].tolist()

    assert run(main()) == [[2.0]]
    assert scope.sweep() == 0


def test_a_leader_cancelled_hands_its_watch_to_another_task(scope):
    async def main():
        tasks = await begin(*(function(same, rows(i), 5, batch_timeout_micros=500_000) for i in range(3)))
        tasks[0].cancel()
        return [answer[0].item() for answer in await asyncio.gather(*tasks[1:])]

    assert run(main()) == [1.0, 2.0]
    assert scope.sweep() == 0


def test_a_thread_that_leads_watches_for_tasks(scope):
    thread = in_thread(same, rows(2), 5, batch_timeout_micros=200_000)
    until(lambda: scope.stored() == 1)
    assert run(function(same, rows(1), 5, batch_timeout_micros=200_000))[0].tolist() == [[1.0]]
    thread.answer()


def test_timeouts_around_calls(scope):
    async def main():
        for _ in range(20):
            calls = [
                asyncio.wait_for(function(same, rows(i), 99, batch_timeout_micros=1000), 0.0002 * i) for i in range(12)
            ]
            for i, answer in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
                assert isinstance(answer, TimeoutError) or answer[0].tolist() == [[i]]

    run(main())
    until(lambda: scope.sweep() == 0)
    (queue,) = scope.resources.values()
    until(lambda: queue.scheduler.running == 0)


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
    began, go = threading.Event(), threading.Event()

    def f(x):
        if x[0, 0] == 0:
            began.set()
            assert go.wait(PATIENCE)
        return x

    blocker = in_thread(f, rows(0), 2, batch_timeout_micros=0)
    assert began.wait(PATIENCE)
    thread = in_thread(f, rows(1), 2, batch_timeout_micros=0)
    until(lambda: scope.stored() == 1)
    stopped = Stopped(function(f, rows(2), 2, batch_timeout_micros=0))
    go.set()
    blocker.answer()
    assert thread.answer(5)[0].tolist() == [[1.0]]
    assert in_thread(f, rows(3), 2, batch_timeout_micros=0).answer(5)[0].tolist() == [[3.0]]
    assert stopped.finish()[0].tolist() == [[2.0]]
    assert scope.sweep() == 0


def test_a_stopped_loop_with_a_run_in_hand_does_not_block_the_queue(scope):
    """All callers of a batch are tasks of a loop that stopped: later callers are served all the same."""
    began, go = threading.Event(), threading.Event()

    def f(x):
        if x[0, 0] == 0:
            began.set()
            assert go.wait(PATIENCE)
        return x

    blocker = in_thread(f, rows(0), 1)
    assert began.wait(PATIENCE)
    stopped = Stopped(function(f, rows(2), 1))
    go.set()
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
    began, go = threading.Event(), threading.Event()

    def f(x):
        if x[0, 0] == 0:
            began.set()
            assert go.wait(PATIENCE)
            raise SystemExit
        return x

    first = start(lambda: asyncio.run(function(f, rows(0), 1)))
    assert began.wait(PATIENCE)
    second = in_thread(f, rows(1), 1)
    until(lambda: scope.stored() == 1)
    go.set()
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

    class Held(np.ndarray):
        pass

    gone = []

    async def call(i):
        x = rows(i).view(Held)
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
