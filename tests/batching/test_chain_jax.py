"""The chain of batching/test_chain.py under JAX, where every caller differentiates its own loss, and under HIPS autograd."""

from __future__ import annotations

import numpy as np
import pytest
from support.callers import start, start_on
from support.chains import FEATURES, OUT, SIZES, W1, W2, answers, batch, close, each, in_order, rows, unbatch
from support.libraries import for_each, need

import weft
from weft import raw_ops
from weft.errors import DeadlineExceededError, InvalidArgumentError


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope, weft.gradient_deadline(60):
        yield scope


def arrays(given):
    need("jax")
    import jax.numpy as jnp

    return [jnp.asarray(x, dtype=jnp.float32) for x in given]


def data(sizes):
    """The callers' rows, what weighs their outputs, and the parameters."""
    return arrays(rows(sizes)), arrays(rows(sizes, OUT)), arrays([W1, W2])


def model(x, parameters, mixes=False):
    import jax.numpy as jnp

    h = jnp.tanh(x @ parameters[0])
    if mixes:
        h = weft.batch_norm(h, training=True, axis=1).y
    return h @ parameters[1]


def loss(x, parameters, w, most, mixes=False, run=model, **attributes):
    """A caller's loss."""
    made = batch([x], most, **attributes)
    return (unbatch(run(made.batched_tensors[0], parameters, mixes), made) * w).sum() ** 2


def by_hand(xs, parameters, ws, mixes=False, padding=0):
    """The gradients of the sum of all losses through one batch made by hand: of every caller's rows and the parameters."""
    import jax
    import jax.numpy as jnp

    def total(xs, parameters):
        whole = jnp.concatenate([*xs, jnp.broadcast_to(jax.lax.stop_gradient(xs[0][:1]), (padding, FEATURES))])
        *ys, _ = jnp.split(model(whole, parameters, mixes), np.cumsum([*map(len, xs)]))
        return sum((y * w).sum() ** 2 for y, w in zip(ys, ws, strict=True))

    return jax.jit(jax.grad(total, (0, 1)))(xs, parameters)


def nearly(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-4)


def agree(got, wanted):
    """Raise unless the callers' gradients are those made by hand; the parameters' goes whole to the last, zeros to the others."""
    nearly([x for x, _ in got], wanted[0])
    for *others, whole in zip(*(parameters for _, parameters in got), strict=True):
        assert not any(np.asarray(x).any() for x in others)
        assert np.asarray(whole).any()
    nearly(got[-1][1], wanted[1])


@for_each(
    ("size", "mixes"),
    [(size, mixes) for size in SIZES for mixes in (False, True)],
    slow=[("even", False), ("even", True), ("uneven", False), ("one", True), ("many", True)],
)
def test_the_gradients_are_those_of_one_batch(scope, size, mixes):
    sizes = SIZES[size]
    xs, ws, parameters = data(sizes)
    import jax

    calls = each(lambda x, w: jax.grad(loss, (0, 1))(x, parameters, w, sum(sizes), mixes), xs, ws)
    wanted = by_hand(xs, parameters, ws, mixes)
    for _ in range(2):
        agree(answers(in_order(scope, calls)), wanted)
    assert weft.sweep() == 0


def test_padding_and_a_compiled_model(clock):
    xs, ws, parameters = data([1, 2, 2])
    import jax

    given = {"mixes": True, "allowed_batch_sizes": [4, 8], "batch_timeout_micros": 300_000}
    given["run"] = jax.jit(model, static_argnums=2)
    calls = each(lambda x, w: jax.value_and_grad(loss, (0, 1))(x, parameters, w, 8, **given)[1], xs, ws)
    callers = [start_on(clock, call) for call in calls]
    clock.run_out()
    agree(answers(callers), by_hand(xs, parameters, ws, True, padding=3))


def test_several_tensors(scope):
    """Three inputs, one of them integers, and two outputs."""
    sizes = [2, 1]
    xs, ys = arrays(rows(sizes)), arrays(rows(sizes))
    import jax

    def outputs(p, q, r):
        return p * r * q[:, None], p + r

    def total(x, y, at, chained):
        if not chained:
            one, two = outputs(x, at, y)
        else:
            made = batch([x, at, y], 3)
            one, two = (unbatch(z, made, name) for z, name in zip(outputs(*made.batched_tensors), "ab", strict=True))
        return one.sum() ** 2 + (two**2).sum()

    given = xs, ys, [jax.numpy.arange(n) for n in sizes]
    got = answers(in_order(scope, each(lambda *arrays: jax.grad(total, (0, 1))(*arrays, True), *given)))
    for pair, *given_here in zip(got, *given, strict=True):
        nearly(pair, jax.grad(total, (0, 1))(*given_here, False))


