"""A thread that notices models whose batch does not end, and an event loop that does not turn."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from typing import Any

from .application import App

log = logging.getLogger("weft.serve")


class Watchdog:
    """Watches an app while a block runs: a model without progress for `hang_time` is reported and not ready."""

    def __init__(self, app: App, interval: float = 1.0) -> None:
        self._app, self._interval = app, min(interval, app.limits.hang_time / 4)
        self._seen: dict[str, tuple[Any, float]] = {}
        self._turned = threading.Event()  # set by the event loop, when it comes to it
        self._asked: float | None = None  # when the loop was asked to set it
        self._is_reported = False
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
        """Compare the progress of each model, and of the event loop, with what was seen before."""
        self._look_at_loop(now)
        for name, model in self._app.models.items():
            statistics = model.statistics()
            if statistics is None:
                continue
            state = (id(model.version), statistics.batches, model.chunks)
            seen = self._seen.get(name)
            if seen is None or seen[0] != state or not statistics.running:
                self._seen[name] = state, now
                if model.is_hanging:
                    model.hangs_since = None
                    log.warning("model %s: a batch ended, it answers again", name)
            elif not model.is_hanging and now - seen[1] > self._app.limits.hang_time:
                log.error(
                    "model %s: a batch has been running for more than %g s, %d calls wait\n%s",
                    name, self._app.limits.hang_time, statistics.waiting, _stacks(),
                )  # fmt: skip
                model.hangs_since = seen[1]

    def _look_at_loop(self, now: float) -> None:
        """Ask the event loop for a sign of life, and report if it does not give one."""
        loop = self._app.loop
        if loop is None or loop.is_closed():
            return
        if self._asked is None or self._turned.is_set():
            if self._is_reported:
                log.warning("the event loop turns again")
            self._asked, self._is_reported = now, False
            self._turned.clear()
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._turned.set)
        elif not self._is_reported and now - self._asked > self._app.limits.hang_time:
            self._is_reported = True
            log.error("the event loop has not turned for %g s\n%s", self._app.limits.hang_time, _stacks(""))


def _stacks(prefix: str = "weft") -> str:
    """Return where threads are: those that run batches, or all with an empty prefix."""
    frames = sys._current_frames()
    own = threading.current_thread()
    running = [thread for thread in threading.enumerate() if thread.name.startswith(prefix) and thread is not own]
    return "\n".join(
        f"thread {thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
        for thread in running
        if thread.ident in frames
    )
