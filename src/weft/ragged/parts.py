"""The two storages of a variant array: columns (all elements in one buffer) and rows (one array for each element)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array, dtype_name, dtype_of, host, library_of, namespace
from ..errors import InvalidArgumentError
from ..kernels.splits import Splits, compose_splits, cut_splits, join_splits, splits_from_lengths
from .inputs import HOLDABLE
from .rows import join_rows, split_rows, unstack_rows


class RaggedValue(NamedTuple):
    """One element: host splits, outermost first, and values; without splits it is an array."""

    splits: tuple[Splits, ...]
    values: Array


class Columns(NamedTuple):
    """All elements in one buffer: element `i` is row `i` of a ragged tensor, or `values[i]` without splits."""

    splits: tuple[Splits, ...]
    values: Array

    def __len__(self) -> int:
        return len(self.splits[0]) - 1 if self.splits else int(self.values.shape[0])

    def cut(self, start: int, stop: int) -> Columns:
        """The elements from `start` to `stop`, as views."""
        splits, start, stop = cut_splits(self.splits, start, stop)
        return Columns(splits, self.values[start:stop])

    def rows(self) -> Rows:
        """One array for each element, all cut in one autodiff node."""
        if not self.splits:
            return Rows(unstack_rows(self.values), None)
        values = split_rows(self.values, compose_splits(self.splits))
        if len(self.splits) == 1:
            return Rows(values, None)
        return Rows(values, [cut_splits(self.splits, i, i + 1)[0][1:] for i in range(len(self))])


class Rows(NamedTuple):
    """One array for each element: values, None for filler, and the splits of each; None if no element has splits.

    `dtype` is set if all values are known to be NumPy arrays of one dtype. Benchmark row "rows of a list 1M" needs it.
    """

    values: list[Array | None]
    splits: list[tuple[Splits, ...]] | None
    dtype: np.dtype | None = None

    def pick(self, indices: Sequence[int]) -> Rows:
        """The elements with these numbers."""
        values, splits = self.values, self.splits
        return Rows([values[i] for i in indices], None if splits is None else [splits[i] for i in indices])

    def all_splits(self) -> list[tuple[Splits, ...]]:
        """The splits of every element."""
        return [()] * len(self.values) if self.splits is None else self.splits


def numpy_rows(elements: list[Any]) -> Rows | None:
    """Return elements as rows without a look at each if all are NumPy arrays, else None.

    Benchmark row "rows of a list 1M" needs it.
    """
    if set(map(type, elements)) != {np.ndarray}:
        return None
    dtypes = {x.dtype for x in elements}
    if not all(d.isnative and d.kind not in "SUT" and dtype_name(d) in HOLDABLE for d in dtypes):
        return None
    return Rows(elements, None, dtypes.pop() if len(dtypes) == 1 else None)


def layout(c: Columns) -> tuple[Any, ...]:
    """The properties that must agree for columns to be joined or added."""
    splits = c.splits[0].dtype if c.splits else None
    return len(c.splits), splits, library_of(c.values), c.values.dtype, tuple(c.values.shape[1:])


def join_columns(columns: list[Columns]) -> Columns:
    """Columns of one layout, one below the other."""
    if len(columns) == 1:
        return columns[0]
    bounds = splits_from_lengths([c.values.shape[0] for c in columns])
    values = join_rows([c.values for c in columns], bounds)
    if not columns[0].splits:
        return Columns((), values)
    return Columns(join_splits([c.splits for c in columns], columns[0].splits[0].dtype), values)


def zeros(values: Array) -> Array:
    """Zeros in the shape of `values`; refused for text."""
    if dtype_of(values) == "string":
        raise InvalidArgumentError("there is no zero for text")
    return namespace(library_of(values) or "numpy").zeros_like(values)


def add(a: Array, b: Array) -> Array:
    """The sum of two arrays of one number dtype; integers wrap."""
    if dtype_of(a) in ("string", "bool"):
        raise InvalidArgumentError(f"variants of {dtype_of(a)} cannot be added")
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        with np.errstate(over="ignore"):  # integers wrap; NumPy would warn where they are scalars
            return np.asarray(a + b)
    return a + b


def add_elements(a: RaggedValue | None, b: RaggedValue | None) -> RaggedValue | None:
    """The sum of two elements with the same splits; filler adds as zeros."""
    if a is None or b is None:
        return a or b
    if dtype_of(a.values) != dtype_of(b.values):
        raise InvalidArgumentError(
            f"variants to add must hold one dtype, got {dtype_of(a.values)} and {dtype_of(b.values)}"
        )
    if len(a.splits) != len(b.splits):
        raise InvalidArgumentError(
            f"variants to add must have one ragged rank, got {len(a.splits)} and {len(b.splits)}"
        )
    if not equal_splits(a.splits, b.splits):
        raise InvalidArgumentError("variants to add must have the same splits")
    if tuple(a.values.shape) != tuple(b.values.shape):
        raise InvalidArgumentError(
            f"variants to add must hold values of one shape, got {list(a.values.shape)} and {list(b.values.shape)}"
        )
    return RaggedValue(a.splits, add(a.values, b.values))


def equal_splits(a: Sequence[Splits], b: Sequence[Splits]) -> bool:
    """Whether two nested splits are the same, dtype included."""
    return all(x is y or (x.dtype == y.dtype and np.array_equal(x, y)) for x, y in zip(a, b, strict=True))


def same(a: RaggedValue | None, b: RaggedValue | None) -> bool:
    if a is None or b is None:
        return a is b
    if len(a.splits) != len(b.splits) or not equal_splits(a.splits, b.splits):
        return False
    if dtype_of(a.values) != dtype_of(b.values) or tuple(a.values.shape) != tuple(b.values.shape):
        return False
    if library_of(a.values) != library_of(b.values):
        return np.array_equal(host(a.values), host(b.values))
    return bool((a.values == b.values).all())


def describe(element: RaggedValue | None) -> str:
    """A short description of an element."""
    if element is None:
        return "filler"
    values = f"{dtype_of(element.values)}{list(element.values.shape)}"
    if not element.splits:
        return values
    rows = len(element.splits[0]) - 1
    deep = f", {len(element.splits)} deep" if len(element.splits) > 1 else ""
    return f"{values} in {rows} row{'' if rows == 1 else 's'}{deep}"
