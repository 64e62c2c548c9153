"""How a batch of a function that yields runs: the first chunk answers its calls, and the worker goes on until the end.

Between the worker and each caller is a `Feed`. A caller that does not iterate holds up nobody: its feed has a limit.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from time import monotonic
from typing import Any

from ..core.clock import Clock
from ..core.fork import on_fork_in_child
from ..core.interrupts import as_exception
from ..core.ticket import Ticket, check_exit, wake_all
from ..core.wakeup import Wakeup
from ..errors import CancelledError, ResourceExhaustedError, own_copy
from . import trees
from .async_function import AsyncFunction, LoopThread, StepMode
from .modes import in_jax_mode
from .processing import wake_and_wait
from .queue import Batch
from .request import BatchResult, CallResult
from .run import FunctionOutput, Runner

#: The most chunks that wait for a caller.
MOST_CHUNKS = 64

#: How long, in seconds, a worker waits for a caller for whom so many chunks wait, and how much of it each chunk gives back.
SECONDS_FOR_ROOM = 0.1
SECONDS_PER_CHUNK = 0.001

#: Stands for a chunk where there is none: the generator has ended.
END: Any = object()


class Feed:
    """The chunks on their way to one call. It needs no lock: one thread puts them in, and one takes them out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._chunks: deque[CallResult] = deque()
        self._waiting: Ticket | None = None  # of the caller, while it waits
        self._is_ended = False
        self._error: Exception | None = None
        self._has_left = False
        self._room: Wakeup | None = None  # of the worker, while it waits for the caller to take a chunk
        self.patience = SECONDS_FOR_ROOM  # how long the worker still waits for this caller, in seconds
        self.source: Group | None = None  # where the caller's own thread gets chunks from, if no worker does

    @property
    def is_wanted(self) -> bool:
        """Whether the caller takes more chunks."""
        return not (self._has_left or self._is_ended)

    def put(self, chunk: CallResult) -> bool:
        """Add a chunk; return False if there are too many, which ends the stream of this caller alone."""
        if self.is_full:
            self.end(
                ResourceExhaustedError(
                    f"the caller of a stream is too slow: {MOST_CHUNKS} chunks wait for it, and one more came; take them faster"
                )
            )
            return False
        self._chunks.append(chunk)
        self.patience = min(self.patience + SECONDS_PER_CHUNK, SECONDS_FOR_ROOM)
        return True

    @property
    def is_full(self) -> bool:
        """Whether so many chunks wait for the caller that no more may come."""
        return len(self._chunks) >= MOST_CHUNKS and not self._has_left

    def wait_for_room(self, until: float) -> None:
        """Wait for the caller to take a chunk, until the time `until` at most."""
        self._room = room = Wakeup()
        if self.is_full:
            room.acquire(True, max(until - monotonic(), 0.0))
        self._room = None

    def _make_room(self) -> None:
        room = self._room
        if room is not None:
            room.release()

    def end(self, error: Exception | None = None) -> None:
        """Say that no more chunks come, because of `error` if it is given."""
        if not self._is_ended:
            self._error = error
            self._is_ended = True

    def leave(self) -> None:
        """Say that the caller takes no more chunks."""
        self._has_left = True
        self._chunks.clear()
        self._error = None
        self._make_room()
        wake_all(self.news())  # another thread may have closed the stream of one that waits
        if self.source is not None:
            self.source.step()  # closes the generator

    def news(self) -> list[Ticket]:
        """Return the ticket to wake after a change, if the caller waits: maybe for the next one, if it was faster."""
        waiting = self._waiting
        if waiting is None:
            return []
        waiting.resolve(None)
        return [waiting]

    def wait(self) -> Ticket | None:
        """Return a ticket that ends when there is a chunk or the end; None if there is one now."""
        if self._has_news():
            return None
        if self.source is not None:
            self.source.step()
            return None
        self._waiting = waiting = Ticket(self._clock)
        return None if self._has_news() else waiting

    def _has_news(self) -> bool:
        return bool(self._chunks) or self._is_ended or self._has_left

    def take(self) -> Any:
        """Return the next chunk, `END` after the last one; raise the error that ended the stream, once."""
        self._waiting = None
        if self._chunks:
            chunk = self._chunks.popleft()
            self._make_room()
            return chunk
        error, self._error = self._error, None
        if error is None:
            return END
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame


class _Steps:
    """A generator, step by step in the modes and the context variables with which it was made."""

    def __init__(self, generator: Any) -> None:
        self._generator, self._mode, self._context = generator, StepMode(), copy_context()

    def next(self, is_wanted: Callable[[], bool]) -> Any:
        """Return the next chunk, `END` after the last one."""
        return self._context.run(self._mode.run, next, self._generator, END)

    def close(self) -> None:
        """Close the generator."""
        self._context.run(self._mode.run, self._generator.close)


