"""Batch norm on CUDA, in Triton: one launch per call, with one barrier inside.

The kernels see an array as rows of channels (channels last) or as planes, one per example and channel (channels first). Each
program has one block of channels and a run of tiles. It sums its tiles, stores the partial sums, and waits until all programs of
its channel block have stored theirs. Then each program adds all partial sums of its channels in float64, in a fixed order, so
results are reproducible, and processes its tiles again, in reverse order, because the last tiles are still in the L2 cache. A
program with one tile keeps the tile in registers. A channel block with one program needs no barrier.

Programs wait for each other, so all of them must be resident: the launch is cooperative, and the grid never exceeds the device.

The host's part of a call is short: everything that depends on shapes, dtypes and layouts is in a `_Call`, made once for all calls
of a kind, with the compiled kernel.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..errors import InvalidArgumentError

DTYPES = ("float32", "float16", "bfloat16")

#: Triton's interpreter runs one program after the other: there a call is two launches, one for the sums and one for the results.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Vectors of one number per channel may begin anywhere: one compiled kernel serves them all.
_VECTORS = [
    "scale",
    "offset",
    "mean",
    "variance",
    "old_mean",
    "old_variance",
    "new_mean",
    "new_variance",
    "dscale",
    "doffset",
]
_jit = triton.jit(do_not_specialize_on_alignment=[*_VECTORS, "mask", "zero", "parts", "gates"])


# --- how programs meet ---


@triton.jit
def _arrive(gate, member, members):
    """Note that a program has come; return what `_wait` needs.

    The programs of a channel block add 2^31 to the gate in all: its top bit changes when the last one comes, and the other bits are
    zero again.
    """
    tl.debug_barrier()
    if member == 0:
        step = 2147483647 - members + 2
    else:
        step = members * 0 + 1
    return tl.atomic_add(gate, step, sem="acq_rel")


@triton.jit
def _wait(gate, came):
    """Wait until all programs of a channel block have come."""
    while ((tl.atomic_add(gate, 0, sem="acquire") ^ came) & -2147483648) == 0:
        pass
    tl.debug_barrier()


# --- tiles ---


@triton.jit
def _tile(number, block, total, channels, inner, FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Where tile `number` of a channel block lies: its first element, the offsets from there, which elements exist, and the
    example of each row.

    Channels last: BR rows of BC channels. Channels first: BR examples of BC elements of one channel's plane.
    """
    row = tl.arange(0, BR)
    column = tl.arange(0, BC)
    wide = tl.zeros([], tl.int64) + number  # offsets within a tile fit 32 bits, those of tiles may not
    if FIRST:
        across = tl.cdiv(inner, BC)
        example = (number // across) * BR + row
        at = (number % across) * BC + column
        base = (wide // across) * BR * channels * inner + block * inner
        offsets = row[:, None] * (channels * inner) + at[None, :]
        exists = (example < total)[:, None] & (at < inner)[None, :]
    else:
        index = number * BR + row
        at = block * BC + column
        base = wide * BR * channels
        offsets = row[:, None] * channels + at[None, :]
        exists = (index < total)[:, None] & (at < channels)[None, :]
        example = index // inner
    return base, offsets, exists, example


@triton.jit
def _counted(exists, example, mask, examples, MASKED: tl.constexpr):
    """Which elements count: those that exist, in rows that the mask has."""
    if MASKED:
        return exists & (tl.load(mask + example, mask=example < examples, other=0) != 0)[:, None]
    else:
        return exists


@triton.jit
def _count(
    number, example, mask, total, inner, FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr
):
    """How many elements of each channel of a tile count."""
    if FIRST:
        across = tl.cdiv(inner, BC)
        width = tl.minimum(BC, inner - (number % across) * BC)
        height = tl.minimum(BR, total - (number // across) * BR)
        if MASKED:
            height = tl.sum((tl.load(mask + example, mask=example < total, other=0) != 0).to(tl.int32), 0)
        return (width * height + tl.zeros([], tl.int32)).to(tl.float32)
    else:
        height = tl.minimum(BR, total - number * BR)
        if MASKED:
            exists = number * BR + tl.arange(0, BR) < total
            height = tl.sum((tl.load(mask + example, mask=exists, other=0) != 0).to(tl.int32), 0)
        return (height + tl.zeros([], tl.int32)).to(tl.float32)


@triton.jit
def _total(tile, FIRST: tl.constexpr):
    """The sum of each channel of a tile: a vector, or one number where the tile has one channel."""
    if FIRST:
        return tl.sum(tl.sum(tile, 0), 0)
    else:
        return tl.sum(tile, 0)


@triton.jit
def _spread(vector, FIRST: tl.constexpr):
    """A number per channel, broadcast over a tile."""
    if FIRST:
        return vector
    else:
        return vector[None, :]


@triton.jit
def _columns(block, channels, FIRST: tl.constexpr, BC: tl.constexpr):
    """The channels of a block, and which of them exist."""
    if FIRST:
        return block, block < channels
    else:
        columns = block * BC + tl.arange(0, BC)
        return columns, columns < channels


@triton.jit
def _tiles_of(member, members, all_tiles):
    """How many tiles a member has: tile `member`, then every one `members` later, so that neighbours are read at the same time."""
    return (all_tiles - member + members - 1) // members


@triton.jit
def _part(parts, which, member, block, members, channels, FIRST: tl.constexpr, BC: tl.constexpr):
    """One of the three numbers per channel that each member stored, in float64."""
    if FIRST:
        where = (member * 3 + which) * channels + block
        exists = member < members
    else:
        column = block * BC + tl.arange(0, BC)
        where = ((member * 3 + which) * channels)[:, None] + column[None, :]
        exists = (member < members)[:, None] & (column < channels)[None, :]
    return tl.load(parts + where, mask=exists, other=0.0, cache_modifier=".cg").to(tl.float64)


@triton.jit
def _counts(
    parts, member, block, members, channels, total, all_tiles,
    FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """How many elements of each channel the members have counted."""
    if FIRST or MASKED:
        return _part(parts, 2, member, block, members, channels, FIRST, BC)
    else:
        missing = tl.where(member == (all_tiles - 1) % members, all_tiles * BR - total, 0)
        rows = tl.where(member < members, _tiles_of(member, members, all_tiles) * BR - missing, 0)
        return rows.to(tl.float64)[:, None]


@triton.jit
def _zeros(FIRST: tl.constexpr, BC: tl.constexpr, M: tl.constexpr):
    if FIRST:
        return tl.zeros([M], tl.float64)
    else:
        return tl.zeros([M, BC], tl.float64)


@triton.jit
def _added(parts, which, block, members, channels, FIRST: tl.constexpr, BC: tl.constexpr, M: tl.constexpr):
    """The sum over all members of one of their partial results, in float64."""
    result = _zeros(FIRST, BC, M)
    for start in range(0, members, M):
        result += _part(parts, which, start + tl.arange(0, M), block, members, channels, FIRST, BC)
    return tl.sum(result, 0)


@triton.jit
def _merged(
    parts, block, members, channels, total, inner, all_tiles,
    FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The count, the mean and the sum of squared distances from it, of all members' parts."""
    n = _zeros(FIRST, BC, M)
    s = _zeros(FIRST, BC, M)
    q = _zeros(FIRST, BC, M)
    for start in range(0, members, M):
        member = start + tl.arange(0, M)
        mean = _part(parts, 0, member, block, members, channels, FIRST, BC)
        square = _part(parts, 1, member, block, members, channels, FIRST, BC)
        count = _counts(parts, member, block, members, channels, total, all_tiles, FIRST, BR, BC, MASKED)
        if MASKED:
            n += count
            mean = tl.where(count > 0, mean, 0.0)
            square = tl.where(count > 0, square, 0.0)
        weighted = count * mean
        s += weighted
        q += square + weighted * mean
    if MASKED:
        n = tl.sum(n, 0)
    else:
        n = tl.zeros([], tl.float64) + (total * inner if FIRST else total)
    s = tl.sum(s, 0) / n
    q = tl.sum(q, 0) - n * s * s
    return n, s, tl.where(q < 0.0, 0.0, q)  # not `maximum`, which turns NaN into 0


# --- training, forward ---


@_jit
def _forward(
    x, y, scale, offset, mean, variance, mask, old_mean, old_variance, new_mean, new_variance, zero, parts, gates,
    keep, share, corrected, epsilon, total, channels, inner, all_tiles, members,
    FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, M: tl.constexpr, KEEP: tl.constexpr, SINGLE: tl.constexpr,
    MASKED: tl.constexpr, UPDATE: tl.constexpr, PHASE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """UPDATE: 1 if the batch's statistics replace the old ones, 2 if they are blended, 0 for neither."""
    blocks = channels if FIRST else tl.cdiv(channels, BC)
    block = tl.program_id(0) % blocks
    member = tl.program_id(0) // blocks
    columns, are_there = _columns(block, channels, FIRST, BC)
    tiles = _tiles_of(member, members, all_tiles)
    gain = tl.load(scale + columns, mask=are_there, other=0.0).to(tl.float64)
    beta = _spread(tl.load(offset + columns, mask=are_there, other=0.0).to(tl.float32), FIRST)
    examples = total if FIRST else total // inner
    if PHASE != 2:
        own_base, own_offsets, own_exists, own_example = _tile(member, block, total, channels, inner, FIRST, BR, BC)
        own_counts = _counted(own_exists, own_example, mask, examples, MASKED)
        kept = tl.load(x + own_base + own_offsets, mask=own_counts, other=0.0).to(tl.float32)
        count = _count(member, own_example, mask, total, inner, FIRST, BR, BC, MASKED)
        # Numbers near their mean lose nothing when their squares are added.
        shift = _total(kept, FIRST) / tl.maximum(count, 1.0)
        shift = tl.where(tl.abs(shift) < float("inf"), shift, 0.0)
        sums = tl.where(own_counts, kept - _spread(shift, FIRST), 0.0)
        squares = sums * sums
        if not KEEP:
            for step in tl.range(1, tiles, num_stages=STAGES):
                number = member + step * members
                base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC)
                counts = _counted(exists, example, mask, examples, MASKED)
                values = tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32)
                there = _count(number, example, mask, total, inner, FIRST, BR, BC, MASKED)
                if MASKED:  # noqa: SIM102
                    if count == 0.0:
                        shift = _total(values, FIRST) / tl.maximum(there, 1.0)
                        shift = tl.where(tl.abs(shift) < float("inf"), shift, 0.0)
                count += there
                distance = tl.where(counts, values - _spread(shift, FIRST), 0.0)
                sums += distance
                squares += distance * distance
        part = _total(sums, FIRST)
        safe = tl.maximum(count, 1.0)
        rest = _total(squares, FIRST) - part * (part / safe)
        if SINGLE:
            n = tl.zeros([], tl.float64) + count
            s = part.to(tl.float64) / safe + shift
            s = tl.where(n > 0, s, s / n)  # nothing counts: not a number
            q = tl.where(rest < 0.0, 0.0, rest).to(tl.float64)
        else:
            at = parts + member * 3 * channels + columns
            tl.store(at, shift + part / safe, mask=are_there)
            tl.store(at + channels, rest, mask=are_there)
            if FIRST or MASKED:
                tl.store(at + 2 * channels, count + tl.zeros_like(part), mask=are_there)
            if PHASE == 0:
                _wait(gates + block, _arrive(gates + block, member, members))
    if PHASE != 1:
        if not SINGLE:
            n, s, q = _merged(parts, block, members, channels, total, inner, all_tiles, FIRST, BR, BC, M, MASKED)
        rounded = (q / n).to(tl.float32)
        high = s.to(tl.float32)
        if member == 0:
            tl.store(mean + columns, high, mask=are_there)
            tl.store(variance + columns, rounded, mask=are_there)
            if UPDATE == 1:
                tl.store(new_mean + columns, high * share, mask=are_there)
                tl.store(new_variance + columns, rounded * corrected, mask=are_there)
            if UPDATE == 2:
                before = tl.load(old_mean + columns, mask=are_there, other=0.0)
                tl.store(new_mean + columns, before * keep + high * share, mask=are_there)
                before = tl.load(old_variance + columns, mask=are_there, other=0.0)
                tl.store(new_variance + columns, before * keep + rounded * corrected, mask=are_there)
            if UPDATE:
                tl.store(zero, 0.0, mask=block == 0)
        factor = _spread((gain / tl.sqrt(rounded.to(tl.float64) + epsilon)).to(tl.float32), FIRST)
        low = s - high.to(tl.float64)
        low = _spread(tl.where(low == low, low, 0.0).to(tl.float32), FIRST)
        high = _spread(high, FIRST)
        if KEEP and PHASE == 0:
            result = tl.where(own_counts, ((kept - high) - low) * factor + beta, 0.0)
            tl.store(y + own_base + own_offsets, result.to(y.dtype.element_ty), mask=own_exists)
        else:
            for step in tl.range(0, tiles, num_stages=STAGES):
                number = member + (tiles - 1 - step) * members
                base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC)
                counts = _counted(exists, example, mask, examples, MASKED)
                values = tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32)
                result = ((values - high) - low) * factor + beta
                tl.store(y + base + offsets, tl.where(counts, result, 0.0).to(y.dtype.element_ty), mask=exists)


# --- gradient ---


@_jit
def _backward(
    g, x, dx, scale, mean, variance, dscale, doffset, mask, parts, gates,
    epsilon, total, channels, inner, all_tiles, members,
    FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, M: tl.constexpr, KEEP: tl.constexpr, SINGLE: tl.constexpr,
    MASKED: tl.constexpr, TRAINING: tl.constexpr, PHASE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = channels if FIRST else tl.cdiv(channels, BC)
    block = tl.program_id(0) % blocks
    member = tl.program_id(0) // blocks
    columns, are_there = _columns(block, channels, FIRST, BC)
    tiles = _tiles_of(member, members, all_tiles)
    centre = tl.load(mean + columns, mask=are_there, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.load(variance + columns, mask=are_there, other=0.0).to(tl.float64) + epsilon)
    gain = tl.load(scale + columns, mask=are_there, other=0.0).to(tl.float64) * r
    factor = _spread(gain.to(tl.float32), FIRST)
    examples = total if FIRST else total // inner
    if PHASE != 2:
        own_base, own_offsets, own_exists, own_example = _tile(member, block, total, channels, inner, FIRST, BR, BC)
        own_counts = _counted(own_exists, own_example, mask, examples, MASKED)
        sums = tl.load(g + own_base + own_offsets, mask=own_counts, other=0.0).to(tl.float32)
        kept_x = tl.load(x + own_base + own_offsets, mask=own_counts, other=0.0).to(tl.float32)
        kept_x = tl.where(own_counts, kept_x - _spread(centre, FIRST), 0.0)
        kept_g = sums
        products = sums * kept_x
        count = 0.0
        if MASKED:
            count = _count(member, own_example, mask, total, inner, FIRST, BR, BC, MASKED)
        if not TRAINING:
            result = tl.where(own_counts, kept_g * factor, 0.0)
            tl.store(dx + own_base + own_offsets, result.to(dx.dtype.element_ty), mask=own_exists)
        if not KEEP:
            for step in tl.range(1, tiles, num_stages=STAGES):
                number = member + step * members
                base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC)
                counts = _counted(exists, example, mask, examples, MASKED)
                slope = tl.load(g + base + offsets, mask=counts, other=0.0).to(tl.float32)
                values = tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32)
                values = tl.where(counts, values - _spread(centre, FIRST), 0.0)
                if MASKED:
                    count += _count(number, example, mask, total, inner, FIRST, BR, BC, MASKED)
                sums += slope
                products += slope * values
                if not TRAINING:
                    result = tl.where(counts, slope * factor, 0.0)
                    tl.store(dx + base + offsets, result.to(dx.dtype.element_ty), mask=exists)
        part = _total(sums, FIRST)
        of_products = _total(products, FIRST)
        if SINGLE:
            of_g = part.to(tl.float64)
            of_gx = of_products.to(tl.float64)
            number_of = tl.zeros([], tl.float64) + count
        else:
            at = parts + member * 3 * channels + columns
            tl.store(at, part, mask=are_there)
            tl.store(at + channels, of_products, mask=are_there)
            if MASKED:
                tl.store(at + 2 * channels, count + tl.zeros_like(part), mask=are_there)
            if PHASE == 0:
                came = _arrive(gates + block, member, members)
                if TRAINING:
                    _wait(gates + block, came)
                else:
                    if member == 0:
                        _wait(gates + block, came)
    if PHASE != 1:
        if TRAINING:
            if not SINGLE:
                of_g = _added(parts, 0, block, members, channels, FIRST, BC, M)
                of_gx = _added(parts, 1, block, members, channels, FIRST, BC, M)
            if MASKED:
                if not SINGLE:
                    number_of = _added(parts, 2, block, members, channels, FIRST, BC, M)
            else:
                number_of = tl.zeros([], tl.float64) + (total * inner if FIRST else total)
            if member == 0:
                tl.store(doffset + columns, of_g.to(tl.float32), mask=are_there)
                tl.store(dscale + columns, (of_gx * r).to(tl.float32), mask=are_there)
            mean_g = _spread((of_g / number_of).to(tl.float32), FIRST)
            slant = _spread((of_gx / number_of * r * r).to(tl.float32), FIRST)
            if KEEP and PHASE == 0:
                result = tl.where(own_counts, factor * (kept_g - mean_g - kept_x * slant), 0.0)
                tl.store(dx + own_base + own_offsets, result.to(dx.dtype.element_ty), mask=own_exists)
            else:
                for step in tl.range(0, tiles, num_stages=STAGES):
                    number = member + (tiles - 1 - step) * members
                    base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC)
                    counts = _counted(exists, example, mask, examples, MASKED)
                    slope = tl.load(g + base + offsets, mask=counts, other=0.0).to(tl.float32)
                    values = tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32)
                    values = values - _spread(centre, FIRST)
                    result = factor * (slope - mean_g - values * slant)
                    tl.store(dx + base + offsets, tl.where(counts, result, 0.0).to(dx.dtype.element_ty), mask=exists)
        else:
            if member == 0:
                if not SINGLE:
                    of_g = _added(parts, 0, block, members, channels, FIRST, BC, M)
                    of_gx = _added(parts, 1, block, members, channels, FIRST, BC, M)
                tl.store(doffset + columns, of_g.to(tl.float32), mask=are_there)
                tl.store(dscale + columns, (of_gx * r).to(tl.float32), mask=are_there)


