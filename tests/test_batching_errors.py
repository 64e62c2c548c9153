"""Bad input to Batch, Unbatch, UnbatchGrad and BatchFunction: the class it raises, and that nothing is left behind."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from callers import start, start_on
from conftest import back, need, to

import weft
from weft import raw_ops
from weft.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    UnavailableError,
)

NO_ROWS = np.empty((0, 3), np.int64)
X = np.ones((2, 3), np.float32)


def batch(in_tensors=(X,), **attributes):
    given = {
        "num_batch_threads": 1,
        "max_batch_size": 8,
        "batch_timeout_micros": 0,
        "grad_timeout_micros": 0,
    } | attributes
    return raw_ops.Batch(in_tensors, **given)


def identity(x):
    return x


def function(in_tensors=(X,), captured_tensors=(), f=identity, **attributes):
    given = {
        "num_batch_threads": 1,
        "max_batch_size": 8,
        "batch_timeout_micros": 0,
        "Tout": ["float32"],
    } | attributes
    return raw_ops.BatchFunction(in_tensors, captured_tensors, f, **given)


def unbatch(data=X, index=NO_ROWS, id=7, timeout_micros=1000, **attributes):
    return raw_ops.Unbatch(data, index, id, timeout_micros=timeout_micros, **attributes)


def unbatch_grad(original=X, index=((7, 0, 2),), grad=X, id=7, **attributes):
    return raw_ops.UnbatchGrad(original, index, grad, id, **attributes)


def both(name, **bad):
    """The same bad attributes for Batch and BatchFunction."""
    yield f"Batch {name}", lambda: batch(**bad)
    yield f"BatchFunction {name}", lambda: function(**bad)


SPLIT = {"enable_large_batch_splitting": True}

INVALID = dict(
    [
        *both("allowed sizes not increasing", allowed_batch_sizes=[4, 4, 8]),
        *both("allowed sizes falling", allowed_batch_sizes=[8, 4]),
        *both("last allowed below max", allowed_batch_sizes=[2, 4]),
        *both("last allowed above max", allowed_batch_sizes=[2, 9]),
        *both("no rows at most", max_batch_size=0),
        *both("negative max_batch_size", max_batch_size=-1),
        *both("negative timeout", batch_timeout_micros=-1),
        *both("too many threads", num_batch_threads=4097),
        *both("issues 65729, 69701: 93389718 threads", num_batch_threads=93389718),
        *both("threads outside int32", num_batch_threads=2**31),
        *both("max_batch_size outside int32", max_batch_size=2**31),
        *both("timeout outside int32", batch_timeout_micros=2**31),
        *both("enqueued outside int32", max_enqueued_batches=-(2**31) - 1),
        *both("allowed size outside int32", allowed_batch_sizes=[2**31]),
        *both("scalar input", in_tensors=[np.float32(1)]),
        *both("scalar second input", in_tensors=[X, np.float32(1)]),
        *both("bare vector: its items are scalars", in_tensors=np.ones(2, np.float32)),
        *both("unequal first dimensions", in_tensors=[X, np.ones((3, 3))]),
        *both("unequal first dimensions, one zero", in_tensors=[np.ones((0, 3)), X]),
        *both("more rows than max", max_batch_size=1),
        *both("no tensors", in_tensors=[]),
        *both("objects that are not text", in_tensors=[np.array([1, "a"], object)]),
        *both("None as a tensor", in_tensors=[None]),
        *both("dates", in_tensors=[np.zeros(2, "datetime64[s]")]),
        *both("structures", in_tensors=[np.zeros(2, [("a", "i4")])]),
        *both("long doubles", in_tensors=[np.zeros(2, np.longdouble)]),
        ("Batch no threads", lambda: batch(num_batch_threads=0)),
        ("Batch no threads, zero rows", lambda: batch([X[:0]], num_batch_threads=0)),
        ("Batch no threads, scalar", lambda: batch([np.float32(1)], num_batch_threads=-3)),
        ("BatchFunction splitting: last allowed above max", lambda: function(allowed_batch_sizes=[9], **SPLIT)),
        ("BatchFunction splitting: nothing may wait", lambda: function(max_enqueued_batches=0, **SPLIT)),
        ("BatchFunction splitting: more rows than max", lambda: function(max_batch_size=1, **SPLIT)),
        ("BatchFunction adaptive: nothing may wait", lambda: function(num_batch_threads=0, max_enqueued_batches=0)),
        ("BatchFunction adaptive: endless queue", lambda: function(num_batch_threads=0, max_enqueued_batches=-1)),
        ("BatchFunction adaptive: no rows at most", lambda: function(num_batch_threads=0, max_batch_size=0)),
        ("BatchFunction adaptive: last allowed above max",
         lambda: function(num_batch_threads=0, allowed_batch_sizes=[9])),
        ("BatchFunction adaptive: more rows than max", lambda: function(num_batch_threads=-1, max_batch_size=1)),
        ("BatchFunction no Tout", lambda: function(Tout=[])),
        ("BatchFunction Tout is not a dtype", lambda: function(Tout=["floaty"])),
        ("BatchFunction bad policy", lambda: function(mixed_priority_policy="first_come")),
        ("BatchFunction bad padding", lambda: function(batch_padding_policy="PAD_DOWN")),
        ("BatchFunction low attribute outside int32", lambda: function(low_priority_max_batch_size=2**31)),
        ("BatchFunction f is None", lambda: function(f=None)),
        ("BatchFunction f is a number", lambda: function(f=3)),
        ("BatchFunction f is an array", lambda: function(f=X)),
        ("BatchFunction f takes fewer", lambda: function(captured_tensors=[X])),
        ("BatchFunction f takes more", lambda: function(f=lambda x, y: x)),
        ("BatchFunction zero rows of a type NumPy lacks", lambda: function([X[:0]], Tout=["variant"])),
        ("Unbatch more index rows than data", lambda: unbatch(X[:1], [[1, 0, 1], [2, 0, 0]])),
        ("Unbatch second dimension", lambda: unbatch(index=np.zeros((1, 2), np.int64))),
        ("Unbatch id of two", lambda: unbatch(index=[[7, 0, 1]], id=[7, 7])),
        ("Unbatch id of one in a list", lambda: unbatch(id=[7])),
        ("Unbatch id int32", lambda: unbatch(id=np.int32(7))),
        ("Unbatch index int32", lambda: unbatch(index=np.zeros((1, 3), np.int32))),
        ("Unbatch sizes beyond the rows", lambda: unbatch(index=[[7, 0, 2], [8, 0, 1]])),
        ("Unbatch timeout outside int32", lambda: unbatch(timeout_micros=2**31)),
        ("Unbatch type that cannot be cut", lambda: unbatch(np.zeros(1, "datetime64[s]"), [[7, 0, 1]])),
        ("Unbatch objects that are not text", lambda: unbatch(np.array([None]), [[7, 0, 1]])),
        ("issue 104846: rank-1 index", lambda: unbatch(np.zeros(1), np.array([0]), 0, timeout_micros=0)),
        ("issue 80751: scalar index", lambda: unbatch(np.zeros((3, 3)), np.array(1))),
        ("issue 65633 a: end before start", lambda: unbatch(index=[[0, 1, -1]])),
        ("issue 65633 b: index [2, 3, 3]", lambda: unbatch(np.zeros((3, 3)), np.zeros((2, 3, 3), np.int64))),
        ("issue 65633 c: rank-1 index of three", lambda: unbatch(index=np.array([7, 0, 1]))),
        ("PR 123865: scalar data", lambda: unbatch(np.float32(1), [[7, 0, 1]])),
        ("PR 123865: scalar data without rows", lambda: unbatch(np.float32(1))),
        ("zero rows as TensorFlow has them: index [0]", lambda: unbatch(index=np.empty(0, np.int64))),
        ("sizes whose sum wraps", lambda: unbatch(np.zeros(4), [[i, 0, 2**62] for i in range(4)])),
        ("a start whose end wraps", lambda: unbatch(index=[[7, 2**63 - 1, 2]])),
        ("the smallest start", lambda: unbatch(index=[[7, -(2**63), 2**63 - 1]])),
        ("the largest length", lambda: unbatch(index=[[7, 1, 2**63 - 1]])),
        ("a piece after the end", lambda: unbatch(index=[[7, 2, 1]])),
        ("CVE-2022-35952 a", lambda: unbatch_grad(np.ones(1), [[0, 0, 0]], np.ones(1), np.array([1, 1]))),
        ("CVE-2022-35952 b", lambda: unbatch_grad(np.ones(1), [[0, 0]], np.ones(1), np.array([1]))),
        ("CVE-2022-35952 b with a scalar id", lambda: unbatch_grad(np.ones(1), [[0, 0]], np.ones(1), 1)),
        ("testUnbatchGradInvalidArgs",
         lambda: unbatch_grad(*np.random.default_rng(0).integers(0, 9, (3, 3, 1)), np.zeros((3, 1), np.int64))),
        ("UnbatchGrad owner without index", lambda: unbatch_grad(index=NO_ROWS)),
        ("UnbatchGrad scalar index", lambda: unbatch_grad(index=np.array(3))),
        ("UnbatchGrad index [3]", lambda: unbatch_grad(index=np.array([7, 0, 2]))),
        ("UnbatchGrad index [n, 4]", lambda: unbatch_grad(index=np.zeros((1, 4), np.int64))),
        ("UnbatchGrad index [n, 3, 2]", lambda: unbatch_grad(index=np.zeros((1, 3, 2), np.int64))),
        ("UnbatchGrad scalar original", lambda: unbatch_grad(np.float32(1))),
        ("UnbatchGrad scalar grad of an owner", lambda: unbatch_grad(grad=np.float32(1))),
        ("issue 65636: scalar grad, nothing of the batch", lambda: unbatch_grad(X[:0], NO_ROWS, np.float32(1))),
        ("UnbatchGrad dtype of grad", lambda: unbatch_grad(grad=X.astype(np.float64))),
        ("UnbatchGrad type that cannot be joined",
         lambda: unbatch_grad(np.zeros(1, "datetime64[s]"), [[7, 0, 1]], np.zeros(1, "datetime64[s]"))),
    ]
)  # fmt: skip

OTHERS = {
    "BatchFunction f by name": (NotFoundError, lambda: function(f="identity")),
    "BatchFunction f by name in bytes": (NotFoundError, lambda: function(f=b"identity")),
    "Unbatch a foreign id twice": (AlreadyExistsError, lambda: unbatch(index=[[8, 0, 1], [8, 1, 1]])),
    "Unbatch own and a foreign id twice": (
        AlreadyExistsError,
        lambda: unbatch(np.zeros(3), [[7, 0, 1], [8, 1, 1], [8, 2, 1]]),
    ),
    "UnbatchGrad an id twice": (InternalError, lambda: unbatch_grad(index=[[7, 0, 1], [7, 1, 1]])),
    "UnbatchGrad a foreign id twice": (InternalError, lambda: unbatch_grad(index=[[8, 0, 1], [8, 1, 1]])),
    "int beyond 64 bits": (OverflowError, lambda: batch(grad_timeout_micros=2**63)),
    "id beyond 64 bits": (OverflowError, lambda: unbatch(id=2**63)),
}

PYTHON_LAYER = {
    "missing argument": lambda: raw_ops.Batch([X], 1, 8, 0),
    "unknown argument": lambda: batch(max_batch=3),
    "too many by position": lambda: raw_ops.UnbatchGrad(X, [[7, 0, 2]], X, 7, "", "", None, 1),
    "argument given twice": lambda: raw_ops.Unbatch(X, NO_ROWS, 7, 0, timeout_micros=0),
    "int as text": lambda: batch(max_batch_size="8"),
    "int as None": lambda: batch(num_batch_threads=None),
    "required int of BatchFunction as None": lambda: function(batch_timeout_micros=None),
    "timeout of Unbatch as None": lambda: unbatch(timeout_micros=None),
    "int as a list": lambda: batch(max_batch_size=[8]),
    "int as an array of one": lambda: batch(max_batch_size=np.array([8])),
    "int as complex": lambda: batch(max_batch_size=8 + 0j),
    "low-priority int as text": lambda: function(low_priority_max_batch_size="4"),
    "low-priority int as empty text": lambda: function(low_priority_max_batch_size=""),
    "text as a number": lambda: batch(shared_name=3),
    "container as a list": lambda: batch(container=["c"]),
    "queue as a number": lambda: function(batching_queue=1.5),
    "policy as a number": lambda: function(mixed_priority_policy=0),
    "padding as a number": lambda: function(batch_padding_policy=1),
    "text of Unbatch": lambda: unbatch(shared_name=3),
    "text of UnbatchGrad": lambda: unbatch_grad(container=3),
    "sizes as a number": lambda: batch(allowed_batch_sizes=8),
    "sizes as an array": lambda: batch(allowed_batch_sizes=np.array([8])),
    "sizes as text": lambda: batch(allowed_batch_sizes="8"),
    "a size as text": lambda: batch(allowed_batch_sizes=["8"]),
    "Tout as text": lambda: function(Tout="float32"),
    "Tout as a dtype": lambda: function(Tout=np.float32),
    "Tout as None": lambda: function(Tout=None),
    "in_tensors as a float": lambda: batch(1.0),
    "in_tensors as None": lambda: batch(None),
    "in_tensors of BatchFunction as a float": lambda: function(1.0),
    "captured_tensors as None": lambda: function(captured_tensors=None),
    "index of floats": lambda: unbatch(index=[[7.0, 0.0, 1.0]]),
    "index of text": lambda: unbatch(index=[["7", "0", "1"]]),
    "id as a float": lambda: unbatch(id=7.0),
    "id as text": lambda: unbatch(id="7"),
    "id as None": lambda: unbatch(id=None),
    "id of UnbatchGrad as a float": lambda: unbatch_grad(id=7.0),
}


def check_untouched(scope):
    """Nothing is stored, no name is taken, and a good call on every name goes through without a warning."""
    assert scope.sweep() == 0
    assert scope.resources == {}, "a refused call creates no resource"
    check_usable(scope.clock)


def check_usable(clock, warns=False):
    def calls():
        joined = batch()
        (y,) = function()
        return joined, y, unbatch(X, [[7, 0, 2]]), unbatch_grad()

    with warnings.catch_warnings():
        if warns:  # the names have parameters by now
            warnings.simplefilter("ignore", UserWarning)
        caller = start_on(clock, calls)
        clock.run_out()
    joined, y, piece, grad = caller.answer()
    for got in (joined.batched_tensors[0], y, piece, grad):
        np.testing.assert_array_equal(got, X)


@pytest.mark.parametrize("name", INVALID)
def test_invalid_argument(clock, name):
    with weft.scope(clock) as scope:
        with pytest.raises(InvalidArgumentError) as caught:
            INVALID[name]()
        assert type(caught.value) is InvalidArgumentError
        assert isinstance(caught.value, ValueError)
        assert caught.value.error_code == 3
        assert caught.value.__notes__[0].startswith("in weft.raw_ops.")
        check_untouched(scope)


@pytest.mark.parametrize("name", OTHERS)
def test_other_classes(clock, name):
    wanted, call = OTHERS[name]
    with weft.scope(clock) as scope:
        with pytest.raises(wanted) as caught:
            call()
        assert type(caught.value) is wanted
        check_untouched(scope)


@pytest.mark.parametrize("name", PYTHON_LAYER)
def test_type_errors(clock, name):
    with weft.scope(clock) as scope:
        with pytest.raises(TypeError):
            PYTHON_LAYER[name]()
        check_untouched(scope)


class TestFragments:
    """What TensorFlow's own tests look for in messages; the fourth fragment, of device placement, has no case here."""

    @pytest.mark.parametrize(
        ("text", "call"),
        [
            ("must have equal 0th-dimension size", lambda: batch([X, np.ones(3)])),
            ("must have equal 0th-dimension size", lambda: function([X, np.ones(3)])),
            ("Input id should be scalar;", lambda: unbatch(id=np.array([1, 2]))),
            ("Input id should be scalar;", lambda: unbatch_grad(id=np.array([1, 2]))),
            ("Function takes 2 argument(s) but 1 argument(s) were passed", lambda: function(f=lambda x, y: x)),
        ],
    )
    def test_fragment(self, clock, text, call):
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert text in str(caught.value)

    def test_functions_that_do_not_tell_are_tried(self, clock):
        caller = start_on(clock, function, f=np.negative)
        clock.run_out()
        assert caller.answer()[0].tolist() == (-X).tolist()

    def test_defaults_and_stars_count(self, clock):
        assert start_on(clock, function, f=lambda x, y=1: x).answer()[0].tolist() == X.tolist()
        assert start_on(clock, function, f=lambda *xs: xs[0]).answer()[0].tolist() == X.tolist()
        with pytest.raises(InvalidArgumentError, match=r"takes 2 or more argument"):
            function(f=lambda x, y, *more: x)


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


