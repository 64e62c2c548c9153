"""Arrays of variants: each element is one ragged value, or filler.

A ragged value is a tuple of nested splits and an array of values. An array made from one ragged tensor keeps its buffer
(columns); the first access to an element cuts all of them, in one autodiff node. Other arrays are lists of elements (rows).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.arrays import Array, common_library, host, library_of
from ..core.check import whole
from ..core.inputs import OWN, items, shown, take
from ..core.memory import hold, own
from ..core.op import is_recording
from ..core.representation import never_raises
from ..errors import ArgumentTypeError, InvalidArgumentError
from ..kernels.splits import Splits, as_nested_splits, as_splits, check_nested_splits, compose_splits, read_only
from .inputs import holdable
from .parts import (
    Columns,
    RaggedValue,
    Rows,
    add,
    add_elements,
    describe,
    equal_splits,
    join_columns,
    layout,
    numpy_rows,
    same,
    zeros,
)
from .rows import split_rows


class VariantType:
    """The dtype of a variant array."""

    name = "variant"
    __slots__ = ()

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return "VARIANT"  # a singleton


VARIANT = VariantType()


class VariantArray:
    """An array whose elements are ragged values, or filler, which counts as zeros.

    `VariantArray(elements, shape)` takes arrays, `(splits, values)` pairs and None for filler, in row-major order.

    >>> import numpy as np
    >>> v = VariantArray([np.array([1.0, 2.0]), ([[0, 1]], np.array([3.0])), None])
    >>> v
    VariantArray(shape=(3,), [float64[2], float64[1] in 1 row, filler])
    >>> v[::-1].shape
    (3,)
    """

    # `_held` keeps the memory in place that `_columns` and `_rows` have views of.
    __slots__ = ("__weakref__", "_columns", "_held", "_recorded", "_rows", "shape")
    __hash__ = None  # type: ignore[assignment]
    dtype = VARIANT

    def __init__(self, elements: Iterable[Any], shape: Sequence[int] | None = None) -> None:
        elements = items("elements", elements)
        rows = numpy_rows(elements)
        if rows is None:
            values = [_element(e) for e in elements]
            rows = Rows(
                [v.values for v in values], [v.splits for v in values] if any(v.splits for v in values) else None
            )
        self._set((len(elements),) if shape is None else _shape(shape, len(elements)), rows=rows)

    def _set(
        self, shape: tuple[int, ...], columns: Columns | None = None, rows: Rows | None = None, held: Any = ()
    ) -> None:
        self.shape, self._columns, self._rows = shape, columns, rows
        if columns is not None and type(columns.values) is np.ndarray:
            held = (hold(columns.values),)
        self._held = held
        self._recorded = columns is None

    @classmethod
    def _of(
        cls, shape: tuple[int, ...], columns: Columns | None = None, rows: Rows | None = None, held: Any = ()
    ) -> VariantArray:
        made = cls.__new__(cls)
        made._set(shape, columns, rows, held)
        return made

    @classmethod
    def of_columns(cls, splits: tuple[Splits, ...], values: Array) -> VariantArray:
        """The vector of the rows of a ragged tensor with checked splits; without splits, of `values[0], ...`."""
        columns = Columns(tuple(map(own, splits)), read_only(values))
        return cls._of((len(columns),), columns=columns)

    @classmethod
    def scalar(cls, splits: tuple[Splits, ...], values: Array) -> VariantArray:
        """The scalar array of one ragged value."""
        held = (hold(values),) if type(values) is np.ndarray else ()
        return cls.of_rows((), Rows([read_only(values)], [tuple(map(own, splits))] if splits else None), held)

    @classmethod
    def of_rows(cls, shape: tuple[int, ...], rows: Rows, held: Any = ()) -> VariantArray:
        """The array of these elements, in row-major order; `held` keeps the memory of views in place."""
        return cls._of(shape, rows=rows, held=held)

    # ---- properties

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def columns(self) -> Columns | None:
        """The buffer of all elements, if there is one."""
        return self._columns

    @property
    def library(self) -> str | None:
        """The array library of the values; None if all elements are filler."""
        if self._columns is not None:
            return library_of(self._columns.values)
        held = [v for v in self.rows().values if v is not None]
        return common_library(held) if held else None

    def rows(self) -> Rows:
        """One array for each element; cut once, and again if gradients were off at the first cut and are on now."""
        rows, columns = self._rows, self._columns
        if columns is not None and (rows is None or (not self._recorded and is_recording(columns.values))):
            self._recorded = is_recording(columns.values)
            rows = self._rows = columns.rows()
        assert rows is not None
        return rows

    def elements(self) -> list[RaggedValue | None]:
        """Every element in row-major order, None for filler."""
        rows = self.rows()
        pairs = zip(rows.all_splits(), rows.values, strict=True)
        return [None if values is None else RaggedValue(splits, values) for splits, values in pairs]

    def item(self) -> RaggedValue | None:
        """The one element of an array of one."""
        if self.size != 1:
            raise InvalidArgumentError(f"item() needs exactly one element, got shape {list(self.shape)}")
        return self.elements()[0]

    def __len__(self) -> int:
        if not self.shape:
            raise ArgumentTypeError("len() of a scalar variant")
        return self.shape[0]

    @never_raises
    def __repr__(self) -> str:
        with suppress(Exception):  # values that cannot be read any more
            shown = [describe(e) for e in (self if self.size <= 8 else self.reshape((self.size,))[:8]).elements()]
            return f"VariantArray(shape={self.shape}, [{', '.join(shown)}{', ...' if self.size > 8 else ''}])"
        return f"VariantArray(shape={self.shape})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VariantArray):
            return NotImplemented
        return self.shape == other.shape and all(map(same, self.elements(), other.elements()))

    def __reduce__(self) -> tuple[Any, ...]:
        columns = self._columns
        if columns is not None:
            return _of_columns, (self.shape, tuple(columns.splits), columns.values)
        return _of_elements, (self.shape, [None if e is None else tuple(e) for e in self.elements()])

    def to_bytes(self) -> bytes:
        """The array as bytes that `from_bytes` reads; values may be of any library."""
        from .bytes import encode_variant

        return encode_variant(self.shape, self.rows() if self._columns is None else self._columns)

    @classmethod
    def from_bytes(cls, data: bytes) -> VariantArray:
        """The array that `to_bytes` wrote, with NumPy values; other bytes are refused."""
        from .bytes import decode_variant

        return cls._of(*decode_variant(data))

    # ---- indexing and joining

    def __getitem__(self, key: Any) -> VariantArray:
        if isinstance(key, slice) and self.shape:
            start, stop, step = key.indices(self.shape[0])
            if step == 1:
                return self._between(start, max(start, stop))
        if isinstance(key, (int, np.integer)) and len(self.shape) == 1:
            if not -self.shape[0] <= key < self.shape[0]:
                raise InvalidArgumentError(f"index {shown(key)} is out of range for {self.shape[0]} elements")
            return self.of_rows((), self.rows().pick([int(key)]), self._held)
        key = tuple(map(_key, key)) if isinstance(key, tuple) else _key(key)
        try:
            return self._pick(np.arange(self.size).reshape(self.shape)[key])
        except Exception as error:  # raised by NumPy, or by the key's own code
            raise InvalidArgumentError(f"index into a variant array of shape {list(self.shape)}: {error}") from None

    def __iter__(self) -> Iterator[VariantArray]:
        if not self.shape:
            raise ArgumentTypeError("iteration over a scalar variant")
        return (self[i] for i in range(self.shape[0]))

    def _between(self, start: int, stop: int) -> VariantArray:
        shape = (stop - start, *self.shape[1:])
        width = math.prod(self.shape[1:])
        if self._columns is None or self._rows is not None:
            rows = self.rows()
            first, last = start * width, stop * width
            splits = None if rows.splits is None else rows.splits[first:last]
            return self.of_rows(shape, Rows(rows.values[first:last], splits), self._held)
        return self._of(shape, columns=self._columns.cut(start * width, stop * width))

    def _pick(self, index: Any) -> VariantArray:
        index = np.asarray(index)
        return self.of_rows(index.shape, self.rows().pick(index.ravel().tolist()), self._held)

    def gather(self, indices: Any, axis: int = 0) -> VariantArray:
        """The slices `indices` along `axis`, in this order; repeats are allowed, negative numbers are not."""
        indices = as_splits("indices", indices)
        _check_axis(axis, self.ndim)
        if indices.size and not (indices.min() >= 0 and indices.max() < self.shape[axis]):
            raise InvalidArgumentError(f"indices must be in [0, {self.shape[axis]}), got {indices.tolist()}")
        return self._pick(np.take(np.arange(self.size).reshape(self.shape), indices.astype(np.int64), axis=axis))

    def reshape(self, shape: Sequence[int]) -> VariantArray:
        """The same elements in another shape, of which one dimension may be -1."""
        return self._of(_shape(shape, self.size), self._columns, self._rows, self._held)

    def unstack(self, axis: int = 0) -> list[VariantArray]:
        """The slices along `axis`."""
        _check_axis(axis, self.ndim)
        order = np.moveaxis(np.arange(self.size).reshape(self.shape), axis, 0)
        return [self._pick(index) for index in order]

    @staticmethod
    def stack(arrays: Sequence[VariantArray], axis: int = 0) -> VariantArray:
        """Arrays of one shape along a new axis."""
        if not arrays or len({a.shape for a in arrays}) > 1:
            raise InvalidArgumentError(f"stack needs arrays of one shape, got {[list(a.shape) for a in arrays]}")
        shape = arrays[0].shape
        _check_axis(axis, len(shape) + 1)
        whole = VariantArray.of_rows((len(arrays), *shape), _chain(arrays), _held(arrays))
        order = np.moveaxis(np.arange(whole.size).reshape(whole.shape), 0, axis)
        return whole if axis in (0, -len(shape) - 1) else whole._pick(order)

    @staticmethod
    def concat(arrays: Sequence[VariantArray]) -> VariantArray:
        """Arrays one below the other along the first axis; columns stay columns if their layouts agree."""
        if not arrays or not all(a.shape for a in arrays) or len({a.shape[1:] for a in arrays}) > 1:
            raise InvalidArgumentError(
                "concat needs arrays of rank 1 or more that agree beyond the first axis, "
                f"got {[list(a.shape) for a in arrays]}"
            )
        shape = (sum(a.shape[0] for a in arrays), *arrays[0].shape[1:])
        columns = [a._columns for a in arrays if a._columns is not None and a._rows is None]
        if len(columns) == len(arrays) and len({layout(c) for c in columns}) == 1:
            return VariantArray._of(shape, columns=join_columns(columns))
        return VariantArray.of_rows(shape, _chain(arrays), _held(arrays))

    def cut(self, bounds: Sequence[tuple[int, int]]) -> list[VariantArray]:
        """For each `(start, stop)` a copy of those slices along the first axis.

        Bounds that do not overlap are cut from columns in one autodiff node.
        """
        columns, width = self._columns, math.prod(self.shape[1:])
        if columns is None or self._rows is not None:
            return [_own(self[start:stop]) for start, stop in bounds]
        points = sorted({0, len(columns), *(p * width for pair in bounds for p in pair)})
        where = np.asarray(points)
        values = split_rows(columns.values, compose_splits(columns.splits)[where] if columns.splits else where)
        pieces = dict(zip(pairwise(points), values, strict=True))
        return [_own(self._piece(start, stop, pieces.get((start * width, stop * width)))) for start, stop in bounds]

    def _piece(self, start: int, stop: int, values: Array | None) -> VariantArray:
        piece = self[start:stop]
        if values is None or piece._columns is None:
            return piece
        return self._of(piece.shape, columns=Columns(piece._columns.splits, values))

    @staticmethod
    def select(condition: Any, then: VariantArray, otherwise: VariantArray) -> VariantArray:
        """Elements of `then` where `condition` holds, of `otherwise` elsewhere; the three broadcast."""
        condition = np.asarray(condition)
        try:
            shape = np.broadcast_shapes(condition.shape, then.shape, otherwise.shape)
        except ValueError as error:
            raise InvalidArgumentError(f"select: {error}") from None
        first = np.broadcast_to(np.arange(then.size).reshape(then.shape), shape)
        second = np.broadcast_to(np.arange(otherwise.size).reshape(otherwise.shape) + then.size, shape)
        arrays = [then, otherwise]
        both = VariantArray.of_rows((then.size + otherwise.size,), _chain(arrays), _held(arrays))
        return both._pick(np.where(condition, first, second))

    # ---- arithmetic

    def zeros_like(self) -> VariantArray:
        """The same splits with zeros for values; filler stays filler."""
        if self._columns is not None and self._rows is None:
            columns = Columns(self._columns.splits, zeros(self._columns.values))
            return self._of(self.shape, columns=columns)
        rows = self.rows()
        return self.of_rows(self.shape, Rows([None if v is None else zeros(v) for v in rows.values], rows.splits))

    def __add__(self, other: VariantArray) -> VariantArray:
        if not isinstance(other, VariantArray):
            return NotImplemented
        if self.shape != other.shape:
            raise InvalidArgumentError(
                f"variants to add must have one shape, got {list(self.shape)} and {list(other.shape)}"
            )
        a, b = self._columns, other._columns
        if a is not None and b is not None and layout(a) == layout(b) and equal_splits(a.splits, b.splits):
            columns = Columns(a.splits, add(a.values, b.values))
            return self._of(self.shape, columns=columns)
        sums = list(map(add_elements, self.elements(), other.elements()))
        return VariantArray(sums, self.shape)

    @staticmethod
    def add_n(arrays: Sequence[VariantArray]) -> VariantArray:
        """The sum, in TensorFlow's order: neighbours first, then neighbouring sums; an odd one is added to the first."""
        if not arrays:
            raise InvalidArgumentError("add_n needs at least one variant")
        terms = list(arrays)
        while len(terms) > 1:
            sums = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
            if len(terms) % 2:
                sums[0] = sums[0] + terms[-1]
            terms = sums
        return terms[0]


