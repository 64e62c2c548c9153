"""Each private name of PyTorch behaves as weft expects; without the name, the fallback answers."""

from __future__ import annotations

import re
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.libraries import need

need("torch")

import torch  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from weft.core import torch_internals as internals  # noqa: E402


def without(owner, *names):
    """A copy of torch_internals, loaded while torch does not have these names."""
    spec = spec_from_file_location("weft.core.other_internals", internals.__file__)
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delattr(owner, name)
        spec.loader.exec_module(module)
    return module


def seen_in(transform, *args):
    """What `are_transforms_active`, `is_wrapped` and `is_transformed` say inside a transformed function."""
    seen = []

    def function(x):
        seen.append((internals.are_transforms_active(), internals.is_wrapped(x), internals.is_transformed()))
        return (x * x).sum()

    transform(function)(*args)
    return seen


# ---- transforms


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_transforms_are_seen(transform):
    x = torch.ones(3)
    assert seen_in(lambda f: f, x) == [(False, False, False)]
    assert seen_in(transform, x) == [(True, True, True)]
    assert not internals.are_transforms_active()


def test_transforms_are_unknown_without_the_name():
    other = without(torch._C, "_are_functorch_transforms_active")
    assert not other.KNOWS_TRANSFORMS
    assert internals.KNOWS_TRANSFORMS
    assert not other.are_transforms_active()
    assert other.is_transformed()  # the general path is always right


def test_a_wrapper_is_unknown_without_the_name():
    other = without(torch._C._functorch, "is_functorch_wrapped_tensor")
    assert not other.is_wrapped(torch.ones(2))
    seen = []
    torch.func.grad(lambda x: seen.append(other.is_wrapped(x)) or x.sum())(torch.ones(2))
    assert seen == [True]


def read_in_grad(module):
    """What a function under `torch.func.grad` reads of its argument."""
    found = []

    def function(x):
        with module.without_transforms():
            inner = module.unwrap(x)
            found.append(None if inner is None else inner.detach().numpy().tolist())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    return found


def test_a_wrapped_tensor_is_read():
    assert read_in_grad(internals) == [[1.0, 1.0]]
    found = []
    torch.vmap(lambda x: found.append(internals.unwrap(x)) or x)(torch.ones(2))
    assert found == [None]
    x = torch.ones(2)
    assert internals.unwrap(x) is x


def test_a_wrapped_tensor_has_no_values_without_the_names():
    other = without(torch._C._functorch, "get_unwrapped", "is_batchedtensor")
    assert read_in_grad(other) == [None]
    x = torch.ones(2)
    assert other.unwrap(x) is x


def test_transforms_stay_on_without_the_name():
    """A result is wrapped unless they are off."""
    seen = []

    def function(x):
        for module in (internals, without(torch._C, "_DisableFuncTorch")):
            with module.without_transforms():
                seen.append(module.is_wrapped(module.unwrap(x) * 1))
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen == [False, True]


def test_forward_mode_is_seen():
    x = torch.ones(2)
    assert not internals.is_forward_mode(x)
    assert not internals.is_transformed()
    with forward_ad.dual_level():
        assert internals.is_forward_mode(x)
        assert internals.is_transformed()


def test_forward_mode_without_the_name_is_seen_by_the_tangent(monkeypatch):
    given = SimpleNamespace(unpack_dual=lambda x: SimpleNamespace(tangent=x))
    monkeypatch.setattr(internals, "forward_ad", given)
    assert internals.is_forward_mode(torch.ones(2))
    assert not internals.is_forward_mode(None)
    assert internals.is_transformed()


def test_dispatch_modes_are_seen():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        assert internals.is_transformed()
    assert without(torch._C, "_len_torch_dispatch_stack").is_transformed()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tracing_is_seen():
    other = without(torch._C, "_get_tracing_state")
    seen = []

    def function(x):
        seen.append((internals.is_tracing(), other.is_tracing(), internals.is_transformed()))
        return x + 1

    function(torch.ones(2))
    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert seen == [(False, False, False), (True, True, True)]


