"""The modes of PyTorch in a thread: those that a batch has in common with its callers, and those that only one thread can be in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from ..core import torch_internals


class TorchMode(NamedTuple):
    """The settings of PyTorch that a batch must share with its callers."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, Any], ...]
    autocast_cache: bool = True


_DEVICES = ("cpu", "cuda", "xpu", "mps")
#: The modes without autocast, at 2 `grad` + `inference`.
MODES = tuple(TorchMode(grad, inference, ()) for grad in (False, True) for inference in (False, True))
is_autocast_enabled, is_grad_enabled = torch_internals.is_autocast_enabled, torch.is_grad_enabled
is_inference_mode_enabled = torch.is_inference_mode_enabled
has_modes = torch_internals.has_modes


def current_mode() -> TorchMode:
    """Return the mode of this thread."""
    if not is_autocast_enabled():
        return MODES[2 * is_grad_enabled() + is_inference_mode_enabled()]
    autocast = tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))
    cache = torch.is_autocast_cache_enabled()
    return TorchMode(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, cache)


@contextmanager
def use_mode(mode: TorchMode) -> Iterator[None]:
    """Set the mode of this thread for a block."""
    with ExitStack() as stack:
        if mode.inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(mode.grad))
        for device in _DEVICES:
            dtype = dict(mode.autocast).get(device)
            if dtype is not None or torch.is_autocast_enabled(device):
                cache, on = mode.autocast_cache, dtype is not None
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=cache))
        yield
