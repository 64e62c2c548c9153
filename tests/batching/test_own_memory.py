"""Whose memory is whose: a function may use its arrays again, and a caller its own, as soon as it has returned."""

from __future__ import annotations

import asyncio
import ctypes

import numpy as np
import pytest
from support.batched_calls import FULL, call_all, rows
from support.callers import start, together, until
from support.libraries import for_each

import weft


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


def array(library, values):
    if library == "numpy":
        return np.array(values, float)
    if library == "torch":
        return pytest.importorskip("torch").tensor(values, dtype=pytest.importorskip("torch").double)
    return pytest.importorskip("jax").numpy.asarray(np.array(values, np.float32))


class OneBuffer:
    """A pull-back that writes every gradient into one buffer, and returns views of it."""

    def __init__(self, library="numpy"):
        self.buffer = array(library, np.zeros((64, 2)))

    def vjp(self, x):
        def pull_back(gradient):
            found = self.buffer[: len(gradient), : gradient.shape[1]]
            found[:] = gradient
            return found

        return x * 1.0, pull_back


class TestGradientsOfPullBacks:
    @for_each("library", ["numpy", "torch"])
    @pytest.mark.parametrize("callers", [1, 3])
    def test_a_buffer_that_is_used_again(self, library, callers):
        policy = weft.batched(lambda x: x, vjp=OneBuffer(library).vjp, max_batch_size=callers, **FULL)

        def pulled(value):
            y, pull_back = policy.vjp(array(library, [[value, value]]))
            return pull_back(y)

        first = [caller.answer() for caller in together([lambda i=i: pulled(i + 1.0) for i in range(callers)])]
        again = [caller.answer() for caller in together([lambda i=i: pulled(i + 11.0) for i in range(callers)])]
        assert [x.tolist() for x in first] == [[[i + 1.0] * 2] for i in range(callers)]
        assert [x.tolist() for x in again] == [[[i + 11.0] * 2] for i in range(callers)]
        first[0][:] = -1  # and the function's own buffer is not the caller's
        assert again[0].tolist() == [[11.0] * 2]

    def test_many_rows_at_once(self):
        buffer = np.zeros((300, 100))

        def vjp(x):
            def pull_back(gradient):
                buffer[: len(gradient)] = gradient
                return buffer[: len(gradient)]

            return x * 1.0, pull_back

        policy = weft.batched(lambda x: x, vjp=vjp, max_batch_size=300)
        kept = []
        for value in (1.0, 2.0):
            y, pull_back = policy.vjp(np.full((300, 100), value))
            kept.append(pull_back(y))
        assert (kept[0].max(), kept[1].min()) == (1, 2)

    def test_one_buffer_for_several_arguments(self):
        buffer = np.zeros((8, 1))

        def vjp(x, more):
            def pull_back(gradient):
                buffer[: len(gradient)] = gradient
                return buffer[: len(gradient)], {"a": buffer[: len(gradient)]}

            return x + more["a"], pull_back

        policy = weft.batched(lambda x, more: x, vjp=vjp)
        y, pull_back = policy.vjp(rows(1, 2), {"a": rows(1, 2)})
        first, second = pull_back(y)
        first[:] = 9
        assert second.tolist() == [[2.0], [4.0]]

    @for_each("rule", ["pad", "ragged"])
    def test_arguments_of_different_lengths(self, rule):
        buffer = np.zeros((8, 8))

        def vjp(x):
            values = x.flat_values if rule == "ragged" else x

            def pull_back(gradient):
                gradient = gradient.flat_values if rule == "ragged" else gradient
                found = buffer.reshape(-1)[: gradient.size].reshape(gradient.shape)
                found[:] = gradient
                return x.with_values(found) if rule == "ragged" else found

            return x.with_values(values * 1.0) if rule == "ragged" else values * 1.0, pull_back

        options = {"ragged": ("x",)} if rule == "ragged" else {"pad": {"x": weft.Pad()}, "cut": True}
        policy = weft.batched(lambda x: x, vjp=vjp, max_batch_size=2, **FULL, **options)

        def pulled(length, value):
            y, pull_back = policy.vjp(np.full((1, length), value))
            return pull_back(y)

        def both(value):
            return [caller.answer() for caller in together([lambda n=n: pulled(n, value + n) for n in (1, 3)])]

        kept = both(10.0)
        both(20.0)
        assert [x.tolist() for x in kept] == [[[11.0]], [[13.0] * 3]]

    def test_jax_arrays_that_their_maker_deletes(self):
        """Deleted as a donated array is: the caller has one of its own."""
        pytest.importorskip("jax")
        made = []

        def keep(x):
            made.append(x)
            return x

        policy = weft.batched(lambda x: keep(x + 1), vjp=lambda x: (keep(x + 1), lambda g: keep(g * 2)))
        y = policy(array("jax", [[1.0]]))
        y2, pull_back = policy.vjp(array("jax", [[1.0]]))
        gradient = pull_back(y2)
        for x in made:
            x.delete()
        assert (y.item(), y2.item(), gradient.item()) == (2, 2, 4)


