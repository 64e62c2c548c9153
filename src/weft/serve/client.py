"""`weft.Client`: calls models on a server, from threads or from tasks, with binary tensors and retries."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import numpy as np

from ..batching.options import positive
from ..errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    QueueFullError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from . import oip
from .client_http import Address, Answer, AsyncLink, Link, Lost, SyncLink, exchange
from .libraries import to_numpy

_ERRORS: dict[int, type[OpError]] = {
    400: InvalidArgumentError, 401: FailedPreconditionError, 403: FailedPreconditionError, 404: NotFoundError,
    408: DeadlineExceededError, 412: FailedPreconditionError, 413: ResourceExhaustedError, 429: QueueFullError,
    501: UnimplementedError, 503: UnavailableError, 504: DeadlineExceededError,
}  # fmt: skip
_RETRIED = (429, 503)
#: The longest pause before a retry, in seconds.
LONGEST_PAUSE = 5.0


class Outputs(dict[str, Any]):
    """The outputs of a call by name; `version` is that of the model, `parameters` what is no array."""

    version: str = ""
    parameters: Mapping[str, Any] = {}


class _Request:
    """A request, with what its retries and its end need."""

    def __init__(self, client: Client, method: str, path: str, headers: Any = (), body: bytes = b"") -> None:
        name = f"[{client.address.host}]" if ":" in client.address.host else client.address.host
        host = f"{name}:{client.address.port}".encode()
        self.method, self.path, self.body = method, client.address.path + path, body
        self.headers = [(b"host", host), *headers]
        if client.token is not None:
            self.headers.append((b"authorization", b"Bearer " + client.token.encode()))
        self.ends = time.monotonic() + client.timeout
        self._left, self._tried = client.retries, 0

    def steps(self, link: Link, is_stream: bool = False) -> Any:
        return exchange(link.connection, self.method, self.path, self.headers, self.body, is_stream)

    def seconds(self) -> float:
        """Return how long the request may still take."""
        left = self.ends - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError("the server did not answer in time")
        return left

    def again(self, answer: Answer | Lost) -> float | None:
        """Return the seconds to wait before a retry, None after success; raise the error if there is no retry."""
        pause = self._pause(answer)
        if pause is None:
            if isinstance(answer, Lost):
                self.seconds()  # its time may be over
                raise answer
            if answer.status != 200:
                raise _error(answer)
        return pause

    def _pause(self, answer: Answer | Lost) -> float | None:
        told = b""
        if isinstance(answer, Lost):
            if answer.is_stale:
                return 0.0  # the server closed an idle connection: that was no attempt
        elif answer.status in _RETRIED:
            told = answer.headers.get(b"retry-after", b"")
        else:
            return None
        if self._left <= 0:
            return None
        self._left -= 1
        self._tried += 1
        most = min(LONGEST_PAUSE, (float(told) if told.isdigit() else 0.0) or 0.05 * 2**self._tried)
        seconds = random.uniform(0.5 * most, most)
        return seconds if time.monotonic() + seconds < self.ends else None


def _error(answer: Answer) -> OpError:
    """Return the error that an answer says."""
    try:
        sentence = str(json.loads(answer.body)["error"])
    except (LookupError, RecursionError, TypeError, ValueError):
        sentence = f"the server answered with status {answer.status}"
    return _ERRORS.get(answer.status, InternalError)(sentence)


def _outputs(answer: Answer) -> Outputs:
    try:
        found, head = oip.decode_answer(answer.body, answer.headers.get(b"inference-header-content-length"))
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise InternalError(f"the answer is not one of the Open Inference Protocol: {error}") from error
    outputs = Outputs(found)
    outputs.version, outputs.parameters = head.get("model_version", ""), head.get("parameters", {})
    return outputs


def _entries(body: bytes, *names: str) -> dict[str, Any]:
    """Return the JSON object of an answer, which must have entries of these names."""
    try:
        found = json.loads(body)
    except (RecursionError, ValueError) as error:
        raise InternalError(f"the answer is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(name in found for name in names):
        wanted = f" with {', '.join(names)}" if names else ""
        raise InternalError(f"the answer must be a JSON object{wanted}, got {body[:80]!r}")
    return found


def _infer(
    client: Client,
    model: str,
    inputs: Mapping[str, Any] | None,
    named: Mapping[str, Any],
    deadline: float | None,
    low: bool,
) -> _Request:
    arrays = {name: _array(name, x) for name, x in _by_name(inputs, named).items()}
    for name, x in arrays.items():
        if isinstance(x, np.ndarray) and not x.ndim:
            raise InvalidArgumentError(f"input {name!r} must have a first dimension of rows, got a single value")
    parameters: dict[str, Any] = {}
    if deadline is not None:
        parameters["timeout"] = max(1, round(positive("deadline", deadline) * 1e6))
    if low:
        parameters["priority"] = 2
    headers, body = oip.encode_request(arrays, parameters=parameters)
    return _Request(client, "POST", f"/v2/models/{quote(model, safe='')}/infer", headers, body)


def _stream(client: Client, model: str, inputs: Mapping[str, Any] | None, named: Mapping[str, Any]) -> _Request:
    values = {name: np.asarray(_array(name, x)).tolist() for name, x in _by_name(inputs, named).items()}
    return _Request(
        client, "POST", f"/v2/models/{quote(model, safe='')}/generate_stream", (), json.dumps(values).encode()
    )


def _by_name(inputs: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InvalidArgumentError(
            f"inputs must be a dict of arrays by name, got {type(inputs).__name__}: name the input, as in infer(model, x=x)"
        )
    values = {**(inputs or {}), **named}
    if not values:
        raise InvalidArgumentError("a call needs one or more inputs, by name")
    return values


def _array(name: str, x: Any) -> Any:
    """Return an input as a NumPy array, or as it is if it is a list of text."""
    if isinstance(x, list) and all(isinstance(item, (str, bytes)) for item in x):
        return x
    try:
        array = np.asarray(to_numpy(x))
    except ValueError:
        array = np.asarray(None)  # rows of different length
    if array.dtype.kind == "O" and not (array.size and all(isinstance(item, (str, bytes)) for item in array.flat)):
        raise InvalidArgumentError(f"input {name!r} must be an array, or a list of text, got {x!r:.80}")
    return array


class _Events:
    """Takes the bytes of an event stream apart."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> Iterator[Outputs]:
        """Yield the outputs of each whole event."""
        *events, self._rest = (self._rest + part).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data.startswith(b'{"error"'):
                raise InternalError(str(_entries(data, "error")["error"]))
            yield _outputs(Answer(200, {}, data))


