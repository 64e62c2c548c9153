"""Where callers hand in their tasks, and which of them runs which batch.

No thread is started: a batch is run by one of its own callers, the one that fills it, the one that meets its due time, or one
that is woken for it when another batch ends. The mutex guards the rules only; no lock is held while a batch is processed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from math import inf
from typing import Any, NamedTuple

from ..errors import own_copy
from .clock import Clock
from .pending import Pending
from .queue import Batch, Limits, Scheduler, Task

#: How much later than the caller whose part it is the others look after an overdue batch, in seconds.
BACKSTOP = 0.1


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
    """A caller's task and what becomes of it. Cut into slices, it is answered when all of them are."""

    __slots__ = ("arrived", "desk", "gone", "low", "parts", "payload", "rows", "tasks")

    def __init__(self, desk: Desk, rows: int, payload: Any, low: bool = False) -> None:
        super().__init__(desk.clock)
        self.desk = desk
        self.rows = rows
        self.payload = payload
        self.low = low
        self.gone = False
        self.arrived = 0.0
        self.tasks = [Task(self, 0, rows, low)]
        self.parts: dict[int, Any] | None = None  # a slice's answer by its first row, once there are slices

    def piece(self, start: int, rows: int) -> Task:
        """A slice of this call as a task of its own, in place of the task that began there."""
        if self.parts is None:
            self.tasks, self.parts = [], {}
        self.tasks = [task for task in self.tasks if task.start != start]
        self.tasks.append(Task(self, start, rows, self.low))
        return self.tasks[-1]

    def answer(self, task: Task, value: Any) -> None:
        """Take the answer for one of this call's tasks, a value or an exception; the last one finishes the call."""
        if self.parts is not None:
            self.parts[task.start] = value
            if len(self.parts) < len(self.tasks):
                return
            values = [self.parts[start] for start in sorted(self.parts)]
            value = next((v for v in values if isinstance(v, BaseException)), values)
        if isinstance(value, BaseException):
            self.finish(error=value)
        else:
            self.finish(value)

    def ring(self) -> None:
        self.desk.look(self)

    def abandon(self) -> None:
        self.desk.leave(self)


