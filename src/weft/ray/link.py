"""A client's connection to a replica or to the keeper, for threads: `loop_link` is the one for event loops.

Many requests are under way at once. There is no reading thread: of the threads that wait for answers, one reads for all of
them, until it has its own answer.
"""

from __future__ import annotations

import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from math import inf
from typing import Any

from ..core.fork import on_fork_in_child
from ..errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from . import frames, values
from .frames import AskMessage, BadFrame, DoneMessage, ErrorMessage, Frame, FrameReader, Kind, ResultMessage
from .server import hello_message, no_delay
from .values import decoder_of, encoder

#: A link that is silent for so many seconds while answers are awaited is asked for a sign of life, and given up later.
PING_SECONDS = 10.0
DEAD_SECONDS = 60.0
CONNECT_SECONDS = 10.0
#: So many parts of a stream wait at its caller before it is ended.
MOST_CHUNKS = 4096
#: A link that was silent for so long is looked at before it is used.
CHECK_SECONDS = 0.5

decode_result = decoder_of(ResultMessage).decode
decode_done = decoder_of(DoneMessage).decode
decode_error = decoder_of(ErrorMessage).decode


class Pending:
    """A request under way. It ends once, with a frame or with an error."""

    __slots__ = ("_sleeper", "chunks", "done", "error", "frame", "link", "number", "then")

    def __init__(self, link: BaseLink, number: int, then: Callable[[Pending], None] | None = None) -> None:
        self.link, self.number, self.then = link, number, then
        self.done = False
        self.chunks: deque[Frame] | None = None  # of a stream
        self.frame: Frame | None = None
        self.error: Exception | None = None
        self._sleeper: Any = None

    def end(self, frame: Frame | None, error: Exception | None) -> None:
        """End with a frame or an error, and wake whoever waits."""
        self.frame, self.error = frame, error
        self.done = True
        self.wake()

    @property
    def is_ready(self) -> bool:
        """True if there is something to take: the answer, or a part of a stream."""
        return self.done or bool(self.chunks)

    def wake(self) -> None:
        """Make the thread that waits look again."""
        sleeper = self._sleeper
        if sleeper is not None:
            try:
                sleeper.release()
            except RuntimeError:  # it is awake
                return

    def sleep(self, seconds: float) -> None:
        """Wait until `wake`, at most so many seconds."""
        if self._sleeper is None:
            self._sleeper = sleeper = threading.Lock()
            sleeper.acquire()
            if self.is_ready:
                return
        self._sleeper.acquire(timeout=seconds)

    def answer(self) -> Frame:
        """Return the frame of a request that is done, or raise its error."""
        if self.error is not None:
            raise self.error
        frame = self.frame
        assert frame is not None
        if frame.kind == Kind.ERROR:
            raise values.unpack_error(decode_error(frame.message))
        return frame


