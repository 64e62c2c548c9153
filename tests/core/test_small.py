"""Operations on a few small rows, by `weft._native` and in Python, with the same results."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest

from weft.core import small as installed

LIKE = np.zeros((0, 3), np.float32)


@pytest.fixture(params=["as installed", "in Python"])
def small(request, monkeypatch):
    if request.param == "as installed":
        return installed
    monkeypatch.setitem(sys.modules, "weft._native", None)
    spec = spec_from_file_location("weft.core.small_in_python", installed.__file__)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        (np.array(1, np.float32), -1),
        ([1.0], -1),
    ],
)
def test_arrays_that_are_alike(small, x, count):
    assert small.rows_alike(x, LIKE, False) == count


def test_scalars_have_no_rows(small):
    assert small.rows_alike(np.array(1.0), np.array(1.0), False) == -1


def test_an_index_has_three_columns(small):
    np.testing.assert_array_equal(small.index([1, 2, 3, 4, 5, 6]), [[1, 2, 3], [4, 5, 6]])
    assert small.index([]).shape == (0, 3)
    for numbers in ([1], [1, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=r"."):
            small.index(numbers)


def test_pieces(small):
    x = np.arange(8.0).reshape(4, 2)
    pieces = small.pieces(x, [0, 1, 1, 4])
    x[...] = 0
    assert [piece.tolist() for piece in pieces] == [[[0, 1]], [], [[2, 3], [4, 5], [6, 7]]]
    for i in (-1, 3):
        with pytest.raises(IndexError):
            pieces[i]
    for edges in ([], [0, 5], [1, 0], [-1, 2]):
        assert small.pieces(x, edges) is None


class TestTensors:
    """Only `weft._native` reads tensors; without it they are never alike, and the key is made anew."""

    @pytest.fixture
    def torch(self):
        torch = pytest.importorskip("torch")
        if installed.rows_alike(torch.ones(2, 3), torch.empty(0, 3), False) < 0:
            pytest.skip("tensors are not read: weft._native is missing, or torch has no exchange table")
        return torch

    def test_dtypes_and_shapes(self, torch):
        like = torch.empty(0, 3)
        count = {2: torch.ones(2, 3), 4: torch.ones(3, 4).t(), 5: torch.nn.Parameter(torch.ones(5, 3))}
        for rows, x in count.items():
            assert installed.rows_alike(x, like, False) == rows
        others = [
            torch.ones(2, 3).double(),
            torch.ones(2, 3).half(),
            torch.ones(2, 3).int(),
            torch.ones(2, 4),
            torch.ones(3),
        ]
        others += [torch.tensor(1.0), torch.ones(2, 3, 1), LIKE, None, 1.0]
        for x in others:
            assert installed.rows_alike(x, like, False) == -1
        assert installed.rows_alike(np.ones((2, 3), np.float32), like, False) == -1
        assert installed.rows_alike(torch.ones(2, 3), LIKE, False) == -1
        assert installed.rows_alike(torch.ones(2, 3), None, False) == -1

    def test_gradients_count_where_they_are_recorded(self, torch):
        plain, recorded = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
        for like, x, count in [
            (plain, plain, 2),
            (plain, recorded, -1),
            (recorded, plain, -1),
            (recorded, recorded, 2),
        ]:
            assert installed.rows_alike(x, like, True) == count
            assert installed.rows_alike(x, like, False) == 2

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_what_a_call_refuses(self, torch):
        like, x = torch.empty(0, 3), torch.ones(2, 3)
        freed = torch.ones(2, 3)
        freed.untyped_storage().resize_(0)
        nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(3)])
        for other in [x.to_sparse(), x.to("meta"), freed, nested]:
            assert installed.rows_alike(other, like, False) == -1
        found = []
        torch.vmap(lambda row: found.append(installed.rows_alike(x, like, False)) or row)(x)
        torch.func.grad(lambda y: found.append(installed.rows_alike(y, like, False)) or y.sum())(x)
        with torch.autograd.forward_ad.dual_level():
            found.append(installed.rows_alike(x, like, False))
        assert found == [-1, -1, -1]
