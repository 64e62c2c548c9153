"""Who shares a batch with whom: keys, shared arguments, methods."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
from support.batched_calls import FULL, Model, call_all, held, rows, waiting
from support.callers import start, together
from support.libraries import need, to

import weft
from weft.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


class TestKeys:
    """Callers that cannot share a batch never meet, and never make each other fail."""

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (((rows(1),), {}), ((np.ones((1, 2)),), {})),
            (((rows(1),), {}), ((rows(1).astype("float32"),), {})),
            (((rows(1), "a"), {}), ((rows(1), "b"), {})),
            (((rows(1), 1), {}), ((rows(1), True), {})),
            (((rows(1), 1), {}), ((rows(1), 1.0), {})),
            (((rows(1),), {}), ((), {"x": rows(1)})),
            ((([rows(1)],), {}), (((rows(1),),), {})),
            ((({"a": rows(1)},), {}), (({"b": rows(1)},), {})),
        ],
        ids=["shape", "dtype", "value", "bool", "float", "name", "nesting", "keys"],
    )
    def test_apart(self, one, other):
        seen = []

        def f(*args, **kwargs):
            seen.append((args, kwargs))
            return rows(0)

        policy = weft.batched(f, max_batch_size=1)
        call_all(policy, [one, other])
        assert len(policy._dispatcher.scheduler.queues) == 2
        assert policy.statistics().sizes == {1: 2}
        assert {repr(s) for s in seen} == {repr(one), repr(other)}

    def test_libraries_apart(self):
        need("torch")
        need("jax")
        policy = weft.batched(lambda x: x, max_batch_size=1)
        call_all(policy, [((to(library, rows(1)),), {}) for library in ("numpy", "torch", "jax")])
        assert policy.statistics().sizes == {1: 3}

    def test_alike_together(self):
        policy = weft.batched(lambda x, mode: x, max_batch_size=3, **FULL)
        call_all(policy, [((rows(i), "a"), {}) for i in range(3)])
        assert policy.statistics().sizes == {3: 1}

    def test_the_users_key(self):
        model = Model()
        policy = weft.batched(model, key=lambda x: x.flat[0] > 0, max_batch_size=2, **FULL)
        call_all(policy, [((rows(x),), {}) for x in (1, -1, 2, -2)])
        assert sorted(sorted(np.sign(b).ravel().tolist()) for b in model.batches) == [[-1, -1], [1, 1]]

    def test_one_key_fills_while_another_waits(self):
        model = Model()
        policy = weft.batched(model, max_batch_size=2, **FULL)
        lone = start(policy, np.ones((1, 3)))
        waiting(policy, 1)
        call_all(policy, [((rows(1),), {}), ((rows(2),), {})])
        assert lone.is_alive()
        policy.close()
        assert lone.answer().tolist() == [[2, 2, 2]]

    def test_queues_of_keys_that_no_longer_come_are_dropped(self):
        clock = weft.SimulatedClock()
        with weft.scope(clock) as scope:
            policy = weft.batched(lambda x, key: x)
            for i in range(1000):
                policy(rows(1), i)
            assert len(policy._dispatcher.scheduler.queues) <= 64
            clock.advance(61)
            scope.sweep()
            assert len(policy._dispatcher.scheduler.queues) == 0
            assert len(policy._arguments._keys) == 0

    @pytest.mark.usefixtures("little_garbage")
    def test_what_was_part_of_a_key_is_freed_with_its_queue(self):
        class Setting:
            pass

        clock = weft.SimulatedClock()
        with weft.scope(clock) as scope:
            policy = weft.batched(lambda x, setting: x)
            setting = Setting()
            ref = weakref.ref(setting)
            policy(rows(1), setting)
            del setting
            clock.advance(61)
            scope.sweep()
            gc.collect()
            assert ref() is None

    def test_grad_mode_and_autocast(self):
        need("torch")
        import torch

        policy = weft.batched(lambda x: x @ torch.ones(2, 2), max_batch_size=1)
        x = torch.ones(1, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert policy(x).dtype == torch.bfloat16
        assert policy(x).dtype == torch.float32
        with torch.no_grad():
            policy(x)
        with torch.inference_mode():
            assert policy(x).is_inference()
        assert len(policy._dispatcher.scheduler.queues) == 4

    def test_a_batch_runs_as_its_callers_would_from_a_thread_of_nobodys(self):
        need("torch")
        import asyncio

        import torch

        def f(x):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return x

        async def main():
            with torch.no_grad(), torch.autocast("cpu"):
                return await policy.aio(torch.ones(1, 2))

        seen = []
        policy = weft.batched(f)
        asyncio.run(main())
        assert seen == [(False, True)]


def test_threads_that_are_the_first_of_their_kind_at_once_meet():
    """The form that is their key is made once, though both find none."""
    others = []
    policy = weft.batched(lambda x: x, max_batch_size=2, key=lambda x: "k", **FULL)

    class Table(dict):
        def setdefault(self, parts, own):
            if not others:
                others.append(None)
                others[0] = start(policy, rows(1))
                waiting(policy, 1)  # another call has made the form meanwhile
            return dict.setdefault(self, parts, own)

    policy._arguments._keys._table = Table()
    assert policy(rows(2)).item() == 2
    assert others[0].answer().item() == 1
    assert policy.statistics().batches == 1


class Opaque:
    """Cannot be compared."""

    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None


class TestShared:
    def test_the_same_by_identity_or_by_value(self):
        policy = weft.batched(lambda w, x: x @ w, shared=("w",), max_batch_size=3, **FULL)
        w = np.eye(2)
        got = call_all(policy, [((w if i else w.copy(), np.full((1, 2), float(i))), {}) for i in range(3)])
        assert [y.tolist() for y in got] == [[[i, i]] for i in range(3)]
        assert policy.statistics().sizes == {3: 1}

    def test_by_name(self):
        policy = weft.batched(lambda x, *, w: x @ w["w"], shared=("w",))
        assert policy(np.ones((1, 2)), w={"w": np.eye(2)}).tolist() == [[1, 1]]

    @pytest.mark.parametrize(
        ("one", "other", "named"),
        [
            ({"a": rows(1), "b": rows(1)}, {"a": rows(1), "b": rows(2)}, "leaf 1 of the shared argument 'w'"),
            ({"a": rows(1)}, {"b": rows(1)}, "structure"),
            ({"a": rows(1)}, {"a": rows(1).astype("float32")}, "leaf 0"),
            ({"a": 1}, {"a": True}, "leaf 0"),
            (Opaque(), Opaque(), "leaf 0"),
        ],
    )
    def test_others_are_refused_by_leaf(self, one, other, named):
        model = Model()
        policy = weft.batched(lambda x, w: model(x), shared=("w",), max_batch_size=8)
        first = held(lambda x: policy(x, one), model)
        policy.statistics()
        callers = [start(policy, rows(1), one)]
        waiting(policy, 1)
        callers.append(start(policy, rows(2), other))
        waiting(policy, 2)
        model.gate.set()
        first.answer()
        assert callers[0].answer().tolist() == [[2]]
        with pytest.raises(InvalidArgumentError, match=named):
            callers[1].answer()


class TestMethods:
    def test_the_instance_is_part_of_the_key(self):
        class Net:
            def __init__(self, w):
                self.w = w

            @weft.batched(max_batch_size=2, **FULL)
            def forward(self, x):
                return x * self.w

        nets = Net(2), Net(3)
        callers = together([lambda n=n, i=i: n.forward(rows(i)) for n in nets for i in (1, 2)])
        assert [c.answer().item() for c in callers] == [2, 4, 3, 6]
        assert Net.forward.statistics().sizes == {2: 2}
        assert nets[0].forward.call(rows(1, 2), receipt=True)[1].size == 2

    def test_of_a_dataclass(self):
        @dataclasses.dataclass
        class Net:
            w: np.ndarray

            @weft.batched(max_batch_size=2, key=lambda self, x: self.w.sum() > 0, **FULL)
            def forward(self, x):
                return x @ self.w

        net = Net(np.eye(3))  # neither hashable nor taken apart
        callers = together([lambda i=i: net.forward(np.full((1, 3), float(i))) for i in (1, 2)])
        assert [c.answer().tolist() for c in callers] == [[[1, 1, 1]], [[2, 2, 2]]]

    def test_in_a_task(self):
        import asyncio

        class Net:
            @weft.batched
            def forward(self, x):
                return x * 2

        assert asyncio.run(Net().forward.aio(rows(1))).item() == 2
