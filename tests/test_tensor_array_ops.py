"""The array ops: values, aliasing, lifetime, threads, and everything that must be refused."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref

import ml_dtypes
import numpy as np
import pytest
from conftest import back, to

import weft
from weft import errors, raw_ops
from weft._elements import MAX_SIZE

NUMBERS = [
    *["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"],
    *["float16", "bfloat16", "float32", "float64", "complex64", "complex128"],
]
INVALID = errors.InvalidArgumentError


def make(size=3, dtype="float32", **attributes):
    return raw_ops.TensorArrayV3(size=size, dtype=dtype, **attributes).handle


def write(handle, index, value):
    return raw_ops.TensorArrayWriteV3(handle=handle, index=index, value=value, flow_in=0.0)


def read(handle, index, dtype="float32"):
    return raw_ops.TensorArrayReadV3(handle=handle, index=index, flow_in=0.0, dtype=dtype)


def gather(handle, indices, dtype="float32", element_shape=None):
    return raw_ops.TensorArrayGatherV3(
        handle=handle, indices=indices, flow_in=0.0, dtype=dtype, element_shape=element_shape
    )


def scatter(handle, indices, value):
    return raw_ops.TensorArrayScatterV3(handle=handle, indices=indices, value=value, flow_in=0.0)


def concat(handle, dtype="float32", element_shape_except0=None):
    return raw_ops.TensorArrayConcatV3(
        handle=handle, flow_in=0.0, dtype=dtype, element_shape_except0=element_shape_except0
    )


def split(handle, value, lengths):
    return raw_ops.TensorArraySplitV3(handle=handle, value=value, lengths=lengths, flow_in=0.0)


def size(handle):
    return int(raw_ops.TensorArraySizeV3(handle=handle, flow_in=0.0))


def close(handle):
    return raw_ops.TensorArrayCloseV3(handle=handle)


def grad(handle, source="g", prepend=None):
    if prepend is None:
        return raw_ops.TensorArrayGradV3(handle=handle, flow_in=0.0, source=source).grad_handle
    return raw_ops.TensorArrayGradWithShape(
        handle=handle, flow_in=0.0, shape_to_prepend=prepend, source=source
    ).grad_handle


def f32(*values):
    return np.array(values, np.float32)


# ----- every dtype, every library -----


def holds(library, dtype):
    """Whether the library has the dtype by default."""
    if library == "jax":
        return dtype not in ("int64", "uint64", "float64", "complex128")
    return library != "torch" or dtype not in ("uint16", "uint32", "uint64")


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
    import torch

    created = raw_ops.TensorArrayV3(torch.tensor(2, dtype=torch.int32), torch.float32)
    assert created.flow.dtype == torch.float32
    counted = raw_ops.TensorArraySizeV3(created.handle, created.flow)
    assert (counted.dtype, int(counted)) == (torch.int32, 2)
    assert raw_ops.TensorArraySizeV3(created.handle, 0.0).dtype == np.int32


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
    import torch

    for convert in (torch.from_numpy, np.asarray):
        handle = make(4)
        scatter(handle, range(4), convert(np.ones((4, 1000), np.float32)))
        piece = read(handle, 0)
        held = piece.untyped_storage().nbytes() if convert is torch.from_numpy else piece.nbytes
        assert held == 4000
        assert getattr(piece, "base", None) is None or convert is torch.from_numpy


# ----- lifetime and memory -----


def test_an_array_goes_with_its_last_reference():
    handle = make(2)
    write(handle, 0, f32(1))
    gradient = grad(handle)
    forward_gone, gradient_gone = weakref.ref(handle), weakref.ref(gradient)
    del handle
    gc.collect()
    assert forward_gone() is None
    write(gradient, 0, f32(2))
    del gradient
    gc.collect()
    assert gradient_gone() is None


def test_gradient_arrays_go_with_the_forward_array_and_at_close():
    handle = make(2)
    first, second = weakref.ref(grad(handle)), None
    assert first() is not None
    close(handle)
    gc.collect()
    assert first() is None
    handle = make(2)
    second = weakref.ref(grad(handle))
    del handle
    gc.collect()
    assert second() is None


def measured(action):
    gc.collect()
    tracemalloc.start()
    try:
        kept = action()
        gc.collect()
        return tracemalloc.get_traced_memory()[0], kept
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(), (16,), (64, 16), (20000,)])
def test_growth_takes_at_most_twice_the_elements(shape):
    value = np.ones(shape, np.float32)
    handle = make(0, dynamic_size=True)
    elements = 0
    for index in range(max(40, 40_000 // value.size)):
        write(handle, index, value)
        elements += value.nbytes
        if index >= 16:
            # Besides the rows there are five bytes of books on each element.
            assert handle._rows.nbytes <= 2 * elements
    close(handle)
    assert handle.nbytes == 0


def test_close_and_reading_free_the_memory():
    def filled(then):
        handle = make(2000, clear_after_read=True)
        for index in range(2000):
            write(handle, index, np.ones(1024, np.float32))
        then(handle)
        return handle

    def read_all(handle):
        for index in range(2000):
            read(handle, index)

    held, _ = measured(lambda: filled(lambda handle: None))
    assert held > 8_000_000
    for then in (close, read_all, lambda handle: gather(handle, range(2000)) is None, lambda handle: concat(handle)):
        assert measured(lambda then=then: filled(then))[0] < 300_000


def test_large_elements_are_freed_one_by_one():
    handle = make(4)
    for index in range(4):
        write(handle, index, np.ones(1 << 20, np.float32))
    assert handle.nbytes > 16 << 20
    read(handle, 2)
    read(handle, 0)
    assert handle.nbytes < (8 << 20) + 1000


def test_a_queue_goes_on_in_the_same_memory():
    handle = make(0, dynamic_size=True)
    for index in range(5000):
        write(handle, index, f32(index))
        assert read(handle, index) == index
    assert handle._rows.nbytes <= 64


def test_a_large_array_costs_nothing_until_it_is_filled():
    held, handle = measured(lambda: make(MAX_SIZE))
    assert held < 20_000
    assert size(handle) == MAX_SIZE


@pytest.mark.slow
def test_a_million_writes():
    handle = make(0, dynamic_size=True)
    for index in range(1_000_000):
        write(handle, index, np.full(16, index, np.float32))
    assert handle.nbytes <= 2 * 64_000_000 + 5_000_000
    np.testing.assert_array_equal(gather(handle, range(0, 1_000_000, 999))[:, 3], np.arange(0, 1_000_000, 999))


def test_rows_cross_from_small_blocks_to_large_ones():
    value = np.arange(40, dtype=np.float32).reshape(40, 1) * np.ones(262_144, np.float32)  # 1 MB each
    handle = make(0, dynamic_size=True, clear_after_read=False)
    for index in range(20):
        write(handle, index, value[index])
    scatter(handle, range(20, 40), value[20:])
    order = [39, 0, 15, 16, 17, 31, 32, 5]
    np.testing.assert_array_equal(gather(handle, order), value[order])
    np.testing.assert_array_equal(gather(handle, range(10, 35)), value[10:35])
    gradient = grad(handle)
    scatter(gradient, range(40), value)
    scatter(gradient, range(40), value)
    np.testing.assert_array_equal(gather(gradient, [38, 3]), 2 * value[[38, 3]])
    for index in (*range(3), *range(4, 38)):
        read(gradient, index)
    assert gradient.nbytes <= 40 << 20
    np.testing.assert_array_equal(read(gradient, 39), 2 * value[39])


# ----- threads -----


def in_threads(count, action):
    failures = []

    def guarded(number):
        try:
            action(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_threads_lose_nothing(library):
    count, each = 8, 50
    handle = make(0, dynamic_size=True, element_shape=[2], clear_after_read=False)

    def work(number):
        for step in range(each):
            index = number + count * step
            write(handle, index, to(library, f32(index, -index)))

    assert in_threads(count, work) == []
    total = count * each
    wanted = np.arange(total, dtype=np.float32)[:, None] * f32(1, -1)
    np.testing.assert_array_equal(back(gather(handle, range(total))), wanted)


def test_threads_add_everything_up(library):
    handle = make(4, element_shape=[3])
    write(handle, 0, to(library, f32(0, 0, 0)))
    gradient = grad(handle)
    ones = to(library, np.ones((4, 3), np.float32))

    def work(number):
        for step in range(40):
            write(gradient, step % 4, ones[0])
            scatter(gradient, [0, 1, 2, 3], ones)

    assert in_threads(6, work) == []
    np.testing.assert_array_equal(back(gather(gradient, range(4))), np.full((4, 3), 6 * 50))


def test_only_one_of_many_threads_writes_an_element():
    handle = make(1)
    failures = in_threads(8, lambda number: write(handle, 0, f32(number)))
    assert len(failures) == 7
    assert {type(failure) for failure in failures} == {INVALID}


def test_all_threads_get_one_gradient_array():
    handle, found = make(3), []
    assert in_threads(8, lambda number: found.append(grad(handle, "g", [2]))) == []
    assert len(set(map(id, found))) == 1


# ----- refused -----


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
    return (
        handle.size, handle.element_shape, handle._dynamic, handle._marked, handle._closed, handle._kin,
        bytes(handle._flags), dict(handle._odd), sorted(handle._gradients), handle._rows and handle._rows.count,
        sorted(handle._values),
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
    assert gather(grad(make(2), "g", [3]), [0, 1], element_shape=[None]).shape == (2, 3)
    for wrong in ([], [4], [2, 3]):
        gradient = grad(make(2), "g", [3])
        with pytest.raises(INVALID):
            gather(gradient, [0, 1], element_shape=wrong)
        with pytest.raises(INVALID):
            gather(gradient, [], element_shape=wrong)
        assert gradient.element_shape is None


def test_handles_and_opaque_things_are_elements_too():
    handle, element = make(2, "resource"), make(1)
    write(handle, 0, element)
    assert read(handle, 0, "resource") is element
    with pytest.raises(INVALID):
        read(handle, 1, "resource")
    write(handle, 1, element)
    with pytest.raises(INVALID, match="put together"):
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
