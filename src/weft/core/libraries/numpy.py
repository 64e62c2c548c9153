"""NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Library


class NumPy(Library):
    """NumPy's arrays. Values that are no arrays are treated as NumPy's."""

    name = "numpy"

    namespace = np  # it has all that weft uses of the array API; importing array_api_compat.numpy takes 50 ms

    def asarray(self, x: Any, dtype: Any = None) -> np.ndarray:
        return np.asarray(x, dtype=dtype)


LIBRARY = NumPy()
