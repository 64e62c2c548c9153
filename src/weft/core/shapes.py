"""Shapes with unknown dimensions or an unknown rank."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeGuard

from ..errors import ArgumentTypeError, InvalidArgumentError
from .arrays import library_of
from .inputs import items, shown

Shape: TypeAlias = tuple[int, ...]
#: None for a dimension means that it is unknown; None instead of a tuple means that the rank is unknown.
PartialShape: TypeAlias = tuple[int | None, ...] | None

#: TensorFlow's limits of a shape.
MAX_ELEMENTS = 2**63 - 1
MAX_RANK = 254


def partial_shape(given: Any, name: str) -> PartialShape:
    """A shape attribute: None, or dimensions, where -1 and None mean unknown."""
    if given is None:
        return None
    if not (library_of(given) or isinstance(given, (list, tuple, range))):
        raise ArgumentTypeError(f"{name} must be None or a sequence of dimensions, got {shown(given)}")
    dimensions = given if isinstance(given, range) else items(name, given)
    shape = tuple(_dimension(name, d) for d in islice(dimensions, MAX_RANK + 1))  # a range may be huge
    if any(d is not None and d < 0 for d in shape):
        raise InvalidArgumentError(f"{name} must have no dimension below -1, got {shown(list(shape))}")
    check_total(shape, name)
    return shape


def _dimension(name: str, given: Any) -> int | None:
    if given is None:
        return None
    try:
        size = operator.index(given)
    except Exception:  # not an integer, or an object whose own code raises
        raise ArgumentTypeError(f"{name} must hold integers or None, got {shown(given)}") from None
    return None if size == -1 else size


def check_total(shape: Sequence[int | None], name: str) -> None:
    """Refuse a shape with more elements, as far as it is known, or more dimensions than TensorFlow allows."""
    total = 1
    for d in shape:
        total *= 1 if d is None else d
        if total > MAX_ELEMENTS:
            raise InvalidArgumentError(f"{name} must have at most 2^63 - 1 elements, got {shown(list(shape))}")
    if len(shape) > MAX_RANK:
        raise InvalidArgumentError(f"{name} must have at most {MAX_RANK} dimensions, got more")


def is_known(shape: PartialShape) -> TypeGuard[Shape]:
    """True if the rank and all dimensions are known."""
    return shape is not None and None not in shape


def fits(shape: Sequence[int | None], partial: PartialShape) -> bool:
    """True if a shape exists that matches both."""
    if partial is None or shape == partial:  # benchmark row "1000 torch appends and stack"
        return True
    return len(shape) == len(partial) and all(
        a is None or b is None or a == b for a, b in zip(shape, partial, strict=True)
    )


def merge(a: PartialShape, b: PartialShape) -> PartialShape:
    """The shape that combines two compatible shapes."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(y if x is None else x for x, y in zip(a, b, strict=True))


def show(shape: PartialShape | Sequence[int | None]) -> str:
    """A shape as TensorFlow writes it: `[2,?,3]`."""
    if shape is None:
        return "<unknown>"
    return "[" + ",".join("?" if d is None else str(d) for d in shape) + "]"