def test_callers_that_differentiate_different_things_do_not_share_a_batch():
    """One differentiates its rows, one the parameters alone, one nothing: nobody waits for a gradient that cannot come."""
    xs, ws, parameters = data([1] * 3)
    import jax

    def call(i, transform):
        return start(lambda: transform(loss)(xs[i], parameters, ws[i], 3, batch_timeout_micros=300_000))

    one, two = call(0, jax.grad), call(1, lambda f: jax.grad(f, 1))
    three = call(2, lambda f: f)
    nearly([one.answer()], by_hand(xs[:1], parameters, ws[:1])[0])
    nearly(two.answer(), by_hand(xs[1:2], parameters, ws[1:2])[1])
    nearly([three.answer()], [(model(xs[2], parameters) * ws[2]).sum() ** 2])


def test_parameters_alone(scope):
    xs, ws, parameters = data([2, 1])
    import jax

    got = answers(in_order(scope, each(lambda x, w: jax.grad(loss, 1)(x, parameters, w, 3), xs, ws)))
    nearly([a + b for a, b in zip(*got, strict=True)], by_hand(xs, parameters, ws)[1])


def test_second_order(scope):
    xs, ws, parameters = data([2, 1])
    import jax

    parameters = [p / 4 for p in parameters]

    def second(x, w):
        return jax.grad(lambda x: (jax.grad(loss)(x, parameters, w, 3) ** 2).sum())(x)

    def alone(xs):
        inner = jax.grad(lambda xs: sum((model(x, parameters) * w).sum() ** 2 for x, w in zip(xs, ws, strict=True)))
        return sum((dx**2).sum() for dx in inner(xs))

    nearly(answers(in_order(scope, each(second, xs, ws))), jax.grad(alone)(xs))


def test_a_caller_that_never_comes_costs_the_others_the_deadline(scope):
    xs, ws, parameters = data([1, 1])
    import jax

    transforms = [lambda x, w: jax.vjp(lambda x: loss(x, parameters, w, 2), x)[0],
                  lambda x, w: jax.grad(loss)(x, parameters, w, 2)]  # fmt: skip
    with weft.gradient_deadline(0.2):
        other, owner = in_order(scope, each(lambda f, x, w: f(x, w), transforms, xs, ws))
    assert other.error is None
    assert isinstance(owner.error, DeadlineExceededError)


@pytest.mark.parametrize("transform", ["jit", "vmap", "jit of grad"])
@pytest.mark.parametrize("op", ["Batch", "Unbatch", "UnbatchGrad"])
def test_under_tracing_the_error_says_what_to_do(transform, op):
    (x,) = arrays(rows([3]))
    import jax

    made = batch([x], 3)
    call = {
        "Batch": lambda x: batch([x], 3).batched_tensors[0],
        "Unbatch": lambda x: unbatch(x, made),
        "UnbatchGrad": lambda x: raw_ops.UnbatchGrad(x, made.batch_index, x, made.id),
    }[op]
    wrap = {"jit": jax.jit, "vmap": jax.vmap, "jit of grad": lambda f: jax.jit(jax.grad(f))}[transform]
    with pytest.raises(InvalidArgumentError, match=r"outside jax.jit and jax.vmap; compile the model between"):
        wrap(lambda x: call(x).sum())(x)


def test_autograd_gives_the_gradients_of_one_batch(scope):
    need("autograd")
    import autograd
    import autograd.numpy as anp

    sizes = [2, 1, 3]
    xs, ws = rows(sizes), rows(sizes, OUT)

    def run(x, w1):
        return anp.dot(anp.tanh(anp.dot(x, w1)), W2)

    def chained(x, w1, w):
        made = batch([x], 6)
        return anp.sum(unbatch(run(made.batched_tensors[0], w1), made) * w) ** 2

    def alone(x, w1, w):
        return anp.sum(run(x, w1) * w) ** 2

    got = answers(in_order(scope, each(lambda x, w: autograd.grad(chained, (0, 1))(x, W1, w), xs, ws)))
    wanted = [autograd.grad(alone, (0, 1))(x, W1, w) for x, w in zip(xs, ws, strict=True)]
    close([x for x, _ in got], [x for x, _ in wanted])
    close([sum(w for _, w in got)], [sum(w for _, w in wanted)])
