"""The command line and the demo."""

from __future__ import annotations

import numpy as np
import pytest
from support.documents import run
from support.libraries import need

from weft.__main__ import main


def test_version():
    assert run("-m", "weft", "--version").startswith("weft 0.")


def test_without_rich_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("weft.__main__.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert "weft[demo]" in error


@pytest.mark.parametrize(
    "bad", ["--callers=1", "--seconds=0", "--seconds=nan", "--max-batch-size=0", "--timeout-ms=-1"]
)
def test_bad_options_are_refused(bad, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["demo", bad])
    assert caught.value.code == 2
    assert "at least" in capsys.readouterr().err


def test_the_demo_in_plain_text(capsys):
    need("rich")
    assert main(["demo", "--callers", "8", "--seconds", "0.5", "--max-batch-size", "8"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in lines)
    assert sum("weft demo" in line for line in lines) == 1, "no live picture, the summary once"
    for label in ("calls per second", "closed when full", "wait p50, p99", "padding", "8 rows", "weight gradients"):
        assert label in text
    assert "Every answer equals the one computed by hand" in text


def test_the_demo_in_a_terminal(monkeypatch, capsys):
    need("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    assert main(["demo", "--callers", "8", "--seconds", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "\x1b[" in text
    assert text.count("weft demo") > 1, "drawn again and again"


def test_the_demo_fails_when_an_answer_is_wrong(monkeypatch, capsys):
    need("rich")
    from weft.cli import demo

    forward = demo.Model.forward
    monkeypatch.setattr(demo.Model, "forward", lambda self, x: forward(self, x) + (len(x) if len(x) > 1 else 0))
    assert main(["demo", "--callers", "8", "--seconds", "0.5"]) == 1
    assert "Not every answer is right" in capsys.readouterr().out


def test_the_demo_shows_what_a_caller_raises(monkeypatch, capsys):
    need("rich")
    from weft.cli import demo

    def broken(self, x):
        raise ArithmeticError("the model is broken")

    monkeypatch.setattr(demo.Model, "forward", broken)
    monkeypatch.setattr(demo, "GRADIENT_DEADLINE", 0.1)
    assert main(["demo", "--callers", "4", "--seconds", "5"]) == 1
    assert "ArithmeticError: the model is broken" in capsys.readouterr().out


def test_the_model_has_the_gradient_it_says():
    need("rich")
    from weft.cli.demo import FEATURES, OUTPUTS, Model

    model, rng = Model(), np.random.default_rng(1)
    x, dy = rng.standard_normal((3, FEATURES)), rng.standard_normal((3, OUTPUTS))
    direction = rng.standard_normal(x.shape)
    numeric = ((model.forward(x + 1e-6 * direction) - model.forward(x - 1e-6 * direction)) * dy).sum() / 2e-6
    np.testing.assert_allclose((model.backward(x, dy)[0] * direction).sum(), numeric, rtol=1e-6)


def test_warmup_compiles():
    need("numba")
    assert main(["warmup", "float32"]) == 0
    assert main(["warmup", "int3"]) == 2
