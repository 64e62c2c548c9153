"""The Numba kernels of batch norm against the reference, and what they promise beyond its values."""

from __future__ import annotations

import logging

import ml_dtypes
import numpy as np
import pytest
from support.libraries import back, for_each, need, to

from weft import kernels, raw_ops
from weft.kernels import reference

need("numba")
from numba import njit  # noqa: E402

from weft.kernels import buffers, cpu, drivers, pool, rows, team  # noqa: E402
from weft.kernels.simd import address_of, pointer_to  # noqa: E402

NAMES = [
    "batch_norm", "batch_norm_inference", "batch_norm_grad", "batch_norm_inference_grad",
    "batch_norm_grad_grad", "batch_norm_inference_grad_grad",
]  # fmt: skip
# A relative tolerance for float32: its results are rounded once, its sums are nearly exact.
TOLERANCE = {"float32": 2e-6, "float64": 1e-12, "float16": 1e-3, "bfloat16": 8e-3}
# Shapes that are cut in each of the ways there are: one task, tiles, chunks, a row left over, parts of a plane.
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 4, 5),
    (7, 5, 3, 64),
    (33, 7, 7, 130),
    (64, 9, 9, 3),
    (12, 28, 28, 64),
    (2, 2, 90000),
    (300, 700),
]
EPSILON = 1e-3
# Each takes seconds to compile. Between dtypes only reading and writing differ, so half precision is tested forwards, and
# backwards in the slow tests.
CALLS = [(name, dtype) for dtype in TOLERANCE for name in NAMES]
SELDOM = [(name, dtype) for name, dtype in CALLS if "grad" in name and "16" in dtype]


def arguments(name, shape, axis, dtype, seed=0):
    rng = np.random.default_rng(seed)
    vector_dtype = np.float64 if dtype == "float64" else np.float32
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x, g, u = (rng.normal(size=shape).astype(dtype) for _ in range(3))
    x = (x.astype(np.float32) * 2 + 3).astype(dtype)
    scale, offset, a, b, mean = rng.normal(size=(5, shape[axis])).astype(vector_dtype)
    variance = rng.uniform(0.5, 2, shape[axis]).astype(vector_dtype)
    return {
        "batch_norm": (x, scale, offset),
        "batch_norm_inference": (x, scale, offset, mean, variance),
        "batch_norm_grad": (g, x, scale, mean, variance),
        "batch_norm_inference_grad": (g, x, scale, mean, variance),
        "batch_norm_grad_grad": (g, x, scale, u, a, b),
        "batch_norm_inference_grad_grad": (g, x, scale, mean, variance, u, a, b),
    }[name]


def run(module, name, args, axis, mask=None):
    result = getattr(module, name)(*args, EPSILON, axis, mask)
    return result if isinstance(result, tuple) else (result,)


def compare(got, want, tolerance):
    for found, wanted in zip(got, want, strict=True):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        found, wanted = back(found).astype(np.float64), back(wanted).astype(np.float64)
        scale = np.abs(wanted).max() if wanted.size else 0
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * max(scale, 1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@for_each(("name", "dtype"), CALLS, slow=SELDOM)
def test_equals_the_reference(name, shape, dtype):
    for axis in {0, 1, len(shape) - 1}:
        args = arguments(name, shape, axis, dtype)
        compare(run(cpu, name, args, axis), run(reference, name, args, axis), TOLERANCE[dtype])


@for_each(("name", "dtype"), CALLS, slow=SELDOM)
def test_results_written_past_the_caches(name, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "PAST", 0)
    monkeypatch.setattr(buffers, "LARGE", 0)  # such memory begins at a page
    monkeypatch.setattr(cpu, "_form", cpu._form.__wrapped__)
    test_equals_the_reference(name, (6, 5, 48, 32), dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [1, 3])
def test_rows_that_do_not_count(name, axis):
    """Neither their values nor NaN in them reach any result, and their results are zeros."""
    shape = (40, 12, 30, 11)
    args = arguments(name, shape, axis, "float32")
    mask = np.random.default_rng(1).random(shape[0]) < 0.6
    mask[:3] = True
    spoiled = [a.copy() for a in args]
    for a in spoiled:
        if a.ndim == 4:
            a[~mask] = np.nan
    kept = run(reference, name, [a[mask] if a.ndim == 4 else a for a in args], axis)
    for module in (cpu, reference):
        got = run(module, name, spoiled, axis, mask)
        assert not any(g[~mask].any() for g in got if g.ndim == 4)
        compare([g[mask] if g.ndim == 4 else g for g in got], kept, 3e-6)


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_count(name):
    args = arguments(name, (3, 4, 5), 1, "float32")
    for got, want in zip(
        run(cpu, name, args, 1, np.zeros(3, bool)), run(reference, name, args, 1, np.zeros(3, bool)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (2, 0, 4), (0, 0, 0)])
def test_empty_arrays(name, shape):
    args = arguments(name, shape, 1, "float32")
    for got, want in zip(run(cpu, name, args, 1), run(reference, name, args, 1), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: x.copy(order="F"),
        lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1),
        lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
        lambda x: x[::-1].copy()[::-1],
        lambda x: x.astype(">f4"),
    ],
    ids=["fortran", "channels_last", "strided", "reversed", "big-endian"],
)
def test_any_memory_layout(name, arrange):
    args = arguments(name, (8, 6, 9, 10), 1, "float32")
    wanted = run(cpu, name, args, 1)
    got = run(cpu, name, [arrange(a) if a.ndim == 4 else a for a in args], 1)
    compare(got, wanted, 3e-6)


