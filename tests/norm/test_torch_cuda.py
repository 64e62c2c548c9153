"""Batch norm on an NVIDIA device: the ops and the module give what they give on the CPU, and choose the Triton kernels."""

from __future__ import annotations

import copy

import pytest

import weft
from weft import kernels, raw_ops
from weft.errors import OpError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda


def close(got, wanted, tolerance=2e-4):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_ops(training, factor):
    x, g = torch.randn(4, 5, 6, 8) + 2, torch.randn(4, 5, 6, 8)
    vectors = [torch.rand(8) + 0.5 for _ in range(4)]
    attributes = {"epsilon": 1e-3, "exponential_avg_factor": factor, "is_training": training}
    wanted = raw_ops.FusedBatchNormV3(x, *vectors, **attributes)
    got = raw_ops.FusedBatchNormV3(x.cuda(), *(v.cuda() for v in vectors), **attributes)
    close(got, wanted)
    used = (g, x, vectors[0], *wanted[3:])
    wanted = raw_ops.FusedBatchNormGradV3(*used, epsilon=1e-3, is_training=training)
    close(raw_ops.FusedBatchNormGradV3(*(v.cuda() for v in used), epsilon=1e-3, is_training=training), wanted)


@pytest.mark.parametrize("shape", [(6, 8, 5, 7), (6, 8), (3, 8, 2, 3, 4)])
@pytest.mark.parametrize("last", [False, True])
def test_module_is_torchs(shape, last):
    torch.manual_seed(0)
    kind = {2: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}[len(shape)]
    theirs = kind(8).cuda()
    with torch.no_grad():
        theirs.weight.copy_(torch.rand(8) + 0.5)
    ours = weft.torch.convert(copy.deepcopy(theirs))
    for _ in range(3):
        x = torch.randn(shape, device="cuda") * 3 + 1
        if last and len(shape) > 3:
            x = x.contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = theirs(a), ours(b)
        weights = torch.randn_like(y)
        (y * weights).sum().backward()
        (z * weights).sum().backward()
        assert z.stride() == y.stride()
        close([z.cpu().detach()], [y.cpu().detach()])
        close(
            [b.grad, ours.weight.grad, ours.bias.grad],
            [v.cpu() for v in (a.grad, theirs.weight.grad, theirs.bias.grad)],
        )
    close(ours.state_dict().values(), [v.cpu() for v in theirs.state_dict().values()])
    theirs.eval()
    ours.eval()
    close([ours(x).detach()], [theirs(x).detach().cpu()])
    with torch.no_grad():
        close([ours(x)], [theirs(x).cpu()])


def test_second_order_is_that_of_the_cpu():
    torch.manual_seed(0)
    module = weft.torch.BatchNorm(3)
    twin = copy.deepcopy(module).cuda()
    x = torch.randn(5, 3, 4)

    def second(module, x):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad((module(x) ** 3).sum(), x, create_graph=True)
        (first**2).sum().backward()
        return x.grad, module.weight.grad

    close(second(twin, x.cuda()), second(module, x), 1e-3)


def test_masked_rows():
    x, mask = torch.randn(6, 4, 3), torch.tensor([True, False, True, True, False, True])
    module = weft.torch.BatchNorm(4)
    twin = copy.deepcopy(module).cuda()
    close([twin(x.cuda(), mask.cuda()).detach()], [module(x, mask).detach()])
    close(twin.state_dict().values(), list(module.state_dict().values()))


def test_the_choice_is_told():
    x = torch.ones(2, 3, device="cuda")
    assert kernels.which("batch_norm", x) == "cuda"
    assert kernels.which("batch_norm", x.double()) == "reference"
    assert kernels.which("batch_norm", x[:0]) == "reference"
    with kernels.use("reference"):
        assert kernels.which("batch_norm", x) == "reference"


def test_vectors_elsewhere_are_refused():
    x, v = torch.ones(2, 2, 2, 3, device="cuda"), torch.ones(3)
    with pytest.raises((OpError, ValueError)):
        raw_ops.FusedBatchNormV3(x, v, v, v, v)


def test_streams_and_graphs():
    x = torch.randn(32, 14, 14, 64, device="cuda")
    one = torch.ones(64, device="cuda")
    kernel = kernels.best("batch_norm", x)
    wanted = kernel(x, one, one, 1e-3, 3, None)[0]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(kernel(x, one, one, 1e-3, 3, None)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(y, wanted) for y in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = [kernel(x, one, one, 1e-3, 3, None)[0] for _ in range(3)]
    for _ in range(3):
        for y in ys:
            y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, wanted) for y in ys)


@pytest.mark.parametrize("what", ["data", "scale", "running_mean"])
def test_a_call_without_a_node_changes_no_statistics(what):
    """What was made in inference mode cannot be saved for a gradient, or cannot be changed outside of it."""
    module, x = weft.torch.BatchNorm(3).cuda(), torch.randn(4, 3, 5, device="cuda")
    before = copy.deepcopy(module.state_dict())
    with torch.inference_mode():
        if what == "data":
            x = x + 1
        elif what == "scale":
            module.weight = torch.nn.Parameter(torch.ones(3, device="cuda"), requires_grad=False)
        else:
            module.running_mean = torch.zeros(3, device="cuda")
    with pytest.raises((RuntimeError, OpError), match=r"Inference tensors|inference_mode"):
        module(x)
    after = module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name != "weight")


def test_several_gradients_at_once():
    module, x = weft.torch.BatchNorm(3).cuda(), torch.randn(4, 3, 5, device="cuda", requires_grad=True)
    y = module(x)
    several = torch.randn(5, *y.shape, device="cuda")
    (at_once,) = torch.autograd.grad(y, x, several, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in several]
    torch.testing.assert_close(at_once, torch.stack(each))
