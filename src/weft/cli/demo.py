"""The demo of the batching ops: many threads share one small model; every result and gradient is checked and shown with rich.

A third of the callers runs Batch -> model -> Unbatch and its gradient; a third calls BatchFunction; a third calls a function
made with `weft.batched` and pulls its gradient back. The figures about batches come from `weft.observe`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import weft
from weft import raw_ops

WIDTH = 80
FEATURES, HIDDEN, OUTPUTS = 16, 64, 8
#: The number of latest waits that p50 and p99 are computed from.
WAITS = 50_000
#: Seconds that a backward pass waits for the other callers' gradients.
GRADIENT_DEADLINE = 10.0
#: The width of a bar and the number beside it.
BAR = 18
#: The checks by their labels.
CHECKED = {
    "results right": "results",
    "input gradients": "gradients of inputs",
    "weight gradients": "gradients of weights",
}
COLOURS = ["cyan", "magenta", "yellow", "green", "blue", "red"]


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    callers: int = 48
    seconds: float = 6.0
    max_batch_size: int = 16
    timeout_ms: float = 5.0

    @property
    def allowed_batch_sizes(self) -> list[int]:
        """A quarter, a half and the whole of a full batch."""
        return sorted({max(1, self.max_batch_size // part) for part in (4, 2, 1)})

    @property
    def options(self) -> dict[str, Any]:
        """The options of `weft.batched`, which runs a batch from half its size."""
        return {
            "parallel": 2,
            "max_batch_size": self.max_batch_size,
            "min_batch_size": max(1, self.max_batch_size // 2),
            "max_wait": max(self.timeout_ms, 1e-3) / 1000,
            "allowed_batch_sizes": self.allowed_batch_sizes,
            "gradient_deadline": GRADIENT_DEADLINE,
        }

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of Batch and BatchFunction. Every caller has one call at a time, so no queue is ever full."""
        return {
            "num_batch_threads": 2,
            "max_batch_size": self.max_batch_size,
            "batch_timeout_micros": round(self.timeout_ms * 1000),
            "max_enqueued_batches": self.callers,
            "allowed_batch_sizes": self.allowed_batch_sizes,
            "shared_name": "demo",
        }


class Model:
    """Two layers with a tanh between them."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0).standard_normal
        self.first = draw((FEATURES, HIDDEN)) / 4
        self.second = draw((HIDDEN, OUTPUTS)) / 8

    def forward(self, x: np.ndarray) -> np.ndarray:
        """The outputs of the rows of `x`."""
        return np.asarray(np.tanh(x @ self.first) @ self.second)

    def backward(self, x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The gradients of `x`, of the first and of the second layer, from that of the outputs."""
        h = np.tanh(x @ self.first)
        dh = dy @ self.second.T * (1 - h * h)
        return dh @ self.first.T, x.T @ dh, h.T @ dy


@dataclass
class Figures:
    """The statistics of the batches of one op."""

    batches: int = 0
    calls: int = 0
    rows: int = 0
    padding: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=WAITS))
    last: weft.BatchRan | None = None


class Tally:
    """The observer: counts the batches of each op."""

    def __init__(self) -> None:
        self.of = {"Batch": Figures(), "BatchFunction": Figures(), "batched": Figures()}
        self.lock = threading.Lock()

    def batch_ran(self, event: weft.BatchRan) -> None:
        """Count a batch."""
        figures, rows = self.of[event.op], sum(event.rows)
        with self.lock:
            figures.batches += 1
            figures.calls += len(event.rows)
            figures.rows += rows
            figures.padding += event.padding
            figures.sizes[rows] += 1
            figures.reasons[event.reason] += 1
            figures.waits.extend(event.waits)
            figures.last = event

    def call_refused(self, op: str, name: str, error: Exception) -> None:
        """Do nothing: the caller gets the error, and the demo shows it."""


