"""Arrays, nested arguments and errors as messages, and back."""

from __future__ import annotations

import builtins
import dataclasses
import struct
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from .. import errors
from ..core.arrays import library_of
from ..errors import InvalidArgumentError, UnknownError
from ..ragged.tensor import RaggedTensor
from .frames import ALIGNMENT, ArraySpec, BadFrame, ErrorMessage

# --- arrays ---


def pack_array(x: Any) -> tuple[ArraySpec, memoryview]:
    """Return the description of an array and its bytes; refuse arrays that cannot travel."""
    library = library_of(x)
    if library == "torch":
        return _pack_tensor(x)
    if library == "jax":
        x = np.asarray(x)
    if not isinstance(x, (np.ndarray, np.generic)):
        raise InvalidArgumentError(f"an array must be of NumPy, PyTorch or JAX, got a {type(x).__name__}")
    x = np.asarray(x)
    if x.dtype.kind not in "biufcSUV" or x.dtype.hasobject or x.dtype.names is not None:
        raise InvalidArgumentError(f"an array must have numbers or text to travel between processes, got {x.dtype}")
    name = x.dtype.str if x.dtype.kind != "V" else x.dtype.name
    return (library or "numpy", name, x.shape, False), _bytes(x)


def _bytes(x: np.ndarray) -> memoryview:
    if x.nbytes <= SMALL:
        return memoryview(x.tobytes())
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _pack_tensor(x: Any) -> tuple[ArraySpec, memoryview]:
    if x.device.type != "cpu":
        raise InvalidArgumentError(
            f"the arrays of a remote call must be on the CPU, got one on {x.device}: pass x.cpu(), and move the rows to the "
            "model's device inside the function"
        )
    torch = sys.modules["torch"]
    if x.layout is not torch.strided or x.is_nested or x.is_meta or x.is_quantized:
        raise InvalidArgumentError(f"a tensor must be dense and have its values now, got {x.layout} on {x.device}")
    name = _TENSOR_NAMES.get(x.dtype)
    if name is None:
        name = _TENSOR_NAMES[x.dtype] = str(x.dtype).removeprefix("torch.")
    requires_grad = x.requires_grad
    if requires_grad:
        x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    spec = "torch", name, tuple(x.shape), requires_grad
    if name in _LIKE_NUMPY:
        return spec, _bytes(x.numpy())
    flat = x.contiguous().view(-1)
    if flat.numel() == 1:  # it may count as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return spec, memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")


#: The most arrays of a frame.
MOST_SPECS = 1 << 16
#: Arrays of up to so many bytes are copied where that is cheaper than a view.
SMALL = 4096
#: Dtypes that NumPy has under the same name.
_LIKE_NUMPY = {
    "float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128",
}  # fmt: skip
_TENSOR_NAMES: dict[Any, str] = {}
_TENSOR_TYPES: dict[str, Any] = {}


def pack_arrays(arrays: Sequence[Any]) -> tuple[list[Any], list[memoryview]]:
    """Return the descriptions of arrays, and the bytes of those that are not None."""
    if len(arrays) > MOST_SPECS:
        raise InvalidArgumentError(f"a call, a result or a model has at most {MOST_SPECS} arrays, got {len(arrays)}")
    specs, buffers = list[ArraySpec | None](), list[memoryview]()
    for x in arrays:
        if x is None:
            specs.append(None)
        else:
            spec, buffer = pack_array(x)
            specs.append(spec)
            buffers.append(buffer)
    return specs, buffers


def unpack_arrays(specs: Sequence[ArraySpec | None], body: bytearray | memoryview) -> list[Any]:
    """Return the arrays with these descriptions, in the memory of `body`."""
    if len(specs) > MOST_SPECS:
        raise BadFrame(f"a frame holds at most {MOST_SPECS} arrays, got {len(specs)}")
    arrays, at = list[Any](), 0
    for spec in specs:
        if spec is None:
            arrays.append(None)
            continue
        library, name, shape, _ = spec
        at += -at % ALIGNMENT
        make = _tensor if library == "torch" else _ndarray
        x, at = make(name, tuple(shape), body, at)
        arrays.append(sys.modules["jax"].numpy.asarray(x) if library == "jax" and "jax" in sys.modules else x)
    if at != len(body):
        raise BadFrame(f"the arrays of a frame take {at} bytes, got {len(body)}")
    return arrays


