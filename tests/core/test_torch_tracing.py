"""What notes torch's operations to run them on other tensors sees none of weft's: each call with a tensor is refused there.

`torch.jit.trace` would else keep the result of its example for every input, and its own check compares two equal constants.
"""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest

import weft
from weft import raw_ops
from weft.errors import FailedPreconditionError

torch = pytest.importorskip("torch")
make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")

SPLITS = np.array([0, 2, 5])
CONSTANT = weft.RaggedTensor(torch.arange(15.0).reshape(5, 3), [SPLITS])
ONES, ZEROS = torch.ones(3), torch.zeros(3)


class Calls(torch.nn.Module):
    """A model that calls a function."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def module(**options):
    return weft.torch.BatchNorm(3, **options).eval()


def array(x):
    steps = weft.TensorArray()
    for i in range(5):
        steps.append(x[i])
    return steps.stack()


def ops_on_an_array(x):
    handle, flow = raw_ops.TensorArrayV3(1, "float32")
    raw_ops.TensorArrayWriteV3(handle, 0, x, flow)
    return raw_ops.TensorArrayReadV3(handle, 0, flow, "float32")


def batch_ops(x):
    batch = raw_ops.Batch([x], 1, 5, 1000, 1000)
    return raw_ops.Unbatch(batch.batched_tensors[0], batch.batch_index, batch.id, 1000)


def pulled_back(x):
    _, pull = weft.vjp(raw_ops.RaggedGather, [SPLITS], x, np.array([1, 0]), 1)
    return pull(torch.ones(5, 3))["params_dense_values"]


PROGRAMS = {
    "module": module(),
    "module without weights": module(affine=False),
    "module in training": weft.torch.BatchNorm(3),
    "module in a function": (lambda bn: lambda x: bn(x))(module()),
    "model": torch.nn.Sequential(torch.nn.Linear(3, 3), module()).eval(),
    "batch norm": lambda x: weft.batch_norm(x, training=True).y,
    "batch norm with a mask": lambda x: weft.batch_norm(x, training=True, mask=3).y,
    "batch norm in inference": lambda x: weft.batch_norm(x, None, None, ZEROS, ONES, training=False).y,
    "fused": lambda x: raw_ops.FusedBatchNormV3(x.reshape(5, 1, 1, 3), ONES, ZEROS, ZEROS[:0], ZEROS[:0]).y,
    "rows": lambda x: weft.RaggedTensor(x, [SPLITS]).sum(),
    "rows of a tensor": lambda x: weft.RaggedTensor(CONSTANT.flat_values, [x[:, 0].long()]).sum(),
    "values": lambda x: CONSTANT.with_values(x).flat_values,
    "operand": lambda x: (CONSTANT * x[0]).flat_values,
    "index": lambda x: CONSTANT.gather((x[:2, 0] > 0).long()).flat_values,
    "range": lambda x: raw_ops.RaggedRange(x[0].long() * 0, x[0].abs().long(), 1).rt_dense_values,
    "gather": lambda x: raw_ops.RaggedGather([SPLITS], x, np.array([1, 0]), 1).output_dense_values,
    "counts": lambda x: raw_ops.RaggedBincount(SPLITS, x[:, 0].abs().long(), 5, ZEROS[:0]),
    "cross": lambda x: raw_ops.RaggedCross([], [], [], [], [], [x.long()], "D", True, 9, 0, "int64", "int64")[0],
    "variants": lambda x: weft.RaggedTensor.from_variant(weft.VariantArray([x[:2], x[2:]])).flat_values,
    "pull-back": pulled_back,
    "array": array,
    "ops on an array": ops_on_an_array,
    "batched": weft.batched(lambda x: x * 2),
    "batch ops": batch_ops,
}


TRACERS = {
    "trace": torch.jit.trace,
    "trace without a check": lambda f, x: torch.jit.trace(f, x, check_trace=False),
    "trace of a method": lambda f, x: torch.jit.trace_module(Calls(f), {"forward": x}),
    "onnx": lambda f, x: torch.onnx.export(Calls(f), (x,), io.BytesIO(), dynamo=False),
    "make_fx": lambda f, x: make_fx(lambda x: f(x))(x),
    "make_fx before dispatch": lambda f, x: make_fx(lambda x: f(x), pre_dispatch=True)(x),
    "make_fx without values": lambda f, x: make_fx(lambda x: f(x), tracing_mode="symbolic")(x),
}
SOME = ["module", "module in a function", "batch norm", "rows", "batched"]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    ("tracer", "program"), [(t, p) for t in TRACERS for p in PROGRAMS if t in ("trace", "make_fx") or p in SOME]
)
def test_it_is_refused(tracer, program, gradients):
    x = torch.randn(5, 3)
    with torch.set_grad_enabled(gradients), pytest.raises(FailedPreconditionError, match="must not be traced"):
        TRACERS[tracer](PROGRAMS[program], x)
    if program in SOME:
        PROGRAMS[program](x)


@pytest.mark.parametrize("program", ["batch norm", "rows", "array", "gather"])
def test_symbolic_values_are_refused(program):
    with pytest.raises(FailedPreconditionError, match="must not be traced"):
        torch.fx.symbolic_trace(Calls(PROGRAMS[program]))


def test_modules_under_fx_and_script_are_refused():
    for model in (module(), torch.nn.Sequential(torch.nn.Linear(3, 3), module())):
        for how in (torch.fx.symbolic_trace, torch.jit.script):
            with pytest.raises(FailedPreconditionError, match="must not be traced"):
                how(model)


def test_another_thread_may_trace():
    """What one thread traces is no matter of the calls of another."""
    policy, found = weft.batched(lambda x: x * 2), []

    def traced(x):
        thread = threading.Thread(target=lambda: found.extend([policy(torch.ones(1, 2)), CONSTANT.sum()]))
        thread.start()
        thread.join()
        return x * 2

    torch.jit.trace(traced, torch.ones(2), check_trace=False)
    assert found[0].tolist() == [[2.0, 2.0]]
    assert found[1].shape == (2, 3)


def test_arrays_of_numpy_are_constants_of_a_trace():
    def traced(x):
        return x * torch.from_numpy(weft.RaggedTensor(np.ones((5, 3), np.float32), [SPLITS]).sum())[0]

    assert torch.jit.trace(traced, torch.ones(3))(3 * torch.ones(3)).tolist() == [6.0, 6.0, 6.0]


def test_functional_tensors_have_no_values():
    aot = pytest.importorskip("functorch.compile")
    for program in ("batch norm", "rows", "batched"):
        with pytest.raises(ValueError, match="values now"):
            aot.aot_function(PROGRAMS[program], aot.nop)(torch.randn(5, 3))


def test_exports_have_the_operator():
    x = torch.randn(5, 3)
    exported = torch.export.export(PROGRAMS["model"], (x,))
    torch.testing.assert_close(exported.module()(x + 1), PROGRAMS["model"](x + 1))
