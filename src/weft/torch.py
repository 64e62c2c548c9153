"""For users of PyTorch: batch norm as a module."""

from __future__ import annotations

from typing import Any

import torch

from ._normalize import CONVENTIONS, batch_norm
from .errors import InvalidArgumentError


class BatchNorm(torch.nn.Module):
    """Batch norm over inputs of any rank, with rows that do not count.

    The names of parameters and buffers are those of torch's own modules, so states can be exchanged. `momentum`,
    `eps` and whether the running variance is corrected follow the `convention`, as in `weft.batch_norm`.

    >>> module = BatchNorm(3)
    >>> module(torch.randn(8, 3, 5), mask=6).shape
    torch.Size([8, 3, 5])
    """

    def __init__(
        self, num_features: int, eps: float | None = None, momentum: float | None = None, affine: bool = True,
        track_running_stats: bool = True, *, axis: int = 1, convention: str = "torch",
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if convention not in CONVENTIONS:
            raise InvalidArgumentError(f"convention must be one of {', '.join(CONVENTIONS)}, got {convention!r}")
        self.num_features, self.axis, self.convention = num_features, axis, convention
        self.eps = CONVENTIONS[convention].epsilon if eps is None else eps
        self.momentum = CONVENTIONS[convention].momentum if momentum is None else momentum
        like = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.ones(num_features, **like)) if affine else None
        self.bias = torch.nn.Parameter(torch.zeros(num_features, **like)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features, **like) if track_running_stats else None)
        self.register_buffer("running_var", torch.ones(num_features, **like) if track_running_stats else None)
        counter = torch.tensor(0, dtype=torch.long, device=device) if track_running_stats else None
        self.register_buffer("num_batches_tracked", counter)

    def forward(self, x: Any, mask: Any = None) -> Any:
        """`x` normalized; rows outside `mask` (booleans, or the number of leading rows that count) come out as
        zeros."""
        is_training = self.training or self.running_mean is None
        result = batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var,
            training=is_training, momentum=self.momentum, epsilon=self.eps, axis=self.axis, mask=mask,
            convention=self.convention,
        )  # fmt: skip
        if self.training and self.running_mean is not None and x.numel():
            with torch.no_grad():
                self.running_mean.copy_(result.running_mean)
                self.running_var.copy_(result.running_variance)
                self.num_batches_tracked.add_(1)
        return result.y

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, axis={self.axis}, {self.convention}"
