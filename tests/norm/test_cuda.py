"""Fused batch norm on CUDA tensors: all arrays stay on the device, all orders agree with the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import need

import weft
from weft import kernels, raw_ops

pytestmark = pytest.mark.cuda
TOLERANCE = {"float32": 2e-5, "float64": 1e-11, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture
def torch():
    need("torch")
    import torch

    assert torch.cuda.is_available()
    return torch


def inputs(torch, layout, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 5, 6, 7) if layout == "NHWC" else (4, 7, 5, 6)
    statistics = torch.float64 if dtype == "float64" else torch.float32
    x = (torch.randn(shape, generator=generator) * 2 + 3).to(getattr(torch, dtype))
    scale, offset, mean = torch.randn((3, 7), generator=generator).to(statistics)
    return x, scale, offset, mean, (torch.rand(7, generator=generator) + 0.5).to(statistics)


def compare(torch, on_device, on_host, tolerance):
    for got, want in zip(on_device, on_host, strict=True):
        assert got.device.type == "cuda"
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.cpu().double(), want.double(), rtol=tolerance, atol=tolerance)


def test_no_kernel_of_the_host_is_tried(torch):
    x = torch.zeros(2, 3, device="cuda")
    with kernels.use("native"), pytest.raises(weft.errors.FailedPreconditionError, match="no batch_norm for"):
        kernels.best("batch_norm", x)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_forward_and_gradient(torch, layout, dtype, is_training):
    host = inputs(torch, layout, dtype)
    device = [a.cuda() for a in host]
    options = {"data_format": layout, "is_training": is_training}
    forward = [raw_ops.FusedBatchNormV3(*a, **options) for a in (device, host)]
    compare(torch, *forward, TOLERANCE[dtype])
    g = inputs(torch, layout, dtype, seed=1)[0]
    back = [
        raw_ops.FusedBatchNormGradV3(
            y, a[0], a[1], *((f.reserve_space_1, f.reserve_space_2) if is_training else a[3:]), f.reserve_space_3, **options
        )
        for y, a, f in zip((g.cuda(), g), (device, host), forward, strict=True)
    ]  # fmt: skip
    compare(torch, *back, 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_all_orders_through_autograd(torch, layout):
    found = []
    for where in ("cuda", "cpu"):
        x, scale, offset, _, _ = (a.to(where).requires_grad_() for a in inputs(torch, layout, "float64"))
        none = torch.zeros(0, dtype=torch.float64, device=where)
        y = raw_ops.FusedBatchNormV3(x, scale, offset, none, none, data_format=layout).y
        first = torch.autograd.grad((y**3).sum(), (x, scale, offset), create_graph=True)
        second = torch.autograd.grad(sum((f**2).sum() for f in first), (x, scale), create_graph=True)
        third = torch.autograd.grad(sum(f.sum() for f in second), (x, scale))
        found.append([*first, *second, *third])
    compare(torch, *([t.detach() for t in f] for f in found), 1e-8)


def test_rows_that_do_not_count(torch):
    x, scale, offset, mean, variance = (a.cuda() for a in inputs(torch, "NHWC", "float32"))
    padded = x.clone()
    padded[3] = float("nan")
    masked = weft.batch_norm(padded, scale, offset, mean, variance, training=True, mask=3)
    plain = weft.batch_norm(x[:3], scale, offset, mean, variance, training=True)
    assert not masked[0][3].any()
    compare(torch, [masked[0][:3], *masked[1:]], [p.cpu() for p in plain], 2e-5)


def test_arrays_on_two_devices_are_refused_or_fail_in_torch(torch):
    x, scale, offset, mean, variance = inputs(torch, "NHWC", "float32")
    with pytest.raises((RuntimeError, ValueError), match="device"):
        raw_ops.FusedBatchNormV3(x.cuda(), scale, offset, mean, variance)


def test_a_gpu_result_is_as_exact_as_the_hosts(torch):
    """Sums run in float64: the mean of many elements around 1000 is right to its last digit."""
    x = torch.randn(2**18, 1, 1, 2, device="cuda") + 1000
    ones, none = torch.ones(2, device="cuda"), torch.zeros(0, device="cuda")
    found = raw_ops.FusedBatchNormV3(x, ones, ones, none, none)
    exact = x.double().reshape(-1, 2)
    np.testing.assert_allclose(found.reserve_space_1.cpu(), exact.mean(0).cpu(), rtol=1e-7)
    np.testing.assert_allclose(found.reserve_space_2.cpu(), exact.var(0, unbiased=False).cpu(), rtol=1e-6)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("change", ["none", "cut", "parameter", "negated", "cut vectors", "inference mode"])
def test_unusual_memory(torch, change, factor, is_training):
    """The checks of `weft._native` take such tensors, or leave them to the other path; the results are the same."""
    host = list(inputs(torch, "NHWC", "float32"))
    device = [a.cuda() for a in host]
    if change == "cut":
        device[0] = torch.stack([device[0], device[0]], 2)[:, :, 0]
    elif change == "parameter":
        device[1:3] = [torch.nn.Parameter(a) for a in device[1:3]]
    elif change == "negated":
        device[:2] = [torch.complex(a, a).conj().imag for a in device[:2]]
        assert device[0].is_neg()
        host[:2] = [-a for a in host[:2]]
    elif change == "cut vectors":
        device[1:] = [torch.stack([a, a], 1)[:, 0] for a in device[1:]]
    options = {"is_training": is_training, "exponential_avg_factor": factor}
    with torch.inference_mode() if change == "inference mode" else torch.no_grad():
        if change == "inference mode":
            device = [a + 0 for a in device]
        forward = [raw_ops.FusedBatchNormV3(*a, **options) for a in (device, host)]
        compare(torch, *forward, 2e-5)
        used = forward[1].reserve_space_1, forward[1].reserve_space_2
        back = [
            raw_ops.FusedBatchNormGradV3(
                a[0], *a[:2], *(v.to(a[0].device) for v in used), used[0], is_training=is_training
            )
            for a in (device, host)
        ]
    compare(torch, *back, 1e-4)


@pytest.mark.parametrize("place", range(5))
def test_freed_memory_is_refused(torch, place):
    device = [a.cuda() for a in inputs(torch, "NHWC", "float32")]
    device[place].untyped_storage().resize_(0)
    for is_training in (True, False):
        if not is_training or place < 3:
            with pytest.raises(weft.errors.OpError):
                raw_ops.FusedBatchNormV3(*device, is_training=is_training)
    torch.cuda.synchronize()


def test_a_module_counts_its_batches_in_the_kernel(torch):
    ours, theirs = weft.torch.BatchNorm(7).cuda(), torch.nn.BatchNorm2d(7).cuda()
    x = inputs(torch, "NCHW", "float32")[0].cuda()
    for _ in range(3):
        version = ours.num_batches_tracked._version
        torch.testing.assert_close(ours(x), theirs(x), rtol=2e-5, atol=2e-5)
        assert ours.num_batches_tracked._version > version
    assert ours.num_batches_tracked.item() == 3
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    ours.num_batches_tracked.untyped_storage().resize_(0)
    with pytest.raises(weft.errors.OpError):
        ours(x)
    torch.cuda.synchronize()
