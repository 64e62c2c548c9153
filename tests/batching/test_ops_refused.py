"""Calls that are refused as a batch, as a piece of one, or for want of room: who is told, and what goes on."""

from __future__ import annotations

import numpy as np
import pytest
from support.bad_calls import (
    NO_ROWS,
    SPLIT,
    X,
    batch,
    check_untouched,
    check_usable,
    function,
    refuse,
    unbatch,
    unbatch_grad,
)
from support.callers import start, start_on

import weft
from weft.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
)


class TestWholeBatch:
    """Errors that concern all calls of a batch: each gets an exception of its own, and the queue goes on."""

    @staticmethod
    def fails(clock, calls, wanted):
        callers = [start_on(clock, call) for call in calls]
        clock.run_out()
        found = [caller.end().error for caller in callers]
        assert [type(error) for error in found] == [wanted] * len(calls)
        assert len({id(error) for error in found}) == len(found)
        check_usable(clock, warns=True)
        assert weft.sweep() == 0
        return found

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ([X], [X[:, :2]]),
            ([X], [X[:, 0]]),
            ([X], [X.astype(np.float64)]),
            ([X], [X.astype(np.int32)]),
            ([X, X], [X, X[:, :2]]),
            ([X, X], [X]),
            ([np.array(["a"])], [np.array([1.0])]),
        ],
        ids=["trailing", "rank", "dtype", "dtype kind", "second tensor", "number", "text"],
    )
    def test_batch_that_cannot_be_formed(self, clock, one, other):
        for pair in ([one, other], [other, one], [one, other, one], [one, one, other]):
            calls = [lambda tensors=tensors: batch(tensors, batch_timeout_micros=1000) for tensors in pair]
            with weft.scope(clock):
                self.fails(clock, calls, InvalidArgumentError)

    def test_function_on_a_batch_that_cannot_be_formed(self, clock):
        calls = [lambda x=x: function([x], batch_timeout_micros=1000) for x in (X, X[:, :2], X)]
        self.fails(clock, calls, InvalidArgumentError)

    @pytest.mark.parametrize(
        ("wanted", "f", "Tout"),
        [
            (FailedPreconditionError, lambda x: x.sum(), ["float32"]),
            (FailedPreconditionError, lambda x: None, ["float32"]),
            (FailedPreconditionError, lambda x: x[:-1], ["float32"]),
            (FailedPreconditionError, lambda x: np.concatenate([x, x]), ["float32"]),
            (FailedPreconditionError, lambda x: (x, x.sum()), ["float32", "float32"]),
            (InternalError, lambda x: (x, x), ["float32"]),
            (InternalError, lambda x: x, ["float32", "float32"]),
            (InternalError, lambda x: [], ["float32"]),
            (InvalidArgumentError, lambda x: x.astype(np.float64), ["float32"]),
            (InvalidArgumentError, lambda x: x, ["int32"]),
            (InvalidArgumentError, lambda x: x, ["string"]),
            (ZeroDivisionError, lambda x: 1 // 0, ["float32"]),
            (KeyError, lambda x: {}["missing"], ["float32"]),
            (UnavailableError, refuse, ["float32"]),
        ],
        ids=[
            "scalar", "None", "rows missing", "rows too many", "second output scalar", "outputs too many",
            "outputs too few", "no outputs", "float64", "wanted int32", "wanted string", "ZeroDivisionError", "KeyError",
            "an op's error",
        ],
    )  # fmt: skip
    def test_outputs_of_f(self, clock, wanted, f, Tout):
        calls = [lambda: function(f=f, Tout=Tout, batch_timeout_micros=1000)] * 3
        for error in self.fails(clock, calls, wanted):
            if not isinstance(error, OpError) or wanted is UnavailableError:
                assert type(error.__cause__) is wanted

    def test_error_in_a_slice_fails_only_those_with_rows_in_it(self, clock):
        def f(x):
            if (x >= 5).any():
                raise ValueError("too large")
            return x

        def call(values):
            return function(
                [np.array(values)], f=f, Tout=["int64"], max_batch_size=8, allowed_batch_sizes=[2],
                batch_timeout_micros=1000, **SPLIT,
            )[0].tolist()  # fmt: skip

        callers = [start_on(clock, call, values) for values in ([1, 2, 3], [4, 5, 6], [0])]
        clock.run_out()
        assert callers[0].answer() == [1, 2, 3]
        assert isinstance(callers[1].end().error, ValueError)
        assert callers[2].answer() == [0]
        assert weft.sweep() == 0

    def test_slices_that_do_not_join(self, clock):
        caller = start_on(
            clock, function, [np.ones(3)], f=lambda x: np.ones((len(x), len(x))), Tout=["float64"],
            allowed_batch_sizes=[1, 2], **SPLIT,
        )  # fmt: skip
        clock.run_out()
        with pytest.raises(InvalidArgumentError):
            caller.answer()


class TestFull:
    def test_a_full_queue_refuses_and_stays_as_it_was(self, clock):
        attributes = {"max_batch_size": 2, "max_enqueued_batches": 1, "batch_timeout_micros": 1000}
        first = start_on(clock, batch, [X[:1]], **attributes)
        with pytest.raises(UnavailableError) as caught:
            batch([X], **attributes)
        assert caught.value.http_status == 429
        last = start_on(clock, batch, [X[1:]], **attributes)
        assert last.answer().batched_tensors[0].tolist() == X.tolist()
        assert first.answer().batched_tensors[0].shape == (0, 3)

    @pytest.mark.parametrize("bad", [{"max_batch_size": 3}, {"num_batch_threads": 2}, {"batch_timeout_micros": 5}])
    def test_the_first_parameters_win_and_nonsense_is_ignored(self, clock, bad):
        batch(max_batch_size=2)
        with pytest.warns(UserWarning, match="is ignored"):
            assert batch(**{"max_batch_size": 2} | bad).batched_tensors[0].tolist() == X.tolist()

    def test_own_allowed_sizes_are_checked_even_so(self, clock):
        batch(max_batch_size=2)
        with pytest.raises(InvalidArgumentError):
            batch(max_batch_size=2, allowed_batch_sizes=[1])

    def test_low_priority_calls_are_refused_by_their_own_limits(self, clock):
        attributes = {"low_priority_max_batch_size": 1, "low_priority_max_enqueued_batches": 1}
        with weft.scope(clock) as scope:
            with weft.priority("low"), pytest.raises(UnavailableError):
                function(**attributes)
            check_untouched(scope)


class TestUnbatch:
    """What waits, and what it must not disturb."""

    def test_two_waiters_for_one_id(self, clock):
        first = start_on(clock, unbatch, timeout_micros=10_000)
        with pytest.raises(AlreadyExistsError):
            unbatch(timeout_micros=10_000)
        assert unbatch(np.arange(2.0, dtype=np.float32), [[7, 1, 1], [8, 0, 1]], 8, 10_000).tolist() == [0.0]
        assert first.answer().tolist() == [1.0]
        assert weft.sweep() == 0

    def test_a_second_piece_for_an_id(self, clock):
        assert unbatch(X, [[7, 0, 1], [8, 1, 1]]).tolist() == X[:1].tolist()
        with pytest.raises(AlreadyExistsError):
            unbatch(X * 9, [[9, 0, 1], [8, 1, 1]], 9)
        assert weft.sweep() == 1
        assert unbatch(id=8).tolist() == X[1:].tolist()
        assert weft.sweep() == 0

    def test_a_failed_call_delivers_nothing(self, clock):
        waiter = start_on(clock, unbatch, timeout_micros=5_000)
        with pytest.raises(AlreadyExistsError):
            unbatch(np.zeros((3, 3), np.float32), [[7, 0, 1], [8, 1, 1], [8, 2, 1]], 9, 5_000)
        assert weft.sweep() == 1, "the waiter alone"
        clock.run_out()
        assert isinstance(waiter.end().error, DeadlineExceededError)
        assert clock.now() == pytest.approx(0.005)

    def test_a_failed_call_leaves_no_waiter_that_fails_another(self, clock):
        """TensorFlow leaves one, and its deadline fails someone else."""
        with pytest.raises(AlreadyExistsError):
            unbatch(X, [[8, 0, 1], [8, 1, 1]], 7, 5_000)
        clock.advance(0.003)
        waiter = start_on(clock, unbatch, timeout_micros=5_000)
        clock.advance(0.004)
        assert waiter.is_alive()
        unbatch(X, [[7, 0, 1], [9, 1, 1]], 9, 5_000)
        assert waiter.answer().tolist() == X[:1].tolist()

    def test_dtype_of_a_waiter(self, clock):
        waiter = start_on(clock, unbatch, X.astype(np.int32))
        assert unbatch(X, [[8, 0, 1], [7, 1, 1]], 8).tolist() == X[:1].tolist()
        with pytest.raises(InvalidArgumentError):
            waiter.answer()
        assert weft.sweep() == 0

    def test_dtype_of_a_late_consumer(self, clock):
        unbatch(X, [[8, 0, 1], [7, 1, 1]], 8)
        with pytest.raises(InvalidArgumentError):
            unbatch(X.astype(np.int32))
        assert unbatch().tolist() == X[1:].tolist(), "the piece is still there for one who can take it"

    def test_a_deadline(self, clock):
        waiter = start_on(clock, unbatch, timeout_micros=2_000)
        clock.run_out()
        with pytest.raises(DeadlineExceededError) as caught:
            waiter.answer()
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.http_status == 504
        assert (clock.now(), weft.sweep()) == (pytest.approx(0.002), 0)

    @pytest.mark.parametrize("micros", [0, -1, -(2**31)])
    def test_no_time_to_wait(self, clock, micros):
        assert unbatch(X, [[7, 0, 1]], timeout_micros=micros).tolist() == X[:1].tolist()
        waiter = start_on(clock, unbatch, timeout_micros=micros)
        with pytest.raises(DeadlineExceededError):
            waiter.answer()
        assert weft.sweep() == 0

    def test_a_piece_expires(self, clock):
        unbatch(X, [[8, 0, 1], [7, 1, 1]], 8, 1_000)
        clock.advance(0.0011)
        late = start_on(clock, unbatch, timeout_micros=1_000)
        clock.run_out()
        assert isinstance(late.end().error, DeadlineExceededError)
        assert weft.sweep() == 0

    def test_a_dropped_piece_is_dropped_by_the_next_call_on_any_resource(self, clock):
        with weft.scope(clock) as scope:
            unbatch(X, [[8, 0, 1], [7, 1, 1]], 8, 1_000)
            assert scope.stored() == 1
            clock.advance(0.002)
            batch(max_batch_size=2)
            assert scope.stored() == 0


class TestUnbatchGrad:
    """Every failed owner gives its id back, and takes nobody else's gradient with it."""

    @staticmethod
    def send(id, grad=X[:1], **names):
        return unbatch_grad(X[:0], NO_ROWS, grad, id, **names)

    def test_an_id_in_use(self, clock):
        self.send(7)
        with pytest.raises(InvalidArgumentError):
            self.send(7)
        with pytest.raises(InvalidArgumentError):
            unbatch_grad(index=[[7, 0, 1]])
        assert weft.sweep() == 1
        clock.advance(60.1)
        assert weft.sweep() == 0
        self.send(7)

    @pytest.mark.parametrize("index", [NO_ROWS, [[7, 0, 1]], [[7, 0, 3]], [[7, 0, -2]]])
    def test_a_retry_after_a_bad_index(self, clock, index):
        with pytest.raises(InvalidArgumentError):
            unbatch_grad(index=index)
        assert weft.sweep() == 0
        assert unbatch_grad().tolist() == X.tolist()

    def test_a_missing_id_wanted_twice(self, clock):
        first = start_on(clock, unbatch_grad, index=[[7, 0, 2], [9, 2, 1]])
        with pytest.raises(InvalidArgumentError):
            unbatch_grad(index=[[8, 0, 2], [9, 2, 1]], id=8)
        self.send(9)
        assert first.answer().shape == (3, 3)
        assert weft.sweep() == 0

    def test_a_gradient_claimed_by_one_owner_is_not_stolen_by_another(self, clock):
        """Owner 1 has the gradient of 2 and waits for 3; owner 4 names 2 as well."""
        first = start_on(clock, unbatch_grad, index=[[1, 0, 1], [2, 1, 1], [3, 2, 1]], grad=X[:1], id=1)
        self.send(2)
        thief = start_on(clock, unbatch_grad, index=[[4, 0, 1], [2, 1, 1]], grad=X[:1], id=4)
        assert self.send(3).shape == (0, 3)
        clock.run_out()
        assert first.answer().shape == (3, 3)
        assert isinstance(thief.end().error, InvalidArgumentError | DeadlineExceededError)
        assert weft.sweep() == 0

    def test_an_owner_provides_its_gradient_to_another(self, clock):
        """Owner 2 lists another id, not its own; owner 1 waits for the gradient of 2."""
        first = start_on(clock, unbatch_grad, index=[[1, 0, 1], [2, 1, 1]], grad=X[:1], id=1)
        second = start_on(clock, unbatch_grad, index=[[3, 0, 1]], grad=2 * X[:1], id=2)
        self.send(3, 3 * X[:1])
        assert second.answer()[:, 0].tolist() == [3.0]
        assert first.answer()[:, 0].tolist() == [1.0, 2.0]
        clock.run_out()
        assert weft.sweep() == 0

    def test_own_id_not_in_the_index(self, clock):
        self.send(8)
        assert unbatch_grad(index=[[8, 0, 1]], grad=X).tolist() == X[:1].tolist()
        assert weft.sweep() == 1, "its own gradient waits"
        clock.advance(60.1)
        assert weft.sweep() == 0

    @pytest.mark.parametrize("owner_first", [True, False])
    @pytest.mark.parametrize(
        "other",
        [X[:1, :2], X[:1, 0], X[:1].astype(np.float64), X],
        ids=["trailing", "rank", "dtype", "rows"],
    )
    def test_gradients_that_do_not_join_fail_the_owner_alone(self, clock, owner_first, other):
        def sender():
            return unbatch_grad(other[:0], NO_ROWS, other, 8)

        def owner():
            return unbatch_grad(index=[[7, 0, 2], [8, 2, 1]])

        callers = [start_on(clock, call) for call in ([owner, sender] if owner_first else [sender, owner])]
        if not owner_first:
            callers.reverse()
        assert isinstance(callers[0].end().error, InvalidArgumentError)
        assert callers[1].answer().shape == (0, *other.shape[1:])
        assert unbatch_grad().tolist() == X.tolist(), "its id is free again"
        clock.advance(60.1)
        assert weft.sweep() == 0

    def test_a_gradient_that_never_comes(self, clock):
        with weft.gradient_deadline(5.0):
            owner = start_on(clock, unbatch_grad, index=[[7, 0, 2], [8, 2, 1]])
            clock.run_out()
        with pytest.raises(DeadlineExceededError):
            owner.answer()
        assert (clock.now(), weft.sweep()) == (5.0, 0)
        assert unbatch_grad().tolist() == X.tolist()

    def test_nothing_of_an_id_that_is_known_as_empty_is_kept(self, clock):
        empty = batch([X[:0]])
        assert unbatch(empty.batched_tensors[0], empty.batch_index, empty.id).shape == (0, 3)
        grad = unbatch_grad(empty.batched_tensors[0], empty.batch_index, X[:0], empty.id)
        assert grad.shape == (0, 3)
        assert weft.sweep() == 0


class TestSettings:
    @pytest.mark.parametrize("seconds", [0, -1, 1e300, float("inf"), float("nan"), "1"])
    def test_gradient_deadline_must_be_a_positive_number(self, seconds):
        with pytest.raises(InvalidArgumentError, match="must be a positive number of seconds"):
            weft.gradient_deadline(seconds)

    def test_a_very_long_deadline(self):
        with weft.scope(), weft.gradient_deadline(1e9):
            owner = start(unbatch_grad, index=[[7, 0, 2], [8, 2, 1]])
            while weft.sweep() == 0 and owner.is_alive():
                pass
            TestUnbatchGrad.send(8)
            assert owner.answer().shape == (3, 3)

    def test_priority(self):
        with pytest.raises(ValueError), weft.priority("middle"):
            raise AssertionError

    def test_kernels(self):
        with pytest.raises(ValueError), weft.kernels.use("fast"):
            raise AssertionError
