"""A small pool of threads for kernels that release the GIL.

`run(jobs)` runs callables on as many threads as there are cores, the caller's own among them. Because the caller
takes part, it never waits for a free worker, only for jobs that are already running: calls from many threads at once,
and calls from inside a job, cannot block each other. The threads are started when they are first needed, are daemons,
and do not outlive a fork.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from ..core.fork import on_fork_in_child

Job = Callable[[], object]


class _Work:
    """The jobs of one call."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = deque(jobs)
        self.left = len(jobs)
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self.finished = threading.Lock()
        self.finished.acquire()

    def take_part(self) -> None:
        """Run jobs until none is left to start."""
        while True:
            try:
                job = self.jobs.popleft()
            except IndexError:
                return
            try:
                job()
            except BaseException as error:
                self.error = error
            del job  # it holds arrays, and this thread may wait long for its next one
            with self.lock:
                self.left -= 1
                if self.left == 0:
                    self.finished.release()


class _Threads:
    """The workers of this process."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or _cores()
        self.queue: SimpleQueue[_Work | None] = SimpleQueue()
        self.unstarted = deque(range(1, self.size))

    @property
    def started(self) -> int:
        return self.size - 1 - len(self.unstarted)

    def start(self, count: int) -> None:
        """Start threads until there are `count`; without a lock, because a finalizer may run a kernel in the middle of it."""
        while self.started < count:
            try:
                number = self.unstarted.popleft()
            except IndexError:  # others are starting the rest
                return
            threading.Thread(target=self.serve, name=f"weft-{number}", daemon=True).start()

    def serve(self) -> None:
        while (work := self.queue.get()) is not None:
            work.take_part()
            del work


def _cores() -> int:
    """The cores this process may use: its CPU affinity, and the quota of its cgroup rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _quota() or cores)


def _quota() -> int | None:
    for paths in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # of cgroups of both versions
        with suppress(OSError, ValueError):  # "max" means that there is none
            quota, period = " ".join((_CGROUP / path).read_text() for path in paths).split()
            if int(quota) > 0:
                return -(-int(quota) // int(period))
    return None


_CGROUP = Path("/sys/fs/cgroup")


_threads = _Threads()


def run(jobs: Sequence[Job]) -> None:
    """Run every job once, and return when all have ended; the error of one that failed is raised then."""
    threads = _threads
    helpers = min(len(jobs), threads.size) - 1
    work = _Work(jobs)
    if helpers > 0:
        if threads.started < helpers:
            threads.start(helpers)
        for _ in range(helpers):
            threads.queue.put(work)
    work.take_part()
    work.finished.acquire()
    if work.error is not None:
        raise work.error


def size() -> int:
    """How many threads a call runs on, the caller's included."""
    return _threads.size


def resize(count: int) -> None:
    """Run on `count` threads from now on; workers that this leaves over end."""
    global _threads
    if count < 1:
        raise ValueError(f"a pool needs at least 1 thread, got {count}")
    old, _threads = _threads, _Threads(count)
    for _ in range(old.started):
        old.queue.put(None)
    for tell in _followers:
        tell(count)


def follow(tell: Callable[[int], object]) -> None:
    """Call `tell` with the number of threads, now and whenever it changes."""
    _followers.append(tell)
    tell(size())


_followers: list[Callable[[int], object]] = []


def _after_fork() -> None:
    """A forked child has none of the threads, and perhaps a lock that one of them held."""
    global _threads
    _threads = _Threads(_threads.size)


on_fork_in_child(_after_fork)
