"""Whose mistake is whose: a failing batch is tried in halves, and only the guilty get the error."""

from __future__ import annotations

import asyncio
import itertools
from math import ceil, inf, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batched_calls import FULL, Model, held, rows, waiting
from support.callers import start, start_on, together

import weft
from weft.batching.isolation import Isolation
from weft.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError


@pytest.fixture
def scope():
    with weft.scope() as scope:
        yield scope


class BadRow(ValueError):
    """With an argument of its own and more beside it."""

    def __init__(self, row):
        super().__init__(f"row {row} is bad")
        self.row = row


def strict(x):
    """Twice, but no negative rows."""
    for row in np.asarray(x).ravel():
        if row < 0:
            raise BadRow(float(row))
    return x * 2


def run_together(policy, model, values):
    """The callers, whose calls shared a batch in this order."""
    first = held(policy, model, np.zeros((1, 1)))
    callers = []
    for i, value in enumerate(values, 1):
        callers.append(start(policy, rows(value)))
        waiting(policy, i)
    model.gate.set()
    first.answer()
    return [caller.end() for caller in callers]


class Waiting:
    """A task whose caller waits."""

    deadline, has_departed = inf, False

    def __init__(self, i):
        self.i, self.owner = i, self


def outcome(policy, x):
    """The result of a call, None if it failed."""
    try:
        return policy(x).item()
    except ValueError:
        return None


def check(callers, values):
    """Good ones have their answer, bad ones their own error."""
    for caller, value in zip(callers, values, strict=True):
        if value < 0:
            assert type(caller.error) is BadRow
            assert (caller.error.row, str(caller.error)) == (value, f"row {float(value)} is bad")
        else:
            assert caller.answer().item() == 2 * value


