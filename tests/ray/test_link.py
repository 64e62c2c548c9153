"""Links and servers: many requests at once, silence, strangers, ends."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from support.libraries import need

need("msgspec")

from support.ray_local import SECRET, peer_of  # noqa: E402

from weft import errors  # noqa: E402
from weft.ray import connect, frames, link  # noqa: E402
from weft.ray.connect import Peer  # noqa: E402
from weft.ray.frames import Kind, Load  # noqa: E402
from weft.ray.handshake import Secret  # noqa: E402
from weft.ray.link import Link  # noqa: E402
from weft.ray.loop_link import LoopLink  # noqa: E402
from weft.ray.requests import Pending, decode_done  # noqa: E402
from weft.ray.server import Server  # noqa: E402
from weft.ray.values import unpack_arrays  # noqa: E402


class Echo:
    """Answers with what it is given."""

    def __init__(self):
        self.gone = threading.Event()
        self.held = []

    def load(self):
        return Load()

    def handle(self, connection, frame):
        self.held.append((connection, frame))

    async def ask(self, connection, method, given, arrays):
        if method == "fail":
            raise errors.NotFoundError("nothing here")
        return given, arrays

    def closed(self, connection):
        self.gone.set()


@pytest.fixture
def echo():
    found = Echo()
    found.server = Server(found, SECRET, "127.0.0.1")
    yield found
    found.server.stop()


def ask(connected, given, arrays=()):
    frame = connected.wait(connected.ask("echo", given, arrays), time.monotonic() + 30)
    message = decode_done(frame.message)
    return message.value, unpack_arrays(message.arrays, frame.arrays)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_many_threads_share_a_link(echo, kind):
    connected = Link(peer_of(echo.server, addresses=[getattr(echo.server, kind)]))
    wrong = []

    def work(i):
        for n in range(50):
            x = np.full((i + 1, 3), n)
            value, (y,) = ask(connected, [i, n], [x])
            if value != [i, n] or not np.array_equal(x, y):
                wrong.append((i, n))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not connected._pending
    connected.close()
    assert echo.gone.wait(10)


def test_large_frames_in_both_directions_at_once(echo):
    connected = Link(peer_of(echo.server))
    big = np.random.default_rng(0).integers(0, 255, (3, 1 << 20), np.uint8)
    pending = [connected.ask("echo", i, [big]) for i in range(8)]  # nobody reads meanwhile
    for i, each in enumerate(pending):
        frame = connected.wait(each, time.monotonic() + 60)
        message = decode_done(frame.message)
        assert message.value == i
        np.testing.assert_array_equal(unpack_arrays(message.arrays, frame.arrays)[0], big)
    connected.close()


def test_an_error_is_the_callers_own(echo):
    connected = Link(peer_of(echo.server))
    with pytest.raises(errors.NotFoundError, match="nothing here"):
        connected.wait(connected.ask("fail"))
    assert ask(connected, 1) == (1, [])
    connected.close()


def test_a_deadline_ends_a_wait_and_the_link_goes_on(echo):
    connected = Link(peer_of(echo.server))
    with pytest.raises(errors.DeadlineExceededError):
        connected.wait(connected.request(Kind.CALL, []), time.monotonic() + 0.02)
    assert ask(connected, 2) == (2, [])
    kinds = [frame.kind for _, frame in echo.held]
    assert kinds == [Kind.CALL, Kind.DROP]  # the server is told
    connected.close()


def test_a_server_that_ends_ends_all_waits(echo):
    connected = Link(peer_of(echo.server, name="the server"))
    found = []

    def wait():
        try:
            connected.wait(connected.request(Kind.CALL, []))
        except errors.UnavailableError as error:
            found.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(echo.held) < 4:
        time.sleep(0.001)
    echo.server.stop()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert "the server is gone" in found[0]
    with pytest.raises(errors.UnavailableError):
        connected.ask("echo")


def test_a_silent_server_is_given_up(echo, monkeypatch):
    monkeypatch.setattr(link, "PING_SECONDS", 0.01)
    connected = Link(peer_of(echo.server))
    heard, until = connected._heard, time.monotonic() + 30
    while connected._heard == heard:  # until it answers a ping
        assert time.monotonic() < until
        with pytest.raises(errors.DeadlineExceededError):
            connected.wait(connected.request(Kind.CALL, []), time.monotonic() + 0.05)
    monkeypatch.setattr(link, "DEAD_SECONDS", 0.1)
    blocked = threading.Event()
    echo.server.loop.call_soon_threadsafe(blocked.wait, 10)
    with pytest.raises(errors.UnavailableError, match="silent"):
        connected.wait(connected.request(Kind.CALL, []))
    assert connected.is_given_up
    blocked.set()


def test_a_server_is_given_up_that_falls_silent_while_nobody_asks(echo, monkeypatch):
    monkeypatch.setattr(link, "PING_SECONDS", 0.01)
    connected = Link(peer_of(echo.server))
    heard, until = connected._heard, time.monotonic() + 30
    while connected._heard == heard:  # until it answers a ping
        assert time.monotonic() < until
        connected.listen(0.01)
    monkeypatch.setattr(link, "DEAD_SECONDS", 0.1)
    blocked = threading.Event()
    echo.server.loop.call_soon_threadsafe(blocked.wait, 10)
    while connected.broken is None:
        assert time.monotonic() < until
        connected.listen(0.01)
    assert connected.is_given_up
    connected.listen(0.01)
    blocked.set()


def test_a_server_that_does_not_greet(monkeypatch):
    """The process is stopped: the system accepts the connection, and nobody answers."""
    monkeypatch.setattr(connect, "CONNECT_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind("")  # a name that the system chooses
        stopped.listen()
        address = stopped.getsockname().decode()
        with pytest.raises(errors.UnavailableError, match=r"the server cannot be reached: .*no answer within 0\.05 s"):
            Link(Peer("the server", "id", [address], SECRET))


def test_what_came_before_the_end_is_read(echo):
    notices = []
    connected = Link(peer_of(echo.server), lambda _, news: notices.append(news))
    echo.server.loop.call_soon_threadsafe(echo.server.notify, ["held", 3])
    echo.server.stop()
    with pytest.raises(errors.UnavailableError):
        connected.ask("echo")
    assert notices == [["held", 3]]
    assert connected._socket.fileno() == -1


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
        frames.pack(Kind.PING, 1, b"")[0],
        frames.HEADER.pack(0, Kind.HELLO, 1, 1 << 39),
    ],
)
def test_strangers_are_turned_away(echo, first):
    with socket.socket(socket.AF_INET) as stranger:
        stranger.settimeout(10)
        stranger.connect(echo.server.tcp)
        stranger.sendall(first)
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert not echo.held


def test_a_drop_does_not_cut_a_frame_that_is_half_sent(echo, monkeypatch):
    connected = Link(peer_of(echo.server))
    real = connected._socket

    class Half:
        """A socket that takes half a frame, while a finalizer drops a result."""

        def __getattr__(self, name):
            return getattr(real, name)

        def send(self, data):
            connected._drops.append((5, 0))
            return real.send(memoryview(data)[: len(data) // 2])

    monkeypatch.setattr(connected, "_socket", Half())
    assert ask(connected, [1, 2]) == ([1, 2], [])
    assert [frame.kind for _, frame in echo.held] == [Kind.DROP]
    connected.close()


def test_an_interrupt_in_the_middle_of_a_frame_ends_the_link(echo, monkeypatch):
    for place in ("_read", "_send"):
        connected = Link(peer_of(echo.server))

        def interrupt(*_):
            raise KeyboardInterrupt

        if place == "_read":
            monkeypatch.setattr(connected._reader, "advance", interrupt)
        else:
            monkeypatch.setattr(connected, "_send_all", interrupt)
            connected._unsent.append(memoryview(b"x"))
        with pytest.raises(KeyboardInterrupt):
            ask(connected, 1)
        with pytest.raises(errors.UnavailableError, match="interrupted"):
            ask(connected, 2)
        assert connected._socket.fileno() == -1


def test_a_thread_looks_again_before_it_sleeps(echo):
    connected = Link(peer_of(echo.server))
    pending = Pending(connected, 99)
    pending.wake()  # nobody sleeps yet
    began = time.monotonic()
    pending.sleep(30)
    pending.wake()
    pending.sleep(30)
    assert time.monotonic() - began < 20
    connected.close()


def test_a_task_waits_until_its_deadline(echo):
    async def main():
        connected = await LoopLink.open(peer_of(echo.server))
        pending = connected.request(Kind.CALL, [])
        with pytest.raises(errors.DeadlineExceededError):
            await pending.wait(time.monotonic() + 0.02)
        while len(echo.held) < 2:
            await asyncio.sleep(0.001)
        assert [frame.kind for _, frame in echo.held] == [Kind.CALL, Kind.DROP]
        return connected

    connected = asyncio.run(main())
    with pytest.raises(errors.UnavailableError):  # from another thread, after the loop's end
        connected.request(Kind.CALL, [])


def test_the_wrong_secret(echo):
    with pytest.raises(errors.UnavailableError, match="secret"):
        Link(peer_of(echo.server, secret=Secret(b"w" * 32)))


def test_another_version_of_weft(echo, monkeypatch):
    monkeypatch.setattr(connect, "own_text", lambda: "0.0.9 (protocol 1)")
    with pytest.raises(
        errors.FailedPreconditionError, match=r"the handle's is 0\.0\.9 \(protocol 1\), the replicas' is"
    ):
        Link(peer_of(echo.server))
    assert not echo.server.connections
