"""How a client connects: to the first address of a server at which that server proves itself, within a time limit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, TypeVar

from ..errors import FailedPreconditionError, UnavailableError
from . import frames, local_sockets
from .frames import BadFrame, Kind, Load
from .handshake import ClientHandshake, Secret
from .values import decoder_of

#: How long connecting may take, for all addresses together.
CONNECT_SECONDS = 10.0

_load = decoder_of(Load)
Made = TypeVar("Made")


class Peer(NamedTuple):
    """A server to connect with: what it must prove that it is, and where it may be."""

    name: str  # for errors
    id: str
    addresses: Sequence[Any]  # paths of Unix sockets, and hosts and ports
    secret: Secret


def connect(peer: Peer) -> tuple[socket.socket, Load]:
    """Return a socket that is connected to a server that has proved itself, and the state of its queue."""
    until = time.monotonic() + CONNECT_SECONDS
    problems = []
    for address in peer.addresses:
        sock = None
        try:
            sock = _reach(address, until)
            return sock, _greet(sock, peer, until)
        except (OSError, BadFrame, UnavailableError) as error:
            problems.append(f"{_shown(address)}: {_reason(error)}")
            if sock is not None:
                sock.close()
        except BaseException:
            if sock is not None:
                sock.close()
            raise
    hint = "" if any(map(_is_remote, peer.addresses)) else _HINT
    raise UnavailableError(f"{peer.name} cannot be reached: {'; '.join(problems)}{hint}")


_HINT = ". It answers on its own machine only: where machines join a cluster later, deploy with network=True"


def _is_remote(address: Any) -> bool:
    return not isinstance(address, str) and not str(address[0]).startswith("127.")


def _shown(address: Any) -> str:
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_SECONDS:g} s"
    return str(error) if isinstance(error, UnavailableError) else f"{type(error).__name__}: {error}"


def _reach(address: Any, until: float) -> socket.socket:
    """Return a socket that is connected to an address."""
    is_unix = isinstance(address, str)
    sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(_left(until))
        sock.connect(address if is_unix else tuple(address))
        if is_unix and not local_sockets.is_own(sock):
            raise UnavailableError(f"another user (id {local_sockets.peer_user(sock)}) listens there")
        no_delay(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _greet(sock: socket.socket, peer: Peer, until: float) -> Load:
    """Run the client's side of the handshake; return what the server says when it welcomes the client."""
    handshake = ClientHandshake(peer.secret, peer.id, own_text())
    _send(sock, handshake.hello, until)
    proof = handshake.answer(_receive(sock, until))
    check_text(handshake.server_text)
    _send(sock, proof, until)
    load: Load = _load.decode(_receive(sock, until))
    return load


def _send(sock: socket.socket, message: bytes, until: float) -> None:
    sock.settimeout(_left(until))
    sock.sendall(frames.pack(Kind.HELLO, 0, message)[0])


def _receive(sock: socket.socket, until: float) -> bytes:
    """Return the message of the next frame, and read nothing that comes after it."""
    size, kind, _, arrays = frames.HEADER.unpack(_exactly(sock, frames.HEADER.size, until))
    if kind != Kind.HELLO or arrays or size > frames.MOST_GREETING:
        raise BadFrame("what came is no message of this handshake")
    return _exactly(sock, size, until)


def _exactly(sock: socket.socket, count: int, until: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        sock.settimeout(_left(until))
        part = sock.recv(count - len(data))
        if not part:
            raise UnavailableError("the connection was closed during the handshake")
        data += part
    return bytes(data)


@cache
def own_text() -> str:
    """Return what both sides of a connection must be alike in: the version of weft and of the protocol."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("weft")
    except PackageNotFoundError:
        found = "unknown"
    return f"{found} (protocol {frames.PROTOCOL})"


def check_text(servers: str) -> None:
    """Raise an error if a server is of another version."""
    if servers != own_text():
        raise FailedPreconditionError(
            f"a handle and its replicas must have the same version of weft: the handle's is {own_text()}, the replicas' is "
            f"{servers}; install the same version everywhere"
        )


def no_delay(sock: socket.socket) -> None:
    """Have small frames sent at once, and a machine that is gone noticed."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 10),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 30000),
        ):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def in_thread(make: Callable[[], Made], discard: Callable[[Made], object]) -> Future[Made]:
    """Call a function in a thread of its own; what it returns is discarded if the future was cancelled meanwhile."""
    future: Future[Made] = Future()

    def run() -> None:
        try:
            made = make()
        except BaseException as error:
            with suppress(InvalidStateError):
                future.set_exception(error)
            return
        try:
            future.set_result(made)
        except InvalidStateError:
            discard(made)

    threading.Thread(target=run, name="weft ray connect", daemon=True).start()
    return future
