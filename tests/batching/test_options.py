"""The options of a batcher. Bad values are in test_batcher_refused.py."""

from __future__ import annotations

import dataclasses
import inspect
from typing import get_type_hints

import numpy as np
import pytest

import weft
from weft.batching.options import LiveOptions, Options
from weft.batching.signatures import AnyOptions, PlainOptions
from weft.errors import InvalidArgumentError

FIELDS = {field.name: field for field in dataclasses.fields(Options)}


def test_the_signature_lists_every_option_with_type_and_default():
    _, *parameters, unknown = inspect.signature(weft.batched).parameters.values()
    assert unknown.kind is inspect.Parameter.VAR_KEYWORD
    assert [p.name for p in parameters] == list(FIELDS)
    for p in parameters:
        field = FIELDS[p.name]
        assert p.kind is inspect.Parameter.KEYWORD_ONLY
        assert (p.default, p.annotation) == (field.default, field.type)


def test_the_docstring_explains_every_option():
    lines = [line.strip() for line in inspect.getdoc(weft.batched).splitlines()]
    assert [line.split("`")[1] for line in lines if line.startswith("- `")] == list(FIELDS)


def test_options_do_not_change():
    sizes = [4, 64]
    options = Options(allowed_batch_sizes=sizes)
    sizes.append(3)
    assert options.allowed_batch_sizes == (4, 64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.parallel = 2
    with pytest.raises(InvalidArgumentError, match="parallel must be an integer from 1 to 1,000,000,000, got 0"):
        dataclasses.replace(options, parallel=0)


@pytest.mark.parametrize("given", [({"max_batch_size": 2, "name": "pair"},), ()], ids=["values", "options"])
def test_a_batcher_of_its_own(given):
    def double(x):
        return x * 2

    if given:
        policy = weft.Batcher(double, **given[0])
    else:
        policy = weft.Batcher(double, Options(max_batch_size=2, name="pair"))
    assert policy(np.ones(2)).tolist() == [2, 2]
    assert repr(policy) == "<weft.Batcher pair: 2 to a batch, 1 at once>"
    with pytest.raises(InvalidArgumentError, match="at most max_batch_size = 2 rows"):
        policy(np.ones(3))


@pytest.mark.parametrize("make", [weft.batched, weft.Batcher])
def test_an_unknown_option(make):
    with pytest.raises(TypeError, match=r"no option max_batchsize: did you mean max_batch_size\?"):
        make(lambda x: x, max_batchsize=2)
    with pytest.raises(InvalidArgumentError, match=r"no option fill any more: write max_wait="):
        make(lambda x: x, fill="full")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": "no"}, "rows must be True or False, got 'no'"),
        ({"split": 1}, "split must be True or False, got 1"),
        ({"shared": "x"}, "shared must be a tuple or a list, got 'x'"),
        ({"max_batch_size": 0}, "must be an integer from 1 to 1,000,000,000, got 0"),
        ({"pass_lengths": "n"}, "must be None where the option pad names no argument, got 'n'"),
        ({"pad": {"x": weft.Pad(), "y": weft.Pad()}, "cut": True}, "where pad names several, x, y, got True"),
    ],
)
def test_a_refused_option_says_what_must_hold(options, said):
    with pytest.raises(InvalidArgumentError, match=said):
        weft.batched(lambda x, y: x, **options)


@pytest.mark.parametrize("kind", [classmethod, staticmethod])
def test_methods_of_a_class_are_decorated_last(kind):
    with pytest.raises(InvalidArgumentError, match=f"write @{kind.__name__} above @weft.batched"):
        weft.batched(kind(lambda x: x))

    class Model:
        double = kind(weft.batched(lambda *args: args[-1] * 2))

    assert Model().double(np.ones(2)).tolist() == Model.double(np.ones(2)).tolist() == [2, 2]


class Scale:
    """A model with a batched method."""

    @weft.batched(max_batch_size=8)
    def __call__(self, x):
        return x

    def __repr__(self):
        return "Scale()"


