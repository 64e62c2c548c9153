"""What an argument may be: every op and class refuses what is no readable array with a class of `weft.errors` that names it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.libraries import LIBRARIES, back, for_each, need, to

import weft
from weft import RaggedTensor, TensorArray, raw_ops
from weft.errors import ArgumentOverflowError, ArgumentTypeError, InvalidArgumentError, OpError, ResourceExhaustedError

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from fuzz_arguments import fuzz  # noqa: E402
from fuzz_calls import CALLS  # noqa: E402
from fuzz_values import deep, in_itself, shared, twice_in_itself  # noqa: E402

HOSTILE = {
    "None": lambda: None,
    "object": object,
    "set": lambda: {1, 2},
    "dict": lambda: {"a": 1},
    "endless": itertools.count,
    "generator": lambda: (x for x in [1, 2]),
    "function": lambda: len,
    "masked": lambda: np.ma.masked_array(np.ones(3, np.float32), [True, False, False]),
    "masked, nothing masked": lambda: np.ma.ones((2, 2, 2, 4), np.float32),
    "dates": lambda: np.zeros(3, "datetime64[s]"),
    "structures": lambda: np.zeros(3, [("a", "i4")]),
    "objects": lambda: np.array([object(), None, 1], object),
    "in itself": in_itself,
    "twice in itself": twice_in_itself,
    "20,000 deep": deep,
    "more than could be counted": shared,
    "irregular": lambda: [[1], [1, 2]],
    "huge": lambda: np.broadcast_to(1, (2**40,)),
    "large, over a few bytes": lambda: np.broadcast_to(np.int64(0), (2**26,)),
    "nothing, often": lambda: np.broadcast_to(np.zeros((), "S0"), (2**40,)),
    "a range without end": lambda: range(2**70),
    "infinite": lambda: float("inf"),
    "not a number": lambda: float("nan"),
    "beyond 64 bits": lambda: 2**64,
    "thousands of digits": lambda: 10**5000,
    "complex": lambda: 1j,
    "bytes": lambda: b"\xff",
}
#: Where a value is all right, or the call looks at nothing of it.
NUMBERS = {"infinite", "not a number", "beyond 64 bits", "thousands of digits", "complex", "bytes", "irregular"}


def arguments_of(kinds):
    """Every argument of these calls."""
    return [(name, argument) for name in kinds for argument in CALLS[name].arguments("numpy")]


@for_each("kind", HOSTILE, slow=["large, over a few bytes"])
def test_every_argument_of_every_call(kind):
    """A value that is no argument is refused by a class of weft's, at once; the call goes through or not where it is one."""
    value = HOSTILE[kind]()
    for name, argument in arguments_of(CALLS):
        call = CALLS[name]
        if "numpy" not in call.libraries or ("timeout" in argument and kind in NUMBERS):
            continue
        given = call.arguments("numpy")
        given[argument] = HOSTILE[kind]() if kind == "generator" else value
        started = time.monotonic()
        try:
            with weft.scope(), weft.gradient_deadline(0.01), np.errstate(all="ignore"):
                call.call(given)
        except OpError:
            pass
        except BaseException as error:
            raise AssertionError(f"{argument} of {name}") from error
        assert time.monotonic() - started < 120, (name, argument)


ARRAYS = ["x", "scale", "offset", "mean", "variance"]


@pytest.mark.parametrize(
    "kind", sorted(HOSTILE.keys() - {"infinite", "not a number", "beyond 64 bits", "thousands of digits", "complex", "bytes"})
)  # fmt: skip
@pytest.mark.parametrize("name", ARRAYS)
def test_the_error_names_the_argument(name, kind):
    given = CALLS["FusedBatchNormV3"].arguments("numpy") | {name: HOSTILE[kind]()}
    with pytest.raises(OpError, match=rf"^{name}\b.* must ") as caught:
        raw_ops.FusedBatchNormV3(**given)
    assert isinstance(caught.value, (InvalidArgumentError, ResourceExhaustedError))


def test_a_wrong_number_of_arguments_is_pythons():
    for call in (lambda: raw_ops.Batch(), lambda: raw_ops.Unbatch(1, 2, 3, 4, 5, 6, 7, 8), lambda: raw_ops.Batch(x=1)):
        with pytest.raises(TypeError) as caught:
            call()
        assert not isinstance(caught.value, OpError)


