"""The search for the calls that make a batch fail: halves are run again until only these calls fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.clock import Clock
from ..errors import own_copy


class Isolation:
    """A search among the tasks of a failed batch.

    `run(tasks)` runs the function for some of the tasks and returns a result for each, or raises. Only parts that fail are halved:
    with k guilty tasks among n, these are at most 2 k log2(n) runs, and never more than 2 n - 2. That both halves fail alike proves
    nothing: a task is guilty if it fails by itself.
    """

    def __init__(self, run: Callable[[list[Any]], list[Any]], clock: Clock) -> None:
        self._run, self._clock = run, clock
        self._found: dict[Any, Any] = {}

    def results(self, tasks: list[Any], error: Exception) -> list[Any]:
        """Return a result or an error for each of the tasks that failed together with `error`, None for late ones."""
        self._search(tasks, error)
        try:
            return [self._found.get(task) for task in tasks]
        finally:
            self._found.clear()  # the traceback of an error refers to this object

    def _search(self, tasks: list[Any], error: Exception) -> None:
        if len(tasks) == 1:
            self._found[tasks[0]] = own_copy(error)
            return
        middle = len(tasks) // 2
        for half in (tasks[:middle], tasks[middle:]):
            half = self._waiting(half)
            failure = self._try(half) if half else None
            try:
                if failure is not None:
                    self._search(half, failure)
            finally:
                del failure  # its traceback refers to this frame

    def _waiting(self, tasks: list[Any]) -> list[Any]:
        """Return the tasks whose callers still wait for a result."""
        now = self._clock.now()
        return [task for task in tasks if task.owner.deadline > now and not task.owner.has_departed]

    def _try(self, tasks: list[Any]) -> Exception | None:
        try:
            results = self._run(tasks)
        except Exception as error:
            return error
        self._found.update(zip(tasks, results, strict=True))
        return None


def copies(error: Exception, tasks: list[Any]) -> list[Any]:
    """Return a copy of an exception for each task."""
    return [own_copy(error) for _ in tasks]
