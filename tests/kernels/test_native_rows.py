"""The row kernels of `weft._native` against the reference, with every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import back, need, to

need("weft._native")
from weft.errors import InvalidArgumentError  # noqa: E402
from weft.kernels import native, reference  # noqa: E402

LENGTHS = [0, 1, 3, 7, 8, 9, 16, 0, 33, 70, 5]
SPLITS = np.concatenate([[0], np.cumsum(LENGTHS)])
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMBERS = ["float32", "float64", "complex64", "complex128", *INTEGERS]


def values(dtype, width, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SPLITS[-1], width)) * 60
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        x = rng.integers(info.min, info.max, x.shape, dtype, endpoint=True)
    elif "complex" in dtype:
        x = x + 1j * x[::-1]
    x = x.astype(dtype)
    return x[:, 0] if width == 1 else x


def check(name, *arguments, exact=True):
    got, wanted = (getattr(module, name)(*arguments) for module in (native, reference))
    assert got.dtype == wanted.dtype
    if exact:
        np.testing.assert_array_equal(got, wanted)
    else:
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("width", [1, 2, 4, 7, 8, 33])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_reductions(dtype, width):
    x = values(dtype, width)
    with np.errstate(over="ignore"):
        check("row_sum", x, SPLITS, exact=dtype in INTEGERS)
        blocks = SPLITS[:-1], np.diff(SPLITS), SPLITS[:-1][::-1].copy() // 3
        check("add_rows", x, *blocks, 200, exact=dtype in INTEGERS)
    if "complex" not in dtype:
        check("row_max", x, SPLITS)
    if dtype in ("float32", "float64"):
        check("row_softmax", x, SPLITS, exact=False)
        sums = reference.row_sum(native.row_softmax(x, SPLITS), SPLITS)
        np.testing.assert_allclose(sums[np.diff(SPLITS) > 0], 1, rtol=1e-5 if dtype == "float32" else 1e-13)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", ["bool", "float16", "int8", "float32", "complex128"])
def test_moves(dtype, width):
    x = values("int8" if dtype == "bool" else dtype, width).astype(dtype)
    index = np.array([3, 8, 8, 0, 10, 2])
    starts, bounds = native.row_bounds(SPLITS, index)
    for got, wanted in zip((starts, bounds), reference.row_bounds(SPLITS, index), strict=True):
        np.testing.assert_array_equal(got, wanted)
    check("take_rows", x, starts, bounds)
    for columns in (0, 1, 5, 8, 20, 80):
        for default in (x.dtype.type(1), np.arange(width).astype(dtype) if width > 1 else x[3]):
            check("pad_rows", x, default, SPLITS, 13, columns)
    targets = np.array([9, 0, 40, 4, 50, 20])
    check("place_rows", x, x.dtype.type(1), SPLITS[:6], np.minimum(np.diff(SPLITS)[:6], 4), targets, 60)
    check("place_rows", x, x.dtype.type(1), SPLITS[:6], np.minimum(np.diff(SPLITS)[:6], 4), np.sort(targets), 60)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_indices(dtype):
    for x in (np.arange(100), np.array([5, 3, 99]), np.array([-1, 3]), np.array([], int), np.array([2**31 - 1])):
        x = x.astype(dtype)
        assert native.longest_row(x) == reference.longest_row(x)
        for count in (0, 4, 100, 2**31 - 1, 2**31, 2**40):
            assert native.all_below(x, count) == reference.all_below(x, count)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softmax_is_exact_at_the_ends_of_the_range(dtype):
    x = np.array([0, -1e-30, -50, -80, -87.5, -100, -103.9, -150, -700, -744.5, -800, -np.inf], dtype)
    got = native.row_softmax(x, np.array([0, len(x)])) * np.exp(x.astype(np.float64)).sum()
    np.testing.assert_allclose(
        got, np.exp(x.astype(np.float64)), rtol=3e-7 if dtype == "float32" else 1e-15, atol=4.5e-45
    )
    for bad in (np.nan, np.inf):
        assert np.isnan(native.row_softmax(np.array([1, bad, 2], dtype), np.array([0, 3]))).any()
    assert np.isnan(native.row_softmax(np.full(2, -np.inf, dtype), np.array([0, 2]))).all()


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_odd_memory(dtype):
    """Strides, byte order and alignment that the loops do not take are packed first."""
    x = values(dtype, 4)
    odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    odd[...] = x
    for given in (np.repeat(x, 2, 1)[:, ::2], x[::-1].copy()[::-1], odd, x.astype(x.dtype.newbyteorder())):
        np.testing.assert_array_equal(native.row_max(given, SPLITS), native.row_max(x, SPLITS))
        np.testing.assert_array_equal(
            native.take_rows(given, SPLITS[:-1], SPLITS), native.take_rows(x, SPLITS[:-1], SPLITS)
        )
    wide = np.repeat(SPLITS, 2)[::2]
    np.testing.assert_array_equal(native.row_max(x, wide), native.row_max(x, SPLITS))


def test_indices_in_odd_memory():
    for dtype in ("int32", "int64"):
        x = SPLITS.astype(dtype)
        odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(dtype)
        odd[...] = x
        for given in (x.astype(x.dtype.newbyteorder()), odd, np.repeat(x, 2)[::2]):
            assert native.longest_row(given) == max(LENGTHS)
            assert native.all_below(given, SPLITS[-1] + 1)
            assert not native.all_below(given, SPLITS[-1])


def test_a_result_is_written_from_its_first_row_on():
    """Splits that begin later would leave old memory in it."""
    with pytest.raises(InvalidArgumentError, match="rows must begin and end within"):
        native.take_rows(np.ones(5), np.array([0]), np.array([2, 4]))
    with pytest.raises(InvalidArgumentError, match="rows must begin and end within"):
        native.range_rows(np.array([0]), np.array([1]), np.array([2, 4]))


def test_results_are_of_the_callers_library(library):
    x = to(library, values("float32", 3))
    for name in ("row_sum", "row_max", "row_softmax"):
        got = getattr(native, name)(x, SPLITS)
        assert type(got) is type(x)
        np.testing.assert_allclose(back(got), getattr(reference, name)(back(x), SPLITS), rtol=1e-5)


def test_dtypes_without_a_kernel_are_refused():
    for name, dtype in (
        ("row_max", "complex64"),
        ("row_softmax", "int32"),
        ("row_sum", "float16"),
        ("row_sum", "bool"),
    ):
        with pytest.raises(InvalidArgumentError, match="no row kernel for"):
            getattr(native, name)(np.ones(SPLITS[-1], dtype), SPLITS)


@pytest.mark.parametrize(("rows", "columns"), [(3, (2**64 + 8) // 3), (-2, -4), (2, -1), (2**32, 2**32)])
def test_padded_rows_whose_size_is_no_size(rows, columns):
    with pytest.raises(InvalidArgumentError):
        native.pad_rows(np.arange(5), np.int64(0), np.array([0, 2, 3, 5]), rows, columns)
