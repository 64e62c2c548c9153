"""Where the pieces of a batch meet their callers (Unbatch), and the callers' gradients their batch (UnbatchGrad).

Both are tables by id, with a deadline on every entry. What is past its deadline is never served; `sweep` drops it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import inf
from typing import Any

from .._arrays import Array
from ..errors import AlreadyExistsError, DeadlineExceededError, InvalidArgumentError
from .pending import Pending, Sweeping, wake_all

Row = tuple[int, int, int]  # id, start, length


class Swept(Pending):
    """A pending call whose alarm is its deadline. In an event loop one timer sweeps for all of them."""

    @property
    def deadline(self) -> float:
        """When the call ends without an answer."""
        return self.alarm

    def wait_until(self, deadline: float) -> None:
        """Set the deadline."""
        self.alarm = deadline
        assert self.sweeper is not None
        self.sweeper.expires(deadline)


class Fetch(Swept):
    """A call of Unbatch that waits for the piece called `id`."""

    def __init__(self, scope: Sweeping, meeting: Pieces, id: int, dtype: Any) -> None:
        self._begin(scope.clock, scope)
        self.meeting = meeting
        self.id = id
        self.dtype = dtype

    def ring(self) -> None:
        self.meeting.expire(self)

    def abandon(self) -> None:
        self.meeting.leave(self)


class Pieces:
    """Unbatch's table: pieces that wait for their caller, and callers that wait for their piece."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._mutex = threading.Lock()
        self._pieces: dict[int, tuple[float, Array]] = {}
        self._waiting: dict[int, Fetch] = {}

    def fetch(self, scope: Sweeping, id: int, dtype: Any, now: float) -> Array | Fetch:
        """The piece called `id`, or a pending call for it."""
        with self._mutex:
            entry = self._pieces.get(id)
            if entry is not None and now <= entry[0]:
                piece = entry[1]
                if piece.dtype != dtype:
                    raise _wrong_type(dtype, piece)
                del self._pieces[id]
                return piece
            if id in self._waiting:
                raise AlreadyExistsError(f"another call is already waiting for id {id}")
            fetch = self._waiting[id] = Fetch(scope, self, id, dtype)
            fetch.wait_until(now + self.timeout)
            return fetch

    def deliver(
        self, scope: Sweeping, id: int, dtype: Any, ids: Sequence[int], pieces: Sequence[Array], now: float
    ) -> Array | Fetch:
        """The piece called `id`, or a pending call for it, with all `pieces` handed to the calls named `ids`; or nothing done."""
        if len(ids) == 1 and ids[0] == id and not (self._pieces or self._waiting):
            return pieces[0]  # nobody else is concerned
        with self._mutex:
            own = self._live(id, now)
            if own is None and id in self._waiting:
                raise AlreadyExistsError(f"another call is already waiting for id {id}")
            if own is not None and own.dtype != dtype:
                raise _wrong_type(dtype, own)
            own, answers, stored = self._plan(id, own, ids, pieces, now)
            self._pieces.pop(id, None)
            deadline = now + self.timeout
            for other, piece in stored.items():
                self._pieces[other] = (deadline, piece)
            for waiter, _ in answers:
                del self._waiting[waiter.id]
            if stored:
                scope.expires(deadline)
            fetch = None
            if own is None:
                fetch = self._waiting[id] = Fetch(scope, self, id, dtype)
                fetch.wait_until(deadline)
        self._answer(answers)
        return own if fetch is None else fetch

    @staticmethod
    def _answer(answers: Sequence[tuple[Fetch, Array]]) -> None:
        woken: list[Pending] = []
        for waiter, piece in answers:
            if piece.dtype == waiter.dtype:
                waiter.value = piece
            else:
                waiter.error = _wrong_type(waiter.dtype, piece)
            waiter.done = True
            woken.append(waiter)
        wake_all(woken)

    def _plan(
        self, own_id: int, own: Array | None, ids: Sequence[int], pieces: Sequence[Array], now: float
    ) -> tuple[Array | None, list[tuple[Fetch, Array]], dict[int, Array]]:
        """The caller's own piece, who gets what at once, and what is stored: nothing changes before the whole index is known."""
        answers: dict[int, tuple[Fetch, Array]] = {}
        stored: dict[int, Array] = {}
        waiting = self._waiting
        for id, piece in zip(ids, pieces, strict=True):
            if id == own_id and own is None:
                own = piece
            elif id in waiting and id not in answers:
                answers[id] = (waiting[id], piece)
            elif id in stored or (id != own_id and self._live(id, now) is not None):
                raise AlreadyExistsError(f"id {id} already has a piece waiting")
            else:
                stored[id] = piece
        return own, list(answers.values()), stored

    def _live(self, id: int, now: float) -> Array | None:
        entry = self._pieces.get(id)
        return entry[1] if entry is not None and now <= entry[0] else None

    def expire(self, fetch: Fetch) -> None:
        """Tell a caller that its time is over."""
        with self._mutex:
            if self._waiting.get(fetch.id) is not fetch:
                return  # answered meanwhile
            del self._waiting[fetch.id]
        fetch.finish(error=DeadlineExceededError(f"no batch delivered id {fetch.id} within {self.timeout:g} s"))

    def leave(self, fetch: Fetch) -> None:
        """Forget a caller that has gone."""
        with self._mutex:
            if self._waiting.get(fetch.id) is fetch:
                del self._waiting[fetch.id]

    def sweep(self, now: float) -> float:
        """Drop what is past its deadline; when the next entry will be."""
        with self._mutex:
            for id in [id for id, (deadline, _) in self._pieces.items() if deadline < now]:
                del self._pieces[id]
            late = [fetch for fetch in self._waiting.values() if fetch.deadline <= now]
            next_piece = min((deadline for deadline, _ in self._pieces.values()), default=inf)
            next_fetch = min((f.deadline for f in self._waiting.values() if f.deadline > now), default=inf)
        for fetch in late:
            self.expire(fetch)
        return min(next_piece, next_fetch)

    def stored(self) -> int:
        """How many pieces and callers are in the table."""
        return len(self._pieces) + len(self._waiting)

    def after_fork(self) -> None:
        """Forget everyone."""
        self.__init__(self.timeout)  # type: ignore[misc]


