"""Arguments whose arrays differ in length: padded to one length, and results cut back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batched_calls import FULL, Model, call_all, held, waiting
from support.callers import start, start_on, together

import weft
from weft.batching.results import entries
from weft.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError

TOKENS = {"tokens": weft.Pad()}
SHAPES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=5)
PADS = st.sampled_from([weft.Pad(), weft.Pad(value=-1, multiple_of=4), weft.Pad(value=7, sizes=(3, 6, 9))])


def tokens_of(shapes, dtype=float):
    return [np.arange(rows * length, dtype=dtype).reshape(rows, length) + 1 for rows, length in shapes]


def total(shapes):
    return sum(max(rows, 1) for rows, _ in shapes)


def model(tokens, n):
    """Row by row what the real tokens give; what it does to the padding nobody may see."""
    is_real = np.arange(tokens.shape[1]) < n[:, None]
    return {"sum": np.where(is_real, tokens, 0).sum(axis=1), "each": tokens * n[:, None]}


def expected(x):
    return {"sum": x.sum(axis=1), "each": x * x.shape[1]}


def check(answers, inputs):
    for y, x in zip(answers, inputs, strict=True):
        want = expected(x)
        assert y.keys() == want.keys()
        for name, array in want.items():
            assert y[name].tolist() == array.tolist()
            assert y[name].shape == array.shape


@pytest.fixture
def scope():
    with weft.scope():
        yield


class TestExact:
    @given(SHAPES, PADS)
    def test_everybody_gets_what_it_would_have_got_alone(self, shapes, pad):
        inputs = tokens_of(shapes)
        with weft.scope():
            policy = weft.batched(
                model, pad={"tokens": pad}, pass_lengths="n", cut="each", max_batch_size=total(shapes), **FULL
            )
            check(call_all(policy, [((x,), {}) for x in inputs]), inputs)
            assert policy.statistics().batches == 1

    @given(SHAPES, PADS, st.integers(1, 3))
    def test_split(self, shapes, pad, size):
        inputs = tokens_of(shapes)
        with weft.scope():
            policy = weft.batched(
                model, pad={"tokens": pad}, pass_lengths="n", cut="each", split=True, max_batch_size=size
            )
            check(call_all(policy, [((), {"tokens": x}) for x in inputs]), inputs)

    @given(SHAPES, st.integers(1, 4))
    def test_padding_rows_and_any_axis(self, shapes, size):
        """With rows of padding, along the last axis, beside an array without a length."""

        def f(x, tokens, n, mask, rows):
            assert (n[rows:] == n[:1]).all()
            assert mask.sum() == rows
            is_real = np.arange(tokens.shape[2]) < n[:, None, None]
            return x, np.where(is_real, tokens, 0), tokens[:, :, 0] if tokens.shape[2] else x

        inputs = [np.stack([x, -x], axis=1) for x in tokens_of(shapes)]
        with weft.scope():
            policy = weft.batched(
                f, pad={"tokens": weft.Pad(axis=2)}, pass_lengths="n", pass_mask="mask", pass_rows="rows", cut=[1],
                max_batch_size=total(shapes), allowed_batch_sizes=[total(shapes) * size], **FULL,
            )  # fmt: skip
            answers = call_all(policy, [((np.full(len(x), float(i)), x), {}) for i, x in enumerate(inputs)])
        for i, (y, x) in enumerate(zip(answers, inputs, strict=True)):
            assert y[0].tolist() == [i] * len(x)
            assert y[1].tolist() == x.tolist()

    @given(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def test_single_examples(self, lengths):
        """`axis` counts the dimension of rows, which the callers do not pass."""
        inputs = [np.arange(length, dtype=float) for length in lengths]
        with weft.scope():
            policy = weft.batched(
                model, rows=False, pad=TOKENS, pass_lengths="n", cut="each", max_batch_size=len(lengths), **FULL
            )
            answers = call_all(policy, [((x,), {}) for x in inputs])
        for y, x in zip(answers, inputs, strict=True):
            assert y["sum"] == x.sum()
            assert y["each"].tolist() == (x * len(x)).tolist()

    def test_the_length_of_a_batch(self, scope):
        seen = []
        longest = weft.batched(
            lambda x: seen.append(x.tolist()) or x[:, 0], pad={"x": weft.Pad(value=9)}, max_batch_size=2, **FULL
        )
        call_all(longest, [((np.ones((1, 2)),), {}), ((np.ones((1, 3)),), {})])
        assert sorted(seen.pop()) == [[1, 1, 1], [1, 1, 9]]
        for pad, length in [(weft.Pad(multiple_of=16), 16), (weft.Pad(sizes=(3, 64, 128)), 64), (weft.Pad(), 4)]:
            policy = weft.batched(lambda x: seen.append(x.shape) or x[:, 0], pad={"x": pad})
            policy(np.ones((1, 4)))
            assert seen.pop() == (1, length)

    def test_several_arguments_have_lengths_of_their_own(self, scope):
        seen = []

        def f(source, *, target, a, b):
            seen.append((source.shape[1], target.shape[1], sorted(a), sorted(b)))
            return {"s": source + 1, "t": (target + 1, target + 2), "n": a}

        policy = weft.batched(
            f,
            pad={"source": weft.Pad(multiple_of=4), "target": weft.Pad(value=1)},
            pass_lengths={"source": "a", "target": "b"},
            cut={"source": "s", "target": ["t"]},
            max_batch_size=2,
            **FULL,
        )
        calls = [((np.zeros((1, s)),), {"target": np.zeros((1, t))}) for s, t in ((2, 5), (3, 1))]
        for y, (s, t) in zip(call_all(policy, calls), ((2, 5), (3, 1)), strict=True):
            assert (y["s"].shape, y["n"].tolist()) == ((1, s), [s])
            assert [x.tolist() for x in y["t"]] == [[[1] * t], [[2] * t]]
        assert seen == [(4, 5, [2, 3], [1, 5])]

    def test_every_array_of_a_nested_argument(self, scope):
        policy = weft.batched(
            lambda inputs, n: {name: x.sum(axis=1) for name, x in inputs.items()} | {"n": n},
            pad={"inputs": weft.Pad()},
            pass_lengths="n",
            max_batch_size=2,
            **FULL,
        )
        calls = [(({"ids": np.ones((1, k), int), "mask": np.ones((1, k, 2))},), {}) for k in (2, 5)]
        for y, k in zip(call_all(policy, calls), (2, 5), strict=True):
            assert (y["ids"].tolist(), y["mask"].tolist(), y["n"].tolist()) == ([k], [[k, k]], [k])

    def test_of_a_method(self, scope):
        class Model:
            @weft.batched(pad=TOKENS, pass_lengths="n", cut=True)
            def each(self, tokens, n):
                return tokens * n[:, None]

        assert Model().each(np.ones((1, 3))).tolist() == [[3, 3, 3]]

    def test_an_omitted_argument(self, scope):
        def f(x, tokens=None, n=None):
            return x + (0 if tokens is None else n)

        policy = weft.batched(f, pad=TOKENS, pass_lengths="n")
        assert policy(np.ones(1)).tolist() == [1]
        assert policy(np.ones(1), np.ones((1, 4))).tolist() == [5]

    @pytest.mark.parametrize("value", ["", b"-"])
    def test_text(self, scope, value):
        policy = weft.batched(
            lambda words: np.array([[len(w) for w in row] for row in words]),
            pad={"words": weft.Pad(value=value)},
            max_batch_size=2,
            **FULL,
        )
        answers = call_all(policy, [((np.array([["a", "bc"]]),), {}), ((np.array([["def"]]),), {})])
        assert [y.tolist() for y in answers] == [[[1, 2]], [[3, len(value)]]]

    def test_only_what_is_named_is_cut(self, scope):
        """A size that happens to match proves nothing."""
        policy = weft.batched(lambda tokens: np.zeros((len(tokens), 4)), pad={"tokens": weft.Pad(sizes=(4,))})
        assert policy(np.ones((2, 3))).shape == (2, 4)

    @pytest.mark.parametrize("is_jax", [False, True])
    def test_lengths_are_in_the_argument_s_library(self, scope, is_jax):
        library = pytest.importorskip("jax.numpy" if is_jax else "torch")
        seen = []
        policy = weft.batched(lambda tokens, n: seen.append(n) or tokens[:, 0], pad=TOKENS, pass_lengths="n")
        policy(library.ones((2, 3)))
        assert type(seen[0]) is type(library.ones(1))
        assert seen[0].tolist() == [3, 3]
        assert "int" in str(seen[0].dtype)
        if not is_jax:
            assert seen[0].dtype is library.int64


class Both(NamedTuple):
    pooled: object
    hidden: object


@dataclass
class Data:
    pooled: object
    hidden: object


class TestCut:
    @pytest.mark.parametrize(
        ("make", "cut"),
        [
            (lambda a, b: (a, b), 1),
            (lambda a, b: (a, b), (1,)),
            (lambda a, b: {"a": a, "hidden": b}, "hidden"),
            (lambda a, b: {0: a, 1: b}, [1]),
            (Both, 1),
            (Both, "hidden"),
            (Data, "hidden"),
            (lambda a, b: (a, {"x": b, "y": ["text"] * len(b)}), {"tokens": 1}),
        ],
    )
    def test_by_key_or_position(self, scope, make, cut):
        policy = weft.batched(
            lambda tokens: make(tokens.sum(axis=1), tokens), pad={"tokens": weft.Pad(multiple_of=8)}, cut=cut
        )
        y = policy(np.ones((2, 3)))
        pooled, hidden = (part for _, part in entries(y))
        assert pooled.tolist() == [3, 3]
        assert (hidden["x"] if isinstance(hidden, dict) else hidden).shape == (2, 3)

    def test_all(self, scope):
        policy = weft.batched(
            lambda tokens: (tokens, {"a": tokens + 1}, 3), pad={"tokens": weft.Pad(sizes=(8,))}, cut=True
        )
        y = policy(np.ones((2, 3)))
        assert (y[0].shape, y[1]["a"].shape, y[2]) == ((2, 3), (2, 3), 3)

    def test_the_array_of_a_caller_is_its_own(self, scope):
        kept = []
        policy = weft.batched(lambda tokens: kept.append(tokens) or tokens, pad=TOKENS, cut=True)
        y = policy(np.ones((2, 3)))
        y[:] = 5
        assert kept[0].max() == 1

    @pytest.mark.parametrize(
        ("result", "cut"),
        [
            (lambda x: x[:, :2], True),
            (lambda x: x[:, 0], True),
            (lambda x: (x, x[:, 0]), True),
            (lambda x: (x, x), 2),
            (lambda x: {"a": x}, "b"),
            (lambda x: x, "a"),
            (lambda x: (x, weft.PerRow(x)), 1),
        ],
    )
    def test_what_cannot_be_cut(self, scope, result, cut):
        policy = weft.batched(lambda x: result(x), pad={"x": weft.Pad()}, cut=cut)
        with pytest.raises(FailedPreconditionError, match="cut"):
            policy(np.ones((2, 3)))

    def test_one_result_for_two_arguments(self, scope):
        policy = weft.batched(
            lambda a, b: (a, b), pad={"a": weft.Pad(), "b": weft.Pad()}, cut={"a": True, "b": 1}, max_batch_size=2
        )
        with pytest.raises(FailedPreconditionError, match="cut must name each result for one argument"):
            policy(np.ones((1, 3)), np.ones((1, 3)))


class TestTorch:
    @given(SHAPES, PADS, st.integers(0, 2))
    def test_gradients(self, shapes, pad, more_rows):
        """Inputs get their own length back, and parameters what the sum of all losses gives; padding gets zero."""
        torch = pytest.importorskip("torch")
        weight = torch.tensor(1.5, dtype=torch.double, requires_grad=True)

        def f(tokens, n):
            is_real = torch.arange(tokens.shape[1]) < n[:, None]
            pooled = torch.where(is_real, tokens, 0).square().sum(1) * weight
            return pooled, tokens.sin() * weight

        def loss(pooled, each):
            return pooled.sum() * 2 + (each * 3).sum() + each.square().sum()

        inputs = [torch.from_numpy(x) for x in tokens_of(shapes)]
        alone = [x.clone().requires_grad_() for x in inputs]
        sum(loss(*f(x, torch.full((len(x),), x.shape[1]))) for x in alone).backward()
        wanted, weight.grad = weight.grad, None
        with weft.scope():
            policy = weft.batched(
                f, pad={"tokens": pad}, pass_lengths="n", cut=1, max_batch_size=total(shapes),
                allowed_batch_sizes=[total(shapes) + more_rows], **FULL,
            )  # fmt: skip

            def back(x):
                x = x.clone().requires_grad_()
                loss(*policy(x)).backward()
                return x.grad

            answers = [caller.answer() for caller in together([lambda x=x: back(x) for x in inputs])]
            assert policy.statistics().backwards == 1
        for gradient, x in zip(answers, alone, strict=True):
            torch.testing.assert_close(gradient, x.grad)
        torch.testing.assert_close(weight.grad, wanted)

    def test_split_calls(self, scope):
        torch = pytest.importorskip("torch")
        policy = weft.batched(
            lambda tokens: tokens**2, pad={"tokens": weft.Pad(multiple_of=4)}, cut=True, split=True, max_batch_size=2
        )
        x = torch.arange(15.0).reshape(5, 3).requires_grad_()
        policy(x).sum().backward()
        assert x.grad.tolist() == (2 * x).tolist()

    def test_single_examples_in_one_thread(self, scope):
        torch = pytest.importorskip("torch")
        policy = weft.batched(lambda tokens: tokens**2, rows=False, pad=TOKENS, cut=True)
        x = torch.arange(3.0, requires_grad=True)
        policy(x).sum().backward()
        assert x.grad.tolist() == [0, 2, 4]

    def test_one_that_needs_no_gradient_beside_one_that_does(self, scope):
        torch = pytest.importorskip("torch")

        def f(ids, weights, n):
            assert not ids.requires_grad
            return (ids * weights).sum(1)

        policy = weft.batched(f, pad={"ids": weft.Pad(), "weights": weft.Pad()}, pass_lengths={"ids": "n"})
        weights = torch.ones(2, 3, requires_grad=True)
        policy(torch.ones(2, 3, dtype=torch.long), weights).sum().backward()
        assert weights.grad.tolist() == [[1, 1, 1], [1, 1, 1]]

    def test_bfloat16_and_recompute(self, scope):
        torch = pytest.importorskip("torch")
        policy = weft.batched(
            lambda tokens: tokens * 2, pad={"tokens": weft.Pad(value=float("-inf"))}, cut=True, recompute=True
        )
        x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        y = policy(x)
        y.sum().backward()
        assert y.dtype is torch.bfloat16
        assert x.grad.tolist() == [[2, 2, 2], [2, 2, 2]]


def check_jax(shapes, pad):
    """Gradients of the callers' arrays and of shared ones."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def f(w, tokens, n):
        is_real = jnp.arange(tokens.shape[1]) < n[:, None]
        return jnp.where(is_real, tokens * w, 0).sum(axis=1), tokens**2 * w

    def loss(w, x, f):
        pooled, each = f(w, x)
        return pooled.sum() * 2 + (each * 3).sum()

    inputs = [jnp.asarray(x, jnp.float32) for x in tokens_of(shapes)]
    w = jnp.float32(1.5)
    policy = weft.batched(
        f, shared=("w",), pad={"tokens": pad}, pass_lengths="n", cut=1, max_batch_size=total(shapes), **FULL
    )
    gradient = jax.grad(loss, argnums=(0, 1))
    answers = [caller.answer() for caller in together([lambda x=x: gradient(w, x, policy) for x in inputs])]
    wanted = [gradient(w, x, lambda w, x: f(w, x, jnp.full(len(x), x.shape[1]))) for x in inputs]
    assert np.allclose(sum(a for a, _ in answers), sum(a for a, _ in wanted))
    for (_, mine), (_, want) in zip(answers, wanted, strict=True):
        assert mine.shape == want.shape
        assert np.allclose(mine, want)


