"""The C++ kernels of batch norm against the reference, and what they promise beyond its values."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest
from support.libraries import back, for_each, need, to

from weft import kernels, raw_ops
from weft.errors import InvalidArgumentError, OpError
from weft.kernels import reference

need("weft._native")
from weft import _native  # noqa: E402
from weft.kernels import native  # noqa: E402

NAMES = [
    "batch_norm", "batch_norm_inference", "batch_norm_grad", "batch_norm_inference_grad",
    "batch_norm_grad_grad", "batch_norm_inference_grad_grad",
]  # fmt: skip
# A relative tolerance for float32: its results are rounded once, its sums are nearly exact.
TOLERANCE = {"float32": 2e-6, "float64": 1e-12, "float16": 1e-3, "bfloat16": 8e-3}
# Shapes that are cut in each of the ways there are: one task, tiles, chunks, a row left over, parts of a plane, long rows.
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 4, 5),
    (7, 5, 3, 64),
    (33, 7, 7, 130),
    (64, 9, 9, 3),
    (12, 28, 28, 64),
    (2, 2, 90000),
    (300, 700),
    (35, 5003),
]
EPSILON = 1e-3


@lru_cache(maxsize=1)
def large_arguments(shape, dtype):
    """x, its gradient, and the gradient of that."""
    rng = np.random.default_rng(0)
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x, g, u = (rng.normal(size=shape).astype(dtype) for _ in range(3))
    return (x.astype(np.float32) * 2 + 3).astype(dtype), g, u


def arguments(name, shape, axis, dtype):
    """Of the call of a kernel; the large ones are those of the last call with the same shape and dtype."""
    x, g, u = large_arguments(shape, dtype)
    rng = np.random.default_rng(1)
    vector_dtype = np.float64 if dtype == "float64" else np.float32
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


def compare(got, want, tolerance, what=""):
    for found, wanted in zip(got, want, strict=True):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        found, wanted = back(found).astype(np.float64), back(wanted).astype(np.float64)
        scale = np.abs(wanted).max() if wanted.size else 0
        if (np.abs(found - wanted) <= tolerance * (max(scale, 1) + np.abs(wanted))).all():
            continue  # the next line takes ten times as long
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * max(scale, 1), err_msg=what)


def compare_on_every_isa(name, shape, axis, dtype):
    """Compare a kernel with the reference on each instruction set that this machine can run."""
    args = arguments(name, shape, axis, dtype)
    wanted = run(reference, name, args, axis)
    best = _native.isa()
    try:
        for isa in _native.isas():
            _native.force_isa(isa)
            compare(run(native, name, args, axis), wanted, TOLERANCE[dtype], isa)
    finally:
        _native.force_isa(best)


@for_each(
    ("shape", "dtype"),
    list(itertools.product(SHAPES, TOLERANCE)),
    slow=list(itertools.product(SHAPES[5:7], ["float64", "float16"])),
    ids=str,
)
@pytest.mark.usefixtures("four_threads")
def test_equals_the_reference(shape, dtype):
    for axis in {0, 1, len(shape) - 1}:
        for name in NAMES:
            compare_on_every_isa(name, shape, axis, dtype)


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match=r"must be one of .*, got 'mmx'"):
        _native.force_isa("mmx")


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_grad"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((540, 256, 48), 1), ((540, 256, 48), 2), ((9, 17, 41_500), 1), ((100, 64_000), 1)]
)
def test_results_written_past_the_caches(name, shape, axis):
    """Inputs of more than 24 MB: short planes, rows, long planes and long rows."""
    compare_on_every_isa(name, shape, axis, "float32")


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
    for module in (native, reference):
        got = run(module, name, spoiled, axis, mask)
        assert not any(g[~mask].any() for g in got if g.ndim == 4)
        compare([g[mask] if g.ndim == 4 else g for g in got], kept, 3e-6)


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_count(name):
    args = arguments(name, (3, 4, 5), 1, "float32")
    for got, want in zip(
        run(native, name, args, 1, np.zeros(3, bool)), run(reference, name, args, 1, np.zeros(3, bool)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (2, 0, 4), (0, 0, 0)])
def test_empty_arrays(name, shape):
    args = arguments(name, shape, 1, "float32")
    for got, want in zip(run(native, name, args, 1), run(reference, name, args, 1), strict=True):
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
    wanted = run(native, name, args, 1)
    got = run(native, name, [arrange(a) if a.ndim == 4 else a for a in args], 1)
    compare(got, wanted, 3e-6)


@pytest.mark.parametrize("name", NAMES)
def test_read_only_arrays_are_read_and_nothing_is_changed(name):
    args = [a.copy() for a in arguments(name, (8, 6, 9, 10), 1, "float32")]
    before = [a.copy() for a in args]
    run(native, name, args, 1)
    for a in args:
        a.flags.writeable = False
    run(native, name, args, 1)
    for a, b in zip(args, before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "axis"), [((16, 30, 30, 50), 3), ((16, 50, 30, 30), 1), ((2, 3, 100000), 1), ((90, 4100), 1)]
)
def test_the_same_bits_on_any_number_of_threads(name, shape, axis):
    args = arguments(name, shape, axis, "float32")
    size = _native.num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            kernels.set_num_threads(threads)
            results.append(run(native, name, args, axis))
    finally:
        kernels.set_num_threads(size)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((40, 9, 96), "float32"), ((80, 9, 64), "float64"), ((80, 15, 64), "float16"), ((9, 10, 4112), "float32")],
)
def test_the_same_bits_wherever_the_data_lies(name, shape, dtype):
    """At the start of a cache line, or some elements after it."""
    args = arguments(name, shape, 2, dtype)
    wanted = run(native, name, [placed(a, 0) for a in args], 2)
    for offset in (1, 4, 15):
        for got, want in zip(run(native, name, [placed(a, offset) for a in args], 2), wanted, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", [(51_000, 128), (204_001, 32)], ids=["rows", "rows that are left over"])
def test_results_that_bypass_the_caches_may_begin_within_a_line(shape):
    x = placed(np.random.default_rng(0).normal(size=shape).astype(np.float32), 4)
    vector = np.ones(shape[1], np.float32)
    y = native.batch_norm_inference(x, vector, vector, 0 * vector, vector, 0.0, 1, None)
    assert y.ctypes.data % 64 == x.ctypes.data % 64 == 16
    np.testing.assert_array_equal(y, x + 1)


def placed(array, offset):
    """A copy that begins `offset` elements after a boundary of 64 bytes."""
    memory = np.empty(array.size + 64, array.dtype)
    start = -memory.ctypes.data % 64 // array.itemsize + offset
    found = memory[start : start + array.size].reshape(array.shape)
    found[...] = array
    return found


def test_torch_channels_last_stays_so():
    need("torch")
    import torch

    x = torch.randn(4, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    vector = torch.ones(6)
    assert kernels.which("batch_norm", x) == "native"
    result = raw_ops.FusedBatchNormV3(x, vector, vector, vector[:0], vector[:0], data_format="NCHW")
    assert result.y.is_contiguous(memory_format=torch.channels_last)
    wanted = torch.nn.functional.batch_norm(x, None, None, vector, vector, training=True, eps=1e-4)
    torch.testing.assert_close(result.y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays_use_the_kernels_when_they_are_large(dtype):
    need("jax")
    import jax

    x = jax.numpy.ones((1024, 1024), dtype)
    assert kernels.which("batch_norm", x) == "native"
    assert kernels.which("batch_norm", x[:8]) == "reference"
    assert jax.jit(lambda x: kernels.which("batch_norm", x) == "reference" and x)(x).shape == x.shape
    args = [to("jax", a) for a in arguments("batch_norm", (1100, 32, 32), 2, dtype)]
    got, want = run(native, "batch_norm", args, 2), run(reference, "batch_norm", args, 2)
    assert isinstance(got[0], jax.Array)
    compare(got, want, 2e-5 if dtype == "float32" else 8e-3)


def test_every_half_precision_number_is_read_and_written_exactly():
    """All 65,536 patterns: what comes out for scale 1 and offset 0 at mean 0 and variance 1 is what went in."""
    ones, zeros = np.ones(1, np.float32), np.zeros(1, np.float32)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x = np.arange(65536, dtype=np.uint16).view(dtype).reshape(-1, 1)
        y = native.batch_norm_inference(x, ones, zeros, zeros, ones, 0.0, 1, None)
        np.testing.assert_array_equal(y.astype(np.float32), x.astype(np.float32))
        halved = native.batch_norm_inference(x, ones * np.float32(1.7), zeros, zeros, ones, 0.0, 1, None)
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
    y, found_mean, found_variance = native.batch_norm(x, ones, zeros, 0.0, axis, None)
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
    _, mean, variance = native.batch_norm(x, ones, ones, 0.0, axis, None)
    np.testing.assert_allclose(mean, exact.mean(axis=axes), rtol=1e-6)
    np.testing.assert_allclose(variance, exact.var(axis=axes), rtol=1e-6)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("channels", "axis"), [(64, 1), (32, 1), (20, 1), (20, 0)])
@pytest.mark.parametrize("value", [np.inf, np.nan, 1e6])
def test_one_channel_changes_no_bit_of_the_others(channels, axis, value):
    x = np.random.default_rng(6).normal(size=(400, channels)).astype(np.float32)
    spoilt, others, ones = x.copy(), np.arange(channels) != 3, np.ones(channels, np.float32)
    spoilt[7, 3] = value
    a, b = (native.batch_norm(np.moveaxis(v, 1, axis).copy(), ones, ones, 0.0, axis, None) for v in (x, spoilt))
    for before, after in zip(a, b, strict=True):
        np.testing.assert_array_equal(
            np.compress(others, after, min(axis, after.ndim - 1)),
            np.compress(others, before, min(axis, before.ndim - 1)),
        )


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_channel_that_is_not_finite_leaves_the_others_alone(axis, value):
    x = np.random.default_rng(6).normal(size=(3, 700, 20)).astype(np.float32)
    x[0, 0, 3] = value
    others, ones = np.arange(20) != 3, np.ones(20, np.float32)
    exact = x[..., others].astype(np.float64)
    _, mean, variance = native.batch_norm(np.moveaxis(x, 2, axis).copy(), ones, ones, 0.0, axis, None)
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
        _, mean, variance = native.batch_norm(array, ones, ones, 0.0, axis, None)
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
    for module in (native, reference):
        y, mean, variance = module.batch_norm(x, vector, vector, EPSILON, axis, None)
        y = np.moveaxis(y, axis, 0)
        assert np.isposinf(mean[4])
        assert np.isnan(mean[5])
        assert np.isnan(variance[4:6]).all()
        assert np.isnan(y[4:6]).all()
        rest = np.r_[0:4, 6:20]
        assert np.isfinite(y[rest]).all()
        assert np.isfinite(mean[rest]).all()


@pytest.mark.parametrize("axis", [1, 3])
def test_an_infinite_scale_makes_infinities(axis):
    """Also in training, where the kernel corrects for the rounding of the mean and combines coefficients."""
    x, g = np.random.default_rng(5).normal(size=(2, 3, 5, 7, 4)).astype(np.float32)
    ones = np.ones(x.shape[axis], np.float32)
    scale = np.where(np.arange(len(ones)) == 1, np.float32(-np.inf), ones)
    y, mean, variance = native.batch_norm(x, scale, ones, EPSILON, axis, None)
    back = native.batch_norm_grad(g, x, scale, mean, variance, EPSILON, axis, None)[0]
    np.testing.assert_allclose(y, reference.batch_norm(x, scale, ones, EPSILON, axis, None)[0], rtol=1e-4, atol=1e-5)
    wanted = reference.batch_norm_grad(g, x, scale, mean, variance, EPSILON, axis, None)[0]
    np.testing.assert_allclose(back, wanted, rtol=1e-4, atol=1e-5)
    assert np.isinf(np.moveaxis(y, axis, 0)[1]).all()
    assert np.isinf(np.moveaxis(back, axis, 0)[1]).all()


def test_constant_channels_have_no_variance_and_no_epsilon_makes_them_nan():
    x = np.full((50, 37, 3), 0.1, np.float32)
    ones = np.ones(3, np.float32)
    for axis in (1, 2):
        vector = np.ones(x.shape[axis], np.float32)
        y, mean, variance = native.batch_norm(x, vector, vector, 0.0, axis, None)
        np.testing.assert_array_equal(mean, np.float32(0.1))
        np.testing.assert_array_equal(variance, 0)
        assert np.isnan(y).all()
    np.testing.assert_array_equal(native.batch_norm(x, ones, ones, EPSILON, 2, None)[0], 1)


def test_a_variance_past_float32_gives_the_offset():
    x = np.linspace(-1e20, 1e20, 64, dtype=np.float32).reshape(-1, 1)
    ones = np.ones(1, np.float32)
    for module in (native, reference):
        y, _, variance = module.batch_norm(x, ones, ones, EPSILON, 1, None)
        assert np.isinf(variance).all()
        np.testing.assert_array_equal(y, 1)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements_are_indexed_right():
    """4 GB of zeros that are never touched but for their last row, so that only the index is large."""
    count = 2**31 // 64 + 1
    x = np.zeros((count, 64), np.float16)
    x[-1] = 1
    ones = np.ones(64, np.float32)
    _, sums, _ = native.batch_norm_inference_grad(x, x, ones, ones * 0, ones, 0.0, 1, None)
    np.testing.assert_array_equal(sums, 1)


def test_extra_memory_is_small():
    """Beside the result only sums and coefficients are allocated."""
    import tracemalloc

    x = np.ones((64, 56, 56, 32), np.float32)
    vector = np.ones(32, np.float32)
    run(native, "batch_norm_grad", (x, x, vector, vector, vector), 3)
    tracemalloc.start()
    try:
        run(native, "batch_norm_grad", (x, x, vector, vector, vector), 3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes + 64 * 2 * 32 * 8 + 65536


def test_the_first_call_runs_on_all_cores():
    code = "import numpy, weft; weft.batch_norm(numpy.ones((4, 3)), training=True); print(weft._native.num_threads())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == native._cores()


def test_the_threads_are_as_many_as_was_set():
    size = _native.num_threads()
    try:
        kernels.set_num_threads(3)
        assert _native.num_threads() == 3
        kernels.set_num_threads(10**12)  # no machine can run so many
        assert _native.num_threads() == 64
        kernels.set_num_threads(10**30)
        assert _native.num_threads() == 64
    finally:
        kernels.set_num_threads(size)
    assert _native.num_threads() == size
    for count in (0, -1, 1.5, "2", True, None):
        with pytest.raises(InvalidArgumentError, match="count must be an integer of at least 1, got"):
            kernels.set_num_threads(count)
    assert _native.num_threads() == size


@pytest.mark.usefixtures("four_threads")
def test_calls_from_many_threads_end_and_are_right():
    args = arguments("batch_norm_grad", (64, 16, 16, 64), 3, "float32")
    wanted, failed = run(native, "batch_norm_grad", args, 3), []

    def call():
        for _ in range(30):
            got = run(native, "batch_norm_grad", args, 3)
            failed.extend(not np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
        assert not caller.is_alive()
    assert len(failed) == 8 * 30 * 3
    assert not any(failed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_forked_child_can_call(library):
    need(library)
    args = [to(library, a) for a in arguments("batch_norm", (64, 16, 16, 64), 3, "float32")]
    wanted = run(native, "batch_norm", args, 3)
    child = os.fork()
    if child == 0:  # pragma: no cover
        got = run(native, "batch_norm", args, 3)
        os._exit(0 if all(np.array_equal(back(a), back(b)) for a, b in zip(got, wanted, strict=True)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_torch(name, dtype):
    """In any layout, on torch's threads, with the same bits as arrays of NumPy."""
    need("torch")
    import torch

    args = arguments(name, (40, 12, 30, 11), 1, dtype)
    wanted = run(native, name, args, 1)
    arrange = {
        "as they are": lambda x: x,
        "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
        "strided": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
        "negated": lambda x: torch._neg_view(-x),
        "leaf": lambda x: x.requires_grad_(),
    }
    for change in arrange.values():
        got = run(native, name, [change(to("torch", a)) if a.ndim == 4 else to("torch", a) for a in args], 1)
        assert all(type(found) is torch.Tensor and not found.requires_grad for found in got)
        compare([back(found) for found in got], wanted, TOLERANCE[dtype])


