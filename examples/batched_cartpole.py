"""32 actors learn to balance a pole on a cart, in threads that share one network.

    python examples/batched_cartpole.py [--rounds 30]

In every round each actor plays an episode: the calls of all actors, one state each, share the runs of the network. Then each actor
computes the loss of its own episode, in one call with a row for each step, and calls `backward()`. The episodes have different
numbers of rows; all that come together share one forward and one backward. The last one to go back takes a step of the
optimizer: the gradient is that of the sum of all losses (REINFORCE, with returns that are normalized over all actors).
"""

import argparse
import threading
import time

import numpy as np
import torch

import weft

ACTORS, LONGEST = 32, 200
arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=30)
ROUNDS = arguments.parse_args().rounds

torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
policy = weft.batched(net, max_batch_size=ACTORS * LONGEST)
returns = [np.zeros(0)] * ACTORS
steps = []  # the mean length of the episodes of each round


def moved(state, action):
    """Return the state of the cart 0.02 s later (Barto, Sutton and Anderson, 1983)."""
    _, speed, angle, turn = state
    push = ((10.0 if action else -10.0) + 0.05 * turn**2 * np.sin(angle)) / 1.1
    twist = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
    return state + 0.02 * np.array([speed, push - 0.05 * twist * np.cos(angle) / 1.1, turn, twist])


def episode(random):
    """Return the states and actions of one episode; the pole has fallen at its end, or stood long enough."""
    state = random.uniform(-0.05, 0.05, 4)
    states, actions = [], []
    while len(states) < LONGEST and abs(state[0]) < 2.4 and abs(state[2]) < 0.21:
        states.append(torch.from_numpy(state).float())
        with torch.no_grad():
            chance = policy(states[-1][None]).softmax(1)[0, 1].item()  # one row of a batch of all actors'
        actions.append(int(random.random() < chance))
        state = moved(state, actions[-1])
    return torch.stack(states), torch.tensor(actions)


def normalize():
    """All episodes of a round are over: normalize their returns."""
    steps.append(np.mean([len(own) for own in returns]))
    whole = np.concatenate(returns)
    for i, own in enumerate(returns):
        returns[i] = (own - whole.mean()) / (whole.std() + 1e-6) / len(whole)


def learn():
    """All actors have gone back."""
    optimizer.step()
    optimizer.zero_grad()


all_played = threading.Barrier(ACTORS, normalize, timeout=120)
all_went_back = threading.Barrier(ACTORS, learn, timeout=120)


def actor(me):
    random = np.random.default_rng(me)
    for _ in range(ROUNDS):
        states, actions = episode(random)
        discounted = 0.98 ** np.arange(len(states))
        returns[me] = np.cumsum(discounted[::-1])[::-1] / discounted
        all_played.wait()
        log_chances = policy(states).log_softmax(1)[torch.arange(len(states)), actions]  # a row for each step
        (-(log_chances * torch.from_numpy(returns[me].copy())).sum()).backward()  # returns when the batch has gone back
        all_went_back.wait()


started = time.perf_counter()
threads = [threading.Thread(target=actor, args=(i,), name=f"actor {i}") for i in range(ACTORS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
seconds = time.perf_counter() - started

told = policy.statistics()
print(
    f"{ACTORS} actors, {ROUNDS} rounds: {told.calls} calls in {told.batches} batches, {told.backwards} backwards, {seconds:.1f} s"
)
print("the pole stood for so many steps, in the mean of each round:", *(round(mean) for mean in steps))
if ROUNDS >= 30:
    assert np.mean(steps[-3:]) > 3 * steps[0]
