"""`weft.TensorArray`: a list of arrays, each written once, stacked in one copy, with gradients."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import RLock
from typing import Any

import numpy as np

from ..core.arrays import Array, dtype_attribute, dtype_of, host, is_concrete, library_of
from ..core.check import flag, text
from ..core.inputs import is_own, shown, take, take_host
from ..core.representation import never_raises
from ..core.shapes import PartialShape, partial_shape, show
from ..errors import ArgumentOverflowError, FailedPreconditionError, InvalidArgumentError
from .elements import Elements
from .rules import check_size


class TensorArray:
    """A list of arrays: each element is written once, in any order; read, stack, concat and split work on them.

    Without a `size` it grows. Without a `dtype` it takes that of its first element. With `infer_shape` all elements must have the
    shape of the first, and unwritten elements are read as zeros; without it shapes may differ. Elements may be arrays of
    NumPy, torch, JAX or autograd, and gradients flow through them. They are copied when written and when read.
    `copy.copy`, `copy.deepcopy` and pickles copy the elements and the gradient arrays.

    >>> steps = TensorArray()
    >>> for x in range(3):
    ...     _ = steps.append(np.full(2, x))
    >>> steps.stack()
    array([[0, 0],
           [1, 1],
           [2, 2]])

    Under `jax.jit`, and in the carry of `lax.scan` and similar, it needs a `size`, a `dtype` and an `element_shape`. There a write
    returns the array to continue with, and the old one cannot be used again. Indices are not known while a program is compiled:
    a write past the end, or a second write to an element, is dropped, and the first use of the array outside raises. With
    `checked` the compiled program itself raises.
    """

    def __init__(
        self,
        dtype: Any = None,
        size: int | None = None,
        *,
        element_shape: Sequence[int | None] | None = None,
        dynamic_size: bool | None = None,
        clear_after_read: bool = False,
        infer_shape: bool = True,
        checked: bool = False,
        name: str = "TensorArray",
    ) -> None:
        count = 0 if size is None else _index(size, "size")
        if not is_concrete(count):
            raise InvalidArgumentError("size must be known when the array is made, got a traced value")
        check_size(count)
        self._options: dict[str, Any] = {
            "size": count,
            "element_shape": partial_shape(element_shape, "element_shape"),
            "dynamic": size is None if dynamic_size is None else flag("dynamic_size", dynamic_size),
            "clear_after_read": flag("clear_after_read", clear_after_read),
            "identical": flag("infer_shape", infer_shape),
            "name": text("name", name, required=True),
        }
        self._checked = flag("checked", checked)
        self._spent = False
        self._first = RLock()
        self._array: Any = None  # Elements; JaxElements under jit; None until the dtype is known
        if dtype is not None:
            self._array = Elements(dtype_attribute(dtype), **self._options)
        _register_with_jax()

    @classmethod
    def _of(cls, array: Any, checked: bool = False) -> TensorArray:
        made = cls.__new__(cls)
        made._options, made._checked, made._spent, made._array, made._first = {}, checked, False, array, RLock()
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_first"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._first = RLock()
        _register_with_jax()

    def __copy__(self) -> TensorArray:
        """Return an array with its own copies of the elements."""
        made = type(self).__new__(type(self))
        made.__setstate__({**self.__getstate__(), "_array": _copied(self._array, copy.copy)})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorArray:
        made = memo[id(self)] = type(self).__new__(type(self))
        deep = partial(copy.deepcopy, memo=memo)
        rest = {name: deep(value) for name, value in self.__getstate__().items() if name != "_array"}
        made.__setstate__({**rest, "_array": _copied(self._array, deep)})
        return made

    @property
    def dtype(self) -> str | None:
        """The name of the elements' dtype; None until it is known."""
        return None if self._array is None else self._array.element_dtype

    @property
    def element_shape(self) -> PartialShape:
        """The known part of the elements' shape: None, or a tuple in which None is an unknown dimension."""
        return self._options["element_shape"] if self._array is None else self._array.element_shape

    def __len__(self) -> int:
        return self._options["size"] if self._array is None else self._now().count()

    def __iter__(self) -> Iterator[Array]:
        return (self.read(index) for index in range(len(self)))

    @never_raises
    def __repr__(self) -> str:
        if self._array is None:
            return f"<TensorArray of size {self._options['size']}, nothing written>"
        closed = type(self._array) is Elements and self._array.closed
        state = "spent" if self._spent else "closed" if closed else f"size {self._array.size}"
        return f"<TensorArray {self._array.element_dtype}{show(self._array.element_shape)}, {state}>"

    def write(self, index: Any, value: Array) -> TensorArray:
        """Store `value` as element `index`; return the array to continue with."""
        value = _taken(value)
        return self._writing(lambda array: array.write(_index(index), value), value, index)

    def append(self, value: Array) -> TensorArray:
        """Store `value` behind the last element; return the array to continue with."""
        value = _taken(value)
        return self._writing(lambda array: array.append(value), value)

    def scatter(self, indices: Any, value: Array) -> TensorArray:
        """Store the rows of `value` as the elements `indices`; return the array to continue with."""
        value = take("value", value)
        return self._writing(lambda array: array.scatter(_indices(indices), value), value, indices)

    def unstack(self, value: Array) -> TensorArray:
        """Store the rows of `value` as the elements from 0 on; return the array to continue with."""
        value = take("value", value)
        rows = np.arange(_rows(value))
        return self._writing(lambda array: array.scatter(rows, value), value)

    def split(self, value: Array, lengths: Any) -> TensorArray:
        """Store consecutive pieces of `value`, of `lengths` rows each, as the elements; return the array to continue with."""
        value, pieces = take("value", value), _indices(lengths, "lengths")
        return self._writing(lambda array: array.split(value, pieces), value)

    def read(self, index: Any) -> Array:
        """Return element `index`; zeros if it was not written and its shape is known."""
        return self._now(index).read(_index(index))

    def gather(self, indices: Any) -> Array:
        """Return the elements `indices` as the rows of one array."""
        return self._now(indices).gather(_indices(indices), self.element_shape)

    def stack(self) -> Array:
        """Return all elements as the rows of one array."""
        array = self._now()
        return array.gather(np.arange(array.count()), array.element_shape)

    def concat(self) -> Array:
        """Return all elements one below the other."""
        array = self._now()
        shape = array.element_shape
        return array.concat(None if shape is None else shape[1:])[0]

    def gradient(self, source: str = "gradients", prepend: Sequence[int] = ()) -> TensorArray:
        """Return the gradient array called `source`, which has `prepend` before each element's shape.

        The first call makes it; from then on this array does not grow. Writes to one element of a gradient array are summed,
        unwritten elements are read as zeros, and a read clears the element.
        """
        shape = tuple(_indices(prepend, "prepend").tolist())
        if any(d < 0 for d in shape):
            raise InvalidArgumentError(f"prepend must not have a negative dimension, got {list(shape)}")
        return TensorArray._of(self._now().gradient(text("source", source, required=True), shape))

    def close(self) -> None:
        """Free the elements; every later use is refused."""
        self._now().close()

    def _now(self, *indices: Any) -> Any:
        """Return `Elements` or `JaxElements` for a call; convert to the latter if an index is traced."""
        self._check_usable()
        if type(self._array) is Elements and any(map(_is_traced, indices)):
            from .jax import to_jax

            _register_with_jax()
            self._array = to_jax(self._array, self._checked)
        if type(self._array) is not Elements:
            self._array.check()
        return self._array

    def _check_usable(self) -> None:
        if self._spent:
            raise FailedPreconditionError("under jit, go on with the array that writing returned, not with the old one")
        if self._array is None:
            raise FailedPreconditionError("the array has no dtype yet: give it one, or write an element first")

    def _writing(self, write: Callable[[Any], Any], value: Array, *indices: Any) -> TensorArray:
        """Call `write` on `Elements` or `JaxElements`; return the array to continue with."""
        if self._array is None:
            with self._first:  # the first write that is not refused decides the dtype
                if self._array is None:
                    value = take("value", value)
                    found = np.asarray(value) if library_of(value) is None and not is_own(value) else value
                    trial = TensorArray._of(Elements(dtype_of(found), **self._options), self._checked)
                    written = trial._writing(write, value, *indices)
                    self._array = written._array
                    return self if written is trial else written
        new = write(self._now(*indices))
        if new is None:
            return self
        self._spent = True
        return TensorArray._of(new, self._checked)


