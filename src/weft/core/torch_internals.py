"""Every private name of PyTorch that weft uses, each behind a function with a fallback for versions that lack the name.

Functions that detect something answer, where the name is missing, in the way that is safe for the caller: the docstring says
how. Import this module only where torch is in use: it imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any

import torch
from torch.autograd import forward_ad

_C: Any = torch._C


def _find(path: str, owner: Any = _C) -> Any:
    """The attribute of `owner` at a dotted path; None if this version of torch does not have it."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


_transforms_active = _find("_are_functorch_transforms_active")
_wrapped_by_transform = _find("_functorch.is_functorch_wrapped_tensor")
_batched_by_vmap = _find("_functorch.is_batchedtensor")
_unwrapped = _find("_functorch.get_unwrapped")
_disable_transforms = _find("_DisableFuncTorch")
_dispatch_modes = _find("_len_torch_dispatch_stack")
_function_modes = _find("_len_torch_function_stack")
_saving_hooks = _find("_autograd._top_saved_tensors_default_hooks")
_tracing_state = _find("_get_tracing_state")
_any_autocast = _find("_is_any_autocast_enabled")
_multithreading = _find("_is_multithreading_enabled")
_will_execute = _find("_will_engine_execute_node")
_graph_task = _find("_current_graph_task_id")
_run_backward = _find("graph._engine_run_backward", torch.autograd)
_is_batch = _find("_functorch.is_legacy_batchedtensor")
_add_batch_dim, _remove_batch_dim = _find("_add_batch_dim", torch), _find("_remove_batch_dim", torch)
_queue_callback = _find("_execution_engine.queue_callback", torch.autograd.Variable)
_is_view = _find("_is_view", torch.Tensor)
_raw_stream = _find("_cuda_getCurrentRawStream")
_device = _find("_cuda_getDevice")

#: True if `are_transforms_active` can tell.
KNOWS_TRANSFORMS = _transforms_active is not None


def extension_file() -> str | None:
    """The file of the extension module of torch, which is linked with its OpenMP; None if unknown."""
    return getattr(_C, "__file__", None)


# ---- torch.func, forward mode, tracing


def _unknown() -> bool:
    return False


#: True inside a function transformed by `torch.func` or `torch.vmap`; False if unknown, see `KNOWS_TRANSFORMS`.
are_transforms_active: Callable[[], bool] = _transforms_active or _unknown


def is_wrapped(x: Any) -> bool:
    """True if a tensor is a wrapper of `torch.func` or `torch.vmap`; if unknown, whether a transform is active."""
    return _wrapped_by_transform(x) if _wrapped_by_transform is not None else are_transforms_active()


def unwrap(x: Any) -> Any:
    """The tensor inside the wrappers of `torch.func.grad`; None if its values are unknown, as under `torch.vmap`."""
    while is_wrapped(x):
        if _batched_by_vmap is None or _unwrapped is None or _batched_by_vmap(x):
            return None
        x = _unwrapped(x)
    return x


def without_transforms() -> AbstractContextManager[Any]:
    """A block in which operations on unwrapped tensors are not wrapped again."""
    return nullcontext() if _disable_transforms is None else _disable_transforms()


def is_forward_mode(x: Any) -> bool:
    """True inside `forward_ad.dual_level`; if unknown, whether `x` has a tangent."""
    try:
        return forward_ad._current_level >= 0
    except AttributeError:
        return forward_ad.unpack_dual(x).tangent is not None


def is_transformed() -> bool:
    """True if torch does more with an operation than run it and record its gradient: transforms, forward mode, modes, tracing.

    True if unknown.
    """
    return (
        not KNOWS_TRANSFORMS or _transforms_active() or getattr(forward_ad, "_current_level", 0) >= 0
        or _dispatch_modes is None or _dispatch_modes() > 0 or is_tracing()
    )  # fmt: skip


def has_modes() -> bool:
    """True if this thread is in modes that PyTorch keeps for it, such as `with torch.device(...)`, or saves tensors by hooks.

    True if unknown.
    """
    return (
        _function_modes is None or _dispatch_modes is None or _saving_hooks is None
        or _function_modes() > 0 or _dispatch_modes() > 0 or _saving_hooks(True) is not None
    )  # fmt: skip


def is_tracing() -> bool:
    """True while torch notes operations to run them on other tensors: `torch.jit.trace`, old exports to ONNX, `make_fx`.

    False in `make_fx` if unknown.
    """
    if _tracing_state() is not None if _tracing_state is not None else torch.jit.is_tracing():
        return True
    if _dispatch_modes is not None and _function_modes is not None and not (_dispatch_modes() or _function_modes()):
        return False  # there is no mode at all
    mode = _find("get_proxy_mode", sys.modules.get("torch.fx.experimental.proxy_tensor"))
    return mode is not None and mode() is not None


def is_followed(x: Any) -> bool:
    """True if torch follows operations on `x` for more than their gradients: in forward mode, or to note them."""
    return is_forward_mode(x) or is_tracing()


def _is_known_autocast_enabled() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda", "xpu", "mps"))


#: True if autocast is on for any device.
is_autocast_enabled: Callable[[], bool] = _any_autocast or _is_known_autocast_enabled


# ---- tensors and modules


