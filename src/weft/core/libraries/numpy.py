"""NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Library, lazy


class NumPy(Library):
    """NumPy's arrays. Values that are no arrays are treated as NumPy's."""

    name = "numpy"

    @lazy
    def namespace(self) -> Any:
        import array_api_compat.numpy as xp  # slow: it imports all lazy submodules of NumPy

        return xp

    def asarray(self, x: Any, dtype: Any = None) -> np.ndarray:
        return np.asarray(x, dtype=dtype)

    def zeros_like(self, x: Any) -> np.ndarray:
        return np.zeros(x.shape, x.dtype)  # a tenth of the time: the second order of benchmarks/batch_norm.py, 8x8x8x32


LIBRARY = NumPy()
