"""Options that are changed while a batcher runs."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest
from support.aio_calls import Held, begin, run
from support.batched_calls import Slow, rows
from support.callers import start_on, together

import weft
from weft.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)


def test_options_are_readable():
    policy = weft.batched(lambda x: x, max_batch_size=8, allowed_batch_sizes=[2, 8])
    policy.update(max_batch_size=2, deadline=3.0)
    assert (policy.options.max_batch_size, policy.options.deadline, policy.options.allowed_batch_sizes) == (
        2,
        3.0,
        (2, 8),
    )
    assert repr(policy) == "<weft.Batcher " + policy.name + ": 2 to a batch, 1 at once>"


@pytest.mark.parametrize(
    "changes",
    [
        {"max_batch_size": 0},
        {"max_batch_size": 2, "parallel": 0},
        {"parallel": 2, "min_batch_size": 5},
        {"min_batch_size": 2},  # without max_wait
        {"max_batch_size": 16},  # above the allowed sizes
        {"max_queue": -1},
        {"deadline": "soon"},
        {"allowed_batch_sizes": 8},
        {"gradient_deadline": 0},
        {"max_bach_size": 3},
        {"rows": False},
        {"max_batch_size": 2, "split": True},
    ],
    ids=repr,
)
def test_a_refused_update_changes_nothing(changes):
    policy = weft.batched(lambda x: x, max_batch_size=4, allowed_batch_sizes=[4, 8])
    before = policy.options
    with pytest.raises(InvalidArgumentError):
        policy.update(**changes)
    assert policy.options is before
    assert policy(np.ones(4)).shape == (4,)


def test_the_sentences():
    policy = weft.batched(lambda x: x)
    for name, sentence in [("parallell", "did you mean parallel?"), ("split", "split of a batcher cannot be changed")]:
        with pytest.raises(InvalidArgumentError, match=sentence):
            policy.update(**{name: True})


def test_a_call_is_judged_by_the_limits_when_it_comes(clock):
    model = Slow(clock)
    policy = weft.batched(model, max_batch_size=8)
    first = [start_on(clock, policy, np.ones(n)) for n in (1, 8, 1, 1, 1)]
    policy.update(max_batch_size=2)
    with pytest.raises(InvalidArgumentError, match="at most max_batch_size = 2 rows, got 3"):
        policy(np.ones(3))
    clock.run_out()
    [caller.answer() for caller in first]
    assert model.sizes == [1, 8, 2, 1]  # what was too large by now ran alone


def test_low_priority_calls_above_a_new_limit(clock):
    model = Slow(clock)
    policy = weft.batched(model, max_batch_size=8)
    calls = [start_on(clock, policy, rows(1))]
    calls += [start_on(clock, lambda n=n: policy.call(np.ones(n), priority="low")) for n in (5, 2, 1)]
    policy.update(max_batch_size=2)
    clock.run_out()
    [caller.answer() for caller in calls]
    assert model.sizes == [1, 5, 2, 1]


def test_split_calls_above_a_new_limit(clock):
    model = Slow(clock)
    policy = weft.batched(model, max_batch_size=4, split=True)
    calls = [start_on(clock, policy, np.arange(n)) for n in (1, 7)]
    policy.update(max_batch_size=2)
    calls.append(start_on(clock, policy, np.arange(3)))
    clock.run_out()
    assert [caller.answer().tolist() for caller in calls] == [[0], [0, 2, 4, 6, 8, 10, 12], [0, 2, 4]]
    assert model.sizes[0] == 1
    assert max(model.sizes) == 2
    assert sum(model.sizes) == 11


def test_a_shorter_wait_counts_from_the_first_call(clock):
    model = Slow(clock, 0.0)
    policy = weft.batched(model, max_batch_size=8, max_wait=10.0)
    callers = [start_on(clock, policy, rows(1))]
    clock.advance(1.0)
    callers.append(start_on(clock, policy, rows(2)))
    policy.update(max_wait=3.0)
    clock.advance(1.5)
    assert not model.times
    clock.advance(1.0)
    assert [caller.answer().item() for caller in callers] == [2, 4]
    assert model.times == [3.0]


def test_an_update_starts_what_may_run_now(clock):
    model = Slow(clock)
    policy = weft.batched(model, max_batch_size=1, min_batch_size=1)
    callers = [start_on(clock, policy, rows(i)) for i in range(4)]
    policy.update(parallel=3)
    clock.settle()
    assert policy.statistics().running == 3
    policy.update(parallel=1)
    clock.run_out()
    [caller.answer() for caller in callers]
    assert model.times == [0, 0, 0, 1]
    waiting = weft.batched(model, max_wait=100.0)
    caller = start_on(clock, waiting, rows(1))
    waiting.update(max_wait=0.0)
    clock.run_out()
    assert caller.answer().item() == 2
    assert clock.now() < 10


def test_queue_deadline_and_sizes(clock):
    model = Slow(clock)
    policy = weft.batched(model, max_batch_size=4)
    first = [start_on(clock, policy, rows(1)) for _ in range(2)]
    policy.update(max_queue=0, deadline=0.5, allowed_batch_sizes=(4,))
    assert isinstance(start_on(clock, policy, rows(1)).error, UnavailableError)
    policy.update(max_queue=None)
    late = start_on(clock, policy, rows(1))
    clock.run_out()
    [caller.answer() for caller in first]
    assert isinstance(late.error, DeadlineExceededError)
    assert model.sizes == [1, 4]


def test_min_batch_size_follows_max_wait(clock):
    model = Slow(clock, 0.0)
    policy = weft.batched(model, max_batch_size=2)
    policy.update(max_wait=1.0)
    caller = start_on(clock, policy, rows(1))
    assert not model.times
    policy.update(min_batch_size=1)
    clock.settle()
    assert caller.answer().item() == 2


def test_a_closed_batcher():
    policy = weft.batched(lambda x: x)
    before = policy.options
    policy.close()
    with pytest.raises(CancelledError, match="was closed"):
        policy.update(parallel=2)
    assert policy.options is before


def test_in_a_replay(tmp_path):
    policy = weft.batched(lambda x: x, max_batch_size=4, name="f")
    with policy.record(tmp_path / "calls"):
        policy(np.ones(2))
    with policy.replay(tmp_path / "calls"):
        policy.update(max_batch_size=1, parallel=2)
        assert policy(np.ones(2)).shape == (2,)
    with pytest.raises(InvalidArgumentError, match="at most max_batch_size = 1 rows"):
        policy(np.ones(2))


def test_many_updates_at_once():
    """Every one of them is in the options at the end, and no call is lost."""
    with weft.scope():
        policy = weft.batched(lambda x: x + 1, max_batch_size=8)

        def work(i):
            if i % 2:
                policy.update(
                    **[{"parallel": 2}, {"max_queue": 1e6}, {"deadline": 30.0}, {"max_batch_size": 5}][i // 2 % 4]
                )
            return policy(rows(i)).item()

        callers = together([lambda i=i: [work(i) for _ in range(20)] for i in range(16)])
        assert [caller.answer() for caller in callers] == [[i + 1.0] * 20 for i in range(16)]
        options = policy.options
        assert (options.parallel, options.max_queue, options.deadline, options.max_batch_size) == (2, 1e6, 30.0, 5)
        assert policy.statistics().calls == 320


def test_a_finalizer_inside_the_bookkeeping_is_refused():
    from weft.core.lock import lock

    policy, errors = weft.batched(lambda x: x), []

    class Dying:
        def __del__(self):
            try:
                policy.update(parallel=2)
            except FailedPreconditionError as error:
                errors.append(error)

    with lock:
        Dying()
        gc.collect()
    assert len(errors) == 1
    assert policy.options.parallel == 1


def test_a_split_call_that_was_given_up_keeps_no_result_of_others(little_garbage):
    """The call and its slices refer to each other: it lives until the next collection."""
    model, results = Held(), []

    def f(x):
        answers = [{value} for value in model(x).ravel()]
        results.extend(map(weakref.ref, answers))
        return answers

    async def main():
        policy = weft.batched(f, max_batch_size=2, split=True)
        held, split, other = await begin(*(policy.aio(rows(*values)) for values in [[0], [1, 1, 1], [2]]))
        await asyncio.to_thread(model.wait)
        split.cancel()
        await asyncio.wait([split])
        policy.update(max_batch_size=4)
        model.go.set()
        assert [await call for call in (held, other)] == [[{0}], [{2}]]

    gc.disable()
    try:
        run(main())
        assert [result() for result in results] == [None, None]
    finally:
        gc.enable()