class Checks:
    """Counts of results that were checked and that were right, and the largest error."""

    def __init__(self) -> None:
        self.made: Counter[tuple[str, str]] = Counter()
        self.right: Counter[tuple[str, str]] = Counter()
        self.worst = 0.0
        self.errors: list[BaseException] = []
        self.lock = threading.Lock()

    def compare(self, op: str, what: str, got: np.ndarray, wanted: np.ndarray) -> None:
        """Compare a result with the expected one; they may differ by the order of summation."""
        is_right = got.shape == wanted.shape and np.allclose(got, wanted, rtol=1e-9, atol=1e-9)
        off = float(np.abs(got - wanted).max(initial=0)) if got.shape == wanted.shape else float("inf")
        with self.lock:
            self.made[op, what] += 1
            self.right[op, what] += is_right
            self.worst = max(self.worst, off)

    @property
    def all_right(self) -> bool:
        """Whether there were checks and all of them were right."""
        return bool(self.made) and self.made == self.right and not self.errors


class Demo:
    """The callers, the model and the checks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = Model()
        self.tally = Tally()
        self.checks = Checks()
        self.stop = threading.Event()
        self.callers = Counter(number % 3 for number in range(settings.callers))
        self.policy: Any = None
        self._by_hand: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._sums = [np.zeros(FEATURES * HIDDEN + HIDDEN * OUTPUTS) for _ in range(2)]  # of weights: batched, by hand
        self._adding = threading.Lock()

    # --- the callers ---

    def caller(self, number: int) -> None:
        """Call in a loop, with a random think time and number of rows."""
        draw = random.Random(number)
        rng = np.random.default_rng(number)
        think = draw.uniform(0.001, 0.02)
        most = min(self.settings.max_batch_size, draw.choice([1, 2, 4]))
        call = (self.train, self.ask, self.pull)[number % 3]
        try:
            while not self.stop.wait(draw.expovariate(1 / think)):
                call(rng.standard_normal((draw.randint(1, most), FEATURES)), rng)
        except BaseException as error:
            self.checks.errors.append(error)
            self.stop.set()

    def ask(self, x: np.ndarray, _: np.random.Generator) -> None:
        """Run the model with BatchFunction."""
        (y,) = raw_ops.BatchFunction([x], [], self.model.forward, Tout=["float64"], **self.settings.attributes)
        self.checks.compare("BatchFunction", "results", y, self.model.forward(x))

    def pull(self, x: np.ndarray, rng: np.random.Generator) -> None:
        """Call the batched model and compute the gradient of the squared error."""
        target = rng.standard_normal((len(x), OUTPUTS))
        y, pull_back = self.policy.vjp(x)
        self.checks.compare("batched", "results", y, self.model.forward(x))
        dx, *layers = self.model.backward(x, y - target)
        self._add(1, layers)
        self.checks.compare("batched", "gradients of inputs", pull_back(y - target), dx)

    def whole_batch(self, x: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """The outputs of a batch, and its pull-back, which runs once for all callers."""

        def pull_back(dy: np.ndarray) -> np.ndarray:
            dx, *layers = self.model.backward(x, dy)
            self._add(0, layers)
            return dx

        return self.model.forward(x), pull_back

    def _add(self, at: int, layers: list[np.ndarray]) -> None:
        with self._adding:
            self._sums[at] += np.concatenate([layer.ravel() for layer in layers])

    def train(self, x: np.ndarray, rng: np.random.Generator) -> None:
        """Run Batch, the model and Unbatch, and compute the gradient of the squared error."""
        model, target = self.model, rng.standard_normal((len(x), OUTPUTS))
        batch, batch_back = weft.vjp(raw_ops.Batch, [x], grad_timeout_micros=0, **self.settings.attributes)
        self._by_hand[int(batch.id)] = x, target
        (rows,) = batch.batched_tensors
        y, unbatch_back = weft.vjp(
            raw_ops.Unbatch,
            model.forward(rows),
            batch.batch_index,
            batch.id,
            timeout_micros=round(GRADIENT_DEADLINE * 1e6),
            shared_name="demo",
        )
        self.checks.compare("Unbatch", "results", y, model.forward(x))
        dy = unbatch_back(y - target)["batched_tensor"]  # UnbatchGrad: all callers' gradients to the owner of the batch
        drows, *layers = model.backward(rows, dy)
        dx = batch_back([drows])["in_tensors"][0]  # Unbatch: each caller's rows of it back to the caller
        self.checks.compare("Unbatch", "gradients of inputs", dx, model.backward(x, model.forward(x) - target)[0])
        if len(rows):
            self.check_layers(batch.batch_index[:, 0].tolist(), layers)

    def check_layers(self, ids: list[int], layers: list[np.ndarray]) -> None:
        """Compare the gradient of the weights with one computed from the inputs of the batch's callers."""
        inputs, targets = zip(*(self._by_hand.pop(id) for id in ids), strict=True)
        x = np.concatenate(inputs)
        wanted = self.model.backward(x, self.model.forward(x) - np.concatenate(targets))[1:]
        self.checks.compare(
            "Unbatch",
            "gradients of weights",
            np.concatenate([layer.ravel() for layer in layers]),
            np.concatenate([layer.ravel() for layer in wanted]),
        )

    # --- the run ---

    def run(self, show: Callable[[float], None]) -> float:
        """Run the callers for the given time and call `show` meanwhile; return the seconds it took."""
        threads = [threading.Thread(target=self.caller, args=(i,), daemon=True) for i in range(self.settings.callers)]
        with ExitStack() as stack:
            stack.enter_context(weft.scope())
            stack.enter_context(weft.gradient_deadline(GRADIENT_DEADLINE))
            stack.enter_context(weft.observe(self.tally))
            self.policy = weft.batched(self.model.forward, vjp=self.whole_batch, **self.settings.options)
            started = time.monotonic()
            for thread in threads:
                thread.start()
            try:
                while not self.stop.wait(0.125) and (passed := time.monotonic() - started) < self.settings.seconds:
                    show(passed)
            except KeyboardInterrupt:
                pass
            passed = time.monotonic() - started
            self.stop.set()
            for thread in threads:
                thread.join(15.0)
        if self.tally.of["batched"].calls:
            self.checks.compare("batched", "gradients of weights", *self._sums)
        return passed


