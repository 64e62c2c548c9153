"""The function runs in its callers' modes of PyTorch and JAX, alone or not, and with context variables that are no caller's."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
import threading

import numpy as np
import pytest
from support.batched_calls import FULL, Model, rows, waiting_together
from support.callers import start, start_on, together
from support.libraries import need, wide_numbers

import weft
from weft.batching import modes
from weft.errors import FailedPreconditionError

HERE = contextvars.ContextVar("HERE", default="nowhere")


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


@pytest.fixture
def made_here():
    """Batchers of this test are made where HERE is "made"."""
    token = HERE.set("made")
    yield
    HERE.reset(token)


def as_caller(call):
    """`call()` where a caller has a context of its own."""

    def run():
        HERE.set("a caller's")
        with np.errstate(divide="raise"), decimal.localcontext(prec=5):
            return call()

    return contextvars.copy_context().run(run)


def look():
    """What a function sees of its context, in which it leaves something."""
    seen = HERE.get(), np.geterr()["divide"], decimal.getcontext().prec
    HERE.set("left by the function")
    return seen


EXPECTED = ("made", "warn", 28)


@pytest.mark.usefixtures("made_here")
class TestContextVariables:
    def test_alone_and_with_others(self):
        seen = []
        model = Model(lambda x: x)
        policy = weft.batched(lambda x: seen.append(look()) or model(x))
        as_caller(lambda: policy(rows(1)))
        as_caller(lambda: asyncio.run(policy.aio(rows(1))))
        waiting_together(policy, model, *[lambda: as_caller(lambda: policy(rows(1)))] * 2)
        assert seen == [EXPECTED] * 4
        assert HERE.get() == "made"

    def test_on_a_loop(self):
        seen = []
        policy = weft.batched(lambda x: seen.append(look()) or x, on_loop=True)

        async def main():
            await asyncio.gather(policy.aio(rows(1)), policy.aio(rows(2)))

        as_caller(lambda: asyncio.run(main()))
        assert set(seen) == {EXPECTED}

    def test_of_an_async_function(self):
        seen = []

        async def f(x):
            seen.append(look())
            await asyncio.sleep(0)
            seen.append(HERE.get())
            await asyncio.create_task(g())
            return x

        async def g():
            seen.append(HERE.get())

        policy = weft.batched(f)
        as_caller(lambda: policy(rows(1)))
        assert seen == [EXPECTED, "left by the function", "left by the function"]

    @pytest.mark.parametrize("is_async", [False, True])
    def test_of_a_function_that_yields(self, is_async):
        seen = []

        def step(x):
            seen.append(HERE.get())
            HERE.set(HERE.get() + "+")
            return x

        def f(x):
            try:
                yield step(x)
                yield step(x)
                yield step(x)
            finally:
                step(x)

        async def g(x):
            try:
                yield step(x)
                yield step(x)
                yield step(x)
            finally:
                step(x)

        policy = weft.batched(g if is_async else f)
        as_caller(lambda: list(policy.stream(rows(1))))
        assert seen == ["made", "made+", "made++", "made+++"]

    def test_of_the_runs_that_isolate_an_error(self):
        seen = []

        def f(x):
            if len(x) < 8:
                seen.append(look())
                if (x < 0).any():
                    raise ValueError("negative")
            return x

        policy = weft.batched(f, max_batch_size=2, **FULL)
        callers = together([lambda x=x: as_caller(lambda: policy(rows(x))) for x in (1, -1)])
        assert [type(caller.error) for caller in callers] == [type(None), ValueError]
        assert seen == [EXPECTED] * 3

    def test_of_a_call_inside_the_function(self):
        seen = []

        def f(x):
            seen.append(HERE.get())
            HERE.set("inside")
            if len(x) > 1:
                policy(x[1:])
            return x

        policy = weft.batched(f)
        as_caller(lambda: policy(rows(1, 2)))
        assert seen == ["made", "made"]

    def test_of_a_pull_back(self):
        seen = []

        def with_pull_back(x):
            seen.append(look())
            return x, lambda dy: seen.append(look()) or dy

        policy = weft.batched(lambda x: x, vjp=with_pull_back)
        as_caller(lambda: policy.vjp(rows(1))[1](rows(1)))
        assert seen == [EXPECTED] * 2

    def test_of_a_backward(self):
        need("torch")
        import torch

        seen = []

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                seen.append(look())
                return gradient * 2

        policy = weft.batched(Double.apply)
        x = torch.ones(1, 1, requires_grad=True)
        as_caller(lambda: policy(x).sum().backward())
        assert seen == [EXPECTED]
        assert x.grad.item() == 2

    def test_priorities_are_the_callers(self):
        seen = []
        inner = weft.batched(lambda x: x)
        submit = inner._submit

        def note(request):
            seen.append(request.low)
            return submit(request)

        inner._submit = note
        with weft.priority("low"):
            outer = weft.batched(lambda x: inner(x))
        outer(rows(1))
        with weft.priority("low"):
            inner(rows(1))
        assert seen == [True, True]

    def test_of_batch_function(self):
        seen, clock = [], weft.SimulatedClock()
        with weft.scope(clock):

            def call():
                return weft.raw_ops.BatchFunction(
                    in_tensors=[rows(1)], captured_tensors=[], f=f, num_batch_threads=1, max_batch_size=2,
                    batch_timeout_micros=1000, Tout=["float64"],
                )  # fmt: skip

            def f(x):
                seen.append(HERE.get())
                return x

            start_on(clock, lambda: HERE.set("made") and call())
            clock.run_out()
            callers = [start_on(clock, lambda: as_caller(call)) for _ in range(2)]
            clock.run_out()
            for caller in callers:
                caller.answer()
        assert seen == ["made", "made"]


class TestJax:
    """The context of JAX in the caller's thread."""

    @pytest.fixture(autouse=True)
    def jax(self):
        need("jax")
        import jax

        return jax

    @staticmethod
    def difference(x):
        """Nothing of 16777217 - 16777216 is left in 32 bits."""
        import jax.numpy as jnp

        return np.asarray(jnp.asarray(x) - jnp.asarray(np.full(x.shape, 16777216.0)))

    @staticmethod
    def wide(call):
        """`call()` with 64-bit numbers."""
        with wide_numbers():
            return call()

    def test_64_bits_alone_and_with_others(self):
        model = Model(self.difference)
        policy = weft.batched(model, max_batch_size=8)
        narrow = lambda: policy(rows(16777217)).item()  # noqa: E731
        assert (self.wide(narrow), narrow()) == (1, 0)
        calls = [lambda: self.wide(narrow), narrow, narrow, lambda: self.wide(narrow)]
        callers = waiting_together(policy, model, *calls)
        assert [caller.answer() for caller in callers] == [1, 0, 0, 1]
        assert model.sizes[-2:] == [2, 2]

    def test_arrays_of_64_bits_stay_so(self, jax):
        policy = weft.batched(lambda x: x / 3, max_batch_size=2, **FULL)
        callers = together([lambda: self.wide(lambda: policy(jax.numpy.ones((1, 2))))] * 2)
        assert [caller.answer().dtype.name for caller in callers] == ["float64"] * 2

    def test_gradients(self, jax):
        @jax.custom_vjp
        def f(x):
            return x

        f.defvjp(lambda x: (x, x), lambda x, g: (g * jax.numpy.asarray(self.difference(np.asarray(x))),))
        policy = weft.batched(f, max_batch_size=2, **FULL)

        def gradient():
            x = jax.numpy.full((1, 1), 16777217.0)
            return jax.grad(lambda x: policy(x).sum())(x).item()

        callers = together([lambda: self.wide(gradient)] * 2)
        assert [caller.answer() for caller in callers] == [1, 1]
        callers = together([gradient] * 2)
        assert [caller.answer() for caller in callers] == [0, 0]

    def test_async_functions(self):
        async def f(x):
            await asyncio.sleep(0)
            return self.difference(x)

        policy = weft.batched(f, max_batch_size=2, **FULL)
        narrow = lambda: policy(rows(16777217)).item()  # noqa: E731
        callers = together([lambda: self.wide(narrow), narrow, narrow, lambda: self.wide(narrow)])
        assert [caller.answer() for caller in callers] == [1, 0, 0, 1]

    def test_functions_that_yield(self, jax):
        def f(x):
            yield self.difference(x)
            with wide_numbers():
                yield self.difference(x)
                yield self.difference(x)
            yield self.difference(x)

        policy = weft.batched(f)
        narrow = lambda: [y.item() for y in policy.stream(rows(16777217))]  # noqa: E731
        assert self.wide(narrow) == [1, 1, 1, 1]
        assert narrow() == [0, 1, 1, 0]

    def test_batch_function(self):
        clock, sizes = weft.SimulatedClock(), []

        def call():
            return weft.raw_ops.BatchFunction(
                in_tensors=[rows(16777217)], captured_tensors=[], f=f, num_batch_threads=1, max_batch_size=2,
                batch_timeout_micros=1000, Tout=["float64"],
            )[0].item()  # fmt: skip

        def f(x):
            sizes.append(len(x))
            return self.difference(x).astype(float)

        with weft.scope(clock):
            callers = [start_on(clock, each) for each in [lambda: self.wide(call), call, lambda: self.wide(call), call]]
            clock.run_out()
            assert [caller.answer() for caller in callers] == [1, 0, 1, 0]
        assert sizes == [2, 2]

    @pytest.mark.parametrize(
        "enter",
        [
            lambda jax: jax.default_matmul_precision("float32"),
            lambda jax: jax.default_device(jax.devices()[0]),
            lambda jax: jax.numpy_dtype_promotion("strict"),
            lambda jax: jax.numpy_rank_promotion("raise"),
            lambda jax: jax.debug_nans(True),
            lambda jax: jax.disable_jit(),
            lambda jax: jax.default_prng_impl("rbg"),
            lambda jax: jax.transfer_guard("log"),
            lambda jax: jax.checking_leaks(),
        ],
    )
    def test_every_setting(self, jax, enter):
        seen = []
        model = Model(lambda x: seen.append((len(x), modes.jax_mode())) or x)
        policy = weft.batched(model, max_batch_size=8)

        def call():
            with enter(jax):
                policy(rows(1))
                return modes.jax_mode()

        callers = waiting_together(policy, model, call, lambda: policy(rows(1)), call)
        mine, other = callers[0].answer(), modes.jax_mode()
        assert mine != other
        assert mine == callers[2].answer()
        assert sorted(seen, key=lambda run: run[0]) == [(1, other), (1, other), (2, mine)]
        assert modes.jax_mode() == other

    @pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning")
    def test_what_no_other_thread_can_have(self, jax):
        seen = []
        model = Model(lambda x: seen.append((len(x), threading.get_ident())) or x)
        policy = weft.batched(model, max_batch_size=8)

        def mesh(name):
            return jax.sharding.Mesh(np.array(jax.devices()[:1]), (name,))

        def call(context):
            with context:
                policy(rows(1))
                return threading.get_ident()

        lone = start(call, mesh("rows"))
        assert seen == [(1, lone.answer())]
        for context in (
            mesh("rows"),
            jax.make_user_context(None)(1) if hasattr(jax, "make_user_context") else mesh("x"),
        ):
            seen.clear()
            model.gate.clear()
            other = start(policy, rows(1))
            callers = [start(call, context) for _ in range(2)]
            model.gate.set()
            other.answer()
            me = [caller.answer() for caller in callers]
            assert {(1, thread) for thread in me} <= set(seen)
            assert [size for size, _ in seen] == [1, 1, 1]

    @pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning")
    def test_an_async_function_cannot_have_it(self, jax):
        async def f(x):
            return x

        policy = weft.batched(f)
        with (
            jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",)),
            pytest.raises(FailedPreconditionError, match="context of JAX"),
        ):
            policy(rows(1))
        assert policy(rows(1)).item() == 1


