"""Strangers: they may take the address of a server that died, or knock at one that lives; they learn nothing and delay nobody."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import stat
import tempfile
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from support.libraries import need

need("msgspec")
need("optree")

from support.ray_local import SECRET, greet, local, peer_of  # noqa: E402

from weft import errors  # noqa: E402
from weft.ray import client as clients  # noqa: E402
from weft.ray import connect, frames, local_sockets  # noqa: E402
from weft.ray import server as servers  # noqa: E402
from weft.ray.connect import Peer  # noqa: E402
from weft.ray.frames import Kind  # noqa: E402
from weft.ray.handshake import Secret, ServerHandshake  # noqa: E402
from weft.ray.link import Link  # noqa: E402
from weft.ray.loop_link import LoopLink  # noqa: E402
from weft.ray.server import Server  # noqa: E402

X = np.ones((1, 1))


def make_double():
    return lambda x: 2 * x


class Handler:
    def load(self):
        return frames.Load()

    def closed(self, connection):
        pass


@pytest.fixture
def server():
    found = Server(Handler(), SECRET, "127.0.0.1")
    yield found
    found.stop()


class Impostor:
    """Listens at an address, notes what it gets, and answers each connection by a function of its socket."""

    def __init__(self, address, answer):
        self.got, self._answer = [], answer
        self._listening = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listening.bind(address)
        self._listening.listen()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            with sock, suppress(OSError):
                sock.settimeout(20)
                self.got.append(sock.recv(4096))
                self._answer(self, sock)

    def wait(self, sock):
        self._over.wait(20)

    def stop(self):
        self._over.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(20)


def silence(self, sock):
    self.wait(sock)


def garbage(self, sock):
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)


def an_error(self, sock):
    sock.sendall(frames.pack(Kind.ERROR, 0, b"\x93\xb6FailedPreconditionError\xa2no\x90")[0])


def a_huge_frame(self, sock):
    sock.sendall(frames.HEADER.pack(2**31, Kind.HELLO, 0, 2**40))
    with suppress(OSError):
        while True:
            sock.sendall(bytes(1 << 16))


def drops(self, sock):
    """A byte now and then, for ever."""
    for byte in frames.HEADER.pack(97, Kind.HELLO, 0, 0) + bytes(1000):
        if self._over.wait(0.02):
            return
        sock.sendall(bytes([byte]))


def another_secret(self, sock):
    """Some server of another deployment."""
    hello = self.got[-1][frames.HEADER.size :]
    sock.sendall(frames.pack(Kind.HELLO, 0, ServerHandshake(Secret.new(), "any", "0.1.0").challenge(hello))[0])
    self.got.append(sock.recv(4096))


def reflection(self, sock):
    sock.sendall(self.got[-1])
    self.got.append(sock.recv(4096))


def an_end(self, sock):
    pass


ANSWERS = [silence, garbage, an_error, a_huge_frame, drops, another_secret, reflection, an_end]


@contextmanager
def taken(deployment, index, answer, monkeypatch):
    """A stranger that listens where a replica did that has died, while the keeper does not know it yet."""
    policy = deployment.handle
    policy._client.refresh()
    replica = deployment.replicas[index]
    addresses = replica.server.addresses
    member = deployment.keeper.members[index]
    monkeypatch.setattr(deployment.keeper, "_remove", lambda member: None)
    replica.server.stop()
    os.makedirs(os.path.dirname(addresses[0]))
    impostors = [Impostor(address, answer) for address in addresses]
    deployment.keeper.members[index] = member
    try:
        yield impostors
    finally:
        policy._client.disconnect()
        for impostor in impostors:
            impostor.stop()
        shutil.rmtree(os.path.dirname(addresses[0]))


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
@pytest.mark.parametrize("is_task", [False, True])
def test_a_stranger_with_the_address_of_a_replica_that_died(answer, is_task, monkeypatch):
    """It gets a nonce, and the calls go to the other replica."""
    monkeypatch.setattr(connect, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(clients, "PATIENCE_SECONDS", 0.05)
    with local(make_double, replicas=2) as deployment, taken(deployment, 0, answer, monkeypatch) as impostors:
        policy = deployment.handle
        began = time.monotonic()
        if is_task:

            async def main():
                return [await policy.aio(X) for _ in range(20)]

            answers = asyncio.run(main())
        else:
            answers = [policy(X) for _ in range(20)]
        assert [each.item() for each in answers] == [2.0] * 20
        assert time.monotonic() - began < 10
        got = b"".join(part for impostor in impostors for part in impostor.got)
        for size in (8, 16, 32):
            assert SECRET.reveal()[:size] not in got
        assert len(got) < 2000  # hellos, and no call


@pytest.mark.parametrize("is_task", [False, True])
def test_a_silent_stranger_alone_costs_a_call_no_more_than_its_deadline(is_task, monkeypatch):
    with local(make_double) as deployment, taken(deployment, 0, silence, monkeypatch):
        policy = deployment.handle
        began = time.monotonic()
        with pytest.raises(errors.DeadlineExceededError, match="no connection to a replica"):
            asyncio.run(_call(policy, 0.2)) if is_task else policy.call(X, deadline=0.2)
        assert time.monotonic() - began < 4  # and not the 5 s that a replica that has the call gets in addition


async def _call(policy, deadline):
    return await policy.aio.call(X, deadline=deadline)


def test_a_silent_stranger_alone_costs_a_call_without_a_deadline_no_more_than_the_time_to_connect(monkeypatch):
    monkeypatch.setattr(connect, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(clients, "RESTART_SECONDS", 0.2)
    with local(make_double) as deployment, taken(deployment, 0, silence, monkeypatch):
        with pytest.raises(errors.UnavailableError, match="no replica of net is alive"):
            deployment.handle(X)
        with pytest.raises(errors.UnavailableError, match="no replica of net is alive"):
            asyncio.run(deployment.handle.aio(X))


def test_a_stranger_that_passes_all_on_to_another_replica(monkeypatch):
    """The dead one's id is what the living one does not prove."""

    def relay(self, sock):
        with socket.socket(socket.AF_UNIX) as onward:
            onward.settimeout(20)
            onward.connect(living)
            onward.sendall(self.got[-1])
            sock.sendall(onward.recv(4096))
            self.got.append(sock.recv(4096))

    with local(make_double, replicas=2) as deployment:
        living = deployment.replicas[1].server.unix
        with taken(deployment, 0, relay, monkeypatch) as impostors:
            for _ in range(10):
                assert deployment.handle(X).item() == 2.0
            assert any(impostor.got for impostor in impostors)
            assert all(len(part) < 100 for impostor in impostors for part in impostor.got)  # hellos and ends, no proof


