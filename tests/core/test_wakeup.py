"""Bells: what threads sleep on. Nobody misses one, nobody is kept by one that works on, a deadline and a signal end the sleep."""

import signal
import sys
import threading
from time import monotonic

import pytest

from weft.core.wakeup import Wakeup, release_in_turn

PATIENCE = 30.0  # seconds, until a test that hangs fails


class Sleeper(threading.Thread):
    """A thread that sleeps on its wakeup `times` times, each time on a new one, and does `then` in between."""

    def __init__(self, times=1, then=lambda: None):
        super().__init__(daemon=True)
        self.wakeups = [Wakeup() for _ in range(times)]
        self.then = then
        self.heard = 0
        self.start()

    def run(self):
        for wakeup in self.wakeups:
            self.heard += wakeup.acquire(True, PATIENCE)
            wakeup.wake_next()
            self.then()

    def ends(self):
        self.join(PATIENCE)
        return not self.is_alive() and self.heard == len(self.wakeups)


def test_a_bell_that_was_rung_before_is_heard():
    wakeup = Wakeup()
    assert wakeup.locked()
    wakeup.release()
    wakeup.release()
    assert not wakeup.locked()
    assert wakeup.acquire(True, PATIENCE)
    assert wakeup.locked()
    assert not wakeup.acquire(False)


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 0.01])
def test_a_sleep_ends_at_its_time(seconds):
    started = monotonic()
    assert not Wakeup().acquire(True, seconds)
    assert monotonic() - started >= seconds


def test_a_sleep_ends_at_its_time_while_another_works():
    """Who was never rung does not wait for the turn of who was."""
    done = threading.Event()
    worker = Sleeper(then=lambda: done.wait(PATIENCE))
    release_in_turn(worker.wakeups)
    assert not Wakeup().acquire(True, 0.001)
    done.set()
    assert worker.ends()


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_a_wave_reaches_all_of_them(count):
    sleepers = [Sleeper() for _ in range(count)]
    release_in_turn([sleeper.wakeups[0] for sleeper in sleepers])
    assert all(sleeper.ends() for sleeper in sleepers)


def test_a_wave_passes_those_who_work_on():
    """Each of them waits for the next one: nobody comes back to a wakeup before all have been rung."""
    barrier = threading.Barrier(20)
    sleepers = [Sleeper(then=lambda: barrier.wait(PATIENCE)) for _ in range(20)]
    release_in_turn([sleeper.wakeups[0] for sleeper in sleepers])
    assert all(sleeper.ends() for sleeper in sleepers)


def test_waves_side_by_side_with_more_threads_than_cores():
    """Whoever is the last of a round rings the next, in several crews at once, with threads switched all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        crews = [Crew(threads=16, rounds=50) for _ in range(4)]
        assert all(crew.ends() for crew in crews)
    finally:
        sys.setswitchinterval(interval)


class Crew:
    """Threads that meet in rounds: the last to come rings all others."""

    def __init__(self, threads, rounds):
        self._mutex, self._here, self._size, self._rounds = threading.Lock(), [], threads, rounds
        self.met = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self):
        for _ in range(self._rounds):
            wakeup = Wakeup()
            with self._mutex:
                self._here.append(wakeup)
                all_here = len(self._here) == self._size
                if all_here:
                    others, self._here = self._here[:-1], []
                    self.met += 1
            if all_here:
                release_in_turn(others)
            else:
                assert wakeup.acquire(True, PATIENCE)
            wakeup.wake_next()

    def ends(self):
        for thread in self._threads:
            thread.join(PATIENCE)
        return self.met == self._rounds and not any(thread.is_alive() for thread in self._threads)


def test_one_that_leaves_before_it_is_rung_does_not_end_the_wave():
    first, gone, last = Wakeup(), Wakeup(), Wakeup()
    release_in_turn([first, gone, last])
    gone.wake_next()
    first.wake_next()
    assert not last.locked()


class TestSignals:
    def interrupted(self, wakeup, handler):
        """What sleeping on `wakeup` gives to the main thread, which gets a signal meanwhile; `handler` is run by it."""
        main, got = threading.main_thread().ident, []

        def once(*_):
            got.append(1)
            if len(got) == 1:
                handler()

        def send():
            while not got:  # a signal just before the main thread falls asleep would not wake it
                signal.pthread_kill(main, signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, once)
        sender = threading.Thread(target=send)
        try:
            sender.start()
            return wakeup.acquire(True, PATIENCE)
        finally:
            sender.join()
            signal.signal(signal.SIGUSR1, before)

    def test_one_that_raises_ends_the_sleep(self):
        def handler():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.interrupted(Wakeup(), handler)

    def test_another_does_not(self):
        wakeup = Wakeup()
        assert self.interrupted(wakeup, wakeup.release)
