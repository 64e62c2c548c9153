"""The Triton kernels of rows: gathered, padded, placed, repeated and reduced; `cuda_ragged` launches them.

Values are seen as rows of WIDTH numbers. A kernel finds the row of a value by a binary search in the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

_jit = triton.jit(
    do_not_specialize=["limit", "rows", "count", "columns"],
    do_not_specialize_on_alignment=["splits", "starts", "lengths", "default"],
)


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
def move(
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
def reduce(
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
def softmax(
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
