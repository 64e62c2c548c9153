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
from typing import Any, Protocol

from ..core.clock import Clock
from ..core.lock import departed, has_lock, lock, remove_departed
from ..core.ticket import Ticket, wake_all
from ..errors import DeadlineExceededError, FailedPreconditionError, OpError, own_copy
from . import workers

#: Joints and failed backwards are numbered together, so that their numbers say which came first.
_numbers = count()


class Failure:
    """A backward that raised. It holds the error's class and text alone: the error itself would keep the graph alive."""

    __slots__ = ("kind", "number", "text")

    def __init__(self, error: BaseException) -> None:
        self.number = next(_numbers)
        # An error that tells of another caller's failure is told on as what failed first.
        first: Failure | None = getattr(error, "first_failure", None)
        self.kind: type[BaseException] = type(error) if first is None else first.kind
        self.text: str = str(error) if first is None else first.text


class CallerThread:
    """Stands for a thread that makes calls: numbers of threads are used again."""

    __slots__ = ("failure",)

    def __init__(self) -> None:
        self.failure: Failure | None = None  # of the last backward that raised there


#: The threads that have made calls with gradients.
callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class _Here(threading.local):
    def __init__(self) -> None:
        self.thread = CallerThread()
        callers.add(threading.current_thread())


_here = _Here()


def this_thread() -> CallerThread:
    """What stands for the thread that asks."""
    return _here.thread


class BackwardRegistry(Protocol):
    """Whoever keeps account of the joints that wait for gradients: a joint is held from its first deposit to its end."""

    def hold(self, joint: SharedBackward) -> None:
        """A joint has a gradient that must not be lost."""

    def let_go(self, joint: SharedBackward) -> None:
        """A joint needs nothing any more."""


class GradientTicket(Ticket):
    """A caller's part in a joint: `value` becomes its own rows of the gradient of the inputs."""

    deposited = is_dropped = False
    is_missed = True  # whether its gradient is waited for
    failure: Failure | None = None  # for a share that is dropped: the backward of its caller that had raised before
    is_excused = False  # whether nobody ever had the rows it stands for: their gradient is nothing, and not missing
    gradient: Any = None
    is_sent_off = (
        False  # whether its caller does not wait, so that `inputs` are given their gradient by the backward itself
    )
    inputs: Sequence[Any] = ()
    places: Sequence[int] = ()  # of what it has a gradient for, in the result

    def __init__(self, joint: SharedBackward, origin: CallerThread) -> None:
        super().__init__(joint.clock)
        self.joint = joint
        self.origin = origin  # the thread that made the call
        self.alarm = joint.deadline

    def on_alarm(self) -> None:
        # A backward that has begun is waited for, however long it takes.
        self.alarm = inf if self.joint.is_running else self.joint.deadline
        self.joint.look()

    def deposit(self, gradient: Any, elsewhere: bool = False) -> None:
        """Hand in the gradient of this caller's outputs; the last caller runs the backward of the batch before it returns.

        With `elsewhere` it runs in a thread of nobody's.
        """
        self.jobs = []
        joint = self.joint
        is_complete = joint.add(self, gradient)
        if not (is_complete or joint.dropped):
            return
        if elsewhere:
            with lock:
                woken = workers.run_elsewhere(_Look(joint))
            for each in woken or ():
                each.wake()
            if departed:
                remove_departed()
            if woken is not None:
                return
        joint.look()

    def note_failure(self, error: BaseException) -> None:
        """Remember that the backward that came to this share raised: what else it would have come to is not just dropped."""
        this_thread().failure = self.origin.failure = Failure(error)

    def drop(self) -> None:
        """Say that no gradient will come. No lock is taken: this may run wherever an object is deleted."""
        joint = self.joint
        if self.deposited or self.is_dropped or joint.done:
            return
        self.is_dropped = True
        for thread in (self.origin, this_thread()):  # that made the call, and that held the result last
            failure = getattr(thread, "failure", None)
            if failure is not None and failure.number > joint.number:
                self.failure = failure
        joint.dropped.append(self)
        if len(joint.dropped) == len(joint.shares):  # nobody is left: the batch's graph goes
            joint.give_up()
        for waiting in (*joint.shares, *joint.watches):
            if waiting.jobs is not None:  # it waits, or is about to, and looks after it
                waiting.jobs.append(_Look(joint))
                waiting.wake()


class ResultHandle:
    """Lives as long as a caller can hand in the gradient of its rows: if that goes without one, the share is dropped."""

    is_delivered = False  # whether the caller has ever had the rows

    def __init__(self, share: GradientTicket) -> None:
        self.share = share

    def __del__(self) -> None:
        self.share.is_excused = not self.is_delivered
        self.share.drop()


