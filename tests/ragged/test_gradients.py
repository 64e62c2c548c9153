"""Every ragged gradient is the transpose of its op, to second order, in every framework."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import back, for_each, need

import weft
from weft import RaggedTensor, VariantArray, raw_ops
from weft.ragged import rows as row_ops

OUTER, INNER = np.array([0, 2, 2, 5]), np.array([0, 1, 4, 4, 6, 7])
FLAT = np.array([0, 3, 3, 4, 7])
RNG = np.random.default_rng(7)
X = RNG.standard_normal((7, 2))


def decode(variant, rank, dtype):
    return raw_ops.RaggedTensorFromVariant(variant, -1, rank, dtype).output_dense_values


def through_rows(x):
    v = raw_ops.RaggedTensorToVariant([FLAT], x, True)
    return decode(VariantArray.stack([v[2], v[0], v[0]]), 1, x.dtype)


def through_nested(x):
    v = raw_ops.RaggedTensorToVariant([OUTER, INNER], x, True)
    return decode(VariantArray.stack([v[2], v[0]]).reshape((2, 1)), 3, x.dtype)


def through_matrix(x):
    return decode(raw_ops.RaggedTensorToVariant([FLAT], x, True).reshape((2, 2)), 2, x.dtype)


def through_rank_0(x):
    v = raw_ops.RaggedTensorToVariant([], x, True)
    return decode(VariantArray.stack([v[3], v[1], v[3]]), 0, x.dtype)


def through_slice(x):
    return decode(raw_ops.RaggedTensorToVariant([FLAT], x, True)[1:3], 1, x.dtype)


def used_twice(x):
    v = raw_ops.RaggedTensorToVariant([FLAT], x, True)
    return decode(v + v, 1, x.dtype) * decode(v, 1, x.dtype)


def gradient_op(x):
    v = raw_ops.RaggedTensorToVariant([FLAT], x, True)
    mixed = VariantArray([v[0], None, v[2], None])
    return raw_ops.RaggedTensorToVariantGradient(mixed, FLAT, (7, 2), x.dtype)


def gather(x):
    return raw_ops.RaggedGather([OUTER, INNER], x, np.array([[2, 0], [2, 1]]), 3).output_dense_values


def to_sparse(x):
    return raw_ops.RaggedTensorToSparse([OUTER, INNER], x).sparse_values


def to_tensor(x):
    tensors, kinds = [OUTER, INNER], ["ROW_SPLITS"] * 2
    return raw_ops.RaggedTensorToTensor(np.array([2, 2, 2, 2]), x, x[0, :1] * 0 + 1, tensors, kinds)


def fill_rows(x):
    return raw_ops.RaggedFillEmptyRows(np.array([4, 1, 1, 2, 0, 6, 6]), x[:, 0], np.array(8), x[0, 1]).output_values


def fill_rows_grad(x):
    back_ = raw_ops.RaggedFillEmptyRowsGrad(np.array([1, 2, 5]), x[:, 0])
    return back_.d_values * back_.d_default_value


RAGGED = {
    "sum": lambda x: RaggedTensor(x, [FLAT]).sum(),
    "mean": lambda x: RaggedTensor(x, [np.array([0, 3, 4, 7])]).mean(),
    "max": lambda x: RaggedTensor(x, [np.array([0, 3, 4, 7])]).max(),
    "softmax": lambda x: RaggedTensor(x, [FLAT]).softmax().flat_values,
    "map_rows": lambda x: RaggedTensor(x, [FLAT]).map_rows(lambda row: row * row).flat_values,
    "to_padded": lambda x: RaggedTensor(x, [FLAT]).to_padded(2).values,
    "concat rows": lambda x: RaggedTensor.concat([RaggedTensor(x, [FLAT]), RaggedTensor(x * x, [FLAT])], 1).flat_values,
    "parts": lambda x: RaggedTensor(x, [FLAT])[:, 1:].flat_values,
    "spread": lambda x: RaggedTensor(x, [FLAT]).spread(x[:4] * 2).flat_values,
}
PROGRAMS = {
    f.__name__: f
    for f in (
        through_rows,
        through_nested,
        through_matrix,
        through_rank_0,
        through_slice,
        used_twice,
        gradient_op,
        gather,
        to_sparse,
        to_tensor,
        fill_rows,
        fill_rows_grad,
    )
} | RAGGED


@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_orders_1_and_2(name):
    need("torch")
    import torch

    x = torch.from_numpy(X.copy()).requires_grad_()
    program = PROGRAMS[name]
    assert torch.autograd.gradcheck(program, (x,))
    # Squared, so that the second derivative is not zero where the program is linear.
    assert torch.autograd.gradgradcheck(lambda x: program(x) ** 2, (x,))


# JAX compiles every step of a check: what tests/core/test_jax_gradients.py has not.
COMPILED = ["through_nested", "through_rank_0", "max", "softmax"]


@for_each("name", COMPILED, slow=["through_rank_0", "softmax"])
def test_jax_orders_1_and_2(name):
    need("jax")
    import jax
    from jax.test_util import check_grads

    with jax.enable_x64(True):
        x = jax.numpy.asarray(X)
        check_grads(lambda x: PROGRAMS[name](x) ** 2, (x,), order=2, modes=["rev"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_autograd_orders_1_and_2(name):
    need("autograd")
    from autograd.test_util import check_grads

    check_grads(lambda x: PROGRAMS[name](x) ** 2, modes=["rev"], order=2)(X.copy())


@for_each(
    "name", ["gather", "to_tensor", "sum", "softmax", "map_rows", "through_rows"], slow=["gather", "sum", "map_rows"]
)
def test_jax_compiles_with_fixed_splits(name):
    need("jax")
    import jax

    x = jax.numpy.asarray(X, "float32")
    plain = jax.grad(lambda x: (PROGRAMS[name](x) ** 2).sum())
    np.testing.assert_allclose(back(jax.jit(plain)(x)), back(plain(x)), rtol=1e-5, atol=1e-6)


def dot(a, b):
    return sum(float((x.values * y.values).sum()) for x, y in zip(a.elements(), b.elements(), strict=True))


@pytest.mark.parametrize("splits", [[], [FLAT], [OUTER, INNER]])
@pytest.mark.parametrize("batched", [True, False])
def test_encode_gradient_is_its_transpose(splits, batched):
    encoded, pull = weft.vjp(raw_ops.RaggedTensorToVariant, splits, X, batched)
    g = like(encoded)
    np.testing.assert_allclose(dot(encoded, g), (X * pull(g)["rt_dense_values"]).sum())


def like(encoded):
    elements = [e and (e.splits, RNG.standard_normal(e.values.shape)) for e in encoded.elements()]
    return VariantArray(elements, encoded.shape)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 1, 2)])
def test_decode_gradient_is_its_transpose(shape):
    encoded = raw_ops.RaggedTensorToVariant([FLAT], X, True).reshape(shape)
    decoded, pull = weft.vjp(raw_ops.RaggedTensorFromVariant, encoded, -1, len(shape), "float64")
    g = RNG.standard_normal(X.shape)
    back_ = pull(output_dense_values=g)["encoded_ragged"]
    assert back_.shape == shape
    np.testing.assert_allclose(dot(encoded, back_), (decoded.output_dense_values * g).sum())


def test_decode_gradient_of_stack_and_scalar():
    encoded = raw_ops.RaggedTensorToVariant([], X, True)
    _, pull = weft.vjp(raw_ops.RaggedTensorFromVariant, encoded, -1, 0, "float64")
    assert pull(output_dense_values=X)["encoded_ragged"] == encoded
    scalar = raw_ops.RaggedTensorToVariant([FLAT], X, False)
    _, pull = weft.vjp(raw_ops.RaggedTensorFromVariant, scalar, -1, 1, "float64")
    assert pull(output_dense_values=X)["encoded_ragged"] == scalar


def test_gradient_op_gradient_is_its_transpose():
    rows = raw_ops.RaggedTensorToVariant([FLAT], X, True)
    for given in (rows, VariantArray([rows[0], None, rows[2], None])):
        laid, pull = weft.vjp(raw_ops.RaggedTensorToVariantGradient, given, FLAT, (7, 2), "float64")
        g = RNG.standard_normal(laid.shape)
        back_ = pull(g)["encoded_ragged_grad"]
        assert [e is None for e in back_.elements()] == [e is None for e in given.elements()]
        held = [(a, b) for a, b in zip(given.elements(), back_.elements(), strict=True) if a is not None]
        np.testing.assert_allclose(sum((a.values * b.values).sum() for a, b in held), (laid * g).sum())


def test_a_missing_cotangent_is_zeros():
    _, pull = weft.vjp(raw_ops.RaggedTensorToVariant, [FLAT], X, True)
    np.testing.assert_array_equal(pull()["rt_dense_values"], np.zeros_like(X))
    filler = VariantArray([None] * 4)
    np.testing.assert_array_equal(pull(filler)["rt_dense_values"], np.zeros_like(X))


def test_one_row_of_a_nested_encoding():
    _, pull = weft.vjp(raw_ops.RaggedTensorToVariant, [OUTER, INNER], X, True)
    g = VariantArray([None, None, ([[0, 0, 2, 3]], np.ones((3, 2)))])
    np.testing.assert_array_equal(pull(g)["rt_dense_values"], np.repeat([0.0, 1.0], [4, 3])[:, None] * np.ones(2))


def numeric(f, x, g, step=1e-6):
    """The gradient of `(f(x) * g).sum()` by central differences."""
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        out[i] = ((f(up) - f(down)) * g).sum() / (2 * step)
    return out


TABLE = {
    "RaggedGather": (lambda x: ([FLAT], x, np.array([3, 0, 3]), 1), "params_dense_values", "output_dense_values"),
    "RaggedTensorToSparse": (lambda x: ([FLAT], x), "rt_dense_values", "sparse_values"),
    "RaggedTensorToTensor": (
        lambda x: (
            -1,
            x,
            np.zeros((1,)),
            [np.array(3), np.array([0, 0, 1, 1, 1, 2, 2])],
            ["FIRST_DIM_SIZE", "VALUE_ROWIDS"],
        ),
        "values",
        None,
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_numpy_pull_back_against_differences(name):
    arguments, into, field = TABLE[name]
    op = getattr(raw_ops, name)

    def f(x):
        out = op(*arguments(x))
        return getattr(out, field) if field else out

    out, pull = weft.vjp(op, *arguments(X))
    g = RNG.standard_normal((getattr(out, field) if field else out).shape)
    got = pull(**{field or op.outputs[0]: g})[into]
    np.testing.assert_allclose(got, numeric(f, X, g), atol=1e-7)


def test_default_value_gets_the_sum_over_the_padding():
    values, default = X[:3], np.array([[0.5]])[0]
    call = (-1, values, default, [np.array([0, 1, 3])], ["ROW_SPLITS"])
    out, pull = weft.vjp(raw_ops.RaggedTensorToTensor, *call)
    g = RNG.standard_normal(out.shape)
    np.testing.assert_allclose(pull(g)["default_value"], [g[0, 1].sum()])


def test_integers_have_no_gradient():
    _, pull = weft.vjp(raw_ops.RaggedGather, [FLAT], np.arange(7), np.array([0]), 1)
    assert pull() == {}


def test_range_is_not_differentiable():
    need("torch")
    import torch

    x = torch.tensor(3.0, requires_grad=True)
    assert not raw_ops.RaggedRange(torch.tensor(0.0), x, torch.tensor(1.0)).rt_dense_values.requires_grad
    _, pull = weft.vjp(raw_ops.RaggedRange, np.float64(0), np.float64(3), np.float64(1))
    assert pull() == {}


def test_counts_and_cross_have_none():
    for name in ("RaggedBincount", "RaggedCountSparseOutput", "RaggedCross"):
        assert getattr(raw_ops, name).gradient is None
    with pytest.raises(LookupError):
        weft.vjp(raw_ops.RaggedBincount, np.array([0, 1]), np.array([0]), np.array(1), np.array([1.0]))


def test_rows_of_4000_are_one_node():
    need("torch")
    import torch

    x = torch.ones(8000, requires_grad=True)
    v = raw_ops.RaggedTensorToVariant([np.arange(4001) * 2], x, True)
    rows = v.rows().values
    assert len({id(row.grad_fn) for row in rows}) == 1
    torch.stack([row.sum() * i for i, row in enumerate(rows)]).sum().backward()
    np.testing.assert_array_equal(back(x.grad), np.repeat(np.arange(4000.0), 2))


def test_rows_cut_without_gradients_are_cut_again_with_them():
    need("torch")
    import torch

    x = torch.ones(4, requires_grad=True)
    v = raw_ops.RaggedTensorToVariant([np.array([0, 2, 4])], x, True)
    with torch.no_grad():
        assert v[0].item().values.grad_fn is None
    (v[0].item().values * 3).sum().backward()
    assert x.grad.tolist() == [3, 3, 0, 0]


def test_rows_can_go_backward_one_after_the_other():
    need("torch")
    import torch

    x = torch.ones(4, requires_grad=True)
    v = raw_ops.RaggedTensorToVariant([np.array([0, 2, 4])], x, True)
    for i in range(2):
        (v[i].item().values * (i + 1)).sum().backward()
    assert x.grad.tolist() == [1, 1, 2, 2]


def test_torch_func():
    need("torch")
    import torch

    x = torch.from_numpy(X.copy())
    grad = torch.func.grad(lambda x: (through_rows(x) ** 2).sum())(x)
    expected = weft.vjp(row_ops.row_sum, X, FLAT)  # the table works beside a functorch transform
    assert expected[0].shape == (4, 2)
    wanted = 2 * X * np.repeat([2, 0, 1, 0], np.diff(FLAT))[:, None]
    np.testing.assert_allclose(back(grad), wanted)
