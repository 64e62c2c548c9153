"""A real server in a thread, on a free port, and HTTP in and out of it."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import socket
import threading
from contextlib import contextmanager
from typing import Any

import numpy as np

from support.callers import PATIENCE
from support.libraries import need

PACKAGES = ("uvicorn", "httptools", "msgspec", "h11")


def need_server() -> None:
    """Skip the module's tests if a package of the server is not installed."""
    for package in PACKAGES:
        need(package)


class Served:
    """A running server: its app, its port, and requests to it."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self.server, self.thread, self.app = server, thread, server.app
        self.port: int = server.servers[0].sockets[0].getsockname()[1]
        self.sockets: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """The status, the JSON (or text) and the headers of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, headers or {})
            answer = connection.getresponse()
            text = answer.read()
            kind = answer.headers.get_content_type()
            return answer.status, json.loads(text) if text and kind == "application/json" else text, answer.headers
        finally:
            connection.close()

    def infer(self, model: str, **inputs: Any) -> Any:
        """The status and the JSON of a call of the Open Inference Protocol."""
        return self.ask("POST", f"/v2/models/{model}/infer", oip(**inputs))[:2]

    def connect(self) -> socket.socket:
        """A bare connection."""
        found = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        found.settimeout(30)
        self.sockets.append(found)
        return found

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.server.loop).result(30)


def oip(**inputs: Any) -> dict[str, Any]:
    """A request of the Open Inference Protocol, in JSON."""
    from weft.serve.dtypes import datatype_of

    entries = []
    for name, x in inputs.items():
        is_text = isinstance(x, list)
        entries.append(
            {
                "name": name,
                "shape": [len(x)] if is_text else list(x.shape),
                "datatype": datatype_of(x),
                "data": x if is_text else np.ravel(x).tolist(),
            }
        )
    return {"inputs": entries}


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    parts = []
    while True:
        try:
            part = connection.recv(1 << 16)
        except ConnectionResetError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


#: The event loops that a server may run on.
LOOPS = ["asyncio", "uvloop"]


@contextmanager
def serving(*models: Any, limits: dict[str, Any] | None = None, loop: str = "asyncio", **options: Any) -> Any:
    """A server of these models, ready."""
    need(loop)
    from weft.serve import App, Limits
    from weft.serve.server import make
    from weft.serve.watchdog import Watchdog

    app = App(models, limits=Limits(**(limits or {})), **options)
    ready = threading.Event()
    server = make(app, port=0, told=lambda _: ready.set())

    async def serve() -> None:
        server.loop = asyncio.get_running_loop()
        await server._serve()

    def run() -> None:
        with asyncio.Runner(loop_factory=importlib.import_module(loop).new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    with Watchdog(app):
        thread.start()
        assert ready.wait(PATIENCE)
        served = Served(server, thread)
        try:
            yield served
        finally:
            for connection in served.sockets:
                connection.close()
            if thread.is_alive():
                server.loop.call_soon_threadsafe(server.end)
            thread.join(30)
            assert not thread.is_alive()
