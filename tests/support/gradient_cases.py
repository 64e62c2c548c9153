"""A small program for every op that has a gradient, in any array library: what the tests of gradients go through.

A program takes arrays of one library and returns one or more of them. `jit` says whether JAX can compile it, `orders` how many
orders of derivatives are tested. tools/ops_table.py writes from here what docs/ops.md says of gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from weft import VariantArray, raw_ops
from weft.core.arrays import asarray, dtype_of, library_of
from weft.core.op import TABLE
from weft.norm import derivatives
from weft.norm.derivatives import Mode
from weft.ragged import rows as row_ops

rng = np.random.default_rng(7)
FRAMEWORKS = ["torch", "jax", "autograd"]
#: Their gradient says that nothing flows.
CONSTANT = {"RaggedRange"}

OUTER, INNER = np.array([0, 2, 2, 5]), np.array([0, 1, 4, 4, 6, 7])
FLAT, FULL = np.array([0, 3, 3, 4, 7]), np.array([0, 3, 4, 7])
MASK = np.array([True, False, True])
EPSILON = 0.01


class Case(NamedTuple):
    """A program, the arrays it is tried with, and the ops it goes through."""

    program: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    ops: tuple[str, ...]
    jit: bool = True
    orders: int = 2


CASES: dict[str, Case] = {}


def case(*shapes: tuple[int, ...], ops: list[str], positive: int | None = None, **more: Any) -> Any:
    """Make a function a case with random arrays of these shapes; the one at `positive` holds variances."""

    def define(program: Callable[..., Any]) -> Callable[..., Any]:
        arrays = [rng.normal(size=shape) for shape in shapes]
        if positive is not None:
            arrays[positive] = rng.uniform(0.5, 2, shapes[positive])
        CASES[program.__name__] = Case(program, tuple(arrays), tuple(ops), **more)
        return program

    return define


def differentiable() -> set[str]:
    """The names of the ops that have a gradient, internal ones too."""
    return {op.name for op in TABLE.values() if op.gradient is not None} - CONSTANT


def orders_of(op: str) -> int:
    """How many orders of an op's derivatives are tested."""
    return max((case.orders for case in CASES.values() if op in case.ops), default=0)


def compiles(op: str) -> bool:
    """Whether an op runs under `jax.jit`."""
    return any(case.jit for case in CASES.values() if op in case.ops)


def like(x: Any, value: np.ndarray) -> Any:
    """A constant beside `x`; numbers have its dtype."""
    library = library_of(x) or "numpy"
    if library == "autograd":
        return value
    return asarray(value, library, None if value.dtype == bool else x.dtype)


def several(result):
    return tuple(result) if isinstance(result, list) else (result,)


def squared(program):
    """The program's results squared, so that the second derivative is not zero where it is linear."""
    return lambda *arrays: tuple(y * y for y in several(program(*arrays)))


def total(program):
    """The number that `cubes` makes of all that a program returns."""
    return lambda *arrays: cubes(several(program(*arrays)))


def cubes(results):
    """A number made of arrays, not linear in any of them; each entry weighs differently."""
    return sum((weights(y) * (y * y * y + y)).sum() for y in results)


def weights(y):
    return like(y, np.resize([-1.7, -0.7, 0.3, 1.3, 2.3], y.shape))


# --- batching: the chain of a lone caller ---


@case((3, 2), (3, 4), ops=["Batch"], jit=False)
def batch(x, y):
    made = raw_ops.Batch([x, y], 1, 4, 0, 0, allowed_batch_sizes=[4])
    return [z[:3] for z in made.batched_tensors]  # no gradient flows through the padding


@case((4, 2), ops=["Unbatch"], jit=False)
def unbatch(x):
    return raw_ops.Unbatch(x, np.array([[5, 1, 2]]), np.array(5), 0)


@case((3, 2), ops=["UnbatchGrad"], jit=False)
def unbatch_grad(x):
    return raw_ops.UnbatchGrad(like(x, np.ones((3, 2))), np.array([[5, 0, 3]]), x, np.array(5))


@case((3, 2), (3, 2), ops=["Batch", "Unbatch"], jit=False)
def chain(x, y):
    made = raw_ops.Batch([x, y], 1, 4, 0, 0, allowed_batch_sizes=[4])
    p, q = made.batched_tensors
    return raw_ops.Unbatch(p * q * q, made.batch_index, made.id, 0)


# --- batch norm ---

