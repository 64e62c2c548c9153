"""Callers of one batch do not wait for each other where the wait would never end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.libraries import need

need("torch")

import torch  # noqa: E402

import weft  # noqa: E402
from weft.core import torch_backward  # noqa: E402
from weft.errors import FailedPreconditionError  # noqa: E402


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_a_node_is_not_kept_alive():
    y = Double.apply(torch.ones(2, requires_grad=True))
    nodes = torch_backward.BatchNodes(2)
    nodes.join(y.grad_fn)
    assert nodes._nodes[0]() is y.grad_fn
    del y
    assert nodes._nodes[0]() is None


def test_a_backward_that_covers_two_callers_is_refused():
    x = torch.ones(2, requires_grad=True)
    a, b = Double.apply(x), Double.apply(x)
    found = []
    nodes = torch_backward.BatchNodes(2)
    nodes.join(a.grad_fn)
    nodes.join(b.grad_fn)
    cpu = SimpleNamespace(type="cpu")
    nodes.check(a.grad_fn, cpu)

    def check(_):
        with pytest.raises(FailedPreconditionError, match="several callers"):
            nodes.check(a.grad_fn, cpu)
        found.append(True)

    loss = (a + b).sum()
    loss.register_hook(check)
    loss.backward()
    assert found == [True]


def test_a_device_needs_its_backwards_in_the_caller():
    device = SimpleNamespace(type="cuda")
    with pytest.raises(FailedPreconditionError, match="backward_in_caller"):
        torch_backward.check_thread(device)
    with weft.backward_in_caller():
        torch_backward.check_thread(device)
    with pytest.raises(FailedPreconditionError):
        torch_backward.BatchNodes(2).check(None, device)
    torch_backward.BatchNodes(1).check(None, device)
    torch_backward.check_thread(SimpleNamespace(type="cpu"))