# --- the display ---


class Screen:
    """The display of a demo: one column for each op."""

    def __init__(self, demo: Demo, console: Console) -> None:
        self.demo = demo
        self.is_unicode = console.encoding.lower().startswith("utf")
        self.is_roomy = not console.is_terminal or console.height > 31

    def picture(self, passed: float, is_over: bool = False) -> Panel:
        """The display after `passed` seconds."""
        with self.demo.tally.lock, self.demo.checks.lock:
            parts: list[RenderableType] = [*self.heading(), self.table(passed), *self.gap(), *self.verdict(is_over)]
        if not is_over:
            parts.append(self.clock(passed))
        settings = self.demo.settings
        title = (
            f"weft demo: batches of up to {settings.max_batch_size} rows, {settings.timeout_ms:g} ms to wait for more"
        )
        form = "compiled" if weft.is_compiled else "pure Python"
        return Panel(Group(*parts), title=title, subtitle=form, width=WIDTH, border_style="dim", padding=(0, 1))

    def heading(self) -> Iterator[Text]:
        demo = self.demo
        arrow = "→" if self.is_unicode else "->"
        texts = [
            f" call Batch {arrow} model {arrow} Unbatch and take the gradient back,",
            " call BatchFunction with the same model,",
            " call the model made with weft.batched and pull the gradient back.",
        ]
        for at, text in enumerate(texts):
            yield Text.assemble((f"{demo.callers[at]} threads", "bold"), text)
        yield Text()

    def gap(self) -> list[Text]:
        return [Text()] if self.is_roomy else []

    def table(self, passed: float) -> Table:
        """A column of figures, batch sizes and checks for each op."""
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("", width=16, no_wrap=True)
        for name in self.demo.tally.of:
            table.add_column(name, width=BAR, no_wrap=True)
        ops = self.demo.tally.of.values()
        sections: list[list[list[tuple[str, RenderableType]]]] = [
            [list(_figures(figures, passed)) for figures in ops],
            [list(self.sizes(figures)) for figures in ops],
            [list(self.checked(op)) for op in ("Unbatch", "BatchFunction", "batched")],
        ]
        for at, columns in enumerate(sections):
            if at and self.is_roomy:
                table.add_row()
            for cells in zip(*columns, strict=True):
                table.add_row(Text(cells[0][0], "dim"), *(cell for _, cell in cells))
        return table

    def sizes(self, figures: Figures) -> Iterator[tuple[str, RenderableType]]:
        """A histogram of the rows of batches, and the calls and padding of the latest batch."""
        bins = _bins(self.demo.settings.max_batch_size)
        counts = [sum(figures.sizes[n] for n in sizes) for sizes in bins]
        for sizes, count in zip(bins, counts, strict=True):
            label = f"{sizes[0]} to {sizes[-1]} rows" if len(sizes) > 1 else f"{sizes[0]} row" + "s" * (sizes[0] > 1)
            yield label, self.bar(count, max(counts))
        yield "latest, by call", self.latest(figures.last)

    def bar(self, count: int, most: int) -> Text:
        eighths = round(count / most * (BAR - 7) * 8) if most else 0
        if self.is_unicode:
            blocks = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
        else:
            blocks = "#" * round(eighths / 8)
        return Text.assemble((blocks, "cyan"), " " if blocks else "", (f"{count:,}", "" if count else "dim"))

    def latest(self, event: weft.BatchRan | None) -> Text:
        """A block for each call's rows, then the padding."""
        line = Text()
        if event is not None:
            scale = min(1.0, BAR / self.demo.settings.max_batch_size)
            full, empty = ("█▓", "░") if self.is_unicode else ("#=", ".")
            ends = [round(end * scale) for end in accumulate([*event.rows, event.padding])]
            for i, (start, end) in enumerate(pairwise([0, *ends])):
                is_padding = i == len(event.rows)
                style = "dim" if is_padding else COLOURS[i % len(COLOURS)]
                line.append((empty if is_padding else full[i % 2]) * (end - start), style)
        return line

    def checked(self, op: str) -> Iterator[tuple[str, RenderableType]]:
        """The number of right results."""
        checks = self.demo.checks
        for label, what in CHECKED.items():
            made, right = checks.made[op, what], checks.right[op, what]
            style = "green" if right == made else "bold red"
            yield label, Text(f"{right:,} of {made:,}", style) if made else Text("-", "dim")

    def verdict(self, is_over: bool) -> Iterator[Text]:
        checks = self.demo.checks
        for error in checks.errors:
            yield Text(f"{type(error).__name__}: {error}", "bold red")
        if checks.all_right:
            tick = "✓ " if self.is_unicode else ""
            within = f"to within {checks.worst:.0e}" if checks.worst else "exactly"
            yield Text(f"{tick}Every answer equals the one computed by hand, {within}.", "green")
        elif checks.made or is_over:
            yield Text(
                "Not every answer is right." if checks.made else "Nothing was called in so short a time.", "bold red"
            )
        else:
            yield Text()

    def clock(self, passed: float) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        seconds = self.demo.settings.seconds
        table.add_row(ProgressBar(seconds, passed, width=54), f"{passed:.1f} of {seconds:g} s")
        return table


