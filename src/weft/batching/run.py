"""How a batch of a batched function runs: its rows are concatenated, the function is called, its result is split by callers."""

from __future__ import annotations

import sys
from _thread import get_ident
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from importlib import import_module
from itertools import chain, count, pairwise
from math import inf
from typing import Any

import numpy as np

from ..core import adapters
from ..core.arrays import Array, library_of
from ..core.clock import Clock
from ..core.interrupts import as_exception
from ..core.small import stack
from ..errors import InvalidArgumentError
from . import batch_arrays, items, results, trees, vjp
from .arguments import Arguments, array_key
from .batch_arrays import split_rows
from .columns import Column, Columns
from .gradient import OutstandingBackwards, ResultHandle, SharedBackward
from .isolation import Isolation, copies
from .layout import BatchLayout
from .modes import in_jax_mode, jax_mode, torch_mode
from .options import Options
from .queue import Batch
from .ragged_arguments import open_ragged
from .request import BatchKey, BatchResult, CallResult, Request
from .shared import check_shared
from .statistics import Counters
from .torch_graph import has_parameters

_FIRST = (0,)  # the place of the only leaf


class FunctionOutput:
    """The result of the function for some tasks, before it is split."""

    def __init__(
        self,
        output: Any,
        inputs: Sequence[Array],
        offsets: list[int],  # the first row of each task, and the number of rows
        size: int,  # the number of rows with padding
        pull_back: Callable[..., Any] | None,
        layout: BatchLayout | None,
    ) -> None:
        self.output, self.inputs, self.offsets, self.size, self.pull_back = output, inputs, offsets, size, pull_back
        self.layout = layout  # None if all arguments are plain rows
        self.stream: Any = None  # on an accelerator: the `StreamPoint` from which on the result can be used


