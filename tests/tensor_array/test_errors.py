"""What must be refused, with which error, and that a refused call changes nothing."""

from __future__ import annotations

from contextlib import nullcontext

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

from weft import errors, raw_ops
from weft.tensor_array.rules import MAX_SIZE


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: make(-1), INVALID),
        (lambda: make([1, 2]), INVALID),
        (lambda: make(np.int64(1)), INVALID),
        (lambda: make(1.0), INVALID),
        (lambda: make(2**31 - 1), errors.ResourceExhaustedError),
        (lambda: make(MAX_SIZE + 1), errors.ResourceExhaustedError),
        (lambda: make(2**40), INVALID),
        (lambda: make(1, "nonsense"), INVALID),
        (lambda: make(1, "qint8"), INVALID),
        (lambda: make(1, []), TypeError),
        (lambda: make(1, element_shape=3), TypeError),
        (lambda: make(1, element_shape="ab"), TypeError),
        (lambda: make(1, element_shape=[1.5]), TypeError),
        (lambda: make(1, element_shape=[-2]), INVALID),
        (lambda: make(1, element_shape=[2**62, 4]), INVALID),
        (lambda: make(1, element_shape=[1] * 300), INVALID),
        (lambda: make(1, dynamic_size="yes"), TypeError),
        (lambda: make(1, clear_after_read=None), TypeError),
        (lambda: make(1, tensor_array_name=3), TypeError),
        (lambda: write(make(1), [0], f32(1)), INVALID),
        (lambda: write(make(1), np.int64(0), f32(1)), INVALID),
        (lambda: write(make(1), 0.0, f32(1)), INVALID),
        (lambda: write(make(1), True, f32(1)), INVALID),
        (lambda: write(make(1), 2**31, f32(1)), INVALID),
        (lambda: write(make(1), None, f32(1)), INVALID),
        (lambda: write(None, 0, f32(1)), INVALID),
        (lambda: write("handle", 0, f32(1)), INVALID),
        (lambda: write([], 0, f32(1)), INVALID),
        (lambda: write(np.array([], object), 0, f32(1)), INVALID),
        (lambda: write([make(1), make(1)], 0, f32(1)), INVALID),
        (lambda: write(make(1), 0, np.float64(1)), INVALID),
        (lambda: raw_ops.TensorArrayWriteV3(make(1), 0, f32(1), np.float64(0)), INVALID),
        (lambda: raw_ops.TensorArrayWriteV3(make(1), 0, f32(1), None), INVALID),
        (lambda: raw_ops.TensorArrayWriteV3(make(1), 0, f32(1), True), INVALID),
        (lambda: raw_ops.TensorArrayReadV3(make(1), 0, "flow", "float32"), INVALID),
        (lambda: scatter(make(2), 0, f32(1)), INVALID),
        (lambda: scatter(make(2), [[0]], f32(1)), INVALID),
        (lambda: scatter(make(2), [0.5], f32(1)), INVALID),
        (lambda: scatter(make(2), np.array([0]), f32(1)), INVALID),
        (lambda: scatter(make(2), [0], 1.0), INVALID),
        (lambda: split(make(2), f32(1, 2), np.array([1, 1], np.int32)), INVALID),
        (lambda: split(make(2), 1.0, [1, 1]), INVALID),
        (lambda: split(make(2), f32(1, 2), 2), INVALID),
        (lambda: split(make(3), f32(1), [2**63 - 1, 2**63 - 1, 3]), INVALID),
        (lambda: gather(make(2), [0], element_shape=[-5]), INVALID),
        (lambda: concat(make(2), element_shape_except0=[2**40, 2**40]), INVALID),
        (lambda: grad(make(2), "g", 2), INVALID),
        (lambda: grad(make(2), "g", [[2]]), INVALID),
        (lambda: grad(make(2), "g", [-1]), INVALID),
        (lambda: grad(make(2), "g", np.array([2])), INVALID),
        (lambda: grad(make(2), "g", [2**31 - 1] * 3), INVALID),
        (lambda: grad(make(2), 3), TypeError),
        (lambda: grad(make(2), None, [2]), TypeError),
        (lambda: read(make(1, element_shape=[2**40]), 0), errors.ResourceExhaustedError),
        (lambda: read(make(1, element_shape=[1] * 65), 0), INVALID),
        (lambda: concat(make(4, element_shape=[2**62])), errors.ResourceExhaustedError),
        (lambda: gather(make(2, element_shape=[2**36]), [0, 1]), errors.ResourceExhaustedError),
        (lambda: concat(make(2, element_shape=[2**36])), errors.ResourceExhaustedError),
        (lambda: write(make(1, dynamic_size=True), MAX_SIZE, f32(1)), errors.ResourceExhaustedError),
        (lambda: scatter(make(1, dynamic_size=True), [MAX_SIZE], f32(1)), errors.ResourceExhaustedError),
        (lambda: read(grad(make(1, element_shape=[])), MAX_SIZE), errors.ResourceExhaustedError),
        (lambda: gather(grad(make(1, element_shape=[])), [2**31 - 1]), errors.ResourceExhaustedError),
    ],
)  # fmt: skip
def test_bad_input(call, error):
    with pytest.raises(error):
        call()


