"""The joint backward of a batch: its callers' gradients come together, and one of the callers takes the batch back with them.

A `Joint` belongs to a batch and holds a `Share` for each of its callers. A share is deposited once, or dropped; whoever
deposits the last one runs `settle`, once, with no lock held. Nothing here knows a framework.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol

from .._lock import has_lock, left, lock, work_off
from ..errors import DeadlineExceededError, FailedPreconditionError, own_copy
from . import house as houses
from .clock import Clock
from .ticket import Ticket, wake_all


class _Here(threading.local):
    def __init__(self) -> None:
        self.thread = object()


_here = _Here()


def this_thread() -> object:
    """Something that stands for the thread that asks: numbers of threads are used again."""
    return _here.thread


class Keeper(Protocol):
    """Whoever keeps account of the joints that wait for gradients: a joint is held from its first deposit to its end."""

    def hold(self, joint: Joint) -> None:
        """A joint has a gradient that must not be lost."""

    def let_go(self, joint: Joint) -> None:
        """A joint needs nothing any more."""


class Share(Ticket):
    """A caller's part in a joint: `value` becomes its own rows of the gradient of the inputs."""

    deposited = False
    is_missed = True  # whether its gradient is waited for
    is_excused = False  # whether nobody ever had the rows it stands for: their gradient is nothing, and not missing
    gradient: Any = None
    is_sent_off = (
        False  # whether its caller does not wait, so that `inputs` are given their gradient by the backward itself
    )
    inputs: Sequence[Any] = ()
    places: Sequence[int] = ()  # of what it has a gradient for, in the result

    def __init__(self, joint: Joint, origin: object) -> None:
        self._begin(joint.clock)
        self.joint = joint
        self.origin = origin  # the thread that made the call
        self.alarm = joint.deadline

    def ring(self) -> None:
        # A backward that has begun is waited for, however long it takes.
        self.alarm = inf if self.joint.is_running else self.joint.deadline
        self.joint.look()

    def deposit(self, gradient: Any, elsewhere: bool = False) -> None:
        """Hand in the gradient of this caller's outputs; the last caller runs the backward of the batch before it returns.

        With `elsewhere` it runs in a thread of nobody's.
        """
        self.jobs = deque()
        joint = self.joint
        is_complete = joint.add(self, gradient)
        if not (is_complete or joint.dropped):
            return
        if elsewhere:
            with lock:
                woken = houses.run_elsewhere(_Look(joint))
            for each in woken or ():
                each.wake()
            if left:
                work_off()
            if woken is not None:
                return
        joint.look()

    def drop(self) -> None:
        """Say that no gradient will come. No lock is taken: this may run wherever an object is deleted."""
        joint = self.joint
        if self.deposited or joint.done:
            return
        joint.dropped.append(self)
        if len(joint.dropped) == len(joint.shares):  # nobody is left: the batch's graph goes
            joint.give_up()
        for waiting in (*joint.shares, *joint.watches):
            if waiting.jobs is not None:  # it waits, or is about to, and looks after it
                waiting.jobs.append(_Look(joint))
                waiting.wake()


class Held:
    """Lives as long as a caller can hand in the gradient of its rows: if that goes without one, the share is dropped."""

    is_delivered = False  # whether the caller has ever had the rows

    def __init__(self, share: Share) -> None:
        self.share = share

    def __del__(self) -> None:
        self.share.is_excused = not self.is_delivered
        self.share.drop()


class Watch(Ticket):
    """Someone who waits for the end of a joint without a share in it."""

    def __init__(self, joint: Joint) -> None:
        self._begin(joint.clock)
        self.joint = joint
        self.alarm = joint.deadline
        self.jobs = deque()

    def ring(self) -> None:
        self.alarm = inf if self.joint.is_running else self.joint.deadline
        self.joint.look()


