"""Where the batching family answers otherwise than TensorFlow on purpose, beyond the recorded cases: see docs/differences.md."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.libraries import back, need, to

import weft
from weft import errors, raw_ops

NO_INDEX = np.empty((0, 3), np.int64)


def together(clock, *bodies):
    """What each body returns or raises, called in threads one after the other at the same time of the clock."""
    answers = [None] * len(bodies)

    def run(i, body):
        try:
            answers[i] = body()
        except Exception as error:
            answers[i] = error

    for i, body in enumerate(bodies):
        clock.start(threading.Thread(target=run, args=(i, body), daemon=True))
        clock.settle()
    clock.run_out()
    return answers


def batch(x, size=8, **attributes):
    given = {"num_batch_threads": 1, "batch_timeout_micros": 1000, "grad_timeout_micros": 0} | attributes
    return raw_ops.Batch([x], max_batch_size=size, **given)


def function(x, f, size=8, captured=(), Tout=("float64",), **attributes):
    given = {"num_batch_threads": 1, "batch_timeout_micros": 1000} | attributes
    return raw_ops.BatchFunction([x], list(captured), f, max_batch_size=size, Tout=Tout, **given)


# --- all families ---


def test_arguments_by_position(clock):
    y = raw_ops.Unbatch(np.array([1.0, 2.0]), np.array([[7, 1, 1]]), 7, 0)
    assert y.tolist() == [2.0]


def test_errors_are_pythons_own_and_have_an_http_status(clock):
    with pytest.raises(ValueError) as caught:
        batch(np.float64(1))
    assert type(caught.value) is errors.InvalidArgumentError
    assert (caught.value.error_code, caught.value.http_status) == (3, 400)


def test_a_full_queue_has_a_class_of_its_own(clock):
    first, second = together(clock, *[lambda: batch(np.ones(2), size=3, max_enqueued_batches=1)] * 2)
    assert len(first.batched_tensors[0]) == 2
    assert type(second) is errors.QueueFullError
    assert isinstance(second, errors.UnavailableError)


def test_a_refused_call_leaves_no_resource_behind(clock):
    with pytest.raises(errors.InvalidArgumentError):
        batch(np.ones(1), size=0)
    with pytest.raises(errors.InvalidArgumentError):
        batch(np.ones(1), batch_timeout_micros=-1)
    with pytest.raises(errors.InvalidArgumentError):
        batch(np.ones((0, 2)), size=8, num_batch_threads=0)
    assert together(clock, lambda: batch(np.ones(1)))[0].batched_tensors[0].tolist() == [1.0]
    with pytest.raises(errors.InvalidArgumentError):
        raw_ops.Unbatch(np.ones(1), np.array([7, 0, 1]), 7, 123)
    # Had the refused timeout stuck, this would warn that its own is ignored, and warnings are errors here.
    assert raw_ops.Unbatch(np.ones(1), np.array([[7, 0, 1]]), 7, 0).tolist() == [1.0]


def test_a_refused_unbatch_grad_leaves_its_id_free(clock):
    with pytest.raises(errors.InvalidArgumentError):
        raw_ops.UnbatchGrad(np.ones((1, 2)), np.zeros((1, 4), np.int64), np.ones((1, 2)), 5)
    assert raw_ops.UnbatchGrad(np.ones((1, 2)), np.array([[5, 0, 1]]), np.ones((1, 2)), 5).tolist() == [[1.0, 1.0]]


# --- Batch ---


def test_the_third_column_is_the_length(clock):
    _, owner = together(clock, lambda: batch(np.zeros(2)), lambda: batch(np.zeros(3)))
    assert owner.batch_index[:, 1:].tolist() == [[0, 2], [2, 3]]


def test_a_zero_row_call_keeps_its_shape_and_has_an_id(clock):
    b = batch(np.zeros((0, 4), np.float32))
    assert (b.batched_tensors[0].shape, b.batched_tensors[0].dtype) == ((0, 4), np.float32)
    assert (b.batch_index.shape, b.id.shape) == ((0, 3), ())
    assert raw_ops.Unbatch(np.zeros((0, 9)), b.batch_index, b.id, timeout_micros=0).shape == (0, 9)
    assert raw_ops.UnbatchGrad(np.zeros((0, 4)), b.batch_index, np.zeros((0, 4)), b.id).shape == (0, 4)


def test_a_zero_row_call_with_bad_limits_creates_nothing(clock):
    batch(np.zeros((0, 4)), size=0)
    assert together(clock, lambda: batch(np.ones(1)))[0].batched_tensors[0].tolist() == [1.0]


@pytest.mark.parametrize("other", ["torch", "jax"])
def test_arrays_of_two_libraries_never_meet(clock, other):
    need(other)
    first, second = together(
        clock, lambda: batch(np.ones(1, np.float32)), lambda: batch(to(other, np.zeros(1, np.float32)))
    )
    assert first.batched_tensors[0].tolist() == [1.0]
    assert back(second.batched_tensors[0]).tolist() == [0.0]
    assert type(second.batched_tensors[0]) is type(to(other, np.zeros(1, np.float32)))


def test_batch_and_batch_function_of_one_name_do_not_clash(clock):
    one, other = together(
        clock,
        lambda: batch(np.ones(1), shared_name="same"),
        lambda: function(np.ones(1), lambda x: -x, shared_name="same"),
    )
    assert one.batched_tensors[0].tolist() == [1.0]
    assert other[0].tolist() == [-1.0]


def test_a_name_that_nobody_uses_for_a_minute_is_dropped(clock):
    def most_rows(size):
        batch(np.ones(1), size=size, shared_name="a", batch_timeout_micros=0)
        with pytest.raises(errors.InvalidArgumentError) as refused:
            batch(np.ones(100), size=size, shared_name="a", batch_timeout_micros=0)
        return next(int(word) for word in (4, 8) if f" {word}" in str(refused.value))

    assert most_rows(4) == 4
    clock.advance(59)
    with pytest.warns(UserWarning, match="is ignored"):
        assert most_rows(8) == 4
    clock.advance(120)
    assert most_rows(8) == 8  # without a warning, which would be an error here


@pytest.mark.parametrize("size", [0, -1])
def test_max_batch_size_must_be_positive(clock, size):
    with pytest.raises(errors.InvalidArgumentError, match="max_batch_size must be positive"):
        batch(np.ones(1), size=size)


def test_other_parameters_for_a_name_are_ignored_with_one_warning(clock):
    together(clock, lambda: batch(np.ones(1)))
    with pytest.warns(UserWarning, match="is ignored") as warned:
        together(clock, lambda: batch(np.ones(1), size=9), lambda: batch(np.ones(1), size=9))
    assert len(warned) == 1


def test_num_batch_threads_is_bounded_and_starts_no_thread(clock):
    before = threading.active_count()
    assert together(clock, lambda: batch(np.ones(1), num_batch_threads=4096))[0].batched_tensors[0].tolist() == [1.0]
    assert threading.active_count() <= before  # idle workers of other tests may end meanwhile
    for call in (batch, lambda x, **more: function(x, np.negative, **more)):
        with pytest.raises(errors.InvalidArgumentError, match="at most 4096"):
            call(np.ones(1), shared_name="many", num_batch_threads=93389718)


def test_every_caller_of_a_batch_that_cannot_be_formed_has_its_own_error(clock):
    first, second = together(clock, lambda: batch(np.ones((1, 2))), lambda: batch(np.ones((1, 3))))
    assert type(first) is type(second) is errors.InvalidArgumentError
    assert first is not second


# --- BatchFunction ---


class OutOfPaper(Exception):
    """A class of the user's own."""


