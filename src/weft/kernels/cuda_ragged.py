"""Row kernels on CUDA, in Triton: rows gathered, padded, placed, repeated and reduced, each in one launch.

Values are seen as rows of `width` numbers. Splits stay on the host, with a copy on the device that is made without waiting for it;
kernels find the row of a value by a binary search in that copy. What these kernels do not take, the reference does.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..core.arrays import library_of
from ..core.torch_internals import stream_handle
from ..core.torch_split import point_now
from ..errors import FailedPreconditionError
from . import reference
from .cuda_launch import INTERPRETED, Launcher, launcher_of

_MOVED = frozenset(["float16", "bfloat16", "float32", "float64", "int32", "int64"])
_FLOATS = frozenset(["float16", "bfloat16", "float32", "float64"])
DTYPES = {
    "take_rows": _MOVED, "pad_rows": _MOVED, "place_rows": _MOVED, "add_rows": _FLOATS, "repeat_rows": _MOVED,
    "row_sum": _FLOATS, "row_max": _FLOATS, "row_softmax": _FLOATS,
}  # fmt: skip

_jit = triton.jit(
    do_not_specialize=["limit", "rows", "count", "columns"],
    do_not_specialize_on_alignment=["splits", "starts", "lengths", "default"],
)


#: Results of so many rows need 64 bits for the numbers of rows.
LARGE = 1 << 31


def accepts(x: Any) -> bool:
    """True if the kernels can process `x`: offsets fit 32 bits, and a row is not so long that CUDA refuses the grid."""
    return bool(x.ndim >= 1 and 0 < x.numel() < min(1 << 31, x.shape[0] << 22))


# --- moving rows ---


@triton.jit
def _row_of(splits, position, count, STEPS: tl.constexpr):
    """The last row that begins at or before each position, of `count` rows; -1 if there is none."""
    low = tl.zeros_like(position) - 1
    high = tl.zeros_like(position) + count
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_open = high - low > 1
        begins = tl.load(splits + middle, mask=is_open & (middle >= 0), other=0)
        is_before = begins <= position
        low = tl.where(is_open & is_before, middle, low)
        high = tl.where(is_open & ~is_before, middle, high)
    return low


@_jit
def _move(
    values, out, default, splits, starts, lengths, limit, rows, count, columns,
    WIDTH: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write BR rows of BC numbers: each is a row of `values`, or the default.

    KIND: "take" (splits are those of the result), "place" (splits are the targets), "pad" (to `columns`), "repeat". WIDE: 0 if the
    numbers of rows and columns fit 32 bits, 1 if those of rows do not, 2 if neither do.
    """
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    row = program * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    is_row = row < rows
    if KIND == "pad":
        of = row // columns
        k = row % columns
        begin = tl.load(splits + of, mask=is_row & (of < count), other=0)
        end = tl.load(splits + of + 1, mask=is_row & (of < count), other=0)
        source = begin + k
        is_there = is_row & (of < count) & (source < end)
    else:
        of = _row_of(splits, row, count, STEPS)
        k = row - tl.load(splits + of, mask=is_row & (of >= 0), other=0)
        if KIND == "repeat":
            source = of.to(tl.int64)
            is_there = is_row
        else:
            source = tl.load(starts + of, mask=is_row & (of >= 0), other=0) + k
            is_there = is_row & (of >= 0)
            if KIND == "place":
                is_there = is_there & (k < tl.load(lengths + of, mask=is_there, other=0))
    is_there = is_there & (source >= 0) & (source < limit)  # whatever the splits hold
    is_column = column < WIDTH
    moved = tl.load(
        values + source.to(tl.int64)[:, None] * WIDTH + column[None, :],
        mask=is_there[:, None] & is_column[None, :],
        other=0,
    )
    if (KIND == "pad" or KIND == "place") and not ZERO:
        other = tl.load(default + column, mask=is_column, other=0)
        moved = tl.where(is_there[:, None], moved, other[None, :])
    tl.store(
        out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], moved, mask=is_row[:, None] & is_column[None, :]
    )


# --- reducing rows ---


