"""The scenarios of TensorFlow's own ragged tests, as programs of this library.

TensorFlow also checks static shapes while it builds a graph. Here there is no graph: what it refuses then is refused
when the op runs (`REFUSED`, `BROKEN`), and the shape of what comes out is checked on what comes out.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.libraries import back, need, to

from weft import RaggedTensor, VariantArray, raw_ops
from weft.errors import InvalidArgumentError
from weft.ragged.farmhash import fingerprint64

# ---- RaggedTensorToVariant: splits, values, batched, and the elements (splits, values) that come out

NESTED = [[0, 3, 3, 5, 7], [0, 1, 3, 3, 8, 11, 11, 15]]
DEEP = [[0, 5, 10], [0, 1, 3, 3, 8, 11, 11, 15, 15, 16, 18], list(range(0, 37, 2))]
ENCODED = {
    "no values": ([[0, 2, 3, 3], [0, 0, 0, 0]], [], True, [([[0, 0, 0]], []), ([[0, 0]], []), ([[0]], [])]),
    "1-D values": ([[0, 3, 3, 5, 6]], [1, 2, 3, 4, 5, 6], True, [([], [1, 2, 3]), ([], []), ([], [4, 5]), ([], [6])]),
    "2-D values": ([[0, 1, 2, 3]], [[1, 1], [2, 2], [3, 3]], True, [([], [[i, i]]) for i in (1, 2, 3)]),
    "2-D values, rank 2": (
        [[0, 1, 2], [0, 2, 3]],
        [[1, 1], [2, 2], [3, 3]],
        True,
        [([[0, 2]], [[1, 1], [2, 2]]), ([[0, 1]], [[3, 3]])],
    ),
    "an empty row": (
        NESTED,
        list(range(15)),
        True,
        [([[0, 1, 3, 3]], [0, 1, 2]), ([[0]], []), ([[0, 5, 8]], list(range(3, 11))), ([[0, 0, 4]], [11, 12, 13, 14])],
    ),
    "three levels": (
        DEEP,
        list(range(36)),
        True,
        [
            ([[0, 1, 3, 3, 8, 11], list(range(0, 23, 2))], list(range(22))),
            ([[0, 0, 4, 4, 5, 7], list(range(0, 15, 2))], list(range(22, 36))),
        ],
    ),
    "not batched": (NESTED, list(range(15)), False, [(NESTED, list(range(15)))]),
    "not ragged": ([], [[1, 2], [3, 4]], False, [([], [[1, 2], [3, 4]])]),
    "not ragged, batched": (
        [],
        np.arange(12).reshape(2, 3, 2).tolist(),
        True,
        [([], x) for x in np.arange(12).reshape(2, 3, 2).tolist()],
    ),
}


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("name", ENCODED)
def test_encode(name, index):
    nested, values, batched, expected = ENCODED[name]
    v = raw_ops.RaggedTensorToVariant([np.array(s, index) for s in nested], np.array(values), batched)
    assert v.shape == ((len(expected),) if batched else ())
    found = v.elements()
    assert [([s.tolist() for s in e.splits], e.values.tolist()) for e in found] == expected
    assert all(s.dtype == index for e in found for s in e.splits)


REFUSED = {
    "first split not 0": ([[1, 2]], [1, 2]),
    "decreasing": ([[0, 2, 1, 2]], [1, 2]),
    "last split past the values": ([[0, 2, 5]], [1, 2]),
    "inner last split": ([[0, 1, 2], [0, 1, 3]], [1, 2]),
    "outer against inner count": ([[0, 1, 4], [0, 1, 2]], [1, 2]),
    "empty splits": ([[]], [1, 2]),
    "scalar values": ([[0, 1]], 1),
    "scalar splits": ([0], [1]),
    "matrix splits": ([[[0, 1]]], [1]),
    "scalar outer splits": ([0, [0, 1]], [1]),
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_encode_refuses(name, batched):
    nested, values = REFUSED[name]
    with pytest.raises(InvalidArgumentError):
        raw_ops.RaggedTensorToVariant([np.array(s, np.int64) for s in nested], np.array(values), batched)


# ---- RaggedTensorToVariantGradient


@pytest.mark.parametrize(
    ("splits", "good"), [([0, 3, 3, 5, 6], True), ([1, 3, 3, 5, 6], False), ([0, 3, 2, 5, 6], False)]
)
def test_gradient_looks_at_its_splits(splits, good):
    v = VariantArray([np.ones(3), np.ones(0), np.ones(2), np.ones(1)])
    if not good:
        with pytest.raises(InvalidArgumentError):
            raw_ops.RaggedTensorToVariantGradient(v, np.array(splits), [6], "float64")
        return
    np.testing.assert_array_equal(
        raw_ops.RaggedTensorToVariantGradient(v, np.array(splits), [6], "float64"), np.ones(6)
    )


# ---- RaggedTensorFromVariant: elements, shape, input and output rank, and the splits and values that come out

FLAT = [0, 1, 1, 2, 2, 3, 4]


def ragged(splits, values):
    return [np.array(s) for s in splits], np.array(values)


ONE = [ragged([[0, 1, 3, 3, 6]], [x] * 6) for x in range(10)]
DECODED = {
    "a scalar": ([ragged(NESTED, range(15))], (), 2, 2, NESTED, list(range(15))),
    "one element": ([ragged([[0, 1, 3, 3, 5, 6]], FLAT[:6])], (1,), 1, 2, [[0, 5], [0, 1, 3, 3, 5, 6]], FLAT[:6]),
    "tensors, 2-D": (
        [np.arange(n) for n in (3, 1, 0, 2)],
        (2, 2),
        0,
        2,
        [[0, 2, 4], [0, 3, 4, 4, 6]],
        [0, 1, 2, 0, 0, 1],
    ),
    "1-D in, rank 2 out": (
        ONE,
        (10,),
        1,
        2,
        [list(range(0, 41, 4)), [0, *(6 * i + n for i in range(10) for n in (1, 3, 3, 6))]],
        [x for x in range(10) for _ in range(6)],
    ),
    "2-D in, rank 3 out": (
        ONE,
        (2, 5),
        1,
        3,
        [[0, 5, 10], list(range(0, 41, 4)), [0, *(6 * i + n for i in range(10) for n in (1, 3, 3, 6))]],
        [x for x in range(10) for _ in range(6)],
    ),
    "an empty row": ([np.array([1, 2]), np.zeros(0, int), np.array([3])], (3,), 0, 1, [[0, 2, 2, 3]], [1, 2, 3]),
    "inner dimensions": ([[[1, 1], [2, 2]], [[3, 3]]], (2,), 0, 1, [[0, 2, 3]], [[1, 1], [2, 2], [3, 3]]),
    "inner dimensions, one empty": (
        [np.ones((1, 2, 2), int), np.zeros((0, 2, 2), int), np.ones((2, 2, 2), int)],
        (3,),
        0,
        1,
        [[0, 1, 1, 3]],
        np.ones((3, 2, 2), int).tolist(),
    ),
    "stacked": ([[1, 2, 3, 4], [5, 6, 7, 8]], (2,), 0, 0, [], [[1, 2, 3, 4], [5, 6, 7, 8]]),
    "nothing stacked": ([], (0,), 0, 0, [], []),
}


@pytest.mark.parametrize("inferred", [False, True])
@pytest.mark.parametrize("name", DECODED)
def test_decode(name, inferred):
    elements, shape, input_rank, output_rank, splits, values = DECODED[name]
    v = VariantArray([e if isinstance(e, tuple) else np.array(e) for e in elements], shape)
    out = raw_ops.RaggedTensorFromVariant(v, -1 if inferred else input_rank, output_rank, "int64")
    assert [s.tolist() for s in out.output_nested_splits] == splits
    assert out.output_dense_values.tolist() == values


ROWS = [np.arange(2), np.arange(3)]
BROKEN = {
    "negative inferred rank": (VariantArray(ROWS * 2, (2, 2)), (-1, 1, "int64")),
    "rank equation": (VariantArray(ROWS), (1, 1, "int64")),
    "an element that is not ragged": (VariantArray([np.arange(2), None]), (0, 1, "int64")),
    "an element's rank": (VariantArray(ROWS), (1, 2, "int64")),
    "splits dtype": (VariantArray(ONE[:2]), (1, 2, "int64", "int32")),
    "values dtype": (VariantArray(ROWS), (0, 1, "float32")),
    "scalar values": (VariantArray([np.array(1), np.array(2)]), (0, 1, "int64")),
    "values rank": (VariantArray([np.arange(2), np.ones((1, 2), int)]), (0, 1, "int64")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_decode_refuses(name):
    v, arguments = BROKEN[name]
    with pytest.raises(InvalidArgumentError):
        raw_ops.RaggedTensorFromVariant(v, *arguments)


def test_splits_that_are_no_vector_cannot_be_held():
    with pytest.raises(InvalidArgumentError):
        raw_ops.RaggedTensorFromVariant(VariantArray([([np.array([[0, 1]])], np.arange(1))]), 1, 2, "int64")


# ---- tensors to variants and back: constants and their ragged rank

CONSTANTS = [
    ([[]], 1), ([[1]], 1), ([[1, 2]], 1), ([[1], [2], [3]], 1), ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 1),
    ([[1, 2], [3, 4, 5], [6], [], [7]], 1), ([[[]]], 2), ([[[1]]], 2), ([[[1, 2]]], 2), ([[[1, 2], [3, 4]]], 2),
    ([[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]], 2), ([[[1], [2]], [[3], [4]], [[5], [6]], [[7], [8]]], 2),
    ([[[1, 2]], [], [[3, 4]], []], 2), ([[[[1, 2], [3, 4]]], [[[0, 0], [0, 0]], [[5, 6], [7, 8]]], []], 3),
    ([["a"], ["b"], ["c"]], 1), ([[["a", "b"], ["c", "d"]]], 2),
    ([[[["a", "b"], ["c", "d"]]], [[["e", "f"], ["g", "h"]], [["i", "j"], ["k", "l"]]], []], 3),
]  # fmt: skip


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("rows", "rank"), CONSTANTS)
def test_round_trip(rows, rank, batched):
    rt = RaggedTensor.from_rows(rows, rank)
    v = raw_ops.RaggedTensorToVariant(rt.nested_row_splits, rt.flat_values, batched)
    assert v.shape == ((len(rows),) if batched else ())
    out = raw_ops.RaggedTensorFromVariant(v, -1, rank, rt.dtype)
    assert RaggedTensor(out.output_dense_values, out.output_nested_splits).to_list() == rows


@pytest.mark.parametrize("input_rank", [-1, 0])
def test_round_trip_in_another_shape(input_rank):
    rt = RaggedTensor.from_rows([[i] for i in range(10)])
    pairs = rt.to_variant().reshape((5, 2))
    out = raw_ops.RaggedTensorFromVariant(pairs, input_rank, 2, rt.dtype)
    expected = [[[i], [i + 1]] for i in range(0, 10, 2)]
    assert RaggedTensor(out.output_dense_values, out.output_nested_splits).to_list() == expected
    with pytest.raises(InvalidArgumentError):
        raw_ops.RaggedTensorFromVariant(pairs, 1, 1, rt.dtype)


def test_each_row_by_itself():
    rows = [[1, 2, 3], [4, 5], [], [6, 7, 8, 9]]
    v = RaggedTensor.from_rows(rows, 1).to_variant()
    for i, row in enumerate(rows):
        out = raw_ops.RaggedTensorFromVariant(v[i], 0, 0, v[i].item().values.dtype)
        assert out.output_dense_values.tolist() == row
    assert [row.item().values.tolist() for row in v] == rows


# ---- derivatives, in torch and in JAX


def gradient(framework, f, x):
    """The gradient of the sum of what `f` gives."""
    need(framework)
    if framework == "torch":
        import torch

        x = torch.tensor(x, dtype=torch.float32, requires_grad=True)
        total = f(x).sum()
        return back(torch.autograd.grad(total, x)[0]) if total.requires_grad else np.zeros(x.shape)
    import jax

    return back(jax.grad(lambda x: f(x).sum())(jax.numpy.asarray(x, "float32")))


def scaled(x, splits):
    """The rows of `x`, each times ten to the power of its number."""
    rt = RaggedTensor.from_row_splits(x, splits)
    tens = 10.0 ** (1 + np.repeat(np.arange(len(splits) - 1), np.diff(splits)))
    if type(x).__module__.startswith("torch"):
        import torch

        return rt.with_values(x * torch.tensor(tens, dtype=x.dtype))
    return rt.with_values(x * tens.astype("float32"))


VALUES = [3.0, 1.0, 4.0, 1.0, 1.0, 0.0, 2.0, 1.0]
SPLITS = {"full": [0, 4, 7, 8], "with empty rows": [0, 0, 4, 7, 7, 8, 8], "all empty": [0, 0, 0, 0]}
both = pytest.mark.parametrize("framework", ["torch", "jax"])


@both
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", SPLITS)
def test_gradient_of_the_round_trip(name, batched, framework):
    splits = SPLITS[name]

    def f(x):
        rt = scaled(x, splits)
        v = raw_ops.RaggedTensorToVariant([np.array(splits)], rt.flat_values, batched)
        return raw_ops.RaggedTensorFromVariant(v, -1, 1, "float32").output_dense_values

    expected = 10.0 ** (1 + np.repeat(np.arange(len(splits) - 1), np.diff(splits)))
    np.testing.assert_allclose(gradient(framework, f, VALUES[: splits[-1]]), expected)


@both
@pytest.mark.parametrize("name", ["full", "with empty rows"])
def test_gradient_of_one_row(name, framework):
    splits = SPLITS[name]
    for i in range(len(splits) - 1):

        def f(x, i=i):
            v = scaled(x, splits).to_variant()[i]
            return raw_ops.RaggedTensorFromVariant(v, 0, 0, "float32").output_dense_values

        expected = np.zeros(8)
        expected[splits[i] : splits[i + 1]] = 10.0 ** (1 + i)
        np.testing.assert_allclose(gradient(framework, f, VALUES), expected)


@both
@pytest.mark.parametrize("nested", [[], [[0, 0, 3], [0, 2, 2, 3], [0, 4, 7, 8]]])
def test_gradient_of_rank_0_and_3(nested, framework):
    def f(x):
        v = raw_ops.RaggedTensorToVariant([np.array(s) for s in nested], x * 2, False)
        return raw_ops.RaggedTensorFromVariant(v, -1, len(nested), "float32").output_dense_values

    np.testing.assert_allclose(gradient(framework, f, VALUES), np.full(8, 2.0))


@both
@pytest.mark.parametrize(
    ("splits", "expected"),
    [([0, 4, 7, 8], 14.653377), ([0, 2, 2, 4, 7, 7, 8], 17.206844), ([0, 0, 0], 0.0)],
)
def test_gradient_for_a_scalar_that_all_rows_use(splits, expected, framework):
    need(framework)
    rows = to(framework, np.array([3, 1, 4, 1, 5, 9, 2, 6], np.float32)[: splits[-1]])
    rt = RaggedTensor.from_row_splits(rows, splits)

    def f(x):
        # The root of the mean square; an empty row has none, and no part in the gradient.
        return rt.map_rows(lambda row: (((row * x) ** 2).mean() ** 0.5).reshape(1) if row.shape[0] else row).flat_values

    np.testing.assert_allclose(gradient(framework, f, 3.0), expected, rtol=1e-6)


@both
def test_gradient_of_the_largest_of_each_row(framework):
    def f(x):
        return RaggedTensor.from_row_splits(x, [0, 4, 7, 8]).map_rows(lambda row: row.max())

    np.testing.assert_allclose(gradient(framework, f, VALUES), [0, 0, 1, 0, 0, 0, 1, 1])


@both
def test_gradient_of_variants_in_two_dimensions(framework):
    # TensorFlow refuses this one.
    def f(x):
        v = RaggedTensor.from_row_splits(x * 3, [0, 4, 7, 8, 8]).to_variant().reshape((2, 2))
        return raw_ops.RaggedTensorFromVariant(v, 0, 2, "float32").output_dense_values

    np.testing.assert_allclose(gradient(framework, f, VALUES), np.full(8, 3.0))


# ---- the neighbours, against nested lists

TENSORS = [
    [["a", "b"], ["c", "d", "e"], ["f"], [], ["g"]],
    [[[1, 2], [3]], [], [[4, 5, 6], [], [7]], [[8]]],
    [[[[1], [2, 3]], []], [[[4, 5]], [[6], [7]]], []],
]


@pytest.mark.parametrize("index", [2, [2, 0, 2], [[0, 1], [2, 0]], [], [[[1]]]])
@pytest.mark.parametrize("rows", TENSORS)
def test_gather(rows, index):
    rt = RaggedTensor.from_rows(rows, 1 + rows_depth(rows))
    index = np.array(index, np.int64)
    found = rt.gather(index)

    def pick(index):
        return [pick(i) for i in index] if isinstance(index, list) else rows[index]

    assert (found.to_list() if isinstance(found, RaggedTensor) else found.tolist()) == pick(index.tolist())


def rows_depth(rows):
    """How many ragged levels there are below the first."""
    inner = [x for row in rows for x in row]
    return 1 + rows_depth(inner) if inner and all(isinstance(x, list) for x in inner) else 0


def test_gather_agrees_with_a_dense_gather(library):
    values = np.arange(12, dtype=np.float32)
    found = RaggedTensor.from_row_splits(to(library, values), np.arange(0, 13, 3)).gather([3, 0, 0, 2])
    np.testing.assert_array_equal(back(found.flat_values), values.reshape(4, 3)[[3, 0, 0, 2]].reshape(-1))


@both
@pytest.mark.parametrize(
    ("index", "expected"),
    [([0, 1, 2], [1, 1, 1, 1, 1, 1]), ([2, 0, 2], [1, 1, 0, 0, 0, 2]), ([1, 1, 1], [0, 0, 3, 3, 3, 0]), ([], [0] * 6)],
)
def test_gather_gradients(index, expected, framework):
    def f(x):
        return RaggedTensor.from_row_splits(x, [0, 2, 5, 6]).gather(np.array(index, np.int64)).flat_values

    np.testing.assert_allclose(gradient(framework, f, VALUES[:6]), expected)


RANGES = [
    ((0, [3, 5, 2], 1), [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1]]),
    (([0, 5, 8], [8, 7, 8], [2, 1, 1]), [[0, 2, 4, 6], [5, 6], []]),
    (([0.0, 5.0], [2.0, 6.0], 0.5), [[0, 0.5, 1, 1.5], [5, 5.5]]),
    (([0, 3, 5], 4, 1), [[0, 1, 2, 3], [3], []]),
    ((0, 4, [1, 2, 3]), [[0, 1, 2, 3], [0, 2], [0, 3]]),
    ((0, 5, 3), [[0, 3]]),
    (([0, 5, 5], [5, 0, 5], [-1, 1, -1]), [[], [], []]),
    (([10, 20], [0, 16], [-4, -2]), [[10, 6, 2], [20, 18]]),
]


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize(("arguments", "expected"), RANGES)
def test_range(arguments, expected, index):
    out = raw_ops.RaggedRange(*(np.array(a) for a in arguments), Tsplits=index)
    assert out.rt_nested_splits.dtype == index
    assert RaggedTensor(out.rt_dense_values, [out.rt_nested_splits]).to_list() == expected


@pytest.mark.parametrize("shape", [None, [4, None], [None, 4], [2, 2], [6, 5]])
@pytest.mark.parametrize("as_ids", [False, True])
def test_padding_in_two_dimensions(as_ids, shape):
    rows = [[0.1, 0.2, 0.3], [], [0.4, 0.5], [0.6]]
    rt = RaggedTensor.from_rows(rows, 1)
    ids = np.repeat(np.arange(4), rt.row_lengths())
    parts = ([np.array(4), ids], ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]) if as_ids else ([rt.row_splits], ["ROW_SPLITS"])
    wanted = np.array([-1 if n is None else n for n in shape or [None, None]])
    out = raw_ops.RaggedTensorToTensor(wanted, rt.flat_values, 1.5, *parts)
    high, wide = [n if n is not None else natural for n, natural in zip(shape or [None, None], (4, 3), strict=True)]
    expected = [[*row, *[1.5] * wide][:wide] for row in [*rows, *[[]] * high][:high]]
    np.testing.assert_array_equal(out, np.array(expected).reshape(high, wide))


@pytest.mark.parametrize("shape", [None, [2, 2, 3], [3, 2, 4], [2, 1, 1]])
def test_padding_in_three_dimensions(shape):
    rows = [[[1, 2], [3]], [[], [4, 5, 6], [7]]]
    rt = RaggedTensor.from_rows(rows, 2)
    wanted = -1 if shape is None else np.array(shape)
    out = raw_ops.RaggedTensorToTensor(wanted, rt.flat_values, 0, rt.nested_row_splits, ["ROW_SPLITS"] * 2)
    a, b, c = shape or [2, 3, 3]
    expected = np.zeros((a, b, c), int)
    for i, j, k in np.ndindex(a, b, c):
        if i < len(rows) and j < len(rows[i]) and k < len(rows[i][j]):
            expected[i, j, k] = rows[i][j][k]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("default", [[7.0, 8.0], 7.0, [[7.0]], [[7.0], [8.0]]])
def test_padding_with_a_default_that_is_broadcast(default):
    inner = (2,) if np.ndim(default) == 1 else (2, 2)
    values = np.arange(float(3 * np.prod(inner))).reshape(3, *inner)
    out = raw_ops.RaggedTensorToTensor(-1, values, np.array(default), [np.array([0, 1, 3])], ["ROW_SPLITS"])
    expected = np.broadcast_to(np.array(default), (2, 2, *inner)).copy()
    expected[0, 0], expected[1] = values[0], values[1:]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("rows", [[[1, 2], [], [3]], [[], [1], [2, 3], []], [[], [], []], [[[1], []], [[2, 3]]]])
def test_sparse(rows):
    rt = RaggedTensor.from_rows(rows, 1 + rows_depth(rows))
    out = raw_ops.RaggedTensorToSparse(rt.nested_row_splits, rt.flat_values)
    dense = raw_ops.RaggedTensorToTensor(-1, rt.flat_values, 0, rt.nested_row_splits, ["ROW_SPLITS"] * rt.ragged_rank)
    assert out.sparse_dense_shape.tolist() == list(dense.shape)
    assert out.sparse_values.tolist() == rt.flat_values.tolist() == dense[tuple(out.sparse_indices.T)].tolist()


ITEMS = {"R": [["r0", "r1"], ["r2"], []], "S": [["s0"], ["s1", "s2"], ["s3"]], "D": [["d0", "d1"]] * 3}
ORDERS = ["".join(letters) for n in (1, 2, 3) for letters in itertools.product("RSD", repeat=n)]


def cross(order, hashed, numbers=False):
    """The inputs of RaggedCross in this order, and one list of rows for each."""
    rows = [[[hash_of(x) % 97 if numbers else x for x in row] for row in ITEMS[letter]] for letter in order]
    given = {"R": ([], []), "S": ([], [], []), "D": ([],)}
    kind = np.int64 if numbers else object
    for letter, items in zip(order, rows, strict=True):
        flat = np.array([x for row in items for x in row], kind)
        if letter == "R":
            parts = flat, np.concatenate([[0], np.cumsum([len(row) for row in items])])
        elif letter == "S":
            at = [[i, j] for i, row in enumerate(items) for j in range(len(row))]
            parts = np.array(at), flat, np.array([3, 2])
        else:
            parts = (flat.reshape(3, -1),)
        for into, part in zip(given[letter], parts, strict=True):
            into.append(part)
    out = "int64" if hashed else "string"
    return raw_ops.RaggedCross(
        *given["R"], *given["S"], *given["D"], order, hashed, 0, 956888297470, out, "int64"
    ), rows


def hash_of(x):
    return fingerprint64(x.encode()) if isinstance(x, str) else x


def cat(a, b, k=0xC6A4A7935BD1E995, mask=2**64 - 1):
    mixed = b * k & mask
    r = (a ^ k ^ ((mixed ^ mixed >> 47) * k & mask)) * k & mask
    r = (r ^ r >> 47) * k & mask
    return r ^ r >> 47


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_cross(order, hashed, numbers):
    out, rows = cross(order, hashed, numbers)
    expected = []
    for i in range(3):
        for items in itertools.product(*(feature[i] for feature in rows)):
            if hashed:
                h = 956888297470
                for item in items:
                    h = cat(h, hash_of(item))
                expected.append(h % (2**63 - 1))
            else:
                text = "_X_".join(map(str, items))
                expected.append(text.encode() if numbers else text)
    assert out.output_values.tolist() == expected
    assert out.output_row_splits[-1] == len(expected)


def test_cross_of_a_large_batch():
    rows = 5000
    values, splits = np.arange(2 * rows), np.arange(rows + 1) * 2
    out = raw_ops.RaggedCross([values] * 2, [splits] * 2, [], [], [], [], "RR", False, 0, 0, "string", "int64")
    assert out.output_row_splits.tolist() == (np.arange(rows + 1) * 4).tolist()
    assert out.output_values[-4:].tolist() == [b"9998_X_9998", b"9998_X_9999", b"9999_X_9998", b"9999_X_9999"]
