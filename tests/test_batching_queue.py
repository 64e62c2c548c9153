"""The rules of batching, without threads: a model of the contract against the scheduler, and TensorFlow's own scenarios."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.batching.queue import IDLE_QUEUE_SECONDS, IDLE_QUEUES, Limits, LowPriority, Pace, Scheduler, Task
from weft.errors import InvalidArgumentError, UnavailableError

PAD_TO_MAX = "low_priority_padding_with_max_batch_size"
PAD_TO_NEXT = "low_priority_padding_with_next_allowed_batch_size"
ISOLATION = "priority_isolation"
MERGE = "priority_merge"
POLICIES = [PAD_TO_MAX, PAD_TO_NEXT, ISOLATION, MERGE]


class Call:
    """A caller: its own task, or an owner of slices. `name` tells it from the others."""

    def __init__(self, name, rows, low=False):
        self.name, self.rows, self.low = name, rows, low
        self.start = 0
        self.batch = self.queue = None
        self.slices = None

    @property
    def owner(self):
        return self

    def piece(self, start, rows):
        kept = [t for t in self.slices or [] if t.start != start]
        self.slices = [*kept, Task(self, start, rows)]
        return self.slices[-1]


def span(task):
    """A task as the model writes it: whose rows, from where, how many."""
    return task.owner.name, task.start, task.rows


# --- the contract, as plainly as it can be written ---


class Waiting:
    """A batch of the model that has not been handed out."""

    def __init__(self, opened=inf):
        self.spans = []
        self.opened = opened

    @property
    def rows(self):
        return sum(rows for _, _, rows in self.spans)


class Line:
    """A queue of the model: closed batches, the open one, low-priority tasks with their times of arrival."""

    def __init__(self):
        self.closed = []
        self.open = Waiting()
        self.low = []

    @property
    def low_rows(self):
        return sum(rows for _, (_, _, rows) in self.low)


class Refused(Exception):
    """The model says that a call must be refused, and how."""


class Contract:
    """What the specification says of a scheduler with these limits."""

    def __init__(self, limits):
        self.limits = limits
        self.target = limits.allowed[-1] if limits.split and limits.allowed else limits.max_batch_size
        self.lines = {}
        self.running = 0
        self.pace = Pace()

    # admission and placement

    def put(self, key, name, rows, low, now):
        line = self.lines.get(key) or Line()
        if rows > self.limits.max_batch_size:
            raise Refused(InvalidArgumentError)
        if low and self.limits.low:
            self.put_low(line, (name, 0, rows), now)
        else:
            self.admit(line, rows)
            self.place(line, name, rows, now)
        self.lines[key] = line

    def put_low(self, line, span, now):
        most = self.limits.low.target
        if span[2] > most or line.low_rows + span[2] > most * self.limits.low.max_enqueued:
            raise Refused(UnavailableError)
        line.low.append((now, span))

    def admit(self, line, rows):
        batches = len(line.closed) + 1  # the open one counts, empty or not
        gap = self.target - line.open.rows
        if self.limits.split:
            if rows > (self.limits.max_enqueued - batches) * self.target + gap:
                raise Refused(UnavailableError)
        elif rows > gap and batches >= self.limits.max_enqueued:
            raise Refused(UnavailableError)

    def place(self, line, name, rows, now):
        gap = self.target - line.open.rows
        if rows <= gap:
            return self.append(line, (name, 0, rows), now)
        if not self.limits.split:
            self.close(line)
            return self.append(line, (name, 0, rows), now)
        start = 0
        while start < rows:
            if line.open.rows == self.target:
                self.close(line)
            size = min(self.target - line.open.rows, rows - start)
            self.append(line, (name, start, size), now)
            start += size
        return None

    @staticmethod
    def append(line, span, now):
        if not line.open.spans:
            line.open.opened = now
        line.open.spans.append(span)

    @staticmethod
    def close(line):
        line.closed.append(line.open)
        line.open = Waiting()

    def remove(self, name):
        for line in self.lines.values():
            for batch in (*line.closed, line.open):
                batch.spans = [s for s in batch.spans if s[0] != name]
            line.closed = [b for b in line.closed if b.spans]
            line.low = [entry for entry in line.low if entry[1][0] != name]
            if not line.open.spans:
                line.open = Waiting()

    # readiness

    def due(self, line):
        """When the open batch, with what low-priority tasks go with it, stops waiting; inf when there is nothing."""
        low = self.limits.low
        if low and low.policy == MERGE and line.low:
            oldest = min(line.low[0][0], line.open.opened)
            return oldest + (self.limits.timeout if line.open.spans else low.timeout)
        if line.open.spans:
            return line.open.opened + self.limits.timeout
        return line.low[0][0] + low.timeout if low and line.low else inf

    def is_full(self, line):
        low = self.limits.low
        if low and low.policy == MERGE:
            return line.open.rows + line.low_rows >= self.target
        if line.open.spans:
            return line.open.rows >= self.target
        return bool(low) and line.low_rows >= low.target

    def is_ready(self, line, now):
        if line.closed:
            return True
        return bool(line.open.spans or line.low) and (self.is_full(line) or now >= self.due(line))

    def may_run(self, line):
        if not self.limits.adaptive:
            return self.running < self.limits.threads
        is_full = bool(line.closed) or self.is_full(line)
        return self.running < (self.limits.threads if is_full else self.pace.in_flight)

    def ready(self, now):
        return [key for key, line in self.lines.items() if self.is_ready(line, now) and self.may_run(line)]

    # what is handed out

    def take(self, key, now):
        """The spans of the next batch of a queue, its allowed sizes, and when it was opened."""
        line, low = self.lines[key], self.limits.low
        self.running += 1
        if line.closed:
            batch = line.closed.pop(0)
        elif not line.open.spans:
            return self.take_low(line)
        else:
            by_timeout = not self.is_full(line)
            batch, line.open = line.open, Waiting()
            if by_timeout and self.limits.batch_down:
                self.batch_down(line, batch, now)
        if low:
            self.fill(line, batch.spans, self.room(batch), low.policy == MERGE and self.limits.split)
        return batch.spans, self.limits.allowed, batch.opened

    def room(self, batch):
        """Up to how many rows low-priority tasks may fill a batch of the others."""
        policy = self.limits.low.policy
        if policy == PAD_TO_NEXT:
            return next((size for size in self.limits.allowed if size >= batch.rows), batch.rows)
        return 0 if policy == ISOLATION else self.target

    def take_low(self, line):
        low = self.limits.low
        opened, spans = line.low[0][0], []
        if low.policy == MERGE:
            self.fill(line, spans, self.target, self.limits.split)
        else:
            self.fill(line, spans, low.target, False)
        return spans, low.allowed, opened

    @staticmethod
    def fill(line, spans, most, cut):
        rows = sum(s[2] for s in spans)
        while line.low and rows < most:
            since, (name, start, size) = line.low[0]
            if size > most - rows and not cut:
                return
            line.low.pop(0)
            if size > most - rows:
                line.low.insert(0, (since, (name, start + most - rows, size - most + rows)))
                size = most - rows
            spans.append((name, start, size))
            rows += size

    def batch_down(self, line, batch, now):
        down = max((size for size in self.limits.allowed if 0 < size <= batch.rows), default=0)
        head, rest = [], list(batch.spans)
        while rest and sum(s[2] for s in head) < down:
            head.append(rest.pop(0))
        if rest and head and sum(s[2] for s in head) == down:
            line.open = Waiting(batch.opened + (now - batch.opened) * down / batch.rows)
            line.open.spans = rest
            batch.spans = head

    def release(self, opened, now):
        self.running -= 1
        self.pace.add(now - opened)


# --- the contract against the scheduler ---

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
                [[span(t) for t in b.tasks] for b in q.closed],
                [span(t) for t in q.open.tasks],
                [(since, span(t)) for since, t in q.low],
            )
            for key, q in self.scheduler.queues.items()
        }

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
            assert call.slices is None
        else:
            calm = self.scheduler.put(queue, call, self.now) is False
            self.calls[call.name] = (queue, call)
            self.given[call.name] = []
            self.set_alarms(call.slices or [call])
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
        for task in call.slices or [call]:
            was_there = any(span(task) == s for s in self.waiting_spans())
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
        spans, allowed, opened = self.contract.take(key, self.now)
        assert [span(t) for t in batch.tasks] == spans
        assert batch.rows == sum(s[2] for s in spans)
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
        assert self.scheduler.waiting == len(waiting)
        assert self.scheduler.running == len(self.out) == self.contract.running
        for name, spans in self.given.items():
            rest = sorted(s for s in waiting if s[0] == name)
            at = 0
            for _, start, rows in [*spans, *rest]:
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
                tasks = [*queue.open.tasks, *(t for _, t in queue.low)]
                assert any(self.now < self.alarms.get(t, inf) <= due for t in tasks)


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestSchedulingLonger(Scheduling.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=50, deadline=None)


# --- TensorFlow's own scenarios (shared_batch_scheduler_test.cc, batch_kernels_test.cc) ---


class Bench:
    """A scheduler under a hand-written scenario: calls are named by their order of arrival."""

    def __init__(self, threads=1, most=10, timeout=1.0, **more):
        self.scheduler = Scheduler(Limits(threads, most, timeout, **more))
        self.now = 0.0
        self.count = 0

    def put(self, *sizes, queue="q", low=False):
        for rows in sizes:
            self.scheduler.put(queue, Call(self.count, rows, low), self.now)
            self.count += 1
        return self

    def takes(self, at=None, hold=False):
        """The sizes in each batch that is handed out now."""
        self.now = self.now if at is None else at
        found = []
        while (batch := self.scheduler.take(self.now)) is not None:
            found.append([t.rows for t in batch.tasks])
            self.last = batch
            if hold:
                break
            self.scheduler.release(batch, self.now)
        return found


def low(most=10, timeout=5.0, enqueued=10, allowed=(), policy=PAD_TO_MAX):
    return LowPriority(most, timeout, enqueued, tuple(allowed), policy)


@pytest.mark.parametrize("split", [False, True])
class TestBothModes:
    def test_two_queues_keep_their_order(self, split):
        bench = Bench(split=split)
        bench.put(1, queue="a").put(2, queue="b").put(3, queue="a").put(4, queue="b").put(5, queue="c")
        assert bench.takes() == []
        assert bench.takes(at=1.0) == [[1, 3], [2, 4], [5]]

    def test_timeout_of_the_first_task(self, split):
        bench = Bench(split=split, timeout=10.0).put(1)
        assert bench.takes(at=9.0) == []
        bench.put(1)
        assert bench.takes(at=10.0) == [[1, 1]]

    def test_zero_timeout_runs_without_the_clock_moving(self, split):
        assert Bench(split=split, timeout=0.0).put(1).takes() == [[1]]

    def test_full_batch_at_once(self, split):
        bench = Bench(split=split).put(4, 6)
        assert bench.takes() == [[4, 6]]
        assert bench.takes(at=100.0) == [], "no empty batch is run"

    def test_unit_tasks_fill_every_batch_that_may_wait(self, split):
        bench = Bench(most=2, max_enqueued=3, split=split, timeout=0.0)
        bench.put(2).takes(hold=True)
        bench.put(*[1] * 6)
        with pytest.raises(UnavailableError):
            bench.put(1)
        bench.scheduler.release(bench.last, 0.0)
        assert bench.takes() == [[1, 1]] * 3

    def test_a_full_queue_does_not_block_another(self, split):
        bench = Bench(most=1, max_enqueued=1, split=split, timeout=0.0).put(1, queue="a")
        bench.takes(hold=True)
        bench.put(1, queue="a")
        with pytest.raises(UnavailableError):
            bench.put(1, queue="a")
        bench.put(1, queue="b")

    def test_a_backlog_does_not_starve_another_queue(self, split):
        bench = Bench(most=1, split=split).put(1, queue="a").put(1, queue="b")
        bench.put(1, 1, 1, queue="a")
        order = []
        while (batch := bench.scheduler.take(0.0)) is not None:
            order.append(batch.tasks[0].queue.key)
            bench.scheduler.release(batch, 0.0)
        assert order == ["a", "b", "a", "a", "a"]

    def test_while_all_slots_are_busy_the_open_batch_grows(self, split):
        bench = Bench(most=4, timeout=1.0, split=split).put(4)
        bench.takes(hold=True)
        bench.put(1)
        assert bench.takes(at=50.0) == []
        bench.put(1)
        bench.scheduler.release(bench.last, 50.0)
        assert bench.takes() == [[1, 1]]

    def test_batch_down_leaves_its_share_of_the_time(self, split):
        bench = Bench(most=8, timeout=3.0, allowed=(1, 2, 4, 8), batch_down=True, split=split).put(1, 1, 1)
        assert bench.takes(at=3.0) == [[1, 1]]
        assert bench.takes(at=4.9) == []
        assert bench.takes(at=5.0) == [[1]]

    @pytest.mark.parametrize(("down", "batches", "padded"), [(False, [[1] * 5], 8), (True, [[1] * 4], 4)])
    def test_five_of_allowed_four_and_eight(self, split, down, batches, padded):
        bench = Bench(most=8, allowed=(4, 8), batch_down=down, split=split).put(*[1] * 5)
        assert bench.takes(at=1.0) == batches
        assert bench.last.padded == padded
        if down:
            assert bench.takes(at=1.8) == [[1]]
            assert bench.last.padded == 4

    def test_batch_down_inside_a_task_pads_up(self, split):
        bench = Bench(most=8, allowed=(4, 8), batch_down=True, split=split).put(3, 3)
        assert bench.takes(at=1.0) == [[3, 3]]
        assert bench.last.padded == 8

    @pytest.mark.parametrize("policy", POLICIES)
    def test_low_task_that_is_too_large(self, split, policy):
        with pytest.raises(UnavailableError):
            Bench(low=low(most=3, policy=policy), split=split).put(4, low=True)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_low_queue_that_is_full(self, split, policy):
        bench = Bench(low=low(most=3, enqueued=2, policy=policy), most=20, split=split).put(3, 3, low=True)
        with pytest.raises(UnavailableError):
            bench.put(1, low=True)
        assert bench.scheduler.waiting == 2

    def test_without_limits_of_their_own_low_tasks_are_like_others(self, split):
        assert Bench(split=split).put(1, 2).put(3, low=True).takes(at=1.0) == [[1, 2, 3]]

    @pytest.mark.parametrize("policy", [PAD_TO_MAX, PAD_TO_NEXT, ISOLATION])
    def test_low_alone_when_full_or_timed_out(self, split, policy):
        bench = Bench(low=low(most=4, timeout=5.0, policy=policy), split=split).put(2, low=True)
        assert bench.takes(at=4.9) == []
        assert bench.takes(at=5.0) == [[2]]
        assert bench.put(2, 2, low=True).takes() == [[2, 2]]

    def test_low_alone_pads_to_the_low_sizes(self, split):
        bench = Bench(most=8, allowed=(8,), low=low(most=8, allowed=(4, 8), timeout=1.0), split=split)
        assert bench.put(1, 1, low=True).takes(at=1.0) == [[1, 1]]
        assert bench.last.padded == 4

    def test_low_waits_while_high_does(self, split):
        bench = Bench(low=low(timeout=0.5, policy=ISOLATION), split=split).put(1).put(2, low=True)
        assert bench.takes(at=0.9) == []
        assert bench.takes(at=1.0) == [[1], [2]]

    def test_high_is_padded_with_low_up_to_the_maximum(self, split):
        bench = Bench(low=low(), split=split).put(1, 3).put(3, 3, 3, low=True)
        assert bench.takes(at=1.0) == [[1, 3, 3, 3]]
        assert bench.scheduler.queues["q"].low_rows == 3

    def test_high_is_padded_with_what_low_there_is(self, split):
        assert Bench(low=low(), split=split).put(1, 3).put(2, low=True).takes(at=1.0) == [[1, 3, 2]]

    def test_high_is_padded_to_the_next_allowed_size(self, split):
        bench = Bench(allowed=(2, 8, 10), low=low(policy=PAD_TO_NEXT), split=split).put(1, 3).put(2, 2, 2, low=True)
        assert bench.takes(at=1.0) == [[1, 3, 2, 2]]

    def test_without_allowed_sizes_there_is_no_next(self, split):
        assert Bench(low=low(policy=PAD_TO_NEXT), split=split).put(1, 3).put(2, low=True).takes(at=1.0) == [[1, 3]]

    def test_isolation_makes_two_batches(self, split):
        bench = Bench(most=4, low=low(most=4, policy=ISOLATION), split=split).put(1, 3).put(2, 2, low=True)
        assert bench.takes() == [[1, 3], [2, 2]]

    def test_merge_low_alone(self, split):
        bench = Bench(low=low(timeout=5.0, policy=MERGE), split=split).put(2, low=True)
        assert bench.takes(at=4.9) == []
        assert bench.takes(at=5.0) == [[2]]
        assert bench.put(5, 5, low=True).takes() == [[5, 5]]

    def test_merge_mixed_at_the_timeout_of_the_oldest_high_first(self, split):
        bench = Bench(low=low(timeout=5.0, policy=MERGE), split=split).put(2, low=True)
        bench.now = 0.5
        bench.put(3)
        assert bench.takes(at=0.9) == []
        assert bench.takes(at=1.0) == [[3, 2]]

    def test_merge_mixed_and_full(self, split):
        assert Bench(low=low(policy=MERGE), split=split).put(4, low=True).put(6).takes() == [[6, 4]]

    def test_merge_overflow_is_cut_or_kept(self, split):
        bench = Bench(low=low(policy=MERGE), split=split).put(6).put(7, low=True)
        assert bench.takes() == ([[6, 4]] if split else [[6]])
        assert bench.takes(at=5.0) == ([[3]] if split else [[7]])

    def test_merge_high_that_leaves_gives_no_time_to_low(self, split):
        """A high task that is gone neither hurries nor delays the low ones."""
        bench = Bench(low=low(timeout=5.0, policy=MERGE), split=split)
        gone = Call("gone", 1)
        bench.scheduler.put("q", gone, 0.0)
        bench.now = 0.5
        bench.put(2, low=True)
        assert bench.scheduler.remove(gone)
        assert bench.takes(at=5.4) == []
        assert bench.takes(at=5.5) == [[2]]


class TestWithoutSplitting:
    def test_sizes(self):
        bench = Bench().put(3, 5, 3, 1, 6)
        assert bench.takes() == [[3, 5], [3, 1, 6]]

    def test_overflow_closes_the_one_before_and_starts_a_clock(self):
        bench = Bench(most=4, timeout=10.0).put(2)
        bench.now = 4.0
        bench.put(3)
        assert bench.takes() == [[2]]
        assert bench.takes(at=13.9) == []
        assert bench.takes(at=14.0) == [[3]]

    def test_a_small_task_never_fills_a_gap_left_behind(self):
        bench = Bench(most=4).put(3, 2, 1)
        assert bench.takes() == [[3]]
        assert bench.takes(at=1.0) == [[2, 1]]

    def test_what_fits_the_open_batch_is_taken_however_full_the_queue(self):
        bench = Bench(most=4, max_enqueued=1).put(3)
        with pytest.raises(UnavailableError):
            bench.put(2)
        assert bench.put(1).takes() == [[3, 1]]

    def test_a_refused_task_does_not_close_the_open_batch(self):
        bench = Bench(most=4, max_enqueued=1).put(3)
        with pytest.raises(UnavailableError):
            bench.put(2)
        assert bench.takes() == []

    def test_too_large(self):
        with pytest.raises(InvalidArgumentError):
            Bench(most=4).put(5)

    def test_a_refused_task_makes_no_queue(self):
        bench = Bench(most=4)
        with pytest.raises(InvalidArgumentError):
            bench.put(5, queue="new")
        assert bench.scheduler.queues == {}


class TestWithSplitting:
    def test_sizes(self):
        assert Bench(split=True).put(3, 5, 3, 1, 6, 1).takes() == [[3, 5, 2]]
        assert Bench(split=True, timeout=0.0).put(3, 5, 3, 1, 6, 1).takes() == [[3, 5, 2], [1, 1, 6, 1]]

    def test_a_task_is_cut_to_top_up_the_open_batch(self):
        bench = Bench(most=4, split=True).put(3, 3)
        assert bench.takes() == [[3, 1]]
        assert bench.takes(at=1.0) == [[2]]

    def test_middle_pieces_have_the_largest_allowed_size(self):
        bench = Bench(most=9, allowed=(1, 2), split=True).put(1, 8)
        assert bench.takes() == [[1, 1], [2], [2], [2]]
        assert bench.takes(at=1.0) == [[1]]

    def test_capacity_is_strict(self):
        bench = Bench(most=20, allowed=(2,), max_enqueued=3, split=True)
        with pytest.raises(UnavailableError):
            bench.put(7)
        bench.put(6)
        with pytest.raises(UnavailableError):
            bench.put(1)
        assert bench.takes() == [[2], [2], [2]]


class TestAdaptive:
    def test_full_batches_pass_the_limit(self):
        bench = Bench(threads=128, most=2, timeout=0.0, split=True, adaptive=True)
        bench.put(*[1, 1] * 10, queue="a")
        assert [bench.scheduler.take(0.0) is not None for _ in range(11)] == [True] * 10 + [False]

    def test_partial_batches_keep_to_it(self):
        bench = Bench(threads=128, most=9, timeout=0.0, split=True, adaptive=True)
        for queue in "abc":
            bench.put(1, queue=queue)
        held = [bench.scheduler.take(0.0) for _ in range(3)]
        assert [batch is not None for batch in held] == [True, True, False]
        bench.scheduler.release(held[0], 0.0)
        assert bench.scheduler.take(0.0) is not None

    def test_oldest_first(self):
        bench = Bench(threads=1, most=4, timeout=1.0, split=True, adaptive=True).put(1, queue="a")
        bench.now = 0.5
        bench.put(4, queue="b").put(3, queue="a")
        assert bench.takes() == [[1, 3], [4]]

    def test_the_pace_stays_within_its_bounds(self):
        pace = Pace()
        for i in range(2000):
            pace.add(1.0 / (i + 1))
            assert 1 <= pace.in_flight <= 64
        for i in range(4000):
            pace.add(float(i % 7))
            assert 1 <= pace.in_flight <= 64


class TestQueues:
    def test_idle_ones_are_forgotten_after_a_minute(self):
        bench = Bench(timeout=0.0).put(1, queue="a").put(1, queue="b")
        bench.takes()
        bench.scheduler.drop_idle(IDLE_QUEUE_SECONDS - 1)
        assert set(bench.scheduler.queues) == {"a", "b"}
        bench.now = IDLE_QUEUE_SECONDS
        bench.put(1, queue="b")
        bench.scheduler.drop_idle(IDLE_QUEUE_SECONDS)
        assert set(bench.scheduler.queues) == {"b"}
        assert bench.takes() == [[1]]

    def test_a_new_name_for_every_call_does_not_grow_the_table(self):
        bench = Bench(timeout=0.0)
        for i in range(10 * IDLE_QUEUES):
            assert bench.put(1, queue=i).takes() == [[1]]
            assert len(bench.scheduler.queues) <= IDLE_QUEUES

    def test_those_in_use_are_never_dropped(self):
        bench = Bench(timeout=9.0)
        for i in range(3 * IDLE_QUEUES):
            bench.put(1, queue=i)
        assert bench.takes(at=9.0) == [[1]] * 3 * IDLE_QUEUES

    def test_removal(self):
        bench = Bench(most=4)
        calls = [Call(i, 2) for i in range(5)]
        for call in calls:
            bench.scheduler.put("q", call, 0.0)
        assert [bench.scheduler.remove(calls[i]) for i in (0, 1, 4)] == [True, True, True]
        assert bench.takes() == [[2, 2]], "the batch that became empty is not handed out"
        assert bench.scheduler.remove(calls[2]) is False
        assert bench.scheduler.waiting == 0

    def test_removal_of_the_first_hands_its_watch_to_the_next(self):
        bench = Bench()
        calls = [Call(i, 1) for i in range(2)]
        for call in calls:
            bench.scheduler.put("q", call, 0.0)
        assert [bench.scheduler.due(call) for call in calls] == [(1.0, True), (1.0, False)]
        bench.scheduler.remove(calls[0])
        assert bench.scheduler.moved == [calls[1]]
        assert bench.scheduler.due(calls[1]) == (1.0, True)


def test_merge_of_a_call_that_was_cut_leaves_nothing_to_watch_for_the_whole():
    low = LowPriority(2, 4.0, 1, (), MERGE)
    scheduler = Scheduler(Limits(1, 2, 0.0, 1, (), split=True, low=low))
    cut = Call(0, 2, True)
    scheduler.put("q", cut, 0.0)
    scheduler.put("q", Call(1, 1, False), 0.0)
    batch = scheduler.take(0.0)
    rest = scheduler.queues["q"].low[0][1]
    assert [task.rows for task in batch.tasks] == [1, 1]
    assert scheduler.remove(rest)
    assert scheduler.due(cut) == (inf, False)
