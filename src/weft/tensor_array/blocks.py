"""Blocks of NumPy rows of one shape: where a TensorArray stores elements of its common shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.memory import hold
from ..core.shapes import Shape
from ..errors import ResourceExhaustedError
from ..kernels import buffers

#: The size of small blocks, below the size from which malloc takes fresh pages: a page fault costs more than copying a page.
SMALL_BYTES = 120 << 10
#: The size of blocks once this much is stored. They are on huge pages, with one page fault for 2 MB.
LARGE_BYTES = 1 << 24
#: The most that one block reserves for a known number of rows; the system provides the pages as they are filled.
RESERVE_BYTES = 1 << 30
FIRST_ROWS = 8
#: The number of elements from which NumPy releases the GIL while it copies or adds.
UNLOCKED = 500


class RowBlocks:
    """Rows that are appended, read by slot, added to in place, and dropped.

    The first block doubles up to the size of small blocks; then small blocks follow, then large ones. So a row is moved less than
    once on average, and at most twice the appended bytes are allocated. A block whose rows are all dropped is freed. If the
    number of rows is known, one block has room for all of them and can be given away without a copy, unless the rows are so
    large that each should be freed on its own.
    """

    def __init__(self, shape: Shape, dtype: np.dtype, expected: int | None = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self._is_large = math.prod(shape) >= UNLOCKED
        row_bytes = max(1, math.prod(shape) * dtype.itemsize)
        self._per_small = max(1, SMALL_BYTES // row_bytes)
        self._per_large = max(1, LARGE_BYTES // row_bytes)
        self._small_blocks = max(1, LARGE_BYTES // (self._per_small * row_bytes))
        self._first = min(FIRST_ROWS, self._per_small)
        if expected and row_bytes < SMALL_BYTES and expected * row_bytes <= RESERVE_BYTES:
            self._first = self._per_small = expected
            self._small_blocks = 1
        self._small_slots = self._small_blocks * self._per_small
        self._restart([])

    def _restart(self, blocks: list[np.ndarray | None]) -> None:
        self.count = 0
        self._dropped: list[int] = [0] * len(blocks)
        self._blocks = blocks
        self._held = len(blocks)  # how many blocks are not freed
        self._tail: Any = blocks[0] if blocks else ()  # the block that is being filled
        self._next = 0  # the next row of that block

    @property
    def nbytes(self) -> int:
        """The bytes allocated."""
        return sum(block.nbytes for block in self._blocks if block is not None)

    def append(self, value: np.ndarray) -> int:
        """Copy `value` to a new slot; return the slot."""
        row = self._next
        if row == len(self._tail):
            row = self._make_room()
        held = hold(value) if self._is_large else None  # another thread may resize the caller's array during the copy
        self._tail[row] = value
        del held
        self._next = row + 1
        slot = self.count
        self.count = slot + 1
        return slot

    def extend(self, values: np.ndarray) -> int:
        """Copy the rows of `values` to consecutive new slots; return the first."""
        first, done = self.count, 0
        while done < len(values):
            row = self._next
            if row == len(self._tail):
                row = self._make_room(len(values) - done)
            step = min(len(self._tail) - row, len(values) - done)
            buffers.copy(self._tail[row : row + step], values[done : done + step])
            self._next = row + step
            self.count += step
            done += step
        return first

    def add_one(self, slot: int, value: np.ndarray) -> None:
        """Add `value` to the row in `slot`, in place."""
        held = hold(value) if self._is_large else None
        row = self.row(slot)
        np.add(row, value, out=row)
        del held

    def row(self, slot: int) -> np.ndarray:
        """The row in `slot`, as a view."""
        number, row = self._place(slot)
        return self._blocks[number][row, ...]  # type: ignore[index]

    def copy_of(self, slot: int, drop: bool) -> np.ndarray:
        """Return a copy of the row in `slot`, and drop the row on request."""
        number, row = self._place(slot)
        value = self._blocks[number][row, ...].copy()  # type: ignore[index]
        if drop:
            dropped = self._dropped[number] = self._dropped[number] + 1
            if (dropped >= self._next or dropped >= self._per_small) and dropped == self._rows_in(number):
                self._free(number)
        return value

    def take(self, slots: np.ndarray) -> np.ndarray:
        """A new array of the rows in `slots`."""
        out = empty((len(slots), *self.shape), self.dtype)
        if run := run_of(slots):
            for number, rows, part in self._runs(run.start, len(slots)):
                buffers.copy(out[part], self._blocks[number][rows])  # type: ignore[index]
            return out
        numbers, places = self._places(slots)
        for number in np.unique(numbers):
            at = np.flatnonzero(numbers == number)
            out[at] = self._blocks[number][places[at]]
        return out

    def give_away(self, slots: np.ndarray) -> np.ndarray | None:
        """Return the only block if `slots` are all of its rows in order, else None. The blocks must not be used afterwards."""
        whole = len(self._blocks) == 1 and len(slots) == self.count == len(self._tail)
        return self._tail if whole and run_of(slots) else None

    def add(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Add `values` to the rows in `slots`, in place; a slot may occur twice."""
        if run := run_of(slots):
            for number, rows, part in self._runs(run.start, len(slots)):
                block = self._blocks[number][rows]  # type: ignore[index]
                np.add(block, values[part], out=block)
            return
        for slot, value in zip(slots.tolist(), values, strict=True):
            self.add_one(slot, value)

    def drop(self, slots: np.ndarray) -> None:
        """Drop the rows in `slots`, none of which occurs twice."""
        for number, gone in enumerate(np.bincount(self._places(slots)[0]).tolist()):
            self._dropped[number] += gone
            if gone and self._dropped[number] >= self._rows_in(number):
                self._free(number)

    def _rows_in(self, number: int) -> int:
        """The number of rows that were stored in a block."""
        return self._next if number == len(self._blocks) - 1 else self._size_of(number)

    def _free(self, number: int) -> None:
        """Free a block whose rows are all dropped; the last block only together with all others."""
        if number < len(self._blocks) - 1:
            self._blocks[number] = None
            self._held -= 1
        if self._held == 1 and self._dropped[-1] == self._next:
            # An array that is read as fast as it is written keeps using the same memory.
            self._restart([self._tail] if self._tail.nbytes <= SMALL_BYTES else [])

    def _size_of(self, number: int) -> int:
        return self._per_small if number < self._small_blocks else self._per_large

    def _make_room(self, rows: int = 1) -> int:
        """Grow the first block, or add one; return the next row to fill."""
        held = len(self._tail)
        if len(self._blocks) <= 1 and held < self._per_small:
            grown = empty((min(max(held + rows, 2 * held, self._first), self._per_small), *self.shape), self.dtype)
            if held:
                grown[:held] = self._tail
            else:
                self._dropped = [0]
            self._blocks, self._tail, self._held = [grown], grown, 1
            return held
        self._tail = empty((self._size_of(len(self._blocks)), *self.shape), self.dtype)
        self._blocks.append(self._tail)
        self._held += 1
        self._dropped.append(0)
        return 0

    def _place(self, slot: int) -> tuple[int, int]:
        """The block and the row of a slot."""
        if slot < self._small_slots:
            return divmod(slot, self._per_small)
        number, row = divmod(slot - self._small_slots, self._per_large)
        return self._small_blocks + number, row

    def _places(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The blocks and the rows of many slots."""
        numbers, rows = np.divmod(slots, self._per_small)
        if self.count > self._small_slots:
            large = slots >= self._small_slots
            numbers[large], rows[large] = np.divmod(slots[large] - self._small_slots, self._per_large)
            numbers[large] += self._small_blocks
        return numbers, rows

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield for consecutive slots each block, its rows, and their positions among the `count` slots."""
        done = 0
        while done < count:
            number, row = self._place(first + done)
            step = min(self._size_of(number) - row, count - done)
            yield number, slice(row, row + step), slice(done, done + step)
            done += step


def empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Allocate an array with arbitrary content."""
    try:
        return buffers.empty(shape, dtype)
    except MemoryError as error:
        raise ResourceExhaustedError(f"there is no room for {dtype}{list(shape)}") from error


def run_of(numbers: np.ndarray) -> slice | None:
    """Return `numbers` as a slice if they are consecutive and not negative, else None.

    Benchmark rows "scatter of ... rows" and "stack of ... elements" need it.
    """
    if not len(numbers):
        return None
    run = slice(int(numbers[0]), int(numbers[0]) + len(numbers))
    if run.start < 0 or int(numbers[-1]) != run.stop - 1:
        return None
    # Comparing bytes takes half the time of comparing neighbours.
    return run if numbers.tobytes() == np.arange(run.start, run.stop, dtype=numbers.dtype).tobytes() else None
