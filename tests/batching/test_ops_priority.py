"""Calls of low priority among others, in every way they can be mixed."""

from __future__ import annotations

import numpy as np
import pytest
from support.callers import start_on, together
from support.raw_calls import POLICIES, function, rows

import weft

LOW = {
    "low_priority_max_batch_size": 8,
    "low_priority_batch_timeout_micros": 9000,
    "low_priority_max_enqueued_batches": 4,
}


class TestPriority:
    class Seen(list):
        """The batches a function saw."""

        def run(self, x):
            self.append(x.ravel().tolist())
            return -x

        __hash__ = object.__hash__

    @staticmethod
    def call(level, x, seen, **attributes):
        with weft.priority(level):
            return function(seen.run, x, 8, batch_timeout_micros=1000, **LOW | attributes)

    def play(self, clock, order, **attributes):
        seen = self.Seen()
        callers = [start_on(clock, self.call, level, rows(i), seen, **attributes) for i, level in enumerate(order)]
        clock.run_out()
        for i, caller in enumerate(callers):
            assert caller.answer().ravel().tolist() == [-i]
        return list(seen)

    def test_low_ones_fill_a_batch_of_high_ones(self, clock):
        assert self.play(clock, ["low", "high", "low", "high"]) == [[1, 3, 0, 2]]
        assert clock.now() == pytest.approx(0.001)

    def test_low_ones_alone_wait_for_their_own_timeout(self, clock):
        assert self.play(clock, ["low", "low"]) == [[0, 1]]
        assert clock.now() == pytest.approx(0.009)

    def test_isolation(self, clock):
        seen = self.play(clock, ["low", "high", "low", "high"], mixed_priority_policy="priority_isolation")
        assert seen == [[1, 3], [0, 2]]
        assert clock.now() == pytest.approx(0.009)

    def test_merge(self, clock):
        seen = self.play(clock, ["low", "high", "low"], mixed_priority_policy="priority_merge")
        assert seen == [[1, 0, 2]]
        assert clock.now() == pytest.approx(0.001)

    def test_merge_cuts_a_low_call(self, clock):
        """A low-priority call cut twice gets all its rows, in order."""
        attributes = {"mixed_priority_policy": "priority_merge", "enable_large_batch_splitting": True,
                      "allowed_batch_sizes": [3], "num_batch_threads": 2} | LOW  # fmt: skip

        def call(level, x):
            with weft.priority(level):
                return function(np.negative, x, 8, batch_timeout_micros=1000, **attributes)

        low = start_on(clock, call, "low", rows(1, 2))
        more = start_on(clock, call, "low", rows(*range(10, 18)))
        high = start_on(clock, call, "high", rows(9))
        clock.run_out()
        assert low.answer().ravel().tolist() == [-1, -2]
        assert more.answer().ravel().tolist() == [-i for i in range(10, 18)]
        assert high.answer().item() == -9
        assert weft.sweep() == 0

    def test_without_low_limits_all_are_alike(self, clock):
        seen = self.play(clock, ["low", "high"], low_priority_max_batch_size=0)
        assert seen == [[0, 1]]

    def test_the_innermost_counts_and_threads_have_their_own(self, clock):
        seen = self.Seen()
        with weft.priority("low"):
            caller = start_on(clock, self.call, "high", rows(1), seen)
            plain = start_on(clock, lambda: self.call("high", rows(2), seen))
        clock.run_out()
        caller.answer(), plain.answer()
        assert clock.now() == pytest.approx(0.001)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_many_threads(self, scope, policy):
        def call(i, policy):
            rng = np.random.default_rng(i)
            for _ in range(15):
                x = rng.random((int(rng.integers(1, 5)), 1))
                with weft.priority("low" if i % 2 else "high"):
                    y = function(
                        np.negative, x, 8, batch_timeout_micros=300, num_batch_threads=2, max_enqueued_batches=999,
                        low_priority_max_batch_size=6, low_priority_batch_timeout_micros=600,
                        low_priority_max_enqueued_batches=999, mixed_priority_policy=policy,
                        enable_large_batch_splitting=True, shared_name=policy,
                    )  # fmt: skip
                np.testing.assert_array_equal(y, -x)

        for caller in together([lambda i=i: call(i, policy) for i in range(12)]):
            caller.answer()
        assert scope.sweep() == 0
