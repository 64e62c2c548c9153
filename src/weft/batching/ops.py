"""Batch, Unbatch and UnbatchGrad: many concurrent calls, one batch, and every caller's rows and gradients back to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from ..core import adapters, check, memory
from ..core.arrays import Array, Host, common_library, device_of, host, index_like, library_of, namespace
from ..core.op import gradient, op
from ..core.scope import Scope, current
from ..core.small import index, no_index, no_rows, scalar
from ..core.ticket import Ticket
from ..core.torch_backward import BatchNodes
from ..errors import InvalidArgumentError
from ..ragged.rows import add_rows
from ..ragged.variant import VariantArray
from . import batch_arrays, ids
from .attributes import Attributes, OpCall, OpDispatcher, ResourceSpec, SpecCache, resource_name
from .batch_arrays import PLAIN
from .batch_arrays import tensors as check_tensors
from .batch_index import INT64, host_index, id_of, owned_rows, rows_of
from .deadline import gradient_seconds
from .ids import is_empty
from .ids import new as new_id
from .processing import Processor
from .queue import Batch as TaskBatch
from .rendezvous import Fetch, Gather, GradientTable, PieceTable

#: How the names of the tables begin that gradients use.
_GRADIENT_TABLES = ("batch_gradient_", "unbatch_grad_gradient_")


class Batch(NamedTuple):
    """The outputs of Batch: the batch for one of its callers, nothing but an id for the others."""

    batched_tensors: list[Array]
    batch_index: Array  # a row (id, start, length) per call
    id: Array


class BatchCall(OpCall):
    """A call of Batch. Its result is made in its own thread: its value is the batch and its index, or None."""

    def __init__(
        self, dispatcher: OpDispatcher, rows: int, payload: list[Array], library: str, queue_key: Any, now: float
    ) -> None:
        self._init_call(dispatcher, rows, payload)
        self.library, self.queue_key, self.arrived = library, queue_key, now
        self.id = new_id()
        self.is_recorded = False  # whether torch records the call
        self.nodes: BatchNodes | None = None  # set if torch records some call of the batch

    def result(self) -> Batch:
        if self.value is None:
            if self.library != "numpy" or type(self.payload[0]) is not ndarray:
                return self._with_nodes(_no_batch(self.payload, self.library, self.id))
            # As `_no_batch`, for the row "asyncio, 10,000 tasks" of `benchmarks/batching.py`.
            return Batch([no_rows(x) for x in self.payload], no_index(), scalar(self.id))
        tensors, rows = self.value
        batch_arrays.enter_stream(tensors)
        made = Batch(tensors, index_like(rows, self.library), index_like(scalar(self.id), self.library))
        return made if self.library == "numpy" else self._with_nodes(made)

    def _with_nodes(self, made: Batch) -> Batch:
        """Mark the tensors of the result if torch records some call of the batch."""
        if self.nodes is not None:
            adapters.of("torch").mark(made.batched_tensors, self.nodes)
        return made if self.then is None else self.then(made)


@op("Batch", waits=True)
def batch(
    in_tensors: list[Array],
    num_batch_threads: int,
    max_batch_size: int,
    batch_timeout_micros: int,
    grad_timeout_micros: int,
    max_enqueued_batches: int = 10,
    allowed_batch_sizes: Sequence[int] = (),
    container: str = "",
    shared_name: str = "",
    batching_queue: str = "",
    name: str | None = None,
) -> Batch:
    """Return the rows of all calls that come together as one batch to the last of them; no rows and an id to the others.

    A batch is closed when it is full, when the next call would overflow it, or `batch_timeout_micros` after its first call. It
    is padded to the next of `allowed_batch_sizes` with its first row. Calls meet by device, array library, `container`,
    `shared_name` and `batching_queue`.
    """
    if type(allowed_batch_sizes) is list:
        allowed_batch_sizes = tuple(allowed_batch_sizes)
    attributes = (num_batch_threads, max_batch_size, batch_timeout_micros, grad_timeout_micros, max_enqueued_batches,
                  allowed_batch_sizes, container, shared_name, batching_queue, name)  # fmt: skip
    return _batch(_batch_spec.of(attributes), attributes, in_tensors)


def _batch(spec: ResourceSpec, attributes: tuple[Any, ...], in_tensors: list[Array]) -> Any:
    tensors, library, rows = check_tensors(in_tensors)
    scope = current()
    now = scope.arrive()
    dispatcher = _dispatcher(spec, scope, tensors, library, rows)
    if dispatcher is None:
        return _no_batch(tensors, library, ids.new_empty())
    # A full batch by itself skips the empty queue, for the row "Batch+Unbatch, 1 thread" of `benchmarks/batching.py`.
    if rows == dispatcher.scheduler.target and dispatcher.is_quiet:
        dispatcher.last_used = now
        id = ids.new()
        joined = batch_arrays.join_inputs([tensors], 0)
        return Batch(joined, index_like(index([id, 0, rows]), library), index_like(scalar(id), library))
    call = BatchCall(dispatcher, rows, tensors, library, spec.queue_key(library), now)
    if library == "torch":
        call.is_recorded = adapters.of("torch").is_recorded()
        _record_with_others(batch, (tensors, *attributes), call)
    return call


def _dispatcher(spec: ResourceSpec, scope: Scope, tensors: list[Array], library: str, rows: int) -> OpDispatcher | None:
    """Return the dispatcher for a call of so many rows; None for a call without rows."""
    key = spec.key(tensors[0], library)
    if spec.attributes.num_batch_threads <= 0 and key not in scope.resources:
        raise InvalidArgumentError(f"num_batch_threads must be positive, got {spec.attributes.num_batch_threads}")
    if rows == 0:
        spec.make_without_rows(key, scope, _make)
        return None
    return spec.dispatcher(key, scope, _make, rows)


@SpecCache
def _batch_spec(attributes: tuple[Any, ...]) -> ResourceSpec:
    threads, rows, timeout, grad_timeout, enqueued, allowed, container, shared_name, queue, name = attributes
    given = Attributes.of(threads, rows, timeout, enqueued, allowed)
    check.integer("grad_timeout_micros", grad_timeout, check.INT64)
    sizes = given.allowed_batch_sizes
    check.increasing("allowed_batch_sizes", sizes)
    if sizes and sizes[-1] != given.max_batch_size:
        raise InvalidArgumentError(
            f"the last of allowed_batch_sizes must equal max_batch_size = {given.max_batch_size}, got {list(sizes)}"
        )
    return ResourceSpec("Batch", container, shared_name, name, given, queue)


def _make(spec: ResourceSpec, scope: Scope) -> OpDispatcher:
    made = OpDispatcher(
        spec.attributes.limits(), Processor(_assemble, scope, "Batch", spec.name), batch_arrays.is_short
    )
    made.attributes = spec.attributes
    return made


def _assemble(closed: TaskBatch) -> list[Any]:
    """Return the batch and its index for the last call, None for the others."""
    joined: list[Any] = closed.tasks
    answers: list[Any] = [None] * len(joined)
    tensors, refused = batch_arrays.join_batch(closed, [call.payload for call in joined])
    if refused:
        for i, error in refused.items():
            answers[i] = error
        joined = [call for i, call in enumerate(joined) if i not in refused]
        if not joined:
            return answers
    start = 0
    rows: list[int] = []
    for call in joined:
        rows += (call.id, start, call.rows)
        start += call.rows
    answers[closed.tasks.index(joined[-1])] = (tensors, index(rows))
    if joined[-1].library == "torch" and any(call.is_recorded for call in joined):
        nodes = BatchNodes(len(joined))
        for call in joined:
            call.nodes = nodes
    return answers


def _record_with_others(op: Any, arguments: Sequence[Any], answer: Ticket) -> Ticket:
    """Have torch record a call on its tensors when it is answered, if it is not recorded but others of its batch are."""
    torch = adapters.of("torch")
    if torch.may_record_afterwards():
        answer.then = partial(torch.record_afterwards, op, arguments)
    return answer


def _no_batch(tensors: Sequence[Array], library: str, id: int) -> Batch:
    """Return the result of a call that does not get the batch: no rows, and its id."""
    empty = [_empty(x, library) for x in tensors]
    return Batch(empty, index_like(no_index(), library), index_like(scalar(id), library))


def _empty(x: Array, library: str) -> Array:
    """Return an array without rows, of the trailing dimensions and dtype of `x`, that does not keep its memory."""
    if type(x) is np.ndarray:
        return no_rows(x)
    if type(x) is VariantArray:
        return x[:0]
    return namespace(library).empty((0, *x.shape[1:]), dtype=x.dtype, device=device_of(x))


@gradient(batch)
def batch_gradient(
    g: Batch,
    batch_index: Array,
    id: Array,
    grad_timeout_micros: int,
    container: str,
    shared_name: str,
    name: str | None,
) -> dict[str, Any]:
    """Return each caller's rows of the batch's gradient, by Unbatch; padding, `batch_index` and `id` have no gradient."""
    forward = resource_name("Batch", shared_name, name)
    return {
        "in_tensors": [
            None
            if gradient is None  # of integers
            else unbatch(
                gradient,
                batch_index,
                id,
                timeout_micros=_gradient_micros(grad_timeout_micros),
                container=container,
                shared_name=f"batch_gradient_{forward}_{i}",
            )
            for i, gradient in enumerate(g.batched_tensors)
        ]
    }


def _gradient_micros(timeout: int = 0) -> int:
    return int(min(timeout if timeout > 0 else gradient_seconds() * 1e6, check.INT32[1]))


@op("Unbatch", waits=True, output="unbatched_tensor")
def unbatch(
    batched_tensor: Array,
    batch_index: Host,
    id: Host,
    timeout_micros: int,
    container: str = "",
    shared_name: str = "",
    name: str | None = None,
) -> Array:
    """Return the rows that belong to `id`, of this call's `batched_tensor` or of that of the call that has the batch.

    A call whose `batch_index` has rows delivers each piece `batched_tensor[start : start + length]` to the call with its id; a call
    without rows waits for its piece, at most `timeout_micros`. Pieces that no call fetched are kept as long.
    """
    attributes = (timeout_micros, container, shared_name, name)
    return _unbatch(_unbatch_spec.of(attributes), attributes, batched_tensor, batch_index, id)


def _unbatch(
    spec: ResourceSpec, attributes: tuple[Any, ...], batched_tensor: Array, batch_index: Array, id: Array
) -> Any:
    is_numpy = type(batched_tensor) is ndarray
    library = "numpy" if is_numpy else batch_arrays.library_in(batched_tensor)
    data = batched_tensor if is_numpy and batched_tensor.shape else _data("batched_tensor", batched_tensor, library)
    rows = batch_index if type(batch_index) is ndarray and batch_index.dtype is INT64 else host_index(batch_index)
    shape = rows.shape
    if len(shape) < 2 or shape[1] != 3 or (len(shape) > 2 and rows.size != 3 * shape[0]):
        raise InvalidArgumentError(f"batch_index must have the shape [n, 3], got {list(shape)}")
    own = id.item() if type(id) is ndarray and id.dtype is INT64 and id.shape == () else id_of(id)
    scope = current()
    now = scope.arrive()
    if shape[0]:
        return _deliver(spec, scope, now, data, library, rows, own)
    if is_numpy and data.dtype not in PLAIN:
        data = batch_arrays.plain_numpy(data)
    if is_empty(own):
        return _empty(data, library)
    fetch = Fetch(scope, _piece_table(spec, spec.key(data, library), scope), own, data.dtype, now)
    if library == "torch":
        _record_with_others(unbatch, (batched_tensor, batch_index, id, *attributes), fetch)
        if batch_arrays.is_on_device(data):
            fetch.then = partial(_fetched, fetch.then)
    return fetch


def _fetched(then: Any, piece: Array) -> Array:
    """Return what Unbatch gives for a piece that another thread has cut on its stream."""
    batch_arrays.enter_stream([piece])
    return piece if then is None else then(piece)


@SpecCache
def _unbatch_spec(attributes: tuple[Any, ...]) -> ResourceSpec:
    timeout, container, shared_name, name = attributes
    seconds = check.integer("timeout_micros", timeout) / 1e6
    return ResourceSpec("Unbatch", container, shared_name, name, seconds)


def _piece_table(spec: ResourceSpec, key: Any, scope: Scope) -> PieceTable:
    table: PieceTable = scope.resources.get(key) or scope.keep(key, PieceTable(spec.attributes))
    if spec.name.startswith(_GRADIENT_TABLES):
        table.timeout = spec.attributes  # the gradient deadline may have been changed
    elif table.timeout != spec.attributes:
        spec.warn(scope, key, f"a timeout of {table.timeout:g} s")
    return table


def _deliver(
    spec: ResourceSpec, scope: Scope, now: float, data: Array, library: str, index: np.ndarray, own: int
) -> Any:
    """Deliver the pieces of a batch; return this call's own piece."""
    rows = rows_of(index, data.shape[0])
    data = batch_arrays.tensor("batched_tensor", data, library)
    pieces = batch_arrays.cut(data, [(start, start + length) for _, start, length in rows])
    named = [row[0] for row in rows]
    key = spec.key(data, library)
    if library == "torch" and adapters.of("torch").is_recorded():
        adapters.of("torch").mark(pieces, BatchNodes(len(rows)))
    if key not in scope.resources:  # a call that is refused must not make the table
        PieceTable(spec.attributes).deliver(scope, own, data.dtype, named, pieces, now)
    return _piece_table(spec, key, scope).deliver(scope, own, data.dtype, named, pieces, now)


