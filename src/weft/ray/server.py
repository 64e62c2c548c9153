"""A socket server on an event loop of its own thread: replicas and the keeper answer frames with it.

It listens on a Unix socket for processes of the same machine and on TCP for others. A connection is closed if its first frames
are not those of the handshake (`handshake`), which proves that its client knows the secret.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

from ..errors import InvalidArgumentError, ResourceExhaustedError
from . import frames, local_sockets, values
from .connect import no_delay, own_text
from .eager_task import EagerTask
from .frames import AskMessage, BadFrame, DoneMessage, Frame, FrameReader, Kind, Load
from .handshake import Secret, ServerHandshake
from .values import decoder_of, encoder

log = logging.getLogger("weft.ray")

#: A connection whose client has not proved itself after so many seconds is closed.
GREETING_SECONDS = 10.0
#: A connection whose client does not read its answers is not read from while more than so many bytes wait to be sent.
MOST_UNSENT = 1 << 24
#: So many connections may be in the handshake at once, by TCP and by Unix socket each, so that strangers from elsewhere do not push
#: out processes of this user: with more, the oldest of them is closed.
MOST_STRANGERS = 64
#: So many requests of one connection may be under way: more are refused.
MOST_REQUESTS = 1 << 16

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
        # Until the client has proved itself: what it sends is read in small pieces, and belongs to the handshake.
        self._handshake: ServerHandshake | None = ServerHandshake(server.secret, server.id, own_text())
        self._is_challenged = False
        self._out: list[Any] = []
        self._transport: Any = None
        self._family = 0  # of addresses
        self._timer: Any = None
        self.tasks: dict[int, EagerTask | asyncio.Task[Any]] = {}  # by the number of the request
        self.is_paused = False  # True while the client does not read
        self.kept: dict[int, Any] = {}  # results that gradients may come for, by invocation

    # --- the loop calls these ---

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the handshake."""
        self._transport = transport
        sock = transport.get_extra_info("socket")
        self._timer = self._server.loop.call_later(GREETING_SECONDS, self.close)
        if sock.family == socket.AF_UNIX and not local_sockets.is_own(sock):
            self.close()
            return
        transport.set_write_buffer_limits(MOST_UNSENT)
        no_delay(sock)
        self._family = sock.family
        self._server.strangers[self] = None
        same = [each for each in self._server.strangers if each._family == self._family]
        if len(same) > MOST_STRANGERS:
            del self._server.strangers[same[0]]
            same[0].close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.room()

    def buffer_updated(self, count: int) -> None:
        try:
            for frame in self._reader.advance(count):
                if self._handshake is None:
                    self._server.take(self, frame)
                else:
                    self._greet(self._handshake, frame)
        except Exception as error:  # of any class: what came is not what a client sends
            # Strangers cannot fill the log.
            level = logging.WARNING if self._handshake is None else logging.INFO
            log.log(level, "a connection is closed: %s: %s", type(error).__name__, error)
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
        if self._handshake is None:
            self._server.handler.closed(self)

    # --- frames ---

    def _greet(self, handshake: ServerHandshake, frame: Frame) -> None:
        """Take a frame of the handshake: the hello, or the client's proof. The client compares the versions."""
        if frame.kind != Kind.HELLO or frame.arrays:
            raise BadFrame("what came is no message of the handshake")
        if not self._is_challenged:
            self._is_challenged = True
            self.send(Kind.HELLO, 0, handshake.challenge(frame.message))
            return
        handshake.check(frame.message)
        self._handshake = None
        self._timer.cancel()
        self._server.strangers.pop(self, None)
        self._server.connections.add(self)
        self._reader.allow(frames.MOST_ARRAYS)
        self.send(Kind.HELLO, 0, encoder.encode(self._server.handler.load()))

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

    def __init__(self, handler: Handler, secret: Secret, host: str) -> None:
        self.handler, self.secret = handler, secret
        self.id = secrets.token_hex(16)  # that clients expect it to prove
        self.connections: set[Connection] = set()  # whose clients have proved themselves
        self.strangers: dict[Connection, None] = {}  # in the handshake, oldest first
        self._unflushed: list[Connection] = []
        self._listening: list[asyncio.Server] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="weft ray server", daemon=True)
        self._thread.start()
        self.unix, self.tcp = self.call(self._listen(host)).result(30)

    @property
    def addresses(self) -> list[Any]:
        """Where clients find this server: on the same machine, and elsewhere if its host is no loopback address."""
        return [each for each in (self.unix, self.tcp) if each is not None]

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    async def _listen(self, host: str) -> tuple[str | None, tuple[str, int]]:
        unix = local_sockets.new_path()
        if unix is not None:
            try:
                listening = await self.loop.create_unix_server(lambda: Connection(self), unix, backlog=1024)
            except OSError as error:  # such as a file system without sockets
                log.warning("no Unix socket can be made at %s: %s: %s", unix, type(error).__name__, error)
                local_sockets.remove(unix)
                unix = None
            else:
                self._listening.append(listening)
        server = await self.loop.create_server(lambda: Connection(self), host, 0, backlog=1024)
        self._listening.append(server)
        return unix, (host, server.sockets[0].getsockname()[1])

    def hide(self) -> None:
        """Remove the Unix socket's file: those that are connected stay, others find this server by TCP until it ends."""
        if self.unix is not None:
            local_sockets.remove(self.unix)

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
            for connection in [*self.connections, *self.strangers]:
                connection.flush()
                connection.close()
            await asyncio.sleep(0)  # the connections are lost now, and their tasks cancelled
            await asyncio.gather(*[task for task in tasks if isinstance(task, asyncio.Task)], return_exceptions=True)

        self.hide()
        if self.loop.is_closed():
            return
        try:
            self.call(close()).result(5)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5)


def find_method(handler: Handler, method: str) -> Any:
    """Return the method of a handler that answers an ASK."""
    found = getattr(handler, f"ask_{method}", None)
    if found is None:
        raise InvalidArgumentError(f"there is no method {method!r}")
    return found
