"""Arguments and results whose rows differ in length, as RaggedTensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batched_calls import FULL, Model, call_all, held, waiting
from support.callers import start, together

import weft
from weft import RaggedTensor
from weft.errors import FailedPreconditionError, InvalidArgumentError

#: The lengths of a call's rows; None stands for an array in place of a RaggedTensor, with rows of one length.
CALLS = st.lists(
    st.tuples(st.just(False), st.lists(st.integers(0, 4), max_size=4))
    | st.tuples(st.just(True), st.integers(0, 3).flatmap(lambda rows: st.integers(0, 4).map(lambda k: [k] * rows))),
    min_size=1,
    max_size=5,
)
TOKENS = {"ragged": ("tokens",)}


def values_of(lengths, inner=()):
    count = sum(lengths)
    return np.arange(count * int(np.prod(inner)), dtype=float).reshape(count, *inner) + 1


def arguments(calls, inner=()):
    """Each call's argument: an array, or a RaggedTensor with its rows."""
    found = []
    for is_dense, lengths in calls:
        ragged = RaggedTensor.from_row_lengths(values_of(lengths, inner), np.array(lengths, int))
        length = lengths[0] if lengths else 2
        found.append(ragged.flat_values.reshape(len(lengths), length, *inner) if is_dense else ragged)
    return found


def rows_of(x):
    return [np.asarray(row).tolist() for row in x]


def total(calls):
    return sum(max(len(lengths), 1) for _, lengths in calls)


@pytest.fixture
def scope():
    with weft.scope():
        yield


