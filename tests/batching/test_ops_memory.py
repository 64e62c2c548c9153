"""Nobody's memory in another's hands, and none of it kept, through the batching family."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from support.callers import start_on
from support.libraries import back, need, to
from support.library_calls import LARGE, NO_ROWS, all_of, batch, function

import weft
from weft import raw_ops


def bytes_of(x):
    return np.asarray(back(x)).tobytes()


def overwrite(x):
    """Write to an array its caller was given; JAX arrays cannot be written to."""
    if type(x).__module__.startswith("torch"):
        x.fill_(-9)
    elif isinstance(x, np.ndarray):
        x[...] = -9


SIZES = [3, LARGE]


def check_apart(results, inputs):
    """No result shares memory with another or with an input: writing all over one leaves the others as they are."""
    if any(isinstance(x, np.ndarray) for x in results):
        for i, x in enumerate(results):
            for y in [*results[i + 1 :], *inputs]:
                assert not np.shares_memory(x, y)
    before = [bytes_of(x) for x in inputs]
    for i, x in enumerate(results):
        others = [bytes_of(y) for y in results[i + 1 :]]
        overwrite(x)
        assert [bytes_of(y) for y in results[i + 1 :]] == others
    assert [bytes_of(x) for x in inputs] == before


@pytest.mark.parametrize("size", SIZES, ids=["small", "large"])
class TestMemory:
    @staticmethod
    def inputs(library, size, count=3):
        return [to(library, np.arange(i, i + 2.0 * size, dtype=np.float32).reshape(2, size)) for i in range(count)]

    def test_of_batch(self, clock, library, size):
        inputs = self.inputs(library, size)
        got = all_of(clock, *[lambda x=x: batch(x, x) for x in inputs])
        check_apart([*got[-1].batched_tensors], inputs)

    def test_of_a_lone_batch(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        for most in (2, 100):  # full by itself, and not
            with weft.scope(clock):
                (got,) = all_of(clock, lambda most=most: batch(x, max_batch_size=most))
                check_apart(got.batched_tensors, [x])

    def test_of_unbatch(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        owner = raw_ops.Unbatch(x, [[1, 0, 1], [2, 1, 1]], 1, 10**6)
        other = raw_ops.Unbatch(x[:0], NO_ROWS, 2, 10**6)
        check_apart([owner, other], [x])

    def test_of_overlapping_pieces(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        owner = raw_ops.Unbatch(x, [[1, 1, 1], [2, 1, 1]], 1, 10**6)
        other = raw_ops.Unbatch(x[:0], NO_ROWS, 2, 10**6)
        check_apart([owner, other], [x])

    def test_of_unbatch_of_one(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        check_apart([raw_ops.Unbatch(x, [[1, 0, 2]], 1, 0)], [x])

    def test_stored_pieces_are_copies(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        wanted = back(x)[1:].copy()
        raw_ops.Unbatch(x, [[1, 0, 1], [2, 1, 1]], 1, 10**6)
        overwrite(x)
        np.testing.assert_array_equal(back(raw_ops.Unbatch(x[:0], NO_ROWS, 2, 10**6)), wanted)

    def test_of_unbatch_grad(self, clock, library, size):
        a, b = self.inputs(library, size, 2)
        wanted = np.concatenate([back(b), back(a)])
        raw_ops.UnbatchGrad(a[:0], NO_ROWS, a, 1)
        kept = back(a).copy()
        overwrite(a)  # its sender goes on with its array
        got = raw_ops.UnbatchGrad(b, [[2, 0, 2], [1, 2, 2]], b, 2)
        np.testing.assert_array_equal(back(got), wanted)
        check_apart([got], [b])
        assert kept.shape == (2, size)

    def test_of_unbatch_grad_of_one(self, clock, library, size):
        (a,) = self.inputs(library, size, 1)
        check_apart([raw_ops.UnbatchGrad(a, [[2, 0, 2]], a, 2)], [a])

    @pytest.mark.parametrize("what", ["its input", "its own buffer", "a capture", "one array twice", "views of one"])
    def test_of_functions(self, clock, library, size, what):
        inputs = self.inputs(library, size)
        fixed = to(library, np.zeros((6, size), np.float32))
        functions = {
            "its input": lambda x: (x, x),
            "its own buffer": lambda x: (fixed, x),
            "a capture": lambda x, c: (c, c),
            "one array twice": lambda x: [x + 1] * 2,
            "views of one": lambda x: (x, x[:, 1:]),
        }
        captured = [fixed] if what == "a capture" else []
        f = functions[what]
        calls = [lambda x=x: function(f, x, Tout=["float32"] * 2, captured=captured) for x in inputs]
        got = all_of(clock, *calls)
        check_apart([y for outputs in got for y in outputs], [*inputs, fixed])

    def test_of_a_lone_function_call(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        kept = []

        def f(x):
            kept.append(x)
            return x

        for split in (False, True):
            with weft.scope(clock):
                (got,) = all_of(
                    clock,
                    lambda split=split: function(
                        f, x, max_batch_size=2, allowed_batch_sizes=[1, 2], enable_large_batch_splitting=split
                    ),
                )
                check_apart(got, [x, *kept])

    def test_f_may_write_to_its_batch(self, clock, library, size):
        inputs = self.inputs(library, size)
        before = [bytes_of(x) for x in inputs]

        def f(x):
            overwrite(x)
            return x

        for calls in (inputs, inputs[:1]):
            all_of(clock, *[lambda x=x: function(f, x) for x in calls])
        assert [bytes_of(x) for x in inputs] == before


def test_a_small_piece_does_not_hold_the_batch():
    with weft.scope():
        x = np.zeros((64, LARGE // 8))
        small = raw_ops.Unbatch(x, [[1, 0, 1]], 1, 0)
        assert small.base is None or small.base.nbytes < x.nbytes
        need("torch")
        t = to("torch", x)
        small = raw_ops.Unbatch(t, [[1, 0, 1]], 1, 0)
        assert small.untyped_storage().nbytes() < x.nbytes


def test_memory_is_lent_to_one_at_a_time():
    """Results that are kept are never taken up again, whoever holds them and however."""
    with weft.scope():
        rng = np.random.default_rng(0)
        holders = [
            lambda y: y,
            lambda y: y[1:, ::2],
            lambda y: y.reshape(-1)[5:].view(np.uint8),
            memoryview,
            lambda y: np.frombuffer(y, np.uint8),
            lambda y: np.from_dlpack(y),
            lambda y: y.T,
        ]
        held = []
        for turn in range(60):
            x = rng.random((2, LARGE))
            (y,) = raw_ops.Batch([x], 1, 2, 0, 0).batched_tensors
            holder = holders[turn % len(holders)](y)
            held.append((holder, np.array(holder)))
            del y
            if turn % 3 == 2:
                held.pop(turn % len(held))
        for holder, copy in held:
            np.testing.assert_array_equal(np.asarray(holder), copy)


def test_memory_held_by_other_libraries():
    need("torch")
    import torch

    with weft.scope():
        held = []
        for i in range(20):
            (y,) = raw_ops.Batch([np.full((2, LARGE), float(i))], 1, 2, 0, 0).batched_tensors
            held.append(torch.from_numpy(y)[1:])
            del y
        assert [float(t.min()) for t in held] == [float(t.max()) for t in held] == list(range(20))


@pytest.mark.usefixtures("little_garbage")
def test_inputs_are_let_go(clock):
    """When a call is over nothing keeps its arrays alive, nor its function's captures."""

    class Held(np.ndarray):
        pass

    x = np.ones((2, 3)).view(Held)
    c = np.ones(3).view(Held)
    gone = [weakref.ref(x), weakref.ref(c)]
    for call in (lambda x, c: batch(x), lambda x, c: function(np.add, x, captured=[c], Tout=["float64"])):
        caller = start_on(clock, call, x, c)
        clock.run_out()
        caller.answer()
    caller = None
    raw_ops.Unbatch(x, [[1, 0, 1], [2, 1, 1]], 1, 1000)
    raw_ops.UnbatchGrad(x[:0], NO_ROWS, x, 3)
    del x, c
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
