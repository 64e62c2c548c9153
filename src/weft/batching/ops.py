"""Batch, Unbatch and UnbatchGrad: many concurrent calls, one batch, and every caller's rows and gradients back to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from ..core import adapters, check, memory
from ..core import scope as resources
from ..core.arrays import Array, Host, common_library, device_of, host, index_like, library_of, namespace
from ..core.op import gradient, op
from ..core.scope import arrive, current
from ..core.small import index, no_index, no_rows, scalar
from ..core.ticket import Ticket
from ..core.torch_internals import BatchNodes
from ..errors import ArgumentTypeError, InternalError, InvalidArgumentError
from ..ragged.rows import add_rows
from ..ragged.variant import VariantArray
from . import attributes as calls
from . import ids
from .attributes import PLAIN, enter
from .attributes import tensors as the_tensors
from .deadline import gradient_seconds
from .dispatcher import Dispatcher, QueuedCall
from .ids import is_empty
from .ids import new as new_id
from .queue import Batch as Closed
from .rendezvous import Fetch, Gather, GradientTable, PieceTable, Row

_INT64 = np.dtype(np.int64)
_new = tuple.__new__
#: How the names begin of the meetings that gradients make.
_OF_GRADIENTS = ("batch_gradient_", "unbatch_grad_gradient_")


class Batch(NamedTuple):
    """The outputs of Batch: the batch for one of its callers, nothing but an id for the others."""

    batched_tensors: list[Array]
    batch_index: Array  # a row (id, start, length) per call
    id: Array


class _Join(QueuedCall):
    """A call of Batch: its result is built in its own thread from what the batch's runner left."""

    def __init__(
        self, dispatcher: Dispatcher, rows: int, payload: list[Array], library: str, lane: Any, now: float
    ) -> None:
        self._init_call(dispatcher, rows, payload)
        self.library, self.lane, self.arrived = library, lane, now
        self.id = new_id()
        self.is_recorded = False
        self.nodes: BatchNodes | None = None

    def enter(self) -> None:
        enter(self, self.lane)

    def result(self) -> Batch:
        if self.value is None:
            if self.library != "numpy" or type(self.payload[0]) is not ndarray:
                return self._told(_none_of(self.payload, self.library, self.id))
            return _new(Batch, ([no_rows(x) for x in self.payload], no_index(), scalar(self.id)))
        tensors, rows = self.value
        made = _new(Batch, (tensors, index_like(rows, self.library), index_like(scalar(self.id), self.library)))
        return made if self.library == "numpy" else self._told(made)

    def _told(self, made: Batch) -> Batch:
        """The result, which knows whether the batch needs a gradient."""
        if self.nodes is not None:
            adapters.of("torch").mark(made.batched_tensors, self.nodes)
        return made if self.then is None else self.then(made)


@op("Batch", meets=True)
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
    """One batch of the rows of all calls that come together, to the last of them; no rows and an id to the others.

    A batch is closed when it is full, when the next call would overflow it, or `batch_timeout_micros` after its first call. It
    is padded to the next of `allowed_batch_sizes` with its first row. Calls meet by device, array library, `container`,
    `shared_name` and `batching_queue`.
    """
    if type(allowed_batch_sizes) is list:
        allowed_batch_sizes = tuple(allowed_batch_sizes)
    attributes = (num_batch_threads, max_batch_size, batch_timeout_micros, grad_timeout_micros, max_enqueued_batches,
                  allowed_batch_sizes, container, shared_name, batching_queue, name)  # fmt: skip
    plan = _plan.of(attributes)
    return _batch(plan, attributes, in_tensors)


def _batch(plan: calls.Plan, attributes: tuple[Any, ...], in_tensors: list[Array]) -> Any:
    tensors, library, rows = the_tensors(in_tensors)
    scope = current()
    now = scope.arrive()
    queue = _queue(plan, scope, tensors, library, rows)
    if queue is None:
        return _none_of(tensors, library, ids.new_empty())
    if rows == queue.target and queue.is_quiet:  # a full batch by itself, and nobody waits
        queue.used = now
        id = ids.new()
        return Batch(
            calls.join([tensors], 0), index_like(index([id, 0, rows]), library), index_like(scalar(id), library)
        )
    call = _Join(queue, rows, tensors, library, plan.lane(library), now)
    if library == "torch":
        call.is_recorded = adapters.of("torch").is_recorded()
        _may_join(batch, (tensors, *attributes), call)
    return call


