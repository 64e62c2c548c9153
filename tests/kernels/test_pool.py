"""The thread pool of the kernels."""

from __future__ import annotations

import os
import threading

import pytest

from weft.kernels import pool

pytestmark = pytest.mark.usefixtures("four_threads")


def test_every_job_runs_once():
    done = []
    pool.run([lambda i=i: done.append(i) for i in range(100)])
    assert sorted(done) == list(range(100))


def test_the_caller_takes_part_and_the_jobs_run_together():
    """Four jobs that wait for each other end only if four threads run them."""
    barrier = threading.Barrier(4, timeout=30)
    names = []

    def job():
        barrier.wait()
        names.append(threading.current_thread())

    pool.run([job] * 4)
    assert len(set(names)) == 4
    assert threading.current_thread() in names


def test_nested_and_concurrent_calls_end():
    done = []

    def outer():
        pool.run([lambda: done.append(1)] * 3)

    callers = [threading.Thread(target=lambda: pool.run([outer] * 5)) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
        assert not caller.is_alive()
    assert len(done) == 8 * 5 * 3


def test_an_error_is_raised_when_all_have_ended():
    done = []

    def fail():
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        pool.run([fail, *[lambda: done.append(1)] * 10])
    assert len(done) == 10


@pytest.mark.usefixtures("little_garbage")
def test_jobs_are_let_go():
    """A worker that waits holds nothing of its last job."""
    import gc
    import weakref

    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    pool.run([lambda thing=thing: None] * 4)
    del thing
    gc.collect()
    assert gone() is None


def test_size_must_be_positive():
    with pytest.raises(ValueError, match="at least 1"):
        pool.resize(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own():
    pool.run([lambda: None] * 4)
    child = os.fork()
    if child == 0:  # pragma: no cover
        barrier = threading.Barrier(4, timeout=30)
        try:
            pool.run([barrier.wait] * 4)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