def test_an_error_says_which_op_and_which_arguments():
    with pytest.raises(INVALID, match=r"dtype of .*, float32, got int32") as caught:
        write(make(1), 0, np.zeros((2, 3), np.int32))
    assert caught.value.__notes__ == [
        "in weft.raw_ops.TensorArrayWriteV3(index: int, value: int32[2, 3], flow_in: float)"
    ]


def test_elements_are_of_one_library():
    need("torch")
    import torch

    handle = make(3)
    write(handle, 0, f32(1))
    with pytest.raises(INVALID, match="library"):
        write(handle, 1, torch.ones(1))
    with pytest.raises(INVALID, match="library"):
        scatter(handle, [1], torch.ones(1, 1))
    with pytest.raises(INVALID, match="library"):
        write(grad(handle), 1, torch.ones(1))
    other = make(3)
    with pytest.raises(INVALID):
        write(other, 5, torch.ones(1))
    write(other, 0, f32(1))  # the refused write did not decide the library


def state(handle):
    """All that a call may change."""
    storage, rules = handle.storage, handle.rules
    return (
        handle.size, handle.element_shape, rules.is_dynamic, handle._split_count, rules.is_closed, storage.backend,
        bytes(storage.states), dict(storage.other_shapes), sorted(handle._gradients), storage.blocks and storage.blocks.count,
        sorted(storage.values),
    )  # fmt: skip


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda h, as_: write(h, 0, as_(f32(1, 2))),  # twice
        lambda h, as_: write(h, 1, as_(f32(1, 2))),  # after a read
        lambda h, as_: write(h, 7, as_(zeros(2, 3))),  # would grow, wrong shape
        lambda h, as_: write(h, -1, as_(f32(1, 2))),
        lambda h, as_: write(h, 7, as_(np.zeros(2, np.int32))),
        lambda h, as_: scatter(h, [5, 6, 0], as_(zeros(3, 2))),
        lambda h, as_: scatter(h, [5, 6, 5], as_(zeros(3, 2))),
        lambda h, as_: scatter(h, [5, -1], as_(zeros(2, 2))),
        lambda h, as_: scatter(h, [5, 2**31 - 1], as_(zeros(2, 2))),
        lambda h, as_: scatter(h, [5], as_(zeros(1, 2, 3))),
        lambda h, as_: split(h, as_(zeros(12, 2)), [2] * 6),
        lambda h, as_: split(h, as_(zeros(2)), [1, 1]),
        lambda h, as_: split(h, as_(zeros(12)), [2] * 6),  # element 0 is there
        lambda h, as_: split(h, as_(zeros(12)), [1, 2, 3, 0, 5, 1]),
        lambda h, as_: read(h, 1),  # cleared
        lambda h, as_: read(h, 4),
        lambda h, as_: read(h, 0, "int32"),
        lambda h, as_: gather(h, [2, 1]),
        lambda h, as_: gather(h, [2, 2]),
        lambda h, as_: gather(h, [0, 9]),
        lambda h, as_: gather(h, [0, 2], element_shape=[3]),
        lambda h, as_: gather(h, [0], element_shape=[1]),
        lambda h, as_: concat(h),
        lambda h, as_: grad(h, "new", [2**31 - 1, 2**31 - 1, 3]),
        lambda h, as_: grad(h, "new", [-1]),
    ],
)
def test_a_refused_call_changes_nothing(call, library):
    handle = make(4, element_shape=[None], dynamic_size=True)
    write(handle, 0, to(library, f32(1, 2)))
    write(handle, 1, to(library, f32(3, 4)))
    read(handle, 1)
    write(handle, 2, to(library, f32(5, 6)))
    before = state(handle)
    with pytest.raises(INVALID):
        call(handle, lambda x: to(library, x))
    assert state(handle) == before
    assert back(read(handle, 0)).tolist() == [1, 2]
    assert back(read(handle, 2)).tolist() == [5, 6]


