"""What a gradient that waits for other callers must know of PyTorch's backward pass: its thread, and whom it covers.

Each thread runs the backward of its CPU tensors itself, so callers can wait for each other in it. All backwards of an
accelerator run on one thread of torch's own, where a wait for another caller is a wait for oneself; and so is, on any device,
a wait within one backward for a caller that the same backward covers. Both are seen before anyone waits.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import FailedPreconditionError


@contextmanager
def backward_in_caller() -> Iterator[None]:
    """A block in which `backward()` runs in the thread that calls it, on every device.

    By default PyTorch runs all backwards of a device on one thread; callers on a device that share a batch and wait for each
    other's gradients need this around `backward()`, each in its own thread.
    """
    import torch

    with torch.autograd.set_multithreading_enabled(False):
        yield


def check_thread(device: Any) -> None:
    """Raise if the backward under way runs the gradients of `device` on a thread that other callers' need as well."""
    if device.type != "cpu" and sys.modules["torch"]._C._is_multithreading_enabled():
        raise FailedPreconditionError(
            f"callers that share a batch wait for each other's gradients, and PyTorch runs all backwards on {device} in one "
            "thread: call backward() under `with weft.backward_in_caller():`, in each caller's own thread"
        )


def is_covered(node: Any) -> bool:
    """Whether the backward under way in this thread runs `node` (a `grad_fn`); False outside of one."""
    try:
        # Private, and the only way to know; tests/core/test_torch_internals.py holds what is asked of it here.
        return bool(sys.modules["torch"]._C._will_engine_execute_node(node))
    except RuntimeError:  # no backward is under way, or one that asks for the gradient of a leaf alone
        return False


class BatchNodes:
    """The nodes of the callers that share a batch, each in its own graph."""

    def __init__(self, callers: int) -> None:
        self.callers = callers
        self._nodes: list[weakref.ref[Any]] = []

    def join(self, node: Any) -> None:
        """Take note of a caller's node; it is not kept alive."""
        self._nodes.append(weakref.ref(node))

    def check(self, node: Any, device: Any) -> None:
        """Raise if `node`, which is about to wait for the others, would wait for ever: they must be able to come."""
        if self.callers == 1:
            return
        check_thread(device)
        others = [found for ref in self._nodes if (found := ref()) is not None and found is not node]
        if any(map(is_covered, others)):
            raise FailedPreconditionError(
                "a backward pass must not cover several callers of one batch, which wait for each other in it: call "
                "backward() on each caller's loss, each in its own thread"
            )
