"""Each private name of JAX behaves as weft expects; without the name, the fallback answers."""

from __future__ import annotations

import importlib.util
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from support.libraries import need, wide_numbers

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


# ---- the context of a thread


def mode():
    """The mode of this thread."""
    return internals.mode_of(internals.seen_here())


def in_thread(call):
    """What `call()` returns in a new thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_can_be_in_the_context_of_another():
    def seen(context=None):
        with nullcontext() if context is None else context.use():
            return jnp.arange(3.0).dtype.name, jax.config.jax_default_matmul_precision, mode() == wide

    with wide_numbers(), jax.default_matmul_precision("float32"):
        wide = mode()
        assert wide.is_movable
        assert in_thread(seen) == ("float32", None, False)
        assert in_thread(lambda: seen(wide)) == ("float64", "float32", True)
        assert seen(plain := in_thread(mode)) == ("float32", None, False)
        assert seen() == ("float64", "float32", True)
    assert mode() == plain


def test_what_is_set_inside_a_context_ends_with_it():
    plain, left = mode(), wide_numbers()
    with plain.use():
        left.__enter__()
        assert mode() != plain
    assert mode() == plain


def test_guards_are_set_as_their_context_manager_does():
    with jax.transfer_guard("disallow"):
        guarded = mode()

    def use():
        with guarded.use(), pytest.raises(Exception, match=r"[Dd]isallowed"):
            jnp.zeros(2) + np.ones(2)
        return jnp.zeros(2) + np.ones(2)

    assert in_thread(use).tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning")
def test_contexts_that_stay_in_their_thread():
    if hasattr(jax, "make_user_context"):
        with jax.make_user_context(None)(1):
            assert not mode().is_movable
            assert mode() != in_thread(mode)
    with jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",)):
        assert not mode().is_movable
    assert mode().is_movable
    seen = []
    jax.vmap(lambda x: seen.append(mode().is_movable) or x, axis_name="rows")(jnp.ones(2))
    jax.grad(lambda x: seen.append(mode().is_movable) or x)(1.0)
    assert seen == [False, True]


def test_few_contexts_are_remembered(monkeypatch):
    monkeypatch.setattr(internals, "_MOST_MODES", 2)
    for name in ("float32", "bfloat16", "tensorfloat32", "highest"):
        with jax.default_matmul_precision(name):
            assert mode() == mode()
    assert len(internals._modes) <= 2


@pytest.mark.parametrize("name", ["trace_context", "config_states", "config_ext"])
def test_without_the_names_a_context_stays_in_its_thread(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(jax._src.config, name)
        spec = importlib.util.spec_from_file_location("weft.core.other_internals", internals.__file__)
        other = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(other)

    def mode():
        return other.mode_of(other.seen_here())

    plain = mode()
    assert plain.is_movable
    assert in_thread(mode) == plain
    with wide_numbers():
        assert mode() != plain
        assert not mode().is_movable
        with plain.use():
            assert jnp.arange(3.0).dtype == "float64"
    assert mode() == plain
