"""Which exceptions are meant for the thread that they are raised in, and which for the callers that it works for.

KeyboardInterrupt, SystemExit and exceptions of signal handlers are meant for the thread. All others that user code raises are its
callers', also those that are no `Exception`, such as `asyncio.CancelledError` and the panics of extensions in Rust.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

from ..errors import own_copy


def as_exception(error: BaseException) -> Exception:
    """Return what callers get for an exception that user code raised: itself, or `UnknownError` for one that is no `Exception`.

    One that is meant for this thread is raised again.
    """
    if isinstance(error, Exception):
        return error
    if isinstance(error, (KeyboardInterrupt, SystemExit)) or is_from_signal(error):
        raise error
    return own_copy(error)


def call_user(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `f(*args, **kwargs)`; what it raises is an `Exception`, or meant for this thread."""
    try:
        return f(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        raise as_exception(error) from error


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