class TestPullBacks:
    @given(SHAPES, PADS)
    def test_numpy(self, shapes, pad):
        def with_pull_back(tokens, n):
            def pull_back(gradient):
                pooled, each = gradient
                is_real = np.arange(tokens.shape[1]) < n[:, None]
                return np.where(is_real, pooled[:, None], 0) + each * 2 * tokens

            is_real = np.arange(tokens.shape[1]) < n[:, None]
            return (np.where(is_real, tokens, 0).sum(axis=1), tokens**2), pull_back

        inputs = tokens_of(shapes)
        with weft.scope():
            policy = weft.batched(
                lambda tokens, n: with_pull_back(tokens, n)[0],
                vjp=with_pull_back, pad={"tokens": pad}, pass_lengths="n", cut=1, max_batch_size=total(shapes), **FULL,
            )  # fmt: skip

            def both(x):
                y, pull_back = policy.vjp(x)
                return y, pull_back((np.ones(len(x)), np.full(x.shape, 3.0)))

            answers = [caller.answer() for caller in together([lambda x=x: both(x) for x in inputs])]
        for ((pooled, each), gradient), x in zip(answers, inputs, strict=True):
            assert (pooled.tolist(), each.tolist()) == (x.sum(axis=1).tolist(), (x**2).tolist())
            assert gradient.tolist() == (1 + 6 * x).tolist()

    def test_a_gradient_of_another_length(self, scope):
        policy = weft.batched(
            lambda tokens: tokens, vjp=lambda tokens: (tokens, lambda g: g[:, :2]), pad={"tokens": weft.Pad(sizes=(8,))}, cut=True
        )  # fmt: skip
        _, pull_back = policy.vjp(np.ones((2, 3)))
        with pytest.raises(
            FailedPreconditionError, match=r"must have the 2 rows .* along axis 1 its length 8, got \[2, 2\]"
        ):
            pull_back(np.ones((2, 3)))

    def test_jax(self, scope):
        check_jax([(1, 2), (2, 5)], weft.Pad(multiple_of=4))

    @pytest.mark.slow  # JAX compiles for every shape
    @given(SHAPES.filter(lambda shapes: any(rows for rows, _ in shapes)), PADS)
    def test_jax_with_any_lengths(self, shapes, pad):
        with weft.scope():
            check_jax(shapes, pad)

    def test_under_jit_it_is_refused(self, scope):
        jax = pytest.importorskip("jax")
        policy = weft.batched(lambda tokens: tokens, pad=TOKENS, cut=True)
        assert policy(jax.numpy.ones((1, 3))).shape == (1, 3)
        with pytest.raises(InvalidArgumentError, match="being traced"):
            jax.jit(policy)(jax.numpy.ones((1, 3)))


