"""A tree search whose threads share one value function: every leaf is evaluated in a batch with the other threads' leaves.

Nim: players take one to three stones from one pile, and who takes the last stone wins. The threads walk down one tree of
positions, one thread at a time; a virtual loss, as in AlphaZero, sends them to different leaves. Each asks for the value of its
leaf, one row, and adds it to the positions on its path. `value` runs on all rows that wait when its last run has ended.
"""

import math
import threading

import numpy as np

import weft

THREADS, VISITS = 24, 2000
START = (5, 3, 1)

rng = np.random.default_rng(0)
layers = [rng.standard_normal((3, 1024)), rng.standard_normal((1024, 1024)) / 32]


@weft.batched(rows=False, max_batch_size=THREADS)
def value(piles):
    """The value of positions for the player to move: a guess by an untrained network, which costs as much as a trained one."""
    work = np.tanh(piles @ layers[0])
    for _ in range(4):
        work = np.tanh(work @ layers[1])
    return work.mean(axis=1)


def moves(piles):
    """The positions that a player can leave."""
    return [(*piles[:i], piles[i] - n, *piles[i + 1 :]) for i in range(3) for n in (1, 2, 3) if n <= piles[i]]


class Position:
    """A node of the tree: what has been seen of a position, from the point of view of the player to move."""

    def __init__(self, piles):
        self.piles, self.visits, self.total = piles, 0, 0.0
        self.children = None

    def best(self):
        """The child to visit next. A position that is good for its mover is bad for us; children with few visits come first."""
        return max(self.children, key=lambda child: child.score(self.visits))

    def score(self, visits_of_parent):
        if not self.visits:
            return math.inf
        return -self.total / self.visits + 1.4 * math.sqrt(math.log(visits_of_parent + 1) / self.visits)


root = Position(START)
tree = threading.Lock()  # for the walk; the evaluation is outside it
left = iter(range(VISITS))


def walk():
    """Return the path from the root to a leaf; each position on it counts as a loss until the leaf's value is known."""
    path = [root]
    while path[-1].children:
        path.append(path[-1].best())
    if path[-1].children is None:
        path[-1].children = [Position(piles) for piles in moves(path[-1].piles)]
    for position in path:
        position.visits += 1
        position.total += 1
    return path


def search():
    """Visit leaves until there have been enough."""
    while True:
        with tree:
            if next(left, None) is None:
                return
            path = walk()
        leaf = path[-1]
        guess = -1.0  # no stones are left: the player to move has lost
        if leaf.children:
            guess = float(value(np.array(leaf.piles, np.float64)))
        with tree:
            for position in reversed(path):
                position.total += guess - 1
                guess = -guess


threads = [threading.Thread(target=search) for _ in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

told = value.statistics()
best = max(root.children, key=lambda child: child.visits)
print(
    f"{VISITS} visits by {THREADS} threads: {told.calls} leaves evaluated in {told.batches} runs, {told.mean_size:.1f} to a run"
)
print(f"from {START} to move: leave", best.piles, f"({best.visits} visits, worth {-best.total / best.visits:+.2f})")
a, b, c = (n % 4 for n in best.piles)
assert a ^ b ^ c == 0, "a player who knows Nim leaves such a position"
