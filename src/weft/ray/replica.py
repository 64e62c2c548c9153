"""A replica: a model behind a `weft.batched` batcher, which answers the calls and gradients of many processes.

Calls of all connections share batches. A result with gradients is kept under an invocation id, until its gradient comes, its
caller drops it or leaves, or its lease ends. Everything but the batches themselves runs in the server's event loop.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from ..batching import results, trees
from ..batching.decorator import batched
from ..batching.gradient import this_thread
from ..batching.options import in_seconds
from ..batching.tasks import TaskWaiter
from ..errors import CancelledError, FailedPreconditionError, NotFoundError, ResourceExhaustedError
from . import values
from .batch_time import BatchTime
from .frames import (
    GRAD,
    INFERENCE,
    RECEIPT,
    STREAM,
    VJP,
    BackwardMessage,
    CallMessage,
    DoneMessage,
    Frame,
    Kind,
    Load,
    ResultMessage,
)
from .gate import Gate
from .handshake import Secret
from .server import Connection, Server, find_method
from .stepping import Step
from .values import decoder_of, encoder
from .versioned import vjp_with_version, with_version

_call = decoder_of(CallMessage)
_backward = decoder_of(BackwardMessage)
_drop = decoder_of(list[tuple[int, int]])

#: So many results are kept for one connection.
MOST_KEPT = 1 << 16


@dataclass(slots=True)
class Kept:
    """A result that a gradient may come for."""

    version: int
    rows: int
    expires: float
    outputs: list[Any]  # tensors that PyTorch recorded
    inputs: list[Any]  # tensors that need a gradient
    pull_back: Any  # of a call by `vjp`
    arrays: int  # of the result of such a call


class Replica:
    """Answers the frames of a replica's server."""

    def __init__(self, model: Callable[..., Any], options: dict[str, Any], result_lease: float) -> None:
        self._lease = result_lease
        self.version = 0
        self.weights: Any = None
        if "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module):
            from .weights import ModuleWeights

            self.weights = ModuleWeights(model)
        options = dict(options)
        if options.get("vjp") is not None:
            options["vjp"] = vjp_with_version(self, options["vjp"])
        options.setdefault("name", getattr(model, "__qualname__", type(model).__name__))
        self._filled = 0  # rows of the last batch
        self._time = BatchTime()
        self.rows = 0  # of all batches since the last step
        self._counting = threading.Lock()
        self.gate = Gate()
        self.batcher: Any = batched(with_version(self, model), **options)
        self.batcher._policy.elsewhere = True  # the event loop must not run a batch's backward
        self._aio: Any = self.batcher.aio
        self._arrived: list[tuple[Connection, Frame, CallMessage, Any]] = []  # calls of this turn of the loop
        self._invocations = count(1)
        # Gradients handed in, by the backwards of their batches, and the tasks that wait for these.
        self._ending: dict[tuple[Any, ...], list[tuple[Connection, int, Kept]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.step: Step | None = None  # under way
        self._closing: Exception | None = None
        self.held_rows = 0  # whose gradients the parameters hold
        self._listeners: list[Connection] = []  # told of `held_rows`: the keeper
        self.on_orphaned: Callable[[], object] = lambda: None  # called when the keeper is gone
        self.server: Server

    def serve(self, secret: Secret, host: str) -> Server:
        """Start to answer."""
        self.server = Server(self, secret, host)
        self.server.loop.call_soon_threadsafe(self._sweep)
        return self.server

    def running(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunningBatch:
        """Return a context manager for the time in which a batch runs, inside the gate."""
        first: Any = args[0] if args else next(iter(kwargs.values()), None)
        try:
            rows = len(first)
        except TypeError:  # such as an array without axes, which all calls share
            rows = 1
        return RunningBatch(self, rows)

    def batch_begins(self, rows: int) -> None:
        """Note how full a batch is that runs now."""
        self._filled = rows
        with self._counting:
            self.rows += rows

    def batch_ends(self, rows: int, seconds: float) -> None:
        """Note how long a batch took that did not fail."""
        with self._counting:
            self._time.add(rows, seconds, time.monotonic())

    def load(self) -> Load:
        scheduler, taken = self.batcher._dispatcher.scheduler, self._time
        waiting = int(scheduler.waiting_rows)
        return Load(self.version, waiting, scheduler.running, self._filled, taken.base, taken.per_row)

    # --- calls ---

    def handle(self, connection: Connection, frame: Frame) -> None:
        if frame.kind == Kind.CALL:
            call: CallMessage = _call.decode(frame.message)
            if not self._arrived:
                self.server.loop.call_soon(self._start_calls)
            self._arrived.append((connection, frame, call, _mode(call)))
        elif frame.kind == Kind.BACKWARD:
            self._hand_in(connection, frame)
        else:
            for invocation, number in _drop.decode(frame.message):
                connection.kept.pop(invocation, None)
                task = connection.tasks.get(number)
                if task is not None:
                    task.cancel()

    def _start_calls(self) -> None:
        """Start the calls that all connections have sent in one turn of the loop: together they make fuller batches."""
        arrived, self._arrived = self._arrived, []
        for connection, frame, call, mode in arrived:
            if connection not in self.server.connections:
                continue
            forward = self._forward_stream if call.flags & STREAM else self._forward
            try:
                connection.start(frame.number, forward(connection, frame.number, call, frame.arrays), mode)
            except Exception as error:  # of a mode
                connection.send_error(frame.number, error)

    async def _forward(self, connection: Connection, number: int, call: CallMessage, body: Any) -> None:
        message: ResultMessage | None = None
        try:
            message, buffers = await self._result(connection, call, body)
            connection.send(Kind.RESULT, number, encoder.encode(message), buffers)
        except Exception as error:
            if message is not None:
                connection.kept.pop(message.invocation, None)
            connection.send_error(number, error)

    async def _forward_stream(self, connection: Connection, number: int, call: CallMessage, body: Any) -> None:
        """Send the parts of a stream as they come; while the client does not read, the batcher keeps them."""
        stream: Any = None
        try:
            if self._closing is not None:
                raise self._closing
            args, kwargs = _arguments(call, values.unpack_arrays(call.arrays, body))
            options = {"deadline": call.deadline, "priority": call.priority, "caller": call.caller}
            stream = self._aio.stream(*args, **options, **kwargs)
            async for result, version in stream:
                outputs: list[Any] = []
                tree = values.pack_tree(result, outputs)
                specs, buffers = values.pack_arrays(outputs)
                message = ResultMessage(version, self.load(), tree, specs)
                connection.send(Kind.CHUNK, number, encoder.encode(message), buffers)
                while connection.is_paused:
                    await asyncio.sleep(0.002)
            connection.send(Kind.DONE, number, encoder.encode(DoneMessage(self.load())))
        except Exception as error:
            connection.send_error(number, error)
        finally:
            if stream is not None:
                await stream.aclose()

    async def _result(
        self, connection: Connection, call: CallMessage, body: Any
    ) -> tuple[ResultMessage, list[memoryview]]:
        if self._closing is not None:
            raise self._closing
        if len(connection.kept) >= MOST_KEPT:
            raise ResourceExhaustedError(
                f"{MOST_KEPT} results of this process wait for their gradients: call backward() or delete them, or call under "
                "torch.no_grad()"
            )
        arrays = values.unpack_arrays(call.arrays, body)
        inputs = []
        if call.flags & GRAD:
            inputs = [x.requires_grad_() for x, spec in zip(arrays, call.arrays, strict=True) if spec[3]]
        args, kwargs = _arguments(call, arrays)
        (result, version), receipt, pull_back = await self._run(call, args, kwargs)
        outputs: list[Any] = []
        tree = values.pack_tree(result, outputs)
        specs, buffers = values.pack_arrays(outputs)
        invocation = 0
        recorded = [x for x, spec in zip(outputs, specs, strict=True) if spec is not None and spec[3]]
        if recorded or pull_back is not None:
            rows = arrays[0].shape[0] if arrays and arrays[0].shape else 1
            leaves = () if pull_back is None else results.flatten_values(result)[0]
            count_of_arrays = sum(map(trees.is_array, leaves))
            expires = self.server.loop.time() + self._lease
            invocation = next(self._invocations)
            connection.kept[invocation] = Kept(version, rows, expires, recorded, inputs, pull_back, count_of_arrays)
        return ResultMessage(version, self.load(), tree, specs, invocation, receipt), buffers

    async def _run(self, call: CallMessage, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return the result of a call, its receipt and its pull-back."""
        aio = self._aio
        if call.flags & VJP:
            if self.batcher._has_vjp:
                result, pull_back = await aio.vjp(*args, **kwargs)
                return result, None, pull_back
        elif not (call.flags & RECEIPT or call.deadline or call.priority or call.caller):
            return await aio(*args, **kwargs), None, None
        wants = bool(call.flags & RECEIPT)
        result = await aio.call(
            *args, deadline=call.deadline, priority=call.priority, caller=call.caller, receipt=wants, **kwargs
        )
        return (result[0], list(result[1]), None) if wants else (result, None, None)

    # --- gradients ---

    def _hand_in(self, connection: Connection, frame: Frame) -> None:
        """Hand in the gradients of a kept result; the answer goes out when its batch has gone back."""
        try:
            message: BackwardMessage = _backward.decode(frame.message)
            kept = self._find(connection, message)
            step = self.step
            if step is not None and not step.waits_for(kept):
                step.held.append((connection, frame))
                return
            connection.kept.pop(message.invocation)
            gradients = values.unpack_arrays(message.arrays, frame.arrays)
            if kept.pull_back is not None:
                gradient = values.unpack_tree(message.tree, gradients)
                connection.start(frame.number, self._pull_back(connection, frame.number, kept, gradient))
                return
            backwards = self._deposit(kept, gradients)
        except Exception as error:
            connection.send_error(frame.number, error)
            return
        waiting = self._ending.get(backwards)
        if waiting is None:
            waiting = self._ending[backwards] = []
            self._tasks.add(task := self.server.loop.create_task(self._end(backwards, waiting)))
            task.add_done_callback(self._tasks.discard)
        waiting.append((connection, frame.number, kept))

    def _find(self, connection: Connection, message: BackwardMessage) -> Kept:
        if message.version != self.version:
            connection.kept.pop(message.invocation, None)
            raise stale(message.version, self.version)
        kept = connection.kept.get(message.invocation)
        if kept is None:
            raise NotFoundError(
                f"there is no result {message.invocation} to go back from: a batch goes back once, and a result is kept for "
                f"result_lease = {self._lease:g} s"
            )
        return kept

    @staticmethod
    def _deposit(kept: Kept, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Hand a result's gradients in to its batches; return the batches' backwards."""
        from ..batching.torch_graph import tickets_of

        torch = sys.modules["torch"]
        pairs = [(y, g) for y, g in zip(kept.outputs, gradients, strict=True) if g is not None]
        for y, g in pairs:
            if y.shape != g.shape:
                raise FailedPreconditionError(
                    f"a gradient must have the shape of its result, {list(y.shape)}, got {list(g.shape)}"
                )
        backwards = tuple(ticket.backward for ticket in tickets_of([y for y, _ in pairs]))
        try:
            torch.autograd.backward([y for y, _ in pairs], [g.to(y.dtype) for y, g in pairs])
        finally:
            this_thread().failure = None  # all callers share this thread: one's failure is no reason of another's
            kept.outputs = []
        return backwards

    async def _end(self, backwards: tuple[Any, ...], waiting: list[tuple[Connection, int, Kept]]) -> None:
        """Answer the callers of a batch when it has gone back."""
        problem: Exception | None = None
        for backward in backwards:
            watch = backward.watch()
            try:
                await TaskWaiter(watch)
                watch.outcome()
            except Exception as error:
                problem = error
        self._ending.pop(backwards, None)
        if problem is None:
            self.hold(self.held_rows + sum(kept.rows for _, _, kept in waiting))
        for connection, number, kept in waiting:
            if problem is not None:
                connection.send_error(number, problem)
                continue
            try:
                specs, buffers = values.pack_arrays([x.grad for x in kept.inputs])
                connection.send(Kind.DONE, number, encoder.encode(DoneMessage(self.load(), specs)), buffers)
            except Exception as error:
                connection.send_error(number, error)

    async def _pull_back(self, connection: Connection, number: int, kept: Kept, gradient: Any) -> None:
        try:
            # A gradient has the arrays of the result, or all of its leaves: then the version is one more.
            leaves = (trees if isinstance(gradient, list) else results).flatten(gradient)[0]
            found = await kept.pull_back(gradient if len(leaves) == kept.arrays else (gradient, None))
            self.hold(self.held_rows + kept.rows)
            arrays: list[Any] = []
            tree = values.pack_tree(found, arrays)
            specs, buffers = values.pack_arrays(arrays)
            connection.send(Kind.DONE, number, encoder.encode(DoneMessage(self.load(), specs, tree)), buffers)
        except Exception as error:
            connection.send_error(number, error)
        finally:
            this_thread().failure = None  # as in `_deposit`

    def hold(self, rows: int) -> None:
        """Note of how many rows the parameters hold the gradients now, and tell the keeper before their callers."""
        self.held_rows = rows
        self.server.notify(["held", rows, self.version], self._listeners)
        for listener in self._listeners:
            listener.flush()

    def closed(self, connection: Connection) -> None:
        connection.kept.clear()
        if connection in self._listeners:
            self._listeners.remove(connection)
            if self.step is not None and self.step.connection is connection:
                self.step.end(None)
            if self._closing is None:
                self.on_orphaned()

    def _sweep(self) -> None:
        """Drop results whose lease has ended, now and then."""
        now = self.server.loop.time()
        for connection in self.server.connections:
            for invocation in [i for i, kept in connection.kept.items() if kept.expires <= now]:
                del connection.kept[invocation]
        self.server.loop.call_later(max(0.05, min(self._lease / 4, 10.0)), self._sweep)

    # --- the keeper's requests ---

    async def ask(self, connection: Connection, method: str, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        return await find_method(self, method)(connection, given, arrays)

    async def ask_listen(self, connection: Connection, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Tell this connection how many rows' gradients the parameters hold, from now on."""
        self._listeners.append(connection)
        return self.held_rows, []

    async def ask_state(self, connection: Connection, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Return the weights and their description."""
        return (None, []) if self.weights is None else (self.weights.description(), self.weights.state())

    async def ask_statistics(self, connection: Connection, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Return the batcher's figures."""
        return asdict(self.batcher.statistics(**given)), []

    async def ask_check_update(self, connection: Connection, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Refuse options that `update` would refuse."""
        self.batcher.options.changed(given)
        return None, []

    async def ask_update(self, connection: Connection, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Change options of the batcher, and tell the clients."""
        self.batcher.update(**in_seconds(given))
        self.server.notify(["updated", {**given, "max_batch_size": self.batcher.options.max_batch_size}])
        return None, []

    async def ask_prepare(self, connection: Connection, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """First half of a step."""
        if self.step is not None:
            raise FailedPreconditionError("another step is under way")
        self.step = Step(self, connection, given)
        return await self.step.prepare()

    async def ask_commit(self, connection: Connection, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Second half of a step: take the new weights and their version."""
        if self.step is None or self.step.connection is not connection:
            raise FailedPreconditionError("no step is under way: it took too long and was taken back")
        self.step.commit(given, arrays)
        return given, []

    async def ask_take_back(self, connection: Connection, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """End a step without new weights; gradients stay."""
        if self.step is not None and self.step.connection is connection:
            self.step.end(None)
        return None, []

    async def ask_start(self, connection: Connection, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Take the weights and the version with which this replica begins."""
        if self.weights is not None and arrays:
            self.weights.load(arrays)
        self.version = given
        return None, []

    async def ask_close(self, connection: Connection, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Refuse new calls, and return when those that wait are answered."""
        drain, seconds, name = given
        self._closing = CancelledError(f"{name} is closed")
        self.server.hide()  # a process that is killed leaves no file
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, lambda: self.batcher.close(drain=drain, timeout=seconds))
        until = loop.time() + seconds
        while any(each.tasks for each in self.server.connections if each is not connection) and loop.time() < until:
            await asyncio.sleep(0.001)  # answers of the last batches
        self.server.notify(["closed"])
        return None, []


class RunningBatch:
    """The time in which a batch of a replica runs."""

    __slots__ = ("_began", "_replica", "_rows")

    def __init__(self, replica: Replica, rows: int) -> None:
        self._replica, self._rows = replica, rows

    def __enter__(self) -> None:
        self._replica.batch_begins(self._rows)
        self._began = time.monotonic()

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:  # one that fails at once says nothing of the others
            self._replica.batch_ends(self._rows, time.monotonic() - self._began)


def stale(made: int, now: int) -> FailedPreconditionError:
    """Return the error for a gradient of a result that older weights made."""
    return FailedPreconditionError(
        f"this result was made by the weights of version {made}, and the weights are of version {now} now: its graph is gone. "
        "Call backward() for every result before step(), or call again"
    )


def _arguments(call: CallMessage, arrays: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((arrays[0],), {}) if call.tree == values.ONE else values.unpack_tree(call.tree, arrays)


def _mode(call: CallMessage) -> Any:
    """Return PyTorch's modes of the caller as a context manager, None for a thread's own."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if call.autocast is not None:
        modes = ExitStack()
        if not call.flags & GRAD:
            modes.enter_context(torch.no_grad())
        modes.enter_context(torch.autocast("cpu", dtype=getattr(torch, call.autocast, torch.bfloat16)))
        return modes
    if call.flags & GRAD:
        return None
    return torch.inference_mode() if call.flags & INFERENCE else torch.no_grad()
