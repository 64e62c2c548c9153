"""NumPy arrays beside arrays of JAX: taken as JAX's, in ops, classes, batched calls and gradients; arrays over several devices."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from support.libraries import for_each, need

import weft
from weft import RaggedTensor, TensorArray, raw_ops
from weft.errors import InvalidArgumentError

need("jax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from support.gradient_cases import CASES, FEW, TWINS, several  # noqa: E402

X = np.linspace(-1, 2, 24, dtype=np.float32).reshape(2, 2, 2, 3)
V = np.ones(3, np.float32)
SPLITS = np.array([0, 2, 2, 5])


def is_jax(*arrays):
    return all(isinstance(x, jax.Array) for x in arrays)


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ">f4"])
def test_batch_norm_op(place, dtype):
    """One array of JAX is enough; float64 becomes float32, as JAX has it."""
    given = [np.asarray(x, dtype) for x in (X, V, V, V, V)]
    given[place] = jnp.asarray(np.asarray(given[place], np.float32))
    made = raw_ops.FusedBatchNormV3(*given)
    wanted = raw_ops.FusedBatchNormV3(X, V, V, V, V)
    assert is_jax(*made)
    np.testing.assert_allclose(made.y, wanted.y, rtol=1e-5, atol=1e-6)


def test_every_op_that_has_data():
    values, default = jnp.arange(5.0), np.float32(7)
    padded = raw_ops.RaggedTensorToTensor(np.array([-1, -1]), values, default, [SPLITS], ["ROW_SPLITS"])
    assert is_jax(padded)
    assert padded.tolist() == [[0, 1, 7], [7, 7, 7], [2, 3, 4]]
    filled = raw_ops.RaggedFillEmptyRows(np.array([0, 2]), np.ones(2, np.float32), np.array(3), jnp.float32(4))
    assert is_jax(filled.output_values)
    assert filled.output_values.tolist() == [1, 4, 1]
    ranges = raw_ops.RaggedRange(jnp.zeros(2), np.full(2, 2.0, np.float32), np.ones(2, np.float32))
    assert ranges.rt_dense_values.tolist() == [0, 1, 0, 1]
    y = raw_ops.BatchNormWithGlobalNormalization(X, jnp.asarray(V), V, V, V, 0.0, True)
    assert is_jax(y)
    with weft.scope():
        made = raw_ops.Batch([np.ones((2, 3)), jnp.ones((2, 4))], 1, 2, 0, 0)
        assert is_jax(*made.batched_tensors)
        assert isinstance(made.batch_index, np.ndarray), "what is read on the host stays NumPy's, in 64 bits"
        joined = raw_ops.UnbatchGrad(np.ones((2, 3), np.float32), made.batch_index, jnp.ones((2, 3)), made.id)
        assert is_jax(joined)


def test_beside_torch_numpy_is_refused_but_for_what_is_read_on_the_host():
    need("torch")
    import torch

    with pytest.raises(InvalidArgumentError, match="one library"):
        raw_ops.BatchNormWithGlobalNormalization(X, torch.ones(3), V, V, V, 0.0, True)
    with pytest.raises(InvalidArgumentError, match="one library"):
        raw_ops.RaggedTensorToTensor(-1, torch.ones(5), np.float32(0), [SPLITS], ["ROW_SPLITS"])
    made = raw_ops.RaggedTensorToTensor(np.array([-1, -1]), torch.ones(5), 0.0, [SPLITS], ["ROW_SPLITS"])
    assert made.shape == (3, 3)
    with weft.scope():
        assert raw_ops.Unbatch(torch.ones(2, 3), np.array([[7, 0, 2]]), np.array(7), 1000).shape == (2, 3)


def test_int32_arrays_of_jax_where_int64_is_asked():
    """JAX has no int64 by default. Ids of batches need all 64 bits."""
    ids, splits, weights = np.array([0, 2], np.int32), np.array([0, 1, 2], np.int32), np.zeros(0, np.float32)
    calls = [
        lambda to: raw_ops.RaggedFillEmptyRows(to(ids), jnp.ones(2), to(np.int32(3)), jnp.float32(4)),
        lambda to: raw_ops.RaggedFillEmptyRowsGrad(to(ids), jnp.ones(3)),
        lambda to: raw_ops.RaggedBincount(to(splits), to(ids), to(np.int32(3)), weights),
        lambda to: raw_ops.RaggedCountSparseOutput(to(splits), to(ids), weights, False),
    ]
    for call in calls:
        call(jnp.asarray)
        with pytest.raises(InvalidArgumentError, match="must be int64, got int32"):
            call(lambda x: x)
    with weft.scope(), pytest.raises(InvalidArgumentError, match="batch_index must be int64, got int32"):
        raw_ops.Unbatch(jnp.ones((2, 3)), jnp.asarray([[7, 0, 2]]), 7, 1000)


def test_classes():
    assert is_jax(*weft.batch_norm(X, jnp.ones(3), V, V, V, training=True))
    assert is_jax(weft.batch_norm(jnp.asarray(X), V, training=True, mask=np.array([True, False])).y)
    rt = RaggedTensor.from_row_splits(jnp.arange(5.0), SPLITS)
    assert is_jax((rt + np.float32(1)).flat_values, (rt * np.ones(())).flat_values)
    assert is_jax(RaggedTensor.from_rows([np.ones(2, np.float32), jnp.zeros(3)]).flat_values)
    assert is_jax(rt.to_padded(value=np.float32(2)).values)


@pytest.mark.parametrize("first", ["numpy", "jax"])
def test_tensor_array(first):
    ta = TensorArray("float32", 4, element_shape=[2])
    rows = [np.full(2, i, np.float32) for i in range(4)]
    as_jax = (0, 3) if first == "jax" else (1, 2)
    for i in as_jax:
        rows[i] = jnp.asarray(rows[i])
    for i, row in enumerate(rows[:2]):
        ta.write(i, row)
    ta.scatter([2], rows[2][None])
    ta.write(3, rows[3])
    stacked = ta.stack()
    assert is_jax(stacked, ta.read(0), ta.read(1))
    assert stacked.tolist() == [[i, i] for i in range(4)]


def test_tensor_array_under_grad():
    """A constant of NumPy is written first, what is differentiated after it."""

    def f(x):
        ta = TensorArray("float32", 2, element_shape=[2]).write(0, np.ones(2, np.float32)).write(1, x)
        return (ta.stack() ** 2).sum()

    assert jax.grad(f)(jnp.array([3.0, 4.0])).tolist() == [6, 8]


def test_batched():
    with weft.batched(lambda x, y: x * y, max_batch_size=4) as f:
        assert is_jax(f(jnp.ones((2, 3)), np.full((2, 3), 2.0, np.float32)))
        gradient = jax.grad(lambda x: f(x, np.full((2, 3), 2.0, np.float32)).sum())(jnp.ones((2, 3)))
        assert gradient.tolist() == [[2, 2, 2]] * 2
    with weft.batched(lambda x: jnp.asarray(x) * 2, max_batch_size=4) as f:
        np.testing.assert_array_equal(f(np.ones((2, 3), ">f4")), np.full((2, 3), 2))


def test_transforms():
    def f(x):
        return raw_ops.FusedBatchNormV3(x, V, V, V, V).y.sum()

    def g(scale):
        return (raw_ops.FusedBatchNormV3(X, scale, V, V, V).y ** 2).sum()

    x = jnp.asarray(X)
    np.testing.assert_allclose(jax.jit(f)(x), f(x), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(g))(jnp.asarray(V)), jax.grad(g)(jnp.asarray(V)), rtol=1e-5)
    assert jax.vmap(f)(jnp.stack([x, x])).shape == (2,)
    value, pull_back = jax.vjp(f, X)  # what is differentiated is NumPy's itself
    assert is_jax(*pull_back(np.ones_like(value)))


@for_each("name", sorted(CASES.keys() - TWINS), slow=CASES.keys() - FEW)
@for_each("order", [1, 2], slow=[2])
def test_check_grads(name, order):
    """JAX's own test of gradients hands NumPy arrays to the function."""
    case = CASES[name]
    arrays = [np.asarray(x, np.float32) for x in case.arrays]

    def program(*given):
        with weft.scope():
            return [jnp.asarray(y) for y in several(case.program(*given))]

    check_grads(program, arrays, order, modes=["rev"], atol=0.05, rtol=0.05, eps=1e-2)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, Mesh, PartitionSpec as P
