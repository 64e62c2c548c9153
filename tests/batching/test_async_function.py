"""Async functions behind a batcher: one loop, several batches at once, and everything else as for plain functions."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading

import numpy as np
import pytest
from support.batched_calls import FULL, rows, share_batch
from support.callers import PATIENCE, run_script, start, together, until

import weft
from weft.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnknownError,
)


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


class AsyncModel:
    """Twice its input. Where `gate` is shut its coroutines wait; it keeps the loop and thread of each batch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.threads: set[int] = set()
        self.inside = self.most = 0
        self._is_open = True

    async def __call__(self, x):
        self.sizes.append(len(x))
        self.loops.add(asyncio.get_running_loop())
        self.threads.add(threading.get_ident())
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            while not self._is_open:
                await asyncio.sleep(0.001)
            return x * 2
        finally:
            self.inside -= 1

    def shut(self) -> None:
        self._is_open = False

    def open(self) -> None:
        self._is_open = True


def loop_threads(name):
    return [thread for thread in threading.enumerate() if thread.name == f"weft {name} loop"]


class TestCalls:
    def test_threads_and_tasks_share_batches(self):
        async def main():
            calls = [policy.aio(rows(i)) for i in range(3)]
            calls += [asyncio.to_thread(policy, rows(i)) for i in range(3, 6)]
            return await asyncio.gather(*calls)

        model = AsyncModel()
        policy = weft.batched(model, max_batch_size=6, **FULL)
        assert [y.item() for y in asyncio.run(main())] == [0, 2, 4, 6, 8, 10]
        assert model.sizes == [6]
        assert threading.get_ident() not in model.threads

    def test_parallel_batches_run_at_once_in_one_loop(self):
        model = AsyncModel()
        policy = weft.batched(model, max_batch_size=1, parallel=3)
        model.shut()
        callers = [start(policy, rows(i)) for i in range(3)]
        until(lambda: model.inside == 3)
        model.open()
        assert [caller.answer().item() for caller in callers] == [0, 2, 4]
        assert policy(rows(4)).item() == 8
        assert (model.most, len(model.loops), len(model.threads)) == (3, 1, 1)

    def test_every_form_of_async_function(self):
        class Scaled:
            factor = 3.0

            @weft.batched
            async def method(self, x):
                return x * self.factor

            async def plain(self, x, factor):
                return x * factor

        async def shifted(x, by):
            return x + by

        assert Scaled().method(rows(1)).item() == 3
        assert weft.batched(functools.partial(shifted, by=2.0))(rows(1)).item() == 3
        assert weft.batched(Scaled().plain)(rows(1), 4.0).item() == 4

    def test_options(self):
        @weft.batched(allowed_batch_sizes=[4, 64], pass_mask="is_real", rows=False)
        async def count(x, is_real):
            await asyncio.sleep(0)
            return np.full(len(x), is_real.sum())

        assert count(2.0) == 1

    def test_two_batchers_call_each_other_s_model(self):
        inner = weft.batched(AsyncModel(), max_batch_size=4)

        @weft.batched(max_batch_size=4)
        async def outer(x):
            return sum(await asyncio.gather(inner.aio(x), inner.aio(x)))

        assert outer(rows(1, 2)).ravel().tolist() == [4, 8]

    def test_pull_backs(self):
        async def f(x):
            raise AssertionError("the pull-back's own function runs")

        policy = weft.batched(f, vjp=lambda x: (x * x, lambda dy: 2 * x * dy))
        y, pull_back = policy.vjp(rows(3))
        assert (y.item(), pull_back(rows(1)).item()) == (9, 6)

    def test_record_and_replay(self, tmp_path):
        policy = weft.batched(AsyncModel(), max_batch_size=4)

        def play():
            return [policy.call(rows(i), caller=f"{i}", receipt=True)[1].batch for i in range(3)]

        with policy.record(tmp_path / "batches"):
            play()
        with policy.replay(tmp_path / "batches"):
            assert len(play()) == 3

    def test_many_threads_and_loops(self):
        @weft.batched(max_batch_size=16, parallel=3)
        async def double(x):
            for _ in range(len(x) % 3):
                await asyncio.sleep(0)
            return x * 2

        def in_loop(first):
            async def main():
                return [await asyncio.gather(*(double.aio(rows(first + i)) for i in range(8))) for _ in range(10)]

            return [[y.item() for y in ys] for ys in asyncio.run(main())]

        def in_thread(first):
            return [double(rows(first)).item() for _ in range(20)]

        calls = [functools.partial(in_loop, 100 * i) for i in range(3)]
        calls += [functools.partial(in_thread, i) for i in range(8)]
        got = [caller.answer() for caller in together(calls)]
        assert got[:3] == [[[2 * (100 * i + k) for k in range(8)]] * 10 for i in range(3)]
        assert got[3:] == [[2 * i] * 20 for i in range(8)]
        assert double.statistics().calls == 3 * 80 + 8 * 20


