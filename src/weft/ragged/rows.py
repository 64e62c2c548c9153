"""Internal ops on rows that the ragged ops are built from: split, join, move and reduce. Each one's gradient is another one.

They take host splits that were checked before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels
from ..core.arrays import Array, dtype_of, index_like, library_of, namespace
from ..core.op import gradient, op
from ..kernels.splits import Splits, positions
from .inputs import empty_text


@op("SplitRows", internal=True)
def split_rows(values: Array, splits: Array) -> list[Array]:
    """The rows of `values`, all cut in one autodiff node."""
    return kernels.best("split_rows", values)(values, splits)


@gradient(split_rows)
def split_rows_gradient(g: list[Array], splits: Splits) -> dict[str, Array]:
    return {"values": join_rows(g, splits)}


@op("JoinRows", internal=True)
def join_rows(rows: list[Array], splits: Array) -> Array:
    """`rows`, of which there is at least one, one below the other; `splits` are their bounds."""
    return kernels.best("join_rows", rows[0])(rows)


@gradient(join_rows)
def join_rows_gradient(g: Array, splits: Splits) -> dict[str, Any]:
    return {"rows": split_rows(g, splits)}


@op("UnstackRows", internal=True)
def unstack_rows(values: Array) -> list[Array]:
    """`values[0], values[1], ...`, all cut in one autodiff node."""
    return kernels.best("unstack_rows", values)(values)


@gradient(unstack_rows)
def unstack_rows_gradient(g: list[Array]) -> dict[str, Array]:
    return {"values": stack_rows(g)}


@op("StackRows", internal=True)
def stack_rows(rows: list[Array]) -> Array:
    """`rows`, of which there is at least one and all of one shape, along a new first axis."""
    return kernels.best("stack_rows", rows[0])(rows)


@gradient(stack_rows)
def stack_rows_gradient(g: Array) -> dict[str, Any]:
    return {"rows": unstack_rows(g)}


@op("TakeRows", internal=True)
def take_rows(values: Array, starts: Array, bounds: Array) -> Array:
    """The rows of `values` that begin at `starts`, one after the other; `bounds` are their splits in the result.

    They may overlap.
    """
    return kernels.best("take_rows", values)(values, starts, bounds)


@gradient(take_rows)
def take_rows_gradient(g: Array, values: Array, starts: Splits, bounds: Splits) -> dict[str, Array]:
    return {"values": add_rows(g, bounds[:-1], np.diff(bounds), starts, values.shape[0])}


@op("PadRows", internal=True)
def pad_rows(values: Array, default: Array | None, splits: Array, rows: int, columns: int) -> Array:
    """`rows` rows of `columns` values, one below the other: the rows of `splits`, cut, or padded with `default`.

    `default` broadcasts to one value, None is zero.
    """
    if default is None:
        default = _zero(values)
    return kernels.best("pad_rows", values)(values, default, splits, rows, columns)


@gradient(pad_rows)
def pad_rows_gradient(
    g: Array, values: Array, default: Array | None, splits: Splits, rows: int, columns: int
) -> dict[str, Array]:
    count = min(len(splits) - 1, rows)
    starts, lengths = np.arange(count) * columns, np.diff(splits[: count + 1])
    if count == len(splits) - 1 and splits[-1] == values.shape[0] and lengths.max(initial=0) <= columns:
        back = {"values": take_rows(g, starts, splits)}  # no value was cut off
    else:
        lengths = np.minimum(lengths, columns)
        back = {"values": add_rows(g, starts, lengths, splits[:count], values.shape[0])}
    if default is not None:
        back["default"] = padding_sum(g, np.minimum(lengths, columns), starts, default.shape)
    return back


@op("PlaceRows", internal=True)
def place_rows(values: Array, default: Array | None, starts: Array, lengths: Array, targets: Array, rows: int) -> Array:
    """`rows` rows, row `targets[i] + k` being `values[starts[i] + k]` for `k < lengths[i]`, all others `default`.

    Targets must not overlap; the rows that are read may. `default` broadcasts to one row, None is zero.
    """
    if default is None:
        default = _zero(values)
    return kernels.best("place_rows", values)(values, default, starts, lengths, targets, rows)


@gradient(place_rows)
def place_rows_gradient(
    g: Array, values: Array, default: Array | None, starts: Splits, lengths: Splits, targets: Splits, rows: int
) -> dict[str, Array]:
    back = {"values": add_rows(g, targets, lengths, starts, values.shape[0])}
    if default is not None:
        back["default"] = padding_sum(g, lengths, targets, default.shape)
    return back


def _zero(values: Array) -> Any:
    return empty_text(values) if dtype_of(values) == "string" else 0


def padding_sum(g: Array, lengths: Splits, targets: Splits, shape: tuple[int, ...]) -> Array:
    """The sum of the rows of `g` that no target covers, reduced to `shape`, which broadcasts to one row."""
    padding = np.ones(g.shape[0], bool)
    padding[positions(targets, lengths)] = False
    library = library_of(g) or "numpy"
    index = index_like(np.flatnonzero(padding), library)
    xp = namespace(library)
    rows = g[index]
    if library == "torch" and dtype_of(g) in ("uint16", "uint32", "uint64"):  # torch does not add them
        total = row_sum(rows, np.array([0, rows.shape[0]]))[0]
    else:
        total = xp.sum(rows, axis=0, dtype=g.dtype)
    if total.shape == tuple(shape):
        return total
    whole = (1,) * (total.ndim - len(shape)) + tuple(shape)
    axes = tuple(i for i, size in enumerate(whole) if size == 1)
    return xp.reshape(xp.sum(total, axis=axes, keepdims=True, dtype=g.dtype), tuple(shape))


@op("AddRows", internal=True)
def add_rows(values: Array, starts: Array, lengths: Array, targets: Array, rows: int) -> Array:
    """`rows` rows of zeros, with `values[starts[i] + k]` added to row `targets[i] + k` for `k < lengths[i]`.

    No row of `values` is read twice; targets may overlap.
    """
    return kernels.best("add_rows", values)(values, starts, lengths, targets, rows)


@gradient(add_rows)
def add_rows_gradient(g: Array, values: Array, starts: Splits, lengths: Splits, targets: Splits) -> dict[str, Array]:
    return {"values": place_rows(g, None, targets, lengths, starts, values.shape[0])}


@op("RowSum", internal=True)
def row_sum(values: Array, splits: Array) -> Array:
    """The sum of every row; zero for an empty row."""
    return kernels.best("row_sum", values)(values, splits)


@gradient(row_sum)
def row_sum_gradient(g: Array, splits: Splits) -> dict[str, Array]:
    return {"values": repeat_rows(g, splits)}


@op("RepeatRows", internal=True)
def repeat_rows(x: Array, splits: Array) -> Array:
    """Row `i` of `x` once for every value of row `i` of `splits`."""
    return kernels.best("repeat_rows", x)(x, splits)


@gradient(repeat_rows)
def repeat_rows_gradient(g: Array, splits: Splits) -> dict[str, Array]:
    return {"x": row_sum(g, splits)}


@op("RowMax", internal=True)
def row_max(values: Array, splits: Array) -> Array:
    """The largest value of every row; the smallest value of the dtype for an empty row."""
    return kernels.best("row_max", values)(values, splits)


@gradient(row_max)
def row_max_gradient(g: Array, values: Array, output: Array, splits: Splits) -> dict[str, Array]:
    """Values equal to the maximum share its gradient evenly."""
    xp = namespace(library_of(g) or "numpy")
    ones, zeros = xp.ones_like(values), xp.zeros_like(values)
    is_max = xp.where(values == repeat_rows(output, splits), ones, zeros)
    share = is_max / repeat_rows(row_sum(is_max, splits), splits)
    return {"values": share * repeat_rows(g, splits)}


@op("RowSoftmax", internal=True)
def row_softmax(values: Array, splits: Array) -> Array:
    """exp(value) over the sum of exp within its row, entry by entry of the inner dimensions."""
    return kernels.best("row_softmax", values)(values, splits)


@gradient(row_softmax)
def row_softmax_gradient(g: Array, output: Array, splits: Splits) -> dict[str, Array]:
    return {"values": output * (g - repeat_rows(row_sum(g * output, splits), splits))}
