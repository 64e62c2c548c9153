"""A connection of `weft serve`: uvicorn's, with one request at a time, time-outs, and limits of what it holds."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .framing import Backlog, Flow, Framing
from .http import LEAVE
from .limits import Limits
from .quick import QuickCalls, renew

#: What a poll of a connection says when the other side has closed it; 0 where no poll says so.
_LEFT: int = getattr(select, "POLLRDHUP", 0)


class Protocol(HttpToolsProtocol):
    """A connection. It parses one request at a time, and notes since when it waits for the rest of its headers.

    A request begins when all is parsed that came of it: a call that came whole needs no task. What follows it waits as bytes in
    `pipeline`, and nothing more is read, until it has its answer and the client has taken the earlier ones.
    """

    header_bytes = 64 << 10
    dropped = 64 << 20  # bytes that may come after a refusal
    calls: QuickCalls | None = None
    backlog: Backlog
    told: Callable[[int, str, Any], object]  # of each refusal
    cycle: Any
    scope: Any
    headers: Any

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = Flow(transport, self._is_full)
        self.head_since: float | None = time.monotonic()  # None while no headers are expected
        self.head_size = 0  # bytes of headers, or of trailers, since something else came
        self.idle_since: float | None = None  # since the last answer, until the next request begins
        self._framing = Framing()
        self._unsent, self._unsent_since = 0, 0.0  # bytes of answers that the client has not taken, and since when
        self._is_in_message = False  # True from the end of a head to the end of its body
        self._has_moved = False  # True if a head or a request ended, or a part of a body came, in what was parsed last
        self._is_parsing = False
        self._has_left = False  # True if the client sends nothing more
        self._refusal: tuple[int, str] | None = None  # the answer after the one that is due
        self._again: tuple[bytes, int] | None = None  # headers to parse again, and where their body begins in the data
        self._held: Any = None  # the request that begins when all is parsed
        self._running: Any = None  # the request that is being answered, or was last
        self._call: Any = None  # its quick call, if it is one
        self._to_drop: int | None = None  # bytes that may still come after the last answer, None before it

    # --- what comes ---

    def data_received(self, data: bytes) -> None:
        """Parse what came, or keep it until the requests before it have their answers."""
        if self._to_drop is not None:
            self._to_drop -= len(data)
            if self._to_drop < 0:
                self.transport.close()
        elif self.pipeline:
            self._keep(memoryview(data))
        elif not (self._is_between_requests() and self._repeats(data)):
            self._parse(memoryview(data), is_new=True)

    def eof_received(self) -> bool:
        """Note that the client sends nothing more; return whether an answer is due. With TLS no answer can follow."""
        if self.scheme == "https" or not (self._owes_answer() or self.pipeline):
            return False
        self._note_left()
        return True

    def _note_left(self) -> None:
        """Have a call that waits leave: a client that has only closed its side looks like one that has left."""
        self._has_left = True
        if self._running is not None:
            self._running.scope[LEAVE] = self.transport.close

    def _parse(self, data: memoryview, is_new: bool = False) -> None:
        """Parse up to the end of the next request; keep what follows. `is_new` if `data` is no part of what was kept."""
        is_between = is_new and self._is_between_requests()
        rest = data
        self._is_parsing, was_changed = True, False
        while rest and not self._is_busy():
            size = self._framing.part(rest, self._is_in_message)
            if not self._is_in_message and self.head_size + size > self.header_bytes:
                self.refuse(431, "the headers are too large")
                break
            was_changed |= self._feed(rest[:size])
            rest = rest[size:]
        self._is_parsing = False
        if rest and is_new:
            self._keep(memoryview(bytes(rest)))
        elif rest:
            self.pipeline.appendleft(rest)
        elif not is_new:
            self.backlog.held -= len(data.obj)  # type: ignore[arg-type]
        if self._held is not None:
            held, self._held = self._held, None
            if not self.transport.is_closing():
                self._start_asgi_task(*held)
                if is_between and not rest and not was_changed:
                    self._learn(bytes(data), held[0])
        if self._is_full():
            self.flow.pause_reading()

    def _feed(self, data: memoryview) -> bool:
        """Parse a part of a request; return whether its head was changed for that."""
        self._has_moved = was_changed = False
        super().data_received(data)
        while self._again is not None:
            (head, at), self._again = self._again, None
            was_changed = True
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            data = memoryview(head + data[at:])
            super().data_received(data)
        if self._has_moved:
            self.head_size = 0
        else:
            self.head_size += len(data)
            if self.head_size > self.header_bytes and not self.transport.is_closing():
                self.refuse(431, "the headers are too large")
        return was_changed

    def _is_busy(self) -> bool:
        """Return whether what came must wait: a request has no answer yet, or the client takes none."""
        if self._refusal is not None or self.flow.write_paused or self.transport.is_closing():
            return True
        return self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)

    def _is_full(self) -> bool:
        """Return whether nothing more is read: requests wait, or a part of a body that is not taken."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.more_body:
            return bool(self.pipeline)
        return bool(cycle.body)

    def _keep(self, data: memoryview) -> None:
        """Keep what came until the requests before it have their answers; read nothing more."""
        if self._refusal is not None:
            return
        self.pipeline.append(data)
        self.flow.pause_reading()
        self.backlog.held += len(data)
        if self.backlog.held > self.backlog.most:
            self._forget()
            self.refuse(503, "too many requests wait in their connections: read the answers before you send more")

    def _forget(self) -> None:
        """Drop what was kept."""
        while self.pipeline:
            self.backlog.held -= len(self.pipeline.pop().obj)

    def _go_on(self) -> None:
        """Parse what was kept, up to the end of the next request; read on if nothing is left."""
        while self.pipeline and not self._is_busy():
            self._parse(self.pipeline.popleft())
        self.flow.resume_reading()
        if self._has_left and not (self.pipeline or self._owes_answer()):
            self.transport.close()

    # --- calls ---

    def _is_between_requests(self) -> bool:
        """Return whether the last request has come whole and has its answer, and nothing of the next one has come."""
        return self.head_since is None and self.idle_since is not None and not self.cycle.more_body

    def _learn(self, data: bytes, cycle: Any) -> None:
        """Keep the head of a call that is all that came last."""
        is_all = self.cycle is cycle and self.head_since is None and not cycle.more_body
        if is_all and self.calls is not None and self._call is not None:
            self.calls.heads.learn(data, cycle)

    def _repeats(self, data: bytes) -> bool:
        """Begin the request in `data` without the parser if its head is known; return False if it is not.

        The request before it must have been a quick call, too: nobody uses its cycle any more.
        """
        if self.calls is None or self._call is None or self._is_busy():
            return False
        found = self.calls.heads.find(data)
        if found is None:
            return False
        scope, body = found
        scope["server"], scope["client"], scope["state"] = self.server, self.client, self.app_state.copy()
        self.scope, self.idle_since = scope, None
        renew(self.cycle, scope, body)
        self._start_asgi_task(self.cycle, self.app)
        return True

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if self._is_parsing:
            self._held = cycle, app
            return
        self._running = cycle
        if self._has_left:
            self._note_left()
        self._call = None if self.calls is None else self.calls.add(cycle)
        if self._call is None:
            super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for it without a timer: `look` is called twice a second."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if not self._running.keep_alive:
            self._end()
        elif self._refusal is not None:
            self.refuse(*self._refusal)
        else:
            self.idle_since = time.monotonic()
            self._go_on()

    def _end(self) -> None:
        """Close the connection after its last answer; if the client still sends a body, after that, or it would see a reset."""
        self._forget()
        self.flow.resume_reading()
        if self._running.more_body and not self._has_left and self.transport.can_write_eof():
            self.transport.write_eof()
            self._to_drop, self.idle_since = self.dropped, time.monotonic()
        else:
            self.transport.close()

    def resume_writing(self) -> None:
        """Go on: the client has taken its answers."""
        super().resume_writing()
        if self._to_drop is None and not self.transport.is_closing():
            self._go_on()

    def pause_writing(self) -> None:
        """Read nothing more: the client does not take its answers."""
        super().pause_writing()
        self.flow.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:  # uvicorn tells the last request of a pipeline alone
            running.disconnected = True
            running.message_event.set()
        if self._call is not None:
            self._call.leave()
        self._forget()
        self.flow.is_full = bool
        # What refers to the connection lets it go now: nobody waits for the garbage collector.
        for cycle in (self.cycle, running):
            if cycle is not None:
                cycle.on_response = _nothing
                cycle.scope.pop(LEAVE, None)
        self.cycle = self._running = self._held = self._call = self.scope = None

    # --- the parser's callbacks ---

    def _should_upgrade(self) -> bool:
        return True  # so that `handle_websocket_upgrade` is called for every other protocol

    def handle_websocket_upgrade(self) -> None:
        """Go on in HTTP/1.1 with a request that asks for another protocol: Java's client asks for HTTP/2 so.

        The parser takes what follows the headers for the other protocol. It is parsed again without the header Upgrade.
        """
        error, scope = sys.exception(), self.scope
        if self.transport.is_closing():
            return
        if scope["method"] == "CONNECT" or error is None:
            self.send_400_response("")
            return
        lines = [f"{scope['method']} ".encode() + self.url + f" HTTP/{scope['http_version']}".encode()]
        lines += [b"%b: %b" % pair for pair in scope["headers"] if pair[0] != b"upgrade"]
        self._again = b"\r\n".join([*lines, b"", b""]), error.args[0]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.head_since, self.idle_since = time.monotonic(), None

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        self._framing.left = max(0, self._framing.left - len(body))
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_moved, self._is_in_message, self._framing.left = True, False, 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        self.head_since, self.idle_since, self._has_moved, self._is_in_message = None, None, True, True
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                self._framing.left = int(value)  # the parser has checked it
        needs_host = (
            self.parser.get_http_version() == "1.1" and self.parser.get_method() != b"CONNECT"
        )  # which is refused below
        if hosts > 1 or (needs_host and not hosts):
            self.refuse(400, f"a request of HTTP/1.1 must have one Host header, got {hosts}")
            return
        before = self.cycle
        super().on_headers_complete()
        self.headers = list[Any]()  # for trailers, which nobody reads: they are no headers of the request
        if self.cycle is not before and not self.parser.should_keep_alive():
            self.cycle.keep_alive = False  # uvicorn before 0.53 leaves it to its own `send`

    # --- refusals ---

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "the request is not valid HTTP/1.1")

    def refuse(self, status: int, sentence: str) -> None:
        """Answer outside of any request, and close the connection; if another answer is due first, after it."""
        if self._owes_answer():
            self._refusal = status, sentence
            return
        body = b'{"error":"%s"}' % sentence.encode()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
        self.told(status, sentence, self.client)

    def _owes_answer(self) -> bool:
        """Return whether a request that came whole has no answer yet, or a part of it."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return cycle.response_started or not cycle.more_body

    # --- what takes too long ---

    def look(self, now: float, limits: Limits) -> int:
        """End the connection if its headers do not come, it is idle, or its client has left or takes no answers.

        Return how many bytes of answers the client has not taken since the last look.
        """
        unsent = self.transport.get_write_buffer_size()
        is_stuck = unsent == self._unsent
        if not is_stuck:
            self._unsent, self._unsent_since = unsent, now
        if self.flow.read_paused and not self._has_left and self._is_closed_there():
            if self._owes_answer():
                self._note_left()
            else:
                self.transport.abort()
        if unsent and now - self._unsent_since > limits.keep_alive:
            self.transport.abort()
        elif self.head_since is not None and now - self.head_since > limits.header_time:
            if not self._owes_answer():
                self.refuse(408, "the headers did not come in time")
        elif self.idle_since is not None and now - self.idle_since > limits.keep_alive:
            self.transport.close()
        return unsent if is_stuck else 0

    def _is_closed_there(self) -> bool:
        """Return whether the client has closed the connection: while reading is paused, nobody else notices."""
        if not _LEFT:
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), _LEFT)
        return bool(poll.poll(0))


def _nothing() -> None:
    """Do nothing: the connection is lost."""
