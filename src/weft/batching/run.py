"""How a batch of a batched function is run: joined, called, cut apart again, and tried in halves where it fails."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from itertools import count, pairwise
from math import ceil, inf, log2
from typing import Any

import numpy as np

from ..core import adapters
from ..core.arrays import Array, library_of, namespace
from ..core.clock import Clock
from ..core.small import pieces, stack
from ..errors import FailedPreconditionError, InvalidArgumentError, own_copy
from . import attributes as calls
from . import trees
from .gradient import BackwardRegistry, GradientTicket, ResultHandle, SharedBackward
from .queue import Batch
from .request import (
    Answer,
    Arguments,
    ArgumentSpec,
    BatchOutput,
    BatchSummary,
    Request,
    check_shared,
    kind_of,
    mode_here,
    needing_gradient,
)
from .statistics import Counters

Bounds = Sequence[tuple[int, int]]

_FIRST = (0,)  # the place of the array in a result that is one


class Result:
    """What the function gave for some tasks."""

    def __init__(
        self, output: Any, inputs: Sequence[Array], edges: list[int], size: int, pull_back: Callable[..., Any] | None
    ) -> None:
        self.output, self.inputs = output, inputs
        self.edges = edges  # where the rows of each task begin, and where the last ones end
        self.size = size  # rows with padding
        self.pull_back = pull_back

    def bounds(self) -> Bounds:
        """Where the rows of each task begin and end."""
        return list(pairwise(self.edges))


class Runner:
    """The processing of batches: `process` is what a `Dispatcher` calls."""

    def __init__(
        self,
        f: Callable[..., Any],
        arguments: Arguments,
        clock: Clock,
        counters: Counters,
        keeper: BackwardRegistry,
        *,
        vjp: Callable[..., Any] | None,
        allowed: tuple[int, ...],
        on_error: str | None,
        zero_for_missing: bool,
        gradient_deadline: float,
        recompute: bool,
    ) -> None:
        self.f, self.vjp, self.arguments, self.clock = f, vjp, arguments, clock
        self.counters, self.keeper = counters, keeper
        self._allowed, self._on_error = allowed, on_error
        self._zero, self._seconds, self._recompute = zero_for_missing, gradient_deadline, recompute
        self._numbers = count()
        self.listener: Any = None  # a recorder, or a replay: told of batches, asked before a backward

    def process(self, batch: Batch) -> list[Any]:
        """The answer of each task of a batch: an `Answer`, or an exception."""
        batch.number, batch.started, batch.padding = next(self._numbers), self.clock.now(), None
        tasks = _in_time(batch.tasks, batch.started)
        refused: dict[Any, Any] = {}
        listener, found, ended = self.listener, list[Any](), -inf
        if listener is not None:
            listener.batch_starts(batch.number, tasks)
        ran = self._refuse_unlike(tasks, refused) if tasks and _owner(tasks[0]).shared else tasks
        if ran:
            found = self._run(batch, ran)
            ended = self.clock.now()
            self.counters.batch_ran(batch, _arrivals(ran), ended)
        if listener is not None:
            listener.batch_ran(batch.number, tasks)
        try:
            if ran is not batch.tasks:
                refused.update(zip(ran, found, strict=True))
                found = [refused.get(task) for task in batch.tasks]
            _tell_late(batch.tasks, found, ended)
            return found
        finally:  # errors among them know the frame they stand in, by their traceback
            refused.clear()
            del found

    @staticmethod
    def _refuse_unlike(tasks: list[Any], answers: dict[Any, Any]) -> list[Any]:
        """Those whose shared arguments are the first one's; the others are told."""
        kept = []
        for task in tasks:
            error = check_shared(tasks[0].owner, task.owner) if task is not tasks[0] else None
            if error is None:
                kept.append(task)
            else:
                answers[task] = error
        return kept

    def _run(self, batch: Batch, tasks: list[Any]) -> list[Any]:
        """What each task gets: its part of the result, an exception, or None where it came too late for a second try."""
        try:
            result = self._call(batch, tasks)
        except _Changed as changed:
            return self._run_without(changed, batch, tasks)
        except Exception as error:
            batch.error = error
            if len(tasks) > 1 and self._isolates(tasks[0].owner):
                return _Isolation(self, batch, len(tasks)).answers(tasks, error)
            return _copies(error, tasks)
        return self.answers(batch, tasks, result)

    def _run_without(self, changed: _Changed, batch: Batch, tasks: list[Any]) -> list[Any]:
        """The same without the tasks whose arrays have changed since their call: they are told, and nobody else is."""
        found: dict[Any, Any] = {task: _resized(_owner(task)) for task in changed.tasks}
        kept = [task for task in tasks if task not in found]
        if kept:
            found.update(zip(kept, self._run(batch, kept), strict=True))
        return [found[task] for task in tasks]

    def _isolates(self, owner: Request) -> bool:
        """Whether a failing batch may be run again: by default where that leaves no gradient recorded twice."""
        if self._on_error is not None:
            return self._on_error == "isolate"
        form = owner.form
        return not (form.pulls or (form.wants_gradient and any(library_of(x) == "torch" for x in owner.arrays)))

    def answers(self, batch: Batch, tasks: list[Any], result: Result) -> list[Any]:
        """Each task's rows of a result; one that does not fit is everyone's error."""
        try:
            return self._cut(batch, tasks, result)
        except Exception as error:
            batch.error = error
            return _copies(error, tasks)

    # --- the function ---

    def _call(self, batch: Batch, tasks: list[Any]) -> Result:
        """What the function gives for these tasks together, under what torch goes by where they were called."""
        mode = _owner(tasks[0]).form.mode
        if mode is None or mode == mode_here():
            return self._call_here(batch, tasks)
        with adapters.of("torch", __package__).under(mode):
            return self._call_here(batch, tasks)

    def _call_here(self, batch: Batch, tasks: list[Any]) -> Result:
        edges = _edges(tasks)
        size = padded = edges[-1]
        if self._allowed and size:  # else there is no row to pad with
            at = bisect_left(self._allowed, size)
            padded = self._allowed[at] if at < len(self._allowed) else size
        if batch.padding is None:  # the batch as it was formed, whatever becomes of it
            batch.count, batch.padding = size, padded - size
        first = _owner(tasks[0])
        inputs = self._join_whole(tasks, first.form, size, padded)
        if first.form.pulls:
            output, pull_back = self._apply_pulled(first, inputs, size)
        else:
            output, pull_back = self._apply(first, inputs, size), None
        return Result(output, inputs, edges, padded, pull_back)

    def _join_whole(self, tasks: list[Any], form: ArgumentSpec, size: int, padded: int) -> list[Array]:
        """The rows of all tasks. A caller can still resize its array: then the rows of others would lie elsewhere."""
        try:
            inputs = self._join(form, _parts(tasks), size, padded)
        except Exception:
            if not any(map(_is_changed, tasks)):
                raise
            raise _Changed(tasks) from None
        for x in inputs:
            if x.shape[0] != padded:
                raise _Changed(tasks)
        return inputs

    @staticmethod
    def _join(form: ArgumentSpec, parts: Sequence[Sequence[Array]], size: int, padded: int) -> list[Array]:
        small = stack(parts) if size == padded else None
        if small is not None:
            return [small]
        inputs = []
        for column in zip(*parts, strict=True):
            if library_of(column[0]) == "torch":
                joined = adapters.of("torch", __package__).join(column, padded - size)
                needs = form.wants_gradient and column[0].requires_grad
                inputs.append(joined.requires_grad_() if needs else joined)
            elif size == padded:
                inputs.append(calls.concat(column))
            else:
                inputs.append(_concat_padded(column, size, padded))
        return inputs

    def _apply(self, first: Request, inputs: Sequence[Array], size: int) -> Any:
        form, f = first.form, self.f
        if self._recompute and form.wants_gradient:
            f = adapters.of("torch", __package__).recomputed(f)
        return self.arguments.call(f, form, inputs, first.shared, size)

    def _apply_pulled(self, first: Request, inputs: Sequence[Array], size: int) -> tuple[Any, Any]:
        form = first.form
        if self.vjp is not None:
            output, pull_back = self.arguments.call(self.vjp, form, inputs, first.shared, size)
            return output, lambda seeds: (_of_arrays(form, pull_back(seeds)), None)
        return import_module("weft.batching.jax").vjp(
            lambda shared, arrays: self.arguments.call(self.f, form, arrays, shared, size), first.shared, inputs
        )

    # --- its result ---

    def _cut(self, batch: Batch, tasks: list[Any], result: Result) -> list[Any]:
        whole, edges, joint = result.output, result.edges, None
        if type(whole) is np.ndarray and result.pull_back is None:  # the usual case, at the price of these lines
            _check_rows(whole, 0, result.size)
            output = BatchOutput([_column(whole, edges)], _FIRST, trees.only)
        else:
            leaves, build = trees.flatten(whole)
            places = [i for i, x in enumerate(leaves) if trees.is_array(x) or isinstance(x, np.generic)]
            for i in places:
                _check_rows(leaves[i], i, result.size)
            recorded = [i for i, x in enumerate(leaves) if library_of(x) == "torch" and x.requires_grad]
            if recorded or result.pull_back is not None:
                joint = self._joint(batch, tasks, leaves, recorded, result)
            columns = [_column(x, edges) if i in places else [x] * len(tasks) for i, x in enumerate(leaves)]
            output = BatchOutput(columns, places, build)
        return _answers(output, edges, joint, BatchSummary(batch, self.clock.now(), edges[-1], result.size - edges[-1]))

    def _joint(
        self, batch: Batch, tasks: Sequence[Any], leaves: Sequence[Any], places: list[int], result: Result
    ) -> SharedBackward:
        """What gathers the callers' gradients: `places` are those of the leaves that torch recorded."""
        back: Any
        if result.pull_back is not None:
            back = _PullBack(result.pull_back, leaves, result.bounds(), result.size)
        else:
            back = _TorchBack([leaves[i] for i in places], result.inputs, result.bounds())

        def settle(gradients: Sequence[Any]) -> Sequence[Any]:
            return self._go_back(batch.number, back, gradients, joint.shares)

        origins = [task.owner.origin for task in tasks]
        joint = SharedBackward(origins, settle, self.clock, self._seconds, self._zero, self.keeper)
        for share in joint.shares:
            share.places = places
        return joint

    def _go_back(
        self, number: int, back: Any, gradients: Sequence[Any], shares: Sequence[GradientTicket]
    ) -> Sequence[Any]:
        listener = self.listener
        with listener.returning(number, self._seconds) if listener is not None else nullcontext():
            parts = back(gradients, shares)
        self.counters.went_back()
        return parts


