"""A ticket: what a caller holds while it waits for others, and how a thread waits on it; `batching.tasks` is how a task does.

A ticket ends once, by `resolve` or by `reject`. A thread with news for a ticket changes the state first and wakes the caller after;
a caller attaches its waiter first and looks at the state after. So no news is missed, and a call that need not wait never makes
a wakeup or a future.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections.abc import Callable
from math import inf
from typing import Any, Protocol

from ..errors import CancelledError
from .clock import Clock
from .fork import on_fork_in_child
from .lock import departed, remove_departed
from .scope import Scope
from .wakeup import Wakeup, release_in_turn

#: How often, in seconds, a waiting thread checks by itself that it was not forgotten.
HEARTBEAT = 1.0


class Job(Protocol):
    """Work that a waiting caller is asked to do. The job itself reports its outcome to the tickets that depend on it."""

    def is_short(self) -> bool:
        """Whether it is short enough to run inside an event loop."""

    def run(self) -> None:
        """Do the work."""

    def abort(self, problem: BaseException) -> None:
        """Report that `problem` has ended the thread that did the work."""


class CheckJob:
    """A job that only checks something. If its thread is ended nothing is lost: other callers check, too."""

    def __init__(self, check: Callable[[], object], is_short: bool) -> None:
        self._check, self._is_short = check, is_short

    def is_short(self) -> bool:
        return self._is_short

    def run(self) -> None:
        self._check()

    def abort(self, problem: BaseException) -> None:
        """Do nothing."""


class Waiter(Protocol):
    """What a caller sleeps on: a `Wakeup` for a thread, a `TaskWaiter` for a task."""

    loop: Any  # the event loop of a task, None for a thread

    def release(self) -> None:
        """Wake the caller."""

    def wake_next(self) -> None:
        """Wake the next of the callers that are woken in turn."""


class Ticket:
    """A call under way. `done` says that `value` or `error` is set; `alarm` is the time at which `on_alarm` must run.

    `jobs` is the work that this caller does while it waits: callers run the batches.
    """

    def __init__(self, clock: Clock) -> None:
        self._init_ticket(clock, None)

    def _init_ticket(self, clock: Clock, sweeper: Scope | None) -> None:
        # What `super().__init__` would do for subclasses that are made for every call; compiled, this is a plain C call.
        self.clock = clock
        self.sweeper = sweeper  # the scope whose sweep enforces the alarm, if one does
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.alarm = inf
        self.jobs: list[Job] | None = None
        self.waiter: Waiter | None = None  # once the caller sleeps
        self.then: Callable[[Any], Any] | None = None  # makes the result from the value, in the caller's thread
        self.dispatcher: Any = None  # the dispatcher the call waits in, if any
        self.thread = 0  # the id of the thread that is inside this call
        self.outer: Ticket | None = None  # the call that this thread was inside before

    # --- its end ---

    def resolve(self, value: Any) -> bool:
        """End the call with a value; return False and do nothing if it has ended. The caller must be woken after it."""
        if self.done:
            return False
        self.value = value
        self.done = True
        return True

    def reject(self, error: BaseException) -> bool:
        """End the call with an error; return False and do nothing if it has ended. The caller must be woken after it."""
        if self.done:
            return False
        self.error = error
        self.done = True
        return True

    def result(self) -> Any:
        """Return the result of a successful call, made from `value`; runs in the caller's thread."""
        return self.value if self.then is None else self.then(self.value)

    def outcome(self) -> Any:
        """Return the result of a call that is done, or raise its error."""
        if self.error is not None:
            self.fail()
        return self.result()

    def fail(self) -> None:
        """Raise the error, and drop the reference to it: its traceback refers to this call."""
        error, self.error = self.error, None
        assert error is not None
        try:
            raise error
        finally:
            del error

    # --- while it waits ---

    def enter(self) -> None:
        """Enter the queue or the table where the call waits; it may end at once."""

    def on_alarm(self) -> None:
        """Do what is due by now, at the time `alarm` or earlier, and check that nothing was missed."""

    def forget(self) -> list[Any]:
        """Take a departed caller out of its queue or table: see `weft.core.lock`."""
        self.end_inside()
        return []

    def abandon(self) -> None:
        """Give the call up: its caller no longer waits."""
        departed.append(self)
        self.end_inside()
        remove_departed()

    def wake(self) -> None:
        """Make the caller look at the state of its ticket."""
        waiter = self.waiter
        if waiter is not None:
            waiter.release()

    def add_job(self, job: Job) -> None:
        """Give the caller a job to do while it waits."""
        if self.jobs is None:
            self.jobs = []
        self.jobs.append(job)

    def begin_inside(self) -> None:
        """Note that this thread is inside this call, so that a call it makes meanwhile is known as a nested one."""
        calls, me = innermost_calls, get_ident()
        self.outer = calls.get(me)
        self.thread = me
        calls[me] = self

    def end_inside(self) -> None:
        """Note that the thread is no longer inside this call, and wake the next thread of those that were woken with it."""
        calls, thread = innermost_calls, self.thread
        if thread:
            other = calls.get(thread)
            if other is not self:
                while other is not None and other.outer is not self:
                    other = other.outer
                if other is not None:
                    other.outer = self.outer
            elif self.outer is None:
                calls.pop(thread, None)
            else:
                calls[thread] = self.outer
            self.thread = 0  # last: if the lines above are interrupted, they run again
        if self.waiter is not None:
            self.waiter.wake_next()

    def wait(self) -> Any:
        """Return the result once it is there; the thread does jobs and sleeps in between."""
        try:
            if not self.thread:
                self.begin_inside()
            self.enter()
            self._wait()
            self.end_inside()
        except BaseException:
            departed.append(self)  # first, and atomic: a second exception can interrupt the lines below
            self.end_inside()
            remove_departed()
            raise
        return self.outcome()

    def _wait(self) -> None:
        while not self.done:
            jobs = self.jobs
            if jobs:
                jobs[0].run()  # stays in the list while it runs: a job that never began can be given to another caller
                jobs.pop(0)
            elif self.waiter is None:
                self.waiter = Wakeup()
            else:
                clock, until = self.clock, self.alarm
                if not clock.is_simulated or until == inf:
                    until = min(until, clock.now() + HEARTBEAT)
                if not clock.acquire(self.waiter, until):
                    self.on_alarm()

    def needs_timer(self, loop: Any) -> bool:
        """Whether the alarm of a call that waits in the event loop `loop` needs a timer of its own."""
        return True


