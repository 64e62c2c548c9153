"""The request of one call of a batched function, and its part of the batch's result."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from math import inf
from typing import Any

from ..core import adapters
from ..core.arrays import Array, library_of
from ..errors import DeadlineExceededError, FailedPreconditionError
from . import batch_arrays, layout, trees
from . import results as outputs
from .call import QueuedCall
from .dispatcher import Dispatcher
from .function_op import is_low
from .gradient import BackwardPolicy, ResultHandle, this_thread
from .items import NO_ITEMS, Items
from .options import is_low_priority, positive
from .queue import Batch
from .ragged_arguments import NestedSplits, rebuilt
from .statistics import Counters, Receipt


class BatchKey:
    """The properties that calls must have in common to share a batch. Equal keys of a batcher are one object."""

    __slots__ = (
        "__weakref__", "array_keys", "exact", "grad_enabled", "has_backward", "has_rows", "is_on_host", "is_vjp", "jax_mode",
        "like", "statics", "structure", "torch_mode",
    )  # fmt: skip

    def __init__(
        self,
        structure: trees.Structure,
        exact: Hashable,  # represents the non-array arguments, and the result of the option `key`
        array_keys: tuple[Hashable, ...],  # dtype, trailing shape and device of each array
        torch_mode: Any,  # a `TorchMode`, None if PyTorch is not loaded
        jax_mode: Any,  # a `JaxMode`, None if JAX is not loaded
        is_vjp: bool,  # True if the callers need a pull-back
        has_rows: bool,  # False if callers pass single examples
        statics: dict[int, Any],  # the non-array arguments by their place; not part of what is compared
    ) -> None:
        self.structure, self.exact, self.array_keys, self.statics = structure, exact, array_keys, statics
        self.torch_mode, self.jax_mode, self.is_vjp, self.has_rows = torch_mode, jax_mode, is_vjp, has_rows
        self.grad_enabled: bool = torch_mode is not None and torch_mode.grad
        self.has_backward = is_vjp or self.grad_enabled
        self.is_on_host = torch_mode is None or adapters.of("torch", __package__).are_on_host(array_keys)
        self.like: Any = None  # for calls with one array of NumPy or PyTorch: an array like theirs, without rows


class BatchResult:
    """The result of one run of the function, split by tasks, and the figures of the run.

    `parts` has one entry for each leaf of the result, and each entry one part for each task. `build` makes a result of leaves.
    """

    __slots__ = (
        "array_places", "build", "ended", "item_places", "number", "offsets", "padding", "parts", "ragged", "reason", "started",
        "stream",
    )  # fmt: skip

    def __init__(
        self,
        batch: Batch,
        offsets: list[int],  # the first row of each task, and the number of rows
        padding: int,
        parts: list[Sequence[Any]],
        build: Callable[[Sequence[Any]], Any],
        array_places: Sequence[int],  # which leaves are arrays
        item_places: Sequence[int] = (),  # which leaves are lists with one item for each row
    ) -> None:
        self.number, self.started, self.reason = batch.number, batch.started, batch.reason
        self.offsets, self.padding, self.parts, self.build = offsets, padding, parts, build
        self.array_places, self.item_places = array_places, item_places
        #: The splits of each task, by the places of arrays that are the values of RaggedTensors.
        self.ragged: dict[int, list[NestedSplits]] | None = None
        self.ended = self.started  # when the result was split
        self.stream: Any = None  # on an accelerator: the `StreamPoint` from which on the arrays can be used


class CallResult:
    """The part of a `BatchResult` that belongs to one task: the task's index, and a handle if the batch has a backward."""

    __slots__ = ("batch", "handle", "index")

    def __init__(self, batch: BatchResult, index: int, handle: ResultHandle | None) -> None:
        self.batch, self.index, self.handle = batch, index, handle

    def leaves(self) -> list[Any]:
        """Return the task's part of each leaf. Items that have a gradient are an `OwnItems` until `Request.result`."""
        return [parts[self.index] for parts in self.batch.parts]

    def arrays(self) -> list[Array]:
        """Return the task's rows of each array."""
        leaves = self.leaves()
        return [leaves[i] for i in self.batch.array_places]

    def build(self) -> Any:
        """Return the function's result with the rows of this task."""
        batch = self.batch
        if batch.ragged is not None:
            return build_result([self], self.leaves(), True)
        return batch.parts[0][self.index] if batch.build is trees.only else batch.build(self.leaves())