@pytest.mark.parametrize(
    "call",
    [
        lambda g: write(g, 0, f32(1, 2)),  # not prepended
        lambda g: write(g, 0, np.zeros((3, 3), np.float32)),
        lambda g: write(g, 5, np.zeros((3, 2), np.float32)),
        lambda g: scatter(g, [1, 5], np.zeros((2, 3, 2), np.float32)),
        lambda g: scatter(g, [1, 0], np.zeros((2, 2), np.float32)),
        lambda g: gather(g, [0], element_shape=[4, None]),
        lambda g: gather(g, [0], element_shape=[]),
        lambda g: concat(g),
        lambda g: read(g, 1),
        lambda g: grad(g),
        lambda g: grad(g, "g", [1]),
    ],
)
def test_a_refused_call_on_a_gradient_array_changes_nothing(call):
    handle = make(2)
    write(handle, 0, f32(1, 2))
    gradient = grad(handle, "g", [3])
    before = state(gradient)
    with pytest.raises(INVALID):
        call(gradient)
    assert state(gradient) == before
    np.testing.assert_array_equal(read(gradient, 0), np.zeros((3, 2), np.float32))


def test_a_gradient_that_cannot_be_made_locks_nothing():
    handle = make(1, dynamic_size=True)
    write(handle, 0, np.ones(8, np.float32))
    with pytest.raises(INVALID):
        grad(handle, "g", [2**31 - 1, 2**31 - 1])
    write(handle, 5, f32(1))
    assert size(handle) == 6


def test_after_close_everything_is_refused_and_close_is_not():
    handle = make(2)
    gradient = grad(handle)
    close(handle)
    close(handle)
    for call in (
        lambda: write(handle, 0, f32(1)),
        lambda: read(handle, 0),
        lambda: gather(handle, [0]),
        lambda: scatter(handle, [], np.zeros((0, 1), np.float32)),
        lambda: concat(handle),
        lambda: split(handle, f32(1), [1]),
        lambda: size(handle),
        lambda: grad(handle, "g"),
        lambda: grad(handle, "h", [1]),
    ):
        with pytest.raises(INVALID):
            call()
    write(gradient, 0, f32(1))
    assert gather(handle, [], element_shape=[2]).shape == (0, 2)


def test_element_shape_of_a_gather_begins_with_what_was_prepended():
    assert gather(grad(make(2), "g", [3]), [0, 1], element_shape=[3, 2]).shape == (2, 3, 2)
    for wrong in ([], [4], [2, 3]):
        gradient = grad(make(2), "g", [3])
        with pytest.raises(INVALID):
            gather(gradient, [0, 1], element_shape=wrong)
        with pytest.raises(INVALID):
            gather(gradient, [], element_shape=wrong)
        assert gradient.element_shape is None


@pytest.mark.parametrize("prepended", [None, [], [3], [3, 2]])
@pytest.mark.parametrize("element_shape", [None, [None], [None, 2], [3, None]])
def test_a_gather_of_unwritten_gradients_needs_the_whole_shape(prepended, element_shape):
    """What was prepended says the rest of no shape: TensorFlow refuses the same calls."""
    for index in ([0], [1, 2], [5]):
        gradient = grad(make(3), "g", prepended)
        with pytest.raises(INVALID):
            gather(gradient, index, element_shape=element_shape)
        with pytest.raises(INVALID):
            read(gradient, index[0])
        assert (gradient.element_shape, size(gradient)) == (None, 3)
    gradient = grad(make(1), "g", prepended)
    wanted = np.ones((3, 2), np.float32)
    write(gradient, 0, wanted)
    fits = element_shape in (None, [None, 2], [3, None])
    with nullcontext() if fits else pytest.raises(INVALID):
        np.testing.assert_array_equal(gather(gradient, [0], element_shape=element_shape), [wanted])


class TestAfterALikeElement:
    """An element with the type, dtype and shape of the last one is refused all the same."""

    def test_text(self):
        array = make(3, "string")
        write(array, 0, np.array(["a"], object))
        with pytest.raises(INVALID, match="text"):
            write(array, 1, np.array([1], object))

    @pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
    def test_numbers(self, library):
        need(library)
        array, value = make(2), to(library, f32(1, 2))
        write(array, 0, value)
        for index in (0, 2, -1):
            with pytest.raises(INVALID):
                write(array, index, value)
        write(array, 1, value)
        with pytest.raises(INVALID):
            write(array, 2, value)
        close(array)
        with pytest.raises(INVALID, match="closed"):
            write(array, 1, value)

    def test_of_another_library(self):
        need("torch")
        array, value = make(3), f32(1, 2)
        write(array, 0, value)
        for _ in range(2):
            with pytest.raises(INVALID, match="library"):
                write(array, 1, to("torch", value))
        write(array, 1, value)
        np.testing.assert_array_equal(back(gather(array, [0, 1])), [[1, 2], [1, 2]])
