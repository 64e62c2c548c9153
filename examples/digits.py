"""Handwritten digits, served: `weft serve examples/digits.py`, then draw one at http://127.0.0.1:8000/.

A small network of NumPy with weft's batch norm learns scikit-learn's 1,797 digits in a second, when the server loads it: 8 x 8
pixels from 0 to 16, a hidden layer, ten classes. Run as a script, it says how well it does on digits it has not seen.
"""

import numpy as np
from sklearn.datasets import load_digits

import weft
import weft.serve

HIDDEN, STEPS, BATCH = 128, 600, 64


class Network:
    """Two layers with batch norm and a ReLU between them."""

    def __init__(self, rng):
        self.first = rng.normal(0, np.sqrt(2 / 64), (64, HIDDEN)).astype(np.float32)
        self.scale, self.shift = np.ones(HIDDEN, np.float32), np.zeros(HIDDEN, np.float32)
        self.mean, self.variance = np.zeros(HIDDEN, np.float32), np.ones(HIDDEN, np.float32)
        self.second = rng.normal(0, np.sqrt(1 / HIDDEN), (HIDDEN, 10)).astype(np.float32)
        self.bias = np.zeros(10, np.float32)

    def logits(self, pixels):
        """Return the scores of the ten digits, with the statistics of the training."""
        hidden = weft.raw_ops.FusedBatchNormV3(
            (pixels / 16 @ self.first)[:, None, None, :],
            self.scale,
            self.shift,
            self.mean,
            self.variance,
            is_training=False,
        ).y[:, 0, 0, :]
        return np.maximum(hidden, 0) @ self.second + self.bias

    def train(self, pixels, labels, rng):
        """Learn by gradient descent with momentum; batch norm's gradient is weft's."""
        names = ("first", "scale", "shift", "second", "bias")
        speed = {name: np.zeros_like(getattr(self, name)) for name in names}
        for step in range(STEPS):
            chosen = rng.integers(len(pixels), size=BATCH)
            x, wanted = pixels[chosen] / 16, labels[chosen]
            normal, pull_back = weft.vjp(
                weft.raw_ops.FusedBatchNormV3,
                (x @ self.first)[:, None, None, :],
                self.scale,
                self.shift,
                np.zeros(0, np.float32),
                np.zeros(0, np.float32),
            )
            hidden = normal.y[:, 0, 0, :]
            active = np.maximum(hidden, 0)
            error = softmax(active @ self.second + self.bias)
            error[np.arange(BATCH), wanted] -= 1
            error /= BATCH
            back = pull_back(((error @ self.second.T) * (hidden > 0))[:, None, None, :])
            gradients = {
                "first": x.T @ back["x"][:, 0, 0, :],
                "scale": back["scale"],
                "shift": back["offset"],
                "second": active.T @ error,
                "bias": error.sum(axis=0),
            }
            rate = 0.3 * (1 - step / STEPS)
            for name in names:
                speed[name] = 0.9 * speed[name] - rate * gradients[name]
                setattr(self, name, getattr(self, name) + speed[name])
            self.mean += 0.05 * (normal.batch_mean - self.mean)
            self.variance += 0.05 * (normal.batch_variance - self.variance)


def softmax(logits):
    """Return the probabilities of each row."""
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def train():
    """Return a trained network, and its accuracy on a quarter of the digits that it has not seen."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels.astype(np.float32)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(pixels))
    seen, unseen = order[450:], order[:450]
    network = Network(rng)
    network.train(pixels[seen], labels[seen], rng)
    return network, float((network.logits(pixels[unseen]).argmax(axis=1) == labels[unseen]).mean())


def make():
    """Train, and return the function to serve: whole batches in, a digit and ten probabilities for each row out."""
    network, accuracy = train()

    def digits(pixels):
        p = softmax(network.logits(pixels))
        return {"digit": p.argmax(axis=1), "probabilities": p, "accuracy": accuracy}

    return digits


model = weft.serve.model(
    factory=make, name="digits", example={"pixels": np.zeros((1, 64), np.float32)}, max_batch_size=64
)

if __name__ == "__main__":
    print(f"{100 * train()[1]:.1f} % of 450 unseen digits are right")
