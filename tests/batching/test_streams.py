"""Functions that yield: each caller gets its own rows of every chunk in order, whoever else comes, leaves, fails or is slow."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import itertools
import threading
import time
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batched_calls import FULL, rows
from support.callers import PATIENCE, run_script, start, start_on, together, until

import weft
from weft.batching import stream_run
from weft.batching.stream_run import MOST_CHUNKS
from weft.core import ticket
from weft.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


class Counting:
    """Yields its input plus 0, 1, 2 ... A step waits for the gate, if that is shut; it keeps what it was given and how it ended."""

    def __init__(self, chunks: int = 5, is_open: bool = True) -> None:
        self.chunks = chunks
        self.sizes: list[int] = []
        self.made = 0
        self.closed = 0
        self.gate = threading.Semaphore(10**9 if is_open else 0)

    def __call__(self, x):
        self.sizes.append(len(x))
        try:
            for i in range(self.chunks):
                assert self.gate.acquire(timeout=PATIENCE)
                self.made += 1
                yield x + i
        finally:
            self.closed += 1

    def let(self, steps: int) -> None:
        """Let so many steps go on."""
        self.gate.release(steps)


class AsyncCounting(Counting):
    """The same, asynchronously."""

    async def __call__(self, x):
        self.sizes.append(len(x))
        try:
            for i in range(self.chunks):
                while not self.gate.acquire(blocking=False):
                    await asyncio.sleep(0.001)
                self.made += 1
                yield x + i
        finally:
            self.closed += 1


KINDS = pytest.mark.parametrize("kind", [Counting, AsyncCounting])


def listed(stream):
    """All chunks, as numbers."""
    return [chunk.item() for chunk in stream]


async def alisted(stream):
    return [chunk.item() async for chunk in stream]


class TestChunks:
    @KINDS
    def test_threads_and_tasks_share_a_batch(self, kind):
        async def main():
            calls = [alisted(policy.aio.stream(rows(10 * i))) for i in range(3)]
            calls += [asyncio.to_thread(listed, policy.stream(rows(10 * i))) for i in range(3, 6)]
            return await asyncio.gather(*calls)

        model = kind()
        policy = weft.batched(model, max_batch_size=6, **FULL)
        assert asyncio.run(main()) == [[10 * i + k for k in range(5)] for i in range(6)]
        assert (model.sizes, model.closed) == ([6], 1)

    @given(
        callers=st.lists(
            st.tuples(st.integers(1, 3), st.none() | st.integers(0, 6), st.booleans()), min_size=1, max_size=6
        ),
        chunks=st.integers(0, 6),
        kind=st.sampled_from([Counting, AsyncCounting]),
        sizes=st.sampled_from([(), (8, 32)]),
    )
    def test_every_caller_gets_its_rows_of_every_chunk(self, callers, chunks, kind, sizes):
        """Any number of callers, each with some rows, and a chunk after which it leaves; threads and tasks."""
        total = sum(count for count, _, _ in callers)
        model = kind(chunks)
        policy = weft.batched(model, max_batch_size=max(total, 1), allowed_batch_sizes=[*sizes], **FULL)

        def expected(i, count, leaves):
            own = [(x(i, count) + k).tolist() for k in range(chunks)]
            return own if leaves is None else own[: max(leaves, 1)]

        def x(i, count):
            return rows(*(100.0 * i + k for k in range(count)))

        def take(i, count, leaves):
            stream, got = policy.stream(x(i, count)), []
            for chunk in stream:
                got.append(chunk.tolist())
                if len(got) == leaves or leaves == 0:
                    stream.close()
            return got

        async def atake(i, count, leaves):
            stream, got = policy.aio.stream(x(i, count)), []
            async for chunk in stream:
                got.append(chunk.tolist())
                if len(got) == leaves or leaves == 0:
                    await stream.aclose()
            return got

        def call(i, count, leaves, is_task):
            return asyncio.run(atake(i, count, leaves)) if is_task else take(i, count, leaves)

        answers = together([functools.partial(call, i, *caller) for i, caller in enumerate(callers)])
        assert [a.answer() for a in answers] == [expected(i, *caller[:2]) for i, caller in enumerate(callers)]
        policy.close()
        assert policy.statistics().running == 0
        assert model.closed == 1

    def test_results_of_any_kind(self):
        @weft.batched(rows=False)
        def words(x):
            yield {"twice": x * 2, "text": [str(v) for v in x], "model": "toy"}
            yield weft.PerRow([np.arange(int(v)) for v in x])

        first, second = words.stream(3.0)
        assert first == {"twice": 6, "text": "3.0", "model": "toy"}
        assert second.tolist() == [0, 1, 2]

    def test_items_and_lengths(self):
        @weft.batched(items=("text",), pad={"x": weft.Pad(value=0)}, cut=True, max_batch_size=2, **FULL)
        def f(text, x):
            yield x * 2
            yield x + np.array([[len(t)] for t in text])

        calls = [functools.partial(f.stream, text, np.ones((1, n))) for text, n in ((["ab"], 1), (["abc"], 2))]
        got = [one.answer() for one in together([lambda call=call: [y.tolist() for y in call()] for call in calls])]
        assert got == [[[[2]], [[3]]], [[[2, 2]], [[4, 4]]]]

    def test_methods_and_options_of_a_call(self):
        class Model:
            @weft.batched
            def count(self, x):
                yield x
                yield x + 1

            def ask(self):
                stream = self.count.stream(rows(1), deadline=PATIENCE, priority="low", caller="me")
                return listed(stream), stream.receipt()

        got, receipt = Model().ask()
        assert got == [1, 2]
        assert (receipt.size, receipt.position, receipt.batch) == (1, 0, 0)

    def test_no_chunks(self):
        policy = weft.batched(Counting(0))
        stream = policy.stream(rows(1))
        assert listed(stream) == []
        assert listed(stream) == []

    @pytest.mark.parametrize("kind", ["thread", "task"])
    def test_news_of_a_chunk_that_was_taken_ends_nothing(self, kind):
        """A caller can take a chunk, and wait for the next, before the worker has told it of the first."""
        model = Counting(2, is_open=False)
        policy = weft.batched(model, max_batch_size=2, **FULL)

        async def listed_by_a_task(stream):
            return [chunk.item() async for chunk in stream]

        stream = policy.stream(rows(1)) if kind == "thread" else policy.aio.stream(rows(1))
        caller = start(listed, stream) if kind == "thread" else start(lambda: asyncio.run(listed_by_a_task(stream)))
        other = start(listed, policy.stream(rows(5)))  # so that a worker runs the batch
        model.let(1)
        until(lambda: stream._feed._waiting is not None)
        waiting = stream._feed._waiting
        ticket.wake_all(stream._feed.news())
        until(lambda: stream._feed._waiting is not waiting)
        model.let(1)
        assert (caller.answer(), other.answer()) == ([1, 2], [5, 6])

    def test_more_chunks_than_the_buffer_holds(self):
        policy = weft.batched(Counting(5 * MOST_CHUNKS), max_batch_size=3, **FULL)
        got = together([lambda i=i: listed(policy.stream(rows(1000 * i))) for i in range(3)])
        assert [one.answer() for one in got] == [[1000 * i + k for k in range(5 * MOST_CHUNKS)] for i in range(3)]

    def test_a_stream_begins_with_its_first_chunk(self):
        model = Counting()
        policy = weft.batched(model)
        never = policy.stream(rows(1))
        with pytest.raises(FailedPreconditionError, match="once it has a chunk"):
            never.receipt()
        never.close()
        assert listed(never) == []
        assert model.sizes == []

    def test_inside_its_own_function(self):
        @weft.batched
        def down(x):
            if x.flat[0] > 0:
                yield from down.stream(x - 1)
            yield x

        assert listed(down.stream(rows(3))) == [0, 1, 2, 3]
        with down.stream(rows(2)) as stream:
            assert next(stream).item() == 0  # left early, at every level

    def test_record_and_replay(self, tmp_path):
        policy = weft.batched(Counting(2), max_batch_size=2, **FULL)

        def play():
            calls = [functools.partial(policy.stream, rows(i), caller=f"{i}") for i in range(4)]
            streams = [call() for call in calls]
            got = [one.answer() for one in together([functools.partial(listed, stream) for stream in streams])]
            return got, [stream.receipt()[1:4] for stream in streams]

        with policy.record(tmp_path / "batches"):
            got, receipts = play()
        with policy.replay(tmp_path / "batches"):
            again, same = play()
        assert again == got == [[i, i + 1] for i in range(4)]
        assert [figures[1:] for figures in same] == [figures[1:] for figures in receipts]

    def test_statistics(self, scope):
        class Watch:
            def __init__(self):
                self.seen = []

            def batch_ran(self, event):
                self.seen.append((event.rows, event.error))

            def call_refused(self, op, name, error):
                raise error

        model = Counting(3, is_open=False)
        policy = weft.batched(model, max_batch_size=2, **FULL)
        with weft.observe(Watch()) as watch:
            callers = [start(listed, policy.stream(rows(i))) for i in range(2)]
            model.let(2)
            until(lambda: model.made == 2)
            seen = policy.statistics()
            assert (seen.running, seen.calls, seen.batches, seen.runs.count) == (1, 2, 1, 0)
            model.let(1)
            for caller in callers:
                caller.answer()
            policy.close()
            until(lambda: watch.seen)
        seen = policy.statistics()
        assert (seen.running, seen.calls, seen.batches, seen.runs.count, seen.failed) == (0, 2, 1, 1, 0)
        assert watch.seen == [((1, 1), None)]


class TestLeaving:
    @KINDS
    def test_the_others_go_on(self, kind):
        model = kind(4, is_open=False)
        policy = weft.batched(model, max_batch_size=3, **FULL)
        streams = [policy.stream(rows(10 * i)) for i in range(3)]
        firsts = [start(next, stream) for stream in streams]
        model.let(1)
        assert [first.answer().item() for first in firsts] == [0, 10, 20]
        streams[0].close()
        kept = streams.pop()
        del streams[:]
        model.let(3)
        assert listed(kept) == [21, 22, 23]
        until(lambda: model.closed)

    @KINDS
    def test_when_all_have_left_the_generator_is_closed(self, kind, little_garbage):
        model = kind(10**9)
        policy = weft.batched(model, max_batch_size=2, **FULL)

        def ask(how):
            stream = policy.stream(rows(1))
            next(stream)
            how(stream)

        def collect(stream):
            stream.itself = stream
            del stream
            gc.collect()

        together([functools.partial(ask, lambda stream: stream.close()), functools.partial(ask, collect)])
        gc.collect()
        until(lambda: model.closed)
        policy.close()

    def test_an_async_generator_that_waits_is_cancelled(self, monkeypatch):
        """When all have left, and when the batcher is closed without draining."""
        monkeypatch.setattr(ticket, "HEARTBEAT", 0.05)
        ended = []

        @weft.batched(max_batch_size=1, parallel=2)
        async def stuck(x):
            try:
                yield x
                await asyncio.sleep(PATIENCE)
            finally:
                ended.append(x.item())

        left, kept = stuck.stream(rows(1)), stuck.stream(rows(2))
        next(left), next(kept)
        left.close()
        until(lambda: ended == [1])
        stuck.close(drain=False)
        with pytest.raises(CancelledError, match="was closed"):
            next(kept)
        assert ended == [1, 2]
        assert stuck.statistics().failed == 1

    def test_a_cancelled_task(self):
        async def main():
            streams = [policy.aio.stream(rows(i)) for i in (1, 2)]
            asked = [asyncio.ensure_future(anext(stream)) for stream in streams]
            model.let(1)
            assert [chunk.item() for chunk in await asyncio.gather(*asked)] == [1, 2]
            gone, kept = (asyncio.ensure_future(alisted(stream)) for stream in streams)
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            assert await alisted(streams[0]) == []
            model.let(2)
            return await kept

        model = Counting(3, is_open=False)
        policy = weft.batched(model, max_batch_size=2, **FULL)
        assert asyncio.run(main()) == [3, 4]

    def test_a_task_that_is_cancelled_before_the_first_chunk(self):
        async def main():
            gone, kept = (asyncio.ensure_future(alisted(policy.aio.stream(rows(i)))) for i in (1, 2))
            while not model.sizes:
                await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            model.let(3)
            return await kept

        model = Counting(3, is_open=False)
        policy = weft.batched(model, max_batch_size=2, **FULL)
        assert asyncio.run(main()) == [2, 3, 4]

    def test_an_interrupted_thread(self):
        model = Counting(3, is_open=False)
        policy = weft.batched(model, max_batch_size=2, **FULL)
        streams = [policy.stream(rows(i)) for i in (1, 2)]
        callers = [start(listed, stream) for stream in streams]
        model.let(1)
        until(lambda: all(stream._feed._waiting is not None for stream in streams))
        interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
        assert interrupt(ctypes.c_ulong(callers[0].ident), ctypes.py_object(KeyboardInterrupt)) == 1
        model.let(2)
        with pytest.raises(KeyboardInterrupt):
            callers[0].answer()
        assert callers[1].answer() == [2, 3, 4]

    def test_a_slow_caller_alone_fails(self, monkeypatch):
        monkeypatch.setattr(stream_run, "SECONDS_FOR_ROOM", 0.01)
        model = Counting(MOST_CHUNKS + 20, is_open=False)
        policy = weft.batched(model, max_batch_size=2, **FULL)
        slow, fast = policy.stream(rows(0)), policy.stream(rows(1000))
        firsts = [start(next, stream) for stream in (slow, fast)]
        model.let(1)
        for first in firsts:
            first.answer()
        model.let(model.chunks)
        assert listed(fast) == [1001 + i for i in range(model.chunks - 1)]
        got = [next(slow).item() for _ in range(MOST_CHUNKS)]
        assert got == [1 + i for i in range(MOST_CHUNKS)]
        with pytest.raises(ResourceExhaustedError, match="64 chunks wait for it"):
            next(slow)
        assert listed(slow) == []
        assert policy.statistics().failed == 1


class TestErrors:
    @KINDS
    def test_bad_calls_fail_alone_up_to_the_first_chunk(self, kind):
        def check(x):
            if (x < 0).any():
                raise ValueError("negative")

        def count(x):
            check(x)
            yield from Counting(3)(x)

        async def count_async(x):
            check(x)
            async for chunk in AsyncCounting(3)(x):
                yield chunk

        policy = weft.batched(count if kind is Counting else count_async, max_batch_size=8, **FULL)
        values = [1, 2, -3, 4, 5, -6, 7, 8]
        callers = together([lambda i=i: listed(policy.stream(rows(i))) for i in values])
        for value, caller in zip(values, callers, strict=True):
            if value < 0:
                with pytest.raises(ValueError, match="negative"):
                    caller.answer()
            else:
                assert caller.answer() == [value, value + 1, value + 2]
        assert policy.statistics().failed == 2

    @KINDS
    def test_later_errors_go_to_the_whole_batch(self, kind):
        def f(x):
            yield x
            raise ValueError("later")

        async def af(x):
            yield x
            raise ValueError("later")

        policy = weft.batched(f if kind is Counting else af, max_batch_size=2, **FULL)
        streams = [policy.stream(rows(i)) for i in range(2)]
        assert [one.answer().item() for one in together([functools.partial(next, s) for s in streams])] == [0, 1]
        errors = []
        for stream in streams:
            with pytest.raises(ValueError, match="later") as caught:
                next(stream)
            errors.append(caught.value)
            assert listed(stream) == []
        assert errors[0] is not errors[1]
        assert policy.statistics().failed == 2

    def test_chunks_without_the_rows_of_the_batch(self):
        @weft.batched
        def first(x):
            yield x[:-1]

        @weft.batched
        def second(x):
            yield x
            yield x[:-1]

        with pytest.raises(FailedPreconditionError, match="must have the 2 rows"):
            next(first.stream(rows(1, 2)))
        stream = second.stream(rows(1, 2))
        assert next(stream).ravel().tolist() == [1, 2]
        with pytest.raises(FailedPreconditionError, match="must have the 2 rows"):
            next(stream)

    def test_a_function_that_ends_its_thread(self):
        def f(x):
            yield x
            raise SystemExit

        policy = weft.batched(f)
        stream = policy.stream(rows(1))
        next(stream)
        with pytest.raises(CancelledError):
            next(stream)
        assert next(policy.stream(rows(2))).item() == 2
        policy.close()

    def test_the_deadline_bounds_the_first_chunk(self, clock):
        @weft.batched(deadline=1.0)
        def slow(x):
            clock.sleep(float(x.flat[0]))
            yield x
            clock.sleep(5.0)
            yield x + 1

        late, in_time = (start_on(clock, lambda x=x: listed(slow.stream(rows(x)))) for x in (3.0, 0.5))
        clock.run_out()
        with pytest.raises(DeadlineExceededError):
            late.answer()
        with pytest.raises(DeadlineExceededError):  # it waited for the first batch
            in_time.answer()
        third = start_on(clock, lambda: listed(slow.stream(rows(0.5))))
        clock.run_out()
        assert third.answer() == [0.5, 1.5]

    def test_one_thread_at_a_time(self):
        model = Counting(2, is_open=False)
        stream = weft.batched(model).stream(rows(1))
        first = start(next, stream)
        until(lambda: model.sizes)
        with pytest.raises(FailedPreconditionError, match="one thread or task at a time"):
            next(stream)
        model.let(2)
        assert first.answer().item() == 1
        assert listed(stream) == [2]

    def test_refused(self):
        policy = weft.batched(Counting())
        for call in (policy, policy.call):
            with pytest.raises(FailedPreconditionError, match="yields its result in chunks"):
                call(rows(1))
        with pytest.raises(FailedPreconditionError, match="yields its result in chunks"):
            asyncio.run(policy.aio(rows(1)))
        with pytest.raises(FailedPreconditionError, match="returns its result at once"):
            weft.batched(lambda x: x).stream(rows(1))
        for options in ({"split": True}, {"vjp": lambda x: (x, lambda dy: dy)}, {"recompute": True}):
            with pytest.raises(InvalidArgumentError, match=f"{next(iter(options))} must be"):
                weft.batched(Counting(), **options)
        for bad in ({"deadline": -1}, {"priority": "none"}):
            with pytest.raises(InvalidArgumentError):
                policy.stream(rows(1), **bad)
        with pytest.raises(InvalidArgumentError, match="first dimension of rows"):
            policy.stream(np.zeros(()))

    def test_gradients_are_refused(self):
        torch = pytest.importorskip("torch")
        net = torch.nn.Linear(1, 1)

        @weft.batched(max_batch_size=2, **FULL)
        def f(x):
            with torch.set_grad_enabled(bool(x[0] > 0)):
                yield net(x)
                yield torch.full((len(x),), torch.is_grad_enabled())

        with pytest.raises(InvalidArgumentError, match="a stream has no gradients"):
            f.stream(torch.ones(1, 1, requires_grad=True))

        def with_gradients():
            return list(f.stream(torch.ones(1, 1)))

        def without():
            with torch.no_grad():
                return list(f.stream(torch.ones(1, 1, requires_grad=True)))

        for caller in together([with_gradients, without]):
            first, second = caller.answer()
            assert not first.requires_grad
            assert second.item()  # the mode that the generator has set is its own
        assert torch.is_grad_enabled()
        assert f.statistics().sizes == {2: 1}

    def test_jax_does_not_trace_it(self):
        jax = pytest.importorskip("jax")
        policy = weft.batched(Counting(2))
        with pytest.raises(InvalidArgumentError, match="outside the transformations of JAX"):
            jax.grad(lambda x: next(policy.stream(x)).sum())(jax.numpy.ones(1))


class TestEnds:
    @KINDS
    def test_close_waits_for_streams(self, kind):
        model = kind(3, is_open=False)
        policy = weft.batched(model)
        stream = policy.stream(rows(1))
        caller = start(listed, stream)
        model.let(1)
        until(lambda: policy.statistics().calls)
        closing = start(policy.close)
        until(lambda: policy._closed)
        with pytest.raises(CancelledError):
            policy.stream(rows(2))
        assert closing.is_alive()
        model.let(2)
        assert caller.answer() == [1, 2, 3]
        closing.answer()

    @KINDS
    def test_close_without_drain_ends_streams(self, kind):
        model = kind(10**9, is_open=False)
        policy = weft.batched(model)
        stream = policy.stream(rows(1))
        caller = start(listed, stream)
        model.let(1)
        until(lambda: policy.statistics().calls)
        closing = start(policy.close, drain=False)
        until(lambda: policy._runner.why_closed is not None)
        model.let(1)
        with pytest.raises(CancelledError, match="was closed"):
            caller.answer()
        closing.answer()
        assert model.closed == 1

    def test_a_generator_that_hangs_holds_up_no_caller(self):
        model = Counting(3, is_open=False)
        policy = weft.batched(model, max_batch_size=2, max_wait=PATIENCE)
        left, cancelled = policy.stream(rows(1)), policy.stream(rows(2))
        callers = [start(listed, left), start(listed, cancelled)]
        model.let(1)
        until(lambda: left._feed._waiting is not None and cancelled._feed._waiting is not None)
        left.close()  # from another thread than the one that waits
        assert callers[0].answer() == [1]
        with pytest.raises(DeadlineExceededError, match="still runs"):
            policy.close(drain=False, timeout=0.01)
        with pytest.raises(CancelledError, match="was closed"):
            callers[1].answer()
        model.let(1)
        policy.close()
        assert model.closed == 1

    def test_many_threads_and_loops(self):
        @weft.batched(max_batch_size=8, parallel=2)
        def count(x):
            for i in range(int(x.max()) % 7):
                yield x + i

        def in_thread(first):
            for k in range(6):
                got = listed(count.stream(rows(first + k)))
                assert got == [first + k + i for i in range(len(got))]

        def in_loop(first):
            async def one(x):
                got = await alisted(count.aio.stream(rows(x)))
                assert got == [x + i for i in range(len(got))]

            async def main():
                for _ in range(3):
                    await asyncio.gather(*(one(first + i) for i in range(6)))

            asyncio.run(main())

        calls = [functools.partial(in_thread, 100 * i) for i in range(6)]
        calls += [functools.partial(in_loop, 1000 * i) for i in range(1, 3)]
        for caller in together(calls):
            caller.answer()
        count.close()
        assert count.statistics().calls == 6 * 6 + 2 * 18
        assert count.statistics().failed == 0

    @pytest.mark.slow
    @KINDS
    def test_callers_that_come_leave_and_fail_for_seconds(self, kind):
        """Everybody gets its own rows up to where it leaves or the batch fails; at the end nothing runs and nothing is kept."""
        opened, closed = itertools.count(), itertools.count()

        def count(x):
            next(opened)
            try:
                for i in range(30):
                    if i == 20 and (x == 13).any():
                        raise ValueError("unlucky")
                    yield x + i
            finally:
                next(closed)

        async def count_async(x):
            for chunk in count(x):
                await asyncio.sleep(0)
                yield chunk

        policy = weft.batched(count if kind is Counting else count_async, max_batch_size=6, parallel=2)
        end = time.monotonic() + 4.0

        def check(value, got, error):
            assert got == [value + i for i in range(len(got))]
            assert error is None or str(error) == "unlucky"

        def in_thread(seed):
            random = Random(seed)
            while time.monotonic() < end:
                value, leaves, got, error = random.choice((13, 100, 200)), random.randrange(1, 60), [], None
                stream = policy.stream(rows(value))
                try:
                    got += [chunk.item() for chunk in itertools.islice(stream, leaves)]
                except ValueError as problem:
                    error = problem
                check(value, got, error)

        async def in_task(seed):
            random = Random(seed)
            while time.monotonic() < end:
                value, leaves, got, error = random.choice((13, 100, 200)), random.randrange(1, 60), [], None
                try:
                    async for chunk in policy.aio.stream(rows(value)):
                        got.append(chunk.item())
                        if len(got) == leaves:
                            break
                except ValueError as problem:
                    error = problem
                check(value, got, error)

        async def several(seed):
            await asyncio.gather(*(in_task(seed + i) for i in range(4)))

        calls = [functools.partial(in_thread, i) for i in range(6)]
        calls += [lambda i=i: asyncio.run(several(100 * i)) for i in (1, 2)]
        for caller in together(calls):
            caller.end(3 * PATIENCE).answer()
        policy.close()
        seen = policy.statistics()
        assert (seen.running, seen.waiting) == (0, 0)
        assert seen.runs.count == seen.batches
        assert next(opened) == next(closed) >= seen.batches

    def test_a_forked_child(self):
        out = run_script("""
            import os, threading, numpy as np, weft
            @weft.batched
            def count(x):
                for i in range(3):
                    yield x + i
            gate = threading.Event()
            @weft.batched
            def waiting(x):
                yield x
                gate.wait(20)
                yield x + 1
            stream = waiting.stream(np.zeros(1))
            next(stream)
            child = os.fork()
            if child == 0:
                try:
                    next(stream)
                except weft.errors.CancelledError:
                    print("parent's", flush=True)
                print([chunk.item() for chunk in count.stream(np.ones(1))], flush=True)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            gate.set()
            print([chunk.item() for chunk in stream])
        """)
        assert out.splitlines() == ["parent's", "[1.0, 2.0, 3.0]", "[1.0]"]

    def test_the_interpreter_ends_while_a_stream_runs(self):
        out = run_script("""
            import itertools, sys, threading, time, numpy as np, weft
            begun = threading.Event()
            @weft.batched
            def endless(x):
                for i in itertools.count():
                    time.sleep(0.001)
                    yield x + i
            def call():
                try:
                    for chunk in endless.stream(np.ones(1)):
                        begun.set()
                except weft.errors.CancelledError:
                    sys.stdout.write("told\\n")
            threading.Thread(target=call, daemon=True).start()
            assert begun.wait(20)
        """)
        assert out.split() == ["told"]


@KINDS
def test_a_run_is_counted_before_its_callers_know_that_it_has_ended(kind, monkeypatch):
    """They may ask for statistics at once."""
    policy, counted = weft.batched(kind(2), max_batch_size=8), []
    end_feeds = stream_run.Group.end_feeds

    def end(group, error):
        counted.append(policy.statistics().runs.count)
        end_feeds(group, error)

    monkeypatch.setattr(stream_run.Group, "end_feeds", end)
    for i in range(3):
        assert len(list(policy.stream(np.ones(1)))) == 2
        assert counted == list(range(1, i + 2))
    assert policy.statistics().runs.count == 3