# --- inference, forward ---


@_jit
def _inference(
    x, y, scale, offset, mean, variance, mask,
    epsilon, total, channels, inner, all_tiles, members,
    FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    blocks = channels if FIRST else tl.cdiv(channels, BC)
    block = tl.program_id(0) % blocks
    member = tl.program_id(0) // blocks
    columns, are_there = _columns(block, channels, FIRST, BC)
    spread = tl.load(variance + columns, mask=are_there, other=0.0).to(tl.float64) + epsilon
    factor = _spread((tl.load(scale + columns, mask=are_there, other=0.0) / tl.sqrt(spread)).to(tl.float32), FIRST)
    centre = _spread(tl.load(mean + columns, mask=are_there, other=0.0), FIRST)
    beta = _spread(tl.load(offset + columns, mask=are_there, other=0.0), FIRST)
    for number in range(member, all_tiles, members):
        base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC)
        counts = _counted(exists, example, mask, total if FIRST else total // inner, MASKED)
        result = (tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32) - centre) * factor + beta
        tl.store(y + base + offsets, tl.where(counts, result, 0.0).to(y.dtype.element_ty), mask=exists)


# --- how a call is planned ---


class Plan(NamedTuple):
    """The grid of a call: `members` programs for each of `blocks` channel blocks, each with up to `tiles` tiles."""

    channels_first: bool
    total: int  # rows; examples where channels come first
    channels: int
    inner: int  # rows of an example; elements of a plane where channels come first
    tiles: int
    all_tiles: int  # of a channel block
    members: int
    blocks: int
    tile: tuple[int, int]
    warps: int
    registers: int


