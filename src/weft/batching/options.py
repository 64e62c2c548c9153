"""What the options of a batcher must be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from ..core import check
from ..errors import InvalidArgumentError

#: More rows, batches or seconds than anyone means.
MOST = 1e9


def check_options(
    f: Any, max_batch_size: Any, max_wait: Any, min_batch_size: Any, fill: Any, max_queue: Any, deadline: Any, parallel: Any,
    split: Any, allowed: Sequence[Any], cost: Callable[..., Any] | None, key: Any, vjp: Any, on_error: Any, on_missing: Any,
    gradient_deadline: Any,
) -> None:  # fmt: skip
    """Refuse options that cannot be meant."""
    if not callable(f):
        raise InvalidArgumentError(f"a batcher is made of a function, got {f!r}")
    if _is_not_plain(f) or _is_not_plain(type(f).__call__):
        raise InvalidArgumentError(
            f"a batcher is made of a function that returns its result at once, got a coroutine or generator function, {f!r}"
        )
    for name, function in {"key": key, "cost": cost, "vjp": vjp}.items():
        if function is not None and not callable(function):
            raise InvalidArgumentError(f"{name} must be a function, got {function!r}")
    _number("max_batch_size", max_batch_size, least=1, kind=int)
    _number("parallel", parallel, least=1, kind=int)
    _number("min_batch_size", min_batch_size, least=1, most=max_batch_size, kind=int)
    _number("max_wait", max_wait, least=0)
    _number("gradient_deadline", gradient_deadline, least=1e-9)
    if max_queue is not None:
        _number("max_queue", max_queue, least=0, most=inf)
    if deadline is not None:
        _number("deadline", deadline, least=1e-9)
    _one_of("fill", fill, ("idle", "full"))
    if (min_batch_size > 1 or fill == "full") and max_wait == 0:
        raise InvalidArgumentError(
            "a batcher that waits for fuller batches must be told how long: max_wait must be positive"
        )
    _one_of("on_error", on_error, (None, "isolate", "share"))
    _one_of("on_missing_gradient", on_missing, ("error", "zero"))
    for size in allowed:
        _number("each of allowed_batch_sizes", size, least=1, kind=int)
    check.increasing("allowed_batch_sizes", allowed)
    if allowed and cost is None and allowed[-1] < max_batch_size:
        raise InvalidArgumentError(
            f"the last of allowed_batch_sizes must be at least max_batch_size = {max_batch_size}, got {list(allowed)}"
        )
    if split and cost is not None:
        raise InvalidArgumentError("split=True cuts calls by their rows, and cannot be joined with cost=")


def _is_not_plain(f: Any) -> bool:
    return inspect.iscoroutinefunction(f) or inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f)


def _number(name: str, value: Any, least: float, most: float = MOST, kind: type = float) -> None:
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        noun = "an integer" if kind is int else "a number"
        bound = f"from {least:g} to {most:g}" if most < inf else f"of at least {least:g}"
        raise InvalidArgumentError(f"{name} must be {noun} {bound}, got {value!r}")


def _one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