def _queue(
    plan: calls.Plan, scope: resources.Scope, tensors: list[Array], library: str, rows: int
) -> calls.Queue | None:
    """The queue for a call of so many rows; without rows it needs none."""
    key = plan.key(tensors[0], library)
    if plan.given.num_batch_threads <= 0 and key not in scope.resources:
        raise InvalidArgumentError(f"num_batch_threads must be positive, got {plan.given.num_batch_threads}")
    if rows == 0:
        calls.make_without_rows(plan, key, scope, _make)
        return None
    return calls.queue_of(plan, key, scope, _make, rows)


@calls.remembered
def _plan(
    threads: Any, rows: Any, timeout: Any, grad_timeout: Any, enqueued: Any, allowed: Any,
    container: Any, shared_name: Any, queue: Any, name: Any,
) -> calls.Plan:  # fmt: skip
    given = calls.attributes(threads, rows, timeout, enqueued, allowed)
    check.integer("grad_timeout_micros", grad_timeout, check.INT64)
    sizes = given.allowed_batch_sizes
    check.increasing("allowed_batch_sizes", sizes)
    if sizes and sizes[-1] != given.max_batch_size:
        raise InvalidArgumentError(
            f"the last of allowed_batch_sizes must equal max_batch_size = {given.max_batch_size}, got {list(sizes)}"
        )
    return calls.Plan("Batch", container, shared_name, name, given, queue)


def _make(plan: calls.Plan, scope: resources.Scope) -> calls.Queue:
    queue = calls.Queue(calls.limits(plan.given), scope, _assemble, calls.is_short, "Batch", plan.name)
    queue.given = plan.given
    return queue


def _assemble(closed: Closed) -> list[Any]:
    """The batch and its index for the last call, None for the others."""
    joined: list[Any] = closed.tasks
    answers: list[Any] = [None] * len(joined)
    tensors, refused = calls.join_tasks(closed, [call.payload for call in joined])
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


def _may_join(op: Any, arguments: Sequence[Any], answer: Any) -> Any:
    """`answer`, of a call on torch tensors; if it is not recorded, but others of its batch are, it joins them."""
    torch = adapters.of("torch")
    if not torch.is_bystander():
        return answer
    if not isinstance(answer, Ticket):
        return torch.join(op, arguments, answer)
    answer.then = partial(torch.join, op, arguments)
    return answer


def _none_of(tensors: Sequence[Array], library: str, id: int) -> Batch:
    """What a call gets that has no rows of the batch: an id."""
    return Batch(_empties(tensors, library), index_like(no_index(), library), index_like(scalar(id), library))


def _empties(tensors: Sequence[Array], library: str) -> list[Array]:
    """No rows, of the trailing dimensions and type of each tensor, and no hold on its memory."""
    return [_empty(x, library) for x in tensors]


def _empty(x: Array, library: str) -> Array:
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
    """Every caller's rows of the batch's gradient, by Unbatch; nothing flows from padding, `batch_index` and `id`."""
    forward = calls.resource_name("Batch", shared_name, name)
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


@op("Unbatch", meets=True, output="unbatched_tensor")
def unbatch(
    batched_tensor: Array,
    batch_index: Host,
    id: Host,
    timeout_micros: int,
    container: str = "",
    shared_name: str = "",
    name: str | None = None,
) -> Array:
    """The rows of `batched_tensor` that belong to `id`: this call's own tensor, or the one of the call that has the batch.

    A call whose `batch_index` has rows delivers each piece `batched_tensor[start : start + length]` to the call with its id; a call
    without waits for its piece, at most `timeout_micros`. PieceTable nobody fetched are kept as long.
    """
    attributes = (timeout_micros, container, shared_name, name)
    plan = _unbatch_plan.of(attributes)
    return _unbatch(plan, attributes, batched_tensor, batch_index, id)


def _unbatch(
    plan: calls.Plan, attributes: tuple[Any, ...], batched_tensor: Array, batch_index: Array, id: Array
) -> Any:
    is_numpy = type(batched_tensor) is ndarray
    library = "numpy" if is_numpy else calls.library_in(batched_tensor)
    data = batched_tensor if is_numpy and batched_tensor.shape else _data("batched_tensor", batched_tensor, library)
    rows = batch_index if type(batch_index) is ndarray and batch_index.dtype is _INT64 else _index(batch_index)
    shape = rows.shape
    if len(shape) < 2 or shape[1] != 3 or (len(shape) > 2 and rows.size != 3 * shape[0]):
        raise InvalidArgumentError(f"batch_index must have the shape [n, 3], got {list(shape)}")
    own = id.item() if type(id) is ndarray and id.dtype is _INT64 and id.shape == () else _scalar_id(id)
    scope, now = arrive()
    if shape[0]:
        return _deliver(plan, scope, now, data, library, rows, own)
    if is_numpy and data.dtype not in PLAIN:
        data = calls.plain_numpy(data)
    if is_empty(own):
        return _empties([data], library)[0]
    meeting = _meeting(plan, plan.key(data, library), scope)
    piece = Fetch(scope, meeting, own, data.dtype, now)
    return piece if library != "torch" else _may_join(unbatch, (batched_tensor, batch_index, id, *attributes), piece)


