"""BatchFunction: a function that many callers run together, each on its own rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any, Literal

from .. import _check as check
from .. import kernels
from .._arrays import Array, asarray, common_library, device_of, dtype_name, dtype_of, namespace
from .._op import op
from ..batching.desk import Call, Desk
from ..batching.queue import Batch as Closed
from ..batching.queue import Limits, LowPriority
from ..errors import FailedPreconditionError, InternalError, InvalidArgumentError, NotFoundError, OpError
from . import _calls as calls

POLICIES = (
    "low_priority_padding_with_max_batch_size",
    "low_priority_padding_with_next_allowed_batch_size",
    "priority_isolation",
    "priority_merge",
)
PADDINGS = ("PAD_UP", "BATCH_DOWN", "MINIMIZE_TPU_COST_PER_REQUEST")
#: The most batches the adaptive scheduler runs at once.
ADAPTIVE_THREADS = 128

_is_low: ContextVar[bool] = ContextVar("is_low", default=False)


@contextmanager
def priority(level: Literal["low", "high"]) -> Iterator[None]:
    """Give the calls of BatchFunction in the block, in this thread or task, a priority; without it they have `"high"`."""
    if level not in ("low", "high"):
        raise ValueError(f'the priority must be "low" or "high", got {level!r}')
    token = _is_low.set(level == "low")
    try:
        yield
    finally:
        _is_low.reset(token)


class _Apply(Call):
    """A call of BatchFunction: with splitting, its slices' outputs are joined in its own thread."""

    __slots__ = ("captured", "f", "returns")
    captured: list[Array]
    f: Callable[..., object]
    returns: tuple[str, ...]

    def result(self) -> list[Array]:
        if self.error is not None:
            raise self.error
        if self.parts is None:
            return self.value
        return [_rejoin(slices) for slices in zip(*self.value, strict=True)]


@op("BatchFunction")
def batch_function(
    in_tensors: list[Array],
    captured_tensors: list[Array],
    f: Callable[..., object],
    num_batch_threads: int,
    max_batch_size: int,
    batch_timeout_micros: int,
    Tout: Sequence[object],
    max_enqueued_batches: int = 10,
    allowed_batch_sizes: Sequence[int] = (),
    container: str = "",
    shared_name: str = "",
    batching_queue: str = "",
    low_priority_max_batch_size: int = 0,
    low_priority_batch_timeout_micros: int = 0,
    low_priority_allowed_batch_sizes: Sequence[int] = (),
    low_priority_max_enqueued_batches: int = 0,
    mixed_priority_policy: str = "low_priority_padding_with_max_batch_size",
    batch_padding_policy: str = "PAD_UP",
    enable_large_batch_splitting: bool = False,
    name: str | None = None,
) -> list[Array]:
    """This call's rows of `f(*batched, *captured_tensors)`, run once on the rows of all calls that come together.

    `f` is any callable on arrays; one output array per entry of `Tout`, each with a row for every row of the batch. Calls with equal `f` and
    the same captured tensors share a batch. `weft.priority("low")` makes calls to which the low-priority attributes apply.
    """
    given = calls.attributes(
        num_batch_threads, max_batch_size, batch_timeout_micros, max_enqueued_batches, allowed_batch_sizes
    )
    policy = check.one_of("mixed_priority_policy", mixed_priority_policy, POLICIES)
    padding = check.one_of("batch_padding_policy", batch_padding_policy, PADDINGS)
    low = None
    if (low_rows := check.integer("low_priority_max_batch_size", low_priority_max_batch_size)) > 0:
        low = LowPriority(
            low_rows,
            max(0, check.integer("low_priority_batch_timeout_micros", low_priority_batch_timeout_micros)) / 1e6,
            check.integer("low_priority_max_enqueued_batches", low_priority_max_enqueued_batches),
            tuple(sorted(check.integers("low_priority_allowed_batch_sizes", low_priority_allowed_batch_sizes))),
            policy,
        )
    more = (bool(enable_large_batch_splitting), padding == "BATCH_DOWN", low)
    returns = _types(Tout)
    _check_allowed(given, more[0])
    captured = list(captured_tensors)
    _check_callable(f)
    tensors, library = calls.tensors(in_tensors)
    key = ("BatchFunction", library, calls.place_of(tensors[0], library), check.text("container", container),
           calls.resource_name("BatchFunction", shared_name, name))  # fmt: skip
    queue = _queue_key(check.text("batching_queue", batching_queue), f, captured, returns, len(tensors))
    scope = calls.scope_now()
    desk = scope.resources.get(key)
    if desk is None or queue not in desk.scheduler.queues:
        _check_arity(f, len(tensors) + len(captured))
    rows = calls.first_dimension(tensors)
    if rows == 0:
        xp = namespace(library)
        return [xp.empty((0,), dtype=_dtype(t, library), device=device_of(tensors[0])) for t in returns]
    if desk is None:
        desk = scope.find(key, lambda: _desk(key, given, more, scope))
    elif desk.given != (given, more):
        scope.warn_once(key, f"BatchFunction {key[-1]!r} exists with {desk.given}: {(given, more)} is ignored")
    call = _Apply(desk, rows, tensors, _is_low.get())
    call.f, call.captured, call.returns = f, captured, returns
    try:
        desk.enter(queue, call)
    except OpError as error:
        raise calls.refused(scope, "BatchFunction", key[-1], error) from None
    return call  # type: ignore[return-value]


def _types(Tout: Any) -> tuple[str, ...]:
    if not isinstance(Tout, (list, tuple)):
        raise TypeError(f"Tout must be a list of dtypes, got {Tout!r}")
    if not Tout:
        raise InvalidArgumentError("Tout must name at least one dtype, got none")
    return tuple(map(dtype_name, Tout))


