"""What a server does with slow, leaving and too many clients, with models that hang, and when it ends."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import io
import json
import logging
import socket
import struct
import threading
import time

import numpy as np
import pytest
from support.callers import until
from support.serving import need_server, oip, read_all, serving

import weft

need_server()

X = np.ones((1, 2), np.float32)
BODY = json.dumps(oip(x=X)).encode()
HEAD = b"POST /v2/models/gated/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY)


class Gate:
    """A model that waits until it is let through, and says when it runs."""

    def __init__(self):
        self.is_open, self.entered = threading.Event(), threading.Semaphore(0)
        self.sizes = []

    def __call__(self, x):
        self.sizes.append(len(x))
        self.entered.release()
        assert self.is_open.wait(30)
        return x

    def model(self, **options):
        return weft.serve.model(weft.batched(lambda x: self(x), **options), name="gated")


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.is_open.set()


def in_thread(f, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(f(*args)))
    thread.start()

    def result():
        thread.join(30)
        return results[0]

    return result


def look(served, later):
    """Let the server look at its connections as if it were later."""

    async def look_at_all():
        for connection in list(served.server.server_state.connections):
            connection.look(time.monotonic() + later, served.app.limits)

    served.run(look_at_all())


class TestTime:
    def test_headers_that_do_not_come(self, gate):
        with serving(gate.model(), limits={"header_time": 1.0}) as served:
            silent, slow, second = served.connect(), served.connect(), served.connect()
            slow.sendall(b"POST /v2/models/gated/infer HTTP/1.1\r\nHost: loc")
            second.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in second.recv(1000)
            second.sendall(b"GET /healthz HTTP/1.1\r\nHos")
            assert b"408" in read_all(silent)
            assert b"408" in read_all(slow)
            assert b"408" in read_all(second)

    def test_a_body_that_does_not_come(self, gate):
        with serving(gate.model(), limits={"body_time": 0.2}) as served:
            for sent in (b"", BODY[:-5]):
                slow = served.connect()
                slow.sendall(HEAD + sent)
                answer = read_all(slow)
                assert b"408" in answer
                assert b"did not come within" in answer
            assert not served.app._open

    def test_headers_have_time_while_another_answer_is_due(self, gate):
        with serving(gate.model()) as served:
            pipe = served.connect()
            pipe.sendall(HEAD + BODY + HEAD[:20])
            assert gate.entered.acquire(timeout=10)
            look(served, 1000.0)
            gate.is_open.set()
            assert b"200 OK" in pipe.recv(1 << 16)
            look(served, 1000.0)
            assert b"408" in read_all(pipe)

    def test_a_request_whose_headers_came_in_two_parts_is_not_idle(self, gate):
        gate.is_open.set()
        with serving(gate.model()) as served:
            pipe = served.connect()
            pipe.sendall(HEAD + BODY + HEAD[:20])
            assert b"200 OK" in pipe.recv(1 << 16)
            gate.is_open.clear()
            pipe.sendall(HEAD[20:] + BODY)
            assert gate.entered.acquire(timeout=10)
            assert gate.entered.acquire(timeout=10)
            look(served, 1000.0)
            gate.is_open.set()
            assert b"200 OK" in pipe.recv(1 << 16)

    @pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
    def test_a_client_that_takes_no_answer(self, more):
        def wide(x):
            return np.zeros((len(x), 1_000_000))

        with serving(wide) as served:
            deaf = socket.socket()
            served.sockets.append(deaf)
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", served.port))
            deaf.sendall((HEAD + BODY).replace(b"gated", b"wide").replace(b"Host", more + b"Host"))
            until(lambda: served.app.models["wide"].statuses[200])
            look(served, 0.0)
            assert served.server.server_state.connections
            look(served, 1000.0)
            until(lambda: not served.server.server_state.connections)

    def test_an_idle_connection_is_closed(self, gate):
        gate.is_open.set()
        with serving(gate.model(), limits={"keep_alive": 0.2}) as served:
            idle = served.connect()
            idle.sendall(HEAD + BODY)
            answer = read_all(idle)  # until it is closed
            assert answer.count(b"HTTP/1.1") == 1
            assert b"200 OK" in answer

    def test_a_deadline_of_the_call(self, gate):
        with serving(gate.model()) as served:
            status, answer, _ = served.ask(
                "POST", "/v2/models/gated/infer", oip(x=X) | {"parameters": {"timeout": 50_000}}
            )
            assert (status, "deadline" in answer["error"]) == (504, True)
            gate.is_open.set()

    def test_a_deadline_of_the_server(self, gate):
        with serving(gate.model(), limits={"deadline": 0.1}) as served:
            assert served.infer("gated", x=X)[0] == 504
            gate.is_open.set()


class TestSize:
    def test_a_declared_length_beyond_the_limit_is_refused_before_it_comes(self, gate):
        with serving(gate.model(), limits={"body_bytes": 1000}) as served:
            huge = served.connect()
            huge.sendall(HEAD.replace(b"%d" % len(BODY), b"999999999999"))
            assert b"413" in read_all(huge)

    def test_chunks_are_counted(self, gate):
        with serving(gate.model(), limits={"body_bytes": 1000}) as served:
            chunked = served.connect()
            chunked.sendall(
                b"POST /v2/models/gated/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            chunked.sendall((b"1f4\r\n" + b" " * 500 + b"\r\n") * 3)
            assert b"413" in read_all(chunked)

    @pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
    @pytest.mark.parametrize("is_chunked", [False, True])
    def test_a_client_that_sends_all_before_it_reads_sees_the_refusal(self, gate, more, is_chunked):
        size = 20 << 20
        how = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % size
        body = b"%x\r\n" % size + b" " * size + b"\r\n0\r\n\r\n" if is_chunked else b" " * size
        with serving(gate.model(), limits={"body_bytes": 1000}) as served:
            eager = served.connect()
            eager.sendall(b"POST /v2/models/gated/infer HTTP/1.1\r\nHost: localhost\r\n" + more + how + b"\r\n\r\n")
            eager.sendall(body)
            assert b"413" in read_all(eager)

    def test_a_client_that_sends_without_end_is_left(self, gate, monkeypatch):
        monkeypatch.setattr("weft.serve.server.DROPPED", 1 << 20)
        with serving(gate.model(), limits={"body_bytes": 1000}) as served:
            endless = served.connect()
            endless.sendall(HEAD.replace(b"%d" % len(BODY), b"999999999999"))
            with pytest.raises(OSError):  # a reset or a broken pipe
                endless.sendall(bytes(64 << 20))

    def test_headers_beyond_the_limit(self, gate):
        with serving(gate.model(), limits={"header_bytes": 1000}) as served:
            wide = served.connect()
            wide.sendall(b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 3000)
            assert b"431" in read_all(wide)

    def test_a_small_body_that_inflates(self, gate):
        with serving(gate.model(), limits={"body_bytes": 10_000}) as served:
            bomb = gzip.compress(b" " * 10_000_000)[:9999]
            assert served.ask("POST", "/v2/models/gated/infer", bomb, {"Content-Encoding": "gzip"})[0] == 413


class TestRoom:
    def test_over_capacity_is_told_at_once(self, gate):
        with serving(gate.model(max_queue=1, max_batch_size=1)) as served:
            running = in_thread(lambda: served.infer("gated", x=X))
            assert gate.entered.acquire(timeout=10)
            waiting = in_thread(lambda: served.infer("gated", x=X))
            until(lambda: served.app.models["gated"].statistics().waiting == 1)
            status, _, headers = served.ask("POST", "/v2/models/gated/infer", oip(x=X))
            assert status == 429
            assert headers["retry-after"] == "1"
            gate.is_open.set()
            assert (running()[0], waiting()[0]) == (200, 200)

    @pytest.mark.parametrize("encoding", ["identity", "gzip"])
    @pytest.mark.parametrize("options", [{}, {"max_queue": 1}, {"max_queue": 100}, {"max_queue": 0}])
    def test_a_call_of_more_rows_than_may_wait_is_taken_when_nothing_waits(self, options, encoding):
        sizes = []

        def f(x):
            sizes.append(len(x))
            return x * 2

        x = np.ones((5000, 1), np.float32)
        body = json.dumps(oip(x=x)).encode()
        sent = gzip.compress(body) if encoding == "gzip" else body
        with serving(weft.serve.model(f, **options)) as served:
            for _ in range(2):
                status, answer, _ = served.ask("POST", "/v2/models/f/infer", sent, {"Content-Encoding": encoding})
                assert (status, sum(answer["outputs"][0]["data"])) == (200, 10_000)
            assert served.ask("POST", "/v1/models/f:predict", {"inputs": x.tolist()})[0] == 200
            assert max(sizes) <= 64

    def test_others_are_refused_while_a_large_call_waits(self, gate):
        with serving(gate.model(max_queue=2, max_batch_size=1, split=True)) as served:
            large = in_thread(lambda: served.infer("gated", x=np.ones((9, 2), np.float32)))
            assert gate.entered.acquire(timeout=10)
            until(lambda: served.app.models["gated"].statistics().running == 1)
            for rows in (1, 2, 9):
                assert served.infer("gated", x=np.ones((rows, 2), np.float32))[0] == 429
            gate.is_open.set()
            assert large()[0] == 200

    def test_a_call_that_no_batch_can_hold_is_too_large(self, gate):
        gate.is_open.set()
        with serving(gate.model(max_batch_size=4)) as served:  # a batcher of one's own splits no calls
            for path, body in (
                ("/v2/models/gated/infer", oip(x=np.ones((5, 2), np.float32))),
                ("/v1/models/gated:predict", {"inputs": np.ones((5, 2)).tolist()}),
            ):
                status, answer, headers = served.ask("POST", path, body)
                assert (status, answer["error"]) == (413, "a call of gated may have at most 4 rows, got 5")
                assert "retry-after" not in headers
            assert served.infer("gated", x=np.ones((4, 2), np.float32))[0] == 200

    def test_calls_of_a_model_without_a_queue_limit_are_limited_by_the_server(self, gate):
        with serving(gate.model(), limits={"calls": 1}) as served:
            running = in_thread(lambda: served.infer("gated", x=X))
            assert gate.entered.acquire(timeout=10)
            assert served.infer("gated", x=X)[0] == 429
            gate.is_open.set()
            assert running()[0] == 200


class TestLeaving:
    def test_a_client_that_disconnects_leaves_its_batch(self, gate):
        with serving(gate.model()) as served:
            running = in_thread(lambda: served.infer("gated", x=X))
            assert gate.entered.acquire(timeout=10)
            staying = in_thread(lambda: served.infer("gated", x=2 * X))
            leaving = served.connect()
            leaving.sendall(HEAD + BODY)
            model = served.app.models["gated"]
            until(lambda: model.calls == 3)
            leaving.close()
            until(lambda: model.calls == 2)
            gate.is_open.set()
            assert running()[0] == 200
            assert staying()[1]["outputs"][0]["data"] == [2.0, 2.0]
            assert gate.sizes == [1, 1]
            until(lambda: model.statuses[499] == 1)

    def test_half_a_request_leaves_nothing(self, gate):
        with serving(gate.model()) as served:
            for sent in (b"POST /v2", HEAD, HEAD + BODY[:9]):
                half = served.connect()
                half.sendall(sent)
                half.close()
            gate.is_open.set()
            assert served.infer("gated", x=X)[0] == 200
            until(lambda: not served.app._open)

    def test_requests_in_a_pipeline_are_answered_in_order(self, gate):
        gate.is_open.set()
        with serving(gate.model()) as served:
            pipe = served.connect()
            pipe.sendall((HEAD + BODY) * 3 + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert read_all(pipe).count(b"200 OK") == 4

    def test_a_pipeline_may_be_larger_than_headers(self, gate):
        gate.is_open.set()
        with serving(gate.model(), limits={"header_bytes": 1000}) as served:
            pipe = served.connect()
            pipe.sendall((HEAD + BODY) * 50 + HEAD[:20])
            got = b""
            while got.count(b"200 OK") < 50:
                got += pipe.recv(1 << 16)
            pipe.sendall(HEAD[20:] + BODY)
            assert b"200 OK" in pipe.recv(1 << 16)

    @pytest.mark.parametrize("encoding", [b"identity", b"gzip"])  # as a quick call, and over ASGI
    def test_a_pipeline_whose_client_leaves_while_it_waits(self, gate, encoding):
        body = gzip.compress(BODY) if encoding == b"gzip" else BODY
        more = b"Content-Encoding: gzip\r\n" if encoding == b"gzip" else b""
        head = HEAD.replace(b"%d" % len(BODY), b"%d" % len(body)).replace(b"Host", more + b"Host")
        model = gate.model()
        with serving(model) as served:
            running = in_thread(lambda: served.infer("gated", x=X))
            assert gate.entered.acquire(timeout=10)
            pipe = served.connect()
            pipe.sendall((head + body) * 3)
            until(lambda: model.calls == 2)
            pipe.close()
            until(lambda: model.statuses[499] == 1)
            assert model.calls == 1
            gate.is_open.set()
            assert running()[0] == 200
            assert gate.sizes == [1]

    def test_a_pipeline_whose_client_leaves(self, gate, caplog):
        with serving(gate.model()) as served:
            pipe = served.connect()
            pipe.sendall((HEAD + BODY) * 3)
            assert gate.entered.acquire(timeout=10)
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
            pipe.close()
            gate.is_open.set()
            assert served.infer("gated", x=X)[0] == 200
            until(lambda: not served.app._open)
        assert "Exception" not in caplog.text

    def test_a_wish_for_http_2_is_ignored(self, gate):
        gate.is_open.set()
        wish = HEAD.replace(
            b"Host", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\nHost"
        )
        with serving(gate.model()) as served:
            java = served.connect()
            for parts in ([wish + BODY], [wish, BODY], [wish[:99], wish[99:] + BODY[:9], BODY[9:]], [HEAD + BODY]):
                for part in parts:
                    java.sendall(part)
                assert b"200 OK" in java.recv(1 << 16)
            java.sendall(HEAD + BODY + wish + BODY + HEAD.replace(b"Host", b"Connection: close\r\nHost") + BODY)
            assert read_all(java).count(b"200 OK") == 3
            java = served.connect()
            java.sendall(3 * (wish + BODY) + HEAD.replace(b"Host", b"Connection: close\r\nHost") + BODY)
            assert read_all(java).count(b"200 OK") == 4

    @pytest.mark.parametrize(
        "text",
        [
            b"\x16\x03\x01", b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"CONNECT a:80 HTTP/1.1\r\n\r\n",
            b"CONNECT / HTTP/1.1\r\n\r\n",
        ],
    )  # fmt: skip
    def test_what_is_no_http_is_refused(self, gate, text):
        with serving(gate.model()) as served:
            odd = served.connect()
            odd.sendall(text)
            assert b"400 \r\n" in (answer := read_all(odd))
            assert b'{"error":"the request is not valid HTTP/1.1"}' in answer


class TestFailures:
    @pytest.mark.parametrize("on_loop", [False, True])
    @pytest.mark.parametrize("problem", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
    def test_what_ends_the_thread_of_a_batch_is_the_models_fault(self, problem, on_loop):
        def fail(x):
            if (x < 0).any():
                raise problem
            return x

        with serving(weft.serve.model(fail, on_loop=on_loop)) as served:
            status, answer = served.infer("fail", x=-X)
            assert (status, problem.__name__ in answer["error"]) == (500, True)
            assert served.infer("fail", x=X)[0] == 200

    @pytest.mark.parametrize(
        "result",
        [
            lambda x: x * 1j, lambda x: np.array([object()] * len(x)), lambda x: np.array(["2020-01-01"] * len(x), "M8[D]"),
            lambda x: {"y": x, "scale": float("inf")}, lambda x: ["\ud800"] * len(x), lambda x: {"y": x.astype(np.longdouble)},
        ],
    )  # fmt: skip
    def test_results_that_have_no_form_on_the_wire(self, result):
        with serving(weft.serve.model(result, name="odd")) as served:
            for path, body in (
                ("/v2/models/odd/infer", oip(x=X)),
                ("/v1/models/odd:predict", {"instances": X.tolist()}),
            ):
                status, answer, _ = served.ask("POST", path, body)
                assert (status, "0x" in answer["error"]) == (500, False)

    def test_a_sentence_that_has_no_form_in_json(self):
        def fail(x):
            raise weft.errors.InvalidArgumentError("no file \udcff")

        with serving(fail) as served:
            assert served.infer("fail", x=X) == (400, {"error": "no file \\udcff"})

    def test_a_log_that_nobody_reads(self, gate):
        class Broken(io.StringIO):
            def write(self, text):
                raise BrokenPipeError

        with serving(gate.model(), limits={"deadline": 0.1}, access_log="all") as served:
            served.app.access._stream = Broken()
            for _ in range(2):
                assert served.infer("gated", x=X)[0] == 504

    @pytest.mark.parametrize("on_loop", [False, True])
    def test_only_the_guilty_call_fails(self, on_loop):
        def root(x):
            if (x < 0).any():
                raise ValueError("negative")
            return np.sqrt(x)

        with serving(weft.serve.model(root, max_batch_size=8, max_wait=0.2, on_loop=on_loop)) as served:
            asked = [in_thread(lambda v=v: served.infer("root", x=np.array([v]))) for v in (0.0, 1.0, 4.0, -9.0, 16.0)]
            assert [answer()[0] for answer in asked] == [200, 200, 200, 500, 200]

    def test_a_model_that_hangs_is_reported(self, gate, caplog):
        with (
            caplog.at_level(logging.WARNING, "weft.serve"),
            serving(gate.model(), limits={"hang_time": 0.05}) as served,
        ):
            running = in_thread(lambda: served.infer("gated", x=X))
            until(lambda: served.ask("GET", "/v2/models/gated/ready")[0] == 503)
            assert served.ask("GET", "/v2/health/ready")[0] == 503
            assert served.ask("GET", "/healthz")[0] == 200
            until(lambda: "in __call__" in caplog.text)  # where it hangs
            gate.is_open.set()
            assert running()[0] == 200
            until(lambda: served.ask("GET", "/v2/health/ready")[0] == 200)
        assert "answers again" in caplog.text

    def test_an_event_loop_that_does_not_turn_is_reported(self, gate, caplog):
        with (
            caplog.at_level(logging.WARNING, "weft.serve"),
            serving(gate.model(), limits={"hang_time": 0.05}) as served,
        ):
            served.server.loop.call_soon_threadsafe(gate, X)
            until(lambda: "the event loop has not turned" in caplog.text and "in __call__" in caplog.text)
            gate.is_open.set()
            until(lambda: "turns again" in caplog.text)

    def test_a_model_on_the_loop_that_hangs_is_reported(self, gate, caplog):
        with (
            caplog.at_level(logging.WARNING, "weft.serve"),
            serving(gate.model(on_loop=True), limits={"hang_time": 0.05}) as served,
        ):
            running = in_thread(lambda: served.infer("gated", x=X))
            until(lambda: "the event loop has not turned" in caplog.text and "in __call__" in caplog.text)
            gate.is_open.set()
            assert running()[0] == 200
            until(lambda: served.ask("GET", "/v2/health/ready")[0] == 200)

    def test_a_model_that_cannot_be_loaded(self):
        def fail():
            raise OSError("no weights")

        model = weft.serve.model(factory=fail, name="broken")
        with pytest.raises(weft.errors.FailedPreconditionError, match="no weights"):
            asyncio.run(model.load())
        assert not model.is_ready


class TestEnd:
    def test_calls_in_flight_finish_and_new_ones_are_refused(self, gate):
        with serving(gate.model()) as served:
            kept = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
            kept.request("GET", "/healthz")
            kept.getresponse().read()
            running = in_thread(lambda: served.infer("gated", x=X))
            assert gate.entered.acquire(timeout=10)
            served.server.loop.call_soon_threadsafe(served.server.end)
            until(lambda: served.app.is_draining)
            kept.request("POST", "/v2/models/gated/infer", BODY)
            answer = kept.getresponse()
            assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
            answer.read()
            kept.close()
            assert served.ask("GET", "/v2/health/ready")[0] == 503
            gate.is_open.set()
            assert running()[0] == 200
            served.thread.join(10)
            assert not served.thread.is_alive()

    def test_calls_that_do_not_finish_are_given_up(self, gate):
        with serving(gate.model(), limits={"drain_time": 0.1}) as served:
            running = in_thread(lambda: served.infer("gated", x=X))
            assert gate.entered.acquire(timeout=10)
            served.server.loop.call_soon_threadsafe(served.server.end)
            assert running() == (503, {"error": "the server is shutting down"})
