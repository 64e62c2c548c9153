"""Bad input to Batch, Unbatch, UnbatchGrad and BatchFunction: the class it raises, and that nothing is left behind."""

from __future__ import annotations

import numpy as np
import pytest
from support.bad_calls import NO_ROWS, SPLIT, X, batch, both, check_untouched, function, unbatch, unbatch_grad
from support.callers import start_on

import weft
from weft import raw_ops
from weft.errors import AlreadyExistsError, ArgumentOverflowError, InternalError, InvalidArgumentError, NotFoundError

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
        ("BatchFunction splitting: last allowed below 0", lambda: function(allowed_batch_sizes=[-1], **SPLIT)),
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
        ("UnbatchGrad index of bools, no owner", lambda: unbatch_grad(np.zeros((0, 2), np.float32), index=np.zeros((1, 3), bool))),
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
    "int beyond 64 bits": (ArgumentOverflowError, lambda: batch(grad_timeout_micros=2**63)),
    "id beyond 64 bits": (ArgumentOverflowError, lambda: unbatch(id=2**63)),
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
