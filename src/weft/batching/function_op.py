"""BatchFunction: a function that many callers run together, each on its own rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from math import inf
from types import FunctionType
from typing import Any, Literal, NamedTuple

from ..core import check
from ..core.arrays import Array, Passthrough, asarray, common_library, device_of, dtype_attribute, dtype_of, get_library
from ..core.inputs import items, shown
from ..core.interrupts import call_user
from ..core.op import op
from ..core.scope import Scope, current
from ..errors import ArgumentTypeError, FailedPreconditionError, InternalError, InvalidArgumentError, NotFoundError
from ..ragged.variant import VariantArray
from . import batch_arrays
from .attributes import Attributes, OpCall, OpDispatcher, ResourceSpec, SpecCache
from .exact import Same, Unsure, represent
from .interned import Interned, Key
from .modes import in_jax_mode, in_torch_mode, jax_mode, torch_mode
from .processing import Processor
from .queue import Batch as TaskBatch
from .queue import Limits, LowPriority

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
    """Give the calls of batchers and of BatchFunction in the block, in this thread or task, a priority.

    Without it calls have `"high"`. Those with `"low"` fill up batches that are about to run, and run by themselves when no
    other call waits. A batcher's call of low priority that has waited for a second, or for `max_wait` if that is longer, counts
    as one of high priority.
    """
    level = check.plain(level)
    if not isinstance(level, str) or level not in ("low", "high"):
        raise InvalidArgumentError(f'the priority must be "low" or "high", got {shown(level)}')
    token = _is_low.set(level == "low")
    try:
        yield
    finally:
        _is_low.reset(token)


is_low = _is_low.get  # whether the calls of this thread or task have low priority now


class FunctionCall(OpCall):
    """A call of BatchFunction. The outputs of its slices, if it is split, are concatenated in its own thread."""

    captured: list[Array]
    f: Callable[..., object]
    returns: tuple[str, ...]
    torch_mode: Any
    jax_mode: Any

    def result(self) -> list[Array]:
        if self.parts is None:
            if self.value:
                batch_arrays.enter_stream(self.value)
            return self.value
        return [_rejoin(parts) for parts in zip(*self.value, strict=True)]


@op("BatchFunction", output="out_tensors")
def batch_function(
    in_tensors: list[Array],
    captured_tensors: list[Passthrough],
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
    """Return this call's rows of `f(*batched, *captured_tensors)`, run once on the rows of all calls that come together.

    `f` is any callable on arrays; one output array per entry of `Tout`, each with a row for every row of the batch. Calls with the
    same `f`, the same captured tensors and the same modes of PyTorch and JAX share a batch. `f` runs with the context variables of
    the call that made the queue. `weft.priority("low")` makes calls to which the low-priority attributes apply.
    """
    attributes = (num_batch_threads, max_batch_size, batch_timeout_micros, max_enqueued_batches,
                  tuple(allowed_batch_sizes) if type(allowed_batch_sizes) is list else allowed_batch_sizes,
                  tuple(Tout) if type(Tout) is list else Tout, container, shared_name, batching_queue, name,
                  low_priority_max_batch_size, low_priority_batch_timeout_micros, low_priority_allowed_batch_sizes,
                  low_priority_max_enqueued_batches, mixed_priority_policy, batch_padding_policy,
                  enable_large_batch_splitting)  # fmt: skip
    spec = _function_spec.of(attributes)
    _check_callable(f)
    tensors, library, rows = batch_arrays.tensors(in_tensors)
    captured = list(captured_tensors)
    mode, jax = torch_mode(), jax_mode()
    queue = spec.queue_key(library), spec.is_adaptive, mode, jax if jax is None or jax.is_movable else Same(object())
    queue_key = _queue_key(queue, f, captured, spec.returns, len(tensors))
    scope = current()
    now = scope.arrive()
    key = spec.key(tensors[0], library)
    found = scope.resources.get(key)
    if found is None or queue_key not in found.scheduler.queues:
        _check_arity(f, len(tensors) + len(captured))
    if rows == 0:
        outputs = [_empty_output(dtype, library, device_of(tensors[0])) for dtype in spec.returns]
        spec.make_without_rows(key, scope, _make)
        return outputs
    low = is_low()
    call = FunctionCall(spec.dispatcher(key, scope, _make, rows, low), rows, tensors)
    call.f, call.captured, call.returns, call.low = f, captured, spec.returns, low
    call.queue_key, call.arrived, call.torch_mode, call.jax_mode = queue_key, now, mode, jax
    return call  # type: ignore[return-value]


class _FunctionAttributes(NamedTuple):
    """The attributes of a queue of BatchFunction."""

    attributes: Attributes
    split: bool
    batch_down: bool
    low: LowPriority | None


class _FunctionSpec(ResourceSpec):
    """A spec with the dtypes that `f` must return."""

    returns: tuple[str, ...]
    is_adaptive: bool


@SpecCache
def _function_spec(attributes: tuple[Any, ...]) -> _FunctionSpec:
    (threads, rows, timeout, enqueued, allowed, Tout, container, shared_name, queue, name, low_rows, low_timeout,
     low_allowed, low_enqueued, policy, padding, split) = attributes  # fmt: skip
    given = Attributes.of(threads, rows, timeout, enqueued, allowed)
    policy = check.one_of("mixed_priority_policy", POLICIES[0] if policy is None else policy, POLICIES)
    padding = check.one_of("batch_padding_policy", PADDINGS[0] if padding is None else padding, PADDINGS)
    low = LowPriority(
        check.integer("low_priority_max_batch_size", 0 if low_rows is None else low_rows),
        max(0, check.integer("low_priority_batch_timeout_micros", 0 if low_timeout is None else low_timeout)) / 1e6,
        check.integer("low_priority_max_enqueued_batches", 0 if low_enqueued is None else low_enqueued),
        tuple(sorted(check.integers("low_priority_allowed_batch_sizes", low_allowed))),
        policy,
    )
    returns = _types(Tout)
    split = check.flag("enable_large_batch_splitting", False if split is None else split)
    _check_allowed(given, split)
    whole = _FunctionAttributes(given, split, padding == "BATCH_DOWN", low if low.max_batch_size > 0 else None)
    spec = _FunctionSpec("BatchFunction", container, shared_name, name, whole, queue)
    spec.returns, spec.is_adaptive = returns, given.num_batch_threads <= 0
    return spec


def _types(Tout: Any) -> tuple[str, ...]:
    if not isinstance(Tout, (list, tuple)):
        raise ArgumentTypeError(f"Tout must be a list of dtypes, got {shown(Tout)}")
    if not Tout:
        raise InvalidArgumentError("Tout must name at least one dtype, got none")
    return tuple(dtype_attribute(t, f"Tout[{i}]") for i, t in enumerate(items("Tout", Tout)))


def _check_allowed(given: Attributes, split: bool) -> None:
    sizes, most = given.allowed_batch_sizes, given.max_batch_size
    check.increasing("allowed_batch_sizes", sizes)
    if sizes and not split and sizes[-1] != most:
        raise InvalidArgumentError(
            f"without splitting the last of allowed_batch_sizes must equal max_batch_size = {most}, got {list(sizes)}"
        )


def _check_callable(f: Any) -> None:
    if isinstance(f, (str, bytes)):
        raise NotFoundError(f"f must be a callable: functions are not registered by name here, got {shown(f)}")
    if not callable(f):
        raise InvalidArgumentError(f"f must be a callable, got {shown(f)}")


def _queue_key(queue: Hashable, f: Any, captured: Sequence[Any], returns: tuple[str, ...], inputs: int) -> Hashable:
    """Return the key of calls that may share a batch: the same function, and the same captured tensors.

    Tensors are compared by `id`: waiting calls keep them alive.
    """
    try:
        function: Hashable = f if type(f) is FunctionType else represent(f, _UNSURE)
    except TypeError:  # not hashable
        function = Same(f)
    return _queue_keys.of((queue, function, tuple(map(id, captured)), returns, inputs))


_UNSURE = Unsure()
_queue_keys = Interned(Key)


def _check_arity(f: Callable[..., Any], count: int) -> None:
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # builtins and ufuncs have no signature
        return
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    most = inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(places)
    least = sum(p.default is p.empty for p in places)
    if not least <= count <= most:
        takes = f"{least}" if least == most else f"{least} or more" if most == inf else f"{least} to {most}"
        raise InvalidArgumentError(f"Function takes {takes} argument(s) but {count} argument(s) were passed")


def _make(spec: ResourceSpec, scope: Scope) -> OpDispatcher:
    process = partial(_apply, copy_context())
    made = OpDispatcher(
        _limits(*spec.attributes), Processor(process, scope, "BatchFunction", spec.name), lambda _: False
    )
    made.attributes = spec.attributes
    return made


def _limits(given: Attributes, split: bool, batch_down: bool, low: LowPriority | None) -> Limits:
    adaptive = given.num_batch_threads <= 0
    sizes, most = given.allowed_batch_sizes, given.max_batch_size
    if sizes and not 0 <= sizes[-1] <= most:
        raise InvalidArgumentError(
            f"the last of allowed_batch_sizes must be in 0 to max_batch_size = {most}, got {list(sizes)}"
        )
    if (split or adaptive) and (given.max_enqueued_batches == 0 or (adaptive and given.max_enqueued_batches < 0)):
        raise InvalidArgumentError(f"max_enqueued_batches must be positive, got {given.max_enqueued_batches}")
    if adaptive:  # always splits; a negative timeout is due at once; no priorities, no batching down
        given = given._replace(
            num_batch_threads=ADAPTIVE_THREADS, batch_timeout_micros=max(0, given.batch_timeout_micros)
        )
        return given.limits(split=True, adaptive=True)
    return given.limits(split=split, batch_down=batch_down, low=low)


def _apply(context: Context, closed: TaskBatch) -> list[Any]:
    """Run `f` on a batch, in the modes of its callers; return each task's rows of its outputs."""
    last = closed.tasks[-1].owner
    with in_jax_mode(last.jax_mode), in_torch_mode(last.torch_mode):
        return context.copy().run(_apply_here, closed)


