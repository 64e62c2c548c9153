"""Compares weft with a live TensorFlow on random programs of concurrent calls of the batching family.

    python tools/differential_batching.py --programs 300 --seed 1             300 programs of each op
    python tools/differential_batching.py --programs 300 --only Unbatch
    python tools/differential_batching.py --arrays torch                      weft gets tensors, or JAX's arrays
    python tools/differential_batching.py --replay FILE                       a program that an earlier run printed

TensorFlow runs each program in a process of its own, on the machine's clock; weft on the simulated one. Compared are the class of
an error, values, types and shapes, whose id is whose, who got the batch, what the function saw, and when the answers came.
Calls whose answer differs on purpose are recognised by the rules of excuses_batching.py, and counted. What differs otherwise is
reduced to the fewest calls and printed; the exit status is then 1. Needs tensorflow-cpu and weft in the environment.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import arrays
import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16
import numpy as np
from draw_batching import DRAW, ROW_WISE, Program, spread
from excuses_batching import Excuses, fails_in_part
from tensorflow_batching import FUNCTIONS, LivePlayer, Outcome, Player, TensorFlow, outcome, plain

import weft
from weft.errors import InvalidArgumentError

#: How far every deadline keeps from every arrival, in seconds, so that it is certain what comes first.
MARGIN = 0.05
#: How much later than in weft an answer may come in TensorFlow: it looks at its clock every millisecond, and threads take time.
LATE, LATE_AFTER_SLEEP = 0.045, 0.15


# --- pipelines, the same for both ---


def fail_if_any_ge5(x: np.ndarray) -> np.ndarray:
    if (x >= 5).any():
        raise InvalidArgumentError("an element is 5 or more")
    return x


MODELS = {
    "square": lambda x: [x * x],
    "add100": lambda x: [x + 100],
    "two_outputs": lambda x: [x + 1, x * 10],
    "fail_if_any_ge5": lambda x: [fail_if_any_ge5(x)],
}


class Pipelined:
    """A caller that goes through Batch, a model and Unbatch; with a gradient, back through UnbatchGrad and Unbatch."""

    def call(self, invocation: dict[str, Any]) -> list[np.ndarray]:
        case, ops = self.case, self.raw_ops
        given = {key: value for key, value in invocation.items() if key == "in_tensors"}
        tensors = Player.arguments(self, {**given, "attrs": {}})["in_tensors"]
        batch = ops.Batch(in_tensors=tensors, **case["attrs"]["Batch"])
        place = {"batch_index": batch.batch_index, "id": batch.id, **case["attrs"]["Unbatch"]}
        (x,) = map(plain, batch.batched_tensors)
        results = [
            plain(ops.Unbatch(batched_tensor=y, shared_name=f"u{i}", **place))
            for i, y in enumerate(MODELS[case["model"]](x))
        ]
        if not case["gradient"]:
            return results
        dy = ops.UnbatchGrad(
            original_input=x, batch_index=batch.batch_index, grad=results[0] * 3, id=batch.id, shared_name="g"
        )
        dx = 2 * x[: len(dy)] * plain(dy)
        return [*results, plain(ops.Unbatch(batched_tensor=dx, shared_name="back", **place))]


class LivePipeline(Pipelined, LivePlayer):
    """A pipeline in TensorFlow."""


class WeftPipeline(Pipelined, Player):
    """A pipeline in weft."""


class Foreign(arrays.Ops):
    """The ops on arrays of another library, for calls that share a batch only with the same captures and functions."""

    def __init__(self, library: str) -> None:
        super().__init__(library)
        self.known: dict[int, tuple[Any, Any]] = {}

    def convert(self, key: str, value: Any) -> Any:
        if key == "f":
            return self.once(value, self.function)
        if key == "captured_tensors":
            return [self.once(x, lambda x: arrays.convert(self.library, x)) for x in value]
        return super().convert(key, value)

    def once(self, value: Any, convert: Any) -> Any:
        if id(value) not in self.known:
            self.known[id(value)] = value, convert(value)
        return self.known[id(value)][1]

    def function(self, f: Any) -> Any:
        @wraps(f)
        def call(*given: Any) -> Any:
            found = f(*map(arrays.back, given))
            parts = [
                arrays.convert(self.library, np.asarray(x)) for x in (found if isinstance(found, tuple) else [found])
            ]
            return tuple(parts) if isinstance(found, tuple) else parts[0]

        return call


class Timed(list):
    """A list that notes when its items came."""

    def __init__(self, clock: weft.SimulatedClock) -> None:
        super().__init__()
        self.clock = clock
        self.times: list[float] = []

    def append(self, item: Any) -> None:
        self.times.append(self.clock.now())
        super().append(item)


def play_in_weft(program: Program) -> Outcome:
    """The outcome in weft, with the times at which the function was entered."""
    clock = weft.SimulatedClock()
    library = program.get("arrays", "numpy")
    with weft.scope(clock):
        player = (WeftPipeline if program["op"] == "Pipeline" else Player)(program, clock)
        if library != "numpy":
            player.raw_ops = Foreign(library)
        player.batches = Timed(clock)
        played = player.play()
    result = outcome(program, played.answers, list(played.batches))
    return {**result, "entered": player.batches.times}


def play_in_tensorflow(live: TensorFlow, program: Program) -> Outcome:
    return live.play(program, LivePipeline if program["op"] == "Pipeline" else LivePlayer)


# --- programs whose outcome does not hang on milliseconds ---


def arrivals(program: Program) -> list[float]:
    """When each call is made."""
    times = [0.0]
    for invocation in program["invocations"][1:]:
        times.append(times[-1] + invocation.get("after_previous_s", program.get("gap_s") or 0.0))
    return times


def timeouts(program: Program) -> set[float]:
    """All timeouts that a deadline may go by, in seconds."""
    found = set()
    for attrs in [program["attrs"], *program["attrs"].values(), *(x.get("attrs", {}) for x in program["invocations"])]:
        if isinstance(attrs, dict):
            found |= {attrs[key] for key in ("batch_timeout_micros", "timeout_micros") if key in attrs}
    return {max(0, micros) / 1e6 for micros in found if micros < 10_000_000}


def is_separated(program: Program, result: Outcome) -> bool:
    """Whether all that happens at an arrival and all that happens by a deadline are well apart."""
    made = np.array(arrivals(program))
    sleep = program.get("function_sleep_s", 0.0)
    answered = [t + a["elapsed_s"] for t, a in zip(made, result["expect"], strict=True)]
    ends = [t + sleep for t in result["entered"]] if sleep else []
    due = deadlines(program)
    return (
        _apart(made, due) and _apart(ends, [*made, *due]) and _apart(made, answered, 1e-6) and _apart(ends, ends, 1e-6)
    )


def deadlines(program: Program) -> list[float]:
    """All times at which a call may run out of time."""
    return [t + timeout for t in arrivals(program) for timeout in timeouts(program) if timeout]


def _apart(some: Any, others: Any, equal: float = 0.0) -> bool:
    """Whether none of `some` is near any of `others`, unless so near that they are one."""
    distance = np.abs(np.subtract.outer(np.array(some), np.array(others)))
    return bool(((distance < equal) | (distance >= MARGIN - 1e-6)).all())


def draw(op: str, seed: int, number: int, library: str) -> tuple[Program, Outcome]:
    """A program, and its outcome in weft; texts are always NumPy's."""
    rng = Random(f"{seed}/{op}/{number}")
    program = DRAW[op](rng)
    for attempt in count(1):
        program["arrays"] = "numpy" if "'string'" in repr(program) else library
        spread(rng, program["invocations"])
        if _apart(arrivals(program), deadlines(program)):
            result = play_in_weft(program)
            if is_separated(program, result):
                program["patience_s"] = 3.0 + max(a["elapsed_s"] for a in result["expect"] if a["elapsed_s"] < 30)
                return program, result
        if attempt % 300 == 0:
            program = DRAW[op](rng)
    raise AssertionError("unreachable")


