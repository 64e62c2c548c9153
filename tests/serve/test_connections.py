"""What a connection takes: heads and Host headers however the bytes come, what follows a request, and clients that half-close."""

from __future__ import annotations

import gc
import gzip
import json
import re
import socket
import threading
import weakref

import numpy as np
import pytest
from support.callers import until
from support.serving import LOOPS, need_server, oip, read_all, serving

import weft

need_server()

X = np.ones((1, 2), np.float32)
BODY = json.dumps(oip(x=X)).encode()
HOST = b"Host: localhost\r\n"
CLOSE = b"Connection: close\r\n"
PROBE = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
LAST = b"GET /healthz HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n"


def post(*headers, body=BODY, model=b"double"):
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"POST /v2/models/%b/infer HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n%b" % (
        model, HOST, lines, len(body), body,
    )  # fmt: skip


CHUNKED = b"POST /v2/models/double/infer HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
    HOST, len(BODY), BODY,
)  # fmt: skip
ZIPPED = post(b"Content-Encoding: gzip", body=gzip.compress(BODY))


class Gate:
    """A model that waits until it is let through, and says when it runs."""

    def __init__(self):
        self.is_open, self.entered, self.sizes = threading.Event(), threading.Semaphore(0), []

    def __call__(self, x):
        self.sizes.append(len(x))
        self.entered.release()
        assert self.is_open.wait(30)
        return x


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.is_open.set()


@pytest.fixture(scope="module", params=LOOPS)
def served(request):
    models = [
        weft.serve.model(lambda x: x * 2, name="double"),
        weft.serve.model(lambda x: x, name="quick", on_loop=True),
    ]
    with serving(*models, limits={"header_bytes": 4096}, loop=request.param) as served:
        yield served


def statuses(answers):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answers)]


def talk(served, data, step=None, half_close=False):
    """The statuses of all answers to what is sent, in pieces of `step` bytes, until the server closes."""
    connection = served.connect()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        for at in range(0, len(data), step or len(data)):
            connection.sendall(data[at : at + (step or len(data))])
        if half_close:
            connection.shutdown(socket.SHUT_WR)
    except OSError:  # the server has closed it
        pass
    return statuses(read_all(connection))


STEPS = [None, 1000, 7]


@pytest.mark.parametrize("step", STEPS)
class TestHeads:
    @pytest.mark.parametrize("before", [b"", PROBE, post(), CHUNKED, ZIPPED])
    @pytest.mark.parametrize(
        "head",
        [
            b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 6000 + b"\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 900 + b"\r\n",
            b"GET /" + b"y" * 6000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
            post(b"X: " + b"y" * 6000),
        ],
        ids=["a header", "many headers", "a path", "of a call"],
    )
    def test_that_are_too_large(self, served, step, before, head):
        assert talk(served, before + head, step) == [200] * bool(before) + [431]

    def test_that_do_not_begin(self, served, step):
        assert talk(served, b"\r\n" * 3000 + PROBE, step) == [431]

    @pytest.mark.parametrize("request_", [PROBE, post(), CHUNKED], ids=["get", "call", "chunks"])
    def test_of_many_requests_may_be_larger_together(self, served, step, request_):
        assert talk(served, request_ * 60 + LAST, step) == [200] * 61

    @pytest.mark.parametrize("hosts", [[], [b"localhost", b"localhost"], [b"localhost", b"evil.test"]])
    @pytest.mark.parametrize("request_", [PROBE, post(), CHUNKED, ZIPPED], ids=["get", "call", "chunks", "gzip"])
    @pytest.mark.parametrize("before", [b"", post()])
    def test_without_one_host(self, served, step, hosts, request_, before):
        wrong = request_.replace(HOST, b"".join(b"Host: %b\r\n" % host for host in hosts))
        assert talk(served, before + wrong, step) == [200] * bool(before) + [400]

    def test_of_old_clients_need_no_host(self, served, step):
        assert talk(served, b"GET /healthz HTTP/1.0\r\n\r\n", step) == [200]
        assert talk(served, b"GET /healthz HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", step) == [400]


GARBAGE = [
    b"\x00\x01\x02\r\n\r\n",
    b"GARBAGE\r\n\r\n",
    b"GET\r\n",
    b"\x16\x03\x01",
    b"POST / HTTP/9.9\r\n\r\n",
    b"{" * 9000,
]


