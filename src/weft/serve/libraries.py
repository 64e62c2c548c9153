"""Functions in PyTorch or JAX behind NumPy arrays: each batch is converted once, and so is its result."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError

LIBRARIES = ("numpy", "torch", "jax")


def library_of_function(f: Any, example: Mapping[str, Any] | None) -> str:
    """Return the library whose arrays a function takes: that of the example's arrays, "torch" for a module of PyTorch."""
    for value in (example or {}).values():
        root = type(value).__module__.partition(".")[0]
        if root == "torch":
            return "torch"
        if root in ("jax", "jaxlib"):
            return "jax"
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and isinstance(f, torch.nn.Module) else "numpy"


def to_numpy(value: Any) -> Any:
    """Return a result with NumPy arrays in place of others, in dicts, tuples and lists, too."""
    if isinstance(value, np.ndarray) or value is None or isinstance(value, (str, bytes, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {name: to_numpy(part) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = [to_numpy(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [to_numpy(part) for part in value]
    if hasattr(value, "detach"):  # PyTorch
        value = value.detach().cpu()
        return value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    return np.asarray(value) if hasattr(value, "__array__") else value


def on_numpy(f: Callable[..., Any], library: str, device: str | None) -> Callable[..., Any]:
    """Return a function on NumPy arrays that calls `f` with arrays of `library` on `device`."""
    if library not in LIBRARIES:
        raise InvalidArgumentError(f"library must be one of {', '.join(LIBRARIES)}, got {library!r}")
    if library == "numpy":
        return f
    run = _on_torch(f, device) if library == "torch" else _on_jax(f, device)
    signed = getattr(f, "forward", f) if library == "torch" else f
    functools.update_wrapper(run, f, updated=())
    run.__name__ = getattr(f, "__name__", type(f).__name__)
    run.__signature__ = inspect.signature(signed)  # type: ignore[attr-defined]
    return run


def _on_torch(f: Callable[..., Any], device: str | None) -> Callable[..., Any]:
    import torch

    def tensor(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        made = torch.from_numpy(x if x.flags.writeable else x.copy())
        return made if device is None else made.to(device, non_blocking=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return to_numpy(f(*map(tensor, args), **{name: tensor(x) for name, x in kwargs.items()}))

    return run


def _on_jax(f: Callable[..., Any], device: str | None) -> Callable[..., Any]:
    import jax

    place = None if device is None else jax.devices(device)[0]

    def array(x: Any) -> Any:
        return jax.device_put(x, place) if isinstance(x, np.ndarray) else x

    def run(*args: Any, **kwargs: Any) -> Any:
        return to_numpy(f(*map(array, args), **{name: array(x) for name, x in kwargs.items()}))

    return run