def test_a_stranger_in_the_keepers_place(monkeypatch):
    monkeypatch.setattr(connect, "CONNECT_SECONDS", 0.1)
    with local(make_double) as deployment:
        policy = deployment.handle
        addresses = deployment.keeper.server.addresses
        deployment.keeper.server.stop()
        os.makedirs(os.path.dirname(addresses[0]))
        impostors = [Impostor(address, another_secret) for address in addresses]
        try:
            for call in (policy.step, policy.statistics, lambda: policy(X)):
                with pytest.raises(
                    errors.UnavailableError, match=r"net is gone: .*does not prove that it knows the secret"
                ):
                    call()
        finally:
            for impostor in impostors:
                impostor.stop()
            shutil.rmtree(os.path.dirname(addresses[0]))


def test_a_silent_keeper_keeps_many_threads_no_longer_than_one(monkeypatch):
    monkeypatch.setattr(connect, "CONNECT_SECONDS", 0.5)
    with local(make_double) as deployment, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        found = clients.Client(deployment.handle._description)
        found.description = pickle.loads(pickle.dumps(deployment.handle))._description
        found.description.keeper = [silent.getsockname()]
        problems = []

        def ask():
            with pytest.raises(errors.UnavailableError, match=r"no answer within 0\.5 s"):
                found.ask_keeper("where")
            problems.append(1)

        began = time.monotonic()
        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(problems) == 16
        assert time.monotonic() - began < 5
        with pytest.raises(errors.DeadlineExceededError):
            found.ask_keeper("where", seconds=0.05)


