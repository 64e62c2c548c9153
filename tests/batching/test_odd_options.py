"""Options of batchers, of updates and of calls with any value: each is taken, or refused with an error of weft."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import warnings
from contextlib import suppress
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft.batching.options import OPTIONS, LiveOptions
from weft.errors import InvalidArgumentError, OpError


def raising(kind):
    """A class of values all of whose own code raises."""

    def fail(*_):
        raise kind("own code")

    names = "eq ne lt le gt ge hash bool len iter next contains index int float repr str call getitem add radd neg abs"
    return {f"__{name}__": fail for name in names.split()}


class Broken(BaseException):
    """What extensions raise."""


Raises = type("Raises", (), raising(ValueError))
RaisesBase = type("RaisesBase", (), raising(Broken))
NUMBERS = [
    type(f"Raising{base.__name__}", (base,), raising(KeyError)) for base in (int, float, str, tuple, list, dict, bytes)
]


class Name(StrEnum):
    isolate = "isolate"


SELF: list = []
SELF.append(SELF)
DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]

PLAIN = [
    None, True, False, 0, 1, -1, 2, 63, 10**9, 10**10, 10**400, -(10**400), 10**5000, 0.0, -0.0, 0.5, 1.5, 1e-300, 1e300,
    math.nan, math.inf, -math.inf, 1j, "", "x", "isolate", "low", "\x00", "\ud800", "cuda:99999", "x" * 10_000, b"", b"x",
    Decimal("NaN"), Decimal(2), Fraction(1, 3), np.True_, np.int8(3), np.uint64(2**64 - 1), np.float16(np.nan),
    np.longdouble(2), np.datetime64("NaT"), np.timedelta64(3, "s"), np.str_("x"), np.array(2), np.array(2.5), np.array(True),
    np.array([]), np.array([1, 2]), np.array([True, False]), np.eye(2), np.array(["a", "b"]), np.array([None, 1]), np.ma.masked,
    np.ma.array([1, 2]), [], [1], [1, 1], [2, 1], [64], [None], [[1]], ["x"], ["x", "x"], (), (64,), {}, {"x": 1},
    {"x": weft.Pad()}, {1: 2}, {1, 2}, frozenset([64]), range(3), range(10**12), slice(3), ..., NotImplemented, object(),
    object, int, sys, Name.isolate, weft.Pad(), SELF, DEEP, lambda *_: 1, weft.errors, Raises(), RaisesBase(), Raises,
    *[number() for number in NUMBERS], [Raises()], {"x": Raises()}, (Raises(), Raises()),
]  # fmt: skip
MADE = [lambda: itertools.count(1), lambda: iter([1, 2]), lambda: (i for i in "ab"), lambda: itertools.repeat("x")]


@cache
def of_libraries():
    found = []
    with suppress(ImportError):
        import torch

        found += [
            torch.tensor(2), torch.tensor([1, 2]), torch.tensor(math.nan), torch.eye(2), torch.empty(2, device="meta"),
            torch.tensor(1, device="meta"), torch.device("cpu"), torch.device("meta"), torch.float32, torch.nn.Linear(1, 1),
        ]  # fmt: skip
    with suppress(ImportError):
        import jax.numpy as jnp

        found += [jnp.asarray(2), jnp.asarray([1, 2]), jnp.asarray(math.nan)]
    return found


def odd_values():
    return [*PLAIN, *of_libraries(), *[make() for make in MADE]]


def shape(x):
    return x * 2


def prioritized(value):
    with weft.priority(value):
        pass


def quietly(call):
    """Make a call that may be refused by weft; return what it returns, or the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except (OpError, TypeError) as error:
            found = error
    assert len(str(found)) < 2000
    return found


@pytest.fixture(autouse=True)
def scope():
    with weft.scope() as scope:
        yield scope


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_takes_or_refuses_every_value(option):
    for value in odd_values():
        made = quietly(lambda value=value: weft.batched(shape, **{option: value}))
        if isinstance(made, Exception):
            continue
        assert isinstance(made.options, object)
        if not callable(value) and option not in ("devices", "device"):
            quietly(lambda made=made: made(np.ones((64, 3))))  # a full batch does not wait
        made.close()


@pytest.mark.parametrize("option", [*LiveOptions.__annotations__, "rows", "name"])
def test_every_update_is_made_or_changes_nothing(option):
    policy = weft.batched(shape, max_batch_size=64)
    for value in odd_values():
        before = policy.options
        if isinstance(quietly(lambda value=value: policy.update(**{option: value})), Exception):
            assert policy.options is before
        policy.update(
            max_batch_size=64, allowed_batch_sizes=(), parallel=1, max_wait=0.0, min_batch_size=None, max_queue=None, deadline=None
        )  # fmt: skip
        assert policy(np.ones(2)).tolist() == [2, 2]
    policy.close()


@pytest.mark.parametrize("option", ["deadline", "priority", "caller", "receipt"])
def test_every_option_of_a_call(option, tmp_path):
    policy = weft.batched(shape)

    def refused(error, value):
        if isinstance(error, Exception):
            assert isinstance(error, OpError), value  # also that of a very short deadline

    with policy.record(tmp_path / "calls"):
        for value in odd_values():
            refused(quietly(lambda value=value: policy.call(np.ones(2), **{option: value})), value)
    for value in odd_values():
        refused(quietly(lambda value=value: policy.call(np.ones(2), **{option: value})), value)
        refused(quietly(lambda value=value: asyncio.run(policy.aio.call(np.ones(2), **{option: value}))), value)
    assert policy(np.ones(1)).item() == 2

    @weft.batched
    def chunks(x):
        yield x

    if option != "receipt":
        for value in odd_values():
            refused(quietly(lambda value=value: list(chunks.stream(np.ones(2), **{option: value}))), value)
    for each in (policy, chunks):
        each.close()


def test_the_arguments_of_methods():
    policy = weft.batched(shape)
    for value in odd_values():
        quietly(lambda value=value: policy.statistics(value))
        quietly(lambda value=value: policy.close(drain=value, timeout=-1))
        quietly(lambda value=value: weft.batched(shape).close(timeout=value))
        quietly(lambda value=value: prioritized(value))
        if not isinstance(value, (RaisesBase, *NUMBERS)):
            quietly(lambda value=value: weft.batched(value))
        for name in ("value", "axis", "multiple_of", "sizes"):
            quietly(lambda value=value, name=name: weft.Pad(**{name: value}))
    assert policy(np.ones(1)).item() == 2


@given(st.lists(st.tuples(st.sampled_from(OPTIONS), st.integers(0, 10**6)), min_size=2, max_size=5))
def test_several_odd_options_at_once(choices):
    values = odd_values()
    quietly(lambda: weft.batched(shape, **{name: values[i % len(values)] for name, i in choices}))


@given(st.dictionaries(st.text(max_size=12), st.none(), min_size=1, max_size=3))
def test_unknown_names(names):
    for make in (weft.batched, lambda **options: weft.batched(shape).update(**options)):
        if not names.keys() <= {*OPTIONS, "f"}:
            with pytest.raises(TypeError):
                make(**names)


@pytest.mark.parametrize("pad", [weft.Pad(value=10**400), weft.Pad(value=-(10**400))])
def test_a_padding_that_the_rows_cannot_hold(pad):
    policy = weft.batched(shape, pad={"x": pad})
    error = quietly(lambda: policy(np.ones((1, 3), np.float32)))
    assert isinstance(error, InvalidArgumentError)
