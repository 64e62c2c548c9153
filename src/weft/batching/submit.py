"""How a call of a batched function is made: its arguments become a request, and the request enters a queue."""

from __future__ import annotations

from typing import Any, NoReturn

from ..core import adapters, check
from ..core.inputs import shown
from ..core.lock import departed, remove_departed
from ..core.scope import Scope
from ..errors import CancelledError, FailedPreconditionError, InvalidArgumentError, OpError
from .arguments import Arguments
from .dispatcher import Dispatcher
from .gradient import BackwardPolicy, OutstandingBackwards
from .options import flag
from .request import CallContext, Request
from .statistics import Counters


class Submitter:
    """The part of a `Batcher` that every call goes through."""

    name: str
    _scope: Scope
    _dispatcher: Dispatcher
    _arguments: Arguments
    _counters: Counters
    _outstanding: OutstandingBackwards
    _policy: BackwardPolicy
    _deadline: float | None  # of calls without one of their own
    _plain: CallContext  # of calls without options from threads
    _plain_task: CallContext  # and from tasks
    _has_vjp: bool
    _on_loop: bool  # whether event loops run the batches of their tasks
    _recording: Any  # a `Recorder` or a `Replay`, or None
    _replay_timeout: float | None  # the deadline of all calls in a replay
    _closed: bool

    def _context(
        self,
        deadline: float | None = None,
        priority: str | None = None,
        caller: str | None = None,
        is_task: bool = False,
        kind: type[CallContext] = CallContext,
        receipt: bool = False,
    ) -> CallContext:
        """Return the context of a call with these options."""
        seconds = self._replay_timeout or (self._deadline if deadline is None else deadline)
        try:
            flag("receipt", receipt)
            caller = check.plain(caller)
            if caller is not None and not isinstance(caller, str):
                raise InvalidArgumentError(f"caller must be text, got {shown(caller)}")
            return kind(self._dispatcher, self._counters, self._policy, seconds, priority, caller, is_task)
        except OpError as error:
            self._refuse(error)
            raise

    def _request(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], context: CallContext, is_vjp: bool = False
    ) -> Request:
        """Make a request of the arguments of a call. It is in no queue yet."""
        if self._closed and not self._dispatcher.is_recursive:
            raise CancelledError(f"the batcher {self.name} is closed")
        if is_vjp and not self._has_vjp:
            raise FailedPreconditionError(f"the batcher {self.name} has no pull-back: make it with vjp=")
        try:
            return self._arguments.request(context, args, kwargs, is_vjp)
        except Exception as error:
            self._refuse(error)
            raise

    def _submit(self, request: Request) -> Request:
        """Put a request in its queue; the caller waits on it next."""
        if request.is_traced:
            raise InvalidArgumentError("a call with arrays that JAX traces must be a plain call, not one of aio or vjp")
        if self._outstanding.backwards:
            self._outstanding.end_overdue()
        key, recording = request.key, self._recording
        try:
            if not key.is_on_host:
                request.stream = adapters.of("torch", __package__).caller_stream(request.arrays)
            if recording is not None:
                request.name = recording.next_name(request.context.caller)
            if key.jax_mode is not None:
                request.stays_here = not key.jax_mode.is_movable
            request.dispatcher.enter(key, request, request.arrived)
        except OpError as error:
            request.end_inside()
            if request.name is not None:
                recording.free_name(request.name)
            self._refuse(error)
            raise
        return request

    def _refuse(self, error: Exception) -> None:
        """Count a refused call, and tell the observers."""
        self._counters.count("rejected")
        if self._scope.observers:
            self._scope.tell("call_refused", "batched", self.name, error)

    def _answer(self, request: Request) -> Any:
        """Submit a request, wait, and return its result."""
        try:
            self._submit(request)
            return request.wait()
        except BaseException:
            departed.append(request)  # also between the two lines: others may rely on this caller to run their batch
            request.end_inside()
            remove_departed()
            raise


def refuse_copy(name: str) -> NoReturn:
    """Raise an error that says why a batcher cannot be copied or pickled."""
    raise FailedPreconditionError(
        f"the batcher {name} cannot be copied or pickled: its callers wait in its one queue, in this process. Make another "
        "with weft.batched where one is needed; an object that holds a batcher can leave it out by __getstate__ or __deepcopy__. "
        "Processes share one batcher through `weft serve`, or, with gradients, through weft.ray"
    )
