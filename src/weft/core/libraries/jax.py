"""JAX: immutable arrays, and tracers whose values are not known."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ...errors import InvalidArgumentError
from .base import Library, lazy


class JAX(Library):
    """JAX's arrays and tracers."""

    name = "jax"
    converts_numpy = True

    @lazy
    def namespace(self) -> Any:
        return jax.numpy

    def device(self, x: Any) -> Any:
        return x.device if self.is_concrete(x) else "traced"

    def is_concrete(self, x: Any) -> bool:
        return not isinstance(x, jax.core.Tracer)

    def is_on_host(self, x: Any) -> bool:
        return self.is_concrete(x) and all(device.platform == "cpu" for device in x.devices())

    def asarray(self, x: Any, dtype: Any = None) -> Any:
        is_ours = isinstance(x, (jax.Array, jax.core.Tracer))
        return x if dtype is None and is_ours else jax.numpy.asarray(x, dtype=dtype)

    def host(self, x: Any) -> np.ndarray:
        if not self.is_concrete(x):
            raise InvalidArgumentError("the values of this argument are needed now: under jax.jit they are unknown")
        return super().host(x)

    def copy(self, x: Any) -> Any:
        return x

    def detach(self, x: Any) -> Any:
        return jax.lax.stop_gradient(x)


LIBRARY = JAX()
