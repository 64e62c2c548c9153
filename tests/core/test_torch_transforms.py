"""What PyTorch does to functions, done to weft's ops: torch.func, torch.compile, autocast, hooks."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from support.gradient_cases import CASES, TWINS, several, total
from support.libraries import for_each, need

import weft
from weft import raw_ops
from weft.core.adapters import of
from weft.errors import FailedPreconditionError, InvalidArgumentError

MEETING = [name for name, case in CASES.items() if not case.jit]
ALONE = [name for name, case in CASES.items() if case.jit and name not in TWINS]
# Four booleans; those with none or three of them true have each pair of values of any two.
FLAGS = list(itertools.product([False, True], repeat=4))
# torch's own, of tensors that cross a break in its graph
IGNORE = "ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning"


@pytest.fixture(autouse=True)
def _scope():
    need("torch")
    with weft.scope():
        yield


def tensors(name, requires_grad=False):
    import torch

    return [torch.tensor(x, requires_grad=requires_grad) for x in CASES[name].arrays]


def stacked(name):
    """Two entries for a vmap over the first axis."""
    import torch

    return [torch.stack([x, 2 * x]) for x in tensors(name)]


def same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


class TestFunctional:
    @pytest.mark.parametrize("name", CASES)
    def test_grad(self, name):
        import torch

        given = tensors(name, requires_grad=True)
        value = total(CASES[name].program)
        wanted = torch.autograd.grad(value(*given), given)
        same(torch.func.grad(value, tuple(range(len(given))))(*tensors(name)), wanted)

    @pytest.mark.parametrize("name", ALONE)
    def test_vmap(self, name):
        import torch

        given = stacked(name)

        def program(*arrays):
            return several(CASES[name].program(*arrays))

        wanted = [program(*(x[i] for x in given)) for i in range(2)]
        same(torch.func.vmap(program)(*given), [torch.stack(parts) for parts in zip(*wanted, strict=True)])

    def test_vmap_over_nothing(self):
        import torch

        def padded(x):
            return raw_ops.RaggedTensorToTensor(-1, x, 0.0, [np.array([0, 1, 3])], ["ROW_SPLITS"])

        assert torch.func.vmap(padded)(torch.zeros(0, 3, 2)).shape == (0, 2, 2, 2)
        assert torch.func.vmap(padded, in_dims=1)(torch.zeros(3, 0)).shape == (0, 2, 2)

        def gathered(x):
            return raw_ops.RaggedGather([np.array([0, 0])], x, np.array([0]), 1).output_dense_values

        hessian = torch.func.jacrev(torch.func.grad(lambda x: (gathered(x) ** 3).sum()))
        assert hessian(torch.zeros(0, 2)).shape == (0, 2, 0, 2)

    @pytest.mark.parametrize("name", ALONE)
    def test_vmap_of_grad(self, name):
        import torch

        given = stacked(name)
        gradient = torch.func.grad(total(CASES[name].program), tuple(range(len(given))))
        wanted = [gradient(*(x[i] for x in given)) for i in range(2)]
        same(torch.func.vmap(gradient)(*given), [torch.stack(parts) for parts in zip(*wanted, strict=True)])

    def test_vmap_over_another_axis_and_only_some_inputs(self):
        import torch

        x, (scale, offset) = torch.randn(4, 3, 5, 2), torch.randn(2, 3)

        def call(x, scale):
            return weft.batch_norm(x, scale, offset, training=True, axis=1).y

        got = torch.func.vmap(call, in_dims=(3, None), out_dims=1)(x, scale)
        same(got.unbind(1), [call(x[..., i], scale) for i in range(2)])

    def test_hessian_backwards_twice(self):
        import torch

        x = torch.randn(4, 2, dtype=torch.float64)

        def value(x):
            return (weft.batch_norm(x, training=True).y ** 3).sum()

        got = torch.func.jacrev(torch.func.jacrev(value))(x)
        same([got], [torch.autograd.functional.hessian(value, x)])

    @pytest.mark.parametrize("name", MEETING)
    def test_vmap_of_calls_that_meet_says_what_to_do(self, name):
        import torch

        with pytest.raises(FailedPreconditionError, match="use vmap on the model between Batch and Unbatch"):
            torch.func.vmap(CASES[name].program)(*stacked(name))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
    def test_forward_mode_is_refused_by_torch(self):
        import torch

        x = torch.randn(4, 2)
        with pytest.raises(RuntimeError, match="forward"):
            torch.func.jvp(lambda x: weft.batch_norm(x, training=True).y, (x,), (x,))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
    def test_dual_numbers_are_refused_by_torch(self):
        import torch
        import torch.autograd.forward_ad as fw

        with fw.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
            weft.batch_norm(fw.make_dual(torch.randn(4, 2), torch.randn(4, 2)), training=True)

    def test_values_that_are_needed_now(self):
        import torch

        with pytest.raises(InvalidArgumentError, match=r"needed now: under torch\.vmap"):
            torch.func.vmap(lambda splits: raw_ops.RaggedTensorToSparse([splits], torch.ones(2)))(
                torch.tensor([[0, 2]])
            )


@pytest.fixture
def compiler():
    """torch.compile with nothing compiled yet, which knows that weft is to be left alone."""
    import torch

    torch._dynamo.reset()
    of("torch").skip_in_torch_compile()
    yield torch.compile
    torch._dynamo.reset()


def test_a_compiler_that_is_just_being_imported_is_told_later(monkeypatch):
    """As another thread sees it meanwhile: the module is there, and what it holds is not."""
    adapter = of("torch")
    monkeypatch.setattr(adapter, "_skipped", [])
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    adapter.skip_in_torch_compile()
    assert not adapter._skipped
    told = []
    sys.modules["torch._dynamo"].trace_rules = SimpleNamespace(add=told.append)
    adapter.skip_in_torch_compile()
    assert {"weft.core", "weft.norm.ops", "weft.errors"} <= set(told)
    assert not {"weft.torch", "weft.norm", "weft.norm.torch", "weft.serve"} & set(told)
    assert told == adapter._skipped


def test_one_of_many_threads_tells_the_compiler(monkeypatch):
    adapter, told, entered, go_on = of("torch"), [], threading.Event(), threading.Event()

    def add(name):
        told.append(name)
        entered.set()
        assert go_on.wait(60)

    monkeypatch.setattr(adapter, "_skipped", [])
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    sys.modules["torch._dynamo"].trace_rules = SimpleNamespace(add=add)
    first = threading.Thread(target=adapter.skip_in_torch_compile)
    first.start()
    assert entered.wait(60)
    adapter.skip_in_torch_compile()  # does not wait
    assert len(told) == 1
    go_on.set()
    first.join(60)
    assert told == adapter._skipped


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_child_forked_while_a_thread_tells_the_compiler_tells_it_itself():
    code = """
