"""A state machine: random calls on an array and on a model that is a dict of index to value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.libraries import back, for_each, need, to

from weft import errors, raw_ops

SHAPES = [(), (2,), (1, 2), (0, 2)]
INDEX = st.integers(-1, 7)


class Model:
    """What an array is, in the simplest words: values by index, and which indices were written, read or cleared."""

    def __init__(self, size, dynamic, clear, element_shape, adding=False, prefix=()):
        self.prefix = prefix
        self.size, self.dynamic, self.clear, self.shape, self.adding = size, dynamic, clear, element_shape, adding
        self.values, self.shapes, self.read, self.cleared = {}, {}, set(), set()

    def can_write(self, index, value):
        if index < 0 or (index >= self.size and not self.dynamic):
            return False
        if value.shape[: len(self.prefix)] != self.prefix:
            return False
        if index in self.read or (self.shape is not None and value.shape != self.shape):
            return False
        return index not in self.shapes or (self.adding and self.shapes[index] == value.shape)

    def write(self, index, value):
        self.values[index] = self.values[index] + value if index in self.values else value
        self.shapes[index] = value.shape
        self.size = max(self.size, index + 1)

    def can_read(self, index):
        if index < 0 or (index >= self.size and not self.adding) or index in self.cleared:
            return False
        return index in self.shapes or self.shape is not None

    def take(self, index):
        shape = self.shapes.get(index, self.shape)
        for new in {index, *range(self.size, index)}:
            self.shapes.setdefault(new, shape)
        self.size = max(self.size, index + 1)
        self.read.add(index)
        if self.clear:
            self.cleared.add(index)
        return self.values.get(index, np.zeros(shape, np.float32))


class Arrays(RuleBasedStateMachine):
    """One forward array and, once asked for, one gradient array, each beside its model."""

    library = "numpy"

    @initialize(
        size=st.integers(0, 4), dynamic=st.booleans(), clear=st.booleans(), shape=st.sampled_from([None, *SHAPES])
    )
    def create(self, size, dynamic, clear, shape):
        handle = raw_ops.TensorArrayV3(size, "float32", shape, dynamic, clear).handle
        self.pairs = [(handle, Model(size, dynamic, clear, shape))]
        self.count = 0

    def value(self, *shape):
        self.count += 1
        return np.full(shape, self.count, np.float32)

    def attempt(self, allowed, call):
        """The result of a call that must succeed; None after one that must be refused."""
        if allowed:
            return call()
        with pytest.raises(errors.InvalidArgumentError):
            call()
        return None

    @rule(which=st.integers(0, 1), index=INDEX, shape=st.sampled_from(SHAPES))
    def write(self, which, index, shape):
        handle, model = self.pairs[which % len(self.pairs)]
        value = self.value(*shape)
        allowed = model.can_write(index, value)
        given = to(self.library, value)
        self.attempt(allowed, lambda: raw_ops.TensorArrayWriteV3(handle, index, given, 0.0))
        if allowed:
            model.write(index, value)

    @rule(which=st.integers(0, 1), index=INDEX)
    def read(self, which, index):
        handle, model = self.pairs[which % len(self.pairs)]
        allowed = model.can_read(index)
        found = self.attempt(allowed, lambda: raw_ops.TensorArrayReadV3(handle, index, 0.0, "float32"))
        if allowed:
            np.testing.assert_array_equal(back(found), model.take(index), strict=True)

    @rule(which=st.integers(0, 1), indices=st.lists(INDEX, min_size=1, max_size=5))
    def gather(self, which, indices):
        handle, model = self.pairs[which % len(self.pairs)]
        allowed = all(map(model.can_read, indices)) and not (model.clear and len({*indices}) < len(indices))
        if allowed:
            shapes = [model.shapes.get(i, model.shape) for i in indices]
            # TensorFlow does not look at the others if the first has no elements.
            allowed = 0 in shapes[0] or len({*shapes}) == 1
        found = self.attempt(allowed, lambda: raw_ops.TensorArrayGatherV3(handle, indices, 0.0, "float32"))
        if allowed:
            taken = [model.take(i) for i in indices]
            empty = np.zeros((len(indices), *taken[0].shape), np.float32)
            np.testing.assert_array_equal(back(found), empty if 0 in empty.shape else np.stack(taken), strict=True)

    @rule(which=st.integers(0, 1), indices=st.lists(INDEX, max_size=4), shape=st.sampled_from(SHAPES))
    def scatter(self, which, indices, shape):
        handle, model = self.pairs[which % len(self.pairs)]
        rows = [self.value(*shape) for _ in indices]
        value = np.stack(rows) if rows else np.zeros((0, *shape), np.float32)
        twice = len({*indices}) < len(indices)
        allowed = all(map(model.can_write, indices, rows)) and (model.adding or not twice)
        given = to(self.library, value)
        self.attempt(allowed, lambda: raw_ops.TensorArrayScatterV3(handle, indices, given, 0.0))
        if allowed:
            for index, row in zip(indices, rows, strict=True):
                model.write(index, row)

    @rule()
    def concat(self):
        handle, model = self.pairs[0]
        indices = range(model.size)
        if not indices:
            with pytest.raises(errors.UnimplementedError):
                raw_ops.TensorArrayConcatV3(handle, 0.0, "float32")
            return
        allowed = all(map(model.can_read, indices))
        if allowed:
            shapes = [model.shapes.get(i, model.shape) for i in indices]
            allowed = all(shapes) and len({s[1:] for s in shapes}) == 1
        found = self.attempt(allowed, lambda: raw_ops.TensorArrayConcatV3(handle, 0.0, "float32"))
        if allowed:
            taken = [model.take(i) for i in indices]
            np.testing.assert_array_equal(back(found.value), np.concatenate(taken), strict=True)
            assert back(found.lengths).tolist() == list(map(len, taken))

    @rule(lengths=st.lists(st.integers(0, 2), max_size=5), missing=st.sampled_from([0, 0, 0, 1]))
    def split(self, lengths, missing):
        handle, model = self.pairs[0]
        value = np.arange(sum(lengths) + missing, dtype=np.float32)
        pieces = np.split(value, np.cumsum(lengths)[:-1]) if lengths else []
        fits = len(lengths) == model.size or (model.dynamic and len(lengths) > model.size)
        allowed = not missing and fits and all(map(model.can_write, range(len(pieces)), pieces))
        given = to(self.library, value)
        self.attempt(allowed, lambda: raw_ops.TensorArraySplitV3(handle, given, lengths, 0.0))
        if allowed:
            for index, piece in enumerate(pieces):
                model.write(index, piece)

    @precondition(lambda self: len(self.pairs) == 1)
    @rule(prepend=st.sampled_from([(), (2,)]))
    def gradient(self, prepend):
        handle, model = self.pairs[0]
        made = raw_ops.TensorArrayGradWithShape(handle, 0.0, list(prepend), "g").grad_handle
        model.dynamic = False
        shape = None if model.shape is None else prepend + model.shape
        twin = Model(model.size, False, True, shape, True, prepend)
        twin.shapes = {index: prepend + s for index, s in model.shapes.items()}
        self.pairs.append((made, twin))

    @invariant()
    def sizes_agree(self):
        for handle, model in self.pairs:
            assert int(raw_ops.TensorArraySizeV3(handle, 0.0)) == model.size


@for_each(
    ("library", "examples"),
    [("numpy", 50), ("torch", 20), ("jax", 10), ("numpy", 2000), ("torch", 50), ("jax", 30)],
    slow=[("numpy", 2000), ("torch", 50), ("jax", 30)],
)
def test_arrays_are_what_the_model_says(library, examples):
    need(library)
    machine = type("Machine", (Arrays,), {"library": library})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=25, suppress_health_check=checks)
    )
