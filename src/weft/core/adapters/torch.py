"""PyTorch: an `autograd.Function` records every op.

torch takes a derivative from a Function's `backward`, and sees only tensors among `apply`'s top-level arguments, so the
inputs travel flat. Inside `forward` gradients are off and tensors are plain. A cotangent nobody asked for arrives as zeros
(torch's default, kept); the one of an integer output arrives as integer zeros and is handed on as None. What is saved goes
through `save_for_backward`, which is what makes double backward and hooks see it; whatever is not a tensor is kept beside it.
Traps: `setup_context` costs 18 us a call, so there are two nodes, one without it; a backward that waits for other callers must
be able to: `_backward.BatchNodes` sees to it.

Whether the outputs of a batch need a gradient is known when all its callers are: one whose own inputs need none may have to
take part for the others' sake. Its call has run then, and is recorded afterwards (`join`). What tells it so is the nodes that
the tensors it gets are marked with.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FailedPreconditionError
from ..arrays import Array
from ..torch_backward import BatchNodes
from ..torch_internals import (
    KNOWS_TRANSFORMS,
    are_transforms_active,
    direct_apply,
    is_forward_mode,
    is_wrapped,
    skip_in_compiler,
)


class _Recording(threading.local):
    """How many recorded ops this thread is inside of."""

    depth = 0


_recording = _Recording()
_is_grad_enabled = torch.is_grad_enabled
_skipped: list[str] = []  # weft's modules, once the compiler skips them


def skip_in_torch_compile() -> None:
    """Tell `torch.compile`, if it is loaded, to run weft's code without tracing it: it would trace calls that wait.

    The compiler breaks its graph there, and reports it. `weft.torch` has operators of its own for compiled graphs.
    """
    if not _skipped and skip_in_compiler(_modules()):
        _skipped.extend(_modules())


def _modules() -> Iterator[str]:
    """The names of weft's modules that the compiler must not trace."""
    folder = Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(["weft", *path.relative_to(folder).with_suffix("").parts])
        if path.name != "__init__.py" and name not in ("weft.torch", "weft.batch_norm.torch"):
            yield name


class Node(torch.autograd.Function):
    """The node of an op, also under the functions of `torch.func`."""

    @staticmethod
    def forward(call: Any, anchor: Array | None, *inputs: Array) -> tuple[Array, ...]:
        if call.outputs is not None:
            return call.outputs
        if call.op.kernel:  # nothing in it asks whether it is recorded
            return call.run(inputs)
        _recording.depth += 1
        try:
            return call.run(inputs)
        finally:
            _recording.depth -= 1

    @staticmethod
    def setup_context(ctx: Any, arguments: tuple[Any, ...], outputs: tuple[Array, ...]) -> None:
        _set_up(ctx, arguments[0], arguments[2:], outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Array) -> tuple[Array | None, ...]:
        call, others, holds_tensors, is_only, nodes = ctx.state
        # A node that holds no tensor has nothing to free: asking for its saved tensors would forbid a second backward.
        kept = _merged(ctx.saved_tensors, others) if holds_tensors else others
        cotangents = [g if g is not None and _has_gradient(g) else None for g in grads]
        if is_only and all(g is None for g in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        if nodes is not None:
            nodes.check(ctx, next(g.device for g in cotangents if g is not None))
        return None, None, *call.pull_back(cotangents, kept)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], call: Any, anchor: Any, *inputs: Array) -> Any:
        # One call per entry: every kernel can be used, whatever it does inside.
        if call.op.meets:
            raise FailedPreconditionError(
                f"{call.op.name} waits for other callers, and has no meaning under torch.vmap: use vmap on the model between "
                "Batch and Unbatch, and pass the rows of all entries in one call"
            )
        each = [Node.apply(call, None, *_entry(inputs, in_dims[2:], i)) for i in range(info.batch_size)]
        stacked = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        return stacked, (0,) * len(stacked)


