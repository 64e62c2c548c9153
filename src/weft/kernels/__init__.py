"""Which implementation of a kernel runs: the array in hand decides.

A kernel is a function of the same name in several modules. `reference` is the definition, in array-API code that every
library runs; `host` is NumPy where NumPy alone reaches memory speed, `native` is C++, `cpu` is Numba, `cuda` is Triton. A
module lists in `DTYPES` what it takes, for all kernels or for each by name, and may hold `JAX_BYTES`, what a JAX array
must have at least, and `accepts(name, x)` for a closer look; a kernel exists there by being defined there. The kernels of
one kind may lie in several files, `cpu.py`, `cpu_rows.py`, ...
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

from ..core.check import whole
from . import pool
from .choice import MODULES, best, files, use, which

__all__ = ["MODULES", "PROCESS", "best", "set_num_threads", "use", "warmup", "which"]

#: The process that loaded this. Threads stay behind in a fork.
PROCESS = os.getpid()


def set_num_threads(count: int) -> None:
    """Run kernels on `count` threads at most; on tensors of torch, on no more than torch uses.

    The default is the number of cores that the CPU affinity and the cgroup allow.
    """
    pool.resize(whole("count", count))


def warmup(dtypes: Sequence[str] = ("float32",)) -> None:
    """Compile the CPU kernels for some dtypes ahead of their first use; the result stays on disk.

    Where Numba is not installed there is nothing to compile.
    """
    for file in sorted({*files("cpu").values()}):
        import_module(f"{__name__}.{file}").warm_up(dtypes)


# Not at the first call: a process forked while another thread imports a module finds that module locked for ever.
from . import host, reference  # noqa: E402, F401
