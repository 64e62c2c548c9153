"""weft works on platforms without `os.register_at_fork` and `os.sysconf`; elsewhere, fork handlers run in the child."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from weft.core import fork

WITHOUT_FORK = """
import asyncio, os, random, threading, numpy  # their own use of these is not under test
for name in ("register_at_fork", "fork", "sysconf"):
    if hasattr(os, name):
        delattr(os, name)
import weft, weft.aio

assert weft.batched(lambda x: x * 2)(numpy.array([1.0, 2.0])).tolist() == [2.0, 4.0]
made = weft.raw_ops.RaggedRange(numpy.array([0, 5]), numpy.array([2, 7]), numpy.array([1, 1]))
assert made.rt_dense_values.tolist() == [0, 1, 5, 6]

async def awaited():
    made = await weft.aio.Batch([numpy.ones((1, 2))], 1, 1, 0, 0)
    return made.batched_tensors[0].shape

assert asyncio.run(awaited()) == (1, 2)
from weft.core.arrays import memory
assert memory() > 0
print("works")
"""


def test_weft_works_without_fork_and_sysconf():
    run = subprocess.run([sys.executable, "-c", WITHOUT_FORK], capture_output=True, text=True, timeout=120, check=False)
    assert (run.stdout, run.returncode) == ("works\n", 0), run.stderr


def test_a_handler_is_registered_for_the_child(monkeypatch):
    registered = []
    monkeypatch.setattr(os, "register_at_fork", lambda **handlers: registered.append(handlers), raising=False)
    fork.on_fork_in_child(print)
    assert registered == [{"after_in_child": print}]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_handler_runs_in_the_child():
    code = (
        "import os; from weft.core.fork import on_fork_in_child\n"
        "on_fork_in_child(lambda: os.write(1, b'child'))\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0); os.write(1, b' parent')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "child parent"
