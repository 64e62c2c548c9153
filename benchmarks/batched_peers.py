"""The contestants of `benchmarks.batched`: each takes a function on whole batches and gives one that many callers call,
for as long as its block lasts.

A peer takes part where it is installed. A *floor* does the same meeting with nothing but a deque and a lock, or a future, for
each waiter: no checks, no deadlines, no keys, no isolation of errors.
"""

from __future__ import annotations

import asyncio
import os
import threading
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

import weft

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@dataclass
class Model:
    """A function on batches of rows of `width` float32, and how batches of it are to be formed."""

    f: Callable[[Any], Any]
    width: int = 16
    size: int = 64  # the most rows of a batch
    wait: float = 0.0  # seconds to wait for a full one; 0: what is there goes as soon as nothing runs
    is_torch: bool = False

    def row(self, i: int) -> Any:
        """What the caller numbered `i` hands in: one row."""
        x = np.full((1, self.width), i / 64, np.float32)
        return _torch().from_numpy(x) if self.is_torch else x

    def join(self, rows: list[Any]) -> Any:
        """Rows below each other."""
        return _torch().cat(rows) if self.is_torch else np.concatenate(rows)


def noop(x: Any) -> Any:
    """The model that does nothing."""
    return x


Once = Callable[[], Any]  # one call
Body = Callable[[int], Once]  # the caller numbered i


def _torch() -> Any:
    import torch

    return torch


# --- threads ---


def weft_batcher(model: Model) -> Any:
    options: dict[str, Any] = {"max_wait": model.wait} if model.wait else {}
    return weft.batched(model.f, max_batch_size=model.size, **options)


@contextmanager
def weft_threads(model: Model) -> Iterator[Body]:
    policy = weft_batcher(model)

    def body(i: int) -> Once:
        x = model.row(i)
        return lambda: policy(x)

    yield body


class Bare:
    """The floor: a thread takes what is in a deque, runs the function, and releases the lock of each that waits."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._queue: deque[list[Any]] = deque()
        self._some, self._full = closed_lock(), closed_lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def __call__(self, x: Any) -> Any:
        entry = [x, closed_lock(), None]
        self._queue.append(entry)
        open_lock(self._some)
        if self._model.wait and len(self._queue) >= self._model.size:
            open_lock(self._full)
        entry[1].acquire()
        return entry[2]

    def _serve(self) -> None:
        queue, size, wait = self._queue, self._model.size, self._model.wait
        while True:
            self._some.acquire()
            while queue:
                if wait and len(queue) < size:
                    self._full.acquire(timeout=wait)
                self._answer([queue.popleft() for _ in range(min(len(queue), size))])

    def _answer(self, batch: list[list[Any]]) -> None:
        if self._model.f is noop:  # nothing is joined where nothing is computed
            for entry in batch:
                entry[1].release()
            return
        y = self._model.f(self._model.join([entry[0] for entry in batch]))
        for i, entry in enumerate(batch):
            entry[2] = y[i : i + 1]
            entry[1].release()


def closed_lock() -> LockType:
    """A lock that somebody has to open."""
    lock = allocate_lock()
    lock.acquire()
    return lock


def open_lock(lock: LockType) -> None:
    """Open a lock that may be open already."""
    with suppress(RuntimeError):
        lock.release()


@contextmanager
def bare_threads(model: Model) -> Iterator[Body]:
    floor = Bare(model)

    def body(i: int) -> Once:
        x = model.row(i)
        return lambda: floor(x)

    yield body


@contextmanager
def tensorflow_threads(model: Model) -> Iterator[Body]:
    """BatchFunction; a torch model is called through tf.numpy_function."""
    import tensorflow as tf

    def through_numpy(x: Any) -> Any:
        torch = _torch()
        return model.f(torch.from_numpy(x)).numpy()

    def function(x: Any) -> Any:
        return tf.numpy_function(through_numpy, [x], tf.float32) if model.is_torch else model.f(x)

    f = tf.function(function).get_concrete_function(tf.TensorSpec([None, model.width], tf.float32))
    attributes = {
        "num_batch_threads": 1,
        "max_batch_size": model.size,
        "batch_timeout_micros": int(model.wait * 1e6),
        "max_enqueued_batches": 1000,
        "shared_name": f"model {id(model)}",
        "captured_tensors": [],
        "Tout": [tf.float32],
    }

    def body(i: int) -> Once:
        x = tf.fill((1, model.width), np.float32(i / 64))
        return lambda: tf.raw_ops.BatchFunction(in_tensors=[x], f=f, **attributes)

    yield body


def on_items(model: Model) -> Callable[[list[Any]], list[Any]]:
    """The model on a list of rows, as `batched` calls it."""

    def f(items: list[Any]) -> list[Any]:
        if model.f is noop:
            return items
        y = model.f(model.join(items))
        return [y[i : i + 1] for i in range(len(items))]

    return f


@contextmanager
def batched_threads(model: Model) -> Iterator[Body]:
    """The package `batched`. It sleeps its time-out whenever less than a batch is queued; with 0 it would poll."""
    import batched

    policy = batched.dynamically(on_items(model), batch_size=model.size, timeout_ms=model.wait * 1000 or 1.0)

    def body(i: int) -> Once:
        x = model.row(i)
        return lambda: policy(x)

    yield body


@contextmanager
def torchrl_threads(model: Model) -> Iterator[Body]:
    """TorchRL's InferenceServer, whose callers hand in one example each."""
    from tensordict import TensorDict
    from torchrl.modules.inference_server import InferenceServer

    torch = _torch()

    def f(data: Any) -> Any:
        return data.set("y", model.f(data["x"]))

    full = {"min_batch_size": model.size, "timeout": model.wait} if model.wait else {}
    server = InferenceServer(f, transport="auto", max_batch_size=model.size, **full)

    def body(i: int) -> Once:
        x, client = torch.full((model.width,), i / 64), server.client()
        return lambda: client(TensorDict({"x": x}))["y"]

    with server:
        yield body


