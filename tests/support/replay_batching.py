"""Plays a recorded case of the batching family: every invocation in a thread of its own, on the simulated clock or the real one."""

from __future__ import annotations

import json
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import weft
from weft.errors import InvalidArgumentError

RECORDED = json.loads((Path(__file__).parent.parent / "recorded" / "batching.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in RECORDED["cases"]}


def array(spec: dict[str, Any]) -> np.ndarray:
    """A recorded tensor."""
    dtype = object if spec["dtype"] == "string" else spec["dtype"]
    x = np.array(spec["values"], dtype=dtype)
    return x.reshape(spec["shape"]) if "shape" in spec else x


def _fail_if_any_ge5(x):
    if (np.asarray(x) >= 5).any():
        raise InvalidArgumentError("an element is 5 or more")
    return x


FUNCTIONS = {
    "add100": lambda x: x + 100,
    "negate": lambda x: -x,
    "identity": lambda x: x,
    "sum_all": lambda x: x.sum(),
    "twice_the_rows": lambda x: np.concatenate([x, x]),
    "identity_and_sum": lambda x: (x, x.sum()),
    "fail_if_any_ge5": _fail_if_any_ge5,
    "times0_plus_capture": lambda x, c: x * 0 + c,
    "two_args_add": lambda x, y: x + y,
    "double_and_join": lambda x, y: (2 * x, y + y),
    "square_ones": lambda x: np.ones((len(x), len(x)), x.dtype),
}


@dataclass
class Answer:
    """What one invocation got."""

    value: Any = None
    error: BaseException | None = None
    elapsed: float = 0.0
    done: bool = False


@dataclass
class Played:
    """All answers, and the batches the function saw, in order."""

    answers: list[Answer]
    batches: list[list[Any]] = field(default_factory=list)


class Player:
    """One case under way."""

    raw_ops: Any = weft.raw_ops

    def __init__(self, case: dict[str, Any], clock: weft.SimulatedClock | None) -> None:
        self.case = case
        self.clock = clock
        self.answers = [Answer() for _ in case["invocations"]]
        self.batches: list[list[Any]] = []
        self.watched: dict[str, Any] = {}

    def now(self) -> float:
        return self.clock.now() if self.clock else time.monotonic()

    def pass_time(self, seconds: float) -> None:
        if self.clock:
            self.clock.advance(seconds)
        else:
            time.sleep(seconds)

    def play(self) -> Played:
        threads = []
        concurrent = self.case["mode"] == "concurrent"
        for i, invocation in enumerate(self.case["invocations"]):
            if i and concurrent:
                self.pass_time(invocation.get("after_previous_s", self.case.get("gap_s") or 0.0))
            thread = threading.Thread(target=self.invoke, args=(i, invocation), daemon=True)
            threads.append(thread)
            if self.clock:
                self.clock.start(thread)
                self.clock.settle()
                if not concurrent:
                    self.clock.run_out()
            else:
                thread.start()
                if not concurrent:
                    thread.join(10)
        if self.clock:
            self.clock.run_out()
        for thread in threads:
            thread.join(10)
        return Played(self.answers, self.batches)

    def invoke(self, i: int, invocation: dict[str, Any]) -> None:
        answer, started = self.answers[i], self.now()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                answer.value = self.call(invocation)
        except BaseException as error:
            answer.error = error
        answer.elapsed = self.now() - started
        answer.done = True

    def call(self, invocation: dict[str, Any]) -> Any:
        return getattr(self.raw_ops, self.case["op"])(**self.arguments(invocation))

    def arguments(self, invocation: dict[str, Any]) -> dict[str, Any]:
        """What the op is called with."""
        attrs = {**self.case["attrs"], **invocation.get("attrs", {})}
        inputs = {
            key: [array(x) for x in value] if isinstance(value, list) else array(value)
            for key, value in invocation.items()
            if key not in ("attrs", "after_previous_s", "f")
        }
        if self.case["op"] == "BatchFunction":
            inputs.setdefault("captured_tensors", [])
            inputs["captured_tensors"] = [self.shared(x) for x in inputs["captured_tensors"]]
            name = invocation.get("f", self.case["f"])
            inputs["f"] = self.watch(name, inputs)
            attrs.setdefault("Tout", self.types_of(name, inputs["in_tensors"]))
        return {**inputs, **attrs}

    def shared(self, x: np.ndarray) -> np.ndarray:
        """Equal captures are one object: captures are compared by identity."""
        return self.watched.setdefault(("capture", x.tobytes()), x)

    def watch(self, name: str, inputs: dict[str, Any]) -> Any:
        """The recorded function, made to note its batches and to take its time."""
        if name not in self.watched:
            body, seconds = FUNCTIONS[name], self.case.get("function_sleep_s", 0.0)
            count = body.__code__.co_argcount

            def noted(*args):
                self.batches.append([a.tolist() for a in args if np.ndim(a)])
                if seconds:
                    self.clock.sleep(seconds) if self.clock else time.sleep(seconds)
                return body(*args)

            named = {1: lambda x: noted(x), 2: lambda x, y: noted(x, y)}
            self.watched[name] = named[count]
        return self.watched[name]

    @staticmethod
    def types_of(name: str, inputs: list[np.ndarray]) -> list[str]:
        if name == "double_and_join":
            return ["string" if x.dtype == object else x.dtype.name for x in inputs]
        return [inputs[0].dtype.name] * (2 if name == "identity_and_sum" else 1)


def play(case: dict[str, Any], simulated: bool = True) -> Played:
    """Play a case in a fresh scope."""
    clock = weft.SimulatedClock(100.0) if simulated else None
    with weft.scope(clock):
        return Player(case, clock).play()
