"""The contract of a batch scheduler, as plainly as it can be written, and calls for it."""

from __future__ import annotations

from math import inf

from weft.batching.queue import Pace
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
        self.parts = None

    @property
    def owner(self):
        return self

    def replace(self, task, *tasks):
        parts = [t for t in (self.parts or {}).values() if t is not task] + list(tasks)
        self.parts = {t.start: t for t in sorted(parts, key=lambda t: t.start)}

    def tasks(self):
        return [self] if self.parts is None else list(self.parts.values())


def span(task):
    """A task as the model writes it: whose rows, from where, how many."""
    return task.owner.name, task.start, task.rows


def spans(task, most):
    """A task as the model writes it, where it waits with the rows of several batches of `most` rows."""
    return [
        (task.owner.name, at, min(most, task.start + task.rows - at))
        for at in range(task.start, task.start + task.rows, most)
    ]


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
