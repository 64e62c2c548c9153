"""Batch norm on CUDA, in Triton: one launch per call, with one barrier inside.

The kernels see an array as rows of channels (channels last) or as planes, one per example and channel (channels first). Each
program has one block of channels and a run of tiles. It sums its tiles, stores the partial sums, and increments a counter. The last
program of a channel block adds the partial sums in float64, in a fixed order, so results are reproducible. Then it opens a gate
for the other programs. After the gate each program processes its tiles again, in reverse order, because the last tiles are still
in the L2 cache. A program with one tile keeps the tile in registers.

Programs wait for each other, so all of them must be resident: the launch is cooperative, and the grid never exceeds the device.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

DTYPES = ("float32", "float16", "bfloat16")

#: Triton's interpreter runs one program after the other: there a call is two launches, one for the sums and one for the results.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# --- how programs meet ---


@triton.jit
def _is_last(counter, members):
    """Increment the counter of a channel block; True for the last of its programs."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel") == members - 1


@triton.jit
def _open_gate(counter, gate):
    """Let the waiting programs go on. The counter is zero again for the next launch; the gate counts launches."""
    tl.debug_barrier()
    tl.atomic_xchg(counter, 0, sem="relaxed")
    tl.atomic_add(gate, 1, sem="release")


@triton.jit
def _wait_at_gate(gate, generation):
    """Wait until the gate has left `generation`, its value at the start of this launch."""
    while tl.atomic_add(gate, 0, sem="acquire") == generation:
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
def _added(parts, which, block, members, channels, FIRST: tl.constexpr, BC: tl.constexpr):
    """The sum over all members of one of their partial results, in float64; `parts` has three of `channels` numbers for each."""
    if FIRST:
        member = tl.arange(0, BC)
        result = tl.zeros([BC], tl.float64)
        for start in range(0, members, BC):
            at = start + member
            result += tl.load(
                parts + (at * 3 + which) * channels + block, mask=at < members, other=0.0, cache_modifier=".cg"
            )
        return tl.sum(result, 0)
    else:
        member = tl.arange(0, 16)
        column = block * BC + tl.arange(0, BC)
        sums = tl.zeros([16, BC], tl.float64)
        for start in range(0, members, 16):
            at = start + member
            exists = (at < members)[:, None] & (column < channels)[None, :]
            sums += tl.load(
                parts + ((at * 3 + which) * channels)[:, None] + column[None, :],
                mask=exists,
                other=0.0,
                cache_modifier=".cg",
            )
        return tl.sum(sums, 0)


# --- training, forward ---


@triton.jit
def _forward(
    x, y, scale, offset, mean, variance, mask, parts, totals, gates, total, channels, inner, tiles, all_tiles, members, epsilon,
    FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr, MASKED: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    blocks = channels if FIRST else tl.cdiv(channels, BC)
    block = tl.program_id(0) % blocks
    member = tl.program_id(0) // blocks
    columns, are_there = _columns(block, channels, FIRST, BC)
    counter, gate = gates + 2 * block, gates + 2 * block + 1
    first = member * tiles
    last = tl.minimum(first + tiles, all_tiles)
    kept = tl.zeros([BR, BC], tl.float32)
    if PHASE != 2:
        generation = tl.load(gate, volatile=True)
        shift = tl.zeros([BC], tl.float32) if not FIRST else 0.0
        count = 0.0
        sums = tl.zeros([BR, BC], tl.float32)
        squares = tl.zeros([BR, BC], tl.float32)
        for number in range(first, last):
            base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC)
            counts = _counted(exists, example, mask, total if FIRST else total // inner, MASKED)
            values = tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32)
            there = _count(number, example, mask, total, inner, FIRST, BR, BC, MASKED)
            if count == 0.0:  # numbers near their mean lose nothing when their squares are added
                shift = _total(values, FIRST) / tl.maximum(there, 1.0)
                shift = tl.where(tl.abs(shift) < float("inf"), shift, 0.0)
            count += there
            distance = tl.where(counts, values - _spread(shift, FIRST), 0.0)
            sums += distance
            squares += distance * distance
            if KEEP:
                kept = values
        part = _total(sums, FIRST)
        safe = tl.maximum(count, 1.0)
        at = parts + member * 3 * channels + columns
        tl.store(at, shift + part / safe, mask=are_there)
        tl.store(at + channels, _total(squares, FIRST) - part * (part / safe), mask=are_there)
        tl.store(at + 2 * channels, count + tl.zeros_like(part), mask=are_there)
        if _is_last(counter, members):
            number_of, first_moment, second_moment = _merged(parts, block, members, channels, FIRST, BC)
            result = second_moment / number_of
            rounded = result.to(tl.float32)
            factor = tl.load(scale + columns, mask=are_there, other=0.0).to(tl.float64) / tl.sqrt(
                rounded.to(tl.float64) + epsilon
            )
            high = first_moment.to(tl.float32)
            tl.store(mean + columns, high, mask=are_there)
            tl.store(variance + columns, rounded, mask=are_there)
            low = first_moment - high.to(tl.float64)
            tl.store(totals + columns, tl.where(low == low, low, 0.0).to(tl.float32), mask=are_there)
            tl.store(totals + channels + columns, factor.to(tl.float32), mask=are_there)
            _open_gate(counter, gate)
        elif PHASE == 0:
            _wait_at_gate(gate, generation)
    if PHASE != 1:
        high = _spread(tl.load(mean + columns, mask=are_there, other=0.0, cache_modifier=".cg"), FIRST)
        low = _spread(tl.load(totals + columns, mask=are_there, other=0.0, cache_modifier=".cg"), FIRST)
        factor = _spread(tl.load(totals + channels + columns, mask=are_there, other=0.0, cache_modifier=".cg"), FIRST)
        beta = _spread(tl.load(offset + columns, mask=are_there, other=0.0).to(tl.float32), FIRST)
        for back in range(first, last):
            number = first + last - 1 - back
            base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC)
            counts = _counted(exists, example, mask, total if FIRST else total // inner, MASKED)
            if KEEP and PHASE == 0:
                values = kept
            else:
                values = tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32)
            result = ((values - high) - low) * factor + beta
            tl.store(y + base + offsets, tl.where(counts, result, 0.0).to(y.dtype.element_ty), mask=exists)


