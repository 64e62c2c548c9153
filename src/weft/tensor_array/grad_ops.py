"""TensorArrayGradV3 and TensorArrayGradWithShape: arrays that add up the gradients of an array's elements."""

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
    """Return the gradient array called `source` of a forward array; make it at the first call.

    It has the forward array's present size, and the shapes of the elements written so far. Writes to one element add up; an
    unwritten element is read as zeros. From then on the forward array does not grow.
    """
    return _gradient_array(handle, flow_in, (), source)


@op("TensorArrayGradWithShape")
def tensor_array_grad_with_shape(
    handle: Handle, flow_in: Host, shape_to_prepend: Host, source: str, name: str | None = None
) -> GradientArray:
    """Return the gradient array called `source`, with `shape_to_prepend` before the shape of every element.

    It holds several gradients of each element: one for every example, output or member of an ensemble. An existing array called
    `source` is returned unchanged, whatever its shape.
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
    """Let gradients of array ops in this block use the gradient arrays called `source`; by default a new name.

    Each backward pass over the same array needs its own gradient arrays, because reading an element clears it.
    """
    token = _SOURCE.set(f"gradients_{next(_COUNT)}" if source is None else source)
    try:
        yield _SOURCE.get()
    finally:
        _SOURCE.reset(token)


def current_source() -> str:
    """The name of the gradient arrays in use."""
    return _SOURCE.get()
