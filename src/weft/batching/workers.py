"""Threads of a dispatcher's own, which run its batches one after the other as long as there are some.

Callers could do it, and where nobody else is there they do. But with many callers each would be woken for it in its turn; and a
function that uses threads itself has a team of them for every thread it is called from: 64 callers of a small torch model
got 8,400 answers a second so, and 20,000 from one thread.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from _thread import get_ident
from collections import deque
from typing import Any

from ..core.clock import Clock, MonotonicClock
from ..core.lock import lock
from ..core.ticket import HEARTBEAT, Job, Ticket, exiting
from ..core.wakeup import Wakeup

#: A thread that has had nothing to do for so long ends.
IDLE_SECONDS = 5.0
#: The most threads there can be for jobs that are no dispatcher's own.
MOST_THREADS = 4096

_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class _Begun(threading.Event):
    """The sign of a new thread's start, not waited for without end."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(HEARTBEAT if timeout is None else timeout)


class _Thread(threading.Thread):
    """A thread whose `start` ends even if the new thread does not begin.

    In CPython 3.11 a thread has its creator's number for a moment. An asynchronous exception meant for the creator can end it then.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._started = _Begun()


class WorkerPool:
    """Up to `most` threads that do jobs in the order they are given."""

    def __init__(self, most: int, clock: Clock, name: str) -> None:
        self._most, self._clock, self._name = most, clock, name
        # Simulated time is not spent on waiting for nothing.
        self._patience = 0.0 if clock.is_simulated else IDLE_SECONDS
        self._jobs: deque[Job] = deque()
        self._current: dict[int, Job] = {}  # what each thread works at
        self._sleeping: list[Wakeup] = []  # that idle threads sleep on
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        _pools.add(self)

    def give(self, job: Job) -> list[Any] | None:
        """Have a job done, in a thread that is awake, else in one that is woken; None where there can be none.

        Runs under the lock, and threads are not started under it: what is returned must be woken after it, and does that.
        """
        if self._is_closed and not self._threads:
            return None
        self._jobs.append(job)
        if self._sleeping:
            self._sleeping.pop().release()
            return []
        return [self] if len(self._threads) < self._most else []  # else one of them comes to it

    def wake(self) -> None:
        """Start a thread if there are jobs for it. Where the system has none left, this thread does the job."""
        while not self._start():
            pass

    def _start(self) -> bool:
        """Start a thread if there are jobs for it; False if it was lost at its birth."""
        thread = _Thread(target=_work, args=(self,), name=f"weft {self._name}", daemon=True)
        with lock:
            if self._is_closed or not self._jobs or len(self._threads) >= self._most:
                return True
            self._threads.add(thread)
        try:
            self._clock.start(thread)
        except RuntimeError:
            with lock:
                self._threads.discard(thread)
                job = self._jobs.popleft() if self._jobs and not self._threads else None
            if job is not None:
                _do(job)
        except BaseException:
            self._threads.discard(thread)  # whether it runs or not: if it does not, another one is started
            raise
        if thread.ident is None:
            self._threads.discard(thread)
            return False
        return True

    def tend(self) -> list[Any]:
        """Under the lock, forget threads that were ended from outside; what is to be woken."""
        if not self._jobs and not self._current:
            return []
        for thread in list(self._threads):
            if thread.ident is not None and not thread.is_alive():
                self._threads.discard(thread)
                lost = self._current.pop(thread.ident, None)
                if lost is not None:
                    self._jobs.appendleft(lost)
        return [self] if self._jobs and not self._threads else []

    def next(self) -> Job | None:
        """The next job, waited for; None when it is time to end."""
        me = get_ident()
        with lock:
            self._current.pop(me, None)
            if self._jobs:
                return self._take(me)
            wakeup = Wakeup()
            self._sleeping.append(wakeup)
        is_released = self._clock.acquire(wakeup, self._clock.now() + self._patience)
        with lock:
            if not is_released and wakeup in self._sleeping:
                self._sleeping.remove(wakeup)
            if self._jobs:
                return self._take(me)
            self._threads.discard(threading.current_thread())
            return None

    def _take(self, me: int) -> Job:
        job = self._current[me] = self._jobs[0]
        self._jobs.popleft()  # after it: a job is never in neither place
        return job

    def work(self) -> None:
        """Do jobs, in one of the threads, until there is nothing to do."""
        mark = Ticket(self._clock)
        mark.dispatcher = (
            self  # by which a dispatcher knows that a call of this thread is recursive: nobody else would run it
        )
        mark.take_up()
        while not exiting:
            try:
                job = self.next()
                if job is None:
                    break
                job.run()
                del job
            except BaseException as problem:
                lost = self._current.pop(get_ident(), None)
                if lost is not None:
                    _lose(lost, problem)
        mark.leave()

    def close(self) -> list[threading.Thread]:
        """Start no more threads, and wake those that sleep; the threads there are."""
        with lock:
            self._patience = 0.0  # those at work wait for no more
            self._is_closed = True
            for wakeup in self._sleeping:
                wakeup.release()
            self._sleeping.clear()
            return list(self._threads)


def _work(pool: WorkerPool) -> None:
    pool.work()


def _do(job: Job) -> None:
    try:
        job.run()
    except BaseException as problem:
        _lose(job, problem)


def _lose(job: Job, problem: BaseException) -> None:
    job.lose(problem)
    logging.getLogger("weft").debug("a batch ended its thread", exc_info=problem)


_others = WorkerPool(MOST_THREADS, MonotonicClock(), "tasks")


def run_elsewhere(job: Job) -> list[Any] | None:
    """Have a job done in a thread that is no caller's; runs under the lock, and returns what must be woken after it."""
    return _others.give(job)


def close_all() -> list[threading.Thread]:
    """Start no more threads, and have those that are idle end; the threads there are."""
    return [thread for pool in list(_pools) for thread in pool.close()]


def _after_fork_in_child() -> None:
    """The threads are not in this process."""
    global _others
    _others = WorkerPool(MOST_THREADS, MonotonicClock(), "tasks")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