class TestIsolation:
    @pytest.mark.parametrize("callers", [2, 3, 5, 8, 13, 64])
    @pytest.mark.parametrize("place", [0, -1])
    def test_one_guilty_among_many(self, scope, callers, place):
        model = Model(strict)
        policy = weft.batched(model)
        values = list(range(1, callers + 1))
        values[place] = -5
        check(run_together(policy, model, values), values)
        assert len(model.batches) - 1 <= 2 * ceil(log2(callers)) + 2
        assert policy.statistics().failed == 1

    def test_two_with_errors_of_their_own(self, scope):
        model = Model(strict)
        values = [1, 2, -3, -4]
        check(run_together(weft.batched(model), model, values), values)
        assert len(model.batches) - 1 <= 6

    def test_20_rounds_of_one_invalid_call_among_8(self, scope):
        policy = weft.batched(strict, max_batch_size=8, **FULL)
        good = 0
        for turn in range(20):
            values = [float(-1 - turn if i == turn % 8 else i) for i in range(8)]
            callers = together([lambda v=v: policy(rows(v)) for v in values])
            check(callers, values)
            good += sum(caller.error is None for caller in callers)
        assert good == 140
        assert policy.statistics().sizes == {8: 20}

    def test_one_that_cannot_even_be_joined_fails_before(self, scope):
        policy = weft.batched(strict, max_batch_size=7, **FULL)
        calls = [lambda i=i: policy(rows(i)) for i in range(7)] + [lambda: policy(rows(1), rows(1, 2))]
        callers = together(calls)
        assert [c.answer().item() for c in callers[:7]] == [2 * i for i in range(7)]
        assert callers[7].error is not None

    def test_a_broken_function_is_run_twice_for_each_call_at_most(self, scope):
        def f(x):
            raise RuntimeError("the model is broken")

        model = Model(f)
        policy = weft.batched(model, max_batch_size=64, **FULL)
        callers = together([lambda i=i: policy(rows(i)) for i in range(64)])
        assert {str(c.error) for c in callers} == {"the model is broken"}
        assert len({id(c.error) for c in callers}) == 64
        assert len(model.batches) == 127

    @given(st.lists(st.booleans(), min_size=2, max_size=70))
    def test_any_number_of_guilty_tasks(self, is_bad):
        runs = []

        def run(tasks):
            runs.append(tasks)
            if any(is_bad[task.i] for task in tasks):
                raise ValueError("bad")
            return [task.i for task in tasks]

        tasks = [Waiting(i) for i in range(len(is_bad))]
        results = Isolation(run, weft.SimulatedClock()).results(tasks, ValueError("bad"))
        for i, (bad, result) in enumerate(zip(is_bad, results, strict=True)):
            assert isinstance(result, ValueError) if bad else result == i
        if any(is_bad):
            assert len(runs) + 1 <= 2 * sum(is_bad) * ceil(log2(len(is_bad))) + 2
        assert len(runs) + 1 <= 2 * len(is_bad)

    @pytest.mark.parametrize("guilty", [2, 3])
    def test_100_rounds_of_some_invalid_calls_among_8(self, scope, guilty):
        """Their errors are all alike."""

        def f(x):
            if (x < 0).any():
                raise ValueError("negative")
            return x * 2

        policy = weft.batched(f, max_batch_size=8, **FULL)
        places = itertools.cycle(itertools.combinations(range(8), guilty))
        values = [
            [-1.0 if i in bad else float(i) for i in range(8)] for bad, _ in zip(places, range(100), strict=False)
        ]
        callers = together([lambda i=i: [outcome(policy, rows(turn[i])) for turn in values] for i in range(8)])
        answers = [caller.answer() for caller in callers]
        for at, turn in enumerate(values):
            assert [answer[at] for answer in answers] == [None if value < 0 else 2 * value for value in turn]
        assert policy.statistics().sizes == {8: 100}
        assert policy.statistics().failed == 100 * guilty

    def test_an_array_resized_before_a_second_run(self, scope):
        x = np.ones(1)

        def f(batch):
            x.resize(3, refcheck=False)
            return strict(batch)

        policy = weft.batched(f, max_batch_size=3, **FULL)
        callers = together([lambda v=v: policy(v) for v in (x, np.array([-1.0]), np.array([2.0]))])
        assert isinstance(callers[0].error, InvalidArgumentError)
        assert isinstance(callers[1].error, BadRow)
        assert callers[2].answer().tolist() == [4]

    def test_it_is_shared_where_that_is_asked_for(self, scope):
        model = Model(strict)
        values = [1, 2, -3]
        callers = run_together(weft.batched(model, on_error="share"), model, values)
        assert [type(c.error) for c in callers] == [BadRow] * 3
        assert len({id(c.error) for c in callers}) == 3
        assert [c.error.row for c in callers] == [-3] * 3
        assert len(model.batches) - 1 == 1

    def test_a_lone_call_gets_its_error_at_once(self, scope):
        model = Model(strict)
        with pytest.raises(BadRow) as caught:
            weft.batched(model)(rows(-1))
        assert len(model.batches) == 1
        assert isinstance(caught.value.__cause__, BadRow)

    def test_within_the_deadlines_of_the_callers(self):
        clock = weft.SimulatedClock()
        with weft.scope(clock):

            def f(x):
                clock.sleep(1.0)
                return strict(x)

            policy = weft.batched(f)
            first = start_on(clock, policy, rows(0))
            bad = start_on(clock, policy, rows(-1))
            hasty = start_on(clock, lambda: policy.call(rows(2), deadline=2.5))  # the batch fails at 2
            patient = start_on(clock, policy, rows(3))
            clock.run_out()
            assert first.answer().item() == 0
            assert type(bad.error) is BadRow
            assert isinstance(hasty.error, DeadlineExceededError)
            assert patient.answer().item() == 6
            assert policy.statistics().late == 1

    def test_padding_and_split_calls(self, scope):
        model = Model(strict)
        policy = weft.batched(model, max_batch_size=4, allowed_batch_sizes=[4], split=True)
        first = held(policy, model, rows(0))
        bad = start(policy, rows(1, 2, 3, 4, 5, -6))
        waiting(policy, 2)
        good = start(policy, rows(7))
        waiting(policy, 3)
        model.gate.set()
        first.answer()
        assert good.answer().item() == 14
        assert type(bad.end().error) is BadRow
        assert set(model.sizes) == {4}

    def test_tasks(self, scope):
        async def main():
            return await asyncio.gather(*(policy.aio(rows(v)) for v in values), return_exceptions=True)

        values = [1, -2, 3, 4]
        policy = weft.batched(strict, max_batch_size=4, **FULL)
        got = asyncio.run(main())
        assert type(got[1]) is BadRow
        assert [got[i].item() for i in (0, 2, 3)] == [2, 6, 8]

    def test_the_batcher_goes_on(self, scope):
        policy = weft.batched(strict)
        for value in (-1, 2, -3, 4):
            if value < 0:
                with pytest.raises(BadRow):
                    policy(rows(value))
            else:
                assert policy(rows(value)).item() == 2 * value


