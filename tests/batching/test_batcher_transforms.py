"""Batched calls in the middle of torch's transforms: refused before they join a batch, which goes on without them."""

from __future__ import annotations

import pytest
from support.batched_calls import FULL
from support.callers import start
from support.libraries import need

import weft
from weft.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def _scope():
    need("torch")
    with weft.scope():
        yield


def vmap(policy, x):
    import torch

    return torch.vmap(policy)(x)


def grad(policy, x):
    import torch

    return torch.func.grad(lambda x: policy(x).sum())(x)


def forward(policy, x):
    import torch.autograd.forward_ad as fw

    with fw.dual_level():
        return policy(fw.make_dual(x, x))


def fake(policy, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return policy(FakeTensorMode().from_tensor(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("transform", [vmap, grad, forward, fake])
def test_it_is_refused_and_costs_nobody_anything(transform):
    import torch

    policy = weft.batched(lambda x: x * 2, max_batch_size=4, **FULL)
    other = start(policy, torch.ones(2, 3))
    with pytest.raises(InvalidArgumentError, match=r"under torch\.func|values now, got a FakeTensor"):
        transform(policy, torch.ones(2, 2, 3) if transform is vmap else torch.ones(2, 3))
    assert policy.statistics().rejected == 1
    policy(torch.ones(2, 3))
    assert other.answer().tolist() == [[2.0] * 3] * 2


def test_inside_the_function_it_works():
    import torch

    policy = weft.batched(lambda x: torch.vmap(torch.func.grad(lambda row: (row**3).sum()))(x))
    assert policy(torch.tensor([[1.0], [2.0]])).tolist() == [[3.0], [12.0]]