class DeadlineWatch(Ticket):
    """Someone who waits for the end of a joint without a share in it."""

    def __init__(self, joint: SharedBackward) -> None:
        super().__init__(joint.clock)
        self.joint = joint
        self.alarm = joint.deadline
        self.jobs = []

    def on_alarm(self) -> None:
        joint = self.joint
        self.alarm = inf if joint.is_running else joint.deadline
        joint.look()
        if joint.done:
            joint._end_watch(self)


class _Look:
    """The job of seeing whether a joint can end."""

    def __init__(self, joint: SharedBackward) -> None:
        self._joint = joint

    def is_short(self) -> bool:
        return False

    def run(self) -> None:
        self._joint.look()

    def abort(self, problem: BaseException) -> None:
        """Others look, too."""


def _without_frames(error: Exception) -> Exception:
    """A copy of `error` that tells its traceback in a note.

    Behind the frames of a traceback stand those of their callers: that of the `backward()` which took the batch back knows the
    loss, the loss its graph, the graph this joint, and no collector sees through the graph.
    """
    twin = own_copy(error)
    twin.__cause__ = None
    twin.add_note("Raised by the batch's backward:\n" + "".join(traceback.format_exception(error)).rstrip())
    return twin


class SharedBackward:
    """The gradients of a batch's callers. `settle(gradients)` gives each caller's own part, given None for a missing one.

    An exception of a signal handler may break off any step. Whoever looks next goes on with it: the outcome is set in one
    assignment, and telling it to the callers can be repeated.
    """

    error: BaseException | None = None

    def __init__(
        self,
        origins: Sequence[CallerThread],  # of each caller, what stands for the thread that made the call
        settle: Callable[[Sequence[Any]], Sequence[Any]],
        clock: Clock,
        seconds: float,
        zero_for_missing: bool,
        keeper: BackwardRegistry,
    ) -> None:
        self.number = next(_numbers)
        self.clock = clock
        self.seconds = seconds
        self.deadline = clock.now() + seconds
        self.dropped: deque[GradientTicket] = deque()
        self.watches: list[DeadlineWatch] = []
        self.shares = [GradientTicket(self, origin) for origin in origins]
        self._missing = dict.fromkeys(self.shares)  # in order
        self._missing_of = Counter(origins)
        # Of those that are missing and have had their rows, a weak reference to what a framework put behind them.
        self.nodes: dict[GradientTicket, weakref.ref[Any]] = {}
        self.done = False
        self._settle: Callable[[Sequence[Any]], Sequence[Any]] | None = settle
        self._zero = zero_for_missing
        self._keeper = keeper
        self._is_broken = False  # whether an exception has broken off a change of who is missing
        self._runner: object = None  # stands for the `run` that ends this joint
        self._outcome: tuple[Sequence[Any], BaseException | None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the end has begun: nothing can be missing any more."""
        return self._runner is not None

    @property
    def missing(self) -> list[GradientTicket]:
        """Those whose gradient has not come."""
        return list(self._missing)

    def _go_without(self, share: GradientTicket) -> None:
        share.is_missed = False
        if share in self._missing:
            del self._missing[share]
            self._missing_of[share.origin] -= 1
        self.nodes.pop(share, None)

    def _mend(self) -> None:
        """Complete what an exception has broken off."""
        if self._is_broken:
            self._missing = {share: None for share in self.shares if share.is_missed}
            self._missing_of = Counter(share.origin for share in self._missing)
            self._is_broken = False

    def misses_other_of(self, thread: CallerThread, share: GradientTicket) -> bool:
        """Whether a gradient beside that of `share` is missing whose call this thread has made."""
        own = share.origin is thread and not share.deposited
        return self._missing_of[thread] > own

    def watch(self) -> DeadlineWatch:
        """Something to wait on for the end: its error is the joint's."""
        watch = DeadlineWatch(self)
        with lock:
            if not self.done:
                self.watches = [*self.watches, watch]
        if self.done:
            self._end_watch(watch)
        elif self.dropped or not self._missing:
            self.look()
        return watch

    def add(self, share: GradientTicket, gradient: Any) -> bool:
        """Take a gradient; whether nothing is missing now, so that the caller must `look`."""
        if has_lock():
            raise FailedPreconditionError(
                "a backward waits for other callers, and a finalizer or a signal handler that interrupts weft's own bookkeeping "
                "cannot: call it elsewhere"
            )
        with lock:
            self._mend()
            if share.deposited:
                raise FailedPreconditionError(
                    "this call's gradient was handed in already: a batch goes back once, without retain_graph"
                )
            if self.error is not None:
                raise self._own_error()
            if self.done or not share.is_missed:
                raise FailedPreconditionError("this call's batch has gone back without it")
            self._keeper.hold(self)
            self._is_broken = True
            share.gradient = gradient
            share.deposited = True
            self._go_without(share)
            self._is_broken = False
            return not self._missing

    def look(self) -> None:
        """Go back without those that are missing, or give up, if it is time; go on with what was broken off."""
        if has_lock():
            return  # a finalizer: others look, too
        if self._outcome is not None:
            self._tell()
            return
        with lock:
            self._mend()
            if self.is_running or self.done:
                return
            error = self._without_missing()
            if error is None and self._missing:
                return
        self.run(error)

    def _without_missing(self) -> Exception | None:
        """Let go of those whose gradient will not come, if it is time; why that cannot be, where it cannot."""
        is_late = self.clock.now() >= self.deadline
        if not self._missing or not (is_late or self.dropped):
            return None
        self._is_broken = True
        for share in self.dropped:
            if share.is_excused:
                share.deposited = True
                self._go_without(share)
        gone = self.missing if is_late else [share for share in self.dropped if not share.deposited]
        if self._zero:
            for share in gone:
                self._go_without(share)
        self._is_broken = False
        return self._why(gone, is_late) if gone and not self._zero else None

    def give_up(self) -> None:
        """Let go of the batch: no gradient will ever come."""
        self._settle, self.done = None, True

    def run(self, error: BaseException | None = None) -> None:
        """Take the batch back, or with `error` end without, unless that has begun.

        What goes wrong is told to every caller, and raised by those that wait.
        """
        mine = object()
        try:
            with lock:
                if self._runner is None and not self.done:
                    self._runner = mine
            if self._runner is mine:
                self._outcome = self._settled() if error is None else ((), error)
                self._tell()
        except BaseException as end:
            if self._runner is mine:
                if self._outcome is None:
                    why = f"the batch's backward was ended by {type(end).__name__}"
                    self._outcome = (), FailedPreconditionError(why)
                self._tell()
            raise

    def _settled(self) -> tuple[Sequence[Any], BaseException | None]:
        assert self._settle is not None
        try:
            return self._settle([share.gradient for share in self.shares]), None
        except Exception as error:
            return (), _without_frames(error)

    def _tell(self) -> None:
        """Tell everybody the outcome; a second time changes nothing."""
        assert self._outcome is not None
        parts, error = self._outcome
        self._settle = None  # and with it the batch's graph
        self.error = error
        for i, share in enumerate(self.shares):
            if not share.done:
                share.gradient = None
                if error is not None:
                    share.reject(self._own_error())
                else:
                    share.resolve(parts[i] if parts else None)
        with lock:
            self.done = True  # from here on nobody comes to watch
        self._outcome = (), error
        self._keeper.let_go(self)
        wake_all([share for share in self.shares if share.waiter is not None])
        for watch in self.watches:
            self._end_watch(watch)
        self.watches = []
        if departed:
            remove_departed()

    def _end_watch(self, watch: DeadlineWatch) -> None:
        if self.error is not None:
            watch.reject(self._own_error())
        else:
            watch.resolve(None)
        watch.wake()

    def _own_error(self) -> BaseException:
        return own_copy(self.error) if isinstance(self.error, Exception) else FailedPreconditionError(str(self.error))

    def _why(self, gone: Sequence[GradientTicket], is_late: bool) -> Exception:
        of = f"of the {len(self.shares)} calls of the batch"
        if is_late:
            return DeadlineExceededError(
                f"the gradients of {len(gone)} {of} did not come within {self.seconds:g} s: call backward() for every result in "
                "that time or make the batcher with a longer gradient_deadline, make results that need no gradient under "
                'no_grad, or set on_missing_gradient="zero"; where one loss covers many calls, wait_backward=False and join() '
                "spare callers the wait for each other in every batch"
            )
        dropped = [share for share in gone if share.failure is None]
        if dropped:
            return FailedPreconditionError(
                f"the results of {len(dropped)} {of} were dropped without a backward that reached them: call backward() for "
                'every result, make results that need none under no_grad, or set on_missing_gradient="zero"'
            )
        first = gone[0].failure
        assert first is not None
        kinds = [kind for kind in first.kind.__mro__ if kind.__module__ == OpError.__module__]
        error: Exception = (kinds[0] if kinds else FailedPreconditionError)(
            f"the gradients of {len(gone)} {of} did not come: their callers' own backward() raised before it reached them. "
            f"What was raised first: {first.kind.__name__}: {first.text}"
        )
        vars(error)["first_failure"] = first
        return error
