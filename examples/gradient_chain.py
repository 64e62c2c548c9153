"""Eight threads train on one batch: Batch -> f -> Unbatch, and the gradient back the same way, by `weft.vjp`.

The gradient of Unbatch is UnbatchGrad: it gathers the callers' gradients into that of the batch, in the thread that owns the
batch, which runs the backward pass once. The gradient of Batch is Unbatch: it brings each caller the gradient of its own rows.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import weft
from weft import raw_ops

CALLERS, FEATURES = 8, 4
rng = np.random.default_rng(0)
weights = rng.standard_normal((FEATURES, 3))


def f(x):
    """The model: one layer."""
    return np.tanh(x @ weights)


def f_backward(x, dy):
    """The gradients of `x` and of the weights."""
    dz = dy * (1 - f(x) ** 2)
    return dz @ weights.T, x.T @ dz


def caller(x, target):
    """The gradient of half the squared error: of the caller's rows, and, in the owner of the batch, of the weights."""
    batch, batch_back = weft.vjp(
        raw_ops.Batch,
        [x],
        num_batch_threads=1,
        max_batch_size=sum(map(len, inputs)),
        batch_timeout_micros=1_000_000,
        grad_timeout_micros=0,
    )
    (rows,) = batch.batched_tensors
    y, unbatch_back = weft.vjp(raw_ops.Unbatch, f(rows), batch.batch_index, batch.id, timeout_micros=1_000_000)
    dy = unbatch_back(y - target)["batched_tensor"]  # UnbatchGrad
    drows, dweights = f_backward(rows, dy)  # on all rows in the owner, on none in the others
    (dx,) = batch_back([drows])["in_tensors"]  # Unbatch
    return dx, dweights


inputs = [rng.standard_normal((1 + i % 3, FEATURES)) for i in range(CALLERS)]
targets = [rng.standard_normal((len(x), 3)) for x in inputs]
with weft.scope(), ThreadPoolExecutor(CALLERS) as threads:
    results = list(threads.map(caller, inputs, targets))

x, target = np.concatenate(inputs), np.concatenate(targets)
dx, dweights = f_backward(x, f(x) - target)
np.testing.assert_allclose(np.concatenate([got for got, _ in results]), dx, rtol=1e-9, atol=1e-12)
np.testing.assert_allclose(sum(got for _, got in results), dweights, rtol=1e-9, atol=1e-12)
owners = sum(bool(got.any()) for _, got in results)
print(
    f"{CALLERS} callers, {len(x)} rows, {owners} backward pass with rows: all gradients equal those of one batch by hand"
)
