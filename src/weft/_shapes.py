"""Shapes of which some dimensions, or the rank, may be unknown."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeGuard

from .errors import InvalidArgumentError

Shape: TypeAlias = tuple[int, ...]
#: A dimension that is None is unknown; None instead of a tuple is an unknown rank.
PartialShape: TypeAlias = tuple[int | None, ...] | None

#: What a shape may hold at most, in elements and in dimensions: TensorFlow's limits.
MAX_ELEMENTS = 2**63 - 1
MAX_RANK = 254


def partial_shape(given: Any, name: str) -> PartialShape:
    """A shape attribute as it came from the caller: None, or numbers of which -1 and None mean unknown."""
    if given is None:
        return None
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be None or a sequence of dimensions, got {given!r}")
    shape = tuple(None if d is None or d == -1 else operator.index(d) for d in given)
    if any(d is not None and d < 0 for d in shape):
        raise InvalidArgumentError(f"{name} must have no dimension below -1, got {show(shape)}")
    check_total(shape, name)
    return shape


def check_total(shape: Sequence[int | None], name: str) -> None:
    """Raise unless the elements of `shape`, as far as it is known, can be counted in 63 bits."""
    total = 1
    for d in shape:
        total *= 1 if d is None else d
        if total > MAX_ELEMENTS:
            raise InvalidArgumentError(f"{name} must have at most 2^63 - 1 elements, got {show(shape)}")
    if len(shape) > MAX_RANK:
        raise InvalidArgumentError(f"{name} must have at most {MAX_RANK} dimensions, got {len(shape)}")


def is_known(shape: PartialShape) -> TypeGuard[Shape]:
    """Whether rank and all dimensions are known."""
    return shape is not None and None not in shape


def fits(shape: Sequence[int | None], partial: PartialShape) -> bool:
    """Whether some shape is described by both."""
    if partial is None:
        return True
    return len(shape) == len(partial) and all(
        a is None or b is None or a == b for a, b in zip(shape, partial, strict=True)
    )


def merge(a: PartialShape, b: PartialShape) -> PartialShape:
    """All that two compatible shapes say together."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(y if x is None else x for x, y in zip(a, b, strict=True))


def show(shape: PartialShape | Sequence[int | None]) -> str:
    """A shape as TensorFlow writes it: `[2,?,3]`."""
    if shape is None:
        return "<unknown>"
    return "[" + ",".join("?" if d is None else str(d) for d in shape) + "]"