def is_fake(x: Any) -> bool:
    """True for a fake tensor, which has a shape and no values, and a functional one, which may hold one; False if unknown."""
    kind = type(x)
    if kind.__module__ == "torch" or kind.__module__.startswith("torch.nn"):
        return False
    fake = _find("FakeTensor", sys.modules.get("torch._subclasses.fake_tensor"))
    functional = _find("FunctionalTensor", sys.modules.get("torch._subclasses.functional_tensor"))
    return isinstance(x, tuple(filter(None, (fake, functional))))


def is_view(x: Any) -> bool:
    """True if a tensor shares the memory of another one by a view; True if unknown."""
    return _is_view is None or _is_view(x)


def ragged_axis(nested: Any) -> int:
    """The axis of a jagged NestedTensor whose lengths differ; 1 if unknown."""
    return int(getattr(nested, "_ragged_idx", 1))


def parameters_of(module: Any) -> Any:
    """The own parameters of a module by name; absent ones may be missing or None."""
    found = module.__dict__.get("_parameters")
    return dict(module.named_parameters(recurse=False)) if found is None else found


def buffers_of(module: Any) -> Any:
    """The own buffers of a module by name; absent ones may be missing or None."""
    found = module.__dict__.get("_buffers")
    return dict(module.named_buffers(recurse=False)) if found is None else found


def children_of(module: Any) -> list[tuple[str, Any]]:
    """The children of a module with their names; a child with two names appears twice."""
    found = module.__dict__.get("_modules")
    if found is not None:
        return list(found.items())
    return [(name, m) for name, m in module.named_modules(remove_duplicate=False) if name and "." not in name]


def has_hooks(module: Any) -> bool:
    """True if a module has hooks of its own; False if unknown."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in names)


# ---- streams


def stream_handle(device: int) -> int:
    """CUDA's handle of the stream on which this thread works on a device; 0 is the default stream."""
    return int(torch.cuda.current_stream(device).cuda_stream) if _raw_stream is None else _raw_stream(device)


def current_device() -> int:
    """The number of the CUDA device on which this thread works; one must be in use."""
    return int(torch.cuda.current_device()) if _device is None else _device()


# ---- the backward pass


def direct_apply(function: Any) -> Callable[..., Any]:
    """`function.apply` of an `autograd.Function` without the Python code that only transforms of `torch.func` need."""
    found = getattr(super(torch.autograd.Function, function), "apply", None)
    return found if found is not None and KNOWS_TRANSFORMS else function.apply


def run_backward(outputs: Sequence[Any], gradients: Sequence[Any]) -> None:
    """`torch.autograd.backward` with the gradients of all outputs, without its checks: the first one imports modules for 0.2 s."""
    if _run_backward is None:
        torch.autograd.backward(outputs, gradients)
    else:
        _run_backward(tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def shares_backward_thread() -> bool:
    """True if torch runs all backward passes of a device in one thread, which is its default; True if unknown."""
    return _multithreading is None or bool(_multithreading())


def is_any_covered(nodes: Iterable[Any]) -> bool:
    """True if the backward pass running in this thread runs one of these nodes (`grad_fn`s); False outside of one, and if unknown.

    The wait of a backward pass for itself then ends by the gradient deadline.
    """
    try:
        return _will_execute is not None and any(map(_will_execute, nodes))
    except RuntimeError:  # no backward runs, or one that computes the gradient of a leaf only
        return False


def _is_no_batch(_: Any) -> bool:
    return False


#: True if a node's gradient stands for several, as with `is_grads_batched=True`: its memory cannot be read. False if unknown, or if
#: they cannot be taken apart.
is_batch_of_gradients: Callable[[Any], bool] = (
    _is_batch if _is_batch and _add_batch_dim and _remove_batch_dim else _is_no_batch
)


def one_by_one(back: Callable[[Sequence[Any]], Sequence[Any]], grads: Sequence[Any]) -> tuple[Any, ...]:
    """`back(grads)`, by one call for each entry of batches of gradients among them."""
    remove, add = _remove_batch_dim, _add_batch_dim
    batches = [g for g in grads if g is not None and is_batch_of_gradients(g)]
    # The number of the innermost batch: another one has no entries. The thread of a device does not know it.
    level = next(n for n in range(63, 0, -1) if any(remove(g, n, 0, 0).shape[0] for g in batches))
    entries = [remove(g, level, 0, 0) if any(g is each for each in batches) else repeat(g) for g in grads]
    found = zip(*[back(entry) for entry in zip(*entries, strict=False)], strict=True)
    return tuple(None if each[0] is None else add(torch.stack(each), 0, level) for each in found)


def current_backward() -> int:
    """The number of the backward pass running in this thread; -1 outside of one, and if unknown."""
    return -1 if _graph_task is None or _queue_callback is None else _graph_task()


def at_end_of_backward(function: Callable[[], Any]) -> None:
    """Call `function` when the current backward pass ends; `current_backward` must not be -1."""
    _queue_callback(function)


# ---- the compiler and the compiled library


def skip_in_compiler(modules: Iterable[str]) -> bool:
    """Tell `torch.compile` to run these modules without tracing them; False while the compiler is not loaded.

    True, with no effect, if this version cannot be told.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None or (rules := getattr(compiler, "trace_rules", None)) is None:
        return False
    if (add := getattr(rules, "add", None)) is not None:
        for name in modules:
            add(name)
    return True
