"""What a thread sleeps on until it is woken, and how many threads are woken: one after another.

Threads that are woken together all queue for the interpreter lock, and each is switched twice. So they are woken in turn: each
thread, as it goes on, wakes the next of its group. `weft._native` does the same with the interpreter's own locks, and two things
more, which take the switch from one thread to the next out of the time in which the interpreter lock is held:

A thread that goes to sleep wakes the thread after next once it has released the interpreter lock. If possible it picks a thread
that fell asleep on the same core: that thread wakes up there while the next one works on another core, and no core falls idle.

A woken thread asks for the interpreter lock when the thread before it has gone to sleep again, which is soon if that one calls
again. Until then it yields its core. It asks anyway if the other thread has ended, sleeps elsewhere or takes long, and so do the
threads after it; also if turns are long on average, because the threads could then work side by side.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections import deque
from contextlib import suppress


class Wakeup:
    """A lock that is closed until `release`, and the group of threads that its thread is woken with."""

    __slots__ = ("_group", "_is_over", "_lock", "acquire", "locked")

    loop = None  # as a waiter: a thread waits, not a task of an event loop

    def __init__(self) -> None:
        lock = self._lock = allocate_lock()
        lock.acquire()
        self.acquire, self.locked = lock.acquire, lock.locked
        self._group: deque[Wakeup] | None = None
        self._is_over = False  # whether its thread waits no more

    def release(self) -> None:
        """Wake the thread that sleeps here. It may have been woken already."""
        try:
            self._lock.release()
        except RuntimeError:  # it was released, and the thread has not run since
            return

    def wake_next(self) -> None:
        """Note that the thread that slept here goes on, and wake the next of its group."""
        self._is_over = True
        if self._group:
            _release_next(self._group)


def release_in_turn(wakeups: list[Wakeup], last: Wakeup | None = None) -> None:
    """Wake threads one after another, and `last` after them."""
    group = deque(wakeups)
    if last is not None:
        group.append(last)
    for wakeup in tuple(group):
        wakeup._group = group
    _release_next(group)


def _release_next(group: deque[Wakeup]) -> None:
    """Wake the next thread of a group that still waits: one that went on before its turn may not have seen the group."""
    while group:
        try:
            wakeup = group[0]
        except IndexError:  # another thread was faster
            return
        is_over = wakeup._is_over
        if not is_over:
            wakeup.release()
        with suppress(ValueError):
            group.remove(wakeup)  # after it: if this is interrupted, the thread is woken again, and none is lost
        if not is_over:
            return


with suppress(ModuleNotFoundError):
    from .._native import Wakeup, release_in_turn  # type: ignore[no-redef]  # noqa: F401
