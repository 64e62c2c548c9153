"""Where the pieces of a batch meet their callers (Unbatch), and the callers' gradients their batch (UnbatchGrad).

Both are tables by id, with a deadline on every entry. What is past its deadline is never served; `sweep` drops it. A call that
comes from inside the lock (see `weft.core.lock`) is refused: it would have to wait for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from ..core.arrays import Array
from ..core.lock import has_lock, left, lock, work_off
from ..core.named import Named
from ..core.ticket import Sweeping, Ticket, wake_all
from ..errors import AlreadyExistsError, DeadlineExceededError, FailedPreconditionError, InvalidArgumentError

Row = tuple[int, int, int]  # id, start, length


def _check_outside(op: str) -> None:
    if has_lock():
        raise FailedPreconditionError(
            f"{op} waits for other callers, and a finalizer or a signal handler that interrupts weft's own bookkeeping cannot: "
            "call it elsewhere"
        )


class ExpiringTicket(Ticket):
    """A ticket whose alarm is its deadline. In an event loop one timer sweeps for all of them."""

    @property
    def deadline(self) -> float:
        """When the call ends without an answer."""
        return self.alarm

    def wait_until(self, deadline: float) -> None:
        """Set the deadline."""
        self.alarm = deadline
        assert self.sweeper is not None
        self.sweeper.expires(deadline)


class Fetch(ExpiringTicket):
    """A call of Unbatch that waits for the piece called `id`."""

    def __init__(self, scope: Sweeping, meeting: PieceTable, id: int, dtype: Any, now: float) -> None:
        self._init_ticket(scope.clock, scope)
        self.meeting = meeting
        self.id = id
        self.dtype = dtype
        self.now = now  # the time of the call

    def enter(self) -> None:
        self.meeting.fetch(self)

    def take(self, piece: Array) -> None:
        """Take the piece that this call waits for."""
        if piece.dtype == self.dtype:
            self.resolve(piece)
        else:
            self.reject(_wrong_type(self.dtype, piece))

    def on_alarm(self) -> None:
        self.meeting.look(self)

    def forget(self) -> list[Any]:
        return self.meeting.forget(self)


class PieceTable(Named):
    """Unbatch's table: pieces that wait for their caller, and callers that wait for their piece."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.timeout = timeout
        self._pieces: dict[int, tuple[float, Array]] = {}
        self._waiting: dict[int, Fetch] = {}
        # A delivery as it was decided on: what is stored, and which callers get what. It is carried out even if the call that
        # brought it is interrupted.
        self._delivery: tuple[dict[int, tuple[float, Array]], list[tuple[Fetch, Array]]] | None = None

    def fetch(self, fetch: Fetch) -> None:
        """Give a call its piece, or have it wait."""
        _check_outside("Unbatch")
        with lock:
            fetch.meeting = table = self.here()
            table._fetch(fetch, fetch.id, fetch.now)
        if left:
            work_off()

    def _fetch(self, fetch: Fetch, id: int, now: float) -> None:
        self._mend()
        self.used = now
        piece = self._live(id, now)
        if piece is None:
            self._refuse_second(id)
            fetch.wait_until(now + self.timeout)
            self._waiting[id] = fetch
        elif piece.dtype != fetch.dtype:
            raise _wrong_type(fetch.dtype, piece)
        else:
            fetch.resolve(piece)
            del self._pieces[id]

    def _refuse_second(self, id: int) -> None:
        other = self._waiting.get(id)
        if other is not None and not other.done:
            raise AlreadyExistsError(f"another call is already waiting for id {id}")

    def deliver(
        self, scope: Sweeping, id: int, dtype: Any, ids: Sequence[int], pieces: Sequence[Array], now: float
    ) -> Array | Fetch:
        """The piece called `id`, or a ticket for it, with all `pieces` handed to the calls named `ids`; or nothing done."""
        if len(ids) == 1 and ids[0] == id and not (self._pieces or self._waiting):
            self.used = now
            return pieces[0]  # nobody else is concerned
        _check_outside("Unbatch")
        with lock:
            table = self.here()
            own, answers = table._deliver(scope, id, dtype, ids, pieces, now)
        wake_all([waiter for waiter, _ in answers])
        if left:
            work_off()
        return own if own is not None else Fetch(scope, table, id, dtype, now)

    def _deliver(
        self, scope: Sweeping, id: int, dtype: Any, ids: Sequence[int], pieces: Sequence[Array], now: float
    ) -> tuple[Array | None, list[tuple[Fetch, Array]]]:
        """The piece called `id`, if it is there, and who has been answered."""
        self._mend()
        self.used = now
        own = self._live(id, now)
        if own is None:
            self._refuse_second(id)
        elif own.dtype != dtype:
            raise _wrong_type(dtype, own)
        own, answers, stored = self._plan(id, own, ids, pieces, now)
        self._pieces.pop(id, None)
        if stored:
            scope.expires(now + self.timeout)
        self._delivery = (stored, answers)
        self._mend()
        return own, answers

    def _mend(self) -> None:
        """Carry out a delivery that was decided on; what of it is done already stays as it is."""
        if self._delivery is None:
            return
        stored, answers = self._delivery
        self._pieces.update(stored)
        for waiter, piece in answers:
            waiter.take(piece)
            if self._waiting.get(waiter.id) is waiter:
                del self._waiting[waiter.id]
        self._delivery = None

    def _plan(
        self, own_id: int, own: Array | None, ids: Sequence[int], pieces: Sequence[Array], now: float
    ) -> tuple[Array | None, list[tuple[Fetch, Array]], dict[int, tuple[float, Array]]]:
        """The caller's own piece, who gets what at once, and what is stored: nothing changes before the whole index is known."""
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

    def look(self, fetch: Fetch) -> None:
        """See whether a caller's time is over, or its piece was decided on and not handed over."""
        with lock:
            self._mend()
            self._expire(fetch, fetch.clock.now())
        fetch.wake()
        if left:
            work_off()

    def _expire(self, fetch: Fetch, now: float) -> bool:
        """Tell a caller whose time is over; whether it is."""
        if now < fetch.deadline:
            return False
        if self._waiting.get(fetch.id) is fetch:
            del self._waiting[fetch.id]
        return fetch.reject(DeadlineExceededError(f"no batch delivered id {fetch.id} within {self.timeout:g} s"))

    def forget(self, fetch: Fetch) -> list[Any]:
        """Forget a caller that has left, under the lock."""
        fetch.leave()
        self._mend()
        if self._waiting.get(fetch.id) is fetch:
            del self._waiting[fetch.id]
        return []

    def sweep(self, now: float) -> float:
        """Drop what is past its deadline; when the next entry will be."""
        if has_lock():
            return now + 1.0
        with lock:
            self._mend()
            for id in [id for id, (deadline, _) in self._pieces.items() if deadline < now]:
                del self._pieces[id]
            late: list[Ticket] = [fetch for fetch in list(self._waiting.values()) if self._expire(fetch, now)]
            next_piece = min((deadline for deadline, _ in self._pieces.values()), default=inf)
            next_fetch = min((fetch.deadline for fetch in self._waiting.values()), default=inf)
        wake_all(late)
        if left:
            work_off()
        return min(next_piece, next_fetch)

    def is_empty(self) -> bool:
        return not (self._pieces or self._waiting)

    def stored(self) -> int:
        """How many pieces and callers are in the table."""
        return len(self._pieces) + len(self._waiting)

    def after_fork(self) -> None:
        """Forget everyone."""
        self.__init__(self.timeout)  # type: ignore[misc]