@triton.jit
def _merged(parts, block, members, channels, FIRST: tl.constexpr, BC: tl.constexpr):
    """The count, the mean and the sum of squared distances from it, of all members' parts."""
    member = tl.arange(0, 128) if FIRST else tl.arange(0, 16)
    if FIRST:
        n = tl.zeros([128], tl.float64)
        s = tl.zeros([128], tl.float64)
        q = tl.zeros([128], tl.float64)
    else:
        column = block * BC + tl.arange(0, BC)
        n = tl.zeros([16, BC], tl.float64)
        s = tl.zeros([16, BC], tl.float64)
        q = tl.zeros([16, BC], tl.float64)
    for start in range(0, members, 128 if FIRST else 16):
        at = start + member
        if FIRST:
            where = at * 3 * channels + block
            exists = at < members
        else:
            where = (at * 3 * channels)[:, None] + column[None, :]
            exists = (at < members)[:, None] & (column < channels)[None, :]
        mean = tl.load(parts + where, mask=exists, other=0.0, cache_modifier=".cg").to(tl.float64)
        square = tl.load(parts + channels + where, mask=exists, other=0.0, cache_modifier=".cg").to(tl.float64)
        count = tl.load(parts + 2 * channels + where, mask=exists, other=0.0, cache_modifier=".cg").to(tl.float64)
        mean = tl.where(count > 0, mean, 0.0)
        square = tl.where(count > 0, square, 0.0)
        n += count
        s += count * mean
        q += square + count * mean * mean
    n = tl.sum(n, 0)
    s = tl.sum(s, 0) / n
    q = tl.sum(q, 0) - n * s * s
    return n, s, tl.where(q < 0.0, 0.0, q)  # not `maximum`, which turns NaN into 0


# --- training, gradient ---


