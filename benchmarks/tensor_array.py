"""How fast arrays are written, stacked, read and differentiated, beside TensorFlow, torch and JAX.

    python -m benchmarks.tensor_array [--save] [--rounds 7] [--only text]

The elements are 64 x 16 float32. "TF eager" is given the same NumPy arguments as weft; "TF eager, own tensors" has them
converted before the clock starts; "tf.function" is tf.TensorArray in a compiled loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch

import weft

from .runner import Case, main, per_call

SHAPE = (64, 16)
FLOW = np.zeros((), np.float32)
VALUES = [np.random.default_rng(i).normal(size=SHAPE).astype(np.float32) for i in range(16)]
TENSORS = [tf.constant(v) for v in VALUES]
EAGER, OWN, COMPILED = "TF eager", "TF eager, own tensors", "tf.function"


def indices(count: int) -> list[np.ndarray]:
    """The numbers up to `count` as int32 scalars."""
    return [np.asarray(i, np.int32) for i in range(count)]


class Raw:
    """The raw ops of one library over `count` elements, on one set of arguments."""

    def __init__(self, ops: object, count: int, own: bool = False) -> None:
        self.ops, self.count = ops, count
        self.values = TENSORS if own else VALUES
        self.each = [tf.constant(i) for i in indices(count)] if own else indices(count)
        self.all = tf.range(count) if own else np.arange(count, dtype=np.int32)
        self.flow = tf.constant(0.0) if own else FLOW
        self.own = own

    def create(self, clear: bool = True) -> object:
        return self.ops.TensorArrayV3(
            size=np.int32(self.count), dtype="float32", element_shape=SHAPE, clear_after_read=clear
        ).handle

    def write(self, handle: object) -> None:
        write, flow, values = self.ops.TensorArrayWriteV3, self.flow, self.values
        for i, index in enumerate(self.each):
            flow = write(handle=handle, index=index, value=values[i % 16], flow_in=flow)

    def stack(self, handle: object) -> object:
        return self.ops.TensorArrayGatherV3(handle=handle, indices=self.all, flow_in=self.flow, dtype="float32")

    def read(self, handle: object) -> None:
        read = self.ops.TensorArrayReadV3
        for index in self.each:
            read(handle=handle, index=index, flow_in=self.flow, dtype="float32")

    def written(self) -> object:
        handle = self.create(clear=False)
        self.write(handle)
        return handle

    def write_and_stack(self) -> None:
        handle = self.create()
        self.write(handle)
        self.stack(handle)
        self.close(handle)

    def close(self, handle: object) -> None:
        # TensorFlow keeps what is not closed; weft frees it with the handle.
        self.ops.TensorArrayCloseV3(handle=handle)

    def whole(self) -> object:
        found = np.stack([VALUES[i % 16] for i in range(self.count)])
        return tf.constant(found) if self.own else found

    def pieces(self) -> tuple[object, object]:
        """All elements one below the other, and the rows of each."""
        whole, lengths = self.whole(), np.full(self.count, SHAPE[0], np.int64)
        rows = (-1, *SHAPE[1:])
        return (tf.reshape(whole, rows), tf.constant(lengths)) if self.own else (whole.reshape(rows), lengths)

    def with_gradient(self, cotangent: object) -> None:
        """Write all, stack, and bring the gradient of the stack back to every written value."""
        handle = self.create()
        self.write(handle)
        self.stack(handle)
        gradient = self.ops.TensorArrayGradV3(handle=handle, flow_in=self.flow, source="g").grad_handle
        self.ops.TensorArrayScatterV3(handle=gradient, indices=self.all, value=cotangent, flow_in=self.flow)
        self.read(gradient)
        self.close(gradient)
        self.close(handle)


def compiled(count: int) -> tuple[Callable, Callable]:
    """tf.TensorArray in a compiled loop: write all and stack; and the gradient of that."""

    def run(x: tf.Tensor) -> tf.Tensor:
        array = tf.TensorArray(tf.float32, size=count, element_shape=SHAPE)
        for i in tf.range(count):
            array = array.write(i, x)
        return array.stack()

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(run(x))
        return tape.gradient(total, x)

    forward = tf.function(run)
    return (lambda: forward(TENSORS[0]).numpy), (lambda: gradient(TENSORS[0]).numpy)


def scanned(count: int) -> tuple[Callable, Callable]:
    """The same as the outputs of `lax.scan`."""

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, i: (carry, x + i), 0.0, jnp.arange(count, dtype=jnp.float32))[1]

    forward, gradient = jax.jit(run), jax.jit(jax.grad(lambda x: run(x).sum()))
    x = jnp.asarray(VALUES[0])
    return (lambda: forward(x).block_until_ready()), (lambda: gradient(x).block_until_ready())


def listed(count: int) -> tuple[Callable, Callable]:
    """The same as a list of tensors that is stacked."""
    values = [torch.from_numpy(v) for v in VALUES]

    def forward() -> None:
        torch.stack([values[i % 16].clone() for i in range(count)])

    def gradient() -> None:
        x = values[0].clone().requires_grad_()
        torch.stack([x * 1 for _ in range(count)]).sum().backward()

    return forward, gradient


def timed(contestants: dict[str, Callable], once: bool = False) -> dict[str, Callable[[], float | None]]:
    """Contestants that measure themselves over a stretch of calls; or, where a call is long, are measured once."""
    return {name: partial(_silent if once else per_call, run) for name, run in contestants.items()}


def _silent(run: Callable) -> None:
    """`run` without its result, which would be taken for a measurement."""
    run()


def loops(count: int) -> list[Case]:
    """Write and stack, and the gradient, of `count` elements."""
    ours, eager, own = Raw(weft.raw_ops, count), Raw(tf.raw_ops, count), Raw(tf.raw_ops, count, own=True)
    function, gradient = compiled(count)
    torch_forward, torch_gradient = listed(count)
    scan_forward, scan_gradient = scanned(count)
    one, tensor = ours.whole(), own.whole()
    large = count > 1000
    slow = {} if large else {EAGER: lambda: eager.with_gradient(one)}  # 10 s a round at 100,000
    return [
        Case(
            f"{count} writes and stack",
            timed({
                "weft": ours.write_and_stack,
                EAGER: eager.write_and_stack,
                OWN: own.write_and_stack,
                COMPILED: function,
                "torch.stack of a list": torch_forward,
                "lax.scan outputs": scan_forward,
            }, once=large),
            units=count, unit="writes", targets={EAGER: 8, COMPILED: 1.5}, rounds=5 if large else None,
        ),
        Case(
            f"{count} writes, stack and gradient",
            timed({
                "weft": lambda: ours.with_gradient(one),
                **slow,
                OWN: lambda: own.with_gradient(tensor),
                COMPILED: gradient,
                "torch.stack of a list": torch_gradient,
                "lax.scan outputs": scan_gradient,
            }, once=large),
            units=count, unit="writes", targets={EAGER: 8, COMPILED: 1.5}, rounds=3 if large else None,
        ),
    ]  # fmt: skip


def single_ops(count: int = 1000) -> list[Case]:
    """One op after the other."""
    raws = {"weft": Raw(weft.raw_ops, count), EAGER: Raw(tf.raw_ops, count), OWN: Raw(tf.raw_ops, count, own=True)}

    def reads(raw: Raw) -> Callable[[], None]:
        handle = raw.written()
        return lambda: raw.read(handle)

    def scatters(raw: Raw) -> Callable[[], None]:
        whole = raw.whole()

        def run() -> None:
            handle = raw.create()
            raw.ops.TensorArrayScatterV3(handle=handle, indices=raw.all, value=whole, flow_in=raw.flow)
            raw.close(handle)

        return run

    def splits(raw: Raw) -> Callable[[], None]:
        whole, lengths = raw.pieces()

        def run() -> None:
            handle = raw.create()
            raw.ops.TensorArraySplitV3(handle=handle, value=whole, lengths=lengths, flow_in=raw.flow)
            raw.close(handle)

        return run

    def concat(raw: Raw, handle: object) -> None:
        raw.ops.TensorArrayConcatV3(handle=handle, flow_in=raw.flow, dtype="float32")

    def concats(raw: Raw) -> Callable[[], None]:
        handle = raw.written()
        return lambda: concat(raw, handle)

    def last_concats(raw: Raw) -> Callable[[], None]:
        whole, lengths = raw.pieces()

        def run() -> None:
            handle = raw.create()
            raw.ops.TensorArraySplitV3(handle=handle, value=whole, lengths=lengths, flow_in=raw.flow)
            concat(raw, handle)
            raw.close(handle)

        return run

    def accumulates(raw: Raw) -> Callable[[], None]:
        handle = raw.written()
        gradient = raw.ops.TensorArrayGradV3(handle=handle, flow_in=raw.flow, source="g").grad_handle
        return lambda: raw.write(gradient)

    def case(name: str, make: Callable[[Raw], Callable[[], object]], unit: str, **copied: Callable) -> Case:
        contestants = {peer: make(raw) for peer, raw in raws.items()} | copied
        return Case(name, timed(contestants), units=count, unit=unit, targets={EAGER: 8})

    copy = {"numpy copy": raws["weft"].whole().copy}
    return [
        case(f"{count} reads", reads, "reads"),
        case(f"{count} adds to gradient elements", accumulates, "writes"),
        case(f"scatter of {count} rows", scatters, "rows", **copy),
        case(f"split into {count} elements", splits, "rows", **copy),
        case(f"split into {count} elements, and concat", last_concats, "rows", **copy),
        case(f"concat of {count} elements that stay", concats, "rows", **copy),
    ]


def copies(count: int = 10_000) -> Case:
    """A stack beside a plain copy of the same memory."""
    raw = Raw(weft.raw_ops, count)
    handle, whole = raw.written(), raw.whole()
    contestants = {
        "weft": lambda: raw.stack(handle),
        "numpy copy": whole.copy,
        "numpy stack of a list": lambda values=list(whole): np.stack(values),
    }
    return Case(
        f"stack of {count} elements", timed(contestants),
        units=whole.nbytes, unit="bytes", targets={"numpy copy": 0.8},
    )  # fmt: skip


def growth(count: int = 1_000_000) -> Case:
    """Appending small elements to an array that grows."""
    value, each = np.ones(16, np.float32), indices(count)

    def ours() -> None:
        handle, flow = weft.raw_ops.TensorArrayV3(size=0, dtype="float32", dynamic_size=True)
        write = weft.raw_ops.TensorArrayWriteV3
        for index in each:
            write(handle=handle, index=index, value=value, flow_in=flow)
        assert handle.storage.nbytes <= 2 * count * value.nbytes + 5 * count

    def theirs() -> None:
        found = [value.copy() for _ in each]
        del found

    return Case(
        f"{count} writes of 16 floats, growing", {"weft": ours, "list of numpy copies": theirs},
        units=count, unit="writes", rounds=3,
    )  # fmt: skip


def growth_is_linear() -> Case:
    """The same in pieces: the last tenth of a million appends takes no longer than the first."""
    value = np.ones(16, np.float32)
    array = weft.TensorArray("float32")

    def tenth() -> None:
        for _ in range(100_000):
            array.append(value)

    fresh = [weft.TensorArray("float32") for _ in range(32)]

    def first_tenth() -> None:
        start = fresh.pop()
        for _ in range(100_000):
            start.append(value)

    return Case(
        "100000 appends, to a growing array and to a fresh one", {"weft": tenth, "weft, fresh": first_tenth},
        units=100_000, unit="appends", rounds=9, targets={"weft, fresh": 0.8},
    )  # fmt: skip


def people(count: int = 1000) -> list[Case]:
    """weft.TensorArray with torch tensors and under jit."""
    tensors = [torch.from_numpy(v) for v in VALUES]

    def ours() -> None:
        array = weft.TensorArray()
        for i in range(count):
            array.append(tensors[i % 16])
        array.stack()

    forward, _ = listed(count)
    x, empty = jnp.asarray(VALUES[0]), weft.TensorArray("float32", size=count, element_shape=SHAPE)

    @jax.jit
    def carried(array: weft.TensorArray, x: jax.Array) -> jax.Array:
        numbers = jnp.arange(count)
        return jax.lax.scan(lambda a, i: (a.write(i, x + i), None), array, numbers)[0].stack()

    start = jax.jit(lambda a: a)(empty)
    scan, _ = scanned(count)
    return [
        Case(f"{count} torch appends and stack", timed({"weft": ours, "torch.stack of a list": forward}),
             units=count, unit="writes"),
        Case(f"{count} writes in lax.scan",
             timed({"weft": lambda: carried(start, x).block_until_ready(), "lax.scan outputs": scan}),
             units=count, unit="writes"),
    ]  # fmt: skip


def cases() -> list[Case]:
    """All questions."""
    return [*loops(1000), *single_ops(), copies(), *people(), growth_is_linear(), growth(), *loops(100_000)]


if __name__ == "__main__":
    main("tensor_array", "TensorArray: rate of weft over its peers", cases)
