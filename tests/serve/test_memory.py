"""Clients that send without reading: what a server holds of it stays within 100 MiB, and others are answered meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.serving import need_server

need_server()

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import attack_serve as attacks  # noqa: E402

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A process that serves a model, and its port. Its peak of memory is that of all attacks so far."""
    command = attacks.command(tmp_path_factory.mktemp("served"))
    with attacks.running([*command, "--access-log", "none"]) as found:
        yield found


CHUNKS = attacks.post(attacks.INFER, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"1\r\n \r\n"
CASES = {
    "gets": (attacks.get("/v2"), 1, 0),
    "what is not there": (attacks.get("/nothing"), 1, 0),
    "calls": (attacks.post(attacks.INFER, attacks.DIGITS), 1, 0),
    "gets of many": (attacks.get("/v2"), 100, 0),
    "metrics of many": (attacks.get("/metrics"), 100, 0),
    "calls of many": (attacks.post(attacks.INFER, attacks.DIGITS), 100, 0),
    "short ones": (attacks.get("/v2"), 0, 300),
    "calls of short ones": (attacks.post(attacks.INFER, attacks.DIGITS), 0, 300),
    "bodies": (attacks.post(attacks.INFER, bytes(1 << 20)), 1, 0),
    "bodies of many": (attacks.post(attacks.INFER, bytes(1 << 20)), 100, 0),
    "bodies of short ones": (attacks.post(attacks.INFER, bytes(1 << 20)), 0, 300),
    "bodies without end": (attacks.post(attacks.INFER, bytes(1 << 20), 60 << 20), 100, 0),
    "chunks": (CHUNKS, 20, 0),
    "heads without end": (b"GET / HTTP/1.1\r\nX: " + b"y" * 50_000, 100, 0),
    "no HTTP": (b"\x00" * 1000, 100, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_unread(server, name):
    pid, port = server
    request, connections, short = CASES[name]
    opened = attacks.pour(port, request, connections, most=4 << 20, patience=0.3) if connections else []
    attacks.pour_short(port, request, short)
    assert attacks.memory(pid)[1] < 100
    probe = attacks.Probe(port)
    probe.ask()
    assert probe.slowest < 30
    for connection in opened:
        connection.close()
