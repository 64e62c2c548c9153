"""With `on_loop`, a call that is alone in its turn of the event loop runs its batch at once."""

from __future__ import annotations

import asyncio

import pytest
from support.aio_calls import Held, Seen, run
from support.batched_calls import rows
from support.callers import start, until

import weft

pytestmark = pytest.mark.usefixtures("scope")


@pytest.fixture
def seen():
    return Seen()


class LoneCall:
    """A call without a task that is the only one of its turn."""

    def __init__(self, policy, value):
        self.answers = []
        args = asyncio.get_running_loop(), lambda request: self.answers.append(request.outcome().item()), (rows(value),)
        self.waiter = policy.aio.start(*args, {}, is_alone=True)


def test_a_call_that_is_alone_in_its_turn_runs_at_once(seen):
    async def main():
        assert [LoneCall(policy, value).answers for value in (1, 2)] == [[2], [4]]
        answers = await asyncio.gather(*(policy.aio(rows(value)) for value in (3, 4)))
        assert [answer.item() for answer in answers] == [6, 8]

    policy = weft.batched(seen, on_loop=True)
    run(main())
    assert seen.batches == [[1], [2], [3, 4]]


def test_a_call_that_is_alone_in_its_turn_shares_the_batch_of_those_that_wait(seen):
    async def main():
        others = [asyncio.ensure_future(policy.aio(rows(value))) for value in (1, 2)]
        await asyncio.sleep(0)  # they are in the queue, and the loop has not looked
        lone = LoneCall(policy, 3)
        assert lone.answers == []
        assert [answer.item() for answer in await asyncio.gather(*others)] == [2, 4]
        assert lone.answers == [6]

    policy = weft.batched(seen, on_loop=True)
    run(main())
    assert seen.batches == [[1, 2, 3]]


def test_a_call_that_is_alone_in_its_turn_waits_for_the_batch_that_runs(seen):
    f = Held()
    policy = weft.batched(lambda x: seen(f(x)), on_loop=True)

    async def main():
        thread = start(policy, rows(0))
        await asyncio.to_thread(f.wait)
        lone = LoneCall(policy, 2)
        assert lone.answers == []
        f.go.set()
        await asyncio.to_thread(until, lambda: lone.answers)
        assert lone.answers == [4]
        await asyncio.to_thread(thread.answer)

    run(main())


def test_the_function_of_a_call_that_is_alone_calls_its_own_batcher():
    async def main():
        assert LoneCall(policy, 3).answers == [0]

    policy = weft.batched(lambda x: policy(x - 1) if x[0, 0] > 0 else x, on_loop=True)
    run(main())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_thread_of_a_call_that_is_alone(seen, kind):
    def f(x):
        if x[0, 0] == 0:
            raise kind("now")
        return seen(x)

    async def main():
        with pytest.raises(kind):
            LoneCall(policy, 0)
        assert LoneCall(policy, 1).answers == [2]
        assert (await policy.aio(rows(2))).item() == 4

    policy = weft.batched(f, on_loop=True)
    run(main())
    assert policy.statistics().waiting == 0
