"""How a task of an event loop waits for a pending call."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from asyncio import _get_running_loop
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from . import pending as pending_calls
from .pending import Pending, Sweeping

#: The threads there can be; they are started as they are needed.
MOST_THREADS = 4096


async def wait(pending: Pending) -> Any:
    """The result, once it is there: `Pending.wait` for a task. What takes time is done in a thread of an executor."""
    timer = None
    try:
        while not pending.done:
            loop = asyncio.get_running_loop()
            if pending.jobs:
                _work(pending, loop)
                continue
            waiter = pending.waiter = loop.create_future()
            if pending.done or pending.jobs:
                continue
            if pending.alarm < inf:
                timer = _set_alarm(pending, waiter, loop)
            await waiter
            if timer is not None:
                timer.cancel()
            if not (pending.done or pending.jobs) and pending.clock.now() >= pending.alarm:
                pending.ring()
    except BaseException:
        if timer is not None:
            timer.cancel()
        pending.abandon()
        raise
    if pending.error is not None:
        pending.fail()
    return pending.result()


def _set_alarm(
    pending: Pending, waiter: asyncio.Future[None], loop: asyncio.AbstractEventLoop
) -> asyncio.TimerHandle | None:
    """See to it that something happens at the time `alarm`."""
    if pending.sweeper is not None:
        Inbox.of(loop).sweep_by(pending.sweeper, pending.alarm)
    elif pending.needs_timer(loop):
        return loop.call_later(max(0.0, pending.alarm - pending.clock.now()), _wake, [waiter])
    return None


def _work(pending: Pending, loop: asyncio.AbstractEventLoop) -> None:
    """Do the next job without holding up the loop; its end wakes this call like any other news."""
    jobs = pending.jobs
    assert jobs is not None
    job = jobs[0]
    if job.is_short():
        job.run()
    else:
        loop.run_in_executor(_executor(), contextvars.copy_context().run, job.run)
    jobs.popleft()


def run_elsewhere(job: Callable[[], None]) -> None:
    """Do a job in a thread that is no caller's."""
    _executor().submit(job)


@cache
def _executor() -> ThreadPoolExecutor:
    """Threads for the functions of batches whose callers are all tasks.

    Not the loop's own: its threads may all be waiting for the very batch that is to be run.
    """
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="weft")


def _wake(futures: list[asyncio.Future[None]]) -> None:
    """End the sleep of tasks, from any thread. The futures are asyncio's own: a task meets subclasses at half the speed."""
    here = _get_running_loop()
    for future in futures:
        loop = future.get_loop()
        if loop is not here:
            Inbox.of(loop).post(future)
        elif not future.done():
            future.set_result(None)


pending_calls.wake_tasks = _wake
pending_calls.run_elsewhere = run_elsewhere


class Inbox:
    """The futures of one loop that other threads have news for: the loop is called once for all that come together."""

    _all: WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox] = WeakKeyDictionary()
    _making = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: list[asyncio.Future[None]] = []
        self._sweeps: dict[Sweeping, tuple[float, asyncio.TimerHandle]] = {}

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Inbox:
        """The inbox of a loop."""
        with cls._making:
            found = cls._all.get(loop)
            if found is None:
                found = cls._all[loop] = cls()
            return found

    def post(self, future: asyncio.Future[None]) -> None:
        """Have `future` answered in its loop."""
        with self._lock:
            self._futures.append(future)
            is_first = len(self._futures) == 1
        if is_first:
            try:
                future.get_loop().call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed, and everyone in it gone
                self._futures.clear()

    def _deliver(self) -> None:
        with self._lock:
            futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)

    def sweep_by(self, scope: Sweeping, when: float) -> None:
        """Have `scope` swept at the time `when`, by the loop that is running; a sweep that comes sooner looks after the rest."""
        planned = self._sweeps.get(scope)
        if planned is not None:
            if planned[0] <= when:
                return
            planned[1].cancel()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(0.0, when - scope.clock.now()), self._sweep, scope)
        self._sweeps[scope] = when, timer

    def _sweep(self, scope: Sweeping) -> None:
        del self._sweeps[scope]
        if scope.clock.now() >= scope.next_expiry:
            scope.sweep()
        if scope.next_expiry < inf:
            self.sweep_by(scope, scope.next_expiry)


def _after_fork_in_child() -> None:
    """Neither the loops of other threads nor the executor's threads came along, and locks may be held for ever."""
    _executor.cache_clear()
    Inbox._all = WeakKeyDictionary()
    Inbox._making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
