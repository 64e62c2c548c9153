"""Random batch norm calls, in weft and in a live TensorFlow, until they differ or the count is reached.

    python tools/differential_batch_norm.py [--count 500] [--seed 0]
    python tools/differential_batch_norm.py --arrays jax

A case is an op, a shape, a layout, dtypes and attributes; forward and gradient ops, their gradients by the tape, and
the class of the error where TensorFlow refuses. weft's gradients come from `weft.vjp`; with `--arrays torch` and
`--arrays jax` from the framework, in JAX also under `jax.jit`. Known differences (docs/differences.md) are passed over.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import arrays
import ml_dtypes
import numpy as np
import tensorflow as tf

import weft
from weft import errors, raw_ops

FORMATS = ["NHWC", "NCHW", "NDHWC", "NCDHW"]
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """A random case; now and then one that is not allowed."""
    rank = int(rng.choice([4, 4, 4, 5, 5, 3]))
    shape = [int(rng.choice([0, 1, 1, 2, 3, 5, 7], p=[0.03, 0.2, 0.17, 0.2, 0.2, 0.1, 0.1])) for _ in range(rank)]
    # Volumes under a 4-D name work, but not in TensorFlow's gradients of them, which are written in Python.
    data_format = str(rng.choice(FORMATS[2:] if rank == 5 else FORMATS[:2], 1)[0])
    channels = shape[1 if data_format.startswith("NC") else -1]
    lengths = [channels if rng.random() > 0.03 else int(rng.integers(0, 4)) for _ in range(4)]
    return {
        "version": int(rng.choice([1, 2, 3, 3])),
        "dtype": str(rng.choice(["float32", "float32", "float16", "bfloat16"])),
        "shape": tuple(shape),
        "lengths": lengths,
        "epsilon": float(rng.choice([1e-4, 1e-3, 0.1])),
        "factor": float(rng.choice([1.0, 0.25, 0.0])),
        "data_format": data_format,
        "is_training": bool(rng.random() < 0.6),
    }


def draw_values(case: dict[str, Any], rng: np.random.Generator) -> list[np.ndarray]:
    dtype = ml_dtypes.bfloat16 if case["dtype"] == "bfloat16" else np.dtype(case["dtype"])
    statistics = dtype if case["version"] == 1 else np.float32
    x, g, u = (rng.normal(size=case["shape"]).astype(dtype) for _ in range(3))
    scale, offset, mean = (rng.normal(size=n).astype(statistics) for n in case["lengths"][:3])
    variance = rng.uniform(0.5, 2, case["lengths"][3]).astype(statistics)
    return [x, g, u, scale, offset, mean, variance]


def pulled(library: str, call: Any, inputs: list[Any], traced: bool, **options: Any) -> Any:
    """The result of an op, and a function from gradients of its first outputs to those of its first three inputs."""
    if library == "numpy":
        result, pull = weft.vjp(call, *inputs, **options)
        names = list(call.signature.parameters)[:3]
        return result, lambda *grads: [pull(*grads)[name] for name in names]
    if library == "torch":
        inputs = [x.detach().requires_grad_() for x in inputs[:3]] + inputs[3:]
        result = call(*inputs, **options)
        return result, lambda *grads: torch_gradients(result[: len(grads)], inputs[:3], grads)
    import jax

    function = partial(call, **options)
    result, pull = jax.vjp(jax.jit(function) if traced else function, *inputs)
    return result, lambda *grads: pull(type(result)(*grads, *map(zeros_like, result[len(grads) :])))[:3]


def torch_gradients(outputs: Any, inputs: Any, grads: Any) -> Any:
    import torch

    return torch.autograd.grad(outputs, inputs, grads, materialize_grads=True)


def zeros_like(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.zeros_like(x)


def run_weft(case: dict[str, Any], values: list[np.ndarray], library: str) -> Any:
    rng = np.random.default_rng(len(values[0]))
    x, g, u, scale, offset, mean, variance = (arrays.convert(library, v, rng) for v in values)
    traced = bool(rng.random() < 0.3)
    suffix = {1: "", 2: "V2", 3: "V3"}[case["version"]]
    options = {k: case[k] for k in ("epsilon", "data_format", "is_training")}
    call = getattr(raw_ops, f"FusedBatchNorm{suffix}")
    inputs, factor = [x, scale, offset, mean, variance], case["factor"]
    result, pull = pulled(library, call, inputs, traced, exponential_avg_factor=factor, **options)
    first = pull(g)
    used = (result.reserve_space_1, result.reserve_space_2) if case["is_training"] else (mean, variance)
    reserves = [*used, result.reserve_space_3] if case["version"] == 3 else list(used)
    if library == "torch":
        reserves = [r.detach() for r in reserves]
    call = getattr(raw_ops, f"FusedBatchNormGrad{suffix}")
    _, pull = pulled(library, call, [g, x, scale, *reserves], traced, **options)
    found = [*result[:3], *first, *pull(u, scale, offset)]
    assert library == "numpy" or all(arrays.is_of(library, t) for t in found), f"results of another library: {found}"
    return [arrays.back(t) for t in found]


def run_tensorflow(case: dict[str, Any], values: list[np.ndarray], library: str) -> Any:
    x, g, u, scale, offset, mean, variance = map(tf.constant, values)
    suffix = {1: "", 2: "V2", 3: "V3"}[case["version"]]
    options = {k: case[k] for k in ("epsilon", "data_format", "is_training")}
    with tf.GradientTape() as outer:
        outer.watch([g, x, scale])
        with tf.GradientTape() as inner:
            inner.watch([x, scale, offset])
            result = getattr(tf.raw_ops, f"FusedBatchNorm{suffix}")(
                x=x, scale=scale, offset=offset, mean=mean, variance=variance,
                exponential_avg_factor=case["factor"], **options,
            )  # fmt: skip
        first = inner.gradient(result.y, [x, scale, offset], output_gradients=g)
        # The second order of the gradient op alone: the forward op's own path is held fast.
        used = (result.reserve_space_1, result.reserve_space_2) if case["is_training"] else (mean, variance)
        extra = {"reserve_space_3": tf.stop_gradient(result.reserve_space_3)} if case["version"] == 3 else {}
        is_first = case["data_format"].startswith("NC") and not case["is_training"]
        move = (lambda t: tf.experimental.numpy.moveaxis(t, 1, -1)) if is_first else (lambda t: t)
        options["data_format"] = (
            options["data_format"].replace("NCH", "NH").replace("NCD", "ND") if is_first else options["data_format"]
        )
        options["data_format"] = {"NHW": "NHWC", "NDHW": "NDHWC"}.get(options["data_format"], options["data_format"])
        back = getattr(tf.raw_ops, f"FusedBatchNormGrad{suffix}")(
            y_backprop=move(g), x=move(x), scale=scale, reserve_space_1=tf.stop_gradient(used[0]),
            reserve_space_2=tf.stop_gradient(used[1]), **extra, **options,
        )  # fmt: skip
    second = outer.gradient(
        [back.x_backprop, back.scale_backprop, back.offset_backprop],
        [g, x, scale],
        output_gradients=[move(u), scale, offset],
    )
    return [t.numpy() for t in [*result[:3], *first, *second]]


def compare(case: dict[str, Any], ours: Any, theirs: Any) -> str | None:
    if 0 in case["shape"] and len(case["shape"]) == 5 and not isinstance(ours, Exception):
        return None  # TensorFlow's empty gradients of volumes lose an axis, and its tape then fails
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        same = type(ours).__name__ == type(theirs).__name__
        shown = [f"{r!r:.100} {r!s:.300}" if isinstance(r, Exception) else "a result" for r in (ours, theirs)]
        return None if same else f"weft: {shown[0]}\ntensorflow: {shown[1]}"
    if 0 in case["shape"]:
        ours, theirs = ours[:8], theirs[:8]  # the last is NaN or 0, depending on the layout, in TensorFlow
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        tolerance = TOLERANCE[case["dtype"]] * (1 if i < 6 else 20) * max(1.0, np.abs(b).max() if b.size else 0)
        if a.shape != b.shape or not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"result {i}: {a.shape} and {b.shape}\n{a}\n{b}"
    return None


def attempt(run: Any, case: dict[str, Any], values: list[np.ndarray], library: str) -> Any:
    try:
        return run(case, values, library)
    except (errors.OpError, tf.errors.OpError) as error:
        return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arrays", choices=arrays.LIBRARIES, default="numpy", help="what weft gets (default: numpy)")
    options = parser.parse_args()
    refused = 0
    for seed in range(options.seed, options.seed + options.count):
        rng = np.random.default_rng(seed)
        case = draw(rng)
        values = draw_values(case, rng)
        ours, theirs = (attempt(run, case, values, options.arrays) for run in (run_weft, run_tensorflow))
        refused += isinstance(ours, Exception)
        if (problem := compare(case, ours, theirs)) is not None:
            raise SystemExit(f"seed {seed}: {case}\n{problem}")
    print(f"{options.count} cases agree with TensorFlow {tf.__version__}, {refused} of them refused by both")


if __name__ == "__main__":
    main()
