"""A call of a batched function: its arguments taken apart, and its rows of the batch's result put together again."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from math import inf
from typing import Any

import numpy as np

from ..core import adapters
from ..core.arrays import Array, device_of, is_concrete, library_of
from ..core.small import alike, no_rows
from ..errors import DeadlineExceededError, InvalidArgumentError
from ..ragged.variant import VariantArray
from . import attributes as calls
from . import trees
from .call import QueuedCall
from .dispatcher import Dispatcher
from .gradient import ResultHandle
from .interned import Interned
from .queue import Batch
from .statistics import Receipt

_NOTHING: dict[str, Any] = {}
_LOADED = sys.modules  # by a name of our own: asked for each call


class ArgumentSpec:
    """What calls must have in common to share a batch: there is one object for all that have it, and it is their key."""

    __slots__ = ("__weakref__", "key", "kinds", "like", "mode", "pulls", "statics", "structure", "wants_gradient")

    def __init__(
        self,
        structure: trees.Structure,
        statics: tuple[tuple[int, type, Any], ...],  # the leaves that are no arrays, with their places
        kinds: tuple[Hashable, ...],  # dtype, trailing shape and device of each array
        mode: Any,  # what torch goes by, if it is there
        pulls: bool,  # whether a pull-back is wanted
        key: Hashable,  # the user's own
    ) -> None:
        self.structure, self.statics, self.kinds = structure, statics, kinds
        self.mode, self.pulls, self.key = mode, pulls, key
        self.wants_gradient: bool = mode is not None and mode[0]
        self.like: Any = None  # no rows of what a call with one plain array hands in


class BatchSummary:
    """A run of the function: a batch, or part of one that failed."""

    __slots__ = ("ended", "number", "padding", "reason", "rows", "started")

    def __init__(self, batch: Batch, ended: float, rows: int, padding: int) -> None:
        self.number, self.started, self.reason = batch.number, batch.started, batch.reason
        self.ended, self.rows, self.padding = ended, rows, padding


class BatchOutput:
    """What a run gave: a column for each leaf of its result, with a piece for each task, and how leaves are put together."""

    __slots__ = ("build", "columns", "places")

    def __init__(
        self, columns: list[Sequence[Any]], places: Sequence[int], build: Callable[[Sequence[Any]], Any]
    ) -> None:
        self.columns, self.places, self.build = columns, places, build  # places: which of the leaves are arrays


class Answer:
    """A task's part of what a run gave: the one numbered `at`, which has its first row at `position`."""

    __slots__ = ("at", "held", "output", "position", "ran")

    def __init__(
        self, output: BatchOutput, at: int, position: int, held: ResultHandle | None, ran: BatchSummary
    ) -> None:
        self._fill(output, at, position, held, ran)

    def _fill(self, output: BatchOutput, at: int, position: int, held: ResultHandle | None, ran: BatchSummary) -> None:
        self.output, self.at, self.position, self.ran = output, at, position, ran
        self.held = held  # what stands for its gradient, where the batch has one

    def leaves(self) -> list[Any]:
        """Its rows of each array, and what is no array as it is."""
        return [column[self.at] for column in self.output.columns]

    def arrays(self) -> list[Array]:
        """Its rows of each array."""
        leaves = self.leaves()
        return [leaves[i] for i in self.output.places]

    def result(self) -> Any:
        """What the function gave, with this task's rows."""
        output = self.output
        return output.columns[0][self.at] if output.build is trees.only else output.build(self.leaves())

    def without_leaves(self) -> Answer:
        """The same, holding nothing large."""
        return Answer(
            BatchOutput([], self.output.places, self.output.build), self.at, self.position, self.held, self.ran
        )


