"""The array ops: values of every dtype and library, what may be an element, and aliasing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.libraries import back, need, to
from support.tensor_array_calls import INVALID, concat, f32, gather, grad, make, read, scatter, size, split, write

import weft
from weft import raw_ops

NUMBERS = [
    *["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"],
    *["float16", "bfloat16", "float32", "float64", "complex64", "complex128"],
]


def holds(library, dtype):
    """Whether the library has the dtype by default."""
    return library != "jax" or dtype not in ("int64", "uint64", "float64", "complex128")


@pytest.mark.parametrize("dtype", [*NUMBERS, "bool"])
def test_every_dtype_comes_back_as_it_went_in(dtype, library):
    if not holds(library, dtype):
        library = "numpy"
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    values = [np.arange(6).reshape(2, 3).astype(kind), (np.arange(6).reshape(2, 3) % 2).astype(kind)]
    handle = make(3, dtype, element_shape=[2, 3], clear_after_read=False)
    for index, value in enumerate(values):
        write(handle, index, to(library, value))
    stacked = np.stack([*values, np.zeros((2, 3), kind)])
    np.testing.assert_array_equal(back(read(handle, 1, dtype)), values[1], strict=True)
    np.testing.assert_array_equal(back(gather(handle, [0, 1, 2], dtype)), stacked, strict=True)
    joined = concat(handle, dtype)
    np.testing.assert_array_equal(back(joined.value), stacked.reshape(6, 3), strict=True)
    np.testing.assert_array_equal(back(joined.lengths), np.array([2, 2, 2]), strict=True)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_number_adds_up(dtype, library):
    if not holds(library, dtype):
        library = "numpy"
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    gradient = grad(make(2, dtype))
    for value in (3, 4, 5):
        write(gradient, 0, to(library, np.array([value, 1], kind)))
    np.testing.assert_array_equal(back(read(gradient, 0, dtype)), np.array([12, 3], kind), strict=True)


@pytest.mark.parametrize("dtype", ["bool", "string"])
def test_what_cannot_be_added_is_refused(dtype):
    gradient = grad(make(2, dtype))
    value = np.array(["a"], object) if dtype == "string" else np.array([True])
    write(gradient, 0, value)
    with pytest.raises(INVALID):
        write(gradient, 0, value)
    with pytest.raises(INVALID):
        scatter(gradient, [1, 1], np.stack([value, value]))
    np.testing.assert_array_equal(read(gradient, 0, dtype), value)


@pytest.mark.parametrize("kind", [np.str_, np.bytes_, np.dtypes.StringDType(), object])
def test_text_of_every_kind_is_one_dtype(kind):
    handle = make(2, "string")
    write(handle, 0, np.array(["ab", "c"], kind))
    write(handle, 1, ["d", "e"] if kind is not np.bytes_ else [b"d", b"e"])
    stacked = gather(handle, [0, 1], "string")
    assert stacked.dtype == object
    assert [x if isinstance(x, str) else x.decode() for x in stacked.flat] == ["ab", "c", "d", "e"]


def test_objects_that_are_no_text_are_refused():
    with pytest.raises(INVALID):
        write(make(1, "string"), 0, np.array([1, None], object))


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), "float32", "float", np.dtype(">f4")])
def test_dtypes_are_given_in_many_ways(dtype):
    handle = make(1, dtype)
    write(handle, 0, f32(1))
    assert read(handle, 0, dtype).dtype == np.float32


def test_dtypes_of_other_libraries(library):
    need("torch")
    import torch

    dtype = torch.float32 if library == "torch" else np.float32
    handle = make(1, dtype)
    write(handle, 0, to(library, f32(1)))
    assert back(read(handle, 0, dtype)) == 1


def test_foreign_byte_order_and_strides(library):
    handle = make(3, "float32", clear_after_read=False)
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    write(handle, 0, to(library, base).T[::1] if library == "torch" else to(library, base).T)
    write(handle, 1, base[:, ::-1].T if library == "numpy" else to(library, base[:, ::-1].T.copy()))
    write(handle, 2, base.T.astype(">f4") if library == "numpy" else to(library, base.T.copy()))
    wanted = np.stack([base.T, base[:, ::-1].T, base.T])
    np.testing.assert_array_equal(back(gather(handle, [0, 1, 2])), wanted, strict=True)


def test_python_values_take_the_dtype_of_the_array(library):
    handle = make(3, "float32")
    write(handle, 0, to(library, f32(1, 2)))
    write(handle, 1, [3, 4])
    write(handle, 2, [5.0, 6.0])
    np.testing.assert_array_equal(back(gather(handle, [0, 1, 2])), [[1, 2], [3, 4], [5, 6]])


@pytest.mark.parametrize("value", [1.5, True, "a", 2**31, [[1], [2, 3]], None])
def test_python_values_that_are_no_int32_are_refused(value):
    with pytest.raises(INVALID):
        write(make(1, "int32"), 0, value)


def test_arguments_by_position_and_results_by_name():
    created = raw_ops.TensorArrayV3(2, "float32", None, False, True, False, "mine", None)
    assert created._fields == ("handle", "flow")
    assert "mine" in repr(created.handle)
    flow = raw_ops.TensorArrayWriteV3(created.handle, np.int32(0), f32(1, 2), created.flow, None)
    flow = raw_ops.TensorArrayScatterV3(created.handle, np.array([1], np.int32), f32(3, 4)[None], flow)
    joined = raw_ops.TensorArrayConcatV3(created.handle, flow, "float32", None, "name")
    assert joined._fields == ("value", "lengths")
    np.testing.assert_array_equal(joined.value, [1, 2, 3, 4])
    made = raw_ops.TensorArrayGradWithShape(created.handle, flow, np.array([2], np.int32), b"source")
    assert made._fields == ("grad_handle", "flow_out")
    again = raw_ops.TensorArrayGradV3(created.handle, flow, "source")
    assert again.grad_handle is made.grad_handle
    assert raw_ops.TensorArrayCloseV3(created.handle) is None


def test_size_and_flow_are_of_the_library_they_came_from():
    need("torch")
    import torch

    created = raw_ops.TensorArrayV3(torch.tensor(2, dtype=torch.int32), torch.float32)
    assert created.flow.dtype == torch.float32
    counted = raw_ops.TensorArraySizeV3(created.handle, created.flow)
    assert (counted.dtype, int(counted)) == (torch.int32, 2)
    assert raw_ops.TensorArraySizeV3(created.handle, 0.0).dtype == np.int32


def test_a_size_may_be_a_tensor_of_a_transform():
    need("torch")
    import torch

    def value(x):
        made = raw_ops.TensorArrayV3(torch.tensor(1, dtype=torch.int32), torch.float32)
        flow = raw_ops.TensorArrayWriteV3(made.handle, 0, x, made.flow)
        return raw_ops.TensorArrayReadV3(made.handle, 0, flow, torch.float32).square().sum()

    assert torch.func.grad(value)(torch.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


def test_jax_lengths_may_be_int32():
    need("jax")
    import jax.numpy as jnp

    handle = make(2)
    split(handle, jnp.asarray(f32(1, 2, 3)), jnp.asarray([2, 1], jnp.int32))
    assert back(concat(handle).value).tolist() == [1, 2, 3]


def test_an_array_of_one_handle_is_a_handle():
    handle = make(2)
    assert size([handle]) == 2
    assert size(np.array([handle], object)) == 2


# ----- aliasing -----


def test_what_was_written_is_a_copy(library):
    if library == "jax":
        library = "numpy"  # JAX arrays cannot be changed
    value, rows = to(library, f32(1, 2)), to(library, f32(3, 4, 5, 6).reshape(2, 2))
    handle = make(6, clear_after_read=False)
    write(handle, 0, value)
    scatter(handle, [1, 2], rows)
    gradient = grad(handle)
    write(gradient, 0, value)
    write(gradient, 0, value)
    scatter(gradient, [1, 2], rows)
    scatter(gradient, [1, 2], rows)
    assert back(value).tolist() == [1, 2]
    assert back(rows).tolist() == [[3, 4], [5, 6]]
    value[:] = -1
    rows[:] = -1
    assert back(gather(handle, [0, 1, 2])).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert back(gather(gradient, [0, 1, 2])).tolist() == [[2, 4], [6, 8], [10, 12]]


def test_split_copies_too(library):
    if library == "jax":
        library = "numpy"
    for lengths in ([1, 2], [2, 1], [1, 1, 1]):
        value = to(library, f32(1, 2, 3))
        handle = make(len(lengths))
        split(handle, value, lengths)
        value[:] = -1
        assert back(concat(handle).value).tolist() == [1, 2, 3]


def test_what_was_read_is_the_callers_own(library):
    if library == "jax":
        library = "numpy"
    handle = make(3, clear_after_read=False)
    scatter(handle, [0, 1], to(library, f32(1, 2, 3, 4).reshape(2, 2)))
    write(handle, 2, to(library, f32(5)))
    for index, wanted in enumerate([[1, 2], [3, 4], [5]]):
        first = read(handle, index)
        first[:] = -1
        assert back(read(handle, index)).tolist() == wanted
    stacked = gather(handle, [0, 1])
    stacked[:] = -1
    assert back(gather(handle, [0, 1])).tolist() == [[1, 2], [3, 4]]


def test_a_piece_does_not_pin_what_it_was_cut_from():
    need("torch")
    import torch

    for convert in (torch.from_numpy, np.asarray):
        handle = make(4)
        scatter(handle, range(4), convert(np.ones((4, 1000), np.float32)))
        piece = read(handle, 0)
        held = piece.untyped_storage().nbytes() if convert is torch.from_numpy else piece.nbytes
        assert held == 4000
        assert getattr(piece, "base", None) is None or convert is torch.from_numpy


# ----- what else may be an element -----


def test_handles_and_opaque_things_are_elements_too():
    handle, element = make(2, "resource"), make(1)
    write(handle, 0, element)
    assert read(handle, 0, "resource") is element
    with pytest.raises(INVALID):
        read(handle, 1, "resource")
    write(handle, 1, element)
    with pytest.raises(INVALID, match="cannot be joined"):
        gather(handle, [1], "resource")


class Variant:
    """A stand-in for an array of variants: what an element must have, and no more."""

    dtype = "variant"

    def __init__(self, shape):
        self.shape = shape

    @classmethod
    def stack(cls, values):
        return cls((len(values), *values[0].shape))


def test_variant_arrays_are_elements_too():
    handle = make(2, "variant", clear_after_read=False)
    write(handle, 0, Variant((2,)))
    write(handle, 1, Variant((2,)))
    assert gather(handle, [0, 1], "variant").shape == (2, 2)
    assert read(handle, 0, "variant").shape == (2,)


def test_empty_results_keep_library_and_dtype(library):
    handle = make(2, "float32")
    write(handle, 0, to(library, np.zeros((0, 2), np.float32)))
    write(handle, 1, to(library, np.zeros((3, 2), np.float32)))
    empty = gather(handle, [], element_shape=[4])
    assert type(empty) is type(to(library, f32(1)))
    assert tuple(empty.shape) == (0, 4)


def test_importing_weft_imports_no_framework():
    import subprocess
    import sys

    code = (
        "import sys, weft; weft.TensorArray().append(1.0); print(sorted({'torch', 'jax', 'autograd'} & {*sys.modules}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert weft.TensorArray is not None


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_run_of_elements_is_as_any_others(known, clear):
    """Indices that follow one another are handled as a slice; the same ones in another order are not."""
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    found = []
    for order in ([2, 3, 4], [3, 2, 4]):
        handle = make(6, element_shape=[2], clear_after_read=clear)
        scatter(handle, order, values[order])
        for bad in ([1, 2], [2, 1], [4, 5, 6], [-1, 0]):
            with pytest.raises(INVALID):
                scatter(handle, bad, values[: len(bad)])
        for index in range(2 if known else 0):
            write(handle, index, values[index])
        rows = [values[i] for i in range(5)] if known else [np.zeros(2, np.float32)] * 2 + [*values[2:5]]
        np.testing.assert_array_equal(back(gather(handle, range(5))), np.stack(rows))
        if clear:
            with pytest.raises(INVALID):
                gather(handle, order)
            with pytest.raises(INVALID):
                scatter(handle, order, values[order])
        else:
            found.append(back(gather(handle, order))[np.argsort(order)])
            np.testing.assert_array_equal(back(gather(handle, range(5))), np.stack(rows))
    for got in found:
        np.testing.assert_array_equal(got, values[2:5])


def test_a_run_of_scalars_cannot_be_concatenated():
    handle = make(3)
    scatter(handle, [0, 1, 2], f32(1, 2, 3))
    with pytest.raises(INVALID):
        concat(handle)
    np.testing.assert_array_equal(back(gather(handle, [0, 1, 2])), f32(1, 2, 3))
