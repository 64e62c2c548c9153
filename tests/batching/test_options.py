"""The options of a batcher. Bad values are in test_batcher_refused.py."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
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
        assert p.default == field.default
        assert p.annotation in (field.type, f"{field.type} | None" if p.default is None else "")


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("batch_size", "max_batch_size"), ("batchsize", "max_batch_size"), ("maxbatchsize", "max_batch_size"),
        ("max_size", "max_batch_size"), ("timeout", "deadline"), ("timeout_ms", "deadline"), ("dead_line", "deadline"),
        ("batch_timeout_micros", "max_wait"), ("max_latency", "max_wait"), ("wait", "max_wait"), ("max_queue_size", "max_queue"),
        ("num_batch_threads", "parallel"), ("workers", "parallel"), ("paralel", "parallel"), ("batch_sizes", "allowed_batch_sizes"),
        ("allowed_sizes", "allowed_batch_sizes"), ("min_size", "min_batch_size"), ("onloop", "on_loop"),
    ],
)  # fmt: skip
def test_what_an_unknown_option_may_mean(name, meant):
    for make in (weft.batched, weft.batched(lambda x: x).update, lambda **given: weft.Batcher(lambda x: x, **given)):
        with pytest.raises(TypeError, match=rf"a batcher has no option {name}: did you mean {meant}\?$"):
            make(**{name: 5})


def test_a_name_that_is_like_none():
    with pytest.raises(TypeError, match=r"no option color: see help\(weft.batched\)"):
        weft.batched(color=3)


class TestSeconds:
    """A `max_wait` that looks like milliseconds."""

    def made(self, **options):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            weft.batched(lambda x: x, **options)
        return found

    @pytest.mark.parametrize("value", [2, 5, 100, np.int64(5)])
    def test_an_integer_is_warned_of(self, value):
        (found,) = self.made(max_wait=value)
        assert found.category is UserWarning
        assert f"up to {value} s. Write max_wait={value}.0 if that is meant, and max_wait={value / 1000:g}" in str(
            found.message
        )
        assert found.filename == __file__

    @pytest.mark.parametrize("value", [0, 1, 0.5, 5.0, 100.0, np.float32(5)])
    def test_others_are_not(self, value):
        assert self.made(max_wait=value) == []

    def test_at_the_line_of_the_caller(self):
        policy = weft.batched(lambda x: x)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            policy.update(max_wait=5)
            policy.update(parallel=2)
            weft.Batcher(lambda x: x, max_wait=5)

            @weft.batched(max_wait=5)
            def f(x):
                return x

        here = found[0].lineno
        assert [(w.filename, w.lineno - here) for w in found] == [(__file__, 0), (__file__, 2), (__file__, 4)]

    def test_a_refused_value_is_not_warned_of(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for make in (weft.batched, weft.batched(lambda x: x).update):
                with pytest.raises(InvalidArgumentError):
                    make(max_wait=10**400)

    def test_models_to_serve(self):
        for each in ("msgspec", "uvicorn", "httptools"):
            pytest.importorskip(each)
        with pytest.warns(UserWarning, match="max_wait is in seconds") as found:
            model = weft.serve.model(lambda x: x, name="f", max_wait=5)
        assert [w.filename for w in found] == [__file__]
        assert type(model.recipe.options["max_wait"]) is float


class TestSizes:
    """The largest number of rows is the last of the allowed sizes, unless it is given."""

    @pytest.mark.parametrize(
        ("options", "most"),
        [
            ({}, 64), ({"allowed_batch_sizes": None}, 64), ({"allowed_batch_sizes": ()}, 64), ({"allowed_batch_sizes": [8]}, 8),
            ({"allowed_batch_sizes": [2, 128]}, 128), ({"max_batch_size": None}, 64), ({"max_batch_size": 3}, 3),
            ({"allowed_batch_sizes": [8], "max_batch_size": None}, 8), ({"allowed_batch_sizes": [8], "max_batch_size": 3}, 3),
            ({"allowed_batch_sizes": [8], "cost": len}, 64), ({"allowed_batch_sizes": np.array([4, 8])}, 8),
        ],
    )  # fmt: skip
    def test_of_a_batcher(self, options, most):
        policy = weft.batched(lambda x: x, **options)
        assert policy.options.max_batch_size == most
        assert type(policy.options.max_batch_size) is int
        assert repr(policy).endswith(f"{most} to a batch, 1 at once>")
        assert policy(np.ones(most)).shape == (most,)
        with pytest.raises(InvalidArgumentError, match=f"at most max_batch_size = {most} rows"):
            policy(np.ones(most + 1))

    def test_batches_are_padded_to_it(self):
        policy = weft.batched(lambda x: x, allowed_batch_sizes=[8], pass_rows=None)
        _, receipt = policy.call(np.ones(3), receipt=True)
        assert (receipt.size, receipt.padding) == (3, 5)

    def test_one_that_is_given_must_fit(self):
        with pytest.raises(InvalidArgumentError, match=r"at least max_batch_size = 64, got \[8\]"):
            weft.batched(lambda x: x, allowed_batch_sizes=[8], max_batch_size=64)
        with pytest.raises(InvalidArgumentError, match="min_batch_size must be an integer from 1 to 8, got 9"):
            weft.batched(lambda x: x, allowed_batch_sizes=[8], min_batch_size=9, max_wait=1.0)

    def test_updates(self):
        policy = weft.batched(lambda x: x)

        def largest(**changes):
            policy.update(**changes)
            return policy.options.max_batch_size

        assert largest(allowed_batch_sizes=[8]) == 8
        assert largest(parallel=2) == 8
        assert largest(allowed_batch_sizes=[4, 16]) == 16
        assert largest(allowed_batch_sizes=None) == 64
        assert policy.options.allowed_batch_sizes == ()
        assert largest(max_batch_size=5) == 5
        assert largest(allowed_batch_sizes=[8]) == 5  # it was given
        with pytest.raises(InvalidArgumentError, match="at least max_batch_size = 5"):
            policy.update(allowed_batch_sizes=[4])
        assert largest(max_batch_size=None) == 8
        assert largest(allowed_batch_sizes=[4]) == 4
        assert policy(np.ones(4)).shape == (4,)
        with pytest.raises(InvalidArgumentError, match="at most max_batch_size = 4 rows"):
            policy(np.ones(5))
        with pytest.raises(InvalidArgumentError, match="at least max_batch_size = 16"):
            policy.update(max_batch_size=16)
        assert largest(max_batch_size=16, allowed_batch_sizes=[4, 16]) == 16

    def test_copies_of_options_follow_too(self):
        options = Options(allowed_batch_sizes=[8])
        assert options.changed({"allowed_batch_sizes": [4]}).max_batch_size == 4
        assert Options(max_batch_size=4).changed({"allowed_batch_sizes": [8]}).max_batch_size == 4
        assert options == Options(max_batch_size=8, allowed_batch_sizes=(8,))


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
            assert kind in (hints[name], hints[name] | None)  # what None stands for may be put in its place


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
