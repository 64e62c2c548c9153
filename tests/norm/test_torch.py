"""`weft.torch`: states that torch's modules understand, and whole models with weft's batch norm in them."""

from __future__ import annotations

import copy
import doctest
import subprocess
import sys

import pytest
from support.callers import together
from support.chains import answers, each
from support.libraries import need

import weft
from weft import raw_ops
from weft.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def _scope():
    need("torch")
    with weft.scope():
        yield


def model():
    import torch
    from torch import nn

    torch.manual_seed(0)
    shared = nn.BatchNorm2d(4, eps=1e-2, momentum=0.3)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), shared, nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False), shared),
        nn.BatchNorm2d(4, momentum=None), nn.Flatten(2), nn.BatchNorm1d(4, track_running_stats=False), nn.Flatten(),
        nn.LazyLinear(2), nn.BatchNorm1d(2),
    )  # fmt: skip


def step(model, x):
    """The output and the gradients of a training step."""
    y = model(x)
    (y**3).sum().backward()
    return [y, *(p.grad for p in model.parameters()), *model.state_dict().values()]


def close(got, wanted):
    import torch

    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_convert_refuses_what_is_no_module():
    from weft.torch import convert

    with pytest.raises(InvalidArgumentError, match=r"a torch.nn.Module, got 3"):
        convert(3)


def test_converted_models_train_and_predict_as_before():
    import torch

    from weft.torch import BatchNorm, convert

    theirs = model()
    theirs(torch.randn(2, 3, 6, 6))
    ours = convert(copy.deepcopy(theirs))
    assert sum(isinstance(m, BatchNorm) for m in ours.modules()) == 5
    assert not any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in ours.modules())
    assert ours[1] is ours[3][2]
    for _ in range(3):
        x = torch.randn(5, 3, 6, 6)
        theirs.zero_grad()
        ours.zero_grad()
        close(step(ours, x), step(theirs, x))
    close([ours.eval()(x)], [theirs.eval()(x)])


def test_conversion_keeps_parameters_buffers_and_mode():
    import torch

    from weft.torch import convert

    theirs = torch.nn.BatchNorm1d(3, dtype=torch.float64).eval()
    parameters, buffers = dict(theirs.named_parameters()), dict(theirs.named_buffers())
    ours = convert(theirs)
    assert not ours.training
    assert all(value is parameters[name] for name, value in ours.named_parameters())
    assert all(value is buffers[name] for name, value in ours.named_buffers())


def test_conversion_leaves_what_it_does_not_know():
    import torch

    from weft.torch import convert

    class Own(torch.nn.BatchNorm1d):
        """Not torch's."""

    plain = torch.nn.Sequential(Own(2), torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    assert [type(m) for m in convert(plain)] == [Own, torch.nn.Linear, torch.nn.LayerNorm]


def test_conversion_replaces_all_or_nothing():
    import torch

    from weft.torch import BatchNorm, convert

    hooked = torch.nn.BatchNorm1d(2)
    hooked.register_forward_hook(print)
    plain = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Sequential(hooked))
    before = list(plain.modules())
    with pytest.raises(InvalidArgumentError, match="hooks"):
        convert(plain)
    assert list(plain.modules()) == before
    twice = torch.nn.BatchNorm1d(2)
    first, _, last = convert(torch.nn.Sequential(twice, torch.nn.ReLU(), twice))
    assert first is last
    assert type(first) is BatchNorm


def test_statistics_that_are_not_tracked_for_a_while():
    import torch

    from weft.torch import convert

    theirs = torch.nn.BatchNorm1d(3)
    ours = convert(copy.deepcopy(theirs))
    for tracks in (True, False):
        theirs.track_running_stats = ours.track_running_stats = tracks
        x = torch.randn(5, 3)
        close([ours(x), *ours.state_dict().values()], [theirs(x), *theirs.state_dict().values()])
    twin = convert(copy.deepcopy(theirs))
    close([twin(x), *twin.state_dict().values()], [theirs(x), *theirs.state_dict().values()])
    close([ours.eval()(x)], [theirs.eval()(x)])