class TestExact:
    @given(CALLS, st.sampled_from([(), (2,)]), st.integers(0, 2))
    def test_everybody_gets_what_it_would_have_got_alone(self, calls, inner, more_rows):
        inputs = arguments(calls, inner)

        def f(tokens, mask):
            assert isinstance(tokens, RaggedTensor)
            assert len(tokens) == len(mask)
            return tokens.sum(), {"each": tokens * 2}, tokens.row_lengths()

        with weft.scope():
            size = total(calls)
            policy = weft.batched(
                f, **TOKENS, pass_mask="mask", max_batch_size=size, allowed_batch_sizes=[size + more_rows], **FULL
            )
            answers = call_all(policy, [((x,), {}) for x in inputs])
            assert policy.statistics().batches == 1
        for (sums, each, lengths), x in zip(answers, inputs, strict=True):
            rows = [np.asarray(row) for row in x]
            assert sums.tolist() == [row.sum(axis=0).tolist() for row in rows]
            assert isinstance(each["each"], RaggedTensor)
            assert rows_of(each["each"]) == [(2 * row).tolist() for row in rows]
            assert lengths.tolist() == [len(row) for row in rows]

    @given(CALLS, st.integers(1, 3))
    def test_split(self, calls, size):
        inputs = arguments(calls)
        with weft.scope():
            policy = weft.batched(lambda tokens: (tokens * 2, tokens.sum()), **TOKENS, split=True, max_batch_size=size)
            answers = call_all(policy, [((), {"tokens": x}) for x in inputs])
        for (each, sums), x in zip(answers, inputs, strict=True):
            assert rows_of(each) == [(2 * np.asarray(row)).tolist() for row in x]
            assert sums.tolist() == [np.asarray(row).sum() for row in x]

    @given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    def test_single_examples(self, lengths):
        """A caller gets its row as an array."""
        inputs = [np.arange(length, dtype=float) for length in lengths]
        with weft.scope():
            policy = weft.batched(
                lambda tokens: (tokens * 2, tokens.sum()), **TOKENS, rows=False, max_batch_size=len(lengths), **FULL
            )
            answers = call_all(policy, [((x,), {}) for x in inputs])
        for (each, own), x in zip(answers, inputs, strict=True):
            assert type(each) is np.ndarray
            assert each.tolist() == (2 * x).tolist()
            assert own == x.sum()

    def test_several_levels(self, scope):
        policy = weft.batched(lambda x: x * 2, ragged=("x",), max_batch_size=4, allowed_batch_sizes=[5], **FULL)
        given = [[[[1.0, 2], [3]], []], [[[4.0]]], [[[], [5.0, 6]]]]
        answers = call_all(policy, [((RaggedTensor.from_rows(rows, 2),), {}) for rows in given])
        assert [y.to_list() for y in answers] == [(RaggedTensor.from_rows(rows, 2) * 2).to_list() for rows in given]

    def test_nested_beside_others(self, scope):
        def f(inputs, x):
            return x + inputs["a"].sum() * 10 + inputs["b"].sum() * 100

        policy = weft.batched(f, ragged=("inputs",), max_batch_size=2, **FULL)
        calls = [
            (({"a": np.ones((1, 2)), "b": RaggedTensor.from_rows([[1.0]])}, np.ones(1)), {}),
            (({"a": RaggedTensor.from_rows([[1.0]]), "b": np.ones((1, 3))}, np.ones(1)), {}),
        ]
        assert [y.tolist() for y in call_all(policy, calls)] == [[121], [311]]

    def test_a_result_where_no_argument_is_ragged(self, scope):
        policy = weft.batched(
            lambda n: RaggedTensor.from_row_lengths(np.repeat(n, n), n),
            max_batch_size=3,
            allowed_batch_sizes=[4],
            **FULL,
        )
        answers = call_all(policy, [((np.array([2]),), {}), ((np.array([1, 3]),), {})])
        assert [y.to_list() for y in answers] == [[[2, 2]], [[1], [3, 3, 3]]]

    def test_beside_padded_ones_and_items(self, scope):
        def f(x, tokens, names, n):
            return x.sum() + tokens.sum(axis=1) + n + [len(name) for name in names]

        policy = weft.batched(
            f, ragged=("x",), pad={"tokens": weft.Pad()}, items=("names",), pass_lengths="n", max_batch_size=2, **FULL
        )
        calls = [((np.ones((1, k)), np.ones((1, 2 * k)), ["x" * k]), {}) for k in (1, 2)]
        assert [y.tolist() for y in call_all(policy, calls)] == [[6], [12]]

    def test_streams(self, scope):
        @weft.batched(max_batch_size=3, **FULL, **TOKENS)
        def policy(tokens):
            for k in range(3):
                yield tokens.with_values(tokens.flat_values + k)

        inputs = arguments([(False, [1, 2]), (True, [2])])
        callers = together([lambda x=x: [chunk.to_list() for chunk in policy.stream(x)] for x in inputs])
        assert callers[0].answer() == [[[1 + k], [2 + k, 3 + k]] for k in range(3)]
        assert callers[1].answer() == [[[1 + k, 2 + k]] for k in range(3)]

    def test_ready_for_kernels(self, scope):
        torch = pytest.importorskip("torch")

        def f(tokens):
            assert tokens.cu_seqlens().dtype is torch.int32
            return tokens.to_nested_tensor().to_padded_tensor(0.0).sum(1)

        policy = weft.batched(f, **TOKENS, max_batch_size=2, **FULL)
        answers = call_all(policy, [((torch.ones(1, 2),), {}), ((torch.ones(1, 3),), {})])
        assert [y.tolist() for y in answers] == [[2], [3]]


def flat(x):
    return x.flat_values if isinstance(x, RaggedTensor) else x


