"""Arguments that are Python objects, one for each row."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batched_calls import FULL, Model, call_all, held, waiting
from support.callers import start, together

import weft
from weft.errors import DeadlineExceededError, InvalidArgumentError

TEXTS = st.lists(st.text(max_size=3), max_size=4)


def lengths(text):
    """What a tokenizer might do."""
    assert type(text) is list
    return np.array([len(x) for x in text])


@pytest.fixture
def scope():
    with weft.scope():
        yield


class TestExact:
    @given(st.lists(TEXTS, min_size=1, max_size=5))
    def test_everybody_gets_what_it_would_have_got_alone(self, calls):
        with weft.scope():
            total = sum(max(len(texts), 1) for texts in calls)
            policy = weft.batched(lengths, items=("text",), max_batch_size=total, **FULL)
            answers = call_all(policy, [((texts,), {}) for texts in calls])
            assert [y.tolist() for y in answers] == [[len(x) for x in texts] for texts in calls]
            assert policy.statistics().batches == 1

    @given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 3))
    def test_split(self, calls, size):
        with weft.scope():
            policy = weft.batched(lengths, items=["text"], split=True, max_batch_size=size)
            answers = call_all(policy, [((), {"text": texts}) for texts in calls])
            assert [y.tolist() for y in answers] == [[len(x) for x in texts] for texts in calls]

    def test_in_the_order_of_rows_beside_arrays(self, scope):
        seen = []

        def f(x, names, scale, *, more):
            seen.append((names, more))
            return x * scale

        policy = weft.batched(f, items=("names", "more"), max_batch_size=6, **FULL)
        calls = [((np.arange(k), [f"{k}{i}" for i in range(k)], 2), {"more": [{k}] * k}) for k in (1, 2, 3)]
        assert [y.tolist() for y in call_all(policy, calls)] == [[0], [0, 2], [0, 2, 4]]
        ((names, more),) = seen
        whole = sorted(zip(names, map(tuple, more), strict=True))
        assert whole == [("10", (1,)), ("20", (2,)), ("21", (2,)), ("30", (3,)), ("31", (3,)), ("32", (3,))]

    def test_one_object_without_rows(self, scope):
        policy = weft.batched(lengths, items=("text",), rows=False, max_batch_size=3, **FULL)
        answers = call_all(policy, [((x,), {}) for x in ("a", ["b", "c"], {"d": 1, "e": 2, "f": 3})])
        assert answers == [1, 2, 3]

    def test_beside_numbers_without_rows(self, scope):
        policy = weft.batched(lambda text, k: k * lengths(text), items=("text",), rows=False, max_batch_size=2, **FULL)
        assert call_all(policy, [(("abc", 2.0), {}), (("a", 3.0), {})]) == [6, 3]

    def test_from_tasks(self, scope):
        policy = weft.batched(lengths, items=("text",), rows=False)

        async def ask():
            return await asyncio.gather(*(policy.aio("x" * i) for i in range(20)))

        assert asyncio.run(ask()) == list(range(20))

    def test_of_a_method(self, scope):
        class Model:
            @weft.batched(items=("text",), rows=False)
            def measure(self, text):
                return lengths(text)

        assert Model().measure("abc") == 3

    def test_an_omitted_one_keeps_its_default(self, scope):
        def f(x, names=None):
            return x + (0 if names is None else lengths(names))

        policy = weft.batched(f, items=("names",))
        assert policy(np.ones(2)).tolist() == [1, 1]
        assert policy(np.ones(2), ["a", "bc"]).tolist() == [2, 3]

    def test_a_function_of_any_names(self, scope):
        policy = weft.batched(lambda **given: lengths(given["text"]), items=("text",))
        assert policy(text=["a", "bc"]).tolist() == [1, 2]

    def test_objects_need_not_be_hashable_nor_equal_to_share_a_batch(self, scope):
        model = Model(lambda objects: np.array([id(x) for x in objects]))
        policy = weft.batched(lambda objects: model(objects), items=("objects",), rows=False, max_batch_size=4, **FULL)
        given = [{"a": 1}, [2], bytearray(b"3"), np.zeros(4)]
        answers = call_all(policy, [((x,), {}) for x in given])
        assert answers == [id(x) for x in given]
        assert model.sizes == [4]

    def test_a_list_that_changes_meanwhile(self, scope):
        model = Model(lengths)
        policy = weft.batched(lambda text: model(text), items=("text",))
        first = held(policy, model, ["first"])
        texts = ["a", "bc"]
        second = start(policy, texts)
        waiting(policy, 1)
        texts.append("def")
        model.gate.set()
        assert first.answer().tolist() == [5]
        assert second.answer().tolist() == [1, 2]

    def test_the_user_s_key_and_cost_see_them(self, scope):
        model = Model(lengths)
        policy = weft.batched(
            lambda text: model(text),
            items=("text",),
            key=lambda text: text[0][:1],
            cost=lambda text: sum(map(len, text)),
            max_batch_size=4,
            **FULL,
        )
        answers = call_all(policy, [((["aa"],), {}), ((["ab"],), {}), ((["bbbb"],), {})])
        assert [y.tolist() for y in answers] == [[2], [2], [4]]
        assert sorted(map(len, model.batches)) == [1, 2]


class TestPadding:
    def test_rows_of_padding_repeat_the_first_object(self, scope):
        seen = []

        def f(text, mask, n):
            seen.append((text, mask.tolist(), n))
            return lengths(text)

        policy = weft.batched(f, items=("text",), allowed_batch_sizes=[4, 64], pass_mask="mask", pass_rows="n")
        assert policy(["a", "bc"]).tolist() == [1, 2]
        assert seen == [(["a", "bc", "a", "a"], [True, True, False, False], 2)]

    def test_of_a_call_without_rows(self, scope):
        policy = weft.batched(lengths, items=("text",), allowed_batch_sizes=[4, 64], max_batch_size=3, **FULL)
        answers = call_all(policy, [(([],), {}), ((["a", "bc"],), {})])
        assert [y.tolist() for y in answers] == [[], [1, 2]]


class TestFailing:
    def test_one_bad_object_fails_alone(self, scope):
        policy = weft.batched(lengths, items=("text",), rows=False, max_batch_size=4, **FULL)
        callers = together([lambda x=x: policy(x) for x in ("a", "bc", 3, "def")])
        assert [caller.value for caller in callers] == [1, 2, None, 3]
        assert isinstance(callers[2].error, TypeError)

    def test_deadlines(self, scope):
        model = Model(lengths)
        policy = weft.batched(lambda text: model(text), items=("text",))
        first = held(policy, model, ["first"])
        with pytest.raises(DeadlineExceededError):
            policy.call(["late"], deadline=0.01)
        model.gate.set()
        first.answer()
        assert policy(["a"]).tolist() == [1]
        assert ["late"] not in model.batches


class TestGradients:
    def test_torch(self, scope):
        torch = pytest.importorskip("torch")
        weight = torch.tensor(3.0, requires_grad=True)

        def f(x, names):
            return x * weight * torch.tensor([float(len(name)) for name in names])

        policy = weft.batched(f, items=("names",), max_batch_size=6, allowed_batch_sizes=[8], **FULL)

        def back(k):
            x = torch.full((k,), float(k), requires_grad=True)
            policy(x, ["x" * k] * k).sum().backward()
            return x.grad.tolist()

        answers = [caller.answer() for caller in together([lambda k=k: back(k) for k in (1, 2, 3)])]
        assert answers == [[3.0], [6.0, 6.0], [9.0, 9.0, 9.0]]
        assert weight.grad.item() == sum(k * k * k for k in (1, 2, 3))
        assert policy.statistics().backwards == 1

    @pytest.mark.parametrize("records", [True, False])
    def test_torch_with_items_alone(self, scope, records):
        torch = pytest.importorskip("torch")
        weight = torch.tensor(3.0, requires_grad=True)
        policy = weft.batched(
            lambda text: weight * torch.tensor([float(len(x)) for x in text]),
            items=("text",),
            max_batch_size=2,
            **FULL,
        )

        def ask(texts):
            with nullcontext() if records else torch.no_grad():
                y = policy(texts)
            if records:
                y.sum().backward()
            return y.tolist()

        assert [c.answer() for c in together([lambda: ask(["a"]), lambda: ask(["bc"])])] == [[3.0], [6.0]]
        assert weight.grad is None if not records else weight.grad.item() == 3

    def test_pull_backs(self, scope):
        def with_pull_back(x, names):
            scale = lengths(names)
            return x * scale, lambda dy: (dy * scale, None)

        policy = weft.batched(
            lambda x, names: x * lengths(names), vjp=with_pull_back, items=("names",), max_batch_size=3, **FULL
        )

        def both(k):
            y, pull_back = policy.vjp(np.full(k, 2.0), ["x" * k] * k)
            return y.tolist(), pull_back(np.ones(k)).tolist()

        answers = [caller.answer() for caller in together([lambda k=k: both(k) for k in (1, 2)])]
        assert answers == [([2.0], [1.0]), ([4.0, 4.0], [2.0, 2.0])]

    def test_jax(self, scope):
        jax = pytest.importorskip("jax")
        policy = weft.batched(
            lambda w, x, names: w * x * lengths(names), shared=("w",), items=("names",), max_batch_size=3, **FULL
        )

        def both(k):
            given = jax.numpy.float32(2.0), jax.numpy.ones(k)
            return jax.grad(lambda w, x: policy(w, x, ["x" * k] * k).sum(), argnums=(0, 1))(*given)

        (w1, x1), (w2, x2) = (caller.answer() for caller in together([lambda k=k: both(k) for k in (1, 2)]))
        assert (x1.tolist(), x2.tolist()) == ([2.0], [4.0, 4.0])
        assert w1 + w2 == 5


class TestRefused:
    @pytest.mark.parametrize(
        "text", ["abc", b"abc", bytearray(b"abc"), 3, None, {"a": 1}, {"a"}, iter("a"), np.array(["a"])]
    )
    def test_one_object_where_there_are_rows(self, scope, text):
        policy = weft.batched(lengths, items=("text",))
        with pytest.raises(InvalidArgumentError, match="'text' must be a list with one object for each row, got a"):
            policy(text)
        assert policy(["a"]).tolist() == [1]

    def test_another_number_of_rows(self, scope):
        policy = weft.batched(lambda x, names, more: x, items=("names", "more"))
        with pytest.raises(
            InvalidArgumentError, match="'more' must have one object for each of the call's 2 rows, got 3"
        ):
            policy(np.ones(2), ["a", "b"], [1, 2, 3])

    def test_a_call_without_any_rows(self, scope):
        policy = weft.batched(lambda names=(), k=1: 0, items=("names",))
        with pytest.raises(InvalidArgumentError, match="at least one array or item among its arguments"):
            policy(k=2)

    @pytest.mark.parametrize(
        "options",
        [
            {"items": "text"},
            {"items": 3},
            {"items": ("nothing",)},
            {"items": (3,)},
            {"items": ("more",)},
            {"items": ("text", "text")},
            {"items": ("text",), "shared": ("text",)},
            {"items": ("text",), "pass_mask": "text"},
        ],
        ids=repr,
    )
    def test_options(self, options):
        with pytest.raises(InvalidArgumentError, match=r"items|pass_mask"):
            weft.batched(lambda text, *more: 0, **options)
