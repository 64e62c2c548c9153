"""The ASGI application: answers requests for its models, and ends what takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic, perf_counter
from typing import Any

from ..errors import CancelledError, FailedPreconditionError, InvalidArgumentError, OpError
from . import errors, routes
from .access import AccessLog, trace_of
from .endpoints import Endpoint, Endpoints
from .errors import HttpError
from .guard import Guard
from .http import LEAVE, Bodies, Exchange, Gone, Receive, Reply, Scope, Send, json_reply, send_reply
from .limits import Limits
from .models import Model, as_model
from .routes import Route
from .watch import Watch

log = logging.getLogger("weft.serve")

#: Seconds between two looks at the requests that are being answered.
SWEEP = 0.05
#: Endpoints that need no token: probes, and the page's own files, which say nothing of the models.
OPEN = {"live", "ready", "page"}
#: Endpoints that call a model.
CALLS = {"infer", "predict", "generate_stream"}


class App:
    """An ASGI application that serves models; `weft.serve.app` makes one.

    Mounted into another application, `lifespan` starts and ends it with that one: `FastAPI(lifespan=served.lifespan)`. If nobody
    starts it, the first request does.
    """

    def __init__(
        self,
        models: Sequence[Any],
        *,
        limits: Limits | None = None,
        token: str | None = None,
        hosts: Sequence[str] = (),
        access_log: str = "errors",
    ) -> None:
        if not models:
            raise InvalidArgumentError("an app serves one or more models, got none")
        self.models: dict[str, Model] = {}
        for model in map(as_model, models):
            if model.name in self.models:
                raise InvalidArgumentError(f"two models are called {model.name}: give one another name=")
            self.models[model.name] = model
        self.limits = Limits() if limits is None else limits
        self.guard = Guard(token, hosts)
        self.watch = Watch(self.models)
        self.access = AccessLog(access_log)
        self.bodies = Bodies()
        self.statuses: Counter[int] = Counter()  # of answers to requests that call no model
        self.is_leaving = False  # True from the signal to end on: calls are taken until `is_draining`
        self.is_draining = False
        #: Sends a reply in one piece, where the server can; returns whether it did.
        self.respond: Callable[[Any, Reply, bool], bool] | None = None
        self.endpoints = Endpoints(self)
        # The paths of calls, without a search: they are most of the requests.
        self.calls = {f"/v2/models/{name}/infer": Route("infer", "POST", name) for name in self.models}
        self.calls |= {f"/v1/models/{name}:predict": Route("predict", "POST", name) for name in self.models}
        self._open: set[Exchange] = set()
        self._is_sweeping = False
        self._starts_itself = True  # False once somebody else has started it
        self._load: asyncio.Future[None] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None  # known once it is started

    # --- life ---

    def start(self) -> asyncio.Future[None]:
        """Load and warm up all models; return what becomes done when they are ready. Calls are refused until then.

        An app that was stopped can be started again.
        """
        self._starts_itself = self.is_leaving = self.is_draining = False
        return self._loading()

    async def _start_itself(self) -> None:
        """Start because nobody else did: the first calls wait until the models are ready."""
        try:
            await asyncio.shield(self._loading())
        finally:
            self._starts_itself = False

    def _loading(self) -> asyncio.Future[None]:
        if self._load is None:
            self.loop = asyncio.get_running_loop()
            self._load = asyncio.ensure_future(self._load_all())
        return self._load

    async def _load_all(self) -> None:
        for model in self.models.values():
            if model.version is None:
                await model.load(self.limits.drain_time)

    async def drain(self) -> bool:
        """Refuse new calls; return when those in flight are answered. If that takes too long, give them up and return False."""
        self.is_leaving = self.is_draining = True
        ends = perf_counter() + self.limits.drain_time
        while any(exchange.task is not None for exchange in self._open):
            if perf_counter() > ends:
                for exchange in [x for x in self._open if x.reading or x.waiting]:
                    exchange.give_up()
                return False
            await asyncio.sleep(0.01)
        return True

    async def stop(self) -> None:
        self.watch.rest(at_once=True)
        self.access.flush()
        for model in self.models.values():
            with contextlib.suppress(TimeoutError):  # another load of it hangs
                await asyncio.wait_for(model.unload(1.0), self.limits.drain_time)
        self._load = None

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any = None) -> AsyncIterator[None]:
        """Start when another application starts, and end with it."""
        await self.start()
        try:
            yield
        finally:
            await self.drain()
            await self.stop()

    async def reload(self) -> None:
        """Load all models anew; those that fail keep their version."""
        for model in self.models.values():
            try:
                await model.load(self.limits.drain_time)
            except OpError as error:
                log.error("%s", error)

    def why_not_ready(self) -> dict[str, str]:
        """Return the models that do not answer, and why."""
        found = {}
        for model in self.models.values():
            if model.is_hanging:
                found[model.name] = f"a batch of {model.name} runs for too long"
            elif model.version is None:
                found[model.name] = f"the model {model.name} is not loaded"
        return found

    def is_stuck(self) -> bool:
        """Return whether all models hang, and their calls have waited for longer than `hang_exit`."""
        since = [model.hangs_since for model in self.models.values() if model.version is not None]
        longest = self.limits.hang_exit
        return bool(since) and all(x is not None and monotonic() - x > longest for x in since)

    # --- ASGI ---

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        exchange = Exchange(scope, receive)
        self.begin(exchange)
        reply: Reply | None
        problem = ""
        try:
            endpoint, route = self._find(exchange)
            if self._starts_itself and route.endpoint in CALLS:
                await self._start_itself()
            reply = await endpoint(exchange, route)
        except asyncio.CancelledError:
            reply = self._cancelled(exchange)
        except Gone:
            reply = None
        except Exception as error:
            problem = errors.sentence(error)
            reply = self.failed(exchange, error)
        finally:
            self._open.discard(exchange)
            if exchange.watcher is not None:
                exchange.watcher.cancel()
        reply = self.end(exchange, reply, problem)
        if reply is None:
            if self.respond is None:  # nobody reads it, but middleware may expect an answer
                with contextlib.suppress(OSError):
                    await send_reply(send, Reply(499, (), b""))
            return
        is_head = exchange.method == "HEAD"
        if reply.stream is not None:
            await self._send_stream(exchange, send, reply)
        elif self.respond is None or not self.respond(send, reply, is_head):
            await send_reply(send, reply, is_head)

    def begin(self, exchange: Exchange) -> None:
        """Watch over a request from now on."""
        self._open.add(exchange)
        if not self._is_sweeping:
            self._sweep_later()

    def end(self, exchange: Exchange, reply: Reply | None, problem: str = "") -> Reply | None:
        """Count and log a request that has its reply; return the reply with the headers that all have."""
        self._open.discard(exchange)
        status = 499 if reply is None else reply.status
        statuses = self.statuses if exchange.model is None else self.models[exchange.model].statuses
        statuses[status] += 1
        if status >= self.access.least and self.access.wants(status):
            self.access.add(exchange, status, 0 if reply is None else len(reply.body), problem)
        if reply is not None and b"traceparent" in exchange.headers and trace_of(exchange) is not None:
            reply = reply._replace(headers=(*reply.headers, (b"traceparent", exchange.headers[b"traceparent"])))
        return reply

    def refused(self, status: int, sentence: str, client: Any) -> None:
        """Count and log what was refused before it was a request."""
        self.statuses[status] += 1
        if self.access.wants(status):
            self.access.add_refusal(status, sentence, client)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start and end with the server; refuse websockets."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        if scope["type"] != "lifespan":
            return
        await receive()
        try:
            await self.start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.drain()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    def _find(self, exchange: Exchange) -> tuple[Endpoint, Route]:
        """Return the endpoint of a request and its route; refuse a request that may not ask for it."""
        path = self.path_of(exchange)
        route = self.calls.get(path) if exchange.method == "POST" else None
        if path not in routes.PROBES:
            self.guard.check_host(exchange)
        if route is None:
            route = routes.find(exchange.method, path)
        if route.endpoint in CALLS and route.model in self.models:
            exchange.model = route.model
        if route.endpoint not in OPEN:
            self.guard.check_token(exchange)
        return getattr(self.endpoints, route.endpoint), route

    @staticmethod
    def path_of(exchange: Exchange) -> str:
        """Return the path below the place where the app is mounted."""
        root = exchange.scope.get("root_path", "")
        return exchange.path[len(root) :] or "/" if root and exchange.path.startswith(root) else exchange.path

    def _cancelled(self, exchange: Exchange) -> Reply | None:
        """Return the answer of a request whose task was cancelled: by its client's leaving, by its time, or by others."""
        if not (exchange.gone or exchange.late):
            raise asyncio.CancelledError
        exchange.task.uncancel()
        return self.ended(exchange)

    def ended(self, exchange: Exchange) -> Reply | None:
        """Return the answer of a request that was ended: its client has left, or its time has passed."""
        if exchange.gone:
            return None
        if self.is_draining:
            return self.failed(exchange, HttpError(503, "the server is shutting down", [(b"connection", b"close")]))
        if exchange.reading:
            sentence = f"the body did not come within {self.limits.body_time:g} s"
            return json_reply({"error": sentence}, 408, [(b"connection", b"close")])
        return json_reply({"error": f"the model did not answer within {self.limits.deadline:g} s"}, 504)

    def failed(self, exchange: Exchange, error: BaseException) -> Reply:
        """Return the answer of a request that failed."""
        if isinstance(error, CancelledError) and self._answers(exchange):  # the function ended its thread
            error = FailedPreconditionError(str(error))
        if not isinstance(error, (HttpError, OpError)):
            if exchange.model is None:
                log.error("%s %s failed", exchange.method, exchange.path, exc_info=error)
            else:
                self.models[exchange.model].log_failure(error)
        elif isinstance(error, FailedPreconditionError):
            log.error("%s %s: %s", exchange.method, exchange.path, error)
        headers = errors.headers(error)
        if exchange.reading and not any(name == b"connection" for name, _ in headers):
            headers.append((b"connection", b"close"))  # what is left of the body is not read
        return json_reply({"error": errors.sentence(error)}, errors.status(error), headers)

    def _answers(self, exchange: Exchange) -> bool:
        """Return whether the version that a request called still answers calls: it was not closed."""
        version = None if exchange.model is None else self.models[exchange.model].version
        return version is not None and version.number == exchange.version and not self.is_draining

    async def _send_stream(self, exchange: Exchange, send: Send, reply: Reply) -> None:
        """Send the parts of a stream until it ends or its client leaves."""
        exchange.task, exchange.waiting = asyncio.current_task(), True
        self.begin(exchange)
        exchange.watcher = asyncio.ensure_future(exchange.watch())
        stream = reply.stream
        try:
            await send({"type": "http.response.start", "status": reply.status, "headers": list(reply.headers)})
            async for part in stream:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            if not (exchange.gone or exchange.late):
                raise
            exchange.task.uncancel()
        finally:
            exchange.waiting = False
            self._open.discard(exchange)
            exchange.watcher.cancel()
            await stream.aclose()

    # --- what takes too long ---

    def _sweep_later(self) -> None:
        self._is_sweeping = True
        asyncio.get_running_loop().call_later(SWEEP, self._sweep)

    def _sweep(self) -> None:
        """End bodies and calls that take too long, and watch the clients of those that wait."""
        now = perf_counter()
        self.access.flush()
        self.watch.rest()
        for exchange in list(self._open):
            age = now - exchange.since
            limit = self.limits.body_time if exchange.reading else self.limits.deadline
            if LEAVE in exchange.scope and exchange.waiting:
                exchange.leave()
            if (exchange.reading or exchange.waiting) and age > limit:
                exchange.give_up()
            elif exchange.waiting and exchange.watcher is None and exchange.receive is not None and age > SWEEP:
                exchange.watcher = asyncio.ensure_future(exchange.watch())
        if self._open:
            self._sweep_later()
        else:
            self._is_sweeping = False


def app(
    *models: Any,
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Sequence[str] = (),
    access_log: str = "errors",
) -> App:
    """Return an ASGI application that serves models: those of `weft.serve.model`, batchers, or functions.

    - `limits`: a `weft.serve.Limits`.
    - `token`: the bearer token that requests need, but for probes and the page's own files.
    - `hosts`: names under which the server is reached, as in the Host header, beside localhost. Without a token it answers to no
      others, if it knows the address of its socket; with a token they are the only ones for endpoints that change something.
    - `access_log`: "all", "errors" (the default: statuses from 500 on, 401, 403 and 404) or "none"; lines of JSON on the standard
      error stream.

    Run it with any ASGI server, or mount it: `service.mount("/models", served)` with `lifespan=served.lifespan`.
    """
    return App(models, limits=limits, token=token, hosts=hosts, access_log=access_log)
