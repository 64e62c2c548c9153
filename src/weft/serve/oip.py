"""The Open Inference Protocol, version 2, over HTTP: requests and responses as JSON, with binary tensors after it.

Nothing here knows of servers: bytes in, a `Call` out, a result in, bytes out.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import msgspec
import numpy as np

from ..errors import FailedPreconditionError, InvalidArgumentError
from .dtypes import bytes_of, datatype_of, dtype_of, is_finite, items_of, text_of
from .errors import Headers, TooLargeError
from .limits import Limits
from .signature import Parameters, Tensor, outputs_of

#: No length of a shape is larger.
LONGEST = 1 << 48
#: Bytes of a list of numbers from which on they are counted before they are decoded.
LARGE = 1 << 20
JSON: Headers = ((b"content-type", b"application/json"),)
_OPENING = re.compile(rb"[\s\[]*")


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


class Call(msgspec.Struct):
    """A decoded request: its inputs by name, the number of rows, and how the answer is wanted."""

    values: dict[str, Any]
    rows: int
    id: str = ""
    deadline: float | None = None  # in seconds
    priority: str | None = None
    outputs: list[_Output] | None = None
    binary: bool = False  # whether outputs without a wish of their own are binary


_decode_request = msgspec.json.Decoder(_Request).decode
_encode = msgspec.json.Encoder().encode


@cache
def _data_decoder(kind: str, depth: int) -> Any:
    """Return the decoder of nested lists of numbers or strings."""
    shape: Any = {"b": bool, "i": int, "u": int, "f": float, "V": float, "S": str}[kind]
    for _ in range(depth):
        shape = list[shape]
    return msgspec.json.Decoder(shape).decode


def decode(
    body: bytes | bytearray,
    header_length: bytes | None,
    inputs: Mapping[str, Tensor] | None,
    parameters: Parameters,
    limits: Limits,
) -> Call:
    """Decode a request; `inputs` is the declared signature, None if there is none."""
    size = _header_size(header_length, len(body))
    try:
        request = _decode_request(body if size is None else memoryview(body)[:size])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"the request must be JSON of the Open Inference Protocol: {error}") from None
    found = request.inputs
    refuse_unsupported(request.parameters)
    if not 0 < len(found) <= limits.tensors:
        raise InvalidArgumentError(f"a request must have 1 to {limits.tensors} inputs, got {len(found)}")
    rest = memoryview(b"" if size is None else body)[size or 0 :]
    values: dict[str, Any] = {}
    rows = -1
    only = found[0].name
    if len(found) > 1 or only != parameters.only:
        parameters.check([x.name for x in found])
    for x in found:
        shape = x.shape
        if not 0 < len(shape) <= limits.rank or not 0 <= min(shape) <= max(shape) < LONGEST:
            raise InvalidArgumentError(
                f"the shape of input {x.name!r} must have 1 to {limits.rank} lengths from 0 to 2**48, the first of them the "
                "number of rows"
            )
        if rows == -1:
            rows = shape[0]
            check_rows(rows, limits, len(body))
        elif shape[0] != rows:
            raise InvalidArgumentError(
                f"all inputs must have the same rows: {only!r} has {rows}, {x.name!r} {shape[0]}"
            )
        if inputs is not None and x.name in inputs:
            inputs[x.name].check(x.datatype, shape)
        if x.parameters is None:
            values[x.name] = _from_json(x)
        else:
            values[x.name], rest = _from_binary(x, rest)
    if rest:
        raise InvalidArgumentError(f"the body has {len(rest)} bytes after its last input")
    call = Call(values, rows, request.id, outputs=request.outputs)
    for wanted in call.outputs or ():
        refuse_unsupported(wanted.parameters)
    if call.outputs is not None and len(call.outputs) > limits.tensors:
        raise InvalidArgumentError(f"a request must ask for at most {limits.tensors} outputs, got {len(call.outputs)}")
    if request.parameters:
        _set_options(call, request.parameters)
    return call


def check_rows(rows: int, limits: Limits, size: int) -> None:
    """Refuse a call of too many rows, in a body of `size` bytes: too large if they may be there, else malformed."""
    if rows > limits.rows:
        kind = TooLargeError if rows <= size else InvalidArgumentError
        raise kind(f"a request must have at most {limits.rows} rows, got {rows}")


def refuse_unsupported(parameters: Mapping[str, Any] | None) -> None:
    """Refuse parameters of extensions that are not supported: an answer that ignores them would not be what was asked for."""
    for name, value in (parameters or {}).items():
        if name.startswith("sequence_") and value:  # 0, "" and false ask for no sequence
            raise InvalidArgumentError(f"the parameter {name} is not supported: sequences of calls have no state here")
        if name.startswith("shared_memory_"):
            raise InvalidArgumentError("shared memory regions are not supported: data goes in requests and answers")
        if name == "classification":
            raise InvalidArgumentError("the classification extension is not supported: ask for the output itself")


def refuse_binary_outputs(call: Call) -> None:
    """Refuse a call for events, which are JSON, that asks for binary outputs."""
    if call.binary or any(_flag(wanted.parameters or {}, "binary_data", False) for wanted in call.outputs or ()):
        raise InvalidArgumentError("the outputs of a stream are JSON: ask for no binary data")


def decode_options(body: bytes | bytearray, known: Collection[str]) -> dict[str, bool]:
    """Return the options in the body of a request about models, at its top or in `parameters`; all are true or false."""
    try:
        found = msgspec.json.decode(body or b"{}", type=dict[str, Any])
        found |= msgspec.convert(found.pop("parameters", None) or {}, dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"the request must be empty or a JSON object: {error}") from None
    for name, value in found.items():
        if name not in known or not isinstance(value, bool):
            about = (
                f"{name} must be true or false, got {value!r:.80}"
                if name in known
                else f"{name[:80]!r} is not supported"
            )
            raise InvalidArgumentError(f"{about}; what can be given here is {', '.join(sorted(known)) or 'nothing'}")
    return found


def _header_size(header: bytes | None, size: int) -> int | None:
    """Return the length of the JSON in a body, None if it is all JSON."""
    if header is None:
        return None
    if not header.isdigit() or len(header) > 12:
        raise InvalidArgumentError("Inference-Header-Content-Length must be a number of bytes")
    if not 0 < int(header) <= size:
        raise InvalidArgumentError(
            f"Inference-Header-Content-Length must be from 1 to the length of the body, {size}, got {int(header)}; "
            "raw tensors without JSON are not supported"
        )
    return int(header)


def _set_options(call: Call, parameters: Mapping[str, Any]) -> None:
    timeout = parameters.get("timeout")  # in microseconds
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, int) or not 0 <= timeout < 1 << 53:
            raise InvalidArgumentError(f"the parameter timeout must be a number of microseconds, got {timeout!r}")
        call.deadline = timeout / 1e6 or None
    priority = parameters.get("priority")  # 1 is the highest, 0 the default
    if priority is not None:
        if isinstance(priority, bool) or not isinstance(priority, int) or priority < 0:
            raise InvalidArgumentError(f"the parameter priority must be an integer of at least 0, got {priority!r}")
        call.priority = "low" if priority > 1 else None
    call.binary = _flag(parameters, "binary_data_output", False)


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"the parameter {name} must be true or false, got {value!r:.80}")
    return value


def _from_json(x: _Input) -> Any:
    """Return an input whose data is in the JSON, nested or flat."""
    data, shape = memoryview(x.data), x.shape
    if not len(data):
        raise InvalidArgumentError(f"input {x.name!r} must have data, or binary_data_size among its parameters")
    is_text = x.datatype == "BYTES"
    if x.datatype in ("FP16", "BF16"):
        raise InvalidArgumentError(f"input {x.name!r}: data of datatype {x.datatype} must be binary")
    dtype = None if is_text else dtype_of(x.datatype)
    depth = 1
    if bytes(data[1:2]).strip() in (b"[", b""):  # nested, or with white space
        depth = _OPENING.match(data)[0].count(b"[")  # type: ignore[index]
        nested = shape.index(0) + 1 if 0 in shape else len(shape)
        if depth not in (1, nested):
            raise InvalidArgumentError(
                f"the data of input {x.name!r} must be flat or nested {nested} deep, got {depth}"
            )
    try:
        if dtype is not None:
            _check_count(data, prod(shape))
        found = _data_decoder("S" if dtype is None else dtype.kind, depth)(data)
        if depth > 1:
            found = _flat(found, shape)
        return _check_text(x, found) if dtype is None else _numbers(found, dtype, shape)
    except (ValueError, OverflowError, RecursionError, struct.error) as error:  # msgspec's errors are ValueErrors
        raise InvalidArgumentError(
            f"the data of input {x.name!r} must be {x.datatype} of shape {shape}: {error}"
        ) from None


def _check_count(data: memoryview, count: int) -> None:
    """Refuse a long list of another number of numbers before it is decoded: as objects, they take ten times as much memory."""
    if len(data) <= LARGE:
        return
    commas = sum(bytes(data[at : at + LARGE]).count(b",") for at in range(0, len(data), LARGE))
    if commas >= max(count, 1):
        raise ValueError(f"it has more than {count} numbers")


#: The codes of `struct`, by kind and size: NumPy's letters name C's types, whose sizes differ.
_CODES = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q", "f4": "f", "f8": "d",
}  # fmt: skip


@cache
def _pack(char: str, count: int) -> Any:
    """Return the function that writes `count` numbers into an array; it refuses those that are out of range."""
    return struct.Struct(f"<{count}{_CODES[np.dtype(char).str[1:]]}").pack_into


def _numbers(found: list[Any], dtype: np.dtype[Any], shape: list[int]) -> np.ndarray:
    """Return flat data as an array."""
    count = len(found)
    if count != prod(shape):
        raise ValueError(f"it has {count} numbers")
    array = np.empty(shape, dtype)
    if count <= 1024:  # fast, and without NumPy's global state for overflow: benchmark row "echo, json"
        _pack(dtype.char, count)(array, 0, *found)
        return array
    with np.errstate(over="raise"):
        try:
            array.ravel()[:] = np.array(found, np.float64) if dtype.kind == "f" else np.array(found, dtype)
        except FloatingPointError:
            raise OverflowError("a number is out of range") from None
    return array


def _flat(found: list[Any], shape: list[int]) -> list[Any]:
    """Return nested data without its nesting."""
    flat = found
    for length in shape[1:]:
        if any(len(part) != length for part in flat):
            raise ValueError(f"a list does not have the length {length}")
        flat = [item for part in flat for item in part]
    if len(found) != shape[0]:
        raise ValueError(f"it has {len(found)} rows")
    return flat


def _check_text(x: _Input, found: list[Any]) -> list[str]:
    if len(found) != prod(x.shape):
        raise InvalidArgumentError(f"the data of input {x.name!r} must have {prod(x.shape)} items, got {len(found)}")
    if len(found) != x.shape[0]:
        raise InvalidArgumentError(f"text must have one item for each row: the shape of input {x.name!r} is {x.shape}")
    return found


def _from_binary(x: _Input, rest: memoryview) -> tuple[Any, memoryview]:
    """Return an input whose data may follow the JSON, and the bytes after it."""
    parameters = x.parameters or {}
    size = parameters.get("binary_data_size")
    refuse_unsupported(parameters)
    if size is None:
        return _from_json(x), rest
    if len(memoryview(x.data)):
        raise InvalidArgumentError(f"input {x.name!r} must have data or binary_data_size, not both")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(rest):
        raise InvalidArgumentError(
            f"input {x.name!r} declares {size!r} bytes of binary data, {len(rest)} are left in the body"
        )
    data, rest = rest[:size], rest[size:]
    count = prod(x.shape)
    if x.datatype == "BYTES":
        if count != x.shape[0]:
            raise InvalidArgumentError(
                f"text must have one item for each row: the shape of input {x.name!r} is {x.shape}"
            )
        return text_of(x.name, items_of(x.name, data, count)), rest
    dtype = dtype_of(x.datatype)
    if size != count * dtype.itemsize:
        raise InvalidArgumentError(
            f"input {x.name!r} of shape {x.shape} and datatype {x.datatype} has {count * dtype.itemsize} bytes, got {size}"
        )
    try:
        # A copy: the function may write to its arguments, and needs them aligned. A byte other than 0 and 1 is no bool of NumPy.
        array = np.frombuffer(data, dtype).reshape(x.shape)
        return array.view(np.uint8) != 0 if dtype.kind == "b" else array.copy(), rest
    except ValueError as error:  # no elements, and lengths whose product is too large
        raise InvalidArgumentError(f"input {x.name!r} of shape {x.shape} cannot be an array: {error}") from None


def encode(call: Call, result: Any, model: str, version: str) -> tuple[Headers, bytes]:
    """Return the headers and the body of an answer."""
    outputs, others = outputs_of(result, call.rows)
    default, binary_outputs = call.binary, _binary_outputs(call, outputs)
    entries: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name, value in outputs.items():
        if call.outputs is not None and name not in binary_outputs:
            continue
        entry: dict[str, Any] = {"name": name, "datatype": datatype_of(value)}
        if binary_outputs.get(name, default):
            raw = bytes_of(value) if entry["datatype"] == "BYTES" else value.tobytes()
            parts.append(raw)
            entry["shape"] = [len(value)] if isinstance(value, list) else list(value.shape)
            entry["parameters"] = {"binary_data_size": len(raw)}
        else:
            entry["shape"], entry["data"] = _json_data(value)
        entries.append(entry)
    head: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": entries}
    if call.id:
        head["id"] = call.id
    if others:
        head["parameters"] = others
    body = _encode(head)
    if b"null" in body:
        _refuse_not_finite(outputs, entries)
    return _with_parts(body, parts) if parts else (JSON, body)


def _with_parts(body: bytes, parts: list[bytes]) -> tuple[Headers, bytes]:
    """Return the headers and the body of a message with binary tensors after its JSON."""
    length = (b"inference-header-content-length", b"%d" % len(body))
    return ((b"content-type", b"application/octet-stream"), length), b"".join([body, *parts])


def _binary_outputs(call: Call, outputs: Mapping[str, Any]) -> dict[str, bool]:
    """Return which of the outputs that the client names are binary."""
    if call.outputs is None:
        return {}
    found = {}
    for wanted in call.outputs:
        if wanted.name not in outputs:
            raise InvalidArgumentError(f"the outputs of this model are {', '.join(outputs)}, got {wanted.name[:80]!r}")
        found[wanted.name] = _flag(wanted.parameters or {}, "binary_data", call.binary)
    return found


def _json_data(value: Any) -> tuple[list[int], list[Any]]:
    """Return the shape and the flat data of an output."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "V":  # bfloat16
            return list(value.shape), value.astype(np.float32).ravel().tolist()
        if value.dtype.kind not in "SUO":
            return list(value.shape), value.ravel().tolist()
        shape, value = list(value.shape), value.ravel().tolist()
    else:
        shape = [len(value)]
    return shape, [item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in value]


