"""The layout of a batch: how the arrays and Python objects of its calls become the arguments of the function."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.arrays import Array
from ..errors import FailedPreconditionError, InvalidArgumentError
from ..ragged.tensor import RaggedTensor
from . import batch_arrays, lengths
from .columns import Column, PaddedColumn
from .exact import Same
from .lengths import PaddedArray, PadRule, places_to_cut
from .options import Options
from .ragged_arguments import RaggedArray, RaggedBatch, RaggedRule

#: What is known of an array of a call that is not plain rows.
CallArray = PaddedArray | RaggedArray
Rule = PadRule | RaggedRule


def rules(options: Options) -> dict[str, Rule]:
    """Return the rules of a batcher's arguments whose arrays are not plain rows."""
    pads = lengths.rules(options.pad, options.pass_lengths, options.cut)
    return {**pads, **{name: RaggedRule(name, options.rows) for name in options.ragged}}


def count_rows(arrays: Sequence[Array], call_arrays: Sequence[CallArray | None] | None, leaves: Sequence[Any]) -> int:
    """Return the number of rows of a call with these leaves: all its arrays must have the same."""
    if not arrays:
        types = sorted({type(x).__name__ for x in leaves if not isinstance(x, Same)})
        hint = (
            "the option ragged names arguments that are RaggedTensors"
            if "RaggedTensor" in types
            else "make an array of numbers; the option items names arguments that are Python objects"
        )
        raise InvalidArgumentError(
            "a batched call must have at least one array or item among its arguments, got "
            + (f"{', '.join(types)} alone: {hint}" if types else "no arguments")
        )
    shapes = [tuple(x.shape) for x in arrays]
    for i, call_array in enumerate(call_arrays or ()):
        if isinstance(call_array, RaggedArray):
            shapes[i] = (call_array.rows, *call_array.key(shapes[i]))
    if not shapes[0]:
        raise InvalidArgumentError(
            "every array of a call must have a first dimension of rows, got a scalar (rows=False takes one example)"
        )
    for shape in shapes:
        if shape[:1] != shapes[0][:1]:
            raise InvalidArgumentError(
                f"all arrays of a call must have the same number of rows, got {[list(each) for each in shapes]}"
            )
    return int(shapes[0][0])


def part(x: Array, call_array: CallArray | None, start: int, rows: int) -> Array:
    """Return some rows of an array of a call."""
    return call_array.part(x, start, rows) if isinstance(call_array, RaggedArray) else x[start : start + rows]


def length(call_array: CallArray | None, start: int, rows: int) -> int:
    """Return the length of what `part` returns."""
    return call_array.length(start, rows) if isinstance(call_array, RaggedArray) else rows


class BatchLayout:
    """The columns of a batch: of the arguments, where an array is not plain rows, and of the results that are cut.

    `calls` has for each task what is known of the arrays of its call, and the task's first row in the call; `offsets` has the first
    row of each task in the batch, and the number of rows.
    """

    def __init__(self, calls: Sequence[tuple[Sequence[CallArray | None], int]], offsets: list[int], size: int) -> None:
        self._offsets, self._size = offsets, size
        self.inputs: list[Column | None] = []
        self._values: list[Any] = []  # what each argument is padded with
        # The first array of an argument, and the length of each task.
        self._lengths: dict[PadRule, tuple[int, list[int]]] = {}
        self._columns: dict[PadRule, PaddedColumn] = {}
        self._ragged: dict[int, RaggedBatch] = {}
        starts = [start for _, start in calls]
        for i, arrays in enumerate(zip(*(call_arrays for call_arrays, _ in calls), strict=True)):
            self._add(i, arrays, starts)

    def _add(self, i: int, arrays: Sequence[Any], starts: list[int]) -> None:
        """Add the column of array `i`."""
        first, value = arrays[0], 0
        column: Column | None = None
        bounds = list(pairwise(self._offsets))
        if isinstance(first, PaddedArray):
            rule = first.rule
            if rule not in self._columns:
                found = [array.length for array in arrays]
                self._lengths[rule] = i, found
                self._columns[rule] = rule.column(found, bounds, self._size)
            column, value = self._columns[rule], rule.pad.value
        elif isinstance(first, RaggedArray):
            pieces = [(start, stop - begin) for start, (begin, stop) in zip(starts, bounds, strict=True)]
            self._ragged[i] = RaggedBatch(arrays, pieces, self._size - self._offsets[-1])
            column = self._ragged[i].column
        self.inputs.append(column)
        self._values.append(value)

    def presented(self, arrays: Sequence[Array]) -> Sequence[Any]:
        """Return the arrays of the batch as the function gets them."""
        if not self._ragged:
            return arrays
        return [RaggedTensor(x, self._ragged[i].splits) if i in self._ragged else x for i, x in enumerate(arrays)]

    def join(self, i: int, parts: Sequence[Array]) -> Array:
        """Return array `i` of the batch, which is no plain one."""
        column = self.inputs[i]
        assert column is not None
        return column.join(parts, parts[0], self._values[i], repeats_first=True)

    def passed_lengths(self, inputs: Sequence[Array]) -> dict[str, Array]:
        """Return the length of each row for the parameters that get them."""
        return {
            rule.passed_as: self._per_row(lengths, inputs[i])
            for rule, (i, lengths) in self._lengths.items()
            if rule.passed_as is not None
        }

    def _per_row(self, lengths: list[int], like: Array) -> Array:
        """Return the length of each row as an array of the library and on the device of `like`."""
        found = np.repeat(np.array(lengths, np.int64), np.diff(self._offsets))
        whole = np.concatenate([found, np.repeat(found[:1], self._size - len(found))])
        return batch_arrays.like(whole, like)

    def outputs(self, result: Any, leaves: Sequence[Any]) -> dict[int, Column]:
        """Return the columns of the leaves of a result that are cut."""
        columns: dict[int, Column] = {}
        for rule, column in self._columns.items():
            for i in places_to_cut(result, rule.cut) if rule.cut else ():
                if i in columns:
                    raise FailedPreconditionError(
                        f"cut must name each result for one argument, and names leaf {i} for two"
                    )
                problem = column.problem(leaves[i])
                if problem is not None:
                    raise FailedPreconditionError(
                        f"a result that is cut must have {problem}, got the shape {list(leaves[i].shape)} in leaf {i}"
                    )
                columns[i] = column
        return columns
