"""`weft.batched`: a function on whole batches, called from anywhere with a few rows; one forward, one backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, ParamSpec, TypeVar

from ..core import scope as resources
from ..core.fork import on_fork_in_child
from ..core.lock import departed, remove_departed
from ..core.ticket import Ticket
from ..errors import CancelledError, DeadlineExceededError, FailedPreconditionError
from . import trees
from .backward import Backward, OutstandingBackwards, PullBack
from .dispatcher import Dispatcher
from .function_op import POLICIES
from .options import check_options
from .queue import Limits, LowPriority
from .request import Answer, Arguments, Request
from .run import Runner, with_pull_back
from .scheduler import Scheduler
from .statistics import Counters, Statistics
from .submit import Submitter, positive, refuse_copy

P = ParamSpec("P")
R = TypeVar("R")

#: A call may have any number of rows where it is split.
ANY = 1 << 60

_batchers: weakref.WeakSet[Batcher[Any, Any]] = weakref.WeakSet()


class Batcher(Submitter, Generic[P, R]):
    """A function on batches that many callers share: see `weft.batched`, which makes one.

    Call it like the function, with rows of your own; `aio` is the same for tasks of an event loop.
    """

    def __init__(
        self,
        f: Callable[P, R],
        *,
        max_batch_size: int = 64,
        max_wait: float = 0.0,
        min_batch_size: int = 1,
        fill: Literal["idle", "full"] = "idle",
        max_queue: float | None = None,
        deadline: float | None = None,
        parallel: int = 1,
        split: bool = False,
        allowed_batch_sizes: Sequence[int] = (),
        rows: bool = True,
        key: Callable[..., Hashable] | None = None,
        cost: Callable[..., int] | None = None,
        shared: Sequence[str] = (),
        vjp: Callable[..., tuple[Any, Callable[..., Any]]] | None = None,
        on_error: Literal["isolate", "share"] | None = None,
        wait_backward: bool = True,
        on_missing_gradient: Literal["error", "zero"] = "error",
        gradient_deadline: float = 60.0,
        recompute: bool = False,
        name: str | None = None,
    ) -> None:
        functools.update_wrapper(self, f, updated=())
        self.name = name or str(getattr(f, "__qualname__", type(f).__name__))
        allowed = tuple(allowed_batch_sizes)
        check_options(
            f, max_batch_size, max_wait, min_batch_size, fill, max_queue, deadline, parallel, split, allowed, cost, key, vjp,
            on_error, on_missing_gradient, gradient_deadline,
        )  # fmt: skip
        self._deadline, self._has_vjp, self._examples = deadline, vjp is not None, not rows
        waits = fill == "full" or min_batch_size > 1
        # Where anything is enough, nothing ever waits for the time to fill.
        enough = (max_batch_size if fill == "full" else min_batch_size) if waits else 0
        wait = max_wait if waits else inf
        self._limits = Limits(
            parallel,
            ANY if split else max_batch_size,
            wait,
            allowed=(max_batch_size,) if split else (),
            split=split,
            low=LowPriority(max_batch_size, wait, inf, (), POLICIES[0], split),
            enough=enough,
            max_waiting=inf if max_queue is None else max_queue,
        )
        self._scope = resources.current_scope
        self._counters = Counters()
        self._arguments = Arguments(f, shared, rows, key, cost)
        self._outstanding = OutstandingBackwards()
        self._backward = Backward(wait_backward)
        self._runner = Runner(
            f, self._arguments, self._scope.clock, self._counters, self._outstanding,
            vjp=with_pull_back(vjp) if vjp is not None else None, allowed=allowed, on_error=on_error,
            zero_for_missing=on_missing_gradient == "zero", gradient_deadline=gradient_deadline, recompute=recompute,
        )  # fmt: skip
        self._names = self._patience = None
        self._closed = False
        self._dispatcher = self._make_dispatcher(Scheduler)
        self._register()
        _batchers.add(self)

    def _register(self) -> None:
        """Have the queue swept with all others of the scope, as long as there is a batcher to it."""
        key = ("batched", "", "", "", f"{self.name}#{id(self._dispatcher)}")
        self._scope.resources[key] = _SweptBatcher(self)
        weakref.finalize(self, self._scope.resources.pop, key, None)

    def _make_dispatcher(self, rules: Callable[[Limits], Any]) -> Dispatcher:
        return Dispatcher(
            self._limits, self._scope, self._runner.process, lambda _: False, "batched", self.name, rules, True
        )

    # --- calls ---

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(args, kwargs)

    def call(
        self, *args: Any, deadline: float | None = None, priority: Literal["high", "low"] | None = None,
        caller: str | None = None, receipt: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """The same as calling, with what concerns this call alone; with `receipt=True` the result and a `weft.Receipt`.

        `deadline` is in seconds from now, `caller` is the name it has in a recording.
        """
        return self._call(args, kwargs, deadline, priority, caller, receipt)

    def vjp(self, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Callable[[Any], Any]]:
        """The result and its pull-back: called with the gradient of the result it gives those of the array arguments.

        All callers of the batch must call theirs; the batch is pulled back once. The batcher must have been made with `vjp=`.
        """
        call = self._take_vjp(args, kwargs)
        result = self._answered(call)
        return result, PullBack(self._backward, call)

    @property
    def aio(self) -> Any:
        """The same for tasks of an event loop: `await policy.aio(obs)`, and `call`, `vjp`, `join` in the same way."""
        from .async_calls import AsyncCalls

        return AsyncCalls(self)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method: the instance is part of the key."""
        return self if instance is None else _Bound(self, instance)

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float | None = None, priority: str | None = None,
        caller: str | None = None, receipt: bool = False,
    ) -> Any:  # fmt: skip
        call = self._take(args, kwargs)
        if call.is_traced:
            result, made = self._call_traced(call, deadline, priority, caller)
            return (result, made.receipt()) if receipt else result
        result = self._answered(call, deadline, priority, caller)
        return (result, call.receipt()) if receipt else result

    def _answered(
        self, call: Request, deadline: float | None = None, priority: str | None = None, caller: str | None = None
    ) -> Any:
        """The result of a call."""
        try:
            self._enter(call, deadline, priority, caller)
            return call.wait()
        except BaseException:
            departed.append(
                call
            )  # also if it comes between the two: others may count on this caller to run their batch
            call.end_inside()
            remove_departed()
            raise

    def _take_vjp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        if not self._has_vjp:
            raise FailedPreconditionError(f"the batcher {self.name} has no pull-back: make it with vjp=")
        return self._take(args, kwargs, pulls=True)

    def _call_traced(self, traced: Request, *options: Any) -> tuple[Any, Request]:
        """The result of a call whose arrays JAX is tracing, differentiable under an eager jax.grad, and the call."""
        from . import jax as _batched_jax

        made: list[Request] = []

        def run(concrete: Request) -> Answer:
            self._answered(concrete, *options)
            made[:] = [concrete]
            if concrete.slices is not None:
                raise FailedPreconditionError(
                    "a call that is split cannot be differentiated by JAX: hand in fewer rows"
                )
            return concrete.value

        answer, leaves = _batched_jax.call(traced, self._arguments.concrete, run, self._backward.pull)
        if self._examples:
            leaves = [x[0] if i in answer.output.places else x for i, x in enumerate(leaves)]
        return answer.output.build(leaves), made[0]

    # --- the rest of its life ---

    def statistics(self) -> Statistics:
        """What it has done so far: a snapshot that does not change."""
        scheduler = self._dispatcher.scheduler
        return self._counters.snapshot(scheduler.waiting, scheduler.running)

    def join(self) -> None:
        """Wait until every batch that has received a gradient has gone back; raise what went wrong in one.

        A batch some of whose gradients do not come is settled at its deadline, as `on_missing_gradient` says.
        """
        for watch in self._outstanding.watches():
            with suppress(Exception):  # told below, with those that ended before
                watch.wait()
        self._outstanding.raise_failed()

    def close(self, *, drain: bool = True, timeout: float = 60.0) -> None:
        """Take no more calls: those that wait are run, or with `drain=False` get CancelledError; wait until nothing runs."""
        if self._dispatcher.is_recursive:
            raise FailedPreconditionError(f"the batcher {self.name} cannot be closed from inside one of its own calls")
        idle = _Idle(self._dispatcher, positive("timeout", timeout))
        self._closed = True
        self._dispatcher.close(drain, CancelledError(f"the batcher {self.name} was closed"))
        self._outstanding.look()
        self._dispatcher.when_idle(idle)
        idle.wait()

    def __enter__(self) -> Batcher[P, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def record(self, path: str | Path) -> Iterator[None]:
        """Write to `path`, while the block runs, which calls share a batch and in which order batches go back."""
        from .replay import Recorder

        with self._following(lambda: Recorder(Path(path))):
            yield

    @contextmanager
    def replay(self, path: str | Path, *, timeout: float = 60.0) -> Iterator[None]:
        """While the block runs, form the batches that were recorded in `path` from the same calls; refuse other calls.

        Calls wait for those they shared a batch with: as long as it takes, in place of their deadline, but no longer than
        `timeout`.
        """
        from .replay import Replay

        patience = positive("timeout", timeout)
        with self._following(lambda: Replay(Path(path))) as replay:
            before, self._dispatcher = self._dispatcher, self._make_dispatcher(replay.rules)
            self._patience, self._backward.is_replayed = patience, True
            try:
                yield
            finally:
                self._dispatcher, self._patience, self._backward.is_replayed = before, None, False

    @contextmanager
    def _following(self, make: Callable[[], Any]) -> Iterator[Any]:
        if self._names is not None:
            raise FailedPreconditionError(f"the batcher {self.name} is being recorded or replayed already")
        names = self._names = self._runner.listener = make()
        try:
            yield names
        finally:
            self._names = self._runner.listener = None
            names.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self.name)  # copy.copy and copy.deepcopy come here, too

    def __repr__(self) -> str:
        limits = self._limits
        return f"<weft.Batcher {self.name}: {limits.target} to a batch, {limits.threads} at once>"

    def _after_fork(self) -> None:
        if self._names is not None:  # the parent's affair
            self._names = self._runner.listener = self._patience = None
            self._dispatcher.rules = Scheduler
        self._dispatcher.after_fork()
        self._register()
        self._outstanding = self._runner.keeper = OutstandingBackwards()
        self._counters = self._runner.counters = Counters()


