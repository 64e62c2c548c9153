"""How fast are Batch, Unbatch and BatchFunction, against TensorFlow's and against the bare floor of Python's threads and futures?

    python -m benchmarks.batching [--rounds N] [--only TEXT] [--save]

TensorFlow takes part where it is installed. `bare` does the same meeting with a lock per waiter (or a future) and nothing else: no
arrays, no checks, no deadlines.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

import weft
from benchmarks.runner import Case, Load, main

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
HAS_TENSORFLOW = find_spec("tensorflow") is not None


def crowd(threads: int, calls: int, body: Callable[[int], Callable[[], None]]) -> Callable[[], Load]:
    """`threads` threads that each do `calls` calls of `body(thread)`: the time from their common start to the last end, and each
    call's own.
    """

    def run() -> Load:
        gate = threading.Barrier(threads + 1)
        latencies: list[float] = []

        def work(i: int) -> None:
            once, clock, ends = body(i), time.perf_counter, [0.0] * (calls + 1)
            gate.wait()
            ends[0] = clock()
            for at in range(calls):
                once()
                ends[at + 1] = clock()
            latencies.extend(after - before for before, after in pairwise(ends))

        crew = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for thread in crew:
            thread.start()
        gate.wait()
        started = time.perf_counter()
        for thread in crew:
            thread.join()
        return Load(time.perf_counter() - started, latencies)

    return run


# --- Batch + Unbatch ---


Body = Callable[[int], Callable[[], None]]


def op_pair(raw_ops: Any, rows_of: Callable[[int], Any], size: int, name: str) -> Body:
    """A call of Batch and one of Unbatch, by weft's or TensorFlow's raw ops."""
    attributes = {
        "num_batch_threads": 1,
        "max_batch_size": size,
        "batch_timeout_micros": 1_000_000,
        "grad_timeout_micros": 0,
        "max_enqueued_batches": 1000,
        "shared_name": name,
    }

    def body(i: int) -> Callable[[], None]:
        x = rows_of(i)

        def once() -> None:
            b = raw_ops.Batch(in_tensors=[x], **attributes)
            raw_ops.Unbatch(
                batched_tensor=b.batched_tensors[0],
                batch_index=b.batch_index,
                id=b.id,
                timeout_micros=10_000_000,
                shared_name=name,
            )

        return once

    return body


def weft_pair(threads: int, row: tuple[int, ...], size: int, name: str) -> Body:
    return op_pair(weft.raw_ops, lambda i: np.full(row, i, np.float32), size, name)


def tensorflow_pair(threads: int, row: tuple[int, ...], size: int, name: str) -> Body:
    import tensorflow as tf

    return op_pair(tf.raw_ops, lambda i: tf.fill(row, np.float32(i)), size, name)


class Bare:
    """The floor: callers meet by a lock per waiter, one of them then leaves something for each of the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mutex = threading.Lock()
        self.here: list[tuple[object, threading.Lock]] = []
        self.left: dict[object, object] = {}
        self.waiting: dict[object, threading.Lock] = {}

    def batch(self, me: object) -> list[tuple[object, threading.Lock]] | None:
        lock = threading.Lock()
        lock.acquire()
        with self.mutex:
            self.here.append((me, lock))
            group = None
            if len(self.here) == self.size:
                group, self.here = self.here, []
        if group is None:
            lock.acquire()
            return None
        for _, other in group:
            other.release()
        return group

    def unbatch(self, me: object, group: list[tuple[object, threading.Lock]] | None) -> None:
        lock = None
        with self.mutex:
            if group is None:
                if me in self.left:
                    del self.left[me]
                else:
                    lock = self.waiting[me] = threading.Lock()
                    lock.acquire()
            else:
                for other, _ in group:
                    if other is not me:
                        woken = self.waiting.pop(other, None)
                        if woken is None:
                            self.left[other] = group
                        else:
                            woken.release()
        if lock is not None:
            lock.acquire()


def bare_pair(threads: int, row: tuple[int, ...], size: int, name: str) -> Body:
    floor = Bare(size)

    def body(i: int) -> Callable[[], None]:
        def once() -> None:
            me = object()
            floor.unbatch(me, floor.batch(me))

        return once

    return body


def pair_case(
    name: str, threads: int, row: tuple[int, ...], calls: int, targets: dict[str, float], bare: bool = True
) -> Case:
    size = threads * row[0]
    makers = {"weft": weft_pair, "tensorflow": tensorflow_pair, "bare": bare_pair}
    contestants = {
        who: crowd(threads, calls, make(threads, row, threads if who == "bare" else size, name))
        for who, make in makers.items()
        if (who != "tensorflow" or HAS_TENSORFLOW) and (who != "bare" or bare)
    }
    return Case(name, contestants, units=threads * calls, unit="pairs", targets=targets)


