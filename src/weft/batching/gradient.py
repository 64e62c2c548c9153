"""The shared backward of a batch: it collects the gradients of all callers and runs once.

A `SharedBackward` belongs to a batch and has one `GradientTicket` per caller. A caller deposits its gradient once, or drops its
ticket. The caller that completes the set runs `settle` once, without the lock. This module knows no framework.

A caller whose backward fails in one batch frees its whole graph, and with it its tickets in other batches. The callers of those
batches get an error that names the failed backward, for nobody dropped a result. `CallerThread` and `Failure` record its cause.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from threading import get_ident
from typing import Any

from ..core.clock import Clock
from ..core.interrupts import as_exception
from ..core.lock import departed, has_lock, lock, refuse_inside_lock, remove_departed
from ..core.ticket import CheckJob, Ticket, wake_all
from ..core.torch_backward import device_threads
from ..core.warn import warn_caller
from ..errors import DeadlineExceededError, FailedPreconditionError, OpError, copy_of, own_copy, text_of
from . import workers

#: `SharedBackward` and `Failure` share these numbers, which tell which of them came first.
_numbers = count()

#: The number of errors that `OutstandingBackwards` keeps for `join`.
KEPT_ERRORS = 16


class Failure:
    """A backward that raised. It holds the error's class and text alone: the error itself would keep the graph alive."""

    __slots__ = ("error_class", "number", "text")

    def __init__(self, error: BaseException) -> None:
        self.number = next(_numbers)
        # If the error reports another caller's failure, that failure is the cause.
        first: Failure | None = getattr(error, "first_failure", None)
        self.error_class: type[BaseException] = type(error) if first is None else first.error_class
        self.text: str = text_of(error) if first is None else first.text


class CallerThread:
    """Identifies a thread that makes calls. The number of a thread does not: the system uses it again."""

    __slots__ = ("failure",)

    def __init__(self) -> None:
        self.failure: Failure | None = None  # of the last backward that raised in this thread


#: The threads that have made calls with gradients.
callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class _Local(threading.local):
    thread: CallerThread | None = None


_local = _Local()


def this_thread() -> CallerThread:
    """Return the `CallerThread` of the current thread."""
    found = _local.thread
    if found is None:
        made = CallerThread()  # a finalizer may run here, and drop a ticket
        found = _local.thread = _local.thread or made
        callers.add(threading.current_thread())
    return found


class BackwardPolicy:
    """How the callers of a batcher hand in their gradients."""

    is_copied = False  # True in a forked child, which has a copy of the parameters, until somebody is warned of it

    def __init__(self, waits: bool, name: str) -> None:
        self.waits, self._name = waits, name  # the option `wait_backward`, and the name of the batcher
        self.is_replayed = False  # True while batches go back in a recorded order
        self.elsewhere = False  # True if a caller that does not wait leaves the batch's backward to a worker

    def warn_of_copy(self) -> None:
        """Warn, once, that gradients go to the parameters of this process alone."""
        if vars(self).pop("is_copied", False):  # atomic
            warn_caller(
                f"the batcher {self._name} was made before this process was forked: what it trains here is this process's own copy "
                "of the parameters, and the parent's get no gradient. Make the model and its batcher in the child, or train one "
                "model from several processes with weft.ray",
                RuntimeWarning,
            )


