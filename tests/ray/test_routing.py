"""Routing: where batches wait to be filled, replicas are filled in order; else the freer of two is taken."""

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
    assert choose(Router(64), [(0, 1), (0, 0)]) == {1}
    assert choose(Router(64, parallel=2), [(0, 2), (0, 1)]) == {1}


def test_the_shorter_of_two_queues():
    assert choose(Router(64), [(10, 1), (40, 1)]) == {0}


def test_load_spreads():
    many = candidates(*[(0, 0)] * 10)
    router = Router(64, seed=1)
    for _ in range(200):
        router.choose(many, 1)
    assert max(each.sent for each in many) <= 24


def test_where_batches_wait_to_be_filled_they_are_filled_in_order():
    three = candidates((0, 0), (0, 0), (0, 0))
    router = Router(4, fills=True)
    assert [router.choose(three, 1) for _ in range(6)] == [0, 0, 0, 0, 1, 1]
    assert router.choose(three, 3) == 2  # the second has room for 2
    assert router.choose(three, 2) == 1
    assert choose(Router(4, fills=True), [(4, 1), (4, 1)]) == {0, 1}  # no room anywhere


def test_replicas_whose_batches_are_full_anyway_are_not_filled_in_order():
    both = candidates((0, 0), (0, 0))
    both[1].report(Load(0, 0, 0, filled=60))
    router = Router(64, fills=True, seed=0)
    assert {router.choose(both, 1) for _ in range(50)} == {0, 1}
    new = [Candidate(), Candidate()]  # that have not answered yet
    assert {router.choose(new, 1) for _ in range(50)} == {0, 1}


def test_one_replica_needs_no_choice():
    assert Router(64).choose(candidates((0, 0)), 1) == 0
