"""Random requests to a server, valid and broken: `python tools/fuzz_serve.py [cases] [--seed N] [--threads N]`.

Clients send them over real sockets: in pieces, pipelined, chunked, compressed, cut off, with headers and bodies that are changed at
random. Each answer must be well-formed, its status the one that the request deserves, its rows those of the request, and the
connection must stay in step. A failure prints the seed and the bytes that were sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
import socket
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from draw_serve import LIMITS, MODELS, Request, draw_request

import weft.serve
from weft.serve import oip
from weft.serve.server import make


@contextmanager
def serving() -> Any:
    """A server of all models; yields its port and its app."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each request that is no HTTP
    app = weft.serve.App(
        [weft.serve.model(m.f, name=m.name, example=m.example, **m.options) for m in MODELS.values()], limits=LIMITS,
        access_log="none",
    )  # fmt: skip
    ready = threading.Event()
    server = make(app, port=0, told=lambda _: ready.set())
    loops: list[asyncio.AbstractEventLoop] = []
    unexpected: list[Any] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        loops[0].set_exception_handler(lambda _, context: unexpected.append(context))
        await server._serve()

    def run() -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop's, if it is installed
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], server, unexpected
    finally:
        loops[0].call_soon_threadsafe(server.end)
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"


class Wrong(AssertionError):
    """An answer that is not right."""


class Half(Wrong):
    """A body that ends early."""


