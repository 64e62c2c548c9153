"""Requests with a known head: the same answers as by the parser, whatever comes and however it is cut into pieces."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.callers import PATIENCE, until
from support.serving import need_server, oip, read_all, serving

import weft

need_server()

GOOD = json.dumps(oip(x=np.ones((1, 2)))).encode()
OTHER = json.dumps(oip(x=np.zeros((1, 2)))).encode()


def post(body=GOOD, *headers, path=b"/v2/models/f/infer", length=None):
    """A request, as most clients send it."""
    lines = [b"POST %b HTTP/1.1" % path, b"Host: localhost", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % (len(body) if length is None else length), b"", body])


REQUESTS = {
    "good": post(),
    "other": post(OTHER),
    "by TensorFlow Serving's API": post(b'{"inputs": {"x": [[1, 2]]}}', path=b"/v1/models/f:predict"),
    "not JSON": post(b"{" * len(GOOD)),
    "too short by one": post(GOOD[:-1], length=len(GOOD)),
    "a trace": post(GOOD, b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    "expects": post(GOOD, b"Expect: 100-continue"),
    "close": post(GOOD, b"Connection: close"),
    "upgrade": post(GOOD, b"Connection: Upgrade", b"Upgrade: h2c"),
    "chunks": b"POST /v2/models/f/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (len(GOOD), GOOD),
    "no body": b"POST /v2/models/f/infer HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "old": b"POST /v2/models/f/infer HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD,
    "get": b"GET /v2/models/f HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no model": post(path=b"/v2/models/g/infer"),
    "line ends": b"\r\n\r\n",
    "bare line feeds": post().replace(b"\r\n", b"\n", 2),
    "no HTTP": b"\x00\x01\x02\r\n\r\n",
    "large": post(GOOD + b" " * 70_000),
}


class Transport:
    """Keeps what is written."""

    def __init__(self):
        self.written, self.closed = b"", False

    def get_extra_info(self, name, default=None):
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = write_eof = close

    def can_write_eof(self):
        return True

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        pass

    resume_reading = pause_reading


class Connections:
    """A server's connections without sockets."""

    def __init__(self):
        from uvicorn.server import ServerState

        from weft.serve.server import make

        self.app = weft.serve.app(weft.serve.model(lambda x: x, name="f", on_loop=True), access_log="none")
        self._config = make(self.app, port=0, told=print).config
        self._state = ServerState()

    def connect(self):
        """A connection and its transport."""
        loop = asyncio.get_running_loop()
        protocol = self._config.http_protocol_class(self._config, self._state, {}, _loop=loop)
        transport = Transport()
        protocol.connection_made(transport)
        return protocol, transport

    @property
    def heads(self):
        return self._config.http_protocol_class.calls.heads

    async def answers(self, pieces, knows_heads):
        """What a client receives that sends these pieces, each when the server rests."""
        protocol, transport = self.connect()
        if not knows_heads:
            self.heads.find = lambda _: None
        for piece in pieces:
            if not transport.closed:
                protocol.data_received(piece)
            before = None
            while before != (before := (len(transport.written), len(self.app._open), self._state.total_requests)):
                for _ in range(10):
                    await asyncio.sleep(0)
        self.heads.__dict__.pop("find", None)
        protocol.connection_lost(None)
        return re.sub(rb"date: [^\r]*\r\n", b"", transport.written), transport.closed


