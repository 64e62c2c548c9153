"""Clients that send and never read: `python tools/attack_serve.py [--bare]` says what memory and time they take of a server.

Each attack meets a server of its own: `weft serve` with a model that multiplies, or with `--bare` a callable that reads the body
and answers "{}" on bare uvicorn. Printed are the peak of the server's resident memory, and the slowest answer of `/healthz`
meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BARE = """
import uvicorn
async def app(scope, receive, send):
    more = scope["type"] == "http"
    body = b""
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})
class Told(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print("look at http://127.0.0.1:%d/" % self.servers[0].sockets[0].getsockname()[1], flush=True)
Told(uvicorn.Config(app, port=0, lifespan="off", access_log=False, log_level="critical")).run()
"""
MODEL = """
import numpy as np
import weft.serve
weights = np.ones((64, 10), np.float32)
def digits(pixels):
    return pixels @ weights
model = weft.serve.model(digits, example={"pixels": np.zeros((1, 64), np.float32)})
"""
HOST = b"Host: localhost\r\n"
DIGITS = b'{"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [%b]}]}' % b", ".join(
    [b"0.5"] * 64
)


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), HOST)


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (path.encode(), HOST, size, body)


INFER = "/v2/models/digits/infer"
#: What is sent, how many connections are open at once, and how many come one after another, each with 256 KiB at most.
ATTACKS: dict[str, tuple[bytes, int, int]] = {
    "GET /v2, one connection": (get("/v2"), 1, 0),
    "GET /v2, 200 connections": (get("/v2"), 200, 0),
    "GET /v2, 2000 short ones": (get("/v2"), 0, 2000),
    "GET /nothing, one connection": (get("/nothing"), 1, 0),
    "calls, one connection": (post(INFER, DIGITS), 1, 0),
    "calls, 200 connections": (post(INFER, DIGITS), 200, 0),
    "calls, 2000 short ones": (post(INFER, DIGITS), 0, 2000),
    "bodies of 1 MiB, 200 connections": (post(INFER, bytes(1 << 20)), 200, 0),
    "bodies of 1 MiB, 2000 short ones": (post(INFER, bytes(1 << 20)), 0, 2000),
    "half a body of 32 MiB, 50 connections": (post(INFER, bytes(16 << 20), 32 << 20), 50, 0),
}


def memory(pid: int) -> tuple[float, float]:
    """The resident memory of a process in MiB, now and at most."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    now, most = (int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) for name in ("VmRSS", "VmHWM"))  # type: ignore[index]
    return now / 1024, most / 1024


def pour(
    port: int, request: bytes, connections: int, most: int = 64 << 20, patience: float = 1.0
) -> list[socket.socket]:
    """Send requests on so many connections, and read nothing, until the server takes no more for `patience` seconds."""
    block = request * max(1, (1 << 18) // len(request))
    opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    left = dict.fromkeys(opened, most)
    at = dict.fromkeys(opened, 0)
    for connection in opened:
        connection.setblocking(False)
    while left:
        _, ready, _ = select.select([], list(left), [], patience)
        if not ready:
            break
        for connection in ready:
            try:
                sent = connection.send(block[at[connection] : at[connection] + (1 << 18)])
            except BlockingIOError:
                continue
            except OSError:  # the server has closed it
                del left[connection]
                continue
            at[connection] = (at[connection] + sent) % len(block)
            left[connection] -= sent
            if left[connection] <= 0:
                del left[connection]
    return opened


def pour_short(port: int, request: bytes, connections: int) -> None:
    """Open connections one after another; send what goes at once, and leave."""
    block = (request * max(1, (1 << 18) // len(request)))[: 1 << 18]
    for _ in range(connections):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.send(block)


class Probe(threading.Thread):
    """Asks for `/healthz` again and again, on connections of its own; `slowest` is the longest time an answer took."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.slowest, self.is_over = port, 0.0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.02):
            self.ask()

    def ask(self) -> None:
        """Ask once."""
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.settimeout(60)
            connection.sendall(get("/healthz"))
            if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
                self.slowest = float("inf")
        self.slowest = max(self.slowest, time.monotonic() - began)


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[tuple[int, int]]:
    """A server; yields its process and its port."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        found = None
        for line in process.stdout:
            found = re.search(r"look at http://127\.0\.0\.1:(\d+)", line)
            if found:
                break
        assert found, "the server did not start"
        yield process.pid, int(found[1])
    finally:
        process.kill()
        process.communicate()


def command(folder: Path, is_bare: bool = False) -> list[str]:
    """The command that starts a server."""
    file = folder / "model.py"
    file.write_text(MODEL, encoding="utf-8")
    return [sys.executable, *(["-c", BARE] if is_bare else ["-m", "weft", "serve", str(file), "--port", "0"])]


def attack(pid: int, port: int, request: bytes, connections: int, short: int) -> tuple[float, float]:
    """The peak of the server's memory in MiB, and the slowest answer of its probe in seconds."""
    probe = Probe(port)
    probe.start()
    opened = pour(port, request, connections) if connections else []
    pour_short(port, request, short)
    for connection in opened:
        connection.close()
    probe.is_over.set()
    probe.join(60)
    return memory(pid)[1], probe.slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bare", action="store_true", help="attack a callable on bare uvicorn")
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, (request, connections, short) in ATTACKS.items():
            if given.only not in name:
                continue
            with running(command(Path(folder), given.bare)) as (pid, port):
                before = memory(pid)[0]
                peak, slowest = attack(pid, port, request, connections, short)
            print(
                f"{name:40} {before:6.0f} MiB before, {peak:6.0f} at most, /healthz {slowest * 1e3:7.0f} ms", flush=True
            )


if __name__ == "__main__":
    main()
