"""The array behind a TensorArray handle: the rules of writing and reading elements, and of adding up gradients."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from threading import RLock
from typing import Any

import numpy as np

from . import _values
from ._arrays import Array, dtype_of
from ._shapes import PartialShape, Shape, check_total, fits, is_known, merge, show
from ._store import CLEARED, ODD, READ, ROW, VALUE, WRITTEN, Store, repeats, view
from .errors import InvalidArgumentError, ResourceExhaustedError, UnimplementedError

#: The most elements an array may have: there are books on each of them, up to the last one written.
MAX_SIZE = 2**27

# What a gradient array knows at first of an element, by the state of the forward element: its shape.
_SHAPE_ONLY = bytes(state & (WRITTEN | ODD) if state & WRITTEN else 0 for state in range(256))
_NUMBERS = itertools.count()


class Elements(Store):
    """A list of arrays, each written once and, if asked for, forgotten when read. It is its own handle.

    Every call is atomic against calls from other threads, and one that raises changes nothing. An array made by
    `gradient` adds what is written to an element that was written before, and reads as zeros what was not.
    """

    # What a handle looks like among arrays.
    shape = ()
    dtype = "resource"

    def __init__(
        self,
        element_dtype: str,
        size: int,
        element_shape: PartialShape = None,
        *,
        dynamic: bool = False,
        clear_after_read: bool = True,
        identical: bool = False,
        name: str = "TensorArray",
    ) -> None:
        check_size(size)
        # Only what is cleared when read can be given away in one piece.
        super().__init__(element_dtype, size, size if clear_after_read and not dynamic else None)
        self.element_shape = element_shape
        self.name = f"{name}_{next(_NUMBERS)}"
        self._dynamic = dynamic
        self._clear = clear_after_read
        self._identical = identical
        self._adding = self._adds = False  # whether it is a gradient array, and whether its dtype can be added
        self._prefix: Shape = ()
        self._closed = False
        self._marked = -1  # how many pieces the last split made
        self._accepted: Shape | None = None  # a shape that was found to fit
        # The type and dtype of values that need no conversion.
        self._seen: tuple[Any, Any] = (np.ndarray, self._numpy_dtype)
        # A NumPy element of the usual shape, right behind the others and below the limit, needs no other check.
        self._usual: Shape | None = None
        self._limit = MAX_SIZE if dynamic else size
        self._gradients: dict[str, Elements] = {}
        # Re-entrant, because a finalizer that uses the array may run in the middle of a call.
        self._lock = RLock()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"size {self.size}"
        return f"<TensorArray {self.name}: {self.element_dtype}{show(self.element_shape)}, {state}>"

    # ----- writing -----

    def write(self, index: int, value: Array) -> None:
        """Store `value` as element `index`; in a gradient array, add it to what is there."""
        seen = self._seen
        if type(value) is not seen[0] or value.dtype is not seen[1]:
            value = self._converted(value)
        shape = tuple(value.shape)
        with self._lock:
            if shape == self._usual and type(value) is np.ndarray and self._put_usual(index, value):
                return
            self._check_open()
            kin = self._check_kin(value)
            self._check_write(index, shape)
            self._settle(kin, value, shape)
            self._put(index, value, shape)
            self._usual = shape if shape == self._common and self._rows is not None else None

    def _put_usual(self, index: int, value: np.ndarray) -> bool:
        """Whether nothing needs a closer look, and so `value` was stored behind the others, or added to a row."""
        flags, rows = self._flags, self._rows
        if rows is None:
            return False
        if index == len(flags) < self._limit:
            self._slots.append(rows.append(value))
            flags.append(VALUE | WRITTEN | ROW)
            if index >= self.size:
                self.size = index + 1
            return True
        if self._adds and 0 <= index < len(flags) and flags[index] & ROW:
            row = rows.row(self._slots[index])
            np.add(row, value, out=row)
            return True
        return False

    def append(self, value: Array) -> None:
        """Store `value` behind the last element that was written or read."""
        with self._lock:
            self.write(self.size if self._dynamic else len(self._flags), value)

    def scatter(self, indices: np.ndarray, value: Array) -> None:
        """Write the rows of `value` to the elements `indices`."""
        value = self._converted(value)
        if not value.shape:
            raise InvalidArgumentError("value must have at least one dimension to be scattered, got a scalar")
        with self._lock:
            self._check_open()
            kin = self._check_kin(value)
            if len(indices) != (rows := value.shape[0]):
                raise InvalidArgumentError(f"indices and value must be equally long, got {len(indices)} and {rows}")
            if len(indices):
                shape = tuple(value.shape[1:])
                self._check_last(int(indices.max()))
                self._check_writes(indices, shape)
                self._settle(kin, value, shape)
                self._put_rows(indices, value)

    def split(self, value: Array, lengths: Sequence[int]) -> None:
        """Write consecutive pieces of `value`, of `lengths` rows each, to the elements from 0 on."""
        rows = _row_count(value)
        if any(n < 0 for n in lengths) or sum(lengths) != rows:
            raise InvalidArgumentError(
                f"lengths must not be negative and must add up to the rows of value, {rows}, got {_some(lengths)}"
            )
        with self._lock:
            self._check_open()
            count = len(lengths)
            if count != self.size and not (self._dynamic and count > self.size):
                raise InvalidArgumentError(
                    f"lengths must be as many as the elements of {self.name}, {self.size}, got {count}"
                )
            value = self._converted(value)
            kin = self._check_kin(value)
            if count:
                self._check_last(count - 1)
                self._put_pieces(kin, value, lengths)
            if not self._adding:
                self._marked = count

    def _put_pieces(self, kin: str, value: Array, lengths: Sequence[int]) -> None:
        shapes = [(n, *value.shape[1:]) for n in lengths]
        if type(value) is np.ndarray and len(set(lengths)) == 1:
            indices = np.arange(len(lengths))
            self._check_writes(indices, shapes[0])
            self._settle(kin, value, shapes[0])
            self._put_rows(indices, value.reshape(len(lengths), *shapes[0]))
            return
        for index, shape in enumerate(shapes):
            self._check_write(index, shape)
            if self._identical and not is_known(self.element_shape) and shape != shapes[0]:
                raise InvalidArgumentError(f"elements of {self.name} must have one shape, got lengths {_some(lengths)}")
        self._settle(kin, value, shapes[0])
        for index, piece in enumerate(_values.pieces_of(value, lengths, kin)):
            self._put(index, piece, shapes[index], owned=kin == "torch")

    def _converted(self, value: Any) -> Array:
        """`value` as an array that may be an element, or the rows of elements."""
        given, value = value, _values.plain(value, self.element_dtype, self._kin)
        if (found := dtype_of(value)) != self.element_dtype:
            raise InvalidArgumentError(f"value must have the dtype of {self.name}, {self.element_dtype}, got {found}")
        if value is given:
            self._seen = (type(value), value.dtype)
        return value

    def _settle(self, kin: str, value: Array, shape: Shape) -> None:
        """Fix what the first element decides: library and device, and the shape where all are to have one."""
        if self._kin is None:
            self._kin, self._device = kin, getattr(value, "device", None) if kin == "torch" else None
        if self._identical and not is_known(self.element_shape):
            self.element_shape = self._accepted = shape

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError(f"{self.name} has been closed")

    def _check_kin(self, value: Array) -> str:
        """The library of `value`, which must be that of the other elements, as must be its device."""
        kin = _values.kin_of(value)
        device = value.device if kin == "torch" else None
        if self._kin is not None and (kin != self._kin or device != self._device):
            raise InvalidArgumentError(
                f"value must be of the library and on the device of the other elements of {self.name}, "
                f"{self._kin} {self._device or ''}, got {kin} {device or ''}"
            )
        return kin

    def _check_last(self, index: int) -> None:
        """Raise unless the largest `index` of a call that writes several is, or can become, one of an element."""
        if index >= self.size and (not self._dynamic or index >= 2**31 - 1):
            raise InvalidArgumentError(f"indices must be below the size of {self.name}, {self.size}, got {index}")
        check_size(index + 1)

    def _check_write(self, index: int, shape: Shape) -> None:
        """Raise unless an element of `shape` can be written to `index`."""
        if not 0 <= index < self.size:
            if index < 0 or not self._dynamic:
                raise InvalidArgumentError(f"index must be in [0, {self.size}) to write to {self.name}, got {index}")
            check_size(index + 1)
        if shape != self._accepted:
            self._check_shape(shape)
        state = self._flags[index] if index < len(self._flags) else 0
        if state & (WRITTEN | READ):
            self._check_rewrite(index, state, shape)

    def _check_shape(self, shape: Shape) -> None:
        prefix = self._prefix
        if not fits(shape, self.element_shape) or shape[: len(prefix)] != prefix:
            wanted = show(self.element_shape) if self.element_shape is not None else f"{show(prefix)} and more"
            raise InvalidArgumentError(f"value must have the shape {wanted} in {self.name}, got {show(shape)}")
        self._accepted = shape

    def _check_rewrite(self, index: int, state: int, shape: Shape) -> None:
        if state & READ:
            raise InvalidArgumentError(f"element {index} of {self.name} cannot be written after it was read")
        if not self._adding:
            raise InvalidArgumentError(f"element {index} of {self.name} cannot be written twice")
        if shape != (found := self._shape_of(index, state)):
            raise InvalidArgumentError(
                f"value must have the shape of element {index}, {show(found)}, got {show(shape)}"
            )
        if state & VALUE:
            self._check_addable(shape)

    def _check_addable(self, shape: Shape) -> None:
        if self.element_dtype not in _values.ADDABLE and 0 not in shape:
            raise InvalidArgumentError(f"elements of dtype {self.element_dtype} cannot be added")

    def _check_writes(self, indices: np.ndarray, shape: Shape) -> None:
        """Raise unless elements of `shape` can be written to all `indices`, none of which is past the end."""
        self._check_shape(shape)
        states = self._states(indices)
        # Of these states each has to be looked at; adding to elements of the common shape is right for all of them.
        doubtful = READ | ODD if self._adding and shape == self._common else READ | WRITTEN
        if bool((refused := (indices < 0) | (states & doubtful > 0)).any()):
            for index in indices[refused].tolist():
                self._check_write(index, shape)
        repeated = repeats(indices)
        if repeated and not self._adding:
            raise InvalidArgumentError(f"an element of {self.name} cannot be written twice, got repeated indices")
        if repeated or bool((states & VALUE).any()):
            self._check_addable(shape)

    # ----- reading -----

    def read(self, index: int) -> Array:
        """Element `index`; zeros if it was not written and its shape is known."""
        with self._lock:
            if 0 <= index < len(self._flags) and self._flags[index] & ROW:
                return self._read_row(index, self._clear)
            self._check_open()
            missing = self._check_read(index, self.element_shape)
            if missing is not None:
                value = self._zeros(missing)
            else:
                value = _values.handed_out(self._values[index], self._kin or "numpy", self._clear)
            self._mark_read(index, missing)
            return value

    def gather(self, indices: np.ndarray, element_shape: PartialShape) -> Array:
        """The elements `indices` as the rows of one new array."""
        with self._lock:
            merged = self._merged(element_shape)
            if not len(indices):
                if not is_known(element_shape):
                    raise UnimplementedError("a gather of nothing must be given a fully known element_shape")
                value = self._zeros((0, *element_shape))
            else:
                self._check_open()
                states = self._check_reads(indices, merged)
                value = self._stacked(indices, states, merged, element_shape)
                self._mark_reads(indices, states, merged)
            if merged != self.element_shape:
                self.element_shape, self._accepted, self._usual = merged, None, None
            return value

    def concat(self, element_shape_except0: PartialShape) -> tuple[Array, np.ndarray]:
        """All elements one below the other, and the rows of each."""
        with self._lock:
            self._check_open()
            count = self._marked if self._adding else self.size
            if count < 0:
                raise InvalidArgumentError("an array must have been split for its gradient array to be concatenated")
            if count == 0:
                if not is_known(element_shape_except0):
                    raise UnimplementedError("a concat of nothing must be given a fully known element_shape_except0")
                return self._zeros((0, *element_shape_except0)), np.zeros(0, np.int64)
            indices = np.arange(count)
            states = self._check_reads(indices, self.element_shape)
            value, lengths = self._concatenated(indices, states, element_shape_except0)
            self._mark_reads(indices, states, self.element_shape)
            return value, lengths

    def count(self) -> int:
        """The number of elements."""
        with self._lock:
            self._check_open()
            return self.size

    def _check_read(self, index: int, element_shape: PartialShape) -> Shape | None:
        """None if element `index` has a value, else the shape of the zeros it is read as."""
        if index < 0 or (index >= self.size and not self._adding):
            raise InvalidArgumentError(f"index must be in [0, {self.size}) to read from {self.name}, got {index}")
        state = self._flags[index] if index < len(self._flags) else 0
        if state & VALUE:
            return None
        if state & CLEARED:
            raise InvalidArgumentError(f"element {index} of {self.name} has been read already, and was cleared then")
        shape = self._shape_of(index, state) if state & WRITTEN else element_shape
        if not is_known(shape):
            raise InvalidArgumentError(
                f"element {index} of {self.name} must be written before it is read: its shape is unknown, {show(shape)}"
            )
        if not self._has_zero and 0 not in shape:
            raise InvalidArgumentError(
                f"element {index} must be written: there is no zero of dtype {self.element_dtype}"
            )
        check_size(index + 1)
        return shape

    def _check_reads(self, indices: np.ndarray, element_shape: PartialShape) -> np.ndarray:
        """The states of the elements `indices`, if all of them can be read."""
        states = self._states(indices)
        for index in indices[states & VALUE == 0].tolist():
            self._check_read(index, element_shape)
        if self._clear and repeats(indices):
            raise InvalidArgumentError(f"an element of {self.name} is cleared when read, got repeated indices")
        return states

    def _stacked(self, indices: np.ndarray, states: np.ndarray, unwritten: PartialShape, wanted: PartialShape) -> Array:
        shapes = self._shapes(indices, states, unwritten)
        first = shapes[0]
        if not fits(first, wanted):
            raise InvalidArgumentError(f"elements must have the shape {show(wanted)}, got {show(first)}")
        if 0 in first:  # as in TensorFlow, which does not look at the others then
            return self._zeros((len(indices), *first))
        _check_equal(shapes, "elements that are gathered must have one shape")
        _values.check_room((len(indices), *first), self.element_dtype)
        return self._joined(indices, states, first, self._clear)

    def _concatenated(self, indices: np.ndarray, states: np.ndarray, rest: PartialShape) -> tuple[Array, np.ndarray]:
        shapes = self._shapes(indices, states, self.element_shape)
        if () in shapes:
            raise InvalidArgumentError("elements that are concatenated must have at least one dimension, got a scalar")
        inner = shapes[0][1:]
        if not fits(inner, rest):
            raise InvalidArgumentError(
                f"elements must have the shape {show(rest)} after dimension 0, got {show(inner)}"
            )
        _check_equal([s[1:] for s in shapes], "elements that are concatenated must agree after dimension 0")
        lengths = np.resize(np.array([s[0] for s in shapes], np.int64), len(indices))
        whole = (int(lengths.sum()), *inner)
        _values.check_room(whole, self.element_dtype)
        if len(shapes) == 1 and self._is_numbers:
            return self._joined(indices, states, shapes[0], self._clear).reshape(whole), lengths
        return _values.concat(self._list(indices, shapes), self._kin or "numpy"), lengths

    def _mark_read(self, index: int, zeros: Shape | None) -> None:
        """Note that element `index` was read, as zeros of this shape if it had no value."""
        if zeros is not None:
            self._write_zeros(index, zeros)
        self._flags[index] |= READ
        if self._clear:
            self._clear_value(index)

    def _mark_reads(self, indices: np.ndarray, states: np.ndarray, element_shape: PartialShape) -> None:
        written = states & WRITTEN > 0
        for index in indices[~written].tolist():
            self._mark_read(index, element_shape if is_known(element_shape) else ())
        indices, states = indices[written], states[written] | np.uint8(READ)
        view(self._flags, np.uint8)[indices] = states
        if self._clear:
            self._clear_values(indices, states)

    def _merged(self, element_shape: PartialShape) -> PartialShape:
        """The array's element shape together with what a gather says of it."""
        if element_shape is None:
            return self.element_shape
        prefix = self._prefix
        if not fits(element_shape, self.element_shape) or not fits(element_shape[: len(prefix)], prefix):
            wanted = show(self.element_shape)
            raise InvalidArgumentError(
                f"element_shape must agree with that of {self.name}, {wanted}, got {show(element_shape)}"
            )
        merged = merge(self.element_shape, element_shape) or ()
        return (*prefix, *merged[len(prefix) :])

    # ----- gradient arrays, closing -----

    def gradient(self, source: str, prepend: Shape = ()) -> Elements:
        """The gradient array called `source`: made at the first call, with `prepend` before every element's shape.

        From then on this array does not grow.
        """
        with self._lock:
            if self._adding:
                raise InvalidArgumentError(f"{self.name} is a gradient array, and there is no gradient array of one")
            self._check_open()
            if source not in self._gradients:
                self._gradients[source] = self._new_gradient(source, prepend)
            self._dynamic, self._limit = False, self.size
            return self._gradients[source]

    def _new_gradient(self, source: str, prepend: Shape) -> Elements:
        def prepended(shape: Any) -> Any:
            if shape is None:
                return None
            check_total((*prepend, *shape), "shape_to_prepend together with an element's shape")
            return (*prepend, *shape)

        made = Elements(self.element_dtype, self.size, prepended(self.element_shape), identical=self._identical)
        made.name = f"{self.name}@{source}"
        made._adds = self.element_dtype in _values.ADDABLE
        made._adding, made._prefix, made._marked = True, prepend, self._marked
        made._kin, made._device = self._kin, self._device
        made._common = prepended(self._common)
        made._odd = {index: prepended(shape) for index, shape in self._odd.items()}
        made._flags = self._flags.translate(_SHAPE_ONLY)
        made._slots = array("i", bytes(made._slots.itemsize * len(made._flags)))
        return made

    def close(self) -> None:
        """Free the elements. Gradient arrays that somebody holds stay; no new ones can be made."""
        with self._lock:
            self._closed = True
            self._usual = None
            self.size = 0
            self._gradients.clear()
            self._forget()


def check_size(size: int) -> None:
    """Raise unless an array may have `size` elements."""
    if size < 0:
        raise InvalidArgumentError(f"size must not be negative, got {size}")
    if size > MAX_SIZE:
        raise ResourceExhaustedError(f"an array may have at most {MAX_SIZE} elements, got {size}")


def _check_equal(shapes: Sequence[Shape], rule: str) -> None:
    for shape in shapes:
        if shape != shapes[0]:
            raise InvalidArgumentError(f"{rule}, got {show(shapes[0])} and {show(shape)}")


def _row_count(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return len(value)
    if not getattr(value, "shape", ()):
        raise InvalidArgumentError("value must have at least one dimension to be split, got a scalar")
    return int(value.shape[0])


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"[{shown}, ...]" if len(numbers) > 8 else f"[{shown}]"
