"""Compares gradients of ragged ops and TensorArrays, in weft and by TensorFlow's tape, on random calls.

    python tools/differential_gradients.py [--count 2000] [--seed 0]
    python tools/differential_gradients.py --arrays torch

On NumPy arrays weft's gradients come from `weft.vjp`. On tensors of torch and arrays of JAX they come from the framework, of the
first and the second order, in JAX also under `jax.jit`. `differential_batch_norm.py` has the gradients of batch norm.
Calls that both refuse are no cases of this tool.
"""

from __future__ import annotations

import argparse
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import arrays
import draw_arguments as draw
import numpy as np
import tensorflow as tf

import weft

DTYPES = ["float32", "float64", "float16", "complex64"]


@dataclass
class Program:
    """A function of arrays in both libraries, and the arrays that it is differentiated for."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    values: list[np.ndarray]
    #: With a gradient of the result: the gradients by `weft.vjp`. None if the function is not made of ops on NumPy alone.
    pull_back: Callable[[np.ndarray], list[Any]] | None = None


def of_op(name: str, given: draw.Arguments, inputs: list[str], output: str, dtype: str, rng: draw.Rng) -> Program:
    """One op, differentiated for `inputs`, which get values of `dtype`."""
    values = [draw.values(rng, given[k].shape, dtype) for k in inputs]

    def call(library: Any, arguments: draw.Arguments, xs: Any) -> Any:
        result = getattr(library.raw_ops, name)(**arguments, **dict(zip(inputs, xs, strict=True)))
        return getattr(result, output) if isinstance(result, tuple) else result

    rest = {k: v for k, v in given.items() if k not in inputs}
    other = {k: to_tensorflow(v) for k, v in rest.items()}

    def pull_back(cotangent: np.ndarray) -> list[Any]:
        _, pull = weft.vjp(getattr(weft.raw_ops, name), **rest, **dict(zip(inputs, values, strict=True)))
        found = pull(**{output: cotangent})
        return [found[k] for k in inputs]

    return Program(lambda *xs: call(weft, rest, xs), lambda *xs: call(tf, other, xs), values, pull_back)


def to_tensorflow(value: Any) -> Any:
    if isinstance(value, list):
        return [to_tensorflow(v) for v in value]
    return tf.constant(value) if isinstance(value, np.ndarray | np.generic) else value


def gather(rng: draw.Rng, dtype: str) -> Program:
    return of_op("RaggedGather", draw.gather(rng), ["params_dense_values"], "output_dense_values", dtype, rng)


def to_tensor(rng: draw.Rng, dtype: str) -> Program:
    return of_op("RaggedTensorToTensor", draw.to_tensor(rng), ["values", "default_value"], "result", dtype, rng)


def to_sparse(rng: draw.Rng, dtype: str) -> Program:
    return of_op("RaggedTensorToSparse", draw.to_sparse(rng), ["rt_dense_values"], "sparse_values", dtype, rng)


def fill(rng: draw.Rng, dtype: str) -> Program:
    return of_op("RaggedFillEmptyRows", draw.fill(rng), ["values", "default_value"], "output_values", dtype, rng)


def round_trip(rng: draw.Rng, dtype: str) -> Program:
    """Encode, take rows, decode; back through both ops. TensorFlow differentiates batched encodings of rank 1 alone."""
    (bounds,), count = draw.splits(rng, 1, rows=int(rng.integers(2, 5)))
    values = draw.values(rng, [count, *draw.pick(rng, [[], [2], [2, 3]])], dtype)
    rows = min(int(rng.integers(2, 4)), len(bounds) - 1)

    def ours(x: Any) -> Any:
        encoded = weft.raw_ops.RaggedTensorToVariant([bounds], x, True)
        return weft.raw_ops.RaggedTensorFromVariant(encoded[:rows], 0, 1, dtype).output_dense_values

    def theirs(x: Any) -> Any:
        encoded = tf.raw_ops.RaggedTensorToVariant(rt_nested_splits=[bounds], rt_dense_values=x, batched_input=True)
        return tf.raw_ops.RaggedTensorFromVariant(
            encoded_ragged=encoded[:rows], input_ragged_rank=0, output_ragged_rank=1, Tvalues=dtype, Tsplits=tf.int64
        )[1]

    def pull_back(cotangent: np.ndarray) -> list[Any]:
        encoded, encode_back = weft.vjp(weft.raw_ops.RaggedTensorToVariant, [bounds], values, True)
        _, decode_back = weft.vjp(weft.raw_ops.RaggedTensorFromVariant, encoded[:rows], 0, 1, dtype)
        back = decode_back(output_dense_values=cotangent)["encoded_ragged"]
        padded = weft.VariantArray([*back.elements(), *[None] * (encoded.size - rows)])
        return [encode_back(padded)["rt_dense_values"]]

    return Program(ours, theirs, [values], pull_back)


def tensor_array(rng: draw.Rng, dtype: str) -> Program:
    """Write single elements, scatter or split the others; read, gather or concatenate them, some of them twice."""
    inner, written = draw.pick(rng, [[], [2], [0], [2, 3]]), int(rng.integers(0, 3))
    values = [draw.values(rng, [2, *inner], dtype) for _ in range(written)]
    more, is_split = int(rng.integers(1, 4)), bool(rng.random() < 0.5)
    values.append(draw.values(rng, [more * 2, *inner] if is_split else [more, 2, *inner], dtype))
    size = written + more
    order = np.array(rng.permutation(size)[: rng.integers(1, size + 1)], np.int32)
    first, again = int(rng.integers(size)), draw.pick(rng, ["read", "gather", "concat"])
    join = operator.add if dtype == "complex64" else operator.mul  # the libraries conjugate differently
    is_alone = is_split and not written  # TensorFlow splits into all elements of an array

    def ours(*xs: Any) -> Any:
        ops, (handle, flow) = weft.raw_ops, weft.raw_ops.TensorArrayV3(size, dtype, clear_after_read=False)
        for i, x in enumerate(xs[:-1]):
            flow = ops.TensorArrayWriteV3(handle, i, x, flow)
        if is_alone:
            flow = ops.TensorArraySplitV3(handle, xs[-1], np.full(more, 2), flow)
        else:
            rest = xs[-1].reshape((more, 2, *inner))
            flow = ops.TensorArrayScatterV3(handle, np.arange(written, size, dtype=np.int32), rest, flow)
        found = ops.TensorArrayReadV3(handle, first, flow, dtype)
        if again == "read":
            return join(found, ops.TensorArrayReadV3(handle, int(order[0]), flow, dtype))
        if again == "gather":
            return join(found, ops.TensorArrayGatherV3(handle, order, flow, dtype))
        whole = ops.TensorArrayConcatV3(handle, flow, dtype).value
        return join(found, whole.reshape((size, 2, *inner)))

    def theirs(*xs: Any) -> Any:
        array = tf.TensorArray(dtype, size, clear_after_read=False, infer_shape=False)
        for i, x in enumerate(xs[:-1]):
            array = array.write(i, x)
        array = (
            array.split(xs[-1], [2] * more)
            if is_alone
            else array.scatter(list(range(written, size)), tf.reshape(xs[-1], [more, 2, *inner]))
        )
        found = array.read(first)
        if again == "read":
            return join(found, array.read(int(order[0])))
        if again == "gather":
            return join(found, array.gather(order))
        return join(found, tf.reshape(array.concat(), [size, 2, *inner]))

    return Program(ours, theirs, values)


# ---- gradients of both orders: of the sum of weights * result, and of the sum of the squares of these gradients


def by_tape(program: Program, rng: draw.Rng, order: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """A random gradient of the result, and TensorFlow's gradients of the values."""
    xs = [tf.constant(x) for x in program.values]
    with tf.GradientTape() as outer:
        outer.watch(xs)
        with tf.GradientTape() as inner:
            inner.watch(xs)
            result = program.theirs(*xs)
            cotangent = draw.values(rng, result.shape, result.dtype.name)
            if result.dtype.is_complex:  # sums with infinite parts differ between the libraries
                cotangent = np.nan_to_num(cotangent, posinf=2, neginf=-2)
            result = result * result if order == 2 else result
        first = dense(inner.gradient(result, xs, tf.constant(cotangent)), xs)
        squares = [g * g for g in first]
    found = first if order == 1 else dense(outer.gradient(squares, xs), xs)
    return cotangent, [g.numpy() for g in found]


