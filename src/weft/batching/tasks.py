"""How a task of an event loop waits on a ticket."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from _thread import get_ident
from asyncio import _get_running_loop, get_running_loop
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any
from weakref import WeakKeyDictionary, ref

from ..core.lock import left, lock, work_off
from ..core.ticket import Job, Sweeping, Ticket
from .dispatcher import Run
from .gradient import this_thread
from .workers import run_elsewhere


class TaskWaiter:
    """What a task awaits until a call is done: the task then takes its `outcome`. What takes time is done in a thread.

    It is its own iterator, and the future on which its task sleeps. A future of asyncio's has its loop call the task by a handle
    of its own; the tasks of a batch, which all go on at once, are called by one handle together (see `LoopInbox`). For 64 tasks
    that each await an answer from a thread that is 2.2 us a task instead of 3.2.
    """

    def __init__(self, ticket: Ticket, loop: Any = None) -> None:
        self._ticket: Ticket | None = ticket
        self.loop: Any = loop  # known at the latest when the task sleeps
        self._is_started = False  # whether the call is in its queue
        self._is_attached = False  # whether the call knows who waits for it
        self._go_on: Callable[[Any], object] | None = None  # the task's next step, while it sleeps
        self._context: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancelled: tuple[Any, ...] | None = None  # with what, if it was
        self._asyncio_future_blocking = False  # by which a task knows a future

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> TaskWaiter:
        return self

    def __next__(self) -> TaskWaiter:
        ticket = self._ticket
        assert ticket is not None
        if self._sleeps(ticket):
            return self
        raise StopIteration  # compiled, that is no exception as long as nothing is tried around it

    def _sleeps(self, ticket: Ticket) -> bool:
        """Whether the task is to sleep, having done what there is to do; else the call is done."""
        try:
            if not self._is_started:
                self._is_started = True
                ticket.enter()
                ticket.leave()  # a task has it now: the loop's thread is free for others
            if self._is_attached:
                self._look(ticket)
            while not ticket.done:
                if ticket.jobs:
                    self._work(ticket)
                elif not self._is_attached:
                    if self.loop is None:
                        self.loop = here().loop
                    self._is_attached = True
                    ticket.waiter = self
                else:
                    if ticket.alarm < inf:
                        self._set_alarm(ticket)
                    self._asyncio_future_blocking = True
                    return True
        except BaseException:
            self._leave(ticket)
            raise
        self._ticket = None  # which knows this as its waiter
        return False

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> TaskWaiter:
        """The task is being cancelled, or its coroutine closed."""
        if self._ticket is not None:
            self._leave(self._ticket)
        raise kind if value is None else value

    def close(self) -> None:
        """Leave: the coroutine is given up."""
        if self._ticket is not None:
            self._leave(self._ticket)

    def _leave(self, ticket: Ticket) -> None:
        self._ticket = None
        if self._timer is not None:
            self._timer.cancel()
        ticket.abandon()

    def _look(self, ticket: Ticket) -> None:
        """Having slept, see whether it is time for the alarm."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not (ticket.done or ticket.jobs) and ticket.alarm < inf and ticket.clock.now() >= ticket.alarm:
            ticket.on_alarm()

    def _set_alarm(self, ticket: Ticket) -> None:
        """See to it that something happens at the time `alarm`."""
        if ticket.sweeper is not None:
            inbox_of(self.loop).sweep_by(ticket.sweeper, ticket.alarm)
        elif ticket.needs_timer(self.loop):
            self._timer = self.loop.call_later(max(0.0, ticket.alarm - ticket.clock.now()), self.wake)

    def _work(self, ticket: Ticket) -> None:
        """Do the next job without holding up the loop; its end wakes this call like any other news."""
        jobs = ticket.jobs
        assert jobs is not None
        job = jobs[0]
        if job.is_short():
            job.run()
        else:
            _run_elsewhere(job)
        jobs.pop(0)

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

    def release(self) -> None:
        """End the sleep of the task, from any thread."""
        inbox_of(self.loop).post([self])

    @staticmethod
    def release_all(waits: list[TaskWaiter]) -> None:
        """End the sleep of tasks, from any thread; those of one loop together."""
        while waits:
            loop = waits[0].loop
            others = [wait for wait in waits if wait.loop is not loop]
            inbox_of(loop).post([wait for wait in waits if wait.loop is loop] if others else waits)
            waits = others

    def leave(self) -> None:
        """As a waiter: the caller goes on."""

    def wake(self, future: Any = None) -> None:
        """Let the task go on, now; in its loop, outside any task.

        It looks at the result of a future: at that of `future`, if it is given, unless it is cancelled. A task asks a future of
        asyncio's own in 10 ns, and others in 130.
        """
        go_on = self._go_on
        if go_on is not None:
            self._go_on = None
            self._context.run(go_on, self if future is None or self._cancelled is not None else future)


