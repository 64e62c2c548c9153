"""Calls of the raw batching ops with something wrong in them, and checks that nothing is left behind."""

from __future__ import annotations

import warnings

import numpy as np

from support.callers import start_on
from weft import raw_ops
from weft.errors import UnavailableError

NO_ROWS = np.empty((0, 3), np.int64)
X = np.ones((2, 3), np.float32)


def batch(in_tensors=(X,), **attributes):
    given = {
        "num_batch_threads": 1,
        "max_batch_size": 8,
        "batch_timeout_micros": 0,
        "grad_timeout_micros": 0,
    } | attributes
    return raw_ops.Batch(in_tensors, **given)


def identity(x):
    return x


def function(in_tensors=(X,), captured_tensors=(), f=identity, **attributes):
    given = {
        "num_batch_threads": 1,
        "max_batch_size": 8,
        "batch_timeout_micros": 0,
        "Tout": ["float32"],
    } | attributes
    return raw_ops.BatchFunction(in_tensors, captured_tensors, f, **given)


def unbatch(data=X, index=NO_ROWS, id=7, timeout_micros=1000, **attributes):
    return raw_ops.Unbatch(data, index, id, timeout_micros=timeout_micros, **attributes)


def unbatch_grad(original=X, index=((7, 0, 2),), grad=X, id=7, **attributes):
    return raw_ops.UnbatchGrad(original, index, grad, id, **attributes)


def both(name, **bad):
    """The same bad attributes for Batch and BatchFunction."""
    yield f"Batch {name}", lambda: batch(**bad)
    yield f"BatchFunction {name}", lambda: function(**bad)


SPLIT = {"enable_large_batch_splitting": True}


def check_untouched(scope):
    """Nothing is stored, no name is taken, and a good call on every name goes through without a warning."""
    assert scope.sweep() == 0
    assert scope.resources == {}, "a refused call creates no resource"
    check_usable(scope.clock)


def check_usable(clock, warns=False):
    def calls():
        joined = batch()
        (y,) = function()
        return joined, y, unbatch(X, [[7, 0, 2]]), unbatch_grad()

    with warnings.catch_warnings():
        if warns:  # the names have parameters by now
            warnings.simplefilter("ignore", UserWarning)
        caller = start_on(clock, calls)
        clock.run_out()
    joined, y, piece, grad = caller.answer()
    for got in (joined.batched_tensors[0], y, piece, grad):
        np.testing.assert_array_equal(got, X)


def refuse(x):
    raise UnavailableError("later")