class Request(QueuedCall):
    """A call: its arguments taken apart, and what becomes of it once it is in a queue."""

    def __init__(
        self, dispatcher: Dispatcher, form: ArgumentSpec, arrays: Sequence[Array], count: int, shared: dict[str, Any], cost: int,
        is_traced: bool,
    ) -> None:  # fmt: skip
        self._open(dispatcher, form, arrays, count, shared, cost)
        self.is_traced = is_traced

    def _open(
        self,
        dispatcher: Dispatcher,
        form: ArgumentSpec,
        arrays: Sequence[Array],
        count: int,
        shared: dict[str, Any],
        cost: int,
    ) -> None:
        self._init_call(dispatcher, cost, None)
        self.form, self.arrays = form, arrays
        self.count = count  # of rows; `rows` is what they cost
        self.shared = shared
        self.is_traced = False  # whether JAX is tracing some of its arrays
        self.counters: Any = None
        self.examples = False  # whether the caller handed in one example without a dimension of rows
        self.is_attached = True  # whether its inputs get their gradient by its own node, else when the batch goes back
        self.backward: Any = None  # what its node does, where a gradient may be wanted
        self.origin: object = None  # the thread that made the call
        self.is_late = False
        self.name: tuple[str, int] | None = None  # the caller's, and which of its calls this is

    def late(self) -> DeadlineExceededError:
        self.is_late = True
        error = QueuedCall.late(self)
        scheduler: Any = self.dispatcher.scheduler
        if hasattr(scheduler, "missing"):
            error.add_note(f"the next batch of the recording waits for {', '.join(scheduler.missing())}")
        return error

    def answer(self, task: Any, value: Any) -> bool:
        # A caller that has left does not keep its part, so that nobody waits for its gradient.
        if self.has_departed:
            return False
        is_done = QueuedCall.answer(self, task, value)
        if self.has_departed:
            self.value = self.answers = None
        elif is_done and self.error is not None and not self._is_told_late():
            self.counters.call_failed()
        return is_done

    def _is_told_late(self) -> bool:
        return self.is_late and isinstance(self.error, DeadlineExceededError)

    def fail(self) -> None:
        self.value = None
        if self._is_told_late():  # here, and not where it is found: several may find it, and an answer may come first
            self.counters.call_late()
        QueuedCall.fail(self)

    def part(self, start: int, rows: int) -> Sequence[Array]:
        """The arrays of one of this call's tasks."""
        if self.slices is None:
            return self.arrays
        return [x[start : start + rows] for x in self.arrays]

    def result(self) -> Any:
        if self.slices is None and not self.examples:  # the usual case
            only: Answer = self.value
            if only.held is None:
                return only.result()
        answers: list[Answer] = [self.value] if self.slices is None else self.value
        pieces = [self._with_node(answer, task) for answer, task in zip(answers, self._tasks(), strict=True)]
        output = answers[0].output
        leaves = pieces[0] if len(pieces) == 1 else _rejoin(pieces, output.places)
        if self.examples:
            for i in output.places:
                leaves[i] = leaves[i][0]
        if self.slices is not None and not self.form.pulls:  # slices know their call: it keeps nothing large
            self.arrays, self.value = (), [answers[0].without_leaves()]
        return output.build(leaves)

    def _tasks(self) -> list[Any]:
        return [self] if self.slices is None else sorted(self.slices, key=lambda task: task.start)

    def _with_node(self, answer: Answer, task: Any) -> list[Any]:
        """The leaves of an answer, differentiable where the batch is."""
        held, leaves = answer.held, answer.leaves()
        if held is None or self.form.pulls:
            return leaves
        share, places = held.share, held.share.places
        share.inputs = needing_gradient(self.part(task.start, task.rows))
        share.is_sent_off = not self.is_attached
        rows = self.backward.attach(held, [leaves[i] for i in places])
        held.is_delivered = True
        for i, x in zip(places, rows, strict=True):
            leaves[i] = x
        return leaves

    def receipt(self) -> Receipt:
        """What became of it: of its first part where it was split."""
        answer: Answer = self.value if self.slices is None else self.value[0]
        ran = answer.ran
        return Receipt(
            queue_time=ran.started - self.arrived,
            batch=ran.number,
            size=ran.rows,
            position=answer.position,
            padding=ran.padding,
            run_time=ran.ended - ran.started,
            reason=ran.reason,
        )


