"""What may be written to an array and read from it, and what must be refused, before anything changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arrays import Array, dtype_of
from ..core.inputs import beside_jax, take
from ..core.shapes import PartialShape, Shape, fits, is_known, merge, show
from ..errors import InvalidArgumentError, ResourceExhaustedError
from . import values as _values
from .store import CLEARED, ODD, READ, VALUE, WRITTEN, Store, repeats

#: The most elements an array may have: there are books on each of them, up to the last one written.
MAX_SIZE = 2**27


class Rules(Store):
    """The checks of every call. They raise or say yes, and change nothing but what they remember of having said it."""

    name = "TensorArray"

    def __init__(
        self,
        element_dtype: str,
        size: int,
        element_shape: PartialShape,
        dynamic: bool,
        clear_after_read: bool,
        identical: bool,
    ) -> None:
        check_size(size)
        super().__init__(element_dtype, size, None if dynamic else size)
        self.element_shape = element_shape
        self._dynamic = dynamic
        self._clear = clear_after_read
        self._identical = identical
        self._adding = self._adds = False  # whether it is a gradient array, and whether its dtype can be added
        self._prefix: Shape = ()  # what every shape begins with
        self._closed = False
        self._accepted: Shape | None = None  # a shape that was found to fit
        # The type and dtype of values that need no conversion.
        self._seen: tuple[Any, Any] = (np.ndarray, self._numpy_dtype)

    def _converted(self, value: Any) -> Array:
        """`value` as an array that may be an element, or the rows of elements."""
        given, value = value, _values.plain(take("value", value), self.element_dtype, self._kin)
        if self._kin == "jax":
            value = beside_jax(value)
        if (found := dtype_of(value)) != self.element_dtype:
            raise InvalidArgumentError(f"value must have the dtype of {self.name}, {self.element_dtype}, got {found}")
        if value is given:
            self._seen = (type(value), value.dtype)
        return value

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError(f"{self.name} has been closed")

    def _check_kin(self, value: Array) -> str:
        """The library of `value`, which must be that of the other elements, as must be its device."""
        kin = _values.kin_of(value)
        device = value.device if kin == "torch" else None
        if self._kin == "numpy" and kin == "jax":  # what is stored becomes JAX's
            return kin
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

    def _check_writes(self, indices: np.ndarray, shape: Shape) -> np.ndarray | None:
        """The states of the elements `indices`, if all can be written and `shape`; None where one comes twice.

        None of them is past the end.
        """
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
        return None if repeated else states

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


def check_size(size: int) -> None:
    """Raise unless an array may have `size` elements."""
    if size < 0:
        raise InvalidArgumentError(f"size must not be negative, got {size}")
    if size > MAX_SIZE:
        raise ResourceExhaustedError(f"an array may have at most {MAX_SIZE} elements, got {size}")
