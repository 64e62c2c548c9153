"""Every private name of JAX that weft uses, each behind a function with a fallback for versions that lack the name.

Import this module only where JAX is in use: it imports JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax

try:
    _core: Any = import_module("jax._src.core")
except ImportError:
    _core = None

_trace_state_clean = getattr(_core, "trace_state_clean", None)
_is_concrete = getattr(_core, "is_concrete", None)


def is_tracing() -> bool:
    """True inside any transformation of JAX; True if unknown."""
    return _trace_state_clean is None or not _trace_state_clean()


def has_value(x: Any) -> bool:
    """True if the value of `x` is known now, as of arrays and of the tracers of an eager `jax.grad`.

    If unknown, only for arrays.
    """
    return _is_concrete(x) if _is_concrete is not None else not isinstance(x, jax.core.Tracer)