def needing_gradient(arrays: Sequence[Array]) -> list[Array]:
    """Those of torch that need a gradient."""
    return [x for x in arrays if library_of(x) == "torch" and x.requires_grad]


def _rejoin(pieces: Sequence[list[Any]], places: Sequence[int]) -> list[Any]:
    leaves = pieces[0]
    for i in places:
        leaves[i] = calls.concat([piece[i] for piece in pieces])
    return leaves


class Arguments:
    """How the arguments of a function are taken apart and put together."""

    def __init__(
        self, f: Callable[..., Any], shared: Sequence[str], rows: bool, key: Callable[..., Hashable] | None,
        cost: Callable[..., int] | None,
    ) -> None:  # fmt: skip
        self._parameters = _parameters(f)
        self.tells = tuple(name for name in ("mask", "rows") if name in self._parameters)
        for name in shared:
            if name not in self._parameters:
                raise InvalidArgumentError(f"shared must name parameters of the function, got {name!r}")
        self.shared = {name: self._at(name) for name in shared}
        self._rows = rows
        self._key, self._cost = key, cost
        self._forms = Interned(ArgumentSpec)  # as long as a queue or a call has them
        self._is_plain = rows and not shared and key is None and cost is None
        self._last: ArgumentSpec | None = None  # of a call with one plain array

    def take(self, dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any], pulls: bool) -> Request:
        """A call with these arguments, checked: what it needs of others, its arrays with a dimension of rows, and how many."""
        if self._is_plain and len(args) == 1 and not kwargs:  # the usual case
            found = self._plain(args[0], pulls)
            if found is not None:
                rows = len(args[0])
                request = Request.__new__(Request)  # compiled, without the price of calling a class
                request._open(dispatcher, found, args, rows, _NOTHING, rows or 1)
                return request
        given = trees.bare(args)
        key = self._key(*given, **kwargs) if self._key is not None else None
        cost = self._cost(*given, **kwargs) if self._cost is not None else None
        shared: dict[str, Any] = {}
        if self.shared:
            args, kwargs, shared = self._without_shared(args, kwargs)
        for name in self.tells:
            if name in kwargs or self._at(name) < len(args):
                raise InvalidArgumentError(f"{name!r} is told to the function by the batcher, and cannot be given")
        leaves, structure = trees.flatten_call(args, kwargs)
        mode = mode_here()
        arrays: list[Array] = []
        kinds: list[Hashable] = []
        statics: list[tuple[int, type, Any]] = []
        is_traced = bool(shared) and "jax" in sys.modules and import_module("weft.batching.jax").is_traced(shared)
        if not self._rows:
            leaves = _numbers_as_arrays(leaves)
        for i, x in enumerate(leaves):
            if type(x) is np.ndarray and x.dtype in calls.PLAIN and self._rows:
                arrays.append(x)
                kinds.append((x.dtype, x.shape[1:]))
            elif trees.is_array(x):
                x = self._array(i, x)
                arrays.append(x)
                kinds.append(kind_of(x, mode))
                is_traced = is_traced or not is_concrete(x)
                if library_of(x) == "torch" and x.is_cuda:
                    mode = adapters.of("torch", __package__).on_stream(mode, x)
            else:
                statics.append((i, *trees.static(x)))
        form = self._form(structure, tuple(statics), tuple(kinds), mode, pulls, key)
        count = _rows_of(arrays)
        # A call without rows takes part like one with one.
        cost = max(count, 1) if self._cost is None else _check_cost(cost)
        return Request(dispatcher, form, arrays, count, shared, cost, is_traced)

    def _plain(self, x: Any, pulls: bool) -> ArgumentSpec | None:
        """The form of calls with this one array, where that is easily told: most often it is that of the call before."""
        mode = mode_here()
        form = self._last
        if form is not None and form.pulls == pulls and form.mode == mode and alike(x, form.like):
            return form
        if type(x) is np.ndarray and x.dtype in calls.PLAIN and x.shape:
            form = self._form(1, (), ((x.dtype, x.shape[1:]),), mode, pulls, None)
            form.like = no_rows(x)
            self._last = form
            return form
        if library_of(x) == "torch" and x.dim() and not x.is_cuda:
            return self._form(1, (), (kind_of(x, mode),), mode, pulls, None)
        return None

    def _at(self, name: str) -> float:
        """The place of a parameter among the positional ones."""
        is_named = self._parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        return inf if is_named else list(self._parameters).index(name)

    def _form(self, *parts: Any) -> ArgumentSpec:
        """The one form with these parts."""
        try:
            return self._forms.of(parts)
        except TypeError:
            raise _not_hashable(*parts) from None

    def concrete(self, traced: Request, arrays: Sequence[Array], shared: dict[str, Any], pulls: bool) -> Request:
        """The same call with arrays that are not traced any more."""
        for x in trees.flatten(shared)[0]:
            if trees.is_array(x):
                calls.tensor("what is shared", x, library_of(x) or "numpy")
        arrays = [calls.tensor(f"array {i}", x, library_of(x) or "numpy") for i, x in enumerate(arrays)]
        form = traced.form
        kinds = tuple(kind_of(x, form.mode) for x in arrays)
        concrete = self._form(form.structure, form.statics, kinds, form.mode, pulls, form.key)
        return Request(traced.dispatcher, concrete, arrays, traced.count, shared, traced.rows, False)

    def _array(self, i: int, x: Any) -> Array:
        """An argument as an array with a dimension of rows; torch's keep their graph."""
        if type(x) is VariantArray:
            return x if self._rows else x[None]
        library = library_of(x) or "numpy"
        if not (library == "torch" or (library == "jax" and not is_concrete(x))):  # those are looked at elsewhere
            x = calls.tensor(f"argument {i}", x, library)
        return x if self._rows else x[None]

    def _without_shared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        places, named, shared = list(args), dict(kwargs), {}
        for name, at in self.shared.items():
            if at < len(places):
                shared[name], places[int(at)] = places[int(at)], None
            elif name in named:
                shared[name], named[name] = named[name], None
        return tuple(places), named, shared

    def call(
        self, f: Callable[..., Any], form: ArgumentSpec, arrays: Sequence[Array], shared: dict[str, Any], count: int
    ) -> Any:
        """What `f` returns for a batch of which `count` rows are somebody's."""
        if type(form.structure) is int and not (form.statics or shared or self.tells):
            return f(*arrays)  # the usual case
        statics = {entry[0]: entry[2] for entry in form.statics}
        given = iter(arrays)
        size = len(arrays) + len(statics)
        leaves = [statics[i] if i in statics else next(given) for i in range(size)] if statics else arrays
        args, kwargs = trees.unflatten_call(leaves, form.structure)
        if shared:
            places, kwargs = list(args), dict(kwargs)
            for name, value in shared.items():
                if self.shared[name] < len(places):
                    places[int(self.shared[name])] = value
                else:
                    kwargs[name] = value
            args = tuple(places)
        if "mask" in self.tells:
            kwargs = {**kwargs, "mask": _mask(arrays[0], count)}
        if "rows" in self.tells:
            kwargs = {**kwargs, "rows": count}
        return f(*trees.bare(args), **kwargs)


