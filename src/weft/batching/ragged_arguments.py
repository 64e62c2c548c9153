"""Arguments and results whose rows differ in length, as `RaggedTensor`s: the function gets the values of all rows in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..core.arrays import Array
from ..errors import FailedPreconditionError, InvalidArgumentError
from ..kernels.splits import Splits, compose_splits, cut_splits, join_splits, uniform_splits
from ..ragged.tensor import RaggedTensor
from .columns import RaggedColumn, Shape

NestedSplits = tuple[Splits, ...]


class RaggedRule:
    """The argument `name` is passed to the function as a `RaggedTensor`."""

    __slots__ = ("_has_rows", "name")

    def __init__(self, name: str, has_rows: bool) -> None:
        self.name, self._has_rows = name, has_rows

    def opened(self, x: Any) -> tuple[Any, NestedSplits | None]:
        """Return the values and the splits of a `RaggedTensor`; anything else unchanged, and None."""
        if not isinstance(x, RaggedTensor):
            return x, None
        if not self._has_rows:
            raise InvalidArgumentError(
                f"the argument {self.name!r} must be one row, an array, because the batcher has rows=False, got a RaggedTensor"
            )
        return x.flat_values, tuple(x._splits)

    def array(self, x: Array, splits: NestedSplits | None) -> RaggedArray:
        """Return what is known of an array of a call: the values of a `RaggedTensor`, or rows of one length."""
        if splits is None and len(x.shape) < 2:
            raise InvalidArgumentError(
                f"the argument {self.name!r} must have an axis of rows and one of values, or be a RaggedTensor, got the shape "
                f"{list(x.shape)}"
            )
        return RaggedArray(self, tuple(x.shape), splits)


class RaggedArray:
    """The rows of an array of a call: `splits` are those of a `RaggedTensor`, None for an array whose rows have one length."""

    __slots__ = ("rows", "rule", "shape", "splits")

    def __init__(self, rule: RaggedRule, shape: Shape, splits: NestedSplits | None) -> None:
        self.rule, self.shape, self.splits = rule, shape, splits
        self.rows: int = shape[0] if splits is None else len(splits[0]) - 1

    def key(self, shape: Shape) -> tuple[Any, ...]:
        """Return the properties of the shape that arrays of a batch must share: the ragged levels and the shape of a value."""
        return (None, *shape[2:]) if self.splits is None else (*[None] * len(self.splits), *shape[1:])

    def part(self, x: Array, start: int, rows: int) -> Array:
        """Return some rows of an array of the call."""
        if self.splits is None:
            return x[start : start + rows]
        _, first, last = cut_splits(self.splits, start, start + rows)
        return x[first:last]

    def length(self, start: int, rows: int) -> int:
        """Return how many values some rows of the call have."""
        if self.splits is None:
            return rows
        _, first, last = cut_splits(self.splits, start, start + rows)
        return int(last - first)

    def splits_of(self, start: int, rows: int) -> NestedSplits:
        """Return the splits of some rows."""
        if self.splits is None:
            return (uniform_splits(rows, self.shape[1]),)
        return cut_splits(self.splits, start, start + rows)[0]


class RaggedBatch:
    """A ragged argument of a batch: its splits, and the column of its values."""

    __slots__ = ("column", "splits")

    def __init__(self, arrays: Sequence[RaggedArray], pieces: Sequence[tuple[int, int]], padding: int) -> None:
        parts = [array.splits_of(start, rows) for array, (start, rows) in zip(arrays, pieces, strict=True)]
        own = join_splits(parts, np.int64)
        first = cut_splits(own, 0, min(1, len(own[0]) - 1))[0]
        self.splits = join_splits([own, *[first] * padding], np.int64) if padding else own
        ends = list(accumulate((int(compose_splits(part)[-1]) for part in parts), initial=0))
        shapes: list[Shape | None] = [
            (rows, *array.shape[1:]) if array.splits is None else None
            for array, (_, rows) in zip(arrays, pieces, strict=True)
        ]
        inner = arrays[0].shape[2:] if arrays[0].splits is None else arrays[0].shape[1:]
        count = int(compose_splits(self.splits)[-1])
        self.column = RaggedColumn(list(pairwise(ends)), count, inner, shapes, int(compose_splits(first)[-1]))


def open_ragged(leaves: list[Any], offsets: Sequence[int], size: int) -> dict[int, RaggedResult]:
    """Replace each `RaggedTensor` among the leaves of a result by its values; return how they are split, by their places."""
    found = {}
    for i, x in enumerate(leaves):
        if isinstance(x, RaggedTensor):
            if len(x) != size:
                raise FailedPreconditionError(
                    f"a RaggedTensor that the function returns must have the {size} rows of its batch, got {len(x)} in leaf {i} "
                    "of the result"
                )
            found[i], leaves[i] = RaggedResult(x, offsets), x._checked_values()
    return found


class RaggedResult:
    """A `RaggedTensor` of a result: the splits of each call, and the column of its values."""

    __slots__ = ("column", "splits")

    def __init__(self, x: RaggedTensor, offsets: Sequence[int]) -> None:
        nested = tuple(x._splits)
        self.splits = [cut_splits(nested, start, stop)[0] for start, stop in pairwise(offsets)]
        whole = compose_splits(nested)
        bounds = list(pairwise(int(whole[at]) for at in offsets))
        self.column = RaggedColumn(bounds, int(whole[-1]), tuple(x.flat_values.shape[1:]))


def rebuilt(values: Array, parts: Sequence[NestedSplits], has_rows: bool) -> Any:
    """Return a caller's `RaggedTensor` of the values and splits of its parts; without rows, its only row."""
    splits = parts[0] if len(parts) == 1 else join_splits(parts, parts[0][0].dtype)
    if has_rows:
        return RaggedTensor(values, splits)
    return RaggedTensor(values, splits[1:]) if len(splits) > 1 else values