# --- comparing ---


@dataclass
class Verdict:
    """What differs, and which calls were excused from comparison."""

    differences: dict[str, str] = field(default_factory=dict)
    excused: dict[int, str] = field(default_factory=dict)


def compare(program: Program, tf: Outcome, ours: Outcome) -> Verdict:
    """What differs between the two outcomes."""
    verdict = Verdict(own_rows(program, ours))
    if isinstance(tf["expect"], str) and fails_in_part(program, ours):
        verdict.excused = dict.fromkeys(range(len(ours["expect"])), "TensorFlow gives up calls whose function failed")
        return verdict
    if isinstance(tf["expect"], str):
        verdict.differences["TensorFlow"] = tf["expect"]
        return verdict
    verdict.excused = Excuses(program, tf, ours).found
    late = LATE_AFTER_SLEEP if "function_sleep_s" in program else LATE
    for i, (theirs, mine) in enumerate(zip(tf["expect"], ours["expect"], strict=True)):
        if i not in verdict.excused and (text := difference(theirs, mine, late)):
            verdict.differences[f"call {i}"] = text
    if not verdict.excused and not fails_in_part(program, ours):
        seen = [outcome["batches_seen_by_f"] for outcome in (tf, ours)]
        if not is_serial(program):
            seen = [sorted(batches, key=repr) for batches in seen]
        if seen[0] != seen[1]:
            verdict.differences["f"] = f"in TensorFlow it saw {seen[0]}, in weft {seen[1]}"
    return verdict


