"""The arguments of a batched call, and the results of a batch, as flat lists of arrays.

Arguments that are arrays, numbers, text or a method's object need no library; anything nested is optree's. Dataclasses are
registered when they are first met.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from ..core.arrays import Array, library_of
from ..core.inputs import check_nesting, items, refuse_masked
from ..errors import InvalidArgumentError
from ..ragged.variant import VariantArray

NAMESPACE = "weft"

#: Puts the leaves of a result together that is one array, or whatever else is a leaf.
only = itemgetter(0)

#: What arguments were in: how many by position where there are no others, else also the others' names, or optree's PyTreeSpec.
Structure = Any


class Whole:
    """The object of a method: an argument by identity, whatever it holds."""

    def __init__(self, instance: object) -> None:
        self.instance = instance

    def __eq__(self, other: object) -> bool:
        return type(other) is Whole and other.instance is self.instance

    def __hash__(self) -> int:
        return id(self.instance)


def bare(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A method's arguments with the object itself."""
    return (args[0].instance, *args[1:]) if args and type(args[0]) is Whole else args


def is_array(x: object) -> bool:
    """Whether `x` has rows of its own to bring into a batch: an array, but not one of NumPy's numbers."""
    if type(x) is np.ndarray or type(x) is VariantArray:
        return True
    library = library_of(x)
    if library != "numpy":
        return library is not None
    refuse_masked("an argument or result", x)
    return not _is_number(x)


def _is_number(x: object) -> bool:
    return isinstance(x, np.generic)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Structure]:
    """The leaves of a call's arguments, and what they were in."""
    if not kwargs:
        for x in args:
            if not is_array(x):
                break
        else:
            return args, len(args)
    names = sorted(kwargs)
    leaves = (*args, *(kwargs[name] for name in names))
    if all(map(_is_leaf, leaves)):
        return leaves, (len(args), tuple(names))
    return _flatten((args, kwargs))


def _is_leaf(x: object) -> bool:
    """Whether there is nothing inside `x` to look for."""
    return x is None or is_array(x) or isinstance(x, (str, bytes, bool, int, float, complex, np.generic, Whole))


def unflatten_call(leaves: Sequence[Any], structure: Structure) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments again."""
    if type(structure) is int:
        return tuple(leaves), {}
    if type(structure) is tuple:
        count, names = structure
        return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
    return structure.unflatten(leaves)


def flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of a result, and what puts such leaves together again."""
    if is_array(tree) or _is_leaf(tree):
        return _with_shapes([tree]), only
    if type(tree) is tuple and tree and all(map(is_array, tree)):
        return _with_shapes(list(tree)), tuple
    leaves, structure = _flatten(tree)
    return _with_shapes(leaves), structure.unflatten


def _with_shapes(leaves: list[Any]) -> list[Any]:
    """The leaves, if none of them is a nested tensor of torch, which has no shape."""
    for x in leaves:
        if library_of(x) == "torch" and x.is_nested:
            raise InvalidArgumentError("a result must be a dense tensor, got a nested one")
    return leaves


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    optree = _optree()
    check_nesting("an argument or result", tree, _inside, _DEEPEST)
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    if not any(dataclasses.is_dataclass(x) and not isinstance(x, type) for x in leaves):
        return leaves, structure
    for x in leaves:
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            _register(optree, type(x))
    return _flatten(tree)


#: How deep arguments and results may be nested.
_DEEPEST = 256


def _inside(x: Any) -> Any:
    """What is in a container of Python's, or a dataclass; None for anything else."""
    if isinstance(x, (list, tuple)):
        return items("a list", x)
    if isinstance(x, deque):
        return deque.copy(x)
    if isinstance(x, dict):
        return dict.values(x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [getattr(x, field.name) for field in dataclasses.fields(x)]
    return None


def _register(optree: Any, kind: type) -> None:
    """Make a dataclass known: its fields are its children."""
    names = tuple(field.name for field in dataclasses.fields(kind))

    def flatten(x: Any) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
        return tuple(getattr(x, name) for name in names), None, names

    def unflatten(_: None, children: Sequence[Any]) -> Any:
        made: Any = object.__new__(kind)  # what __init__ derived is among the fields
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    try:
        optree.register_pytree_node(kind, flatten, unflatten, namespace=NAMESPACE)
    except ValueError:  # another thread was faster
        return


def _optree() -> Any:
    try:
        import optree
    except ImportError as error:
        raise ImportError("nested arguments and results need optree: pip install 'weft[batched]'") from error
    return optree


def static(x: Any) -> tuple[type, Any]:
    """A leaf that is no array, as part of a key: equal ones of different types stay apart."""
    return (type(x), x)


def describe(x: Array) -> str:
    """An array's dtype and shape, for an error."""
    return f"{x.dtype}{list(x.shape)}"