def _wrong_type(wanted: Any, piece: Array) -> InvalidArgumentError:
    return InvalidArgumentError(f"the piece must have the dtype of batched_tensor, {wanted}, got {piece.dtype}")


class Gather(ExpiringTicket):
    """A call of UnbatchGrad that owns a batch: it waits for the gradients of all its rows' callers."""

    def __init__(
        self,
        scope: Sweeping,
        meeting: GradientTable,
        id: int,
        rows: Sequence[Row],
        grad: Array,
        now: float,
        until: float,
    ) -> None:
        self._init_ticket(scope.clock, scope)
        self.meeting = meeting
        self.id = id
        self.rows = rows
        self.grad = grad
        self.now, self.until = now, until  # the time of the call, and how long it waits
        self.missing: set[int] = set()  # the ids whose gradients have not come

    def enter(self) -> None:
        self.meeting.gather(self)

    def on_alarm(self) -> None:
        self.meeting.look(self)

    def forget(self) -> list[Any]:
        return self.meeting.forget(self)


class GradientTable(Named):
    """UnbatchGrad's table: gradients that wait for the owner of their batch, and owners that wait for gradients.

    A gradient is good until its deadline, or as long as an owner that needs it waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[int, tuple[float, Array]] = {}  # by id: until when it is kept, and the gradient
        self._owners: dict[int, Gather] = {}  # by the id of the owner
        self._wanted: dict[int, Gather] = {}  # the same by each id of its batch; follows from `_owners`
        self._is_broken = False  # whether an exception has broken off a change

    def send(self, id: int, grad: Array, now: float, deadline: float) -> None:
        """Leave a gradient for the owner of its batch."""
        _check_outside("UnbatchGrad")
        with lock:
            owner = self.here()._send(id, grad, now, deadline)
        self._wake(owner)

    def _send(self, id: int, grad: Array, now: float, deadline: float) -> Gather | None:
        self._mend()
        self.used = now
        self._refuse_taken(id, now)
        self._is_broken = True
        owner = self._add(id, grad, deadline)
        self._is_broken = False
        return owner

    def _add(self, id: int, grad: Array, deadline: float) -> Gather | None:
        """Store a gradient; its owner, if one waits, is answered if it was the last one missing."""
        self._sent[id] = (deadline, grad)
        owner = self._wanted.get(id)
        if owner is not None:
            owner.missing.discard(id)
            self._complete(owner)
        return owner

    def gather(self, owner: Gather) -> None:
        """Register the owner of a batch, whose value becomes the list of its callers' gradients in order of the index."""
        _check_outside("UnbatchGrad")
        with lock:
            owner.meeting = table = self.here()
            other = table._gather(owner, [id for id, _, _ in owner.rows], owner.now)
        self._wake(other)

    def _gather(self, owner: Gather, ids: list[int], now: float) -> Gather | None:
        """Register an owner; another one for which its gradient was the last one missing."""
        self._mend()
        self.used = now
        self._refuse_taken(owner.id, now)
        if wanted := [id for id in ids if id in self._wanted]:
            raise InvalidArgumentError(f"the gradient of id {wanted[0]} is already awaited by another call")
        self._is_broken = True
        owner.wait_until(owner.until)
        owner.missing = {id for id in ids if id != owner.id and not self._is_live(id, now)}
        for id in owner.missing:
            self._sent.pop(id, None)  # it is past its deadline
        other = self._add(owner.id, owner.grad, owner.until)
        self._owners[owner.id] = owner
        self._wanted.update(dict.fromkeys(ids, owner))
        self._complete(owner)
        self._is_broken = False
        return other

    def _wake(self, owner: Gather | None) -> None:
        if owner is not None and owner.done:
            owner.wake()
        if left:
            work_off()

    def _mend(self) -> None:
        """Complete what an exception has broken off."""
        if not self._is_broken:
            return
        self._owners = {id: owner for id, owner in self._owners.items() if not owner.done}
        self._wanted = {id: owner for owner in self._owners.values() for id, _, _ in owner.rows}
        for owner in list(self._owners.values()):
            owner.missing = {id for id, _, _ in owner.rows if id not in self._sent}
            self._complete(owner)
        self._is_broken = False

    def _complete(self, owner: Gather) -> None:
        """Answer an owner if all its gradients are there; if they do not fit together, it alone is told."""
        if owner.missing:
            return
        grads = [self._sent[id][1] for id, _, _ in owner.rows]
        error = _mismatch(owner, grads)
        if error is None:
            owner.resolve(grads)
        else:
            owner.reject(error)
        self._let_go(owner, taken=error is None)

    def _let_go(self, owner: Gather, taken: bool) -> None:
        """Forget an owner; the gradients of its batch were `taken`, or live on until their own deadline, but for its own."""
        for id, _, _ in owner.rows:
            if self._wanted.get(id) is owner:
                del self._wanted[id]
                if taken:
                    self._sent.pop(id, None)
        if not taken:
            self._sent.pop(owner.id, None)
        self._owners.pop(owner.id, None)

    def _refuse_taken(self, id: int, now: float) -> None:
        if self._is_live(id, now):
            raise InvalidArgumentError(f"id {id} already has a gradient waiting")

    def _is_live(self, id: int, now: float) -> bool:
        sent = self._sent.get(id)
        return sent is not None and (id in self._wanted or now <= sent[0])

    def look(self, owner: Gather) -> None:
        """See whether an owner's time is over, or its gradients are there and it was not told."""
        with lock:
            now = owner.clock.now()
            self._mend()
            self._expire(owner, now)
        self._wake(owner)

    def _expire(self, owner: Gather, now: float) -> bool:
        """Tell an owner whose time is over, and free its id; whether it is."""
        if owner.done or now < owner.deadline:
            return False
        error = DeadlineExceededError(f"the gradients of ids {sorted(owner.missing)} did not come before the deadline")
        self._is_broken = True
        owner.reject(error)
        self._let_go(owner, taken=False)
        self._is_broken = False
        return True

    def forget(self, owner: Gather) -> list[Any]:
        """Forget an owner that has left, under the lock."""
        owner.leave()
        self._mend()
        if self._owners.get(owner.id) is owner:
            self._is_broken = True
            owner.reject(DeadlineExceededError("the call was given up"))
            self._let_go(owner, taken=False)
            self._is_broken = False
        elif (
            owner.id in self._sent and self._sent[owner.id][1] is owner.grad
        ):  # it was interrupted before it was an owner
            del self._sent[owner.id]
        return []

    def sweep(self, now: float) -> float:
        """Drop what is past its deadline; when the next entry will be."""
        if has_lock():
            return now + 1.0
        with lock:
            self._mend()
            for id in [id for id in self._sent if not self._is_live(id, now)]:
                del self._sent[id]
            late: list[Ticket] = [owner for owner in list(self._owners.values()) if self._expire(owner, now)]
            next_sent = min((until for id, (until, _) in self._sent.items() if id not in self._wanted), default=inf)
            next_owner = min((owner.deadline for owner in self._owners.values()), default=inf)
        wake_all(late)
        if left:
            work_off()
        return min(next_sent, next_owner)

    def is_empty(self) -> bool:
        return not (self._sent or self._owners)

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
