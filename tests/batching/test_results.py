"""What a batched function may return, and to whom each part of it goes."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batched_calls import FULL
from support.callers import together

import weft
from weft.errors import FailedPreconditionError, InvalidArgumentError


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Box:
    corners: Any
    label: str


class Output(OrderedDict):
    """A dict of a class of its own."""


@pytest.fixture
def scope():
    with weft.scope() as scope:
        yield scope


def ask(f, counts=(1, 2, 3), **options):
    """The results of callers with so many rows, who share a batch; their rows are 10 times their place, and on."""
    policy = weft.batched(f, max_batch_size=sum(counts), **FULL, **options)
    given = [10.0 * i + np.arange(count, dtype=float) for i, count in enumerate(counts)]
    results = [caller.answer() for caller in together([lambda x=x: policy(x) for x in given])]
    assert policy.statistics().sizes == {sum(counts): 1}
    return list(zip(given, results, strict=True))


class TestLists:
    def test_one_item_for_each_row(self, scope):
        for x, labels in ask(lambda x: [f"label {v:g}" for v in x]):
            assert labels == [f"label {v:g}" for v in x]

    def test_anywhere_in_the_result(self, scope):
        for x, result in ask(lambda x: ({"labels": [(v, {"v": v}) for v in x.tolist()], "n": 3}, x)):
            assert result[0] == {"labels": [(v, {"v": v}) for v in x.tolist()], "n": 3}
            assert result[1].tolist() == x.tolist()

    def test_items_of_padding_rows_are_dropped(self, scope):
        for x, result in ask(lambda x: [str(v) for v in x], allowed_batch_sizes=[16]):
            assert result == [str(v) for v in x]

    def test_one_example(self, scope):
        policy = weft.batched(lambda x: (["one"] * len(x), x), rows=False, max_batch_size=3, **FULL)
        results = [caller.answer() for caller in together([lambda i=i: policy(float(i)) for i in range(3)])]
        assert [(label, y.item()) for label, y in results] == [("one", 0), ("one", 1), ("one", 2)]

    def test_split_calls_concatenate_them(self, scope):
        policy = weft.batched(lambda x: ([f"{v:g}" for v in x], x, f"batch of {len(x)}"), max_batch_size=2, split=True)
        labels, y, shared = policy(np.arange(5.0))
        assert labels == ["0", "1", "2", "3", "4"]
        assert y.tolist() == [0, 1, 2, 3, 4]
        assert shared == "batch of 2"

    def test_a_call_without_rows(self, scope):
        assert weft.batched(lambda x: ["a"] * len(x))(np.ones(0)) == []

    @pytest.mark.parametrize("count", [0, 1, 5, 7])
    def test_of_another_length(self, scope, count):
        policy = weft.batched(lambda x: ["a"] * count, max_batch_size=6, **FULL)
        for caller in together([lambda: policy(np.ones(3))] * 2):
            with pytest.raises(
                FailedPreconditionError, match=f"each of the 6 rows of its batch, got {count} in leaf 0"
            ):
                caller.answer()

    @pytest.mark.parametrize(
        "make",
        [
            list,
            lambda x: [x, x],
            lambda x: [{"a": (1, [x])}] * len(x),
            lambda x: [Box(x, "b")] * len(x),
            lambda x: ["a"] * (len(x) - 1) + [x],
            lambda x: [weft.RaggedTensor.from_rows([[1.0], [2.0, 3.0]])] * len(x),
        ],
        ids=["rows", "arrays", "nested", "dataclass", "last", "ragged"],
    )
    def test_with_an_array_inside(self, scope, make):
        """A number of arrays that is by chance the number of rows is no reason to cut them."""
        for result in (make, lambda x: {"y": x, "list": make(x)}):
            with pytest.raises(
                FailedPreconditionError, match=r"a list with an array in it: return a tuple.*weft.PerRow"
            ):
                weft.batched(result)(np.ones((2, 2)))

    @pytest.mark.parametrize("wrapper", [weft.PerRow, weft.Shared])
    def test_with_a_wrapper_inside(self, scope, wrapper):
        for outer in (list, weft.PerRow):
            with pytest.raises(FailedPreconditionError, match=f"has a weft.{wrapper.__name__} in it"):
                weft.batched(
                    lambda x, outer=outer: outer(
                        [wrapper("ab"[:1]) if wrapper is weft.Shared else wrapper([1])] * len(x)
                    )
                )(np.ones(2))

    def test_in_itself(self, scope):
        def f(x):
            made = [1]
            made.append(made)
            return made

        with pytest.raises(InvalidArgumentError, match="must not contain itself"):
            weft.batched(f)(np.ones(2))


class TestForAll:
    @pytest.mark.parametrize("value", ["a", b"b", True, 3, 2.5, 1j, None, Colour.RED], ids=repr)
    def test_plain_values(self, scope, value):
        for x, (y, got) in ask(lambda x: (x, value)):
            assert got is value
            assert y.tolist() == x.tolist()
        assert weft.batched(lambda x: value)(np.ones(1)) is value

    @pytest.mark.parametrize(
        "make",
        [object, lambda: {1, 2}, lambda: deque([1]), lambda: (i for i in "ab"), lambda: np.dtype("f4"), lambda: Colour,
         lambda: len],
    )  # fmt: skip
    def test_what_is_refused(self, scope, make):
        for f in (lambda x: make(), lambda x: {"y": x, "more": make()}):
            with pytest.raises(FailedPreconditionError, match=r"not known to whom.*weft.PerRow.*weft.Shared"):
                weft.batched(f)(np.ones(2))

    @pytest.mark.parametrize("value", [np.float64(3), np.array(3.0), np.float32(3)])
    def test_scalars_of_numpy_are_refused(self, scope, value):
        with pytest.raises(
            FailedPreconditionError, match=r"2 rows of its batch, got a scalar .* weft\.Shared\(value\)"
        ):
            weft.batched(lambda x: (x, value))(np.ones(2))

    def test_shared_is_whatever_it_is(self, scope):
        table, words = np.arange(7.0), ["a", "b", "c", "d", "e", "f"]
        for x, (y, got, listed) in ask(lambda x: (x, weft.Shared(table), {"words": weft.Shared(words)})):
            assert y.tolist() == x.tolist()
            assert got is table
            assert listed["words"] is words

    def test_shared_tensors_have_no_gradient(self, scope):
        torch = pytest.importorskip("torch")
        w = torch.ones(1, requires_grad=True)
        policy = weft.batched(lambda x: (x * w, weft.Shared({"w": [w * 2, "a"]})))
        y, shared = policy(torch.ones(2, 1))
        assert not shared["w"][0].requires_grad
        assert shared["w"][1] == "a"
        y.sum().backward()
        assert w.grad.item() == 2


class TestPerRow:
    def test_arrays_of_any_shape(self, scope):
        for x, items in ask(lambda x: weft.PerRow(np.full(int(v) % 10 + 1, v) for v in x)):
            assert [item.tolist() for item in items] == [[v] * (int(v) % 10 + 1) for v in x]

    def test_nested_items(self, scope):
        def detect(x):
            return {"found": weft.PerRow([{"box": Box(np.full((2, 4), v), f"{v:g}"), "score": [v]} for v in x]), "y": x}

        for x, result in ask(detect, allowed_batch_sizes=[9]):
            assert [item["box"].label for item in result["found"]] == [f"{v:g}" for v in x]
            assert all((item["box"].corners == v).all() for item, v in zip(result["found"], x, strict=True))
            assert [item["score"] for item in result["found"]] == [[v] for v in x]

    def test_objects_of_any_class(self, scope):
        class Odd:
            def __init__(self, v):
                self.v = v

        for x, items in ask(lambda x: weft.PerRow([Odd(v) for v in x])):
            assert [item.v for item in items] == x.tolist()

    def test_nobody_holds_the_memory_of_another(self, scope):
        def f(x):
            whole = np.outer(x, np.ones(3))
            return weft.PerRow(list(whole)), weft.PerRow([whole[0]] * len(x))

        results = [result for _, result in ask(f, (1, 1))]
        results[0][0][0][:] = 77
        results[0][1][0][:] = 88
        assert results[1][0][0].tolist() == [10, 10, 10]
        assert results[1][1][0].tolist() != [88, 88, 88]
        assert all(item.base is None for result in results for part in result for item in part)

    def test_one_example(self, scope):
        policy = weft.batched(lambda x: weft.PerRow([np.full(2, v) for v in x]), rows=False, max_batch_size=2, **FULL)
        results = [caller.answer() for caller in together([lambda i=i: policy(float(i)) for i in range(2)])]
        assert [result.tolist() for result in results] == [[0, 0], [1, 1]]

    @pytest.mark.parametrize("items", ["ab", b"ab", {1: 2}, {1, 2}, 3])
    def test_what_is_no_sequence(self, items):
        with pytest.raises((InvalidArgumentError, TypeError)):
            weft.PerRow(items)

    def test_of_another_length(self, scope):
        with pytest.raises(FailedPreconditionError, match="each of the 2 rows of its batch, got 3"):
            weft.batched(lambda x: weft.PerRow([x, x, x]))(np.ones(2))

    @pytest.mark.parametrize("split", [False, True])
    @pytest.mark.parametrize("waits", [False, True])
    def test_gradients_of_torch(self, scope, split, waits):
        """As of the model alone, with a result of rows beside it, and with items that nobody differentiates."""
        torch = pytest.importorskip("torch")
        w = torch.tensor([[3.0, 4.0]], dtype=torch.double, requires_grad=True)

        def f(x):
            y = x * w
            return y.sum(1), weft.PerRow([{"part": row[: i % 2 + 1] ** 2, "name": str(i)} for i, row in enumerate(y)])

        policy = weft.batched(f, max_batch_size=4, split=split, wait_backward=waits, **FULL)
        counts = (3, 5) if split else (3, 1)

        def go(i):
            x = torch.arange(1.0, counts[i] + 1, dtype=torch.double).reshape(-1, 1).requires_grad_()
            total, items = policy(x)
            assert len(items) == len(x)
            assert all(item["part"].requires_grad for item in items)
            loss = total.sum() + sum((item["part"].sum() for item in items[1:]), torch.zeros(()))
            loss.backward()
            return x, [len(item["part"]) for item in items]

        results = [caller.answer() for caller in together([lambda i=i: go(i) for i in range(2)])]
        policy.join()
        want = torch.zeros(1, 2, dtype=torch.double)
        for x, lengths in results:
            expected = torch.full((len(x), 1), 7.0, dtype=torch.double)
            want[0] += x.detach().sum()
            for i, length in enumerate(lengths):
                if i > 0:
                    expected[i] += sum(2 * x[i].item() * w[0, k].item() ** 2 for k in range(length))
                    for k in range(length):
                        want[0, k] += 2 * x[i].item() ** 2 * w[0, k].item()
            torch.testing.assert_close(x.grad, expected)
        torch.testing.assert_close(w.grad, want)

    def test_items_alone_and_one_who_uses_none(self, scope):
        torch = pytest.importorskip("torch")
        w = torch.tensor([3.0], requires_grad=True)
        policy = weft.batched(
            lambda x: weft.PerRow([v * w for v in x]), max_batch_size=2, on_missing_gradient="zero", **FULL
        )

        def go(i):
            items = policy(torch.full((1, 1), i + 1.0))
            if i:
                items[0].sum().backward()

        for caller in together([lambda i=i: go(i) for i in range(2)]):
            caller.answer()
        assert w.grad.item() == 2

    def test_refused_where_a_pull_back_is_made(self, scope):
        policy = weft.batched(lambda x: x, vjp=lambda x: (weft.PerRow(list(x)), lambda g: g))
        with pytest.raises(FailedPreconditionError, match="PerRow has gradients in PyTorch alone"):
            policy.vjp(np.ones(2))
        nothing = weft.batched(lambda x: x, vjp=lambda x: (["a"] * len(x), lambda g: g))
        with pytest.raises(FailedPreconditionError, match="must have an array to be differentiated"):
            nothing.vjp(np.ones(2))

    def test_under_jax(self, scope):
        jax = pytest.importorskip("jax")
        with pytest.raises(FailedPreconditionError, match="PerRow has gradients in PyTorch alone"):
            jax.grad(lambda x: weft.batched(lambda x: weft.PerRow(list(x)))(x)[0].sum())(jax.numpy.ones((2, 1)))
        items = weft.batched(lambda x: weft.PerRow(list(x)))(jax.numpy.ones((2, 1)))
        assert [item.tolist() for item in items] == [[1], [1]]


class TestGradientsBeside:
    """Lists and shared values beside arrays that are differentiated."""

    def test_jax(self, scope):
        jax = pytest.importorskip("jax")

        def f(x):
            return {"labels": ["a", "b"][: len(x)], "y": x**2, "all": weft.Shared([x.sum(), "text"])}

        policy = weft.batched(f)
        kept = []

        def loss(x):
            result = policy(x)
            kept.append(result)
            return result["y"].sum()

        assert jax.grad(loss)(jax.numpy.array([[3.0], [4.0]])).ravel().tolist() == [6, 8]
        assert kept[0]["labels"] == ["a", "b"]
        assert float(kept[0]["all"][0]) == 7
        assert kept[0]["all"][1] == "text"
        one = weft.batched(f, rows=False)
        assert jax.grad(lambda x: one(x)["y"].sum())(jax.numpy.array([3.0])).tolist() == [6]

    def test_pull_backs(self, scope):
        def f(x):
            return {"y": 2 * x, "labels": ["a"] * len(x), "b": 3 * x}

        policy = weft.batched(f, vjp=lambda x: (f(x), lambda g: 2 * g["y"] + 3 * g["b"]))
        result, pull_back = policy.vjp(np.ones(2))
        assert result["labels"] == ["a", "a"]
        assert pull_back({"b": np.ones(2), "labels": result["labels"], "y": np.zeros(2)}).tolist() == [3, 3]
        _, pull_back = policy.vjp(np.ones(2))
        assert pull_back([np.zeros(2), np.ones(2)]).tolist() == [2, 2]  # in the order of the names: b, y

    def test_torch(self, scope):
        torch = pytest.importorskip("torch")
        policy = weft.batched(lambda x: (["a"] * len(x), x * 2, None), max_batch_size=2, **FULL)

        def go():
            x = torch.ones(1, 1, requires_grad=True)
            labels, y, _ = policy(x)
            y.sum().backward()
            return labels, x.grad.item()

        assert [caller.answer() for caller in together([go] * 2)] == [(["a"], 2)] * 2


class TestStructure:
    @pytest.mark.parametrize(
        "make",
        [
            lambda x: (x, (x, "a")),
            lambda x: Pair(x, {"b": x, "a": [str(v) for v in x]}),
            lambda x: Box(x, "label"),
            lambda x: Output(b=x, a=x + 1),
            lambda x: {2: x, "a": x},
            lambda x: (),
            lambda x: {},
        ],
        ids=["tuples", "named", "dataclass", "dict class", "mixed keys", "empty tuple", "empty dict"],
    )
    def test_is_kept(self, scope, make):
        for x, result in ask(make):
            want = make(x)
            assert type(result) is type(want)
            assert repr(result) == repr(want)

    def test_other_dicts_and_tuples(self, scope):
        for x, result in ask(lambda x: defaultdict(list, y=x)):
            assert result["y"].tolist() == x.tolist()
            assert result["more"] == []
        torch = pytest.importorskip("torch")
        found = weft.batched(lambda x: x.max(dim=1))(torch.tensor([[1.0, 5.0], [4.0, 2.0]]))
        assert (found.values.tolist(), found.indices.tolist()) == ([5, 4], [1, 0])


values = st.recursive(
    st.sampled_from(["rows", "list", "text", "per row", "shared"]),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def build(tree, x):
    """A result of this structure for a batch `x`."""
    if isinstance(tree, tuple):
        return tuple(build(part, x) for part in tree)
    if isinstance(tree, dict):
        return {key: build(part, x) for key, part in tree.items()}
    made = {"rows": x * 2, "list": [f"{v:g}" for v in x.ravel()], "text": "all", "shared": weft.Shared({1, 2}),
            "per row": weft.PerRow([np.full(int(v) % 3, v) for v in x.ravel()])}  # fmt: skip
    return made[tree]


def alone(tree, x):
    """What a caller with the rows `x` gets."""
    if isinstance(tree, tuple):
        return tuple(alone(part, x) for part in tree)
    if isinstance(tree, dict):
        return {key: alone(part, x) for key, part in tree.items()}
    found = build(tree, x)
    return {"shared": {1, 2}, "per row": getattr(found, "items", None)}.get(tree, found)


@given(values, st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any), st.booleans(), st.booleans())
def test_every_caller_gets_what_it_would_get_alone(tree, counts, split, padded):
    with weft.scope(weft.SimulatedClock()):
        most = 2 if split else sum(counts)
        policy = weft.batched(
            lambda x: build(tree, x), max_batch_size=most, split=split, allowed_batch_sizes=[most + 1] if padded else []
        )
        for at, count in enumerate(counts):
            x = 10.0 * at + np.arange(count, dtype=float).reshape(-1, 1)
            assert repr(policy(x)) == repr(alone(tree, x))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"a": x} if len(x) == 2 else {"a": x, "b": x},
        lambda x: {"a": x, "b": x} if len(x) == 2 else {"a": x},
        lambda x: x if len(x) == 2 else list(range(len(x))),
        lambda x: np.ones((len(x), len(x))),
    ],
    ids=["more", "fewer", "items", "shapes"],
)
def test_parts_of_a_split_call_that_do_not_fit(scope, make):
    policy = weft.batched(make, max_batch_size=2, split=True)
    with pytest.raises(FailedPreconditionError, match="one structure and rows of one shape for all parts"):
        policy(np.ones(3))
    assert len(policy(np.ones(2))) > 0


@pytest.mark.parametrize("inside", [weft.PerRow([1]), weft.Shared(1)], ids=["PerRow", "Shared"])
def test_nothing_of_weft_is_shared(scope, inside):
    policy = weft.batched(lambda x: (x, weft.Shared({"a": [inside]})))
    with pytest.raises(FailedPreconditionError, match=f"weft.Shared of the result has a weft.{type(inside).__name__}"):
        policy(np.ones(1))


def test_ragged_tensors_in_items_have_gradients(scope):
    torch = pytest.importorskip("torch")
    w = torch.tensor(3.0, requires_grad=True)

    def f(x):
        rows = [weft.RaggedTensor(w * row * row, [[0, 1, 2]]) for row in x]
        return weft.PerRow([[row] for row in rows]), weft.Shared(rows[0])

    policy = weft.batched(f, max_batch_size=2, **FULL)

    def go(v):
        x = torch.tensor([[v, 1.0]], requires_grad=True)
        ((row,),), shared = policy(x)
        assert not shared.flat_values.requires_grad
        row.flat_values.sum().backward()
        return row.to_list(), x.grad.tolist()

    found = [caller.answer() for caller in together([lambda: go(1.0), lambda: go(2.0)])]
    assert found == [([[3], [3]], [[6, 6]]), ([[12], [3]], [[12, 6]])]
    assert w.grad.item() == 7


def test_a_sparse_tensor_is_no_result(scope):
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArgumentError, match=r"must be a dense tensor, got one of torch\.sparse_coo"):
        weft.batched(lambda x: x.to_sparse())(torch.eye(2))


def test_a_number_has_no_rows():
    with pytest.raises(InvalidArgumentError, match="PerRow must get a sequence with one item for each row, got 3"):
        weft.PerRow(3)


def test_a_function_that_returns_a_generator_is_told_how_to_stream(scope):
    policy = weft.batched(lambda x: (x for _ in range(2)))
    with pytest.raises(FailedPreconditionError, match="batch the function itself that yields"):
        policy(np.ones(1))
