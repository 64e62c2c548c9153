"""Where callers hand in their tasks, and which of them runs which batch.

A batch is run by one of its own callers, the one that fills it, the one that meets its due time, or whoever comes first when
another batch has ended; no thread is started for it, unless the desk has a house. The mutex guards the rules only; no lock is
held while a batch is processed.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Hashable
from math import inf
from typing import Any, NamedTuple

from ..errors import CancelledError, DeadlineExceededError, own_copy
from . import pending
from .bell import Bell
from .clock import Clock
from .house import House
from .pending import Pending, has_threads, wake, wake_all
from .queue import IDLE_QUEUE_SECONDS, Batch, Limits, Queue, Scheduler, Task

#: After so many batches of one call in a row, a lone caller runs its batch itself.
LONELY = 8
#: How much later than the caller whose part it is the others look after an overdue batch, in seconds.
BACKSTOP = 0.1
#: How long a house waits, in seconds for each caller it has answered, until they have gone.
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


class Call(Pending):
    """A caller and what becomes of it. It is its own task, or is cut into slices and answered when all of them are."""

    def __init__(self, desk: Desk, rows: int, payload: Any) -> None:
        self._enlist(desk, rows, payload)

    def _enlist(self, desk: Desk, rows: int, payload: Any) -> None:
        self._begin(desk.clock, None)
        self.desk = desk
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
    def owner(self) -> Call:
        """Whose rows these are."""
        return self

    def piece(self, start: int, rows: int) -> Task:
        """A slice of this call as a task of its own, in place of the task that began there."""
        piece = Task(self, start, rows)
        if self.slices is None:
            self.slices, self.answers = [], {}
        # In one step: another slice may be answered meanwhile, and must not find itself the last.
        self.slices = [*(task for task in self.slices if task.start != start), piece]
        return piece

    def answer(self, task: Any, value: Any) -> bool:
        """Take the answer for one of this call's tasks, a value or an exception; whether the call is done now."""
        if self.slices is not None:
            answers = self.answers
            assert answers is not None
            answers[task.start] = value
            if len(answers) < len(self.slices):
                return False
            value = _whole(answers)
        if isinstance(value, BaseException):
            self.error = value
        else:
            self.value = value
        self.done = True
        return True

    def ring(self) -> None:
        if self.clock.now() < self.deadline:
            self.desk.look(self)
        else:
            self.desk.leave(self)
            self.finish(error=self.late())

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
        return other is None or getattr(other, "loop", loop) is not loop  # a thread has none

    def abandon(self) -> None:
        self.desk.leave(self)


def _whole(answers: dict[int, Any]) -> Any:
    """The answers of slices in order, or the first of them that is an exception."""
    values = [answers[start] for start in sorted(answers)]
    return next((value for value in values if isinstance(value, BaseException)), values)


class Run:
    """The processing of one batch, as a job for one of its callers."""

    __slots__ = ("batch", "begun", "desk", "runner")

    def __init__(self, desk: Desk, batch: Batch) -> None:
        self.desk = desk
        self.batch = batch
        self.begun = False
        self.runner: Call | None = None

    def is_short(self) -> bool:
        """Whether it may run inside an event loop."""
        return self.desk.is_short(self.batch)

    def run(self) -> None:
        """Process the batch."""
        self.desk.run(self)


class _Look:
    """The job of seeing whether a batch may run now."""

    def __init__(self, desk: Desk, call: Call) -> None:
        self._desk, self._call = desk, call

    def is_short(self) -> bool:
        return True

    def run(self) -> None:
        self._desk.look(self._call)