class TestWithGradients:
    def test_the_gradients_of_the_others_are_exact(self, scope):
        torch = pytest.importorskip("torch")
        w = torch.tensor([2.0], requires_grad=True)

        def f(x):
            strict(x.detach().numpy())
            return x * w

        policy = weft.batched(f, max_batch_size=4, **FULL)
        values = [1.0, -2.0, 3.0, 4.0]
        callers = together([lambda v=v: policy(torch.tensor([[v]])).sum().backward() for v in values])
        assert [type(c.error) for c in callers] == [type(None), BadRow, type(None), type(None)]
        assert w.grad.item() == 8

    @pytest.mark.parametrize("guilty", [2, 3])
    def test_100_rounds_of_some_invalid_calls_among_8(self, scope, guilty):
        """The good ones go back, in as many batches as there were successful runs."""
        torch = pytest.importorskip("torch")
        w = torch.tensor([2.0], dtype=torch.double, requires_grad=True)
        ran = []

        def f(x):
            if (x < 0).any():
                raise ValueError("negative")
            ran.append(len(x))
            return x * w

        policy = weft.batched(f, max_batch_size=8, **FULL)
        places = itertools.cycle(itertools.combinations(range(8), guilty))
        bad = [next(places) for _ in range(100)]

        def play(i):
            done = []
            for turn in bad:
                x = torch.tensor([[-1.0 if i in turn else i + 1.0]], dtype=torch.double, requires_grad=True)
                try:
                    y = policy(x)
                    y.sum().backward()
                    done.append((y.item(), x.grad.item()))
                except ValueError:
                    done.append(None)
            return done

        answers = [caller.answer() for caller in together([lambda i=i: play(i) for i in range(8)])]
        for at, turn in enumerate(bad):
            assert [answer[at] for answer in answers] == [None if i in turn else (2 * (i + 1), 2) for i in range(8)]
        assert w.grad.item() == sum(i + 1 for turn in bad for i in range(8) if i not in turn)
        seen = policy.statistics()
        assert (seen.backwards, sum(ran), seen.failed) == (len(ran), 100 * (8 - guilty), 100 * guilty)

    def test_with_jax(self, scope):
        jax = pytest.importorskip("jax")

        def f(w, x):
            strict(jax.lax.stop_gradient(x))
            return x * w

        policy = weft.batched(f, shared=("w",), max_batch_size=4, **FULL)
        w = jax.numpy.float32(3.0)
        values = [1.0, -2.0, 3.0, -4.0]
        gradient = jax.grad(lambda w, x: policy(w, x).sum())
        callers = together([lambda v=v: gradient(w, jax.numpy.full((1, 1), v)) for v in values])
        assert [type(caller.error) for caller in callers] == [type(None), BadRow] * 2
        assert callers[0].value + callers[2].value == 4

    def test_with_pull_backs(self, scope):
        policy = weft.batched(strict, vjp=lambda x: (strict(x), lambda g: 2 * g), max_batch_size=4, **FULL)

        def both(v):
            y, pull_back = policy.vjp(rows(v))
            return y.item(), pull_back(rows(1)).item()

        callers = together([lambda v=v: both(v) for v in (1, -2, 3, -4)])
        assert [caller.value for caller in callers] == [(2, 2), None, (6, 2), None]
        assert [type(caller.error) for caller in callers[1::2]] == [BadRow] * 2


class TestResults:
    def test_a_wrong_number_of_rows_is_named_and_everyones(self, scope):
        model = Model(lambda x: x[1:])
        policy = weft.batched(model, max_batch_size=2, **FULL)
        callers = together([lambda i=i: policy(rows(i)) for i in range(2)])
        for caller in callers:
            with pytest.raises(FailedPreconditionError, match="must have the 2 rows of its batch, got 1 rows"):
                caller.answer()
        assert len(model.batches) == 1

    def test_errors_that_cannot_be_copied(self, scope):
        class Odd(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} and {b}")

        def f(x):
            raise Odd(1, 2)

        policy = weft.batched(f, max_batch_size=2, on_error="share", **FULL)
        callers = together([lambda: policy(rows(1))] * 2)
        assert [str(c.error) for c in callers] == ["1 and 2"] * 2
        assert len({id(c.error) for c in callers}) == 2

    @pytest.mark.parametrize("kind", [StopIteration, MemoryError, RecursionError, TimeoutError])
    def test_errors_of_every_kind(self, scope, kind):
        def f(x):
            raise kind("of the function")

        with pytest.raises(kind):
            weft.batched(f)(rows(1))
