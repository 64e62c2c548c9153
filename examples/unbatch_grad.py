"""Three callers, one batch: UnbatchGrad brings their gradients together again.

One of the callers owns the batch: it alone got the rows. UnbatchGrad gives it the gradients of all three, in the order of the
batch's index; the two others leave theirs, get an empty array, and go on.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import weft
from weft import raw_ops


def caller(x, gradient):
    """What one of the callers does; its rows of the batch, the index, its id, and what UnbatchGrad gave it."""
    batch = raw_ops.Batch(
        [x], num_batch_threads=1, max_batch_size=6, batch_timeout_micros=1_000_000, grad_timeout_micros=0
    )
    (rows,) = batch.batched_tensors
    joined = raw_ops.UnbatchGrad(rows, batch.batch_index, gradient, batch.id)
    return rows, batch.batch_index, int(batch.id), joined


inputs = [np.array([[1.0]]), np.array([[2.0], [3.0]]), np.array([[4.0], [5.0], [6.0]])]
gradients = [x / 10 for x in inputs]
with weft.scope(), ThreadPoolExecutor(3) as threads:
    results = list(threads.map(caller, inputs, gradients))

(owner,) = [i for i, (rows, *_) in enumerate(results) if len(rows)]
rows, index, _, joined = results[owner]
gradient_of = {id: gradient for (_, _, id, _), gradient in zip(results, gradients, strict=True)}

print("batch_index, a row (id, start, length) per caller:", index[:, 1:].tolist(), "after the ids")
print("the owner's rows:     ", rows.ravel().tolist())
print("the owner's gradients:", joined.ravel().tolist())

np.testing.assert_array_equal(joined, np.concatenate([gradient_of[id] for id in index[:, 0].tolist()]))
np.testing.assert_array_equal(joined, rows / 10)
assert all(other.shape == (0, 1) for i, (*_, other) in enumerate(results) if i != owner)
