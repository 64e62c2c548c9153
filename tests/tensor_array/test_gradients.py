"""Gradients: TensorFlow's registered ones by hand, and the frameworks' own through the elements, which must agree."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import back, for_each, need, to

import weft
from weft import errors, raw_ops


class Tape:
    """Array ops and the pull-backs of each, run backwards under one gradient source."""

    def __init__(self):
        self.back = []

    def __call__(self, op, *args, take=None, **attributes):
        """The op's result; `take` names what is done with the gradient of its `value`, or gives that of its result."""
        result, pull = weft.vjp(getattr(raw_ops, op), *args, **attributes)
        self.back.append((pull, take))
        return result

    def gradients(self, cotangents, source=None):
        """The gradients of all written values, by the name they were written under."""
        found = {}
        with weft.gradient_source(source) as used:
            for pull, take in reversed(self.back):
                given = cotangents.get(take)
                grads = pull(given) if given is not None else pull()
                if "value" in grads:
                    found[take] = found.get(take, 0) + grads["value"]
        return found, used


def program(x, y, ops):
    """Writes, a scatter, reads, a gather: a function of x (two values) and y (two rows)."""
    handle, flow = ops("TensorArrayV3", 4, "float64", clear_after_read=False)
    flow = ops("TensorArrayWriteV3", handle, 0, x[0], flow, take="x0")
    flow = ops("TensorArrayScatterV3", handle, [3, 1], y, flow, take="y")
    flow = ops("TensorArrayWriteV3", handle, 2, x[1], flow, take="x1")
    a = ops("TensorArrayReadV3", handle, 0, flow, "float64", take="a")
    b = ops("TensorArrayReadV3", handle, 0, flow, "float64", take="b")
    c = ops("TensorArrayGatherV3", handle, [1, 2, 1], flow, "float64", take="c")
    joined = ops("TensorArrayConcatV3", handle, flow, "float64", take="d")
    return {"a": a, "b": b, "c": c, "d": joined.value}


def forward(op, *args, take=None, **attributes):
    return getattr(raw_ops, op)(*args, **attributes)


def loss(results, weights, square=True):
    """A number made of all results, not linear in any."""
    return sum((weights[name] * (r * r * r if square else r)).sum() for name, r in results.items())


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    x, y = [rng.normal(size=3), rng.normal(size=3)], rng.normal(size=(2, 3))
    shapes = {"a": (3,), "b": (3,), "c": (3, 3), "d": (12,)}
    return x, y, {name: rng.normal(size=shape) for name, shape in shapes.items()}


def by_hand(x, y, weights):
    """The gradients of `loss(program(x, y))` from the gradient table."""

    class Ops(Tape):
        def __call__(self, op, *args, take=None, **attributes):
            if op == "TensorArrayV3":
                return raw_ops.TensorArrayV3(*args, **attributes)
            return super().__call__(op, *args, take=take, **attributes)

    tape = Ops()
    results = program(x, y, tape)
    found, _ = tape.gradients({name: 3 * weights[name] * r * r for name, r in results.items()})
    return found


def test_the_registered_gradients_agree_with_finite_differences():
    x, y, weights = inputs()
    found = by_hand(x, y, weights)
    for name, array in (("x0", x[0]), ("x1", x[1]), ("y", y)):
        numeric = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            kept = array[index]
            values = []
            for step in (1e-5, -1e-5):
                array[index] = kept + step
                values.append(loss(program(x, y, forward), weights))
            array[index] = kept
            numeric[index] = (values[0] - values[1]) / 2e-5
        np.testing.assert_allclose(found[name], numeric, rtol=1e-6, atol=1e-7)


def test_torch_differentiates_through_the_elements_to_the_same_numbers():
    need("torch")
    import torch

    x, y, weights = inputs(1)
    x0, x1, rows = (torch.tensor(v, requires_grad=True) for v in (*x, y))
    results = program([x0, x1], rows, forward)
    loss(results, {name: torch.tensor(w) for name, w in weights.items()}).backward()
    found = by_hand(x, y, weights)
    for name, tensor in (("x0", x0), ("x1", x1), ("y", rows)):
        np.testing.assert_allclose(tensor.grad.numpy(), found[name], rtol=1e-12)


