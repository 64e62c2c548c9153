"""How fast is `weft.batched`, against those who do the same, against the bare floors, and against a batch made by hand?

    python -m benchmarks.batched [--rounds N] [--only TEXT] [--seconds N] [--save]

Every caller hands in one row and waits for its own. Peers take part where they are installed, with the same sizes and waiting
times; `batched_peers.py` has them and the floors. `by hand` is the batch that somebody made who had all rows already: no
callers, no waiting. Latencies are those of single calls in the same runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np

import weft
from benchmarks.batched_peers import TASKS, THREADS, Model, bare_step, noop
from benchmarks.batching import resident
from benchmarks.runner import Case, Load, Report, main, percentiles

PEERS = ["tensorflow", "torchrl", "batched", "hand-written queue"]


class Crowd:
    """`threads` threads that each make `calls` calls of one contestant, from a common start to the last end."""

    def __init__(self, make: Callable[[Model], Any], model: Model, threads: int, calls: int) -> None:
        self._make, self._model, self._threads, self._calls = make, model, threads, calls
        self._stack = ExitStack()
        self._body: Any = None

    def __call__(self) -> Load:
        if self._body is None:
            self._body = self._stack.enter_context(self._make(self._model))
        return crowd([self._body(i) for i in range(self._threads)], self._calls)

    def close(self) -> None:
        self._stack.close()


def crowd(crew: list[Callable[[], Any]], calls: int) -> Load:
    """Each of `crew` called `calls` times in a thread of its own, after a first time that does not count."""
    gate = threading.Barrier(len(crew) + 1)
    clock = time.perf_counter
    seen: list[list[float]] = [[] for _ in crew]

    def work(once: Callable[[], Any], latencies: list[float]) -> None:
        once()
        gate.wait()
        for _ in range(calls):
            started = clock()
            once()
            latencies.append(clock() - started)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(crew, seen, strict=True)]
    for thread in threads:
        thread.start()
    gate.wait()
    started = clock()
    for thread in threads:
        thread.join()
    return Load(clock() - started, [x for latencies in seen for x in latencies])


class Tasks:
    """`tasks` tasks of an event loop that each make `calls` calls of one contestant."""

    def __init__(self, make: Callable[[Model], Any], model: Model, tasks: int, calls: int) -> None:
        self._make, self._model, self._tasks, self._calls = make, model, tasks, calls
        self._stack = ExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ask: Any = None

    def __call__(self) -> Load:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._ask = self._stack.enter_context(self._make(self._model))
        return self._loop.run_until_complete(self._all())

    async def _all(self) -> Load:
        clock, seen = time.perf_counter, []

        async def one(x: Any) -> None:
            for _ in range(self._calls):
                started = clock()
                await self._ask(x)
                seen.append(clock() - started)

        rows = [self._model.row(i) for i in range(self._tasks)]
        started = clock()
        await asyncio.gather(*map(one, rows))
        return Load(clock() - started, seen)

    def close(self) -> None:
        self._stack.close()
        assert self._loop is not None
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


def targets(contestants: dict[str, Any], **floors: float) -> dict[str, float]:
    """Ahead of every peer, and not far behind the floors, which are named with an underscore for a space."""
    return {name: 1.0 for name in contestants if name in PEERS} | {k.replace("_", " "): v for k, v in floors.items()}


# --- the meeting alone ---


def noop_case(threads: int, calls: int) -> Case:
    crews = {who: Crowd(make, Model(noop), threads, calls) for who, make in THREADS.items()}
    name = f"no-op, {threads} thread{'s' if threads > 1 else ''}"
    return Case(name, crews, units=threads * calls, targets=targets(crews, bare=0.7))


def noop_tasks_case(tasks: int, calls: int) -> Case:
    crews = {who: Tasks(make, Model(noop), tasks, calls) for who, make in TASKS.items()}
    return Case(f"no-op, {tasks} tasks", crews, units=tasks * calls, targets=targets(crews, bare=0.7))


# --- models ---


def mlp(width: int, hidden: int) -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, width)
    )


def transformer(tokens: int, width: int) -> Any:
    """A block over `tokens` tokens of `width`, given as one row."""
    from torch import nn

    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (tokens, width)), block, nn.Flatten())


def model_case(name: str, net: Callable[[], Any], width: int, wait: float, calls: int, slow: bool) -> Case:
    """64 callers of a torch model; a slow one is compared with the batch made by hand, a quick one with the floor."""
    import torch

    built = cache(net)  # a model that is not asked for is not made

    def f(x: Any) -> Any:
        with torch.inference_mode():
            return built()(x)

    model = Model(f, width, 64, wait, is_torch=True)

    def by_hand() -> None:
        rows = [model.row(i) for i in range(64)]
        for _ in range(calls):
            f(torch.cat(rows))

    crews: dict[str, Any] = {who: Crowd(make, model, 64, calls) for who, make in THREADS.items()}
    crews["by hand"] = by_hand
    floor = {"by_hand": 0.9} if slow else {"bare": 0.7}
    return Case(f"{name}, 64 threads", crews, units=64 * calls, targets=targets(crews, **floor))


# --- forward and backward ---


def step_case(callers: int, rows: int, width: int, hidden: int, steps: int, slow: bool) -> Case:
    """`callers` callers that each go forward, take a loss of their own and go back, against the same for the whole batch."""
    import torch

    net = cache(lambda: mlp(width, hidden))
    policy = weft.batched(lambda x: net()(x), max_batch_size=callers * rows, max_wait=1.0)
    inputs = [torch.randn(rows, width) for _ in range(callers)]

    def loss(y: Any) -> Any:
        return y.square().sum()

    def ours() -> Load:
        return crowd([lambda x=x: loss(policy(x)).backward() for x in inputs], steps)

    def by_hand() -> None:
        for _ in range(steps):
            loss(net()(torch.cat(inputs))).backward()

    def with_losses() -> float:
        """The step by hand, and every caller's loss on rows of its own, in as many threads."""
        started = time.perf_counter()
        by_hand()
        leaves = [torch.randn(rows, width, requires_grad=True) for _ in inputs]
        return time.perf_counter() - started + crowd([lambda x=x: loss(x).backward() for x in leaves], steps).seconds

    def naive() -> None:
        """What one would write: slices of one result, each taken back by itself through the whole graph."""
        for _ in range(steps):
            parts = net()(torch.cat(inputs)).split(rows)
            for part in parts:
                loss(part).backward(retain_graph=True)

    bare_policy = bare_step(net, callers, rows)

    def bare() -> Load:
        return crowd([lambda x=x: loss(bare_policy(x)).backward() for x in inputs], steps)

    crews: dict[str, Any] = {
        "weft": ours,
        "bare": bare,
        "by hand": by_hand,
        "by hand, and the losses in threads": with_losses,
    }
    if callers == 8 or (callers == 64 and not slow):  # else it takes seconds
        crews["retain_graph"] = naive
    aim = {"by hand": 0.67} if slow else {"by hand, and the losses in threads": 0.5}
    kind = "large" if slow else "small"
    return Case(f"forward and backward, {kind}, {callers} threads", crews, units=steps, unit="steps", targets=aim)