import weft
from weft import raw_ops
mesh = Mesh(np.array(jax.devices()), ("rows",))
assert len(jax.devices()) == 4
x = jax.device_put(jnp.arange(96.0).reshape(4, 2, 4, 3), NamedSharding(mesh, P("rows")))
v = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
one = [jnp.asarray(np.asarray(a)) for a in (x, v)]
y = raw_ops.FusedBatchNormV3(x, v, v, v, v).y
np.testing.assert_allclose(y, raw_ops.FusedBatchNormV3(one[0], *[one[1]] * 4).y, rtol=1e-5, atol=1e-5)
np.testing.assert_allclose(weft.batch_norm(x, v, training=True).y, weft.batch_norm(one[0], one[1], training=True).y, atol=1e-5)
g = jax.grad(lambda x: (raw_ops.FusedBatchNormV3(x, v, v, v, v).y ** 3).sum())(x)
assert g.shape == x.shape
flat = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("rows")))
splits = np.array([0, 2, 2, 5, 8])
def attempts():
    rt = weft.RaggedTensor.from_row_splits(flat, splits)
    yield lambda: rt.sum()
    yield lambda: rt.softmax().flat_values
    yield lambda: rt.to_padded().values
    yield lambda: rt.gather([0, 2]).flat_values
    yield lambda: raw_ops.RaggedTensorToTensor(-1, flat, 0.0, [splits], ["ROW_SPLITS"])
    yield lambda: raw_ops.Batch([flat], 1, 8, 0, 0).batched_tensors[0]
    yield lambda: raw_ops.Unbatch(flat, np.array([[7, 0, 8]]), np.array(7), 1000)
    yield lambda: raw_ops.UnbatchGrad(flat, np.array([[7, 0, 8]]), flat, np.array(7))
    yield lambda: raw_ops.BatchFunction([flat], [], lambda x: x, 1, 8, 0, ["float32"])[0]
    yield lambda: weft.TensorArray().unstack(flat).stack()
    yield lambda: weft.TensorArray("float32", 2).write(0, flat).read(0)
    yield lambda: raw_ops.RaggedTensorToVariant([splits], flat, True).rows().values[0]
    yield lambda: weft.batched(lambda x: x * 1, max_batch_size=8)(flat)
worked = 0
for call in attempts():
    try:
        np.asarray(call())
        worked += 1
    except weft.errors.OpError as error:
        print("refused:", error)
print("worked:", worked)
"""


def test_arrays_over_several_devices():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", SHARDED], capture_output=True, text=True, timeout=300, env=os.environ | environment
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "worked: 13" in run.stdout, run.stdout


def test_deleted_arrays_are_refused():
    gone = jnp.ones(3)
    gone.delete()
    for call in (
        lambda: raw_ops.FusedBatchNormV3(jnp.asarray(X), gone, V, V, V),
        lambda: raw_ops.Batch([gone], 1, 3, 0, 0),
        lambda: RaggedTensor.from_row_splits(gone, [0, 3]),
        lambda: TensorArray("float32", 1).write(0, gone),
        lambda: weft.batch_norm(jnp.asarray(X), gone, training=True),
        lambda: weft.batched(lambda x: x, max_batch_size=3)(gone),
    ):
        with pytest.raises(InvalidArgumentError, match="deleted"):
            call()
