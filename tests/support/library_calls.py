"""Calls of the raw batching ops on a simulated clock, in any library and dtype."""

from __future__ import annotations

import numpy as np
import pytest

from support.callers import start_on
from weft import raw_ops

NO_ROWS = np.empty((0, 3), np.int64)
LARGE = 1 << 16  # float64 numbers enough for memory that is used again


def batch(*tensors, **attributes):
    given = {
        "num_batch_threads": 1,
        "max_batch_size": 1 << 20,
        "batch_timeout_micros": 1000,
        "grad_timeout_micros": 0,
    } | attributes
    return raw_ops.Batch(list(tensors), **given)


def function(f, *tensors, Tout=("float32",), captured=(), **attributes):
    given = {"num_batch_threads": 1, "max_batch_size": 1 << 20, "batch_timeout_micros": 1000} | attributes
    return raw_ops.BatchFunction(list(tensors), list(captured), f, Tout=Tout, **given)


def all_of(clock, *calls):
    """The answers of calls that come one after the other at one time."""
    callers = [start_on(clock, call) for call in calls]
    clock.run_out()
    return [caller.answer() for caller in callers]


def numbers(dtype, *shape):
    count = int(np.prod(shape))
    values = np.arange(1, count + 1).reshape(shape)
    return (values % 2 == 0) if dtype == "bool" else values.astype(dtype)


def bfloat16():
    return pytest.importorskip("ml_dtypes").bfloat16


def chain(clock, x, y):
    """Two callers through Batch, Unbatch and UnbatchGrad: the batch, its pieces, the joined gradient, in order."""

    def call(x):
        got = batch(x)
        piece = raw_ops.Unbatch(got.batched_tensors[0], got.batch_index, got.id, timeout_micros=1_000_000)
        grad = raw_ops.UnbatchGrad(got.batched_tensors[0], got.batch_index, piece, got.id)
        return got, piece, grad

    return all_of(clock, lambda: call(x), lambda: call(y))


def same(x):
    return x
