"""Remote calls with the data that services have: objects, unequal lengths, ragged tensors; replicas in threads of this process."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.libraries import need

need("msgspec")
need("optree")

from support.ray_local import local  # noqa: E402

import weft  # noqa: E402

PAD = {"tokens": weft.Pad(multiple_of=4)}


def batch_of(handle, calls):
    """The results of calls that share a batch."""
    with ThreadPoolExecutor(len(calls)) as threads:
        found = list(threads.map(lambda call: call(handle), calls))
    assert handle.statistics().batches == 1
    return found


def times_three(forward):
    """A function that makes a module with the weight 3 and this forward."""
    need("torch")
    import torch

    def make():
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(torch.tensor(3.0))
        module.forward = functools.partial(forward, module)
        return module

    return make


def deployed(make, size, **options):
    return local(make, max_batch_size=size, max_wait=30.0, **options)


def test_items():
    def make():
        return lambda text: (np.array([len(each) for each in text]), [each.upper() for each in text])

    with deployed(make, 3, items=("text",), rows=False) as deployment:
        found = batch_of(deployment.handle, [lambda policy, text=text: policy(text) for text in ("a", "bcd", "ef")])
    assert found == [(1, "A"), (3, "BCD"), (2, "EF")]


def test_results_for_each_row_and_for_all():
    def make():
        def model(x):
            rows = [np.ones(int(n)) for n in x[:, 0]]
            return {
                "rows": weft.PerRow(rows),
                "all": weft.Shared({"size": [len(x)]}),
                "text": [str(n) for n in x[:, 0]],
            }

        return model

    with deployed(make, 2) as deployment:
        found = batch_of(deployment.handle, [lambda policy, n=n: policy(np.full((1, 1), n)) for n in (2, 3)])
    for n, own in zip((2, 3), found, strict=True):
        assert [len(row) for row in own["rows"]] == [n]
        assert (own["all"], own["text"]) == ({"size": [2]}, [str(n)])


def test_a_shared_number_first():
    with local(lambda: lambda scale, x: scale * x, shared=["scale"]) as deployment:
        assert deployment.handle(np.array(3.0), np.ones((2, 1))).tolist() == [[3.0], [3.0]]


@pytest.mark.parametrize("cut", [(0,), {"tokens": [0]}])
def test_lengths(cut):
    """What `cut` names are the results of the model."""

    def make():
        return lambda tokens, n: (tokens * 2, n, tokens.sum(1))

    arrays = [np.arange(1.0, 1 + length)[None] for length in (2, 5, 3)]
    with deployed(make, 3, pad=PAD, pass_lengths="n", cut=cut) as deployment:
        found = batch_of(deployment.handle, [lambda policy, x=x: policy(x) for x in arrays])
    for x, (double, n, total) in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(double, 2 * x)
        assert (n.tolist(), total.tolist()) == ([x.shape[1]], [x.sum()])


def test_a_named_result_is_cut():
    def make():
        return lambda tokens: {"tokens": tokens, "sum": tokens.sum(1)}

    with deployed(make, 2, pad=PAD, cut="tokens") as deployment:
        found = batch_of(deployment.handle, [lambda policy, n=n: policy(np.ones((1, n))) for n in (1, 6)])
    assert [(own["tokens"].shape, own["sum"].item()) for own in found] == [((1, 1), 1), ((1, 6), 6)]


def test_gradients_of_lengths():
    make = times_three(lambda module, tokens, n: tokens * module.w * n[:, None])
    import torch

    def call(policy, length):
        x = torch.arange(float(length))[None].requires_grad_()
        policy(x).sum().backward()
        return x.grad

    with deployed(make, 2, pad=PAD, pass_lengths="n", cut=True) as deployment:
        found = batch_of(deployment.handle, [lambda policy, n=n: call(policy, n) for n in (2, 5)])
    assert [x.tolist() for x in found] == [[[6.0] * 2], [[15.0] * 5]]


def test_ragged():
    def make():
        return lambda tokens: tokens.with_values(tokens.flat_values * 2)

    given = [np.arange(3.0)[None], weft.RaggedTensor.from_rows([[1.0], [2.0, 3.0]])]
    with deployed(make, 3, ragged=("tokens",)) as deployment:
        found = batch_of(deployment.handle, [lambda policy, x=x: policy(x) for x in given])
    assert [x.to_list() for x in found] == [[[0.0, 2.0, 4.0]], [[2.0], [4.0, 6.0]]]


def test_gradients_of_ragged():
    make = times_three(lambda module, tokens: (tokens.with_values(tokens.flat_values * module.w), tokens.sum()))
    import torch

    def call(policy, values, lengths):
        x = torch.tensor(values, requires_grad=True)
        own, total = policy(weft.RaggedTensor.from_row_lengths(x, lengths))
        (own.flat_values.sum() + total.sum()).backward()
        return own.to_list(), total.tolist(), x.grad.tolist()

    with deployed(make, 3, ragged=("tokens",)) as deployment:
        calls = [lambda policy: call(policy, [1.0, 2.0], [2]), lambda policy: call(policy, [3.0, 4.0, 5.0], [1, 2])]
        found = batch_of(deployment.handle, calls)
    assert found == [
        ([[3.0, 6.0]], [3.0], [4.0] * 2),
        ([[9.0], [12.0, 15.0]], [3.0, 9.0], [4.0] * 3),
    ]
