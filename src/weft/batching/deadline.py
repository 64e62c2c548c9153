"""How long a call waits for the gradients of other callers."""

from __future__ import annotations

from ..errors import InvalidArgumentError

_seconds = 60.0


def gradient_seconds() -> float:
    """Return the gradient deadline in seconds."""
    return _seconds


class gradient_deadline:
    """Set how long, in seconds, the batching ops wait for the gradients of other callers: from now on, or for a `with` block.

    It holds for the whole process; batchers have the option `gradient_deadline` instead. The owner of a batch waits so long
    for the gradients of its rows and then gets DeadlineExceededError; a gradient is kept so long for its owner.
    """

    def __init__(self, seconds: float) -> None:
        global _seconds
        if not isinstance(seconds, (int, float)) or not 0 < seconds <= 1e9:
            raise InvalidArgumentError(
                f"the gradient deadline must be a positive number of seconds up to 1,000,000,000, got {seconds!r}"
            )
        self._before, _seconds = _seconds, float(seconds)

    def __enter__(self) -> gradient_deadline:
        return self

    def __exit__(self, *_: object) -> None:
        global _seconds
        _seconds = self._before
