"""BatchNormWithGlobalNormalization and its Grad."""

from __future__ import annotations

import numpy as np
import pytest
from support.batch_norm_cases import CASES, array, compare
from support.libraries import back, to

import weft
from weft import errors, raw_ops

rng = np.random.default_rng(7)
T, D = rng.normal(size=(2, 3, 4, 2)), rng.normal(size=(2, 3, 4, 2))
M, BETA, GAMMA = rng.normal(size=(3, 2))
V = rng.uniform(0.5, 2, 2)


def test_values(library):
    """TensorFlow's own kernel test: pairs (1, 4) ... (-3, -6), not scaled."""
    t = np.array([[1, 4], [2, 5], [3, 6], [-1, -4], [-2, -5], [-3, -6]], np.float32).reshape(1, 1, 6, 2)
    vectors = [to(library, np.array(v, np.float32)) for v in ([10, 20], [0.25, 0.5], [0.1, 0.6], [0, 0])]
    result = raw_ops.BatchNormWithGlobalNormalization(to(library, t), *vectors, 0.001, False)
    wanted = [-17.86, -22.0, -15.87, -20.59, -13.87, -19.18, -21.86, -33.31, -23.85, -34.72, -25.85, -36.13]
    np.testing.assert_allclose(back(result).reshape(-1), wanted, atol=0.01)


@pytest.mark.parametrize("case", [CASES["old_graph_bn_global_grad_False"]], ids=lambda c: c["id"])
def test_recorded_gradient(case, library):
    inputs = {k: to(library, array(v)) for k, v in case["inputs"].items()}
    result = raw_ops.BatchNormWithGlobalNormalizationGrad(**inputs, **case["attrs"])
    for name, want in case["outputs"].items():
        compare(getattr(result, name), want)


@pytest.mark.parametrize("case", ["err_raw_bn_global_grad_eager", "err_graph_bn_global"])
def test_works_where_tensorflow_withdrew_it(case):
    case = CASES[case]
    inputs = {k: array(v) for k, v in case["inputs"].items()}
    result = getattr(raw_ops, case["op"])(**inputs, **case["attrs"])
    assert all(np.isfinite(part).all() for part in (result if isinstance(result, tuple) else [result]))


@pytest.mark.parametrize("scale", [True, False])
def test_gradients_of_both_orders(scale):
    torch = pytest.importorskip("torch")
    inputs = [torch.tensor(v, requires_grad=True) for v in (T, M, V, BETA, GAMMA)]

    def call(*arrays):
        return raw_ops.BatchNormWithGlobalNormalization(*arrays, 0.01, scale)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_gradient_by_vjp_is_the_grad_op():
    _, pull = weft.vjp(raw_ops.BatchNormWithGlobalNormalization, T, M, V, BETA, GAMMA, 0.01, True)
    found = pull(D)
    direct = raw_ops.BatchNormWithGlobalNormalizationGrad(T, M, V, GAMMA, D, 0.01, True)
    for name, want in zip(("t", "m", "v", "beta", "gamma"), direct, strict=True):
        np.testing.assert_array_equal(found[name], want)


def test_empty_batch_and_no_channels():
    empty = raw_ops.BatchNormWithGlobalNormalizationGrad(T[:0], M, V, GAMMA, D[:0], 0.01, True)
    assert empty.dx.shape == (0, 3, 4, 2)
    assert not any(np.any(part) for part in empty[1:])
    none = np.zeros(0)
    assert raw_ops.BatchNormWithGlobalNormalization(T[..., :0], none, none, none, none, 0.01, True).shape == (
        2,
        3,
        4,
        0,
    )


@pytest.mark.parametrize("wrong", ["m", "v", "gamma"])
@pytest.mark.parametrize("length", [0, 1, 3, 4])
def test_wrong_lengths_are_refused(wrong, length):
    """TensorFlow reads out of bounds or dies here."""
    vectors = {"m": M, "v": V, "gamma": GAMMA, wrong: np.zeros(length)}
    with pytest.raises(errors.InvalidArgumentError, match=f"{wrong} must have one element"):
        raw_ops.BatchNormWithGlobalNormalizationGrad(
            T, **vectors, backprop=D, variance_epsilon=0.01, scale_after_normalization=True
        )
    with pytest.raises(errors.InvalidArgumentError, match=f"{wrong} must have one element"):
        raw_ops.BatchNormWithGlobalNormalization(
            T, **vectors, beta=BETA, variance_epsilon=0.01, scale_after_normalization=True
        )


def test_other_refusals():
    call = raw_ops.BatchNormWithGlobalNormalizationGrad
    with pytest.raises(errors.InvalidArgumentError, match="backprop must have the shape"):
        call(T, M, V, GAMMA, D[:1], 0.01, True)
    with pytest.raises(errors.InvalidArgumentError, match="rank 4"):
        call(T[0], M, V, GAMMA, D[0], 0.01, True)
    with pytest.raises(errors.InvalidArgumentError, match="v must be float64 like t"):
        call(T, M, V.astype(np.float32), GAMMA, D, 0.01, True)
    with pytest.raises(errors.InvalidArgumentError, match="t must be one of"):
        call(T.astype(int), M, V, GAMMA, D, 0.01, True)
    with pytest.raises(TypeError):
        call(T, M, V, GAMMA, D)


def test_gamma_without_use_has_the_gradient_zero():
    """Also where the sums are infinite or NaN, as in TensorFlow."""
    backprop = np.full_like(D, np.inf)
    assert raw_ops.BatchNormWithGlobalNormalizationGrad(T, M, V, GAMMA, backprop, 0.01, False).dg.tolist() == [0, 0]


def test_epsilon_is_float32(library):
    """TensorFlow stores the attribute so, also for float64 data."""
    t, zero, one = np.ones((1, 1, 1, 1)), np.zeros(1), np.ones(1)
    found = raw_ops.BatchNormWithGlobalNormalization(*(to(library, x) for x in (t, zero, zero, zero, one)), 0.1, True)
    wanted = 1 / np.sqrt(np.float64(np.float32(0.1)))
    np.testing.assert_allclose(back(found).reshape(()), wanted, rtol=1e-12 if back(found).dtype == np.float64 else 1e-6)


def test_a_variance_of_minus_infinity_gives_nan(library):
    vectors = [to(library, np.array([v], np.float32)) for v in (0, -np.inf, 0, 1)]
    t = to(library, np.ones((1, 1, 1, 1), np.float32))
    assert np.isnan(back(raw_ops.BatchNormWithGlobalNormalization(t, *vectors, 0.1, True))).all()


def test_float16_is_added_in_float64():
    backprop = np.array([2048, 1, 1, 1, 1, 1, 1, -2048], np.float16).reshape(1, 1, 8, 1)
    zero, one = np.zeros(1, np.float16), np.ones(1, np.float16)
    assert raw_ops.BatchNormWithGlobalNormalizationGrad(0 * backprop, zero, one, one, backprop, 0.0, True).db == [6]
