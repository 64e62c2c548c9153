"""What the documents say is so: their code runs, their links lead somewhere, the tests they name are there."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import threading

import numpy as np
import pytest
from support.documents import ROOT, blocks, run
from support.libraries import need
from support.replay_batching import CASES
from support.serving import need_server

import weft

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=[str(path.relative_to(ROOT)) for path in paths])


SMALL = {"actors.py": ["--actors", "8", "--steps", "6"], "batched_cartpole.py": ["--rounds", "2"]}


@named(EXAMPLES)
def test_example_runs(path, capsys, monkeypatch):
    text = path.read_text(encoding="utf-8")
    need_what_is_imported(text)
    if "import ray" in text:  # Ray belongs in a process of its own
        assert run(str(path))
        return
    monkeypatch.setattr(sys, "argv", [str(path), *SMALL.get(path.name, [])])
    with weft.scope():
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


# Code that adds to the table of ops, which other tests go through, runs in a process of its own; the README's has a test in
# test_readme.py.
APART = [ROOT / "docs" / "adding-an-op.md", ROOT / "docs" / "scaling.md"]


@named([path for path in DOCUMENTS if blocks(path, "python") and path.name != "README.md"])
def test_code_runs(path):
    code = "\n".join(blocks(path, "python"))
    need_what_is_imported(code)
    if path in APART:
        run("-c", code)
        return
    with weft.scope():
        exec(compile(code, str(path), "exec"), {"__name__": "__main__"})


def need_what_is_imported(code):
    if "weft.serve" in code or "weft.Client" in code:
        need_server()
    for library in (
        "torch",
        "jax",
        "autograd",
        "rich",
        "ray",
        "sklearn",
        "sentence_transformers",
        "transformers",
        "starlette",
        "fastapi",
    ):
        if re.search(rf"^ *(import|from) {library}\b", code, re.MULTILINE):
            need(library)


@named(DOCUMENTS)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@named(DOCUMENTS)
def test_tests_that_are_named_are_there(path):
    for file, name in re.findall(r"`((?:\w+/)?test_\w+\.py)::([\w:]+)`", path.read_text(encoding="utf-8")):
        assert name in ids_in(ROOT / "tests" / file), f"{file}::{name}"


def ids_in(path):
    """The ids of the tests in a file."""
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found += [f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)]
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found.append(node.name)
    return found


def test_every_difference_is_listed():
    text = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    recorded = [f"TestDifferences::test_{name}" for name, case in CASES.items() if case["verdict"] == "difference"]
    assert recorded
    for test in [*recorded, *ids_in(ROOT / "tests" / "batching/test_ops_differences.py")]:
        assert f"::{test}`" in text, test


def test_the_tree_is_the_real_one():
    run("tools/design_tree.py", "--check")


def test_the_table_of_ops_is_up_to_date():
    run("tools/ops_table.py", "--check")
    text = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \*\*(\w+)\*\*", text, re.MULTILINE)[-2:] == [
        "TensorArraySizeV3",
        "TensorArrayCloseV3",
    ]


def test_lint_versions_are_the_same_everywhere():
    pinned = re.compile(r'"((?:ruff|mypy)==[\d.]+)"')
    project = set(pinned.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    hooks = set(pinned.findall((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")))
    assert project == hooks
    assert len(project) == 2


class Ran:
    """An observer that notes each batch, when it ran and why."""

    def __init__(self, clock):
        self.clock, self.seen = clock, []

    def batch_ran(self, event):
        self.seen.append((round(self.clock.now() * 1000), event.rows, event.reason))

    def call_refused(self, op, name, error):
        raise AssertionError("no call is refused here")


def test_the_timeline_of_batching():
    """The picture under 'When a batch is closed' in docs/batching-ops.md."""
    clock = weft.SimulatedClock()
    with weft.scope(clock), weft.observe(Ran(clock)) as ran:
        for milliseconds, rows in [(0, 1), (3, 2), (5, 2), (9, 2), (12, 1)]:
            clock.advance(milliseconds / 1000 - clock.now())
            arguments = ([np.zeros(rows)], 1, 4, 10_000, 0)
            clock.start(threading.Thread(target=weft.raw_ops.Batch, args=arguments, daemon=True))
            clock.settle()
        clock.run_out()
    assert ran.seen == [(5, (1, 2), "overflow"), (9, (2, 2), "full"), (22, (1,), "timeout")]
