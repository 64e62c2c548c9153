"""The dtypes of the wire: names of the Open Inference Protocol, NumPy's dtypes, and text as BYTES."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError

_NAMES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip

#: Numbers are little-endian on the wire. `newbyteorder` makes objects that are not NumPy's own: batchers, which remember the dtype
#: of the last call as an object, would take each call for another kind.
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(dtype) for name, dtype in _NAMES.items()}
if sys.byteorder == "big":
    DTYPES = {name: dtype.newbyteorder("<") for name, dtype in DTYPES.items()}
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
#: TensorFlow's names.
TENSORFLOW = {
    "BOOL": "DT_BOOL", "UINT8": "DT_UINT8", "UINT16": "DT_UINT16", "UINT32": "DT_UINT32", "UINT64": "DT_UINT64",
    "INT8": "DT_INT8", "INT16": "DT_INT16", "INT32": "DT_INT32", "INT64": "DT_INT64", "FP16": "DT_HALF",
    "FP32": "DT_FLOAT", "FP64": "DT_DOUBLE", "BF16": "DT_BFLOAT16", "BYTES": "DT_STRING",
}  # fmt: skip

_LENGTH = Struct("<I")

try:  # bfloat16 where it is installed
    import ml_dtypes

    DTYPES["BF16"] = np.dtype(ml_dtypes.bfloat16)
    DATATYPES[DTYPES["BF16"]] = "BF16"
except ImportError:
    pass


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return NumPy's dtype of a datatype that is not BYTES."""
    found = DTYPES.get(datatype)
    if found is None:
        raise InvalidArgumentError(f"datatype must be BYTES or one of {', '.join(DTYPES)}, got {datatype[:40]!r}")
    return found


def datatype_of(x: Any) -> str:
    """Return the datatype of an array or a list of text."""
    if not isinstance(x, np.ndarray):
        return "BYTES"
    found = DATATYPES.get(x.dtype)
    if found is None:
        if x.dtype.kind in "SUO":
            return "BYTES"
        raise InvalidArgumentError(f"an array of {x.dtype} has no datatype in the Open Inference Protocol")
    return found


def is_finite(x: Any) -> bool:
    """Return whether an array, or a list of text, has neither NaN nor infinite values."""
    return not isinstance(x, np.ndarray) or x.dtype.kind not in "fV" or bool(np.isfinite(x).all())


def bytes_of(items: Sequence[Any] | np.ndarray[Any, Any]) -> bytes:
    """Return text in the wire's binary form: the length of each item in 4 bytes, then the item."""
    parts = []
    for item in items.ravel().tolist() if isinstance(items, np.ndarray) else items:
        raw = item if isinstance(item, bytes) else str(item).encode()
        parts += [_LENGTH.pack(len(raw)), raw]
    return b"".join(parts)


def items_of(name: str, data: memoryview, count: int) -> list[bytes]:
    """Return `count` items of the binary form; refuse data of another length."""
    if 4 * count > len(data):
        raise InvalidArgumentError(f"input {name!r} must have {count} items of at least 4 bytes, got {len(data)} bytes")
    items, at, end = [], 0, len(data)
    for i in range(count):
        start = at + 4
        at = start + _LENGTH.unpack_from(data, at)[0] if start <= end else end + 1
        if at > end:
            raise InvalidArgumentError(f"input {name!r} ends within item {i} of {count}")
        items.append(bytes(data[start:at]))
    if at != end:
        raise InvalidArgumentError(f"input {name!r} has {end - at} bytes after its {count} items")
    return items


def text_of(name: str, items: list[bytes]) -> list[str]:
    """Return items as text."""
    try:
        return [item.decode() for item in items]
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"input {name!r} must be UTF-8: {error}") from None
