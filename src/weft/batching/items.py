"""Arguments that are Python objects, one for each row: the function gets one list of the objects of all calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidArgumentError

#: By the name of the argument, one object for each row.
Items = Mapping[str, Sequence[Any]]

NO_ITEMS: Items = {}


def of_call(given: dict[str, Any], has_rows: bool) -> Items:
    """Return the objects of a call: it passes a sequence with one for each row, or without rows one object."""
    if not has_rows:
        return {name: (value,) for name, value in given.items()}
    for name, value in given.items():
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray, memoryview)):
            raise InvalidArgumentError(
                f"the argument {name!r} must be a list with one object for each row, got a {type(value).__name__} "
                "(rows=False takes one object)"
            )
    return {name: tuple(value) for name, value in given.items()}


def count_rows(items: Items, count: int | None) -> int:
    """Return the number of objects of each argument; it must be that of the call's rows, if there are arrays."""
    for name, values in items.items():
        if count is None:
            count = len(values)
        elif len(values) != count:
            raise InvalidArgumentError(
                f"the argument {name!r} must have one object for each of the call's {count} rows, got {len(values)}"
            )
    assert count is not None
    return count


def join(parts: Sequence[Items], padding: int) -> dict[str, list[Any]]:
    """Return one list for each argument: the objects of all parts, then `padding` times the first one."""
    joined = {name: [x for part in parts for x in part[name]] for name in parts[0]}
    if padding:
        for values in joined.values():
            values += values[:1] * padding
    return joined


def cut(items: Items, start: int, rows: int) -> Items:
    """Return the objects of some rows."""
    return {name: values[start : start + rows] for name, values in items.items()}