class TestWhatFollows:
    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
    @pytest.mark.parametrize("request_", [PROBE, post(), CHUNKED, ZIPPED, post(model=b"quick")])
    def test_a_request_before_garbage_is_answered(self, served, request_, garbage, step):
        got = talk(served, request_ + garbage, step, half_close=True)
        assert got[0] == 200
        assert got[1:] in ([400], [431], [])  # a request that begins well may just not go on

    def test_a_call_that_runs_is_answered_before_garbage_is_refused(self, gate):
        with serving(weft.serve.model(lambda x: gate(x), name="double")) as served:
            client = served.connect()
            client.sendall(post())
            assert gate.entered.acquire(timeout=10)
            client.sendall(b"\x00\x00\r\n\r\n")
            gate.is_open.set()
            assert statuses(read_all(client)) == [200, 400]

    @pytest.mark.parametrize("step", STEPS)
    def test_all_kinds_in_one_pipeline(self, served, step):
        requests = [PROBE, post(), CHUNKED, ZIPPED, post(model=b"quick"), post(model=b"none"), CHUNKED, PROBE]
        assert talk(served, b"".join(requests) + LAST, step) == [200] * 5 + [404] + [200] * 3

    @pytest.mark.parametrize("trailer", [b"", b"X: y\r\n", b"X: y\r\nZ: " + b"z" * 100 + b"\r\n"])
    @pytest.mark.parametrize("step", STEPS)
    def test_blank_lines_in_bodies(self, served, trailer, step):
        body = BODY + b"\r\n\r\n\n\n" * 20
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:-3], body[-3:]))
        head = b"POST /v2/models/double/infer HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
        chunked = head + chunks + b"0\r\n" + trailer + b"\r\n"
        spaced = post(body=b"\n\r\n\r\n" + BODY + b"\r\n\r\n\r\n")
        assert talk(served, (chunked + spaced) * 2 + b"\r\n" + LAST, step) == [200] * 5


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("call", [post(), ZIPPED, CHUNKED], ids=["quick", "gzip", "chunks"])
class TestHalfClose:
    def test_a_call_that_runs_is_answered(self, gate, loop, call):
        with serving(weft.serve.model(lambda x: gate(x), name="double"), loop=loop) as served:
            client = served.connect()
            client.sendall(call)
            assert gate.entered.acquire(timeout=10)
            client.shutdown(socket.SHUT_WR)
            served.ask("GET", "/healthz")
            gate.is_open.set()
            assert statuses(read_all(client)) == [200]
            until(lambda: not served.app._open)
            assert served.app.models["double"].statuses == {200: 1}

    def test_a_call_that_waits_leaves(self, gate, loop, call):
        with serving(weft.serve.model(weft.batched(lambda x: gate(x)), name="double"), loop=loop) as served:
            first, second, third = served.connect(), served.connect(), served.connect()
            first.sendall(call)
            assert gate.entered.acquire(timeout=10)
            second.sendall(call)
            model = served.app.models["double"]
            until(lambda: model.calls == 2)
            second.shutdown(socket.SHUT_WR)
            assert read_all(second) == b""
            third.sendall(call + call)  # the second one is not read before the first is answered
            until(lambda: model.calls == 2)
            third.shutdown(socket.SHUT_WR)
            assert read_all(third) == b""
            until(lambda: model.calls == 1)
            gate.is_open.set()
            assert b"200 OK" in first.recv(1 << 16)
            assert gate.sizes == [1]
            assert model.statuses == {499: 2, 200: 1}

    def test_a_client_that_sends_all_at_once_is_answered(self, served, loop, call):
        assert talk(served, call, half_close=True) == [200]
        assert talk(served, call * 3 + PROBE, half_close=True) == [200] * 4

    def test_half_a_request_is_over(self, served, loop, call):
        assert talk(served, call[:-3], half_close=True) == []
        assert talk(served, call + call[:-3], half_close=True) == [200]


def test_a_stream_goes_on_after_a_half_close():
    go = threading.Event()

    def count(x):
        for i in range(3):
            yield x + i
            assert go.wait(30)

    with serving(count) as served:
        client = served.connect()
        body = b'{"x": [0.0]}'
        head = b"POST /v2/models/count/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        client.sendall(head % len(body) + body)
        got = client.recv(1 << 16)
        client.shutdown(socket.SHUT_WR)
        served.ask("GET", "/healthz")
        go.set()
        assert (got + read_all(client)).count(b"data: ") == 3