class TestFailing:
    def test_one_bad_call_fails_alone(self, scope):
        def f(tokens):
            if (tokens < 0).any():
                raise ValueError("negative")
            return tokens

        policy = weft.batched(f, pad=TOKENS, cut=True, max_batch_size=4, **FULL)
        inputs = [np.ones((1, 2)), np.ones((1, 5)), -np.ones((1, 9)), np.ones((1, 3))]
        callers = together([lambda x=x: policy(x) for x in inputs])
        assert [c.error is None for c in callers] == [True, True, False, True]
        assert [c.value.shape for c in callers if c.error is None] == [(1, 2), (1, 5), (1, 3)]

    @pytest.mark.parametrize("shape", [(1, 2), (2, 4), (8,)])
    def test_an_array_that_is_resized_meanwhile(self, scope, shape):
        gated = Model(lambda tokens: tokens)
        policy = weft.batched(lambda tokens: gated(tokens), pad=TOKENS, cut=True)
        first = held(policy, gated, np.ones((1, 1)))
        changed, other = np.ones((1, 4)), np.full((1, 3), 2.0)
        callers = [start(policy, changed), start(policy, other)]
        waiting(policy, 2)
        changed.resize(shape, refcheck=False)
        gated.gate.set()
        assert first.answer().tolist() == [[1]]
        with pytest.raises(InvalidArgumentError, match="must keep their shape"):
            callers[0].answer()
        assert callers[1].answer().tolist() == [[2, 2, 2]]

    def test_deadlines(self):
        clock = weft.SimulatedClock()
        with weft.scope(clock):
            policy = weft.batched(
                lambda tokens: tokens, pad=TOKENS, cut=True, max_batch_size=3, max_wait=10.0, deadline=5
            )
            late = start_on(clock, policy, np.ones((1, 9)))
            clock.advance(4)
            other = start_on(clock, lambda: policy.call(np.ones((1, 2)), deadline=9))
            clock.advance(1.5)
            with pytest.raises(DeadlineExceededError):
                late.answer()
            clock.advance(10)
            assert other.answer().shape == (1, 2)


