"""Random combinations of options and calls: each caller gets what its call gives by itself, or a documented error.

Nobody hangs, gradients are exact, the statistics add up, and nothing of the callers is alive in the end. To repeat a case:
`Run(Case(seed)).run()`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from support.callers import start, until
from support.combinations import PATIENCE, RESULTS, Bad, Case, plain, values_of
from support.libraries import need

import weft
from weft import errors
from weft.core import lock as bookkeeping
from weft.core.arrays import namespace


class Raised(Exception):
    """What a caller raises under `jax.grad` in place of going back."""


class Model:
    """The function of a case, in each kind."""

    def __init__(self, case):
        self.case = case

    def result(self, data, z=None, tag=None, w=None, scale="s1", mask=None, rows=None, n=None):
        return self.case.compute(0, data, z, tag, w, scale, mask, rows, n)

    async def coroutine(self, data, z=None, tag=None, w=None, scale="s1", mask=None, rows=None, n=None):
        await asyncio.sleep(0)
        return self.case.compute(0, data, z, tag, w, scale, mask, rows, n)

    def generator(self, data, z=None, tag=None, w=None, scale="s1", mask=None, rows=None, n=None):
        for k in range(self.case.chunks):
            yield self.case.compute(k, data, z, tag, w, scale, mask, rows, n)

    async def async_generator(self, data, z=None, tag=None, w=None, scale="s1", mask=None, rows=None, n=None):
        for k in range(self.case.chunks):
            await asyncio.sleep(0)
            yield self.case.compute(k, data, z, tag, w, scale, mask, rows, n)


class InThread:
    """The calls of a batcher in the form of its `aio`, but made by this thread: awaiting them does not suspend."""

    def __init__(self, policy):
        self._policy = policy

    async def __call__(self, *args, **named):
        return self._policy(*args, **named)

    async def call(self, *args, **named):
        return self._policy.call(*args, **named)

    async def vjp(self, *args, **named):
        result, pull_back = self._policy.vjp(*args, **named)

        async def pull(gradient):
            return pull_back(gradient)

        return result, pull

    async def stream(self, *args, **named):
        for chunk in self._policy.stream(*args, **named):
            yield chunk


def finish(coroutine):
    """The result of a coroutine that is never suspended."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("suspended")


