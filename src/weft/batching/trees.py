"""The arguments of a batched call as flat lists of leaves; `results` has the rules for what the function returns.

Only nested arguments need optree. A dataclass is registered when it first appears.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from ..core.arrays import library_of
from ..core.inputs import check_nesting, items, refuse_masked
from ..errors import InvalidArgumentError
from ..ragged.tensor import RaggedTensor
from ..ragged.variant import VariantArray
from .exact import Same, Unsure, represent

NAMESPACE = "weft"

#: Builds a result that is a leaf.
only = itemgetter(0)

#: The structure of arguments: the number of positional ones; this number and the names of the others; or a `Nested`.
Structure = Any


class Nested:
    """The structure of nested arguments. Those of two calls are equal if no function could tell them apart.

    `spec` is optree's. Its `==` takes keys of dicts for the same that are only equal, and knows no order of them.
    """

    __slots__ = ("_form", "spec")

    def __init__(self, spec: Any, form: Hashable) -> None:
        self.spec, self._form = spec, form

    def __eq__(self, other: object) -> bool:
        return type(other) is Nested and other._form == self._form

    def __hash__(self) -> int:
        return hash(self._form)


def unwrap_instance(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a method with the object itself as the first one."""
    return (args[0].object, *args[1:]) if args and type(args[0]) is Same else args


def is_array(x: object) -> bool:
    """Return True for an array of any library, False for a NumPy scalar."""
    if type(x) is np.ndarray or type(x) is VariantArray:
        return True
    library = library_of(x)
    if library != "numpy":
        return library is not None
    refuse_masked("an argument or result", x)
    return not isinstance(x, np.generic)


def is_dataclass(x: object) -> bool:
    """Return True for an instance of a dataclass."""
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


def flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], unsure: Unsure | None = None
) -> tuple[Sequence[Any], Structure]:
    """Return the leaves of a call's arguments, and their structure; `unsure` is for keys of dicts, see `represent`."""
    if not kwargs:
        for x in args:
            if not is_array(x):
                break
        else:
            return args, len(args)
    names = sorted(kwargs)
    leaves = (*args, *(kwargs[name] for name in names))
    # Names of a subclass of str become plain ones.
    plain = [name if type(name) is str else str.__str__(name) for name in names]
    if all(map(_is_leaf, leaves)):
        return leaves, (len(args), tuple(plain)) if names else len(args)
    tree = args, {plain[i]: kwargs[name] for i, name in enumerate(names)}
    found, spec = _flatten(tree)
    try:
        return found, Nested(spec, _form(tree, unsure))
    except TypeError as error:
        raise InvalidArgumentError(f"the keys of a dict in an argument must be hashable values: {error}") from None


def _form(x: Any, unsure: Unsure | None) -> Hashable:
    """Return the exact representation of a structure; None stands for a leaf."""
    kind: Any = type(x)
    if kind is tuple or kind is list:
        return kind, *[_form(each, unsure) for each in x]
    if kind is dict:
        return kind, *[(represent(key, unsure), _form(value, unsure)) for key, value in x.items()]
    if _is_leaf(x) or _optree().tree_is_leaf(x, none_is_leaf=True, namespace=NAMESPACE):
        return None
    children, made_of, *_ = _optree().tree_flatten_one_level(x, none_is_leaf=True, namespace=NAMESPACE)
    if issubclass(kind, dict):  # an OrderedDict, which weft does not order, or a defaultdict
        factory = represent(getattr(x, "default_factory", None), unsure)
        return kind, factory, *[(represent(key, unsure), _form(x[key], unsure)) for key in x]
    return kind, represent(made_of, unsure, takes_mutable=True), *[_form(each, unsure) for each in children]


def _is_leaf(x: object) -> bool:
    """Return True if `x` need not be flattened."""
    return (
        x is None
        or is_array(x)
        or isinstance(x, (str, bytes, bool, int, float, complex, np.generic, Same, RaggedTensor))
    )


def unflatten_call(leaves: Sequence[Any], structure: Structure) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with these leaves."""
    if type(structure) is int:
        return tuple(leaves), {}
    if type(structure) is tuple:
        count, names = structure
        return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
    return structure.spec.unflatten(leaves)


def arguments_of(structure: Structure) -> tuple[int | str, ...]:
    """Return for each leaf of a call the argument that it belongs to: a position, or a name."""
    if type(structure) is int:
        return tuple(range(structure))
    if type(structure) is tuple:
        count, names = structure
        return (*range(count), *names)
    return tuple(path[1] for path in structure.spec.paths())


def flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of nested values, and a function that builds such values of leaves."""
    if _is_leaf(tree):
        return [tree], only
    if type(tree) in (tuple, list) and all(map(_is_leaf, tree)):
        return list(tree), type(tree)
    leaves, structure = _flatten(tree)
    return leaves, structure.unflatten


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    optree = _optree()
    check_nesting("an argument or result", tree, _inside, DEEPEST)
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    unknown = {type(x) for x in leaves if is_dataclass(x)}
    if not unknown:
        return leaves, structure
    for dataclass in unknown:
        _register(optree, dataclass)
    return _flatten(tree)


#: The largest depth of nested arguments and results.
DEEPEST = 256


def _inside(x: Any) -> Any:
    """Return the children of a container or a dataclass, None for anything else."""
    if isinstance(x, (list, tuple)):
        return items("a list", x)
    if isinstance(x, deque):
        return deque.copy(x)
    if isinstance(x, dict):
        return dict.values(x)
    if is_dataclass(x):
        return [getattr(x, field.name) for field in dataclasses.fields(x)]
    return None


def _register(optree: Any, dataclass: type) -> None:
    """Register a dataclass with optree; its fields are the children."""
    names = tuple(field.name for field in dataclasses.fields(dataclass))

    def flatten(x: Any) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
        return tuple(getattr(x, name) for name in names), None, names

    def unflatten(_: None, children: Sequence[Any]) -> Any:
        return filled_dataclass(dataclass, zip(names, children, strict=True))

    try:
        optree.register_pytree_node(dataclass, flatten, unflatten, namespace=NAMESPACE)
    except ValueError:  # another thread was faster
        return


def filled_dataclass(dataclass: Any, values: Iterable[tuple[str, Any]]) -> Any:
    """Return a dataclass with these fields, made without `__init__`: what that computes is among the fields."""
    made: Any = object.__new__(dataclass)
    for name, value in values:
        object.__setattr__(made, name, value)
    return made


def _optree() -> Any:
    try:
        import optree
    except ImportError as error:
        raise ImportError("nested arguments need optree: pip install 'weft[batched]'") from error
    return optree


def replaced(leaves: Sequence[Any], places: Iterable[int], values: Iterable[Any]) -> list[Any]:
    """Return the leaves with other values at some places."""
    whole = list(leaves)
    for i, x in zip(places, values, strict=True):
        whole[i] = x
    return whole


def describe_leaves(leaves: Sequence[Any]) -> list[str]:
    """Return the dtype and shape of each array, and the type of each other leaf, for an error message."""
    return [f"{x.dtype}{list(x.shape)}" if is_array(x) else type(x).__name__ for x in leaves]
