"""Recorded programs of array ops, run step by step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from support.libraries import back, to
from weft import raw_ops

RECORDED = json.loads((Path(__file__).parent.parent / "recorded" / "tensor_array.json").read_text())


class Foreign:
    """The handle of some other resource."""

    shape = ()
    dtype = "resource"


# Ops that are no part of the library: what they make of handles.
HELPERS = {
    "VarHandleOp": lambda **_: Foreign(),
    "Pack": lambda values: list(values),
    "StridedSlice": lambda input, begin, end, strides: input[int(begin[0]) : int(end[0]) : int(strides[0])],
}


def literal(tensor, library="numpy"):
    """A recorded tensor as an array."""
    if tensor["t"] == "string":
        return np.array(tensor["v"], dtype=object).reshape(tensor["s"])
    array = np.array(tensor["v"], dtype=tensor["t"]).reshape(tensor["s"])
    # JAX would cut int64 to int32.
    return array if library == "jax" and tensor["t"] == "int64" else to(library, array)


def resolve(given, names, library):
    """An input of a step: a recorded tensor, a result of an earlier step, or a list of them."""
    if isinstance(given, list):
        return [resolve(x, names, library) for x in given]
    if "ref" in given:
        found = names[given["ref"]]
        return getattr(found, given["field"]) if "field" in given else found
    return literal(given, library)


def run(step, names, library="numpy"):
    """The result of one step, kept under its name."""
    inputs = {name: resolve(value, names, library) for name, value in step.get("in", {}).items()}
    call = HELPERS.get(step["do"]) or getattr(raw_ops, step["do"])
    result = call(**inputs, **step.get("attrs", {}))
    if "as" in step:
        names[step["as"]] = result
    return result


def check(result, expected):
    """The result is the one that was recorded."""
    if expected is None:
        assert result is None
    elif "fields" in expected:
        assert result._fields == tuple(expected["fields"])
        for name, value in expected["fields"].items():
            check(getattr(result, name), value)
    elif expected["t"] == "resource":
        assert (result.dtype, list(result.shape)) == ("resource", expected["s"])
    else:
        found = back(result)
        wanted = literal(expected)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted, strict=True)
