"""Everything at once for a minute: threads, tasks, closing loops, signals, collections, forks, failures. Nobody hangs, nobody gets
another's rows, memory stays flat."""

from __future__ import annotations

import pytest
from support.callers import run_script

PROGRAM = """
import asyncio, gc, os, random, resource, signal, sys, threading, time
import numpy as np, weft
from weft import raw_ops

seconds = float(sys.argv[1])
asyncio.log.logger.disabled = True  # which says of each task of a closed loop that it was destroyed

sys.unraisablehook = lambda _: None  # what signals raise inside finalizers

class Bad(ValueError):
    pass

def f(x):
    if (x < 0).any():
        raise Bad("a bad row")
    return x * 2

policy = weft.batched(f, max_batch_size=16, deadline=20.0)
padded = weft.batched(f, max_batch_size=16, allowed_batch_sizes=(4, 16), deadline=20.0)
def function(x):
    return raw_ops.BatchFunction([x], [], f, 2, 16, 200, [np.float64], 10**6, shared_name="f")[0]
async def awaited(x):
    return (await weft.aio.BatchFunction([x], [], f, 2, 16, 200, [np.float64], 10**6, shared_name="f"))[0]

counts, wrong = {}, []
def note(what):
    counts[what] = counts.get(what, 0) + 1

def check(x, call, what):
    try:
        y = call(x)
    except Bad:
        if (x < 0).any():
            note("bad")
        else:
            wrong.append((what, "another's error"))
        return
    if not (y.shape == x.shape and (y == 2 * x).all()):  # np.array_equal answers False to a signal's exception inside it
        wrong.append((what, x, y))
    note(what)

def rows(dice):
    return np.full((dice.randrange(1, 4), 2), float(dice.randrange(1, 10**6)))

class Finalized:
    def __init__(self):
        self.me = self
    def __del__(self):
        check(np.full((1, 2), 3.0), policy if random.random() < 0.5 else function, "finalized")

def threads(number):
    dice = random.Random(number)
    while goes_on():
        call, what = dice.choice([(policy, "batched"), (padded, "padded"), (function, "function")])
        # Of one caller alone: the search for the guilty is bounded. Callers of BatchFunction share errors, as in TensorFlow.
        is_bad = number == 0 and what != "function" and dice.random() < 0.1
        check(-rows(dice) if is_bad else rows(dice), call, what)
        if dice.random() < 0.05:
            Finalized()

def tasks(number):
    dice = random.Random(number)
    async def one(call, what):
        x = rows(dice)
        try:
            y = await asyncio.wait_for(call(x), dice.choice([0.0005, 10, 10, 10]))
            if not np.array_equal(y, 2 * x):
                wrong.append((what, x, y))
            note(what)
        except (asyncio.TimeoutError, Bad):
            note("left")
    async def many():
        while goes_on():
            calls = [dice.choice([(policy.aio, "task"), (awaited, "awaited")]) for _ in range(8)]
            await asyncio.gather(*(one(*call) for call in calls))
    asyncio.run(many())

def loops():
    while goes_on():
        loop = asyncio.new_event_loop()
        task = loop.create_task(random.choice([policy.aio, awaited])(np.ones((1, 2))))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        del task, loop
        note("closed")
        time.sleep(0.002)

class Alarm(Exception):
    pass
is_armed = False
def alarm(*_):
    if is_armed:
        raise Alarm

def fork():
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(policy(np.ones((1, 2))), np.full((1, 2), 2.0)) else 1)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                wrong.append(("fork", status))
            note("forked")
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wrong.append(("fork", "hung"))

wanted = {"batched", "padded", "function", "task", "awaited", "main", "bad", "left", "closed", "finalized", "forked", "interrupted"}
def goes_on():  # for the seconds, and longer on a busy machine: until all of it has happened
    return time.monotonic() < end or (not counts.keys() >= wanted and time.monotonic() < end + 30)

gc.set_threshold(50, 5, 5)
signal.signal(signal.SIGALRM, alarm)
end = time.monotonic() + seconds
workers = [threading.Thread(target=threads, args=(i,), daemon=True) for i in range(4)]
workers += [threading.Thread(target=tasks, args=(i,), daemon=True) for i in range(2)]
workers += [threading.Thread(target=loops, daemon=True)]
for worker in workers:
    worker.start()
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)

def call():
    global is_armed
    dice = random.Random()
    try:
        is_armed = dice.random() < 0.9  # the others are answered, however slow the machine is
        check(rows(dice), dice.choice([policy, function]), "main")
        is_armed = False
    except Alarm:
        is_armed = False
        note("interrupted")

halfway = None
next_fork = time.monotonic() + 1
while goes_on() or halfway is None:
    try:
        call()
        is_armed = False
        if time.monotonic() > next_fork:
            fork()
            next_fork = time.monotonic() + 1
        if halfway is None and time.monotonic() > end - seconds / 2:
            halfway = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    except Alarm:
        is_armed = False
is_armed = False
signal.setitimer(signal.ITIMER_REAL, 0)
for worker in workers:
    worker.join(60)
    if worker.is_alive():
        import faulthandler
        faulthandler.dump_traceback()
        os._exit(3)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - halfway
assert not wrong, (len(wrong), wrong[:5])
assert counts.keys() >= wanted, wanted - counts.keys()
assert grown < 64 << 10, f"{grown} KiB more in the second half"
assert not weft.core.lock.departed
for batcher in (policy, padded):
    batcher.close(timeout=20)
print(counts)
"""


@pytest.mark.slow
def test_a_minute_of_everything():
    run_script(PROGRAM, "60", patience=240)


def test_some_seconds_of_everything():
    run_script(PROGRAM, "3", patience=120)
