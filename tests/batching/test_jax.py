"""Gradients of batched calls in JAX: under an eager jax.grad, with parameters that all callers share; and what is refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.batched_calls import FULL
from support.callers import start, start_on, together

import weft
from weft.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError

jax = pytest.importorskip("jax")
jnp = jax.numpy

SIZES = [1, 3, 2]
ROWS = sum(SIZES)


@pytest.fixture
def scope():
    with weft.scope() as scope:
        yield scope


def inputs():
    keys = jax.random.split(jax.random.key(1), len(SIZES))
    return [jax.random.normal(key, (n, 4)) for key, n in zip(keys, SIZES, strict=True)]


def parameters():
    a, b = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(a, (4, 8)), "b": [jax.random.normal(b, (8, 2))], "steps": jnp.arange(3)}


def model(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"][0]


def loss(y, i):
    return ((i + 1) * y**2).sum()


def go(policy, params, xs, argnums=(0, 1)):
    """The gradients of each caller, in its own thread."""

    def work(i):
        return jax.grad(lambda p, x: loss(policy(p, x), i), argnums, allow_int=True)(params, xs[i])

    return [caller.answer() for caller in together([lambda i=i: work(i) for i in range(len(xs))])]


def expected(params, xs):
    def total(params, *xs):
        ys = jnp.split(model(params, jnp.concatenate(xs)), np.cumsum(SIZES)[:-1])
        return sum(loss(y, i) for i, y in enumerate(ys))

    return jax.jit(jax.grad(total, tuple(range(len(xs) + 1)), allow_int=True))(params, *xs)


def test_the_sum_over_callers_is_exact(scope):
    params, xs = parameters(), inputs()
    want = expected(params, xs)
    policy = weft.batched(model, shared=("params",), max_batch_size=ROWS, **FULL)
    got = go(policy, params, xs)
    for (_, own), right in zip(got, want[1:], strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-5)
    for name in ("a", "b"):
        parts = [jax.tree.leaves(shared[name])[0] for shared, _ in got]
        np.testing.assert_allclose(sum(parts), jax.tree.leaves(want[0][name])[0], rtol=1e-5)
        assert sum(bool((part != 0).any()) for part in parts) == 1  # whole to one, zeros to the others
    seen = policy.statistics()
    assert (seen.sizes, seen.backwards) == ({ROWS: 1}, 1)


def test_inputs_alone(scope):
    params, xs = parameters(), inputs()
    policy = weft.batched(model, shared=("params",), max_batch_size=ROWS, **FULL)

    def work(i):
        return jax.grad(lambda x: loss(policy(params, x), i))(xs[i])

    got = [caller.answer() for caller in together([lambda i=i: work(i) for i in range(3)])]
    for own, right in zip(got, expected(params, xs)[1:], strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-5)


def test_values_and_results_in_a_tree(scope):
    def f(params, x):
        return {"y": model(params, x), "n": jnp.arange(len(x)), "name": "f"}

    policy = weft.batched(f, shared=("params",))
    params, x = parameters(), inputs()[1]

    def total(x):
        tree = policy(params, x)
        assert tree["name"] == "f"
        return tree["y"].sum(), tree["n"]

    (value, count), grad = jax.value_and_grad(total, has_aux=True)(x)
    np.testing.assert_allclose(value, model(params, x).sum(), rtol=1e-5)
    np.testing.assert_array_equal(count, np.arange(3))
    np.testing.assert_allclose(grad, jax.grad(lambda x: model(params, x).sum())(x), rtol=1e-5)


def test_one_example(scope):
    policy = weft.batched(lambda x: x**2, rows=False)
    np.testing.assert_allclose(jax.grad(lambda x: policy(x).sum())(jnp.arange(3.0)), [0, 2, 4])


def test_a_receipt(scope):
    policy = weft.batched(lambda x: x**2)

    def loss(x):
        y, receipt = policy.call(x, receipt=True)
        return y.sum(), receipt

    grad, receipt = jax.grad(loss, has_aux=True)(jnp.arange(3.0))
    np.testing.assert_allclose(grad, [0, 2, 4])
    assert (receipt.size, receipt.position) == (3, 0)


def test_a_function_that_donates_its_batch_gets_no_callers_array(scope):
    policy = weft.batched(jax.jit(lambda x: x + 1, donate_argnums=0))
    x = jnp.ones((4, 2))
    assert policy(x).sum() == 16
    assert not x.is_deleted()


def test_padding(scope):
    params, xs = parameters(), inputs()
    policy = weft.batched(model, shared=("params",), max_batch_size=ROWS, allowed_batch_sizes=[16], **FULL)
    got = go(policy, params, xs)
    want = expected(params, xs)
    for (_, own), right in zip(got, want[1:], strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-5)
    np.testing.assert_allclose(sum(shared["a"] for shared, _ in got), want[0]["a"], rtol=1e-5)


def test_equal_parameters_are_the_same(scope):
    params, xs = parameters(), inputs()
    policy = weft.batched(model, shared=("params",), max_batch_size=ROWS, **FULL)
    twins = [jax.tree.map(jnp.array, params) for _ in xs]
    callers = together([lambda i=i: policy(twins[i], xs[i]) for i in range(3)])
    for caller, x in zip(callers, xs, strict=True):
        np.testing.assert_allclose(caller.answer(), model(params, x), rtol=1e-5)
    assert policy.statistics().sizes == {ROWS: 1}


def test_others_are_named(scope):
    params, xs = parameters(), inputs()
    other = params | {"b": [params["b"][0] + 1]}
    policy = weft.batched(model, shared=("params",), max_batch_size=ROWS, **FULL)
    callers = together([lambda i=i: policy(other if i == 1 else params, xs[i]) for i in range(3)])
    errors = [caller.error for caller in callers if caller.error is not None]
    assert errors
    for error in errors:
        assert isinstance(error, InvalidArgumentError)
        assert "leaf 1 of the shared argument 'params'" in str(error)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, params, x: jax.jit(f)(params, x),
        lambda f, params, x: jax.jit(lambda p: f(p, x))(params),
        lambda f, params, x: jax.jit(lambda x: f(params, x))(x),
        lambda f, params, x: jax.vmap(lambda x: f(params, x))(x[None]),
        lambda f, params, x: jax.jit(jax.grad(lambda p: f(p, x).sum(), allow_int=True))(params),
    ],
    ids=["jit", "jit of params", "jit of inputs", "vmap", "jit of grad"],
)
def test_what_is_compiled_is_refused(scope, transform):
    policy = weft.batched(model, shared=("params",))
    with pytest.raises(InvalidArgumentError, match="must have its values now, and is being traced"):
        transform(policy, parameters(), inputs()[0])
    assert policy.statistics().calls == 0


def test_second_order_is_refused(scope):
    policy = weft.batched(lambda x: x**3)
    with pytest.raises(InvalidArgumentError, match=r"traced|once"):
        jax.grad(lambda x: jax.grad(lambda x: policy(x).sum())(x).sum())(jnp.ones(2))


def test_in_a_task_it_is_refused(scope):
    policy = weft.batched(lambda x: x**2)

    def total(x):
        return asyncio.run(policy.aio(x)).sum()

    with pytest.raises(InvalidArgumentError, match="that JAX traces"):
        jax.grad(total)(jnp.ones(2))


def test_split_calls_are_refused(scope):
    policy = weft.batched(lambda x: x**2, max_batch_size=2, split=True)
    with pytest.raises(FailedPreconditionError, match="split"):
        jax.grad(lambda x: policy(x).sum())(jnp.ones(5))


def test_a_jitted_model_inside(scope):
    params, xs = parameters(), inputs()
    policy = weft.batched(jax.jit(model), shared=("params",), max_batch_size=ROWS, **FULL)
    for (_, own), right in zip(go(policy, params, xs), expected(params, xs)[1:], strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-5)


def test_a_caller_that_never_goes_back(scope):
    clock = weft.SimulatedClock()
    with weft.scope(clock):
        policy = weft.batched(lambda x: x**2, max_batch_size=2, max_wait=1.0, gradient_deadline=5.0)
        kept = []

        def forward_only(x):
            kept.append(jax.vjp(policy, x))

        callers = [
            start_on(clock, forward_only, jnp.ones(1)),
            start_on(clock, jax.grad(lambda x: policy(x).sum()), jnp.ones(1)),
        ]
        callers[0].answer()
        clock.advance(4.9)
        assert callers[1].is_alive()
        clock.advance(0.2)
        with pytest.raises(DeadlineExceededError):
            callers[1].answer()


def test_one_that_drops_its_pull_back_is_told_at_once(scope):
    policy = weft.batched(lambda x: x**2, max_batch_size=2, **FULL)

    def forget(x):
        jax.vjp(policy, x)

    callers = [start(forget, jnp.ones(1)), start(jax.grad(lambda x: policy(x).sum()), jnp.ones(1))]
    callers[0].answer()
    with pytest.raises(FailedPreconditionError, match="dropped"):
        callers[1].answer()


def test_errors_of_the_function(scope):
    def f(x):
        raise ZeroDivisionError("in the forward")

    with pytest.raises(ZeroDivisionError):
        jax.grad(lambda x: weft.batched(f)(x).sum())(jnp.ones(1))
