"""Checks of the arguments that ops take as arrays.

`take` returns an array of a known library that is dense, has known values, is in native byte order and fits in memory; or a
Python number, text or a regular nested list of these, which each op converts itself. It refuses everything else with an error of
`weft.errors` that names the argument.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from ..errors import ArgumentTypeError, FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from .arrays import common_library, get_library, host, is_concrete, library_of, memory, namespace

#: The deepest nesting of lists that NumPy can read.
DEEPEST = 64

#: In bytes, or entries of lists: an array that repeats its memory, like a broadcast array, must be smaller.
LARGE = 1 << 28

#: The most arrays that an iterator may give, and the most rows of an array that is used as a list.
MOST = 1 << 16

#: weft's own array classes: variants and handles. The ops that take them check their contents.
OWN: set[type] = set()

_PLAIN = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))  # in native byte order
_SCALARS = frozenset([bool, int, float, complex, str, bytes])
_LISTS = (list, tuple)


def take(name: str, x: Any) -> Any:
    """Check the argument `name`; returns `x`, or `x` as an array that ops accept, as the module describes."""
    kind = type(x)
    if kind is np.ndarray:
        return _numpy(name, x)
    if kind in _SCALARS or is_own(x):
        return x
    return _TAKE[library_of(x)](name, x)


def is_fine(x: Any) -> bool:
    """True if `take` would return `x` unchanged; a fast test that is False if `take` must look closer."""
    kind = type(x)
    if kind is np.ndarray:
        return x.dtype in _PLAIN and x.nbytes < LARGE
    dense = _TENSORS.get(kind)
    if dense is not None:
        try:
            is_dense = x.layout is dense and not x.is_meta and not x.is_nested and x.numel() < _LARGE_COUNT
            return is_dense and bool(x.data_ptr() or _is_empty(x.shape)) and not _is_tracing()
        except RuntimeError:  # a wrapper of `torch.func` has no memory of its own
            return False
    return kind in _SCALARS


def _is_empty(shape: Sequence[int]) -> bool:
    """True for a shape without elements whose other sizes are not large."""
    return 0 in shape and math.prod(n for n in shape if n) < LARGE


def take_host(name: str, x: Any) -> Any:
    """`take` for an array whose values are read on the host: if it is large, it must not repeat its memory."""
    taken = take(name, x)
    if not is_fine(taken):
        if type(taken) is np.ndarray:
            _check_size(name, taken.size, taken.dtype.itemsize, taken.shape, taken.strides, LARGE)
        elif library_of(taken) == "torch" and not _is_wrapped(taken):
            size = taken.element_size()
            _check_size(name, taken.numel(), size, taken.shape, [step * size for step in taken.stride()], LARGE)
    return taken


def take_list(name: str, values: Any) -> list[Any]:
    """`take` for each array of a list, tuple or iterator; an array is used as the list of its rows."""
    return _each(name, values, take)


def take_host_list(name: str, values: Any) -> list[Any]:
    """`take_host` for each array of a list."""
    return _each(name, values, take_host)


def _each(name: str, values: Any, how: Callable[[str, Any], Any]) -> list[Any]:
    taken = []
    for i, x in enumerate(items(name, values)):
        if x is None:
            raise InvalidArgumentError(f"{name}[{i}] must be an array, got None")
        taken.append(how(f"{name}[{i}]", x))
    return taken


def items(name: str, values: Any) -> list[Any]:
    """The items of a list, tuple or finite iterator, or the rows of an array."""
    if isinstance(values, list):
        return list.copy(values)
    if isinstance(values, tuple):
        return list(tuple.__iter__(values))
    if isinstance(values, Iterator):
        found = list(islice(values, MOST + 1))
        if len(found) > MOST:  # it may be endless
            raise ResourceExhaustedError(f"{name} must give at most {MOST} arrays, got an iterator that gives more")
        return found
    if library_of(values) is None and not is_own(values):
        raise ArgumentTypeError(f"{name} must be a list of arrays, got {shown(values)}")
    values = take(name, values)
    if not values.shape:
        raise ArgumentTypeError(f"{name} must be a list of arrays, got a scalar array")
    if values.shape[0] > MOST:
        raise ResourceExhaustedError(f"{name} must have at most {MOST} rows to be a list, got {values.shape[0]}")
    try:
        return list(values)
    except RuntimeError as error:  # a tensor whose storage was resized
        raise InvalidArgumentError(f"{name} must be a list of arrays, or have rows that can be read: {error}") from None


def is_own(x: Any) -> bool:
    """True if `x` is an array of variants or handles, or has their dtype and a shape."""
    if type(x) in OWN:
        return True
    dtype = getattr(type(x), "dtype", None)
    return isinstance(dtype, str) and dtype in ("variant", "resource") and isinstance(getattr(x, "shape", None), tuple)


def together(values: Sequence[Any]) -> list[Any]:
    """The arrays of one call in one library: beside arrays of JAX, NumPy's numbers are converted to JAX."""
    if get_library(common_library(values)).converts_numpy:
        return [beside_jax(x) for x in values]
    return list(values)


