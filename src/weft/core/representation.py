"""`__repr__` that never raises.

Logs, debuggers and tracebacks show objects in any state. An error there would hide the error that they are about.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def never_raises(describe: Callable[[Any], str]) -> Callable[[Any], str]:
    """A `__repr__` that names the class alone where `describe` raises, as for an object that is only half made."""

    @wraps(describe)
    def representation(self: Any) -> str:
        try:
            return describe(self)
        except Exception:
            return object.__repr__(self)

    return representation


def repr_of(x: object) -> str:
    """`repr(x)`; the class alone if that raises."""
    try:
        return repr(x)
    except Exception:
        return object.__repr__(x)
