"""A process's side of a deployment: its links to the replicas and the keeper. All handles of a deployment share one client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from math import inf
from typing import Any, TypeVar

import msgspec

from ..core.fork import on_fork_in_child
from ..errors import CancelledError, DeadlineExceededError, UnavailableError
from . import values
from .connect import Peer, in_thread
from .frames import Load
from .handshake import Secret
from .link import Link
from .loop_link import LoopLink
from .requests import BaseLink, Pending, decode_done
from .routing import Candidate, Router

Made = TypeVar("Made")

#: How long a call waits for a replica to be started again, where none is alive.
RESTART_SECONDS = 30.0
#: How often a client asks for the replicas while some are missing.
REFRESH_SECONDS = 1.0
#: How long a client leaves out a replica whose connection broke, if the keeper still has it.
LOST_SECONDS = 10.0
#: How long a call waits for a connection before it looks whether there is a better replica meanwhile.
PATIENCE_SECONDS = 0.5


class Description(msgspec.Struct, array_like=True):
    """What a handle consists of: everything that a process needs to connect."""

    deployment: str  # a random name
    name: str  # for errors
    secret: Secret
    keeper: list[Any]  # its addresses
    keeper_id: str
    replicas: int = 1
    max_batch_size: int = 64
    parallel: int = 1
    fills: bool = False  # whether batches wait for more rows
    has_rows: bool = True
    wait_backward: bool = True
    deadline: float | None = None
    gradient_deadline: float = 60.0
    version: int = 0  # of the weights, when the handle was made or pickled

    def to_bytes(self) -> bytes:
        """Return what a handle is pickled as. It has the secret: who reads it can call the deployment."""
        return msgspec.msgpack.encode(self, enc_hook=lambda secret: secret.reveal())

    @staticmethod
    def from_bytes(data: bytes) -> Description:
        """Return a description from its bytes."""
        return msgspec.msgpack.decode(data, type=Description, dec_hook=lambda kind, key: kind(key))


class Remote:
    """A replica as a client sees it. A replica that was started again is another one, with an id of its own."""

    def __init__(self, router: Router, peer: Peer) -> None:
        self.peer = peer
        self.name = peer.name
        self.candidate = Candidate(router)
        self.lock = threading.Lock()  # held while the next two change
        self.link: Link | None = None
        self.opening: Future[Link] | None = None  # under way: a thread connects
        self.is_lost = False
        self.loop_links: dict[Any, asyncio.Task[LoopLink]] = {}  # by loop


class Client:
    """The links of this process to one deployment."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.version = description.version
        self.outstanding: dict[Pending, None] = {}  # gradients handed in whose callers did not wait
        self.failed: deque[Exception] = deque(maxlen=16)  # errors of these, for `join`
        self.closed: str | None = None
        self._router = Router(description.max_batch_size, description.parallel, description.fills)
        self._lock = threading.Lock()
        self._table: tuple[list[Remote], list[Candidate]] = [], []
        self._lost: dict[str, float] = {}  # ids of replicas whose link broke, and until when they are left out
        self._next_refresh = 0.0
        self._finding: Future[None] | None = None  # under way: a thread asks the keeper
        self._keeper: Link | None = None
        self._keeper_opening: Future[Link] | None = None  # under way: a thread connects

    # --- the keeper ---

    def keeper(self, seconds: float = inf) -> Link:
        """Return the link to the keeper; wait at most so many seconds for it."""
        self.check_open()
        with self._lock:
            link, opening = self._keeper, self._keeper_opening
            if link is not None and link.broken is None:
                return link
            if opening is None or opening.done():
                opening = self._keeper_opening = in_thread(self._open_keeper, Link.close)
        wait([opening], None if seconds == inf else seconds)
        if not opening.done():
            raise DeadlineExceededError(f"the keeper of {self.description.name} did not answer within {seconds:g} s")
        return _opened(opening)

    def _open_keeper(self) -> Link:
        described = self.description
        name = f"the keeper of {described.name}"
        try:
            link = Link(Peer(name, described.keeper_id, described.keeper, described.secret))
        except UnavailableError as error:
            raise UnavailableError(
                f"{described.name} is gone: it was closed, or its driver or the keeper's node has ended ({error})"
            ) from None
        with self._lock:
            self._keeper = link
            if self.closed is not None:
                link.close()
        return link

    def ask_keeper(
        self, method: str, given: Any = None, arrays: Any = (), seconds: float = inf
    ) -> tuple[Any, list[Any]]:
        """Return the keeper's answer, a value and arrays."""
        link = self.keeper(seconds)
        frame = link.wait(link.ask(method, given, arrays), time.monotonic() + seconds)
        message = decode_done(frame.message)
        self._hear(message.load.version)
        return message.value, values.unpack_arrays(message.arrays, frame.arrays)

    def check_open(self) -> None:
        """Raise `CancelledError` if the deployment is closed."""
        if self.closed is not None:
            raise CancelledError(self.closed)

    # --- replicas ---

    def choose(self, rows: int, until: float = inf, may_connect: bool = True) -> Remote:
        """Return a replica for a call with so many rows; wait at most to the time `until` for one to be there.

        Without `may_connect` one that was never connected is returned only if there is no other.
        """
        while True:
            finding = self._find()
            if finding is not None:
                wait([finding], None if until == inf else until - time.monotonic())
                self._check_found(finding)
            remotes, candidates = self._table
            if remotes:  # else another thread has just lost the last one
                return remotes[self._router.choose(candidates, rows, time.monotonic(), until, may_connect)]

    async def choose_in_loop(self, rows: int, until: float = inf, may_connect: bool = True) -> Remote:
        """As `choose`, without blocking the loop."""
        while True:
            finding = self._find()
            if finding is not None:
                found = asyncio.wrap_future(finding)
                found.add_done_callback(_retrieve)
                await asyncio.wait([found], timeout=None if until == inf else until - time.monotonic())
                self._check_found(finding)
            remotes, candidates = self._table
            if remotes:
                return remotes[self._router.choose(candidates, rows, time.monotonic(), until, may_connect)]

    @property
    def has_choice(self) -> bool:
        """True if there are several replicas."""
        return len(self._table[0]) > 1

    def _find(self) -> Future[None] | None:
        """Have a thread ask the keeper for the replicas if that is due; return what to wait for if there is none to call."""
        if self.closed is not None:
            self.check_open()
        if time.monotonic() < self._next_refresh and self._table[0]:
            return None
        with self._lock:
            finding = self._finding
            if finding is None:
                finding = Future()
                threading.Thread(target=self._refresh_for, args=(finding,), name="weft ray client", daemon=True).start()
                self._finding = finding
        return None if self._table[0] else finding

    def _refresh_for(self, finding: Future[None]) -> None:
        problem: BaseException | None = None
        try:
            self.refresh()
        except BaseException as error:
            problem = error
        with self._lock:
            self._finding = None
            if problem is not None:
                self._next_refresh = time.monotonic() + REFRESH_SECONDS
        if problem is None:
            finding.set_result(None)
        else:
            finding.set_exception(problem)

    @staticmethod
    def _check_found(finding: Future[None]) -> None:
        if not finding.done():
            raise DeadlineExceededError("no replica was there within the deadline of the call")
        problem = finding.exception()
        if problem is not None:
            raise type(problem)(str(problem)) from None  # many callers may get it

    def refresh(self) -> None:
        """Ask the keeper where the replicas are; if none is alive, wait a while for one to be started again."""
        until = time.monotonic() + RESTART_SECONDS
        while True:
            try:
                (changed, described), _ = self.ask_keeper("where", seconds=RESTART_SECONDS)
            except DeadlineExceededError:
                raise UnavailableError(
                    f"the keeper of {self.description.name} did not answer within {RESTART_SECONDS:g} s"
                ) from None
            self.change(changed)
            now = time.monotonic()
            with self._lock:
                self._lost = {id: end for id, end in self._lost.items() if end > now}
                known = {remote.peer.id: remote for remote in self._table[0]}
                found = [
                    known.get(id) or self._remote(index, id, pid, addresses)
                    for index, id, pid, addresses in described
                    if id not in self._lost
                ]
                self._use(found)
                is_whole = len(found) >= self.description.replicas
                self._next_refresh = inf if is_whole else now + REFRESH_SECONDS
            if found:
                return
            if now > until:
                raise UnavailableError(
                    f"no replica of {self.description.name} is alive, and none was started again within {RESTART_SECONDS:g} s"
                )
            time.sleep(0.05)

    def _remote(self, index: int, id: str, pid: int, addresses: list[Any]) -> Remote:
        return Remote(self._router, Peer(f"replica {index} (pid {pid})", id, addresses, self.description.secret))

    def _use(self, remotes: list[Remote]) -> None:
        self._table = remotes, [remote.candidate for remote in remotes]

    def lose(self, remote: Remote) -> None:
        """Forget a replica whose link broke, and ask the keeper for others at the next call."""
        with self._lock:
            if remote.is_lost:
                return
            remote.is_lost = True
            self._lost[remote.peer.id] = time.monotonic() + LOST_SECONDS
            self._use([each for each in self._table[0] if each is not remote])
            self._next_refresh = 0.0
        if remote.link is not None:
            remote.link.poll_once()  # closes it if the replica is gone: it may have been a loop's link that broke

    # --- links ---

    def link(self, remote: Remote, until: float = inf) -> Link | None:
        """Return the threads' link to a replica; None if there is none after a while, or at the time `until`."""
        link = remote.link
        if link is not None:
            return link
        with remote.lock:
            if remote.link is not None:
                return remote.link
            if remote.is_lost:  # another thread could not connect
                raise UnavailableError(f"{remote.name} cannot be reached")
            opening = remote.opening
            if opening is None:
                opening = remote.opening = in_thread(lambda: self._open_link(remote), Link.close)
        wait([opening], _patience(until))
        return _opened(opening) if opening.done() else None

    def _open_link(self, remote: Remote) -> Link:
        """Connect, in a thread that no caller's deadline ends."""
        remote.candidate.openings[remote] = None
        try:
            link = Link(remote.peer, self._on_notice)
        except Exception:
            self.lose(remote)
            raise
        finally:
            remote.candidate.openings.pop(remote, None)
        with remote.lock:
            self.report(remote, link.load)
            remote.link, remote.opening = link, None
            if remote.is_lost or self.closed is not None:
                link.close()
        return link

    async def loop_link(self, remote: Remote, until: float = inf) -> LoopLink | None:
        """Return the link of the running event loop to a replica, as `link`."""
        loop = asyncio.get_running_loop()
        found = remote.loop_links.get(loop)
        if found is None:
            if remote.is_lost:
                raise UnavailableError(f"{remote.name} cannot be reached")
            for ended in [each for each in list(remote.loop_links) if each.is_closed()]:
                remote.loop_links.pop(ended, None)
            found = remote.loop_links[loop] = loop.create_task(self._open(remote))
            found.add_done_callback(_retrieve)
        if not found.done():
            await asyncio.wait([found], timeout=_patience(until))
        return _opened(found) if found.done() else None

    async def _open(self, remote: Remote) -> LoopLink:
        loop = asyncio.get_running_loop()
        remote.candidate.openings[loop] = None
        try:
            link = await LoopLink.open(remote.peer, self._on_notice)
        except Exception:
            remote.loop_links.pop(loop, None)
            self.lose(remote)
            raise
        finally:
            remote.candidate.openings.pop(loop, None)
        self.report(remote, link.load)
        link.on_broken = lambda _: remote.loop_links.pop(loop, None)
        return link

    def _on_notice(self, link: BaseLink, news: Any) -> None:
        if news[0] == "closed":
            self.close()
        elif news[0] == "updated":
            self.change(news[1])

    def change(self, options: dict[str, Any]) -> None:
        """Take options that were changed after the handle was made, as far as a client needs them."""
        described = self.description
        for name in ("max_batch_size", "parallel", "deadline", "gradient_deadline"):
            value = options.get(name, getattr(described, name))
            if value is not None or name == "deadline":  # a size of None: the replicas tell which one that is
                setattr(described, name, value)
        self._router.change(described.max_batch_size, described.parallel)

    def report(self, remote: Remote, load: Load | None) -> None:
        """Take the figures of an answer."""
        if load is not None:
            remote.candidate.report(load, time.monotonic())
            self._hear(load.version)

    def _hear(self, version: int) -> None:
        if version > self.version:
            self.version = version

    def close(self) -> None:
        """Refuse calls from now on."""
        self.closed = f"{self.description.name} is closed"

    def sweep(self) -> None:
        """Close the links of a deployment that has ended: nobody reads them any more."""
        for link in [self._keeper, *(remote.link for remote in self._table[0])]:
            if link is not None:
                link.check()

    def disconnect(self) -> None:
        """Close all links."""
        with self._lock:
            remotes = self._table[0]
            self._use([])
            keeper, self._keeper = self._keeper, None
        for remote in remotes:
            if remote.link is not None:
                remote.link.close()
            for found in list(remote.loop_links.values()):
                if found.done() and not found.cancelled() and found.exception() is None:
                    found.result().close()
        if keeper is not None:
            keeper.close()


def _patience(until: float) -> float:
    return max(0.0, min(until - time.monotonic(), PATIENCE_SECONDS))


def _opened(opening: Future[Made] | asyncio.Task[Made]) -> Made:
    """Return the link of an attempt to connect, or raise its error: many callers may get it."""
    problem = opening.exception()
    if problem is None:
        return opening.result()
    raise type(problem)(str(problem)) from None


def _retrieve(found: asyncio.Future[Any]) -> None:
    """Have asyncio not log an error that the caller gets from the thread's own future."""
    if not found.cancelled():
        found.exception()


_clients: dict[str, Client] = {}


def client_of(description: Description) -> Client:
    """Return the client of a deployment in this process."""
    found = _clients.get(description.deployment)
    if found is None:
        for other in list(_clients.values()):
            other.sweep()
        found = _clients.setdefault(description.deployment, Client(description))
    return found


on_fork_in_child(_clients.clear)  # the sockets belong to the parent
