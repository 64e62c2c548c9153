"""Replies in one piece: the same bytes as uvicorn's own way to send them."""

from __future__ import annotations

import re

import pytest
from support.serving import need_server, read_all, serving

import weft

need_server()

REQUESTS = [
    b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"HEAD /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET /nothing HTTP/1.0\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\nGET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"POST /v2/models/f/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /v2/models/f/infer HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
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
