"""Calls of the Triton kernels of batch norm, on tensors that they take as they are: how a call is planned, and launched once.

The host's part of a call is short: everything that depends on shapes, dtypes and layouts is in a `Call`, made once for all calls
of a kind, with the compiled kernel. `weft._native` calls `train`, `infer` and `differentiate` for arguments it has checked, and
`cuda` for arguments that it has prepared.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton

from ..core.torch_internals import current_device, stream_handle
from .cuda_kernels import backward, forward, inference
from .cuda_launch import INTERPRETED, Launcher, launcher_of

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
    is_cached: bool  # whether the L2 cache has room for all that the kernel reads
    kept: int  # how many tiles each program keeps in registers
    is_whole: bool  # whether all elements of all tiles exist


def _shape_of(shape: tuple[int, ...], channels_first: bool, item: int, is_forward: bool) -> tuple[int, ...]:
    """How to cut an array with items of so many bytes; measured on an H200 (docs/cuda.md).

    Returns the columns and the elements of a tile, the warps of a program, the programs on a multiprocessor, and the bytes that a
    program keeps in registers.
    """
    if channels_first:
        plane = math.prod(shape[2:])
        columns = min(triton.next_power_of_2(plane), 256)
        # Large tiles have more loads on their way. For the gradient that pays only where planes are odd: those are loaded number by
        # number.
        is_wide = item == 4 and plane <= 256 and (is_forward or plane % 2 == 1)
        return (columns, 16384, 8, 1, 0) if is_wide else (columns, 8192, 8, 2, 0)
    size, channels = math.prod(shape), shape[-1]
    if channels > 64 and size <= 1 << 21:
        return min(triton.next_power_of_2(channels), 16), 4096, 8, 1, 128 << 10
    # Few channel blocks have many programs each: the fewer of them, the sooner their sums are added.
    columns = min(triton.next_power_of_2(channels), 32 if channels <= 64 else 64)
    return (columns, 16384, 8, 1, 0) if item == 2 and is_forward else (columns, 8192, 8, 1, 96 << 10)


def _plan(shape: tuple[int, ...], channels_first: bool, item: int, device: int, is_forward: bool) -> Plan:
    """The grid for an array of this shape, with channels second or last, and items of so many bytes."""
    size, channels = math.prod(shape), shape[1 if channels_first else -1]
    sms, cache = 2, 1 << 20
    if device >= 0:
        properties = torch.cuda.get_device_properties(device)
        sms, cache = properties.multi_processor_count, properties.L2_cache_size
    columns, most, warps, per_sm, room = _shape_of(shape, channels_first, item, is_forward)
    resident = triton.next_power_of_2(-(-size // (sms * per_sm)))  # what each program has to do, if it does it at once
    elements = max(resident, 1024) if resident <= 8192 else most
    if channels_first:
        total, inner, blocks = shape[0], math.prod(shape[2:]), channels
        rows = max(1, min(elements // columns, triton.next_power_of_2(total)))
        columns = min(triton.next_power_of_2(inner), max(columns, elements // rows))  # of few examples: longer pieces
        all_tiles = -(-total // rows) * -(-inner // columns)
    else:
        total, inner = size // channels, max(size // channels // shape[0], 1)
        padded = triton.next_power_of_2(total)
        if padded <= 1024 and device >= 0:  # one program for each channel block needs no barrier
            columns = min(max(4096 // padded, 8), columns)
            elements, warps, per_sm = padded * columns, 16 if padded * columns > 4096 else 4, 1
        blocks = -(-channels // columns)
        rows = max(1, elements // columns)
        all_tiles = -(-total // rows)
    members = min(max(sms * per_sm // blocks, 1), all_tiles)
    tiles = -(-all_tiles // members)
    registers = min(65536 // (warps * 32 * per_sm), 255)
    is_cached = size * item * (1 if is_forward else 2) <= cache
    is_whole = total % rows == 0 and (inner if channels_first else channels) % columns == 0
    kept = 1 if tiles == 1 else min(room // (rows * columns * item * (1 if is_forward else 2)), tiles)
    fewest = all_tiles // members  # each program has so many tiles or one more
    if kept < tiles:  # tiles with elements that do not exist need registers for what is there
        kept = min(kept, fewest) if is_whole else 0
    is_whole = is_whole and kept <= fewest
    return Plan(
        channels_first, total, channels, inner, tiles, all_tiles, members, blocks, (rows, columns), warps, registers,
        is_cached, kept, is_whole,
    )  # fmt: skip


def _layout(x: Any, axis: int) -> str:
    """Where the channels of `x` are in its memory: "last", "first" (second, as in NCHW), or neither: "other"."""
    if x.movedim(axis, -1).is_contiguous():
        return "last"
    return "first" if axis == 1 and x.is_contiguous() else "other"


class Call:
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
        self._use(_plan(shape, self.layout == "first", x.element_size(), self.device, kernel is not backward))

    def _use(self, plan: Plan) -> None:
        self.plan = plan
        rows, columns = plan.tile
        run = plan.inner if plan.channels_first else plan.channels  # elements that lie together
        self.sizes = (plan.total, plan.channels, plan.inner, plan.all_tiles, plan.members)
        self.options = {
            "FIRST": plan.channels_first, "BR": rows, "BC": columns, "WHOLE": plan.is_whole,
            "UNIT": min(run & -run, 16), **self._own,
        }  # fmt: skip
        if self.kernel is not inference:
            kept = plan.kept if self._own.get("TRAINING", True) else 0
            at_once = 128 if plan.channels_first or self.kernel is backward else 1024 // columns  # parts that are added
            self.options |= {
                "M": min(triton.next_power_of_2(plan.members), at_once), "KEEP": kept, "REST": plan.tiles > kept,
                "SINGLE": plan.members == 1, "PHASE": 0, "CACHED": plan.is_cached,
            }  # fmt: skip
        # In the order of the kernel's parameters: a compiled kernel takes them so.
        self.constants = tuple(self.options[name] for name in self.kernel.arg_names if name in self.options)
        self.lengths = [plan.channels] * 4 + [1]  # of the vectors that a forward makes
        self.results = 4 * plan.channels + 1
        self.numbers = 3 * plan.members * plan.channels
        self.grid = (plan.blocks * plan.members, 1, 1)
        self.run: Launcher | None = None

    def launch(self, pointers: tuple[Any, ...], floats: tuple[float, ...], aligned: bool) -> None:
        """Launch the kernel on its device; `pointers` are tensors, or None."""
        if self.device < 0 or self.device == current_device():
            self._launch(pointers, floats, aligned)
        else:
            with torch.cuda.device(self.device):
                self._launch(pointers, floats, aligned)

    def _launch(self, pointers: tuple[Any, ...], floats: tuple[float, ...], aligned: bool) -> None:
        if INTERPRETED:
            for phase in [1, 2] if self.options.get("SINGLE") is False else [0]:
                options = self.options | ({"PHASE": phase} if "PHASE" in self.options else {})
                self.kernel[self.grid](*pointers, *floats, *self.sizes, **options)
            return
        if self.run is not None and aligned:
            self.run(self.grid, stream_handle(self.device), pointers, floats + self.sizes)
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
            self._launch(pointers, floats, aligned)
            return
        if aligned:
            self.run = launcher_of(compiled, self.constants)


_calls: dict[Any, Call] = {}


def call_of(kernel: Any, x: Any, axis: int, mask: Any, **options: Any) -> Call:
    """How to call a kernel for `x`."""
    key = (kernel.__name__, x.shape, x.stride(), axis, x.dtype, x.device, mask is None, *options.values())
    found = _calls.get(key)
    if found is None:
        if len(_calls) >= 4096:
            _calls.clear()
        found = _calls[key] = Call(kernel, x, axis, mask is not None, options)
    return found


def find_call(name: str, x: Any, axis: int, **options: Any) -> Call | None:
    """How to call the kernel `name` for `x` as it is, without a mask; None if it must be copied first."""
    call = call_of({"forward": forward, "backward": backward, "inference": inference}[name], x, axis, None, **options)
    return None if call.layout == "other" else call


# --- memory ---


class _Scratch:
    """The partial sums and the gates of the launches of one stream, which come one after the other."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.parts = torch.empty(1 << 16, dtype=torch.float32, device=device)
        self.gates = torch.zeros(1 << 12, dtype=torch.int32, device=device)

    def of(self, call: Call) -> tuple[Any, Any]:
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


