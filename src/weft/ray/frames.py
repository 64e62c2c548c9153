"""The frames that clients, replicas and the keeper exchange over sockets: a header, a msgpack message, raw bytes of arrays.

The header has the lengths of the other two parts, which a `FrameReader` checks before it makes room for them. Nothing is pickled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..errors import InvalidArgumentError

#: The version of this format; both ends of a connection must have the same.
PROTOCOL = 1

#: Length of the message, kind, number of the request, length of the arrays.
HEADER = Struct("<IB3xQQ")
#: The largest message and the largest arrays of a frame, in bytes.
MOST_MESSAGE = 1 << 26
MOST_ARRAYS = 1 << 40
#: The largest frame of a handshake, either way.
MOST_GREETING = 512
#: Frames above this size are read into memory of their own.
LARGE = 1 << 16
#: Arrays begin at multiples of so many bytes.
ALIGNMENT = 16


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # the handshake's messages, see `handshake`, and last the server's welcome, a `Load`
    CALL = 2  # a forward
    RESULT = 3  # its answer
    BACKWARD = 4  # the gradients of a result
    DONE = 5  # the answer to a BACKWARD, to an ASK
    ERROR = 6  # the answer to any request
    DROP = 7  # results that nobody will send gradients for; no answer
    ASK = 8  # a method of the other side by name
    NOTICE = 9  # news that nobody asked for; no answer
    PING = 10
    PONG = 11
    CHUNK = 12  # a part of a stream; a DONE or an ERROR ends the stream


class Frame(NamedTuple):
    """A frame that was read."""

    kind: int
    number: int
    message: bytes
    arrays: bytearray | memoryview


def pack(kind: int, number: int, message: bytes, buffers: Sequence[memoryview] = ()) -> list[Any]:
    """Return the parts of a frame, to be sent one after another."""
    if len(message) > MOST_MESSAGE:
        raise InvalidArgumentError(
            f"the text, bytes and numbers of a call take at most {MOST_MESSAGE} bytes, got {len(message)}: pass arrays"
        )
    if not buffers:
        return [HEADER.pack(len(message), kind, number, 0) + message]
    length, parts = 0, list[Any]()
    for buffer in buffers:
        gap = -length % ALIGNMENT
        if gap:
            parts.append(bytes(gap))
        parts.append(buffer)
        length += gap + buffer.nbytes
    if length > MOST_ARRAYS:
        raise InvalidArgumentError(f"a frame holds at most {MOST_ARRAYS} bytes of arrays, got {length}")
    head = HEADER.pack(len(message), kind, number, length) + message
    if length <= LARGE:
        return [b"".join((head, *parts))]
    return [head, *parts]


class BadFrame(Exception):
    """What came is no frame of this protocol: the connection must be closed."""


class FrameReader:
    """Makes frames of the bytes that come in: read into `room()`, then call `advance` with the number of bytes.

    Memory is used as bytes come, not as a header says.
    """

    def __init__(self, most: int = MOST_GREETING) -> None:
        self._most = most  # the largest frame
        self._buffer = _memory(min(4 * LARGE, HEADER.size + most))
        self._start = self._end = 0
        self._head: tuple[int, int, int, int] | None = None  # of a large frame whose body is being read
        self._message = self._arrays = _memory(0)
        self._filled = 0  # bytes of these two

    def allow(self, most: int) -> None:
        """Take frames of up to `most` bytes from now on."""
        old, rest = self._buffer, self._end - self._start
        self._most = most
        self._buffer = _memory(min(4 * LARGE, HEADER.size + most))
        self._buffer[:rest] = old[self._start : self._end]
        self._start, self._end = 0, rest

    def room(self) -> memoryview:
        """Return where the next bytes belong."""
        if self._head is None:
            return self._buffer[self._end :]
        if self._filled < len(self._message):
            return self._message[self._filled :]
        return self._arrays[self._filled - len(self._message) :]

    def advance(self, count: int) -> list[Frame]:
        """Note that `count` bytes were read into `room()`; return the frames that are complete."""
        if self._head is not None:
            return self._advance_body(count)
        self._end += count
        frames: list[Frame] = []
        buffer, start, end, size = self._buffer, self._start, self._end, HEADER.size
        while end - start >= size:
            head = HEADER.unpack_from(buffer, start)
            length = self._check(head)
            if end - start < size + length:
                if length > LARGE:
                    self._begin_body(head, length, start + size)
                    start = end = 0
                break
            start += size
            middle = start + head[0]
            arrays = bytearray(buffer[middle : start + length])
            frames.append(Frame(head[1], head[2], bytes(buffer[start:middle]), arrays))
            start += length
        if start == end:
            start = end = 0
        elif len(buffer) - start < size + LARGE:  # the next frame may not fit behind this point
            rest = end - start
            buffer[:rest] = bytes(buffer[start:end])
            start, end = 0, rest
        self._start, self._end = start, end
        return frames

    def _check(self, head: tuple[int, int, int, int]) -> int:
        """Return the length of a frame without its header; refuse one that is too long."""
        length = head[0] + head[3]
        if length > self._most or head[0] > MOST_MESSAGE:
            raise BadFrame(f"a frame of {length} bytes came where at most {self._most} are allowed")
        return length

    def _begin_body(self, head: tuple[int, int, int, int], length: int, start: int) -> None:
        """Go on in memory of its own for a large frame; `start` is where its body begins in the buffer."""
        begun = self._buffer[start : self._end]
        try:
            self._message, self._arrays = _memory(head[0]), _memory(head[3])
        except MemoryError:
            raise BadFrame(f"there is no memory for a frame of {length} bytes") from None
        self._head = head
        self._filled = len(begun)
        split = min(self._filled, head[0])
        self._message[:split] = begun[:split]
        self._arrays[: self._filled - split] = begun[split:]

    def _advance_body(self, count: int) -> list[Frame]:
        self._filled += count
        head = self._head
        if head is None or self._filled < head[0] + head[3]:
            return []
        frame = Frame(head[1], head[2], bytes(self._message), self._arrays)
        self._head, self._message, self._arrays = None, _memory(0), _memory(0)
        return [frame]


def _memory(size: int) -> memoryview:
    """Return new memory, which takes no room before it is written to: so much may be declared and never come."""
    return np.empty(size, np.uint8).data


# --- messages ---

#: Library, dtype, shape, whether a gradient is wanted.
ArraySpec = tuple[str, str, tuple[int, ...], bool]


class CallMessage(msgspec.Struct, array_like=True, gc=False):
    """The message of a CALL."""

    flags: int
    tree: Any  # of the arguments: see `values`
    arrays: list[ArraySpec]
    deadline: float | None = None
    priority: str | None = None
    caller: str | None = None
    autocast: str | None = None  # the dtype of PyTorch's autocast on the CPU


#: `flags` of a call: record gradients, PyTorch's inference mode, a pull-back, send a receipt, a stream.
GRAD, INFERENCE, VJP, RECEIPT, STREAM = 1, 2, 4, 8, 16


class Load(msgspec.Struct, array_like=True, gc=False):
    """The state of a replica's queue, which every answer carries."""

    version: int = 0  # of the weights
    waiting: int = 0  # rows in the queue
    running: int = 0  # batches
    filled: int = 0  # rows of the last batch
    base: float = (
        0.0  # seconds that a batch takes, and a row of it more: see `batch_time`; both 0 if nothing was measured
    )
    per_row: float = 0.0


