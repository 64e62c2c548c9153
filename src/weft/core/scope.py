"""Scopes, which hold the named resources: queues and tables, found by (kind, library, device, container, name).

There is one current scope per process; `with scope():` puts a fresh one in its place, for every thread, until the block ends.
A resource has four methods. `sweep(now)` drops expired and idle entries and returns when the next one expires. `drop(now)` takes
the resource out of its scope if it is unused (see `core.named`). `stored()` returns the number of its entries. `after_fork()`
forgets the callers of the parent process.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol

from ..errors import InvalidArgumentError
from .clock import Clock, MonotonicClock
from .fork import on_fork_in_child
from .interrupts import as_exception
from .lock import has_lock, lock
from .named import IDLE_SECONDS
from .warn import warn_caller

Key = tuple[str, str, Hashable, str, str]

#: A sweep looks at all entries. The next one comes at the earliest so many seconds later for each entry that was left.
SECONDS_PER_ENTRY = 10e-6


class Observer(Protocol):
    """The methods that an observer must have: `weft.observe(observer)` calls them for every batch and every refused call."""

    def batch_ran(self, event: Any) -> None:
        """A batch was processed: a `weft.BatchRan`."""

    def call_refused(self, op: str, name: str, error: Exception) -> None:
        """A call was refused before it joined a batch."""


_scopes: weakref.WeakSet[Scope] = weakref.WeakSet()


class Scope:
    """A set of named resources with a clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        if clock is not None and not callable(getattr(clock, "now", None)):
            raise InvalidArgumentError(f"a clock must be a weft.SimulatedClock or the like, got {clock!r}")
        self.clock: Clock = clock or MonotonicClock()
        self.now = self.clock.now
        self.resources: dict[Key, Any] = {}
        self.observers: tuple[Observer, ...] = ()
        #: No entry expires before this time.
        self.next_expiry = inf
        self._warned: set[Key] = set()
        _scopes.add(self)

    def find(self, key: Key, make: Callable[[], Any]) -> Any:
        """Return the resource called `key`; make it if there is none."""
        found = self.resources.get(key)
        return found if found is not None else self.keep(key, make())

    def keep(self, key: Key, new: Any) -> Any:
        """Return the resource called `key`, which is `new` if there was none."""
        new.resources, new.key, new.last_used = self.resources, key, self.now()
        self.expires(new.last_used + IDLE_SECONDS)
        return self.resources.setdefault(key, new)  # atomic: if two threads make it, both get the first

    def warn_once(self, key: Key, text: str) -> None:
        """Warn about a resource, once in its life."""
        if key not in self._warned:
            self._warned.add(key)
            warn_caller(text)

    def expires(self, when: float) -> None:
        """Note that an entry expires at the time `when`."""
        if when < self.next_expiry:
            self.next_expiry = when

    def sweep(self) -> int:
        """Drop expired and idle entries of every resource; return how many entries are left."""
        now = self.clock.now()
        # Set first: entries that are stored during the sweep lower it again.
        self.next_expiry = inf
        try:
            for key, resource in list(self.resources.items()):
                self.expires(resource.sweep(now))
                self._drop_idle(key, resource, now)
        except BaseException:
            self.next_expiry = now  # an interrupted sweep is made again
            raise
        left = self.stored()
        self.next_expiry = max(self.next_expiry, now + left * SECONDS_PER_ENTRY)
        return left

    def _drop_idle(self, key: Key, resource: Any, now: float) -> None:
        """Drop a resource that is unused."""
        if has_lock():
            self.expires(now + 1.0)  # a finalizer sweeps: leave it to another call
            return
        with lock:
            when = resource.drop(now)
        if when is None:
            self._warned.discard(key)
        else:
            self.expires(when)

    def arrive(self) -> float:
        """Return the time, after a sweep if one is due: the first step of every call on a resource."""
        now: float = self.now()
        if self.next_expiry <= now:
            self.sweep()
        return now

    def tell(self, what: str, *event: Any, observers: tuple[Observer, ...] | None = None) -> None:
        """Call the method `what` of every observer, or of those given; exceptions of an observer are logged."""
        for observer in self.observers if observers is None else observers:
            try:
                getattr(observer, what)(*event)
            except BaseException as error:
                problem = as_exception(error)
                logging.getLogger("weft").error("an observer failed in %s", what, exc_info=problem)

    def stored(self) -> int:
        """Return the number of entries: waiting calls, and pieces and gradients that were not fetched yet."""
        return sum(resource.stored() for resource in list(self.resources.values()))


#: The scope that calls use now. Read it as an attribute of this module: it changes.
current_scope = Scope()


def current() -> Scope:
    """The scope that calls use now."""
    return current_scope


@contextmanager
def scope(clock: Clock | None = None) -> Iterator[Scope]:
    """Make a fresh scope current in the whole process until the block ends: calls inside and outside share nothing."""
    global current_scope
    before, current_scope = current_scope, Scope(clock)
    try:
        yield current_scope
    finally:
        current_scope = before


def sweep() -> int:
    """Drop what no caller can ask for any more, such as results past their deadline; return the number of entries left.

    Every call does the same from time to time: only tests and programs without further calls need this.
    """
    return current_scope.sweep()


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Tell `observer` of every batch of the current scope while the block runs."""
    for method in ("batch_ran", "call_refused"):
        if not callable(getattr(observer, method, None)):
            raise InvalidArgumentError(
                f"an observer must have a method {method}, got a {type(observer).__name__} without it"
            )
    here = current_scope
    here.observers = (*here.observers, observer)
    try:
        yield observer
    finally:
        others = list(here.observers)
        others.remove(observer)
        here.observers = tuple(others)


def _after_fork_in_child() -> None:
    """Forget all calls, and free all names: the threads that waited do not exist in a forked child."""
    for scope in list(_scopes):
        for resource in scope.resources.values():
            resource.after_fork()
        scope.resources.clear()
        scope.next_expiry = inf


on_fork_in_child(_after_fork_in_child)