def _ndarray(name: str, shape: tuple[int, ...], body: bytearray | memoryview, at: int) -> tuple[Any, int]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        import ml_dtypes

        if not hasattr(ml_dtypes, name):
            raise BadFrame(f"there is no dtype {name!r}") from None
        dtype = np.dtype(getattr(ml_dtypes, name))
    count = prod(shape)
    end = _end(at, count * dtype.itemsize, shape, body)
    return np.frombuffer(body, dtype, count, at).reshape(shape) if count else np.empty(shape, dtype), end


def _tensor(name: str, shape: tuple[int, ...], body: bytearray | memoryview, at: int) -> tuple[Any, int]:
    dtype = _TENSOR_TYPES.get(name)
    if dtype is None:
        import torch

        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise BadFrame(f"there is no dtype {name!r}")
        _TENSOR_TYPES[name] = dtype
    torch = sys.modules["torch"]
    count = prod(shape)
    end = _end(at, count * dtype.itemsize, shape, body)
    if not count:
        return torch.empty(shape, dtype=dtype), end
    return torch.frombuffer(body, dtype=dtype, count=count, offset=at).view(shape), end


def _end(at: int, size: int, shape: tuple[int, ...], body: bytearray | memoryview) -> int:
    if size < 0 or any(n < 0 for n in shape) or at + size > len(body):
        raise BadFrame(f"an array of shape {list(shape)} needs {size} bytes, got {len(body) - at}")
    return at + size


# --- nested values ---

#: Extension types of msgpack: an array's place, a tuple, a complex number, a NumPy scalar, a dataclass or named tuple, a ragged
#: tensor.
_ARRAY, _TUPLE, _COMPLEX, _SCALAR, _RECORD, _RAGGED = 1, 2, 3, 4, 5, 6
_INT = struct.Struct("<I")
_TWO = struct.Struct("<dd")
#: The tree of one array alone.
ONE = 0


class _List(msgspec.Struct, array_like=True, gc=False):
    """A nested value, wrapped: a bare 0 is the tree of one array."""

    value: Any


encoder = msgspec.msgpack.Encoder()


def _extension(code: int, data: memoryview) -> Any:
    if code == _ARRAY:
        return _Place(_INT.unpack(data)[0])
    if code == _TUPLE:
        return tuple(_decoder.decode(data))
    if code == _COMPLEX:
        return complex(*_TWO.unpack(data))
    if code == _SCALAR:
        name, value = _decoder.decode(data)
        return np.frombuffer(value, np.dtype(name))[0]
    if code == _RECORD:
        return _Record(*_decoder.decode(data))
    if code == _RAGGED:
        return _Ragged(_decoder.decode(data))
    raise BadFrame(f"there is no extension type {code}")


_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)


class _Place:
    """Where an array stood: its number among the arrays of the frame."""

    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at


class _Record:
    """A dataclass or named tuple: where its class is found, and its fields."""

    __slots__ = ("module", "name", "parts")

    def __init__(self, module: str, name: str, parts: dict[str, Any]) -> None:
        self.module, self.name, self.parts = module, name, parts

    def build(self, arrays: Sequence[Any]) -> Any:
        """Return the object; its class is looked up, and never imported."""
        found: Any = sys.modules.get(self.module)
        for part in self.name.split("."):
            found = getattr(found, part, None)
        parts = {name: _unpack(value, arrays) for name, value in self.parts.items()}
        if isinstance(found, type) and _fields(found) == list(parts):
            if issubclass(found, tuple):
                return tuple.__new__(found, list(parts.values()))
            made = object.__new__(found)
            for name, value in parts.items():
                object.__setattr__(made, name, value)
            return made
        raise InvalidArgumentError(
            f"a value is a {self.name} of {self.module}, which this process does not have with the fields {list(parts)}: import it "
            "here, or use a dict"
        )


class _Ragged:
    """A ragged tensor: its splits, and its values."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def build(self, arrays: Sequence[Any]) -> RaggedTensor:
        """Return the tensor; its splits are checked."""
        *splits, flat_values = _unpack(self.parts, arrays)
        return RaggedTensor(flat_values, splits)


def _fields(kind: type) -> list[str] | None:
    """Return the names of the fields of a dataclass or of a named tuple, None for other classes."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind._fields) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def decoder_of(kind: type) -> Any:
    """Return a decoder for one kind of message."""
    return msgspec.msgpack.Decoder(kind, ext_hook=_extension)


def is_array(value: Any) -> bool:
    """Return True for arrays of all libraries, and False for NumPy's scalars."""
    return library_of(value) is not None and not isinstance(value, np.generic)


def pack_tree(value: Any, arrays: list[Any]) -> Any:
    """Return `value` as a message, and put its arrays into `arrays`."""
    if is_array(value):
        arrays.append(value)
        return ONE
    return _List(_pack(value, arrays, 0))