# --- forward and backward ---


class Meeting:
    """The floor of meetings of `size` threads: whoever comes last does the work, the others sleep on a lock each."""

    def __init__(self, size: int, work: Callable[[list[list[Any]]], None]) -> None:
        self._size, self._work = size, work
        self._mutex, self._here = allocate_lock(), list[list[Any]]()

    def __call__(self, given: Any) -> Any:
        entry = [given, closed_lock(), None]
        with self._mutex:
            self._here.append(entry)
            group = self._here if len(self._here) == self._size else None
            if group is not None:
                self._here = []
        if group is None:
            entry[1].acquire()
        else:
            self._work(group)
            for other in group:
                other[1].release()
        return entry[2]


def bare_step(net: Callable[[], Any], callers: int, rows: int) -> Callable[[Any], Any]:
    """The floor of a batch that goes back: two meetings, one forward, one backward, and a node for each caller."""
    torch = _torch()
    always = torch.empty(0, requires_grad=True)

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, meet: Meeting, at: int, part: Any, _: Any) -> Any:
            ctx.meet, ctx.at = meet, at
            return part

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            ctx.meet((ctx.at, gradient))
            return None, None, None, None

    def forward(group: list[list[Any]]) -> None:
        y = net()(torch.cat([entry[0] for entry in group]))

        def back(gradients: list[list[Any]]) -> None:
            ordered = sorted((entry[0] for entry in gradients), key=lambda pair: pair[0])
            torch.autograd.backward([y], [torch.cat([gradient for _, gradient in ordered])])

        meet = Meeting(callers, back)
        for at, (entry, part) in enumerate(zip(group, y.detach().split(rows), strict=True)):
            entry[2] = (meet, at, part)

    meeting = Meeting(callers, forward)
    return lambda x: Rows.apply(*meeting(x), always)


# --- asyncio ---

Ask = Callable[[Any], Any]  # a row, to be awaited


@contextmanager
def weft_tasks(model: Model) -> Iterator[Ask]:
    yield weft_batcher(model).aio


