"""The demo: what it is worth that many callers share the batches of a model, its backward, and not each other's errors.

The same model is called in three ways, by turns: by each caller for itself, through `weft.batched`, and by hand with the rows of
all callers in one batch. Then all callers share a backward, and one of them makes a bad call. Every answer is checked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import weft

WIDTH = 80
BAR = 16
LAYERS, WIDTH_OF_LAYER, STEP = 48, 64, np.float32(0.1)
#: The length of one turn of one way to call, in seconds.
TURN = 0.25
#: How far two float32 results of the same row may be apart.
TOLERANCE = 1e-4


class Model:
    """A deep network: each layer adds a little to its input. A row with NaN is an error, for the whole batch.

    The layers are so small that NumPy computes each in one thread: all ways to call the model have the same threads.
    """

    def __init__(self) -> None:
        weights = np.random.default_rng(0).standard_normal((LAYERS, WIDTH_OF_LAYER, WIDTH_OF_LAYER))
        self.layers = list((weights / WIDTH_OF_LAYER**0.5).astype(np.float32))
        self.runs = 0

    def forward(self, x: np.ndarray) -> np.ndarray:
        """The outputs of the rows of `x`."""
        self.runs += 1
        if np.isnan(x).any():
            raise ValueError("a row has NaN in it")
        for layer in self.layers:
            x = x + STEP * np.tanh(x @ layer)
        return x

    def backward(self, x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The gradients of `x` and of the first layer, from that of the outputs."""
        inputs, steps = [], []
        for layer in self.layers:
            inputs.append(x)
            steps.append(np.tanh(x @ layer))
            x = x + STEP * steps[-1]
        inner = dy
        for layer, step in zip(reversed(self.layers), reversed(steps), strict=True):
            inner = STEP * dy * (1 - step * step)
            dy = dy + inner @ layer.T
        return dy, inputs[0].T @ inner


@dataclass
class Figures:
    """What one way to call the model has done so far."""

    name: str
    calls: int = 0
    runs: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.calls / self.seconds if self.seconds else 0.0

    def latency(self, percent: float) -> float:
        """A percentile of the time that a call took, in milliseconds."""
        return float(np.percentile(self.latencies, percent)) * 1e3 if self.latencies else 0.0