class CallContext:
    """What a request needs beside its arguments: the parts of its batcher, and the options of the call.

    All plain calls of a batcher share one.
    """

    __slots__ = ("caller", "counters", "dispatcher", "is_task", "low", "policy", "seconds")

    def __init__(
        self,
        dispatcher: Dispatcher,
        counters: Counters,
        policy: BackwardPolicy,
        deadline: float | None,
        priority: str | None = None,
        caller: str | None = None,
        is_task: bool = False,  # True if a task of an event loop makes the call
    ) -> None:
        self.dispatcher, self.counters, self.policy = dispatcher, counters, policy
        self.caller, self.is_task = caller, is_task
        self.seconds = inf if deadline is None else positive("deadline", deadline)
        self.low: bool | None = None if priority is None else is_low_priority(priority)  # None: as `weft.priority` says


class Request(QueuedCall):
    """One call of a batched function: its arguments, its options and its state in the queue."""

    def __init__(
        self,
        context: CallContext,
        key: BatchKey,
        arrays: Sequence[Array],
        count: int,  # the number of rows; `rows` is their cost
        cost: int,
        shared: dict[str, Any],
        items: Items = NO_ITEMS,  # its arguments that are Python objects, one for each row
        call_arrays: Sequence[layout.CallArray | None] | None = None,  # for each array, None if all are plain rows
    ) -> None:
        self._init_call(context.dispatcher, cost, None)
        self.context, self.key, self.arrays, self.count, self.shared = context, key, arrays, count, shared
        self.items, self.call_arrays, self.is_task = items, call_arrays, context.is_task
        self.low = is_low() if context.low is None else context.low
        self.arrived = self.clock.now()
        self.deadline = self.arrived + context.seconds
        self.caller_thread = this_thread() if key.has_backward else None
        self.lengths: tuple[int, ...] = ()  # with `max_waste`: the rounded length of each padded argument
        self.name: tuple[str, int] | None = None  # in a recording: the caller's name and the number of its call
        self.is_traced = False  # True if JAX traces some of the arrays
        self.is_late = False  # True once somebody found its deadline passed
        self.stream: Any = None  # on an accelerator: the `StreamPoint` from which on the arrays can be used
        self.feed: Any = None  # of a stream: the `streams.Feed` of its further chunks
        self.split_receipt: Receipt | None = None  # the receipt of a split call that has its result

    def late(self) -> DeadlineExceededError:
        self.is_late = True
        error = QueuedCall.late(self)
        missing = self.dispatcher.scheduler.missing()
        if missing:
            error.add_note(f"the next batch of the recording waits for {', '.join(missing)}")
        return error

    def answer(self, task: Any, value: Any) -> bool:
        # A caller that has left does not keep its part: nobody waits for a gradient of it then.
        if self.has_departed:
            return False
        is_done = QueuedCall.answer(self, task, value)
        if self.has_departed:
            self.value = self.answers = None
        return is_done

    def note_errors(self, errors: Sequence[BaseException]) -> None:
        """Count a call that fails, before its caller goes on; a late call does not count as failed."""
        if not any(map(self._is_late_error, errors)):
            self.context.counters.count("failed")

    def _is_late_error(self, error: BaseException | None) -> bool:
        return self.is_late and isinstance(error, DeadlineExceededError)

    def fail(self) -> None:
        self.value = self.answers = None
        # Counted here, once: several threads may call `late`, and a result may still come first.
        if self._is_late_error(self.error):
            self.context.counters.count("late")
        QueuedCall.fail(self)

    def part(self, start: int, rows: int) -> Sequence[Array]:
        """Return the arrays of one task of this call."""
        if self.parts is None:
            return self.arrays
        if self.call_arrays is None:
            return [x[start : start + rows] for x in self.arrays]
        return [
            layout.part(x, call_array, start, rows) for x, call_array in zip(self.arrays, self.call_arrays, strict=True)
        ]

    def result(self) -> Any:
        if self.stream is not None:
            for each in self.results():
                if each.batch.stream is not None and not each.batch.stream.is_here():
                    each.batch.stream.wait(outputs.arrays_in(each.leaves()))
        if self.parts is None and self.key.has_rows:
            only: CallResult = self.value
            if only.handle is None:  # benchmark row "no-op, 1 thread"
                return only.build()
        results = self.results()
        if len(results) > 1:
            _check_alike(results)
        inputs = [self.arrays] if len(results) == 1 else self._inputs_of_parts(results)
        parts = [self._leaves(result, own) for result, own in zip(results, inputs, strict=True)]
        batch = results[0].batch
        leaves = parts[0] if len(parts) == 1 else _concat_parts(parts, batch)
        if self.parts is not None and not self.key.is_vjp:  # parts refer to their call: it must keep nothing large
            self.split_receipt = self.receipt()
            self.arrays, self.items, self.value = (), NO_ITEMS, None
        return build_result(results, leaves, self.key.has_rows)

    def results(self) -> list[CallResult]:
        """Return the results of this call's tasks, in the order of their rows."""
        return [self.value] if self.parts is None else self.value

    def _inputs_of_parts(self, results: Sequence[CallResult]) -> list[Sequence[Array]]:
        """Return the arrays of each part whose gradient is handed in, none if the parts have no gradient."""
        if self.key.is_vjp or all(each.handle is None for each in results):
            return [()] * len(results)
        torch = adapters.of("torch", __package__)
        columns = []
        for x, call_array in zip(self.arrays, self.call_arrays or [None] * len(self.arrays), strict=True):
            if library_of(x) == "torch":
                sizes = [layout.length(call_array, span.start, span.rows) for span in self.spans]
                columns.append(torch.parts_of_call(x, sizes))
        return list(zip(*columns, strict=True)) if columns else [()] * len(results)

    def _leaves(self, result: CallResult, inputs: Sequence[Array]) -> list[Any]:
        """Return the leaves of a task's result; PyTorch's get a node through which their gradient is handed in, and `inputs`."""
        leaves = result.leaves()
        if result.handle is not None and not self.key.is_vjp:
            places = [i for i in result.batch.item_places if type(leaves[i]) is outputs.OwnItems]
            count = len(leaves)
            for i in places:
                leaves += [leaves[i].leaves[k] for k in leaves[i].recorded]
            adapters.of("torch", __package__).attach(self.context.policy, result.handle, leaves, inputs, self.is_task)
            attached = iter(leaves[count:])
            del leaves[count:]
            for i in places:
                leaves[i] = leaves[i].fold(islice(attached, len(leaves[i].recorded)))
        return leaves

    def receipt(self) -> Receipt:
        """Return the figures of this call's batch, of the first one if the call was split."""
        if self.split_receipt is not None:
            return self.split_receipt
        result = self.results()[0]
        batch = result.batch
        return Receipt(
            queue_time=batch.started - self.arrived,
            batch=batch.number,
            size=batch.offsets[-1],
            position=batch.offsets[result.index],
            padding=batch.padding,
            run_time=batch.ended - batch.started,
            reason=batch.reason,
        )


