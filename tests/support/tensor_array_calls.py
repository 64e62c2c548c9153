"""The array ops under short names."""

from __future__ import annotations

import numpy as np

from weft import errors, raw_ops

INVALID = errors.InvalidArgumentError


def make(size=3, dtype="float32", **attributes):
    return raw_ops.TensorArrayV3(size=size, dtype=dtype, **attributes).handle


def write(handle, index, value):
    return raw_ops.TensorArrayWriteV3(handle=handle, index=index, value=value, flow_in=0.0)


def read(handle, index, dtype="float32"):
    return raw_ops.TensorArrayReadV3(handle=handle, index=index, flow_in=0.0, dtype=dtype)


def gather(handle, indices, dtype="float32", element_shape=None):
    return raw_ops.TensorArrayGatherV3(
        handle=handle, indices=indices, flow_in=0.0, dtype=dtype, element_shape=element_shape
    )


def scatter(handle, indices, value):
    return raw_ops.TensorArrayScatterV3(handle=handle, indices=indices, value=value, flow_in=0.0)


def concat(handle, dtype="float32", element_shape_except0=None):
    return raw_ops.TensorArrayConcatV3(
        handle=handle, flow_in=0.0, dtype=dtype, element_shape_except0=element_shape_except0
    )


def split(handle, value, lengths):
    return raw_ops.TensorArraySplitV3(handle=handle, value=value, lengths=lengths, flow_in=0.0)


def size(handle):
    return int(raw_ops.TensorArraySizeV3(handle=handle, flow_in=0.0))


def close(handle):
    return raw_ops.TensorArrayCloseV3(handle=handle)


def grad(handle, source="g", prepend=None):
    if prepend is None:
        return raw_ops.TensorArrayGradV3(handle=handle, flow_in=0.0, source=source).grad_handle
    return raw_ops.TensorArrayGradWithShape(
        handle=handle, flow_in=0.0, shape_to_prepend=prepend, source=source
    ).grad_handle


def f32(*values):
    return np.array(values, np.float32)