def test_states_go_both_ways():
    import torch

    from weft.torch import BatchNorm

    theirs, ours = torch.nn.BatchNorm1d(3), BatchNorm(3)
    theirs(torch.randn(4, 3))
    ours.load_state_dict(theirs.state_dict())
    close(ours.state_dict().values(), theirs.state_dict().values())
    ours(torch.randn(4, 3))
    theirs.load_state_dict(ours.state_dict())
    close(ours.state_dict().values(), theirs.state_dict().values())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_states_of_torchs_first_version(device):
    import torch

    from weft.torch import BatchNorm

    state = torch.nn.BatchNorm1d(3).state_dict()
    del state["num_batches_tracked"], state._metadata
    counts = []
    for module in (BatchNorm(3, device=device), torch.nn.BatchNorm1d(3, device=device)):
        if device == "cpu":
            module(torch.randn(4, 3))
        module.load_state_dict(state, assign=True)
        counts.append(int(module.num_batches_tracked))
    assert counts[0] == counts[1]


def test_resets():
    import torch

    from weft.torch import BatchNorm

    ours, fresh = BatchNorm(3), BatchNorm(3)
    ours(torch.randn(4, 3))
    with torch.no_grad():
        ours.weight.fill_(7)
    ours.reset_running_stats()
    assert ours.weight.tolist() == [7, 7, 7]
    ours.reset_parameters()
    close(ours.state_dict().values(), fresh.state_dict().values())
    BatchNorm(3, affine=False, track_running_stats=False).reset_parameters()


def test_cumulative_averages_of_keras_share():
    import torch

    from weft.torch import BatchNorm

    ours = BatchNorm(2, cumulative=True, convention="keras")
    batches = [torch.randn(4, 2) for _ in range(3)]
    for x in batches:
        ours(x)
    close([ours.running_mean], [torch.stack([x.mean(0) for x in batches]).mean(0)])


def test_callers_without_rows_leave_the_statistics_alone():
    """The module in the chain of many callers: those that run it on no rows change nothing."""
    import torch

    from weft.torch import BatchNorm

    norm, twin = BatchNorm(3), torch.nn.BatchNorm1d(3)
    xs = [torch.randn(n, 3) for n in (2, 1, 3)]

    def call(x):
        made = raw_ops.Batch([x], 1, 6, 60_000_000, 0)
        raw_ops.Unbatch(norm(made.batched_tensors[0]), made.batch_index, made.id, 60_000_000).sum().backward()

    answers(together(each(call, xs)))
    twin(torch.cat(xs))
    assert int(norm.num_batches_tracked) == 1
    close(norm.state_dict().values(), twin.state_dict().values())


def test_weft_knows_its_module_for_torch():
    """Without an import of its own; and what is missing where torch is not installed is said."""
    code = """
import sys, weft
assert "torch" not in sys.modules
print(weft.torch.BatchNorm(3))
del sys.modules["weft.torch"], sys.modules["weft.norm.torch"], weft.torch
sys.modules["torch"] = None
try:
    weft.torch
except ImportError as error:
    print("torch" in str(error))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["BatchNorm(3, eps=1e-05, momentum=0.1, axis=1, torch)", "True"]


def test_documented_examples():
    import weft.torch

    assert doctest.testmod(weft.torch).failed == 0


def test_running_statistics_change_where_torch_sees_it():
    """A gradient that still needs the old ones is refused, as after any change in place."""
    import torch

    from weft.torch import BatchNorm

    module = BatchNorm(3)
    kept = (module.running_mean * torch.ones(3, requires_grad=True)).sum()
    module(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_running_statistics_in_two_dtypes():
    """Each keeps its own, whatever the other's is."""
    import torch

    from weft.torch import BatchNorm

    module, x = BatchNorm(3), torch.randn(8, 3)
    same = copy.deepcopy(module)
    module.running_var = module.running_var.half()
    module(x)
    same(x)
    assert module.running_var.dtype == torch.float16
    torch.testing.assert_close(module.running_mean, same.running_mean)
    torch.testing.assert_close(module.running_var, same.running_var.half())


def test_running_statistics_are_blended_in_float64():
    need("weft._native")
    import torch

    from weft import _native

    for dtype in (torch.float32, torch.float64):
        x, (scale, offset, *running) = torch.randn(9, 37, dtype=dtype), torch.randn(4, 37, dtype=dtype)
        before, batches = [v.double().clone() for v in running], torch.tensor(6)
        how = None, 1e-5, 1, 0.1, True, 2
        _, *used, new_mean, new_variance = _native.train(x, scale, offset, *running, batches, *how)
        _native.keep(*running, batches, (new_mean, new_variance))
        shares = 0.1, 0.1 * (9 / 8)
        for new, old, share, v in zip(running, before, shares, used, strict=True):
            assert torch.equal(new, ((1 - 0.1) * old + share * torch.from_numpy(v).double()).to(dtype))
        assert batches == 7
        assert _native.train(x, scale, offset, running[0], running[1][1:], batches, *how) is None
        assert _native.train(x[:1], scale, offset, *running, batches, *how) is None
        assert batches == 7


