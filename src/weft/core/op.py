"""The whole mechanism: `op` turns a function into an op, `gradient` gives it its pull-back.

An op is one function. Its signature is its definition: parameters annotated `Array` (or `list[Array]`, or either
`| None`) are inputs, and so are those annotated `Host`, whose values are read on the host; the others are attributes; the
outputs are the fields of the NamedTuple it returns, or one array, or a list, under the name that `op` is given. Its gradient is
a second function whose first parameter is the outputs' cotangent and whose other parameter names say what to keep from the
forward pass: inputs, outputs and attributes of the op. It returns `{input name: gradient}`. Inputs and outputs may be variants
(`Variant`), and an attribute the handle of a resource (`Handle`); such an op is not recorded, because what they hold carries its
own graph.

    @op("Scale", output="scaled")
    def scale(x: Array, factor: Array, power: int = 1) -> Array: ...

    @gradient(scale)
    def scale_gradient(g, x, factor, power): ...

A function whose call waits for other callers returns a `Ticket` of its result; the op waits for it, `weft.aio` awaits it.
Adapters see neither names nor structure, only a `Call` and flat tuples of arrays.

Before anything sees a call, its inputs are taken (`_inputs`): what is no array, or none that can be read, is refused by name.
Beside arrays of JAX, NumPy's become JAX's, unless they are `Host`.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import ArgumentTypeError, FailedPreconditionError, InvalidArgumentError, NotFoundError, OpError
from . import adapters
from .arrays import (
    Array,
    Handle,
    Host,
    Kept,
    Variant,
    asarray,
    common_library,
    dtype_of,
    library_of,
    namespace,
    over_memory,
)
from .inputs import beside_jax, is_fine, is_own, items, shown, take, take_host, take_host_list, take_list, together
from .small import are_plain
from .ticket import Ticket

#: TensorFlow's op name -> Op, in the order of definition.
TABLE: dict[str, Op] = {}

_LOADED = sys.modules

_FEW = 1 << 16  # elements below which what is done around a kernel takes longer than the kernel

Pull = Callable[..., dict[str, Any]]

#: The length of each list among some values, None for an array; None where there is no list.
Sizes: TypeAlias = "tuple[int | None, ...] | None"


class Op:
    """One op: called like the function it was made from, differentiable where it has a gradient."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        recorded: bool = True,
        meets: bool = False,
        kernel: Callable[[Any], str] | None = None,
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
        self._defaults = {n: p.default for n, p in self.signature.parameters.items() if p.default is not p.empty}
        self.places = tuple(map(self._names.index, self.inputs))
        # How each input is taken, and whether it is data, which has one library: place, name, how, whether it is data.
        self._takes = (
            () if internal else tuple([(*at, *_how(hints[at[1]])) for at in zip(self.places, self.inputs, strict=True)])
        )
        self._first, self._end = (self.places[0], self.places[-1] + 1) if self._takes else (0, 0)
        self.recorded = recorded and not any(hint in (Variant, Handle) for hint in [*hints.values(), returns])
        self.meets = meets
        self.kernel = kernel
        self.outputs = () if returns is type(None) else tuple(getattr(returns, "_fields", (output,)))
        self.result = returns if hasattr(returns, "_fields") else None
        self.pull: Pull | None = None
        self.wants: tuple[str, ...] = ()
        self.kept: tuple[int, ...] = ()  # which inputs and outputs are among them, counted from the first input
        self.asked: tuple[int, ...] = ()  # for each of them, an attribute's place, or -1
        self.still: tuple[int, ...] = ()  # outputs that no gradient flows through
        self.__doc__ = function.__doc__
        self.__name__ = name
        self.__signature__ = self.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            is_taken = are_plain(args, self._first, self._end)
            if not is_taken and not (self.kernel and self._are_tensors(args)):  # `run` looks at those
                args, kwargs = self.take(args, kwargs)
                is_taken = True
            adapter = self.adapter(args, kwargs)
            if adapter is None:
                return self.answer(args, kwargs)
            if not is_taken:
                args, kwargs = self.take(args, kwargs)
            call, arrays = self.bind(args, kwargs)
            return call.pack(adapter.apply(call, arrays))
        except OpError as error:
            self._add_note(error, args, kwargs)
            raise

    def answer(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the function returns, waited for if it waits for others; nothing is recorded."""
        result = self.run(args, kwargs)
        return result.wait() if isinstance(result, Ticket) else result

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives that is not recorded: its result, or a `Ticket` of it."""
        args, kwargs = self.take(args, kwargs)
        if self.adapter(args, kwargs) is not None:
            raise FailedPreconditionError("an awaited call is not differentiated: pass arrays that record no gradient")
        return self.function(*args, **kwargs)

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with its inputs taken; what is missing, or too much, is seen when the function is called."""
        given, count = list(args), len(args)
        named = dict(kwargs) if kwargs else kwargs
        first: type | None = None  # of the types of data
        is_mixed = False
        for place, name, how, is_data in self._takes:
            if place < count:
                value = given[place]
                if how is take or how is take_host:
                    if not is_fine(value):
                        value = given[place] = how(name, value)
                elif how is items or type(value) is not list or not all(map(is_fine, value)):
                    value = given[place] = how(name, value)
            elif name in named:
                value = named[name] = how(name, named[name])
            else:
                continue
            if is_data:
                for x in value if type(value) is list else (value,):
                    if first is None:
                        first = type(x)
                    elif type(x) is not first:
                        is_mixed = True
        if is_mixed:
            self._meet(given, named)
        return tuple(given), named

    def _are_tensors(self, args: tuple[Any, ...]) -> bool:
        """Whether all inputs are tensors of one type of torch's."""
        if len(args) < self._end or "torch" not in _LOADED:
            return False
        kind = type(args[self._first])
        if library_of(args[self._first]) != "torch":
            return False
        for i in range(self._first, self._end):  # noqa: SIM110  a generator would not compile
            if type(args[i]) is not kind:
                return False
        return True

    def _meet(self, given: list[Any], named: dict[str, Any]) -> None:
        """Let the data of a call be of one library: beside arrays of JAX, NumPy's become JAX's."""
        flat: list[Any] = []
        for place, name, _, is_data in self._takes:
            value = given[place] if place < len(given) else named.get(name)
            if is_data:
                flat.extend(value if type(value) is list else [value])
        if common_library(flat) != "jax":
            return
        for place, name, _, is_data in self._takes:
            if is_data and (place < len(given) or name in named):
                value = given[place] if place < len(given) else named[name]
                value = [beside_jax(x) for x in value] if type(value) is list else beside_jax(value)
                if place < len(given):
                    given[place] = value
                else:
                    named[name] = value

    def adapter(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The adapter that must record this call for its framework; None when nothing is being differentiated."""
        if not self.recorded or not ("torch" in _LOADED or "jax" in _LOADED or "autograd" in _LOADED):
            return None
        count = len(self.inputs)
        found = _adapter(args[:count])
        if found is None and len(args) < count:
            found = _adapter([kwargs[name] for name in self.inputs if name in kwargs])
        return found

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the function returns, or a `Ticket` of it; nothing is recorded."""
        if self.kernel and "torch" in _LOADED:
            first: Any = args[0] if args else kwargs.get(self.inputs[0])
            if library_of(first) == "torch":
                if first.numel() < _FEW and self.kernel(first) == "cpu":
                    return self._over_memory(args, kwargs)
                if self._takes:
                    args, kwargs = self.take(tuple(args), kwargs)
        return self.function(*args, **kwargs)

    def _over_memory(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The same, with tensors as NumPy arrays inside, if all of them can be that."""
        count = len(self.inputs)
        named = {name: kwargs[name] for name in self.inputs[len(args) :] if name in kwargs} if kwargs else {}
        arrays = over_memory([*args[:count], *named.values()])
        if arrays is None:
            if self._takes:
                args, kwargs = self.take(tuple(args), kwargs)
            return self.function(*args, **kwargs)
        if named:
            kwargs = {**kwargs, **dict(zip(named, arrays[len(args) :], strict=True))}
        result = self.function(*arrays[: len(args)], *args[count:], **kwargs)
        tensors = [_LOADED["torch"].from_numpy(array) for array in result]
        return self.result(*tensors)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<op {self.name}{self.signature}>"

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Call, tuple[Array, ...]]:
        """A call's inputs as one flat tuple, and everything else about it."""
        values = self._values(args, kwargs)
        inputs = [values[place] for place in self.places]
        for place in self.places:  # what is recorded must not hold arrays that it does not need
            values[place] = None
        flat, sizes = _flatten(inputs)
        return Call(self, values, sizes), flat

    def _values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Every parameter's value, in order. A good call is bound by hand: `Signature.bind` takes 5 us."""
        names = self._names
        if len(args) == len(names) and not kwargs:
            return list(args)
        given = dict(zip(names, args, strict=False))
        merged = {**self._defaults, **given, **kwargs}
        if len(merged) != len(names) or len(args) > len(names) or (kwargs and not given.keys().isdisjoint(kwargs)):
            self.signature.bind(*args, **kwargs)  # raises
        return [merged[name] for name in names]

    def _add_note(self, error: OpError, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if not getattr(error, "__notes__", None):
            named = zip(self.signature.parameters, args, strict=False)
            given = {name: value for name, value in [*named, *kwargs.items()] if name in self.inputs}
            shown = ", ".join(f"{name}: {_describe(value)}" for name, value in given.items())
            error.add_note(f"in weft.raw_ops.{self.name}({shown})")


class Call:
    """One call of an op: its attributes and how its flat inputs and outputs are to be read."""

    def __init__(self, op: Op, values: list[Any], sizes: Sizes) -> None:
        self.op = op
        self.values = values  # of all parameters in order, None in place of the inputs
        self.sizes = sizes
        self.output_sizes: Sizes = None
        self.kept_sizes: Sizes = None
        self.outputs: tuple[Array, ...] | None = None  # of a call that ran before it was recorded

    @property
    def key(self) -> Any:
        """What identifies the function of arrays this call is: equal keys, equal functions."""
        return self.op.name, self.sizes, _hashable(self.values)

    def run(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The op's outputs, flat."""
        args = self.values.copy()
        fields = _unflatten(inputs, self.sizes)
        for i, place in enumerate(self.op.places):
            args[place] = fields[i]
        return self.flat(self.op.answer(tuple(args), {}))

    def flat(self, result: Any) -> tuple[Array, ...]:
        """What the op returned as one flat tuple."""
        flat, self.output_sizes = _flatten(result if self.op.result else [result])
        return flat

    def pack(self, outputs: Sequence[Array]) -> Any:
        """Flat outputs in the form the op returns."""
        fields = _unflatten(outputs, self.output_sizes)
        return self.op.result(*fields) if self.op.result else fields[0]

    def keep(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> tuple[Array, ...]:
        """The inputs and outputs the gradient asks for, flat."""
        fields = [*_unflatten(inputs, self.sizes), *_unflatten(outputs, self.output_sizes)]
        flat, self.kept_sizes = _flatten([fields[i] for i in self.op.kept])
        return flat

    def pull_back(self, grads: Sequence[Array | None], kept: Sequence[Array]) -> tuple[Array | None, ...]:
        """The gradient of every flat input, None where nothing flows; `grads` may hold None for integer outputs only, and
        for those that nothing flows through."""
        by_input = self.gradients(grads, kept)
        if self.sizes is None:
            return tuple([by_input.get(name) for name in self.op.inputs])
        flat: list[Array | None] = []
        for name, size in zip(self.op.inputs, self.sizes, strict=True):
            value = by_input.get(name)
            flat.extend([value] if size is None else value if value is not None else [None] * size)
        return tuple(flat)

    def gradients(self, grads: Sequence[Array | None], kept: Sequence[Array]) -> dict[str, Any]:
        """The gradient of every input that has one, by name."""
        if self.op.pull is None:
            raise NotFoundError(f"{self.op.name} has no gradient")
        fields = _unflatten(grads, self.output_sizes)
        cotangent = self.op.result(*fields) if self.op.result else fields[0]
        arrays = iter(_unflatten(kept, self.kept_sizes))
        wanted = [next(arrays) if place < 0 else self.values[place] for place in self.op.asked]
        return self.op.pull(cotangent, *wanted)


def op(
    name: str,
    recorded: bool = True,
    meets: bool = False,
    kernel: Callable[[Any], str] | None = None,
    output: str = "output",
    internal: bool = False,
) -> Callable[[Callable[..., Any]], Op]:
    """Make a function the op called `name`. Calls of an op that `meets` wait for each other: each has to run, once.

    A function that returns one array, or one list of arrays, has one `output` of this name; the fields of a NamedTuple have
    their own names, and a function that returns None has no output.

    An `internal` one is called by others only, with inputs that have been taken and checked.

    One that is made of ops and array arithmetic is not `recorded` itself: they are, and its host arrays stay host arrays
    (JAX would make tracers of them). Its gradient is what `vjp` uses.

    One that is little more than a call of a kernel and returns a NamedTuple of arrays of its own is given small tensors
    of torch as NumPy arrays over the same memory where `kernel`, given the first, says "cpu". They cross once, at the border, in
    less than 1 us each; small arrays are allocated, checked and scaled several times faster in NumPy than in torch.
    """

    def define(function: Callable[..., Any]) -> Op:
        if name in TABLE:
            raise ValueError(f"the op {name} is defined twice")
        TABLE[name] = Op(name, function, recorded, meets, kernel, output, internal)
        return TABLE[name]

    return define


def gradient(of: Op, through: Sequence[str] = ()) -> Callable[[Pull], Pull]:
    """Make a function the gradient of an op, which flows `through` some of its outputs, or else through all.

    The cotangents of the others may be None.
    """

    def define(pull: Pull) -> Pull:
        _, *wants = inspect.signature(pull).parameters
        known, arrays = {*of.signature.parameters, *of.outputs}, [*of.inputs, *of.outputs]
        if unknown := [w for w in [*wants, *through] if w not in known]:
            raise TypeError(f"the gradient of {of.name} asks for {unknown}, which {of.name} does not have")
        of.pull, of.wants = pull, tuple(wants)
        of.kept = tuple(arrays.index(w) for w in wants if w in arrays)
        of.asked = tuple(-1 if w in arrays else of._names.index(w) for w in wants)
        of.still = tuple(i for i, name in enumerate(of.outputs) if through and name not in through)
        return pull

    return define


def vjp(op: Op, /, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., dict[str, Any]]]:
    """An op's result and its pull-back, from the gradient table.

    The pull-back takes one cotangent per output, in order or by the output's name; a missing one is zeros. It returns the
    gradient of every input that has one, by the input's name.
    """
    if not isinstance(op, Op):
        raise ArgumentTypeError(f"vjp must be given an op of weft.raw_ops, got {shown(op)}")
    if op.pull is None:
        raise NotFoundError(f"{op.name} has no gradient")
    try:
        args, kwargs = op.take(args, kwargs)
        call, inputs = op.bind(args, kwargs)
        outputs = call.run(inputs)
    except OpError as error:
        op._add_note(error, args, kwargs)
        raise
    kept = call.keep(inputs, outputs)

    def pull_back(*grads: Any, **named: Any) -> dict[str, Any]:
        given = dict(zip(op.outputs, grads, strict=False)) | named
        if len(grads) > len(op.outputs) or given.keys() - {*op.outputs}:
            raise ArgumentTypeError(
                f"{op.name} has the outputs {op.outputs}, got cotangents for {sorted(given) or len(grads)}"
            )
        flat: list[Any] = []
        for name, value in zip(op.outputs, _unflatten(outputs, call.output_sizes), strict=True):
            flat.extend(_cotangents(name, given.get(name), value))
        return call.gradients(flat, kept)

    return call.pack(outputs), pull_back


def _cotangents(name: str, given: Any, value: Any) -> list[Any]:
    """The cotangents of one output, which is an array or a list of arrays, flat; zeros, or None for integers, for a missing one."""
    if isinstance(value, list):
        each = [None] * len(value) if given is None else items(name, given)
        if len(each) != len(value):
            raise InvalidArgumentError(f"the cotangent of {name} must have {len(value)} entries, got {len(each)}")
        return [c for i, v in enumerate(value) for c in _cotangents(f"{name}[{i}]", each[i], v)]
    if given is not None:
        return [_cotangent(name, given, value)]
    if "float" not in dtype_of(value) and "complex" not in dtype_of(value):
        return [None]
    return [namespace(library_of(value) or "numpy").zeros_like(value)]


def _cotangent(name: str, given: Any, value: Any) -> Any:
    """The cotangent of one array, of its library, dtype and shape; that of a variant is a variant."""
    what = f"the cotangent of {name}"
    if library_of(value) is None:
        if type(given) is not type(value):
            raise ArgumentTypeError(f"{what} must be a {type(value).__name__}, got {shown(given)}")
        return given
    taken = together([take(what, given), value])[0]
    if library_of(taken) is None:
        try:
            taken = asarray(taken, library_of(value) or "numpy", value.dtype)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise InvalidArgumentError(f"{what} must be {dtype_of(value)}, got {shown(given)}") from None
    if tuple(taken.shape) != tuple(value.shape) or dtype_of(taken) != dtype_of(value):
        came, wanted = f"{dtype_of(taken)}{list(taken.shape)}", f"{dtype_of(value)}{list(value.shape)}"
        raise InvalidArgumentError(f"{what} must be {wanted}, got {came}")
    return taken


def _is_array(hint: Any) -> bool:
    """`Array`, `list[Array]`, `Sequence[Array]` or one of them `| None`; the same with `Host` and `Kept`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, list, Sequence):
        return any(_is_array(part) for part in typing.get_args(hint))
    return bool(hint in (Array, Host, Kept, Variant))


def _how(hint: Any) -> tuple[Callable[[str, Any], Any], bool]:
    """How an input of this annotation is taken, and whether it is data."""
    if hint == Variant:
        return _variant, False
    if hint == list[Kept]:
        return items, False
    if hint in (list[Array], list[Host]):
        return (take_list, True) if hint == list[Array] else (take_host_list, False)
    return (take, True) if hint == Array else (take_host, False)


def _variant(name: str, x: Any) -> Any:
    if not is_own(x):
        raise InvalidArgumentError(f"{name} must be a variant array, got {shown(x)}")
    return x


def _adapter(values: Any) -> Any:
    """The adapter of the first value, or value in a list, that is being recorded."""
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
    """Whether a framework would record an operation on `x` now."""
    return _adapter((x,)) is not None


def _flatten(values: Sequence[Any]) -> tuple[tuple[Array, ...], Sizes]:
    """Arrays and lists of arrays as one tuple, and how long each list was."""
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


def _unflatten(flat: Sequence[Array], sizes: Sizes) -> Sequence[Any]:
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