class Client:
    """A connection that reads answers strictly."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=40)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""
        self.is_over = False  # the server has closed

    def send(self, r: random.Random, data: bytes) -> None:
        """Send in one or more pieces. A server that has closed is noticed when reading."""
        cuts = sorted(r.randrange(len(data) + 1) for _ in range(r.choice([0, 0, 0, 1, 2, 5])))
        try:
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                self.socket.sendall(data[start:end])
                if r.random() < 0.5 and cuts:
                    time.sleep(0.001)
        except OSError:
            pass

    def more(self) -> bool:
        try:
            part = self.socket.recv(1 << 16)
        except ConnectionError:
            part = b""
        except TimeoutError:
            raise Wrong(f"no answer; so far {self.buffer[:300]!r}") from None
        self.buffer += part
        self.is_over = not part
        return bool(part)

    def answer(self, method: str) -> tuple[int, dict[bytes, bytes], bytes] | None:
        """The next answer; None if the server has closed the connection before one."""
        while True:
            while b"\r\n\r\n" not in self.buffer:
                if not self.more():
                    if self.buffer:
                        raise Wrong(f"half an answer: {self.buffer[:300]!r}")
                    return None
            head, _, rest = self.buffer.partition(b"\r\n\r\n")
            line, *lines = head.split(b"\r\n")
            found = re.fullmatch(rb"HTTP/1\.1 (\d\d\d) [\w '-]*", line)
            if not found:
                raise Wrong(f"no status line: {line!r}")
            self.buffer = rest
            status = int(found[1])
            if status != 100:
                break
        headers: dict[bytes, bytes] = {}
        for line in lines:
            name, colon, value = line.partition(b": ")
            if not colon or not re.fullmatch(rb"[a-z0-9-]+", name) or name in headers:
                raise Wrong(f"a wrong header: {line!r}")
            headers[name] = value
        size = int(headers[b"content-length"])
        while len(self.buffer) < (0 if method == "HEAD" else size):
            if not self.more():
                raise Half(f"half a body of {size}: {self.buffer[:300]!r}")
        size = 0 if method == "HEAD" else size
        body, self.buffer = self.buffer[:size], self.buffer[size:]
        return status, headers, body

    def close(self, r: random.Random) -> None:
        if r.random() < 0.2:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.socket.close()


def check(request: Request, answer: tuple[int, dict[bytes, bytes], bytes]) -> None:
    status, headers, body = answer
    if status not in request.statuses:
        raise Wrong(f"status {status}, not {sorted(request.statuses)[:6]}: {body[:300]!r}")
    if status >= 400:
        if request.method != "HEAD" and not isinstance(json.loads(body).get("error"), str):
            raise Wrong(f"an error without a sentence: {body[:300]!r}")
        return
    if request.values is None or not request.values:
        return
    if headers[b"content-type"] == b"application/json" and b'"outputs":[{' not in body[:200]:
        same_tfs(request.values, json.loads(body))
        return
    outputs, _ = oip.decode_answer(body, headers.get(b"inference-header-content-length"))
    if outputs.keys() != request.values.keys():
        raise Wrong(f"outputs {outputs.keys()}")
    for name, x in request.values.items():
        same(name, outputs[name], x)


def same(name: str, got: Any, wanted: Any) -> None:
    if isinstance(wanted, list):
        if got != wanted:
            raise Wrong(f"{name}: {got!r:.200}, not {wanted!r:.200}")
        return
    got = np.asarray(got)
    if got.size == wanted.size == 0 and len(got) == len(wanted):
        return
    if got.shape != wanted.shape or not np.array_equal(
        got.astype(wanted.dtype), wanted, equal_nan=wanted.dtype.kind == "f"
    ):
        raise Wrong(f"{name}: {got!r:.300}, not {wanted!r:.300}")


def same_tfs(values: dict[str, Any], answer: dict[str, Any]) -> None:
    found = answer.get("outputs", answer.get("predictions"))
    if "predictions" in answer and len(values) > 1:
        found = {name: [row[name] for row in found] for name in values}
    if len(values) == 1:
        found = {next(iter(values)): found}
    for name, x in values.items():
        same(name, found[name], x)


def talk(r: random.Random, port: int) -> list[bytes]:
    """One connection: requests, pipelined or not, their answers, and an end. Returns what was sent, for a report."""
    client, sent = Client(port), []
    try:
        requests: list[Request] = []
        for _ in range(r.choice([1, 1, 2, 5, 8])):
            if not requests or r.random() < 0.5:  # else the same again: the server knows their headers then
                requests = [draw_request(r) for _ in range(r.choice([1, 1, 1, 2, 4]))]
            last = [i for i, x in enumerate(requests) if b"Connection: close" in x.data or b" HTTP/1.0\r\n" in x.data]
            del requests[last[0] + 1 if last else len(requests) :]  # what follows may reset the connection
            data = b"".join(request.data for request in requests)
            is_framed = all(request.is_framed for request in requests) and data.count(b"Upgrade: ") < 2
            if not is_framed and any(request.method == "HEAD" for request in requests):
                continue  # it is not known which answers have no body
            if r.random() < 0.1:  # the client leaves in the middle
                client.send(r, data[: r.choice([len(data), r.randrange(len(data) + 1)])])
                return sent
            sent.append(data)
            client.send(r, data)
            if not is_framed:
                with suppress(OSError):  # the server has closed already
                    client.socket.shutdown(socket.SHUT_WR)
                with suppress(Half):  # what the server has not read when it closes resets the connection
                    while (answer := client.answer("GET")) is not None:
                        if answer[0] >= 500 and answer[0] != 504:
                            raise Wrong(f"status {answer[0]}: {answer[2][:300]!r}")
                return sent
            closed = False
            for request in requests:
                answer = client.answer(request.method)
                if answer is None:
                    if not closed:
                        raise Wrong(f"closed without an answer to {request.data[:200]!r}")
                    return sent
                check(request, answer)
                if answer[1].get(b"connection") == b"close":
                    if not request.closes and answer[0] not in (408, 413):
                        raise Wrong(f"closed after {answer!r:.300}")
                    closed = True
            if closed:
                if client.more():
                    raise Wrong(f"bytes after the end: {client.buffer[:300]!r}")
                return sent
        if client.buffer:
            raise Wrong(f"bytes after the last answer: {client.buffer[:300]!r}")
        return sent
    except Wrong as error:
        raise Wrong(f"{error}\nsent: " + "\n".join(repr(data[:6000]) for data in sent)) from None
    finally:
        client.close(r)


def fuzz(cases: int, seed: int, threads: int = 4) -> list[str]:
    """Talk to a server `cases` times; return what was wrong."""
    problems: list[str] = []
    numbers = iter(range(seed, seed + cases))
    lock = threading.Lock()

    def run(port: int) -> None:
        while len(problems) < 5:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                talk(random.Random(number), port)
            except Wrong as error:
                problems.append(f"seed {number}: {error}")
            except Exception:
                problems.append(f"seed {number}: {traceback.format_exc()}")

    with serving() as (port, server, unexpected):
        clients = [threading.Thread(target=run, args=(port,)) for _ in range(threads)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        ends = time.monotonic() + 20
        while (server.app._open or server.server_state.connections) and time.monotonic() < ends:
            time.sleep(0.01)
        left = (
            len(server.app._open),
            len(server.server_state.connections),
            [m.calls for m in server.app.models.values()],
        )
        if left[0] or left[1] or any(left[2]):
            problems.append(f"left behind: requests, connections, calls {left}")
        problems += [f"in the event loop: {context!r:.2000}" for context in unexpected[:5]]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=4)
    given = parser.parse_args()
    began = time.monotonic()
    problems = fuzz(given.cases, given.seed, given.threads)
    print("\n\n".join(problems))
    print(
        f"{given.cases} connections from seed {given.seed}, {len(problems)} problems, {time.monotonic() - began:.0f} s"
    )
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
