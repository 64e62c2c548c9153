"""A call that waits for others, and the two ways to wait for it: in a thread or in an event loop.

Whoever has news for a pending call changes its state first and calls `wake` after; whoever waits attaches its waiter first and
looks at the state after. So no news is missed, and a call that need not wait never makes a lock or a future.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Generator
from math import inf
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from .clock import Clock

#: A wait whose end depends on another caller's function alone looks up this often, in seconds.
HEARTBEAT = 60.0


class Job(Protocol):
    """Work that a waiting caller is asked to do."""

    is_short: bool  # short enough to run inside an event loop
    begun: bool

    def __call__(self) -> None:
        """Do the work; whatever becomes of it is told to those who wait for it."""


class Pending:
    """A call under way. `done` says that `value` or `error` is there; `alarm` is when to call `ring` if nothing happened.

    `jobs` are functions this caller is asked to run meanwhile: callers do the work.
    """

    __slots__ = ("alarm", "clock", "done", "error", "jobs", "value", "waiter")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.alarm: float | None = None
        self.done = False
        self.error: BaseException | None = None
        self.value: Any = None
        self.jobs: deque[Job] | None = None
        self.waiter: Any = None

    def ring(self) -> None:
        """Do what is to be done at the time `alarm`."""
        raise AssertionError(f"{type(self).__name__} set an alarm and has nothing to do")  # pragma: no cover

    def abandon(self) -> None:
        """Leave: the caller is gone and wants nothing any more."""

    def result(self) -> Any:
        """The value of a call that is done, or its error raised; runs in the caller's own thread."""
        if self.error is not None:
            raise self.error
        return self.value

    def wake(self) -> None:
        """Make whoever waits look at the state."""
        waiter = self.waiter
        if waiter is not None:
            waiter.wake()

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Answer the call, once: a later answer is dropped."""
        if not self.done:
            self.value, self.error, self.done = value, error, True
            self.wake()

    # --- in a thread ---

    def wait(self) -> Any:
        """The result, once it is there; the thread works and sleeps in between."""
        try:
            while not self.done:
                if self.jobs:
                    self.jobs[
                        0
                    ]()  # stays in the list until it ran: what is interrupted before it began can be handed on
                    self.jobs.popleft()
                elif self.waiter is None:
                    self.waiter = ThreadWaiter()
                else:
                    clock = self.clock
                    until = self.alarm
                    if not clock.acquire(self.waiter.lock, clock.now() + HEARTBEAT if until is None else until):
                        self.ring()
        except BaseException:
            self.abandon()
            raise
        return self.result()

    # --- in an event loop ---

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            while not self.done:
                if self.jobs:
                    self._work_from(asyncio.get_running_loop())
                elif self.waiter is None or self.waiter.future.done():
                    self.waiter = LoopWaiter(asyncio.get_running_loop())
                else:
                    yield from self._sleep()
        except BaseException:
            self.abandon()
            raise
        return self.result()

    def _sleep(self) -> Generator[Any, None, None]:
        waiter = self.waiter
        timer = None if self.alarm is None else self._set_alarm(waiter)
        try:
            yield from waiter.future
        finally:
            if timer is not None:
                timer.cancel()
        if self.alarm is not None and not self.done and not self.jobs and self.clock.now() >= self.alarm:
            self.ring()

    def _set_alarm(self, waiter: LoopWaiter) -> asyncio.TimerHandle | None:
        """Wake `waiter` at the time `alarm`, by a timer of its own."""
        assert self.alarm is not None
        return waiter.loop.call_later(max(0.0, self.alarm - self.clock.now()), waiter.wake)

    def _work_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the next job without holding up the loop; its end wakes this call like any other news."""
        assert self.jobs is not None
        job = self.jobs[0]
        if job.is_short:
            job()
        else:
            loop.run_in_executor(None, contextvars.copy_context().run, job)
        self.jobs.popleft()


class ThreadWaiter:
    """A thread asleep on a lock of its own."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.lock.acquire()

    def wake(self) -> None:
        """End the sleep; once is enough."""
        try:
            self.lock.release()
        except RuntimeError:  # woken already, and not yet looked
            pass


class Sweeping(Protocol):
    """What a timer needs of a scope to keep its deadlines."""

    clock: Clock
    next_expiry: float

    def sweep(self) -> int:
        """Tell all who are past their deadline."""

    def expires(self, when: float) -> None:
        """Take note of a deadline."""


class LoopWaiter:
    """A task asleep on a future of its loop."""

    __slots__ = ("future", "loop", "thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future = loop.create_future()
        self.thread = get_ident()

    def wake(self) -> None:
        """End the sleep, from any thread."""
        if self.thread == get_ident():
            if not self.future.done():
                self.future.set_result(None)
        else:
            Inbox.of(self.loop).post(self.future)


class Inbox:
    """The futures of one loop that other threads have news for: the loop is called once for all that come together."""

    _all: WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox] = WeakKeyDictionary()
    _making = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: list[asyncio.Future[None]] = []
        self._sweeps: tuple[float, asyncio.TimerHandle] | None = None

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Inbox:
        """The inbox of a loop."""
        with cls._making:
            return cls._all.setdefault(loop, cls())

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
        """Have `scope` swept at the time `when`, in the loop that is running; a sweep that comes sooner looks after the rest."""
        if self._sweeps is not None:
            if self._sweeps[0] <= when:
                return
            self._sweeps[1].cancel()
        loop = asyncio.get_running_loop()
        self._sweeps = when, loop.call_later(max(0.0, when - scope.clock.now()), self._sweep, scope)

    def _sweep(self, scope: Sweeping) -> None:
        self._sweeps = None
        if scope.clock.now() >= scope.next_expiry:
            scope.sweep()
        if scope.next_expiry < inf:
            self.sweep_by(scope, scope.next_expiry)
