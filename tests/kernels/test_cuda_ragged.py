"""The Triton kernels on rows against the reference: on the CPU in Triton's interpreter, on a device where there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from support.libraries import for_each, need

import weft
from weft.errors import FailedPreconditionError

need("torch")
need("triton")

PROGRAM = """
import sys
import numpy as np, torch, weft
from weft.kernels import cuda_ragged as ours, reference

device, amount = sys.argv[1:]
random = np.random.default_rng(0)
f16, f32, f64, bf16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
CASES = [([3, 0, 5, 1], (), f32), ([0, 0, 2, 7, 0], (3,), f32), ([1], (2, 3), torch.int64), ([4, 300, 0, 2], (), f64)]
CASES += [([2, 3, 1, 0, 5], (130,), f16), ([60, 61], (5,), bf16)]
if amount == "few":
    CASES = CASES[1::2]
if device == "cuda":
    CASES += [(random.integers(0, 12, 3000).tolist(), (), f32), (random.integers(0, 300, 500).tolist(), (64,), f32)]
    CASES.append(([100000, 3], (), f32))


def compare(got, wanted, tolerance=0.0):
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.device == wanted.device, (got, wanted)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


for lengths, inner, dtype in CASES:
    lengths = np.array(lengths)
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total, rows = int(splits[-1]), len(lengths)
    values = (torch.randn((total, *inner)) * 3).to(dtype).to(device)
    assert ours.accepts(values)
    index = random.integers(0, rows, 2 * rows)
    starts, bounds = splits[index], np.concatenate([[0], np.cumsum(lengths[index])])
    compare(ours.take_rows(values, starts, bounds), reference.take_rows(values, starts, bounds))
    row = torch.arange(int(np.prod(inner, dtype=int)), device=device).reshape(inner).to(dtype)
    for default in (0, 7, row):
        for shape in ((rows, 4), (rows + 2, int(lengths.max())), (max(rows - 1, 0), 3)):
            compare(ours.pad_rows(values, default, splits, *shape), reference.pad_rows(values, default, splits, *shape))
    gaps = np.arange(rows) * 3 + splits[:-1]
    for targets in (gaps, total + 3 * rows - gaps - lengths):  # in order, and backwards
        arguments = (splits[:-1], lengths, targets, total + 3 * rows + 2)
        compare(ours.place_rows(values, 7, *arguments), reference.place_rows(values, 7, *arguments))
    x = (torch.randn((rows, *inner)) * 3).to(dtype).to(device)
    compare(ours.repeat_rows(x, splits), reference.repeat_rows(x, splits))
    if not dtype.is_floating_point:
        continue
    tolerance = {f64: 1e-12, f32: 1e-4, f16: 2e-2, bf16: 1e-1}[dtype]
    wide = values.double() if dtype in (f16, bf16) else values
    compare(ours.row_sum(values, splits), reference.row_sum(wide, splits).to(dtype), tolerance)
    compare(ours.row_max(values, splits), reference.row_max(values, splits))
    compare(ours.row_softmax(values, splits), reference.row_softmax(wide, splits).to(dtype), tolerance)
    overlapping = np.zeros(rows, np.int64)
    for targets in (gaps, overlapping):
        arguments = (splits[:-1], lengths, targets, total + 3 * rows + 2)
        compare(ours.add_rows(values, *arguments), reference.add_rows(values, *arguments), tolerance)
    if total > 2:
        values[0] = float("nan")
        values[1] = float("inf")
        compare(ours.row_max(values, splits), reference.row_max(values, splits))
        compare(ours.row_softmax(values, splits), reference.row_softmax(values, splits), tolerance)

ours.LARGE = 4  # the kernels for results of 2^31 rows
ours._moving.cache_clear()
values, splits = torch.randn(5, device=device), np.array([0, 2, 5])
for columns in (3, 4):
    compare(ours.pad_rows(values, 7, splits, 3, columns), reference.pad_rows(values, 7, splits, 3, columns))
compare(ours.take_rows(values, splits[:-1], splits), values)
compare(ours.place_rows(values, 7, splits[:-1], splits[1:] - splits[:-1], splits[:-1] + 1, 7)[1:6], values)
compare(ours.repeat_rows(values[:2], splits), reference.repeat_rows(values[:2], splits))
assert not ours.accepts(torch.empty(1, device=device).expand(1, 1 << 22))

values = torch.randn(5, device=device)
for broken in (np.array([0, 99]), np.array([0, 3, 2**40])):  # nothing is read outside
    ours.row_sum(values, broken), ours.row_softmax(values, broken), ours.pad_rows(values, 0, broken, 2, 9)
splits = weft.RaggedTensor.from_row_lengths(values, [2, 3])._splits[0]
assert ours._on_device(splits, values.device) is ours._on_device(splits, values.device)
assert len(ours._copies) == 1
del splits
assert not ours._copies
print("equal")
"""


def run(device, amount, **environment):
    command = [sys.executable, "-c", PROGRAM, device, amount]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)
    assert done.stdout.strip() == "equal", done.stderr


@for_each("amount", ["few", "all"], slow=["all"])
def test_in_the_interpreter(amount):
    run("cpu", amount, TRITON_INTERPRET="1")


@pytest.mark.cuda
def test_on_a_device():
    run("cuda", "all")


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_splits_that_a_capture_would_copy():
    import torch

    x = weft.RaggedTensor.from_row_lengths(torch.arange(5.0, device="cuda"), [2, 3])
    torch.cuda.synchronize()
    with (
        pytest.raises(FailedPreconditionError, match="once before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        x.sum()
    x.sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = x.sum()
    x.flat_values.fill_(1.0)
    graph.replay()
    assert total.tolist() == [2.0, 3.0]


@pytest.mark.cuda
def test_a_result_of_more_than_2_to_the_31_rows():
    """5 GB: the numbers of its rows do not fit 32 bits."""
    import torch

    x = torch.arange(1, 6, device="cuda", dtype=torch.float16)
    padded = weft.kernels.best("pad_rows", x)(x, 0, np.arange(6), 5, 500_000_000).view(5, -1)
    assert padded[:, 0].tolist() == x.tolist()
    assert not any(row[1:].any() for row in padded)
