"""How Triton kernels are launched with little work on the host: by the driver's own function, with the addresses of the tensors."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import triton

from .choice import is_installed

#: True if Triton's interpreter runs the kernels, on the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Since this version a compiled kernel takes the values of all parameters, compile-time ones too.
_TAKES_CONSTANTS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)

#: The kinds of parameters, as `weft._native.CudaKernel` names them, by Triton's types, and their bytes.
_KINDS = {"i32": "i", "u32": "i", "i64": "l", "u64": "l", "fp32": "f", "constexpr": "-"}
_BYTES = {"p": 8, "i": 4, "l": 8, "f": 4}


class Launcher:
    """Launches a compiled kernel by the driver, or by Triton's launcher where weft cannot, or the driver refuses.

    The first way is for the rows "op 8x8x8x32, host" and those of rows "1 wide" of benchmarks/cuda.py. Both pass by the hooks of
    profilers, which take as long as the launch. A call takes the grid, the handle of the stream, the
    tensors, some of them None, and the other parameters that are not `constants`, in the kernel's order.
    """

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        self._compiled, self._constants = compiled, constants
        self._direct = _direct_kernel(compiled, len(constants))

    def __call__(
        self, grid: tuple[int, int, int], stream: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...]
    ) -> None:
        if self._direct is not None and self._direct(grid, stream, tensors, numbers):
            return
        compiled, addresses = self._compiled, [x if x is None else x.data_ptr() for x in tensors]
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *addresses, *numbers, *self._constants,
        )  # fmt: skip


def launcher_of(compiled: Any, constants: tuple[Any, ...]) -> Launcher | None:
    """What launches a compiled kernel with these compile-time parameters; None if this version of Triton must do it."""
    parts = (getattr(compiled, name, None) for name in ("run", "function", "packed_metadata"))
    return Launcher(compiled, constants) if _TAKES_CONSTANTS and None not in parts else None


@cache
def _driver() -> Any:
    """The library of CUDA's driver; None if it does not tell a kernel's parameters."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return found if hasattr(found, "cuFuncGetParamInfo") else None  # CUDA 12.4


def _direct_kernel(compiled: Any, constants: int) -> Any:
    """A compiled kernel as the driver launches it; None if it needs what only Triton's launcher does, or that cannot be told.

    Its last parameters are so many constants, which it does not take.
    """
    metadata: Any = getattr(compiled, "metadata", None)
    types = getattr(getattr(compiled, "src", None), "signature", None)
    driver = _driver() if is_installed("native") else None
    if driver is None or metadata is None or not types:
        return None
    unused = ("launch_pdl", "global_scratch_size", "profile_scratch_size")
    if getattr(metadata, "num_ctas", 1) != 1 or any(getattr(metadata, name, None) for name in unused):
        return None
    kinds = "".join("p" if str(each).startswith("*") else _KINDS.get(each, "?") for each in types.values())
    function = ctypes.c_void_p(compiled.function)
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while (
        driver.cuFuncGetParamInfo(function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0
    ):
        sizes.append(size.value)
    taken = [_BYTES.get(kind, 0) for kind in kinds if kind != "-"]
    more = sizes[len(taken) :]  # pointers to scratch memory, which is not used
    if "?" in kinds or sizes[: len(taken)] != taken or any(size != 8 for size in more):
        return None
    from .._native import CudaKernel

    is_cooperative = bool(getattr(metadata, "launch_cooperative_grid", False))
    launch = driver.cuLaunchCooperativeKernel if is_cooperative else driver.cuLaunchKernel
    address = ctypes.cast(launch, ctypes.c_void_p).value
    threads = metadata.num_warps * getattr(metadata, "warp_size", 32)
    kinds = kinds[: len(kinds) - constants]
    return CudaKernel(address, compiled.function, kinds.encode(), len(more), threads, metadata.shared, is_cooperative)
