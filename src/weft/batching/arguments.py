"""The arguments of a batched call: checked, split into arrays and a batch key, and put together again for the function."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from importlib import import_module
from math import inf
from typing import Any

import numpy as np

from ..core import adapters, check
from ..core.arrays import Array, is_concrete, library_of
from ..core.inputs import refuse_odd, shown, with_article
from ..core.interrupts import as_exception
from ..core.small import no_rows, rows_alike
from ..core.warn import warn_caller
from ..errors import InvalidArgumentError
from ..ragged.variant import VariantArray
from . import batch_arrays, items, layout, lengths, trees
from .exact import AS_IS, Unsure, represent
from .interned import Interned
from .layout import CallArray
from .lengths import PadRule
from .modes import jax_mode, torch_mode
from .options import Options
from .ragged_arguments import RaggedRule
from .request import BatchKey, CallContext, Request

#: The largest cost of a call.
MOST_COST = 2.0**53
_NO_SHARED: dict[str, Any] = {}
_NO_STATICS: dict[int, Any] = {}
#: Parameters that no option can name, and that cannot be passed by their name; None is for those that do not exist.
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, None)
_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, None)


class Arguments:
    """The parameters of a batcher's function: makes requests of calls, and calls of batches."""

    def __init__(self, f: Callable[..., Any], options: Options, name: str) -> None:
        self._parameters = _parameters(f)
        #: The parameters that an option names, each by at most one.
        self._ruled: set[str] = set()
        self._shared = self._ruled_by("shared", options.shared)
        self._items = self._ruled_by("items", options.items)
        self._places = self._shared | self._items
        #: How the arrays of an argument are batched, by its position and its name, if not as plain rows.
        self._rules: dict[float | str, layout.Rule] = {}
        rules = layout.rules(options)
        for name, place in (
            self._ruled_by("pad", options.pad or ()) | self._ruled_by("ragged", options.ragged)
        ).items():
            self._rules[place] = self._rules[name] = rules[name]
        self._mask, self._rows = options.pass_mask, options.pass_rows
        #: The parameters that the batcher fills in.
        self._filled: tuple[str, ...] = ()
        self._fill("pass_mask", self._mask)
        self._fill("pass_rows", self._rows)
        for rule in rules.values():
            if isinstance(rule, PadRule):
                self._fill("pass_lengths", rule.passed_as)
        #: Parameters that are named as if the batcher filled them in: a call must pass them.
        self._missed = [name for name in ("mask", "rows") if self._is_required(name) and name not in self._filled]
        self._has_waste = options.max_waste is not None
        self._has_rows, self._user_key, self._cost = options.rows, options.key, options.cost
        self._keys = Interned(BatchKey)  # a key lives as long as a queue or a request refers to it
        has_functions = options.key is not None or options.cost is not None
        self._is_plain = options.rows and not (self._places or self._rules or has_functions or self._missed)
        self._last: BatchKey | None = None  # the key of the last call with one array
        self._name, self._has_warned = name, False
        self._unsure = None if options.key is not None else Unsure()  # the option key tells what is the same

    # --- calls ---

    def request(self, context: CallContext, args: tuple[Any, ...], kwargs: dict[str, Any], is_vjp: bool) -> Request:
        """Check the arguments of a call and make a request of them."""
        if self._is_plain and len(args) == 1 and not kwargs:  # benchmark row "no-op, 1 thread"
            request = self._plain_request(context, args, is_vjp)
            if request is not None:
                return request
        try:
            return self._checked_request(context, args, kwargs, is_vjp)
        except Exception:
            raise
        except BaseException as error:  # of user code, such as that of `key`
            raise as_exception(error) from error

    def _checked_request(
        self, context: CallContext, args: tuple[Any, ...], kwargs: dict[str, Any], is_vjp: bool
    ) -> Request:
        given = trees.unwrap_instance(args)
        user_key = self._user_key(*given, **kwargs) if self._user_key is not None else None
        cost = self._cost(*given, **kwargs) if self._cost is not None else None
        shared: dict[str, Any] = {}
        objects = items.NO_ITEMS
        if self._shared:
            args, kwargs, shared = _without(self._shared, args, kwargs)
        if self._items:
            args, kwargs, own = _without(self._items, args, kwargs)
            objects = items.of_call(own, self._has_rows)
        if self._filled or self._missed:
            self._check_names(args, kwargs)
        leaves, structure = trees.flatten_call(args, kwargs, self._unsure)
        arrays, array_keys, statics, mode, call_arrays = self._sort(leaves, structure)
        exact = self._exact(statics, user_key)
        key = self._key(structure, exact, array_keys, mode, jax_mode(), is_vjp, statics)
        if self._unsure is not None and self._unsure.found is not None:
            self._warn_unsure(self._unsure)
        count = items.count_rows(
            objects, layout.count_rows(arrays, call_arrays, leaves) if arrays or not objects else None
        )
        cost = max(count, 1) if self._cost is None else _check_cost(cost)  # a call without rows counts as one row
        request = Request(context, key, arrays, count, cost, shared, objects, call_arrays)
        request.is_traced = _is_traced(arrays, shared)
        if self._has_waste:
            request.lengths = lengths.rounded(call_arrays or ())
        return request

    def _plain_request(self, context: CallContext, args: tuple[Any], is_vjp: bool) -> Request | None:
        """Make a request of a call with one argument, None if the argument needs a closer look."""
        x, mode, jax, key = args[0], torch_mode(), jax_mode(), self._last
        count = -1
        if (
            key is not None
            and key.is_vjp == is_vjp
            and (key.torch_mode is mode or key.torch_mode == mode)
            and (key.jax_mode is jax or key.jax_mode == jax)
        ):
            count = rows_alike(x, key.like, key.grad_enabled)
        if count < 0 or key is None:
            key = self._plain_key(x, mode, jax, is_vjp)
            if key is None:
                return None
            self._last, count = key, x.shape[0]
        return Request(context, key, args, count, count or 1, _NO_SHARED)

    def _plain_key(self, x: Any, mode: Any, jax: Any, is_vjp: bool) -> BatchKey | None:
        """Return the key of a call with the one argument `x`, None if `x` needs a closer look."""
        if type(x) is np.ndarray:
            if x.dtype not in batch_arrays.PLAIN or not x.shape or x.dtype.metadata is not None:
                return None
            key = self._key(1, (), ((x.dtype.char, x.shape[1:]),), mode, jax, is_vjp, _NO_STATICS)
            if key.like is None:
                key.like = no_rows(x)
        elif library_of(x) == "torch" and type(x) in adapters.of("torch", __package__).TENSORS and x.dim():
            key = self._key(1, (), (array_key(x, mode),), mode, jax, is_vjp, _NO_STATICS)
            if key.like is None:
                key.like = adapters.of("torch", __package__).no_rows(x, mode.grad and x.requires_grad)
        else:
            return None
        return key

    def _sort(
        self, leaves: Sequence[Any], structure: trees.Structure
    ) -> tuple[list[Array], tuple[Hashable, ...], dict[int, Any], Any, list[CallArray | None] | None]:
        """Return the arrays among the leaves of a call, their keys, the other leaves, the mode of PyTorch, and the `CallArray`s."""
        mode = torch_mode()
        names = trees.arguments_of(structure) if self._rules else ()
        call_arrays: list[CallArray | None] | None = [] if self._rules else None
        arrays: list[Array] = []
        array_keys: list[Hashable] = []
        statics: dict[int, Any] = {}
        if not self._has_rows:
            leaves = numbers_as_arrays(leaves)
        for i, x in enumerate(leaves):
            rule, splits = self._rules.get(names[i]) if call_arrays is not None else None, None
            if isinstance(rule, RaggedRule):
                x, splits = rule.opened(x)
            if not trees.is_array(x):
                statics[i] = x
                continue
            x = self._array(i, x)
            call_array: CallArray | None = None
            if isinstance(rule, RaggedRule):
                call_array = rule.array(x, splits)
            elif rule is not None:
                call_array = rule.array(x)
            if call_arrays is not None:
                call_arrays.append(call_array)
            arrays.append(x)
            array_keys.append(array_key(x, mode, call_array))
        lengths.check_equal(call_arrays or ())
        return arrays, tuple(array_keys), statics, mode, call_arrays

    def _array(self, i: int, x: Any) -> Array:
        """Return an argument as an array with a dimension of rows. PyTorch's keep their graph."""
        if type(x) is not VariantArray:
            library = library_of(x) or "numpy"
            refuse_odd(f"argument {i}", x)
            if library == "torch":  # checked by its own module, as tracers are
                x = adapters.of("torch", __package__).plain(x)
            elif library != "jax" or is_concrete(x):
                x = batch_arrays.tensor(f"argument {i}", x, library)
                if library == "numpy" and x.dtype.metadata is not None:
                    x = x.astype(x.dtype.char)
        return x if self._has_rows else x[None]

    def _exact(self, statics: dict[int, Any], user_key: Any) -> Hashable:
        """Return the representation of the non-array arguments and of the user's key."""
        parts: list[Any] = []
        try:
            for i, x in statics.items():
                kind = type(x)
                parts.append((i, kind, x) if kind in AS_IS else (i, represent(x, self._unsure)))
        except (TypeError, RecursionError) as error:
            raise InvalidArgumentError(
                f"non-array arguments must be hashable, got {with_article(kind.__name__)} as leaf {i} ({error}); the option items "
                "takes any object"
            ) from None
        if self._user_key is None:
            return tuple(parts)
        try:
            return tuple(parts), represent(user_key, self._unsure)
        except (TypeError, RecursionError) as error:
            raise InvalidArgumentError(f"key must return a hashable value, got {shown(user_key)} ({error})") from None

    def _warn_unsure(self, unsure: Unsure) -> None:
        """Warn, once, that only identity tells some arguments apart."""
        kind, unsure.found = unsure.found, None
        if kind is None or self._has_warned:
            return
        self._has_warned = True
        warn_caller(
            f"equal arguments of the class {kind.__qualname__} cannot be pickled, so nothing tells whether they are the same: "
            f"calls of the batcher {self._name} share a batch only if they pass the same object; pass it, or make the batcher with "
            "the option key, which then tells what is the same",
        )

    def _key(self, *parts: Any) -> BatchKey:
        """Return the one key with these parts."""
        *compared, statics = parts
        return self._keys.of((*compared, self._has_rows), statics)

    def with_arrays(self, traced: Request, arrays: Sequence[Array], shared: dict[str, Any], is_vjp: bool) -> Request:
        """Return the request of a traced call with concrete arrays in place of the traced ones."""
        for x in trees.flatten(shared)[0]:
            if trees.is_array(x):
                batch_arrays.tensor("a shared argument", x, library_of(x) or "numpy")
        arrays = [batch_arrays.tensor(f"array {i}", x, library_of(x) or "numpy") for i, x in enumerate(arrays)]
        old = traced.key
        call_arrays = traced.call_arrays or [None] * len(arrays)
        array_keys = tuple(
            array_key(x, old.torch_mode, call_array) for x, call_array in zip(arrays, call_arrays, strict=True)
        )
        key = self._key(old.structure, old.exact, array_keys, old.torch_mode, old.jax_mode, is_vjp, old.statics)
        request = Request(
            traced.context, key, arrays, traced.count, traced.rows, shared, traced.items, traced.call_arrays
        )
        request.lengths = traced.lengths
        return request

    def _place(self, name: str) -> float:
        """Return the position of a parameter, infinity if it is keyword-only or not known."""
        if name not in self._parameters or self._parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
            return inf
        return list(self._parameters).index(name)

    def _kind(self, name: str) -> Any:
        """Return the kind of a parameter, None if there is none of this name and the function does not take any name."""
        if name in self._parameters:
            return self._parameters[name].kind
        kinds = {parameter.kind for parameter in self._parameters.values()}
        takes_any = not kinds or inspect.Parameter.VAR_KEYWORD in kinds  # builtins have no signature
        return inspect.Parameter.KEYWORD_ONLY if takes_any else None

    def _is_required(self, name: str) -> bool:
        parameter = self._parameters.get(name)
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return parameter is not None and parameter.kind in kinds and parameter.default is inspect.Parameter.empty

    def _fill(self, option: str, name: str | None) -> None:
        """Note that the batcher fills in a parameter which an option names; refuse one that cannot be passed."""
        if name is None:
            return
        if self._kind(name) in _UNNAMED:
            raise InvalidArgumentError(f"{option} must name a parameter of the function, got {shown(name)}")
        if name in self._ruled or name in self._filled:
            raise InvalidArgumentError(f"{option} must name a parameter that no other option names, got {shown(name)}")
        self._filled += (name,)
        self._places[name] = inf  # it is passed by name

    def _check_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call that passes a parameter which the batcher fills in, or misses one which it does not fill in."""
        for name in self._filled:
            if name in kwargs or self._place(name) < len(args):
                raise InvalidArgumentError(f"the argument {name!r} is filled in by the batcher: call without it")
        for name in self._missed:
            if name not in kwargs and self._place(name) >= len(args):
                raise InvalidArgumentError(
                    f"the parameter {name!r} of the function got no argument: pass one, or make the batcher with "
                    f"pass_{name}={name!r}, which fills it in; its name alone does not"
                )

    def _ruled_by(self, option: str, names: Iterable[str]) -> dict[str, float]:
        """Return the positions of the parameters that an option names."""
        for name in names:
            if self._kind(name) in _COLLECTING:
                raise InvalidArgumentError(f"{option} must name parameters of the function, got {shown(name)}")
            if name in self._ruled:
                raise InvalidArgumentError(
                    f"{option} must name parameters that no other option names, got {shown(name)}"
                )
            self._ruled.add(name)
        return {name: self._place(name) for name in names}

    # --- batches ---

    def apply(
        self,
        f: Callable[..., Any],
        key: BatchKey,
        arrays: Sequence[Array],
        others: Mapping[str, Any],  # shared arguments and items by name
        count: int,
        size: int,
    ) -> Any:
        """Call `f` with a batch of `size` rows, of which the first `count` belong to callers."""
        if type(key.structure) is int and not (key.statics or others or self._filled):
            return f(*arrays)  # benchmark row "no-op, 1 thread"
        statics, given = key.statics, iter(arrays)
        leaves = [statics[i] if i in statics else next(given) for i in range(len(arrays) + len(statics))]
        args, kwargs = trees.unflatten_call(leaves, key.structure)
        places = list(args)
        for name, value in others.items():
            if self._places[name] < len(places):
                places[int(self._places[name])] = value
            else:
                kwargs[name] = value
        if self._mask is not None:
            kwargs[self._mask] = _mask(arrays, count, size)
        if self._rows is not None:
            kwargs[self._rows] = count
        return f(*trees.unwrap_instance(tuple(places)), **kwargs)


def _without(
    names: dict[str, float], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Return the arguments with None in place of some, given by name and position, and these by name."""
    places, named, taken = list(args), dict(kwargs), {}
    for name, place in names.items():
        if place < len(places):
            taken[name], places[int(place)] = places[int(place)], None
        elif name in named:
            taken[name], named[name] = named[name], None
    return tuple(places), named, taken


