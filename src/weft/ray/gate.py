"""A gate that lets batches run, except while the weights change."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Gate:
    """Lets batches run, except while the weights change."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._is_closed = False
        self._then: Callable[[], object] | None = None  # called when the last batch has left

    def __enter__(self) -> None:
        with self._changed:
            while self._is_closed:
                self._changed.wait()
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            if self._running or self._then is None:
                return
            then, self._then = self._then, None
        then()

    def enter_if_open(self) -> bool:
        """Enter without waiting; return False if the gate is closed."""
        with self._changed:
            if self._is_closed:
                return False
            self._running += 1
            return True

    def close(self, then: Callable[[], object]) -> None:
        """Keep batches from starting; `then` is called as soon as none runs, unless the gate is opened before."""
        with self._changed:
            self._is_closed = True
            if self._running:
                self._then = then
                return
        then()

    def open(self) -> None:
        with self._changed:
            self._is_closed, self._then = False, None
            self._changed.notify_all()