def dense(gradients: Any, xs: list[Any]) -> list[Any]:
    return [tf.zeros_like(x) if g is None else tf.convert_to_tensor(g) for g, x in zip(gradients, xs, strict=True)]


def by_torch(program: Program, cotangent: np.ndarray, order: int, rng: draw.Rng) -> list[Any]:
    import torch

    xs = [arrays.convert("torch", x, rng).requires_grad_() for x in program.values]
    result = program.ours(*xs)
    result = result * result if order == 2 else result
    first = torch.autograd.grad(
        result, xs, arrays.convert("torch", cotangent, rng), create_graph=order == 2, materialize_grads=True
    )
    if order == 1:
        return list(first)
    squares = sum((g * g).sum() for g in first)
    if not squares.requires_grad:
        return [torch.zeros_like(x) for x in xs]
    return list(torch.autograd.grad(squares, xs, materialize_grads=True))


def by_jax(program: Program, cotangent: np.ndarray, order: int, rng: draw.Rng) -> list[Any]:
    import jax

    weights = arrays.convert("jax", cotangent)

    def first(*xs: Any) -> Any:
        result, pull = jax.vjp(lambda *xs: program.ours(*xs) ** order, *xs)
        assert arrays.is_of("jax", result)
        return pull(weights)

    def squares(*xs: Any) -> Any:
        return sum((g * g).sum() for g in first(*xs))

    xs = [arrays.convert("jax", x) for x in program.values]
    function = first if order == 1 else jax.grad(squares, tuple(range(len(xs))))
    return list((jax.jit(function) if rng.random() < 0.3 else function)(*xs))