class Plain(torch.autograd.Function):
    """The node of an op where no function of `torch.func` is at work, without what only they need.

    For `setup_context` torch inspects the signature of `forward` in every call, which takes 18 us.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, anchor: Array | None, *inputs: Array) -> tuple[Array, ...]:
        outputs = _forward(call, anchor, *inputs)
        _set_up(ctx, call, inputs, outputs)
        return outputs

    backward = Node.backward


_forward = Node.forward


def _set_up(ctx: Any, call: Any, inputs: Sequence[Array], outputs: tuple[Array, ...]) -> None:
    """Let a node keep what its backward needs."""
    kept = call.keep(inputs, outputs)
    tensors = [k if isinstance(k, Tensor) else None for k in kept]
    others = [k if t is None else None for k, t in zip(kept, tensors, strict=True)]
    ctx.save_for_backward(*tensors)
    still = [t for i, t in enumerate(outputs) if i in call.op.still or not _has_gradient(t)]
    if still:
        ctx.mark_non_differentiable(*still)
    # Zeros for all but the one cotangent that matters would be made in vain; without that one, nothing flows.
    is_only = len(still) + 1 == len(outputs) > 1 and not call.op.meets
    if is_only:
        ctx.set_materialize_grads(False)
    nodes = nodes_of(outputs) if call.op.meets else None
    if nodes is not None:
        nodes.join(ctx)
    ctx.state = call, others, any(t is not None for t in tensors), is_only, nodes


def _merged(tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [other if saved is None else saved for saved, other in zip(tensors, others, strict=True)]


def _entry(inputs: Sequence[Array], dims: Sequence[int | None], i: int) -> list[Array]:
    return [x if dim is None else x.select(dim, i) for x, dim in zip(inputs, dims, strict=True)]


def is_recording(x: Array) -> bool:
    """Whether torch would record an operation on `x` now."""
    return (x.requires_grad and _is_grad_enabled()) or is_wrapped(x) or is_forward_mode(x)


def gradients_on() -> bool:
    """Whether the caller wants gradients; inside a recorded op, where torch has switched them off, too."""
    return _recording.depth > 0 or bool(torch.is_grad_enabled())


def apply(call: Any, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The flat outputs of `call`, with a node behind them."""
    if not _skipped:
        skip_in_torch_compile()
    return _recorded(call, None, inputs)


def _recorded(call: Any, anchor: Array | None, inputs: Sequence[Array]) -> tuple[Array, ...]:
    if not KNOWS_TRANSFORMS or are_transforms_active():
        return Node.apply(call, anchor, *inputs)
    for x in inputs:
        if isinstance(x, Tensor) and is_wrapped(x):  # by a function that has returned since
            return Plain.apply(call, anchor, *inputs)
    # What `Function.apply` does in Python is for the two cases above.
    return _plain(call, anchor, *inputs)


_plain: Any = direct_apply(Plain)


def is_recorded() -> bool:
    """Whether the call under way is recorded."""
    return _recording.depth > 0


def is_bystander() -> bool:
    """Whether gradients are on, and the call under way is not recorded: nothing it was given needs one."""
    return not _recording.depth and bool(torch.is_grad_enabled())


def mark(tensors: Sequence[Array], nodes: BatchNodes | None) -> None:
    """Let `tensors`, which nobody else has, tell of the nodes they come from."""
    for x in tensors if nodes is not None else ():
        if isinstance(x, Tensor):
            x._weft_nodes = nodes


def nodes_of(tensors: Sequence[Array]) -> BatchNodes | None:
    """The nodes that `tensors` come from; the mark is taken off."""
    found = [x.__dict__.pop("_weft_nodes") for x in tensors if "_weft_nodes" in getattr(x, "__dict__", ())]
    return found[0] if found else None


def join(op: Any, arguments: Sequence[Any], result: Any) -> Any:
    """What a bystander's call of `op` returned, with a node behind it if others of its nodes need a gradient."""
    call, inputs = op.bind(arguments, {})
    call.outputs = call.flat(result)
    if not any("_weft_nodes" in getattr(x, "__dict__", ()) for x in call.outputs):
        return result
    # Something must need a gradient for torch to record the call; nothing flows to it.
    return call.pack(_recorded(call, torch.empty(0, requires_grad=True), inputs))


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


skip_in_torch_compile()
