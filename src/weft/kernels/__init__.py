"""Kernels: the functions that compute on memory, in several implementations.

A kernel is a function of the same name in several files. `reference` defines all of them in array-API code that every library
runs. `host` has those that NumPy alone runs at memory speed, `native` those in C++, `cpu_ragged` those compiled by Numba, `cuda`
those in Triton. `choice.KERNELS` lists them. `best(name, x)` returns the implementation for the array `x`. A file lists in `DTYPES`
the dtypes it takes, for all its kernels or by name; `JAX_BYTES` is the size from which it takes JAX arrays, `accepts(x)` may refuse
arrays for other reasons.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

from ..core.check import whole
from . import pool
from .choice import KERNELS, MODULES, best, is_installed, use, which

__all__ = ["MODULES", "PROCESS", "best", "set_num_threads", "use", "warmup", "which"]

#: The process that imported this package. A forked child has none of its threads.
PROCESS = os.getpid()


def set_num_threads(count: int) -> None:
    """Run kernels on `count` threads at most; on tensors of torch, on no more than torch uses.

    The default is the number of cores that the CPU affinity and the cgroup allow.
    """
    pool.resize(whole("count", count))


def warmup(dtypes: Sequence[str] = ("float32",)) -> None:
    """Compile the CPU kernels for some dtypes ahead of their first use; the result stays on disk.

    Without Numba there is nothing to compile.
    """
    if is_installed("cpu"):
        for file in KERNELS["cpu"]:
            import_module(f"{__name__}.{file}").warm_up(dtypes)


# Imported now, not at the first call: a child forked while another thread imports a module finds that module locked.
from . import host, reference  # noqa: E402, F401
