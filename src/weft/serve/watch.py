"""What the page shows: the last batches of each model, its figures, and what other sizes would do at the present load."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from .models import Model

#: Batches that are kept for each model.
KEPT = 240
#: Seconds after the last look at the page when batches are no longer collected.
UNWATCHED = 15.0
#: Calls of a batch that are listed one by one.
LISTED = 64
#: The options and the statistics of a batcher that the page shows.
OPTIONS = ("max_batch_size", "max_wait", "min_batch_size", "parallel", "max_queue", "deadline")
COUNTS = ("calls", "rows", "batches", "padding", "failed", "rejected", "late", "waiting", "running")


class Watch:
    """Collects the batches of models while somebody looks."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._batches: dict[str, deque[dict[str, Any]]] = {}
        self._last = 0  # the id of the newest batch
        self._scopes: list[Any] = []
        self._looked = 0.0
        self._lock = threading.Lock()

    # --- the observer ---

    def batch_ran(self, event: Any) -> None:
        """Keep a batch; called in the thread that ran it."""
        versions = {name: self._models[name].version for name in list(self._batches)}
        rings = [
            self._batches[name] for name, version in versions.items() if version and version.policy is event.batcher
        ]
        if not rings:
            return
        with self._lock:
            self._last = number = self._last + 1
        batch = {
            "id": number,
            "at": time.time(),
            "rows": list(event.rows[:LISTED]),
            "waits": [round(wait, 6) for wait in event.waits[:LISTED]],
            "calls": len(event.rows),
            "size": sum(event.rows),
            "padding": event.padding,
            "reason": event.reason,
            "seconds": event.seconds,
            "error": None if event.error is None else type(event.error).__name__,
        }
        for ring in rings:
            ring.append(batch)

    def call_refused(self, op: str, name: str, error: Exception) -> None:
        """Do nothing: statistics count refused calls."""

    # --- those who look ---

    def look(self) -> None:
        """Collect batches from now on."""
        with self._lock:
            self._looked = time.monotonic()
            for name, model in self._models.items():
                if model.version is None:
                    continue
                self._batches.setdefault(name, deque(maxlen=KEPT))
                scope = model.version.policy._scope
                if scope not in self._scopes:
                    self._scopes.append(scope)
                    scope.observers = (*scope.observers, self)

    def rest(self, at_once: bool = False) -> None:
        """Collect no longer, if nobody has looked for a while."""
        with self._lock:
            if self._scopes and (at_once or time.monotonic() - self._looked > UNWATCHED):
                for scope in self._scopes:
                    scope.observers = tuple(other for other in scope.observers if other is not self)
                self._scopes.clear()

    def batches(self, model: Model, after: int) -> list[dict[str, Any]]:
        """Return the batches of a model after the one with the id `after`, the oldest first."""
        return [batch for batch in list(self._batches.get(model.name, ())) if batch["id"] > after]

    def snapshot(self, after: int) -> dict[str, Any]:
        """Return all that the page shows, with the batches after `after`; all of them if that is an id of an earlier process."""
        self.look()
        if after > self._last:
            after = 0
        return {
            "time": time.time(),
            "models": {name: self._figures(model, after) for name, model in self._models.items()},
        }

    def _figures(self, model: Model, after: int) -> dict[str, Any]:
        version = model.version
        if version is None:
            return {"ready": False, "problem": model.problem}
        statistics = version.policy.statistics()
        options = version.policy.options
        kept = self.batches(model, 0)
        fit = fit_runs([(batch["size"] + batch["padding"], batch["seconds"]) for batch in kept if not batch["error"]])
        recent = version.policy.statistics(last=10.0)
        return {
            "ready": model.is_ready,
            "hanging": model.is_hanging,
            "problem": model.problem,
            "version": version.tag,
            "streams": version.is_stream,
            "inputs": [tensor.metadata() for tensor in version.inputs],
            "outputs": [tensor.metadata() for tensor in version.outputs],
            "options": {name: getattr(options, name) for name in OPTIONS},
            "statuses": {str(status): count for status, count in sorted(model.statuses.items())},
            **{name: getattr(statistics, name) for name in COUNTS},
            "in_server": model.calls,
            "waits": recent.waits.to_dict() if recent.waits.count else None,
            "runs": recent.runs.to_dict() if recent.runs.count else None,
            "fit": None if fit is None else {"per_row": fit[0], "per_batch": fit[1]},
            "recent": [batch for batch in kept if batch["id"] > after],
        }


def fit_runs(runs: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Fit `seconds = per_row * rows + per_batch` to runs; None without runs. Neither is negative.

    Slow outliers count little: of each size only the faster half of the runs is used.
    """
    by_size: dict[int, list[float]] = {}
    for size, seconds in runs:
        by_size.setdefault(size, []).append(seconds)
    points = [(size, seconds) for size, all_ in by_size.items() for seconds in sorted(all_)[: (len(all_) + 1) // 2]]
    if not points:
        return None
    count = len(points)
    mean_size = sum(size for size, _ in points) / count
    mean_seconds = sum(seconds for _, seconds in points) / count
    spread = sum((size - mean_size) ** 2 for size, _ in points)
    per_row = sum((size - mean_size) * (seconds - mean_seconds) for size, seconds in points) / spread if spread else 0.0
    per_row = max(per_row, 0.0)
    per_batch = mean_seconds - per_row * mean_size
    if per_batch < 0:
        return sum(s * n for n, s in points) / max(sum(n * n for n, _ in points), sys.float_info.min), 0.0
    return per_row, per_batch
