"""Calls without a task, and replies in one piece: the same bytes as by ASGI, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import re
import threading
import weakref

import numpy as np
import pytest
from support.callers import until
from support.serving import need_server, oip, read_all, serving

import weft

need_server()

REQUESTS = [
    b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"HEAD /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET /nothing HTTP/1.0\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\nGET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"POST /v2/models/f/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /v2/models/f/infer HTTP/1.1\r\nHost: [::1]\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
]


def test_the_installed_uvicorn_is_known():
    from weft.serve import quick

    assert quick.is_known()


@pytest.mark.parametrize("request_", REQUESTS)
def test_the_same_bytes(request_):
    seen = []
    with serving(weft.serve.model(lambda x: x, name="f")) as served:
        for respond in (served.app.respond, None):
            served.app.respond = respond
            connection = served.connect()
            connection.sendall(request_)
            text = read_all(connection)
            head = re.sub(rb"date: [^\r]*\r\n", b"", text)
            seen.append([sorted(line for line in part.split(b"\r\n")) for part in head.split(b"\r\n\r\n")])
    assert seen[0] == seen[1]
    assert seen[0][0]


def test_calls_that_come_together_share_a_batch_in_the_loop():
    threads = set()

    def f(x):
        threads.add(threading.current_thread())
        return x

    request = json.dumps(oip(x=np.ones((1, 2)))).encode()
    head = b"POST /v2/models/f/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with serving(weft.serve.model(f, on_loop=True)) as served:
        connections = [served.connect() for _ in range(8)]
        for connection in connections:  # answered: so the server has accepted all of them
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(1 << 16)

        async def together():  # the loop reads none of them before all are sent
            for connection in connections:
                connection.sendall(head % len(request) + request)

        served.run(together())
        assert all(b"200 OK" in read_all(connection) for connection in connections)
        statistics = served.app.models["f"].statistics()
        assert (statistics.calls, statistics.batches) == (8, 1)
        assert threads == {served.thread}


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError, KeyboardInterrupt, ValueError])
def test_a_lone_call_in_the_loop_whose_function_ends_its_thread(kind):
    def f(x):
        if x[0, 0] == 0:
            raise kind("now")
        return x

    with serving(weft.serve.model(f, on_loop=True)) as served:
        for _ in range(2):
            assert served.ask("POST", "/v2/models/f/infer", oip(x=np.zeros((1, 2))))[0] == 500
            assert served.ask("POST", "/v2/models/f/infer", oip(x=np.ones((1, 2))))[0] == 200
        assert served.app.models["f"].calls == 0


@pytest.mark.parametrize("on_loop", [False, True])
def test_calls_leave_no_garbage(on_loop):
    with serving(weft.serve.model(lambda x: x, name="f", on_loop=on_loop)) as served:
        kept = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)

        def call(times):
            for _ in range(times):
                kept.request("POST", "/v2/models/f/infer", json.dumps(oip(x=np.ones((1, 2)))))
                assert kept.getresponse().read()

        def garbage():
            call(50)
            return gc.collect()

        call(5)
        gc.collect()
        gc.disable()
        try:
            # Not one for each call; threads of other tests may still leave some.
            assert any(garbage() < 50 for _ in range(3))
        finally:
            gc.enable()
            kept.close()


def test_an_idle_connection_keeps_nothing_of_its_last_call():
    results = []

    def large(x):
        y = np.repeat(x, 1000, axis=1)
        results.append(weakref.ref(y))
        return {"y": y[:, :1], "z": y}

    with serving(large) as served:
        kept = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        kept.request("POST", "/v2/models/large/infer", json.dumps(oip(x=np.ones((1, 2)))))
        kept.getresponse().read()
        until(lambda: results[0]() is None)
        kept.close()


def test_bodies_in_pieces_and_whole_ones_get_the_same_answer():
    body = json.dumps(oip(x=np.ones((1, 2)))).encode()
    head = b"POST /v2/models/f/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(weft.serve.model(lambda x: x, name="f")) as served:
        seen = set()
        for pieces in ([head + body], [head, body], [head[:30], head[30:] + body[:9], body[9:]]):
            connection = served.connect()
            for piece in pieces:
                connection.sendall(piece)
                until(lambda: served.app.models["f"].calls == 0)
            seen.add(re.sub(rb"date: [^\r]*\r\n", b"", connection.recv(1 << 16)))
        assert len(seen) == 1
        assert b"200 OK" in seen.pop()


def test_a_token_is_asked_for():
    with serving(weft.serve.model(lambda x: x, name="f"), token="secret") as served:
        body = oip(x=np.ones((1, 2)))
        assert served.ask("POST", "/v2/models/f/infer", body)[0] == 401
        for given, status in (("Bearer secret", 200), ("Bearer secreT", 401), ("Basic secret", 401), ("Bearer", 401)):
            assert served.ask("POST", "/v2/models/f/infer", body, {"Authorization": given})[0] == status
