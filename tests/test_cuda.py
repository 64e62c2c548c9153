"""The batching family on tensors of an NVIDIA device."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import weft
from weft import raw_ops

pytestmark = pytest.mark.cuda
ATTRS = {"num_batch_threads": 1, "max_batch_size": 8, "batch_timeout_micros": 5_000_000}


@pytest.fixture(autouse=True)
def _scope():
    with weft.scope():
        yield


def together(count, body):
    """`body(i)` in `count` threads at once; the results in order."""
    results = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: body(i)})) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[i] for i in range(count)]


def test_pipeline_stays_on_the_device():
    import torch

    def body(i):
        x = torch.full((1, 3), float(i), device="cuda")
        b = raw_ops.Batch([x], grad_timeout_micros=0, **ATTRS)
        assert b.batched_tensors[0].device.type == "cuda"
        assert b.batch_index.device.type == "cpu"
        assert b.batch_index.dtype == b.id.dtype == torch.int64
        return raw_ops.Unbatch(b.batched_tensors[0] * 2, b.batch_index, b.id, timeout_micros=5_000_000)

    for i, y in enumerate(together(8, body)):
        assert y.device.type == "cuda"
        np.testing.assert_array_equal(y.cpu().numpy(), np.full((1, 3), 2.0 * i))


def test_gradients_meet_on_the_device():
    import torch

    index = np.array([[1, 0, 1], [2, 1, 1], [3, 2, 1]])

    def body(i):
        original = torch.zeros((3 if i == 0 else 0, 2), device="cuda")
        mine = index if i == 0 else index[:0]
        return raw_ops.UnbatchGrad(original, torch.from_numpy(mine), torch.full((1, 2), float(i), device="cuda"), i + 1)

    owner, *others = together(3, body)
    np.testing.assert_array_equal(owner.cpu().numpy(), [[0, 0], [1, 1], [2, 2]])
    assert all(x.shape == (0, 2) and x.device.type == "cuda" for x in others)


def test_function_runs_once_on_the_device():
    import torch

    seen = []

    def f(x):
        seen.append((x.device.type, len(x)))
        return x + 1

    def body(i):
        x = torch.full((1, 3), float(i), device="cuda")
        return raw_ops.BatchFunction([x], [], f, Tout=[torch.float32], **ATTRS)[0]

    for i, y in enumerate(together(8, body)):
        assert y.device.type == "cuda"
        np.testing.assert_array_equal(y.cpu().numpy(), np.full((1, 3), i + 1.0))
    assert seen == [("cuda", 8)]


def test_devices_do_not_meet():
    import torch

    def body(i):
        x = torch.full((1, 3), float(i), device="cuda" if i % 2 else "cpu")
        return raw_ops.Batch([x], grad_timeout_micros=0, **{**ATTRS, "max_batch_size": 4})

    batches = [b for b in together(8, body) if len(b.batch_index)]
    assert sorted(b.batched_tensors[0].device.type for b in batches) == ["cpu", "cuda"]
    assert all(len(b.batch_index) == 4 for b in batches)
