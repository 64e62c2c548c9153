"""What a batched function returns: structure around leaves, and to whom each leaf belongs.

Tuples, dicts, dataclasses and named tuples are structure. A leaf is an array with the rows of the batch, a list or `PerRow` with
one item for each row, or a value for all callers. Anything else is refused: it may hold what belongs to one caller alone.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from enum import Enum
from types import AsyncGeneratorType, CoroutineType, GeneratorType, NoneType
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import library_of
from ..core.inputs import check_nesting, refuse_odd, shown
from ..errors import FailedPreconditionError, InvalidArgumentError
from ..ragged.tensor import RaggedTensor
from . import trees

Build = Callable[[Sequence[Any]], Any]

#: Values that all callers of a batch get.
_FOR_ALL = (str, bytes, bool, int, float, complex, Enum, NoneType)
#: What a function returns that calls one that yields or is asynchronous.
_UNFINISHED = (CoroutineType, GeneratorType, AsyncGeneratorType)


class PerRow:
    """A result with one item for each row of the batch: each caller gets a list of its own, or its item with `rows=False`.

    Items may be arrays of any shape, alone or nested. PyTorch's have gradients.
    """

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        try:
            given = None if isinstance(items, (str, bytes, dict, set, frozenset)) else iter(items)
        except TypeError:
            given = None
        if given is None:
            raise InvalidArgumentError(f"PerRow must get a sequence with one item for each row, got {shown(items)}")
        self.items = list(given)


class Shared:
    """A result that all callers of the batch get, whatever it is. It has no gradient."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Tagged(NamedTuple):
    """A result with a value for all callers beside it. The options that name results mean those in `result`."""

    result: Any
    tag: Any


def flatten(result: Any) -> tuple[list[Any], Build]:
    """Return the leaves of a result, and a function that builds a result of such leaves."""
    if trees.is_array(result) or not _is_structure(result):
        return [result], trees.only
    if type(result) is tuple and all(map(trees.is_array, result)):
        return list(result), tuple
    return _flatten_all(result, False)


def flatten_values(result: Any) -> tuple[list[Any], Build]:
    """As `flatten`, with the values of RaggedTensors in their place."""
    leaves, build = flatten(result)
    ragged = {i: x for i, x in enumerate(leaves) if isinstance(x, RaggedTensor)}
    if not ragged:
        return leaves, build
    values = [x.flat_values if i in ragged else x for i, x in enumerate(leaves)]
    return values, lambda given: build([ragged[i].with_values(x) if i in ragged else x for i, x in enumerate(given)])


