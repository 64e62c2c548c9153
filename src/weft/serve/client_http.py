"""HTTP for the client: one exchange as a generator, which a socket or an asyncio stream drives."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11

from ..errors import InvalidArgumentError, UnavailableError

#: What an exchange yields when it needs bytes from the server.
NEED = None


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    path: str  # a prefix of all paths
    context: ssl.SSLContext | None

    @classmethod
    def of(cls, text: str, context: ssl.SSLContext | None) -> Address:
        """Return the address in a URL such as `http://127.0.0.1:8000`."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except (TypeError, ValueError):
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise InvalidArgumentError(f"the address of a server must be like http://127.0.0.1:8000, got {text!r}")
        is_tls = parts.scheme == "https"
        context = (context or ssl.create_default_context()) if is_tls else None
        return cls(host, port or (443 if is_tls else 80), parts.path.rstrip("/"), context)


class Answer(NamedTuple):
    """The status, headers and body of an answer."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Lost(UnavailableError):
    """The connection was lost; `is_stale` if it had been idle and nothing of the answer had come."""

    is_stale = False


def exchange(
    connection: Any,
    method: str,
    target: str,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    is_stream: bool = False,
) -> Generator[Any, Any, Answer]:
    """Yield bytes to send, `NEED` for bytes received, and for a stream its parts as ("part", bytes); return the answer."""
    request = h11.Request(method=method, target=target, headers=[*headers, (b"content-length", b"%d" % len(body))])
    yield connection.send(request) + (connection.send(h11.Data(data=body)) or b"" if body else b"")
    connection.send(h11.EndOfMessage())
    parts: list[bytes] = []
    response: Any = None
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            received = yield NEED
            connection.receive_data(received)
        elif isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            if is_stream and response.status_code == 200:
                yield "part", bytes(event.data)
            else:
                parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return Answer(response.status_code, dict(response.headers), b"".join(parts))
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            raise Lost("the server closed the connection")


class Link:
    """What connections over sockets and over asyncio streams share."""

    def __init__(self) -> None:
        self.connection = h11.Connection(h11.CLIENT)
        self.is_used = False  # True if it was idle

    def lost(self, error: Exception, has_answer: bool) -> Lost:
        """Return the error of a connection that ended."""
        found = Lost(str(error) or type(error).__name__)
        found.is_stale = self.is_used and not has_answer and not isinstance(error, TimeoutError)
        return found

    def is_reusable(self) -> bool:
        """Make the connection ready for another exchange; return whether that is possible."""
        if self.connection.our_state is not h11.DONE or self.connection.their_state is not h11.DONE:
            return False
        self.connection.start_next_cycle()
        self.is_used = True
        return True


class SyncLink(Link):
    """A connection over a blocking socket."""

    def __init__(self, address: Address, timeout: float) -> None:
        super().__init__()
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.context is not None:
                self._socket = address.context.wrap_socket(self._socket, server_hostname=address.host)
        except OSError as error:
            raise Lost(f"no connection to {address.host}:{address.port}: {error}") from error

    def run(self, steps: Generator[Any, Any, Answer], timeout: float) -> Iterator[bytes]:
        """Drive an exchange; yield the parts of a stream, and return the answer; `timeout` is that of each part, or of all."""
        self._socket.settimeout(timeout)
        ends = time.monotonic() + timeout
        received: bytes | None = None
        has_answer = False
        try:
            while True:
                try:
                    step = steps.send(received)
                except StopIteration as ended:
                    return ended.value
                received = None
                if step is NEED:
                    if has_answer:  # a server that sends byte by byte has no more time than others
                        self._socket.settimeout(max(1e-3, ends - time.monotonic()))
                    received = self._socket.recv(1 << 16)
                    has_answer = has_answer or bool(received)
                elif isinstance(step, bytes):
                    self._socket.sendall(step)
                else:
                    yield step[1]
                    ends = time.monotonic() + timeout
        except (OSError, h11.ProtocolError, Lost) as error:
            raise self.lost(error, has_answer) from error

    def close(self) -> None:
        self._socket.close()


class AsyncLink(Link):
    """A connection over an asyncio stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, address: Address, timeout: float) -> AsyncLink:
        try:
            async with asyncio.timeout(timeout):
                return cls(*await asyncio.open_connection(address.host, address.port, ssl=address.context))
        except OSError as error:  # a TimeoutError is one, too
            raise Lost(f"no connection to {address.host}:{address.port}: {error}") from error

    async def run(self, steps: Generator[Any, Any, Answer], timeout: float) -> AsyncIterator[bytes | Answer]:
        """Drive an exchange; yield the parts of a stream, and the answer last. `timeout` is as in `run`."""
        received: bytes | None = None
        has_answer = False
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout
        try:
            while True:
                try:
                    step = steps.send(received)
                except StopIteration as ended:
                    yield ended.value
                    return
                received = None
                if step is NEED:
                    async with asyncio.timeout_at(ends):
                        received = await self._reader.read(1 << 16)
                    has_answer = has_answer or bool(received)
                elif isinstance(step, bytes):
                    self._writer.write(step)
                    async with asyncio.timeout_at(ends):
                        await self._writer.drain()
                else:
                    yield step[1]
                    ends = loop.time() + timeout
        except (OSError, h11.ProtocolError, Lost) as error:
            raise self.lost(error, has_answer) from error

    def close(self) -> None:
        self._writer.close()
