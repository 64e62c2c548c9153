"""The arrays of calls: checked, concatenated to the arrays of a batch, and cut from them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .. import kernels
from ..core import adapters
from ..core.arrays import Array, asarray, common_library, device_of, dtype_of, first_row, is_concrete, library_of
from ..core.inputs import is_fine, items, shown, take
from ..core.small import cut as cut_small
from ..core.small import pieces, stack
from ..errors import InvalidArgumentError
from ..ragged.variant import VariantArray
from .queue import Batch

#: A batch of more bytes is not put together inside an event loop.
SHORT_BYTES = 1 << 20

#: NumPy dtypes that need no conversion.
PLAIN = frozenset(map(np.dtype, ["?", "b", "B", "h", "H", "i", "I", "q", "Q", "l", "L", "e", "f", "d", "F", "D"]))
SUPPORTED = frozenset([
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32",
    "uint32", "int64", "uint64", "bool", "complex64", "complex128", "string", "variant",
])  # fmt: skip

# --- checks ---


def tensors(in_tensors: Iterable[Any]) -> tuple[list[Array], str, int]:
    """Return the inputs as arrays of one library on one device, each of a type that can be batched, the library, and their rows."""
    # The items of an array are its rows, as in TensorFlow.
    given = in_tensors if type(in_tensors) is list else items("in_tensors", in_tensors)
    if len(given) == 1 and type(x := given[0]) is np.ndarray and x.dtype in PLAIN and x.shape:
        return given, "numpy", len(x)  # for the row "Batch+Unbatch, 1 thread" of `benchmarks/batching.py`
    if not given:
        raise InvalidArgumentError("in_tensors must hold at least one tensor, got none")
    library = common_library([a_value(x) for x in given])
    arrays = [tensor(f"in_tensors[{i}]", x, library) for i, x in enumerate(given)]
    devices = {device_of(a_value(x)) for x in arrays}
    if len(devices) > 1:
        raise InvalidArgumentError(f"in_tensors must be on one device, got {sorted(map(str, devices))}")
    return arrays, library, _first_dimension(arrays)


def _first_dimension(arrays: Sequence[Array]) -> int:
    """Return the number of rows of a call; all its tensors must have the same."""
    rows = -1
    for i, x in enumerate(arrays):
        if not x.shape:
            raise InvalidArgumentError(
                f"Batching input tensors must have at least one dimension, got a scalar as in_tensors[{i}]"
            )
        if i and x.shape[0] != rows:
            raise InvalidArgumentError(
                f"Batching input tensors supplied in a given op invocation must have equal 0th-dimension size, got {rows} "
                f"in in_tensors[0] and {x.shape[0]} in in_tensors[{i}]"
            )
        rows = x.shape[0]
    return rows


def tensor(name: str, x: Any, library: str) -> Array:
    """Return one input as an array that can be batched: of a supported type, not traced, detached from any graph."""
    if type(x) is VariantArray or (type(x) is np.ndarray and x.dtype in PLAIN):
        return x
    x = as_array(name, x if is_fine(x) else take(name, x), library)
    if not is_concrete(x):
        raise InvalidArgumentError(
            f"{name} must have its values now, and is being traced: a call that waits for others runs outside "
            "jax.jit; compile the function it runs instead"
        )
    if library == "numpy":
        x = plain_numpy(x)
    if (dtype := dtype_of(x)) not in SUPPORTED or not _is_text(x):
        raise InvalidArgumentError(
            f"{name} cannot be batched: it must have numbers, booleans or text, got {x.dtype if dtype != 'string' else 'object'}; "
            "the option items of weft.batched takes Python objects"
        )
    if library != "torch":
        return x
    if not x.is_cpu:
        adapters.of("torch").leave_stream(x)
    return x.detach()


def _is_text(x: Array) -> bool:
    return getattr(x.dtype, "kind", "") != "O" or all(isinstance(item, (str, bytes)) for item in x.flat)


def as_array(name: str, x: Any, library: str) -> Array:
    """Convert `x` to an array of `library`."""
    try:
        return asarray(x, library)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # text beside tensors, numbers that fit no dtype
        raise InvalidArgumentError(f"{name} must be an array of {library}, or numbers, got {shown(x)}") from None


def plain_numpy(x: np.ndarray) -> np.ndarray:
    """Convert strings of every kind to objects, and numbers to the machine's byte order."""
    if x.dtype.kind in "SUT":
        return x.astype(object)
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


# --- libraries ---


def a_value(x: Any) -> Any:
    """Return an array with the library and the device of `x`: itself, or the values of a variant array, if it has any."""
    if type(x) is not VariantArray:
        return x
    if x.columns is not None:
        return x.columns.values
    return next((values for values in x.rows().values if values is not None), None)


def library_in(x: Any) -> str:
    """Return the library of an array, or of the values of a variant array."""
    return library_of(a_value(x)) or "numpy"


def like(values: np.ndarray, x: Any) -> Array:
    """Return host values as an array of the library and on the device of `x`."""
    x = a_value(x)
    library = library_of(x)
    if library == "torch":
        return sys.modules["torch"].from_numpy(values).to(x.device)
    return sys.modules["jax"].numpy.asarray(values) if library == "jax" else values