def entries(result: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a result in the order of its leaves, each with its key or position; a result without structure is one."""
    if trees.is_array(result) or not _is_structure(result):
        return [(0, result)]
    if isinstance(result, tuple):
        return list(enumerate(result))
    if isinstance(result, dict):
        return [(key, result[key]) for key in _keys(result)]
    return [(field.name, getattr(result, field.name)) for field in dataclasses.fields(result)]


def _keys(x: dict[Any, Any]) -> list[Any]:
    """Return the keys of a dict in the order of its leaves; a gradient may have another order."""
    return sorted(x) if all(isinstance(key, str) for key in x) else list(x)


def _flatten_all(x: Any, is_inside: bool) -> tuple[list[Any], Build]:
    """Return the leaves of nested values, in lists and RaggedTensors too if `is_inside`, and a function that builds such values."""
    check_nesting("a result", x, _inside, trees.DEEPEST)
    leaves: list[Any] = []
    return leaves, _flatten(x, leaves, is_inside)


def _is_structure(x: Any) -> bool:
    return isinstance(x, (tuple, dict)) or trees.is_dataclass(x)


def _inside(x: Any) -> Iterable[Any] | None:
    """Return what is in a structure or a list, None for anything else."""
    if isinstance(x, (list, tuple)):
        return list(x)
    if isinstance(x, dict):
        return dict.values(x)
    if isinstance(x, (PerRow, Shared)):
        return x.items if isinstance(x, PerRow) else [x.value]
    return [getattr(x, field.name) for field in dataclasses.fields(x)] if _is_structure(x) else None


def _flatten(x: Any, leaves: list[Any], is_inside: bool) -> Build:
    """Append the leaves of `x`; return a function that builds `x` of a list that has leaves at these places."""
    is_list = is_inside and isinstance(x, list)
    if is_inside and isinstance(x, RaggedTensor):
        values, splits = _flatten(x.flat_values, leaves, True), tuple(x._splits)
        return lambda given: RaggedTensor(values(given), splits)
    if not (is_list or _is_structure(x)) or trees.is_array(x):
        at = len(leaves)
        leaves.append(x)
        return lambda given: given[at]
    if is_list or isinstance(x, tuple):
        parts = [_flatten(part, leaves, is_inside) for part in x]
        make = getattr(type(x), "_make", type(x))
        return lambda given: make([part(given) for part in parts])
    if isinstance(x, dict):
        named = {key: _flatten(x[key], leaves, is_inside) for key in _keys(x)}
        return lambda given: _filled_dict(x, {key: named[key](given) for key in x})
    fields = [(field.name, _flatten(getattr(x, field.name), leaves, is_inside)) for field in dataclasses.fields(x)]
    return lambda given: trees.filled_dataclass(type(x), [(name, part(given)) for name, part in fields])


def _filled_dict(like: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    if type(like) is dict:
        return values
    made = copy.copy(like)
    for key, value in values.items():
        made[key] = value
    return made


def check(leaves: Sequence[Any], size: int, ragged: Container[int] = ()) -> tuple[list[int], list[int]]:
    """Return the places of the arrays, and of the leaves with one item for each row; refuse what belongs to nobody known.

    At the places `ragged` are values of RaggedTensors, which were checked.
    """
    arrays, items = [], []
    for i, x in enumerate(leaves):
        if i in ragged:
            arrays.append(i)
        elif trees.is_array(x) or isinstance(x, np.generic):
            check_rows(x, i, size)
            arrays.append(i)
        elif isinstance(x, (list, PerRow)):
            _check_items(x, i, size)
            items.append(i)
        elif not isinstance(x, (*_FOR_ALL, Shared)):
            raise FailedPreconditionError(
                f"leaf {i} of the result is {shown(x)}, and it is not known to whom it belongs: return weft.PerRow(sequence) with "
                "one item for each row, or weft.Shared(value) for all callers"
                + ("; batch the function itself that yields or is `async def`" if isinstance(x, _UNFINISHED) else "")
            )
    return arrays, items


def check_rows(x: Any, i: int, size: int) -> None:
    """Refuse an array that has not the rows of the batch."""
    if library_of(x) == "torch":
        refuse_odd("a result", x)
        if x.is_nested or x.layout is not sys.modules["torch"].strided:
            found = "a nested one" if x.is_nested else f"one of {x.layout}"
            raise InvalidArgumentError(f"a result must be a dense tensor, got {found}")
    shape = x.shape
    if not shape or shape[0] != size:
        found = f"{shape[0]} rows" if shape else "a scalar"
        raise FailedPreconditionError(
            f"every array that the function returns must have the {size} rows of its batch, got {found} in leaf {i} of the result"
            + ("" if shape else "; weft.Shared(value) is for all callers")
        )


def _check_items(x: Any, i: int, size: int) -> None:
    """Refuse a list or `PerRow` that has not one item for each row, and a list with an array in it."""
    items = x if isinstance(x, list) else x.items
    found = None if all(isinstance(item, _FOR_ALL) for item in items) else _first_of(items, isinstance(x, list))
    if isinstance(found, (PerRow, Shared)):
        raise FailedPreconditionError(
            f"leaf {i} of the result has a weft.{type(found).__name__} in it: return a tuple or a dict of them"
        )
    if found is not None:
        raise FailedPreconditionError(
            f"leaf {i} of the result is a list with an array in it: return a tuple of arrays with rows, or weft.PerRow(list) with "
            "one item for each row"
        )
    if len(items) != size:
        raise FailedPreconditionError(
            f"a list that the function returns must have one item for each of the {size} rows of its batch, got {len(items)} in "
            f"leaf {i} of the result; weft.Shared(list) is for all callers"
        )


def _first_of(items: list[Any], arrays: bool) -> Any:
    """Return the first `PerRow`, `Shared` or, if `arrays`, array that is anywhere in `items`."""
    check_nesting("a result", items, _inside, trees.DEEPEST)
    waiting, seen = [items], set()
    while waiting:
        part: Any = waiting.pop()
        if isinstance(part, (PerRow, Shared)) or (arrays and (isinstance(part, RaggedTensor) or trees.is_array(part))):
            return part
        inside = _inside(part)
        if inside is not None and id(part) not in seen:
            seen.add(id(part))
            waiting.extend(inside)
    return None


# --- the parts of the callers ---


def flatten_inside(value: Any) -> tuple[list[Any], Build]:
    """Return the leaves inside a `PerRow` or a `Shared`, and a function that builds such a value.

    There, lists are structure, too, and RaggedTensors around their values.
    """
    return _flatten_all(value, True)


class OwnItems:
    """A caller's items of a `PerRow`: copies without a graph, and the places of those that PyTorch recorded."""

    __slots__ = ("build", "leaves", "recorded")

    def __init__(self, items: list[Any]) -> None:
        leaves, build = flatten_inside(items)
        self.build = build
        self.recorded = [i for i, x in enumerate(leaves) if library_of(x) == "torch" and x.requires_grad]
        self.leaves = [_own_copy(x) for x in leaves]

    def fold(self, given: Iterable[Any]) -> list[Any]:
        """Return the items with these arrays in place of the recorded ones."""
        items: list[Any] = self.build(trees.replaced(self.leaves, self.recorded, given))
        return items


def own_items(x: Any, start: int, stop: int) -> Any:
    """Return a caller's items of a list or a `PerRow`: a list, or an `OwnItems` if PyTorch has recorded some of them."""
    if isinstance(x, list):
        return x[start:stop]
    own = OwnItems(x.items[start:stop])
    return own if own.recorded else own.fold(())


def _own_copy(x: Any) -> Any:
    """Return a copy of an array that another caller may have a part of."""
    if not trees.is_array(x):
        return x
    library = library_of(x)
    if library == "torch":
        return x.detach().clone()
    return x.copy() if library == "numpy" else x


def arrays_in(leaves: Sequence[Any]) -> list[Any]:
    """Return all arrays that a caller gets, those in items and in shared values among them."""
    whole = [x.leaves if isinstance(x, OwnItems) else x for x in leaves]
    return [x for x in flatten_inside(whole)[0] if trees.is_array(x)]


def for_all(x: Any) -> Any:
    """Return what every caller gets of a leaf that is not split."""
    if not isinstance(x, Shared):
        return x
    leaves, build = flatten_inside(x.value)
    found = next((leaf for leaf in leaves if isinstance(leaf, (PerRow, Shared))), None)
    if found is not None:
        raise FailedPreconditionError(
            f"a weft.Shared of the result has a weft.{type(found).__name__} in it: return a tuple or a dict of them"
        )
    if any(library_of(leaf) == "torch" and leaf.requires_grad for leaf in leaves):
        return build([leaf.detach() if library_of(leaf) == "torch" else leaf for leaf in leaves])
    return x.value


def recorded_items(leaves: Sequence[Any], result: Any, bounds: list[tuple[int, int]]) -> list[list[Any]]:
    """Return the tensors among each task's items that PyTorch recorded."""
    found: list[list[Any]] = [[] for _ in bounds]
    for i in result.item_places:
        for (start, stop), own, tensors in zip(bounds, result.parts[i], found, strict=True):
            if type(own) is OwnItems:
                flat = flatten_inside(leaves[i].items[start:stop])[0]
                tensors += [flat[k] for k in own.recorded]
    return found


def check_pull_back(leaves: Sequence[Any], result: Any) -> None:
    """Refuse a result that cannot be pulled back."""
    if any(isinstance(leaves[i], PerRow) for i in result.item_places):
        raise FailedPreconditionError(
            "weft.PerRow has gradients in PyTorch alone: return arrays with rows under vjp and jax.grad"
        )
    if not result.array_places:
        raise FailedPreconditionError("a result must have an array to be differentiated, got none")