def numbers_as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves with numbers as arrays without dimensions: of PyTorch if a leaf is a tensor, else of NumPy."""
    tensor = next((x for x in leaves if library_of(x) == "torch"), None)
    if tensor is None:
        asarray: Callable[[Any], Array] = np.asarray
    else:
        asarray = functools.partial(sys.modules["torch"].as_tensor, device=tensor.device)
    return [asarray(x) if isinstance(x, (bool, int, float, complex, np.generic)) else x for x in leaves]


def _parameters(f: Callable[..., Any]) -> dict[str, Any]:
    if "torch" in sys.modules and isinstance(f, sys.modules["torch"].nn.Module):
        f = f.forward  # the signature of __call__ says nothing
    try:
        return dict(inspect.signature(f).parameters)
    except Exception:  # builtins and ufuncs have no signature, and a callable object has code of its own
        return {}


def _is_traced(arrays: Sequence[Array], shared: dict[str, Any]) -> bool:
    """Return True if JAX traces an array or a shared argument."""
    if "jax" not in sys.modules:
        return False
    if shared and import_module("weft.batching.jax").is_traced(shared):
        return True
    return not all(map(is_concrete, arrays))


def array_key(x: Array, mode: Any, call_array: CallArray | None = None) -> Hashable:
    """Return the properties of an array that the arrays of other calls must share: library, dtype, trailing shape, device."""
    if type(x) is VariantArray:
        return ("variant", batch_arrays.library_in(x))
    library = library_of(x)
    key: tuple[Any, ...]
    if library == "torch":
        key = adapters.of("torch", __package__).array_key(x, mode.grad)
    elif library == "jax":
        placed = (x.sharding, x.committed, x.weak_type) if is_concrete(x) else None
        key = ("jax", x.dtype, x.shape[1:], placed)
    elif x.dtype.kind == "O":
        key = ("O", x.shape[1:], frozenset(map(type, x.flat)))  # str, bytes
    else:
        key = (x.dtype.char, x.shape[1:])  # all are native, and equal dtypes may have other characters
    if call_array is None:
        return key
    at = 2 if library == "jax" else 1
    return (*key[:at], call_array.key(x.shape), *key[at + 1 :])


def _check_cost(cost: Any) -> int:
    found = check.plain(cost)
    if not (isinstance(found, (int, float)) and 0 < found <= MOST_COST):
        raise InvalidArgumentError(f"cost must return a positive number, got {shown(found)}")
    return found  # type: ignore[return-value]


def _mask(arrays: Sequence[Array], count: int, size: int) -> Array:
    """Return True for each row that belongs to a caller, as an array of the library and on the device of the first array."""
    mask = np.arange(size) < count
    return batch_arrays.like(mask, getattr(arrays[0], "flat_values", arrays[0])) if arrays else mask
