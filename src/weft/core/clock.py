"""The clock of the batching rules: the machine's, or a simulated one that a test moves."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any, Protocol


class Clock(Protocol):
    """What a scope needs of a clock."""

    is_simulated: bool  # whether time passes only when a test moves it

    def now(self) -> float:
        """The time in seconds, never going back."""

    def acquire(self, lock: Any, until: float) -> bool:
        """Take `lock`, waiting until the time `until` at most; return whether it was taken."""

    def start(self, thread: threading.Thread) -> None:
        """Start a thread that waits by this clock."""


class MonotonicClock:
    """The machine's clock."""

    is_simulated = False
    now = staticmethod(monotonic)

    def acquire(self, lock: Any, until: float) -> bool:
        remaining = until - monotonic()
        return bool(lock.acquire(True, remaining)) if remaining > 0 else bool(lock.acquire(False))

    def start(self, thread: threading.Thread) -> None:
        thread.start()


#: How often, in real seconds, a thread that waits for simulated time checks its lock.
_TICK = 0.02


class SimulatedClock:
    """A clock that stands still until a test moves it: `sleep`, `settle` and `advance` decide when time passes.

    Threads started with `start` take part. `settle` waits until each of them has ended or is waiting on this clock;
    `advance` moves the time step by step: it wakes the threads that are due, and settles before the next step.
    """

    is_simulated = True

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[float, int, Any]] = {}  # by thread: until when, the thread's number, its lock
        self._running: dict[threading.Thread, int] = {}  # in the order they were started
        self._started = 0

    def now(self) -> float:
        """The simulated time in seconds."""
        return self._now

    def start(self, thread: threading.Thread) -> None:
        """Start a thread that takes part in this clock's time."""
        body = thread.run

        def run() -> None:
            try:
                body()
            finally:
                with self._changed:
                    del self._running[thread]
                    self._changed.notify_all()

        thread.run = run  # type: ignore[method-assign]
        with self._changed:
            self._started += 1
            self._running[thread] = self._started
        thread.start()

    def acquire(self, lock: Any, until: float) -> bool:
        """Take `lock`, waiting until the simulated time `until` at most; return whether it was taken."""
        me = threading.get_ident()
        with self._changed:
            if until <= self._now:
                return bool(lock.acquire(False))
            self._waiting[me] = (until, self._running.get(threading.current_thread(), 0), lock)
            self._changed.notify_all()
            # The lock is taken under the condition, so that no thread sees it taken and this thread still waiting. A thread that
            # releases the lock notifies when it ends, waits or settles; the tick is for threads that do none of these.
            while not lock.acquire(False):
                self._changed.wait(_TICK)
            return self._waiting.pop(me, None) is not None

    def sleep(self, seconds: float) -> None:
        """Wait until this much simulated time has passed."""
        lock = threading.Lock()
        lock.acquire()
        self.acquire(lock, self._now + seconds)

    def settle(self, timeout: float = 30.0) -> None:
        """Wait until every thread that was started has ended or waits on this clock; `timeout` is in real seconds."""
        with self._changed:
            self._changed.notify_all()
            if not self._changed.wait_for(self._is_quiet, timeout):
                raise TimeoutError(f"threads still running after {timeout} s: {self._running}")

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, waking each waiting thread at its time, threads due at once in the order they were started."""
        end = self._now + seconds
        self.settle()
        while self._waiting and self._next_due() <= end:
            self._wake(min(self._waiting, key=lambda thread: self._waiting[thread][:2]))
            self.settle()
        self._now = max(self._now, end)

    def run_out(self, limit: float = 3600.0) -> None:
        """Advance until every thread has ended, at most `limit` simulated seconds."""
        end = self._now + limit
        self.settle()
        while self._waiting and self._now < end:
            self.advance(max(0.0, self._next_due() - self._now))

    def _next_due(self) -> float:
        return min(until for until, _, _ in self._waiting.values())

    def _wake(self, thread: int) -> None:
        with self._changed:
            until, _, lock = self._waiting.pop(thread)
            self._now = max(self._now, until)
            if lock.locked():
                lock.release()
            self._changed.notify_all()

    def _is_quiet(self) -> bool:
        # A waiting thread whose lock was released by another is about to run: not quiet.
        waiting = {ident for ident, (_, _, lock) in self._waiting.items() if lock.locked()}
        return all(thread.ident in waiting for thread in self._running)