class TestTorch:
    @given(CALLS, st.integers(0, 2))
    def test_gradients(self, calls, more_rows):
        torch = pytest.importorskip("torch")
        weight = torch.tensor(1.5, dtype=torch.double, requires_grad=True)

        def f(tokens):
            return tokens.sum() * weight, tokens.with_values(tokens.flat_values.sin() * weight)

        def loss(sums, each):
            return sums.square().sum() + (each.flat_values * 3).sum()

        def with_gradient(x):
            if not isinstance(x, RaggedTensor):
                return torch.from_numpy(x.copy()).requires_grad_()
            return RaggedTensor(torch.from_numpy(x.flat_values.copy()).requires_grad_(), x.nested_row_splits)

        alone = [with_gradient(x) for x in arguments(calls)]
        as_ragged = [
            x if isinstance(x, RaggedTensor) else RaggedTensor.from_row_lengths(x.flatten(), [x.shape[1]] * len(x))
            for x in alone
        ]
        sum(loss(*f(x)) for x in as_ragged).backward()
        wanted, weight.grad = weight.grad, None
        with weft.scope():
            size = total(calls)
            policy = weft.batched(f, **TOKENS, max_batch_size=size, allowed_batch_sizes=[size + more_rows], **FULL)

            def back(x):
                loss(*policy(x)).backward()
                return flat(x).grad

            inputs = [with_gradient(x) for x in arguments(calls)]
            answers = [caller.answer() for caller in together([lambda x=x: back(x) for x in inputs])]
            assert policy.statistics().backwards == 1
        for gradient, x in zip(answers, alone, strict=True):
            torch.testing.assert_close(gradient, flat(x).grad)
        torch.testing.assert_close(weight.grad, wanted)

    def test_split_calls(self, scope):
        torch = pytest.importorskip("torch")
        policy = weft.batched(lambda tokens: tokens * tokens, **TOKENS, split=True, max_batch_size=2)
        x = RaggedTensor.from_row_lengths(torch.arange(6.0).requires_grad_(), [1, 0, 3, 2])
        policy(x).flat_values.sum().backward()
        assert x.flat_values.grad.tolist() == [0, 2, 4, 6, 8, 10]

    def test_single_examples(self, scope):
        torch = pytest.importorskip("torch")
        policy = weft.batched(lambda tokens: tokens * tokens, **TOKENS, rows=False)
        x = torch.arange(3.0).requires_grad_()
        policy(x).sum().backward()
        assert x.grad.tolist() == [0, 2, 4]


class TestPullBacks:
    @given(CALLS)
    def test_numpy(self, calls):
        def with_pull_back(tokens):
            def pull_back(gradient):
                sums, each = gradient
                return tokens.spread(sums) + each * 2 * tokens

            return (tokens.sum(), tokens * tokens), pull_back

        with weft.scope():
            policy = weft.batched(
                lambda tokens: with_pull_back(tokens)[0],
                vjp=with_pull_back,
                **TOKENS,
                max_batch_size=total(calls),
                **FULL,
            )

            def both(x):
                (sums, each), pull_back = policy.vjp(x)
                return pull_back((np.ones(len(sums)), each.with_values(np.full(len(each.flat_values), 3.0))))

            inputs = arguments(calls)
            answers = [caller.answer() for caller in together([lambda x=x: both(x) for x in inputs])]
        for gradient, x in zip(answers, inputs, strict=True):
            assert type(gradient) is type(x)
            assert rows_of(gradient) == [(1 + 6 * np.asarray(row)).tolist() for row in x]

    def test_single_examples(self, scope):
        policy = weft.batched(
            lambda x: x * x, vjp=lambda x: (x * x, lambda g: (g * 2 * x).flat_values), ragged=("x",), rows=False
        )
        y, pull_back = policy.vjp(np.arange(3.0))
        assert y.tolist() == [0, 1, 4]
        assert pull_back(np.ones(3)).tolist() == [0, 2, 4]

    def test_jax(self, scope):
        jax = pytest.importorskip("jax")
        jnp = jax.numpy
        policy = weft.batched(
            lambda w, x: (x.sum() * w, x.with_values(x.flat_values**2 * w)), shared=("w",), ragged=("x",), max_batch_size=3, **FULL
        )  # fmt: skip

        def loss(w, x):
            sums, each = policy(w, x)
            return sums.sum() + each.flat_values.sum() * 3

        def dense():
            return jax.grad(loss, argnums=(0, 1))(jnp.float32(2.0), jnp.array([[1.0, 2.0]]))

        def ragged():
            def of_values(w, values):
                return loss(w, RaggedTensor.from_row_splits(values, [0, 1, 3]))

            return jax.grad(of_values, argnums=(0, 1))(jnp.float32(2.0), jnp.array([1.0, 2.0, 3.0]))

        (w1, a), (w2, b) = (caller.answer() for caller in together([dense, ragged]))
        assert a.tolist() == [[14, 26]]
        assert b.tolist() == [14, 26, 38]
        assert w1 + w2 == (3 + 15) + (6 + 42)

    def test_under_jit_it_is_refused(self, scope):
        jax = pytest.importorskip("jax")
        policy = weft.batched(lambda tokens: tokens.sum(), **TOKENS)
        with pytest.raises(InvalidArgumentError, match="being traced"):
            jax.jit(policy)(jax.numpy.ones((1, 3)))