def test_the_registered_gradients_of_torch_tensors_are_the_same():
    need("torch")
    import torch

    x, y, weights = inputs(2)
    found = by_hand([torch.tensor(v) for v in x], torch.tensor(y), {k: torch.tensor(w) for k, w in weights.items()})
    for name, wanted in by_hand(x, y, weights).items():
        np.testing.assert_allclose(found[name].numpy(), wanted, rtol=1e-12)


def test_jax_and_autograd_agree_too():
    need("jax")
    need("autograd")
    import autograd
    import jax

    x, y, weights = inputs(3)
    found = by_hand(x, y, weights)
    whole = np.concatenate([*x, y.ravel()])
    wanted = np.concatenate([found["x0"], found["x1"], found["y"].ravel()])

    def value(flat):
        return loss(program([flat[:3], flat[3:6]], flat[6:].reshape(2, 3), forward), weights)

    np.testing.assert_allclose(autograd.grad(value)(whole), wanted, rtol=1e-12)
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.grad(value)(jax.numpy.asarray(whole)), wanted, rtol=1e-12)
        np.testing.assert_allclose(jax.jit(jax.grad(value))(jax.numpy.asarray(whole)), wanted, rtol=1e-12)


def test_first_and_second_order_in_torch():
    need("torch")
    import torch

    x, y, weights = inputs(4)
    given = [torch.tensor(v, requires_grad=True) for v in (*x, y)]
    scale = {name: torch.tensor(w) for name, w in weights.items()}

    def value(x0, x1, rows):
        return loss(program([x0, x1], rows, forward), scale)

    assert torch.autograd.gradcheck(value, given)
    assert torch.autograd.gradgradcheck(value, given)


@for_each("is_compiled", [True, False], slow=[False])
def test_first_and_second_order_in_jax(is_compiled):
    need("jax")
    import jax
    from jax.test_util import check_grads

    x, y, weights = inputs(5)
    with jax.enable_x64(True):
        arrays = [jax.numpy.asarray(v) for v in (*x, y)]

        def value(x0, x1, rows):
            return loss(program([x0, x1], rows, forward), weights)

        check_grads(jax.jit(value) if is_compiled else value, arrays, order=2)


def test_first_and_second_order_in_autograd():
    need("autograd")
    from autograd.test_util import check_grads

    x, y, weights = inputs(6)

    def value(flat):
        return loss(program([flat[:3], flat[3:6]], flat[6:].reshape(2, 3), forward), weights)

    check_grads(value, modes=["rev"], order=2)(np.concatenate([*x, y.ravel()]))


def test_split_and_concat_are_each_others_gradient(library):
    value = np.arange(10, dtype=np.float32).reshape(5, 2)
    for lengths in ([2, 0, 3], [5]):
        handle, flow = raw_ops.TensorArrayV3(len(lengths), "float32", clear_after_read=False)
        flow, pull_split = weft.vjp(raw_ops.TensorArraySplitV3, handle, to(library, value), lengths, flow)
        joined, pull_concat = weft.vjp(raw_ops.TensorArrayConcatV3, handle, flow, "float32")
        np.testing.assert_array_equal(back(joined.value), value)
        with weft.gradient_source():
            pull_concat(to(library, 2 * value))
            pull_concat(to(library, value))
            np.testing.assert_array_equal(back(pull_split()["value"]), 3 * value)


