"""Every op that has a gradient, in every framework: the loops over the op table."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from conftest import back, need
from gradient_cases import CASES, CONSTANT, FRAMEWORKS, TWINS, differentiable, like

import weft
from weft import raw_ops
from weft._op import TABLE


def cases(names, seldom=frozenset()):
    """A test for each of these cases, a slow one for those of `seldom`."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow][: n in seldom]) for n in names])


every_case = cases(CASES)


@pytest.fixture(autouse=True)
def _scope(request):
    for library in FRAMEWORKS:
        if library in request.function.__name__:
            need(library)
    with weft.scope():
        yield


def several(result):
    return tuple(result) if isinstance(result, list) else (result,)


def squared(program):
    """The program's results squared, so that the second derivative is not zero where it is linear."""
    return lambda *arrays: tuple(y * y for y in several(program(*arrays)))


def total(program):
    """A number made of all that a program returns, not linear in any of it; each entry weighs differently."""

    def value(*arrays):
        return sum((weights(y) * (y * y * y + y)).sum() for y in several(program(*arrays)))

    return value


def weights(y):
    return like(y, np.resize([-1.7, -0.7, 0.3, 1.3, 2.3], y.shape))


def test_every_op_with_a_gradient_has_a_case():
    assert {op for case in CASES.values() for op in case.ops} == differentiable()


@every_case
def test_a_case_goes_through_its_ops(name, monkeypatch):
    case, seen = CASES[name], set()
    for op in TABLE.values():
        monkeypatch.setattr(op, "function", lambda *a, op=op, f=op.function, **k: (seen.add(op.name), f(*a, **k))[1])
    case.program(*case.arrays)
    assert seen >= set(case.ops)


@pytest.mark.parametrize("op", sorted(CONSTANT))
def test_what_passes_nothing_on_says_so(op):
    _, pull = weft.vjp(getattr(raw_ops, op), np.float64(0), np.float64(3), np.float64(1))
    assert pull() == {}


def test_the_grad_op_of_batch_norm_in_training_is_differentiated_through_the_forward_op():
    """Alone, with statistics held fast, its derivative by x is another: it recomputes them from x, as in TensorFlow."""
    rng = np.random.default_rng(0)
    (g, x, direction), scale = rng.normal(size=(3, 2, 2, 2, 3)), rng.normal(size=3)
    used = raw_ops.FusedBatchNormV3(x, scale, scale, scale[:0], scale[:0])

    def value(x, scale=scale):
        reserve = used.reserve_space_1, used.reserve_space_2, used.reserve_space_3
        return raw_ops.FusedBatchNormGradV3(g, x, scale, *reserve).x_backprop

    _, pull = weft.vjp(raw_ops.FusedBatchNormGradV3, g, x, scale, *used[3:])
    found = (pull(x_backprop=g)["x"] * direction).sum()
    alone = (g * (value(x + 1e-6 * direction) - value(x - 1e-6 * direction)) / 2e-6).sum()
    assert abs(found - alone) > 0.1 * abs(alone)


# --- torch ---


def leaves(name, dtype="float64", strided=False):
    import torch

    found = []
    for x in CASES[name].arrays:
        x = torch.from_numpy(x.copy()).to(getattr(torch, dtype))
        if strided and x.ndim:  # every second entry of something larger, with the axes the other way round
            axes = tuple(reversed(range(x.ndim)))
            x = torch.stack([x, x + 1], -1).permute(*axes, x.ndim).contiguous()[..., 0].permute(axes)
        found.append(x.detach().requires_grad_())
    return found


@every_case
def test_torch(name):
    import torch

    program = CASES[name].program
    assert torch.autograd.gradcheck(lambda *x: several(program(*x)), leaves(name), fast_mode=False)
    assert torch.autograd.gradgradcheck(squared(program), leaves(name), fast_mode=True)


@every_case
def test_torch_strides(name):
    import torch

    given = leaves(name, strided=True)
    assert any(x.ndim < 2 or not x.is_contiguous() for x in given)
    assert torch.autograd.gradcheck(squared(CASES[name].program), given, fast_mode=True)
    assert torch.autograd.gradgradcheck(squared(CASES[name].program), given, fast_mode=True)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.orders > 2])
def test_torch_third_order(name):
    import torch

    given = leaves(name)

    def first(*arrays):
        return torch.autograd.grad(total(CASES[name].program)(*arrays), arrays, create_graph=True)

    assert torch.autograd.gradgradcheck(first, given, fast_mode=True)


