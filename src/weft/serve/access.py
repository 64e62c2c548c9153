"""The access log: one line of JSON for each answer, written a few times a second."""

from __future__ import annotations

import contextlib
import sys
import time
from time import perf_counter
from typing import Any

from ..errors import InvalidArgumentError
from .http import Exchange, encode_json

#: The lowest status that is logged.
LEAST = {"all": 0, "errors": 500, "none": 1000}


class AccessLog:
    """Collects lines and writes them together; "errors" keeps answers with a status from 500 alone."""

    def __init__(self, which: str) -> None:
        if which not in LEAST:
            raise InvalidArgumentError(f"access_log must be one of {', '.join(LEAST)}, got {which!r}")
        self.least = LEAST[which]
        self._stream = sys.stderr
        self._lines: list[bytes] = []

    def add(self, exchange: Exchange, status: int, sent: int, problem: str = "") -> None:
        """Note an answer."""
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "method": exchange.method,
            "path": exchange.path,
            "status": status,
            "ms": round(1e3 * (perf_counter() - exchange.started), 3),
            "bytes": sent,
        }
        client = exchange.scope.get("client")
        if client:
            line["client"] = client[0]
        if exchange.model is not None:
            line |= {"model": exchange.model, "version": exchange.version, "rows": exchange.rows}
        trace = trace_of(exchange)
        if trace is not None:
            line["trace_id"], line["parent_id"] = trace
        if problem:
            line["error"] = problem
        self._lines.append(encode_json(line))
        if len(self._lines) > 1000:
            self.flush()

    def flush(self) -> None:
        """Write what was noted. If nobody reads the log any more, it is lost: requests are answered all the same."""
        if self._lines:
            lines, self._lines = self._lines, []
            with contextlib.suppress(OSError, ValueError):  # a broken pipe, a full disk, a closed file
                self._stream.write((b"\n".join(lines) + b"\n").decode(errors="replace"))
                self._stream.flush()


def trace_of(exchange: Exchange) -> tuple[str, str] | None:
    """Return the trace id and the parent id of a `traceparent` header, None without a valid one."""
    header = exchange.headers.get(b"traceparent")
    if header is None:
        return None
    parts = header.decode("latin-1").strip().split("-")
    if [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    version, trace, parent, flags = parts[:4]
    if set(version + trace + parent + flags) - set("0123456789abcdef") or not trace.strip("0") or not parent.strip("0"):
        return None
    return trace, parent