import os, sys, types
import weft.core.adapters.torch as adapter

assert adapter._skipping.acquire(blocking=False)  # as the other thread would hold it
told = []
sys.modules["torch._dynamo"] = types.SimpleNamespace(trace_rules=types.SimpleNamespace(add=told.append))
child = os.fork()
if not child:
    adapter.skip_in_torch_compile()
    os._exit(0 if told else 1)
adapter.skip_in_torch_compile()
assert not told
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings(IGNORE)
class TestCompiled:
    @for_each("name", [*MEETING, *ALONE], slow=CASES.keys() - {"chain", "batch_norm_V3_NHWC_training", "variants"})
    def test_an_op_breaks_the_graph_and_is_right(self, compiler, name):
        import torch

        value, given = total(CASES[name].program), tensors(name, requires_grad=True)
        wanted = torch.autograd.grad(value(*given), given)
        same(torch.autograd.grad(compiler(value, backend="aot_eager")(*given), given), wanted)

    def test_a_whole_graph_is_refused_with_the_reason(self, compiler):
        import torch

        x = torch.randn(4, 2, requires_grad=True)
        weft.batch_norm(x, training=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="weft"):
            compiler(lambda x: weft.batch_norm(x, training=True).y, backend="aot_eager", fullgraph=True)(x)

    @for_each(
        ("masked", "training", "affine", "channels_last"),
        FLAGS,
        slow=[flags for flags in FLAGS if sum(flags) not in (0, 3)],
    )
    def test_the_module_is_one_graph(self, compiler, masked, training, affine, channels_last):
        import torch

        from weft.torch import BatchNorm

        plain = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), BatchNorm(4, affine=affine), torch.nn.ReLU())
        plain.train(training)
        x = torch.randn(6, 3, 5, 5)
        if channels_last:
            x, plain = x.to(memory_format=torch.channels_last), plain.to(memory_format=torch.channels_last)
        twin = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), BatchNorm(4, affine=affine), torch.nn.ReLU()).train(
            training
        )
        twin.load_state_dict(plain.state_dict())
        results = []
        for model, wrap in ((plain, lambda f: f), (twin, lambda f: compiler(f, backend="aot_eager", fullgraph=True))):
            given = x.clone().requires_grad_()

            def run(x, model=model):
                return model[2](model[1](model[0](x), 4 if masked else None))

            y = wrap(run)(given)
            (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
            parts = [y, given.grad, *(p.grad for p in model.parameters()), *model.state_dict().values()]
            results.append([p.detach() for p in parts])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
    @pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
    def test_inductor(self, compiler, tmp_path, monkeypatch):
        import torch

        from weft.torch import BatchNorm

        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), BatchNorm(4), torch.nn.ReLU())
        x = torch.randn(6, 3, 5, 5)
        wanted = model(x)
        model[1].reset_running_stats()
        got = compiler(model, backend="inductor", fullgraph=True)(x)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        got.sum().backward()
        assert model[0].weight.grad is not None

    def test_operators_are_sound(self):
        """torch's own checks of an operator: its schema, its fake, its gradient, and compiled."""
        import torch

        import weft.torch  # noqa: F401

        x, scale, mean, variance = torch.randn(4, 3, 2), torch.ones(3), torch.zeros(3), torch.ones(3)
        mask = torch.tensor([True, True, False, True])
        for training in (True, False):
            inputs = [v.clone().requires_grad_() for v in (x, scale, scale)]
            rest = mean, variance, mask, training, 0.1, 1e-3, 1, "torch"
            torch.library.opcheck(torch.ops.weft.batch_norm.default, (*inputs, *rest))


