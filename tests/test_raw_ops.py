"""The op table against TensorFlow's: names, order of arguments, defaults, outputs."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import weft
from weft import raw_ops
from weft.core.op import TABLE, gradient, op

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
    assert list(TABLE[name].outputs) == RECORDED[name]["outputs"]


def one_row():
    return [np.array([0, 2])], np.ones(2)


#: One call of every op that has one output and a gradient, in scopes of their own, and a cotangent of that output.
CALLS = {
    "BatchNormWithGlobalNormalization": (
        lambda: (np.ones((1, 1, 1, 2)), *[np.ones(2)] * 4, 0.1, True),
        lambda y: np.ones_like(y),
    ),
    "RaggedTensorToTensor": (
        lambda: (np.array([-1, -1]), np.ones(2), np.array(0.0), [np.array([0, 2])], ["ROW_SPLITS"]),
        lambda y: np.ones_like(y),
    ),
    "RaggedTensorToVariant": (lambda: (*one_row(), False), lambda y: raw_ops.RaggedTensorToVariant(*one_row(), False)),
    "RaggedTensorToVariantGradient": (
        lambda: (raw_ops.RaggedTensorToVariant(*one_row(), True), np.array([0, 2]), [2], "float64"),
        lambda y: np.ones_like(y),
    ),
    "TensorArrayGatherV3": (lambda: (written(), [0], FLOW, "float64"), lambda y: np.ones_like(y)),
    "TensorArrayReadV3": (lambda: (written(), 0, FLOW, "float64"), lambda y: np.ones_like(y)),
    "TensorArrayScatterV3": (lambda: (empty(), [0], np.ones((1, 2)), FLOW), lambda y: y),
    "TensorArraySplitV3": (lambda: (empty(), np.ones(2), np.array([2]), FLOW), lambda y: y),
    "TensorArrayWriteV3": (lambda: (empty(), 0, np.ones(2), FLOW), lambda y: y),
    "Unbatch": (lambda: (np.ones((2, 1)), np.array([[7, 0, 2]]), np.array(7), 0), lambda y: np.ones_like(y)),
    "UnbatchGrad": (
        lambda: (np.ones((2, 1)), np.array([[7, 0, 2]]), np.ones((2, 1)), np.array(7)),
        lambda y: np.ones_like(y),
    ),
}
FLOW = np.float32(0)


def empty():
    return raw_ops.TensorArrayV3(1, "float64", clear_after_read=False).handle


def written():
    handle = empty()
    raw_ops.TensorArrayWriteV3(handle, 0, np.ones(2), FLOW)
    return handle


def test_every_op_with_one_output_and_a_gradient_is_called():
    assert {name for name in NAMES if len(RECORDED[name]["outputs"]) == 1 and TABLE[name].gradient} == {*CALLS}


@pytest.mark.parametrize("name", CALLS)
def test_a_cotangent_is_given_by_tensorflows_name(name):
    arguments, cotangent = CALLS[name]
    with weft.scope():
        y, pull_back = weft.vjp(TABLE[name], *arguments())
        with pytest.raises(TypeError, match=RECORDED[name]["outputs"][0]):
            pull_back(output=cotangent(y))
        assert pull_back(**{RECORDED[name]["outputs"][0]: cotangent(y)}).keys() <= {*TABLE[name].inputs}


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

    assert "original_inputs" not in raw_ops.UnbatchGrad.gradient_parameters


@pytest.mark.parametrize("name", ["Batch", "Unbatch", "UnbatchGrad"])
def test_it_has_a_gradient(name):
    assert TABLE[name].gradient is not None


def test_batch_function_has_none():
    assert TABLE["BatchFunction"].gradient is None
    with weft.scope(), pytest.raises(LookupError):
        weft.vjp(raw_ops.BatchFunction, [[1.0]], [], abs, 1, 1, 0, ["float64"])
