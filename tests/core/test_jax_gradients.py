"""Every op that has a gradient, differentiated by JAX, compiled and op by op; and JAX against the other frameworks."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support.gradient_cases import CASES, FEW, FRAMEWORKS, TWINS, cubes, several, squared, total
from support.libraries import back, for_each, need

import weft

STEP = 1e-5
COMPILED = [name for name, case in CASES.items() if case.jit]


@pytest.fixture(autouse=True)
def _scope():
    need("jax")
    import jax

    with weft.scope(), jax.enable_x64(True):
        yield


# JAX takes some tenths of a second to compile a program: the fewer, and the fewer times, the better.


def places(name):
    return tuple(range(len(CASES[name].arrays)))


@cache
def compiled(name):
    """The number that `total` makes of a case, and its gradients: one program."""
    import jax

    return jax.jit(jax.value_and_grad(total(CASES[name].program), places(name)))


@for_each("name", COMPILED, slow=CASES.keys() - FEW)
def test_compiled(name):
    """Both orders, against differences along a direction."""
    import jax

    arrays, rng = CASES[name].arrays, np.random.default_rng(5)
    along = [rng.normal(size=x.shape) for x in arrays]
    (low, below), (high, above) = (
        compiled(name)(*(x + step * d for x, d in zip(arrays, along, strict=True))) for step in (-STEP, STEP)
    )
    _, first = compiled(name)(*arrays)
    np.testing.assert_allclose(inner(first, along), (high - low) / (2 * STEP), rtol=1e-6)

    def slope(*given):
        return inner(jax.grad(total(CASES[name].program), places(name))(*given), along)

    for found, a, b in zip(jax.jit(jax.grad(slope, places(name)))(*arrays), below, above, strict=True):
        wanted = (np.asarray(b) - a) / (2 * STEP)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


def inner(given, others):
    return sum((a * b).sum() for a, b in zip(given, others, strict=True))


def op_by_op(name):
    """The number and its gradients, the case itself not compiled."""
    import jax

    def value(*arrays):
        return jax.jit(cubes)(several(CASES[name].program(*arrays)))

    return jax.value_and_grad(value, places(name))(*map(jax.numpy.asarray, CASES[name].arrays))


@for_each("name", COMPILED, slow=CASES.keys() - {"batch_norm_V3_NHWC_training", "variants", "written"})
def test_op_by_op(name):
    """The same gradients as compiled."""
    for a, b in zip(op_by_op(name)[1], compiled(name)(*CASES[name].arrays)[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@for_each("name", [name for name in CASES if name not in COMPILED])
def test_what_cannot_be_compiled(name):
    from jax.test_util import check_grads

    check_grads(squared(CASES[name].program), CASES[name].arrays, order=2, modes=["rev"])


@for_each("name", CASES, slow=TWINS)
def test_the_frameworks_agree(name):
    for library in FRAMEWORKS:
        need(library)
    import autograd
    import torch

    value = total(CASES[name].program)
    given = [torch.tensor(x, requires_grad=True) for x in CASES[name].arrays]
    by_torch = torch.autograd.grad(value(*given), given)
    _, by_jax = compiled(name)(*CASES[name].arrays) if name in COMPILED else op_by_op(name)
    by_autograd = autograd.grad(value, places(name))(*CASES[name].arrays)
    for a, b, c in zip(by_torch, by_autograd, by_jax, strict=True):
        np.testing.assert_allclose(back(a), b, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(back(c), b, rtol=1e-9, atol=1e-9)
