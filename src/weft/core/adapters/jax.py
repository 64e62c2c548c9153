"""JAX: one `custom_vjp` function per (op, attributes, shapes of the inputs).

JAX derives gradients from the `fwd` and `bwd` of a `custom_vjp` function. Under an eager `jax.grad` the function sees concrete
arrays, under `jit` tracers. Equal calls must use the same function object, or `jit` would compile again: hence the bounded cache.
The cotangent of an integer output arrives as `float0` and is passed on as None; None for an input means that it has no gradient.
Limitations: `custom_vjp` functions have no forward mode (`jvp`). Arrays that are not JAX's (NumPy indices and ids) bypass the
function, so that int64 is not cut to int32; such a call needs a function of its own.

A call that waits for other callers must run exactly once, with its values: it is neither cached nor compiled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax

from ...errors import InvalidArgumentError
from ..arrays import Array
from ..jax_internals import has_value, is_tracing
from . import Recording

_CACHE: OrderedDict[Any, Any] = OrderedDict()
_CACHE_SIZE = 512


_recording = Recording()  # of calls that wait


def is_recording(x: Array) -> bool:
    """True if JAX traces `x`."""
    return isinstance(x, jax.core.Tracer)


def gradients_on() -> str:
    """What the caller differentiates: the "inputs" of the current call, possibly something else ("on"), or nothing ("off")."""
    return "inputs" if _recording.depth else "on" if is_tracing() else "off"


def apply(call: Any, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The flat outputs of `call`, differentiable."""
    if call.op.waits:
        return _apply_once(call, inputs)
    places = tuple(i for i, x in enumerate(inputs) if _is_jax(x))
    if len(places) == len(inputs):
        function, cached_call = _cached(call, inputs)
        outputs = function(*inputs)
        call.output_sizes = cached_call.output_sizes
        return tuple(outputs)
    return tuple(_differentiable(call, inputs, places)(*(inputs[i] for i in places)))


def _is_jax(x: Array) -> bool:
    return isinstance(x, (jax.Array, jax.core.Tracer))


def _cached(call: Any, inputs: Sequence[Array]) -> Any:
    try:
        # The number of outputs may depend on the shapes of the inputs, and the call stores it.
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
    """`call` as a `custom_vjp` function of the inputs at `places` (all if None); the other inputs are constants."""
    others: list[Array] = []  # saved arrays that are not JAX's; equal in every run

    def full(arrays: Sequence[Array]) -> Sequence[Array]:
        return _arrays(arrays) if inputs is None or places is None else _put(inputs, places, arrays)

    @jax.custom_vjp
    def function(*arrays: Array) -> Any:
        return call.run(full(arrays))

    def forward(*arrays: Array) -> Any:
        whole = full(arrays)
        outputs = call.run(whole)
        saved = call.save(whole, outputs)
        others[:] = _others(saved)
        return outputs, tuple(filter(_is_jax, saved))

    def backward(saved: Any, grads: Any) -> Any:
        back = call.pull_back(_cotangents(grads), _merge(others, saved))
        return tuple(back) if places is None else tuple(back[i] for i in places)

    function.defvjp(forward, backward)
    return function


def _apply_once(call: Any, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The flat outputs of a call that waits for others, through a function of JAX's arrays only that runs once."""
    for x in inputs:
        if not has_value(x):
            raise InvalidArgumentError(
                f"{call.op.name} must have its values now, but they are traced: a call that waits for others must run "
                "outside jax.jit and jax.vmap; compile the model between Batch and Unbatch instead"
            )
    places = tuple(i for i, x in enumerate(inputs) if _is_jax(x))
    others: list[Any] = []  # of the outputs and of the saved arrays, those that are not JAX's

    def forward(*arrays: Array) -> Any:
        whole = _put(inputs, places, arrays)
        outputs = _run(call, whole)
        saved = call.save(whole, outputs)
        others[:] = _others(outputs), _others(saved)
        return tuple(filter(_is_jax, outputs)), tuple(filter(_is_jax, saved))

    def backward(saved: Any, grads: Any) -> Any:
        outputs, rest = others
        given = iter(_cotangents(grads))
        back = call.pull_back([next(given) if x is _JAX else None for x in outputs], _merge(rest, saved))
        return tuple(back[i] for i in places)

    function = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])
    function.defvjp(forward, backward)
    traced = function(*(inputs[i] for i in places))
    return tuple(_merge(others[0], traced))


def _run(call: Any, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """Run a call that waits for others; if an outer derivative traces it, record it again for that one."""
    if any(map(is_recording, inputs)):
        return _apply_once(call, inputs)
    _recording.depth += 1
    try:
        return call.run(inputs)
    finally:
        _recording.depth -= 1


_JAX = object()


def _others(arrays: Sequence[Array]) -> list[Any]:
    """`arrays` with a mark in place of JAX's arrays."""
    return [_JAX if _is_jax(x) else x for x in arrays]


def _merge(others: Sequence[Any], arrays: Sequence[Array]) -> list[Array]:
    """`others` with `arrays`, in order, in place of the marks."""
    rest = iter(arrays)
    return [next(rest) if x is _JAX else x for x in others]


def _put(inputs: Sequence[Array], places: Sequence[int], arrays: Sequence[Array]) -> list[Array]:
    """`inputs` with `arrays` at `places`."""
    whole = list(inputs)
    for i, x in zip(places, _arrays(arrays), strict=True):
        whole[i] = x
    return whole


def _arrays(given: Sequence[Array]) -> list[Array]:
    # The value behind a tracer may be a NumPy array that the caller passed to jax.vjp.
    return [x if _is_jax(x) else jax.numpy.asarray(x) for x in given]


def _cotangents(grads: Any) -> list[Array | None]:
    return [None if g.dtype == jax.dtypes.float0 else _arrays([g])[0] for g in grads]
