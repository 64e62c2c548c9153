"""Where callers hand in their tasks, and which of them runs which batch.

A batch is run by one of its own callers, the one that fills it, the one that meets its due time, or whoever comes first when
another batch has ended; no thread is started for it, unless the dispatcher has a pool. The lock guards the rules only; it is not
held while a batch is processed.

What must not be lost are the calls that wait and the batches that run: `_calls` and `_runs`, changed in single steps. The queues
of the scheduler follow from them. If an exception breaks off a change, `_mend` forms the queues anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf
from typing import Any, NamedTuple

from ..core.clock import Clock
from ..core.lock import has_lock, left, lock, work_off
from ..core.named import Named
from ..core.ticket import Ticket, check_exit, exiting, has_threads, held_here, wake_all
from ..core.wakeup import Wakeup
from ..errors import CancelledError, DeadlineExceededError, FailedPreconditionError, OpError, own_copy
from . import workers
from .interrupts import is_from_signal
from .queue import IDLE_QUEUE_SECONDS, Batch, Limits, Queue, Scheduler, Task
from .workers import WorkerPool

#: After so many batches of one call in a row, a lone caller runs its batch itself.
LONELY = 8
#: How much later than the caller whose part it is the others look after an overdue batch, in seconds.
BACKSTOP = 0.1
#: How long a pool waits, in seconds for each caller it has answered, until they have gone.
SEEING_OFF = 50e-6


class BatchRan(NamedTuple):
    """What an observer is told of a batch that was processed. Times are in seconds."""

    op: str
    name: str
    rows: tuple[int, ...]  # of each call or slice, in order
    padding: int
    waits: tuple[float, ...]  # of each, from its call to the start of the run
    reason: str  # full, overflow or timeout
    seconds: float
    error: Exception | None


class QueuedCall(Ticket):
    """A caller and what becomes of it. It is its own task, or is cut into slices and answered when all of them are."""

    def __init__(self, dispatcher: Dispatcher, rows: int, payload: Any) -> None:
        self._init_call(dispatcher, rows, payload)

    def _init_call(self, dispatcher: Dispatcher, rows: int, payload: Any) -> None:
        self._init_ticket(dispatcher.clock, None)
        self.dispatcher = dispatcher
        self.rows = rows
        self.payload = payload
        self.arrived = 0.0
        self.batch: Batch | None = None
        self.queue: Queue | None = None
        self.start = 0
        self.low = False
        self.gone = False
        self.is_task = False  # whether the caller is a task of an event loop, known at once
        self.deadline = inf  # when the caller waits no longer
        self.slices: list[Task] | None = None
        self.answers: dict[int, Any] | None = None  # a slice's answer by its first row

    @property
    def owner(self) -> QueuedCall:
        """Whose rows these are."""
        return self

    def piece(self, start: int, rows: int) -> Task:
        """A slice of this call as a task of its own, in place of the task that began there."""
        piece = Task(self, start, rows)
        if self.answers is None:
            self.answers = {}
        # In one step: another slice may be answered meanwhile, and must not find itself the last.
        self.slices = [*(task for task in self.slices or () if task.start != start), piece]
        return piece

    def tasks(self) -> list[Any]:
        """The tasks that this call's rows make: itself, or its slices; rows that no slice has become one."""
        if self.slices is None:
            return [self]
        start = 0
        for task in sorted(self.slices, key=_start):
            if task.start > start:
                self.piece(start, task.start - start)
            start = task.start + task.rows
        if start < self.rows:
            self.piece(start, self.rows - start)
        return sorted(self.slices, key=_start)

    def is_answered(self, task: Any) -> bool:
        """Whether nothing is to be done any more for one of this call's tasks."""
        return self.done or self.gone or (self.answers is not None and task.start in self.answers)

    def answer(self, task: Any, value: Any) -> bool:
        """Take the answer for one of this call's tasks, a value or an exception; whether the call is done by it."""
        if self.slices is not None:
            answers = self.answers
            assert answers is not None
            answers[task.start] = value
            if len(answers) < len(self.slices):
                return False
            value = _whole(answers)
        return self.reject(value) if isinstance(value, BaseException) else self.resolve(value)

    def on_alarm(self) -> None:
        if self.clock.now() < self.deadline:
            self.dispatcher.look(self)
        else:
            self.abandon()
            self.reject(self.late())

    def late(self) -> DeadlineExceededError:
        """What a caller is told whose deadline is past."""
        return DeadlineExceededError(
            f"the call was not answered within its deadline of {self.deadline - self.arrived:g} s"
        )

    def needs_timer(self, loop: Any) -> bool:
        if self.deadline < inf:
            return True
        # Whose part it is to watch needs one; the others only if that caller's loop may stop without theirs.
        batch = self.batch
        if batch is None or self.slices is not None or not batch.tasks or batch.tasks[0] is self:
            return True
        other = batch.tasks[0].owner.waiter
        return other is None or (other.loop is not None and other.loop is not loop)

    def forget(self) -> list[Any]:
        return self.dispatcher.forget(self)


