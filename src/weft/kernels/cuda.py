"""Batch norm on CUDA, in Triton: how a call is planned and launched, in one launch; `cuda_kernels` has the kernels.

The host's part of a call is short: everything that depends on shapes, dtypes and layouts is in a `_Call`, made once for all calls
of a kind, with the compiled kernel.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton

from ..core.torch_internals import stream_handle
from ..errors import InvalidArgumentError
from .cuda_kernels import backward, forward, inference
from .cuda_launch import INTERPRETED, Launcher, launcher_of

DTYPES = ("float32", "float16", "bfloat16")


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
    # Few channel blocks have many programs each: the fewer of them, the sooner their sums are added.
    if channels <= 64:
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
        self._use(_plan(shape, self.layout == "first", x.element_size(), self.device, kernel is not backward))

    def _use(self, plan: Plan) -> None:
        self.plan = plan
        rows, columns = plan.tile
        self.sizes = (plan.total, plan.channels, plan.inner, plan.all_tiles, plan.members)
        self.options = {"FIRST": plan.channels_first, "BR": rows, "BC": columns, **self._own}
        if self.kernel is not inference:
            self.options |= {
                "M": min(triton.next_power_of_2(plan.members), 128 if columns <= 64 or plan.channels_first else 32),
                "KEEP": plan.tiles == 1, "SINGLE": plan.members == 1, "PHASE": 0, "STAGES": STAGES,
            }  # fmt: skip
        # In the order of the kernel's parameters: a compiled kernel takes them so.
        self.constants = tuple(self.options[name] for name in self.kernel.arg_names if name in self.options)
        self.numbers = 3 * plan.members * plan.channels
        self.grid = (plan.blocks * plan.members, 1, 1)
        self.run: Launcher | None = None

    def launch(self, pointers: tuple[Any, ...], floats: tuple[float, ...], aligned: bool) -> None:
        """Launch the kernel; `pointers` are tensors, or None."""
        if INTERPRETED:
            for phase in (1, 2) if self.options.get("SINGLE") is False else (0,):
                options = self.options | ({"PHASE": phase} if "PHASE" in self.options else {})
                self.kernel[self.grid](*pointers, *floats, *self.sizes, **options)
            return
        if self.run is not None and aligned:
            addresses = [x if x is None else x.data_ptr() for x in pointers]
            self.run(self.grid, stream_handle(self.device), *addresses, *floats, *self.sizes, *self.constants)
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
        if aligned:
            self.run = launcher_of(compiled)


_calls: dict[Any, _Call] = {}


def _call(kernel: Any, x: Any, axis: int, mask: Any, **options: Any) -> _Call:
    key = (kernel.__name__, x.shape, x.stride(), axis, x.dtype, x.device, mask is None, *options.values())
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
    key = (device, stream_handle(device.index))
    found = _scratch.get(key)
    if found is None:
        found = _scratch[key] = _Scratch(device)
        _captured.setdefault(device, _CapturedGates(device))
    return found.of(call)


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
    used = _vectors(scale, 2)
    return _normalize(x, (scale, offset), epsilon, axis, mask, used, _NO_UPDATE), *used


def batch_norm_running(
    x: Any, scale: Any, offset: Any, epsilon: float, axis: int, old: tuple[Any, Any] | None, new: tuple[Any, Any] | None,
    weights: tuple[float, float, float],
) -> tuple[Any, ...]:  # fmt: skip
    """`batch_norm`, and new running statistics in the same launch; and a zero.

    With `weights` (keep, share, corrected) they are keep * old + share * mean and keep * old + corrected * variance. Without `old`
    nothing is kept. They are written to `new`, which may be `old`, or to new vectors.
    """
    device, before = x.device, (None, None)
    if old is not None:
        before = _vector("mean", old[0], device), _vector("variance", old[1], device)
    *used, zero = _vectors(scale, 2 if new else 4, 1)
    new, zero = new or used[2:], zero.view(())
    update = _Update(1 if old is None else 2, (*before, *new, zero), weights)
    return _normalize(x, (scale, offset), epsilon, axis, None, used[:2], update), *used[:2], *new, zero


def _vectors(like: Any, count: int, more: int = 0) -> Any:
    """Memory for `count` vectors of the length of another, and one of `more` numbers, in one allocation."""
    channels = like.shape[0]
    whole = like.new_empty(count * channels + more, dtype=torch.float32)
    return whole.unsafe_split_with_sizes([channels] * count + ([more] if more else []))


class _Update(NamedTuple):
    """How a forward makes new running statistics: not (0), from the batch (1), from the batch and the old ones (2)."""

    kind: int
    vectors: tuple[Any, ...]  # the old mean and variance, the new ones, and where to write a zero
    weights: tuple[float, float, float]


_NO_UPDATE = _Update(0, (None,) * 5, (0.0, 0.0, 0.0))


def _normalize(
    x: Any, vectors: tuple[Any, Any], epsilon: float, axis: int, mask: Any, used: Any, update: _Update
) -> Any:
    call = _call(forward, x, axis, mask, UPDATE=update.kind)
    if call.layout == "other":
        x = x.contiguous() if axis == 1 else _channels_last(x, axis)
        return _normalize(x, vectors, epsilon, axis, mask, used, update)
    device, y = x.device, torch.empty_like(x)
    scale, offset = _vector("scale", vectors[0], device), _vector("offset", vectors[1], device)
    rows = _rows_that_count(mask, device)
    pointers = (x, y, scale, offset, *used, rows, *update.vectors, *_memory(x, call))
    _launch(call, x, pointers, (*update.weights, epsilon), x.data_ptr() % 16 == 0)
    return y


def _channels_last(x: Any, axis: int) -> Any:
    """`x` with its channels last in memory."""
    return x.movedim(axis, -1).contiguous().movedim(-1, axis)


def batch_norm_inference(
    x: Any, scale: Any, offset: Any, mean: Any, variance: Any, epsilon: float, axis: int, mask: Any
) -> Any:
    """See `reference.batch_norm_inference`."""
    call = _call(inference, x, axis, mask)
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
    call = _call(backward, x, axis, mask, TRAINING=is_training)
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
