"""PyTorch in a batch: the streams of the callers, the rows of the batch, and its backward.

The function runs once, on detached rows, and the batch keeps the graph. A caller gets detached rows of the result with a node of
its own, `_CallerRows`: without it, autograd would walk the shared graph once for each caller. The node's `backward` hands in the
caller's gradient; the last caller runs `torch.autograd.backward` over the batch inside its own, so that parameters get
their gradient once. The inputs of the node are the caller's tensors and one constant that needs a gradient, so that there
is a node even if no tensor of the caller needs one. If the caller does not wait, its tensors are not inputs of the node:
the batch's backward adds their gradient.

On an accelerator the node is split in two, so that only the thread that called `backward()` waits (`core/torch_split.py`). A batch
runs on the stream of its first caller, forward and backward; it waits for the streams of the others, and they for its results.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as fw

from ..core import torch_internals, torch_split
from ..core.arrays import Array, first_row
from ..core.inputs import is_freed, refuse_odd, refuse_traced
from ..core.torch_backward import check_thread
from ..core.torch_internals import run_backward
from ..core.torch_split import Handed, HandOver, StreamPoint, point_now, use_stream
from ..errors import FailedPreconditionError, InvalidArgumentError
from .columns import Bounds, Columns
from .gradient import BackwardPolicy, GradientTicket, ResultHandle, this_thread
from .torch_modes import TorchMode, current_mode, use_mode

# --- the streams of callers and batches ---


def are_on_host(array_keys: Sequence[Any]) -> bool:
    """Whether no array with one of these keys is on an accelerator."""
    return all(not isinstance(part, torch.device) or part.type == "cpu" for key in array_keys for part in key)


def caller_stream(arrays: Sequence[Array]) -> StreamPoint | None:
    """Return the point of the caller's stream from which on a batch may read its arrays; None in host memory."""
    for x in arrays:
        if isinstance(x, torch.Tensor) and not x.is_cpu:
            torch_split.refuse_capture(x.device)
            torch_split.refuse_device_thread(x.device)
            return point_now(x.device)
    return None


@contextmanager
def use_streams(mode: TorchMode, callers: Sequence[tuple[StreamPoint, Sequence[Array]]]) -> Iterator[None]:
    """Set the mode for a block and work on the stream of the first caller, once the arrays of all callers are computed."""
    with use_mode(mode) if mode != current_mode() else nullcontext(), use_stream(callers[0][0].stream):
        first = callers[0][0]
        for when, arrays in callers:
            if when is not first:
                when.wait(arrays)
        yield


# --- the rows of a batch ---


def array_key(x: Array, grad: bool) -> tuple[Any, ...]:
    """Return the properties that tensors of a batch share; refuse a tensor that cannot be batched."""
    if (
        torch_internals.are_transforms_active() or torch_internals.is_followed(x) or type(x) not in TENSORS
        or x.layout is not torch.strided or x.is_meta or x.is_nested or not x.data_ptr()
    ):  # fmt: skip
        _check(x)
    key = (x.dtype, x.shape[1:], x.device, grad and x.requires_grad)
    return (*key, _quantizer(x)) if x.is_quantized else key


#: The classes of plain tensors.
TENSORS = (torch.Tensor, torch.nn.Parameter)


def plain(x: Array) -> Array:
    """Return a tensor of a subclass as a plain one: the rows of several callers have no attributes of one of them."""
    if type(x) in TENSORS or torch_internals.is_fake(x) or x.is_nested:
        return x
    return x.as_subclass(torch.Tensor)


def _quantizer(x: Array) -> tuple[Any, ...]:
    """Return the scale and zero point of a quantized tensor, which are the same in all rows."""
    if x.qscheme() != torch.per_tensor_affine:
        raise InvalidArgumentError(
            f"a quantized tensor must have one scale for all its rows, got {x.qscheme()}: pass x.dequantize()"
        )
    return x.q_scale(), x.q_zero_point()


