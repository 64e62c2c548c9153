"""The README: its example prints what it says, its commands are commands."""

from __future__ import annotations

import re

from support.documents import ROOT, blocks, run
from support.libraries import need

README = ROOT / "README.md"


def test_the_example_prints_what_the_readme_says():
    need("torch")
    (code,) = blocks(README, "python")
    (printed,) = blocks(README, "text")
    assert run("-c", code) == printed


def test_there_are_four_commands_and_each_does_all_set_up():
    install, demo, serve, tests = (block.strip() for block in blocks(README, "bash"))
    assert install == "python3 -m venv .venv && .venv/bin/pip install '.[batched]'"
    for command in (demo, serve):  # compiled
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -q '.[")
    assert tests.startswith("python3 -m venv .venv && .venv/bin/pip install -q -e '.[")
    for command in (demo, serve, tests):
        assert "\n" not in command
    assert demo.endswith(".venv/bin/python -m weft demo")
    assert serve.endswith(".venv/bin/python -m weft serve examples/digits.py")
    assert tests.endswith(".venv/bin/pytest -n 2")


def test_the_extras_of_the_commands_exist():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"'\.\[(\w+)\]'", README.read_text(encoding="utf-8"))
    assert extras == ["batched", "demo", "serve", "test"]
    for extra in extras:
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