class Runner:
    """Runs the batches of a batcher: a `Dispatcher` calls `process`."""

    def __init__(
        self,
        f: Callable[..., Any],
        options: Options,
        arguments: Arguments,
        clock: Clock,
        counters: Counters,
        registry: OutstandingBackwards,
    ) -> None:
        self._f, self.options, self._arguments, self.clock = f, options, arguments, clock
        self._vjp = None if options.vjp is None else vjp.on_leaves(options.vjp)
        self.counters, self.registry = counters, registry
        self._numbers = count()
        self._context = copy_context()  # the function runs in copies of it: of the variables of no caller
        self.recording: Any = None  # a `Recorder` or a `Replay`
        self.why_closed: Exception | None = None

    def cancel(self, why: Exception) -> None:
        """End the streams that run, with copies of `why`."""
        self.why_closed = why

    def process(self, batch: Batch) -> list[Any]:
        """Return a `CallResult` or an exception for each task of a batch."""
        batch.number, batch.started, batch.padding = next(self._numbers), self.clock.now(), None
        tasks = _in_time(batch.tasks, batch.started)
        refused: dict[Any, Any] = {}
        recording, answers, ended = self.recording, list[Any](), -inf
        if recording is not None:
            recording.batch_starts(batch.number, tasks)
        ran = self._refuse_unequal(tasks, refused) if tasks and _owner(tasks[0]).shared else tasks
        if ran:
            answers = self._run(batch, ran)
            ended = self.clock.now()
            self.counters.batch_ran(batch, _arrivals(ran), ended)
        if recording is not None:
            recording.batch_ran(batch.number, tasks)
        try:
            if ran is not batch.tasks:
                refused.update(zip(ran, answers, strict=True))
                answers = [refused.get(task) for task in batch.tasks]
            _reject_late(batch.tasks, answers, ended)
            return answers
        finally:  # the tracebacks of errors among them refer to this frame
            refused.clear()
            del answers

    @staticmethod
    def _refuse_unequal(tasks: list[Any], refused: dict[Any, Any]) -> list[Any]:
        """Return the tasks with the shared arguments of the first one, and put errors for the others into `refused`."""
        kept = []
        for task in tasks:
            error = check_shared(tasks[0].owner, task.owner) if task is not tasks[0] else None
            if error is None:
                kept.append(task)
            else:
                refused[task] = error
        return kept

    def _run(self, batch: Batch, tasks: list[Any]) -> list[Any]:
        """Return a result or an exception for each task, None if the task was late for a second run."""
        try:
            return self._run_once(batch, tasks)
        except Exception as error:
            batch.error = error
            if len(tasks) > 1 and self.options.on_error == "isolate":
                return Isolation(lambda some: self._run_once(batch, some), self.clock).results(tasks, error)
            return copies(error, tasks)

    def _run_once(self, batch: Batch, tasks: list[Any]) -> list[Any]:
        """Run the function once for these tasks; return their results, or raise what the function raises."""
        first = _owner(tasks[0])
        mode = first.key.jax_mode
        is_own = (
            first.thread == get_ident() and first.feed is None
        )  # the thread was in this mode when it made the call, just now
        if mode is None or is_own or mode == jax_mode():
            return self._run_in_mode(batch, tasks)
        with mode.use():
            return self._run_in_mode(batch, tasks)

    def _run_in_mode(self, batch: Batch, tasks: list[Any]) -> list[Any]:
        """As `_run_once`, in the callers' mode of JAX."""
        try:
            output = self._call(batch, tasks)
        except _Resized as resized:
            return self._run_without(resized.tasks, batch, tasks)
        except Exception:
            raise
        except BaseException as error:
            raise as_exception(error) from error
        return self._results(batch, tasks, output)

    def _run_without(self, resized: list[Any], batch: Batch, tasks: list[Any]) -> list[Any]:
        """Refuse the tasks whose arrays changed their shape since the call, and run the others."""
        found: dict[Any, Any] = {task: _resized_error(_owner(task)) for task in resized}
        kept = [task for task in tasks if task not in found]
        try:
            if kept:
                found.update(zip(kept, self._run(batch, kept), strict=True))
            return [found[task] for task in tasks]
        finally:
            found.clear()  # the tracebacks of errors among them refer to this frame

    # --- the function ---

    def _call(self, batch: Batch, tasks: list[Any]) -> FunctionOutput:
        """Call the function for these tasks, in their callers' mode of PyTorch and on the stream of the first of them."""
        first = _owner(tasks[0])
        mode = first.key.torch_mode
        # A thread that asks for the number takes over what `torch.set_num_threads` has set in another.
        if mode is not None:
            sys.modules["torch"].get_num_threads()
        if first.stream is not None:
            owners = [_owner(task) for task in tasks]
            with adapters.of("torch", __package__).use_streams(mode, [(x.stream, x.arrays) for x in owners]):
                output = self._context.copy().run(self._call_here, batch, tasks)
            output.stream = first.stream
            return output
        if mode is None or mode == torch_mode():  # benchmark row "small MLP, 64 threads"
            return self._context.copy().run(self._call_here, batch, tasks)
        with adapters.of("torch", __package__).use_mode(mode):
            return self._context.copy().run(self._call_here, batch, tasks)

    def _call_here(self, batch: Batch, tasks: list[Any]) -> FunctionOutput:
        offsets = _offsets(tasks)
        rows = size = offsets[-1]
        sizes = self.options.allowed_batch_sizes
        if sizes and rows:  # a batch without rows has none to pad with
            at = bisect_left(sizes, rows)
            size = sizes[at] if at < len(sizes) else rows
        if batch.padding is None:  # not in a second run: statistics count the batch as it was formed
            batch.count, batch.padding = rows, size - rows
        first = _owner(tasks[0])
        key, pull_back = first.key, None
        layout = None if first.call_arrays is None else BatchLayout(_call_arrays(tasks), offsets, size)
        inputs = self._concat(tasks, key, rows, size, layout) if key.array_keys else []
        objects: dict[str, Any] = items.join(_items_of(tasks), size - rows) if first.items else {}
        if layout is not None:
            objects.update(layout.passed_lengths(inputs))
        if key.is_vjp:
            output, pull_back = self._apply_vjp(first, inputs, objects, rows, size, layout)
        else:
            f = self._f
            if self.options.recompute and key.grad_enabled:
                f = adapters.of("torch", __package__).recomputed(f)
            others = {**first.shared, **objects} if objects else first.shared
            arrays = inputs if layout is None else layout.presented(inputs)
            output = self._arguments.apply(f, key, arrays, others, rows, size)
        return FunctionOutput(output, inputs, offsets, size, pull_back, layout)

    def _concat(self, tasks: list[Any], key: BatchKey, rows: int, size: int, layout: BatchLayout | None) -> list[Array]:
        """Return the rows of all tasks; raise `_Resized` if a caller has resized its array since the call."""
        try:
            inputs = _concat_rows(key, _parts(tasks), rows, size, layout)
        except Exception:
            if not any(map(_is_resized, tasks)):
                raise
            raise _Resized(tasks) from None
        for x in inputs:
            if x.shape[0] != size and layout is None:  # a layout checks the parts
                raise _Resized(tasks)
        return inputs

    def _apply_vjp(
        self,
        first: Request,
        inputs: Sequence[Array],
        objects: dict[str, Any],
        rows: int,
        size: int,
        layout: BatchLayout | None,
    ) -> tuple[Any, Any]:
        key = first.key

        def apply(f: Callable[..., Any], shared: dict[str, Any], arrays: Sequence[Array]) -> Any:
            given = arrays if layout is None else layout.presented(arrays)
            return self._arguments.apply(f, key, given, {**shared, **objects}, rows, size)

        if self._vjp is not None:
            output, pull_back = apply(self._vjp, first.shared, inputs)
            return output, lambda gradients: (vjp.gradients_of_arrays(key, pull_back(gradients)), None)
        return import_module("weft.batching.jax").vjp(partial(apply, self._f), first.shared, inputs)

    # --- its result ---

    def _results(self, batch: Batch, tasks: list[Any], output: FunctionOutput) -> list[Any]:
        """Split the output by tasks. If it does not have the rows of the batch, every task gets the error."""
        try:
            if output.stream is None:
                return self._split(batch, tasks, output)
            torch = adapters.of("torch", __package__)
            with torch.use_stream(output.stream.stream):
                answers = self._split(batch, tasks, output)
                answers[0].batch.stream = torch.point_now(output.stream.stream.device)
                return answers
        except BaseException as error:
            batch.error = as_exception(error)
            return copies(batch.error, tasks)

    def _split(self, batch: Batch, tasks: list[Any], output: FunctionOutput) -> list[Any]:
        whole, offsets, backward = output.output, output.offsets, None
        layout, padding = output.layout, output.size - output.offsets[-1]
        if type(whole) is np.ndarray and output.pull_back is None and layout is None:  # benchmark row "no-op, 1 thread"
            if not whole.shape or whole.shape[0] != output.size:
                results.check_rows(whole, 0, output.size)
            result = BatchResult(batch, offsets, padding, [split_rows(whole, offsets)], trees.only, _FIRST)
        else:
            leaves, build = results.flatten(whole)
            ragged = open_ragged(leaves, offsets, output.size)
            arrays, lists = results.check(leaves, output.size, ragged)
            cuts: dict[int, Column] = {} if layout is None else layout.outputs(whole, leaves)
            cuts.update({i: x.column for i, x in ragged.items()})
            parts = _split_leaves(leaves, arrays, lists, offsets, cuts)
            result = BatchResult(batch, offsets, padding, parts, build, arrays, lists)
            result.ragged = {i: x.splits for i, x in ragged.items()} or None
            if output.pull_back is not None:
                results.check_pull_back(leaves, result)
                bounds, cuts_back = list(pairwise(offsets)), _columns_of_backward(output, cuts, arrays)
                pull_back = vjp.BatchPullBack(output.pull_back, leaves, bounds, output.size, cuts_back)
                backward = self._shared_backward(batch, tasks, pull_back)
            else:
                backward = self._torch_backward(batch, tasks, output, leaves, result, cuts)
        result.ended = self.clock.now()
        handles = None if backward is None else [ResultHandle(ticket) for ticket in backward.tickets]
        return [CallResult(result, i, None if handles is None else handles[i]) for i in range(len(tasks))]

    def _torch_backward(
        self,
        batch: Batch,
        tasks: list[Any],
        output: FunctionOutput,
        leaves: list[Any],
        result: BatchResult,
        cuts: Mapping[int, Column],
    ) -> SharedBackward | None:
        """Make the backward of what PyTorch has recorded, None if that is nothing."""
        recorded = [i for i in result.array_places if library_of(leaves[i]) == "torch" and leaves[i].requires_grad]
        bounds = list(pairwise(output.offsets))
        of_callers = results.recorded_items(leaves, result, bounds)
        if not (recorded or any(of_callers)):
            return None
        outputs = [leaves[i] for i in recorded]
        columns = _columns_of_backward(output, cuts, recorded)
        run = adapters.of("torch", __package__).TorchBackward(outputs, output.inputs, bounds, of_callers, columns)
        backward = self._shared_backward(batch, tasks, run)
        for ticket, own in zip(backward.tickets, of_callers, strict=True):
            ticket.places = [*recorded, *range(len(leaves), len(leaves) + len(own))]
        if _owner(tasks[0]).context.policy.is_copied:
            backward.has_parameters = has_parameters([*outputs, *chain(*of_callers)], output.inputs)
        return backward

    def _shared_backward(self, batch: Batch, tasks: Sequence[Any], run: Callable[..., Any]) -> SharedBackward:
        """Make the backward of a batch: `run(gradients, tickets)` returns each caller's part."""
        number, seconds = batch.number, self.options.gradient_deadline
        mode, context = _owner(tasks[0]).key.jax_mode, self._context

        def settle(gradients: Sequence[Any]) -> Sequence[Any]:
            recording = self.recording
            in_turn = recording.in_turn(number, seconds) if recording is not None else nullcontext()
            with in_turn, in_jax_mode(mode):
                parts: Sequence[Any] = context.copy().run(run, gradients, backward.tickets)
            self.counters.count("backwards")
            return parts

        threads = [task.owner.caller_thread for task in tasks]
        zero_for_missing = self.options.on_missing_gradient == "zero"
        backward = SharedBackward(threads, settle, self.clock, seconds, zero_for_missing, self.registry)
        backward.tokens = getattr(run, "tokens", ())
        return backward


