"""Where the elements of an array are: equal NumPy elements in rows, all others one by one."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from ..core.arrays import Array
from ..core.inputs import beside_jax
from ..core.shapes import PartialShape, Shape, is_known
from . import values as _values
from .blocks import Rows

# What is known of one element. ROW: its value is in the rows, else in the dict. ODD: its shape is not the common one.
VALUE, WRITTEN, READ, CLEARED, ROW, ODD = 1, 2, 4, 8, 16, 32


class Store:
    """Elements by index, with the state and the shape of each. It is told what to do, and refuses nothing.

    A byte of state and a slot number are kept of every element up to the last one touched, so that a large array costs
    nothing until it is filled. The first shape stored is the common one, and only shapes that differ from it are noted.
    """

    def __init__(self, element_dtype: str, size: int, rows_expected: int | None = None) -> None:
        self.element_dtype = element_dtype
        self.size = size
        self._rows_expected = rows_expected
        self._numpy_dtype = _values.numpy_dtype(element_dtype)
        self._kin: str | None = None  # the library of the elements, None before the first
        self._device: Any = None
        self._forget()

    def _forget(self) -> None:
        """Hold no element."""
        self._flags = bytearray()
        self._slots = array("i")
        self._rows: Rows | None = None
        self._values: dict[int, Array] = {}
        self._common: Shape | None = None
        self._odd: dict[int, Shape] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle is made of: every element in memory of its own, those in rows as one array."""
        at = np.flatnonzero(view(self._flags, np.uint8) & ROW)
        state = {name: value for name, value in self.__dict__.items() if name not in ("_rows", "_slots")}
        state["_flags"], state["_odd"] = self._flags[:], dict(self._odd)
        state["_values"] = {i: _values.own(value, self._kin or "numpy") for i, value in self._values.items()}
        state["rows"] = (at, self._rows.take(view(self._slots, np.int32)[at])) if self._rows and len(at) else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state["rows"]
        self.__dict__.update({name: value for name, value in state.items() if name != "rows"})
        self._slots = array("i", bytes(array("i").itemsize * len(self._flags)))
        self._rows = None
        if rows is not None:
            at, values = rows
            view(self._slots, np.int32)[at] = self._rows_of(values, tuple(values.shape[1:]))

    @property
    def nbytes(self) -> int:
        """The bytes allocated for elements in rows and for the books on all elements."""
        return (self._rows.nbytes if self._rows else 0) + len(self._flags) + self._slots.itemsize * len(self._slots)

    def _state(self, index: int) -> int:
        return self._flags[index] if index < len(self._flags) else 0

    def _states(self, indices: np.ndarray) -> np.ndarray:
        """The state of each of the elements; 0 for those of which nothing is known."""
        flags = view(self._flags, np.uint8)
        inside = (indices >= 0) & (indices < len(flags))
        if bool(inside.all()):
            return flags[indices]
        found = np.zeros(len(indices), np.uint8)
        found[inside] = flags[indices[inside]]
        return found

    def _state_of(self, run: slice) -> int | None:
        """The one state that all elements of a run have; None where they differ."""
        flags, start, stop = self._flags, run.start, run.stop
        if start >= len(flags):
            return 0
        state = flags[start] if stop <= len(flags) else 0
        return state if flags.count(state, start, stop) == min(stop, len(flags)) - start else None

    def _shape_of(self, index: int, state: int) -> Shape:
        return self._odd[index] if state & ODD else self._common or ()

    def _shapes(self, indices: np.ndarray, states: np.ndarray, unwritten: PartialShape) -> list[Shape]:
        """The shapes of the elements `indices`, or the one they all have."""
        if self._common is not None and bool((states & (WRITTEN | ODD) == WRITTEN).all()):
            return [self._common]
        default = unwritten if is_known(unwritten) else ()
        each = zip(indices.tolist(), states.tolist(), strict=True)
        return [self._shape_of(i, state) if state & WRITTEN else default for i, state in each]

    def _extend(self, count: int) -> None:
        """Keep books on at least `count` elements."""
        missing = count - len(self._flags)
        if missing == 1:
            self._flags.append(0)
            self._slots.append(0)
        elif missing > 1:
            self._flags.extend(bytes(missing))
            self._slots.frombytes(bytes(self._slots.itemsize * missing))

    def _record(self, index: int, shape: Shape) -> int:
        """ODD if `shape` is not the common one; afterwards it is known as the shape of element `index`."""
        if shape == self._common:
            return 0
        if self._common is None:
            self._common = shape
            return 0
        self._odd[index] = shape
        return ODD

    def _put(self, index: int, value: Array, shape: Shape, owned: bool = False) -> None:
        """Store an element, or add to it where there is one. `owned`: nobody else writes to the memory of `value`."""
        flags = self._flags
        if index >= len(flags):
            self._extend(index + 1)
        state = flags[index]
        if state & VALUE:
            self._add(index, state, value)
            return
        state |= VALUE | WRITTEN
        if shape != self._common:
            state |= self._record(index, shape)
        if not state & ODD and type(value) is np.ndarray and self._numpy_dtype is not None:
            self._slots[index] = (self._rows or self._new_rows(shape)).append(value)
            state |= ROW
        else:
            self._values[index] = value if owned else _values.own(value, self._kin or "numpy")
        flags[index] = state
        if index >= self.size:
            self.size = index + 1

    def _new_rows(self, shape: Shape) -> Rows:
        assert self._numpy_dtype is not None
        self._rows = Rows(shape, self._numpy_dtype, self._rows_expected)
        return self._rows

    def _add(self, index: int, state: int, value: Array) -> None:
        if not state & ROW or self._rows is None:
            self._values[index] = _values.added(self._values[index], value, self._kin or "numpy")
            return
        if type(value) is np.ndarray:
            self._rows.add_one(self._slots[index], value)
        else:  # a traced value: the sum is a new array, which the row cannot hold
            self._values[index] = self._rows.copy_of(self._slots[index], drop=True) + value
            self._flags[index] = state & ~ROW

    def _hold_as_jax(self) -> None:
        """Let elements that are NumPy's be JAX's, because one of JAX's comes among them."""
        values, indices = self._snapshot()
        for index, value in zip(indices.tolist(), values, strict=True):
            self._values[index] = beside_jax(value)
            self._flags[index] &= ~ROW
        self._rows, self._kin = None, "jax"

    def _put_rows(self, indices: np.ndarray, value: Array, states: np.ndarray | None) -> None:
        """Store or add the rows of `value`; all at once where they are NumPy rows of the common shape.

        `states` are those of the elements, None where one comes twice.
        """
        shape = tuple(value.shape[1:])
        if type(value) is np.ndarray and self._numpy_dtype is not None and states is not None:
            if self._common in (None, shape) and not (states & VALUE).any():
                self._put_new_rows(indices, value, shape)
                return
            if bool((states & ROW).all()) and self._rows is not None:
                self._rows.add(view(self._slots, np.int32)[indices], value)
                return
        owned = self._kin == "torch"
        for index, row in zip(indices.tolist(), _values.rows_of(value, self._kin or "numpy"), strict=True):
            self._put(index, row, shape, owned)

    def _put_new_rows(self, indices: np.ndarray, value: np.ndarray, shape: Shape) -> None:
        """Store the rows of `value`, which have the common shape, as elements that have no value."""
        end = int(indices.max()) + 1
        self._extend(end)
        self._record(end, shape)
        view(self._slots, np.int32)[indices] = self._rows_of(value, shape)
        view(self._flags, np.uint8)[indices] |= VALUE | WRITTEN | ROW
        self.size = max(self.size, end)

    def _put_run(self, run: slice, value: np.ndarray, shape: Shape) -> None:
        """The same for a run of elements of which nothing is known."""
        self._extend(run.start)
        self._record(run.stop, shape)
        self._slots[run] = array("i", self._rows_of(value, shape).tobytes())
        self._flags[run] = bytes((VALUE | WRITTEN | ROW,)) * len(value)
        self.size = max(self.size, run.stop)

    def _rows_of(self, value: np.ndarray, shape: Shape) -> np.ndarray:
        """The slots that the rows of `value` were copied to."""
        first = (self._rows or self._new_rows(shape)).extend(value)
        return np.arange(first, first + len(value), dtype=np.int32)

    def _write_zeros(self, index: int, shape: Shape) -> None:
        """Let element `index` count as written with zeros, and so all between the end and it."""
        self._extend(index + 1)
        start = min(self.size, index)
        if not self._flags[index] & WRITTEN:
            odd = self._record(index, shape)
            self._odd.update(dict.fromkeys(range(start, index), shape) if odd else {})
            self._flags[start : index + 1] = bytes([WRITTEN | odd]) * (index + 1 - start)
        self.size = max(self.size, index + 1)

    def _read_row(self, index: int, clear: bool) -> np.ndarray:
        """A copy of an element that is a row, which is then cleared if asked for."""
        value = self._rows.copy_of(self._slots[index], clear)  # type: ignore[union-attr]
        self._flags[index] = WRITTEN | READ | CLEARED if clear else self._flags[index] | READ
        return value

    def _list(self, indices: np.ndarray, shapes: list[Shape]) -> list[Array]:
        """The elements `indices` as they are stored, zeros of their shape (or of the one shape) where nothing is."""
        found = []
        for at, index in enumerate(indices.tolist()):
            state = self._state(index)
            if not state & VALUE:
                found.append(self._zeros(shapes[at % len(shapes)]))
            elif state & ROW and self._rows is not None:
                found.append(self._rows.row(self._slots[index]))
            else:
                found.append(self._values[index])
        return found

    def _snapshot(self) -> tuple[list[Array], np.ndarray]:
        """The elements that have a value, as they are stored, and their indices."""
        held = np.flatnonzero(view(self._flags, np.uint8) & VALUE)
        return self._list(held, []), held

    def _joined(self, indices: np.ndarray, states: np.ndarray, shape: Shape, last: bool) -> Array:
        """Elements that all have `shape` as one new array, copied once where they are rows.

        If this is their `last` use, and they fill their memory in this order, they are not even copied.
        """
        held = states & ROW > 0
        if not self._is_numbers or not bool((held | (states & VALUE == 0)).all()):
            return _values.stack(self._list(indices, [shape]), self._kin or "numpy")
        slots = view(self._slots, np.int32)[indices[held]]
        if len(slots) == len(indices):
            return self._taken(slots, last)
        out = self._zeros((len(indices), *shape))
        if len(slots) and self._rows is not None:
            out[held] = self._rows.take(slots)
        return out

    def _taken(self, slots: np.ndarray, last: bool) -> np.ndarray:
        """The rows in `slots` as one new array, or the memory they fill if this is their `last` use."""
        assert self._rows is not None
        given = self._rows.give_away(slots) if last else None
        if given is None:
            return self._rows.take(slots)
        self._rows = None
        return given

    @property
    def _is_numbers(self) -> bool:
        """Whether elements are NumPy's, so that one shape for all means one row for each."""
        return self._numpy_dtype is not None and self._kin in (None, "numpy")

    @property
    def _has_zero(self) -> bool:
        return self._numpy_dtype is not None or self.element_dtype in _values.ADDABLE

    def _zeros(self, shape: Shape) -> Array:
        if not self._has_zero:  # without elements there is nothing to be zero
            return np.empty(shape, object)
        return _values.zeros(shape, self.element_dtype, self._kin or "numpy", self._device)

    def _clear_value(self, index: int) -> None:
        """Clear an element that is not a row."""
        self._values.pop(index, None)
        self._flags[index] = self._flags[index] & ~VALUE | CLEARED

    def _clear_values(self, indices: np.ndarray, states: np.ndarray) -> None:
        held = states & ROW > 0
        if self._rows is not None and bool(held.any()):
            self._rows.drop(view(self._slots, np.int32)[indices[held]])
        for index in indices[~held].tolist():
            self._values.pop(index, None)
        view(self._flags, np.uint8)[indices] = states & (~(VALUE | ROW) & 255) | CLEARED


def repeats(indices: np.ndarray) -> bool:
    """Whether a number occurs twice."""
    return not bool((np.diff(indices) > 0).all()) and len(np.unique(indices)) < len(indices)


def view(buffer: Any, dtype: Any) -> np.ndarray:
    """The numbers in a buffer. Only for use within one expression: a buffer that has a view cannot grow."""
    return np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)