# --- BatchFunction ---


def function_case(threads: int, calls: int, target: float) -> Case:
    name = f"BatchFunction, no-op, {threads} threads"
    attributes = {
        "num_batch_threads": 1,
        "max_batch_size": threads,
        "batch_timeout_micros": 0,
        "max_enqueued_batches": 1000,
        "shared_name": name,
        "captured_tensors": [],
    }

    def identity(x: object) -> object:
        return x

    def ours(i: int) -> Callable[[], None]:
        x = np.full((1, 16), i, np.float32)
        return lambda: weft.raw_ops.BatchFunction(in_tensors=[x], f=identity, Tout=["float32"], **attributes)  # type: ignore[arg-type]

    contestants = {"weft": crowd(threads, calls, ours)}
    if HAS_TENSORFLOW:
        import tensorflow as tf

        f = tf.function(identity).get_concrete_function(tf.TensorSpec([None, 16], tf.float32))

        def theirs(i: int) -> Callable[[], None]:
            x = tf.fill((1, 16), np.float32(i))
            return lambda: tf.raw_ops.BatchFunction(in_tensors=[x], f=f, Tout=[tf.float32], **attributes)

        contestants["tensorflow"] = crowd(threads, calls, theirs)
    return Case(name, contestants, units=threads * calls, targets={"tensorflow": target})


# --- asyncio ---


def aio_case(tasks: int = 10_000, calls: int = 10, size: int = 100) -> Case:
    async def ours(x: np.ndarray) -> None:
        for _ in range(calls):
            b = await weft.aio.Batch([x], 1, size, 1_000_000, 0, max_enqueued_batches=-1, shared_name="aio")
            await weft.aio.Unbatch(b.batched_tensors[0], b.batch_index, b.id, 10_000_000, shared_name="aio")

    here: list[asyncio.Future[None]] = []

    async def meet() -> None:
        future = asyncio.get_running_loop().create_future()
        here.append(future)
        if len(here) == size:
            group = here[:]
            here.clear()
            for other in group:
                other.set_result(None)
        await future

    async def bare(_: np.ndarray) -> None:
        for _ in range(calls):
            await meet()
            await meet()

    def run(one: Callable[[np.ndarray], object]) -> Callable[[], float]:
        async def everyone() -> float:
            rows = [np.full((1, 16), i, np.float32) for i in range(tasks)]
            started = time.perf_counter()
            await asyncio.gather(*(one(x) for x in rows))  # type: ignore[call-overload]
            return time.perf_counter() - started

        return lambda: asyncio.run(everyone())

    return Case(
        f"asyncio, {tasks:,} tasks of {calls} calls",
        {"weft": run(ours), "bare": run(bare)},
        units=tasks * calls,
        unit="pairs",
        targets={"bare": 0.5},
    )


# --- memory ---


def memory(calls: int = 1_000_000) -> str:
    """How much the process has grown after many calls: the resident size after a tenth of them, and after all."""
    once = weft_pair(1, (1, 16), 1, "memory")(0)
    sizes = []
    for share in (calls // 10, calls - calls // 10):
        for _ in range(share):
            once()
        gc.collect()
        sizes.append(resident())
    before, after = (size / 1024 for size in sizes)
    return f"after {calls // 10:,} pairs {before:.1f} MiB, after {calls:,} {after:.1f} MiB, stored: {weft.sweep()}"


def resident() -> int:
    """The resident size in KiB."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize() // 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cases() -> list[Case]:
    """All questions, with the ratios that are to be reached."""
    return [
        pair_case("Batch+Unbatch, 8 threads", 8, (1, 16), 500, {"tensorflow": 5, "bare": 0.75}),
        pair_case("Batch+Unbatch, 32 threads", 32, (1, 16), 150, {"tensorflow": 5, "bare": 0.75}),
        pair_case("Batch+Unbatch, 128 threads", 128, (1, 16), 40, {"tensorflow": 3, "bare": 0.75}),
        pair_case("Batch+Unbatch, 1 thread, max_batch_size 1", 1, (1, 16), 2000, {"tensorflow": 15}, bare=False),
        pair_case("Batch+Unbatch, 32 threads, rows of 256 KiB", 32, (1, 65536), 15, {"tensorflow": 1.5}, bare=False),
        function_case(1, 1000, 8),
        function_case(8, 400, 5),
        function_case(64, 60, 5),
        aio_case(),
    ]


if __name__ == "__main__":
    main("batching", "Batching: weft against TensorFlow 2.21 and the bare floor", cases)
    print("\nmemory:", memory())