@pytest.mark.parametrize("name", NAMES)
def test_read_only_arrays_are_read_and_nothing_is_changed(name):
    args = arguments(name, (8, 6, 9, 10), 1, "float32")
    before = [a.copy() for a in args]
    run(cpu, name, args, 1)
    known = len(drivers.whole.overloads)
    for a in args:
        a.flags.writeable = False
    run(cpu, name, args, 1)
    assert len(drivers.whole.overloads) == known
    for a, b in zip(args, before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("shape", "axis"), [((16, 30, 30, 50), 3), ((16, 50, 30, 30), 1), ((2, 3, 100000), 1)])
def test_the_same_bits_on_any_number_of_threads(name, shape, axis):
    args = arguments(name, shape, axis, "float32")
    size = pool.size()
    try:
        results = []
        for threads in (1, 2, 5):
            pool.resize(threads)
            results.append(run(cpu, name, args, axis))
    finally:
        pool.resize(size)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_torch_channels_last_stays_so():
    need("torch")
    import torch

    x = torch.randn(4, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    vector = torch.ones(6)
    assert kernels.which("batch_norm", x) == "cpu"
    result = raw_ops.FusedBatchNormV3(x, vector, vector, vector[:0], vector[:0], data_format="NCHW")
    assert result.y.is_contiguous(memory_format=torch.channels_last)
    wanted = torch.nn.functional.batch_norm(x, None, None, vector, vector, training=True, eps=1e-4)
    torch.testing.assert_close(result.y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays_use_the_kernels_when_they_are_large(dtype):
    need("jax")
    import jax

    x = jax.numpy.ones((1024, 1024), dtype)
    assert kernels.which("batch_norm", x) == "cpu"
    assert kernels.which("batch_norm", x[:8]) == "reference"
    assert jax.jit(lambda x: kernels.which("batch_norm", x) == "reference" and x)(x).shape == x.shape
    args = [to("jax", a) for a in arguments("batch_norm", (1100, 32, 32), 2, dtype)]
    got, want = run(cpu, "batch_norm", args, 2), run(reference, "batch_norm", args, 2)
    assert isinstance(got[0], jax.Array)
    compare(got, want, 2e-5 if dtype == "float32" else 8e-3)


def test_every_half_precision_number_is_read_and_written_exactly():
    """All 65,536 patterns: what comes out for scale 1 and offset 0 at mean 0 and variance 1 is what went in."""
    ones, zeros = np.ones(1, np.float32), np.zeros(1, np.float32)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x = np.arange(65536, dtype=np.uint16).view(dtype).reshape(-1, 1)
        y = cpu.batch_norm_inference(x, ones, zeros, zeros, ones, 0.0, 1, None)
        np.testing.assert_array_equal(y.astype(np.float32), x.astype(np.float32))
        halved = cpu.batch_norm_inference(x, ones * np.float32(1.7), zeros, zeros, ones, 0.0, 1, None)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(
                halved.astype(np.float32), (x.astype(np.float32) * np.float32(1.7)).astype(dtype).astype(np.float32)
            )


@pytest.mark.parametrize("layout", ["rows", "planes"])
@pytest.mark.parametrize(("mean", "sigma"), [(0, 1), (1000, 1), (1e4, 0.01)])
def test_sums_stay_right_for_a_million_elements(layout, mean, sigma):
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(2**20, 2)) * sigma + mean).astype(np.float32)
    exact = x.astype(np.float64)
    x, axis = (x, 1) if layout == "rows" else (np.ascontiguousarray(x.T)[None], 1)
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    y, found_mean, found_variance = cpu.batch_norm(x, ones, zeros, 0.0, axis, None)
    np.testing.assert_allclose(found_mean, exact.mean(axis=0), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found_variance, exact.var(axis=0), rtol=3e-7)
    y = y if layout == "rows" else y[0].T
    np.testing.assert_allclose(y, (exact - exact.mean(axis=0)) / exact.std(axis=0), rtol=3e-7, atol=3e-6)