def test_split_keeps_the_graph_of_torch_and_jax():
    need("torch")
    need("jax")
    import jax
    import torch

    weights = np.arange(8.0, dtype=np.float32).reshape(4, 2)

    def value(x, w):
        handle, flow = raw_ops.TensorArrayV3(3, "float32", clear_after_read=False)
        raw_ops.TensorArraySplitV3(handle, x, [1, 0, 3], flow)
        joined = raw_ops.TensorArrayConcatV3(handle, flow, "float32").value
        return (w * joined * joined).sum() + (raw_ops.TensorArrayReadV3(handle, 2, flow, "float32") ** 3).sum()

    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)
    wanted = 2 * weights * x
    wanted[1:] += 3 * x[1:] ** 2
    tensor = torch.tensor(x, requires_grad=True)
    value(tensor, torch.tensor(weights)).backward()
    np.testing.assert_allclose(tensor.grad.numpy(), wanted, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(value)(jax.numpy.asarray(x), weights), wanted, rtol=1e-5)


def test_an_accumulator_that_carries_a_graph_is_summed_out_of_place():
    need("torch")
    import torch

    handle = raw_ops.TensorArrayV3(1, "float64").handle
    gradient = raw_ops.TensorArrayGradV3(handle, 0.0, "g").grad_handle
    a = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    kept = a * a
    raw_ops.TensorArrayWriteV3(gradient, 0, kept, 0.0)
    with torch.no_grad():
        raw_ops.TensorArrayWriteV3(gradient, 0, torch.ones(2, dtype=torch.float64), 0.0)
    raw_ops.TensorArrayWriteV3(gradient, 0, 3 * a, 0.0)
    total = raw_ops.TensorArrayReadV3(gradient, 0, 0.0, "float64")
    total.sum().backward()
    assert kept.tolist() == [1, 4]
    assert a.grad.tolist() == [3, 3]  # as everywhere in torch, a sum under no_grad has no graph


def test_autograd_adds_traced_and_plain_gradients():
    need("autograd")
    import autograd

    def value(x):
        handle = raw_ops.TensorArrayV3(1, "float64").handle
        gradient = raw_ops.TensorArrayGradV3(handle, 0.0, "g").grad_handle
        raw_ops.TensorArrayWriteV3(gradient, 0, np.ones(2), 0.0)
        raw_ops.TensorArrayWriteV3(gradient, 0, x * x, 0.0)
        raw_ops.TensorArrayWriteV3(gradient, 0, np.ones(2), 0.0)
        return raw_ops.TensorArrayReadV3(gradient, 0, 0.0, "float64").sum()

    np.testing.assert_allclose(autograd.grad(value)(np.array([1.0, 2.0])), [2, 4])


def test_each_backward_pass_has_its_own_accumulators():
    handle, flow = raw_ops.TensorArrayV3(1, "float32", clear_after_read=False)
    flow, pull_write = weft.vjp(raw_ops.TensorArrayWriteV3, handle, 0, np.float32([1, 2]), flow)
    _, pull_read = weft.vjp(raw_ops.TensorArrayReadV3, handle, 0, flow, "float32")
    for scale in (1, 2):
        with weft.gradient_source() as source:
            assert source.startswith("gradients_")
            pull_read(np.float32([scale, scale]))
            assert pull_write()["value"].tolist() == [scale, scale]
    with weft.gradient_source("gradients"):
        pull_read(np.float32([3, 3]))
    assert pull_write()["value"].tolist() == [3, 3]  # "gradients" is what is used outside
    with pytest.raises(errors.InvalidArgumentError, match="read already"):
        pull_write()


def test_written_and_never_read_is_zero_gradient(library):
    handle, flow = raw_ops.TensorArrayV3(2, "float32")
    _, pull = weft.vjp(raw_ops.TensorArrayWriteV3, handle, 1, to(library, np.float32([[1, 2]])), flow)
    with weft.gradient_source():
        assert back(pull()["value"]).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    "op", ["TensorArrayV3", "TensorArraySizeV3", "TensorArrayCloseV3", "TensorArrayGradV3", "TensorArrayGradWithShape"]
)
def test_what_is_not_differentiable_says_so_and_does_nothing(op):
    handle = raw_ops.TensorArrayV3(1, "float32").handle
    with pytest.raises(LookupError, match="no gradient"):
        weft.vjp(getattr(raw_ops, op), handle)
    assert int(raw_ops.TensorArraySizeV3(handle, 0.0)) == 1