@triton.jit
def _rows_here(splits, limit, rows, BR: tl.constexpr):
    """The BR rows of this program, which of them exist, and where they begin and end, whatever the splits hold."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    is_row = row < rows
    begin = tl.maximum(tl.load(splits + row, mask=is_row, other=0), 0)
    end = tl.minimum(tl.load(splits + row + 1, mask=is_row, other=0), limit)
    return row, is_row, begin, end


@triton.jit
def _cells(begin, end, first, column, WIDTH: tl.constexpr, BL: tl.constexpr):
    """Where the numbers of BL values of each row lie, from value `first` on, and which of them exist."""
    at = begin[:, None] + first + tl.arange(0, BL)[None, :]
    is_there = (at < end[:, None])[:, :, None] & (column < WIDTH)[None, None, :]
    return at[:, :, None] * WIDTH + column[None, None, :], is_there


@triton.jit
def _larger(a, b):
    """The larger of two numbers; not a number if one of them is not."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@_jit
def _reduce(
    values, out, splits, limit, rows,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Reduce BR rows, in steps of BL values of BC numbers. KIND: "sum" or "max"."""
    row, is_row, begin, end = _rows_here(splits, limit, rows, BR)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    longest = tl.max(end - begin, 0)
    wide = tl.float64 if values.dtype.element_ty == tl.float64 else tl.float32
    lowest = -float("inf")
    total = tl.zeros([BR, BC], wide) + (0.0 if KIND == "sum" else lowest)
    for first in range(0, longest, BL):
        where, is_there = _cells(begin, end, first, column, WIDTH, BL)
        if KIND == "sum":
            total += tl.sum(tl.load(values + where, mask=is_there, other=0.0).to(wide), 1)
        else:
            found = tl.load(values + where, mask=is_there, other=lowest).to(wide)
            total = _larger(total, tl.reduce(found, 1, _larger))
    target = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out + target, total.to(out.dtype.element_ty), mask=is_row[:, None] & (column < WIDTH)[None, :])


@_jit
def _softmax(
    values, out, splits, limit, rows,
    WIDTH: tl.constexpr, ONCE: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The softmax of BR rows, in steps of BL values of BC numbers; ONCE if every row has at most BL values."""
    _row, _is_row, begin, end = _rows_here(splits, limit, rows, BR)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    wide = tl.float64 if values.dtype.element_ty == tl.float64 else tl.float32
    lowest = -float("inf")
    if ONCE:
        where, is_there = _cells(begin, end, 0, column, WIDTH, BL)
        found = tl.load(values + where, mask=is_there, other=lowest).to(wide)
        e = tl.where(is_there, tl.exp(found - tl.max(found, 1)[:, None, :]), 0.0)
        result = e / tl.sum(e, 1)[:, None, :]
        tl.store(out + where, result.to(out.dtype.element_ty), mask=is_there)
    else:
        longest = tl.max(end - begin, 0)
        most = tl.zeros([BR, BC], wide) + lowest
        for first in range(0, longest, BL):
            where, is_there = _cells(begin, end, first, column, WIDTH, BL)
            most = tl.maximum(most, tl.max(tl.load(values + where, mask=is_there, other=lowest).to(wide), 1))
        total = tl.zeros([BR, BC], wide)
        for first in range(0, longest, BL):
            where, is_there = _cells(begin, end, first, column, WIDTH, BL)
            found = tl.load(values + where, mask=is_there, other=lowest).to(wide)
            total += tl.sum(tl.where(is_there, tl.exp(found - most[:, None, :]), 0.0), 1)
        for first in range(0, longest, BL):
            where, is_there = _cells(begin, end, first, column, WIDTH, BL)
            found = tl.load(values + where, mask=is_there, other=lowest).to(wide)
            result = tl.exp(found - most[:, None, :]) / total[:, None, :]
            tl.store(out + where, result.to(out.dtype.element_ty), mask=is_there)


# --- how they are launched ---

_launchers: dict[Any, Launcher] = {}


def _launch(
    kernel: Any, grid: tuple[int, int, int], pointers: tuple[Any, ...], numbers: tuple[int, ...],
    constants: tuple[Any, ...],
) -> None:  # fmt: skip
    """Launch a kernel; `constants` are its compile-time parameters."""
    values = pointers[0]  # the others are aligned, and their dtypes follow from its
    if INTERPRETED:
        kernel[grid](*pointers, *numbers, *constants)
        return
    device = values.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(kernel, grid, pointers, numbers, constants)
        return
    key = (kernel.__name__, device, values.dtype, constants)
    found = _launchers.get(key)
    if found is not None and values.data_ptr() % 16 == 0:
        addresses = [x if x is None else x.data_ptr() for x in pointers]
        found(grid, stream_handle(device.index), *addresses, *numbers, *constants)
        return
    launcher = launcher_of(kernel[grid](*pointers, *numbers, *constants, num_warps=4))
    if launcher is not None and values.data_ptr() % 16 == 0:
        _launchers[key] = launcher


class _Copy:
    """Host numbers on a device, and the longest row if they are splits."""

    def __init__(self, x: np.ndarray, device: Any) -> None:
        self.tensor = torch.from_numpy(np.ascontiguousarray(x, np.int64).copy())
        if device.type == "cuda":  # without waiting for the device
            if torch.cuda.is_current_stream_capturing():  # a replay would copy from memory that is free by then
                raise FailedPreconditionError(
                    "the splits of a ragged tensor must be on the device before a CUDA graph is captured: run the same operation "
                    "on the same ragged tensor once before the capture"
                )
            self.tensor = self.tensor.pin_memory().to(device, non_blocking=True)
        self._when = point_now(device)
        self._longest: int | None = None

    def here(self) -> Any:
        """The tensor, for the current stream."""
        if self._when is not None and not self._when.is_here() and not torch.cuda.is_current_stream_capturing():
            self._when.wait([self.tensor])  # a capture begins once the device has done all its work
        return self.tensor

    def longest(self, splits: np.ndarray) -> int:
        if self._longest is None:
            self._longest = int(np.diff(splits).max(initial=0))
        return self._longest


_copies: dict[tuple[int, Any], tuple[Any, _Copy]] = {}


def _on_device(x: np.ndarray, device: Any) -> _Copy:
    """A copy of host numbers on the device, kept as long as read-only numbers live."""
    key = (id(x), device)
    found = _copies.get(key)
    if found is not None and found[0]() is x:
        return found[1]
    copy = _Copy(x, device)
    base: Any = x.base
    if not x.flags.writeable and (base is None or type(base) is bytes):
        _copies[key] = weakref.ref(x, lambda _: _copies.pop(key, None)), copy
    return copy


def _power_of_2(n: int) -> int:
    """The least power of 2 that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def _width(values: Any) -> int:
    return math.prod(values.shape[1:])


#: A program reduces so many numbers at a time: the more of them there are, the more.
FEWEST, MOST = 1024, 4096


def _tile_of(width: int, length: float, size: int) -> tuple[int, int, int]:
    """Rows, values of a row and numbers of a value that a program reduces at a time, of `size` numbers in all."""
    numbers = min(_power_of_2(width), 128)
    values = min(_power_of_2(max(int(length), 1)), max(1, 4096 // numbers))
    elements = min(max(_power_of_2(size >> 10), FEWEST), MOST)
    return max(1, elements // (numbers * values)), values, numbers


def _moved(
    values: Any, rows: int, kind: str, splits: np.ndarray, count: int, *, columns: int = 1, default: Any = None,
    starts: np.ndarray | None = None, lengths: np.ndarray | None = None,
) -> Any:  # fmt: skip
    device = values.device
    values = values.contiguous()
    width = _width(values)
    out = values.new_empty((rows, *values.shape[1:]))
    if not rows:
        return out
    numbers = min(_power_of_2(width), 1024)
    block = max(1, 2048 // numbers)
    steps = max(count, 1).bit_length() + 1
    steps = 4 * -(-steps // 4)  # few compiled kernels for many lengths
    constants = (width, kind, default is None, steps, (rows >= LARGE) + (columns >= LARGE), block, numbers)
    others = [None if x is None else _on_device(x, device).here() for x in (splits, starts, lengths)]
    grid = (-(-rows // block), -(-width // numbers), 1)
    _launch(_move, grid, (values, out, default, *others), (values.shape[0], rows, count, columns), constants)
    return out


def _default(values: Any, default: Any) -> Any:
    """The default as one row; None for zeros."""
    if isinstance(default, (bool, int, float)) and default == 0:
        return None
    if library_of(default) == "torch":
        default = default.detach()
    row = torch.as_tensor(default, dtype=values.dtype, device=values.device)
    return row.expand(values.shape[1:]).contiguous()


# --- the kernels ---


def take_rows(values: Any, starts: np.ndarray, bounds: np.ndarray) -> Any:
    """See `reference.take_rows`."""
    return _moved(values, int(bounds[-1]), "take", bounds, len(starts), starts=starts)


def pad_rows(values: Any, default: Any, splits: np.ndarray, rows: int, columns: int) -> Any:
    """See `reference.pad_rows`."""
    count = min(len(splits) - 1, rows)
    return _moved(values, rows * columns, "pad", splits, count, columns=columns, default=_default(values, default))


def place_rows(
    values: Any, default: Any, starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray, rows: int
) -> Any:
    """See `reference.place_rows`."""
    if not _are_apart(lengths, targets):
        return reference.place_rows(values, default, starts, lengths, targets, rows)
    is_used = lengths > 0
    if not is_used.all():
        starts, lengths, targets = starts[is_used], lengths[is_used], targets[is_used]
    return _moved(
        values, rows, "place", targets, len(targets), default=_default(values, default), starts=starts, lengths=lengths
    )


def add_rows(values: Any, starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray, rows: int) -> Any:
    """See `reference.add_rows`."""
    if _are_apart(lengths, targets):
        return place_rows(values, 0, starts, lengths, targets, rows)
    return reference.add_rows(values, starts, lengths, targets, rows)


def _are_apart(lengths: np.ndarray, targets: np.ndarray) -> bool:
    """True if the rows at `targets` ascend and do not overlap."""
    return bool((targets[:-1] + lengths[:-1] <= targets[1:]).all())


def repeat_rows(x: Any, splits: np.ndarray) -> Any:
    """See `reference.repeat_rows`."""
    return _moved(x, int(splits[-1]), "repeat", splits, len(splits) - 1)


def row_sum(values: Any, splits: np.ndarray) -> Any:
    """See `reference.row_sum`."""
    return _reduced(values, splits, "sum")


def row_max(values: Any, splits: np.ndarray) -> Any:
    """See `reference.row_max`."""
    return _reduced(values, splits, "max")


def _reduced(values: Any, splits: np.ndarray, kind: str) -> Any:
    values, rows = values.contiguous(), len(splits) - 1
    out = values.new_empty((rows, *values.shape[1:]))
    if rows:
        length = int(splits[-1] - splits[0]) / rows
        _by_rows(_reduce, values, out, _on_device(splits, values.device).here(), length, lambda _: kind)
    return out


def row_softmax(values: Any, splits: np.ndarray) -> Any:
    """See `reference.row_softmax`."""
    values = values.contiguous()
    out = torch.empty_like(values)
    if len(splits) > 1:
        copy = _on_device(splits, values.device)
        longest = copy.longest(splits)
        _by_rows(_softmax, values, out, copy.here(), longest, lambda values: longest <= values)
    return out


def _by_rows(kernel: Any, values: Any, out: Any, splits: Any, length: float, kind: Callable[[int], Any]) -> None:
    """Launch a kernel on rows of about this length; `kind` tells which one by the values of a row that a program has at a time."""
    rows, width = splits.shape[0] - 1, _width(values)
    block, step, numbers = _tile_of(width, length, values.numel())
    constants = (width, kind(step), block, step, numbers)
    grid = (-(-rows // block), -(-width // numbers), 1)
    _launch(kernel, grid, (values, out, splits), (values.shape[0], rows), constants)
