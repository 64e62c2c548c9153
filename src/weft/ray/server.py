"""A socket server on an event loop of its own thread: replicas and the keeper answer frames with it.

It listens on a Unix socket for processes of the same machine and on TCP for others. A connection is closed if its first frame
does not show the secret.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import secrets
import socket
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

from ..errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from . import frames, values
from .eager_task import EagerTask
from .frames import AskMessage, BadFrame, DoneMessage, Frame, FrameReader, HelloMessage, Kind, Load
from .values import decoder_of, encoder

log = logging.getLogger("weft.ray")

#: A connection that has not shown the secret after so many seconds is closed.
GREETING_SECONDS = 10.0
#: A connection whose client does not read its answers is not read from while more than so many bytes wait to be sent.
MOST_UNSENT = 1 << 24
#: So many connections may be without the secret at once: with more, the oldest of them is closed.
MOST_STRANGERS = 64
#: So many requests of one connection may be under way: more are refused.
MOST_REQUESTS = 1 << 16

_hello = decoder_of(HelloMessage)
_ask = decoder_of(AskMessage)


class Handler(Protocol):
    """What a server does with frames. All methods run in its event loop."""

    def load(self) -> Load:
        """Return the state of the queue, for answers."""

    def handle(self, connection: Connection, frame: Frame) -> None:
        """Take a CALL, BACKWARD or DROP."""

    async def ask(self, connection: Connection, method: str, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Answer an ASK with a value and arrays."""

    def closed(self, connection: Connection) -> None:
        """Forget what belongs to a connection."""


class Connection(asyncio.BufferedProtocol):
    """One client. Frames to it are collected and sent once per turn of the loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader = FrameReader()
        self._is_known = False
        self._out: list[Any] = []
        self._transport: Any = None
        self._timer: Any = None
        self.tasks: dict[int, EagerTask | asyncio.Task[Any]] = {}  # by the number of the request
        self.is_paused = False  # True while the client does not read
        self.kept: dict[int, Any] = {}  # results that gradients may come for, by invocation

    # --- the loop calls these ---

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the secret."""
        self._transport = transport
        transport.set_write_buffer_limits(MOST_UNSENT)
        no_delay(transport.get_extra_info("socket"))
        self._timer = self._server.loop.call_later(GREETING_SECONDS, self.close)
        self._server.connections.add(self)
        strangers = self._server.strangers
        strangers[self] = None
        if len(strangers) > MOST_STRANGERS:
            oldest = next(iter(strangers))
            del strangers[oldest]
            oldest.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.room()

    def buffer_updated(self, count: int) -> None:
        try:
            for frame in self._reader.advance(count):
                if self._is_known:
                    self._server.take(self, frame)
                elif not self._greet(frame):
                    return
        except Exception as error:  # of any class: what came is not what a client sends
            log.warning("a connection is closed: %s: %s", type(error).__name__, error)
            self.close()

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read."""
        self.is_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_paused = False
        self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the client's requests."""
        self._timer.cancel()
        self._out = []
        self._server.connections.discard(self)
        self._server.strangers.pop(self, None)
        for task in list(self.tasks.values()):
            task.cancel()
        if self._is_known:
            self._server.handler.closed(self)

    # --- frames ---

    def _greet(self, frame: Frame) -> bool:
        """Check the first frame; return False after closing the connection."""
        hello = _hello.decode(frame.message) if frame.kind == Kind.HELLO else None
        if hello is None:
            self.close()
            return False
        if hmac.compare_digest(hello.secret, self._server.secret):
            problem = version_problem(hello)
        else:
            problem = FailedPreconditionError("the handle's secret is not that of this deployment")
        if problem is not None:
            self.send_error(frame.number, problem)
            self.flush()
            self._transport.close()
            return False
        self._is_known = True
        self._timer.cancel()
        self._server.strangers.pop(self, None)
        self._reader.allow(frames.MOST_ARRAYS)
        self.send(Kind.HELLO, frame.number, encoder.encode(hello_message(b"")))
        return True

    def send(self, kind: int, number: int, message: bytes, buffers: list[memoryview] | tuple[()] = ()) -> None:
        """Send a frame at the end of this turn of the loop."""
        if not self._out:
            self._server.flush_soon(self)
        self._out += frames.pack(kind, number, message, buffers)

    def send_error(self, number: int, error: BaseException) -> None:
        self.send(Kind.ERROR, number, encoder.encode(values.pack_error(error)))

    def start(self, number: int, coroutine: Coroutine[Any, Any, None], mode: Any = None) -> None:
        """Run the work of a request; it is cancelled if the client leaves or drops the request."""
        task = self.tasks[number] = EagerTask(coroutine, lambda: self.tasks.pop(number, None))
        task.start(mode)

    def flush(self) -> None:
        out, self._out = self._out, []
        if self._transport.is_closing() or not out:
            return
        frames.write(self._transport, out)

    def close(self) -> None:
        """Close the connection at once."""
        self._transport.abort()


