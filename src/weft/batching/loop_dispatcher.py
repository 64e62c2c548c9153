"""Batches of tasks that run in their event loop, in place of a worker: the option `on_loop`.

A task's call waits in its queue until its loop has made all calls of its present turn; then the loop takes one batch and runs it. A
batch that was taken begins at once, so nobody waits for a loop that is busy or has stopped: a call of a thread takes what waits,
also the calls of tasks, for a worker.
"""

from __future__ import annotations

import logging
from typing import Any

from ..core.interrupts import is_from_signal
from ..core.lock import lock
from ..core.ticket import Ticket, wake_each
from .batch_run import Run
from .call import QueuedCall
from .dispatcher import Dispatcher
from .modes import has_unkeyed_modes
from .queue_table import IDLE_QUEUE_SECONDS
from .tasks import inbox_of


class LoopTurn:
    """A look of an event loop for a batch that it can run."""

    def __init__(self, dispatcher: LoopDispatcher, loop: Any) -> None:
        self.dispatcher, self.loop = dispatcher, loop
        self.taken: Run | None = None  # the batch that it runs
        self._inbox = inbox_of(loop)

    def wake(self) -> None:
        """Have the loop look, from any thread."""
        self._inbox.post_turn(self)

    def run(self) -> None:
        """Look now; called in the loop, outside any task."""
        try:
            self.dispatcher.take_in_loop(self)
            if self.taken is not None:
                self.taken.run()
        except BaseException as problem:
            if self.taken is not None:
                self.taken.abort(problem)  # as a worker does
            self.wake()
            if is_from_signal(problem):
                raise
            logging.getLogger("weft").debug("a batch ended with an exception", exc_info=problem)
        finally:
            self.taken = None

    def drop(self) -> None:
        """Forget the loop: it is closed."""
        self.dispatcher.drop_turn(self)


class LoopDispatcher(Dispatcher):
    """A dispatcher whose batches run in the event loops of its callers, or in a worker where threads wait."""

    def _reset(self) -> None:
        Dispatcher._reset(self)
        #: By loop, those that look for a batch: at their next turn, or when the batch that runs has ended.
        self._turns: dict[Any, LoopTurn] = {}
        #: How many calls each loop has made that have not ended; None is for threads.
        self._callers: dict[Any, int] = {}

    def _note_caller(self, call: QueuedCall) -> None:
        self._callers[call.loop] = self._callers.get(call.loop, 0) + 1

    def _leave(self, call: Any) -> bool:
        if not Dispatcher._leave(self, call):
            return False
        left = self._callers[call.loop] - 1
        if left:
            self._callers[call.loop] = left
        else:
            del self._callers[call.loop]
        return True

    def _repair(self) -> None:
        Dispatcher._repair(self)
        self._callers = {}
        for call in self._calls:
            self._note_caller(call)

    def _take(self, call: QueuedCall, now: float, woken: list[Any]) -> Run | None:
        if call.loop is None or has_unkeyed_modes():
            return Dispatcher._take(self, call, now, woken)
        self.scope.expires(now + IDLE_QUEUE_SECONDS)
        if call.is_alone and self.scheduler.waiting == 1:  # benchmark row "echo, json, 1 connection"
            batch = self.scheduler.take(now)
            if batch is not None:
                run = self._new_run(batch)
                run.runner, run.is_assigned = call, True
                return run
        if call.loop not in self._turns:
            woken.append(self._turn(call.loop))
        call.set_alarm(self.scheduler, now)
        return None

    def _turn(self, loop: Any) -> LoopTurn:
        """Return the turn of a loop, which looks from now on."""
        found = self._turns.get(loop)
        if found is None:
            found = self._turns[loop] = LoopTurn(self, loop)
        return found

    def _dispatch(self, now: float, me: QueuedCall | None) -> list[Any]:
        """As `Dispatcher._dispatch`; if no thread waits, have the loops look in place of workers."""
        if self._why_closed is not None or not self._have_turns():
            return Dispatcher._dispatch(self, now, me)
        woken: list[Any] = list(self._turns.values())
        if self.scheduler.moved:
            woken += self._reset_alarms(now)
        return woken

    def _have_turns(self) -> bool:
        """Have the loops of all calls look: some may be busy, or have stopped. Return False if none can, or a thread waits."""
        if None in self._callers:
            return False
        for loop in self._callers:
            if not loop.is_closed():
                self._turn(loop)
        return len(self._turns) > 0

    def _release(self, run: Run, done: list[Ticket], now: float) -> None:
        Dispatcher._release(self, run, done, now)
        if not self.scheduler.waiting:
            self._turns.clear()

    def forget(self, call: QueuedCall) -> list[Any]:
        """As `Dispatcher.forget`; a worker runs what is ready if the caller was a thread, or a loop without other calls.

        It may have been refused because the queue is full of calls whose loop has stopped.
        """
        woken = Dispatcher.forget(self, call)
        if call.loop not in self._turns:
            self._begin_change()
            woken += Dispatcher._dispatch(self, self.clock.now(), None)
            self._is_broken = False
        return woken

    def take_in_loop(self, turn: LoopTurn) -> None:
        """Take the next batch for a loop, if one may run now; called in the loop, which runs it at once."""
        with lock:
            self._begin_change()
            now = self.clock.now()
            batch = self.scheduler.take(now)
            if batch is not None:
                turn.taken = run = self._new_run(batch)
                run.is_assigned = run.is_on_loop = True
            elif not self.scheduler.running:  # else the end of what runs wakes it
                self._turns.pop(turn.loop, None)
            woken = self._reset_alarms(now) if self.scheduler.moved else []
            self._is_broken = False
        if woken:
            wake_each(woken)

    def drop_turn(self, turn: LoopTurn) -> None:
        """Forget a loop that is closed: workers run the batches of its calls."""
        with lock:
            self._begin_change()
            self._turns.pop(turn.loop, None)
            woken = self._dispatch(self.clock.now(), None)
            self._is_broken = False
        wake_each(woken)
