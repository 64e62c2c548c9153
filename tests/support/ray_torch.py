"""What tests of steps and weights share: a small network, an optimizer, and looks at replicas."""

from __future__ import annotations

import torch


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def state_of(replica):
    return [x.clone() for x in replica.weights.state()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def on_each(deployment, x):
    """A backward of these rows on every replica."""
    for replica in deployment.replicas.values():
        seen = replica.batcher.statistics().backwards
        while replica.batcher.statistics().backwards == seen:
            deployment.handle(x).square().sum().backward()
