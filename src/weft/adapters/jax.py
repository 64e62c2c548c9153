"""JAX: one `custom_vjp` function per (op, attributes, shapes of the inputs).

JAX takes a derivative from a `custom_vjp` function's `fwd` and `bwd`. Under an eager `jax.grad` its primal sees concrete
arrays, under `jit` tracers; the function itself must be the same object for the same call, or `jit` would compile anew, hence
the bounded cache. The cotangent of an integer output arrives as `float0` and is handed on as None; None for an input means that
nothing flows to it. Traps: forward mode (`jvp`) is not defined for `custom_vjp` functions; an input that is not an array of
JAX (NumPy indices) is closed over, so that its int64 is not cut to int32, which makes that call's function its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax

from .._arrays import Array

_CACHE: OrderedDict[Any, Any] = OrderedDict()
_CACHE_SIZE = 512


def is_recording(x: Array) -> bool:
    """Whether JAX is tracing `x`."""
    return isinstance(x, jax.core.Tracer)


def apply(call: Any, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The flat outputs of `call`, differentiable."""
    places = tuple(i for i, x in enumerate(inputs) if isinstance(x, (jax.Array, jax.core.Tracer)))
    if len(places) == len(inputs):
        function, cached_call = _cached(call, inputs)
        outputs = function(*inputs)
        call.output_sizes = cached_call.output_sizes
        return tuple(outputs)
    return tuple(_differentiable(call, inputs, places)(*(inputs[i] for i in places)))


def _cached(call: Any, inputs: Sequence[Array]) -> Any:
    try:
        # How many arrays an op returns may depend on the shapes of its inputs, and a call remembers how many they were.
        key = (call.key, *(x.shape for x in inputs))
        hash(key)
    except TypeError:
        return _differentiable(call, None, None), call
    if key not in _CACHE:
        _CACHE[key] = (_differentiable(call, None, None), call)
        while len(_CACHE) > _CACHE_SIZE:
            _CACHE.popitem(last=False)
    _CACHE.move_to_end(key)
    return _CACHE[key]


def _differentiable(call: Any, inputs: Sequence[Array] | None, places: tuple[int, ...] | None) -> Any:
    """`call` as a `custom_vjp` function of the inputs at `places` (all of them when None), the others held fast."""

    def full(arrays: Sequence[Array]) -> Sequence[Array]:
        if inputs is None or places is None:
            return arrays
        whole = list(inputs)
        for i, x in zip(places, arrays, strict=True):
            whole[i] = x
        return whole

    @jax.custom_vjp
    def function(*arrays: Array) -> Any:
        return call.run(full(arrays))

    def forward(*arrays: Array) -> Any:
        outputs = call.run(full(arrays))
        return outputs, call.keep(full(arrays), outputs)

    def backward(kept: Any, grads: Any) -> Any:
        # What a caller of jax.vjp hands in may be NumPy.
        cotangents = [None if g.dtype == jax.dtypes.float0 else jax.numpy.asarray(g) for g in grads]
        back = call.pull_back(cotangents, kept)
        return tuple(back) if places is None else tuple(back[i] for i in places)

    function.defvjp(forward, backward)
    return function
