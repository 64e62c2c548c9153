"""The limits of a server: how large, how many, how long."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

from ..errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of requests: whole numbers, and times in seconds."""

    body_bytes: int = 64 << 20  # of a body, also after it is decompressed
    header_bytes: int = 64 << 10
    rows: int = 65536  # of a call
    tensors: int = 64  # inputs or outputs of a call
    rank: int = 8
    calls: int = 4096  # of a model that may be in the server at once; further ones get 429
    header_time: float = 10.0
    body_time: float = 30.0
    deadline: float = 60.0  # of a call that has no earlier one
    keep_alive: float = 75.0
    drain_time: float = 30.0  # how long calls in flight may take to finish after SIGTERM
    drain_delay: float = 0.0  # how long calls are still taken after SIGTERM, while readiness is off
    hang_time: float = 30.0  # a model whose batch runs longer is reported, and its calls refused
    hang_exit: float = inf  # how long all models may hang before `/healthz` fails

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int,) if field.type == "int" else (int, float)
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not is_number or not (0 < value < inf or value == field.default):
                kind = "integer" if field.type == "int" else "number"
                raise InvalidArgumentError(f"the limit {field.name} must be a positive {kind}, got {value!r}")
