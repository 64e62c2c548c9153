"""A result that its replica keeps, as its caller sees it: sends the gradient, or says that none will come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import FailedPreconditionError
from . import values
from .client import Client, Remote
from .frames import BackwardMessage, Kind
from .link import Link
from .requests import BaseLink, Pending, decode_done

#: How much longer than `gradient_deadline` a caller waits for its replica.
GRACE_SECONDS = 30.0


class Invocation:
    """A result that its replica keeps. The replica drops it when this object dies without a backward."""

    def __init__(self, client: Client, remote: Remote, link: BaseLink, number: int, version: int) -> None:
        self.client, self.remote, self.link, self.number, self.version = client, remote, link, number, version
        self.is_handed_in = False
        self.until = 0.0

    def send_tree(self, gradient: Any) -> Pending:
        """Send the gradient of a result that has a pull-back."""
        arrays: list[Any] = []
        tree = values.pack_tree(gradient, arrays)
        return self.send(arrays, tree=tree)

    def send(self, gradients: Sequence[Any], then: Any = None, tree: Any = None) -> Pending:
        if self.is_handed_in:
            raise FailedPreconditionError(
                "this call's gradient was handed in already: a batch goes back once, without retain_graph"
            )
        specs, buffers = values.pack_arrays(gradients)
        if then is not None and not isinstance(self.link, Link):
            # An event loop sends them later, and the caller may change its arrays before: only copies are sent.
            buffers = [each if each.readonly else memoryview(bytes(each)) for each in buffers]
        self.is_handed_in = True
        self.until = time.monotonic() + self.client.description.gradient_deadline + GRACE_SECONDS
        message = BackwardMessage(self.number, self.version, specs, tree)
        return self.link.request(Kind.BACKWARD, message, buffers, then)

    def answer(self, pending: Pending) -> list[Any]:
        """Return the gradients of the call's inputs from the answer to `send`."""
        return self._unpack(pending)[1]

    def tree_answer(self, pending: Pending) -> Any:
        """Return what the pull-back returned from the answer to `send_tree`."""
        return values.unpack_tree(*self._unpack(pending))

    def _unpack(self, pending: Pending) -> tuple[Any, list[Any]]:
        frame = pending.answer()
        message = decode_done(frame.message)
        self.client.report(self.remote, message.load)
        return message.value, values.unpack_arrays(message.arrays, frame.arrays)

    def wait(self, pending: Pending) -> None:
        """Wait for the answer to `send` or `send_tree`."""
        link = self.link
        assert isinstance(link, Link)
        link.wait(pending, self.until)
        link.settle()

    def __del__(self) -> None:
        if not self.is_handed_in:
            with suppress(Exception):  # at the end of the interpreter
                self.link.drop(self.number)