@pytest.mark.parametrize("axis", [1, 2])
def test_a_few_rows_far_from_the_rest_do_not_spoil_the_moments(axis):
    """Means are first guessed from some elements: here just these are far off."""
    x = np.random.default_rng(5).normal(size=(4, 5000, 20)).astype(np.float32)
    x[:, :20] = 1e4
    x[0, ::19] = -1e4
    x = np.moveaxis(x, 2, axis).copy()
    exact, axes, ones = x.astype(np.float64), tuple({0, 1, 2} - {axis}), np.ones(20, np.float32)
    _, mean, variance = cpu.batch_norm(x, ones, ones, 0.0, axis, None)
    np.testing.assert_allclose(mean, exact.mean(axis=axes), rtol=1e-6)
    np.testing.assert_allclose(variance, exact.var(axis=axes), rtol=1e-6)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_channel_that_is_not_finite_leaves_the_others_alone(axis, value):
    x = np.random.default_rng(6).normal(size=(3, 700, 20)).astype(np.float32)
    x[0, 0, 3] = value
    others, ones = np.arange(20) != 3, np.ones(20, np.float32)
    exact = x[..., others].astype(np.float64)
    _, mean, variance = cpu.batch_norm(np.moveaxis(x, 2, axis).copy(), ones, ones, 0.0, axis, None)
    assert np.isnan(variance[3])
    np.testing.assert_equal(mean[3], np.float32(value))
    np.testing.assert_allclose(mean[others], exact.mean(axis=(0, 1)), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(variance[others], exact.var(axis=(0, 1)), rtol=1e-6)


def test_data_that_drifts_is_summed_well():
    """Sorted data: every block's mean is far from that of the blocks before it."""
    x = np.sort(np.random.default_rng(4).normal(size=(200_000, 3)).astype(np.float32) + 100, axis=0)
    x[:1000] = 0
    exact = x.astype(np.float64)
    ones = np.ones(3, np.float32)
    for array, axis in ((x, 1), (np.ascontiguousarray(x.T)[None], 1)):
        _, mean, variance = cpu.batch_norm(array, ones, ones, 0.0, axis, None)
        np.testing.assert_allclose(mean, exact.mean(axis=0), rtol=1e-7)
        np.testing.assert_allclose(variance, exact.var(axis=0), rtol=1e-6)


@pytest.mark.parametrize("axis", [1, 3])
def test_not_finite(axis):
    """A NaN or an infinity spoils its own channel and no other; an infinite mean stays infinite."""
    x = np.random.default_rng(5).normal(size=(9, 20, 7, 20)).astype(np.float32)
    index = [4, 4, 4, 4]
    x[tuple(index)] = np.inf
    index[axis] = 5
    x[tuple(index)] = np.nan
    vector = np.ones(20, np.float32)
    for module in (cpu, reference):
        y, mean, variance = module.batch_norm(x, vector, vector, EPSILON, axis, None)
        y = np.moveaxis(y, axis, 0)
        assert np.isposinf(mean[4])
        assert np.isnan(mean[5])
        assert np.isnan(variance[4:6]).all()
        assert np.isnan(y[4:6]).all()
        rest = np.r_[0:4, 6:20]
        assert np.isfinite(y[rest]).all()
        assert np.isfinite(mean[rest]).all()


def test_constant_channels_have_no_variance_and_no_epsilon_makes_them_nan():
    x = np.full((50, 37, 3), 0.1, np.float32)
    ones = np.ones(3, np.float32)
    for axis in (1, 2):
        vector = np.ones(x.shape[axis], np.float32)
        y, mean, variance = cpu.batch_norm(x, vector, vector, 0.0, axis, None)
        np.testing.assert_array_equal(mean, np.float32(0.1))
        np.testing.assert_array_equal(variance, 0)
        assert np.isnan(y).all()
    np.testing.assert_array_equal(cpu.batch_norm(x, ones, ones, EPSILON, 2, None)[0], 1)


def test_a_variance_past_float32_gives_the_offset():
    x = np.linspace(-1e20, 1e20, 64, dtype=np.float32).reshape(-1, 1)
    ones = np.ones(1, np.float32)
    for module in (cpu, reference):
        y, _, variance = module.batch_norm(x, ones, ones, EPSILON, 1, None)
        assert np.isinf(variance).all()
        np.testing.assert_array_equal(y, 1)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements_are_indexed_right():
    """4 GB of zeros that are never touched but for their last row, so that only the index is large."""
    count = 2**31 // 64 + 1
    x = np.zeros((count, 64), np.float16)
    x[-1] = 1
    layout = cpu._Layout(x, 1, None, 1)
    np.testing.assert_array_equal(layout.products(layout.x, layout.x, np.zeros(64)), 1)
    one = np.lib.stride_tricks.as_strided(x.reshape(-1), (2**31 + 64,), x.strides[1:])
    sums = (layout := cpu._Layout(one[None], 0, None, 1)).products(layout.x, layout.x, np.zeros(1))
    np.testing.assert_array_equal(sums, 64)


@pytest.mark.parametrize(
    ("runs", "chunks"), [(((0, 10),), 3), (((0, 1), (3, 9), (20, 21)), 4), (((5, 6),), 8), (((0, 64),), 64)]
)
def test_chunks_cover_each_row_once(runs, chunks):
    spans, groups = cpu._cut(runs, chunks)
    covered = [row for a, b in spans for row in range(a, b)]
    assert covered == [row for a, b in runs for row in range(a, b)]
    assert groups[0] == 0
    assert groups[-1] == len(spans)
    assert (np.diff(groups) > 0).all()


def test_extra_memory_is_small():
    """Beside the result only sums and coefficients are allocated."""
    import tracemalloc

    x = np.ones((64, 56, 56, 32), np.float32)
    vector = np.ones(32, np.float32)
    run(cpu, "batch_norm_grad", (x, x, vector, vector, vector), 3)
    tracemalloc.start()
    try:
        run(cpu, "batch_norm_grad", (x, x, vector, vector, vector), 3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes + 64 * 2 * 32 * 8 + 65536


def test_small_arrays_stay_on_the_callers_thread(monkeypatch):
    monkeypatch.setattr(team, "_team", team._Team(0))
    x = np.ones((8, 8, 8, 32), np.float32)
    vector = np.ones(32, np.float32)
    run(cpu, "batch_norm", (x, vector, vector), 3)
    assert not team._team.is_started


def test_compiling_is_logged(caplog, monkeypatch):
    class Slow:
        __name__ = "_slow"

        def compile(self, types):
            clock.append(clock[-1] + 3)

    clock = [0.0]
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(cpu, "_MET", set())
    with caplog.at_level(logging.WARNING):
        cpu._compile(Slow(), "float32", [()])
    assert "compiled _slow for float32 in 3.0 s" in caplog.text


def test_blocks_and_chunks_have_the_sizes_the_loops_are_made_for():
    assert rows.BLOCK % 8 == 4
    assert cpu.CHUNK % 64 == 0


@njit
def _place_of_sums(g, x, room):
    data, start = (pointer_to(g), pointer_to(x)), pointer_to(room)
    return address_of(rows.apart(data, start)) - address_of(start)


@pytest.mark.parametrize("shift", range(0, 1024, 64))
def test_sums_lie_apart_from_the_rows(shift):
    """On a boundary of a cache line, and never a little further on than either array's rows."""
    memory, room = np.zeros(4096, np.float32), np.zeros(1024, np.float32)
    x, g = memory[4:], memory[4 + shift // 4 :]
    moved = _place_of_sums(g, x, room)
    place = room.ctypes.data + moved
    assert 0 <= moved < rows.APART
    assert place % 64 == 0
    assert all((place - array.ctypes.data) % rows.APART >= 320 for array in (x, g))
