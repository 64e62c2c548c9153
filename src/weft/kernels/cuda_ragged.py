"""Row kernels on CUDA, in Triton: rows gathered, padded, placed, repeated and reduced, each in one launch.

Splits stay on the host, with a copy on the device that is made without waiting for it. The reference does what these kernels do not
take.
"""

from __future__ import annotations

import math
import weakref
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch

from ..core.arrays import library_of
from ..core.torch_internals import current_device, stream_handle
from ..core.torch_split import point_now
from ..errors import FailedPreconditionError
from . import reference
from .cuda_launch import INTERPRETED, Launcher, launcher_of
from .cuda_ragged_kernels import move, reduce, softmax

_MOVED = frozenset(["float16", "bfloat16", "float32", "float64", "int32", "int64"])
_FLOATS = frozenset(["float16", "bfloat16", "float32", "float64"])
DTYPES = {
    "take_rows": _MOVED, "pad_rows": _MOVED, "place_rows": _MOVED, "add_rows": _FLOATS, "repeat_rows": _MOVED,
    "row_sum": _FLOATS, "row_max": _FLOATS, "row_softmax": _FLOATS,
}  # fmt: skip

#: Results of so many rows need 64 bits for the numbers of rows.
LARGE = 1 << 31


def accepts(x: Any) -> bool:
    """True if the kernels can process `x`: offsets fit 32 bits, and a row is not so long that CUDA refuses the grid."""
    return bool(x.ndim >= 1 and 0 < x.numel() < min(1 << 31, x.shape[0] << 22))


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
    if device.index != current_device():
        with torch.cuda.device(device):
            _launch(kernel, grid, pointers, numbers, constants)
        return
    key = (kernel.__name__, device, values.dtype, constants)
    found = _launchers.get(key)
    if found is not None and values.data_ptr() % 16 == 0:
        found(grid, stream_handle(device.index), pointers, numbers)
        return
    launcher = launcher_of(kernel[grid](*pointers, *numbers, *constants, num_warps=4), constants)
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


#: A program reduces so many numbers at a time: the more of them there are, the more.
FEWEST, MOST = 1024, 4096

#: How a kernel is launched: its grid and its compile-time parameters.
Plan: TypeAlias = tuple[tuple[int, int, int], tuple[Any, ...]]


@lru_cache(maxsize=4096)
def _reducing(kernel: Any, shape: tuple[int, ...], rows: int, length: int, kind: str | None) -> Plan:
    """How to reduce rows of about this length, of values of a shape; without a `kind`, `length` is that of the longest."""
    width = math.prod(shape[1:])
    numbers = min(_power_of_2(width), 128)
    step = min(_power_of_2(max(length, 1)), max(1, 4096 // numbers))  # values of a row at a time
    elements = min(max(_power_of_2(shape[0] * width >> 10), FEWEST), MOST)
    block = max(1, elements // (numbers * step))
    constants = (width, length <= step if kind is None else kind, block, step, numbers)
    return (-(-rows // block), -(-width // numbers), 1), constants


@lru_cache(maxsize=4096)
def _moving(shape: tuple[int, ...], rows: int, kind: str, count: int, columns: int, is_zero: bool) -> Plan:
    """How to write so many rows: each is one of `count` rows of values of a shape, or the default."""
    width = math.prod(shape[1:])
    numbers = min(_power_of_2(width), 1024)
    elements = min(max(_power_of_2(rows * width >> 10), 256), 2048)  # enough programs for all multiprocessors
    block = max(1, elements // numbers)
    steps = max(count, 1).bit_length() + 1
    steps = 4 * -(-steps // 4)  # few compiled kernels for many lengths
    constants = (width, kind, is_zero, steps, (rows >= LARGE) + (columns >= LARGE), block, numbers)
    return (-(-rows // block), -(-width // numbers), 1), constants


def _moved(
    values: Any, rows: int, kind: str, splits: np.ndarray, count: int, *, columns: int = 1, default: Any = None,
    starts: np.ndarray | None = None, lengths: np.ndarray | None = None,
) -> Any:  # fmt: skip
    values = values.resolve_neg().contiguous()
    shape, device = values.shape, values.device
    out = values.new_empty((rows, *shape[1:]))
    if not rows:
        return out
    grid, constants = _moving(shape, rows, kind, count, columns, default is None)
    others = [None if x is None else _on_device(x, device).here() for x in (splits, starts, lengths)]
    _launch(move, grid, (values, out, default, *others), (shape[0], rows, count, columns), constants)
    return out


def _default(values: Any, default: Any) -> Any:
    """The default as one row; None for zeros."""
    if isinstance(default, (bool, int, float)) and default == 0:
        return None
    if library_of(default) == "torch":
        default = default.detach()
    row = torch.as_tensor(default, dtype=values.dtype, device=values.device)
    return row.resolve_neg().expand(values.shape[1:]).contiguous()


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
    values, rows = values.resolve_neg().contiguous(), len(splits) - 1
    shape = values.shape
    out = values.new_empty((rows, *shape[1:]))
    if rows:
        grid, constants = _reducing(reduce, shape, rows, int(splits[-1] - splits[0]) // rows, kind)
        copy = _on_device(splits, values.device).here()
        _launch(reduce, grid, (values, out, copy), (shape[0], rows), constants)
    return out


def row_softmax(values: Any, splits: np.ndarray) -> Any:
    """See `reference.row_softmax`."""
    values, rows = values.resolve_neg().contiguous(), len(splits) - 1
    out = torch.empty_like(values)
    if rows:
        copy = _on_device(splits, values.device)
        grid, constants = _reducing(softmax, values.shape, rows, copy.longest(splits), None)
        _launch(softmax, grid, (values, out, copy.here()), (values.shape[0], rows), constants)
    return out
