"""Values: arrays, nested values and errors are the same at the other end; what cannot travel is refused with a sentence."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.libraries import need

need("msgspec")

from weft import RaggedTensor, errors  # noqa: E402
from weft.ray import frames, values  # noqa: E402
from weft.ray.values import decoder_of, encoder  # noqa: E402


def travel(value):
    """`value` as it comes out at the other end."""
    arrays = []
    tree = values.pack_tree(value, arrays)
    specs, buffers = values.pack_arrays(arrays)
    data = b"".join(frames.pack(1, 1, encoder.encode([tree, specs]), buffers))
    reader = frames.FrameReader(frames.MOST_ARRAYS)
    found = []
    while data:
        room = reader.room()
        size = min(len(room), len(data))
        room[:size], data = data[:size], data[size:]
        room.release()
        found += reader.advance(size)
    (frame,) = found
    tree, specs = decoder_of(list).decode(frame.message)
    return values.unpack_tree(tree, values.unpack_arrays(specs, frame.arrays))


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
SCALARS |= st.complex_numbers()
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(-5, 5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(TREES)
def test_nested_values(value):
    assert repr(travel(value)) == repr(value)


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "<U3",
        "S4",
        ">f4",
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4), (200, 200)])
def test_numpy(dtype, shape):
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    y = travel({"x": [x, x[::-1] if shape else x]})["x"]
    assert y[0].dtype == x.dtype
    np.testing.assert_array_equal(y[0], x)
    np.testing.assert_array_equal(y[1], x[::-1] if shape else x)
    assert y[0].flags.writeable


def test_torch():
    need("torch")
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint8):
        for shape in ((), (0, 3), (3,), (2, 3), (300, 300)):
            x = (torch.rand(shape) * 100).to(dtype)
            y, z = travel((x, x.t() if x.dim() == 2 else x))
            assert y.dtype is dtype
            torch.testing.assert_close(y, x, rtol=0, atol=0)
            torch.testing.assert_close(z, x.t() if x.dim() == 2 else x, rtol=0, atol=0)


def test_tensors_of_any_strides():
    need("torch")
    import torch

    for x in (torch.ones(1).expand(1, 1), torch.ones(()).expand(3, 2), torch.arange(6.0)[::2], torch.ones(2, 1, 3).mT):
        assert torch.equal(travel(x), x)
    x = torch.tensor([1 + 2j, 3.0]).conj()
    assert torch.equal(travel(x), x)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    label: str = ""


def test_dataclasses_and_named_tuples():
    value = Pair(Point(np.ones(2), "a"), [Point(3)])
    found = travel(value)
    assert type(found) is Pair
    assert type(found.first) is Point
    np.testing.assert_array_equal(found.first.x, np.ones(2))
    assert found.second == [Point(3)]


def test_a_class_that_is_not_here_is_refused():
    elsewhere = dataclasses.make_dataclass("Elsewhere", ["x"])
    other_fields = dataclasses.make_dataclass("Point", ["x", "y"])
    other_fields.__module__ = __name__
    for value in (elsewhere(1), other_fields(1, 2)):
        with pytest.raises(errors.InvalidArgumentError, match="import it"):
            travel(value)


def test_scalars_of_numpy_keep_their_type():
    assert type(travel([np.float32(2.5)])[0]) is np.float32


@pytest.mark.parametrize(
    "bad", [object(), {1, 2}, [object()], 2**70, np.array([object()]), lambda: 0, {(1, 2): 3}, {2**70: 1}]
)
def test_what_cannot_travel_is_refused(bad):
    with pytest.raises(errors.InvalidArgumentError):
        travel(bad)


def test_a_shape_that_lies_is_refused():
    for spec in (("numpy", "<f4", (5,), False), ("numpy", "<f4", (-1,), False), ("numpy", "<f4", (2**61, 2), False)):
        with pytest.raises(frames.BadFrame):
            values.unpack_arrays([spec], bytearray(16))
    with pytest.raises(frames.BadFrame):
        values.unpack_arrays([("numpy", "<f4", (2,), False)], bytearray(16))


class Odd(Exception):
    pass


def test_errors_keep_their_class_if_the_other_end_has_it():
    def again(error):
        return values.unpack_error(decoder_of(frames.ErrorMessage).decode(encoder.encode(values.pack_error(error))))

    error = again(errors.UnavailableError("full"))
    assert (type(error), str(error)) == (errors.UnavailableError, "full")
    assert type(again(ValueError("x"))) is ValueError
    assert again(KeyError("k")).args == ("k",)
    odd = again(Odd("strange"))
    assert (type(odd), str(odd)) == (errors.UnknownError, "Odd: strange")
    noted = ValueError("x")
    noted.add_note("more")
    assert again(noted).__notes__ == ["more"]


@pytest.mark.parametrize("rows", [[], [[]], [[1.0], [], [2.0, 3.0]], [[[1, 2], []], []]], ids=str)
def test_ragged_tensors(rows):
    given = RaggedTensor.from_rows(rows)
    found = travel({"x": given})["x"]
    assert found.to_list() == given.to_list()
    assert found.flat_values.dtype == given.flat_values.dtype


def test_ragged_tensors_with_wrong_splits():
    given = RaggedTensor.from_rows([[1.0], [2.0, 3.0]])
    arrays = []
    tree = values.pack_tree([given], arrays)
    arrays[0] = np.array([0, 2, 1])
    tree = decoder_of(list).decode(encoder.encode(tree))
    with pytest.raises(errors.InvalidArgumentError):
        values.unpack_tree(tree, arrays)