@triton.jit
def _backward(
    g, x, dx, scale, mean, variance, dscale, doffset, mask, parts, totals, gates,
    total, channels, inner, tiles, all_tiles, members, epsilon,
    FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, KEEP: tl.constexpr, MASKED: tl.constexpr, PHASE: tl.constexpr,
    TRAINING: tl.constexpr,
):  # fmt: skip
    blocks = channels if FIRST else tl.cdiv(channels, BC)
    block = tl.program_id(0) % blocks
    member = tl.program_id(0) // blocks
    columns, are_there = _columns(block, channels, FIRST, BC)
    counter, gate = gates + 2 * block, gates + 2 * block + 1
    first = member * tiles
    last = tl.minimum(first + tiles, all_tiles)
    centre = tl.load(mean + columns, mask=are_there, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.load(variance + columns, mask=are_there, other=0.0).to(tl.float64) + epsilon)
    gain = tl.load(scale + columns, mask=are_there, other=0.0).to(tl.float64) * r
    kept_g = tl.zeros([BR, BC], tl.float32)
    kept_x = tl.zeros([BR, BC], tl.float32)
    if PHASE != 2:
        generation = tl.load(gate, volatile=True)
        count = 0.0
        sums = tl.zeros([BR, BC], tl.float32)
        products = tl.zeros([BR, BC], tl.float32)
        for number in range(first, last):
            base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC)
            counts = _counted(exists, example, mask, total if FIRST else total // inner, MASKED)
            slope = tl.load(g + base + offsets, mask=counts, other=0.0).to(tl.float32)
            values = tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32)
            values = tl.where(counts, values - _spread(centre, FIRST), 0.0)
            if MASKED:
                count += _count(number, example, mask, total, inner, FIRST, BR, BC, MASKED)
            sums += slope
            products += slope * values
            if not TRAINING:
                result = slope * _spread(gain.to(tl.float32), FIRST)
                tl.store(dx + base + offsets, tl.where(counts, result, 0.0).to(dx.dtype.element_ty), mask=exists)
            if KEEP:
                kept_g = slope
                kept_x = values
        at = parts + member * 3 * channels + columns
        part = _total(sums, FIRST)
        tl.store(at, part, mask=are_there)
        tl.store(at + channels, _total(products, FIRST), mask=are_there)
        if MASKED:
            tl.store(at + 2 * channels, count + tl.zeros_like(part), mask=are_there)
        if _is_last(counter, members):
            of_g = _added(parts, 0, block, members, channels, FIRST, BC)
            of_gx = _added(parts, 1, block, members, channels, FIRST, BC)
            if MASKED:
                number_of = _added(parts, 2, block, members, channels, FIRST, BC)
            else:
                number_of = tl.zeros([], tl.float64) + (total * inner if FIRST else total)
            tl.store(doffset + columns, of_g.to(tl.float32), mask=are_there)
            tl.store(dscale + columns, (of_gx * r).to(tl.float32), mask=are_there)
            tl.store(totals + columns, (of_g / number_of).to(tl.float32), mask=are_there)
            tl.store(totals + channels + columns, (of_gx / number_of * r * r).to(tl.float32), mask=are_there)
            _open_gate(counter, gate)
        elif PHASE == 0 and TRAINING:
            _wait_at_gate(gate, generation)
    if PHASE != 1 and TRAINING:
        mean_g = _spread(tl.load(totals + columns, mask=are_there, other=0.0, cache_modifier=".cg"), FIRST)
        slant = _spread(tl.load(totals + channels + columns, mask=are_there, other=0.0, cache_modifier=".cg"), FIRST)
        factor = _spread(gain.to(tl.float32), FIRST)
        for back in range(first, last):
            number = first + last - 1 - back
            base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC)
            counts = _counted(exists, example, mask, total if FIRST else total // inner, MASKED)
            if KEEP and PHASE == 0:
                slope = kept_g
                values = kept_x
            else:
                slope = tl.load(g + base + offsets, mask=counts, other=0.0).to(tl.float32)
                values = tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32) - _spread(centre, FIRST)
            result = factor * (slope - mean_g - values * slant)
            tl.store(dx + base + offsets, tl.where(counts, result, 0.0).to(dx.dtype.element_ty), mask=exists)


# --- inference, forward ---