def beside_jax(x: Any) -> Any:
    """NumPy numbers as an array of JAX, by JAX's rules for dtypes; anything else unchanged."""
    if library_of(x) != "numpy" or x.dtype.kind in "SUTOMm" or x.dtype.names is not None:
        return x
    try:
        return namespace("jax").asarray(x)
    except TypeError:  # a dtype that JAX does not have and no op accepts
        raise InvalidArgumentError(f"beside arrays of JAX, arrays must be of a dtype of JAX, got {x.dtype}") from None


def shown(x: Any) -> str:
    """A value for an error message: short values themselves, dtype and shape of an array, else the type."""
    try:
        if x is None or type(x) in _SCALARS:
            return reprlib.repr(x)
        if type(x) in _LISTS and all(type(item) in _SCALARS for item in x[:6]):
            return reprlib.repr(x)
        if library_of(x) is not None:
            return f"{x.dtype}{list(x.shape)}"
    except Exception:  # an integer of too many digits, an array that was deleted
        pass
    return with_article(type(x).__name__)


def with_article(noun: str) -> str:
    """A noun as an error message names it: "a list", "an object"."""
    return f"an {noun}" if noun[:1] in "aeioAEIO" else f"a {noun}"


# ---- NumPy


def _numpy(name: str, x: np.ndarray) -> np.ndarray:
    if x.nbytes >= LARGE or not x.nbytes:
        _check_size(name, x.size, x.dtype.itemsize, x.shape, x.strides, memory() // 4)
    return x if x.dtype.isnative else native(x)


def native(x: np.ndarray) -> np.ndarray:
    """`x` in native byte order."""
    return x.astype(x.dtype.newbyteorder("="))


def _numpy_subclass(name: str, x: Any) -> Any:
    if isinstance(x, np.generic):
        return x
    refuse_masked(name, x)
    return _numpy(name, np.asarray(x))


def refuse_masked(name: str, x: Any) -> None:
    """Refuse an array of `numpy.ma`, and a tensor of `torch.masked`."""
    if isinstance(x, getattr(sys.modules.get("torch.masked"), "MaskedTensor", ())):
        raise InvalidArgumentError(
            f"{name} must be an array without a mask, got a MaskedTensor: fill it with x.to_tensor(value), and pass the mask, "
            "x.get_mask(), as another array"
        )
    if isinstance(x, np.ma.MaskedArray):
        raise InvalidArgumentError(
            f"{name} must be an array without a mask, got a masked array: fill it with x.filled(value), or drop the "
            "masked elements with x.compressed()"
        )


def refuse_odd(name: str, x: Any) -> None:
    """Refuse an array with a mask, and a parameter of PyTorch that has no shape yet."""
    kind = type(x)
    if kind is np.ndarray or kind in _TENSORS:
        return
    refuse_masked(name, x)
    if isinstance(x, getattr(sys.modules.get("torch.nn.parameter"), "UninitializedTensorMixin", ())):
        raise InvalidArgumentError(f"{name} must have its values now, got {with_article(kind.__name__)}")


def _check_size(name: str, count: int, itemsize: int, shape: Sequence[int], strides: Sequence[int], most: int) -> None:
    """Refuse an array that does not fit in memory, or that repeats its memory and has more than `most` bytes."""
    if not count:
        if math.prod(n for n in shape if n) >= 2**59:  # NumPy could not count the bytes
            raise InvalidArgumentError(f"the sizes of {name} must have a product below 2^59, got {list(shape)}")
        return
    size = count * max(itemsize, 1)
    span = itemsize + sum((n - 1) * abs(step) for n, step in zip(shape, strides, strict=True))
    if size > memory():
        raise ResourceExhaustedError(f"{name} must fit in memory, got {size} bytes in the shape {list(shape)}")
    if size >= most and span < size:
        raise ResourceExhaustedError(
            f"{name} must hold each element once or be smaller than {most} bytes, got {size} bytes over {span} bytes of "
            "memory: copy it if this is intended"
        )


# ---- torch and JAX

_LARGE_COUNT = LARGE // 16  # fewer numbers have less than LARGE bytes in any dtype
_TENSORS: dict[type, Any] = {}  # torch's tensor types, each with the layout of dense tensors
_is_tracing: Any = None  # that of `torch_internals`, once there is a tensor


def _meet_torch() -> None:
    # Every tensor of every call is looked at: a dict is faster than attributes of the module torch.
    global _is_tracing
    from .torch_internals import is_tracing

    torch, _is_tracing = sys.modules["torch"], is_tracing
    _TENSORS.update(
        {torch.Tensor: torch.strided, torch.nn.Parameter: torch.strided}
    )  # last: other threads look at it first


def _torch(name: str, x: Any) -> Any:
    if not _TENSORS:
        _meet_torch()
    if _is_tracing():
        refuse_traced(name)
    if x.layout is not _TENSORS.get(type(x)) or x.is_meta or x.is_nested:
        _check_tensor(name, x, sys.modules["torch"])
    elif is_freed(x):
        raise InvalidArgumentError(f"{name} must have its values, got a tensor of {x.numel()} whose storage was freed")
    if x.numel() >= _LARGE_COUNT and not _is_wrapped(x):
        size = x.element_size()
        _check_size(name, x.numel(), size, x.shape, [step * size for step in x.stride()], memory() // 4)
    return x


def refuse_traced(name: str) -> NoReturn:
    """Refuse a tensor while torch notes operations: it sees none of weft's, and would keep the result of this one input."""
    raise FailedPreconditionError(
        f"{name} must not be traced: torch.jit.trace, torch.jit.script, torch.onnx.export(dynamo=False), "
        "torch.fx.symbolic_trace and make_fx cannot record what weft computes. Use torch.compile or torch.export, for which "
        "weft.torch.BatchNorm is one operator, and call the rest of weft outside"
    )


def is_freed(x: Any) -> bool:
    """True if the storage of a tensor was resized to nothing: torch ends the process when it reads one."""
    try:
        return not x.data_ptr() and x.numel() > 0 and not x.untyped_storage().nbytes() and not x._is_zerotensor()
    except RuntimeError:  # a wrapper of `torch.func`
        return False


def _is_wrapped(x: Any) -> bool:
    from .torch_internals import is_wrapped

    return is_wrapped(x)


def _check_tensor(name: str, x: Any, torch: Any) -> None:
    """Refuse a tensor that is not dense or has no values."""
    refuse_odd(name, x)
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        raise InvalidArgumentError(f"{name} must be a dense tensor, got {_described(x)}: convert it first")
    if x.is_meta or not is_concrete(x):
        raise InvalidArgumentError(f"{name} must have its values now, got {_described(x)}")


def _described(x: Any) -> str:
    kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
    return f"a {type(x).__name__}, {kind}, {x.dtype}, on {x.device}"


def _jax(name: str, x: Any) -> Any:
    if not is_concrete(x):
        from .jax_internals import is_tracing

        if not is_tracing():
            raise InvalidArgumentError(f"{name} must have its values, got a tracer of a JAX function that has returned")
        return x
    if x.is_deleted():
        raise InvalidArgumentError(f"{name} must have its values, got an array that was deleted or donated")
    if not isinstance(x.dtype, np.dtype):
        raise InvalidArgumentError(f"{name} must hold numbers, got {x.dtype}: JAX random keys are not accepted")
    if not x.is_fully_addressable:
        raise InvalidArgumentError(f"{name} must be on devices of this process, got {x.sharding}")
    return x


# ---- Python


def _python(name: str, x: Any) -> Any:
    """Check a number, text, a list, or an object that NumPy can convert to an array."""
    if type(x).__module__ == "torch.fx.proxy":
        refuse_traced(name)
    if isinstance(x, _LISTS):
        return _List(name).read(x)
    if isinstance(x, (int, float, complex, str, bytes)):
        return x
    if isinstance(x, range):
        return _range(name, x)
    if isinstance(x, (bytearray, memoryview)) or hasattr(x, "__array__") or hasattr(x, "__array_interface__"):
        return _array_like(name, x)
    if x is None:
        raise ArgumentTypeError(f"{name} must be an array, got None")
    raise ArgumentTypeError(f"{name} must be an array, a number, text or nested lists of these, got {shown(x)}")


def _range(name: str, x: range) -> list[int]:
    try:
        count = len(x)
    except OverflowError:
        count = 1 << 63
    if count > LARGE:
        raise ResourceExhaustedError(f"{name} must fit in memory, got {x}")
    return list(x)


def _array_like(name: str, x: Any) -> np.ndarray:
    """Convert an object with an array interface, such as a column of a table."""
    try:
        found = np.asarray(x)
    except Exception as error:  # from the object's own code
        raise InvalidArgumentError(f"{name} must be convertible to an array of NumPy: {error}") from error
    return _numpy(name, found)


_TAKE: dict[str | None, Callable[[str, Any], Any]] = {
    "numpy": _numpy_subclass, "torch": _torch, "jax": _jax, "autograd": lambda name, x: x, None: _python,
}  # fmt: skip


def check_nesting(name: str, x: Any, inside: Callable[[Any], Iterable[Any] | None], deepest: int = DEEPEST) -> None:
    """Refuse a container that is nested deeper than `deepest`, or contains itself, or has too many parts.

    `inside` returns the items of a container, and None for anything else. A container that occurs repeatedly is read once.
    """
    counts: dict[int, int] = {}

    def count(part: Any, depth: int) -> int:
        within = inside(part)
        if within is None:
            return 1
        if depth > deepest:
            raise InvalidArgumentError(f"{name} must be nested at most {deepest} deep, and must not contain itself")
        if id(part) not in counts:
            total = 0
            for value in within:
                total += count(value, depth + 1)
            counts[id(part)] = total
        return counts[id(part)]

    total = count(x, 1)
    if total > LARGE:
        raise ResourceExhaustedError(f"{name} must have at most {LARGE} parts, got {total}")


def in_lists(x: Any) -> Iterable[Any] | None:
    """The items of a list or tuple; None for anything else."""
    return items("a list", x) if isinstance(x, _LISTS) else None


class _List:
    """Reads one nested list, and checks its depth, its regular shape and its size.

    A list that occurs repeatedly is read once: lists that share their parts can have more entries than could be counted.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self._count = 0  # the entries of all lists read so far

    def read(self, x: Any) -> Any:
        """The list, with the arrays in it as NumPy arrays."""
        found, shape = self._read(x, 1)
        size = math.prod(shape)
        if size > memory() // 8 or (size > LARGE // 16 and self._count < size):
            raise ResourceExhaustedError(f"{self._name} must fit in memory, got lists of the shape {list(shape)}")
        return found

    def _read(self, x: Any, depth: int) -> tuple[Any, tuple[int, ...]]:
        if depth > DEEPEST:
            raise InvalidArgumentError(
                f"{self._name} must be nested at most {DEEPEST} deep, got a list inside more lists"
            )
        known = self._known.get(id(x))
        if known is not None:
            return known
        values = items(self._name, x)
        self._count += len(values)
        shape: tuple[int, ...] = (len(values),)
        if not _SCALARS.issuperset(map(type, values)):
            shapes = []
            for i, value in enumerate(values):
                values[i], inner = self._item(value, depth)
                shapes.append(inner)
                if inner != shapes[0]:
                    raise InvalidArgumentError(
                        f"{self._name} must be of a regular shape: lists of equal lengths, got entries of the shapes "
                        f"{list(shapes[0])} and {list(inner)}"
                    )
            shape = (len(values), *shapes[0])
        self._known[id(x)] = values, shape
        return values, shape

    def _item(self, value: Any, depth: int) -> tuple[Any, tuple[int, ...]]:
        kind = type(value)
        if kind in _SCALARS:
            return value, ()
        if isinstance(value, _LISTS):
            return self._read(value, depth + 1)
        library = library_of(value)
        if library is None and not isinstance(value, (int, float, complex, str, bytes)):
            raise InvalidArgumentError(f"{self._name} must hold numbers or text in its lists, got {shown(value)}")
        if library is None:
            return value, ()
        taken = take(self._name, value)
        if library != "numpy":
            if library == "autograd" or not is_concrete(taken) or getattr(taken, "requires_grad", False):
                raise InvalidArgumentError(
                    f"{self._name} must be one array if a gradient is recorded, got a list with arrays of {library}: stack them"
                )
            taken = host(taken)
        return taken, tuple(taken.shape)