@calls.remembered
def _unbatch_plan(timeout: Any, container: Any, shared_name: Any, name: Any) -> calls.Plan:
    seconds = check.integer("timeout_micros", timeout) / 1e6
    return calls.Plan("Unbatch", container, shared_name, name, seconds)


def _meeting(plan: calls.Plan, key: Any, scope: resources.Scope) -> PieceTable:
    meeting: PieceTable = scope.resources.get(key) or scope.keep(key, PieceTable(plan.given))
    if plan.name.startswith(_OF_GRADIENTS):
        meeting.timeout = plan.given  # the gradient deadline may have been changed
        return meeting
    if meeting.timeout != plan.given:
        plan.warn(scope, key, f"a timeout of {meeting.timeout:g} s")
    return meeting


def _deliver(
    plan: calls.Plan, scope: resources.Scope, now: float, data: Array, library: str, index: np.ndarray, own: int
) -> Any:
    """This call's own piece, with every other piece of its batch handed on."""
    rows = _rows(index, data.shape[0])
    data = calls.tensor("batched_tensor", data, library)
    pieces = calls.cut(data, [(start, start + length) for _, start, length in rows])
    named = [row[0] for row in rows]
    key = plan.key(data, library)
    if library == "torch" and adapters.of("torch").is_recorded():
        adapters.of("torch").mark(pieces, BatchNodes(len(rows)))
    if key not in scope.resources:  # refused on a table of its own, the call leaves none
        PieceTable(plan.given).deliver(scope, own, data.dtype, named, pieces, now)
    return _meeting(plan, key, scope).deliver(scope, own, data.dtype, named, pieces, now)


def _data(name: str, x: Any, library: str) -> Array:
    if type(x) is not np.ndarray and type(x) is not VariantArray:
        x = calls.as_array(name, x, library)
    if not x.shape:
        raise InvalidArgumentError(f"{name} must have at least one dimension, got a scalar")
    return x


def _index(batch_index: Any) -> np.ndarray:
    """The index as a host array of int64."""
    index = host(batch_index)
    if (library_of(batch_index) is None and index.dtype.kind == "i") or (
        not index.size and index.dtype.kind == "f" and library_of(batch_index) is None
    ):
        return index.astype(np.int64)
    if index.dtype != _INT64:
        error = ArgumentTypeError if library_of(batch_index) is None else InvalidArgumentError
        raise error(f"batch_index must be int64, got {index.dtype}")
    return index


def _rows(index: np.ndarray, available: int) -> list[Row]:
    """The index as numbers, if every piece lies within the data and together they have no more rows than it."""
    if len(index) > available:
        raise InvalidArgumentError(
            f"batch_index must not have more rows than batched_tensor, got {len(index)} and {available}"
        )
    rows = index.tolist() if index.ndim == 2 else index.reshape(-1, 3).tolist()
    total = 0
    for id, start, length in rows:  # Python's integers do not overflow
        if start < 0 or length < 0 or start + length > available:
            raise InvalidArgumentError(
                f"each row (id, start, length) of batch_index must lie within the {available} rows of batched_tensor, "
                f"got ({id}, {start}, {length})"
            )
        total += length
    if total > available:
        raise InvalidArgumentError(f"the lengths in batch_index must add up to at most {available} rows, got {total}")
    return rows  # type: ignore[return-value]


def _scalar_id(id: Any) -> int:
    """The id as a number."""
    if type(id) is int:
        return check.integer("id", id, check.INT64)
    if type(id) is not np.ndarray:
        given = library_of(id)
        id = host(id)
        if given is None:
            if id.dtype.kind not in "ib":
                raise ArgumentTypeError(f"id must be an integer, got {id.dtype}")
            id = id.astype(np.int64)
    if id.shape != ():
        raise InvalidArgumentError(f"Input id should be scalar; got shape {list(id.shape)}")
    if id.dtype != _INT64:
        raise InvalidArgumentError(f"id must be int64, got {id.dtype}")
    return int(id)


