"""The keeper: knows the replicas, makes steps, and holds the weights and the optimizer's state of the last step.

A step has two halves. In the first every replica waits for batches that hold a gradient, stops, and sends its gradients, which it
keeps. If one of them fails, all are told to go on as before. Else the keeper applies the sum to its own weights; from then on
the step counts, and in the second half every replica takes the new weights. A replica that does not is killed: it is started
again with them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from .connect import Peer
from .frames import Frame, Load
from .handshake import Secret
from .link import Link
from .requests import BaseLink, decode_done
from .server import Connection, Server, find_method
from .values import unpack_arrays

log = logging.getLogger("weft.ray")

#: So much longer than `gradient_deadline` the keeper waits for one half of a step.
STEP_EXTRA = 90.0


class Member:
    """A replica as the keeper sees it."""

    def __init__(self, index: int, pid: int, peer: Peer, link: Link) -> None:
        self.index, self.pid, self.peer, self.link = index, pid, peer, link
        self.held_rows = self.held_version = 0  # rows whose gradients it holds, and the version of its weights then


class Keeper:
    """Answers the frames of the keeper's server."""

    def __init__(
        self,
        secret: Secret,
        name: str,
        optimizer: Callable[..., Any] | None,
        checkpoint: str | None,
        gradient_deadline: float,
        kill: Callable[[int], None] = lambda index: None,  # kills a replica that does not answer
    ) -> None:
        self._secret, self._name, self._optimizer, self._kill = secret, name, optimizer, kill
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._seconds = gradient_deadline + STEP_EXTRA  # for one half of a step
        self.version = 0
        self.weights: Any = None
        self.members: dict[int, Member] = {}
        self.lost_rows = 0  # whose gradients were lost with their replica since the last step
        self.deaths = 0
        self._updates: dict[str, Any] = {}  # options that were changed
        self._is_begun = False
        self._closed = False
        self._lock = threading.Lock()  # one step, one change of members at a time
        # Requests that need the lock wait here, without a thread for each.
        self._in_turn = ThreadPoolExecutor(1, "weft ray keeper")
        self.on_end: Callable[[], None] = lambda: None
        self.server: Server

    def serve(self, host: str) -> Server:
        """Start to answer."""
        self.server = Server(self, self._secret, host)
        return self.server

    # --- members ---

    def add(self, index: int, addresses: list[Any], pid: int, id: str) -> None:
        """Take a replica in: it gets the weights of the last step; the very first gives its own."""
        peer = Peer(f"replica {index} of {self._name}", id, addresses, self._secret)
        with self._lock:
            link = Link(peer, self._on_notice)
            try:
                self._give_weights(link)
            except BaseException:
                link.close()
                raise
            old = self.members.get(index)
            if old is not None:
                self._remove(old)
            member = self.members[index] = Member(index, pid, peer, link)
        threading.Thread(target=self._watch, args=(member,), name="weft ray keeper", daemon=True).start()

    def _give_weights(self, link: Link) -> None:
        if not self._is_begun:
            self._begin(link)
        state = [] if self.weights is None else self.weights.state()
        link.wait(link.ask("start", self.version, state), time.monotonic() + self._seconds)
        if self._updates:
            link.wait(link.ask("update", self._updates), time.monotonic() + self._seconds)
        link.wait(link.ask("listen"), time.monotonic() + self._seconds)

    def _begin(self, link: Link) -> None:
        """Take the first replica's weights, or the checkpoint's if there is one."""
        description, state = _value(link, link.ask("state"), self._seconds)
        if description is not None:
            from .weights import KeptWeights

            self.weights = KeptWeights(description, state, self._optimizer)
            if self._checkpoint is not None and self._checkpoint.exists():
                self.version = self.weights.restore(self._checkpoint)
        elif self._optimizer is not None:
            raise FailedPreconditionError(
                "an optimizer needs a model with parameters: make must return a torch.nn.Module"
            )
        self._is_begun = True

    def _on_notice(self, link: BaseLink, news: Any) -> None:
        if news[0] == "held":
            for member in list(self.members.values()):
                if member.link is link:
                    member.held_rows, member.held_version = news[1:]

    def _watch(self, member: Member) -> None:
        """Read a replica's notices until it is gone."""
        link = member.link
        while link.broken is None:
            link.listen(1.0)
        with self._lock:
            if self.members.get(member.index) is member:
                self._remove(member)

    def _remove(self, member: Member) -> None:
        """Forget a replica that is gone, with the gradients it held."""
        member.link.finish()  # its last notice says what it held
        self.members.pop(member.index, None)
        if not self._closed:
            self.deaths += 1
            self.lost_rows += member.held_rows
            log.warning("replica %d of %s (pid %d) is gone", member.index, self._name, member.pid)
            if member.link.is_given_up:  # it hangs: Ray would not notice, and start no other
                self._kill(member.index)

    def _in_order(self) -> list[Member]:
        return sorted(list(self.members.values()), key=lambda member: member.index)  # noqa: C414  threads change the dict

    # --- requests ---

    def load(self) -> Load:
        return Load(self.version)

    def handle(self, connection: Connection, frame: Frame) -> None:
        connection.send_error(frame.number, FailedPreconditionError("the keeper answers no calls: call a replica"))

    def closed(self, connection: Connection) -> None:
        """Do nothing: a client's requests end by themselves."""

    async def ask(self, connection: Connection, method: str, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        found = find_method(self, method)
        if method == "where":
            return self.ask_where(given, arrays)
        # A request goes on if its client leaves meanwhile: a step that has begun is made or taken back.
        thread = None if method in ("statistics", "end") else self._in_turn
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(thread, found, given, arrays))

    def ask_where(self, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Return the options that were changed, and what a client needs to connect to each replica."""
        members = list(self.members.values())
        return [self._updates, [[each.index, each.peer.id, each.pid, each.peer.addresses] for each in members]], []

    def ask_statistics(self, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Return the figures of each replica, in order."""
        return self._answers(self._in_order(), "statistics", given), []

    def ask_update(self, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Change options of all replicas' batchers; one that refuses them changes nothing anywhere."""
        with self._lock:
            members = self._in_order()
            self._answers(members, "check_update", given)
            self._updates |= given  # for replicas that are started again, too
            if "gradient_deadline" in given:
                self._seconds = given["gradient_deadline"] + STEP_EXTRA
            self._answers(members, "update", given)
            return None, []

    def ask_step(self, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Make a step; see `RemoteBatcher.step`."""
        wanted, allow_lost = given
        with self._lock:
            if wanted is not None and wanted <= self.version:
                return self.version, []
            if wanted is not None and wanted != self.version + 1:
                raise FailedPreconditionError(
                    f"the next step makes version {self.version + 1}, and version {wanted} was asked for"
                )
            self._check_step(allow_lost)
            return self._change(lambda sent: self._step(sent, allow_lost)), []

    def _check_step(self, allow_lost: bool) -> None:
        for member in list(self.members.values()):
            member.link.poll_once()
            if member.link.broken is not None:
                self._remove(member)
        if self.weights is None or self.weights.optimizer is None:
            raise FailedPreconditionError(
                f"step() needs a torch.nn.Module and an optimizer: deploy {self._name} with optimizer="
            )
        self._check_lost(len(self.members), allow_lost)

    def _check_lost(self, alive: int, allow_lost: bool) -> None:
        """Refuse a step if no replica is alive, or if gradients are lost and that is not allowed."""
        if not alive:
            raise UnavailableError(f"no replica of {self._name} is alive now: the step was not made")
        if self.lost_rows and not allow_lost:
            raise UnavailableError(
                f"the gradients of {self.lost_rows} rows are lost with a replica of {self._name} that died; nothing has changed. "
                "step(allow_lost=True) goes on without them"
            )

    def _change(self, change: Callable[[list[Any]], None]) -> int:
        """Change the weights by `change`, which gets what the replicas sent, on all replicas or on none."""
        prepared, missing = self._prepare(self._in_order())
        try:
            for member in missing:
                self._remove(member)
            with self.weights.all_or_nothing():
                change(list(prepared.values()))
                if self._checkpoint is not None:  # if it cannot be written, nothing is changed
                    self.weights.save(self._checkpoint, self.version + 1)
        except BaseException:
            self._take_back(list(prepared))
            raise
        return self._commit(prepared)

    def _step(self, sent: list[Any], allow_lost: bool) -> None:
        self._check_lost(len(sent), allow_lost)
        gradients = [arrays[: value[2]] for value, arrays in sent]
        buffers = [arrays[value[2] :] for value, arrays in sent]
        self.weights.step(gradients, buffers, [value[0] for value, _ in sent])

    def _prepare(self, members: list[Member]) -> tuple[dict[Member, Any], list[Member]]:
        """Run the first half of a step; return what the replicas sent, and the replicas that are gone."""
        prepared, failed = self._ask_all(members, "prepare", self._seconds, seconds=self._seconds)
        missing = [member for member in failed if member.link.broken is not None]
        for member, error in failed.items():
            if member not in missing:
                self._take_back(members)
                raise error
        return prepared, missing

    def _commit(self, prepared: dict[Member, Any]) -> int:
        """Run the second half of a step: the keeper's weights count from here on."""
        self.version += 1
        self.lost_rows = 0
        _, failed = self._ask_all(list(prepared), "commit", self.version, self.weights.state(), seconds=60.0)
        for member, error in failed.items():
            log.warning(
                "replica %d of %s did not take the weights of version %d: %s: %s",
                member.index, self._name, self.version, type(error).__name__, error,
            )  # fmt: skip
            is_alive = member.link.broken is None
            member.link.finish()
            if member.held_version < self.version:  # else it died after it took the weights
                member.held_rows -= prepared[member][0][1]  # the step has these
            self._remove(member)
            if is_alive:
                self._kill(member.index)
        return self.version

    def _take_back(self, members: list[Member]) -> None:
        self._ask_all(members, "take_back", seconds=10.0)

    def _answers(self, members: list[Member], method: str, given: Any) -> list[Any]:
        """Return the answers of the replicas that are still there."""
        found, failed = self._ask_all(members, method, given, seconds=30.0)
        for member, error in failed.items():
            if member.link.broken is None or not isinstance(error, UnavailableError):
                raise error
        return [value for value, _ in found.values()]

    @staticmethod
    def _ask_all(
        members: list[Member], method: str, given: Any = None, arrays: Any = (), *, seconds: float
    ) -> tuple[dict[Member, Any], dict[Member, Exception]]:
        """Ask replicas, and wait for all of them; return the answers, and the errors of those without one."""
        asked, answers, failed = dict[Member, Any](), dict[Member, Any](), dict[Member, Exception]()
        for member in members:
            try:
                asked[member] = member.link.ask(method, given, arrays)
            except UnavailableError as error:
                failed[member] = error
        until = time.monotonic() + seconds
        for member, pending in asked.items():
            try:
                answers[member] = _value(member.link, pending, until - time.monotonic())
            except Exception as error:
                failed[member] = error
        return answers, failed

    def ask_state_dict(self, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Return the weights of the last step by the keys of the module's state dict."""
        with self._lock:
            self._check_weights()
            state = self.weights.state_dict()
            return list(state), list(state.values())

    def ask_load_state_dict(self, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Give all replicas new weights; gradients that they hold are dropped. Return the new version."""
        with self._lock:
            self._check_weights()
            return self._change(lambda _: self.weights.load(dict(zip(given, arrays, strict=True)))), []

    def _check_weights(self) -> None:
        if self.weights is None:
            raise FailedPreconditionError(f"{self._name} has no weights: its model is no torch.nn.Module")

    def ask_close(self, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """Have the replicas answer what waits, and refuse everything from now on."""
        drain, seconds = given
        with self._lock:
            self._closed = True
            members = list(self.members.values())
            _, failed = self._ask_all(members, "close", [drain, seconds, self._name], seconds=seconds)
            for error in failed.values():
                if isinstance(error, DeadlineExceededError):
                    raise error
        return None, []

    def ask_end(self, given: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
        """End the replicas and, soon after, the keeper."""
        self._closed = True
        self.server.hide()
        self.on_end()
        return None, []


def _value(link: Link, pending: Any, seconds: float) -> tuple[Any, list[Any]]:
    """Wait for the answer to an ASK; return its value and arrays."""
    frame = link.wait(pending, time.monotonic() + seconds)
    message = decode_done(frame.message)
    return message.value, unpack_arrays(message.arrays, frame.arrays)
