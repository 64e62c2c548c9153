"""How a batch is processed: the function runs once, its callers are answered and woken, and observers are told."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf
from typing import Any, NamedTuple

from ..core.clock import Clock
from ..core.interrupts import is_from_signal
from ..core.lock import has_lock
from ..core.ticket import Ticket, check_exit, exiting, has_threads, wake_all
from ..core.wakeup import Wakeup
from ..errors import CancelledError, FailedPreconditionError, own_copy
from .call import QueuedCall
from .queue import Batch, Limits
from .scheduler import Scheduler

#: How long a worker waits, in seconds for each caller it has answered, until they have gone on.
SECONDS_PER_ANSWERED_CALLER = 50e-6


class BatchRan(NamedTuple):
    """What an observer is told of a batch that was processed. Times are in seconds.

    - `op` and `name`: "batched" and the name of the batcher, or the op and the name of its resource
    - `rows`: those of each call or slice, in order; `padding`: the further rows of padding
    - `waits`: the time of each call or slice from the call to the start of the run; `seconds`: that of the run
    - `reason`: why the batch was closed, see `weft.Receipt`
    - `error`: what the run raised, or None
    - `batcher`: the `weft.Batcher`; None for an op
    """

    op: str
    name: str
    rows: tuple[int, ...]
    padding: int
    waits: tuple[float, ...]
    reason: str
    seconds: float
    error: Exception | None
    batcher: Any = None


class Processor:
    """Runs `process(batch)`, which returns the answer of each task of a batch."""

    def __init__(
        self, process: Callable[[Batch], list[Any]], scope: Any, op: str, name: str, batcher: Callable[[], Any] | None = None
    ) -> None:  # fmt: skip
        self.process = process
        self.batcher = batcher  # a weak reference
        self.scope = scope
        self.op, self.name = op, name

    def run(self, batch: Batch) -> list[Ticket]:
        """Process a batch and answer its callers; return the calls that are done by it. An error is also left in the batch."""
        if batch.has_departed:
            batch.keep([task for task in batch.tasks if not task.owner.is_answered(task)])
        try:
            if exiting:
                check_exit()
            answers = self.process(batch) if batch.tasks else []
        except Exception as problem:
            if is_from_signal(problem):
                raise  # it ends this thread's call; the others are served without its rows
            batch.error = problem
            answers = [own_copy(problem) for _ in batch.tasks]
        done = answer_all(batch, answers)
        del answers  # errors among them refer to this frame by their traceback
        return done

    def run_alone(self, limits: Limits, key: Hashable, call: QueuedCall, now: float) -> None:
        """Run a call by itself, in this thread, as an empty queue with these limits would."""
        if has_lock() and call.rows < limits.enough < inf:
            raise FailedPreconditionError(
                f"{self.name} waits for {limits.enough:g} rows, and a finalizer or a signal handler that interrupts weft's "
                f"own bookkeeping cannot wait: got {call.rows}; call it elsewhere"
            )
        own = Scheduler(limits)
        own.put(key, call, now)
        while (batch := own.take(inf)) is not None:
            own.release(batch, now)
            self.run(batch)
            if batch.rest is not None:
                batch.rest.pull()
            batch.error = None

    def notify(self, observers: tuple[Any, ...], batch: Batch, started: float) -> None:
        """Tell observers of a batch that was processed."""
        event = BatchRan(
            op=self.op,
            name=self.name,
            rows=tuple(task.rows for task in batch.tasks),
            padding=batch.padded - batch.rows if batch.padding is None else batch.padding,
            waits=tuple(started - task.owner.arrived for task in batch.tasks),
            reason=batch.reason,
            seconds=self.scope.clock.now() - started,
            error=batch.error,
            batcher=None if self.batcher is None else self.batcher(),
        )
        self.scope.tell("batch_ran", event, observers=observers)


def answer_all(batch: Batch, answers: list[Any]) -> list[Ticket]:
    """Give each task of a batch its answer; return the calls that are done by it."""
    done: list[Ticket] = []
    for i, task in enumerate(batch.tasks):
        owner: QueuedCall = task if isinstance(task, QueuedCall) else task.owner
        if owner.answer(task, answers[i]):
            done.append(owner)
    return done


def thread_ended(problem: BaseException | None) -> CancelledError:
    """Return the error for a caller of a batch whose thread `problem` has ended."""
    error = CancelledError(f"the function of this batch ended its thread with {type(problem).__name__}")
    error.__cause__ = problem
    return error


def wake_and_wait(done: list[Ticket], clock: Clock) -> None:
    """Wake the callers that a worker has answered, and wait until their threads have gone on, before the next batch.

    A caller that calls again at once is then in the next batch. Otherwise that batch begins with the few fastest callers, and the
    worker competes for the interpreter lock with all the others.
    """
    if not has_threads(done):
        wake_all(done)
        return
    gate = Wakeup()
    wake_all(done, gate)
    clock.acquire(gate, clock.now() + SECONDS_PER_ANSWERED_CALLER * len(done))
