"""Where state lives: named resources in a scope, found by (kind, library, device, container, name).

There is one current scope per process; `with scope():` puts a fresh one in its place, for every thread, until the block ends.
A resource is any object with `sweep(now)`, which drops what is expired or idle and returns when it next has something to drop,
`drop(now)`, which takes it out of its scope if nobody uses it (see `core.named`), `stored()`, how many entries it holds, and
`after_fork()`, which forgets the callers that did not come along.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, Protocol

from .clock import Clock, MonotonicClock
from .lock import has_lock, lock
from .named import IDLE_SECONDS

Key = tuple[str, str, Hashable, str, str]


class Observer(Protocol):
    """Someone who wants to know what batches are formed: see `weft.observe`."""

    def batch_ran(self, event: Any) -> None:
        """A batch was processed: a `weft.BatchRan`."""

    def call_refused(self, op: str, name: str, error: Exception) -> None:
        """A call was refused before it joined a batch."""


_scopes: weakref.WeakSet[Scope] = weakref.WeakSet()


class Scope:
    """A set of named resources with a clock of their own."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or MonotonicClock()
        self.now = self.clock.now
        self.resources: dict[Key, Any] = {}
        self.observers: tuple[Observer, ...] = ()
        #: When something stored may be expired; no entry expires before it.
        self.next_expiry = inf
        self._warned: set[Key] = set()
        _scopes.add(self)

    def find(self, key: Key, make: Callable[[], Any]) -> Any:
        """The resource called `key`, made now if there is none."""
        found = self.resources.get(key)
        return found if found is not None else self.keep(key, make())

    def keep(self, key: Key, new: Any) -> Any:
        """The resource called `key`: `new` if there is none."""
        new.home, new.key, new.used = self.resources, key, self.now()
        self.expires(new.used + IDLE_SECONDS)
        return self.resources.setdefault(key, new)  # in one step: of two threads that make it, one is first

    def warn_once(self, key: Key, text: str) -> None:
        """Warn of something about a resource, once in its life."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=_frames_of_ours())

    def expires(self, when: float) -> None:
        """Take note that something stored is of no use after the time `when`."""
        if when < self.next_expiry:
            self.next_expiry = when

    def sweep(self) -> int:
        """Drop what is expired or idle in every resource; how many entries are still stored."""
        now = self.clock.now()
        # Set first: what is stored while the resources are being swept lowers it again.
        self.next_expiry = inf
        try:
            for key, resource in list(self.resources.items()):
                self.expires(resource.sweep(now))
                self._drop_idle(key, resource, now)
        except BaseException:
            self.next_expiry = now  # an interrupted sweep is made again
            raise
        return self.stored()

    def _drop_idle(self, key: Key, resource: Any, now: float) -> None:
        """Drop a resource that nobody uses."""
        if has_lock():
            self.expires(now + 1.0)  # a finalizer sweeps: another call does it
            return
        with lock:
            when = resource.drop(now)
        if when is not None:
            self.expires(when)
            return
        self._warned.discard(key)

    def arrive(self) -> float:
        """The time, with what has expired swept out."""
        now: float = self.now()
        if self.next_expiry <= now:
            self.sweep()
        return now

    def tell(self, what: str, *event: Any, observers: tuple[Observer, ...] | None = None) -> None:
        """Tell every observer, or those given; what one of them raises is its own affair and is logged."""
        for observer in self.observers if observers is None else observers:
            try:
                getattr(observer, what)(*event)
            except Exception:
                logging.getLogger("weft").exception("an observer failed in %s", what)

    def stored(self) -> int:
        """How many entries are stored: waiting calls, pieces and gradients that nobody fetched yet."""
        return sum(resource.stored() for resource in list(self.resources.values()))


def _frames_of_ours() -> int:
    """How far up the stack the line is that called into this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


_PACKAGE = str(Path(__file__).parent.parent)

#: The scope that calls use now. Read it as an attribute of this module: it changes.
current_scope = Scope()


def current() -> Scope:
    """The scope that calls use now."""
    return current_scope


def arrive() -> tuple[Scope, float]:
    """The current scope, with what has expired swept out, and its time: where every call on a resource begins."""
    return current_scope, current_scope.arrive()


@contextmanager
def scope(clock: Clock | None = None) -> Iterator[Scope]:
    """A fresh scope, current in the whole process until the block ends: nothing in it meets what is outside."""
    global current_scope
    before, current_scope = current_scope, Scope(clock)
    try:
        yield current_scope
    finally:
        current_scope = before


def sweep() -> int:
    """Drop what is expired or idle now, and say how many entries are still stored.

    Every call on any resource does the same when something may have expired; this is for those who do not want to wait for one.
    """
    return current_scope.sweep()


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Tell `observer` of every batch of the current scope while the block runs."""
    here = current_scope
    here.observers = (*here.observers, observer)
    try:
        yield observer
    finally:
        left = list(here.observers)
        left.remove(observer)
        here.observers = tuple(left)


def _after_fork_in_child() -> None:
    """A forked child has none of the threads that were waiting: their calls are forgotten, their names are free."""
    for scope in list(_scopes):
        for resource in scope.resources.values():
            resource.after_fork()
        scope.resources.clear()
        scope.next_expiry = inf


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
