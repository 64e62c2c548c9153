"""Weights on both sides: a replica's module, and the keeper's parameters with their optimizer.

The keeper sums the replicas' gradients in the order of the replicas, applies its optimizer once, and sends the new weights to
all replicas. So the weights are the same everywhere bit for bit, whatever machine a replica runs on, and one copy of the
optimizer's state is enough.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..core.interrupts import call_user
from ..errors import FailedPreconditionError, InvalidArgumentError

Tensor = Any


class ModuleWeights:
    """The parameters and buffers of a replica's module, in a fixed order."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.parameters = dict(module.named_parameters())
        stored = module.state_dict()
        self._buffer_names = [name for name, _ in module.named_buffers() if name in stored]
        by_memory = {id(x): name for name, x in (self.parameters | self.buffers).items()}
        named = dict(module.named_parameters(remove_duplicate=False)) | dict(
            module.named_buffers(remove_duplicate=False)
        )
        #: Every key of the state dict, and the name under which its tensor travels.
        self.aliases = {key: by_memory[id(named[key])] for key in stored if key in named}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the state dict by name: a module may put another tensor in the place of one."""
        now = dict(self._module.named_buffers())
        return {name: now[name] for name in self._buffer_names}

    def description(self) -> dict[str, Any]:
        """Return the names that travel, without the tensors."""
        return {
            "parameters": list(self.parameters),
            "buffers": self._buffer_names,
            "trained": [x.requires_grad for x in self.parameters.values()],
            "aliases": self.aliases,
        }

    def state(self) -> list[Tensor]:
        """Return copies of the parameters, then of the buffers, on the CPU."""
        return [x.detach().cpu().clone() for x in self._all()]

    def buffers_now(self) -> list[Tensor]:
        """Return copies of the buffers, on the CPU."""
        return [x.detach().cpu().clone() for x in self.buffers.values()]

    def gradients(self) -> list[Tensor | None]:
        """Return the parameters' gradients, on the CPU; None for a parameter without one."""
        return [None if x.grad is None else x.grad.to_dense().cpu() for x in self.parameters.values()]

    def load(self, state: Sequence[Tensor]) -> None:
        """Take new values, and forget all gradients."""
        with torch.no_grad():
            for x, new in zip(self._all(), state, strict=True):
                x.copy_(new)
        for x in self.parameters.values():
            x.grad = None

    def _all(self) -> list[Tensor]:
        return [*self.parameters.values(), *self.buffers.values()]


