"""Requests whose head, the request line and the headers, is the same as that of an earlier one, byte by byte.

Clients repeat their heads. What the parser of HTTP found in one is kept, and the next request with it needs no parser: of a request
with the same head and as long a body it would find the same. The rows "echo" of `benchmarks/serve.py` need it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .http import Scope

#: How many heads are kept, and of how many bytes each at most.
KEPT, BYTES = 256, 2048


class Head(NamedTuple):
    """What a head says."""

    scope: dict[str, Any]  # without what differs from connection to connection
    length: int  # of the body


class KnownHeads:
    """The heads of calls that came whole, on connections that stay open."""

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}

    def learn(self, data: bytes, cycle: Any) -> None:
        """Keep the head of the request in `data`, of which uvicorn has made `cycle`."""
        at = data.find(b"\r\n\r\n", 0, BYTES + 4)
        if at < 0 or not cycle.keep_alive or cycle.waiting_for_100_continue or bytes(cycle.body) != data[at + 4 :]:
            return
        if len(self._heads) >= KEPT:
            self._heads.clear()
        scope = {key: value for key, value in cycle.scope.items() if key not in ("server", "client", "state")}
        self._heads[data[:at]] = Head(scope, len(data) - at - 4)

    def find(self, data: bytes) -> tuple[Scope, bytes] | None:
        """Return the scope and the body of the one request in `data`; None if its head is not known."""
        at = data.find(b"\r\n\r\n", 0, BYTES + 4)
        head = self._heads.get(data[:at]) if at >= 0 else None
        if head is None or len(data) != at + 4 + head.length:
            return None
        scope = head.scope.copy()
        scope["headers"] = head.scope["headers"].copy()
        return scope, data[at + 4 :]