def _numbers_as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """Leaves in which numbers are arrays without dimensions: torch's beside a tensor of torch's, on its device, else NumPy's."""
    tensor = next((x for x in leaves if library_of(x) == "torch"), None)
    if tensor is None:
        asarray: Callable[[Any], Array] = np.asarray
    else:
        asarray = functools.partial(sys.modules["torch"].as_tensor, device=tensor.device)
    return [asarray(x) if isinstance(x, (bool, int, float, complex, np.generic)) else x for x in leaves]


def _parameters(f: Callable[..., Any]) -> dict[str, Any]:
    if "torch" in sys.modules and isinstance(f, sys.modules["torch"].nn.Module):
        f = f.forward  # its __call__ takes anything
    try:
        return dict(inspect.signature(f).parameters)
    except (TypeError, ValueError):  # builtins and ufuncs do not tell
        return {}


def kind_of(x: Array, mode: Any) -> Hashable:
    """What an array must have in common with those of other calls: its library, dtype, trailing shape and device."""
    if type(x) is VariantArray:
        return ("variant", calls.library_in(x))
    library = library_of(x)
    if library == "torch":
        kind: Hashable = adapters.of("torch", __package__).kind(x, mode[0])
        return kind
    if library == "jax":
        return ("jax", x.dtype, x.shape[1:], x.sharding if is_concrete(x) else None)
    return (x.dtype, x.shape[1:])


