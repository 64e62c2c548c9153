"""The access log: one line of JSON for each answer, written a few times a second, and never waited for."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
import time
from time import perf_counter
from typing import Any, TextIO

from ..errors import InvalidArgumentError
from .http import Exchange, encode_json

#: The lowest status that is logged.
LEAST = {"all": 0, "errors": 401, "none": 1000}
#: Statuses below 500 that "errors" keeps: of those who ask for what is not theirs, or is not there.
STRANGE = (401, 403, 404)
#: Bytes of lines that wait for a slow reader, and bytes that a pipe takes at once when it says that it takes any.
KEPT, AT_ONCE = 1 << 20, 4096


class Outlet(io.TextIOBase):
    """A stream of lines that never waits: what its reader does not take is kept up to a limit; beyond it lines are lost.

    A write to a full pipe would stop the event loop, and with it all requests.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()  # of the lines that wait
        self._lines = bytearray()
        self._poll: Any = None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no file, or no poll
            self._file = stream.fileno()
            self._poll = select.poll()
            self._poll.register(self._file, select.POLLOUT)

    def write(self, text: str) -> int:
        """Add lines."""
        if self._poll is None:
            return self._stream.write(text)
        with self._lock:
            if len(self._lines) < KEPT:
                self._lines += text.encode(errors="replace")
        return len(text)

    def flush(self) -> None:
        """Write what the reader takes now, in whole lines."""
        if self._poll is None:
            self._stream.flush()
            return
        with self._lock:
            while self._lines and any(event & select.POLLOUT for _, event in self._poll.poll(0)):
                end = self._lines.rfind(b"\n", 0, AT_ONCE) + 1
                written = os.write(self._file, self._lines[: end or AT_ONCE])
                del self._lines[:written]


class AccessLog:
    """Collects lines and writes them together; "errors" keeps answers with a status from 500 on, and `STRANGE` ones."""

    def __init__(self, which: str) -> None:
        if which not in LEAST:
            raise InvalidArgumentError(f"access_log must be one of {', '.join(LEAST)}, got {which!r}")
        self.least = LEAST[which]
        self._is_all = which == "all"
        self._stream: TextIO = Outlet(sys.stderr)  # type: ignore[assignment]
        self._lines: list[bytes] = []

    def wants(self, status: int) -> bool:
        """Return whether answers with this status are logged."""
        return self._is_all or status >= max(500, self.least) or (status in STRANGE and status >= self.least)

    def add_refusal(self, status: int, sentence: str, client: Any) -> None:
        """Note what was refused before it was a request."""
        line = {"time": round(time.time(), 3), "status": status, "error": sentence}
        self._add(line | ({"client": client[0]} if client else {}))

    def add(self, exchange: Exchange, status: int, sent: int, problem: str = "") -> None:
        """Note an answer."""
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "method": exchange.method,
            "path": exchange.path[:200],
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
        self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        self._lines.append(encode_json(line))
        if len(self._lines) > 1000:
            self.flush()

    def flush(self) -> None:
        """Write what was noted, as far as the reader takes it: if nobody reads the log, requests are answered all the same."""
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, a full disk, a closed file
            if self._lines:
                lines, self._lines = self._lines, []
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
