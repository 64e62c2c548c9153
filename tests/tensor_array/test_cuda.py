"""Arrays of CUDA tensors: everything stays on the device."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import back, need
from support.tensor_array_calls import INVALID, concat, gather, grad, make, read, scatter, write

import weft

pytestmark = pytest.mark.cuda


@pytest.fixture
def torch():
    need("torch")
    import torch

    return torch


def test_elements_stay_on_the_device(torch):
    rows = torch.arange(6.0, device="cuda").reshape(3, 2)
    handle = make(4, element_shape=[2], clear_after_read=False)
    scatter(handle, [0, 1, 2], rows)
    stacked, joined = gather(handle, [0, 1, 2, 3]), concat(handle)
    assert {x.device.type for x in (stacked, joined.value, read(handle, 3))} == {"cuda"}
    assert joined.lengths.device.type == "cpu"
    np.testing.assert_array_equal(back(stacked), [[0, 1], [2, 3], [4, 5], [0, 0]])
    rows.zero_()
    np.testing.assert_array_equal(back(read(handle, 2)), [4, 5])
    with pytest.raises(INVALID, match="device"):
        write(handle, 3, torch.ones(2))


def test_gradients_add_up_on_the_device(torch):
    handle = make(2)
    write(handle, 0, torch.ones(3, device="cuda"))
    gradient = grad(handle, "g", [2])
    given = torch.ones(2, 3, device="cuda")
    write(gradient, 0, given)
    write(gradient, 0, given)
    found = read(gradient, 0)
    assert found.device.type == "cuda"
    np.testing.assert_array_equal(back(found), np.full((2, 3), 2))
    np.testing.assert_array_equal(back(given), np.ones((2, 3)))


def test_torch_differentiates_through_the_array_on_the_device(torch):
    x = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    array = weft.TensorArray(size=2).write(0, x).write(1, x * x)
    array.stack().sum().backward()
    np.testing.assert_array_equal(back(x.grad), [3, 5])
