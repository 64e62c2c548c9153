"""Calls of the awaitable batching ops in which only what a test is about is said."""

from __future__ import annotations

import asyncio
import threading

import numpy as np

from support.callers import PATIENCE, start
from weft import aio, raw_ops

NO_ROWS = np.empty((0, 3), np.int64)
LONG = 60_000_000  # microseconds: these batches are closed by their size


def run(main):
    """What a coroutine returns; it may not take for ever."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


def same(x):
    return x


class Seen:
    """Doubles its rows, and notes the rows and the thread of each batch."""

    def __init__(self):
        self.batches, self.threads = [], []

    def __call__(self, x):
        self.batches.append(x.ravel().tolist())
        self.threads.append(threading.current_thread())
        return x * 2

    @property
    def ran_in_loop(self):
        """Whether all batches ran in this thread."""
        return {*self.threads} == {threading.current_thread()}


class Held:
    """Returns its rows. A batch whose first row is 0 is held until `go` is set, and then raises `kind` if there is one."""

    def __init__(self, kind=None):
        self.kind, self.began, self.go = kind, threading.Event(), threading.Event()

    def __call__(self, x):
        if x[0, 0] == 0:
            self.began.set()
            assert self.go.wait(PATIENCE)
            if self.kind is not None:
                raise self.kind
        return x

    def wait(self):
        """Wait until a batch is held."""
        assert self.began.wait(PATIENCE)


def batch(x, size=8, **attributes):
    given = {"num_batch_threads": 1, "batch_timeout_micros": LONG, "grad_timeout_micros": 0} | attributes
    return aio.Batch([x], max_batch_size=size, **given)


def attributes_of(f, x, size=8, **attributes):
    given = {"num_batch_threads": 1, "batch_timeout_micros": LONG, "Tout": ["float64"], "max_enqueued_batches": 99}
    return {"in_tensors": [x], "captured_tensors": [], "f": f, "max_batch_size": size} | given | attributes


def function(f, x, size=8, **attributes):
    return aio.BatchFunction(**attributes_of(f, x, size, **attributes))


def in_thread(f, x, size=8, **attributes):
    return start(raw_ops.BatchFunction, **attributes_of(f, x, size, **attributes))


def unbatch(data, got, **attributes):
    return aio.Unbatch(data, got.batch_index, got.id, **{"timeout_micros": LONG} | attributes)


def rows(*values):
    return np.array(values, float).reshape(-1, 1)


async def begin(*coroutines):
    """Tasks that have got as far as they can: each is in its queue."""
    tasks = []
    for coroutine in coroutines:
        tasks.append(asyncio.ensure_future(coroutine))
        await asyncio.sleep(0)
    return tasks
