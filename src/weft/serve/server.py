"""`weft serve`'s process: uvicorn with connections and signals of our own, a drain, and exit code 0."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from ..errors import InvalidArgumentError
from .application import App
from .connection import Protocol
from .framing import Backlog, Reader
from .quick import QuickCalls, is_known, respond
from .watchdog import Watchdog

log = logging.getLogger("weft.serve")

#: Bytes of a request that are read and dropped after its refusal: most clients read no answer before they have sent all.
DROPPED = 64 << 20
#: Bytes of requests that wait behind others, of all connections together: beyond it, the connection that brings more is refused.
WAITING = 16 << 20
#: Bytes of answers that clients have not taken, of all connections together: beyond it, those that take nothing are left.
UNSENT = 32 << 20


class Server(uvicorn.Server):
    """A server of an `App`. A first SIGTERM or SIGINT drains it, a second one ends it at once; SIGHUP loads models anew.

    After a SIGTERM calls are taken for `drain_delay` more: whoever sends them must first see that the server is not ready.
    """

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
        handlers = {signal.SIGTERM: self.end_later, signal.SIGINT: self.end, signal.SIGHUP: self._reload}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def end_later(self) -> None:
        """Take calls for `drain_delay`, then drain, then exit; the second time exit at once."""
        self.end(self.app.limits.drain_delay)

    def end(self, delay: float = 0.0) -> None:
        """Drain, then exit; the second time exit at once."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._drain(delay))
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self, delay: float) -> None:
        if delay:
            self.app.is_leaving = True
            log.info("shutting down: calls are taken for %g s more", delay)
            await asyncio.sleep(delay)
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
        connection = self.config.http_protocol_class
        self.config.http_protocol_class = lambda **options: Reader(connection(**options))
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
            connections = list(self.server_state.connections)
            stuck = [(connection, connection.look(now, self.app.limits)) for connection in connections]
            if sum(unsent for _, unsent in stuck) > UNSENT:
                for connection, unsent in stuck:
                    if unsent:
                        connection.transport.abort()
            self.app.access.flush()
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
        dropped = DROPPED
        calls = QuickCalls(app) if is_known() else None
        backlog = Backlog(WAITING)
        told = app.refused

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
    app.guard.bind(host)
    if is_known():
        app.respond = respond
    return Server(config, app, told)


def run(server: Server) -> int:
    """Serve until a signal ends it; return the exit code."""
    with Watchdog(server.app):
        try:
            server.run()
        except SystemExit as ended:  # uvicorn's way to say that it could not listen
            log.error("the server cannot listen on %s, port %d: choose another", server.config.host, server.config.port)
            return int(ended.code or 0) or 1
    return server.exit_code