def test_what_f_raises_reaches_every_caller_as_its_own_class(clock):
    def f(x):
        raise OutOfPaper("tray 2")

    first, second = together(clock, lambda: function(np.ones(1), f), lambda: function(np.ones(1), f))
    assert type(first) is type(second) is OutOfPaper
    assert first is not second
    assert first.args == ("tray 2",)
    assert type(first.__cause__) is OutOfPaper


def test_f_is_any_callable_and_nothing_else(clock):
    (y,) = together(clock, lambda: function(np.array([4.0]), np.sqrt))[0]
    assert y.tolist() == [2.0]
    with pytest.raises(errors.NotFoundError):
        function(np.ones(1), "sqrt")
    with pytest.raises(errors.InvalidArgumentError):
        function(np.ones(1), None)


class Doubler:
    """A callable by method: bound methods of one object are equal."""

    ran = 0

    def run(self, x):
        self.ran += 1
        return 2 * x


def test_only_calls_with_equal_f_share_a_batch(clock):
    doubler = Doubler()
    answers = together(
        clock,
        lambda: function(np.array([1.0]), doubler.run),
        lambda: function(np.array([2.0]), np.negative),
        lambda: function(np.array([3.0]), doubler.run),
    )
    assert [a[0].tolist() for a in answers] == [[2.0], [-2.0], [6.0]]
    assert doubler.ran == 1


