"""How long a call waits for gradients that come from other callers."""

from __future__ import annotations

from types import TracebackType

_seconds = 60.0


def gradient_seconds() -> float:
    """The gradient deadline in seconds."""
    return _seconds


class gradient_deadline:
    """Set how long, in seconds, a call waits for the gradients of others: from now on, or as a context manager for a block.

    It holds for the whole process: the owner of a batch's gradient waits so long and then gets DeadlineExceededError, and a
    gradient whose owner does not come is kept no longer.
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
