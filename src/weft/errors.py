"""TensorFlow's error classes, each also the Python error people expect, each with the HTTP status it maps to."""

from __future__ import annotations

import copy
from typing import ClassVar

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
    "ResourceExhaustedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
]


class OpError(Exception):
    """The base of every error an op raises on purpose. `error_code` is TensorFlow's number for the class."""

    error_code: ClassVar[int] = 2
    http_status: ClassVar[int] = 500


class CancelledError(OpError, RuntimeError):
    """The call was cancelled, or what it waited for was closed."""

    error_code = 1
    http_status = 499


class UnknownError(OpError, RuntimeError):
    """Something failed that has no class of its own."""


class InvalidArgumentError(OpError, ValueError):
    """An argument can never be right, whatever the state."""

    error_code = 3
    http_status = 400


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument is an object of the wrong kind: a list is needed and a number came, or text and None."""


class ArgumentOverflowError(InvalidArgumentError, OverflowError):
    """An integer does not fit in 64 bits."""


class DeadlineExceededError(OpError, TimeoutError):
    """What the call waited for did not come in time."""

    error_code = 4
    http_status = 504


class NotFoundError(OpError, LookupError):
    """A name that nothing has."""

    error_code = 5
    http_status = 404


class AlreadyExistsError(OpError, ValueError):
    """A name, id or element that is taken."""

    error_code = 6
    http_status = 409


class ResourceExhaustedError(OpError, MemoryError):
    """More than there is room for."""

    error_code = 8
    http_status = 413


class FailedPreconditionError(OpError, RuntimeError):
    """The state is not one in which this call is allowed."""

    error_code = 9
    http_status = 412


class OutOfRangeError(OpError, IndexError):
    """An index past the end."""

    error_code = 11
    http_status = 400


class UnimplementedError(OpError, NotImplementedError):
    """Valid, and not provided here."""

    error_code = 12
    http_status = 501


class InternalError(OpError, RuntimeError):
    """An invariant between several calls is broken."""

    error_code = 13
    http_status = 500


class UnavailableError(OpError, RuntimeError):
    """No room right now; the same call may succeed later."""

    error_code = 14
    http_status = 429


def own_copy(error: Exception) -> Exception:
    """`error` as a new object of the same class, so that several callers can each raise one of their own."""
    try:
        twin = copy.copy(error)
        if type(twin) is not type(error) or twin is error or twin.args != error.args:
            raise TypeError("copied to something else")
    except Exception:  # a class that is not made from its own args
        twin = _bare_copy(error)
    if hasattr(twin, "__notes__"):
        twin.__notes__ = list(twin.__notes__)
    twin.__traceback__ = None
    twin.__cause__ = error
    return twin


def _bare_copy(error: Exception) -> Exception:
    try:
        twin = BaseException.__new__(type(error), *error.args)
        twin.__dict__.update(error.__dict__)
    except Exception:  # a class with a layout of its own
        return UnknownError(f"{type(error).__name__}: {error}")
    return twin
