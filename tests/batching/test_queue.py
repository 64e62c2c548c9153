"""The rules of batching, without threads: a model of the contract against the scheduler."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.queue_contract import MERGE, POLICIES, Call, Contract, Refused, span, spans

from weft.batching.queue import Limits, LowPriority
from weft.batching.scheduler import Scheduler

sizes = st.integers(1, 8)


@st.composite
def all_limits(draw):
    kind = draw(st.sampled_from(["plain", "adaptive", *POLICIES]))
    most = draw(st.integers(1, 10))
    split = kind == "adaptive" or draw(st.booleans())
    allowed = ()
    if draw(st.booleans()):
        allowed = tuple(sorted(draw(st.sets(st.integers(-1, most), max_size=4)) | {most}))
        if split and len(allowed) > 1 and allowed[-2] > 0 and draw(st.booleans()):
            allowed = allowed[:-1]
    low = None
    if kind in POLICIES:
        low = LowPriority(
            max_batch_size=draw(st.integers(1, 12)),
            timeout=draw(st.sampled_from([0.0, 0.5, 4.0])),
            max_enqueued=draw(st.sampled_from([0, 1, 2, 4, 4, 4])),
            allowed=tuple(sorted(draw(st.sets(st.integers(1, 12), max_size=2)))),
            policy=kind,
        )
    return Limits(
        threads=128 if kind == "adaptive" else draw(st.integers(1, 3)),
        max_batch_size=most,
        timeout=draw(st.sampled_from([0.0, 1.0, 2.5])),
        max_enqueued=draw(st.sampled_from([1, 2, 3, inf])),
        allowed=allowed,
        split=split,
        batch_down=kind != "adaptive" and bool(allowed) and draw(st.booleans()),
        adaptive=kind == "adaptive",
        low=low,
    )


class Scheduling(RuleBasedStateMachine):
    """Random callers, in any order, at any time: the scheduler must do exactly what the contract says."""

    @initialize(limits=all_limits())
    def begin(self, limits):
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.contract = Contract(limits)
        self.now = 100.0
        self.calls = {}
        self.given = {}  # name -> spans handed out
        self.last = {}  # queue -> the last name handed out, by priority
        self.skipped = {}
        self.out = []
        self.alarms = {}  # task -> when its caller looks again

    def shape(self):
        """All that waits, in the scheduler."""
        return {
            key: (
                [list(batch) for b in q.closed for batch in self.batches(b)],
                [span(t) for t in q.open.tasks],
                [(since, span(t)) for t, since in q.low.items()],
            )
            for key, q in self.scheduler.queues.items()
        }

    def batches(self, closed):
        """The batches that a closed one will be: a task with the rows of several waits as one."""
        if self.limits.split and closed.rows > self.limits.target:
            return [[one] for one in spans(closed.tasks[0], self.limits.target)]
        return [[span(t) for t in closed.tasks]]

    def model_shape(self):
        return {
            key: ([b.spans for b in line.closed], line.open.spans, line.low)
            for key, line in self.contract.lines.items()
        }

    @rule(queue=st.sampled_from("abc"), rows=sizes, low=st.booleans())
    def put(self, queue, rows, low):
        call = Call(len(self.calls), rows, low)
        before, waiting = self.shape(), self.scheduler.waiting
        try:
            self.contract.put(queue, call.name, rows, low, self.now)
        except Refused as refusal:
            with pytest.raises(refusal.args[0]):
                self.scheduler.put(queue, call, self.now)
            assert (self.shape(), self.scheduler.waiting) == (before, waiting), "a refused put changes nothing"
            assert call.parts is None
        else:
            calm = self.scheduler.put(queue, call, self.now) is not None
            self.calls[call.name] = (queue, call)
            self.given[call.name] = []
            self.set_alarms(call.tasks())
            if calm:  # the promise that nothing is ready by this task
                assert queue not in self.contract.ready(self.now)

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 3.0]))
    def advance(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def remove(self, data):
        name = data.draw(st.sampled_from(sorted(self.calls)))
        _, call = self.calls[name]
        for task in call.tasks():
            ends = task.start + task.rows
            was_there = any(n == name and task.start <= at < ends for n, at, _ in self.waiting_spans())
            assert self.scheduler.remove(task) is was_there
        self.contract.remove(name)
        self.given.pop(name, None)

    def waiting_spans(self):
        for closed, opened, low in self.shape().values():
            for batch in (*closed, opened):
                yield from batch
            yield from (s for _, s in low)

    @rule()
    def take(self):
        ready = self.contract.ready(self.now)
        batch = self.scheduler.take(self.now)
        if batch is None:
            assert not ready, "something is ready and a slot is free"
            return
        key = self.calls[batch.tasks[0].owner.name][0]
        assert key in ready, "not ready, or no slot is free"
        if self.limits.adaptive:
            oldest = min(self.age(k) for k in ready)
            assert self.age(key) == oldest
        wanted, allowed, opened = self.contract.take(key, self.now)
        assert [span(t) for t in batch.tasks] == wanted
        assert batch.rows == sum(s[2] for s in wanted)
        assert batch.opened == opened
        self.check_size(batch, allowed)
        self.check_turns(key, ready)
        self.check_order(key, batch)
        self.out.append(batch)

    def age(self, key):
        line = self.contract.lines[key]
        return line.closed[0].opened if line.closed else line.open.opened

    def check_size(self, batch, allowed):
        low = self.limits.low
        only_low = low and all(t.owner.low for t in batch.tasks)
        most = low.target if only_low and low.policy != MERGE else self.scheduler.target
        assert 0 < batch.rows <= most
        assert batch.padded == next((size for size in allowed if size >= batch.rows), batch.rows)
        assert batch.reason in ("full", "overflow", "timeout")

    def check_turns(self, key, ready):
        """No queue that stays ready is passed over twice for the same other one."""
        if self.limits.adaptive:
            return
        self.skipped.pop(key, None)
        for other in ready:
            if other != key:
                passed = self.skipped.setdefault(other, [])
                assert key not in passed, f"{key} had two turns while {other} was ready"
                passed.append(key)
        for other in list(self.skipped):
            if other not in ready:
                del self.skipped[other]

    def check_order(self, key, batch):
        for task in batch.tasks:
            name = task.owner.name
            at = (name, task.start)
            priority = (key, task.owner.low and self.limits.low is not None)
            assert self.last.get(priority, (-1, 0)) < at, "reordered or duplicated within a queue"
            self.last[priority] = at
            if name in self.given:
                self.given[name].append(span(task))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def release(self, data):
        batch = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.scheduler.release(batch, self.now)
        self.contract.release(batch.opened, self.now)

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "scheduler"):
            return
        waiting = list(self.waiting_spans())
        assert self.shape() == self.model_shape()
        assert self.scheduler.waiting == sum(len(q.tasks()) for q in self.scheduler.queues.values())
        assert self.scheduler.waiting_rows == sum(rows for _, _, rows in waiting)
        assert self.scheduler.running == len(self.out) == self.contract.running
        for name, given in self.given.items():
            rest = sorted(s for s in waiting if s[0] == name)
            at = 0
            for _, start, rows in [*given, *rest]:
                assert start == at
                at += rows
            assert at == self.calls[name][1].rows

    def set_alarms(self, tasks):
        """What callers do when they have come, were told that something moved, or were called by their alarm."""
        for task in tasks:
            when, is_mine = self.scheduler.due(task)
            self.alarms[task] = when if is_mine else inf

    @invariant()
    def someone_watches(self):
        """For all that waits and is not yet due there is one who looks in time, and knows that it is its part."""
        if not hasattr(self, "scheduler"):
            return
        self.set_alarms(self.scheduler.moved)
        self.scheduler.moved = []
        self.set_alarms([task for task, when in self.alarms.items() if when <= self.now])
        for key, queue in self.scheduler.queues.items():
            due = self.contract.due(self.contract.lines[key])
            if not queue.closed and self.now < due < inf:
                tasks = [*queue.open.tasks, *queue.low]
                assert any(self.now < self.alarms.get(t, inf) <= due for t in tasks)


TestScheduling = Scheduling.TestCase


@pytest.mark.slow
class TestSchedulingLonger(Scheduling.TestCase):
    settings = settings(max_examples=2000)


@pytest.mark.parametrize("split", [False, True])
def test_whole_calls_join_a_batch_that_was_taken(split):
    scheduler = Scheduler(Limits(threads=1, max_batch_size=4, timeout=0.0, split=split))
    scheduler.put("", Call(1, 1), 0.0)
    batch = scheduler.take(0.0)
    scheduler.let_join(batch)
    assert scheduler.put("", Call(2, 2), 0.0) is batch
    assert scheduler.put("", Call(3, 2), 0.0) is not batch  # only a part of it would fit
    assert scheduler.put("", Call(4, 1), 0.0) is not batch  # others came before it
    assert (batch.rows, scheduler.waiting_rows) == (3, 3)
