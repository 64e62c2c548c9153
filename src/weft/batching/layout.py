"""The layout of a batch: how the arrays and Python objects of its calls become the arguments of the function."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.arrays import Array, library_of
from ..errors import FailedPreconditionError
from .columns import Column, PaddedColumn
from .lengths import PaddedArray, PadRule, places_to_cut


class BatchLayout:
    """The columns of a batch: of the arguments, where an array is no plain one, and of the results that are cut.

    `calls` has for each task what is known of the arrays of its call, `offsets` the first row of each task and the number of rows.
    """

    def __init__(self, calls: Sequence[Sequence[PaddedArray | None]], offsets: list[int], size: int) -> None:
        bounds = list(pairwise(offsets))
        self._offsets, self._size = offsets, size
        self.inputs: list[Column | None] = []
        self._values: list[Any] = []  # what each argument is padded with
        self._lengths: dict[
            PadRule, tuple[int, list[int]]
        ] = {}  # the place of the first array, and the length of each task
        self._columns: dict[PadRule, PaddedColumn] = {}
        for i, arrays in enumerate(zip(*calls, strict=True)):
            first = arrays[0]
            if first is None:
                self.inputs.append(None)
                self._values.append(0)
                continue
            rule = first.rule
            if rule not in self._columns:
                lengths = [array.length for array in arrays]
                self._lengths[rule] = i, lengths
                self._columns[rule] = rule.column(lengths, bounds, size)
            self.inputs.append(self._columns[rule])
            self._values.append(rule.pad.value)

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
        library = library_of(like)
        if library == "torch":
            return sys.modules["torch"].from_numpy(whole).to(like.device)
        return sys.modules["jax"].numpy.asarray(whole) if library == "jax" else whole

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
