"""Compares gradients of ragged ops, by `weft.vjp` and by TensorFlow's tape, on random calls.

    python tools/differential_gradients.py [--count 2000] [--seed 0]

`differential_batch_norm.py` has the gradients of batch norm. Calls that both refuse are no cases of this tool.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import draw_arguments as draw
import numpy as np
import tensorflow as tf

import weft

DTYPES = ["float32", "float64", "float16", "complex64"]


def gradients(name: str, arguments: draw.Arguments, inputs: list[str], output: str, rng: draw.Rng) -> Any:
    """The gradients for `inputs`, given a random one for `output`: weft's and TensorFlow's."""
    given = {k: to_tensorflow(v) for k, v in arguments.items()}
    with tf.GradientTape() as tape:
        watched = [given[k] for k in inputs]
        tape.watch(watched)
        result = getattr(tf.raw_ops, name)(**given)
        result = getattr(result, output) if isinstance(result, tuple) else result
    cotangent = draw.values(rng, result.shape, result.dtype.name)
    theirs = [tf.convert_to_tensor(g).numpy() for g in tape.gradient(result, watched, to_tensorflow(cotangent))]
    _, pull_back = weft.vjp(getattr(weft.raw_ops, name), **arguments)
    ours = pull_back(**{output: cotangent})
    return [ours[k] for k in inputs], theirs


def to_tensorflow(value: Any) -> Any:
    if isinstance(value, list):
        return [to_tensorflow(v) for v in value]
    return tf.constant(value) if isinstance(value, np.ndarray | np.generic) else value


def gather(rng: draw.Rng, dtype: str) -> Any:
    arguments = draw.gather(rng)
    arguments["params_dense_values"] = draw.values(rng, arguments["params_dense_values"].shape, dtype)
    return gradients("RaggedGather", arguments, ["params_dense_values"], "output_dense_values", rng)


def to_tensor(rng: draw.Rng, dtype: str) -> Any:
    arguments = draw.to_tensor(rng)
    for key in ("values", "default_value"):
        arguments[key] = draw.values(rng, arguments[key].shape, dtype)
    return gradients("RaggedTensorToTensor", arguments, ["values", "default_value"], "result", rng)


def to_sparse(rng: draw.Rng, dtype: str) -> Any:
    arguments = draw.to_sparse(rng)
    arguments["rt_dense_values"] = draw.values(rng, arguments["rt_dense_values"].shape, dtype)
    return gradients("RaggedTensorToSparse", arguments, ["rt_dense_values"], "sparse_values", rng)


def fill(rng: draw.Rng, dtype: str) -> Any:
    arguments = draw.fill(rng)
    for key in ("values", "default_value"):
        arguments[key] = draw.values(rng, arguments[key].shape, dtype)
    return gradients("RaggedFillEmptyRows", arguments, ["values", "default_value"], "output_values", rng)


def round_trip(rng: draw.Rng, dtype: str) -> Any:
    """Encode, take rows, decode; back through both ops. TensorFlow differentiates batched encodings of rank 1 alone."""
    (bounds,), count = draw.splits(rng, 1, rows=int(rng.integers(2, 5)))
    values = draw.values(rng, [count, *draw.pick(rng, [[], [2], [2, 3]])], dtype)
    rows = rng.integers(0, len(bounds) - 1, int(rng.integers(2, 4)))
    with tf.GradientTape() as tape:
        watched = tf.constant(values)
        tape.watch(watched)
        encoded = tf.raw_ops.RaggedTensorToVariant(
            rt_nested_splits=[bounds], rt_dense_values=watched, batched_input=True
        )
        taken = encoded[: len(rows)]
        result = tf.raw_ops.RaggedTensorFromVariant(
            encoded_ragged=taken, input_ragged_rank=0, output_ragged_rank=1, Tvalues=dtype, Tsplits=tf.int64
        )[1]
    cotangent = draw.values(rng, result.shape, dtype)
    theirs = [tape.gradient(result, watched, tf.constant(cotangent)).numpy()]
    encoded, encode_back = weft.vjp(weft.raw_ops.RaggedTensorToVariant, [bounds], values, True)
    taken = encoded[: len(rows)]
    _, decode_back = weft.vjp(weft.raw_ops.RaggedTensorFromVariant, taken, 0, 1, dtype)
    back = decode_back(output_dense_values=cotangent)["encoded_ragged"]
    padded = weft.VariantArray([*back.elements(), *[None] * (encoded.size - taken.size)])
    return [encode_back(padded)["rt_dense_values"]], theirs


PROGRAMS: dict[str, Callable[[draw.Rng, str], Any]] = {
    f.__name__: f for f in (gather, to_tensor, to_sparse, fill, round_trip)
}


def problem(ours: list[Any], theirs: list[Any]) -> str | None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a = np.asarray(a)
        tolerance = {"float16": 2e-2, "float32": 1e-5, "complex64": 1e-5}.get(b.dtype.name, 1e-12)
        size = np.abs(b[np.isfinite(b)]).max(initial=1)
        if (
            a.dtype != b.dtype
            or a.shape != b.shape
            or not np.allclose(a, b, tolerance, tolerance * size, equal_nan=True)
        ):
            return f"gradient {i}: weft {a!r}, TensorFlow {b!r}"
    return None


def main() -> int:
    """1 if a gradient differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seen: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        rng = np.random.default_rng(seed)
        name, dtype = str(rng.choice(list(PROGRAMS))), str(rng.choice(DTYPES))
        try:
            found = problem(*PROGRAMS[name](rng, dtype))
        except (weft.errors.OpError, tf.errors.OpError) as error:
            found = f"{type(error).__name__}: {error}"
        seen["differ" if found else name] += 1
        if found:
            print(f"seed {seed}, {name}, {dtype}: {found}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    return int(seen["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
