"""For users of PyTorch: batch norm as a module, and models with it in place of torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..core import check
from ..core.inputs import refuse_traced, shown, take
from ..core.torch_internals import children_of, has_hooks
from ..errors import InvalidArgumentError
from . import torch_function
from .derivatives import Mode, batch_norm_grad
from .function import (
    CONVENTIONS,
    blended,
    changed,
    check_epsilon,
    check_momentum,
    check_stored,
    check_writable,
    normalized,
)

__all__ = ["BatchNorm", "convert"]


class BatchNorm(torch.nn.Module):
    """Batch norm over inputs of any rank, with rows that do not count.

    The names of parameters and buffers are those of torch's own modules, so states can be exchanged. `momentum`,
    `eps` and whether the running variance is corrected follow the `convention`, as in `weft.batch_norm`. With `cumulative`
    the running statistics are the plain average over all batches: what torch means by `momentum=None`.

    >>> import torch
    >>> module = BatchNorm(3)
    >>> module(torch.randn(8, 3, 5), mask=6).shape
    torch.Size([8, 3, 5])
    """

    __module__ = "weft.torch"  # where users find it: pickles name it so

    _version = 2  # of the state: since torch's second, the batches are counted

    def __init__(
        self, num_features: int, eps: float | None = None, momentum: float | None = None, affine: bool = True,
        track_running_stats: bool = True, *, axis: int = 1, convention: str = "torch", cumulative: bool = False,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        rules = CONVENTIONS[check.one_of("convention", convention, tuple(CONVENTIONS))]
        self.num_features, self.axis = check.whole("num_features", num_features), check.whole("axis", axis)
        if self.num_features < 0:
            raise InvalidArgumentError(f"num_features must be 0 or more, got {num_features}")
        self.convention, self.cumulative = convention, check.flag("cumulative", cumulative)
        # As torch's, it may be switched off for a while.
        self.track_running_stats = check.flag("track_running_stats", track_running_stats)
        self.eps = rules.epsilon if eps is None else check_epsilon("eps", eps)
        self.momentum = rules.momentum if momentum is None else check_momentum(momentum)
        self._make(check.flag("affine", affine), device, dtype)
        self.reset_parameters()

    def _make(self, affine: bool, device: Any, dtype: Any) -> None:
        """Make the parameters and buffers."""
        count, tracks, like = self.num_features, self.track_running_stats, {"device": device, "dtype": dtype}
        try:
            self.weight = torch.nn.Parameter(torch.empty(count, **like)) if affine else None
            self.bias = torch.nn.Parameter(torch.empty(count, **like)) if affine else None
            self.register_buffer("running_mean", torch.empty(count, **like) if tracks else None)
            self.register_buffer("running_var", torch.empty(count, **like) if tracks else None)
            counter = torch.tensor(0, dtype=torch.long, device=device) if tracks else None
        except (RuntimeError, TypeError, OverflowError) as error:  # what torch raises for a size, a device or a dtype
            raise InvalidArgumentError(
                f"num_features, device and dtype must make vectors of floating point, got {count}, {shown(device)} and "
                f"{shown(dtype)}: {error}"
            ) from None
        self.register_buffer("num_batches_tracked", counter)

    def reset_running_stats(self) -> None:
        """Forget all batches."""
        if self.running_mean is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Forget all batches and all training."""
        self.reset_running_stats()
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Any, mask: Any = None) -> Any:
        """`x` normalized; rows outside `mask` (booleans, or the number of leading rows that count) come out as
        zeros."""
        in_graph = torch.compiler.is_compiling()
        if not in_graph:
            if (y := torch_function.forward(self, x, mask)) is not None:
                return y
            take("x", x)  # first: `torch.jit.trace` records, or refuses, even a look at a parameter's shape
        self._check_channels(x)
        mean, variance = self.running_mean, self.running_var
        vectors = self.weight, self.bias, mean, variance
        rest: Any = self.training or mean is None, self.eps, self.axis, mask, self.convention
        used: Any = _in_graph(x, *vectors, self._momentum(), *rest) if in_graph else normalized(x, vectors, *rest)
        if self.training and self.track_running_stats and mean is not None and used[0].numel():
            new: Any = used[1:] if in_graph else blended(used, self._momentum(), self.convention)
            if not in_graph:
                if not (mean.shape == new[0].shape and variance.shape == new[1].shape):
                    raise changed()
                self._check_count()
                check_writable(mean, variance, self.num_batches_tracked)
            with torch.no_grad():
                mean.copy_(new[0])
                variance.copy_(new[1])
            self.num_batches_tracked.add_(_batches_in(mask) if in_graph else int(used.count > 0))
        return used[0]

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which calls this first."""
        refuse_traced("weft.torch.BatchNorm")

    def _check_channels(self, x: Any) -> None:
        vector = self.running_mean if self.weight is None else self.weight
        if vector is None or not isinstance(x, torch.Tensor) or x.is_nested or not -x.ndim <= self.axis < x.ndim:
            return
        if x.shape[self.axis] != vector.shape[0]:
            raise InvalidArgumentError(
                f"x must have {vector.shape[0]} channels on axis {self.axis}, as the module has, got the shape {list(x.shape)}"
            )

    def _momentum(self) -> float:
        if not (self.cumulative and self.training and self.running_mean is not None):
            return self.momentum
        if not torch.compiler.is_compiling():
            self._check_count()
        share = 1 / (int(self.num_batches_tracked) + 1)
        return share if CONVENTIONS[self.convention].is_share_of_new else 1 - share

    def _check_count(self) -> None:
        if self.num_batches_tracked is None or self.num_batches_tracked.numel() != 1:
            raise InvalidArgumentError("num_batches_tracked must be one number where running statistics are kept")
        check_stored(self.num_batches_tracked)

    def extra_repr(self) -> str:
        kept = "cumulative" if self.cumulative else f"momentum={self.momentum}"
        return f"{self.num_features}, eps={self.eps}, {kept}, axis={self.axis}, {self.convention}"

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        key, count = f"{prefix}num_batches_tracked", self.num_batches_tracked
        if metadata.get("version", 1) < 2 and count is not None and key not in state:
            # Torch's first version did not count; as with torch's modules, the count then stays as it is.
            state[key] = torch.zeros_like(count, device="cpu") if count.is_meta else count
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def convert(module: torch.nn.Module) -> torch.nn.Module:
    """`module` with a `BatchNorm` in place of each `torch.nn.BatchNorm1d`, `2d` and `3d` in it, in mode and state the same.

    Parameters and buffers are the same objects, so optimizers stay valid. Children are replaced in place; subclasses of torch's
    modules, `SyncBatchNorm` among them, are left as they are.

    >>> convert(torch.nn.Sequential(torch.nn.Conv2d(1, 3, 1), torch.nn.BatchNorm2d(3)))[1]
    BatchNorm(3, eps=1e-05, momentum=0.1, axis=1, torch)
    """
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgumentError(f"convert takes a torch.nn.Module, got {shown(module)}")
    # All twins are made, or refused, before anything is replaced; one that stands in several places has one twin.
    twins = {old: _twin(old) for old in module.modules() if type(old) in _TORCH_CLASSES}
    for parent in list(module.modules()):
        for name, child in children_of(parent):
            if child in twins:
                setattr(parent, name, twins[child])
    return twins.get(module, module)


_TORCH_CLASSES = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def _twin(module: Any) -> BatchNorm:
    if has_hooks(module):
        raise InvalidArgumentError(f"a module with hooks cannot be converted: {module}")
    ours = BatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
        cumulative=module.momentum is None, device="meta",
    )  # fmt: skip
    for name in ("weight", "bias"):
        setattr(ours, name, getattr(module, name))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        ours.register_buffer(name, getattr(module, name))
    return ours.train(module.training)


def _batches_in(mask: Any) -> Any:
    """How many batches to count: none if no row counts."""
    if mask is None:
        return 1
    return int(mask > 0) if isinstance(mask, int) else torch.as_tensor(mask).any()


# --- under torch.compile: two operators that the compiler takes as they are ---


def _in_graph(x: Any, *given: Any) -> Sequence[Any]:
    """What `batch_norm` gives, by an operator that may stand in a compiled graph."""
    *vectors, momentum, training, epsilon, axis, mask, convention = given
    if isinstance(mask, int):
        mask = torch.arange(x.shape[0], device=x.device) < mask
    return torch.ops.weft.batch_norm(x, *vectors, mask, training, momentum, epsilon, axis, convention)[:3]


@torch.library.custom_op(
    "weft::batch_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? scale, Tensor? offset, Tensor? mean, Tensor? variance, Tensor? mask, bool training, "
    "float momentum, float epsilon, int axis, str convention) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _batch_norm(
    x: Any, scale: Any, offset: Any, mean: Any, variance: Any, mask: Any, training: bool,
    momentum: float, epsilon: float, axis: int, convention: str,
) -> tuple[Any, ...]:  # fmt: skip
    """The result, with the running statistics of a batch that was trained on, and the statistics that were used."""
    used = normalized(x, (scale, offset, mean, variance), training, epsilon, axis, mask, convention)
    new_mean, new_variance = blended(used, momentum, convention) if training else (None, None)
    if new_mean is None or new_variance is None:  # an operator always returns as many tensors
        new_mean = new_variance = _vector(x, 0)
    # And they are its own: not those it was given, nor the same twice.
    return _as_planned(x, used.y), *(v.clone() for v in (new_mean, new_variance, used.mean, used.variance))


@_batch_norm.register_fake
def _(
    x: Any, scale: Any, offset: Any, mean: Any, variance: Any, mask: Any, training: bool, *rest: Any
) -> tuple[Any, ...]:
    axis = rest[2]
    tracked = x.shape[axis] if training and mean is not None else 0
    sizes = tracked, tracked, x.shape[axis], x.shape[axis]
    return torch.empty_like(x), *(_vector(x, size) for size in sizes)


@torch.library.custom_op(
    "weft::batch_norm_grad",
    mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor? scale, Tensor mean, Tensor variance, Tensor? mask, bool training, float epsilon, "
    "int axis) -> (Tensor, Tensor, Tensor)",
)
def _batch_norm_grad(
    g: Any, x: Any, scale: Any, mean: Any, variance: Any, mask: Any, training: bool, epsilon: float, axis: int
) -> tuple[Any, ...]:
    """The gradients for x, scale and offset."""
    scale = _vector(x, x.shape[axis]).fill_(1) if scale is None else scale.to(mean.dtype)
    if not x.numel():
        return torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    back = batch_norm_grad(g, x, scale, mean, variance, mask, Mode(epsilon, axis % x.ndim, training))
    return _as_planned(x, back.x_grad), back.scale_grad, back.offset_grad


@_batch_norm_grad.register_fake
def _(g: Any, x: Any, scale: Any, mean: Any, *rest: Any) -> tuple[Any, ...]:
    return torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, scale, offset, _, _, mask, training, _, epsilon, axis, _ = inputs
    ctx.save_for_backward(x, scale, offset, *output[3:], mask)
    ctx.attributes = training, epsilon, axis


def _back(ctx: Any, g: Any, *_: Any) -> tuple[Any, ...]:
    x, scale, offset, mean, variance, mask = ctx.saved_tensors
    grads = torch.ops.weft.batch_norm_grad(g, x, scale, mean, variance, mask, *ctx.attributes)
    by_input = [None if v is None else d.to(v.dtype) for v, d in zip((x, scale, offset), grads, strict=True)]
    return *by_input, *[None] * 8


_batch_norm.register_autograd(_back, setup_context=_setup)


def _vector(x: Any, size: int) -> Any:
    return torch.empty(size, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)


def _as_planned(x: Any, y: Any) -> Any:
    """`y` in the memory layout that the compiler was told of."""
    planned = torch.empty_like(x)
    return y if y.stride() == planned.stride() else planned.copy_(y)
