"""What a thread sleeps on until there is news for it, and how many threads are woken: one by the other.

Threads that are woken together all queue for the interpreter, and are switched twice each. So they are rung as a wave: each, as
it leaves, rings the next. `_wakeup.pyx` is the same in terms of the interpreter's own locks, and does two things more, which take
the way from one thread to the next out of the time in which the interpreter is held:

A thread that goes to sleep rings, once it has let go of the interpreter, the wakeup of the one after next. Of those that wait it
is, if possible, one that fell asleep on the same core: it wakes up there while the next one works on another, and no core
falls idle, from which it would take long to come back.

A thread that was rung asks for the interpreter when the one before has gone to sleep again, which it soon does if it calls
again. Until then it yields its core to whoever wants it. If the other has ended, sleeps elsewhere or takes longer, it asks all the
same, and so do the next ones; if turns are long on the whole, too, because threads could then work side by side.

Where waking an idle core takes 20 us, 2 cores, a pair of Batch and Unbatch took 30 us without these two with 8 threads, 25 with 32
and 30 with 128; with both 16, 15 and 18. The more a thread does in its turn, the more there is to gain: of 256 threads
that each take a torch loss back, and let go of the interpreter several times in it, each slept 30 times for a step where most
turns were not waited for, and 8 times where they are.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections import deque
from contextlib import suppress


class Wakeup:
    """A lock that is closed until somebody rings; and the wave that its thread is woken in."""

    __slots__ = ("_has_left", "_lock", "_wave", "acquire", "locked")

    loop = None  # as a waiter: a thread waits, not a task of an event loop

    def __init__(self) -> None:
        lock = self._lock = allocate_lock()
        lock.acquire()
        self.acquire, self.locked = lock.acquire, lock.locked
        self._wave: deque[Wakeup] | None = None
        self._has_left = False

    def release(self) -> None:
        """Ring: whoever sleeps here wakes up. It may have been rung already."""
        try:
            self._lock.release()
        except RuntimeError:  # and not yet heard
            return

    def leave(self) -> None:
        """The thread that slept here goes on: the next of its wave is rung."""
        self._has_left = True
        if self._wave:
            _release_next(self._wave)


def release_in_turn(wakeups: list[Wakeup], last: Wakeup | None = None) -> None:
    """Ring wakeups as a wave, and `last` after them."""
    wave = deque(wakeups)
    if last is not None:
        wave.append(last)
    for wakeup in tuple(wave):
        wakeup._wave = wave
    _release_next(wave)


def _release_next(wave: deque[Wakeup]) -> None:
    """Ring the next of a wave; one that has left before its turn may not have seen the wave, so it goes on."""
    while wave:
        try:
            wakeup = wave[0]
        except IndexError:  # another thread was faster
            return
        has_left = wakeup._has_left
        if not has_left:
            wakeup.release()
        with suppress(ValueError):
            wave.remove(wakeup)  # after it: if this is interrupted, the wakeup is rung again, and none is lost
        if not has_left:
            return


with suppress(ImportError):
    from ._wakeup import Wakeup, release_in_turn  # type: ignore[import-not-found,no-redef]  # noqa: F401