class GradientTicket(Ticket):
    """A caller's part of a `SharedBackward`: `value` becomes the gradient of the caller's own inputs."""

    deposited = is_dropped = False
    is_missing = True  # True if the backward waits for this gradient
    failure: Failure | None = None  # of a dropped ticket: the backward of its caller that raised before
    is_undelivered = False  # True if no caller ever held the rows of this ticket: their gradient is zero, not missing
    gradient: Any = None
    is_deferred = False  # True if the caller does not wait: the batch's backward adds the gradient to `inputs` itself
    inputs: Sequence[Any] = ()  # the caller's arrays that need a gradient
    places: Sequence[int] = ()  # the leaves of the result that have a gradient

    def __init__(self, backward: SharedBackward, caller_thread: CallerThread) -> None:
        super().__init__(backward.clock)
        self.backward = backward
        self.caller_thread = caller_thread

    def on_alarm(self) -> None:
        # Once the backward runs, the deadline no longer counts.
        self.alarm = inf if self.backward.is_running else self.backward.deadline
        self.backward.check()

    def deposit(self, gradient: Any, elsewhere: bool = False) -> None:
        """Hand in the gradient of this caller's outputs; the last caller runs the batch's backward, with `elsewhere` a worker."""
        self.jobs = []
        backward = self.backward
        is_complete = backward.add(self, gradient)
        if not (is_complete or backward.dropped):
            return
        if elsewhere:
            with lock:
                woken = workers.run_elsewhere(CheckJob(backward.check, is_short=False))
            for each in woken or ():
                each.wake()
            if departed:
                remove_departed()
            if woken is not None:
                return
        backward.check()

    def note_failure(self, error: BaseException) -> None:
        """Record that the backward which reached this ticket raised: it is the reason why its thread drops other tickets."""
        this_thread().failure = self.caller_thread.failure = Failure(error)

    def drop(self) -> None:
        """Note that no gradient will come. This takes no lock: it may run wherever an object is deleted."""
        backward = self.backward
        if self.deposited or self.is_dropped or backward.done:
            return
        self.is_dropped = True
        # The thread of the call, and the thread that held the result last.
        last = None if get_ident() in device_threads else this_thread()
        for thread in (self.caller_thread, last):
            failure = getattr(thread, "failure", None)
            if failure is not None and failure.number > backward.number:
                self.failure = failure
        backward.dropped.append(self)
        if len(backward.dropped) == len(backward.tickets):  # no caller is left: free the batch's graph
            backward.give_up()
        for waiting in (*backward.tickets, *backward.watches):
            if waiting.jobs is not None:  # its caller waits or is about to, and checks the backward
                waiting.jobs.append(CheckJob(backward.check, is_short=False))
                waiting.wake()


class ResultHandle:
    """Lives as long as a caller can hand in a gradient; drops the ticket if it dies without one."""

    is_delivered = False  # True once the caller has the rows

    def __init__(self, ticket: GradientTicket) -> None:
        self.ticket = ticket

    def __del__(self) -> None:
        if hasattr(self, "ticket"):  # torch.compile makes one without, when it traces a call
            self.ticket.is_undelivered = not self.is_delivered
            self.ticket.drop()


class BackwardWatch(Ticket):
    """Waits for the end of a backward without a gradient of its own."""

    def __init__(self, backward: SharedBackward) -> None:
        super().__init__(backward.clock)
        self.backward = backward
        self.alarm = backward.deadline
        self.jobs = []

    def on_alarm(self) -> None:
        backward = self.backward
        self.alarm = inf if backward.is_running else backward.deadline
        backward.check()
        if backward.done:
            backward._end_watch(self)


def _without_frames(error: Exception) -> Exception:
    """Return a copy of `error` with its traceback as a note: its frames would keep the loss, and with it this backward, alive."""
    copy = own_copy(error)
    copy.__cause__ = None if copy.__cause__ in (None, error) else copy_of(copy.__cause__)
    copy.add_note("Raised by the batch's backward:\n" + "".join(traceback.format_exception(error)).rstrip())
    return copy