def cut(text, places):
    """`text` in pieces."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(ends)]


async def compare(*sequences):
    """Send each sequence of pieces to a server that knows heads, and to one that does not."""
    connections = Connections()
    await connections.app.start()
    try:
        for pieces in sequences:
            expected = await connections.answers(pieces, knows_heads=False)
            for _ in range(2):  # heads are learned the first time
                assert await connections.answers(pieces, knows_heads=True) == expected
    finally:
        await connections.app.stop()


@given(st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=6), st.lists(st.integers(0, 5000), max_size=5))
def test_the_same_answers_as_by_the_parser(names, places):
    whole = [REQUESTS[name] for name in ["good", "good", *names, "good", "good"]]
    asyncio.run(asyncio.wait_for(compare(whole, cut(b"".join(whole), places)), PATIENCE))


def head(path, length, *headers):
    """The head of a request without its body."""
    return post(b"", *headers, path=path, length=length)


NEXT = post()  # what looks like another request is a body, or a part of one
PIECES = {
    "the body of a refused call": [head(b"/v2/models/g/infer", len(NEXT)), NEXT],
    "the body of a call that is late": [head(b"/v2/models/f/infer", len(NEXT)), NEXT],
    "the second part of a body": [head(b"/v2/models/f/infer", 2 * len(NEXT)) + NEXT, NEXT],
    "the body of a large call": [head(b"/v2/models/f/infer", 1 << 40), NEXT, NEXT],
    "after a letter": [NEXT + b"P", NEXT],
    "after a part of a head": [NEXT + NEXT[:30], NEXT[30:], NEXT],
    "after a part of a body": [NEXT + NEXT[:-9], NEXT[-9:], NEXT],
    "two at once": [NEXT + NEXT, NEXT, NEXT + NEXT + NEXT, NEXT],
    "after line ends": [b"\r\n", NEXT, b"\r\n" + NEXT, NEXT],
    "a chunk": [REQUESTS["chunks"][:90], b"%x\r\n" % len(NEXT), NEXT, b"\r\n0\r\n\r\n", NEXT],
    "after the last": [post(GOOD, b"Connection: close"), NEXT],
    "after no HTTP": [REQUESTS["no HTTP"], NEXT],
    "trailers": [REQUESTS["chunks"][:-2], NEXT, b"\r\n", NEXT],
}


@pytest.mark.parametrize("name", PIECES)
def test_what_looks_like_a_request_with_a_known_head(name):
    asyncio.run(asyncio.wait_for(compare([NEXT, NEXT, *PIECES[name]]), PATIENCE))


def test_a_repeated_head_is_found_and_others_are_not():
    async def main():
        connections = Connections()
        await connections.app.start()
        for name in ("good", "good", "good"):  # the first of a connection is not learned
            await connections.answers([REQUESTS[name]] * 2, knows_heads=True)
        found = [connections.heads.find(data) for data in (post(), post(OTHER), post()[:-1], post() + b"P")]
        scope, body = found[0]
        assert (scope["path"], body) == ("/v2/models/f/infer", GOOD)
        assert "client" not in scope
        assert found[1][1] == OTHER
        assert found[2:] == [None, None]
        for name in ("chunks", "expects", "close", "old", "get", "large"):
            await connections.answers([REQUESTS["good"], REQUESTS[name]], knows_heads=True)
            assert connections.heads.find(REQUESTS[name]) is None, name
        await connections.app.stop()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_the_number_of_heads_is_limited():
    from weft.serve.heads import BYTES, KEPT

    async def main():
        connections = Connections()
        await connections.app.start()
        requests = [post(GOOD, b"X-Number: %d" % number) for number in range(KEPT + 9)]
        requests.append(post(GOOD, b"X-Long: %b" % (b"a" * BYTES)))
        await connections.answers(requests, knows_heads=True)
        assert 0 < len(connections.heads._heads) <= KEPT
        assert connections.heads.find(requests[-1]) is None
        await connections.app.stop()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("on_loop", [False, True])
def test_each_connection_has_its_own_token(on_loop):
    """The head of a call with the token is known; one with another token is refused all the same."""
    model = weft.serve.model(lambda x: x, name="f", on_loop=on_loop)
    with serving(model, token="secret") as served:
        first, second = served.connect(), served.connect()
        for token, connection, status in (
            (b"secret", first, b"200"),
            (b"public", second, b"401"),
            (b"secret", first, b"200"),
        ):
            for _ in range(3):
                connection.sendall(post(GOOD, b"Authorization: Bearer %b" % token))
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 %b" % status)
        first.sendall(post(GOOD, b"Authorization: Bearer secret", b"Connection: close"))
        assert read_all(first).startswith(b"HTTP/1.1 200")


def test_a_request_that_comes_before_the_last_one_is_answered_waits():
    began, go = threading.Event(), threading.Event()

    def held(x):
        if x[0, 0] == 0:
            began.set()
            assert go.wait(PATIENCE)
        return x

    slow, quick = (
        post(body, path=b"/v2/models/%b/infer" % name) for body, name in ((OTHER, b"slow"), (GOOD, b"quick"))
    )
    models = weft.serve.model(held, name="slow"), weft.serve.model(lambda x: x, name="quick", on_loop=True)
    with serving(*models) as served:
        connection = served.connect()
        for _ in range(3):  # the head is known then
            connection.sendall(quick)
            assert b'"quick"' in connection.recv(1 << 16)
        connection.sendall(slow)
        assert began.wait(PATIENCE)
        connection.sendall(quick)
        until(lambda: any(x.pipeline for x in served.server.server_state.connections))
        go.set()
        text = b""
        while text.count(b"HTTP/1.1 200") < 2 or not text.endswith(b"}"):
            text += connection.recv(1 << 16)
        assert 0 <= text.find(b'"slow"') < text.find(b'"quick"')