# --- at the server ---


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_client_with_another_secret_or_another_server_in_mind(server, kind):
    for wrong in ({"secret": Secret.new()}, {"id": "another"}):
        peer = peer_of(server, addresses=[getattr(server, kind)], **wrong)
        with pytest.raises(errors.UnavailableError, match="does not prove that it knows the secret"):
            Link(peer)
        with pytest.raises(errors.UnavailableError, match="does not prove that it knows the secret"):
            asyncio.run(LoopLink.open(peer))
    assert not server.connections


def test_news_are_for_those_who_have_proved_themselves(server):
    with socket.socket() as sock, socket.socket() as other:
        for each in (sock, other):
            each.settimeout(20)
            each.connect(server.tcp)
        greet(other, peer_of(server))
        hello = bytes([1]) + bytes(40)
        sock.sendall(frames.pack(Kind.HELLO, 0, hello)[0])
        challenge = sock.recv(4096)
        server.loop.call_soon_threadsafe(server.notify, ["updated", {"deadline": 1.0}])
        assert b"updated" in other.recv(4096)
        server.call(asyncio.sleep(0)).result(20)  # what was written in that turn is sent
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(4096)
        assert SECRET.reveal() not in challenge


def test_a_stranger_has_a_time_limit_also_in_the_middle(server, monkeypatch):
    monkeypatch.setattr(servers, "GREETING_SECONDS", 0.1)
    for first in (b"", frames.pack(Kind.HELLO, 0, bytes([1]) + bytes(40))[0], b"\0" * 10):
        with socket.socket() as sock:
            sock.settimeout(20)
            sock.connect(server.tcp)
            sock.sendall(first)
            with suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
    until = time.monotonic() + 20
    while server.strangers:
        assert time.monotonic() < until
    assert not server.connections


def test_what_a_stranger_may_send_is_little(server):
    with socket.socket() as sock:
        sock.settimeout(20)
        sock.connect(server.tcp)
        until = time.monotonic() + 20
        while not server.strangers:
            assert time.monotonic() < until
        (stranger,) = server.strangers
        assert len(stranger._reader.room()) < 1000
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            sock.sendall((frames.HEADER.pack(60_000, Kind.HELLO, 0, 0) + bytes(60_000)) * 1000)
        assert len(stranger._reader.room()) < 1000


def test_strangers_from_elsewhere_do_not_push_out_processes_of_this_user(server, monkeypatch):
    monkeypatch.setattr(servers, "MOST_STRANGERS", 4)
    with socket.socket(socket.AF_UNIX) as mine:
        mine.settimeout(20)
        mine.connect(server.unix)
        others = [socket.create_connection(server.tcp) for _ in range(20)]
        greet(others[-1], peer_of(server))  # all before it are accepted
        assert len(server.strangers) <= 5
        greet(mine, peer_of(server))
        for each in others:
            each.close()


# --- Unix sockets ---


def test_a_socket_lies_in_a_folder_of_this_user_alone(server):
    folder = os.path.dirname(server.unix)
    assert stat.S_IMODE(os.lstat(folder).st_mode) == 0o700
    assert os.lstat(folder).st_uid == os.geteuid()
    assert server.unix[0] == "/"  # no name that all processes of the machine see
    assert len(os.fsencode(server.unix)) <= local_sockets.MOST_PATH
    server.stop()
    assert not os.path.exists(folder)


def test_only_loopback_addresses_beside_it(server):
    assert server.addresses == [server.unix, server.tcp]
    assert server.tcp[0] == "127.0.0.1"
    names = [sock.getsockname() for each in server._listening for sock in each.sockets]
    assert sorted(names, key=str) == sorted([server.unix, server.tcp], key=str)