def done(ticket: Ticket, loop: Any = None) -> TaskWaiter:
    """What a task, of the loop `loop`, awaits until a call is done."""
    return TaskWaiter(ticket, loop)


class _InContext:
    """A job that runs in the context variables of the task it was given to."""

    def __init__(self, job: Job) -> None:
        self._job, self._context = job, contextvars.copy_context()

    def is_short(self) -> bool:
        return False

    def run(self) -> None:
        self._context.run(self._job.run)

    def lose(self, problem: BaseException) -> None:
        self._job.lose(problem)


def _run_elsewhere(job: Job) -> None:
    """Do a task's job in a thread that is no caller's.

    Not in the loop's own executor: its threads may all be waiting for the very batch that is to be run.
    """
    with lock:
        woken = run_elsewhere(_InContext(job))
        if woken is not None and isinstance(job, Run):
            job.is_begun = True  # if the task leaves, the run goes on
    if woken is None:
        job.run()
    else:
        for each in woken:
            each.wake()
    if left:
        work_off()


def _let_go_on(waits: list[TaskWaiter], future: Any) -> None:
    """Wake tasks in their loop, the last first; `future` has the result None."""
    while waits:
        wait = waits.pop()
        wait.wake(future)


class LoopInbox:
    """The tasks of one loop that there is news for: the loop is called once for all that come together.

    There is no lock: a finalizer may have news, too, in the middle of these lines.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = ref(loop)
        self._waits: deque[TaskWaiter] = deque()
        self._is_called = False
        self._sweeps: dict[Sweeping, tuple[float, asyncio.TimerHandle]] = {}

    def post(self, waits: list[TaskWaiter]) -> None:
        """Have tasks go on in their loop."""
        loop: asyncio.AbstractEventLoop = waits[0].loop
        self._waits.extend(waits)
        if self._is_called:
            return
        self._is_called = True  # if two threads come here at once, the loop is called twice: no harm
        try:
            (loop.call_soon if loop is _get_running_loop() else loop.call_soon_threadsafe)(self._deliver)
        except RuntimeError:  # the loop is closed, and everyone in it gone
            self._take()
        except BaseException:
            self._is_called = False  # perhaps it was not: the next one calls it
            raise

    def _take(self) -> list[TaskWaiter]:
        self._is_called = False  # first: whoever posts from now on calls the loop again
        waits: list[TaskWaiter] = []
        while self._waits:
            waits.append(self._waits.popleft())
        return waits

    def _deliver(self) -> None:
        """Let those go on that are here now; others come after what else the loop has to do."""
        global _spot
        waits = self._take()
        spot = _spot = RunningLoop()
        try:
            future: asyncio.Future[None] | None = None
            if len(waits) > 1:
                future = asyncio.Future(loop=spot.loop)
                future.set_result(None)
            waits.reverse()
            _let_go_on(waits, future)
        except BaseException:  # a task ends the program: the others go on if the loop does
            if waits:
                self.post(waits[::-1])
            raise
        finally:
            _spot = None

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


class RunningLoop:
    """Where a task runs: its loop, and what stands for its thread."""

    __slots__ = ("ident", "loop", "thread")

    def __init__(self) -> None:
        self.ident, self.loop, self.thread = get_ident(), get_running_loop(), this_thread()


_spot: RunningLoop | None = None  # where tasks were woken last, while they are


def here() -> RunningLoop:
    """Where the task runs that asks. Tasks that were woken together are told what is known: asyncio takes 180 ns to say it."""
    found = _spot
    return found if found is not None and found.ident == get_ident() else RunningLoop()


class _Here(threading.local):
    inbox: LoopInbox | None = None  # the one that this thread used last


_inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopInbox] = WeakKeyDictionary()
_here = _Here()


def inbox_of(loop: asyncio.AbstractEventLoop) -> LoopInbox:
    """The inbox of a loop."""
    found = _here.inbox
    if found is None or found.loop() is not loop:
        found = _inboxes.get(loop)
        if found is None:
            found = _inboxes.setdefault(loop, LoopInbox(loop))  # in one step: of two threads that make it, one is first
        _here.inbox = found
    return found


def _after_fork_in_child() -> None:
    """The loops of other threads are not in this process."""
    global _inboxes, _here, _spot
    _inboxes, _here, _spot = WeakKeyDictionary(), _Here(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
