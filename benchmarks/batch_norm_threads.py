"""How fast is batch norm on 1, 4 and 16 threads, and as many as the machine has cores, against PyTorch with as many?

float32, weft on NumPy arrays and on tensors. The answer is a table of the time of PyTorch over that of weft, channels
last / channels first.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from collections.abc import Callable
from functools import cache, partial
from itertools import product

import numpy as np
import torch

import weft
from benchmarks.batch_norm import SHAPES, Data, burst, data_of, ours, with_torch
from benchmarks.runner import Case, versions

QUESTIONS = ["forward", "inference", "gradient"]
LAYOUTS = ["NHWC", "NCHW"]
CORES = len(os.sched_getaffinity(0))
COUNTS = sorted({count for count in (1, 4, 16, CORES) if count <= CORES})


def on_tensors(data: Data) -> dict[str, Callable[[], object]]:
    """What weft does with tensors over the same memory."""
    tensors = copy.copy(data)
    for name, value in vars(data).items():
        if isinstance(value, np.ndarray):
            setattr(tensors, name, torch.from_numpy(value))
    return ours(tensors)


SIDES = {"NumPy": ours, "tensors": on_tensors, "torch": with_torch}


@cache
def side(name: str, shape: tuple[int, ...], layout: str) -> dict[str, Callable[[], object]]:
    return SIDES[name](data_of(shape, layout, "float32"))


def timed(name: str, what: str, threads: int, shape: tuple[int, ...], layout: str) -> float:
    """Seconds of a call, in a burst of them with so many threads."""
    torch.set_num_threads(threads)
    weft.set_num_threads(threads)
    return burst(side(name, shape, layout)[what], 9 if math.prod(shape) > 250_000 else 41)


def measured(rounds: int, threads: int, what: str, shape: tuple[int, ...], layout: str) -> Case:
    """All sides in turns."""
    case = Case(what, {name: partial(timed, name, what, threads, shape, layout) for name in SIDES}, ours="NumPy")
    case.measure(rounds)
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    rounds = parser.parse_args().rounds
    print(", ".join(f"{k} {v}" for k, v in versions().items()), end="\n\n")
    header = [f"{what}, {name}" for what in QUESTIONS for name in ("NumPy", "tensors")]
    print("| shape | threads | " + " | ".join(header) + " |\n" + "|---" * (2 + len(header)) + "|")
    ratios = []
    for shape, threads in product(SHAPES[-1:] + SHAPES[:-1], COUNTS):
        cells = []
        for what in QUESTIONS:
            cases = [measured(rounds, threads, what, shape, layout) for layout in LAYOUTS]
            for name in ("NumPy", "tensors"):
                pair = [case.rate(name) / case.rate("torch") for case in cases]
                ratios.extend(
                    (ratio, what, name, layout, shape, threads) for ratio, layout in zip(pair, LAYOUTS, strict=True)
                )
                cells.append(" / ".join(f"{ratio:.2f}" for ratio in pair))
        print(f"| {'x'.join(map(str, shape))} | {threads} | " + " | ".join(cells) + " |", flush=True)
    behind = sorted(row for row in ratios if row[0] < 1)
    print(f"\nahead of torch in {len(ratios) - len(behind)} of {len(ratios)} figures")
    for ratio, *where in behind:
        print(f"{ratio:.2f}", *where)


if __name__ == "__main__":
    main()
