"""Callers of one batch do not wait for each other where the wait would never end."""

from __future__ import annotations

import pytest
from support.libraries import need

need("torch")

import torch  # noqa: E402

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
    nodes.check(a.grad_fn)

    def check(_):
        with pytest.raises(FailedPreconditionError, match="several callers"):
            nodes.check(a.grad_fn)
        found.append(True)

    loss = (a + b).sum()
    loss.register_hook(check)
    loss.backward()
    assert found == [True]
