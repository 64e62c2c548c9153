"""What the chain of gradients asks of PyTorch's engine: which nodes a backward runs, and in which thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from support.libraries import need

import weft
from weft.core import torch_internals as _backward
from weft.errors import FailedPreconditionError


def recorded(x, see):
    """`x` doubled; `see` is called when its backward runs."""
    import torch

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            see()
            return g * 2

    return Double.apply(x)


def two():
    """Two outputs with a node each, and what either sees of the other when it runs."""
    need("torch")
    import torch

    x = torch.ones(2, requires_grad=True)
    seen = []
    a = recorded(x, lambda: seen.append(("a", _backward.is_covered(b.grad_fn))))
    b = recorded(x, lambda: seen.append(("b", _backward.is_covered(a.grad_fn))))
    return x, a, b, seen


def test_a_backward_covers_what_it_runs():
    x, a, b, seen = two()
    a.sum().backward(retain_graph=True)
    assert seen == [("a", False)]
    seen.clear()
    (a + b).sum().backward(retain_graph=True)
    assert sorted(seen) == [("a", True), ("b", True)]
    seen.clear()
    b.sum().backward(inputs=[x])
    assert seen == [("b", False)]


def test_grad_covers_what_leads_to_its_inputs():
    x, a, b, seen = two()
    import torch

    torch.autograd.grad((a * b).sum(), x, retain_graph=True)
    assert sorted(seen) == [("a", True), ("b", True)]
    seen.clear()
    torch.autograd.grad((a * b).sum(), a)
    assert seen == []


def test_nothing_is_covered_outside_a_backward():
    _, a, _, _ = two()
    assert not _backward.is_covered(a.grad_fn)


def test_another_thread_covers_nothing_of_ours():
    _, a, _, seen = two()
    inside, go = threading.Event(), threading.Event()

    def wait():
        inside.set()
        assert go.wait(20)

    other = threading.Thread(target=lambda: recorded(a, wait).sum().backward(), daemon=True)
    other.start()
    assert inside.wait(20)
    assert not _backward.is_covered(a.grad_fn)
    go.set()
    other.join(20)
    assert seen == [("a", False)]


def test_a_party_keeps_no_node_alive():
    need("torch")
    import torch

    y = recorded(torch.ones(2, requires_grad=True), print)
    nodes = _backward.BatchNodes(2)
    nodes.join(y.grad_fn)
    assert nodes._nodes[0]() is y.grad_fn
    del y
    assert nodes._nodes[0]() is None


def test_a_party_refuses_a_backward_that_covers_two_of_it():
    _, a, b, _ = two()
    found = []
    nodes = _backward.BatchNodes(2)
    nodes.join(a.grad_fn)
    nodes.join(b.grad_fn)
    cpu = SimpleNamespace(type="cpu")
    nodes.check(a.grad_fn, cpu)

    def check():
        with pytest.raises(FailedPreconditionError, match="several callers"):
            nodes.check(a.grad_fn, cpu)
        found.append(True)

    (recorded(a, check) + b).sum().backward()
    assert found == [True]


def test_a_device_needs_its_backwards_in_the_caller():
    need("torch")
    device = SimpleNamespace(type="cuda")
    with pytest.raises(FailedPreconditionError, match="backward_in_caller"):
        _backward.check_thread(device)
    with weft.backward_in_caller():
        _backward.check_thread(device)
    with pytest.raises(FailedPreconditionError):
        _backward.BatchNodes(2).check(None, device)
    _backward.BatchNodes(1).check(None, device)
    _backward.check_thread(SimpleNamespace(type="cpu"))
