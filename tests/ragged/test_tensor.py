"""`weft.RaggedTensor`: what people program with, on every library, and its bridges to other libraries."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import back, need, to

import weft
from weft import RaggedTensor
from weft.errors import InvalidArgumentError, OutOfRangeError, ResourceExhaustedError

ROWS = [[1.0, 2.0], [], [3.0, 4.0, 5.0], [6.0]]


@pytest.fixture
def rt(library):
    need(library)
    return RaggedTensor.from_row_splits(to(library, np.arange(1, 7, dtype=np.float32)), np.array([0, 2, 2, 5, 6]))


def nested():
    return RaggedTensor.from_rows([[[1, 2], []], [], [[3], [4, 5]]])


def test_constructors(library):
    need(library)
    values = to(library, np.arange(1, 7, dtype=np.float32))
    for made in (
        RaggedTensor.from_row_splits(values, [0, 2, 2, 5, 6]),
        RaggedTensor.from_row_lengths(values, [2, 0, 3, 1]),
        RaggedTensor.from_row_ids(values, [0, 0, 2, 2, 2, 3]),
        RaggedTensor.from_rows([to(library, np.asarray(row, np.float32)) for row in ROWS]),
        RaggedTensor.from_cu_seqlens(values, np.array([0, 2, 2, 5, 6], np.int32)),
    ):
        assert made.to_list() == ROWS
        assert (made.library, made.shape, len(made), made.ragged_rank) == (library, (4, None), 4, 1)
    assert RaggedTensor.from_row_ids(values, [0, 0, 2, 2, 2, 3], nrows=6).to_list() == [*ROWS, [], []]
    assert RaggedTensor.from_rows(ROWS).to_list() == ROWS


def test_nested_constructors():
    rt = nested()
    assert rt.to_list() == [[[1, 2], []], [], [[3], [4, 5]]]
    assert (rt.ragged_rank, rt.shape) == (2, (3, None, None))
    assert rt.values.to_list() == [[1, 2], [], [3], [4, 5]]
    assert RaggedTensor.from_row_lengths(rt.values, [2, 0, 2]).to_list() == rt.to_list()
    assert RaggedTensor.from_rows(list(rt)).to_list() == rt.to_list()
    assert RaggedTensor.from_rows([[[1, 2]], [[3, 4], [5, 6]]], ragged_rank=1).shape == (2, None, 2)
    assert RaggedTensor.from_rows([], ragged_rank=3).shape == (0, None, None, None)
    assert RaggedTensor.from_rows([[], []]).to_list() == [[], []]
    assert RaggedTensor.from_rows([["a"], ["b", "c"]]).flat_values.dtype == object


@pytest.mark.parametrize(
    "bad",
    [
        lambda: RaggedTensor(np.ones(2), []),
        lambda: RaggedTensor(np.ones(2), [[0, 3]]),
        lambda: RaggedTensor.from_row_splits(nested(), [0, 9]),
        lambda: RaggedTensor.from_row_lengths(np.ones(2), [3, -1]),
        lambda: RaggedTensor.from_row_ids(np.ones(2), [1, 0]),
        lambda: RaggedTensor.from_row_ids(np.ones(2), [0, 3], nrows=2),
        lambda: RaggedTensor.from_rows([[1], 2]),
        lambda: RaggedTensor.from_rows([[[1], 2]]),
        lambda: RaggedTensor.from_rows([np.ones(2), np.ones((2, 2))]),
        lambda: RaggedTensor.from_rows([np.ones(2), np.float64(1)]),
        lambda: RaggedTensor.from_padded(np.ones((2, 2))),
        lambda: RaggedTensor.from_padded(np.ones((2, 2)), lengths=[1, 3]),
        lambda: RaggedTensor.from_padded(np.ones((1, 2)), mask=np.array([[False, True]])),
        lambda: RaggedTensor.concat([]),
        lambda: RaggedTensor.concat([nested(), nested()[:1]], axis=1),
        lambda: RaggedTensor.from_rows(ROWS)[np.array([True])],
        lambda: RaggedTensor.from_rows(ROWS)[np.uint64(2**64 - 1)],  # -1, had it 64 bits with a sign
        lambda: RaggedTensor.from_rows(ROWS)[np.array([2**64 - 1], np.uint64)],
        lambda: RaggedTensor.from_rows(ROWS)[:, ::2],
        lambda: RaggedTensor.from_rows(ROWS).spread(np.ones(3)),
        lambda: RaggedTensor.from_rows(ROWS) + RaggedTensor.from_rows(ROWS[::-1]),
        lambda: RaggedTensor.from_rows(ROWS) + nested(),
        lambda: RaggedTensor.from_rows(ROWS) * np.ones(6),
        lambda: RaggedTensor.from_rows(ROWS).with_values(np.ones(5)),
        lambda: RaggedTensor.from_rows(ROWS).to_nested_tensor(),
        lambda: RaggedTensor.from_row_splits(np.array(["a", None], object), [0, 2]),
        lambda: RaggedTensor.from_row_ids(np.ones(1), [0], nrows=1.5),
        lambda: RaggedTensor.from_row_ids(np.ones(0), [], nrows=-1),
        lambda: RaggedTensor.from_padded(np.ones(2), lengths=[1, 1]),
        lambda: RaggedTensor.from_padded(np.ones((2, 2)), mask=np.ones(2, bool)),
        lambda: RaggedTensor.from_padded(np.ones((2, 2)), mask=np.ones((3, 2), bool)),
        lambda: RaggedTensor.from_rows(ROWS)[1.5],
        lambda: RaggedTensor.from_rows(ROWS)["a"],
        lambda: RaggedTensor.from_rows(ROWS)[None],
        lambda: RaggedTensor.from_rows(ROWS)[...],
        lambda: RaggedTensor.from_rows(ROWS)[[[1], [2, 3]]],
        lambda: RaggedTensor.from_rows(ROWS)[:, 0.5],
        lambda: RaggedTensor.from_rows(ROWS)[:, 0, 0],
        lambda: nested()[:, 0],
        lambda: RaggedTensor.from_rows(ROWS) * [1, 2, 3],
        lambda: RaggedTensor.from_rows(ROWS).spread(1.0),
        lambda: RaggedTensor.from_rows(ROWS).to_padded(2.5),
        lambda: RaggedTensor.from_rows(ROWS).to_padded(-1),
        lambda: RaggedTensor.from_rows(ROWS).to_padded(10**20),
        lambda: RaggedTensor.from_rows(ROWS).to_padded(value="x"),
        lambda: RaggedTensor.from_rows([["a"]]).to_padded(value=0),
        lambda: RaggedTensor.from_rows(ROWS).map_rows(lambda row: None),
        lambda: RaggedTensor.from_rows(ROWS).map_rows(lambda row: row if len(row) else 0.0),
        lambda: RaggedTensor.concat([np.ones(2)]),
        lambda: RaggedTensor.concat([RaggedTensor.from_rows(ROWS), nested()]),
        lambda: RaggedTensor.stack([RaggedTensor.from_rows(ROWS), RaggedTensor.from_rows([[1]])]),
        lambda: RaggedTensor.from_rows([["a"]]).sum(),
        lambda: RaggedTensor.from_rows([["a"]]).max(),
        lambda: RaggedTensor.from_rows([[True]]).sum(),
        lambda: RaggedTensor.from_rows([[True]]).softmax(),
        lambda: RaggedTensor.from_rows([[1j]]).max(),
        lambda: RaggedTensor.from_variant(np.ones(2)),
    ],
)
def test_bad_input(bad):
    with pytest.raises(InvalidArgumentError):
        bad()


@pytest.mark.parametrize("index", [4, -5, (slice(None), 0), ([0, 2], 2)])  # row 1 is empty
def test_an_index_out_of_range(index):
    with pytest.raises(OutOfRangeError, match="out of range"):
        RaggedTensor.from_rows(ROWS)[index]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RaggedTensor(np.ones(3), [0, 1, 3]), "from_row_splits takes one vector"),
        (lambda: RaggedTensor.from_rows([[1.0], ["a"]]), "numbers alone or text alone, got both"),
        (lambda: RaggedTensor.from_rows([[1.0]]).to_nested_tensor(), "to be a NestedTensor, got numpy values and 1"),
    ],
)
def test_a_refusal_says_what_to_do(make, said):
    with pytest.raises(InvalidArgumentError, match=said):
        make()


def test_absurd_sizes_are_refused_before_memory_is_taken():
    with pytest.raises(ResourceExhaustedError):
        RaggedTensor.from_row_ids(np.ones(1), [0], nrows=10**15)
    with pytest.raises(ResourceExhaustedError):
        RaggedTensor.from_rows(ROWS).to_padded(10**15)


def test_reading(rt):
    assert back(rt.row_splits).tolist() == [0, 2, 2, 5, 6]
    assert back(rt.row_lengths()).tolist() == [2, 0, 3, 1]
    assert [back(row).tolist() for row in rt] == ROWS
    assert back(rt[2]).tolist() == back(rt[-2]).tolist() == ROWS[2]
    assert rt[()].to_list() == ROWS
    assert rt[1:3].to_list() == ROWS[1:3]
    assert rt[::-1].to_list() == ROWS[::-1]
    assert rt[[3, 0, 3]].to_list() == [ROWS[3], ROWS[0], ROWS[3]]
    assert rt[[-1]].to_list() == [ROWS[3]]
    assert rt[np.array([True, False, False, True])].to_list() == [ROWS[0], ROWS[3]]
    assert float(rt[2, 1]) == 4
    assert rt[:, 1:].to_list() == [row[1:] for row in ROWS]
    assert rt[:, -2:-1].to_list() == [row[-2:-1] for row in ROWS]
    assert rt[:, :1].to_list() == [row[:1] for row in ROWS]
    assert rt[2:, 1:].to_list() == [row[1:] for row in ROWS[2:]]
    assert back(rt[[0, 2], 1]).tolist() == [ROWS[0][1], ROWS[2][1]]
    assert back(rt[2:, -1]).tolist() == [row[-1] for row in ROWS[2:]]
    assert rt[[]].to_list() == []
    assert rt.gather(np.array([[0, 2], [2, 3]])).to_list() == [[ROWS[0], ROWS[2]], [ROWS[2], ROWS[3]]]
    assert back(rt.gather(np.array(2))).tolist() == ROWS[2]
    assert repr(rt) == f"RaggedTensor({ROWS})"
    many = RaggedTensor.from_row_lengths(np.ones(100), [50, 50])
    assert repr(many) == "RaggedTensor(shape=(2, None), numpy float64, 100 values)"


def test_reading_nested():
    rt = nested()
    assert rt[2].to_list() == [[3], [4, 5]]
    assert rt[2, 1].tolist() == [4, 5]
    assert rt[2, 1, 0] == 4
    assert rt[1:].to_list() == [[], [[3], [4, 5]]]
    assert [row.to_list() for row in rt] == rt.to_list()
    assert rt.map_rows(lambda row: row * 2).to_list() == [[[2, 4], []], [], [[6], [8, 10]]]
    assert rt.sum().to_list() == [[3, 0], [], [3, 9]]
    assert rt.to_padded().values.tolist() == [[[1, 2], [0, 0]], [[0, 0], [0, 0]], [[3, 0], [4, 5]]]
    assert rt.to_padded().mask.sum() == 5


def test_rows_mapped(rt):
    assert rt.map_rows(lambda row: row * 2).to_list() == [[2 * x for x in row] for row in ROWS]
    assert back(rt.map_rows(lambda row: row.sum())).tolist() == [3, 0, 12, 6]
    assert rt[:0].map_rows(lambda row: row).to_list() == []
    longer = rt.map_rows(lambda row: RaggedTensor.from_row_splits(row, [0, row.shape[0]]))
    assert longer.to_list() == [[row] for row in ROWS]


def test_padding_and_back(rt):
    padded = rt.to_padded()
    assert back(padded.values).tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5], [6, 0, 0]]
    assert back(padded.mask).astype(int).sum(1).tolist() == [2, 0, 3, 1]
    assert RaggedTensor.from_padded(padded.values, mask=padded.mask).to_list() == ROWS
    assert RaggedTensor.from_padded(padded.values, lengths=rt.row_lengths()).to_list() == ROWS
    cut = rt.to_padded(2, value=-1)
    assert back(cut.values).tolist() == [[1, 2], [-1, -1], [3, 4], [6, -1]]
    assert back(cut.mask).tolist() == [[True, True], [False, False], [True, True], [True, False]]


def test_put_together(rt):
    assert RaggedTensor.concat([rt, rt[:1]]).to_list() == [*ROWS, ROWS[0]]
    assert RaggedTensor.concat([rt, rt[::-1]], axis=1).to_list() == [
        a + b for a, b in zip(ROWS, ROWS[::-1], strict=True)
    ]
    assert RaggedTensor.stack([rt, rt[:1]]).to_list() == [ROWS, ROWS[:1]]
    assert RaggedTensor.concat([nested(), nested()]).to_list() == nested().to_list() * 2


def test_reductions(rt):
    assert back(rt.sum()).tolist() == [3, 0, 12, 6]
    assert back(rt.max()).tolist() == [2, -np.inf, 5, 6]
    mean = back(rt.mean())
    assert mean[[0, 2, 3]].tolist() == [1.5, 4, 6]
    assert np.isnan(mean[1])
    soft = rt.softmax()
    np.testing.assert_allclose(back(soft.sum()), [1, 0, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(back(soft[0]), np.exp([1, 2]) / np.exp([1, 2]).sum(), rtol=1e-6)
    big = rt.with_values(rt.flat_values * 1000)
    assert not np.isnan(back(big.softmax().flat_values)).any()
    assert RaggedTensor.from_rows([[3, 1], []]).max().tolist() == [3, np.iinfo(np.int64).min]


def test_arithmetic(rt):
    assert ((rt + rt) * 2 - rt / 1 - 1).to_list() == [[3 * x - 1 for x in row] for row in ROWS]
    assert (1 - rt).to_list() == [[1 - x for x in row] for row in ROWS]
    assert (6 / rt)[0].tolist() == [6, 3]
    assert (-(rt**2)).to_list() == [[-(x**2) for x in row] for row in ROWS]
    same = RaggedTensor.from_row_splits(rt.flat_values, np.array([0, 2, 2, 5, 6]))
    assert (rt + same)[0].tolist() == [2, 4]  # equal splits, not the same object
    centred = rt - rt.spread(rt.sum())
    assert back(centred[2]).tolist() == [-9, -8, -7]
    wide = RaggedTensor.from_row_splits(np.ones((3, 2)), [0, 1, 3])
    assert (wide * np.array([1.0, 2.0])).flat_values.tolist() == [[1, 2]] * 3
    assert (np.float64(2) * wide).flat_values.tolist() == [[2, 2]] * 3
    assert isinstance(np.ones(2) * wide, RaggedTensor)


def test_variants_and_back(rt):
    v = rt.to_variant()
    assert v.shape == (4,)
    assert RaggedTensor.from_variant(v).to_list() == ROWS
    assert RaggedTensor.from_variant(v[::-1]).to_list() == ROWS[::-1]


def test_gradient_of_a_model_over_rows():
    need("torch")
    import torch

    values = torch.arange(6.0, requires_grad=True)
    rt = RaggedTensor.from_row_lengths(values, [2, 0, 3, 1])
    scores = rt.map_rows(lambda row: torch.tanh(row) * row.shape[0]).softmax().sum()
    scores.sum().backward()
    np.testing.assert_allclose(back(values.grad), np.zeros(6), atol=1e-6)  # a softmax always sums to 1


def test_awkward_without_copying():
    need("awkward")
    rt = RaggedTensor.from_rows([[1.0, 2.0], [], [3.0]])
    array = rt.to_awkward()
    assert array.to_list() == rt.to_list()
    assert np.shares_memory(np.asarray(array.layout.content.data), rt.flat_values)
    assert RaggedTensor.from_awkward(array).to_list() == rt.to_list()
    assert np.shares_memory(RaggedTensor.from_awkward(array).flat_values, rt.flat_values)
    assert RaggedTensor.from_awkward(array[1:]).to_list() == [[], [3.0]]
    assert RaggedTensor.from_awkward(nested().to_awkward()).to_list() == nested().to_list()
    wide = RaggedTensor.from_row_splits(np.ones((3, 2)), [0, 1, 3])
    assert RaggedTensor.from_awkward(wide.to_awkward()).shape == (2, None, 2)


def test_arrow_without_copying():
    need("pyarrow")
    import pyarrow as pa

    rt = RaggedTensor.from_rows([[1.0, 2.0], [], [3.0]])
    array = rt.to_arrow()
    assert array.to_pylist() == rt.to_list()
    assert np.shares_memory(array.values.to_numpy(), rt.flat_values)
    again = RaggedTensor.from_arrow(array)
    assert again.to_list() == rt.to_list()
    assert np.shares_memory(again.flat_values, rt.flat_values)
    assert RaggedTensor.from_arrow(array[1:]).to_list() == [[], [3.0]]
    assert RaggedTensor.from_arrow(nested().to_arrow()).to_list() == nested().to_list()
    wide = RaggedTensor.from_row_splits(np.ones((3, 2)), [0, 1, 3])
    assert RaggedTensor.from_arrow(wide.to_arrow()).shape == (2, None, 2)
    with pytest.raises(InvalidArgumentError):
        RaggedTensor.from_arrow(pa.array([[1], None]))
    assert RaggedTensor.from_arrow(pa.chunked_array([[[1]], [[2, 3]]])).to_list() == [[1], [2, 3]]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensor_without_copying():
    need("torch")
    import torch

    rt = RaggedTensor.from_row_lengths(torch.arange(6.0).reshape(6, 1), [2, 0, 3, 1])
    jagged = rt.to_nested_tensor()
    assert [row.tolist() for row in jagged.unbind()] == rt.to_list()
    again = RaggedTensor.from_nested_tensor(jagged)
    assert again.to_list() == rt.to_list()
    assert again.flat_values.data_ptr() == rt.flat_values.data_ptr()
    with pytest.raises(InvalidArgumentError):
        RaggedTensor.from_nested_tensor(torch.ones(2))


def test_cu_seqlens(rt):
    found = rt.cu_seqlens()
    assert type(found) is type(rt.flat_values)
    assert back(found).tolist() == [0, 2, 2, 5, 6]
    assert back(found).dtype == np.int32


def test_public_names():
    assert weft.RaggedTensor is RaggedTensor
    assert {"RaggedTensor", "VariantArray"} <= set(weft.__all__)


def test_rows_that_cannot_be_walked():
    class Row(list):
        def __iter__(self):
            raise RuntimeError

    assert RaggedTensor.from_rows([Row([1.0, 2.0]), [3.0]]).to_list() == [[1.0, 2.0], [3.0]]


def test_splits_of_both_widths():
    narrow, wide = (
        RaggedTensor(np.arange(3.0), [np.array([0, 2], dtype), np.array([0, 1, 3], dtype)])
        for dtype in ("int32", "int64")
    )
    assert RaggedTensor.concat([narrow, wide]).to_list() == 2 * narrow.to_list()
    assert RaggedTensor.concat([narrow, wide], axis=1).to_list() == [2 * narrow.to_list()[0]]
    assert RaggedTensor.stack([wide, narrow]).to_list() == 2 * [narrow.to_list()]
    for rt in (narrow, wide):
        found = RaggedTensor.from_variant(rt.to_variant().gather([0, 0]), 2)
        assert found.to_list() == 2 * rt.to_list()
        assert found.row_splits.dtype == rt.row_splits.dtype


def test_sums_that_do_not_fit_in_memory():
    rt = RaggedTensor.from_row_splits(np.empty((0, 2**45), np.float32), [0, 0, 0, 0])
    for reduce in (rt.sum, rt.mean, rt.max):
        with pytest.raises(ResourceExhaustedError):
            reduce()


def test_tensors_whose_memory_has_other_values():
    """Of the conjugate of a tensor, and its imaginary part, torch keeps a flag in place of the values."""
    need("torch")
    import torch

    numbers = torch.tensor([1 + 2j, 3 - 1j, 2j]).conj()
    for values in (numbers, numbers.imag):
        assert values.is_conj() or values.is_neg()
        rt, plain = RaggedTensor.from_row_lengths(values, [2, 1]), values.resolve_conj().resolve_neg()
        same = RaggedTensor.from_row_lengths(plain, [2, 1])
        assert rt.spread(values[:2]).to_list() == same.spread(plain[:2]).to_list()
        assert rt.gather([1, 0]).to_list() == same.gather([1, 0]).to_list()
        assert rt.sum().tolist() == same.sum().tolist()
        with weft.kernels.use("reference"):
            assert rt.gather([1, 0]).to_list() == same.gather([1, 0]).to_list()
            assert rt.sum().tolist() == same.sum().tolist()
            if values.is_neg():
                assert rt.max().tolist() == same.max().tolist()
            assert rt.to_padded().values.tolist() == same.to_padded().values.tolist()


def test_rows_of_different_inner_shape_are_refused():
    rt = RaggedTensor.from_rows(ROWS)
    with pytest.raises(InvalidArgumentError):
        rt.map_rows(lambda row: row.reshape(1, -1))


@pytest.mark.parametrize("module", ["weft.ragged.tensor", "weft.ragged.variant"])
def test_examples_in_docstrings(module):
    import doctest
    import importlib

    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 3
    assert found.failed == 0
