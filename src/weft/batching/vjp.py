"""Gradients by pull-backs, which take the gradient of a result to the gradients of the arguments: `vjp=`, and JAX's `vjp`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..core.arrays import Array, get_library_of, library_of, namespace
from ..core.inputs import refuse_odd
from ..errors import FailedPreconditionError, InvalidArgumentError
from ..ragged.tensor import RaggedTensor
from . import batch_arrays, results, trees
from .arguments import numbers_as_arrays
from .columns import Column, Columns
from .gradient import GradientTicket
from .modes import has_unkeyed_modes
from .ragged_arguments import RaggedArray
from .request import BatchKey, Request


class PullBack:
    """The pull-back of one call: called with the gradient of its result, it returns the gradients of its arrays."""

    def __init__(self, request: Request) -> None:
        self._has_rows = request.key.has_rows
        self._results = request.results()
        request.value, request.arrays = None, ()  # slices refer to their call: it must keep nothing
        self._call_arrays = request.call_arrays or ()
        for result in self._results:
            assert result.handle is not None
            result.handle.is_delivered = True

    def __call__(self, gradient: Any) -> Any:
        return self.concat([own for own, _ in deposit_and_wait(self.split(gradient))])

    def split(self, gradient: Any) -> list[tuple[GradientTicket, list[Any]]]:
        """Return the tickets of the call, each with the gradients of its rows."""
        first = self._results[0].batch
        places = first.array_places
        # A list is one leaf of a result, and for several arrays a list of their gradients.
        leaves = _values((trees if isinstance(gradient, list) else results).flatten(gradient)[0])
        if len(leaves) == len(first.parts):  # non-array leaves of the result have no gradient
            leaves = [leaves[i] for i in places]
        if not self._has_rows:
            leaves = numbers_as_arrays(leaves)
        if len(leaves) != len(places) or not all(x is None or trees.is_array(x) for x in leaves):
            raise InvalidArgumentError(
                f"the gradient must have the {len(places)} arrays of the result, got {trees.describe_leaves(leaves)}"
            )
        if not self._has_rows:
            ragged = first.ragged or ()
            leaves = [x if x is None or i in ragged else x[None] for i, x in zip(places, leaves, strict=True)]
        arrays = zip(*(result.arrays() for result in self._results), strict=True)
        leaves = [_like(x, parts) for x, parts in zip(leaves, arrays, strict=True)]
        tickets, starts = [], [0] * len(leaves)
        for result in self._results:
            stops = [start + x.shape[0] for start, x in zip(starts, result.arrays(), strict=True)]
            part = [_own_rows(*given) for given in zip(leaves, starts, stops, strict=True)]
            starts = stops
            assert result.handle is not None
            tickets.append((result.handle.ticket, part))
        return tickets

    def concat(self, parts: Sequence[Sequence[Any]]) -> Any:
        """Return the gradients of the call's arrays, a tuple if there are several, from those of its parts."""
        gradients = [
            given[0] if len(given) == 1 or given[0] is None else batch_arrays.concat(given)
            for given in zip(*parts, strict=True)
        ]
        if not self._has_rows:
            gradients = [x if x is None else x[0] for x in gradients]
        for i, array in enumerate(self._call_arrays):
            if isinstance(array, RaggedArray) and array.splits is not None and gradients[i] is not None:
                gradients[i] = RaggedTensor(gradients[i], array.splits)
        return gradients[0] if len(gradients) == 1 else tuple(gradients)


def _own_rows(x: Any, start: int, stop: int) -> Any:
    """Return a copy of some rows of a caller's gradient: a caller that does not wait to the end may write to its own."""
    return None if x is None else batch_arrays.split_rows(x[start:stop], [0, stop - start])[0]


