"""The backward of batched calls: when a caller waits for the others, and what is still outstanding."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..core import adapters
from ..core.arrays import Array, library_of
from ..errors import FailedPreconditionError, InvalidArgumentError, own_copy
from . import attributes as calls
from . import exits, trees
from .gradient import DeadlineWatch, GradientTicket, ResultHandle, SharedBackward, this_thread
from .request import Request

#: So many errors of batches whose callers had gone on are kept for `join`.
KEPT_ERRORS = 16


class Backward:
    """What a caller's node does with its gradient."""

    is_replayed = False  # whether batches go back in an order of their own

    def __init__(self, waits: bool) -> None:
        self.waits = waits

    def check_devices(self, arrays: Sequence[Array]) -> None:
        """Refuse a call whose backward would stop a device: all backwards of a device run in one thread."""
        if not self.waits:
            return
        for x in arrays:
            if library_of(x) == "torch" and not x.is_cpu and adapters.of("torch", __package__).shares_threads():
                raise FailedPreconditionError(
                    f"a backward on {x.device} that waits for other callers would block the device's only backward thread: "
                    "make the batcher with wait_backward=False and call join(), or call and go back inside "
                    "`with weft.backward_in_caller():`"
                )

    def attach(self, held: ResultHandle, rows: Sequence[Array]) -> list[Array]:
        """`rows` of a batch with a node behind them that hands in their gradient."""
        self.check_devices(rows)
        inputs = () if held.share.is_sent_off else held.share.inputs
        return adapters.of("torch", __package__).attach(self.take, held, rows, inputs)

    def take(self, share: GradientTicket, gradients: Sequence[Array | None]) -> Sequence[Array | None]:
        """Hand in a caller's gradients; those of its inputs, once the batch has gone back, or None where it does not wait."""
        try:
            return self._hand_in(share, gradients)
        except BaseException as error:
            share.note_failure(error)
            raise

    def _hand_in(self, share: GradientTicket, gradients: Sequence[Array | None]) -> Sequence[Array | None]:
        torch = adapters.of("torch", __package__)
        if torch.differentiates_twice():
            raise FailedPreconditionError(
                "a batch goes back once and is not differentiated twice: call backward() without create_graph=True"
            )
        waits = self.waits and not _must_go_on(share, torch)
        if not (waits or share.is_sent_off):
            if any(not x.is_leaf for x in share.inputs):
                raise FailedPreconditionError(
                    "one backward covers several calls of a batch whose inputs were computed: make the batcher with "
                    "wait_backward=False, or go back for each call in its own thread"
                )
            share.is_sent_off = True
        # A caller that goes on must not wait for a batch's turn in a replay: it may be the one others wait for.
        share.deposit(gradients, elsewhere=self.is_replayed and not waits)
        if waits or share.done:
            parts, share.value = share.wait(), None
            if not share.is_sent_off:
                return parts
        return [None] * len(share.inputs)

    def pull(self, share: GradientTicket, gradients: Sequence[Array | None]) -> Any:
        """Hand in a caller's gradients, and wait for its part, which is given once."""
        return self.pull_all([(share, gradients)])[0]

    @staticmethod
    def pull_all(shares: Sequence[tuple[GradientTicket, Sequence[Array | None]]]) -> list[Any]:
        """Hand in the gradients of a caller that has several shares, and wait for the part of each, which is given once."""
        parts = []
        try:
            for share, gradients in shares:
                share.deposit(gradients)
            for share, _ in shares:
                parts.append(share.wait())
                share.value = None
        except BaseException as error:
            shares[0][0].note_failure(error)
            raise
        return parts


def _must_go_on(share: GradientTicket, torch: Any) -> bool:
    """Whether a gradient that is missing can only come from here: by this very backward, or later in this thread."""
    return share.joint.misses_other_of(this_thread(), share) or torch.covers_other(share)