def _check_allowed(given: calls.Attributes, split: bool) -> None:
    sizes, most = given.allowed_batch_sizes, given.max_batch_size
    check.increasing("allowed_batch_sizes", sizes)
    split = split or given.num_batch_threads <= 0
    if sizes and not split and sizes[-1] != most:
        raise InvalidArgumentError(
            f"without splitting the last of allowed_batch_sizes must equal max_batch_size = {most}, got {list(sizes)}"
        )
    if sizes and sizes[-1] > most:
        raise InvalidArgumentError(
            f"the last of allowed_batch_sizes must be at most max_batch_size = {most}, got {list(sizes)}"
        )


def _check_callable(f: Any) -> None:
    if isinstance(f, (str, bytes)):
        raise NotFoundError(f"f must be a callable: functions are not registered by name here, got {f!r}")
    if not callable(f):
        raise InvalidArgumentError(f"f must be a callable, got {f!r}")


def _queue_key(queue: str, f: Any, captured: Sequence[Any], returns: tuple[str, ...], inputs: int) -> Hashable:
    """Calls meet by queue, function (by equality) and captured tensors (by identity: waiting calls hold them, so ids last)."""
    try:
        hash(f)
    except TypeError:
        f = id(f)
    return (queue, f, tuple(map(id, captured)), returns, inputs)


def _check_arity(f: Callable[..., Any], count: int) -> None:
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # builtins and ufuncs do not tell
        return
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    most = inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(places)
    least = sum(p.default is p.empty for p in places)
    if not least <= count <= most:
        takes = f"{least}" if least == most else f"{least} or more" if most == inf else f"{least} to {most}"
        raise InvalidArgumentError(f"Function takes {takes} argument(s) but {count} argument(s) were passed")


class _Queue(Desk):
    """The resource of BatchFunction, with the attributes of the call that made it."""

    given: Any


def _desk(key: Any, given: calls.Attributes, more: tuple[bool, bool, LowPriority | None], scope: Any) -> _Queue:
    desk = _Queue(_limits(given, *more), scope, _apply, lambda _: False, "BatchFunction", key[-1])
    desk.given = (given, more)
    return desk


def _limits(given: calls.Attributes, split: bool, batch_down: bool, low: LowPriority | None) -> Limits:
    adaptive = given.num_batch_threads <= 0
    if (split or adaptive) and (given.max_enqueued_batches == 0 or (adaptive and given.max_enqueued_batches < 0)):
        raise InvalidArgumentError(f"max_enqueued_batches must be positive, got {given.max_enqueued_batches}")
    if adaptive:  # always splits; a negative timeout is due at once; no priorities, no batching down
        given = given._replace(
            num_batch_threads=ADAPTIVE_THREADS, batch_timeout_micros=max(0, given.batch_timeout_micros)
        )
        return calls.limits(given, split=True, adaptive=True)
    return calls.limits(given, split=split, batch_down=batch_down, low=low)


def _apply(closed: Closed) -> list[list[Array]]:
    """Each task's rows of what `f` gives for the whole batch."""
    owners = [task.owner for task in closed.tasks]
    inputs = [_slice(owner, task.start, task.rows) for owner, task in zip(owners, closed.tasks, strict=True)]
    last = owners[-1]
    batched = calls.join(calls.columns_of(inputs), closed.padded)
    outputs = _outputs(last.f(*batched, *last.captured), last.returns, closed.padded)
    bounds, start = [], 0
    for task in closed.tasks:
        bounds.append((start, start + task.rows))
        start += task.rows
    columns = [kernels.best("cut_rows", x)(x, bounds) for x in outputs]
    return [list(row) for row in zip(*columns, strict=True)]


def _slice(owner: _Apply, start: int, rows: int) -> list[Array]:
    return owner.payload if rows == owner.rows else [x[start : start + rows] for x in owner.payload]


def _outputs(result: Any, returns: Sequence[str], rows: int) -> list[Array]:
    """What `f` returned as arrays, if they are as many and of the types that `Tout` says, with a row for each of the batch's."""
    given = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(given) != len(returns):
        raise InternalError(f"f must return {len(returns)} output(s), one for each entry of Tout, got {len(given)}")
    library = common_library(given)
    outputs = []
    for i, (x, wanted) in enumerate(zip(given, returns, strict=True)):
        x = asarray(x, library)
        if not x.shape:
            raise FailedPreconditionError(
                f"every output of f must have at least one dimension, got a scalar as output {i}"
            )
        if x.shape[0] != rows:
            raise FailedPreconditionError(
                f"every output of f must have the {rows} rows of the batch, got {x.shape[0]} in output {i}"
            )
        if dtype_of(x) != wanted:
            raise InvalidArgumentError(
                f"output {i} of f must have the dtype {wanted} that Tout says, got {dtype_of(x)}"
            )
        outputs.append(calls.tensor(f"output {i} of f", x, library))
    return outputs


def _rejoin(slices: Sequence[Array]) -> Array:
    first = slices[0]
    for x in slices:
        if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
            raise InvalidArgumentError(
                "the outputs of a call's slices must agree in dtype and trailing dimensions to be joined, got "
                f"{first.dtype}{list(first.shape)} and {x.dtype}{list(x.shape)}"
            )
    return kernels.best("concat_rows", first)(slices, 0)


def _dtype(name: str, library: str) -> Any:
    if name == "string":
        return object
    if name == "bfloat16" and library == "numpy":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return getattr(namespace(library), name)