class _Resized(Exception):
    """The arrays of some tasks changed their shape after the call."""

    def __init__(self, tasks: list[Any]) -> None:
        # If every array has its shape again, any of them may have changed.
        self.tasks = [task for task in tasks if _is_resized(task)] or tasks


def _is_resized(task: Any) -> bool:
    owner = _owner(task)
    call_arrays = owner.call_arrays or [None] * len(owner.arrays)
    return any(
        (x.shape[0:1] != (owner.count,) if call_array is None else tuple(x.shape) != call_array.shape)
        or array_key(x, owner.key.torch_mode, call_array) != key
        for x, key, call_array in zip(owner.arrays, owner.key.array_keys, call_arrays, strict=True)
    )


def _resized_error(owner: Request) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the arrays of a call must keep their shape until it is answered: there were {owner.count} rows, "
        f"now the shapes are {[list(x.shape) for x in owner.arrays]}"
    )


def _owner(task: Any) -> Request:
    """Return the request of a task: the task itself, or the request that the task is a slice of."""
    return task if type(task) is Request else task.owner


def _in_time(tasks: list[Any], now: float) -> list[Any]:
    """Return the tasks whose deadline has not passed; the same list if these are all."""
    for task in tasks:
        if _owner(task).deadline <= now:
            return [task for task in tasks if _owner(task).deadline > now]
    return tasks


