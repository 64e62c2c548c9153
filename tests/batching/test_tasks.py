"""The awaitable forms: tasks, loops and threads on the same queues, their errors and deadlines."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time

import numpy as np
import pytest
from support.aio_calls import LONG, NO_ROWS, attributes_of, batch, begin, function, rows, run, same, unbatch
from support.callers import PATIENCE, start
from support.libraries import need, to

import weft
from weft import aio, raw_ops
from weft.batching.call import QueuedCall
from weft.errors import AlreadyExistsError, DeadlineExceededError, FailedPreconditionError, InvalidArgumentError

pytestmark = pytest.mark.usefixtures("scope")


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


def test_a_batch_that_ends_while_its_task_goes_to_sleep():
    class Ending:
        """A batch that another thread ends once this one has looked at its tasks."""

        def __init__(self, tasks):
            self._tasks = [tasks]

        @property
        def tasks(self):
            return self._tasks.pop() if self._tasks else []

    dispatcher = weft.batched(same)._dispatcher
    first, second = QueuedCall(dispatcher, 1, None), QueuedCall(dispatcher, 1, None)
    second.batch = Ending([first, second])
    assert second.needs_timer(None)
    second.batch = Ending([])
    assert second.needs_timer(None)


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
