"""How a task of an event loop waits on a ticket. This file alone uses the protocol between asyncio's tasks and futures."""

from __future__ import annotations

import asyncio
from _thread import get_ident
from asyncio import _get_running_loop, get_running_loop
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from ..core.fork import on_fork_in_child
from ..core.lock import lock
from ..core.scope import Scope
from ..core.ticket import Job, Ticket, wake_each
from .batch_run import Run
from .workers import run_elsewhere


class TaskWaiter:
    """What a task awaits until a call is done; the task then takes its `outcome`. Long jobs of the call run in a worker.

    It is its own iterator, and the future on which its task sleeps. A future of asyncio's has its loop call the task by a handle
    of its own; the tasks of a batch are called by one handle together (see `LoopInbox`). The row "no-op, 64 tasks" of
    `benchmarks/batched.py` needs that.
    """

    def __init__(self, ticket: Ticket, loop: Any = None) -> None:
        self._ticket: Ticket | None = ticket
        self.loop: Any = loop  # known when the task sleeps
        self._is_started = False  # whether the call is in its queue
        self._is_attached = False  # whether the ticket has this waiter
        self._resume: Callable[[Any], object] | None = None  # the task's next step, while it sleeps
        self._context: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancelled: tuple[Any, ...] | None = None  # the arguments of the CancelledError, if it was cancelled
        self._asyncio_future_blocking = False  # tells a task that this is a future

    def __await__(self) -> Any:
        return self

    def __next__(self) -> TaskWaiter:
        ticket = self._ticket
        assert ticket is not None
        if self._must_sleep(ticket):
            return self
        raise StopIteration  # compiled, it costs no exception outside a `try`

    def _must_sleep(self, ticket: Ticket) -> bool:
        """Do the jobs there are; return whether the task must sleep because the call is not done."""
        try:
            if not self._is_started:
                self._is_started = True
                ticket.enter()
                ticket.end_inside()  # the thread of the loop is free for other calls
            if self._is_attached:
                self._check_alarm(ticket)
            while not ticket.done:
                if ticket.jobs:
                    self._do_job(ticket)
                elif not self._is_attached:
                    if self.loop is None:
                        self.loop = running_loop().loop
                    self._is_attached = True
                    ticket.waiter = self
                else:
                    if ticket.alarm < inf:
                        self._set_timer(ticket)
                    self._asyncio_future_blocking = True
                    return True
        except BaseException:
            self._give_up(ticket)
            raise
        self._ticket = None  # it refers to this waiter
        return False

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> TaskWaiter:
        """Give the call up: the task is cancelled, or its coroutine closed."""
        if self._ticket is not None:
            self._give_up(self._ticket)
        raise kind if value is None else value

    def close(self) -> None:
        """Give the call up: the coroutine is closed."""
        if self._ticket is not None:
            self._give_up(self._ticket)

    def _give_up(self, ticket: Ticket) -> None:
        self._ticket = None
        if self._timer is not None:
            self._timer.cancel()
        ticket.abandon()

    def _check_alarm(self, ticket: Ticket) -> None:
        """After a sleep, run `on_alarm` if it is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not (ticket.done or ticket.jobs) and ticket.alarm < inf and ticket.clock.now() >= ticket.alarm:
            ticket.on_alarm()

    def _set_timer(self, ticket: Ticket) -> None:
        """Make sure that the task is woken at the time `alarm`."""
        if ticket.sweeper is not None:
            inbox_of(self.loop).sweep_by(ticket.sweeper, ticket.alarm)
        elif ticket.needs_timer(self.loop):
            self._timer = self.loop.call_later(max(0.0, ticket.alarm - ticket.clock.now()), self.wake)

    def _do_job(self, ticket: Ticket) -> None:
        """Do the next job, in a worker if it is long; its end wakes this call."""
        jobs = ticket.jobs
        assert jobs is not None
        job = jobs[0]
        if job.is_short():
            job.run()
        else:
            _run_in_worker(job)
        jobs.pop(0)

    # --- the methods of a future that a task uses ---

    def get_loop(self) -> Any:
        """Return the loop in which the task runs."""
        return self.loop

    def add_done_callback(self, resume: Callable[[Any], object], *, context: Any) -> None:
        """Keep the next step of the task, which sleeps now."""
        self._resume, self._context = resume, context

    def result(self) -> None:
        """Raise CancelledError if the task was cancelled."""
        if self._cancelled is not None:
            raise asyncio.CancelledError(*self._cancelled)

    def cancel(self, msg: Any = None) -> bool:
        """Wake the task to be cancelled; return whether it sleeps."""
        if self._resume is None:
            return False
        self._cancelled = () if msg is None else (msg,)
        self.loop.call_soon(self.wake)
        return True

    # --- how it is woken ---

    def release(self) -> None:
        """Wake the task, from any thread."""
        inbox_of(self.loop).post([self])

    @staticmethod
    def release_all(waiters: list[TaskWaiter]) -> None:
        """Wake tasks, from any thread; those of one loop together."""
        while waiters:
            loop = waiters[0].loop
            others = [waiter for waiter in waiters if waiter.loop is not loop]
            inbox_of(loop).post([waiter for waiter in waiters if waiter.loop is loop] if others else waiters)
            waiters = others

    def wake_next(self) -> None:
        """Do nothing: tasks are woken together."""

    def wake(self, future: Any = None) -> None:
        """Run the next step of the task now; called in its loop, outside any task.

        The task asks a future for its result: `future` if it is given, unless the task was cancelled. A future of asyncio's own
        answers faster than this object.
        """
        resume = self._resume
        if resume is not None:
            self._resume = None
            self._context.run(resume, self if future is None or self._cancelled is not None else future)


class CallbackWaiter(TaskWaiter):
    """Calls `callback()` in the loop `loop` once a call is done, without a task; the callback takes the `outcome` of the ticket.

    The rows of `benchmarks/serve.py` need it: a task costs more than the call.
    """

    def __init__(self, ticket: Ticket, loop: Any, callback: Callable[[], object]) -> None:
        TaskWaiter.__init__(self, ticket, loop)
        self._callback: Callable[[], object] | None = callback

    def wake(self, future: Any = None) -> None:
        """Look whether the call is done; called in the loop, first by the caller itself."""
        ticket = self._ticket
        if ticket is None:  # it was given up
            return
        try:
            if self._must_sleep(ticket):
                return
        except Exception as error:  # the call was given up
            ticket.reject(error)
        callback, self._callback = self._callback, None  # it refers to the ticket, which refers to this waiter
        if callback is not None:
            callback()

    def waits(self) -> bool:
        """Return whether no batch has the call yet."""
        call: Any = self._ticket
        return call is not None and bool(call.is_waiting())

    def close(self) -> None:
        """Give the call up."""
        self._callback = None
        TaskWaiter.close(self)


def _run_in_worker(job: Job) -> None:
    """Do a task's job in a worker.

    The loop's own executor would not do: its threads may all be waiting for the batch that the job runs.
    """
    with lock:
        woken = run_elsewhere(job)
        if woken is not None and isinstance(job, Run):
            job.is_begun = True  # if the task is cancelled, the run goes on
    if woken is None:
        job.run()
    wake_each(woken or [])


class LoopInbox:
    """What one loop has to do: batches to run, and tasks to wake. The loop is called once for all that is posted together.

    There is no lock: a finalizer may post in the middle of these lines.
    """

    def __init__(self) -> None:
        self._turns: dict[Any, None] = {}
        self._waiters: deque[TaskWaiter] = deque()
        self._is_called = False
        self._sweeps: dict[Scope, tuple[float, asyncio.TimerHandle]] = {}

    def post(self, waiters: list[TaskWaiter]) -> None:
        """Wake tasks in their loop."""
        self._waiters.extend(waiters)
        self._call(waiters[0].loop)

    def post_turn(self, turn: Any) -> None:
        """Have the loop `run` something before it wakes tasks, such as a `loop_dispatcher.LoopTurn`."""
        self._turns[turn] = None
        self._call(turn.loop)

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_called:
            return
        try:
            self._is_called = True  # two threads may call the loop at once: the second call finds nothing to do
            (loop.call_soon if loop is _get_running_loop() else loop.call_soon_threadsafe)(self._deliver)
        except RuntimeError:  # the loop is closed, and its tasks with it
            self._take()
            for turn in list(self._turns):
                if self._turns.pop(turn, turn) is None:  # else another thread has it
                    turn.drop()
        except BaseException:
            self._is_called = False  # the loop may not have been called: the next post calls it
            raise

    def _take(self) -> list[TaskWaiter]:
        self._is_called = False  # first: a post from now on calls the loop again
        waiters: list[TaskWaiter] = []
        while self._waiters:
            waiters.append(self._waiters.popleft())
        return waiters

    def _deliver(self) -> None:
        """Run batches, and wake the tasks that are posted now; what is posted meanwhile comes after other work of the loop."""
        global _delivering
        waiters: list[TaskWaiter] = []
        try:
            if self._turns:
                self._run_turns()  # the tasks that it answers are woken below
            waiters = self._take()
            if self._turns:
                self._call(get_running_loop())
            running = _delivering = RunningLoop()
            future: asyncio.Future[None] | None = None
            if len(waiters) > 1:
                future = asyncio.Future(loop=running.loop)
                future.set_result(None)
            waiters.reverse()
            while waiters:
                waiter = waiters.pop()
                waiter.wake(future)
        except BaseException:  # it ends the program: if the loop goes on, it does the rest
            self._waiters.extend(waiters[::-1])
            self._is_called = False
            if self._waiters or self._turns:
                self._call(get_running_loop())
            raise
        finally:
            _delivering = None

    def _run_turns(self) -> None:
        """Do each turn that is posted once, also those that another one posts."""
        done: dict[Any, None] = {}
        turns = list(self._turns)
        try:
            while turns:
                for turn in turns:
                    done[turn] = None
                    self._turns.pop(turn, None)  # first: it may be posted again, for later
                    turn.run()
                turns = [turn for turn in list(self._turns) if turn not in done]
        except BaseException:
            self._turns.update(done)  # the loop looks again
            raise

    def sweep_by(self, scope: Scope, when: float) -> None:
        """Sweep `scope` at the time `when`, in the running loop; an earlier sweep plans the later ones."""
        planned = self._sweeps.get(scope)
        if planned is not None:
            if planned[0] <= when:
                return
            planned[1].cancel()
        loop = get_running_loop()
        timer = loop.call_later(max(0.0, when - scope.clock.now()), self._sweep, scope)
        self._sweeps[scope] = when, timer

    def _sweep(self, scope: Scope) -> None:
        del self._sweeps[scope]
        if scope.clock.now() >= scope.next_expiry:
            scope.sweep()
        if scope.next_expiry < inf:
            self.sweep_by(scope, scope.next_expiry)


class RunningLoop:
    """Where a task runs: the number of its thread, and its loop."""

    __slots__ = ("ident", "loop")

    def __init__(self) -> None:
        self.ident, self.loop = get_ident(), get_running_loop()


_delivering: RunningLoop | None = None  # the loop that wakes tasks now


def running_loop() -> RunningLoop:
    """Return where the calling task runs.

    Tasks that are woken together share one object, for the row "no-op, 64 tasks" of `benchmarks/batched.py`.
    """
    found = _delivering
    return found if found is not None and found.ident == get_ident() else RunningLoop()


_inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopInbox] = WeakKeyDictionary()


def inbox_of(loop: asyncio.AbstractEventLoop) -> LoopInbox:
    """Return the inbox of a loop."""
    found = _inboxes.get(loop)
    if found is None:
        _forget_closed_loops()
        found = _inboxes.setdefault(loop, LoopInbox())  # atomic: all threads get the first
    return found


def _forget_closed_loops() -> None:
    """Drop the inboxes of loops that were closed before they did what was posted: that refers to its loop."""
    for reference in _inboxes.keyrefs():
        loop = reference()
        if loop is not None and loop.is_closed():
            _inboxes.pop(loop, None)


def _after_fork_in_child() -> None:
    """Forget the loops: their threads do not exist in this process."""
    global _inboxes, _delivering
    _inboxes, _delivering = WeakKeyDictionary(), None


on_fork_in_child(_after_fork_in_child)
