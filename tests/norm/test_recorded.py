"""TensorFlow's recorded answers, replayed in every library."""

from __future__ import annotations

import re

import pytest
from support.batch_norm_cases import CASES, array, compare
from support.libraries import for_each, need, to

import weft
from weft import errors, raw_ops

REPLAYED = [c for c in CASES.values() if c["mode"] == "eager" and c["op"].startswith("FusedBatchNorm")]
SELDOM = [c for c in REPLAYED if re.match("grad.*f16", c["id"])]  # see kernels/test_batch_norm.py


def arrays(recorded, library):
    return {name: to(library, array(value)) for name, value in recorded.items()}


def named(kind):
    return for_each("case", [c for c in REPLAYED if c["kind"] in kind], slow=SELDOM, ids=lambda c: c["id"])


def refuses(case):
    """What weft says where it differs: it computes what TensorFlow refuses."""
    return "error" in case and "verdict" not in case


@named(["forward", "grad_op"])
def test_op(case, library):
    inputs = arrays(case["inputs"], library)
    if library == "jax" and "float64" in {v["dtype"] for v in case["inputs"].values()}:
        inputs["x"] = inputs["x"].astype("int32")  # JAX would make a float32 of it; what is tested is the refusal
    call = getattr(raw_ops, case["op"])
    if refuses(case):
        with pytest.raises(getattr(errors, case["error"]["class"])):
            call(**inputs, **case["attrs"])
        return
    result = call(**inputs, **case["attrs"])
    wanted = case.get("outputs") or case["with_onednn"]["outputs"]
    assert set(wanted) <= set(result._fields)
    for name, want in wanted.items():
        if case["kind"] == "grad_op" and name.startswith("reserve"):  # oneDNN's are scalars, Eigen's and ours empty
            want = {**want, "shape": [0], "data": []}
        shape = case.get("sound_shapes", {}).get(name, want["shape"])
        compare(getattr(result, name), {**want, "shape": shape}, name in case.get("unspecified_values", []))


def first_order(case, library, grads, names, wanted, prefix="d_"):
    """The gradients of outputs, by weft.vjp and by the library's own differentiation, against the recording."""
    call, inputs = getattr(raw_ops, case["op"]), arrays(case["inputs"], library)
    _, pull = weft.vjp(call, **inputs, **case["attrs"])
    found = pull(**grads)
    for name in names:
        want = wanted[prefix + name]
        assert (found.get(name) is None) == (want is None)
        if want is not None:
            compare(found[name], want, factor=10)
    return call, inputs


@named(["tape_first_order"])
def test_first_order(case, library):
    dy = to(library, array(case["extra"]["dy"]))
    first_order(case, library, {"y": dy}, case["inputs"], case["outputs"])


@named(["grad_of_grad_op"])
def test_second_order(case, library):
    extra = arrays({k: v for k, v in case["extra"].items() if v is not None}, library)
    names = {"u": "x_backprop", "a": "scale_backprop", "b": "offset_backprop"}
    first_order(case, library, {names[k]: v for k, v in extra.items()}, case["inputs"], case["outputs"])


@named(["tape_second_order"])
def test_double_backprop_torch(case):
    need("torch")
    import torch

    inputs = {k: to("torch", array(v)) for k, v in case["inputs"].items()}
    leaves = [inputs[name].requires_grad_() for name in ("x", "scale", "offset")]
    extra = arrays(case["extra"], "torch")
    y = getattr(raw_ops, case["op"])(**inputs, **case["attrs"]).y
    first = torch.autograd.grad((0.5 * extra["g"] * y * y).sum(), leaves, create_graph=True)
    total = sum((f * extra[k]).sum() for f, k in zip(first, "uab", strict=True))
    second = torch.autograd.grad(total, leaves, allow_unused=True)
    for order, found in (("first_d_", first), ("second_d_", second)):
        for name, got in zip(("x", "scale", "offset"), found, strict=True):
            want = case["outputs"][order + name]
            compare(torch.zeros(want["shape"]) if got is None else got, want, factor=10)


@named(["tape_second_order"])
@for_each("is_compiled", [True, False], slow=[False])
def test_double_backprop_jax(case, is_compiled):
    need("jax")
    import jax

    inputs, extra = arrays(case["inputs"], "jax"), arrays(case["extra"], "jax")
    rest = {k: inputs.pop(k) for k in ("mean", "variance")}

    def first(x, scale, offset):
        def loss(x, scale, offset):
            y = getattr(raw_ops, case["op"])(x=x, scale=scale, offset=offset, **rest, **case["attrs"]).y
            return (0.5 * extra["g"] * y * y).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(x, scale, offset)

    def total(*leaves):
        return sum((f * extra[k]).sum() for f, k in zip(first(*leaves), "uab", strict=True))

    second = jax.grad(total, argnums=(0, 1, 2))
    for order, function in (("first_d_", first), ("second_d_", second)):
        found = (jax.jit(function) if is_compiled else function)(*inputs.values())
        for name, got in zip(("x", "scale", "offset"), found, strict=True):
            compare(got, case["outputs"][order + name], factor=10)
