"""Async functions behind a batcher: one thread with an event loop runs their coroutines, and the worker of each batch waits."""

from __future__ import annotations

import asyncio
import logging
import sys
import weakref
from _thread import get_ident
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from importlib import import_module
from typing import Any

from ..core import adapters
from ..core.clock import MonotonicClock
from ..core.fork import on_fork_in_child
from ..core.ticket import Ticket, innermost_call
from ..errors import CancelledError, FailedPreconditionError, UnavailableError
from . import exits
from .modes import jax_mode, torch_mode
from .workers import Thread

#: How long, in seconds, the end of a loop waits for the tasks that it has cancelled.
SECONDS_TO_END = 1.0

_clock = MonotonicClock()  # coroutines run in real time, whatever clock the batcher has


class StepMode:
    """This thread's modes of PyTorch and JAX, for the steps of a coroutine or generator, between which others run.

    The modes are those of the thread that makes this object: gradients, autocast, the stream on an accelerator, 64-bit numbers.
    """

    def __init__(self) -> None:
        self._torch, self._jax = torch_mode(), jax_mode()  # None for a library that is not loaded
        self._stream = None if self._torch is None else _current_stream()

    @property
    def is_known(self) -> bool:
        """Whether there are modes."""
        return self._torch is not None or self._jax is not None

    @property
    def has_torch(self) -> bool:
        """Whether PyTorch is loaded."""
        return self._torch is not None

    @property
    def is_movable(self) -> bool:
        """Whether another thread can be in these modes."""
        return self._jax is None or bool(self._jax.is_movable)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Return `step(*args)`, run in the modes; modes that the step leaves behind are those of the next step alone."""
        if self._jax is None:
            return self._run_in_torch(step, *args)
        with self._jax.use():
            try:
                return self._run_in_torch(step, *args)
            finally:
                self._jax = jax_mode()

    def _run_in_torch(self, step: Callable[..., Any], *args: Any) -> Any:
        if self._torch is None:
            return step(*args)
        torch = adapters.of("torch", __package__)
        with torch.use_mode(self._torch), torch.use_stream(self._stream):
            try:
                return step(*args)
            finally:
                self._torch = torch.current_mode()


def _current_stream() -> Any:
    """Return PyTorch's current stream on the current CUDA device, None if CUDA is not in use."""
    cuda = sys.modules["torch"].cuda
    return cuda.current_stream() if cuda.is_initialized() else None


class _Stepped(Coroutine[Any, Any, Any]):
    """A coroutine whose steps run in modes of PyTorch and JAX."""

    def __init__(self, coroutine: Any, mode: StepMode) -> None:
        self._coroutine, self._mode = coroutine, mode
        self.__qualname__ = getattr(coroutine, "__qualname__", type(coroutine).__name__)  # for the names of tasks

    def send(self, value: Any) -> Any:
        return self._mode.run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._mode.run(self._coroutine.throw, *error)

    def close(self) -> None:
        self._mode.run(self._coroutine.close)

    def __await__(self) -> Any:
        raise RuntimeError("only a task runs this coroutine")


class _Waiting(Ticket):
    """What a worker waits on while a coroutine runs."""

    def __init__(self, thread: LoopThread, is_wanted: Callable[[], bool]) -> None:
        super().__init__(_clock)
        self._thread, self._is_wanted = thread, is_wanted
        self.task: asyncio.Task[Any] | None = None
        self.is_cancelled = False

    def on_alarm(self) -> None:
        if self._thread.has_ended:  # something has killed it
            self.reject(CancelledError("the event loop of this batch has ended"))
        elif not self._is_wanted():
            self._thread.soon(self.cancel)

    def cancel(self) -> None:
        """Cancel the coroutine; runs in the loop."""
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()

    def end(self, task: asyncio.Task[Any]) -> None:
        """Take the outcome of the task; runs in the loop."""
        self.task = None
        if task.cancelled():
            self.reject(self._why_cancelled(task))
        elif (error := task.exception()) is not None:
            self.reject(error)
        else:
            self.resolve(task.result())
        self.wake()

    def _why_cancelled(self, task: asyncio.Task[Any]) -> BaseException:
        """Return the error of a task that was cancelled: from here, or because the coroutine raised asyncio's CancelledError."""
        if not (self.is_cancelled or self._thread.is_ending):
            try:
                task.result()
            except asyncio.CancelledError as error:
                return error
        return CancelledError("the coroutine of this batch was cancelled")