class _Changed(Exception):
    """Some calls' arrays do not have the shape any more that they had when the call was made."""

    def __init__(self, tasks: list[Any]) -> None:
        # If nobody is seen to have changed, somebody has changed and changed back: nobody can be trusted.
        self.tasks = [task for task in tasks if _is_changed(task)] or tasks


def _is_changed(task: Any) -> bool:
    owner = _owner(task)
    kinds = zip(owner.arrays, owner.form.kinds, strict=True)
    return any(x.shape[0:1] != (owner.count,) or kind_of(x, owner.form.mode) != kind for x, kind in kinds)


def _resized(owner: Request) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the arrays of a call must keep their shape until it is answered: there were {owner.count} rows, "
        f"now the shapes are {[list(x.shape) for x in owner.arrays]}"
    )


def _concat_padded(column: Sequence[Array], size: int, padded: int) -> Array:
    """Arrays one below the other, padded with the first row; they have `size` rows, or the result has another number."""
    # NumPy's as views of their own: what these say of their rows does not change any more.
    column = [x[:] if type(x) is np.ndarray else x for x in column]
    return calls.concat(column, padded + sum(x.shape[0] for x in column) - size)


class _Isolation:
    """The search for the guilty tasks of a batch: halves are run until only they fail, in a bounded number of runs."""

    def __init__(self, runner: Runner, batch: Batch, size: int) -> None:
        self._runner, self._batch = runner, batch
        self._found: dict[Any, Any] = {}
        self._left = 2 * ceil(log2(size)) + 1

    def answers(self, tasks: list[Any], error: Exception) -> list[Any]:
        """What each of the tasks gets that failed together with `error`."""
        self.halve(tasks, error)
        try:
            return [self._found.get(task) for task in tasks]
        finally:
            self._found.clear()  # errors know by whom they were found, by their traceback

    def halve(self, tasks: list[Any], error: Exception) -> None:
        """Find the guilty among tasks that failed together with `error`."""
        if len(tasks) == 1 or self._left < 2:
            self._note(tasks, _copies(error, tasks))
            return
        middle = len(tasks) // 2
        halves = [tasks[:middle], tasks[middle:]]
        errors = [self._try(half) for half in halves]
        first, second = errors
        is_alike = first is not None and second is not None and _alike(first, second)
        for half, failure in zip(halves, errors, strict=True):
            if failure is not None and is_alike:
                self._note(half, _copies(failure, half))
            elif failure is not None:
                self.halve(half, failure)

    def _try(self, tasks: list[Any]) -> Exception | None:
        now = self._runner.clock.now()
        tasks = [task for task in tasks if task.owner.deadline > now and not task.owner.has_departed]
        if not tasks:
            return None
        self._left -= 1
        try:
            result = self._runner._call(self._batch, tasks)
        except Exception as error:
            return error
        self._note(tasks, self._runner.answers(self._batch, tasks, result))
        return None

    def _note(self, tasks: list[Any], answers: list[Any]) -> None:
        self._found.update(zip(tasks, answers, strict=True))