class TestRefused:
    @pytest.mark.parametrize(
        ("pad", "tokens", "message"),
        [
            (weft.Pad(), np.ones(2), r"must have the axis 1 that is padded \(axis 0 counts rows\), got the shape \[2\]"),
            (weft.Pad(axis=3), np.ones((2, 3, 4)), "must have the axis 3"),
            (weft.Pad(sizes=(2, 4)), np.ones((1, 5)), "at most 4 long, the last of its sizes, got 5"),
            (weft.Pad(value=-1), np.ones((1, 5), np.uint8), "padded with -1, which its dtype must be able to hold, got uint8"),
            (weft.Pad(value=0.5), np.ones((1, 5), int), "padded with 0.5"),
            (weft.Pad(value=float("nan")), np.ones((1, 5), int), "padded with nan"),
            (weft.Pad(value=2), np.ones((1, 5), bool), "padded with 2"),
            (weft.Pad(value=1j), np.ones((1, 5)), "padded with 1j"),
            (weft.Pad(value=""), np.ones((1, 5)), "padded with ''"),
            (weft.Pad(), np.array([["a"]]), "padded with 0"),
            (weft.Pad(), {"a": np.ones((1, 2)), "b": np.ones((1, 3))}, "must have one length along axis 1, got 2 and 3"),
        ],
    )  # fmt: skip
    def test_calls(self, scope, pad, tokens, message):
        policy = weft.batched(lambda tokens: 0, pad={"tokens": pad})
        with pytest.raises(
            InvalidArgumentError, match=f"the argument 'tokens' .*{message}|of the argument 'tokens' {message}"
        ):
            policy(tokens)

    def test_arrays_that_differ_otherwise_do_not_share_a_batch(self, scope):
        gated = Model(lambda tokens: tokens)
        policy = weft.batched(lambda tokens: gated(tokens), pad=TOKENS, cut=True)
        first = held(policy, gated, np.ones((1, 1)))
        shapes = [(1, 4), (1, 3, 2), (1, 5), (2, 4, 2), (1, 4, 3)]
        callers = [start(policy, np.ones(shape)) for shape in shapes]
        waiting(policy, len(shapes))
        gated.gate.set()
        first.answer()
        assert [c.answer().shape for c in callers] == shapes
        assert sorted(x.shape for x in gated.batches[1:]) == [(1, 4, 3), (2, 5), (3, 4, 2)]

    def test_filled_parameters(self, scope):
        policy = weft.batched(lambda tokens, n: n, pad=TOKENS, pass_lengths="n")
        with pytest.raises(InvalidArgumentError, match="'n' is filled in by the batcher"):
            policy(np.ones((1, 2)), n=np.ones(1))

    @pytest.mark.parametrize(
        "options",
        [
            {"pad": weft.Pad()},
            {"pad": {"a": 16}},
            {"pad": {"nothing": weft.Pad()}},
            {"pad": {3: weft.Pad()}},
            {"pad": {"a": weft.Pad()}, "items": ("a",)},
            {"pad": {"a": weft.Pad()}, "pass_mask": "a"},
            {"pad": {"a": weft.Pad()}, "pass_lengths": "a"},
            {"pad": {"a": weft.Pad()}, "pass_lengths": "nothing"},
            {"pad": {"a": weft.Pad()}, "pass_lengths": 3},
            {"pad": {"a": weft.Pad()}, "pass_lengths": "n", "pass_rows": "n"},
            {"pad": {"a": weft.Pad()}, "pass_lengths": {"b": "n"}},
            {"pad": {"a": weft.Pad(), "b": weft.Pad()}, "pass_lengths": "n"},
            {"pad": {"a": weft.Pad(), "b": weft.Pad()}, "pass_lengths": {"a": "n", "b": "n"}},
            {"pad": {"a": weft.Pad(), "b": weft.Pad()}, "cut": True},
            {"pad": {"a": weft.Pad()}, "cut": 1.5},
            {"pad": {"a": weft.Pad()}, "cut": {"b": True}},
            {"pass_lengths": "n"},
            {"cut": True},
        ],
        ids=repr,
    )
    def test_options(self, options):
        with pytest.raises(InvalidArgumentError, match=r"pad|pass_|cut"):
            weft.batched(lambda a, b, n: 0, **options)

    @pytest.mark.parametrize(
        "values",
        [
            {"value": None},
            {"value": [0]},
            {"axis": 0},
            {"axis": -1},
            {"axis": True},
            {"multiple_of": 0},
            {"multiple_of": 1.5},
            {"sizes": 3},
            {"sizes": (4, 2)},
            {"sizes": (0, 2)},
            {"sizes": ("a",)},
            {"sizes": (4,), "multiple_of": 2},
        ],
        ids=repr,
    )
    def test_pads(self, values):
        with pytest.raises(InvalidArgumentError):
            weft.Pad(**values)


def test_pads_are_values():
    assert weft.Pad(sizes=[1, 2]) == weft.Pad(sizes=(1, 2))
    assert hash(weft.Pad()) == hash(weft.Pad(axis=1))
    assert "multiple_of=16" in repr(weft.Pad(multiple_of=16))


def test_many_threads(scope):
    """Calls of all lengths at once, over and over."""
    policy = weft.batched(model, pad={"tokens": weft.Pad(multiple_of=4)}, pass_lengths="n", cut="each", parallel=2)

    def play(seed):
        chance = np.random.default_rng(seed)
        for _ in range(30):
            x = chance.integers(1, 9, (chance.integers(1, 4), chance.integers(0, 20))).astype(float)
            check([policy(x)], [x])

    [caller.answer() for caller in together([lambda i=i: play(i) for i in range(8)])]
