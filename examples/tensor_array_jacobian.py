"""The Jacobian of a loop's last state with respect to the input of every step, from one backward pass.

The inputs stand in an array, one element a step. With the number of outputs prepended, its gradient array has room for
one gradient for each output, and a backward pass over all of them at once fills it.
"""

from __future__ import annotations

import numpy as np

import weft

STEPS, WIDTH = 6, 4


def forward(inputs: weft.TensorArray, w: np.ndarray) -> list[np.ndarray]:
    """The states of h[t + 1] = tanh(W h[t] + x[t])."""
    states = [np.zeros(WIDTH)]
    for x in inputs:
        states.append(np.tanh(w @ states[-1] + x))
    return states


def jacobian(inputs: np.ndarray, w: np.ndarray) -> np.ndarray:
    """d h[STEPS] / d x[t] for every t: an array of shape [STEPS, WIDTH, WIDTH]."""
    array = weft.TensorArray(size=STEPS).unstack(inputs)
    states = forward(array, w)
    gradient = array.gradient(prepend=[WIDTH])
    g = np.eye(WIDTH)  # one row for each output
    for step in reversed(range(STEPS)):
        g = g * (1 - states[step + 1] ** 2)
        gradient.write(step, g)
        g = g @ w
    return gradient.stack()


def output_by_output(inputs: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The same, by a pass of its own for each output, its gradients in an accumulator of its own."""
    found = np.empty((STEPS, WIDTH, WIDTH))
    for output in range(WIDTH):
        array = weft.TensorArray(size=STEPS).unstack(inputs)
        states, gradient = forward(array, w), array.gradient(f"output {output}")
        g = np.zeros(WIDTH)
        g[output] = 1
        for step in reversed(range(STEPS)):
            g = g * (1 - states[step + 1] ** 2)
            gradient.write(step, g)
            g = g @ w
        found[:, output] = gradient.stack()
    return found


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    inputs, w = rng.normal(size=(STEPS, WIDTH)), rng.normal(size=(WIDTH, WIDTH))
    together, apart = jacobian(inputs, w), output_by_output(inputs, w)
    np.testing.assert_allclose(together, apart, rtol=1e-9, atol=1e-12)
    print(f"norms of d h[{STEPS}] / d x[t]: {np.round(np.linalg.norm(together, axis=(1, 2)), 3)}")
    print(f"largest difference from one pass per output: {np.abs(together - apart).max():.1e}")
