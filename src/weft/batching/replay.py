"""Which calls shared a batch: written down in one run, formed again in another.

A recording is a file of JSON lines. `{"batch": 3, "calls": [["actor-1", 0, 0, 2], ...]}` says that the batch numbered 3 held, in
this order, the first call of `actor-1`, from its row 0 two rows; `{"back": 3}` that its backward was the next to run.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from ..core.lock import has_lock, lock
from ..errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from .queue import Batch, Limits
from .scheduler import Scheduler


class Names:
    """The names of calls, the caller's and which of its calls it is; and whose turn it is to take a batch back."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._turn = threading.Condition(lock)
        self._runner: int | None = None  # the thread that takes a batch back, and how many within each other
        self._depth = 0

    def next(self, caller: str | None) -> tuple[str, int]:
        """The name of a call made now, by the caller called `caller`, else by this task or thread."""
        caller = caller or _task_name() or threading.current_thread().name
        with lock:
            ordinal = self._counts[caller]
            self._counts[caller] += 1
        return caller, ordinal

    def take_back(self, name: tuple[str, int]) -> None:
        """Forget the last name of a caller, whose call was refused: it may come again."""
        caller, ordinal = name
        with lock:
            if self._counts[caller] == ordinal + 1:
                self._counts[caller] = ordinal

    @contextmanager
    def returning(self, number: int, seconds: float) -> Iterator[None]:
        """Around a batch's backward: one runs at a time, in its turn; it may run another within it."""
        me, has_begun = threading.get_ident(), False
        try:
            with self._turn:
                if not self._turn.wait_for(lambda: self._runner in (None, me) and self._is_turn(number), seconds):
                    raise DeadlineExceededError(
                        f"a batch did not go back within {seconds:g} s: it waits for {self._other()} to go back"
                    )
                self._runner, self._depth, has_begun = me, self._depth + 1, True
                self._begin(number)
            yield
        finally:
            if has_begun:
                with self._turn:
                    self._depth -= 1
                    self._runner = me if self._depth else None
                    self._turn.notify_all()

    def _is_turn(self, number: int) -> bool:
        """Whether the batch with this number may go back now."""
        return True

    def _begin(self, number: int) -> None:
        """The batch with this number goes back; runs under the lock."""

    def _other(self) -> str:
        """What goes back next."""
        return "another batch"


def _task_name() -> str | None:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return None
    return task.get_name() if task is not None else None


class Recorder(Names):
    """Writes a recording."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w", encoding="utf-8")
        self._lines: deque[str] = deque()  # to be written, in order

    def batch_starts(self, number: int, tasks: Sequence[Any]) -> None:
        """A batch is about to run: it is written when it has, since a run that is broken off is begun anew."""

    def batch_ran(self, number: int, tasks: Sequence[Any]) -> None:
        """A batch has run."""
        calls = [[*task.owner.name, task.start, task.rows] for task in tasks if task.owner.name is not None]
        if calls:
            self._write({"batch": number, "calls": calls})

    def _begin(self, number: int) -> None:
        self._lines.append(json.dumps({"back": number}))
        self._write_lines()

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.append(json.dumps(line))
        self._flush()

    def _flush(self) -> None:
        """Write what is to be written, unless it is this thread that is just doing so."""
        if has_lock():
            return
        with lock:
            self._write_lines()

    def _write_lines(self) -> None:
        while self._lines and not self._file.closed:
            self._file.write(self._lines[0] + "\n")
            self._lines.popleft()
            self._file.flush()  # what is there when the process ends, or forks, is whole

    def close(self) -> None:
        """End the recording."""
        self._flush()
        with lock:
            self._file.close()


class Piece(NamedTuple):
    """Where rows of a call go: to which batch, at which place among its tasks, from which row on and how many."""

    batch: int
    place: int
    start: int
    rows: int


class Replay(Names):
    """A recording that is followed: it stands in for the rules of a queue, and keeps the order of the backwards."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.batches, self._backs = _read(path)
        self._pieces: dict[tuple[str, int], list[Piece]] = {}
        for at, (_, calls) in enumerate(self.batches):
            for place, (name, ordinal, start, rows) in enumerate(calls):
                self._pieces.setdefault((name, ordinal), []).append(Piece(at, place, start, rows))
        self._numbers: dict[int, int] = {}  # of a batch here, its number in the recording
        self._back = 0

    def rules(self, limits: Limits) -> Script:
        """The rules of a queue that follow this recording."""
        return Script(self, limits)

    def pieces(self, name: tuple[str, int]) -> list[Piece]:
        """Where the rows of a call go."""
        if name not in self._pieces:
            raise FailedPreconditionError(f"the recording has no call {name[1]} of {name[0]!r}")
        return self._pieces[name]

    def batch_starts(self, number: int, tasks: Sequence[Any]) -> None:
        """A batch is about to run: it is the one of the recording that holds its first task."""
        if tasks and tasks[0].owner.name is not None:
            piece = next(piece for piece in self.pieces(tasks[0].owner.name) if piece.start == tasks[0].start)
            self._numbers[number] = self.batches[piece.batch][0]

    def batch_ran(self, number: int, tasks: Sequence[Any]) -> None:
        """A batch has run."""

    def _is_turn(self, number: int) -> bool:
        own, left = self._numbers.get(number), self._backs[self._back :]
        return own not in left or left[0] == own

    def _begin(self, number: int) -> None:
        if self._back < len(self._backs) and self._backs[self._back] == self._numbers.get(number):
            self._back += 1

    def _other(self) -> str:
        return f"batch {self._backs[self._back]}" if self._back < len(self._backs) else "another batch"

    def close(self) -> None:
        """Nothing is left open."""