def _alike(a: Exception, b: Exception) -> bool:
    return type(a) is type(b) and str(a) == str(b)


def _owner(task: Any) -> Request:
    """The call that a task is, or is a slice of."""
    return task if type(task) is Request else task.owner


def _copies(error: Exception, tasks: list[Any]) -> list[Any]:
    """An exception of its own for each task."""
    return [own_copy(error) for _ in tasks]


def _in_time(tasks: list[Any], now: float) -> list[Any]:
    """The tasks whose deadline is not past: the very list, if that is all of them."""
    for task in tasks:
        if _owner(task).deadline <= now:
            return [task for task in tasks if _owner(task).deadline > now]
    return tasks


def _tell_late(tasks: list[Any], answers: list[Any], now: float) -> None:
    """Put in place what those get whose deadline has passed, or that have no answer: that they are late, if they still wait.

    A lone thread ran the batch itself, and gets what there is.
    """
    is_lone = len(tasks) == 1 and not _owner(tasks[0]).is_task
    for i, task in enumerate(tasks):
        owner = _owner(task)
        if answers[i] is None or (owner.deadline <= now and not is_lone):
            answers[i] = None if owner.has_departed else owner.late()


def _arrivals(tasks: Sequence[Any]) -> list[float]:
    """When the calls came that begin among these tasks."""
    found = []
    for task in tasks:
        owner = _owner(task)
        if owner.slices is None or task.start == 0:
            found.append(owner.arrived)
    return found