class TestTorch:
    """What PyTorch keeps for a thread."""

    @pytest.fixture(autouse=True)
    def torch(self):
        need("torch")
        import torch

        return torch

    def test_modes_and_hooks_of_a_lone_caller(self, torch):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Refuse(TorchDispatchMode):
            def __torch_dispatch__(self, *_):
                raise AssertionError("the function is not in this mode")

        seen = []

        def f(x):
            seen.append((threading.get_ident() == me, torch.ones(1).device.type))
            return x

        me, policy = threading.get_ident(), weft.batched(f)
        policy(rows(1))
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        for context in (torch.device("meta"), hooks, Refuse()):
            with context:
                policy(rows(1))
        policy(rows(1))
        assert seen == [(True, "cpu"), (False, "cpu"), (False, "cpu"), (False, "cpu"), (True, "cpu")]

    def test_in_tasks(self, torch):
        seen = []
        policy = weft.batched(lambda x: seen.append(torch.ones(1).device.type) or x, on_loop=True)

        async def main():
            with torch.device("meta"):
                await policy.aio(rows(1))

        asyncio.run(main())
        assert seen == ["cpu"]

    def test_in_a_backward(self, torch):
        seen = []

        class Look(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                seen.append(torch.ones(1).device.type)
                return gradient * 2

        policy = weft.batched(Look.apply)
        x = torch.ones(1, 1, requires_grad=True)
        with torch.device("meta"):
            policy(x).sum().backward()
        pulled = weft.batched(lambda x: x, vjp=lambda x: (x, lambda dy: seen.append(torch.ones(1).device.type) or dy))
        _, pull_back = pulled.vjp(rows(1))
        with torch.device("meta"):
            pull_back(rows(1))
        assert seen == ["cpu", "cpu"]

    def test_the_cache_of_autocast(self, torch):
        seen = []
        model = Model(lambda x: seen.append(torch.is_autocast_cache_enabled()) or x)
        policy = weft.batched(model)

        def call(cache):
            with torch.autocast("cpu", cache_enabled=cache):
                policy(rows(1))

        waiting_together(policy, model, lambda: call(True), lambda: call(False))
        assert seen[1:] == [True, False]
