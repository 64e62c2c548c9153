"""TensorFlow's error classes, each also a standard Python error, with an HTTP status."""

from __future__ import annotations

import copy
from types import NoneType
from typing import ClassVar, TypeVar

__all__ = [
    "AlreadyExistsError",
    "ArgumentOverflowError",
    "ArgumentTypeError",
    "CancelledError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OpError",
    "OutOfRangeError",
    "QueueFullError",
    "ResourceExhaustedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
]


E = TypeVar("E", bound=BaseException)


class OpError(Exception):
    """The base class of the errors that ops raise. `error_code` is TensorFlow's number of the class.

    `http_status` is what a server answers to a call that raises it: 400 for a mistake of the caller, 429 for a full queue, 503
    for what is closed or gone, 504 for a deadline, 501 for what is not supported. Everything else is the server's own fault, 500.
    """

    error_code: ClassVar[int] = 2
    http_status: ClassVar[int] = 500


class CancelledError(OpError, RuntimeError):
    """The call was cancelled, or the resource it waited for was closed."""

    error_code = 1
    http_status = 503


class UnknownError(OpError, RuntimeError):
    """An error without a class of its own."""


class InvalidArgumentError(OpError, ValueError):
    """An argument is invalid, independent of any state."""

    error_code = 3
    http_status = 400


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument has the wrong type, such as a number instead of a list."""


class ArgumentOverflowError(InvalidArgumentError, OverflowError):
    """An integer does not fit in 64 bits."""


class DeadlineExceededError(OpError, TimeoutError):
    """The wait of a call exceeded its deadline."""

    error_code = 4
    http_status = 504


class NotFoundError(OpError, LookupError):
    """A name, id or element does not exist."""

    error_code = 5


class AlreadyExistsError(OpError, ValueError):
    """A name, id or element exists already."""

    error_code = 6


class ResourceExhaustedError(OpError, MemoryError):
    """The call needs more memory or room than there is."""

    error_code = 8


class FailedPreconditionError(OpError, RuntimeError):
    """The call is not allowed in the current state."""

    error_code = 9


class OutOfRangeError(OpError, IndexError):
    """An index is out of range."""

    error_code = 11
    http_status = 400


class UnimplementedError(OpError, NotImplementedError):
    """A valid request that weft does not support."""

    error_code = 12
    http_status = 501


class InternalError(OpError, RuntimeError):
    """An invariant between calls is broken."""

    error_code = 13


class UnavailableError(OpError, RuntimeError):
    """What the call needs is not there now; the same call may succeed later."""

    error_code = 14
    http_status = 503


class QueueFullError(UnavailableError):
    """There is no room in the queue now."""

    http_status = 429


def own_copy(error: BaseException) -> Exception:
    """A copy of `error`, so that each of several callers can raise its own object.

    For an exception that is no `Exception` it is an `UnknownError` with that as its cause: raised in a caller, the exception itself
    would end the caller's task or thread.
    """
    if not isinstance(error, Exception):
        text = text_of(error)
        stand_in = UnknownError(
            f"user code raised {type(error).__name__}, which is no Exception" + (text and f": {text}")
        )
        stand_in.__cause__ = error
        return stand_in
    twin = copy_of(error)
    stands_for_other = type(error) is UnknownError and not isinstance(error.__cause__, (Exception, NoneType))
    twin.__cause__ = error.__cause__ if stands_for_other else error
    return twin


def copy_of(error: E) -> E | UnknownError:
    """A copy of `error` without its traceback and its cause; an `UnknownError` if the class has a memory layout of its own."""
    twin: E | UnknownError
    try:
        twin = copy.copy(error)
        if type(twin) is not type(error) or twin is error or twin.args != error.args:
            raise TypeError("the copy differs")
    except Exception:  # the constructor of the class does not accept its args
        twin = _bare_copy(error)
    if hasattr(twin, "__notes__"):
        twin.__notes__ = list(twin.__notes__)
    twin.__traceback__ = None
    return twin


def _bare_copy(error: E) -> E | UnknownError:
    try:
        twin = BaseException.__new__(type(error), *error.args)
        twin.__dict__.update(error.__dict__)
    except Exception:  # the class has its own memory layout
        return UnknownError(f"{type(error).__name__}: {text_of(error)}")
    return twin


def text_of(error: BaseException) -> str:
    """The text of an exception, whatever its class does to make it."""
    try:
        return str(error)
    except Exception as problem:
        return f"(its text cannot be made: {type(problem).__name__})"
