"""The ids that Batch gives its callers: random 64-bit numbers, some of which say that the call had no rows.

The lower half of the id of a call without rows is a function of the upper half, and Batch draws no other id with that property.
So `is_empty` needs no table.
"""

from __future__ import annotations

import random

from ..core.fork import on_fork_in_child

_random = random.Random()
_draw = _random.getrandbits
on_fork_in_child(_random.seed)


def new() -> int:
    """Draw an id for a call that has rows."""
    id = _draw(64) - 2**63
    while is_empty(id):
        id = _draw(64) - 2**63
    return id


def new_empty() -> int:
    """Draw an id for a call without rows."""
    upper = _draw(32) - 2**31
    return upper << 32 | _mark(upper)


def is_empty(id: int) -> bool:
    """Whether an id belongs to a call without rows; one in 2**32 of the ids that Batch did not draw looks like one."""
    return id & 0xFFFFFFFF == _mark(id >> 32)


def _mark(upper: int) -> int:
    return (upper * 0x9E3779B1 ^ 0x77656674) & 0xFFFFFFFF
