"""Any history of calls, departures, failures and time: everyone gets its rows or an error of its own, and every bound holds."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.callers import Caller

import weft
from weft.errors import CancelledError, DeadlineExceededError, InvalidArgumentError, UnavailableError


class Bad(ValueError):
    """What the function says of a call it does not take."""


class History:
    """The function of the machine: it takes time, keeps what it saw, and refuses batches with a bad row."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds
        self.runs = []  # (start, rows)
        self.inside = self.most = 0

    def __call__(self, x, key):
        self.runs.append((self.clock.now(), x[:, :2].tolist()))
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.seconds:
            self.clock.sleep(self.seconds)
        self.inside -= 1
        bad = [row for row in x if row[2]]
        if bad:
            raise Bad(f"call {bad[0][0]:g}")
        return {"twice": x * 2, "key": key}


class Made:
    """A call of the machine, and what is known of it."""

    def __init__(self, number, clock, policy, count, key, low, deadline, bad):
        self.number, self.clock, self.count = number, clock, count
        self.key, self.low, self.bad = key, low, bad
        self.x = np.array([[number, i, bad and i == 0] for i in range(count)], float).reshape(count, 3)
        self.arrived, self.deadline, self.ended = clock.now(), deadline or inf, inf
        self.is_cancelled = False
        self.request = None
        self.caller = Caller(self.run, policy, low, deadline)
        clock.start(self.caller)
        clock.settle()

    def run(self, policy, low, deadline):
        try:
            context = policy._context(deadline, "low" if low else "high")
            self.request = policy._submit(policy._request((self.x, self.key), {}, context))
            return self.request.wait()
        finally:
            self.ended = self.clock.now()

    def cancel(self):
        """Leave, as a task that is cancelled does; the thread is let go."""
        self.is_cancelled = True
        self.request.abandon()
        self.request.reject(CancelledError("by the machine"))
        self.request.wake()
        self.clock.settle()

    @property
    def is_waiting(self):
        return self.ended == inf  # its thread may live a moment longer than the clock knows of it