def test_the_mask_may_be_of_any_library(library):
    args = [to(library, a) for a in arguments("batch_norm", (6, 4, 5), 1, "float32")]
    mask = np.array([True, False, True, True, False, True])
    got = run(native, "batch_norm", args, 1, to(library, mask))
    compare(got, run(reference, "batch_norm", args, 1, to(library, mask)), 3e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda args: (args[0][:4], *args[1:]), "a gradient of batch norm must have the shape"),
        (lambda args: (args[0].astype(np.float64), *args[1:]), "a gradient of batch norm must be float32"),
        (lambda args: (*args[:2], args[2][:3], *args[3:]), "a vector of batch norm must have the shape"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    args = change(arguments("batch_norm_grad", (6, 4, 5), 1, "float32"))
    with pytest.raises(InvalidArgumentError, match=message):
        run(native, "batch_norm_grad", args, 1)
    x, *vectors = arguments("batch_norm", (6, 4, 5), 1, "float32")
    with pytest.raises(InvalidArgumentError, match="the mask"):
        run(native, "batch_norm", (x, *vectors), 1, np.ones(5, bool))
    with pytest.raises(InvalidArgumentError, match="must have an axis 3"):
        run(native, "batch_norm", (x, *vectors), 3)


def test_vectors_of_other_dtypes_and_strides_are_converted():
    x, scale, offset = arguments("batch_norm", (6, 4, 5), 1, "float32")
    wanted = run(native, "batch_norm", (x, scale, offset), 1)
    for change in (lambda v: v.astype(np.float64), lambda v: np.repeat(v, 3)[::3], lambda v: v[::-1].copy()[::-1]):
        compare(run(native, "batch_norm", (x, change(scale), change(offset)), 1), wanted, 0)


def test_vectors_beside_tensors():
    need("torch")
    import torch

    x, scale, offset = (to("torch", a) for a in arguments("batch_norm", (6, 4, 5), 1, "float32"))
    wanted = run(native, "batch_norm", (x, scale, offset), 1)
    for change in (
        lambda v: v.double(),
        lambda v: torch._neg_view(-v),
        lambda v: v.repeat_interleave(3)[::3],
        lambda v: v.numpy(),
        lambda v: v.as_subclass(type("Own", (torch.Tensor,), {})),
    ):
        compare(run(native, "batch_norm", (x, change(scale), change(offset)), 1), wanted, 0)


@pytest.mark.parametrize("name", NAMES)
def test_many_axes(name):
    shape = (2, 1, 3, 1, 1, 2, 1, 1, 2, 4)
    for axis in (2, 9):
        args = arguments(name, shape, axis, "float32")
        compare(run(native, name, args, axis), run(reference, name, args, axis), 3e-6)


@pytest.mark.parametrize("victim", range(5))
def test_garbage_collection_that_resizes_an_input(victim):
    """Finalizers run wherever an object is made. The kernel then reads the memory as it was, or the call is refused."""
    need("torch")
    import torch

    original = [to("torch", a) for a in arguments("batch_norm_grad", (20, 16, 32), 1, "float32")]
    wanted = run(native, "batch_norm_grad", original, 1)
    thresholds = gc.get_threshold()
    for allocations, skipped in itertools.product(range(1, 31), range(3)):
        args = [a.clone() for a in original]
        left = [skipped]

        def shrink(phase, _info, args=args, left=left):
            if phase == "start" and not left[0]:
                args[victim].untyped_storage().resize_(0)
                torch.full(args[0].shape, 7.0)  # takes the memory
            left[0] -= phase == "start"

        gc.collect(0)
        gc.callbacks.append(shrink)
        gc.set_threshold(allocations, 1 << 20, 1 << 20)
        try:
            got = run(native, "batch_norm_grad", args, 1)
        except OpError:
            continue
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(shrink)
        assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("victim", range(5))
def test_a_torch_function_mode_that_resizes_an_input(victim):
    """A mode's Python code runs whenever the kernel asks torch for something."""
    need("torch")
    import torch
    from torch.overrides import TorchFunctionMode

    class Shrink(TorchFunctionMode):
        def __init__(self, args, skipped):
            super().__init__()
            self.args, self.left = args, skipped

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if self.left == 0:
                self.args[victim].untyped_storage().resize_(0)
                torch.full(self.args[0].shape, 7.0)
            self.left -= 1
            return func(*args, **(kwargs or {}))

    original = [to("torch", a) for a in arguments("batch_norm_grad", (20, 16, 32), 1, "float32")]
    wanted = run(native, "batch_norm_grad", original, 1)
    refused = 0
    for skipped in range(30):
        args = [a.clone() for a in original]
        try:
            with Shrink(args, skipped):
                got = run(native, "batch_norm_grad", args, 1)
        except OpError:
            refused += 1
            continue
        assert all(map(torch.equal, got, wanted))
    assert 0 < refused < 30


def test_a_torch_function_mode_that_gives_a_tensor_other_memory():
    """`x.data = ...` between the moment when the call holds the memory of `x` and the kernel: the old memory is freed."""
    need("torch")
    import torch
    from torch.overrides import TorchFunctionMode

    class Swap(TorchFunctionMode):
        def __init__(self, x, left):
            super().__init__()
            self.x, self.left = x, left

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if self.left == 0:
                self.x.data = torch.full(self.x.shape, 7.0)
            self.left -= 1
            return func(*args, **(kwargs or {}))

    done = threading.Event()
    other = threading.Thread(target=done.wait, args=(60,))  # without other threads nothing is held
    other.start()
    try:
        refused = 0
        for left in range(30):
            args = [to("torch", a) for a in arguments("batch_norm_grad", (20, 16, 3200), 1, "float32")]
            before_and_after = args[1], torch.full(args[1].shape, 7.0)
            wanted = [run(native, "batch_norm_grad", [args[0], x, *args[2:]], 1) for x in before_and_after]
            try:
                with Swap(args[1], left):
                    got = run(native, "batch_norm_grad", args, 1)
            except OpError:
                refused += 1
                continue
            assert any(all(map(torch.equal, got, each)) for each in wanted)
        assert 0 < refused < 30
    finally:
        done.set()
        other.join(60)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(-1, 1), (-1, 3), (-1, 16), (-1, 70), (-1, 3, 7), (-1, 40, 50)], ids=str)
