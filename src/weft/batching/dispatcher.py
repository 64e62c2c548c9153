"""Where calls wait, and which caller or worker runs which batch.

A batch is run by one of its own callers: the one that fills it, the one that watches its due time, or the first to come when
another batch has ended. Only a dispatcher with workers has threads for it. The lock guards the queues; it is not held while a
batch is processed.

The calls that wait and the batches that run must not be lost: `_calls` and `_runs`, which are changed atomically. The queues of the
scheduler follow from them. If an exception interrupts a change of the queues, `_repair` rebuilds them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from math import inf
from typing import Any

from ..core.clock import Clock
from ..core.lock import departed, has_lock, lock, remove_departed
from ..core.named import Named
from ..core.ticket import CheckJob, Ticket, check_exit, exiting, innermost_call, wake_all, wake_each
from ..errors import OpError, own_copy
from . import workers
from .batch_run import Run
from .call import OTHERS_DELAY, QueuedCall
from .modes import has_unkeyed_modes
from .processing import Processor, answer_all, thread_ended, wake_and_wait
from .queue import Batch, Limits
from .queue_table import IDLE_QUEUE_SECONDS
from .scheduler import Scheduler
from .workers import WorkerPool

#: After so many batches of one call in a row, a lone caller runs its batch itself.
LONE_BATCHES = 8


class Dispatcher(Named):
    """A named queue of calls. The processor runs in a caller's or a worker's thread."""

    def __init__(
        self,
        limits: Limits,
        processor: Processor,
        is_short: Callable[[Batch], bool],
        rules: Callable[[Limits], Scheduler] = Scheduler,
        has_workers: bool = False,
        lone_callers_run: bool = True,  # False if only workers run batches, as long as there are any
    ) -> None:
        super().__init__()
        self.limits = limits
        self.scope = processor.scope
        self.clock: Clock = self.scope.clock
        self.is_short = is_short
        self.op, self.name = processor.op, processor.name
        self.rules = rules
        self._processor = processor
        self._has_workers = has_workers
        self._enough_lone_batches = LONE_BATCHES if lone_callers_run else inf
        self._why_closed: Exception | None = None
        self._reset()

    def _reset(self) -> None:
        """Begin without calls."""
        self._workers = WorkerPool(self.limits.threads, self.clock, self.name) if self._has_workers else None
        # How many batches of one call there were in a row. After few, other callers are on their way back from the last batch.
        self._lone_batches = LONE_BATCHES
        self.scheduler = self.rules(self.limits)
        # The waiting calls in order of arrival, each with the key of its queue.
        self._calls: dict[QueuedCall, Hashable] = {}
        self._runs: dict[Run, None] = {}  # the batches that were taken and have not ended
        self._is_broken = False  # whether an exception has interrupted a change of the queues
        self._idle_waits: list[Ticket] = []  # end when nothing waits and nothing runs

    @property
    def is_recursive(self) -> bool:
        """Whether this thread is already inside a call of this dispatcher.

        It is when a function that runs a batch calls again, or when a finalizer or signal handler interrupts a waiting call or the
        lock's holder.
        """
        return has_lock() or self._contains(innermost_call())

    def _contains(self, ticket: Ticket | None) -> bool:
        """Whether `ticket`, or a call around it, is a call of this dispatcher or a mark of its workers."""
        pool = self._workers
        while ticket is not None:
            if ticket.dispatcher is self or (pool is not None and ticket.dispatcher is pool):
                return True
            ticket = ticket.outer
        return False

    @property
    def is_quiet(self) -> bool:
        """Whether no call waits and no observer watches: a call that needs no other may then be answered outside the queue."""
        return not (self.scheduler.waiting or self.scope.observers)

    # --- what callers do ---

    def enter(self, key: Hashable, call: QueuedCall, now: float) -> None:
        """Put a call in its queue. If it fills a batch that is short, process the batch; else the call may get a run as a job.

        A recursive call runs by itself, at once: in the queue it could wait for its own thread. So does one that must stay here.
        """
        call.arrived = now
        if not call.thread:
            call.begin_inside()
        if exiting:
            check_exit()
        if call.stays_here or has_lock() or exiting or (call.outer is not None and self._contains(call.outer)):
            self._processor.run_alone(self.limits, key, call, now)
            return
        woken: list[Any] = []
        with lock:
            call.dispatcher = dispatcher = self.in_use()
            run = dispatcher._put(key, call, now, woken)
        if woken or departed:
            wake_each(woken)
        if run is not None:
            dispatcher.run(run)

    def _put(self, key: Hashable, call: QueuedCall, now: float, woken: list[Any]) -> Run | None:
        """Put a call in its queue; return the run that its caller does at once, if any. Adds the tickets to wake to `woken`."""
        if self._is_broken:
            self._repair()
        if self._why_closed is not None:
            self.check_open()
        self.last_used = now
        self._is_broken = True
        self._calls[call] = key
        self._note_caller(call)
        try:
            joined = self.scheduler.put(key, call, now)
        except OpError:  # refused: the queues are unchanged
            self._leave(call)
            self._is_broken = False
            raise
        run = None
        if joined is not None:
            call.alarm = min(joined.due + OTHERS_DELAY, call.deadline)
        else:
            run = self._take(call, now, woken)
        self._is_broken = False
        return run

    def _take(self, call: QueuedCall, now: float, woken: list[Any]) -> Run | None:
        """Assign the batches that may run now that `call` is in its queue; return the run that its caller does at once."""
        scheduler = self.scheduler
        self.scope.expires(now + IDLE_QUEUE_SECONDS)
        batch = scheduler.take(now)
        if batch is None:
            call.set_alarm(self.scheduler, now)
            return None
        run = None
        if self._workers is None and batch.tasks[-1] is call and self.is_short(batch):
            run = self._new_run(batch)
            run.runner, run.is_assigned = call, True
            batch = scheduler.take(now)
        woken += self._assign_all(batch, now, call)
        if not (call.jobs or run is not None) or call.parts is not None:
            call.set_alarm(self.scheduler, now)
        return run

    def set_limits(self, limits: Limits) -> None:
        """Apply other limits from now on, also to the calls that wait; nothing changes once this dispatcher is closed."""
        with lock:
            self.check_open()
            self._begin_change()
            self.limits = limits
            self.scheduler.set_limits(limits)
            if self._workers is not None:
                self._workers.most = limits.threads
            woken = self._dispatch(self.clock.now(), None)
            self._is_broken = False
        wake_each(woken)

    def check_open(self) -> None:
        """Raise the error of a closed dispatcher."""
        if self._why_closed is not None:
            raise own_copy(self._why_closed)

    def refuse(self, why: Exception | None) -> None:
        """Refuse further calls with `why`; with None take calls again."""
        with lock:
            self._why_closed = why

    def empty(self, drain: bool, why: Exception) -> None:
        """Process the calls in the queue now, or without `drain` reject them with `why`."""
        refused: list[Any] = []
        with lock:
            self._begin_change()
            if drain:
                self.scheduler.flush()
                woken = self._dispatch(self.clock.now(), None)
            else:
                woken, refused = [], [task.owner for task in self.scheduler.drain()]
            self._is_broken = False
        wake_each(woken)
        for call in refused:
            if call.reject(own_copy(why)):
                call.wake()
            departed.append(call)  # it may have been assigned a run that others wait for
        remove_departed()

    def when_idle(self, waiting: Ticket) -> None:
        """Resolve `waiting` when nothing waits here and nothing runs."""
        with lock:
            self._idle_waits.append(waiting)
            woken = self._end_idle_waits()
        wake_each(woken)

    def _end_idle_waits(self) -> list[Ticket]:
        if not self._idle_waits or self.scheduler.waiting or self.scheduler.running:
            return []
        ended, self._idle_waits = self._idle_waits, []
        for waiting in ended:
            waiting.resolve(None)
        return ended

    def check_fits(self, rows: int, low: bool) -> None:
        """Refuse a call of so many rows that even an empty queue of this dispatcher would not take."""
        probe = QueuedCall(self, rows, None)
        probe.low = low
        Scheduler(self.limits).put("", probe, 0.0)

    def recheck(self, call: QueuedCall) -> None:
        """Check whether a batch is due, and whether a call was forgotten; called at a caller's alarm, and now and then."""
        with lock:
            self._begin_change()
            now = self.clock.now()
            woken = self._dispatch(now, call)
            call.set_alarm(self.scheduler, now)
            if self._workers is not None:
                woken += self._workers.replace_dead()
            self._is_broken = False
        wake_each(woken)

    # --- callers and threads that were interrupted ---

    def _begin_change(self) -> None:
        """Begin a change of the queues, which ends when `_is_broken` is False again."""
        if self._is_broken:
            self._repair()
        self._is_broken = True

    def forget(self, call: QueuedCall) -> list[Any]:
        """Take a departed caller out of its queue and of the runs that it had to do; return the tickets to wake."""
        self._begin_change()
        call.has_departed = True
        # The call may be in a cycle: it must not keep a result whose gradient others wait for.
        call.value = call.answers = None
        call.end_inside()
        for task in call.tasks():
            self.scheduler.remove(task)
        self._leave(call)
        woken: list[Any] = []
        call.jobs = None
        for run in list(self._runs):
            if run.runner is call and not run.is_begun:
                run.batch.has_departed = True
                woken += self._assign(run) if run.done is None else self._drop(run)
        # The caller may have been interrupted when it was about to wake others.
        woken += [run.runner for run in self._runs if run.runner is not None and not run.is_begun]
        if self._workers is not None:
            woken += self._workers.replace_dead()
        woken += self._dispatch(self.clock.now(), None)
        self._is_broken = False
        return woken

    def abort(self, run: Run) -> list[Any]:
        """End a run whose thread was ended, under the lock: its callers get an error; return the tickets to wake."""
        if self._is_broken:
            self._repair()
        if run not in self._runs:
            return []
        self._is_broken = True
        woken: list[Any] = []
        if run.done is not None:
            woken += self._drop(run)
        elif run.runner is not None:  # a task's: it gets the problem, and the others are served without its rows
            assert run.problem is not None
            run.runner.reject(run.problem)
            run.runner.has_departed = run.batch.has_departed = True
            self._leave(run.runner)
            woken += [run.runner, *self._assign(run)]
        else:
            answers: list[Any] = [thread_ended(run.problem) for _ in run.batch.tasks]
            self._release(run, answer_all(run.batch, answers), self.clock.now())
            woken += self._drop(run)
        woken += self._dispatch(self.clock.now(), None) + self._end_idle_waits()
        self._is_broken = False
        return woken

    def _repair(self) -> None:
        """Rebuild the queues from the waiting calls after an exception interrupted a change of them."""
        for call in [call for call in self._calls if call.done or call.has_departed]:
            del self._calls[call]
        for run in list(self._runs):
            if not run.is_assigned and run.done is None:
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

    # --- which caller or worker runs which batch ---

    def _new_run(self, batch: Batch) -> Run:
        run = Run(self, batch)
        self._runs[run] = None
        return run

    def _dispatch(self, now: float, me: QueuedCall | None) -> list[Any]:
        """Assign every batch that may run now; return the tickets to wake."""
        return self._assign_all(self.scheduler.take(now), now, me)

    def _assign_all(self, batch: Batch | None, now: float, me: QueuedCall | None) -> list[Any]:
        """Assign `batch` and every further batch that may run; return the tickets to wake."""
        woken: list[Any] = []
        while batch is not None:
            woken += self._assign(self._new_run(batch), me)
            batch = self.scheduler.take(now)
        if self.scheduler.moved:
            woken += self._reset_alarms(now)
        return woken

    def _assign(self, run: Run, me: QueuedCall | None = None) -> list[Any]:
        """Assign a run to the workers, unless I am its only caller; without workers, to `me` if I am one of its callers, else to a
        thread that waits for it. Drop it when all its callers have departed. Return the tickets to wake.

        Tasks of an event loop are not assigned the runs of others: their loop may be busy, or have stopped.
        """
        tasks = run.batch.tasks
        run.runner, run.is_assigned, run.is_begun, run.problem = None, False, False, None
        is_alone = len(tasks) == 1 and tasks[0] is me and not me.is_task
        is_own = is_alone and self._lone_batches >= self._enough_lone_batches
        if self._workers is not None and (not is_own or has_unkeyed_modes()):
            woken = self._workers.give(run)
            if woken is not None:
                run.is_assigned = True
                self.scheduler.let_join(run.batch)  # it cannot begin before the lock is free
                return woken
        if me is not None and (tasks[-1] is me or any(task.owner is me for task in tasks)):
            runner = me
        else:
            callers = [task.owner for task in reversed(tasks) if not (task.owner.has_departed or task.owner.done)]
            if not callers:
                self._release(run, [], self.clock.now())
                return self._drop(run)
            threads = [call for call in callers if call.waiter is None or call.waiter.loop is None]
            if not threads:
                run.is_assigned = True
                return workers.run_elsewhere(run) or []
            runner = next((call for call in threads if not call.jobs), threads[0])
        run.runner = runner
        runner.add_job(run)
        run.is_assigned = True
        return [] if runner is me else [runner]

    def _wake_next_runner(self, now: float) -> list[Any]:
        """Choose a caller of the next batch to check it when a run has ended; return the tickets to wake.

        The batch is not taken for that caller. The first caller to come runs it, and that may be the one that has just ended its
        run and calls again, with its own rows in the batch. Reserved for a thread that has yet to wake up, the batch would make
        all others wait for that thread.
        """
        if self._workers is None:
            for task in self.scheduler.ready(now):
                call = task.owner
                if not (call.has_departed or call.done) and (call.waiter is None or call.waiter.loop is None):
                    call.add_job(CheckJob(partial(self.recheck, call), is_short=True))
                    return [call]
        return self._dispatch(now, None)

    def _reset_alarms(self, now: float) -> list[Any]:
        """Set the alarms of callers whose batch has a new due time; return their tickets, to be woken."""
        calls = [task.owner for task in self.scheduler.moved]
        self.scheduler.moved = []
        for call in calls:
            call.set_alarm(self.scheduler, now)
        return calls

    # --- running ---

    def run(self, run: Run) -> None:
        """Process a batch, answer its callers, and assign the batches that may run next."""
        try:
            if not self._begin(run):
                return
            batch = run.batch
            observers = self.scope.observers  # those that come while the batch runs are not told: its times are unknown
            started = self.clock.now() if observers else 0.0
            is_inside = run.runner is not None and run.runner.thread != 0
            done = self._processor.run(batch) if is_inside else self._run_in_worker(batch)
            if batch.rest is not None:
                done = batch.rest.go_on(done, self._leave, is_inside)
            self._end(run, done)
            if run.runner is None and self._workers is not None and not run.is_on_loop:
                wake_and_wait(done, self.clock)
            else:
                wake_all(done)
            self._runs.pop(run, None)
        except BaseException:
            run.is_begun = False  # no thread processes it now
            raise
        if departed:
            remove_departed()
        if observers:
            self._processor.notify(observers, batch, started)
        batch.tasks, batch.error = [], None  # tasks refer to their batch: the cycle ends here

    def _begin(self, run: Run) -> bool:
        """Begin a run; return False if it need not be done: after an interruption its calls may be in other batches."""
        # A worker's batch: others may join it until it begins.
        if run.runner is None and self._workers is not None and not run.is_on_loop:
            with lock:
                if self._is_broken:
                    self._repair()
                if run not in self._runs:
                    return False
                run.is_begun = True
                self.scheduler.end_joining(run.batch)
                self._lone_batches = self._lone_batches + 1 if len(run.batch.tasks) == 1 else 0
            return True
        run.is_begun = True
        return run in self._runs

    def _run_in_worker(self, batch: Batch) -> list[Ticket]:
        """Process a batch in a thread that is no caller's: a call from inside is marked as recursive."""
        if self._contains(innermost_call()):
            return self._processor.run(batch)
        mark = Ticket(self.clock)
        mark.dispatcher = self
        mark.begin_inside()
        try:
            return self._processor.run(batch)
        finally:
            mark.end_inside()

    def _end(self, run: Run, done: list[Ticket]) -> None:
        with lock:
            self._begin_change()
            now = self.last_used = self.clock.now()
            self._release(run, done, now)
            woken = self._wake_next_runner(now) if self.scheduler.waiting else []
            if self._idle_waits:
                woken += self._end_idle_waits()
            self._is_broken = False
        if woken:
            wake_each(woken)

    def _release(self, run: Run, done: list[Any], now: float) -> None:
        """Tell the scheduler that a run has ended; `done` are the tickets to wake, which wait no more."""
        run.done = done
        for call in done:
            self._leave(call)
        self.scheduler.release(run.batch, now)

    def _note_caller(self, call: QueuedCall) -> None:
        """Do nothing; called when a call has come, before it has its place in a queue."""

    def _leave(self, call: Any) -> bool:
        """Note that a call waits no more; return whether it did."""
        return self._calls.pop(call, None) is not None

    def _drop(self, run: Run) -> list[Any]:
        """Drop a run that has ended; return the tickets to wake."""
        self._runs.pop(run, None)
        return run.done or []

    # --- as a resource ---

    def sweep(self, now: float) -> float:
        """Drop queues that have been empty for a minute; return when the next one may be dropped."""
        if has_lock():
            return now + 1.0
        with lock:
            self._begin_change()
            when: float = self.scheduler.drop_idle(now)
            self._is_broken = False
            return when

    def is_empty(self) -> bool:
        return not (self._calls or self._runs)

    def stored(self) -> int:
        """Return the number of waiting tasks."""
        with lock:
            return self.scheduler.waiting

    def after_fork(self) -> None:
        """Forget all calls: the threads that waited here do not exist in this process."""
        self._reset()
