"""The ragged ops on CUDA tensors: values stay on the device, splits stay on the host."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import need

from weft import RaggedTensor, VariantArray, raw_ops

pytestmark = pytest.mark.cuda
SPLITS = np.array([0, 2, 2, 5])


@pytest.fixture
def values():
    need("torch")
    import torch

    assert torch.cuda.is_available()
    return torch.arange(10.0, device="cuda").reshape(5, 2).requires_grad_()


def test_variants(values):
    v = raw_ops.RaggedTensorToVariant([SPLITS], values, True)
    decoded = raw_ops.RaggedTensorFromVariant(VariantArray.stack([v[2], v[0]]), 0, 1, "float32")
    assert decoded.output_dense_values.device == values.device
    assert decoded.output_nested_splits[0].device.type == "cpu"
    decoded.output_dense_values.sum().backward()
    assert values.grad.tolist() == [[1, 1]] * 5
    laid = raw_ops.RaggedTensorToVariantGradient(VariantArray([v[0], None, None]), SPLITS, (5, 2), "float32")
    assert laid.device == values.device
    assert laid.tolist() == [[0, 1], [2, 3], [0, 0], [0, 0], [0, 0]]


def test_rows(values):
    rt = RaggedTensor(values, [SPLITS])
    assert rt.sum().tolist() == [[2, 4], [0, 0], [18, 21]]
    assert rt.max()[2].tolist() == [8, 9]
    assert rt.mean()[0].tolist() == [1, 2]
    assert rt.to_padded(2).values.shape == (3, 2, 2)
    assert rt.to_padded().mask.device == values.device
    gathered = rt.gather(np.array([2, 2]))
    (gathered.flat_values.sum() + rt.softmax().flat_values.sum() + rt.spread(rt.sum()).flat_values.sum()).backward()
    np.testing.assert_allclose(values.grad.cpu(), [[2, 2]] * 2 + [[5, 5]] * 3, atol=1e-5)
    filled = raw_ops.RaggedFillEmptyRows(np.array([0, 2, 2, 3, 0]), values[:, 0], np.array(5), values[0, 0])
    assert filled.output_values.device == values.device
    assert raw_ops.RaggedTensorToSparse([SPLITS], values).sparse_values.device == values.device
    assert rt.cu_seqlens().device == values.device
