"""Calls of models on uvicorn's connections without a task and without the messages of ASGI.

A request that came whole is decoded in the callback that received it, and answered in the callback of its batch. Everything else,
and everything under another server, goes the way of ASGI. This file alone knows uvicorn's cycle; the rows "echo" of
`benchmarks/serve.py` need it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from ..batching.tasks import inbox_of
from ..core.interrupts import is_from_signal
from .application import App
from .endpoints import ModelCall
from .errors import Headers, sentence
from .heads import KnownHeads
from .http import Exchange, Reply
from .routes import Route

_NAMES = (
    "body", "disconnected", "flow", "keep_alive", "message_event", "more_body", "on_response", "response_complete",
    "response_started", "scope", "transport",
)  # fmt: skip


class QuickCalls:
    """The calls that came in one turn of the event loop: they begin together at its end.

    Begun one by one, the first would wake a worker that runs it alone, while the loop reads the others. With `on_loop` their batch
    runs in the same callback.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self.heads = KnownHeads()
        self._came: list[QuickCall] = []

    @property
    def loop(self) -> Any:
        """The event loop in which `run` is called."""
        return self._app.loop

    def add(self, cycle: Any) -> QuickCall | None:
        """Return the call of a request, None if it must go the way of ASGI."""
        route = takes(self._app, cycle)
        if route is None:
            return None
        call = QuickCall(self._app, cycle, route)
        if not self._came:
            inbox_of(self.loop).post_turn(self)
        self._came.append(call)
        return call

    def run(self) -> None:
        """Begin the calls that came."""
        came, self._came = self._came[::-1], []
        is_alone = len(came) == 1
        try:
            while came:
                came.pop().begin(is_alone)
        except BaseException:  # it ends the program: if the loop goes on, the others begin then
            self._came[:0] = came[::-1]
            raise

    def drop(self) -> None:
        """Do nothing: the loop is closed, and the connections with it."""


class QuickCall:
    """A call of a model that is answered by callbacks. It takes the place of the task in its exchange."""

    __slots__ = ("_app", "_cycle", "_prepared", "_route", "_waiter", "exchange")

    def __init__(self, app: App, cycle: Any, route: Route) -> None:
        self._app, self._cycle, self._route = app, cycle, route
        self._prepared: ModelCall | None = None
        self._waiter: Any = None
        self.exchange = exchange = Exchange(cycle.scope, None)
        exchange.task, exchange.model = self, route.model
        app.begin(exchange)

    def begin(self, is_alone: bool) -> None:
        """Decode the call and put it in its queue; it `is_alone` if no other came in this turn of the loop."""
        app, exchange, route = self._app, self.exchange, self._route
        if exchange.task is None:  # its client has left
            return
        try:
            app.guard.check(exchange)
            body, self._cycle.body = bytes(self._cycle.body), bytearray()  # the connection keeps its last cycle
            self._prepared = prepared = app.endpoints.prepare(exchange, route, body)
            model, version, call, args, named = prepared
            exchange.waiting = True
            model.calls += 1
            waiter = version.aio.start(app.loop, self._done, args, named, call.deadline, call.priority, is_alone)
            if exchange.task is not None:  # it waits
                self._waiter = exchange.call = waiter
        except BaseException as error:
            if exchange.task is None:  # it has its answer
                raise
            self._fail(error)
            if not isinstance(error, Exception) and is_from_signal(error):
                raise

    def _done(self, request: Any) -> None:
        """Answer with what the batch has returned."""
        assert self._prepared is not None
        try:
            reply = self._app.endpoints.reply(self._prepared, request.outcome())
        except Exception as error:
            self._fail(error)
        else:
            self._end(reply)

    def _fail(self, error: BaseException) -> None:
        self._end(self._app.failed(self.exchange, error), sentence(error))

    def leave(self) -> None:
        """Give the call up if it has no answer yet: its client has left."""
        if self.exchange.task is not None:
            self.exchange.gone = True
            self.cancel()

    def cancel(self) -> None:
        """Give the call up: its client has left, or its time has passed."""
        if self._waiter is not None:
            self._waiter.close()
        self._end(self._app.ended(self.exchange))

    def _end(self, reply: Reply | None, problem: str = "") -> None:
        """Answer, and drop all that the connection need not keep until its next request."""
        if self._prepared is not None:
            self._prepared.model.calls -= 1
        self._prepared = self._waiter = self.exchange.task = self.exchange.call = None
        reply = self._app.end(self.exchange, reply, problem)
        if reply is not None:
            write(self._cycle, reply)


def renew(cycle: Any, scope: Any, body: bytes) -> None:
    """Begin with the next request in the cycle of a call that is answered, on a connection that stays open."""
    cycle.scope, cycle.body, cycle.more_body = scope, body, False
    cycle.response_started = cycle.response_complete = False


def takes(app: App, cycle: Any) -> Route | None:
    """Return the route of a request that `QuickCall` can answer."""
    scope = cycle.scope
    route = app.calls.get(scope["path"]) if scope["method"] == "POST" else None
    if route is None or cycle.more_body or app.loop is None or len(cycle.body) > app.limits.body_bytes:
        return None
    if cycle.flow.read_paused or cycle.flow.write_paused:  # a large body, or a client that does not read its answers
        return None
    for name, _ in scope["headers"]:
        if name == b"content-encoding":
            return None
    return route


def respond(send: Any, reply: Reply, is_head: bool) -> bool:
    """Write a reply to the connection that `send` belongs to; return False if it must be sent as messages."""
    cycle: Any = getattr(send, "__self__", None)
    if type(cycle) is not RequestResponseCycle or cycle.flow.write_paused or cycle.response_started:
        return False
    write(cycle, reply, is_head)
    return True


def write(cycle: Any, reply: Reply, is_head: bool = False) -> None:
    """Write a reply in one piece."""
    if cycle.transport.is_closing():
        cycle.disconnected = True  # uvicorn does not know it of a pipelined request
    if cycle.disconnected:
        return
    if cycle.waiting_for_100_continue and cycle.more_body:
        cycle.keep_alive = False  # whether the client sends the body all the same is not known
    body, headers = reply.body, reply.headers
    if (b"connection", b"close") in headers:
        cycle.keep_alive = False
    elif not cycle.keep_alive:
        headers = (*headers, (b"connection", b"close"))
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    default = _lines(tuple(cycle.default_headers))  # the date: once a second another
    length = b"content-length: %d\r\n\r\n" % len(body)
    cycle.transport.write(
        b"".join((STATUS_LINE[reply.status], default, _lines(tuple(headers)), length, b"" if is_head else body))
    )
    cycle.message_event.set()
    cycle.on_response()  # closes the connection if it is not kept alive


@lru_cache(256)
def _lines(headers: Headers) -> bytes:
    return b"".join(b"%b: %b\r\n" % pair for pair in headers)


def is_known() -> bool:
    """Return whether the installed uvicorn has the attributes that this file uses."""
    names = RequestResponseCycle.__init__.__code__.co_names
    return all(name in names for name in _NAMES)