def _start(task: Any) -> int:
    return task.start


def _whole(answers: dict[int, Any]) -> Any:
    """The answers of slices in order, or the first of them that is an exception."""
    values = [answers[start] for start in sorted(answers)]
    return next((value for value in values if isinstance(value, BaseException)), values)


class Run:
    """The processing of one batch, as a job for one of its callers or for a thread of nobody's."""

    __slots__ = ("batch", "dispatcher", "done", "is_begun", "is_given", "problem", "runner")

    def __init__(self, dispatcher: Dispatcher, batch: Batch) -> None:
        self.dispatcher = dispatcher
        self.batch = batch
        self.is_given = False  # whether somebody has it to do
        self.is_begun = False  # whether a thread is at it
        self.runner: QueuedCall | None = None  # the caller that it was given to
        self.done: list[Ticket] | None = None  # once the scheduler knows that it has ended: who is to be woken
        self.problem: BaseException | None = None  # what ended the thread that ran it

    def is_short(self) -> bool:
        """Whether it may run inside an event loop."""
        return self.dispatcher.is_short(self.batch)

    def run(self) -> None:
        """Process the batch."""
        self.dispatcher.run(self)

    def lose(self, problem: BaseException) -> None:
        """Say that the thread of nobody's that ran it was ended by `problem`: the callers are told."""
        self.problem = problem
        left.append(self)
        work_off()

    def forget(self) -> list[Any]:
        """See `weft.core.lock`."""
        return self.dispatcher.lose(self)


class _Look:
    """The job of seeing whether a batch may run now."""

    def __init__(self, dispatcher: Dispatcher, call: QueuedCall) -> None:
        self._dispatcher, self._call = dispatcher, call

    def is_short(self) -> bool:
        return True

    def run(self) -> None:
        self._dispatcher.look(self._call)

    def lose(self, problem: BaseException) -> None:
        """Others look, too."""


