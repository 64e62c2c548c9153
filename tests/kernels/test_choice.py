"""The choice of kernels: the table lists what the files define, and the array decides."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import weft
from weft import kernels
from weft.errors import FailedPreconditionError
from weft.kernels import choice
from weft.kernels.choice import KERNELS, MODULES

FOLDER = Path(kernels.__file__).parent
NOT_KERNELS = {"accepts", "set_num_threads"}


def defined_in(file):
    tree = ast.parse((FOLDER / f"{file}.py").read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    native = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "_native"]
    names |= {alias.name for node in native for alias in node.names}
    return {name for name in names if not name.startswith("_")} - NOT_KERNELS


@pytest.mark.parametrize(("kind", "file"), [(kind, file) for kind, files in KERNELS.items() for file in files])
def test_the_table_lists_what_a_file_defines(kind, file):
    assert set(KERNELS[kind][file]) == defined_in(file)


def test_the_reference_has_every_kernel():
    everything = {name for files in KERNELS.values() for names in files.values() for name in names}
    assert set(KERNELS["reference"]["reference"]) == everything
    assert list(KERNELS) == list(MODULES)


def test_the_array_decides():
    assert kernels.which("concat_rows", np.ones(2)) == "host"
    assert kernels.which("repeat_rows", np.ones(2)) == "reference"
    assert kernels.which("row_sum", np.ones(2, bool)) == "reference"


def test_the_first_slow_call_says_why(monkeypatch, caplog):
    monkeypatch.setattr(choice, "is_installed", lambda kind: kind != "native")
    monkeypatch.setattr(choice, "_CHOSEN", {})
    choice._tell_once.cache_clear()
    for _ in range(2):
        assert kernels.which("repeat_rows", np.ones(2)) == kernels.which("row_sum", np.ones(2)) == "reference"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "weft._native is not installed" in caplog.text


def test_a_kernel_that_a_kind_has_not_is_refused():
    with kernels.use("host"), pytest.raises(FailedPreconditionError, match="'host' have no row_sum"):
        kernels.best("row_sum", np.ones(2))
    with pytest.raises(FailedPreconditionError, match="there is no nothing"):
        weft.kernels.best("nothing", np.ones(2))