class _SweptBatcher:
    """A batcher's queue among the resources of its scope, which do not keep it: its function may know the batcher."""

    def __init__(self, batcher: Batcher[Any, Any]) -> None:
        self._batcher = weakref.ref(batcher)

    def sweep(self, now: float) -> float:
        """As `Dispatcher.sweep`."""
        batcher = self._batcher()
        return inf if batcher is None else batcher._dispatcher.sweep(now)

    def drop(self, now: float) -> float:
        """Never: the queue is the batcher's own."""
        return inf

    def stored(self) -> int:
        """As `Dispatcher.stored`."""
        batcher = self._batcher()
        return 0 if batcher is None else batcher._dispatcher.stored()

    def after_fork(self) -> None:
        """Batchers look after themselves."""


class _Idle(Ticket):
    """Someone who waits until a dispatcher is idle."""

    def __init__(self, dispatcher: Dispatcher, seconds: float) -> None:
        super().__init__(dispatcher.clock)
        self.alarm = dispatcher.clock.now() + seconds
        self._seconds = seconds

    def on_alarm(self) -> None:
        if self.clock.now() >= self.alarm:
            self.reject(DeadlineExceededError(f"a batch still runs after {self._seconds:g} s"))


class _Bound:
    """A batched method of one object."""

    def __init__(self, batcher: Batcher[Any, Any], instance: object) -> None:
        self._batcher, self._instance = batcher, trees.Whole(instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._batcher(self._instance, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """As `Batcher.call`."""
        return self._batcher.call(self._instance, *args, **kwargs)

    def vjp(self, *args: Any, **kwargs: Any) -> Any:
        """As `Batcher.vjp`."""
        return self._batcher.vjp(self._instance, *args, **kwargs)

    @property
    def aio(self) -> Any:
        """As `Batcher.aio`."""
        return self._batcher.aio.bound(self._instance)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self._batcher.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batcher, name)


def batched(f: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """A `Batcher` of `f`, or, called with options alone, a decorator that makes one.

    `f` takes arrays with a first dimension of rows, in any nesting, and returns such; callers hand in rows of their own and get
    theirs back. Calls that come while a batch runs share the next one.

    >>> import numpy as np
    >>> @batched(max_batch_size=64)
    ... def double(x):
    ...     return x * 2
    >>> double(np.arange(3.0))
    array([0., 2., 4.])
    """
    return functools.partial(Batcher, **options) if f is None else Batcher(f, **options)


def _after_fork_in_child() -> None:
    for batcher in list(_batchers):
        batcher._after_fork()


on_fork_in_child(_after_fork_in_child)
