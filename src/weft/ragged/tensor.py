"""`RaggedTensor`: rows of different length in one flat buffer, on NumPy, torch or JAX, with gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array, asarray, dtype_of, get_library_of, host, library_of, namespace
from ..core.check import whole
from ..core.inputs import check_nesting, in_lists, items, shown, take, together
from ..core.representation import never_raises
from ..errors import ArgumentTypeError, InvalidArgumentError
from ..kernels.splits import (
    Splits,
    as_nested_splits,
    as_splits,
    cast_splits,
    check_nested_splits,
    check_splits,
    decreases,
    output_splits,
    splits_from_lengths,
)
from . import bridges
from .dense_ops import ragged_tensor_to_tensor
from .gather_ops import ragged_gather
from .index import getitem
from .inputs import beside, check_room, empty_text, holdable, is_text
from .rows import join_rows, repeat_rows, row_max, row_softmax, row_sum, stack_rows, take_rows
from .variant import VariantArray
from .variant_ops import ragged_tensor_from_variant

_DEEPEST = 64  # ragged levels


class Padded(NamedTuple):
    """Rows of one length, and the mask of their real values."""

    values: Array
    mask: Array


def _made(kind: type[RaggedTensor], flat_values: Array, nested_row_splits: Sequence[Any]) -> RaggedTensor:
    """Rebuild a ragged tensor of class `kind`, without calling a subclass's constructor."""
    made = kind.__new__(kind)
    RaggedTensor.__init__(made, flat_values, nested_row_splits)
    return made


def _combining(f: Callable[[Any, Any], Any]) -> Callable[[RaggedTensor, Any], RaggedTensor]:
    """A method that applies `f` to the values of a ragged tensor and of another, or an array."""
    return lambda self, other: self._with(other, f)


