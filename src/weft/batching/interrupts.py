"""Tells exceptions of signal handlers: they are meant for the thread they interrupt, not for the callers it runs a batch for."""

from __future__ import annotations

import signal
import threading
from types import CodeType
from typing import Any


def is_from_signal(error: BaseException) -> bool:
    """Whether a signal handler written in Python, or a function it called, raised `error`, or Python's own handler of Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        return False  # handlers run in the main thread
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    handlers = {code for number in signal.valid_signals() if (code := _code(signal.getsignal(number))) is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """Return the code of a function, a method, a partial or a callable object; None if it is not written in Python."""
    handler = getattr(handler, "func", handler)
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__"):
        handler = vars(type(handler)).get("__call__")
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None
