"""Serialization of variant arrays. Reading checks everything, and executes nothing.

The format: a magic line, the length of a JSON header, the header, then the arrays that it lists, little-endian, one after the
other. Arrays of any library are written; reading returns NumPy arrays.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.arrays import Array, dtype_in, dtype_of, host, library_of
from ..errors import InvalidArgumentError
from ..kernels.splits import as_nested_splits, check_nested_splits, splits_from_lengths
from .inputs import HOLDABLE
from .parts import Columns, Rows

_MAGIC = b"weft variants 1\n"


def encode_variant(shape: tuple[int, ...], stored: Columns | Rows) -> bytes:
    """The bytes of an array with columns or rows."""
    if isinstance(stored, Columns):
        elements, arrays = None, [*stored.splits, stored.values]
    else:
        pairs = list(zip(stored.all_splits(), stored.values, strict=True))
        elements = [None if v is None else len(s) for s, v in pairs]
        arrays = [x for s, v in pairs if v is not None for x in (*s, v)]
    bodies = [_body(x) for x in arrays]
    listed = [[dtype_of(x), list(x.shape), len(b)] for x, b in zip(arrays, bodies, strict=True)]
    header = json.dumps({"shape": list(shape), "elements": elements, "arrays": listed}).encode()
    return b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *bodies])


def decode_variant(data: bytes) -> tuple[tuple[int, ...], Columns | None, Rows | None]:
    """The shape, and the columns or rows, that `encode_variant` wrote; other bytes are refused."""
    try:
        shape, elements, arrays = _parse(memoryview(data))
        size = math.prod(shape)
        if elements is None:
            columns = Columns(_checked(tuple(arrays[:-1]), arrays[-1]), arrays[-1])
            if not columns.values.ndim or len(columns) != size:
                raise InvalidArgumentError(f"the rows do not fill the shape {list(shape)}")
            return shape, columns, None
        if len(elements) != size:
            raise InvalidArgumentError(f"{len(elements)} elements do not fill the shape {list(shape)}")
        return shape, None, _rows(elements, arrays)
    except InvalidArgumentError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(f"these bytes are not a variant array: {error}") from None


def _rows(elements: list[Any], arrays: list[np.ndarray]) -> Rows:
    left = iter(arrays)
    values: list[Array | None] = []
    splits: list[tuple[np.ndarray, ...]] = []
    for count in elements:
        nested = tuple(_next(left) for _ in range(_count(count or 0)))
        values.append(None if count is None else _next(left))
        splits.append(() if count is None else _checked(nested, values[-1]))
    if next(left, None) is not None:
        raise InvalidArgumentError("these bytes hold more arrays than elements need")
    return Rows(values, splits if any(splits) else None)


def _parse(data: memoryview) -> tuple[tuple[int, ...], list[Any] | None, list[np.ndarray]]:
    start = len(_MAGIC) + 8
    if bytes(data[: len(_MAGIC)]) != _MAGIC or len(data) < start:
        raise InvalidArgumentError("these bytes do not begin like a variant array")
    at = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    header = json.loads(bytes(data[start:at]).decode())
    arrays = []
    for name, shape, size in header["arrays"]:
        arrays.append(_array(name, tuple(map(_count, shape)), data[at : at + _count(size)], size))
        at += size
    if at != len(data):
        raise InvalidArgumentError(f"a variant array of {at} bytes was expected, got {len(data)}")
    return tuple(map(_count, header["shape"])), header["elements"], arrays


def _array(name: str, shape: tuple[int, ...], body: memoryview, size: int) -> np.ndarray:
    if name not in HOLDABLE or len(body) != size:
        raise InvalidArgumentError(f"an array of {size} bytes of {name} cannot be read")
    if name == "string":
        return _texts(shape, body)
    dtype = dtype_in("numpy", name)
    if math.prod(shape) * dtype.itemsize != size:
        raise InvalidArgumentError(f"{size} bytes do not fill the shape {list(shape)} of {name}")
    return np.frombuffer(body, dtype).reshape(shape)


def _body(x: Array) -> bytes:
    if dtype_of(x) == "string":
        items = [v.encode() if isinstance(v, str) else bytes(v) for v in x.ravel()]
        is_text = np.asarray([isinstance(v, str) for v in x.ravel()], np.uint8)
        return b"".join([np.asarray([len(i) for i in items], "<i8").tobytes(), is_text.tobytes(), *items])
    if library_of(x) == "torch" and dtype_of(x) == "bfloat16":
        import torch

        x = x.detach().view(torch.int16)
    found = host(x)
    return found.astype(found.dtype.newbyteorder("<"), copy=False).tobytes()


def _texts(shape: tuple[int, ...], body: memoryview) -> np.ndarray:
    count = math.prod(shape)
    if len(body) < 9 * count:
        raise InvalidArgumentError(f"{len(body)} bytes cannot hold {count} texts")
    lengths, is_text = np.frombuffer(body[: 8 * count], "<i8"), body[8 * count : 9 * count]
    if (lengths < 0).any() or 9 * count + sum(lengths.tolist()) != len(body):
        raise InvalidArgumentError("the lengths of texts do not add up")
    bounds = (splits_from_lengths(lengths) + 9 * count).tolist()
    raw = [bytes(body[a:b]) for a, b in pairwise(bounds)]
    out = np.empty(count, object)
    out[:] = [r.decode() if text else r for r, text in zip(raw, is_text, strict=True)]
    return out.reshape(shape)


def _checked(nested: tuple[np.ndarray, ...], values: Array) -> tuple[np.ndarray, ...]:
    """Check splits of `values` and copy them: a `bytearray` could be changed later."""
    own = as_nested_splits("the splits", nested)
    check_nested_splits("the splits", own, values.shape)
    return own


def _count(x: Any) -> int:
    if type(x) is not int or x < 0:
        raise InvalidArgumentError(f"a size must be an integer of at least 0, got {x!r}")
    return x


def _next(arrays: Any) -> np.ndarray:
    found = next(arrays, None)
    if found is None:
        raise InvalidArgumentError("these bytes hold fewer arrays than elements need")
    return found
