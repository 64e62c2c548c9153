"""Attributes of the batching ops: what they may be, and by which names types go."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from support.bad_calls import X, batch, function, identity, unbatch, unbatch_grad
from support.callers import start_on
from support.libraries import need, to

import weft
from weft import raw_ops
from weft.errors import InvalidArgumentError


class TestAttributes:
    """What the argument layer accepts."""

    @pytest.mark.parametrize("two", [2, 2.0, 2.9, np.int8(2), np.float32(2.5), np.array(2), np.array(2, np.uint64)])
    def test_integers(self, clock, two):
        with weft.scope(clock) as scope:
            got = batch(max_batch_size=two)
            (queue,) = scope.resources.values()
            assert queue.limits.max_batch_size == 2
            assert got.batch_index[0, 1:].tolist() == [0, 2]

    @pytest.mark.parametrize("library", ["torch", "jax"])
    def test_integers_of_other_libraries(self, clock, library):
        need(library)
        with weft.scope(clock) as scope:
            batch(max_batch_size=to(library, np.array(2, np.int32)), allowed_batch_sizes=[to(library, np.int32(2))])
            (queue,) = scope.resources.values()
            assert (queue.limits.max_batch_size, queue.limits.allowed) == (2, (2,))

    def test_a_scalar_tensor_is_read_at_every_call(self, clock):
        need("torch")
        import torch

        most = torch.tensor(2)
        with weft.scope(clock):
            batch(max_batch_size=most)
        most.fill_(4)
        with weft.scope(clock) as scope:
            start_on(clock, batch, max_batch_size=most)
            (queue,) = scope.resources.values()
            assert queue.limits.max_batch_size == 4

    def test_booleans_are_integers(self, clock):
        got = batch([X[:1]], num_batch_threads=True, max_batch_size=True)
        assert got.batched_tensors[0].shape == (1, 3)

    def test_none_means_the_default(self, clock):
        keep = [
            "in_tensors",
            "captured_tensors",
            "f",
            "num_batch_threads",
            "max_batch_size",
            "batch_timeout_micros",
            "Tout",
        ]
        optional = [n for n in raw_ops.BatchFunction.signature.parameters if n not in keep]
        assert len(optional) == 13
        assert start_on(clock, function, **dict.fromkeys(optional)).answer()[0].tolist() == X.tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert start_on(clock, function).answer()[0].tolist() == X.tolist()
        batch(
            max_enqueued_batches=None, allowed_batch_sizes=None, container=None, shared_name=None, batching_queue=None
        )
        unbatch(X, [[7, 0, 2]], container=None, shared_name=None, name=None)
        unbatch_grad(container=None, shared_name=None, name=None)

    def test_text_and_bytes_are_one_name(self, clock):
        with weft.scope(clock) as scope:
            batch(shared_name="n", container=b"c", batching_queue=b"q", max_batch_size=2)
            batch(shared_name=b"n", container="c", batching_queue="q", max_batch_size=2)
            assert len(scope.resources) == 1

    def test_position_and_keyword(self, clock):
        by_position = raw_ops.Batch([X], 1, 2, 0, 5, 3, [2], "c", "s", "q", "n")
        by_keyword = raw_ops.Batch(
            in_tensors=[X], num_batch_threads=1, max_batch_size=2, batch_timeout_micros=0, grad_timeout_micros=5,
            max_enqueued_batches=3, allowed_batch_sizes=[2], container="c", shared_name="s", batching_queue="q", name="n",
        )  # fmt: skip
        for got in (by_position, by_keyword):
            assert got.batched_tensors[0].tolist() == X.tolist()
        assert raw_ops.Unbatch(X, [[7, 1, 1]], 7, 0, "c", "s", "n").tolist() == X[1:].tolist()
        index = [[7, 1, 1]]
        by_keyword = raw_ops.Unbatch(
            id=7, timeout_micros=0, container="c", shared_name="s", name="n", batch_index=index, batched_tensor=X
        )
        assert by_keyword.tolist() == X[1:].tolist()
        assert raw_ops.UnbatchGrad(X, [[7, 0, 2]], X, 7, "c", "s", "n").tolist() == X.tolist()
        assert raw_ops.UnbatchGrad(grad=X, id=7, original_input=X, batch_index=[[7, 0, 2]]).tolist() == X.tolist()
        by_position = raw_ops.BatchFunction(
            [X], [], identity, 1, 2, 0, ["float32"], 10, [2], "", "s", "", 0, 0, [], 0,
            "priority_merge", "BATCH_DOWN", True, "n",
        )  # fmt: skip
        assert by_position[0].tolist() == X.tolist()

    @pytest.mark.parametrize(
        "tensors",
        [(X,), [X.tolist()], iter([X]), (x for x in [X]), X[None]],
        ids=["tuple", "lists", "iterator", "generator", "array"],
    )
    def test_in_tensors_is_any_iterable(self, clock, tensors):
        got = batch(tensors, max_batch_size=2)
        assert [x.tolist() for x in got.batched_tensors] == [X.tolist()]

    @pytest.mark.parametrize("id", [7, np.int64(7), np.array(7)], ids=["int", "scalar", "array"])
    def test_ids(self, clock, id):
        assert unbatch(X, [[7, 0, 1]], id).tolist() == X[:1].tolist()
        assert unbatch_grad(id=id).tolist() == X.tolist()

    @pytest.mark.parametrize(
        "index",
        [[[7, 0, 2]], ((7, 0, 2),), np.array([[7, 0, 2]]), np.array([[[7], [0], [2]]]), np.asfortranarray([[7, 0, 2]])],
        ids=["list", "tuple", "array", "[n, 3, 1]", "fortran"],
    )
    def test_indices(self, clock, index):
        assert unbatch(X, index).tolist() == X.tolist()
        assert unbatch_grad(index=index).tolist() == X.tolist()

    def test_an_index_without_a_stride(self, clock):
        wide = np.zeros((2, 6), np.int64)
        wide[:, ::2] = [[7, 0, 1], [8, 1, 1]]
        assert unbatch(X, wide[:, ::2]).tolist() == X[:1].tolist()


NAMES = {"float32": "float32", "half": "float16", "float": "float32", "double": "float64", "bool": "bool"}


class TestTout:
    """dtypes as text, NumPy, torch and JAX dtypes."""

    @staticmethod
    def run(clock, x, Tout):
        caller = start_on(clock, function, [x], Tout=Tout)
        clock.run_out()
        return caller.answer()[0]

    @pytest.mark.parametrize("name", NAMES)
    def test_text(self, clock, name):
        x = np.ones(2, NAMES[name])
        assert self.run(clock, x, [name]).dtype == x.dtype

    @pytest.mark.parametrize("dtype", [np.float32, np.dtype("f4"), ">f4", "f4", np.dtype(">f4")])
    def test_numpy(self, clock, dtype):
        assert self.run(clock, X, (dtype,)).dtype == np.float32

    @pytest.mark.parametrize("dtype", ["string", str, bytes, object, np.dtype("U5"), np.dtypes.StringDType()])
    def test_strings(self, clock, dtype):
        assert self.run(clock, np.array(["a", "bc"]), [dtype]).tolist() == ["a", "bc"]

    def test_torch(self, clock):
        need("torch")
        import torch

        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            assert self.run(clock, torch.ones(2, dtype=dtype), [dtype]).dtype == dtype

    def test_jax(self, clock):
        need("jax")
        import jax.numpy as jnp

        for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_, jnp.dtype("complex64")):
            assert self.run(clock, jnp.ones(2, dtype), [dtype]).dtype == dtype

    def test_zero_rows(self, clock):
        kinds = ["float16", "bfloat16", "int8", "string", "bool", "complex128"]
        got = function([X[:0]], Tout=kinds)
        assert [y.shape for y in got] == [(0,)] * len(kinds)
        assert [str(y.dtype) for y in got] == ["float16", "bfloat16", "int8", "object", "bool", "complex128"]

    @pytest.mark.parametrize("library", ["torch", "jax"])
    def test_zero_rows_elsewhere(self, clock, library):
        need(library)
        x = to(library, X[:0])
        (y,) = function([x], Tout=["bfloat16"])
        assert (tuple(y.shape), type(y)) == ((0,), type(x))
        with pytest.raises(InvalidArgumentError):
            function([x], Tout=["string"])

    def test_zero_rows_do_not_run_f(self, clock):
        ran = []
        function([X[:0]], f=lambda x: ran.append(x))
        assert ran == []