def unpack_tree(tree: Any, arrays: Sequence[Any]) -> Any:
    """Return the value of a message with these arrays."""
    try:
        return arrays[0] if tree == ONE else _unpack(tree[0], arrays)
    except (IndexError, TypeError, KeyError):
        raise BadFrame("a message refers to an array that it does not have") from None


#: The largest depth of nested values.
_DEEPEST = 64
_PLAIN = (bool, int, float, str, bytes)


def _pack(value: Any, arrays: list[Any], depth: int) -> Any:
    if value is None or type(value) in _PLAIN:
        return _integer(value) if type(value) is int else value
    if isinstance(value, np.generic):
        return msgspec.msgpack.Ext(_SCALAR, encoder.encode([value.dtype.str, value.tobytes()]))
    if library_of(value) is not None:
        arrays.append(value)
        return msgspec.msgpack.Ext(_ARRAY, _INT.pack(len(arrays) - 1))
    if depth > _DEEPEST:
        raise InvalidArgumentError(f"arguments and results may be nested {_DEEPEST} deep, got more")
    if type(value) is tuple:
        return msgspec.msgpack.Ext(_TUPLE, encoder.encode([_pack(x, arrays, depth + 1) for x in value]))
    if type(value) is list:
        return [_pack(x, arrays, depth + 1) for x in value]
    if type(value) is dict:
        return {_key(k): _pack(v, arrays, depth + 1) for k, v in value.items()}
    if type(value) is RaggedTensor:
        inside = [*value.nested_row_splits, value.flat_values]
        return msgspec.msgpack.Ext(_RAGGED, encoder.encode([_pack(x, arrays, depth + 1) for x in inside]))
    if type(value) is complex:
        return msgspec.msgpack.Ext(_COMPLEX, _TWO.pack(value.real, value.imag))
    names = _fields(type(value))
    if names is not None:
        parts = {name: _pack(getattr(value, name), arrays, depth + 1) for name in names}
        return msgspec.msgpack.Ext(_RECORD, encoder.encode([type(value).__module__, type(value).__qualname__, parts]))
    raise InvalidArgumentError(
        "the arguments and results of a remote call must be arrays, ragged tensors, numbers, str, bytes, bool or None, in tuples, "
        f"lists, dicts and dataclasses, got a {type(value).__qualname__}"
    )


def _key(value: Any) -> Any:
    if value is not None and type(value) not in _PLAIN:
        raise InvalidArgumentError(
            f"the keys of a dict must be numbers, str, bytes, bool or None in a remote call, got a {type(value).__qualname__}"
        )
    return _integer(value) if type(value) is int else value


def _integer(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 64:
        raise InvalidArgumentError(f"an integer must fit in 64 bits to travel between processes, got {value}")
    return value


def _unpack(value: Any, arrays: Sequence[Any]) -> Any:
    kind = type(value)
    if kind is _Place:
        return arrays[value.at]
    if kind is list:
        return [_unpack(x, arrays) for x in value]
    if kind is tuple:
        return tuple([_unpack(x, arrays) for x in value])
    if kind is dict:
        return {k: _unpack(v, arrays) for k, v in value.items()}
    return value.build(arrays) if kind is _Record or kind is _Ragged else value


# --- errors ---


#: The most characters of an error's text and of each of its notes, and the most notes, that travel.
MOST_TEXT, MOST_NOTES = 1 << 16, 16


def pack_error(error: BaseException) -> ErrorMessage:
    """Return an exception as a message, whatever its text is: its caller waits for it."""
    is_key = isinstance(error, KeyError) and len(error.args) == 1
    notes = getattr(error, "__notes__", None)
    of_notes = [_text(note) for note in notes[:MOST_NOTES]] if isinstance(notes, list) else []
    return ErrorMessage(type(error).__name__, _text(error.args[0] if is_key else error), of_notes)


def _text(value: Any) -> str:
    try:
        text = str(value)[:MOST_TEXT]
    except Exception as problem:
        text = f"its text cannot be made: {type(problem).__name__}"
    return text.encode("utf-8", "backslashreplace").decode()


def unpack_error(message: ErrorMessage) -> Exception:
    """Return an exception of the class it had, if weft or Python has that class, else an `UnknownError` that names it."""
    found = getattr(errors, message.name, None) or getattr(builtins, message.name, None)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        error: Exception = UnknownError(f"{message.name}: {message.text}")
    else:
        try:
            error = found(message.text)
        except TypeError:  # such as UnicodeDecodeError, which has five arguments
            error = UnknownError(f"{message.name}: {message.text}")
    for note in message.notes:
        error.add_note(note)
    return error
