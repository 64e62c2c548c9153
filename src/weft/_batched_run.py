"""How a batch of a batched function is run: joined, called, cut apart again, and tried in halves where it fails."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from itertools import count
from math import ceil, inf, log2
from typing import Any

import numpy as np

from . import _trees as trees
from . import adapters
from ._arrays import Array, library_of, namespace
from ._batched_call import Answer, Arguments, Form, Ran, Request, check_shared, needing_gradient
from ._statistics import Counters
from .batching.clock import Clock
from .batching.joint import Held, Joint, Keeper, Share
from .batching.queue import Batch
from .errors import FailedPreconditionError, own_copy
from .kernels.small import stack
from .ops import _calls as calls

Bounds = Sequence[tuple[int, int]]


class Result:
    """What the function gave for some tasks."""

    def __init__(
        self, output: Any, inputs: Sequence[Array], bounds: list[tuple[int, int]], size: int,
        pull_back: Callable[..., Any] | None,
    ) -> None:  # fmt: skip
        self.output, self.inputs, self.bounds = output, inputs, bounds
        self.size = size  # rows with padding
        self.pull_back = pull_back


class Runner:
    """The processing of batches: `process` is what a `Desk` calls."""

    def __init__(
        self,
        f: Callable[..., Any],
        arguments: Arguments,
        clock: Clock,
        counters: Counters,
        keeper: Keeper,
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
        listener, ran = self.listener, tasks
        if listener is not None:
            listener.batch_starts(batch.number, tasks)
        answers: dict[Any, Any] = {}
        ended = -inf
        tasks = self._refuse_unlike(tasks, answers)
        if tasks:
            self._run(batch, tasks, answers)
            ended = self.clock.now()
            self.counters.batch_ran(batch, _arrivals(tasks), ended)
        if listener is not None:
            listener.batch_ran(batch.number, ran)
        try:
            return _in_order(batch.tasks, answers, ended)
        finally:
            answers.clear()  # errors among them know the frame they stand in, by their traceback

    @staticmethod
    def _refuse_unlike(tasks: list[Any], answers: dict[Any, Any]) -> list[Any]:
        """Those whose shared arguments are the first one's; the others are told."""
        if not tasks or not _owner(tasks[0]).shared:
            return tasks
        kept = []
        for task in tasks:
            error = check_shared(tasks[0].owner, task.owner) if task is not tasks[0] else None
            if error is None:
                kept.append(task)
            else:
                answers[task] = error
        return kept

    def _run(self, batch: Batch, tasks: list[Any], answers: dict[Any, Any]) -> None:
        try:
            result = self._call(batch, tasks)
        except Exception as error:
            batch.error = error
            if len(tasks) > 1 and self._isolates(tasks[0].owner):
                _Isolation(self, batch, answers, len(tasks)).halve(tasks, error)
            else:
                self._fail(tasks, error, answers)
        else:
            self.answer(batch, tasks, result, answers)

    def _isolates(self, owner: Request) -> bool:
        """Whether a failing batch may be run again: by default where that leaves no gradient recorded twice."""
        if self._on_error is not None:
            return self._on_error == "isolate"
        form = owner.form
        return not (form.pulls or (form.wants_gradient and any(library_of(x) == "torch" for x in owner.arrays)))

    @staticmethod
    def _fail(tasks: Sequence[Any], error: Exception, answers: dict[Any, Any]) -> None:
        for task in tasks:
            answers[task] = own_copy(error)

    def answer(self, batch: Batch, tasks: Sequence[Any], result: Result, answers: dict[Any, Any]) -> None:
        """Give each task its rows of a result; a result that does not fit is everyone's error."""
        try:
            answers.update(zip(tasks, self._cut(batch, tasks, result), strict=True))
        except Exception as error:
            batch.error = error
            self._fail(tasks, error, answers)

    # --- the function ---

    def _call(self, batch: Batch, tasks: Sequence[Any]) -> Result:
        """What the function gives for these tasks together, under what torch goes by where they were called."""
        mode = _owner(tasks[0]).form.mode
        if mode is None:
            return self._call_here(batch, tasks)
        torch = adapters.of("joint_torch")
        if mode == torch.mode():
            return self._call_here(batch, tasks)
        with torch.under(mode):
            return self._call_here(batch, tasks)

    def _call_here(self, batch: Batch, tasks: Sequence[Any]) -> Result:
        parts = _parts(tasks)
        bounds, size = _bounds(tasks)
        at = bisect_left(self._allowed, size) if size else len(self._allowed)  # there is no row to pad with
        padded = self._allowed[at] if at < len(self._allowed) else size
        if batch.padding is None:  # the batch as it was formed, whatever becomes of it
            batch.count, batch.padding = size, padded - size
        first = _owner(tasks[0])
        inputs = self._join(first.form, parts, size, padded)
        output, pull_back = self._apply(first, inputs, size)
        return Result(output, inputs, bounds, padded, pull_back)

    @staticmethod
    def _join(form: Form, parts: Sequence[Sequence[Array]], size: int, padded: int) -> list[Array]:
        small = stack(parts) if size == padded else None
        if small is not None:
            return [small]
        inputs = []
        for column in zip(*parts, strict=True):
            if library_of(column[0]) == "torch":
                joined = adapters.of("joint_torch").join(column, padded - size)
                needs = form.wants_gradient and column[0].requires_grad
                inputs.append(joined.requires_grad_() if needs else joined)
            else:
                inputs.append(calls.concat(column, padded))
        return inputs

    def _apply(self, first: Request, inputs: Sequence[Array], size: int) -> tuple[Any, Any]:
        form = first.form
        if form.pulls:
            return self._apply_pulled(first, inputs, size)
        f = self.f
        if self._recompute and form.wants_gradient:
            f = adapters.of("joint_torch").recomputed(f)
        return self.arguments.call(f, form, inputs, first.shared, size), None

    def _apply_pulled(self, first: Request, inputs: Sequence[Array], size: int) -> tuple[Any, Any]:
        form = first.form
        if self.vjp is not None:
            return self.arguments.call(self.vjp, form, inputs, first.shared, size)
        return import_module("weft._batched_jax").vjp(
            lambda shared, arrays: self.arguments.call(self.f, form, arrays, shared, size), first.shared, inputs
        )

    # --- its result ---

    def _cut(self, batch: Batch, tasks: Sequence[Any], result: Result) -> list[Answer]:
        leaves, build = trees.flatten(result.output)
        places = [i for i, x in enumerate(leaves) if trees.is_array(x) or isinstance(x, np.generic)]
        _check_rows(leaves, places, result.size)
        recorded = [i for i, x in enumerate(leaves) if library_of(x) == "torch" and x.requires_grad]
        joint = None
        if recorded or result.pull_back is not None:
            joint = self._joint(batch, tasks, leaves, recorded, result)
        columns = [_column(x, i in places, result.bounds) for i, x in enumerate(leaves)]
        real = result.bounds[-1][1]
        ran = Ran(batch, self.clock.now(), real, result.size - real)
        rows = list(zip(*columns, strict=True)) or [()] * len(tasks)  # a result may have no leaves
        return _answers(rows, places, build, joint, result.bounds, ran)

    def _joint(
        self, batch: Batch, tasks: Sequence[Any], leaves: Sequence[Any], places: list[int], result: Result
    ) -> Joint:
        """What gathers the callers' gradients: `places` are those of the leaves that torch recorded."""
        back: Any
        if result.pull_back is not None:
            back = _PullBack(result.pull_back, leaves, result.bounds, result.size)
        else:
            back = _TorchBack([leaves[i] for i in places], result.inputs, result.bounds)

        def settle(gradients: Sequence[Any]) -> Sequence[Any]:
            return self._go_back(batch.number, back, gradients, joint.shares)

        origins = [task.owner.origin for task in tasks]
        joint = Joint(origins, settle, self.clock, self._seconds, self._zero, self.keeper)
        for share in joint.shares:
            share.places = places
        return joint

    def _go_back(self, number: int, back: Any, gradients: Sequence[Any], shares: Sequence[Share]) -> Sequence[Any]:
        listener = self.listener
        with listener.returning(number, self._seconds) if listener is not None else nullcontext():
            parts = back(gradients, shares)
        self.counters.went_back()
        return parts


