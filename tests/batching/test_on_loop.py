"""Batches of tasks that run in their event loop: who runs what, and that nobody waits for a loop that does not turn."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import numpy as np
import pytest
from support.aio_calls import Held, Seen, begin, run
from support.batched_calls import rows
from support.callers import PATIENCE, start, until
from support.libraries import need

import weft
from weft.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    QueueFullError,
    UnknownError,
)

pytestmark = pytest.mark.usefixtures("scope")


@pytest.fixture
def seen():
    return Seen()


async def ask(policy, *values):
    """The answers of one task for each value."""
    return await asyncio.gather(*(policy.aio(rows(value)) for value in values))


# --- in the loop ---


def test_the_calls_of_one_turn_share_a_batch_that_runs_in_the_loop(seen):
    policy = weft.batched(seen, on_loop=True)
    got = run(ask(policy, 1, 2, 3))
    assert [y.item() for y in got] == [2, 4, 6]
    assert seen.batches == [[1, 2, 3]]
    assert seen.ran_in_loop


def test_calls_one_after_the_other(seen):
    policy = weft.batched(seen, on_loop=True)

    async def main():
        for i in range(20):
            assert (await policy.aio(rows(i))).item() == 2 * i

    run(main())
    assert seen.batches == [[i] for i in range(20)]
    assert seen.ran_in_loop


def test_the_loop_does_other_work_between_two_batches(seen):
    policy = weft.batched(seen, on_loop=True, max_batch_size=2)
    ticks = []

    async def main():
        calls = asyncio.ensure_future(ask(policy, *range(8)))
        while not calls.done():
            await asyncio.sleep(0)
            ticks.append(len(seen.batches))

    run(main())
    assert seen.batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert {1, 2, 3} <= {*ticks}
    assert seen.ran_in_loop


def test_calls_of_different_keys(seen):
    policy = weft.batched(seen, on_loop=True)

    async def main():
        return await asyncio.gather(*(policy.aio(np.full((1, 1 + i % 3), i)) for i in range(9)))

    assert [y[0, 0] for y in run(main())] == [2 * i for i in range(9)]
    assert len(seen.batches) == 3
    assert seen.ran_in_loop


def test_a_call_that_is_split(seen):
    policy = weft.batched(seen, on_loop=True, split=True, max_batch_size=4)
    assert run(policy.aio(rows(*range(10)))).ravel().tolist() == [2 * i for i in range(10)]
    assert [len(batch) for batch in seen.batches] == [4, 4, 2]
    assert seen.ran_in_loop


def test_max_wait_ends_in_the_loop(seen):
    policy = weft.batched(seen, on_loop=True, max_wait=0.05)

    async def main():
        return await asyncio.gather(*(policy.aio.call(rows(i), receipt=True) for i in range(3)))

    got = run(main())
    assert {receipt.reason for _, receipt in got} == {"timeout"}
    assert got[0][1].queue_time >= 0.05
    assert seen.ran_in_loop


def test_a_full_batch_does_not_wait(seen):
    policy = weft.batched(seen, on_loop=True, max_wait=PATIENCE, max_batch_size=3)
    assert [y.item() for y in run(ask(policy, 1, 2, 3))] == [2, 4, 6]
    assert seen.ran_in_loop


def test_priorities(seen):
    policy = weft.batched(seen, on_loop=True, max_batch_size=2)

    async def main():
        low = [policy.aio.call(rows(i), priority="low") for i in range(3)]
        await asyncio.gather(*low, *(policy.aio(rows(10 + i)) for i in range(3)))

    run(main())
    assert sorted(x for batch in seen.batches for x in batch) == [0, 1, 2, 10, 11, 12]
    assert seen.batches[0] == [10, 11]
    assert seen.ran_in_loop


def test_the_function_sees_no_context_of_a_caller():
    variable = contextvars.ContextVar("variable", default="none")
    found = []

    def look(x):
        found.append(variable.get())
        return x

    async def main():
        variable.set("a task's")
        await policy.aio(rows(1))

    policy = weft.batched(look, on_loop=True)
    run(main())
    assert found == ["none"]


def test_record_and_replay(seen, tmp_path):
    policy = weft.batched(seen, on_loop=True, max_batch_size=3)

    async def main(order):
        await asyncio.gather(*(policy.aio.call(rows(i), caller=f"caller {i}") for i in order))

    with policy.record(tmp_path / "batches"):
        run(main(range(6)))
    with policy.replay(tmp_path / "batches"):
        run(main([5, 3, 1, 0, 2, 4]))
    assert seen.batches == [[0, 1, 2], [3, 4, 5]] * 2
    assert seen.ran_in_loop


def test_gradients_of_torch():
    need("torch")
    import torch

    weights = torch.ones(1, 1, requires_grad=True)
    threads = []

    def f(x):
        threads.append(threading.current_thread())
        return x @ weights

    async def main():
        ys = await asyncio.gather(*(policy.aio(torch.full((1, 1), float(i))) for i in range(4)))
        for y in ys:
            y.sum().backward()
        await policy.aio.join()

    policy = weft.batched(f, on_loop=True, wait_backward=False)
    run(main())
    assert weights.grad.item() == 6
    assert threads == [threading.current_thread()]


def test_pull_backs(seen):
    policy = weft.batched(seen, on_loop=True, vjp=lambda x: (seen(x), lambda dy: 2 * dy))

    async def main():
        got = await asyncio.gather(*(policy.aio.vjp(rows(i)) for i in range(3)))
        return await asyncio.gather(*(pull_back(rows(i)) for i, (_, pull_back) in enumerate(got)))

    assert [dx.item() for dx in run(main())] == [0, 2, 4]
    assert seen.ran_in_loop


# --- limits, failures and ends ---


def test_a_queue_that_is_full(seen):
    policy = weft.batched(seen, on_loop=True, max_batch_size=2, max_queue=1)

    async def main():
        return await asyncio.gather(*(policy.aio(rows(i)) for i in range(5)), return_exceptions=True)

    got = run(main())
    assert [y.item() for y in got[:3]] == [0, 2, 4]
    assert all(isinstance(y, QueueFullError) for y in got[3:])


def test_deadlines():
    def slow(x):
        until(lambda: policy.statistics().running == 1 and policy._scope.clock.now() > late)
        return x

    async def main():
        nonlocal late
        late = policy._scope.clock.now() + 0.02
        calls = policy.aio.call(rows(1), deadline=0.01), policy.aio.call(rows(2), deadline=PATIENCE)
        return await asyncio.gather(*calls, return_exceptions=True)

    late = 0.0
    policy = weft.batched(slow, on_loop=True)
    got = run(main())
    assert isinstance(got[0], DeadlineExceededError)  # only now: the loop was busy
    assert got[1].item() == 2
    assert policy.statistics().late == 1


def test_only_the_guilty_call_fails():
    def root(x):
        if (x < 0).any():
            raise ValueError("negative")
        return x**0.5

    async def main():
        return await asyncio.gather(*(policy.aio(rows(v)) for v in (1, 4, -9, 16)), return_exceptions=True)

    policy = weft.batched(root, on_loop=True)
    one, two, bad, four = run(main())
    assert (one.item(), two.item(), four.item()) == (1, 2, 4)
    assert isinstance(bad, ValueError)


def test_a_cancelled_task_leaves_its_batch(seen):
    policy = weft.batched(seen, on_loop=True, max_wait=PATIENCE, max_batch_size=3)

    async def main():
        first, second = await begin(policy.aio(rows(0)), policy.aio(rows(1)))
        second.cancel()
        await asyncio.wait([second])
        return await asyncio.gather(first, ask(policy, 2, 3))

    first, others = run(main())
    assert [first.item(), *(y.item() for y in others)] == [0, 4, 6]
    assert seen.batches == [[0, 2, 3]]


def test_a_task_that_is_cancelled_while_its_batch_is_due(seen):
    policy = weft.batched(seen, on_loop=True)

    async def main():
        tasks = [asyncio.ensure_future(policy.aio(rows(i))) for i in range(3)]
        asyncio.get_running_loop().call_soon(tasks[1].cancel)
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = run(main())
    assert (first.item(), third.item()) == (0, 4)
    assert isinstance(second, asyncio.CancelledError)


def test_the_function_calls_its_own_batcher():
    def f(x):
        return x if x[0, 0] <= 0 else policy(x - 1) + 1

    policy = weft.batched(f, on_loop=True)
    assert run(policy.aio(rows(5))).item() == 5


def test_the_function_begins_a_task_that_calls_its_own_batcher(seen):
    tasks = []

    def f(x):
        if x[0, 0] > 0:
            tasks.append(asyncio.ensure_future(policy.aio(x - 1)))
        return seen(x)

    async def main():
        await policy.aio(rows(3))
        for task in tasks:
            await task

    policy = weft.batched(f, on_loop=True)
    run(main())
    assert seen.batches == [[3], [2], [1], [0]]


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError, KeyboardInterrupt])
def test_what_would_end_a_worker(seen, kind):
    def f(x):
        if x[0, 0] == 0:
            raise kind("now")
        return seen(x)

    async def main():
        got = await asyncio.gather(*(policy.aio(rows(0)) for _ in range(2)), return_exceptions=True)
        return *got, await policy.aio(rows(1))

    policy = weft.batched(f, on_loop=True)
    *failed, answer = start(run, main()).answer()  # Ctrl-C comes in the main thread alone
    assert answer.item() == 2
    ends_threads = issubclass(kind, (SystemExit, KeyboardInterrupt))
    for error in failed:
        assert type(error) is (CancelledError if ends_threads else UnknownError)
        assert kind.__name__ in str(error)
        assert isinstance(error.__cause__, kind)


def test_ctrl_c_ends_the_loop(seen):
    def f(x):
        if x[0, 0] == 0:
            raise KeyboardInterrupt
        return seen(x)

    policy = weft.batched(f, on_loop=True)
    loop = asyncio.new_event_loop()
    try:
        calls = [loop.create_task(policy.aio(rows(0))) for _ in range(2)]
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asyncio.wait(calls))
        got = loop.run_until_complete(asyncio.gather(*calls, return_exceptions=True))
        assert [type(error) for error in got] == [CancelledError] * 2
        assert loop.run_until_complete(policy.aio(rows(1))).item() == 2
    finally:
        loop.close()


def test_aclose_answers_the_calls_that_wait(seen):
    policy = weft.batched(seen, on_loop=True, max_batch_size=2)

    async def main():
        calls = await begin(*(policy.aio(rows(i)) for i in range(3)))
        calls += [asyncio.ensure_future(policy.aio(rows(i))) for i in range(3, 6)]
        await policy.aclose()
        return await asyncio.gather(*calls, return_exceptions=True)

    got = run(main())
    assert [y.item() for y in got[:3]] == [0, 2, 4]
    assert all(isinstance(y, CancelledError) for y in got[3:])


def test_close_in_the_loop_itself(seen):
    """The loop does not turn while it waits: a worker runs what is left."""
    policy = weft.batched(seen, on_loop=True, max_batch_size=2)

    async def main():
        calls = [asyncio.ensure_future(policy.aio(rows(i))) for i in range(5)]
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: policy.close(timeout=PATIENCE))  # after the calls, and before their batch
        return await asyncio.gather(*calls)

    assert [y.item() for y in run(main())] == [0, 2, 4, 6, 8]
    assert not seen.ran_in_loop


def test_close_without_a_drain(seen):
    policy = weft.batched(seen, on_loop=True)

    async def main():
        calls = [asyncio.ensure_future(policy.aio(rows(i))) for i in range(3)]
        asyncio.get_running_loop().call_soon(lambda: policy.close(drain=False))
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [type(y) for y in run(main())] == [CancelledError] * 3
    assert seen.batches == []


def test_the_function_cannot_close_its_batcher():
    policy = weft.batched(lambda x: policy.close(), on_loop=True, name="f")
    with pytest.raises(FailedPreconditionError, match="cannot be closed from inside"):
        run(policy.aio(rows(1)))


# --- threads, and several loops ---


def test_a_lone_thread_runs_its_own_batch(seen):
    policy = weft.batched(seen, on_loop=True)
    assert policy(rows(1)).item() == 2
    assert seen.ran_in_loop


def test_a_thread_takes_the_calls_of_a_loop_that_does_not_turn(seen):
    policy = weft.batched(seen, on_loop=True)

    async def main():
        calls = [asyncio.ensure_future(policy.aio(rows(i))) for i in range(2)]
        asyncio.get_running_loop().call_soon(lambda: others.append(start(policy, rows(2)).answer()))
        return await asyncio.gather(*calls)

    others = []
    assert [y.item() for y in run(main())] == [0, 2]
    assert others[0].item() == 4
    assert seen.batches == [[0, 1, 2]]
    assert not seen.ran_in_loop


def test_a_thread_that_comes_while_the_loop_runs_a_batch():
    f = Held()
    policy = weft.batched(f, on_loop=True)
    loop = start(run, policy.aio(rows(0)))
    f.wait()
    threads = [start(policy, rows(i)) for i in (1, 2)]
    until(lambda: policy.statistics().waiting == 2)
    f.go.set()
    assert loop.answer().item() == 0
    assert [thread.answer().item() for thread in threads] == [1, 2]


def test_tasks_that_come_while_a_worker_runs_a_batch(seen):
    f = Held()
    policy = weft.batched(lambda x: seen(f(x)), on_loop=True)

    async def main():
        threads = [start(policy, rows(0)) for _ in range(2)]
        await asyncio.to_thread(f.wait)
        calls = await begin(policy.aio(rows(1)), policy.aio(rows(2)))
        await asyncio.to_thread(until, lambda: policy.statistics().waiting >= 2)
        f.go.set()
        got = await asyncio.gather(*calls)
        await asyncio.to_thread(lambda: [thread.answer() for thread in threads])
        return got

    assert [y.item() for y in run(main())] == [2, 4]


def test_threads_tasks_and_several_loops(seen):
    policy = weft.batched(seen, on_loop=True, max_batch_size=8)

    def thread(i):
        for turn in range(30):
            assert policy(rows(100 * i + turn)).item() == 2 * (100 * i + turn)

    async def task(i):
        for turn in range(30):
            assert (await policy.aio(rows(100 * i + turn))).item() == 2 * (100 * i + turn)

    async def tasks(first):
        await asyncio.gather(*(task(first + i) for i in range(10)))

    callers = [start(thread, i) for i in range(3)] + [start(run, tasks(10 * i)) for i in range(1, 4)]
    for caller in callers:
        caller.answer()
    assert sum(map(len, seen.batches)) == 30 * 33
    statistics = policy.statistics()
    assert (statistics.calls, statistics.waiting, statistics.running) == (30 * 33, 0, 0)


@pytest.mark.parametrize("is_closed", [False, True], ids=["stopped", "closed"])
def test_a_loop_that_stopped_before_its_batch(seen, is_closed):
    """Nobody waits for it: threads, and tasks of another loop."""
    policy = weft.batched(seen, on_loop=True)
    loop = asyncio.new_event_loop()
    call = loop.create_task(policy.aio(rows(1)))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert policy.statistics().waiting == 1
    if is_closed:
        loop.close()
    other = np.ones((1, 3))
    assert start(run, policy.aio(other)).answer().sum() == 6
    assert start(policy, other).answer().sum() == 6
    assert start(run, policy.aio(rows(2))).answer().item() == 4
    policy.close(timeout=PATIENCE)
    if is_closed:
        call._log_destroy_pending = False
        call.get_coro().close()
    else:
        assert loop.run_until_complete(call).item() == 2
        loop.close()


def test_a_loop_that_runs_again(seen):
    policy = weft.batched(seen, on_loop=True)
    loop = asyncio.new_event_loop()
    try:
        call = loop.create_task(policy.aio(rows(1)))
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert loop.run_until_complete(call).item() == 2
    finally:
        loop.close()
    assert seen.ran_in_loop


# --- refused ---


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"on_loop": "yes"}, "on_loop must be True or False, got 'yes'"),
        ({"parallel": 2}, "parallel must be 1 with on_loop=True: an event loop runs one batch at a time, got 2"),
        ({"device": "cpu"}, "on_loop must be False where the function runs on another device"),
    ],
)
def test_options_that_have_no_meaning_with_it(options, sentence):
    with pytest.raises(InvalidArgumentError, match=sentence):
        weft.batched(np.negative, **{"on_loop": True, **options})


def test_it_cannot_be_changed(seen):
    policy = weft.batched(seen, on_loop=True)
    with pytest.raises(InvalidArgumentError, match="parallel must be 1"):
        policy.update(parallel=2)
    with pytest.raises(InvalidArgumentError, match="on_loop of a batcher cannot be changed"):
        policy.update(on_loop=False)


def test_functions_that_have_no_meaning_with_it():
    async def later(x):
        return x

    def chunks(x):
        yield x

    for f, kind in ((later, "a coroutine"), (chunks, "a generator")):
        with pytest.raises(InvalidArgumentError, match=f"on_loop must be False for a function that gives {kind}"):
            weft.batched(f, on_loop=True)
