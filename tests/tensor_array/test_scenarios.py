"""The scenarios of TensorFlow's own tests of arrays, by raw ops, by hand-written pull-backs and through torch."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import back, need, to
from support.tensor_array_calls import (
    INVALID,
    close,
    concat,
    f32,
    gather,
    grad,
    make,
    read,
    scatter,
    size,
    split,
    write,
)

import weft
from weft import TensorArray, errors, raw_ops

try:
    import torch
except ImportError:  # the tests that need it say so
    torch = None

DTYPES = ["float32", "float64", "int32", "int64", "complex64", "complex128", "string"]


def of(dtype, values):
    return np.array(values).astype(str).astype(object) if dtype == "string" else np.array(values).astype(dtype)


def test_write_read_three_shapes():
    handle = make(3)
    values = [f32(4, 5)[None], f32(1)[None], np.float32(-3)]
    for index, value in enumerate(values):
        write(handle, index, value)
    for index, value in enumerate(values):
        np.testing.assert_array_equal(read(handle, index), value, strict=isinstance(value, np.ndarray))
    close(handle)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_pack_and_concat(dtype):
    handle = make(3, dtype)
    for index, value in enumerate(([[4, 5]], [[6, 7]], [[8, 9]])):
        write(handle, index, of(dtype, value))
    np.testing.assert_array_equal(gather(handle, [0, 1, 2], dtype), of(dtype, [[[4, 5]], [[6, 7]], [[8, 9]]]))
    handle = make(3, dtype)
    for index, value in enumerate(([[4, 5], [104, 105], [204, 205]], [[6, 7], [106, 107]], [[8, 9]])):
        write(handle, index, of(dtype, value))
    joined = concat(handle, dtype)
    wanted = [[4, 5], [104, 105], [204, 205], [6, 7], [106, 107], [8, 9]]
    np.testing.assert_array_equal(joined.value, of(dtype, wanted))
    assert joined.lengths.tolist() == [3, 2, 1]


def test_empty_elements_pack_and_text_with_empty_pieces():
    handle = make(3)
    for index in range(3):
        write(handle, index, np.zeros((0, 1), np.float32))
    assert gather(handle, [0, 1, 2]).shape == (3, 0, 1)
    handle = make(3, "string")
    for index, value in enumerate(([], ["a", "b"], [])):
        write(handle, index, np.array(value, object))
    assert concat(handle, "string").value.tolist() == ["a", "b"]


def test_concat_in_a_loop_with_empty_pieces():
    out = TensorArray(size=4, infer_shape=False)
    for turn in range(4):
        handle = make(2, "int32")
        write(handle, 0, np.ones(3 if turn == 0 else 0, np.int32))
        write(handle, 1, np.array([] if turn == 0 else [8, 9], np.int32))
        out.write(turn, concat(handle, "int32").value)
    assert out.concat().tolist() == [1, 1, 1, 8, 9, 8, 9, 8, 9]


@pytest.mark.parametrize("attributes", [{"element_shape": [1, 2]}, {"identical_element_shapes": True}])
def test_what_is_missing_is_filled_with_zeros(attributes):
    wanted = [[[4, 5]], [[0, 0]], [[6, 7]]]
    for use in (
        lambda h: [read(h, i).tolist() for i in range(3)],
        lambda h: gather(h, [0, 1, 2]).tolist(),
        lambda h: concat(h).value.reshape(3, 1, 2).tolist(),
    ):
        handle = make(3, **attributes)
        write(handle, 0, f32(4, 5)[None])
        write(handle, 2, f32(6, 7)[None])
        assert use(handle) == wanted


@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_unpack_and_split_then_read(dtype):
    for value in ([1, 0, 3], [[1, 2], [0, 4], [5, 6]], np.zeros((3, 0))):
        handle = make(3, dtype)
        scatter(handle, [0, 1, 2], of(dtype, value))
        for index in range(3):
            np.testing.assert_array_equal(read(handle, index, dtype), of(dtype, value)[index])
    for lengths, value in (([0, 0, 0], []), ([2, 0, 1], [1, 2, 3]), ([2, 0, 1], [[1, 101], [2, 201], [3, 301]])):
        handle = make(3, dtype)
        split(handle, of(dtype, value), lengths)
        pieces = np.split(of(dtype, value), np.cumsum(lengths)[:-1])
        for index in range(3):
            np.testing.assert_array_equal(read(handle, index, dtype), pieces[index])


def test_gradient_arrays_are_independent_of_the_forward_values():
    handle = make(3)
    for index, value in enumerate((f32(4, 5)[None], f32(1)[None], np.float32(-3))):
        write(handle, index, value)
    gradient = grad(handle, "grad")
    for index, value in enumerate((f32(5, 6)[None], f32(2)[None], np.float32(-2))):
        write(gradient, index, value)
    assert [read(h, i).tolist() for h in (handle, gradient) for i in range(3)] == [
        [[4, 5]], [[1]], -3, [[5, 6]], [[2]], -2,
    ]  # fmt: skip


def test_the_gradient_of_a_grown_array_has_its_size():
    handle = make(0, dynamic_size=True)
    for index in range(3):
        write(handle, index, f32(index))
    gradient = grad(handle)
    assert size(gradient) == 3
    write(grad(handle), 1, f32(7))
    assert read(gradient, 1).tolist() == [7]


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "complex64", "complex128"])
def test_gradient_writes_add_and_forward_writes_do_not(dtype):
    handle = make(3, dtype)
    gradient = grad(handle)
    for value in (3, 4, 5):
        write(gradient, 0, np.array(value, dtype))
    assert read(gradient, 0, dtype) == 12
    write(handle, 0, np.array(3, dtype))
    with pytest.raises(INVALID):
        write(handle, 0, np.array(4, dtype))
    write(gradient, 2, np.array(3, dtype))
    with pytest.raises(INVALID):
        write(gradient, 2, np.array([1], dtype))


@pytest.mark.parametrize(("shape", "good", "bad"), [([2, 3], (4, 5, 2, 3), (2, 3)), (None, (4, 5, 7), (7,))])
def test_grad_with_shape(shape, good, bad):
    gradient = grad(make(3, element_shape=shape), "g", [4, 5])
    with pytest.raises(INVALID):
        write(gradient, 0, np.zeros(bad, np.float32))
    write(gradient, 0, np.ones(good, np.float32))
    assert read(gradient, 0).shape == good


def test_two_arrays_in_one_program():
    first, second = make(1), make(1)
    write(first, 0, f32(4))
    write(second, 0, f32(5))
    assert (read(first, 0) + read(second, 0)).tolist() == [9]


def test_unpack_and_split_of_a_growing_array_then_one_more(library):
    for fill in (lambda h, x: scatter(h, [0, 1, 2], x), lambda h, x: split(h, x, [1, 1, 1])):
        handle = make(3, dynamic_size=True, clear_after_read=False)
        fill(handle, to(library, f32(1, 2, 3)))
        write(handle, 3, read(handle, 0))
        assert size(handle) == 4
        assert back(read(handle, 3)).ravel().tolist() == [1]


def test_nothing_at_all():
    with pytest.raises(errors.UnimplementedError):
        gather(make(0), [])
    assert gather(make(0), [], element_shape=[3, 5]).shape == (0, 3, 5)
    joined = concat(make(0), element_shape_except0=[5])
    assert (joined.value.shape, joined.lengths.tolist()) == ((0, 5), [])
    assert TensorArray("float32", size=0, element_shape=[5, 10]).stack().shape == (0, 5, 10)


def test_three_scatters_into_one_array():
    handle = make(5, "int32")
    for indices, values in (([1, 2], [20, 30]), ([0, 3], [10, 40]), ([4], [50])):
        scatter(handle, indices, np.array(values, np.int32))
    assert gather(handle, range(5), "int32").tolist() == [10, 20, 30, 40, 50]


def test_a_first_dimension_may_vary():
    array = TensorArray("float32", size=2, element_shape=[None, 10, 20], infer_shape=False)
    array.write(0, np.zeros((50, 10, 20), np.float32)).write(1, np.zeros((6, 10, 20), np.float32))
    assert array.concat().shape == (56, 10, 20)
    with pytest.raises(INVALID):
        TensorArray("float32", size=2, element_shape=[None, 10, 20]).write(0, np.zeros((10, 20), np.float32))
    with pytest.raises(INVALID):
        TensorArray(size=2).write(0, f32(1, 2)).write(1, f32(1))


# ----- gradients, by torch -----


def tensor(*values):
    return torch.tensor(values, requires_grad=True)


def test_the_second_derivative_of_a_square():
    need("torch")
    x = tensor(3.0)
    array = TensorArray(size=1).write(0, x * x)
    (first,) = torch.autograd.grad(array.read(0).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert (first.item(), second.item()) == (6, 2)


def test_gradients_of_reads_gather_and_concat_add_up():
    need("torch")
    a, b = tensor(-1.0, 1.0), tensor(-10.0, 10.0)
    array = TensorArray(size=2).write(0, a).write(1, b)
    given = [torch.tensor(g) for g in ([[2.0, 3.0], [4.0, 5.0]], [-0.5, 1.5], [20.0, 30.0, 40.0, 50.0])]
    torch.autograd.backward([array.stack(), array.read(0), array.concat()], given)
    assert (a.grad.tolist(), b.grad.tolist()) == ([21.5, 34.5], [44.0, 55.0])


def test_what_is_not_read_has_no_gradient():
    need("torch")
    x = tensor(5.0, 10.0)
    TensorArray(size=2).unstack(x).read(0).backward()
    assert x.grad.tolist() == [1, 0]
    y = tensor(5.0, 10.0)
    TensorArray(size=2).write(0, y[0]).write(1, y[1]).read(0).backward()
    assert y.grad.tolist() == [1, 0]


def test_gradients_of_a_partial_gather():
    need("torch")
    x = torch.arange(20.0).reshape(10, 2).requires_grad_()
    array = TensorArray(size=10).scatter(range(9, -1, -1), x)
    array.gather([1, 8]).backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    wanted = torch.zeros(10, 2)
    wanted[8], wanted[1] = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loop_that_writes_its_state(dynamic):
    need("torch")
    v0, var, state = tensor(-5.0, -6.0), tensor(1.0, 2.0), tensor(0.5)
    array = TensorArray(size=0 if dynamic else 3, dynamic_size=dynamic, dtype="float32")
    h = state
    for step in range(3):
        array.write(step, v0 + var + h)
        h = h + 1
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    array.stack().backward(weights)
    assert (v0.grad.tolist(), var.grad.tolist(), state.grad.tolist()) == ([9, 12], [9, 12], [21])


def test_two_loops_over_one_array():
    need("torch")
    x = torch.tensor(1.0, requires_grad=True)
    array = TensorArray(size=16)
    array.write(0, x)
    for step in range(1, 16):
        array.write(step, array.read(step - 1) + x)
    total = sum(array.read(step) for step in range(0, 16, 15)) + 14 * array.read(0)
    total.backward()
    assert x.grad.item() == 31


def test_two_gradient_passes_do_not_mix():
    a, b = np.float32([2, 3]), np.float32([5, 7])
    handle, flow = raw_ops.TensorArrayV3(2, "float32", clear_after_read=False)
    flow, back_a = weft.vjp(raw_ops.TensorArrayWriteV3, handle, 0, a, flow)
    flow, back_b = weft.vjp(raw_ops.TensorArrayWriteV3, handle, 1, b, flow)
    _, read_a = weft.vjp(raw_ops.TensorArrayReadV3, handle, 0, flow, "float32")
    _, read_b = weft.vjp(raw_ops.TensorArrayReadV3, handle, 1, flow, "float32")
    ones = np.ones(2, np.float32)
    for scale in (1, 3):
        with weft.gradient_source():
            read_a(scale * ones)
            read_b(2 * scale * ones)
            assert back_b()["value"].tolist() == [2 * scale] * 2
            assert back_a()["value"].tolist() == [scale] * 2
