"""Kernels: the functions that compute on memory, in several implementations.

A kernel is a function of the same name in several files. `reference` defines all of them in array-API code that every library
runs. `host` has those that NumPy alone runs at memory speed, `native` those in C++, `cuda` those in Triton. `choice.KERNELS` lists
them. `best(name, x)` returns the implementation for the array `x`. A file lists in `DTYPES` the dtypes it takes, for all its
kernels or by name; `JAX_BYTES` has the sizes from which kernels take JAX arrays, `accepts(x)` may refuse arrays for other reasons.
"""

from __future__ import annotations

import os

from ..core import check
from .choice import MODULES, best, is_installed, use, which

__all__ = ["MODULES", "NATIVE_VERSION", "PROCESS", "best", "set_num_threads", "use", "which"]

#: The process that imported this package. A forked child has none of its threads.
PROCESS = os.getpid()

#: The version of the functions of `weft._native`, which native/module.pyx compares with its own: an extension that was built from
#: other sources is refused. Raise both numbers when a function there changes its name or its parameters.
NATIVE_VERSION = 5


def set_num_threads(count: int) -> None:
    """Run kernels on `count` threads at most; on tensors of torch, on no more than torch uses.

    The default is the number of cores that the CPU affinity and the cgroup allow. No kernel runs on more than 64.
    """
    found = check.count("count", count)
    if is_installed("native"):
        from . import native  # its import sets the default

        native.set_num_threads(min(found, 1 << 62))  # what fits its integer; it takes the least of this and 64


# Imported now, not at the first call: a child forked while another thread imports a module finds that module locked.
from . import host, reference  # noqa: E402, F401
