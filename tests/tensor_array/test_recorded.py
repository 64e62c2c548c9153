"""TensorFlow's recorded answers: programs of raw ops, and inputs that have crashed it."""

from __future__ import annotations

import numpy as np
import pytest
from support.tensor_array_programs import RECORDED, check, literal, run

import weft
from weft import errors, raw_ops

EAGER = [case for case in RECORDED["cases"] if case["mode"] == "eager"]
SAME = [case for case in EAGER if "verdict" not in case]
DIFFERENT = {case["id"]: case for case in EAGER if "verdict" in case}
GRAPHS = {case["id"]: case for case in RECORDED["cases"] if case["mode"] == "graph_v1"}
ATTACKS = {attack["id"]: attack for attack in RECORDED["attacks"]}


def error_class(name):
    return getattr(errors, name, None) or {"TypeError": TypeError}[name]


def replay(case, library):
    names = {}
    for step in case["steps"]:
        expected = step["expect"]
        if "error" in expected:
            with pytest.raises(error_class(expected["error"])):
                run(step, names, library)
        else:
            check(run(step, names, library), expected["value"])


@pytest.mark.parametrize("case", SAME, ids=lambda case: case["id"])
def test_recorded(case, library):
    replay(case, library)


def steps(name):
    """The steps of a case, run one by one by `next`."""
    names = {}
    return (lambda step=step: run(step, names) for step in DIFFERENT[name]["steps"])


def refused(step):
    with pytest.raises(errors.InvalidArgumentError):
        step()


def test_a_refused_write_does_not_grow_the_array():
    create, write, size = steps("write-grow-before-shape-check")
    create()
    refused(write)
    assert size() == 0


def test_a_refused_read_changes_nothing():
    create, read, again = steps("read-err-string-zero")
    create()
    refused(read)
    refused(again)


@pytest.mark.parametrize("name", ["scatter-err-duplicate", "scatter-err-negative"])
def test_a_refused_scatter_writes_nothing(name):
    create, scatter, read = steps(name)
    handle = create().handle
    refused(scatter)
    refused(read)  # nothing was written, and no shape is known
    raw_ops.TensorArrayWriteV3(handle, 0, [1.0, 2.0], 0.0)


@pytest.mark.parametrize("name", ["gws-unknown", "gws-identical-nothing-written"])
def test_elements_of_an_accumulator_begin_with_what_was_prepended(name):
    create, gradient, write, *_ = steps(name)
    create()
    handle = gradient().grad_handle
    refused(write)
    raw_ops.TensorArrayWriteV3(handle, 0, [[1.0]] * 3, 0.0)
    assert raw_ops.TensorArrayReadV3(handle, 0, 0.0, "float32").shape == (3, 1)


def test_every_difference_is_tested_here():
    assert set(DIFFERENT) == {
        "write-grow-before-shape-check",
        "read-err-string-zero",
        "scatter-err-duplicate",
        "scatter-err-negative",
        "gws-unknown",
        "gws-identical-nothing-written",
    }


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "cve-2023-25663"])
def test_attacks(name, library):
    attack, names = ATTACKS[name], {}
    *before, last = attack["steps"]
    for step in before:
        run(step, names, library)
    if "error" in attack["safe"]:
        with pytest.raises(error_class(attack["safe"]["error"])):
            run(last, names, library)
    else:
        check(run(last, names, library), attack["safe"]["value"])


def test_ops_on_string_handles_do_not_exist():
    assert not hasattr(raw_ops, "TensorArrayConcatV2")


# ----- the recorded graphs -----

FORWARD = ["TensorArrayWriteV3", "TensorArrayReadV3", "TensorArrayGatherV3", "TensorArrayScatterV3"]
FORWARD += ["TensorArrayConcatV3", "TensorArraySplitV3"]


def run_graph(case):
    """The fetched gradients of a recorded graph: by the registered gradients, one source for each `@gradients`."""
    names, tape, out = {}, [], {}

    def get(given):
        if isinstance(given, dict) and "ref" in given:
            found = names[given["ref"]]
            return getattr(found, given["field"]) if "field" in given else found
        return literal(given)

    for step in case["steps"]:
        given = step.get("in", {})
        if step["do"] == "@input":
            names[step["as"]] = literal(step["value"])
        elif step["do"] in FORWARD:
            arguments = {k: get(v) for k, v in given.items()}
            result, pull = weft.vjp(getattr(raw_ops, step["do"]), **arguments, **step.get("attrs", {}))
            names[step.get("as")] = result
            tape.append((step, pull))
        elif step["do"] == "@gradients":
            out[step["as"]] = pulled(step, tape)
        else:
            names[step["as"]] = getattr(raw_ops, step["do"])(**{k: get(v) for k, v in given.items()}, **step["attrs"])
    return names | out


def pulled(step, tape):
    grads = {}
    given = step["in"]
    for y, g in zip(given["ys"], given["grad_ys"], strict=True):
        grads.setdefault(y["ref"], []).append(literal(g))
    found = {}
    with weft.gradient_source():
        for call, pull in reversed(tape):
            for g in grads.get(call.get("as"), [None]):
                back_ = pull() if g is None else pull(g)
                value = call["in"].get("value", {})
                if "value" in back_ and "ref" in value:
                    found[value["ref"]] = found.get(value["ref"], 0) + back_["value"]
                if g is None:
                    break
    return [found[x["ref"]] for x in given["xs"]]


RUNNABLE = [
    name
    for name, case in GRAPHS.items()
    if "values" in case["expect"] and any(s["do"] == "@gradients" for s in case["steps"]) and "err" not in name
]


@pytest.mark.parametrize("name", RUNNABLE)
def test_recorded_graphs_give_the_recorded_gradients(name):
    found = run_graph(GRAPHS[name])
    for fetched, wanted in GRAPHS[name]["expect"]["values"].items():
        pairs = zip(found[fetched], wanted, strict=True) if isinstance(wanted, list) else [(found[fetched], wanted)]
        for got, tensor in pairs:
            np.testing.assert_allclose(got, literal(tensor), rtol=1e-6)


def test_most_recorded_graphs_are_run():
    assert len(RUNNABLE) >= 6