# --- actors that could be one array ---


def actors_case(actors: int, steps: int) -> Case:
    """Carts with poles: each in a thread that shares the policy, and all in one array."""
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)).eval()

    def act(states: Any) -> Any:
        with torch.inference_mode():
            return net(torch.from_numpy(states)).argmax(1).numpy()

    policy = weft.batched(act, max_batch_size=actors)

    def in_threads() -> Load:
        def actor() -> Callable[[], Any]:
            carts = Carts(1)
            return lambda: carts.step(policy(carts.states))

        return crowd([actor() for _ in range(actors)], steps)

    def in_one_array() -> None:
        carts = Carts(actors)
        for _ in range(steps):
            carts.step(act(carts.states))

    return Case(
        f"{actors} actors with a tiny policy", {"weft": in_threads, "vectorised": in_one_array}, actors * steps, "steps"
    )


class Carts:
    """Carts on which poles stand; those whose pole has fallen begin again."""

    def __init__(self, count: int) -> None:
        self.states = np.zeros((count, 4), np.float32)

    def step(self, actions: Any) -> None:
        """Push each cart to the left or to the right for 20 ms."""
        x, speed, angle, turn = self.states.T
        force = np.where(actions == 1, 10.0, -10.0)
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (force + 0.05 * turn**2 * sine) / 1.1
        falling = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        moved = push - 0.05 * falling * cosine / 1.1
        new = np.stack([x + 0.02 * speed, speed + 0.02 * moved, angle + 0.02 * turn, turn + 0.02 * falling], axis=1)
        new[(np.abs(new[:, 0]) > 2.4) | (np.abs(new[:, 2]) > 0.21)] = 0
        self.states = new.astype(np.float32)


# --- what a table cannot say ---


def invalid_calls(_: argparse.Namespace) -> str:
    """Of 8 callers one hands in what the model refuses, 20 times: how many of the other 140 calls are answered."""

    def f(x: Any) -> Any:
        if float(x.min()) < 0:
            raise ValueError("a row is negative")
        return x

    lines = []
    for who, make in THREADS.items():
        if who == "bare":
            continue
        model = Model(f, wait=0.01, size=8)
        if who == "tensorflow":
            model.f, model.is_torch = lambda x: f(x), True
        with make(model) as body:
            lines.append(f"{who} {good_answers([body(-64 if i == 3 else i + 1) for i in range(8)])}")
    return "of 140 good calls beside 20 bad ones were answered: " + ", ".join(lines)


