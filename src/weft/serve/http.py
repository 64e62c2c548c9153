"""One HTTP exchange over ASGI: the request's headers and body, within their limits, and the reply."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from time import perf_counter
from typing import Any, NamedTuple

import msgspec

from .errors import Headers, HttpError
from .limits import Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

encode_json = msgspec.json.Encoder().encode
#: The name in a scope of what ends the connection, once its client sends nothing more and may have left.
LEAVE = "weft.leave"
#: Bytes of bodies that have come in part, of all requests together: beyond it, the oldest alone goes on.
BODIES = 8 << 20
_JSON = (b"content-type", b"application/json")


class Reply(NamedTuple):
    """A reply: its status, headers beside the length, and body. A `stream` gives the parts of a body in place of `body`."""

    status: int
    headers: Headers
    body: bytes
    stream: Any = None


def json_reply(value: Any, status: int = 200, headers: Headers = ()) -> Reply:
    """Return a reply with a JSON body."""
    return Reply(status, (_JSON, *headers), encode_json(value))


class Bodies:
    """The bodies that come now. While they have more than `BODIES` bytes together, the oldest alone is read on.

    It has its end, or its time passes: then there is room for the others.
    """

    def __init__(self) -> None:
        self._sizes: dict[Exchange, int] = {}  # in the order in which they began
        self._total = 0
        self._waiting: list[asyncio.Future[None]] = []

    def add(self, exchange: Exchange, size: int) -> None:
        """Note so many bytes more."""
        self._sizes[exchange] = self._sizes.get(exchange, 0) + size
        self._total += size

    def remove(self, exchange: Exchange) -> None:
        """Forget a body that came whole, or was given up."""
        self._total -= self._sizes.pop(exchange, 0)
        waiting, self._waiting = self._waiting, []
        for room in waiting:
            if not room.done():
                room.set_result(None)

    async def wait(self, exchange: Exchange) -> None:
        """Wait until there is room for more of this body."""
        while next(iter(self._sizes)) is not exchange and self._total > BODIES:
            room = asyncio.get_running_loop().create_future()
            self._waiting.append(room)
            try:
                await room
            except asyncio.CancelledError:
                if not exchange.late:
                    raise
                exchange.task.uncancel()
                raise HttpError(503, "other bodies that come have all the room there is: try again later") from None


class Exchange:
    """One request, and what is known of it while it is answered."""

    __slots__ = (
        "__weakref__", "call", "gone", "headers", "late", "method", "model", "path", "reading", "receive", "rows", "scope", "since",
        "started", "task", "version", "waiting", "watcher",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive | None) -> None:
        self.scope = scope
        self.receive: Any = receive  # None if the whole body has come, and a disconnect is noticed without it
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.started = self.since = perf_counter()  # the limits of time count from `since`
        self.reading = False  # True while the body is read
        self.waiting = False  # True while the model is awaited
        self.gone = False  # True once the client has disconnected
        self.late = False  # True once a limit of time has passed
        self.task: Any = None  # the task that answers, while it reads or waits
        self.call: Any = None  # the call of the model, while it is awaited
        self.watcher: Any = None  # a task that notices a disconnect
        self.model: str | None = None  # for the log
        self.version = self.rows = 0

    async def body(self, limits: Limits, bodies: Bodies) -> bytes | bytearray:
        """Return the body. It is counted as it comes; the app's sweep ends one that takes too long."""
        declared = self.headers.get(b"content-length")
        if declared is not None and int(declared) > limits.body_bytes:  # the server has checked that it is a number
            raise _too_large(limits)
        self.task, self.reading = asyncio.current_task(), True
        parts, size = deque[bytes](), 0
        try:
            while self.reading:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                part = message.get("body", b"")
                size += len(part)
                if size > limits.body_bytes:
                    raise _too_large(limits)
                parts.append(part)
                if message.get("more_body", False):
                    bodies.add(self, len(part))
                    await bodies.wait(self)
                else:
                    self.reading = False
        finally:
            bodies.remove(self)
        body = bytearray()
        while parts:  # one after another, at the end: joined, or as they come, bodies would take twice the memory
            body += parts.popleft()
        encoding = self.headers.get(b"content-encoding")
        return body if encoding is None else _inflate(body, encoding.strip().lower(), limits)

    def leave(self) -> None:
        """End the connection if its client sends nothing more and no batch has the call yet: it has left, as far as can be seen."""
        leave = self.scope.get(LEAVE)
        if leave is not None and self.call is not None and self.call.waits():
            leave()

    def give_up(self) -> None:
        """Cancel the task that answers: its time has passed."""
        self.late = True
        self.task.cancel()

    async def watch(self) -> None:
        """Wait until the client disconnects, then cancel the task that answers it."""
        message = await self.receive()  # the body has come: the next message is that the client has left
        if message["type"] == "http.disconnect" and self.waiting:
            self.gone = True
            self.task.cancel()


class Gone(Exception):
    """The client has disconnected: nobody reads the reply."""


async def send_reply(send: Send, reply: Reply, is_head: bool = False) -> None:
    """Send a reply in two messages."""
    headers = [*reply.headers, (b"content-length", b"%d" % len(reply.body))]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if is_head else reply.body})


def _too_large(limits: Limits) -> HttpError:
    sentence = f"the body must have at most {limits.body_bytes} bytes"
    return HttpError(413, sentence, [(b"connection", b"close")])


def _inflate(body: bytes | bytearray, encoding: bytes, limits: Limits) -> bytes | bytearray:
    """Return a decompressed body; stop at the limit."""
    if encoding == b"identity":
        return body
    if encoding not in (b"gzip", b"deflate"):
        raise HttpError(
            415, f"content-encoding must be gzip, deflate or identity, got {encoding[:40].decode('latin-1')!r}"
        )
    stream = zlib.decompressobj(47)  # gzip or zlib, by the first bytes
    try:
        plain = stream.decompress(body, limits.body_bytes + 1)
    except zlib.error as error:
        raise HttpError(400, f"the body is not valid {encoding.decode()}: {error}") from None
    if len(plain) > limits.body_bytes:
        raise _too_large(limits)
    if not stream.eof or stream.unused_data:
        raise HttpError(400, f"the body must be one whole {encoding.decode()} stream")
    return plain
