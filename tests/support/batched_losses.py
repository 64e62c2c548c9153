"""Losses of batched calls in torch, and what their gradients must be."""

from __future__ import annotations

import pytest

from support.callers import together

torch = pytest.importorskip("torch")
SIZES = [1, 3, 2, 5]
ROWS = sum(SIZES)


def two_layers():
    """The model of these tests, the same each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()


def inputs(sizes=SIZES, grad=True):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 4, dtype=torch.double, generator=generator).requires_grad_(grad) for n in sizes]


def loss(y, i):
    return (y * (i + 1)).square().sum()


def expected(net, xs, f=None):
    """The gradients of parameters and inputs: of the sum of all losses, over one batch made by hand."""
    rows = [x.detach().clone().requires_grad_() for x in xs]
    out = (f or net)(torch.cat(rows))
    sum(loss(y, i) for i, y in enumerate(out.split([len(x) for x in xs]))).backward()
    found = [p.grad.clone() for p in net.parameters()], [x.grad for x in rows]
    net.zero_grad()
    return found


def close(net, xs, want):
    """Whether parameters and inputs have the gradients they should."""
    for p, grad in zip(net.parameters(), want[0], strict=True):
        torch.testing.assert_close(p.grad, grad)
    for x, grad in zip(xs, want[1], strict=True):
        if x.requires_grad and x.is_leaf:
            torch.testing.assert_close(x.grad, grad)


def go(policy, xs, back=lambda y, i: loss(y, i).backward()):
    """Call and go back, each in its own thread, in one batch."""
    callers = together([lambda x=x, i=i: back(policy(x), i) for i, x in enumerate(xs)])
    return [caller.answer() for caller in callers]
