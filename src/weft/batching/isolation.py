"""The search for the calls that make a batch fail: halves are run again until only these calls fail."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Any

from ..core.clock import Clock
from ..errors import own_copy


class Isolation:
    """A search among the tasks of a failed batch, with a limited number of runs.

    `run(tasks)` runs the function for some of the tasks and returns a result for each, or raises.
    """

    def __init__(self, run: Callable[[list[Any]], list[Any]], clock: Clock, size: int) -> None:
        self._run, self._clock = run, clock
        self._found: dict[Any, Any] = {}
        self._runs_left = 2 * ceil(log2(size)) + 1

    def results(self, tasks: list[Any], error: Exception) -> list[Any]:
        """Return a result or an error for each of the tasks that failed together with `error`, None for late ones."""
        self._halve(tasks, error)
        try:
            return [self._found.get(task) for task in tasks]
        finally:
            self._found.clear()  # the traceback of an error refers to this object

    def _halve(self, tasks: list[Any], error: Exception) -> None:
        if len(tasks) == 1 or self._runs_left < 2:
            self._note(tasks, copies(error, tasks))
            return
        middle = len(tasks) // 2
        halves = [tasks[:middle], tasks[middle:]]
        errors = [self._try(half) for half in halves]
        first, second = errors
        is_same = first is not None and second is not None and _are_same(first, second)
        for half, failure in zip(halves, errors, strict=True):
            if failure is not None and is_same:
                self._note(half, copies(failure, half))
            elif failure is not None:
                self._halve(half, failure)

    def _try(self, tasks: list[Any]) -> Exception | None:
        now = self._clock.now()
        tasks = [task for task in tasks if task.owner.deadline > now and not task.owner.has_departed]
        if not tasks:
            return None
        self._runs_left -= 1
        try:
            results = self._run(tasks)
        except Exception as error:
            return error
        self._note(tasks, results)
        return None

    def _note(self, tasks: list[Any], results: list[Any]) -> None:
        self._found.update(zip(tasks, results, strict=True))


def _are_same(a: Exception, b: Exception) -> bool:
    return type(a) is type(b) and str(a) == str(b)


def copies(error: Exception, tasks: list[Any]) -> list[Any]:
    """Return a copy of an exception for each task."""
    return [own_copy(error) for _ in tasks]
