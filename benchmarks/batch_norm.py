"""How fast is fused batch norm on the CPU, against TensorFlow, PyTorch and JAX, and against a plain copy?

Every contestant has two threads and runs in bursts: the spinning threads that a framework leaves behind must not be
measured as the next contestant's work. `copy` moves the bytes that the pass cannot do without (two arrays forward,
three backward), by PyTorch's copy on two threads.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads=2")

import ml_dtypes
import numpy as np

import weft
from benchmarks.runner import Case, main
from weft import raw_ops

THREADS = 2
SHAPES = [(32, 14, 14, 256), (32, 7, 7, 512), (16, 56, 56, 64), (32, 56, 56, 64), (8, 8, 8, 32)]
EPSILON = 1e-3
QUESTIONS = ["forward", "inference", "gradient", "second order"]
TARGETS = {
    ("gradient", "NHWC"): {"tensorflow": 3.0, "torch": 1.5},
    ("gradient", "NCHW"): {"tensorflow": 5.0, "torch": 1.2},
    ("forward", "NHWC"): {"tensorflow": 2.0, "torch": 1.2},
    ("forward", "NCHW"): {"tensorflow": 2.0, "torch": 1.2},
    ("inference", "NHWC"): {"torch": 1.0},
    ("inference", "NCHW"): {"torch": 1.0},
    ("second order", "NHWC"): {"tensorflow": 5.0},
    ("second order", "NCHW"): {"tensorflow": 5.0},
}


def burst(run: Callable[[], object], calls: int) -> float:
    """The median time of some calls in a row, after others have come to rest."""
    time.sleep(0.02)
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


class Data:
    """The arrays of one case."""

    def __init__(self, shape: tuple[int, ...], layout: str, dtype: Any) -> None:
        rng = np.random.default_rng(0)
        n, h, w, c = shape
        full = shape if layout == "NHWC" else (n, c, h, w)
        self.layout, self.channels = layout, c
        self.x, self.g, self.u = (rng.normal(size=full).astype(dtype) for _ in range(3))
        self.scale, self.offset = rng.normal(size=(2, c)).astype(np.float32)
        self.mean, self.variance = rng.normal(size=c).astype(np.float32), rng.uniform(0.5, 2, c).astype(np.float32)
        self.none = np.zeros(0, np.float32)


def ours(d: Data) -> dict[str, Callable[[], object]]:
    options = {"epsilon": EPSILON, "data_format": d.layout}
    used = raw_ops.FusedBatchNormV3(d.x, d.scale, d.offset, d.none, d.none, **options)
    back = d.g, d.x, d.scale, used.reserve_space_1, used.reserve_space_2, used.reserve_space_3
    _, pull = weft.vjp(raw_ops.FusedBatchNormGradV3, *back, **options)
    return {
        "forward": lambda: raw_ops.FusedBatchNormV3(d.x, d.scale, d.offset, d.none, d.none, **options),
        "inference": lambda: raw_ops.FusedBatchNormV3(
            d.x, d.scale, d.offset, d.mean, d.variance, is_training=False, **options
        ),
        "gradient": lambda: raw_ops.FusedBatchNormGradV3(*back, **options),
        "second order": lambda: pull(d.u, d.scale, d.offset),
        "function": lambda: weft.batch_norm(
            d.x, d.scale, d.offset, d.mean, d.variance, training=True, momentum=0.1, epsilon=EPSILON
        ),
    }


def with_tensorflow(d: Data) -> dict[str, Callable[[], object]]:
    import tensorflow as tf

    x, g, u, scale, offset, mean, variance, none = map(
        tf.constant, (d.x, d.g, d.u, d.scale, d.offset, d.mean, d.variance, d.none)
    )
    options = {"epsilon": EPSILON, "data_format": d.layout}
    forward, backward = tf.raw_ops.FusedBatchNormV3, tf.raw_ops.FusedBatchNormGradV3
    used = forward(x=x, scale=scale, offset=offset, mean=none, variance=none, **options)
    reserves = {f"reserve_space_{i}": getattr(used, f"reserve_space_{i}") for i in (1, 2, 3)}
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, g, scale])
        first = backward(y_backprop=g, x=x, scale=scale, **reserves, **options)
        outputs = [first.x_backprop, first.scale_backprop, first.offset_backprop]
    return {
        "forward": lambda: forward(x=x, scale=scale, offset=offset, mean=none, variance=none, **options),
        "inference": lambda: forward(
            x=x, scale=scale, offset=offset, mean=mean, variance=variance, is_training=False, **options
        ),
        "gradient": lambda: backward(y_backprop=g, x=x, scale=scale, **reserves, **options),
        "second order": lambda: tape.gradient(outputs, [g, x, scale], output_gradients=[u, scale, offset]),
    }


def as_torch(array: np.ndarray, layout: str) -> Any:
    """A tensor of shape NCHW over the same memory: channels last in memory where the layout is."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.permute(0, 3, 1, 2) if layout == "NHWC" and array.ndim == 4 else tensor


