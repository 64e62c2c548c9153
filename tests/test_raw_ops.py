"""The op table against TensorFlow's: names, order of arguments, defaults, outputs."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

import weft
from weft import raw_ops
from weft._op import TABLE, gradient, op

RECORDED = json.loads((Path(__file__).parent / "recorded" / "signatures.json").read_text(encoding="utf-8"))["ops"]


NAMES = sorted(raw_ops.__all__)


def test_every_public_name_is_an_op():
    for name in NAMES:
        assert getattr(raw_ops, name) is TABLE[name]


def test_every_op_is_recorded():
    assert sorted(RECORDED) == NAMES


def plain(default):
    """A default as JSON writes it."""
    return list(default) if isinstance(default, tuple) else default


@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    parameters = inspect.signature(getattr(raw_ops, name)).parameters.values()
    got = [[p.name] if p.default is p.empty else [p.name, plain(p.default)] for p in parameters]
    assert got == RECORDED[name]["parameters"]
    assert got[-1] == ["name", None]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_and_outputs(name):
    # Handles and variants are inputs to TensorFlow; here they stay outside autodiff.
    assert list(TABLE[name].inputs) == [i for i in RECORDED[name]["inputs"] if i in TABLE[name].inputs]
    if len(RECORDED[name]["outputs"]) > 1:
        assert list(TABLE[name].outputs) == RECORDED[name]["outputs"]
    else:
        assert len(TABLE[name].outputs) == 1


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name):
    one = getattr(raw_ops, name)
    assert one.__name__ == name
    assert len(one.__doc__.splitlines()[0]) > 20
    assert repr(one).startswith(f"<op {name}(")


def test_an_op_is_defined_once():
    with pytest.raises(ValueError, match="defined twice"):
        op("Batch")(lambda x: x)


def test_a_gradient_that_asks_for_what_is_not_there_fails_at_once():
    with pytest.raises(TypeError, match="does not have"):

        @gradient(raw_ops.UnbatchGrad)
        def misspelt(g, original_inputs):
            return {}

    assert "original_inputs" not in raw_ops.UnbatchGrad.wants


@pytest.mark.parametrize("name", ["Batch", "Unbatch", "UnbatchGrad"])
def test_it_has_a_gradient(name):
    assert TABLE[name].pull is not None


def test_batch_function_has_none():
    assert TABLE["BatchFunction"].pull is None
    with weft.scope(), pytest.raises(LookupError):
        weft.vjp(raw_ops.BatchFunction, [[1.0]], [], abs, 1, 1, 0, ["float64"])
