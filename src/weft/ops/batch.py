"""Batch, Unbatch and UnbatchGrad: many concurrent calls, one batch, and every caller's rows and gradients back to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _check as check
from .. import kernels
from .._arrays import Array, asarray, common_library, device_of, host, index_like, library_of, namespace
from .._op import gradient, op
from ..batching import ids
from ..batching.deadline import gradient_seconds
from ..batching.desk import Call, Desk
from ..batching.queue import Batch as Closed
from ..batching.rendezvous import Fetch, Gather, Gradients, Pieces, Row
from ..errors import InvalidArgumentError, OpError
from . import _calls as calls

_INT64 = np.dtype(np.int64)
_NO_ROWS = np.empty((0, 3), np.int64)


class Batch(NamedTuple):
    """The outputs of Batch: the batch for one of its callers, nothing but an id for the others."""

    batched_tensors: list[Array]
    batch_index: Array  # a row (id, start, length) per call
    id: Array


class _Join(Call):
    """A call of Batch: its result is built in its own thread from what the batch's runner left."""

    __slots__ = ("id", "library")
    id: int
    library: str

    def result(self) -> Batch:
        if self.error is not None:
            raise self.error
        id = index_like(np.array(self.id), self.library)
        if self.value is None:
            return Batch(_empties(self.payload, self.library), index_like(_NO_ROWS.copy(), self.library), id)
        tensors, index = self.value
        return Batch(tensors, index_like(index, self.library), id)