def _data(name: str, x: Any, library: str) -> Array:
    if type(x) is not np.ndarray and type(x) is not VariantArray:
        x = batch_arrays.as_array(name, x, library)
    if not x.shape:
        raise InvalidArgumentError(f"{name} must have at least one dimension, got a scalar")
    return x


@gradient(unbatch)
def unbatch_gradient(
    g: Array, batched_tensor: Array, batch_index: Array, id: Array, container: str, shared_name: str, name: str | None
) -> dict[str, Any]:
    """Return the callers' gradients at their rows of the batch, by UnbatchGrad; zeros where no piece was, such as padding."""
    if g is None:  # of integers
        return {}
    batched_tensor = _data("batched_tensor", batched_tensor, batch_arrays.library_in(g))
    if 0 in g.shape[1:]:  # UnbatchGrad knows the owner of a batch by its elements, and here there are none
        return {"batched_tensor": namespace(library_of(g) or "numpy").zeros_like(batched_tensor)}
    joined = unbatch_grad(
        batched_tensor,
        batch_index,
        g,
        id,
        container=container,
        shared_name=f"unbatch_gradient_{resource_name('Unbatch', shared_name, name)}",
    )
    index = memory.own(host(batch_index)).reshape(-1, 3)
    return {"batched_tensor": _at_their_rows(joined, index, batched_tensor.shape[0])}


