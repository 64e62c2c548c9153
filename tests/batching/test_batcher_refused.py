"""What a batched function, its options and its calls must not be."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from support.batched_calls import FULL, Model, rows
from support.callers import together
from support.libraries import need

import weft
from weft.errors import CancelledError, FailedPreconditionError, InvalidArgumentError


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


class TestRefused:
    @pytest.mark.parametrize(
        ("args", "kwargs", "said"),
        [
            ((), {}, "at least one array"),
            (("text",), {}, "at least one array"),
            ((np.float64(1),), {}, "at least one array"),
            ((np.array(1.0),), {}, "got a scalar"),
            ((rows(1), rows(1, 2)), {}, r"same number of rows, got \[\[1, 1\], \[2, 1\]\]"),
            ((rows(1), {1, 2}), {}, "hashable, got a set"),
            ((np.array([object()]),), {}, "cannot be batched"),
            ((np.zeros(1, [("a", int)]),), {}, "cannot be batched"),
            ((np.ones((9, 1)),), {}, "at most max_batch_size = 8 rows, got 9"),
        ],
    )
    def test_before_it_joins(self, args, kwargs, said):
        model = Model()
        policy = weft.batched(lambda *args, **kwargs: model(args[0]), max_batch_size=8)
        with pytest.raises(InvalidArgumentError, match=said):
            policy(*args, **kwargs)
        seen = policy.statistics()
        assert (seen.rejected, seen.calls, seen.waiting, model.sizes) == (1, 0, 0, [])
        assert len(policy._dispatcher.scheduler.queues) == 0

    def test_tensors_that_are_not_dense(self):
        need("torch")
        import torch

        policy = weft.batched(lambda x: x * 2)
        with pytest.raises(InvalidArgumentError, match="must be dense"):
            policy(torch.eye(2).to_sparse())

    @pytest.mark.parametrize("options", [{"deadline": 0}, {"deadline": "1"}, {"deadline": np.inf}, {"priority": "mid"}])
    def test_options_of_a_call(self, options):
        policy = weft.batched(lambda x: x)
        with pytest.raises(InvalidArgumentError):
            policy.call(rows(1), **options)
        assert policy.statistics().rejected == 1

    @pytest.mark.parametrize("value", [0, -1, np.nan, np.inf, "much", None])
    def test_costs(self, value):
        with pytest.raises(InvalidArgumentError, match="cost must return a positive number"):
            weft.batched(lambda x: x, cost=lambda x: value)(rows(1))

    def test_keys_that_are_no_keys(self):
        with pytest.raises(InvalidArgumentError, match="key must return a hashable value"):
            weft.batched(lambda x: x, key=lambda x: [])(rows(1))

    def test_what_a_key_function_raises_is_its_callers(self):
        policy = weft.batched(lambda x: x, key=lambda x: 1 / x.item())
        with pytest.raises(ZeroDivisionError):
            policy(rows(0))
        assert policy(rows(1)).item() == 1

    @pytest.mark.parametrize("function", [lambda x, mask: x, lambda x, rows: x])
    @pytest.mark.parametrize("by_place", [True, False])
    def test_what_the_batcher_tells_is_not_given(self, function, by_place):
        named = "mask" if "mask" in function.__code__.co_varnames else "rows"
        policy = weft.batched(function, **{f"pass_{named}": named})
        with pytest.raises(InvalidArgumentError, match="is filled in by the batcher"):
            policy(rows(1), rows(1)) if by_place else policy(rows(1), **{named: rows(1)})

    @pytest.mark.parametrize(
        "options",
        [
            {"max_batch_size": 0},
            {"max_batch_size": 1.5},
            {"max_batch_size": True},
            {"max_wait": -1},
            {"max_wait": np.nan},
            {"max_wait": np.inf},
            {"min_batch_size": 0},
            {"min_batch_size": 9, "max_batch_size": 8, "max_wait": 1},
            {"min_batch_size": 2},
            {"pass_mask": 3},
            {"pass_mask": "nothing"},
            {"pass_rows": "x", "shared": ("x",)},
            {"pass_mask": "x", "pass_rows": "x"},
            {"shared": "x"},
            {"allowed_batch_sizes": 3},
            {"max_queue": -1},
            {"max_queue": "many"},
            {"deadline": 0},
            {"parallel": 0},
            {"parallel": 1.5},
            {"on_error": "ignore"},
            {"on_missing_gradient": "skip"},
            {"gradient_deadline": 0},
            {"allowed_batch_sizes": [4, 2]},
            {"allowed_batch_sizes": [0, 64]},
            {"allowed_batch_sizes": [1.5, 64]},
            {"allowed_batch_sizes": [2, 4], "max_batch_size": 8},
            {"split": True, "cost": len},
            {"shared": ("nothing",)},
            {"key": 3},
            {"cost": 3},
            {"vjp": 3},
        ],
        ids=repr,
    )
    def test_options(self, options):
        with pytest.raises(InvalidArgumentError):
            weft.batched(lambda x: x, **options)

    def test_what_is_no_function(self):
        with pytest.raises(InvalidArgumentError, match="a batcher is made of a function"):
            weft.batched(3)

    @pytest.mark.parametrize(
        ("f", "said"),
        [
            (lambda x: x[:-1], "must have the 2 rows of its batch, got 1 rows in leaf 0"),
            (lambda x: (x, np.array(1.0)), "got a scalar in leaf 1"),
            (lambda x: x.mean(), "got a scalar in leaf 0"),
        ],
    )
    def test_results_without_the_rows_of_the_batch(self, f, said):
        policy = weft.batched(f)
        with pytest.raises(FailedPreconditionError, match=said):
            policy(rows(1, 2))
        assert policy.statistics().failed == 1

    def test_without_optree(self, monkeypatch):
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name == "optree":
                    raise ImportError(name)

        monkeypatch.delitem(sys.modules, "optree", raising=False)
        monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
        assert weft.batched(lambda x, y: (x, y))(rows(1), rows(2))[1].item() == 2
        assert weft.batched(lambda x, k, name=None: x * k)(rows(1), k=3, name="a").item() == 3

        class Owner:
            @weft.batched
            def add(self, x):
                return x + 1

        assert Owner().add(rows(1)).item() == 2
        assert weft.batched(lambda x: {"a": (x, 3)})(rows(1)) == {"a": (rows(1), 3)}
        with pytest.raises(ImportError, match=r"pip install 'weft\[batched\]'"):
            weft.batched(lambda x: x)({"a": rows(1)})

    def test_names_meet_in_any_order(self):
        policy = weft.batched(lambda x, y, k: x * y * k, max_batch_size=2, **FULL)
        callers = together([lambda: policy(x=rows(2), y=rows(3), k=2), lambda: policy(k=2, y=rows(5), x=rows(7))])
        assert [caller.answer().item() for caller in callers] == [12, 70]
        assert policy.statistics().sizes == {2: 1}

    def test_closed(self):
        policy = weft.batched(lambda x: x)
        policy.close()
        with pytest.raises(CancelledError, match="is closed"):
            policy(rows(1))
