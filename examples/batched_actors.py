"""Actors that learn together: each plays in its own thread, one policy decides for all of them and learns from all of them.

`policy(state)` joins the states of all actors into one forward; each actor computes its own loss of its own rows and calls
`backward()`, which returns when the one backward of the batch has run. So every step is one forward and one backward, whatever
the number of actors, and the gradient is that of the sum of their losses.

The game: an actor stands in a plane and gets a reward for the part of its step that leads to its goal.
"""

import threading
import time

import torch

import weft

ACTORS, STEPS = 16, 40
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

# All actors are there in every step: wait for them, though not for ever.
policy = weft.batched(net, max_batch_size=ACTORS, max_wait=5.0)
losses = torch.zeros(STEPS, ACTORS)


def learn():
    """One of the actors calls it when all have gone back."""
    optimizer.step()
    optimizer.zero_grad()


step_done = threading.Barrier(ACTORS, action=learn, timeout=60)


def actor(me):
    """Play and learn: REINFORCE with a Gaussian policy around the mean that the network gives."""
    random = torch.Generator().manual_seed(me)
    for step in range(STEPS):
        position, goal = torch.randn(1, 2, generator=random), torch.randn(1, 2, generator=random)
        mean = policy(torch.cat([position, goal], dim=1))  # one row of a batch of all actors'
        with torch.no_grad():
            move = mean + 0.3 * torch.randn(1, 2, generator=random)
            way = goal - position
            missed = (move - way).square().sum()
            baseline = (mean - way).square().sum() + 0.18  # what the noise alone costs
        log_probability = -(move - mean).square().sum() / (2 * 0.3**2)
        (log_probability * (missed - baseline)).backward()  # waits for the batch's one backward
        losses[step, me] = missed
        step_done.wait()


started = time.perf_counter()
threads = [threading.Thread(target=actor, args=(i,), name=f"actor {i}") for i in range(ACTORS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
seconds = time.perf_counter() - started

told = policy.statistics()
first, last = losses[:5].mean().item(), losses[-5:].mean().item()
print(
    f"{ACTORS} actors, {STEPS} steps: {told.calls} calls, {told.batches} forwards, {told.backwards} backwards, {seconds:.2f} s"
)
print(f"missed by {first:.2f} in the first five steps, by {last:.2f} in the last five")
assert told.batches == told.backwards == STEPS
assert last < first / 2