class Script(Scheduler):
    """The rules of a queue in a replay: a batch is ready when all its calls have come, in its turn."""

    def __init__(self, replay: Replay, limits: Limits) -> None:
        super().__init__(limits)
        self._replay = replay
        self._at = 0
        self._there: dict[int, dict[int, Any]] = {}  # batch -> place -> task

    def put(self, key: Any, task: Any, now: float) -> None:
        """Place a call where the recording has it."""
        pieces = self._replay.pieces(task.owner.name)
        total = sum(piece.rows for piece in pieces)
        if total != task.rows:
            raise InvalidArgumentError(f"the recorded call had {total} rows, got {task.rows}")
        for batch, _, _, _ in pieces:
            if any(other.owner.form is not key for other in self._there.get(batch, {}).values()):
                raise InvalidArgumentError(
                    "the recorded call shared a batch with calls of the same structure, dtypes, shapes and mode, "
                    "and now they differ"
                )
        for batch, place, start, rows in pieces:
            part = task if len(pieces) == 1 else task.owner.piece(start, rows)
            part.queue = self
            self._there.setdefault(batch, {})[place] = part
            self.waiting += 1

    def missing(self) -> list[str]:
        """The calls that the next batch of the recording waits for."""
        if self._at >= len(self._replay.batches):
            return []
        there = self._there.get(self._at, {})
        calls = self._replay.batches[self._at][1]
        return [f"call {call[1]} of {call[0]!r}" for place, call in enumerate(calls) if place not in there]

    def take(self, now: float) -> Batch | None:
        """The next batch of the recording, if all its calls are there and one more may run."""
        there = self._there.get(self._at, {})
        if self._at >= len(self._replay.batches) or self.running >= self.limits.threads:
            return None
        if len(there) < len(self._replay.batches[self._at][1]):
            return None
        batch = Batch()
        batch.reason, batch.is_taken, batch.opened = "replay", True, now
        for place in sorted(there):
            batch.add(there[place])
        del self._there[self._at]
        self._at += 1
        self.running += 1
        self.waiting -= len(batch.tasks)
        return batch

    def let_join(self, batch: Batch) -> None:
        """Nobody joins a batch of a recording."""

    def end_joining(self, batch: Batch) -> None:
        """A batch is being processed now."""

    def release(self, batch: Batch, now: float) -> None:
        """A batch has been processed."""
        self.running -= 1

    def remove(self, task: Any) -> bool:
        """Take back a task that is still waiting; its batch cannot be formed any more."""
        for there in self._there.values():
            for place, other in list(there.items()):
                if other is task:
                    del there[place]
                    self.waiting -= 1
                    return True
        if task.batch is not None:
            task.batch.has_departed = True
        return False

    def due(self, task: Any) -> tuple[float, bool]:
        """No time makes a batch ready."""
        return inf, False

    def flush(self) -> None:
        """Nothing can be hurried."""

    def drain(self) -> list[Any]:
        """Take out every task that waits."""
        tasks = [task for there in self._there.values() for task in there.values()]
        self._there.clear()
        self.waiting = 0
        return tasks

    def rebuild(self, waiting: list[tuple[Any, Any, float]], running: int) -> None:
        """Place anew all that waits."""
        self._there.clear()
        self.waiting, self.running, self.moved = 0, running, []
        for _, task, _ in waiting:
            for batch, place, start, _ in self._replay.pieces(task.owner.name):
                if start == task.start:
                    task.queue, task.batch = self, None
                    self._there.setdefault(batch, {})[place] = task
                    self.waiting += 1
                    self._at = min(self._at, batch)

    def drop_idle(self, now: float) -> float:
        """There is nothing to forget."""
        return inf


def _read(path: Path) -> tuple[list[tuple[int, list[list[Any]]]], list[int]]:
    """The batches of a recording in order, and the order of their backwards."""
    batches, backs = [], []
    for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            if "back" in entry:
                backs.append(int(entry["back"]))
            else:
                calls = [[str(name), int(i), int(start), rows + 0] for name, i, start, rows in entry["calls"]]
                batches.append((int(entry["batch"]), calls))
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgumentError(f"line {at} of the recording is not one: {line[:80]!r}") from error
    return batches, backs
