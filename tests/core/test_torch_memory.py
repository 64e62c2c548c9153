"""Tensors of torch that an op is given as NumPy arrays over the same memory."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import need

need("torch")
need("weft._native")
import torch  # noqa: E402

import weft  # noqa: E402
from weft import _native, errors, kernels, raw_ops  # noqa: E402
from weft.core.inputs import is_fine, take  # noqa: E402
from weft.kernels import native  # noqa: E402

NAMES = "x", "scale", "offset", "mean", "variance"


def given(shape=(2, 3, 3, 4)):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape), *(rng.uniform(0.5, 2, shape[-1]) for _ in range(4))]


def tensors(dtype=torch.float32):
    x, *vectors = given()
    narrow = torch.float64 if dtype is torch.float64 else torch.float32
    return [torch.tensor(x, dtype=dtype), *(torch.tensor(v, dtype=narrow) for v in vectors)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("is_training", [True, False])
def test_what_comes_out_is_torchs_and_its_own(dtype, is_training):
    inputs = tensors(dtype)
    before = [t.clone() for t in inputs]
    result = raw_ops.FusedBatchNormV3(*inputs, exponential_avg_factor=0.5, is_training=is_training)
    for output in result:
        assert type(output) is torch.Tensor
        output.add_(1)
    assert all(map(torch.equal, inputs, before))


def test_by_name_as_by_place():
    inputs = tensors()
    wanted = raw_ops.FusedBatchNormV3(*inputs)
    for count in range(5):
        named = dict(zip(NAMES[count:], inputs[count:], strict=True))
        got = raw_ops.FusedBatchNormV3(*inputs[:count], **named)
        assert all(map(torch.equal, got, wanted))


def test_as_in_torchs_own_arithmetic():
    inputs = tensors(torch.float64)
    got = raw_ops.FusedBatchNormV3(*inputs)
    with kernels.use("reference"):
        wanted = raw_ops.FusedBatchNormV3(*inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_parameters_and_negated_views_without_gradients():
    x, scale, *rest = tensors()
    wanted = raw_ops.FusedBatchNormV3(x, scale, *rest).y
    negated = torch.complex(torch.zeros_like(x), -x).conj().imag  # a view that torch negates when it is read
    with torch.no_grad():
        got = raw_ops.FusedBatchNormV3(negated, torch.nn.Parameter(scale), *rest).y
    torch.testing.assert_close(got, wanted)
    assert not got.requires_grad


@pytest.mark.parametrize(
    "call",
    [
        lambda x: weft.TensorArray().write(0, x),
        lambda x: weft.TensorArray().unstack(x),
        lambda x: raw_ops.Batch([x], 1, 8, 0, 0),
        lambda x: weft.batched(lambda y: y)(x),
        lambda x: weft.RaggedTensor.from_rows([x, x]),
        lambda x: weft.RaggedTensor.from_row_lengths(x, [4]) + 1,
        lambda x: raw_ops.RaggedRange(0, 2, 1, Tsplits=x),
        lambda x: weft.VariantArray(x),
        lambda x: raw_ops.Batch([torch.ones(2)], 1, 8, 0, 0, name=x),
    ],
)
@pytest.mark.parametrize("make", [torch.ones, lambda n: torch.nn.Parameter(torch.ones(n))])
def test_a_freed_storage(call, make):
    """Sharded training frees the storage of parameters so; torch's own arithmetic on one ends the process."""
    x = make(4)
    x.untyped_storage().resize_(0)
    with pytest.raises(errors.OpError):
        call(x)


@pytest.mark.parametrize(("shape", "is_plain"), [((0, 16), True), ((3, 0), True), ((0, 2**60), False)])
def test_tensors_without_elements_are_plain_unless_their_other_sizes_are_large(shape, is_plain):
    x = torch.empty(shape)
    assert _native.are_plain((x,), {}, ((0, "x", False),)) is is_plain
    take("x", x)
    assert is_fine(x) is is_plain


def test_tensors_without_memory_that_have_values():
    zeros = torch._efficientzerotensor(2)
    assert not zeros.data_ptr()
    assert weft.RaggedTensor.from_row_lengths(zeros, [2]).to_list() == [[0.0, 0.0]]
    assert weft.TensorArray("float32", 1).write(0, torch.ones(0)).read(0).shape == (0,)


def test_a_missing_argument_and_arrays_of_two_libraries_are_refused_as_ever():
    inputs = tensors()
    with pytest.raises(TypeError):
        raw_ops.FusedBatchNormV3(*inputs[:4])
    with pytest.raises(errors.InvalidArgumentError, match="one library"):
        raw_ops.FusedBatchNormV3(*inputs[:4], inputs[4].numpy())


@pytest.mark.parametrize("axis", [1, 3])
def test_large_tensors_give_the_same_bits_on_torchs_threads(axis):
    """Whoever runs the tasks: torch's threads, one thread, or those of the kernels."""
    x, vector = torch.randn(16, 32, 32, 32), torch.rand(32)
    size, results = _native.num_threads(), []
    weft.set_num_threads(4)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(native.batch_norm_grad(x, x, vector, vector, vector, 1e-3, axis, None))
        arrays = x.numpy(), x.numpy(), *[vector.numpy()] * 3
        results.append([torch.from_numpy(a) for a in native.batch_norm_grad(*arrays, 1e-3, axis, None)])
    finally:
        weft.set_num_threads(size)
        torch.set_num_threads(2)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
