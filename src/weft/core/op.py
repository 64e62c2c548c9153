"""The decorators `op`, which makes a function an op, and `gradient`, which gives an op its gradient.

The signature of the function defines the op. Parameters annotated `Array` (or `list[Array]`, or either `| None`) are inputs, and
so are those annotated `Host`, whose values are read on the host; all others are attributes. The outputs are the fields of the
returned NamedTuple, or one array, or a list, under the name given to `op`. The gradient is a second function. Its first
parameter is the cotangent of the outputs; the names of its other parameters say what to save from the forward pass: inputs,
outputs and attributes of the op. It returns `{input name: gradient}`. Inputs and outputs may be variants (`Variant`), and an
attribute may be the handle of a resource (`Handle`); such an op is not recorded, because the arrays inside have their own graph.

    @op("Scale", output="scaled")
    def scale(x: Array, factor: Array, power: int = 1) -> Array: ...

    @gradient(scale)
    def scale_gradient(g, x, factor, power): ...

A function whose call waits for other callers returns a `Ticket`; the op waits for its result, `weft.aio` awaits it. Adapters
see a `BoundCall` and flat tuples of arrays, without names or structure.

Every call first checks its inputs (`core.inputs`) and refuses by name whatever cannot be read as an array. Beside arrays of JAX,
NumPy arrays are converted to JAX, unless they are `Host`.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, OpError
from . import adapters
from .arrays import (
    Array,
    Handle,
    Host,
    Passthrough,
    Variant,
    common_library,
    get_library,
    library_of,
)
from .inputs import beside_jax, is_fine, is_own, items, shown, take, take_host, take_host_list, take_list
from .small import are_plain
from .ticket import Ticket

#: TensorFlow's op name -> Op, in the order of definition.
TABLE: dict[str, Op] = {}

_LOADED = sys.modules

Gradient: TypeAlias = Callable[..., dict[str, Any]]

#: For each of several values the length of a list, None for an array; None if no value is a list.
Sizes: TypeAlias = "tuple[int | None, ...] | None"

_REQUIRED = inspect.Parameter.empty

#: An input that no call has.
_NEVER = ((sys.maxsize, "", True),)


class Op:
    """One op: called like the function it was made from, differentiable where it has a gradient."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        recorded: bool = True,
        waits: bool = False,
        output: str = "output",
        internal: bool = False,
    ) -> None:
        hints = typing.get_type_hints(function, include_extras=True)
        returns = hints.pop("return")
        self.name = name
        self.function = function
        self.signature = inspect.signature(function)
        self.inputs = tuple(p for p in self.signature.parameters if _is_array(hints.get(p)))
        self._names = tuple(self.signature.parameters)
        self._parameters = tuple((p.name, p.default) for p in self.signature.parameters.values())
        self.places = tuple(map(self._names.index, self.inputs))
        # For each input its place, its name, the function that checks it, and whether it is data: all data has one library.
        checks = [(place, name, *_check(hints[name])) for place, name in zip(self.places, self.inputs, strict=True)]
        self._checks = () if internal else tuple(checks)
        # For each input its place, its name, and whether it is a list: what `are_plain` needs. Variants are never plain.
        plain = [(place, name, check not in (take, take_host)) for place, name, check, _ in checks]
        self._plain = _NEVER if any(check is _variant for _, _, check, _ in checks) else tuple(plain)
        self.recorded = recorded and not any(hint in (Variant, Handle) for hint in [*hints.values(), returns])
        self.waits = waits
        self.outputs = () if returns is type(None) else tuple(getattr(returns, "_fields", (output,)))
        self.result = returns if hasattr(returns, "_fields") else None
        self.gradient: Gradient | None = None
        self.gradient_parameters: tuple[str, ...] = ()  # without the cotangent
        self.saved: tuple[int, ...] = ()  # the inputs and outputs among them, counted from the first input
        # For each of them the place of an attribute, or -1 for a saved array.
        self.gradient_sources: tuple[int, ...] = ()
        self.non_differentiable: tuple[int, ...] = ()  # outputs that no gradient flows through
        self.__doc__ = function.__doc__
        self.__name__ = name
        self.__signature__ = self.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if are_plain(args, kwargs, self._plain):
                return self.run_and_wait(args, kwargs)
            args, kwargs = self.take(args, kwargs)
            adapter = self.adapter(args, kwargs)
            if adapter is None:
                return self.run_and_wait(args, kwargs)
            call, arrays = self.bind(args, kwargs)
            return call.pack(adapter.apply(call, arrays))
        except OpError as error:
            self.add_note(error, args, kwargs)
            raise

    def run_and_wait(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function without recording, and wait for its result if it returns a `Ticket`."""
        result = self.function(*args, **kwargs)
        return result.wait() if isinstance(result, Ticket) else result

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start a call that must not be recorded; returns its result or a `Ticket`."""
        if not are_plain(args, kwargs, self._plain):
            args, kwargs = self.take(args, kwargs)
            if self.adapter(args, kwargs) is not None:
                raise FailedPreconditionError(
                    "an awaited call cannot be differentiated: pass arrays that record no gradient"
                )
        return self.function(*args, **kwargs)

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with checked inputs; calling the function then reports missing and surplus arguments."""
        given, count = list(args), len(args)
        named = dict(kwargs) if kwargs else kwargs
        first: type | None = None  # the type of the first data array
        is_mixed = False
        for place, name, check, is_data in self._checks:
            if place < count:
                value = given[place]
            elif name in named:
                value = named[name]
            else:
                continue
            if check is take or check is take_host:
                is_checked = is_fine(value)
            else:
                is_checked = check is not items and type(value) is list and all(map(is_fine, value))
            if not is_checked:
                value = check(name, value)
                if place < count:
                    given[place] = value
                else:
                    named[name] = value
            if is_data:
                for x in value if type(value) is list else (value,):
                    if first is None:
                        first = type(x)
                    elif type(x) is not first:
                        is_mixed = True
        if is_mixed:
            self._unify_libraries(given, named)
        return tuple(given), named

    def _unify_libraries(self, given: list[Any], named: dict[str, Any]) -> None:
        """Convert NumPy data beside arrays of JAX to JAX; refuse any other mix of libraries."""
        found: list[tuple[Any, Any]] = []  # the list or dict of each data argument, and its key there
        for place, name, _, is_data in self._checks:
            if is_data and (place < len(given) or name in named):
                found.append((given, place) if place < len(given) else (named, name))
        flat: list[Any] = []
        for held, key in found:
            flat.extend(held[key] if type(held[key]) is list else [held[key]])
        if get_library(common_library(flat)).converts_numpy:
            for held, key in found:
                value = held[key]
                held[key] = [beside_jax(x) for x in value] if type(value) is list else beside_jax(value)

    def adapter(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The adapter that must record this call for its framework; None if nothing is differentiated."""
        if not self.recorded or not ("torch" in _LOADED or "jax" in _LOADED or "autograd" in _LOADED):
            return None
        count = len(self.inputs)
        found = _adapter(args[:count])
        if found is None and len(args) < count:
            found = _adapter([kwargs[name] for name in self.inputs if name in kwargs])
        return found

    def __repr__(self) -> str:
        return f"<op {self.name}{self.signature}>"

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[BoundCall, tuple[Array, ...]]:
        """Split a call into a `BoundCall` and its inputs as a flat tuple."""
        values = self._values(args, kwargs)
        inputs = [values[place] for place in self.places]
        for place in self.places:  # a recorded call must not keep arrays alive that its gradient does not need
            values[place] = None
        flat, sizes = _flatten(inputs)
        return BoundCall(self, values, sizes), flat

    def _values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The value of every parameter, in order."""
        # Not by the slow `Signature.bind`: row "forward with a node" of benchmarks/gradients.py.
        values, named = list(args), 0
        for name, default in self._parameters[len(args) :]:
            if name in kwargs:
                values.append(kwargs[name])
                named += 1
            elif default is not _REQUIRED:
                values.append(default)
        if len(values) != len(self._names) or named != len(kwargs):
            self.signature.bind(*args, **kwargs)  # raises
        return values

    def add_note(self, error: OpError, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Add the shapes of the inputs to an error that has no note yet."""
        if not getattr(error, "__notes__", None):
            named = zip(self.signature.parameters, args, strict=False)
            given = {name: value for name, value in [*named, *kwargs.items()] if name in self.inputs}
            shown = ", ".join(f"{name}: {_describe(value)}" for name, value in given.items())
            error.add_note(f"in weft.raw_ops.{self.name}({shown})")


class BoundCall:
    """One call of an op: its attributes, and the structure of its flat inputs and outputs."""

    def __init__(self, op: Op, values: list[Any], sizes: Sizes) -> None:
        self.op = op
        self.values = values  # of all parameters in order, None for the inputs
        self.sizes = sizes
        self.output_sizes: Sizes = None
        self.saved_sizes: Sizes = None
        self.outputs: tuple[Array, ...] | None = None  # if the call ran before it was recorded

    @property
    def key(self) -> Any:
        """A key of this call as a function of its arrays: calls with equal keys are the same function."""
        return self.op.name, self.sizes, _hashable(self.values)

    def run(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Run the op; returns its outputs, flat."""
        args = self.values.copy()
        fields = unflatten(inputs, self.sizes)
        for i, place in enumerate(self.op.places):
            args[place] = fields[i]
        return self.flat(self.op.run_and_wait(tuple(args), {}))

    def flat(self, result: Any) -> tuple[Array, ...]:
        """The result of the op as a flat tuple."""
        flat, self.output_sizes = _flatten(result if self.op.result else [result])
        return flat

    def pack(self, outputs: Sequence[Array]) -> Any:
        """Flat outputs in the structure that the op returns."""
        fields = unflatten(outputs, self.output_sizes)
        return self.op.result(*fields) if self.op.result else fields[0]

    def save(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> tuple[Array, ...]:
        """The inputs and outputs that the gradient needs, flat."""
        fields = [*unflatten(inputs, self.sizes), *unflatten(outputs, self.output_sizes)]
        flat, self.saved_sizes = _flatten([fields[i] for i in self.op.saved])
        return flat

    def pull_back(self, grads: Sequence[Array | None], saved: Sequence[Array]) -> tuple[Array | None, ...]:
        """The gradient of every flat input, None for none; `grads` may be None for integer and non-differentiable outputs."""
        by_input = self.gradients(grads, saved)
        if self.sizes is None:
            return tuple([by_input.get(name) for name in self.op.inputs])
        flat: list[Array | None] = []
        for name, size in zip(self.op.inputs, self.sizes, strict=True):
            value = by_input.get(name)
            flat.extend([value] if size is None else value if value is not None else [None] * size)
        return tuple(flat)

    def gradients(self, grads: Sequence[Array | None], saved: Sequence[Array]) -> dict[str, Any]:
        """The gradient of every input that has one, by name."""
        if self.op.gradient is None:
            raise NotFoundError(f"{self.op.name} has no gradient")
        fields = unflatten(grads, self.output_sizes)
        cotangent = self.op.result(*fields) if self.op.result else fields[0]
        arrays = iter(unflatten(saved, self.saved_sizes))
        sources = [next(arrays) if place < 0 else self.values[place] for place in self.op.gradient_sources]
        return self.op.gradient(cotangent, *sources)


def op(
    name: str,
    recorded: bool = True,
    waits: bool = False,
    output: str = "output",
    internal: bool = False,
) -> Callable[[Callable[..., Any]], Op]:
    """Make a function the op called `name`.

    - `recorded`: False for an op made of other ops and array arithmetic. Those are recorded instead, and its host arrays stay
      host arrays (JAX would make tracers of them). `vjp` still uses its gradient.
    - `waits`: True if calls wait for each other. Each such call must run exactly once.
    - `output`: the name of the output of a function that returns one array or one list of arrays. The fields of a NamedTuple
      have their own names, and a function that returns None has no output.
    - `internal`: True for an op that only weft calls, with checked inputs.
    """

    def define(function: Callable[..., Any]) -> Op:
        if name in TABLE:
            raise ValueError(f"the op {name} is defined twice")
        TABLE[name] = Op(name, function, recorded, waits, output, internal)
        return TABLE[name]

    return define


def gradient(of: Op, through: Sequence[str] = ()) -> Callable[[Gradient], Gradient]:
    """Make a function the gradient of an op. It flows `through` the named outputs, by default through all.

    The cotangents of the other outputs may be None.
    """

    def define(function: Gradient) -> Gradient:
        _, *names = inspect.signature(function).parameters
        known, arrays = {*of.signature.parameters, *of.outputs}, [*of.inputs, *of.outputs]
        if unknown := [name for name in [*names, *through] if name not in known]:
            raise TypeError(f"the gradient of {of.name} has the parameters {unknown}, which {of.name} does not have")
        of.gradient, of.gradient_parameters = function, tuple(names)
        of.saved = tuple(arrays.index(name) for name in names if name in arrays)
        of.gradient_sources = tuple(-1 if name in arrays else of._names.index(name) for name in names)
        of.non_differentiable = tuple(i for i, name in enumerate(of.outputs) if through and name not in through)
        return function

    return define


def _is_array(hint: Any) -> bool:
    """`Array`, `list[Array]`, `Sequence[Array]` or one of them `| None`; the same with `Host` and `Passthrough`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, list, Sequence):
        return any(_is_array(part) for part in typing.get_args(hint))
    return bool(hint in (Array, Host, Passthrough, Variant))


def _check(hint: Any) -> tuple[Callable[[str, Any], Any], bool]:
    """The function that checks an input with this annotation, and whether the input is data."""
    if hint == Variant:
        return _variant, False
    if hint == list[Passthrough]:
        return items, False
    if hint in (list[Array], list[Host]):
        return (take_list, True) if hint == list[Array] else (take_host_list, False)
    return (take, True) if hint == Array else (take_host, False)


def _variant(name: str, x: Any) -> Any:
    if not is_own(x):
        raise InvalidArgumentError(f"{name} must be a variant array, got {shown(x)}")
    return x


def _adapter(values: Any) -> Any:
    """The adapter of the first value, or value in a list, that a framework records."""
    for value in values:
        kind = type(value)
        if kind is np.ndarray:
            continue
        if kind is list or kind is tuple:
            for x in value:  # one level: there are no lists of lists of arrays
                if type(x) is not np.ndarray and (library := library_of(x)) is not None and library != "numpy":
                    adapter = adapters.of(library)
                    if adapter.is_recording(x):
                        return adapter
        elif (library := library_of(value)) is not None and library != "numpy":
            adapter = adapters.of(library)
            if adapter.is_recording(value):
                return adapter
    return None


def is_recording(x: Array) -> bool:
    """True if a framework would record an operation on `x` now."""
    return _adapter((x,)) is not None


def _flatten(values: Sequence[Any]) -> tuple[tuple[Array, ...], Sizes]:
    """Arrays and lists of arrays as one flat tuple, and the length of each list."""
    for value in values:
        if isinstance(value, (list, tuple)):
            break
    else:
        return tuple(values), None
    flat: list[Array] = []
    sizes: list[int | None] = []
    for value in values:
        is_list = isinstance(value, (list, tuple))
        flat.extend(value if is_list else [value])
        sizes.append(len(value) if is_list else None)
    return tuple(flat), tuple(sizes)


def unflatten(flat: Sequence[Array], sizes: Sizes) -> Sequence[Any]:
    """The arrays and lists of arrays that `_flatten` made a flat tuple."""
    if sizes is None:
        return flat
    values: list[Any] = []
    at = 0
    for size in sizes:
        values.append(flat[at] if size is None else list(flat[at : at + size]))
        at += 1 if size is None else size
    return values


def _hashable(values: Sequence[Any]) -> Any:
    return tuple([tuple(value) if isinstance(value, list) else value for value in values])


def _describe(value: Any) -> str:
    if type(value) is list or type(value) is tuple:
        return "[" + ", ".join([_describe_one(x) for x in value[:4]]) + (", ..." if len(value) > 4 else "") + "]"
    return _describe_one(value)


def _describe_one(value: Any) -> str:
    if type(value) is list or type(value) is tuple:  # one level is enough, and a list may hold itself
        return "[...]" if value else "[]"
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        return type(value).__name__ if shape is None else f"{dtype}{list(shape)}"
    except Exception:  # an object whose own code raises
        return type(value).__name__
