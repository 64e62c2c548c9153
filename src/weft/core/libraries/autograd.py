"""HIPS autograd: boxes around NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.tracer import getval, isbox

from .base import Library, lazy


class Autograd(Library):
    """The boxes of a gradient that is being recorded."""

    name = "autograd"

    @lazy
    def namespace(self) -> Any:
        import autograd.numpy as xp

        return xp

    def is_on_host(self, x: Any) -> bool:
        return False

    def asarray(self, x: Any, dtype: Any = None) -> Any:
        return x if dtype is None and isbox(x) else self.namespace.asarray(x, dtype=dtype)

    def host(self, x: Any) -> np.ndarray:
        return super().host(getval(x))

    def detach(self, x: Any) -> Any:
        return getval(x)


LIBRARY = Autograd()
