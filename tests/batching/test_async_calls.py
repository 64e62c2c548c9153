"""Batched calls from tasks of event loops."""

from __future__ import annotations

import asyncio

import pytest
from support.batched_calls import FULL, Model, rows

import weft


class TestTasks:
    """Callers that are tasks: the same queue, the same bounds; the loop only keeps the clock."""

    def test_with_threads_in_one_batch(self):
        async def main():
            calls = [policy.aio(rows(i)) for i in range(4)]
            calls += [asyncio.to_thread(policy, rows(i)) for i in range(4, 6)]
            return await asyncio.gather(*calls)

        with weft.scope():
            model = Model()
            policy = weft.batched(model, max_batch_size=6, max_wait=20.0)
            got = asyncio.run(main())
        assert [y.item() for y in got] == [0, 2, 4, 6, 8, 10]
        assert model.sizes == [6]

    def test_the_function_does_not_hold_up_the_loop(self):
        async def main():
            call = asyncio.create_task(policy.aio(rows(1)))
            while not model.inside:
                await asyncio.sleep(0)
            ticks = 0
            while ticks < 100:
                await asyncio.sleep(0)
                ticks += 1
            model.gate.set()
            return await call

        with weft.scope():
            model = Model()
            model.gate.clear()
            policy = weft.batched(model)
            assert asyncio.run(main()).item() == 2

    def test_max_wait_and_receipts(self):
        async def main():
            return await asyncio.gather(*(policy.aio.call(rows(i), receipt=True) for i in range(3)))

        with weft.scope():
            policy = weft.batched(Model(), max_wait=0.25)
            got = asyncio.run(main())
        assert {receipt.reason for _, receipt in got} == {"timeout"}
        assert [receipt.position for _, receipt in got] == [0, 1, 2]
        assert got[0][1].queue_time >= 0.25  # the others may have come later

    def test_a_cancelled_task_leaves(self):
        async def main():
            first = asyncio.create_task(policy.aio(rows(0)))
            while not model.inside:
                await asyncio.sleep(0)
            gone, kept = (asyncio.create_task(policy.aio(rows(i))) for i in (1, 2))
            while policy.statistics().waiting < 2:
                await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            assert policy.statistics().waiting == 1
            model.gate.set()
            return await asyncio.gather(first, kept)

        with weft.scope():
            model = Model()
            model.gate.clear()
            policy = weft.batched(model)
            got = asyncio.run(main())
        assert [y.item() for y in got] == [0, 4]
        assert model.sizes == [1, 1]


class TestCoroutines:
    """What a task's call is: a coroutine like any other."""

    def test_one_after_the_other_in_loops_of_their_own(self):
        """What a thread knows of the loop in which it woke tasks ends with that."""
        policy = weft.batched(lambda x: x * 2, max_batch_size=4)

        async def twice(i):
            first = await policy.aio(rows(i))
            return (await policy.aio(first)).item()

        async def several():
            return await asyncio.gather(*map(twice, range(6)))

        for _ in range(3):
            assert asyncio.run(several()) == [4 * i for i in range(6)]

    def test_it_begins_when_it_is_awaited_and_once(self):
        policy = weft.batched(lambda x: x, max_batch_size=4)
        given_up = policy.aio(rows(1))
        assert asyncio.iscoroutine(given_up)
        given_up.close()
        assert policy.statistics().calls == 0
        call = policy.aio(rows(1))
        assert asyncio.run(call).item() == 1
        with pytest.raises(RuntimeError, match="already awaited"):
            call.send(None)

    def test_an_error_that_looks_like_an_end(self):
        def f(x):
            raise StopIteration("of the function")

        with pytest.raises(RuntimeError, match="raised StopIteration"):
            asyncio.run(weft.batched(f, max_batch_size=4).aio(rows(1)))

    def test_cancelled_as_its_batch_ends(self):
        """A task that is both woken and cancelled goes on by one of the two, and the others have their rows."""
        policy = weft.batched(lambda x: x, max_batch_size=4, **FULL)

        async def all_of_them():
            tasks = [asyncio.create_task(policy.aio(rows(i))) for i in range(4)]
            while not policy.statistics().batches:
                await asyncio.sleep(0)
            tasks[1].cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        got = asyncio.run(all_of_them())
        assert [got[i].item() for i in (0, 2, 3)] == [0, 2, 3]
        assert isinstance(got[1], asyncio.CancelledError) or got[1].item() == 1


class TestCallbacks:
    """Calls without a task: a callback takes the outcome."""

    def test_one_batch_for_calls_of_one_turn(self):
        got = {}

        async def main():
            loop = asyncio.get_running_loop()
            ended = loop.create_future()

            def done(i, request):
                got[i] = request.outcome().item()
                if len(got) == 5:
                    ended.set_result(None)

            for i in range(5):
                policy.aio.start(loop, lambda request, i=i: done(i, request), (rows(i),), {})
            await asyncio.wait_for(ended, 30)

        with weft.scope():
            model = Model()
            policy = weft.batched(model, max_batch_size=5, max_wait=20.0, split=True)
            asyncio.run(main())
        assert got == {i: 2 * i for i in range(5)}
        assert model.sizes == [5]

    def test_a_call_that_is_given_up_leaves_its_batch(self):
        async def main():
            loop = asyncio.get_running_loop()
            ended = loop.create_future()
            left = policy.aio.start(loop, lambda request: got.append("left"), (rows(1),), {})
            policy.aio.start(loop, lambda request: ended.set_result(request.outcome().item()), (rows(2),), {})
            left.close()
            policy.aio.start(loop, got.append, (rows(3),), {})
            return await asyncio.wait_for(ended, 30)

        got = []
        with weft.scope():
            model = Model()
            policy = weft.batched(model, max_batch_size=2, max_wait=20.0)
            assert asyncio.run(main()) == 4
        assert model.sizes == [2]
        assert "left" not in got

    def test_errors_and_deadlines(self):
        async def main():
            loop = asyncio.get_running_loop()
            ended = loop.create_future()
            policy.aio.start(loop, ended.set_result, (rows(1),), {}, deadline=0.01)
            request = await asyncio.wait_for(ended, 30)
            with pytest.raises(weft.errors.DeadlineExceededError):
                request.outcome()
            with pytest.raises(weft.errors.InvalidArgumentError):
                policy.aio.start(loop, ended.set_result, (rows(1),), {}, priority="none")

        with weft.scope():
            policy = weft.batched(Model(), max_batch_size=2, max_wait=20.0)
            asyncio.run(main())


@pytest.mark.parametrize("split", [False, True])
def test_calls_join_a_batch_that_waits_for_a_worker(split):
    async def main():
        first = asyncio.create_task(policy.aio(rows(1)))
        while not model.inside:
            await asyncio.sleep(0)
        calls = [asyncio.create_task(policy.aio(rows(i))) for i in range(8)]
        await asyncio.sleep(0)
        model.gate.set()
        await asyncio.gather(first, *calls)

    with weft.scope():
        model = Model()
        model.gate.clear()
        policy = weft.batched(model, max_batch_size=8, split=split)
        asyncio.run(main())
    assert model.sizes == [1, 8]
