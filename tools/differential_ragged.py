"""Draws random programs of ragged ops and compares weft with a live TensorFlow.

    python tools/differential_ragged.py --programs 20000 --seed 0 [--arrays torch]

Needs TensorFlow beside weft. Inputs that are known to crash TensorFlow or make it read foreign memory are not drawn; what weft
answers on those is in the tests. Prints each difference with the seed of its program, and exits with their number.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import arrays
import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16
import numpy as np
import tensorflow as tf

from weft import VariantArray

raw_ops = arrays.Ops("numpy")

DTYPES = ["float32", "float64", "int32", "int64", "bool", "complex64", "float16", "uint8", "string"]
DTYPES += ["bfloat16", "int8", "int16", "uint16", "uint32", "uint64", "complex128"]


def main() -> int:
    """Run the programs; the number of differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(PROGRAMS), help="draw programs of one kind")
    parser.add_argument("--arrays", choices=arrays.LIBRARIES, default="numpy", help="what weft gets (default: numpy)")
    options = parser.parse_args()
    raw_ops.library = options.arrays
    seen: Counter[str] = Counter()
    differences = 0
    for seed in range(options.seed, options.seed + options.programs):
        rng = np.random.default_rng(seed)
        name = options.only or str(rng.choice(list(PROGRAMS)))
        try:
            problem = PROGRAMS[name](rng, seen)
        except Exception as error:
            problem = f"the program itself failed: {type(error).__name__}: {error}"
        if problem:
            differences += 1
            print(f"seed {seed}, {name}: {problem}", flush=True)
    print(
        f"{options.programs} programs, {differences} differences; "
        + ", ".join(f"{k} {v}" for k, v in sorted(seen.items()))
    )
    return min(differences, 100)


# ---- drawing


def draw_values(rng, count, inner=None, dtype=None):
    """Values of a random dtype and inner shape."""
    inner = [(), (2,), (0,), (2, 3)][rng.integers(4)] if inner is None else inner
    dtype = str(rng.choice(DTYPES)) if dtype is None else dtype
    shape = (count, *inner)
    if dtype == "string":
        out = np.empty(shape, object)
        out[...] = np.reshape([b"s%d" % i for i in range(out.size)], shape)
        return out
    if dtype == "bool":
        return rng.random(shape) > 0.5
    found = np.asarray(rng.standard_normal(shape) * 20)
    if found.size and np.dtype(dtype).kind in "fc" and rng.random() < 0.1:
        found.reshape(-1)[rng.integers(found.size)] = rng.choice([np.nan, np.inf, -0.0, 1e-40])
    return (np.abs(found) if dtype[0] == "u" else found).astype(dtype)


def draw_splits(rng, rank, rows=None, index=np.int64, spoil=0.0):
    """Nested splits, now and then broken, and how many values they partition."""
    count = int(rng.integers(0, 5)) if rows is None else rows
    nested = []
    for _ in range(rank):
        splits = np.concatenate([[0], np.cumsum(rng.integers(0, 4, count))]).astype(index)
        count = int(splits[-1])
        nested.append(splits)
    if nested and rng.random() < spoil:
        at = rng.integers(len(nested))
        kind = rng.integers(4)
        if kind == 0:
            nested[at] = nested[at][:0]
        elif kind == 1:
            nested[at] = nested[at] + 1
        elif kind == 2:
            nested[at] = nested[at].reshape(1, -1)
        else:
            nested[at] = np.append(nested[at], nested[at][-1] + rng.integers(-2, 3)).astype(index)
    return nested, count


# ---- comparing


def outcome(call):
    """What a call gave: its value, or the name of its error."""
    try:
        return "value", call()
    except Exception as error:
        return "error", type(error).__name__


def differ(name, seen, ours, theirs):
    """None when both agree, else a sentence."""
    ours, theirs = outcome(ours), outcome(theirs)
    seen[f"{name} {theirs[0]}"] += 1
    if ours[0] != theirs[0]:
        return f"{name}: weft {short(ours)}, TensorFlow {short(theirs)}"
    if ours[0] == "error":
        return None if ours[1] == theirs[1] else f"{name}: weft {ours[1]}, TensorFlow {theirs[1]}"
    return unlike(name, ours[1], theirs[1])


