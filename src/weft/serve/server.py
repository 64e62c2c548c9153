"""`weft serve`'s process: uvicorn with time-outs for headers, its own signals, a drain, and exit code 0."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import InvalidArgumentError
from .application import App
from .limits import Limits
from .quick import QuickCalls, is_known, renew, respond
from .watchdog import Watchdog

log = logging.getLogger("weft.serve")

#: Objects that are made before the garbage collector looks at them: more than the calls in flight have, which are no garbage.
YOUNG = 20_000
#: Bytes of a request that are read and dropped after its refusal: most clients read no answer before they have sent all.
DROPPED = 64 << 20
#: What a poll of a connection says when the other side has closed it; 0 where no poll says so.
_LEFT: int = getattr(select, "POLLRDHUP", 0)


class Protocol(HttpToolsProtocol):
    """A connection that notes since when it waits for the rest of its headers, and how large they are.

    A request begins when all is parsed that came with it: a call that came whole needs no task.
    """

    header_bytes = 64 << 10
    calls: QuickCalls | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.head_since: float | None = time.monotonic()  # None while no headers are expected
        # Of headers, or of trailers, without what came together with the end of a request or a body's part.
        self.head_size = 0
        self.idle_since: float | None = None  # since the last answer, until the next request begins
        self._unsent, self._unsent_since = 0, 0.0  # bytes of answers that the client has not taken, and since when
        self._has_moved = False  # True if a request ended, or a part of a body was, in what came last
        self._is_parsing = False
        self._again: tuple[bytes, int] | None = None  # headers to parse again, and where their body begins in the data
        self._held: Any = None  # the request that begins when all is parsed
        self._running: Any = None  # the request that is being answered, or was last
        self._call: Any = None  # its quick call, if it is one
        self._to_drop: int | None = None  # bytes that may still come after the last answer, None before it

    def data_received(self, data: bytes) -> None:
        if self._to_drop is not None:
            self._to_drop -= len(data)
            if self._to_drop < 0:
                self.transport.close()
            return
        is_between = self._is_between_requests()
        if is_between and self._repeats(data):
            return
        self._is_parsing, self._has_moved = True, False
        rest = data
        super().data_received(rest)
        while self._again is not None:
            (head, at), self._again = self._again, None
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            rest = head + rest[at:]
            super().data_received(rest)
        self._is_parsing = False
        if self._held is not None:
            held, self._held = self._held, None
            if not self.transport.is_closing():
                self._start_asgi_task(*held)
                if is_between and rest is data:
                    self._learn(data, held[0])
        if self._has_moved:
            self.head_size = 0
        else:
            self.head_size += len(data)
            if self.head_size > self.header_bytes and not self.transport.is_closing():
                self.refuse(431, "the headers are too large")

    def _is_between_requests(self) -> bool:
        """Return whether the last request has come whole and has its answer, and nothing of the next one has come."""
        return self.head_since is None and self.idle_since is not None and not self.cycle.more_body

    def _learn(self, data: bytes, cycle: Any) -> None:
        """Keep the head of a call that is all that came last."""
        is_all = self.cycle is cycle and self.head_since is None and not cycle.more_body
        if is_all and self.calls is not None and self._call is not None:
            self.calls.heads.learn(data, cycle)

    def _repeats(self, data: bytes) -> bool:
        """Begin the request in `data` without the parser if its head is known; return False if it is not.

        The request before it must have been a quick call, too: nobody uses its cycle any more.
        """
        if self.calls is None or self._call is None or self.transport.is_closing():
            return False
        found = self.calls.heads.find(data)
        if found is None:
            return False
        scope, body = found
        scope["server"], scope["client"], scope["state"] = self.server, self.client, self.app_state.copy()
        self.scope, self.idle_since = scope, None
        renew(self.cycle, scope, body)
        self._start_asgi_task(self.cycle, self.app)
        return True

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if self._is_parsing:
            self._held = cycle, app
            return
        self._running = cycle
        self._call = None if self.calls is None else self.calls.add(cycle)
        if self._call is None:
            super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for it without a timer: `look` is called twice a second."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if not self._running.keep_alive:
            self._end()
        elif self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self.idle_since = time.monotonic()

    def _end(self) -> None:
        """Close the connection after its last answer; if the client still sends a body, after that, or it would see a reset."""
        if self._running.more_body and self.transport.can_write_eof():
            self.transport.write_eof()
            self._to_drop, self.idle_since = DROPPED, time.monotonic()
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        return True  # so that `handle_websocket_upgrade` is called for every other protocol

    def handle_websocket_upgrade(self) -> None:
        """Go on in HTTP/1.1 with a request that asks for another protocol: Java's client asks for HTTP/2 so.

        The parser takes what follows the headers for the other protocol. It is parsed again without the header Upgrade.
        """
        error, scope = sys.exception(), self.scope
        if scope["method"] == "CONNECT" or error is None:
            self.send_400_response("")
            return
        lines = [f"{scope['method']} ".encode() + self.url + f" HTTP/{scope['http_version']}".encode()]
        lines += [b"%b: %b" % pair for pair in scope["headers"] if pair[0] != b"upgrade"]
        self._again = b"\r\n".join([*lines, b"", b""]), error.args[0]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:  # uvicorn tells the last request of a pipeline alone
            running.disconnected = True
            running.message_event.set()
        if self._call is not None:
            self._call.leave()
            self._call = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.head_since, self.idle_since = time.monotonic(), None

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._has_moved = True

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._has_moved = True

    def on_headers_complete(self) -> None:
        self.head_since, self.head_size, self.idle_since = None, 0, None
        before = self.cycle
        super().on_headers_complete()
        self.headers = list[Any]()  # for trailers, which nobody reads: they are no headers of the request
        if self.cycle is not before and not self.parser.should_keep_alive():
            self.cycle.keep_alive = False  # uvicorn before 0.53 leaves it to its own `send`

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "the request is not valid HTTP/1.1")

    def refuse(self, status: int, sentence: str) -> None:
        """Answer outside of any request, and close the connection; without a word where another answer is due first."""
        body = b'{"error":"%s"}' % sentence.encode()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        if not self._owes_answer():
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _owes_answer(self) -> bool:
        """Return whether a request that came whole has no answer yet, or a part of it."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return bool(self.pipeline) or cycle.response_started or not cycle.more_body

    def look(self, now: float, limits: Limits) -> None:
        """End the connection if its headers do not come, it is idle, or its client has left or takes no answers."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        if (unsent and now - self._unsent_since > limits.keep_alive) or (self.flow.read_paused and self._has_left()):
            self.transport.abort()
        elif self.head_since is not None and now - self.head_since > limits.header_time:
            if not self._owes_answer():
                self.refuse(408, "the headers did not come in time")
        elif self.idle_since is not None and now - self.idle_since > limits.keep_alive:
            self.transport.close()

    def _has_left(self) -> bool:
        """Return whether the client has closed the connection: while reading is paused, nobody else notices."""
        if not _LEFT:
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), _LEFT)
        return bool(poll.poll(0))


class Server(uvicorn.Server):
    """A server of an `App`. A first SIGTERM or SIGINT drains it, a second one ends it at once; SIGHUP loads models anew."""

    def __init__(self, config: uvicorn.Config, app: App, told: Any = print) -> None:
        super().__init__(config)
        self.app, self.exit_code, self._told = app, 0, told
        self._ending: asyncio.Task[None] | None = None
        self._work: set[asyncio.Future[Any]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals in the loop, and do not raise them again at the end."""
        if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
            with super().capture_signals():
                yield
            return
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self.end, signal.SIGINT: self.end, signal.SIGHUP: self._reload}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def end(self) -> None:
        """Drain, then exit; the second time exit at once."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        log.info("shutting down: calls in flight finish")
        if not await self.app.drain():
            log.error("some calls did not finish within %g s", self.app.limits.drain_time)
        self.should_exit = True

    def _reload(self) -> None:
        self._keep(asyncio.ensure_future(self.app.reload()))

    def _keep(self, work: asyncio.Future[Any]) -> None:
        self._work.add(work)
        work.add_done_callback(self._work.discard)

    async def startup(self, sockets: Any = None) -> None:
        """Listen first: probes are answered while models load."""
        await super().startup(sockets)
        if not self.should_exit:
            self._keep(asyncio.ensure_future(self._start_models()))

    async def _start_models(self) -> None:
        try:
            await self.app.start()
        except Exception as error:
            log.error("%s", error)
            self.exit_code, self.should_exit = 1, True
            return
        gc.collect()
        gc.freeze()  # what models and libraries made is not scanned again
        self._told(self)

    async def on_tick(self, counter: int) -> bool:
        """Look at all connections; uvicorn calls this ten times a second."""
        if counter % 5 == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                connection.look(now, self.app.limits)
        return await super().on_tick(counter)

    def address(self) -> str:
        """Return the address to look at."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self.config.ssl else 'http'}://{shown}:{port}/"


def make(
    app: App,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    certificate: str | None = None,
    key: str | None = None,
    told: Any = print,
) -> Server:
    """Return a server; `told` is called with it when all models are ready."""
    if key is not None and certificate is None:
        raise InvalidArgumentError(f"the key {key} needs a certificate")

    class Limited(Protocol):
        header_bytes = app.limits.header_bytes
        calls = QuickCalls(app) if is_known() else None

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Limited,
        loop="auto",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    try:
        config.load()
    except OSError as error:
        files = f"certificate {certificate}" + (f" and the key {key}" if key else "")
        raise InvalidArgumentError(f"the {files} cannot be used: {error}") from None
    if is_known():
        app.respond = respond
    return Server(config, app, told)


def run(server: Server) -> int:
    """Serve until a signal ends it; return the exit code."""
    gc.set_threshold(YOUNG, 20, 20)
    with Watchdog(server.app):
        try:
            server.run()
        except SystemExit as ended:  # uvicorn's way to say that it could not listen
            log.error("the server cannot listen on %s, port %d: choose another", server.config.host, server.config.port)
            return int(ended.code or 0) or 1
    return server.exit_code
