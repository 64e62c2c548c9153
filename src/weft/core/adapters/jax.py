"""JAX: one `custom_vjp` function per (op, attributes, shapes of the inputs).

JAX takes a derivative from a `custom_vjp` function's `fwd` and `bwd`. Under an eager `jax.grad` its primal sees concrete
arrays, under `jit` tracers; the function itself must be the same object for the same call, or `jit` would compile anew, hence
the bounded cache. The cotangent of an integer output arrives as `float0` and is handed on as None; None for an input means that
nothing flows to it. Traps: forward mode (`jvp`) is not defined for `custom_vjp` functions; what is not an array of JAX (NumPy
indices and ids) goes round the function, so that its int64 is not cut to int32, which makes that call's function its own.

A call that meets others has to run, once, with its values: it is neither cached nor compiled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax

from ...errors import InvalidArgumentError
from ..arrays import Array
from ..jax_internals import has_value, is_tracing

_CACHE: OrderedDict[Any, Any] = OrderedDict()
_CACHE_SIZE = 512


class _Recording(threading.local):
    """How many recorded meetings this thread is inside of."""

    depth = 0


_recording = _Recording()


def is_recording(x: Array) -> bool:
    """Whether JAX is tracing `x`."""
    return isinstance(x, jax.core.Tracer)


def gradients_on() -> str:
    """What the caller differentiates: "inputs" of the call under way, perhaps something else ("on"), or nothing ("off")."""
    return "inputs" if _recording.depth else "on" if is_tracing() else "off"


def apply(call: Any, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The flat outputs of `call`, differentiable."""
    if call.op.meets:
        return _meet(call, inputs)
    places = tuple(i for i, x in enumerate(inputs) if _is_ours(x))
    if len(places) == len(inputs):
        function, cached_call = _cached(call, inputs)
        outputs = function(*inputs)
        call.output_sizes = cached_call.output_sizes
        return tuple(outputs)
    return tuple(_differentiable(call, inputs, places)(*(inputs[i] for i in places)))


def _is_ours(x: Array) -> bool:
    return isinstance(x, (jax.Array, jax.core.Tracer))


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

    aside: list[Array] = []  # what is kept and is not JAX's; the same in every run

    def full(arrays: Sequence[Array]) -> Sequence[Array]:
        return _arrays(arrays) if inputs is None or places is None else _put(inputs, places, arrays)

    @jax.custom_vjp
    def function(*arrays: Array) -> Any:
        return call.run(full(arrays))

    def forward(*arrays: Array) -> Any:
        whole = full(arrays)
        outputs = call.run(whole)
        kept = call.keep(whole, outputs)
        aside[:] = _others(kept)
        return outputs, tuple(filter(_is_ours, kept))

    def backward(kept: Any, grads: Any) -> Any:
        back = call.pull_back(_cotangents(grads), _merge(aside, kept))
        return tuple(back) if places is None else tuple(back[i] for i in places)

    function.defvjp(forward, backward)
    return function


def _meet(call: Any, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The flat outputs of a call that meets others: a function of its own, of JAX's arrays alone, that runs once."""
    for x in inputs:
        if not has_value(x):
            raise InvalidArgumentError(
                f"{call.op.name} must have its values now, and they are being traced: a call that waits for others runs "
                "outside jax.jit and jax.vmap; compile the model between Batch and Unbatch instead"
            )
    places = tuple(i for i, x in enumerate(inputs) if _is_ours(x))
    aside: list[Any] = []  # what is not JAX's among the outputs, and among what is kept

    def forward(*arrays: Array) -> Any:
        whole = _put(inputs, places, arrays)
        outputs = _run(call, whole)
        kept = call.keep(whole, outputs)
        aside[:] = _others(outputs), _others(kept)
        return tuple(filter(_is_ours, outputs)), tuple(filter(_is_ours, kept))

    def backward(kept: Any, grads: Any) -> Any:
        outputs, others = aside
        given = iter(_cotangents(grads))
        back = call.pull_back([next(given) if x is _OURS else None for x in outputs], _merge(others, kept))
        return tuple(back[i] for i in places)

    function = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])
    function.defvjp(forward, backward)
    traced = function(*(inputs[i] for i in places))
    return tuple(_merge(aside[0], traced))


def _run(call: Any, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The flat outputs of a call that meets others; where an outer derivative traces it, recorded once more, for that one."""
    if any(map(is_recording, inputs)):
        return _meet(call, inputs)
    _recording.depth += 1
    try:
        return call.run(inputs)
    finally:
        _recording.depth -= 1


_OURS = object()


def _others(arrays: Sequence[Array]) -> list[Any]:
    """What in `arrays` is not JAX's, with a mark in place of what is."""
    return [_OURS if _is_ours(x) else x for x in arrays]


def _merge(others: Sequence[Any], ours: Sequence[Array]) -> list[Array]:
    """`others` with `ours`, in order, in place of the marks."""
    rest = iter(ours)
    return [next(rest) if x is _OURS else x for x in others]


def _put(inputs: Sequence[Array], places: Sequence[int], arrays: Sequence[Array]) -> list[Array]:
    """`inputs` with `arrays` at `places`."""
    whole = list(inputs)
    for i, x in zip(places, _arrays(arrays), strict=True):
        whole[i] = x
    return whole


def _arrays(given: Sequence[Array]) -> list[Array]:
    # The value behind a tracer may be NumPy, where a caller of jax.vjp handed that in.
    return [x if _is_ours(x) else jax.numpy.asarray(x) for x in given]


def _cotangents(grads: Any) -> list[Array | None]:
    return [None if g.dtype == jax.dtypes.float0 else _arrays([g])[0] for g in grads]