def refuse(x):
    raise UnavailableError("later")


class TestWholeBatch:
    """Errors that concern all calls of a batch: each gets an exception of its own, and the queue goes on."""

    @staticmethod
    def fails(clock, calls, wanted):
        callers = [start_on(clock, call) for call in calls]
        clock.run_out()
        found = [caller.end().error for caller in callers]
        assert [type(error) for error in found] == [wanted] * len(calls)
        assert len({id(error) for error in found}) == len(found)
        check_usable(clock, warns=True)
        assert weft.sweep() == 0
        return found

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ([X], [X[:, :2]]),
            ([X], [X[:, 0]]),
            ([X], [X.astype(np.float64)]),
            ([X], [X.astype(np.int32)]),
            ([X, X], [X, X[:, :2]]),
            ([X, X], [X]),
            ([np.array(["a"])], [np.array([1.0])]),
        ],
        ids=["trailing", "rank", "dtype", "dtype kind", "second tensor", "number", "text"],
    )
    def test_batch_that_cannot_be_formed(self, clock, one, other):
        for pair in ([one, other], [other, one], [one, other, one], [one, one, other]):
            calls = [lambda tensors=tensors: batch(tensors, batch_timeout_micros=1000) for tensors in pair]
            with weft.scope(clock):
                self.fails(clock, calls, InvalidArgumentError)

    def test_function_on_a_batch_that_cannot_be_formed(self, clock):
        calls = [lambda x=x: function([x], batch_timeout_micros=1000) for x in (X, X[:, :2], X)]
        self.fails(clock, calls, InvalidArgumentError)

    @pytest.mark.parametrize(
        ("wanted", "f", "Tout"),
        [
            (FailedPreconditionError, lambda x: x.sum(), ["float32"]),
            (FailedPreconditionError, lambda x: None, ["float32"]),
            (FailedPreconditionError, lambda x: x[:-1], ["float32"]),
            (FailedPreconditionError, lambda x: np.concatenate([x, x]), ["float32"]),
            (FailedPreconditionError, lambda x: (x, x.sum()), ["float32", "float32"]),
            (InternalError, lambda x: (x, x), ["float32"]),
            (InternalError, lambda x: x, ["float32", "float32"]),
            (InternalError, lambda x: [], ["float32"]),
            (InvalidArgumentError, lambda x: x.astype(np.float64), ["float32"]),
            (InvalidArgumentError, lambda x: x, ["int32"]),
            (InvalidArgumentError, lambda x: x, ["string"]),
            (ZeroDivisionError, lambda x: 1 // 0, ["float32"]),
            (KeyError, lambda x: {}["missing"], ["float32"]),
            (UnavailableError, refuse, ["float32"]),
        ],
        ids=[
            "scalar", "None", "rows missing", "rows too many", "second output scalar", "outputs too many",
            "outputs too few", "no outputs", "float64", "wanted int32", "wanted string", "ZeroDivisionError", "KeyError",
            "an op's error",
        ],
    )  # fmt: skip
    def test_outputs_of_f(self, clock, wanted, f, Tout):
        calls = [lambda: function(f=f, Tout=Tout, batch_timeout_micros=1000)] * 3
        for error in self.fails(clock, calls, wanted):
            if not isinstance(error, OpError) or wanted is UnavailableError:
                assert type(error.__cause__) is wanted

    def test_error_in_a_slice_fails_only_those_with_rows_in_it(self, clock):
        def f(x):
            if (x >= 5).any():
                raise ValueError("too large")
            return x

        def call(values):
            return function(
                [np.array(values)], f=f, Tout=["int64"], max_batch_size=8, allowed_batch_sizes=[2],
                batch_timeout_micros=1000, **SPLIT,
            )[0].tolist()  # fmt: skip

        callers = [start_on(clock, call, values) for values in ([1, 2, 3], [4, 5, 6], [0])]
        clock.run_out()
        assert callers[0].answer() == [1, 2, 3]
        assert isinstance(callers[1].end().error, ValueError)
        assert callers[2].answer() == [0]
        assert weft.sweep() == 0

    def test_slices_that_do_not_join(self, clock):
        caller = start_on(
            clock, function, [np.ones(3)], f=lambda x: np.ones((len(x), len(x))), Tout=["float64"],
            allowed_batch_sizes=[1, 2], **SPLIT,
        )  # fmt: skip
        clock.run_out()
        with pytest.raises(InvalidArgumentError):
            caller.answer()


class TestFull:
    def test_a_full_queue_refuses_and_stays_as_it_was(self, clock):
        attributes = {"max_batch_size": 2, "max_enqueued_batches": 1, "batch_timeout_micros": 1000}
        first = start_on(clock, batch, [X[:1]], **attributes)
        with pytest.raises(UnavailableError) as caught:
            batch([X], **attributes)
        assert caught.value.http_status == 429
        last = start_on(clock, batch, [X[1:]], **attributes)
        assert last.answer().batched_tensors[0].tolist() == X.tolist()
        assert first.answer().batched_tensors[0].shape == (0, 3)

    @pytest.mark.parametrize("bad", [{"max_batch_size": 3}, {"num_batch_threads": 2}, {"batch_timeout_micros": 5}])
    def test_the_first_parameters_win_and_nonsense_is_ignored(self, clock, bad):
        batch(max_batch_size=2)
        with pytest.warns(UserWarning, match="is ignored"):
            assert batch(**{"max_batch_size": 2} | bad).batched_tensors[0].tolist() == X.tolist()

    def test_own_allowed_sizes_are_checked_even_so(self, clock):
        batch(max_batch_size=2)
        with pytest.raises(InvalidArgumentError):
            batch(max_batch_size=2, allowed_batch_sizes=[1])

    def test_low_priority_calls_are_refused_by_their_own_limits(self, clock):
        attributes = {"low_priority_max_batch_size": 1, "low_priority_max_enqueued_batches": 1}
        with weft.scope(clock) as scope:
            with weft.priority("low"), pytest.raises(UnavailableError):
                function(**attributes)
            check_untouched(scope)


class TestUnbatch:
    """What waits, and what it must not disturb."""

    def test_two_waiters_for_one_id(self, clock):
        first = start_on(clock, unbatch, timeout_micros=10_000)
        with pytest.raises(AlreadyExistsError):
            unbatch(timeout_micros=10_000)
        assert unbatch(np.arange(2.0, dtype=np.float32), [[7, 1, 1], [8, 0, 1]], 8, 10_000).tolist() == [0.0]
        assert first.answer().tolist() == [1.0]
        assert weft.sweep() == 0

    def test_a_second_piece_for_an_id(self, clock):
        assert unbatch(X, [[7, 0, 1], [8, 1, 1]]).tolist() == X[:1].tolist()
        with pytest.raises(AlreadyExistsError):
            unbatch(X * 9, [[9, 0, 1], [8, 1, 1]], 9)
        assert weft.sweep() == 1
        assert unbatch(id=8).tolist() == X[1:].tolist()
        assert weft.sweep() == 0

    def test_a_failed_call_delivers_nothing(self, clock):
        waiter = start_on(clock, unbatch, timeout_micros=5_000)
        with pytest.raises(AlreadyExistsError):
            unbatch(np.zeros((3, 3), np.float32), [[7, 0, 1], [8, 1, 1], [8, 2, 1]], 9, 5_000)
        assert weft.sweep() == 1, "the waiter alone"
        clock.run_out()
        assert isinstance(waiter.end().error, DeadlineExceededError)
        assert clock.now() == pytest.approx(0.005)

    def test_a_failed_call_leaves_no_waiter_that_fails_another(self, clock):
        """TensorFlow leaves one, and its deadline fails someone else."""
        with pytest.raises(AlreadyExistsError):
            unbatch(X, [[8, 0, 1], [8, 1, 1]], 7, 5_000)
        clock.advance(0.003)
        waiter = start_on(clock, unbatch, timeout_micros=5_000)
        clock.advance(0.004)
        assert waiter.is_alive()
        unbatch(X, [[7, 0, 1], [9, 1, 1]], 9, 5_000)
        assert waiter.answer().tolist() == X[:1].tolist()

    def test_dtype_of_a_waiter(self, clock):
        waiter = start_on(clock, unbatch, X.astype(np.int32))
        assert unbatch(X, [[8, 0, 1], [7, 1, 1]], 8).tolist() == X[:1].tolist()
        with pytest.raises(InvalidArgumentError):
            waiter.answer()
        assert weft.sweep() == 0

    def test_dtype_of_a_late_consumer(self, clock):
        unbatch(X, [[8, 0, 1], [7, 1, 1]], 8)
        with pytest.raises(InvalidArgumentError):
            unbatch(X.astype(np.int32))
        assert unbatch().tolist() == X[1:].tolist(), "the piece is still there for one who can take it"

    def test_a_deadline(self, clock):
        waiter = start_on(clock, unbatch, timeout_micros=2_000)
        clock.run_out()
        with pytest.raises(DeadlineExceededError) as caught:
            waiter.answer()
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.http_status == 504
        assert (clock.now(), weft.sweep()) == (pytest.approx(0.002), 0)

    @pytest.mark.parametrize("micros", [0, -1, -(2**31)])
    def test_no_time_to_wait(self, clock, micros):
        assert unbatch(X, [[7, 0, 1]], timeout_micros=micros).tolist() == X[:1].tolist()
        waiter = start_on(clock, unbatch, timeout_micros=micros)
        with pytest.raises(DeadlineExceededError):
            waiter.answer()
        assert weft.sweep() == 0

    def test_a_piece_expires(self, clock):
        unbatch(X, [[8, 0, 1], [7, 1, 1]], 8, 1_000)
        clock.advance(0.0011)
        late = start_on(clock, unbatch, timeout_micros=1_000)
        clock.run_out()
        assert isinstance(late.end().error, DeadlineExceededError)
        assert weft.sweep() == 0

    def test_a_dropped_piece_is_dropped_by_the_next_call_on_any_resource(self, clock):
        with weft.scope(clock) as scope:
            unbatch(X, [[8, 0, 1], [7, 1, 1]], 8, 1_000)
            assert scope.stored() == 1
            clock.advance(0.002)
            batch(max_batch_size=2)
            assert scope.stored() == 0


class TestUnbatchGrad:
    """Every failed owner gives its id back, and takes nobody else's gradient with it."""

    @staticmethod
    def send(id, grad=X[:1], **names):
        return unbatch_grad(X[:0], NO_ROWS, grad, id, **names)

    def test_an_id_in_use(self, clock):
        self.send(7)
        with pytest.raises(InvalidArgumentError):
            self.send(7)
        with pytest.raises(InvalidArgumentError):
            unbatch_grad(index=[[7, 0, 1]])
        assert weft.sweep() == 1
        clock.advance(60.1)
        assert weft.sweep() == 0
        self.send(7)

    @pytest.mark.parametrize("index", [NO_ROWS, [[7, 0, 1]], [[7, 0, 3]], [[7, 0, -2]]])
    def test_a_retry_after_a_bad_index(self, clock, index):
        with pytest.raises(InvalidArgumentError):
            unbatch_grad(index=index)
        assert weft.sweep() == 0
        assert unbatch_grad().tolist() == X.tolist()

    def test_a_missing_id_wanted_twice(self, clock):
        first = start_on(clock, unbatch_grad, index=[[7, 0, 2], [9, 2, 1]])
        with pytest.raises(InvalidArgumentError):
            unbatch_grad(index=[[8, 0, 2], [9, 2, 1]], id=8)
        self.send(9)
        assert first.answer().shape == (3, 3)
        assert weft.sweep() == 0

    def test_a_gradient_claimed_by_one_owner_is_not_stolen_by_another(self, clock):
        """Owner 1 has the gradient of 2 and waits for 3; owner 4 names 2 as well."""
        first = start_on(clock, unbatch_grad, index=[[1, 0, 1], [2, 1, 1], [3, 2, 1]], grad=X[:1], id=1)
        self.send(2)
        thief = start_on(clock, unbatch_grad, index=[[4, 0, 1], [2, 1, 1]], grad=X[:1], id=4)
        assert self.send(3).shape == (0, 3)
        clock.run_out()
        assert first.answer().shape == (3, 3)
        assert isinstance(thief.end().error, InvalidArgumentError | DeadlineExceededError)
        assert weft.sweep() == 0

    def test_an_owner_provides_its_gradient_to_another(self, clock):
        """Owner 2 lists another id, not its own; owner 1 waits for the gradient of 2."""
        first = start_on(clock, unbatch_grad, index=[[1, 0, 1], [2, 1, 1]], grad=X[:1], id=1)
        second = start_on(clock, unbatch_grad, index=[[3, 0, 1]], grad=2 * X[:1], id=2)
        self.send(3, 3 * X[:1])
        assert second.answer()[:, 0].tolist() == [3.0]
        assert first.answer()[:, 0].tolist() == [1.0, 2.0]
        clock.run_out()
        assert weft.sweep() == 0

    def test_own_id_not_in_the_index(self, clock):
        self.send(8)
        assert unbatch_grad(index=[[8, 0, 1]], grad=X).tolist() == X[:1].tolist()
        assert weft.sweep() == 1, "its own gradient waits"
        clock.advance(60.1)
        assert weft.sweep() == 0

    @pytest.mark.parametrize("owner_first", [True, False])
    @pytest.mark.parametrize(
        "other",
        [X[:1, :2], X[:1, 0], X[:1].astype(np.float64), X],
        ids=["trailing", "rank", "dtype", "rows"],
    )
    def test_gradients_that_do_not_join_fail_the_owner_alone(self, clock, owner_first, other):
        def sender():
            return unbatch_grad(other[:0], NO_ROWS, other, 8)

        def owner():
            return unbatch_grad(index=[[7, 0, 2], [8, 2, 1]])

        callers = [start_on(clock, call) for call in ([owner, sender] if owner_first else [sender, owner])]
        if not owner_first:
            callers.reverse()
        assert isinstance(callers[0].end().error, InvalidArgumentError)
        assert callers[1].answer().shape == (0, *other.shape[1:])
        assert unbatch_grad().tolist() == X.tolist(), "its id is free again"
        clock.advance(60.1)
        assert weft.sweep() == 0

    def test_a_gradient_that_never_comes(self, clock):
        with weft.gradient_deadline(5.0):
            owner = start_on(clock, unbatch_grad, index=[[7, 0, 2], [8, 2, 1]])
            clock.run_out()
        with pytest.raises(DeadlineExceededError):
            owner.answer()
        assert (clock.now(), weft.sweep()) == (5.0, 0)
        assert unbatch_grad().tolist() == X.tolist()

    def test_nothing_of_an_id_that_is_known_as_empty_is_kept(self, clock):
        empty = batch([X[:0]])
        assert unbatch(empty.batched_tensors[0], empty.batch_index, empty.id).shape == (0, 3)
        grad = unbatch_grad(empty.batched_tensors[0], empty.batch_index, X[:0], empty.id)
        assert grad.shape == (0, 3)
        assert weft.sweep() == 0


class TestAwkwardValues:
    """Arrays that look fine until someone uses them."""

    def test_sparse_tensors(self, clock):
        need("torch")
        import torch

        with weft.scope(clock) as scope:
            for call in (
                lambda x: batch([x]),
                lambda x: function([x]),
                lambda x: unbatch(x, [[7, 0, 1]]),
                lambda x: unbatch_grad(x, [[7, 0, 2]], x),
            ):
                with pytest.raises(InvalidArgumentError):
                    call(torch.eye(2).to_sparse())
                with pytest.raises(InvalidArgumentError):
                    call(torch.ones(2, 2, device="meta"))
            check_untouched(scope)

    def test_quantized_tensors(self, clock):
        need("torch")
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
        with weft.scope(clock) as scope:
            with pytest.raises(InvalidArgumentError):
                batch([x])
            check_untouched(scope)

    def test_traced_arrays(self, clock):
        need("jax")
        import jax

        with weft.scope(clock) as scope:
            with pytest.raises(InvalidArgumentError, match=r"jax\.jit"):
                jax.jit(lambda x: batch([x], max_batch_size=2).batched_tensors[0])(X)
            with pytest.raises(InvalidArgumentError, match=r"jax\.jit"):
                jax.jit(lambda x: unbatch(x, [[7, 0, 2]]))(X)
            check_untouched(scope)

    @pytest.mark.parametrize("library", ["torch", "jax"])
    def test_libraries_do_not_mix_in_a_call(self, clock, library):
        need(library)
        x = to(library, X)
        with weft.scope(clock) as scope:
            for call in (lambda: batch([X, x]), lambda: function([x, X]), lambda: unbatch_grad(X, grad=x)):
                with pytest.raises(InvalidArgumentError):
                    call()
            check_untouched(scope)

    def test_deleted_arrays(self, clock):
        need("jax")
        import jax.numpy as jnp

        gone = jnp.ones((2, 3))
        gone.delete()
        bad, good = (start_on(clock, batch, [x], batch_timeout_micros=1000) for x in (gone, jnp.ones((2, 3))))
        clock.run_out()
        assert isinstance(bad.end().error, RuntimeError)
        assert back(good.answer().batched_tensors[0]).sum() == 6

    def test_a_ragged_list(self, clock):
        with weft.scope(clock) as scope:
            with pytest.raises(ValueError):
                batch([[[1.0], [2.0, 3.0]]])
            check_untouched(scope)

    def test_an_array_whose_copy_fails(self, clock):
        """An object array hides nothing: text or refused."""
        with pytest.raises(InvalidArgumentError):
            batch([np.array([object(), "a"], object)])


class TestAwkwardFunctions:
    def test_exceptions_that_cannot_be_copied(self, clock):
        class Awkward(Exception):
            def __new__(cls, *, code):
                return super().__new__(cls)

            def __init__(self, *, code):
                super().__init__()
                self.code = code

        class Stubborn(Exception):
            def __copy__(self):
                return self

        class Layout(OSError):
            def __init__(self, *, code):
                super().__init__(2, "missing")
                self.code = code

        class Hostile(Exception):
            def __copy__(self):
                raise SystemError

            def __reduce_ex__(self, protocol):
                raise SystemError

        decoding = UnicodeDecodeError("utf-8", b"", 0, 1, "reason")
        for raised in (
            Awkward(code=3),
            Stubborn(),
            Layout(code=3),
            Hostile(),
            decoding,
            ExceptionGroup("g", [KeyError()]),
        ):

            def f(x, raised=raised):
                raise raised

            callers = [start_on(clock, function, f=f, batch_timeout_micros=1000) for _ in range(3)]
            clock.run_out()
            found = [caller.end().error for caller in callers]
            assert len({id(error) for error in [*found, raised]}) == 4
            for error in found:
                assert isinstance(error, (type(raised), weft.errors.UnknownError))
                assert error.__cause__ is raised
        check_usable(clock, warns=True)

    def test_notes_are_each_callers_own(self, clock):
        def f(x):
            error = ValueError("no")
            error.add_note("from f")
            raise error

        callers = [start_on(clock, function, f=f, batch_timeout_micros=1000) for _ in range(2)]
        clock.run_out()
        a, b = (caller.end().error for caller in callers)
        a.add_note("mine")
        assert b.__notes__ == ["from f"]

    def test_unhashable_functions_are_told_apart(self, clock):
        class Scale:
            __hash__ = None

            def __init__(self, factor):
                self.factor = factor

            def __call__(self, x):
                return x * np.float32(self.factor)

        callers = [start_on(clock, function, f=Scale(i), batch_timeout_micros=1000) for i in range(3)]
        clock.run_out()
        assert [caller.answer()[0][0, 0] for caller in callers] == [0.0, 1.0, 2.0]

    def test_an_equality_that_raises_hurts_its_own_caller(self, clock):
        class Rude:
            def __hash__(self):
                return 1

            def __eq__(self, other):
                if isinstance(other, Rude):
                    raise RuntimeError("rude")
                return False

            def __call__(self, x):
                return x

        first = start_on(clock, function, f=Rude(), batch_timeout_micros=1000)
        second = start_on(clock, function, f=Rude(), batch_timeout_micros=1000)
        clock.run_out()
        assert first.answer()[0].tolist() == X.tolist()
        assert isinstance(second.end().error, RuntimeError)
        check_usable(clock, warns=True)

    def test_methods_of_one_object_share_a_batch(self, clock):
        class Model:
            def __init__(self):
                self.sizes = []

            def run(self, x):
                self.sizes.append(len(x))
                return x

        model = Model()
        callers = [start_on(clock, lambda: function(f=model.run, batch_timeout_micros=1000)) for _ in range(3)]
        clock.run_out()
        assert [caller.answer()[0].shape for caller in callers] == [(2, 3)] * 3
        assert model.sizes == [6]


class TestVjp:
    def test_an_op_without_gradient_is_not_run(self, clock):
        ran = []
        with weft.scope(clock) as scope:
            with pytest.raises(LookupError):
                weft.vjp(raw_ops.BatchFunction, [X], [], lambda x: ran.append(1) or x, 1, 2, 0, ["float32"])
            assert ran == []
            assert scope.resources == {}

    def test_cotangents(self, clock):
        _, pull_back = weft.vjp(raw_ops.Unbatch, X, [[7, 0, 2]], 7, 0)
        with pytest.raises(TypeError):
            pull_back(X, X)
        with pytest.raises(TypeError):
            pull_back(unbatched=X)

    def test_notes(self, clock):
        with pytest.raises(InvalidArgumentError) as caught:
            weft.vjp(raw_ops.Unbatch, X, [[7, 0, 3]], 7, 0)
        assert caught.value.__notes__[0].startswith("in weft.raw_ops.Unbatch(batched_tensor: float32[2, 3], ")


class TestSettings:
    @pytest.mark.parametrize("seconds", [0, -1, 1e300, float("inf"), float("nan")])
    def test_gradient_deadline_must_be_a_positive_number(self, seconds):
        with pytest.raises(ValueError):
            weft.gradient_deadline(seconds)

    def test_a_very_long_deadline(self):
        with weft.scope(), weft.gradient_deadline(1e9):
            owner = start(unbatch_grad, index=[[7, 0, 2], [8, 2, 1]])
            while weft.sweep() == 0 and owner.is_alive():
                pass
            TestUnbatchGrad.send(8)
            assert owner.answer().shape == (3, 3)

    def test_priority(self):
        with pytest.raises(ValueError), weft.priority("middle"):
            raise AssertionError

    def test_kernels(self):
        with pytest.raises(ValueError), weft.kernels.use("fast"):
            raise AssertionError
