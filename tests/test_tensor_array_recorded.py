"""TensorFlow's recorded answers: programs of raw ops, and inputs that have crashed it."""

from __future__ import annotations

import pytest
from tensor_array_programs import RECORDED, check, run

from weft import errors, raw_ops

EAGER = [case for case in RECORDED["cases"] if case["mode"] == "eager"]
SAME = [case for case in EAGER if "verdict" not in case]
DIFFERENT = {case["id"]: case for case in EAGER if "verdict" in case}
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