class RaggedTensor:
    """Rows of different length: flat values, and host splits with the bounds of each row.

    `from_rows`, `from_row_lengths`, `from_row_splits` and others make one; the constructor takes a list of split vectors, the
    outermost first. Elementwise functions are applied to `.flat_values`: `rt.with_values(torch.relu(rt.flat_values))`. The
    methods of this class are those that depend on the rows.

    >>> rt = RaggedTensor.from_rows([[1.0, 2.0], [], [3.0, 4.0, 5.0]])
    >>> rt.row_lengths().tolist(), rt.sum().tolist()
    ([2, 0, 3], [3.0, 0.0, 12.0])
    >>> rt[2].tolist(), rt[1:].to_list()
    ([3.0, 4.0, 5.0], [[], [3.0, 4.0, 5.0]])
    >>> (rt * 2 + rt).to_padded(value=-1).values.tolist()
    [[3.0, 6.0, -1.0], [-1.0, -1.0, -1.0], [9.0, 12.0, 15.0]]
    >>> rt.map_rows(lambda row: row[::-1]).to_list()
    [[2.0, 1.0], [], [5.0, 4.0, 3.0]]
    """

    __slots__ = ("_splits", "flat_values")
    __array_priority__ = 1000  # NumPy leaves operators with an array on the left to this class
    __array_ufunc__ = None

    def __init__(self, flat_values: Array, nested_row_splits: Sequence[Any]) -> None:
        self._splits = as_nested_splits("nested_row_splits", nested_row_splits)
        self.flat_values = holdable("flat_values", flat_values)
        if not self._splits or not all(splits.ndim for splits in self._splits):
            raise InvalidArgumentError(
                f"nested_row_splits must be a list of one or more split vectors, got {shown(nested_row_splits)}: "
                "from_row_splits takes one vector"
            )
        check_nested_splits("nested_row_splits", self._splits, self.flat_values.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are rebuilt by the constructor, which checks and copies the splits."""
        return _made, (type(self), self.flat_values, self._splits), getattr(self, "__dict__", None)

    # ---- construction

    @classmethod
    def from_row_splits(cls, values: Any, row_splits: Any) -> RaggedTensor:
        """Row `i` is `values[row_splits[i] : row_splits[i + 1]]`; ragged values get one more level."""
        splits = as_splits("row_splits", row_splits)
        if isinstance(values, RaggedTensor):
            check_splits("row_splits", splits, len(values))
            inner = [cast_splits("row splits", s, splits.dtype) for s in values._splits]
            return cls(values.flat_values, [splits, *inner])
        return cls(values, [splits])

    @classmethod
    def from_row_lengths(cls, values: Any, row_lengths: Any) -> RaggedTensor:
        """Rows of these lengths, one after the other."""
        lengths = as_splits("row_lengths", row_lengths)
        if lengths.ndim != 1 or (lengths < 0).any():
            raise InvalidArgumentError("row_lengths must be a vector without negative entries")
        return cls.from_row_splits(values, splits_from_lengths(lengths))

    @classmethod
    def from_row_ids(cls, values: Any, row_ids: Any, nrows: int | None = None) -> RaggedTensor:
        """Value `i` belongs to row `row_ids[i]`; ids never decrease, and there are `nrows` rows."""
        ids = as_splits("row_ids", row_ids)
        if ids.ndim != 1 or decreases(ids) or (ids.size and ids[0] < 0):
            raise InvalidArgumentError("row_ids must be a vector that starts at 0 or above and never decreases")
        rows = int(ids[-1]) + 1 if nrows is None and ids.size else _count("nrows", 0 if nrows is None else nrows)
        check_room((rows + 1,), 8)
        if ids.size and ids[-1] >= rows:
            raise InvalidArgumentError(f"row_ids must be below nrows, got {ids[-1]} and {rows}")
        return cls.from_row_splits(values, np.searchsorted(ids, np.arange(rows + 1)))

    @classmethod
    def from_rows(cls, rows: Sequence[Any], ragged_rank: int | None = None) -> RaggedTensor:
        """From rows: arrays, ragged tensors, or nested lists, which are ragged in all but the last level."""
        if ragged_rank is not None and not 0 < whole("ragged_rank", ragged_rank) <= _DEEPEST:
            raise InvalidArgumentError(f"ragged_rank must be in [1, {_DEEPEST}], got {ragged_rank}")
        rows = items("rows", rows)
        check_nesting("rows", rows, in_lists)
        if rows and all(isinstance(row, RaggedTensor) for row in rows):
            return cls.stack(rows)
        if rows and all(library_of(row) is not None for row in rows):
            return cls._join(rows)
        nested: list[Splits] = []
        flat = rows
        while len(nested) < (ragged_rank or _DEEPEST) and (ragged_rank or not nested or _all_nested(flat)):
            level = [_items(row) for row in flat]
            nested.append(splits_from_lengths([len(row) for row in level]))
            flat = [item for row in level for item in row]
        made = cls(flat, nested)
        if made.flat_values.dtype == object and not is_text(np.array(flat, object)):
            raise InvalidArgumentError("rows must be numbers alone or text alone, got both")
        return made

    @classmethod
    def _join(cls, rows: list[Array]) -> RaggedTensor:
        """Join rows that are arrays."""
        rows = together([holdable(f"rows[{i}]", row) for i, row in enumerate(rows)])
        if not all(row.ndim for row in rows) or len({(tuple(row.shape[1:]), row.dtype) for row in rows}) > 1:
            raise InvalidArgumentError("rows must have rank 1 or more, and one dtype and shape beyond the first axis")
        splits = splits_from_lengths([row.shape[0] for row in rows])
        return cls(join_rows(rows, splits), [splits])

    @classmethod
    def from_padded(cls, padded: Array, lengths: Any = None, mask: Any = None) -> RaggedTensor:
        """The first `lengths[i]` values of each row of `padded`, or those that `mask` marks at its front."""
        if (lengths is None) == (mask is None):
            raise InvalidArgumentError("from_padded needs either lengths or a mask")
        padded = holdable("padded", padded)
        if padded.ndim < 2:
            raise InvalidArgumentError(f"padded must have rows and columns, got shape {list(padded.shape)}")
        rows, width = padded.shape[:2]
        if mask is not None:
            marked = host(take("mask", mask))
            if marked.dtype.kind not in "biu":
                raise InvalidArgumentError(f"mask must hold booleans, got {marked.dtype}")
            marked = marked.astype(bool)
            lengths = marked.sum(axis=-1)
            if marked.shape != (rows, width) or (marked != (np.arange(width) < lengths[:, None])).any():
                raise InvalidArgumentError(f"the mask must be [{rows}, {width}] and mark the front of every row")
        count = as_splits("lengths", lengths).astype(np.int64)
        if count.shape != (rows,) or (count < 0).any() or (count > width).any():
            raise InvalidArgumentError(f"lengths must be {rows} numbers from 0 to {width}")
        flat = namespace(library_of(padded) or "numpy").reshape(padded, (rows * width, *padded.shape[2:]))
        splits = splits_from_lengths(count)
        return cls(take_rows(flat, np.arange(rows) * width, splits), [splits])

    # ---- properties

    @property
    def nested_row_splits(self) -> list[Array]:
        """The split vectors, outermost first: host arrays; CPU tensors if the values are torch tensors."""
        return [output_splits(s, self.library) for s in self._splits]

    @property
    def row_splits(self) -> Array:
        """The outermost split vector."""
        return output_splits(self._splits[0], self.library)

    @property
    def values(self) -> Any:
        """The flat values, or the ragged tensor with one level less."""
        return self.flat_values if len(self._splits) == 1 else RaggedTensor(self.flat_values, self._splits[1:])

    @property
    def library(self) -> str:
        """The array library of the values."""
        return library_of(self.flat_values) or "numpy"

    @property
    def ragged_rank(self) -> int:
        """The number of ragged levels."""
        return len(self._splits)

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.flat_values.dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The dimensions, None for ragged ones."""
        return (len(self), *[None] * len(self._splits), *self.flat_values.shape[1:])

    def row_lengths(self) -> Array:
        """The length of every row, a host array."""
        return output_splits(np.diff(self._splits[0]), self.library)

    def __len__(self) -> int:
        return len(self._splits[0]) - 1

    def to_list(self) -> list[Any]:
        """Everything as nested Python lists."""
        items = host(self._checked_values()).tolist()
        for splits in reversed(self._splits):
            bounds = splits.tolist()
            items = [items[a:b] for a, b in pairwise(bounds)]
        return items

    @never_raises
    def __repr__(self) -> str:
        if self.flat_values.shape[0] <= 32 and len(self) <= 16:
            with suppress(Exception):  # values that are not known, as under `jax.jit`, or cannot be read any more
                return f"RaggedTensor({self.to_list()})"
        return f"RaggedTensor(shape={self.shape}, {self.library} {self.dtype}, {self.flat_values.shape[0]} values)"

    # ---- rows

    def __iter__(self) -> Iterator[Any]:
        rows = self.to_variant().rows()
        if len(self._splits) == 1:
            return iter(rows.values)
        return (RaggedTensor(v, s) for v, s in zip(rows.values, rows.all_splits(), strict=True))

    __getitem__ = getitem

    def gather(self, indices: Any) -> Any:
        """The rows `indices`, in this order, in the shape of `indices`."""
        index = as_splits("indices", indices)
        rank = len(self._splits) + index.ndim - 1
        found = ragged_gather(list(self._splits), self.flat_values, index, rank)
        splits = found.output_nested_splits
        return RaggedTensor(found.output_dense_values, splits) if splits else found.output_dense_values

    def map_rows(self, f: Callable[[Any], Any]) -> Any:
        """The ragged tensor of `f(row)` for every row, or an array if `f` returns scalars.

        All rows are cut in one autodiff node and joined in one, so the cost of the gradient is linear in the values.
        """
        if not callable(f):
            raise ArgumentTypeError(f"f must be a function of a row, got {shown(f)}")
        rows = [f(row) for row in self]
        if not rows:
            return self
        if any(isinstance(row, RaggedTensor) for row in rows):
            return self.stack(rows)
        rows = [holdable("the result of f", row) for row in rows]
        if any(row.ndim for row in rows):
            return self._join(rows)
        return stack_rows(together(rows))

    @classmethod
    def concat(cls, tensors: Sequence[RaggedTensor], axis: int = 0) -> RaggedTensor:
        """The rows of all tensors, one below the other; with `axis=1`, row `i` joins the rows `i` of all tensors."""
        tensors = items("tensors", tensors)
        if not tensors or not all(isinstance(t, RaggedTensor) for t in tensors):
            raise InvalidArgumentError("concat and stack take ragged tensors, and at least one")
        kinds = {(t.ragged_rank, t.library, str(t.dtype), tuple(t.flat_values.shape[1:])) for t in tensors}
        if len(kinds) > 1:
            raise InvalidArgumentError(
                f"ragged tensors must have one rank, library, dtype and inner shape, got {kinds}"
            )
        if len({t._splits[0].dtype for t in tensors}) > 1:
            tensors = [cls(t.flat_values, [splits.astype(np.int64) for splits in t._splits]) for t in tensors]
        if whole("axis", axis) == 0:
            joined = VariantArray.concat([t.to_variant() for t in tensors])
            return cls.from_variant(joined, tensors[0].ragged_rank)
        if axis != 1 or len({len(t) for t in tensors}) > 1:
            raise InvalidArgumentError("concat works along axis 0, or along axis 1 for equally many rows")
        rows, count = len(tensors[0]), len(tensors)
        turns = cls.concat(tensors).gather(np.arange(rows * count).reshape(count, rows).T.reshape(-1))
        merged = turns._splits[0][::count]
        return cls(turns.flat_values, [merged, *turns._splits[1:]])

    @classmethod
    def stack(cls, tensors: Sequence[RaggedTensor]) -> RaggedTensor:
        """A ragged tensor with one more level: row `i` is `tensors[i]`."""
        joined = cls.concat(tensors)
        outer = splits_from_lengths([len(t) for t in tensors], joined._splits[0].dtype)
        return cls(joined.flat_values, [outer, *joined._splits])

    # ---- values

    def with_values(self, flat_values: Array) -> RaggedTensor:
        """The ragged tensor with the same rows and these values."""
        return RaggedTensor(flat_values, self._splits)

    def spread(self, per_row: Array) -> RaggedTensor:
        """`per_row[i]` for every value of the innermost row `i`: `rt - rt.spread(rt.mean())`."""
        rows = holdable("per_row", per_row.flat_values if isinstance(per_row, RaggedTensor) else per_row)
        if rows.shape[:1] != (len(self._splits[-1]) - 1,):
            raise InvalidArgumentError(
                f"spread needs one entry for each of {len(self._splits[-1]) - 1} rows, got shape {list(rows.shape)}"
            )
        return self.with_values(repeat_rows(rows, self._splits[-1]))

    def sum(self) -> Any:
        """The sum of every innermost row, zero for an empty row; integers wrap."""
        values = self._numbers("added")
        if dtype_of(values) in _HALVES:
            return self._reduced(_rounded(row_sum(_floats(values), self._splits[-1]), values))
        return self._reduced(row_sum(values, self._splits[-1]))

    def mean(self) -> Any:
        """The mean of every innermost row, NaN for an empty row; integers are converted to floating point."""
        values = self._numbers("added")
        total = row_sum(_floats(values), self._splits[-1])
        lengths = np.diff(self._splits[-1]).reshape((-1,) + (1,) * (total.ndim - 1)).astype(dtype_of(total))
        with np.errstate(invalid="ignore"):
            mean = total / beside(lengths, total)
        return self._reduced(_rounded(mean, values))

    def max(self) -> Any:
        """The largest value of every innermost row; the smallest value of the dtype for an empty row."""
        return self._reduced(row_max(self._numbers("compared"), self._splits[-1]))

    def softmax(self) -> RaggedTensor:
        """exp of every value over the sum of exp in its innermost row; integers are converted to floating point."""
        values = self._numbers("compared and added")
        return self.with_values(_rounded(row_softmax(_floats(values), self._splits[-1]), values))

    def _numbers(self, how: str) -> Array:
        """Return the flat values; raise if values of their dtype cannot be `how`."""
        name = dtype_of(self.flat_values)
        if name == "string" or (name == "bool" and "added" in how) or ("complex" in name and "compared" in how):
            raise InvalidArgumentError(f"values of dtype {name} cannot be {how}")
        values = self._checked_values()
        check_room((len(self._splits[-1]) - 1, *values.shape[1:]), values.dtype.itemsize)
        return values

    def _checked_values(self) -> Array:
        """Return the flat values; raise if they cannot be read any more, or the caller has resized them."""
        values, count = take("flat_values", self.flat_values), self._splits[-1][-1]
        if tuple(values.shape[:1]) != (count,):
            raise InvalidArgumentError(
                f"flat_values must have {count} rows, as the splits say, got the shape {list(values.shape)}: "
                "they were changed after the ragged tensor was made"
            )
        return values

    def _reduced(self, per_row: Array) -> Any:
        return per_row if len(self._splits) == 1 else RaggedTensor(per_row, self._splits[:-1])

    def to_padded(self, length: int | None = None, value: Any = None) -> Padded:
        """Rows cut, or padded with `value` (default 0), to `length` (default the longest row), and the mask of real values."""
        shape = np.full(len(self._splits) + self.flat_values.ndim, -1)
        shape[1] = -1 if length is None else _count("length", length)
        if value is None:
            value = empty_text(self.flat_values) if dtype_of(self.flat_values) == "string" else 0
        kinds = ["ROW_SPLITS"] * len(self._splits)
        padded = ragged_tensor_to_tensor(shape, self.flat_values, value, list(self._splits), kinds)
        real = np.ones(self.flat_values.shape[0], bool)
        mask = ragged_tensor_to_tensor(shape[: len(self._splits) + 1], real, False, list(self._splits), kinds)
        return Padded(padded, beside(mask, padded))

    def _with(self, other: Any, f: Callable[[Any, Any], Any]) -> RaggedTensor:
        if isinstance(other, RaggedTensor):
            same = len(self._splits) == len(other._splits) and all(map(_same_splits, self._splits, other._splits))
            if not same:
                raise InvalidArgumentError("ragged tensors must have the same splits to be combined value by value")
            other = other.flat_values
        else:
            other = take("an operand", other)
            if isinstance(other, (list, tuple)):
                other = self._array(other)
            if library_of(other) is not None and other.ndim >= self.flat_values.ndim and other.ndim:
                raise InvalidArgumentError(
                    "an array beside a ragged tensor must broadcast to its inner dimensions, "
                    f"{list(self.flat_values.shape[1:])}, got shape {list(other.shape)}; "
                    "spread() lays one entry per row over its values"
                )
        return self._combined(f, *together([self.flat_values, other]))

    def _array(self, numbers: Any) -> Array:
        """Convert a list of numbers to an array of the values' library."""
        try:
            return asarray(np.asarray(numbers), self.library)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(f"an operand must hold numbers, got {shown(numbers)}: {error}") from None

    def _combined(self, f: Callable[..., Any], *operands: Any) -> RaggedTensor:
        """Apply `f` to values; keep the rows."""
        try:
            values = f(*operands)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # raised by the libraries
            came = " and ".join(map(shown, operands))
            raise InvalidArgumentError(
                f"operands must be numbers whose shapes broadcast, got {came}: {error}"
            ) from None
        return self.with_values(values)

    __add__ = __radd__ = _combining(operator.add)
    __mul__ = __rmul__ = _combining(operator.mul)
    __sub__, __rsub__ = _combining(operator.sub), _combining(lambda a, b: b - a)
    __truediv__, __rtruediv__ = _combining(operator.truediv), _combining(lambda a, b: b / a)
    __pow__, __rpow__ = _combining(operator.pow), _combining(lambda a, b: b**a)

    def __neg__(self) -> RaggedTensor:
        return self._combined(operator.neg, self.flat_values)

    # ---- conversion

    def to_variant(self) -> VariantArray:
        """The vector of the rows as variants, without a copy."""
        return VariantArray.of_columns(self._splits, self._checked_values())

    @classmethod
    def from_variant(cls, variant: VariantArray, ragged_rank: int = 1) -> RaggedTensor:
        """The ragged tensor whose rows are the elements of a variant array."""
        if not isinstance(variant, VariantArray):
            raise ArgumentTypeError(f"variant must be a variant array, got {shown(variant)}")
        held: Any
        if (columns := variant.columns) is not None:
            nested, held = columns
        else:
            rows = variant.rows()
            nested = next(filter(None, rows.splits or ()), ())
            held = next((values for values in rows.values if values is not None), None)
        dtype = "float32" if held is None else held.dtype
        splits = nested[0].dtype if nested else "int64"
        found = ragged_tensor_from_variant(variant, -1, ragged_rank, dtype, splits)
        return cls(found.output_dense_values, found.output_nested_splits)

    to_awkward, from_awkward = bridges.to_awkward, classmethod(bridges.from_awkward)
    to_arrow, from_arrow = bridges.to_arrow, classmethod(bridges.from_arrow)
    to_nested_tensor, from_nested_tensor = bridges.to_nested_tensor, classmethod(bridges.from_nested_tensor)
    cu_seqlens, from_cu_seqlens = bridges.cu_seqlens, classmethod(bridges.from_cu_seqlens)


_HALVES = ("float16", "bfloat16")


def _floats(values: Array) -> Array:
    """Convert values for computing: integers to floating point, half precision to single."""
    name, library = dtype_of(values), library_of(values) or "numpy"
    if name in _HALVES:
        return _cast(values, namespace(library).float32)
    if "int" not in name:
        return values
    return _cast(values, namespace(library).float64) if library == "torch" else values.astype(float)


def _rounded(result: Array, values: Array) -> Array:
    """Convert a result computed with `_floats(values)` back: to half precision, or for integers to torch's default dtype."""
    name = dtype_of(values)
    if name in _HALVES:
        return _cast(result, values.dtype)
    if "int" in name and library_of(result) == "torch":
        return _cast(result, namespace("torch").get_default_dtype())
    return result


def _cast(values: Array, dtype: Any) -> Array:
    return get_library_of(values).cast(values, dtype)


def _count(name: str, value: Any) -> int:
    number = whole(name, value)
    if not 0 <= number < 2**62:
        raise InvalidArgumentError(f"{name} must be an integer that is not negative, got {shown(value)}")
    return number


def _all_nested(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, (list, tuple)) for item in items)


def _items(row: Any) -> Any:
    if not isinstance(row, (list, tuple)) and not (library_of(row) and row.ndim):
        raise InvalidArgumentError(f"rows must be equally deep lists, got {shown(row)} instead of a list")
    return items("rows", row) if isinstance(row, (list, tuple)) and type(row) not in (list, tuple) else row


def _same_splits(a: Splits, b: Splits) -> bool:
    return a is b or np.array_equal(a, b)
