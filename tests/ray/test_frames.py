"""Frames: what is packed comes out again, however the bytes arrive; what is no frame is refused before room is made for it."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.libraries import need

need("msgspec")

from weft.ray import frames  # noqa: E402
from weft.ray.frames import BadFrame, FrameReader, Kind  # noqa: E402

SIZES = st.sampled_from([0, 1, 15, 16, 17, 1000, frames.LARGE - 1, frames.LARGE, frames.LARGE + 1, 3 * frames.LARGE])


def read(data: bytes, pieces: list[int], reader: FrameReader) -> list[frames.Frame]:
    found, at = [], 0
    while at < len(data):
        room = reader.room()
        size = min(len(room), len(data) - at, pieces.pop(0) if pieces else len(data))
        room[:size] = data[at : at + size]
        room.release()
        found += reader.advance(size)
        at += size
    return found


@given(
    given=st.lists(
        st.tuples(st.integers(1, 11), st.integers(0, 2**63), st.binary(max_size=40), st.lists(SIZES, max_size=3))
    ),
    pieces=st.lists(st.integers(1, 100_000), max_size=50),
)
def test_frames_come_out_as_they_were_packed(given, pieces):
    data, wanted = b"", []
    for kind, number, message, sizes in given:
        buffers = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
        data += b"".join(frames.pack(kind, number, message, [memoryview(x) for x in buffers]))
        wanted.append((kind, number, message, buffers))
    found = read(data, pieces, FrameReader(frames.MOST_ARRAYS))
    assert len(found) == len(wanted)
    for frame, (kind, number, message, buffers) in zip(found, wanted, strict=True):
        assert (frame.kind, frame.number, frame.message) == (kind, number, message)
        at = 0
        for buffer in buffers:
            at += -at % frames.ALIGNMENT
            assert frame.arrays[at : at + len(buffer)] == buffer
            at += len(buffer)


def test_a_frame_that_is_too_long_is_refused_by_its_header():
    reader = FrameReader(100)
    with pytest.raises(BadFrame, match="at most 100"):
        read(frames.HEADER.pack(0, Kind.CALL, 1, 101), [], reader)
    with pytest.raises(BadFrame):
        read(frames.HEADER.pack(2**32 - 1, Kind.CALL, 1, 0), [], FrameReader(frames.MOST_ARRAYS))


def test_the_header_is_what_the_format_says():
    assert frames.pack(Kind.PING, 7, b"ab")[0] == struct.pack("<IB3xQQ", 2, 10, 7, 0) + b"ab"


def test_small_parts_are_written_together_and_large_ones_alone():
    class Transport:
        def __init__(self):
            self.written = []

        def write(self, part):
            self.written.append(bytes(part))

    large = b"x" * (frames.LARGE + 1)
    for parts, written in (
        ([b"a", b"b", large, b"c"], [b"ab", large, b"c"]),
        ([large, b"a", b"b"], [large, b"ab"]),
        ([b"a"], [b"a"]),
        ([], []),
    ):
        transport = Transport()
        frames.write(transport, parts)
        assert transport.written == written