def _at_their_rows(joined: Array, index: np.ndarray, rows: int) -> Array:
    """Move the pieces of `joined`, which follow each other, to the rows that the index says; the rest of `rows` rows is zero."""
    targets, lengths = index[:, 1], index[:, 2]
    starts = np.cumsum(lengths) - lengths
    if joined.shape[0] == rows and bool((starts == targets).all()):
        return joined
    return add_rows(joined, starts, lengths, targets, rows)


class OwnerCall(Gather):
    """A call of UnbatchGrad that has the batch: the gradients are concatenated in its own thread."""

    def result(self) -> Array:
        joined = batch_arrays.concat(self.value)
        if self.then is None:
            return joined
        torch = adapters.of("torch")
        torch.mark([joined], torch.nodes_of(self.value))
        return self.then(joined)


@op("UnbatchGrad", waits=True, output="batched_grad")
def unbatch_grad(
    original_input: Array,
    batch_index: Host,
    grad: Array,
    id: Host,
    container: str = "",
    shared_name: str = "",
    name: str | None = None,
) -> Array:
    """Return the gradients of all callers of a batch, in the order of its index, to the call that has it; no rows to the others.

    The call whose `original_input` has elements is the owner: it waits for the gradients of every id in `batch_index`, at most the
    gradient deadline (`weft.gradient_deadline`). The others store theirs and return.
    """
    own = id_of(id)
    library = common_library([batch_arrays.a_value(original_input), batch_arrays.a_value(grad)])
    original, piece = _data("original_input", original_input, library), _data("grad", grad, library)
    if original.dtype != piece.dtype:
        raise InvalidArgumentError(f"grad must have the dtype of original_input, {original.dtype}, got {piece.dtype}")
    scope = current()
    now = scope.arrive()
    deadline = now + gradient_seconds()
    key = ResourceSpec("UnbatchGrad", container, shared_name, name, None).key(piece, library)
    is_owner = 0 not in original.shape
    rows = owned_rows(batch_index) if is_owner else []
    if not is_owner and not (type(batch_index) is ndarray and batch_index.dtype is INT64):
        host_index(batch_index)  # refuses another dtype
    piece = batch_arrays.tensor("grad", piece, library)
    if ids.is_empty(own):
        return _empty(piece, library)
    if is_owner:
        owner = OwnerCall(scope, scope.find(key, GradientTable), own, rows, piece, now, deadline)
        if library == "torch":
            _record_with_others(
                unbatch_grad, (original_input, batch_index, grad, id, container, shared_name, name), owner
            )
        return owner
    # The sender may write to its array afterwards: a copy is stored.
    (kept,) = batch_arrays.cut(piece, [(0, piece.shape[0])])
    if library == "torch" and adapters.of("torch").is_recorded():
        # So that the owner's call is recorded, even if its own gradient is constant.
        adapters.of("torch").mark([kept], BatchNodes(1))
    scope.find(key, GradientTable).send(own, kept, now, deadline)
    scope.expires(deadline)
    return _empty(piece, library)


@gradient(unbatch_grad)
def unbatch_grad_gradient(
    g: Array, batch_index: Array, id: Array, container: str, shared_name: str, name: str | None
) -> dict[str, Any]:
    """Return each caller's rows of the gradient of the concatenated gradients, by Unbatch."""
    index = host(batch_index).reshape(-1, 3).copy()
    index[:, 1] = np.cumsum(index[:, 2]) - index[:, 2]
    forward = resource_name("UnbatchGrad", shared_name, name)
    return {
        "grad": unbatch(
            g,
            index_like(index, library_of(batch_index) or "numpy"),
            id,
            timeout_micros=_gradient_micros(),
            container=container,
            shared_name=f"unbatch_grad_gradient_{forward}",
        )
    }
