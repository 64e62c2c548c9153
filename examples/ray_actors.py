"""Processes that learn one policy together on Ray: each calls the remote policy and goes back through it, then one step for all."""

from __future__ import annotations

import ray
import torch

import weft.ray

WANTED = torch.tensor([[1.0], [-2.0], [0.5]])


def make_policy() -> torch.nn.Module:
    """Return the model; runs on each replica."""
    return torch.nn.Linear(3, 1, bias=False)


@ray.remote(num_cpus=0)
class Worker:
    """A process with rows of its own."""

    def __init__(self, policy: weft.ray.RemoteBatcher, seed: int) -> None:
        self.policy, self.random = policy, torch.Generator().manual_seed(seed)

    def learn(self) -> float:
        """Go back through one call of the policy; return the loss."""
        x = torch.randn(8, 3, generator=self.random)
        loss = (self.policy(x) - x @ WANTED).square().mean()
        loss.backward()
        return loss.item()


def main() -> None:
    """Train for 30 steps with four workers and two replicas."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    policy = weft.ray.deploy(make_policy, replicas=2, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    workers = [Worker.remote(policy, seed) for seed in range(4)]
    for step in range(1, 31):
        losses = ray.get([worker.learn.remote() for worker in workers])
        policy.step(version=step)
        if step % 10 == 0:
            print(f"step {step}: loss {sum(losses) / len(losses):.4f}")
    error = (policy.state_dict()["weight"].T - WANTED).abs().max().item()
    seen = policy.statistics()
    print(
        f"{seen.calls} calls in {seen.batches} batches, {seen.backwards} backwards; largest error of a weight {error:.3f}"
    )
    policy.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
