"""How many requests per second does `weft serve` answer, and how late, against other servers of Python functions?

    python -m benchmarks.serve [--peers PYTHON] [--seconds N] [--rounds N] [--only TEXT] [--save]

`wrk` asks over loopback, with bodies of one row of 64 floats. All servers are started once and stopped (SIGSTOP) while it is not
their turn; they take turns within each round. `--peers` is a Python with LitServe, mosec, BentoML, Ray and FastAPI; those that do
not start are left out. `--only soak` keeps a load of 70 % up for `--seconds`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import Case, _text, plot, table, versions

PEERS = ["bare", "fastapi", "fastapi_batcher", "litserve", "mosec", "bentoml", "ray"]
HERE = ("weft", "bare")  # they run with this Python
JSON_ONLY = {"litserve", "bentoml", "ray"}
PATHS = {"litserve": "/predict", "mosec": "/inference", "bentoml": "/predict"}
CONNECTIONS = (1, 16, 64, 256)
#: Our requests per second over theirs, at least.
TARGETS = {
    "bare": 0.8,
    "mosec": 0.8,
    "litserve": 5.0,
    "fastapi": 0.95,
    "fastapi_batcher": 0.95,
    "bentoml": 0.95,
    "ray": 0.95,
}
ROW = (np.arange(64) * 0.137 % 1).astype(np.float32)


def body(name: str, form: str) -> tuple[bytes, dict[str, str]]:
    """The body of a request, and its headers."""
    entry: dict[str, Any] = {"name": "x", "shape": [1, 64], "datatype": "FP32"}
    data = [round(float(x), 4) for x in ROW]
    if name == "bentoml":
        return json.dumps({"x": [data]}).encode(), {"content-type": "application/json"}
    if form == "json":
        return json.dumps({"inputs": [{**entry, "data": data}]}).encode(), {"content-type": "application/json"}
    entry["parameters"] = {"binary_data_size": ROW.nbytes}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    return head + ROW.tobytes(), {
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(head)),
    }


class Contestant:
    """A running server, stopped while it is not its turn."""

    def __init__(self, name: str, model: str, form: str, python: str, folder: Path) -> None:
        self.name = name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        path = f"/v2/models/{model}/infer" if name == "weft" else PATHS.get(name, "/")
        self.url = f"http://127.0.0.1:{self.port}{path}"
        script = Path(__file__).with_name("serve_peers.py")
        self.log = (folder / f"{name}-{model}-{form}.log").open("w")
        command = [python, str(script), name, model, form, str(self.port)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True, cwd=folder)
        raw, headers = body(name, form)
        self._raw, self._headers = raw, headers
        self._script = folder / f"{name}-{model}-{form}.lua"
        lines = ['wrk.method = "POST"', *(f'wrk.headers["{key}"] = "{value}"' for key, value in headers.items())]
        escaped = "".join(f"\\{byte:03d}" for byte in raw)
        self._script.write_text("\n".join([*lines, f'wrk.body = "{escaped}"']))

    def wait(self, seconds: float = 120.0) -> bool:
        """Wait for the first right answer; False if it does not come."""
        ends = time.monotonic() + seconds
        request = urllib.request.Request(self.url, self._raw, self._headers)
        while time.monotonic() < ends and self.process.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    answer.read()
                    return True
            except OSError:
                time.sleep(0.2)
        return False

    def turn(self, on: bool) -> None:
        """Let it run, or stop it; Ray takes a stopped process for a dead one."""
        if self.name != "ray":
            os.killpg(self.process.pid, signal.SIGCONT if on else signal.SIGSTOP)

    def load(self, connections: int, seconds: float) -> tuple[float, float, float]:
        """Requests per second, and the median and 99th percentile of the latency in seconds."""
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{max(1, round(seconds))}s",
            "--latency",
            "--timeout",
            "30s",
            "-s",
            str(self._script),
        ]
        told = subprocess.run([*command, self.url], capture_output=True, text=True, check=True).stdout
        assert "Non-2xx" not in told, f"{self.name}: {told}"
        assert "Socket errors" not in told, f"{self.name}: {told}"
        rate = re.search(r"Requests/sec:\s+([\d.]+)", told)
        assert rate, told
        return float(rate[1]), _seconds(told, "50%"), _seconds(told, "99%")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.turn(True)
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


def _seconds(told: str, percent: str) -> float:
    found = re.search(rf"^\s+{percent}\s+([\d.]+)(us|ms|s)", told, re.MULTILINE)
    assert found, told
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def measure(model: str, form: str, options: argparse.Namespace, folder: Path) -> list[Case]:
    """A case for each number of connections."""
    names = ["weft", *(name for name in PEERS if options.peers or name in HERE)]
    running: list[Contestant] = []
    try:
        for name in names:
            if form == "binary" and name in JSON_ONLY:
                continue
            python = sys.executable if name in HERE else options.peers
            running.append(Contestant(name, model, form, python, folder))
            if running[-1].wait():
                running[-1].load(8, 1)
                running[-1].turn(False)
            else:
                print(f"{name} does not start for {model}, {form}", flush=True)
                running.pop().end()
        return [_case(f"{model}, {form}", connections, running, options) for connections in CONNECTIONS]
    finally:
        for contestant in running:
            contestant.end()


def _case(question: str, connections: int, running: list[Contestant], options: argparse.Namespace) -> Case:
    """The interleaved rounds of one number of connections."""
    title = f"{question}, {connections} connection{'s' * (connections > 1)}"
    case = Case(title, {}, ours="weft", unit="requests", units=1)
    case.seconds = {contestant.name: [] for contestant in running}
    late: dict[str, list[tuple[float, float]]] = {contestant.name: [] for contestant in running}
    for turn in range(options.rounds):
        for contestant in running if turn % 2 == 0 else reversed(running):
            contestant.turn(True)
            rate, median, slow = contestant.load(connections, options.seconds)
            contestant.turn(False)
            case.seconds[contestant.name].append(1 / rate)
            late[contestant.name].append((median, slow))
    case.latencies = {name: tuple(statistics.median(x) for x in zip(*seen, strict=True)) for name, seen in late.items()}
    case.targets = {name: target for name, target in TARGETS.items() if name in case.seconds}
    print(table([case]).splitlines()[-1], flush=True)
    return case


def soak(options: argparse.Namespace, folder: Path) -> str:
    """The memory and the errors of a server under 70 % of the load that it can take, and with clients that are killed."""
    contestant = Contestant("weft", "digits", "json", sys.executable, folder)
    assert contestant.wait()
    most = contestant.load(64, 3)[0]
    # wrk has no rate: connections that wait after each answer make one.
    pause = 64 / (0.7 * most)
    script = contestant._script.read_text() + f"\nfunction delay() return {max(1, round(1e3 * pause))} end\n"
    contestant._script.write_text(script)
    sizes, rates, ends = [], [], time.monotonic() + options.seconds
    while time.monotonic() < ends:
        victim = subprocess.Popen(["wrk", "-t1", "-c4", "-d60s", "-s", str(contestant._script), contestant.url],
                                  stdout=subprocess.DEVNULL)  # fmt: skip
        rates.append(contestant.load(64, min(10, options.seconds))[0])
        victim.kill()
        victim.wait()
        status = Path(f"/proc/{contestant.process.pid}/status").read_text()
        sizes.append(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024)  # type: ignore[index]
    with urllib.request.urlopen(f"http://127.0.0.1:{contestant.port}/metrics", timeout=10) as answer:
        answers = re.findall(r'weft_responses_total{model="digits",status="(\d+)"} ([\d.]+)', answer.read().decode())
    contestant.end()
    middle = sizes[len(sizes) // 4 :] or sizes
    return (
        f"{options.seconds:g} s at {statistics.mean(rates):.0f} requests/s, {100 * statistics.mean(rates) / most:.0f} % of "
        f"{most:.0f}; "
        f"{len(rates)} clients killed in the middle of requests; answers by status {dict(answers)}; "
        f"memory {sizes[0]:.0f} MiB at first, {min(middle):.0f} to {max(middle):.0f} MiB in the last three quarters"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="a Python with the peers")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument(
        "--only", default="", help="only questions whose name contains this, such as 'echo, json' or 'soak'"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    cases, reports = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only == "soak":
            reports["soak"] = soak(options, folder)
        else:
            for model in ("echo", "digits", "mlp"):
                for form in ("json", "binary"):
                    if options.only in f"{model}, {form}":
                        cases += measure(model, form, options, folder)
    print("\n" + ", ".join(f"{k} {v}" for k, v in versions().items()) + "\n\n" + _text(cases, reports))
    if options.save and cases:
        results = Path(__file__).parent / "results"
        data = {"title": "weft serve", "versions": versions(), "cases": [case.as_dict() for case in cases]}
        (results / "serve.json").write_text(json.dumps(data, indent=1) + "\n")
        (results / "serve.md").write_text(_text(cases, reports) + "\n")
        plot(cases, results / "serve.svg", "requests per second of weft serve over those of others")


if __name__ == "__main__":
    main()
