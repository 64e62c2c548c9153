"""What supervisors, load balancers and operators see: hanging models, a server that ends, and what was refused."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.callers import until
from support.serving import need_server, oip, read_all, serving

import weft

need_server()

X = np.ones((1, 2), np.float32)


class Gate:
    """A model that waits until it is let through, and says when it runs."""

    def __init__(self):
        self.is_open, self.entered = threading.Event(), threading.Semaphore(0)

    def __call__(self, x):
        self.entered.release()
        assert self.is_open.wait(30)
        return x


@pytest.fixture
def gates():
    gates = [Gate(), Gate()]
    yield gates
    for gate in gates:
        gate.is_open.set()


def models(gates):
    return [weft.serve.model(lambda x, gate=gate: gate(x), name=name) for gate, name in zip(gates, "ab", strict=False)]


def call(served, name):
    """Send a call and wait for nothing."""
    body = json.dumps(oip(x=X)).encode()
    client = served.connect()
    client.sendall(
        b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
        % (name.encode(), len(body), body)
    )
    return client


def hang(served, gate, name):
    """Make a model hang, and wait until that is known."""
    client = call(served, name)
    assert gate.entered.acquire(timeout=10)
    until(lambda: served.app.models[name].is_hanging)
    return client


class TestHanging:
    @pytest.mark.parametrize("encoding", ["identity", "gzip"])
    def test_its_calls_are_refused_at_once(self, gates, encoding):
        with serving(*models(gates), limits={"hang_time": 0.05, "drain_time": 0.2}) as served:
            first = hang(served, gates[0], "a")
            for path, body in (("/v2/models/a/infer", oip(x=X)), ("/v1/models/a:predict", {"instances": X.tolist()})):
                status, answer, headers = served.ask("POST", path, body)
                assert (status, headers["retry-after"]) == (503, "1")
                assert "a batch of a has been running for more than 0.05 s" in answer["error"]
            for path in ("/v2/models/a", "/v2/models/a/stats", "/v1/models/a", "/metrics"):
                assert served.ask("GET", path)[0] == 200
            gates[1].is_open.set()
            assert served.infer("b", x=X)[0] == 200
            gates[0].is_open.set()
            assert b"200 OK" in first.recv(1 << 16)
            until(lambda: served.infer("a", x=X)[0] == 200)

    def test_a_stream_is_refused_too(self):
        go = threading.Event()

        def count(x):
            yield x
            assert go.wait(30)
            yield x

        with serving(count, limits={"hang_time": 0.05, "drain_time": 0.2}) as served:
            client, body = served.connect(), b'{"x": [0.0]}'
            head = b"POST /v2/models/count/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            client.sendall(head % len(body) + body)
            until(lambda: served.app.models["count"].is_hanging)
            assert served.ask("POST", "/v2/models/count/generate_stream", {"x": [0.0]})[0] == 503
            go.set()

    def test_readiness_says_which(self, gates):
        with serving(*models(gates), limits={"hang_time": 0.05, "drain_time": 0.2}) as served:
            hang(served, gates[0], "a")
            for path in ("/readyz", "/v2/health/ready"):
                status, answer, headers = served.ask("GET", path)
                assert (status, list(answer["models"]), headers["retry-after"]) == (503, ["a"], "1")
                assert "a batch of a runs for too long" in answer["error"]
            hang(served, gates[1], "b")
            assert list(served.ask("GET", "/readyz")[1]["models"]) == ["a", "b"]
            assert served.ask("GET", "/healthz")[0] == 200  # nobody has asked for more
            gates[0].is_open.set()
            until(lambda: list(served.ask("GET", "/readyz")[1]["models"]) == ["b"])

    def test_a_model_that_is_not_loaded_is_named(self, gates):
        with serving(*models(gates)) as served:
            assert served.ask("POST", "/v2/repository/models/b/unload")[0] == 200
            assert served.ask("GET", "/readyz")[1]["models"] == {"b": "the model b is not loaded"}

    @pytest.mark.parametrize("path", ["/healthz", "/v2/health/live"])
    def test_liveness_fails_where_all_hang(self, gates, path):
        with serving(*models(gates), limits={"hang_time": 0.05, "drain_time": 0.2, "hang_exit": 0.1}) as served:
            hang(served, gates[0], "a")
            call(served, "a")
            assert served.ask("GET", path)[0] == 200  # the other answers
            hang(served, gates[1], "b")
            until(lambda: served.ask("GET", path)[0] == 503)
            assert "all models have been hanging" in served.ask("GET", path)[1]["error"]
            gates[1].is_open.set()
            until(lambda: served.ask("GET", path)[0] == 200)

    def test_liveness_waits_for_hang_exit(self, gates):
        with serving(models(gates)[0], limits={"hang_time": 0.05, "drain_time": 0.2, "hang_exit": 1000.0}) as served:
            hang(served, gates[0], "a")
            assert served.ask("GET", "/healthz")[0] == 200


class TestEnd:
    def test_calls_are_taken_for_the_delay(self):
        with serving(weft.serve.model(lambda x: x, name="f"), limits={"drain_delay": 1000.0}) as served:
            served.server.loop.call_soon_threadsafe(served.server.end_later)
            until(lambda: served.ask("GET", "/readyz")[0] == 503)
            for path in ("/v2/health/ready", "/v2/models/f/ready"):
                assert served.ask("GET", path)[0] == 503
            assert "shutting down" in served.ask("GET", "/readyz")[1]["error"]
            assert served.ask("GET", "/healthz")[0] == 200
            assert b"weft_draining 1" in served.ask("GET", "/metrics")[1]
            assert served.ask("GET", "/v1/models/f")[1]["model_version_status"][0]["state"] != "AVAILABLE"
            assert served.infer("f", x=X)[0] == 200
            served.server.loop.call_soon_threadsafe(served.server.end)  # a second signal
            served.thread.join(20)
            assert not served.thread.is_alive()

    def test_then_it_drains(self, gates):
        with serving(models(gates)[0], limits={"drain_delay": 0.1}) as served:
            running = call(served, "a")
            assert gates[0].entered.acquire(timeout=10)
            served.server.loop.call_soon_threadsafe(served.server.end_later)
            until(lambda: served.app.is_draining)
            assert served.infer("a", x=X)[0] == 503
            gates[0].is_open.set()
            assert b"200 OK" in running.recv(1 << 16)
            served.thread.join(20)
            assert not served.thread.is_alive()

    def test_the_delay_may_be_none(self):
        assert weft.serve.Limits(drain_delay=0.0).drain_delay == 0
        for wrong in (
            {"drain_delay": -1.0},
            {"hang_exit": 0.0},
            {"hang_exit": float("nan")},
            {"drain_delay": float("inf")},
        ):
            with pytest.raises(weft.errors.InvalidArgumentError, match="positive"):
                weft.serve.Limits(**wrong)


def responses(served):
    """The counts of `/metrics` by model and status."""
    text = served.ask("GET", "/metrics")[1].decode()
    lines = [line for line in text.splitlines() if line.startswith("weft_responses_total{")]
    return {line.partition("{")[2].partition("}")[0]: float(line.rpartition(" ")[2]) for line in lines}


REFUSED = [  # method, path, token, status, model
    ("GET", "/nothing", "secret", 404, ""),
    ("GET", "/nothing", None, 404, ""),
    ("POST", "/v2/models/none/infer", "secret", 404, ""),
    ("GET", "/v2/models/none", "secret", 404, ""),
    ("POST", "/v1/models/none:predict", "secret", 404, ""),
    ("POST", "/v2/models/f/versions/9/infer", "secret", 404, "f"),
    ("GET", "/v2", None, 401, ""),
    ("GET", "/metrics", "wrong", 401, ""),
    ("POST", "/v2/models/f/infer", None, 401, "f"),
    ("POST", "/v1/models/f:predict", "wrong", 401, "f"),
    ("POST", "/v2/models/f/versions/1/infer", None, 401, "f"),
    ("POST", "/v2/models/f/generate_stream", None, 401, "f"),
    ("POST", "/v2/repository/models/f/load", None, 401, ""),
    ("GET", "/v2/models/f", None, 401, ""),
]


@pytest.mark.parametrize("which", ["errors", "all"])
def test_all_that_was_refused_is_counted_and_logged(which):
    with serving(weft.serve.model(lambda x: x, name="f"), token="secret", access_log=which) as served:
        served.app.access._stream = log = io.StringIO()
        token = {"Authorization": "Bearer secret"}
        for method, path, given, status, model in REFUSED:
            key = f'model="{model}",status="{status}"'
            before = served.app.statuses[status] if not model else served.app.models["f"].statuses[status]
            headers = {} if given is None else {"Authorization": f"Bearer {given}"}
            assert served.ask(method, path, oip(x=X) if method == "POST" else None, headers)[0] == status, path
            counts = served.ask("GET", "/metrics", None, token)[1].decode()
            assert f"weft_responses_total{{{key}}} {before + 1:.1f}" in counts, path
        until(lambda: log.getvalue().count('"status":40') >= len(REFUSED))
        lines = [json.loads(line) for line in log.getvalue().splitlines()]
        seen = [(line["method"], line["path"], line["status"]) for line in lines if line["status"] in (401, 404)]
        assert seen == [(method, path, status) for method, path, _, status, _ in REFUSED]


def test_what_is_no_request_is_counted_and_logged():
    with serving(weft.serve.model(lambda x: x, name="f"), access_log="all", limits={"header_bytes": 1000}) as served:
        served.app.access._stream = log = io.StringIO()
        for sent, status in ((b"\x00\r\n\r\n", 400), (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n", 431)):
            client = served.connect()
            client.sendall(sent)
            assert b" %d " % status in read_all(client)
            until(lambda status=status: f'"status":{status}' in log.getvalue())
            assert responses(served)[f'model="",status="{status}"'] == 1


def test_the_log_keeps_no_long_paths():
    with serving(weft.serve.model(lambda x: x, name="f")) as served:
        served.app.access._stream = log = io.StringIO()
        assert served.ask("GET", "/" + "a" * 20_000)[0] == 404
        until(log.getvalue)
        assert len(log.getvalue()) < 1000


MODEL = """
import gc
import os
import numpy as np
import weft.serve
def echo(x):
    if x[0] < 0:
        os.abort()
    return x
