"""What comes in goes out: every array library and dtype through the batching family."""

from __future__ import annotations

import numpy as np
import pytest
from support.callers import start_on
from support.libraries import back, for_each, need, to
from support.library_calls import LARGE, NO_ROWS, all_of, batch, bfloat16, chain, function, numbers, same

import weft
from weft import raw_ops
from weft.errors import DeadlineExceededError, InvalidArgumentError

DTYPES = [
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex64", "complex128", "bfloat16",
]  # fmt: skip
HELD = [(library, dtype) for library in ("numpy", "torch") for dtype in DTYPES]
# JAX has no 64-bit types unless told to, and compiles for each of the others.
HELD += [("jax", dtype) for dtype in DTYPES if dtype not in ("float64", "int64", "uint64", "complex128")]
SELDOM = [("jax", dtype) for dtype in DTYPES if dtype not in ("float32", "int32", "bool", "bfloat16")]


@for_each(("library", "dtype"), HELD, slow=SELDOM)
def test_every_dtype(clock, library, dtype):
    need(library)
    dtype = bfloat16() if dtype == "bfloat16" else dtype
    x, y = numbers(dtype, 2, 3), numbers(dtype, 1, 3)[:, ::-1]
    (first, a, ga), (last, b, gb) = chain(clock, to(library, x), to(library, y))
    kind = type(to(library, x))
    for got, wanted in [
        (last.batched_tensors[0], np.concatenate([x, y])),
        (first.batched_tensors[0], x[:0]),
        (a, x),
        (b, y),
        (gb, np.concatenate([x, y])),
        (ga, x[:0]),
    ]:
        assert type(got) is kind
        assert got.dtype == to(library, x).dtype
        got = back(got)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, wanted)


@for_each(("library", "dtype"), HELD, slow=SELDOM)
def test_functions_of_every_dtype(clock, library, dtype):
    need(library)
    name = dtype
    dtype = bfloat16() if dtype == "bfloat16" else dtype
    x, y = numbers(dtype, 2, 3), numbers(dtype, 1, 3)
    calls = [lambda v=v: function(same, to(library, v), Tout=[name], allowed_batch_sizes=[5, 1 << 20]) for v in (x, y)]
    for (got,), wanted in zip(all_of(clock, *calls), (x, y), strict=True):
        assert type(got) is type(to(library, x))
        np.testing.assert_array_equal(back(got), wanted)


def test_index_and_id_are_host_integers(clock, library):
    first, last = all_of(clock, *[lambda: batch(to(library, np.ones((2, 3), np.float32)))] * 2)
    for got, rows in ((first, 0), (last, 2)):
        assert tuple(got.batch_index.shape) == (rows, 3)
        assert tuple(got.id.shape) == ()
        if library == "torch":
            import torch

            for x in (got.batch_index, got.id):
                assert isinstance(x, torch.Tensor)
                assert (x.dtype, x.device.type) == (torch.int64, "cpu")
        else:
            for x in (got.batch_index, got.id):
                assert type(x) is np.ndarray
                assert x.dtype == np.int64
    assert [row[1:] for row in back(last.batch_index).tolist()] == [[0, 2], [2, 2]]
    assert back(last.batch_index)[:, 0].tolist() == [int(first.id), int(last.id)]


def test_zero_rows_keep_library_and_shape(clock, library):
    x = to(library, np.ones((0, 3), np.float32))
    got = batch(x)
    assert type(got.batched_tensors[0]) is type(x)
    assert tuple(got.batched_tensors[0].shape) == (0, 3)
    assert tuple(got.batch_index.shape) == (0, 3)
    piece = raw_ops.Unbatch(got.batched_tensors[0], got.batch_index, got.id, timeout_micros=0)
    grad = raw_ops.UnbatchGrad(got.batched_tensors[0], got.batch_index, piece, got.id)
    for y in (piece, grad):
        assert type(y) is type(x)
        assert tuple(y.shape) == (0, 3)


def test_indices_of_any_library(clock, library):
    data = to(library, np.arange(3, dtype=np.float32))
    index = np.array([[7, 0, 1], [8, 1, 2]])
    id = np.array(8)
    if library == "torch":
        index, id = to("torch", index), to("torch", id)
    assert back(raw_ops.Unbatch(data, index, id, timeout_micros=0)).tolist() == [1.0, 2.0]


