"""The array behind a TensorArray handle: writing and reading its elements, and adding up their gradients."""

from __future__ import annotations

import copy
import itertools
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from threading import RLock
from typing import Any

import numpy as np

from ..core.arrays import Array, library_of
from ..core.inputs import OWN, is_own, take
from ..core.memory import hold
from ..core.shapes import PartialShape, Shape, check_total, fits, is_known, show
from ..errors import InvalidArgumentError, UnimplementedError
from . import values as _values
from .blocks import run_of
from .rules import MAX_SIZE, Rules
from .store import CLEARED, ODD, READ, ROW, VALUE, WRITTEN, view

# What a gradient array knows at first of an element, by the state of the forward element: its shape.
_SHAPE_ONLY = bytes(state & (WRITTEN | ODD) if state & WRITTEN else 0 for state in range(256))
_NUMBERS = itertools.count()


class Elements(Rules):
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
        super().__init__(element_dtype, size, element_shape, dynamic, clear_after_read, identical)
        self.name = f"{name}_{next(_NUMBERS)}"
        self._marked = -1  # how many pieces the last split made
        # A NumPy element of the usual shape, right behind the others and below the limit, needs no other check.
        self._usual: Shape | None = None
        self._limit = MAX_SIZE if dynamic else size
        self._gradients: dict[str, Elements] = {}
        # Re-entrant, because a finalizer that uses the array may run in the middle of a call.
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        """As `Store.__getstate__`, all of it as it is at one moment. Gradient arrays are themselves: they may be held, too."""
        with self._lock:
            state = super().__getstate__()
            state["_gradients"] = dict(self._gradients)
        del state["_lock"], state["_seen"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock, self._seen = RLock(), (np.ndarray, self._numpy_dtype)

    def __copy__(self) -> Elements:
        return self._copied(copy.copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Elements:
        made = self._copied(partial(copy.deepcopy, memo=memo))
        if self._kin == "opaque":  # arrays are copied already, and keep their graph, which copy.deepcopy would refuse
            made._values = copy.deepcopy(made._values, memo)
        return made

    def _copied(self, copied: Callable[[Elements], Elements]) -> Elements:
        """The handle of another array with the same elements; its gradient arrays are `copied`."""
        state = self.__getstate__()
        state["_gradients"] = {source: copied(array) for source, array in state["_gradients"].items()}
        made = type(self).__new__(type(self))
        made.__setstate__(state)
        return made

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"size {self.size}"
        return f"<TensorArray {self.name}: {self.element_dtype}{show(self.element_shape)}, {state}>"

    @property
    def closed(self) -> bool:
        """Whether it refuses to be used."""
        return self._closed

    # ----- writing -----

    def write(self, index: int, value: Array) -> None:
        """Store `value` as element `index`; in a gradient array, add it to what is there."""
        seen = self._seen
        if type(value) is not seen[0] or value.dtype is not seen[1]:
            value = self._converted(value)
        with self._lock:
            if value.shape == self._usual and type(value) is np.ndarray:
                flags, rows = self._flags, self._rows
                if index == len(flags) < self._limit and rows is not None:
                    self._slots.append(rows.append(value))
                    flags.append(VALUE | WRITTEN | ROW)
                    if index >= self.size:
                        self.size = index + 1
                    return
                if self._adds and 0 <= index < len(flags) and flags[index] & ROW and rows is not None:
                    rows.add_one(self._slots[index], value)
                    return
            self._write(index, value, tuple(value.shape))

    def _write(self, index: int, value: Array, shape: Shape) -> None:
        """The same, after a closer look."""
        self._check_open()
        if type(value) is np.ndarray:  # of a dtype that was seen, and of any size
            value = take("value", value)
        kin = self._check_kin(value)
        self._check_write(index, shape)
        self._settle(kin, value, shape)
        self._put(index, value, shape)
        self._usual = shape if shape == self._common and self._rows is not None else None

    def _settle(self, kin: str, value: Array, shape: Shape) -> None:
        """Fix what the first element decides: library and device, and the shape where all are to have one."""
        if self._kin is None:
            self._kin, self._device = kin, getattr(value, "device", None) if kin == "torch" else None
        elif kin == "jax" and self._kin == "numpy":
            self._hold_as_jax()
            self._usual = None
        if self._identical and not is_known(self.element_shape):
            self.element_shape = self._accepted = shape

    def append(self, value: Array) -> None:
        """Store `value` behind the last element that was written or read."""
        with self._lock:
            self.write(self.size if self._dynamic else len(self._flags), value)

    def scatter(self, indices: np.ndarray, value: Array) -> None:
        """Write the rows of `value` to the elements `indices`, which nobody else can write to."""
        value, held = _held(self._converted(value))
        if not value.shape:
            raise InvalidArgumentError("value must have at least one dimension to be scattered, got a scalar")
        with self._lock:
            self._check_open()
            kin = self._check_kin(value)
            if len(indices) != (rows := value.shape[0]):
                raise InvalidArgumentError(f"indices and value must be equally long, got {len(indices)} and {rows}")
            if len(indices) and not self._wrote_run(run_of(indices), kin, value):
                shape = tuple(value.shape[1:])
                self._check_last(int(indices.max()))
                states = self._check_writes(indices, shape)
                self._settle(kin, value, shape)
                self._put_rows(indices, value, states)
        del held

    def _wrote_run(self, run: slice | None, kin: str, value: Array) -> bool:
        """Write the rows of `value` to a run of elements, if they are NumPy's and nothing is known of any of these."""
        shape = value.shape[1:]
        if run is None or type(value) is not np.ndarray or self._numpy_dtype is None:
            return False
        if self._common not in (None, shape) or self._state_of(run) != 0:
            return False
        self._check_last(run.stop - 1)
        self._check_shape(shape)
        self._settle(kin, value, shape)
        self._put_run(run, value, shape)
        return True

    def split(self, value: Array, lengths: np.ndarray) -> None:
        """Write consecutive pieces of `value`, of `lengths` rows each, to the elements from 0 on.

        Nobody else can write to `lengths`.
        """
        value, held = _held(value)
        rows = _row_count(value)
        is_even = len(lengths) > 0 and bool((lengths == lengths[0]).all())
        # In Python's integers, because NumPy's overflow.
        total = int(lengths[0]) * len(lengths) if is_even else sum(lengths.tolist())
        if total != rows or lengths.min(initial=0) < 0:
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
                self._put_pieces(kin, value, lengths, is_even)
            if not self._adding:
                self._marked = count
        del held

    def _put_pieces(self, kin: str, value: Array, lengths: np.ndarray, is_even: bool) -> None:
        inner = tuple(value.shape[1:])
        if is_even and type(value) is np.ndarray:
            self._put_equal_pieces(kin, value.reshape(len(lengths), int(lengths[0]), *inner))
            return
        shapes = [(n, *inner) for n in lengths.tolist()]
        for index, shape in enumerate(shapes):
            self._check_write(index, shape)
            if self._identical and not is_known(self.element_shape) and shape != shapes[0]:
                raise InvalidArgumentError(f"elements of {self.name} must have one shape, got lengths {_some(lengths)}")
        self._settle(kin, value, shapes[0])
        for index, piece in enumerate(_values.pieces_of(value, lengths.tolist(), kin)):
            self._put(index, piece, shapes[index], owned=kin == "torch")

    def _put_equal_pieces(self, kin: str, pieces: np.ndarray) -> None:
        if not self._wrote_run(slice(0, len(pieces)), kin, pieces):
            indices, shape = np.arange(len(pieces)), pieces.shape[1:]
            states = self._check_writes(indices, shape)
            self._settle(kin, pieces, shape)
            self._put_rows(indices, pieces, states)

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
                value = self._read_run(run_of(indices), element_shape, 0)
                if value is None:
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
            joined = self._read_run(slice(0, count), element_shape_except0, 1)
            if joined is not None:
                return joined.reshape(-1, *joined.shape[2:]), np.full(count, joined.shape[1], np.int64)
            indices = np.arange(count)
            states = self._check_reads(indices, self.element_shape)
            value, lengths = self._concatenated(indices, states, element_shape_except0)
            self._mark_reads(indices, states, self.element_shape)
            return value, lengths

    def _read_run(self, run: slice | None, wanted: PartialShape, least: int) -> np.ndarray | None:
        """The rows that are a run of elements, if they are in one state, have as many dimensions as `least`, and the
        shape behind those is what is `wanted`; None where it takes a closer look."""
        state, shape = None if run is None else self._state_of(run), self._common
        if state is None or not state & ROW or state & ODD or run.stop > len(self._flags):  # type: ignore[union-attr]
            return None
        if shape is None or 0 in shape or len(shape) < least or not fits(shape[least:], wanted):
            return None
        _values.check_room((run.stop - run.start, *shape), self.element_dtype)  # type: ignore[union-attr]
        slots = view(self._slots, np.int32)[run].copy()
        value = self._taken(slots, self._clear)
        if self._clear and self._rows is not None:
            self._rows.drop(slots)
        state = (state & ~(VALUE | ROW) | READ | CLEARED) if self._clear else state | READ
        view(self._flags, np.uint8)[run] = state
        return value

    def count(self) -> int:
        """The number of elements."""
        with self._lock:
            self._check_open()
            return self.size

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
        lengths = np.full(len(indices), [s[0] for s in shapes], np.int64)  # one shape stands for all
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


def _held(value: Any) -> tuple[Any, Any]:
    """`value`, a NumPy array as a view that nobody else has, so that its shape stays, and what holds its memory."""
    if type(value) is not np.ndarray:
        return value, None
    held = hold(value)
    return value.view(), held


def _check_equal(shapes: Sequence[Shape], rule: str) -> None:
    for shape in shapes:
        if shape != shapes[0]:
            raise InvalidArgumentError(f"{rule}, got {show(shapes[0])} and {show(shape)}")


def _row_count(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return len(value)
    if library_of(value) is None and not is_own(value):
        raise InvalidArgumentError("value must be an array or a list to be split")
    if not value.shape:
        raise InvalidArgumentError("value must have at least one dimension to be split, got a scalar")
    return int(value.shape[0])


def _some(numbers: np.ndarray) -> str:
    shown = ", ".join(map(str, numbers[:8].tolist()))
    return f"[{shown}, ...]" if len(numbers) > 8 else f"[{shown}]"


OWN.add(Elements)
