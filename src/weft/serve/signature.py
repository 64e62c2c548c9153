"""What a model takes and gives: names, datatypes and shapes of its inputs and outputs, learned from a call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import numpy as np

from ..errors import FailedPreconditionError, InvalidArgumentError
from .dtypes import DATATYPES, datatype_of
from .libraries import to_numpy


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output. `shape` leaves the rows out; -1 is any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def metadata(self) -> dict[str, Any]:
        """Return the description of the Open Inference Protocol."""
        return {"name": self.name, "datatype": self.datatype, "shape": [-1, *self.shape]}

    def check(self, datatype: str, shape: Sequence[int]) -> None:
        """Refuse an input of another datatype or trailing shape."""
        if datatype != self.datatype:
            raise InvalidArgumentError(f"input {self.name!r} must have datatype {self.datatype}, got {datatype}")
        trailing = tuple(shape[1:])
        if trailing == self.shape or (self.datatype == "BYTES" and not self.shape and prod(trailing) == 1):
            return
        if len(trailing) != len(self.shape) or any(a not in (b, -1) for a, b in zip(self.shape, trailing, strict=True)):
            raise InvalidArgumentError(
                f"input {self.name!r} must have the shape {[-1, *self.shape]}, where -1 is any length, got {list(shape)}"
            )


class Parameters:
    """The parameters of a model's function, in order: how named inputs become the arguments of a call."""

    def __init__(self, f: Callable[..., Any], filled: Collection[str | None] = ()) -> None:
        """`filled` are parameters that the batcher fills in."""
        f = getattr(f, "__wrapped__", f)
        if "torch" in sys.modules and isinstance(f, sys.modules["torch"].nn.Module):
            f = f.forward
        try:
            found = list(inspect.signature(f).parameters.values())
        except (TypeError, ValueError):  # builtins and ufuncs have no signature
            found = [inspect.Parameter("input", inspect.Parameter.POSITIONAL_ONLY)]
        usable = [p for p in found if p.name not in filled and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.names = [p.name for p in usable if p.kind is not p.KEYWORD_ONLY]
        self.keyword_names = [p.name for p in usable if p.kind is p.KEYWORD_ONLY]
        self.required = {p.name for p in usable if p.default is p.empty}
        self.all = frozenset([*self.names, *self.keyword_names])
        #: The one parameter of a function that has no other.
        self.only = self.names[0] if len(self.names) == 1 and not self.keyword_names else None
        if not self.all:
            raise InvalidArgumentError("a served function must have named parameters, one for each input")

    def check(self, names: Sequence[str]) -> None:
        """Refuse inputs that are unknown, missing or given twice."""
        given = set(names)
        if len(given) != len(names):
            raise InvalidArgumentError(f"each input must be given once, got {', '.join(names)[:200]}")
        if unknown := given - self.all:
            wanted = ", ".join([*self.names, *self.keyword_names])
            raise InvalidArgumentError(f"the inputs of this model are {wanted}, got {min(unknown)[:80]!r}")
        if missing := self.required - given:
            raise InvalidArgumentError(f"the input {min(missing)!r} is missing")

    def arguments(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of a call."""
        if self.only is not None:
            return tuple(values.values()), {}
        args: list[Any] = []
        named = {name: values[name] for name in self.keyword_names if name in values}
        for at, name in enumerate(self.names):
            if name not in values:
                named.update({later: values[later] for later in self.names[at:] if later in values})
                break
            args.append(values[name])
        return tuple(args), named


def outputs_of(result: Any, rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the outputs of a result by name, each an array or a list with `rows` rows, and what is no array."""
    if isinstance(result, np.ndarray) and result.dtype in DATATYPES:  # its batcher has checked the rows
        return {"output": result}, {}
    if isinstance(result, Mapping):
        named = {str(name): value for name, value in result.items()}
    elif isinstance(result, tuple):
        fields = getattr(result, "_fields", None) or [f"output_{i}" for i in range(len(result))]
        named = dict(zip(fields, result, strict=True))
    else:
        named = {"output": result}
    outputs: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in named.items():
        if value is None or isinstance(value, (str, bytes, bool, int, float)):
            if isinstance(value, float) and not isfinite(value):
                raise FailedPreconditionError(f"output {name!r} must be a finite number, got {value}")
            others[name] = value.decode(errors="replace") if isinstance(value, bytes) else value
        elif isinstance(value, list) and all(isinstance(item, (str, bytes)) for item in value):
            outputs[name] = value
        else:
            outputs[name] = _as_array(name, value)
    for name, value in outputs.items():
        if len(value) != rows:
            raise FailedPreconditionError(f"output {name!r} must have the {rows} rows of the call, got {len(value)}")
    return outputs, others


def _as_array(name: str, value: Any) -> np.ndarray:
    array = np.asarray(to_numpy(value))
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if not array.ndim:
        raise FailedPreconditionError(f"output {name!r} must have a first dimension of rows, got a scalar")
    is_text = array.dtype.kind in "SU" or (
        array.dtype.kind == "O" and all(isinstance(item, (str, bytes)) for item in array.flat)
    )
    if not is_text and array.dtype not in DATATYPES:
        raise FailedPreconditionError(f"output {name!r} must be of numbers or text, got {array.dtype}")
    return array


def tensors_of(values: Mapping[str, Any], open_axes: Mapping[str, int] | None = None) -> tuple[Tensor, ...]:
    """Return the description of named arrays and lists of text; `open_axes` names axes of any length."""
    found = []
    for name, value in values.items():
        shape = list(value.shape[1:]) if isinstance(value, np.ndarray) else []
        axis = (open_axes or {}).get(name)
        if axis is not None and 0 < axis <= len(shape):
            shape[axis - 1] = -1
        found.append(Tensor(name, datatype_of(value), tuple(shape)))
    return tuple(found)