def _figures(figures: Figures, passed: float) -> Iterator[tuple[str, RenderableType]]:
    """The lines of the table for one op."""
    batches, rows = max(figures.batches, 1), max(figures.rows + figures.padding, 1)
    p50, p99 = np.percentile(figures.waits, [50, 99]) * 1e3 if figures.waits else (0.0, 0.0)
    reasons = figures.reasons
    yield "calls per second", f"{figures.calls / passed:,.0f}"
    yield "batches", f"{figures.batches:,}"
    yield "calls in each", f"{figures.calls / batches:.1f}"
    yield "closed when full", f"{reasons['full'] + reasons['overflow']:,}"
    yield "after the wait", f"{reasons['timeout']:,}"
    yield "with enough", f"{reasons['enough']:,}"
    yield "wait p50, p99", f"{p50:.1f} ms, {p99:.1f} ms"
    yield "padding", f"{100 * figures.padding / rows:.0f} % of the rows"


def _bins(most: int, count: int = 6) -> list[range]:
    """The sizes 1 .. `most` in at most `count` ranges of one length, the last maybe shorter."""
    step = -(-most // count)
    return [range(low, min(low + step, most + 1)) for low in range(1, most + 1, step)]


def run(settings: Settings) -> int:
    """Run and show the demo; return 0 if every check was right, else 1."""
    console = Console(highlight=False)
    demo = Demo(settings)
    screen = Screen(demo, console)
    if console.is_terminal:
        with Live(screen.picture(1e-9), console=console, auto_refresh=False) as live:
            passed = demo.run(lambda passed: live.update(screen.picture(passed), refresh=True))
            live.update(screen.picture(passed, is_over=True), refresh=True)
    else:
        passed = demo.run(lambda passed: None)
        console.print(screen.picture(passed, is_over=True))
    return 0 if demo.checks.all_right else 1