def _apply_here(closed: TaskBatch) -> list[Any]:
    inputs = [_slice(task.owner, task.start, task.rows) for task in closed.tasks]
    last = closed.tasks[-1].owner
    batched, refused = batch_arrays.join_batch(closed, inputs)
    answers: list[Any] = [refused.get(i) for i in range(len(closed.tasks))]
    if len(refused) == len(answers):
        return answers
    outputs = _outputs(call_user(last.f, *batched, *last.captured), last.returns, batched[0].shape[0])
    kept = [i for i in range(len(answers)) if i not in refused]
    bounds, start = [], 0
    for i in kept:
        rows = closed.tasks[i].rows
        bounds.append((start, start + rows))
        start += rows
    columns = [batch_arrays.cut(x, bounds) for x in outputs]
    for i, row in zip(kept, zip(*columns, strict=True), strict=True):
        answers[i] = list(row)
    return answers


def _slice(owner: FunctionCall, start: int, rows: int) -> list[Array]:
    return owner.payload if rows == owner.rows else [x[start : start + rows] for x in owner.payload]


def _outputs(result: Any, returns: Sequence[str], rows: int) -> list[Array]:
    """Return the outputs of `f` as arrays; they must have the dtypes of `Tout`, and a row for each row of the batch."""
    given = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(given) != len(returns):
        raise InternalError(f"f must return {len(returns)} output(s), one for each entry of Tout, got {len(given)}")
    library = common_library([batch_arrays.a_value(x) for x in given])
    outputs = []
    for i, (x, wanted) in enumerate(zip(given, returns, strict=True)):
        if type(x) is not VariantArray:
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
        outputs.append(batch_arrays.tensor(f"output {i} of f", x, library))
    return outputs


def _rejoin(slices: Sequence[Array]) -> Array:
    first = slices[0]
    for x in slices:
        if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
            raise InvalidArgumentError(
                "the outputs of a call's slices must agree in dtype and trailing dimensions to be joined, got "
                f"{first.dtype}{list(first.shape)} and {x.dtype}{list(x.shape)}"
            )
    return batch_arrays.concat(slices)


def _empty_output(dtype: str, library: str, device: Any) -> Array:
    """Return an output for a call without rows."""
    found = get_library(library)
    try:
        return found.namespace.empty((0,), dtype=found.dtype(dtype), device=device)
    except (AttributeError, TypeError):
        raise InvalidArgumentError(f"Tout must name dtypes that {library} has, got {dtype}") from None
