"""PyTorch: an `autograd.Function` records every op.

torch derives gradients from the `backward` of a Function, and sees only tensors among the top-level arguments of `apply`, so the
inputs are passed flat. Inside `forward`, gradients are off. The cotangent of an unused output arrives as zeros; the cotangent of
an integer output arrives as integer zeros and is passed on as None. Tensors are saved by `save_for_backward`, so that double
backward and hooks see them; other values are stored beside them. There are two nodes, because `setup_context`, which `torch.func`
needs, is slow. `BatchNodes` refuses a backward whose wait for other callers would never end. An op that waits has two nodes on an
accelerator, so that its backward waits in the thread that called `backward()` (`torch_split`).

Whether the outputs of a batch need a gradient is known only when all callers are: a caller whose own inputs need none may have to
take part in the backward of the others. Its call has run by then, and is recorded afterwards (`record_afterwards`). The tensors
it receives are marked with the nodes of the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FailedPreconditionError
from .. import torch_split
from ..arrays import Array
from ..fork import on_fork_in_child
from ..torch_backward import BatchNodes
from ..torch_internals import (
    KNOWS_TRANSFORMS,
    are_transforms_active,
    direct_apply,
    is_batch_of_gradients,
    is_forward_mode,
    is_wrapped,
    one_by_one,
    shares_backward_thread,
    skip_in_compiler,
)
from ..torch_split import enter_stream as enter_stream
from ..torch_split import leave_stream as leave_stream
from . import Recording

_recording = Recording()
_is_grad_enabled = torch.is_grad_enabled
_skipped: list[str] = []  # weft's rooms and modules, once the compiler skips them
_skipping = threading.Lock()


def skip_in_torch_compile() -> None:
    """Tell `torch.compile`, if it is loaded, to run weft's code without tracing it: it would trace calls that wait.

    The compiler breaks its graph there, and reports it. `weft.torch` has operators of its own for compiled graphs.
    """
    lock = _skipping
    if _skipped or not lock.acquire(blocking=False):  # another thread tells it
        return
    try:
        if not _skipped and skip_in_compiler(_modules()):
            _skipped.extend(_modules())
    finally:
        lock.release()


def _after_fork_in_child() -> None:
    """The thread that held the lock does not exist in this process."""
    global _skipping
    _skipping = threading.Lock()


on_fork_in_child(_after_fork_in_child)


def _modules() -> Iterator[str]:
    """What the compiler must not trace. It takes time for each name, so that whole rooms are better than their files."""
    for entry in sorted(Path(__file__).parents[2].iterdir()):
        name = f"weft.{entry.stem}"
        # The compiler imports what it is told of, and some rooms need other libraries.
        if entry.stem in ("__init__", "torch", "serve", "ray", "cli"):
            continue
        if entry.stem == "norm":  # but for what users of `weft.torch` compile
            files = sorted(file.stem for file in entry.glob("*.py"))
            yield from (f"{name}.{file}" for file in files if file not in ("__init__", "torch"))
        elif entry.suffix == ".py" or (entry / "__init__.py").exists():
            yield name


class TransformNode(torch.autograd.Function):
    """The node of an op that also works under the transforms of `torch.func`."""

    @staticmethod
    def forward(call: Any, anchor: Array | None, *inputs: Array) -> tuple[Array, ...]:
        if call.outputs is not None:
            return call.outputs
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
        nodes = ctx.state[-1]
        if nodes is not None and nodes.callers > 1 and _is_device_thread(grads):
            raise FailedPreconditionError(
                "callers that share a batch on a device cannot wait for each other's gradients under torch.func: call backward()"
            )
        return _go_back(ctx, grads)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], call: Any, anchor: Any, *inputs: Array) -> Any:
        # One call per entry, so that every kernel works.
        if call.op.waits:
            raise FailedPreconditionError(
                f"{call.op.name} waits for other callers, which torch.vmap cannot do: use vmap on the model between Batch and "
                "Unbatch, and pass the rows of all entries in one call"
            )
        count = info.batch_size
        if not count:  # one entry of zeros gives the shapes of the results
            inputs = tuple(
                x if dim is None else _zero_entry(x, dim) for x, dim in zip(inputs, in_dims[2:], strict=True)
            )
        each = [TransformNode.apply(call, None, *_entry(inputs, in_dims[2:], i)) for i in range(max(count, 1))]
        stacked = tuple(torch.stack(parts)[:count] for parts in zip(*each, strict=True))
        return stacked, (0,) * len(stacked)


def _is_device_thread(grads: Sequence[Array | None]) -> bool:
    """True if torch computes these gradients in the one backward thread of their device."""
    return torch_split.device_of(grads) is not None and shares_backward_thread()


def _go_back(ctx: Any, grads: Sequence[Array | None]) -> tuple[Array | None, ...]:
    """The gradients of a node's arguments: the call, the anchor and the inputs."""
    call, others, holds_tensors, is_only, nodes = ctx.state
    if any(g is not None and is_batch_of_gradients(g) for g in grads):
        if call.op.waits:
            raise FailedPreconditionError(
                f"{call.op.name} waits for the gradients of other callers, one each: is_grads_batched=True passes several"
            )
        return one_by_one(partial(_go_back, ctx), grads)
    # Without saved tensors there is nothing to free, and reading `saved_tensors` would forbid a second backward.
    saved = _merged(ctx.saved_tensors, others) if holds_tensors else others
    cotangents = [g if g is not None and _has_gradient(g) else None for g in grads]
    if is_only and all(g is None for g in cotangents):
        return (None,) * len(ctx.needs_input_grad)
    if nodes is not None:
        nodes.check(ctx)
    return None, None, *call.pull_back(cotangents, saved)


