"""A thread that notices models whose batch does not end, and an event loop that does not turn."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from typing import Any

from .app import App

log = logging.getLogger("weft.serve")


class Watchdog:
    """Watches an app while a block runs: a model without progress for `hang_time` is reported and not ready."""

    def __init__(self, app: App, interval: float = 1.0) -> None:
        self._app, self._interval = app, min(interval, app.limits.hang_time / 4)
        self._seen: dict[str, tuple[Any, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self.look(time.monotonic())
            except Exception:
                log.exception("the watchdog failed")

    def look(self, now: float) -> None:
        """Compare the progress of each model with what was seen before."""
        for name, model in self._app.models.items():
            statistics = model.statistics()
            if statistics is None:
                continue
            state = (id(model.version), statistics.batches, statistics.running > 0)
            seen = self._seen.get(name)
            if seen is None or seen[0] != state or not statistics.running:
                self._seen[name] = state, now
                if model.is_hanging:
                    model.is_hanging = False
                    log.warning("model %s: a batch ended, it answers again", name)
            elif not model.is_hanging and now - seen[1] > self._app.limits.hang_time:
                log.error(
                    "model %s: a batch has been running for more than %g s, %d calls wait\n%s",
                    name, self._app.limits.hang_time, statistics.waiting, _stacks(),
                )  # fmt: skip
                model.is_hanging = True


def _stacks() -> str:
    """Return where the threads that run batches are."""
    frames = sys._current_frames()
    own = threading.current_thread()
    running = [thread for thread in threading.enumerate() if thread.name.startswith("weft") and thread is not own]
    return "\n".join(
        f"thread {thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
        for thread in running
        if thread.ident in frames
    )
