"""The one lock of weft's bookkeeping: queues, tables of callers, gradients of batches, counters.

Python can run foreign code at almost any step of ours, in the same thread: the garbage collector runs finalizers, weak-reference
callbacks and the closing of coroutines; a signal runs its handler. If that code calls weft while the thread holds a lock, it must
not wait for that lock. So there is one lock, and four rules:

- Take it by `with lock:` and in no other way. An exception from a signal handler cannot come between taking and releasing it.
- Before an entry point that foreign code can reach takes the lock, it asks `has_lock()`. Inside, a call of a batcher runs alone
  and at once, a call that needs other callers is refused, and a caller that leaves is put into `left`.
- Whoever has held the lock and released it calls `work_off()` if `left` is not empty. What is in `left` has a method `forget()`,
  which runs under the lock, may run twice, and returns the tickets that must be woken.
- An exception can interrupt any step under the lock (in the compiled modules only where they call Python functions). The state
  that the lock guards says whether a change of it was broken off, and the next holder completes or undoes it.

Nothing waits, starts a thread or calls a user's function while it holds the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol

from .fork import on_fork_in_child

lock = RLock()

#: Whether the calling thread holds the lock. `threading.Condition` asks locks the same question by the same name.
has_lock: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]


class Leaving(Protocol):
    """A caller, or a run of a batch, that something interrupted: what others expect of it must be done by others."""

    def forget(self) -> list[Any]:
        """Take it out of every queue and table; the tickets that must be woken for it. Runs under the lock, maybe twice."""


#: What has left and has not been forgotten. `append` is one step of the interpreter: nothing can interrupt it.
left: deque[Leaving] = deque()


def work_off() -> None:
    """Forget what has left, unless this thread holds the lock: its holder does it then."""
    while left and not has_lock():
        woken: list[Any] = []
        with lock:
            while left:
                woken += left[0].forget()
                left.popleft()  # after it: what is interrupted is forgotten once more
        for ticket in woken:
            ticket.wake()


def _after_fork_in_child() -> None:
    """Another thread, which is not in this process, may have held the lock."""
    left.clear()
    if not has_lock():
        lock._at_fork_reinit()  # type: ignore[attr-defined]


on_fork_in_child(_after_fork_in_child)
