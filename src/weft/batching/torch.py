"""PyTorch: how a caller's rows of a batch carry the batch's joint backward.

The batch is computed once, on detached rows, and keeps its graph. What a caller gets is cut out of it and detached too, with a
node of its own behind it: else the engine would walk the shared graph from every caller. The node's `backward` hands in the
caller's gradient; the last one runs `torch.autograd.backward` over the batch, inside its own, and the parameters have their
gradient once. The node's inputs are what the caller brought, and a tensor that needs a gradient always, so that there is a node
where the caller brought none. Where nobody waits, the node has no way to give the inputs their part in time: they are left out
of it, and get their gradient when the batch goes back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as fw

from ..core import torch_internals
from ..core.arrays import Array, first_row
from ..errors import InvalidArgumentError
from .gradient import GradientTicket, ResultHandle

Mode = tuple[Any, ...]

_DEVICES = ("cpu", "cuda")
_casts, _records, _infers = torch_internals.is_autocast_enabled, torch.is_grad_enabled, torch.is_inference_mode_enabled
#: The modes without autocast, whether or not it infers: every call asks, and compares.
_RECORDING = ((True, False, (), None), (True, True, (), None))
_NOT_RECORDING = ((False, False, (), None), (False, True, (), None))


def mode() -> Mode:
    """What torch goes by in this thread, and a batch must go by too: gradients, inference, autocast; no stream of a device."""
    if not _casts():
        modes = _RECORDING if _records() else _NOT_RECORDING
        return modes[1] if _infers() else modes[0]
    autocast = tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))
    return (_records(), _infers(), autocast, None)


def on_stream(mode: Mode, x: Array) -> Mode:
    """`mode` with the stream on which a CUDA tensor is made now: calls on different streams do not meet."""
    return (*mode[:-1], torch.cuda.current_stream(x.device)) if x.is_cuda else mode


@contextmanager
def under(wanted: Mode) -> Iterator[None]:
    """Go by `wanted` in this thread for a while."""
    grad, inference, autocast, stream = wanted
    with ExitStack() as stack:
        if stream is not None:
            stack.enter_context(torch.cuda.stream(stream))
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        for device in _DEVICES:
            dtype = dict(autocast).get(device)
            if dtype is not None or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=dtype is not None))
        yield


def kind(x: Array, grad: bool) -> tuple[Any, ...]:
    """What a tensor must have in common with others to share a batch; one that cannot be batched is refused."""
    if (
        _transforms() or x.layout is not torch.strided or x.is_meta or x.is_nested or type(x) not in _TENSORS
        or torch_internals.is_forward_mode(x)
    ):  # fmt: skip
        _check(x)
    return (x.dtype, x.shape[1:], x.device, grad and x.requires_grad)


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_transforms = torch_internals.are_transforms_active


def _check(x: Array) -> None:
    """Refuse a tensor that means something only in the thread that has it, or nothing yet."""
    if _transforms() or fw.unpack_dual(x).tangent is not None:
        raise InvalidArgumentError(
            "a batched call meets other callers, and has no meaning under torch.func (vmap, grad, jvp) and in forward mode: "
            "use them inside the batched function, and backward() outside"
        )
    if x.layout is not torch.strided or x.is_meta or x.is_nested or torch_internals.is_fake(x):
        came = f"a {type(x).__name__}, {x.layout}, on {x.device}"
        raise InvalidArgumentError(f"a tensor must be dense and have its values now, got {came}")


def join(tensors: Sequence[Array], missing: int) -> Array:
    """A new tensor outside any graph: `tensors` one below the other, then their first row `missing` times."""
    with torch.no_grad():
        if missing:
            tensors = [*tensors, first_row(tensors).expand(missing, *tensors[0].shape[1:])]
        return torch.cat(tensors)


def cut(x: Array, bounds: Sequence[tuple[int, int]]) -> list[Array]:
    """New tensors outside any graph: the rows of `x` between each of `bounds`, which follow each other.

    On a device they share their memory, which is nobody else's: a copy for each would be a kernel for each.
    """
    x = x.detach()
    sizes = [stop - start for start, stop in bounds]
    missing = len(x) - bounds[-1][1]
    if missing:
        sizes.append(missing)
    if x.device.type == "cpu":
        return torch.split_with_sizes_copy(x, sizes)[: len(bounds)]
    return list(torch.split_with_sizes(x.clone(), sizes)[: len(bounds)])


def recomputed(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, with its activations dropped and computed again in the backward."""
    from torch.utils.checkpoint import checkpoint

    return lambda *args, **kwargs: checkpoint(f, *args, use_reentrant=False, **kwargs)


def shares_threads() -> bool:
    """Whether all backwards of a device share one thread, so that one that waits would stop all others."""
    return torch_internals.shares_backward_thread()


def covers_other(share: GradientTicket) -> bool:
    """Whether the backward that is running in this thread will come to the node of another caller that is missing."""
    nodes = share.joint.nodes
    own = nodes.get(share)
    found = (ref() for ref in list(nodes.values()) if ref is not own)
    return any(node is not None and torch_internals.is_covered(node) for node in found)