def no_rows(x: Array, requires_grad: bool) -> Array:
    """Return a tensor of the dtype, trailing dimensions and device of `x`, without rows."""
    with torch.inference_mode(False):
        return torch.empty((0, *x.shape[1:]), dtype=x.dtype, device=x.device, requires_grad=requires_grad)


def _check(x: Array) -> None:
    if torch_internals.is_tracing():
        refuse_traced("a tensor of a batched call")
    if torch_internals.are_transforms_active() or fw.unpack_dual(x).tangent is not None:
        raise InvalidArgumentError(
            "a batched call shares its batch with other callers and does not work under torch.func (vmap, grad, jvp) or in forward "
            "mode: use them inside the batched function, and backward() outside"
        )
    if x.layout is not torch.strided or x.is_meta or x.is_nested or torch_internals.is_fake(x):
        found = f"a {type(x).__name__}, {x.layout}, on {x.device}"
        raise InvalidArgumentError(f"a tensor must be dense and have its values now, got {found}")
    if is_freed(x):
        raise InvalidArgumentError(f"a tensor must have its values, got one of {x.numel()} whose storage was freed")


def concat_rows(tensors: Sequence[Array], padding: int, requires_grad: bool) -> Array:
    """Return a new tensor without a graph: the rows of `tensors`, then `padding` copies of the first row."""
    with torch.no_grad():
        if padding:
            tensors = [*tensors, first_row(tensors).expand(padding, *tensors[0].shape[1:])]
        rows = torch.cat(tensors)
    return rows.requires_grad_() if requires_grad else rows


def split_rows(x: Array, bounds: Bounds) -> list[Array]:
    """Return new tensors without a graph: the rows of `x` within each of `bounds`, which are adjacent.

    On an accelerator they share the memory of one copy of `x`: a copy for each would be a kernel for each.
    """
    x = x.detach()
    sizes = [stop - start for start, stop in bounds]
    padding = len(x) - bounds[-1][1]
    if padding:
        sizes.append(padding)
    if x.device.type == "cpu":
        return torch.split_with_sizes_copy(x, sizes)[: len(bounds)]
    return _parts_of(x.clone(), sizes)[: len(bounds)]


def parts_of_call(x: Array, sizes: list[int]) -> Sequence[Array]:
    """Return the rows of a call's array for each of its parts, with one node for all: a node for each would add up whole arrays."""
    return torch.split_with_sizes(x, sizes)


def _parts_of(x: Array, sizes: list[int]) -> list[Array]:
    """Return the parts of `x` in its memory, each with a version of its own: one caller may change its part in place."""
    return list(torch.unsafe_split_with_sizes(x, sizes))