class Client:
    """Calls the models of a server; `aio` has the same calls for tasks of an event loop.

    >>> client = Client("http://127.0.0.1:8000")                    # doctest: +SKIP
    >>> client.infer("digits", pixels=pixels)["digit"]              # doctest: +SKIP
    >>> (await client.aio.infer("digits", pixels=pixels))["digit"]  # doctest: +SKIP

    - `timeout`: the longest time of a call in seconds, with its retries.
    - `retries`: how often a call is repeated that the server refused for lack of room or while it was not ready (429, 503), or
      whose connection was lost.
    - `token`: the server's bearer token.
    - `context`: an `ssl.SSLContext` for https.

    A client may be used by many threads. Errors are those of `weft.errors`.
    """

    def __init__(
        self,
        address: str = "http://127.0.0.1:8000",
        *,
        timeout: float = 60.0,
        retries: int = 5,
        token: str | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.address = Address.of(address, context)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InvalidArgumentError(f"retries must be an integer from 0 on, got {retries!r}")
        self.timeout, self.retries, self.token = positive("timeout", timeout), retries, token
        self._idle: list[SyncLink] = []
        self._lock = threading.Lock()
        self.aio = AsyncClient(self)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        deadline: float | None = None,
        low_priority: bool = False,
        **named: Any,
    ) -> Outputs:
        """Call a model with arrays or lists of text by input name; return its outputs by name."""
        return _outputs(self._ask(_infer(self, model, inputs, named, deadline, low_priority)))

    def stream(self, model: str, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> Iterator[Outputs]:
        """Call a model that streams, with the inputs of one row; yield the outputs of each chunk."""
        request = _stream(self, model, inputs, named)
        while (pause := (yield from self._stream_once(request))) is not None:
            time.sleep(pause)

    def _stream_once(self, request: _Request) -> Generator[Outputs, None, float | None]:
        """Yield the outputs of a stream; return the seconds after which to ask again, None at its end."""
        link = SyncLink(self.address, request.seconds())
        events = _Events()
        try:
            run = link.run(request.steps(link, True), self.timeout)
            while True:
                try:
                    part = next(run)
                except StopIteration as ended:
                    return request.again(ended.value)
                yield from events.feed(part)
        finally:
            link.close()

    def metadata(self, model: str) -> dict[str, Any]:
        """Return what the server says of a model."""
        return _entries(self._ask(_Request(self, "GET", f"/v2/models/{quote(model, safe='')}")).body)

    def is_ready(self) -> bool:
        """Return whether all models of the server answer; False if it cannot be reached."""
        try:
            return self._once(_Request(self, "GET", "/v2/health/ready")).status == 200
        except UnavailableError:
            return False

    def load(self, model: str) -> str:
        """Load a model anew; return its version."""
        request = _Request(self, "POST", f"/v2/repository/models/{quote(model, safe='')}/load")
        return str(_entries(self._ask(request).body, "version")["version"])

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: _Request) -> Answer:
        """Return the answer of a request, after retries."""
        while True:
            try:
                answer = self._once(request)
                pause = request.again(answer)
            except Lost as lost:
                pause = request.again(lost)
            if pause is None:
                return answer
            time.sleep(pause)

    def _once(self, request: _Request) -> Answer:
        with self._lock:
            link = self._idle.pop() if self._idle else None
        link = link or SyncLink(self.address, request.seconds())
        try:
            run = link.run(request.steps(link), request.seconds())
            try:
                next(run)
            except StopIteration as ended:
                answer: Answer = ended.value
            if link.is_reusable():
                with self._lock:
                    self._idle.append(link)
                link = None
            return answer
        finally:
            if link is not None:
                link.close()


