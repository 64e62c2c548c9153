"""What Batch and BatchFunction share: their attributes, their tensors, and how a batch is put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from .. import _check as check
from .. import kernels
from .._arrays import Array, asarray, common_library, device_of, dtype_of, is_concrete
from .._resources import Scope, current
from ..batching.queue import Batch as Closed
from ..batching.queue import Limits
from ..errors import InvalidArgumentError, OpError

#: Above this a batch is not put together inside an event loop.
SHORT_BYTES = 1 << 20
MOST_THREADS = 4096

#: NumPy dtypes that need no second look.
PLAIN = frozenset(map(np.dtype, ["?", "b", "B", "h", "H", "i", "I", "q", "Q", "l", "L", "e", "f", "d", "F", "D"]))
SUPPORTED = frozenset(
    [
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "bool",
        "complex64",
        "complex128",
        "string",
        "variant",
    ]
)


class Attributes(NamedTuple):
    """The attributes that make a queue, as integers in TensorFlow's units."""

    num_batch_threads: int
    max_batch_size: int
    batch_timeout_micros: int
    max_enqueued_batches: int
    allowed_batch_sizes: tuple[int, ...]


def attributes(threads: Any, rows: Any, timeout: Any, enqueued: Any, allowed: Any) -> Attributes:
    """The attributes, each a 32-bit integer; whether they make a queue is seen when one has to be made."""
    sizes = allowed if type(allowed) is tuple else tuple(allowed) if type(allowed) is list else None
    try:
        return (
            _attributes(threads, rows, timeout, enqueued, sizes or ())
            if sizes is not None
            else _slow(threads, rows, timeout, enqueued, allowed)
        )
    except TypeError:  # not hashable: scalar arrays
        return _slow(threads, rows, timeout, enqueued, allowed)


def _slow(threads: Any, rows: Any, timeout: Any, enqueued: Any, allowed: Any) -> Attributes:
    return Attributes(
        check.integer("num_batch_threads", threads),
        check.integer("max_batch_size", rows),
        check.integer("batch_timeout_micros", timeout),
        check.integer("max_enqueued_batches", 10 if enqueued is None else enqueued),
        check.integers("allowed_batch_sizes", allowed),
    )


# Called with the same few attributes again and again: the checks then cost one look-up.
_attributes = lru_cache(maxsize=512)(_slow)


def limits(given: Attributes, **more: Any) -> Limits:
    """The limits of a new queue, or the reason why there can be none."""
    threads, rows, timeout, enqueued, allowed = given
    if threads > MOST_THREADS:
        raise InvalidArgumentError(f"num_batch_threads must be at most {MOST_THREADS}, got {threads}")
    if rows <= 0:
        raise InvalidArgumentError(f"max_batch_size must be positive, got {rows}")
    if timeout < 0:
        raise InvalidArgumentError(f"batch_timeout_micros must not be negative, got {timeout}")
    return Limits(threads, rows, timeout / 1e6, inf if enqueued < 0 else max(enqueued, 1), allowed, **more)


def tensors(in_tensors: Iterable[Any]) -> tuple[list[Array], str]:
    """The inputs as arrays of one library on one device, each a type that can be batched; and the library."""
    given = list(in_tensors)
    if not given:
        raise InvalidArgumentError("in_tensors must hold at least one tensor, got none")
    if all(type(x) is np.ndarray and x.dtype in PLAIN for x in given):
        return given, "numpy"
    library = common_library(given)
    arrays = [tensor(f"in_tensors[{i}]", x, library) for i, x in enumerate(given)]
    if len(arrays) > 1 and len({device_of(x) for x in arrays}) > 1:
        raise InvalidArgumentError(f"in_tensors must be on one device, got {[str(device_of(x)) for x in arrays]}")
    return arrays, library


def tensor(name: str, x: Any, library: str) -> Array:
    """One input as an array that can be batched: of a known type, with its values there, outside any graph."""
    x = asarray(x, library)
    if not is_concrete(x):
        raise InvalidArgumentError(
            f"{name} must have its values now, and is being traced: calls that wait for others cannot run under jax.jit"
        )
    if library == "numpy":
        x = _plain_numpy(x)
    if (dtype := dtype_of(x)) not in SUPPORTED or not _is_text(x):
        raise InvalidArgumentError(
            f"{name} has a type that cannot be batched: {x.dtype if dtype != 'string' else 'object'}"
        )
    return x.detach() if library == "torch" else x


def _plain_numpy(x: np.ndarray) -> np.ndarray:
    """Strings of every kind as objects, numbers in the machine's byte order."""
    if x.dtype.kind in "SUT":
        return x.astype(object)
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _is_text(x: Array) -> bool:
    return getattr(x.dtype, "kind", "") != "O" or all(isinstance(item, (str, bytes)) for item in x.flat)


def first_dimension(arrays: Sequence[Array]) -> int:
    """The rows of a call: all its tensors have as many."""
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


def resource_name(op: str, shared_name: Any, name: Any) -> str:
    """The name of a resource: `shared_name`, else `name`, else the op's own."""
    return check.text("shared_name", shared_name) or check.text("name", name) or op


def scope_now() -> Scope:
    """The current scope, with what has expired swept out."""
    scope = current()
    if scope.next_expiry <= scope.clock.now():
        scope.sweep()
    return scope


def join(columns: Sequence[Sequence[Array]], rows: int) -> list[Array]:
    """Each column of the callers' tensors as one array of `rows` rows, padded with its first row."""
    return [kernels.best("concat_rows", column[0])(column, rows) for column in columns]


def columns_of(inputs: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """The callers' tensors, by place; they must be as many and alike for all callers."""
    first = inputs[0]
    if any(len(tensors) != len(first) for tensors in inputs):
        raise InvalidArgumentError(
            f"all calls of a batch must have the same number of tensors, got {sorted({len(t) for t in inputs})}"
        )
    columns = [[tensors[i] for tensors in inputs] for i in range(len(first))]
    for i, column in enumerate(columns):
        dtype, trailing = column[0].dtype, column[0].shape[1:]
        for x in column:
            if x.dtype != dtype or x.shape[1:] != trailing or x.ndim != column[0].ndim:
                raise InvalidArgumentError(
                    "all calls of a batch must have tensors of the same dtype and trailing dimensions, got "
                    f"{dtype}{list(column[0].shape)} and {x.dtype}{list(x.shape)} as in_tensors[{i}]"
                )
    return columns


def is_short(batch: Closed) -> bool:
    """Whether a batch is put together in no time."""
    first = batch.tasks[0].owner
    return sum(x.nbytes for x in first.payload) * batch.rows < SHORT_BYTES * max(first.rows, 1)


def refused(scope: Scope, op: str, name: str, error: OpError) -> OpError:
    """`error`, with the observers told."""
    if scope.observers:
        scope.tell("call_refused", op, name, error)
    return error


def place_of(x: Array, library: str) -> Any:
    """The device part of a resource's name."""
    return "cpu" if library == "numpy" else device_of(x)
