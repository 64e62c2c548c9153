"""HIPS autograd: one `primitive` per call.

autograd traces only top-level positional arguments, so the inputs are passed flat; the forward pass sees NumPy arrays. autograd
needs an array for every input it differentiates, so a missing gradient becomes zeros of the input's vector space. Limitation:
autograd's trace counter is global, so nested gradients from several threads at the same time are wrong; first order is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from autograd.extend import defvjp_argnums, primitive, vspace
from autograd.tracer import isbox

from ..arrays import Array


def is_recording(x: Array) -> bool:
    """True if autograd traces `x`."""
    return bool(isbox(x))


def apply(call: Any, inputs: Sequence[Array]) -> Any:
    """The flat outputs of `call`, differentiable."""

    @primitive
    def function(*arrays: Array) -> Any:
        return call.run(arrays)

    def pull(argnums: Sequence[int], outputs: Any, arrays: Sequence[Array], _: Any) -> Any:
        saved = call.save(arrays, tuple(outputs))

        def pull_back(grads: Any) -> Any:
            cotangents = [g if _is_float(o) else None for g, o in zip(tuple(grads), tuple(outputs), strict=True)]
            back = call.pull_back(cotangents, saved)
            return tuple(vspace(arrays[i]).zeros() if back[i] is None else back[i] for i in argnums)

        return pull_back

    defvjp_argnums(function, pull)
    return tuple(function(*inputs))


def _is_float(x: Array) -> bool:
    return np.issubdtype(getattr(x, "dtype", np.dtype(object)), np.inexact)