class BaseLink:
    """What links of threads and of event loops share: the requests under way."""

    pending_class: type[Pending] = Pending

    def __init__(self, name: str, on_notice: Callable[[BaseLink, Any], None] | None = None) -> None:
        self.name = name  # of the other side, for errors
        self.broken: Exception | None = None
        self.on_notice = on_notice
        self.on_broken: Callable[[BaseLink], None] | None = None
        self.settled: deque[Pending] = deque()  # requests with `then` that have ended
        self._numbers = count(1)
        self._pending: dict[int, Pending] = {}
        self._drops: deque[tuple[int, int]] = deque()  # invocations and requests that nobody waits for
        self._heard = time.monotonic()
        _links.add(self)

    def after_fork(self) -> None:
        """Leave the connection to the parent: what this object sends would be taken for the parent's."""
        self.broken = UnavailableError(f"{self.name} is connected to the parent of this process")
        self._pending.clear()
        self._drops.clear()

    def request(
        self, kind: int, message: Any, buffers: Sequence[memoryview] = (), then: Callable[[Pending], None] | None = None,
        is_stream: bool = False,
    ) -> Pending:  # fmt: skip
        """Send a request; with `then`, nobody waits for the answer, and it is put into `settled`."""
        number = next(self._numbers)
        pending = self.pending_class(self, number, then)
        if is_stream:
            pending.chunks = deque()
        self._pending[number] = pending
        try:
            parts = frames.pack(kind, number, encoder.encode(message), buffers)
            if self.broken is not None:
                raise self._own_error()
            self.send(parts)
        except BaseException:
            self._pending.pop(number, None)
            raise
        return pending

    def ask(self, method: str, given: Any = None, arrays: Sequence[Any] = ()) -> Pending:
        """Ask for a method of the other side."""
        specs, buffers = values.pack_arrays(arrays)
        return self.request(Kind.ASK, AskMessage(method, given, specs), buffers)

    def send(self, parts: list[Any]) -> None:
        """Send a frame."""
        raise NotImplementedError

    def flush_drops(self) -> None:
        """Send what is in `_drops`, without waiting."""
        raise NotImplementedError

    def drop(self, invocation: int = 0, number: int = 0) -> None:
        """Tell the other side that nobody waits for a result's gradients, or for a request. Finalizers may call this."""
        if self.broken is None:
            self._drops.append((invocation, number))
            self.flush_drops()

    def abandon(self, pending: Pending) -> None:
        """Give a request up: its caller has left."""
        if self._pending.pop(pending.number, None) is not None:
            self.drop(number=pending.number)
        elif pending.frame is not None:
            self._drop_result(pending.frame)

    def _drop_result(self, frame: Frame) -> None:
        if frame.kind == Kind.RESULT:
            invocation = decode_result(frame.message).invocation
            if invocation:
                self.drop(invocation)

    def _packed_drops(self) -> bytes:
        """Return a frame with what was dropped, empty if nothing was."""
        dropped = []
        while self._drops:
            dropped.append(self._drops.popleft())
        return frames.pack(Kind.DROP, 0, encoder.encode(dropped))[0] if dropped else b""

    def take(self, frame: Frame) -> None:
        """Hand a frame that came to the request it answers."""
        if frame.kind in (Kind.RESULT, Kind.DONE, Kind.ERROR, Kind.HELLO):
            pending = self._pending.pop(frame.number, None)
            if pending is None:
                self._drop_result(frame)
                return
            pending.end(frame, None)
            if pending.then is not None:
                self.settled.append(pending)
        elif frame.kind == Kind.CHUNK:
            self._take_chunk(frame)
        elif frame.kind == Kind.NOTICE:
            if self.on_notice is not None:
                self.on_notice(self, decode_any(frame.message))
        elif frame.kind != Kind.PONG:
            raise BadFrame(f"a server does not send frames of kind {frame.kind}")

    def _take_chunk(self, frame: Frame) -> None:
        pending = self._pending.get(frame.number)
        if pending is None or pending.chunks is None:
            return  # its caller has left
        pending.chunks.append(frame)
        if len(pending.chunks) > MOST_CHUNKS:
            del self._pending[frame.number]
            pending.end(
                None, ResourceExhaustedError(f"{MOST_CHUNKS} parts of a stream wait, and its caller takes none")
            )
            self.drop(number=frame.number)
        else:
            pending.wake()

    def break_off(self, reason: str) -> None:
        """Close the link: all requests under way end with `UnavailableError`."""
        if self.broken is None:
            self.broken = UnavailableError(f"{self.name} is gone: {reason}")
        while self._pending:
            try:
                _, pending = self._pending.popitem()
            except KeyError:
                break
            pending.end(None, self._own_error())
            if pending.then is not None:
                self.settled.append(pending)
        if self.on_broken is not None:
            self.on_broken(self)

    def _own_error(self) -> Exception:
        return UnavailableError(str(self.broken))

    @property
    def under_way(self) -> list[Pending]:
        """The requests without an answer."""
        return list(self._pending.values())


_links: weakref.WeakSet[BaseLink] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_links):
        link.after_fork()


on_fork_in_child(_after_fork_in_child)

decode_any = decoder_of(Any).decode


