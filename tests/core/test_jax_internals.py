"""Each private name of JAX behaves as weft expects; without the name, the fallback answers."""

from __future__ import annotations

import pytest
from support.libraries import need

need("jax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from weft.core import jax_internals as internals  # noqa: E402


def seen_in(transform):
    """What `is_tracing` and `has_value` say inside a transformed function."""
    seen = []

    def function(x):
        seen.append((internals.is_tracing(), internals.has_value(x)))
        return x * 2

    transform(function)(jnp.float32(1))
    return seen


def test_an_array_has_a_value_outside_transformations():
    assert seen_in(lambda f: f) == [(False, True)]


def test_an_eager_gradient_has_values():
    assert seen_in(jax.grad) == [(True, True)]


def test_compiled_functions_have_none():
    assert seen_in(jax.jit) == [(True, False)]


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_without_the_names_only_arrays_have_values(monkeypatch, transform):
    monkeypatch.setattr(internals, "_trace_state_clean", None)
    monkeypatch.setattr(internals, "_is_concrete", None)
    assert seen_in(lambda f: f) == [(True, True)]
    assert seen_in(transform) == [(True, False)]
