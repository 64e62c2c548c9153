"""The function of a replica's batcher: the model, whose results are paired with the version of the weights that made them.

A batch does not run while the weights change. There is one form for each kind of function that a batcher takes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ..batching.options import kind_of
from ..batching.results import Tagged

if TYPE_CHECKING:
    from .replica import Replica


def with_version(replica: Replica, model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `model` that gives its result and a version."""
    kind = kind_of(model)
    made = _FORMS[kind](replica, model)
    # The batcher reads the names of the parameters from the model's signature.
    signature = getattr(model, "forward", model) if replica.weights is not None else model
    made.__wrapped__ = signature
    made.__name__ = made.__qualname__ = getattr(model, "__qualname__", type(model).__name__)
    return made


def vjp_with_version(replica: Replica, vjp: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like the option `vjp` that gives its result and a version, and the pull-back of both."""

    @functools.wraps(vjp)
    def call(*args: Any, **kwargs: Any) -> Any:
        with replica.gate, replica.running(args, kwargs):
            result, pull_back = vjp(*args, **kwargs)
            return Tagged(result, replica.version), lambda gradient: pull_back(gradient[0])

    return call


def _plain(replica: Replica, model: Callable[..., Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Tagged:
        with replica.gate, replica.running(args, kwargs):
            return Tagged(model(*args, **kwargs), replica.version)

    return call


def _coroutine(replica: Replica, model: Callable[..., Any]) -> Any:
    async def call(*args: Any, **kwargs: Any) -> Tagged:
        async with _entered(replica):
            with replica.running(args, kwargs):
                return Tagged(await model(*args, **kwargs), replica.version)

    return call


def _generator(replica: Replica, model: Callable[..., Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Iterator[Tagged]:
        with replica.gate, replica.running(args, kwargs):
            for chunk in model(*args, **kwargs):
                yield Tagged(chunk, replica.version)

    return call


def _async_generator(replica: Replica, model: Callable[..., Any]) -> Any:
    async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Tagged]:
        async with _entered(replica):
            with replica.running(args, kwargs):
                async for chunk in model(*args, **kwargs):
                    yield Tagged(chunk, replica.version)

    return call


@asynccontextmanager
async def _entered(replica: Replica) -> AsyncIterator[None]:
    """Be inside the gate during a block, without blocking the loop while the gate is closed."""
    while not replica.gate.enter_if_open():
        await asyncio.sleep(0.001)
    try:
        yield
    finally:
        replica.gate.__exit__()


_FORMS = {
    "result": _plain,
    "coroutine": _coroutine,
    "generator": _generator,
    "async generator": _async_generator,
}