def test_make_fx_is_seen():
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    modules = internals, without(torch._C, "_len_torch_dispatch_stack"), without(torch._C, "_len_torch_function_stack")
    seen = []

    def function(x):
        seen.append([(module.is_tracing(), module.is_followed(x)) for module in modules])
        return x + 1

    function(torch.ones(2))
    with FlopCounterMode(display=False), torch.device("cpu"):  # other modes
        function(torch.ones(2))
    for before in (False, True):
        make_fx(function, pre_dispatch=before)(torch.ones(2))
    assert seen == [[(wanted, wanted)] * 3 for wanted in (False, False, True, True)]


def test_functional_tensors_are_seen():
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    x = torch.ones(2)
    with FunctionalTensorMode():
        assert internals.is_fake(FunctionalTensor.to_functional(x))
    assert not internals.is_fake(x)


def test_autocast_is_seen():
    other = without(torch._C, "_is_any_autocast_enabled")
    for module in (internals, other):
        assert not module.is_autocast_enabled()
        with torch.autocast("cpu"):
            assert module.is_autocast_enabled()


# ---- modes of a thread


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "enter",
    [lambda: torch.device("cpu"), Mode, lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)],
)
def test_modes_are_seen_in_their_thread(enter):
    assert not internals.has_modes()
    with enter():
        assert internals.has_modes()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(internals.has_modes()))
        thread.start()
        thread.join()
        assert seen == [False]
    assert not internals.has_modes()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch._C, "_len_torch_function_stack"), (torch._C, "_len_torch_dispatch_stack"),
     (torch._C._autograd, "_top_saved_tensors_default_hooks")],
)  # fmt: skip
def test_without_a_name_there_may_be_modes(owner, name):
    assert without(owner, name).has_modes()


# ---- tensors and modules


def test_fake_tensors_are_seen(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    assert internals.is_fake(fake)
    assert not internals.is_fake(torch.ones(2))
    assert not internals.is_fake(torch.nn.Parameter(torch.ones(2)))
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", ModuleType("fake_tensor"))
    assert not internals.is_fake(fake)
    monkeypatch.delitem(sys.modules, "torch._subclasses.fake_tensor")
    assert not internals.is_fake(fake)


def test_views_are_seen(monkeypatch):
    x = torch.ones(3)
    assert not internals.is_view(x)
    assert internals.is_view(x[1:])
    monkeypatch.setattr(internals, "_is_view", None)
    assert internals.is_view(x)


def test_the_extension_module_has_a_file(monkeypatch):
    assert Path(internals.extension_file()).exists()
    monkeypatch.setattr(internals, "_C", None)
    assert internals.extension_file() is None


def test_the_ragged_axis_is_seen():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert internals.ragged_axis(nested) == 1
    assert internals.ragged_axis(nested.transpose(1, 2)) == 2
    assert internals.ragged_axis(torch.ones(2)) == 1


def described(module):
    return (
        {name: tuple(x.shape) for name, x in internals.parameters_of(module).items() if x is not None},
        {name: tuple(x.shape) for name, x in internals.buffers_of(module).items() if x is not None},
        [(name, type(child).__name__) for name, child in internals.children_of(module)],
    )


class Unlike(torch.nn.Module):
    """A module of a version that keeps its parts under other names."""

    def __init__(self, inner):
        object.__setattr__(self, "inner", inner)

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "inner"), name)

    def named_parameters(self, recurse=True):
        return self.inner.named_parameters(recurse=recurse)

    def named_buffers(self, recurse=True):
        return self.inner.named_buffers(recurse=recurse)

    def named_modules(self, remove_duplicate=True):
        return self.inner.named_modules(remove_duplicate=remove_duplicate)


