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
from collections.abc import Callable
from functools import partial
from time import monotonic, sleep
from typing import Any, Protocol

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
    return CancelledError(f"{tickets.ENDING}: the call is not answered any more")


def _report(hook: Callable[[Any], Any], args: Any) -> None:
    """Report the exception of a thread to `hook`, but for our own: Python ends daemon threads without a word."""
    if args.exc_type is not CancelledError or not str(args.exc_value).startswith(tickets.ENDING):
        hook(args)


def _at_exit() -> None:
    tickets.exiting.append(True)
    threading.excepthook = partial(_report, threading.excepthook)
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
