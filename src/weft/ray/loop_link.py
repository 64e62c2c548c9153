"""A client's connection to a replica, for the tasks of one event loop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable
from math import inf
from typing import Any

from ..errors import DeadlineExceededError, UnavailableError
from . import frames
from .connect import Peer, connect, in_thread
from .frames import BadFrame, Frame, FrameReader, Kind, Load
from .link import DEAD_SECONDS, PING_SECONDS, reason_of
from .requests import BaseLink, Pending


class LoopPending(Pending):
    """A request that a task waits for."""

    __slots__ = ("_future",)

    def __init__(self, link: BaseLink, number: int, then: Callable[[Pending], None] | None = None) -> None:
        super().__init__(link, number, then)
        self._future: Any = None

    def wake(self) -> None:
        """Resume the task that waits; called in its loop."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    @property
    def is_here(self) -> bool:
        """True in the loop of the request."""
        link: Any = self.link
        return link._loop is asyncio.get_running_loop()

    async def join(self) -> None:
        """Wait until the request is done and settled, whatever its answer."""
        while not self.done:
            if self._future is None:
                self._future = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._future)
        await asyncio.sleep(0)  # its answer is settled at the end of the turn in which it came

    async def wait(self, until: float = inf) -> Frame:
        """Return the answer; at the time `until` raise `DeadlineExceededError`."""
        await self.wait_for(until)
        return self.answer()

    async def wait_for(self, until: float = inf) -> None:
        """Wait until there is an answer, or a part of it."""
        timer = None
        try:
            while not self.is_ready:
                if timer is not None:
                    raise DeadlineExceededError("no answer came within the deadline of the call")
                loop = asyncio.get_running_loop()
                self._future = loop.create_future()
                if until < inf:
                    timer = loop.call_later(max(0.0, until - time.monotonic()), self.wake)
                await self._future
        except BaseException:
            self.link.abandon(self)
            raise
        finally:
            if timer is not None:
                timer.cancel()


class LoopLink(BaseLink, asyncio.BufferedProtocol):
    """A connection whose loop reads and writes. Frames of one turn of the loop are sent together."""

    pending_class = LoopPending

    def __init__(
        self, name: str, sock: socket.socket, load: Load, on_notice: Callable[[BaseLink, Any], None] | None
    ) -> None:
        super().__init__(name, on_notice)
        self.load = load
        self._reader = FrameReader(frames.MOST_ARRAYS)
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._socket = sock
        self._out: list[Any] = []
        self._life: Any = None

    @classmethod
    async def open(cls, peer: Peer, on_notice: Callable[[BaseLink, Any], None] | None = None) -> LoopLink:
        """Return a link that is connected."""
        loop = asyncio.get_running_loop()
        sock, load = await asyncio.wrap_future(in_thread(lambda: connect(peer), lambda made: made[0].close()))
        sock.setblocking(False)
        link = cls(peer.name, sock, load, on_notice)
        try:
            if sock.family == socket.AF_UNIX:
                await loop.create_unix_connection(lambda: link, sock=sock)
            else:
                await loop.create_connection(lambda: link, sock=sock)
        except BaseException:
            link.break_off("it was not used")
            if link._transport is None:
                sock.close()
            raise
        # The loop closes its asynchronous generators at its end, and this one closes the link.
        link._life = link._until_the_end()
        await link._life.__anext__()
        return link

    async def _until_the_end(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            self.break_off("its event loop has ended")

    # --- the loop calls these ---

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._loop.call_later(PING_SECONDS, self._check)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.room()

    def buffer_updated(self, count: int) -> None:
        self._heard = time.monotonic()
        try:
            for frame in self._reader.advance(count):
                self.take(frame)
        except (BadFrame, ValueError) as error:
            self.break_off(reason_of(error))
        self.settle()

    def connection_lost(self, error: Exception | None) -> None:
        self.break_off("its connection was closed" if error is None else reason_of(error))

    def _check(self) -> None:
        """Ask for a sign of life if requests wait and nothing comes."""
        if self.broken is not None:
            return
        if self._pending:
            oldest_silence = time.monotonic() - self._heard
            if oldest_silence > DEAD_SECONDS:
                self.break_off(f"it was silent for {DEAD_SECONDS:g} s")
                return
            self.send([frames.HEADER.pack(0, Kind.PING, 0, 0)])
        else:
            self._heard = time.monotonic()
        self._loop.call_later(PING_SECONDS, self._check)

    # --- sending ---

    def send(self, parts: list[Any]) -> None:
        if asyncio._get_running_loop() is not self._loop:  # a backward in another thread
            try:
                self._loop.call_soon_threadsafe(self._send_here, parts)
            except RuntimeError:
                raise UnavailableError(f"the event loop that is connected to {self.name} has ended") from None
        else:
            self._send_here(parts)

    def _send_here(self, parts: list[Any]) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += parts

    def flush_drops(self) -> None:
        # A finalizer may run in any thread, also inside the lines of this loop.
        try:
            self._loop.call_soon_threadsafe(self._send_drops)
        except RuntimeError:  # the loop is closed
            self._drops.clear()

    def _send_drops(self) -> None:
        dropped = self._packed_drops()
        if dropped:
            self._send_here([dropped])

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self.broken is not None:
            return
        frames.write(self._transport, out)

    def after_fork(self) -> None:
        super().after_fork()
        self._socket.close()  # the parent's stays open

    def break_off(self, reason: str) -> None:
        super().break_off(reason)
        self.settle()
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self.break_off, "this process has closed its connection")
        except RuntimeError:
            return