class Dispatcher(Named):
    """A named queue of calls. `process(batch)` gives the answer of each of its tasks; it runs in a caller's thread."""

    def __init__(
        self,
        limits: Limits,
        scope: Any,
        process: Callable[[Batch], list[Any]],
        is_short: Callable[[Batch], bool],
        op: str = "",
        name: str = "",
        rules: Callable[[Limits], Any] = Scheduler,
        has_workers: bool = False,
    ) -> None:
        self.limits = limits
        self.scope = scope
        self.clock: Clock = scope.clock
        self.process = process
        self.is_short = is_short
        self.op, self.name = op, name
        self.target = limits.max_batch_size
        self.rules = rules
        self._has_workers = has_workers
        self._why_closed: Exception | None = None
        super().__init__()
        self._reset()

    def _reset(self) -> None:
        """Begin with nobody."""
        self._workers = WorkerPool(self.limits.threads, self.clock, self.name) if self._has_workers else None
        # How many batches of one call there were in a row. After few, a caller that finds nobody is not alone: the others are
        # on their way back from the last batch.
        self._alone = LONELY
        self.scheduler = self.rules(self.limits)
        self._calls: dict[QueuedCall, Hashable] = {}  # who waits, in order of arrival, and in which queue
        self._runs: dict[Run, None] = {}  # the batches that were taken and have not ended
        self._is_broken = False  # whether an exception has broken off a change of the queues
        self._idle: list[Ticket] = []  # who waits until nothing waits and nothing runs

    @property
    def is_recursive(self) -> bool:
        """Whether this thread is already inside a call of this dispatcher.

        It is when a function that runs a batch calls again, or when a finalizer or signal handler interrupts a waiting call or the
        lock's holder.
        """
        return has_lock() or self._is_held(held_here())

    def _is_held(self, ticket: Ticket | None) -> bool:
        pool = self._workers
        while ticket is not None:
            if ticket.dispatcher is self or (pool is not None and ticket.dispatcher is pool):
                return True
            ticket = ticket.outer
        return False

    @property
    def is_quiet(self) -> bool:
        """Whether nobody waits and nobody watches: a call that needs no other may then be answered outside the queue."""
        return not (self.scheduler.waiting or self.scope.observers)

    # --- what callers do ---

    def enter(self, key: Hashable, call: QueuedCall, now: float) -> None:
        """Put a call in its queue; if it fills a batch that is soon processed, process it, else it may have a run to do.

        A recursive call runs by itself, at once: in the queue it could wait for its own thread.
        """
        call.arrived = now
        if not call.holder:
            call.take_up()
        if exiting:
            check_exit()
        if has_lock() or exiting or (call.outer is not None and self._is_held(call.outer)):
            self._run_alone(key, call, now)
            return
        woken: list[Any] = []
        with lock:
            call.dispatcher = dispatcher = self.here()
            run = dispatcher._put(key, call, now, woken)
        if woken or left:
            wake_each(woken)
        if run is not None:
            dispatcher.run(run)

    def _put(self, key: Hashable, call: QueuedCall, now: float, woken: list[Any]) -> Run | None:
        """The run that this caller does at once, if there is one; adds to `woken` who is to be woken."""
        if self._is_broken:
            self._mend()
        if self._why_closed is not None:
            raise own_copy(self._why_closed)
        self.used = now
        scheduler = self.scheduler
        self._is_broken = True
        self._calls[call] = key
        try:
            joined = scheduler.put(key, call, now)
        except OpError:  # refused, and nothing is changed
            del self._calls[call]
            self._is_broken = False
            raise
        run = None
        if joined is not None:
            call.alarm = min(joined.due + BACKSTOP, call.deadline)
        else:
            run = self._take(call, now, woken)
        self._is_broken = False
        return run

    def _take(self, call: QueuedCall, now: float, woken: list[Any]) -> Run | None:
        """Give out what may run, now that `call` is in its queue."""
        scheduler = self.scheduler
        self.scope.expires(now + IDLE_QUEUE_SECONDS)
        batch = scheduler.take(now)
        if batch is None:
            self._set_alarm(call, now)
            return None
        run = None
        if self._workers is None and batch.tasks[-1] is call and self.is_short(batch):
            run = self._new_run(batch)
            run.runner, run.is_given = call, True
            batch = scheduler.take(now)
        woken += self._give_out(batch, now, call)
        if not (call.jobs or run is not None) or call.slices is not None:
            self._set_alarm(call, now)
        return run

    def close(self, drain: bool, why: Exception) -> None:
        """Take nothing more; what is in the queue is processed now, or without `drain` told `why` not."""
        refused: list[Any] = []
        with lock:
            if self._is_broken:
                self._mend()
            self._why_closed = why
            self._is_broken = True
            if drain:
                self.scheduler.flush()
                woken = self._dispatch(self.clock.now(), None)
            else:
                refused = [task.owner for task in self.scheduler.drain()]
                woken = []
            self._is_broken = False
        wake_each(woken)
        for call in refused:
            if call.reject(own_copy(why)):
                call.wake()
            left.append(call)  # it may have been given a run that others wait for
        work_off()

    def when_idle(self, waiting: Ticket) -> None:
        """Resolve `waiting` when nothing waits here and nothing runs."""
        with lock:
            self._idle.append(waiting)
            done = self._now_idle()
        wake_each(done)

    def _now_idle(self) -> list[Ticket]:
        if not self._idle or self.scheduler.waiting or self.scheduler.running:
            return []
        idle, self._idle = self._idle, []
        for waiting in idle:
            waiting.resolve(None)
        return idle

    def check(self, rows: int, low: bool) -> None:
        """Refuse a call of so many rows that no queue of this dispatcher would take, even when empty."""
        probe = QueuedCall(self, rows, None)
        probe.low = low
        Scheduler(self.limits).put("", probe, 0.0)

    def _run_alone(self, key: Hashable, call: QueuedCall, now: float) -> None:
        """Run a call by itself, in this thread."""
        if has_lock() and call.rows < self.limits.enough < inf:
            raise FailedPreconditionError(
                f"{self.name} waits for {self.limits.enough:g} rows, and a finalizer or a signal handler that interrupts weft's "
                f"own bookkeeping cannot wait: got {call.rows}; call it elsewhere"
            )
        own = Scheduler(self.limits)
        own.put(key, call, now)
        while (batch := own.take(inf)) is not None:
            own.release(batch, now)
            self._process(batch)

    def look(self, call: QueuedCall) -> None:
        """See whether a batch is due, and whether somebody was forgotten; called at a caller's alarm, and now and then."""
        with lock:
            if self._is_broken:
                self._mend()
            self._is_broken = True
            now = self.clock.now()
            woken = self._dispatch(now, call)
            self._set_alarm(call, now)
            if self._workers is not None:
                woken += self._workers.tend()
            self._is_broken = False
        wake_each(woken)

    def forget(self, call: QueuedCall) -> list[Any]:
        """Take a caller out, under the lock: of its queue, and of the runs that it was to do; who is to be woken."""
        if self._is_broken:
            self._mend()
        self._is_broken = True
        call.gone = True
        call.leave()
        tasks: list[Any] = call.slices or [call]
        for task in tasks:
            self.scheduler.remove(task)
        self._calls.pop(call, None)
        woken: list[Any] = []
        call.jobs = None
        for run in list(self._runs):
            if run.runner is call and not run.is_begun:
                run.batch.has_gone = True
                woken += self._hand_on(run) if run.done is None else self._drop(run)
        # Whoever was interrupted may have been about to wake others.
        woken += [run.runner for run in self._runs if run.runner is not None and not run.is_begun]
        if self._workers is not None:
            woken += self._workers.tend()
        woken += self._dispatch(self.clock.now(), None)
        self._is_broken = False
        return woken

    def lose(self, run: Run) -> list[Any]:
        """End a run whose thread was ended, under the lock: its callers are told; who is to be woken."""
        if self._is_broken:
            self._mend()
        if run not in self._runs:
            return []
        self._is_broken = True
        woken: list[Any] = []
        if run.done is not None:
            woken += self._drop(run)
        elif (
            run.runner is not None
        ):  # a task's: it gets what ended the thread, and the others are served without its rows
            assert run.problem is not None
            run.runner.reject(run.problem)
            run.runner.gone = run.batch.has_gone = True
            self._calls.pop(run.runner, None)
            woken += [run.runner, *self._hand_on(run)]
        else:
            text = f"the function of this batch ended its thread with {type(run.problem).__name__}"
            answers: list[Any] = [CancelledError(text) for _ in run.batch.tasks]
            self._release(run, self._answer(run.batch, answers), self.clock.now())
            woken += self._drop(run)
        woken += self._dispatch(self.clock.now(), None) + self._now_idle()
        self._is_broken = False
        return woken

    def _mend(self) -> None:
        """Rebuild the queues from the waiting calls after an exception interrupted a change of them."""
        for call in [call for call in self._calls if call.done or call.gone]:
            del self._calls[call]
        for run in list(self._runs):
            if not run.is_given and run.done is None:
                del self._runs[run]
        running = {task for run in self._runs for task in run.batch.tasks}
        waiting = [
            (key, task, call.arrived)
            for call, key in self._calls.items()
            for task in call.tasks()
            if not (task in running or call.is_answered(task))
        ]
        for run in self._runs:
            if not run.is_begun:  # the last call may have joined it in part
                run.batch.keep(run.batch.tasks)
        self.scheduler.rebuild(waiting, sum(run.done is None for run in self._runs))
        self._is_broken = False

    # --- who runs what ---

    def _new_run(self, batch: Batch) -> Run:
        run = Run(self, batch)
        self._runs[run] = None
        return run

    def _dispatch(self, now: float, me: QueuedCall | None) -> list[Any]:
        batch = self.scheduler.take(now)
        return self._give_out(batch, now, me) if batch is not None else self._moved(now)

    def _give_out(self, batch: Batch | None, now: float, me: QueuedCall | None) -> list[Any]:
        """Give this and every further batch that may run to one of its callers; who must be woken for it."""
        woken: list[Any] = []
        while batch is not None:
            woken += self._hand_on(self._new_run(batch), me)
            batch = self.scheduler.take(now)
        return woken + self._moved(now)

    def _hand_on(self, run: Run, me: QueuedCall | None = None) -> list[Any]:
        """Give a run to the pool, unless I am its only caller; without one, to one of its callers: to `me` if I am one, else
        to a thread; drop it when all have gone.

        Tasks of an event loop do not run what others give out: their loop may be busy, or have stopped.
        """
        tasks = run.batch.tasks
        run.runner, run.is_given, run.is_begun = None, False, False
        is_own = self._alone >= LONELY and len(tasks) == 1 and tasks[0] is me and not me.is_task
        if self._workers is not None and not is_own:
            woken = self._workers.give(run)
            if woken is not None:
                run.is_given = True
                self.scheduler.hold(run.batch)  # it cannot begin before the lock is free
                return woken
        if me is not None and (tasks[-1] is me or any(task.owner is me for task in tasks)):
            runner = me
        else:
            here = [task.owner for task in reversed(tasks) if not (task.owner.gone or task.owner.done)]
            if not here:
                self._release(run, [], self.clock.now())
                return self._drop(run)
            threads = [call for call in here if call.waiter is None or call.waiter.loop is None]
            if not threads:
                run.is_given = True
                return workers.run_elsewhere(run) or []
            runner = next((call for call in threads if not call.jobs), threads[0])
        run.runner = runner
        runner.add_job(run)
        run.is_given = True
        return [] if runner is me else [runner]

    def _moved(self, now: float) -> list[Any]:
        """Callers whose batch has a new due time, to be woken so that they set their alarm by it."""
        if not self.scheduler.moved:
            return []
        calls = [task.owner for task in self.scheduler.moved]
        self.scheduler.moved = []
        for call in calls:
            self._set_alarm(call, now)
        return calls

    def _set_alarm(self, call: QueuedCall, now: float) -> None:
        batch = call.batch
        if call.slices is None and batch is not None and batch.is_taken:  # its end wakes the caller
            call.alarm = call.deadline
            return
        when = inf
        tasks: list[Any] = call.slices or [call]
        for task in tasks:
            due, is_mine = self.scheduler.due(task)
            when = min(when, due if is_mine else due + BACKSTOP)
        # Past its due time a batch waits only for another to end, and that end wakes its callers.
        call.alarm = min(when if when > now else inf, call.deadline)

    # --- running ---

    def run(self, run: Run) -> None:
        """Process a batch, answer its callers, and give out what may run next."""
        try:
            if not self._begin(run):
                return
            batch = run.batch
            # Who begins to observe while the batch runs is not told of it: its times are not known.
            observers = self.scope.observers
            started = self.clock.now() if observers else 0.0
            is_held = run.runner is not None and run.runner.holder != 0  # by the thread that this is
            done, error = self._process(batch) if is_held else self._process_here(batch)
            self._end(run, done)
            if run.runner is None and self._workers is not None:
                self._see_off(done)
            else:
                wake_all(done)
            self._runs.pop(run, None)
        except BaseException:
            run.is_begun = False  # nobody is at it now
            raise
        if left:
            work_off()
        if observers:
            self._tell(observers, batch, started, error)
        batch.tasks, batch.error = [], None  # which know their batch: else they would live until they are looked for

    def _begin(self, run: Run) -> bool:
        """Whether a run is still to be done: after an interruption its calls may be in other batches."""
        if run.runner is None and self._workers is not None:  # others may join it until it begins
            with lock:
                if self._is_broken:
                    self._mend()
                if run not in self._runs:
                    return False
                run.is_begun = True
                self.scheduler.begin(run.batch)
                self._alone = self._alone + 1 if len(run.batch.tasks) == 1 else 0
            return True
        run.is_begun = True
        return run in self._runs

    def _process_here(self, batch: Batch) -> tuple[list[Ticket], Exception | None]:
        """As `_process`, in a thread of nobody's: a call that comes from inside is recursive."""
        if self._is_held(held_here()):
            return self._process(batch)
        mark = Ticket(self.clock)
        mark.dispatcher = self
        mark.take_up()
        try:
            return self._process(batch)
        finally:
            mark.leave()

    def _process(self, batch: Batch) -> tuple[list[Ticket], Exception | None]:
        """Answer the callers of a batch: those that are done by it, and what went wrong."""
        if batch.has_gone:
            batch.keep([task for task in batch.tasks if not task.owner.is_answered(task)])
        error: Exception | None = None
        try:
            if exiting:
                check_exit()
            answers = self.process(batch) if batch.tasks else []
        except Exception as problem:
            if is_from_signal(problem):
                raise  # it ends this thread's call; the others are served without its rows
            error = problem
            answers = [own_copy(problem) for _ in batch.tasks]
        done = self._answer(batch, answers)
        del answers  # errors among them know this frame, by their traceback
        return done, error

    def _answer(self, batch: Batch, answers: list[Any]) -> list[Ticket]:
        done: list[Ticket] = []
        for i, task in enumerate(batch.tasks):
            owner: QueuedCall = task if isinstance(task, QueuedCall) else task.owner
            if owner.answer(task, answers[i]):
                done.append(owner)
        return done

    def _end(self, run: Run, done: list[Ticket]) -> None:
        with lock:
            if self._is_broken:
                self._mend()
            self._is_broken = True
            now = self.used = self.clock.now()
            self._release(run, done, now)
            woken = self._next_up(now) if self.scheduler.waiting else []
            if self._idle:
                woken += self._now_idle()
            self._is_broken = False
        if woken:
            wake_each(woken)

    def _release(self, run: Run, done: list[Any], now: float) -> None:
        """Tell the scheduler that a run has ended; `done` are to be woken, and wait no more."""
        run.done = done
        for call in done:
            self._calls.pop(call, None)
        self.scheduler.release(run.batch, now)

    def _drop(self, run: Run) -> list[Any]:
        """Let go of a run that has ended; who is to be woken."""
        self._runs.pop(run, None)
        return run.done or []

    def _see_off(self, done: list[Ticket]) -> None:
        """Wake the callers that the pool has answered, and let them go before it runs the next batch.

        Whoever calls again at once is in that batch then. Otherwise it begins with the few that were fastest, and takes turns for
        the interpreter with all the others: 64 threads that call a small torch model got 15,000 answers a second so, in
        batches of 22, and 25,000 now, in batches of 64.
        """
        if not has_threads(done):  # tasks go on in their loop
            wake_all(done)
            return
        gate = Wakeup()
        wake_all(done, gate)
        self.clock.acquire(gate, self.clock.now() + SEEING_OFF * len(done))

    def _next_up(self, now: float) -> list[Any]:
        """Who is to be woken when a run has ended: one of the callers of the next batch, to look after it.

        The batch is not taken for it. Whoever comes first runs it, and that may be the caller that has just ended its run and
        calls again, with its own rows in the batch then. Reserved for a thread that has yet to wake up, the batch would make
        all others queue behind that thread: 8 callers of a function that does nothing got 22,600 answers a second so, and
        79,000 now.
        """
        if self._workers is None:
            for task in self.scheduler.ready(now):
                call = task.owner
                if not (call.gone or call.done) and (call.waiter is None or call.waiter.loop is None):
                    call.add_job(_Look(self, call))
                    return [call]
        return self._dispatch(now, None)

    def _tell(self, observers: tuple[Any, ...], batch: Batch, started: float, error: Exception | None) -> None:
        event = BatchRan(
            op=self.op,
            name=self.name,
            rows=tuple(task.rows for task in batch.tasks),
            padding=batch.padded - batch.rows if batch.padding is None else batch.padding,
            waits=tuple(started - task.owner.arrived for task in batch.tasks),
            reason=batch.reason,
            seconds=self.clock.now() - started,
            error=error or batch.error,
        )
        self.scope.tell("batch_ran", event, observers=observers)

    # --- as a resource ---

    def sweep(self, now: float) -> float:
        """Drop queues that have been empty for a minute; when the next one may have been."""
        if has_lock():
            return now + 1.0
        with lock:
            if self._is_broken:
                self._mend()
            self._is_broken = True
            when: float = self.scheduler.drop_idle(now)
            self._is_broken = False
            return when

    def is_empty(self) -> bool:
        return not (self._calls or self._runs)

    def stored(self) -> int:
        """How many tasks are waiting."""
        with lock:
            return sum(len(queue.tasks()) for queue in self.scheduler.queues.values())

    def after_fork(self) -> None:
        """Forget everyone: the threads that waited here are not in this process."""
        self._reset()


def wake_each(woken: list[Any]) -> None:
    """Wake callers that have something to do, and start threads that are needed; then let go of who has left meanwhile."""
    for each in woken:
        each.wake()
    if left:
        work_off()
