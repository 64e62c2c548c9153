"""Remote streams: the caller's own rows of the chunks that a function yields, as they come."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from .link import Link
from .requests import Pending

#: Makes a value of a frame.
Unpack = Callable[[Any], Any]


class _Chunks:
    """The chunks of a stream, in order. A stream that is left early costs the others nothing."""

    def __init__(self, pending: Pending, unpack: Unpack) -> None:
        self._pending, self._unpack = pending, unpack
        self._is_over = False

    def _take(self) -> tuple[bool, Any]:
        """Return whether there is a chunk, and the chunk; raise the error that ended the stream."""
        pending = self._pending
        if pending.chunks:
            return True, self._unpack(pending.chunks.popleft())
        self._is_over = True
        pending.answer()
        return False, None

    def _leave(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._pending.link.abandon(self._pending)

    def __del__(self) -> None:
        self._leave()


class RemoteStream(_Chunks):
    """Iterates over the chunks of a stream, in a thread."""

    def __iter__(self) -> RemoteStream:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        link = self._pending.link
        assert isinstance(link, Link)
        try:
            link.wait_for(self._pending, inf)
        except BaseException:
            self._is_over = True
            raise
        found, chunk = self._take()
        if not found:
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Leave the stream."""
        self._leave()

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()


class AsyncRemoteStream(_Chunks):
    """As `RemoteStream`, for a task; the call is sent when the first chunk is asked for."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self._send = send
        self._is_over = False
        self._pending: Any = None

    def __aiter__(self) -> AsyncRemoteStream:
        return self

    async def __anext__(self) -> Any:
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._pending is None:
                self._pending, self._unpack = await self._send()
            await self._pending.wait_for()
        except BaseException:
            self._is_over = True
            raise
        found, chunk = self._take()
        if not found:
            raise StopAsyncIteration
        return chunk

    def _leave(self) -> None:
        if self._pending is not None:
            super()._leave()
        self._is_over = True

    async def aclose(self) -> None:
        """Leave the stream."""
        self._leave()

    async def __aenter__(self) -> AsyncRemoteStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()
