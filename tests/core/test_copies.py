"""Copies and pickles: an array's share nothing with it, and a batcher says why it has none."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading

import numpy as np
import pytest
from support.libraries import back, need, to
from support.tensor_array_calls import grad, make, read, write

import weft
from weft import RaggedTensor, TensorArray, VariantArray, raw_ops
from weft.errors import FailedPreconditionError, InvalidArgumentError
from weft.ragged.variant import VARIANT


def f32(x):
    return np.array(x, np.float32)


def pickled(x):
    return pickle.loads(pickle.dumps(x))


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickled}
all_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
all_libraries = pytest.mark.parametrize("library", ["numpy", "torch", "jax"])


class TestTensorArray:
    @all_ways
    @all_libraries
    def test_what_is_written_to_one_is_not_seen_by_the_other(self, way, library):
        need(library)
        first = TensorArray(size=4, dtype="float32").write(0, to(library, f32([1, 2])))
        second = way(first)
        first.write(1, to(library, f32([3, 4])))
        second.write(1, to(library, f32([5, 6]))).write(2, to(library, f32([7, 8])))
        assert back(first.stack()).tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]]
        assert back(second.stack()).tolist() == [[1, 2], [5, 6], [7, 8], [0, 0]]
        with pytest.raises(InvalidArgumentError, match="written"):
            second.write(0, to(library, f32([9, 9])))

    @all_ways
    def test_elements_of_many_shapes_that_are_read_once(self, way):
        first = TensorArray(infer_shape=False, clear_after_read=True)
        for length in (2, 2, 3, 2):
            first.append(np.full(length, float(length)))
        first.read(0)
        second = way(first)
        taken = first.read(2)  # the last use of an element is handed out as it is
        taken[:] = -1
        assert second.read(2).tolist() == [3, 3, 3]
        assert second.read(1).tolist() == [2, 2]
        assert first.read(1).tolist() == [2, 2]
        for array in (first, second):
            with pytest.raises(InvalidArgumentError, match="read"):
                array.read(0)
        assert second.append(np.ones(5)).read(4).tolist() == [1] * 5

    @all_ways
    def test_more_rows_than_a_block_has(self, way):
        first = TensorArray(clear_after_read=True)
        values = np.arange(40_000.0).reshape(20_000, 2)
        first.unstack(values)
        for index in range(0, 20_000, 3):
            first.read(index)
        second = way(first)
        left = [i for i in range(20_000) if i % 3]
        assert (second.gather(left) == values[left]).all()
        assert (first.gather(left) == values[left]).all()
        assert second.append(np.zeros(2)).read(20_000).tolist() == [0, 0]

    @all_ways
    def test_text_and_variants(self, way):
        texts = way(TensorArray("string").append(np.array(["a", "b"], object)))
        assert texts.append(np.array(["c", "d"], object)).stack().tolist() == [["a", "b"], ["c", "d"]]
        variants = way(TensorArray("variant").append(VariantArray([np.ones(2)], ())))
        assert variants.read(0).item().values.tolist() == [1, 1]

    @all_ways
    def test_before_the_first_write_and_after_the_last(self, way):
        assert way(TensorArray(size=2)).append(f32([1])).stack().tolist() == [[1], [0]]
        closed = TensorArray("float32", 2)
        closed.close()
        with pytest.raises(InvalidArgumentError, match="closed"):
            way(closed).read(0)

    @all_ways
    def test_gradient_arrays_are_copied_too(self, way):
        first = TensorArray("float32", 2).write(0, f32([1, 2]))
        first.gradient().write(0, f32([1, 1]))
        second = way(first)
        second.gradient().write(0, f32([5, 5]))
        first.gradient("other").write(1, f32([2, 2]))
        assert first.gradient().stack().tolist() == [[1, 1], [0, 0]]
        assert second.gradient().stack().tolist() == [[6, 6], [0, 0]]
        assert second.gradient("other").stack().tolist() == [[0, 0], [0, 0]]

    @pytest.mark.parametrize("way", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
    @pytest.mark.parametrize("order", [1, -1])
    def test_an_array_and_its_gradients_stay_together(self, way, order):
        array = TensorArray("float32", 1).write(0, f32(1))
        both = way({"of": [array, array.gradient()][::order]})["of"]
        array, gradients = both[::order]
        gradients.write(0, f32(3))
        assert array.gradient().read(0) == 3

    @all_ways
    def test_a_handle(self, way):
        handle = make(2, clear_after_read=False)
        write(handle, 0, f32(1))
        write(grad(handle), 0, f32(7))
        other = way(handle)
        write(other, 1, f32(2))
        write(grad(other), 0, f32(1))
        assert read(other, 1) == 2
        assert read(grad(other), 0) == 8
        assert read(grad(handle), 0) == 7
        with pytest.raises(InvalidArgumentError, match="written"):
            read(handle, 1)

    @pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
    def test_gradients_flow_through_a_copy(self, way):
        need("torch")
        import torch

        x = torch.ones(2, requires_grad=True)
        copied = way(TensorArray().append(x * 3))
        copied.append(x * 2).stack().sum().backward()
        assert x.grad.tolist() == [5, 5]

    @all_ways
    def test_what_jax_carries(self, way):
        need("jax")
        import jax
        import jax.numpy as jnp

        made = jax.jit(lambda a: a.write(1, jnp.ones(2)))(TensorArray("float32", 3, element_shape=(2,)))
        assert back(way(made).stack()).tolist() == [[0, 0], [1, 1], [0, 0]]
        if way is not pickled:
            carried = jax.jit(lambda a: way(a).write(0, jnp.ones(2)))(made)
            assert back(carried.stack()).tolist() == [[1, 1], [1, 1], [0, 0]]

    @all_ways
    def test_a_subclass_keeps_what_it_adds(self, way):
        named = Named("float32", 1)
        named.label = ["a"]
        other = way(named)
        assert type(other) is Named
        assert other.label == ["a"]
        assert (other.label is named.label) == (way is copy.copy)

    @all_ways
    def test_a_copy_is_of_one_moment(self, way):
        """Rows are appended in pairs while copies are made: none has half a pair."""
        array, stop = TensorArray(clear_after_read=False), threading.Event()

        def append():
            while not stop.is_set() and len(array) < 20_000:
                array.scatter(np.arange(len(array), len(array) + 2), np.ones((2, 3)))

        array.append(np.ones(3)).append(np.ones(3))
        writer = threading.Thread(target=append)
        writer.start()
        try:
            for _ in range(30):
                other = way(array)
                assert len(other) % 2 == 0
                assert other.stack().shape == (len(other), 3)
                assert (other.stack() == 1).all()
        finally:
            stop.set()
            writer.join(30)


class Named(TensorArray):
    """An array with an attribute of its own."""


class TestRagged:
    @all_ways
    @all_libraries
    def test_ragged_tensors(self, way, library):
        need(library)
        first = RaggedTensor(to(library, f32([1, 2, 3])), [np.array([0, 2]), np.array([0, 1, 3])])
        second = way(first)
        assert second.to_list() == [[[1], [2, 3]]]
        assert second.sum().to_list() == [[1, 5]]
        assert type(second.flat_values) is type(first.flat_values)

    @pytest.mark.parametrize("way", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
    def test_values_are_their_own(self, way):
        values = f32([1, 2, 3])
        other = way(RaggedTensor(values, [np.array([0, 2, 3])]))
        values[:] = 0
        assert other.to_list() == [[1, 2], [3]]

    def test_a_pickle_with_other_splits_is_refused(self):
        kind, (cls, values, _), _ = RaggedTensor(f32([1, 2]), [np.array([0, 2])]).__reduce__()
        with pytest.raises(InvalidArgumentError, match="must end with 2"):
            kind(cls, values, (np.array([0, 10**10]),))

    @all_ways
    @all_libraries
    @pytest.mark.parametrize("cut", [False, True])
    def test_variants(self, way, library, cut):
        need(library)
        first = raw_ops.RaggedTensorToVariant([np.array([0, 2, 3])], to(library, f32([1, 2, 3])), True)
        if cut:
            first.rows()
        second = way(first)
        assert second == first
        assert second.columns is not None
        assert second.dtype is VARIANT
        decoded = raw_ops.RaggedTensorFromVariant(second, 0, 1, "float32")
        assert back(decoded.output_dense_values).tolist() == [1, 2, 3]

    @all_ways
    def test_variants_of_many_kinds(self, way):
        first = VariantArray([f32([1, 2]), ([[0, 1]], f32([3])), None, np.array(["a"], object)], (2, 2))
        second = way(first)
        assert second.shape == (2, 2)
        assert second == first
        assert way(first.unstack()[0]).elements()[0].values.tolist() == [1, 2]

    @all_ways
    def test_what_is_shared_cannot_be_written_through(self, way):
        for array in (raw_ops.RaggedTensorToVariant([[0, 2]], f32([1, 2]), b) for b in (False, True)):
            with pytest.raises(ValueError, match="read-only"):
                way(array).elements()[0].values[0] = 5

    @all_ways
    def test_the_dtype_of_variants_is_one(self, way):
        assert way(VARIANT) is VARIANT


def double(x):
    return x * 2


class Policy:
    """An object with a batched method."""

    @weft.batched
    def act(self, x):
        return x * 2


class Holder:
    """An object that holds a batcher."""

    def __init__(self):
        self.policy = weft.batched(double)


BATCHERS = {
    "batcher": lambda: weft.batched(double),
    "aio": lambda: weft.batched(double).aio,
    "method": lambda: Policy().act,
    "method's aio": lambda: Policy().act.aio,
}
SENTENCE = "cannot be copied or pickled: its callers wait in its one queue, in this process. Make another"


class TestBatchers:
    @all_ways
    @pytest.mark.parametrize("kind", BATCHERS)
    def test_they_say_why_not(self, way, kind):
        made = BATCHERS[kind]()
        with pytest.raises(FailedPreconditionError, match=SENTENCE):
            way(made)

    @pytest.mark.parametrize("kind", BATCHERS)
    def test_they_say_what_to_do_for_another_process(self, kind):
        with pytest.raises(FailedPreconditionError, match=r"`weft serve`, or, with gradients, through weft\.ray"):
            pickle.dumps(BATCHERS[kind]())

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    @pytest.mark.parametrize("kind", BATCHERS)
    def test_in_every_protocol(self, protocol, kind):
        with pytest.raises(FailedPreconditionError, match=SENTENCE):
            pickle.dumps(BATCHERS[kind](), protocol)

    @pytest.mark.parametrize("way", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
    @pytest.mark.parametrize("name", ["call", "vjp", "statistics", "close"])
    def test_nor_are_their_methods(self, way, name):
        with pytest.raises(FailedPreconditionError, match=SENTENCE):
            way(getattr(weft.batched(double), name))

    @pytest.mark.parametrize("way", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
    def test_nor_is_what_holds_one(self, way):
        with pytest.raises(FailedPreconditionError, match="the batcher double cannot be copied"):
            way(Holder())
        with pytest.raises(FailedPreconditionError, match=SENTENCE):
            way({"policy": [weft.batched(double)]})

    @pytest.mark.parametrize("way", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
    def test_nor_a_module_that_holds_one(self, way):
        need("torch")
        import torch

        module = torch.nn.Linear(2, 2)
        module.policy = weft.batched(double)
        with pytest.raises(FailedPreconditionError, match=SENTENCE):
            way(module)
        del module.policy
        assert way(module).weight.equal(module.weight)

    def test_an_object_with_a_batched_method_is_copied(self):
        for way in WAYS.values():
            assert way(Policy()).act(np.ones((1, 1))).item() == 2

    def test_a_process_that_would_need_one(self):
        process = multiprocessing.get_context("spawn").Process(target=weft.batched(double))
        with pytest.raises(FailedPreconditionError, match=SENTENCE):
            process.start()

    def test_it_works_as_before(self):
        policy = weft.batched(double)
        with pytest.raises(FailedPreconditionError):
            copy.deepcopy(policy)
        assert policy(np.ones((1, 1))).item() == 2

    @all_ways
    def test_its_figures_are_copied(self, way):
        policy = weft.batched(double)
        _, receipt = policy.call(np.ones((1, 1)), receipt=True)
        assert way(receipt) == receipt
        seen = policy.statistics()
        assert way(seen) == seen