class TestErrors:
    def test_bad_calls_fail_alone(self):
        @weft.batched(max_batch_size=4, **FULL)
        async def root(x):
            await asyncio.sleep(0)
            if (x < 0).any():
                raise ValueError("negative")
            return np.sqrt(x)

        callers = together([functools.partial(root, rows(x)) for x in (1.0, 4.0, -1.0, 9.0)])
        assert [caller.error is None for caller in callers] == [True, True, False, True]
        with pytest.raises(ValueError, match="negative"):
            callers[2].answer()

    def test_a_lone_caller_leaves_at_its_deadline(self):
        model = AsyncModel()
        policy = weft.batched(model)
        model.shut()
        while not model.inside:  # on a busy machine the deadline may pass before the batch begins
            with pytest.raises(DeadlineExceededError):
                policy.call(rows(1), deadline=0.02)
        with pytest.raises(DeadlineExceededError, match="a batch still runs"):
            policy.close(timeout=0.01)
        model.open()
        policy.close()

    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
    def test_what_ends_a_coroutine_does_not_end_the_loop(self, kind):
        model = AsyncModel()

        @weft.batched
        async def f(x):
            if x.flat[0] < 0:
                raise kind
            return await model(x)

        f(rows(1))
        ends_threads = issubclass(kind, (SystemExit, KeyboardInterrupt))
        with pytest.raises(CancelledError if ends_threads else UnknownError) as caught:
            f(rows(-1))
        assert isinstance(caught.value.__cause__, kind)
        assert f(rows(1)).item() == 2
        assert len(model.loops) == 1

    def test_what_ends_a_task_of_the_coroutine(self):
        async def leave():
            raise SystemExit

        @weft.batched
        async def f(x):
            task = asyncio.create_task(leave())
            with pytest.raises(SystemExit):
                await task
            return x

        assert f(rows(1)).item() == 1

    def test_a_call_of_its_own_batcher_is_refused(self):
        @weft.batched
        async def by_thread(x):
            return by_thread(x)

        @weft.batched
        async def by_task(x):
            return await by_task.aio(x)

        @weft.batched
        async def closing(x):
            closing.close()

        for policy in (by_thread, by_task):
            with pytest.raises(FailedPreconditionError, match="cannot call its own batcher"):
                policy(rows(1))
        with pytest.raises(FailedPreconditionError, match="cannot be closed from inside"):
            closing(rows(1))

    def test_refused(self):
        async def f(x):
            return x

        with pytest.raises(InvalidArgumentError, match="recompute must be False for a function that gives a coroutine"):
            weft.batched(f, recompute=True)
        with pytest.raises(InvalidArgumentError, match="vjp must return its result at once"):
            weft.batched(lambda x: x, vjp=f)

    def test_jax_does_not_trace_it(self):
        jax = pytest.importorskip("jax")

        @weft.batched(shared=("w",))
        async def f(w, x):
            return x * w

        assert f(jax.numpy.ones(()), jax.numpy.ones(2)).tolist() == [1, 1]
        with pytest.raises(FailedPreconditionError, match="JAX cannot differentiate an async function"):
            jax.grad(lambda w: f(w, jax.numpy.ones(2)).sum())(jax.numpy.ones(()))


