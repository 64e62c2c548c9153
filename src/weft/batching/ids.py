"""The ids that Batch gives its callers: random 64-bit numbers, some of which say that the call had no rows.

An id of a call without rows carries a mark in its lower half that is a function of the upper half, and no other id that
is drawn carries it. So it is known as empty wherever it goes, and no table has to remember it.
"""

from __future__ import annotations

import os
import random

_random = random.Random()
_draw = _random.getrandbits
os.register_at_fork(after_in_child=_random.seed)


def new() -> int:
    """An id for a call that has rows."""
    id = _draw(64) - 2**63
    while is_empty(id):
        id = _draw(64) - 2**63
    return id


def new_empty() -> int:
    """An id for a call without rows."""
    upper = _draw(32) - 2**31
    return upper << 32 | _mark(upper)


def is_empty(id: int) -> bool:
    """Whether an id belongs to a call without rows; by chance, one number in 2**32 that Batch did not draw does, too."""
    return id & 0xFFFFFFFF == _mark(id >> 32)


def _mark(upper: int) -> int:
    return (upper * 0x9E3779B1 ^ 0x77656674) & 0xFFFFFFFF
