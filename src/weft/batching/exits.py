"""What weft does when the interpreter ends.

Then only daemon threads are left, and the interpreter stops each at its next line of Python. A thread in native code, as in a
backward of torch, can then abort the process; and a call that waits for others would wait forever. So weft refuses new calls,
rejects all waiting ones, and gives the threads that are inside weft, or were in a backward, a moment to return.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from _thread import get_ident
from time import monotonic, sleep
from typing import Protocol

from ..core import ticket as tickets
from ..errors import CancelledError
from . import gradient, workers

#: How long, in seconds, the end of the interpreter waits for threads.
EXIT_SECONDS = 1.0


class Closing(Protocol):
    """An object that must know that the interpreter ends."""

    def close(self, error: Exception) -> None:
        """Reject all calls with `error`, now and from now on."""


closing: weakref.WeakSet[Closing] = weakref.WeakSet()


def _why() -> CancelledError:
    return CancelledError("the interpreter is ending: the call is not answered any more")


def _at_exit() -> None:
    tickets.exiting.append(True)
    end, me = monotonic() + EXIT_SECONDS, threading.current_thread()
    for each in list(closing):
        each.close(_why())
    threads = {*workers.close_all(), *(thread for thread in list(gradient.callers) if thread.daemon)} - {me}
    while monotonic() < end:
        _reject_all()
        if not (tickets.innermost_calls.keys() - {get_ident()}) and not any(thread.is_alive() for thread in threads):
            return
        sleep(0.002)


def _reject_all() -> None:
    """Reject the calls of all threads but this one."""
    for thread, call in list(tickets.innermost_calls.items()):
        ticket: tickets.Ticket | None = call if thread != get_ident() else None
        while ticket is not None:
            if ticket.reject(_why()):
                ticket.wake()
            ticket = ticket.outer


atexit.register(_at_exit)