def _memory(x: Any, call: Call) -> tuple[Any, Any]:
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
    key = (device, stream_handle(device.index))
    found = _scratch.get(key)
    if found is None:
        found = _scratch[key] = _Scratch(device)
        _captured.setdefault(device, _CapturedGates(device))
    return found.of(call)


# --- calls ---


def train(
    call: Call, x: Any, scale: Any, offset: Any, epsilon: float, old: tuple[Any, Any] | None,
    weights: tuple[float, float, float],
) -> tuple[Any, ...]:  # fmt: skip
    """`batch_norm_running` by a call that takes these arguments as they are."""
    mean, variance, new_mean, new_variance, zero = scale.new_empty(call.results).unsafe_split_with_sizes(call.lengths)
    old_mean, old_variance = (None, None) if old is None else old
    zero = zero.view(())
    vectors = (
        scale, offset, mean, variance, None, old_mean, old_variance, new_mean, new_variance, zero, None
    )  # fmt: skip
    return normalize(call, x, vectors, (*weights, epsilon)), mean, variance, new_mean, new_variance, zero


def train_in_place(
    call: Call, x: Any, scale: Any, offset: Any, epsilon: float, running: tuple[Any, Any], batches: Any,
    weights: tuple[float, float, float],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`batch_norm`, with the running statistics and the number of batches changed in the same launch."""
    mean, variance = new_pair(scale)
    vectors = (scale, offset, mean, variance, None, *running, *running, None, batches)
    return normalize(call, x, vectors, (*weights, epsilon)), mean, variance


def normalize(call: Call, x: Any, vectors: tuple[Any, ...], floats: tuple[float, ...]) -> Any:
    """`x` normalized by the kernel `forward`, with its other arguments."""
    y = torch.empty_like(x)
    call.launch((x, y, *vectors, *_memory(x, call)), floats, x.data_ptr() % 16 == 0)
    return y


def new_pair(like: Any) -> Any:
    """Memory for two vectors of the length of another, in one allocation."""
    channels = like.shape[0]
    return like.new_empty(2 * channels, dtype=torch.float32).unsafe_split_with_sizes([channels, channels])


def infer(
    call: Call, x: Any, scale: Any, offset: Any, mean: Any, variance: Any, epsilon: float,
    mask: Any = None, copies: Any = None,
) -> Any:  # fmt: skip
    """`batch_norm_inference` by a call that takes these arguments as they are."""
    y = torch.empty_like(x)
    call.launch((x, y, scale, offset, mean, variance, mask, copies), (epsilon,), x.data_ptr() % 16 == 0)
    return y


def infer_and_copy(
    call: Call, x: Any, scale: Any, offset: Any, mean: Any, variance: Any, epsilon: float
) -> tuple[Any, ...]:
    """`infer`, and two copies of the mean and the variance and a zero, in the same launch."""
    copies = scale.new_empty(call.results)
    y = infer(call, x, scale, offset, mean, variance, epsilon, None, copies)
    *vectors, zero = copies.unsafe_split_with_sizes(call.lengths)
    return y, *vectors, zero.view(())


def differentiate(
    call: Call, g: Any, x: Any, scale: Any, mean: Any, variance: Any, epsilon: float, mask: Any = None
) -> tuple[Any, ...]:
    """The gradients for x, scale and offset by a call that takes these arguments as they are, and two vectors without elements."""
    dx, channels = torch.empty_like(x), scale.shape[0]
    whole = scale.new_empty(2 * channels, dtype=torch.float32)
    dscale, doffset, *empty = whole.unsafe_split_with_sizes([channels, channels, 0, 0])
    pointers = (g, x, dx, scale, mean, variance, dscale, doffset, mask, *_memory(x, call))
    call.launch(pointers, (epsilon,), (x.data_ptr() | g.data_ptr()) % 16 == 0)
    return dx, dscale, doffset, *empty