def _of_columns(shape: tuple[int, ...], splits: tuple[Splits, ...], values: Array) -> VariantArray:
    """Check and rebuild a copied or pickled variant array."""
    nested, values = as_nested_splits("splits", splits), holdable("values", values)
    check_nested_splits("splits", nested, values.shape)
    return VariantArray.of_columns(nested, read_only(values)).reshape(shape)


def _of_elements(shape: tuple[int, ...], elements: list[Any]) -> VariantArray:
    """Check and rebuild a copied or pickled variant array, with read-only values."""
    made = VariantArray(elements, shape)
    rows = made.rows()
    return VariantArray.of_rows(
        made.shape, Rows([read_only(values) for values in rows.values], rows.splits, rows.dtype)
    )


def _key(part: Any) -> Any:
    """Convert a part of an index for NumPy."""
    if part is None or part is ... or isinstance(part, slice):
        return part
    taken = take("an index", part)
    return taken if library_of(taken) in (None, "numpy") else host(taken)


def _element(given: Any) -> RaggedValue:
    """Convert an argument of the constructor to an element; filler has None for values."""
    if given is None:
        return RaggedValue((), None)
    if isinstance(given, VariantArray):
        return given.item() or RaggedValue((), None)
    if isinstance(given, tuple):
        if len(given) != 2:
            raise InvalidArgumentError(f"an element must be None, an array or (splits, values), got {len(given)} parts")
        return RaggedValue(as_nested_splits("splits", given[0]), holdable("values", given[1]))
    return RaggedValue((), holdable("an element", given))


