"""What Batch and BatchFunction share: their attributes, their tensors, and how a batch is put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from .. import kernels
from ..core import adapters, check
from ..core.arrays import Array, asarray, common_library, device_of, dtype_of, first_row, is_concrete, library_of
from ..core.inputs import is_fine, items, shown, take
from ..core.scope import Scope
from ..core.small import cut as cut_small
from ..core.small import stack
from ..errors import InvalidArgumentError, OpError
from ..ragged.variant import VariantArray
from .dispatcher import Dispatcher, QueuedCall
from .queue import Batch as Closed
from .queue import Limits

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
    return Attributes(
        check.integer("num_batch_threads", threads),
        check.integer("max_batch_size", rows),
        check.integer("batch_timeout_micros", timeout),
        check.integer("max_enqueued_batches", 10 if enqueued is None else enqueued),
        check.integers("allowed_batch_sizes", allowed),
    )


class remembered:
    """`plan`, a function of attributes, with its last answers kept: the same few come again, and cost one look-up then.

    Values that can change, such as lists and arrays, are not kept.
    """

    def __init__(self, plan: Callable[..., Any]) -> None:
        @lru_cache(maxsize=1024, typed=True)
        def kept(*attributes: Any) -> Any:
            for attribute in attributes:
                if not isinstance(attribute, _PLAIN_ATTRIBUTES):
                    raise TypeError(f"cannot be kept: {attribute!r}")
            return plan(*attributes)

        self._plan, self._kept = plan, kept

    def of(self, attributes: tuple[Any, ...]) -> Any:
        """The plan of these attributes."""
        try:
            return self._kept(*attributes)
        except TypeError:
            return self._plan(*(tuple(a) if type(a) is list else a for a in attributes))


_PLAIN_ATTRIBUTES = (int, float, str, bytes, tuple, type(None), np.generic)


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


def tensors(in_tensors: Iterable[Any]) -> tuple[list[Array], str, int]:
    """The inputs as arrays of one library on one device, each of a type that can be batched; the library; and their rows."""
    given = (
        in_tensors if type(in_tensors) is list else items("in_tensors", in_tensors)
    )  # an array: its rows, as in TensorFlow
    if len(given) == 1 and type(x := given[0]) is np.ndarray and x.dtype in PLAIN and x.shape:
        return given, "numpy", len(x)  # the usual case
    if not given:
        raise InvalidArgumentError("in_tensors must hold at least one tensor, got none")
    library = common_library([a_value(x) for x in given])
    arrays = [tensor(f"in_tensors[{i}]", x, library) for i, x in enumerate(given)]
    devices = {device_of(a_value(x)) for x in arrays}
    if len(devices) > 1:
        raise InvalidArgumentError(f"in_tensors must be on one device, got {sorted(map(str, devices))}")
    return arrays, library, _first_dimension(arrays)


def tensor(name: str, x: Any, library: str) -> Array:
    """One input as an array that can be batched: of a known type, with its values there, outside any graph."""
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
            f"{name} has a type that cannot be batched: {x.dtype if dtype != 'string' else 'object'}"
        )
    return x.detach() if library == "torch" else x


def as_array(name: str, x: Any, library: str) -> Array:
    """What was taken as an array of `library`."""
    try:
        return asarray(x, library)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # text beside tensors, numbers that fit no dtype
        raise InvalidArgumentError(f"{name} must be an array of {library}, or numbers, got {shown(x)}") from None


def a_value(x: Any) -> Any:
    """An array that tells the library and the device of `x`: itself, or what a variant array holds, if anything."""
    if type(x) is not VariantArray:
        return x
    if x.columns is not None:
        return x.columns.values
    return next((values for values in x.rows().values if values is not None), None)


def library_in(x: Any) -> str:
    """The library of an array, or of what a variant array holds."""
    return library_of(a_value(x)) or "numpy"


def concat(arrays: Sequence[Array], rows: int = 0) -> Array:
    """A new array: `arrays` one below the other, padded with the first row up to `rows` rows."""
    first = arrays[0]
    if type(first) is not VariantArray:
        return kernels.best("concat_rows", first)(arrays, rows)
    missing = rows - sum(map(len, arrays))
    return VariantArray.concat([*arrays, *[first_row(arrays)] * missing] if missing > 0 else arrays)


def cut(x: Array, bounds: Sequence[tuple[int, int]]) -> list[Array]:
    """A new array for each `(start, stop)` of `bounds`: those rows of `x`."""
    if (small := cut_small(x, bounds)) is not None:
        return small
    return x.cut(bounds) if type(x) is VariantArray else kernels.best("cut_rows", x)(x, bounds)


def plain_numpy(x: np.ndarray) -> np.ndarray:
    """Strings of every kind as objects, numbers in the machine's byte order."""
    if x.dtype.kind in "SUT":
        return x.astype(object)
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _is_text(x: Array) -> bool:
    return getattr(x.dtype, "kind", "") != "O" or all(isinstance(item, (str, bytes)) for item in x.flat)


