"""With `on_loop`, calls of event loops that are busy, stopped, closed or interrupted hinder no other call."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from support.aio_calls import begin, run
from support.batched_calls import rows
from support.callers import PATIENCE, start, until

import weft
from weft.batching.tasks import LoopInbox
from weft.errors import QueueFullError

OTHER = np.ones((1, 3))  # has a queue of its own


pytestmark = pytest.mark.usefixtures("scope")


def double(x):
    return x * 2


def stopped(policy, *arrays):
    """A loop that stopped when its tasks had made these calls, and its tasks."""
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(policy.aio(x)) for x in arrays]
    loop.call_soon(loop.stop)
    loop.run_forever()
    return loop, tasks


def end(loop, tasks):
    """Have a loop that stopped go on, and return the answers of its tasks."""
    loop.run_until_complete(asyncio.wait(tasks, timeout=PATIENCE))
    loop.close()
    return [task.result() for task in tasks]


def closed(loop, tasks):
    """Close a loop whose tasks wait."""
    loop.close()
    for task in tasks:
        task._log_destroy_pending = False


def test_the_first_call_of_another_loop_is_cancelled():
    """The second one watches the time from then on."""
    policy = weft.batched(double, on_loop=True, max_wait=0.01)
    before = stopped(policy, OTHER)

    async def main():
        first, second = await begin(policy.aio(rows(1)), policy.aio(rows(2)))
        first.cancel()
        return await second

    assert run(main()).item() == 4
    assert end(*before)[0].sum() == 6


def test_an_update_makes_the_batches_of_another_loop_ready():
    policy = weft.batched(double, on_loop=True, max_wait=PATIENCE)
    before = stopped(policy, OTHER)

    async def main():
        calls = await begin(*(policy.aio(rows(i)) for i in range(3)))
        policy.update(max_batch_size=2, max_wait=0.0)
        return await asyncio.gather(*calls)

    assert [y.item() for y in run(main())] == [0, 2, 4]
    assert end(*before)[0].sum() == 6


def test_an_update_makes_a_batch_ready_that_a_call_of_another_loop_has_joined():
    policy = weft.batched(double, on_loop=True, max_wait=PATIENCE)
    before = stopped(policy, rows(0), rows(1))

    async def main():
        (call,) = await begin(policy.aio(rows(2)))
        policy.update(max_wait=0.0)
        return await call

    assert run(main()).item() == 4
    assert [y.item() for y in end(*before)] == [0, 2]


@pytest.mark.parametrize("is_task", [False, True], ids=["thread", "task"])
def test_a_queue_that_is_full_of_the_calls_of_a_loop_that_stopped(is_task):
    policy = weft.batched(double, on_loop=True, max_batch_size=2, max_queue=2)
    before = stopped(policy, *(rows(i) for i in range(4)))

    def ask(x):
        return run(policy.aio(x)) if is_task else policy(x)

    with pytest.raises(QueueFullError):
        start(ask, rows(5)).answer()
    until(lambda: policy.statistics().waiting == 2)  # a worker has run a batch
    assert start(ask, rows(5)).answer().item() == 10
    assert [y.item() for y in end(*before)] == [0, 2, 4, 6]


def test_a_loop_is_closed_while_its_calls_wait_for_more():
    threads = []

    def f(x):
        threads.append(threading.current_thread())
        return x * 2

    policy = weft.batched(f, on_loop=True, max_wait=PATIENCE)
    loop, tasks = stopped(policy, rows(0), rows(1))
    loop.run_until_complete(asyncio.sleep(0))  # it has looked, and no batch was ready
    closed(loop, tasks)
    policy.update(max_wait=0.0)
    until(lambda: policy.statistics().calls == 2)
    assert threads != [threading.current_thread()]
    assert policy(rows(2)).item() == 4


@pytest.mark.parametrize("on_loop", [False, True])
def test_loops_that_are_closed_before_their_calls_are_answered_are_freed(on_loop):
    policy = weft.batched(double, on_loop=on_loop)

    def leave():
        loop, tasks = stopped(policy, rows(1))
        if not on_loop:
            until(lambda: policy.statistics().running == policy.statistics().waiting == 0)
        closed(loop, tasks)
        return weakref.ref(loop)

    loops = [leave() for _ in range(3)]
    assert run(policy.aio(rows(2))).item() == 4
    run(policy.aio(rows(2)))
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3


@pytest.mark.skipif(weft.is_compiled, reason="compiled modules cannot be interrupted line by line")
@pytest.mark.parametrize("name", ["_call", "_run_turns"])
def test_ctrl_c_at_every_line_of_a_loops_inbox(name):
    """The loop goes on: calls of others are answered, and later ones."""
    policy = weft.batched(double, on_loop=True, max_batch_size=2)
    code = getattr(LoopInbox, name).__code__
    trace, hits = sys.gettrace(), 0
    for steps in range(1, 40):
        left = steps

        def bomb(frame, event, argument):
            nonlocal left
            if frame.f_code is code and event == "line":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return bomb

        loop = asyncio.new_event_loop()
        calls = [loop.create_task(policy.aio(rows(i))) for i in range(3)]
        everything = loop.create_task(asyncio.wait(calls, timeout=PATIENCE))
        try:
            sys.settrace(bomb)
            try:
                loop.run_until_complete(everything)
            finally:
                sys.settrace(trace)
        except KeyboardInterrupt:
            hits += 1
        assert loop.run_until_complete(asyncio.wait_for(policy.aio(rows(7)), PATIENCE)).item() == 14
        _, waiting = loop.run_until_complete(everything)
        loop.close()
        assert not waiting
        for i, call in enumerate(calls):
            assert isinstance(call.exception(), KeyboardInterrupt) or call.result().item() == 2 * i
    assert hits > 5