def is_serial(program: Program) -> bool:
    """Whether the function's runs have an order: one resource, one batch at a time."""
    attrs = [call.get("attrs", {}) for call in program["invocations"]]
    threads = {a.get("num_batch_threads", 1) for a in attrs}
    return threads == {1} and len({(a.get("shared_name"), a.get("container")) for a in attrs}) == 1


def difference(theirs: dict[str, Any], mine: dict[str, Any], late: float) -> str:
    """How two answers differ, if they do."""
    if theirs["status"] != mine["status"] or theirs.get("class") != mine.get("class"):
        return f"TensorFlow {brief(theirs)}, weft {brief(mine)}"
    if not same(theirs.get("outputs"), mine.get("outputs")):
        return f"TensorFlow {brief(theirs)}, weft {brief(mine)}"
    if not -0.02 <= theirs["elapsed_s"] - mine["elapsed_s"] <= late:
        return f"TensorFlow answers after {theirs['elapsed_s']:.3f} s, weft after {mine['elapsed_s']:.3f} s"
    return ""


def same(a: Any, b: Any) -> bool:
    """Whether two answers have the same types, shapes and values."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def brief(answer: dict[str, Any]) -> str:
    """An answer in one line."""
    if answer["status"] == "ok":
        return f"answers {_flat(answer['outputs'])} after {answer['elapsed_s']:.3f} s"
    if answer["status"] == "hang":
        return "hangs"
    return f"raises {answer['class']} after {answer['elapsed_s']:.3f} s ({answer['message'][:150]!r})"


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _flat(item) for key, item in value.items()}
    return list(map(_flat, value)) if isinstance(value, list) else f"{value.dtype}{list(value.shape)} {value.tolist()}"


def own_rows(program: Program, ours: Outcome) -> dict[str, str]:
    """Calls of a row-wise function that did not get the function of their own rows, whoever shared their batch."""
    if program["op"] != "BatchFunction":
        return {}
    found = {}
    player = Player(program, None)
    for i, (call, answer) in enumerate(zip(program["invocations"], ours["expect"], strict=True)):
        name = call.get("f", program["f"])
        if answer["status"] == "ok" and name in ROW_WISE:
            given = player.arguments({**call, "attrs": {}})
            if not len(given["in_tensors"][0]):
                continue
            wanted = FUNCTIONS[name](*given["in_tensors"], *given["captured_tensors"])
            if not same(answer["outputs"], [plain(x) for x in (wanted if isinstance(wanted, tuple) else [wanted])]):
                found[f"rows of call {i}"] = f"weft answers {_flat(answer['outputs'])}, not {name} of them"
    return found


# --- running ---


def settle(live: TensorFlow, program: Program, ours: Outcome, first: Outcome, times: int = 5) -> tuple[Verdict, bool]:
    """What differs every time, and whether more did at first: then the machine was slow, and it does not count."""
    verdict = compare(program, first, ours)
    lasting = set(verdict.differences)
    runs = 1
    while lasting and runs <= times:
        runs += 1
        verdict = compare(program, play_in_tensorflow(live, program), ours)
        lasting &= set(verdict.differences)
    verdict.differences = {what: verdict.differences[what] for what in verdict.differences if what in lasting}
    return verdict, not lasting and runs > 1


def without(program: Program, i: int) -> Program:
    """The program without one call, the others at their times."""
    times = arrivals(program)
    calls = [dict(call) for call in program["invocations"]]
    del calls[i], times[i]
    for call, before, now in zip(calls[1:], times, times[1:], strict=False):
        call["after_previous_s"] = round(now - before, 6)
    calls[0].pop("after_previous_s", None)
    return {**program, "invocations": calls}


def smallest(live: TensorFlow, program: Program) -> tuple[Program, Verdict | None]:
    """The program without the calls that the difference does not need."""
    verdict = None
    i = 0
    while i < len(program["invocations"]) and len(program["invocations"]) > 1:
        fewer = without(program, i)
        ours = play_in_weft(fewer)
        if is_separated(fewer, ours):
            found, _ = settle(live, fewer, ours, play_in_tensorflow(live, fewer), times=1)
            if found.differences:
                program, verdict = fewer, found
                continue
        i += 1
    return program, verdict


@dataclass
class Summary:
    """What came of the programs of one op."""

    op: str
    programs: int = 0
    calls: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    unsteady: int = 0
    mismatches: int = 0
    excused: Counter[str] = field(default_factory=Counter)

    def add(self, program: Program, ours: Outcome, verdict: Verdict, unsteady: bool) -> None:
        self.programs += 1
        self.calls += len(program["invocations"])
        self.errors.update(answer["class"] for answer in ours["expect"] if answer["status"] == "error")
        self.unsteady += unsteady
        self.mismatches += bool(verdict.differences)
        self.excused.update(verdict.excused.values())

    def __str__(self) -> str:
        raised = ", ".join(f"{count} {name}" for name, count in self.errors.most_common()) or "nothing"
        lines = [
            f"{self.op}: {self.programs} programs, {self.calls} calls, {self.mismatches} mismatches",
            f"    raised: {raised}",
            f"    {self.unsteady} programs agreed only when TensorFlow ran them again",
        ]
        lines += [f"    {count} calls not compared: {rule}" for rule, count in self.excused.most_common()]
        return "\n".join(lines)


def texts(verdict: Verdict) -> list[str]:
    return [f"{what}: {text}" for what, text in verdict.differences.items()]


def report(live: TensorFlow, program: Program, verdict: Verdict) -> None:
    """Print a mismatch as the smallest program that shows it."""
    small, found = smallest(live, program)
    print(f"MISMATCH in {program['op']}:", *texts(found or verdict), sep="\n    ")
    print(json.dumps(small), flush=True)


def run(live: TensorFlow, op: str, programs: int, seed: int, jobs: int, library: str) -> Summary:
    """Compare so many programs of one op."""
    summary = Summary(op)
    waiting: list[tuple[Program, Outcome, Future[Outcome]]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for number in range(programs + jobs):
            if number < programs:
                program, ours = draw(op, seed, number, library)
                waiting.append((program, ours, pool.submit(play_in_tensorflow, live, program)))
            if number >= jobs and waiting:
                program, ours, theirs = waiting.pop(0)
                verdict, unsteady = settle(live, program, ours, theirs.result())
                summary.add(program, ours, verdict, unsteady)
                if verdict.differences:
                    report(live, program, verdict)
    return summary


def replay(live: TensorFlow, path: Path) -> int:
    """Compare one program; 1 if it differs."""
    program = json.loads(path.read_text(encoding="utf-8"))
    ours = play_in_weft(program)
    theirs = play_in_tensorflow(live, program)
    verdict = compare(program, theirs, ours)
    for i, mine in enumerate(ours["expect"]):
        print(f"call {i}: weft {brief(mine)}")
        if not isinstance(theirs["expect"], str):
            print(f"        TensorFlow {brief(theirs['expect'][i])}")
        if i in verdict.excused:
            print(f"        not compared: {verdict.excused[i]}")
    print(*texts(verdict) or ["no mismatch"], sep="\n")
    return int(bool(verdict.differences))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="programs of each op (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same programs (default: 0)")
    parser.add_argument("--only", choices=list(DRAW), metavar="OP", help=f"one of {', '.join(DRAW)}")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="compare the one program in this file")
    parser.add_argument("--jobs", type=int, default=4, help="programs at a time; they mostly wait (default: 4)")
    parser.add_argument("--arrays", choices=arrays.LIBRARIES, default="numpy", help="what weft gets (default: numpy)")
    options = parser.parse_args()
    live = TensorFlow()
    if options.replay:
        return replay(live, options.replay)
    print(f"TensorFlow {live.version}, seed {options.seed}", flush=True)
    mismatches = 0
    for op in [options.only] if options.only else DRAW:
        summary = run(live, op, options.programs, options.seed, options.jobs, options.arrays)
        print(summary, flush=True)
        mismatches += summary.mismatches
    return int(mismatches > 0)


if __name__ == "__main__":
    sys.exit(main())
