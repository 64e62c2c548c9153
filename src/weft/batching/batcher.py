"""`Batcher`: many callers share the batches of one function, with one forward and one backward for each batch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from os import PathLike
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    ParamSpec,
    TypeVar,
    Unpack,
    overload,
)

from ..core import scope as resources
from ..core.fork import on_fork_in_child
from ..core.lock import has_lock, lock
from ..core.representation import never_raises, repr_of
from ..errors import CancelledError, FailedPreconditionError
from . import exits
from .arguments import Arguments
from .dispatcher import Dispatcher
from .exact import Same
from .function_op import POLICIES
from .gradient import BackwardPolicy, OutstandingBackwards
from .lifetime import Lifetime
from .options import STREAMS, LiveOptions, Options, check_function, positive, warn_of_seconds
from .processing import Processor
from .queue import Limits, LowPriority
from .request import CallContext
from .run import Runner
from .scheduler import Scheduler
from .signatures import AwaitableCalls
from .statistics import Counters, Receipt, Statistics
from .submit import refuse_copy
from .vjp import PullBack
from .waste import WasteScheduler

if TYPE_CHECKING:
    from .async_function import AsyncFunction
    from .streams import Stream

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

#: With `split` a call may have any number of rows.
UNLIMITED = 1 << 60
#: A call of low priority that has waited so many seconds, or for `max_wait` if that is longer, counts as one of high priority.
AGES_AFTER = 1.0

_batchers: weakref.WeakSet[Batcher[Any, Any]] = weakref.WeakSet()


class Batcher(Lifetime, Generic[P, R]):
    """A function on batches that many callers share; `weft.batched` makes one and explains the options.

    Call it like the function, with rows of your own; `aio` has the same calls for tasks of an event loop.
    """

    _is_made = False

    def __init__(self, f: Callable[P, R], options: Options | None = None, **values: Any) -> None:
        options = Options.of(values) if options is None else options
        if options.device is not None or options.devices or isinstance(f, (list, tuple)):
            from .devices import placed

            f = placed(f, options)
        kind = check_function(f, options)
        functools.update_wrapper(self, f, updated=())
        self.name = options.name or str(getattr(f, "__qualname__", type(f).__name__))
        self._options = options
        self._deadline, self._has_vjp, self._on_loop = options.deadline, options.vjp is not None, options.on_loop
        self._scope = resources.current_scope
        self._counters = Counters(self._scope.clock)
        self._outstanding = _outstanding()
        self._policy = BackwardPolicy(options.wait_backward, self.name)
        clock = self._scope.clock
        parts = _Parts(f) if kind == "result" else _parts_of(kind, f, self.name)
        self._kind, self._async_function = kind, parts.async_function
        self._arguments = parts.arguments(f, options, self.name)
        self._runner = parts.runner(parts.f, options, self._arguments, clock, self._counters, self._outstanding)
        self._recording = None
        self._begin_life()
        self._rules: Callable[[Limits], Scheduler] = (
            Scheduler if options.max_waste is None else functools.partial(WasteScheduler, options.max_waste)
        )
        self._use(self._make_dispatcher(self._rules), None)
        self._register()
        _batchers.add(self)
        self._is_made = True

    def _use(self, dispatcher: Dispatcher, replay_timeout: float | None) -> None:
        """Send calls to `dispatcher`, with the deadline `replay_timeout` if it is not None."""
        self._dispatcher, self._replay_timeout = dispatcher, replay_timeout
        self._policy.is_replayed = replay_timeout is not None
        self._plain, self._plain_task = self._context(), self._context(is_task=True)

    def _register(self) -> None:
        """Have the scope sweep the queue, as long as the batcher lives."""
        key = ("batched", "", "", "", f"{self.name}#{id(self._dispatcher)}")
        self._scope.resources[key] = _SweptBatcher(self)
        weakref.finalize(self, self._scope.resources.pop, key, None)

    def _make_dispatcher(self, rules: Callable[[Limits], Any]) -> Dispatcher:
        processor = Processor(self._runner.process, self._scope, "batched", self.name, weakref.ref(self))
        # Otherwise a lone caller could not leave at its deadline, or with the first chunk.
        lone_callers_run = self._kind == "result"
        kind: type[Dispatcher] = Dispatcher
        if self._on_loop:
            from .loop_dispatcher import LoopDispatcher as kind
        return kind(_limits(self._options), processor, lambda _: False, rules, True, lone_callers_run)

    # --- calls ---

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(args, kwargs, self._plain, False)

    @overload
    def call(
        self, *args: Any, deadline: float | None = None, priority: Literal["high", "low"] | None = None,
        caller: str | None = None, receipt: Literal[False] = False, **kwargs: Any,
    ) -> R: ...  # fmt: skip
    @overload
    def call(
        self, *args: Any, deadline: float | None = None, priority: Literal["high", "low"] | None = None,
        caller: str | None = None, receipt: Literal[True], **kwargs: Any,
    ) -> tuple[R, Receipt]: ...  # fmt: skip
    def call(
        self, *args: Any, deadline: float | None = None, priority: Literal["high", "low"] | None = None,
        caller: str | None = None, receipt: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Call with options for this call alone; with `receipt=True` return the result and a `weft.Receipt`.

        `deadline` is in seconds from now. Calls with `priority="low"` fill up batches that are about to run, and run by themselves
        when no other call waits. `caller` is the caller's name in a recording.
        """
        return self._call(args, kwargs, self._context(deadline, priority, caller, receipt=receipt), receipt)

    def vjp(self, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Callable[[Any], Any]]:
        """Return the result and its pull-back, which takes the gradient of the result and returns those of the array arguments.

        All callers of the batch must call theirs; the batch is pulled back once. The batcher must have the option `vjp`.
        """
        request = self._request(args, kwargs, self._plain, True)
        return self._answer(request), PullBack(request)

    def stream(
        self, *args: Any, deadline: float | None = None, priority: Literal["high", "low"] | None = None,
        caller: str | None = None, **kwargs: Any,
    ) -> Stream[R]:  # fmt: skip
        """Return an iterator over the chunks that the function yields, with the rows of this call.

        The call begins with the first `next`; `deadline` is in seconds from then on, and bounds the first chunk. `close()` of the
        iterator leaves the batch.
        """
        from .streams import Stream, open_stream

        return open_stream(Stream, self, args, kwargs, deadline, priority, caller)

    @property
    def aio(self) -> AwaitableCalls[P, R]:
        """The same calls for tasks of an event loop: `await policy.aio(obs)`, and `call`, `stream`, `vjp`, `join`."""
        from .async_calls import AsyncCalls

        return AsyncCalls(self)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Batcher[P, R]: ...
    @overload
    def __get__(
        self: Batcher[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> BoundBatcher[Q, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind a batched method to its object, which becomes part of the batch key."""
        return self if instance is None else BoundBatcher(self, instance)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: CallContext, receipt: bool) -> Any:
        request = self._request(args, kwargs, context)
        if request.is_traced:
            from .jax import call

            result, request = call(request, self._arguments, self._answer)
        else:
            result = self._answer(request)
        return (result, request.receipt()) if receipt else result

    # --- options and statistics ---

    @property
    def options(self) -> Options:
        """The options as they are now; `update` changes them."""
        return self._options

    def update(self, **changes: Unpack[LiveOptions]) -> None:
        """Change options from the next batch on, all of them or none; calls that wait and exceed a new limit run alone.

        These can be changed: max_batch_size, min_batch_size, max_wait, max_queue, deadline, parallel, allowed_batch_sizes,
        gradient_deadline.
        """
        if has_lock():
            raise FailedPreconditionError(
                f"the batcher {self.name} cannot be updated by a finalizer or a signal handler that interrupts weft's own "
                "bookkeeping: call update elsewhere"
            )
        is_applied = False
        while not is_applied:
            before = self._options
            options = before.changed(dict(changes))
            with lock:
                if self._options is before:  # else another thread has updated it meanwhile
                    self._dispatcher.check_open()
                    self._options = self._runner.options = options
                    self._deadline = options.deadline
                    self._use(self._dispatcher, self._replay_timeout)
                    is_applied = True
        self._dispatcher.set_limits(_limits(self._options))
        warn_of_seconds(changes)

    def statistics(self, last: float | None = None) -> Statistics:
        """Return a snapshot of the batcher's figures; with `last`, those of the last seconds, up to 300, right to a second."""
        scheduler = self._dispatcher.scheduler
        return self._counters.snapshot(scheduler.waiting, scheduler.running, last)

    def reset_statistics(self) -> None:
        """Count from now on."""
        self._counters.reset()

    # --- everything else ---

    def join(self) -> None:
        """Wait until every batch that has received a gradient has gone back; raise the first error of these backwards.

        If gradients of a batch do not come, it ends at `gradient_deadline` as `on_missing_gradient` says.
        """
        for watch in self._outstanding.watches():
            with suppress(Exception):  # `raise_failed` raises it
                watch.wait()
        self._outstanding.raise_failed()

    @contextmanager
    def record(self, path: str | PathLike[str]) -> Iterator[None]:
        """Write to `path`, during a block, which calls share a batch and in which order batches go back."""
        from pathlib import Path

        from .replay import Recorder

        with self._with_recording(lambda: Recorder(Path(path))):
            yield

    @contextmanager
    def replay(self, path: str | PathLike[str], *, timeout: float = 60.0) -> Iterator[None]:
        """During a block, form the batches recorded in `path` from the same calls, and refuse other calls.

        Calls wait for the other calls of their batch up to `timeout` seconds, whatever their deadline.
        """
        from pathlib import Path

        from .replay import Replay

        seconds = positive("timeout", timeout)
        with self._with_recording(lambda: Replay(Path(path))) as replay:
            before = self._dispatcher
            self._use(self._make_dispatcher(replay.rules), seconds)
            try:
                yield
            finally:
                if not self._closed:
                    before.refuse(None)  # a block may have opened the batcher in between
                with suppress(CancelledError):  # it was closed
                    before.set_limits(_limits(self._options))
                self._use(before, None)

    @contextmanager
    def _with_recording(self, make: Callable[[], Any]) -> Iterator[Any]:
        if self._recording is not None:
            raise FailedPreconditionError(f"the batcher {self.name} is being recorded or replayed already")
        recording = self._recording = self._runner.recording = make()
        try:
            yield recording
        finally:
            self._recording = self._runner.recording = None
            recording.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self.name)  # for copy.copy and copy.deepcopy, too

    if not TYPE_CHECKING:  # a type checker would allow every name then

        def __setattr__(self, name: str, value: Any) -> None:
            if self._is_made and not (name.startswith("_") and hasattr(self, name)):
                raise AttributeError(
                    f"a batcher has no attribute {name} that can be set: update(...) changes its options"
                )
            object.__setattr__(self, name, value)

    @never_raises
    def __repr__(self) -> str:
        limits = self._dispatcher.limits
        return f"<weft.Batcher {self.name}: {limits.target} to a batch, {limits.threads} at once>"

    def _after_fork(self) -> None:
        if self._recording is not None:  # only the parent records or replays
            self._recording = self._runner.recording = None
            self._dispatcher.rules = self._rules
        self._outstanding = self._runner.registry = _outstanding()
        self._counters = self._runner.counters = Counters(self._scope.clock)
        self._policy.is_copied = True
        self._dispatcher.after_fork()
        self._use(self._dispatcher, None)
        self._register()


class _SweptBatcher:
    """A batcher's queue among the resources of its scope. It refers weakly to the batcher, which may otherwise never die."""

    def __init__(self, batcher: Batcher[Any, Any]) -> None:
        self._batcher = weakref.ref(batcher)

    def sweep(self, now: float) -> float:
        """As `Dispatcher.sweep`."""
        batcher = self._batcher()
        return inf if batcher is None else batcher._dispatcher.sweep(now)

    def drop(self, now: float) -> float:
        """Do nothing: the queue belongs to the batcher."""
        return inf

    def stored(self) -> int:
        """As `Dispatcher.stored`."""
        batcher = self._batcher()
        return 0 if batcher is None else batcher._dispatcher.stored()

    def after_fork(self) -> None:
        """Do nothing: `_after_fork_in_child` does it."""


class BoundBatcher(Generic[P, R]):
    """A batched method of one object."""

    __slots__ = ("__weakref__", "_batcher", "_instance")

    def __init__(self, batcher: Batcher[Any, R], instance: object) -> None:
        self._batcher, self._instance = batcher, Same(instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._batcher(self._instance, *args, **kwargs)

    @overload
    def call(self, *args: Any, receipt: Literal[False] = False, **kwargs: Any) -> R: ...
    @overload
    def call(self, *args: Any, receipt: Literal[True], **kwargs: Any) -> tuple[R, Receipt]: ...
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """As `Batcher.call`."""
        return self._batcher.call(self._instance, *args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Stream[R]:
        """As `Batcher.stream`."""
        return self._batcher.stream(self._instance, *args, **kwargs)

    def vjp(self, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Callable[[Any], Any]]:
        """As `Batcher.vjp`."""
        return self._batcher.vjp(self._instance, *args, **kwargs)

    @property
    def aio(self) -> AwaitableCalls[P, R]:
        """As `Batcher.aio`."""
        from .async_calls import AsyncCalls

        return AsyncCalls(self._batcher, self._instance)

    @never_raises
    def __repr__(self) -> str:
        return f"{self._batcher!r} of {repr_of(self._instance.object)}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self._batcher.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batcher, name)


def _limits(options: Options) -> Limits:
    """Return the limits of a batcher's queue."""
    size, split, enough = options.max_batch_size, options.split, options.fills_to
    wait = options.max_wait
    if enough == 1:  # a batch need not wait; one row may cost less than 1
        wait, enough = inf, 0
    return Limits(
        options.parallel,
        UNLIMITED if split else size,
        wait,
        allowed=(size,) if split else (),
        split=split,
        low=LowPriority(size, wait, inf, (), POLICIES[0], split, max(options.max_wait, AGES_AFTER)),
        enough=enough,
        max_waiting=inf if options.max_queue is None else options.max_queue,
    )


class _Parts(NamedTuple):
    """What runs the batches of a function."""

    f: Callable[..., Any]  # called for each batch, in its worker
    async_function: AsyncFunction | None = None
    arguments: type[Arguments] = Arguments
    runner: type[Runner] = Runner


def _parts_of(kind: str, f: Callable[..., Any], name: str) -> _Parts:
    """Return what runs the batches of a function that gives a coroutine or a generator."""
    from .async_function import AsyncFunction

    in_loop = None if kind == "generator" else AsyncFunction(f, name)
    if kind not in STREAMS:
        assert in_loop is not None
        return _Parts(in_loop, in_loop)
    from .stream_run import StreamingFunction, StreamRunner
    from .streams import StreamArguments

    return _Parts(StreamingFunction(f, in_loop), in_loop, StreamArguments, StreamRunner)


def _outstanding() -> OutstandingBackwards:
    """Return an empty `OutstandingBackwards` that is closed when the interpreter ends."""
    outstanding = OutstandingBackwards()
    exits.closing.add(outstanding)
    return outstanding


def _after_fork_in_child() -> None:
    for batcher in list(_batchers):
        batcher._after_fork()


on_fork_in_child(_after_fork_in_child)
