"""The chain Batch -> model -> Unbatch, and its callers in threads: what the tests of its gradients share."""

from __future__ import annotations

from functools import partial

import numpy as np

from support.callers import start, until
from weft import raw_ops

rng = np.random.default_rng(5)
MINUTE = 60_000_000  # microseconds
FEATURES, OUT = 4, 3
W1, W2 = rng.normal(size=(FEATURES, 5)), rng.normal(size=(5, OUT))
SIZES = {"even": [2, 2, 2], "uneven": [1, 4, 2, 3], "one": [3], "many": [1, 2] * 8}


def rows(sizes, width=FEATURES):
    """Random rows for callers that have so many."""
    return [rng.normal(size=(n, width)) for n in sizes]


def batch(tensors, most, **attributes):
    given = {"num_batch_threads": 4, "batch_timeout_micros": MINUTE, "grad_timeout_micros": 0} | attributes
    return raw_ops.Batch(tensors, max_batch_size=most, **given)


def unbatch(y, made, name=""):
    return raw_ops.Unbatch(y, made.batch_index, made.id, timeout_micros=MINUTE, shared_name=name)


def each(function, *arguments):
    """A call of `function` for each caller, with its arguments."""
    return [partial(function, *given) for given in zip(*arguments, strict=True)]


def in_order(scope, calls):
    """The calls as threads that come to their batch in this order, once they have ended: the last one gets the batch."""
    callers = []
    for i, call in enumerate(calls):
        callers.append(start(call))
        if i + 1 < len(calls):
            until(lambda i=i: scope.stored() == i + 1)
    return [caller.end() for caller in callers]


def answers(callers):
    return [caller.answer() for caller in callers]


def close(got, wanted):
    """Raise unless two lists of arrays are equal but for the last digits."""
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12, atol=1e-12)
