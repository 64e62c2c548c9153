"""Hostile neighbours: whatever a socket gets, nothing hangs, memory stays bounded, and others are answered."""

from __future__ import annotations

import gc
import resource
import socket
import struct
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from support.libraries import need

need("msgspec")
need("optree")

import msgspec  # noqa: E402
from support.ray_local import greet, local, peer_of  # noqa: E402

from weft import errors  # noqa: E402
from weft.ray import replica as replicas  # noqa: E402
from weft.ray import server as servers  # noqa: E402
from weft.ray.frames import HEADER, MOST_ARRAYS, FrameReader, Kind  # noqa: E402

encode = msgspec.msgpack.encode


@pytest.fixture(scope="module")
def deployment():
    with local(lambda: np.tanh) as found:
        yield found


def answers(deployment):
    """A call of an honest client is answered, soon."""
    began = time.monotonic()
    np.testing.assert_allclose(deployment.handle.call(np.ones((1, 2)), deadline=20.0), np.tanh(np.ones((1, 2))))
    assert time.monotonic() - began < 20


@contextmanager
def stranger(deployment, first=b"", is_known=False):
    """A socket that is connected to the replica."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(deployment.replicas[0].server.unix)
        if is_known:
            greet(sock, peer_of(deployment.replicas[0].server))
        with suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(first)
        yield sock


def read(sock):
    """The next frames; none if the other side has closed the connection."""
    reader = FrameReader(MOST_ARRAYS)
    found = []
    while not found:
        try:
            got = sock.recv_into(reader.room())
        except ConnectionResetError:
            got = 0
        if not got:
            return []
        found = reader.advance(got)
    return found


def frame(kind, message, arrays=b"", number=7):
    return HEADER.pack(len(message), kind, number, len(arrays)) + message + arrays


def call(specs, arrays=b"", tree=0, flags=0, **more):
    return frame(Kind.CALL, encode([flags, tree, specs, *more.values()]), arrays)


def nested(depth):
    data = encode(1)
    for _ in range(depth):
        data = encode(msgspec.msgpack.Ext(2, b"\x91" + data))
    return msgspec.Raw(data)


FLOAT = ["numpy", "<f4", [1, 2], False]
NO_HELLO = [
    b"",
    b"\0",
    HEADER.pack(100, Kind.HELLO, 1, 0),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    frame(Kind.HELLO, b"\xc1" * 30),
    frame(Kind.HELLO, b""),
    frame(Kind.HELLO, bytes([1]) + bytes(400)),
    frame(Kind.HELLO, bytes([2]) + bytes(40)),
    frame(Kind.HELLO, bytes([1]) + bytes(40)) * 2,
    frame(Kind.HELLO, bytes([1]) + bytes(40)) + frame(Kind.HELLO, bytes(32)),
    frame(Kind.HELLO, bytes([1]) + bytes(40)) + frame(Kind.CALL, b""),
    frame(Kind.HELLO, bytes([1]) + bytes(40), bytes(8)),
    frame(Kind.CALL, b""),
    HEADER.pack(2**32 - 1, Kind.HELLO, 1, 2**64 - 1),
]
AFTER_HELLO = [
    frame(0, b""),
    frame(255, b""),
    frame(Kind.HELLO, bytes([1]) + bytes(40)),
    frame(Kind.RESULT, encode([])),
    frame(Kind.CALL, b""),
    frame(Kind.CALL, b"\xc1"),
    frame(Kind.CALL, encode({"flags": 1})),
    frame(Kind.CALL, encode(["x", 0, []])),
    call([]),
    call([["numpy", "<f4", [-1, 2], False]], bytes(8)),
    call([["numpy", "<f4", [2**62, 2**62], False]], bytes(8)),
    call([["numpy", "<f4", [0, 2**62], False]]),
    call([["torch", "float32", [0, 2**63 - 1], False]]),
    call([["torch", "Tensor", [1, 2], False]], bytes(8)),
    call([["numpy", "O", [1], False]], bytes(8)),
    call([["numpy", "nothing", [1], False]], bytes(8)),
    call([["numpy", "S0", [2**40], False]]),
    call([FLOAT] * 10_000, bytes(8)),
    call([["numpy", "<f4", [0], False]] * 70_000),
    call([FLOAT], bytes(9)),
    call([FLOAT], bytes(8), tree=[msgspec.msgpack.Ext(1, struct.pack("<I", 5))]),
    call([FLOAT], bytes(8), tree=[msgspec.msgpack.Ext(1, b"")]),
    call([FLOAT], bytes(8), tree=[msgspec.msgpack.Ext(77, b"")]),
    call([FLOAT], bytes(8), tree=[msgspec.msgpack.Ext(4, encode(["O", b""]))]),
    call([FLOAT], bytes(8), tree=[msgspec.msgpack.Ext(5, encode(["os", "system", {}]))]),
    call([FLOAT], bytes(8), tree=[msgspec.msgpack.Ext(5, b"\x01")]),
    call([FLOAT], bytes(8), tree=nested(900)),
    call([FLOAT], bytes(8), tree=nested(5000)),
    call([FLOAT], bytes(8), flags=1, deadline=-1.0),
    call([FLOAT], bytes(8), deadline=None, priority="highest"),
    call([FLOAT], bytes(8), deadline=None, priority=None, caller=None, autocast="Tensor"),
    frame(Kind.BACKWARD, encode([1, 0, []])),
    frame(Kind.BACKWARD, b"\xc1"),
    frame(Kind.ASK, encode(["__init__", None])),
    frame(Kind.ASK, encode(["commit", 3])),
    frame(Kind.ASK, encode(["prepare", "x"])),
    frame(Kind.ASK, encode(["update", {"max_batch_size": -1}])),
    HEADER.pack(2**32 - 1, Kind.CALL, 1, 0),
    HEADER.pack(0, Kind.CALL, 1, 1 << 41),
]


def test_strangers_learn_and_change_nothing(deployment, monkeypatch):
    monkeypatch.setattr(servers, "GREETING_SECONDS", 0.05)
    for first in NO_HELLO:
        with stranger(deployment, first) as sock:
            while found := read(sock):
                assert [each.kind for each in found] == [Kind.HELLO]  # a challenge tells nothing
    answers(deployment)
    assert not deployment.replicas[0].server.strangers


def test_many_strangers_at_once(deployment, monkeypatch):
    monkeypatch.setattr(servers, "MOST_STRANGERS", 8)
    held = []
    try:
        for _ in range(40):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(deployment.replicas[0].server.unix)
            held.append(sock)
        with stranger(deployment, is_known=True):
            assert len(deployment.replicas[0].server.strangers) <= 8
        answers(deployment)
    finally:
        for sock in held:
            sock.close()


@pytest.mark.parametrize("index", range(len(AFTER_HELLO)))
def test_nonsense_of_a_client_that_knows_the_secret(deployment, index):
    with stranger(deployment, AFTER_HELLO[index], is_known=True) as sock:
        assert [each.kind for each in read(sock)] in ([], [Kind.ERROR])
    answers(deployment)


@pytest.mark.parametrize("size", [10, 1000, 1 << 20])
def test_half_frames(deployment, size):
    """A client that is killed while it sends; what the header declares takes no memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = []
    for declared in (size + 1, 1 << 26, 1 << 31):
        held.append(stranger(deployment, HEADER.pack(0, Kind.CALL, 1, declared) + bytes(size), is_known=True))
        held[-1].__enter__()
    answers(deployment)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    for each in held:
        each.__exit__(None, None, None)
    answers(deployment)


