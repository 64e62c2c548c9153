"""One remote call: its frame, the replica it goes to, and its result."""

from __future__ import annotations

import sys
import time
from collections import namedtuple
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from ..batching.function_op import is_low
from ..batching.options import is_low_priority, positive
from ..batching.statistics import Receipt
from ..core import adapters
from ..errors import InvalidArgumentError, UnavailableError
from . import values
from .client import Client, Remote
from .frames import GRAD, INFERENCE, RECEIPT, STREAM, VJP, CallMessage, Frame, Kind, ResultMessage
from .invocation import Invocation
from .requests import BaseLink, decode_result

#: How much longer than its deadline a caller waits for its replica, which enforces the deadline.
GRACE_SECONDS = 5.0


class CallOptions(NamedTuple):
    """The options of one call, as of `Batcher.call`."""

    deadline: float | None = None
    priority: str | None = None
    caller: str | None = None
    receipt: bool = False
    is_vjp: bool = False
    is_stream: bool = False


PLAIN = CallOptions()


class RemoteCall:
    """A call that is ready to be sent."""

    def __init__(self, client: Client, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> None:
        self._client, self._options = client, options
        arrays: list[Any] = []
        if len(args) == 1 and not kwargs:
            tree = values.pack_tree(args[0], arrays)
            if tree != values.ONE:
                arrays = []
                tree = values.pack_tree((args, kwargs), arrays)
        else:
            tree = values.pack_tree((args, kwargs), arrays)
        specs, self._buffers = values.pack_arrays(arrays)
        flags, self.inputs = _flags(options, arrays)
        self._message = CallMessage(flags, tree, specs)
        if options is not PLAIN:
            self._set_options(options)
        elif is_low():
            self._message.priority = "low"
        self.has_gradients = bool(flags & (GRAD | VJP))
        if "torch" in sys.modules:
            self._message.autocast = _autocast()
        self.rows = arrays[0].shape[0] if arrays and client.description.has_rows and arrays[0].shape else 1

    def _set_options(self, options: CallOptions) -> None:
        message = self._message
        if options.deadline is not None:
            message.deadline = positive("deadline", options.deadline)
        if options.priority is not None:
            is_low_priority(options.priority)
            message.priority = options.priority
        elif is_low():
            message.priority = "low"
        if options.caller is not None and not isinstance(options.caller, str):
            raise InvalidArgumentError(f"caller must be a str, got {options.caller!r}")
        message.caller = options.caller

    @property
    def until(self) -> float:
        """When the caller gives up although no answer came."""
        deadline = self._message.deadline or self._client.description.deadline
        return inf if deadline is None else time.monotonic() + deadline + GRACE_SECONDS

    def send(self, link: BaseLink) -> Any:
        """Send the call to a replica."""
        return link.request(Kind.CALL, self._message, self._buffers, is_stream=self._options.is_stream)

    def may_go_again(self, error: UnavailableError, link: BaseLink | None, was_sent: bool, turn: int) -> bool:
        """Return True if the call is sent to another replica after its own died: once; with gradients only if it was not sent."""
        if link is not None and link.broken is None:
            return False  # the replica's own answer, such as a full queue
        if was_sent and self.has_gradients:
            raise UnavailableError(f"{error}; a call with gradients is not sent again by itself") from None
        self._client.check_open()
        if turn:
            return False
        self._client.replayed += was_sent
        return True

    def result(self, remote: Remote, link: BaseLink, frame: Frame, is_task: bool) -> Any:
        """Return the result of an answer."""
        client = self._client
        message: ResultMessage = decode_result(frame.message)
        arrays = values.unpack_arrays(message.arrays, frame.arrays)
        client.report(remote, message.load)
        pull_back = None
        if message.invocation:
            invocation = Invocation(client, remote, link, message.invocation, message.version)
            if self._options.is_vjp:
                pull_back = invocation
            else:
                places = [i for i, spec in enumerate(message.arrays) if spec[3]]
                is_deferred = is_task or not client.description.wait_backward
                attach = adapters.of("torch", __package__).attach
                rows = attach(invocation, [arrays[i] for i in places], self.inputs, is_deferred)
                for i, x in zip(places, rows, strict=True):
                    arrays[i] = x
        result = values.unpack_tree(message.tree, arrays)
        if self._options.is_vjp:
            return result, pull_back
        return (result, RemoteReceipt(*message.receipt, version=message.version)) if message.receipt else result


#: A receipt with the `version` of the weights that made the result.
_named: Any = namedtuple
RemoteReceipt = _named("RemoteReceipt", (*Receipt._fields, "version"))


def _flags(options: CallOptions, arrays: Sequence[Any]) -> tuple[int, list[Any]]:
    """Return the flags of a call, and the tensors that need a gradient."""
    inputs: list[Any] = []
    flags = (VJP if options.is_vjp else 0) | (RECEIPT if options.receipt else 0) | (STREAM if options.is_stream else 0)
    torch = sys.modules.get("torch")
    if torch is None:
        return flags, inputs
    if torch.is_inference_mode_enabled():
        return flags | INFERENCE, inputs
    tensors = [x for x in arrays if isinstance(x, torch.Tensor)]
    if tensors and torch.is_grad_enabled():
        adapters.of("torch", __package__).check(tensors)
        flags |= GRAD
        inputs = [x for x in tensors if x.requires_grad]
    return flags, inputs


def _autocast() -> str | None:
    torch = sys.modules["torch"]
    if not torch.is_autocast_enabled("cpu"):
        return None
    return str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