def unlike(name, ours, theirs):
    """How two results differ."""
    if isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{name}: {len(ours)} parts, TensorFlow {len(theirs)}"
        found = (unlike(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True)))
        return next((f for f in found if f), None)
    theirs = theirs.numpy() if hasattr(theirs, "numpy") else theirs
    ours, theirs = np.asarray(ours), np.asarray(theirs, object if isinstance(theirs, bytes) else None)
    if ours.shape != theirs.shape or (ours.dtype != theirs.dtype and theirs.dtype != object):
        return f"{name}: {ours.dtype}{ours.shape}, TensorFlow {theirs.dtype}{theirs.shape}"
    if theirs.dtype == object:
        same = [v.encode() if isinstance(v, str) else v for v in ours.ravel()] == list(theirs.ravel())
    else:
        same = np.array_equal(ours, theirs, equal_nan=theirs.dtype.kind in "fc")
    return None if same else f"{name}: {ours.tolist()}, TensorFlow {theirs.tolist()}"


def short(result):
    return str(result)[:160].replace("\n", " ")


# ---- programs


def round_trip(rng, seen):
    """Encode, move elements about, decode; each step on both sides."""
    index = [np.int32, np.int64][rng.integers(2)]
    nested, count = draw_splits(rng, int(rng.integers(0, 4)), index=index, spoil=0.3)
    values = draw_values(rng, count + int(rng.random() < 0.1) if nested else int(rng.integers(0, 5)))
    batched = bool(rng.random() < 0.7)
    mine = outcome(lambda: raw_ops.RaggedTensorToVariant(nested, values, batched))
    theirs = outcome(
        lambda: tf.raw_ops.RaggedTensorToVariant(
            rt_nested_splits=list(map(tf.constant, nested)), rt_dense_values=tf.constant(values), batched_input=batched
        )
    )
    seen[f"encode {theirs[0]}"] += 1
    if mine[0] != theirs[0] or (mine[0] == "error" and mine[1] != theirs[1]):
        return f"encode: weft {short(mine)}, TensorFlow {short(theirs)}"
    if mine[0] == "error":
        return None
    ours, other = mine[1], theirs[1]
    if tuple(other.shape) != ours.shape:
        return f"encode: shape {ours.shape}, TensorFlow {tuple(other.shape)}"
    for _ in range(rng.integers(0, 3)):
        ours, other = move(rng, ours, other)
    elements = [e for e in ours.elements() if e is not None]
    held = len(elements[0].splits) if elements else max(len(nested) - batched, 0)
    rank = held + ours.ndim if rng.random() < 0.8 else int(rng.integers(0, 4))
    given = held if rng.random() < 0.4 else -1
    dtype = values.dtype.name if values.dtype != object else "string"
    asked = dtype if rng.random() < 0.9 else "float32"
    if ours.ndim > 2 or (not ours.size and values.ndim > 1):
        return None  # TensorFlow's splits are wrong from rank 3 on; and it forgets the inner shape of nothing
    splits = np.dtype(index).name
    return differ(
        "decode",
        seen,
        lambda: raw_ops.RaggedTensorFromVariant(ours, given, rank, asked, splits),
        lambda: tf.raw_ops.RaggedTensorFromVariant(
            encoded_ragged=other, input_ragged_rank=given, output_ragged_rank=rank, Tvalues=asked, Tsplits=splits
        ),
    )


