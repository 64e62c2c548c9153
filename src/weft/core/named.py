"""Queues and tables that calls find by name, and that are dropped when they are empty and unused for a minute."""

from __future__ import annotations

from typing import Any

#: After so many seconds without a call an empty queue or table is dropped.
IDLE_SECONDS = 60.0


class Named:
    """A queue or a table among the resources of a scope, under `key`.

    A call looks it up first and enters it later. If it was dropped in between, `in_use` puts it back, or finds the one that has its
    name by now: calls of one name always wait in one place. All this happens under the lock.
    """

    def __init__(self) -> None:
        self.resources: dict[Any, Any] | None = None  # of its scope
        self.key: Any = None
        self.last_used = 0.0
        self.is_dropped = False

    def in_use(self) -> Any:
        """Return the queue or table that has this name now: this one, unless it was dropped and another one was made."""
        if not self.is_dropped:
            return self
        assert self.resources is not None
        found = self.resources.setdefault(self.key, self)
        if found is self:
            self.is_dropped = False
        return found

    def is_empty(self) -> bool:
        """Whether no call waits and nothing is stored."""
        raise NotImplementedError

    def drop(self, now: float) -> float | None:
        """Take it out of its scope if it is empty and unused for a minute, and return None; else return when to check again.

        One check a minute is enough: with many names each would otherwise cause a sweep of its own.
        """
        if not self.is_empty() or now - self.last_used < IDLE_SECONDS:
            return now + IDLE_SECONDS
        if self.resources is not None and self.resources.get(self.key) is self:
            self.is_dropped = True
            del self.resources[self.key]
        return None
