"""Requests under way on a link, and how answers find them: what the links of threads and of event loops share."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from ..core.fork import on_fork_in_child
from ..errors import ResourceExhaustedError, UnavailableError
from . import frames, values
from .frames import AskMessage, BadFrame, DoneMessage, ErrorMessage, Frame, Kind, ResultMessage
from .values import decoder_of, encoder

#: So many parts of a stream wait at its caller before it is ended.
MOST_CHUNKS = 4096

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
        """Wait until `wake`, at most so many seconds; the first time return at once, for the caller to look again."""
        if self._sleeper is None:
            self._sleeper = sleeper = threading.Lock()
            sleeper.acquire()
        else:
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
        self.on_broken: Callable[[BaseLink], object] | None = None
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
        if frame.kind in (Kind.RESULT, Kind.DONE, Kind.ERROR):
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

    def settle(self) -> None:
        """Finish gradients whose callers did not wait and whose answers have come."""
        while self.settled:
            try:
                pending = self.settled.popleft()
            except IndexError:  # another thread was faster
                return
            assert pending.then is not None
            pending.then(pending)


_links: weakref.WeakSet[BaseLink] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_links):
        link.after_fork()


on_fork_in_child(_after_fork_in_child)

decode_any = decoder_of(Any).decode