class Link(BaseLink):
    """A connection for threads. Every wait ends at a deadline, or when the other side is gone or silent."""

    def __init__(
        self,
        addresses: Sequence[Any],
        secret: bytes,
        name: str,
        on_notice: Callable[[BaseLink, Any], None] | None = None,
    ) -> None:
        super().__init__(name, on_notice)
        self._socket = connect(addresses, name)
        self._reader = FrameReader(frames.MOST_ARRAYS)
        self._send_lock = threading.Lock()
        self._sending = _Sending(self)
        self._read_lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._followers: dict[Pending, None] = {}  # threads that wait and do not read
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        greeting = self.request(Kind.HELLO, hello_message(secret))
        try:
            self.wait(greeting, time.monotonic() + CONNECT_SECONDS)
        except BaseException:
            self.close()
            raise

    # --- sending ---

    def send(self, parts: list[Any]) -> None:
        with self._sending:
            if self._unsent or self._drops or len(parts) > 1:
                self._send_all(parts)
            else:
                data = parts[0]
                try:
                    sent = self._socket.send(data)
                except BlockingIOError:
                    sent = 0
                except OSError as error:
                    self.break_off(_reason(error))
                    raise self._own_error() from None
                if sent < len(data):
                    self._send_all([memoryview(data)[sent:]])
        if self._drops:
            self.flush_drops()

    def _send_all(self, parts: list[Any]) -> None:
        """Send everything; while the other side does not read, read what it sends."""
        dropped = self._packed_drops()
        self._unsent.extend(memoryview(part) for part in ((dropped, *parts) if dropped else parts))
        until = time.monotonic() + DEAD_SECONDS
        while self._unsent:
            if self._send_some():
                until = time.monotonic() + DEAD_SECONDS
                continue
            if time.monotonic() > until:
                self.break_off(f"it did not read for {DEAD_SECONDS:g} s")
            if self.broken is not None:
                raise self._own_error()
            may_read = self._read_lock.acquire(blocking=False)
            try:
                self._wait_and_read(1.0, may_read, True)
            finally:
                if may_read:
                    self._stop_reading()

    def _send_some(self) -> bool:
        """Send what the socket takes at once; return whether it took something."""
        try:
            sent = self._socket.sendmsg([*self._unsent][:64])
        except BlockingIOError:
            return False
        except OSError as error:
            self.break_off(_reason(error))
            raise self._own_error() from None
        while sent:
            first = self._unsent[0]
            if len(first) > sent:
                self._unsent[0] = first[sent:]
                break
            sent -= len(first)
            self._unsent.popleft()
        while self._unsent and not len(self._unsent[0]):
            self._unsent.popleft()
        return True

    def flush_drops(self) -> None:
        while self._drops and self.broken is None and self._send_lock.acquire(blocking=False):
            try:
                dropped = self._packed_drops()
                if dropped:
                    self._unsent.append(memoryview(dropped))
                    self._send_some()  # what is left goes with the next frame
            except UnavailableError:
                return
            finally:
                self._send_lock.release()
                self._close_if_broken()

    # --- waiting ---

    def wait(self, pending: Pending, until: float = inf) -> Frame:
        """Return the answer of a request; at the time `until` raise `DeadlineExceededError`."""
        self.wait_for(pending, until)
        return pending.answer()

    def wait_for(self, pending: Pending, until: float = inf) -> None:
        """Wait until a request has its answer, or a part of it."""
        try:
            while not pending.is_ready:
                if self._read_lock.acquire(blocking=False):
                    try:
                        self._followers.pop(pending, None)
                        self._read_for(pending, until)
                    finally:
                        self._stop_reading()
                elif pending in self._followers:
                    pending.sleep(max(0.0, min(until - time.monotonic(), 1.0)))
                    self._check_time(until)
                else:
                    self._followers[pending] = None  # first, then look again whether somebody reads
        except BaseException:
            self.abandon(pending)
            raise
        finally:
            self._followers.pop(pending, None)

    def _read_for(self, pending: Pending, until: float) -> None:
        """Read until a request is done."""
        began = pinged = time.monotonic()
        while not pending.is_ready:
            now = time.monotonic()
            self._check_time(until, now)
            silent = now - max(self._heard, began)
            if silent > DEAD_SECONDS:
                self.break_off(f"it was silent for {DEAD_SECONDS:g} s")
                return
            if silent > PING_SECONDS < now - pinged:
                pinged = now
                self.send([frames.HEADER.pack(0, Kind.PING, 0, 0)])
            self._wait_and_read(min(until - now, PING_SECONDS), True, False)

    @staticmethod
    def _check_time(until: float, now: float | None = None) -> None:
        if (time.monotonic() if now is None else now) >= until:
            raise DeadlineExceededError("no answer came within the deadline of the call")

    def _wait_and_read(self, seconds: float, may_read: bool, for_sending: bool) -> None:
        """Read what comes within so many seconds, if this thread may; return early if the socket can send."""
        if for_sending:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT | (select.POLLIN if may_read else 0))
        else:
            poll = self._poll
        if poll.poll(max(0.0, seconds) * 1000) and may_read:
            self._read()

    def _read(self) -> bool:
        """Read what has come; return False if nothing has."""
        try:
            got = self._socket.recv_into(self._reader.room())
            if not got:
                self.break_off("its connection was closed")
                return True
            arrived = self._reader.advance(got)
            self._heard = time.monotonic()
            for frame in arrived:
                self.take(frame)
        except BlockingIOError:
            return False
        except (OSError, BadFrame, ValueError) as error:
            self.break_off(_reason(error))
        return True

    def _stop_reading(self) -> None:
        """Let another of the waiting threads read."""
        self._read_lock.release()
        self._close_if_broken()
        for follower in list(self._followers):
            if not follower.is_ready:
                follower.wake()
                return

    def listen(self, seconds: float) -> None:
        """Read what comes within so many seconds, unless another thread reads; notice if the other side is gone."""
        if self._read_lock.acquire(timeout=seconds):
            try:
                if self.broken is None:
                    self._wait_and_read(seconds, True, False)
            finally:
                self._stop_reading()

    def check(self) -> None:
        """Notice that the other side is gone, after a while in which nothing came."""
        if self.broken is None and time.monotonic() - self._heard > CHECK_SECONDS:
            self.poll_once()

    def poll_once(self) -> None:
        """Read what has come already, if no other thread reads."""
        if self.broken is None and self._read_lock.acquire(blocking=False):
            try:
                while self.broken is None and self._read():
                    continue
            finally:
                self._stop_reading()

    def after_fork(self) -> None:
        super().after_fork()
        self._socket.close()

    def close(self) -> None:
        """Close the connection."""
        self.break_off("this process has closed its connection")

    def break_off(self, reason: str) -> None:
        super().break_off(reason)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._close_if_broken()

    def _close_if_broken(self) -> None:
        """Close the socket of a broken link as soon as no thread uses it: its number may be used again at once."""
        if self.broken is not None and self._send_lock.acquire(blocking=False):
            try:
                if self._read_lock.acquire(blocking=False):
                    try:
                        self._socket.close()
                    finally:
                        self._read_lock.release()
            finally:
                self._send_lock.release()


class _Sending:
    """Holds the send lock of a link, during a block."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __enter__(self) -> None:
        self._link._send_lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._link._send_lock.release()
        if self._link.broken is not None:
            self._link._close_if_broken()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def connect(addresses: Sequence[Any], name: str) -> socket.socket:
    """Return a socket that is connected to the first of these addresses that answers: a Unix socket's name, or host and port."""
    problems = []
    for address in addresses:
        is_unix = isinstance(address, str)
        sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_SECONDS)
            sock.connect(address if is_unix else tuple(address))
            no_delay(sock)
        except OSError as error:
            problems.append(_reason(error))
            sock.close()
        else:
            return sock
    raise UnavailableError(f"{name} cannot be reached: {'; '.join(problems)}")
