"""The Triton kernels against the reference: on the CPU in Triton's interpreter, on a device where there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.libraries import for_each, need

need("torch")
need("triton")

PROGRAM = """
import itertools, sys
import numpy as np, torch
from weft.kernels import cuda, cuda_call, reference

device, amount = sys.argv[1:]
np.seterr(all="ignore")
torch.manual_seed(0)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
SHAPES = [((4, 3, 3, 5), 3), ((4, 5, 3, 3), 1), ((40, 70), 1), ((3, 2, 2, 2, 130), 4), ((7, 9, 50), 1), ((4, 5, 3, 3), 2)]
SHAPES.append(((1, 1), 1))
DTYPES = list(TOLERANCE)
if device == "cuda":  # each case takes a second to compile
    SHAPES, DTYPES = [((4, 3, 3, 5), 3), ((4, 5, 3, 3), 2), ((7, 9, 50), 1)], [torch.float32, torch.bfloat16]
LARGE = [((64, 14, 14, 256), 3), ((64, 256, 14, 14), 1), ((33, 56, 56, 65), 3), ((256, 65, 9, 9), 1), ((300, 40, 40, 96), 3)]
LARGE += [((1, 3, 300, 300), 1), ((9, 40, 1000), 1), ((31, 7, 7, 24), 3)]
CASES = list(itertools.product(SHAPES, DTYPES[:1], [False, True]))
CASES += list(itertools.product(SHAPES[:3], DTYPES[1:], [False, True]))
if amount == "few":  # each shape once, with and without a mask in turn
    CASES = [case for i, case in enumerate(CASES[: 2 * len(SHAPES)]) if i % 4 in (0, 3)] + CASES[2 * len(SHAPES) + 1 :: 3]
if device == "cuda":
    CASES += [(shape, torch.float32, i % 2 == 0) for i, shape in enumerate(LARGE)]


def compare(got, wanted, dtype):
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        scale = max(1.0, float(b.double().abs().max()))
        assert float((a.double() - b.double()).abs().max()) < TOLERANCE[dtype] * scale, (a, b)


for (shape, axis), dtype, masked in CASES:
    x = (torch.randn(shape, device=device) * 2 + 10).to(dtype)
    if masked and axis == 1 and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    g = torch.randn(shape, device=device).to(dtype)
    scale, offset = torch.rand(shape[axis], device=device) + 0.5, torch.randn(shape[axis], device=device)
    mask = torch.arange(shape[0], device=device) % 3 != 1 if masked else None
    rest = (1e-3, axis, mask)
    y, mean, variance = reference.batch_norm(x, scale, offset, *rest)
    assert cuda.accepts(x)
    compare(cuda.batch_norm(x, scale, offset, *rest), (y, mean, variance), dtype)
    used = (mean, variance, *rest)
    if mask is None:
        for old, weights in ((None, (0.0, 1.0, 1.5)), ((scale, offset), (0.75, 0.25, 0.5))):
            arguments = (x, scale, offset, 1e-3, axis, old, weights)
            compare(cuda.batch_norm_running(*arguments), reference.batch_norm_running(*arguments), dtype)
        call = cuda_call.find_call("forward", x, axis, UPDATE=3)
        assert (call is None) == (axis == 2)
        if call is not None:
            running, batches = (scale.clone(), offset.clone()), torch.tensor(4, device=device)
            rest_of = (1e-3, running, batches, (0.75, 0.25, 0.5))
            compare(cuda_call.train_in_place(call, x, scale, offset, *rest_of), (y, mean, variance), dtype)
            compare(running, reference.batch_norm_running(*arguments)[3:5], dtype)
            assert batches.item() == 5
            call = cuda_call.find_call("inference", x, axis, COPIES=True)
            wanted = reference.batch_norm_inference(x, scale, offset, *used), *(mean, variance) * 2, torch.zeros((), device=device)
            compare(cuda_call.infer_and_copy(call, x, scale, offset, mean, variance, 1e-3), wanted, dtype)
    compare([cuda.batch_norm_inference(x, scale, offset, *used)], [reference.batch_norm_inference(x, scale, offset, *used)], dtype)
    compare(cuda.batch_norm_grad(g, x, scale, *used), reference.batch_norm_grad(g, x, scale, *used), dtype)
    compare(cuda.batch_norm_inference_grad(g, x, scale, *used), reference.batch_norm_inference_grad(g, x, scale, *used), dtype)


