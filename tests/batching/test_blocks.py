"""A batcher as a block: the end of the last block closes it, the next block opens it again, and `close` ends it for good."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from support.batched_calls import FULL, Model, held, rows
from support.callers import start, until
from support.libraries import need

import weft
from weft.errors import CancelledError, DeadlineExceededError, FailedPreconditionError


def is_closed(policy):
    try:
        policy(rows(1))
    except CancelledError:
        return True
    return False


async def double(x):
    await asyncio.sleep(0)
    return x * 2


def chunks(x):
    yield x
    yield x * 2


KINDS = {
    "function": (lambda x: x * 2, {}),
    "async function": (double, {}),
    "on the loop": (lambda x: x * 2, {"on_loop": True}),
    "fixed lengths": (lambda x: x * 2, {"max_waste": 0.5, "pad": {"x": weft.Pad()}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_entered_again(kind):
    f, options = KINDS[kind]
    policy = weft.batched(f, **options)
    x = np.ones((1, 2))
    for _ in range(3):
        with policy:
            assert policy(x).tolist() == [[2.0, 2.0]]
        assert is_closed(policy)

    async def main():
        async with policy:
            return await policy.aio(x)

    for _ in range(3):
        assert asyncio.run(main()).tolist() == [[2.0, 2.0]]
        assert is_closed(policy)


def test_streams_can_be_entered_again():
    policy = weft.batched(chunks)
    for _ in range(2):
        with policy:
            assert [x.item() for x in policy.stream(rows(3))] == [3, 6]
        with pytest.raises(CancelledError):
            list(policy.stream(rows(3)))


def test_before_the_first_block_it_is_open():
    policy = weft.batched(lambda x: x)
    assert policy(rows(1)).item() == 1
    with policy as same:
        assert same is policy
    assert is_closed(policy)


@pytest.mark.parametrize("is_task", [False, True])
def test_closed_for_good(is_task):
    policy = weft.batched(lambda x: x)

    async def main():
        if is_task:
            await policy.aclose()
        async with policy:
            pytest.fail("it was entered")

    if not is_task:
        policy.close()
    with pytest.raises(CancelledError, match=r"closed for good, by close\(\)"):
        asyncio.run(main())
    with pytest.raises(CancelledError, match="closed for good"):
        policy.__enter__()
    assert is_closed(policy)


def test_closed_for_good_inside_a_block_and_between_two():
    for inside in (True, False):
        policy = weft.batched(lambda x: x)
        with policy:
            if inside:
                policy.close()
                assert is_closed(policy)
        if not inside:
            policy.close()
        with pytest.raises(CancelledError):
            policy.__enter__()


def test_a_wrong_timeout_ends_nothing():
    policy = weft.batched(lambda x: x)
    with pytest.raises(ValueError, match="timeout"):
        policy.close(timeout=-1)
    with policy:
        assert not is_closed(policy)


def test_the_last_of_nested_blocks_closes():
    policy = weft.batched(lambda x: x)
    with policy:
        with policy, pytest.raises(KeyError), policy:
            raise KeyError
        assert not is_closed(policy)
    assert is_closed(policy)


def test_the_last_of_concurrent_tasks_closes():
    policy = weft.batched(double)

    async def one(begun, end):
        async with policy:
            begun.set()
            await end.wait()
            return (await policy.aio(rows(1))).item()

    async def main():
        begun, ends = [asyncio.Event() for _ in range(3)], [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.ensure_future(one(*events)) for events in zip(begun, ends, strict=True)]
        for each in begun:
            await each.wait()
        for i in (1, 0, 2):
            ends[i].set()
            assert await tasks[i] == 2
        with pytest.raises(CancelledError):
            await policy.aio(rows(1))

    for _ in range(2):
        asyncio.run(main())


def test_threads_that_enter_and_leave_at_once():
    """Inside its block no call of a thread is refused, whoever leaves meanwhile."""
    policy, found = weft.batched(lambda x: x * 2), []

    def enter():
        try:
            for _ in range(200):
                with policy:
                    assert policy(rows(1)).item() == 2
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == []
    assert is_closed(policy)


def test_a_block_that_begins_while_the_last_one_ends():
    """The end waits for what runs; the next block need not, and ends the wait."""
    model = Model()
    policy = weft.batched(model, parallel=2)
    policy.__enter__()
    first = held(policy, model)
    ending = start(policy.__exit__, None, None, None)
    until(lambda: policy._closed)
    with policy:
        ending.answer()
        assert not policy._closed
        model.gate.set()
        assert first.answer().item() == -2
        assert policy(rows(1)).item() == 2
    assert is_closed(policy)


def test_the_loop_of_an_async_function_that_was_opened_again_goes_on():
    """The end of the old block must not end the loop on which the calls of the new one run."""
    policy = weft.batched(double)
    policy.__enter__()
    leaving = policy._leave_block()
    with policy:
        assert policy(rows(1)).item() == 2
        thread = policy._async_function.thread()
        policy._wait_closed(leaving)
        assert policy._async_function.thread() is thread
    assert is_closed(policy)


def test_a_batch_that_outlives_its_block():
    model = Model()
    policy = weft.batched(model, parallel=2)
    first = held(policy, model)
    idle = policy._begin_close(False, timeout=0.01)
    with pytest.raises(DeadlineExceededError):
        idle.wait()
    with policy:
        model.gate.set()
        assert policy(rows(1)).item() == 2
        assert first.answer().item() == -2
    assert is_closed(policy)


def test_blocks_inside_its_own_call():
    def f(x):
        with policy:  # an inner block closes nothing
            return x * 2

    policy = weft.batched(f)
    with policy:
        assert policy(rows(1)).item() == 2
        assert not is_closed(policy)
    assert is_closed(policy)
    policy = weft.batched(f)
    with pytest.raises(FailedPreconditionError, match="inside one of its own calls"):
        policy(rows(1))


def test_calls_that_wait_at_the_end_are_answered_each_time():
    policy = weft.batched(lambda x: x * 2, max_batch_size=4, **FULL)

    async def main():
        async with policy:
            calls = [asyncio.ensure_future(policy.aio(rows(i))) for i in range(3)]
            await asyncio.sleep(0)
        return [(await call).item() for call in calls]

    for _ in range(2):
        assert asyncio.run(main()) == [0, 2, 4]


def test_options_and_recordings_of_a_batcher_that_was_opened_again(tmp_path):
    policy = weft.batched(lambda x: x * 2, max_batch_size=4)
    with policy:
        pass
    with pytest.raises(CancelledError):
        policy.update(max_batch_size=8)
    with policy:
        policy.update(max_batch_size=8)
        with policy.record(tmp_path / "calls"):
            policy.call(rows(1), caller="a")
    with policy.replay(tmp_path / "calls"), policy:
        policy.call(rows(1), caller="a")
    assert is_closed(policy)
    with policy:
        assert policy(rows(1)).item() == 2
    with policy.replay(tmp_path / "calls"):
        policy.__enter__()
        policy.call(rows(1), caller="a")
    assert policy(rows(1)).item() == 2
    policy.__exit__()
    assert is_closed(policy)


@pytest.mark.filterwarnings("ignore:Using .httpx.")
@pytest.mark.parametrize("kind", KINDS)
def test_an_application_that_is_started_again(kind):
    """Each lifespan has an event loop of its own."""
    need("starlette")
    need("httpx")
    from contextlib import asynccontextmanager

    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from starlette.testclient import TestClient

    f, options = KINDS[kind]
    policy = weft.batched(f, **options)

    @asynccontextmanager
    async def lifespan(_):
        async with policy:
            yield

    async def answer(_):
        return JSONResponse((await policy.aio(np.ones((1, 2)))).tolist())

    app = Starlette(routes=[Route("/", answer)], lifespan=lifespan)
    for _ in range(3):
        with TestClient(app) as client:
            for _ in range(2):
                assert client.get("/").json() == [[2.0, 2.0]]
        assert is_closed(policy)
