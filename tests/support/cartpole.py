"""A program of its own: REINFORCE on CartPole by 32 daemon threads, each with one loss for a whole episode.

    python cartpole.py WAY END SECONDS

In WAY "weft" the actors share a batched policy whose gradient deadline is SECONDS, in "plain" each calls the network itself. An
episode is a call for every step and one backward at its end. So a batch is shared by callers whose episodes end at other times, and
their backwards wait for each other in many batches.

END says when the program ends: "joined" when all actors have, "told" when the last backward has returned or raised, "waiting"
when all but one wait in a backward for the one that does not come, "playing" while all of them play.

It prints what became of the backwards: how often each error was raised, without the numbers in its text.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter

import numpy as np
import torch

import weft

ACTORS = 32
PATIENCE = 60.0


def moved(state: np.ndarray, action: int) -> np.ndarray:
    """The state of a cart with a pole 0.02 s later (Barto, Sutton and Anderson, 1983)."""
    _, speed, angle, turn = state
    push = ((10.0 if action else -10.0) + 0.05 * turn**2 * np.sin(angle)) / 1.1
    twist = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
    return state + 0.02 * np.array([speed, push - 0.05 * twist * np.cos(angle) / 1.1, turn, twist])


def episode(policy, random: np.random.Generator) -> torch.Tensor:
    """The loss of one episode: its graph holds the call of every step."""
    state, chances = random.uniform(-0.05, 0.05, 4), []
    while abs(state[0]) < 2.4 and abs(state[2]) < 0.21:
        chance = policy(torch.from_numpy(state[None]).float()).log_softmax(1)[0]
        action = int(random.random() < chance[1].exp().item())
        chances.append(chance[action])
        state = moved(state, action)
    return -(torch.stack(chances) * torch.arange(len(chances), 0, -1.0)).sum()


class Actors:
    """The threads, and what their backwards told."""

    def __init__(self, policy, end: str) -> None:
        self.policy, self.end = policy, end
        self.told: Counter[str] = Counter()
        self.backwards = threading.Semaphore(0)  # that have begun, or where the program waits for their end, have ended
        self.losses: list[torch.Tensor] = []
        self.threads = [threading.Thread(target=self.play, args=(i,), daemon=True) for i in range(ACTORS)]

    def play(self, me: int) -> None:
        """An episode, or with `end` "playing" one after the other."""
        random = np.random.default_rng(me)
        while True:
            loss = episode(self.policy, random)
            if self.end == "waiting":
                if me == 0:
                    self.losses.append(loss)  # kept, and never taken back
                    return
                self.backwards.release()
            try:
                loss.backward()
                self.told["gone back"] += 1
            except Exception as error:
                self.told[re.sub(r"\d[\d.]*", "N", f"{type(error).__name__}: {error}")] += 1
            if self.end in ("told", "playing"):
                self.backwards.release()
            if self.end != "playing":
                return

    def run(self) -> None:
        """Start, and wait for the time to end."""
        for thread in self.threads:
            thread.start()
        if self.end == "joined":
            for thread in self.threads:
                thread.join(PATIENCE)
                assert not thread.is_alive(), f"no end within {PATIENCE} s"
            return
        for _ in range(ACTORS - (self.end == "waiting")):
            assert self.backwards.acquire(timeout=PATIENCE), f"no end within {PATIENCE} s"
        if self.end == "waiting":
            time.sleep(0.3)


def main() -> None:
    """Play."""
    way, end, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    policy = weft.batched(net, max_batch_size=32, gradient_deadline=float(seconds)) if way == "weft" else net
    actors = Actors(policy, end)
    actors.run()
    print(json.dumps(dict(actors.told)), flush=True)


if __name__ == "__main__":
    main()
