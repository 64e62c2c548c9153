"""A batcher whose function runs on another device than its callers' rows: the host, and an NVIDIA device where there is one."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
from support.callers import PATIENCE, together
from support.libraries import need

need("torch")

import torch  # noqa: E402

import weft  # noqa: E402
from weft.errors import FailedPreconditionError, InvalidArgumentError  # noqa: E402

OTHER = pytest.param("cuda:0", marks=pytest.mark.cuda)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()


def rows(count, **more):
    return [torch.randn(i % 2 + 1, 3, dtype=torch.float64, **more) for i in range(count)]


@pytest.mark.parametrize("device", ["cpu", OTHER])
def test_numpy_comes_back_as_numpy(device):
    net = model().to(device)
    policy = weft.batched(net, device=device)
    x = np.random.default_rng(0).normal(size=(2, 3))
    y = policy(x)
    assert type(y) is np.ndarray
    with torch.no_grad():
        np.testing.assert_allclose(y, net(torch.from_numpy(x).to(device)).cpu())


@pytest.mark.parametrize("device", ["cpu", OTHER])
def test_numpy_comes_back_inside_of_lists(device):
    policy = weft.batched(
        lambda x: (weft.PerRow([[row, {"a": row}] for row in x]), weft.Shared([x.sum()])), device=device
    )
    ((row, named),), (total,) = policy(np.ones((1, 3)))
    assert [type(x) for x in (row, named["a"], total)] == [np.ndarray] * 3
    assert (row.tolist(), named["a"].tolist(), total) == ([1, 1, 1], [1, 1, 1], 3)


@pytest.mark.parametrize("device", ["cpu", OTHER])
def test_structures_and_lists(device):
    policy = weft.batched(
        lambda x, *, y: {"sum": x + y, "names": ["row"] * len(x), "per": weft.PerRow(list(x))}, device=device
    )
    x = torch.ones(2, 3)
    found = policy(x, y=x)
    assert found["sum"].device == x.device
    assert found["names"] == ["row", "row"]
    assert [item.device.type for item in found["per"]] == ["cpu", "cpu"]


@pytest.mark.parametrize("device", ["cpu", OTHER])
@pytest.mark.parametrize("home", ["cpu", OTHER])
def test_gradients_go_through_the_moves(device, home):
    net, twin = model().to(device), model()
    xs = rows(6, requires_grad=True)
    mine = [x.detach().to(home).requires_grad_() for x in xs]
    count = sum(map(len, xs))
    policy = weft.batched(net, device=device, max_batch_size=count, max_wait=30.0)
    for each in together([lambda x=x: policy(x).square().sum().backward() for x in mine]):
        each.answer()
    twin(torch.cat(xs)).square().sum().backward()
    for x, wanted in zip(mine, xs, strict=True):
        torch.testing.assert_close(x.grad.cpu(), wanted.grad)
    for p, wanted in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), wanted.grad)
    assert policy.statistics().backwards == 1


@pytest.mark.parametrize("devices", [("cpu", "cpu"), pytest.param(("cpu", "cuda:0"), marks=pytest.mark.cuda)])
def test_each_device_runs_a_batch_at_a_time(devices):
    """Two batches run at once, each on a model of its own."""
    first = model()
    nets = [copy.deepcopy(first).to(device) for device in devices]
    both, running, seen = threading.Barrier(2), [0, 0], []

    def on(i):
        def run(x):
            running[i] += 1
            assert running[i] == 1
            seen.append((i, x.device.type))
            both.wait(PATIENCE)
            running[i] -= 1
            return nets[i](x)

        return run

    policy = weft.batched([on(0), on(1)], devices=devices, max_batch_size=2)
    assert policy.options.parallel == 2
    xs = [torch.randn(2, 3, dtype=torch.float64) for _ in range(6)]
    for x, each in zip(xs, together([lambda x=x: policy(x) for x in xs]), strict=True):
        torch.testing.assert_close(each.answer(), first(x))
    assert sorted(set(seen)) == [(i, torch.device(device).type) for i, device in enumerate(devices)]
    assert len(seen) == 6


def test_a_call_inside_the_function():
    policy = weft.batched(lambda x: policy(x - 1) if x[0, 0] > 0 else x, device="cpu")
    assert policy(np.full((1, 2), 3.0)).tolist() == [[0.0, 0.0]]


def test_what_has_no_meaning_is_refused():
    net = model()
    with pytest.raises(InvalidArgumentError, match="as many functions"):
        weft.batched(net, devices=["cpu", "cpu"])
    with pytest.raises(InvalidArgumentError, match="as many functions"):
        weft.batched([net, model()])
    with pytest.raises(InvalidArgumentError, match="of its own for each device"):
        weft.batched([net, net], devices=["cpu", "cpu"])
    with pytest.raises(InvalidArgumentError, match="must be None where"):
        weft.batched(net, device="cpu", devices=["cpu"])
    with pytest.raises(InvalidArgumentError, match="the number of devices"):
        weft.batched([net, model()], devices=["cpu", "cpu"], parallel=3)
    with pytest.raises(InvalidArgumentError, match="device of PyTorch"):
        weft.batched(net, device="nowhere")
    with pytest.raises(InvalidArgumentError, match="must be on its device"):
        weft.batched(net, device="meta")
    with pytest.raises(InvalidArgumentError, match="vjp must be None"):
        weft.batched(net, device="cpu", vjp=lambda x: (x, lambda dy: dy))

    async def later(x):
        return x

    with pytest.raises(InvalidArgumentError, match="at once"):
        weft.batched(later, device="cpu")
    policy = weft.batched([net, model()], devices=["cpu", "cpu"])
    with pytest.raises(InvalidArgumentError, match="the number of devices"):
        policy.update(parallel=4)
    if not torch.cuda.is_available():
        with pytest.raises(FailedPreconditionError, match="no NVIDIA device"):
            weft.batched(net, device="cuda")


def test_arrays_of_jax_are_refused():
    need("jax")
    import jax.numpy as jnp

    with pytest.raises(InvalidArgumentError, match="device_put"):
        weft.batched(lambda x: x, device="cpu")(jnp.ones((1, 2)))


def test_several_batches_at_once_on_one_device():
    meeting = threading.Barrier(2)

    def f(x):
        meeting.wait(PATIENCE)
        return x * 2

    policy = weft.batched(f, device="cpu", parallel=2, max_batch_size=1)
    answers = [caller.answer() for caller in together([lambda i=i: policy(np.full((1, 1), float(i))) for i in (1, 2)])]
    assert [y.item() for y in answers] == [2, 4]