def test_a_long_temporary_folder(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    path = local_sockets.new_path()
    assert path.startswith("/tmp/weft-")
    assert not list(long.iterdir())
    local_sockets.remove(path)
    assert not os.path.exists(os.path.dirname(path))


def test_no_place_for_a_socket(monkeypatch):
    def fail(**_):
        raise PermissionError

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    assert local_sockets.new_path() is None
    found = Server(Handler(), SECRET, "127.0.0.1")
    assert found.addresses == [found.tcp]
    Link(peer_of(found)).close()
    found.stop()


def test_a_file_system_without_sockets(monkeypatch):
    folder = tempfile.mkdtemp()
    monkeypatch.setattr(local_sockets, "new_path", lambda: os.path.join(folder, "x" * 200))
    found = Server(Handler(), SECRET, "127.0.0.1")
    assert found.addresses == [found.tcp]
    assert not os.path.exists(folder)
    found.stop()


def test_sockets_that_were_left_behind_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(local_sockets, "YOUNG_SECONDS", 60.0)
    paths = {}
    for name in ("dead", "young", "alive", "empty", "file", "busy"):
        paths[name] = local_sockets.new_path()
    open_sockets = []
    for name in ("dead", "young", "alive", "busy"):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(paths[name])
        sock.listen(0)
        if name in ("dead", "young"):
            sock.close()
        else:
            open_sockets.append(sock)
    for _ in range(2):  # its queue of connections is full
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect(paths["busy"])
        open_sockets.append(sock)
    open(paths["file"], "w").close()
    link = tmp_path / f"{local_sockets._prefix()}link"
    link.symlink_to(os.path.dirname(paths["dead"]))
    for name, path in paths.items():
        if name != "young":
            os.utime(os.path.dirname(path), (0, 0))
    new = local_sockets.new_path()
    left = {name for name, path in paths.items() if os.path.exists(os.path.dirname(path))}
    assert left == {"young", "alive", "file", "busy"}
    assert os.path.exists(os.path.dirname(new))
    for sock in open_sockets:
        sock.close()


def test_users_are_compared_at_both_ends(server, monkeypatch):
    sent, users = [], [os.geteuid() + 1]
    monkeypatch.setattr(local_sockets, "peer_user", lambda sock: users[0])
    with pytest.raises(errors.UnavailableError, match=r"another user \(id \d+\) listens there"):
        Link(peer_of(server, addresses=[server.unix]))
    Link(peer_of(server)).close()  # by TCP, where the secret decides
    users[0] = 0  # the superuser
    Link(peer_of(server, addresses=[server.unix])).close()
    users[0] = None  # a system that does not tell
    Link(peer_of(server, addresses=[server.unix])).close()
    users[0] = os.geteuid() + 1
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(server.unix)
        with suppress(ConnectionResetError, BrokenPipeError):
            sent.append(sock.send(frames.pack(Kind.HELLO, 0, bytes([1]) + bytes(40))[0]))
            assert sock.recv(100) == b""
    assert not server.strangers


def test_the_system_tells_the_user():
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert local_sockets.peer_user(here) == (os.geteuid() if hasattr(socket, "SO_PEERCRED") else None)
        assert local_sockets.is_own(there)


# --- the secret ---


def test_the_secret_is_in_no_repr():
    with local(make_double) as deployment:
        policy = deployment.handle
        policy(X)
        found = policy._client
        remote = found._table[0][0]
        shown = [
            policy,
            policy._description,
            found,
            remote,
            remote.peer,
            remote.link,
            deployment.keeper,
            deployment.replicas[0],
        ]
        shown += [deployment.keeper.server, *map(vars, (found, deployment.keeper, deployment.keeper.server, remote))]
        for each in shown:
            assert "ssss" not in repr(each)
        assert b"ssss" in pickle.dumps(policy)  # a pickled handle is what gives access
        assert pickle.loads(pickle.dumps(policy))(X).item() == 2.0


def test_what_cannot_be_reached_names_each_address_and_its_problem(tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        path, port = str(tmp_path / "none"), closed.getsockname()[1]
        with pytest.raises(errors.UnavailableError) as found:
            Link(Peer("replica 0", "id", [path, ("127.0.0.1", port)], SECRET))
    text = str(found.value)
    assert f"replica 0 cannot be reached: {path}: FileNotFoundError" in text
    assert f"127.0.0.1:{port}: ConnectionRefusedError" in text
    assert "network=True" in text
