"""`weft.TensorArray`: a list of arrays that is written once, stacked in one copy, and differentiated through."""

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
from ..core.shapes import PartialShape, partial_shape, show
from ..errors import ArgumentOverflowError, FailedPreconditionError, InvalidArgumentError
from .elements import Elements
from .rules import check_size


class TensorArray:
    """An array of arrays: written element by element, in any order, each once; read, stacked, concatenated, split.

    Without a `size` it grows. Without a `dtype` it has that of its first element. `infer_shape` demands of all elements
    the shape of the first, so that what was not written can be read as zeros; without it shapes may differ. Elements
    may be arrays of NumPy, torch, JAX or autograd, and gradients flow through them. They are copied in and copied out.
    `copy.copy` and `copy.deepcopy` make an array with elements and gradient arrays of its own; it can be pickled.

    >>> steps = TensorArray()
    >>> for x in range(3):
    ...     _ = steps.append(np.full(2, x))
    >>> steps.stack()
    array([[0, 0],
           [1, 1],
           [2, 2]])

    Under `jax.jit`, and as what `lax.scan` and its like carry, it needs a `size`, a `dtype` and an `element_shape`.
    There writing returns the array to go on with, and the old one refuses to be used again. Indices are not known
    there: a write past the end, or a second one, is dropped and remembered, and the first use outside raises. With
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
            raise InvalidArgumentError("size must be known when the array is made, and is being traced")
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
        self._array: Any = None  # Elements; Carried under jit; None until there is a dtype
        if dtype is not None:
            self._array = Elements(dtype_attribute(dtype), **self._options)
        if "jax" in sys.modules:
            self._carrying()

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
        if "jax" in sys.modules:
            self._carrying()

    def __copy__(self) -> TensorArray:
        """An array with elements of its own: what is written to one of the two, the other does not see."""
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
        """The name of the elements' dtype; None before it is known."""
        return None if self._array is None else self._array.element_dtype

    @property
    def element_shape(self) -> PartialShape:
        """What is known of the elements' shape: None, or a tuple in which None is an unknown dimension."""
        return self._options["element_shape"] if self._array is None else self._array.element_shape

    def __len__(self) -> int:
        return self._options["size"] if self._array is None else self._now().count()

    def __iter__(self) -> Iterator[Array]:
        return (self.read(index) for index in range(len(self)))

    def __repr__(self) -> str:
        if self._array is None:
            return f"<TensorArray of size {self._options['size']}, nothing written>"
        closed = type(self._array) is Elements and self._array.closed
        state = "spent" if self._spent else "closed" if closed else f"size {self._array.size}"
        return f"<TensorArray {self._array.element_dtype}{show(self._array.element_shape)}, {state}>"

    def write(self, index: Any, value: Array) -> TensorArray:
        """The array with `value` as element `index`."""
        value = _taken(value)
        return self._writing(lambda array: array.write(_index(index), value), value, index)

    def append(self, value: Array) -> TensorArray:
        """The array with `value` behind the last element."""
        value = _taken(value)
        return self._writing(lambda array: array.append(value), value)

    def scatter(self, indices: Any, value: Array) -> TensorArray:
        """The array with the rows of `value` as the elements `indices`."""
        value = take("value", value)
        return self._writing(lambda array: array.scatter(_indices(indices), value), value, indices)

    def unstack(self, value: Array) -> TensorArray:
        """The array with the rows of `value` as the elements from 0 on; as many as it has, or can grow to."""
        value = take("value", value)
        rows = np.arange(_rows(value))
        return self._writing(lambda array: array.scatter(rows, value), value)

    def split(self, value: Array, lengths: Any) -> TensorArray:
        """The array with consecutive pieces of `value`, of `lengths` rows each, as its elements."""
        value, pieces = take("value", value), _indices(lengths, "lengths")
        return self._writing(lambda array: array.split(value, pieces), value)

    def read(self, index: Any) -> Array:
        """Element `index`; zeros if it was not written and its shape is known."""
        return self._now(index).read(_index(index))

    def gather(self, indices: Any) -> Array:
        """The elements `indices` as the rows of one array."""
        return self._now(indices).gather(_indices(indices), self.element_shape)

    def stack(self) -> Array:
        """All elements as the rows of one array."""
        array = self._now()
        return array.gather(np.arange(array.count()), array.element_shape)

    def concat(self) -> Array:
        """All elements one below the other."""
        array = self._now()
        shape = array.element_shape
        return array.concat(None if shape is None else shape[1:])[0]

    def gradient(self, source: str = "gradients", prepend: Sequence[int] = ()) -> TensorArray:
        """The array in which gradients of the elements add up, `prepend` before each element's shape.

        One and the same for each `source`, made at the first call; from then on this array does not grow. Several
        writes to an element are summed, what nobody wrote is read as zeros, and what was read is gone.
        """
        shape = tuple(_indices(prepend, "prepend").tolist())
        if any(d < 0 for d in shape):
            raise InvalidArgumentError(f"prepend must not have a negative dimension, got {list(shape)}")
        return TensorArray._of(self._now().gradient(text("source", source, required=True), shape))

    def close(self) -> None:
        """Free the elements; every later use is refused."""
        self._now().close()

    def _now(self, *indices: Any) -> Any:
        """What holds the elements, for a use of them."""
        self._check_usable()
        if type(self._array) is Elements and any(map(_is_traced, indices)):
            self._array = self._carrying().carried(self._array, self._checked)
        if type(self._array) is not Elements:
            self._array.check()
        return self._array

    def _check_usable(self) -> None:
        if self._spent:
            raise FailedPreconditionError("under jit, go on with the array that writing returned, not with the old one")
        if self._array is None:
            raise FailedPreconditionError("the array has no dtype yet: give it one, or write an element first")

    def _writing(self, write: Callable[[Any], Any], value: Array, *indices: Any) -> TensorArray:
        """The array to go on with after `write`, which takes what holds the elements."""
        if self._array is None:
            with self._first:  # one thread's first write decides the dtype, and a refused one decides nothing
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

    def _carrying(self) -> Any:
        """The module by which JAX carries arrays; it is told of this class when it is first needed."""
        from . import jax as _carried

        _carried.register(TensorArray)
        return _carried


def _copied(array: Any, copied: Callable[[Any], Any]) -> Any:
    """What holds the elements, `copied`; what JAX carries is never written to."""
    return copied(array) if type(array) is Elements else array


def _index(index: Any, name: str = "index") -> Any:
    """An index as an int, unless it is traced."""
    if type(index) is int:
        if index.bit_length() > 128:  # more digits than could be shown
            raise ArgumentOverflowError(f"{name} must fit 64 bits, got {shown(index)}")
        return index
    if _is_traced(index):
        return take(name, index)
    return int(_integers(index, name, 0))


def _indices(indices: Any, name: str = "indices") -> Any:
    """Indices, lengths or dimensions as a vector of integers, unless they are traced."""
    if _is_traced(indices):
        return take(name, indices)
    return _integers(indices, name, 1)


def _taken(value: Any) -> Any:
    """One element; what is of NumPy is looked at where it is stored, most often at a glance."""
    return value if type(value) is np.ndarray else take("value", value)


def _integers(x: Any, name: str, ndim: int) -> np.ndarray:
    """Integers of any dtype and library as int64: one, or a vector of them."""
    taken = take_host(name, x)
    if is_own(taken):
        raise InvalidArgumentError(f"{name} must be integers, got {taken.dtype}")
    found = np.asarray(taken) if library_of(taken) is None else host(taken)
    if found.dtype.kind not in ("iu" if found.size else "iuf"):  # an empty list is one of floats
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
