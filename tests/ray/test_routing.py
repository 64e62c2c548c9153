"""Routing: the fullest open batch is joined, a free replica is taken first, and load spreads."""

from __future__ import annotations

from support.libraries import need

need("msgspec")

from weft.ray.frames import Load  # noqa: E402
from weft.ray.routing import Candidate, Router  # noqa: E402


def candidates(*loads):
    found = []
    for waiting, running in loads:
        each = Candidate()
        each.report(Load(0, waiting, running))
        found.append(each)
    return found


def choose(router, loads, rows=1):
    return {router.choose(candidates(*loads), rows) for _ in range(50)}


def test_a_free_replica_comes_first():
    assert choose(Router(64), [(10, 1), (0, 0)]) == {1}
    assert choose(Router(64, parallel=2), [(0, 2), (0, 1)]) == {1}


def test_of_two_open_batches_the_fuller_is_joined():
    assert choose(Router(64), [(10, 1), (40, 1)]) == {1}
    assert choose(Router(64, fills=True), [(0, 0), (40, 0)]) == {1}


def test_a_batch_without_room_is_left_alone():
    assert choose(Router(64), [(60, 1), (10, 1)], rows=8) == {1}
    assert choose(Router(64), [(70, 1), (10, 1)]) == {1}


def test_what_was_sent_since_the_last_answer_counts():
    both = candidates((0, 0), (0, 0))
    router = Router(4, seed=1)
    assert sorted(router.choose(both, 1) for _ in range(2)) == [0, 1]  # the first is no longer free
    counts = [router.choose(both, 1) for _ in range(6)]
    assert [each.sent for each in both] == [4, 4], counts


def test_one_replica_needs_no_choice():
    assert Router(64).choose(candidates((0, 0)), 1) == 0