def recomputed(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` without stored activations: the backward computes them again."""
    from torch.utils.checkpoint import checkpoint

    return lambda *args, **kwargs: checkpoint(f, *args, use_reentrant=False, **kwargs)


# --- a caller's backward ---


def attach(
    policy: BackwardPolicy, handle: ResultHandle, leaves: list[Any], arrays: Sequence[Array], is_task: bool
) -> None:
    """Give the differentiable ones among a caller's `leaves` a node that hands in their gradient; `arrays` are its arguments."""
    ticket = handle.ticket
    places = ticket.places
    if ticket.backward.has_parameters:
        policy.warn_of_copy()
    ticket.inputs = _needing_gradient(arrays)
    ticket.is_deferred = is_task or not policy.waits
    rows = [leaves[i] for i in places]
    inputs = () if ticket.is_deferred else ticket.inputs
    with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        if torch_split.splits(rows):
            shared = HandOver()
            token = _take_turn(policy, handle, shared, _ALWAYS, *inputs)
            rows = list(torch_split.with_hand_over(shared, rows, (), token))
        else:
            rows = list(_deliver(policy, handle, rows, _ALWAYS, *inputs))
            for x in rows:
                x._weft_node = _NodeOf(x)
    handle.is_delivered = True
    for i, x in zip(places, rows, strict=True):
        leaves[i] = x


class _NodeOf:
    """The node of a caller's tensor, kept as an attribute of the tensor, so that the garbage collector always finds it there.

    The collector follows a tensor to its node only if nothing else owns the node, and asks twice. If another thread, inside an
    operation of PyTorch, begins to use the node in between, the collector takes it for garbage and runs its finalizers.
    """

    __slots__ = ("_node",)

    def __init__(self, x: Array) -> None:
        self._node = x.grad_fn

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # `torch.load` refuses other classes


def _needing_gradient(arrays: Sequence[Array]) -> list[Array]:
    return [x for x in arrays if isinstance(x, torch.Tensor) and x.requires_grad]


#: One constant for all nodes; nothing is ever added to its gradient. A tensor for each node would release the interpreter's
#: lock, and with many threads cost a turn of waiting for it (benchmark row "forward and backward, small, 64 threads").
with torch.inference_mode(False):  # the first call may be inside that mode
    _ALWAYS = torch.empty(0, requires_grad=True)
#: The node that accumulates its gradient, kept alive. PyTorch makes one on demand under a lock of the tensor, and in anomaly mode
#: runs Python meanwhile: two callers would deadlock.
with torch.inference_mode(False):
    _ACCUMULATES = torch.autograd.graph.get_gradient_edge(_ALWAYS).node


class _CallerRows(torch.autograd.Function):
    """A caller's rows of the result; the node hands in their gradient and returns that of the caller's inputs."""

    @staticmethod
    def forward(
        ctx: Any, policy: BackwardPolicy, handle: ResultHandle, rows: Sequence[Array], _: Array, *inputs: Array
    ) -> Any:
        _set_up(ctx, policy, handle, len(inputs))
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Array | None) -> Any:
        return None, None, None, None, *_go_back(ctx, Handed(gradients, None), False)


class _CallerTurn(torch.autograd.Function):
    """The node behind the token of a caller on an accelerator; otherwise as `_CallerRows`."""

    @staticmethod
    def forward(
        ctx: Any, policy: BackwardPolicy, handle: ResultHandle, shared: HandOver, _: Array, *inputs: Array
    ) -> Any:
        _set_up(ctx, policy, handle, len(inputs))
        ctx.shared = shared
        tokens = handle.ticket.backward.tokens
        return tokens.pop() if tokens else torch_split.new_tokens(1)[0]

    @staticmethod
    def backward(ctx: Any, _: Array) -> Any:
        return None, None, None, None, *_go_back(ctx, ctx.shared.take(), True)


_deliver, _take_turn = map(torch_internals.direct_apply, (_CallerRows, _CallerTurn))


def _set_up(ctx: Any, policy: BackwardPolicy, handle: ResultHandle, count: int) -> None:
    ctx.policy, ctx.handle, ctx.count = policy, handle, count
    handle.ticket.backward.nodes[handle.ticket] = weakref.ref(ctx)


def _go_back(ctx: Any, handed: Handed, is_split: bool) -> Sequence[Array | None]:
    """Hand in a caller's gradients; return those of its node's inputs."""
    ticket = ctx.handle.ticket
    failed = _failed.get(torch_internals.current_backward()) if _failed else None
    if failed is not None:
        failed.skip(ticket)
        return _no_gradients(ticket, ctx.count)
    try:
        parts = _hand_in(ctx.policy, ticket, handed, is_split)
    except BaseException as error:
        ticket.note_failure(error)
        if not isinstance(error, Exception) or torch_internals.current_backward() == -1:
            raise
        _RaiseAtEnd(error, ticket)
        parts = _no_gradients(ticket, ctx.count)
    return parts if ctx.count else ()


def _hand_in(policy: BackwardPolicy, ticket: GradientTicket, handed: Handed, is_split: bool) -> Sequence[Array | None]:
    """Hand in a caller's gradients; return those of its inputs once the batch has gone back, None if it does not wait."""
    if torch.is_grad_enabled():
        raise FailedPreconditionError(
            "a batch goes back once and is not differentiated twice: call backward() without create_graph=True"
        )
    if handed.when is not None:
        torch_split.refuse_capture(handed.when.stream.device)
    for x in handed.gradients:
        refuse_odd("a gradient", x)
    waits = _waits(ticket)
    ticket.deposit(handed if waits else handed.copied(), _runs_elsewhere(policy, ticket, waits, is_split))
    if waits or ticket.done:
        parts, ticket.value = _wait(ticket, handed), None
        finished = ticket.backward.finished
        if finished is not None:
            finished.wait(parts)
            if handed.when is not None:
                finished.wait(parts, handed.when.stream)
        if not ticket.is_deferred:
            return parts
    return [None] * len(ticket.inputs)


def _wait(ticket: GradientTicket, handed: Handed) -> Any:
    """Return the gradients of a caller's inputs; an interrupted caller leaves copies of what it handed in."""
    try:
        return ticket.wait()
    except BaseException:
        if not ticket.done:
            ticket.gradient = handed.copied()
        raise


def _waits(ticket: GradientTicket) -> bool:
    """Return True if a caller waits for the batch's backward; if it must not, the batch's backward adds its gradients."""
    if ticket.is_deferred:
        return False
    if not _must_not_wait(ticket):
        if len(ticket.backward.tickets) > 1:
            check_thread()
        return True
    if any(not x.is_leaf for x in ticket.inputs):
        raise FailedPreconditionError(
            "one backward covers several calls of a batch whose inputs were computed: make the batcher with "
            "wait_backward=False, or go back for each call in its own thread"
        )
    ticket.is_deferred = True
    return False


def _runs_elsewhere(policy: BackwardPolicy, ticket: GradientTicket, waits: bool, is_split: bool) -> bool:
    """Return True if a worker must run the batch's backward, and not the caller that hands in the last gradient.

    In a replay a batch waits for its turn. A caller that does not wait must not run it: others may wait for that caller.
    On an accelerator a caller that waits must not run it: a backward within its own could run its node of another batch. Nor must
    one whose thread is in modes of PyTorch: the function was in none.
    """
    if not waits:
        return policy.is_replayed or policy.elsewhere
    if torch_internals.has_modes():
        return True
    return (is_split or torch.cuda.is_initialized()) and len(ticket.backward.tickets) > 1


def _must_not_wait(ticket: GradientTicket) -> bool:
    """Return True if a missing gradient can only come from this thread: from the backward that runs, or from a later one."""
    return ticket.backward.misses_other_of(this_thread(), ticket) or _covers_other(ticket)


def _covers_other(ticket: GradientTicket) -> bool:
    """Return True if the backward that runs in this thread will reach the node of another missing caller."""
    nodes = ticket.backward.nodes
    own = nodes.get(ticket)
    others = [node for ref in list(nodes.values()) if ref is not own and (node := ref()) is not None]
    return torch_internals.is_any_covered(others)


def _no_gradients(ticket: GradientTicket, count: int) -> list[Array | None]:
    """Return the gradients of a node's inputs in a failed backward: None for leaves, zeros for computed tensors."""
    return [None if x.is_leaf else torch.zeros_like(x) for x in ticket.inputs[:count]]


class _RaiseAtEnd:
    """Raises an error at the end of the backward that runs; callers' nodes that it still reaches hand in nothing.

    If a node raised at once, PyTorch would keep the rest of the graph in a queue of the thread. The system frees it after the
    thread's last line of Python; if the interpreter is ending then, the process aborts. See docs/batching.md.
    """

    def __init__(self, error: Exception, ticket: GradientTicket) -> None:
        self._error: Exception | None = error
        # A backward that was refused before it handed in a gradient can be called again.
        self._is_final = ticket.deposited or ticket.backward.done
        self._number = torch_internals.current_backward()
        _failed[self._number] = self
        torch_internals.at_end_of_backward(self)

    def skip(self, ticket: GradientTicket) -> None:
        """Drop the ticket of another call that the backward reaches: its batch must not wait for a gradient.

        Its graph may stay alive, for example with this error's traceback in a future.
        """
        if self._is_final:
            ticket.drop()

    def __call__(self) -> None:
        error, self._error = self._error, None
        _failed.pop(self._number, None)
        assert error is not None
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame


#: The failed backwards that still run, by their number. If another error ends one earlier, PyTorch frees its callback, and
#: with it the entry.
_failed: weakref.WeakValueDictionary[int, _RaiseAtEnd] = weakref.WeakValueDictionary()


# --- the batch's backward ---


class TorchBackward:
    """The backward of a batch that PyTorch recorded: returns each caller's rows of the gradients of the inputs."""

    def __init__(
        self,
        outputs: Sequence[Array],
        inputs: Sequence[Array],
        bounds: Bounds,
        items: Sequence[list[Array]],  # each caller's own outputs, beside its rows of `outputs`
        columns: Columns | None = None,
    ) -> None:
        self._outputs, self._bounds, self._items = outputs, bounds, items
        self._inputs = _needing_gradient(inputs)
        of_outputs, of_inputs = columns or ((None,) * len(outputs), (None,) * len(inputs))
        self._of_outputs = of_outputs
        self._of_inputs = [column for x, column in zip(inputs, of_inputs, strict=True) if _needing_gradient([x])]
        device = torch_split.device_of([*outputs, *(x for own in items for x in own)])
        self._stream = None if device is None else torch_split.current_stream(device)
        self.tokens = [] if device is None else torch_split.new_tokens(len(bounds))

    def __call__(self, gradients: Sequence[Any], tickets: Sequence[GradientTicket]) -> list[list[Array | None]]:
        # A caller in inference mode may find another batch overdue. Parameters keep the gradients.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self(gradients, tickets)
        if self._stream is None:
            return self._run(gradients, tickets)
        with use_stream(self._stream):
            parts = self._run(gradients, tickets)
            tickets[0].backward.finished = point_now(self._stream.device)
        return parts

    def _run(self, handed: Sequence[Handed | None], tickets: Sequence[GradientTicket]) -> list[list[Array | None]]:
        gradients = [each and each.wait() for each in handed]
        columns = [[given and given[k] for given in gradients] for k in range(len(self._outputs))]
        seeds = [
            _concat_gradients(x, parts, self._bounds) if column is None else column.join(parts, x)
            for x, parts, column in zip(self._outputs, columns, self._of_outputs, strict=True)
        ]
        own = [
            (x, given[i])
            for items, given in zip(self._items, gradients, strict=True)
            for i, x in enumerate(items, len(self._outputs))
            if given is not None and given[i] is not None
        ]
        run_backward([*self._outputs, *(x for x, _ in own)], [*seeds, *(gradient for _, gradient in own)])
        of_inputs = [
            _copies_of_rows(x.grad, self._bounds) if column is None or x.grad is None else column.split(x.grad)
            for x, column in zip(self._inputs, self._of_inputs, strict=True)
        ]
        parts = [[column[i] for column in of_inputs] for i in range(len(self._bounds))]
        deferred = [
            (x, gradient)
            for ticket, part in zip(tickets, parts, strict=True)
            if ticket.is_deferred
            for x, gradient in zip(ticket.inputs, part, strict=True)
            if gradient is not None
        ]
        if deferred:
            run_backward([x for x, _ in deferred], [gradient for _, gradient in deferred])
        return parts


def _copies_of_rows(gradient: Array | None, bounds: Bounds) -> Sequence[Array | None]:
    """Return each caller's rows of the gradient of an input, which nobody else uses."""
    if gradient is None:
        return [None] * len(bounds)
    if gradient.is_cpu:
        return [gradient[start:stop].clone() for start, stop in bounds]
    sizes = [stop - start for start, stop in bounds]
    return _parts_of(gradient, [*sizes, len(gradient) - bounds[-1][1]])


def _concat_gradients(output: Array, gradients: Sequence[Array | None], bounds: Bounds) -> Array:
    """Return the gradient of a whole `output`, with zeros for callers without one and for padding."""
    parts = [
        output.new_zeros(stop - start, *output.shape[1:]) if gradient is None else gradient
        for (start, stop), gradient in zip(bounds, gradients, strict=True)
    ]
    padding = len(output) - bounds[-1][1]
    if padding:
        parts.append(output.new_zeros(padding, *output.shape[1:]))
    return torch.cat(parts)
