"""The array behind a TensorArray handle: writing and reading its elements, and adding up their gradients."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from threading import RLock
from typing import Any

import numpy as np

from ..core.arrays import Array, library_of
from ..core.inputs import OWN, is_own
from ..core.memory import hold
from ..core.representation import never_raises
from ..core.shapes import PartialShape, Shape, check_total, fits, is_known, show
from ..errors import InvalidArgumentError, UnimplementedError
from .blocks import run_of
from .rules import MAX_SIZE, Rules, check_size
from .storage import IN_BLOCKS, WRITTEN, Index, States, Storage, end_of, numbers_of
from .values import ADDABLE, check_room, join, output, split

_NUMBERS = itertools.count()
_NONE = (None, None, None)


class Elements:
    """A list of arrays, each written once and, on request, dropped when read. It is its own handle.

    `storage` holds the elements, `rules` has the array's attributes and refuses wrong calls; this class does the calls, one at a
    time. A call that raises changes nothing. An array made by `gradient` adds up the writes to one element, and reads elements
    that were not written as zeros.
    """

    # The attributes by which other code takes a handle for an array.
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
        self.storage = Storage(element_dtype, size, None if dynamic else size)
        self.rules = Rules(
            self.storage, f"{name}_{next(_NUMBERS)}", element_shape, dynamic, clear_after_read, identical
        )
        self._split_count = -1  # how many pieces the last split made
        # The type, dtype and shape of the last element written. One like it is not converted, and needs no more checks if it
        # comes right behind the others and below the limit. Benchmark rows "writes and stack" and "torch appends and stack" of
        # benchmarks/tensor_array.py need this.
        self._usual: tuple[Any, Any, Any] = _NONE
        self._limit = MAX_SIZE if dynamic else size
        self._gradients: dict[str, Elements] = {}
        # Re-entrant, because a finalizer that uses the array may run in the middle of a call.
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        """A consistent copy of everything but the gradient arrays, which are shared: callers may hold them, too."""
        with self._lock:
            state = {**self.__dict__, "_gradients": dict(self._gradients), "storage": self.storage.__getstate__()}
            state["rules"] = {name: x for name, x in self.rules.__dict__.items() if name != "storage"}
        del state["_lock"], state["_usual"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.storage, self.rules = Storage.__new__(Storage), Rules.__new__(Rules)
        self.storage.__setstate__(state["storage"])
        self.rules.__dict__.update(state["rules"], storage=self.storage)
        self._lock, self._usual = RLock(), _NONE

    def __copy__(self) -> Elements:
        return self._copied(copy.copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Elements:
        made = self._copied(partial(copy.deepcopy, memo=memo))
        if self.storage.backend == "opaque":  # arrays are copied already; copy.deepcopy would refuse those with a graph
            made.storage.values = copy.deepcopy(made.storage.values, memo)
        return made

    def _copied(self, copied: Callable[[Elements], Elements]) -> Elements:
        """Another array with the same elements, and with `copied` gradient arrays."""
        state = self.__getstate__()
        state["_gradients"] = {source: copied(array) for source, array in state["_gradients"].items()}
        made = type(self).__new__(type(self))
        made.__setstate__(state)
        return made

    @never_raises
    def __repr__(self) -> str:
        state = "closed" if self.closed else f"size {self.size}"
        return f"<TensorArray {self.name}: {self.element_dtype}{show(self.element_shape)}, {state}>"

    @property
    def name(self) -> str:
        """The name in error messages."""
        return self.rules.name

    @property
    def element_dtype(self) -> str:
        return self.storage.element_dtype

    @property
    def element_shape(self) -> PartialShape:
        """The known part of the elements' shape."""
        return self.rules.element_shape

    @property
    def size(self) -> int:
        """The number of elements, also of a closed array."""
        return self.storage.size

    @property
    def closed(self) -> bool:
        return self.rules.is_closed

    # ----- writing -----

    def write(self, index: int, value: Array) -> None:
        """Store `value` as element `index`; in a gradient array, add it to the element."""
        storage, usual = self.storage, self._usual
        is_usual = type(value) is usual[0] and value.dtype is usual[1] and value.shape == usual[2]
        if not is_usual:
            value = self.rules.converted(value)
        with self._lock:
            if is_usual and usual is self._usual and (storage.device is None or value.device == storage.device):
                if index == len(storage.states) < self._limit:
                    storage.append(value)
                    return
                if self.rules.can_add and storage.adds_in_place(index, value):
                    return
            self._write(index, value, tuple(value.shape))

    def _write(self, index: int, value: Array, shape: Shape) -> None:
        """Write with all checks."""
        self.rules.check_open()
        backend = self.rules.check_backend(value)
        self.rules.check_write(index, shape)
        self._settle(backend, value, shape)
        self.storage.put(index, value, shape)
        is_usual = shape == self.storage.common_shape and self.storage.has_zero  # text is always checked
        self._usual = (type(value), value.dtype, shape) if is_usual else _NONE

    def _settle(self, backend: str, value: Array, shape: Shape) -> None:
        """Fix what the first element decides: library, device, and the shape if all elements must have one."""
        storage, rules = self.storage, self.rules
        if storage.backend is None:
            storage.backend = backend
            storage.device = value.device if backend == "torch" else None
        elif backend == "jax" and storage.backend == "numpy":
            storage.convert_to_jax()
            self._usual = _NONE
        if rules.is_identical and not is_known(rules.element_shape):
            rules.element_shape = shape

    def append(self, value: Array) -> None:
        """Store `value` behind the last element that was written or read."""
        with self._lock:
            self.write(self.size if self.rules.is_dynamic else len(self.storage.states), value)

    def scatter(self, indices: np.ndarray, value: Array) -> None:
        """Write the rows of `value` to the elements `indices`, an array that no caller can change."""
        value, held = _held(self.rules.converted(value))
        if not value.shape:
            raise InvalidArgumentError("value must have at least one dimension to be scattered, got a scalar")
        with self._lock:
            self.rules.check_open()
            backend = self.rules.check_backend(value)
            if len(indices) != (rows := value.shape[0]):
                raise InvalidArgumentError(f"indices and value must be equally long, got {len(indices)} and {rows}")
            if len(indices):
                self._write_rows(_index(indices), backend, value)
        del held

    def _write_rows(self, index: Index, backend: str, value: Array) -> None:
        """Write the rows of `value` to several elements."""
        shape = tuple(value.shape[1:])
        self.rules.check_last(end_of(index) - 1)
        states = self.rules.check_writes(index, shape)
        self._settle(backend, value, shape)
        self.storage.put_rows(index, value, states)

    def split(self, value: Array, lengths: np.ndarray) -> None:
        """Write consecutive pieces of `value`, of `lengths` rows each, to the elements from 0 on.

        No caller can change `lengths`.
        """
        value, held = _held(value)
        is_even = _check_lengths(lengths, _row_count(value))
        with self._lock:
            self.rules.check_open()
            count, size = len(lengths), self.size
            if count != size and not (self.rules.is_dynamic and count > size):
                raise InvalidArgumentError(
                    f"lengths must be as many as the elements of {self.name}, {size}, got {count}"
                )
            value = self.rules.converted(value)
            backend = self.rules.check_backend(value)
            if is_even and type(value) is np.ndarray:
                pieces = value.reshape(count, int(lengths[0]), *value.shape[1:])
                self._write_rows(slice(0, count), backend, pieces)
            elif count:
                self.rules.check_last(count - 1)
                self._write_pieces(backend, value, lengths)
            if not self.rules.is_gradient:
                self._split_count = count
        del held

    def _write_pieces(self, backend: str, value: Array, lengths: np.ndarray) -> None:
        """Write pieces of different lengths, or pieces that are not NumPy arrays."""
        rules = self.rules
        shapes = [(n, *value.shape[1:]) for n in lengths.tolist()]
        for index, shape in enumerate(shapes):
            rules.check_write(index, shape)
            if rules.is_identical and not is_known(rules.element_shape) and shape != shapes[0]:
                raise InvalidArgumentError(f"elements of {self.name} must have one shape, got lengths {_some(lengths)}")
        self._settle(backend, value, shapes[0])
        for index, piece in enumerate(split(value, lengths.tolist(), backend)):
            self.storage.put(index, piece, shapes[index], owned=backend == "torch")

    # ----- reading -----

    def read(self, index: int) -> Array:
        """Return element `index`; zeros if it was not written and its shape is known."""
        storage, rules = self.storage, self.rules
        with self._lock:
            if 0 <= index < len(storage.states) and storage.states[index] & IN_BLOCKS:
                return storage.read_row(index, rules.clears)
            rules.check_open()
            missing = rules.check_read(index, rules.element_shape)
            if missing is not None:
                value = storage.zeros(missing)
                storage.write_zeros(index, missing)
            else:
                value = output(storage.values[index], storage.library, rules.clears)
            storage.mark_read(index, rules.clears)
            return value

    def gather(self, indices: np.ndarray, element_shape: PartialShape) -> Array:
        """Return the elements `indices` as the rows of one new array."""
        with self._lock:
            merged = self.rules.merged(element_shape)
            if len(indices):
                self.rules.check_open()
                index = _index(indices)
                states = self.rules.check_reads(index, merged)
                value = self._stacked(index, states, merged, element_shape)
                self._mark_reads(index, states, merged)
            elif is_known(element_shape):
                value = self.storage.zeros((0, *element_shape))
            else:
                raise UnimplementedError("a gather of nothing must be given a fully known element_shape")
            if merged != self.rules.element_shape:
                self.rules.element_shape, self._usual = merged, _NONE
            return value

    def concat(self, element_shape_except0: PartialShape) -> tuple[Array, np.ndarray]:
        """Return all elements one below the other, and the number of rows of each."""
        with self._lock:
            self.rules.check_open()
            count = self._split_count if self.rules.is_gradient else self.size
            if count < 0:
                raise InvalidArgumentError("an array must have been split for its gradient array to be concatenated")
            if count == 0:
                if not is_known(element_shape_except0):
                    raise UnimplementedError("a concat of nothing must be given a fully known element_shape_except0")
                return self.storage.zeros((0, *element_shape_except0)), np.zeros(0, np.int64)
            index = slice(0, count)
            states = self.rules.check_reads(index, self.element_shape)
            value, lengths = self._concatenated(index, states, element_shape_except0)
            self._mark_reads(index, states, self.element_shape)
            return value, lengths

    def count(self) -> int:
        with self._lock:
            self.rules.check_open()
            return self.size

    def _stacked(self, index: Index, states: States, unwritten: PartialShape, wanted: PartialShape) -> Array:
        shapes = self.storage.shapes_at(index, states, unwritten)
        first = shapes[0]
        if not fits(first, wanted):
            raise InvalidArgumentError(f"elements must have the shape {show(wanted)}, got {show(first)}")
        whole = (len(states.each), *first)
        if 0 in first:  # TensorFlow does not check the other shapes then
            return self.storage.zeros(whole)
        _check_equal(shapes, "elements that are gathered must have one shape")
        check_room(whole, self.element_dtype)
        return self.storage.stacked(index, states, first, self.rules.clears)

    def _concatenated(self, index: Index, states: States, rest: PartialShape) -> tuple[Array, np.ndarray]:
        storage = self.storage
        shapes = storage.shapes_at(index, states, self.element_shape)
        if () in shapes:
            raise InvalidArgumentError("elements that are concatenated must have at least one dimension, got a scalar")
        inner = shapes[0][1:]
        if not fits(inner, rest):
            raise InvalidArgumentError(
                f"elements must have the shape {show(rest)} after dimension 0, got {show(inner)}"
            )
        _check_equal([s[1:] for s in shapes], "elements that are concatenated must agree after dimension 0")
        if len(shapes) == 1 and storage.is_numpy:
            count, rows = len(states.each), shapes[0][0]
            check_room((count * rows, *inner), self.element_dtype)
            stacked = storage.stacked(index, states, shapes[0], self.rules.clears)
            return stacked.reshape(count * rows, *inner), np.full(count, rows, np.int64)
        lengths = np.full(len(states.each), [s[0] for s in shapes], np.int64)  # one shape is broadcast to all elements
        check_room((int(lengths.sum()), *inner), self.element_dtype)
        return join("concatenate", storage.stored(index, shapes), storage.library), lengths

    def _mark_reads(self, index: Index, states: States, element_shape: PartialShape) -> None:
        """Note that several elements were read; those without a value as zeros."""
        if not states.every & WRITTEN:
            numbers, written = numbers_of(index), states.have(WRITTEN)
            for i in numbers[~written].tolist():
                self.storage.write_zeros(i, element_shape if is_known(element_shape) else ())
                self.storage.mark_read(i, self.rules.clears)
            index, states = numbers[written], States(states.each[written].tobytes())
        self.storage.mark_reads(index, states, self.rules.clears)

    # ----- gradient arrays, closing -----

    def gradient(self, source: str, prepend: Shape = ()) -> Elements:
        """Return the gradient array called `source`: made at the first call, with `prepend` before every element's shape.

        From then on this array does not grow.
        """
        with self._lock:
            if self.rules.is_gradient:
                raise InvalidArgumentError(f"{self.name} is a gradient array, and there is no gradient array of one")
            self.rules.check_open()
            if source not in self._gradients:
                self._gradients[source] = self._new_gradient(source, prepend)
            self.rules.is_dynamic, self._limit = False, self.size
            return self._gradients[source]

    def _new_gradient(self, source: str, prepend: Shape) -> Elements:
        def prepended(shape: Any) -> Any:
            if shape is None:
                return None
            check_total((*prepend, *shape), "shape_to_prepend together with an element's shape")
            return (*prepend, *shape)

        identical = self.rules.is_identical
        made = Elements(self.element_dtype, self.size, prepended(self.element_shape), identical=identical)
        made.rules.name = f"{self.name}@{source}"
        made.rules.is_gradient, made.rules.can_add = True, self.element_dtype in ADDABLE
        made.rules.prefix, made._split_count = prepend, self._split_count
        made.storage.take_shapes(self.storage, prepended)
        return made

    def close(self) -> None:
        """Free the elements. Gradient arrays that callers hold stay; no new ones can be made."""
        with self._lock:
            self.rules.is_closed = True
            self._usual = _NONE
            self._gradients.clear()
            self.storage.size = 0
            self.storage.drop_all()


def _index(indices: np.ndarray) -> Index:
    return run_of(indices) or indices


def _held(value: Any) -> tuple[Any, Any]:
    """A view of a NumPy array, whose shape no caller can change, and an object that keeps its memory in place."""
    if type(value) is not np.ndarray:
        return value, None
    held = hold(value)
    return value.view(), held


def _check_lengths(lengths: np.ndarray, rows: int) -> bool:
    """Check that lengths add up to `rows`; return whether all are equal."""
    is_even = len(lengths) > 0 and bool((lengths == lengths[0]).all())
    # In Python's integers, because NumPy's overflow.
    total = int(lengths[0]) * len(lengths) if is_even else sum(lengths.tolist())
    if total != rows or lengths.min(initial=0) < 0:
        raise InvalidArgumentError(
            f"lengths must not be negative and must add up to the rows of value, {rows}, got {_some(lengths)}"
        )
    return is_even


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
