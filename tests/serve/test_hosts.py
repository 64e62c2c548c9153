"""Under which names a server answers: without a token a page under a strange name must get nothing (DNS rebinding)."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from support.serving import need_server, oip, serving

import weft

need_server()

X = np.ones((1, 2), np.float32)
#: All routes but probes, and what is there to be had.
ROUTES = [
    ("GET", "/"), ("GET", "/page.js"), ("GET", "/page.css"), ("GET", "/favicon.ico"), ("GET", "/metrics"),
    ("GET", "/openapi.json"), ("GET", "/ui/state"), ("GET", "/v2"), ("HEAD", "/v2/"), ("GET", "/v2/models/stats"),
    ("POST", "/v2/repository/index"), ("GET", "/v2/models/double"), ("GET", "/v2/models/double/ready"),
    ("GET", "/v2/models/double/config"), ("GET", "/v2/models/double/stats"), ("GET", "/v1/models/double"),
    ("GET", "/v1/models/double/metadata"), ("POST", "/v2/models/double/infer"), ("POST", "/v1/models/double:predict"),
    ("POST", "/v2/models/double/versions/1/infer"), ("POST", "/v2/models/double/generate_stream"),
    ("POST", "/v2/repository/models/double/load"), ("POST", "/v2/repository/models/double/unload"),
    ("POST", "/ui/models/double/options"), ("GET", "/nothing"), ("DELETE", "/v2"), ("OPTIONS", "/v2/models/double/infer"),
]  # fmt: skip
PROBES = ["/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"]
STRANGE = [
    "evil.test", "evil.test:8000", "localhost.evil.test", "127.0.0.1.evil.test", "evil.test:127.0.0.1", "2130706433", "127.1",
    "0x7f.0.0.1", "user@localhost", "localhost/", "localhost evil.test", "", " ", "[", "[::1", "[evil.test]", "localhost,evil.test",
]  # fmt: skip
LOCAL = [
    "localhost",
    "LOCALHOST:1",
    "localhost:8000",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.9.9.9",
    "[::1]",
    "[::1]:8000",
]
ADDRESSES = ["10.1.2.3", "10.1.2.3:8000", "[2001:db8::1]:8000", "0.0.0.0:8000"]


def double(x):
    return x * 2


def ask(served, host, method="GET", path="/v2", body=None):
    return served.ask(method, path, body, {"Host": host})[0]


@pytest.fixture(scope="module")
def served():
    with serving(double) as served:
        yield served


class TestLoopback:
    @pytest.mark.parametrize(("method", "path"), ROUTES)
    def test_every_route_is_refused_under_a_strange_name(self, served, method, path):
        body = json.dumps(oip(x=X)).encode() if method == "POST" else None
        before = served.app.models["double"].statistics().calls
        assert ask(served, "evil.test", method, path, body) == 403
        assert served.app.models["double"].statistics().calls == before

    @pytest.mark.parametrize("path", PROBES)
    def test_probes_answer_under_any_name(self, served, path):
        assert [ask(served, host, "GET", path) for host in ("evil.test", "10.1.2.3", "")] == [200] * 3

    @pytest.mark.parametrize("host", [*STRANGE, *ADDRESSES])
    def test_names_that_are_strange(self, served, host):
        status, answer, _ = served.ask("POST", "/v2/models/double/infer", oip(x=X), {"Host": host})
        assert (status, "--host-name" in answer["error"]) == (403, True)

    @pytest.mark.parametrize("host", LOCAL)
    def test_names_of_this_machine(self, served, host):
        for _ in range(2):  # the second time it is known
            assert ask(served, host) == 200
            assert ask(served, host, "POST", "/v2/models/double/infer", oip(x=X)) == 200

    def test_a_strange_name_after_a_good_one_on_one_connection(self, served):
        connection = served.connect()
        body = json.dumps(oip(x=X)).encode()
        request = b"POST /v2/models/double/infer HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\n\r\n%b"
        for host, status in [(b"localhost", b"200")] * 3 + [(b"evil.test", b"403")] * 3 + [(b"localhost", b"200")]:
            connection.sendall(request % (host, len(body), body))
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 " + status)

    def test_refusals_are_counted(self, served):
        before = served.app.statuses[403]
        ask(served, "evil.test")
        assert served.app.statuses[403] == before + 1


def test_many_names_are_not_kept():
    with serving(double) as served:
        for port in range(400):
            assert ask(served, f"localhost:{port}") == 200
        assert ask(served, "evil.test") == 403


def test_on_other_addresses():
    with serving(double, hosts=["models.test", "Other.Test"]) as served:
        served.app.guard.bind("0.0.0.0")  # as if it listened there
        for host in (*LOCAL, *ADDRESSES, "models.test", "models.test:8000", "OTHER.test"):
            assert ask(served, host) == 200, host
        for host in STRANGE:
            assert ask(served, host) == 403, host


def test_the_name_on_which_it_listens():
    with serving(double) as served:
        served.app.guard.bind("models.internal")
        assert [ask(served, host) for host in ("models.internal:8000", "10.1.2.3", "evil.test")] == [200, 200, 403]
        served.app.guard.bind("localhost")
        assert [ask(served, host) for host in ("localhost", "10.1.2.3", "models.test")] == [200, 403, 403]


def test_names_that_are_given():
    with serving(double, hosts=["models.test"]) as served:
        assert [ask(served, host) for host in ("models.test", "localhost", "evil.test", "10.1.2.3")] == [
            200,
            200,
            403,
            403,
        ]


def test_a_token_protects_under_any_name():
    with serving(double, token="secret") as served:
        for host in ("evil.test", "10.1.2.3", "localhost"):
            assert served.ask("GET", "/v2", None, {"Host": host})[0] == 401
            assert served.ask("GET", "/v2", None, {"Host": host, "Authorization": "Bearer secret"})[0] == 200
            assert ask(served, host, "GET", "/") == 200  # the page's own files


@pytest.mark.parametrize(
    ("server", "host", "status"),
    [
        (("127.0.0.1", 80), b"localhost", 200), (("127.0.0.1", 80), b"evil.test", 403), (("10.0.0.5", 80), b"10.0.0.5", 200),
        (("10.0.0.5", 80), b"evil.test", 403), (("testserver", 80), b"testserver", 200), (("/run/socket", None), b"any", 200),
        (None, b"any", 200), (("::1", 80), b"[::1]", 200), (("::ffff:127.0.0.1", 80), b"evil.test", 403),
    ],
)  # fmt: skip
def test_under_another_server_the_address_of_the_connection_counts(server, host, status):
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v2", "headers": [(b"host", host)], "server": server}
    asyncio.run(weft.serve.app(double)(scope, receive, send))
    assert sent[0]["status"] == status