class _Isolation:
    """The search for the guilty tasks of a batch: halves are run until only they fail, in a bounded number of runs."""

    def __init__(self, runner: Runner, batch: Batch, answers: dict[Any, Any], size: int) -> None:
        self._runner, self._batch, self._answers = runner, batch, answers
        self._left = 2 * ceil(log2(size)) + 1

    def halve(self, tasks: list[Any], error: Exception) -> None:
        """Find the guilty among tasks that failed together with `error`."""
        if len(tasks) == 1 or self._left < 2:
            self._runner._fail(tasks, error, self._answers)
            return
        middle = len(tasks) // 2
        halves = [tasks[:middle], tasks[middle:]]
        errors = [self._try(half) for half in halves]
        first, second = errors
        is_alike = first is not None and second is not None and _alike(first, second)
        for half, failure in zip(halves, errors, strict=True):
            if failure is not None and is_alike:
                self._runner._fail(half, failure, self._answers)
            elif failure is not None:
                self.halve(half, failure)

    def _try(self, tasks: list[Any]) -> Exception | None:
        now = self._runner.clock.now()
        tasks = [task for task in tasks if task.owner.deadline > now and not task.owner.gone]
        if not tasks:
            return None
        self._left -= 1
        try:
            result = self._runner._call(self._batch, tasks)
        except Exception as error:
            return error
        self._runner.answer(self._batch, tasks, result, self._answers)
        return None


