"""How many requests per second does `weft serve` answer, and how late, against other servers of Python functions?

    python -m benchmarks.serve [--peers PYTHON] [--models echo,mlp] [--wires json,binary] [--connections 1,64] [--save]
    python -m benchmarks.serve --soak 600 [--save]

`wrk` asks over loopback, with bodies of one row of 64 floats. The servers of a model and a wire are started once and stopped
(SIGSTOP) while it is not their turn; they take turns within each round. `--peers` is a Python with LitServe, mosec, BentoML, Ray
and FastAPI; those that do not start are named and left out. `--soak` keeps a load of 70 % up for so many seconds, kills clients,
and reports errors, latency and memory. `--save` keeps what earlier runs saved of other questions: the table can be measured in
pieces.
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

from benchmarks.runner import Case, _text, _with_saved, plot, table, versions

PEERS = ["weft_worker", "bare", "fastapi", "fastapi_batcher", "litserve", "mosec", "bentoml", "ray"]
HERE = ("weft", "weft_worker", "bare")  # they run with this Python
JSON_ONLY = {"litserve", "bentoml"}  # LitServe decodes JSON and forms alone, BentoML batches no raw bodies
PATHS = {"litserve": "/predict", "mosec": "/inference", "bentoml": "/predict"}
MODELS, WIRES, CONNECTIONS = ("echo", "digits", "mlp"), ("json", "binary"), (1, 16, 64, 256)
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
#: A client that is killed while two of its requests are half sent, and two wait for their answers.
VICTIM = """
import os, signal, socket, sys
port, request = int(sys.argv[1]), sys.stdin.buffer.read()
sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
for i, connection in enumerate(sockets):
    connection.sendall(request[: len(request) // (1 + i % 2)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def body(name: str, wire: str) -> tuple[bytes, dict[str, str]]:
    """The body of a request, and its headers."""
    entry: dict[str, Any] = {"name": "x", "shape": [1, 64], "datatype": "FP32"}
    data = [round(float(x), 4) for x in ROW]
    if name == "bentoml":
        return json.dumps({"x": [data]}).encode(), {"content-type": "application/json"}
    if wire == "json":
        return json.dumps({"inputs": [{**entry, "data": data}]}).encode(), {"content-type": "application/json"}
    entry["parameters"] = {"binary_data_size": ROW.nbytes}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    return head + ROW.tobytes(), {
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(head)),
    }


class Contestant:
    """A running server, stopped while it is not its turn."""

    def __init__(self, name: str, model: str, wire: str, python: str, folder: Path) -> None:
        self.name = name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        path = f"/v2/models/{model}/infer" if name.startswith("weft") else PATHS.get(name, "/")
        self.path, self.url = path, f"http://127.0.0.1:{self.port}{path}"
        script = Path(__file__).with_name("serve_peers.py")
        self.log = (folder / f"{name}-{model}-{wire}.log").open("w+")
        command = [python, str(script), name, model, wire, str(self.port)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True, cwd=folder)
        raw, headers = body(name, wire)
        self.body, self.headers = raw, headers
        self._script = folder / f"{name}-{model}-{wire}.lua"
        self.write_script()

    def write_script(self, pause: float = 0.0) -> None:
        """Write what wrk sends; each connection waits for `pause` seconds after an answer."""
        lines = ['wrk.method = "POST"', *(f'wrk.headers["{key}"] = "{value}"' for key, value in self.headers.items())]
        escaped = "".join(f"\\{byte:03d}" for byte in self.body)
        lines.append(f'wrk.body = "{escaped}"')
        if pause:
            lines.append(f"function delay() return {max(1, round(1e3 * pause))} end")
        self._script.write_text("\n".join(lines))

    def wait(self, seconds: float = 120.0) -> bool:
        """Wait for the first answer; False if it does not come."""
        ends = time.monotonic() + seconds
        request = urllib.request.Request(self.url, self.body, self.headers)
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

    def start(self, connections: int, seconds: float) -> subprocess.Popen[str]:
        """wrk, which tells of its requests at the end."""
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
        return subprocess.Popen([*command, self.url], stdout=subprocess.PIPE, text=True)

    def load(self, connections: int, seconds: float) -> tuple[float, float, float]:
        """Requests per second, and the median and 99th percentile of the latency in seconds; zeros for a peer that fails."""
        told = self.start(connections, seconds).communicate()[0]
        if _errors(told):
            assert not self.name.startswith("weft"), f"{self.name}: {told}{self.last_words()}"
            print(f"{self.name}: {told}{self.last_words()}", flush=True)
            return 0.0, 0.0, 0.0
        return _rates(told)

    def last_words(self) -> str:
        """The last line that the server wrote."""
        self.log.seek(0)
        return (self.log.read().strip().splitlines() or ["it says nothing"])[-1]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.turn(True)
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


def _rates(told: str) -> tuple[float, float, float]:
    rate = re.search(r"Requests/sec:\s+([\d.]+)", told)
    assert rate, told
    return float(rate[1]), _seconds(told, "50%"), _seconds(told, "99%")


def _errors(told: str) -> int:
    """How many requests got another status than 2xx, or none."""
    lines = re.findall(r"(?:Socket errors|Non-2xx)[^\n]*", told)
    return sum(int(count) for line in lines for count in re.findall(r"\b\d+\b", line))


def _seconds(told: str, percent: str) -> float:
    found = re.search(rf"^\s+{percent}\s+([\d.]+)(us|ms|s)", told, re.MULTILINE)
    assert found, told
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def measure(model: str, wire: str, options: argparse.Namespace, folder: Path) -> list[Case]:
    """A case for each number of connections."""
    names = ["weft", *(name for name in PEERS if options.peers or name in HERE)]
    running: list[Contestant] = []
    try:
        for name in names:
            if wire == "binary" and name in JSON_ONLY:
                continue
            python = sys.executable if name in HERE else options.peers
            running.append(Contestant(name, model, wire, python, folder))
            if running[-1].wait():
                running[-1].load(8, 1)
                running[-1].turn(False)
            else:
                print(f"{name} does not start for {model}, {wire}: {running[-1].last_words()}", flush=True)
                running.pop().end()
        return [_case(title(model, wire, count), count, running, options) for count in options.connections]
    finally:
        for contestant in running:
            contestant.end()


def title(model: str, wire: str, connections: int) -> str:
    """The name of a question."""
    return f"{model}, {wire}, {connections} connection{'s' * (connections > 1)}"


def _case(name: str, connections: int, running: list[Contestant], options: argparse.Namespace) -> Case:
    """The interleaved rounds of one number of connections."""
    case = Case(name, {}, ours="weft", unit="requests", units=1)
    case.seconds = {contestant.name: [] for contestant in running}
    late: dict[str, list[tuple[float, float]]] = {contestant.name: [] for contestant in running}
    for turn in range(options.rounds):
        for contestant in running if turn % 2 == 0 else reversed(running):
            contestant.turn(True)
            rate, median, slow = contestant.load(connections, options.seconds)
            contestant.turn(False)
            if rate:
                case.seconds[contestant.name].append(1 / rate)
                late[contestant.name].append((median, slow))
    for silent in [name for name, seen in late.items() if len(seen) < options.rounds]:
        print(f"{silent} is left out: it failed or answered nothing in a round of {name}", flush=True)
        del case.seconds[silent], late[silent]
    case.latencies = {name: tuple(statistics.median(x) for x in zip(*seen, strict=True)) for name, seen in late.items()}
    case.targets = {name: target for name, target in TARGETS.items() if name in case.seconds}
    print(table([case]).splitlines()[-1], flush=True)
    return case


def soak(seconds: float, folder: Path) -> str:
    """The errors, the memory and the latency of a server at 70 % of what it can take, while clients are killed."""
    server = Contestant("weft", "digits", "json", sys.executable, folder)
    try:
        assert server.wait(), server.last_words()
        most = server.load(64, 3)[0]
        pause = wanted = 64 / (0.7 * most)  # wrk has no rate: connections that wait after each answer make one
        errors, seen, sizes, ends = 0, [], [_memory(server)], time.monotonic() + seconds
        while time.monotonic() < ends:
            server.write_script(pause)
            load = server.start(64, min(10.0, seconds))
            time.sleep(1)
            subprocess.run([sys.executable, "-c", VICTIM, str(server.port)], input=_request(server), check=False)
            told = load.communicate()[0]
            errors += _errors(told)
            seen.append(_rates(told))
            sizes.append(_memory(server))
            pause = max(0.001, pause + wanted - 64 / seen[-1][0])  # without the time of the answer itself
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
    finally:
        server.end()
    rates, medians, slowest = zip(*seen, strict=True)
    rate, later = statistics.mean(rates), sizes[len(sizes) // 4 :]
    statuses = dict(re.findall(r'weft_responses_total{model="digits",status="(\d+)"} (\d+)', metrics))
    left = re.findall(r'weft_calls_in_server{model="digits"} (\d+)', metrics)[0]
    return (
        f"{seconds:g} s at {rate:.0f} requests/s, {100 * rate / most:.0f} % of {most:.0f}; {errors} errors; "
        f"{len(seen)} clients killed, each with 4 requests under way; answers by status {statuses}, {left} calls left; "
        f"latency p50 {1e3 * statistics.median(medians):.2f} ms, p99 {1e3 * statistics.median(slowest):.2f} ms, "
        f"p99 of the worst 10 s {1e3 * max(slowest):.2f} ms; memory {sizes[0]:.0f} MiB at first, {sizes[-1]:.0f} MiB at "
        f"last, {min(later):.0f} to {max(later):.0f} MiB in the last three quarters"
    )


def _memory(server: Contestant) -> float:
    """The resident memory in MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def _request(server: Contestant) -> bytes:
    lines = [f"POST {server.path} HTTP/1.1", "host: localhost", f"content-length: {len(server.body)}"]
    lines += [f"{key}: {value}" for key, value in server.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + server.body


def _save(cases: list[Case], reports: dict[str, str]) -> None:
    """Write the results, with those that were saved before of other questions."""
    results = Path(__file__).parent / "results"
    names = [title(model, wire, count) for model in MODELS for wire in WIRES for count in CONNECTIONS]
    cases, reports = _with_saved(results / "serve.json", [*names, "soak"], cases, reports)
    data = {
        "title": "weft serve",
        "versions": versions(),
        "cases": [case.as_dict() for case in cases],
        "reports": reports,
    }
    (results / "serve.json").write_text(json.dumps(data, indent=1) + "\n")
    (results / "serve.md").write_text(_text(cases, reports) + "\n")
    if cases:
        plot(cases, results / "serve.svg", "requests per second of weft serve over those of others")


def _some_of(known: tuple[Any, ...]) -> Any:
    """A list of known values with commas, for argparse."""

    def parse(text: str) -> list[Any]:
        chosen = [type(known[0])(part) for part in text.split(",")]
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"must be some of {', '.join(map(str, known))}, got {min(unknown)}")
        return chosen

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="a Python with the peers")
    parser.add_argument(
        "--models", type=_some_of(MODELS), default=MODELS, help="such as echo,digits,mlp (default: all)"
    )
    parser.add_argument("--wires", type=_some_of(WIRES), default=WIRES, help="such as json,binary (default: all)")
    parser.add_argument(
        "--connections", type=_some_of(CONNECTIONS), default=CONNECTIONS, help="such as 1,16,64,256 (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="a long load in place of the table")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    cases, reports = [], {}
    with tempfile.TemporaryDirectory() as name:
        if options.soak:
            reports["soak"] = soak(options.soak, Path(name))
        else:
            for model in options.models:
                for wire in options.wires:
                    cases += measure(model, wire, options, Path(name))
    print("\n" + ", ".join(f"{k} {v}" for k, v in versions().items()) + "\n\n" + _text(cases, reports))
    if options.save:
        _save(cases, reports)


if __name__ == "__main__":
    main()