def test_a_tensor_that_outlived_its_transform_is_normalized():
    import torch

    from weft.torch import BatchNorm

    module, kept = BatchNorm(3, track_running_stats=False), []

    def total(x):
        kept.append(x)
        return x.sum()

    values = torch.randn(4, 3)
    torch.func.grad(total)(values)
    torch.testing.assert_close(module(kept[0]), module(values))


def test_buffers_are_known_by_their_names():
    import torch

    from weft.torch import BatchNorm

    ours, theirs = BatchNorm(3), torch.nn.BatchNorm1d(3)
    count, mean = ours.num_batches_tracked, ours.running_mean
    del ours.running_mean, ours.num_batches_tracked
    ours.register_buffer("running_mean", mean)
    ours.register_buffer("num_batches_tracked", count)
    ours.register_buffer("another", torch.ones(3))
    x = torch.randn(8, 3) + 5
    ours(x), theirs(x)
    assert next(name for name, _ in ours.named_buffers()) == "running_var"
    for name, want in theirs.named_buffers():
        torch.testing.assert_close(getattr(ours, name), want)
    assert torch.equal(ours.another, torch.ones(3))


@pytest.mark.parametrize("mask", [None, 1, [True, False]])
@pytest.mark.parametrize("kind", ["nested", "sparse"])
def test_a_module_refuses_tensors_that_are_not_dense(kind, mask):
    import torch

    dense = torch.ones(2, 3)
    x = dense.to_sparse() if kind == "sparse" else torch.nested.nested_tensor([dense, dense], layout=torch.jagged)
    with pytest.raises(InvalidArgumentError, match="x must be a dense tensor"):
        weft.torch.BatchNorm(3)(x, mask=mask)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("mask", [None, 3])
def test_a_module_of_any_dtype_trains(dtype, mask):
    import torch

    from weft.torch import BatchNorm

    kind = getattr(torch, dtype)
    ours, theirs = BatchNorm(3).to(kind), torch.nn.BatchNorm1d(3).to(kind)
    x = torch.randn(4, 3, dtype=kind)
    y = ours(x, mask)
    rows = x if mask is None else x[:mask]
    torch.testing.assert_close(y[: len(rows)], theirs(rows), rtol=0.05, atol=0.05)
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, theirs.get_buffer(name), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_batches_without_rows_are_not_counted(compiled):
    import torch

    from weft.torch import BatchNorm

    module, x = BatchNorm(3, cumulative=not compiled), torch.randn(8, 3) + 5
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    assert ("cumulative" in repr(module)) == (not compiled)
    run(x, mask=0)
    run(x, mask=torch.zeros(8, dtype=torch.bool))
    assert module.num_batches_tracked == 0
    run(x)
    torch.testing.assert_close(module.running_mean, x.mean(0) * (0.1 if compiled else 1))
    run(x, mask=torch.ones(8, dtype=torch.bool))
    assert module.num_batches_tracked == 2


def test_a_module_says_what_is_wrong():
    import torch

    from weft.torch import BatchNorm

    with pytest.raises(InvalidArgumentError, match=r"x must have 3 channels on axis 1, .* \[4, 2\]"):
        BatchNorm(3)(torch.ones(4, 2))
    with pytest.raises(InvalidArgumentError, match=r"x must have an axis 1, .* \[3\]"):
        BatchNorm(3)(torch.ones(3))
    with pytest.raises(InvalidArgumentError, match="num_features must be 0 or more, got -1"):
        BatchNorm(-1)
    for momentum in (-0.1, 1.5, float("nan")):
        with pytest.raises(InvalidArgumentError, match="momentum must be a share, from 0 to 1"):
            BatchNorm(3, momentum=momentum)
        module = BatchNorm(3)
        module.momentum = momentum
        with pytest.raises(InvalidArgumentError, match="momentum must be a share, from 0 to 1"):
            module(torch.randn(4, 3))
        assert not module.running_mean.any()