def good_answers(crew: list[Callable[[], Any]], rounds: int = 20) -> int:
    good = 0
    for _ in range(rounds):
        answered: list[int] = []

        def one(i: int, once: Callable[[], Any], answered: list[int] = answered) -> None:
            try:
                once()
            except Exception:
                return
            answered.append(i)

        threads = [threading.Thread(target=one, args=pair) for pair in enumerate(crew)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        good += len(set(answered) - {3})
    return good


def open_loop(options: argparse.Namespace) -> str:
    """Calls come at 80 % of what is answered when too many come, whatever has become of those before."""
    import torch

    torch.manual_seed(0)
    net = mlp(64, 512).eval()

    @weft.batched(max_batch_size=64, max_queue=4096)
    def policy(x: Any) -> Any:
        with torch.inference_mode():
            return net(x)

    x = torch.ones(1, 64)
    _, capacity = asyncio.run(_open_loop(policy, x, 5.0, 2.5e4))
    report, _ = asyncio.run(_open_loop(policy, x, options.seconds, 0.8 * capacity))
    return f"capacity {capacity:,.0f} calls/s; {report}"


async def _open_loop(policy: Any, x: Any, seconds: float, rate: float, deadline: float = 1.0) -> tuple[str, float]:
    """What becomes of calls that come at a rate, and how many are answered in a second."""
    rng = np.random.default_rng(0)
    latencies: list[float] = []
    late = refused = past = 0
    clock = time.perf_counter

    async def one() -> None:
        nonlocal late, refused, past
        started = clock()
        try:
            await policy.aio.call(x, deadline=deadline)
        except weft.errors.DeadlineExceededError:
            late += 1
        except weft.errors.UnavailableError:
            refused += 1
        else:
            latencies.append(clock() - started)
            past += latencies[-1] > deadline

    began = due = clock()
    sizes, made, tasks = [], 0, set()
    marks = [began + seconds / 6, began + seconds]
    while clock() < began + seconds:
        while due <= clock():
            task = asyncio.ensure_future(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            made += 1
            due += rng.exponential(1 / rate)
        await asyncio.sleep(
            0.001
        )  # a loop that never rests would keep the interpreter from the thread that runs the model
        if clock() >= marks[0]:
            sizes.append(resident() / 1024)
            marks = marks[1:] or [float("inf")]
    took = clock() - began
    await asyncio.gather(*tasks)
    sizes.append(resident() / 1024)
    lost = made - len(latencies) - late - refused
    p50, p99 = percentiles(latencies)
    return (
        f"{made:,} calls in {took:.0f} s ({made / took:,.0f}/s): {len(latencies):,} answered, "
        f"{lost} lost, {late} told of their deadline of {deadline:g} s, {past} answered after it, {refused} refused; "
        f"latency p50 {1e3 * p50:.2f} ms, p99 {1e3 * p99:.2f} ms; mean batch {policy.statistics().mean_size:.1f}; "
        f"memory {sizes[0]:.1f} MiB after a sixth of the time, {sizes[-1]:.1f} MiB at the end"
    ), len(latencies) / took


def memory(_: argparse.Namespace, calls: int = 400_000) -> str:
    """How much the process has grown after many calls: the resident size after a tenth of them, and after all."""
    policy = weft.batched(noop, max_batch_size=64)
    x = np.zeros((1, 16), np.float32)
    sizes = []
    for share in (calls // 10, calls - calls // 10):
        for _i in range(share):
            policy(x)
        gc.collect()
        sizes.append(resident() / 1024)
    return f"after {calls // 10:,} calls {sizes[0]:.1f} MiB, after {calls:,} {sizes[1]:.1f} MiB"


def questions() -> list[Case | Report]:
    """All of them, with the ratios that are to be reached.

    Those without peers come first: a thread of TensorFlow's for each batched function, and one of the package `batched`, look
    for work every millisecond until the process ends, and half of these looks take the interpreter.
    """
    return [
        step_case(8, 1, 64, 256, 20, slow=False),
        step_case(64, 1, 64, 256, 10, slow=False),
        step_case(256, 1, 64, 256, 3, slow=False),
        step_case(8, 96, 512, 2048, 2, slow=True),
        step_case(64, 12, 512, 2048, 2, slow=True),
        step_case(256, 3, 512, 2048, 2, slow=True),
        actors_case(32, 50),
        Report("open loop at 80 %", open_loop),
        Report("memory", memory),
        noop_tasks_case(1, 2000),
        noop_tasks_case(64, 60),
        noop_tasks_case(1000, 10),
        noop_case(1, 2000),
        noop_case(8, 400),
        noop_case(64, 60),
        model_case("small MLP", lambda: mlp(64, 512), 64, 0.0, 20, slow=False),
        model_case("small transformer block", lambda: transformer(8, 32), 256, 0.0, 20, slow=False),
        model_case("large MLP", lambda: mlp(1024, 4096), 1024, 0.01, 10, slow=True),
        model_case("large transformer block", lambda: transformer(32, 128), 4096, 0.01, 10, slow=False),
        Report("one bad call of 8", invalid_calls),
    ]


if __name__ == "__main__":
    main("batched", "weft.batched: one forward and one backward for many callers", questions)
