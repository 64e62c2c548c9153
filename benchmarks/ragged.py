"""Ragged variants and their neighbours against TensorFlow, PyTorch's jagged tensors and Awkward Array.

    python -m benchmarks.ragged --save

Every contestant holds its data in its own arrays before the clock starts. `encode`, `decode` and `gradient` are the
three variant ops on rows in one buffer; "rows of a list" builds the variant array from a Python list and takes the
gradient, where TensorFlow is given the array ready-made and only takes the gradient.
"""

from __future__ import annotations

import os
import tracemalloc
from functools import partial

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import awkward as ak
import numpy as np
import tensorflow as tf
import torch

import weft
from benchmarks.runner import Case, main, per_call
from weft import RaggedTensor, raw_ops

SIZES = {"1k": (1_000, 20, 16), "100k": (100_000, 20, 4), "1M": (1_000_000, 5, 1)}


def data(rows: int, mean: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits of Poisson lengths and float32 values."""
    rng = np.random.default_rng(0)
    splits = np.concatenate([[0], np.cumsum(rng.poisson(mean, rows))])
    shape = (int(splits[-1]), width) if width > 1 else (int(splits[-1]),)
    return splits, rng.standard_normal(shape, np.float32)


def variant_cases(size: str) -> list[Case]:
    """Encode, decode and gradient of rows in one buffer."""
    splits, values = data(*SIZES[size])
    target = {"tensorflow": 5 if size == "1k" else 100}
    t_splits, t_values = tf.constant(splits), tf.constant(values)
    shape = np.asarray(values.shape, np.int32)
    ours = raw_ops.RaggedTensorToVariant([splits], values, True)
    theirs = tf.raw_ops.RaggedTensorToVariant(rt_nested_splits=[t_splits], rt_dense_values=t_values, batched_input=True)
    decode = {"input_ragged_rank": 0, "output_ragged_rank": 1}
    return [
        Case(
            f"encode {size}",
            {
                "weft": lambda: per_call(lambda: raw_ops.RaggedTensorToVariant([splits], values, True)),
                "tensorflow": lambda: per_call(
                    lambda: tf.raw_ops.RaggedTensorToVariant(
                        rt_nested_splits=[t_splits], rt_dense_values=t_values, batched_input=True
                    )
                ),
            },
            targets=target,
        ),
        Case(
            f"decode {size}",
            {
                "weft": lambda: per_call(lambda: raw_ops.RaggedTensorFromVariant(ours, **decode, Tvalues="float32")),
                "tensorflow": lambda: per_call(
                    lambda: tf.raw_ops.RaggedTensorFromVariant(
                        encoded_ragged=theirs, **decode, Tvalues=tf.float32, Tsplits=tf.int64
                    )
                ),
            },
            targets=target,
        ),
        Case(
            f"gradient {size}",
            {
                "weft": lambda: per_call(lambda: raw_ops.RaggedTensorToVariantGradient(ours, splits, shape, "float32")),
                "tensorflow": lambda: per_call(
                    lambda: tf.raw_ops.RaggedTensorToVariantGradient(
                        encoded_ragged_grad=theirs, row_splits=t_splits, dense_values_shape=shape, Tvalues=tf.float32
                    )
                ),
            },
            targets=target,
        ),
    ]


def row_cases() -> list[Case]:
    """Every row touched on its own."""
    splits, values = data(*SIZES["1k"])
    ragged, theirs = RaggedTensor.from_row_splits(values, splits), tf.RaggedTensor.from_row_splits(values, splits)
    spec = tf.RaggedTensorSpec((None, 16), ragged_rank=0)
    many, flat = data(*SIZES["1M"])
    rows = [flat[a:b] for a, b in zip(many[:-1].tolist(), many[1:].tolist(), strict=True)]
    shape = np.asarray(flat.shape, np.int32)
    encoded = tf.raw_ops.RaggedTensorToVariant(rt_nested_splits=[many], rt_dense_values=flat, batched_input=True)
    return [
        Case(
            "map_rows 1k",
            {
                "weft": lambda: per_call(lambda: ragged.map_rows(lambda x: x * 2)),
                "tensorflow": lambda: per_call(lambda: tf.map_fn(lambda x: x * 2, theirs, fn_output_signature=spec)),
            },
            units=1_000,
            unit="rows",
            targets={"tensorflow": 1},
        ),
        Case(
            "rows of a list 1M",
            {
                "weft": lambda: per_call(
                    lambda: raw_ops.RaggedTensorToVariantGradient(weft.VariantArray(rows), many, shape, "float32")
                ),
                "tensorflow": lambda: per_call(
                    lambda: tf.raw_ops.RaggedTensorToVariantGradient(
                        encoded_ragged_grad=encoded, row_splits=many, dense_values_shape=shape, Tvalues=tf.float32
                    )
                ),
            },
            units=1_000_000,
            unit="rows",
            targets={"tensorflow": 1},
            rounds=3,
        ),
        Case(
            "4,000 rows used one by one, torch",
            {name: partial(use_rows, cut) for name, cut in CUTS.items()} | {"torch, never cut": use_leaves()},
            units=4_000,
            unit="rows",
            targets={"torch slices": 10},
            rounds=3,
        ),
        Case(
            "4,000 rows cut, gradients joined, torch",
            {name: partial(join_gradients, cut) for name, cut in CUTS.items()},
            units=4_000,
            unit="rows",
            targets={"torch slices": 10},
            rounds=3,
        ),
    ]


def weft_rows(x, splits):
    """The rows through the variant array."""
    return raw_ops.RaggedTensorToVariant([splits], x, True).rows().values


def slices(x, splits):
    """The rows as slices, each a node of its own."""
    return [x[a:b] for a, b in zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True)]


CUTS = {
    "weft": weft_rows,
    "torch slices": slices,
    "torch split": lambda x, splits: x.split(np.diff(splits).tolist()),
}


def torch_data():
    """4,000 rows of 8 x 64 in one tensor."""
    return torch.ones(32_000, 64, requires_grad=True), np.arange(4_001) * 8


def use_rows(cut) -> None:
    """Cut the rows, use each on its own, and take the gradient."""
    torch.stack([row.sum() for row in cut(*torch_data())]).sum().backward()


def use_leaves():
    """The same on rows that were never one tensor: what torch's own 4,000 sums take."""
    leaves = [torch.ones(8, 64, requires_grad=True) for _ in range(4_000)]
    return lambda: torch.stack([row.sum() for row in leaves]).sum().backward()


def join_gradients(cut) -> None:
    """Cut the rows, and take the gradient from one that each row is given."""
    x, splits = torch_data()
    torch.autograd.grad(cut(x, splits), x, COTANGENTS)


COTANGENTS = [torch.ones(8, 64)] * 4_000


def neighbour_cases(size: str) -> list[Case]:
    """Padding, gathering and reducing."""
    splits, values = data(*SIZES[size])
    rows = len(splits) - 1
    lengths = np.diff(splits)
    longest = int(lengths.max())
    index = np.random.default_rng(1).integers(0, rows, rows)
    ragged, theirs = RaggedTensor.from_row_splits(values, splits), tf.RaggedTensor.from_row_splits(values, splits)
    # torch refuses jagged tensors without an inner dimension in most places.
    inner = torch.from_numpy(values if values.ndim > 1 else values[:, None])
    jagged = torch.nested.nested_tensor_from_jagged(inner, torch.from_numpy(splits), min_seqlen=0, max_seqlen=longest)
    array = ak.unflatten(values, lengths)
    # As many rows as long as the mean: what NumPy needs to gather them, without any lengths to look up.
    equal = values[: rows * (len(values) // rows)].reshape(rows, -1)
    targets = {"tensorflow": 2, "torch": 2}
    megabytes = {"units": values.nbytes / 1e6, "unit": "MB", "targets": targets}
    default = np.float32(0)
    return [
        Case(
            f"to_padded {size}",
            {
                "weft": lambda: per_call(
                    lambda: raw_ops.RaggedTensorToTensor(-1, values, default, [splits], ["ROW_SPLITS"])
                ),
                "tensorflow": lambda: per_call(lambda: theirs.to_tensor()),
                "torch": lambda: per_call(lambda: torch.nested.to_padded_tensor(jagged, 0.0)),
                "awkward": lambda: per_call(lambda: ak.fill_none(ak.pad_none(array, longest), 0.0, axis=1)),
                "copy": lambda: per_call(lambda: np.full((rows * longest, *values.shape[1:]), 1, np.float32)),
            },
            **megabytes,
        ),
        Case(
            f"gather {size}",
            {
                "weft": lambda: per_call(lambda: raw_ops.RaggedGather([splits], values, index, 1)),
                "tensorflow": lambda: per_call(
                    lambda: tf.raw_ops.RaggedGather(
                        params_nested_splits=[theirs.row_splits],
                        params_dense_values=theirs.values,
                        indices=index,
                        OUTPUT_RAGGED_RANK=1,
                    )
                ),
                "awkward": lambda: per_call(lambda: ak.to_packed(array[index])),
                "copy": lambda: per_call(lambda: values.copy()),
                "equal rows": lambda: per_call(lambda: equal.take(index, axis=0)),
            },
            **megabytes,
        ),
        Case(
            f"row sum {size}",
            {
                "weft": lambda: per_call(lambda: ragged.sum()),
                "tensorflow": lambda: per_call(lambda: tf.reduce_sum(theirs, axis=1)),
                "torch": lambda: per_call(lambda: jagged.sum(dim=1)),
                "awkward": lambda: per_call(lambda: ak.sum(array, axis=1)),
                "copy": lambda: per_call(lambda: values.copy()),
            },
            **megabytes,
        ),
        Case(
            f"row max {size}",
            {
                "weft": lambda: per_call(lambda: ragged.max()),
                "tensorflow": lambda: per_call(lambda: tf.reduce_max(theirs, axis=1)),
                "torch": lambda: per_call(lambda: jagged.amax(dim=1)),
                "awkward": lambda: per_call(lambda: ak.max(array, axis=1)),
                "copy": lambda: per_call(lambda: values.copy()),
            },
            **megabytes,
        ),
        Case(
            f"row softmax {size}",
            {
                "weft": lambda: per_call(lambda: ragged.softmax()),
                "torch": lambda: per_call(lambda: torch.softmax(jagged, dim=1)),
            },
            **megabytes,
        ),
    ]


def memory() -> str:
    """What encoding takes beyond the values and splits it is given, by rows."""
    lines = []
    for rows in (1_000, 10_000, 100_000, 1_000_000):
        splits, values = data(rows, 5, 1)
        tracemalloc.start()
        encoded = raw_ops.RaggedTensorToVariant([splits], values, True)
        held, peak = tracemalloc.get_traced_memory()
        encoded.rows()
        cut, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        lines.append(
            f"{rows:>9,} rows, {values.nbytes:>11,} bytes of values: encode keeps {held:,} bytes, needs {peak:,} "
            f"while checking; rows cut: {cut / rows:.0f} bytes a row"
        )
    return "\n".join(lines)


def cases() -> list[Case]:
    """All cases, smallest first."""
    variants = [case for size in SIZES for case in variant_cases(size)]
    return [*variants, *row_cases(), *(case for size in SIZES for case in neighbour_cases(size))]


if __name__ == "__main__":
    print(memory() + "\n")
    main("ragged", "Ragged variants and their neighbours", cases)
