"""Recording which calls share a batch, and forming the same batches again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import random
import tempfile
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batched_calls import FULL, Model, held, rows, waiting
from support.callers import start, start_on, together

import weft
from weft.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
)

NO_LINES = [
    "[" * 100_000, '{"back": ' * 100_000, '{"batch": 0, "calls": ' + "[" * 100_000, "[]", '["back"]', '[["back", 3]]', "null",
    '"back"', "{}", '{"back": 1, "batch": 2}', '{"back": 1, "back": 1}', "\x00", "\ufeff{}", " ", "\x0b",
    '{"batch": 0, "calls": [["a", 0, 0, 1]], "more": 1}', '{"batch": 0}',
]  # fmt: skip
NO_NUMBERS = ["1.5", "true", '"3"', "-1", "1e400", "NaN", "null", "9" * 5000, "9" * 300, "[1]"]
NO_CALLS = [
    "[]", "{}", '"abcd"', '["abcd"]', '[["a", 0, 0, 1, 2]]', '[["a", 0, 0, -1]]', '[["a", 0, 0, 0]]', '[["a", 0, -1, 1]]',
    '[["a", -1, 0, 1]]', "[[5, 0, 0, 1]]", '[["a", 0, 0, Infinity]]', '[["a", 0, 0, NaN]]', '[["a", 0, 0, "1"]]',
    '[["a", 0, 0, [1]]]', '[["a", 0, 0, true]]', '[["a", 0, 0, 1e300]]', "[null]", "[[]]",
]  # fmt: skip


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def shared(path):
    """The batches of a recording, by the names of their calls."""
    return [[tuple(call[:2]) for call in line["calls"]] for line in lines(path) if "batch" in line]


def actors(policy, names, turns, seed):
    """Actors that call in turns, at times of their own; what each got."""

    def act(name):
        dice = random.Random(f"{name}{seed}")
        got = []
        for turn in range(turns):
            threading.Event().wait(dice.random() * 0.002)
            got.append(policy.call(rows(turn), caller=name).item())
        return got

    return [caller.answer() for caller in together([lambda n=n: act(n) for n in names])]


def order_dependent():
    """A model whose answers tell how the batch was formed."""
    return lambda x: x * 0 + np.cumsum(x, 0) * len(x)


class TestRecording:
    def test_who_shared_a_batch_and_in_which_order(self, path):
        model = Model()
        policy = weft.batched(model)
        with policy.record(path):
            first = held(lambda x: policy.call(x, caller="a"), model)
            callers = []
            for i, name in enumerate("bca", 1):
                callers.append(start(lambda n=name: policy.call(rows(1, 2), caller=n)))
                waiting(policy, i)
            model.gate.set()
            first.answer()
            [caller.answer() for caller in callers]
        assert shared(path) == [[("a", 0)], [("b", 0), ("c", 0), ("a", 1)]]
        assert [call[2:] for call in lines(path)[1]["calls"]] == [[0, 2]] * 3
        assert policy(rows(1)).item() == 2  # and afterwards nothing is written
        assert len(lines(path)) == 2

    def test_names_are_those_of_threads_and_tasks(self, path):
        async def main():
            await asyncio.create_task(policy.aio(rows(1)), name="task")

        policy = weft.batched(Model())
        with policy.record(path):
            thread = threading.Thread(target=policy, args=(rows(1),), name="thread")
            thread.start()
            thread.join()
            asyncio.run(main())
        assert shared(path) == [[("thread", 0)], [("task", 0)]]

    def test_a_refused_call_does_not_count(self, path):
        model = Model()
        policy = weft.batched(model, max_queue=0)
        with policy.record(path):
            first = held(lambda x: policy.call(x, caller="a"), model)
            with pytest.raises(UnavailableError):
                policy.call(rows(1), caller="b")
            model.gate.set()
            first.answer()
            policy.call(rows(1), caller="b")
        assert shared(path) == [[("a", 0)], [("b", 0)]]
        with policy.replay(path):
            assert policy.call(rows(1), caller="a").item() == 2
            assert policy.call(rows(1), caller="b").item() == 2

    def test_one_at_a_time(self, path):
        policy = weft.batched(Model())
        with policy.record(path):
            policy.call(rows(1), caller="a")
            for other in (policy.record, policy.replay):
                with pytest.raises(FailedPreconditionError, match="already"), other(path):
                    pass
        assert shared(path) == [[("a", 0)]]

    def test_a_child_process_does_not_write(self, path):
        policy = weft.batched(lambda x: x * 2)
        with policy.record(path):
            policy.call(rows(1), caller="parent")
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = 0 if policy(rows(2)).item() == 4 else 2
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
        assert shared(path) == [[("parent", 0)]]


class TestReplay:
    @pytest.mark.parametrize("options", [{}, {"parallel": 3}, {"max_batch_size": 3}, {"max_wait": 0.002}])
    def test_the_same_batches_again(self, path, options):
        names = [f"actor-{i}" for i in range(6)]
        policy = weft.batched(order_dependent(), **options)
        with policy.record(path):
            recorded = actors(policy, names, 8, seed=1)
        before = policy.statistics()
        again = path.with_name("again.jsonl")
        for seed in (2, 3):
            with policy.replay(path):
                assert actors(policy, names, 8, seed=seed) == recorded
        after = policy.statistics()
        assert after.batches - before.batches == 2 * before.batches
        assert {k: v * 3 for k, v in before.sizes.items()} == after.sizes
        with policy.record(again):
            actors(policy, names, 8, seed=4)
        assert shared(again)

    def test_split_calls(self, path):
        model = Model(order_dependent())
        policy = weft.batched(model, max_batch_size=4, split=True)
        with policy.record(path):
            first = held(lambda x: policy.call(x, caller="a"), model)
            b = start(lambda: policy.call(np.ones((6, 1)), caller="b"))
            waiting(policy, 2)
            c = start(lambda: policy.call(np.ones((3, 1)), caller="c"))
            waiting(policy, 4)
            model.gate.set()
            want = [caller.answer().ravel().tolist() for caller in (first, b, c)]
        with policy.replay(path):
            calls = [("c", np.ones((3, 1))), ("b", np.ones((6, 1))), ("a", rows(-1))]
            got = [c.answer() for c in together([lambda n=n, x=x: policy.call(x, caller=n) for n, x in calls])]
        assert [y.ravel().tolist() for y in reversed(got)] == want

    def test_tasks(self, path):
        async def main():
            async def act(name):
                return [(await policy.aio.call(rows(i), caller=name)).item() for i in range(5)]

            return await asyncio.gather(*(act(f"t{i}") for i in range(4)))

        policy = weft.batched(order_dependent())
        with policy.record(path):
            want = asyncio.run(main())
        with policy.replay(path):
            assert asyncio.run(main()) == want

    def test_failures_are_repeated(self, path):
        def f(x):
            if (x < 0).any():
                raise ValueError("negative")
            return np.cumsum(x, 0)

        policy = weft.batched(f, max_batch_size=4, **FULL)
        calls = [("a", 1), ("b", -1), ("c", 2), ("d", 3)]
        results = []
        for context in (policy.record, policy.replay):
            with context(path):
                callers = together([lambda n=n, v=v: policy.call(rows(v), caller=n) for n, v in calls])
            results.append([repr(c.error) if c.error else c.value.item() for c in callers])
        assert results[0] == results[1]

    def test_unknown_calls_are_refused(self, path):
        policy = weft.batched(lambda x: x * 2)
        with policy.record(path):
            policy.call(rows(1), caller="a")
        with policy.replay(path):
            with pytest.raises(FailedPreconditionError, match="has no call 0 of 'b'"):
                policy.call(rows(1), caller="b")
            with pytest.raises(InvalidArgumentError, match="must have the 1 rows of the recorded one, got 2"):
                policy.call(rows(1, 2), caller="a")
            assert policy.call(rows(1), caller="a").item() == 2
            with pytest.raises(FailedPreconditionError, match="has no call 1 of 'a'"):
                policy.call(rows(1), caller="a")

    def test_calls_that_are_not_alike_any_more_do_not_meet(self, path):
        policy = weft.batched(lambda x: x * 2, max_batch_size=2, **FULL)
        with policy.record(path):
            together([lambda n=n: policy.call(rows(1), caller=n) for n in "ab"])
        with policy.replay(path):
            first = start(lambda: policy.call(rows(1), caller="a"))
            waiting(policy, 1)
            with pytest.raises(InvalidArgumentError, match="of the calls that shared its recorded batch"):
                policy.call(rows(1).astype("float32"), caller="b")
            assert policy.call(rows(1), caller="b").item() == 2
            assert first.answer().dtype == "float64"

    def test_a_call_that_never_comes(self, path):
        clock = weft.SimulatedClock()
        with weft.scope(clock):
            policy = weft.batched(lambda x: x * 2, max_batch_size=2, max_wait=1.0)
            with policy.record(path):
                callers = [start_on(clock, lambda n=n: policy.call(rows(1), caller=n)) for n in "ab"]
                [caller.answer() for caller in callers]
            with policy.replay(path, timeout=7.0):
                alone = start_on(clock, lambda: policy.call(rows(1), caller="a", deadline=0.1))
                clock.advance(6.9)
                assert alone.is_alive()
                clock.advance(0.2)
                with pytest.raises(DeadlineExceededError) as caught:
                    alone.answer()
                assert caught.value.__notes__ == ["the next batch of the recording waits for call 0 of 'b'"]
            assert policy.statistics().waiting == 0

    @pytest.mark.parametrize(
        "text", ["no json", '{"calls": []}', '{"batch": 1}', '{"batch": 0, "calls": [["a"]]}', "3"]
    )
    def test_what_is_no_recording(self, path, text):
        path.write_text(text + "\n")
        policy = weft.batched(lambda x: x)
        with (
            pytest.raises(InvalidArgumentError, match=r"every line of a recording must be .* in line 1"),
            policy.replay(path),
        ):
            pass
        assert policy(rows(1)).item() == 1

    @pytest.mark.parametrize(
        "line",
        [
            *NO_LINES,
            *(f'{{"back": {number}}}' for number in NO_NUMBERS),
            *(f'{{"batch": {number}, "calls": [["a", 0, 0, 1]]}}' for number in NO_NUMBERS),
            *(f'{{"batch": 0, "calls": {calls}}}' for calls in NO_CALLS),
        ],
        ids=lambda line: line[:60],
    )
    def test_lines_that_are_none(self, path, line):
        path.write_text('{"batch": 7, "calls": [["a", 0, 0, 1]]}\n' + line + "\n", encoding="utf-8")
        policy = weft.batched(lambda x: x)
        with pytest.raises(InvalidArgumentError, match="in line 2"), policy.replay(path):
            pass
        assert policy(rows(1)).item() == 1

    def test_a_batch_that_comes_twice(self, path):
        path.write_text('{"batch": 7, "calls": [["a", 0, 0, 1]]}\n' * 2)
        with pytest.raises(InvalidArgumentError, match=r"each of them once.* in line 2"):
            weft.batched(lambda x: x).replay(path).__enter__()

    @pytest.mark.parametrize("content", [b"\xff\xfe", b'{"back": 1}\n\x80', b'"\xed\xa0\x80"'])
    def test_what_is_no_text(self, path, content):
        path.write_bytes(content)
        policy = weft.batched(lambda x: x)
        with pytest.raises(InvalidArgumentError, match="must be a file of text in UTF-8"), policy.replay(path):
            pass

    def test_what_is_no_file(self, path):
        policy = weft.batched(lambda x: x)
        os.mkfifo(path)
        for each in (path, path.parent, "/dev/zero", "\x00"):
            with pytest.raises(InvalidArgumentError, match="a recording must be a file"), policy.replay(each):
                pass
        assert policy(rows(1)).item() == 1

    @pytest.mark.parametrize(
        "pieces",
        [[(1, 2)], [(0, 1), (2, 1)], [(0, 2), (1, 2)], [(0, 2), (0, 2)], [(0, 2), (0, 2), (2, 2)]],
    )
    def test_calls_that_are_there_in_part_or_twice(self, path, pieces):
        path.write_text(
            "".join(f'{{"batch": {i}, "calls": [["a", 0, {s}, {n}]]}}\n' for i, (s, n) in enumerate(pieces))
        )
        policy = weft.batched(lambda x: x, max_batch_size=2, split=True)
        with policy.replay(path, timeout=5.0):
            for count in range(1, 6):
                with pytest.raises(
                    FailedPreconditionError, match="must have every row of call 0 of 'a' once, and has not row"
                ):
                    policy.call(np.ones(count), caller="a")
        assert policy(rows(1)).item() == 1

    def test_backwards_of_batches_from_before(self, path):
        """A batch that ran before the recording began goes back in it: a replay waits for those it knows."""
        torch = pytest.importorskip("torch")
        w = torch.ones(1, requires_grad=True)
        policy = weft.batched(lambda x: x * w, gradient_deadline=5.0)
        before = policy(torch.ones(1, 1))
        with policy.record(path):
            y = policy.call(torch.ones(1, 1), caller="a")
            before.sum().backward()
            y.sum().backward()
        assert [line.get("back") for line in lines(path)] == [None, 0, 1]
        with policy.replay(path):
            policy.call(torch.ones(1, 1), caller="a").sum().backward()
        assert w.grad.item() == 3

    def test_costs_of_numpy(self, path):
        policy = weft.batched(lambda x: x * 2, cost=lambda x: np.float32(2.5) if len(x) > 1 else np.int64(3))
        for play in (policy.record, policy.replay):
            with play(path):
                assert [policy.call(np.ones(n), caller="a").sum() for n in (1, 2)] == [2, 4]

    @given(
        st.lists(
            st.one_of(
                st.text(max_size=40),
                st.recursive(
                    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
                    lambda inside: st.one_of(
                        st.lists(inside, max_size=4),
                        st.dictionaries(st.sampled_from(["batch", "calls", "back", "x"]), inside),
                    ),
                    max_leaves=12,
                ).map(json.dumps),
                st.lists(
                    st.tuples(
                        st.sampled_from(["a", "b"]),
                        *[st.integers(-1, 3)] * 2,
                        st.one_of(st.integers(-1, 3), st.floats()),
                    ),
                    max_size=3,
                ).map(lambda calls: json.dumps({"batch": len(calls), "calls": calls})),
                st.integers(-1, 4).map(lambda number: json.dumps({"back": number})),
            ),
            max_size=5,
        ),
        st.integers(0, 400),
        st.binary(max_size=3),
    )
    def test_any_file(self, texts, length, more):
        """It is replayed, or an error of weft says what is wrong with it or with the call."""
        with tempfile.TemporaryDirectory() as folder, weft.scope():
            file = pathlib.Path(folder) / "recording"
            file.write_bytes("\n".join(texts).encode("utf-8", "surrogatepass")[:length] + more)
            policy = weft.batched(lambda x: x * 2, max_batch_size=2, split=True)
            with contextlib.suppress(OpError), policy.replay(file, timeout=0.001):
                for caller in ("a", "b"):
                    with contextlib.suppress(OpError):
                        assert policy.call(np.ones(2), caller=caller).tolist() == [2, 2]
            assert policy(np.ones(1)).tolist() == [2]

    def test_a_file_that_is_not_there(self, path):
        policy = weft.batched(lambda x: x)
        with pytest.raises(FileNotFoundError), policy.replay(path):
            pass
        assert policy(rows(1)).item() == 1

    def test_afterwards_it_is_as_before(self, path):
        policy = weft.batched(lambda x: x * 2)
        with policy.record(path):
            policy(rows(1))
        with pytest.raises(ZeroDivisionError), policy.replay(path):
            raise ZeroDivisionError
        assert policy(rows(1, 2)).tolist() == [[2], [4]]


class TestTraining:
    """A training run in torch, with batches as they come, repeated bit by bit."""

    @pytest.mark.parametrize("wait", [True, False])
    def test_bit_by_bit(self, path, wait):
        torch = pytest.importorskip("torch")
        actors_, turns = 5, 4

        def train(policy_of, seed):
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            policy = weft.batched(net, wait_backward=wait, max_batch_size=8)
            data = torch.randn(turns, actors_, 3, 4, generator=torch.Generator().manual_seed(3))

            def act(turn, i):
                threading.Event().wait(random.Random(f"{seed}{turn}{i}").random() * 0.003)
                for k in range(2):  # two calls a turn, so that batches and backwards cross
                    y = policy.call(data[turn, i, : 1 + (i + k) % 3], caller=f"actor-{i}")
                    (y * (i + 1.1)).square().mean().backward()

            with policy_of(policy):
                for turn in range(turns):
                    for caller in together([lambda t=turn, i=i: act(t, i) for i in range(actors_)]):
                        caller.answer()
                    policy.join()
                    optimizer.step()
                    optimizer.zero_grad()
            return [p.detach().clone() for p in net.parameters()]

        want = train(lambda policy: policy.record(path), seed=1)
        assert any("back" in line for line in lines(path))
        for seed in (2, 3):
            got = train(lambda policy: policy.replay(path), seed=seed)
            for a, b in zip(want, got, strict=True):
                assert torch.equal(a, b)

    def test_gradients_that_come_after_the_replay(self, path):
        """A batch that waits for its turn is let go when the replay ends."""
        torch = pytest.importorskip("torch")
        w = torch.ones(1, requires_grad=True)
        policy = weft.batched(lambda x: x * w, wait_backward=False, gradient_deadline=20.0)

        def play():
            return [policy.call(torch.ones(1, 1), caller=str(i)) for i in range(2)]

        with policy.record(path):
            for y in play():
                y.sum().backward()
        with policy.replay(path):
            first, second = play()
            second.sum().backward()
        first.sum().backward()
        policy.join()
        assert w.grad == 4
