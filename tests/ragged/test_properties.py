"""What holds for every ragged tensor: random nested shapes, valid and broken splits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.libraries import for_each, need

import weft
from weft import RaggedTensor, VariantArray, kernels, raw_ops
from weft.errors import InvalidArgumentError, OpError


@st.composite
def ragged(draw, max_rank=3, dtypes=("float64", "float32", "int64"), inner=((), (1,), (3,), (2, 2), (0,)), min_rows=0):
    """Nested splits and values."""
    rank = draw(st.integers(1, max_rank))
    count = draw(st.integers(min_rows, 4))
    nested = []
    index = draw(st.sampled_from([np.int32, np.int64]))
    for _ in range(rank):
        lengths = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        nested.append(np.concatenate([[0], np.cumsum(lengths)]).astype(index))
        count = int(nested[-1][-1])
    shape = (count, *draw(st.sampled_from(inner)))
    seed = draw(st.integers(0, 2**16))
    values = (np.random.default_rng(seed).standard_normal(shape) * 10).astype(draw(st.sampled_from(dtypes)))
    return nested, values


def same(decoded, nested, values):
    for got, expected in zip(decoded.output_nested_splits, nested, strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == expected.dtype
    np.testing.assert_array_equal(decoded.output_dense_values, values)


@given(ragged(), st.booleans(), st.booleans())
def test_decode_undoes_encode(data, batched, apart):
    nested, values = data
    v = raw_ops.RaggedTensorToVariant(nested, values, batched)
    if apart:
        v = VariantArray(v.elements(), v.shape)
    if apart and not v.size:
        return  # what nothing is known of any more has no inner shape
    same(raw_ops.RaggedTensorFromVariant(v, -1, len(nested), values.dtype, nested[0].dtype), nested, values)


@given(ragged(max_rank=2))
def test_gradient_undoes_encode(data):
    nested, values = data
    v = raw_ops.RaggedTensorToVariant(nested, values, True)
    for variant in (v, VariantArray(v.elements()), v[::-1][::-1]):
        laid = raw_ops.RaggedTensorToVariantGradient(variant, nested[0], values.shape, values.dtype)
        np.testing.assert_array_equal(laid, values)


@given(ragged(dtypes=("float64",)), st.data())
def test_gradient_is_the_transpose_of_encode(data, draw):
    nested, values = data
    v, pull = weft.vjp(raw_ops.RaggedTensorToVariant, nested, values, True)
    rng = np.random.default_rng(0)
    missing = [draw.draw(st.booleans()) for _ in range(v.size)]
    pairs = list(zip(v.elements(), missing, strict=True))
    g = VariantArray([None if gone else (e.splits, rng.standard_normal(e.values.shape)) for e, gone in pairs])
    left = sum((a.values * b.values).sum() for a, b in zip(v.elements(), g.elements(), strict=True) if b is not None)
    np.testing.assert_allclose(left, (values * pull(g)["rt_dense_values"]).sum(), atol=1e-9)


@given(st.lists(st.lists(st.integers(-3, 6), max_size=5), min_size=1, max_size=3), st.integers(0, 6), st.booleans())
@example([[]], 0, True)
@example([[0, 2**40]], 3, True)
def test_broken_splits_are_refused_or_right(nested, count, batched):
    splits = [np.array(s, np.int64) for s in nested]
    values = np.arange(count)
    try:
        v = raw_ops.RaggedTensorToVariant(splits, values, batched)
    except InvalidArgumentError:
        totals = [*(len(s) - 1 for s in splits[1:]), count]
        assert any(not valid(s, t) for s, t in zip(splits, totals, strict=True))
        return
    same(raw_ops.RaggedTensorFromVariant(v, -1, len(splits), "int64"), splits, values)


def valid(s, total):
    return len(s) > 0 and s[0] == 0 and (np.diff(s) >= 0).all() and s[-1] == total


@given(st.lists(st.integers(-2, 5), max_size=5), st.lists(st.integers(-2, 4), max_size=3), st.integers(0, 5))
def test_any_numbers_at_all_give_an_answer_or_an_error(splits, shape, count):
    """Each op on wild input: a result of the stated shape or an error of ours, never anything else."""
    s, values = np.array(splits, np.int64), np.arange(count, dtype=np.float32)
    calls = [
        lambda: raw_ops.RaggedGather([s], values, np.array(shape, np.int64), 1),
        lambda: raw_ops.RaggedTensorToTensor(np.array(shape, np.int64), values, np.float32(0), [s], ["ROW_SPLITS"]),
        lambda: raw_ops.RaggedTensorToTensor(
            -1, values, np.float32(0), [np.array(count), s], ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]
        ),
        lambda: raw_ops.RaggedTensorToSparse([s], values),
        lambda: raw_ops.RaggedFillEmptyRows(s, values, np.array(count), np.float32(0)),
        lambda: raw_ops.RaggedFillEmptyRowsGrad(s, values),
        lambda: raw_ops.RaggedBincount(s, s, np.array(3), values),
        lambda: raw_ops.RaggedCountSparseOutput(s, s, values, False, *shape[:2]),
        lambda: raw_ops.RaggedTensorToVariantGradient(
            VariantArray([values, None]), s, np.array(shape, np.int32), "float32"
        ),
    ]
    for call in calls:
        try:
            result = call()
        except OpError:
            continue
        assert result is not None


@given(ragged(max_rank=1, min_rows=1), st.lists(st.integers(0, 3), max_size=6))
def test_gather_takes_rows(data, index):
    nested, values = data
    index = [i % (len(nested[0]) - 1) for i in index]
    rows = RaggedTensor(values, nested)
    got = raw_ops.RaggedGather(nested, values, np.array(index, np.int64), 1)
    expected = [rows[i].tolist() for i in index]
    assert RaggedTensor(got.output_dense_values, got.output_nested_splits).to_list() == expected
    if index:
        assert rows.gather(index).to_list() == expected


@given(ragged(max_rank=2), st.integers(0, 4), st.integers(0, 4))
def test_to_tensor_cuts_and_pads(data, rows, columns):
    nested, values = data
    shape = [rows, columns, *[-1] * (len(nested) - 2 + values.ndim)]
    kinds = ["ROW_SPLITS"] * len(nested)
    default = values.dtype.type(7)
    out = raw_ops.RaggedTensorToTensor(np.array(shape), values, default, nested, kinds)
    listed = RaggedTensor(values, nested).to_list()
    expected = np.full(out.shape, default)
    for i, row in enumerate(listed[:rows]):
        for j, item in enumerate(row[:columns]):
            if len(nested) == 2:
                expected[i, j, : len(item)] = np.asarray(item).reshape(len(item), *values.shape[1:])
            else:
                expected[i, j] = item
    np.testing.assert_array_equal(out, expected)


@given(ragged(max_rank=2))
def test_sparse_coordinates_find_every_value(data):
    nested, values = data
    out = raw_ops.RaggedTensorToSparse(nested, values)
    assume(np.prod(out.sparse_dense_shape) < 10_000)
    dense = np.zeros(out.sparse_dense_shape, values.dtype)
    dense[tuple(out.sparse_indices.T)] = out.sparse_values
    kinds = ["ROW_SPLITS"] * len(nested)
    padded = raw_ops.RaggedTensorToTensor(-1, values, values.dtype.type(0), nested, kinds)
    np.testing.assert_array_equal(dense, padded)


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(0, 3))
def test_fill_empty_rows(ids, more):
    rows = max(ids, default=-1) + 1 + more
    out = raw_ops.RaggedFillEmptyRows(np.array(ids, np.int64), np.arange(len(ids)), np.array(rows), -1)
    assert out.empty_row_indicator.tolist() == [i not in ids for i in range(rows)]
    assert out.output_values[out.reverse_index_map].tolist() == list(range(len(ids)))
    listed = [[v for v, i in enumerate(ids) if i == row] or [-1] for row in range(rows)]
    assert out.output_values.tolist() == [v for row in listed for v in row]
    if rows:
        assert out.output_value_rowids.tolist() == [i for i, row in enumerate(listed) for _ in row]


@given(ragged(max_rank=1, inner=[()]), st.integers(0, 6), st.booleans(), st.booleans())
def test_bincount(data, size, weighted, binary):
    nested, values = data
    numbers = np.abs(values).astype(np.int64) % 5
    weights = np.arange(len(numbers)).astype(np.float32) if weighted else np.zeros(0, np.float32)
    out = raw_ops.RaggedBincount(nested[0].astype(np.int64), numbers, np.array(size), weights, binary)
    expected = np.zeros((len(nested[0]) - 1, size), np.float32)
    for i, row in enumerate(RaggedTensor(np.arange(len(numbers)), nested).to_list()):
        for j in row:
            if numbers[j] < size:
                expected[i, numbers[j]] = 1 if binary else expected[i, numbers[j]] + (weights[j] if weighted else 1)
    np.testing.assert_allclose(out, expected)


@given(ragged(max_rank=1, inner=[()], min_rows=1), st.integers(-1, 6), st.integers(-1, 6), st.booleans(), st.booleans())
def test_sparse_counts_are_the_dense_ones(data, least, most, weighted, binary):
    nested, values = data
    splits, numbers = nested[0].astype(np.int64), np.abs(values).astype(np.int64) % 5
    weights = np.arange(1, len(numbers) + 1).astype(np.float32) if weighted else np.zeros(0, np.float32)
    found = raw_ops.RaggedCountSparseOutput(splits, numbers, weights, binary, least, most)
    columns = most if most >= 0 else max(int(numbers.max(initial=0)) + 1, least)
    assert found.output_dense_shape.tolist() == [len(splits) - 1, columns]
    dense = np.zeros(found.output_dense_shape, np.float32)
    dense[tuple(found.output_indices.T)] = found.output_values
    np.testing.assert_array_equal(dense, raw_ops.RaggedBincount(splits, numbers, np.array(columns), weights, binary))
    assert (found.output_values > 0).all()
    assert found.output_indices.tolist() == sorted(map(list, {*map(tuple, found.output_indices.tolist())}))


@given(ragged(max_rank=1), st.data())
def test_compiled_kernels_agree_with_the_definition(data, draw):
    need("weft._native")
    (splits,), values = data
    rows = len(splits) - 1
    index = np.array(draw.draw(st.lists(st.integers(0, max(rows - 1, 0)), max_size=5 if rows else 0)), np.int64)
    lengths = np.diff(splits)[index]
    targets = np.concatenate([[0], np.cumsum(lengths + draw.draw(st.integers(0, 2)))])[:-1].astype(np.int64)
    total = int((targets + lengths).max(initial=0)) + draw.draw(st.integers(0, 9))
    order = np.array(draw.draw(st.permutations(range(len(index)))), np.int64)
    starts, lengths, targets = (x[order] for x in (splits[:-1][index], lengths, targets))
    default = values.dtype.type(3)
    calls = {
        "place_rows": (values, default, starts, lengths, targets, total),
        "add_rows": (np.concatenate([values] * 2), starts, lengths, targets, total),
        "row_sum": (values, splits),
        "row_max": (values, splits),
        "row_bounds": (splits, index),
        "longest_row": (splits,),
        "take_rows": (values, splits[:-1][index], np.concatenate([[0], np.cumsum(np.diff(splits)[index])])),
        "pad_rows": (values, default, splits, draw.draw(st.integers(0, rows + 2)), draw.draw(st.integers(0, 9))),
    }
    if values.dtype.kind == "f":
        calls["row_softmax"] = (values, splits)
    for name, arguments in calls.items():
        results = []
        for module in ("native", "reference"):
            with kernels.use(module):
                results.append(kernels.best(name, arguments[0])(*arguments))
        for got, expected in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
            assert np.asarray(got).dtype == np.asarray(expected).dtype
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("width", [1, 2, 4, 5, 8, 11])
@for_each("dtype", ["float32", "int32", "float64", "uint8"], slow=["float64", "uint8"])
def test_rows_of_every_width_are_reduced_like_numpy(width, dtype):
    need("weft._native")
    rng = np.random.default_rng(width)
    lengths = [0, 1, 3, 7, 8, 9, 16, 0, 30, 5]
    splits = np.concatenate([[0], np.cumsum(lengths)])
    values = rng.integers(0, 50, (splits[-1], width)).astype(dtype)
    values = values[:, 0] if width == 1 else values
    with kernels.use("native"):
        total, top = (kernels.best(name, values)(values, splits) for name in ("row_sum", "row_max"))
    for i, (start, stop) in enumerate(pairwise(splits)):
        np.testing.assert_array_equal(total[i], values[start:stop].sum(0, dtype=dtype))
        if stop > start:
            np.testing.assert_array_equal(top[i], values[start:stop].max(0))


def test_a_row_has_the_same_sum_wherever_it_lies():
    need("weft._native")
    row = np.random.default_rng(0).standard_normal(13)
    for before in range(9):
        for after in range(9):
            values = np.concatenate([np.ones(before), row, np.ones(after)])
            total = RaggedTensor.from_row_lengths(values, [before, 13, after]).sum()
            assert total[1] == RaggedTensor.from_row_lengths(row, [13]).sum()[0]


@pytest.mark.parametrize("width", [1, 3])
def test_large_arrays_are_cut_into_parts_that_give_the_same(width):
    need("weft._native")
    from weft import _native

    rng = np.random.default_rng(0)
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, 9, 500)), [9000, 9000]])
    values = rng.standard_normal((9000, width)).astype(np.float32)
    index = rng.integers(0, len(splits) - 1, 700)

    def results():
        rt = RaggedTensor(values, [splits])
        gathered = rt.gather(index)
        reduced = rt.sum(), rt.max(), rt.softmax().flat_values
        return *reduced, rt.to_padded(7).values, gathered.flat_values, gathered.row_splits

    whole, threads = results(), _native.num_threads()
    _native.set_part_bytes(64)
    try:
        for count in (2, 3, 7):
            weft.set_num_threads(count)
            for got, expected in zip(results(), whole, strict=True):
                np.testing.assert_array_equal(got, expected)
    finally:
        _native.set_part_bytes(4 << 20)
        weft.set_num_threads(threads)


def test_row_max_of_nan_is_nan():
    need("weft._native")
    for width in (1, 2):
        values = np.array([1, np.nan, 3, 2, 5, 4], np.float32).reshape(-1, width)
        for module in ("native", "reference"):
            with kernels.use(module):
                out = kernels.best("row_max", values)(values, np.array([0, len(values) // 2, len(values)]))
            assert np.isnan(out[0]).any()
            assert not np.isnan(out[1]).any()


def test_long_rows_and_rows_at_the_end_of_memory():
    need("weft._native")
    for count in (1, 7, 8, 9, 127, 130, 600):
        for dtype in (np.uint8, np.float32, np.complex128):
            values = np.arange(3 * count).astype(dtype)
            out = raw_ops.RaggedGather([np.arange(4) * count], values, np.array([2, 0, 2, 1]), 1).output_dense_values
            np.testing.assert_array_equal(out, np.concatenate([values.reshape(3, count)[i] for i in (2, 0, 2, 1)]))
            padded = raw_ops.RaggedTensorToTensor(
                np.array([3, count + 3]), values, dtype(5), [np.arange(4) * count], ["ROW_SPLITS"]
            )
            np.testing.assert_array_equal(padded[:, :count], values.reshape(3, count))
            assert (padded[:, count:] == dtype(5)).all()


@pytest.mark.parametrize("rank", [1, 2])
def test_splits_changed_after_encoding_do_not_matter(rank):
    nested = [np.array([0, 1, 2]), np.array([0, 1, 3])][-rank:]
    values = np.arange(2 if rank == 1 else 3)
    nested = [np.array([0, 1, 2])] if rank == 1 else nested
    v = raw_ops.RaggedTensorToVariant(nested, values, True)
    before = [x.tolist() for x in nested]
    nested[0][1] = 1000
    decoded = raw_ops.RaggedTensorFromVariant(v, -1, rank, "int64")
    assert [x.tolist() for x in decoded.output_nested_splits] == before
