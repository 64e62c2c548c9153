"""The attributes of Batch, BatchFunction and Unbatch, and the named resources that they make."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core import adapters, check
from ..core.arrays import Array, device_of
from ..core.scope import Scope
from ..errors import InvalidArgumentError, OpError
from .batch_arrays import a_value
from .call import QueuedCall
from .dispatcher import Dispatcher
from .queue import Limits

MOST_THREADS = 4096

#: Makes the dispatcher of a resource.
Make: TypeAlias = "Callable[[ResourceSpec, Scope], OpDispatcher]"


class Attributes(NamedTuple):
    """The attributes of a queue, as integers in TensorFlow's units."""

    num_batch_threads: int
    max_batch_size: int
    batch_timeout_micros: int
    max_enqueued_batches: int
    allowed_batch_sizes: tuple[int, ...]

    @classmethod
    def of(cls, threads: Any, rows: Any, timeout: Any, enqueued: Any, allowed: Any) -> Attributes:
        """Check that the attributes are 32-bit integers; `limits` checks whether they can make a queue."""
        return cls(
            check.integer("num_batch_threads", threads),
            check.integer("max_batch_size", rows),
            check.integer("batch_timeout_micros", timeout),
            check.integer("max_enqueued_batches", 10 if enqueued is None else enqueued),
            check.integers("allowed_batch_sizes", allowed),
        )

    def limits(self, **more: Any) -> Limits:
        """Return the limits of a new queue; refuse attributes that cannot make one."""
        threads, rows, timeout, enqueued, allowed = self
        if threads > MOST_THREADS:
            raise InvalidArgumentError(f"num_batch_threads must be at most {MOST_THREADS}, got {threads}")
        if rows <= 0:
            raise InvalidArgumentError(f"max_batch_size must be positive, got {rows}")
        if timeout < 0:
            raise InvalidArgumentError(f"batch_timeout_micros must not be negative, got {timeout}")
        return Limits(threads, rows, timeout / 1e6, inf if enqueued < 0 else max(enqueued, 1), allowed, **more)


class SpecCache:
    """Caches `make(attributes)`, a `ResourceSpec`. Values that can change, such as lists and arrays, are not cached.

    The attributes of the last call are compared by identity first. The row "Batch+Unbatch, 1 thread" of `benchmarks/batching.py`
    needs that.
    """

    def __init__(self, make: Callable[[tuple[Any, ...]], Any]) -> None:
        @lru_cache(maxsize=1024, typed=True)
        def cached(*attributes: Any) -> Any:
            for attribute in attributes:
                if not isinstance(attribute, _IMMUTABLE):
                    raise TypeError(f"not cached: {type(attribute).__name__}")
            return make(attributes)

        self._make, self._cached = make, cached
        self._last: tuple[tuple[Any, ...], Any] = ((), None)

    def of(self, attributes: tuple[Any, ...]) -> Any:
        """Return the spec of these attributes."""
        last = self._last
        if _are_same(last[0], attributes):
            return last[1]
        try:
            spec = self._cached(*attributes)
        except TypeError:
            return self._make(tuple([tuple(a) if type(a) is list else a for a in attributes]))
        self._last = (attributes, spec)
        return spec


def _are_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two tuples hold the same objects."""
    if len(a) != len(b):
        return False
    for i in range(len(a)):  # noqa: SIM110  a generator would not compile
        if a[i] is not b[i]:
            return False
    return True


_IMMUTABLE = (int, float, str, bytes, tuple, type(None), np.generic)


def resource_name(op: str, shared_name: Any, name: Any) -> str:
    """Return the name of a resource: `shared_name`, else `name`, else the name of the op."""
    return check.text("shared_name", shared_name) or check.text("name", name) or op


class OpDispatcher(Dispatcher):
    """The resource of Batch and of BatchFunction, with the attributes of the call that made it."""

    attributes: Any


class ResourceSpec:
    """The checked attributes of a call: the name of its resource, and in `attributes` how to make it."""

    def __init__(self, op: str, container: Any, shared_name: Any, name: Any, attributes: Any, queue: Any = "") -> None:
        self.op = op
        self.container = check.text("container", container)
        self.name = resource_name(op, shared_name, name)
        self.attributes = attributes
        self.queue = check.text("batching_queue", queue)
        self.numpy_key = (op, "numpy", "cpu", self.container, self.name)

    def key(self, x: Array, library: str) -> Any:
        """Return the key of the resource for arrays like `x`."""
        if library == "numpy":
            return self.numpy_key
        return (self.op, library, device_of(a_value(x)), self.container, self.name)

    def queue_key(self, library: str) -> Any:
        """Return the key of the queue within the resource: callers with gradients on and off do not share a batch.

        Nor do callers of JAX that differentiate their inputs and callers that do not: the caller that gets the batch must
        differentiate it if the others do.
        """
        if library not in ("torch", "jax"):
            return self.queue
        return (self.queue, adapters.of(library).gradients_on())

    def warn(self, scope: Scope, key: Any, made_with: Any) -> None:
        """Warn that the resource exists with other attributes, once in its life."""
        scope.warn_once(key, f"{self.op} {self.name!r} exists with {made_with}: {self.attributes} is ignored")

    def dispatcher(self, key: Any, scope: Scope, make: Make, rows: int, low: bool = False) -> OpDispatcher:
        """Return the dispatcher of the resource; make it if there is none and it would take a call of `rows` rows."""
        found = scope.resources.get(key)
        if found is None:
            new = make(self, scope)
            new.check_fits(rows, low)
            found = scope.keep(key, new)
        if found.attributes is not self.attributes and found.attributes != self.attributes:
            self.warn(scope, key, found.attributes)
        return found

    def make_without_rows(self, key: Any, scope: Scope, make: Make) -> None:
        """Make the dispatcher for a call without rows, if its attributes can make one: such a call succeeds if they cannot."""
        if key not in scope.resources:
            with suppress(InvalidArgumentError):
                scope.keep(key, make(self, scope))


class OpCall(QueuedCall):
    """A call of Batch or BatchFunction."""

    queue_key: Hashable

    def enter(self) -> None:
        """Put the call in its queue; tell observers if it is refused."""
        dispatcher = self.dispatcher
        try:
            dispatcher.enter(self.queue_key, self, self.arrived)
        except OpError as error:
            scope = dispatcher.scope
            if scope.observers:
                scope.tell("call_refused", dispatcher.op, dispatcher.name, error)
            raise
