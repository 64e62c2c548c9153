"""The ops on TensorArrays: TensorArrayV3 makes one, the others write, read, measure and close it. And their gradients.

An array lives as long as its handle is referenced; Close frees it earlier. In TensorFlow's graphs, flows order the operations.
Here calls run in the order they are made, and flows are only checked and passed on.

No framework records these ops: elements keep their own graph, and torch, JAX and autograd differentiate through the array. The
gradients below are TensorFlow's, for `weft.vjp`: the gradient of a read is a write to the gradient array, and vice versa.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array, Handle, Host, dtype_attribute, index_like, library_of
from ..core.check import flag, text
from ..core.op import gradient, op
from ..core.shapes import partial_shape
from ..errors import InvalidArgumentError
from .arguments import elements_of, flow, int32_scalar, integer_vector, zero_flow
from .elements import Elements
from .grad_ops import current_source


class Created(NamedTuple):
    """The outputs of TensorArrayV3."""

    handle: Handle
    flow: Array


class Concatenated(NamedTuple):
    """The outputs of TensorArrayConcatV3."""

    value: Array
    lengths: Array


@op("TensorArrayV3", recorded=False)
def tensor_array_v3(
    size: Host,
    dtype: Any,
    element_shape: Sequence[int | None] | None = None,
    dynamic_size: bool = False,
    clear_after_read: bool = True,
    identical_element_shapes: bool = False,
    tensor_array_name: str = "",
    name: str | None = None,
) -> Created:
    """Return the handle of a new array of `size` unwritten elements, and a flow."""
    elements = Elements(
        dtype_attribute(dtype),
        int32_scalar(size, "size"),
        partial_shape(element_shape, "element_shape"),
        dynamic=flag("dynamic_size", dynamic_size),
        clear_after_read=flag("clear_after_read", clear_after_read),
        identical=flag("identical_element_shapes", identical_element_shapes),
        name=text("tensor_array_name", tensor_array_name, required=True) or text("name", name) or "TensorArrayV3",
    )
    return Created(elements, zero_flow(size))


@op("TensorArrayWriteV3", output="flow_out")
def tensor_array_write_v3(handle: Handle, index: Host, value: Array, flow_in: Host, name: str | None = None) -> Array:
    """Store `value` as element `index`, which must not have been written or read before; return `flow_in`."""
    at, flow_in = int32_scalar(index, "index"), flow(flow_in)
    elements_of(handle).write(at, value)
    return flow_in


@gradient(tensor_array_write_v3)
def tensor_array_write_v3_gradient(g: Array, handle: Handle, index: Array) -> dict[str, Array]:
    """Return element `index` of the gradient array: the sum of the gradients of all reads of the element."""
    back = elements_of(handle).gradient(current_source())
    return {"value": back.read(int32_scalar(index, "index")), "flow_in": g}


@op("TensorArrayReadV3", output="value")
def tensor_array_read_v3(handle: Handle, index: Host, flow_in: Host, dtype: Any, name: str | None = None) -> Array:
    """Return element `index`; zeros if it was not written and its shape is known."""
    at, _ = int32_scalar(index, "index"), flow(flow_in)
    return _typed(handle, dtype).read(at)


@gradient(tensor_array_read_v3)
def tensor_array_read_v3_gradient(g: Array, handle: Handle, index: Array, flow_in: Array) -> dict[str, Array]:
    """Add `g` to element `index` of the gradient array."""
    elements_of(handle).gradient(current_source()).write(int32_scalar(index, "index"), g)
    return {"flow_in": zero_flow(flow_in)}


@op("TensorArrayGatherV3", output="value")
def tensor_array_gather_v3(
    handle: Handle,
    indices: Host,
    flow_in: Host,
    dtype: Any,
    element_shape: Sequence[int | None] | None = None,
    name: str | None = None,
) -> Array:
    """Return the elements `indices`, which must have one shape, as the rows of one array.

    From then on all elements must have `element_shape`.
    """
    wanted, _ = partial_shape(element_shape, "element_shape"), flow(flow_in)
    return _typed(handle, dtype).gather(integer_vector(indices, "int32", "indices"), wanted)


@gradient(tensor_array_gather_v3)
def tensor_array_gather_v3_gradient(g: Array, handle: Handle, indices: Array, flow_in: Array) -> dict[str, Array]:
    """Add the rows of `g` to the elements `indices` of the gradient array."""
    back = elements_of(handle).gradient(current_source())
    back.scatter(integer_vector(indices, "int32", "indices"), g)
    return {"flow_in": zero_flow(flow_in)}


@op("TensorArrayScatterV3", output="flow_out")
def tensor_array_scatter_v3(
    handle: Handle, indices: Host, value: Array, flow_in: Host, name: str | None = None
) -> Array:
    """Store the rows of `value` as the elements `indices`; return `flow_in`."""
    at, flow_in = integer_vector(indices, "int32", "indices"), flow(flow_in)
    elements_of(handle).scatter(at, value)
    return flow_in


@gradient(tensor_array_scatter_v3)
def tensor_array_scatter_v3_gradient(g: Array, handle: Handle, indices: Array, value: Array) -> dict[str, Array]:
    """Return the elements `indices` of the gradient array, as rows."""
    back = elements_of(handle).gradient(current_source())
    at = integer_vector(indices, "int32", "indices")
    return {"value": back.gather(at, None) if len(at) else value, "flow_in": g}


@op("TensorArrayConcatV3")
def tensor_array_concat_v3(
    handle: Handle,
    flow_in: Host,
    dtype: Any,
    element_shape_except0: Sequence[int | None] | None = None,
    name: str | None = None,
) -> Concatenated:
    """Return all elements one below the other, and the number of rows of each."""
    wanted = partial_shape(element_shape_except0, "element_shape_except0")
    flow(flow_in)
    value, lengths = _typed(handle, dtype).concat(wanted)
    return Concatenated(value, index_like(lengths, library_of(value) or "numpy"))


@gradient(tensor_array_concat_v3)
def tensor_array_concat_v3_gradient(
    g: Concatenated, handle: Handle, flow_in: Array, lengths: Array
) -> dict[str, Array]:
    """Add pieces of `g` to the elements of the gradient array."""
    back = elements_of(handle).gradient(current_source())
    back.split(g.value, integer_vector(lengths, "int64", "lengths"))
    return {"flow_in": zero_flow(flow_in)}


@op("TensorArraySplitV3", output="flow_out")
def tensor_array_split_v3(handle: Handle, value: Array, lengths: Host, flow_in: Host, name: str | None = None) -> Array:
    """Store consecutive pieces of `value` as the elements from 0 on; return `flow_in`."""
    rows, flow_in = integer_vector(lengths, "int64", "lengths"), flow(flow_in)
    elements_of(handle).split(value, rows)
    return flow_in


@gradient(tensor_array_split_v3)
def tensor_array_split_v3_gradient(g: Array, handle: Handle, value: Array) -> dict[str, Array]:
    """Return the elements of the gradient array one below the other."""
    inner = np.shape(value)[1:] if library_of(value) is None else tuple(value.shape[1:])
    back, _ = elements_of(handle).gradient(current_source()).concat(inner)
    return {"value": back, "flow_in": g}


@op("TensorArraySizeV3", output="size")
def tensor_array_size_v3(handle: Handle, flow_in: Host, name: str | None = None) -> Array:
    """Return the number of elements, an int32 scalar."""
    flow_in = flow(flow_in)
    return index_like(np.asarray(elements_of(handle).count(), np.int32), library_of(flow_in) or "numpy")


@op("TensorArrayCloseV3")
def tensor_array_close_v3(handle: Handle, name: str | None = None) -> None:
    """Free the elements. Every later use of the handle but another Close is refused."""
    elements_of(handle).close()


def _typed(handle: Any, dtype: Any) -> Elements:
    elements = elements_of(handle)
    # A name is the usual case; other dtypes take longer to convert than a read. Benchmark row "reads" needs this.
    if type(dtype) is str and dtype == elements.element_dtype:
        return elements
    if (wanted := dtype_attribute(dtype)) != elements.element_dtype:
        raise InvalidArgumentError(f"dtype must be that of {elements.name}, {elements.element_dtype}, got {wanted}")
    return elements
