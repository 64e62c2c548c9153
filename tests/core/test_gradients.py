"""Every op that has a gradient: a case for each, and HIPS autograd's derivatives; torch's and JAX's have files of their own."""

from __future__ import annotations

import numpy as np
import pytest
from support.gradient_cases import CASES, CONSTANT, differentiable, several, squared
from support.libraries import for_each, need

import weft
from weft import raw_ops
from weft.core.op import TABLE


@pytest.fixture(autouse=True)
def _scope():
    with weft.scope():
        yield


def test_every_op_with_a_gradient_has_a_case():
    assert {op for case in CASES.values() for op in case.ops} == differentiable()


@for_each("name", CASES)
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


@for_each("name", CASES)
def test_autograd(name):
    need("autograd")
    from autograd.test_util import check_grads

    for y in range(len(several(CASES[name].program(*CASES[name].arrays)))):
        check_grads(lambda *x, y=y: squared(CASES[name].program)(*x)[y], modes=["rev"], order=2)(*CASES[name].arrays)
