"""Every op that has a gradient, differentiated by torch."""

from __future__ import annotations

import numpy as np
import pytest
from support.gradient_cases import CASES, several, squared, total, weights
from support.libraries import for_each, need

import weft
from weft.errors import FailedPreconditionError

need("torch")
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _scope():
    with weft.scope():
        yield


def leaves(name, dtype="float64", strided=False):
    found = []
    for x in CASES[name].arrays:
        x = torch.from_numpy(x.copy()).to(getattr(torch, dtype))
        if strided and x.ndim:  # every second entry of something larger, with the axes the other way round
            axes = tuple(reversed(range(x.ndim)))
            x = torch.stack([x, x + 1], -1).permute(*axes, x.ndim).contiguous()[..., 0].permute(axes)
        found.append(x.detach().requires_grad_())
    return found


@for_each("name", CASES)
def test_two_orders(name):
    program = CASES[name].program
    assert torch.autograd.gradcheck(lambda *x: several(program(*x)), leaves(name), fast_mode=False)
    assert torch.autograd.gradgradcheck(squared(program), leaves(name), fast_mode=True)


@for_each("name", CASES)
def test_strides(name):
    given = leaves(name, strided=True)
    assert any(x.ndim < 2 or not x.is_contiguous() for x in given)
    assert torch.autograd.gradcheck(squared(CASES[name].program), given, fast_mode=True)
    assert torch.autograd.gradgradcheck(squared(CASES[name].program), given, fast_mode=True)


@for_each("name", CASES)
def test_several_gradients_at_once(name):
    given = leaves(name)
    outputs = several(CASES[name].program(*given))
    grads = [torch.rand(3, *y.shape, dtype=y.dtype) for y in outputs]
    if {"Batch", "Unbatch", "UnbatchGrad"} & set(CASES[name].ops):
        with pytest.raises(FailedPreconditionError, match="waits for the gradients of other callers"):
            torch.autograd.grad(outputs, given, grads, is_grads_batched=True)
        return
    at_once = torch.autograd.grad(outputs, given, grads, is_grads_batched=True, retain_graph=True, allow_unused=True)
    each = [
        torch.autograd.grad(outputs, given, list(entry), retain_graph=True, allow_unused=True)
        for entry in zip(*grads, strict=True)
    ]
    for got, *wanted in zip(at_once, *each, strict=True):
        assert (got is None) == (wanted[0] is None)
        if got is not None:
            torch.testing.assert_close(got, torch.stack(wanted))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.orders > 2])
def test_third_order(name):
    given = leaves(name)

    def first(*arrays):
        return torch.autograd.grad(total(CASES[name].program)(*arrays), arrays, create_graph=True)

    assert torch.autograd.gradgradcheck(first, given, fast_mode=True)


#: How far a gradient of few digits may be off, of its largest entry.
DTYPES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


# The first version of batch norm has float32 alone. Half precision takes long to compile; see kernels/test_batch_norm.py.
@for_each(
    ("name", "dtype"),
    [(n, d) for n, case in CASES.items() for d in DTYPES if d == "float32" or "FusedBatchNorm" not in case.ops],
    slow=[
        (n, d) for n, case in CASES.items() for d in DTYPES if "16" in d and any("BatchNorm" in op for op in case.ops)
    ],
)
def test_dtypes(name, dtype):
    """The gradients of few digits are those of many, but for rounding."""
    case = CASES[name]
    # Beside half precision, scale, offset and statistics are float32.
    is_mixed = any("BatchNorm" in op and "Global" not in op for op in case.ops)
    given = [x if is_mixed and x.ndim == 1 else x.to(getattr(torch, dtype)) for x in leaves(name, "float32")]
    given = [x.detach().requires_grad_() for x in given]
    exact = [x.detach().double().requires_grad_() for x in given]

    def gradients(arrays):
        return torch.autograd.grad(sum((y * weights(y)).sum() for y in several(case.program(*arrays))), arrays)

    for x, a, b in zip(given, gradients(given), gradients(exact), strict=True):
        assert a.dtype == x.dtype
        np.testing.assert_allclose(a.double(), b, rtol=0, atol=DTYPES[dtype] * (b.abs().max() + 1))


@for_each("name", CASES)
def test_only_some_inputs(name):
    """With one input at a time that needs a gradient, it gets what it gets among the others."""
    value = total(CASES[name].program)
    wanted = torch.autograd.grad(value(*(given := leaves(name))), given)
    for i, gradient in enumerate(wanted):
        some = [x.detach().requires_grad_(i == j) for j, x in enumerate(leaves(name))]
        value(*some).backward()
        np.testing.assert_allclose(some[i].grad, gradient, rtol=1e-12, atol=1e-12)
        assert all(x.grad is None for j, x in enumerate(some) if i != j)


@for_each("name", CASES)
def test_unused_outputs_and_retain_graph(name):
    def gradients(y, given):
        found = torch.autograd.grad((y**2).sum(), given, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]

    results = several(CASES[name].program(*(given := leaves(name))))
    each = [gradients(y, given) for y in results]
    again = [gradients(y, given) for y in results]
    whole = gradients(torch.cat([y.reshape(-1) for y in results]), given)
    for i, wanted in enumerate(whole):
        np.testing.assert_array_equal([g[i] for g in each], [g[i] for g in again])
        np.testing.assert_allclose(sum(g[i] for g in each), wanted, rtol=1e-9, atol=1e-9)


@for_each("name", CASES)
def test_without_gradients_there_is_no_node(name):
    with torch.no_grad():
        assert not any(y.grad_fn for y in several(CASES[name].program(*leaves(name))))
    plain = [x.detach() for x in leaves(name)]
    assert not any(y.requires_grad for y in several(CASES[name].program(*plain)))