class AsyncClient:
    """The calls of a `Client` for tasks of one event loop at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._idle: list[AsyncLink] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        deadline: float | None = None,
        low_priority: bool = False,
        **named: Any,
    ) -> Outputs:
        """As `Client.infer`."""
        return _outputs(await self._ask(_infer(self._client, model, inputs, named, deadline, low_priority)))

    async def stream(
        self, model: str, inputs: Mapping[str, Any] | None = None, /, **named: Any
    ) -> AsyncIterator[Outputs]:
        """As `Client.stream`."""
        request = _stream(self._client, model, inputs, named)
        pause: float | None = 0.0
        while pause is not None:
            await asyncio.sleep(pause)
            link = await AsyncLink.open(self._client.address, request.seconds())
            events = _Events()
            try:
                async for part in link.run(request.steps(link, True), self._client.timeout):
                    if isinstance(part, Answer):
                        pause = request.again(part)
                        break
                    for outputs in events.feed(part):
                        yield outputs
            finally:
                link.close()

    async def metadata(self, model: str) -> dict[str, Any]:
        """As `Client.metadata`."""
        request = _Request(self._client, "GET", f"/v2/models/{quote(model, safe='')}")
        return _entries((await self._ask(request)).body)

    async def is_ready(self) -> bool:
        """As `Client.is_ready`."""
        try:
            return (await self._once(_Request(self._client, "GET", "/v2/health/ready"))).status == 200
        except UnavailableError:
            return False

    async def load(self, model: str) -> str:
        """As `Client.load`."""
        request = _Request(self._client, "POST", f"/v2/repository/models/{quote(model, safe='')}/load")
        return str(_entries((await self._ask(request)).body, "version")["version"])

    async def close(self) -> None:
        """Close the idle connections."""
        idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    async def _ask(self, request: _Request) -> Answer:
        while True:
            try:
                answer = await self._once(request)
                pause = request.again(answer)
            except Lost as lost:
                pause = request.again(lost)
            if pause is None:
                return answer
            await asyncio.sleep(pause)

    async def _once(self, request: _Request) -> Answer:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # connections belong to a loop
            self._loop, self._idle = loop, []
        link: AsyncLink | None = self._idle.pop() if self._idle else None
        link = link or await AsyncLink.open(self._client.address, request.seconds())
        try:
            parts = [part async for part in link.run(request.steps(link), request.seconds())]
            answer: Any = parts[-1]
            if link.is_reusable():
                self._idle.append(link)
                link = None
            return answer
        finally:
            if link is not None:
                link.close()
