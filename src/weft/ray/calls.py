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
from ..errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from . import values
from .client import Client, Remote
from .frames import GRAD, INFERENCE, RECEIPT, STREAM, VJP, CallMessage, Frame, Kind, ResultMessage
from .invocation import Invocation
from .requests import BaseLink, Pending, decode_result

#: How much longer than its deadline a caller waits for its replica, which enforces the deadline.
GRACE_SECONDS = 5.0
#: So many replicas that turn out to be gone a call is tried on.
MOST_TRIES = 8


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
        is_one_array = len(args) == 1 and not kwargs and values.is_array(args[0])
        tree = values.pack_tree(args[0] if is_one_array else (args, kwargs), arrays)
        specs, self._buffers = values.pack_arrays(arrays)
        flags, self.inputs = _flags(options, arrays)
        self._message = CallMessage(flags, tree, specs)
        self._set_options(options)
        self.has_gradients = bool(flags & (GRAD | VJP))
        if "torch" in sys.modules:
            self._message.autocast = _autocast()
        deadline = self._message.deadline or client.description.deadline
        self.end = inf if deadline is None else time.monotonic() + deadline
        self.until = (
            self.end + GRACE_SECONDS
        )  # when the caller gives up although the replica has it and does not answer
        self._tries = 0
        self._is_replayed = False
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

    def send(self, link: BaseLink) -> Any:
        """Send the call to a replica; a second one gets what is left of the deadline."""
        if self._tries and self.end < inf:
            left = self._message.deadline = self.end - time.monotonic()
            if left <= 0:
                raise DeadlineExceededError("the call's replica died, and no time of its deadline is left for another")
        self._tries += 1
        return link.request(Kind.CALL, self._message, self._buffers, is_stream=self._options.is_stream)

    def begun(self, remote: Remote) -> None:
        """Note that the call was sent, for the choice of later calls' replicas."""
        candidate = remote.candidate
        candidate.begin(self, self.rows, time.monotonic())
        if self._options.is_stream:  # it may be read slowly: the replica is not late
            candidate.under_way.pop(self, None)

    def over(self, remote: Remote, pending: Pending) -> None:
        """Note how a call that was sent has ended, as `begun`."""
        frame = pending.frame
        if frame is None or frame.kind == Kind.ERROR:
            remote.candidate.give_up(self, time.monotonic())
        else:
            remote.candidate.end(self, time.monotonic())

    def check_time(self) -> None:
        """Raise `DeadlineExceededError` if the call's deadline is over while it waits to be sent."""
        if time.monotonic() >= self.end:
            raise DeadlineExceededError("there was no connection to a replica within the deadline of the call")

    def after_no_send(self, remote: Remote, error: UnavailableError) -> None:
        """Leave out a replica that the call could not be sent to; raise the error if there were too many of them."""
        self._client.lose(remote)
        self._client.check_open()
        self._tries += 1
        if self._tries >= MOST_TRIES:
            raise error

    def after_loss(self, remote: Remote, link: BaseLink, error: UnavailableError) -> None:
        """Return if the call is to be sent again after its replica died: once, and never with gradients. Else raise."""
        if link.broken is None:
            raise error  # the replica's own answer, such as a full queue
        self._client.lose(remote)
        self._client.check_open()
        if self.has_gradients:
            raise UnavailableError(f"{error}; a call with gradients is not sent again by itself") from None
        if self._is_replayed:
            raise error
        self._is_replayed = True

    def result(self, remote: Remote, link: BaseLink, frame: Frame, is_task: bool) -> Any:
        """Return the result of an answer."""
        client = self._client
        message: ResultMessage = decode_result(frame.message)
        # Made first: it tells the replica to drop the result if this fails.
        invocation = pull_back = None
        if message.invocation:
            invocation = Invocation(client, remote, link, message.invocation, message.version)
        arrays = values.unpack_arrays(message.arrays, frame.arrays)
        client.report(remote, message.load)
        if invocation is not None:
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
