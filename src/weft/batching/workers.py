"""Worker threads that run the batches of a dispatcher, one after another.

A lone caller runs its batch itself. With many callers, each would be woken to run a batch; and a function that uses threads itself,
as torch's do, starts a team of them for every thread it is called from.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from typing import Any

from ..core.clock import Clock, MonotonicClock
from ..core.fork import on_fork_in_child
from ..core.lock import lock
from ..core.ticket import HEARTBEAT, Job, Ticket, exiting
from ..core.wakeup import Wakeup

#: A worker that has been idle for so many seconds ends.
IDLE_SECONDS = 5.0
#: The most workers for jobs that have no dispatcher's pool.
MOST_THREADS = 4096

_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class _Started(threading.Event):
    """The event of a new thread's start. Waiting for it ends after a second."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(HEARTBEAT if timeout is None else timeout)


class Thread(threading.Thread):
    """A thread whose `start` returns even if the new thread never runs.

    In CPython 3.11 a new thread has its creator's id for a moment. An asynchronous exception meant for the creator can end it then.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._started = _Started()


class WorkerPool:
    """Up to `most` threads that do jobs in order."""

    def __init__(self, most: int, clock: Clock, name: str) -> None:
        self.most, self._clock, self._name = most, clock, name
        # By a simulated clock an idle worker ends at once: no time passes.
        self._idle_seconds = 0.0 if clock.is_simulated else IDLE_SECONDS
        self._jobs: deque[Job] = deque()
        self._current: dict[threading.Thread, Job] = {}  # the job of each worker
        self._sleeping: list[Wakeup] = []  # of idle workers
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        _pools.add(self)

    def give(self, job: Job) -> list[Any] | None:
        """Queue a job for the workers; return None if there can be none.

        Runs under the lock, and threads are not started under it: `wake` of the objects in the returned list does that.
        """
        if self._is_closed and not self._threads:
            return None
        self._jobs.append(job)
        if self._sleeping:
            self._sleeping[-1].release()
            self._sleeping.pop()  # only now: if this is interrupted, the worker is awake
            return []
        return [self] if len(self._threads) < self.most else []  # else one of them does it later

    def wake(self) -> None:
        """Start a worker if there are jobs for it. If the system has no thread left, this thread does the job."""
        while not self._start():
            pass

    def _start(self) -> bool:
        """Start a worker if there are jobs for it; return False if the new thread ended before it ran."""
        thread = Thread(target=self.work, name=f"weft {self._name}", daemon=True)
        with lock:
            if self._is_closed or not self._jobs or len(self._threads) >= self.most:
                return True
            self._threads.add(thread)
        try:
            self._clock.start(thread)
        except RuntimeError:
            with lock:
                self._threads.discard(thread)
                job = self._jobs.popleft() if self._jobs and not self._threads else None
            if job is not None:
                try:
                    job.run()
                except BaseException as problem:
                    _abort(job, problem)
        except BaseException:
            self._threads.discard(thread)  # it may run or not: if it does not, another one is started
            raise
        if thread.ident is None:
            self._threads.discard(thread)
            return False
        return True

    def replace_dead(self) -> list[Any]:
        """Forget workers that were ended from outside; return what to wake so that a new one starts. Runs under the lock."""
        if not self._jobs and not self._current:
            return []
        for thread in list(self._threads):
            if thread.ident is not None and not thread.is_alive():
                self._threads.discard(thread)
                lost = self._current.pop(thread, None)
                if lost is not None:
                    self._jobs.appendleft(lost)
        return [self] if self._jobs and not self._threads else []

    def next(self, me: threading.Thread) -> Job | None:
        """Wait for the next job of the worker `me`; return None when it must end."""
        with lock:
            self._current.pop(me, None)
            if self._jobs:
                return self._take(me)
            wakeup = Wakeup()
            self._sleeping.append(wakeup)
        self._clock.acquire(wakeup, self._clock.now() + self._idle_seconds)
        with lock:
            if wakeup in self._sleeping:
                self._sleeping.remove(wakeup)
            if self._jobs:
                return self._take(me)
            self._threads.discard(me)
            return None

    def _take(self, me: threading.Thread) -> Job:
        job = self._current[me] = self._jobs[0]
        self._jobs.popleft()  # only now: a job is always in one of the two places
        return job

    def work(self) -> None:
        """Do jobs until the worker has been idle for too long; the body of each worker."""
        mark = Ticket(self._clock)
        mark.dispatcher = self  # marks calls from this thread as recursive: in the queue they could wait for it
        mark.begin_inside()
        me = threading.current_thread()
        while not exiting:
            try:
                job = self.next(me)
                if job is None:
                    break
                job.run()
                del job
            except BaseException as problem:
                lost = self._current.get(me)  # stays there: this thread may be ended before it has reported the problem
                if lost is not None:
                    _abort(lost, problem)
        mark.end_inside()

    def close(self) -> list[threading.Thread]:
        """Start no more workers, and wake the idle ones to end; return the threads."""
        with lock:
            self._idle_seconds = 0.0
            self._is_closed = True
            for wakeup in self._sleeping:
                wakeup.release()
            self._sleeping.clear()
            return list(self._threads)


def _abort(job: Job, problem: BaseException) -> None:
    job.abort(problem)
    logging.getLogger("weft").debug("a batch ended its thread", exc_info=problem)


_shared_pool = WorkerPool(MOST_THREADS, MonotonicClock(), "tasks")


def run_elsewhere(job: Job) -> list[Any] | None:
    """Queue a job for a worker that belongs to no dispatcher; as `WorkerPool.give`."""
    return _shared_pool.give(job)


def close_all() -> list[threading.Thread]:
    """Start no more workers, and wake the idle ones to end; return all their threads."""
    return [thread for pool in list(_pools) for thread in pool.close()]


def _after_fork_in_child() -> None:
    """Begin without workers: the threads do not exist in this process."""
    global _shared_pool
    _shared_pool = WorkerPool(MOST_THREADS, MonotonicClock(), "tasks")


on_fork_in_child(_after_fork_in_child)
