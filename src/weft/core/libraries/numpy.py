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


LIBRARY = NumPy()
