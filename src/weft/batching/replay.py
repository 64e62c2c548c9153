"""Recordings of which calls shared a batch, and replays that form the same batches again.

A recording is a file of JSON lines. `{"batch": 3, "calls": [["actor-1", 0, 0, 2], ...]}`: batch 3 held, in this order, two rows
of call 0 of `actor-1` from row 0 on, and so on. `{"back": 3}`: the backward of batch 3 was the next to run.
"""

from __future__ import annotations

import asyncio
import json
import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ..core.lock import has_lock, lock
from ..errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from .queue import Batch, Limits, Task
from .scheduler import Scheduler

#: The largest number in a recording.
MOST = 2**53


class Recording:
    """Names the calls by their caller and a number, and runs one backward at a time."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._turn = threading.Condition(lock)
        self._runner: int | None = None  # the thread that runs a backward
        self._depth = 0  # the number of backwards that it runs within each other

    def next_name(self, caller: str | None) -> tuple[str, int]:
        """Return the name of a new call; the caller is `caller`, else this task or thread."""
        caller = caller or _task_name() or threading.current_thread().name
        with lock:
            ordinal = self._counts[caller]
            self._counts[caller] += 1
        return caller, ordinal

    def free_name(self, name: tuple[str, int]) -> None:
        """Free the name of a refused call, which may come again."""
        caller, ordinal = name
        with lock:
            if self._counts[caller] == ordinal + 1:
                self._counts[caller] = ordinal

    @contextmanager
    def in_turn(self, number: int, seconds: float) -> Iterator[None]:
        """Run a batch's backward in a block: one runs at a time, in its turn; it may run another within it."""
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
        """Return True if the backward of this batch may run now."""
        return True

    def _begin(self, number: int) -> None:
        """Note that the backward of this batch runs; called under the lock."""

    def _other(self) -> str:
        """Describe the backward that must run first."""
        return "another batch"


def _task_name() -> str | None:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return None
    return task.get_name() if task is not None else None