def with_torch(d: Data) -> dict[str, Callable[[], object]]:
    import torch

    x, g, u = (as_torch(a, d.layout) for a in (d.x, d.g, d.u))
    scale, offset, mean, variance = (torch.from_numpy(v) for v in (d.scale, d.offset, d.mean, d.variance))
    forward, backward = torch.ops.aten.native_batch_norm, torch.ops.aten.native_batch_norm_backward
    _, used_mean, used_deviation = forward(x, scale, offset, None, None, True, 0.1, EPSILON)
    every = [True, True, True]
    leaves = [t.clone().requires_grad_() for t in (g, x, scale)]
    y = torch.nn.functional.batch_norm(leaves[1], None, None, leaves[2], offset, True, 0.1, EPSILON)
    first = torch.autograd.grad(y, leaves[1:], leaves[0], create_graph=True)
    return {
        "forward": lambda: forward(x, scale, offset, None, None, True, 0.1, EPSILON),
        "inference": lambda: forward(x, scale, offset, mean, variance, False, 0.1, EPSILON),
        "gradient": lambda: backward(g, x, scale, None, None, used_mean, used_deviation, True, EPSILON, every),
        "second order": lambda: torch.autograd.grad(first, leaves, (u, scale), retain_graph=True),
        "function": lambda: torch.nn.functional.batch_norm(
            x, mean.clone(), variance.clone(), scale, offset, True, 0.1, EPSILON
        ),
    }


def with_jax(d: Data) -> dict[str, Callable[[], object]]:
    import jax
    import jax.numpy as jnp

    axes, shape = ((0, 1, 2), (-1,)) if d.layout == "NHWC" else ((0, 2, 3), (-1, 1, 1))
    x, g, u, scale, offset, mean, variance = map(jnp.asarray, (d.x, d.g, d.u, d.scale, d.offset, d.mean, d.variance))

    def normalize(x, scale, offset):
        wide = x.astype(jnp.float32)
        m, v = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
        return ((wide - m) * jax.lax.rsqrt(v + EPSILON) * scale.reshape(shape) + offset.reshape(shape)).astype(x.dtype)

    def inference(x, scale, offset, mean, variance):
        factor = (scale * jax.lax.rsqrt(variance + EPSILON)).reshape(shape)
        return ((x.astype(jnp.float32) - mean.reshape(shape)) * factor + offset.reshape(shape)).astype(x.dtype)

    def gradient(g, x, scale, offset):
        return jax.vjp(normalize, x, scale, offset)[1](g)

    def second(g, x, scale, u):
        return jax.vjp(lambda g, x, scale: gradient(g, x, scale, offset), g, x, scale)[1]((u, scale, offset))

    def ready(function: Any, *args: Any) -> Callable[[], object]:
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*args))

    return {
        "forward": ready(normalize, x, scale, offset),
        "inference": ready(inference, x, scale, offset, mean, variance),
        "gradient": ready(gradient, g, x, scale, offset),
        "second order": ready(second, g, x, scale, u),
    }