class LoopThread:
    """A thread with an event loop. Calls from this thread count as calls from inside the batches that it runs."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(_make_task)
        self.ident = 0
        self._has_ended = False
        self._ends: list[_End] = []  # wait for the end
        self._thread = Thread(target=self._run, name=f"weft {name} loop", daemon=True)
        self._mark = Ticket(_clock)
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio itself refers weakly to them
        self.is_ending = False

    def start(self) -> None:
        """Start the thread."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self.loop.close()
            raise UnavailableError(f"there is no thread for the event loop of this batcher: {error}") from error
        exits.closing.add(self)

    @property
    def has_ended(self) -> bool:
        """Whether the thread runs no more."""
        return self._has_ended or not (self._thread.is_alive() or self._thread.ident is None)

    def run(
        self,
        call: Callable[[], Awaitable[Any]],
        mode: StepMode,
        context: Context,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Any:
        """Return what the awaitable `call()` gives; it runs in the loop, in `mode` and `context`, and this thread waits.

        It is cancelled about a second after `is_wanted()` is False.
        """
        if get_ident() == self.ident:
            raise FailedPreconditionError(
                "an async function cannot call its own batcher: its event loop would wait for itself; await the function itself"
            )
        mark = innermost_call()
        if mark is not None:
            self._mark.dispatcher = mark.dispatcher
        waiting = _Waiting(self, is_wanted)
        try:
            self.soon(self._begin, waiting, call, mode, context)
            return waiting.wait()
        except BaseException:
            if not waiting.done:
                with suppress(CancelledError):
                    self.soon(waiting.cancel)
            raise

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            raise CancelledError("the event loop of this batch has ended") from None

    def _begin(self, waiting: _Waiting, call: Callable[[], Awaitable[Any]], mode: StepMode, context: Context) -> None:
        if not waiting.is_cancelled:
            if mode.has_torch:  # this thread takes over the number that another thread has set, as in `Runner`
                sys.modules["torch"].get_num_threads()
            waiting.task = task = asyncio.Task(_Stepped(_await(call), mode), loop=self.loop, context=context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(waiting.end)

    def close(self, error: Exception) -> None:
        """Cancel what runs, and end the thread: the interpreter ends."""
        self.end()

    def end(self) -> Ticket:
        """Cancel what runs, and end the thread; return a ticket that is resolved when it has ended, or takes too long."""
        self.is_ending = True
        waiting = _End(self)
        self._ends.append(waiting)  # first: the thread looks at the list after it has set `_has_ended`
        if self.has_ended:
            waiting.resolve(None)
        else:
            with suppress(CancelledError):
                self.soon(self.loop.stop)
        return waiting

    def _run(self) -> None:
        """Run the loop until `end`; the body of the thread."""
        self.ident = get_ident()
        self._mark.begin_inside()
        asyncio.set_event_loop(self.loop)
        try:
            while not self.is_ending:
                try:
                    self.loop.run_forever()
                except BaseException as problem:  # a task has raised SystemExit or KeyboardInterrupt
                    logging.getLogger("weft").debug("a task of an async function ended the loop", exc_info=problem)
            self.loop.run_until_complete(_cancel_all())
        finally:
            self._mark.end_inside()
            self.loop.close()
            self._has_ended = True
            for waiting in self._ends:
                waiting.resolve(None)
                waiting.wake()


class _End(Ticket):
    """Waits until a thread with a loop has ended, for a limited time."""

    def __init__(self, thread: LoopThread) -> None:
        super().__init__(_clock)
        self._thread = thread
        self.alarm = _clock.now() + 2 * SECONDS_TO_END

    def on_alarm(self) -> None:
        if self._thread.has_ended or self.clock.now() >= self.alarm:
            self.resolve(None)


async def _await(call: Callable[[], Awaitable[Any]]) -> Any:
    return await call()


async def _cancel_all() -> None:
    """Cancel all other tasks of this loop, and wait for them and for asynchronous generators, for a limited time."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    tasks.add(asyncio.ensure_future(asyncio.get_running_loop().shutdown_asyncgens()))
    await asyncio.wait(tasks, timeout=SECONDS_TO_END)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
    """Make a task of a coroutine that runs in the modes of PyTorch and JAX of the step that makes it."""
    mode = StepMode()
    return asyncio.Task(_Stepped(coroutine, mode) if mode.is_known else coroutine, loop=loop, **more)


class AsyncFunction:
    """An async function as one that returns its result at once. All its coroutines run in one event loop, until `end`."""

    def __init__(self, f: Callable[..., Awaitable[Any]], name: str) -> None:
        self._f, self._name = f, name
        self._threads: dict[str, LoopThread] = {}  # has one entry or none
        _functions.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "jax" in sys.modules and import_module("weft.core.jax_internals").is_tracing():
            raise FailedPreconditionError(
                "JAX cannot differentiate an async function, whose steps run in another thread: pass a function as vjp, or batch "
                "a plain function"
            )
        mode = StepMode()
        if not mode.is_movable:
            raise FailedPreconditionError(
                "an async function runs in the thread of its event loop, which cannot be in this thread's context of JAX (a mesh, "
                "or one that jax.make_user_context made): enter it inside the function, or batch a plain function"
            )
        return self.thread().run(partial(self._f, *args, **kwargs), mode, copy_context())

    def thread(self) -> LoopThread:
        """Return the thread with the loop; it is made if there is none."""
        found = self._threads.get("loop")
        if found is not None and not found.has_ended:
            return found
        if found is not None and self._threads.get("loop") is found:
            self._threads.pop("loop", None)
        made = LoopThread(self._name)
        found = self._threads.setdefault("loop", made)  # atomic: if two threads make one, both get the first
        if found is made:
            try:
                made.start()
            except BaseException:
                self._threads.pop("loop", None)
                raise
            weakref.finalize(self, made.end).atexit = False
        else:
            made.loop.close()
        return found

    def end(self) -> Ticket:
        """End the loop, if there is one; return a ticket that is resolved when it has ended."""
        found = self._threads.pop("loop", None)
        if found is not None:
            return found.end()
        ended = Ticket(_clock)
        ended.resolve(None)
        return ended


_functions: weakref.WeakSet[AsyncFunction] = weakref.WeakSet()
_parents: list[dict[str, LoopThread]] = []


def _after_fork_in_child() -> None:
    """Forget the loops without closing them: parent and child share the selector, and closing would stop the parent's."""
    for function in list(_functions):
        _parents.append(function._threads)
        function._threads = {}


on_fork_in_child(_after_fork_in_child)
