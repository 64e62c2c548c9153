"""The ragged ops on every library and dtype, and on awkward memory."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from support.libraries import back, for_each, need, to

import weft
from weft import RaggedTensor, VariantArray, kernels, raw_ops
from weft.core.arrays import dtype_of, library_of
from weft.errors import InvalidArgumentError, NotFoundError

NUMBERS = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()  # noqa: SIM905
SPLITS = np.array([0, 2, 2, 3])


def values_of(dtype, count=3):
    if dtype == "string":
        return np.array(["a", "bc", ""], object)[:count]
    if dtype == "bfloat16":
        need("ml_dtypes")
        import ml_dtypes

        return np.arange(1, count + 1).astype(ml_dtypes.bfloat16)
    return (np.arange(count) % 2 == 0) if dtype == "bool" else np.arange(1, count + 1).astype(dtype)


HELD = [("numpy", "string")]  # only NumPy has strings, and JAX has no 64 bits by default
HELD += [(library, dtype) for library in ("numpy", "torch") for dtype in [*NUMBERS, "bfloat16"]]
HELD += [("jax", d) for d in [*NUMBERS, "bfloat16"] if d not in ("float64", "int64", "uint64", "complex128")]
SELDOM = [("jax", d) for d in NUMBERS if d not in ("float32", "int32", "bool")]  # JAX compiles for each dtype


@for_each(("library", "dtype"), HELD, slow=SELDOM)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_round_trip_of_every_dtype(library, dtype, index):
    need(library)
    values, splits = to(library, values_of(dtype)), SPLITS.astype(index)
    v = raw_ops.RaggedTensorToVariant([splits], values, True)
    for variant in (v, VariantArray(v.elements())):
        decoded = raw_ops.RaggedTensorFromVariant(variant, 0, 1, dtype, index)
        assert back(decoded.output_nested_splits[0]).tolist() == SPLITS.tolist()
        assert back(decoded.output_nested_splits[0]).dtype == index
        assert back(decoded.output_dense_values).dtype == values_of(dtype).dtype
        np.testing.assert_array_equal(back(decoded.output_dense_values), values_of(dtype))
        laid = raw_ops.RaggedTensorToVariantGradient(variant, splits, (3,), dtype)
        np.testing.assert_array_equal(back(laid), values_of(dtype))
    some = raw_ops.RaggedTensorToVariantGradient(VariantArray([v[0], None, None]), splits, (3,), dtype)
    zero = "" if dtype == "string" else np.zeros((), values_of(dtype).dtype)
    assert back(some).tolist() == [*values_of(dtype)[:2].tolist(), zero if dtype == "string" else zero.item()]


@for_each(("library", "dtype"), HELD, slow=SELDOM)
@pytest.mark.parametrize("module", ["native", "reference"])
def test_neighbours_of_every_dtype(library, dtype, module):
    need(library)
    need("weft._native")
    module = "reference" if dtype == "string" else module
    values, expected = to(library, values_of(dtype)), values_of(dtype)
    with kernels.use(module):
        gathered = raw_ops.RaggedGather([SPLITS], values, np.array([2, 0]), 1)
        dense = raw_ops.RaggedTensorToTensor(-1, values, values[2], [SPLITS], ["ROW_SPLITS"])
        filled = raw_ops.RaggedFillEmptyRows(np.array([0, 2, 2]), values, np.array(3), values[2])
    assert back(gathered.output_dense_values).tolist() == expected[[2, 0, 1]].tolist()
    assert back(dense).tolist() == expected[[0, 1, 2, 2, 2, 2]].reshape(3, 2).tolist()
    assert back(filled.output_values).tolist() == expected[[0, 2, 1, 2]].tolist()
    sparse = raw_ops.RaggedTensorToSparse([SPLITS], values)
    assert back(sparse.sparse_values).tolist() == expected.tolist()
    assert back(sparse.sparse_indices).tolist() == [[0, 0], [0, 1], [2, 0]]


def test_memory_in_any_order():
    wide = np.arange(24.0).reshape(4, 6)
    for values in (wide[::2, ::3], wide.T[:2], np.asfortranarray(wide)[1:3], wide[::-1][:2]):
        v = raw_ops.RaggedTensorToVariant([np.array([0, 1, 2])], values, True)
        assert raw_ops.RaggedTensorFromVariant(v, 0, 1, "float64").output_dense_values.tolist() == values.tolist()
        laid = raw_ops.RaggedTensorToVariantGradient(v[::-1], [0, 1, 2], values.shape, "float64")
        assert laid.tolist() == values[::-1].tolist()
        gathered = raw_ops.RaggedGather([np.array([0, 1, 2])], values, np.array([1, 1]), 1)
        assert gathered.output_dense_values.tolist() == values[[1, 1]].tolist()
        assert RaggedTensor(values, [[0, 0, 2]]).sum().tolist() == [[0] * values.shape[1], values.sum(0).tolist()]
    splits = np.array([0, 7, 1, 7, 3, 7])[::2]
    assert raw_ops.RaggedTensorToVariant([splits], np.arange(3), True)[1].item().values.tolist() == [1, 2]
    big = np.arange(3).astype(">f8")
    assert raw_ops.RaggedGather([SPLITS.astype(">i8")], big, np.array([0]), 1).output_dense_values.tolist() == [0, 1]


def test_text_of_every_kind_is_one_type():
    for text in (
        np.array(["a", "b"]),
        np.array([b"a", b"b"]),
        ["a", "b"],
        np.array(["a", "b"], np.dtypes.StringDType()),
    ):
        v = raw_ops.RaggedTensorToVariant([[0, 2]], text, True)
        out = raw_ops.RaggedTensorFromVariant(v, 0, 1, "string").output_dense_values
        assert out.dtype == object
        assert [x.decode() if isinstance(x, bytes) else x for x in out] == ["a", "b"]


def test_splits_are_host_arrays_beside_values(library):
    need(library)
    values = to(library, np.ones(3, np.float32))
    kind = type(to("torch" if library == "torch" else "numpy", SPLITS))
    v = raw_ops.RaggedTensorToVariant([to(library, SPLITS)], values, True)
    splits = "int32" if library == "jax" else "int64"
    assert type(raw_ops.RaggedTensorFromVariant(v, 0, 1, "float32", splits).output_nested_splits[0]) is kind
    assert type(raw_ops.RaggedGather([SPLITS], values, [0], 1).output_nested_splits[0]) is kind
    assert type(raw_ops.RaggedTensorToSparse([SPLITS], values).sparse_indices) is kind


def test_nothing_given_is_changed():
    given = [SPLITS.copy(), np.arange(3.0), np.array([2, 0, 1])]
    before = [x.copy() for x in given]
    splits, values, index = given
    v = raw_ops.RaggedTensorToVariant([splits], values, True)
    raw_ops.RaggedTensorToVariantGradient(VariantArray([v[0], None, None]), splits, (3,), "float64")
    raw_ops.RaggedGather([splits], values, index, 1)
    raw_ops.RaggedTensorToTensor(-1, values, np.float64(1), [splits], ["ROW_SPLITS"])
    raw_ops.RaggedFillEmptyRows(index, values, np.array(5), np.float64(1))
    (v + v).zeros_like()
    for x, y in zip(given, before, strict=True):
        np.testing.assert_array_equal(x, y)


# ---- TensorFlow's own scenarios


def element(v, i):
    e = v.elements()[i]
    return [s.tolist() for s in e.splits], e.values.tolist()


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_three_levels_batched(index):
    nested = [np.array(s, index) for s in ([0, 5, 10], [0, 1, 3, 3, 8, 11, 11, 15, 15, 16, 18], list(range(0, 37, 2)))]
    values = np.arange(36)
    v = raw_ops.RaggedTensorToVariant(nested, values, True)
    assert v.shape == (2,)
    first = nested[1][:6], nested[2][: 11 + 1]
    assert element(v, 0) == ([s.tolist() for s in first], values[:22].tolist())
    assert element(v, 1)[0] == [(nested[1][5:] - 11).tolist(), (nested[2][11:] - 22).tolist()]
    decoded = raw_ops.RaggedTensorFromVariant(v, 2, 3, "int64", index)
    assert [s.tolist() for s in decoded.output_nested_splits] == [s.tolist() for s in nested]


def test_an_empty_row_of_two_levels():
    nested = [np.array([0, 3, 3, 5, 7]), np.array([0, 1, 3, 3, 8, 11, 11, 15])]
    v = raw_ops.RaggedTensorToVariant(nested, np.arange(15), True)
    assert element(v, 1) == ([[0]], [])
    assert element(v, 3) == ([[0, 0, 4]], [11, 12, 13, 14])


def test_matrix_of_rank_2_inferred():
    one = ([np.array([0, 1, 3]), np.array([0, 1, 2, 4])], np.arange(4))
    v = VariantArray([one] * 4, (2, 2))
    decoded = raw_ops.RaggedTensorFromVariant(v, -1, 4, "int64")
    splits = [s.tolist() for s in decoded.output_nested_splits]
    assert splits == [
        [0, 2, 4],
        [0, 2, 4, 6, 8],
        [0, 1, 3, 4, 6, 7, 9, 10, 12],
        [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16],
    ]
    assert decoded.output_dense_values.tolist() == [0, 1, 2, 3] * 4


def test_three_dimensions_of_variants_give_right_splits():
    v = VariantArray([np.arange(i) for i in range(8)], (2, 2, 2))
    decoded = raw_ops.RaggedTensorFromVariant(v, 0, 3, "int64")
    assert [s.tolist() for s in decoded.output_nested_splits[:2]] == [[0, 2, 4], [0, 2, 4, 6, 8]]
    assert RaggedTensor(decoded.output_dense_values, decoded.output_nested_splits).to_list()[1][1][1] == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
    ]


CONSTANTS = [
    [[1, 2], [], [3]],
    [[], []],
    [["a", "b"], ["c"]],
    [[[1], [2, 3]], [], [[]]],
    [[[[1, 2]], []], [[], [[3], []]]],
    [[1]],
]


@pytest.mark.parametrize("rows", CONSTANTS)
def test_variant_round_trip_of_constants(rows):
    rt = RaggedTensor.from_rows(rows)
    dtype = rt.flat_values.dtype
    nested = list(rt.nested_row_splits)
    scalar = raw_ops.RaggedTensorToVariant(nested, rt.flat_values, False)
    decoded = raw_ops.RaggedTensorFromVariant(scalar, -1, rt.ragged_rank, dtype)
    assert RaggedTensor(decoded.output_dense_values, decoded.output_nested_splits).to_list() == rows
    batched = raw_ops.RaggedTensorToVariant(nested, rt.flat_values, True)
    assert batched.shape == (len(rows),)
    for variant in (batched, VariantArray(batched.elements())):
        assert RaggedTensor.from_variant(variant, rt.ragged_rank).to_list() == rows


# ---- no foreign memory


POISON = 0x5A


def poisoned(monkeypatch):
    """Fresh NumPy memory from the kernels full of a mark that no input holds."""

    def empty(shape, dtype):
        out = np.empty(shape, dtype)
        if not out.dtype.hasobject:
            out.reshape(-1).view(np.uint8)[...] = POISON
        return out

    from weft.kernels import buffers

    monkeypatch.setattr(buffers, "empty", empty)


def test_no_foreign_memory_in_any_result(monkeypatch):
    need("weft._native")
    poisoned(monkeypatch)
    rng = np.random.default_rng(3)
    mark = np.frombuffer(bytes([POISON] * 4), np.float32)[0]
    for _ in range(60):
        lengths = rng.integers(0, 5, rng.integers(1, 6))
        splits = np.concatenate([[0], np.cumsum(lengths)])
        for inner in ((), (3,), (2, 2)):
            values = rng.standard_normal((splits[-1], *inner), np.float32)
            shape = [*rng.integers(0, 7, 2), *inner]
            index = rng.integers(0, len(lengths), rng.integers(0, 5))
            results = [
                raw_ops.RaggedTensorToTensor(np.array(shape), values, np.float32(1), [splits], ["ROW_SPLITS"]),
                raw_ops.RaggedGather([splits], values, index, 1).output_dense_values,
                RaggedTensor(values, [splits]).sum(),
                RaggedTensor(values, [splits]).max(),
                RaggedTensor(values, [splits]).softmax().flat_values,
                RaggedTensor(values, [splits])[:, 1:3].flat_values,
                RaggedTensor(values, [np.array([0, len(lengths)]), splits]).to_padded(4, 1).values,
                weft.vjp(raw_ops.RaggedTensorToTensor, -1, values, np.float32(1), [splits], ["ROW_SPLITS"])[1]()[
                    "values"
                ],
                weft.vjp(raw_ops.RaggedGather, [splits], values, index, 1)[1]()["params_dense_values"],
            ]
            for result in results:
                assert not (result == mark).any()


def test_reused_memory_is_never_lent_twice():
    from weft.kernels import buffers

    first = buffers.empty((1 << 19,), np.float32)
    second = buffers.empty((1 << 19,), np.float32)
    assert not np.shares_memory(first, second)
    view = first[10:20]
    address = first.ctypes.data
    del first
    third = buffers.empty((1 << 19,), np.float32)
    assert third.ctypes.data != address  # a view still holds it
    del view
    fourth = buffers.empty((1 << 19,), np.float32)
    assert fourth.ctypes.data == address
    assert buffers.empty((4,), object).tolist() == [None] * 4


def test_idle_memory_is_bounded(monkeypatch):
    from weft.kernels import buffers

    monkeypatch.setattr(buffers, "_idle", OrderedDict())
    monkeypatch.setattr(buffers, "KEPT", 5 << 20)
    held = [buffers.empty((2 << 20,), np.uint8) for _ in range(4)]
    del held
    assert 0 < sum(len(memory) for kept in buffers._idle.values() for memory in kept) == buffers.idle_bytes() <= 5 << 20


# ---- values TensorFlow was seen to give


def test_range_rounds_at_every_step():
    out = raw_ops.RaggedRange(np.float32(0), np.float32(1), np.float32(0.1)).rt_dense_values
    wanted = [np.float32(0)]
    for _ in range(9):
        wanted.append(np.float32(wanted[-1] + np.float32(0.1)))
    assert out.tolist() == wanted
    assert raw_ops.RaggedRange(np.float32(0), np.float32("-inf"), np.float32(1)).rt_dense_values.size == 0
    assert raw_ops.RaggedRange(np.float32(0), np.float32(1), np.float32("inf")).rt_nested_splits.tolist() == [0, 0]
    assert raw_ops.RaggedRange(0, [2, 3], 1).rt_dense_values.tolist() == [0, 1, 0, 1, 2]
    with kernels.use("reference"):
        assert raw_ops.RaggedRange(np.float32(0), np.float32(1), np.float32(0.1)).rt_dense_values.tolist() == wanted


def test_row_ids_and_splits_mixed():
    values = np.arange(1.0, 6)
    out = raw_ops.RaggedTensorToTensor(
        -1,
        values,
        np.float64(0),
        [np.array(3), np.array([0, 0, 2]), np.array([0, 2, 2, 5])],
        ["FIRST_DIM_SIZE", "VALUE_ROWIDS", "ROW_SPLITS"],
    )
    assert out.tolist() == [[[1, 2, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]], [[3, 4, 5], [0, 0, 0]]]
    short = raw_ops.RaggedTensorToTensor(np.array([1, 2]), values, np.float64(9), [np.array([0, 1])], ["ROW_SPLITS"])
    assert short.tolist() == [[1, 9]]  # values past the splits are left out


def test_cross_and_bincount_keep_their_library():
    need("torch")
    import torch

    numbers, splits = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
    out = raw_ops.RaggedCross([numbers], [splits], [], [], [], [], "R", True, 10, 0, "int64", "int64")
    assert isinstance(out.output_values, torch.Tensor)
    assert out.output_row_splits.tolist() == [0, 2, 3]
    counts = raw_ops.RaggedBincount(splits, numbers, torch.tensor(3), torch.ones(3))
    assert counts.tolist() == [[0, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_sparse_counts_keep_their_library(library, dtype):
    need(library)
    numbers, splits = to(library, np.array([1, 1, 3], np.int32)), np.array([0, 2, 3])
    for weights in (np.zeros(0, dtype), np.ones(3, dtype)):
        out = raw_ops.RaggedCountSparseOutput(splits, numbers, to(library, weights), False)
        assert library_of(out.output_values) == library
        assert dtype_of(out.output_values) == dtype
        assert back(out.output_values).tolist() == [2, 1]
        for host in (out.output_indices, out.output_dense_shape):  # numbers of the host, as all indices
            assert library_of(host) == ("torch" if library == "torch" else "numpy")
            assert dtype_of(host) == "int64"
        assert out.output_indices.tolist() == [[0, 1], [1, 3]]
        assert out.output_dense_shape.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("weights", "dtype", "counts"),
    [
        ([], "float32", [1, 2, 1]),
        ([1, 2, 3, 4], "int32", [1, 5, 4]),
        ([1.0, 2, 3, 4], "float32", [1, 5, 4]),
        ([2**40, 2, 3, 4], "int64", [2**40, 5, 4]),
        (np.ones(4, ">f8"), "float64", [1, 2, 1]),
        (np.ones(4, ">i4"), "int32", [1, 2, 1]),
    ],
)
def test_numbers_of_python_and_of_another_byte_order_are_counted(weights, dtype, counts):
    for values in ([0, 1, 1, 2], np.array([0, 1, 1, 2], ">i8")):
        out = raw_ops.RaggedCountSparseOutput([0, 4], values, weights, False)
        assert out.output_values.dtype == dtype
        assert out.output_values.tolist() == counts
        assert out.output_indices.tolist() == [[0, 0], [0, 1], [0, 2]]
    dense = raw_ops.RaggedBincount([0, 4], [0, 1, 1, 2], 3, weights)
    assert dense.dtype == dtype
    assert dense.tolist() == [counts]


def test_empty_lists_are_counted():
    out = raw_ops.RaggedCountSparseOutput([0, 0], [], [], False)
    assert out.output_indices.shape == (0, 2)
    assert out.output_values.shape == (0,)
    assert out.output_dense_shape.tolist() == [1, 1]


def test_sparse_counts_have_their_own_memory():
    splits, numbers, weights = np.array([0, 2]), np.array([0, 1]), np.ones(2)
    for x in raw_ops.RaggedCountSparseOutput(splits, numbers, weights, False):
        assert not any(np.shares_memory(x, given) for given in (splits, numbers, weights))


NUMBERS = {
    "R": lambda: [[np.array([1, 2])], [np.array([0, 2])], [], [], [], [], "R"],
    "S": lambda: [[], [], [np.array([[0, 0], [0, 1]])], [np.array([1, 2])], [np.array([1, 2])], [], "S"],
    "D": lambda: [[], [], [], [], [], [np.array([[1, 2]])], "D"],
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("hashed", [False, True])
def test_a_cross_of_numbers_is_bytes(kind, hashed):
    """As in TensorFlow, whose text is bytes; text that was given keeps its kind."""
    out = raw_ops.RaggedCross(*NUMBERS[kind](), hashed, 0, 0, "string", "int64")
    assert out.output_values.tolist() == [b"1", b"2"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([["a"], [5]], ["a_X_5"]),
        ([[b"a"], [5]], [b"a_X_5"]),
        ([["a"], [b"b"]], [b"a_X_b"]),
        ([["a"], ["b"]], ["a_X_b"]),
        ([[-7], [5]], [b"-7_X_5"]),
        ([[5], []], []),
    ],
)
def test_a_cross_keeps_the_kind_of_its_text(given, wanted):
    values = [np.array(v, np.int64 if all(isinstance(x, int) for x in v) else object) for v in given]
    splits = [np.array([0, len(v)]) for v in given]
    out = raw_ops.RaggedCross(values, splits, [], [], [], [], "RR", False, 0, 0, "string", "int64")
    assert out.output_values.tolist() == wanted


def test_gaps_between_text_are_of_its_kind():
    """bytes beside str compare as different texts, and cannot be joined."""
    for text, empty in (("a", ""), (b"a", b"")):
        rows = weft.RaggedTensor.from_rows([[text], [text, text], []])
        assert rows.to_padded().values.tolist() == [[text, empty], [text, text], [empty, empty]]
        assert rows.to_padded(length=1).values.tolist() == [[text], [text], [empty]]
        variants = weft.VariantArray([np.array([text], object), None])
        dense = raw_ops.RaggedTensorToVariantGradient(variants, np.array([0, 1, 3]), [3], "string")
        assert dense.tolist() == [text, empty, empty]
    nothing = weft.VariantArray([None])
    assert raw_ops.RaggedTensorToVariantGradient(nothing, np.array([0, 1]), [1], "string").tolist() == [b""]


def test_cross_of_all_kinds():
    out = raw_ops.RaggedCross(
        [np.array(["a", "b"], object)],
        [np.array([0, 2, 2])],
        [np.array([[0, 0], [1, 0], [1, 1]])],
        [np.array([5, 6, 7])],
        [np.array([2, 2])],
        [np.array([["x", "y"], ["z", "w"]], object)],
        "DRS",
        False,
        0,
        0,
        "string",
        "int64",
    )
    assert out.output_values.tolist() == ["x_X_a_X_5", "x_X_b_X_5", "y_X_a_X_5", "y_X_b_X_5"]
    assert out.output_row_splits.tolist() == [0, 4, 4]
    nothing = raw_ops.RaggedCross([], [], [], [], [], [], "", True, 0, 0, "int64", "int32")
    assert (nothing.output_values.shape, nothing.output_row_splits.tolist()) == ((0,), [0])


# tf.strings.to_hash_bucket_fast(TEXT[:length], 2**63 - 1) of TensorFlow 2.21, by length: one for each way the hash goes.
TEXT = "".join(chr(97 + i * 7 % 26) for i in range(256))
FINGERPRINTS = {
    0: 1936946117179621456,
    1: 3694432073954588132,
    3: 3268219959478574187,
    4: 8899178591127745170,
    7: 7865121719684446987,
    8: 1420088497208371233,
    16: 8401081827976153439,
    17: 2237273621417572890,
    32: 1600711689105381821,
    33: 8045080651094301868,
    64: 6926143071330858655,
    65: 2768067016444695309,
    128: 1257756605311619470,
    200: 5852185341676273205,
}


@pytest.mark.parametrize("length", FINGERPRINTS)
def test_fingerprints(length):
    from weft.ragged.farmhash import fingerprint64

    assert fingerprint64(TEXT[:length].encode()) % (2**63 - 1) == FINGERPRINTS[length]


def test_variants_in_sparse_coordinates():
    v = VariantArray([np.ones(1), None, np.ones(2)])
    out = raw_ops.RaggedTensorToSparse([np.array([0, 2, 3])], v)
    assert out.sparse_values == v
    assert out.sparse_indices.tolist() == [[0, 0], [0, 1], [1, 0]]


def test_counts_beyond_32_bits():
    count, rows = 2**31 + 2**15, 2**15
    values = np.broadcast_to(np.int8(1), (count, 1))  # one byte, seen two thousand million times
    splits = np.arange(rows + 1) * (count // rows)
    v = raw_ops.RaggedTensorToVariant([splits], values, True)
    assert v.shape == (rows,)
    assert v[-1].item().values.shape == (count // rows, 1)
    assert raw_ops.RaggedTensorFromVariant(v, 0, 1, "int8").output_nested_splits[0][-1] == count
    dense = raw_ops.RaggedTensorToVariant([], values.reshape(rows, -1), True)
    decoded = raw_ops.RaggedTensorFromVariant(dense, 0, 1, "int8")
    assert decoded.output_nested_splits[0][-1] == count
    laid = raw_ops.RaggedTensorToVariantGradient(v, splits, (rows, count // rows), "int8")
    assert laid.shape == (rows, count // rows)
    with pytest.raises(InvalidArgumentError):
        raw_ops.RaggedTensorFromVariant(dense, 0, 1, "int8", "int32")  # int32 cannot count them


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "int16", "int32", "float16", "complex64"])
def test_the_sum_of_fill_gradients_keeps_its_dtype(library, dtype):
    """NumPy and torch add small integers as int64; TensorFlow does not, and wraps."""
    grads = np.array([100, 100, 3]).astype(dtype)
    with np.errstate(over="ignore"):
        wanted = grads[0] + grads[1]
    values, default = raw_ops.RaggedFillEmptyRowsGrad(np.array([2]), to(library, grads))
    assert dtype_of(default) == dtype_of(values) == dtype
    assert back(values).tolist() == [3]
    assert back(default) == wanted


def test_a_denormal_step_is_not_zero():
    zero, step = np.zeros((), np.float32), np.array(1e-40, np.float32)
    assert raw_ops.RaggedRange(zero, zero, step).rt_nested_splits.tolist() == [0, 0]
    assert len(raw_ops.RaggedRange(zero, step * 3, step).rt_dense_values) == 3


def test_a_range_without_a_kernel_says_so_first():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(NotFoundError):
        raw_ops.RaggedRange(np.zeros(1, ml_dtypes.bfloat16), np.zeros(1, bool), np.ones(1, np.float32))