FIRST = """
import warnings
warnings.simplefilter("error")
import numpy as np, torch, weft
from weft import raw_ops
x = torch.randn(3, 2, requires_grad=True)
def f(x):
    made = raw_ops.Batch([x * 2], 1, 3, 0, 0)
    return raw_ops.Unbatch(made.batched_tensors[0].sin(), made.batch_index, made.id, 0)
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="The .grad attribute")
    torch.compile(f, backend="aot_eager")(x).sum().backward()
np.testing.assert_allclose(x.grad, 2 * (2 * x.detach()).cos(), rtol=1e-5)
print("right")
"""


@pytest.mark.slow
def test_the_first_call_of_all_may_be_compiled():
    """Before weft has met a tensor, and before torch has loaded its compiler."""
    run = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=100)
    assert run.stdout == "right\n", run.stderr


class TestAutocast:
    @pytest.mark.slow  # see kernels/test_batch_norm.py
    @pytest.mark.parametrize("module", [True, False])
    def test_batch_norm_after_a_layer_in_half_precision(self, module):
        import torch

        from weft.torch import BatchNorm

        layer, norm = torch.nn.Linear(5, 4), BatchNorm(4)
        x = torch.randn(16, 5)

        def run(x):
            h = layer(x)
            return h, norm(h) if module else weft.batch_norm(h, training=True, axis=1).y

        exact = run(x)[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h, y = run(x)
            loss = (y.float() ** 3).sum()
        loss.backward()
        assert h.dtype == y.dtype == torch.bfloat16
        assert layer.weight.grad.dtype == torch.float32
        np.testing.assert_allclose(y.float().detach(), exact.detach(), atol=0.1)


class TestHooks:
    def test_on_tensors_and_nodes(self):
        import torch

        seen = []
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        y = weft.batch_norm(x, training=True).y
        x.register_hook(lambda g: seen.append("x"))
        y.register_hook(lambda g: seen.append("y"))
        y.grad_fn.register_prehook(lambda g: seen.append("before"))
        y.grad_fn.register_hook(lambda gi, go: seen.append("after"))
        (y**3).sum().backward()
        assert seen == ["y", "before", "after", "x"]

    def test_saved_tensors_go_through_the_hooks(self):
        """As for checkpointing and for what keeps activations elsewhere."""
        import torch

        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        wanted = torch.autograd.grad((weft.batch_norm(x, training=True).y ** 3).sum(), x)
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(1), t.clone())[1], lambda t: t):
            y = weft.batch_norm(x, training=True).y
        assert packed
        same(torch.autograd.grad((y**3).sum(), x), wanted)

    def test_checkpoint(self):
        import torch
        from torch.utils.checkpoint import checkpoint

        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

        def run(x):
            return (weft.batch_norm(x.sin(), training=True).y ** 3).sum()

        wanted = torch.autograd.grad(run(x), x)
        checkpoint(run, x, use_reentrant=False).backward()
        same([x.grad], wanted)
