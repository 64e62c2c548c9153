"""Replies written to uvicorn's connection in one piece, without the messages of ASGI; this file alone knows uvicorn's cycle.

The row "echo, json, 64 connections" of `benchmarks/serve.py` needs it.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from .http import Reply

_NAMES = (
    "disconnected", "flow", "keep_alive", "message_event", "on_response", "response_complete", "response_started", "transport",
)  # fmt: skip


def respond(send: Any, reply: Reply, is_head: bool) -> bool:
    """Write a reply to the connection that `send` belongs to; return False if it must be sent as messages."""
    cycle: Any = getattr(send, "__self__", None)
    if type(cycle) is not RequestResponseCycle or cycle.flow.write_paused or cycle.response_started:
        return False
    if cycle.disconnected:
        return True
    parts = [STATUS_LINE[reply.status]]
    for name, value in (*cycle.default_headers, *reply.headers):
        parts += (name, b": ", value, b"\r\n")
        if name == b"connection" and value == b"close":
            cycle.keep_alive = False
    parts.append(b"content-length: %d\r\n" % len(reply.body))
    if not cycle.keep_alive:
        parts.append(b"connection: close\r\n" if (b"connection", b"close") not in reply.headers else b"")
    parts += (b"\r\n", b"" if is_head else reply.body)
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"".join(parts))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True


def is_known() -> bool:
    """Return whether the installed uvicorn has the attributes that `respond` uses."""
    names = RequestResponseCycle.__init__.__code__.co_names
    return all(name in names for name in _NAMES)