def _wrong_type(wanted: Any, piece: Array) -> InvalidArgumentError:
    return InvalidArgumentError(f"the piece must have the dtype of batched_tensor, {wanted}, got {piece.dtype}")


class Gather(Swept):
    """A call of UnbatchGrad that owns a batch: it waits for the gradients of all its rows' callers."""

    def __init__(self, scope: Sweeping, meeting: Gradients, id: int, rows: Sequence[Row], grad: Array) -> None:
        self._begin(scope.clock, scope)
        self.meeting = meeting
        self.id = id
        self.rows = rows
        self.grad = grad
        self.missing: set[int] = set()

    def ring(self) -> None:
        self.meeting.expire(self)

    def abandon(self) -> None:
        self.meeting.leave(self)


class _Sent:
    """A gradient on its way: good until its deadline, or as long as the owner that claimed it waits."""

    __slots__ = ("deadline", "grad", "owner")

    def __init__(self, deadline: float, grad: Array, owner: Gather | None) -> None:
        self.deadline = deadline
        self.grad = grad
        self.owner = owner


class Gradients:
    """UnbatchGrad's table: gradients that wait for the owner of their batch, and owners that wait for gradients."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._sent: dict[int, _Sent] = {}
        self._owners: dict[int, Gather] = {}  # by the id they are missing

    def send(self, id: int, grad: Array, now: float, deadline: float) -> None:
        """Leave a gradient for the owner of its batch."""
        with self._mutex:
            self._refuse_taken(id, now)
            self._add(id, grad, deadline)

    def _add(self, id: int, grad: Array, deadline: float) -> None:
        """Store a gradient; an owner for whom it was the last one missing is answered."""
        owner = self._owners.pop(id, None)
        self._sent[id] = _Sent(deadline, grad, owner)
        if owner is not None:
            owner.missing.discard(id)
            if not owner.missing:
                self._complete(owner)

    def gather(self, owner: Gather, now: float, deadline: float) -> None:
        """Register the owner of a batch, whose value becomes the list of its callers' gradients in order of the index."""
        ids = [id for id, _, _ in owner.rows]
        with self._mutex:
            self._refuse_taken(owner.id, now)
            missing = {id for id in ids if id != owner.id and not self._is_live(id, now)}
            if wanted := [id for id in ids if id in self._owners or (id in self._sent and self._sent[id].owner)]:
                raise InvalidArgumentError(f"the gradient of id {wanted[0]} is already awaited by another call")
            self._add(owner.id, owner.grad, deadline)
            for id in ids:
                if id not in missing:
                    self._sent[id].owner = owner
            owner.missing = missing
            owner.wait_until(deadline)
            self._owners.update(dict.fromkeys(missing, owner))
            if not missing:
                self._complete(owner)

    def _complete(self, owner: Gather) -> None:
        """Answer an owner all of whose gradients are there; if they do not fit together, it alone is told."""
        grads = [self._sent[id].grad for id, _, _ in owner.rows]
        error = _mismatch(owner, grads)
        if error is None:
            for id, _, _ in owner.rows:
                del self._sent[id]
        else:
            self._let_go(owner)
        owner.finish(grads, error)

    def _let_go(self, owner: Gather) -> None:
        """Free the id of an owner that failed; what it had claimed lives on until its own deadline."""
        self._sent.pop(owner.id, None)
        for id, _, _ in owner.rows:
            if id in self._sent and self._sent[id].owner is owner:
                self._sent[id].owner = None

    def _refuse_taken(self, id: int, now: float) -> None:
        if self._is_live(id, now):
            raise InvalidArgumentError(f"id {id} already has a gradient waiting")

    def _is_live(self, id: int, now: float) -> bool:
        sent = self._sent.get(id)
        return sent is not None and (sent.owner is not None or now <= sent.deadline)

    def expire(self, owner: Gather) -> None:
        """Tell an owner that its time is over; its id is free again."""
        missing = sorted(owner.missing)
        if self.leave(owner):
            owner.finish(
                error=DeadlineExceededError(f"the gradients of ids {missing} did not come before the deadline")
            )

    def leave(self, owner: Gather) -> bool:
        """Forget an owner that has gone; whether it was waiting."""
        with self._mutex:
            if owner.done or not owner.missing:
                return False
            for id in owner.missing:
                del self._owners[id]
            owner.missing = set()
            self._let_go(owner)
            return True

    def sweep(self, now: float) -> float:
        """Drop what is past its deadline; when the next entry will be."""
        with self._mutex:
            for id in [id for id, sent in self._sent.items() if sent.owner is None and sent.deadline < now]:
                del self._sent[id]
            owners = set(self._owners.values())
            next_sent = min((sent.deadline for sent in self._sent.values() if sent.owner is None), default=inf)
            next_owner = min((owner.deadline for owner in owners if owner.deadline > now), default=inf)
        for owner in owners:
            if owner.deadline <= now:
                self.expire(owner)
        return min(next_sent, next_owner)

    def stored(self) -> int:
        """How many gradients are in the table."""
        return len(self._sent)

    def after_fork(self) -> None:
        """Forget everyone."""
        self.__init__()  # type: ignore[misc]


def _mismatch(owner: Gather, grads: Sequence[Array]) -> InvalidArgumentError | None:
    """Why the gradients cannot be joined, if they cannot."""
    first = grads[0]
    for (id, _, length), grad in zip(owner.rows, grads, strict=True):
        if grad.dtype != first.dtype or grad.shape[1:] != first.shape[1:]:
            return InvalidArgumentError(
                "the gradients of a batch must agree in dtype and trailing dimensions, got "
                f"{first.dtype}{list(first.shape)} for id {owner.rows[0][0]} and {grad.dtype}{list(grad.shape)} for id {id}"
            )
        if grad.shape[0] != length:
            return InvalidArgumentError(
                f"the gradient of id {id} must have the {length} rows its row of batch_index says, got {grad.shape[0]}"
            )
    return None