class PullBack:
    """Takes the gradient of one call's result to those of its arrays."""

    def __init__(self, backward: Backward, request: Request) -> None:
        self._backward, self._request = backward, request
        self._answers: list[Any] = [request.value] if request.slices is None else request.value
        for answer in self._answers:
            answer.held.is_delivered = True

    def __call__(self, gradient: Any) -> Any:
        parts = self._backward.pull_all(self.shares(gradient))
        return self.joined([own for own, _ in parts])

    def shares(self, gradient: Any) -> list[tuple[GradientTicket, list[Any]]]:
        """The call's shares, with the gradient of each one's rows."""
        request = self._request
        answers = self._answers
        leaves, places = trees.flatten(gradient)[0], answers[0].output.places
        if len(leaves) == len(answers[0].output.columns):  # what is no array in the result has no gradient
            leaves = [leaves[i] for i in places]
        if len(leaves) != len(places) or not all(x is None or trees.is_array(x) for x in leaves):
            raise InvalidArgumentError(
                f"the gradient must have the {len(places)} arrays of the result, got {_described(leaves)}"
            )
        if request.examples:
            leaves = [x if x is None else x[None] for x in leaves]
        found, start = [], 0
        for answer in answers:
            own = answer.arrays()
            rows = own[0].shape[0]
            found.append((answer.held.share, [None if x is None else x[start : start + rows] for x in leaves]))
            start += rows
            for x, y in zip(found[-1][1], own, strict=True):
                if x is not None and tuple(x.shape) != tuple(y.shape):
                    raise InvalidArgumentError(
                        f"the gradient must have the shape of the result, {list(y.shape)}, got {list(x.shape)}"
                    )
        return found

    def joined(self, parts: Sequence[Sequence[Any]]) -> Any:
        """The gradients of the call's arrays: one alone, or a tuple."""
        columns = [
            column[0] if len(column) == 1 or column[0] is None else calls.concat(column)
            for column in zip(*parts, strict=True)
        ]
        if self._request.examples:
            columns = [x if x is None else x[0] for x in columns]
        return columns[0] if len(columns) == 1 else tuple(columns)


def _described(leaves: Sequence[Any]) -> list[str]:
    return [trees.describe(x) if trees.is_array(x) else type(x).__name__ for x in leaves]


class OutstandingBackwards:
    """The joints that have a gradient and wait for more, and the errors nobody was there to be told."""

    def __init__(self) -> None:
        # Changed in single steps, without a lock: this is told of joints whatever its thread is doing.
        self.joints: set[SharedBackward] = set()
        self._failed: deque[BaseException] = deque(maxlen=KEPT_ERRORS)
        self._refusal: Exception | None = None  # once closed, what is raised where a gradient is handed in
        exits.closing.add(self)

    def hold(self, joint: SharedBackward) -> None:
        """A joint has a gradient that must not be lost."""
        if self._refusal is not None:
            raise own_copy(self._refusal)
        self.joints.add(joint)

    def close(self, error: Exception) -> None:
        """Have all who wait for gradients, and all who hand in one from now on, get `error`; what has begun to go back does."""
        self._refusal = error
        for joint in list(self.joints):
            joint.run(error)

    def let_go(self, joint: SharedBackward) -> None:
        """A joint needs nothing any more; it may be told twice."""
        if joint in self.joints:
            self.joints.discard(joint)
            if joint.error is not None and any(share.is_sent_off for share in joint.shares):
                self._failed.append(joint.error)

    def look(self) -> None:
        """Settle what is overdue. Not what is complete: that has somebody who runs it, and in a replay running it may take long."""
        for joint in list(self.joints):
            if joint.missing:
                joint.look()

    def watches(self) -> list[DeadlineWatch]:
        """Something to wait on for each."""
        return [joint.watch() for joint in list(self.joints)]

    def raise_failed(self) -> None:
        """Raise the first error that nobody was told, and forget all of them."""
        failed = list(self._failed)
        self._failed.clear()
        if failed:
            error = own_copy(failed[0]) if isinstance(failed[0], Exception) else failed[0]
            if len(failed) > 1:
                error.add_note(f"{len(failed) - 1} more backwards failed")
            raise error