def _shape_of(size: int, item: int, channels: int, channels_first: bool, is_forward: bool) -> tuple[int, int, int, int]:
    """How to cut an array of so many elements of so many bytes; measured on an H200 (docs/cuda.md).

    Returns the columns and the elements of a tile, the warps of a program, and the programs on a multiprocessor.
    """
    if channels_first:
        return (0, 4096, 4, 4) if item == 2 else (0, 8192 if is_forward else 4096, 8, 2)
    if (
        channels <= 64
    ):  # few channel blocks, each with many programs: the fewer of them, the sooner their sums are added
        return 32, 16384 if item == 2 and is_forward else 8192, 16, 1
    if size * item > 150 << 20 or item == 2:
        return 64, 16384 if is_forward or item == 2 else 8192, 16, 1
    return 64 if channels >= 1024 else 32, 8192 if is_forward else 4096, 8, 2


def _plan(shape: tuple[int, ...], channels_first: bool, item: int, device: int, is_forward: bool) -> Plan:
    """The grid for an array of this shape, with channels second or last, and items of so many bytes."""
    size, channels = math.prod(shape), shape[1 if channels_first else -1]
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 2
    columns, most, warps, per_sm = _shape_of(size, item, channels, channels_first, is_forward)
    resident = triton.next_power_of_2(-(-size // (sms * per_sm)))  # what each program has to do, if it does it at once
    elements = max(resident, 1024) if resident <= 8192 else most
    if channels_first:
        total, inner, blocks = shape[0], math.prod(shape[2:]), channels
        columns = min(triton.next_power_of_2(inner), 1024)
        rows = max(1, min(elements // columns, triton.next_power_of_2(total)))
        all_tiles = -(-total // rows) * -(-inner // columns)
    else:
        total, inner = size // channels, max(size // channels // shape[0], 1)
        columns = min(triton.next_power_of_2(channels), columns)
        blocks = -(-channels // columns)
        if total * columns <= 16384 and device >= 0:  # one program needs no barrier
            elements, warps = triton.next_power_of_2(total) * columns, 16 if total * columns > 4096 else 4
        rows = max(1, elements // columns)
        all_tiles = -(-total // rows)
    members = min(max(sms * per_sm // blocks, 1), all_tiles)
    tiles = -(-all_tiles // members)
    registers = min(65536 // (warps * 32 * per_sm), 255)
    return Plan(
        channels_first, total, channels, inner, tiles, all_tiles, members, blocks, (rows, columns), warps, registers
    )


def _layout(x: Any, axis: int) -> str:
    """Where the channels of `x` are in its memory: "last", "first" (second, as in NCHW), or neither: "other"."""
    if x.movedim(axis, -1).is_contiguous():
        return "last"
    return "first" if axis == 1 and x.is_contiguous() else "other"


#: How many tiles are loaded ahead.
STAGES = 1


class _Call:
    """All calls of a kernel with arrays of one shape, dtype and layout."""

    def __init__(self, kernel: Any, x: Any, axis: int, is_masked: bool, options: dict[str, Any]) -> None:
        axis %= x.ndim
        self.layout = _layout(x, axis)
        self.axis = axis
        if self.layout == "other":
            return
        self.device = x.device.index if x.is_cuda else -1
        shape = tuple(x.shape) if self.layout == "first" else tuple(x.movedim(axis, -1).shape)
        self.kernel, self._own = kernel, {"MASKED": is_masked, **options}
        self._use(_plan(shape, self.layout == "first", x.element_size(), self.device, kernel is not _backward))

    def _use(self, plan: Plan) -> None:
        self.plan = plan
        rows, columns = plan.tile
        self.sizes = (plan.total, plan.channels, plan.inner, plan.all_tiles, plan.members)
        self.options = {"FIRST": plan.channels_first, "BR": rows, "BC": columns, **self._own}
        if self.kernel is not _inference:
            self.options |= {
                "M": min(triton.next_power_of_2(plan.members), 128 if columns <= 64 or plan.channels_first else 32),
                "KEEP": plan.tiles == 1, "SINGLE": plan.members == 1, "PHASE": 0, "STAGES": STAGES,
            }  # fmt: skip
        # In the order of the kernel's parameters: a compiled kernel takes them so.
        self.constants = tuple(self.options[name] for name in self.kernel.arg_names if name in self.options)
        self.numbers = 3 * plan.members * plan.channels
        self.grid = (plan.blocks * plan.members, 1, 1)
        self.run: Any = None

    def launch(self, pointers: tuple[Any, ...], floats: tuple[float, ...], aligned: bool) -> None:
        """Launch the kernel; `pointers` are tensors, or None."""
        if _INTERPRETED:
            for phase in (1, 2) if self.options.get("SINGLE") is False else (0,):
                options = self.options | ({"PHASE": phase} if "PHASE" in self.options else {})
                self.kernel[self.grid](*pointers, *floats, *self.sizes, **options)
            return
        if self.run is not None and aligned:
            self.run(*[x if x is None else x.data_ptr() for x in pointers], *floats, *self.sizes, *self.constants)
            return
        options = {"num_warps": self.plan.warps, **self.options}
        if "PHASE" in options:
            options |= {"launch_cooperative_grid": self.plan.members > 1, "maxnreg": self.plan.registers}
        try:
            compiled = self.kernel[self.grid](*pointers, *floats, *self.sizes, **options)
        except RuntimeError as error:
            members = self.plan.members // 2
            if "cooperative" not in str(error) or members == 0:
                raise
            # Not all programs fit on this device at once: half as many, with twice the work. Nothing has run.
            self._use(self.plan._replace(members=members, tiles=-(-self.plan.all_tiles // members)))
            self.launch(pointers, floats, aligned)
            return
        if aligned and _TAKES_CONSTANTS:
            self.run = compiled[self.grid]


#: Since this version a compiled kernel takes the values of all parameters, compile-time ones too.
_TAKES_CONSTANTS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)

_calls: dict[Any, _Call] = {}


def _call(kernel: Any, x: Any, axis: int, mask: Any, **options: Any) -> _Call:
    key = (kernel, x.shape, x.stride(), axis, x.dtype, x.device, mask is None, *options.values())
    found = _calls.get(key)
    if found is None:
        if len(_calls) >= 4096:
            _calls.clear()
        found = _calls[key] = _Call(kernel, x, axis, mask is not None, options)
    return found


# --- memory ---


class _Scratch:
    """The partial sums and the gates of the launches of one stream, which come one after the other."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.parts = torch.empty(1 << 16, dtype=torch.float32, device=device)
        self.gates = torch.zeros(1 << 12, dtype=torch.int32, device=device)

    def of(self, call: _Call) -> tuple[Any, Any]:
        if self.parts.numel() < call.numbers:
            self.parts = torch.empty(2 * call.numbers, dtype=torch.float32, device=self.device)
        if self.gates.numel() < call.plan.blocks:
            self.gates = torch.zeros(2 * call.plan.blocks, dtype=torch.int32, device=self.device)
        return self.parts, self.gates


_scratch: dict[tuple[Any, int], _Scratch] = {}


class _CapturedGates:
    """Gates for launches in CUDA graphs: each has its own, because graphs may be replayed on any stream."""

    def __init__(self, device: Any) -> None:
        self._gates = torch.zeros(1 << 18, dtype=torch.int32, device=device)
        self._used = 0

    def take(self, count: int) -> Any:
        if self._used + count > self._gates.numel():
            return None
        self._used += count
        return self._gates[self._used - count : self._used]


_captured: dict[Any, _CapturedGates] = {}


def _memory(x: Any, call: _Call) -> tuple[Any, Any]:
    """Memory for the partial sums of a call, and its gates."""
    if call.plan.members == 1:
        return None, None
    if not x.is_cuda:
        return x.new_empty(call.numbers, dtype=torch.float32), None
    device = x.device
    if torch.cuda.is_current_stream_capturing():
        gates = _captured[device].take(call.plan.blocks) if device in _captured else None
        if gates is None:
            gates = torch.zeros(call.plan.blocks, dtype=torch.int32, device=device)
        return torch.empty(call.numbers, dtype=torch.float32, device=device), gates
    key = (device, _raw_stream(device.index))
    found = _scratch.get(key)
    if found is None:
        found = _scratch[key] = _Scratch(device)
        _captured.setdefault(device, _CapturedGates(device))
    return found.of(call)


@cache
def _stream_finder() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_stream


def _raw_stream(device: int) -> int:
    return _stream_finder()(device)


# --- the kernels ---


def accepts(x: Any) -> bool:
    """True if the kernels can process `x`: some elements, and offsets that fit 32 bits within a tile."""
    return bool(x.ndim >= 2 and 0 < x.numel() < 1 << 31)


def _vector(name: str, v: Any, device: Any) -> Any:
    """A vector as the kernels take it: float32, dense, on the device."""
    if v.dtype is torch.float32 and v.device == device and v.is_contiguous():
        return v
    if v.device != device:
        raise InvalidArgumentError(f"{name} must be on the device of x, {device}, got one on {v.device}")
    return v.to(torch.float32).contiguous()


def _rows_that_count(mask: Any, device: Any) -> Any:
    return mask if mask is None else mask.to(device=device, dtype=torch.bool).contiguous()


def _launch(call: _Call, x: Any, pointers: tuple[Any, ...], floats: tuple[float, ...], aligned: bool) -> None:
    if call.device < 0 or call.device == torch.cuda.current_device():
        call.launch(pointers, floats, aligned)
    else:
        with torch.cuda.device(x.device):
            call.launch(pointers, floats, aligned)


def batch_norm(x: Any, scale: Any, offset: Any, epsilon: float, axis: int, mask: Any) -> tuple[Any, Any, Any]:
    """See `reference.batch_norm`."""
    y, mean, variance, *_ = _normalize(x, scale, offset, epsilon, axis, mask, 0, (None,) * 5, (0.0, 0.0, 0.0))
    return y, mean, variance


def batch_norm_running(
    x: Any, scale: Any, offset: Any, epsilon: float, axis: int, old: tuple[Any, Any] | None, new: tuple[Any, Any] | None,
    weights: tuple[float, float, float],
) -> tuple[Any, Any, Any, Any, Any, Any]:  # fmt: skip
    """`batch_norm`, and new running statistics in the same launch; and a zero.

    With `weights` (keep, share, corrected) they are keep * old + share * mean and keep * old + corrected * variance. Without `old`
    nothing is kept. They are written to `new`, which may be `old`, or to new vectors.
    """
    device = x.device
    if old is not None:
        old = _vector("mean", old[0], device), _vector("variance", old[1], device)
    if new is None:
        new = torch.empty_like(scale, dtype=torch.float32), torch.empty_like(scale, dtype=torch.float32)
    zero = torch.empty((), dtype=torch.float32, device=device)
    before = (None, None) if old is None else old
    update = (*before, *new, zero)
    return _normalize(x, scale, offset, epsilon, axis, None, 1 if old is None else 2, update, weights)


def _normalize(
    x: Any, scale: Any, offset: Any, epsilon: float, axis: int, mask: Any, kind: int, update: tuple[Any, ...],
    weights: tuple[float, ...],
) -> tuple[Any, Any, Any, Any, Any, Any]:  # fmt: skip
    call = _call(_forward, x, axis, mask, UPDATE=kind)
    if call.layout == "other":
        x = x.contiguous() if axis == 1 else _channels_last(x, axis)
        return _normalize(x, scale, offset, epsilon, axis, mask, kind, update, weights)
    device = x.device
    y, mean = torch.empty_like(x), torch.empty_like(scale, dtype=torch.float32)
    variance = torch.empty_like(mean)
    vectors = _vector("scale", scale, device), _vector("offset", offset, device)
    pointers = (x, y, *vectors, mean, variance, _rows_that_count(mask, device), *update, *_memory(x, call))
    _launch(call, x, pointers, (*weights, epsilon), x.data_ptr() % 16 == 0)
    return y, mean, variance, update[2], update[3], update[4]


def _channels_last(x: Any, axis: int) -> Any:
    """`x` with its channels last in memory."""
    return x.movedim(axis, -1).contiguous().movedim(-1, axis)


def batch_norm_inference(
    x: Any, scale: Any, offset: Any, mean: Any, variance: Any, epsilon: float, axis: int, mask: Any
) -> Any:
    """See `reference.batch_norm_inference`."""
    call = _call(_inference, x, axis, mask)
    if call.layout == "other":
        x = x.contiguous() if axis == 1 else _channels_last(x, axis)
        return batch_norm_inference(x, scale, offset, mean, variance, epsilon, axis, mask)
    device, y = x.device, torch.empty_like(x)
    named = (("scale", scale), ("offset", offset), ("mean", mean), ("variance", variance))
    vectors = [_vector(name, v, device) for name, v in named]
    _launch(call, x, (x, y, *vectors, _rows_that_count(mask, device)), (epsilon,), x.data_ptr() % 16 == 0)
    return y


def batch_norm_grad(
    g: Any, x: Any, scale: Any, mean: Any, variance: Any, epsilon: float, axis: int, mask: Any
) -> tuple[Any, Any, Any]:
    """See `reference.batch_norm_grad`."""
    return _gradients(g, x, scale, mean, variance, epsilon, axis, mask, True)


def batch_norm_inference_grad(
    g: Any, x: Any, scale: Any, mean: Any, variance: Any, epsilon: float, axis: int, mask: Any
) -> tuple[Any, Any, Any]:
    """See `reference.batch_norm_inference_grad`."""
    return _gradients(g, x, scale, mean, variance, epsilon, axis, mask, False)


def _gradients(
    g: Any, x: Any, scale: Any, mean: Any, variance: Any, epsilon: float, axis: int, mask: Any, is_training: bool
) -> tuple[Any, Any, Any]:
    call = _call(_backward, x, axis, mask, TRAINING=is_training)
    if call.layout == "other":
        x = x.contiguous() if axis == 1 else _channels_last(x, axis)
        return _gradients(g, x, scale, mean, variance, epsilon, axis, mask, is_training)
    device = x.device
    dx = torch.empty_like(x)
    if g.stride() != x.stride() or g.dtype != x.dtype or g.device != device:
        g = torch.empty_like(x).copy_(g)
    dscale = torch.empty_like(scale, dtype=torch.float32)
    doffset = torch.empty_like(dscale)
    vectors = _vector("scale", scale, device), _vector("mean", mean, device), _vector("variance", variance, device)
    pointers = (g, x, dx, *vectors, dscale, doffset, _rows_that_count(mask, device), *_memory(x, call))
    _launch(call, x, pointers, (epsilon,), (x.data_ptr() | g.data_ptr()) % 16 == 0)
    return dx, dscale, doffset