def compare(program: Program, library: str, rng: draw.Rng, is_precise: bool) -> str | None:
    """What differs; of the second order only in dtypes whose products do not overflow."""
    order = 2 if library != "numpy" and is_precise and rng.random() < 0.5 else 1
    try:
        cotangent, theirs = by_tape(program, rng, order)
    except LookupError:  # TensorFlow has no gradient of this gradient
        cotangent, theirs = by_tape(program, rng, order := 1)
    if library == "numpy":
        return problem(program.pull_back(cotangent), theirs) if program.pull_back else None
    ours = {"torch": by_torch, "jax": by_jax}[library](program, cotangent, order, rng)
    assert all(arrays.is_of(library, g) for g in ours), f"gradients of another library: {ours}"
    found = problem([arrays.back(g) for g in ours], theirs)
    return found and f"order {order}, {found}"


PROGRAMS: dict[str, Callable[[draw.Rng, str], Program]] = {
    f.__name__: f for f in (gather, to_tensor, to_sparse, fill, round_trip, tensor_array)
}


def problem(ours: list[Any], theirs: list[Any]) -> str | None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a = np.asarray(a)
        tolerance = {"float16": 2e-2, "float32": 1e-5, "complex64": 1e-5}.get(b.dtype.name, 1e-12)
        same = a.dtype == b.dtype and a.shape == b.shape
        if not same or not near(parts(a), parts(b), tolerance):
            return f"gradient {i}: weft {a!r}, TensorFlow {b!r}"
    return None


def parts(x: np.ndarray) -> np.ndarray:
    """Complex numbers as their real and imaginary parts."""
    x = np.atleast_1d(x)
    return np.stack([x.real, x.imag]) if x.dtype.kind == "c" else x


def near(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    size = np.abs(b[np.isfinite(b)]).max(initial=1)
    return np.allclose(a, b, tolerance, tolerance * size, equal_nan=True)


def main() -> int:
    """1 if a gradient differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arrays", choices=arrays.LIBRARIES, default="numpy", help="what weft gets (default: numpy)")
    options = parser.parse_args()
    seen: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        rng = np.random.default_rng(seed)
        name, dtype = str(rng.choice(list(PROGRAMS))), str(rng.choice(DTYPES))
        try:
            found = compare(PROGRAMS[name](rng, dtype), options.arrays, rng, dtype in ("float32", "float64"))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        seen["differ" if found else name] += 1
        if found:
            print(f"seed {seed}, {name}, {dtype}: {found}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    return int(seen["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
