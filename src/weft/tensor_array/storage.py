"""Storage of a TensorArray: the value, state and shape of every element."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.arrays import Array
from ..core.inputs import beside_jax
from ..core.shapes import PartialShape, Shape, is_known
from .blocks import RowBlocks
from .values import ADDABLE, added, join, numpy_dtype, own_copy, unstack, zeros

# The state of an element is a sum of these. IN_BLOCKS: its value is a row of `blocks`, not in `values`. OTHER_SHAPE: its shape
# is in `other_shapes`, not `common_shape`.
VALUE, WRITTEN, READ, CLEARED, IN_BLOCKS, OTHER_SHAPE = 1, 2, 4, 8, 16, 32

# The state of an element of a new gradient array, by the state of the forward element: only its shape is known.
_SHAPE_ONLY = bytes(state & (WRITTEN | OTHER_SHAPE) if state & WRITTEN else 0 for state in range(256))

#: Several elements: consecutive ones as a slice, whose bookkeeping is cheaper, or any as an array of their numbers.
Index = slice | np.ndarray


class States:
    """The states of several elements: each of them, and the bits that some and that every element has."""

    __slots__ = ("each", "every", "some")

    def __init__(self, states: bytes) -> None:
        self.each = np.frombuffer(states, np.uint8)
        if states and states.count(states[:1]) == len(states):  # the usual case; benchmark row "scatter of 1000 rows"
            self.some = self.every = states[0]
        else:
            self.some = int(np.bitwise_or.reduce(self.each))
            self.every = int(np.bitwise_and.reduce(self.each))

    def have(self, bit: int) -> np.ndarray:
        """Which elements have a bit."""
        return self.each & bit > 0


class Storage:
    """The elements of an array. It checks nothing: `Rules` does that before.

    The state and the slot of every element are kept up to the last one touched, so that a large array costs nothing until it is
    filled. The first shape stored is the common one. NumPy elements of that shape are rows of `blocks`; all others are in the
    dict `values`.
    """

    def __init__(self, element_dtype: str, size: int, expected: int | None = None) -> None:
        self.element_dtype = element_dtype
        self.size = size
        self.numpy_dtype = numpy_dtype(element_dtype)
        self.backend: str | None = None  # the library of the elements (see values.py); None before the first
        self.device: Any = None
        self._expected = expected
        self.drop_all()

    def drop_all(self) -> None:
        self.states = bytearray()
        self.slots = array("i")
        self.blocks: RowBlocks | None = None
        self.values: dict[int, Array] = {}
        self.common_shape: Shape | None = None
        self.other_shapes: dict[int, Shape] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies of all elements, those in blocks as one array."""
        at = np.flatnonzero(view(self.states, np.uint8) & IN_BLOCKS)
        state = {name: value for name, value in self.__dict__.items() if name not in ("blocks", "slots")}
        state["states"], state["other_shapes"] = self.states[:], dict(self.other_shapes)
        state["values"] = {i: own_copy(value, self.library) for i, value in self.values.items()}
        state["rows"] = (at, self.blocks.take(view(self.slots, np.int32)[at])) if self.blocks and len(at) else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state["rows"]
        self.__dict__.update({name: value for name, value in state.items() if name != "rows"})
        self.slots = array("i", bytes(array("i").itemsize * len(self.states)))
        self.blocks = None
        if rows is not None:
            at, values = rows
            view(self.slots, np.int32)[at] = self._extend_blocks(values)

    # ----- states and shapes -----

    @property
    def library(self) -> str:
        """The library of the elements; NumPy before the first."""
        return self.backend or "numpy"

    @property
    def is_numpy(self) -> bool:
        """Whether elements are NumPy numbers, so that all elements of one shape are in blocks."""
        return self.numpy_dtype is not None and self.backend in (None, "numpy")

    @property
    def has_zero(self) -> bool:
        """Whether there are zeros of the dtype."""
        return self.numpy_dtype is not None or self.element_dtype in ADDABLE

    @property
    def nbytes(self) -> int:
        """The bytes allocated for elements in blocks, and for the state of all elements."""
        return (self.blocks.nbytes if self.blocks else 0) + len(self.states) + self.slots.itemsize * len(self.slots)

    def state(self, index: int) -> int:
        """The state of an element; 0 for one never touched."""
        return self.states[index] if index < len(self.states) else 0

    def states_at(self, index: Index) -> States:
        if isinstance(index, slice):
            return States(bytes(self.states[index]).ljust(index.stop - index.start, b"\0"))
        each = np.zeros(len(index), np.uint8)
        inside = (index >= 0) & (index < len(self.states))
        each[inside] = view(self.states, np.uint8)[index[inside]]
        return States(each.tobytes())

    def shape_of(self, index: int, state: int) -> Shape:
        """The shape of an element that has one."""
        return self.other_shapes[index] if state & OTHER_SHAPE else self.common_shape or ()

    def shapes_at(self, index: Index, states: States, unwritten: PartialShape) -> list[Shape]:
        """The shapes of several elements; one shape if all have the common one."""
        if self.common_shape is not None and states.every & WRITTEN and not states.some & OTHER_SHAPE:
            return [self.common_shape]
        default = unwritten if is_known(unwritten) else ()
        each = zip(numbers_of(index).tolist(), states.each.tolist(), strict=True)
        return [self.shape_of(i, state) if state & WRITTEN else default for i, state in each]

    def take_shapes(self, forward: Storage, changed: Callable[[Any], Any]) -> None:
        """Start as the storage of a gradient array: with the `changed` shapes of the forward elements, without values."""
        self.backend, self.device = forward.backend, forward.device
        self.common_shape = changed(forward.common_shape)
        self.other_shapes = {index: changed(shape) for index, shape in forward.other_shapes.items()}
        self.states = forward.states.translate(_SHAPE_ONLY)
        self.slots = array("i", bytes(self.slots.itemsize * len(self.states)))

    def _extend(self, count: int) -> None:
        """Have a state for at least `count` elements."""
        missing = count - len(self.states)
        if missing > 0:
            self.states.extend(bytes(missing))
            self.slots.frombytes(bytes(self.slots.itemsize * missing))

    def _set_shape(self, index: int, shape: Shape) -> int:
        """Note the shape of an element; OTHER_SHAPE if it is not the common one."""
        if self.common_shape is None:
            self.common_shape = shape
        if shape == self.common_shape:
            return 0
        self.other_shapes[index] = shape
        return OTHER_SHAPE

    # ----- writing -----

    def append(self, value: Array) -> None:
        """Store an element of the common shape behind the last one touched."""
        if type(value) is np.ndarray and self.numpy_dtype is not None:
            self.slots.append((self.blocks or self._new_blocks(value.shape)).append(value))
            self.states.append(VALUE | WRITTEN | IN_BLOCKS)
        else:
            self.values[len(self.states)] = own_copy(value, self.library)
            self.slots.append(0)
            self.states.append(VALUE | WRITTEN)
        if len(self.states) > self.size:
            self.size = len(self.states)

    def adds_in_place(self, index: int, value: np.ndarray) -> bool:
        """Add a value of the common shape to an element in the blocks; False if the element is not there."""
        if not (0 <= index < len(self.states) and self.states[index] & IN_BLOCKS):
            return False
        self.blocks.add_one(self.slots[index], value)  # type: ignore[union-attr]
        return True

    def put(self, index: int, value: Array, shape: Shape, owned: bool = False) -> None:
        """Store an element, or add to it if it has a value. `owned`: no caller writes to the memory of `value`."""
        self._extend(index + 1)
        state = self.states[index]
        if state & VALUE:
            self._add(index, state, value)
            return
        state |= VALUE | WRITTEN | self._set_shape(index, shape)
        if not state & OTHER_SHAPE and type(value) is np.ndarray and self.numpy_dtype is not None:
            self.slots[index] = (self.blocks or self._new_blocks(shape)).append(value)
            state |= IN_BLOCKS
        else:
            self.values[index] = value if owned else own_copy(value, self.library)
        self.states[index] = state
        self.size = max(self.size, index + 1)

    def put_rows(self, index: Index, value: Array, states: States | None) -> None:
        """Store or add the rows of `value`; all at once if they are NumPy rows of the common shape.

        `states` are those of the elements; None if an element occurs twice.
        """
        shape = tuple(value.shape[1:])
        if type(value) is np.ndarray and self.numpy_dtype is not None and states is not None:
            if self.common_shape in (None, shape) and not states.some & VALUE:
                self._put_new_rows(index, value, shape)
                return
            if states.every & IN_BLOCKS and self.blocks is not None:
                self.blocks.add(self._slots_of(index, states), value)
                return
        for i, row in zip(numbers_of(index).tolist(), unstack(value, self.library), strict=True):
            self.put(i, row, shape, owned=self.backend == "torch")

    def _put_new_rows(self, index: Index, value: np.ndarray, shape: Shape) -> None:
        """Store rows of the common shape as elements without a value."""
        end = end_of(index)
        self._extend(end)
        self._set_shape(end, shape)
        view(self.slots, np.int32)[index] = self._extend_blocks(value)
        view(self.states, np.uint8)[index] |= VALUE | WRITTEN | IN_BLOCKS
        self.size = max(self.size, end)

    def _extend_blocks(self, rows: np.ndarray) -> np.ndarray:
        """Copy rows to the blocks; return their slots."""
        first = (self.blocks or self._new_blocks(tuple(rows.shape[1:]))).extend(rows)
        return np.arange(first, first + len(rows), dtype=np.int32)

    def _new_blocks(self, shape: Shape) -> RowBlocks:
        assert self.numpy_dtype is not None
        self.blocks = RowBlocks(shape, self.numpy_dtype, self._expected)
        return self.blocks

    def _add(self, index: int, state: int, value: Array) -> None:
        if not state & IN_BLOCKS or self.blocks is None:
            self.values[index] = added(self.values[index], value, self.library)
        elif type(value) is np.ndarray:
            self.blocks.add_one(self.slots[index], value)
        else:  # a traced value: the sum is a new array, which a block cannot hold
            self.values[index] = self.blocks.copy_of(self.slots[index], drop=True) + value
            self.states[index] = state & ~IN_BLOCKS

    def write_zeros(self, index: int, shape: Shape) -> None:
        """Mark an element, and all between the end of the array and it, as written with zeros."""
        self._extend(index + 1)
        start = min(self.size, index)
        if not self.states[index] & WRITTEN:
            other = self._set_shape(index, shape)
            self.other_shapes.update(dict.fromkeys(range(start, index), shape) if other else {})
            self.states[start : index + 1] = bytes([WRITTEN | other]) * (index + 1 - start)
        self.size = max(self.size, index + 1)

    def convert_to_jax(self) -> None:
        """Make the NumPy elements JAX elements, because a JAX element joins them."""
        values, indices = self.snapshot()
        for index, value in zip(indices.tolist(), values, strict=True):
            self.values[index] = beside_jax(value)
            self.states[index] &= ~IN_BLOCKS
        self.blocks, self.backend = None, "jax"

    # ----- reading -----

    def read_row(self, index: int, clear: bool) -> np.ndarray:
        """A copy of an element in the blocks, which is then cleared on request."""
        value = self.blocks.copy_of(self.slots[index], clear)  # type: ignore[union-attr]
        self.states[index] = WRITTEN | READ | CLEARED if clear else self.states[index] | READ
        return value

    def stored(self, index: Index, shapes: list[Shape]) -> list[Array]:
        """Several elements as they are stored; zeros of their shape (or of the one shape) for those without a value."""
        found = []
        for at, i in enumerate(numbers_of(index).tolist()):
            state = self.state(i)
            if not state & VALUE:
                found.append(self.zeros(shapes[at % len(shapes)]))
            elif state & IN_BLOCKS and self.blocks is not None:
                found.append(self.blocks.row(self.slots[i]))
            else:
                found.append(self.values[i])
        return found

    def snapshot(self) -> tuple[list[Array], np.ndarray]:
        """The elements that have a value, as they are stored, and their indices."""
        indices = np.flatnonzero(view(self.states, np.uint8) & VALUE)
        return self.stored(indices, []), indices

    def stacked(self, index: Index, states: States, shape: Shape, last: bool) -> Array:
        """Elements of one shape as a new array, copied once if they are in blocks.

        Elements that fill their block in this order are not copied if this is their `last` use.
        """
        in_dict = False if states.every & IN_BLOCKS else bool((states.have(VALUE) & ~states.have(IN_BLOCKS)).any())
        if in_dict or not self.is_numpy:
            return join("stack", self.stored(index, [shape]), self.library)
        slots = self._slots_of(index, states)
        if not states.every & IN_BLOCKS:
            out = self.zeros((len(states.each), *shape))
            if len(slots) and self.blocks is not None:
                out[states.have(IN_BLOCKS)] = self.blocks.take(slots)
            return out
        assert self.blocks is not None
        whole = self.blocks.give_away(slots) if last else None
        if whole is None:
            return self.blocks.take(slots)
        self.blocks = None
        return whole

    def _slots_of(self, index: Index, states: States) -> np.ndarray:
        """The slots of those elements that are in blocks."""
        slots = view(self.slots, np.int32)
        return slots[index].copy() if states.every & IN_BLOCKS else slots[numbers_of(index)[states.have(IN_BLOCKS)]]

    def zeros(self, shape: Shape) -> Array:
        """Zeros of the elements' dtype, library and device."""
        if not self.has_zero:  # only for shapes without elements
            return np.empty(shape, object)
        return zeros(shape, self.element_dtype, self.library, self.device)

    def mark_read(self, index: int, clear: bool) -> None:
        """Note that an element outside the blocks was read."""
        self.states[index] |= READ
        if clear:
            self.values.pop(index, None)
            self.states[index] = self.states[index] & ~VALUE | CLEARED

    def mark_reads(self, index: Index, states: States, clear: bool) -> None:
        """Note that several elements in `states` were read."""
        each: Any = states.each if states.some != states.every else states.every  # a number is faster
        each = each | READ
        if clear:
            if self.blocks is not None and states.some & IN_BLOCKS:
                self.blocks.drop(self._slots_of(index, states))
            if self.values:
                for i in numbers_of(index)[~states.have(IN_BLOCKS)].tolist():
                    self.values.pop(i, None)
            each = each & (~(VALUE | IN_BLOCKS) & 255) | CLEARED
        view(self.states, np.uint8)[index] = each


def numbers_of(index: Index) -> np.ndarray:
    """The number of each of several elements."""
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index


def end_of(index: Index) -> int:
    """One past the last of several elements."""
    return int(index.stop if isinstance(index, slice) else index.max() + 1)


def view(buffer: Any, dtype: Any) -> np.ndarray:
    """The numbers in a buffer. Only for use within one expression: a buffer that has a view cannot grow."""
    return np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)
