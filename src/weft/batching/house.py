"""Threads of a desk's own, which run its batches one after the other as long as there are some.

Callers could do it, and where nobody else is there they do. But with many callers each would be woken for it in its turn; and a
function that uses threads itself has a team of them for every thread it is called from: 64 callers of a small torch model
got 8,400 answers a second so, and 20,000 from one thread.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque

from .bell import Bell
from .clock import Clock
from .pending import Job

#: A thread that has had nothing to do for so long ends.
IDLE_SECONDS = 5.0
#: At the end of the interpreter, what is running has so long to end.
EXIT_SECONDS = 10.0

_houses: weakref.WeakSet[House] = weakref.WeakSet()


class House:
    """Up to `most` threads that do jobs in the order they are given."""

    def __init__(self, most: int, clock: Clock, name: str) -> None:
        self._most, self._clock, self._name = most, clock, name
        # Simulated time is not spent on waiting for nothing.
        self._patience = 0.0 if hasattr(clock, "start") else IDLE_SECONDS
        self._jobs: deque[Job] = deque()
        self._sleeping: list[Bell] = []  # that idle threads sleep on
        self._threads: set[threading.Thread] = set()
        self._mutex = threading.Lock()
        self._is_closed = False
        _houses.add(self)

    def give(self, job: Job) -> bool:
        """Have a job done, in a thread that is awake, else in one that is woken or started for it; whether there is one."""
        with self._mutex:
            if not self._sleeping and len(self._threads) < self._most:
                return not self._is_closed and self._start(job)
            self._jobs.append(job)
            if self._sleeping:
                self._sleeping.pop().release()
            return True  # else one of them comes to it

    def _start(self, job: Job) -> bool:
        thread = threading.Thread(target=_work, args=(self,), name=f"weft {self._name}", daemon=True)
        self._jobs.append(job)
        self._threads.add(thread)
        try:
            # A simulated clock must know of it.
            getattr(self._clock, "start", threading.Thread.start)(thread)
        except RuntimeError:  # the system has no thread left, or the interpreter is ending
            self._jobs.remove(job)
            self._threads.discard(thread)
            return False
        return True

    def next(self) -> Job | None:
        """The next job, waited for; None when it is time to end."""
        with self._mutex:
            if self._jobs:
                return self._jobs.popleft()
            bell = Bell()
            self._sleeping.append(bell)
        is_rung = self._clock.acquire(bell, self._clock.now() + self._patience)
        with self._mutex:
            if not is_rung and bell in self._sleeping:
                self._sleeping.remove(bell)
            if self._jobs:
                return self._jobs.popleft()
            self._threads.discard(threading.current_thread())
            return None

    def close(self) -> list[threading.Thread]:
        """Start no more threads, and wake those that sleep; the threads there are."""
        with self._mutex:
            self._patience = 0.0  # those at work wait for no more
            self._is_closed = True
            for bell in self._sleeping:
                bell.release()
            self._sleeping.clear()
            return list(self._threads)


def _work(house: House) -> None:
    while (job := house.next()) is not None:
        try:
            job.run()
        except BaseException:  # its callers have been told
            logging.getLogger("weft").debug("a batch ended its thread", exc_info=True)
        del job


def _at_exit() -> None:
    threads = [thread for house in list(_houses) for thread in house.close()]
    for thread in threads:
        thread.join(EXIT_SECONDS)


atexit.register(_at_exit)
