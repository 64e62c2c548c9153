"""How Triton kernels are launched with little work on the host: by their compiled object, with the addresses of the tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import triton

#: True if Triton's interpreter runs the kernels, on the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Since this version a compiled kernel takes the values of all parameters, compile-time ones too.
_TAKES_CONSTANTS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)

#: Takes the grid, the handle of the stream, and the values of all parameters: addresses for tensors.
Launcher: TypeAlias = Callable[..., None]


def launcher_of(compiled: Any) -> Launcher | None:
    """What launches a compiled kernel; None if this version of Triton must do it.

    It does what indexing `compiled` with a grid does, without the hooks of profilers, which take as long as the launch.
    """
    run, function = (getattr(compiled, name, None) for name in ("run", "function"))
    metadata = getattr(compiled, "packed_metadata", None)
    if not _TAKES_CONSTANTS or run is None or function is None or metadata is None:
        return None

    def launch(grid: tuple[int, int, int], stream: int, *values: Any) -> None:
        run(grid[0], grid[1], grid[2], stream, function, metadata, None, None, None, *values)

    return launch
