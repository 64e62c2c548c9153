"""Every private name of JAX that weft uses, each behind a function with a fallback for versions that lack the name.

Import this module only where JAX is in use: it imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from threading import Thread
from typing import Any

import jax


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


_core, _config = _module("jax._src.core"), _module("jax._src.config")
_trace_state_clean = getattr(_core, "trace_state_clean", None)
_is_concrete = getattr(_core, "is_concrete", None)
_trace_context = getattr(_config, "trace_context", None)
_states = getattr(_config, "config_states", None)
_unset = getattr(getattr(_config, "config_ext", None), "unset", None)


def is_tracing() -> bool:
    """True inside any transformation of JAX; True if unknown."""
    return _trace_state_clean is None or not _trace_state_clean()


def has_value(x: Any) -> bool:
    """True if the value of `x` is known now, as of arrays and of the tracers of an eager `jax.grad`.

    If unknown, only for arrays.
    """
    return _is_concrete(x) if _is_concrete is not None else not isinstance(x, jax.core.Tracer)


# ---- the context of a thread: `jax.enable_x64`, `jax.default_matmul_precision`, ...

#: Settings that another thread cannot be given: they are more than a value.
_BOUND = frozenset(["mesh_context_manager", "jax_thread_guard"])
#: Settings that a transformation makes, of its own trace.
_OF_TRACES = frozenset(["trace_state", "trace_state_strong_ref", "axis_env_state"])
#: The most contexts that are remembered.
_MOST_MODES = 256


def _is_setting(x: Any) -> bool:
    return not isinstance(x, type) and hasattr(x, "get_local") and hasattr(x, "set_local")


@lru_cache(maxsize=1)
def _settings_of(count: int) -> dict[str, Any]:
    found = {**vars(_config), **(_states or {})}
    named = {id(x): (name, x) for name, x in found.items() if _is_setting(x) and name not in _OF_TRACES}
    return dict(named.values())


def _settings() -> dict[str, Any]:
    """The settings that a thread can have for itself, by name; modules of JAX add some when they are imported."""
    return {} if _unset is None else _settings_of(len(_states or ()))


def _readers() -> tuple[Callable[[], Any], ...]:
    """The functions that read what `trace_context` leaves out of the settings that `jax` offers as context managers."""
    if _trace_context is None or _states is None or _unset is None:
        return (lambda: tuple(jax.config.values.values()),)
    find_names: Callable[[], tuple[str, ...]] = getattr(_config, "trace_context_names", tuple)
    names = find_names()
    public = {id(x) for x in vars(jax).values()} | {id(getattr(_config, "device_context", None))}
    others = [x for name, x in _settings().items() if id(x) in public and name not in names]
    return (_trace_context, *[x.get_local for x in others])


#: Functions that together tell the context of a thread; all of their results can be hashed.
READERS = _readers()
_CAN_SET = len(READERS) > 1


class JaxMode:
    """The context of a thread in JAX: equal for threads in which a function of JAX does the same."""

    __slots__ = ("_hash", "_local", "_seen", "is_movable")

    def __init__(self, seen: tuple[Any, ...]) -> None:
        self._seen, self._hash = seen, hash(seen)
        self._local: dict[str, Any] = {}  # what the thread has set for itself
        for name, x in _settings().items() if _CAN_SET else ():
            value = x.get_local()
            if value is not _unset and value != x.get_global():
                self._local[name] = value
        #: True if another thread can be in this context, exactly.
        self.is_movable = self._local.keys().isdisjoint(_BOUND) and self._is_seen_elsewhere()

    def __eq__(self, other: object) -> bool:
        return type(other) is JaxMode and (other is self or other._seen == self._seen)

    def __hash__(self) -> int:
        return self._hash

    def _is_seen_elsewhere(self) -> bool:
        """Try it in a new thread."""
        found: list[Any] = []

        def look() -> None:
            with self.use():
                found.append(seen_here())

        thread = Thread(target=look, name="weft looks at JAX", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is no thread left
            return False
        thread.join()
        return found == [self._seen]

    @contextmanager
    def use(self) -> Iterator[None]:
        """Be in this context for a block, as far as this thread can; what the block leaves behind ends with it."""
        before = None if seen_here() == self._seen else {name: x.get_local() for name, x in _settings().items()}
        try:
            if before is not None:
                _set_all(self._local)
            yield
        finally:
            if before is not None:
                _set_all(before)
            elif seen_here() != self._seen:
                _set_all(self._local)


def _set_all(local: dict[str, Any]) -> None:
    """Give this thread these settings of its own and no others, as their context managers do."""
    for name, x in _settings().items() if _CAN_SET else ():
        value = local.get(name, _unset)
        if name in _BOUND or x.get_local() is value:
            continue
        x.set_local(value)
        hook = getattr(x, "_update_thread_local_hook", None)
        if hook is not None:
            hook(None if value is _unset else value)


def seen_here() -> tuple[Any, ...]:
    """What the readers tell of this thread."""
    return tuple([read() for read in READERS])


_modes: dict[Hashable, JaxMode] = {}


def mode_of(seen: tuple[Any, ...]) -> JaxMode:
    """The mode of this thread, in which the readers tell `seen`.

    In versions without the names, only calls with the same values in `jax.config` share one, and a thread is never given one.
    """
    found = _modes.get(seen)
    if found is None:
        if len(_modes) >= _MOST_MODES:
            _modes.clear()
        found = _modes.setdefault(seen, JaxMode(seen))
    return found
