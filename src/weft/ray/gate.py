"""A gate that lets batches run, except while the weights change."""

from __future__ import annotations

import threading


class Gate:
    """Lets batches run, except while the weights change."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._is_closed = False

    def __enter__(self) -> None:
        with self._changed:
            while self._is_closed:
                self._changed.wait()
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            if self._is_closed:
                self._changed.notify_all()

    def enter_if_open(self) -> bool:
        """Enter without waiting; return False if the gate is closed."""
        with self._changed:
            if self._is_closed:
                return False
            self._running += 1
            return True

    def close(self, seconds: float) -> bool:
        """Keep batches from starting and wait for those that run; return False, with the gate open, if they take too long."""
        with self._changed:
            self._is_closed = True
            if self._changed.wait_for(lambda: not self._running, seconds):
                return True
        self.open()
        return False

    def open(self) -> None:
        """Let batches run again."""
        with self._changed:
            self._is_closed = False
            self._changed.notify_all()
