"""One object for all equal keys, as long as it is referenced.

Queues are found by such objects, under the lock: the `__eq__` of a caller's class runs here, where no lock is held, and only by
`exact.Other`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

K = TypeVar("K")


class Key:
    """The parts that calls must have in common to share a batch."""

    __slots__ = ("__weakref__", "parts")

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Interned(Generic[K]):
    """`of(parts, *more)` is `make(*parts, *more)`, made once for equal parts.

    The table is changed atomically, without a lock: an object may be deleted in the middle of any line here. If two threads find an
    entry that has just died, they may get two objects; then their calls do not share a batch, and nothing else happens.
    """

    def __init__(self, make: Callable[..., K]) -> None:
        self._make = make
        self._table: dict[Any, weakref.ref[K]] = {}

    def __len__(self) -> int:
        return len(self._table)

    def of(self, parts: tuple[Any, ...], *more: Any) -> K:
        """Return the object for these parts, which must be hashable."""
        found = self._table.get(parts)
        key = found() if found is not None else None
        return key if key is not None else self._new(parts, more)

    def _new(self, parts: tuple[Any, ...], more: tuple[Any, ...]) -> K:
        table = self._table

        def forget(gone: weakref.ref[K]) -> None:
            if table.get(parts) is gone:
                table.pop(parts, None)

        new = self._make(*parts, *more)
        own = weakref.ref(new, forget)
        for _ in range(8):
            kept = table.setdefault(parts, own)
            if kept is own:
                return new
            key = kept()
            if key is not None:
                return key
            table.pop(parts, None)  # its object is dead, and `forget` has not run yet
        return new
