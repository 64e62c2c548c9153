"""The ops that wait for other callers, as coroutines: same arguments, queues and rules, in any event loop.

    result = await weft.aio.Batch([x], num_batch_threads=1, ...)

A waiting call occupies no thread. The functions of BatchFunction and the assembly of large batches run in worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from . import raw_ops
from .batching.tasks import TaskWaiter
from .core.op import Op
from .core.ticket import Ticket
from .errors import OpError


def _awaitable(op: Op) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = op.begin(args, kwargs)
            if not isinstance(result, Ticket):
                return result
            await TaskWaiter(result)
            return result.outcome()
        except OpError as error:
            op.add_note(error, args, kwargs)
            raise

    call.__name__ = call.__qualname__ = op.name
    call.__doc__ = op.__doc__
    call.__signature__ = op.signature  # type: ignore[attr-defined]
    return call


Batch = _awaitable(raw_ops.Batch)
Unbatch = _awaitable(raw_ops.Unbatch)
UnbatchGrad = _awaitable(raw_ops.UnbatchGrad)
BatchFunction = _awaitable(raw_ops.BatchFunction)

__all__ = ["Batch", "BatchFunction", "Unbatch", "UnbatchGrad"]
