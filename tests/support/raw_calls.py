"""Calls of the raw batching ops in which only what a test is about is said."""

from __future__ import annotations

import numpy as np

from weft import raw_ops

NO_ROWS = np.empty((0, 3), np.int64)
POLICIES = [
    "low_priority_padding_with_max_batch_size",
    "low_priority_padding_with_next_allowed_batch_size",
    "priority_isolation",
    "priority_merge",
]
LONG = 60_000_000  # microseconds: these batches are closed by their size


def batch(x, size=8, **attributes):
    given = {"num_batch_threads": 1, "batch_timeout_micros": LONG, "grad_timeout_micros": 0} | attributes
    return raw_ops.Batch([x], max_batch_size=size, **given)


def function(f, x, size=8, Tout=("float64",), captured=(), **attributes):
    given = {"num_batch_threads": 1, "batch_timeout_micros": LONG} | attributes
    return raw_ops.BatchFunction([x], list(captured), f, max_batch_size=size, Tout=Tout, **given)[0]


def unbatch(data, got, **attributes):
    return raw_ops.Unbatch(data, got.batch_index, got.id, **{"timeout_micros": LONG} | attributes)


def rows(*values):
    return np.array(values, float).reshape(-1, 1)
