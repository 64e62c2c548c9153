"""JAX: how a batched call is differentiated under an eager `jax.grad`.

A call whose arrays are being traced goes through a `custom_vjp` function: its forward sees concrete arrays and joins a batch,
whose own `jax.vjp` is kept once; its backward hands in the caller's cotangents and waits for the batch's. The share that travels
from one to the other is no array: it is the static part of a pytree without leaves. First order, since a batch goes back once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.arrays import Array
from . import trees
from .request import Answer, Request


def is_traced(shared: Any) -> bool:
    """Whether JAX is tracing any of the shared arguments."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(shared))


@jax.tree_util.register_pytree_node_class
class _Carried:
    """What stands for a caller's gradient, carried from a forward to its backward."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        return (), self.held

    @classmethod
    def tree_unflatten(cls, held: Any, _: Any) -> _Carried:
        return cls(held)


def call(
    traced: Request,
    concrete: Callable[..., Request],
    run: Callable[[Request], Answer],
    take: Callable[[Any, Sequence[Array | None]], Any],
) -> tuple[Answer, list[Any]]:
    """The answer to a call whose arrays JAX is tracing, and its leaves, differentiable.

    `run` makes the call with concrete arrays; `take(share, cotangents)` gives the gradients of the arrays, and that of the
    shared arguments or None.
    """
    leaves, structure = jax.tree.flatten(traced.shared)
    places = [i for i, x in enumerate(leaves) if isinstance(x, (jax.Array, jax.core.Tracer))]
    answers: list[Answer] = []

    def answer(arrays: Sequence[Array], shared: Sequence[Array], pulls: bool) -> Answer:
        whole = list(leaves)
        for i, x in zip(places, shared, strict=True):
            whole[i] = x
        answers[:] = [run(concrete(traced, arrays, jax.tree.unflatten(structure, whole), pulls))]
        return answers[0]

    @jax.custom_vjp
    def function(arrays: Sequence[Array], shared: Sequence[Array]) -> list[Array]:
        made = answer(arrays, shared, False)
        return made.arrays()

    def forward(arrays: Sequence[Array], shared: Sequence[Array]) -> Any:
        made = answer(arrays, shared, True)
        assert made.held is not None
        made.held.is_delivered = True
        return made.arrays(), (_Carried(made.held), list(shared))

    def backward(kept: tuple[_Carried, list[Array]], cotangents: Sequence[Any]) -> tuple[Any, Any]:
        carried, shared = kept
        given = [None if g.dtype == jax.dtypes.float0 else jnp.asarray(g) for g in cotangents]
        own, whole = take(carried.held.share, given)
        if whole is None:
            return list(own), [jnp.zeros_like(x) if _is_float(x) else None for x in shared]
        flat = jax.tree.leaves(whole, is_leaf=lambda x: x is None)
        return list(own), [flat[i] for i in places]

    function.defvjp(forward, backward)
    rows = function(traced.arrays, [leaves[i] for i in places])
    filled = answers[0].leaves()
    for i, x in zip(answers[0].output.places, rows, strict=True):
        filled[i] = x
    return answers[0], filled


def _is_float(x: Any) -> bool:
    return isinstance(x, (jax.Array, jax.core.Tracer)) and jnp.issubdtype(x.dtype, jnp.inexact)


def vjp(
    function: Callable[[Any, Sequence[Array]], Any], shared: Any, arrays: Sequence[Array]
) -> tuple[Any, Callable[[Sequence[Array]], tuple[list[Array | None], Any]]]:
    """What `function(shared, arrays)` returns, and what takes the gradients of its arrays back to those of both."""
    leaves, structure = jax.tree.flatten((shared, list(arrays)))
    places = [i for i, x in enumerate(leaves) if _is_float(x)]
    form: list[Any] = []

    def flat(*inputs: Array) -> tuple[list[Array], list[Any]]:
        whole = list(leaves)
        for i, x in zip(places, inputs, strict=True):
            whole[i] = x
        outputs, build = trees.flatten(function(*jax.tree.unflatten(structure, whole)))
        floats = [i for i, x in enumerate(outputs) if _is_float(x)]
        others = [i for i, x in enumerate(outputs) if i not in floats and trees.is_array(x)]
        form[:] = [(outputs, build, floats, others)]
        return [outputs[i] for i in floats], [outputs[i] for i in others]

    rows, pull, counts = jax.vjp(flat, *(leaves[i] for i in places), has_aux=True)
    outputs, build, floats, others = form[0]
    filled = list(outputs)
    for i, x in [*zip(floats, rows, strict=True), *zip(others, counts, strict=True)]:
        filled[i] = x
    order = sorted([*floats, *others])

    def pull_back(seeds: Sequence[Array]) -> tuple[list[Array | None], Any]:
        gradients: list[Any] = [None] * len(leaves)
        for i, x in zip(places, pull([seeds[order.index(i)] for i in floats]), strict=True):
            gradients[i] = x
        own = gradients[len(leaves) - len(arrays) :]
        return own, jax.tree.unflatten(structure, gradients)[0]

    return build(filled), pull_back