class Run:
    """The processing of one batch, as a job for one of its callers."""

    __slots__ = ("batch", "begun", "desk", "is_short", "runner")

    def __init__(self, desk: Desk, batch: Batch) -> None:
        self.desk = desk
        self.batch = batch
        self.begun = False
        self.runner: Call | None = None
        self.is_short = desk.is_short(batch)

    def __call__(self) -> None:
        self.desk.run(self)


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
    ) -> None:
        self.limits = limits
        self.scope = scope
        self.clock: Clock = scope.clock
        self.process = process
        self.is_short = is_short
        self.op, self.name = op, name
        self.scheduler = Scheduler(limits)
        self._mutex = threading.Lock()

    # --- what callers do ---

    def enter(self, key: Hashable, call: Call) -> None:
        """Put a call in its queue; it may come back with a batch to run."""
        with self._mutex:
            now = call.arrived = self.clock.now()
            self.scheduler.put(key, call.tasks[0], now)
            batch = self.scheduler.take(now)
            if batch is None:
                self._set_alarm(call)
                return
            woken = self._give_out(batch, now, call)
            if not call.jobs:
                self._set_alarm(call)
        for other in woken:
            other.wake()

    def look(self, call: Call) -> None:
        """See whether a batch is due; called at a caller's alarm."""
        with self._mutex:
            woken = self._dispatch(self.clock.now(), call)
            self._set_alarm(call)
        for other in woken:
            other.wake()

    def leave(self, call: Call) -> None:
        """Take a caller out: of its queue, and of the runs it was given and has not begun."""
        with self._mutex:
            call.gone = True
            for task in call.tasks:
                self.scheduler.remove(task)
            woken = []
            for run in call.jobs or ():
                if isinstance(run, Run) and not run.begun:
                    woken += self._hand_on(run)
            woken += self._dispatch(self.clock.now(), None)
        for other in woken:
            other.wake()

    # --- who runs what ---

    def _dispatch(self, now: float, me: Call | None) -> list[Call]:
        batch = self.scheduler.take(now)
        return self._give_out(batch, now, me) if batch is not None else self._moved()

    def _give_out(self, batch: Batch | None, now: float, me: Call | None) -> list[Call]:
        """Give this and every further batch that may run to one of its callers; who must be woken for it."""
        woken: list[Call] = []
        while batch is not None:
            woken += self._hand_on(Run(self, batch), me)
            batch = self.scheduler.take(now)
        return woken + self._moved()

    def _hand_on(self, run: Run, me: Call | None = None) -> list[Call]:
        """Give a run to one of its callers, to `me` if I am one; drop it when all have gone."""
        here = [task.owner for task in run.batch.tasks if not task.owner.gone]
        if not here:
            self.scheduler.release(run.batch, self.clock.now())
            return []
        runner = me if me is not None and me in here else next((c for c in reversed(here) if not c.jobs), here[-1])
        if runner.jobs is None:
            runner.jobs = deque()
        runner.jobs.append(run)
        run.runner = runner
        return [] if runner is me else [runner]

    def _moved(self) -> list[Call]:
        """Callers whose batch has a new due time, to be woken so that they set their alarm by it."""
        if not self.scheduler.moved:
            return []
        calls = [task.owner for task in self.scheduler.moved]
        self.scheduler.moved = []
        for call in calls:
            self._set_alarm(call)
        return calls

    def _set_alarm(self, call: Call) -> None:
        when = inf
        for task in call.tasks:
            due, is_mine = self.scheduler.due(task)
            when = min(when, due if is_mine else due + BACKSTOP)
        # Past its due time a batch waits only for another to end, and that end wakes its callers.
        call.alarm = when if when < inf and when > self.clock.now() else None

    # --- running ---

    def run(self, run: Run) -> None:
        """Process a batch, answer its callers, and give out what may run next."""
        run.begun = True
        batch = run.batch
        if any(task.owner.gone for task in batch.tasks):
            batch.tasks = [task for task in batch.tasks if not task.owner.gone]
            batch.rows = sum(task.rows for task in batch.tasks)
        started = self.clock.now()
        error: Exception | None = None
        try:
            answers = self.process(batch) if batch.tasks else []
        except Exception as problem:
            error = problem
            answers = [own_copy(problem) for _ in batch.tasks]
        except BaseException as problem:
            self._interrupted(run, problem)
            raise
        for task, answer in zip(batch.tasks, answers, strict=True):
            task.owner.answer(task, answer)
        self._end(batch)
        if self.scope.observers:
            self._tell(batch, started, error)

    def _interrupted(self, run: Run, problem: BaseException) -> None:
        """The runner is being ended (KeyboardInterrupt, SystemExit): another caller runs the batch without its rows."""
        with self._mutex:
            if run.runner is not None:
                run.runner.gone = True
                run.runner.finish(error=problem)
            woken = self._hand_on(Run(self, run.batch))
        for other in woken:
            other.wake()

    def _end(self, batch: Batch) -> None:
        with self._mutex:
            now = self.clock.now()
            self.scheduler.release(batch, now)
            woken = self._dispatch(now, None)
        for other in woken:
            other.wake()

    def _tell(self, batch: Batch, started: float, error: Exception | None) -> None:
        event = BatchRan(
            op=self.op,
            name=self.name,
            rows=tuple(task.rows for task in batch.tasks),
            padding=batch.padded - batch.rows,
            waits=tuple(started - task.owner.arrived for task in batch.tasks),
            reason=batch.reason,
            seconds=self.clock.now() - started,
            error=error,
        )
        self.scope.tell("batch_ran", event)

    # --- as a resource ---

    def sweep(self, now: float) -> float:
        """Drop queues that have been idle for a minute; nothing here expires."""
        with self._mutex:
            self.scheduler.drop_idle(now)
        return inf

    def stored(self) -> int:
        """How many tasks are waiting."""
        with self._mutex:
            queues = self.scheduler.queues.values()
            return sum(len(b.tasks) for q in queues for b in (*q.closed, q.open)) + sum(len(q.low) for q in queues)

    def after_fork(self) -> None:
        """Forget everyone: the threads that waited here are not in this process."""
        self._mutex = threading.Lock()
        self.scheduler = Scheduler(self.limits)
