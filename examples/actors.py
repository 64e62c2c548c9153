"""32 actors train one network: sequences of any length, one forward and one backward pass per step for all of them.

Each actor is a thread. In each step it gets a sequence, calls the shared encoder, computes its own loss and calls `backward()`.
The sequences are ragged rows. `Batch` collects the rows of all actors and gives the batch to one of them. That actor runs the
encoder: batch norm, then a recurrent loop over a TensorArray. `Unbatch` returns each actor's output. `backward()` goes the other
way: it collects the actors' gradients, one actor runs the encoder's backward pass, and the parameters get the gradient of the
sum of all losses.

Actors that run the encoder each for itself are slower and learn nothing: batch norm over a single sequence removes the sums that
the task asks for.

    python examples/actors.py --actors 32 --steps 60
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import weft
import weft.torch
from weft import RaggedTensor, raw_ops

FEATURES, WIDTH, LONGEST = 4, 32, 20
MINUTE = 60_000_000  # microseconds


class Encoder(torch.nn.Module):
    """Which feature has the largest sum over a sequence, as logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = torch.nn.Linear(FEATURES, WIDTH)
        self.norm = weft.torch.BatchNorm(WIDTH)
        self.again = torch.nn.Linear(WIDTH, WIDTH)
        self.outward = torch.nn.Linear(WIDTH, FEATURES)

    def forward(self, sequences: RaggedTensor) -> torch.Tensor:
        # Layers that act step by step act on the flat values: no padding, and none in the statistics.
        inputs = sequences.with_values(self.norm(self.inward(sequences.flat_values)))
        padded, lengths = inputs.to_padded().values, sequences.row_lengths()
        steps = weft.TensorArray(size=padded.shape[1]).unstack(padded.transpose(0, 1))
        states = weft.TensorArray(size=padded.shape[1], clear_after_read=False)
        state = torch.zeros(len(lengths), WIDTH, dtype=padded.dtype)
        for t in range(padded.shape[1]):
            state = state + torch.tanh(self.again(state) + steps.read(t)) / 4
            states.write(t, state)
        last = states.stack()[lengths - 1, torch.arange(len(lengths))]
        return self.outward(last)


class Data:
    """What each actor meets in each step: the same in every run."""

    def __init__(self, actors: int, steps: int) -> None:
        rng = torch.Generator().manual_seed(1)
        self.sequences, self.labels = [], []
        for _ in range(steps):
            lengths = torch.randint(2, LONGEST + 1, (actors,), generator=rng).tolist()
            self.sequences.append([torch.randn(n, FEATURES, generator=rng, dtype=torch.float64) for n in lengths])
            self.labels.append([s.sum(0).argmax() for s in self.sequences[-1]])


class Training:
    """An encoder, its optimizer, and the loss of every step."""

    def __init__(self, data: Data) -> None:
        torch.manual_seed(0)
        self.data, self.losses = data, []
        self.encoder = Encoder().double()
        self.optimizer = torch.optim.SGD(self.encoder.parameters(), lr=0.03, momentum=0.9)
        self.actors = len(data.labels[0])

    def loss(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, label[None]) / self.actors

    def step(self, loss: float) -> None:
        """What comes after all gradients."""
        self.losses.append(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


def together(sequence: torch.Tensor, training: Training) -> torch.Tensor:
    """One actor's logits, from the batch of all."""
    row = RaggedTensor.from_rows([sequence]).to_variant()
    batch = raw_ops.Batch([row], 1, training.actors, MINUTE, MINUTE)
    (rows,) = batch.batched_tensors
    if len(rows):  # one actor has them all
        logits = training.encoder(RaggedTensor.from_variant(rows))
    else:
        logits = torch.empty(0, FEATURES, dtype=sequence.dtype)
    return raw_ops.Unbatch(logits, batch.batch_index, batch.id, MINUTE)


def alone(sequence: torch.Tensor, training: Training) -> torch.Tensor:
    """One actor's logits, by itself."""
    return training.encoder(RaggedTensor.from_rows([sequence]))


Ask = Callable[[torch.Tensor, Training], torch.Tensor]


def run(training: Training, ask: Ask, told: Callable[[], None] = lambda: None) -> float:
    """Train with a thread per actor; the seconds it took."""
    losses = [0.0] * training.actors

    def done() -> None:  # when the last actor has its gradients, in its thread
        training.step(sum(losses))
        told()

    barrier = threading.Barrier(training.actors, done)

    def actor(i: int) -> None:
        try:
            for sequences, labels in zip(training.data.sequences, training.data.labels, strict=True):
                loss = training.loss(ask(sequences[i], training), labels[i])
                loss.backward()
                losses[i] = loss.item()
                barrier.wait()
        except BaseException:
            barrier.abort()  # nobody waits for an actor that has failed
            raise

    threads = [threading.Thread(target=actor, args=(i,)) for i in range(training.actors)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def by_hand(training: Training) -> None:
    """Train in one thread, with the batch of each step made by hand."""
    for sequences, labels in zip(training.data.sequences, training.data.labels, strict=True):
        logits = training.encoder(RaggedTensor.from_rows(sequences))
        loss = sum(training.loss(one[None], label) for one, label in zip(logits, labels, strict=True))
        loss.backward()
        training.step(loss.item())


class Watch:
    """An observer that counts batches and their callers."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def batch_ran(self, event: weft.BatchRan) -> None:
        self.sizes.append(len(event.rows))

    def call_refused(self, op: str, name: str, error: Exception) -> None:
        raise error


def main() -> None:
    """Train both ways, and show what it took."""
    parser = argparse.ArgumentParser(description="Actors that share a batch, forwards and backwards.")
    parser.add_argument("--actors", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    data, torch_threads = Data(given.actors, given.steps), torch.get_num_threads()
    torch.set_num_threads(1)  # the actors are threads enough
    ways: dict[str, Ask] = {"one batch for all": together, "each by itself": alone}
    table = Table("", "batches", "actors in each", "steps/s", "loss, first", "last")
    with weft.scope(), weft.observe(Watch()) as watch, Progress(transient=True) as progress:
        for way, ask in ways.items():
            training, bar = Training(data), progress.add_task(way, total=given.steps)
            watch.sizes.clear()
            seconds = run(training, ask, lambda bar=bar: progress.advance(bar))
            sizes = f"{min(watch.sizes)} to {max(watch.sizes)}" if watch.sizes else "1"
            batches = len(watch.sizes) or given.actors * given.steps
            first, last = training.losses[0], sum(training.losses[-5:]) / len(training.losses[-5:])
            table.add_row(way, f"{batches}", sizes, f"{given.steps / seconds:.1f}", f"{first:.2f}", f"{last:.2f}")
    torch.set_num_threads(torch_threads)
    Console().print(table)


if __name__ == "__main__":
    main()
