"""Whose memory an array takes and how much, when it goes, and threads that share it."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
from support.libraries import back, need, to
from support.tensor_array_calls import INVALID, close, concat, f32, gather, grad, make, read, scatter, size, write

from weft.kernels import buffers
from weft.tensor_array.rules import MAX_SIZE

pytestmark = pytest.mark.usefixtures("little_garbage")


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


@pytest.fixture
def all_traced(monkeypatch):
    """Every array comes from NumPy: tracemalloc does not see memory that is kept to be used again."""
    monkeypatch.setattr(buffers, "LARGE", 1 << 60)


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
            assert handle.storage.blocks.nbytes <= 2 * elements
    close(handle)
    assert handle.storage.nbytes == 0


@pytest.mark.usefixtures("all_traced")
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


def peak(action):
    """The bytes that were allocated at most, above what there was."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("all_traced")
def test_adding_needs_no_temporary():
    handle = make(3)
    gradient = grad(handle)
    value = np.ones(1 << 18, np.float32)
    rows = np.ones((3, 1 << 18), np.float32)
    for index in range(3):
        write(gradient, index, value)
    assert peak(lambda: write(gradient, 1, value)) < 10_000
    assert peak(lambda: scatter(gradient, [0, 1, 2], rows)) < 20_000
    np.unique([2, 0])  # NumPy takes memory of its own at the first call
    assert peak(lambda: scatter(gradient, [2, 0], rows[:2])) < 20_000
    assert gather(gradient, [0, 1, 2])[:, 0].tolist() == [3, 3, 3]


@pytest.mark.usefixtures("all_traced")
def test_a_stack_is_at_most_one_copy():
    for clear, copies in ((False, 1), (True, 0)):
        handle = make(1000, clear_after_read=clear)
        for index in range(1000):
            write(handle, index, np.full(1024, index, np.float32))
        taken = []
        assert (
            peak(lambda handle=handle, taken=taken: taken.append(gather(handle, range(1000))))
            < copies * 4_096_000 + 200_000
        )
        np.testing.assert_array_equal(taken[0][:, 7], np.arange(1000))


def test_large_elements_are_freed_one_by_one():
    handle = make(4)
    for index in range(4):
        write(handle, index, np.ones(1 << 20, np.float32))
    assert handle.storage.nbytes > 16 << 20
    read(handle, 2)
    read(handle, 0)
    assert handle.storage.nbytes < (8 << 20) + 1000


def test_a_queue_goes_on_in_the_same_memory():
    handle = make(0, dynamic_size=True)
    for index in range(5000):
        write(handle, index, f32(index))
        assert read(handle, index) == index
    assert handle.storage.blocks.nbytes <= 64


def test_the_memory_of_an_array_that_went_is_used_again():
    def stacked(number):
        handle = make(300)
        for index in range(300):
            write(handle, index, np.full(1024, number, np.float32))
        return gather(handle, range(300))

    first, second = stacked(1), stacked(2)
    assert (first == 1).all()
    assert (second == 2).all()
    address = first.ctypes.data
    del first
    third = stacked(3)
    assert third.ctypes.data == address
    assert (second == 2).all()
    assert (third == 3).all()


def test_large_copies_are_made_in_parts(monkeypatch):
    need("weft._native")
    from weft import _native

    monkeypatch.setattr(buffers, "SHARED", 64)
    _native.set_part_bytes(64)
    try:
        value = np.arange(4000, dtype=np.float32).reshape(500, 8)
        handle = make(500, clear_after_read=False)
        scatter(handle, range(500), value)
        np.testing.assert_array_equal(gather(handle, range(500)), value)
        np.testing.assert_array_equal(gather(handle, range(3, 450)), value[3:450])
    finally:
        _native.set_part_bytes(4 << 20)


def test_a_large_array_costs_nothing_until_it_is_filled():
    held, handle = measured(lambda: make(MAX_SIZE))
    assert held < 20_000
    assert size(handle) == MAX_SIZE


@pytest.mark.slow
def test_a_million_writes():
    handle = make(0, dynamic_size=True)
    for index in range(1_000_000):
        write(handle, index, np.full(16, index, np.float32))
    assert handle.storage.nbytes <= 2 * 64_000_000 + 5_000_000
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
    assert gradient.storage.nbytes <= 40 << 20
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