def test_the_parts_of_a_module():
    norm, shared = torch.nn.BatchNorm1d(3, affine=True), torch.nn.ReLU()
    wanted = {"weight": (3,), "bias": (3,)}, {"running_mean": (3,), "running_var": (3,), "num_batches_tracked": ()}, []
    assert described(norm) == wanted
    assert described(Unlike(norm)) == wanted
    model = torch.nn.Sequential(shared, torch.nn.Sequential(shared), shared)
    assert described(model)[2] == [("0", "ReLU"), ("1", "Sequential"), ("2", "ReLU")]
    assert described(Unlike(model))[2] == described(model)[2]


def test_hooks_are_seen():
    module = torch.nn.ReLU()
    assert not internals.has_hooks(module)
    handle = module.register_forward_hook(print)
    assert internals.has_hooks(module)
    handle.remove()
    module.register_full_backward_pre_hook(print)
    assert internals.has_hooks(module)
    assert not internals.has_hooks(SimpleNamespace())


# ---- the backward pass


class Double(torch.autograd.Function):
    """Calls `see` in its backward."""

    @staticmethod
    def forward(ctx, x, see):
        ctx.see = see
        return x * 2

    @staticmethod
    def backward(ctx, g):
        ctx.see()
        return g * 2, None


def test_a_function_is_applied_directly():
    other = without(torch._C, "_are_functorch_transforms_active")
    for apply in (internals.direct_apply(Double), other.direct_apply(Double)):
        x = torch.ones(2, requires_grad=True)
        apply(x, list).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]


def test_the_thread_of_backward_passes():
    other = without(torch._C, "_is_multithreading_enabled")
    assert internals.shares_backward_thread()
    assert other.shares_backward_thread()
    with torch.autograd.set_multithreading_enabled(False):
        assert not internals.shares_backward_thread()


def two():
    """Two outputs with a node each, and what either sees of the other when it runs."""
    x = torch.ones(2, requires_grad=True)
    seen = []
    a = Double.apply(x, lambda: seen.append(("a", internals.is_any_covered([b.grad_fn]))))
    b = Double.apply(x, lambda: seen.append(("b", internals.is_any_covered([a.grad_fn]))))
    return x, a, b, seen


def test_a_backward_covers_what_it_runs():
    x, a, b, seen = two()
    a.sum().backward(retain_graph=True)
    assert seen == [("a", False)]
    seen.clear()
    (a + b).sum().backward(retain_graph=True)
    assert sorted(seen) == [("a", True), ("b", True)]
    seen.clear()
    b.sum().backward(inputs=[x])
    assert seen == [("b", False)]


def test_grad_covers_what_leads_to_its_inputs():
    x, a, b, seen = two()
    torch.autograd.grad((a * b).sum(), x, retain_graph=True)
    assert sorted(seen) == [("a", True), ("b", True)]
    seen.clear()
    torch.autograd.grad((a * b).sum(), a)
    assert seen == []


def test_nothing_is_covered_outside_a_backward():
    _, a, _, _ = two()
    assert not internals.is_any_covered([a.grad_fn])
    assert not without(torch._C, "_will_engine_execute_node").is_any_covered([a.grad_fn])


def test_another_thread_covers_nothing_of_ours():
    _, a, _, seen = two()
    inside, go = threading.Event(), threading.Event()

    def wait():
        inside.set()
        assert go.wait(20)

    other = threading.Thread(target=lambda: Double.apply(a, wait).sum().backward(), daemon=True)
    other.start()
    assert inside.wait(20)
    assert not internals.is_any_covered([a.grad_fn])
    go.set()
    other.join(20)
    assert seen == [("a", False)]


def test_a_backward_has_a_number_and_an_end():
    other = without(torch._C, "_current_graph_task_id")
    order = []

    def see():
        order.append((internals.current_backward() >= 0, other.current_backward()))
        internals.at_end_of_backward(lambda: order.append("end"))

    x = torch.ones(2, requires_grad=True)
    assert internals.current_backward() == -1
    Double.apply(Double.apply(x, lambda: order.append("inner")), see).sum().backward()
    assert order == [(True, -1), "inner", "end"]


