"""Which exceptions come from a signal handler: they are meant for the thread they interrupt, not for those it works for."""

from __future__ import annotations

import signal
import threading
from types import CodeType
from typing import Any


def is_from_signal(error: BaseException) -> bool:
    """Whether a signal handler written in Python raised `error`, or what it called."""
    if threading.current_thread() is not threading.main_thread():
        return False  # handlers run in the main thread
    handlers = {code for number in signal.valid_signals() if (code := _code(signal.getsignal(number))) is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """The code of a function, a bound method, a partial one or an object that can be called; None for what is not Python's."""
    handler = getattr(handler, "func", handler)
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__"):
        handler = vars(type(handler)).get("__call__")
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None