def _first_dimension(arrays: Sequence[Array]) -> int:
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


class Plan:
    """What the attributes of a call say, checked: which resource it means, and in `given` how that is to be made."""

    def __init__(self, op: str, container: Any, shared_name: Any, name: Any, given: Any, queue: Any = "") -> None:
        self.op = op
        self.container = check.text("container", container)
        self.name = resource_name(op, shared_name, name)
        self.given = given
        self.queue = check.text("batching_queue", queue)
        self.numpy_key = (op, "numpy", "cpu", self.container, self.name)

    def key(self, x: Array, library: str) -> Any:
        """The resource's key for arrays like `x`."""
        if library == "numpy":
            return self.numpy_key
        return (self.op, library, device_of(a_value(x)), self.container, self.name)

    def lane(self, library: str) -> Any:
        """The queue within the resource: callers with gradients on and off do not share a batch.

        Nor do, in JAX, callers that differentiate their inputs and callers that do not: what has the batch must do as all.
        """
        if library not in ("torch", "jax"):
            return self.queue
        return (self.queue, adapters.of(library).gradients_on())

    def warn(self, scope: Scope, key: Any, made_with: Any) -> None:
        """Say that the resource exists with other attributes, once in its life."""
        scope.warn_once(key, f"{self.op} {self.name!r} exists with {made_with}: {self.given} is ignored")


class Queue(Dispatcher):
    """The resource of Batch and of BatchFunction, with the attributes of the call that made it."""

    given: Any


def queue_of(
    plan: Plan, key: Any, scope: Scope, make: Callable[[Plan, Scope], Queue], rows: int, low: bool = False
) -> Queue:
    """The queue that `plan` means, made if there is none; a call that it would refuse when empty makes none."""
    found = scope.resources.get(key)
    if found is None:
        new = make(plan, scope)
        new.check(rows, low)
        found = scope.keep(key, new)
    if found.given is not plan.given and found.given != plan.given:
        plan.warn(scope, key, found.given)
    return found


def make_without_rows(plan: Plan, key: Any, scope: Scope, make: Callable[[Plan, Scope], Queue]) -> None:
    """Make the queue for a call without rows, if its attributes can make one: such a call need not know if they cannot."""
    if key not in scope.resources:
        try:
            queue = make(plan, scope)
        except InvalidArgumentError:
            return
        scope.keep(key, queue)


def enter(call: QueuedCall, lane: Any) -> None:
    """Put `call` in its queue; observers are told of a refusal."""
    queue = call.dispatcher
    try:
        queue.enter(lane, call, call.arrived)
    except OpError as error:
        scope = queue.scope
        if scope.observers:
            scope.tell("call_refused", queue.op, queue.name, error)
        raise


def join(inputs: Sequence[Sequence[Array]], rows: int) -> list[Array]:
    """The callers' tensors, each place as one array of `rows` rows, padded with its first row; they must be alike."""
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
        return [concat(column, rows) for column in columns]
    except (
        ValueError,
        TypeError,
        RuntimeError,
    ) as error:  # what the libraries raise for trailing dimensions that differ
        raise _not_alike(inputs) from error


def join_tasks(batch: Closed, inputs: list[list[Array]]) -> tuple[list[Array], dict[int, Exception]]:
    """The tensors of a batch, padded, without those of callers that have resized them meanwhile; the error of each of these.

    A caller can still resize its array while it waits: then the rows of others would lie elsewhere.
    """
    padded, error = batch.padded, None
    if padded == batch.rows:
        try:
            tensors = join(inputs, 0)
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
    return join(kept, padded if batch.allowed else 0) if kept else [], refused


def _fixed(x: Array) -> Array:
    """`x`, or a view of it, whose shape nobody can change."""
    return x[:] if type(x) is np.ndarray or library_of(x) == "torch" else x


def _not_alike(inputs: Sequence[Sequence[Array]]) -> InvalidArgumentError:
    """What the calls of a batch differ in."""
    kinds = [[f"{x.dtype}{['n', *x.shape[1:]]}" for x in tensors] for tensors in inputs]
    return InvalidArgumentError(
        "all calls of a batch must have the same number of tensors with the same dtypes and trailing dimensions, got "
        f"{kinds[0]} and {next((kind for kind in kinds if kind != kinds[0]), kinds[0])}"
    )


def is_short(batch: Closed) -> bool:
    """Whether a batch is put together in no time."""
    first = batch.tasks[0].owner
    size = 0
    for x in first.payload:
        size += x.nbytes if type(x) is np.ndarray else getattr(x, "nbytes", 0)
    return bool(size * batch.rows < SHORT_BYTES * first.rows)
