"""The time the batching rules go by: the machine's, or one that a test moves by hand."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any, Protocol


class Clock(Protocol):
    """What a scope needs of a clock: the time in seconds, and a wait that ends by it."""

    def now(self) -> float:
        """The time in seconds, never going back."""

    def acquire(self, lock: Any, until: float) -> bool:
        """Wait for `lock` until the time `until`; whether it was taken."""


class MonotonicClock:
    """The machine's clock."""

    def now(self) -> float:
        """The time in seconds, never going back."""
        return monotonic()

    def acquire(self, lock: Any, until: float) -> bool:
        """Wait for `lock` until the time `until`; whether it was taken."""
        remaining = until - monotonic()
        return bool(lock.acquire(True, remaining)) if remaining > 0 else bool(lock.acquire(False))


class SimulatedClock:
    """A clock that stands still until a test moves it: `sleep`, `settle` and `advance` decide when time passes.

    Threads started with `start` take part. `settle` waits until each of them has ended or is waiting on this clock;
    `advance` moves the time step by step, waking whoever is due and settling before it goes on.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[float, Any]] = {}
        self._running: set[threading.Thread] = set()

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
                    self._running.discard(thread)
                    self._changed.notify_all()

        thread.run = run  # type: ignore[method-assign]
        with self._changed:
            self._running.add(thread)
        thread.start()

    def acquire(self, lock: Any, until: float) -> bool:
        """Wait for `lock` until the simulated time `until`; whether it was taken."""
        me = threading.get_ident()
        with self._changed:
            if until <= self._now:
                return bool(lock.acquire(False))
            self._waiting[me] = (until, lock)
            self._changed.notify_all()
        lock.acquire()
        with self._changed:
            return self._waiting.pop(me, None) is not None

    def sleep(self, seconds: float) -> None:
        """Wait until this much simulated time has passed."""
        lock = threading.Lock()
        lock.acquire()
        self.acquire(lock, self._now + seconds)

    def settle(self, timeout: float = 30.0) -> None:
        """Wait until every thread that was started has ended or waits on this clock; `timeout` is in real seconds."""
        with self._changed:
            if not self._changed.wait_for(self._is_quiet, timeout):
                raise TimeoutError(f"threads still running after {timeout} s: {self._running}")

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, waking each waiting thread at its time, in order."""
        end = self._now + seconds
        self.settle()
        while self._waiting and min(until for until, _ in self._waiting.values()) <= end:
            self._wake(min(self._waiting.items(), key=lambda item: item[1][0])[0])
            self.settle()
        self._now = max(self._now, end)

    def run_out(self, limit: float = 3600.0) -> None:
        """Advance until every thread has ended, at most `limit` simulated seconds."""
        end = self._now + limit
        self.settle()
        while self._waiting and self._now < end:
            self.advance(max(0.0, min(until for until, _ in self._waiting.values()) - self._now))

    def _wake(self, thread: int) -> None:
        with self._changed:
            until, lock = self._waiting.pop(thread)
            self._now = max(self._now, until)
            if lock.locked():
                lock.release()

    def _is_quiet(self) -> bool:
        # A waiting thread whose lock was released by another is about to run: not quiet.
        waiting = {ident for ident, (_, lock) in self._waiting.items() if lock.locked()}
        return all(thread.ident in waiting for thread in self._running)
