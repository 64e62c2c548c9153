"""A client's connection to a replica or to the keeper, for threads: `loop_link` is the one for event loops.

Many requests are under way at once. There is no reading thread: of the threads that wait for answers, one reads for all of
them, until it has its own answer.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

from ..errors import DeadlineExceededError, UnavailableError
from . import frames
from .connect import Peer, connect
from .frames import BadFrame, Frame, FrameReader, Kind
from .requests import BaseLink, Pending

#: A link that is silent for so many seconds while answers are awaited is asked for a sign of life, and given up later.
PING_SECONDS = 10.0
DEAD_SECONDS = 60.0
#: A link that was silent for so long is looked at before it is used.
CHECK_SECONDS = 0.5


class Link(BaseLink):
    """A connection for threads. Every wait ends at a deadline, or when the other side is gone or silent."""

    def __init__(self, peer: Peer, on_notice: Callable[[BaseLink, Any], None] | None = None) -> None:
        super().__init__(peer.name, on_notice)
        self.is_given_up = False  # True if the other side was silent for too long
        self._asked = 0.0  # when it was last asked for a sign of life
        self._socket, self.load = connect(peer)
        self._reader = FrameReader(frames.MOST_ARRAYS)
        self._send_lock = threading.Lock()
        self._sending = _Sending(self)
        self._read_lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._followers: dict[Pending, None] = {}  # threads that wait and do not read
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

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
                    raise self._failed_to_send(error) from None
                if sent < len(data):
                    self._unsent.append(memoryview(data)[sent:])  # before any other frame
                    self._send_all([])
        if self._drops:
            self.flush_drops()

    def _send_all(self, parts: list[Any]) -> None:
        """Send what is left of other frames, drops, and these parts; while the other side does not read, read what it sends."""
        dropped = self._packed_drops()
        self._unsent.extend(memoryview(part) for part in ((dropped, *parts) if dropped else parts))
        until = time.monotonic() + DEAD_SECONDS
        while self._unsent:
            if self._send_some():
                until = time.monotonic() + DEAD_SECONDS
                continue
            if time.monotonic() > until:
                self.give_up(f"it did not read for {DEAD_SECONDS:g} s")
            if self.broken is not None:
                raise self._own_error()
            self._wait_to_send()

    def _wait_to_send(self) -> None:
        """Wait a second at most until the socket can send; read what comes, unless another thread reads."""
        may_read = self._read_lock.acquire(blocking=False)
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT | (select.POLLIN if may_read else 0))
            if poll.poll(1000) and may_read:
                self._read()
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
            raise self._failed_to_send(error) from None
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

    def _failed_to_send(self, error: OSError) -> Exception:
        """Break off, after reading what the other side sent before it was gone."""
        self.poll_once()
        self.break_off(reason_of(error))
        return self._own_error()

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
            if pending in self._followers:
                self._followers.pop(pending, None)
                if not self._read_lock.locked():  # it may have been this thread's turn to read
                    self._wake_follower()

    def _read_for(self, pending: Pending, until: float) -> None:
        """Read until a request is done."""
        while not pending.is_ready:
            self._check_time(until)
            self._read_within(min(until - time.monotonic(), PING_SECONDS))
            self._check_life()

    def _check_life(self) -> None:
        """After a read: ask for a sign of life if the other side was silent for a while, and give it up if none came."""
        now = time.monotonic()
        if self.broken is not None:
            return
        if self._asked <= self._heard:
            if now - self._heard >= PING_SECONDS:
                self._asked = now
                self.send([frames.HEADER.pack(0, Kind.PING, 0, 0)])
        elif now - self._asked > DEAD_SECONDS - PING_SECONDS:
            self.give_up(f"it was silent for {DEAD_SECONDS:g} s")

    @staticmethod
    def _check_time(until: float) -> None:
        if time.monotonic() >= until:
            raise DeadlineExceededError("no answer came within the deadline of the call")

    def _read_within(self, seconds: float) -> None:
        """Read what comes within so many seconds."""
        if self._poll.poll(max(0.0, seconds) * 1000):
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
            self.break_off(reason_of(error))
        except BaseException:  # a signal's: what was read is lost
            self.break_off("a read was interrupted")
            raise
        return True

    def _stop_reading(self) -> None:
        """Let another of the waiting threads read."""
        self._read_lock.release()
        self._close_if_broken()
        self._wake_follower()

    def _wake_follower(self) -> None:
        for follower in list(self._followers):
            if not follower.is_ready:
                follower.wake()
                return

    def listen(self, seconds: float) -> None:
        """Read what comes within so many seconds, unless another thread reads; notice if the other side is gone or silent."""
        if self._read_lock.acquire(timeout=seconds):
            try:
                if self._socket.fileno() >= 0:  # also of a broken link: what came before its end counts
                    self._read_within(seconds)
            finally:
                self._stop_reading()
            with suppress(UnavailableError):  # it is broken now
                self._check_life()

    def check(self) -> None:
        """Notice that the other side is gone, after a while in which nothing came."""
        if self.broken is None and time.monotonic() - self._heard > CHECK_SECONDS:
            self.poll_once()

    def poll_once(self, seconds: float = 0.0) -> None:
        """Read what has come already; if another thread reads, wait for it at most so many seconds."""
        if self._read_lock.acquire(timeout=seconds):
            try:
                while self.broken is None and self._read():
                    continue
            finally:
                self._stop_reading()

    def finish(self) -> None:
        """Close the connection after reading what has come; wait a while for another thread that reads."""
        self.poll_once()
        self.close()
        self.poll_once(2.0)

    def after_fork(self) -> None:
        super().after_fork()
        self._socket.close()

    def close(self) -> None:
        self.break_off("this process has closed its connection")

    def __del__(self) -> None:
        if hasattr(self, "_socket"):  # connecting may have failed
            self._socket.close()

    def give_up(self, reason: str) -> None:
        """Break off because the other side does nothing: it may be alive."""
        self.is_given_up = True
        self.break_off(reason)

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

    def __exit__(self, kind: Any, *_: object) -> None:
        link = self._link
        if kind is not None and link.broken is None:  # a signal's: half a frame may be sent
            link.break_off("a send was interrupted")
        link._send_lock.release()
        if link.broken is not None:
            link._close_if_broken()


def reason_of(error: Exception) -> str:
    """Return why a connection broke."""
    return f"{type(error).__name__}: {error}"
