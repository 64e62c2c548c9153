"""Exceptions of user code that are no `Exception`: their callers get them as the cause of an error, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from support.batched_calls import FULL, Model, held, rows, waiting
from support.callers import run_script, start, together, until
from support.libraries import for_each

import weft
from weft import raw_ops
from weft.errors import CancelledError, OpError, UnknownError


class Panic(BaseException):
    """As extensions in Rust raise."""


class Odd(BaseException):
    """With an argument of its own, and without a text."""

    def __init__(self, row):
        super().__init__(row, "more")
        self.row = row

    def __str__(self):
        raise RuntimeError("no text")


KINDS = [Panic, Odd, GeneratorExit, asyncio.CancelledError]


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


def strict(kind):
    """A function that raises `kind` if there is a negative row."""

    def f(x):
        if (x < 0).any():
            raise kind("bad row")
        return x * 2

    return f


def check(error, kind):
    assert type(error) is UnknownError
    assert type(error.__cause__) is kind
    assert kind.__name__ in str(error)


def check_callers(callers, kind, guilty):
    for i, caller in enumerate(callers):
        if i in guilty:
            check(caller.error, kind)
        else:
            assert caller.answer().item() == 2 * i


class TestForward:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("guilty", [[0], [5], [1, 3, 4]])
    def test_only_the_guilty_fail(self, kind, guilty):
        policy = weft.batched(strict(kind), max_batch_size=6, **FULL)
        callers = together([lambda i=i: policy(rows(-1.0 if i in guilty else i)) for i in range(6)])
        check_callers(callers, kind, guilty)
        assert len({id(callers[i].error) for i in guilty}) == len(guilty)
        assert policy.statistics().failed == len(guilty)
        check_callers(together([lambda i=i: policy(rows(i)) for i in range(6)]), kind, [])

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_a_lone_call(self, kind):
        policy = weft.batched(strict(kind))
        for _ in range(2):
            with pytest.raises(OpError) as caught:
                policy(rows(-1))
            check(caught.value, kind)
            assert policy(rows(1)).item() == 2
        assert caught.value.__cause__.__traceback__ is not None

    def test_it_is_the_object_that_was_raised(self):
        raised = []

        def f(x):
            raised.append(Panic("now"))
            raise raised[-1]

        policy = weft.batched(f, max_batch_size=2, on_error="share", **FULL)
        callers = together([lambda: policy(rows(1))] * 2)
        assert [caller.error.__cause__ for caller in callers] == raised * 2
        assert callers[0].error is not callers[1].error

    def test_the_worker_goes_on(self):
        model = Model(strict(Panic))
        policy = weft.batched(model)
        first = held(policy, model, rows(0))
        waiting_callers = [start(policy, rows(v)) for v in (-1, 1)]
        waiting(policy, 2)
        model.gate.set()
        first.answer()
        check(waiting_callers[0].end().error, Panic)
        assert waiting_callers[1].answer().item() == 2
        assert start(policy, rows(3)).answer().item() == 6

    @pytest.mark.parametrize("kind", KINDS)
    def test_split_calls(self, kind):
        policy = weft.batched(strict(kind), max_batch_size=2, split=True)
        with pytest.raises(OpError) as caught:
            policy(rows(1, 2, 3, 4, -5))
        check(caught.value, kind)

    @for_each("how", ["call", "aio", "vjp", "torch", "jax", "ragged", "items"])
    def test_every_kind_of_call(self, how):
        f = strict(Panic)
        if how == "vjp":
            policy = weft.batched(f, vjp=lambda x: (f(x), lambda g: g))
            call = lambda: policy.vjp(rows(-1))  # noqa: E731
        elif how == "torch":
            torch = pytest.importorskip("torch")
            policy = weft.batched(f)
            call = lambda: policy(torch.tensor([[-1.0]], requires_grad=True))  # noqa: E731
        elif how == "jax":
            jax = pytest.importorskip("jax")
            policy = weft.batched(lambda x: f(jax.lax.stop_gradient(x)) + x)
            call = lambda: jax.grad(lambda x: policy(x).sum())(jax.numpy.full((1, 1), -1.0))  # noqa: E731
        elif how == "ragged":
            policy = weft.batched(lambda x: f(x.flat_values), ragged=("x",))
            call = lambda: policy(rows(-1))  # noqa: E731
        elif how == "items":
            policy = weft.batched(lambda names: f(np.array(names)), items=("names",), rows=False)
            call = lambda: policy(-1)  # noqa: E731
        elif how == "aio":
            policy = weft.batched(f)
            call = lambda: asyncio.run(policy.aio(rows(-1)))  # noqa: E731
        else:
            policy = weft.batched(f)
            call = lambda: policy.call(rows(-1), receipt=True)  # noqa: E731
        with pytest.raises(OpError) as caught:
            call()
        check(caught.value, Panic)

    @for_each("on_loop", [False, True])
    def test_no_task_is_cancelled(self, on_loop):
        policy = weft.batched(strict(asyncio.CancelledError), on_loop=on_loop)

        async def ask(value):
            try:
                return (await policy.aio(rows(value))).item()
            except OpError as error:
                check(error, asyncio.CancelledError)
                await asyncio.sleep(0)  # it goes on
                assert asyncio.current_task().cancelling() == 0
                return "failed"

        async def main():
            return await asyncio.gather(*(ask(v) for v in (1, -1, 2)))

        assert asyncio.run(main()) == [2, "failed", 4]

    def test_a_call_from_inside(self):
        seen = []

        def f(x):
            if x[0, 0] < 0:
                raise Panic
            if x[0, 0] > 0:
                try:
                    policy(-x)
                except OpError as error:
                    seen.append(error)
            return x * 2

        policy = weft.batched(f)
        assert policy(rows(3)).item() == 6
        check(seen[0], Panic)

    def test_a_result_whose_own_code_raises(self):
        class Sequence(weft.PerRow):
            @property
            def items(self):
                raise Panic

            @items.setter
            def items(self, value):
                pass

        policy = weft.batched(lambda x: Sequence([1]), max_batch_size=2, **FULL)
        for caller in together([lambda: policy(rows(1))] * 2):
            check(caller.error, Panic)

    def test_a_shared_argument_whose_comparison_raises(self):
        class Touchy:
            def __eq__(self, other):
                raise Panic

            __hash__ = None

        policy = weft.batched(lambda x, w: x, shared=("w",), max_batch_size=2, **FULL)
        callers = together([lambda: policy(rows(1), Touchy())] * 2)
        failed = [caller.error for caller in callers if caller.error is not None]
        assert len(failed) == 1
        assert "must be the same in all calls" in str(failed[0])

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
    def test_what_ends_a_thread_is_the_cause_for_the_others(self, kind):
        def f(x):
            if len(x) > 1:
                raise kind("now")
            return x

        policy = weft.batched(f, max_batch_size=2, **FULL)
        for caller in together([lambda: policy(rows(1))] * 2):
            assert type(caller.error) in (CancelledError, kind)
            assert isinstance(caller.error, kind) or isinstance(caller.error.__cause__, kind)

    def test_observers_are_told_an_error(self, scope):
        class Notes:
            def batch_ran(self, event):
                told.append(event.error)

            def call_refused(self, *event):
                pass

        told = []
        policy = weft.batched(strict(Panic))
        with weft.observe(Notes()), pytest.raises(UnknownError):
            policy(rows(-1))
        check(told[0], Panic)

    def test_of_a_signal_handler(self):
        """It is meant for the thread that it interrupts."""
        out = run_script("""
            import signal, numpy as np, weft
            class Alarm(BaseException):
                pass
            def handler(*_):
                raise Alarm
            signal.signal(signal.SIGALRM, handler)
            def f(x):
                signal.raise_signal(signal.SIGALRM)
                return x
            try:
                weft.batched(f)(np.ones(1))
            except Alarm:
                print("interrupted")
        """)
        assert out.split() == ["interrupted"]


class TestUserCodeOfACall:
    @pytest.mark.parametrize("kind", KINDS)
    @for_each("option", ["key", "cost"])
    def test_its_option_raises(self, option, kind):
        def raises(x):
            if x[0, 0] < 0:
                raise kind("bad row")
            return 1

        policy = weft.batched(lambda x: x * 2, **{option: raises})
        with pytest.raises(OpError) as caught:
            policy(rows(-1))
        check(caught.value, kind)
        assert policy.statistics().rejected == 1

        async def main():
            with pytest.raises(OpError) as caught:
                await policy.aio(rows(-1))
            check(caught.value, kind)
            return (await policy.aio(rows(1))).item()

        assert asyncio.run(main()) == 2

    def test_an_argument_whose_code_raises(self):
        class Touchy:
            def __eq__(self, other):
                return True

            def __hash__(self):
                raise Panic

        policy = weft.batched(lambda x, y: x)
        with pytest.raises(OpError) as caught:
            policy(rows(1), Touchy())
        check(caught.value, Panic)


class TestBackward:
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_pull_back(self, kind):
        def vjp(x):
            def pull_back(gradient):
                raise kind("bad gradient")

            return x, pull_back

        policy = weft.batched(lambda x: x, vjp=vjp, max_batch_size=2, **FULL)

        def work():
            _, pull_back = policy.vjp(rows(1))
            return pull_back(rows(1))

        for caller in together([work] * 2):
            check(caller.error, kind)

        async def main():
            pulls = [pull for _, pull in await asyncio.gather(*(policy.aio.vjp(rows(1)) for _ in range(2)))]
            return await asyncio.gather(*(pull(rows(1)) for pull in pulls), return_exceptions=True)

        for error in asyncio.run(main()):
            check(error, kind)

    @pytest.mark.parametrize("kind", KINDS)
    @for_each("waits", [True, False])
    def test_the_backward_of_torch(self, kind, waits):
        torch = pytest.importorskip("torch")

        class Bad(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                if (gradient < 0).any():
                    raise kind("bad gradient")
                return gradient

        w = torch.ones(1, requires_grad=True)
        policy = weft.batched(lambda x: Bad.apply(x * w), max_batch_size=2, wait_backward=waits, **FULL)

        def work(sign):
            (policy(torch.ones(1, 1)) * sign).sum().backward()

        callers = together([lambda s=s: work(s) for s in (1, -1)])
        if waits:
            for caller in callers:
                check(caller.error, kind)
                assert "bad gradient" in "".join(getattr(caller.error, "__notes__", ()))
        else:
            for caller in callers:  # whoever hands in the last gradient runs the backward
                assert caller.error is None or check(caller.error, kind) is None
            with pytest.raises(OpError) as caught:
                policy.join()
            check(caught.value, kind)
        for caller in together([lambda: work(1)] * 2):
            caller.answer()
        policy.join()
        assert w.grad.item() == 2


class TestStreams:
    @pytest.mark.parametrize("kind", KINDS)
    @for_each("at", [0, 1])
    @for_each("is_async", [False, True])
    def test_a_generator(self, kind, at, is_async):
        def plain(x):
            for i in range(3):
                if i == at and (x < 0).any():
                    raise kind("bad row")
                yield x + i

        async def asynchronous(x):
            for i in range(3):
                if i == at and (x < 0).any():
                    raise kind("bad row")
                yield x + i

        policy = weft.batched(asynchronous if is_async else plain, max_batch_size=1)

        def listed(value):
            return [chunk.item() for chunk in policy.stream(rows(value))]

        for _ in range(2):
            with pytest.raises(OpError) as caught:
                listed(-1)
            check(caught.value, kind)
            assert listed(1) == [1, 2, 3]

        async def main():
            return [chunk.item() async for chunk in policy.aio.stream(rows(-1))]

        with pytest.raises(OpError) as caught:
            asyncio.run(main())
        check(caught.value, kind)
        policy.close()

    def test_a_generator_that_raises_when_it_is_closed(self, caplog):
        def f(x):
            try:
                while True:
                    yield x
            finally:
                raise Panic

        policy = weft.batched(f)
        with caplog.at_level(logging.DEBUG, "weft"):
            stream = policy.stream(rows(1))
            next(stream)
            stream.close()
            assert next(policy.stream(rows(2))).item() == 2
            policy.close()
        assert "a generator failed when it was closed" in caplog.text


class TestAsyncFunctions:
    @pytest.mark.parametrize("kind", KINDS)
    def test_only_the_guilty_fail(self, kind):
        @weft.batched(max_batch_size=4, **FULL)
        async def f(x):
            await asyncio.sleep(0)
            return strict(kind)(x)

        check_callers(together([lambda i=i: f(rows(-1 if i == 2 else i)) for i in range(4)]), kind, [2])
        f.close()

    def test_what_its_own_tasks_raise(self):
        @weft.batched
        async def f(x):
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task

        with pytest.raises(OpError) as caught:
            f(rows(1))
        check(caught.value, asyncio.CancelledError)
        f.close()


class TestOps:
    @pytest.mark.parametrize("kind", KINDS)
    def test_batch_function(self, kind):
        """Every caller of the batch gets an error of its own, as for any exception."""

        def ask(f, value):
            return raw_ops.BatchFunction([rows(value)], [], f, 1, 3, 10**9, ["float64"])[0]

        f = strict(kind)
        callers = together([lambda v=v: ask(f, v) for v in (1, -1, 2)])
        for caller in callers:
            check(caller.error, kind)
        assert len({id(caller.error) for caller in callers}) == 3

        async def main():
            call = weft.aio.BatchFunction([rows(-1)], [], f, 1, 1, 0, ["float64"], shared_name="tasks")
            (failed,) = await asyncio.gather(call, return_exceptions=True)
            check(failed, kind)
            return (await weft.aio.BatchFunction([rows(1)], [], f, 1, 1, 0, ["float64"], shared_name="tasks"))[0].item()

        assert asyncio.run(main()) == 2

    def test_observers(self, caplog):
        class Rude:
            def batch_ran(self, *event):
                raise Panic

            call_refused = batch_ran

        policy = weft.batched(lambda x: x * 2, max_batch_size=3, **FULL)
        with caplog.at_level(logging.ERROR, "weft"), weft.observe(Rude()):
            assert [c.answer().item() for c in together([lambda i=i: policy(rows(i)) for i in range(3)])] == [0, 2, 4]
            with pytest.raises(OpError):
                policy(object())
            until(lambda: caplog.text.count("an observer failed") == 2)


def test_the_interpreter_ends_well():
    out = run_script("""
        import numpy as np, threading, weft
        class Panic(BaseException):
            pass
        @weft.batched(max_batch_size=4, max_wait=60.0)
        def f(x):
            if (x < 0).any():
                raise Panic("no")
            return x
        def ask(v):
            try:
                answers.append(str(f(np.full((1, 1), v)).item()))
            except weft.errors.OpError as error:
                answers.append(type(error.__cause__).__name__)
        answers = []
        threads = [threading.Thread(target=ask, args=(float(v),)) for v in (1, 1, -1, 1)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(*answers)
    """)
    assert sorted(out.split()) == ["1.0", "1.0", "1.0", "Panic"]
