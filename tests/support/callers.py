"""Callers in threads of their own. Their answers are waited for, but never for ever: a hang is a failure, not a wait."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import weft

PATIENCE = 60.0  # seconds of real time, on a busy machine


class Caller(threading.Thread):
    """A call under way in a thread that ends with the process."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(daemon=True)
        self.call = lambda: function(*args, **kwargs)
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.call()
        except BaseException as error:
            self.error = error

    def end(self, patience: float = PATIENCE) -> Caller:
        """This caller, once it has its answer."""
        self.join(patience)
        assert not self.is_alive(), f"no answer within {patience} s"
        return self

    def answer(self, patience: float = PATIENCE) -> Any:
        """What the call returned; what it raised is raised here."""
        self.end(patience)
        if self.error is not None:
            raise self.error
        return self.value


def start(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Caller:
    """A call on the real clock."""
    caller = Caller(function, *args, **kwargs)
    caller.start()
    return caller


def start_on(clock: weft.SimulatedClock, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Caller:
    """A call on a simulated clock, which has got as far as it can by now."""
    caller = Caller(function, *args, **kwargs)
    clock.start(caller)
    clock.settle()
    return caller


def together(calls: list[Callable[[], Any]]) -> list[Caller]:
    """All calls at once, each in its thread, once all have their answers."""
    barrier = threading.Barrier(len(calls))

    def call(function: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        return function()

    callers = [start(call, function) for function in calls]
    return [caller.end() for caller in callers]


def until(condition: Callable[[], Any], patience: float = PATIENCE) -> None:
    """Wait for a state that no event tells of, such as a caller that has gone to sleep."""
    tick, end = threading.Event(), time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, f"not so within {patience} s"
        tick.wait(0.001)


def run_script(script: str, *arguments: str, patience: float = 60.0) -> str:
    """What a Python program of its own prints; it must end by itself, well, and soon."""
    command = [sys.executable, "-W", "error", "-W", "ignore:.*fork:DeprecationWarning", "-c", textwrap.dedent(script)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=patience, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
