"""Shared arguments: a batch is run with those of its first call, so they must be the same in all its calls."""

from __future__ import annotations

from typing import Any

from ..core.arrays import device_of, library_of, namespace
from ..core.interrupts import as_exception
from ..errors import InvalidArgumentError
from . import trees
from .exact import Unsure, represent
from .request import Request


def check_shared(first: Request, other: Request) -> InvalidArgumentError | None:
    """Return an error if the shared arguments of two calls are neither the same objects nor the same values."""
    for name, value in first.shared.items():
        theirs = other.shared.get(name)
        if theirs is value:
            continue
        leaves, structure = trees.flatten_call((value,), {}, _UNSURE)
        their_leaves, their_structure = trees.flatten_call((theirs,), {}, _UNSURE)
        if structure != their_structure:
            return InvalidArgumentError(
                f"the shared argument {name!r} must be the same in all calls of a batch, got another structure"
            )
        for i, (a, b) in enumerate(zip(leaves, their_leaves, strict=True)):
            if a is not b and not _are_same(a, b):
                return InvalidArgumentError(
                    f"leaf {i} of the shared argument {name!r} must be the same in all calls of a batch, got another value"
                )
    return None


_UNSURE = Unsure()  # nobody asks it: the error says enough


def _are_same(a: Any, b: Any) -> bool:
    """Return whether two leaves are the same for a function; objects that cannot be compared, as tables of pandas, are not."""
    try:
        if type(a) is not type(b):
            return False
        if trees.is_array(a):
            return _are_same_arrays(a, b)
        return represent(a, _UNSURE, takes_mutable=True) == represent(b, _UNSURE, takes_mutable=True)
    except BaseException as error:
        as_exception(error)
        return False


def _are_same_arrays(a: Any, b: Any) -> bool:
    """Return whether two arrays have the same dtype, shape, device and values: -0.0 is not 0.0, and NaN is NaN."""
    library = library_of(a) or "numpy"
    if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype or device_of(a) != device_of(b):
        return False
    if library == "torch" and (a.requires_grad or b.requires_grad or a.is_quantized or a.layout != b.layout):
        return False  # the gradient would go to one of them
    if library == "jax" and a.weak_type != b.weak_type:
        return False
    if library == "numpy" and (a.dtype.metadata != b.dtype.metadata or a.dtype.kind in "OV"):
        return a.dtype.metadata == b.dtype.metadata and represent(a, _UNSURE, True) == represent(b, _UNSURE, True)
    xp = namespace(library)
    if not bool(((a == b) | ((a != a) & (b != b))).all()):
        return False
    if xp.isdtype(a.dtype, "complex floating"):
        return _have_same_signs(xp, a.real, b.real) and _have_same_signs(xp, a.imag, b.imag)
    return not xp.isdtype(a.dtype, "real floating") or _have_same_signs(xp, a, b)


def _have_same_signs(xp: Any, a: Any, b: Any) -> bool:
    return bool((xp.signbit(a) == xp.signbit(b)).all())
