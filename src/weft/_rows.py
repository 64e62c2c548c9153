"""NumPy rows of one shape, kept in blocks: what equal elements of an array live in."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ._shapes import Shape

#: From this size on NumPy asks the system for huge pages; a larger block would only be freed later.
BLOCK_BYTES = 1 << 22
FIRST_ROWS = 8


class Rows:
    """Rows that are appended, read by slot, added to in place, and dropped.

    The first block doubles until it is `BLOCK_BYTES` large, then blocks of that size follow: a row is moved less than
    once on average, never after the first block is full, and what is allocated is at most twice what was appended.
    A block whose rows are all dropped is freed.
    """

    def __init__(self, shape: Shape, dtype: np.dtype, expected: int = FIRST_ROWS) -> None:
        self.shape = shape
        self.dtype = dtype
        self.per_block = max(1, BLOCK_BYTES // max(1, math.prod(shape) * dtype.itemsize))
        self.count = 0
        self._expected = max(1, min(expected, self.per_block))
        self._blocks: list[np.ndarray | None] = []
        self._live: list[int] = []

    @property
    def nbytes(self) -> int:
        """The bytes that are allocated."""
        return sum(block.nbytes for block in self._blocks if block is not None)

    def append(self, value: np.ndarray) -> int:
        """The slot that `value` was copied to."""
        slot = self.count
        number, row = divmod(slot, self.per_block)
        try:
            self._blocks[number][row] = value  # type: ignore[index]
        except IndexError:  # past the last block, or past the first one's end
            self._reserve(slot + 1)
            self._blocks[number][row] = value  # type: ignore[index]
        self._live[number] += 1
        self.count = slot + 1
        return slot

    def extend(self, values: np.ndarray) -> int:
        """The slot of the first row of `values`; the others follow it."""
        first = self.count
        self._reserve(first + len(values))
        for number, rows, part in self._runs(first, len(values)):
            self._blocks[number][rows] = values[part]  # type: ignore[index]
            self._live[number] += rows.stop - rows.start
        self.count = first + len(values)
        return first

    def row(self, slot: int) -> np.ndarray:
        """The row in `slot`, as a view."""
        number, row = divmod(slot, self.per_block)
        return self._blocks[number][row, ...]  # type: ignore[index]

    def take(self, slots: np.ndarray) -> np.ndarray:
        """A new array of the rows in `slots`."""
        out = np.empty((len(slots), *self.shape), self.dtype)
        if len(slots) and slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
            for number, rows, part in self._runs(int(slots[0]), len(slots)):
                out[part] = self._blocks[number][rows]  # type: ignore[index]
            return out
        numbers, places = np.divmod(slots, self.per_block)
        for number in np.unique(numbers):
            at = np.flatnonzero(numbers == number)
            out[at] = self._blocks[number][places[at]]
        return out

    def add(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Add `values` to the rows in `slots`, in place; a slot that occurs twice gets both."""
        if len(slots) and bool((np.diff(slots) == 1).all()):
            for number, rows, part in self._runs(int(slots[0]), len(slots)):
                block = self._blocks[number][rows]  # type: ignore[index]
                np.add(block, values[part], out=block)
            return
        for slot, value in zip(slots.tolist(), values, strict=True):
            row = self.row(slot)
            np.add(row, value, out=row)

    def drop(self, slot: int) -> None:
        """Forget the row in `slot`."""
        number = slot // self.per_block
        self._live[number] -= 1
        if not self._live[number]:
            self._free()

    def drop_all(self, slots: np.ndarray) -> None:
        """Forget the rows in `slots`, each of which occurs once."""
        for number, gone in enumerate(np.bincount(slots // self.per_block)):
            self._live[number] -= int(gone)
        self._free()

    def _free(self) -> None:
        """Give back blocks without live rows, except one that is still being filled."""
        if not any(self._live):
            # An array that is read as fast as it is written goes on in the same memory.
            tail = self._blocks[-1]
            keep = tail is not None and tail.nbytes <= BLOCK_BYTES
            self.count, self._blocks, self._live = 0, [tail] if keep else [], [0] if keep else []
            return
        for number in range(self.count // self.per_block):
            if not self._live[number]:
                self._blocks[number] = None

    def _reserve(self, rows: int) -> None:
        """Make room for `rows` rows."""
        if rows > self.per_block:
            self._grow_first(self.per_block)
            while len(self._blocks) * self.per_block < rows:
                self._blocks.append(np.empty((self.per_block, *self.shape), self.dtype))
                self._live.append(0)
        else:
            self._grow_first(rows)

    def _grow_first(self, rows: int) -> None:
        """Make the first block at least `rows` rows long, doubling it."""
        first = self._blocks[0] if self._blocks else None
        held = 0 if first is None else len(first)
        if held >= rows or (self._blocks and first is None):
            return
        grown = np.empty((max(rows, min(2 * held, self.per_block), self._expected), *self.shape), self.dtype)
        if first is None:
            self._blocks, self._live = [grown], [0]
        else:
            grown[: self.count] = first[: self.count]
            self._blocks[0] = grown

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, slice, slice]]:
        """Consecutive slots by block: the block's number, its rows, and which of the `count` they are."""
        done = 0
        while done < count:
            number, row = divmod(first + done, self.per_block)
            step = min(self.per_block - row, count - done)
            yield number, slice(row, row + step), slice(done, done + step)
            done += step
