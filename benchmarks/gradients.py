"""What do gradients cost: an op's node against a bare one, dispatch without gradients, training steps, and the batching chain?

Each contestant measures itself in bursts, so that a thread that a framework leaves spinning is not the next one's burden. What
the two overheads are in microseconds is printed below the table: the differences of the medians.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

import weft
import weft.torch
from benchmarks.runner import Case, main
from weft import raw_ops
from weft.core.arrays import Array
from weft.core.op import Op, gradient

MINUTE = 60_000_000  # microseconds
CALLERS = 64


def burst(run: Callable[[], object], calls: int = 1000) -> float:
    """Seconds for a call, the median of ten runs of some calls in a row."""
    time.sleep(0.005)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(calls // 10):
            run()
        seconds.append((time.perf_counter() - started) / (calls // 10))
    return statistics.median(seconds)


# --- overheads ---


def _twice(x: Array, factor: float = 2.0) -> Array:
    return x * factor


twice = Op("Twice", _twice)


@gradient(twice)
def twice_gradient(g: Array, factor: float) -> dict[str, Array]:
    return {"x": g * factor}


class Bare(torch.autograd.Function):
    """The least that PyTorch asks of a function with a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, g):
        return g * 2.0


def overheads() -> list[Case]:
    """An op that does next to nothing."""
    x, plain, array = torch.ones(4, requires_grad=True), torch.ones(4), np.ones(4, np.float32)
    ones = torch.ones(4)

    def without(call: Callable[[], object]) -> float:
        with torch.no_grad():
            return burst(call, 5000)

    vectors = [torch.ones(8) for _ in range(4)]
    images, host_vectors = torch.ones(1, 2, 2, 8), [np.ones(8, np.float32) for _ in range(4)]
    return [
        Case("forward with a node", {
            "weft": lambda: burst(lambda: twice(x)),
            "bare Function": lambda: burst(lambda: Bare.apply(x)),
        }),
        Case("forward and backward", {
            "weft": lambda: burst(lambda: torch.autograd.grad(twice(x), x, ones)),
            "bare Function": lambda: burst(lambda: torch.autograd.grad(Bare.apply(x), x, ones)),
        }),
        Case("dispatch under no_grad", {
            "weft": lambda: without(lambda: twice(plain)) - without(lambda: _twice(plain)),
            "NumPy": lambda: burst(lambda: twice(array), 5000) - burst(lambda: _twice(array), 5000),
        }),
        Case("FusedBatchNormV3 of 32 numbers under no_grad", {
            "weft": lambda: without(lambda: raw_ops.FusedBatchNormV3(images, *vectors)),
            "NumPy": lambda: burst(lambda: raw_ops.FusedBatchNormV3(images.numpy(), *host_vectors), 5000),
        }),
    ]  # fmt: skip


# --- training steps ---


def network(channels: int, memory_format: torch.memory_format, ours: bool) -> torch.nn.Module:
    """Three convolutions, each with batch norm."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(3):
        layers += [torch.nn.Conv2d(channels, channels, 3, padding=1), torch.nn.BatchNorm2d(channels), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers).to(memory_format=memory_format)
    return weft.torch.convert(model) if ours else model


def training(shape: tuple[int, ...], layout: str) -> Case:
    """A step of a small network, with weft's batch norm and with torch's, in turns. What two equal networks differ by is noise."""
    memory_format = torch.channels_last if layout == "channels last" else torch.contiguous_format
    x = torch.randn(shape).to(memory_format=memory_format)
    size = x.numel() * 4 / 2**20
    steps = 5 if size < 1 else 1  # in a row

    def stepper(ours: bool) -> Callable[[], float]:
        model = network(shape[1], memory_format, ours)

        def step() -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        def timed() -> float:
            step()  # the caches then have what this network uses
            started = time.perf_counter()
            for _ in range(steps):
                step()
            return (time.perf_counter() - started) / steps

        return timed

    contestants = {"weft": stepper(True), "torch.nn.BatchNorm2d": stepper(False), "the same again": stepper(False)}
    targets = {"torch.nn.BatchNorm2d": 1.0}
    rounds = min(200, max(60, int(200 / size)))
    name = f"training step, {layout}, activations of {size:.2g} MB"
    return Case(name, contestants, unit="steps", targets=targets, rounds=rounds)


SHAPES = [(8, 16, 8, 8), (16, 32, 16, 32), (32, 32, 32, 32)]


# --- the chain ---


class Chain:
    """As many threads as callers, each with its rows, its loss and its backward."""

    def __init__(self, skips: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 16))
        self.rows = torch.randn(CALLERS, 4, 64)
        self.skips = skips

    def caller(self, i: int) -> None:
        batch = raw_ops.Batch([self.rows[i]], 1, 4 * CALLERS, MINUTE, MINUTE)
        (x,) = batch.batched_tensors
        y = self.model(x) if len(x) or not self.skips else torch.empty(0, 16)
        raw_ops.Unbatch(y, batch.batch_index, batch.id, MINUTE).square().mean().backward()

    def __call__(self) -> float:
        torch.set_num_threads(1)  # every thread that calls torch would have helpers of its own, far more than cores
        barrier = threading.Barrier(CALLERS + 1)

        def run(i: int) -> None:
            barrier.wait()
            self.caller(i)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(CALLERS)]
        for thread in threads:
            thread.start()
        started = time.perf_counter()
        barrier.wait()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started

    def alone(self, run: Callable[[], None]) -> float:
        """Seconds for a run in this thread."""
        torch.set_num_threads(1)
        return burst(run, 10)

    def by_hand(self) -> None:
        for y in self.model(self.rows.flatten(0, 1)).split(4):
            y.square().mean().backward(retain_graph=True)

    def one_backward(self) -> None:
        sum(y.square().mean() for y in self.model(self.rows.flatten(0, 1)).split(4)).backward()


def chains() -> list[Case]:
    """64 callers, 4 rows each: the gradient of the sum of their losses."""
    each, skipping = Chain(False), Chain(True)
    return [
        Case(f"the chain, {CALLERS} callers", {
            "weft": skipping,
            "model on no rows too": each,
            "a backward each, one batch": lambda: each.alone(each.by_hand),
            "one backward by hand": lambda: each.alone(each.one_backward),
        }, units=CALLERS, unit="callers"),
    ]  # fmt: skip


def cases() -> list[Case]:
    """Everything."""
    steps = [training(shape, layout) for shape in SHAPES for layout in ("channels first", "channels last")]
    made = [*overheads(), *steps, *chains()]
    MADE.extend(made)
    return made


MADE: list[Case] = []

if __name__ == "__main__":
    torch.set_num_threads(2)
    main("gradients", "Gradients on 2 cores", cases)
    for case in MADE[:4]:
        if case.seconds:
            ours, theirs = (statistics.median(seconds) for seconds in case.seconds.values())
            print(f"{case.name}: {(ours - theirs) * 1e6:.1f} us over {list(case.seconds)[1]}")
