"""What calls find by name: a queue or a table, which is dropped when it is empty and nobody has used it for a minute."""

from __future__ import annotations

from typing import Any

#: A queue or a table that is empty and was not used for so long is dropped, in seconds.
IDLE_SECONDS = 60.0


class Named:
    """A queue or a table in the resources of a scope, under `key`.

    A call looks it up first and enters it later. If it was dropped in between, `here` puts it back, or finds the one that has its
    name by now: calls of one name always wait in one place. All this happens under the lock.
    """

    def __init__(self) -> None:
        self.home: dict[Any, Any] | None = None  # where it is, or was, found
        self.key: Any = None
        self.used = 0.0  # when it was last used
        self.is_dropped = False

    def here(self) -> Any:
        """This, or what has its name now."""
        if not self.is_dropped:
            return self
        assert self.home is not None
        found = self.home.setdefault(self.key, self)
        if found is self:
            self.is_dropped = False
        return found

    def is_empty(self) -> bool:
        """Whether nobody waits and nothing is stored."""
        raise NotImplementedError

    def drop(self, now: float) -> float | None:
        """Take it out of its scope if it is empty and was not used for a minute, and return None; else when to look again.

        Looking once a minute is enough: with many names each would else have a sweep of its own.
        """
        if not self.is_empty() or now - self.used < IDLE_SECONDS:
            return now + IDLE_SECONDS
        if self.home is not None and self.home.get(self.key) is self:
            self.is_dropped = True
            del self.home[self.key]
        return None
