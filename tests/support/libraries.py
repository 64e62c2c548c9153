"""Which array libraries there are, and arrays in and out of them."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest

LIBRARIES = ["numpy", "torch", "jax"]
# CI names the libraries that must be there; elsewhere an absent one is skipped.
REQUIRED = os.environ.get("WEFT_REQUIRE", "").split()


def need(library: str) -> None:
    """Skip the test if `library` is not installed."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed", allow_module_level=True)


def wide_numbers(on=True):
    """A block in which JAX has 64-bit numbers, or has not, in this thread."""
    import jax

    return (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(on)


def for_each(arguments, values, slow=(), ids=None):
    """A test for each of these values of an argument, or tuples for several, and a slow one for those in `slow`."""

    def case(value):
        given = (value,) if isinstance(arguments, str) else value
        return pytest.param(*given, marks=pytest.mark.slow if value in slow else ())

    return pytest.mark.parametrize(arguments, [case(value) for value in values], ids=ids)


def to(library, x):
    """`x` (NumPy or nested lists) as an array of `library`."""
    x = np.asarray(x)
    if library == "torch":
        import torch

        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
        return torch.from_numpy(x.copy())
    if library == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    return x


def back(x):
    """An array of any library as NumPy."""
    if type(x).__module__.startswith("torch"):
        import torch

        x = x.detach().cpu()
        if x.dtype == torch.bfloat16:
            import ml_dtypes

            return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()
    return np.asarray(x)
