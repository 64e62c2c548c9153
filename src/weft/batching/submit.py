"""How a call of a batched function comes in: its arguments taken apart, and what is made of them put in the queue."""

from __future__ import annotations

from math import inf
from typing import Any, NoReturn

from ..core.scope import Scope
from ..errors import CancelledError, FailedPreconditionError, InvalidArgumentError, OpError
from .backward import Backward, OutstandingBackwards
from .dispatcher import Dispatcher
from .function_op import is_low
from .gradient import this_thread
from .request import Arguments, Request
from .statistics import Counters


class Submitter:
    """The part of a `Batcher` that every call goes through."""

    name: str
    _scope: Scope
    _dispatcher: Dispatcher
    _arguments: Arguments
    _counters: Counters
    _outstanding: OutstandingBackwards
    _backward: Backward
    _examples: bool  # whether callers hand in one example without a dimension of rows
    _deadline: float | None
    _names: Any  # a recorder or a replay, while there is one
    _patience: float | None  # how long calls wait in a replay
    _closed: bool

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any], pulls: bool = False) -> Request:
        """A call with these arguments."""
        if self._closed and not self._dispatcher.is_recursive:
            raise CancelledError(f"the batcher {self.name} is closed")
        try:
            return self._arguments.take(self._dispatcher, args, kwargs, pulls)
        except Exception:
            self._counters.call_rejected()
            raise

    def _enter(
        self, request: Request, deadline: float | None = None, priority: str | None = None, caller: str | None = None,
        origin: object = None,
    ) -> Request:  # fmt: skip
        """Put a call in its queue: that of a task if `origin` is given, which stands for the thread of its loop."""
        if request.is_traced:
            raise InvalidArgumentError(
                "a call whose arrays JAX is tracing is made by the batcher itself, not by aio or vjp"
            )
        dispatcher, form = request.dispatcher, request.form
        now = dispatcher.clock.now()
        names = self._names
        request.counters = self._counters
        if self._examples:
            request.examples = True
        if origin is not None:
            request.is_task = True
        if self._outstanding.joints:
            self._outstanding.look()
        try:
            if is_low() if priority is None else _is_low(priority):
                request.low = True
            seconds = self._patience or (self._deadline if deadline is None else deadline)
            if seconds is not None:
                request.deadline = now + positive("deadline", seconds)
            if form.pulls or form.wants_gradient:
                request.origin = this_thread() if origin is None else origin
                request.backward = self._backward
                request.is_attached = origin is None and self._backward.waits
                if form.like is None:  # else it is one of NumPy's
                    self._backward.check_devices(request.arrays)
            if names is not None:
                request.name = names.next(caller)
            dispatcher.enter(form, request, now)
        except OpError as error:
            request.end_inside()
            if request.name is not None:
                names.take_back(request.name)
            self._counters.call_rejected()
            if self._scope.observers:
                self._scope.tell("call_refused", "batched", self.name, error)
            raise
        return request


def _is_low(priority: str) -> bool:
    if priority not in ("high", "low"):
        raise InvalidArgumentError(f'the priority must be "high" or "low", got {priority!r}')
    return priority == "low"


def refuse_copy(name: str) -> NoReturn:
    """Say why a batcher, or what calls one, is neither copied nor pickled."""
    raise FailedPreconditionError(
        f"the batcher {name} cannot be copied or pickled: its callers wait in its one queue, in this process. Make another "
        "with weft.batched where one is needed; an object that holds a batcher can leave it out by __getstate__ or __deepcopy__"
    )


def positive(name: str, seconds: Any) -> float:
    """A time in seconds that is one."""
    if not (isinstance(seconds, (int, float)) and 0 < seconds < inf):
        raise InvalidArgumentError(f"{name} must be a positive number of seconds, got {seconds!r}")
    return float(seconds)
