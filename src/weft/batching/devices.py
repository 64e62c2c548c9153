"""Functions that run on another device than their callers' rows: the options `device` and `devices`.

A batch is joined where its callers' rows are and moved to the device once; its result goes back once. On an accelerator each
device has a stream of its own, so that a batch is moved while others are computed. PyTorch differentiates through the moves.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..core.arrays import library_of
from ..core.inputs import shown
from ..errors import FailedPreconditionError, InvalidArgumentError
from ..ragged.tensor import RaggedTensor
from . import results, trees
from .options import Options, kind_of


def placed(f: Any, options: Options) -> Callable[..., Any]:
    """Return a function that runs `f` on the option's device, or each batch on one of its devices."""
    functions, devices = [f], [options.device]
    if options.devices or isinstance(f, (list, tuple)):
        if not (isinstance(f, (list, tuple)) and f) or len(f) != len(options.devices):
            given = f"{len(f)} functions" if isinstance(f, (list, tuple)) else "one function"
            raise InvalidArgumentError(
                f"devices must go with a list of as many functions, each with parameters of its own, got {len(options.devices)} "
                f"devices and {given}"
            )
        functions, devices = list(f), list(options.devices)
    for each in functions:
        if not callable(each) or kind_of(each) != "result":
            raise InvalidArgumentError(f"a function on a device must return its result at once, got {shown(each)}")
    if len({id(each) for each in functions}) < len(functions):
        raise InvalidArgumentError("devices must go with a model of its own for each device, got the same one twice")
    if options.vjp is not None:
        raise InvalidArgumentError("vjp must be None with device or devices, whose gradients are PyTorch's")
    if find_spec("torch") is None:
        raise FailedPreconditionError("device and devices need PyTorch: pip install torch")
    return PlacedFunction([_Place(*pair) for pair in zip(functions, devices, strict=True)])


class _Place:
    """A function and the device that it runs on."""

    def __init__(self, function: Callable[..., Any], device: Any) -> None:
        import torch

        try:
            self.device = torch.device(device)
        except Exception as error:  # such as an OverflowError
            raise InvalidArgumentError(
                f"device must be a device of PyTorch, got {shown(device)}: {error!s:.200}"
            ) from None
        is_cuda = self.device.type == "cuda"
        if is_cuda and not torch.cuda.is_available():
            raise FailedPreconditionError(f"the device {device} must be available, but PyTorch finds no NVIDIA device")
        if is_cuda and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if isinstance(function, torch.nn.Module):
            for name, x in [*function.named_parameters(), *function.named_buffers()]:
                if x.device != self.device:
                    raise InvalidArgumentError(
                        f"the model must be on its device, {self.device}, got {name} on {x.device}: move it with .to(...)"
                    )
        self.function = function
        self.stream = torch.cuda.Stream(self.device) if is_cuda else None


class PlacedFunction:
    """Runs each call on a place that is free, on arrays that are moved there, and moves the result back."""

    def __init__(self, places: Sequence[_Place]) -> None:
        self._places, self._free = places, deque(places)
        self._local = threading.local()
        first: Any = places[0].function
        functools.update_wrapper(self, first, updated=())
        with suppress(TypeError, ValueError):  # builtins have no signature
            self.__signature__ = inspect.signature(getattr(first, "forward", first))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = getattr(self._local, "place", None)
        if outer is not None:  # a call inside the function
            return _run(outer, args, kwargs)
        try:
            place = self._free.popleft()
        except IndexError:
            # There are more runs than devices: `parallel` with one device, or a finalizer's call, which runs alone.
            place = None
        self._local.place = place or self._places[0]
        try:
            return _run(self._local.place, args, kwargs)
        finally:
            self._local.place = None
            if place is not None:
                self._free.append(place)


def _run(place: _Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    leaves, structure = trees.flatten_call(args, kwargs)
    home = _home(leaves)
    if home == place.device:
        return place.function(*args, **kwargs)
    with ExitStack() as stack:
        if place.stream is not None and (home is None or home.type == "cpu"):
            place.stream.wait_stream(torch.cuda.current_stream(place.device))  # an optimizer may have worked there
            stack.enter_context(torch.cuda.stream(place.stream))
        if home is None:
            stack.enter_context(torch.no_grad())
        moved, named = trees.unflatten_call([_there(x, place.device) for x in leaves], structure)
        return _back(place.function(*moved, **named), home)


def _home(leaves: Sequence[Any]) -> Any:
    """The device of the rows; None for NumPy."""
    for x in leaves:
        x = x.flat_values if isinstance(x, RaggedTensor) else x
        if library_of(x) == "torch":
            return x.device
        if library_of(x) == "jax":
            raise InvalidArgumentError(
                "device and devices take rows of NumPy and PyTorch, got an array of JAX: use jax.device_put"
            )
    return None


def _there(x: Any, device: Any) -> Any:
    """An argument on a device; NumPy's arrays become tensors."""
    import torch

    if isinstance(x, RaggedTensor):
        return x.with_values(_there(x.flat_values, device))
    if isinstance(x, np.ndarray):
        try:
            x = torch.from_numpy(np.ascontiguousarray(x))
        except TypeError as error:
            raise InvalidArgumentError(
                f"device and devices take arrays that PyTorch has, got {x.dtype}: {error}"
            ) from None
    if not isinstance(x, torch.Tensor) or x.device == device:
        return x
    if device.type == "cuda" and x.is_cpu and not x.requires_grad:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _back(result: Any, home: Any) -> Any:
    """A result with its tensors where the callers' rows are."""
    leaves, build = results.flatten(result)
    return build([_leaf_back(x, home) for x in leaves])


def _leaf_back(x: Any, home: Any) -> Any:
    if isinstance(x, (results.PerRow, results.Shared)):
        inside, build = results.flatten_inside(x.items if isinstance(x, results.PerRow) else x.value)
        return type(x)(build([_leaf_back(leaf, home) for leaf in inside]))
    if isinstance(x, RaggedTensor):
        return x.with_values(_leaf_back(x.flat_values, home))
    if library_of(x) != "torch":
        return x
    return x.detach().cpu().numpy() if home is None else x.to(home)