#: The innermost call that each thread is inside, by thread id; `outer` leads to the others. It tells a call that a finalizer, a
#: signal handler or a running batch makes from one that may wait for other threads.
innermost_calls: dict[int, Ticket] = {}


def innermost_call() -> Ticket | None:
    """Return the innermost call that this thread is inside."""
    return innermost_calls.get(get_ident())


def has_threads(tickets: list[Ticket]) -> bool:
    """Whether a thread, and not a task of an event loop, waits for one of these calls."""
    for ticket in tickets:  # noqa: SIM110  a generator would cost more, compiled
        if ticket.waiter is not None and ticket.waiter.loop is None:
            return True
    return False


def wake_all(tickets: list[Ticket], last: Wakeup | None = None) -> None:
    """Wake the callers of calls that are done: tasks at once, threads one after another, and `last` after them."""
    wakeups: list[Any] = []
    tasks: list[Any] = []
    for ticket in tickets:
        waiter = ticket.waiter
        if waiter is None:
            continue
        if waiter.loop is None:
            wakeups.append(waiter)
        else:
            tasks.append(waiter)
    if tasks:
        tasks[0].release_all(tasks)
    if wakeups or last is not None:
        release_in_turn(wakeups, last)


def wake_each(woken: list[Any]) -> None:
    """Wake callers that have jobs, start the threads that are needed, and forget callers that departed meanwhile."""
    for each in woken:
        each.wake()
    if departed:
        remove_departed()


#: Not empty once the interpreter is about to end: see `batching.exits`.
exiting: list[bool] = []
#: How the errors begin that calls get then.
ENDING = "the interpreter is ending"


def check_exit() -> None:
    """Refuse a call made while the interpreter ends, from any thread but the main one."""
    if exiting and threading.current_thread() is not threading.main_thread():
        raise CancelledError(f"{ENDING}: weft takes no more calls")


def _after_fork_in_child() -> None:
    """Keep the calls of the thread that forked: no other thread exists in this process."""
    me = get_ident()
    mine = innermost_calls.get(me)
    innermost_calls.clear()
    if mine is not None:
        innermost_calls[me] = mine


on_fork_in_child(_after_fork_in_child)
