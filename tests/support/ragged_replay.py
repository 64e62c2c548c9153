"""Plays recorded programs of raw ops: TensorFlow's helper steps on variants are methods of the variant array here."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import numpy as np

from support.libraries import back, to
from weft import raw_ops
from weft.errors import NotFoundError
from weft.ragged.variant import VariantArray

RECORDED = json.loads((Path(__file__).parent.parent / "recorded" / "ragged.json").read_text())
HOST = {
    "rt_nested_splits",
    "row_splits",
    "dense_values_shape",
    "indices",
    "params_nested_splits",
    "row_partition_tensors",
}


class Player:
    """Runs the steps of one case on one library; `watched` inputs get gradients, by torch or JAX."""

    def __init__(self, library):
        self.library = library
        self.results = {}
        self.steps = []

    def tensor(self, x, on_host=False):
        if x["t"] == "variant":
            return VariantArray([self.element(e) for e in x["e"]], x["s"])
        return array(x) if on_host or x["t"] == "string" else to(self.library, array(x))

    def element(self, e):
        if e["kind"] != "ragged":
            return None
        return [array(s) for s in e["splits"]], self.tensor(e["values"])

    def value(self, x, name):
        if isinstance(x, list):
            return [self.value(y, name) for y in x]
        if "ref" not in x:
            return self.tensor(x, on_host=name in HOST)
        found = self.results[x["ref"]]
        found = getattr(found, x["field"]) if "field" in x else found
        return found[x["i"]] if "i" in x else found

    def play(self, step):
        """The step's result; later steps can refer to it."""
        inputs = {name: self.value(x, name) for name, x in step.get("in", {}).items()}
        attrs = {k: v["t"] if isinstance(v, dict) else v for k, v in step.get("attrs", {}).items()}
        do = step["do"]
        if do == "@input":
            result = self.tensor(step["value"])
        elif do.startswith("Ragged"):
            result = getattr(raw_ops, do)(**inputs, **attrs)
        else:
            result = getattr(self, do.strip("@").lower())(**inputs, **attrs)
        self.results[step["as"]] = result
        return result

    # ---- helper steps

    def mul(self, x, y):
        return x * y

    def add(self, x, y):
        return x + y

    def sum(self, x):
        return x.sum()

    def getitem(self, x, index):
        return x[tuple(index) if isinstance(index, list) else index]

    def reshape(self, tensor, shape):
        return tensor.reshape(back(shape).tolist())

    def pack(self, values, axis=0):
        return VariantArray.stack(values, axis)

    def unpack(self, value, num, axis=0):
        assert value.shape[axis] == num
        return value.unstack(axis)

    def gatherv2(self, params, indices, axis):
        return params.gather(back(indices), int(axis))

    def selectv2(self, condition, t, e):
        return VariantArray.select(back(condition), t, e)

    def zeroslike(self, x):
        return x.zeros_like()

    def addn(self, inputs):
        return VariantArray.add_n(inputs)

    def stridedslice(self, input, begin, end, strides, **masks):
        return input[slices(begin, end, strides, **masks)]

    def stridedslicegrad(self, shape, begin, end, strides, dy, **masks):
        shape = tuple(back(shape).tolist())
        where = np.arange(math.prod(shape)).reshape(shape)[slices(begin, end, strides, **masks)]
        elements = [None] * math.prod(shape)
        for i, element in zip(where.ravel().tolist(), dy.elements(), strict=True):
            elements[i] = element
        return VariantArray(elements, shape)

    def concatv2(self, values, axis):
        raise NotFoundError("TensorFlow has no kernel; weft joins variants with VariantArray.concat")


def slices(begin, end, strides, begin_mask=0, end_mask=0, shrink_axis_mask=0, ellipsis_mask=0, new_axis_mask=0):
    assert not ellipsis_mask
    assert not new_axis_mask
    keys = []
    for i, (b, e, s) in enumerate(zip(back(begin).tolist(), back(end).tolist(), back(strides).tolist(), strict=True)):
        if shrink_axis_mask >> i & 1:
            keys.append(b)
        else:
            keys.append(slice(None if begin_mask >> i & 1 else b, None if end_mask >> i & 1 else e, s))
    return tuple(keys)


def array(x):
    """A recorded tensor as NumPy."""
    if x["t"] == "string":
        out = np.empty(len(x["v"]), object)
        out[:] = x["v"]
        return out.reshape(x["s"])
    if x["t"] == "bfloat16":
        import ml_dtypes

        return np.asarray(x["v"], np.float32).astype(ml_dtypes.bfloat16).reshape(x["s"])
    if x["t"].startswith("complex"):
        pairs = np.asarray(x["v"], np.float64).reshape(-1, 2)
        return (pairs[:, 0] + 1j * pairs[:, 1]).astype(x["t"]).reshape(x["s"])
    return np.asarray(x["v"], x["t"]).reshape(x["s"])


def assert_same(got, expected):
    """`got` is what was recorded: dtype, shape and every value."""
    if isinstance(expected, list):
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            assert_same(g, e)
    elif "fields" in expected:
        for field, e in expected["fields"].items():
            assert_same(getattr(got, field), e)
    elif "indexed_slices" in expected:
        assert_same_array(back(got), dense(expected["indexed_slices"]))
    elif expected["t"] == "variant":
        assert isinstance(got, VariantArray)
        assert list(got.shape) == expected["s"]
        for element, e in zip(got.elements(), expected["e"], strict=True):
            assert (element is None) == (e["kind"] != "ragged")
            if element is not None:
                for g, s in zip(element.splits, e["splits"], strict=True):
                    assert_same_array(g, array(s))
                assert_same_array(back(element.values), array(e["values"]))
    else:
        assert_same_array(back(got), array(expected))


def assert_same_array(got, expected):
    assert got.shape == expected.shape
    if expected.dtype == object:
        assert [v.decode() if isinstance(v, bytes) else v for v in got.ravel()] == expected.ravel().tolist()
        return
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def dense(slices_):
    out = np.zeros(array(slices_["dense_shape"]), slices_["values"]["t"])
    np.add.at(out, array(slices_["indices"]), array(slices_["values"]))
    return out


def attributes(op):
    """The attribute names of a raw op."""
    return [p for p in inspect.signature(op).parameters if p not in op.inputs]
