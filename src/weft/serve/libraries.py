"""Functions in PyTorch or JAX behind NumPy arrays: each batch is converted once, and so is its result."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
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


def check_library(library: str) -> None:
    """Refuse a library that no function can take arrays of."""
    if library not in LIBRARIES:
        raise InvalidArgumentError(f"library must be one of {', '.join(LIBRARIES)}, got {library!r}")


def on_numpy(f: Callable[..., Any], library: str, device: str | None) -> Callable[..., Any]:
    """Return a function on NumPy arrays that calls `f` with arrays of `library` on `device`."""
    check_library(library)
    if library == "numpy":
        return f
    convert, context = _torch(device) if library == "torch" else _jax(device)
    run = _wrapped(f, convert, context)
    functools.update_wrapper(run, f, updated=())
    run.__name__ = getattr(f, "__name__", type(f).__name__)
    run.__signature__ = inspect.signature(getattr(f, "forward", f) if library == "torch" else f)  # type: ignore[attr-defined]
    return run


def streams(f: Callable[..., Any]) -> bool:
    """Return whether a function yields."""
    f = getattr(f, "__wrapped__", f)
    return inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f)


def _wrapped(f: Callable[..., Any], convert: Callable[[Any], Any], context: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function of the same kind as `f` on NumPy arrays: plain, a coroutine function, or one that yields."""

    def arguments(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [convert(x) for x in args], {name: convert(x) for name, x in named.items()}

    def run(*args: Any, **named: Any) -> Any:
        with context():
            args_, named_ = arguments(args, named)
            return to_numpy(f(*args_, **named_))

    async def run_async(*args: Any, **named: Any) -> Any:
        args_, named_ = arguments(args, named)
        return to_numpy(await f(*args_, **named_))

    def run_stream(*args: Any, **named: Any) -> Any:
        args_, named_ = arguments(args, named)
        for chunk in f(*args_, **named_):
            yield to_numpy(chunk)

    async def run_async_stream(*args: Any, **named: Any) -> Any:
        args_, named_ = arguments(args, named)
        async for chunk in f(*args_, **named_):
            yield to_numpy(chunk)

    if inspect.iscoroutinefunction(f):
        return run_async
    if inspect.isgeneratorfunction(f):
        return run_stream
    return run_async_stream if inspect.isasyncgenfunction(f) else run


def _torch(device: str | None) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    import torch

    def tensor(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        made = torch.from_numpy(x if x.flags.writeable else x.copy())
        return made if device is None else made.to(device, non_blocking=True)

    return tensor, torch.inference_mode


def _jax(device: str | None) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    import jax

    place = None if device is None else jax.devices(device)[0]
    return lambda x: jax.device_put(x, place) if isinstance(x, np.ndarray) else x, nullcontext
