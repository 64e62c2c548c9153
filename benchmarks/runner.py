"""The runner every benchmark shares: contestants in interleaved rounds, medians, ratios, a table, JSON and a plot.

A benchmark is a list of `Case`s, and of `Report`s where the answer is no rate. A case has contestants by name, each a function
without arguments that does the work once and returns nothing, or returns its own measurement (seconds), or a `Load` with the
latency of each call besides. All contestants of a case take turns within each round, so that a noisy machine is noisy to all; the
figure is the median over the rounds, and what counts is the ratio of two medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import weft

PACKAGES = ["weft", "numpy", "torch", "jax", "tensorflow_cpu", "tensorflow", "awkward", "torchrl", "batched"]


@dataclass
class Case:
    """One question: `contestants` do the same work of `units` units (calls, bytes, rows), `ours` is the one that is compared.

    `targets` are the ratios to reach, by contestant: our rate over theirs.
    """

    name: str
    contestants: dict[str, Callable[[], float | Load | None]]
    units: float = 1.0
    unit: str = "calls"
    ours: str = "weft"
    targets: dict[str, float] = field(default_factory=dict)
    rounds: int | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    latencies: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # of single calls: the median, and the 99th of 100

    def measure(self, rounds: int) -> None:
        """Run every contestant once to warm up, then all of them in turn, `rounds` times; close those that can be closed."""
        for run in self.contestants.values():
            run()
        self.seconds = {name: [] for name in self.contestants}
        latencies: dict[str, list[float]] = {}
        for turn in range(self.rounds or rounds):
            names = list(self.contestants)
            for name in names if turn % 2 == 0 else reversed(names):
                measured = _timed(self.contestants[name])
                if isinstance(measured, Load):
                    latencies.setdefault(name, []).extend(measured.latencies)
                    measured = measured.seconds
                self.seconds[name].append(measured)
        self.latencies = {name: percentiles(latencies[name]) for name in self.contestants if name in latencies}
        for run in self.contestants.values():
            getattr(run, "close", lambda: None)()

    def rate(self, name: str) -> float:
        """Units per second of one contestant, from the median round."""
        return self.units / statistics.median(self.seconds[name])

    def ratio(self, name: str) -> float:
        """Our rate over that of `name`."""
        return self.rate(self.ours) / self.rate(name)

    def as_dict(self) -> dict[str, object]:
        """Everything that was measured."""
        return {
            "name": self.name,
            "unit": self.unit,
            "units": self.units,
            "ours": self.ours,
            "rates": {name: self.rate(name) for name in self.seconds},
            "ratios": {name: self.ratio(name) for name in self.seconds if name != self.ours},
            "targets": self.targets,
            "latencies": self.latencies,
            "seconds": self.seconds,
        }


@dataclass
class Load:
    """What a contestant measured itself, in seconds: how long it took, and the latency of each of its calls."""

    seconds: float
    latencies: list[float]


@dataclass
class Report:
    """A question whose answer is a text: `run` is given the command line's options."""

    name: str
    run: Callable[[argparse.Namespace], str]


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """The median, and what 99 of 100 do not exceed."""
    seen = sorted(seconds)
    return seen[len(seen) // 2], seen[len(seen) * 99 // 100]


def _timed(run: Callable[[], float | Load | None]) -> float | Load:
    started = time.perf_counter()
    own = run()
    return time.perf_counter() - started if own is None else own


def per_call(run: Callable[[], object], seconds: float = 0.05) -> float:
    """The mean time of one call over a stretch of them, after one that is not counted.

    A call of some microseconds cannot be timed alone; and the first call after another contestant pays for what
    that one freed: a million variants leave the C library's heap to be tidied at the next large allocation.
    """
    run()
    calls, started = 0, time.perf_counter()
    while True:
        run()
        calls += 1
        passed = time.perf_counter() - started
        if passed > seconds:
            return passed / calls


def versions() -> dict[str, str]:
    """The versions of all that takes part, and of the machine."""
    found = {"python": platform.python_version(), "cores": str(os.cpu_count()), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    form = "compiled" if weft.is_compiled else "pure Python"
    found["weft"] = f"{found.get('weft', 'not installed')}, {form}"
    return found


def table(cases: list[Case]) -> str:
    """The results as a Markdown table: a row a case, our rate, and for each peer `theirs (ratio; target)`."""
    peers = list(dict.fromkeys(name for case in cases for name in case.seconds if name != case.ours))
    lines = ["| case | unit/s | weft | " + " | ".join(peers) + " |", "|---" * (3 + len(peers)) + "|"]
    for case in cases:
        cells = []
        for peer in peers:
            if peer not in case.seconds:
                cells.append("")
                continue
            target = f"; target {case.targets[peer]:g}" if peer in case.targets else ""
            cells.append(f"{_short(case.rate(peer))} (**{case.ratio(peer):.2f}x**{target})")
        lines.append(f"| {case.name} | {case.unit} | {_short(case.rate(case.ours))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def latency_table(cases: list[Case]) -> str:
    """The latencies of single calls as a Markdown table, `median / 99 %` in milliseconds; empty where none were measured."""
    cases = [case for case in cases if case.latencies]
    if not cases:
        return ""
    names = list(dict.fromkeys(name for case in cases for name in case.latencies))
    lines = ["| latency in ms, p50 / p99 | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for case in cases:
        cells = [
            "{:.3g} / {:.3g}".format(*(1e3 * x for x in case.latencies[name])) if name in case.latencies else ""
            for name in names
        ]
        lines.append(f"| {case.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _short(x: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.3g} {letter}"
    return f"{x:.3g}"


def plot(cases: list[Case], path: Path, title: str) -> None:
    """A bar per case and peer: our rate over theirs, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    peers = list(dict.fromkeys(name for case in cases for name in case.seconds if name != case.ours))
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.28 * sum(len(c.seconds) for c in cases)))
    labels, at = [], 0
    for case in reversed(cases):
        for peer in reversed([p for p in case.seconds if p != case.ours]):
            axes.barh(at, case.ratio(peer) - 1, left=1, color=f"C{peers.index(peer)}", height=0.8)
            axes.annotate(f" {case.ratio(peer):.2f}x", (max(case.ratio(peer), 1), at), va="center", fontsize=8)
            labels.append((at, f"{case.name} | {peer}"))
            at += 1
        at += 0.6
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([a for a, _ in labels], [label for _, label in labels], fontsize=8)
    axes.set_xlabel("rate of weft over the peer's: right of the line weft is faster")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _text(cases: list[Case], reports: dict[str, str]) -> str:
    tables = [table(cases), latency_table(cases)] if cases else []
    return "\n\n".join(filter(None, [*tables, *(f"{name}: {answer}" for name, answer in reports.items())]))


def _with_saved(
    path: Path, names: list[str], cases: list[Case], reports: dict[str, str]
) -> tuple[list[Case], dict[str, str]]:
    """What was measured now, and of the other questions called `names` what an earlier run wrote to `path`."""
    saved = json.loads(path.read_text()) if path.exists() else {}
    here = {case.name: case for case in cases}
    for row in saved.get("cases", []):
        kept = ("name", "units", "unit", "ours", "targets", "seconds", "latencies")
        here.setdefault(row["name"], Case(contestants={}, **{key: row[key] for key in kept if key in row}))
    told = {**saved.get("reports", {}), **reports}
    return [here[name] for name in names if name in here], {name: told[name] for name in names if name in told}


def main(name: str, title: str, questions: Callable[[], Sequence[Case | Report]]) -> None:
    """The command line of a benchmark: measure, print, and write `results/<name>.json` and `.svg` beside this file."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds per case (default 7)")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long a report that takes its time lasts (default 60)"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/: JSON, table and plot")
    options = parser.parse_args()
    everything = questions()
    chosen = [question for question in everything if options.only in question.name]
    cases = [question for question in chosen if isinstance(question, Case)]
    gc.collect()
    gc.freeze()  # the peers' hundred thousands of objects are not scanned on behalf of whoever allocates
    for case in cases:
        case.measure(options.rounds)
        print(table([case]).splitlines()[-1], flush=True)
    reports = {question.name: question.run(options) for question in chosen if isinstance(question, Report)}
    print("\n" + ", ".join(f"{k} {v}" for k, v in versions().items()) + "\n\n" + _text(cases, reports))
    if options.save:
        results = Path(__file__).parent / "results"
        results.mkdir(exist_ok=True)
        if options.only:
            cases, reports = _with_saved(results / f"{name}.json", [q.name for q in everything], cases, reports)
        data = {"title": title, "versions": versions(), "cases": [case.as_dict() for case in cases], "reports": reports}
        (results / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
        (results / f"{name}.md").write_text(_text(cases, reports) + "\n")
        plot(cases, results / f"{name}.svg", title)
