"""The command line and the demo."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from support.documents import run
from support.libraries import need

import weft
from weft.__main__ import main


def test_version():
    assert run("-m", "weft", "--version").startswith(f"weft {weft.__version__}, ")


def test_without_rich_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("weft.__main__.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert "weft[demo]" in error


@pytest.mark.parametrize("bad", ["--callers=1", "--seconds=0", "--seconds=nan"])
def test_bad_options_are_refused(bad, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["demo", bad])
    assert caught.value.code == 2
    assert "at least" in capsys.readouterr().err


def test_the_demo_in_plain_text(capsys):
    need("rich")
    assert main(["demo", "--callers", "8", "--seconds", "0.1"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert "\x1b" not in text
    assert ": 8 threads call one NumPy model" in lines[0]
    assert [line.split(":")[0] for line in lines[1:4]] == ["each for itself", "weft.batched", "one batch by hand"]
    assert all("calls per second" in line and "latency p99" in line for line in lines[1:4])
    assert "times as many calls as each for itself" in lines[4]
    assert "8 callers, 1 backward, 1 weight gradient" in lines[5]
    assert "A bad call in a batch of 8: 1 caller got the error and 7 their answers" in lines[6]
    assert lines[7].endswith("answers equal those computed alone.")
    assert len(lines) == 8


def test_the_first_line_comes_at_once():
    need("rich")
    started = time.monotonic()
    command = [sys.executable, "-m", "weft", "demo", "--callers", "2", "--seconds", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        first = process.stdout.readline()
        waited = time.monotonic() - started
        rest = process.stdout.read()
    assert first.startswith("weft demo")
    assert rest.endswith("computed alone.\n")
    assert process.returncode == 0
    assert waited < 20  # a second on an idle machine


def test_the_demo_in_a_terminal(monkeypatch, capsys):
    need("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    assert main(["demo", "--callers", "8", "--seconds", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "\x1b[" in text
    assert text.count("weft demo") > 1, "drawn again and again"


def test_the_demo_fails_when_an_answer_is_wrong(monkeypatch, capsys):
    need("rich")
    from weft.cli import demo

    forward = demo.Model.forward
    monkeypatch.setattr(demo.Model, "forward", lambda self, x: forward(self, x) + (len(x) if len(x) > 1 else 0))
    assert main(["demo", "--callers", "8", "--seconds", "0.1"]) == 1
    assert "answers are wrong" in capsys.readouterr().out


def test_the_demo_shows_what_a_caller_raises(monkeypatch, capsys):
    need("rich")
    from weft.cli import demo

    def broken(self, x, dy):
        raise ArithmeticError("the model is broken")

    forward = demo.Demo._share_backward
    monkeypatch.setattr(
        demo.Demo, "_share_backward", lambda self: self._in_threads(lambda i: broken(self, i, i)) or forward(self)
    )
    assert main(["demo", "--callers", "4", "--seconds", "0.1"]) == 1
    assert "ArithmeticError: the model is broken" in capsys.readouterr().out


def test_ctrl_c_ends_it(monkeypatch, capsys):
    need("rich")
    from weft.cli import demo

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.Demo, "_share_backward", interrupted)
    assert main(["demo", "--callers", "4", "--seconds", "0.1"]) == 130
    assert capsys.readouterr().out.endswith("weft demo: interrupted\n")


def test_the_model_has_the_gradients_it_says():
    need("rich")
    from weft.cli.demo import WIDTH_OF_LAYER, Model

    model, rng = Model(), np.random.default_rng(1)
    model.layers = [layer.astype(float) for layer in model.layers]
    x, dy = rng.standard_normal((2, 3, WIDTH_OF_LAYER))
    dx, first = model.backward(x, dy)
    for gradient, values in ((dx, x), (first, model.layers[0])):
        direction = rng.standard_normal(values.shape)
        values += 1e-6 * direction
        above = (model.forward(x) * dy).sum()
        values -= 2e-6 * direction
        below = (model.forward(x) * dy).sum()
        values += 1e-6 * direction
        np.testing.assert_allclose((gradient * direction).sum(), (above - below) / 2e-6, rtol=1e-6)


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_does_not_exist(port, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "model.py", f"--port={port}"])
    assert "argument --port: " in capsys.readouterr().err


def test_without_a_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "the following arguments are required: {demo,serve}" in capsys.readouterr().err