@triton.jit
def _inference(
    x, y, scale, offset, mean, variance, mask, total, channels, inner, tiles, all_tiles, members, epsilon,
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
    for number in range(member * tiles, tl.minimum(member * tiles + tiles, all_tiles)):
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


@lru_cache(1024)
def _plan(shape: tuple[int, ...], channels_first: bool, item: int, device: int) -> Plan:
    """The grid for an array of this shape, with channels second or last, and items of so many bytes."""
    size, channels = math.prod(shape), shape[1 if channels_first else -1]
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 2
    # Large arrays are read from memory twice. One program per multiprocessor keeps the order of tiles that the L2 cache needs.
    is_large = size * item > 150 << 20
    warps, per_sm, most = (16, 1, 8192) if is_large else (8, 2, 4096)
    resident = triton.next_power_of_2(-(-size // (sms * per_sm)))  # what each program has to do, if it does it at once
    elements = max(resident, 1024) if resident <= 8192 else most
    if channels_first:
        total, inner, blocks = shape[0], math.prod(shape[2:]), channels
        columns = min(triton.next_power_of_2(inner), 1024)
        rows = max(1, min(elements // columns, triton.next_power_of_2(total)))
        all_tiles = -(-total // rows) * -(-inner // columns)
    else:
        total, inner = size // channels, max(size // channels // shape[0], 1)
        columns = min(triton.next_power_of_2(channels), 64 if is_large or item == 2 else 32)
        rows, blocks = max(1, elements // columns), -(-channels // columns)
        all_tiles = -(-total // rows)
    members = min(max(sms * per_sm // blocks, 1), all_tiles)
    tiles = -(-all_tiles // members)
    members = -(-all_tiles // tiles)
    registers = min(65536 // (warps * 32 * per_sm), 255)
    return Plan(
        channels_first, total, channels, inner, tiles, all_tiles, members, blocks, (rows, columns), warps, registers
    )


def _laid_out(x: Any, axis: int) -> tuple[Any, bool, bool]:
    """`x` with its channels last or second in memory, without a copy if possible; if second; if the axis was moved."""
    moved = x.movedim(axis, -1)
    if axis == x.ndim - 1:
        return x.contiguous(), False, False
    if axis == 1 and (x.is_contiguous() or not moved.is_contiguous()):
        return x.contiguous(), True, False
    return moved.contiguous(), False, True


#: For each device and stream, the counter and the gate of each channel block: launches of one stream use them one after the other.
_gates: dict[tuple[Any, int], Any] = {}


def _gates_of(x: Any, blocks: int) -> Any:
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():  # a graph may be replayed on any stream
        return torch.zeros(2 * blocks, dtype=torch.int32, device=x.device)
    key = (x.device, torch.cuda.current_stream(x.device).cuda_stream)
    gates = _gates.get(key)
    if gates is None or gates.numel() < 2 * blocks:
        gates = _gates[key] = torch.zeros(max(2 * blocks, 1024), dtype=torch.int32, device=x.device)
    return gates


def _launch(kernel: Any, plan: Plan, arguments: tuple[Any, ...], mask: Any, epsilon: float, **more: Any) -> None:
    rows, columns = plan.tile
    sizes = (plan.total, plan.channels, plan.inner, plan.tiles, plan.all_tiles, plan.members, epsilon)
    options = {"FIRST": plan.channels_first, "BR": rows, "BC": columns, "MASKED": mask is not None, **more}
    grid = (plan.blocks * plan.members,)
    if _INTERPRETED:
        for phase in (1, 2) if "KEEP" in more else (0,):
            kernel[grid](*arguments, *sizes, **options, **({"PHASE": phase} if "KEEP" in more else {}))
        return
    if "KEEP" in more:
        options |= {"PHASE": 0, "launch_cooperative_grid": plan.members > 1, "maxnreg": plan.registers}
    with torch.cuda.device(arguments[0].device):
        kernel[grid](*arguments, *sizes, num_warps=plan.warps, **options)


def _memory(x: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """Memory for partial sums and for what programs read after the gate, and the gates."""
    parts = torch.empty((3 * plan.members + 2) * plan.channels, dtype=torch.float32, device=x.device)
    return parts, parts[3 * plan.members * plan.channels :], _gates_of(x, plan.blocks)


def _prepared(x: Any, axis: int) -> tuple[Any, Plan, bool]:
    x, channels_first, is_moved = _laid_out(x, axis % x.ndim)
    device = x.device.index if x.is_cuda else -1
    return x, _plan(tuple(x.shape), channels_first, x.element_size(), device), is_moved


def _vectors(x: Any, channels: int) -> Any:
    return torch.empty((2, channels), dtype=torch.float32, device=x.device).unbind()


# --- the kernels ---


def accepts(x: Any) -> bool:
    """True if the kernels can process `x`: some elements, and offsets that fit 32 bits within a tile."""
    return bool(x.ndim >= 2 and 0 < x.numel() < 1 << 31)


def batch_norm(x: Any, scale: Any, offset: Any, epsilon: float, axis: int, mask: Any) -> tuple[Any, Any, Any]:
    """See `reference.batch_norm`."""
    data, plan, is_moved = _prepared(x, axis)
    y, (mean, variance) = torch.empty_like(data), _vectors(x, plan.channels)
    arguments = (data, y, scale, offset, mean, variance, mask, *_memory(x, plan))
    _launch(_forward, plan, arguments, mask, epsilon, KEEP=plan.tiles == 1)
    return y.movedim(-1, axis) if is_moved else y, mean, variance


def batch_norm_inference(
    x: Any, scale: Any, offset: Any, mean: Any, variance: Any, epsilon: float, axis: int, mask: Any
) -> Any:
    """See `reference.batch_norm_inference`."""
    data, plan, is_moved = _prepared(x, axis)
    y = torch.empty_like(data)
    _launch(_inference, plan, (data, y, scale, offset, mean, variance, mask), mask, epsilon)
    return y.movedim(-1, axis) if is_moved else y


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
    data, plan, is_moved = _prepared(x, axis)
    slopes = g.movedim(axis, -1).contiguous() if is_moved else g.contiguous()
    dx, (dscale, doffset) = torch.empty_like(data), _vectors(x, plan.channels)
    arguments = (slopes, data, dx, scale, mean, variance, dscale, doffset, mask, *_memory(x, plan))
    _launch(_backward, plan, arguments, mask, epsilon, KEEP=plan.tiles == 1, TRAINING=is_training)
    return dx.movedim(-1, axis) if is_moved else dx, dscale, doffset
