"""How callers that share a batch wait for each other in PyTorch's backward pass without a deadlock.

A thread runs the backward of its CPU tensors itself, so callers can wait for each other there. torch runs all backwards of an
accelerator in one thread: a wait for another caller's backward would never end. On any device, one backward pass must not wait
for a caller that the same pass covers. Both cases raise before the wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import FailedPreconditionError


@contextmanager
def backward_in_caller() -> Iterator[None]:
    """A block in which `backward()` runs in the calling thread, on every device.

    By default PyTorch runs all backward passes of a device in one thread. Callers on a device that share a batch and wait for
    each other's gradients need this block around `backward()`, each in its own thread.
    """
    import torch

    with torch.autograd.set_multithreading_enabled(False):
        yield


def check_thread(device: Any) -> None:
    """Raise if torch runs the backward passes of `device` in a thread that other callers need too."""
    from .torch_internals import shares_backward_thread

    if device.type != "cpu" and shares_backward_thread():
        raise FailedPreconditionError(
            f"callers that share a batch wait for each other's gradients, but PyTorch runs all backward passes on {device} in "
            "one thread: call backward() inside `with weft.backward_in_caller():`, in each caller's own thread"
        )


class BatchNodes:
    """The autograd nodes of the callers that share a batch, each in its own graph."""

    def __init__(self, callers: int) -> None:
        self.callers = callers
        self._nodes: list[weakref.ref[Any]] = []

    def join(self, node: Any) -> None:
        """Add a caller's node, without keeping it alive."""
        self._nodes.append(weakref.ref(node))

    def check(self, node: Any, device: Any) -> None:
        """Raise if `node`, which is about to wait for the other nodes, would wait forever."""
        if self.callers == 1:
            return
        from .torch_internals import is_covered

        check_thread(device)
        others = [found for ref in self._nodes if (found := ref()) is not None and found is not node]
        if any(map(is_covered, others)):
            raise FailedPreconditionError(
                "a backward pass must not cover several callers of one batch, which wait for each other in it: call "
                "backward() on each caller's loss, each in its own thread"
            )