@gradient(unbatch)
def unbatch_gradient(
    g: Array, batched_tensor: Array, batch_index: Array, id: Array, container: str, shared_name: str, name: str | None
) -> dict[str, Any]:
    """The callers' gradients at their rows of the batch, by UnbatchGrad; zeros where no piece was, such as padding."""
    if g is None:  # of integers
        return {}
    batched_tensor = _data("batched_tensor", batched_tensor, calls.library_in(g))
    if 0 in g.shape[1:]:  # nobody can tell which call has a batch without elements, and there is nothing to gather
        return {"batched_tensor": namespace(library_of(g) or "numpy").zeros_like(batched_tensor)}
    joined = unbatch_grad(
        batched_tensor,
        batch_index,
        g,
        id,
        container=container,
        shared_name=f"unbatch_gradient_{calls.resource_name('Unbatch', shared_name, name)}",
    )
    index = memory.own(host(batch_index)).reshape(-1, 3)
    return {"batched_tensor": _at_their_rows(joined, index, batched_tensor.shape[0])}


def _at_their_rows(joined: Array, index: np.ndarray, rows: int) -> Array:
    """The pieces that follow each other in `joined`, each where its row of the index says; zeros in the rest of `rows` rows."""
    targets, lengths = index[:, 1], index[:, 2]
    starts = np.cumsum(lengths) - lengths
    if joined.shape[0] == rows and bool((starts == targets).all()):
        return joined
    return add_rows(joined, starts, lengths, targets, rows)


class _Owner(Gather):
    """A call of UnbatchGrad that has the batch: the gradients are joined in its own thread."""

    def result(self) -> Array:
        joined = calls.concat(self.value)
        if self.then is None:
            return joined
        torch = adapters.of("torch")
        torch.mark([joined], torch.nodes_of(self.value))
        return self.then(joined)


@op("UnbatchGrad", meets=True, output="batched_grad")
def unbatch_grad(
    original_input: Array,
    batch_index: Host,
    grad: Array,
    id: Host,
    container: str = "",
    shared_name: str = "",
    name: str | None = None,
) -> Array:
    """The gradients of all callers of a batch, in the order of its index, to the call that has the batch; no rows to the others.

    The call whose `original_input` has elements is the owner: it waits for the gradients of every id in `batch_index`, at most the
    gradient deadline (`weft.gradient_deadline`). The others leave theirs and go on.
    """
    own = _scalar_id(id)
    library = common_library([calls.a_value(original_input), calls.a_value(grad)])
    original, piece = _data("original_input", original_input, library), _data("grad", grad, library)
    if original.dtype != piece.dtype:
        raise InvalidArgumentError(f"grad must have the dtype of original_input, {original.dtype}, got {piece.dtype}")
    scope, now = resources.arrive()
    deadline = now + gradient_seconds()
    key = calls.Plan("UnbatchGrad", container, shared_name, name, None).key(piece, library)
    is_owner = 0 not in original.shape
    rows = _owned_rows(batch_index) if is_owner else []
    piece = calls.tensor("grad", piece, library)
    if ids.is_empty(own):
        return _empties([piece], library)[0]
    if is_owner:
        meeting = scope.find(key, GradientTable)
        owner = _Owner(scope, meeting, own, rows, piece, now, deadline)
        if library == "torch":
            _may_join(unbatch_grad, (original_input, batch_index, grad, id, container, shared_name, name), owner)
        return owner
    # The sender goes on and may write to its array: what is kept is a copy.
    (kept,) = calls.cut(piece, [(0, piece.shape[0])])
    if library == "torch" and adapters.of("torch").is_recorded():
        adapters.of("torch").mark(
            [kept], BatchNodes(1)
        )  # the owner's call is recorded then, even if its own gradient is constant
    scope.find(key, GradientTable).send(own, kept, now, deadline)
    scope.expires(deadline)
    return _empties([piece], library)[0]


def _owned_rows(batch_index: Any) -> list[Row]:
    index = _index(batch_index)
    if not index.shape or not index.size or index.size != 3 * index.shape[0]:
        raise InvalidArgumentError(
            f"the call that has the batch must have a batch_index of the shape [n, 3] with n > 0, got {list(index.shape)}"
        )
    rows = index.reshape(-1, 3).tolist()
    seen: set[int] = set()
    for id, _, _ in rows:
        if id in seen:
            raise InternalError(f"every id may stand once in batch_index, got {id} twice")
        seen.add(id)
    return rows  # type: ignore[return-value]


@gradient(unbatch_grad)
def unbatch_grad_gradient(
    g: Array, batch_index: Array, id: Array, container: str, shared_name: str, name: str | None
) -> dict[str, Any]:
    """Every caller's rows of the joined gradients' gradient, by Unbatch."""
    index = host(batch_index).reshape(-1, 3).copy()
    index[:, 1] = np.cumsum(index[:, 2]) - index[:, 2]
    forward = calls.resource_name("UnbatchGrad", shared_name, name)
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
