"""weft.batch_norm and the scenarios of TensorFlow's and PyTorch's own tests."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batch_norm_cases import CASES, array
from support.libraries import LIBRARIES, back, for_each, need, to

import weft
from weft import raw_ops

ATOL = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-10}
# Channels first or last, and the factor of the running statistics: neither knows of the other.
LAYOUTS = [(False, 0.6), (True, 1.0), (False, 1.0), (True, 0.6)]
SHAPES = [(1, 1, 6, 1), (1, 1, 6, 2), (1, 2, 1, 6), (27, 13, 12, 6), (0, 13, 12, 6), (1, 1, 1, 1), (1, 2, 6, 1, 3)]


def as_dtype(name):
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def formula(x, scale, offset, mean, variance, epsilon):
    """Batch norm of channels-last data, in float64."""
    return (x - mean) / np.sqrt(variance + epsilon) * scale + offset


def channels_first(x):
    return np.ascontiguousarray(np.moveaxis(x, -1, 1))


@for_each(
    ("library", "dtype", "shape"),
    list(itertools.product(LIBRARIES, ["float16", "bfloat16", "float32"], SHAPES)),
    slow=[("jax", dtype, shape) for dtype in ("float16", "bfloat16") for shape in SHAPES if shape[0] != 27],
    ids=str,
)
@for_each(("first", "factor"), LAYOUTS, slow=LAYOUTS[2:])
def test_tensorflows_shapes(shape, dtype, factor, first, library):
    """InferenceShape1..7 and TrainingShape1..7, in both layouts."""
    need(library)
    rng = np.random.default_rng(1)
    x = rng.normal(size=shape).astype(as_dtype(dtype))
    scale, offset, mean = rng.normal(size=(3, shape[-1])).astype(np.float32)
    variance = rng.uniform(0.5, 2, shape[-1]).astype(np.float32)
    exact = x.astype(np.float64).reshape(-1, shape[-1])
    given_x = to(library, channels_first(x) if first else x)
    vectors = [to(library, v) for v in (scale, offset, mean, variance)]
    rest = {"data_format": "NCHW" if first else "NHWC", "epsilon": 1e-3, "exponential_avg_factor": factor}

    inference = raw_ops.FusedBatchNormV3(given_x, *vectors, is_training=False, **rest)
    wanted = formula(x.astype(np.float64), scale, offset, mean, variance, 1e-3)
    np.testing.assert_allclose(
        back(inference.y).astype(np.float64),
        channels_first(wanted) if first else wanted,
        atol=ATOL[dtype],
        rtol=ATOL[dtype],
    )
    training = raw_ops.FusedBatchNormV3(given_x, *vectors, **rest)
    assert training.y.shape == given_x.shape
    if not len(exact):
        assert np.isnan(back(training.batch_mean)).all()
        assert not back(training.reserve_space_1).any()
        return
    wanted = formula(x.astype(np.float64), scale, offset, exact.mean(axis=0), exact.var(axis=0), 1e-3)
    np.testing.assert_allclose(
        back(training.y).astype(np.float64),
        channels_first(wanted) if first else wanted,
        atol=ATOL[dtype],
        rtol=ATOL[dtype],
    )
    bessel = len(exact) / max(len(exact) - 1, 1)
    blended = (
        (1 - factor) * mean + factor * exact.mean(axis=0),
        (1 - factor) * variance + factor * bessel * exact.var(axis=0),
    )
    np.testing.assert_allclose(back(training.batch_mean), blended[0], atol=1e-5)
    np.testing.assert_allclose(back(training.batch_variance), blended[1], atol=1e-5)


def test_tensorflows_kernel_tests(library):
    """The C++ tests of the kernel: training, running mean, inference, and the gradient."""
    x = to(library, np.repeat(np.arange(5, 17, 2, dtype=np.float32), 2).reshape(1, 1, 6, 2))

    def vector(value):
        return to(library, np.full(2, value, np.float32))

    y = [-3.86, -3.86, -1.51, -1.51, 0.83, 0.83, 3.17, 3.17, 5.51, 5.51, 7.86, 7.86]
    none = vector(0)[:0]
    training = raw_ops.FusedBatchNorm(x, vector(4), vector(2), none, none, epsilon=0.001)
    np.testing.assert_allclose(back(training.y).reshape(-1), y, atol=0.01)
    np.testing.assert_allclose(back(training.batch_mean), 10)
    np.testing.assert_allclose(back(training.batch_variance), 14)
    running = raw_ops.FusedBatchNorm(x, vector(4), vector(2), vector(6), vector(16), 0.001, 0.5)
    np.testing.assert_allclose(back(running.batch_mean), 8)
    np.testing.assert_allclose(back(running.batch_variance), 15)
    for factor in (1.0, 0.5):
        inference = raw_ops.FusedBatchNorm(
            x, vector(4), vector(2), vector(10), vector(11.67), 0.001, factor, is_training=False
        )
        np.testing.assert_allclose(back(inference.y).reshape(-1), y, atol=0.01)

    def column(*values):
        return to(library, np.repeat(np.array(values, np.float32), 2).reshape(1, 1, 6, 2))

    grad = raw_ops.FusedBatchNormGrad(
        column(2, 9, -4, 5, 8, 7), column(1, 7, 4, -3, -11, 13), vector(4), vector(1.833), vector(57.472), 0.001
    )
    wanted = np.repeat([-1.34, 2.47, -4.44, 0.17, 1.60, 1.53], 2)
    np.testing.assert_allclose(back(grad.x_backprop).reshape(-1), wanted, atol=0.01)
    np.testing.assert_allclose(back(grad.scale_backprop), -1.6488, atol=0.01)
    np.testing.assert_allclose(back(grad.offset_backprop), 27)


@pytest.mark.parametrize("version", ["", "V2", "V3"])
def test_numbers_in_place_of_vectors(version):
    x = np.ones((1, 1, 1, 3), np.float32)
    with pytest.raises(weft.errors.InvalidArgumentError, match=r"scale must have rank 1, got the shape \[\]"):
        getattr(raw_ops, f"FusedBatchNorm{version}")(x, 1, 1, 1, 1)


def test_repeats_bit_for_bit():
    x, g = np.random.default_rng(2).normal(size=(2, 20, 30, 30, 24)).astype(np.float32)
    v = np.ones(24, np.float32)
    first, second = (raw_ops.FusedBatchNormV3(x, v, v, v, v) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    one, two = (raw_ops.FusedBatchNormGradV3(g, x, v, first.batch_mean, first.batch_variance, v) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


def test_outputs_share_no_memory():
    x, v = np.ones((2, 2, 2, 3), np.float32), np.ones(3, np.float32)
    for is_training in (True, False):
        outputs = raw_ops.FusedBatchNormV3(x, v, v, v, v, is_training=is_training)
        for a, b in itertools.combinations([*outputs, x, v], 2):
            assert not np.shares_memory(a, b)


@pytest.mark.parametrize("case", ["nn_bn_full", "nn_bn_channels_first_broadcast", "nn_bn_global_scale_False"])
def test_tf_nn_batch_normalization(case, library):
    case = CASES[case]
    inputs = {k: array(v).reshape(-1) if k not in ("x", "input") else array(v) for k, v in case["inputs"].items()}
    inputs = {k: to(library, v) for k, v in inputs.items()}
    x = inputs.get("x", inputs.get("input"))
    result = weft.batch_norm(
        x, inputs.get("scale"), inputs.get("offset", inputs.get("beta")), inputs["mean"], inputs["variance"],
        training=False, epsilon=case["attrs"]["variance_epsilon"], axis=1 if "first" in case["id"] else -1,
    )  # fmt: skip
    np.testing.assert_allclose(back(result.y), array(case["outputs"]["y"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["v1_fused_train_tiny_epsilon", "v1_fused_infer_eps_1e_minus_7"])
def test_fused_batch_norm_of_version_1(case):
    case = CASES[case]
    inputs = {k: array(v) for k, v in case["inputs"].items()}
    channels = inputs["x"].shape[-1]
    running = inputs.get("mean", np.zeros(channels)), inputs.get("variance", np.ones(channels))
    result = weft.batch_norm(
        inputs["x"], inputs["scale"], inputs["offset"], *running,
        training=case["attrs"].get("is_training", True), epsilon=case["attrs"]["epsilon"],
    )  # fmt: skip
    for got, name in zip(result, ("y", "running_mean", "running_var"), strict=True):
        np.testing.assert_allclose(got, array(case["outputs"][name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES.values() if c["kind"] == "keras_layer"], ids=lambda c: c["id"])
def test_keras_layer(case, library):
    attrs = case["attrs"]
    axis = attrs.get("axis", -1)
    x = array(case["inputs"]["inputs"])
    zeros, ones = np.zeros(x.shape[axis], np.float32), np.ones(x.shape[axis], np.float32)
    result = weft.batch_norm(
        to(library, x), None, None, to(library, zeros), to(library, ones), axis=axis, convention="keras",
        training=attrs["call"]["training"] and attrs.get("trainable", True), momentum=attrs.get("momentum"),
    )  # fmt: skip
    for got, name in zip(result, ("y", "moving_mean", "moving_variance"), strict=True):
        np.testing.assert_allclose(back(got), array(case["outputs"][name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("momentum", [None, 0.3])
@pytest.mark.parametrize("affine", [True, False])
def test_as_torchs_own_modules(rank, momentum, affine):
    """Output, gradients and running statistics of three training steps and one in evaluation."""
    need("torch")
    import torch

    from weft.torch import BatchNorm

    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}[rank]
    theirs = kind(4, affine=affine, **({} if momentum is None else {"momentum": momentum}))
    ours = BatchNorm(4, momentum=momentum, affine=affine)
    ours.load_state_dict(theirs.state_dict())
    for step in range(4):
        if step == 3:
            theirs.eval()
            ours.eval()
        x = torch.randn(6, 4, *[3] * (rank - 2), requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        g = torch.randn_like(x)
        wanted, got = theirs(x), ours(twin)
        wanted.backward(g)
        got.backward(g)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(twin.grad, x.grad, rtol=1e-4, atol=1e-5)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_torch_module_with_padding():
    """A padded batch trains as the batch without padding does."""
    need("torch")
    import torch

    from weft.torch import BatchNorm

    plain, padded = BatchNorm(3), BatchNorm(3)
    x = torch.randn(5, 3, 4)
    full = torch.cat([x, torch.full((3, 3, 4), 1e9)]).requires_grad_()
    mask = torch.arange(8) < 5
    wanted, got = plain(x), padded(full, mask)
    torch.testing.assert_close(got[:5], wanted)
    assert not got[5:].any()
    (got * torch.randn_like(got)).sum().backward()
    assert not full.grad[5:].any()
    torch.testing.assert_close(padded.running_var, plain.running_var)
    assert "torch" in repr(padded)
    with pytest.raises(ValueError, match="convention"):
        BatchNorm(3, convention="none")
    assert BatchNorm(3, track_running_stats=False, affine=False).eval()(x).shape == x.shape


def test_a_batch_in_which_nothing_counts_changes_nothing(library):
    x = to(library, np.ones((3, 2), np.float32))
    mean, variance = to(library, np.full(2, 5, np.float32)), to(library, np.full(2, 7, np.float32))
    for array_, mask in ((x, 0), (x[:0], None)):
        result = weft.batch_norm(array_, None, None, mean, variance, training=True, mask=mask)
        assert not back(result.y).any()
        np.testing.assert_array_equal(back(result.running_mean), 5)
        np.testing.assert_array_equal(back(result.running_variance), 7)


@pytest.mark.parametrize("convention", ["tensorflow", "torch", "keras"])
def test_under_jit_with_a_traced_mask(convention):
    need("jax")
    import jax
    import jax.numpy as jnp

    x = np.random.default_rng(0).normal(size=(6, 3, 4)).astype(np.float32)
    running = np.zeros(3, np.float32), np.ones(3, np.float32)

    def call(x, mask, mean, variance):
        return weft.batch_norm(
            x, None, None, mean, variance, training=True, momentum=0.3, axis=1, mask=mask, convention=convention
        )

    for count in (0, 4, 6):
        got = jax.jit(call)(jnp.asarray(x), jnp.arange(6) < count, *map(jnp.asarray, running))
        wanted = call(x, 0, *running) if count == 0 and convention != "torch" else None
        if count:
            wanted = call(x, count, *running)
        if wanted is not None:
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    axis=st.integers(-5, 4),
    seed=st.integers(0, 2**16),
    convention=st.sampled_from(["tensorflow", "torch", "keras"]),
    library=st.sampled_from(["numpy", "torch", "jax"]),
)
def test_properties(shape, axis, seed, convention, library):
    """Channels have mean offset and deviation scale; conventions differ only in the running statistics; permuting
    rows commutes."""
    need(library)
    rng = np.random.default_rng(seed)
    axis = axis % len(shape)
    x = rng.normal(size=shape).astype(np.float32) * 10
    count = x.size // shape[axis]
    if convention == "torch" and count < 2:
        return
    vector = to(library, np.zeros(shape[axis], np.float32))
    result = weft.batch_norm(
        to(library, x),
        None,
        None,
        vector,
        vector,
        training=True,
        momentum=0.25,
        epsilon=1e-3,
        axis=axis,
        convention=convention,
    )
    others = tuple(i for i in range(len(shape)) if i != axis)
    exact = x.astype(np.float64)
    kept = np.expand_dims(exact.mean(axis=others), others)
    y = (exact - kept) / np.sqrt(np.expand_dims(exact.var(axis=others), others) + 1e-3)
    np.testing.assert_allclose(back(result.y), y, rtol=1e-4, atol=1e-4)
    share = 0.75 if convention == "keras" else 0.25
    bessel = 1 if convention == "keras" else count / max(count - 1, 1)
    np.testing.assert_allclose(back(result.running_mean), share * exact.mean(axis=others), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        back(result.running_variance), share * bessel * exact.var(axis=others), rtol=1e-4, atol=1e-4
    )
    if axis != 0:
        order = rng.permutation(shape[0])
        permuted = weft.batch_norm(to(library, x[order]), training=True, epsilon=1e-3, axis=axis).y
        np.testing.assert_allclose(back(permuted), back(result.y)[order], rtol=1e-4, atol=1e-4)


def test_statistics_of_half_precision_do_not_overflow(library):
    x = to(library, np.full((4, 2, 2, 3), 60000, np.float16))
    v = to(library, np.ones(3, np.float32))
    result = raw_ops.FusedBatchNormV3(x, v, v, v[:0], v[:0])
    np.testing.assert_array_equal(back(result.batch_mean), 60000)
    np.testing.assert_array_equal(back(result.y), 1)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_denormal_numbers_are_not_zeros(library):
    """TensorFlow's kernels and JAX take them for zeros."""
    need(library)
    x, vector = to(library, np.full((1, 1, 1, 1), 2e-20, np.float32)), np.ones(1, np.float32)
    vectors = [to(library, v) for v in (vector, 0 * vector, 0 * vector, np.array([1e-40], np.float32))]
    y = raw_ops.FusedBatchNormV3(x, *vectors, epsilon=0.0, is_training=False).y
    np.testing.assert_allclose(back(y), 2, rtol=1e-3)


def test_reserve_space_3_of_the_gradient_is_not_read():
    x, vector = np.ones((1, 2, 2, 1), np.float32), np.ones(1, np.float32)
    results = [raw_ops.FusedBatchNormGradV3(x, x, vector, vector, vector, r) for r in (vector, np.array(["a"], object))]
    np.testing.assert_array_equal(results[0].x_backprop, results[1].x_backprop)


def test_the_gradient_of_scale_without_variance():
    g, x = np.array([3, 1, -1, 0, 2, 3], np.float32).reshape(2, 1, 3, 1, 1)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    assert raw_ops.FusedBatchNormGradV3(g, x, one, zero, zero, zero, epsilon=0.0).scale_backprop.tolist() == [-np.inf]