def _reject_late(tasks: list[Any], answers: list[Any], now: float) -> None:
    """Put an error in place of each result that is missing or came after the deadline, if its caller still waits.

    A lone thread ran the batch itself and gets the result even then.
    """
    is_lone = len(tasks) == 1 and not _owner(tasks[0]).is_task
    for i, task in enumerate(tasks):
        owner = _owner(task)
        if answers[i] is None or (owner.deadline <= now and not is_lone):
            answers[i] = None if owner.has_departed else owner.late()


def _arrivals(tasks: Sequence[Any]) -> list[float]:
    """Return the arrival times of the calls whose first row is in these tasks."""
    found = []
    for task in tasks:
        owner = _owner(task)
        if owner.parts is None or task.start == 0:
            found.append(owner.arrived)
    return found


def _parts(tasks: Sequence[Any]) -> list[Sequence[Array]]:
    """Return the arrays of each task."""
    parts = []
    for task in tasks:
        owner = _owner(task)
        parts.append(owner.arrays if owner.parts is None else owner.part(task.start, task.rows))
    return parts


def _items_of(tasks: Sequence[Any]) -> list[items.Items]:
    """Return the objects of each task."""
    parts = []
    for task in tasks:
        owner = _owner(task)
        parts.append(owner.items if owner.parts is None else items.cut(owner.items, task.start, task.rows))
    return parts


