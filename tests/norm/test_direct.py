"""Plain arrays go a short way through batch norm: what comes out is what every other way gives."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
from support.libraries import need

import weft
from weft import kernels, raw_ops
from weft.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def _scope():
    with weft.scope():
        yield


def pair(*args, **options):
    """A module and its copy."""
    import torch

    from weft.torch import BatchNorm

    ours = BatchNorm(*args, **options)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    return ours, copy.deepcopy(ours)


def close(got, wanted):
    import torch

    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options", [{}, {"cumulative": True}, {"convention": "keras"}, {"axis": -1}, {"dtype": "float64"}], ids=str
)
@pytest.mark.parametrize("layout", ["first", "last", "neither"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_module_gives_the_same_the_short_way_and_the_long_way(options, layout, dtype):
    need("torch")
    import torch

    options = {k: getattr(torch, v) if k == "dtype" else v for k, v in options.items()}
    plain, masked = pair(6, **options)

    def the_long_way(x):
        with kernels.use(kernels.which("batch_norm", x.detach())):  # the short way is for kernels that nobody forced
            return masked(x, mask=4)

    for _ in range(3):
        x = torch.randn(5, 6, 4, 6, dtype=getattr(torch, dtype))
        if layout == "last":
            x = x.contiguous(memory_format=torch.channels_last)
        x = x[:, :, ::2] if layout == "neither" else x
        inputs = [x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
        for module, x in zip((plain, masked), inputs, strict=True):
            module.zero_grad()
            y = module(x, mask=4) if module is plain else the_long_way(x)
            (y.float() ** 3).sum().backward()
        close(inputs[0].grad, inputs[1].grad)
        for one, other in zip(plain.parameters(), masked.parameters(), strict=True):
            close(one.grad, other.grad)
        for one, other in zip(plain.buffers(), masked.buffers(), strict=True):
            close(one, other)
    assert plain.num_batches_tracked == 3
    x = inputs[0].detach()
    close(plain.eval()(x), masked.eval()(x, mask=5))
    with torch.no_grad():
        close(plain(x), masked(x, mask=5))
        close(plain(x, mask=4), the_long_way(x))


def test_second_order_through_the_module():
    need("torch")
    import torch

    module = pair(3, dtype=torch.float64)[0]
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(module, (x,))


def test_a_batch_of_cotangents():
    need("torch")
    import torch

    module = pair(3)[0]
    x = torch.randn(4, 3, 2, requires_grad=True)
    y = module(x)
    several = torch.randn(2, *y.shape)
    at_once = torch.vmap(lambda g: torch.autograd.grad(y, x, g, retain_graph=True)[0])(several)
    each = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in several]
    torch.testing.assert_close(at_once, torch.stack(each))


def test_running_statistics_know_that_they_changed():
    need("torch")
    import torch

    module = pair(3)[0]
    before = [buffer._version for buffer in module.buffers()]
    product = module.running_var * torch.ones(3, requires_grad=True) ** 2
    module(torch.randn(4, 3))
    assert all(buffer._version > version for buffer, version in zip(module.buffers(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_refused_call_changes_nothing():
    need("torch")
    import torch

    module = pair(3)[0]
    before = copy.deepcopy(module.state_dict())
    for x in (torch.randn(1, 3), torch.randn(4, 2), torch.randn(3), torch.ones(4, 3, dtype=torch.int64)):
        with pytest.raises((InvalidArgumentError, IndexError)):
            module(x)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_parameters_given_for_a_call():
    need("torch")
    import torch

    module = pair(3)[0]
    given = {"weight": torch.full((3,), 2.0), "bias": torch.full((3,), 5.0)}
    y = torch.func.functional_call(module, given, torch.randn(8, 3))
    torch.testing.assert_close(y.mean(0), given["bias"])


def test_saved_tensors_pass_through_hooks():
    need("torch")
    import torch

    module, seen = pair(3)[0], []
    x = torch.randn(4, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t):
        y = module(x)
    y.sum().backward()
    assert x.shape in seen
    assert x.grad.abs().max() < 1e-5


ODD = {
    "strided": lambda x: np.repeat(x, 2, axis=0)[::2],
    "reversed": lambda x: x[::-1].copy()[::-1],
    "swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "unaligned": lambda x: np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    "transposed": lambda x: np.asfortranarray(x),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("is_training", [True, False])
def test_odd_arrays(odd, data_format, is_training):
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(2, 4, 5, 3, 5)).astype(np.float32)
    vectors = rng.uniform(0.5, 2, (4, 5)).astype(np.float32)
    rest = {"data_format": data_format, "is_training": is_training}
    change = ODD[odd]
    for arrays in ((change(x), *vectors), (x, *map(change, vectors))):
        got, wanted = raw_ops.FusedBatchNormV3(*arrays, **rest), raw_ops.FusedBatchNormV3(x, *vectors, **rest)
        back = raw_ops.FusedBatchNormGradV3(change(g), arrays[0], *arrays[1:4], np.float32(0), **rest)
        wanted_back = raw_ops.FusedBatchNormGradV3(g, x, *vectors[:3], np.float32(0), **rest)
        for one, other in zip((*got, *back), (*wanted, *wanted_back), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_tensor_whose_sign_is_to_come_is_not_taken_for_its_memory():
    need("torch")
    import torch

    one, other = pair(3)
    x = torch._neg_view(torch.randn(4, 3, 2))
    torch.testing.assert_close(one(x), other(x.resolve_neg()))


def test_kernels_that_were_chosen_are_used():
    x, vector = np.ones((2, 2, 2, 3), np.int64).astype(np.float32), np.ones(3, np.float32)
    with kernels.use("host"), pytest.raises(weft.errors.FailedPreconditionError, match="no batch_norm"):
        raw_ops.FusedBatchNormV3(x, vector, vector, vector, vector)
    with kernels.use("host"), pytest.raises(weft.errors.FailedPreconditionError, match="no batch_norm_grad"):
        raw_ops.FusedBatchNormGradV3(x, x, vector, vector, vector, vector[0])


def test_results_on_lent_memory_are_nobody_elses():
    x, vector = np.random.default_rng(0).normal(size=(64, 8, 8, 32)).astype(np.float32), np.ones(32, np.float32)
    results = [raw_ops.FusedBatchNormV3(x + i, vector, vector, vector, vector).y for i in range(3)]
    views = [result[1:, ::2].transpose() for result in results]
    kept = [view.copy() for view in views]
    del results
    others = [raw_ops.FusedBatchNormV3(x * 2 + 7, vector, vector, vector, vector).y for _ in range(4)]
    assert all(np.array_equal(view, old) for view, old in zip(views, kept, strict=True))
    assert not any(np.shares_memory(view, other) for view in views for other in others)


def test_statistics_that_are_not_tracked_for_a_while_stay():
    need("torch")
    import torch

    module = pair(3)[0]
    module.track_running_stats = False
    before = copy.deepcopy(module.state_dict())
    module(torch.randn(4, 3))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_vectors_whose_sign_is_to_come():
    need("torch")
    import torch

    x, vectors = torch.randn(2, 3, 3, 4), torch.rand(4, 4) + 0.5
    odd = [torch._neg_view(-v) for v in vectors]
    for is_training in (True, False):
        got = raw_ops.FusedBatchNormV3(x, *odd, is_training=is_training)
        wanted = raw_ops.FusedBatchNormV3(x, *vectors, is_training=is_training)
        back = raw_ops.FusedBatchNormGradV3(x, x, *odd[:3], got.reserve_space_3, is_training=is_training)
        wanted_back = raw_ops.FusedBatchNormGradV3(x, x, *vectors[:3], got.reserve_space_3, is_training=is_training)
        for one, other in zip((*got, *back), (*wanted, *wanted_back), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("epsilon", [-1.0, float("inf"), float("nan")])
def test_an_epsilon_that_was_made_useless(epsilon):
    need("torch")
    import torch

    from weft.torch import BatchNorm

    with pytest.raises(InvalidArgumentError, match=f"eps must be 0 or more, got {epsilon}"):
        BatchNorm(3, eps=epsilon)
    module = BatchNorm(3)
    module.eps = epsilon
    for training in (True, False):
        with pytest.raises(InvalidArgumentError, match="epsilon must be 0 or more"):
            module.train(training)(torch.randn(4, 3))
    assert module.num_batches_tracked == 0


@pytest.mark.parametrize("how", ["forced", "twice", "expanded", "hooks"])
def test_backward_of_a_module_by_every_way(how):
    """The node keeps the statistics as arrays of NumPy; kernels that were forced since, and autograd, get tensors."""
    need("torch")
    import torch

    ours, same = pair(3, dtype=torch.float64)
    x = torch.randn(5, 3, 4, 2, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    theirs = torch.nn.BatchNorm2d(3, dtype=torch.float64)
    theirs.load_state_dict(same.state_dict())
    for module, x in zip((ours, theirs), inputs, strict=True):
        if how == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda v: v.numpy(force=True), torch.from_numpy):
                (module(x) ** 2).sum().backward()
        elif how == "twice":
            (gradient,) = torch.autograd.grad((module(x) ** 3).sum(), x, create_graph=True)
            (gradient**2).sum().backward()
        elif how == "expanded":
            module(x * x).sum(0).sum().backward()
        else:
            y = module(x)
            with kernels.use("reference"):
                (y**2).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-7, atol=1e-9)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-7, atol=1e-9)


def test_statistics_that_may_not_be_changed():
    need("torch")
    import torch

    from weft.torch import BatchNorm

    with torch.inference_mode():
        module = BatchNorm(3)
    with torch.no_grad(), pytest.raises(InvalidArgumentError, match="inference_mode"):
        module(torch.randn(4, 3))
    with torch.inference_mode():
        module(torch.randn(4, 3))
        assert module.num_batches_tracked == 1
    module = BatchNorm(3)
    module.running_mean.requires_grad_()
    module(torch.ones(4, 3))
    torch.testing.assert_close(module.running_mean.detach(), torch.full((3,), 0.1))
    module.num_batches_tracked = torch.tensor([0, 0])
    with pytest.raises(InvalidArgumentError, match="num_batches_tracked must be one number"):
        module(torch.ones(4, 3))
    module = BatchNorm(3)
    module.running_var = torch.ones(1).expand(3)
    with pytest.raises(InvalidArgumentError, match="expanded"):
        module(torch.randn(4, 3))
    assert not module.running_mean.any()
    assert module.num_batches_tracked == 0


def refused(_):
    raise ValueError("there is no room")


@pytest.mark.parametrize("how", ["data of inference", "scale of inference", "hooks"])
def test_a_call_without_a_node_changes_no_statistics(how):
    """The node is made when the kernel has run."""
    need("torch")
    import torch

    module, x = pair(3)[0], torch.randn(4, 3)
    before = copy.deepcopy(module.state_dict())
    with torch.inference_mode():
        if how == "data of inference":
            x = x + 1
        elif how == "scale of inference":
            module.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    with contextlib.ExitStack() as stack:
        if how == "hooks":
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(refused, refused))
        with pytest.raises((RuntimeError, ValueError), match=r"Inference tensors|no room"):
            module(x)
    after = module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name != "weight")


@pytest.mark.parametrize("kernels_of", ["native", "reference"])
def test_a_mask_that_changes_before_the_backward(kernels_of):
    need("torch")
    import torch

    module, x = pair(3)[0], torch.randn(4, 3)
    mask, found = np.array([True, True, False, True]), []
    for change in (False, True):
        leaf, given = x.clone().requires_grad_(), mask.copy()
        with kernels.use(kernels_of) if kernels_of == "reference" else contextlib.nullcontext():
            y = module(leaf, given)
            if change:
                given[:] = True
            (y**3).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("training", [True, False])
def test_several_gradients_at_once(training):
    """torch passes tensors that stand for several, and have no memory that can be read."""
    need("torch")
    import torch

    module = pair(3)[0].train(training)
    x = torch.randn(4, 3, 2, requires_grad=True)
    inputs, y = (x, *module.parameters()), module(x)
    several = torch.randn(5, *y.shape)
    at_once = torch.autograd.grad(y, inputs, several, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, inputs, g, retain_graph=True) for g in several]
    for got, *wanted in zip(at_once, *each, strict=True):
        torch.testing.assert_close(got, torch.stack(wanted))
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(module, x, vectorize=True), jacobian(module, x))
