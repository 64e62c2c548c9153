"""examples/actors.py, small: what the actors learn together is what one thread learns from batches made by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.libraries import need

import weft

PATH = Path(__file__).parent.parent / "examples" / "actors.py"


@pytest.fixture
def actors():
    need("torch")
    need("rich")
    spec = importlib.util.spec_from_file_location("actors", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with weft.scope(), weft.gradient_deadline(20):
        yield module


def test_the_parameters_are_those_of_the_sequential_computation(actors):
    import torch

    data = actors.Data(actors=6, steps=5)
    shared, sequential = actors.Training(data), actors.Training(data)
    with weft.observe(actors.Watch()) as watch:
        actors.run(shared, actors.together)
    actors.by_hand(sequential)
    assert watch.sizes == [6] * 5
    state = sequential.encoder.state_dict()
    for name, value in shared.encoder.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shared.losses, sequential.losses, rtol=1e-9, atol=1e-9)


def test_the_loss_falls(actors):
    training = actors.Training(actors.Data(actors=16, steps=40))
    actors.run(training, actors.together)
    assert sum(training.losses[-5:]) < 0.8 * sum(training.losses[:5])


def test_an_actor_that_fails_ends_the_training(actors, monkeypatch):
    import threading

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    training = actors.Training(actors.Data(actors=4, steps=3))

    def ask(sequence, training):
        if sequence is training.data.sequences[1][2]:
            raise ValueError("no")
        return actors.alone(sequence, training)

    actors.run(training, ask)
    assert len(training.losses) == 1