class Rows(torch.autograd.Function):
    """A caller's rows, from `share.value`-to-be: the node through which its gradient is handed in."""

    @staticmethod
    def forward(ctx: Any, take: Any, held: ResultHandle, rows: Sequence[Array], _: Array, *inputs: Array) -> Any:
        ctx.take, ctx.held = take, held
        ctx.count = len(inputs)
        held.share.joint.nodes[held.share] = weakref.ref(ctx)
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Array | None) -> Any:
        share = ctx.held.share
        failed = _failed.get(_task()) if _failed else None
        if failed is not None:
            failed.leave(share)
            return None, None, None, None, *_nothing(share, ctx.count)
        try:
            parts = ctx.take(share, gradients)
        except Exception as error:
            if _task() == _NO_TASK:
                raise
            _RaiseAtEnd(error, share)
            parts = _nothing(share, ctx.count)
        return None, None, None, None, *(parts if ctx.count else ())


def _nothing(share: GradientTicket, count: int) -> list[Array | None]:
    """What a node gives its inputs in a backward that has failed: leaves stay as they are, and what is computed needs a value."""
    return [None if x.is_leaf else torch.zeros_like(x) for x in share.inputs[:count]]


class _RaiseAtEnd:
    """Raises an error when the backward under way has come to its end; the nodes of calls that it comes to hand in nothing.

    A node that raises makes torch keep what is left of the graph in a queue of the thread. The system frees it after the thread's
    last line of Python, and its nodes need the interpreter for that: where this is ending, the process aborts. It happens to
    programs without weft as well, and to threads that were joined.
    """

    def __init__(self, error: Exception, share: GradientTicket) -> None:
        self._error: Exception | None = error
        # A backward that was refused before it handed in anything can be called again, as it should be.
        self._is_final = share.deposited or share.joint.done
        self._task = _task()
        _failed[self._task] = self
        torch_internals.at_end_of_backward(self)

    def leave(self, share: GradientTicket) -> None:
        """Do without the gradient of another call that the backward covers: whoever waits for it is told now.

        The graph itself may live on, as the error does in a future: its traceback knows the loss.
        """
        if self._is_final:
            share.drop()

    def __call__(self) -> None:
        error, self._error = self._error, None
        _failed.pop(self._task, None)
        assert error is not None
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


#: By its number the failure of each backward under way in which a caller's node has failed. Where another error ends it before,
#: torch lets go of what it was to call, and of the entry.
_failed: weakref.WeakValueDictionary[int, _RaiseAtEnd] = weakref.WeakValueDictionary()
_task, _NO_TASK = torch_internals.current_backward, -1


def attach(
    take: Callable[[GradientTicket, Sequence[Array | None]], Sequence[Array | None]],
    held: ResultHandle,
    rows: Sequence[Array],
    inputs: Sequence[Array],
) -> list[Array]:
    """`rows` with a node behind them; `take(share, gradients)` hands in theirs and gives those of `inputs`."""
    with torch.enable_grad():
        return list(Rows.apply(take, held, rows, _ALWAYS, *inputs))


#: One for all nodes, since nothing is ever added to its gradient: with many threads, a tensor for each, like any call of torch
#: that lets go of the interpreter, costs a turn of waiting for it.
_ALWAYS = torch.empty(0, requires_grad=True)
#: What would accumulate its gradient, kept: torch makes one when it is needed, under a lock of the tensor, and in anomaly mode runs
#: Python meanwhile, so that two callers would stop each other and the interpreter for ever.
_ACCUMULATES = torch.autograd.graph.get_gradient_edge(_ALWAYS).node


def differentiates_twice() -> bool:
    """Whether the backward that is running is to be differentiated itself."""
    return bool(torch.is_grad_enabled())


def backward(
    outputs: Sequence[Array], gradients: Sequence[Sequence[Array | None] | None], bounds: Sequence[tuple[int, int]]
) -> None:
    """Take a batch back: `gradients` holds a list of gradients, one for each of `outputs`, for each caller, or None."""
    roots, seeds = [], []
    for k, output in enumerate(outputs):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            roots.append(output)
            seeds.append(_seed(output, [given and given[k] for given in gradients], bounds))
    torch.autograd.backward(roots, seeds)


def _seed(output: Array, gradients: Sequence[Array | None], bounds: Sequence[tuple[int, int]]) -> Array:
    """The gradients of rows as one of `output`: nothing where there is none, and for rows that are nobody's."""
    parts = [
        output.new_zeros(stop - start, *output.shape[1:]) if gradient is None else gradient
        for (start, stop), gradient in zip(bounds, gradients, strict=True)
    ]
    missing = len(output) - bounds[-1][1]
    if missing:
        parts.append(output.new_zeros(missing, *output.shape[1:]))
    return torch.cat(parts)


def hand_back(left: Sequence[tuple[Array, Array]]) -> None:
    """Give inputs whose callers have gone on their gradient."""
    if left:
        torch.autograd.backward([x for x, _ in left], [gradient for _, gradient in left])