class TestStrings:
    """Text of every kind is one type."""

    KINDS = {
        "str": np.array(["a", "βγ"]),
        "bytes": np.array([b"a", b"\xff\x00b"]),
        "object": np.array(["a", "βγ"], object),
        "StringDType": np.array(["a", "βγ"], np.dtypes.StringDType()),
        "object bytes": np.array([b"a", b"bc"], object),
        "rank 2": np.array([["a", "b"], ["c", "d"]]),
        "empty text": np.array(["", ""]),
    }

    @pytest.mark.parametrize("kind", KINDS)
    def test_results_are_objects(self, clock, kind):
        x = self.KINDS[kind]
        (_, a, _), (last, b, grad) = chain(clock, x, x[::-1])
        for got, wanted in (
            (last.batched_tensors[0], np.concatenate([x, x[::-1]])),
            (a, x),
            (b, x[::-1]),
            (grad, np.concatenate([x, x[::-1]])),
        ):
            assert got.dtype == object
            assert got.tolist() == wanted.tolist()

    def test_kinds_meet(self, clock):
        answers = all_of(clock, *[lambda k=k: batch(self.KINDS[k]) for k in ("str", "object", "StringDType", "bytes")])
        assert answers[-1].batched_tensors[0].tolist() == ["a", "βγ"] * 3 + [b"a", b"\xff\x00b"]

    @pytest.mark.parametrize("kind", ["str", "bytes", "StringDType", "object"])
    def test_a_waiter_of_any_kind(self, clock, kind):
        waiter = start_on(clock, raw_ops.Unbatch, self.KINDS[kind][:0], NO_ROWS, 5, 10**6)
        raw_ops.Unbatch(np.array(["x", "y"]), [[5, 0, 1], [6, 1, 1]], 6, 10**6)
        assert waiter.answer().tolist() == ["x"]
        raw_ops.Unbatch(np.array(["x", "y"]), [[5, 0, 1], [6, 1, 1]], 6, 10**6)
        late = raw_ops.Unbatch(self.KINDS[kind], NO_ROWS, 5, 10**6)
        assert (late.dtype, late.tolist()) == (object, ["x"])

    def test_functions(self, clock):
        def shout(x):
            return np.array([text.upper() for text in x])

        answers = all_of(
            clock, *[lambda k=k: function(shout, self.KINDS[k], Tout=["string"]) for k in ("str", "object")]
        )
        for (got,) in answers:
            assert (got.dtype, got.tolist()) == (object, ["A", "ΒΓ"])

    def test_zero_rows(self, clock):
        got = batch(np.array([], "U5"))
        assert got.batched_tensors[0].dtype == object
        assert raw_ops.Unbatch(np.array([], "U5"), NO_ROWS, got.id, 0).dtype == object


class TestLayout:
    """Byte order and strides are how a number is written, not what it is."""

    @pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8", ">u2"])
    def test_byte_order(self, clock, dtype):
        x = np.arange(6).reshape(2, 3).astype(dtype)
        y = x.astype(x.dtype.newbyteorder("="))
        (_, a, _), (last, _, grad) = chain(clock, x, y)
        for got in (last.batched_tensors[0], a, grad):
            assert got.dtype == y.dtype
            assert got.dtype.isnative
        np.testing.assert_array_equal(last.batched_tensors[0], np.concatenate([y, y]))

    def test_a_waiter_in_the_other_byte_order(self, clock):
        waiter = start_on(clock, raw_ops.Unbatch, np.zeros(0, ">f4"), NO_ROWS, 5, 10**6)
        raw_ops.Unbatch(np.array([1, 2], ">f4"), [[5, 0, 1], [6, 1, 1]], 6, 10**6)
        assert waiter.answer().tolist() == [1.0]

    def test_gradients_in_two_byte_orders(self, clock):
        grad = raw_ops.UnbatchGrad(np.ones(2, ">f4"), [[5, 0, 2]], np.array([1, 2], ">f4"), 5)
        assert grad.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize(
        "view",
        [
            lambda: np.arange(24.0).reshape(4, 6)[::2, ::-2],
            lambda: np.asfortranarray(np.arange(24.0).reshape(4, 6)),
            lambda: np.arange(24.0).reshape(4, 6).T,
            lambda: np.broadcast_to(np.arange(6.0), (4, 6)),
            lambda: np.lib.stride_tricks.sliding_window_view(np.arange(9.0), 6),
            lambda: np.arange(float(LARGE * 4)).reshape(4, -1)[::-1, ::2],
        ],
        ids=["strided", "fortran", "transposed", "broadcast", "overlapping", "large"],
    )
    def test_strides(self, clock, view):
        x = view()
        (_, a, _), (last, b, grad) = chain(clock, x, x)
        for got, wanted in (
            (last.batched_tensors[0], np.concatenate([x, x])),
            (a, x),
            (b, x),
            (grad, np.concatenate([x, x])),
        ):
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(raw_ops.Unbatch(x, [[5, 1, 1]], 5, 0, shared_name="other"), x[1:2])

    def test_torch_strides(self, clock):
        need("torch")
        import torch

        x = torch.arange(24.0).reshape(4, 6)
        for view in (x.T, x[:, ::2], x[:1].expand(4, 6), torch.conj(x + 1j * x), -torch.imag(x + 1j * x)):
            with weft.scope(clock):
                (_, a, _), (last, _, _) = chain(clock, view, view)
                torch.testing.assert_close(a, view.resolve_conj().resolve_neg())
                torch.testing.assert_close(last.batched_tensors[0], torch.cat([view, view]))

    def test_subclasses_are_stripped(self, clock):
        class Mine(np.ndarray):
            pass

        (_, a, _), (last, _, grad) = chain(clock, np.ones((1, 2)).view(Mine), np.ones((1, 2)).view(np.matrix))
        for got in (a, grad, last.batched_tensors[0]):
            assert type(got) is np.ndarray

    def test_parameters_without_grad(self, clock):
        need("torch")
        import torch

        x = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
        (_, a, _), (last, _, _) = chain(clock, x, x)
        assert type(a) is type(last.batched_tensors[0]) is torch.Tensor
        assert not a.requires_grad

    def test_no_dimension_but_the_first(self, clock, library):
        x = to(library, np.arange(3, dtype=np.float32))
        (_, a, _), (last, _, _) = chain(clock, x, x)
        assert back(a).tolist() == [0, 1, 2]
        assert back(last.batched_tensors[0]).tolist() == [0, 1, 2] * 2

    def test_rows_without_elements(self, clock, library):
        x = to(library, np.ones((2, 0, 3), np.float32))
        (first,), (last,) = all_of(clock, *[lambda: function(same, x)] * 2)
        assert tuple(first.shape) == tuple(last.shape) == (2, 0, 3)


