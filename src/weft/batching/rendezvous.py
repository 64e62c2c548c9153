"""The tables of Unbatch, from a batch's pieces to their callers, and of UnbatchGrad, from the callers' gradients to their batch.

Both are tables by id, with a deadline for every entry. An entry past its deadline is never served; `sweep` drops it. A call from
inside the lock (see `weft.core.lock`) is refused: it would have to wait for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from ..core.arrays import Array
from ..core.lock import departed, has_lock, lock, refuse_inside_lock, remove_departed
from ..core.named import Named
from ..core.scope import Scope
from ..core.ticket import Ticket, wake_all
from ..errors import AlreadyExistsError, DeadlineExceededError, InvalidArgumentError

Row = tuple[int, int, int]  # id, start, length


class ExpiringTicket(Ticket):
    """A ticket that fails at its alarm if it was not answered. In an event loop one timer sweeps for all of them."""

    def wait_until(self, deadline: float) -> None:
        """Set the deadline."""
        self.alarm = deadline
        assert self.sweeper is not None
        self.sweeper.expires(deadline)


class Fetch(ExpiringTicket):
    """A call of Unbatch that waits for the piece called `id`."""

    def __init__(self, scope: Scope, table: PieceTable, id: int, dtype: Any, now: float) -> None:
        self._init_ticket(scope.clock, scope)
        self.table = table
        self.id = id
        self.dtype = dtype
        self.now = now  # the time of the call

    def enter(self) -> None:
        self.table.fetch(self)

    def take(self, piece: Array) -> None:
        """Take the piece that this call waits for."""
        if piece.dtype == self.dtype:
            self.resolve(piece)
        else:
            self.reject(_wrong_type(self.dtype, piece))

    def on_alarm(self) -> None:
        self.table.recheck(self)

    def forget(self) -> list[Any]:
        return self.table.forget(self)


class PieceTable(Named):
    """Unbatch's table: pieces that wait for their caller, and callers that wait for their piece."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.timeout = timeout
        self._pieces: dict[int, tuple[float, Array]] = {}
        self._waiting: dict[int, Fetch] = {}
        # The delivery under way: the pieces to store, and the piece of each waiting caller. It is completed even if the call that
        # delivers is interrupted.
        self._delivery: tuple[dict[int, tuple[float, Array]], list[tuple[Fetch, Array]]] | None = None

    def fetch(self, fetch: Fetch) -> None:
        """Give a call its piece, or make it wait."""
        refuse_inside_lock("Unbatch")
        with lock:
            fetch.table = table = self.in_use()
            table._fetch(fetch, fetch.id, fetch.now)
        if departed:
            remove_departed()

    def _fetch(self, fetch: Fetch, id: int, now: float) -> None:
        self._repair()
        self.last_used = now
        piece = self._live(id, now)
        if piece is None:
            self._check_not_awaited(id)
            fetch.wait_until(now + self.timeout)
            self._waiting[id] = fetch
        elif piece.dtype != fetch.dtype:
            raise _wrong_type(fetch.dtype, piece)
        else:
            fetch.resolve(piece)
            del self._pieces[id]

    def _check_not_awaited(self, id: int) -> None:
        other = self._waiting.get(id)
        if other is not None and not other.done:
            raise AlreadyExistsError(f"another call is already waiting for id {id}")

    def deliver(
        self, scope: Scope, id: int, dtype: Any, ids: Sequence[int], pieces: Sequence[Array], now: float
    ) -> Array | Fetch:
        """Deliver `pieces` to the calls named `ids`; return the piece called `id`, or a ticket for it. An error changes nothing."""
        if len(ids) == 1 and ids[0] == id and not (self._pieces or self._waiting):
            self.last_used = now
            return pieces[0]  # no lock, for the row "Batch+Unbatch, 1 thread" of `benchmarks/batching.py`
        refuse_inside_lock("Unbatch")
        with lock:
            table = self.in_use()
            own, answers = table._deliver(scope, id, dtype, ids, pieces, now)
        wake_all([waiter for waiter, _ in answers])
        if departed:
            remove_departed()
        return own if own is not None else Fetch(scope, table, id, dtype, now)

    def _deliver(
        self, scope: Scope, id: int, dtype: Any, ids: Sequence[int], pieces: Sequence[Array], now: float
    ) -> tuple[Array | None, list[tuple[Fetch, Array]]]:
        """Return the piece called `id`, if there is one, and the calls that were answered."""
        self._repair()
        self.last_used = now
        own = self._live(id, now)
        if own is None:
            self._check_not_awaited(id)
        elif own.dtype != dtype:
            raise _wrong_type(dtype, own)
        own, answers, stored = self._decide(id, own, ids, pieces, now)
        self._pieces.pop(id, None)
        if stored:
            scope.expires(now + self.timeout)
        self._delivery = (stored, answers)
        self._repair()
        return own, answers

    def _repair(self) -> None:
        """Complete the delivery under way; the steps that are done already can be repeated."""
        if self._delivery is None:
            return
        stored, answers = self._delivery
        self._pieces.update(stored)
        for waiter, piece in answers:
            waiter.take(piece)
            if self._waiting.get(waiter.id) is waiter:
                del self._waiting[waiter.id]
        self._delivery = None

    def _decide(
        self, own_id: int, own: Array | None, ids: Sequence[int], pieces: Sequence[Array], now: float
    ) -> tuple[Array | None, list[tuple[Fetch, Array]], dict[int, tuple[float, Array]]]:
        """Return the caller's own piece, the piece of each waiting call, and the pieces to store; change nothing."""
        answers: dict[int, tuple[Fetch, Array]] = {}
        stored: dict[int, tuple[float, Array]] = {}
        waiting = self._waiting
        for id, piece in zip(ids, pieces, strict=True):
            if id == own_id and own is None:
                own = piece
            elif id in waiting and id not in answers:
                answers[id] = (waiting[id], piece)
            elif id in stored or (id != own_id and self._live(id, now) is not None):
                raise AlreadyExistsError(f"id {id} already has a piece waiting")
            else:
                stored[id] = (now + self.timeout, piece)
        return own, list(answers.values()), stored

    def _live(self, id: int, now: float) -> Array | None:
        entry = self._pieces.get(id)
        return entry[1] if entry is not None and now <= entry[0] else None

    def recheck(self, fetch: Fetch) -> None:
        """Reject a call past its deadline, and complete an interrupted delivery of its piece."""
        with lock:
            self._repair()
            self._expire(fetch, fetch.clock.now())
        fetch.wake()
        if departed:
            remove_departed()

    def _expire(self, fetch: Fetch, now: float) -> bool:
        """Reject a call past its deadline; return whether it was."""
        if now < fetch.alarm:
            return False
        if self._waiting.get(fetch.id) is fetch:
            del self._waiting[fetch.id]
        return fetch.reject(DeadlineExceededError(f"no batch delivered id {fetch.id} within {self.timeout:g} s"))

    def forget(self, fetch: Fetch) -> list[Any]:
        """Remove a departed caller; runs under the lock."""
        fetch.end_inside()
        self._repair()
        if self._waiting.get(fetch.id) is fetch:
            del self._waiting[fetch.id]
        return []

    def sweep(self, now: float) -> float:
        """Drop the entries past their deadline; return the next deadline."""
        if has_lock():
            return now + 1.0
        with lock:
            self._repair()
            for id in [id for id, (deadline, _) in self._pieces.items() if deadline < now]:
                del self._pieces[id]
            late: list[Ticket] = [fetch for fetch in list(self._waiting.values()) if self._expire(fetch, now)]
            next_piece = min((deadline for deadline, _ in self._pieces.values()), default=inf)
            next_fetch = min((fetch.alarm for fetch in self._waiting.values()), default=inf)
        wake_all(late)
        if departed:
            remove_departed()
        return min(next_piece, next_fetch)

    def is_empty(self) -> bool:
        return not (self._pieces or self._waiting)

    def stored(self) -> int:
        """Return the number of pieces and waiting callers."""
        return len(self._pieces) + len(self._waiting)

    def after_fork(self) -> None:
        """Begin empty: the threads that waited do not exist in this process."""
        self.__init__(self.timeout)  # type: ignore[misc]