def move(rng, ours, other):
    """One step that both sides have."""
    kind = rng.integers(4)
    if not ours.shape:
        count = int(rng.integers(1, 4))
        return VariantArray.stack([ours] * count), tf.stack([other] * count)
    rows = ours.shape[0]
    if kind == 0 and rows:
        start, stop, step = int(rng.integers(rows)), int(rng.integers(rows + 1)), int(rng.choice([-1, 1, 2]))
        return ours[start:stop:step], other[start:stop:step]
    if kind == 1 and rows:
        index = rng.integers(0, rows, rng.integers(0, 4))
        return ours.gather(index), tf.gather(other, index)
    if kind == 2 and rows:
        at = int(rng.integers(rows))
        return ours[at], other[at]
    if ours.size % 2 == 0:
        return ours.reshape((2, ours.size // 2)), tf.reshape(other, (2, ours.size // 2))
    return ours, other


def gradient(rng, seen):
    """The gradient op, with filler where TensorFlow survives it."""
    nested, count = draw_splits(rng, 1, rows=int(rng.integers(0, 5)))
    dtype = str(rng.choice([d for d in DTYPES if d != "string"]))
    values = draw_values(rng, count, dtype=dtype)
    if 0 in values.shape[1:]:
        values = (
            values.reshape(count, *[1] * (values.ndim - 1)) if values.size else draw_values(rng, count, (2,), dtype)
        )
    ours = raw_ops.RaggedTensorToVariant(nested, values, True)
    other = tf.raw_ops.RaggedTensorToVariant(rt_nested_splits=nested, rt_dense_values=values, batched_input=True)
    if rng.random() < 0.5 and ours.size > 1:
        at = int(rng.integers(ours.size))
        elements = [None] * ours.size
        elements[at] = ours.elements()[at]
        ours = VariantArray(elements)
        other = tf.raw_ops.StridedSliceGrad(
            shape=[len(elements)], begin=[at], end=[at + 1], strides=[1], dy=other[at], shrink_axis_mask=1
        )
    splits = nested[0]
    if rng.random() < 0.1 and len(splits) > 1:
        splits = splits[::-1].copy()
    shape = np.asarray(values.shape, np.int32)
    return differ(
        "gradient",
        seen,
        lambda: raw_ops.RaggedTensorToVariantGradient(ours, splits, shape, dtype),
        lambda: tf.raw_ops.RaggedTensorToVariantGradient(
            encoded_ragged_grad=other, row_splits=splits, dense_values_shape=shape, Tvalues=dtype
        ),
    )


def gather(rng, seen):
    """Rows by number, loose splits and out-of-range numbers included."""
    nested, count = draw_splits(rng, int(rng.integers(1, 4)), rows=int(rng.integers(0, 4)))
    values = draw_values(rng, count + int(rng.integers(0, 2)))
    rows = len(nested[0]) - 1
    shape = tuple(rng.integers(0, 3, rng.integers(0, 3)))
    index = rng.integers(-1 if rng.random() < 0.1 else 0, max(rows, 1) + (rng.random() < 0.1), shape)
    if not rows and index.size:
        index = np.zeros((0,), np.int64)
    index = index.astype([np.int32, np.int64][rng.integers(2)])
    rank = len(nested) + index.ndim - 1
    return differ(
        "gather",
        seen,
        lambda: raw_ops.RaggedGather(nested, values, index, rank),
        lambda: tf.raw_ops.RaggedGather(
            params_nested_splits=nested, params_dense_values=tf.constant(values), indices=index, OUTPUT_RAGGED_RANK=rank
        ),
    )


def ranges(rng, seen):
    """Starts, limits and steps of every kind."""
    dtype = str(rng.choice(["int32", "int64", "float32", "float64"]))
    rows = int(rng.integers(0, 4))
    inputs = []
    for low, high in ((-9, 9), (-9, 20), (-3, 4)):
        size = () if rng.random() < 0.4 else (rows,)
        x = rng.integers(low, high, size) if "int" in dtype else rng.random(size) * (high - low) + low
        inputs.append(np.asarray(x, dtype))
    if rng.random() < 0.05:
        inputs[1] = np.full_like(inputs[1], np.inf if "float" in dtype else np.iinfo(dtype).max)
        inputs[2] = np.full_like(inputs[2], -1 if rng.random() < 0.5 else np.inf if "float" in dtype else 2**30)
    splits = str(rng.choice(["int32", "int64"]))
    return differ(
        "range",
        seen,
        lambda: raw_ops.RaggedRange(*inputs, splits),
        lambda: tf.raw_ops.RaggedRange(starts=inputs[0], limits=inputs[1], deltas=inputs[2], Tsplits=splits),
    )


def to_tensor(rng, seen):
    """Dense forms by splits and by row ids, cut and padded."""
    rank = int(rng.integers(1, 4))
    nested, count = draw_splits(rng, rank, rows=int(rng.integers(0, 4)))
    values = draw_values(rng, count)
    if rng.random() < 0.4:
        tensors, kinds = [np.asarray(len(nested[0]) - 1)], ["FIRST_DIM_SIZE"]
        for splits in nested:
            tensors.append(np.repeat(np.arange(len(splits) - 1), np.diff(splits)))
            kinds.append("VALUE_ROWIDS")
    else:
        tensors, kinds = nested, ["ROW_SPLITS"] * rank
        if rng.random() < 0.1 and len(nested[0]) > 2:
            tensors[0] = tensors[0] + 1
    size = rank + values.ndim
    shape = np.full(size, -1) if rng.random() < 0.5 else np.r_[rng.integers(-1, 4, rank + 1), [-1] * (values.ndim - 1)]
    inner = values.shape[1:]
    sizes = [[], [1], [*inner], [1] * len(inner), [2], [3]]
    default = draw_values(rng, 1, (), str(values.dtype) if values.dtype != object else "string")
    default = np.broadcast_to(default.reshape(()), sizes[rng.integers(len(sizes))]).copy()
    return differ(
        "to_tensor",
        seen,
        lambda: raw_ops.RaggedTensorToTensor(shape, values, default, tensors, kinds),
        lambda: tf.raw_ops.RaggedTensorToTensor(
            shape=shape,
            values=tf.constant(values),
            default_value=tf.constant(default),
            row_partition_tensors=tensors,
            row_partition_types=kinds,
        ),
    )


def to_sparse(rng, seen):
    """Sparse coordinates."""
    nested, count = draw_splits(rng, int(rng.integers(1, 4)), spoil=0.2)
    nested = [s.reshape(-1) for s in nested]
    values = draw_values(rng, count)
    return differ(
        "to_sparse",
        seen,
        lambda: raw_ops.RaggedTensorToSparse(nested, values),
        lambda: tf.raw_ops.RaggedTensorToSparse(rt_nested_splits=nested, rt_dense_values=tf.constant(values)),
    )


def fill(rng, seen):
    """Empty rows filled, and the gradient of it."""
    rows = int(rng.integers(0, 6))
    ids = rng.integers(0 if rng.random() < 0.9 else -1, max(rows, 1) + (rng.random() < 0.1), rng.integers(0, 6))
    values = draw_values(rng, len(ids), ())
    default = values.dtype.type(1) if values.dtype != object else np.asarray(b"d", object)
    found = differ(
        "fill",
        seen,
        lambda: raw_ops.RaggedFillEmptyRows(ids, values, np.asarray(rows), default),
        lambda: tf.raw_ops.RaggedFillEmptyRows(
            value_rowids=ids, values=tf.constant(values), nrows=np.asarray(rows), default_value=tf.constant(default)
        ),
    )
    grads = rng.integers(-9, 9, rng.integers(0, 6)).astype("float32")
    where = rng.integers(0, max(len(grads), 1) + (rng.random() < 0.2), rng.integers(0, 4))
    return found or differ(
        "fill_grad",
        seen,
        lambda: raw_ops.RaggedFillEmptyRowsGrad(where, grads),
        lambda: tf.raw_ops.RaggedFillEmptyRowsGrad(reverse_index_map=where, grad_values=grads),
    )


def bincount(rng, seen):
    """Counts by row, weighted or binary."""
    (splits,), count = draw_splits(rng, 1)
    index = [np.int32, np.int64][rng.integers(2)]
    values = rng.integers(-1 if rng.random() < 0.05 else 0, 6, count).astype(index)
    dtype = str(rng.choice(["int32", "int64", "float32", "float64"]))
    weights = rng.integers(-4, 5, count if rng.random() < 0.5 else 0).astype(dtype)
    size, binary = index(rng.integers(0, 6)), bool(rng.random() < 0.3)
    return differ(
        "bincount",
        seen,
        lambda: raw_ops.RaggedBincount(splits, values, size, weights, binary),
        lambda: tf.raw_ops.RaggedBincount(
            splits=splits, values=values, size=size, weights=weights, binary_output=binary
        ),
    )


def count_sparse(rng, seen):
    """Counts by row as sparse coordinates, with broken splits that only start or end wrongly."""
    (splits,), count = draw_splits(rng, 1)
    if rng.random() < 0.1:
        splits = [splits + 1, splits[:-1], splits[:1], np.append(splits, splits[-1] + 1)][rng.integers(4)]
    index = [np.int32, np.int64][rng.integers(2)]
    values = rng.integers(-1 if rng.random() < 0.05 else 0, int(rng.choice([2, 6, 2**31 - 1])), count).astype(index)
    dtype = str(rng.choice(["int32", "int64", "float32", "float64", "float16"], p=[0.24, 0.24, 0.24, 0.24, 0.04]))
    weights = (rng.standard_normal(count if rng.random() < 0.6 else 0) * 9).astype(dtype)
    if rng.random() < 0.1:
        weights = [weights[1:], weights.reshape(-1, 1), np.append(weights, weights)][rng.integers(3)]
    if rng.random() < 0.2:
        values, weights = (x.reshape(1, -1) for x in (values, weights))
    attributes = {"binary_output": bool(rng.random() < 0.3)}
    for name in ("minlength", "maxlength"):
        if rng.random() < 0.5:
            attributes[name] = int(rng.integers(-2 if rng.random() < 0.1 else -1, 9))
    return differ(
        "count_sparse",
        seen,
        lambda: raw_ops.RaggedCountSparseOutput(splits, values, weights, **attributes),
        lambda: tf.raw_ops.RaggedCountSparseOutput(
            splits=tf.constant(splits), values=tf.constant(values), weights=tf.constant(weights), **attributes
        ),
    )


def cross(rng, seen):
    """Crosses of all kinds of input, as text and hashed."""
    batch = int(rng.integers(1, 4))
    inputs = {k: [] for k in ("ragged_values", "ragged_row_splits", "sparse_indices", "sparse_values", "sparse_shape")}
    inputs["dense_inputs"] = []
    order = "".join(rng.choice(list("RSD"), rng.integers(1, 4)))
    for letter in order:
        rows = batch if rng.random() < 0.95 else batch + 1
        if letter == "D":
            inputs["dense_inputs"].append(items(rng, rows * 2).reshape(rows, 2))
            continue
        (splits,), count = draw_splits(rng, 1, rows=rows)
        if letter == "R":
            inputs["ragged_values"].append(items(rng, count))
            inputs["ragged_row_splits"].append(splits)
        else:
            ids = np.repeat(np.arange(rows), np.diff(splits))
            inputs["sparse_indices"].append(np.stack([ids, np.arange(count)], 1).reshape(-1, 2))
            inputs["sparse_values"].append(items(rng, count))
            inputs["sparse_shape"].append(np.array([rows, 9]))
    hashed = bool(rng.random() < 0.5)
    attributes = {
        "input_order": order,
        "hashed_output": hashed,
        "num_buckets": int(rng.choice([0, 1, 100])),
        "hash_key": int(rng.integers(0, 2**40)),
        "out_values_type": "int64" if hashed else "string",
        "out_row_splits_type": "int64",
    }
    theirs = {k: [tf.constant(x) for x in v] for k, v in inputs.items()}
    return differ(
        "cross",
        seen,
        lambda: raw_ops.RaggedCross(**inputs, **attributes),
        lambda: tf.raw_ops.RaggedCross(**theirs, **attributes),
    )


def items(rng, count):
    """What can be crossed: numbers or text, some of it long."""
    if rng.random() < 0.5:
        return rng.integers(-(2**40), 2**40, count)
    out = np.empty(count, object)
    out[:] = [
        bytes(rng.integers(97, 123, int(rng.choice([0, 1, 5, 20, 40, 90, 200]))).astype(np.uint8)) for _ in range(count)
    ]
    return out


PROGRAMS = {
    f.__name__: f
    for f in (round_trip, gradient, gather, ranges, to_tensor, to_sparse, fill, bincount, count_sparse, cross)
}


if __name__ == "__main__":
    sys.exit(main())