class ResultMessage(msgspec.Struct, array_like=True, gc=False):
    """The message of a RESULT."""

    version: int  # of the weights that made it
    load: Load
    tree: Any
    arrays: list[ArraySpec]
    invocation: int = 0  # the id for a BACKWARD; 0 if no gradient can come
    receipt: list[Any] | None = None


class BackwardMessage(msgspec.Struct, array_like=True, gc=False):
    """The message of a BACKWARD."""

    invocation: int
    version: int  # of the weights that made the result
    arrays: list[ArraySpec | None]  # None where there is no gradient
    tree: Any = None  # of the gradient that a pull-back is called with


class DoneMessage(msgspec.Struct, array_like=True, gc=False):
    """The message of a DONE."""

    load: Load
    arrays: list[ArraySpec | None] = []
    value: Any = None


class AskMessage(msgspec.Struct, array_like=True, gc=False):
    """The message of an ASK: a method's name and arguments."""

    method: str
    values: Any
    arrays: list[ArraySpec | None] = []


class ErrorMessage(msgspec.Struct, array_like=True, gc=False):
    """The message of an ERROR."""

    name: str  # the class
    text: str
    notes: list[str] = []


def write(transport: asyncio.WriteTransport, parts: Sequence[Any]) -> None:
    """Write parts of frames in order: small ones joined, large ones without another copy."""
    small: list[Any] = []
    for part in parts:
        if len(part) <= LARGE:
            small.append(part)
            continue
        if small:
            transport.write(b"".join(small))
            small = []
        transport.write(part)
    if small:
        transport.write(small[0] if len(small) == 1 else b"".join(small))
