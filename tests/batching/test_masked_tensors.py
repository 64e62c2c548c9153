"""Tensors of `torch.masked`, and parameters without a shape: refused where they come, whoever brings them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from support.batched_calls import FULL
from support.callers import together
from support.libraries import for_each

import weft
from weft import raw_ops
from weft.errors import InvalidArgumentError, OpError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:.*MaskedTensors.*:UserWarning")


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


def masked(x=None):
    x = torch.ones(2, 2) if x is None else x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(x, x > 0)


def odd(kind):
    return masked() if kind == "masked" else torch.nn.UninitializedParameter()


SAID = {"masked": "must be an array without a mask, got a MaskedTensor: fill it", "unknown": "must have its values now"}
CALLS = {
    "one": ({}, lambda x: (x,)),
    "several": ({}, lambda x: (torch.ones(2), x)),
    "nested": ({}, lambda x: ({"a": [x]},)),
    "example": ({"rows": False}, lambda x: (x,)),
}


@for_each("kind", ["masked", "unknown"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("call", list(CALLS))
def test_arguments(kind, grad, call):
    options, arguments = CALLS[call]
    policy = weft.batched(lambda *args: torch.ones(2), **options)
    with torch.set_grad_enabled(grad), pytest.raises(InvalidArgumentError, match=SAID[kind]):
        policy(*arguments(odd(kind)))
    assert policy.statistics().rejected == 1


@for_each("kind", ["masked", "unknown"])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (torch.ones(2), x), lambda x: {"a": x}])
def test_results(kind, wrap):
    policy = weft.batched(lambda x: wrap(odd(kind)), max_batch_size=2, **FULL)
    for caller in together([lambda: policy(torch.ones(1))] * 2):
        with pytest.raises(OpError, match=SAID[kind]):
            caller.answer()


def test_gradients_that_are_handed_in():
    """The others of the batch have theirs."""
    w = torch.ones(1, requires_grad=True)
    policy = weft.batched(lambda x: x * w, max_batch_size=2, on_missing_gradient="zero", **FULL)

    def work(gradient):
        y = policy(torch.ones(1, 1))
        try:
            y.backward(gradient)
        except InvalidArgumentError as error:  # and the result is dropped
            return str(error)

    good, bad = together([lambda: work(torch.ones(1, 1)), lambda: work(masked(torch.ones(1, 1)))])
    assert good.answer() is None
    assert SAID["masked"] in bad.answer()
    assert w.grad.item() == 1


def test_gradients_of_pull_backs():
    policy = weft.batched(lambda x: x, vjp=lambda x: (x * 2, lambda g: g if g[0, 0] > 0 else masked(-g)))
    _, pull_back = policy.vjp(torch.ones(2, 2))
    with pytest.raises(InvalidArgumentError, match=SAID["masked"]):
        pull_back(masked())
    assert pull_back(torch.ones(2, 2)).tolist() == [[1, 1], [1, 1]]
    _, pull_back = policy.vjp(torch.ones(2, 2))
    with pytest.raises(InvalidArgumentError, match=SAID["masked"]):
        pull_back(-torch.ones(2, 2))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: raw_ops.Batch([x], 1, 2, 0, 0),
        lambda x: raw_ops.BatchFunction([x], [], lambda x: x, 1, 2, 0, ["float32"]),
        lambda x: raw_ops.BatchFunction([torch.ones(2, 2)], [], masked, 1, 2, 0, ["float32"]),
        lambda x: raw_ops.Unbatch(x, np.array([[1, 0, 2]]), 1, 100),
        lambda x: weft.RaggedTensor.from_row_splits(x, [0, 1, 2]),
        lambda x: weft.TensorArray(dtype="float32", size=1).write(0, x),
        lambda x: weft.batch_norm(x, torch.ones(2), torch.zeros(2), training=True),
    ],
)  # fmt: skip
def test_ops_and_classes(call):
    with pytest.raises(InvalidArgumentError, match=SAID["masked"]):
        call(masked())


def test_other_classes_of_tensors_are_taken():
    class Own(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Own)
    assert weft.batched(lambda x: x * 2)(x).tolist() == [2, 2]
    assert weft.batched(lambda x: x * 2)(torch.nn.Parameter(torch.ones(2))).tolist() == [2, 2]