def test_low_priority_calls_wait_for_a_batch_with_room(clock):
    seen = []

    def f(x):
        seen.append(x.tolist())
        return x

    low = {
        "low_priority_max_batch_size": 4,
        "low_priority_batch_timeout_micros": 1_000_000,
        "low_priority_max_enqueued_batches": 4,
    }

    def humble():
        with weft.priority("low"):
            return function(np.array([9.0]), f, size=3, **low)

    together(clock, humble, lambda: function(np.array([1.0]), f, size=3, **low))
    assert seen == [[1.0, 9.0]]


# --- Unbatch ---


def test_a_piece_is_where_its_row_says(clock):
    owner, waiter = together(
        clock,
        lambda: raw_ops.Unbatch(np.arange(4.0), np.array([[1, 3, 1], [2, 0, 2]]), 1, 1000),
        lambda: raw_ops.Unbatch(np.empty(0), NO_INDEX, 2, 1000),
    )
    assert (owner.tolist(), waiter.tolist()) == ([3.0], [0.0, 1.0])


def test_a_piece_outside_the_data_is_refused_without_overflow(clock):
    most = 2**63 - 1
    for start, length in [(0, 3), (-1, 1), (1, -1), (most, most), (-most - 1, most)]:
        with pytest.raises(errors.InvalidArgumentError, match="must lie within the 2 rows"):
            raw_ops.Unbatch(np.zeros(2), np.array([[7, start, length]]), 7, 0)


def test_a_failed_unbatch_leaves_no_waiter(clock):
    with pytest.raises(errors.AlreadyExistsError):
        raw_ops.Unbatch(np.zeros(3), np.array([[1, 0, 1], [2, 1, 1], [2, 2, 1]]), 9, 1000)
    assert weft.sweep() == 0


# --- deadlines ---


def test_the_owner_of_gradients_waits_until_the_gradient_deadline(clock):
    with weft.gradient_deadline(2.5):
        (late,) = together(
            clock, lambda: raw_ops.UnbatchGrad(np.ones(2), np.array([[1, 0, 1], [2, 1, 1]]), np.ones(1), 1)
        )
    assert type(late) is errors.DeadlineExceededError
    assert clock.now() == 2.5
    assert weft.sweep() == 0


def test_a_gradient_whose_owner_does_not_come_is_dropped(clock):
    assert raw_ops.UnbatchGrad(np.empty((0, 2)), NO_INDEX, np.ones((1, 2)), 3).shape == (0, 2)
    assert weft.sweep() == 1
    clock.advance(60.1)
    assert weft.sweep() == 0


def test_grad_timeout_micros_is_the_timeout_of_batchs_gradient(clock):
    def body():
        b, pull_back = weft.vjp(raw_ops.Batch, [np.ones(1)], 1, 2, 1_000_000, 500_000)
        if not len(b.batched_tensors[0]):
            return pull_back([b.batched_tensors[0]])
        return None

    late, _ = together(clock, body, body)
    assert type(late) is errors.DeadlineExceededError
    assert clock.now() == 0.5


# --- gradients ---


