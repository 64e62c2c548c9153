"""Writes TensorFlow's answers of RaggedCountSparseOutput into tests/recorded/ragged.json, in place of those that are there.

Run it where TensorFlow is installed; what it prints is the version that answered.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

RECORDED = Path(__file__).parents[1] / "tests" / "recorded" / "ragged.json"
OP = "RaggedCountSparseOutput"
PREFIX = "count-sparse-"


class Case(NamedTuple):
    """One call: what it shows, its inputs and its attributes."""

    about: str
    splits: Any = np.array([0, 2, 2, 5], np.int64)
    values: Any = np.array([3, 1, 1, 1, 7], np.int32)
    weights: Any = np.zeros(0, np.int32)
    attributes: dict[str, Any] = {}


def int64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def int32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def halves(*numbers: float, dtype: str = "float32") -> np.ndarray:
    return np.array(numbers, dtype)


MATRIX = int32(3, 1, 1, 1, 7, 7).reshape(2, 3)
CASES = {
    "counts": Case("one entry for each number in each row, in order"),
    "int64-values": Case("int64 numbers", values=int64(3, 1, 1, 1, 7)),
    "weights-float32": Case("weights add", weights=halves(0.5, 0.25, 2, 3, 4)),
    "weights-float64": Case("weights add", weights=halves(0.5, 0.25, 2, 3, 4, dtype="float64")),
    "weights-int64": Case("weights add", weights=int64(1, 2, 3, 4, 5)),
    "weights-cancel": Case("a sum of 0 stays an entry", weights=int32(1, 2, 3, -3, 5)),
    "weights-wrap": Case("int32 sums wrap", splits=int64(0, 2), values=int32(0, 0), weights=int32(2**31 - 1, 1)),
    "weights-order": Case(
        "float sums are taken in order", splits=int64(0, 3), values=int32(0, 0, 0), weights=halves(1e8, 1, -1e8)
    ),
    "weights-empty-int64": Case("without weights the dtype is still theirs", weights=np.zeros(0, np.int64)),
    "weights-empty-float64": Case("without weights the dtype is still theirs", weights=np.zeros(0)),
    "weights-empty-matrix": Case("any empty array is no weights", weights=np.zeros((0, 3), np.float32)),
    "binary": Case("whether a row holds a number", attributes={"binary_output": True}),
    "binary-weights": Case(
        "weights do not matter then", weights=halves(5, 6, 7, 8, 9), attributes={"binary_output": True}
    ),
    "maxlength": Case("numbers from maxlength on are left out", attributes={"maxlength": 3}),
    "maxlength-0": Case("nothing is counted", attributes={"maxlength": 0}),
    "maxlength-largest": Case("maxlength itself is left out", attributes={"maxlength": 7}),
    "maxlength-more": Case("maxlength is the number of columns", attributes={"maxlength": 100}),
    "maxlength-weights": Case("their weights too", weights=halves(1, 2, 3, 4, 5), attributes={"maxlength": 3}),
    "minlength-0": Case("minlength 0", attributes={"minlength": 0}),
    "minlength": Case("at least so many columns", attributes={"minlength": 100}),
    "minlength-less": Case("fewer than the numbers need", attributes={"minlength": 2}),
    "minlength-over-maxlength": Case("maxlength wins", attributes={"minlength": 100, "maxlength": 5}),
    "minlength-maxlength-0": Case("maxlength wins", attributes={"minlength": 100, "maxlength": 0}),
    "lengths-64-bits": Case("lengths have 64 bits", attributes={"minlength": 2**41}),
    "large": Case("numbers have 64 bits", values=int64(2**40, 1, 1, 1, 3)),
    "largest-int32": Case("one column more than int32 counts", values=int32(2**31 - 1, 1, 1, 1, 3)),
    "no-values": Case("rows without values: one column", splits=int64(0, 0, 0), values=int32()),
    "no-values-minlength": Case("minlength", splits=int64(0, 0, 0), values=int32(), attributes={"minlength": 4}),
    "no-values-maxlength": Case("maxlength", splits=int64(0, 0, 0), values=int32(), attributes={"maxlength": 4}),
    "splits-matrix": Case("splits are read flat", splits=int64(0, 2, 2, 5).reshape(2, 2)),
    "values-matrix": Case("values are read flat", splits=int64(0, 2, 6), values=MATRIX),
    "values-matrix-weights": Case(
        "weights of the same shape", splits=int64(0, 2, 6), values=MATRIX, weights=np.ones((2, 3), np.float32)
    ),
    "values-scalar": Case("a scalar is one value", splits=int64(0, 1), values=np.array(3, np.int32)),
    "err-weights-flat": Case(
        "weights of another shape", splits=int64(0, 2, 6), values=MATRIX, weights=int32(*range(6))
    ),
    "err-weights-short": Case("fewer weights than values", weights=int32(1, 2, 3, 4)),
    "err-weights-one": Case("one weight", weights=int32(1)),
    "err-weights-without-values": Case("weights and no values", splits=int64(0, 0), values=int32(), weights=int32(1)),
    "err-weights-dtype": Case("weights of a dtype that is not taken", weights=np.ones(5, np.float16)),
    "err-values-dtype": Case("values of a dtype that is not taken", values=np.ones(5, np.int8)),
    "err-values-float": Case("values that are no integers", values=np.ones(5, np.float32)),
    "err-negative": Case("negative value", values=int32(3, 1, -1, 1, 7)),
    "err-minlength": Case("minlength below -1", attributes={"minlength": -2}),
    "err-maxlength": Case("maxlength below -1", attributes={"maxlength": -2}),
    "err-splits-empty": Case("empty splits", splits=int64(), values=int32()),
    "err-splits-one": Case("splits without a row", splits=int64(0), values=int32()),
    "err-splits-start": Case("first split not 0", splits=int64(1, 2, 2, 5)),
    "err-splits-short": Case("last split mismatch", splits=int64(0, 2, 2, 4)),
    "err-splits-long": Case("last split mismatch", splits=int64(0, 2, 2, 6)),
}
#: What weft must refuse, whatever TensorFlow gives.
ATTACKS = {
    "decreasing-splits": Case(
        "inner splits decrease: TF counts rows wrongly but stays in memory", splits=int64(0, 3, 1, 5)
    ),
    "negative-split": Case("a split below 0: TF counts rows wrongly but stays in memory", splits=int64(0, -3, 1, 5)),
    "largest-int64": Case(
        "the number of columns wraps: TF's dense shape is negative", values=int64(2**63 - 1, 1, 1, 1, 3)
    ),
}


def tensor(x: Any) -> dict[str, Any]:
    """A tensor as the recordings hold it."""
    found = np.asarray(x)
    return {"t": found.dtype.name, "s": list(found.shape), "v": found.ravel().tolist()}


def step(case: Case) -> dict[str, Any]:
    """The call, without an answer."""
    inputs = {name: tensor(getattr(case, name)) for name in ("splits", "values", "weights")}
    return {"do": OP, "in": inputs, "attrs": {"binary_output": False, **case.attributes}, "as": "c"}


def answer(case: Case) -> dict[str, Any]:
    """What TensorFlow gives."""
    inputs = {name: tf.constant(getattr(case, name)) for name in ("splits", "values", "weights")}
    try:
        found = tf.raw_ops.RaggedCountSparseOutput(**inputs, **{"binary_output": False, **case.attributes})
    except Exception as error:
        return {"error": type(error).__name__}
    return {"value": {"fields": {name: tensor(x.numpy()) for name, x in found._asdict().items()}}}


def recorded(name: str, case: Case) -> dict[str, Any]:
    """A case with its answer."""
    found = answer(case)
    assert ("error" in found) == name.startswith("err-"), f"{name}: {found}"
    if "error" in found:
        found["why"] = case.about
    return {"id": PREFIX + name, "about": case.about, "mode": "eager", "steps": [step(case) | {"expect": found}]}


def attack(name: str, case: Case) -> dict[str, Any]:
    """A case that must be refused, with TensorFlow's answer."""
    safe, steps = {"error": "InvalidArgumentError"}, [step(case)]
    return {
        "id": PREFIX + name, "ref": "probed", "about": case.about, "safe": safe, "steps": steps, "tf_2_21": answer(case)
    }  # fmt: skip


def main() -> None:
    """Write the cases among the others."""
    everything = json.loads(RECORDED.read_text(encoding="utf-8"))
    for part in ("cases", "attacks"):
        everything[part] = [case for case in everything[part] if not case["id"].startswith(PREFIX)]
    everything["cases"] += [recorded(name, case) for name, case in CASES.items()]
    everything["attacks"] += [attack(name, case) for name, case in ATTACKS.items()]
    RECORDED.write_text(json.dumps(everything) + "\n", encoding="utf-8")
    print(f"{len(CASES)} cases and {len(ATTACKS)} attacks of TensorFlow {tf.__version__} in {RECORDED}")


if __name__ == "__main__":
    main()