class TestResults:
    @for_each("library", ["numpy", "torch"])
    @pytest.mark.parametrize("callers", [1, 2])
    def test_a_buffer_that_is_used_again(self, library, callers):
        """Of every kind of result that has arrays."""
        buffer = array(library, np.zeros((8, 2)))

        def f(x):
            buffer[: len(x)] = x
            own = buffer[: len(x)]
            return {"rows": own, "items": weft.PerRow([{"a": [row]} for row in own]), "nested": (own, (own[:, :1],))}

        policy = weft.batched(f, max_batch_size=callers, **FULL)

        def both(value):
            return call_all(policy, [((array(library, [[value + i] * 2]),), {}) for i in range(callers)])

        kept = both(1.0)
        both(5.0)
        for i, found in enumerate(kept):
            wanted = [[1.0 + i] * 2]
            assert (
                found["rows"].tolist() == found["nested"][0].tolist() == [found["items"][0]["a"][0].tolist()] == wanted
            )
            assert found["nested"][1][0].tolist() == [[1.0 + i]]

    def test_a_ragged_buffer(self):
        values = np.zeros(8)

        @weft.batched(ragged=("x",))
        def f(x):
            values[: len(x.flat_values)] = x.flat_values
            return x.with_values(values[: len(x.flat_values)])

        kept = f(weft.RaggedTensor.from_rows([[1.0], [2.0, 3.0]]))
        f(weft.RaggedTensor.from_rows([[7.0], [8.0, 9.0]]))
        assert kept.to_list() == [[1.0], [2.0, 3.0]]


class TestArguments:
    """A function that writes to its arguments writes to the batch's own, also if the batch is one call."""

    @for_each("library", ["numpy", "torch"])
    @pytest.mark.parametrize("size", [1, 1 << 16])
    def test_of_a_lone_call(self, library, size):
        x = array(library, np.ones((2, size)))

        def f(x):
            x[...] = 7
            return x

        y = weft.batched(f)(x)
        assert (x.min().item(), x.max().item(), y.min().item()) == (1, 1, 7)

    @for_each(
        "options", [{"rows": False}, {"pad": {"x": weft.Pad()}}, {"allowed_batch_sizes": (2,), "max_batch_size": 2}]
    )
    def test_however_they_are_joined(self, options):
        x = np.ones(3) if options.get("rows") is False else np.ones((2, 3))

        def f(x):
            x[...] = 7
            return x

        weft.batched(f, **options)(x)
        assert x.min() == x.max() == 1

    def test_ragged_ones(self):
        @weft.batched(ragged=("x",))
        def f(x):
            x.flat_values[...] = 7
            return x

        x = weft.RaggedTensor.from_rows([[1.0], [2.0, 3.0]])
        assert f(x).to_list() == [[7.0], [7.0, 7.0]]
        assert x.to_list() == [[1.0], [2.0, 3.0]]

    def test_lists_of_items(self):
        @weft.batched(items=("names",))
        def f(x, names):
            names[:] = ["changed"] * len(names)
            return x

        names = ["a", "b"]
        f(rows(1, 2), names)
        assert names == ["a", "b"]


class TestHandedIn:
    """A caller that does not wait for the batch's backward may write to the gradient that it has handed in."""

    @for_each("split", [False, True])
    def test_wait_backward_is_off(self, split, monkeypatch):
        torch = pytest.importorskip("torch")
        monkeypatch.setattr("weft.core.torch_split.splits_on_host", split)
        w = torch.ones(1, dtype=torch.double, requires_grad=True)
        policy = weft.batched(lambda x: x * w, max_batch_size=2, wait_backward=False, **FULL)
        buffer = torch.zeros(1, 1, dtype=torch.double)
        first, second = call_all(policy, [((array("torch", [[v]]),), {}) for v in (1.0, 10.0)])
        for y, gradient in ((first, 2.0), (second, 3.0)):
            buffer.fill_(gradient)
            y.backward(gradient=buffer)
        buffer.zero_()
        policy.join()
        assert w.grad.item() == 2 * 1 + 3 * 10

    def test_several_calls_of_one_thread(self):
        torch = pytest.importorskip("torch")
        w = torch.ones(1, dtype=torch.double, requires_grad=True)
        policy = weft.batched(lambda x: x * w, max_batch_size=2, **FULL)
        buffer = torch.zeros((), dtype=torch.double)

        async def ask():
            return await asyncio.gather(*(policy.aio(array("torch", [[v]])) for v in (1.0, 10.0)))

        for y, gradient in zip(asyncio.run(ask()), (2.0, 3.0), strict=True):
            buffer.fill_(gradient)
            y.sum().backward(gradient=buffer)
        policy.join()
        assert w.grad.item() == 2 * 1 + 3 * 10

    def test_an_interrupted_wait(self, monkeypatch):
        torch = pytest.importorskip("torch")
        monkeypatch.setattr("weft.core.ticket.HEARTBEAT", 0.01)
        w = torch.ones(1, dtype=torch.double, requires_grad=True)
        policy = weft.batched(lambda x: x * w, max_batch_size=2, **FULL)
        buffers = [torch.full((1, 1), 2.0, dtype=torch.double), torch.full((1, 1), 3.0, dtype=torch.double)]
        results = call_all(policy, [((array("torch", [[v]]),), {}) for v in (1.0, 10.0)])
        first = start(results[0].backward, gradient=buffers[0])
        until(lambda: policy._outstanding.backwards)
        interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
        assert interrupt(ctypes.c_ulong(first.ident), ctypes.py_object(KeyboardInterrupt)) == 1
        assert isinstance(first.end().error, KeyboardInterrupt)
        buffers[0].zero_()
        results[1].backward(gradient=buffers[1])
        assert w.grad.item() == 2 * 1 + 3 * 10

    def test_a_pull_back_that_is_given_up(self):
        sums = []

        def vjp(x):
            return x * 1.0, lambda g: sums.append(float(g.sum())) or g

        policy = weft.batched(lambda x: x, vjp=vjp, max_batch_size=2, **FULL)
        gradients = [rows(2.0), rows(3.0)]

        async def main():
            (_, first), (_, second) = await asyncio.gather(*(policy.aio.vjp(rows(v)) for v in (1.0, 10.0)))
            given_up = asyncio.create_task(first(gradients[0]))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.wait([given_up])
            gradients[0][:] = 0
            return await second(gradients[1])

        assert asyncio.run(main()).item() == 3
        assert sums == [5]
