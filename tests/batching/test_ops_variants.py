"""Ragged rows are batched as variants: through Batch, Unbatch, UnbatchGrad and BatchFunction."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.libraries import to

import weft
from weft import raw_ops

ATTRS = {"num_batch_threads": 1, "max_batch_size": 6, "batch_timeout_micros": 5_000_000}
ROWS = [[[1.0]], [[2.0, 3.0], []], [[4.0], [5.0, 6.0], [7.0, 8.0, 9.0]]]


@pytest.fixture(autouse=True)
def _scope():
    with weft.scope():
        yield


def encode(library, rows):
    splits, values = np.cumsum([0, *map(len, rows)]), np.array(flat(rows), np.float32)
    return raw_ops.RaggedTensorToVariant([splits], to(library, values), batched_input=True)


def flat(lists):
    return [x for inner in lists for x in inner]


def decode(variants):
    return [np.asarray(row.values).tolist() for row in variants.elements()]


def in_order(body):
    """`body(rows)` for each of ROWS in a thread of its own, one arriving after the other; the answers in order."""
    answers = {}
    queues = weft.core.scope.current_scope
    threads = []
    for i, rows in enumerate(ROWS):
        threads.append(threading.Thread(target=lambda i=i, rows=rows: answers.update({i: body(rows)})))
        threads[-1].start()
        while i < len(ROWS) - 1 and queues.stored() <= i:  # until it waits
            threads[-1].join(0.001)
    for thread in threads:
        thread.join(30)
    return [answers[i] for i in range(len(ROWS))]


def test_rows_come_back_to_their_callers(library):
    def body(rows):
        b = raw_ops.Batch([encode(library, rows)], grad_timeout_micros=0, **ATTRS)
        (batched,) = b.batched_tensors
        assert batched.dtype.name == "variant"
        return batched.shape, decode(raw_ops.Unbatch(batched, b.batch_index, b.id, timeout_micros=5_000_000))

    assert in_order(body) == [((0,), ROWS[0]), ((0,), ROWS[1]), ((6,), ROWS[2])]


def test_gradients_are_gathered(library):
    index = np.array([[1, 0, 1], [2, 1, 2], [3, 3, 3]])

    def body(rows):
        grad = encode(library, rows)
        own = len(rows)
        original = encode(library, flat(ROWS)) if own == 3 else encode(library, [])
        joined = raw_ops.UnbatchGrad(original, index if own == 3 else index[:0], grad, own)
        return decode(joined)

    assert in_order(body) == [[], [], flat(ROWS)]


def test_a_function_sees_ragged_rows():
    seen = []

    def f(x):
        seen.append(x.shape)
        return x, np.array([sum(row) for row in decode(x)])

    def body(rows):
        same, sums = raw_ops.BatchFunction([encode("numpy", rows)], [], f, Tout=["variant", "float64"], **ATTRS)
        return decode(same), sums.tolist()

    assert in_order(body) == [(rows, [sum(row) for row in rows]) for rows in ROWS]
    assert seen == [(6,)]


def test_padding_repeats_the_first_row():
    b = raw_ops.Batch([encode("numpy", ROWS[1])], grad_timeout_micros=0, allowed_batch_sizes=[4, 6],
                      **{**ATTRS, "batch_timeout_micros": 0})  # fmt: skip
    assert decode(b.batched_tensors[0]) == [[2.0, 3.0], [], [2.0, 3.0], [2.0, 3.0]]
