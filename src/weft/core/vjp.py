"""`vjp`: the result of an op and its pull-back, for callers without an autodiff framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, InvalidArgumentError, NotFoundError, OpError
from .arrays import asarray, dtype_of, get_library_of, library_of
from .inputs import items, shown, take, together
from .op import Op, unflatten


def vjp(op: Op, /, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., dict[str, Any]]]:
    """The result of an op and its pull-back, by the gradient of the op.

    The pull-back takes one cotangent per output, in order or by the output's name; a missing one is zeros. It returns the
    gradient of every input that has one, by the name of the input.
    """
    if not isinstance(op, Op):
        raise ArgumentTypeError(f"vjp must be given an op of weft.raw_ops, got {shown(op)}")
    if op.gradient is None:
        raise NotFoundError(f"{op.name} has no gradient")
    try:
        args, kwargs = op.take(args, kwargs)
        call, inputs = op.bind(args, kwargs)
        outputs = call.run(inputs)
    except OpError as error:
        op.add_note(error, args, kwargs)
        raise
    saved = call.save(inputs, outputs)

    def pull_back(*grads: Any, **named: Any) -> dict[str, Any]:
        given = dict(zip(op.outputs, grads, strict=False)) | named
        if len(grads) > len(op.outputs) or given.keys() - {*op.outputs}:
            raise ArgumentTypeError(
                f"{op.name} has the outputs {op.outputs}, got cotangents for {sorted(given) or len(grads)}"
            )
        flat: list[Any] = []
        for name, value in zip(op.outputs, unflatten(outputs, call.output_sizes), strict=True):
            flat.extend(_cotangents(name, given.get(name), value))
        return call.gradients(flat, saved)

    return call.pack(outputs), pull_back


def _cotangents(name: str, given: Any, value: Any) -> list[Any]:
    """The cotangents of one output, an array or a list of arrays, flat. A missing one is zeros, or None for integers."""
    if isinstance(value, list):
        each = [None] * len(value) if given is None else items(name, given)
        if len(each) != len(value):
            raise InvalidArgumentError(f"the cotangent of {name} must have {len(value)} entries, got {len(each)}")
        return [c for i, v in enumerate(value) for c in _cotangents(f"{name}[{i}]", each[i], v)]
    if given is not None:
        return [_cotangent(name, given, value)]
    if "float" not in dtype_of(value) and "complex" not in dtype_of(value):
        return [None]
    return [get_library_of(value).namespace.zeros_like(value)]


def _cotangent(name: str, given: Any, value: Any) -> Any:
    """The cotangent of one array, with its library, dtype and shape; the cotangent of a variant is a variant."""
    if type(given) is type(value) is np.ndarray and given.dtype is value.dtype and given.shape == value.shape:
        return given  # the usual case: benchmarks/batch_norm.py, the second order of 8x8x8x32
    what = f"the cotangent of {name}"
    if library_of(value) is None:
        if type(given) is not type(value):
            raise ArgumentTypeError(f"{what} must be a {type(value).__name__}, got {shown(given)}")
        return given
    taken = together([take(what, given), value])[0]
    if library_of(taken) is None:
        try:
            taken = asarray(taken, library_of(value) or "numpy", value.dtype)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise InvalidArgumentError(f"{what} must be {dtype_of(value)}, got {shown(given)}") from None
    if tuple(taken.shape) != tuple(value.shape) or dtype_of(taken) != dtype_of(value):
        expected, got = f"{dtype_of(value)}{list(value.shape)}", f"{dtype_of(taken)}{list(taken.shape)}"
        raise InvalidArgumentError(f"{what} must be {expected}, got {got}")
    return taken