@contextmanager
def hand_written_tasks(model: Model) -> Iterator[Ask]:
    """What people write: an asyncio.Queue, a task that collects what is there or comes in time, the model in a thread."""
    executor = ThreadPoolExecutor(1)
    queue: asyncio.Queue[Any] = asyncio.Queue()
    servers: list[asyncio.Task[None]] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await queue.get()]
            ends = loop.time() + model.wait
            with suppress(TimeoutError):
                while len(batch) < model.size:
                    if not queue.empty():
                        batch.append(queue.get_nowait())
                    elif (left := ends - loop.time()) > 0:
                        batch.append(await asyncio.wait_for(queue.get(), left))
                    else:
                        break
            y = await loop.run_in_executor(executor, model.f, model.join([x for x, _ in batch]))
            for i, (_, future) in enumerate(batch):
                if not future.done():
                    future.set_result(y[i : i + 1])

    async def ask(x: Any) -> Any:
        loop = asyncio.get_running_loop()
        if not servers:
            servers.append(loop.create_task(serve()))
        future = loop.create_future()
        queue.put_nowait((x, future))
        return await future

    yield ask


@contextmanager
def bare_tasks(model: Model, in_loop: bool = False) -> Iterator[Ask]:
    """The floor: futures in a list, answered together; a thread is asked in between, or with `in_loop` nobody."""
    executor = ThreadPoolExecutor(1)
    here: list[asyncio.Future[None]] = []

    def run(loop: asyncio.AbstractEventLoop) -> None:
        batch = here[: model.size]
        if in_loop:
            end(loop, batch)
        else:
            executor.submit(elsewhere, loop, batch)

    def elsewhere(loop: asyncio.AbstractEventLoop, batch: list[asyncio.Future[None]]) -> None:
        loop.call_soon_threadsafe(end, loop, batch)

    def end(loop: asyncio.AbstractEventLoop, batch: list[asyncio.Future[None]]) -> None:
        del here[: len(batch)]
        for future in batch:
            future.set_result(None)
        if here:
            loop.call_soon(run, loop)

    async def ask(x: Any) -> Any:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        here.append(future)
        if len(here) == 1:
            loop.call_soon(run, loop)
        return await future

    yield ask


@contextmanager
def batched_tasks(model: Model) -> Iterator[Ask]:
    import batched

    async def f(items: list[Any]) -> list[Any]:
        return on_items(model)(items)

    yield batched.aio.dynamically(f, batch_size=model.size, timeout_ms=model.wait * 1000 or 1.0)


@contextmanager
def async_batcher_tasks(model: Model) -> Iterator[Ask]:
    """The package `async-batcher`, which runs the model in a thread."""
    from async_batcher.batcher import AsyncBatcher

    f = on_items(model)

    class Batcher(AsyncBatcher):  # type: ignore[misc, type-arg]
        def process_batch(self, batch: list[Any]) -> list[Any]:
            return f(batch)

    made: list[Any] = []

    async def ask(x: Any) -> Any:
        if not made:  # it belongs to the loop in which it is made
            wait, threads = model.wait or 0.001, ThreadPoolExecutor(1)
            made.append(Batcher(max_batch_size=model.size, max_queue_time=wait, executor=threads))
        return await made[0].process(x)

    yield ask


# --- who is there ---


def installed(makers: dict[str, tuple[str, Callable[..., Any]]]) -> dict[str, Callable[..., Any]]:
    """Those whose package is installed."""
    return {name: make for name, (package, make) in makers.items() if find_spec(package) is not None}


THREADS = installed(
    {
        "weft": ("weft", weft_threads),
        "bare": ("weft", bare_threads),
        "tensorflow": ("tensorflow", tensorflow_threads),
        "torchrl": ("torchrl", torchrl_threads),
        "batched": ("batched", batched_threads),
    }
)
TASKS = installed(
    {
        "weft": ("weft", weft_tasks),
        "bare": ("weft", bare_tasks),
        "bare, in the loop": ("weft", lambda model: bare_tasks(model, in_loop=True)),
        "hand-written queue": ("weft", hand_written_tasks),
        "batched": ("batched", batched_tasks),
        "async-batcher": ("async_batcher", async_batcher_tasks),
    }
)
