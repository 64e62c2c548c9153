"""What comes in goes out: every array library and dtype through the batching family, and nobody's memory in another's hands."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from callers import start_on
from conftest import back, need, to

import weft
from weft import raw_ops
from weft.errors import DeadlineExceededError, InvalidArgumentError

NO_ROWS = np.empty((0, 3), np.int64)
LARGE = 1 << 16  # float64 numbers enough for memory that is used again


def batch(*tensors, **attributes):
    given = {
        "num_batch_threads": 1,
        "max_batch_size": 1 << 20,
        "batch_timeout_micros": 1000,
        "grad_timeout_micros": 0,
    } | attributes
    return raw_ops.Batch(list(tensors), **given)


def function(f, *tensors, Tout=("float32",), captured=(), **attributes):
    given = {"num_batch_threads": 1, "max_batch_size": 1 << 20, "batch_timeout_micros": 1000} | attributes
    return raw_ops.BatchFunction(list(tensors), list(captured), f, Tout=Tout, **given)


def all_of(clock, *calls):
    """The answers of calls that come one after the other at one time."""
    callers = [start_on(clock, call) for call in calls]
    clock.run_out()
    return [caller.answer() for caller in callers]


def numbers(dtype, *shape):
    count = int(np.prod(shape))
    values = np.arange(1, count + 1).reshape(shape)
    return (values % 2 == 0) if dtype == "bool" else values.astype(dtype)


def bfloat16():
    return pytest.importorskip("ml_dtypes").bfloat16


DTYPES = [
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex64", "complex128", "bfloat16",
]  # fmt: skip


def chain(clock, x, y):
    """Two callers through Batch, Unbatch and UnbatchGrad: the batch, its pieces, the joined gradient, in order."""

    def call(x):
        got = batch(x)
        piece = raw_ops.Unbatch(got.batched_tensors[0], got.batch_index, got.id, timeout_micros=1_000_000)
        grad = raw_ops.UnbatchGrad(got.batched_tensors[0], got.batch_index, piece, got.id)
        return got, piece, grad

    return all_of(clock, lambda: call(x), lambda: call(y))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(clock, library, dtype):
    if library == "jax" and dtype in ("float64", "int64", "uint64", "complex128"):
        pytest.skip("JAX has no 64-bit types unless told to")
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_of_every_dtype(clock, library, dtype):
    if library == "jax" and dtype in ("float64", "int64", "uint64", "complex128"):
        pytest.skip("JAX has no 64-bit types unless told to")
    name = dtype
    dtype = bfloat16() if dtype == "bfloat16" else dtype
    x, y = numbers(dtype, 2, 3), numbers(dtype, 1, 3)
    calls = [lambda v=v: function(same, to(library, v), Tout=[name], allowed_batch_sizes=[5, 1 << 20]) for v in (x, y)]
    for (got,), wanted in zip(all_of(clock, *calls), (x, y), strict=True):
        assert type(got) is type(to(library, x))
        np.testing.assert_array_equal(back(got), wanted)


def same(x):
    return x


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


# --- memory ---


def bytes_of(x):
    return np.asarray(back(x)).tobytes()


def overwrite(x):
    """Write to an array its caller was given; JAX arrays cannot be written to."""
    if type(x).__module__.startswith("torch"):
        x.fill_(-9)
    elif isinstance(x, np.ndarray):
        x[...] = -9


SIZES = [3, LARGE]


def check_apart(results, inputs):
    """No result shares memory with another or with an input: writing all over one leaves the others as they are."""
    if any(isinstance(x, np.ndarray) for x in results):
        for i, x in enumerate(results):
            for y in [*results[i + 1 :], *inputs]:
                assert not np.shares_memory(x, y)
    before = [bytes_of(x) for x in inputs]
    for i, x in enumerate(results):
        others = [bytes_of(y) for y in results[i + 1 :]]
        overwrite(x)
        assert [bytes_of(y) for y in results[i + 1 :]] == others
    assert [bytes_of(x) for x in inputs] == before


@pytest.mark.parametrize("size", SIZES, ids=["small", "large"])
class TestMemory:
    @staticmethod
    def inputs(library, size, count=3):
        return [to(library, np.arange(i, i + 2.0 * size, dtype=np.float32).reshape(2, size)) for i in range(count)]

    def test_of_batch(self, clock, library, size):
        inputs = self.inputs(library, size)
        got = all_of(clock, *[lambda x=x: batch(x, x) for x in inputs])
        check_apart([*got[-1].batched_tensors], inputs)

    def test_of_a_lone_batch(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        for most in (2, 100):  # full by itself, and not
            with weft.scope(clock):
                (got,) = all_of(clock, lambda most=most: batch(x, max_batch_size=most))
                check_apart(got.batched_tensors, [x])

    def test_of_unbatch(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        owner = raw_ops.Unbatch(x, [[1, 0, 1], [2, 1, 1]], 1, 10**6)
        other = raw_ops.Unbatch(x[:0], NO_ROWS, 2, 10**6)
        check_apart([owner, other], [x])

    def test_of_overlapping_pieces(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        owner = raw_ops.Unbatch(x, [[1, 1, 1], [2, 1, 1]], 1, 10**6)
        other = raw_ops.Unbatch(x[:0], NO_ROWS, 2, 10**6)
        check_apart([owner, other], [x])

    def test_of_unbatch_of_one(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        check_apart([raw_ops.Unbatch(x, [[1, 0, 2]], 1, 0)], [x])

    def test_stored_pieces_are_copies(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        wanted = back(x)[1:].copy()
        raw_ops.Unbatch(x, [[1, 0, 1], [2, 1, 1]], 1, 10**6)
        overwrite(x)
        np.testing.assert_array_equal(back(raw_ops.Unbatch(x[:0], NO_ROWS, 2, 10**6)), wanted)

    def test_of_unbatch_grad(self, clock, library, size):
        a, b = self.inputs(library, size, 2)
        wanted = np.concatenate([back(b), back(a)])
        raw_ops.UnbatchGrad(a[:0], NO_ROWS, a, 1)
        kept = back(a).copy()
        overwrite(a)  # its sender goes on with its array
        got = raw_ops.UnbatchGrad(b, [[2, 0, 2], [1, 2, 2]], b, 2)
        np.testing.assert_array_equal(back(got), wanted)
        check_apart([got], [b])
        assert kept.shape == (2, size)

    def test_of_unbatch_grad_of_one(self, clock, library, size):
        (a,) = self.inputs(library, size, 1)
        check_apart([raw_ops.UnbatchGrad(a, [[2, 0, 2]], a, 2)], [a])

    @pytest.mark.parametrize("what", ["its input", "its own buffer", "a capture", "one array twice", "views of one"])
    def test_of_functions(self, clock, library, size, what):
        inputs = self.inputs(library, size)
        fixed = to(library, np.zeros((6, size), np.float32))
        functions = {
            "its input": lambda x: (x, x),
            "its own buffer": lambda x: (fixed, x),
            "a capture": lambda x, c: (c, c),
            "one array twice": lambda x: [x + 1] * 2,
            "views of one": lambda x: (x, x[:, 1:]),
        }
        captured = [fixed] if what == "a capture" else []
        f = functions[what]
        calls = [lambda x=x: function(f, x, Tout=["float32"] * 2, captured=captured) for x in inputs]
        got = all_of(clock, *calls)
        check_apart([y for outputs in got for y in outputs], [*inputs, fixed])

    def test_of_a_lone_function_call(self, clock, library, size):
        (x,) = self.inputs(library, size, 1)
        kept = []

        def f(x):
            kept.append(x)
            return x

        for split in (False, True):
            with weft.scope(clock):
                (got,) = all_of(
                    clock,
                    lambda split=split: function(
                        f, x, max_batch_size=2, allowed_batch_sizes=[1, 2], enable_large_batch_splitting=split
                    ),
                )
                check_apart(got, [x, *kept])

    def test_f_may_write_to_its_batch(self, clock, library, size):
        inputs = self.inputs(library, size)
        before = [bytes_of(x) for x in inputs]

        def f(x):
            overwrite(x)
            return x

        for calls in (inputs, inputs[:1]):
            all_of(clock, *[lambda x=x: function(f, x) for x in calls])
        assert [bytes_of(x) for x in inputs] == before


def test_a_small_piece_does_not_hold_the_batch():
    with weft.scope():
        x = np.zeros((64, LARGE // 8))
        small = raw_ops.Unbatch(x, [[1, 0, 1]], 1, 0)
        assert small.base is None or small.base.nbytes < x.nbytes
        need("torch")
        t = to("torch", x)
        small = raw_ops.Unbatch(t, [[1, 0, 1]], 1, 0)
        assert small.untyped_storage().nbytes() < x.nbytes


def test_memory_is_lent_to_one_at_a_time():
    """Results that are kept are never taken up again, whoever holds them and however."""
    with weft.scope():
        rng = np.random.default_rng(0)
        holders = [
            lambda y: y,
            lambda y: y[1:, ::2],
            lambda y: y.reshape(-1)[5:].view(np.uint8),
            memoryview,
            lambda y: np.frombuffer(y, np.uint8),
            lambda y: np.from_dlpack(y),
            lambda y: y.T,
        ]
        held = []
        for turn in range(60):
            x = rng.random((2, LARGE))
            (y,) = raw_ops.Batch([x], 1, 2, 0, 0).batched_tensors
            holder = holders[turn % len(holders)](y)
            held.append((holder, np.array(holder)))
            del y
            if turn % 3 == 2:
                held.pop(turn % len(held))
        for holder, copy in held:
            np.testing.assert_array_equal(np.asarray(holder), copy)


def test_memory_held_by_other_libraries():
    need("torch")
    import torch

    with weft.scope():
        held = []
        for i in range(20):
            (y,) = raw_ops.Batch([np.full((2, LARGE), float(i))], 1, 2, 0, 0).batched_tensors
            held.append(torch.from_numpy(y)[1:])
            del y
        assert [float(t.min()) for t in held] == [float(t.max()) for t in held] == list(range(20))


@pytest.mark.usefixtures("little_garbage")
def test_inputs_are_let_go(clock):
    """When a call is over nothing keeps its arrays alive, nor its function's captures."""

    class Held(np.ndarray):
        pass

    x = np.ones((2, 3)).view(Held)
    c = np.ones(3).view(Held)
    gone = [weakref.ref(x), weakref.ref(c)]
    for call in (lambda x, c: batch(x), lambda x, c: function(np.add, x, captured=[c], Tout=["float64"])):
        caller = start_on(clock, call, x, c)
        clock.run_out()
        caller.answer()
    caller = None
    raw_ops.Unbatch(x, [[1, 0, 1], [2, 1, 1]], 1, 1000)
    raw_ops.UnbatchGrad(x[:0], NO_ROWS, x, 3)
    del x, c
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


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