def test_a_constant_channel_has_no_variance(dtype, shape):
    channels = shape[1]
    one = np.ones(channels, np.float32)
    for rows in (1, 2, 9, 14, 49, 98, 99, 128, 1000, 4321):
        x = np.full((rows, *shape[1:]), 30.7, dtype)
        _, mean, variance = native.batch_norm(x, one, one, 0.0, 1, None)
        assert not variance.any()
        np.testing.assert_array_equal(mean, x.flat[0].astype(np.float32))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_variances_that_float32_cannot_sum_up(library):
    """The squares of a few dozen such numbers add up to more than float32 holds, and their mean is less."""
    need(library)
    x = to(library, np.random.default_rng(0).standard_normal((1000, 3)).astype(np.float32) * np.float32(5e18))
    got, wanted = [], []
    one = to(library, np.ones(3, np.float32))
    for found, module in ((got, native), (wanted, reference)):
        found += module.batch_norm(x, one, one, EPSILON, 1, None)
        found += module.batch_norm_running(x, one, one, EPSILON, 1, (one, one), (0.5, 0.5, 0.5))
    compare(got, wanted, 0)
    assert np.isfinite(np.asarray(got[2])).all()


def test_a_sparse_gradient():
    need("torch")
    import torch

    args = [to("torch", a) for a in arguments("batch_norm_grad", (6, 4), 1, "float32")]
    with pytest.raises(InvalidArgumentError, match="dense"):
        run(native, "batch_norm_grad", [torch.eye(6, 4).to_sparse(), *args[1:]], 1)


def test_an_interrupt_while_memory_is_returned_is_raised_later(monkeypatch):
    """Python ignores exceptions where an object is deleted."""
    x, one = np.ones((1 << 20, 2), np.float32), np.ones(2, np.float32)
    y = native.batch_norm(x, one, one, EPSILON, 1, None)[0]

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels.buffers, "give", interrupted)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        del y
        for _ in range(1000):
            pass
