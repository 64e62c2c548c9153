"""The elements of a TensorArray under JAX's `jit`, `scan` and `while_loop`: one buffer, the written flags, the first error.

A compiled program can neither grow an array nor raise. So the buffer has its final size from the start, every write returns a
new state of the same structure, and a write that must be refused is dropped and recorded: the first use of the array outside
the program raises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.arrays import Array, dtype_name, dtype_of, is_concrete
from ..core.shapes import Shape, is_known, show
from ..errors import InvalidArgumentError, UnimplementedError
from .elements import Elements

OUTSIDE, TWICE = 1, 2
_MESSAGES = {OUTSIDE: "index must be in [0, {size}), got {index}", TWICE: "element {index} cannot be written twice"}


@dataclass(frozen=True)
class JaxElements:
    """The elements of an array as JAX arrays, with the methods of `Elements`. It is immutable: writing returns a new one."""

    buffer: Array  # size rows
    written: Array  # bool, one for each element
    end: Array  # int32: one past the last element written
    error: Array  # int32: the code and index of the first refused write; zeros if there was none
    checked: bool

    @property
    def size(self) -> int:
        return int(self.buffer.shape[0])

    @property
    def element_shape(self) -> Shape:
        return tuple(self.buffer.shape[1:])

    @property
    def element_dtype(self) -> str:
        return dtype_of(self.buffer)

    def check(self) -> None:
        """Raise the error of a compiled program."""
        if is_concrete(self.error):
            # One error, or under vmap one for each array.
            for code, index in np.asarray(self.error).reshape(-1, 2).tolist():
                _raise(code > 0, code, index, self.size)

    def count(self) -> int:
        return self.size

    def write(self, index: Any, value: Array) -> JaxElements:
        value = self._element(value, self.element_shape)
        self._check_known(index)
        at = _int32(index)
        inside = (at >= 0) & (at < self.size)
        place = jnp.clip(at, 0, max(self.size - 1, 0))
        if not self.size:
            return self._with_error(at, ~inside, inside)
        # With slices instead of gathers and scatters, XLA updates the buffer of a loop in place.
        written = lax.dynamic_index_in_dim(self.written, place, keepdims=False)
        good = inside & ~written
        row = jnp.where(good, value, lax.dynamic_index_in_dim(self.buffer, place, keepdims=False))
        new = replace(
            self,
            buffer=lax.dynamic_update_index_in_dim(self.buffer, row, place, 0),
            written=lax.dynamic_update_index_in_dim(self.written, written | inside, place, 0),
            end=jnp.where(good, jnp.maximum(self.end, at + 1), self.end),
        )
        return new._with_error(at, ~inside, inside & ~good)

    def append(self, value: Array) -> JaxElements:
        return self.write(self.end, value)

    def scatter(self, indices: Any, value: Array) -> JaxElements:
        at = _int32(indices)
        value = self._element(value, (at.shape[0], *self.element_shape))
        if not at.shape[0]:
            return self
        inside = (at >= 0) & (at < self.size)
        place = jnp.where(inside, at, self.size)
        # An index is written twice if it was written before, or if it occurs further up.
        order = jnp.arange(at.shape[0])
        first = jnp.full(self.size + 1, at.shape[0]).at[place].min(order)
        again = inside & (jnp.append(self.written, False)[place] | (first[place] < order))
        kept = jnp.where(again, self.size, place)
        new = replace(
            self,
            buffer=self.buffer.at[kept].set(value, mode="drop"),
            written=self.written.at[kept].set(True, mode="drop"),
            end=jnp.maximum(self.end, jnp.max(jnp.where(kept < self.size, kept + 1, 0), initial=0)),
        )
        worst = jnp.argmax(~inside | again)
        return new._with_error(at[worst], ~inside[worst], again[worst])

    def split(self, value: Array, lengths: np.ndarray) -> JaxElements:
        shape = self.element_shape
        if len(lengths) != self.size or not shape or bool((lengths != shape[0]).any()):
            raise InvalidArgumentError(
                f"under jit pieces must be {self.size} of shape {show(shape)}, got the lengths {lengths.tolist()}"
            )
        value = self._element(value, (self.size * shape[0], *shape[1:]))
        return self.scatter(jnp.arange(self.size), value.reshape(self.buffer.shape))

    def read(self, index: Any) -> Array:
        self._check_known(index)
        at = _int32(index)
        return self.gather(at[None], None)[0]

    def gather(self, indices: Any, element_shape: Any) -> Array:
        at = _int32(indices)
        inside = (at >= 0) & (at < self.size)
        self._raise_in_program(~inside.all(), OUTSIDE, at[jnp.argmin(inside)] if at.shape[0] else 0)
        # Elements outside read as NaN, or as the smallest number, which cannot be taken for results.
        missing = _missing(self.element_dtype)
        return self.buffer.at[jnp.where(inside, at, self.size)].get(mode="fill", fill_value=missing)

    def concat(self, element_shape_except0: Any) -> tuple[Array, np.ndarray]:
        if not self.element_shape:
            raise InvalidArgumentError("elements that are concatenated must have at least one dimension, got a scalar")
        length = self.element_shape[0]
        joined = self.buffer.reshape(self.size * length, *self.element_shape[1:])
        return joined, np.full(self.size, length, np.int64)

    def gradient(self, source: str, prepend: Shape) -> Any:
        raise UnimplementedError(
            "under jit there are no gradient arrays: JAX differentiates through the array by itself"
        )

    def close(self) -> None:
        raise UnimplementedError("under jit an array cannot be closed: JAX frees it")

    def _element(self, value: Array, shape: Shape) -> Array:
        found = jnp.asarray(value) if hasattr(value, "dtype") else jnp.asarray(value, self.buffer.dtype)
        if found.dtype != self.buffer.dtype or found.shape != shape:
            raise InvalidArgumentError(
                f"value must be {self.element_dtype}{show(shape)}, got {dtype_of(found)}{show(found.shape)}"
            )
        return found

    def _check_known(self, index: Any) -> None:
        """Raise if the index is known while the program is traced, and outside."""
        if is_concrete(index) and not 0 <= int(index) < self.size:
            raise InvalidArgumentError(_MESSAGES[OUTSIDE].format(size=self.size, index=int(index)))

    def _with_error(self, index: Array, outside: Array, twice: Array) -> JaxElements:
        code = jnp.where(outside, OUTSIDE, jnp.where(twice, TWICE, 0)).astype(jnp.int32)
        now = jnp.stack([code, jnp.asarray(index, jnp.int32)])
        self._raise_in_program(code > 0, code, index)
        return replace(self, error=jnp.where((self.error[0] == 0) & (code > 0), now, self.error))

    def _raise_in_program(self, bad: Array, code: Any, index: Any) -> None:
        if self.checked:
            jax.debug.callback(_raise, bad, code, index, self.size)


def _raise(bad: Any, code: Any, index: Any, size: Any) -> None:
    """Raise the error of a program, if it has one: `bad`."""
    if bad:
        raise InvalidArgumentError("under jit: " + _MESSAGES[int(code)].format(size=int(size), index=int(index)))


def _int32(index: Any) -> Array:
    """Indices as int32. Those that do not fit become the nearest that do, which are outside of every array, too."""
    limits = np.iinfo(np.int32)
    dtype = getattr(index, "dtype", limits.dtype)
    if not np.can_cast(dtype, limits.dtype):
        xp: Any = np if isinstance(index, np.ndarray) else jnp  # JAX by default makes int32 of int64
        index = xp.minimum(index, limits.max) if dtype.kind == "u" else xp.clip(index, limits.min, limits.max)
    return jnp.asarray(index, jnp.int32)


def _missing(dtype: str) -> Any:
    if "float" in dtype or "complex" in dtype:
        return np.nan
    return False if dtype == "bool" else np.iinfo(dtype).min


def to_jax(elements: Elements, checked: bool) -> JaxElements:
    """Copy the elements of an array to JAX."""
    shape, dtype = elements.element_shape, elements.element_dtype
    rules = elements.rules
    if rules.is_dynamic or rules.clears or rules.is_gradient or not is_known(shape):
        raise InvalidArgumentError(
            "under jit an array must have a size and an element_shape, not clear after read, and be no gradient array"
        )
    if dtype_name(jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        raise InvalidArgumentError(f"under jit there is no {dtype} unless jax_enable_x64 is set")
    rows, written = elements.storage.snapshot()
    buffer = jnp.zeros((elements.count(), *shape), dtype)
    if len(written):
        buffer = buffer.at[jnp.asarray(written)].set(jnp.stack(rows))
    mask = np.zeros(elements.size, bool)
    mask[written] = True
    end = np.int32(written[-1] + 1 if len(written) else 0)
    return JaxElements(buffer, jnp.asarray(mask), jnp.asarray(end), jnp.zeros(2, jnp.int32), checked)


@cache
def register(kind: Any) -> None:
    """Make the class `kind`, `TensorArray`, a pytree node."""

    def flatten(array: Any) -> tuple[Any, Any]:
        array._check_usable()
        state = array._array
        if type(state) is Elements:
            state = to_jax(state, array._checked)
        return (state.buffer, state.written, state.end, state.error), state.checked

    def unflatten(checked: bool, leaves: Any) -> Any:
        buffer, written, end, error = leaves
        return kind._of(JaxElements(buffer, written, end, error, checked), checked)

    jax.tree_util.register_pytree_node(kind, flatten, unflatten)