class TestApart:
    """Device and library are part of a name: callers of different ones never meet."""

    def test_batch(self, clock):
        libraries = ["numpy", "torch", "jax"]
        for library in libraries:
            need(library)
        xs = [to(library, np.full((1, 2), i, np.float32)) for i, library in enumerate(libraries)]
        got = all_of(clock, *[lambda x=x: batch(x) for x in xs])
        for result, x in zip(got, xs, strict=True):
            assert type(result.batched_tensors[0]) is type(x)
            assert back(result.batched_tensors[0]).tolist() == back(x).tolist()

    def test_functions(self, clock):
        seen = []

        def f(x):
            seen.append((type(x).__module__.split(".")[0], len(x)))
            return x

        libraries = ["numpy", "torch"]
        need("torch")
        xs = [to(library, np.ones((1, 2), np.float32)) for library in libraries * 2]
        all_of(clock, *[lambda x=x: function(f, x) for x in xs])
        assert sorted(seen) == [("numpy", 2), ("torch", 2)]

    def test_unbatch(self, clock):
        need("torch")
        x = np.ones(2, np.float32)
        waiter = start_on(clock, raw_ops.Unbatch, to("torch", x), NO_ROWS, 5, 1000)
        raw_ops.Unbatch(x, [[5, 0, 1], [6, 1, 1]], 6, 1000)
        clock.run_out()
        with pytest.raises(DeadlineExceededError):
            waiter.answer()

    def test_unbatch_grad(self, clock):
        need("jax")
        x = np.ones(1, np.float32)
        owner = start_on(clock, raw_ops.UnbatchGrad, to("jax", x), [[5, 0, 1], [6, 1, 1]], to("jax", x), 5)
        raw_ops.UnbatchGrad(x[:0], NO_ROWS, x, 6)
        clock.run_out()
        with pytest.raises(DeadlineExceededError):
            owner.answer()

    def test_kinds_of_one_name(self, clock):
        x = np.ones((1, 2), np.float32)
        got, (y,) = all_of(clock, lambda: batch(x, shared_name="n"), lambda: function(same, x, shared_name="n"))
        assert got.batched_tensors[0].shape == y.shape == (1, 2)

    @pytest.mark.parametrize(
        "names", [{"container": "c"}, {"shared_name": "s"}, {"batching_queue": "q"}, {"name": "n"}]
    )
    def test_names(self, clock, names):
        x = np.ones((1, 2), np.float32)
        got = all_of(clock, lambda: batch(x), lambda: batch(x, **names), lambda: batch(x))
        assert [len(g.batched_tensors[0]) for g in got] == [0, 1, 2]


def test_f_may_answer_in_another_library(clock):
    need("torch")
    x = to("torch", np.ones((2, 2), np.float32))
    (got,), _ = all_of(clock, *[lambda: function(to_numpy, x)] * 2)
    assert isinstance(got, np.ndarray)
    assert got.shape == (2, 2)


def to_numpy(x):
    return x.numpy()


def test_f_must_answer_in_one_library(clock):
    need("torch")
    x = np.ones((2, 2), np.float32)
    f = lambda x: (x, to("torch", x))  # noqa: E731
    callers = [start_on(clock, function, f, x, Tout=["float32"] * 2) for _ in range(2)]
    clock.run_out()
    for caller in callers:
        assert isinstance(caller.end().error, InvalidArgumentError)
