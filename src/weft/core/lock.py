"""The one lock of weft's bookkeeping: queues, tables of callers, gradients of batches, counters.

Python can run foreign code at almost any step of ours, in the same thread: the garbage collector runs finalizers, weak-reference
callbacks and the closing of coroutines; a signal runs its handler. If that code calls weft while the thread holds a lock, it must
not wait for that lock. So there is one lock, and four rules:

- Take it by `with lock:` and in no other way. An exception from a signal handler cannot come between taking and releasing it.
- Before an entry point that foreign code can reach takes the lock, it asks `has_lock()`. Inside, a call of a batcher runs alone
  and at once, a call that needs other callers is refused, and a caller that departs is put into `departed`.
- A thread that has released the lock calls `remove_departed()` if `departed` is not empty. Each entry has a method `forget()`,
  which runs under the lock, may run twice, and returns the tickets to wake.
- An exception can interrupt any step under the lock (in the compiled modules only where they call Python functions). The state
  that the lock guards says whether a change of it was interrupted, and the next holder completes or undoes it.

Nothing waits, starts a thread or calls a user's function while it holds the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol

from ..errors import FailedPreconditionError
from .fork import on_fork_in_child

lock = RLock()

#: Whether the calling thread holds the lock. `threading.Condition` asks locks the same question by the same name.
has_lock: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]


def refuse_inside_lock(what: str) -> None:
    """Refuse a call, described by `what`, that would wait for other callers, in a thread that holds the lock."""
    if has_lock():
        raise FailedPreconditionError(
            f"{what} waits for other callers, and a finalizer or a signal handler that interrupts weft's own bookkeeping cannot: "
            "call it elsewhere"
        )


class Departed(Protocol):
    """A caller, or a run of a batch, that was interrupted: other threads take over what it had to do."""

    def forget(self) -> list[Any]:
        """Take it out of every queue and table; return the tickets to wake. Runs under the lock, maybe twice."""


#: Callers and runs that were interrupted and are still in some queue or table. `append` is atomic: nothing can interrupt it.
departed: deque[Departed] = deque()


def remove_departed() -> None:
    """Forget the departed, unless this thread holds the lock: then the holder does it after releasing the lock."""
    while departed and not has_lock():
        woken: list[Any] = []
        with lock:
            while departed:
                woken += departed[0].forget()
                departed.popleft()  # only now: an entry whose `forget` was interrupted is forgotten again
        for ticket in woken:
            ticket.wake()


def _after_fork_in_child() -> None:
    """Free the lock: the thread that held it may not exist in this process."""
    departed.clear()
    if not has_lock():
        lock._at_fork_reinit()  # type: ignore[attr-defined]


on_fork_in_child(_after_fork_in_child)
