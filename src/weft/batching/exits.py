"""How weft ends with the interpreter.

When the interpreter ends, only daemon threads are left, and it stops each at the next line of Python it comes to. A thread that is
in native code then, as in a backward of torch, can abort the process; and what waits for others would wait in vain. So weft
takes no more calls, rejects all that wait, and gives the threads that are inside weft, or were in a backward, a moment to leave.
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
    """What must be told that the interpreter ends."""

    def close(self, error: Exception) -> None:
        """Reject whoever waits with `error`, now and from now on."""


closing: weakref.WeakSet[Closing] = weakref.WeakSet()


def _why() -> CancelledError:
    return CancelledError("the interpreter is ending: the call is not answered any more")


def _at_exit() -> None:
    tickets.is_exiting = True
    end, me = monotonic() + EXIT_SECONDS, threading.current_thread()
    for each in list(closing):
        each.close(_why())
    threads = {*workers.close_all(), *(thread for thread in list(gradient.callers) if thread.daemon)} - {me}
    while monotonic() < end:
        _reject_all()
        if not (tickets.held.keys() - {get_ident()}) and not any(thread.is_alive() for thread in threads):
            return
        sleep(0.002)


def _reject_all() -> None:
    """Reject the calls that threads wait for, but for this one."""
    for thread, held in list(tickets.held.items()):
        ticket: tickets.Ticket | None = held if thread != get_ident() else None
        while ticket is not None:
            if ticket.reject(_why()):
                ticket.wake()
            ticket = ticket.outer


atexit.register(_at_exit)