@pytest.mark.parametrize("write_last", [False, True])
def test_a_loop_with_state(write_last):
    """h[t+1] = tanh(W h[t]), every h in the array, differentiated in torch and by hand."""
    need("torch")
    import torch

    rng = np.random.default_rng(0)
    weight, start, steps = rng.normal(size=(3, 3)), rng.normal(size=3), 5
    tensor = torch.tensor(weight, requires_grad=True)
    array = weft.TensorArray(size=steps)
    h = torch.tensor(start)
    for step in range(steps):
        h = torch.tanh(tensor @ h)
        array.write(step, h)
    chosen = array.read(steps - 1) if write_last else array.stack()
    (chosen**2).sum().backward()

    hs = [start]
    for _ in range(steps):
        hs.append(np.tanh(weight @ hs[-1]))
    found, g = np.zeros_like(weight), np.zeros(3)
    for step in reversed(range(steps)):
        g = g + (2 * hs[step + 1] if not write_last or step == steps - 1 else 0)
        inner = g * (1 - hs[step + 1] ** 2)
        found += np.outer(inner, hs[step])
        g = weight.T @ inner
    np.testing.assert_allclose(tensor.grad.numpy(), found, rtol=1e-10)


def test_rows_of_a_scatter_are_one_node():
    """n slices of one tensor would cost O(n * N) backwards."""
    need("torch")
    import torch

    x = torch.randn(6, 2, requires_grad=True)
    array = weft.TensorArray(size=6)
    array.unstack(x)
    parents = {array.read(i).grad_fn.next_functions[0][0] for i in range(6)}
    assert len(parents) == 1


def test_gradients_under_vmap():
    need("torch")
    need("jax")
    import jax
    import torch

    def value(x):
        array = weft.TensorArray(size=2, clear_after_read=False)
        array.write(0, x * x).write(1, x)
        return (array.stack() ** 2).sum()

    points = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    wanted = 4 * points**3 + 2 * points
    np.testing.assert_allclose(jax.vmap(jax.grad(value))(jax.numpy.asarray(points)), wanted, rtol=1e-5)
    found = torch.func.vmap(torch.func.grad(value))(torch.tensor(points))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5)


def test_a_recurrent_loop_by_backward_and_by_gradient_arrays():
    """h = tanh(W h + x[t]): `loss.backward()` through the elements, and a loop by hand over the arrays' gradient arrays."""
    need("torch")
    import torch

    rng = np.random.default_rng(1)
    weight, inputs, cotangents = rng.normal(size=(3, 3)), rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    w, x = torch.tensor(weight, requires_grad=True), torch.tensor(inputs, requires_grad=True)
    xs, hs, h = weft.TensorArray(size=5).unstack(x), weft.TensorArray(size=5), torch.zeros(3, dtype=torch.float64)
    for t in range(5):
        h = torch.tanh(w @ h + xs.read(t))
        hs.write(t, h)
    (hs.stack() * torch.tensor(cotangents)).sum().backward()

    xs = weft.TensorArray(size=5, clear_after_read=False).unstack(inputs)
    hs, h = weft.TensorArray(size=5, clear_after_read=False), np.zeros(3)
    for t in range(5):
        h = np.tanh(weight @ h + xs.read(t))
        hs.write(t, h)
    dxs, dhs, dw = xs.gradient(), hs.gradient().unstack(cotangents), np.zeros((3, 3))
    for t in reversed(range(5)):
        inner = dhs.read(t) * (1 - hs.read(t) ** 2)
        dxs.write(t, inner)
        if t:
            dw += np.outer(inner, hs.read(t - 1))
            dhs.write(t - 1, weight.T @ inner)  # writes add up
    np.testing.assert_allclose(x.grad, dxs.stack(), rtol=1e-12)
    np.testing.assert_allclose(w.grad, dw, rtol=1e-12)