class TestRoom:
    @pytest.mark.parametrize("loop", LOOPS)
    def test_nothing_more_is_read_while_answers_are_unread(self, loop):
        with serving(weft.serve.model(lambda x: x, name="double"), limits={"keep_alive": 1000.0}, loop=loop) as served:
            client = served.connect()
            client.settimeout(1.0)
            with pytest.raises(TimeoutError):  # the buffers of both kernels are full
                client.sendall(PROBE * 4_000_000)
            answered = served.app.statuses[200]
            assert served.ask("GET", "/healthz")[0] == 200
            assert served.app.statuses[200] - answered < 100
            client.settimeout(30)
            got = b""
            while got.count(b"HTTP/1.1 200") < 100_000 and len(got) < 1 << 22:
                got += client.recv(1 << 20)
            assert set(statuses(got)) == {200}  # and then it goes on

    def test_requests_that_wait_have_a_limit_together(self, gate, monkeypatch):
        monkeypatch.setattr("weft.serve.server.WAITING", 100_000)
        with serving(weft.serve.model(lambda x: gate(x), name="double")) as served:
            clients = [served.connect() for _ in range(8)]
            for client in clients:
                client.sendall(post() + PROBE * 500)
            until(lambda: served.app.models["double"].calls == 8)
            assert served.ask("GET", "/healthz")[0] == 200
            gate.is_open.set()
            got = []
            for client in clients:
                client.sendall(LAST)
                got.append(statuses(read_all(client)))
            assert [200, 503] in got
            assert [200] * 502 in got
            assert served.app.statuses[503] == got.count([200, 503])

    def test_bodies_that_come_slowly_share_the_room(self, monkeypatch):
        monkeypatch.setattr("weft.serve.http.BODIES", 300_000)
        big = post(body=BODY + b" " * 1_000_000)
        with serving(weft.serve.model(lambda x: x * 2, name="double")) as served:
            clients = [served.connect() for _ in range(6)]
            for client in clients:
                client.settimeout(0.2)
            left = dict.fromkeys(clients, big)
            while left:  # as much as is taken of each
                for client in list(left):
                    try:
                        left[client] = left[client][client.send(left[client][:100_000]) :]
                    except TimeoutError:
                        continue
                    if not left[client]:
                        del left[client]
            for client in clients:
                client.settimeout(30)
                assert b"200 OK" in client.recv(1 << 16)

    def test_a_body_that_finds_no_room_is_told_so(self, monkeypatch):
        monkeypatch.setattr("weft.serve.http.BODIES", 100_000)
        part = post().replace(b"%d" % len(BODY), b"60000000") + b" " * 1_000_000
        with serving(weft.serve.model(lambda x: x * 2, name="double"), limits={"body_time": 1.0}) as served:
            first, second = served.connect(), served.connect()
            first.sendall(part)
            until(lambda: served.app.bodies._total > 100_000)
            second.settimeout(0.2)
            with pytest.raises(TimeoutError):
                second.sendall(part + b" " * 50_000_000)
            second.settimeout(30)
            assert {*statuses(read_all(first)), *statuses(read_all(second))} <= {408, 503}

    def test_clients_that_take_nothing_are_left_when_answers_fill_the_memory(self, monkeypatch):
        monkeypatch.setattr("weft.serve.server.UNSENT", 20 << 20)
        # Answers of 16 MB: the system holds some megabytes of each.
        with serving(weft.serve.model(lambda x: np.zeros((len(x), 4_000_000)), name="double")) as served:
            deaf = [served.connect() for _ in range(4)]
            for client in deaf:
                client.sendall(post())
            until(lambda: not served.server.server_state.connections)
            assert served.ask("GET", "/healthz")[0] == 200


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("sent", [PROBE * 50, post() * 50, PROBE + post()[:-3], CHUNKED, b"\x00", b""])
def test_a_lost_connection_leaves_no_garbage(loop, sent):
    with serving(weft.serve.model(lambda x: x * 2, name="double"), loop=loop) as served:
        kept = []

        def come_and_go(times):
            for _ in range(times):
                client = served.connect()
                client.sendall(sent + PROBE)
                if sent:
                    client.recv(1 << 16)
                kept.extend(weakref.ref(x) for x in served.server.server_state.connections)
                client.close()
            until(lambda: not served.server.server_state.connections and not served.app._open)

        come_and_go(2)
        gc.collect()
        gc.disable()
        try:
            kept.clear()
            come_and_go(20)
            served.ask("GET", "/healthz")  # the loop has turned
            until(lambda: sum(ref() is not None for ref in kept) <= 2)
        finally:
            gc.enable()
