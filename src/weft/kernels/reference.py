"""Every kernel in array-API code: the definition the others are tested against."""

from __future__ import annotations

from collections.abc import Sequence

from .._arrays import Array, library_of, namespace


def concat_rows(arrays: Sequence[Array], rows: int) -> Array:
    """A new array: `arrays` one below the other, then the first row of the first repeated up to `rows` rows."""
    first = arrays[0]
    xp = namespace(library_of(first) or "numpy")
    missing = rows - sum(x.shape[0] for x in arrays)
    padding = [xp.broadcast_to(first[:1], (missing, *first.shape[1:]))] if missing > 0 else []
    return xp.concat([*arrays, *padding], axis=0)


def cut_rows(x: Array, bounds: Sequence[tuple[int, int]]) -> list[Array]:
    """A new array for each `(start, stop)` of `bounds`: those rows of `x`."""
    library = library_of(x) or "numpy"
    if library == "jax":  # immutable: a slice is a new array already
        return [x[start:stop] for start, stop in bounds]
    xp = namespace(library)
    return [xp.asarray(x[start:stop], copy=True) for start, stop in bounds]
