"""Connections: trailers, a body that waits for leave, other protocols, and random requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from support.serving import need_server, oip, read_all, serving

import weft

need_server()

X = np.arange(3, dtype=np.float32).reshape(1, 3)
BODY = json.dumps(oip(x=X)).encode()
CHUNKED = (
    b"POST /v2/models/f/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n"
    % (
        len(BODY),
        BODY,
    )
)
LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def served():
    with serving(weft.serve.model(lambda x: x * 2, name="f"), limits={"header_bytes": 4096}) as served:
        yield served


def talk(served, *sent):
    """All answers to what is sent until the server closes."""
    connection = served.connect()
    for data in sent:
        try:
            connection.sendall(data)
        except ConnectionError:
            break
    return read_all(connection)


def test_a_trailer_is_no_header(served):
    answers = talk(served, CHUNKED + b"Inference-Header-Content-Length: 5\r\nExpect: 100-continue\r\n\r\n" + LAST)
    assert answers.count(b"200 OK") == 2
    assert b'"data":[0.0,2.0,4.0]' in answers


@pytest.mark.parametrize("endless", [b"a: b\r\n" * 1000, b"a" * 6000, b"a: " + b"b" * 6000])
def test_trailers_have_the_limit_of_headers(served, endless):
    assert talk(served, CHUNKED, *[endless] * 100).startswith(b"HTTP/1.1 431")


def test_what_follows_a_chunk_size_has_a_limit(served):
    head, _, _ = CHUNKED.partition(b"\r\n\r\n")
    assert talk(served, head + b"\r\n\r\n1;a=", *[b"b" * 6000] * 100).startswith(b"HTTP/1.1 431")


def test_small_chunks_in_packets_of_their_own(served):
    head, _, _ = CHUNKED.partition(b"\r\n\r\n")
    chunks = [piece for byte in BODY for piece in (b"1", b"\r\n%c\r\n" % byte)]
    assert b"200 OK" in talk(served, head + b"\r\n\r\n", *chunks, b"0\r\n\r\n", LAST)


def test_a_refusal_before_the_body_ends_the_connection(served):
    """The client waits for leave to send its body: whether it sends it after a refusal is not known."""
    head = (
        b"POST /v2/models/none/infer HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n"
    )
    answer = talk(served, head)
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"connection: close" in answer


def test_a_pipeline_that_ends_with_a_wish_for_http_2_and_a_close(served):
    first = CHUNKED + b"\r\n"
    second = CHUNKED.replace(b"Transfer", b"Connection: upgrade, close\r\nUpgrade: h2c\r\nTransfer") + b"\r\n"
    answers = talk(served, first + second + first)
    assert answers.count(b'"data":[0.0,2.0,4.0]') == 2


@pytest.mark.slow
def test_random_requests():
    sys.path.append(str(Path(__file__).parents[2] / "tools"))
    from fuzz_serve import fuzz

    assert fuzz(5000, seed=0) == []