class KeptWeights:
    """The keeper's copy of the weights as of the last step, and their optimizer."""

    def __init__(
        self, description: dict[str, Any], state: Sequence[Tensor], optimizer: Callable[..., Any] | None
    ) -> None:
        self.description = description
        count = len(description["parameters"])
        self.parameters = [
            torch.nn.Parameter(x, trained) for x, trained in zip(state, description["trained"], strict=False)
        ]
        self.buffers = list(state[count:])
        self.optimizer = None if optimizer is None else call_user(optimizer, self.parameters)
        if optimizer is not None and not hasattr(self.optimizer, "step"):
            raise InvalidArgumentError(
                f"optimizer must be a function of the parameters that returns an optimizer, got {self.optimizer!r} from it"
            )

    def state(self) -> list[Tensor]:
        """Return the parameters, then the buffers."""
        return [*(x.detach() for x in self.parameters), *self.buffers]

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies by the keys of the module's state dict."""
        names = [*self.description["parameters"], *self.description["buffers"]]
        by_name = dict(zip(names, self.state(), strict=True))
        return {key: by_name[name].clone() for key, name in self.description["aliases"].items()}

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """If the block raises, take the weights and the optimizer's state back to what they were before."""
        state = [x.clone() for x in self.state()]
        optimizer = None if self.optimizer is None else _copy(self.optimizer.state_dict())
        try:
            yield
        except BaseException:
            self.load_parts(state, optimizer)
            raise

    def step(
        self,
        gradients: Sequence[Sequence[Tensor | None]],
        buffers: Sequence[Sequence[Tensor]],
        rows: Sequence[int],
    ) -> None:
        """Apply the sum of the replicas' gradients, and combine their buffers by the rows that each has seen."""
        assert self.optimizer is not None  # the keeper has checked it
        for i, x in enumerate(self.parameters):
            x.grad = sum_in_order([given[i] for given in gradients])
        try:
            call_user(self.optimizer.step)
        finally:
            for x in self.parameters:
                x.grad = None
        self.buffers = [combine(old, [given[i] for given in buffers], rows) for i, old in enumerate(self.buffers)]

    def load(self, given: dict[str, Tensor]) -> None:
        """Take the values of a module's state dict; refuse one that does not fit."""
        aliases = self.description["aliases"]
        if set(given) != set(aliases):
            missing, other = sorted(set(aliases) - set(given)), sorted(set(given) - set(aliases))
            raise InvalidArgumentError(
                f"the state dict must have the keys of the model: {missing} are missing, {other} are not the model's"
            )
        names = [*self.description["parameters"], *self.description["buffers"]]
        mine = dict(zip(names, [*self.parameters, *self.buffers], strict=True))
        for key, name in aliases.items():
            if not isinstance(given[key], torch.Tensor):
                raise InvalidArgumentError(f"{key} must be a tensor, got a {type(given[key]).__name__}")
            if tuple(given[key].shape) != tuple(mine[name].shape):
                raise InvalidArgumentError(
                    f"{key} must have the shape {list(mine[name].shape)}, got {list(given[key].shape)}"
                )
        with torch.no_grad():
            for key, name in aliases.items():
                mine[name].copy_(given[key])

    # --- on disk ---

    def save(self, path: Path, version: int) -> None:
        """Write everything to `path`: the file is there as a whole or not at all."""
        stored = {
            "version": version,
            "description": self.description,
            "state": [x.clone() for x in self.state()],
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(stored, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def restore(self, path: Path) -> int:
        """Take what `save` wrote, if it fits; return its version."""
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
            description, version = stored["description"], int(stored["version"])
        except Exception as error:
            raise FailedPreconditionError(
                f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if description != self.description:
            raise FailedPreconditionError(
                f"the checkpoint {path} is of another model: its parameters or buffers have other names"
            )
        self.load_parts(stored["state"], stored["optimizer"])
        return version

    def load_parts(self, state: Sequence[Tensor], optimizer: Any) -> None:
        """Take values of `state()` and of the optimizer's state dict."""
        with torch.no_grad():
            for x, new in zip([*self.parameters, *self.buffers], state, strict=True):
                if x.shape != new.shape:
                    raise FailedPreconditionError(
                        f"a checkpoint's tensor has the shape {list(new.shape)}, not {list(x.shape)}"
                    )
            for x, new in zip([*self.parameters, *self.buffers], state, strict=True):
                x.copy_(new)
        if optimizer is not None and self.optimizer is not None:
            self.optimizer.load_state_dict(optimizer)


def _copy(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    return [_copy(x) for x in state] if isinstance(state, list) else state


def sum_in_order(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum from first to last; None counts as zeros, and all None as None."""
    total = None
    for x in gradients:
        if x is not None:
            total = x.clone() if total is None else total.add_(x)
    return total


def combine(old: Tensor, buffers: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Return one buffer for all replicas: the mean weighted by rows, for integers the sum of what was added to `old`.

    A buffer that is the same everywhere stays as it is.
    """
    seen = [(x, n) for x, n in zip(buffers, rows, strict=True) if n > 0]
    if not seen:
        return old
    if all(torch.equal(x, seen[0][0]) for x, _ in seen) and (len(seen) == 1 or old.dtype.is_floating_point):
        return seen[0][0]
    if old.dtype.is_floating_point:
        total = sum(n for _, n in seen)
        mean = torch.zeros(old.shape, dtype=torch.float64)
        for x, n in seen:
            mean += x.double() * (n / total)
        return mean.to(old.dtype)
    if old.dtype is torch.bool or old.dtype.is_complex:
        return seen[0][0]
    return old + sum((x - old for x, _ in seen), torch.zeros_like(old))