class _AsyncSteps:
    """An asynchronous generator, step by step in its loop, in the modes and the context variables with which it was made."""

    def __init__(self, generator: Any, thread: LoopThread) -> None:
        self._generator, self._thread = generator, thread
        self._mode, self._context = StepMode(), copy_context()

    def next(self, is_wanted: Callable[[], bool]) -> Any:
        """Return the next chunk, `END` after the last one; cancel the generator if the chunk is not wanted any more."""
        return self._thread.run(self._next, self._mode, self._context, is_wanted)

    async def _next(self) -> Any:
        async for chunk in self._generator:
            return chunk
        return END

    def close(self) -> None:
        """Close the generator."""
        self._thread.run(self._generator.aclose, self._mode, self._context)


class StreamingFunction:
    """A function that yields as one that returns its generator, begun, and the first chunk."""

    def __init__(self, f: Callable[..., Any], async_function: AsyncFunction | None) -> None:
        self._f, self._async_function = f, async_function

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        generator = self._f(*args, **kwargs)
        asynchronous = self._async_function
        steps = _Steps(generator) if asynchronous is None else _AsyncSteps(generator, asynchronous.thread())
        return steps, steps.next(lambda: True)


class StreamRunner(Runner):
    """Runs the batches of a function that yields: the first chunk answers the calls, the others are the batch's `rest`."""

    def _results(self, batch: Batch, tasks: list[Any], output: FunctionOutput) -> list[Any]:
        steps, first = output.output
        if first is END:
            padding = output.size - output.offsets[-1]
            whole = BatchResult(batch, output.offsets, padding, [[END] * len(tasks)], trees.only, ())
            whole.ended = self.clock.now()
            return [CallResult(whole, i, None) for i in range(len(tasks))]
        output.output = first
        answers = Runner._results(self, batch, tasks, output)
        if isinstance(answers[0], Exception):
            _close(steps)
        else:
            if batch.rest is None:
                batch.rest = Rest(self, batch)
            batch.rest.groups.append(Group(batch.rest, tasks, output, steps))
        return answers

    def cancel(self, why: Exception) -> None:
        """End the streams that run, at once for their callers: a generator may never yield again."""
        super().cancel(why)
        for rest in list(_running):
            if rest.runner is self:
                for group in list(rest.groups):
                    group.end_feeds(why)

    def _torch_backward(self, *_: Any) -> None:
        """Return None: a stream has no gradients."""


class Group:
    """The calls of one run of the function, whose generator yields their chunks."""

    def __init__(self, rest: Rest, tasks: list[Any], output: FunctionOutput, steps: Any) -> None:
        self._rest, self._tasks, self._output, self._steps = rest, tasks, output, steps
        self.feeds: list[Feed] = [task.owner.feed for task in tasks]

    def step(self) -> None:
        """Take the next chunk and give each caller its rows of it; end if there is none, or nobody wants one."""
        error, parts = self._rest.runner.why_closed, None
        try:
            check_exit()
            if self._is_wanted():
                chunk = self._steps.next(self._is_wanted)
                parts = None if chunk is END else self._parts(chunk)
        except BaseException as problem:
            error = self._rest.runner.why_closed or as_exception(problem)
        try:
            if parts is None:
                self.end(error)
            else:
                self._give(parts)
        finally:
            del error  # its traceback refers to this frame

    def _is_wanted(self) -> bool:
        return self._rest.runner.why_closed is None and any(feed.is_wanted for feed in self.feeds)

    def _parts(self, chunk: Any) -> Sequence[CallResult]:
        """Return each caller's part of a chunk."""
        first = self._output
        output = FunctionOutput(chunk, (), first.offsets, first.size, None, first.layout)
        output.stream = first.stream
        with in_jax_mode(self._tasks[0].owner.key.jax_mode):
            answers = Runner._results(self._rest.runner, self._rest.batch, self._tasks, output)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers

    def _give(self, parts: Sequence[CallResult]) -> None:
        """Give each caller its part of a chunk, those for whom many chunks wait last."""
        full = [feed.is_full for feed in self.feeds]
        self._put([i for i, is_full in enumerate(full) if not is_full], parts)
        if any(full):
            late = [i for i, is_full in enumerate(full) if is_full]
            self._wait_for_room([self.feeds[i] for i in late])
            self._put(late, parts)

    def _put(self, places: list[int], parts: Sequence[CallResult]) -> None:
        woken: list[Ticket] = []
        for i in places:
            feed = self.feeds[i]
            if feed.is_wanted:
                if not feed.put(_alone(self._rest.batch, parts[i])):
                    self._tasks[i].owner.context.counters.count("failed")
                woken += feed.news()
        wake_and_wait(woken, self._rest.runner.clock)

    @staticmethod
    def _wait_for_room(feeds: list[Feed]) -> None:
        """Wait until callers take a chunk: one that waits for the interpreter lock, while chunks come fast, is not slow."""
        started = monotonic()
        until = started + max(feed.patience for feed in feeds)
        for feed in feeds:
            feed.wait_for_room(until)
        for feed in feeds:
            feed.patience -= monotonic() - started

    def end(self, error: Exception | None = None) -> None:
        """End the streams of all callers, with copies of `error` if it is given, and close the generator."""
        if self._rest.groups == [self]:
            self._rest.count()
        self.end_feeds(error)
        self._rest.leave(self)
        _close(self._steps)

    def end_feeds(self, error: Exception | None) -> None:
        """End the streams of all callers, with copies of `error` if it is given."""
        woken: list[Ticket] = []
        for task, feed in zip(self._tasks, self.feeds, strict=True):
            if feed.is_wanted:
                if error is not None:
                    self._rest.batch.error = error
                    task.owner.context.counters.count("failed")
                feed.end(None if error is None else own_copy(error))
                woken += feed.news()
            feed.source = None
        wake_all(woken)


