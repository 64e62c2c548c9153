"""Routing: a call goes where it is answered first, slow replicas are tried rarely, and open batches are filled in order."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from support.libraries import need

need("msgspec")
need("optree")

from support.ray_local import local  # noqa: E402
from support.ray_routing import World  # noqa: E402

from weft import errors  # noqa: E402
from weft.ray import calls  # noqa: E402
from weft.ray.batch_time import BatchTime  # noqa: E402
from weft.ray.frames import Load  # noqa: E402
from weft.ray.routing import Candidate, Router  # noqa: E402


def always(seconds):
    return lambda rows, now: seconds


def by_rows(base, per_row):
    return lambda rows, now: base + per_row * rows


def between(begin, end, slow, else_):
    return lambda rows, now: slow if begin <= now < end else else_


# --- adding a replica never makes it slower ---

FAST = always(0.002)
CALLERS = [{}, {"clients": 16}, {"clients": 4}, {"callers": 1}]
ADDED = {
    "20 ms": [always(0.02)],
    "200 ms": [always(0.2)],
    "both": [always(0.02), always(0.2)],
    "seven": [always(0.2)] * 7,
    "fifteen": [always(0.02)] * 15,
    "as fast": [FAST],
    "half as fast": [always(0.004)],
    "a little slower": [always(0.0025)],
}


@pytest.mark.parametrize("callers", CALLERS, ids=str)
@pytest.mark.parametrize("added", ADDED)
def test_adding_a_replica_never_makes_it_slower(added, callers):
    alone = World([FAST], **callers).run(3).rate(1)
    begin = 4 if added == "seven" else 1  # a single caller begins with a call to each of the seven
    assert World([FAST, *ADDED[added]], **callers).run(begin + 2).rate(begin) > 0.95 * alone


@pytest.mark.parametrize("callers", CALLERS[:3], ids=str)
def test_a_slow_replica_helps_where_the_fast_one_is_full(callers):
    """Batches of one row: the queue of the fast one is 32 ms long, and the slow one takes 20 ms."""
    alone = World([FAST], most=1, **callers).run(3).rate(1)
    assert World([FAST, always(0.02)], most=1, **callers).run(3).rate(1) > 1.05 * alone
    assert World([FAST, always(0.2)], most=1, **callers).run(3).rate(1) > 0.95 * alone
    assert World([FAST, FAST], most=1, **callers).run(3).rate(1) > 1.9 * alone


@pytest.mark.parametrize("callers", CALLERS, ids=str)
@pytest.mark.parametrize(("factor", "gain"), [(1, 0.95), (2, 0.95), (10, 0.95)])
def test_replicas_whose_time_depends_on_the_rows(factor, gain, callers):
    alone = World([by_rows(0.001, 0.001)], **callers).run(4).rate(1)
    both = World([by_rows(0.001, 0.001), by_rows(0.001 * factor, 0.001 * factor)], **callers).run(4).rate(1)
    assert both > (1.25 if factor < 10 and callers != {"callers": 1} else gain) * alone


def test_rows_of_unequal_cost():
    def uneven(seed, base=0.002):
        draw = random.Random(seed).random
        return lambda rows, now: base + sum(0.02 for _ in range(rows) if draw() < 0.1)

    alone = World([uneven(0)]).run(10).rate(1)
    assert World([uneven(0), uneven(1)]).run(10).rate(1) > 1.5 * alone
    assert World([uneven(0), uneven(1, 0.04)]).run(10).rate(1) > 0.95 * alone


def test_calls_of_many_rows():
    def rows(draw):
        return draw.choice([1, 1, 1, 1, 32])

    alone = World([by_rows(0.001, 0.0005)], rows=rows).run(6).rate(1)
    assert World([by_rows(0.001, 0.0005)] * 2, rows=rows).run(6).rate(1) > 1.5 * alone
    assert World([by_rows(0.001, 0.0005), by_rows(0.01, 0.005)], rows=rows).run(6).rate(1) > 0.95 * alone


@pytest.mark.parametrize("callers", [{}, {"clients": 16}], ids=str)
def test_a_replica_far_away_counts_as_slow(callers):
    alone = World([FAST], **callers).run(3).rate(1)
    world = World([FAST, FAST], trip=[0.0001, 0.01], **callers).run(3)
    assert world.rate(1) > 0.95 * alone
    assert world.share(1) < 0.02


@pytest.mark.parametrize("callers", [{}, {"clients": 16}, {"callers": 1}], ids=str)
@pytest.mark.parametrize("replicas", [[0.02, 0.002], [0.2, 0.002], [0.002, 0.2], [0.002, 0.002]], ids=str)
def test_where_batches_wait_slow_replicas_are_not_filled(replicas, callers):
    alone = World([FAST], max_wait=0.005, **callers).run(4).rate(1)
    world = World([always(each) for each in replicas], max_wait=0.005, **callers).run(4)
    assert world.rate(1) > 0.95 * alone


# --- replicas that change ---


def test_a_replica_that_becomes_slow_is_left_and_used_again_when_it_has_recovered():
    world = World([FAST, between(2.0, 4.0, 0.2, 0.002)], most=4).run(8)
    before, slow, after = world.rate(1, 2), world.rate(2.5, 4), world.rate(6, 8)
    alone = World([FAST], most=4).run(3).rate(1)
    assert before > 1.3 * alone
    assert slow > 0.95 * alone
    assert after > 0.95 * before


def test_the_fastest_becomes_slow_and_recovers():
    world = World([always(0.02), between(2.0, 4.0, 0.2, 0.002)]).run(8)
    alone = World([always(0.02)]).run(4).rate(1)
    assert world.rate(3, 4) > 0.95 * alone  # after a few slow batches
    assert world.rate(6, 8) > 0.95 * world.rate(1, 2)


def test_a_replica_that_does_not_answer_keeps_the_calls_it_has_and_gets_no_others():
    world = World([FAST, between(1.0, 1.5, 30.0, 0.002)], callers=64, most=8).run(3)
    alone = World([FAST], callers=32, most=8).run(3).rate(1)
    assert world.rate(2) > 0.95 * alone
    assert sum(candidate.under_way != {} for candidate in world.clients[0].candidates) == 2


def test_probes_of_slow_replicas_cost_little():
    world = World([FAST, always(0.2)], callers=4).run(20)
    probes = [now for now, _, place in world.answered if place == 1 and now > 1]
    assert 2 <= len(probes) <= 0.03 * 4 * 19 / 0.2


def test_a_call_with_a_deadline_is_no_probe():
    router = Router(64, seed=0)
    fast, slow = known(router, 0.002, 0.2)
    router.settle(TRIP, 1000.0)
    assert {router.choose([fast, slow], 1, 1.0, until=1.1) for _ in range(50)} == {0}
    assert router.choose([fast, slow], 1, 1.0) == 1


def test_what_was_saved_for_probes_is_not_spent_at_once():
    router = Router(64, seed=0)
    fast, slow = known(router, 0.002, 0.2)
    router.settle(TRIP, 1e6)
    chosen = [router.choose([fast, slow], 1, 1.0) for _ in range(50)]
    assert sum(chosen) <= 3


# --- the choice ---

TRIP = type("Trip", (), {"sent": 0.0, "paid": None})


def candidates(router, *loads, base=0.001):
    found = []
    for waiting, running in loads:
        each = Candidate(router)
        each.report(Load(0, waiting, running, 0, base, 0.0), 1.0)
        found.append(each)
    return found


def known(router, *seconds):
    found = [Candidate(router) for _ in seconds]
    for each, base in zip(found, seconds, strict=True):
        each.report(Load(base=base), 1.0)
    return found


def choose(router, loads, rows=1):
    return {router.choose(candidates(router, *loads), rows, 1.0) for _ in range(50)}


def test_a_free_replica_comes_first():
    assert choose(Router(64), [(10, 1), (0, 0)]) == {1}
    assert choose(Router(64), [(0, 1), (0, 0)]) == {1}
    assert choose(Router(64, parallel=2), [(0, 2), (0, 1)]) == {1}


def test_the_shorter_of_two_queues():
    assert choose(Router(64), [(10, 1), (40, 1)]) == {0}


def test_a_long_queue_of_a_fast_replica_and_a_slow_one():
    router = Router(10)
    fast, slow = known(router, 0.002, 0.02)
    fast.report(Load(0, 80, 1, 10, 0.002, 0.0), 1.0)  # 2 + 8 * 2 + 2 ms
    assert router.choose([fast, slow], 1, 1.0) == 1
    fast.report(Load(0, 60, 1, 10, 0.002, 0.0), 1.0)
    assert router.choose([fast, slow], 1, 1.0) == 0


def send(router, candidate, rows=1, now=1.0):
    candidate.begin(object(), rows, now)


def test_load_spreads():
    router = Router(64, seed=1)
    many = candidates(router, *[(0, 0)] * 10)
    for _ in range(200):
        send(router, many[router.choose(many, 1, 1.0)])
    assert max(each.sent for each in many) <= 24


def test_a_new_replica_gets_one_call_beside_others():
    router = Router(64, seed=0)
    old, new = known(router, 0.002, 0.0)
    assert router.choose([old, new], 1, 1.0) == 1
    send(router, new)
    assert {router.choose([old, new], 1, 1.0) for _ in range(50)} == {0}


def test_new_replicas_alone_share_the_calls():
    router = Router(64, seed=0)
    both = known(router, 0.0, 0.0)
    for _ in range(10):
        send(router, both[router.choose(both, 1, 1.0)])
    assert [each.sent for each in both] == [5, 5]


def test_a_replica_that_owes_an_answer_is_left_out_until_it_answers():
    router = Router(64, seed=0)
    both = known(router, 0.002, 0.004)
    send(router, both[0])
    assert router.choose(both, 1, 1.001) == 0
    assert router.choose(both, 1, 1.05) == 1
    (call,) = both[0].under_way
    both[0].give_up(call, 1.05)  # its caller's deadline
    assert router.choose(both, 1, 1.06) == 1
    both[0].report(Load(base=0.002), 1.07)
    assert router.choose(both, 1, 1.08) == 0


def test_a_pause_of_the_client_is_no_fault_of_a_replica():
    router = Router(64, seed=0)
    both = known(router, 0.002, 0.02)
    for _ in range(16):
        send(router, both[0])
    for call in list(both[0].under_way):
        both[0].end(call, 1.2)
        both[0].report(Load(base=0.002), 1.2)
    assert both[0].expected(1, 1.2) < 0.01


def test_where_batches_wait_to_be_filled_they_are_filled_in_order():
    router = Router(4, fills=True)
    three = candidates(router, (0, 0), (0, 0), (0, 0))

    def place(rows):
        found = router.choose(three, rows, 1.0)
        send(router, three[found], rows)
        return found

    assert [place(1) for _ in range(6)] == [0, 0, 0, 0, 1, 1]
    assert place(3) == 2  # the second has room for 2
    assert place(2) == 1
    assert choose(Router(4, fills=True), [(4, 1), (4, 1)]) == {0, 1}  # no room anywhere


def test_replicas_whose_batches_are_full_anyway_are_not_filled_in_order():
    router = Router(64, fills=True, seed=0)
    both = candidates(router, (0, 0), (0, 0))
    both[1].report(Load(0, 0, 0, 60, 0.001, 0.0), 1.0)
    assert {router.choose(both, 1, 1.0) for _ in range(50)} == {0, 1}
    new = [Candidate(router), Candidate(router)]  # that have not answered yet
    assert {router.choose(new, 1, 1.0) for _ in range(50)} == {0, 1}


def test_one_replica_needs_no_choice():
    router = Router(64)
    assert router.choose(candidates(router, (0, 0)), 1, 1.0) == 0


# --- how long batches take ---


def test_batches_on_a_line():
    times = BatchTime()
    times.add(1, 5.0, 5.0)
    assert times.base + times.per_row == 5.0  # better than nothing
    for i in range(100):
        rows = 1 + i % 8
        times.add(rows, 0.002 + 0.001 * rows, 6.0 + i * 0.01)
    assert times.base == pytest.approx(0.002, rel=0.1)
    assert times.per_row == pytest.approx(0.001, rel=0.1)


def test_batches_of_one_size():
    times = BatchTime()
    for i in range(20):
        times.add(16, 0.008, i * 0.01)
    assert times.base + 16 * times.per_row == pytest.approx(0.008)
    assert 0 < times.per_row < 0.0005


def test_batches_without_rows_and_faster_ones_with_more():
    times = BatchTime()
    for i in range(20):
        times.add(0, 0.001, i * 0.01)
    assert (times.base, times.per_row) == (pytest.approx(0.001), 0.0)
    for i in range(20):
        times.add(1 + i % 2, 0.004 / (1 + i % 2), 1.0 + i * 0.01)
    assert times.base > 0
    assert times.per_row >= 0


def test_what_was_long_ago_is_forgotten():
    times = BatchTime()
    for i in range(50):
        times.add(1, 0.2, i * 0.2)
    times.add(1, 0.002, 30.0)
    assert times.base + times.per_row < 0.01


# --- the calls ---


def test_the_slow_one_of_two_real_replicas_gets_few_calls():
    """The first batch of the slow one ends only when the calls are over."""
    made, over = iter(range(2)), threading.Event()

    def make():
        is_slow = next(made) == 1

        def model(x):
            if is_slow:
                over.wait(60)
            return x + is_slow

        return model

    x = np.zeros((1, 1))
    with local(make, replicas=2) as deployment:
        answers = []

        def work():
            answers.extend(deployment.handle(x).item() for _ in range(25))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 60
        while len(answers) < 50:  # by the fast one alone
            assert time.monotonic() < until
        over.set()
        for thread in threads:
            thread.join(60)
        assert len(answers) == 200
        assert answers[:50].count(0.0) == 50


def test_a_replica_tells_how_long_its_batches_take():
    made = iter([0.0, 0.03])

    def make():
        seconds = next(made)

        def model(x):
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                pass
            return x

        return model

    with local(make, replicas=2) as deployment:
        policy, x = deployment.handle, np.zeros((1, 1))
        for _ in range(60):
            policy(x)
        fast, slow = (remote.candidate for remote in sorted(policy._client._table[0], key=lambda each: each.name))
        assert 0 < fast.batch_seconds(1) < 0.03 <= slow.batch_seconds(1)
        assert not fast.under_way
        assert not slow.under_way
        counts = [each.calls for each in policy.statistics(per_replica=True)]
        assert sum(counts) == 60
        assert counts[1] <= 5
        late = policy._client.__class__(policy._description)  # another process hears of it before its first call
        late.refresh()
        for remote in late._table[0]:
            late.link(remote)
        assert {remote.candidate.batch_seconds(1) >= 0.03 for remote in late._table[0]} == {False, True}
        late.disconnect()


def test_calls_that_fail_or_are_given_up_are_not_under_way_any_more(monkeypatch):
    monkeypatch.setattr(calls, "GRACE_SECONDS", 0.0)
    is_open = threading.Event()

    def make():
        def model(x):
            if x[0, 0] < 0:
                raise ValueError("negative")
            if x[0, 0] > 0:
                is_open.wait(30)
            return x

        return model

    with local(make, max_batch_size=1) as deployment:
        policy = deployment.handle
        policy(np.zeros((1, 1)))
        (candidate,) = policy._client._table[1]
        with pytest.raises(ValueError, match="negative"):
            policy(-np.ones((1, 1)))
        assert not candidate.under_way
        assert candidate._stuck < 0.05  # the answer was an error, but it came
        with pytest.raises(errors.DeadlineExceededError):
            policy.call(np.ones((1, 1)), deadline=0.05)
        assert not candidate.under_way
        assert candidate._stuck > 0.05
        is_open.set()
        policy(np.zeros((1, 1)))
        assert candidate._stuck == 0.0