class Server:
    """Listens in a thread of its own until `stop`."""

    def __init__(self, handler: Handler, secret: bytes, host: str) -> None:
        self.handler, self.secret = handler, secret
        self.connections: set[Connection] = set()
        self.strangers: dict[Connection, None] = {}  # that have not shown the secret, oldest first
        self._unflushed: list[Connection] = []
        self._listening: list[asyncio.Server] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="weft ray server", daemon=True)
        self._thread.start()
        self.unix, self.tcp = self.call(self._listen(host)).result(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    async def _listen(self, host: str) -> tuple[str | None, tuple[str, int]]:
        unix = None
        if sys.platform == "linux":  # an abstract name needs no file
            unix = f"\0weft-{secrets.token_hex(16)}"
            self._listening.append(await self.loop.create_unix_server(lambda: Connection(self), unix, backlog=1024))
        server = await self.loop.create_server(lambda: Connection(self), host, 0, backlog=1024)
        self._listening.append(server)
        return unix, (host, server.sockets[0].getsockname()[1])

    def call(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def flush_soon(self, connection: Connection) -> None:
        """Flush a connection at the end of this turn of the loop."""
        if not self._unflushed:
            self.loop.call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        connections, self._unflushed = self._unflushed, []
        for connection in connections:
            connection.flush()

    def take(self, connection: Connection, frame: Frame) -> None:
        """Do what a frame asks for."""
        kind = frame.kind
        if kind == Kind.PING:
            connection.send(Kind.PONG, frame.number, b"")
        elif kind in (Kind.CALL, Kind.ASK) and len(connection.tasks) >= MOST_REQUESTS:
            problem = ResourceExhaustedError(f"{MOST_REQUESTS} requests of one connection are under way")
            connection.send_error(frame.number, problem)
        elif kind == Kind.ASK:
            task = connection.tasks[frame.number] = self.loop.create_task(self._answer(connection, frame))
            task.add_done_callback(lambda _: connection.tasks.pop(frame.number, None))
        elif kind in (Kind.CALL, Kind.BACKWARD, Kind.DROP):
            self.handler.handle(connection, frame)
        else:
            raise BadFrame(f"a client does not send frames of kind {kind}")

    async def _answer(self, connection: Connection, frame: Frame) -> None:
        try:
            message = _ask.decode(frame.message)
            given = values.unpack_arrays(message.arrays, frame.arrays)
            value, arrays = await self.handler.ask(connection, message.method, message.values, given)
            specs, buffers = values.pack_arrays(arrays)
            done = encoder.encode(DoneMessage(self.handler.load(), specs, value))
            connection.send(Kind.DONE, frame.number, done, buffers)
        except Exception as error:
            connection.send_error(frame.number, error)

    def notify(self, news: Any, connections: list[Connection] | None = None) -> None:
        """Send news that need no answer, to all clients or to these."""
        for connection in list(self.connections) if connections is None else connections:
            connection.send(Kind.NOTICE, 0, encoder.encode(news))

    def stop(self) -> None:
        """Close all connections and end the thread; called from another thread."""

        async def close() -> None:
            for server in self._listening:
                server.close()
            tasks = [each for connection in self.connections for each in connection.tasks.values()]
            for connection in list(self.connections):
                connection.flush()
                connection.close()
            await asyncio.sleep(0)  # the connections are lost now, and their tasks cancelled
            await asyncio.gather(*[task for task in tasks if isinstance(task, asyncio.Task)], return_exceptions=True)

        if self.loop.is_closed():
            return
        try:
            self.call(close()).result(5)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5)


def no_delay(sock: socket.socket) -> None:
    """Have small frames sent at once, and a machine that is gone noticed."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 10),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 30000),
        ):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def hello_message(secret: bytes) -> HelloMessage:
    """Return the first message of a side."""
    return HelloMessage(secret, frames.PROTOCOL, _version())


@functools.cache
def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("weft")
    except PackageNotFoundError:
        return ""


def version_problem(hello: HelloMessage) -> Exception | None:
    """Return an error if the other side has another protocol or another version of weft."""
    own = hello_message(b"")
    if (hello.protocol, hello.weft) == (own.protocol, own.weft):
        return None
    return FailedPreconditionError(
        f"a handle and its replicas must have the same version of weft: the handle's is {hello.weft} (protocol {hello.protocol}), "
        f"the replicas' is {own.weft} (protocol {own.protocol}); install the same version everywhere"
    )


def find_method(handler: Handler, method: str) -> Any:
    """Return the method of a handler that answers an ASK."""
    found = getattr(handler, f"ask_{method}", None)
    if found is None:
        raise InvalidArgumentError(f"there is no method {method!r}")
    return found
