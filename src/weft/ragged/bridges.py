"""Conversion to and from Awkward, Arrow and torch nested tensors, without copying values: methods of RaggedTensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arrays import asarray, host, library_of
from ..core.inputs import take
from ..errors import InvalidArgumentError


def to_awkward(self: Any) -> Any:
    """The same buffers as an Awkward Array; values beyond one dimension are regular inside."""
    import awkward as ak

    layout = ak.from_numpy(host(self.flat_values), regulararray=True).layout
    for splits in reversed(self._splits):
        layout = ak.contents.ListOffsetArray(ak.index.Index(splits.copy()), layout)
    return ak.Array(layout)


def from_awkward(cls: Any, array: Any) -> Any:
    """From an Awkward Array of lists of regular numbers, without copying its flat buffer."""
    import awkward as ak

    layout = ak.to_layout(array)
    nested = []
    while layout.is_list and not layout.is_regular:
        layout = layout.to_ListOffsetArray64(True)
        nested.append(np.asarray(layout.offsets))
        layout = layout.content[: nested[-1][-1]]
    try:
        return cls(ak.to_numpy(layout, allow_missing=False), nested)
    except ValueError as error:
        raise InvalidArgumentError(f"this Awkward Array is not lists of regular numbers: {error}") from None


def to_arrow(self: Any) -> Any:
    """The same buffers as an Arrow (large) list array; rows of values beyond one dimension are fixed-size lists."""
    import pyarrow as pa

    values = host(self.flat_values)
    array = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    for splits in reversed(self._splits):
        kind = pa.LargeListArray if splits.dtype == np.int64 else pa.ListArray
        array = kind.from_arrays(pa.array(splits.copy()), array)
    return array


def from_arrow(cls: Any, array: Any) -> Any:
    """From an Arrow list array without nulls, without copying its flat buffer."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    nested, inner = [], []
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        _refuse_nulls(array)
        offsets = array.offsets.to_numpy()
        nested.append(offsets - offsets[0] if len(offsets) and offsets[0] else offsets)
        array = array.flatten()
    while pa.types.is_fixed_size_list(array.type):
        _refuse_nulls(array)
        inner.append(array.type.list_size)
        array = array.flatten()
    _refuse_nulls(array)
    text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    flat = array.to_numpy(zero_copy_only=not (text or pa.types.is_boolean(array.type)))
    return cls(flat.reshape((-1, *inner)), nested)


def _refuse_nulls(array: Any) -> None:
    if array.null_count:
        raise InvalidArgumentError(f"a ragged tensor has no nulls, the Arrow array has {array.null_count}")


def to_nested_tensor(self: Any) -> Any:
    """The same buffer as a jagged torch NestedTensor; one ragged level, torch values."""
    if self.library != "torch" or len(self._splits) != 1:
        raise InvalidArgumentError(
            f"a ragged tensor must have torch values and one ragged level to be a NestedTensor, got {self.library} values and "
            f"{len(self._splits)}"
        )
    import torch

    offsets = torch.from_numpy(self._splits[0].copy()).to(self.flat_values.device)
    return torch.nested.nested_tensor_from_jagged(self.flat_values, offsets)


def from_nested_tensor(cls: Any, nested: Any) -> Any:
    """The buffer of a jagged torch NestedTensor whose ragged dimension is the first after the batch."""
    if (
        library_of(nested) != "torch"
        or not (nested.is_nested and hasattr(nested, "offsets"))
        or nested.lengths() is not None
    ):
        raise InvalidArgumentError("from_nested_tensor takes a NestedTensor of layout torch.jagged without holes")
    from ..core.torch_internals import ragged_axis

    if ragged_axis(nested) != 1:
        raise InvalidArgumentError("the ragged dimension of the NestedTensor must be the first after the batch")
    return cls(nested.values(), [nested.offsets().cpu()])


def cu_seqlens(self: Any) -> Any:
    """The innermost splits for attention kernels: int32, on the device of the values."""
    splits = self._splits[-1]
    if splits[-1] > np.iinfo(np.int32).max:
        raise InvalidArgumentError(f"cu_seqlens must fit in int32, got {splits[-1]} values")
    if self.library == "torch":
        import torch

        return torch.from_numpy(splits.astype(np.int32)).to(self.flat_values.device)
    return asarray(splits.astype(np.int32), self.library)


def from_cu_seqlens(cls: Any, values: Any, cu_seqlens: Any) -> Any:
    """The ragged tensor of packed sequences and their bounds."""
    return cls.from_row_splits(values, host(take("cu_seqlens", cu_seqlens)))
