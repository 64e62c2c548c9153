"""Calls the C++ kernels, batch norm and rows in turn, with random arguments and compares the results with the reference.

`python tools/fuzz_kernels.py 10000 --seed 1` makes 10,000 calls and exits with 1 if a result differs. Shapes, layouts, strides,
dtypes, masks, instruction sets, thread counts and libraries are drawn; a failed call is printed with its number, and
`--only NUMBER` runs it alone.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from weft import _native, kernels
from weft.kernels import native, reference

TOLERANCE = {"float32": 4e-6, "float64": 1e-11, "float16": 2e-3, "bfloat16": 1.6e-2}
#: Of each kernel the large inputs and the vectors, in order.
KERNELS = {
    "batch_norm": "X scale offset",
    "batch_norm_inference": "X scale offset mean variance",
    "batch_norm_grad": "G X scale mean variance",
    "batch_norm_inference_grad": "G X scale mean variance",
    "batch_norm_grad_grad": "G X scale U a b",
    "batch_norm_inference_grad_grad": "G X scale mean variance U a b",
}
ARRANGEMENTS: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda x: x,
    lambda x: x.copy(order="F"),
    lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -1)), -1, 0),
    lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    lambda x: x[::-1].copy()[::-1],
    lambda x: np.concatenate([x.reshape(-1)[:1], x.reshape(-1)])[1:].reshape(x.shape) if x.size else x,
]


LARGE = 0.0002  # how many calls have large arrays, of 6 to 12 million elements


def shape_of(rng: np.random.Generator) -> tuple[int, ...]:
    """A shape of 1 to 5 axes: mostly small, sometimes with an empty axis, sometimes with up to a million elements.

    Some have few long rows. A few are so large that results are stored past the caches.
    """
    if rng.random() < LARGE:
        first, second = int(rng.integers(200_000, 250_000)), int(rng.integers(28, 50))
        return ((first, second), (second // 7, 7, first), (second, first))[int(rng.integers(3))]
    if rng.random() < 0.01:
        return int(rng.integers(1, 200)), int(rng.choice([16, 1])) * int(rng.integers(70, 600))
    axes = int(rng.integers(1, 6))
    most = rng.choice([3000, 40_000, 1_000_000], p=[0.8, 0.17, 0.03])
    sides = [int(rng.choice([rng.integers(1, 9), rng.integers(1, 80), 16, 64, 256])) for _ in range(axes)]
    while math.prod(sides) > most:
        sides[int(np.argmax(sides))] //= 2
    if rng.random() < 0.02:
        sides[int(rng.integers(axes))] = 0
    return tuple(sides)


def call(seed: int, number: int, libraries: list[str]) -> str | None:
    """What is wrong with the result of a random call; None if nothing is."""
    rng = np.random.default_rng([seed, number])
    name, dtype = str(rng.choice(list(KERNELS))), str(rng.choice(list(TOLERANCE)))
    shape, isa = shape_of(rng), str(rng.choice(_native.isas()))
    axis, threads, library = int(rng.integers(len(shape))), int(rng.integers(1, 5)), str(rng.choice(libraries))
    mask = rng.random(shape[0]) < rng.random() if rng.random() < 0.3 and axis else None
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    shift, spread = rng.choice([0.0, 3.0, -50.0]), rng.choice([1.0, 0.1])
    arguments: list[Any] = []
    for role in KERNELS[name].split():
        if role in "XGU":
            x = (rng.normal(size=shape) * spread + (shift if role == "X" else 0)).astype(stored)
            arguments.append(ARRANGEMENTS[int(rng.integers(len(ARRANGEMENTS)))](x))
        else:
            v = rng.uniform(0.5, 2, shape[axis]) if role == "variance" else rng.normal(size=shape[axis])
            arguments.append(v.astype(np.float64 if dtype == "float64" else np.float32))
    _native.force_isa(isa)
    kernels.set_num_threads(threads)
    given = [in_torch(a) for a in arguments] if library == "torch" else arguments
    given_mask = in_torch(mask) if library == "torch" and mask is not None else mask
    found = getattr(native, name)(*given, 1e-3, axis, given_mask)
    wanted = getattr(reference, name)(*arguments, 1e-3, axis, mask)
    several = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    # Cancellation: of the mean, and in the second order of products of sums.
    terms = max(1.0, abs(shift) / spread) * (8 if name.endswith("grad_grad") else 1)
    for i, (got, want) in enumerate(several):
        a, b = np.asarray(from_torch(got), np.float64), np.asarray(want, np.float64)
        size = np.abs(b[np.isfinite(b)]).max(initial=1.0)
        if b.ndim == 1:  # sums over the values of a channel, which may cancel
            size = max(size, math.sqrt(math.prod(shape) / max(shape[axis], 1)))
        if a.shape != b.shape or not np.allclose(
            a, b, TOLERANCE[dtype] * terms, TOLERANCE[dtype] * terms * size, equal_nan=True
        ):
            worst = np.abs(a - b).max() if a.shape == b.shape else math.inf
            return f"{name}[{i}] {dtype} {shape} axis {axis} {isa} {threads} threads {library} mask {mask is not None}: {worst}"
    return None


def row_call(seed: int, number: int, libraries: list[str]) -> str | None:
    """As `call`, for a kernel on rows."""
    rng = np.random.default_rng([seed, number])
    lengths = rng.integers(
        0, rng.choice([2, 9, 70]), int(rng.choice([0, 1, 7, 300, 5000], p=[0.05, 0.1, 0.5, 0.3, 0.05]))
    )
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    dtype, isa = str(rng.choice(ROW_DTYPES)), str(rng.choice(_native.isas()))
    library, threads = str(rng.choice(libraries)), int(rng.integers(1, 5))
    inner = () if rng.random() < 0.5 else (int(rng.choice([0, 1, 2, 3, 5, 8, 17, 70])),)
    x = rng.integers(-100, 100, (int(splits[-1]), *inner)).astype(dtype)
    if np.dtype(dtype).kind == "f":
        x += rng.normal(size=x.shape).astype(dtype)
    x = ARRANGEMENTS[int(rng.integers(len(ARRANGEMENTS)))](x) if x.ndim and x.size else x
    index = rng.integers(0, max(len(lengths), 1), int(rng.integers(0, 50)) if len(lengths) else 0)
    starts, bounds = reference.row_bounds(splits, index)
    count = int(bounds[-1])
    order = rng.permutation(len(index)) if rng.random() < 0.5 else np.arange(len(index))
    blocks = starts[order], np.diff(bounds)[order], bounds[:-1][order]
    default = x.dtype.type(1) if rng.random() < 0.5 or not inner else np.arange(inner[0]).astype(dtype)
    calls: dict[str, tuple[Any, ...]] = {
        "take_rows": (x, starts, bounds),
        "pad_rows": (x, default, splits, len(lengths) + int(rng.integers(3)), int(rng.choice([0, 1, 5, 8, 40, 90]))),
        "place_rows": (x, default, *blocks, count + int(rng.integers(5))),
        "add_rows": (x, *blocks, count + 2),
        "row_sum": (x, splits),
        "row_max": (x, splits),
        "row_softmax": (x, splits),
        "row_bounds": (splits, index),
        "longest_row": (splits.astype(rng.choice(["int32", "int64"])),),
        "all_below": (index, int(rng.integers(0, 300))),
    }
    name = str(rng.choice([name for name in calls if np.dtype(dtype).name in native.DTYPES[name] or "row_b" in name]))
    arguments = calls[name]
    _native.force_isa(isa)
    _native.set_part_bytes(int(rng.choice([64, 4096, 4 << 20])))
    kernels.set_num_threads(threads)
    is_tensor = library == "torch" and arguments[0] is x and dtype not in ("uint16", "uint32", "uint64")
    found = getattr(native, name)(*([in_torch(x), *arguments[1:]] if is_tensor else arguments))
    with np.errstate(all="ignore"):
        wanted = getattr(reference, name)(*arguments)
    several = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for got, want in several:
        a, b = np.asarray(got if isinstance(got, (np.ndarray, int, bool)) else got.numpy()), np.asarray(want)
        exact = np.dtype(dtype).kind in "iu" or name in ("take_rows", "pad_rows", "place_rows", "row_max")
        close = np.array_equal(a, b) if exact else np.allclose(a, b, 2e-5, 2e-4, equal_nan=True)
        if a.shape != b.shape or not close:
            return f"{name} {dtype} {x.shape} {len(lengths)} rows {isa} {threads} threads {library}"
    return None


ROW_DTYPES = ["float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def in_torch(x: np.ndarray) -> Any:
    """A tensor over the memory of `x`, which torch may have to copy."""
    import torch

    x = x if all(step >= 0 for step in x.strides) else x.copy()
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def from_torch(x: Any) -> np.ndarray:
    """A result as a NumPy array."""
    if isinstance(x, np.ndarray):
        return x
    return np.asarray(x.double().numpy())


def main() -> int:
    """Run as many calls as the arguments say; the number of results that differ decides the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calls", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--numpy", action="store_true", help="no tensors of torch")
    options = parser.parse_args()
    numbers = range(options.calls) if options.only is None else [options.only]
    wrong = 0
    for number in numbers:
        run = row_call if number % 2 else call
        problem = run(options.seed, number, ["numpy"] if options.numpy else ["numpy", "torch"])
        if problem is not None:
            wrong += 1
            print(f"call {number}: {problem}", flush=True)
    print(f"{len(numbers)} calls, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