class Batching(RuleBasedStateMachine):
    """Calls on a simulated clock."""

    @initialize(
        most=st.integers(1, 6),
        fill=st.sampled_from(["idle", "least", "full"]),
        max_wait=st.sampled_from([0.25, 1.0]),
        max_queue=st.sampled_from([None, None, 0, 3, 8]),
        parallel=st.integers(1, 3),
        split=st.booleans(),
        seconds=st.sampled_from([0.0, 0.5, 2.0]),
        padded=st.booleans(),
    )
    def begin(self, most, fill, max_wait, max_queue, parallel, split, seconds, padded):
        self.clock = weft.SimulatedClock()
        self.scope = weft.scope(self.clock)
        self.scope.__enter__()
        self.model = History(self.clock, seconds)
        options = {"idle": {"min_batch_size": 1}, "least": {"min_batch_size": min(2, most)}, "full": {}}[fill]
        self.waits = fill == "full" or (fill == "least" and most > 1)
        self.most, self.max_wait, self.max_queue, self.parallel, self.split = most, max_wait, max_queue, parallel, split
        self.policy = weft.batched(
            self.model, max_batch_size=most, max_wait=max_wait, max_queue=max_queue, parallel=parallel, split=split,
            allowed_batch_sizes=[most] if padded else [], **options,
        )  # fmt: skip
        self.made = []

    # --- what happens ---

    @rule(
        count=st.integers(0, 9),
        key=st.sampled_from(["a", "b"]),
        low=st.booleans(),
        deadline=st.sampled_from([None, None, 0.3, 1.0, 2.5]),
    )
    def call(self, count, key, low, deadline):
        self.made.append(Made(len(self.made), self.clock, self.policy, count, key, low, deadline, bad=False))

    @precondition(lambda self: not any(call.bad and call.is_waiting for call in self.made))
    @rule(count=st.integers(1, 6), key=st.sampled_from(["a", "b"]), low=st.booleans())
    def call_badly(self, count, key, low):
        self.made.append(Made(len(self.made), self.clock, self.policy, count, key, low, None, bad=True))

    @precondition(lambda self: any(call.is_waiting for call in self.made))
    @rule(data=st.data())
    def cancel(self, data):
        data.draw(st.sampled_from([call for call in self.made if call.is_waiting])).cancel()

    @rule(seconds=st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    # --- what must hold ---

    @invariant()
    def bounds_hold(self):
        assert self.model.most <= self.parallel
        for _, rows in self.model.runs:
            assert len(rows) <= self.most
        scheduler = self.policy._dispatcher.scheduler
        if self.max_queue is not None and scheduler.waiting_rows > self.max_queue:  # a call that nothing was before
            tasks = [task for queue in scheduler.queues.values() for task in queue.tasks()]
            assert len({task.owner for task in tasks}) == 1
        if scheduler.waiting and scheduler.running < self.parallel:
            assert self.waits
            waiting = [call for call in self.made if call.is_waiting and not self.has_begun(call)]
            # Calls of low priority go with the others, also with those that have no rows.
            ahead = {call.key for call in self.made if call.is_waiting and not call.low}
            alone = [call for call in waiting if not (call.low and call.key in ahead)]
            assert all(self.clock.now() < call.arrived + self.max_wait + 1e-9 for call in alone)

    def has_begun(self, call):
        return not call.count or any(row[0] == call.number for _, rows in self.model.runs for row in rows)

    @invariant()
    def answers_are_right(self):
        for call in self.made:
            if not call.is_waiting:
                self.check(call)

    def check(self, call):
        error = call.caller.error
        if error is None:
            assert not call.bad
            assert not call.is_cancelled
            np.testing.assert_array_equal(call.caller.value["twice"], call.x * 2)
            assert call.caller.value["key"] == call.key
        elif isinstance(error, DeadlineExceededError):
            assert call.arrived + call.deadline <= call.ended + 1e-9
        elif isinstance(error, UnavailableError):
            assert self.max_queue is not None
            assert call.ended == call.arrived
            assert not (call.count and self.has_begun(call))
        elif isinstance(error, InvalidArgumentError):
            assert call.count > self.most
            assert not self.split
        elif isinstance(error, CancelledError):
            assert call.is_cancelled
        else:
            assert isinstance(error, Bad)
            assert call.bad
            assert str(error) == f"call {call.number}"

    @invariant()
    def nobody_waits_past_its_deadline(self):
        for call in self.made:
            if call.is_waiting and call.deadline < inf:
                running = self.has_begun(call)  # whoever runs the batch returns when the run ends
                assert running or self.clock.now() < call.arrived + call.deadline + 1e-9

    def teardown(self):
        if not hasattr(self, "policy"):
            return
        try:
            self.clock.run_out()
            for call in self.made:
                call.caller.end()
            self.bounds_hold()
            self.answers_are_right()
            self.everyone_had_its_rows_in_order()
            seen = self.policy.statistics()
            assert (seen.waiting, seen.running, self.policy._dispatcher.scheduler.waiting_rows) == (0, 0, 0)
        finally:
            self.scope.__exit__(None, None, None)

    def everyone_had_its_rows_in_order(self):
        """Rows stand together in their batch, and where nothing failed none ran twice."""
        bad = {call.number for call in self.made if call.bad}
        apart = {row[0] for _, rows in self.model.runs if bad & {row[0] for row in rows} for row in rows}
        times = {}
        for _, rows in self.model.runs:
            real = [tuple(row) for i, row in enumerate(rows) if row not in rows[:i]]  # without padding
            for row in real:
                times[row] = times.get(row, 0) + 1
            numbers = [row[0] for row in real]
            assert [n for i, n in enumerate(numbers) if n != numbers[i - 1] or i == 0] == list(dict.fromkeys(numbers))
        for call in self.made:
            if call.caller.error is None and call.number not in apart:
                assert all(times.get((float(call.number), float(i)), 0) == 1 for i in range(call.count))


TestBatching = Batching.TestCase