def _alike(a: Exception, b: Exception) -> bool:
    return type(a) is type(b) and str(a) == str(b)


def _owner(task: Any) -> Request:
    """The call that a task is, or is a slice of."""
    return task if type(task) is Request else task.owner


def _in_time(tasks: Sequence[Any], now: float) -> list[Any]:
    """The tasks whose deadline is not past."""
    return [task for task in tasks if _owner(task).deadline > now]


def _in_order(tasks: Sequence[Any], answers: dict[Any, Any], now: float) -> list[Any]:
    """The answer of each task: it came too late, where its deadline has passed meanwhile, and nothing, where nobody waits.

    A lone thread ran the batch itself, and gets what there is.
    """
    is_lone = len(tasks) == 1 and not _owner(tasks[0]).is_task
    found = []
    for task in tasks:
        owner = _owner(task)
        answer = answers.get(task) if owner.deadline > now or is_lone else None
        found.append(owner.late() if answer is None and not owner.gone else answer)
    return found


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


def _bounds(tasks: Sequence[Any]) -> tuple[list[tuple[int, int]], int]:
    bounds, start = [], 0
    for task in tasks:
        owner = _owner(task)
        # What a task has in its queue may be another measure, and is one for a call without rows.
        stop = start + (owner.count if owner.slices is None else min(task.rows, owner.count - task.start))
        bounds.append((start, stop))
        start = stop
    return bounds, start


def _answers(
    rows: list[tuple[Any, ...]], places: Sequence[int], build: Callable[[Sequence[Any]], Any], joint: Joint | None,
    bounds: list[tuple[int, int]], ran: Ran,
) -> list[Answer]:  # fmt: skip
    """Each task's answer: its leaves of the result, and its share of what goes back."""
    answers = []
    for i in range(len(bounds)):
        answer = Answer.__new__(Answer)  # compiled, without the price of calling a class
        answer.leaves, answer.places, answer.build = rows[i], places, build
        answer.held = None if joint is None else Held(joint.shares[i])
        answer.position, answer.ran = bounds[i][0], ran
        answers.append(answer)
    return answers


def _column(x: Any, is_array: bool, bounds: Bounds) -> list[Any]:
    """What each task gets of one leaf of the result: its rows, and what is no array as it is."""
    if not is_array:
        return [x] * len(bounds)
    return adapters.of("joint_torch").cut(x, bounds) if library_of(x) == "torch" else calls.cut(x, bounds)


def _check_rows(leaves: Sequence[Any], places: Sequence[int], size: int) -> None:
    for i in places:
        shape = leaves[i].shape
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

    def __call__(self, gradients: Sequence[Any], shares: Sequence[Share]) -> list[list[Array | None]]:
        torch = adapters.of("joint_torch")
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

    def __call__(self, gradients: Sequence[Any], shares: Sequence[Share]) -> list[tuple[list[Array | None], Any]]:
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

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Callable[[Sequence[Array]], tuple[list[Any], None]]]:
        given = vjp(*args, **kwargs)
        if not (isinstance(given, tuple) and len(given) == 2 and callable(given[1])):
            raise FailedPreconditionError("vjp must return the function's result and a pull-back")
        output, pull_back = given
        leaves, build = trees.flatten(output)
        places = [i for i, x in enumerate(leaves) if trees.is_array(x)]

        def pull(seeds: Sequence[Array]) -> tuple[list[Any], None]:
            whole = list(leaves)
            for i, seed in zip(places, seeds, strict=True):
                whole[i] = seed
            gradients, _ = trees.flatten(pull_back(build(whole)))
            return [x for x in gradients if x is None or trees.is_array(x)], None

        return output, pull

    return call
