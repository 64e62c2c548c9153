"""Numba's cache of compiled kernels on disk, and none where nothing can be written: kernels are then compiled in every
process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

_log = logging.getLogger(__name__)


def cached_jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with a cache on disk, if there can be one."""

    def define(function: Callable[..., Any]) -> Any:
        found = njit(**options)(function)
        try:
            found._cache = _Cache(function)
        except (RuntimeError, OSError) as problem:  # no folder can be written to
            _tell(str(problem))
        return found

    return define


class _Cache(FunctionCache):  # type: ignore[misc]
    """A cache that may become unreadable or full at any time."""

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)
        except OSError as problem:
            _tell(str(problem))
            return None

    def save_overload(self, *arguments: Any) -> None:
        try:
            super().save_overload(*arguments)
        except OSError as problem:
            _tell(str(problem))


def _tell(problem: str) -> None:
    _log.debug("%s", problem)
    _tell_once()


@cache
def _tell_once() -> None:
    _log.warning(
        "compiled kernels cannot be kept on disk, each process compiles them anew: set NUMBA_CACHE_DIR to a folder that can "
        "be written to"
    )