def _refuse_not_finite(outputs: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
    """JSON has no NaN and no infinity: msgspec writes null in their place, which must not pass for an answer."""
    for entry in entries:
        if "data" in entry and not is_finite(outputs[entry["name"]]):
            raise FailedPreconditionError(
                f"output {entry['name']!r} has NaN or infinite values, which JSON cannot express: ask for binary output"
            )


def decode_answer(body: bytes, header_length: bytes | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the outputs of an answer by name, and the rest of its JSON; for clients."""
    size = len(body) if header_length is None else int(header_length)
    head = msgspec.json.decode(memoryview(body)[:size])
    rest, outputs = memoryview(body)[size:], {}
    for entry in head.pop("outputs"):
        name, shape, datatype = entry["name"], entry["shape"], entry["datatype"]
        length = (entry.get("parameters") or {}).get("binary_data_size")
        if length is None:
            outputs[name] = (
                entry["data"] if datatype == "BYTES" else np.array(entry["data"], dtype_of(datatype)).reshape(shape)
            )
            continue
        data, rest = rest[:length], rest[length:]
        if datatype == "BYTES":
            outputs[name] = text_of(name, items_of(name, data, prod(shape)))
        else:
            outputs[name] = np.frombuffer(data, dtype_of(datatype)).reshape(shape).copy()
    return outputs, head


def encode_request(
    values: Mapping[str, Any], id: str = "", parameters: Mapping[str, Any] | None = None
) -> tuple[Headers, bytes]:
    """Return the headers and the body of a request with binary tensors; for clients."""
    inputs, parts = [], []
    for name, value in values.items():
        datatype = datatype_of(value)
        raw = bytes_of(value) if datatype == "BYTES" else np.ascontiguousarray(value).tobytes()
        shape = list(value.shape) if isinstance(value, np.ndarray) else [len(value)]
        inputs.append(
            {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(raw)}}
        )
        parts.append(raw)
    head: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True, **(parameters or {})}}
    if id:
        head["id"] = id
    return _with_parts(_encode(head), parts)
