"""What the graph that PyTorch has recorded leads to: the tickets of a call, and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.arrays import Array
from .gradient import GradientTicket, ResultHandle


def tickets_of(outputs: Sequence[Array]) -> list[GradientTicket]:
    """Return the tickets of a call, each once, from the tensors of its result."""
    found: dict[GradientTicket, None] = {}
    nodes = [x.grad_fn for x in outputs]
    while nodes:
        node = nodes.pop()
        handle = getattr(node, "handle", None)
        if isinstance(handle, ResultHandle):
            found[handle.ticket] = None
        elif node is not None:
            nodes += [each for each, _ in node.next_functions]
    return list(found)


def has_parameters(outputs: Sequence[Array], inputs: Sequence[Array]) -> bool:
    """Return True if a backward of `outputs` adds a gradient to a leaf that is not one of `inputs`, nor shared by processes."""
    own = {id(x) for x in inputs}
    if any(x.is_leaf and id(x) not in own and not x.is_shared() for x in outputs):
        return True
    waiting: list[Any] = [x.grad_fn for x in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of a node that adds to the gradient of a leaf
        if leaf is not None and id(leaf) not in own and not leaf.is_shared():
            return True
        waiting += [each for each, _ in node.next_functions]
    return False
