"""Gradients of batched calls in NumPy: a user's own vjp, and pull-backs that callers call."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
from support.batched_calls import FULL, rows, waiting
from support.callers import start, start_on, together

import weft
from weft.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError


@pytest.fixture
def scope():
    with weft.scope() as scope:
        yield scope


class Squares:
    """x squared, plus twice b; it counts its backwards."""

    def __init__(self):
        self.forwards, self.backwards = [], []

    def __call__(self, x, b):
        return {"y": x**2 + 2 * b, "n": 3}

    def vjp(self, x, b):
        self.forwards.append(len(x))

        def pull_back(gradient):
            self.backwards.append(len(gradient["y"]))
            return gradient["y"] * 2 * x, gradient["y"] * 2

        return self(x, b), pull_back


def make(**options):
    model = Squares()
    return model, weft.batched(model, vjp=model.vjp, **options)


def work(policy, i):
    x, b = rows(*range(i + 1)) + 1, np.ones((i + 1, 1))
    result, pull_back = policy.vjp(x, b)
    np.testing.assert_array_equal(result["y"], x**2 + 2)
    grad_x, grad_b = pull_back({"y": np.full_like(x, i + 1), "n": None})
    np.testing.assert_array_equal(grad_x, 2 * x * (i + 1))
    np.testing.assert_array_equal(grad_b, np.full_like(b, 2 * (i + 1)))


def test_one_backward_for_all(scope):
    model, policy = make(max_batch_size=6, **FULL)
    for caller in together([lambda i=i: work(policy, i) for i in range(3)]):
        caller.answer()
    assert (model.forwards, model.backwards) == ([6], [6])
    assert policy.statistics().backwards == 1


def test_in_tasks(scope):
    async def one(i):
        x, b = rows(*range(i + 1)) + 1, np.ones((i + 1, 1))
        _, pull_back = await policy.aio.vjp(x, b)
        grad_x, _ = await pull_back({"y": np.full_like(x, i + 1), "n": None})
        np.testing.assert_array_equal(grad_x, 2 * x * (i + 1))

    async def main():
        await asyncio.gather(*(one(i) for i in range(3)))

    model, policy = make(max_batch_size=6, **FULL)
    asyncio.run(main())
    assert (model.forwards, model.backwards) == ([6], [6])


def test_padding_and_splitting(scope):
    model, policy = make(max_batch_size=4, allowed_batch_sizes=[4], split=True, max_wait=0.05)
    callers = [start(work, policy, i) for i in (6, 2)]
    for caller in callers:
        caller.answer()
    assert set(model.forwards) == {4}
    assert sorted(model.backwards) == [4] * len(model.forwards)


def test_one_array_alone_and_one_example(scope):
    def vjp(x):
        return x * 3, lambda g: g * 3

    policy = weft.batched(lambda x: x * 3, vjp=vjp, rows=False)
    y, pull_back = policy.vjp(np.array([1.0, 2.0]))
    np.testing.assert_array_equal(y, [3, 6])
    np.testing.assert_array_equal(pull_back(np.array([1.0, 10.0])), [3, 30])


def test_a_gradient_gets_the_dtype_of_the_result(scope):
    policy = weft.batched(np.abs, vjp=lambda x: (x, lambda gradient: gradient))
    _, pull_back = policy.vjp(np.ones((2, 1), np.float32))
    gradient = pull_back(np.array([[1], [2]]))
    assert (gradient.dtype, gradient.tolist()) == (np.float32, [[1], [2]])


def test_calls_without_one_do_not_meet_it(scope):
    model, policy = make()
    assert policy(rows(2), rows(0))["y"].item() == 4
    assert model.forwards == []


class TestRefused:
    def test_without_vjp(self, scope):
        with pytest.raises(FailedPreconditionError, match="make it with vjp="):
            weft.batched(lambda x: x).vjp(rows(1))

    @pytest.mark.parametrize(
        ("gradient", "said"),
        [
            ({"y": rows(1), "n": None}, r"must have the shape of the result, \[2, 1\], got \[1, 1\]"),
            ({"y": rows(1, 2, 3), "n": None}, r"must have the shape of the result, \[2, 1\], got \[3, 1\]"),
            ({"y": rows(1, 2) * 1j, "n": None}, "of a real result must be real, got complex128"),
            ((rows(1, 2), rows(1, 2), rows(1, 2)), "must have the 1 arrays of the result, got"),
            ({"y": 1.0, "n": None}, r"must have the 1 arrays of the result, got \['float'\]"),
        ],
    )
    def test_gradients_of_another_shape_leave_it_open(self, scope, gradient, said):
        _, policy = make()
        _, pull_back = policy.vjp(rows(1, 2), rows(1, 2))
        with pytest.raises(InvalidArgumentError, match=said):
            pull_back(gradient)
        assert pull_back({"y": rows(1, 1), "n": None})[0].tolist() == [[2], [4]]

    def test_a_gradient_of_another_library(self, scope):
        torch = pytest.importorskip("torch")
        _, pull_back = make()[1].vjp(rows(1), rows(1))
        with pytest.raises(InvalidArgumentError, match="of the result's library, numpy, got one of torch"):
            pull_back({"y": torch.ones(1, 1), "n": None})

    def test_a_second_time(self, scope):
        _, policy = make()
        _, pull_back = policy.vjp(rows(1), rows(1))
        pull_back({"y": rows(1), "n": None})
        with pytest.raises(FailedPreconditionError, match="handed in already"):
            pull_back({"y": rows(1), "n": None})

    def test_a_vjp_that_is_none(self, scope):
        policy = weft.batched(lambda x: x, vjp=lambda x: x)
        with pytest.raises(FailedPreconditionError, match="result and a pull-back"):
            policy.vjp(rows(1))

    def test_gradients_without_the_rows_of_the_batch(self, scope):
        policy = weft.batched(lambda x: x, vjp=lambda x: (x, lambda g: g[:1]))
        _, pull_back = policy.vjp(rows(1, 2))
        with pytest.raises(FailedPreconditionError, match="must have the 2 rows"):
            pull_back(rows(1, 2))

    @pytest.mark.parametrize("given", [(1.0,), (None,), (rows(1),), (rows(1), rows(1), rows(1)), (rows(1), 2.0)])
    def test_not_one_gradient_for_each_array(self, scope, given):
        policy = weft.batched(lambda x, y: x, vjp=lambda x, y: (x, lambda g: given))
        _, pull_back = policy.vjp(rows(1), rows(1))
        with pytest.raises(FailedPreconditionError, match="a gradient for each of the 2 arrays"):
            pull_back(rows(1))

    def test_none_for_what_has_no_gradient(self, scope):
        policy = weft.batched(lambda a, x, y: x, vjp=lambda a, x, y: (x, lambda g: (None, None, g * 3)))
        _, pull_back = policy.vjp("a", rows(1), rows(1))
        left, right = pull_back(rows(1))
        assert (left, right.item()) == (None, 3)
        policy = weft.batched(lambda a, x: x, vjp=lambda a, x: (x, lambda g: (rows(1), g)))
        _, pull_back = policy.vjp("a", rows(1))
        with pytest.raises(FailedPreconditionError, match="a gradient for each of the 1 arrays"):
            pull_back(rows(1))


class TestMissing:
    def test_one_that_is_dropped(self, scope):
        _, policy = make(max_batch_size=2, **FULL)
        pulls = [caller.answer()[1] for caller in together([lambda: policy.vjp(rows(1), rows(1))] * 2)]
        del pulls[0]
        with pytest.raises(FailedPreconditionError, match="dropped without a backward"):
            pulls[0]({"y": rows(1), "n": None})

    def test_zero_for_it(self, scope):
        model, policy = make(max_batch_size=2, on_missing_gradient="zero", **FULL)
        pulls = [caller.answer()[1] for caller in together([lambda: policy.vjp(rows(3), rows(1))] * 2)]
        del pulls[0]
        assert pulls[0]({"y": rows(1), "n": None})[0].item() == 6
        assert model.backwards == [2]

    def test_the_deadline(self):
        clock = weft.SimulatedClock()
        with weft.scope(clock):
            _, policy = make(max_batch_size=2, max_wait=1.0, gradient_deadline=3.0)
            callers = [start_on(clock, policy.vjp, rows(1), rows(1)) for _ in range(2)]
            pulls = [caller.answer()[1] for caller in callers]
            waiting = start_on(clock, pulls[0], {"y": rows(1), "n": None})
            clock.advance(2.9)
            assert waiting.is_alive()
            clock.advance(0.2)
            with pytest.raises(DeadlineExceededError):
                waiting.answer()

    def test_an_error_in_the_pull_back_reaches_all(self, scope):
        def broken(g):
            raise ZeroDivisionError("no gradient")

        policy = weft.batched(lambda x: x, vjp=lambda x: (x, broken), max_batch_size=3, **FULL)
        callers = together([lambda: policy.vjp(rows(1))[1](rows(1))] * 3)
        assert [type(c.error) for c in callers] == [ZeroDivisionError] * 3
        assert len({id(c.error) for c in callers}) == 3


def test_the_gradient_of_a_number(scope):
    """With `rows=False` the result of a caller is a number where the batch has one for each row, and so is its gradient."""
    policy = weft.batched(
        lambda x: x.sum(axis=1), rows=False, vjp=lambda x: (x.sum(axis=1), lambda dy: dy[:, None] * np.ones_like(x))
    )
    for gradient in (np.float64(3), 3.0, np.array(3.0)):
        y, pull_back = policy.vjp(np.array([1.0, 2.0]))
        assert y == 3
        assert pull_back(gradient).tolist() == [3, 3]


class TestSplitCallsKeepNothing:
    """The slices of a call and the call refer to each other. What others wait for must not need the garbage collector."""

    @pytest.fixture(autouse=True)
    def no_collection(self):
        gc.disable()
        yield
        gc.enable()

    def make(self, **options):
        def double(x):
            if (x < 0).any():
                raise ValueError("negative")
            return x * 2

        return weft.batched(
            double, vjp=lambda x: (double(x), lambda dy: dy * 2), max_batch_size=2, split=True,
            on_missing_gradient="zero", **options,
        )  # fmt: skip

    def other(self, policy):
        return start(lambda: policy.vjp(rows(5))[1](rows(1)).tolist())

    def test_a_pull_back_that_is_dropped(self, scope):
        policy = self.make(**FULL)
        other = self.other(policy)
        waiting(policy, 1)
        y, pull_back = policy.vjp(rows(1, 2, 3))  # one row with the other caller, two by themselves
        assert y.tolist() == [[2], [4], [6]]
        del pull_back
        assert other.answer(10) == [[2]]

    def test_a_call_of_which_a_part_fails(self, scope):
        policy = self.make(**FULL)
        other = self.other(policy)
        waiting(policy, 1)
        with pytest.raises(ValueError, match="negative"):
            policy.vjp(rows(1, 2, -3))
        assert other.answer(10) == [[2]]

    def test_a_caller_that_is_interrupted_with_its_result(self, scope):
        policy = self.make(**FULL)
        other = self.other(policy)
        waiting(policy, 1)
        request = policy._request((rows(1, 2, 3),), {}, policy._plain, True)
        policy._answer(request)
        request.abandon()  # as a call does that an exception ends; its batch may refer to it for long
        assert other.answer(10) == [[2]]


def test_a_task_that_drops_its_pull_back(scope):
    """The others are told at once, without the garbage collector."""

    async def drop():
        await policy.aio.vjp(rows(1))

    policy = weft.batched(
        lambda x: x * 2, vjp=lambda x: (x * 2, lambda dy: dy * 2), max_batch_size=2, on_missing_gradient="zero", **FULL
    )
    gc.disable()
    try:
        other = start(lambda: policy.vjp(rows(5))[1](rows(1)).tolist())
        waiting(policy, 1)
        asyncio.run(drop())
        assert other.answer(10) == [[2]]
    finally:
        gc.enable()