class SharedBackward:
    """The gradients of a batch's callers. `settle(gradients)` returns each caller's part; missing gradients are None.

    An exception of a signal handler may interrupt any step. The next thread that calls `check` continues: the outcome is set in
    one assignment, and delivering it can be repeated.
    """

    error: BaseException | None = None
    has_parameters = False  # True in a forked child if the batch's backward adds gradients to parameters
    tokens: Any = ()  # on an accelerator: what the framework's nodes of the callers need, made once for all
    finished: Any = None  # on an accelerator: the `StreamPoint` from which on the results can be used

    def __init__(
        self,
        caller_threads: Sequence[CallerThread],
        settle: Callable[[Sequence[Any]], Sequence[Any]],
        clock: Clock,
        seconds: float,
        zero_for_missing: bool,
        registry: OutstandingBackwards,
    ) -> None:
        self.number = next(_numbers)
        self.clock = clock
        self.seconds = seconds
        self.deadline = inf  # known once the first gradient has come
        self.dropped: deque[GradientTicket] = deque()
        self.watches: list[BackwardWatch] = []
        self.tickets = [GradientTicket(self, thread) for thread in caller_threads]
        self._missing = dict.fromkeys(self.tickets)  # in order
        self._missing_of = Counter(caller_threads)
        # The framework's nodes of the missing tickets whose callers have their rows.
        self.nodes: dict[GradientTicket, weakref.ref[Any]] = {}
        self.done = False
        self._settle: Callable[[Sequence[Any]], Sequence[Any]] | None = settle
        self._zero = zero_for_missing
        self._registry = registry
        self._is_broken = False  # True if an exception interrupted a change of `_missing`
        self._runner: object = None  # identifies the call of `run` that ends this backward
        self._outcome: tuple[Sequence[Any], BaseException | None] | None = None

    @property
    def is_running(self) -> bool:
        """True once the backward has begun to run or to fail."""
        return self._runner is not None

    @property
    def missing(self) -> list[GradientTicket]:
        """The tickets whose gradient has not come."""
        return list(self._missing)

    def _remove_missing(self, ticket: GradientTicket) -> None:
        ticket.is_missing = False
        if ticket in self._missing:
            del self._missing[ticket]
            self._missing_of[ticket.caller_thread] -= 1
        self.nodes.pop(ticket, None)

    def _repair(self) -> None:
        """Complete a change that an exception interrupted."""
        if self._is_broken:
            self._missing = {ticket: None for ticket in self.tickets if ticket.is_missing}
            self._missing_of = Counter(ticket.caller_thread for ticket in self._missing)
            self._is_broken = False

    def misses_other_of(self, thread: CallerThread, ticket: GradientTicket) -> bool:
        """Return True if a gradient other than that of `ticket` is missing for a call of this thread."""
        own = ticket.caller_thread is thread and not ticket.deposited
        return self._missing_of[thread] > own

    def watch(self) -> BackwardWatch:
        """Return a ticket that ends with this backward, with its error if it has one."""
        watch = BackwardWatch(self)
        with lock:
            if not self.done:
                self.watches = [*self.watches, watch]
        if self.done:
            self._end_watch(watch)
        elif self.dropped or not self._missing:
            self.check()
        return watch

    def add(self, ticket: GradientTicket, gradient: Any) -> bool:
        """Take a gradient; return True if none is missing now, so that the caller must call `check`."""
        refuse_inside_lock("a backward")
        with lock:
            self._repair()
            if ticket.deposited:
                raise FailedPreconditionError(
                    "this call's gradient was handed in already: a batch goes back once, without retain_graph"
                )
            if self.error is not None:
                raise self._own_error()
            if self.done or not ticket.is_missing:
                raise FailedPreconditionError("this call's batch has gone back without it")
            if self.deadline == inf:
                self.deadline = self.clock.now() + self.seconds
            ticket.alarm = self.deadline
            self._registry.add(self)
            self._is_broken = True
            ticket.gradient = gradient
            ticket.deposited = True
            self._remove_missing(ticket)
            self._is_broken = False
            return not self._missing

    def check(self) -> None:
        """Run the backward if it is complete, end it if gradients will not come, and continue what was interrupted."""
        if has_lock():
            return  # in a finalizer: other callers check, too
        if self._outcome is not None:
            self._deliver()
            return
        with lock:
            self._repair()
            if self.is_running or self.done:
                return
            error = self._give_up_missing()
            if error is None and self._missing:
                return
        self.run(error)

    def _give_up_missing(self) -> Exception | None:
        """Stop waiting for gradients that will not come; return an error if the backward cannot run without them."""
        is_late = self.clock.now() >= self.deadline
        if not self._missing or not (is_late or self.dropped):
            return None
        self._is_broken = True
        for ticket in self.dropped:
            if ticket.is_undelivered:
                ticket.deposited = True
                self._remove_missing(ticket)
        gone = self.missing if is_late else [ticket for ticket in self.dropped if not ticket.deposited]
        if self._zero:
            for ticket in gone:
                self._remove_missing(ticket)
        self._is_broken = False
        return self._missing_error(gone, is_late) if gone and not self._zero else None

    def give_up(self) -> None:
        """Free the batch's graph: no gradient will ever come."""
        self._settle, self.done = None, True
        self._forget_tickets()

    def _forget_tickets(self) -> None:
        """End the cycle of this backward and its tickets, which refer to their callers' inputs."""
        self.tickets, self._missing, self.nodes, self.dropped = [], {}, {}, deque()

    def run(self, error: BaseException | None = None) -> None:
        """Run the backward, or end it with `error`, unless that has begun. Every caller gets the error."""
        mine = object()
        try:
            with lock:
                if self._runner is None and not self.done:
                    self._runner = mine
            if self._runner is mine:
                self._outcome = self._run_settle() if error is None else ((), error)
                self._deliver()
        except BaseException as end:
            if self._runner is mine:
                if self._outcome is None:
                    text = f"the batch's backward was ended by {type(end).__name__}"
                    self._outcome = (), FailedPreconditionError(text)
                self._deliver()
            raise

    def _run_settle(self) -> tuple[Sequence[Any], BaseException | None]:
        assert self._settle is not None
        try:
            return self._settle([ticket.gradient for ticket in self.tickets]), None
        except BaseException as error:
            return (), _without_frames(as_exception(error))

    def _deliver(self) -> None:
        """End all tickets with the outcome; repeating this changes nothing."""
        assert self._outcome is not None
        parts, error = self._outcome
        self._settle = None  # and with it the batch's graph
        self.error = error
        for i, ticket in enumerate(self.tickets):
            if not ticket.done:
                ticket.gradient = None
                if error is not None:
                    ticket.reject(self._own_error())
                else:
                    ticket.resolve(parts[i] if parts else None)
        with lock:
            self.done = True  # from here on `watch` adds nobody
        self._outcome = (), error
        self._registry.remove(self)
        wake_all([ticket for ticket in self.tickets if ticket.waiter is not None])
        for watch in self.watches:
            self._end_watch(watch)
        self.watches = []
        self._forget_tickets()
        if departed:
            remove_departed()

    def _end_watch(self, watch: BackwardWatch) -> None:
        if self.error is not None:
            watch.reject(self._own_error())
        else:
            watch.resolve(None)
        watch.wake()

    def _own_error(self) -> Exception:
        assert self.error is not None
        return own_copy(self.error)

    def _missing_error(self, gone: Sequence[GradientTicket], is_late: bool) -> Exception:
        of = f"of the {len(self.tickets)} calls of the batch"
        if is_late:
            return DeadlineExceededError(
                f"the gradients of {len(gone)} {of} did not come within {self.seconds:g} s of the first one: call backward() for "
                "every result in that time or make the batcher with a longer gradient_deadline, make results that need no gradient "
                'under no_grad, or set on_missing_gradient="zero"; where one loss covers many calls, wait_backward=False and '
                "join() spare callers the wait for each other in every batch"
            )
        dropped = [ticket for ticket in gone if ticket.failure is None]
        if dropped:
            return FailedPreconditionError(
                f"the results of {len(dropped)} {of} were dropped without a backward that reached them: call backward() for "
                'every result, make results that need none under no_grad, or set on_missing_gradient="zero"'
            )
        first = gone[0].failure
        assert first is not None
        own = [each for each in first.error_class.__mro__ if each.__module__ == OpError.__module__]
        error: Exception = (own[0] if own else FailedPreconditionError)(
            f"the gradients of {len(gone)} {of} did not come: their callers' own backward() raised before it reached them. "
            f"The first error was {first.error_class.__name__}: {first.text}"
        )
        vars(error)["first_failure"] = first
        return error


