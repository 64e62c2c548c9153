"""An ensemble of readouts on one recorded forward pass, each with gradients of its own.

The states of a loop are computed and kept once. Every member of the ensemble has its own loss on them; with the number
of members prepended, the gradient array of the states keeps their gradients apart, and one walk backwards gives each
member's gradient of the shared weights.
"""

from __future__ import annotations

import numpy as np

import weft

MEMBERS, STEPS, WIDTH = 3, 7, 5


def forward(start: np.ndarray, w: np.ndarray) -> weft.TensorArray:
    """The states h[0], ..., h[STEPS] of h[t + 1] = tanh(W h[t])."""
    states = weft.TensorArray(size=STEPS + 1).append(start)
    for _ in range(STEPS):
        start = np.tanh(w @ start)
        states.append(start)
    return states


def ensemble(start: np.ndarray, w: np.ndarray, readouts: np.ndarray) -> np.ndarray:
    """For every member, the gradient of sum over t of (readout . h[t]) ** 2 with respect to W."""
    states = forward(start, w)
    gradient = states.gradient(prepend=[MEMBERS])
    for t, h in enumerate(states):
        gradient.write(t, 2 * (readouts @ h)[:, None] * readouts)  # what each loss says of h[t] itself
    found = np.zeros((MEMBERS, WIDTH, WIDTH))
    for t in range(STEPS, 0, -1):
        g = gradient.read(t) * (1 - states.read(t) ** 2)
        found += np.einsum("mi,j->mij", g, states.read(t - 1))
        gradient.write(t - 1, g @ w)  # adds to what the losses have put there
    return found


def member_by_member(start: np.ndarray, w: np.ndarray, readouts: np.ndarray) -> np.ndarray:
    """The same, by a forward and a backward pass for each member."""
    found = []
    for readout in readouts:
        states = list(forward(start, w))
        total, g = np.zeros_like(w), 2 * (readout @ states[STEPS]) * readout
        for t in range(STEPS, 0, -1):
            inner = g * (1 - states[t] ** 2)
            total += np.outer(inner, states[t - 1])
            g = inner @ w + 2 * (readout @ states[t - 1]) * readout
        found.append(total)
    return np.stack(found)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    start, w, readouts = rng.normal(size=WIDTH), rng.normal(size=(WIDTH, WIDTH)), rng.normal(size=(MEMBERS, WIDTH))
    together, apart = ensemble(start, w, readouts), member_by_member(start, w, readouts)
    np.testing.assert_allclose(together, apart, rtol=1e-9, atol=1e-12)
    print(f"gradient norms of {MEMBERS} members: {np.round(np.linalg.norm(together, axis=(1, 2)), 2)}")
    print(f"largest difference from one pass per member: {np.abs(together - apart).max():.1e}")