def _not_hashable(*parts: Any) -> InvalidArgumentError:
    """What of the parts of a form cannot be part of a key."""
    _, statics, _, _, _, key = parts
    for i, kind, value in statics:
        try:
            hash(value)
        except TypeError:
            return InvalidArgumentError(
                f"arguments that are no arrays must be hashable, got a {kind.__name__} as leaf {i}"
            )
    return InvalidArgumentError(f"key must give something hashable, got {key!r}")


_torch_mode: Callable[[], Any] | None = None


def mode_here() -> Any:
    """What torch goes by here, if it is there."""
    global _torch_mode
    if _torch_mode is None:
        if "torch" not in _LOADED:
            return None
        _torch_mode = adapters.of("torch", __package__).mode
    return _torch_mode()


def _check_cost(cost: Any) -> int:
    if not (isinstance(cost, (int, float, np.integer, np.floating)) and 0 < cost < inf):
        raise InvalidArgumentError(f"cost must give a positive number, got {cost!r}")
    return cost  # type: ignore[return-value]


def _rows_of(arrays: Sequence[Array]) -> int:
    if not arrays:
        raise InvalidArgumentError("a batched call must have at least one array among its arguments, got none")
    first = arrays[0].shape
    if not first:
        raise InvalidArgumentError(
            "every array must have a first dimension of rows, got a scalar (rows=False takes one example)"
        )
    for x in arrays:
        if not x.shape or x.shape[0] != first[0]:
            raise InvalidArgumentError(
                f"all arrays of a call must have the same number of rows, got {[list(a.shape) for a in arrays]}"
            )
    return first[0]


def _mask(x: Array, count: int) -> Array:
    """Which rows are somebody's, in the library and on the device of `x`."""
    mask = np.arange(x.shape[0]) < count
    library = calls.library_in(x)
    if library == "torch":
        return sys.modules["torch"].from_numpy(mask).to(x.device)
    return sys.modules["jax"].numpy.asarray(mask) if library == "jax" else mask


def check_shared(first: Request, other: Request) -> InvalidArgumentError | None:
    """Why two calls cannot share their shared arguments: they must be the same objects, or equal."""
    for name, value in first.shared.items():
        theirs = other.shared.get(name)
        if theirs is value:
            continue
        leaves, structure = trees.flatten_call((value,), {})
        their_leaves, their_structure = trees.flatten_call((theirs,), {})
        if structure != their_structure:
            return InvalidArgumentError(
                f"the shared argument {name!r} must be the same in all calls of a batch, got another structure"
            )
        for i, (a, b) in enumerate(zip(leaves, their_leaves, strict=True)):
            if a is not b and not _equal(a, b):
                return InvalidArgumentError(
                    f"leaf {i} of the shared argument {name!r} must be the same in all calls of a batch"
                )
    return None


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if trees.is_array(a):
        alike = tuple(a.shape) == tuple(b.shape) and a.dtype == b.dtype and device_of(a) == device_of(b)
        return alike and bool((a == b).all())
    return bool(a == b)