@op("Batch")
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

    A batch is closed when it is full, when the next call would overflow it, or `batch_timeout_micros` after its first call. It is
    padded to the next of `allowed_batch_sizes` with its first row. Calls meet by device, array library, `container`, `shared_name` and
    `batching_queue`.
    """
    given = calls.attributes(
        num_batch_threads, max_batch_size, batch_timeout_micros, max_enqueued_batches, allowed_batch_sizes
    )
    check.integer("grad_timeout_micros", grad_timeout_micros, check.INT64)
    _check_allowed(given)
    tensors, library = calls.tensors(in_tensors)
    key = ("Batch", library, calls.place_of(tensors[0], library), check.text("container", container),
           calls.resource_name("Batch", shared_name, name))  # fmt: skip
    scope = calls.scope_now()
    desk = scope.resources.get(key)
    if desk is None and given.num_batch_threads <= 0:
        raise InvalidArgumentError(f"num_batch_threads must be positive, got {given.num_batch_threads}")
    rows = calls.first_dimension(tensors)
    if rows == 0:
        if desk is None and _is_valid(given):
            scope.find(key, lambda: _desk(key, given, scope))
        return _without_rows(tensors, library)
    if desk is None:
        desk = scope.find(key, lambda: _desk(key, given, scope))
    elif desk.given is not given and desk.given != given:
        scope.warn_once(key, f"Batch {key[-1]!r} exists with {desk.given}: {given} is ignored")
    call = _Join(desk, rows, tensors)
    call.id, call.library = ids.new(), library
    try:
        desk.enter(check.text("batching_queue", batching_queue), call)
    except OpError as error:
        raise calls.refused(scope, "Batch", key[-1], error) from None
    return call  # type: ignore[return-value]


def _check_allowed(given: calls.Attributes) -> None:
    sizes = given.allowed_batch_sizes
    if sizes:
        check.increasing("allowed_batch_sizes", sizes)
        if sizes[-1] != given.max_batch_size:
            raise InvalidArgumentError(
                f"the last of allowed_batch_sizes must equal max_batch_size = {given.max_batch_size}, got {list(sizes)}"
            )


def _is_valid(given: calls.Attributes) -> bool:
    try:
        calls.limits(given)
    except InvalidArgumentError:
        return False
    return True


class _Queue(Desk):
    """The resource of Batch, with the attributes of the call that made it."""

    given: calls.Attributes


def _desk(key: Any, given: calls.Attributes, scope: Any) -> _Queue:
    desk = _Queue(calls.limits(given), scope, _assemble, calls.is_short, "Batch", key[-1])
    desk.given = given
    return desk


def _assemble(closed: Closed) -> list[Any]:
    """The batch and its index for the last call, None for the others."""
    joined = [task.owner for task in closed.tasks]
    columns = calls.columns_of([call.payload for call in joined])
    tensors = calls.join(columns, closed.padded)
    index = np.empty((len(joined), 3), np.int64)
    index[:, 0] = [call.id for call in joined]
    index[:, 2] = sizes = [call.rows for call in joined]
    index[0, 1] = 0
    np.cumsum(sizes[:-1], out=index[1:, 1])
    answers: list[Any] = [None] * len(joined)
    answers[-1] = (tensors, index)
    return answers


def _without_rows(tensors: Sequence[Array], library: str) -> Batch:
    id = index_like(np.array(ids.new_empty()), library)
    return Batch(_empties(tensors, library), index_like(_NO_ROWS.copy(), library), id)


def _empties(tensors: Sequence[Array], library: str) -> list[Array]:
    """No rows, of the trailing dimensions and type of each tensor, and no hold on its memory."""
    if library == "numpy":
        return [np.empty((0, *x.shape[1:]), x.dtype) for x in tensors]
    xp = namespace(library)
    return [xp.empty((0, *x.shape[1:]), dtype=x.dtype, device=device_of(x)) for x in tensors]


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
            unbatch(
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


@op("Unbatch")
def unbatch(
    batched_tensor: Array,
    batch_index: Array,
    id: Array,
    timeout_micros: int,
    container: str = "",
    shared_name: str = "",
    name: str | None = None,
) -> Array:
    """The rows of `batched_tensor` that belong to `id`: this call's own tensor, or the one of the call that has the batch.

    A call whose `batch_index` has rows delivers each piece `batched_tensor[start : start + length]` to the call with its id; a call
    without waits for its piece, at most `timeout_micros`. Pieces nobody fetched are kept as long.
    """
    timeout = check.integer("timeout_micros", timeout_micros)
    library = library_of(batched_tensor) or "numpy"
    data = _data("batched_tensor", batched_tensor, library)
    index = _index(batch_index)
    if index.ndim < 2 or index.shape[1] != 3 or index.size != 3 * index.shape[0]:
        raise InvalidArgumentError(f"batch_index must have the shape [n, 3], got {list(index.shape)}")
    if index.shape[0] > data.shape[0]:
        raise InvalidArgumentError(
            f"batch_index must not have more rows than batched_tensor, got {index.shape[0]} and {data.shape[0]}"
        )
    own = _scalar_id(id)
    rows = _rows(index)
    _check_rows(rows, data.shape[0])
    if not rows and ids.is_empty(own):
        return kernels.best("cut_rows", data)(data, [(0, 0)])[0]
    scope = calls.scope_now()
    key = ("Unbatch", library, calls.place_of(data, library), check.text("container", container),
           calls.resource_name("Unbatch", shared_name, name))  # fmt: skip
    pieces: list[Array] = []
    if rows:
        data = calls.tensor("batched_tensor", data, library)
        pieces = kernels.best("cut_rows", data)(data, [(start, start + length) for _, start, length in rows])
    meeting = scope.find(key, lambda: Pieces(timeout / 1e6))
    if meeting.timeout != timeout / 1e6:
        scope.warn_once(
            key, f"Unbatch {key[-1]!r} exists with a timeout of {meeting.timeout:g} s: {timeout} us is ignored"
        )
    fetch = Fetch(scope, meeting, own, data.dtype)
    scope.expires(meeting.meet(fetch, [row[0] for row in rows], pieces))
    return fetch


def _data(name: str, x: Any, library: str) -> Array:
    x = asarray(x, library)
    if not x.shape:
        raise InvalidArgumentError(f"{name} must have at least one dimension, got a scalar")
    return x


def _index(batch_index: Any) -> np.ndarray:
    """The index as a host array of int64."""
    if type(batch_index) is np.ndarray and batch_index.dtype == _INT64:
        return batch_index
    index = host(batch_index)
    if (library_of(batch_index) is None and index.dtype.kind == "i") or (
        not index.size and index.dtype.kind == "f" and library_of(batch_index) is None
    ):
        return index.astype(np.int64)
    if index.dtype != _INT64:
        error = TypeError if library_of(batch_index) is None else InvalidArgumentError
        raise error(f"batch_index must be int64, got {index.dtype}")
    return index


def _rows(index: np.ndarray) -> list[Row]:
    return index.reshape(-1, 3).tolist()  # type: ignore[return-value]


def _scalar_id(id: Any) -> int:
    """The id as a number."""
    if type(id) is int:
        return check.integer("id", id, check.INT64)
    if type(id) is not np.ndarray:
        given = library_of(id)
        id = host(id)
        if given is None and id.dtype.kind == "i":
            id = id.astype(np.int64)
    if id.shape != ():
        raise InvalidArgumentError(f"Input id should be scalar; got shape {list(id.shape)}")
    if id.dtype != _INT64:
        raise InvalidArgumentError(f"id must be int64, got {id.dtype}")
    return int(id)


def _check_rows(rows: Sequence[Row], available: int) -> None:
    """Every piece lies within the data, and together they have no more rows than it. Python's integers do not overflow."""
    total = 0
    for id, start, length in rows:
        if start < 0 or length < 0 or start + length > available:
            raise InvalidArgumentError(
                f"each row (id, start, length) of batch_index must lie within the {available} rows of batched_tensor, got "
                f"({id}, {start}, {length})"
            )
        total += length
    if total > available:
        raise InvalidArgumentError(f"the lengths in batch_index must add up to at most {available} rows, got {total}")