class OutstandingBackwards:
    """A batcher's backwards that wait for gradients, and the errors of backwards whose callers did not wait."""

    def __init__(self) -> None:
        # Changed in single steps, without a lock: `add` and `remove` come from any thread in any state.
        self.backwards: set[SharedBackward] = set()
        self._failed: deque[BaseException] = deque(maxlen=KEPT_ERRORS)
        # The last `finished` of each stream, of backwards whose callers did not wait.
        self._finished: dict[Any, Any] = {}
        self._refusal: Exception | None = None  # once closed: the error for gradients that come later

    def add(self, backward: SharedBackward) -> None:
        """Note that a backward has received a gradient."""
        if self._refusal is not None:
            raise own_copy(self._refusal)
        self.backwards.add(backward)

    def remove(self, backward: SharedBackward) -> None:
        """Note that a backward has ended; this may come twice."""
        if backward in self.backwards:
            self.backwards.discard(backward)
            if (backward.error, backward.finished) != (None, None) and any(t.is_deferred for t in backward.tickets):
                if backward.error is not None:
                    self._failed.append(backward.error)
                if backward.finished is not None:
                    self._finished[backward.finished.stream] = backward.finished

    def close(self, error: Exception) -> None:
        """End all backwards that wait with `error`, and refuse gradients from now on. Backwards that run continue."""
        self._refusal = error
        for backward in list(self.backwards):
            backward.run(error)

    def end_overdue(self) -> None:
        """End backwards whose gradients are overdue. Complete ones have a thread that runs them."""
        for backward in list(self.backwards):
            if backward.missing:
                backward.check()

    def watches(self) -> list[BackwardWatch]:
        """Return a ticket for the end of each backward."""
        return [backward.watch() for backward in list(self.backwards)]

    def raise_failed(self) -> None:
        """Raise the first error that no caller got, and forget all of them; the caller's stream waits for the gradients."""
        for finished in list(self._finished.values()):
            finished.wait()
        failed = list(self._failed)
        self._failed.clear()
        if failed:
            error = own_copy(failed[0])
            if len(failed) > 1:
                error.add_note(f"{len(failed) - 1} more backwards failed")
            raise error