class Run:
    """A case as it runs."""

    def __init__(self, case):
        self.case, self.model = case, Model(case)
        case.parameter = self.make_parameter()
        case.function = getattr(Model if case.method else self.model, case.kind)
        self.batcher = weft.batched(case.function, **case.options)
        self.policy = self.batcher.__get__(self.model) if case.method else self.batcher
        self.outcomes, self.receipts, self.problems = Counter(), {}, []
        self.went_back, self.jax_total = [], 0.0
        self.interruptible, self.mutex = {}, threading.Lock()  # threads that may be interrupted -> whether they were
        self.is_over = threading.Event()
        self.is_ignored = False  # whether Python has ignored an interrupt, as it does in callbacks of weak references

    def make_parameter(self):
        if self.case.library == "torch":
            import torch

            return torch.tensor(2.0, dtype=torch.double, requires_grad=self.case.gradient)
        if self.case.library == "jax":
            import jax.numpy as jnp

            return jnp.asarray(2.0)
        return 2.0

    # --- one call ---

    async def make(self, call, calls):
        """Make a call by `calls`, check its answer, and go back; return how it ended."""
        case, is_back = self.case, False
        try:
            if case.traced:
                return self.differentiate(call)
            with self.mode(call):
                parts, pull_back = await self.answer(call, calls)
            self.outcomes["answered"] += 1
            is_back = True
            if call.goes_back and pull_back is not None:
                self.check_pulled(call, await pull_back(self.output_gradient(call, parts)))
            if call.goes_back and case.gradient and call.mode == "grad":
                self.go_back(call, parts)
            return "done"
        except Exception as error:
            return self.documented(call, error, is_back)

    async def answer(self, call, calls):
        case = self.case
        args, named = case.arguments(call)
        options = {"caller": call.caller, "priority": "low" if call.is_low else "high"}
        options |= {} if call.deadline is None else {"deadline": call.deadline}
        if case.streams:
            k = -1
            async for chunk in calls.stream(*args, **named, **options):
                k += 1
                case.check(call, chunk, k)
                if not call.goes_back:
                    return None, None
            assert k + 1 == case.chunks
            return None, None
        pull_back = None
        if case.vjp:
            result, pull_back = await calls.vjp(*args, **named)
        elif call.is_plain:
            result = await calls(*args, **named)
        else:
            result, receipt = await calls.call(*args, **named, **options, receipt=True)
            self.receipts.setdefault(call.caller, []).append((receipt.size, receipt.position))
        return case.check(call, result), pull_back

    def mode(self, call):
        if self.case.library != "torch" or call.mode == "grad":
            return nullcontext()
        import torch

        return getattr(torch, call.mode)()

    def documented(self, call, error, is_back):
        """What a documented error counts as; any other is raised."""
        case, options = self.case, self.case.options
        is_late = isinstance(error, errors.DeadlineExceededError)
        if is_back:
            may_miss = case.misses and isinstance(error, errors.FailedPreconditionError)
            if may_miss or (is_late and options["gradient_deadline"] == 1.0):
                return "no gradient"
        elif isinstance(error, Bad) and (call.is_bad or options.get("on_error") == "share"):
            return "bad"
        elif is_late and call.deadline is not None:
            return "late"
        elif isinstance(error, errors.InvalidArgumentError if call.is_refused else errors.UnavailableError):
            if call.is_refused or "max_queue" in options:
                return "refused"
        elif isinstance(error, errors.CancelledError) and case.closes:
            return "closed"
        elif call.caller == "finalizer" and isinstance(error, (errors.CancelledError, errors.FailedPreconditionError)):
            return "left"
        raise error

    def output_gradient(self, call, parts):
        given = {
            name: parts[name] * 0 + call.g if name in ("y", "t") else parts[name]
            for name in parts
            if parts[name] is not None
        }
        return RESULTS[self.case.result][0](dict.fromkeys(parts) | given | {"n": None})

    def check_pulled(self, call, found):
        case = self.case
        dx = found[0] if case.has_z else found
        assert plain(np.ravel(values_of(dx))) == case.gradients(call)[0]
        if case.has_z:
            assert plain(np.ravel(found[1])) == [call.g * ("t" in case.parts)] * len(call.rows)

    def go_back(self, call, parts):
        case, call.state = self.case, "maybe"
        self.went_back.append(call)
        case.loss(call, parts).backward()
        call.state = "sure" if case.waits and not call.is_task else "handed in"
        if call.state == "sure":
            assert plain(call.leaf.grad.flatten()) == case.gradients(call)[0]

    def differentiate(self, call):
        import jax

        case = self.case

        def loss(x, w):
            args, named = case.arguments(call, x, w)
            parts = RESULTS[case.result][1](self.policy(*args, **named))
            if not call.goes_back:
                raise Raised
            return case.loss(call, parts)

        x = case.array(
            call.rows if case.rows else call.rows[0], (len(call.rows), call.length) if case.rows else (call.length,)
        )
        try:
            dx, dw = jax.grad(loss, argnums=(0, 1))(x, case.parameter)
        except Raised:
            self.outcomes["answered"] += 1
            return "done"
        except errors.FailedPreconditionError as error:
            self.outcomes["answered"] += 1
            return self.documented(call, error, True)
        self.outcomes["answered"] += 1
        assert not call.is_bad
        want_x, want_w = case.gradients(call)
        assert plain(np.ravel(dx)) == want_x
        with self.mutex:
            self.jax_total += float(dw) - want_w
        return "done"

    # --- callers, and what disturbs them ---

    def thread(self, name):
        case, dice = self.case, random.Random(f"{self.case.seed} {name}")
        for number in range(case.calls_each):
            call = case.draw_call(name, number, dice, False)
            ended = None
            try:
                if case.leaves and case.library != "jax" and dice.random() < 0.3:
                    ended = self.interrupted(lambda call=call: finish(self.make(call, InThread(self.policy))))
                else:
                    ended = finish(self.make(call, InThread(self.policy)))
                self.outcomes[ended] += 1
            except BaseException:
                self.problems.append(traceback.format_exc())  # the error itself would keep results alive
            if case.finalizes and dice.random() < 0.5:
                Finalized(self, case.draw_call("finalizer", number, dice, False))

    def interrupted(self, f):
        """Call `f`, during which this thread may get a KeyboardInterrupt."""
        me = threading.get_ident()
        try:
            try:
                self.interruptible[me] = False
                return f()
            finally:
                with self.mutex:
                    is_sent = self.interruptible.pop(me)
                end = time.monotonic() + 0.5  # unless it was raised where Python ignores it
                while is_sent and time.monotonic() < end:
                    time.sleep(0.001)
        except KeyboardInterrupt:
            return "left"

    def interrupt(self):
        dice, send = random.Random(self.case.seed), ctypes.pythonapi.PyThreadState_SetAsyncExc
        while not self.is_over.wait(dice.choice([0.0002, 0.002, 0.01])):
            with self.mutex:
                victims = [thread for thread, is_sent in list(self.interruptible.items()) if not is_sent]
                if victims:
                    victim = dice.choice(victims)
                    self.interruptible[victim] = True
                    send(ctypes.c_ulong(victim), ctypes.py_object(KeyboardInterrupt))

    async def task(self, name):
        case, dice = self.case, random.Random(f"{self.case.seed} {name}")
        for number in range(case.calls_each):
            call = case.draw_call(name, number, dice, True)
            try:
                own = asyncio.create_task(self.make(call, self.policy.aio), name=name)
                if case.leaves and dice.random() < 0.3:
                    await asyncio.sleep(dice.choice([0, 0, 0.0005, 0.003]))
                    own.cancel()
                self.outcomes[await own] += 1
            except asyncio.CancelledError:
                self.outcomes["left"] += 1
            except BaseException:
                self.problems.append(traceback.format_exc())  # the error itself would keep results alive

    def update(self):
        dice = random.Random(self.case.seed)
        while not self.is_over.wait(0.002):
            changes = [
                {"max_batch_size": dice.choice([4, 9, 64])}, {"max_wait": 0.01, "min_batch_size": 3}, {"deadline": 50.0},
                {"parallel": 1 if self.batcher.options.on_loop else dice.randint(1, 3)},
                {"allowed_batch_sizes": dice.choice([[64], [2, 4, 64], []])},
            ]  # fmt: skip
            with suppress(errors.CancelledError):  # it was closed
                self.batcher.update(**dice.choice(changes))

    def play(self):
        case = self.case

        async def tasks():
            await asyncio.gather(*(self.task(f"task {i}") for i in range(case.tasks)))

        callers = [start(self.thread, f"thread {i}") for i in range(case.threads)]
        callers += [start(asyncio.run, tasks())] if case.tasks else []
        others = [start(self.update)] if case.updates else []
        others += [start(self.interrupt)] if case.leaves and case.library != "jax" else []
        if case.closes:
            time.sleep(case.delay)
            self.batcher.close(drain=case.has_z, timeout=PATIENCE)
        for caller in callers:
            caller.answer(2 * PATIENCE)
        self.is_over.set()
        for other in others:
            other.answer()

    # --- the end ---

    def run(self, folder):
        case, threshold, hook = self.case, gc.get_threshold(), sys.unraisablehook

        def unraisable(raised):
            if isinstance(raised.exc_value, KeyboardInterrupt):
                self.is_ignored = True
            else:
                hook(raised)

        if case.finalizes:
            gc.set_threshold(60, 5, 5)
        try:
            sys.unraisablehook = unraisable
            if case.replays and not (case.vjp or case.traced):  # those calls take no name
                with self.batcher.record(folder / "recording"):
                    self.play()
                first, self.receipts = self.receipts, {}
                with self.batcher.replay(folder / "recording"):
                    self.play()
                assert self.receipts == first
            else:
                self.play()
        finally:
            gc.set_threshold(*threshold)
            sys.unraisablehook = hook
        assert not self.problems, self.problems[0]
        self.check_gradients()
        self.batcher.close(timeout=PATIENCE)
        self.check_statistics()
        if not self.is_ignored:  # else a callback that drops something was ended
            self.check_nothing_is_left()

    def check_gradients(self):
        case, is_whole = self.case, True
        try:
            self.batcher.join()
        except errors.OpError as error:
            is_whole = not self.documented(None, error, True)
        assert self.jax_total == 0
        sums = {0.0}  # that the gradient of the parameter may be
        for call in self.went_back:
            (dx, dw), grad = case.gradients(call), call.leaf.grad
            if call.state == "handed in":
                assert grad is not None or not is_whole
                # An interrupt may end a batch's backward when the parameter has its gradient and the callers do not.
                without = "maybe" if case.leaves else "none"
                call.state = "sure" if grad is not None else without
            if grad is not None and call.state == "sure":
                assert plain(grad.flatten()) == dx
            more = {each + dw for each in sums} if call.state != "none" else sums
            sums = more if call.state == "sure" else sums | more
        is_partial = "split" in case.options and any(call.state != "sure" for call in self.went_back)
        if case.gradient and not is_partial:  # a split call may have gone back in some of its batches
            assert (0.0 if case.parameter.grad is None else case.parameter.grad.item()) in sums
        case.parameter = None
        self.went_back.clear()

    def check_statistics(self):
        seen, counted = self.batcher.statistics(), self.outcomes
        left = counted["left"] + counted["closed"]
        assert (seen.waiting, seen.running) == (0, 0)
        assert seen.waits.count == seen.calls
        assert seen.runs.count == seen.batches == sum(seen.reasons.values())
        for found, least in (
            (seen.late, counted["late"]),
            (seen.failed, counted["bad"]),
            (seen.rejected, counted["refused"]),
        ):
            assert least <= found <= least + left, (counted, seen)
        least = counted["answered"] + counted["bad"]
        assert least <= seen.calls <= least + counted["late"] + left, (counted, seen)

    def check_nothing_is_left(self):
        def is_gone():  # a worker may still be on its way to sleep
            gc.collect()
            return not any(reference() is not None for reference in self.case.references)

        until(is_gone, 10)
        assert not bookkeeping.departed
        start(lambda: bookkeeping.lock.acquire() and bookkeeping.lock.release()).answer(10)


class Finalized:
    """Calls the batcher when the garbage collector finds it."""

    def __init__(self, run, call):
        self.run, self.call, self.me = run, call, self

    def __del__(self):
        self.call.goes_back, self.call.mode = False, "no_grad"
        try:
            self.run.outcomes[finish(self.run.make(self.call, InThread(self.run.policy)))] += 1
        except KeyboardInterrupt:  # meant for the call that this one interrupts
            self.run.outcomes["left"] += 1
        except BaseException:
            self.run.problems.append(traceback.format_exc())


def run_cases(library, seeds, folder):
    need(library)
    namespace(library)  # an import that an interrupt ends may fail in another thread that waits for it
    for seed in seeds:
        with weft.scope():
            try:
                Run(Case(seed, library)).run(folder)
            except BaseException as error:
                error.add_note(f"Case({seed}, {library!r})")
                raise


@pytest.mark.slow
@pytest.mark.usefixtures("little_garbage")
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_many(library, tmp_path):
    run_cases(library, range(1000, 1100), tmp_path)