def test_kinds_of_refusals():
    """Each is also the error of Python that people expect."""
    assert issubclass(ArgumentTypeError, (InvalidArgumentError, TypeError))
    with pytest.raises(ArgumentTypeError) as caught:
        raw_ops.Batch(None, 1, 1, 0, 0)
    assert isinstance(caught.value, (TypeError, ValueError))
    with pytest.raises(ArgumentOverflowError) as overflow:
        raw_ops.Batch([np.ones(1)], 2**63, 1, 0, 0)
    assert isinstance(overflow.value, OverflowError)
    for value in (float("inf"), float("nan")):
        with pytest.raises(InvalidArgumentError, match="num_batch_threads must be an integer"):
            raw_ops.Batch([np.ones(1)], value, 1, 0, 0)


def test_large_arrays_are_refused_by_their_size():
    huge = np.broadcast_to(1, (2**40,))
    started = time.monotonic()
    for call in (
        lambda: RaggedTensor.from_row_splits(np.ones(3), huge),
        lambda: raw_ops.RaggedTensorToVariant([huge], np.ones(3), True),
        lambda: raw_ops.RaggedGather([[0, 3]], np.ones(3), huge, 1),
        lambda: TensorArray("float32", 2).gather(huge),
        lambda: raw_ops.TensorArraySplitV3(raw_ops.TensorArrayV3(1, "float32").handle, np.ones(3, "f4"), huge, 0.0),
        lambda: raw_ops.Unbatch(np.ones(3), np.broadcast_to(1, (2**40, 3)), 1, 1),
        lambda: TensorArray("int64", 1).write(0, huge),
        lambda: weft.batch_norm(np.broadcast_to(1.0, (2**40, 3)), training=True),
    ):
        with pytest.raises(ResourceExhaustedError, match="must"):
            call()
    assert time.monotonic() - started < 10
    small = np.broadcast_to(np.float32(1), (1000, 3))
    assert weft.batch_norm(small, training=True).y.shape == (1000, 3)


# ---- byte order and masks

SWAPPED = [">f2", ">f4", ">f8", ">i2", ">i4", ">i8", ">u2", ">u4", ">u8", ">c8", ">c16"]


def swapped(x):
    x = np.asarray(x)
    return x.astype(x.dtype.newbyteorder(">"))


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
@pytest.mark.parametrize("name", ["FusedBatchNormV2", "FusedBatchNormV3", "FusedBatchNormGradV3"])
def test_swapped_batch_norm(name, dtype):
    given = CALLS[name].arguments("numpy")
    wide = "f8" if dtype == ">f8" else "f4"
    data = {"x", "y_backprop"}
    native = {k: v.astype(np.dtype(dtype).newbyteorder("=") if k in data else wide) if isinstance(v, np.ndarray) else v
              for k, v in given.items()}  # fmt: skip
    other = {k: swapped(v) if isinstance(v, np.ndarray) else v for k, v in native.items()}
    made, wanted = getattr(raw_ops, name)(**other), getattr(raw_ops, name)(**native)
    for a, b in zip(made, wanted, strict=True):
        assert a.dtype.isnative
        np.testing.assert_array_equal(a, b)
    if name == "FusedBatchNormV3":
        for a, b in zip(weft.vjp(raw_ops.FusedBatchNormV3, **other)[1](swapped(wanted.y)).values(),
                        weft.vjp(raw_ops.FusedBatchNormV3, **native)[1](wanted.y).values(), strict=True):  # fmt: skip
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", sorted(raw_ops.__all__))
def test_every_op_takes_swapped_arrays(name):
    """All arrays of a call in the other byte order give the same."""
    native, other = CALLS[name].arguments("numpy"), CALLS[name].arguments("numpy")

    def swap(value):
        if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
            return swapped(value)
        return [swap(x) for x in value] if isinstance(value, list) else value

    other = {key: swap(value) for key, value in other.items()}
    with weft.scope():
        made, wanted = CALLS[name].call(other), CALLS[name].call(native)
    for a, b in zip(*map(flat, (made, wanted)), strict=True):
        if isinstance(b, np.ndarray):
            assert a.dtype.isnative
            assert a.shape == b.shape
            if b.dtype != np.int64 or name not in ("Batch",):  # ids are drawn
                np.testing.assert_array_equal(a, b)


def flat(result):
    if isinstance(result, (list, tuple)):
        return [x for part in result for x in flat(part)]
    return [result]


