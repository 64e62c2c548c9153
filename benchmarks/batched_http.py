"""How many requests does a service answer whose handlers share the batches of a model, and how fast?

    python -m benchmarks.batched_http [--rounds N] [--only TEXT] [--save]

Clients on keep-alive connections send JSON with one row in base64, and each sends its next request when it has its answer. The time
begins when each has an answer to a first request: uvicorn accepts one connection in each turn of its loop. `weft`,
`batched`, `async-batcher` and the hand-written queue stand behind the same ASGI application under uvicorn (uvloop, httptools);
LitServe and mosec have servers of their own. Every server is a process that is stopped (SIGSTOP) while another has its turn.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.batched_peers import TASKS, Ask, Model
from benchmarks.runner import Case, Load, Report, main

#: The width and the hidden width of each model, and how long every server waits for a full batch: with a model that takes 0.1 s,
#: half of the clients would otherwise always wait for the batch of the other half.
MODELS = {"small": (64, 512, 0.0), "large": (1024, 4096, 0.3)}
SIZE = 64  # the most rows of a batch
WAIT = 0.001  # seconds that peers wait where weft does not wait, and they must


def model_of(name: str) -> Model:
    """The model called `name`."""
    import torch

    from benchmarks.batched import mlp

    torch.manual_seed(0)
    width, hidden, wait = MODELS[name]
    net = mlp(width, hidden).eval()

    def f(x: Any) -> Any:
        with torch.inference_mode():
            return net(x)

    return Model(f, width, SIZE, wait, is_torch=True)


def wait_of(name: str) -> float:
    """How long a server that must wait for more waits."""
    return MODELS[name][2] or WAIT


def decode(text: str) -> Any:
    """The row of a request."""
    import torch

    return torch.from_numpy(np.frombuffer(bytearray(base64.b64decode(text)), np.float32)[None])


def encode(y: Any) -> str:
    """The answer to a request."""
    return base64.b64encode(y.numpy()).decode()


# --- the servers ---


def asgi(ask: Ask) -> Callable[..., Any]:
    """An ASGI application that answers with what `ask` gives."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for part in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{part}.complete"})
            return
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        answer = json.dumps({"y": encode(await ask(decode(json.loads(body)["x"])))}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


def serve_asgi(name: str, model: str, port: int) -> None:
    import uvicorn

    with ExitStack() as stack:
        ask = stack.enter_context(TASKS[name](model_of(model)))
        uvicorn.run(asgi(ask), port=port, log_level="error", loop="uvloop", http="httptools")


#: The package of each server, and the path of its requests.
SERVERS = {
    "weft": ("weft", "/"),
    "hand-written queue": ("weft", "/"),
    "batched": ("batched", "/"),
    "async-batcher": ("async_batcher", "/"),
    "litserve": ("litserve", "/predict"),
    "mosec": ("mosec", "/inference"),
}


class Server:
    """A server in a process group of its own, which runs only during its turns."""

    def __init__(self, name: str, model: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.path, self.width = SERVERS[name][1], MODELS[model][0]
        own = ["benchmarks.batched_http", "--serve", name] if name in TASKS else [f"benchmarks.http_{name}"]
        command = [sys.executable, "-m", *own, model, str(self.port)]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, start_new_session=True, stdout=quiet, stderr=quiet)
        atexit.register(self.close)
        self._wait()
        self.stop()

    def _wait(self) -> None:
        for _ in range(600):
            with contextlib.suppress(OSError, AssertionError):
                asyncio.run(load(self, 1, 1))
                return
            assert self.process.poll() is None, "the server has ended"
            time.sleep(0.1)
        raise TimeoutError("the server does not answer")

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


server_of = cache(Server)


# --- the clients ---


class Client(asyncio.Protocol):
    """A connection that sends a request, and after `go` another `calls` requests, each when it has the answer to the one before."""

    def __init__(self, request: bytes, calls: int, latencies: list[float]) -> None:
        self._request, self._left, self._latencies = request, calls, latencies
        self.done = asyncio.get_running_loop().create_future()  # renewed by `go`
        self._is_accepted = False
        self._buffer = b""
        self._started = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.send()

    def go(self) -> None:
        """Send the requests whose time counts."""
        self.done = asyncio.get_running_loop().create_future()
        self.send()

    def send(self) -> None:
        self._started = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lower = head.lower()
        length = int(lower.partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        if b" 200 " not in head[:16]:
            self._end(AssertionError(head))
            return
        self._buffer = b""
        if not self._is_accepted:
            self._is_accepted = True
            self.done.set_result(None)
            return
        self._latencies.append(time.perf_counter() - self._started)
        self._left -= 1
        if self._left:
            self.send()
        else:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionError("the connection was closed"))

    def _end(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)
        self._transport.close()


async def load(server: Server, clients: int, calls: int) -> Load:
    """`clients` clients that make `calls` requests each."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    made = []
    for i in range(clients):
        row = np.full(server.width, i / 64, np.float32)
        body = json.dumps({"x": base64.b64encode(row).decode()}).encode()
        head = f"POST {server.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        client = Client(request, calls, latencies)
        made.append(client)
        await loop.create_connection(lambda c=client: c, "127.0.0.1", server.port)
    await asyncio.wait_for(asyncio.gather(*[client.done for client in made]), 120)
    started = time.perf_counter()
    for client in made:
        client.go()
    await asyncio.wait_for(asyncio.gather(*[client.done for client in made]), 120)
    return Load(time.perf_counter() - started, latencies)


def case(model: str, clients: int, calls: int) -> Case:
    """All servers that are installed with one model."""

    def contestant(name: str) -> Callable[[], Load]:
        def turn() -> Load:
            import uvloop

            server = server_of(name, model)
            server.go_on()
            try:
                return uvloop.run(load(server, clients, calls))
            finally:
                server.stop()

        return turn

    names = [name for name, (package, _) in SERVERS.items() if find_spec(package) is not None]
    targets = {name: 0.95 for name in names if name != "weft"}
    return Case(
        f"{model} model, {clients} clients",
        {n: contestant(n) for n in names},
        clients * calls,
        "requests",
        targets=targets,
    )


def questions() -> list[Case | Report]:
    """All of them."""
    return [case("small", 64, 80), case("small", 256, 24), case("large", 64, 32), case("large", 256, 10)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_asgi(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end, too
        main("batched_http", "weft.batched behind HTTP", questions)