def _register_with_jax() -> None:
    """Make `TensorArray` a pytree node, if JAX is imported."""
    if "jax" in sys.modules:
        from .jax import register

        register(TensorArray)


def _copied(array: Any, copied: Callable[[Any], Any]) -> Any:
    """The elements, `copied`; `JaxElements` are immutable."""
    return copied(array) if type(array) is Elements else array


def _index(index: Any, name: str = "index") -> Any:
    """Convert an index to an int, unless it is traced."""
    if type(index) is int:
        if index.bit_length() > 128:  # too many digits to show
            raise ArgumentOverflowError(f"{name} must fit 64 bits, got {shown(index)}")
        return index
    if _is_traced(index):
        return take(name, index)
    return int(_integers(index, name, 0))


def _indices(indices: Any, name: str = "indices") -> Any:
    """Convert indices, lengths or dimensions to a vector of integers, unless they are traced."""
    if _is_traced(indices):
        return take(name, indices)
    return _integers(indices, name, 1)


def _taken(value: Any) -> Any:
    """Check one element; `Elements.write` checks NumPy arrays, faster."""
    return value if type(value) is np.ndarray else take("value", value)


def _integers(x: Any, name: str, ndim: int) -> np.ndarray:
    """Convert integers of any dtype and library to int64: a scalar or a vector."""
    taken = take_host(name, x)
    if is_own(taken):
        raise InvalidArgumentError(f"{name} must be integers, got {taken.dtype}")
    found = np.asarray(taken) if library_of(taken) is None else host(taken)
    if found.dtype.kind not in ("iu" if found.size else "iuf"):  # NumPy makes an empty list a float array
        raise InvalidArgumentError(f"{name} must be integers, got {found.dtype}")
    if found.ndim != ndim:
        wanted = "a vector" if ndim else "one integer"
        raise InvalidArgumentError(f"{name} must be {wanted}, got the shape {list(found.shape)}")
    return found.astype(np.int64)


def _is_traced(x: Any) -> bool:
    return library_of(x) == "jax" and not is_concrete(x)


def _rows(value: Array) -> int:
    shape = np.shape(value) if library_of(value) is None and not is_own(value) else value.shape
    if not shape:
        raise InvalidArgumentError("value must have at least one dimension to be unstacked, got a scalar")
    return int(shape[0])
