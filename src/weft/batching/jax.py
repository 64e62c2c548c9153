"""JAX: batched calls under an eager `jax.grad`.

A call with traced arrays goes through a `custom_vjp` function. Its forward gets concrete arrays and joins a batch, which keeps
its own `jax.vjp` once; its backward hands in the caller's cotangents and waits for the batch's. The ticket travels from one to
the other as the static part of a pytree without leaves. Only first order: a batch goes back once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.arrays import Array
from ..errors import FailedPreconditionError
from . import results, trees
from .arguments import Arguments
from .request import CallResult, Request, build_result
from .vjp import deposit_and_wait


def is_traced(shared: Any) -> bool:
    """Return True if JAX traces any of the shared arguments."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(shared))


@jax.tree_util.register_pytree_node_class
class _HandleTree:
    """A pytree without leaves that carries a caller's `ResultHandle` from a forward to its backward."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        return (), self.handle

    @classmethod
    def tree_unflatten(cls, handle: Any, _: Any) -> _HandleTree:
        return cls(handle)


def call(traced: Request, arguments: Arguments, answer: Callable[[Request], Any]) -> tuple[Any, Request]:
    """Return the differentiable result of a call with traced arrays, and the request that was made with concrete ones.

    `answer` submits a request and waits for its result.
    """
    leaves, structure = jax.tree.flatten(traced.shared)
    places = [i for i, x in enumerate(leaves) if isinstance(x, (jax.Array, jax.core.Tracer))]
    made: list[Request] = []

    def run(arrays: Sequence[Array], shared: Sequence[Array], is_vjp: bool) -> CallResult:
        whole = trees.replaced(leaves, places, shared)
        request = arguments.with_arrays(traced, arrays, jax.tree.unflatten(structure, whole), is_vjp)
        answer(request)
        made[:] = [request]
        if request.parts is not None:
            raise FailedPreconditionError("a call that is split cannot be differentiated by JAX: pass fewer rows")
        result: CallResult = request.value
        return result

    @jax.custom_vjp
    def function(arrays: Sequence[Array], shared: Sequence[Array]) -> list[Array]:
        return run(arrays, shared, False).arrays()

    def forward(arrays: Sequence[Array], shared: Sequence[Array]) -> Any:
        result = run(arrays, shared, True)
        assert result.handle is not None
        result.handle.is_delivered = True
        return result.arrays(), (_HandleTree(result.handle), list(shared))

    def backward(kept: tuple[_HandleTree, list[Array]], cotangents: Sequence[Any]) -> tuple[Any, Any]:
        tree, shared = kept
        gradients = [None if g.dtype == jax.dtypes.float0 else jnp.asarray(g) for g in cotangents]
        ((own, whole),) = deposit_and_wait([(tree.handle.ticket, gradients)])
        if whole is None:
            return list(own), [jnp.zeros_like(x) if _is_float(x) else None for x in shared]
        flat = jax.tree.leaves(whole, is_leaf=lambda x: x is None)
        return list(own), [flat[i] for i in places]

    function.defvjp(forward, backward)
    rows = function(traced.arrays, [leaves[i] for i in places])
    result: CallResult = made[0].value
    batch = result.batch
    values = trees.replaced(result.leaves(), batch.array_places, rows)
    return build_result([result], values, traced.key.has_rows), made[0]


def _is_float(x: Any) -> bool:
    return isinstance(x, (jax.Array, jax.core.Tracer)) and jnp.issubdtype(x.dtype, jnp.inexact)


def vjp(
    function: Callable[[Any, Sequence[Array]], Any], shared: Any, arrays: Sequence[Array]
) -> tuple[Any, Callable[[Sequence[Array]], tuple[list[Array | None], Any]]]:
    """Return the result of `function(shared, arrays)` and its pull-back to the gradients of the arrays and of `shared`."""
    leaves, structure = jax.tree.flatten((shared, list(arrays)))
    places = [i for i, x in enumerate(leaves) if _is_float(x)]
    traced_outputs: list[Any] = []

    def flat(*inputs: Array) -> tuple[list[Array], tuple[list[Array], list[Any]]]:
        whole = trees.replaced(leaves, places, inputs)
        outputs, build = results.flatten_values(function(*jax.tree.unflatten(structure, whole)))
        floats = [i for i, x in enumerate(outputs) if _is_float(x)]
        others = [i for i, x in enumerate(outputs) if i not in floats and trees.is_array(x)]
        shared = {i: jax.tree.flatten(x.value) for i, x in enumerate(outputs) if isinstance(x, results.Shared)}
        traced = [leaf for found, _ in shared.values() for leaf in found if isinstance(leaf, jax.core.Tracer)]
        traced_outputs[:] = [(outputs, build, floats, others, shared)]
        return [outputs[i] for i in floats], ([outputs[i] for i in others], traced)

    float_arrays, pull, (other_arrays, untraced) = jax.vjp(flat, *(leaves[i] for i in places), has_aux=True)
    outputs, build, floats, others, shared = traced_outputs[0]
    values = iter(untraced)
    for i, (found, shape) in shared.items():
        concrete = [next(values) if isinstance(leaf, jax.core.Tracer) else leaf for leaf in found]
        outputs[i] = results.Shared(jax.tree.unflatten(shape, concrete))
    result = build(trees.replaced(outputs, [*floats, *others], [*float_arrays, *other_arrays]))
    order = sorted([*floats, *others])

    def pull_back(gradients: Sequence[Array]) -> tuple[list[Array | None], Any]:
        found = trees.replaced([None] * len(leaves), places, pull([gradients[order.index(i)] for i in floats]))
        own = found[len(leaves) - len(arrays) :]
        return own, jax.tree.unflatten(structure, found)[0]

    return result, pull_back
