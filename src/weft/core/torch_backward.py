"""How callers that share a batch wait for each other in PyTorch's backward pass without a deadlock.

A caller waits in the thread that called `backward()`; see `torch_split` for accelerators. One backward pass must not wait for a
caller that the same pass covers, nor in the one thread that runs all backward passes of a device. Both cases raise before the wait.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import Any

from ..errors import FailedPreconditionError

#: The threads in which PyTorch runs the backward passes of accelerators. They never end and make no calls.
device_threads: set[int] = set()


def check_thread() -> None:
    """Raise in a thread that runs the backward passes of an accelerator."""
    if device_threads and get_ident() in device_threads:
        raise FailedPreconditionError(
            "this call or backward() runs in PyTorch's one backward thread of the device, which must not wait for other callers: "
            "make it in a thread of the program, for example outside of torch.utils.checkpoint"
        )


class BatchNodes:
    """The autograd nodes of the callers that share a batch, each in its own graph."""

    def __init__(self, callers: int) -> None:
        self.callers = callers
        self._nodes: list[weakref.ref[Any]] = []

    def join(self, node: Any) -> None:
        """Add a caller's node, without keeping it alive."""
        self._nodes.append(weakref.ref(node))

    def check(self, node: Any) -> None:
        """Raise if `node`, which is about to wait for the other nodes, would wait forever."""
        if self.callers == 1:
            return
        from .torch_internals import is_any_covered

        check_thread()
        others = [found for ref in self._nodes if (found := ref()) is not None and found is not node]
        if is_any_covered(others):
            raise FailedPreconditionError(
                "a backward pass must not cover several callers of one batch, which wait for each other in it: call "
                "backward() on each caller's loss, each in its own thread"
            )