class TestTorch:
    def test_one_backward(self):
        torch = pytest.importorskip("torch")
        net = torch.nn.Linear(3, 1)

        @weft.batched(max_batch_size=4, **FULL)
        async def policy(x):
            await asyncio.sleep(0)
            return net(x)

        x = torch.eye(3)[[0, 1, 2, 0]]
        share_batch(policy, list(x.split(1)), lambda y, _: y.square().sum().backward())
        torch.testing.assert_close(net.weight.grad, torch.autograd.grad(net(x).square().sum(), net.weight)[0])
        assert policy.statistics().backwards == 1

    def test_a_module(self):
        torch = pytest.importorskip("torch")

        class Net(torch.nn.Module):
            async def forward(self, x):
                await asyncio.sleep(0)
                return x * 2

        assert weft.batched(Net())(torch.ones(1)).item() == 2

    def test_the_loop_takes_over_the_number_of_threads(self, monkeypatch):
        torch = pytest.importorskip("torch")
        seen = []
        monkeypatch.setattr(torch, "get_num_threads", lambda: seen.append(threading.current_thread().name))

        @weft.batched(name="model")
        async def policy(x):
            assert "weft model loop" in seen
            return x

        policy(torch.ones(1))

    def test_each_step_runs_in_the_mode_of_its_callers(self):
        torch = pytest.importorskip("torch")
        seen: dict[str, list[bool]] = {}

        async def mode(name):
            for _ in range(5):
                seen.setdefault(name, []).append(torch.is_grad_enabled())
                await asyncio.sleep(0)
            return torch.is_autocast_enabled("cpu")

        @weft.batched(max_batch_size=1, parallel=3)
        async def policy(x, name):
            while not open_now:
                await asyncio.sleep(0)
            with torch.set_grad_enabled(name != "own"):
                await mode(name)
            own, made = await asyncio.gather(mode(name), mode(name))
            assert own == made
            return torch.full((1,), own)

        def call(name):
            manager = {"grad": torch.enable_grad, "none": torch.no_grad}.get(name, torch.enable_grad)
            with manager(), torch.autocast("cpu", enabled=name == "own"):
                return policy(torch.ones(1), name).item()

        open_now: list[bool] = []
        callers = [start(call, name) for name in ("grad", "none", "own")]
        until(lambda: policy.statistics().running == 3)
        open_now.append(True)
        assert [caller.answer() for caller in callers] == [False, False, True]
        assert seen == {"grad": [True] * 15, "none": [True] * 5 + [False] * 10, "own": [False] * 5 + [True] * 10}


class TestEnds:
    def test_close_ends_the_loop_and_its_tasks(self):
        ended = []

        async def background():
            try:
                await asyncio.sleep(PATIENCE)
            finally:
                ended.append(True)

        tasks = []

        @weft.batched(name="with background")
        async def f(x):
            tasks.append(asyncio.create_task(background()))
            await asyncio.sleep(0)
            return x

        f(rows(1))
        assert len(loop_threads("with background")) == 1
        f.close()
        assert ended == [True]
        until(lambda: not loop_threads("with background"))

    def test_aclose(self):
        async def main():
            async with weft.batched(AsyncModel(), name="closed by a task") as policy:
                await policy.aio(rows(1))
                assert len(loop_threads("closed by a task")) == 1

        asyncio.run(main())
        until(lambda: not loop_threads("closed by a task"))

    def test_a_batcher_that_nobody_has_ends_its_loop(self, little_garbage):
        policy = weft.batched(AsyncModel(), name="collected")
        policy(rows(1))
        assert len(loop_threads("collected")) == 1
        policy.update(parallel=2)
        del policy

        def is_gone():
            gc.collect()
            return not loop_threads("collected")

        until(is_gone)

    def test_without_drain(self):
        model = AsyncModel()
        policy = weft.batched(model, max_batch_size=1)
        model.shut()
        first = start(policy, rows(1))
        until(lambda: model.inside)
        second = start(policy, rows(2))
        until(lambda: policy.statistics().waiting == 1)
        closing = start(policy.close, drain=False)
        with pytest.raises(CancelledError):
            second.answer()
        model.open()
        assert first.answer().item() == 2
        closing.answer()

    def test_a_forked_child_has_a_loop_of_its_own(self):
        out = run_script("""
            import asyncio, os, numpy as np, weft
            @weft.batched
            async def double(x):
                await asyncio.sleep(0)
                return x * 2
            print(double(np.ones(1)).item())
            child = os.fork()
            if child == 0:
                assert double(np.ones(2)).tolist() == [2, 2]
                double.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            print(double(np.full(1, 2.0)).item())
            child = os.fork()
            if child == 0:
                raise SystemExit
            assert os.waitpid(child, 0)[1] == 0
            print(double(np.full(1, 3.0)).item())
        """)
        assert out.split() == ["2.0", "4.0", "6.0"]

    def test_the_interpreter_ends_while_a_coroutine_runs(self):
        out = run_script("""
            import asyncio, sys, threading, numpy as np, weft
            begun = threading.Event()
            @weft.batched
            async def stuck(x):
                begun.set()
                try:
                    await asyncio.sleep(3600)
                finally:
                    sys.stdout.write("cancelled\\n")
            def call():
                try:
                    stuck(np.ones(1))
                except weft.errors.CancelledError:
                    sys.stdout.write("told\\n")
            threading.Thread(target=call, daemon=True).start()
            assert begun.wait(20)
        """)
        assert sorted(out.split()) == ["cancelled", "told"]
