"""Batched functions keep their signature for type checkers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = ROOT / "tests" / "support" / "typed_calls.py"
WRONG = {at for at, line in enumerate(CALLS.read_text(encoding="utf-8").splitlines(), 1) if line.endswith("# error")}


def check(*command):
    """What a type checker prints."""
    path = os.environ | {"MYPYPATH": "src"}
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=300, cwd=ROOT, env=path
    )


@pytest.mark.slow
def test_mypy():
    pytest.importorskip("mypy")
    done = check("mypy", "--strict", "--output=json", str(CALLS))
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {(Path(error["file"]).name, error["line"]) for error in found if error["severity"] == "error"} == {
        (CALLS.name, line) for line in WRONG
    }, done.stdout + done.stderr


@pytest.mark.slow
def test_pyright():
    pytest.importorskip("pyright")
    done = check("pyright", "--outputjson", "--pythonpath", sys.executable, str(CALLS))
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = {error["range"]["start"]["line"] + 1 for error in found if error["severity"] == "error"}
    assert errors == WRONG, done.stdout