class Rest:
    """What is left of a batch once its calls have their first chunk. A batch that was run in parts has several groups."""

    def __init__(self, runner: StreamRunner, batch: Batch) -> None:
        self.runner, self.batch = runner, batch
        self.groups: list[Group] = []
        self.is_counted = False
        _running.add(self)

    def go_on(self, done: list[Ticket], leave: Callable[[Ticket], object], is_inside: bool) -> list[Ticket]:
        """Wake the callers, which have their first chunk, and go on with the others; return the calls to wake later: none.

        `leave` tells the dispatcher that they wait no more. If this thread is a caller's (`is_inside`), they go on by themselves.
        """
        for call in done:
            leave(call)
        wake_all(done)
        if is_inside:
            self.pull()
        else:
            self.run()
        self.batch.rest = None  # it refers to its batch
        return []

    def run(self) -> None:
        """Go on until all generators have ended, one chunk of each in turn."""
        try:
            while self.groups:
                for group in list(self.groups):
                    group.step()
        finally:
            self.abort()

    def abort(self) -> None:
        """End the streams that have not ended: their thread has."""
        for group in list(self.groups):
            group.end(CancelledError("the thread of this batch was ended"))

    def pull(self) -> None:
        """Let each caller take its further chunks in its own thread: there is no worker. Callers in a group get them now."""
        _running.discard(self)  # a forked child has a copy that goes on
        for group in list(self.groups):
            if len(group.feeds) == 1:
                group.feeds[0].source = group
            while group in self.groups and group.feeds[0].source is None:
                group.step()

    def leave(self, group: Group) -> None:
        """Remove a group that has ended."""
        if group in self.groups:
            self.groups.remove(group)
            if not self.groups:
                _running.discard(self)
                self.count()

    def count(self) -> None:
        """Count the run of the batch, once: its callers may ask for statistics as soon as they know that it has ended."""
        if not self.is_counted:
            self.is_counted = True
            self.runner.counters.stream_ran(self.runner.clock.now() - self.batch.started)


def _alone(batch: Batch, part: CallResult) -> CallResult:
    """Return a caller's part of a chunk without those of the others: it may be kept for long."""
    whole, i = part.batch, part.index
    parts: list[Sequence[Any]] = [[x] for x in part.leaves()]
    offsets = [whole.offsets[i], whole.offsets[-1]]
    own = BatchResult(batch, offsets, whole.padding, parts, whole.build, whole.array_places, whole.item_places)
    own.ended, own.stream = whole.ended, whole.stream
    own.ragged = None if whole.ragged is None else {at: [splits[i]] for at, splits in whole.ragged.items()}
    return CallResult(own, 0, None)


def _close(steps: Any) -> None:
    """Close a generator, whatever it raises."""
    try:
        steps.close()
    except BaseException as error:
        logging.getLogger("weft").debug("a generator failed when it was closed", exc_info=as_exception(error))


_running: weakref.WeakSet[Rest] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """End the streams of the parent: their workers do not exist in this process."""
    for rest in list(_running):
        for group in rest.groups:
            for feed in group.feeds:
                feed.end(CancelledError("the stream is that of the parent process: start another one in this process"))
    _running.clear()


on_fork_in_child(_after_fork_in_child)