def test_a_backward_with_given_gradients():
    for module in (internals, without(torch.autograd.graph, "_engine_run_backward")):
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        module.run_backward([y, y * y], [torch.ones(3), torch.ones(3)])
        assert x.grad.tolist() == [10.0] * 3
        with pytest.raises(RuntimeError, match=r"shape|size"):
            module.run_backward([x * 2], [torch.ones(4)])
        with pytest.raises(RuntimeError, match="does not require grad"):
            module.run_backward([torch.ones(3)], [torch.ones(3)])


def test_several_gradients_at_once():
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.module = module
            return x * 2

        @staticmethod
        def backward(ctx, g):
            seen.append(ctx.module.is_batch_of_gradients(g))
            return (*ctx.module.one_by_one(lambda each: (each[0] * 2,), [g]), None) if seen[-1] else (g * 2, None)

    grads = torch.arange(6.0).reshape(2, 3)
    functions = torch._C._functorch, torch, torch
    names = "is_legacy_batchedtensor", "_add_batch_dim", "_remove_batch_dim"
    others = [without(owner, name) for owner, name in zip(functions, names, strict=True)]
    for module in (internals, *others):
        x = torch.ones(3, requires_grad=True)
        (found,) = torch.autograd.grad(Twice.apply(x, module), x, grads, is_grads_batched=True)
        assert torch.equal(found, grads * 2)
    assert seen == [True, False, False, False]


# ---- the compiler and the compiled library


def test_the_compiler_skips_modules(monkeypatch):
    told = []
    compiler = ModuleType("torch._dynamo")
    monkeypatch.setitem(sys.modules, "torch._dynamo", compiler)
    assert not internals.skip_in_compiler(["a"])  # another thread is importing it
    compiler.trace_rules = SimpleNamespace(add=told.append)
    assert internals.skip_in_compiler(["a", "b"])
    assert told == ["a", "b"]
    compiler.trace_rules = SimpleNamespace()
    assert internals.skip_in_compiler(["c"])
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert not internals.skip_in_compiler(["d"])
    assert told == ["a", "b"]


def test_the_compiler_can_be_told():
    import torch._dynamo

    assert callable(torch._dynamo.trace_rules.add)


# ---- weft without the names


def test_ops_work_without_any_of_the_names(monkeypatch):
    """An op, its gradient, and a batched call, where each name is missing."""
    import subprocess

    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=300, check=False)
    assert (run.stdout, run.returncode) == ("works\n", 0), run.stderr


WITHOUT = """
import torch, numpy, sys
from weft.core import torch_internals
for name, value in list(vars(torch_internals).items()):
    if name.startswith("_") and not name.startswith("__") and name not in ("_C", "_find"):
        setattr(torch_internals, name, None)
torch_internals.KNOWS_TRANSFORMS = False
import weft
from weft import raw_ops

x = torch.ones(2, 2, 2, 4, requires_grad=True)
ones = torch.ones(4)
out = raw_ops.FusedBatchNormV3(x, ones, ones, torch.ones(0), torch.ones(0))
out.y.square().sum().backward()
assert x.grad.shape == x.shape
rows = torch.ones(3, 2, requires_grad=True)
weft.batched(lambda a: a * 3)(rows).sum().backward()
assert rows.grad.tolist() == [[3.0, 3.0]] * 3
assert weft.core.arrays.host(torch.ones(2)).tolist() == [1.0, 1.0]
print("works")
"""


def test_private_names_are_used_in_one_file_per_library():
    names = [
        r"torch\._",
        r"jax\._src",
        r"\bfw\._",
        r"forward_ad\._",
        "_execution_engine",
        r"\._is_view\b",
        r"\._modules\b",
        "_ragged_idx",
    ]
    private = re.compile("|".join(names))
    folder = Path(internals.__file__).parents[1]
    files = [path for path in folder.rglob("*.py*") if path.suffix in (".py", ".pyx", ".pxi")]
    users = {path.name for path in files if private.search(path.read_text(encoding="utf-8"))}
    assert users == {"torch_internals.py", "jax_internals.py"}
