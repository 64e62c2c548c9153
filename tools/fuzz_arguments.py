"""Calls every op and class of weft with hostile arguments, and fails where one is not refused as it must be.

Each case is a valid call in NumPy, torch or JAX of which one or two arguments are replaced. It passes when it returns, or
raises one of `weft.errors`. It fails when it raises anything else, takes too long, or ends the process. A case depends on the
seed and its number alone, so that one can be run again:

    python tools/fuzz_arguments.py --budget 20000 --seed 1
    python tools/fuzz_arguments.py --seed 1 --case 1234

The calls run in a child process, so that one that crashes or hangs is reported like any other.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzz_calls import CALLS
from fuzz_values import hostile, libraries, shown

import weft
from weft.errors import OpError

#: Seconds: a call that takes longer, twice, has walked what it must not walk.
SLOW = 5.0
#: Seconds after which the child process counts as hung.
HUNG = 90.0


def case(seed: int, number: int, names: list[str]) -> tuple[str, str, dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """A library, the name of a call, its arguments with hostile ones among them, and the call."""
    rng = random.Random(f"{seed}/{number}")
    library = rng.choice(names)
    name = rng.choice(sorted(name for name, made in CALLS.items() if library in made.libraries))
    made = CALLS[name]
    arguments = made.arguments(library)
    replaced = rng.sample(sorted(arguments), min(len(arguments), rng.choice([1, 1, 2])))
    for argument in replaced:
        if isinstance(arguments[argument], list) and rng.random() < 0.4:  # one entry of a list
            entries = arguments[argument] or [None]
            entries[rng.randrange(len(entries))] = hostile(rng, library, argument)
            arguments[argument] = entries
        else:
            arguments[argument] = hostile(rng, library, argument)
    return library, name, arguments, made.call


def run(seed: int, number: int, names: list[str]) -> dict[str, Any] | None:
    """What is wrong with a case; None if nothing is."""
    library, name, arguments, call = case(seed, number, names)
    started = time.monotonic()
    report = {"case": number, "call": f"{name} in {library}"}
    try:
        with weft.scope(), weft.gradient_deadline(0.05):
            call(arguments)
    except OpError as error:
        if not str(error):
            return report | {"problem": "an error without a message", "arguments": told(arguments)}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        trace = "".join(traceback.format_exception(error, limit=-6))[-3000:]
        where = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
        return report | {"problem": f"{type(error).__name__}: {str(error)[:200]}", "trace": trace, "kind": kind,
                         "arguments": told(arguments)}  # fmt: skip
    seconds = time.monotonic() - started
    return report | {"problem": f"it took {seconds:.1f} s", "arguments": told(arguments)} if seconds > SLOW else None


def told(arguments: dict[str, Any]) -> dict[str, str]:
    return {name: shown(value) for name, value in arguments.items()}


def work(seed: int, first: int, last: int, names: list[str]) -> None:
    """Run cases in this process, and say so on the standard output: one line when a case begins, one for each problem."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a call prints is no message
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    os.sysconf = lambda name: 1 << 15  # type: ignore[assignment]  # a machine of 1 GiB: what fits in memory is not tried
    for number in range(first, last):
        out.write(f"begin {number}\n")
        out.flush()
        problem = run(seed, number, names)
        if problem is not None and "it took" in problem["problem"]:  # the first call of a kind compiles
            problem = run(seed, number, names)
        if problem is not None:
            out.write(f"problem {json.dumps(problem)}\n")
    out.write("done\n")
    out.flush()
    os._exit(0)  # what hostile arguments left behind need not be torn down


def fuzz(
    seed: int, budget: int, names: list[str], tell: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """The problems of the cases from 0 to `budget`."""
    problems: list[dict[str, Any]] = []
    first = 0
    while first < budget:
        first = _child(seed, first, budget, names, problems, tell)
    return problems


def _child(
    seed: int, first: int, last: int, names: list[str], problems: list[dict[str, Any]], tell: Callable[[str], None]
) -> int:
    """Let one child process run the cases from `first` on; the number of the case to go on with."""
    command = [sys.executable, str(Path(__file__).resolve()), "--work", f"{first}:{last}", "--seed", str(seed)]
    command += ["--libraries", ",".join(names)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines: queue.Queue[str] = queue.Queue()
    noise: list[str] = []

    def read(stream: Any, take: Callable[[str], Any]) -> None:
        with stream:
            for line in stream:
                take(line)
        take("")

    for stream, take in ((child.stdout, lines.put), (child.stderr, noise.append)):
        threading.Thread(target=read, args=(stream, take), daemon=True).start()
    at, hung = first, False
    while True:
        try:
            line = lines.get(timeout=HUNG)
        except queue.Empty:
            line, hung = "", True
        kind, _, rest = line.partition(" ")
        if kind == "begin":
            at = int(rest)
            if at and at % 1000 == 0:
                tell(f"{at} of {last}, {len(problems)} problems")
        elif kind == "problem":
            problems.append(json.loads(rest))
            tell(described(problems[-1]))
        elif line.strip() == "done":
            child.wait()
            return last
        elif not line:
            child.kill()
            end = "".join(noise)[-2000:]
            library, name, arguments, _ = case(seed, at, names)
            what = f"it hung for {HUNG} s" if hung else f"the process ended with {child.wait()}"
            problems.append({"case": at, "call": f"{name} in {library}", "problem": what, "trace": end,
                             "arguments": told(arguments)})  # fmt: skip
            tell(described(problems[-1]))
            return at + 1


def described(problem: dict[str, Any]) -> str:
    """A problem for a reader."""
    head = f"\ncase {problem['case']}: {problem['call']}: {problem['problem']}"
    return f"{head}\n  arguments: {problem['arguments']}\n{problem.get('trace', '')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=int, default=2000, help="how many cases to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one case, in this process")
    parser.add_argument(
        "--libraries", default=",".join(["numpy", "torch", "jax"]), help="those that are installed are used"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = [name for name in given.libraries.split(",") if find_spec(name)]
    libraries(names)
    if given.work:
        first, last = map(int, given.work.split(":"))
        work(given.seed, first, last, names)
    if given.case is not None:
        problem = run(given.seed, given.case, names)
        print(json.dumps(problem, indent=1).replace("\\n", "\n"))
        return problem is not None
    problems = fuzz(given.seed, given.budget, names, lambda text: print(text, flush=True))
    print(Counter(problem.get("kind", problem["problem"]) for problem in problems).most_common())
    print(f"{len(problems)} problems in {given.budget} cases of seed {given.seed}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
