"""How exact is fused batch norm in float32, against TensorFlow and PyTorch? The largest error against float64, as a table."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Iterator

import numpy as np

from weft import raw_ops

EPSILON = 1e-3
CHANNELS = 4


def inputs() -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for power in (12, 16, 20):
        noise = rng.normal(size=(2**power, 1, 1, CHANNELS))
        yield f"2^{power}, mean 0", noise.astype(np.float32)
        yield f"2^{power}, mean 1000", (noise + 1000).astype(np.float32)
        yield f"2^{power}, mixed scales", (noise * np.exp(rng.normal(size=noise.shape) * 3)).astype(np.float32)


def exact(x: np.ndarray, g: np.ndarray) -> list[np.ndarray]:
    x, g = x.astype(np.float64), g.astype(np.float64)
    mean, variance = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
    r = 1 / np.sqrt(variance + EPSILON)
    normal = (x - mean) * r
    scale_grad, offset_grad = (g * normal).sum(axis=(0, 1, 2)), g.sum(axis=(0, 1, 2))
    x_grad = r * (g - offset_grad / len(x) - normal * scale_grad / len(x))
    return [normal, mean, variance, x_grad, scale_grad, offset_grad]


def with_weft(x: np.ndarray, g: np.ndarray) -> list[np.ndarray]:
    ones, zeros = np.ones(CHANNELS, np.float32), np.zeros(CHANNELS, np.float32)
    f = raw_ops.FusedBatchNormV3(x, ones, zeros, zeros[:0], zeros[:0], epsilon=EPSILON)
    reserves = f.reserve_space_1, f.reserve_space_2, f.reserve_space_3
    b = raw_ops.FusedBatchNormGradV3(g, x, ones, *reserves, epsilon=EPSILON)
    return [f.y, f.reserve_space_1, f.reserve_space_2, *b[:3]]


def with_tensorflow(x: np.ndarray, g: np.ndarray) -> list[np.ndarray]:
    import tensorflow as tf

    ones, zeros, none = tf.ones(CHANNELS), tf.zeros(CHANNELS), tf.zeros(0)
    f = tf.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=zeros, mean=none, variance=none, epsilon=EPSILON)
    reserves = {f"reserve_space_{i}": getattr(f, f"reserve_space_{i}") for i in (1, 2, 3)}
    b = tf.raw_ops.FusedBatchNormGradV3(y_backprop=g, x=x, scale=ones, epsilon=EPSILON, **reserves)
    return [t.numpy() for t in (f.y, f.reserve_space_1, f.reserve_space_2, *b[:3])]


def with_torch(x: np.ndarray, g: np.ndarray) -> list[np.ndarray]:
    import torch

    x, g = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (x, g))
    ones, zeros = torch.ones(CHANNELS), torch.zeros(CHANNELS)
    y, mean, r = torch.ops.aten.native_batch_norm(x, ones, zeros, None, None, True, 0.1, EPSILON)
    b = torch.ops.aten.native_batch_norm_backward(g, x, ones, None, None, mean, r, True, EPSILON, [True] * 3)
    back = [y.permute(0, 2, 3, 1), mean, 1 / r.double() ** 2 - EPSILON, b[0].permute(0, 2, 3, 1), b[1], b[2]]
    return [t.numpy() for t in back]


def main() -> None:
    sides = {"weft": with_weft, "TensorFlow": with_tensorflow, "PyTorch": with_torch}
    print(
        "| elements, data | | y | mean | variance | x gradient | scale gradient | offset gradient |\n"
        + "|---" * 8
        + "|"
    )
    for name, x in inputs():
        g = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
        truth = exact(x, g)
        # Errors in y and x's gradient are absolute in units of their spread; the others are relative to the data's.
        units = [1.0, 1.0, truth[2], 1 / np.sqrt(truth[2]), np.sqrt(len(x)), np.sqrt(len(x))]
        for side, run in sides.items():
            errors = [np.abs((a - b) / u).max() for a, b, u in zip(run(x, g), truth, units, strict=True)]
            print(f"| {name} | {side} | " + " | ".join(f"{e:.1e}" for e in errors) + " |")


if __name__ == "__main__":
    main()