class Demo:
    """The callers, the model and the checks."""

    def __init__(self, callers: int, seconds: float) -> None:
        self.callers, self.seconds = callers, seconds
        self.model = Model()
        self.policy = weft.batched(self.model.forward, max_batch_size=callers)
        self.ways = [Figures("each for itself"), Figures("weft.batched"), Figures("one batch by hand")]
        self.rows = np.random.default_rng(1).standard_normal((callers, 1, WIDTH_OF_LAYER)).astype(np.float32)
        self.answers = [self.model.forward(x) for x in self.rows]
        self.checked = self.wrong = 0
        self.problems: list[str] = []
        self.gradient: str | None = None
        self.bad_call: str | None = None
        self._mutex = threading.Lock()

    def run(self, show: Callable[[], None]) -> None:
        """Run all parts; call `show` whenever there is news."""
        show()
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            for way, play in zip(self.ways, (self._alone, self._batched, self._by_hand), strict=True):
                self._turn(way, play)
                show()
        self._share_backward()
        show()
        self._call_badly()
        show()

    # --- the three ways ---

    def _turn(self, way: Figures, play: Callable[[Figures, float], None]) -> None:
        runs, started = self.model.runs, time.perf_counter()
        play(way, started + min(TURN, self.seconds / 3))
        way.seconds += time.perf_counter() - started
        way.runs += self.model.runs - runs

    def _alone(self, way: Figures, until: float) -> None:
        self._in_threads(lambda i: self._call_until(way, until, i, self.model.forward))

    def _batched(self, way: Figures, until: float) -> None:
        self._in_threads(lambda i: self._call_until(way, until, i, self.policy))

    def _by_hand(self, way: Figures, until: float) -> None:
        now = 0.0
        while now < until:
            started = time.perf_counter()
            y = self.model.forward(np.concatenate(list(self.rows)))
            now = time.perf_counter()
            self._count(way, [now - started] * len(y), list(np.split(y, len(y))), range(len(y)))

    def _call_until(self, way: Figures, until: float, i: int, call: Callable[[np.ndarray], np.ndarray]) -> None:
        latencies, answers = [], []
        now = 0.0
        while now < until:  # at least once
            started = time.perf_counter()
            answers.append(call(self.rows[i]))
            now = time.perf_counter()
            latencies.append(now - started)
        self._count(way, latencies, answers, [i] * len(answers))

    def _count(self, way: Figures, latencies: list[float], answers: list[np.ndarray], callers: Any) -> None:
        wrong = sum(not _close(y, self.answers[i]) for y, i in zip(answers, callers, strict=True))
        with self._mutex:
            way.calls += len(answers)
            way.latencies += latencies
            self.checked += len(answers)
            self.wrong += wrong

    def _in_threads(self, work: Callable[[int], None]) -> None:
        """Run `work` in a thread of each caller."""

        def guarded(i: int) -> None:
            try:
                work(i)
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(self.callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)

    # --- the backward, and the bad call ---

    def _share_backward(self) -> None:
        """Have all callers go back through one batch, and compare with each for itself."""
        layers: list[np.ndarray] = []  # the gradient of the first layer, once for each backward of a batch
        took: list[float] = []  # the model's time

        def timed(f: Callable[..., Any], *args: Any) -> Any:
            started = time.perf_counter()
            result = f(*args)
            took.append(time.perf_counter() - started)
            return result

        def with_pull_back(x: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
            def pull_back(dy: np.ndarray) -> np.ndarray:
                dx, first = timed(self.model.backward, x, dy)
                layers.append(first)
                return np.asarray(dx)

            return timed(self.model.forward, x), pull_back

        callers = self.callers
        policy = weft.batched(self.model.forward, vjp=with_pull_back, max_batch_size=callers, max_wait=5.0)
        gradients: list[Any] = [None] * callers

        def go_back(i: int) -> None:
            y, pull_back = policy.vjp(self.rows[i])
            gradients[i] = pull_back(y)

        self._in_threads(go_back)
        shared = sum(took)
        took.clear()
        alone = [timed(self.model.backward, x, timed(self.model.forward, x)) for x in self.rows]
        total = np.sum([first for _, first in alone], axis=0)
        is_right = len(layers) == 1 and _close(layers[0], total)
        is_right = is_right and all(_close(dx, want) for dx, (want, _) in zip(gradients, alone, strict=True))
        self.checked += callers + 1
        self.wrong += not is_right
        self.gradient = (
            f"Backward: {callers} callers, {len(layers)} backward, 1 weight gradient, equal to the sum of their own; "
            f"{1e3 * shared:.1f} ms of the model's time, one by one {1e3 * sum(took):.1f} ms"
        )

    def _call_badly(self) -> None:
        """Have one caller pass NaN in a batch with the others."""
        callers = self.callers
        policy = weft.batched(self.model.forward, max_batch_size=callers, max_wait=5.0)
        rows = self.rows.copy()
        rows[callers // 2] = np.nan
        answers: list[Any] = [None] * callers

        def call(i: int) -> None:
            try:
                answers[i] = policy(rows[i])
            except ValueError as error:
                answers[i] = error

        before = self.model.runs
        self._in_threads(call)
        failed = [i for i, answer in enumerate(answers) if isinstance(answer, Exception)]
        good = [i for i in range(callers) if i not in failed and _close(answers[i], self.answers[i])]
        self.checked += callers
        self.wrong += failed != [callers // 2] or len(good) != callers - 1
        self.bad_call = (
            f"A bad call in a batch of {callers}: {len(failed)} caller got the error and {len(good)} their answers; the model ran "
            f"{self.model.runs - before} times to find it"
        )

    @property
    def all_right(self) -> bool:
        """Whether answers were checked and all of them were right."""
        return bool(self.checked) and not self.wrong and not self.problems

    def comparison(self) -> str | None:
        """What batching is worth, in a sentence; None before all ways had a turn."""
        alone, batched, by_hand = (way.rate for way in self.ways)
        if not (alone and batched and by_hand):
            return None
        return (
            f"weft.batched answers {batched / alone:.1f} times as many calls as each for itself, and "
            f"{100 * batched / by_hand:.0f} % as many as one batch by hand"
        )

    def verdict(self) -> str:
        """Whether everything was right, in a sentence."""
        if self.all_right:
            return f"All {self.checked:,} answers equal those computed alone."
        return "; ".join([*self.problems[:3], f"{self.wrong} of {self.checked} answers are wrong."])


def _close(got: Any, wanted: np.ndarray) -> bool:
    return isinstance(got, np.ndarray) and got.shape == wanted.shape and bool(np.abs(got - wanted).max() < TOLERANCE)


# --- the display ---


def title(callers: int) -> str:
    """What is shown, in a line."""
    form = "compiled" if weft.is_compiled else "pure Python"
    return f"weft demo ({form}): {callers} threads call one NumPy model with a row each"


def picture(demo: Demo, passed: float) -> Panel:
    """The display of a demo in a terminal, `passed` seconds after its start."""
    texts = [demo.comparison(), demo.gradient, demo.bad_call]
    parts: list[RenderableType] = [_table(demo), Text()]
    parts += [Text(f"{text}.") if text else Text("...", "dim") for text in texts]
    if demo.bad_call is None:
        parts.append(ProgressBar(demo.seconds, passed, width=WIDTH - 4))
    else:
        parts.append(Text(demo.verdict(), "green" if demo.all_right else "bold red"))
    return Panel(Group(*parts), title=title(demo.callers), width=WIDTH, border_style="dim", padding=(0, 1))


def _table(demo: Demo) -> Table:
    """A column for each way to call the model."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("", width=17, no_wrap=True)
    for way in demo.ways:
        table.add_column(way.name, width=17, no_wrap=True)
    most = max(way.rate for way in demo.ways)
    bars = [Text("█" * round(BAR * way.rate / most) if most else "", "cyan") for way in demo.ways]
    table.add_row("", *bars)
    for label, text in _ROWS.items():
        table.add_row(Text(label, "dim"), *(text(way) if way.calls else "-" for way in demo.ways))
    return table


_ROWS: dict[str, Callable[[Figures], str]] = {
    "calls per second": lambda way: f"{way.rate:,.0f}",
    "latency p50": lambda way: f"{way.latency(50):.1f} ms",
    "latency p99": lambda way: f"{way.latency(99):.1f} ms",
    "calls in each run": lambda way: f"{way.calls / max(way.runs, 1):.1f}",
}


def run(callers: int, seconds: float) -> int:
    """Run and show the demo; return 0 if every answer was right, 1 if not, 130 if it was interrupted."""
    console = Console(highlight=False)
    try:
        with weft.scope():
            demo = Demo(callers, seconds)
            return _run_live(demo, console) if console.is_terminal else _run_plainly(demo, console)
    except KeyboardInterrupt:
        console.print("weft demo: interrupted")
        return 130


def _run_live(demo: Demo, console: Console) -> int:
    started = time.monotonic()
    with Live(picture(demo, 0.0), console=console, auto_refresh=False) as live:
        demo.run(lambda: live.update(picture(demo, time.monotonic() - started), refresh=True))
    return 0 if demo.all_right else 1


def _run_plainly(demo: Demo, console: Console) -> int:
    """Print plain lines: the first at once, the others at the end."""
    console.print(title(demo.callers), soft_wrap=True)
    demo.run(lambda: None)
    for way in demo.ways:
        figures = ", ".join(f"{label} {text(way)}" for label, text in _ROWS.items())
        console.print(f"{way.name}: {figures}", soft_wrap=True)
    for text in (demo.comparison(), demo.gradient, demo.bad_call):
        console.print(f"{text}.", soft_wrap=True)
    console.print(demo.verdict(), soft_wrap=True)
    return 0 if demo.all_right else 1
