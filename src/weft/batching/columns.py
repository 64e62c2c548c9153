"""How the arrays of several calls lie in one array of their batch, where they are not simply one below the other.

A column joins the parts of the calls, and splits a whole again. Arguments are joined before the function runs, and their gradients
split after the backward. Results are split, and their gradients joined. Parts and wholes have no graph.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.arrays import Array, library_of
from ..core.memory import views

Bounds = Sequence[tuple[int, int]]
Shape = tuple[int, ...]


class Column:
    """The parts of calls in one array of a batch, each at its place, in a shape of its own if it has one there."""

    def __init__(self, places: Sequence[Any], shapes: Sequence[Shape | None] | None = None) -> None:
        self._places = places
        self._shapes = [None] * len(places) if shapes is None else shapes

    def join(self, parts: Sequence[Array | None], like: Array, value: Any = 0, repeats_first: bool = False) -> Array:
        """Return a new array like a whole: the parts, and `value` where there is none.

        Rows of padding repeat the first row, or are `value`.
        """
        given, held = _without_graph(parts)
        whole = _full(like, self._shape(like), value)
        for place, shape, part in zip(self._places, self._shapes, given, strict=True):
            if part is not None:
                target = whole[place]
                _write(target if shape is None else target.reshape(shape), part)
        if repeats_first:
            self._repeat_first(whole)
        del held
        return _in_library(whole, like)

    def split(self, x: Array) -> list[Array]:
        """Return a copy of each call's part of a whole."""
        host = _readable(x)
        copies = [_copy(host[place]) for place in self._places]
        parts = zip(copies, self._shapes, strict=True)
        return [_in_library(part if shape is None else part.reshape(shape), x) for part, shape in parts]

    def problem(self, x: Array) -> str | None:
        """Return what a whole must have, for an error message, if `x` does not have it."""
        raise NotImplementedError

    def _shape(self, like: Array) -> Shape:
        """Return the shape of a whole."""
        raise NotImplementedError

    def _repeat_first(self, whole: Array) -> None:
        """Write the first row to the rows of padding."""
        raise NotImplementedError


#: The columns of a batch's outputs and inputs, None for plain rows.
Columns = tuple[Sequence[Column | None], Sequence[Column | None]]


class PaddedColumn(Column):
    """Rows that are padded along `axis` to the length of the batch. All rows of a call have one length."""

    def __init__(self, bounds: Bounds, size: int, axis: int, lengths: Sequence[int], length: int) -> None:
        between = [slice(None)] * (axis - 1)
        rows_and_lengths = zip(bounds, lengths, strict=True)
        super().__init__([(slice(*rows), *between, slice(0, own)) for rows, own in rows_and_lengths])
        self._rows, self._size, self._axis, self._length = bounds[-1][1], size, axis, length

    def problem(self, x: Array) -> str | None:
        shape = tuple(x.shape)
        if len(shape) > self._axis and (shape[0], shape[self._axis]) == (self._size, self._length):
            return None
        return f"the {self._size} rows of its batch, and along axis {self._axis} its length {self._length}"

    def _shape(self, like: Array) -> Shape:
        return (self._size, *like.shape[1 : self._axis], self._length, *like.shape[self._axis + 1 :])

    def _repeat_first(self, whole: Array) -> None:
        if self._rows < self._size:
            whole[self._rows :] = whole[:1]


class RaggedColumn(Column):
    """The values of rows of any length, one after the other: `bounds` are those of each call.

    `inner` is the shape of a value. `shapes` has the shapes of the calls' parts that are not flat values. `first_row` is the number
    of values of the first row.
    """

    def __init__(
        self, bounds: Bounds, count: int, inner: Shape, shapes: Sequence[Shape | None] | None = None, first_row: int = 0
    ) -> None:
        super().__init__([slice(*values) for values in bounds], shapes)
        self._values, self._count, self._inner, self._first_row = bounds[-1][1], count, inner, first_row

    def problem(self, x: Array) -> str | None:
        return None if x.shape and x.shape[0] == self._count else f"the {self._count} values of its batch"

    def _shape(self, like: Array) -> Shape:
        return (self._count, *self._inner)

    def _repeat_first(self, whole: Array) -> None:
        if self._values < self._count:
            padding = whole[self._values :].reshape(-1, self._first_row, *self._inner)
            padding[...] = whole[None, : self._first_row]


def _without_graph(parts: Sequence[Array | None]) -> tuple[list[Array | None], Any]:
    """Return views of arrays whose shapes nobody else can change, those of JAX in NumPy, and what holds their memory."""
    if any(library_of(x) == "torch" for x in parts):
        return [x if x is None else x.detach() for x in parts], None
    fixed, held = views([np.empty(0) if x is None else np.asarray(x) for x in parts])
    return [None if x is None else y for x, y in zip(parts, fixed, strict=True)], held


def _full(like: Array, shape: Shape, value: Any) -> Array:
    """Return an array of `value`s with the dtype and device of `like`; for arrays of JAX one of NumPy."""
    return like.detach().new_full(shape, value) if library_of(like) == "torch" else np.full(shape, value, like.dtype)


def _write(target: Array, part: Array) -> None:
    if tuple(target.shape) != tuple(part.shape):  # it must not be broadcast
        raise ValueError(f"a part must have the shape {list(target.shape)}, got {list(part.shape)}")
    target[...] = part


def _readable(x: Array) -> Array:
    """Return `x` without a graph; an array of JAX as one of NumPy, because JAX compiles a slice for every shape."""
    return x.detach() if library_of(x) == "torch" else np.asarray(x)


def _copy(x: Array) -> Array:
    return x.clone() if library_of(x) == "torch" else x.copy()


def _in_library(x: Array, like: Array) -> Array:
    """Return an array of NumPy as one of JAX, if `like` is one; others unchanged."""
    if library_of(like) != "jax":
        return x
    return sys.modules["jax"].device_put(x, like.sharding if len(like.devices()) == 1 else None)