class PlainNode(torch.autograd.Function):
    """The node of an op outside the transforms of `torch.func`.

    It has no `setup_context`, for which torch inspects the signature of `forward` in every call (row "forward with a
    node" of benchmarks/gradients.py).
    """

    @staticmethod
    def forward(ctx: Any, call: Any, anchor: Array | None, *inputs: Array) -> tuple[Array, ...]:
        outputs = _forward(call, anchor, *inputs)
        _set_up(ctx, call, inputs, outputs)
        return outputs

    backward = TransformNode.backward


_forward = TransformNode.forward


class WaitingNode(torch.autograd.Function):
    """The node behind the token of an op that waits, on an accelerator; `with_hand_over` makes the node of its outputs."""

    @staticmethod
    def forward(ctx: Any, shared: _SplitCall, call: Any, anchor: Array | None, *inputs: Array) -> Array:
        shared.outputs = _forward(call, anchor, *inputs)
        _set_up(ctx, call, inputs, shared.outputs)
        ctx.shared = shared
        return torch_split.new_tokens(1)[0]

    @staticmethod
    def backward(ctx: Any, _: Array) -> tuple[Array | None, ...]:
        shared = ctx.shared
        handed = shared.gradients.take()
        stream = None if handed.when is None else handed.when.stream
        if stream is not None:
            torch_split.refuse_capture(stream.device)
        with torch_split.use_stream(stream):
            given = zip(handed.gradients, shared.zeros, strict=True)
            found = _go_back(ctx, [make() if g is None and make is not None else g for g, make in given])
        if stream is not None:
            torch_split.StreamPoint(stream).wait(found)
        return None, *found


class _SplitCall:
    """What the two nodes of a call share."""

    def __init__(self) -> None:
        self.gradients = torch_split.HandOver()
        self.outputs: tuple[Array, ...] = ()
        self.zeros: list[Any] = []  # what makes the gradient of an output that has none


def _apply_split(call: Any, anchor: Array | None, inputs: Sequence[Array]) -> tuple[Array, ...]:
    device = torch_split.device_of(inputs)
    if device is not None:
        torch_split.refuse_device_thread(device)
    shared = _SplitCall()
    token = WaitingNode.apply(shared, call, anchor, *inputs)
    outputs, shared.outputs = shared.outputs, ()
    constant = _constant(call, outputs)
    places = {id(x) for x in constant}
    shared.zeros = [None if id(x) in places else _zeros(x) for x in outputs]
    return torch_split.with_hand_over(shared.gradients, outputs, constant, token)


def _zeros(x: Array) -> Any:
    return partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device)