def copying(d: Data) -> dict[str, Callable[[], object]]:
    """Copies of as many bytes as each pass reads and writes at least."""
    import torch

    def copy(arrays: int) -> Callable[[], object]:
        source, target = torch.zeros(2, d.x.size * arrays // 2, dtype=as_torch(d.x, "NCHW").dtype)
        return lambda: target.copy_(source)

    return {"forward": copy(2), "inference": copy(2), "gradient": copy(3)}


SIDES = {"weft": ours, "tensorflow": with_tensorflow, "torch": with_torch, "jax": with_jax, "copy": copying}


@cache
def data_of(shape: tuple[int, ...], layout: str, dtype: str) -> Data:
    return Data(shape, layout, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@cache
def side(name: str, *key: Any) -> dict[str, Callable[[], object]]:
    """What a contestant can do with some data, prepared when it is first asked for."""
    return SIDES[name](data_of(*key))


def cases() -> list[Case]:
    """Every question, shape and layout."""
    import tensorflow as tf
    import torch

    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    torch.set_num_threads(THREADS)
    weft.set_num_threads(THREADS)
    found = []
    for dtype, layout, what, shape in product(("float32", "bfloat16"), ("NHWC", "NCHW"), QUESTIONS, SHAPES):
        if dtype == "bfloat16" and what not in ("forward", "gradient"):
            continue
        size = math.prod(shape) * (4 if dtype == "float32" else 2)
        targets = {"torch": 1.0} if dtype == "bfloat16" else dict(TARGETS[what, layout])
        names = [name for name in SIDES if name != "copy" or what != "second order"]
        if size > 6e6 and "copy" in names and dtype == "float32":
            targets["copy"] = 0.7
        key, calls = (shape, layout, dtype), 9 if size > 1e6 else 41
        timed = {name: partial(_burst_of, name, what, calls, *key) for name in names}
        name = f"{what}, {dtype}, {layout}, {'x'.join(map(str, shape))}"
        found.append(Case(name, timed, units=size, unit="B", targets=targets))
    key = SHAPES[-1], "NHWC", "float32"
    timed = {name: partial(_burst_of, name, "function", 41, *key) for name in ("weft", "torch")}
    name = "function, with running statistics, float32, NHWC, 8x8x8x32"
    found.append(Case(name, timed, units=math.prod(SHAPES[-1]) * 4, unit="B", targets={"torch": 1.0}))
    return found


def _burst_of(name: str, what: str, calls: int, *key: Any) -> float:
    return burst(side(name, *key)[what], calls)


def saved(path: Path) -> list[Case]:
    """The cases of all runs so far."""
    rows = json.loads(path.read_text())["cases"]
    kept = ("name", "units", "targets", "seconds")
    return [Case(contestants={}, **{key: row[key] for key in kept}) for row in rows]


def means(measured: list[Case]) -> str:
    """The geometric mean of the ratios for each question, as a Markdown table."""
    lines = ["| question | peer | geometric mean | least | target |", "|---|---|---|---|---|"]
    groups: dict[str, list[Case]] = {}
    for case in measured:
        groups.setdefault(case.name.rsplit(", ", 1)[0], []).append(case)
    for group, members in groups.items():
        for peer in ("tensorflow", "torch", "jax", "copy"):
            ratios = [c.ratio(peer) for c in members if peer in c.seconds and (peer != "copy" or c.units > 6e6)]
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                target = members[0].targets.get(peer, "")
                lines.append(f"| {group} | {peer} | {mean:.2f} | {min(ratios):.2f} | {target} |")
    return "\n".join(lines)


if __name__ == "__main__":
    measured: list[Case] = []

    def chosen() -> list[Case]:
        measured.extend(cases())
        return measured

    main("batch_norm", "Fused batch norm on the CPU, 2 threads each", chosen)
    path = Path(__file__).parent / "results" / "batch_norm.json"
    summary = means(saved(path) if "--save" in sys.argv else [case for case in measured if case.seconds])
    print("\n" + summary)
    if "--save" in sys.argv:
        page = path.with_suffix(".md")
        page.write_text(page.read_text() + "\n" + summary + "\n")