class Desk:
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
        has_house: bool = False,
    ) -> None:
        self.limits = limits
        self.scope = scope
        self.clock: Clock = scope.clock
        self.process = process
        self.is_short = is_short
        self.op, self.name = op, name
        self.target = limits.max_batch_size
        self.rules = rules
        self._house = House(limits.threads, scope.clock, name) if has_house else None
        # How many batches of one call there were in a row. After few, a caller that finds nobody is not alone: the others are
        # on their way back from the last batch.
        self._alone = LONELY
        self.scheduler = rules(limits)
        self._mutex = threading.Lock()
        self._inside: set[int] = set()  # the threads that are running one of its batches
        self._idle: list[Pending] = []  # who waits until nothing waits and nothing runs
        self._why_closed: Exception | None = None

    @property
    def is_inside(self) -> bool:
        """Whether this thread is running one of its batches."""
        return get_ident() in self._inside

    @property
    def is_quiet(self) -> bool:
        """Whether nobody waits and nobody watches: a call that needs no other may then be answered outside the queue."""
        return not (self.scheduler.waiting or self.scope.observers)

    # --- what callers do ---

    def enter(self, key: Hashable, call: Call, now: float) -> None:
        """Put a call in its queue; if it fills a batch that is soon processed, process it, else it may have a run to do."""
        call.arrived = now
        scheduler = self.scheduler
        if scheduler.running and get_ident() in self._inside:
            self._run_inside(key, call, now)
            return
        with self._mutex:
            if self._why_closed is not None:
                raise own_copy(self._why_closed)
            if not scheduler.put(key, call, now):
                joined: Any = call.batch
                call.alarm = min(joined.due + BACKSTOP, call.deadline)
                return
            self.scope.expires(now + IDLE_QUEUE_SECONDS)
            batch = scheduler.take(now)
            if batch is None:
                self._set_alarm(call, now)
                return
            at_once = self._house is None and batch.tasks[-1] is call and self.is_short(batch)
            woken = self._give_out(scheduler.take(now) if at_once else batch, now, call)
            if not (call.jobs or at_once) or call.slices is not None:
                self._set_alarm(call, now)
        wake_each(woken)
        if at_once:
            run = Run(self, batch)
            run.runner = call
            self.run(run)

    def close(self, drain: bool, why: Exception) -> None:
        """Take nothing more; what is in the queue is processed now, or without `drain` told `why` not."""
        with self._mutex:
            self._why_closed = why
            if drain:
                self.scheduler.flush()
                woken = self._dispatch(self.clock.now(), None)
                refused = []
            else:
                refused = [task.owner for task in self.scheduler.drain()]
                woken = []
        wake_each(woken)
        for call in refused:
            call.finish(error=own_copy(why))
            self.leave(call)  # it may have been given a run that others wait for

    def when_idle(self, waiting: Pending) -> None:
        """Finish `waiting` when nothing waits here and nothing runs."""
        with self._mutex:
            self._idle.append(waiting)
            done = self._now_idle()
        for other in done:
            other.finish()

    def _now_idle(self) -> list[Pending]:
        if not self._idle or self.scheduler.waiting or self.scheduler.running:
            return []
        idle, self._idle = self._idle, []
        return idle

    def check(self, rows: int, low: bool) -> None:
        """Refuse a call of so many rows that no queue of this desk would take, even when empty."""
        probe = Call(self, rows, None)
        probe.low = low
        Scheduler(self.limits).put("", probe, 0.0)

    def _run_inside(self, key: Hashable, call: Call, now: float) -> None:
        """Run a call that comes from inside a batch's own run by itself: in the queue it could wait for that run to end."""
        own = Scheduler(self.limits)
        own.put(key, call, now)
        while (batch := own.take(inf)) is not None:
            own.release(batch, now)
            self._process(batch)

    def look(self, call: Call) -> None:
        """See whether a batch is due; called at a caller's alarm."""
        with self._mutex:
            now = self.clock.now()
            woken = self._dispatch(now, call)
            self._set_alarm(call, now)
        wake_each(woken)

    def leave(self, call: Call) -> None:
        """Take a caller out: of its queue, and of the runs it was given and has not begun."""
        with self._mutex:
            call.gone = True
            tasks: list[Any] = call.slices or [call]
            for task in tasks:
                self.scheduler.remove(task)
            woken = []
            jobs, call.jobs = call.jobs, None
            for run in jobs or ():
                if isinstance(run, Run) and not run.begun:
                    woken += self._hand_on(Run(self, run.batch))
            woken += self._dispatch(self.clock.now(), None)
        wake_each(woken)

    # --- who runs what ---

    def _dispatch(self, now: float, me: Call | None) -> list[Call]:
        batch = self.scheduler.take(now)
        return self._give_out(batch, now, me) if batch is not None else self._moved(now)

    def _give_out(self, batch: Batch | None, now: float, me: Call | None) -> list[Call]:
        """Give this and every further batch that may run to one of its callers; who must be woken for it."""
        woken: list[Call] = []
        while batch is not None:
            woken += self._hand_on(Run(self, batch), me)
            batch = self.scheduler.take(now)
        return woken + self._moved(now)

    def _hand_on(self, run: Run, me: Call | None = None) -> list[Call]:
        """Give a run to the house, unless I am its only caller; without one, to one of its callers: to `me` if I am one, else
        to a thread; drop it when all have gone.

        Tasks of an event loop do not run what others give out: their loop may be busy, or have stopped.
        """
        tasks = run.batch.tasks
        is_own = self._alone >= LONELY and len(tasks) == 1 and tasks[0] is me and not me.is_task
        if self._house is not None and not is_own and self._house.give(run):
            self.scheduler.hold(run.batch)  # it cannot begin before the mutex is free
            return []
        if me is not None and (tasks[-1] is me or any(task.owner is me for task in tasks)):
            runner = me
        else:
            here = [task.owner for task in reversed(tasks) if not (task.owner.gone or task.owner.done)]
            if not here:
                self.scheduler.release(run.batch, self.clock.now())
                return []
            threads = [call for call in here if not hasattr(call.waiter, "get_loop")]
            if not threads:
                pending.run_elsewhere(run.run)
                return []
            runner = next((call for call in threads if not call.jobs), threads[0])
        if runner.jobs is None:
            runner.jobs = deque()
        runner.jobs.append(run)
        run.runner = runner
        return [] if runner is me else [runner]

    def _moved(self, now: float) -> list[Call]:
        """Callers whose batch has a new due time, to be woken so that they set their alarm by it."""
        if not self.scheduler.moved:
            return []
        calls = [task.owner for task in self.scheduler.moved]
        self.scheduler.moved = []
        for call in calls:
            self._set_alarm(call, now)
        return calls

    def _set_alarm(self, call: Call, now: float) -> None:
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
        run.begun = True
        batch = run.batch
        if self._house is not None:
            with self._mutex:
                self.scheduler.begin(batch)
                self._alone = self._alone + 1 if len(batch.tasks) == 1 else 0
        started = self.clock.now() if self.scope.observers else 0.0
        me = get_ident()
        self._inside.add(me)
        try:
            done, error = self._process(batch)
        except BaseException as problem:
            self._interrupted(run, problem)
            raise
        finally:
            self._inside.discard(me)
        self._end(batch)
        if run.runner is None and self._house is not None:
            self._see_off(done)
        else:
            wake_all(done)
        if self.scope.observers:
            self._tell(batch, started, error)
        batch.tasks, batch.error = [], None  # which know their batch: else they would live until they are looked for

    def _process(self, batch: Batch) -> tuple[list[Pending], Exception | None]:
        """Answer the callers of a batch: those that are done by it, and what went wrong."""
        if batch.has_gone:
            batch.keep([task for task in batch.tasks if not task.owner.gone])
        error: Exception | None = None
        try:
            answers = self.process(batch) if batch.tasks else []
        except Exception as problem:
            error = problem
            answers = [own_copy(problem) for _ in batch.tasks]
        done = self._answer(batch, answers)
        del answers  # errors among them know this frame, by their traceback
        return done, error

    def _answer(self, batch: Batch, answers: list[Any]) -> list[Pending]:
        done: list[Pending] = []
        for i, task in enumerate(batch.tasks):
            owner: Call = task if isinstance(task, Call) else task.owner
            if owner.answer(task, answers[i]):
                done.append(owner)
        return done

    def _interrupted(self, run: Run, problem: BaseException) -> None:
        """The runner is being ended (KeyboardInterrupt, SystemExit): another caller runs the batch without its rows.

        Without a runner, in a thread of nobody's, it is the function that ends whoever runs it: all its callers are told.
        """
        done: list[Pending] = []
        with self._mutex:
            if run.runner is not None:
                run.runner.gone = run.batch.has_gone = True
                run.runner.finish(error=problem)
                woken = self._hand_on(Run(self, run.batch))
            else:
                text = f"the function of this batch ended its thread with {type(problem).__name__}"
                done = self._answer(run.batch, [CancelledError(text) for _ in run.batch.tasks])
                self.scheduler.release(run.batch, self.clock.now())
                woken = []
            woken += self._dispatch(self.clock.now(), None)
        wake_each(woken)
        wake_all(done)

    def _end(self, batch: Batch) -> None:
        with self._mutex:
            now = self.clock.now()
            self.scheduler.release(batch, now)
            woken = self._next_up(now) if self.scheduler.waiting else None
            idle = self._now_idle() if self._idle else None
        if woken:
            wake_each(woken)
        if idle:
            for waiting in idle:
                waiting.finish()

    def _see_off(self, done: list[Pending]) -> None:
        """Wake the callers that the house has answered, and let them go before it runs the next batch.

        Whoever calls again at once is in that batch then. Otherwise it begins with the few that were fastest, and takes turns for
        the interpreter with all the others: 64 threads that call a small torch model got 15,000 answers a second so, in
        batches of 22, and 25,000 now, in batches of 64.
        """
        if not has_threads(done):  # tasks go on in their loop
            wake_all(done)
            return
        gate = Bell()
        wake_all(done, gate)
        self.clock.acquire(gate, self.clock.now() + SEEING_OFF * len(done))

    def _next_up(self, now: float) -> list[Call]:
        """Who is to be woken when a run has ended: one of the callers of the next batch, to look after it.

        The batch is not taken for it. Whoever comes first runs it, and that may be the caller that has just ended its run and
        calls again, with its own rows in the batch then. Reserved for a thread that has yet to wake up, the batch would make
        all others queue behind that thread: 8 callers of a function that does nothing got 22,600 answers a second so, and
        79,000 now.
        """
        if self._house is None:
            for task in self.scheduler.ready(now):
                call = task.owner
                if not (call.gone or call.done or hasattr(call.waiter, "get_loop")):
                    if call.jobs is None:
                        call.jobs = deque()
                    call.jobs.append(_Look(self, call))
                    return [call]
        return self._dispatch(now, None)

    def _tell(self, batch: Batch, started: float, error: Exception | None) -> None:
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
        self.scope.tell("batch_ran", event)

    # --- as a resource ---

    def sweep(self, now: float) -> float:
        """Drop queues that have been empty for a minute; when the next one may have been."""
        with self._mutex:
            return self.scheduler.drop_idle(now)

    def stored(self) -> int:
        """How many tasks are waiting."""
        with self._mutex:
            return sum(len(queue.tasks()) for queue in self.scheduler.queues.values())

    def after_fork(self) -> None:
        """Forget everyone: the threads that waited here are not in this process."""
        self._mutex = threading.Lock()
        self._idle = []
        self._inside &= {get_ident()}
        self.scheduler = self.rules(self.limits)
        if self._house is not None:
            self._house = House(self.limits.threads, self.clock, self.name)


def wake_each(calls: list[Call]) -> None:
    """Wake callers that have something to do."""
    for call in calls:
        wake(call)
