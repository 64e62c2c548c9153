"""The Triton kernels of batch norm; `cuda_call` plans and launches them.

They see an array as rows of channels (channels last) or as planes, one per example and channel (channels first). Each program has
one block of channels and a run of tiles. It sums its tiles, stores the partial sums, and waits until all programs of its channel
block have stored theirs. Then each program adds all partial sums of its channels in float64, in a fixed order, so results are
reproducible, and processes its tiles again, in reverse order, because the last tiles are still in the L2 cache. The first KEEP
tiles stay in registers and are not loaded again. A channel block with one program needs no barrier.

Programs wait for each other, so all of them must be resident: the launch is cooperative, and the grid never exceeds the device.
Triton's interpreter runs one program after the other: there a call is two launches, PHASE 1 for the sums and 2 for the results.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Vectors of one number per channel may begin anywhere: one compiled kernel serves them all.
_VECTORS = [
    "scale", "offset", "mean", "variance", "old_mean", "old_variance", "new_mean", "new_variance", "dscale", "doffset",
]  # fmt: skip
_jit = triton.jit(do_not_specialize_on_alignment=[*_VECTORS, "mask", "zero", "batches", "copies", "parts", "gates"])


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
def _in_units(channels, inner, FIRST: tl.constexpr, UNIT: tl.constexpr):
    """The two sizes as they are, in a form that tells the compiler that rows, or planes, begin at multiples of UNIT elements.

    So it loads as many elements at a time.
    """
    if FIRST:
        return channels, inner // UNIT * UNIT
    else:
        return channels // UNIT * UNIT, inner


@triton.jit
def _tile(
    number, block, total, channels, inner, FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, WHOLE: tl.constexpr
):
    """Where tile `number` of a channel block lies: its first element, the offsets from there, which elements exist, and the
    example of each row.

    Channels last: BR rows of BC channels. Channels first: BR examples of BC elements of one channel's plane. WHOLE: whether all
    elements of all tiles exist.
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
    if WHOLE:
        exists = tl.full([BR, BC], True, tl.int1)
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
        height = tl.maximum(tl.minimum(BR, total - (number // across) * BR), 0)
        if MASKED:
            height = tl.sum((tl.load(mask + example, mask=example < total, other=0) != 0).to(tl.int32), 0)
        return (width * height + tl.zeros([], tl.int32)).to(tl.float32)
    else:
        height = tl.maximum(tl.minimum(BR, total - number * BR), 0)
        if MASKED:
            exists = number * BR + tl.arange(0, BR) < total
            height = tl.sum((tl.load(mask + example, mask=exists, other=0) != 0).to(tl.int32), 0)
        return (height + tl.zeros([], tl.int32)).to(tl.float32)


@triton.jit
def _total(tile, FIRST: tl.constexpr):
    """The sum of each channel of a tile: a vector, or one number where the tile has one channel."""
    if FIRST:
        return tl.sum(tile)
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
def _spread_anew(vector, FIRST: tl.constexpr, BC: tl.constexpr):
    """`_spread` of a vector that was added up from all members' parts, in the layout of the tile that it meets.

    Without the gather the compiler brings the tile into the layout of the parts, by way of shared memory.
    """
    if FIRST:
        return vector
    else:
        return tl.gather(vector, tl.arange(0, BC), 0)[None, :]


@triton.jit
def _place(channels, FIRST: tl.constexpr, BC: tl.constexpr):
    """The channel block of this program, its number among the block's programs, the block's channels, and which of them exist."""
    blocks = channels if FIRST else tl.cdiv(channels, BC)
    block = tl.program_id(0) % blocks
    if FIRST:
        columns = block
    else:
        columns = block * BC + tl.arange(0, BC)
    return block, tl.program_id(0) // blocks, columns, columns < channels


@triton.jit
def _tiles_of(member, members, all_tiles):
    """How many tiles a member has: tile `member`, then every one `members` later, so that neighbours are read at the same time."""
    return (all_tiles - member + members - 1) // members


@triton.jit
def _packed(tiles, zero):
    """Tiles that take as few registers as they have bytes: two tiles of 16-bit numbers are one of 32 bits.

    `zero` is a sum with 0 that the compiler does not know: else it would keep the numbers as they were, one in a register.
    """
    if tiles[0].dtype.primitive_bitwidth == 16:
        packed = ()
        for i in tl.static_range(0, len(tiles), 2):
            low = tiles[i].to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            if i + 1 < len(tiles):
                low |= tiles[i + 1].to(tl.int16, bitcast=True).to(tl.int32) << 16
            packed += (low + zero,)
        return packed
    else:
        return tiles


@triton.jit
def _unpacked(packed, i: tl.constexpr, dtype: tl.constexpr):
    """Tile `i` of `_packed`, in float32."""
    if dtype.primitive_bitwidth == 16:
        return (packed[i // 2] >> (i % 2 * 16)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        return packed[i].to(tl.float32)


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


@triton.jit
def _shift(values, count, FIRST: tl.constexpr):
    """A number near the mean of a tile's channels: numbers near their mean lose nothing when their squares are added."""
    shift = _total(values, FIRST) / tl.maximum(count, 1.0)
    return tl.where(tl.abs(shift) < float("inf"), shift, 0.0)


@triton.jit
def _measured(values, counts, there, count, shift, sums, squares, FIRST: tl.constexpr, MASKED: tl.constexpr):
    """The counts, sums and sums of squares after one more tile, of distances from `shift`."""
    values = values.to(tl.float32)
    if MASKED:  # noqa: SIM102
        if count == 0.0:
            shift = _shift(values, there, FIRST)
    distance = tl.where(counts, values - _spread(shift, FIRST), 0.0)
    return count + there, shift, sums + distance, squares + distance * distance


@_jit
def forward(
    x, y, scale, offset, mean, variance, mask, old_mean, old_variance, new_mean, new_variance, zero, batches, parts, gates,
    keep, share, corrected, epsilon, total, channels, inner, all_tiles, members,
    FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, M: tl.constexpr, KEEP: tl.constexpr, REST: tl.constexpr,
    SINGLE: tl.constexpr, MASKED: tl.constexpr, UPDATE: tl.constexpr, PHASE: tl.constexpr, CACHED: tl.constexpr,
    WHOLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """UPDATE: 1 if the batch's statistics replace the old ones, 2 if they are blended, 0 for neither; 1 and 2 store a 0 in `zero`.

    3 is 2, and increases `batches` instead. KEEP: how many tiles stay in registers; REST: whether there are others. CACHED: whether
    the L2 cache has room for `x`.
    """
    channels, inner = _in_units(channels, inner, FIRST, UNIT)
    # What is not used again makes room for what is.
    LAST_USE: tl.constexpr = "evict_first" if CACHED else ""
    BEFORE: tl.constexpr = KEEP if KEEP else 1  # the tiles that are loaded before the loop
    block, member, columns, are_there = _place(channels, FIRST, BC)
    tiles = _tiles_of(member, members, all_tiles)
    gain = tl.load(scale + columns, mask=are_there, other=0.0).to(tl.float64)
    beta = _spread(tl.load(offset + columns, mask=are_there, other=0.0).to(tl.float32), FIRST)
    examples = total if FIRST else total // inner
    if PHASE != 2:
        kept = ()
        for i in tl.static_range(BEFORE):
            base, offsets, exists, example = _tile(
                member + i * members, block, total, channels, inner, FIRST, BR, BC, WHOLE
            )
            counts = _counted(exists, example, mask, examples, MASKED)
            kept += (tl.load(x + base + offsets, mask=counts, other=0.0),)
        count = 0.0
        sums = tl.zeros([BR, BC], tl.float32)
        squares = tl.zeros([BR, BC], tl.float32)
        for i in tl.static_range(BEFORE):
            number = member + i * members
            base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC, WHOLE)
            counts = _counted(exists, example, mask, examples, MASKED)
            there = _count(number, example, mask, total, inner, FIRST, BR, BC, MASKED)
            if i == 0:
                shift = _shift(kept[0].to(tl.float32), there, FIRST)
            count, shift, sums, squares = _measured(kept[i], counts, there, count, shift, sums, squares, FIRST, MASKED)
        kept = _packed(kept, tl.minimum(tiles, 0))
        if REST:
            for step in tl.range(BEFORE, tiles, num_stages=1):
                number = member + step * members
                base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC, WHOLE)
                counts = _counted(exists, example, mask, examples, MASKED)
                values = tl.load(x + base + offsets, mask=counts, other=0.0)
                there = _count(number, example, mask, total, inner, FIRST, BR, BC, MASKED)
                count, shift, sums, squares = _measured(
                    values, counts, there, count, shift, sums, squares, FIRST, MASKED
                )
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
            if UPDATE >= 2:
                before = tl.load(old_mean + columns, mask=are_there, other=0.0)
                tl.store(new_mean + columns, before * keep + high * share, mask=are_there)
                before = tl.load(old_variance + columns, mask=are_there, other=0.0)
                tl.store(new_variance + columns, before * keep + rounded * corrected, mask=are_there)
            if UPDATE == 3:
                if block == 0:
                    tl.store(batches, tl.load(batches) + 1)
            elif UPDATE:
                tl.store(zero, 0.0, mask=block == 0)
        factor = _spread_anew((gain / tl.sqrt(rounded.to(tl.float64) + epsilon)).to(tl.float32), FIRST, BC)
        low = s - high.to(tl.float64)
        low = _spread_anew(tl.where(low == low, low, 0.0).to(tl.float32), FIRST, BC)
        high = _spread_anew(high, FIRST, BC)
        HELD: tl.constexpr = KEEP if PHASE == 0 else 0
        if REST or PHASE == 2:
            for step in tl.range(0, tiles - HELD, num_stages=1):
                number = member + (tiles - 1 - step) * members
                base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC, WHOLE)
                counts = _counted(exists, example, mask, examples, MASKED)
                values = tl.load(x + base + offsets, mask=counts, other=0.0, eviction_policy=LAST_USE).to(tl.float32)
                result = tl.where(counts, ((values - high) - low) * factor + beta, 0.0).to(y.dtype.element_ty)
                tl.store(y + base + offsets, result, mask=exists, eviction_policy=LAST_USE)
        for i in tl.static_range(HELD):
            base, offsets, exists, example = _tile(
                member + i * members, block, total, channels, inner, FIRST, BR, BC, WHOLE
            )
            counts = _counted(exists, example, mask, examples, MASKED)
            result = tl.where(counts, ((_unpacked(kept, i, x.dtype.element_ty) - high) - low) * factor + beta, 0.0)
            tl.store(y + base + offsets, result.to(y.dtype.element_ty), mask=exists, eviction_policy=LAST_USE)


# --- gradient ---


@_jit
def backward(
    g, x, dx, scale, mean, variance, dscale, doffset, mask, parts, gates,
    epsilon, total, channels, inner, all_tiles, members,
    FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, M: tl.constexpr, KEEP: tl.constexpr, REST: tl.constexpr,
    SINGLE: tl.constexpr, MASKED: tl.constexpr, TRAINING: tl.constexpr, PHASE: tl.constexpr, CACHED: tl.constexpr,
    WHOLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """KEEP, REST: as in `forward`. CACHED: whether the L2 cache has room for `g` and `x`."""
    channels, inner = _in_units(channels, inner, FIRST, UNIT)
    LAST_USE: tl.constexpr = "evict_first" if CACHED else ""
    block, member, columns, are_there = _place(channels, FIRST, BC)
    tiles = _tiles_of(member, members, all_tiles)
    centre = tl.load(mean + columns, mask=are_there, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.load(variance + columns, mask=are_there, other=0.0).to(tl.float64) + epsilon)
    gain = tl.load(scale + columns, mask=are_there, other=0.0).to(tl.float64) * r
    factor = _spread(gain.to(tl.float32), FIRST)
    examples = total if FIRST else total // inner
    if PHASE != 2:
        kept_g = ()
        kept_x = ()
        for i in tl.static_range(KEEP):
            base, offsets, exists, example = _tile(
                member + i * members, block, total, channels, inner, FIRST, BR, BC, WHOLE
            )
            counts = _counted(exists, example, mask, examples, MASKED)
            kept_g += (tl.load(g + base + offsets, mask=counts, other=0.0),)
            kept_x += (tl.load(x + base + offsets, mask=counts, other=0.0),)
        count = 0.0
        if not KEEP:
            sums = tl.zeros([BR, BC], tl.float32)
            products = tl.zeros([BR, BC], tl.float32)
        for i in tl.static_range(KEEP):
            number = member + i * members
            base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC, WHOLE)
            counts = _counted(exists, example, mask, examples, MASKED)
            if MASKED:
                count += _count(number, example, mask, total, inner, FIRST, BR, BC, MASKED)
            slope = kept_g[i].to(tl.float32)
            product = slope * tl.where(counts, kept_x[i].to(tl.float32) - _spread(centre, FIRST), 0.0)
            if i == 0:  # a sum with 0 would need registers beside those of the tile
                sums = slope
                products = product
            else:
                sums += slope
                products += product
        if KEEP:
            kept_g = _packed(kept_g, tl.minimum(tiles, 0))
            kept_x = _packed(kept_x, tl.minimum(tiles, 0))
        if REST:
            for step in tl.range(KEEP, tiles, num_stages=1):
                number = member + step * members
                base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC, WHOLE)
                counts = _counted(exists, example, mask, examples, MASKED)
                slope = tl.load(g + base + offsets, mask=counts, other=0.0).to(tl.float32)
                values = tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32)
                if MASKED:
                    count += _count(number, example, mask, total, inner, FIRST, BR, BC, MASKED)
                sums += slope
                products += slope * tl.where(counts, values - _spread(centre, FIRST), 0.0)
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
            mean_g = _spread_anew((of_g / number_of).to(tl.float32), FIRST, BC)
            slant = _spread_anew((of_gx / number_of * r * r).to(tl.float32), FIRST, BC)
            HELD: tl.constexpr = KEEP if PHASE == 0 else 0
            if REST or PHASE == 2:
                for step in tl.range(0, tiles - HELD, num_stages=1):
                    number = member + (tiles - 1 - step) * members
                    base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC, WHOLE)
                    counts = _counted(exists, example, mask, examples, MASKED)
                    slope = tl.load(g + base + offsets, mask=counts, other=0.0, eviction_policy=LAST_USE).to(tl.float32)
                    values = tl.load(x + base + offsets, mask=counts, other=0.0, eviction_policy=LAST_USE)
                    values = values.to(tl.float32) - _spread(centre, FIRST)
                    result = tl.where(counts, factor * (slope - mean_g - values * slant), 0.0).to(dx.dtype.element_ty)
                    tl.store(dx + base + offsets, result, mask=exists, eviction_policy=LAST_USE)
            for i in tl.static_range(HELD):
                base, offsets, exists, example = _tile(
                    member + i * members, block, total, channels, inner, FIRST, BR, BC, WHOLE
                )
                counts = _counted(exists, example, mask, examples, MASKED)
                slope = _unpacked(kept_g, i, g.dtype.element_ty)
                values = _unpacked(kept_x, i, x.dtype.element_ty) - _spread(centre, FIRST)
                result = tl.where(counts, factor * (slope - mean_g - values * slant), 0.0)
                tl.store(dx + base + offsets, result.to(dx.dtype.element_ty), mask=exists, eviction_policy=LAST_USE)
        else:
            if member == 0:
                if not SINGLE:
                    of_g = _added(parts, 0, block, members, channels, FIRST, BC, M)
                    of_gx = _added(parts, 1, block, members, channels, FIRST, BC, M)
                tl.store(doffset + columns, of_g.to(tl.float32), mask=are_there)
                tl.store(dscale + columns, (of_gx * r).to(tl.float32), mask=are_there)