def _call_arrays(tasks: Sequence[Any]) -> list[Any]:
    """Return what is known of the arrays of each task, and its first row."""
    return [(_owner(task).call_arrays, task.start) for task in tasks]


def _offsets(tasks: list[Any]) -> list[int]:
    """Return the first row of each task in the batch, and the number of rows."""
    start = 0
    offsets = [start]
    for task in tasks:
        owner = _owner(task)
        # `task.rows` is a cost: it is 1 for a call without rows.
        start += owner.count if owner.parts is None else min(task.rows, owner.count - task.start)
        offsets.append(start)
    return offsets


def _concat_rows(
    key: BatchKey, parts: list[Sequence[Array]], rows: int, size: int, layout: BatchLayout | None
) -> list[Array]:
    """Return each array of the batch: the rows of all parts, padded to `size` rows with the first one."""
    small = stack(parts) if rows == size and layout is None else None  # benchmark row "no-op, 64 threads"
    if small is not None:
        return [small]
    inputs: list[Array] = []
    for arrays in zip(*parts, strict=True):
        if layout is not None and layout.inputs[len(inputs)] is not None:
            whole = layout.join(len(inputs), arrays)
            is_recorded = key.grad_enabled and library_of(whole) == "torch" and arrays[0].requires_grad
            inputs.append(whole.requires_grad_() if is_recorded else whole)
        elif library_of(arrays[0]) == "torch":
            requires_grad = key.grad_enabled and arrays[0].requires_grad
            inputs.append(adapters.of("torch", __package__).concat_rows(arrays, size - rows, requires_grad))
        elif rows == size:
            inputs.append(batch_arrays.concat(arrays))
        else:
            # Views keep their shape if a caller resizes its array now; the size of the result then shows the change.
            views = [x[:] if type(x) is np.ndarray else x for x in arrays]
            inputs.append(batch_arrays.concat(views, size - rows + sum([x.shape[0] for x in views])))
    return inputs


def _split_leaves(
    leaves: Sequence[Any], arrays: Sequence[int], lists: Sequence[int], offsets: list[int], cuts: Mapping[int, Column]
) -> list[Sequence[Any]]:
    """Return each task's part of each leaf of the result."""
    parts: list[Sequence[Any]] = []
    for i, x in enumerate(leaves):
        if i in cuts:
            parts.append(cuts[i].split(x))
        elif i in arrays:
            parts.append(split_rows(x, offsets))
        elif i in lists:
            parts.append([results.own_items(x, start, stop) for start, stop in pairwise(offsets)])
        else:
            parts.append([results.for_all(x)] * (len(offsets) - 1))
    return parts


def _columns_of_backward(output: FunctionOutput, cuts: Mapping[int, Column], places: Sequence[int]) -> Columns | None:
    """Return the columns of the results at some places and of the arguments, None if all are plain rows."""
    if output.layout is None and not cuts:
        return None
    of_inputs = [None] * len(output.inputs) if output.layout is None else output.layout.inputs
    return [cuts.get(i) for i in places], of_inputs