class Recorder(Recording):
    """Writes a recording."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w", encoding="utf-8")
        self._lines: deque[str] = deque()  # to be written, in order

    def batch_starts(self, number: int, tasks: Sequence[Any]) -> None:
        """Do nothing: a run that is interrupted starts again, so that a batch is written after it."""

    def batch_ran(self, number: int, tasks: Sequence[Any]) -> None:
        """Write a batch that has run."""
        calls = [[*task.owner.name, task.start, task.rows] for task in tasks if task.owner.name is not None]
        if calls:
            self._lines.append(json.dumps({"batch": number, "calls": calls}))
            self._flush()

    def _begin(self, number: int) -> None:
        self._lines.append(json.dumps({"back": number}))
        self._write_lines()

    def _flush(self) -> None:
        """Write the pending lines, unless this thread is already writing."""
        if has_lock():
            return
        with lock:
            self._write_lines()

    def _write_lines(self) -> None:
        while self._lines and not self._file.closed:
            self._file.write(self._lines[0] + "\n")
            self._lines.popleft()
            self._file.flush()  # the file holds whole lines if the process ends or forks

    def close(self) -> None:
        """End the recording."""
        self._flush()
        with lock:
            self._file.close()


class Piece(NamedTuple):
    """The place of some rows of a call: the batch, the place among its tasks, the first row, and the number of rows."""

    batch: int
    place: int
    start: int
    rows: int


_start = attrgetter("start")


class Replay(Recording):
    """Follows a recording: provides the rules of the queue, and keeps the order of the backwards."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.batches, self._backs = _read(path)
        self._pieces: dict[tuple[str, int], list[Piece]] = {}
        self._left = Counter(self._backs)  # the batches that have yet to go back
        for at, (_, calls) in enumerate(self.batches):
            for place, (caller, ordinal, start, rows) in enumerate(calls):
                self._pieces.setdefault((caller, ordinal), []).append(Piece(at, place, start, rows))
        self._holes: dict[tuple[str, int], float] = {}  # by call, the first row that has not just one piece
        for name, pieces in self._pieces.items():
            pieces.sort(key=_start)
            ends = accumulate((piece.rows for piece in pieces), initial=0)
            hole = next((end for piece, end in zip(pieces, ends, strict=False) if piece.start != end), None)
            if hole is not None:
                self._holes[name] = hole
        self._numbers: dict[int, int] = {}  # the number of a batch -> its number in the recording
        self._back = 0  # the next entry of `_backs`

    def rules(self, limits: Limits) -> ReplayScheduler:
        """Return rules of a queue that follow this recording."""
        return ReplayScheduler(self, limits)

    def pieces(self, name: tuple[str, int]) -> list[Piece]:
        """Return the pieces of a call."""
        if name not in self._pieces:
            raise FailedPreconditionError(
                f"the recording has no call {name[1]} of {name[0]!r}: make the recorded calls only"
            )
        if name in self._holes:
            raise FailedPreconditionError(
                f"the recording must have every row of call {name[1]} of {name[0]!r} once, and has not row {self._holes[name]} so: "
                "the call was given up, or the file was changed"
            )
        return self._pieces[name]

    def piece(self, task: Any) -> Piece:
        """Return the place of one task of a call."""
        pieces = self._pieces[task.owner.name]
        return pieces[bisect_left(pieces, task.start, key=_start)]

    def batch_starts(self, number: int, tasks: Sequence[Any]) -> None:
        """Find the batch of the recording that holds the first task."""
        if tasks and tasks[0].owner.name is not None:
            self._numbers[number] = self.batches[self.piece(tasks[0]).batch][0]

    def batch_ran(self, number: int, tasks: Sequence[Any]) -> None:
        """Do nothing."""

    def _is_turn(self, number: int) -> bool:
        own = self._numbers.get(number)
        return own is None or not self._left[own] or self._backs[self._back] == own

    def _begin(self, number: int) -> None:
        own = self._numbers.get(number)
        if own is not None and self._back < len(self._backs) and self._backs[self._back] == own:
            self._back += 1
            self._left[own] -= 1

    def _other(self) -> str:
        return f"batch {self._backs[self._back]}" if self._back < len(self._backs) else "another batch"

    def close(self) -> None:
        """End the replay: batches that have not gone back may do so in any order."""
        with self._turn:
            self._backs = []
            self._left.clear()
            self._turn.notify_all()