# Programs that keep some of their tiles, or all, in registers.
for dtype, (kept, tiles), masked in itertools.product(DTYPES, [(1, 3), (3, 5), (4, 4)], [False, True]):
    x, g = ((torch.randn(tiles * 8 * 8, 16, device=device) + i).to(dtype) for i in (3, 0))
    mask = torch.arange(len(x), device=device) % 3 != 1 if masked else None
    one = torch.ones(16, device=device)
    y, mean, variance = reference.batch_norm(x, one, one, 1e-3, 1, mask)
    for kernel, options in ((cuda_call.forward, {"UPDATE": 0}), (cuda_call.backward, {"TRAINING": True})):
        call = cuda_call.Call(kernel, x, 1, masked, options)
        members = 1 if device == "cpu" else 8  # the interpreter has programs that meet no other
        whole = {"tile": (tiles * 8 * 8 // (members * tiles), 16), "members": members, "blocks": 1, "is_whole": True}
        call._use(call.plan._replace(tiles=tiles, all_tiles=tiles * members, kept=kept, **whole))
        assert call.options["REST"] == (kept < tiles)
        if kernel is cuda_call.forward:
            used = cuda_call.new_pair(one)
            vectors = (one, one, *used, mask, *(None,) * 6)
            compare((cuda_call.normalize(call, x, vectors, (0.0, 0.0, 0.0, 1e-3)), *used), (y, mean, variance), dtype)
        else:
            got = cuda_call.differentiate(call, g, x, one, mean, variance, 1e-3, mask)[:3]
            compare(got, reference.batch_norm_grad(g, x, one, mean, variance, 1e-3, 1, mask), dtype)

x = torch.randn(4, 6, device=device) + 1000  # a mean far from zero keeps its digits
one = torch.ones(6, device=device)
exact = reference.batch_norm(x.double(), one.double(), one.double(), 1e-3, 1, None)
assert float((cuda.batch_norm(x, one, one, 1e-3, 1, None)[0].double() - exact[0]).abs().max()) < 1e-3
first, second = (cuda.batch_norm(x, one, one, 1e-3, 1, None) for _ in range(2))
assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
assert not cuda.accepts(x[:0])
x[1, 2], x[0, 3] = float("nan"), float("inf")  # not a number stays so, in its channel alone
for a, b in zip(cuda.batch_norm(x, one, one, 1e-3, 1, None), reference.batch_norm(x, one, one, 1e-3, 1, None), strict=True):
    assert torch.equal(torch.isnan(a), torch.isnan(b)), (a, b)
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


def test_a_grid_that_does_not_fit_is_made_smaller():
    """A smaller device than the ones that were measured takes fewer programs at once."""
    import torch

    from weft.kernels import cuda_call

    if cuda_call.INTERPRETED:
        pytest.skip("the interpreter launches no grid")
    launched = []

    class Device:
        arg_names = cuda_call.forward.arg_names

        def __getitem__(self, grid):
            def launch(*arguments, M, KEEP, launch_cooperative_grid, **options):
                members = arguments[-1]
                assert grid == (members, 1, 1)
                assert members <= M
                assert launch_cooperative_grid == (members > 1)
                if members > 1:
                    raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
                launched.append(members)
                return

            return launch

    x = torch.randn(40000, 32)
    call = cuda_call.Call(Device(), x, 1, False, {"UPDATE": 0})
    members = call.plan.members
    call.launch((), (), True)
    assert members > 1
    assert launched == [1]
    assert call.plan.tiles == call.plan.all_tiles

    class Broken(Device):
        def __getitem__(self, grid):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        cuda_call.Call(Broken(), x, 1, False, {"UPDATE": 0}).launch((), (), True)
