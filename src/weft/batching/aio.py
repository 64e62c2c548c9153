"""How a task of an event loop waits for a pending call."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from asyncio import _get_running_loop, get_running_loop
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import inf
from typing import Any
from weakref import WeakKeyDictionary, ref

from . import pending as pending_calls
from .pending import Pending, Sweeping

#: The threads there can be; they are started as they are needed.
MOST_THREADS = 4096


class Wait:
    """What a task awaits until a call is done: the task then takes its `outcome`. What takes time is done in a thread.

    It is its own iterator, and the future on which its task sleeps. A future of asyncio's has its loop call the task by a handle
    of its own; the tasks of a batch, which all go on at once, are called by one handle together (see `Inbox`). For 64 tasks
    that each await an answer from a thread that is 2.2 us a task instead of 3.2.
    """

    def __init__(self, pending: Pending) -> None:
        self._open(pending)

    def _open(self, pending: Pending) -> None:
        self._pending: Pending | None = pending
        self.loop: Any = None
        self._go_on: Callable[[Any], object] | None = None  # the task's next step, while it sleeps
        self._context: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancelled: tuple[Any, ...] | None = None  # with what, if it was
        self._asyncio_future_blocking = False  # by which a task knows a future

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Wait:
        return self

    def __next__(self) -> Wait:
        pending = self._pending
        assert pending is not None
        if self._sleeps(pending):
            return self
        raise StopIteration  # compiled, that is no exception as long as nothing is tried around it

    def _sleeps(self, pending: Pending) -> bool:
        """Whether the task is to sleep, having done what there is to do; else the call is done."""
        try:
            if self.loop is not None:
                self._look(pending)
            while not pending.done:
                if pending.jobs:
                    self._work(pending)
                elif self.loop is None:
                    self.loop = _here.loop or get_running_loop()
                    pending.waiter = self
                else:
                    if pending.alarm < inf:
                        self._set_alarm(pending)
                    self._asyncio_future_blocking = True
                    return True
        except BaseException:
            self._leave(pending)
            raise
        self._pending = None  # which knows this as its waiter
        return False

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Wait:
        """The task is being cancelled, or its coroutine closed."""
        if self._pending is not None:
            self._leave(self._pending)
        raise kind if value is None else value

    def close(self) -> None:
        """Leave: the coroutine is given up."""
        if self._pending is not None:
            self._leave(self._pending)

    def _leave(self, pending: Pending) -> None:
        self._pending = None
        if self._timer is not None:
            self._timer.cancel()
        pending.abandon()

    def _look(self, pending: Pending) -> None:
        """Having slept, see whether it is time for the alarm."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not (pending.done or pending.jobs) and pending.alarm < inf and pending.clock.now() >= pending.alarm:
            pending.ring()

    def _set_alarm(self, pending: Pending) -> None:
        """See to it that something happens at the time `alarm`."""
        if pending.sweeper is not None:
            inbox_of(self.loop).sweep_by(pending.sweeper, pending.alarm)
        elif pending.needs_timer(self.loop):
            self._timer = self.loop.call_later(max(0.0, pending.alarm - pending.clock.now()), self.wake)

    def _work(self, pending: Pending) -> None:
        """Do the next job without holding up the loop; its end wakes this call like any other news."""
        jobs = pending.jobs
        assert jobs is not None
        job = jobs[0]
        if job.is_short():
            job.run()
        else:
            loop = get_running_loop()
            loop.run_in_executor(_executor(), contextvars.copy_context().run, job.run)
        jobs.popleft()

    # --- what a task asks of a future, and of nothing else is it asked ---

    def get_loop(self) -> Any:
        """The loop in which the task runs."""
        return self.loop

    def add_done_callback(self, go_on: Callable[[Any], object], *, context: Any) -> None:
        """The task sleeps now."""
        self._go_on, self._context = go_on, context

    def result(self) -> None:
        """What the task looks at when it goes on: nothing, or that it was cancelled."""
        if self._cancelled is not None:
            raise asyncio.CancelledError(*self._cancelled)

    def cancel(self, msg: Any = None) -> bool:
        """Wake the task to be cancelled; whether it sleeps."""
        if self._go_on is None:
            return False
        self._cancelled = () if msg is None else (msg,)
        self.loop.call_soon(self.wake)
        return True

    def wake(self, future: Any = None) -> None:
        """Let the task go on, now; in its loop, outside any task.

        It looks at the result of a future: at that of `future`, if it is given, unless it is cancelled. A task asks a future of
        asyncio's own in 10 ns, and others in 130.
        """
        go_on = self._go_on
        if go_on is not None:
            self._go_on = None
            self._context.run(go_on, self if future is None or self._cancelled is not None else future)