def _parts(tasks: Sequence[Any]) -> list[Sequence[Array]]:
    """The arrays of each task."""
    parts = []
    for task in tasks:
        owner = _owner(task)
        parts.append(owner.arrays if owner.slices is None else owner.part(task.start, task.rows))
    return parts


def _edges(tasks: list[Any]) -> list[int]:
    """Where the rows of each task begin in a batch, and where the last ones end."""
    start = 0
    edges = [start]
    for task in tasks:
        owner = _owner(task)
        # What a task has in its queue may be another measure, and is one for a call without rows.
        start += owner.count if owner.slices is None else min(task.rows, owner.count - task.start)
        edges.append(start)
    return edges


def _answers(output: BatchOutput, edges: list[int], joint: SharedBackward | None, ran: BatchSummary) -> list[Any]:
    """Each task's answer: its part of the result, and its share of what goes back."""
    answers: list[Any] = []
    for i in range(len(edges) - 1):
        answer = Answer.__new__(Answer)  # compiled, without the price of calling a class
        answer._fill(output, i, edges[i], None if joint is None else ResultHandle(joint.shares[i]), ran)
        answers.append(answer)
    return answers


def _column(x: Any, edges: list[int]) -> Sequence[Any]:
    """What each task gets of one array of the result: its rows."""
    small = pieces(x, edges)
    if small is not None:
        return small
    bounds = list(pairwise(edges))
    return adapters.of("torch", __package__).cut(x, bounds) if library_of(x) == "torch" else calls.cut(x, bounds)


def _check_rows(x: Any, i: int, size: int) -> None:
    shape = x.shape
    if not shape or shape[0] != size:
        came = f"{shape[0]} rows" if shape else "a scalar"
        raise FailedPreconditionError(
            f"every array the function returns must have the {size} rows of its batch, got {came} in leaf {i} of the result"
        )


