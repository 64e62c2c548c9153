"""PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...errors import InvalidArgumentError
from ..memory import tensor_memory
from ..torch_internals import are_transforms_active, is_fake, is_view, is_wrapped, unwrap, without_transforms
from .base import Library, lazy


class Torch(Library):
    """PyTorch's tensors."""

    name = "torch"

    @lazy
    def namespace(self) -> Any:
        import array_api_compat.torch as xp

        return xp

    def device(self, x: Any) -> Any:
        return x.device

    def is_concrete(self, x: Any) -> bool:
        return x.device.type != "meta" and not is_fake(x)

    def is_on_host(self, x: Any) -> bool:
        return bool(x.device.type == "cpu")

    def asarray(self, x: Any, dtype: Any = None) -> Any:
        return x if dtype is None and isinstance(x, torch.Tensor) else self.namespace.asarray(x, dtype=dtype)

    def host(self, x: Any) -> np.ndarray:
        if not are_transforms_active():
            return _read(x)
        with without_transforms():  # or any operation would wrap its result again
            inner = unwrap(x)
            if inner is None:
                raise InvalidArgumentError(
                    "the values of this argument are needed now: under torch.vmap they are unknown"
                )
            return _read(inner)

    def index(self, values: np.ndarray) -> Any:
        return torch.from_numpy(values)

    def dtype(self, name: str) -> Any:
        return getattr(torch, name)

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.to(dtype)

    def copy(self, x: Any) -> Any:
        is_plain = type(x) is torch.Tensor and not x.requires_grad and not are_transforms_active()
        if is_plain and x.is_cpu and x.dtype is not torch.bfloat16:
            # By NumPy: torch reads the size of a tensor twice, and another thread may resize it in between.
            return torch.from_numpy(tensor_memory(x.detach()).copy())
        return x.clone()

    def is_view(self, x: Any) -> bool:
        return is_view(x)

    def has_graph(self, x: Any) -> bool:
        return bool(x.requires_grad or is_wrapped(x))

    def detach(self, x: Any) -> Any:
        return x.detach() if x.requires_grad else x


def _read(x: Any) -> np.ndarray:
    """The values of a tensor that no transform wraps."""
    try:
        x = x.detach().cpu()
        if x.dtype is torch.bfloat16:
            return tensor_memory(x.resolve_neg().view(torch.int16)).view(Library.dtype(LIBRARY, "bfloat16"))
        return tensor_memory(x)
    except (TypeError, RuntimeError) as error:
        raise InvalidArgumentError(f"the values of this argument must be readable on the host: {error}") from None


LIBRARY = Torch()