# --- batches ---


def join_batch(batch: Batch, inputs: list[list[Array]]) -> tuple[list[Array], dict[int, Exception]]:
    """Return the padded tensors of a batch, without the rows of callers that have resized theirs, and an error for each of these.

    A caller can resize its array while it waits: the rows of the others would then be at other places.
    """
    padded, error = batch.padded, None
    if padded == batch.rows:
        try:
            tensors = join_inputs(inputs, 0)
            if all(x.shape[0] == padded for x in tensors):
                return tensors, {}
        except InvalidArgumentError as not_alike:
            error = not_alike
    inputs = [[_fixed(x) for x in tensors] for tensors in inputs]
    refused: dict[int, Exception] = {}
    for i, task in enumerate(batch.tasks):
        if any(x.shape[0:1] != (task.rows,) for x in inputs[i]):
            refused[i] = InvalidArgumentError(
                f"the tensors of a call must keep their shape until it is answered: there were {task.rows} rows, "
                f"now the shapes are {[list(x.shape) for x in inputs[i]]}"
            )
    if error is not None and not refused:
        raise error
    kept = [tensors for i, tensors in enumerate(inputs) if i not in refused]
    return join_inputs(kept, padded if batch.allowed else 0) if kept else [], refused


def _fixed(x: Array) -> Array:
    """Return `x`, or a view of it whose shape the caller cannot change."""
    return x[:] if type(x) is np.ndarray or library_of(x) == "torch" else x


def join_inputs(inputs: Sequence[Sequence[Array]], rows: int) -> list[Array]:
    """Concatenate the tensors of callers place by place, padded with the first row up to `rows` rows; they must be alike."""
    if rows == 0 and (small := stack(inputs)) is not None:
        return [small]
    columns = list(zip(*inputs, strict=False))
    if len(inputs) > 1:
        for tensors in inputs:
            if len(tensors) != len(columns):
                raise _not_alike(inputs)
        for column in columns:
            dtype = column[0].dtype
            for x in column:
                if x.dtype != dtype:
                    raise _not_alike(inputs)
    try:
        return leave_stream([concat(column, rows) for column in columns])
    except (ValueError, TypeError, RuntimeError) as error:  # raised for different trailing dimensions
        raise _not_alike(inputs) from error


def _not_alike(inputs: Sequence[Sequence[Array]]) -> InvalidArgumentError:
    """Return the error for calls of a batch that differ."""
    kinds = [[f"{x.dtype}{['n', *x.shape[1:]]}" for x in tensors] for tensors in inputs]
    return InvalidArgumentError(
        "all calls of a batch must have the same number of tensors with the same dtypes and trailing dimensions, got "
        f"{kinds[0]} and {next((kind for kind in kinds if kind != kinds[0]), kinds[0])}"
    )


def concat(arrays: Sequence[Array], rows: int = 0) -> Array:
    """Concatenate `arrays` by rows, padded with the first row up to `rows` rows; always a new array."""
    first = arrays[0]
    if type(first) is not VariantArray:
        return kernels.best("concat_rows", first)(enter_stream(arrays), rows)
    missing = rows - sum(map(len, arrays))
    return VariantArray.concat([*arrays, *[first_row(arrays)] * missing] if missing > 0 else arrays)


def cut(x: Array, bounds: Sequence[tuple[int, int]]) -> list[Array]:
    """Return a copy of the rows `start:stop` of `x` for each `(start, stop)` of `bounds`."""
    if (small := cut_small(x, bounds)) is not None:
        return small
    return x.cut(bounds) if type(x) is VariantArray else leave_stream(kernels.best("cut_rows", x)(x, bounds))


def split_rows(x: Array, offsets: list[int]) -> Sequence[Any]:
    """Return a copy of the rows of `x` between each of `offsets`, which begin with 0, and the next one; it has no graph."""
    small = pieces(x, offsets)
    if small is not None:
        return small
    bounds = list(pairwise(offsets))
    return adapters.of("torch", __package__).split_rows(x, bounds) if library_of(x) == "torch" else cut(x, bounds)


def is_short(batch: Batch) -> bool:
    """Whether a batch is small enough to be put together inside an event loop."""
    first = batch.tasks[0].owner
    size = 0
    for x in first.payload:
        size += x.nbytes if type(x) is np.ndarray else getattr(x, "nbytes", 0)
    return bool(size * batch.rows < SHORT_BYTES * first.rows)


# --- streams ---


def enter_stream(arrays: Sequence[Any]) -> Sequence[Any]:
    """Return arrays of other threads, which this thread's CUDA stream may use."""
    if is_on_device(arrays[0]):
        adapters.of("torch").enter_stream(arrays)
    return arrays


def leave_stream(arrays: list[Array]) -> list[Array]:
    """Return arrays that other threads may use on any CUDA stream."""
    for x in arrays:
        if is_on_device(x):
            adapters.of("torch").leave_stream(x)
    return arrays


def is_on_device(x: Any) -> bool:
    """Return True for a tensor of PyTorch that is not in host memory."""
    return library_of(x) == "torch" and type(x) is not VariantArray and not x.is_cpu
