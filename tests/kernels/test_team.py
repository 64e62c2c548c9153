"""The threads that help a kernel without the GIL."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from support.libraries import need

need("numba")
from numba import njit  # noqa: E402

from weft.kernels import pool, team  # noqa: E402
from weft.kernels.simd import jit, pointer_to  # noqa: E402
from weft.kernels.team import add, entry_of, give_way, see, share  # noqa: E402

pytestmark = pytest.mark.usefixtures("four_threads")


@jit
def _count(counters, hits, tasks, together):
    """Take tasks until there are none; the first `together` threads wait for each other, but not for ever."""
    add(counters, 8, 1)
    looks = 0
    while see(counters, 8) < together and looks < 10_000_000:
        give_way()
        looks += 1
    task = add(counters, 0, 1)
    while task < tasks:
        hits[task] += 1
        task = add(counters, 0, 1)


_enter = entry_of(_count)


@njit(nogil=True)
def _run(board, helpers, counters, hits, together):
    arguments = pointer_to(counters), pointer_to(hits), len(hits), together
    share(board, helpers, _enter(arguments), arguments)


def run(tasks, helpers, together=1, board=None):
    """How often each task was run, and by how many threads together."""
    counters, hits = np.zeros(16, np.int64), np.zeros(tasks, np.int64)
    _run(team.board(helpers) if board is None else board, helpers, counters, hits, together)
    return hits, int(counters[8])


def test_every_task_runs_once():
    hits, threads = run(1000, 3)
    assert (hits == 1).all()
    assert 1 <= threads <= 4


def test_as_many_threads_come_as_were_asked_for():
    """Those who are there wait until all are."""
    assert run(10, 3, together=4)[1] == 4
    assert run(10, 1, together=2)[1] == 2


def test_threads_that_sleep_are_woken():
    run(1, 3)
    sleeping, deadline = team.board(3)[team._FIRST :: team._ROW], time.monotonic() + 30
    while not sleeping.all():
        assert time.monotonic() < deadline
        threading.Event().wait(0)
    assert run(10, 3, together=4)[1] == 4


def test_without_helpers_nobody_else_comes_and_no_thread_is_started(monkeypatch):
    monkeypatch.setattr(team, "_team", team._Team(0))
    hits, threads = run(10, 0)
    assert (hits == 1).all()
    assert threads == 1
    assert not team._team.is_started


def test_calls_from_many_threads_end():
    results = []

    def call():
        results.extend(run(20, 3)[0] for _ in range(50))

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert len(results) == 8 * 50
    assert all((hits == 1).all() for hits in results)
    board = team.board(3)
    assert board[team._TAKEN] == board[team._OPEN] == board[team._INSIDE] == 0


def test_another_size_of_the_pool_is_followed_and_threads_left_over_end():
    run(10, 3, together=4)
    before = {t for t in threading.enumerate() if t.name == "weft-kernels"}
    pool.resize(2)
    assert run(10, 1, together=2)[1] == 2
    left = {t for t in threading.enumerate() if t.name == "weft-kernels"} - before
    for thread in before:
        thread.join(30)
        assert not thread.is_alive()
    assert len(left) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own():
    run(10, 3, together=4)
    child = os.fork()
    if child == 0:  # pragma: no cover
        os._exit(0 if run(10, 3, together=4)[1] == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_of_torchs_openmp_help_where_it_has_them():
    need("torch")
    import torch

    torch.ones(1)
    board = team.torchs_board()
    if board is None:
        hits, threads = run(1000, 1)
    else:
        assert run(10, 1, together=2, board=board)[1] == 2
        hits, threads = run(1000, 1, board=board)
    assert (hits == 1).all()
    assert threads <= 2


def test_torchs_threads_are_not_called_for_where_they_stayed_behind(monkeypatch):
    need("torch")
    team.torchs_board.cache_clear()
    monkeypatch.setattr(team, "PROCESS", os.getpid() + 1)
    assert team.torchs_board() is None
    team.torchs_board.cache_clear()
