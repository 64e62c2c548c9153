"""How the bytes of a connection are read, and where a request ends in them: the parser gets one request at a time.

What a client sends ahead of its answers stays what it is, bytes: parsed, a request takes a hundred times as much memory.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

#: Bytes that are read at once: what a connection may hold of requests that wait, and of a body that nobody takes.
READ = 64 << 10
#: A head, and a body in chunks with its trailers, end with a blank line.
_BLANK = re.compile(rb"\n\r?\n")
#: In a body several are taken at once: those after its end mean nothing.
_BLANKS = re.compile(rb"\n(?:\r?\n)+")


class Framing:
    """Cuts what comes into parts that end where a request may end."""

    def __init__(self) -> None:
        self.left = 0  # bytes of a body of known length that have not come
        self._tail = b""  # the last bytes of a part that ended elsewhere

    def part(self, data: memoryview, is_in_body: bool) -> int:
        """Return how many bytes of `data` may be parsed now; of the rest it is not known whether it is another request's."""
        if self.left:
            self._tail = b""
            return min(self.left, len(data))
        tail, blank = self._tail, _BLANKS if is_in_body else _BLANK
        found = blank.search(tail + bytes(data[:2])) if tail else None
        end = 0 if found is None else found.end() - len(tail)
        if not end:
            found = blank.search(data)
            end = len(data) if found is None else found.end()
        self._tail = b"" if found is not None else (tail + bytes(data[-2:]))[-2:]
        return end


class Backlog:
    """How many bytes all connections of a server hold that wait for the answer of an earlier request."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0


class Flow(FlowControl):
    """Reads nothing while the connection is full, or its client does not take its answers."""

    def __init__(self, transport: Any, is_full: Callable[[], bool]) -> None:
        super().__init__(transport)
        self.is_full = is_full

    def resume_reading(self) -> None:
        if not (self.write_paused or self.is_full()):
            super().resume_reading()


class Reader(asyncio.BufferedProtocol):
    """Reads for a connection, `READ` bytes at once: asyncio's `Protocol` would get, and so hold, four times as many."""

    buffer = memoryview(bytearray(READ))  # of all: what is read is copied at once

    def __init__(self, connection: Any) -> None:
        if sys.platform == "win32":  # several reads go on at once there
            self.buffer = memoryview(bytearray(READ))
        self._take = connection.data_received
        for name in ("connection_made", "connection_lost", "pause_writing", "resume_writing", "eof_received"):
            setattr(self, name, getattr(connection, name))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Give the bytes that came to the connection."""
        self._take(bytes(self.buffer[:nbytes]))
