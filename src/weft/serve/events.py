"""A stream as server-sent events: one for each chunk that the model's function yields."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

from ..errors import DeadlineExceededError, OpError
from . import oip
from .errors import sentence
from .http import Exchange, encode_json
from .models import Model, Version


class EventStream:
    """The events of a call. Its first chunk is there; an error after it is an event, too.

    No wait is without end: the wait for each chunk, and for a client to take an event, ends after `deadline` seconds.
    """

    def __init__(
        self, exchange: Exchange, call: oip.Call, model: Model, version: Version, chunks: Any, first: Any, deadline: float
    ) -> None:  # fmt: skip
        self._exchange, self._call, self._model, self._version = exchange, call, model, version
        self._chunks, self._first, self._deadline = chunks, [first], deadline
        self._is_over = self._is_closed = False
        model.calls += 1

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        self._exchange.since = perf_counter()
        try:
            chunk = self._first.pop() if self._first else await self._next()
            data = oip.encode(self._call, chunk, self._model.name, self._version.tag)[1]
        except StopAsyncIteration:
            self._is_over = True
            raise
        except Exception as error:
            self._is_over = True
            if not isinstance(error, OpError):
                self._model.log_failure(error)
            data = encode_json({"error": sentence(error)})
        self._model.chunks += 1
        self._exchange.since = perf_counter()
        return b"data: " + data + b"\n\n"

    async def _next(self) -> Any:
        try:
            return await anext(self._chunks)
        except asyncio.CancelledError:
            if not self._exchange.late:
                raise
            self._exchange.task.uncancel()
            self._exchange.late = False
            raise DeadlineExceededError(f"the model gave no further result within {self._deadline:g} s") from None

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._model.calls -= 1
            await self._chunks.aclose()
