"""Calls with too many rows, cut and joined again, and batches that are padded."""

from __future__ import annotations

import numpy as np
import pytest
from support.batched_calls import Slow, rows
from support.callers import start_on

import weft
from weft.errors import DeadlineExceededError, InvalidArgumentError, QueueFullError


class TestSplitting:
    def test_rejoined_in_order(self, clock):
        model = Slow(clock)
        policy = weft.batched(model, max_batch_size=4, split=True)
        first = start_on(clock, policy, rows(-1))
        big = start_on(clock, policy, np.arange(10.0)[:, None])
        small = start_on(clock, policy, rows(100, 101, 102))
        clock.run_out()
        assert first.answer().item() == -2
        assert big.answer().ravel().tolist() == list(np.arange(0, 20, 2))
        assert small.answer().ravel().tolist() == [200, 202, 204]
        assert model.sizes == [1, 4, 4, 4, 1]

    @pytest.mark.parametrize("most", [1, 3, 100])
    def test_a_call_of_more_rows_than_may_wait_is_taken_when_nothing_waits(self, clock, most):
        model = Slow(clock)
        policy = weft.batched(model, max_batch_size=2, split=True, max_queue=most)
        for _ in range(2):
            big = start_on(clock, policy, np.zeros((200, 1)))
            small = start_on(clock, policy, rows(1))
            assert isinstance(small.error, QueueFullError)
            clock.run_out()
            assert big.answer().shape == (200, 1)
        running = start_on(clock, policy, rows(1))
        waiting = start_on(clock, policy, np.zeros((200, 1)))  # a batch runs, nothing waits
        clock.run_out()
        assert running.answer().shape == (1, 1)
        assert waiting.answer().shape == (200, 1)

    def test_nothing_may_wait(self, clock):
        policy = weft.batched(Slow(clock), max_batch_size=2, split=True, max_queue=0)
        big = start_on(clock, policy, np.zeros((200, 1)))
        assert isinstance(start_on(clock, policy, rows(1)).error, QueueFullError)
        clock.run_out()
        assert big.answer().shape == (200, 1)
        running = start_on(clock, policy, rows(1))
        assert isinstance(start_on(clock, policy, np.zeros((200, 1))).error, QueueFullError)
        clock.run_out()
        assert running.answer().shape == (1, 1)

    def test_with_trees_and_what_is_no_array(self):
        policy = weft.batched(lambda t: {"y": t["x"] + 1, "n": 3}, max_batch_size=3, split=True)
        got = policy({"x": np.arange(8)})
        assert (got["y"].tolist(), got["n"]) == (list(range(1, 9)), 3)

    def test_without_it_too_many_are_refused(self):
        with pytest.raises(InvalidArgumentError, match="max_batch_size = 3"):
            weft.batched(lambda x: x, max_batch_size=3)(np.ones(4))

    def test_a_slice_that_fails_fails_the_call(self, clock):
        def f(x):
            if 5 in x:
                raise ValueError("five")
            return x

        policy = weft.batched(Slow(clock, 1.0, f), max_batch_size=2, split=True)
        start_on(clock, policy, np.array([50.0]))
        bad = start_on(clock, policy, np.arange(7.0))
        good = start_on(clock, policy, np.array([8.0]))
        clock.run_out()
        with pytest.raises(ValueError, match="five"):
            bad.answer()
        assert good.answer().tolist() == [8]
        assert policy.statistics().failed == 1
        assert policy.statistics().calls == 3

    def test_one_that_leaves_between_its_slices(self, clock):
        model = Slow(clock)
        policy = weft.batched(model, max_batch_size=2, split=True)
        big = start_on(clock, lambda: policy.call(np.arange(8.0), deadline=1.5))
        other = start_on(clock, policy, np.array([9.0]))
        clock.run_out()
        assert isinstance(big.error, DeadlineExceededError)
        assert other.answer().tolist() == [18]
        assert sum(model.sizes) == 5
        assert policy.statistics().waiting == 0


