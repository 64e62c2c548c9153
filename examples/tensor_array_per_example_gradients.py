"""The gradient of a recurrent loop for every example of a batch, from one backward pass.

The weights stand in an array and are read at every step. A plain gradient array would sum what the steps send back
over the whole batch; made with the batch size prepended, it keeps one sum for each example. That is what clipping for
differential privacy, influence functions and hard-example mining need.
"""

from __future__ import annotations

import numpy as np

import weft

BATCH, STEPS, WIDTH = 6, 8, 5


def forward(weight: weft.TensorArray, inputs: np.ndarray) -> list[np.ndarray]:
    """The states of h[t + 1] = tanh(h[t] W + x[t]), for all rows of a batch at once."""
    states = [np.zeros((inputs.shape[1], WIDTH))]
    for x in inputs:
        states.append(np.tanh(states[-1] @ weight.read(0) + x))
    return states


def per_example(inputs: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The gradients of sum(h[STEPS] ** 2) of every example with respect to the weights."""
    weight = weft.TensorArray(size=1).write(0, w)
    states = forward(weight, inputs)
    gradient = weight.gradient(prepend=[inputs.shape[1]])
    g = 2 * states[-1]
    for before, after in zip(states[-2::-1], states[:0:-1], strict=True):
        g = g * (1 - after**2)
        gradient.write(0, np.einsum("bi,bj->bij", before, g))  # adds up over the steps, not over the examples
        g = g @ w.T
    return gradient.read(0)


def one_by_one(inputs: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The same, by one backward pass for each example."""
    found = []
    for example in range(inputs.shape[1]):
        states = forward(weft.TensorArray(size=1).write(0, w), inputs[:, example : example + 1])
        total, g = np.zeros_like(w), 2 * states[-1]
        for before, after in zip(states[-2::-1], states[:0:-1], strict=True):
            g = g * (1 - after**2)
            total += before.T @ g
            g = g @ w.T
        found.append(total)
    return np.stack(found)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    inputs, w = rng.normal(size=(STEPS, BATCH, WIDTH)), rng.normal(size=(WIDTH, WIDTH))
    together, apart = per_example(inputs, w), one_by_one(inputs, w)
    np.testing.assert_allclose(together, apart, rtol=1e-9, atol=1e-12)
    norms = np.linalg.norm(together, axis=(1, 2))
    print(f"gradient norms of {BATCH} examples: {np.round(norms, 2)}")
    print(f"largest difference from one pass per example: {np.abs(together - apart).max():.1e}")
