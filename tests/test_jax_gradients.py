"""Every op that has a gradient, differentiated by JAX, compiled and op by op; and JAX against the other frameworks."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from conftest import back, for_each, need
from gradient_cases import CASES, FRAMEWORKS, TWINS, squared, total

import weft

# Twins are slow tests: JAX takes a second to compile a case.


@pytest.fixture(autouse=True)
def _scope():
    need("jax")
    with weft.scope():
        yield


@for_each("name", [name for name, case in CASES.items() if case.jit], slow=TWINS)
def test_compiled(name):
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


@for_each("name", CASES, slow=TWINS)
def test_op_by_op(name):
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


@for_each("name", CASES, slow=TWINS)
def test_the_frameworks_agree(name):
    for library in FRAMEWORKS:
        need(library)
    import autograd
    import torch

    value, places = total(CASES[name].program), tuple(range(len(CASES[name].arrays)))
    given = [torch.tensor(x, requires_grad=True) for x in CASES[name].arrays]
    by_torch = torch.autograd.grad(value(*given), given)
    by_autograd = autograd.grad(value, places)(*CASES[name].arrays)
    for a, b, c in zip(by_torch, by_autograd, by_jax(name), strict=True):
        np.testing.assert_allclose(back(a), b, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(back(c), b, rtol=1e-9, atol=1e-9)
