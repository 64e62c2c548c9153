"""Gradients of the first three orders, against finite differences, in every framework."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.libraries import back, need, to

import weft
from weft import raw_ops
from weft.norm import derivatives
from weft.norm.derivatives import Mode

EPSILON = 0.01
rng = np.random.default_rng(11)


def data(shape, axis, seed=0):
    random = np.random.default_rng(seed)
    x, g = random.normal(size=(2, *shape))
    scale, offset, mean = random.normal(size=(3, shape[axis]))
    return x, g, scale, offset, mean, random.uniform(0.5, 2, shape[axis])


def slope(function, at, direction, step=1e-6):
    return (function(at + step * direction) - function(at - step * direction)) / (2 * step)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    ("shape", "data_format"),
    [((3, 2, 4, 5), "NHWC"), ((3, 5, 2, 4), "NCHW"), ((2, 3, 2, 3, 4), "NDHWC"), ((2, 4, 3, 2, 3), "NCDHW")],
)
def test_first_order_by_vjp(shape, data_format, is_training):
    x, g, scale, offset, mean, variance = data(shape, 1 if data_format.startswith("NC") else -1)
    rest = {"epsilon": EPSILON, "data_format": data_format, "is_training": is_training}
    inputs = {"x": x, "scale": scale, "offset": offset}
    _, pull = weft.vjp(raw_ops.FusedBatchNormV3, **inputs, mean=mean, variance=variance, **rest)
    found = pull(g)
    assert set(found) == set(inputs)
    for name, value in inputs.items():
        direction = rng.normal(size=value.shape)

        def total(v, name=name):
            return (g * raw_ops.FusedBatchNormV3(**(inputs | {name: v}), mean=mean, variance=variance, **rest).y).sum()

        np.testing.assert_allclose(
            (found[name] * direction).sum(), slope(total, value, direction), rtol=1e-6, atol=1e-7
        )


def grad_through_forward(x, g, scale, is_training, mean, variance, mask=None):
    """The gradient op with the statistics of `x`, as it follows the forward op."""
    used = derivatives.batch_norm(x, scale, scale, mean, variance, mask, Mode(EPSILON, 1, is_training))
    return derivatives.batch_norm_grad(
        g, x, scale, used.used_mean, used.used_variance, mask, Mode(EPSILON, 1, is_training)
    ), used


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("mask", [None, np.array([True, False, True, True])])
@pytest.mark.parametrize("kernel", ["reference", "native"])
def test_second_order_by_finite_differences(is_training, mask, kernel):
    if kernel == "native":
        need("weft._native")
    x, g, scale, _, mean, variance = data((4, 3, 5), 1)
    u, (a, b) = rng.normal(size=x.shape), rng.normal(size=(2, 3))
    with weft.kernels.use(kernel):
        _, used = grad_through_forward(x, g, scale, is_training, mean, variance, mask)
        arguments = g, x, scale, used.used_mean, used.used_variance, mask, Mode(EPSILON, 1, is_training)
        _, pull = weft.vjp(derivatives.batch_norm_grad, *arguments)
        found = pull(u, a, b)
        inputs = {"g": g, "x": x, "scale": scale}
        for name, value in inputs.items():
            direction = rng.normal(size=value.shape)

            def total(v, name=name):
                i = inputs | {name: v}
                back, _ = grad_through_forward(i["x"], i["g"], i["scale"], is_training, mean, variance, mask)
                return (u * back.x_grad).sum() + (a * back.scale_grad).sum() + (b * back.offset_grad).sum()

            want = slope(total, value, direction)
            np.testing.assert_allclose((found[name] * direction).sum(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("mask", [None, np.array([True, False, True, True])])
def test_third_order_by_finite_differences(is_training, mask):
    x, g, scale, _, mean, variance = data((4, 3, 5), 1)
    u, (a, b) = rng.normal(size=x.shape), rng.normal(size=(2, 3))
    cotangent = rng.normal(size=x.shape), rng.normal(size=x.shape), rng.normal(size=3)
    inputs = {"g": g, "x": x, "scale": scale, "u": u, "a": a, "b": b}
    rest = {"mean": mean, "variance": variance, "mask": mask, "mode": Mode(EPSILON, 1, is_training)}
    _, pull = weft.vjp(derivatives.batch_norm_grad_grad, **inputs, **rest)
    found = pull(*cotangent)
    for name, value in inputs.items():
        direction = rng.normal(size=value.shape)

        def total(v, name=name):
            results = derivatives.batch_norm_grad_grad(**(inputs | {name: v}), **rest)
            return sum((c * r).sum() for c, r in zip(cotangent, results, strict=True))

        want = slope(total, value, direction)
        np.testing.assert_allclose((found[name] * direction).sum(), want, rtol=1e-6, atol=1e-6)


def test_torch_third_and_fourth_order():
    need("torch")
    import torch

    x = torch.from_numpy(data((4, 3, 2), 1)[0]).requires_grad_()
    scale = torch.rand(3, dtype=torch.float64, requires_grad=True)

    def second(x, scale):
        y = weft.batch_norm(x, scale, training=True, axis=1, mask=3).y
        a, b = torch.autograd.grad((y**3).sum(), (x, scale), create_graph=True)
        return torch.autograd.grad((a**2).sum() + (b**3).sum(), (x, scale), create_graph=True)

    assert torch.autograd.gradcheck(second, (x, scale))
    assert torch.autograd.gradgradcheck(second, (x, scale))


def test_statistics_pass_no_gradient(library):
    """As in TensorFlow: differentiating batch_mean alone gives zeros, and mean and variance get nothing."""
    x, _, scale, offset, mean, variance = (to(library, v.astype(np.float32)) for v in data((2, 2, 3, 3), -1))
    result, pull = weft.vjp(raw_ops.FusedBatchNormV3, x, scale, offset, mean, variance)
    found = pull(batch_mean=result.batch_mean, batch_variance=result.batch_variance, reserve_space_1=result.batch_mean)
    assert set(found) == {"x", "scale", "offset"}
    assert not any(back(v).any() for v in found.values())


def test_batch_mean_alone_in_torch():
    need("torch")
    import torch

    x = torch.randn(2, 2, 3, 3, requires_grad=True)
    v = torch.ones(3)
    raw_ops.FusedBatchNormV3(x, v, v, v, v).batch_mean.sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_gradient_of_an_empty_batch(library):
    x, g, scale, offset, mean, variance = (to(library, v.astype(np.float32)) for v in data((2, 2, 3, 3), -1))
    _, pull = weft.vjp(raw_ops.FusedBatchNormV3, x[:0], scale, offset, mean, variance)
    found = pull(g[:0])
    assert tuple(found["x"].shape) == (0, 2, 3, 3)
    assert not back(found["scale"]).any()
    _, pull = weft.vjp(raw_ops.FusedBatchNormGradV3, g[:0], x[:0], scale, mean, variance, mean)
    second = pull(x_backprop=g[:0])
    assert np.isnan(back(second["scale"])).all()


def test_one_element_per_channel(library):
    x, g, scale, _, mean, variance = (to(library, v.astype(np.float32)) for v in data((1, 1, 1, 3), -1))
    used = raw_ops.FusedBatchNormV3(x, scale, mean, mean[:0], mean[:0])
    np.testing.assert_array_equal(back(used.y)[0, 0, 0], back(mean))
    found = raw_ops.FusedBatchNormGradV3(g, x, scale, used.reserve_space_1, used.reserve_space_2, used.reserve_space_3)
    assert not back(found.x_backprop).any()
    assert not back(found.scale_backprop).any()
    np.testing.assert_array_equal(back(found.offset_backprop), back(g)[0, 0, 0])
    _, pull = weft.vjp(raw_ops.FusedBatchNormGradV3, g, x, scale, mean, variance, mean)
    second = pull(g, variance, mean)
    assert not back(second["x"]).any()
    assert not back(second["scale"]).any()
    np.testing.assert_array_equal(back(second["y_backprop"])[0, 0, 0], back(mean))


@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    axis=st.integers(0, 4),
    seed=st.integers(0, 2**16),
    training=st.booleans(),
)
def test_gradients_are_orthogonal_and_linear(shape, axis, seed, training):
    """In training x_grad sums to zero and is orthogonal to the centred data; all gradients are linear in g."""
    axis %= len(shape)
    x, g, scale, offset, mean, variance = data(tuple(shape), axis, seed)
    used = derivatives.batch_norm(
        x, scale, offset, mean, variance, None, Mode(0.0 if training else EPSILON, axis, training)
    )
    if training and not (used.used_variance > 1e-6).all():
        return
    statistics = used.used_mean, used.used_variance
    arguments = x, scale, *statistics, None, Mode(0.0 if training else EPSILON, axis, training)
    one = derivatives.batch_norm_grad(g, *arguments)
    two = derivatives.batch_norm_grad(-2 * g, *arguments)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(-2 * a, b, rtol=1e-9, atol=1e-9)
    if training:
        others = tuple(i for i in range(len(shape)) if i != axis)
        size = np.abs(one.x_grad).max() * np.abs(x).max() * x.size + 1
        assert np.abs(one.x_grad.sum(axis=others)).max() < 1e-10 * size
        assert np.abs((one.x_grad * x).sum(axis=others)).max() < 1e-10 * size


def test_nothing_flows_through_running_statistics():
    need("torch")
    import torch

    x, mean = torch.randn(4, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    for mask in (None, 3):
        y, *new = weft.batch_norm(
            x, running_mean=mean, running_variance=torch.ones(3), training=True, convention="torch", mask=mask
        )
        assert y.requires_grad
        assert not any(v.requires_grad for v in new)
