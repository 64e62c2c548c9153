"""What JAX does to functions, done to weft's: vmap and jit of batch norm, ragged values with static splits, and clear errors."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import need

import weft
from weft import RaggedTensor, raw_ops
from weft.core.adapters import of
from weft.errors import InvalidArgumentError

rng = np.random.default_rng(3)
SPLITS = np.array([0, 3, 3, 4, 7])


@pytest.fixture(autouse=True)
def _scope():
    need("jax")
    with weft.scope():
        yield


def array(*shape):
    import jax.numpy as jnp

    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def norm(x, scale, offset):
    return weft.batch_norm(x, scale, offset, training=True, axis=1).y


def near(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)


def test_vmap_of_batch_norm():
    import jax

    x, scale, offset = array(4, 6, 3, 2), array(4, 3), array(4, 3)
    near(jax.vmap(norm)(x, scale, offset), np.stack([norm(*given) for given in zip(x, scale, offset, strict=True)]))
    shared = jax.vmap(norm, in_axes=(3, None, None), out_axes=3)(x.transpose(1, 2, 3, 0), scale[0], offset[0])
    near(shared.transpose(3, 0, 1, 2), np.stack([norm(one, scale[0], offset[0]) for one in x]))


@pytest.mark.parametrize("order", [1, 2])
def test_vmap_of_its_gradients(order):
    import jax

    x, scale, offset = array(3, 5, 2), array(3, 2), array(3, 2)

    def value(x, scale, offset):
        return (norm(x, scale, offset) ** 3).sum()

    gradient = jax.grad(value)
    if order == 2:
        gradient = jax.grad(lambda *given: (jax.grad(value)(*given) ** 2).sum())
    one = jax.jit(gradient)
    wanted = np.stack([one(*given) for given in zip(x, scale, offset, strict=True)])
    near(jax.vmap(gradient)(x, scale, offset), wanted)
    near(jax.jit(jax.vmap(gradient))(x, scale, offset), wanted)


def test_vmap_of_the_raw_op():
    import jax

    x, v = array(3, 2, 2, 2, 4), array(3, 4)
    none = array(3, 0)
    got = jax.vmap(lambda x, v, none: raw_ops.FusedBatchNormV3(x, v, v, none, none).y)(x, v, none)
    near(got, np.stack([raw_ops.FusedBatchNormV3(a, b, b, b[:0], b[:0]).y for a, b in zip(x, v, strict=True)]))


@pytest.mark.parametrize("training", [True, False])
def test_vmap_of_the_parameters_alone(monkeypatch, training):
    """The data has its values, the parameters are traced: no kernel that needs values may be chosen."""
    import jax

    native = pytest.importorskip("weft.kernels.native")
    monkeypatch.setattr(native, "JAX_BYTES", {})  # else small arrays are left to JAX
    x, scale, offset, mean, variance = array(5, 2, 2, 3), array(4, 3), array(3), array(3), array(3) ** 2

    def value(scale):
        return (raw_ops.FusedBatchNormV3(x, scale, offset, mean, variance, is_training=training).y ** 3).sum()

    near(jax.vmap(value)(scale), [value(one) for one in scale])
    near(jax.vmap(jax.grad(value))(scale), np.stack([jax.grad(value)(one) for one in scale]))


def test_vmap_of_the_default_alone():
    import jax

    values, defaults = array(7), array(2)

    def padded(default):
        return raw_ops.RaggedTensorToTensor([-1, -1], values, default, [SPLITS], ["ROW_SPLITS"])

    near(jax.vmap(padded)(defaults), np.stack([padded(one) for one in defaults]))


def test_a_compiled_training_step_compiles_once():
    import jax

    traced = []

    @jax.jit
    def step(x, scale, mean, variance):
        traced.append(1)

        def loss(scale):
            result = weft.batch_norm(x, scale, None, mean, variance, training=True, axis=1)
            return (result.y**2).sum(), result[1:]

        (_, running), gradient = jax.value_and_grad(loss, has_aux=True)(scale)
        return scale - 0.1 * gradient, *running

    state = array(3), array(3), abs(array(3))
    for _ in range(3):
        state = step(array(5, 3), *state)
    assert len(traced) == 1
    assert all(np.isfinite(v).all() for v in state)


@pytest.mark.parametrize("outer", ["jit of grad", "grad of jit"])
def test_ragged_values_with_static_splits(outer):
    import jax

    x = array(7, 2)

    def value(x):
        rt = RaggedTensor(x, [SPLITS])
        parts = rt.softmax().flat_values, rt.sum(), rt.to_padded(value=0.0).values, rt[::-1].flat_values
        return sum((p**2).sum() for p in parts)

    wrapped = jax.jit(jax.grad(value)) if outer == "jit of grad" else jax.grad(jax.jit(value))
    near(wrapped(x), jax.grad(value)(x))


def test_traced_splits_say_what_is_needed():
    import jax

    with pytest.raises(InvalidArgumentError, match=r"needed now: under jax\.jit"):
        jax.jit(lambda splits: raw_ops.RaggedTensorToSparse([splits], array(7)))(jax.numpy.asarray(SPLITS))
    with pytest.raises(InvalidArgumentError, match=r"needed now: under jax\.jit"):
        jax.jit(lambda limits: raw_ops.RaggedRange(0, limits, 1))(jax.numpy.arange(3))
    with pytest.raises(InvalidArgumentError, match=r"needed now: under jax\.jit"):
        jax.jit(lambda size: raw_ops.TensorArrayV3(size, "float32").flow)(3)


def test_functions_of_batches_under_jit_say_what_to_do():
    import jax

    def call(x):
        return raw_ops.BatchFunction([x], [], lambda x: x, 1, 4, 0, ["float32"])[0]

    with pytest.raises(InvalidArgumentError, match="outside"):
        jax.jit(call)(array(3))


def test_what_is_asked_of_jax():
    """The adapter looks at two things without a public name: whether a tracer has a value, and whether anything is traced."""
    import jax

    seen = []

    def look(x):
        seen.append((of("jax").gradients_on(), of("jax").has_value(x)))
        return x.sum()

    look(array(2))
    jax.grad(look)(array(2))
    jax.jit(look)(array(2))
    jax.vmap(look)(array(2, 2))
    assert seen == [("off", True), ("on", True), ("on", False), ("on", False)]
