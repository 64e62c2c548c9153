"""The modes of PyTorch and JAX in a caller's thread, which its batch has in common with all its callers."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

_LOADED = sys.modules
_torch: Any = None  # `torch_modes`, once PyTorch is loaded
_modes: tuple[Any, ...] = ()
_is_autocast_enabled: Any = None
_is_grad_enabled: Any = None
_is_inference_mode_enabled: Any = None
_jax: Any = None  # `jax_internals`, once JAX is loaded
_jax_readers: tuple[Any, ...] = ()
_last_jax: tuple[Any, Any] = (None, None)  # what was seen last, in any thread, and its mode


def torch_mode() -> Any:
    """Return the mode of PyTorch in this thread, None if PyTorch is not loaded."""
    if not _modes and not _find_torch():
        return None
    if _is_autocast_enabled():
        return _torch.current_mode()
    at = 2 if _is_grad_enabled() else 0  # as `current_mode`, compiled: benchmark row "small MLP, 64 threads"
    return _modes[at + 1 if _is_inference_mode_enabled() else at]


def _find_torch() -> bool:
    """Return whether PyTorch is loaded, and note what `torch_mode` asks of it."""
    global _torch, _modes, _is_autocast_enabled, _is_grad_enabled, _is_inference_mode_enabled
    if "torch" not in _LOADED:
        return False
    _torch = import_module("weft.batching.torch_modes")
    _is_autocast_enabled, _is_grad_enabled = _torch.is_autocast_enabled, _torch.is_grad_enabled
    _is_inference_mode_enabled = _torch.is_inference_mode_enabled
    _modes = _torch.MODES  # last: other threads look at it first
    return True


def in_torch_mode(mode: Any) -> AbstractContextManager[Any]:
    """Return a block in which this thread is in a mode of PyTorch."""
    return nullcontext() if mode is None or mode == torch_mode() else _torch.use_mode(mode)


def has_unkeyed_modes() -> bool:
    """Return whether this thread is in modes of PyTorch that only code in this thread is in, such as `with torch.device(...)`."""
    return bool(_modes) and _torch.has_modes()


def jax_mode() -> Any:
    """Return the `JaxMode` of this thread, None if JAX is not loaded."""
    global _last_jax
    if not _jax_readers and not _find_jax():
        return None
    seen = [read() for read in _jax_readers]
    last = _last_jax
    if last[0] == seen:
        return last[1]
    mode = _jax.mode_of(tuple(seen))
    _last_jax = (seen, mode)
    return mode


def _find_jax() -> bool:
    """Return whether JAX is loaded, and note what `jax_mode` asks of it."""
    global _jax, _jax_readers
    if "jax" not in _LOADED:
        return False
    _jax = import_module("weft.core.jax_internals")
    _jax_readers = _jax.READERS  # last: other threads look at it first
    return True


def in_jax_mode(mode: Any) -> AbstractContextManager[Any]:
    """Return a block in which this thread is in a mode of JAX."""
    return nullcontext() if mode is None or mode == jax_mode() else mode.use()
