"""The two nodes of a caller on an accelerator, here on host tensors: what they hand over, and what they refuse."""

from __future__ import annotations

import threading

import pytest
from support.callers import together
from support.libraries import need

need("torch")

import torch  # noqa: E402

import weft  # noqa: E402
from weft import raw_ops  # noqa: E402
from weft.core import torch_backward, torch_split  # noqa: E402
from weft.errors import FailedPreconditionError  # noqa: E402


@pytest.fixture(autouse=True)
def _split(monkeypatch):
    monkeypatch.setattr(torch_split, "splits_on_host", True)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def rows(callers=4):
    return [torch.randn(i % 3 + 1, 4, dtype=torch.float64, requires_grad=True) for i in range(callers)]


def expected(net, xs):
    mine = [x.detach().clone().requires_grad_() for x in xs]
    parts = net(torch.cat(mine)).split([len(x) for x in xs])
    sum((part * (i + 1)).sum() for i, part in enumerate(parts)).backward()
    found = [p.grad.clone() for p in net.parameters()], [x.grad for x in mine]
    net.zero_grad()
    return found


def check(net, xs, wanted):
    for got, right in zip([*net.parameters(), *xs], [*wanted[0], *wanted[1]], strict=True):
        torch.testing.assert_close(got.grad, right)


def batcher(f, xs, **options):
    count = sum(map(len, xs))
    return weft.batched(f, max_batch_size=count, min_batch_size=count, max_wait=30.0, **options)


def go_back(f, xs):
    return together([lambda i=i, x=x: (f(x) * (i + 1)).sum().backward() for i, x in enumerate(xs)])


@pytest.mark.parametrize("waits", [True, False])
def test_a_batch_goes_back_once(net, waits):
    xs = rows()
    wanted = expected(net, xs)
    policy = batcher(net, xs, wait_backward=waits)
    for each in go_back(policy, xs):
        each.answer()
    policy.join()
    check(net, xs, wanted)
    assert policy.statistics().backwards == 1


def test_one_backward_over_several_callers(net):
    xs = rows()
    wanted = expected(net, xs)
    policy = batcher(net, xs)
    ys = [each.answer() for each in together([lambda x=x: policy(x) for x in xs])]
    sum((y * (i + 1)).sum() for i, y in enumerate(ys)).backward()
    check(net, xs, wanted)


def test_the_chain_of_ops(net):
    xs = rows(3)
    wanted = expected(net, xs)

    def chain(x):
        made = raw_ops.Batch([x], 1, 6, 30_000_000, 20_000_000)
        return raw_ops.Unbatch(net(made.batched_tensors[0]), made.batch_index, made.id, timeout_micros=20_000_000)

    with weft.scope():
        for each in go_back(chain, xs):
            each.answer()
    check(net, xs, wanted)


def test_the_chain_of_ops_twice():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def chain(x):
        made = raw_ops.Batch([x, x * 2], 1, 2, 0, 20_000_000)
        p, _ = made.batched_tensors  # the other output has no gradient
        return raw_ops.Unbatch(p.sin(), made.batch_index, made.id, timeout_micros=20_000_000)

    with weft.scope():
        assert torch.autograd.gradcheck(chain, x)
        assert torch.autograd.gradgradcheck(chain, x)


def test_outputs_without_a_gradient(net):
    policy = weft.batched(lambda x: (net(x), x * 2))
    x = rows(1)[0]
    first, _ = policy(x)
    first.sum().backward()
    wanted = x.detach().clone().requires_grad_()
    net(wanted).sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)


def test_a_wait_in_the_thread_of_a_device_is_refused(net, monkeypatch):
    """Where a backward is called inside another backward, both nodes run in the device's thread."""
    monkeypatch.setattr(torch_backward, "device_threads", known := {threading.get_ident()})
    with pytest.raises(FailedPreconditionError, match="must not wait"):
        torch_backward.check_thread()
    with pytest.raises(FailedPreconditionError, match="must not wait"):
        torch_backward.BatchNodes(2).check(None)
    torch_backward.BatchNodes(1).check(None)
    xs = rows(2)
    policy = batcher(net, xs)
    ys = [each.answer() for each in together([lambda x=x: policy(x) for x in xs])]
    with pytest.raises(FailedPreconditionError, match="must not wait"):
        ys[0].sum().backward(retain_graph=True)
    known.clear()
    for each in together([ys[0].sum().backward, ys[1].sum().backward]):  # the refusal changed nothing
        each.answer()