LAYOUTS = {"NHWC": (2, 2, 3, 3), "NCHW": (2, 3, 2, 2), "NDHWC": (2, 1, 2, 1, 3), "NCDHW": (2, 3, 1, 2, 1)}


def batch_norm_cases(version: str, data_format: str, is_training: bool) -> None:
    """The op and its Grad op, in one layout; in training the Grad op comes after the forward op, whose statistics it takes."""
    shape, rest = LAYOUTS[data_format], {"epsilon": EPSILON, "data_format": data_format, "is_training": is_training}
    forward, backward = getattr(raw_ops, f"FusedBatchNorm{version}"), getattr(raw_ops, f"FusedBatchNormGrad{version}")
    name = f"_{version or 'V1'}_{data_format}_{'training' if is_training else 'inference'}"

    def statistics(scale):
        vectors = np.linspace(-1, 1, 3), np.linspace(0.5, 2, 3)
        return [like(scale, v) for v in vectors]

    def fused(x, scale, offset):
        return forward(x, scale, offset, *statistics(scale), **rest).y

    def grad(g, x, scale):
        used = forward(x, scale, scale, *statistics(scale), **rest)
        reserve = [used.reserve_space_1, used.reserve_space_2] + ([used.reserve_space_3] if version == "V3" else [])
        return list(backward(g, x, scale, *reserve, **rest)[:3])

    fused.__name__, grad.__name__ = f"batch_norm{name}", f"batch_norm_grad{name}"
    order = 3 if version == "V3" and data_format in ("NHWC", "NCHW") else 2
    case(shape, (3,), (3,), ops=[forward.name], orders=order)(fused)
    case(shape, shape, (3,), ops=[forward.name, backward.name], orders=order)(grad)


for training in (True, False):
    for layout in LAYOUTS:
        batch_norm_cases("V3", layout, training)
    for version in ("", "V2"):
        batch_norm_cases(version, "NHWC", training)


@case((3, 3, 2), (3,), (3,), ops=["_BatchNorm"], orders=3)
def masked(x, scale, offset):
    return derivatives.batch_norm(x, scale, offset, None, None, like(x, MASK), Mode(EPSILON, 1, True)).y


@case((3, 3, 2), (3, 3, 2), (3,), ops=["_BatchNorm", "_BatchNormGrad"], orders=3)
def masked_grad(g, x, scale):
    mask = like(x, MASK)
    used = derivatives.batch_norm(x, scale, scale, None, None, mask, Mode(EPSILON, 1, True))
    return list(derivatives.batch_norm_grad(g, x, scale, *used[1:], mask, Mode(EPSILON, 1, True)))


@case(*[(3, 3, 2)] * 2, (3,), (3, 3, 2), (3,), (3,), ops=["_BatchNormGradGrad"])
def masked_second(g, x, scale, u, a, b):
    mask = like(x, MASK)
    return list(derivatives.batch_norm_grad_grad(g, x, scale, scale, scale, mask, u, a, b, Mode(EPSILON, 1, True)))


GLOBAL = (2, 2, 1, 3), (3,), (3,), (3,), (3,)


@case(*GLOBAL, ops=["BatchNormWithGlobalNormalization"], positive=2)
def normalized(t, m, v, beta, gamma):
    return raw_ops.BatchNormWithGlobalNormalization(t, m, v, beta, gamma, EPSILON, True)


@case(*GLOBAL[:4], GLOBAL[0], ops=["BatchNormWithGlobalNormalizationGrad"], positive=2)
def normalized_grad(t, m, v, gamma, backprop):
    return list(raw_ops.BatchNormWithGlobalNormalizationGrad(t, m, v, gamma, backprop, EPSILON, True))


# --- ragged ---


@case((7, 2), ops=["RaggedTensorToVariant", "RaggedTensorFromVariant"])
def variants(x):
    """Rows gathered, reordered, dropped and used twice."""
    v = raw_ops.RaggedTensorToVariant([OUTER, INNER], x, True)
    picked = VariantArray.stack([v[2], v[0], v[0]])
    return raw_ops.RaggedTensorFromVariant(picked, 1, 2, dtype_of(x)).output_dense_values


@case((7, 2), ops=["RaggedTensorToVariantGradient"])
def variants_gradient(x):
    v = raw_ops.RaggedTensorToVariant([FLAT], x, True)
    mixed = VariantArray([v[0], None, v[2], None])
    return raw_ops.RaggedTensorToVariantGradient(mixed, FLAT, (7, 2), dtype_of(x))


