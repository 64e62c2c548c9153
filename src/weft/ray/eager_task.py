"""Coroutines of a server that begin at once: a call enters its queue as soon as its frame is read, without a task of asyncio."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any


class EagerTask:
    """Runs a coroutine in the loop. It is its own task: its first part runs in `start`, the others when what it awaits is there."""

    __slots__ = ("_coroutine", "_end", "_is_cancelled", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, None], end: Callable[[], object]) -> None:
        self._coroutine, self._end = coroutine, end
        self._waits_for: Any = None
        self._is_cancelled = False

    def start(self, mode: Any = None) -> None:
        """Run the first part, within the context manager `mode`: modes of PyTorch must not last while others run."""
        if mode is None:
            self._go_on(None)
        else:
            with mode:
                self._go_on(None)

    def _go_on(self, awaited: Any) -> None:
        self._waits_for = None
        try:
            found = self._next(awaited)
        except (StopIteration, asyncio.CancelledError):
            self._end()
        except BaseException:
            self._end()
            raise
        else:
            if found is None:  # the coroutine lets others run
                asyncio.get_running_loop().call_soon(self._go_on, None)
                return
            self._waits_for = found
            found._asyncio_future_blocking = False
            found.add_done_callback(self._go_on, context=contextvars.copy_context())

    def _next(self, awaited: Any) -> Any:
        """Run the coroutine up to its next wait."""
        if self._is_cancelled:
            self._is_cancelled = False
            return self._coroutine.throw(asyncio.CancelledError())
        if awaited is not None:
            try:
                awaited.result()
            except asyncio.CancelledError as error:
                return self._coroutine.throw(error)
            except BaseException:  # the coroutine asks for the result itself
                return self._coroutine.send(None)
        return self._coroutine.send(None)

    def cancel(self) -> None:
        if self._waits_for is not None:
            self._waits_for.cancel()
        else:
            self._is_cancelled = True