def _shape(shape: Sequence[int], size: int) -> tuple[int, ...]:
    try:
        return np.empty(size, np.bool_).reshape(tuple(whole("shape", d) for d in items("shape", shape))).shape
    except (ValueError, TypeError, OverflowError):
        raise InvalidArgumentError(f"{size} elements must fill the shape exactly, got {shown(shape)}") from None


def _check_axis(axis: int, ndim: int) -> None:
    if not -ndim <= whole("axis", axis) < ndim:
        raise InvalidArgumentError(f"axis must be in [{-ndim}, {ndim}), got {axis}")


def _chain(arrays: Sequence[VariantArray]) -> Rows:
    parts = [a.rows() for a in arrays]
    values = [v for rows in parts for v in rows.values]
    if all(rows.splits is None for rows in parts):
        return Rows(values, None)
    return Rows(values, [s for rows in parts for s in rows.all_splits()])


def _held(arrays: Sequence[VariantArray]) -> tuple[Any, ...]:
    """The objects that keep the memory of the views in `arrays` in place."""
    return tuple({id(held): held for a in arrays for held in a._held}.values())


def _own(piece: VariantArray) -> VariantArray:
    """A copy of `piece` that keeps no other memory alive."""
    columns = piece.columns
    if columns is not None:
        return VariantArray.of_columns(columns.splits, _copied(columns.values)).reshape(piece.shape)
    rows = piece.rows()
    return VariantArray.of_rows(piece.shape, Rows([_copied(v) for v in rows.values], rows.splits))


def _copied(x: Array | None) -> Array | None:
    """A copy of a mutable array; JAX arrays are immutable."""
    if isinstance(x, np.ndarray):
        return x.copy()
    return x.clone() if x is not None and library_of(x) == "torch" else x


OWN.add(VariantArray)
