"""TensorFlow's recorded answers for batch norm."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from support.libraries import back

CASES = {
    c["id"]: c for c in json.loads((Path(__file__).parent.parent / "recorded/batch_norm.json").read_text())["cases"]
}
TOLERANCE = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1.6e-2, "float64": 1e-11}


def array(recorded):
    dtype = ml_dtypes.bfloat16 if recorded["dtype"] == "bfloat16" else np.dtype(recorded["dtype"])
    return np.array([float(v) for v in recorded["data"]]).astype(dtype).reshape(recorded["shape"])


def compare(got, want, unspecified=False, factor=1.0):
    assert list(got.shape) == want["shape"]
    assert str(got.dtype).removeprefix("torch.") == want["dtype"]
    if unspecified or "data" not in want:
        return
    tolerance = TOLERANCE[want["dtype"]] * factor
    expected = array(want).astype(np.float64)
    np.testing.assert_allclose(back(got).astype(np.float64), expected, rtol=tolerance, atol=tolerance)