@pytest.mark.parametrize("dtype", SWAPPED)
def test_swapped_rows(dtype):
    x = np.arange(6).reshape(3, 2).astype(dtype)
    native = x.astype(x.dtype.newbyteorder("="))
    with weft.scope():
        got = raw_ops.Batch([x], 1, 3, 0, 0)
        np.testing.assert_array_equal(got.batched_tensors[0], native)
        np.testing.assert_array_equal(raw_ops.Unbatch(x, swapped(got.batch_index), swapped(got.id), 1000), native)
        grad = raw_ops.UnbatchGrad(x, swapped([[7, 0, 3]]), x, swapped(7))
        np.testing.assert_array_equal(grad, native)
        (y,) = raw_ops.BatchFunction([x], [], lambda a: a, 1, 3, 0, [native.dtype.name])
        np.testing.assert_array_equal(y, native)
    with weft.batched(lambda a: a, max_batch_size=4) as f:
        assert f(x).dtype.isnative
        np.testing.assert_array_equal(f(x), native)
    rt = RaggedTensor.from_row_splits(x, swapped([0, 1, 3]))
    np.testing.assert_array_equal(rt.sum(), RaggedTensor.from_row_splits(native, [0, 1, 3]).sum())
    np.testing.assert_array_equal(rt.gather(swapped([1])).flat_values, native[1:])
    ta = TensorArray(native.dtype, 3).unstack(x)
    np.testing.assert_array_equal(ta.stack(), native)
    np.testing.assert_array_equal(TensorArray().write(swapped(0), x).read(0), native)


def test_masked_arrays_are_refused_everywhere():
    x = np.ma.masked_array(np.ones((2, 3), np.float32), [[True, False, False]] * 2)
    for call in (
        lambda: raw_ops.Batch([x], 1, 2, 0, 0),
        lambda: raw_ops.BatchFunction([x], [], lambda a: a, 1, 2, 0, ["float32"]),
        lambda: weft.batched(lambda a: a, max_batch_size=2)(x),
        lambda: weft.batched(lambda a: a["x"], max_batch_size=2)({"x": x}),
        lambda: weft.batched(lambda a: a, max_batch_size=2, rows=False)(x),
        lambda: weft.batched(lambda a: x, max_batch_size=2)(np.ones((2, 3), np.float32)),
        lambda: weft.batched(lambda a: (a, x), max_batch_size=2)(np.ones((2, 3), np.float32)),
        lambda: weft.batch_norm(x, training=True),
        lambda: RaggedTensor.from_row_splits(x, [0, 2]),
        lambda: RaggedTensor.from_row_splits(np.ones(3), np.ma.array([0, 3])),
        lambda: RaggedTensor.from_rows([x, x]),
        lambda: TensorArray("float32", 1).write(0, x),
        lambda: TensorArray().append(x),
        lambda: weft.VariantArray([x]),
    ):
        with pytest.raises(InvalidArgumentError, match=r"masked array.*filled"):
            call()


# ---- torch


