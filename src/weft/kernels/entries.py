"""Batch norm's drivers as C functions, for a caller that has pointers where others have arrays.

Numba's own way into a driver makes a description of every array in every tuple, 1 us for all of them, and needs the arrays
to begin with. Through these functions no Python object is touched on the way. They return 1, and 0 where memory ran out.
"""

from __future__ import annotations

from typing import Any

from numba import carray, cfunc, types

from . import drivers

_P = types.CPointer
_PLAN = [_P(types.int64)] * 5 + [types.int64] * 2

# How the elements of each dtype are read, and in what the per-channel vectors are.
_KINDS = {
    "float32": (types.float32, types.float32),
    "float64": (types.float64, types.float64),
    "float16": (types.int16, types.float32),
    "bfloat16": (types.uint16, types.float32),
}


def forward(x, y, scale, offset, mean, variance, epsilon, numbers, spans, groups, counts, board, length, helpers):
    """`whole` of the forward pass; all that matters of an array but for the board's length is where it begins."""
    plan = carray(numbers, 1), carray(spans, 1), carray(groups, 1), carray(counts, 1)
    drivers.whole(
        (carray(x, 1),), (carray(y, 1),), (carray(scale, 1), carray(offset, 1)), (carray(mean, 1), carray(variance, 1)),
        epsilon, plan, carray(board, length), helpers,
    )  # fmt: skip
    return 1


def inference(x, y, scale, offset, mean, variance, epsilon, numbers, spans, groups, counts, board, length, helpers):
    """`inference`, with arguments in the order of `forward`."""
    plan = carray(numbers, 1), carray(spans, 1), carray(groups, 1), carray(counts, 1)
    vectors = carray(scale, 1), carray(offset, 1), carray(mean, 1), carray(variance, 1)
    drivers.inference((carray(x, 1),), (carray(y, 1),), vectors, epsilon, plan, carray(board, length), helpers)
    return 1


def backward(
    g, x, y, scale, variance, mean, scale_grad, offset_grad, epsilon, numbers, spans, groups, counts, board, length, helpers
):  # fmt: skip
    """`whole` of the gradient."""
    plan = carray(numbers, 1), carray(spans, 1), carray(groups, 1), carray(counts, 1)
    vectors = carray(scale, 1), carray(variance, 1), carray(mean, 1)
    made = carray(scale_grad, 1), carray(offset_grad, 1)
    drivers.whole(
        (carray(g, 1), carray(x, 1)), (carray(y, 1),), vectors, made, epsilon, plan, carray(board, length), helpers
    )
    return 1


def compiled(function: Any, dtype: str) -> Any:
    """One of the above for a dtype, compiled, or found in the cache on disk."""
    element, number = _KINDS[dtype]
    big, vectors = (3, 5) if function is backward else (2, 4)
    kinds = [_P(element)] * big + [_P(number)] * vectors + [types.float64, *_PLAN]
    return cfunc(types.int64(*kinds), cache=True)(function)
