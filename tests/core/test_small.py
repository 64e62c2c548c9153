"""Which arrays are alike, so that a call with one has the batch key of a call with the other."""

from __future__ import annotations

import numpy as np
import pytest

from weft.core import small

LIKE = np.zeros((0, 3), np.float32)


@pytest.mark.parametrize(
    ("x", "count"),
    [
        (np.ones((2, 3), np.float32), 2),
        (np.ones((0, 3), np.float32), 0),
        (np.ones((2, 6), np.float32)[:, ::2], 2),
        (np.ones((2, 3)), -1),
        (np.ones((2, 3), ">f4"), -1),
        (np.ones((2, 4), np.float32), -1),
        (np.ones((2, 3, 1), np.float32), -1),
        (np.ones(3, np.float32), -1),
        (np.float32(1), -1),
        ([1.0], -1),
    ],
)
def test_arrays(x, count):
    assert small.rows_alike(x, LIKE, False) == count


class TestTensors:
    """Only `weft._native` reads tensors; without it they are never alike, and the key is made anew."""

    @pytest.fixture
    def torch(self):
        torch = pytest.importorskip("torch")
        if small.rows_alike(torch.ones(2, 3), torch.empty(0, 3), False) < 0:
            pytest.skip("tensors are not read: weft._native is missing, or torch has no exchange table")
        return torch

    def test_dtypes_and_shapes(self, torch):
        like = torch.empty(0, 3)
        count = {2: torch.ones(2, 3), 4: torch.ones(3, 4).t(), 5: torch.nn.Parameter(torch.ones(5, 3))}
        for rows, x in count.items():
            assert small.rows_alike(x, like, False) == rows
        others = [
            torch.ones(2, 3).double(),
            torch.ones(2, 3).half(),
            torch.ones(2, 3).int(),
            torch.ones(2, 4),
            torch.ones(3),
        ]
        others += [torch.tensor(1.0), torch.ones(2, 3, 1), LIKE, None, 1.0]
        for x in others:
            assert small.rows_alike(x, like, False) == -1
        assert small.rows_alike(np.ones((2, 3), np.float32), like, False) == -1
        assert small.rows_alike(torch.ones(2, 3), LIKE, False) == -1
        assert small.rows_alike(torch.ones(2, 3), None, False) == -1

    def test_gradients_count_where_they_are_recorded(self, torch):
        plain, recorded = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
        for like, x, count in [
            (plain, plain, 2),
            (plain, recorded, -1),
            (recorded, plain, -1),
            (recorded, recorded, 2),
        ]:
            assert small.rows_alike(x, like, True) == count
            assert small.rows_alike(x, like, False) == 2

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_what_a_call_refuses(self, torch):
        like, x = torch.empty(0, 3), torch.ones(2, 3)
        freed = torch.ones(2, 3)
        freed.untyped_storage().resize_(0)
        nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(3)])
        for other in [x.to_sparse(), x.to("meta"), freed, nested]:
            assert small.rows_alike(other, like, False) == -1
        found = []
        torch.vmap(lambda row: found.append(small.rows_alike(x, like, False)) or row)(x)
        torch.func.grad(lambda y: found.append(small.rows_alike(y, like, False)) or y.sum())(x)
        with torch.autograd.forward_ad.dual_level():
            found.append(small.rows_alike(x, like, False))
        assert found == [-1, -1, -1]