def test_batch_and_unbatch_have_gradients_and_padding_has_none(clock):
    def body(x):
        def run():
            b, batch_back = weft.vjp(raw_ops.Batch, [x], 1, 4, 1000, 0, allowed_batch_sizes=[4])
            (rows,) = b.batched_tensors
            y, unbatch_back = weft.vjp(raw_ops.Unbatch, rows**3, b.batch_index, b.id, 1_000_000)
            dy = unbatch_back(np.ones_like(y))["batched_tensor"]
            return dy.tolist(), batch_back([dy * 3 * rows**2])["in_tensors"][0].tolist()

        return run

    first, last = together(clock, body(np.array([1.0])), body(np.array([2.0, 3.0])))
    assert first == ([], [3.0])
    assert last == ([1.0, 1.0, 1.0, 0.0], [12.0, 27.0])


def test_batch_function_has_no_gradient(clock):
    with pytest.raises(LookupError, match="BatchFunction has no gradient"):
        weft.vjp(raw_ops.BatchFunction, [np.zeros((0, 1))], [], np.negative, 1, 4, 0, ["float64"])


def test_unbatch_grad_of_a_scalar_is_refused(clock):
    index = np.array([[1, 0, 1]])
    for original, grad in [(np.ones(1), np.float64(1)), (np.float64(1), np.ones(1))]:
        with pytest.raises(errors.InvalidArgumentError, match="at least one dimension"):
            raw_ops.UnbatchGrad(original, index, grad, 1)


def test_a_repeated_id_is_reported_before_wrong_rows(clock):
    with pytest.raises(errors.InternalError):
        raw_ops.UnbatchGrad(np.ones(2), np.array([[1, 0, 5], [1, 1, 5]]), np.ones(1), 1)


def test_a_traced_array_is_refused(clock):
    need("jax")
    import jax

    with pytest.raises(errors.InvalidArgumentError, match="traced"):
        jax.jit(lambda x: batch(x).batched_tensors[0])(np.ones(1, np.float32))


def test_gradients_on_and_off_do_not_share_a_batch(clock):
    need("torch")
    import torch

    def off():
        with torch.no_grad():
            return batch(torch.ones(1))

    def recorded():
        return batch(torch.ones(1, requires_grad=True))

    answers = together(clock, off, recorded, lambda: batch(torch.ones(1)), off)
    assert [len(b.batch_index) for b in answers] == [0, 0, 2, 2]


def test_a_full_adaptive_batch_does_not_wait_for_another_queue(clock):
    attributes = {"num_batch_threads": 0, "batch_timeout_micros": 300_000, "size": 4}
    done = {}

    def call(lane, rows):
        function(np.ones(rows), np.negative, batching_queue=lane, **attributes)
        done[lane] = clock.now()

    together(clock, lambda: call("a", 1), lambda: call("b", 4))
    assert done == {"a": 0.3, "b": 0.0}


def test_the_slices_of_one_call_run_one_after_the_other(clock):
    """Callers do the work, and a call has but one thread, whatever num_batch_threads says; a slice that fails stops no other."""
    seen = []

    def f(x):
        clock.sleep(0.1)
        seen.append((x.tolist(), clock.now()))
        if x[0] == 1:
            raise ValueError("one")
        return x

    attributes = {"num_batch_threads": 2, "enable_large_batch_splitting": True, "allowed_batch_sizes": [2]}
    (answer,) = together(clock, lambda: function(np.arange(1.0, 5.0), f, **attributes))
    assert [rows for rows, _ in seen] == [[1.0, 2.0], [3.0, 4.0]]
    assert [round(at, 3) for _, at in seen] == [0.1, 0.2]
    assert isinstance(answer, ValueError)


def test_rows_that_collide_are_refused_though_the_own_piece_waits(clock):
    raw_ops.Unbatch(np.ones(2), np.array([[1, 0, 1], [2, 1, 1]]), 1, 10**6)
    raw_ops.Unbatch(np.ones(2), np.array([[3, 0, 1], [4, 1, 1]]), 3, 10**6)
    with pytest.raises(errors.AlreadyExistsError):
        raw_ops.Unbatch(np.zeros(2), np.array([[2, 0, 1], [4, 1, 1]]), 2, 10**6)
    assert raw_ops.Unbatch(np.ones(0), NO_INDEX, 2, 10**6).tolist() == [1.0]