class _TorchBack:
    """The backward of a batch that torch recorded: each caller's part is its rows of the gradient of the inputs."""

    def __init__(self, outputs: Sequence[Array], inputs: Sequence[Array], bounds: Bounds) -> None:
        self._outputs = outputs
        self._inputs = needing_gradient(inputs)
        self._bounds = bounds

    def __call__(self, gradients: Sequence[Any], shares: Sequence[GradientTicket]) -> list[list[Array | None]]:
        torch = adapters.of("torch", __package__)
        torch.backward(self._outputs, gradients, self._bounds)
        parts = [[_rows_of(x.grad, start, stop) for x in self._inputs] for start, stop in self._bounds]
        left = [
            (x, gradient)
            for share, part in zip(shares, parts, strict=True)
            if share.is_sent_off
            for x, gradient in zip(share.inputs, part, strict=True)
            if gradient is not None
        ]
        torch.hand_back(left)
        return parts


def _rows_of(gradient: Array | None, start: int, stop: int) -> Array | None:
    return None if gradient is None else gradient[start:stop].clone()


class _PullBack:
    """The backward of a batch by a function: each caller's part is its rows of the gradients of the arrays, and of what is shared.

    The gradient of what is shared goes whole to the first caller whose gradient came, so that the sum over callers is right.
    """

    def __init__(self, pull_back: Callable[..., Any], leaves: Sequence[Any], bounds: Bounds, size: int) -> None:
        self._pull_back, self._bounds, self._size = pull_back, bounds, size
        self._leaves = [x for x in leaves if trees.is_array(x)]

    def __call__(
        self, gradients: Sequence[Any], shares: Sequence[GradientTicket]
    ) -> list[tuple[list[Array | None], Any]]:
        seeds = [self._seed(k, gradients) for k in range(len(self._leaves))]
        columns, shared = self._pull_back(seeds)
        for i, x in enumerate(columns):
            if x is not None and (not x.shape or x.shape[0] != self._size):
                raise FailedPreconditionError(
                    f"every gradient vjp gives must have the {self._size} rows of the batch, got {list(x.shape)} for array {i}"
                )
        owner = next((i for i, given in enumerate(gradients) if given is not None), 0)
        return [
            ([None if x is None else x[start:stop] for x in columns], shared if i == owner else None)
            for i, (start, stop) in enumerate(self._bounds)
        ]

    def _seed(self, k: int, gradients: Sequence[Any]) -> Array:
        """The gradient of one array of the result, with zeros where none came."""
        like = self._leaves[k]
        xp = namespace(library_of(like) or "numpy")
        pieces = []
        for (start, stop), given in zip(self._bounds, gradients, strict=True):
            if given is None or given[k] is None:
                pieces.append(xp.zeros((stop - start, *like.shape[1:]), dtype=like.dtype))
            else:
                pieces.append(given[k])
        missing = self._size - self._bounds[-1][1]
        if missing:
            pieces.append(xp.zeros((missing, *like.shape[1:]), dtype=like.dtype))
        return xp.concat(pieces, axis=0)


def with_pull_back(vjp: Callable[..., Any]) -> Callable[..., Any]:
    """A user's `vjp`, which gives a result and what takes the gradient of it to those of the arguments, in the form used here."""

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Callable[[Sequence[Array]], list[Any]]]:
        given = vjp(*args, **kwargs)
        if not (isinstance(given, tuple) and len(given) == 2 and callable(given[1])):
            raise FailedPreconditionError("vjp must return the function's result and a pull-back")
        output, pull_back = given
        leaves, build = trees.flatten(output)
        places = [i for i, x in enumerate(leaves) if trees.is_array(x)]

        def pull(seeds: Sequence[Array]) -> list[Any]:
            whole = list(leaves)
            for i, seed in zip(places, seeds, strict=True):
                whole[i] = seed
            return trees.flatten(pull_back(build(whole)))[0]

        return output, pull

    return call


def _of_arrays(form: ArgumentSpec, gradients: list[Any]) -> list[Any]:
    """Of what a pull-back gave the gradients of the arrays: it may also have None for arguments that are none."""
    count, others = len(form.kinds), {entry[0] for entry in form.statics}
    if len(gradients) == count + len(others) and all(gradients[i] is None for i in others):
        gradients = [x for i, x in enumerate(gradients) if i not in others]
    if len(gradients) != count or not all(x is None or trees.is_array(x) for x in gradients):
        came = [trees.describe(x) if trees.is_array(x) else type(x).__name__ for x in gradients]
        raise FailedPreconditionError(f"the pull-back must give a gradient for each of the {count} arrays, got {came}")
    return gradients