def done(pending: Pending) -> Wait:
    """What a task awaits until a call is done."""
    wait = Wait.__new__(Wait)  # compiled, without the price of calling a class
    wait._open(pending)
    return wait


def run_elsewhere(job: Callable[[], None]) -> None:
    """Do a job in a thread that is no caller's."""
    _executor().submit(job)


@cache
def _executor() -> ThreadPoolExecutor:
    """Threads for the functions of batches whose callers are all tasks.

    Not the loop's own: its threads may all be waiting for the very batch that is to be run.
    """
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="weft")


def _wake(waits: list[Wait]) -> None:
    """End the sleep of tasks, from any thread."""
    while waits:
        loop = waits[0].loop
        others = [wait for wait in waits if wait.loop is not loop]
        inbox_of(loop).post([wait for wait in waits if wait.loop is loop] if others else waits)
        waits = others


pending_calls.wake_tasks = _wake
pending_calls.run_elsewhere = run_elsewhere


def _let_go_on(waits: deque[Wait], count: int, future: Any) -> None:
    """Wake the first `count`, in their loop; `future` has the result None."""
    while count:
        count -= 1
        wait = waits.popleft()
        wait.wake(future)


class Inbox:
    """The tasks of one loop that there is news for: the loop is called once for all that come together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = ref(loop)
        self._lock = threading.Lock()
        self._waits: deque[Wait] = deque()
        self._is_called = False
        self._sweeps: dict[Sweeping, tuple[float, asyncio.TimerHandle]] = {}

    def post(self, waits: list[Wait]) -> None:
        """Have tasks go on in their loop."""
        self._waits.extend(waits)
        self._call(waits[0].loop)

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._is_called:
                return
            self._is_called = True
        try:
            (loop.call_soon if loop is _get_running_loop() else loop.call_soon_threadsafe)(self._deliver)
        except RuntimeError:  # the loop is closed, and everyone in it gone
            self._waits.clear()
            self._is_called = False

    def _deliver(self) -> None:
        """Let those go on that are here now; others come after what else the loop has to do."""
        with self._lock:
            self._is_called = False
        waits = self._waits
        loop = _here.loop = get_running_loop()
        try:
            future: asyncio.Future[None] | None = None
            if len(waits) > 1:
                future = asyncio.Future(loop=loop)
                future.set_result(None)
            _let_go_on(waits, len(waits), future)
        except BaseException:  # a task ends the program: the others go on if the loop does
            if waits:
                self._call(waits[0].loop)
            raise
        finally:
            _here.loop = None

    def sweep_by(self, scope: Sweeping, when: float) -> None:
        """Have `scope` swept at the time `when`, by the loop that is running; a sweep that comes sooner looks after the rest."""
        planned = self._sweeps.get(scope)
        if planned is not None:
            if planned[0] <= when:
                return
            planned[1].cancel()
        loop = get_running_loop()
        timer = loop.call_later(max(0.0, when - scope.clock.now()), self._sweep, scope)
        self._sweeps[scope] = when, timer

    def _sweep(self, scope: Sweeping) -> None:
        del self._sweeps[scope]
        if scope.clock.now() >= scope.next_expiry:
            scope.sweep()
        if scope.next_expiry < inf:
            self.sweep_by(scope, scope.next_expiry)


class _Here(threading.local):
    inbox: Inbox | None = None  # the one that this thread used last
    loop: Any = None  # the one that runs, while tasks are woken: asyncio takes 180 ns to tell


_inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox] = WeakKeyDictionary()
_making = threading.Lock()
_here = _Here()


def inbox_of(loop: asyncio.AbstractEventLoop) -> Inbox:
    """The inbox of a loop."""
    found = _here.inbox
    if found is None or found.loop() is not loop:
        with _making:
            found = _inboxes.get(loop)
            if found is None:
                found = _inboxes[loop] = Inbox(loop)
        _here.inbox = found
    return found


def _after_fork_in_child() -> None:
    """Neither the loops of other threads nor the executor's threads came along, and locks may be held for ever."""
    global _inboxes, _making, _here
    _executor.cache_clear()
    _inboxes, _making, _here = WeakKeyDictionary(), threading.Lock(), _Here()


os.register_at_fork(after_in_child=_after_fork_in_child)