#: How far a gradient of few digits may be off, of its largest entry.
DTYPES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


@pytest.mark.parametrize(
    ("name", "dtype"),
    # The first version of batch norm has float32 alone.
    [(n, d) for n, case in CASES.items() for d in DTYPES if d == "float32" or "FusedBatchNorm" not in case.ops],
)
def test_torch_dtypes(name, dtype):
    """The gradients of few digits are those of many, but for rounding."""
    import torch

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


@every_case
def test_torch_only_some_inputs(name):
    """With one input at a time that needs a gradient, it gets what it gets among the others."""
    import torch

    value = total(CASES[name].program)
    wanted = torch.autograd.grad(value(*(given := leaves(name))), given)
    for i, gradient in enumerate(wanted):
        some = [x.detach().requires_grad_(i == j) for j, x in enumerate(leaves(name))]
        value(*some).backward()
        np.testing.assert_allclose(some[i].grad, gradient, rtol=1e-12, atol=1e-12)
        assert all(x.grad is None for j, x in enumerate(some) if i != j)


@every_case
def test_torch_unused_outputs_and_retain_graph(name):
    import torch

    def gradients(y, given):
        found = torch.autograd.grad((y**2).sum(), given, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]

    results = several(CASES[name].program(*(given := leaves(name))))
    each = [gradients(y, given) for y in results]
    again = [gradients(y, given) for y in results]
    whole = gradients(torch.cat([y.reshape(-1) for y in results]), given)
    for i, total in enumerate(whole):
        np.testing.assert_array_equal([g[i] for g in each], [g[i] for g in again])
        np.testing.assert_allclose(sum(g[i] for g in each), total, rtol=1e-9, atol=1e-9)


@every_case
def test_torch_without_gradients_there_is_no_node(name):
    import torch

    with torch.no_grad():
        assert not any(y.grad_fn for y in several(CASES[name].program(*leaves(name))))
    plain = [x.detach() for x in leaves(name)]
    assert not any(y.requires_grad for y in several(CASES[name].program(*plain)))


# --- JAX ---


# JAX takes a second to compile a case.


@cases([name for name, case in CASES.items() if case.jit], seldom=TWINS)
def test_jax_compiled(name):
    import jax
    from jax.test_util import check_grads

    with jax.enable_x64(True):
        given = [jax.numpy.asarray(x) for x in CASES[name].arrays]
        check_grads(jax.jit(squared(CASES[name].program)), given, order=2, modes=["rev"])


@cache
def by_jax(name):
    """The gradients of a case's `total`, op by op."""
    import jax

    with jax.enable_x64(True):
        given = map(jax.numpy.asarray, CASES[name].arrays)
        return jax.grad(total(CASES[name].program), tuple(range(len(CASES[name].arrays))))(*given)


@cases(CASES, seldom=TWINS)
def test_jax_eager(name):
    """Where it can be compiled, the same gradient as compiled; where not, both orders checked."""
    import jax
    from jax.test_util import check_grads

    with jax.enable_x64(True):
        given = [jax.numpy.asarray(x) for x in CASES[name].arrays]
        if not CASES[name].jit:
            check_grads(squared(CASES[name].program), given, order=2, modes=["rev"])
            return
        wanted = jax.jit(jax.grad(total(CASES[name].program), range(len(given))))(*given)
        for a, b in zip(by_jax(name), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


# --- HIPS autograd ---


@every_case
def test_autograd(name):
    from autograd.test_util import check_grads

    for y in range(len(several(CASES[name].program(*CASES[name].arrays)))):
        check_grads(lambda *x, y=y: squared(CASES[name].program)(*x)[y], modes=["rev"], order=2)(*CASES[name].arrays)


# --- where two frameworks are there ---


@cases(CASES, seldom=TWINS)
def test_the_frameworks_agree(name):
    for library in FRAMEWORKS:
        need(library)
    import autograd
    import torch

    value, places = total(CASES[name].program), tuple(range(len(CASES[name].arrays)))
    by_torch = torch.autograd.grad(value(*(given := leaves(name))), given)
    by_autograd = autograd.grad(value, places)(*CASES[name].arrays)
    for a, b, c in zip(by_torch, by_autograd, by_jax(name), strict=True):
        np.testing.assert_allclose(back(a), b, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(back(c), b, rtol=1e-9, atol=1e-9)
