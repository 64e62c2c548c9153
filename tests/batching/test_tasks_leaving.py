"""Tasks that are cancelled or time out: the others of their batch go on without them."""

from __future__ import annotations

import asyncio

import pytest
from support.aio_calls import LONG, NO_ROWS, Held, batch, begin, function, in_thread, rows, run, same
from support.callers import PATIENCE, until

import weft
from weft import aio

pytestmark = pytest.mark.usefixtures("scope")


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
    f = Held()

    async def main():
        tasks = await begin(*(function(f, rows(i), 3) for i in range(3)))
        await asyncio.to_thread(f.wait)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        f.go.set()
        assert (await tasks[0])[0].tolist() == [[0.0]]
        assert (await function(f, rows(7), 1, shared_name="next"))[0].tolist() == [[7.0]]

    run(main())
    (queue, _) = scope.resources.values()
    assert (scope.sweep(), queue.scheduler.running) == (0, 0)


def test_cancelled_with_a_run_in_hand(scope):
    """A task is given a batch to run and cancelled before it looks: another caller runs it."""
    f = Held()

    async def main():
        blocker = in_thread(f, rows(0), 2, batch_timeout_micros=0)
        f.wait()
        tasks = await begin(
            function(f, rows(1), 2, batch_timeout_micros=0), function(f, rows(2), 2, batch_timeout_micros=0)
        )
        f.go.set()
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


@pytest.mark.parametrize("other", ["thread", "task"])
def test_a_leader_cancelled_hands_its_watch_on(scope, other):
    """A task leads, others follow: the task goes, and their batch is still closed in time."""
    timeout = {"batch_timeout_micros": 200_000}

    async def main():
        (leader,) = await begin(function(same, rows(1), 5, **timeout))
        if other == "thread":
            thread = in_thread(same, rows(2), 5, **timeout)
            until(lambda: scope.stored() == 2 or not thread.is_alive())  # on a busy machine the batch may be over
            following = asyncio.to_thread(thread.answer)
        else:
            (following,) = await begin(function(same, rows(2), 5, **timeout))
        leader.cancel()
        return (await following)[0].tolist()

    assert run(main()) == [[2.0]]
    assert scope.sweep() == 0


def test_a_thread_that_leads_watches_for_tasks(scope):
    thread = in_thread(same, rows(2), 5, batch_timeout_micros=200_000)
    until(lambda: scope.stored() == 1 or not thread.is_alive())  # on a busy machine the batch may be over
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