class TestPadding:
    @pytest.mark.parametrize(("count", "size"), [(1, 2), (2, 2), (3, 4), (5, 8), (8, 8)])
    def test_to_the_next_allowed_size(self, library, count, size):
        from support.libraries import back, to

        seen = []

        def f(x, *, mask, rows):
            seen.append((back(x), back(mask), rows, type(mask) is type(x)))
            return x * 2

        policy = weft.batched(f, max_batch_size=8, allowed_batch_sizes=[2, 4, 8], pass_mask="mask", pass_rows="rows")
        y = policy(to(library, np.arange(float(count))))
        np.testing.assert_array_equal(back(y), np.arange(0.0, 2 * count, 2))
        x, mask, told, same = seen[0]
        assert (len(x), told, same) == (size, count, True)
        assert mask.tolist() == [i < count for i in range(size)]
        assert x[count:].tolist() == [0] * (size - count)
        assert policy.statistics().padding == size - count

    def test_with_the_first_row_there_is(self, library, clock):
        from support.libraries import back, to

        seen = []
        policy = weft.batched(
            lambda x: seen.append(back(x).tolist()) or x,
            max_batch_size=4,
            allowed_batch_sizes=[4],
            max_wait=1.0,
        )
        calls = [start_on(clock, policy, to(library, np.arange(float(count)) + 5)) for count in (0, 2)]
        clock.advance(1.0)
        assert [back(call.answer()).tolist() for call in calls] == [[], [5, 6]]
        assert seen == [[5, 6, 5, 5]]

    def test_positional_parameters_are_told_too(self):
        policy = weft.batched(lambda x, count: x[:, 0] * count, pass_rows="count")
        assert policy(np.ones((3, 1))).tolist() == [3, 3, 3]

    def test_parameters_of_any_name_belong_to_the_callers(self):
        policy = weft.batched(lambda x, mask, rows=2: x * mask * rows)
        assert policy(rows(1, 2), rows(3, 4)).tolist() == [[6], [16]]
        assert policy(rows(1, 2), mask=rows(3, 4), rows=1).tolist() == [[3], [8]]

    @pytest.mark.parametrize("name", ["mask", "rows"])
    @pytest.mark.parametrize("function", [lambda x, mask, rows: x, lambda x, *, mask, rows: x])
    def test_a_parameter_that_weft_filled_in_once(self, function, name):
        other = {"mask": "rows", "rows": "mask"}[name]
        policy = weft.batched(function)
        with pytest.raises(
            InvalidArgumentError, match=f"'{name}' of the function got no argument.*pass_{name}='{name}'"
        ):
            policy(rows(1), **{other: 3})
        assert policy.statistics().rejected == 1
        weft.batched(function, **{f"pass_{name}": name})(rows(1), **{other: 3})

    def test_names_that_the_function_takes_by_keywords(self):
        policy = weft.batched(
            lambda x, **named: x * named["there"][:, None], pass_mask="there", allowed_batch_sizes=[64]
        )
        assert policy(rows(1, 2)).tolist() == [[1], [2]]

    def test_a_transformer_is_not_given_a_mask(self):
        torch = pytest.importorskip("torch")
        layer = torch.nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)
        net = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        x = torch.randn(2, 3, 4)
        with torch.no_grad():
            torch.testing.assert_close(weft.batched(net)(x), net(x))

    def test_more_than_the_largest_is_not_padded(self):
        policy = weft.batched(lambda x: x, cost=lambda x: 1, max_batch_size=4, allowed_batch_sizes=[2])
        assert policy(np.ones(5)).shape == (5,)

    def test_a_module_is_told_by_its_forward(self):
        torch = pytest.importorskip("torch")
        from weft.torch import BatchNorm

        norm = BatchNorm(2).double()
        policy = weft.batched(norm, max_batch_size=4, allowed_batch_sizes=[4], pass_mask="mask")
        x = torch.randn(3, 2, dtype=torch.double)
        with torch.no_grad():
            y = policy(x)
        torch.testing.assert_close(y, torch.nn.BatchNorm1d(2).double()(x).detach())
