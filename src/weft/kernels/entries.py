"""Batch norm's drivers as C functions, for a caller that has pointers where others have arrays.

Numba's own way into a driver makes a description of every array in every tuple, 1 us for all of them, and needs the arrays
to begin with. Through these functions no Python object is touched on the way. They return a number, 0 where memory ran out.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from numba import carray, types

from . import drivers
from .disk_cache import cached_cfunc

_P = types.CPointer
_PLAN = [_P(types.int64)] * 5 + [types.int64] * 2

# How the elements of each dtype are read, and in what the per-channel vectors are.
_KINDS = {
    "float32": (types.float32, types.float32),
    "float64": (types.float64, types.float64),
    "float16": (types.int16, types.float32),
    "bfloat16": (types.uint16, types.float32),
}


def compiled(name: str, dtype: str) -> Any:
    """`forward`, `inference` or `backward` for a dtype, compiled, or found in the cache on disk."""
    element, number = _KINDS[dtype]
    big, vectors = (3, 5) if name == "backward" else (2, 4)
    kinds = [_P(element)] * big + [_P(number)] * vectors + [types.float64, *_PLAN]
    return cached_cfunc(types.int64(*kinds), _functions(_stamp())[name])


def _stamp() -> int:
    """A number other than 0 that changes with the drivers."""
    return zlib.crc32(Path(drivers.__file__).read_bytes()) | 1


def _functions(stamp):
    """The functions by name. Numba looks for them in its cache by what they enclose: an old `stamp` is not found there.

    Of an array only the address matters, and of the board its length.
    """

    def forward(x, y, scale, offset, mean, variance, epsilon, numbers, spans, groups, counts, board, length, helpers):
        plan = carray(numbers, 1), carray(spans, 1), carray(groups, 1), carray(counts, 1)
        vectors, made = (carray(scale, 1), carray(offset, 1)), (carray(mean, 1), carray(variance, 1))
        data, results = (carray(x, 1),), (carray(y, 1),)
        drivers.whole(data, results, vectors, made, epsilon, plan, carray(board, length), helpers)
        return stamp

    def inference(x, y, scale, offset, mean, variance, epsilon, numbers, spans, groups, counts, board, length, helpers):
        plan = carray(numbers, 1), carray(spans, 1), carray(groups, 1), carray(counts, 1)
        vectors = carray(scale, 1), carray(offset, 1), carray(mean, 1), carray(variance, 1)
        drivers.inference((carray(x, 1),), (carray(y, 1),), vectors, epsilon, plan, carray(board, length), helpers)
        return stamp

    def backward(
        g, x, y, scale, variance, mean, scale_grad, offset_grad, epsilon, numbers, spans, groups, counts, board, length, helpers
    ):  # fmt: skip
        plan = carray(numbers, 1), carray(spans, 1), carray(groups, 1), carray(counts, 1)
        vectors = carray(scale, 1), carray(variance, 1), carray(mean, 1)
        made = carray(scale_grad, 1), carray(offset_grad, 1)
        data, results = (carray(g, 1), carray(x, 1)), (carray(y, 1),)
        drivers.whole(data, results, vectors, made, epsilon, plan, carray(board, length), helpers)
        return stamp

    return {"forward": forward, "inference": inference, "backward": backward}