def thresholds(x):
    return np.tile(gc.get_threshold(), (len(x), 1))
models = weft.serve.model(echo), weft.serve.model(thresholds)
a, b = models
"""


@pytest.fixture
def process(tmp_path):
    """A running `weft serve` of its own, whose log nobody reads, and its port."""
    (tmp_path / "model.py").write_text(MODEL)
    runs = []

    def start(*arguments):
        command = [sys.executable, "-m", "weft", "serve", str(tmp_path / "model.py"), "--port", "0", *arguments]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        runs.append(run)
        for line in run.stdout:
            if b"look at" in line:
                return run, int(line.split(b":")[3].split(b"/")[0])
        raise AssertionError(run.communicate(timeout=30))

    yield start
    for run in runs:
        if run.poll() is None:
            run.kill()
        run.communicate(timeout=30)


def talk(port, *requests):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        for request in requests:
            client.sendall(request)
        return read_all(client)


def get(path, more=b""):
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (path.encode(), more)


CLOSE = b"Connection: close\r\n"


def test_a_log_that_nobody_reads_stops_nothing(process):
    run, port = process("--access-log", "all")
    for _ in range(5):
        answers = talk(port, get("/nothing") * 400, b"\x00\r\n\r\n")
        assert answers.count(b" 404 ") == 400
        assert talk(port, get("/healthz", CLOSE)).startswith(b"HTTP/1.1 200")
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 0


@pytest.mark.skipif(not hasattr(signal, "SIGTERM") or sys.platform == "win32", reason="there are no signals")
class TestProcess:
    def test_sigterm_and_the_delay(self, process):
        run, port = process("--drain-delay", "1000")
        run.send_signal(signal.SIGTERM)
        until(lambda: b" 503 " in talk(port, get("/readyz", CLOSE)))
        assert talk(port, get("/v2", CLOSE)).startswith(b"HTTP/1.1 200")
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 0

    def test_ctrl_c_does_not_wait(self, process):
        run, _ = process("--drain-delay", "1000")
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 0

    def test_a_crash_leaves_a_traceback(self, process):
        run, port = process()
        body = json.dumps(oip(x=-np.ones(1))).encode()
        assert (
            talk(
                port,
                b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body),
                body,
            )
            == b""
        )
        _, log = run.communicate(timeout=30)
        assert run.returncode == -signal.SIGABRT
        assert b"Fatal Python error: Aborted" in log
        assert b"in echo" in log


def test_the_thresholds_of_the_garbage_collector_are_pythons(process):
    _, port = process()
    body = json.dumps(oip(x=X)).encode()
    head = b"POST /v2/models/thresholds/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    answer = talk(port, head % len(body) + body)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["outputs"][0]["data"] == [*gc.get_threshold()]


@pytest.mark.parametrize(
    "wrong", [["--drain-delay", "-1"], ["--hang-exit", "0"], ["--hang-exit", "nan"], ["--allow-host", "a"]]
)
def test_wrong_options_of_the_command(tmp_path, wrong):
    (tmp_path / "model.py").write_text(MODEL)
    command = [sys.executable, "-m", "weft", "serve", str(tmp_path / "model.py"), *wrong]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert run.returncode == 2