@gradient(unbatch)
def unbatch_gradient(
    g: Array, batched_tensor: Array, batch_index: Array, id: Array, container: str, shared_name: str, name: str | None
) -> dict[str, Any]:
    """The callers' gradients at their rows of the batch, by UnbatchGrad; zeros where no piece was, such as padding."""
    joined = unbatch_grad(
        batched_tensor,
        batch_index,
        g,
        id,
        container=container,
        shared_name=f"unbatch_gradient_{calls.resource_name('Unbatch', shared_name, name)}",
    )
    return {"batched_tensor": _at_their_rows(joined, _rows(host(batch_index)), batched_tensor)}


def _at_their_rows(joined: Array, rows: Sequence[Row], like: Array) -> Array:
    """The pieces that follow each other in `joined`, each where its row of the index says, in the shape of `like`."""
    spans, at = [], 0
    for _, start, length in rows:
        spans.append((start, at, length))
        at += length
    if at == like.shape[0] and all(start == at for start, at, _ in spans):
        return joined
    xp = namespace(library_of(joined) or "numpy")

    def blank(count: int) -> Array:
        return xp.zeros((count, *joined.shape[1:]), dtype=joined.dtype, device=device_of(joined))

    total = None
    for layer in _layers(spans):
        parts, done = [], 0
        for start, at, length in layer:
            parts += [blank(start - done), joined[at : at + length]]
            done = start + length
        one = xp.concat([*parts, blank(like.shape[0] - done)], axis=0)
        total = one if total is None else total + one
    return blank(like.shape[0]) if total is None else total


def _layers(spans: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """The spans in as many groups as it takes for those of a group not to overlap."""
    layers: list[list[tuple[int, int, int]]] = []
    for span in sorted(spans):
        for layer in layers:
            if layer[-1][0] + layer[-1][2] <= span[0]:
                layer.append(span)
                break
        else:
            layers.append([span])
    return layers


class _Owner(Gather):
    """A call of UnbatchGrad that has the batch: the gradients are joined in its own thread."""

    __slots__ = ()

    def result(self) -> Array:
        if self.error is not None:
            raise self.error
        return kernels.best("concat_rows", self.value[0])(self.value, 0)


@op("UnbatchGrad")
def unbatch_grad(
    original_input: Array,
    batch_index: Array,
    grad: Array,
    id: Array,
    container: str = "",
    shared_name: str = "",
    name: str | None = None,
) -> Array:
    """The gradients of all callers of a batch, in the order of its index, to the call that has the batch; no rows to the others.

    The call whose `original_input` has elements is the owner: it waits for the gradients of every id in `batch_index`, at most the
    gradient deadline (`weft.gradient_deadline`). The others leave theirs and go on.
    """
    own = _scalar_id(id)
    library = common_library([original_input, grad])
    original, piece = _data("original_input", original_input, library), _data("grad", grad, library)
    if original.dtype != piece.dtype:
        raise InvalidArgumentError(f"grad must have the dtype of original_input, {original.dtype}, got {piece.dtype}")
    scope = calls.scope_now()
    now = scope.clock.now()
    deadline = now + gradient_seconds()
    key = ("UnbatchGrad", library, calls.place_of(piece, library), check.text("container", container),
           calls.resource_name("UnbatchGrad", shared_name, name))  # fmt: skip
    is_owner = 0 not in original.shape
    rows = _owned_rows(batch_index) if is_owner else []
    piece = calls.tensor("grad", piece, library)
    if ids.is_empty(own):
        return _empties([piece], library)[0]
    if is_owner:
        meeting = scope.find(key, Gradients)
        owner = _Owner(scope, meeting, own, rows, piece)
        meeting.gather(owner, now, deadline)
        return owner
    # The sender goes on and may write to its array: what is kept is a copy.
    kept = kernels.best("cut_rows", piece)(piece, [(0, piece.shape[0])])[0]
    scope.find(key, Gradients).send(own, kept, now, deadline)
    scope.expires(deadline)
    return _empties([piece], library)[0]


def _owned_rows(batch_index: Any) -> list[Row]:
    index = _index(batch_index)
    if not index.size or index.size != 3 * index.shape[0]:
        raise InvalidArgumentError(
            f"the call that has the batch must have a batch_index of the shape [n, 3] with n > 0, got {list(index.shape)}"
        )
    return _rows(index)


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
