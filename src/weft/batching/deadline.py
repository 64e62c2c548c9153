"""How long a call waits for the gradients of other callers."""

from __future__ import annotations

from types import TracebackType

_seconds = 60.0


def gradient_seconds() -> float:
    """Return the gradient deadline in seconds."""
    return _seconds


class gradient_deadline:
    """Set how long, in seconds, a call waits for the gradients of others: from now on, or as a context manager for a block.

    It holds for the whole process. The owner of a batch waits so long for the gradients of its rows and then gets
    DeadlineExceededError; a gradient is kept so long for its owner.
    """

    def __init__(self, seconds: float) -> None:
        global _seconds
        if not 0 < seconds <= 1e9:
            raise ValueError(f"the gradient deadline must be a positive number of seconds, at most 1e9, got {seconds}")
        self._before, _seconds = _seconds, float(seconds)

    def __enter__(self) -> gradient_deadline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _seconds
        _seconds = self._before