def _values(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves with the values of RaggedTensors in their place."""
    return [x.flat_values if isinstance(x, RaggedTensor) else x for x in leaves]


def _like(x: Any, parts: Sequence[Array]) -> Any:
    """Return a gradient with the dtype of an array of the result, of which a caller has these parts; refuse another shape."""
    if x is None:
        return x
    refuse_odd("a gradient", x)
    like = parts[0]
    shape = (sum(part.shape[0] for part in parts), *like.shape[1:])
    if tuple(x.shape) != shape:
        raise InvalidArgumentError(
            f"the gradient must have the shape of the result, {list(shape)}, got {list(x.shape)}"
        )
    if library_of(x) != library_of(like):
        raise InvalidArgumentError(
            f"the gradient must be an array of the result's library, {library_of(like)}, got one of {library_of(x)}"
        )
    if x.dtype == like.dtype:
        return x
    if "complex" in str(x.dtype) and "complex" not in str(like.dtype):
        raise InvalidArgumentError(f"the gradient of a real result must be real, got {x.dtype}")
    return get_library_of(x).cast(x, like.dtype)


def deposit_and_wait(deposits: Sequence[tuple[GradientTicket, Sequence[Array | None]]]) -> list[Any]:
    """Hand in the gradients of a caller's tickets, wait for the batches, and return the part of each ticket."""
    parts = []
    try:
        for ticket, gradients in deposits:
            ticket.deposit(gradients, elsewhere=has_unkeyed_modes())
        for ticket, _ in deposits:
            parts.append(ticket.wait())
            ticket.value = None
    except BaseException as error:
        deposits[0][0].note_failure(error)
        raise
    return parts


class BatchPullBack:
    """The backward of a batch by its pull-back: returns each caller's gradients of the arrays and of the shared arguments.

    The whole gradient of the shared arguments goes to the first caller that handed in a gradient: the sum over callers is right.
    """

    def __init__(
        self,
        pull_back: Callable[[Sequence[Array]], tuple[list[Array | None], Any]],
        leaves: Sequence[Any],
        bounds: Sequence[tuple[int, int]],
        size: int,
        columns: Columns | None = None,
    ) -> None:
        self._pull_back, self._bounds, self._size = pull_back, bounds, size
        self._arrays = [x for x in leaves if trees.is_array(x)]
        self._of_outputs: Sequence[Column | None] = [None] * len(self._arrays)
        self._of_inputs: Sequence[Column | None] | None = None
        if columns is not None:
            self._of_outputs, self._of_inputs = columns

    def __call__(
        self, gradients: Sequence[Any], tickets: Sequence[GradientTicket]
    ) -> list[tuple[list[Array | None], Any]]:
        of_arrays, shared = self._pull_back([self._whole_gradient(k, gradients) for k in range(len(self._arrays))])
        columns = self._of_inputs or [None] * len(of_arrays)
        parts = [self._parts(i, x, column) for i, (x, column) in enumerate(zip(of_arrays, columns, strict=True))]
        first = next((i for i, given in enumerate(gradients) if given is not None), 0)
        return [([part[i] for part in parts], shared if i == first else None) for i in range(len(self._bounds))]

    def _parts(self, i: int, x: Array | None, column: Column | None) -> Sequence[Array | None]:
        """Return each caller's part of the gradient of array `i`."""
        if x is None:
            return [None] * len(self._bounds)
        has_rows = bool(x.shape) and x.shape[0] == self._size
        problem = (None if has_rows else f"the {self._size} rows of the batch") if column is None else column.problem(x)
        if problem is not None:
            raise FailedPreconditionError(
                f"every gradient of vjp must have {problem}, got {list(x.shape)} for array {i}"
            )
        # Copies, as of results: the pull-back may return its own buffer, and write to it in the next batch.
        return (
            batch_arrays.split_rows(x, [0, *(stop for _, stop in self._bounds)]) if column is None else column.split(x)
        )

    def _whole_gradient(self, k: int, gradients: Sequence[Any]) -> Array:
        """Return the gradient of array `k` of the result, with zeros for callers without one and for padding."""
        like, column = self._arrays[k], self._of_outputs[k]
        if column is not None:
            return column.join([given and given[k] for given in gradients], like)
        library = library_of(like) or "numpy"
        xp, where = namespace(library), {"device": like.device} if library == "torch" else {}
        zeros = partial(xp.zeros, dtype=like.dtype, **where)
        parts = [
            zeros((stop - start, *like.shape[1:])) if given is None or given[k] is None else given[k]
            for (start, stop), given in zip(self._bounds, gradients, strict=True)
        ]
        padding = self._size - self._bounds[-1][1]
        if padding:
            parts.append(zeros((padding, *like.shape[1:])))
        return xp.concat(parts, axis=0)


def on_leaves(vjp: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's `vjp` whose pull-back takes and returns flat lists of leaves."""

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Callable[[Sequence[Array]], list[Any]]]:
        returned = vjp(*args, **kwargs)
        if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
            raise FailedPreconditionError("vjp must return the function's result and a pull-back")
        output, pull_back = returned
        leaves, build = results.flatten_values(output)
        places = [i for i, x in enumerate(leaves) if trees.is_array(x)]

        def pull(gradients: Sequence[Array]) -> list[Any]:
            return _values(trees.flatten(pull_back(build(trees.replaced(leaves, places, gradients))))[0])

        return output, pull

    return call


def gradients_of_arrays(key: BatchKey, gradients: list[Any]) -> list[Any]:
    """Return a pull-back's gradients of the arrays: it may also have returned None for each non-array argument."""
    count, others = len(key.array_keys), key.statics
    if len(gradients) == count + len(others) and all(gradients[i] is None for i in others):
        gradients = [x for i, x in enumerate(gradients) if i not in others]
    for x in gradients:
        refuse_odd("a gradient of the pull-back", x)
    if len(gradients) != count or not all(x is None or trees.is_array(x) for x in gradients):
        raise FailedPreconditionError(
            f"the pull-back must return a gradient for each of the {count} arrays, got {trees.describe_leaves(gradients)}"
        )
    return gradients
