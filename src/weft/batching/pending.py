"""A call that waits for others, and how a thread waits for it; `aio` is how an event loop does.

Whoever has news for a pending call changes its state first and wakes it after; whoever waits attaches its waiter first and
looks at the state after. So no news is missed, and a call that need not wait never makes a bell or a future.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Protocol

from .bell import Bell, ring_all
from .clock import Clock

#: A wait whose end depends on another caller's function alone looks up this often, in seconds.
HEARTBEAT = 5.0


class Job(Protocol):
    """Work that a waiting caller is asked to do: whatever becomes of it is told to those who wait for it."""

    def is_short(self) -> bool:
        """Whether it is short enough to run inside an event loop."""

    def run(self) -> None:
        """Do the work."""


class Sweeping(Protocol):
    """What a timer needs of a scope to keep its deadlines."""

    clock: Clock
    next_expiry: float

    def sweep(self) -> int:
        """Tell all who are past their deadline."""

    def expires(self, when: float) -> None:
        """Take note of a deadline."""


class Pending:
    """A call under way. `done` says that `value` or `error` is there; `alarm` is when to call `ring` if nothing happened.

    `jobs` is what this caller is asked to do meanwhile: callers do the work.
    """

    def _begin(self, clock: Clock, sweeper: Sweeping | None = None) -> None:
        self.clock = clock
        self.sweeper = sweeper  # the scope whose sweep keeps this call's alarm, if one does
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.alarm = inf
        self.jobs: deque[Job] | None = None
        self.waiter: Any = None  # the bell a thread sleeps on, or the `Wait` of a task
        self.then: Callable[[Any], Any] | None = None  # what makes the answer of the value, in the caller's own thread

    def ring(self) -> None:
        """Do what is to be done at the time `alarm`; without an alarm, see that nothing was missed."""

    def abandon(self) -> None:
        """Leave: the caller is gone and wants nothing any more."""

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

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Answer the call, once: a later answer is dropped."""
        if not self.done:
            self.value, self.error, self.done = value, error, True
            wake(self)

    def wait(self) -> Any:
        """The result, once it is there; the thread works and sleeps in between."""
        try:
            while not self.done:
                jobs = self.jobs
                if jobs:
                    jobs[0].run()  # stays in the list until it ran: what never began can be handed on
                    jobs.popleft()
                elif self.waiter is None:
                    self.waiter = Bell()
                else:
                    clock, until = self.clock, self.alarm
                    if not clock.acquire(self.waiter, clock.now() + HEARTBEAT if until == inf else until):
                        self.ring()
        except BaseException:
            self.abandon()
            raise
        finally:
            if self.waiter is not None:
                self.waiter.leave()
        return self.outcome()

    def needs_timer(self, loop: Any) -> bool:
        """Whether the alarm of a call that waits in the event loop `loop` needs a timer of its own."""
        return True


def wake(pending: Pending) -> None:
    """Make whoever waits for `pending` look at its state."""
    waiter = pending.waiter
    if type(waiter) is Bell:
        waiter.release()
    elif waiter is not None:
        wake_tasks([waiter])


# `aio` puts its own in place of these two, and without it there are no tasks.


def wake_tasks(waits: list[Any]) -> None:
    """End the sleep of tasks."""


def run_elsewhere(job: Callable[[], None]) -> None:
    """Do a job in a thread that is no caller's."""


def has_threads(pendings: list[Pending]) -> bool:
    """Whether some of these calls wait in a thread, and not as a task of an event loop."""
    for pending in pendings:  # noqa: SIM110  a generator would cost more, compiled
        if type(pending.waiter) is Bell:
            return True
    return False


def wake_all(pendings: list[Pending], last: Bell | None = None) -> None:
    """Wake many calls that are done, tasks of event loops at once, threads one by the other, and `last` after them."""
    bells: list[Bell] = []
    tasks: list[Any] = []
    for pending in pendings:
        waiter = pending.waiter
        if type(waiter) is Bell:
            bells.append(waiter)
        elif waiter is not None:
            tasks.append(waiter)
    if tasks:
        wake_tasks(tasks)
    if bells or last is not None:
        ring_all(bells, last)