def strange_tensors():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, 2, 2, 4)
    dense = torch.ones(2, 2, 2, 4)
    return {
        "meta": dense.to("meta"),
        "fake": fake,
        "sparse": dense.to_sparse(),
        "compressed": torch.eye(4).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(dense, 1.0, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "huge": torch.zeros(1).expand(2**40),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["meta", "fake", "sparse", "compressed", "quantized", "nested", "jagged", "huge"])
def test_tensors_without_values_of_their_own(kind):
    need("torch")
    x = strange_tensors()[kind]
    for call in (
        lambda: raw_ops.FusedBatchNormV3(**CALLS["FusedBatchNormV3"].arguments("torch") | {"x": x}),
        lambda: raw_ops.Batch([x], 1, 2, 0, 0),
        lambda: raw_ops.RaggedGather([[0, 2]], x, [0], 1),
        lambda: raw_ops.TensorArrayWriteV3(raw_ops.TensorArrayV3(1, "float32").handle, 0, x, 0.0),
        lambda: weft.batch_norm(x, training=True),
        lambda: RaggedTensor.from_row_splits(x, [0, 2]),
        lambda: TensorArray("float32", 1).write(0, x),
        lambda: raw_ops.Unbatch(np.ones(3), x, 7, 1000),
    ):
        with pytest.raises(OpError, match="must"):
            call()


def test_conjugate_and_negative_tensors_have_their_values():
    need("torch")
    import torch

    z = torch.tensor([[1 + 2j, 3 - 1j]] * 2, dtype=torch.complex64)
    with weft.scope():
        assert raw_ops.Batch([z.conj()], 1, 2, 0, 0).batched_tensors[0].tolist() == z.conj().tolist()
    negative = z.conj().imag
    assert negative.is_neg()
    np.testing.assert_allclose(
        weft.batch_norm(negative, training=True).y, weft.batch_norm(negative.clone(), training=True).y
    )
    assert RaggedTensor.from_row_splits(negative, [0, 2]).to_list() == [negative.tolist()]


# ---- nesting

NESTED = """
import sys
import numpy as np
import torch
sys.path.insert(0, {tools!r})
from fuzz_values import deep, in_itself, shared, twice_in_itself
from fuzz_calls import CALLS
import weft
for make in (in_itself, twice_in_itself, deep, lambda: (deep(),), lambda: [np.ones(2), deep()], shared, lambda: {{"a": deep()}}):
    value = make()
    for name, call in CALLS.items():
        if "torch" not in call.libraries:
            continue
        for argument in call.arguments("torch"):
            try:
                with weft.scope(), weft.gradient_deadline(0.01):
                    call.call(call.arguments("torch") | {{argument: value}})
            except weft.errors.OpError:
                pass
print("done")
"""


def test_lists_in_themselves_do_not_end_the_process():
    """Once torch is loaded, a call looks at every list for a tensor that needs a gradient."""
    need("torch")
    code = NESTED.format(tools=str(TOOLS))
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert run.stdout.endswith("done\n"), (run.returncode, run.stderr[-2000:])


def nests():
    own: dict = {}
    own["a"] = own
    deep_tuple: tuple = (np.ones(2),)
    deep_dict: dict = {"x": np.ones(2)}
    for _ in range(20_000):
        deep_tuple, deep_dict = (deep_tuple,), {"a": deep_dict}
    wide: tuple = (np.ones(2),)
    for _ in range(45):
        wide = (wide, wide)
    return [own, in_itself(), twice_in_itself(), deep_tuple, deep_dict, wide, [own], {"a": [deep()]}]


def test_nested_arguments_and_results_of_batched_calls():
    need("optree")
    with weft.batched(lambda x, y: x, max_batch_size=2) as f:
        for nest in nests():
            with pytest.raises(OpError, match="must"):
                f(np.ones(2), nest)
            with pytest.raises(OpError, match="must"):
                f(x=np.ones(2), y=nest)
        np.testing.assert_array_equal(f(np.ones(2), {"a": [(np.ones(2), 1)]}), np.ones(2))
    for nest in nests():
        with weft.batched(lambda x, nest=nest: nest, max_batch_size=2) as f, pytest.raises(OpError, match="must"):
            f(np.ones(2))


# ---- what is all right


@pytest.mark.parametrize("library", LIBRARIES)
def test_lists_of_arrays_are_read(library):
    need(library)
    scalars = [to(library, np.int64(0)), 2]
    assert RaggedTensor.from_row_splits(np.ones(2), scalars).to_list() == [[1, 1]]
    with weft.scope():
        got = raw_ops.Batch([to(library, np.ones((2, 2), np.float32))], 1, 2, 0, 0)
        piece = raw_ops.Unbatch(got.batched_tensors[0], [[got.id, 0, 2]], got.id, 1000)
    assert back(piece).tolist() == [[1, 1], [1, 1]]


def test_what_offers_itself_as_an_array_is_one():
    class Column:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3, dtype=">i8")

    assert RaggedTensor.from_row_lengths(Column(), [1, 2]).to_list() == [[0], [1, 2]]
    assert raw_ops.RaggedTensorToSparse([np.array([0, 3])], memoryview(np.ones(3))).sparse_values.tolist() == [1, 1, 1]


# ---- the fuzzer


@for_each("library", LIBRARIES, slow=["jax"])
def test_hostile_arguments(library):
    need(library)
    assert fuzz(0, 100, [library]) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_many_hostile_arguments(seed):
    assert fuzz(seed, 10_000, [name for name in LIBRARIES if find_spec(name)]) == []


def test_the_fuzzer_finds_what_is_wrong(tmp_path):
    """A case that raises, one that ends the process and one that takes long are reported, and the others still run."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(TOOLS)!r})
import fuzz_arguments, fuzz_calls
from fuzz_calls import Call
calls = {{"raises": lambda given: [][0], "dies": lambda given: os._exit(3), "is late": lambda given: time.sleep(0.3),
          "is right": lambda given: None}}
fuzz_calls.CALLS.clear()
fuzz_calls.CALLS.update({{name: Call(call, lambda library: {{"x": 1}}) for name, call in calls.items()}})
fuzz_arguments.SLOW = 0.2
if "--work" in sys.argv:
    sys.exit(fuzz_arguments.main())
fuzz_arguments.__file__ = __file__
import json
print(json.dumps(fuzz_arguments.fuzz(0, 9, ["numpy"])))
"""
    script = tmp_path / "broken.py"
    script.write_text(code, encoding="utf-8")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    problems = {(p["call"].removesuffix(" in numpy"), p["problem"]) for p in json.loads(run.stdout)}
    assert ("raises", "IndexError: list index out of range") in problems
    assert ("dies", "the process ended with 3") in problems
    assert any(call == "is late" and "it took" in problem for call, problem in problems)
    assert not any(call == "is right" for call, _ in problems)