# --- inference, forward ---


@_jit
def inference(
    x, y, scale, offset, mean, variance, mask, copies,
    epsilon, total, channels, inner, all_tiles, members,
    FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr, COPIES: tl.constexpr,
    WHOLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """COPIES: whether the mean, the variance, both again, and a 0 are stored in `copies`."""
    channels, inner = _in_units(channels, inner, FIRST, UNIT)
    block, member, columns, are_there = _place(channels, FIRST, BC)
    spread = tl.load(variance + columns, mask=are_there, other=0.0)
    centre = tl.load(mean + columns, mask=are_there, other=0.0)
    if COPIES:  # noqa: SIM102
        if member == 0:
            tl.store(copies + columns, centre, mask=are_there)
            tl.store(copies + channels + columns, spread, mask=are_there)
            tl.store(copies + 2 * channels + columns, centre, mask=are_there)
            tl.store(copies + 3 * channels + columns, spread, mask=are_there)
            tl.store(copies + 4 * channels, 0.0, mask=block == 0)
    spread = spread.to(tl.float64) + epsilon
    factor = _spread((tl.load(scale + columns, mask=are_there, other=0.0) / tl.sqrt(spread)).to(tl.float32), FIRST)
    centre = _spread(centre, FIRST)
    beta = _spread(tl.load(offset + columns, mask=are_there, other=0.0), FIRST)
    for number in range(member, all_tiles, members):
        base, offsets, exists, example = _tile(number, block, total, channels, inner, FIRST, BR, BC, WHOLE)
        counts = _counted(exists, example, mask, total if FIRST else total // inner, MASKED)
        result = (tl.load(x + base + offsets, mask=counts, other=0.0).to(tl.float32) - centre) * factor + beta
        tl.store(y + base + offsets, tl.where(counts, result, 0.0).to(y.dtype.element_ty), mask=exists)
