"""`weft serve` as a process: targets, its address, signals and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
from support.documents import ROOT
from support.libraries import need
from support.serving import need_server, oip

import weft

need_server()

MODELS = """
import dataclasses
import numpy as np
import weft
import weft.serve

@dataclasses.dataclass
class Scale:
    factor: float = 3.0

@weft.batched(max_batch_size=8)
def triple(x):
    return Scale().factor * x

def plain(x):
    return -x

def make():
    return plain

served = weft.serve.model(plain, name="negated", example={"x": np.zeros((1, 2), np.float32)})
"""


@contextmanager
def process(*arguments, cwd=None):
    """A running `weft serve`, and its address."""
    command = [sys.executable, "-m", "weft", "serve", *arguments, "--port", "0"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)
    try:
        lines = []
        for line in run.stdout:
            lines.append(line)
            if "look at" in line:
                break
        found = re.search(r"look at (http\S+)", "".join(lines))
        assert found, run.communicate(timeout=30)
        yield run, found[1], lines
    finally:
        if run.poll() is None:
            run.kill()
        run.communicate(timeout=30)


def post(address, path, body):
    request = urllib.request.Request(address + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MODELS)
    return tmp_path


def test_the_digits_example():
    need("sklearn")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    with process(str(ROOT / "examples" / "digits.py")) as (run, address, lines):
        assert "digits is ready" in lines[0]
        answer = post(address, "v2/models/digits/infer", oip(pixels=pixels[:100].astype(np.float32)))
        digits, probabilities = answer["outputs"]
        assert np.mean(np.array(digits["data"]) == labels[:100]) > 0.95
        assert probabilities["shape"] == [100, 10]
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 0


def test_models_of_a_file_and_of_a_module_in_one_process(folder):
    X = np.ones((1, 2), np.float32)
    targets = ["mine.py", "three=mine:triple", "other=mine.py:plain"]
    with process(*targets, cwd=folder) as (run, address, _):
        for name, factor in (("negated", -1.0), ("three", 3.0), ("other", -1.0)):
            answer = post(address, f"v2/models/{name}/infer", oip(x=X))
            assert answer["outputs"][0]["data"] == [factor] * 2
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 0


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no SIGHUP")
def test_sighup_reads_the_file_again(folder):
    X = np.ones((1, 2), np.float32)
    with process("mine.py:triple", cwd=folder) as (run, address, _):
        (folder / "mine.py").write_text(MODELS.replace("3.0", "30.0"))
        os.utime(folder / "mine.py", (1, 1))
        run.send_signal(signal.SIGHUP)
        while (answer := post(address, "v2/models/triple/infer", oip(x=X)))["model_version"] == "1":
            assert answer["outputs"][0]["data"] == [3.0, 3.0]
        assert answer["outputs"][0]["data"] == [30.0, 30.0]


class TestTargets:
    def read(self, *arguments, **options):
        from weft.serve.load import Target

        return Target(*arguments, **options).models()

    def test_options_of_a_model(self, folder):
        (model,) = self.read(str(folder / "mine.py"), options={"library": "torch", "max_wait": 0.5})
        assert (model.recipe.library, model.recipe.options["max_wait"]) == ("torch", 0.5)
        assert "library" not in model.recipe.options

    def test_names(self, folder, monkeypatch):
        path = str(folder / "mine.py")
        assert [model.name for model in self.read(path)] == ["negated"]
        assert [model.name for model in self.read(f"{path}:plain")] == ["plain"]
        assert [model.name for model in self.read(f"{path}:make", factory=True)] == ["make"]
        (folder / "only.py").write_text("import weft\nf = weft.batched(lambda x: x)\n")
        assert [model.name for model in self.read(str(folder / "only.py"))] == ["only"]
        monkeypatch.chdir(folder)
        assert [model.name for model in self.read("mine:triple")] == ["triple"]

    @pytest.mark.parametrize(
        ("target", "sentence"),
        [
            ("none.py", "no file"),
            ("no_such_module_here:f", "no module"),
            ("model.txt", "no module 'model.txt'.*ends with .py"),
            ("mine.py:nothing", "has no nothing"),
            ("mine.py:np.pi", "must be a model"),
            ("a/b=mine.py", "letters"),
            ("empty.py", "has no model"),
            ("broken.py", "not installed"),
        ],
    )
    def test_wrong_ones(self, folder, monkeypatch, target, sentence):
        (folder / "empty.py").write_text("")
        (folder / "broken.py").write_text("import no_such_package")
        monkeypatch.chdir(folder)
        with pytest.raises(weft.errors.OpError, match=sentence):
            self.read(target)

    def test_options_of_a_batcher_are_its_own(self, folder):
        import asyncio

        (model,) = self.read(f"{folder}/mine.py:triple", options={"max_batch_size": 2})
        with pytest.raises(weft.errors.FailedPreconditionError, match="those of its batcher"):
            asyncio.run(model.load())
        (model,) = self.read(f"{folder}/mine.py:plain", options={"max_batch_size": 2})
        asyncio.run(model.load())
        assert model.version.policy.options.max_batch_size == 2


def test_wrong_options():
    from weft.cli.serve import _limits, _token

    for wrong in ("rows", "nothing=3", "rows=x"):
        with pytest.raises(weft.errors.InvalidArgumentError, match="limit"):
            _limits([wrong])
    with pytest.raises(weft.errors.InvalidArgumentError, match="the token file none cannot be read"):
        _token("none")


def weft_serve(*arguments):
    command = [sys.executable, "-m", "weft", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_exit_codes(folder):
    run = weft_serve("none.py")
    assert (run.returncode, run.stderr) == (2, "weft: there is no file none.py\n")
    run = weft_serve("none.py:f", "--max-batch-size", "-1")
    assert run.returncode == 2
    assert run.stderr.startswith("weft: max_batch_size must be an integer from 1")
    run = weft_serve("none.py:f", "--on-loop", "--parallel", "2")
    assert run.returncode == 2
    assert run.stderr.startswith("weft: parallel must be 1 with on_loop=True")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = weft_serve(f"{folder}/mine.py", "--port", str(port))
    assert run.returncode
    assert f"the server cannot listen on 127.0.0.1, port {port}: choose another" in run.stderr
    (folder / "broken.py").write_text("import weft.serve\nf = weft.serve.model(factory=lambda: 1 / 0, name='f')\n")
    run = weft_serve(str(folder / "broken.py"), "--port", "0")
    assert run.returncode == 1
    assert "could not be loaded: ZeroDivisionError" in run.stderr