def _constant(call: Any, outputs: Sequence[Array]) -> list[Array]:
    """The outputs without a gradient."""
    return [t for i, t in enumerate(outputs) if i in call.op.non_differentiable or not _has_gradient(t)]


def _set_up(ctx: Any, call: Any, inputs: Sequence[Array], outputs: tuple[Array, ...]) -> None:
    """Store in a node what its backward needs."""
    saved = call.save(inputs, outputs)
    tensors = [x if isinstance(x, Tensor) else None for x in saved]
    others = [x if t is None else None for x, t in zip(saved, tensors, strict=True)]
    ctx.save_for_backward(*tensors)
    constant = _constant(call, outputs)
    if constant:
        ctx.mark_non_differentiable(*constant)
    # With one differentiable output, zeros for the other cotangents are useless, and without its cotangent there is no gradient.
    is_only = len(constant) + 1 == len(outputs) > 1 and not call.op.waits
    if is_only:
        ctx.set_materialize_grads(False)
    nodes = nodes_of(outputs) if call.op.waits else None
    if nodes is not None:
        nodes.join(ctx)
    ctx.state = call, others, any(t is not None for t in tensors), is_only, nodes


def _merged(tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [other if saved is None else saved for saved, other in zip(tensors, others, strict=True)]


def _entry(inputs: Sequence[Array], dims: Sequence[int | None], i: int) -> list[Array]:
    return [x if dim is None else x.select(dim, i) for x, dim in zip(inputs, dims, strict=True)]


def _zero_entry(x: Array, dim: int) -> Array:
    shape = list(x.shape)
    shape[dim] = 1
    return x.new_zeros(shape)


def is_recording(x: Array) -> bool:
    """True if torch would record an operation on `x` now."""
    return (x.requires_grad and _is_grad_enabled()) or is_wrapped(x) or is_forward_mode(x)


def gradients_on() -> bool:
    """True if the caller has gradients on, also inside a recorded op, where torch switches them off."""
    return _recording.depth > 0 or bool(torch.is_grad_enabled())


def apply(call: Any, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The flat outputs of `call`, with a node behind them."""
    if not _skipped:
        skip_in_torch_compile()
    return _recorded(call, None, inputs)


def _recorded(call: Any, anchor: Array | None, inputs: Sequence[Array]) -> tuple[Array, ...]:
    if not KNOWS_TRANSFORMS or are_transforms_active():
        return TransformNode.apply(call, anchor, *inputs)
    for x in inputs:
        if isinstance(x, Tensor) and is_wrapped(x):  # by a transformed function that has returned
            return PlainNode.apply(call, anchor, *inputs)
    if call.op.waits and torch_split.splits(inputs):
        return _apply_split(call, anchor, inputs)
    # `Function.apply` adds what the two cases above need.
    return _apply_plain(call, anchor, *inputs)


_apply_plain: Any = direct_apply(PlainNode)


def is_recorded() -> bool:
    """True inside a recorded call."""
    return _recording.depth > 0


def may_record_afterwards() -> bool:
    """True if gradients are on, but the current call is not recorded because none of its inputs needs one."""
    return not _recording.depth and bool(torch.is_grad_enabled())


def mark(tensors: Sequence[Array], nodes: BatchNodes | None) -> None:
    """Mark new tensors with the nodes of the batch they come from."""
    for x in tensors if nodes is not None else ():
        if isinstance(x, Tensor):
            x._weft_nodes = nodes


def nodes_of(tensors: Sequence[Array]) -> BatchNodes | None:
    """The nodes that `tensors` are marked with; removes the mark."""
    found = [x.__dict__.pop("_weft_nodes") for x in tensors if "_weft_nodes" in getattr(x, "__dict__", ())]
    return found[0] if found else None


def record_afterwards(op: Any, arguments: Sequence[Any], result: Any) -> Any:
    """The result of a call of `op` that was not recorded, with a node if other callers of its batch need a gradient."""
    call, inputs = op.bind(arguments, {})
    call.outputs = call.flat(result)
    if not any("_weft_nodes" in getattr(x, "__dict__", ()) for x in call.outputs):
        return result
    # torch records a call only if an argument requires a gradient; this one never gets any.
    return call.pack(_recorded(call, torch.empty(0, requires_grad=True), inputs))


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


skip_in_torch_compile()