class ReplayScheduler(Scheduler):
    """The rules of a queue in a replay: batches run in the recorded order, each when all its calls have come.

    It has no `queues`, and its tasks have no `queue`: so no batch becomes due, and `flush` and `drop_idle` find nothing.
    """

    def __init__(self, replay: Replay, limits: Limits) -> None:
        super().__init__(limits)
        self._replay = replay
        self._at = 0
        self._there: dict[int, dict[int, Any]] = {}  # batch -> place -> task that has come
        self._pieces: dict[Any, Piece] = {}  # the same by task

    def put(self, key: Any, task: Any, now: float) -> None:
        """Put a call in its recorded batches."""
        pieces = self._replay.pieces(task.owner.name)
        total = sum(piece.rows for piece in pieces)
        if total != task.rows:
            raise InvalidArgumentError(
                f"a replayed call must have the {total} rows of the recorded one, got {task.rows}"
            )
        for batch, _, _, _ in pieces:
            if any(other.owner.key is not key for other in self._there.get(batch, {}).values()):
                raise InvalidArgumentError(
                    "a replayed call must have the structure, dtypes, shapes and mode of the calls that shared its recorded batch, "
                    "got others"
                )
        parts: list[Any] = [task]
        if len(pieces) > 1:
            parts = [Task(task, start, rows) for _, _, start, rows in pieces]
            task.replace(task, *parts)
        for piece, part in zip(pieces, parts, strict=True):
            self._add(part, piece)

    def _add(self, task: Any, piece: Piece) -> None:
        self._pieces[task] = piece
        self._there.setdefault(piece.batch, {})[piece.place] = task
        self.waiting += 1

    def set_limits(self, limits: Limits) -> None:
        """Apply other limits: the recording says which calls share a batch."""
        self.limits = limits

    def missing(self) -> list[str]:
        """Return the calls that the next batch of the recording waits for."""
        if self._at >= len(self._replay.batches):
            return []
        there = self._there.get(self._at, {})
        calls = self._replay.batches[self._at][1]
        return [f"call {call[1]} of {call[0]!r}" for place, call in enumerate(calls) if place not in there]

    def take(self, now: float) -> Batch | None:
        """Return the next batch of the recording if all its calls have come and one more may run."""
        there = self._there.get(self._at, {})
        if self._at >= len(self._replay.batches) or self.running >= self.limits.threads:
            return None
        if len(there) < len(self._replay.batches[self._at][1]):
            return None
        batch = Batch()
        batch.reason, batch.is_taken, batch.opened = "replay", True, now
        for place in sorted(there):
            batch.add(there[place])
            del self._pieces[there[place]]
        del self._there[self._at]
        self._at += 1
        self.running += 1
        self.waiting -= len(batch.tasks)
        return batch

    def let_join(self, batch: Batch) -> None:
        """Do nothing: no call joins a batch of a recording later."""

    def end_joining(self, batch: Batch) -> None:
        """Do nothing."""

    def remove(self, task: Any) -> bool:
        """Remove a task that waits; its batch cannot be formed then."""
        piece = self._pieces.pop(task, None)
        if piece is not None:
            del self._there[piece.batch][piece.place]
            self.waiting -= 1
            return True
        if task.batch is not None:
            task.batch.has_departed = True
        return False

    def drain(self) -> list[Any]:
        """Remove and return every task that waits."""
        tasks = [task for there in self._there.values() for task in there.values()]
        self._there.clear()
        self._pieces.clear()
        self.waiting = 0
        return tasks

    def rebuild(self, waiting: list[tuple[Any, Any, float]], running: int) -> None:
        """Put all waiting tasks in their batches again."""
        self._there.clear()
        self._pieces.clear()
        self.waiting, self.running, self.moved = 0, running, []
        for _, task, _ in waiting:
            task.batch = None
            piece = self._replay.piece(task)
            self._add(task, piece)
            self._at = min(self._at, piece.batch)


def _read(path: Path) -> tuple[list[tuple[int, list[list[Any]]]], list[int]]:
    """Return the batches of a recording in order, and the order of their backwards."""
    batches: dict[int, list[list[Any]]] = {}
    backs = []
    for at, line in enumerate(_text_of(path).splitlines(), 1):
        entry = _entry(line)
        if entry is None or (type(entry) is tuple and entry[0] in batches):
            raise InvalidArgumentError(
                f"every line of a recording must be a batch, each of them once, or a backward, got {line[:80]!r} in line {at}"
            )
        if type(entry) is tuple:
            batches[entry[0]] = entry[1]
        else:
            backs.append(entry)
    # A batch that ran before the recording began may have gone back in it: nobody replays it.
    return list(batches.items()), [number for number in backs if number in batches]


def _text_of(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe would keep its reader waiting
            raise InvalidArgumentError(f"a recording must be a file, got {str(path)[:200]!r}")
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"a recording must be a file of text in UTF-8: {error}") from None


def _entry(line: str) -> tuple[int, list[list[Any]]] | int | None:
    """Return a batch and its calls, or the number of a batch that goes back; None if the line is neither."""
    try:
        found = json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return None
    if type(found) is not dict:
        return None
    if found.keys() == {"back"} and _is_count(found["back"]):
        return int(found["back"])
    if found.keys() != {"batch", "calls"} or not _is_count(found["batch"]):
        return None
    calls = found["calls"]
    return (found["batch"], calls) if type(calls) is list and calls and all(map(_is_call, calls)) else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _is_call(call: Any) -> bool:
    """Whether this is a part of a call: the name of the caller, the number of the call, the first row, and the number of rows."""
    if type(call) is not list or len(call) != 4 or type(call[0]) is not str:
        return False
    rows = call[3]
    return all(map(_is_count, call[1:3])) and type(rows) in (int, float) and 0 < rows <= MOST


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x <= MOST