def test_scalars_of_numpy_are_numbers():
    options = Options(
        max_batch_size=np.int64(8), min_batch_size=np.uint8(2), max_wait=np.float16(0.5), max_queue=np.int32(9),
        deadline=np.float32(2), allowed_batch_sizes=np.array([4, 8]), pad={"x": weft.Pad(multiple_of=np.int8(4))},
    )  # fmt: skip
    same = Options(
        max_batch_size=8, min_batch_size=2, max_wait=0.5, max_queue=9, deadline=2.0, allowed_batch_sizes=(4, 8),
        pad={"x": weft.Pad(multiple_of=4)},
    )  # fmt: skip
    assert repr(options) == repr(same)
    policy = weft.batched(lambda x: x, max_batch_size=np.int64(2))
    policy.update(parallel=np.int64(2))
    assert type(policy.options.parallel) is int
    policy.call(np.ones(1), deadline=np.int64(60))
    assert type(policy.statistics(last=np.float32(1)).to_dict()["seconds"]) is float


@pytest.mark.parametrize("value", [True, np.True_, 2.0, np.float64(2), "2", np.timedelta64(2, "s"), np.array([2, 3])])
def test_what_is_no_integer(value):
    with pytest.raises(InvalidArgumentError, match="parallel must be an integer from 1 to 1,000,000,000, got"):
        Options(parallel=value)


@pytest.mark.parametrize("value", [True, np.True_, 1j, "2", np.timedelta64(2, "s"), np.nan])
def test_what_is_no_number(value):
    with pytest.raises(InvalidArgumentError, match="deadline must be a number from 1e-09 to 1,000,000,000, got"):
        Options(deadline=value)
    with pytest.raises(InvalidArgumentError, match="deadline must be a positive number of seconds, got"):
        weft.batched(lambda x: x).call(np.ones(1), deadline=value)


def test_a_bound_batcher_names_its_object():
    assert repr(Scale().__call__) == "<weft.Batcher Scale.__call__: 8 to a batch, 1 at once> of Scale()"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ((), "got no arguments$"),
        (([1.0, 2.0],), "got float alone: make an array of numbers; the option items names"),
        (("text",), "got str alone: make an array"),
        ((weft.RaggedTensor.from_rows([[1.0]]),), "got RaggedTensor alone: the option ragged names"),
    ],
)
def test_a_call_without_arrays_says_what_came(argument, said):
    for policy in (weft.batched(lambda x: x), Scale().__call__):
        with pytest.raises(InvalidArgumentError, match=said):
            policy(*argument)


def test_type_checkers_know_every_option():
    assert set(get_type_hints(PlainOptions)) < set(get_type_hints(AnyOptions)) == set(FIELDS)
    hints = get_type_hints(Options)
    for known in (AnyOptions, LiveOptions):
        for name, kind in get_type_hints(known).items():
            assert kind == hints[name]


@pytest.mark.parametrize("name", ["max_batch_size", "parallel", "name", "call", "statistics", "anything", "_anything"])
def test_unknown_attributes_cannot_be_set(name):
    policy = weft.batched(lambda x: x)
    with pytest.raises(AttributeError, match=f"no attribute {name} that can be set: update"):
        setattr(policy, name, 3)


def test_unknown_attributes_of_a_method_cannot_be_set():
    class Model:
        @weft.batched
        def double(self, x):
            return x * 2

    with pytest.raises(AttributeError):
        Model().double.max_batch_size = 3


def test_observers_are_told_of_refused_arguments():
    refused = []

    class Observer:
        def batch_ran(self, event):
            pass

        def call_refused(self, op, name, error):
            refused.append((op, name, str(error)))

    with weft.scope():
        policy = weft.batched(lambda x: x, name="f")
        with weft.observe(Observer()), pytest.raises(InvalidArgumentError):
            policy(np.array(1.0))
    assert [(op, name) for op, name, _ in refused] == [("batched", "f")]