def test_a_client_that_reads_no_answers(deployment, monkeypatch):
    monkeypatch.setattr(servers, "MOST_UNSENT", 1 << 16)
    server = deployment.replicas[0].server
    with stranger(deployment, is_known=True) as sock:
        (mine,) = [each for each in server.connections if each._transport.get_write_buffer_limits()[1] == 1 << 16]
        sock.setblocking(False)
        data = memoryview(b"".join([HEADER.pack(0, Kind.PING, 0, 0), call([FLOAT], bytes(8))] * 500))
        sent, until = 0, time.monotonic() + 20
        while not mine.is_paused:  # it is not read from any more
            assert time.monotonic() < until
            with suppress(BlockingIOError):
                sent += sock.send(data[sent % len(data) :])
        answers(deployment)
        assert mine._transport.get_write_buffer_size() < 10_000_000
    until = time.monotonic() + 20
    while mine in server.connections:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_too_many_requests_and_results(deployment, monkeypatch):
    monkeypatch.setattr(servers, "MOST_REQUESTS", 0)
    with stranger(deployment, call([FLOAT], bytes(8)), is_known=True) as sock:
        assert b"ResourceExhausted" in read(sock)[0].message
    monkeypatch.undo()
    monkeypatch.setattr(replicas, "MOST_KEPT", 1)
    with local(lambda: np.tanh, vjp=lambda x: (np.tanh(x), lambda g: g)) as other:
        x = np.ones((1, 2))
        _, pull_back = other.handle.vjp(x)
        with pytest.raises(errors.ResourceExhaustedError, match="backward"):
            other.handle.vjp(x)
        del pull_back
        gc.collect()
        other.handle.vjp(x)


@pytest.mark.slow
def test_a_million_pings(deployment):
    ping = HEADER.pack(0, Kind.PING, 0, 0) * 10_000
    with stranger(deployment, is_known=True) as sock:
        reader, seen = FrameReader(MOST_ARRAYS), 0
        for _ in range(100):
            sock.sendall(ping)
            answers(deployment)
            while seen < 10_000:
                seen += len(reader.advance(sock.recv_into(reader.room())))
            seen -= 10_000
