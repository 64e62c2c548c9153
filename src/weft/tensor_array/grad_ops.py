"""TensorArrayGradV3 and TensorArrayGradWithShape: the arrays in which gradients of an array's elements add up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from ..core.arrays import Array, Handle, Host
from ..core.check import text
from ..core.op import op
from ..core.shapes import check_total
from ..errors import InvalidArgumentError
from .arguments import elements_of, flow, integer_vector, zero_flow

_SOURCE: ContextVar[str] = ContextVar("gradient source", default="gradients")
_COUNT = itertools.count(1)


class GradientArray(NamedTuple):
    """The outputs of TensorArrayGradV3 and TensorArrayGradWithShape."""

    grad_handle: Handle
    flow_out: Array


@op("TensorArrayGradV3")
def tensor_array_grad_v3(handle: Handle, flow_in: Host, source: str, name: str | None = None) -> GradientArray:
    """The gradient array called `source` of a forward array, made if there is none yet.

    It has the size that the forward array has now, and takes from it the shape of every element written so far. Writes
    to one element add up; an element that nothing was written to is read as zeros. The forward array grows no more.
    """
    return _gradient_array(handle, flow_in, (), source)


@op("TensorArrayGradWithShape")
def tensor_array_grad_with_shape(
    handle: Handle, flow_in: Host, shape_to_prepend: Host, source: str, name: str | None = None
) -> GradientArray:
    """The gradient array called `source`, with `shape_to_prepend` before the shape of every element.

    That is room for several gradients of each element: one for every example, output or member of an ensemble. An array
    that exists under `source` comes back as it is, whatever it was made with.
    """
    prepend = tuple(integer_vector(shape_to_prepend, "int32", "shape_to_prepend").tolist())
    if any(d < 0 for d in prepend):
        raise InvalidArgumentError(f"shape_to_prepend must not have a negative dimension, got {list(prepend)}")
    check_total(prepend, "shape_to_prepend")
    return _gradient_array(handle, flow_in, prepend, source)


def _gradient_array(handle: Handle, flow_in: Array, prepend: tuple[int, ...], source: str) -> GradientArray:
    called, flow_in = text("source", source, required=True), flow(flow_in)
    return GradientArray(elements_of(handle).gradient(called, prepend), zero_flow(flow_in))


@contextmanager
def gradient_source(source: str | None = None) -> Iterator[str]:
    """Within it, the gradients of array ops use the gradient arrays called `source`; by default a name not used before.

    Each backward pass over the same array needs gradient arrays of its own, because what was read from one is gone.
    """
    token = _SOURCE.set(f"gradients_{next(_COUNT)}" if source is None else source)
    try:
        yield _SOURCE.get()
    finally:
        _SOURCE.reset(token)


def current_source() -> str:
    """The name under which a gradient finds its gradient array now."""
    return _SOURCE.get()