def _wrong_type(wanted: Any, piece: Array) -> InvalidArgumentError:
    return InvalidArgumentError(f"the piece must have the dtype of batched_tensor, {wanted}, got {piece.dtype}")


class Gather(ExpiringTicket):
    """A call of UnbatchGrad that owns a batch: it waits for the gradients of all its rows' callers."""

    def __init__(
        self, scope: Scope, table: GradientTable, id: int, rows: Sequence[Row], grad: Array, now: float, until: float
    ) -> None:
        self._init_ticket(scope.clock, scope)
        self.table = table
        self.id = id
        self.rows = rows
        self.grad = grad
        self.now, self.until = now, until  # the time of the call, and how long it waits
        self.missing: set[int] = set()  # the ids whose gradients have not come

    def enter(self) -> None:
        self.table.gather(self)

    def on_alarm(self) -> None:
        self.table.recheck(self)

    def forget(self) -> list[Any]:
        return self.table.forget(self)


class GradientTable(Named):
    """UnbatchGrad's table: gradients that wait for the owner of their batch, and owners that wait for gradients.

    A gradient is valid until its deadline, or as long as an owner that needs it waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[int, tuple[float, Array]] = {}  # by id: its deadline, and the gradient
        self._owners: dict[int, Gather] = {}  # by the id of the owner
        self._wanted: dict[int, Gather] = {}  # the owner of each awaited id; follows from `_owners`
        self._is_broken = False  # whether an exception has interrupted a change

    def send(self, id: int, grad: Array, now: float, deadline: float) -> None:
        """Store a gradient for the owner of its batch."""
        refuse_inside_lock("UnbatchGrad")
        with lock:
            owner = self.in_use()._send(id, grad, now, deadline)
        self._wake(owner)

    def _send(self, id: int, grad: Array, now: float, deadline: float) -> Gather | None:
        self._repair()
        self.last_used = now
        self._check_free(id, now)
        self._is_broken = True
        owner = self._add(id, grad, deadline)
        self._is_broken = False
        return owner

    def _add(self, id: int, grad: Array, deadline: float) -> Gather | None:
        """Store a gradient, and answer a waiting owner if it was the last one missing; return that owner."""
        self._sent[id] = (deadline, grad)
        owner = self._wanted.get(id)
        if owner is not None:
            owner.missing.discard(id)
            self._complete(owner)
        return owner

    def gather(self, owner: Gather) -> None:
        """Register the owner of a batch. Its value becomes the list of its callers' gradients in order of the index."""
        refuse_inside_lock("UnbatchGrad")
        with lock:
            owner.table = table = self.in_use()
            other = table._gather(owner, [id for id, _, _ in owner.rows], owner.now)
        self._wake(other)

    def _gather(self, owner: Gather, ids: list[int], now: float) -> Gather | None:
        """Register an owner; return another owner for which its gradient was the last one missing."""
        self._repair()
        self.last_used = now
        self._check_free(owner.id, now)
        if wanted := [id for id in ids if id in self._wanted]:
            raise InvalidArgumentError(f"the gradient of id {wanted[0]} is already awaited by another call")
        self._is_broken = True
        owner.wait_until(owner.until)
        owner.missing = {id for id in ids if id != owner.id and not self._is_live(id, now)}
        for id in owner.missing:
            self._sent.pop(id, None)  # past its deadline
        other = self._add(owner.id, owner.grad, owner.until)
        self._owners[owner.id] = owner
        self._wanted.update(dict.fromkeys(ids, owner))
        self._complete(owner)
        self._is_broken = False
        return other

    def _wake(self, owner: Gather | None) -> None:
        if owner is not None and owner.done:
            owner.wake()
        if departed:
            remove_departed()

    def _repair(self) -> None:
        """Complete a change that an exception has interrupted."""
        if not self._is_broken:
            return
        self._owners = {id: owner for id, owner in self._owners.items() if not owner.done}
        self._wanted = {id: owner for owner in self._owners.values() for id, _, _ in owner.rows}
        for owner in list(self._owners.values()):
            owner.missing = {id for id, _, _ in owner.rows if id not in self._sent}
            self._complete(owner)
        self._is_broken = False

    def _complete(self, owner: Gather) -> None:
        """Answer an owner if all its gradients are there; if they do not fit together, reject it."""
        if owner.missing:
            return
        grads = [self._sent[id][1] for id, _, _ in owner.rows]
        error = _mismatch(owner, grads)
        if error is None:
            owner.resolve(grads)
        else:
            owner.reject(error)
        self._remove(owner, taken=error is None)

    def _remove(self, owner: Gather, taken: bool) -> None:
        """Remove an owner; the gradients of its batch were `taken`, else all but its own stay until their deadline."""
        for id, _, _ in owner.rows:
            if self._wanted.get(id) is owner:
                del self._wanted[id]
                if taken:
                    self._sent.pop(id, None)
        if not taken:
            self._sent.pop(owner.id, None)
        self._owners.pop(owner.id, None)

    def _check_free(self, id: int, now: float) -> None:
        if self._is_live(id, now):
            raise InvalidArgumentError(f"id {id} already has a gradient waiting")

    def _is_live(self, id: int, now: float) -> bool:
        sent = self._sent.get(id)
        return sent is not None and (id in self._wanted or now <= sent[0])

    def recheck(self, owner: Gather) -> None:
        """Reject an owner past its deadline, and complete an interrupted change."""
        with lock:
            now = owner.clock.now()
            self._repair()
            self._expire(owner, now)
        self._wake(owner)

    def _expire(self, owner: Gather, now: float) -> bool:
        """Reject an owner past its deadline, and free its id; return whether it was."""
        if owner.done or now < owner.alarm:
            return False
        error = DeadlineExceededError(f"the gradients of ids {sorted(owner.missing)} did not come before the deadline")
        self._is_broken = True
        owner.reject(error)
        self._remove(owner, taken=False)
        self._is_broken = False
        return True

    def forget(self, owner: Gather) -> list[Any]:
        """Remove a departed owner; runs under the lock."""
        owner.end_inside()
        self._repair()
        if self._owners.get(owner.id) is owner:
            self._is_broken = True
            owner.reject(DeadlineExceededError("the call was given up"))
            self._remove(owner, taken=False)
            self._is_broken = False
        elif owner.id in self._sent and self._sent[owner.id][1] is owner.grad:  # interrupted before it was registered
            del self._sent[owner.id]
        return []

    def sweep(self, now: float) -> float:
        """Drop the entries past their deadline; return the next deadline."""
        if has_lock():
            return now + 1.0
        with lock:
            self._repair()
            for id in [id for id in self._sent if not self._is_live(id, now)]:
                del self._sent[id]
            late: list[Ticket] = [owner for owner in list(self._owners.values()) if self._expire(owner, now)]
            next_sent = min((until for id, (until, _) in self._sent.items() if id not in self._wanted), default=inf)
            next_owner = min((owner.alarm for owner in self._owners.values()), default=inf)
        wake_all(late)
        if departed:
            remove_departed()
        return min(next_sent, next_owner)

    def is_empty(self) -> bool:
        return not (self._sent or self._owners)

    def stored(self) -> int:
        """Return the number of gradients."""
        return len(self._sent)

    def after_fork(self) -> None:
        """Begin empty: the threads that waited do not exist in this process."""
        self.__init__()  # type: ignore[misc]


def _mismatch(owner: Gather, grads: Sequence[Array]) -> InvalidArgumentError | None:
    """Return why the gradients cannot be concatenated, or None."""
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
