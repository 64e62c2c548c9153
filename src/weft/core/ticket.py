"""A ticket: what a caller holds while it waits for others, and how a thread waits on it; `aio` is how an event loop does.

A ticket ends once, by `resolve` or by `reject`. Whoever has news for a ticket changes its state first and wakes it after; whoever
waits attaches its waiter first and looks at the state after. So no news is missed, and a call that need not wait never makes
a wakeup or a future.
"""

from __future__ import annotations

import os
import threading
from _thread import get_ident
from collections.abc import Callable
from math import inf
from typing import Any, Protocol

from ..errors import CancelledError
from .clock import Clock
from .lock import left, work_off
from .wakeup import Wakeup, release_in_turn

#: How often, in seconds, a thread that waits looks for itself whether it was forgotten.
HEARTBEAT = 1.0


class Job(Protocol):
    """Work that a waiting caller is asked to do: whatever becomes of it is told to those who wait for it."""

    def is_short(self) -> bool:
        """Whether it is short enough to run inside an event loop."""

    def run(self) -> None:
        """Do the work."""

    def lose(self, problem: BaseException) -> None:
        """Say that `problem` has ended the thread that did it."""


class Waiter(Protocol):
    """What a ticket's caller sleeps on: a `Wakeup` for a thread, a `TaskWaiter` for a task."""

    loop: Any  # the event loop of a task, None for a thread

    def release(self) -> None:
        """Wake the caller."""


class Sweeping(Protocol):
    """What a timer needs of a scope to keep its deadlines."""

    clock: Clock
    next_expiry: float

    def sweep(self) -> int:
        """Tell all who are past their deadline."""

    def expires(self, when: float) -> None:
        """Take note of a deadline."""


class Ticket:
    """A call under way. `done` says that `value` or `error` is there; `alarm` is when `on_alarm` has something to do.

    `jobs` is what this caller is asked to do meanwhile: callers do the work.
    """

    def __init__(self, clock: Clock, sweeper: Sweeping | None = None) -> None:
        self._init_ticket(clock, sweeper)

    def _init_ticket(self, clock: Clock, sweeper: Sweeping | None) -> None:
        # The `__init__` of a subclass that is made for each call calls this: compiled, it costs less than `super().__init__`.
        self.clock = clock
        self.sweeper = sweeper  # the scope whose sweep keeps this call's alarm, if one does
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.alarm = inf
        self.jobs: list[Job] | None = None
        self.waiter: Any = None  # a `Waiter`, once the caller sleeps
        self.then: Callable[[Any], Any] | None = None  # what makes the answer of the value, in the caller's own thread
        self.dispatcher: Any = None  # the queue it waits in, if it is one
        self.holder = 0  # the thread that has the ticket in `held`
        self.outer: Ticket | None = None  # the ticket that its thread held before

    # --- its end ---

    def resolve(self, value: Any) -> bool:
        """End the call with a value; False, and nothing else, if it has ended. Waking the caller comes after it."""
        if self.done:
            return False
        self.value = value
        self.done = True
        return True

    def reject(self, error: BaseException) -> bool:
        """End the call with an error, in the same way."""
        if self.done:
            return False
        self.error = error
        self.done = True
        return True

    def result(self) -> Any:
        """What a call that succeeded returns, made of `value`; runs in the caller's own thread."""
        return self.value if self.then is None else self.then(self.value)

    def outcome(self) -> Any:
        """The result of a call that is done, or its error raised."""
        if self.error is not None:
            self.fail()
        return self.result()

    def fail(self) -> None:
        """Raise the error, and let go of it: its traceback holds this call."""
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
        """Do what is due by now, at the time `alarm` or earlier; see that nothing was missed."""

    def forget(self) -> list[Any]:
        """Take a caller that has left out of its queue or table: see `weft.core.lock`."""
        self.leave()
        return []

    def abandon(self) -> None:
        """Leave: the caller is gone and wants nothing any more."""
        left.append(self)
        self.leave()
        work_off()

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

    def take_up(self) -> None:
        """Note that this thread holds the ticket: what it calls meanwhile comes from inside the call."""
        me = get_ident()
        self.outer = held.get(me)
        self.holder = me
        held[me] = self

    def leave(self) -> None:
        """Note that the thread holds the ticket no more, and let the next of those go on that were woken with it."""
        holder = self.holder
        if holder:
            other = held.get(holder)
            if other is not self:
                while other is not None and other.outer is not self:
                    other = other.outer
                if other is not None:
                    other.outer = self.outer
            elif self.outer is None:
                held.pop(holder, None)
            else:
                held[holder] = self.outer
            self.holder = 0  # last: if it is interrupted, it is done again
        if self.waiter is not None:
            self.waiter.leave()

    def wait(self) -> Any:
        """The result, once it is there; the thread works and sleeps in between."""
        try:
            if not self.holder:
                self.take_up()
            self.enter()
            self._wait()
            self.leave()
        except BaseException:
            left.append(self)  # first, and in one step: a second exception can end everything below
            self.leave()
            work_off()
            raise
        return self.outcome()

    def _wait(self) -> None:
        while not self.done:
            jobs = self.jobs
            if jobs:
                jobs[0].run()  # stays in the list until it ran: what never began can be handed on
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


#: The ticket that each thread holds now, by the thread's number; further ones are its `outer`. A call that a finalizer or a signal
#: handler makes is found by it to come from a thread that others may count on.
held: dict[int, Ticket] = {}


def held_here() -> Ticket | None:
    """The ticket that this thread holds."""
    return held.get(get_ident())


def has_threads(tickets: list[Ticket]) -> bool:
    """Whether some of these calls wait in a thread, and not as a task of an event loop."""
    for ticket in tickets:  # noqa: SIM110  a generator would cost more, compiled
        if ticket.waiter is not None and ticket.waiter.loop is None:
            return True
    return False


def wake_all(tickets: list[Ticket], last: Wakeup | None = None) -> None:
    """Wake many calls that are done, tasks of event loops at once, threads one by the other, and `last` after them."""
    wakeups: list[Wakeup] = []
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


#: Not empty when the interpreter is about to end: see `exits`.
exiting: list[bool] = []


def check_exit() -> None:
    """Refuse a call that comes when the interpreter is about to end, from any thread but the main one."""
    if exiting and threading.current_thread() is not threading.main_thread():
        raise CancelledError("the interpreter is ending: weft takes no more calls")


def _after_fork_in_child() -> None:
    """Only the thread that forked is in this process, with what it holds."""
    me = get_ident()
    mine = held.get(me)
    held.clear()
    if mine is not None:
        held[me] = mine


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