class TestFailing:
    def test_one_bad_call_fails_alone(self, scope):
        def f(tokens):
            if (tokens.flat_values < 0).any():
                raise ValueError("negative")
            return tokens

        policy = weft.batched(f, **TOKENS, max_batch_size=3, **FULL)
        callers = together([lambda x=x: policy(x) for x in (np.ones((1, 2)), -np.ones((1, 3)), np.ones((1, 4)))])
        assert [c.value and c.value.to_list() for c in callers] == [[[1, 1]], None, [[1, 1, 1, 1]]]

    @pytest.mark.parametrize("is_ragged", [False, True])
    def test_an_array_that_is_resized_meanwhile(self, scope, is_ragged):
        gated = Model(lambda tokens: tokens)
        policy = weft.batched(lambda tokens: gated(tokens), **TOKENS)
        first = held(policy, gated, np.ones((1, 1)))
        changed = np.ones((1, 4) if not is_ragged else 4)
        callers = [
            start(policy, RaggedTensor.from_row_splits(changed, [0, 4]) if is_ragged else changed),
            start(policy, np.full((1, 3), 2.0)),
        ]
        waiting(policy, 2)
        changed.resize((2, 4) if not is_ragged else 8, refcheck=False)
        gated.gate.set()
        assert first.answer().to_list() == [[1]]
        with pytest.raises(InvalidArgumentError, match="must keep their shape"):
            callers[0].answer()
        assert callers[1].answer().to_list() == [[2, 2, 2]]

    def test_a_result_with_other_rows(self, scope):
        policy = weft.batched(lambda tokens: tokens[:1], **TOKENS)
        with pytest.raises(FailedPreconditionError, match=r"RaggedTensor .* must have the 2 rows of its batch, got 1"):
            policy(np.ones((2, 3)))


class TestRefused:
    @pytest.mark.parametrize("tokens", [np.ones(3), np.float64(3), 3])
    def test_calls(self, scope, tokens):
        policy = weft.batched(lambda tokens, x: tokens.sum(), **TOKENS)
        with pytest.raises(InvalidArgumentError):
            policy(tokens, np.ones(3)) if np.ndim(tokens) else policy(tokens, 3)

    def test_a_ragged_tensor_where_there_are_no_rows(self, scope):
        policy = weft.batched(lambda tokens: tokens.sum(), **TOKENS, rows=False)
        with pytest.raises(InvalidArgumentError, match="must be one row, an array, because the batcher has rows=False"):
            policy(RaggedTensor.from_rows([[1.0]]))

    def test_other_numbers_of_rows(self, scope):
        policy = weft.batched(lambda tokens, x: x, **TOKENS)
        with pytest.raises(InvalidArgumentError, match=r"the same number of rows, got \[\[2, None\], \[3\]\]"):
            policy(RaggedTensor.from_rows([[1.0], []]), np.ones(3))

    @pytest.mark.parametrize(
        "options",
        [
            {"ragged": "a"},
            {"ragged": ("nothing",)},
            {"ragged": (3,)},
            {"ragged": ("a",), "pad": {"a": weft.Pad()}},
            {"ragged": ("a",), "items": ("a",)},
            {"ragged": ("a",), "pass_mask": "a"},
        ],
        ids=repr,
    )
    def test_options(self, options):
        with pytest.raises(InvalidArgumentError):
            weft.batched(lambda a, b: 0, **options)
