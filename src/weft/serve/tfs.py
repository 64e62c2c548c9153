"""TensorFlow Serving's REST predict: rows (`instances`) and columns (`inputs`) as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import cache
from math import isinf
from typing import Any

import msgspec
import numpy as np

from ..errors import InvalidArgumentError
from .dtypes import TENSORFLOW, datatype_of, dtype_of, is_finite
from .limits import Limits
from .oip import Call, check_rows
from .signature import Parameters, Tensor, outputs_of


class Predict(Call):
    """A decoded request, which remembers its form."""

    by_row: bool = True


def decode(
    body: bytes | bytearray, inputs: Mapping[str, Tensor] | None, parameters: Parameters, limits: Limits
) -> Predict:
    """Decode a request; `inputs` is the declared signature, None if there is none."""
    request = _json(body)
    if not isinstance(request, dict) or ("instances" in request) == ("inputs" in request):
        raise InvalidArgumentError('the request must be a JSON object with either "instances" or "inputs"')
    name = request.get("signature_name", "serving_default")
    if name != "serving_default":
        raise InvalidArgumentError(f"the signature of this model is serving_default, got {str(name)[:80]!r}")
    by_row = "instances" in request
    columns = _columns(request["instances"], parameters) if by_row else request["inputs"]
    if not isinstance(columns, dict):
        columns = {_only(parameters): columns}
    if len(columns) > limits.tensors:
        raise InvalidArgumentError(f"a request must have at most {limits.tensors} inputs, got {len(columns)}")
    parameters.check(list(columns))
    values = {name: _value(name, x, (inputs or {}).get(name), limits) for name, x in columns.items()}
    counts = {len(x) for x in values.values()}
    if len(counts) != 1:
        raise InvalidArgumentError(f"all inputs must have the same number of rows, got {sorted(counts)}")
    (rows,) = counts
    check_rows(rows, limits, len(body))
    return Predict(values, rows, by_row=by_row)


def _json(body: bytes | bytearray) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:  # NaN and Infinity are legal here
        return json.loads(body, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the request must be JSON: {error}") from None


def _finite(text: str) -> float:
    """Return a number; refuse one that is too large for 64 bits, such as 1e400."""
    value = float(text)
    if isinf(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _only(parameters: Parameters) -> str:
    required = [name for name in [*parameters.names, *parameters.keyword_names] if name in parameters.required]
    if len(required) == 1:
        return required[0]
    if parameters.only is not None:
        return parameters.only
    raise InvalidArgumentError(f"the model has several inputs, {', '.join(sorted(parameters.all))}: name them")


def _columns(instances: Any, parameters: Parameters) -> dict[str, Any]:
    """Return the inputs of rows by name."""
    if not isinstance(instances, list) or not instances:
        raise InvalidArgumentError('"instances" must be a list of one or more rows')
    if not isinstance(instances[0], dict) or "b64" in instances[0]:
        return {_only(parameters): instances}
    names = instances[0].keys()
    for i, row in enumerate(instances):
        if not isinstance(row, dict) or row.keys() != names:
            raise InvalidArgumentError(
                f"all rows must have the inputs of the first one, {', '.join(names)[:200]}: row {i} has not"
            )
    return {name: [row[name] for row in instances] for name in names}


def _value(name: str, x: Any, declared: Tensor | None, limits: Limits) -> Any:
    """Return an input as an array of the declared datatype, or a list of text."""
    if not isinstance(x, list):
        raise InvalidArgumentError(f"input {name!r} must be a list with one entry for each row")
    first: Any = x
    depth = 0
    while isinstance(first, list) and depth <= limits.rank:
        first, depth = first[0] if first else None, depth + 1
    datatype = declared.datatype if declared is not None else "BYTES" if isinstance(first, (str, dict)) else None
    if datatype == "BYTES":
        return [_text(name, item) for item in x]
    try:
        if depth > limits.rank:
            raise ValueError(f"its rank must be at most {limits.rank}")
        msgspec.convert(x, _numbers(depth))  # NumPy would make each entry as large as the longest text among them
        array = np.array(x)
        if array.dtype.kind == "O" and declared is not None and dtype_of(declared.datatype).kind in "fV":
            array = np.array(x, np.float64)  # integers of more than 64 bits
        if array.dtype.kind not in "bifu":
            raise ValueError("it has a number of more than 64 bits")
        if datatype is None:
            datatype = "FP32" if array.dtype.kind == "f" else datatype_of(array)
        dtype = dtype_of(datatype)
        if (array.dtype.kind == "b") != (dtype.kind == "b") or (array.dtype.kind == "f" and dtype.kind in "iu"):
            raise ValueError(f"it has entries of {array.dtype}")
        if (
            dtype.kind in "iu"
            and array.size
            and (array.min() < np.iinfo(dtype).min or array.max() > np.iinfo(dtype).max)
        ):
            raise ValueError("a number is out of range")
        with np.errstate(over="raise"):
            given, array = array, array.astype(dtype)
        if dtype.kind == "V" and not is_finite(array) and is_finite(given):  # bfloat16 tells of no overflow
            raise ValueError("a number is out of range")
    except (ValueError, OverflowError, FloatingPointError, RecursionError) as error:
        wanted = datatype or "a rectangular array of numbers"
        why = "its rows differ in length" if "inhomogeneous" in str(error) else error  # NumPy's word
        raise InvalidArgumentError(f"input {name!r} must be {wanted}: {why}") from None
    if declared is not None:
        declared.check(declared.datatype, array.shape)
    return array


@cache
def _numbers(depth: int) -> Any:
    """Return the type of nested lists of numbers."""
    found: Any = bool | int | float
    for _ in range(depth):
        found = list[found]
    return found


def _text(name: str, item: Any) -> str:
    while isinstance(item, list) and len(item) == 1:
        item = item[0]
    try:
        if isinstance(item, dict) and item.keys() == {"b64"}:
            return base64.b64decode(item["b64"], validate=True).decode()
        if isinstance(item, str):
            item.encode()  # half of a surrogate pair is no text
            return item
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"input {name!r} must be text, or UTF-8 in base64: {error}") from None
    raise InvalidArgumentError(f"input {name!r} must be text, one string for each row")


def encode(call: Predict, result: Any) -> bytes:
    """Return the body of an answer. A single output loses its name, as in TensorFlow Serving."""
    outputs, _ = outputs_of(result, call.rows)
    lists = {name: _list(name, value) for name, value in outputs.items()}
    answer: dict[str, Any]
    if len(lists) == 1:
        (only,) = lists.values()
        answer = {"predictions" if call.by_row else "outputs": only}
    elif call.by_row:
        answer = {"predictions": [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]}
    else:
        answer = {"outputs": lists}
    body = msgspec.json.encode(answer)
    if b"null" in body and not all(map(is_finite, outputs.values())):
        body = json.dumps(answer).encode()  # bare NaN and Infinity, which TensorFlow Serving writes, too
    return body


def _list(name: str, value: Any) -> list[Any]:
    if isinstance(value, np.ndarray) and value.dtype.kind not in "SUO":
        return (value.astype(np.float32) if value.dtype.kind == "V" else value).tolist()
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if name.endswith("_bytes"):
        return [{"b64": base64.b64encode(x if isinstance(x, bytes) else str(x).encode()).decode()} for x in items]
    return [x.decode(errors="replace") if isinstance(x, bytes) else x for x in items]


def metadata(name: str, version: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return what `/v1/models/NAME/metadata` says."""
    return {
        "model_spec": {"name": name, "signature_name": "", "version": version},
        "metadata": {
            "signature_def": {
                "signature_def": {
                    "serving_default": {
                        "inputs": {tensor.name: _tensor(tensor) for tensor in inputs},
                        "outputs": {tensor.name: _tensor(tensor) for tensor in outputs},
                        "method_name": "tensorflow/serving/predict",
                    }
                }
            }
        },
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    shape = [{"size": str(length), "name": ""} for length in (-1, *tensor.shape)]
    return {
        "dtype": TENSORFLOW[tensor.datatype],
        "tensor_shape": {"dim": shape, "unknown_rank": False},
        "name": tensor.name,
    }


def status(version: str, is_ready: bool, problem: str) -> dict[str, Any]:
    """Return what `/v1/models/NAME` says."""
    state = "AVAILABLE" if is_ready else "LOADING"
    return {
        "model_version_status": [
            {
                "version": version,
                "state": state,
                "status": {"error_code": "OK" if not problem else "UNKNOWN", "error_message": problem},
            }
        ]
    }
