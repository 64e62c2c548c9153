"""The C++ kernels of `weft._native`: batch norm and rows on the CPU. Importing this module sets the number of their threads.

They take arrays of NumPy, torch and JAX in host memory as they lie there, and return arrays of the same library.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .._native import (
    add_rows,
    all_below,
    batch_norm,
    batch_norm_grad,
    batch_norm_grad_grad,
    batch_norm_inference,
    batch_norm_inference_grad,
    batch_norm_inference_grad_grad,
    batch_norm_running,
    longest_row,
    pad_rows,
    place_rows,
    range_rows,
    row_bounds,
    row_max,
    row_softmax,
    row_sum,
    take_rows,
)
from .._native import set_num_threads as set_num_threads
from ..core.arrays import NUMERIC_DTYPES

_BATCH_NORM = [
    batch_norm, batch_norm_running, batch_norm_inference,
    batch_norm_grad, batch_norm_inference_grad,
    batch_norm_grad_grad, batch_norm_inference_grad_grad,
]  # fmt: skip
_ALL = frozenset(NUMERIC_DTYPES)
_ADDED = _ALL - {"bool", "float16", "bfloat16"}
_COMPARED = _ADDED - {"complex64", "complex128"}
_INDICES = frozenset(["int32", "int64"])
_DTYPES = {
    _ALL: [take_rows, pad_rows, place_rows],
    _ADDED: [add_rows, row_sum],
    _COMPARED: [row_max],
    _INDICES: [all_below, longest_row, row_bounds],
    frozenset(["float32", "float64"]): [row_softmax],
    frozenset(["int32", "int64", "float32", "float64"]): [range_rows],
    frozenset(["float16", "bfloat16", "float32", "float64"]): _BATCH_NORM,
}
DTYPES = {kernel.__name__: dtypes for dtypes, kernels in _DTYPES.items() for kernel in kernels}

#: JAX arrays from here on: below, copying the result into JAX costs more than the kernel saves.
JAX_BYTES = {kernel.__name__: 1 << 20 for kernel in _BATCH_NORM}


def _cores() -> int:
    """The cores this process may use: its CPU affinity, and the quota of its cgroup rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _quota() or cores)


def _quota() -> int | None:
    for paths in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # of cgroups of both versions
        with suppress(OSError, ValueError):  # "max" means that there is none
            quota, period = " ".join((_CGROUP / path).read_text() for path in paths).split()
            if int(quota) > 0:
                return -(-int(quota) // int(period))
    return None


_CGROUP = Path("/sys/fs/cgroup")

set_num_threads(_cores())