def build_result(results: Sequence[CallResult], leaves: list[Any], has_rows: bool) -> Any:
    """Build the result of a call of the leaves of all its parts; without rows, of the only row of each."""
    batch = results[0].batch
    ragged = batch.ragged or {}
    for i in ragged:
        parts = [each.batch.ragged[i][each.index] for each in results if each.batch.ragged is not None]
        leaves[i] = rebuilt(leaves[i], parts, has_rows)
    if not has_rows:
        for i in (*batch.array_places, *batch.item_places):
            if i not in ragged:
                leaves[i] = leaves[i][0]
    return batch.build(leaves)


def _check_alike(results: Sequence[CallResult]) -> None:
    """Refuse the results of a split call's parts if they do not make one result."""
    first, *others = map(_form, results)
    for other in others:
        if other != first:
            raise FailedPreconditionError(
                "the function must return one structure and rows of one shape for all parts of a call that is split, got rows of "
                f"the shapes {[list(shape) for shape in first[-1]]} and {[list(shape) for shape in other[-1]]}"
            )


def _form(result: CallResult) -> tuple[Any, ...]:
    """Return what the results of all parts of a call have in common: their leaves, and the shapes of rows."""
    batch = result.batch
    kinds = len(batch.parts), list(batch.array_places), list(batch.item_places), sorted(batch.ragged or ())
    return (*kinds, [tuple(x.shape[1:]) for x in result.arrays()])


def _concat_parts(parts: Sequence[list[Any]], batch: BatchResult) -> list[Any]:
    """Return the leaves of a split call: its rows and items of all parts, and what is shared of the first."""
    leaves = parts[0]
    for i in batch.array_places:
        leaves[i] = batch_arrays.concat([part[i] for part in parts])
    for i in batch.item_places:
        leaves[i] = [item for part in parts for item in part[i]]
    return leaves
