"""Rules of a TensorArray: which writes and reads are refused. Every call is checked before it changes anything."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arrays import Array, dtype_of
from ..core.inputs import beside_jax, take
from ..core.shapes import PartialShape, Shape, fits, is_known, merge, show
from ..errors import InvalidArgumentError, ResourceExhaustedError
from .storage import CLEARED, OTHER_SHAPE, READ, VALUE, WRITTEN, Index, States, Storage, numbers_of
from .values import ADDABLE, as_array, backend_of

#: The most elements of an array: each has a few bytes of state, up to the last one written.
MAX_SIZE = 2**27


class Rules:
    """The attributes of an array, and the checks of calls on its storage. The checks raise, and change nothing."""

    is_gradient = False  # whether it is a gradient array, in which writes to one element add up
    can_add = False  # the same, and elements are numbers
    prefix: Shape = ()  # the dimensions that every element's shape begins with
    is_closed = False

    def __init__(
        self, storage: Storage, name: str, element_shape: PartialShape, dynamic: bool, clears: bool, identical: bool
    ) -> None:
        self.storage = storage
        self.name = name
        self.element_shape = element_shape
        self.is_dynamic = dynamic
        self.clears = clears  # whether a read drops the value
        self.is_identical = identical  # whether all elements have the shape of the first

    def converted(self, value: Any) -> Array:
        """Return `value` as an array of the elements' dtype."""
        storage = self.storage
        value = as_array(take("value", value), storage.element_dtype, storage.backend)
        if storage.backend == "jax":
            value = beside_jax(value)
        if (found := dtype_of(value)) != storage.element_dtype:
            raise InvalidArgumentError(
                f"value must have the dtype of {self.name}, {storage.element_dtype}, got {found}"
            )
        return value

    def check_open(self) -> None:
        if self.is_closed:
            raise InvalidArgumentError(f"{self.name} has been closed")

    def check_backend(self, value: Array) -> str:
        """Return the library of `value`, which must be that of the other elements; so must its device."""
        storage, backend = self.storage, backend_of(value)
        device = value.device if backend == "torch" else None
        if storage.backend == "numpy" and backend == "jax":  # the stored elements become JAX arrays
            return backend
        if storage.backend is not None and (backend != storage.backend or device != storage.device):
            raise InvalidArgumentError(
                f"value must be of the library and on the device of the other elements of {self.name}, "
                f"{storage.backend} {storage.device or ''}, got {backend} {device or ''}"
            )
        return backend

    def check_last(self, index: int) -> None:
        """Check the largest index of a call that writes several elements."""
        size = self.storage.size
        if index >= size and (not self.is_dynamic or index >= 2**31 - 1):
            raise InvalidArgumentError(f"indices must be below the size of {self.name}, {size}, got {index}")
        check_size(index + 1)

    def check_write(self, index: int, shape: Shape) -> None:
        """Check a write of one element of `shape`."""
        size = self.storage.size
        if not 0 <= index < size:
            if index < 0 or not self.is_dynamic:
                raise InvalidArgumentError(f"index must be in [0, {size}) to write to {self.name}, got {index}")
            check_size(index + 1)
        self._check_shape(shape)
        state = self.storage.state(index)
        if state & READ:
            raise InvalidArgumentError(f"element {index} of {self.name} cannot be written after it was read")
        if not state & WRITTEN:
            return
        if not self.is_gradient:
            raise InvalidArgumentError(f"element {index} of {self.name} cannot be written twice")
        if shape != (found := self.storage.shape_of(index, state)):
            raise InvalidArgumentError(
                f"value must have the shape of element {index}, {show(found)}, got {show(shape)}"
            )
        if state & VALUE:
            self._check_addable(shape)

    def _check_shape(self, shape: Shape) -> None:
        prefix = self.prefix
        if not fits(shape, self.element_shape) or shape[: len(prefix)] != prefix:
            wanted = show(self.element_shape) if self.element_shape is not None else f"{show(prefix)} and more"
            raise InvalidArgumentError(f"value must have the shape {wanted} in {self.name}, got {show(shape)}")

    def _check_addable(self, shape: Shape) -> None:
        if self.storage.element_dtype not in ADDABLE and 0 not in shape:
            raise InvalidArgumentError(f"elements of dtype {self.storage.element_dtype} cannot be added")

    def check_writes(self, index: Index, shape: Shape) -> States | None:
        """Check a write of several elements of one shape, none past the end.

        Return their states; None if an element occurs twice.
        """
        self._check_shape(shape)
        states = self.storage.states_at(index)
        # Elements in these states are checked one by one. Adding to elements of the common shape is always right.
        is_common = self.is_gradient and shape == self.storage.common_shape
        doubtful = READ | OTHER_SHAPE if is_common else READ | WRITTEN
        if states.some & doubtful or (isinstance(index, np.ndarray) and bool((index < 0).any())):
            numbers = numbers_of(index)
            for i in numbers[states.have(doubtful) | (numbers < 0)].tolist():
                self.check_write(i, shape)
        repeated = _repeats(index)
        if repeated and not self.is_gradient:
            raise InvalidArgumentError(f"an element of {self.name} cannot be written twice, got repeated indices")
        if repeated or states.some & VALUE:
            self._check_addable(shape)
        return None if repeated else states

    def check_read(self, index: int, element_shape: PartialShape) -> Shape | None:
        """Check a read of one element. Return None if it has a value, else the shape of the zeros to read."""
        storage = self.storage
        if index < 0 or (index >= storage.size and not self.is_gradient):
            raise InvalidArgumentError(f"index must be in [0, {storage.size}) to read from {self.name}, got {index}")
        state = storage.state(index)
        if state & VALUE:
            return None
        if state & CLEARED:
            raise InvalidArgumentError(f"element {index} of {self.name} has been read already, and was cleared then")
        shape = storage.shape_of(index, state) if state & WRITTEN else element_shape
        if not is_known(shape):
            raise InvalidArgumentError(
                f"element {index} of {self.name} must be written before it is read: its shape is unknown, {show(shape)}"
            )
        if not storage.has_zero and 0 not in shape:
            raise InvalidArgumentError(
                f"element {index} must be written: there is no zero of dtype {storage.element_dtype}"
            )
        check_size(index + 1)
        return shape

    def check_reads(self, index: Index, element_shape: PartialShape) -> States:
        """Check a read of several elements; return their states."""
        states = self.storage.states_at(index)
        if not states.every & VALUE:
            for i in numbers_of(index)[~states.have(VALUE)].tolist():
                self.check_read(i, element_shape)
        if self.clears and _repeats(index):
            raise InvalidArgumentError(f"an element of {self.name} is cleared when read, got repeated indices")
        return states

    def merged(self, element_shape: PartialShape) -> PartialShape:
        """Return the array's element shape merged with that given to a gather."""
        if element_shape is None:
            return self.element_shape
        prefix = self.prefix
        if not fits(element_shape, self.element_shape) or not fits(element_shape[: len(prefix)], prefix):
            wanted = show(self.element_shape)
            raise InvalidArgumentError(
                f"element_shape must agree with that of {self.name}, {wanted}, got {show(element_shape)}"
            )
        return merge(self.element_shape, element_shape)


def check_size(size: int) -> None:
    """Raise unless an array may have `size` elements."""
    if size < 0:
        raise InvalidArgumentError(f"size must not be negative, got {size}")
    if size > MAX_SIZE:
        raise ResourceExhaustedError(f"an array may have at most {MAX_SIZE} elements, got {size}")


def _repeats(index: Index) -> bool:
    """Whether an element occurs twice."""
    if isinstance(index, slice):
        return False
    return not bool((np.diff(index) > 0).all()) and len(np.unique(index)) < len(index)
