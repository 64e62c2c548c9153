"""The C++ kernels of `weft._native`: batch norm and rows on the CPU. Importing this module sets the number of their threads.

They take arrays of NumPy, torch and JAX in host memory as they lie there, and return arrays of the same library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

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
    """The cores this process may use: its CPU affinity, and the least quota of its cgroups rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _quota() or cores)


def _quota() -> int | None:
    found = []
    for folder, names in _cgroups():
        with suppress(OSError, ValueError):  # "max" means that there is none
            quota, period = " ".join(_read(f"{folder}/{name}") for name in names).split()
            if int(quota) > 0:
                found.append(-(-int(quota) // int(period)))
    return min(found, default=None)


def _cgroups() -> Iterator[tuple[str, list[str]]]:
    """The folders of the cgroups of both versions that limit this process, from the root on, with the files of their quotas."""
    with suppress(OSError, ValueError):
        for line in _read(_OWN_CGROUPS).splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            folder = f"{_CGROUPS}/cpu" if controllers else _CGROUPS
            names = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
            yield folder, names  # a container may see its own group here, whatever its name is
            for part in group.strip("/").split("/"):
                folder = f"{folder}/{part}"
                yield folder, names


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


_CGROUPS, _OWN_CGROUPS = "/sys/fs/cgroup", "/proc/self/cgroup"

set_num_threads(_cores())
