"""Arguments whose arrays differ in length: they are padded to one length, and results are cut back.

`Pad` is the rule for one argument, `PaddedArray` an array of a call that follows it, `PaddedColumn` the array of a batch.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..core import check
from ..core.arrays import Array, dtype_of
from ..core.inputs import shown
from ..core.interrupts import as_exception
from ..errors import FailedPreconditionError, InvalidArgumentError
from ..ragged.tensor import RaggedTensor
from . import results, trees
from .columns import Bounds, PaddedColumn, Shape

#: The largest length that a `Pad` names, the last axis, and the most sizes.
LONGEST, MOST_AXES, MOST_SIZES = 2**31 - 1, 63, 100_000
#: The results that are cut: True for all, or keys and positions.
Cut = bool | tuple[Any, ...]
#: Results of rows that are not cut.
_NOT_CUT = (list, results.PerRow, RaggedTensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """How the arrays of an argument are padded to one length: along `axis`, with `value`, to the longest of the batch.

    The length is rounded up to a multiple of `multiple_of`, or to the next of `sizes`. `axis` counts the dimension of rows, which
    is 0, also with `rows=False`.

    >>> Pad(multiple_of=16).rounded(20), Pad(sizes=(64, 128)).rounded(20)
    (32, 64)
    """

    value: Any = 0
    multiple_of: int = 1
    sizes: Sequence[int] = ()
    axis: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.value, (bool, int, float, complex, str, bytes, np.generic)):
            raise InvalidArgumentError(f"value must be a number or text, got {shown(self.value)}")
        object.__setattr__(self, "value", check.plain(self.value))
        object.__setattr__(self, "axis", check.count("axis", self.axis, MOST_AXES))
        object.__setattr__(self, "multiple_of", check.count("multiple_of", self.multiple_of, LONGEST))
        try:
            sizes = tuple(islice(self.sizes, MOST_SIZES))
        except BaseException as error:  # it is no sequence, or its own code raises
            as_exception(error)
            raise InvalidArgumentError(f"sizes must be a sequence of lengths, got {shown(self.sizes)}") from None
        sizes = tuple(check.count("each of sizes", size, LONGEST) for size in sizes)
        check.increasing("sizes", sizes)
        object.__setattr__(self, "sizes", sizes)
        if sizes and self.multiple_of != 1:
            raise InvalidArgumentError(
                f"a Pad must have either multiple_of or sizes, got {self.multiple_of} and {list(sizes)}"
            )

    def rounded(self, length: int) -> int:
        """Return the length to which an array of this length is padded, if it is the longest."""
        if self.sizes:
            return self.sizes[bisect_left(self.sizes, length)]
        return -(-length // self.multiple_of) * self.multiple_of


class PadRule:
    """How the argument `name` is padded, the parameter `passed_as` that gets the lengths, and the results that have them."""

    __slots__ = ("_checked", "cut", "name", "pad", "passed_as")

    def __init__(self, name: str, pad: Pad, passed_as: str | None, cut: Cut) -> None:
        self.name, self.pad, self.passed_as, self.cut = name, pad, passed_as, cut
        self._checked: set[str] = set()  # the dtypes that can hold the value

    def array(self, x: Array) -> PaddedArray:
        """Return what is known of an array of a call; refuse one that cannot be padded."""
        shape, pad = x.shape, self.pad
        if len(shape) <= pad.axis:
            raise InvalidArgumentError(
                f"every array of the argument {self.name!r} must have the axis {pad.axis} that is padded (axis 0 counts rows), got "
                f"the shape {list(shape)}"
            )
        length = int(shape[pad.axis])
        if pad.sizes and length > pad.sizes[-1]:
            raise InvalidArgumentError(
                f"the argument {self.name!r} may be at most {pad.sizes[-1]} long, the last of its sizes, got {length}"
            )
        dtype = dtype_of(x)
        if dtype not in self._checked:
            if not _holds(dtype, pad.value):
                raise InvalidArgumentError(
                    f"the argument {self.name!r} is padded with {pad.value!r}, which its dtype must be able to hold, got {dtype}"
                )
            self._checked.add(dtype)
        return PaddedArray(self, length, tuple(shape))

    def column(self, lengths: Sequence[int], bounds: Bounds, size: int) -> PaddedColumn:
        """Return the column of a batch of `size` rows, with the lengths and the rows of each call."""
        return PaddedColumn(bounds, size, self.pad.axis, lengths, self.pad.rounded(max(lengths)))


def _holds(dtype: str, value: Any) -> bool:
    """Whether arrays of a dtype can hold a value."""
    value = check.plain(value)
    if dtype == "string" or isinstance(value, (str, bytes)):
        return dtype == "string" and isinstance(value, (str, bytes))
    if isinstance(value, complex):
        return "complex" in dtype
    if dtype == "bool":
        return value in (0, 1)
    if "int" in dtype:
        info = np.iinfo(dtype)
        return bool(info.min <= value <= info.max and value == int(value))
    return not isinstance(value, int) or abs(value) <= sys.float_info.max


class PaddedArray:
    """The length and the shape of an array of a call."""

    __slots__ = ("length", "rule", "shape")

    def __init__(self, rule: PadRule, length: int, shape: Shape) -> None:
        self.rule, self.length, self.shape = rule, length, shape

    def key(self, shape: Shape) -> tuple[Any, ...]:
        """Return the trailing shape that arrays of a batch must share."""
        axis = self.rule.pad.axis
        return (*shape[1:axis], None, *shape[axis + 1 :])


def check_equal(arrays: Sequence[Any]) -> None:
    """Refuse a call if arrays of one padded argument differ in length."""
    found: dict[PadRule, int] = {}
    for array in arrays:
        if isinstance(array, PaddedArray) and found.setdefault(array.rule, array.length) != array.length:
            raise InvalidArgumentError(
                f"all arrays of the argument {array.rule.name!r} must have one length along axis {array.rule.pad.axis}, got "
                f"{found[array.rule]} and {array.length}"
            )


def rounded(arrays: Sequence[Any]) -> tuple[int, ...]:
    """Return the rounded length of each padded argument of a call."""
    found = {array.rule: array.length for array in arrays if isinstance(array, PaddedArray)}
    return tuple(rule.pad.rounded(length) for rule, length in found.items())


def rules(pad: Mapping[str, Pad] | None, pass_lengths: Any, cut: Any) -> dict[str, PadRule]:
    """Return the rule of each padded argument; refuse options that do not say what they are for."""
    pad = {} if pad is None else pad
    if not isinstance(pad, Mapping) or not all(isinstance(rule, Pad) for rule in pad.values()):
        raise InvalidArgumentError(f"pad must be a dict from names of parameters to weft.Pad, got {shown(pad)}")
    passed = _by_argument("pass_lengths", pad, pass_lengths)
    for name in passed.values():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"pass_lengths must name a parameter of the function, got {shown(name)}")
    names = {name: _cut(given) for name, given in _by_argument("cut", pad, cut).items()}
    return {name: PadRule(name, rule, passed.get(name), names.get(name, False)) for name, rule in pad.items()}


def _by_argument(option: str, pad: Mapping[str, Pad], given: Any) -> Mapping[str, Any]:
    """Return the values of an option by the names of padded arguments; if there is one, its name may be left out."""
    if given is None or given is False:
        return {}
    if not isinstance(given, Mapping):
        if not pad:
            raise InvalidArgumentError(
                f"{option} must be None where the option pad names no argument, got {shown(given)}"
            )
        if len(pad) > 1:
            raise InvalidArgumentError(
                f"{option} must be a dict from names of arguments where pad names several, {', '.join(pad)}, got {shown(given)}"
            )
        return {next(iter(pad)): given}
    for name in given:
        if name not in pad:
            raise InvalidArgumentError(f"{option} must be a dict from names of padded arguments, got {shown(name)}")
    return given


def _cut(given: Any) -> Cut:
    if isinstance(given, bool):
        return given
    names = (given,) if isinstance(given, (str, int)) else given
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, (str, int)) for name in names):
        raise InvalidArgumentError(f"cut must be True, or keys and positions of results, got {shown(given)}")
    return tuple(names)


def places_to_cut(result: Any, names: Cut) -> list[int]:
    """Return the places of the leaves of a result that are cut."""
    if isinstance(result, results.Tagged):
        result = result.result  # its leaves come first
    places: list[int] = []
    found, at = set(), 0
    fields = getattr(type(result), "_fields", ())  # of a named tuple, which has names and positions
    for key, part in results.entries(result):
        leaves = results.flatten(part)[0]
        own = {key, fields[key]} if fields else {key}
        if names is True or own & set(names or ()):
            found |= own
            arrays = [at + i for i, x in enumerate(leaves) if trees.is_array(x)]
            if not (arrays or names is True) and any(isinstance(x, _NOT_CUT) for x in leaves):
                raise FailedPreconditionError(
                    f"cut names the result {key!r}, and only arrays are cut: let the function cut the items of rows itself"
                )
            places += arrays
        at += len(leaves)
    missing = [] if isinstance(names, bool) else [name for name in names if name not in found]
    if missing:
        raise FailedPreconditionError(f"cut names the result {missing[0]!r}, and the function did not return it")
    return places