class _Look:
    """The job of seeing whether a joint can end."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint

    def is_short(self) -> bool:
        return False

    def run(self) -> None:
        self._joint.look()

    def lose(self, problem: BaseException) -> None:
        """Others look, too."""


class Joint:
    """The gradients of a batch's callers. `settle(gradients)` gives each caller's own part, given None for a missing one."""

    error: BaseException | None = None

    def __init__(
        self,
        origins: Sequence[object],  # of each caller, what stands for the thread that made the call
        settle: Callable[[Sequence[Any]], Sequence[Any]],
        clock: Clock,
        seconds: float,
        zero_for_missing: bool,
        keeper: Keeper,
    ) -> None:
        self.clock = clock
        self.seconds = seconds
        self.deadline = clock.now() + seconds
        self.dropped: deque[Share] = deque()
        self.watches: list[Watch] = []
        self.shares = [Share(self, origin) for origin in origins]
        self._missing = dict.fromkeys(self.shares)  # in order
        self._missing_of = Counter(origins)
        # Of those that are missing and have had their rows, a weak reference to what a framework put behind them.
        self.nodes: dict[Share, weakref.ref[Any]] = {}
        self.done = False
        self._settle: Callable[[Sequence[Any]], Sequence[Any]] | None = settle
        self._zero = zero_for_missing
        self._keeper = keeper
        self._is_broken = False  # whether an exception has broken off a change of who is missing
        # Who takes the batch back, and what came of it: each set once, in one step.
        self._runner: object = None
        self._outcome: tuple[Sequence[Any], BaseException | None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the batch is being taken back, or has been."""
        return self._runner is not None

    @property
    def missing(self) -> list[Share]:
        """Those whose gradient has not come."""
        return list(self._missing)

    def _go_without(self, share: Share) -> None:
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

    def misses_other_of(self, thread: object, share: Share) -> bool:
        """Whether a gradient beside that of `share` is missing whose call this thread has made."""
        own = share.origin is thread and not share.deposited
        return self._missing_of[thread] > own

    def watch(self) -> Watch:
        """Something to wait on for the end: its error is the joint's."""
        watch = Watch(self)
        with lock:
            if not self.done:
                self.watches = [*self.watches, watch]
        if self.done:
            self._end_watch(watch)
        elif self.dropped:
            self.look()
        return watch

    def add(self, share: Share, gradient: Any) -> bool:
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
            self._is_broken = True
            share.gradient = gradient
            share.deposited = True
            self._go_without(share)
            self._keeper.hold(self)
            self._is_broken = False
            return not self._missing

    def look(self) -> None:
        """See whether the batch can go back, with all gradients or without those that are missing, or must be given up."""
        if has_lock():
            return  # a finalizer: others look, too
        error: Exception | None = None
        with lock:
            self._mend()
            if self._runner is None and not self.done:
                error = self._without_missing()
                is_ready = error is not None or not self._missing
            else:
                is_ready = self._outcome is not None and not self.done
        if is_ready:
            self._run(error)

    def _without_missing(self) -> Exception | None:
        """Let go of those whose gradient will not come, if the time has come; why that cannot be, where it cannot."""
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

    def _run(self, error: BaseException | None) -> None:
        """Take the batch back, or end it with an error; what goes wrong is told to every caller, and raised by those that wait.

        One thread does it. An exception that interrupts it is the outcome, so that nobody waits for a thread that has gone.
        """
        me = object()
        try:
            with lock:
                if self._runner is None:
                    self._runner = me
            if self._runner is me:
                settle = self._settle
                assert settle is not None
                parts: Sequence[Any] = () if error is not None else settle([share.gradient for share in self.shares])
                self._outcome = (parts, error)
        except Exception as problem:
            if self._runner is not me:
                raise
            self._outcome = ((), problem)
        except BaseException as problem:
            if self._runner is me:
                self._outcome = (
                    (),
                    FailedPreconditionError(f"the batch's backward was ended by {type(problem).__name__}"),
                )
            raise
        finally:
            if self._outcome is not None:
                self._end(*self._outcome)

    def _end(self, parts: Sequence[Any], error: BaseException | None) -> None:
        """Tell everyone. It may be done twice: whoever finds it broken off does it again."""
        self._settle = None  # and with it the batch's graph
        self.error = error
        for i, share in enumerate(self.shares):
            if not share.done:
                share.gradient = None
                if error is not None:
                    share.reject(self._own_error())
                else:
                    share.resolve(parts[i] if parts else None)
        wake_all([share for share in self.shares if share.waiter is not None])
        with lock:
            watches = self.watches
            self.done = True
            self._outcome = ((), error)
        self._keeper.let_go(self)
        for watch in watches:
            self._end_watch(watch)
        if left:
            work_off()

    def _end_watch(self, watch: Watch) -> None:
        if self.error is not None:
            watch.reject(self._own_error())
        else:
            watch.resolve(None)
        watch.wake()

    def _own_error(self) -> BaseException:
        return own_copy(self.error) if isinstance(self.error, Exception) else FailedPreconditionError(str(self.error))

    def _why(self, gone: Sequence[Share], is_late: bool) -> Exception:
        count = f"{len(gone)} of the {len(self.shares)} calls of the batch"
        advice = 'call backward() for every result, make results that need none under no_grad, or set on_missing_gradient="zero"'
        if is_late:
            return DeadlineExceededError(f"the gradients of {count} did not come within {self.seconds:g} s: {advice}")
        return FailedPreconditionError(f"the results of {count} were dropped without a backward: {advice}")