@case((7, 2), (1,), ops=["RaggedTensorToTensor"])
def to_tensor(x, default):
    kinds = ["ROW_SPLITS"] * 2
    return raw_ops.RaggedTensorToTensor(np.array([2, 2, 2, 2]), x, default, [OUTER, INNER], kinds)


@case((7, 2), ops=["RaggedTensorToSparse"])
def to_sparse(x):
    return raw_ops.RaggedTensorToSparse([OUTER, INNER], x).sparse_values


@case((7,), (), ops=["RaggedFillEmptyRows"])
def fill_rows(x, default):
    ids = np.array([4, 1, 1, 2, 0, 6, 6])
    return raw_ops.RaggedFillEmptyRows(ids, x, np.array(8), default).output_values


@case((7,), ops=["RaggedFillEmptyRowsGrad"])
def fill_rows_grad(x):
    back = raw_ops.RaggedFillEmptyRowsGrad(np.array([1, 2, 5]), x)
    return back.d_values * back.d_default_value


@case((7, 2), ops=["RaggedGather"])
def gather(x):
    return raw_ops.RaggedGather([OUTER, INNER], x, np.array([[2, 0], [2, 1]]), 3).output_dense_values


@case((7, 2), ops=["SplitRows", "JoinRows"])
def rows(x):
    parts = row_ops.split_rows(x, FLAT)
    return row_ops.join_rows([parts[0] * 2, parts[3]], np.array([0, 3, 6]))


@case((3, 2), ops=["UnstackRows", "StackRows"])
def stacked(x):
    a, b, c = row_ops.unstack_rows(x)
    return row_ops.stack_rows([c, a * b])


@case((7, 2), (2,), ops=["PlaceRows", "AddRows"])
def placed(x, default):
    starts, lengths, targets = np.array([0, 2]), np.array([3, 4]), np.array([1, 5])
    return row_ops.add_rows(row_ops.place_rows(x, default, starts, lengths, targets, 10), targets, lengths, starts, 7)


@case((7, 2), ops=["TakeRows"])
def rows_taken(x):
    return row_ops.take_rows(x, np.array([4, 0, 3]), np.array([0, 3, 5, 8]))


@case((7, 2), (2,), ops=["PadRows"])
def rows_padded(x, default):
    return row_ops.pad_rows(x, default, np.array([0, 3, 3, 7]), 4, 3)


@case((7, 2), (3, 2), ops=["RowSum", "RepeatRows", "RowMax"])
def reduced(x, y):
    return [row_ops.row_sum(x * row_ops.repeat_rows(y, FULL), FULL), row_ops.row_max(x, FULL)]


@case((7, 2), ops=["RowSoftmax"])
def softmax(x):
    return row_ops.row_softmax(x, FULL)


# --- TensorArray ---


@case((2, 3), ops=["TensorArrayWriteV3", "TensorArrayReadV3"])
def written(x):
    handle, flow = raw_ops.TensorArrayV3(2, dtype_of(x), clear_after_read=False)
    flow = raw_ops.TensorArrayWriteV3(handle, 0, x[0], flow)
    first = raw_ops.TensorArrayReadV3(handle, 0, flow, dtype_of(x))
    flow = raw_ops.TensorArrayWriteV3(handle, 1, first * x[1], flow)
    return raw_ops.TensorArrayReadV3(handle, 1, flow, dtype_of(x)) * first


@case((3, 2), ops=["TensorArrayScatterV3", "TensorArrayGatherV3"])
def scattered(x):
    handle, flow = raw_ops.TensorArrayV3(4, dtype_of(x), clear_after_read=False)
    flow = raw_ops.TensorArrayScatterV3(handle, [3, 0, 1], x, flow)
    return raw_ops.TensorArrayGatherV3(handle, [1, 3, 1], flow, dtype_of(x))


@case((5, 2), ops=["TensorArraySplitV3", "TensorArrayConcatV3"])
def split(x):
    handle, flow = raw_ops.TensorArrayV3(3, dtype_of(x), clear_after_read=False)
    flow = raw_ops.TensorArraySplitV3(handle, x, [2, 0, 3], flow)
    return raw_ops.TensorArrayConcatV3(handle, flow, dtype_of(x)).value


#: One case of each family, for what costs much.
FEW = frozenset(["chain", "batch_norm_V3_NHWC_training", "masked_grad", "variants", "placed", "written"])
#: Cases that are another one in an older version or a rarer layout: what a framework is told of them is the same.
TWINS = frozenset(name for name in CASES if re.search("V1|V2|DHW", name))
